//! Device memory of one batch: tracks who uses it, and returns it to the copier after use.

use super::cufile::{BufferGuard, CuFile, Failure};
use super::driver;
use super::driver::Gpu;
use super::idle::IdleMeter;
use crate::backend::{Backend, BatchHead, DevicePtr, OnDevice};
use crate::cuda::driver::{CopyStream, DeviceMemory, Event};
use crate::{Bound, DeviceKind, Stream, StreamUse};
use crossbeam_channel::{Receiver, Sender};
use feedline_base::error::{ErrorKind, Result};
use feedline_base::sync::Hold;
use feedline_base::thread;
use feedline_core::tensor::Layout;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Interval at which a freeing thread checks for the end of a capture.
const AGAIN: Duration = Duration::from_millis(20);

/// Data shared by all device batches of a loader.
pub(super) struct Home {
    pub(super) gpu: Arc<Gpu>,
    /// Layout of a slot, and of a batch on the device.
    pub(super) slot: Layout,
    pub(super) contents: Layout,
    pub(super) idle: Arc<IdleMeter>,
    pub(super) back: Sender<Box<Buffer>>,
    /// Receives buffers that return after the copier is gone.
    pub(super) freed: Receiver<Box<Buffer>>,
    pub(super) closed: AtomicBool,
}

impl Home {
    /// Address of a field of the contents in a buffer.
    pub(super) fn at(&self, buffer: &Buffer, field: usize) -> DevicePtr {
        buffer.base() + self.contents.fields()[field].offset as DevicePtr
    }
}

/// Device memory, registered with cuFile if cuFile is in use. cuFile's calls need a current
/// context, which these functions provide.
pub(super) struct BatchMemory {
    pub(super) memory: DeviceMemory,
    registered: Option<BufferGuard>,
}

impl BatchMemory {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        len: usize,
        what: &str,
        cufile: Option<&Arc<CuFile>>,
    ) -> Result<Self> {
        Self::of(DeviceMemory::new(gpu, len, what)?, cufile)
    }

    /// Registers this memory.
    pub(crate) fn of(memory: DeviceMemory, cufile: Option<&Arc<CuFile>>) -> Result<Self> {
        let gpu = memory.gpu.clone();
        let _bound = gpu.bind()?;
        let registered = cufile
            .map(|cufile| cufile.register_buffer(memory.ptr(), memory.len()))
            .transpose()
            .map_err(Failure::into_error)?;
        Ok(Self { memory, registered })
    }

    /// Leaks the memory and its registration with cuFile.
    fn leak(&mut self) {
        std::mem::forget(self.registered.take());
        self.memory.leak();
    }

    /// Ends the registration, and with it cuFile's use of the memory. After a failure the memory
    /// may still be written to, and is never reused.
    pub(crate) fn release(&mut self) -> Result<()> {
        let Some(registered) = self.registered.take() else {
            return Ok(());
        };
        let released = match self.memory.gpu.bind() {
            Ok(_bound) => registered.release().map_err(Failure::into_error),
            Err(error) => {
                // Without its context, cuFile cannot be called.
                std::mem::forget(registered);
                Err(error)
            }
        };
        if released.is_err() {
            self.memory.leak();
        }
        released
    }
}

impl Drop for BatchMemory {
    fn drop(&mut self) {
        let _ = self.release();
    }
}

/// Device memory of one batch, and the host's metadata for it.
pub struct Buffer {
    pub(super) memory: BatchMemory,
    /// Event that is reached when the batch's data have arrived. Bound streams wait for it.
    pub(super) copied: Arc<Event>,
    /// Events recorded after the consumers' work, when the batch was dropped.
    pub(super) released: Vec<Arc<Event>>,
    /// Whether some consumer's work has no event, so that only a wait for the whole context covers
    /// it.
    pub(super) unsure: bool,
    /// Streams that could not record an event because they were capturing. Contains only streams
    /// that these values keep alive.
    captured: Vec<Stream>,
    /// Whether the bell must ring when the consumers' work on the buffer has ended.
    pub(super) rings: bool,
    streams: Mutex<Vec<Bound>>,
    pub(crate) head: BatchHead,
    /// Where the buffer returns to when dropped; set while a consumer holds the batch.
    home: Option<Arc<Home>>,
}

