//! The slot pool: host memory for whole batches, and the unique tokens by which it is filled.
//!
//! A slot is written by many threads at once, each in rows of its own. That is safe because a row's token exists once:
//! [`FreeSlot::begin`] makes one [`Rows`] of all rows, which can only be split, never copied. The countdown of
//! unfinished rows lives in the slot; whoever finishes the last row gets the whole slot as [`Filled`].

#![allow(unsafe_code)]

use super::region::Region;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::ledger::BadSample;
use crate::meter::SlotTimes;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::tensor::{Element, Field, Layout, Spec};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Validity of a row. The only notion of validity in the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// A sample of the dataset.
    Real = 0,
    /// Fills the batch up: repeats another sample, or is blank (id `u64::MAX`, zeros).
    Padding = 1,
    /// Stands in for a sample that could not be had.
    Substitute = 2,
}

/// Where slots go when they are full and when they are free again. Called from whichever thread finished.
pub(crate) trait Hooks: Send + Sync {
    /// The last row is done.
    fn full(&self, slot: Filled);
    /// Nobody holds the slot any more.
    fn free(&self, slot: FreeSlot);
}

/// What all slots of a pool share.
struct Plan {
    spec: Spec,
    layout: Layout,
    hooks: Box<dyn Hooks>,
}

struct Slot {
    plan: Arc<Plan>,
    region: Arc<Region>,
    /// Rows not yet finished.
    remaining: AtomicU32,
    /// Which batch the present use is, see [`Ticket`]. Atomics only because the slot is shared; they are written while
    /// the slot is free.
    ticket: [AtomicU64; 5],
    /// Rows in the present use, and how many of them, the first ones, are samples of the epoch; the others fill up.
    rows: AtomicU32,
    valid: AtomicU32,
    times: SlotTimes,
    /// The failure of the lowest row, so that the error does not depend on which worker was first.
    failure: Mutex<Option<(u32, Error)>>,
    /// Samples that others stand in for, or were tried to.
    bad: Mutex<Noted>,
}

/// What was noted of bad samples, with their distinct ids: asked for at each row.
#[derive(Default)]
struct Noted {
    list: Vec<BadSample>,
    samples: BTreeSet<u64>,
}

/// Which batch a slot is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// Which run of the iterator; slots of an abandoned one are told by it.
    pub(crate) generation: u64,
    /// Position in that run, across epochs.
    pub(crate) sequence: u64,
    /// Epoch.
    pub(crate) epoch: u64,
    /// Batch index in the epoch.
    pub(crate) batch: u64,
    /// Position in the epoch of row 0.
    pub(crate) position: u64,
}

/// All slots of a new loader, and their regions for registration.
pub(crate) struct Pool {
    plan: Arc<Plan>,
    slots: Vec<FreeSlot>,
    regions: Vec<Arc<Region>>,
}

impl Pool {
    /// Reserves `count` slots. They are of no use before [`announce`](Self::announce).
    pub(crate) fn new(spec: Spec, layout: Layout, count: usize, hooks: Box<dyn Hooks>) -> Result<Self> {
        let plan = Arc::new(Plan { spec, layout, hooks });
        let regions = (0..count)
            .map(|_| Region::new(plan.layout.bytes(), "a batch slot").map(Arc::new))
            .collect::<Result<Vec<_>>>()?;
        let slot = |region: &Arc<Region>| {
            FreeSlot(Arc::new(Slot {
                plan: plan.clone(),
                region: region.clone(),
                remaining: AtomicU32::new(0),
                ticket: Default::default(),
                rows: AtomicU32::new(0),
                valid: AtomicU32::new(0),
                times: SlotTimes::default(),
                failure: Mutex::new(None),
                bad: Mutex::default(),
            }))
        };
        let slots = regions.iter().map(slot).collect();
        Ok(Self { plan, slots, regions })
    }

    /// One region per slot, for registration.
    pub(crate) fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Announces each slot through `hooks.free`, after `ready` has seen its region.
    pub(crate) fn announce(self, mut ready: impl FnMut(&Region)) {
        for (slot, region) in self.slots.into_iter().zip(&self.regions) {
            ready(region);
            self.plan.hooks.free(slot);
        }
    }
}

impl Slot {
    /// Pointer to `len` bytes at `offset` of the slot.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.region.len(), "outside of the slot");
        // SAFETY: in bounds by the line above.
        unsafe { self.region.ptr().as_ptr().add(offset) }
    }

    fn ticket(&self) -> Ticket {
        let words = self.ticket.each_ref().map(|word| word.load(Ordering::Relaxed));
        let [generation, sequence, epoch, batch, position] = words;
        Ticket { generation, sequence, epoch, batch, position }
    }

    fn field_at(&self, field: usize, row: u32) -> (*mut u8, usize) {
        let layout = self.plan.layout.fields()[field];
        (self.at(layout.offset + row as usize * layout.row_bytes, layout.row_bytes), layout.row_bytes)
    }

    fn note_failure(&self, row: u32, error: Error) {
        let mut failure = self.failure.lock().unwrap_or_else(|poison| poison.into_inner());
        if failure.as_ref().is_none_or(|(lowest, _)| row < *lowest) {
            *failure = Some((row, error.with_batch(self.ticket().batch)));
        }
    }
}

