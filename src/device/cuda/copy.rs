//! Copies of full slots into buffers on the device, and the buffers' way back.
//!
//! ```text
//! free buffer ──copy (its "released" events first)──► OnDevice (in a Batch) ──drop (records "released")──► free buffer
//! slot        ──copy──► in flight until its copies are done (flight.rs) ──► free slot
//! ```
//!
//! No thread waits in the driver for a copy: the device rings a bell.
//!
//! Limits: as many batches on the device as there are buffers. All memory, events and lists are made by `build`; events for
//! further consumer streams are made when the first batch is bound to them.

#![allow(unsafe_code)]

use super::Stream;
use super::cufile::{BufferGuard, CuFile};
use super::driver::{self, CopyStream, DeviceMemory, DevicePtr, Event, Gpu, Pin};
use super::flight::{InFlight, Marks, Oldest};
use super::idle::IdleMeter;
use super::kernels::Kernels;
use crate::device::{DirectStep, FinishStep};
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::BadSample;
use crate::memory::{Array, Filled, Pinned, Region, Ticket};
use crate::tensor::{Layout, PAGE};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often a thread that ends things asks whether a capture is over.
const AGAIN: Duration = Duration::from_millis(20);

/// What of a slot gets to the device, and what is made of it there.
pub(crate) struct Shape {
    /// The arrays of the slot.
    pub(crate) slot: Layout,
    /// The arrays of a batch on the device: the fields of the slot under the same numbers, then those that are made there.
    pub(crate) contents: Layout,
    /// Fields of the slot that are copied.
    pub(crate) copied: Vec<usize>,
    /// Fields that somebody else writes into the buffer before the copy, and by what.
    pub(crate) directs: Vec<DirectStep>,
    /// Memory of the batches that somebody else writes to; what is missing is made.
    pub(crate) targets: Vec<Target>,
    /// What is made of fields that are there.
    pub(crate) finishes: Vec<Arc<FinishStep>>,
}

/// What the batches of a loader share on the device.
pub(crate) struct Home {
    gpu: Arc<Gpu>,
    shape: Shape,
    idle: Arc<IdleMeter>,
    back: Sender<Box<Buffer>>,
    /// What comes back when there is no copier any more.
    freed: Receiver<Box<Buffer>>,
    closed: AtomicBool,
}

impl Home {
    /// Where a field of the contents begins in a buffer.
    fn at(&self, buffer: &Buffer, field: usize) -> DevicePtr {
        buffer.base() + self.shape.contents.fields()[field].offset as DevicePtr
    }
}

/// Rows that are not blank; they come first.
fn real_rows(slot: &Filled) -> usize {
    slot.ids().iter().take_while(|id| **id != u64::MAX).count()
}

/// Device memory that cuFile may write to, where there is a cuFile. Its calls want the context to be current.
pub(crate) struct Target {
    memory: DeviceMemory,
    registered: Option<BufferGuard>,
}

impl Target {
    pub(crate) fn new(gpu: &Arc<Gpu>, len: usize, what: &str, cufile: Option<&Arc<CuFile>>) -> Result<Self> {
        Self::of(DeviceMemory::new(gpu, len, what)?, cufile)
    }

    /// The same of this memory.
    pub(crate) fn of(memory: DeviceMemory, cufile: Option<&Arc<CuFile>>) -> Result<Self> {
        let gpu = memory.gpu().clone();
        let _bound = gpu.bind()?;
        let registered = cufile.map(|cufile| cufile.register_buffer(memory.ptr(), memory.len())).transpose()?;
        Ok(Self { memory, registered })
    }

    pub(crate) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Leaves it to the device, and to cuFile, for ever.
    fn leak(&mut self) {
        std::mem::forget(self.registered.take());
        self.memory.leak();
    }

