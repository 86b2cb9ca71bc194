//! Copies of full slots into buffers on the device, and the buffers' way back.
//!
//! ```text
//! free buffer ──copy (its "released" events first)──► OnDevice (in a Batch) ──drop (records "released")──► free buffer
//! slot        ──copy──► in flight until "copied" is reached ──► free slot
//! ```
//!
//! No thread waits in the driver for a copy: the device rings a bell.
//!
//! Limits: as many batches on the device as there are buffers. All memory, events and lists are made by `build`; events for
//! further consumer streams are made when the first batch is bound to them.

#![allow(unsafe_code)]

use super::Stream;
use super::driver::{self, CopyStream, DeviceMemory, DevicePtr, Event, Gpu, Pin};
use crate::error::{Error, Result};
use crate::memory::{Filled, Pinned, Region, Ticket};
use crate::tensor::{Layout, PAGE, Spec};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// What the batches of a loader share on the device.
pub(crate) struct Home {
    gpu: Arc<Gpu>,
    spec: Spec,
    layout: Layout,
    /// Fields that are handed out.
    keep: Vec<usize>,
    back: Sender<Box<Buffer>>,
}

/// Device memory for one batch, and what the host keeps of it.
pub(crate) struct Buffer {
    memory: DeviceMemory,
    copied: Arc<Event>,
    /// The first `pending` of these stand for the work that consumers gave their streams before they let go.
    released: Vec<Event>,
    pending: usize,
    /// Some consumer's work is in none of these: only what waits for the whole context waits for it.
    unsure: bool,
    streams: Mutex<Vec<Stream>>,
    ticket: Ticket,
    rows: usize,
    valid: usize,
    ids: Vec<u64>,
    status: Vec<u8>,
    /// By field; empty for fixed shapes.
    lens: Vec<Vec<u64>>,
}

impl Buffer {
    fn new(home: &Home) -> Result<Self> {
        let rows = home.layout.rows();
        let lens = home.layout.fields().iter().map(|field| Vec::with_capacity(field.lens.map_or(0, |_| rows)));
        Ok(Self {
            memory: DeviceMemory::new(&home.gpu, home.layout.bytes(), "a batch")?,
            copied: Arc::new(Event::new(&home.gpu)?),
            released: vec![Event::new(&home.gpu)?],
            pending: 0,
            unsure: false,
            streams: Mutex::new(Vec::with_capacity(4)),
            ticket: Ticket::default(),
            rows: 0,
            valid: 0,
            ids: Vec::with_capacity(rows),
            status: Vec::with_capacity(rows),
            lens: lens.collect(),
        })
    }

    /// Keeps of the slot what the host is asked for, so that the slot can go when its copy is done.
    fn take_head(&mut self, slot: &Filled) {
        (self.ticket, self.rows, self.valid) = (slot.ticket(), slot.rows(), slot.valid());
        refill(&mut self.ids, slot.ids());
        refill(&mut self.status, slot.status());
        for (field, lens) in self.lens.iter_mut().enumerate() {
            refill(lens, slot.lens(field).unwrap_or_default());
        }
    }

    /// Has every bound stream mark where it stands.
    fn mark_released(&mut self, gpu: &Arc<Gpu>) -> Result<()> {
        let streams = self.streams.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.pending = 0;
        for stream in streams.drain(..) {
            if self.released.len() == self.pending {
                self.released.push(Event::new(gpu)?);
            }
            self.released[self.pending].record(stream.raw())?;
            self.pending += 1;
        }
        Ok(())
    }

    /// Waits until nothing uses the memory any more.
    fn wait(&self, gpu: &Gpu) -> Result<()> {
        if self.unsure {
            return gpu.synchronize();
        }
        self.released[..self.pending].iter().try_for_each(Event::wait)?;
        self.copied.wait()
    }
}

