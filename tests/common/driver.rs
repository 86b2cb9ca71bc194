//! The driver as a program without this crate uses it: memory, copies, events, and a slow kernel.
//! Its measurements are the physical limit beside the crate's figures.
//!
//! Every object waits for the device before it gives its memory back, so that the functions here
//! are safe to call.

#![allow(dead_code, reason = "each binary uses its own part")]
#![allow(unsafe_code)]

use feedline::Batch;
use feedline::FieldView;
use feedline::device::cuda::cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};
use feedline::dlpack::{DLDevice, DLManagedTensorVersioned, Dlpack};
use feedline::unstable::DLDataType;
use memmap2::{Advice, MmapMut};
use std::ffi::{CString, c_uint, c_void};
use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Failures are text for people.
pub type Result<T> = std::result::Result<T, String>;

/// Waits for `ns` nanoseconds of the GPU's clock, but at most `turns` turns of its loop, in case
/// that clock stands still.
const SPIN: &str = "
.version 7.0
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 ns, .param .u64 turns)
{
    .reg .pred %p<3>;
    .reg .b64 %r<7>;
    ld.param.u64 %r1, [ns];
    ld.param.u64 %r2, [turns];
    mov.u64 %r3, %globaltimer;
    mov.u64 %r4, 0;
AGAIN:
    mov.u64 %r5, %globaltimer;
    sub.u64 %r6, %r5, %r3;
    add.u64 %r4, %r4, 1;
    setp.lt.u64 %p1, %r6, %r1;
    setp.lt.and.u64 %p2, %r4, %r2, %p1;
    @%p2 bra AGAIN;
    ret;
}
";

/// Our own kernels, called without a loader.
const KERNELS: &str = include_str!("../../crates/device/src/cuda/kernels/finish.ptx");

pub fn said<E: Debug>(what: &'static str) -> impl Fn(E) -> String {
    move |error| format!("{what}: {error:?}")
}

/// The first device, by its primary context.
pub struct Gpu {
    pub context: Arc<CudaContext>,
    modules: [sys::CUmodule; 2],
    spin: sys::CUfunction,
    gather: sys::CUfunction,
}

impl Gpu {
    /// Only after `feedline::unstable::devices()` has found one: without a library cudarc panics.
    pub fn new() -> Result<Self> {
        let context = CudaContext::new(0).map_err(said("cuDevicePrimaryCtxRetain"))?;
        let (one, spin) = load(SPIN, "spin")?;
        let (two, gather) = load(KERNELS, "feedline_gather")?;
        Ok(Self {
            context,
            modules: [one, two],
            spin,
            gather,
        })
    }

    pub fn stream(&self) -> Result<Arc<CudaStream>> {
        self.context.new_stream().map_err(said("cuStreamCreate"))
    }

