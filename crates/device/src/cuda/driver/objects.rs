//! Types that each own one driver object: events, streams, device memory, pins. Dropping one
//! destroys the object, or counts it as leaked.

#![allow(unsafe_code)]

use super::{CAPTURES, Gpu, Handle, NOT_READY, after_captures, note_leak};
use crate::backend::DevicePtr;
use crossbeam_channel::Sender;
use feedline_base::PAGE;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

const EVENT_BLOCKING: c_uint = 1;
const EVENT_NO_TIMING: c_uint = 2;
const STREAM_NON_BLOCKING: c_uint = 1;

/// An event: marks a point in a stream's work.
pub(crate) struct Event {
    pub(crate) gpu: Arc<Gpu>,
    pub(super) raw: Handle,
}

impl Event {
    /// An event for stream waits and queries: without timing or interrupts, which is fastest in the
    /// driver.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        Self::with(gpu, EVENT_NO_TIMING)
    }

    /// An event with a timestamp.
    pub(crate) fn timed(gpu: &Arc<Gpu>) -> Result<Self> {
        Self::with(gpu, 0)
    }

    /// An event for [`wait`](Self::wait): its waiters sleep.
    pub(crate) fn blocking(gpu: &Arc<Gpu>) -> Result<Self> {
        Self::with(gpu, EVENT_BLOCKING | EVENT_NO_TIMING)
    }

    fn with(gpu: &Arc<Gpu>, flags: c_uint) -> Result<Self> {
        let _bound = gpu.bind()?;
        let mut raw = 0;
        // SAFETY: the pointer is valid for the call.
        let code = unsafe { (gpu.driver.symbols.event_create)(&mut raw, flags) };
        gpu.check("cuEventCreate", code)?;
        Ok(Self {
            gpu: gpu.clone(),
            raw,
        })
    }

    /// Records the event after all work enqueued on `stream` so far.
    pub(crate) fn record(&self, stream: Handle) -> Result<()> {
        let _bound = self.gpu.enter()?;
        // SAFETY: the event is alive, the stream by the contract of `Stream` or as our own.
        self.gpu.check("cuEventRecord", unsafe {
            (self.gpu.driver.symbols.event_record)(self.raw, stream)
        })
    }

    /// Like [`record`](Self::record), but for a consumer's stream, which may be capturing.
    ///
    /// Errors: as [`Gpu::check_uncaptured`], because an event recorded in a capture means nothing.
    pub(crate) fn mark(&self, stream: Handle) -> Result<()> {
        let _bound = self.gpu.enter()?;
        self.gpu.check_uncaptured(stream)?;
        self.record(stream)
    }

    /// Whether the event has been reached. An event never recorded counts as reached.
    pub(crate) fn is_done(&self) -> Result<bool> {
        let _bound = self.gpu.bind()?;
        // SAFETY: the event is alive.
        match unsafe { (self.gpu.driver.symbols.event_query)(self.raw) } {
            NOT_READY => Ok(false),
            // A capture forbids the query.
            code if CAPTURES.contains(&code) => Ok(false),
            code => self.gpu.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Nanoseconds on the device from this event to `end`; 0 if `end` came first. Both must be
    /// timed and reached. The device's clock ticks about every 500 ns.
    pub(crate) fn until(&self, end: &Self) -> Result<u64> {
        let _bound = self.gpu.bind()?;
        let mut ms = 0.0_f32;
        // SAFETY: the pointer is valid for the call, both events are alive.
        let code = unsafe { (self.gpu.driver.symbols.event_elapsed)(&mut ms, self.raw, end.raw) };
        self.gpu.check("cuEventElapsedTime", code)?;
        Ok((f64::from(ms) * 1e6).max(0.0) as u64)
    }

    /// Waits until the event is reached. The thread sleeps only if the event is
    /// [`blocking`](Self::blocking).
    pub(crate) fn wait(&self) -> Result<()> {
        let _bound = self.gpu.bind()?;
        // SAFETY: the event is alive.
        let code =
            after_captures(|| unsafe { (self.gpu.driver.symbols.event_synchronize)(self.raw) });
        self.gpu.check("cuEventSynchronize", code)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_bound) = self.gpu.bind() else {
            return note_leak();
        };
        // SAFETY: created by `new`, destroyed once. The driver defers this until a pending event
        // has been reached.
        self.gpu.released("cuEventDestroy", || unsafe {
            (self.gpu.driver.symbols.event_destroy)(self.raw)
        });
    }
}

