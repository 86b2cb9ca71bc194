//! Copies full slots into device buffers, and runs the operations on the copies.
//!
//! ```text
//! free buffer ──copy (its "released" events first)──► OnDevice (in a Batch) ──drop (records "released")──► free buffer
//! slot        ──copy──► in flight until its copies are done (flight.rs) ──► free slot
//!                │
//! copy stream    ├──► fields delivered unchanged ──────────────► buffer
//!                └──► fields to be converted ───► staging area        ▲
//! made stream                                         └─ operations ──┘   beside the next copy, into the other area
//! ```
//!
//! No thread waits in the driver for a copy: the device rings a bell, or the thread checks at the
//! copy's expected end.
//!
//! Limits: one batch on the device per buffer. `build` makes all memory, events and lists. Events
//! for further consumer streams are made when the first batch is bound to them.

#![allow(unsafe_code)]

use super::buffer::{BatchMemory, Buffer, Home};
use super::driver;
use super::driver::Gpu;
use super::flight::{InFlight, Marks};
use super::idle::IdleMeter;
use super::kernels::{Finisher, Kernels};
use crate::backend::{Copied, DevicePtr, Landed, Oldest, Setup};
use crate::cuda::driver::{CopyStream, DeviceMemory, Event, Pin};
use crate::{DeviceOp, DirectStep, FinishStep};
use crossbeam_channel::{Receiver, Sender, bounded};
use feedline_base::PAGE;
use feedline_base::error::{Error, Result};
use feedline_core::memory::{Filled, Pinned, Region};
use feedline_core::tensor::Layout;
use feedline_report::meter::nvtx;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Number of rows that are not blank; blank rows come last.
fn real_rows(slot: &Filled) -> usize {
    slot.ids().iter().take_while(|id| **id != u64::MAX).count()
}

/// A range of slot bytes, with its target.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    from: Range<usize>,
    to: usize,
}

/// Fields of the slot that are copied to the same device memory: a batch or a staging area.
struct CopyPart {
    fields: Vec<usize>,
    /// The ranges to copy for every full batch; `None` if they differ between batches: packed
    /// fields, groups.
    whole: Option<Vec<Stretch>>,
}

impl CopyPart {
    fn new(slot: &Layout, to: &Layout, fields: Vec<usize>) -> Self {
        let whole = (!slot.varies()).then(|| {
            runs(arrays(slot, to, &fields, slot.rows(), |field| {
                slot.fields()[field].row_bytes * slot.rows()
            }))
        });
        Self { fields, whole }
    }
}

/// A staging area: device memory for the arrays that only operations read. The next copy into the
/// area waits for the operations on the batch that it holds.
struct Area {
    memory: DeviceMemory,
    last: Option<Arc<Event>>,
}

/// The staging areas, used in turn: a copy fills one area while the operations on the previous
/// batch read another.
struct Staging {
    part: CopyPart,
    layout: Layout,
    areas: Vec<Area>,
    next: usize,
}

impl Staging {
    /// Notes that `ended` marks the end of the last operations on the current area, and moves to
    /// the next area.
    fn turn(&mut self, ended: &Arc<Event>) {
        if let Some(area) = self.areas.get_mut(self.next) {
            area.last = Some(ended.clone());
            self.next = (self.next + 1) % self.areas.len();
        }
    }

    /// Address of the current area, if there is one.
    fn base(&self) -> Option<DevicePtr> {
        self.areas.get(self.next).map(|area| area.memory.ptr())
    }

    /// Address of a field in the current area; `None` for a field that is stored in the batch.
    fn at(&self, field: usize) -> Option<DevicePtr> {
        let base = self.base().filter(|_| self.part.fields.contains(&field))?;
        Some(base + self.layout.fields()[field].offset as DevicePtr)
    }
}

/// An operation on a copied batch, with its kernels.
enum Op {
    /// Includes the kernels that gather rows, if the step gathers.
    Place(DirectStep, Option<Arc<Kernels>>),
    Finish(Arc<FinishStep>, Finisher),
}

impl Op {
    fn of(gpu: &Arc<Gpu>, op: DeviceOp) -> Result<Self> {
        match op {
            DeviceOp::Place(step) => {
                let kernels = step.gather.map(|_| Kernels::of(gpu)).transpose()?;
                Ok(Self::Place(step, kernels))
            }
            DeviceOp::Finish(step) => {
                let finisher = Finisher::new(gpu, &step.plan)?;
                Ok(Self::Finish(step, finisher))
            }
        }
    }
}