    /// An event that tells the time.
    pub fn event(&self) -> Result<CudaEvent> {
        self.context
            .new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))
            .map_err(said("cuEventCreate"))
    }

    /// Free bytes of device memory.
    pub fn free_bytes(&self) -> Result<usize> {
        enter(&self.context)?;
        let (free, _) = result::mem_get_info().map_err(said("cuMemGetInfo"))?;
        Ok(free)
    }

    pub fn attribute(&self, attribute: sys::CUdevice_attribute) -> Option<i32> {
        self.context.attribute(attribute).ok()
    }

    /// `stream` is busy for that long.
    pub fn spin(&self, stream: &CudaStream, time: Duration) -> Result<()> {
        let mut ns = time.as_nanos() as u64;
        // A turn takes longer than 4 ns on any GPU, so this limit is the later one where the clock
        // runs.
        let mut turns = ns / 4 + 1000;
        let mut params = [place(&mut ns), place(&mut turns)];
        self.launch(self.spin, stream, [1, 1, 1], [1, 1, 1], &mut params)
    }

    /// Row `i` of `out` becomes the `row_bytes` bytes of `staging` from `offsets[i]` on. By `count`
    /// launches of this grid and block, one after the other; returns the milliseconds of one.
    pub fn gather(
        &self,
        stream: &CudaStream,
        (staging, offsets): (&DeviceBytes, &[u64]),
        row_bytes: usize,
        out: &DeviceBytes,
        [grid, block]: [[u32; 3]; 2],
        count: u32,
    ) -> Result<f64> {
        let last = offsets.iter().max();
        assert!(last.is_none_or(|last| *last as usize + row_bytes <= staging.len));
        assert!(offsets.len() * row_bytes <= out.len && staging.len.is_multiple_of(4));
        let list = DeviceBytes::new(self, (8 * offsets.len()).max(8))?;
        list.write(0, bytemuck::cast_slice(offsets))?;
        let mut from = staging.ptr;
        let mut at = list.ptr;
        let mut to = out.ptr;
        let mut bytes = row_bytes as u64;
        let mut rows = offsets.len() as u64;
        let mut params = [
            place(&mut from),
            place(&mut at),
            place(&mut to),
            place(&mut bytes),
            place(&mut rows),
        ];
        let begin = self.event()?;
        let end = self.event()?;
        begin.record(stream).map_err(said("cuEventRecord"))?;
        (0..count).try_for_each(|_| self.launch(self.gather, stream, grid, block, &mut params))?;
        end.record(stream).map_err(said("cuEventRecord"))?;
        let ms = begin.elapsed_ms(&end).map_err(said("cuEventElapsedTime"))?;
        Ok(f64::from(ms) / f64::from(count))
    }

    /// Private: the callers above pass what the kernels declare.
    fn launch(
        &self,
        function: sys::CUfunction,
        stream: &CudaStream,
        grid: [u32; 3],
        block: [u32; 3],
        params: &mut [*mut c_void],
    ) -> Result<()> {
        enter(&self.context)?;
        let stream = stream.cu_stream();
        // SAFETY: the parameters are the kernel's, in order and of its types; they point into
        // allocations whose owners wait for the device before they free them.
        unsafe { result::launch_kernel(function, grid.into(), block.into(), 0, stream, params) }
            .map_err(said("cuLaunchKernel"))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        settle(&self.context);
        for module in self.modules {
            // SAFETY: loaded by `new`, unloaded once; nothing runs any more.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

/// Strictness of a capture about other calls meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Captures {
    /// PyTorch's way: certain calls of any thread in the default mode end the capture.
    Global,
    /// Those of the capturing thread alone do.
    ThreadLocal,
    /// None does.
    Relaxed,
}

impl Captures {
    pub const ALL: [Self; 3] = [Self::Global, Self::ThreadLocal, Self::Relaxed];

    fn mode(self) -> sys::CUstreamCaptureMode {
        match self {
            Self::Global => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            Self::ThreadLocal => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            Self::Relaxed => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        }
    }
}

impl Gpu {
    /// Captures a graph from `stream` while `work` runs, and destroys it.
    ///
    /// Errors: those of `work`; a capture that was ended by a call of somebody else (901).
    pub fn capture(
        &self,
        stream: &CudaStream,
        mode: Captures,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        enter(&self.context)?;
        // SAFETY: the stream is alive; no pointers go in.
        unsafe { sys::cuStreamBeginCapture_v2(stream.cu_stream(), mode.mode()) }
            .result()
            .map_err(said("cuStreamBeginCapture"))?;
        let worked = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the same stream, on the same thread; the driver writes to one live pointer.
        let ended = unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph) }.result();
        if !graph.is_null() {
            // SAFETY: it was just made, and nobody else has it.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        worked.and(ended.map_err(said("cuStreamEndCapture")))
    }
}

/// Whether the primary context of a GPU exists in this process.
pub fn is_active(ordinal: i32) -> Result<bool> {
    let mut flags = 0;
    let mut active = 0;
    let device = result::device::get(ordinal).map_err(said("cuDeviceGet"))?;
    // SAFETY: the driver writes to two live integers.
    unsafe { sys::cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) }
        .result()
        .map_err(said("cuDevicePrimaryCtxGetState"))?;
    Ok(active != 0)
}

