//! Operations on a batch after its slot is full. They are the contract between the pipeline, which
//! fills the slot, and the device, which makes the batch's contents from the slot. No I/O.
//!
//! Fields are numbered. Fields of the slot keep their numbers in the contents; fields made on the
//! device follow them.

use super::finish::FinishPlan;
use feedline_base::PAGE;
use std::sync::Arc;

/// One operation on a batch after the copy of its slot. A device runs the list in order; no
/// operation reads the slot.
#[derive(Clone)]
pub enum DeviceOp {
    /// Moves rows from the place where storage wrote them to their final place, and zeroes blank
    /// rows.
    Place(DirectStep),
    /// Converts pictures to floats.
    Finish(Arc<FinishStep>),
}

/// Conversion of a `u8` field to a field of floats.
pub struct FinishStep {
    pub plan: FinishPlan,
    /// Number of the `u8` field to convert.
    pub input: usize,
    /// On a device: number of the slot's field with one byte per picture, nonzero to mirror the
    /// picture.
    pub flips: Option<usize>,
    /// Number of the output field in the contents.
    pub output: usize,
}

/// A field that storage writes into device memory. It takes no space in the slot.
#[derive(Clone, Debug)]
pub struct DirectStep {
    /// Number of the field in the dataset.
    pub handler: usize,
    /// Number of the field in the contents.
    pub field: usize,
    pub row_bytes: usize,
    /// How to gather the rows, if they are not whole pages of their file.
    pub gather: Option<Gather>,
}

/// Staging of rows, with their surrounding pages, before the gather moves them into place.
#[derive(Clone, Copy, Debug)]
pub struct Gather {
    /// Number of the contents' field that holds the staged bytes:
    /// [`stride`](DirectStep::stride) bytes per row.
    pub staging: usize,
    /// Number of the slot's field that holds the offset of each row within its staged bytes, `u64`.
    pub offsets: usize,
}

impl DirectStep {
    /// Bytes of staging for one row: enough pages for a row at any offset in its first page.
    pub fn stride(row_bytes: usize) -> usize {
        row_bytes.next_multiple_of(PAGE) + PAGE
    }
}