/// A slot that nobody uses: the permit to make a batch.
pub(crate) struct FreeSlot(Arc<Slot>);

impl FreeSlot {
    /// What the profiler notes of the slot.
    pub(crate) fn times(&self) -> &SlotTimes {
        &self.0.times
    }

    /// Starts filling the slot as the batch of `ticket` with `rows` rows (1 ≤ rows ≤ the layout's), of which the first
    /// `valid` are samples of the epoch and the others fill up.
    pub(crate) fn begin(self, ticket: Ticket, rows: u32, valid: u32) -> Rows {
        let slot = self.0;
        assert!(rows > 0 && rows as usize <= slot.plan.layout.rows() && valid <= rows);
        let words = [ticket.generation, ticket.sequence, ticket.epoch, ticket.batch, ticket.position];
        for (place, word) in slot.ticket.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        slot.rows.store(rows, Ordering::Relaxed);
        slot.valid.store(valid, Ordering::Relaxed);
        *slot.failure.lock().unwrap_or_else(|poison| poison.into_inner()) = None;
        *slot.bad.lock().unwrap_or_else(|poison| poison.into_inner()) = Noted::default();
        // The tokens reach other threads through queues, which order this store before their work.
        slot.remaining.store(rows, Ordering::Relaxed);
        Rows { slot, start: 0, end: rows, done: 0, lent: 0 }
    }
}

/// The right to fill some rows of a slot. Dropped rows that were not finished count as failed ([`ErrorKind::Cancelled`]).
pub(crate) struct Rows {
    slot: Arc<Slot>,
    start: u32,
    end: u32,
    /// Rows before `start` that are finished but not yet counted down: one atomic per run, not per row.
    done: u32,
    /// Fields of row `start` that an I/O operation holds.
    lent: u64,
}

impl Rows {
    /// What the profiler notes of the slot.
    pub(crate) fn times(&self) -> &SlotTimes {
        &self.slot.times
    }

    /// Which batch.
    pub(crate) fn ticket(&self) -> Ticket {
        self.slot.ticket()
    }

    /// The first unfinished row.
    pub(crate) fn first(&self) -> u32 {
        self.start
    }

    /// Unfinished rows.
    pub(crate) fn len(&self) -> u32 {
        self.end - self.start
    }

    /// Takes the first `count` unfinished rows as a token of their own (1 ≤ count ≤ len).
    pub(crate) fn take(&mut self, count: u32) -> Rows {
        assert!(count > 0 && count <= self.len() && self.lent == 0);
        let taken = Rows { slot: self.slot.clone(), start: self.start, end: self.start + count, done: 0, lent: 0 };
        self.start += count;
        taken
    }

