//! The operations on a batch on its way to the consumer: the agreement between the pipeline, which makes the slot, and the
//! device, which makes the batch's contents of it. Pure.
//!
//! Fields go by their numbers. Those of the slot have the same numbers in the contents; what is made on the device follows behind
//! them.

use super::finish::FinishPlan;
use crate::tensor::PAGE;
use std::sync::Arc;

/// One operation on a batch after the copy of its slot. A device runs them in the order of the list; none reads the slot.
#[derive(Clone)]
pub(crate) enum DeviceOp {
    /// Storage has written the field: rows go where they belong, blank ones are zeroed.
    Place(DirectStep),
    /// Floats are made of pictures.
    Finish(Arc<FinishStep>),
}

/// A field of floats made of one of `u8`.
pub(crate) struct FinishStep {
    pub(crate) plan: FinishPlan,
    /// The `u8` field.
    pub(crate) input: usize,
    /// The field of the slot that says, on a device, which pictures are mirrored: a byte each.
    pub(crate) flips: Option<usize>,
    /// The field in the contents that it makes.
    pub(crate) output: usize,
}

/// A field that storage writes into device memory. It takes no room in the slot.
#[derive(Clone, Debug)]
pub(crate) struct DirectStep {
    /// Field of the dataset.
    pub(crate) handler: usize,
    /// Field of the contents.
    pub(crate) field: usize,
    pub(crate) row_bytes: usize,
    /// Where rows are read to that are not whole pages of their file.
    pub(crate) gather: Option<Gather>,
}

/// Rows with the pages around them, before they are moved to where they belong.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather {
    /// Field of the contents: [`stride`](DirectStep::stride) bytes for each row.
    pub(crate) staging: usize,
    /// Field of the slot: where in that field each row begins, `u64`.
    pub(crate) offsets: usize,
}

impl DirectStep {
    /// Bytes of the staging area for a row: its pages, at whichever offset it begins.
    pub(crate) fn stride(row_bytes: usize) -> usize {
        row_bytes.next_multiple_of(PAGE) + PAGE
    }
}
