//! An order of groups: every global batch holds samples of one group, such as texts of similar length. Pure.
//!
//! ```text
//! line of all samples    0 0 0 0 0 0 0│1 1 1 1 1 1 1│2 2 2 2 2 2      the samples of a group: permuted
//! batches of 6, 4, 3     ─────────── ─┼───── ─────── ───── ───── ─    of groups 0, 1, 1, 2, 2, and the short one
//!
//! position ──► batch j, row ──► permutation of the full batches ──► group g, batch of g ──► member of g's batches
//!     permutation of g's members ──► place in the line ──► group h, k ──► permutation of h's samples ──► sample
//! ```
//!
//! Groups by length follow each other in a *line*, and batches are consecutive parts of it: the
//! remainder of a group goes into the next larger one. So only one batch of an epoch is short: the
//! one at the end of the line, which comes last. Samples that are grouped by a number or a shape
//! fit no other group, so the last batch of each group is short.
//!
//! Batch *j* has the positions from *j* × S on, where S is the size of the largest batch. A smaller
//! batch leaves the last of them unused. So a position determines its batch without a table, and a
//! state holds a position as for any other order. Positions past the last batch map to the samples
//! one by one, by group. Substitutes are drawn from these positions.
//!
//! Memory: an epoch takes 4 KiB per group at most, in addition to the table of `groups`.

use super::{Counts, LastBatch};
use feedline_base::error::{Result, config};
use feedline_core::order::groups::Table;
use feedline_core::order::{Draws, Groups, Key, Permutation, Rank};
use std::sync::Arc;

/// The batches of every epoch.
#[derive(Debug)]
pub(crate) struct Plan {
    table: Arc<Table>,
    /// Whether the remainder of a group goes into the next one.
    flows: bool,
    /// Rows of a batch of each group.
    rows: Box<[u64]>,
    /// For each group, the number of samples in all groups before it.
    before: Box<[u64]>,
    /// Where on the line the batches of each group begin, then the end of the line.
    starts: Box<[u64]>,
    /// For each group, the number of batches of this group and of all groups before it.
    ends: Box<[u64]>,
    /// Number of batches that are permuted. If groups flow, a short batch may follow them.
    permuted: u64,
    /// Number of batches with positions. The [`LastBatch`] policy may leave out a short last batch.
    batches: u64,
    largest: u64,
    len: u64,
    counts: Counts,
}

impl Plan {
    /// The batches of every epoch. Errors: [`ErrorKind::Config`] for a dataset of another length,
    /// too few batch sizes, a batch with fewer rows than ranks.
    pub(crate) fn of_groups(
        groups: &Groups,
        dataset_len: u64,
        global: u64,
        last: LastBatch,
        rank: Rank,
    ) -> Result<Arc<Plan>> {
        let table = groups.table.clone();
        if table.of.len() as u64 != dataset_len {
            return Err(config(format!(
                "the groups have {} samples, but the dataset has {dataset_len}",
                table.of.len()
            )));
        }
        let rows = groups.rows(global)?;
        let world = u64::from(rank.world());
        let small = rows
            .iter()
            .enumerate()
            .find(|(group, rows)| **rows < world && table.sizes[*group] > 0);
        if let Some((group, rows)) = small {
            return Err(config(format!(
                "the batches of group {group} have {rows} rows for {world} ranks: some would have \
                 none; make them larger, or use fewer ranks"
            )));
        }
        let plan = Plan::new(table, rows, groups.flows, last, world);
        let positions = plan.batches.checked_mul(plan.largest);
        if positions
            .and_then(|all| all.checked_add(dataset_len))
            .is_none()
        {
            return Err(config(format!(
                "batches of {} rows are too large for groups",
                plan.largest
            )));
        }
        Ok(Arc::new(plan))
    }

