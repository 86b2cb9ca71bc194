//! Evaluates a snapshot: finds the limiting stage, gives advice, and makes predictions. Also
//! exports snapshots to other programs.
//!
//! ```text
//! Snapshot ──► load      each stage's share of its time ──► verdict   the limit, evidence, advice
//!                                                      └──► whatif    the rate after a change
//! Snapshot ──► prometheus  totals since the loader was built
//! Snapshot, Timeline ──► across   a report per rank ──► the ranks that hold the others up
//! Timeline ──► trace       the last batches and the work of each thread, for ui.perfetto.dev
//! ```
//!
//! The module turns numbers into numbers and text, without I/O except in `spans`. The module
//! imports `meter` and `error`, and no loader or reader. Exports are well-formed and nothing panics
//! for any numbers (zero, out of order, out of range) and any names.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

mod across;
mod depth;
mod estimate;
mod load;
pub mod meter;
mod prometheus;
pub mod spans;
mod trace;
mod verdict;
mod whatif;
mod words;

pub use across::{Across, HowMany, Late, RankReport};
pub use estimate::{EpochCost, Estimate};
pub use load::{Cause, StageLoad};
pub use prometheus::prometheus;
pub use trace::trace;
pub use verdict::{Advice, Evidence, Measure, Remedy, Strength, Unit, Value, Verdict};
pub use whatif::{Change, Prediction, WhatIf};

/// Identifies the loader of the numbers: used as labels of metrics and as names in a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Names<'a> {
    /// A name for the loader, such as `train`; any text.
    pub loader: &'a str,
    /// Its rank. Traces of several ranks have a process each, so that they can be merged.
    pub rank: u32,
}

impl<'a> Names<'a> {
    /// Names for the loader `loader` of rank `rank`.
    pub fn new(loader: &'a str, rank: u32) -> Self {
        Self { loader, rank }
    }
}