/// Copies slots. Owned by the transfer thread.
pub struct Copier {
    home: Arc<Home>,
    /// The fields copied into the batch.
    part: CopyPart,
    staging: Staging,
    ops: Vec<Op>,
    /// Runs the copies. All streams here have the highest priority: otherwise the crate's kernels
    /// could wait for the end of a consumer's kernel, and so delay the next copy. Also, streams
    /// share few hardware queues per priority, and a bell that waits for one consumer must not
    /// block another consumer's stream.
    stream: CopyStream,
    /// Runs the operations on a batch, while the bus carries the next batch.
    made: CopyStream,
    /// Rings when a copy is done. Separate, because a callback blocks its own stream.
    notify: CopyStream,
    /// Rings when consumers are done with a buffer. Separate, because they may be late and must not
    /// delay the bells of copies.
    idle: CopyStream,
    bell: Arc<Sender<()>>,
    pub free: Receiver<Box<Buffer>>,
    /// A buffer that was taken out of `free` and given back unused. `take` returns it first.
    spare: Option<Box<Buffer>>,
    /// Buffers dropped while their streams were capturing. Until the capture ends, it is not known
    /// whether they are still in use.
    #[expect(clippy::vec_box, reason = "buffers travel in their boxes")]
    unknown: Vec<Box<Buffer>>,
    in_flight: InFlight,
    /// Number of the loader's slots.
    slots: usize,
    /// Whether the thread's timers follow the meters' clock; if not, each copy rings the bell.
    timed: bool,
}

