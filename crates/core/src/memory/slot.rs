//! Batch slots: host memory for whole batches, and the unique tokens that fill it.
//!
//! Many threads write to a slot at once, each to its own rows. That is safe because each row has
//! one token: [`FreeSlot::begin`] makes one [`Rows`] of all rows, which can be split but never
//! copied. The slot counts its unfinished rows; the thread that finishes the last one turns the
//! slot into [`Filled`].

#![allow(unsafe_code)]

use super::region::Region;
use super::times::SlotTimes;
use crate::ledger::BadSample;
use crate::tensor::{Layout, Spec};
use feedline_base::error::{Error, ErrorKind, Lowest, Result, Stage};
use feedline_base::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use feedline_base::sync::{Hold, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// Validity of a row. The crate has no other notion of validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// A sample of the dataset.
    Real = 0,
    /// Fills up the batch: a repeated sample, or a blank row (id `u64::MAX`, zeros).
    Padding = 1,
    /// Replaces a sample that failed.
    Substitute = 2,
}

/// Receives slots when they become full and when they become free, on the thread that caused the
/// change.
pub trait Hooks: Send + Sync {
    /// The slot's last row is finished.
    fn full(&self, slot: Filled);
    /// No code holds the slot any longer.
    fn free(&self, slot: FreeSlot);
}

impl<H: Hooks> Hooks for Arc<H> {
    fn full(&self, slot: Filled) {
        (**self).full(slot);
    }

    fn free(&self, slot: FreeSlot) {
        (**self).free(slot);
    }
}

/// Data that all slots of a pool share.
pub(super) struct SlotPlan {
    pub(super) spec: Spec,
    pub(super) layout: Layout,
    hooks: Box<dyn Hooks>,
}

pub(super) struct Slot {
    pub(super) plan: Arc<SlotPlan>,
    region: Arc<Region>,
    /// Rows not yet finished.
    remaining: AtomicU32,
    /// The numbers of the current batch's [`Ticket`]; the group is `u64::MAX` if there is none.
    /// Atomic only because the slot is shared; written while the slot is free.
    ticket: [AtomicU64; 6],
    /// Rows of the current batch.
    pub(super) rows: AtomicU32,
    /// Number of leading rows that hold samples of the epoch; the others fill up the batch.
    pub(super) valid: AtomicU32,
    times: SlotTimes,
    /// The error of the lowest failed row.
    failure: Mutex<Lowest>,
    /// Samples that failed: planned ones and tried substitutes.
    bad: Mutex<BadSamples>,
    /// Draw numbers other than 0, by row, for pictures that are finished late.
    draws: Mutex<BTreeMap<u32, u64>>,
}

/// The failed samples of a batch, and their distinct ids, which are looked up for every failed row.
#[derive(Default)]
struct BadSamples {
    list: Vec<BadSample>,
    samples: BTreeSet<u64>,
}

/// Identity of the batch in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    /// Number of the iterator's run, which tells the slots of an abandoned run apart.
    pub generation: u64,
    /// Batch number in that run, across epochs.
    pub sequence: u64,
    /// Epoch.
    pub epoch: u64,
    /// Batch index in the epoch.
    pub batch: u64,
    /// Position of row 0 in the epoch.
    pub position: u64,
    /// Group of the samples, if the order has groups.
    pub group: Option<u8>,
}

/// All slots of a new loader, with their regions for registration.
pub struct Pool {
    slots: Vec<FreeSlot>,
    regions: Vec<Arc<Region>>,
}

impl Pool {
    /// Reserves `count` slots. [`announce`](Self::announce) puts them into use.
    pub fn new(spec: Spec, layout: Layout, count: usize, hooks: Box<dyn Hooks>) -> Result<Self> {
        let plan = Arc::new(SlotPlan {
            spec,
            layout,
            hooks,
        });
        let regions = (0..count)
            .map(|_| Region::new(plan.layout.bytes(), "a batch slot").map(Arc::new))
            .collect::<Result<Vec<_>>>()?;
        let slots = regions
            .iter()
            .map(|region| {
                FreeSlot(Arc::new(Slot {
                    plan: plan.clone(),
                    region: region.clone(),
                    remaining: AtomicU32::new(0),
                    ticket: Default::default(),
                    rows: AtomicU32::new(0),
                    valid: AtomicU32::new(0),
                    times: SlotTimes::default(),
                    failure: Mutex::default(),
                    bad: Mutex::default(),
                    draws: Mutex::default(),
                }))
            })
            .collect();
        Ok(Self { slots, regions })
    }

