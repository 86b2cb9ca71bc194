//! Global batches: the positions of each batch of an epoch, and the rows of each rank. Pure.
//!
//! ```text
//! positions  start ─────────── one order for all ranks ─────────────── len
//!            │ global batch i  │ i + 1           │ …      │ the last  ┊ past the end
//! rank       │ 0 0 0 1 1 1 2 2 2 0 0 0 1 1 1 2 2 2 …      │ 0 0 0 1 1 ┊ 1 2 2 2
//! in lanes   │ 0 1 2 0 1 2 0 1 2 0 1 2 0 1 2 0 1 2 …      │ 0 1 2 0 1 ┊ 2 0 1 2
//! ```
//!
//! A rank's rows of a batch are consecutive positions. So the rows of all ranks one after the
//! other, as an all-gather returns them, are in the order of the epoch, with padding at the end. In
//! an order of several lanes, row *k* of rank *r* is at position first + *k* × world + *r* instead,
//! so that a rank reads its own lanes. Either way a global batch holds the same samples for any
//! world size, and all ranks get the same number of batches.
//!
//! A resumed epoch starts at any position, and its global batches are counted from there. `start`
//! is a multiple of the global batch unless the run has changed the global batch.
//!
//! In [groups](feedline_core::order::Groups) a batch has its group's size. Each batch has as many positions as the
//! largest batch has rows, so a smaller batch leaves its last positions unused. Only a short last
//! batch of the epoch has as many positions as samples.
//!
//! Limits: everything is `u64` and saturates; rows of a rank fit `u32`.

use super::gcd;
use super::grouped::{GroupedEpoch, padded};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::order::Rank;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The treatment of samples that do not fill a global batch at the end of an epoch.
///
/// | | last batch of every rank | samples of the epoch |
/// |---|---|---|
/// | `Keep` | smaller, of the same size on all ranks (or with the same differences as full batches, if the world does not divide them); blank rows if the samples do not divide evenly | each once |
/// | `Mask` | full size, blank rows at its end | each once |
/// | `Pad` | full size, filled up with samples from the beginning of the epoch's order | each once; samples that fill up the batch are repeated |
/// | `Drop` | none | all but those that do not fill a batch |
///
/// Padding rows are marked [`Status::Padding`](crate::Status) and come last;
/// [`Batch::valid`](crate::Batch::valid) counts the others. This number is 0 on some ranks if fewer
/// samples than ranks are left. A blank row has the id `u64::MAX` and zeros in every field; no
/// `.map` sees it.
///
/// In an order of [groups](crate::order::Groups) by length, this applies to the last batch of the
/// epoch. It belongs to the largest group and is filled up from the beginning of that group's
/// order. If samples fit only one group (groups by number, buckets of pictures), each group has
/// such a batch, anywhere in a shuffled epoch. `Pad` then adds rows only until all ranks have
/// equally many.
///
/// [`Snapshot::epoch`](crate::profile::Snapshot::epoch) and the report have the exact numbers of
/// repeated and left-out samples, before the first batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum LastBatch {
    /// The remaining samples form a smaller batch.
    #[default]
    Keep,
    /// The remaining samples form a batch of full size whose other rows are blank. For evaluation
    /// on many ranks: each sample counts once, and all batches have one shape.
    Mask,
    /// The remaining samples form a batch of full size, filled up from the beginning of the epoch's
    /// order. For training on many ranks.
    Pad,
    /// The remaining samples are left out of this epoch; a shuffled order leaves out different
    /// samples each epoch.
    Drop,
}

/// The numbers of samples and batches of an epoch, for all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Samples of the order.
    pub(crate) samples: u64,
    pub(crate) batches: u64,
    /// Rows that fill up batches with repeated samples.
    pub(crate) repeated: u64,
    /// Samples in no batch.
    pub(crate) left_out: u64,
}

/// The batches of one epoch, for one rank.
#[derive(Clone, Debug)]
pub(crate) struct Batches {
    /// Positions of the epoch.
    len: u64,
    /// The first position, and the number of the batch that begins there.
    start: u64,
    first: u64,
    /// The maximum number of batches from `start` on.
    most: u64,
    /// Number of positions per batch, over all ranks.
    global: u64,
    last: LastBatch,
    rank: u64,
    world: u64,
    /// Whether the ranks take single positions in turn, instead of runs of consecutive positions.
    in_turn: bool,
    /// The groups of the batches, in an order of groups.
    groups: Option<Arc<GroupedEpoch>>,
}

