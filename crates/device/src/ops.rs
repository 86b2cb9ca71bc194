//! Operations on a batch after its slot is full: the contract between the pipeline, which fills the
//! slot, and the device, which makes the batch's contents from it. Pure.
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
    /// The `u8` field.
    pub input: usize,
    /// On a device: the slot's field with one byte per picture, nonzero for a mirrored one.
    pub flips: Option<usize>,
    /// The output field, in the contents.
    pub output: usize,
}

/// A field that storage writes into device memory. It takes no space in the slot.
#[derive(Clone, Debug)]
pub struct DirectStep {
    /// Field of the dataset.
    pub handler: usize,
    /// Field of the contents.
    pub field: usize,
    pub row_bytes: usize,
    /// Gathering of rows that are not whole pages of their file.
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
    /// Staging bytes of one row: enough pages for any offset.
    pub fn stride(row_bytes: usize) -> usize {
        row_bytes.next_multiple_of(PAGE) + PAGE
    }
}