impl Copier {
    /// Reserves all memory, streams and events that the batches on the device need.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        setup: Setup,
        mut targets: Vec<BatchMemory>,
        idle: Arc<IdleMeter>,
    ) -> Result<Self> {
        let Setup {
            slot,
            contents,
            copied,
            ops,
            staged,
            staging: layout,
            areas,
            batches,
            slots,
            bell,
            clock,
            ..
        } = setup;
        let (back, free) = bounded(batches);
        let part = CopyPart::new(&slot, &contents, copied);
        let staged = CopyPart::new(&slot, &layout, staged);
        let area = || {
            Ok(Area {
                memory: DeviceMemory::new(gpu, layout.bytes(), "a staging area")?,
                last: None,
            })
        };
        let areas = (0..areas).map(|_| area()).collect::<Result<_>>()?;
        let staging = Staging {
            part: staged,
            layout,
            areas,
            next: 0,
        };
        let ops = ops
            .into_iter()
            .map(|op| Op::of(gpu, op))
            .collect::<Result<Vec<_>>>()?;
        let gpu = gpu.clone();
        let freed = free.clone();
        let closed = AtomicBool::new(false);
        let home = Arc::new(Home {
            gpu: gpu.clone(),
            slot,
            contents,
            idle,
            back,
            freed,
            closed,
        });
        for _ in 0..batches {
            let _ = home.back.send(Box::new(Buffer::new(&home, targets.pop())?));
        }
        Ok(Self {
            stream: CopyStream::preferred(&gpu)?,
            made: CopyStream::preferred(&gpu)?,
            notify: CopyStream::preferred(&gpu)?,
            idle: CopyStream::preferred(&gpu)?,
            in_flight: InFlight::new(&gpu, slots, if ops.is_empty() { 0 } else { batches })?,
            slots,
            timed: clock.is_real(),
            part,
            staging,
            unknown: Vec::with_capacity(batches),
            bell: Arc::new(bell),
            spare: None,
            home,
            ops,
            free,
        })
    }

    /// Whether the end of the consumers' use of the buffer can be queried. The buffer's copy
    /// reports other failures.
    fn is_known(&self, buffer: &mut Buffer) -> bool {
        buffer.make_sure(&self.home.gpu).unwrap_or(true)
    }

    /// Waits until no copy and no operation is in flight. If that fails, gives up the device.
    fn settle(&self) -> bool {
        let gpu = &self.home.gpu;
        let settled = self
            .stream
            .synchronize()
            .and_then(|()| self.made.synchronize())
            .is_ok()
            || gpu.synchronize().is_ok();
        if !settled {
            gpu.give_up();
        }
        settled
    }

    /// Enqueues the copies and the operations. Only copies read the slot, so the slot need not wait
    /// for kernels. `rings`: the bell rings at the end of the copies.
    fn enqueue(
        &mut self,
        slot: &Filled,
        buffer: &mut Buffer,
        marks: &Marks,
        rings: bool,
    ) -> Result<usize> {
        let home = self.home.clone();
        let gpu = &*home.gpu;
        let _bound = gpu.bind()?;
        if buffer.unsure {
            gpu.synchronize()?;
            buffer.unsure = false;
        }
        if let Some(last) = self
            .staging
            .areas
            .get(self.staging.next)
            .and_then(|area| area.last.as_ref())
        {
            gpu.stream_waits(self.stream.raw(), last)?;
        }
        if !buffer.released.is_empty() {
            marks.queued.record(self.stream.raw())?;
        }
        for event in &buffer.released {
            gpu.stream_waits(self.stream.raw(), event)?;
        }
        marks.began.record(self.stream.raw())?;
        let bytes = self.copy_fields(slot, buffer)?;
        marks.ended.record(self.stream.raw())?;
        // A new event, because an unread step of the idle meter may still need the previous batch's
        // event.
        buffer.copied = self.home.idle.event()?;
        match &marks.made {
            None => buffer.copied.record(self.stream.raw())?,
            Some(made) => {
                gpu.stream_waits(self.made.raw(), &marks.ended)?;
                self.operate(slot, buffer)?;
                made.record(self.made.raw())?;
                buffer.copied.record(self.made.raw())?;
                self.staging.turn(&buffer.copied);
            }
        }
        if rings {
            gpu.stream_waits(self.notify.raw(), &marks.ended)?;
            self.notify.ring(&self.bell)?;
        }
        buffer.released.clear();
        Ok(bytes)
    }

    /// Enqueues the operations.
    fn operate(&self, slot: &Filled, buffer: &Buffer) -> Result<()> {
        let _range = nvtx::push(nvtx::Name::Operations, slot.ticket().sequence);
        for op in &self.ops {
            match op {
                Op::Place(step, kernels) => self.place(step, kernels.as_deref(), slot, buffer)?,
                Op::Finish(step, finisher) => self.finish(step, finisher, slot, buffer)?,
            }
        }
        Ok(())
    }

    /// Device address of a copied field of the slot, for an operation on this buffer's batch.
    fn at(&self, buffer: &Buffer, field: usize) -> DevicePtr {
        self.staging
            .at(field)
            .unwrap_or_else(|| self.home.at(buffer, field))
    }

    /// Enqueues copies of the slot's fields; returns the number of bytes.
    fn copy_fields(&self, slot: &Filled, buffer: &Buffer) -> Result<usize> {
        let _range = nvtx::push(nvtx::Name::Copy, slot.ticket().sequence);
        let delivered = self.copy_part(&self.part, slot, &self.home.contents, buffer.base())?;
        let Some(area) = self.staging.base() else {
            return Ok(delivered);
        };
        let staged = self.copy_part(&self.staging.part, slot, &self.staging.layout, area)?;
        Ok(delivered + staged)
    }

    /// Enqueues copies of some fields to the memory at `base`, which has the layout `to`; returns
    /// the number of bytes.
    fn copy_part(
        &self,
        part: &CopyPart,
        slot: &Filled,
        to: &Layout,
        base: DevicePtr,
    ) -> Result<usize> {
        let Home {
            gpu, slot: from, ..
        } = &*self.home;
        let mut bytes = 0;
        let mut copy = |run: Stretch| {
            let from = slot.span(run.from);
            let to = base + run.to as DevicePtr;
            bytes += from.len();
            // SAFETY: `in_flight` (or a leak) keeps the slot, with its bytes unchanged, until
            // `ended` is reached. The run is within the buffer or the area, which has no other
            // user: the events of its last users were waited for.
            unsafe { gpu.copy_to_device(to, from.as_ptr(), from.len(), self.stream.raw()) }
        };
        match &part.whole {
            Some(whole) if slot.rows() == from.rows() => {
                whole.iter().cloned().try_for_each(&mut copy)?
            }
            _ => arrays(from, to, &part.fields, slot.rows(), |field| {
                slot.used(field)
            })
            .try_for_each(&mut copy)?,
        }
        Ok(bytes)
    }

    /// Moves rows to their final places, out of staging, where the rest of their pages surrounds
    /// them. Zeroes blank rows.
    fn place(
        &self,
        step: &DirectStep,
        kernels: Option<&Kernels>,
        slot: &Filled,
        buffer: &Buffer,
    ) -> Result<()> {
        let at = |field| self.home.at(buffer, field);
        let rows = real_rows(slot);
        if let (Some(kernels), Some(gather)) = (kernels, step.gather) {
            let staging = at(gather.staging);
            let offsets = at(gather.offsets);
            let out = at(step.field);
            // SAFETY: staging has `stride` bytes per row, and every offset leaves a whole row
            // before its end, as computed in `pipeline/direct.rs`. The arrays are in the buffer,
            // which only this stream uses now.
            unsafe {
                kernels.gather(
                    self.made.raw(),
                    staging,
                    offsets,
                    out,
                    step.row_bytes as u64,
                    rows as u64,
                )
            }?;
        }
        self.blank(step.field, step.row_bytes, rows, slot, buffer)
    }

    /// Zeroes all rows after the first `rows`.
    fn blank(
        &self,
        field: usize,
        row_bytes: usize,
        rows: usize,
        slot: &Filled,
        buffer: &Buffer,
    ) -> Result<()> {
        let from = self.home.contents.fields()[field].offset + rows * row_bytes;
        buffer
            .memory
            .memory
            .clear(from, (slot.rows() - rows) * row_bytes, self.made.raw())
    }

    /// Converts pictures to floats. Blank rows stay zero.
    fn finish(
        &self,
        step: &FinishStep,
        finisher: &Finisher,
        slot: &Filled,
        buffer: &Buffer,
    ) -> Result<()> {
        let at = |field| self.at(buffer, field);
        let made = real_rows(slot);
        let input = at(step.input);
        let output = at(step.output);
        // SAFETY: the fields are in the buffer or the staging area, with the lengths of the
        // finisher's plan, and only this stream uses them now; the caller has bound the context.
        unsafe {
            finisher.run(
                self.made.raw(),
                &step.plan,
                input,
                output,
                step.flips.map(at),
                made,
            )
        }?;
        self.blank(step.output, step.plan.output_bytes(), made, slot, buffer)
    }

    /// Waits for all copies, because the device cannot report their progress. If that fails, leaks
    /// their slots.
    fn settle_all(&mut self, error: Error) -> Result<()> {
        if self.settle() {
            self.in_flight.clear();
            return Ok(());
        }
        self.in_flight.leave_all();
        Err(error)
    }
}