    fn new(table: Arc<Table>, rows: Box<[u64]>, flows: bool, last: LastBatch, world: u64) -> Self {
        let groups = table.sizes.len();
        let largest_group = table
            .sizes
            .iter()
            .rposition(|samples| *samples > 0)
            .unwrap_or(0);
        let mut before = vec![0; groups];
        let mut starts = vec![0; groups + 1];
        let mut ends = vec![0; groups];
        let mut counts = Counts::default();
        let mut batches = 0;
        let mut largest = 0;
        // Number of samples in the short batch, which comes after all others.
        let mut behind = 0;
        for (group, (own, full)) in table.sizes.iter().zip(&rows).enumerate() {
            before[group] = counts.samples;
            counts.samples += own;
            let members = counts.samples - starts[group];
            let whole = if *own > 0 { members / full } else { 0 };
            let rest = match flows && group != largest_group {
                true => 0,
                false => members - whole * full,
            };
            starts[group + 1] = if flows && rest == 0 {
                starts[group] + whole * full
            } else {
                counts.samples
            };
            let mut made = whole;
            match last {
                _ if rest == 0 => {}
                LastBatch::Drop => counts.left_out += rest,
                LastBatch::Pad => counts.repeated += padded(rest, *full, flows, world) - rest,
                LastBatch::Keep | LastBatch::Mask => {}
            }
            // If groups flow, the short batch has positions under any policy.
            if rest > 0 && (flows || last != LastBatch::Drop) {
                made = whole + 1;
            }
            if flows {
                behind += rest;
            }
            largest = if made > 0 {
                largest.max(*full)
            } else {
                largest
            };
            batches += made;
            ends[group] = batches;
        }
        let largest = if batches == 0 { world } else { largest };
        let permuted = batches - u64::from(behind > 0);
        counts.batches = if last == LastBatch::Drop {
            permuted
        } else {
            batches
        };
        let len = if behind > 0 {
            permuted.saturating_mul(largest).saturating_add(behind)
        } else {
            batches.saturating_mul(largest)
        };
        Self {
            table,
            flows,
            rows,
            before: before.into(),
            starts: starts.into(),
            ends: ends.into(),
            permuted,
            batches,
            largest,
            len,
            counts,
        }
    }

    /// Rows of the largest batch.
    pub(crate) fn largest(&self) -> u64 {
        self.largest
    }

    /// Rows of a batch of each group; 0 for a group without batches.
    pub(crate) fn rows(&self) -> impl Iterator<Item = u64> {
        let starts = std::iter::once(&0).chain(&self.ends);
        self.rows
            .iter()
            .zip(starts.zip(&self.ends))
            .map(|(rows, (start, end))| if start < end { *rows } else { 0 })
    }

    /// Positions of an epoch, used or not.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Whether the remainder of a group goes into the next one.
    pub(crate) fn flows(&self) -> bool {
        self.flows
    }

    /// The counts of an epoch.
    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes of the table and of two epochs: while the last batches of one are in flight, the next
    /// is prepared.
    pub(crate) fn bytes(&self) -> usize {
        let permutations = 1 + usize::from(self.flows);
        let of_group =
            permutations * (size_of::<Option<Permutation>>() + 2 * Permutation::TABLE_MAX as usize);
        self.table.bytes() + 2 * self.rows.len() * of_group
    }

    /// A hash of all that decides which samples are in a batch.
    pub(crate) fn identity(&self) -> u64 {
        let key = Key::new(self.table.of.len() as u64).named(if self.flows {
            "groups in a line"
        } else {
            "groups"
        });
        let key = self
            .table
            .words()
            .chain(self.rows.iter().copied())
            .fold(key, Key::derive);
        Draws::from_key(key).next_u64()
    }
}

/// Rows of a short batch of `rest` samples after it is filled up with others. If groups flow, that
/// is a full batch; otherwise the fewest rows that give all ranks equally many, at most a full
/// batch.
pub(super) fn padded(rest: u64, full: u64, flows: bool, world: u64) -> u64 {
    if flows {
        full
    } else {
        rest.div_ceil(world).saturating_mul(world).min(full)
    }
}

/// The batches of one epoch.
#[derive(Debug)]
pub(crate) struct GroupedEpoch {
    plan: Arc<Plan>,
    /// `None` keeps the order of the groups and of the dataset.
    shuffle: Option<Shuffle>,
}

/// The permutations of an epoch.
#[derive(Debug)]
struct Shuffle {
    batches: Permutation,
    /// The permutation of the samples of each group.
    samples: Box<[Permutation]>,
    /// For each group, the permutation of all samples in its batches, if some of them come from
    /// smaller groups.
    members: Box<[Option<Permutation>]>,
}

impl Shuffle {
    fn new(plan: &Plan, key: Key) -> Self {
        let each = |name: &str, group: usize, n: u64| {
            Permutation::new(n, key.named(name).derive(group as u64))
        };
        let sizes = plan.table.sizes.iter().enumerate();
        let members = (0..plan.rows.len()).map(|group| {
            let start = plan.starts[group];
            let end = plan.starts[group + 1];
            (start < plan.before[group] && start < end).then(|| each("members", group, end - start))
        });
        Self {
            batches: Permutation::new(plan.permuted, key.named("batches")),
            samples: sizes
                .map(|(group, samples)| each("samples", group, *samples))
                .collect(),
            members: members.collect(),
        }
    }
}