    /// Ends the registration, and with it the use of the memory: where that fails it may still be written to and is never
    /// used again.
    pub(crate) fn release(&mut self) -> Result<()> {
        let Some(registered) = self.registered.take() else { return Ok(()) };
        let released = match self.memory.gpu().bind() {
            Ok(_bound) => registered.release().map_err(Error::from),
            Err(error) => {
                // Without its context nothing can be said to cuFile.
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

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.release();
    }
}

/// Device memory for one batch, and what the host keeps of it.
pub(crate) struct Buffer {
    memory: Target,
    /// The batch is there; what waits for it is bound streams.
    copied: Event,
    /// The first `pending` of these stand for the work that consumers gave their streams before they let go.
    released: Vec<Event>,
    pending: usize,
    /// Some consumer's work is in none of these: only what waits for the whole context waits for it.
    unsure: bool,
    /// Streams that could not mark their work, since they were captured; those that live as long as these values.
    captured: Vec<Stream>,
    /// The bell is to ring when consumers are done with it.
    rings: bool,
    streams: Mutex<Vec<Stream>>,
    ticket: Ticket,
    /// As of the slot; and when its copy was submitted.
    times: ([u64; 3], u64),
    rows: usize,
    valid: usize,
    ids: Vec<u64>,
    status: Vec<u8>,
    /// By field; empty for fixed shapes.
    lens: Vec<Vec<u64>>,
    /// As of the slot.
    bad: Mutex<Vec<BadSample>>,
}

impl Buffer {
    fn new(home: &Home, target: Option<Target>) -> Result<Self> {
        let rows = home.shape.slot.rows();
        let lens = home.shape.slot.fields().iter().map(|field| Vec::with_capacity(field.lens.map_or(0, |_| rows)));
        let bytes = home.shape.contents.bytes();
        Ok(Self {
            memory: target.map_or_else(|| Target::new(&home.gpu, bytes, "a batch", None), Ok)?,
            copied: Event::new(&home.gpu)?,
            released: vec![Event::new(&home.gpu)?],
            pending: 0,
            unsure: false,
            captured: Vec::new(),
            rings: false,
            streams: Mutex::new(Vec::with_capacity(4)),
            ticket: Ticket::default(),
            times: Default::default(),
            rows: 0,
            valid: 0,
            ids: Vec::with_capacity(rows),
            status: Vec::with_capacity(rows),
            lens: lens.collect(),
            bad: Mutex::default(),
        })
    }

    /// Where it begins.
    pub(crate) fn base(&self) -> DevicePtr {
        self.memory.memory().ptr()
    }

    /// Keeps of the slot what the host is asked for, so that the slot can go when its copy is done.
    fn take_head(&mut self, slot: &Filled, now: u64) {
        self.times = (slot.times().read_all(), now);
        (self.ticket, self.rows, self.valid) = (slot.ticket(), slot.rows(), slot.valid());
        refill(&mut self.ids, slot.ids());
        refill(&mut self.status, slot.status());
        *self.bad.get_mut().unwrap_or_else(PoisonError::into_inner) = slot.take_bad();
        for (field, lens) in self.lens.iter_mut().enumerate() {
            refill(lens, slot.lens(field).unwrap_or_default());
        }
    }

    /// Has every bound stream mark where it stands.
    fn mark_released(&mut self, gpu: &Arc<Gpu>, idle: &IdleMeter) -> Result<()> {
        let streams = self.streams.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.rings = false;
        idle.released(self.memory.memory().ptr(), streams.first().map(Stream::raw));
        for stream in streams.drain(..) {
            if self.released.len() == self.pending {
                self.released.push(Event::new(gpu)?);
            }
            if let Err(error) = self.released[self.pending].mark(stream.raw()) {
                self.captured.extend(Some(stream).filter(Stream::keeps_itself));
                return Err(error);
            }
            self.pending += 1;
        }
        Ok(())
    }

    /// Waits for the whole context where consumers' work is in no event; false while a capture forbids that. A stream that is
    /// captured is asked first: waiting for its context would end the capture.
    fn make_sure(&mut self, gpu: &Gpu) -> Result<bool> {
        let captures =
            |stream: &Stream| gpu.check_uncaptured(stream.raw()).is_err_and(|error| error.kind() == ErrorKind::Config);
        self.captured.retain(captures);
        if self.unsure && self.captured.is_empty() {
            self.unsure = !gpu.try_synchronize()?;
        }
        Ok(!self.unsure)
    }

    /// Waits until nothing uses the memory any more.
    fn wait(&mut self, gpu: &Arc<Gpu>) -> Result<()> {
        while !self.make_sure(gpu)? {
            std::thread::sleep(AGAIN);
        }
        let users = || self.released[..self.pending].iter().chain([&self.copied]);
        if users().all(|event| event.is_done().unwrap_or(false)) {
            return Ok(());
        }
        // Who waits for these events would spin: a sleeper needs an event made for it, behind them.
        let (behind, all) = (CopyStream::new(gpu)?, Event::blocking(gpu)?);
        users().try_for_each(|event| gpu.stream_waits(behind.raw(), event))?;
        all.record(behind.raw())?;
        all.wait()
    }
}

fn refill<T: Copy>(list: &mut Vec<T>, from: &[T]) {
    list.clear();
    list.extend_from_slice(from);
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The loader is gone. `cuMemFree` waits as well, but that is its habit, not its promise.
        let gpu = &self.copied.gpu().clone();
        if self.wait(gpu).is_err() && gpu.synchronize().is_err() {
            // The context stays with the memory: who asks for the device next must not be given it.
            gpu.give_up();
            self.memory.leak();
        }
    }
}

/// The contents of a batch in device memory.
pub(crate) struct OnDevice {
    /// Taken only by `drop`.
    buffer: Option<Box<Buffer>>,
    home: Arc<Home>,
}

impl OnDevice {
    fn buffer(&self) -> &Buffer {
        self.buffer.as_ref().expect("taken only by drop")
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.home.gpu
    }