/// Operations that the transfer thread uses.
impl Copier {
    /// Pins a slot's memory for as long as it lives. Takes about 0.6 s per GB.
    pub fn pin(&self, region: &Region) -> Result<()> {
        region.pin(|| {
            // SAFETY: the region keeps the pin, and releases it before it unmaps its memory.
            let pin = unsafe { Pin::new(&self.home.gpu, region.ptr().as_ptr(), region.len()) }?;
            Ok(Box::new(pin))
        })
    }

    /// A free buffer for a batch, if any.
    pub fn take(&mut self) -> Option<Box<Buffer>> {
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

    /// Takes back a buffer that was taken but not used.
    pub fn give_back(&mut self, buffer: Box<Buffer>) {
        if let Some(other) = self.spare.replace(buffer) {
            let _ = self.home.back.send(other);
        }
    }

    /// Whether all work on the buffer has ended, for writers other than the copier. If not, the
    /// bell rings when the work ends.
    pub fn is_idle(&self, buffer: &mut Buffer) -> Result<bool> {
        if buffer.unsure {
            self.home.gpu.synchronize()?;
            buffer.unsure = false;
        }
        let users = || buffer.released.iter().chain([&buffer.copied]);
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
        buffer.released.clear();
        buffer.rings = false;
        Ok(true)
    }

    /// Whether a busy buffer waits for consumers' streams rather than its own last copy.
    pub fn awaits_consumer(&self, buffer: &Buffer) -> bool {
        buffer.rings && buffer.copied.is_done().unwrap_or(false)
    }

    /// Enqueues the copy of a batch, and the operations on it.
    pub fn copy(&mut self, slot: Filled, mut buffer: Box<Buffer>, now: u64) -> Copied {
        // Read the idle meter before each copy, so that at most one batch per buffer adds events
        // between two readings.
        self.home.idle.read();
        buffer.head.take(&slot, now);
        let marks = self.in_flight.marks();
        let waits = !buffer.released.is_empty();
        // The bell rings if timers are unusable, if fewer than two slots are left for the earlier
        // stages, or if no copy's duration is known yet.
        let rings = !self.timed
            || self.in_flight.len() + 2 >= self.slots
            || self.in_flight.last_ns().is_none();
        match self.enqueue(&slot, &mut buffer, &marks, rings) {
            Ok(bytes) => {
                self.in_flight.push(slot, marks, now, waits, rings);
                Copied::Started(buffer.lend(&self.home), bytes)
            }
            // A part may be in flight: the memory is reusable only after its end.
            Err(error) if self.settle() => {
                self.in_flight.give_back(marks);
                // If an event fails, the context has failed: later wait once for the whole context
                // instead of these events.
                buffer.unsure = true;
                buffer.released.clear();
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

    /// Number of copies in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Time until the next check of the copies, if no bell rings at the end of the oldest.
    pub fn next_look(&self, now: u64) -> Option<Duration> {
        self.in_flight.next_look(now).map(Duration::from_nanos)
    }

    /// Frees the slots of finished copies, and passes all work that has ended on the device to
    /// `done`.
    pub fn let_go_done(&mut self, now: u64, done: &mut dyn FnMut(Landed)) -> Result<()> {
        let gone = self.in_flight.let_go_done(now, done);
        gone.or_else(|error| self.settle_all(error))
    }

    /// State of the oldest copy in flight.
    pub fn oldest(&mut self, now: u64) -> Result<Oldest> {
        let oldest = self.in_flight.oldest(now);
        oldest.or_else(|error| self.settle_all(error).map(|()| Oldest::Nothing))
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // The stream's work reads slots and writes buffers; the bell callbacks own their data.
        if !self.settle() {
            self.in_flight.leave_all();
        }
        self.home.closed.store(true, Ordering::SeqCst);
        // Frees these buffers here, rather than in the thread that drops the last batch.
        self.free.try_iter().for_each(drop);
    }
}

/// The ranges to copy for the arrays of these fields, for a batch of `rows` rows with `used` bytes
/// per field.
fn arrays<'a>(
    from: &'a Layout,
    to: &'a Layout,
    fields: &'a [usize],
    rows: usize,
    used: impl Fn(usize) -> usize + 'a,
) -> impl Iterator<Item = Stretch> + 'a {
    let run = |from: usize, to: usize, len: usize| Stretch {
        from: from..from + len,
        to,
    };
    fields
        .iter()
        .flat_map(move |field| {
            let bytes = used(*field);
            let from = from.fields()[*field];
            let to = to.fields()[*field];
            let lens = from
                .lens
                .zip(to.lens)
                .map(|(from, to)| run(from, to, 8 * rows));
            let packed = from.packed.zip(to.packed);
            let offsets = packed.map(|(from, to)| run(from.offsets, to.offsets, 8 * (rows + 1)));
            std::iter::once(run(from.offset, to.offset, bytes))
                .chain(lens)
                .chain(offsets)
        })
        .filter(|run| !run.from.is_empty())
}

/// Joins runs with small gaps: a copy costs some microseconds, a page almost nothing.
fn runs(runs: impl Iterator<Item = Stretch>) -> Vec<Stretch> {
    let mut all: Vec<_> = runs.collect();
    all.sort_unstable_by_key(|run| run.from.start);
    let mut joined: Vec<Stretch> = Vec::new();
    for run in all {
        match joined.last_mut() {
            Some(last) if follows(last, &run) => last.from.end = run.from.end,
            _ => joined.push(run),
        }
    }
    joined
}

/// Whether one copy can cover both runs: the gap is short, equal on both sides, and unused on the
/// device.
fn follows(last: &Stretch, next: &Stretch) -> bool {
    let gap = next.from.start - last.from.end;
    gap <= PAGE && next.to.checked_sub(last.to) == Some(next.from.start - last.from.start)
}

impl Pinned for Pin {
    fn release(&self) -> bool {
        Pin::release(self)
    }
}