/// Binds a batch to a stream by its bare handle, as other languages do, then works with the batch
/// and drops it.
pub fn with_bare<T>(
    stream: &Arc<CudaStream>,
    batch: Batch,
    work: impl FnOnce(&Batch) -> Result<T>,
) -> Result<T> {
    // SAFETY: the batch is dropped below, while the caller's stream is borrowed.
    let bare = unsafe { feedline::device::cuda::Stream::from_raw(stream.cu_stream() as usize) };
    batch.bind(bare).map_err(|error| error.to_string())?;
    let done = work(&batch);
    drop(batch);
    done
}

fn load(text: &str, name: &str) -> Result<(sys::CUmodule, sys::CUfunction)> {
    let text = CString::new(text).map_err(said("PTX"))?;
    let name = CString::new(name).map_err(said("PTX"))?;
    // SAFETY: the text ends with a zero, and is read during the call.
    let module = unsafe { result::module::load_data(text.as_ptr().cast()) }
        .map_err(said("cuModuleLoadData"))?;
    // SAFETY: the module is alive.
    let function = unsafe { result::module::get_function(module, name) }
        .map_err(said("cuModuleGetFunction"))?;
    Ok((module, function))
}

fn place<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

fn enter(context: &CudaContext) -> Result<()> {
    context.bind_to_thread().map_err(said("cuCtxSetCurrent"))
}

/// Binds the context, and waits until nothing runs in it.
fn settle(context: &CudaContext) {
    let _ = context.bind_to_thread();
    let _ = context.synchronize();
}

const PORTABLE: c_uint = sys::CU_MEMHOSTREGISTER_PORTABLE as c_uint;

/// Kinds of host memory that a copy to the device may start from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Anonymous memory in huge pages, populated and then pinned: what the crate does.
    Registered,
    /// `cuMemHostAlloc`.
    HostAlloc,
    /// The same, write-combined.
    WriteCombined,
    /// Anonymous memory in huge pages that is not pinned.
    Pageable,
}

impl Kind {
    pub const ALL: [Self; 4] = [
        Self::Registered,
        Self::HostAlloc,
        Self::WriteCombined,
        Self::Pageable,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::HostAlloc => "host-alloc",
            Self::WriteCombined => "write-combined",
            Self::Pageable => "pageable",
        }
    }
}

/// Host memory of a kind.
pub struct HostBytes {
    context: Arc<CudaContext>,
    kind: Kind,
    ptr: *mut c_void,
    len: usize,
    /// Of the kinds that are mapped.
    map: Option<MmapMut>,
    /// What pinning or reserving it took.
    pub made_in: Duration,
}

impl HostBytes {
    pub fn new(gpu: &Gpu, kind: Kind, len: usize) -> Result<Self> {
        enter(&gpu.context)?;
        let context = gpu.context.clone();
        let flags = match kind {
            Kind::WriteCombined => sys::CU_MEMHOSTALLOC_WRITECOMBINED,
            _ => 0,
        };
        if matches!(kind, Kind::HostAlloc | Kind::WriteCombined) {
            let started = Instant::now();
            // SAFETY: no pointers go in.
            let ptr = unsafe { result::malloc_host(len, flags as c_uint) }
                .map_err(said("cuMemHostAlloc"))?;
            let made_in = started.elapsed();
            // SAFETY: `len` bytes, ours alone.
            unsafe { ptr.cast::<u8>().write_bytes(0x5a, len) };
            return Ok(Self {
                context,
                kind,
                ptr,
                len,
                map: None,
                made_in,
            });
        }
        let mut map = huge(len).map_err(said("mmap"))?;
        map.fill(0x5a);
        let ptr = map.as_mut_ptr().cast();
        let started = Instant::now();
        if kind == Kind::Registered {
            // SAFETY: the map is whole pages and stays until the drop, which unregisters it first.
            let code = unsafe { sys::cuMemHostRegister_v2(ptr, map.len(), PORTABLE) };
            code.result().map_err(said("cuMemHostRegister"))?;
        }
        Ok(Self {
            context,
            kind,
            ptr,
            len,
            map: Some(map),
            made_in: started.elapsed(),
        })
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        settle(&self.context);
        // SAFETY: made by `new` in this way, undone once, and no copy is on its way.
        unsafe {
            match self.kind {
                Kind::Registered => drop(sys::cuMemHostUnregister(self.ptr)),
                Kind::HostAlloc | Kind::WriteCombined => drop(result::free_host(self.ptr)),
                Kind::Pageable => {}
            }
        }
    }
}