    /// The first unfinished row, for writing.
    pub(crate) fn row(&mut self) -> Row<'_> {
        assert!(self.start < self.end);
        Row { slot: &self.slot, row: self.start, allowed: !self.lent }
    }

    /// Counts the first unfinished row as done.
    pub(crate) fn finish_row(&mut self) {
        assert!(self.start < self.end && self.lent == 0);
        self.start += 1;
        self.done += 1;
    }

    /// Field `field` of the first `count` unfinished rows at once, shape `[count, …]`, for writing.
    pub(crate) fn run_mut(&mut self, field: usize, count: u32) -> &mut [u8] {
        assert!(count <= self.len() && self.lent == 0);
        let layout = self.slot.plan.layout.fields()[field];
        let len = count as usize * layout.row_bytes;
        let ptr = self.slot.at(layout.offset + self.start as usize * layout.row_bytes, len);
        // SAFETY: in bounds (`at`), initialised, alive by `slot`; exclusive: this token of the rows is unique and
        // borrowed mutably, and none of its fields is lent.
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }

    /// Makes all unfinished rows blank, and counts them as done.
    pub(crate) fn blank(mut self) {
        while self.len() > 0 {
            let mut row = self.row();
            for field in 0..row.spec().fields().len() {
                row.clear(field);
            }
            row.mark(u64::MAX);
            self.finish_row();
        }
    }

    /// Gives the first rows these sample ids, and counts them as done.
    pub(crate) fn finish_run(&mut self, ids: &[u64]) {
        assert!(ids.len() <= self.len() as usize && self.lent == 0);
        let layout = &self.slot.plan.layout;
        let first = self.start as usize;
        let places = self.slot.at(layout.ids() + first * 8, ids.len() * 8);
        let statuses = self.slot.at(layout.status() + first, ids.len());
        let bytes: &[u8] = bytemuck::cast_slice(ids);
        let valid = (self.slot.valid.load(Ordering::Relaxed) as usize).saturating_sub(first).min(ids.len());
        // SAFETY: in bounds, since `valid` is at most the number of ids; ids and status of these rows are written through
        // their unique token only, and no reference to them exists before the slot is full.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), places, bytes.len());
            std::ptr::write_bytes(statuses, Status::Real as u8, valid);
            std::ptr::write_bytes(statuses.add(valid), Status::Padding as u8, ids.len() - valid);
        }
        self.start += ids.len() as u32;
        self.done += ids.len() as u32;
    }

    /// Counts the first unfinished row as failed.
    pub(crate) fn fail_row(&mut self, error: Error) {
        self.slot.note_failure(self.start, error);
        self.finish_row();
    }

    /// A lower row of the batch has failed, whose error is that of the batch whatever becomes of this one.
    pub(crate) fn fails_anyway(&self) -> bool {
        let failure = self.slot.failure.lock().unwrap_or_else(|poison| poison.into_inner());
        failure.as_ref().is_some_and(|(lowest, _)| *lowest < self.start)
    }

    /// Distinct samples of the batch that were noted so far, and this one.
    pub(crate) fn bad_with(&self, sample: u64) -> u64 {
        let bad = self.slot.bad.lock().unwrap_or_else(|poison| poison.into_inner());
        bad.samples.len() as u64 + u64::from(!bad.samples.contains(&sample))
    }

    /// Notes a sample that the first unfinished row wanted, or was tried in its place.
    pub(crate) fn note_bad(&mut self, bad: BadSample) {
        let mut noted = self.slot.bad.lock().unwrap_or_else(|poison| poison.into_inner());
        noted.samples.insert(bad.sample);
        noted.list.push(bad);
    }

    /// Counts the first unfinished row as done, with a sample that was not the planned one. Rows that fill up stay what they
    /// are.
    pub(crate) fn finish_substitute(&mut self) {
        let mut row = self.row();
        if row.row < row.slot.valid.load(Ordering::Relaxed) {
            let place = row.slot.plan.layout.status() + row.row as usize;
            row.put(place, &[Status::Substitute as u8]);
        }
        self.finish_row();
    }

    /// Lends field `field` of the first unfinished row to an I/O operation. Until it comes back the row cannot be
    /// finished, and nobody can reach these bytes.
    pub(crate) fn lend(&mut self, field: usize) -> RowSpan {
        assert!(self.start < self.end && self.lent & (1 << field) == 0);
        self.lent |= 1 << field;
        RowSpan { slot: self.slot.clone(), row: self.start, field }
    }

    /// Takes back what `lend` gave.
    pub(crate) fn restore(&mut self, span: RowSpan) {
        assert!(Arc::ptr_eq(&self.slot, &span.slot) && self.start == span.row && self.lent & (1 << span.field) != 0);
        self.lent &= !(1 << span.field);
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        if self.start < self.end {
            self.slot.note_failure(self.start, Error::new(ErrorKind::Cancelled, Stage::Batch, ""));
        }
        let count = self.done + self.len();
        if self.lent != 0 {
            // The operation that holds the bytes was abandoned (a wedged device at shutdown). The countdown must not
            // reach zero: the slot stays out of the pool for good and its memory stays alive with the operation.
            return;
        }
        // AcqRel: the last one sees the writes of all others, and its own are seen by whoever gets the slot.
        if count > 0 && self.slot.remaining.fetch_sub(count, Ordering::AcqRel) == count {
            self.slot.plan.hooks.full(Filled { slot: Some(self.slot.clone()) });
        }
    }
}

/// One field of one row, lent to an I/O operation; unique, keeps the slot's memory alive.
pub(crate) struct RowSpan {
    slot: Arc<Slot>,
    row: u32,
    field: usize,
}

impl RowSpan {
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        let (ptr, len) = self.slot.field_at(self.field, self.row);
        // SAFETY: in bounds (`at`), initialised (regions are zeroed), alive (`slot`), and exclusive: `lend` made this
        // span once and `Rows::row` refuses the field until it is restored.
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }

    pub(crate) fn len(&self) -> usize {
        self.slot.plan.layout.fields()[self.field].row_bytes
    }

    pub(crate) fn place(&self) -> (u64, usize) {
        let layout = self.slot.plan.layout.fields()[self.field];
        (self.slot.region.id(), layout.offset + self.row as usize * layout.row_bytes)
    }
}