    pub(crate) fn ticket(&self) -> Ticket {
        self.buffer().ticket
    }

    pub(crate) fn times(&self) -> ([u64; 3], u64) {
        self.buffer().times
    }

    pub(crate) fn rows(&self) -> usize {
        self.buffer().rows
    }

    pub(crate) fn valid(&self) -> usize {
        self.buffer().valid
    }

    pub(crate) fn ids(&self) -> &[u64] {
        &self.buffer().ids
    }

    pub(crate) fn status(&self) -> &[u8] {
        &self.buffer().status
    }

    pub(crate) fn take_bad(&self) -> Vec<BadSample> {
        std::mem::take(&mut *self.buffer().bad.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn row_bytes(&self, field: usize) -> usize {
        self.home.shape.contents.fields()[field].row_bytes
    }

    pub(crate) fn lens(&self, field: usize) -> Option<&[u64]> {
        self.home.shape.contents.fields()[field].lens.map(|_| &*self.buffer().lens[field])
    }

    /// Where row 0 of the field is. Only for work on bound streams.
    pub(crate) fn ptr(&self, field: usize) -> DevicePtr {
        self.home.at(self.buffer(), field)
    }

    /// Where an array begins in device memory; in the host's for what lies there. Only for work on bound streams.
    pub(crate) fn place(&self, array: Array) -> std::result::Result<DevicePtr, *const u8> {
        match array {
            Array::Field(field) => Ok(self.ptr(field)),
            Array::Lens(field) => self.lens_ptr(field).ok_or(std::ptr::null()),
            Array::Ids => Err(self.buffer().ids.as_ptr().cast()),
            Array::Status => Err(self.buffer().status.as_ptr()),
        }
    }

    /// The same of the lengths of an `UpTo` field.
    pub(crate) fn lens_ptr(&self, field: usize) -> Option<DevicePtr> {
        let offset = self.home.shape.contents.fields()[field].lens?;
        Some(self.buffer().base() + offset as DevicePtr)
    }

    /// What `stream` is given from here on finds the data; the memory is not used again before what it was given until the
    /// batch is dropped is done. A lock that nobody else wants, for binding takes `&self`.
    pub(crate) fn bind(&self, stream: &Stream) -> Result<()> {
        stream.check(&self.home.gpu)?;
        self.bind_checked(stream, false)
    }

    fn bind_checked(&self, stream: &Stream, lives: bool) -> Result<()> {
        // Once around its calls.
        let _bound = self.home.gpu.bind()?;
        let buffer = self.buffer();
        let mut streams = buffer.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.iter().any(|bound| bound.raw() == stream.raw()) {
            return Ok(());
        }
        self.home.gpu.check_uncaptured(stream.raw())?;
        self.home.gpu.stream_waits(stream.raw(), &buffer.copied)?;
        if streams.is_empty() {
            self.home.idle.started(buffer.base(), stream, lives, &buffer.copied);
        }
        streams.push(stream.clone());
        Ok(())
    }

    /// Binds the streams of the builder, which `build` has checked. On a broken device no batch is handed out: its bytes may
    /// never come.
    pub(crate) fn hand_out(&self, streams: &[Stream]) -> Result<()> {
        self.home.gpu.intact()?;
        self.home.idle.handed(self.buffer().base(), streams.is_empty());
        streams.iter().try_for_each(|stream| self.bind_checked(stream, true))
    }

    /// Binds the legacy default stream, unless some stream is bound.
    pub(crate) fn bind_any(&self) -> Result<()> {
        let bound = !self.buffer().streams.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        if bound { Ok(()) } else { self.bind(&Stream::legacy()) }
    }

    /// Copies `to.len()` bytes from `from` of a field's array to the host, and waits for them.
    pub(crate) fn read_back(&self, field: usize, from: usize, to: &mut [u8]) -> Result<()> {
        self.bind_any()?;
        let stream = self.buffer().streams.lock().unwrap_or_else(PoisonError::into_inner).first().map(Stream::raw);
        self.home.gpu.read_back(to, self.ptr(field) + from as DevicePtr, stream.unwrap_or(driver::LEGACY))
    }
}

impl OnDevice {
    /// The consumer has let go, and the same contents will be handed out again: what its streams were given so far is
    /// remembered, and the streams are not.
    pub(crate) fn rest(&mut self) {
        let home = self.home.clone();
        let Some(buffer) = &mut self.buffer else { return };
        let _bound = home.gpu.bind();
        if buffer.released[..buffer.pending].iter().all(|event| event.is_done().unwrap_or(false)) {
            buffer.pending = 0;
        }
        buffer.unsure |= buffer.mark_released(&home.gpu, &home.idle).is_err();
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        let Some(mut buffer) = self.buffer.take() else { return };
        // One guard around the calls; where it fails, each of them does.
        let _bound = self.home.gpu.bind();
        // It comes back all the same: `next()` would wait for one that does not, for ever.
        buffer.unsure |= buffer.mark_released(&self.home.gpu, &self.home.idle).is_err();
        // It has room for every buffer.
        let _ = self.home.back.send(buffer);
        // SeqCst, as where it is set: either this sees it, or the copier sees the buffer.
        if self.home.closed.load(Ordering::SeqCst) {
            self.home.freed.try_iter().for_each(free_elsewhere);
        }
    }
}

/// Frees a buffer whose loader is gone, without waiting. `cuMemFree` waits for the device, as [`Buffer::drop`] does for the
/// consumer's streams, and their work may need a lock that the caller holds (Python's).
fn free_elsewhere(buffer: Box<Buffer>) {
    let free = move || drop(buffer);
    // Without a thread the buffer has been dropped here.
    let _ = std::thread::Builder::new().name("feedline-free".into()).spawn(free);
}

/// What became of a slot.
pub(crate) enum Copied {
    /// Its copy, of so many bytes, is on its way; the slot is free again when it is done.
    Started(OnDevice, usize),
    /// It could not be copied; the next one may be.
    Failed(Filled, Error),
    /// The device is of no use any more, and still has the slot.
    Broken(Error),
}

/// Bytes of a slot and where they go.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    from: Range<usize>,
    to: usize,
}

/// Copies slots. Lives on the transfer thread.
pub(crate) struct Copier {
    home: Arc<Home>,
    kernels: Option<Arc<Kernels>>,
    /// Of the highest priority: a kernel of ours must not hold up the next copy until one of the consumer's ends.
    stream: CopyStream,
    /// Rings when a copy is done, beside the copies: a callback would hold up the stream that it is in.
    notify: CopyStream,
    /// Rings when consumers are done with a buffer: they may be late, and must not hold up the bells of copies.
    idle: CopyStream,
    bell: Arc<Sender<()>>,
    free: Receiver<Box<Buffer>>,
    /// Taken out of `free` while waiting for it.
    spare: Option<Box<Buffer>>,
    /// Dropped while their streams were captured: nobody may ask yet what still uses them.
    #[expect(clippy::vec_box, reason = "buffers travel in their boxes")]
    unknown: Vec<Box<Buffer>>,
    in_flight: InFlight,
    /// What a full batch copies.
    whole: Vec<Run>,
}

impl Copier {
    /// Reserves everything for `count` batches on the device.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        mut shape: Shape,
        (count, slots): (usize, usize),
        bell: Sender<()>,
        idle: Arc<IdleMeter>,
    ) -> Result<Self> {
        let (back, free) = bounded(count);
        let whole = runs(arrays(&shape, shape.slot.rows()));
        let needed = !shape.finishes.is_empty() || shape.directs.iter().any(|step| step.gather.is_some());
        let kernels = if needed { Some(Kernels::of(gpu)?) } else { None };
        let mut targets = std::mem::take(&mut shape.targets);
        let home =
            Arc::new(Home { gpu: gpu.clone(), shape, idle, back, freed: free.clone(), closed: AtomicBool::new(false) });
        for _ in 0..count {
            let _ = home.back.send(Box::new(Buffer::new(&home, targets.pop())?));
        }
        let (stream, notify, late) = (CopyStream::preferred(gpu)?, CopyStream::new(gpu)?, CopyStream::new(gpu)?);
        let in_flight = InFlight::new(gpu, slots)?;
        let bell = Arc::new(bell);
        Ok(Self {
            home,
            kernels,
            stream,
            notify,
            idle: late,
            bell,
            free,
            spare: None,
            unknown: Vec::with_capacity(count),
            in_flight,
            whole,
        })
    }