/// A stream that this crate owns. It is not ordered with the legacy default stream.
pub(crate) struct CopyStream {
    gpu: Arc<Gpu>,
    raw: Handle,
}

impl CopyStream {
    /// A stream of the default priority.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        Self::with(gpu, 0)
    }

    /// A stream of the highest priority: its kernels get the next free multiprocessors before other
    /// streams' kernels.
    pub(crate) fn preferred(gpu: &Arc<Gpu>) -> Result<Self> {
        let _bound = gpu.bind()?;
        let mut least = 0;
        let mut greatest = 0;
        // SAFETY: the pointers are valid for the call.
        let code = unsafe { (gpu.driver.symbols.stream_priorities)(&mut least, &mut greatest) };
        gpu.check("cuCtxGetStreamPriorityRange", code)?;
        Self::with(gpu, greatest)
    }

    fn with(gpu: &Arc<Gpu>, priority: c_int) -> Result<Self> {
        let _bound = gpu.bind()?;
        let mut raw = 0;
        let create = gpu.driver.symbols.stream_create;
        // SAFETY: the pointer is valid for the call.
        gpu.check("cuStreamCreateWithPriority", unsafe {
            create(&mut raw, STREAM_NON_BLOCKING, priority)
        })?;
        Ok(Self {
            gpu: gpu.clone(),
            raw,
        })
    }

    pub(crate) fn raw(&self) -> Handle {
        self.raw
    }

    /// Rings the bell when the stream's work so far is done; never if the context breaks.
    pub(crate) fn ring(&self, bell: &Arc<Sender<()>>) -> Result<()> {
        unsafe extern "C" fn ring(bell: *mut c_void) {
            // SAFETY: the pointer from `into_raw` below, once per call.
            let bell = unsafe { Arc::from_raw(bell.cast_const().cast::<Sender<()>>()) };
            // If the channel is full, the bell is already ringing.
            let _ = bell.try_send(());
        }
        let _bound = self.gpu.bind()?;
        let data = Arc::into_raw(bell.clone());
        // SAFETY: the stream is alive; the callback makes no CUDA calls, and owns its argument.
        let code =
            unsafe { (self.gpu.driver.symbols.host_func)(self.raw, ring, data.cast_mut().cast()) };
        self.gpu.check("cuLaunchHostFunc", code).inspect_err(|_| {
            // SAFETY: a failed call has not taken ownership.
            drop(unsafe { Arc::from_raw(data) });
        })
    }

    /// Waits for all work on the stream.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _bound = self.gpu.bind()?;
        // SAFETY: the stream is alive.
        let code =
            after_captures(|| unsafe { (self.gpu.driver.symbols.stream_synchronize)(self.raw) });
        self.gpu.check("cuStreamSynchronize", code)
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        let Ok(_bound) = self.gpu.bind() else {
            return note_leak();
        };
        // SAFETY: created by `new`, destroyed once; the driver lets pending work end first.
        self.gpu.released("cuStreamDestroy", || unsafe {
            (self.gpu.driver.symbols.stream_destroy)(self.raw)
        });
    }
}

/// Device memory.
pub(crate) struct DeviceMemory {
    pub(crate) gpu: Arc<Gpu>,
    /// The driver's pointer, 0 once leaked.
    given: DevicePtr,
    /// The first page boundary in the allocation, where the usable memory starts.
    ptr: DevicePtr,
    len: usize,
}