/// A batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupBatch {
    pub(crate) group: u8,
    /// Rows of a full batch, over all ranks.
    pub(crate) full: u64,
    /// Samples of the epoch in the batch.
    pub(crate) real: u64,
    /// The index of the first of these samples among all samples in the group's batches.
    first: u64,
}

impl GroupedEpoch {
    pub(crate) fn new(plan: &Arc<Plan>, key: Option<Key>) -> Self {
        Self {
            plan: plan.clone(),
            shuffle: key.map(|key| Shuffle::new(plan, key)),
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Batch `batch`, which must exist.
    pub(crate) fn batch(&self, batch: u64) -> GroupBatch {
        let Plan {
            rows,
            starts,
            ends,
            permuted,
            ..
        } = &*self.plan;
        let permuted = self.shuffle.as_ref().filter(|_| batch < *permuted);
        let batch = permuted.map_or(batch, |shuffle| shuffle.batches.get(batch));
        let group = ends.partition_point(|end| *end <= batch);
        let before = group.checked_sub(1).map_or(0, |before| ends[before]);
        let full = rows[group];
        let first = (batch - before) * full;
        let members = starts[group + 1] - starts[group];
        GroupBatch {
            group: group as u8,
            full,
            real: (members - first).min(full),
            first,
        }
    }

    /// The sample at `position`. Positions after the last sample of a batch have the samples that
    /// fill it up.
    pub(crate) fn id(&self, position: u64) -> u64 {
        let Plan {
            table,
            starts,
            before,
            largest,
            batches,
            ..
        } = &*self.plan;
        if let Some(place) = position.checked_sub(batches * largest) {
            let (group, k) = located(before, place);
            return table.select(group, k);
        }
        let GroupBatch { group, first, .. } = self.batch(position / largest);
        let group = usize::from(group);
        let member = first + position % largest;
        let members = starts[group + 1] - starts[group];
        let place = match member.checked_sub(members) {
            None => self.member(group, member),
            Some(past) => self.again(group, past),
        };
        let (group, k) = located(before, place);
        table.select(
            group,
            self.shuffle
                .as_ref()
                .map_or(k, |shuffle| shuffle.samples[group].get(k)),
        )
    }

    /// The place on the line of sample number `member` of the group's batches.
    fn member(&self, group: usize, member: u64) -> u64 {
        let permuted = self
            .shuffle
            .as_ref()
            .and_then(|shuffle| shuffle.members[group].as_ref());
        self.plan.starts[group] + permuted.map_or(member, |members| members.get(member))
    }

    /// The place on the line of sample number `k` that fills up the group's short batch. It comes
    /// from the group's full batches first. After these, places count backwards: from the group's
    /// start if groups flow, otherwise from its end.
    fn again(&self, group: usize, k: u64) -> u64 {
        let Plan {
            starts,
            rows,
            table,
            flows,
            ..
        } = &*self.plan;
        let members = starts[group + 1] - starts[group];
        let of_full = members - members % rows[group];
        if k < of_full {
            return self.member(group, k);
        }
        let (first, len) = if *flows {
            (0, table.of.len() as u64)
        } else {
            (starts[group], members)
        };
        first + (starts[group] - first + len - 1 - (k - of_full) % len) % len
    }

    /// The position of a random sample from the same group as `position`.
    pub(crate) fn another(&self, position: u64, draws: &mut Draws) -> u64 {
        let Plan {
            table,
            before,
            largest,
            batches,
            ..
        } = &*self.plan;
        let group = usize::from(self.batch(position / largest).group);
        batches * largest + before[group] + draws.below(table.sizes[group])
    }

    /// The positions that have a sample of the epoch.
    pub(crate) fn positions(&self) -> impl Iterator<Item = u64> {
        let largest = self.plan.largest;
        let batches = self.plan.counts.batches;
        (0..batches)
            .flat_map(move |batch| batch * largest..batch * largest + self.batch(batch).real)
    }
}

/// The group that contains `place` on the line, and the number of the group's places before it.
fn located(before: &[u64], place: u64) -> (usize, u64) {
    let group = before.partition_point(|before| *before <= place) - 1;
    (group, place - before[group])
}

#[cfg(test)]
mod tests;