/// One row of a batch while it is being filled: what decoders and transforms write to.
///
/// Fields are addressed by their index in the spec (see [`Row::index_of`]).
pub struct Row<'a> {
    slot: &'a Slot,
    row: u32,
    /// Fields that may be touched now.
    allowed: u64,
}

impl Row<'_> {
    /// The fields of the row.
    pub fn spec(&self) -> &Spec {
        &self.slot.plan.spec
    }

    /// Index of the field with that name.
    ///
    /// Errors: [`ErrorKind::Shape`] when there is none.
    pub fn index_of(&self, name: &str) -> Result<usize> {
        index_of(self.spec(), name)
    }

    /// Row number in the batch.
    pub fn number(&self) -> usize {
        self.row as usize
    }

    /// The bytes of field `field`, all `max` elements of an `UpTo` field. Panics when there is no such field.
    pub fn bytes_mut(&mut self, field: usize) -> &mut [u8] {
        assert!(self.allowed & (1 << field) != 0, "field {field} is being read into");
        let (ptr, len) = self.slot.field_at(field, self.row);
        // SAFETY: in bounds, initialised, alive by the borrow of the slot; exclusive: this `Row` borrows the unique
        // token of the row mutably, and lent fields were refused above.
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }

    /// The elements of field `field`.
    ///
    /// Errors: [`ErrorKind::Shape`] when `T` is not the field's dtype.
    pub fn slice_mut<T: Element>(&mut self, field: usize) -> Result<&mut [T]> {
        check_dtype::<T>(&self.slot.plan.spec.fields()[field])?;
        Ok(bytemuck::cast_slice_mut(self.bytes_mut(field)))
    }

    /// One field for reading, another for writing. Panics when they are the same or there is no such field.
    pub(crate) fn input_and_output(&mut self, input: usize, output: usize) -> (&[u8], &mut [u8]) {
        assert_ne!(input, output);
        let first: *mut [u8] = self.bytes_mut(input);
        let second = self.bytes_mut(output);
        // SAFETY: arrays of different fields do not overlap (tested in `tensor`), so both borrows are exclusive; both live
        // as long as the mutable borrow of `self`.
        (unsafe { &*first }, second)
    }

    /// The elements of field `field`, for reading. Panics when there is no such field.
    ///
    /// Errors: [`ErrorKind::Shape`] when `T` is not the field's dtype.
    pub fn slice<T: Element>(&self, field: usize) -> Result<&[T]> {
        check_dtype::<T>(&self.slot.plan.spec.fields()[field])?;
        assert!(self.allowed & (1 << field) != 0, "field {field} is being read into");
        let (ptr, len) = self.slot.field_at(field, self.row);
        // SAFETY: as in `bytes_mut`, with a shared borrow of the `Row`.
        Ok(bytemuck::cast_slice(unsafe { std::slice::from_raw_parts(ptr, len) }))
    }

    /// The true length (first dimension) of an `UpTo` field; `None` for a fixed shape.
    pub fn len_of(&self, field: usize) -> Option<usize> {
        let offset = self.slot.plan.layout.fields()[field].lens? + self.row as usize * 8;
        let mut bytes = [0; 8];
        let ptr = self.slot.at(offset, 8);
        // SAFETY: in bounds, initialised; the lengths of a row are reached through its unique token only.
        unsafe { std::ptr::copy_nonoverlapping(ptr, bytes.as_mut_ptr(), 8) };
        Some(u64::from_ne_bytes(bytes) as usize)
    }

    /// The elements of two different fields at once, so that one can be computed from the other.
    ///
    /// Errors: [`ErrorKind::Shape`] when a dtype does not fit or both are the same field.
    pub fn two_mut<A: Element, B: Element>(&mut self, a: usize, b: usize) -> Result<(&mut [A], &mut [B])> {
        check_dtype::<A>(&self.slot.plan.spec.fields()[a])?;
        check_dtype::<B>(&self.slot.plan.spec.fields()[b])?;
        check_distinct(a, b)?;
        let first: *mut [u8] = self.bytes_mut(a);
        let second = self.bytes_mut(b);
        // SAFETY: `a != b`, and arrays of different fields do not overlap (tested in `tensor`), so both borrows are
        // exclusive; both live as long as the mutable borrow of `self`.
        let first = unsafe { &mut *first };
        Ok((bytemuck::cast_slice_mut(first), bytemuck::cast_slice_mut(second)))
    }

    /// Sets the true length (first dimension) of an `UpTo` field and zeroes the bytes behind it.
    ///
    /// Errors: [`ErrorKind::Shape`] when the field is of fixed shape or `len` is over its maximum.
    pub fn set_len(&mut self, field: usize, len: usize) -> Result<()> {
        let (max, row_bytes) = up_to_max(&self.slot.plan.spec.fields()[field], len)?;
        let used = row_bytes / max * len;
        self.bytes_mut(field)[used..].fill(0);
        if let Some(offset) = self.slot.plan.layout.fields()[field].lens {
            self.put(offset + self.row as usize * 8, &(len as u64).to_ne_bytes());
        }
        Ok(())
    }

    /// Copies `bytes` into field `field`: the whole row of a fixed field, at most the row of an `UpTo` field.
    ///
    /// Errors: [`ErrorKind::Shape`] when the length does not fit.
    pub fn copy_from(&mut self, field: usize, bytes: &[u8]) -> Result<()> {
        let spec = &self.slot.plan.spec.fields()[field];
        let row_bytes = spec.row_bytes();
        if let crate::tensor::Shape::UpTo { max, .. } = spec.shape() {
            let unit = row_bytes / max;
            if !bytes.len().is_multiple_of(unit) {
                return Err(wrong_bytes(spec, bytes.len()));
            }
            self.set_len(field, bytes.len() / unit)?;
        } else if bytes.len() != row_bytes {
            return Err(wrong_bytes(spec, bytes.len()));
        }
        self.bytes_mut(field)[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Zeroes a field, and its length if it has one.
    pub(crate) fn clear(&mut self, field: usize) {
        self.bytes_mut(field).fill(0);
        self.clear_len(field);
    }

    /// Sets the length of an `UpTo` field to 0; its bytes stay as they are.
    pub(crate) fn clear_len(&mut self, field: usize) {
        if let Some(offset) = self.slot.plan.layout.fields()[field].lens {
            self.put(offset + self.row as usize * 8, &0_u64.to_ne_bytes());
        }
    }

    /// Sample id of the row, and its validity, which follows from its place.
    pub(crate) fn mark(&mut self, id: u64) {
        let valid = self.row < self.slot.valid.load(Ordering::Relaxed);
        let status = if valid { Status::Real } else { Status::Padding };
        let layout = &self.slot.plan.layout;
        let (ids, statuses) = (layout.ids(), layout.status());
        self.put(ids + self.row as usize * 8, &id.to_ne_bytes());
        self.put(statuses + self.row as usize, &[status as u8]);
    }

    /// Fields outside of `mask` cannot be reached through the result: a decoder sees its own field only.
    pub(crate) fn only(&mut self, mask: u64) -> Row<'_> {
        Row { slot: self.slot, row: self.row, allowed: self.allowed & mask }
    }

    fn put(&mut self, offset: usize, bytes: &[u8]) {
        let ptr = self.slot.at(offset, bytes.len());
        // SAFETY: in bounds; `lens`, `ids` and `status` of a row are written through its unique token only, and no
        // reference to them exists before the slot is full.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), ptr, bytes.len()) }
    }
}