/// Populated memory in huge pages, as the crate's slots are.
fn huge(len: usize) -> std::io::Result<MmapMut> {
    let map = MmapMut::map_anon(len.next_multiple_of(2 << 20))?;
    let _ = map.advise(Advice::HugePage);
    let _ = map.advise(Advice::PopulateWrite);
    Ok(map)
}

/// Device memory.
pub struct DeviceBytes {
    context: Arc<CudaContext>,
    ptr: u64,
    len: usize,
}

impl DeviceBytes {
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        enter(&gpu.context)?;
        // SAFETY: no pointers go in.
        let ptr = unsafe { result::malloc_sync(len) }.map_err(said("cuMemAlloc"))?;
        Ok(Self {
            context: gpu.context.clone(),
            ptr,
            len,
        })
    }

    /// Writes `bytes` from `at` on, and waits.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() <= self.len);
        if bytes.is_empty() {
            return Ok(());
        }
        enter(&self.context)?;
        // SAFETY: within the allocation; the call returns when the bytes were taken.
        unsafe { result::memcpy_htod_sync(self.ptr + at as u64, bytes) }
            .map_err(said("cuMemcpyHtoD"))?;
        // Taken is not there yet, and streams of our own do not wait for the default one.
        self.context.synchronize().map_err(said("cuCtxSynchronize"))
    }

    /// A copy of `len` bytes from `at` on.
    pub fn read(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        assert!(at + len <= self.len);
        read(&self.context, self.ptr + at as u64, len)
    }

    /// Copies a field on the device, in the order of `stream`. Binds the batch to the stream.
    pub fn keep(
        &self,
        at: usize,
        batch: &Batch,
        field: &FieldView<'_>,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        let len = field.size_bytes();
        assert!(at + len <= self.len);
        batch
            .bind(feedline::device::cuda::Stream::from(stream))
            .map_err(|error| error.to_string())?;
        let from = field.device_ptr().map_err(|error| error.to_string())?;
        copy_within(self.ptr + at as u64, from, len, stream)
    }

    /// Copies its first `len` bytes to `to`.
    pub fn copy_to(&self, to: &Self, len: usize, stream: &CudaStream) -> Result<()> {
        assert!(len <= self.len && len <= to.len);
        copy_within(to.ptr, self.ptr, len, stream)
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        settle(&self.context);
        // SAFETY: allocated by `new`, freed once, and nothing runs any more.
        let _ = unsafe { result::free_sync(self.ptr) };
    }
}

fn copy_within(to: u64, from: u64, len: usize, stream: &CudaStream) -> Result<()> {
    enter(stream.context())?;
    // SAFETY: both ranges lie in live allocations (checked by the callers); their owners wait for
    // the stream before freeing them.
    unsafe { result::memcpy_dtod_async(to, from, len, stream.cu_stream()) }
        .map_err(said("cuMemcpyDtoDAsync"))
}

/// `len` bytes at a device address, in the order of the legacy default stream: the caller waits for
/// other streams. The driver refuses memory that is not its own.
pub fn read(context: &CudaContext, from: u64, len: usize) -> Result<Vec<u8>> {
    enter(context)?;
    let mut bytes = vec![0_u8; len];
    if len > 0 {
        // SAFETY: the list has `len` bytes, and the call returns when they are there.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, from) }.map_err(said("cuMemcpyDtoH"))?;
    }
    Ok(bytes)
}

/// Host memory, device memory and the stream of copies between them.
pub struct Lane {
    /// Taken in turn.
    hosts: Vec<HostBytes>,
    device: DeviceBytes,
    stream: Arc<CudaStream>,
}

impl Lane {
    pub fn new(gpu: &Gpu, kind: Kind, len: usize) -> Result<Self> {
        Self::from_several(gpu, kind, len, 1)
    }

