//! Packed fields of a slot: rows of varying length, stored contiguously.
//!
//! ```text
//! lengths of the index, or maxima ──place──► offsets (a prefix sum) ──► each row has its own bytes, which workers fill
//! a row shorter than its place ──close_gaps──► later rows move up, before the slot is full
//! ```

#![allow(unsafe_code)]

use super::row::{Row, shape_error};
use super::slot::{Filled, Rows, Slot};
use crate::tensor::{Field, Packed};
use feedline_base::error::Result;
use feedline_base::setting::Setting;
use feedline_base::sync::atomic::Ordering;

impl Slot {
    /// The `u64` at `offset`: an offset or a length. A row's length is accessed only through its
    /// token.
    pub(super) fn number(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        let ptr = self.at(offset, 8);
        // SAFETY: in bounds, initialised; offsets are written before there are rows, lengths by the
        // row's token.
        unsafe { std::ptr::copy_nonoverlapping(ptr, bytes.as_mut_ptr(), 8) };
        u64::from_ne_bytes(bytes)
    }

    fn set_number(&self, offset: usize, number: u64) {
        let ptr = self.at(offset, 8);
        // SAFETY: in bounds; written as `number` says, and no reference to it exists before the
        // slot is full.
        unsafe { std::ptr::copy_nonoverlapping(number.to_ne_bytes().as_ptr(), ptr, 8) }
    }

    /// Start and end of a row of a packed field. Panics if the offsets are invalid, because they
    /// determine which memory is read: another framework that got them may have overwritten them.
    pub(super) fn packed_row(&self, packed: Packed, row: u32) -> (usize, usize) {
        let at = packed.offsets + row as usize * 8;
        let start = self.number(at) as usize;
        let end = self.number(at + 8) as usize;
        assert!(
            start <= end && end <= packed.room / packed.unit,
            "the offsets of a packed field were overwritten"
        );
        (start * packed.unit, end * packed.unit)
    }

    /// Total bytes of a field's rows in the batch.
    pub(super) fn used(&self, field: usize) -> usize {
        let layout = self.plan.layout.fields()[field];
        let rows = self.rows.load(Ordering::Relaxed);
        layout.packed.map_or_else(
            || self.row_bytes(field) * rows as usize,
            |packed| self.packed_row(packed, rows - 1).1,
        )
    }

    /// Closes the gaps after packed rows that are shorter than planned. All rows must be finished.
    pub(super) fn close_gaps(&self) {
        let rows = self.rows.load(Ordering::Relaxed);
        for layout in self.plan.layout.fields() {
            let (Some(packed), Some(lens)) = (layout.packed, layout.lens) else {
                continue;
            };
            if self.failed() {
                return;
            }
            let mut end = 0;
            for row in 0..rows {
                let (start, _) = self.packed_row(packed, row);
                let len = self.number(lens + row as usize * 8) as usize * packed.unit;
                if start != end {
                    let from = self.at(layout.offset + start, len);
                    let to = self.at(layout.offset + end, len);
                    // SAFETY: both in bounds; no other thread accesses the slot between its last
                    // row and its delivery.
                    unsafe { std::ptr::copy(from, to, len) };
                    self.set_number(
                        packed.offsets + row as usize * 8,
                        (end / packed.unit) as u64,
                    );
                }
                end += len;
            }
            self.set_number(
                packed.offsets + rows as usize * 8,
                (end / packed.unit) as u64,
            );
        }
    }
}

impl Rows {
    /// Assigns `len` bytes (by default the maximum) to row `row` of a packed field, or no bytes if
    /// they do not fit.
    ///
    /// Called for each row in order, before any row is filled or taken.
    pub fn place(&mut self, field: usize, row: u32, len: Option<u64>) {
        assert!(self.start == 0 && self.done == 0);
        let layout = self.slot.plan.layout.fields()[field];
        let (Some(packed), Some(lens)) = (layout.packed, layout.lens) else {
            return;
        };
        let at = packed.offsets + row as usize * 8;
        if row == 0 {
            self.slot.set_number(at, 0);
        }
        let start = self.slot.number(at);
        let unit = packed.unit as u64;
        let max = self.slot.plan.spec.fields()[field].row_bytes() as u64;
        let len = len.unwrap_or(max);
        let fits =
            len <= max && len.is_multiple_of(unit) && start * unit + len <= packed.room as u64;
        self.slot
            .set_number(at + 8, start + if fits { len / unit } else { 0 });
        self.slot.set_number(lens + row as usize * 8, 0);
    }

    /// Prepares the first unfinished row for a substitute, which has no bytes in packed fields.
    pub fn stand_in(&mut self) {
        self.stands_in = true;
    }
}

impl Row<'_> {
    /// Rejects a length that does not fit the bytes assigned to the row. If they were assigned by
    /// lengths from the index, only the indexed length and 0 fit; otherwise all shorter lengths
    /// fit, too.
    pub(super) fn check_packed(&self, field: &Field, packed: Packed, len: usize) -> Result<()> {
        let (start, end) = self.slot.packed_row(packed, self.row);
        let len = len * packed.unit;
        let by_index = field.packing().is_some_and(|packing| packing.by_index);
        if len == 0 || len == end - start || (!by_index && len < end - start) {
            return Ok(());
        }
        let name = field.name();
        let planned = end - start;
        let (_, used) = self
            .slot
            .packed_row(packed, self.slot.rows.load(Ordering::Relaxed) - 1);
        Err(shape_error(match planned {
            0 if used + len > packed.room => format!(
                "the packed field `{name}` has room for {} bytes of a batch, {used} are \
                 taken and the sample has {len}; raise {}",
                packed.room,
                Setting::BatchBytes
            ),
            _ => format!(
                "the index says {planned} bytes for the packed field `{name}`, but the sample has \
                 {len}"
            ),
        }))
    }
}

impl Filled {
    /// Total bytes of field `field`'s rows in the batch.
    pub fn used(&self, field: usize) -> usize {
        self.slot().used(field)
    }

    /// Start of each row of a packed field, and the end of the last row, counted in elements of the
    /// first dimension.
    pub fn offsets(&self, field: usize) -> Option<&[u64]> {
        let packed = self.slot().plan.layout.fields()[field].packed?;
        Some(bytemuck::cast_slice(
            self.array(packed.offsets, 8 * (self.rows() + 1)),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::super::slot::tests::pool_of;
    use super::super::slot::{Array, Ticket};
    use super::*;

    #[test]
    fn overwritten_offsets_are_refused() {
        let (_pool, full, free) = pool_of(vec![Field::packed("x", 8, None)], 2, 1);
        for nonsense in [None, Some(17), Some(u64::MAX), Some(u64::MAX - 4096)] {
            let mut rows = free.recv().unwrap().begin(Ticket::default(), 2, 2);
            (0..2).for_each(|row| rows.place(0, row, Some(8)));
            for id in 0..2 {
                rows.row().copy_from(0, &[7; 8]).unwrap();
                rows.row().mark(id);
                rows.finish_row();
            }
            drop(rows);
            let filled = full.recv().unwrap();
            assert_eq!(
                (filled.bytes(0), filled.offsets(0)),
                (&[7; 16][..], Some(&[0, 8, 16][..]))
            );
            let Some(nonsense) = nonsense else { continue };
            // SAFETY: the end of the last row; no slice of the batch is borrowed.
            unsafe {
                filled
                    .ptr(Array::Offsets(0))
                    .cast::<u64>()
                    .add(2)
                    .write(nonsense)
            };
            let used =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| filled.bytes(0).len()));
            assert!(used.is_err(), "{nonsense}");
        }
    }
}