impl Buffer {
    pub(super) fn new(home: &Home, target: Option<BatchMemory>) -> Result<Self> {
        Ok(Self {
            memory: target.map_or_else(
                || BatchMemory::new(&home.gpu, home.contents.bytes(), "a batch", None),
                Ok,
            )?,
            copied: home.idle.event()?,
            released: Vec::with_capacity(4),
            unsure: false,
            captured: Vec::new(),
            rings: false,
            streams: Mutex::new(Vec::with_capacity(4)),
            head: BatchHead::new(&home.slot),
            home: None,
        })
    }

    /// Lends the buffer to a consumer.
    pub(super) fn lend(mut self: Box<Self>, home: &Arc<Home>) -> OnDevice {
        self.home = Some(home.clone());
        OnDevice::new(self)
    }

    fn home(&self) -> &Arc<Home> {
        self.home.as_ref().expect("it is handed out")
    }

    /// Records events after all work on the batch, and forgets its bound streams.
    fn let_go(&mut self, home: &Home) {
        // One guard for all calls; if it fails, each call fails. The buffer returns anyway, or
        // `next()` would wait for it for ever.
        let _bound = home.gpu.enter();
        self.unsure |= self.mark_released(&home.idle).is_err();
    }

    fn streams(&self) -> MutexGuard<'_, Vec<Bound>> {
        self.streams.hold()
    }

    /// `lives`: the stream came from the builder, and `build` has checked it.
    fn bind_checked(&self, stream: &Stream, how: StreamUse, lives: bool) -> Result<()> {
        let home = self.home();
        let mut streams = self.streams();
        let at = streams
            .iter()
            .position(|bound| bound.stream.raw() == stream.raw());
        let before = at.map(|at| streams[at].how);
        if before >= Some(how) {
            return Ok(());
        }
        // One guard for all calls.
        let _bound = home.gpu.enter()?;
        if !lives {
            // This check comes first, because a capturing stream must not be asked for its context.
            // The default stream with `Releases` needs no check: binding records nothing on it, and
            // it has no context to ask for.
            if how > StreamUse::Releases || stream.raw() != driver::LEGACY {
                home.gpu.check_uncaptured(stream.raw())?;
            }
            home.gpu.check_stream(stream)?;
        }
        if how > StreamUse::Releases && before < Some(StreamUse::Beside) {
            home.gpu.stream_waits(stream.raw(), &self.copied)?;
        }
        if how == StreamUse::Takes && streams.iter().all(|bound| bound.how < StreamUse::Takes) {
            home.idle.started(self.base(), stream, lives, &self.copied);
        }
        match at {
            Some(at) => streams[at].how = how,
            None => streams.push(Bound {
                stream: stream.clone(),
                how,
            }),
        }
        Ok(())
    }

    /// Records an event on every bound stream, even if one stream refuses; returns the last error.
    fn mark_released(&mut self, idle: &IdleMeter) -> Result<()> {
        let streams = self
            .streams
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        self.rings = false;
        // If no stream has waited for the copy, no other event covers its end.
        if streams.iter().all(|bound| bound.how < StreamUse::Beside) {
            self.released.push(self.copied.clone());
        }
        let mut taken = None;
        let mut done = Ok(());
        for Bound { stream, how } in streams.drain(..) {
            let marked = idle
                .event()
                .and_then(|event| event.mark(stream.raw()).map(|()| event));
            match marked {
                Ok(event) => {
                    if how == StreamUse::Takes && taken.is_none() {
                        taken = Some((event.clone(), stream.raw()));
                    }
                    self.released.push(event);
                }
                Err(error) => {
                    self.captured
                        .extend(Some(stream).filter(Stream::keeps_itself));
                    done = Err(error);
                }
            }
        }
        idle.released(self.memory.memory.ptr(), taken);
        done
    }

    /// Waits for the whole context if some consumer's work has no event; returns false while a
    /// capture forbids the wait.
    ///
    /// Queries captured streams first, because waiting for their context would end the capture.
    pub(super) fn make_sure(&mut self, gpu: &Gpu) -> Result<bool> {
        self.captured.retain(|stream| {
            gpu.check_uncaptured(stream.raw())
                .is_err_and(|error| error.kind() == ErrorKind::Config)
        });
        if self.unsure && self.captured.is_empty() {
            self.unsure = !gpu.try_synchronize()?;
        }
        Ok(!self.unsure)
    }

    /// Waits until no work uses the memory any more.
    fn wait(&mut self, gpu: &Arc<Gpu>) -> Result<()> {
        while !self.make_sure(gpu)? {
            std::thread::sleep(AGAIN);
        }
        let users = || self.released.iter().chain([&self.copied]);
        if users().all(|event| event.is_done().unwrap_or(false)) {
            return Ok(());
        }
        // Waiting for these events would spin: sleeping needs a blocking event, recorded after
        // them.
        let behind = CopyStream::new(gpu)?;
        let all = Event::blocking(gpu)?;
        users().try_for_each(|event| gpu.stream_waits(behind.raw(), event))?;
        all.record(behind.raw())?;
        all.wait()
    }
}