fn index_of(spec: &Spec, name: &str) -> Result<usize> {
    spec.index_of(name).ok_or_else(|| {
        let names: Vec<_> = spec.fields().iter().map(Field::name).collect();
        let message = format!("no field `{name}`; there are {}", names.join(", "));
        Error::new(ErrorKind::Shape, Stage::Batch, message)
    })
}

fn check_dtype<T: Element>(field: &Field) -> Result<()> {
    if field.dtype() == T::DTYPE {
        return Ok(());
    }
    let message = format!("field `{}` holds {}, not {}", field.name(), field.dtype(), T::DTYPE);
    Err(Error::new(ErrorKind::Shape, Stage::Batch, message))
}

fn check_distinct(a: usize, b: usize) -> Result<()> {
    if a != b {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Shape, Stage::Batch, format!("field {a} cannot be borrowed twice")))
}

fn up_to_max(field: &Field, len: usize) -> Result<(usize, usize)> {
    match field.shape() {
        crate::tensor::Shape::UpTo { max, .. } if len <= *max => Ok((*max, field.row_bytes())),
        crate::tensor::Shape::UpTo { max, .. } => {
            let message = format!("field `{}` takes at most {max}, the sample has {len}", field.name());
            Err(Error::new(ErrorKind::Shape, Stage::Batch, message))
        }
        crate::tensor::Shape::Fixed(_) => {
            let message = format!("field `{}` is of fixed shape", field.name());
            Err(Error::new(ErrorKind::Shape, Stage::Batch, message))
        }
    }
}

fn wrong_bytes(field: &Field, len: usize) -> Error {
    let most = if field.is_up_to() { "at most " } else { "" };
    let message = format!("field `{}` takes {most}{} bytes, the sample has {len}", field.name(), field.row_bytes());
    Error::new(ErrorKind::Shape, Stage::Batch, message)
}

/// An array of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Array {
    /// Of this field.
    Field(usize),
    /// The lengths of this `UpTo` field.
    Lens(usize),
    Ids,
    Status,
}

/// A full slot, uniquely owned; free again when dropped.
pub(crate) struct Filled {
    slot: Option<Arc<Slot>>,
}