    /// Pins a slot's memory for as long as it lives. Takes about 0.6 s per GB.
    pub(crate) fn pin(&self, region: &Region) -> Result<()> {
        region.pin(|| {
            // SAFETY: the region keeps the pin and lets go of it before its memory is unmapped.
            let pin = unsafe { Pin::new(&self.home.gpu, region.ptr().as_ptr(), region.len()) }?;
            Ok(Box::new(pin))
        })
    }

    /// Where buffers that are free again arrive.
    pub(crate) fn free(&self) -> &Receiver<Box<Buffer>> {
        &self.free
    }

    /// Takes back what came out of [`free`](Self::free), or was taken and not used.
    pub(crate) fn give_back(&mut self, buffer: Box<Buffer>) {
        if let Some(other) = self.spare.replace(buffer) {
            let _ = self.home.back.send(other);
        }
    }

    /// Leaves a buffer to the device, which may write to it for ever.
    pub(crate) fn leave(buffer: Box<Buffer>) {
        driver::note_leak();
        std::mem::forget(buffer);
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.home.gpu
    }

    /// A buffer for a batch, if one is free.
    pub(crate) fn take(&mut self) -> Option<Box<Buffer>> {
        while let Some(mut buffer) = self.spare.take().or_else(|| self.free.try_recv().ok()) {
            if self.is_known(&mut buffer) {
                return Some(buffer);
            }
            self.unknown.push(buffer);
        }
        let mut unknown = std::mem::take(&mut self.unknown);
        let known = unknown.iter_mut().position(|buffer| self.is_known(buffer));
        let found = known.map(|known| unknown.swap_remove(known));
        self.unknown = unknown;
        found
    }