    /// One region per slot, for registration.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// The slots, none of them in use.
    pub fn into_unused(self) -> impl Iterator<Item = Unused> {
        self.slots.into_iter().map(Unused)
    }

    /// Puts all slots into use.
    pub fn announce(self) {
        self.into_unused().for_each(Unused::announce);
    }
}

/// A slot that is not in use yet, so that its memory may be pinned.
pub struct Unused(FreeSlot);

impl Unused {
    pub fn region(&self) -> &Region {
        &self.0.0.region
    }

    /// Puts the slot into use.
    pub fn announce(self) {
        let plan = self.0.0.plan.clone();
        plan.hooks.free(self.0);
    }
}

impl Slot {
    /// Pointer to `len` bytes at `offset` of the slot.
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let inside = offset
            .checked_add(len)
            .is_some_and(|end| end <= self.region.len());
        assert!(inside, "outside of the slot");
        // SAFETY: in bounds by the lines above.
        unsafe { self.region.ptr().as_ptr().add(offset) }
    }

    fn ticket(&self) -> Ticket {
        let words = self
            .ticket
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        let [generation, sequence, epoch, batch, position, _] = words;
        Ticket {
            generation,
            sequence,
            epoch,
            batch,
            position,
            group: self.group(),
        }
    }

    /// Pointer to row `row` of field `field`, and the row's length in bytes.
    pub(super) fn field_at(&self, field: usize, row: u32) -> (*mut u8, usize) {
        let layout = self.plan.layout.fields()[field];
        if let Some(packed) = layout.packed {
            let (start, end) = self.packed_row(packed, row);
            return (self.at(layout.offset + start, end - start), end - start);
        }
        let row_bytes = self.row_bytes(field);
        (
            self.at(layout.offset + row as usize * row_bytes, row_bytes),
            row_bytes,
        )
    }

    /// Row stride of a field in the current batch, in bytes; 0 for a packed field.
    pub(super) fn row_bytes(&self, field: usize) -> usize {
        self.plan.layout.row_bytes(field, self.group())
    }

    /// For an `UpTo` field: the maximum of its first dimension in the current batch, and the bytes
    /// per element of that dimension.
    pub(super) fn most(&self, field: usize) -> (usize, usize) {
        let spec = &self.plan.spec.fields()[field];
        let unit = spec.unit_bytes();
        let row_bytes = if spec.is_packed() {
            spec.row_bytes()
        } else {
            self.row_bytes(field)
        };
        (row_bytes / unit, unit)
    }

    pub(super) fn group(&self) -> Option<u8> {
        u8::try_from(self.ticket[5].load(Ordering::Relaxed)).ok()
    }

    pub(super) fn failed(&self) -> bool {
        self.failure.hold().number().is_some()
    }

    fn note_failure(&self, row: u32, error: Error) {
        self.failure
            .hold()
            .note(row, error.with_batch(self.ticket().batch));
    }
}

/// A free slot. Whoever holds it may make a batch in it.
pub struct FreeSlot(Arc<Slot>);

impl FreeSlot {
    /// The profiler's timestamps of the slot.
    pub fn times(&self) -> &SlotTimes {
        &self.0.times
    }

    /// Starts filling the slot with the batch of `ticket`.
    ///
    /// The batch has `rows` rows (1 ≤ rows ≤ the layout's). The first `valid` are samples of the
    /// epoch, the others fill up the batch.
    pub fn begin(self, ticket: Ticket, rows: u32, valid: u32) -> Rows {
        let slot = self.0;
        assert!(rows > 0 && rows as usize <= slot.plan.layout.rows() && valid <= rows);
        let group = ticket.group.map_or(u64::MAX, u64::from);
        let words = [
            ticket.generation,
            ticket.sequence,
            ticket.epoch,
            ticket.batch,
            ticket.position,
            group,
        ];
        for (place, word) in slot.ticket.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        slot.rows.store(rows, Ordering::Relaxed);
        slot.valid.store(valid, Ordering::Relaxed);
        *slot.failure.hold() = Lowest::default();
        *slot.bad.hold() = BadSamples::default();
        slot.draws.hold().clear();
        // Tokens reach other threads through queues, which order this store before their work.
        slot.remaining.store(rows, Ordering::Relaxed);
        Rows {
            slot,
            start: 0,
            end: rows,
            done: 0,
            lent: 0,
            lent_parts: 0,
            lent_end: (0, 0),
            stands_in: false,
        }
    }
}