impl Filled {
    fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("taken only by drop")
    }

    /// Which batch.
    pub(crate) fn ticket(&self) -> Ticket {
        self.slot().ticket()
    }

    /// What the profiler notes of the slot.
    pub(crate) fn times(&self) -> &SlotTimes {
        &self.slot().times
    }

    /// Rows in use.
    pub(crate) fn rows(&self) -> usize {
        self.slot().rows.load(Ordering::Relaxed) as usize
    }

    /// Rows that do not fill up; they come first.
    pub(crate) fn valid(&self) -> usize {
        self.slot().valid.load(Ordering::Relaxed) as usize
    }

    /// Takes the failure of the lowest row, if any row failed.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.slot().failure.lock().unwrap_or_else(|poison| poison.into_inner()).take().map(|(_, error)| error)
    }

    /// Takes what could not be had and was substituted, by row.
    pub(crate) fn take_bad(&self) -> Vec<BadSample> {
        let mut bad = std::mem::take(&mut *self.slot().bad.lock().unwrap_or_else(|poison| poison.into_inner())).list;
        bad.sort_by_key(|bad| bad.row);
        bad
    }

    /// Notes a failure of the batch as a whole (before any of a row).
    pub(crate) fn note_failure(&self, error: Error) {
        self.slot().note_failure(0, error);
    }

    /// Whether any row failed.
    pub(crate) fn failed(&self) -> bool {
        self.slot().failure.lock().unwrap_or_else(|poison| poison.into_inner()).is_some()
    }

    /// The fields.
    pub(crate) fn spec(&self) -> &Spec {
        &self.slot().plan.spec
    }

    /// The used rows of field `field`, one after the other.
    pub(crate) fn bytes(&self, field: usize) -> &[u8] {
        let layout = self.slot().plan.layout.fields()[field];
        self.array(layout.offset, layout.row_bytes * self.rows())
    }

    /// Bytes of a row of field `field`.
    pub(crate) fn row_bytes(&self, field: usize) -> usize {
        self.slot().plan.layout.fields()[field].row_bytes
    }

    /// A run of bytes of the slot, across arrays and what lies between them.
    #[cfg(feature = "cuda")]
    pub(crate) fn span(&self, range: std::ops::Range<usize>) -> &[u8] {
        self.array(range.start, range.len())
    }

    /// True lengths of an `UpTo` field.
    pub(crate) fn lens(&self, field: usize) -> Option<&[u64]> {
        let offset = self.slot().plan.layout.fields()[field].lens?;
        Some(bytemuck::cast_slice(self.array(offset, 8 * self.rows())))
    }

    /// Sample ids.
    pub(crate) fn ids(&self) -> &[u64] {
        bytemuck::cast_slice(self.array(self.slot().plan.layout.ids(), 8 * self.rows()))
    }

    /// Status bytes, values of [`Status`].
    pub(crate) fn status(&self) -> &[u8] {
        self.array(self.slot().plan.layout.status(), self.rows())
    }

    /// Where the used rows of an array begin, for a framework that reads and writes there while this lives; no slice of
    /// the batch may be borrowed meanwhile. Null for the lengths of a field that has none.
    ///
    /// Not by way of a slice: what is written through must not come from a shared borrow.
    pub(crate) fn ptr(&self, array: Array) -> *mut u8 {
        let (layout, rows) = (&self.slot().plan.layout, self.rows());
        match array {
            Array::Field(field) => {
                let field = layout.fields()[field];
                self.slot().at(field.offset, field.row_bytes * rows)
            }
            Array::Lens(field) => {
                layout.fields()[field].lens.map_or(std::ptr::null_mut(), |offset| self.slot().at(offset, 8 * rows))
            }
            Array::Ids => self.slot().at(layout.ids(), 8 * rows),
            Array::Status => self.slot().at(layout.status(), rows),
        }
    }

    /// The batch for `.map_batch`.
    pub(crate) fn batch_mut(&mut self) -> BatchMut<'_> {
        BatchMut { filled: self }
    }

    /// The rows of a field of numbers. Panics for another one.
    #[cfg(feature = "cuda")]
    pub(crate) fn numbers_mut(&mut self, field: usize) -> &mut [u64] {
        bytemuck::cast_slice_mut(self.array_mut(field))
    }

    /// All rows of one field for reading, of another for writing. Panics when they are the same.
    pub(crate) fn input_and_output(&mut self, input: usize, output: usize) -> (&[u8], &mut [u8]) {
        assert_ne!(input, output);
        let first: *mut [u8] = self.array_mut(input);
        let second = self.array_mut(output);
        // SAFETY: arrays of different fields do not overlap (tested in `tensor`), so both borrows are exclusive; both live
        // as long as the mutable borrow of `self`.
        (unsafe { &*first }, second)
    }

    fn array(&self, offset: usize, len: usize) -> &[u8] {
        let ptr = self.slot().at(offset, len);
        // SAFETY: in bounds, initialised, alive; `Filled` is unique and exists only while no `Rows` or span of this
        // use does, so nobody writes while a shared borrow of it lives (`array_mut` borrows mutably).
        unsafe { std::slice::from_raw_parts(ptr, len) }
    }

    fn array_mut(&mut self, field: usize) -> &mut [u8] {
        let layout = self.slot().plan.layout.fields()[field];
        let len = layout.row_bytes * self.rows();
        self.bytes_at_mut(layout.offset, len)
    }

    fn bytes_at_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        let ptr = self.slot().at(offset, len);
        // SAFETY: as in `array`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            let plan = slot.plan.clone();
            plan.hooks.free(FreeSlot(slot));
        }
    }
}