    /// Whether it can be told when consumers are done with the buffer. Other failures are told by its copy.
    fn is_known(&self, buffer: &mut Buffer) -> bool {
        buffer.make_sure(&self.home.gpu).unwrap_or(true)
    }

    /// Whether nobody uses the buffer any more: for those who write to it beside the copy stream. When not, the bell rings
    /// when that is so.
    pub(crate) fn is_idle(&self, buffer: &mut Buffer) -> Result<bool> {
        if buffer.unsure {
            self.home.gpu.synchronize()?;
            buffer.unsure = false;
        }
        let users = || buffer.released[..buffer.pending].iter().chain([&buffer.copied]);
        let mut done = true;
        for event in users() {
            done &= event.is_done()?;
        }
        if !done {
            if !buffer.rings {
                users().try_for_each(|event| self.home.gpu.stream_waits(self.idle.raw(), event))?;
                self.idle.ring(&self.bell)?;
                buffer.rings = true;
            }
            return Ok(false);
        }
        buffer.pending = 0;
        buffer.rings = false;
        Ok(true)
    }

    /// Gives the copy of a slot to the device.
    pub(crate) fn copy(&mut self, slot: Filled, mut buffer: Box<Buffer>, now: u64) -> Copied {
        buffer.take_head(&slot, now);
        let (marks, waits) = (self.in_flight.marks(), buffer.pending > 0);
        match self.enqueue(&slot, &mut buffer, &marks) {
            Ok(bytes) => {
                self.in_flight.push(slot, marks, now, waits);
                Copied::Started(OnDevice { buffer: Some(buffer), home: self.home.clone() }, bytes)
            }
            // A part may be on its way: only when that has ended may the memory be used again.
            Err(error) if self.settle() => {
                self.in_flight.give_back(marks);
                // Should an event be of no use, the context is: it is waited for once, and then they are forgotten.
                (buffer.unsure, buffer.pending) = (true, 0);
                self.give_back(buffer);
                Copied::Failed(slot, error)
            }
            Err(error) => {
                driver::note_leak();
                std::mem::forget(slot);
                Copied::Broken(error)
            }
        }
    }