impl Batches {
    /// The batches of an epoch of `len` positions from the beginning. Errors: [`ErrorKind::Config`]
    /// when a rank would have no row, or too many to count.
    pub(crate) fn new(len: u64, global: u64, last: LastBatch, rank: Rank) -> Result<Self> {
        let world = u64::from(rank.world());
        let rank = u64::from(rank.number());
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Build, message));
        if global == 0 {
            return bad("a batch of 0 rows".into());
        }
        if global < world {
            return bad(format!(
                "a global batch of {global} for {world} ranks: some would have no rows; use at \
                 most {global} ranks, or a global batch of {world} or more (to resume: rebatched)"
            ));
        }
        if global.div_ceil(world) > u64::from(u32::MAX) {
            return bad(format!(
                "a global batch of {global} has {} rows for a rank, more than 32 bits hold; \
                 make the batch smaller",
                global.div_ceil(world)
            ));
        }
        Ok(Self {
            len,
            start: 0,
            first: 0,
            most: u64::MAX,
            global,
            last,
            rank,
            world,
            in_turn: false,
            groups: None,
        })
    }

    /// The same batches, for an order with this number of lanes.
    pub(crate) fn in_lanes(self, lanes: u64) -> Self {
        Self {
            in_turn: lanes > 1,
            ..self
        }
    }

    /// The same batches, each of one group.
    pub(crate) fn in_groups(self, groups: Option<Arc<GroupedEpoch>>) -> Self {
        Self { groups, ..self }
    }

    /// The group of `batch`, which must exist.
    pub(crate) fn group(&self, batch: u64) -> Option<u8> {
        self.groups.as_ref().map(|groups| groups.batch(batch).group)
    }

    /// The same epoch from `position` on, where batch `batch` begins. A `position` past the end
    /// counts as the end.
    pub(crate) fn starting(self, position: u64, batch: u64) -> Self {
        Self {
            start: position.min(self.len),
            first: batch,
            ..self
        }
    }

    /// The same batches, up to `batch`.
    pub(crate) fn until(self, batch: u64) -> Self {
        Self {
            most: batch.saturating_sub(self.first),
            ..self
        }
    }

    /// Positions of the epoch.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Number of positions per batch, over all ranks.
    pub(crate) fn global(&self) -> u64 {
        self.global
    }

    /// Number of the first batch.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Number of batches.
    pub(crate) fn count(&self) -> u64 {
        self.rest().min(self.most)
    }

    /// Number of batches up to the end of the epoch.
    fn rest(&self) -> u64 {
        let left = self.len - self.start;
        match self.last {
            LastBatch::Drop => left / self.global,
            _ => left.div_ceil(self.global),
        }
    }

    /// One past the number of the last batch.
    pub(crate) fn end(&self) -> u64 {
        self.first.saturating_add(self.count())
    }

    /// Samples that the whole epoch delivers to all ranks together, without padding.
    pub(crate) fn samples(&self) -> u64 {
        let Counts {
            samples, left_out, ..
        } = self.counts();
        samples - left_out
    }

    /// The counts of the whole epoch, from its beginning.
    pub(crate) fn counts(&self) -> Counts {
        if let Some(groups) = &self.groups {
            return groups.plan().counts();
        }
        let samples = self.len;
        let rest = self.len % self.global;
        let whole = Counts {
            samples,
            batches: self.len.div_ceil(self.global),
            ..Counts::default()
        };
        match self.last {
            LastBatch::Drop => Counts {
                batches: self.len / self.global,
                left_out: rest,
                ..whole
            },
            LastBatch::Pad if rest > 0 => Counts {
                repeated: self.global - rest,
                ..whole
            },
            _ => whole,
        }
    }

    /// Whether samples fit one group only, so that each group has its own last batch.
    pub(crate) fn end_apart(&self) -> bool {
        self.groups
            .as_ref()
            .is_some_and(|groups| !groups.plan().flows())
    }

    /// Whether each batch belongs to a group.
    pub(crate) fn are_grouped(&self) -> bool {
        self.groups.is_some()
    }

    /// The position of row 0 of rank 0 of `batch`; `len` at most.
    pub(crate) fn first_position(&self, batch: u64) -> u64 {
        let before = batch.saturating_sub(self.first).saturating_mul(self.global);
        self.start.saturating_add(before).min(self.len)
    }

    /// Position and number of the batch after `batch`; `None` at the end of the epoch.
    pub(crate) fn after(&self, batch: u64) -> Option<(u64, u64)> {
        let next = batch.saturating_add(1);
        (next < self.end()).then(|| (self.first_position(next), next))
    }

    /// The position of `row` of this rank. Positions of padding rows are past the end.
    pub(crate) fn position(&self, batch: u64, row: u32) -> u64 {
        let row = u64::from(row)
            .saturating_mul(self.stride())
            .saturating_add(self.offset(batch));
        self.first_position(batch).saturating_add(row)
    }

    /// Number of positions of `batch` before the first position of this rank.
    fn offset(&self, batch: u64) -> u64 {
        let size = self.size(batch);
        if self.in_turn {
            self.rank
        } else {
            self.rank * (size / self.world) + self.rank.min(size % self.world)
        }
    }

    /// Distance in positions from one row of a rank to its next row.
    pub(crate) fn stride(&self) -> u64 {
        if self.in_turn { self.world } else { 1 }
    }

    /// Number of ranks.
    pub(crate) fn world(&self) -> u64 {
        self.world
    }

    /// All positions of a rank are congruent to its first position modulo this number.
    pub(crate) fn step(&self) -> u64 {
        if self.in_turn {
            gcd(self.world, self.global)
        } else {
            1
        }
    }

    /// The range of positions that the first `most` batches visit; past `len` if the epoch is
    /// filled up.
    pub(crate) fn visited(&self, most: u64) -> std::ops::Range<u64> {
        let most = most.min(self.most);
        let end = match self.last {
            LastBatch::Pad if most >= self.rest() => self
                .start
                .saturating_add(self.rest().saturating_mul(self.global)),
            _ => self.first_position(self.first.saturating_add(most.min(self.rest()))),
        };
        self.start..end
    }

    /// The first position of this rank.
    pub(crate) fn class(&self) -> u64 {
        self.start.saturating_add(self.rank)
    }

    /// Number of positions of `batch` before the end of the epoch, over all ranks.
    fn real(&self, batch: u64) -> u64 {
        if batch >= self.end() {
            return 0;
        }
        if let Some(groups) = &self.groups {
            return groups.batch(batch).real;
        }
        (self.len - self.first_position(batch)).min(self.global)
    }

    /// Rows of `batch` on all ranks together.
    fn size(&self, batch: u64) -> u64 {
        let groups = self.groups.as_ref().filter(|_| batch < self.end());
        let full = groups.map_or(self.global, |groups| groups.batch(batch).full);
        match self.last {
            LastBatch::Keep => padded(self.real(batch), full, false, self.world),
            LastBatch::Pad => padded(self.real(batch), full, !self.end_apart(), self.world),
            _ => full,
        }
    }

    /// This rank's part of `rows` of a global batch.
    pub(crate) fn share(&self, rows: u64) -> u32 {
        // Fits: `new` has checked the largest.
        rows.saturating_sub(self.rank).div_ceil(self.world) as u32
    }

    /// The maximum rows of a batch on this rank.
    pub(crate) fn rows_max(&self) -> u32 {
        self.share(self.global)
    }

    /// Rows of `batch`; 0 past the end.
    pub(crate) fn rows(&self, batch: u64) -> u32 {
        if self.real(batch) == 0 {
            0
        } else {
            self.share(self.size(batch))
        }
    }

    /// Rows of `batch` with samples of the epoch; they come first.
    pub(crate) fn valid(&self, batch: u64) -> u32 {
        let real = self.real(batch);
        if self.in_turn {
            return self.share(real);
        }
        // At most the rows, so it fits.
        real.saturating_sub(self.offset(batch))
            .min(self.rows(batch).into()) as u32
    }

    /// Number of rows of `batch` that have a sample, maybe a repeated one; the others are blank.
    pub(crate) fn filled(&self, batch: u64) -> u32 {
        match self.last {
            LastBatch::Pad => self.rows(batch),
            _ => self.valid(batch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [LastBatch; 4] = [
        LastBatch::Keep,
        LastBatch::Mask,
        LastBatch::Pad,
        LastBatch::Drop,
    ];

    /// Half of the cases have lanes.
    fn batches(len: u64, global: u64, last: LastBatch, rank: u32, world: u32) -> Batches {
        Batches::new(len, global, last, Rank::new(rank, world).unwrap())
            .unwrap()
            .in_lanes(1 + len % 2)
    }

    /// The rank and row of place `index` of `size`, if each rank takes as many places as it has
    /// rows.
    fn consecutive(size: u64, world: u64, index: u64) -> (u64, u64) {
        let rows = |rank| (0..size).filter(|place| place % world == rank).count() as u64;
        let mut before = 0;
        let rank = (0..world).find(|rank| {
            before += rows(*rank);
            index < before
        });
        let rank = rank.unwrap();
        (rank, index + rows(rank) - before)
    }

    /// The rows of all ranks by the naive rule: (batch, rank, row, position, whether it is valid).
    fn naive(
        len: u64,
        global: u64,
        last: LastBatch,
        world: u64,
    ) -> Vec<(u64, u64, u64, Option<u64>, bool)> {
        let mut out = Vec::new();
        let mut batch = 0;
        while batch * global < len {
            let mut positions: Vec<u64> =
                (batch * global..((batch + 1) * global).min(len)).collect();
            let real = positions.len() as u64;
            if real < global && last == LastBatch::Drop {
                break;
            }
            let size = match last {
                LastBatch::Keep if real < global => (real.div_ceil(world) * world).min(global),
                _ => global,
            };
            positions.extend(len..len + size - real);
            for (index, position) in positions.iter().enumerate() {
                let index = index as u64;
                let valid = index < real;
                let position = (valid || last == LastBatch::Pad).then_some(*position);
                let (rank, row) = match len % 2 {
                    1 => (index % world, index / world),
                    _ => consecutive(size, world, index),
                };
                out.push((batch, rank, row, position, valid));
            }
            batch += 1;
        }
        out.sort_unstable();
        out
    }

    fn taken(
        len: u64,
        global: u64,
        last: LastBatch,
        world: u32,
    ) -> Vec<(u64, u64, u64, Option<u64>, bool)> {
        let mut out = Vec::new();
        for rank in 0..world {
            let batches = batches(len, global, last, rank, world);
            for batch in 0..batches.end() {
                for row in 0..batches.rows(batch) {
                    let position =
                        (row < batches.filled(batch)).then(|| batches.position(batch, row));
                    out.push((
                        batch,
                        u64::from(rank),
                        u64::from(row),
                        position,
                        row < batches.valid(batch),
                    ));
                }
            }
        }
        out.sort_unstable();
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn each_position_comes_once_over_all_ranks_or_as_padding(
            len in 0_u64..300, extra in 0_u64..40, world in 1_u32..10, last in 0_usize..4
        ) {
            let global = u64::from(world) + extra;
            let last = ALL[last];
            let rows = naive(len, global, last, u64::from(world));
            prop_assert_eq!(taken(len, global, last, world), rows.clone());
            let valid = rows.iter().filter(|row| row.4).count() as u64;
            let repeated = rows.iter().filter(|row| row.3.is_some()).count() as u64 - valid;
            let told = Counts {
                samples: len, batches: rows.last().map_or(0, |row| row.0 + 1), repeated, left_out: len - valid,
            };
            prop_assert_eq!(batches(len, global, last, 0, world).counts(), told);
            let counts: Vec<u64> = (0..world).map(|rank| batches(len, global, last, rank, world).count()).collect();
            prop_assert!(counts.iter().all(|count| *count == counts[0]), "{:?}", counts);
            for batch in 0..counts[0] {
                let rows: Vec<u32> = (0..world).map(|rank| batches(len, global, last, rank, world).rows(batch)).collect();
                let least = rows.iter().min().unwrap();
                let most = rows.iter().max().unwrap();
                prop_assert!(*least > 0 && most - least <= u32::from(global % u64::from(world) != 0), "{:?}", rows);
            }
        }

        #[test]
        fn the_rest_after_any_batch_is_the_same_for_any_world(
            len in 0_u64..300, extra in 0_u64..30, world in 1_u32..9, other in 1_u32..9, last in 0_usize..4, at in 0_u64..400
        ) {
            let global = u64::from(world.max(other)) + extra;
            let last = ALL[last];
            let whole = batches(len, global, last, 0, world);
            let batch = at % (whole.count() + 1);
            let positions = |batches: Batches, from: u64| -> Vec<u64> {
                let rows = |batch| (0..batches.filled(batch)).map(move |row| (batch, row));
                (from..batches.end()).flat_map(rows).map(|(batch, row)| batches.position(batch, row)).collect()
            };
            let mut expected: Vec<u64> = (0..world)
                .flat_map(|rank| positions(batches(len, global, last, rank, world), batch)).collect();
            let start = whole.first_position(batch);
            let mut got: Vec<u64> = (0..other)
                .flat_map(|rank| positions(batches(len, global, last, rank, other).starting(start, batch), batch)).collect();
            expected.sort_unstable();
            got.sort_unstable();
            prop_assert_eq!(got, expected);
        }

        #[test]
        fn a_rank_visits_only_positions_of_its_class(
            len in 1_u64..300, extra in 0_u64..30, world in 1_u32..9, rank in 0_u32..9, start in 0_u64..300, last in 0_usize..4,
            most in 0_u64..20, until in 0_u64..40
        ) {
            let batches = batches(len, u64::from(world) + extra, ALL[last], rank % world, world).starting(start, 7);
            let batches = if until < 30 { batches.until(until) } else { batches };
            prop_assert!(until >= 30 || batches.end() <= until.max(7));
            for batch in batches.first()..batches.end() {
                for row in 0..batches.filled(batch) {
                    let position = batches.position(batch, row);
                    prop_assert!(batches.visited(u64::MAX).contains(&position));
                    prop_assert_eq!(batches.visited(most).contains(&position), batch - 7 < most);
                    prop_assert_eq!(position % batches.step(), batches.class() % batches.step());
                }
            }
        }
    }

    #[test]
    fn a_resumed_epoch_goes_on_counting_its_batches() {
        let batches = batches(100, 8, LastBatch::Keep, 0, 1).starting(24, 3);
        assert_eq!(
            (
                batches.first(),
                batches.count(),
                batches.end(),
                batches.samples()
            ),
            (3, 10, 13, 100)
        );
        assert_eq!(
            (
                batches.first_position(3),
                batches.first_position(4),
                batches.rows(12)
            ),
            (24, 32, 4)
        );
        assert_eq!((batches.after(3), batches.after(12)), (Some((32, 4)), None));
        assert_eq!(batches.clone().starting(100, 13).count(), 0);
        assert_eq!(batches.starting(1000, 13).count(), 0);
    }

    #[test]
    fn a_changed_global_batch_cuts_the_rest_of_the_epoch() {
        let batches = batches(100, 7, LastBatch::Drop, 0, 1).starting(24, 3);
        assert_eq!(
            (
                batches.count(),
                batches.first_position(4),
                batches.samples()
            ),
            (10, 31, 98)
        );
    }

    #[test]
    fn batch_arithmetic_does_not_overflow() {
        for last in ALL {
            let batches = batches(u64::MAX, u64::from(u32::MAX) * 2, last, 1, 2);
            assert_eq!(batches.rows(u64::MAX), 0);
            assert_eq!(batches.first_position(u64::MAX), u64::MAX);
            assert_eq!(batches.position(u64::MAX, u32::MAX), u64::MAX);
            assert!(batches.visited(u64::MAX).end >= u64::MAX - u64::from(u32::MAX) * 2);
            assert_eq!(batches.starting(u64::MAX, u64::MAX).count(), 0);
        }
    }

    #[test]
    fn a_global_batch_smaller_than_the_world_is_refused() {
        let new =
            |global, world| Batches::new(9, global, LastBatch::Keep, Rank::new(0, world).unwrap());
        for (global, world, words) in [
            (0, 1, "a batch of 0 rows"),
            (
                3,
                4,
                "a global batch of 3 for 4 ranks: some would have no rows; use at most 3 ranks, or \
                 a global batch of 4 or more (to resume: rebatched)",
            ),
            (
                u64::MAX,
                2,
                "a global batch of 18446744073709551615 has 9223372036854775808 rows for a \
                 rank, more than 32 bits hold; make the batch smaller",
            ),
        ] {
            let error = new(global, world).unwrap_err();
            assert_eq!((error.kind(), error.message()), (ErrorKind::Config, words));
        }
        assert!(new(4, 4).is_ok());
    }
}