/// A whole batch before it is handed out: what `.map_batch` changes in place.
pub struct BatchMut<'a> {
    filled: &'a mut Filled,
}

impl BatchMut<'_> {
    /// Rows of the batch.
    #[allow(clippy::len_without_is_empty, reason = "a batch is never empty")]
    pub fn len(&self) -> usize {
        self.filled.rows()
    }

    /// Rows that do not merely fill the batch up; they come first.
    pub fn valid(&self) -> usize {
        self.filled.valid()
    }

    /// Batch index in the epoch.
    pub fn index(&self) -> u64 {
        self.filled.ticket().batch
    }

    /// The fields.
    pub fn spec(&self) -> &Spec {
        self.filled.spec()
    }

    /// Sample ids, one per row.
    pub fn ids(&self) -> &[u64] {
        self.filled.ids()
    }

    /// Index of the field with that name.
    ///
    /// Errors: [`ErrorKind::Shape`] when there is none.
    pub fn index_of(&self, name: &str) -> Result<usize> {
        index_of(self.filled.spec(), name)
    }

    /// The true lengths (first dimensions) of an `UpTo` field, one per row, for reading and writing; `None` for a fixed
    /// shape. No value may be over the field's maximum.
    pub fn lens_mut(&mut self, field: usize) -> Option<&mut [u64]> {
        let offset = self.filled.slot().plan.layout.fields()[field].lens?;
        let len = 8 * self.filled.rows();
        Some(bytemuck::cast_slice_mut(self.filled.bytes_at_mut(offset, len)))
    }

    /// All rows of field `field`, shape `[len, …]`, dense.
    ///
    /// Errors: [`ErrorKind::Shape`] when `T` is not the field's dtype.
    pub fn slice_mut<T: Element>(&mut self, field: usize) -> Result<&mut [T]> {
        check_dtype::<T>(&self.filled.spec().fields()[field])?;
        Ok(bytemuck::cast_slice_mut(self.filled.array_mut(field)))
    }

    /// The rows of field `field`, one slice each.
    ///
    /// Errors: as [`slice_mut`](Self::slice_mut).
    pub fn rows_mut<T: Element>(&mut self, field: usize) -> Result<std::slice::ChunksExactMut<'_, T>> {
        let rows = self.len();
        let values = self.slice_mut::<T>(field)?;
        let width = values.len() / rows.max(1);
        Ok(values.chunks_exact_mut(width.max(1)))
    }

    /// All rows of two different fields at once.
    ///
    /// Errors: [`ErrorKind::Shape`] when a dtype does not fit or both are the same field.
    pub fn two_mut<A: Element, B: Element>(&mut self, a: usize, b: usize) -> Result<(&mut [A], &mut [B])> {
        check_dtype::<A>(&self.filled.spec().fields()[a])?;
        check_dtype::<B>(&self.filled.spec().fields()[b])?;
        check_distinct(a, b)?;
        let first: *mut [u8] = self.filled.array_mut(a);
        let second = self.filled.array_mut(b);
        // SAFETY: `a != b`, and arrays of different fields do not overlap (tested in `tensor`), so both borrows are
        // exclusive; both live as long as the mutable borrow of `self`.
        let first = unsafe { &mut *first };
        Ok((bytemuck::cast_slice_mut(first), bytemuck::cast_slice_mut(second)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
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

    fn pool(rows: usize, count: usize) -> (Vec<Arc<Region>>, Receiver<Filled>, Receiver<FreeSlot>) {
        let fields = vec![
            Field::fixed("image", DType::U8, [3, 5]),
            Field::fixed("label", DType::I64, []),
            Field::up_to("tokens", DType::U16, 4),
        ];
        let spec = Spec::new(fields).unwrap();
        let layout = Layout::new(&spec, rows).unwrap();
        let (full, full_out) = channel();
        let (free, free_out) = channel();
        let hooks = Queues { full: Mutex::new(full), free: Mutex::new(free) };
        let pool = Pool::new(spec, layout, count, Box::new(hooks)).unwrap();
        let regions = pool.regions().to_vec();
        pool.announce(|_| {});
        (regions, full_out, free_out)
    }

    #[test]
    fn a_slot_is_full_exactly_when_its_last_row_is_finished_on_any_thread() {
        let (_pool, full, free) = pool(64, 1);
        for rows in [1_u32, 2, 63, 64] {
            let mut all = free.recv().unwrap().begin(Ticket { batch: 7, ..Ticket::default() }, rows, rows);
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
            assert_eq!(filled.ids(), (0..u64::from(rows)).map(|row| row * 10).collect::<Vec<_>>());
            assert_eq!(filled.bytes(0).len(), 15 * rows as usize);
            assert!(filled.bytes(0).chunks(15).zip(filled.ids()).all(|(row, id)| row.iter().all(|b| *b == *id as u8)));
            assert_eq!(filled.lens(2).unwrap(), vec![2; rows as usize]);
            assert_eq!(&filled.bytes(2)[..8], &[1, 0, 2, 0, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn the_failure_of_the_lowest_row_wins_whatever_the_order() {
        let (_pool, full, free) = pool(4, 1);
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
            let mut all = free.recv().unwrap().begin(Ticket { batch: 3, ..Ticket::default() }, 4, 4);
            let mut parts: Vec<_> = (0..4).map(|_| Some(all.take(1))).collect();
            drop(all);
            for row in order {
                let mut part = parts[row].take().unwrap();
                if row % 2 == 1 { part.fail_row(Error::user(format!("row {row}"))) } else { part.finish_row() }
            }
            let error = full.recv().unwrap().take_failure().unwrap();
            assert_eq!((error.message(), error.site().batch), ("row 1", Some(3)));
        }
    }

    #[test]
    fn dropped_rows_bring_the_slot_back_as_cancelled() {
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
    fn a_lent_field_cannot_be_touched_and_an_abandoned_operation_keeps_the_slot_out_of_the_pool() {
        let (_pool, full, free) = pool(1, 1);
        let mut rows = free.recv().unwrap().begin(Ticket::default(), 1, 1);
        let mut span = rows.lend(0);
        span.as_mut_slice().fill(9);
        let touched = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rows.row().bytes_mut(0)[0] = 1));
        assert!(touched.is_err());
        rows.row().slice_mut::<i64>(1).unwrap()[0] = 5;
        rows.restore(span);
        assert_eq!(rows.row().bytes_mut(0), &[9; 15]);
        let abandoned = rows.lend(0);
        drop(rows);
        assert!(full.try_recv().is_err());
        drop(abandoned);
    }

    #[test]
    fn rows_behind_the_valid_ones_fill_up_and_blank_ones_hold_nothing_of_an_earlier_batch() {
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
        assert_eq!(filled.ids(), [10, 11, 12, 13, 14, u64::MAX, u64::MAX, u64::MAX]);
        assert_eq!(filled.status(), [0, 0, 0, 1, 1, 1, 1, 1]);
        for field in 0..3 {
            let row_bytes = filled.row_bytes(field);
            assert!(filled.bytes(field)[..5 * row_bytes].iter().all(|byte| *byte == 0xaa));
            assert!(filled.bytes(field)[5 * row_bytes..].iter().all(|byte| *byte == 0), "field {field}");
        }
        assert_eq!(filled.lens(2).map(|lens| &lens[5..]), Some(&[0, 0, 0][..]));
    }

    #[test]
    fn what_does_not_fit_a_field_is_a_shape_error_that_names_it() {
        let (_pool, _full, free) = pool(1, 1);
        let mut rows = free.recv().unwrap().begin(Ticket::default(), 1, 1);
        let mut row = rows.row();
        let errors = [
            (row.copy_from(0, &[0; 14]).unwrap_err(), "`image` takes 15 bytes, the sample has 14"),
            (row.copy_from(2, &[0; 10]).unwrap_err(), "`tokens` takes at most 4, the sample has 5"),
            (row.copy_from(2, &[0; 3]).unwrap_err(), "`tokens` takes at most 8 bytes, the sample has 3"),
            (row.set_len(0, 1).unwrap_err(), "`image` is of fixed shape"),
            (row.slice_mut::<f32>(0).map(|_| ()).unwrap_err(), "`image` holds u8, not f32"),
            (row.two_mut::<u8, u8>(0, 0).map(|_| ()).unwrap_err(), "cannot be borrowed twice"),
            (row.index_of("mask").unwrap_err(), "no field `mask`; there are image, label, tokens"),
        ];
        for (error, words) in errors {
            assert_eq!(error.kind(), ErrorKind::Shape);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