    /// Waits until no copy is on its way. Where that cannot be established, the device is given up.
    fn settle(&self) -> bool {
        let gpu = &self.home.gpu;
        let settled = self.stream.synchronize().is_ok() || gpu.synchronize().is_ok();
        if !settled {
            gpu.give_up();
        }
        settled
    }

    fn enqueue(&self, slot: &Filled, buffer: &mut Buffer, marks: &Marks) -> Result<usize> {
        let Home { gpu, shape, .. } = &*self.home;
        let _bound = gpu.bind()?;
        if buffer.unsure {
            gpu.synchronize()?;
            buffer.unsure = false;
        }
        if buffer.pending > 0 {
            marks.queued.record(self.stream.raw())?;
        }
        for event in &buffer.released[..buffer.pending] {
            gpu.stream_waits(self.stream.raw(), event)?;
        }
        marks.began.record(self.stream.raw())?;
        let mut bytes = 0;
        let mut copy = |run: Run| {
            let (from, to) = (slot.span(run.from), buffer.base() + run.to as DevicePtr);
            bytes += from.len();
            // SAFETY: the slot's bytes stay as they are until `ended` is reached, since `in_flight` (or a leak) keeps it
            // until then; the run lies within the buffer, which is ours alone, and its last users' events were waited for.
            unsafe { gpu.copy_to_device(to, from.as_ptr(), from.len(), self.stream.raw()) }
        };
        if slot.rows() == shape.slot.rows() {
            self.whole.iter().cloned().try_for_each(&mut copy)?;
        } else {
            arrays(shape, slot.rows()).try_for_each(&mut copy)?;
        }
        // Before the kernels: these read the buffer alone, and the slot need not wait for them.
        marks.ended.record(self.stream.raw())?;
        shape.directs.iter().try_for_each(|step| self.land(step, slot, buffer))?;
        shape.finishes.iter().try_for_each(|step| self.finish(step, slot, buffer))?;
        buffer.copied.record(self.stream.raw())?;
        gpu.stream_waits(self.notify.raw(), &marks.ended)?;
        self.notify.ring(&self.bell)?;
        buffer.pending = 0;
        Ok(bytes)
    }

    /// Moves rows that were read with their surroundings to where they belong.
    fn land(&self, step: &DirectStep, slot: &Filled, buffer: &Buffer) -> Result<()> {
        let (at, rows) = (|field| self.home.at(buffer, field), real_rows(slot));
        if let (Some(kernels), Some(gather)) = (&self.kernels, step.gather) {
            let places = (at(gather.staging), at(gather.offsets), at(step.field));
            // SAFETY: staging has `stride` bytes for each row, and every offset leaves a row's bytes before its end, as
            // `direct.rs` computes them; the arrays lie in the buffer, which only this stream uses now.
            unsafe { kernels.gather(self.stream.raw(), places, step.row_bytes as u64, rows as u64) }?;
        }
        self.blank(step.field, step.row_bytes, rows, slot, buffer)
    }