/// The right to fill some rows of a slot. Dropping it fails its unfinished rows
/// ([`ErrorKind::Cancelled`]).
pub struct Rows {
    pub(super) slot: Arc<Slot>,
    pub(super) start: u32,
    end: u32,
    /// Finished rows before `start` that `Slot::remaining` still counts. They are subtracted
    /// together: one atomic operation per run of rows, not per row.
    pub(super) done: u32,
    /// Bit mask of the fields of row `start` that are lent, at least in part, to I/O operations.
    pub(super) lent: u64,
    /// Number of lent parts, and the field and end of the last one.
    lent_parts: usize,
    lent_end: (usize, usize),
    /// Whether row `start` gets a substitute.
    pub(super) stands_in: bool,
}

impl Rows {
    /// The profiler's timestamps of the slot.
    pub fn times(&self) -> &SlotTimes {
        &self.slot.times
    }

    /// The batch.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        self.slot.ticket()
    }

    /// The first unfinished row.
    #[inline]
    pub fn first(&self) -> u32 {
        self.start
    }

    /// Records the draw number of the first unfinished row's sample.
    pub fn note_draw(&self, draw: u64) {
        let mut draws = self.slot.draws.hold();
        // Before this substitute, a failed attempt may have recorded another number.
        if draw == 0 {
            draws.remove(&self.start)
        } else {
            draws.insert(self.start, draw)
        };
    }

    /// Number of unfinished rows.
    #[inline]
    pub fn len(&self) -> u32 {
        self.end - self.start
    }

    /// Splits off the first `count` unfinished rows (1 ≤ count ≤ len).
    pub fn take(&mut self, count: u32) -> Rows {
        assert!(count > 0 && count <= self.len() && self.lent == 0);
        let slot = self.slot.clone();
        let start = self.start;
        let end = start + count;
        let taken = Rows {
            slot,
            start,
            end,
            done: 0,
            lent: 0,
            lent_parts: 0,
            lent_end: (0, 0),
            stands_in: false,
        };
        self.start += count;
        taken
    }

    /// Counts the first unfinished row as done.
    pub fn finish_row(&mut self) {
        assert!(self.start < self.end && self.lent == 0);
        self.start += 1;
        self.done += 1;
        self.stands_in = false;
    }

    /// Field `field` of the first `count` unfinished rows, shape `[count, …]`, for writing.
    #[inline]
    pub fn run_mut(&mut self, field: usize, count: u32) -> &mut [u8] {
        assert!(count <= self.len() && self.lent == 0);
        let layout = self.slot.plan.layout.fields()[field];
        let len = count as usize * layout.row_bytes;
        let ptr = self
            .slot
            .at(layout.offset + self.start as usize * layout.row_bytes, len);
        // SAFETY: in bounds (`at`), initialised, alive by `slot`; exclusive: this token of the rows
        // is unique and borrowed mutably, and none of its fields is lent.
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }

    /// Counts the first unfinished rows as done, with these sample ids.
    pub fn finish_run(&mut self, ids: &[u64]) {
        assert!(ids.len() <= self.len() as usize && self.lent == 0);
        let layout = &self.slot.plan.layout;
        let first = self.start as usize;
        let places = self.slot.at(layout.ids() + first * 8, ids.len() * 8);
        let statuses = self.slot.at(layout.status() + first, ids.len());
        let bytes: &[u8] = bytemuck::cast_slice(ids);
        let valid = (self.slot.valid.load(Ordering::Relaxed) as usize)
            .saturating_sub(first)
            .min(ids.len());
        // SAFETY: in bounds, since `valid` is at most the number of ids. Ids and status of these
        // rows are written only through their unique token, and no reference to them exists before
        // the slot is full.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), places, bytes.len());
            std::ptr::write_bytes(statuses, Status::Real as u8, valid);
            std::ptr::write_bytes(
                statuses.add(valid),
                Status::Padding as u8,
                ids.len() - valid,
            );
        }
        self.start += ids.len() as u32;
        self.done += ids.len() as u32;
    }

    /// Counts the first unfinished row as failed.
    pub fn fail_row(&mut self, error: Error) {
        self.slot.note_failure(self.start, error);
        self.finish_row();
    }

    /// Whether a lower row has failed. Then that row's error is the batch's error, even if this row
    /// fails, too.
    pub fn fails_anyway(&self) -> bool {
        self.slot
            .failure
            .hold()
            .number()
            .is_some_and(|lowest| lowest < self.start)
    }

    /// Number of distinct bad samples of the batch, `sample` included.
    pub fn bad_with(&self, sample: u64) -> u64 {
        let bad = self.slot.bad.hold();
        bad.samples.len() as u64 + u64::from(!bad.samples.contains(&sample))
    }

    /// Records a failed sample of the first unfinished row: the planned one or a tried substitute.
    pub fn note_bad(&mut self, sample: BadSample) {
        let mut bad = self.slot.bad.hold();
        bad.samples.insert(sample.sample);
        bad.list.push(sample);
    }

    /// Lends a part of field `field` of the first unfinished row to an I/O operation. Parts of one
    /// field are lent one after the other, in the order of their bytes.
    ///
    /// Until all parts are [restored](Self::restore), the row cannot be finished and its fields
    /// cannot be accessed.
    pub fn lend(&mut self, field: usize, part: Range<usize>) -> RowSpan {
        assert!(
            self.start < self.end
                && part.start <= part.end
                && part.end <= self.slot.field_at(field, self.start).1
        );
        // No two parts overlap.
        assert!(
            self.lent & (1 << field) == 0
                || (self.lent_end.0 == field && self.lent_end.1 <= part.start)
        );
        self.lent |= 1 << field;
        self.lent_parts += 1;
        self.lent_end = (field, part.end);
        RowSpan {
            slot: self.slot.clone(),
            row: self.start,
            field,
            part,
        }
    }

    /// Takes back a lent part.
    pub fn restore(&mut self, span: RowSpan) {
        assert!(
            Arc::ptr_eq(&self.slot, &span.slot)
                && self.start == span.row
                && self.lent & (1 << span.field) != 0
        );
        self.lent_parts -= 1;
        if self.lent_parts == 0 {
            self.lent = 0;
        }
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        if self.start < self.end {
            self.slot.note_failure(
                self.start,
                Error::new(ErrorKind::Cancelled, Stage::Batch, ""),
            );
        }
        let count = self.done + self.len();
        if self.lent != 0 {
            // The operation that holds the bytes was abandoned (a wedged device at shutdown). The
            // countdown must not reach zero: the slot never returns to the pool, and the operation
            // keeps its memory alive.
            return;
        }
        // AcqRel: the last thread sees the writes of all other threads, and the next holder of the
        // slot sees the writes of the last thread.
        if count > 0 && self.slot.remaining.fetch_sub(count, Ordering::AcqRel) == count {
            self.slot.close_gaps();
            self.slot.plan.hooks.full(Filled {
                slot: Some(self.slot.clone()),
            });
        }
    }
}

