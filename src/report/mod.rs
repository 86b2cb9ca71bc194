//! What a snapshot says: which stage limits, what to change, what a change would give; and its text for other programs.
//!
//! ```text
//! Snapshot ──► load      each stage's share of its time ──► verdict   the limit, evidence, advice
//!                                                      └──► whatif    the rate after a change
//! Snapshot ──► prometheus  totals since the loader was built
//! Timeline ──► trace       what each of the last batches did, for ui.perfetto.dev
//! ```
//!
//! Numbers in, numbers and words out; pure but for `spans`. It knows `meter` and `error`, and neither a loader nor a reader.
//! Whatever the numbers are (zero, out of order, beyond all bounds) and whatever names contain, text for other programs is
//! well-formed and nothing panics.

mod depth;
mod load;
mod prometheus;
pub(crate) mod spans;
mod trace;
mod verdict;
mod whatif;
mod words;

pub use load::{Cause, StageLoad};
pub use prometheus::prometheus;
pub use trace::trace;
pub use verdict::{Strength, Verdict};
pub use whatif::{Change, Prediction, WhatIf};

/// Whose numbers these are: labels of metrics, names in a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Names<'a> {
    /// A name for the loader, such as `train`; any text.
    pub loader: &'a str,
    /// Its rank. Traces of several ranks have a process each, so that they can be merged.
    pub rank: u32,
}

impl<'a> Names<'a> {
    /// The loader called `loader` of rank `rank`.
    pub fn new(loader: &'a str, rank: u32) -> Self {
        Self { loader, rank }
    }
}