    /// Zeroes the rows behind the first `rows`.
    fn blank(&self, field: usize, row_bytes: usize, rows: usize, slot: &Filled, buffer: &Buffer) -> Result<()> {
        let from = self.home.shape.contents.fields()[field].offset + rows * row_bytes;
        buffer.memory.memory().clear(from, (slot.rows() - rows) * row_bytes, self.stream.raw())
    }

    /// Makes floats of the pictures. Blank rows stay zero.
    fn finish(&self, step: &FinishStep, slot: &Filled, buffer: &Buffer) -> Result<()> {
        let Some(kernels) = &self.kernels else { return Ok(()) };
        let (at, made) = (|field| self.home.at(buffer, field), real_rows(slot));
        let fields = (at(step.input), at(step.output));
        // SAFETY: the fields lie in the buffer, as long as the plan says, and only this stream uses it now; the context is
        // bound by the caller.
        unsafe { kernels.finish(self.stream.raw(), &step.plan, fields, step.flips.map(at), made) }?;
        self.blank(step.output, step.plan.output_bytes(), made, slot, buffer)
    }

    /// Whether a buffer that is not idle waits for consumers' streams, not for its own last copy.
    pub(crate) fn awaits_consumer(&self, buffer: &Buffer) -> bool {
        buffer.rings && buffer.copied.is_done().unwrap_or(false)
    }

    /// Copies in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Lets go of the slots whose copies are done; `done` gets when each was on the bus, as
    /// [`InFlight::let_go_done`] says.
    pub(crate) fn let_go_done(&mut self, now: u64, done: impl FnMut(Option<Range<u64>>)) -> Result<()> {
        let gone = self.in_flight.let_go_done(now, done);
        gone.or_else(|error| self.settle_all(error))
    }

    /// What the oldest copy in flight does.
    pub(crate) fn oldest(&mut self, now: u64) -> Result<Oldest> {
        let oldest = self.in_flight.oldest(now);
        oldest.or_else(|error| self.settle_all(error).map(|()| Oldest::Nothing))
    }

    /// The device does not say how far the copies are: waits for all of them, or leaves it the slots.
    fn settle_all(&mut self, error: Error) -> Result<()> {
        if self.settle() {
            self.in_flight.clear();
            return Ok(());
        }
        self.in_flight.leave_all();
        Err(error)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // The stream's work reads the slots and writes the buffers; the bells own themselves.
        if !self.settle() {
            self.in_flight.leave_all();
        }
        self.home.closed.store(true, Ordering::SeqCst);
        // Not left to whoever drops the last batch.
        self.free.try_iter().for_each(drop);
    }
}

/// The arrays that are copied, of a batch of `rows` rows.
fn arrays(shape: &Shape, rows: usize) -> impl Iterator<Item = Run> + '_ {
    let run = |from: usize, to: usize, len: usize| Run { from: from..from + len, to };
    let of = move |field: &usize| {
        let (from, to) = (shape.slot.fields()[*field], shape.contents.fields()[*field]);
        let lens = from.lens.zip(to.lens).map(|(from, to)| run(from, to, 8 * rows));
        std::iter::once(run(from.offset, to.offset, from.row_bytes * rows)).chain(lens)
    };
    shape.copied.iter().flat_map(of).filter(|run| !run.from.is_empty())
}

/// Joins runs between which there is hardly anything: a copy costs some microseconds, a page next to nothing.
fn runs(runs: impl Iterator<Item = Run>) -> Vec<Run> {
    let mut all: Vec<_> = runs.collect();
    all.sort_unstable_by_key(|run| run.from.start);
    let mut joined: Vec<Run> = Vec::new();
    for run in all {
        match joined.last_mut() {
            Some(last) if follows(last, &run) => last.from.end = run.from.end,
            _ => joined.push(run),
        }
    }
    joined
}

/// Whether one copy can take both: what lies between them is short, the same on both sides, and nobody's on the device.
fn follows(last: &Run, next: &Run) -> bool {
    let gap = next.from.start - last.from.end;
    gap <= PAGE && next.to.checked_sub(last.to) == Some(next.from.start - last.from.start)
}

impl Pinned for Pin {
    fn release(&self) -> bool {
        Pin::release(self)
    }
}
