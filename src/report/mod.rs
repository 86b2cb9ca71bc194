//! What a snapshot says: which stage limits, what to change, what a change would give; and its text for other programs.
//!
//! ```text
//! Snapshot ──► load      each stage's share of its time ──► verdict   the limit, evidence, advice
//!                                                      └──► whatif    the rate after a change
//! Snapshot, Timeline ──► export   metrics, a trace, a page
//! ```
//!
//! Numbers in, numbers and words out; pure but for `export`'s server and spans. It knows `meter` and `error`, and neither a
//! loader nor a reader.

mod depth;
pub mod export;
mod load;
#[cfg(test)]
mod simulator;
mod verdict;
mod whatif;
mod words;

pub use load::{Cause, StageLoad};
pub use verdict::{Strength, Verdict};
pub use whatif::{Change, Prediction, WhatIf};
