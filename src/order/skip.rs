//! Batches that a run skips. Pure.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Batches `start..end` of an epoch, counted from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "(u64, u64, u64)", into = "(u64, u64, u64)")]
pub(crate) struct Skip {
    pub(crate) epoch: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl From<(u64, u64, u64)> for Skip {
    fn from(saved: (u64, u64, u64)) -> Self {
        let (epoch, start, end) = saved;
        Self { epoch, start, end }
    }
}

impl From<Skip> for (u64, u64, u64) {
    fn from(Skip { epoch, start, end }: Skip) -> Self {
        (epoch, start, end)
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "batches {}..{} of epoch {}",
            self.start, self.end, self.epoch
        )
    }
}

/// All batches that a run skips, in its order. No range is empty, and no two ranges touch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Skips(Vec<Skip>);

impl Skips {
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &Skip> {
        self.0.iter()
    }

    /// Whether the ranges are valid, as [`add`](Self::add) leaves them.
    pub(crate) fn are_legal(&self) -> bool {
        // The last epoch cannot be used: none follows it.
        self.0
            .iter()
            .all(|skip| skip.start < skip.end && skip.epoch < u64::MAX)
            && self
                .0
                .windows(2)
                .all(|pair| (pair[0].epoch, pair[0].end) < (pair[1].epoch, pair[1].start))
    }

    /// Adds a range of batches. Errors: the range in the list that overlaps it.
    pub(crate) fn add(&mut self, new: Skip) -> Result<(), Skip> {
        let overlaps =
            |old: &&Skip| old.epoch == new.epoch && old.start < new.end && new.start < old.end;
        if let Some(old) = self.0.iter().find(overlaps) {
            return Err(*old);
        }
        // Ranges that touch the new one are merged with it.
        let mut joined = new;
        self.0.retain(|old| {
            let touches = old.epoch == new.epoch && (old.end == new.start || old.start == new.end);
            if touches {
                joined.start = joined.start.min(old.start);
                joined.end = joined.end.max(old.end);
            }
            !touches
        });
        self.0
            .insert(self.0.partition_point(|old| *old < joined), joined);
        Ok(())
    }

    /// The range that contains `batch` of an epoch, or else the next one in that epoch.
    pub(crate) fn next(&self, epoch: u64, batch: u64) -> Option<Skip> {
        self.0
            .iter()
            .find(|skip| skip.epoch == epoch && skip.end > batch)
            .copied()
    }

    /// The ranges that end after `batch` of an epoch, later epochs included.
    pub(crate) fn ahead(&self, epoch: u64, batch: u64) -> Self {
        Self(
            self.0
                .iter()
                .filter(|skip| (skip.epoch, skip.end) > (epoch, batch))
                .copied()
                .collect(),
        )
    }
}
