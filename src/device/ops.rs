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
pub(crate) enum DeviceOp {
    /// Moves rows from the place where storage wrote them to their final place, and zeroes blank
    /// rows.
    Place(DirectStep),
    /// Converts pictures to floats.
    Finish(Arc<FinishStep>),
}

/// Conversion of a `u8` field to a field of floats.
pub(crate) struct FinishStep {
    pub(crate) plan: FinishPlan,
    /// The `u8` field.
    pub(crate) input: usize,
    /// On a device: the slot's field with one byte per picture, nonzero for a mirrored one.
    pub(crate) flips: Option<usize>,
    /// The output field, in the contents.
    pub(crate) output: usize,
}

/// A field that storage writes into device memory. It takes no space in the slot.
#[derive(Clone, Debug)]
pub(crate) struct DirectStep {
    /// Field of the dataset.
    pub(crate) handler: usize,
    /// Field of the contents.
    pub(crate) field: usize,
    pub(crate) row_bytes: usize,
    /// Gathering of rows that are not whole pages of their file.
    pub(crate) gather: Option<Gather>,
}

/// Staging of rows, with their surrounding pages, before the gather moves them into place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather {
    /// Field of the contents: [`stride`](DirectStep::stride) bytes for each row.
    pub(crate) staging: usize,
    /// Field of the slot with the offset of each row within its staging bytes, `u64`.
    pub(crate) offsets: usize,
}

impl DirectStep {
    /// Staging bytes of one row: enough pages for any offset.
    pub(crate) fn stride(row_bytes: usize) -> usize {
        row_bytes.next_multiple_of(PAGE) + PAGE
    }
}