/// A part of one field of one row, lent to an I/O operation. Unique; keeps the slot's memory alive.
pub struct RowSpan {
    slot: Arc<Slot>,
    row: u32,
    field: usize,
    /// Byte range in the field's row.
    part: Range<usize>,
}

impl RowSpan {
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        let (ptr, _) = self.slot.field_at(self.field, self.row);
        // SAFETY: in bounds (`at`, `lend`), initialised (regions are zeroed), alive (`slot`), and
        // exclusive: `lend` made this span once and no other that overlaps, and `Rows::row` refuses
        // the field until all are restored.
        unsafe { std::slice::from_raw_parts_mut(ptr.add(self.part.start), self.part.len()) }
    }

    pub(crate) fn len(&self) -> usize {
        self.part.len()
    }

    /// Region and offset.
    pub(crate) fn place(&self) -> (u64, usize) {
        let layout = self.slot.plan.layout.fields()[self.field];
        (
            self.slot.region.id(),
            layout.offset + self.row as usize * layout.row_bytes + self.part.start,
        )
    }
}

/// An array of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Array {
    /// The rows of this field.
    Field(usize),
    /// The lengths of this `UpTo` field.
    Lens(usize),
    /// The offsets of this packed field.
    Offsets(usize),
    Ids,
    Status,
}

/// A full slot with one owner. Dropping it frees the slot.
pub struct Filled {
    slot: Option<Arc<Slot>>,
}