impl DeviceMemory {
    /// Reserves `len` bytes, starting at a page boundary, because the driver aligns small
    /// allocations to less than cuFile needs.
    ///
    /// Errors: [`ErrorKind::Budget`] with the free bytes if the device has too little memory.
    pub(crate) fn new(gpu: &Arc<Gpu>, len: usize, what: &str) -> Result<Self> {
        let bound = gpu.bind()?;
        let mut ptr = 0;
        // SAFETY: the pointer is valid for the call.
        let code = unsafe { (gpu.driver.symbols.mem_alloc)(&mut ptr, len.saturating_add(PAGE)) };
        drop(bound);
        // 2: out of memory.
        if code == 2 {
            let free = gpu.memory().map_or(0, |(free, _)| free);
            let need = len as u64;
            let message = format!(
                "cuda:{} has no {len} bytes for {what}: {free} of {} bytes are free; free \
                 memory that other libraries of this process keep in their caches, or use a \
                 smaller batch or fewer device batches",
                gpu.ordinal(),
                gpu.bytes
            );
            return Err(Error::new(ErrorKind::Budget, Stage::Device, message)
                .with_amounts(need, free as u64));
        }
        gpu.check("cuMemAlloc", code)?;
        Ok(Self {
            gpu: gpu.clone(),
            given: ptr,
            ptr: ptr.next_multiple_of(PAGE as DevicePtr),
            len,
        })
    }

    /// Device memory with a copy of these bytes. Waits for the copy.
    pub(crate) fn holding(gpu: &Arc<Gpu>, bytes: &[u8], what: &str) -> Result<Self> {
        let memory = Self::new(gpu, bytes.len(), what)?;
        let stream = CopyStream::new(gpu)?;
        let _bound = gpu.bind()?;
        // SAFETY: the memory is new and as long as the bytes, which stay borrowed until the copy
        // has ended.
        let copied =
            unsafe { gpu.copy_to_device(memory.ptr, bytes.as_ptr(), bytes.len(), stream.raw()) };
        let waited = stream.synchronize();
        if waited.is_err() {
            // If this fails too, the context is broken, and runs nothing any more.
            let _ = gpu.synchronize();
        }
        copied.and(waited).map(|()| memory)
    }

    /// Leaks the memory for ever. Leaks the context, too, because destroying it would free the
    /// memory.
    pub(crate) fn leak(&mut self) {
        self.given = 0;
        std::mem::forget(self.gpu.clone());
        note_leak();
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Enqueues zeroing of `bytes` bytes from `from` on `stream`.
    pub(crate) fn clear(&self, from: usize, bytes: usize, stream: Handle) -> Result<()> {
        assert!(
            from.checked_add(bytes).is_some_and(|end| end <= self.len),
            "outside of the allocation"
        );
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.gpu.bind()?;
        let start = self.ptr + from as DevicePtr;
        // SAFETY: within the allocation by the assertion above; the allocation is alive by the
        // borrow during the call; its owner waits for the stream before freeing it.
        self.gpu.check("cuMemsetD8Async", unsafe {
            (self.gpu.driver.symbols.fill)(start, 0, bytes, stream)
        })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.given == 0 {
            return;
        }
        let Ok(_bound) = self.gpu.bind() else {
            return note_leak();
        };
        // SAFETY: allocated by `new`, freed once; the owner has waited for all users.
        self.gpu.released("cuMemFree", || unsafe {
            (self.gpu.driver.symbols.mem_free)(self.given)
        });
    }
}

/// Pinned host memory, which the device reads at bus speed and without the CPU.
pub(crate) struct Pin {
    gpu: Arc<Gpu>,
    start: usize,
}

impl Pin {
    /// Pins `len` bytes at `start`.
    ///
    /// # Safety
    /// The memory must stay mapped until the `Pin` is released.
    pub(crate) unsafe fn new(gpu: &Arc<Gpu>, start: *mut u8, len: usize) -> Result<Self> {
        // For every context of the process, because several devices may copy from one slot.
        const PORTABLE: c_uint = 1;
        let _bound = gpu.bind()?;
        // SAFETY: the caller's promise.
        let code = after_captures(|| unsafe {
            (gpu.driver.symbols.host_register)(start.cast(), len, PORTABLE)
        });
        gpu.check("cuMemHostRegister", code)?;
        Ok(Self {
            gpu: gpu.clone(),
            start: start as usize,
        })
    }

    /// Unpins the memory. Returns false, and counts a leak, if the device may still read it; it
    /// must then stay mapped for ever.
    pub(crate) fn release(&self) -> bool {
        let released = self.gpu.bind().and_then(|_bound| {
            // SAFETY: registered by `new`; the memory is still mapped by its promise.
            let code = after_captures(|| unsafe {
                (self.gpu.driver.symbols.host_unregister)(self.start as *mut c_void)
            });
            self.gpu.check("cuMemHostUnregister", code)
        });
        released.inspect_err(|_| note_leak()).is_ok()
    }
}
