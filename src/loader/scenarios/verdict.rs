//! The code under test: causes of a snapshot, and predictions for a change. Replace only this file
//! to test another verdict.

use feedline_report as report;
use feedline_report::meter::Snapshot;
use feedline_report::{Verdict, WhatIf};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    Consumer,
    Decode,
    Storage,
    Order,
    Memory,
    Copy,
    /// A cause outside the scenarios.
    Other,
}

impl From<report::Cause> for Cause {
    fn from(cause: report::Cause) -> Self {
        match cause {
            report::Cause::NotStarved | report::Cause::Consumer => Self::Consumer,
            report::Cause::Decode => Self::Decode,
            report::Cause::Storage => Self::Storage,
            report::Cause::Order => Self::Order,
            report::Cause::MemoryBudget => Self::Memory,
            report::Cause::Copy => Self::Copy,
            _ => Self::Other,
        }
    }
}

/// A change of settings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) workers: usize,
    /// The factor by which storage becomes faster.
    pub(super) storage: f64,
}

/// The main cause, and the causes that are nearly as strong.
pub(super) fn named(snapshot: &Snapshot) -> Vec<Cause> {
    let verdict = Verdict::of(snapshot);
    [verdict.cause]
        .into_iter()
        .chain(verdict.also)
        .map(Cause::from)
        .collect()
}

/// Samples per second after a change, and whether that is a lower bound.
pub(super) fn predicted(snapshot: &Snapshot, change: Change) -> (f64, bool) {
    let change = report::Change {
        workers: Some(change.workers as u32),
        storage_factor: Some(change.storage),
        ..report::Change::default()
    };
    let prediction = WhatIf::from(snapshot)
        .expect("something was measured")
        .with(&change);
    (prediction.items_per_s, prediction.at_least)
}