impl Filled {
    pub(super) fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("taken only by drop")
    }

    /// The batch.
    pub fn ticket(&self) -> Ticket {
        self.slot().ticket()
    }

    /// The draw number of a row's sample; 0 if none was recorded.
    pub fn draw_of(&self, row: usize) -> u64 {
        self.slot()
            .draws
            .hold()
            .get(&(row as u32))
            .copied()
            .unwrap_or(0)
    }

    /// The profiler's timestamps of the slot.
    pub fn times(&self) -> &SlotTimes {
        &self.slot().times
    }

    /// Marks the batch as held by the user.
    pub fn hand_out(&self) {
        self.slot().region.hold(true);
    }

    /// Number of rows in the batch.
    pub fn rows(&self) -> usize {
        self.slot().rows.load(Ordering::Relaxed) as usize
    }

    /// Number of leading rows that hold samples of the epoch.
    pub fn valid(&self) -> usize {
        self.slot().valid.load(Ordering::Relaxed) as usize
    }

    /// Takes the failure of the lowest failed row.
    pub fn take_failure(&self) -> Option<Error> {
        self.slot().failure.hold().take()
    }

    /// Takes the failed samples, sorted by row.
    pub fn take_bad(&self) -> Vec<BadSample> {
        let mut bad = std::mem::take(&mut *self.slot().bad.hold()).list;
        bad.sort_by_key(|bad| bad.row);
        bad
    }

    /// Records a failure of the whole batch under row 0, so that it precedes the failures of other
    /// rows.
    pub fn note_failure(&self, error: Error) {
        self.slot().note_failure(0, error);
    }

    /// Whether any row failed.
    pub fn failed(&self) -> bool {
        self.slot().failed()
    }

    /// The fields.
    pub(crate) fn spec(&self) -> &Spec {
        &self.slot().plan.spec
    }

    /// The batch's rows of field `field`, dense.
    pub fn bytes(&self, field: usize) -> &[u8] {
        self.array(
            self.slot().plan.layout.fields()[field].offset,
            self.used(field),
        )
    }

    /// Bytes per row of field `field`; 0 for a packed one.
    pub fn row_bytes(&self, field: usize) -> usize {
        self.slot().row_bytes(field)
    }

    /// A range of the slot's bytes, across arrays and their gaps.
    pub fn span(&self, range: std::ops::Range<usize>) -> &[u8] {
        self.array(range.start, range.len())
    }

    /// True lengths of an `UpTo` field.
    pub fn lens(&self, field: usize) -> Option<&[u64]> {
        let offset = self.slot().plan.layout.fields()[field].lens?;
        Some(bytemuck::cast_slice(self.array(offset, 8 * self.rows())))
    }

    /// Sample ids.
    pub fn ids(&self) -> &[u64] {
        bytemuck::cast_slice(self.array(self.slot().plan.layout.ids(), 8 * self.rows()))
    }

    /// Status bytes, values of [`Status`].
    pub fn status(&self) -> &[u8] {
        self.array(self.slot().plan.layout.status(), self.rows())
    }

    /// Start of an array, for a framework that reads and writes it while this `Filled` lives.
    ///
    /// No slice of the batch may be borrowed meanwhile. Null for the lengths of a fixed field. The
    /// pointer does not come from a slice, because a pointer from a shared borrow must not be
    /// written through.
    pub fn ptr(&self, array: Array) -> *mut u8 {
        let layout = &self.slot().plan.layout;
        let rows = self.rows();
        match array {
            Array::Field(field) => {
                let used = self.used(field);
                self.slot().at(layout.fields()[field].offset, used)
            }
            Array::Offsets(field) => {
                let packed = layout.fields()[field].packed;
                packed.map_or(std::ptr::null_mut(), |packed| {
                    self.slot().at(packed.offsets, 8 * (rows + 1))
                })
            }
            Array::Lens(field) => layout.fields()[field]
                .lens
                .map_or(std::ptr::null_mut(), |offset| {
                    self.slot().at(offset, 8 * rows)
                }),
            Array::Ids => self.slot().at(layout.ids(), 8 * rows),
            Array::Status => self.slot().at(layout.status(), rows),
        }
    }

    /// The rows of a `u64` field. Panics if they are not aligned to 8 bytes.
    pub fn numbers_mut(&mut self, field: usize) -> &mut [u64] {
        bytemuck::cast_slice_mut(self.array_mut(field))
    }

    /// All rows of two different fields. Panics if both are the same field.
    pub fn two_arrays(&mut self, a: usize, b: usize) -> (&mut [u8], &mut [u8]) {
        assert_ne!(a, b);
        let first: *mut [u8] = self.array_mut(a);
        let second = self.array_mut(b);
        // SAFETY: arrays of different fields do not overlap (tested in `tensor`), so both borrows
        // are exclusive. Both live as long as the mutable borrow of `self`.
        (unsafe { &mut *first }, second)
    }

    pub(super) fn array(&self, offset: usize, len: usize) -> &[u8] {
        let ptr = self.slot().at(offset, len);
        // SAFETY: in bounds, initialised, alive. `Filled` is unique and exists only while no `Rows`
        // or span of this batch does, so no thread writes while it is borrowed shared (`array_mut`
        // borrows mutably).
        unsafe { std::slice::from_raw_parts(ptr, len) }
    }

    pub(super) fn array_mut(&mut self, field: usize) -> &mut [u8] {
        let offset = self.slot().plan.layout.fields()[field].offset;
        let len = self.used(field);
        self.bytes_at_mut(offset, len)
    }

    pub(super) fn bytes_at_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        let ptr = self.slot().at(offset, len);
        // SAFETY: as in `array`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.region.hold(false);
            let plan = slot.plan.clone();
            plan.hooks.free(FreeSlot(slot));
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::tensor::{DType, Field};
    use std::sync::mpsc::{Receiver, Sender, channel};

    struct Queues {
        full: Mutex<Sender<Filled>>,
        free: Mutex<Sender<FreeSlot>>,
    }

    impl Hooks for Queues {
        fn full(&self, slot: Filled) {
            let _ = self.full.lock().unwrap().send(slot);
        }
        fn free(&self, slot: FreeSlot) {
            let _ = self.free.lock().unwrap().send(slot);
        }
    }

    /// Slots of fields `image`, `label`, `tokens`; and the queues of full and free slots.
    pub(in crate::memory) fn pool(
        rows: usize,
        count: usize,
    ) -> (Vec<Arc<Region>>, Receiver<Filled>, Receiver<FreeSlot>) {
        let fields = vec![
            Field::fixed("image", DType::U8, [3, 5]),
            Field::fixed("label", DType::I64, []),
            Field::up_to("tokens", DType::U16, 4),
        ];
        pool_of(fields, rows, count)
    }

    /// Like [`pool`], with these fields.
    pub(in crate::memory) fn pool_of(
        fields: Vec<Field>,
        rows: usize,
        count: usize,
    ) -> (Vec<Arc<Region>>, Receiver<Filled>, Receiver<FreeSlot>) {
        let spec = Spec::new(fields).unwrap();
        let layout = Layout::new(&spec, rows).unwrap();
        let (full, full_out) = channel();
        let (free, free_out) = channel();
        let hooks = Queues {
            full: Mutex::new(full),
            free: Mutex::new(free),
        };
        let pool = Pool::new(spec, layout, count, Box::new(hooks)).unwrap();
        let regions = pool.regions().to_vec();
        pool.announce();
        (regions, full_out, free_out)
    }

    #[test]
    fn a_slot_is_full_once_its_last_row_is_finished() {
        let (_pool, full, free) = pool(64, 1);
        for rows in [1_u32, 2, 63, 64] {
            let mut all = free.recv().unwrap().begin(
                Ticket {
                    batch: 7,
                    ..Ticket::default()
                },
                rows,
                rows,
            );
            let mut parts = Vec::new();
            while all.len() > 0 {
                parts.push(all.take(all.len().min(5)));
            }
            drop(all);
            assert!(full.try_recv().is_err());
            std::thread::scope(|scope| {
                for mut part in parts {
                    scope.spawn(move || {
                        while part.len() > 0 {
                            let id = u64::from(part.first()) * 10;
                            let mut row = part.row();
                            row.mark(id);
                            row.bytes_mut(0).fill(id as u8);
                            row.slice_mut::<i64>(1).unwrap()[0] = -(id as i64);
                            row.copy_from(2, &[1, 0, 2, 0]).unwrap();
                            part.finish_row();
                        }
                    });
                }
            });
            let filled = full.recv().unwrap();
            assert!(full.try_recv().is_err() && !filled.failed());
            assert_eq!((filled.ticket().batch, filled.rows()), (7, rows as usize));
            assert_eq!(
                filled.ids(),
                (0..u64::from(rows)).map(|row| row * 10).collect::<Vec<_>>()
            );
            assert_eq!(filled.bytes(0).len(), 15 * rows as usize);
            assert!(
                filled
                    .bytes(0)
                    .chunks(15)
                    .zip(filled.ids())
                    .all(|(row, id)| row.iter().all(|b| *b == *id as u8))
            );
            assert_eq!(filled.lens(2).unwrap(), vec![2; rows as usize]);
            assert_eq!(&filled.bytes(2)[..8], &[1, 0, 2, 0, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn the_failure_of_the_lowest_row_wins_in_any_order() {
        let (_pool, full, free) = pool(4, 1);
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
            let mut all = free.recv().unwrap().begin(
                Ticket {
                    batch: 3,
                    ..Ticket::default()
                },
                4,
                4,
            );
            let mut parts: Vec<_> = (0..4).map(|_| Some(all.take(1))).collect();
            drop(all);
            for row in order {
                let mut part = parts[row].take().unwrap();
                if row % 2 == 1 {
                    part.fail_row(Error::user(format!("row {row}")))
                } else {
                    part.finish_row()
                }
            }
            let error = full.recv().unwrap().take_failure().unwrap();
            assert_eq!((error.message(), error.site().batch), ("row 1", Some(3)));
        }
    }

    #[test]
    fn dropping_rows_returns_the_slot_as_cancelled() {
        let (_pool, full, free) = pool(8, 1);
        let mut rows = free.recv().unwrap().begin(Ticket::default(), 8, 8);
        drop(rows.take(3));
        drop(rows);
        let filled = full.recv().unwrap();
        assert_eq!(filled.take_failure().unwrap().kind(), ErrorKind::Cancelled);
        drop(filled);
        assert!(free.try_recv().is_ok());
    }

    #[test]
    fn a_lent_field_is_refused_and_keeps_its_slot_out_of_the_pool() {
        let (_pool, full, free) = pool(1, 1);
        let mut rows = free.recv().unwrap().begin(Ticket::default(), 1, 1);
        let mut span = rows.lend(0, 0..15);
        span.as_mut_slice().fill(9);
        let touched = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rows.row().bytes_mut(0)[0] = 1
        }));
        assert!(touched.is_err());
        rows.row().slice_mut::<i64>(1).unwrap()[0] = 5;
        rows.restore(span);
        assert_eq!(rows.row().bytes_mut(0), &[9; 15]);
        let abandoned = rows.lend(0, 0..15);
        drop(rows);
        assert!(full.try_recv().is_err());
        drop(abandoned);
    }

    #[test]
    fn rows_after_the_valid_ones_are_padding_and_blank_ones_zero() {
        let (_pool, full, free) = pool(8, 1);
        let mut rows = free.recv().unwrap().begin(Ticket::default(), 8, 8);
        for field in 0..3 {
            rows.run_mut(field, 8).fill(0xaa);
        }
        rows.finish_run(&[1; 8]);
        drop(rows);
        drop(full.recv().unwrap());
        let mut rows = free.recv().unwrap().begin(Ticket::default(), 8, 3);
        rows.finish_run(&[10, 11]);
        rows.row().mark(12);
        rows.finish_row();
        rows.row().mark(13);
        rows.finish_row();
        rows.finish_run(&[14]);
        rows.blank();
        let filled = full.recv().unwrap();
        assert_eq!(filled.valid(), 3);
        assert_eq!(
            filled.ids(),
            [10, 11, 12, 13, 14, u64::MAX, u64::MAX, u64::MAX]
        );
        assert_eq!(filled.status(), [0, 0, 0, 1, 1, 1, 1, 1]);
        for field in 0..3 {
            let row_bytes = filled.row_bytes(field);
            assert!(
                filled.bytes(field)[..5 * row_bytes]
                    .iter()
                    .all(|byte| *byte == 0xaa)
            );
            assert!(
                filled.bytes(field)[5 * row_bytes..]
                    .iter()
                    .all(|byte| *byte == 0),
                "field {field}"
            );
        }
        assert_eq!(filled.lens(2).map(|lens| &lens[5..]), Some(&[0, 0, 0][..]));
    }
}