    /// Uses as much memory as a loader's slots: a smaller buffer, copied repeatedly, may come from
    /// the CPU's caches.
    pub fn from_several(gpu: &Gpu, kind: Kind, len: usize, buffers: usize) -> Result<Self> {
        let hosts = (0..buffers).map(|_| HostBytes::new(gpu, kind, len));
        Ok(Self {
            hosts: hosts.collect::<Result<_>>()?,
            device: DeviceBytes::new(gpu, len)?,
            stream: gpu.stream()?,
        })
    }

    /// What pinning its memory took.
    pub fn made_in(&self) -> Duration {
        self.hosts.iter().map(|host| host.made_in).sum()
    }

    /// Enqueues copy number `number` of `len` bytes.
    fn copy(&self, number: usize, len: usize) -> Result<()> {
        let host = &self.hosts[number % self.hosts.len()];
        assert!(len <= host.len && len <= self.device.len);
        let stream = self.stream.cu_stream();
        // SAFETY: within both allocations; both wait for the device before they are freed.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(self.device.ptr, host.ptr, len, stream) };
        code.result().map_err(said("cuMemcpyHtoDAsync"))
    }

    fn wait(&self) -> Result<()> {
        self.stream
            .synchronize()
            .map_err(said("cuStreamSynchronize"))
    }
}

/// GB per second of `count` copies of `len` bytes by these lanes in turn, from the first call to
/// the end of the last copy. One copy per lane is in flight.
pub fn h2d(lanes: &[Lane], len: usize, count: usize) -> Result<f64> {
    let first = lanes.first().ok_or("no lane")?;
    enter(first.stream.context())?;
    let started = Instant::now();
    for number in 0..count {
        lanes[number % lanes.len()].copy(number / lanes.len(), len)?;
    }
    lanes.iter().try_for_each(Lane::wait)?;
    Ok((count * len) as f64 / started.elapsed().as_secs_f64() / 1e9)
}

/// The same for about this many seconds; the device is waited for about every 512 MiB. For 0
/// seconds: a few copies.
pub fn h2d_for(lanes: &[Lane], len: usize, seconds: f64) -> Result<f64> {
    let most = if seconds > 0.0 { 1024 } else { 4 };
    let chunk = (512_usize << 20).div_ceil(len).min(most);
    let chunk = chunk.max(2 * lanes.len());
    let started = Instant::now();
    let mut bytes = 0.0;
    while bytes == 0.0 || started.elapsed().as_secs_f64() < seconds {
        h2d(lanes, len, chunk)?;
        bytes += (chunk * len) as f64;
    }
    Ok(bytes / started.elapsed().as_secs_f64() / 1e9)
}

/// A consumer of a DLPack struct: reads it, and calls its deleter on drop.
pub struct Consumer(NonNull<DLManagedTensorVersioned>);

// SAFETY: the protocol allows any thread.
unsafe impl Send for Consumer {}

impl Consumer {
    pub fn new(tensor: Dlpack) -> Self {
        Self(tensor.into_versioned())
    }

    /// Binds the tensor by the stream's bare handle first. The caller keeps the stream until the
    /// batch is gone.
    pub fn bound(tensor: Dlpack, stream: &CudaStream) -> Result<Self> {
        // SAFETY: the caller's promise.
        unsafe { tensor.bind(stream.cu_stream() as usize) }.map_err(|error| error.to_string())?;
        Ok(Self::new(tensor))
    }

    /// Its device, shape, dtype and address.
    pub fn seen(&self) -> (DLDevice, Vec<i64>, DLDataType, u64) {
        // SAFETY: alive until the deleter is called by `drop`; `ndim` sizes.
        unsafe {
            let tensor = &self.0.as_ref().dl_tensor;
            let shape = std::slice::from_raw_parts(tensor.shape, tensor.ndim as usize).to_vec();
            (tensor.device, shape, tensor.dtype, tensor.data as u64)
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // SAFETY: the struct is ours, and this is the only call.
        unsafe {
            if let Some(delete) = self.0.as_ref().deleter {
                delete(self.0.as_ptr());
            }
        }
    }
}