/// Operations that loaders use on the memory of a batch.
impl Buffer {
    /// The batch's arrays.
    pub fn layout(&self) -> &Layout {
        &self.home().contents
    }

    /// Start address of the batch's memory on the device.
    pub fn base(&self) -> DevicePtr {
        self.memory.memory.ptr()
    }

    pub fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda(self.copied.gpu.ordinal())
    }

    /// Binds a stream: its later work sees the data, and its work before the drop delays reuse of
    /// the memory.
    ///
    /// Takes `&self`, under an uncontended lock.
    pub fn bind(&self, stream: &Stream, how: StreamUse) -> Result<()> {
        self.bind_checked(stream, how, false)
    }

    /// Binds the default stream, unless a stream already waits for the copy.
    pub fn bind_any(&self) -> Result<()> {
        let waits = self
            .streams()
            .iter()
            .any(|bound| bound.how >= StreamUse::Beside);
        if waits {
            Ok(())
        } else {
            self.bind(&Stream::legacy(), StreamUse::Takes)
        }
    }

    /// Handles and uses of the bound streams.
    pub fn bound(&self) -> Vec<(usize, StreamUse)> {
        self.streams()
            .iter()
            .map(|bound| (bound.stream.raw(), bound.how))
            .collect()
    }

    /// Binds the builder's streams, which `build` has checked. Fails on a broken device, where the
    /// bytes may never arrive.
    pub fn hand_out(&self, streams: &[Bound]) -> Result<()> {
        self.home().gpu.intact()?;
        self.home().idle.handed(
            self.base(),
            streams.iter().all(|bound| bound.how < StreamUse::Takes),
        );
        streams
            .iter()
            .try_for_each(|bound| self.bind_checked(&bound.stream, bound.how, true))
    }

    /// Copies `to.len()` bytes of the batch to the host, starting at byte `from`, and waits for
    /// them.
    pub(crate) fn read_back(&self, from: usize, to: &mut [u8]) -> Result<()> {
        self.bind_any()?;
        let waiting = self
            .streams()
            .iter()
            .find(|bound| bound.how >= StreamUse::Beside)
            .map(|bound| bound.stream.raw());
        let stream = waiting.unwrap_or(driver::LEGACY);
        self.home()
            .gpu
            .read_back(to, self.base() + from as DevicePtr, stream)
    }

    /// After the consumer's drop: returns the buffer to the copier.
    pub(crate) fn release(mut self: Box<Self>) {
        let Some(home) = self.home.take() else { return };
        self.let_go(&home);
        // The channel has room for every buffer.
        let _ = home.back.send(self);
        // SeqCst, as at the store: either this thread sees the flag, or the copier sees the buffer.
        if home.closed.load(Ordering::SeqCst) {
            home.freed.try_iter().for_each(free_elsewhere);
        }
    }

    /// Leaks the buffer: the device may write to it for ever.
    pub fn leak(self: Box<Self>) {
        driver::note_leak();
        std::mem::forget(self);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The loader is gone. `cuMemFree` happens to wait too, but does not promise it.
        let gpu = &self.copied.gpu.clone();
        if self.wait(gpu).is_err() && gpu.synchronize().is_err() {
            // The context keeps the memory, so the next user of the device must not get this
            // context.
            gpu.give_up();
            self.memory.leak();
        }
    }
}

/// Frees a buffer of a dropped loader on another thread.
///
/// `cuMemFree` waits for the device, and [`Buffer::drop`] waits for the consumer's streams. Their
/// work may need a lock that the caller holds (Python's).
fn free_elsewhere(buffer: Box<Buffer>) {
    if driver::is_leaving() {
        return buffer.leak();
    }
    // If no thread starts, `spawn` drops the buffer here.
    let _ = thread::spawn("feedline-free", move || drop(buffer));
}