fn refill<T: Copy>(list: &mut Vec<T>, from: &[T]) {
    list.clear();
    list.extend_from_slice(from);
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The loader is gone. `cuMemFree` waits as well, but that is its habit, not its promise.
        let gpu = self.copied.gpu();
        if self.wait(gpu).is_err() && gpu.synchronize().is_err() {
            self.memory.leave();
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

    pub(crate) fn spec(&self) -> &Spec {
        &self.home.spec
    }

    pub(crate) fn row_bytes(&self, field: usize) -> usize {
        self.home.layout.fields()[field].row_bytes
    }

    pub(crate) fn lens(&self, field: usize) -> Option<&[u64]> {
        self.home.layout.fields()[field].lens.map(|_| &*self.buffer().lens[field])
    }

    /// Where row 0 of the field is. Only for work on bound streams.
    pub(crate) fn ptr(&self, field: usize) -> DevicePtr {
        self.buffer().memory.ptr() + self.home.layout.fields()[field].offset as DevicePtr
    }

    /// The same of the lengths of an `UpTo` field.
    pub(crate) fn lens_ptr(&self, field: usize) -> Option<DevicePtr> {
        let offset = self.home.layout.fields()[field].lens?;
        Some(self.buffer().memory.ptr() + offset as DevicePtr)
    }

    /// What `stream` is given from here on finds the data; the memory is not used again before what it was given until the
    /// batch is dropped is done. A lock that nobody else wants, for binding takes `&self`.
    pub(crate) fn bind(&self, stream: &Stream) -> Result<()> {
        stream.check(&self.home.gpu)?;
        self.bind_checked(stream)
    }

    fn bind_checked(&self, stream: &Stream) -> Result<()> {
        let buffer = self.buffer();
        let mut streams = buffer.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.iter().any(|bound| bound.raw() == stream.raw()) {
            return Ok(());
        }
        self.home.gpu.stream_waits(stream.raw(), &buffer.copied)?;
        streams.push(stream.clone());
        Ok(())
    }

    /// Binds the streams of the builder, which `build` has checked. On a broken device no batch is handed out: its bytes may
    /// never come.
    pub(crate) fn hand_out(&self, streams: &[Stream]) -> Result<()> {
        self.home.gpu.intact()?;
        streams.iter().try_for_each(|stream| self.bind_checked(stream))
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

impl Drop for OnDevice {
    fn drop(&mut self) {
        let Some(mut buffer) = self.buffer.take() else { return };
        // It comes back all the same: `next()` would wait for one that does not, for ever.
        buffer.unsure |= buffer.mark_released(&self.home.gpu).is_err();
        // It has room for every buffer. When the loader is gone, the buffer goes here.
        let _ = self.home.back.send(buffer);
    }
}

/// What became of a slot.
pub(crate) enum Copied {
    /// Its copy, of so many bytes, is on its way; the slot is free again when it is done.
    Started(OnDevice, usize),
    /// Every buffer is in use.
    NoRoom(Filled),
    /// It could not be copied; the next one may be.
    Failed(Filled, Error),
    /// The device is of no use any more, and still has the slot.
    Broken(Error),
}

/// Copies slots. Lives on the transfer thread.
pub(crate) struct Copier {
    home: Arc<Home>,
    stream: CopyStream,
    /// Rings when a copy is done, beside the copies: a callback would hold up the stream that it is in.
    notify: CopyStream,
    bell: Arc<Sender<()>>,
    free: Receiver<Box<Buffer>>,
    /// Taken out of `free` while waiting for it.
    spare: Option<Box<Buffer>>,
    /// Slots that the device is reading, oldest first.
    in_flight: VecDeque<(Filled, Arc<Event>)>,
    /// What a full batch copies: runs of arrays that are handed out.
    whole: Vec<Range<usize>>,
}

impl Copier {
    /// Reserves everything for `count` batches on the device.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        (spec, layout): (&Spec, &Layout),
        keep: &[usize],
        (count, slots): (usize, usize),
        bell: Sender<()>,
    ) -> Result<Self> {
        let (back, free) = bounded(count);
        let (spec, layout, keep) = (spec.clone(), layout.clone(), keep.to_vec());
        let whole = runs(arrays(&layout, &keep, layout.rows()));
        let home = Arc::new(Home { gpu: gpu.clone(), spec, layout, keep, back });
        for _ in 0..count {
            let _ = home.back.send(Box::new(Buffer::new(&home)?));
        }
        let (stream, notify) = (CopyStream::new(gpu)?, CopyStream::new(gpu)?);
        let in_flight = VecDeque::with_capacity(slots);
        Ok(Self { home, stream, notify, bell: Arc::new(bell), free, spare: None, in_flight, whole })
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

    /// Takes back what came out of [`free`](Self::free).
    pub(crate) fn give_back(&mut self, buffer: Box<Buffer>) {
        self.spare = Some(buffer);
    }

    /// Gives the copy of a slot to the device, if a buffer is free.
    pub(crate) fn copy(&mut self, slot: Filled) -> Copied {
        let Some(mut buffer) = self.spare.take().or_else(|| self.free.try_recv().ok()) else {
            return Copied::NoRoom(slot);
        };
        buffer.take_head(&slot);
        match self.enqueue(&slot, &mut buffer) {
            Ok(bytes) => {
                self.in_flight.push_back((slot, buffer.copied.clone()));
                Copied::Started(OnDevice { buffer: Some(buffer), home: self.home.clone() }, bytes)
            }
            // A part may be on its way: only when that has ended may the memory be used again.
            Err(error) if self.settle() => {
                let _ = self.home.back.send(buffer);
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

    fn enqueue(&self, slot: &Filled, buffer: &mut Buffer) -> Result<usize> {
        let Home { gpu, layout, keep, .. } = &*self.home;
        let bound = gpu.bind()?;
        if buffer.unsure {
            gpu.synchronize()?;
            buffer.unsure = false;
        }
        for event in &buffer.released[..buffer.pending] {
            gpu.stream_waits(self.stream.raw(), event)?;
        }
        let mut bytes = 0;
        let mut copy = |range: Range<usize>| {
            let from = slot.span(range.clone());
            let to = buffer.memory.ptr() + range.start as DevicePtr;
            bytes += from.len();
            // SAFETY: the slot's bytes stay as they are until `copied` is reached, since `in_flight` (or a leak) keeps it
            // until then; the buffer is as long as the slot, ours alone, and its last users' events were waited for.
            unsafe { gpu.copy_to_device(to, from.as_ptr(), from.len(), self.stream.raw()) }
        };
        if slot.rows() == layout.rows() {
            self.whole.iter().cloned().try_for_each(&mut copy)?;
        } else {
            arrays(layout, keep, slot.rows()).try_for_each(&mut copy)?;
        }
        drop(bound);
        buffer.copied.record(self.stream.raw())?;
        gpu.stream_waits(self.notify.raw(), &buffer.copied)?;
        self.notify.ring(&self.bell)?;
        buffer.pending = 0;
        Ok(bytes)
    }

    /// Lets go of the slots whose copies are done.
    pub(crate) fn let_go_done(&mut self) -> Result<()> {
        while let Some((_, copied)) = self.in_flight.front() {
            match copied.is_done() {
                Ok(false) => return Ok(()),
                Ok(true) => drop(self.in_flight.pop_front()),
                // It does not say so, but they are done.
                Err(_) if self.settle() => self.in_flight.clear(),
                Err(error) => {
                    self.leave_all();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The device cannot say any more which slots it still reads: it keeps them all.
    fn leave_all(&mut self) {
        for (slot, _) in self.in_flight.drain(..) {
            driver::note_leak();
            std::mem::forget(slot);
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // The stream's work reads the slots and writes the buffers; the bells own themselves.
        if !self.settle() {
            self.leave_all();
        }
    }
}

/// The arrays that are handed out, of a batch of `rows` rows.
fn arrays<'a>(layout: &'a Layout, keep: &'a [usize], rows: usize) -> impl Iterator<Item = Range<usize>> + 'a {
    let of = move |field: &usize| {
        let field = layout.fields()[*field];
        let lens = field.lens.map(|lens| lens..lens + 8 * rows);
        std::iter::once(field.offset..field.offset + field.row_bytes * rows).chain(lens)
    };
    keep.iter().flat_map(of)
}

/// Joins ranges between which there is hardly anything: a copy costs some microseconds, a page next to nothing.
fn runs(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let mut runs: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match runs.last_mut() {
            Some(last) if range.start - last.end <= PAGE => last.end = range.end,
            _ => runs.push(range),
        }
    }
    runs
}

impl Pinned for Pin {
    fn release(&self) -> bool {
        Pin::release(self)
    }
}
