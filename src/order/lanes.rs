//! Orders over chunks for many ranks: lanes walked side by side, and the chunks that a rank needs
//! at each position. Pure.
//!
//! ```text
//! permuted chunks   │ 7 │  2  │ 9 │   0   │ 4 │ 5 │  8  │ …    every sample once, N in all
//! cut in L lanes    └───── lane 0 ────┴───── lane 1 ────┘ …    a chunk on a cut has a piece in both lanes
//! groups of W       └── 7 2 ──┴─ 9 0 ─┴─ 0 4 ─┴── 5 8 ──┘ …    each group's samples permuted
//! positions         0 L 2L …          1 L+1 2L+1 …             position p is entry p / L of lane p % L
//! ```
//!
//! A rank visits the positions p ≡ class (mod step). With g = gcd(L, step) these are in the lanes l
//! ≡ class (mod g), so it reads L / g lanes of L. When step (the number of ranks, say) divides L,
//! no two ranks read the same lane, and a chunk is read twice only where a cut goes through it;
//! otherwise step / g ranks read each lane. The order itself knows nothing of ranks.
//!
//! *Virtual* positions continue past N for the padding at an epoch's end: v stands for v % N. Round
//! k is [kN, (k + 1)N); there a rank visits the lanes l ≡ class - kN (mod g).
//!
//! # Why opening in sequence cannot get stuck
//!
//! [`Needs`] lists the pieces of a rank, group by group, by *first need* f: the group's first
//! virtual position in the run. A pipeline opens them strictly in that sequence in at least
//! [`Lanes::most`] buffers. When the oldest waiting position p reaches an entry's `until`, the
//! entry is *done*. It is released or, if a rank that skips positions never needed it, passed over
//! without a buffer. Let A be the set that has one group from each lane that the rank visits in p's
//! round: the lane's first group that is not done at p. Then **every entry before the last one of A
//! is in A or done at p**, so that before all of A is open only entries of A have buffers, and A
//! has at most `most`:
//!
//! - Entries of earlier rounds are done at p; those of later rounds have a later f than all of A's.
//! - A lane that has a position of the run left in the round has one in [p, p + L): its positions
//!   are L apart and the first is below kN + L. So f(y) < p + L for each y in A.
//! - Let x of the round be neither in A nor done. An earlier group of its lane is in A and ends at
//!   p or later; x begins L after the end of such a group at the earliest: f(x) ≥ p + L, so x comes
//!   after all of A.
//!
//! Limits: any L, W ≥ 1, any number of samples. An order takes O(chunks) memory for any L; `Needs`
//! take O(chunks + min(L, N)) per round that the run touches, and each `piece` of them O(lanes
//! visited × W).

use super::gcd;
use feedline_core::order::{Key, Permutation};
use std::ops::Range;
use std::sync::Arc;

/// The order. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Lanes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The first sample of each chunk, then the number of all samples.
    starts: Arc<[u64]>,
    /// The chunks in their order, without empty ones. An index into it is a *turn*.
    sequence: Vec<usize>,
    /// The number of samples before each turn, then the number of all samples.
    before: Vec<u64>,
    lanes: u64,
    window: usize,
    /// `None`: nothing is permuted.
    key: Option<Key>,
}

/// Up to `window` consecutive pieces of one lane, whose samples are permuted together.
#[derive(Clone, Debug)]
struct Group {
    lane: u64,
    /// Index of the group in its lane.
    number: u64,
    turns: Range<usize>,
    /// The group's samples, as indices into all turns laid end to end.
    samples: Range<u64>,
}

impl Lanes {
    /// `starts` ascend from 0: the first sample of each chunk, then the number of all. Without a
    /// key, nothing is permuted. No key, one lane and a window of 1 give the sequential order. 0
    /// lanes and a window of 0 count as 1.
    pub(crate) fn new(starts: &Arc<[u64]>, lanes: u64, window: usize, key: Option<Key>) -> Self {
        let chunks = starts.len().saturating_sub(1);
        let permutation = key.map(|key| Permutation::new(chunks as u64, key.named("chunks")));
        let mut sequence = Vec::with_capacity(chunks);
        let mut before = Vec::with_capacity(chunks + 1);
        let mut sum = 0;
        for k in 0..chunks {
            let chunk = permutation
                .as_ref()
                .map_or(k, |permutation| permutation.get(k as u64) as usize);
            let rows = starts[chunk + 1] - starts[chunk];
            if rows > 0 {
                sequence.push(chunk);
                before.push(sum);
                sum += rows;
            }
        }
        before.push(sum);
        let lanes = lanes.max(1);
        let window = window.max(1);
        Self(Arc::new(Inner {
            starts: starts.clone(),
            sequence,
            before,
            lanes,
            window,
            key,
        }))
    }

    /// Positions of an epoch: every sample has one.
    pub(crate) fn len(&self) -> u64 {
        self.0.before.last().copied().unwrap_or(0)
    }

    /// Whether each position equals its sample id, so that chunks are read one after the other.
    pub(crate) fn is_sequential(&self) -> bool {
        self.0.key.is_none() && self.0.lanes == 1 && self.0.window == 1
    }

    /// The sample at `position`, which must be below `len`.
    pub(crate) fn id(&self, position: u64) -> u64 {
        assert!(
            position < self.len(),
            "position {position} of an epoch of {}",
            self.len()
        );
        let lane = position % self.0.lanes;
        let at = self.span(lane).start + position / self.0.lanes;
        let group = self.group(lane, at);
        self.locate(&group, self.permutation(&group).as_ref(), at).2
    }

    /// The maximum number of entries that one [`LanePiece`] of a rank with this `step` needs, for
    /// any round, key and class.
    pub(crate) fn most(&self, step: u64) -> usize {
        let lanes = self
            .0
            .lanes
            .min(self.len())
            .div_ceil(gcd(self.0.lanes, step.max(1)));
        let lanes = usize::try_from(lanes).unwrap_or(usize::MAX);
        // Apart from its first piece, a lane has only chunks that no earlier lane has.
        let exist = self
            .0
            .sequence
            .len()
            .saturating_add(lanes.saturating_sub(1));
        lanes.saturating_mul(self.0.window).min(exist)
    }

    /// Read amplification: the rows that `world` ranks with this `step` open in an epoch, per row
    /// of the dataset. Each time a chunk is opened, all its rows count. 1 is the minimum; NaN
    /// without samples.
    pub(crate) fn amplification(&self, world: u64, step: u64) -> f64 {
        let Inner {
            starts,
            sequence,
            lanes,
            ..
        } = &*self.0;
        let once: u128 = (0..self.len().min(*lanes))
            .flat_map(|lane| self.turns(lane))
            .map(|turn| u128::from(starts[sequence[turn] + 1] - starts[sequence[turn]]))
            .sum();
        // The number of ranks that read each lane.
        let ranks = world.max(1) / gcd(*lanes, step.max(1));
        once as f64 * ranks as f64 / self.len() as f64
    }

    /// Heap bytes, without the chunk starts, which are the dataset's.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.0.sequence) + size_of_val(&*self.0.before)
    }

    /// The needs of a rank that visits the virtual positions p ≡ `class` (mod `step`) of
    /// `start..end`.
    pub(crate) fn needs(&self, start: u64, end: u64, class: u64, step: u64) -> Needs {
        let len = self.len();
        let stride = gcd(self.0.lanes, step.max(1));
        let end = if len == 0 { start } else { end.max(start) };
        let mut rounds = Vec::new();
        let mut begins = Vec::new();
        let mut groups = Vec::new();
        let mut firsts = Vec::new();
        let mut base = if start < end {
            start - start % len
        } else {
            end
        };
        while base < end {
            let remainder = class_before(class, base, stride);
            let first = begins.len();
            let run = start.saturating_sub(base)..(end - base).min(len);
            let mut lane = remainder;
            while lane < self.0.lanes.min(len) {
                begins.push(groups.len());
                self.add_groups(lane, base, &run, &mut groups, &mut firsts);
                lane = lane.saturating_add(stride);
            }
            rounds.push(Round {
                base,
                remainder,
                visited: first..begins.len(),
            });
            base = base.saturating_add(len);
        }
        begins.push(groups.len());
        firsts.sort_unstable();
        let mut entry = 0;
        for (_, group) in &firsts {
            let needing: &mut Needing = &mut groups[*group];
            needing.entry = entry;
            entry += needing.group.turns.len();
        }
        let sequence = firsts.into_iter().map(|(_, group)| group).collect();
        Needs(Arc::new(Needed {
            lanes: self.clone(),
            run: start..end,
            stride,
            rounds,
            begins,
            groups,
            sequence,
        }))
    }

    /// Adds the groups of `lane` that have a position in `run` (of the round that begins at
    /// `base`), and their first needs.
    fn add_groups(
        &self,
        lane: u64,
        base: u64,
        run: &Range<u64>,
        groups: &mut Vec<Needing>,
        firsts: &mut Vec<(u64, usize)>,
    ) {
        let lanes = self.0.lanes;
        let start = self.span(lane).start;
        let reached = |position: u64| start + position.saturating_sub(lane).div_ceil(lanes);
        // An entry of the lane has a position below `len`, so only the base can take the sum past
        // 64 bits.
        let position = |at: u64| base.saturating_add(lane + (at - start) * lanes);
        let mut at = reached(run.start);
        let end = reached(run.end);
        while at < end {
            let group = self.group(lane, at);
            firsts.push((position(at), groups.len()));
            at = group.samples.end;
            groups.push(Needing {
                until: position(at.min(end) - 1).saturating_add(1),
                group,
                entry: 0,
            });
        }
    }

    /// The range of a lane's entries when all turns are laid end to end.
    fn span(&self, lane: u64) -> Range<u64> {
        let each = self.len() / self.0.lanes;
        let more = self.len() % self.0.lanes;
        let start = |lane: u64| lane * each + lane.min(more);
        start(lane)..start(lane + 1)
    }

    /// The turn that contains index `at` of all turns laid end to end.
    fn turn(&self, at: u64) -> usize {
        self.0.before.partition_point(|before| *before <= at) - 1
    }

    /// The turns that have a piece in `lane`, which must not be empty.
    fn turns(&self, lane: u64) -> Range<usize> {
        let span = self.span(lane);
        self.turn(span.start)..self.turn(span.end - 1) + 1
    }

    fn group(&self, lane: u64, at: u64) -> Group {
        let Inner { before, window, .. } = &*self.0;
        let span = self.span(lane);
        let turns = self.turns(lane);
        let number = (self.turn(at) - turns.start) / window;
        let first = turns.start + number * window;
        let turns = first..first.saturating_add(*window).min(turns.end);
        let samples = before[turns.start].max(span.start)..before[turns.end].min(span.end);
        Group {
            lane,
            number: number as u64,
            turns,
            samples,
        }
    }

    fn permutation(&self, group: &Group) -> Option<Permutation> {
        let key = self
            .0
            .key?
            .named("group")
            .derive(group.lane)
            .derive(group.number);
        Some(Permutation::new(
            group.samples.end - group.samples.start,
            key,
        ))
    }

    /// Locates index `at` of the group's samples: the number of the piece in the group, the row in
    /// the chunk, and the sample id.
    fn locate(
        &self,
        group: &Group,
        permutation: Option<&Permutation>,
        at: u64,
    ) -> (usize, u64, u64) {
        let Inner {
            starts,
            sequence,
            before,
            ..
        } = &*self.0;
        let first = group.samples.start;
        let at = permutation.map_or(at, |permutation| first + permutation.get(at - first));
        let piece = before[group.turns.clone()].partition_point(|before| *before <= at) - 1;
        let turn = group.turns.start + piece;
        let row = at - before[turn];
        (piece, row, starts[sequence[turn]] + row)
    }
}

/// (`class` - `base`) mod `stride`.
fn class_before(class: u64, base: u64, stride: u64) -> u64 {
    let class = class % stride;
    let base = base % stride;
    if class >= base {
        class - base
    } else {
        stride - (base - class)
    }
}

/// The sequence in which a rank needs pieces of chunks. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Needs(Arc<Needed>);

#[derive(Debug)]
struct Needed {
    lanes: Lanes,
    run: Range<u64>,
    /// The distance between lanes that the rank visits.
    stride: u64,
    rounds: Vec<Round>,
    /// For each visited lane of each round, the index of its first group in `groups`; then the
    /// number of all groups.
    begins: Vec<usize>,
    /// Sorted by round, lane, and position.
    groups: Vec<Needing>,
    /// Indices into `groups`, sorted by the groups' first need, and so also by entry.
    sequence: Vec<usize>,
}

#[derive(Debug)]
struct Round {
    /// The round's first virtual position.
    base: u64,
    /// The first visited lane.
    remainder: u64,
    /// The round's range in `begins`.
    visited: Range<usize>,
}

#[derive(Debug)]
struct Needing {
    group: Group,
    until: u64,
    /// The group's first entry in the sequence. A group has one entry per piece.
    entry: usize,
}

/// An entry of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) chunk: usize,
    /// The first virtual position that no longer needs the entry: one past the last position of the
    /// run (visited or not) that the entry's group has in this lane and round.
    pub(crate) until: u64,
}

/// A run of positions that needs the same entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LanePiece {
    /// The first virtual position that needs other entries.
    pub(crate) end: u64,
    /// The needed entries, ascending.
    pub(crate) entries: Vec<usize>,
}

impl Needs {
    /// Heap bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        let Needed {
            rounds,
            begins,
            groups,
            sequence,
            ..
        } = &*self.0;
        size_of_val(&**rounds)
            + size_of_val(&**begins)
            + size_of_val(&**groups)
            + size_of_val(&**sequence)
    }

    /// Entry `k`; `None` past the end.
    pub(crate) fn entry(&self, k: usize) -> Option<Need> {
        let Needed {
            lanes,
            groups,
            sequence,
            ..
        } = &*self.0;
        let after = sequence.partition_point(|group| groups[*group].entry <= k);
        let Needing {
            group,
            until,
            entry,
        } = &groups[*sequence.get(after.checked_sub(1)?)?];
        let turn = group.turns.start + (k - entry);
        group.turns.contains(&turn).then(|| Need {
            chunk: lanes.0.sequence[turn],
            until: *until,
        })
    }

    /// The entries that `position` (virtual, in the run, visited or not) needs, and the end of this
    /// need: at most the end of the round and of the run. Each visited lane of the round adds the
    /// group of its next entry; a lane without one needs nothing.
    pub(crate) fn piece(&self, position: u64) -> LanePiece {
        let (round, groups) = self.groups(position);
        let round_end = round.base.saturating_add(self.0.lanes.len());
        let ends = groups.iter().map(|(_, needing)| needing.until);
        let end = ends.fold(self.0.run.end.min(round_end), u64::min);
        let entries = groups
            .iter()
            .flat_map(|(_, needing)| (needing.entry..).take(needing.group.turns.len()));
        LanePiece {
            end,
            entries: entries.collect(),
        }
    }

    /// Prepares to locate the samples of the piece that contains `position`.
    pub(crate) fn places(&self, position: u64) -> Places<'_> {
        let (round, groups) = self.groups(position);
        let mut lanes: Vec<_> = round.visited.clone().map(|_| None).collect();
        let mut entry = 0;
        for (lane, Needing { group, .. }) in groups {
            let permutation = self.0.lanes.permutation(group);
            let origin = self.0.lanes.span(group.lane).start;
            lanes[lane] = Some(LanePlace {
                entry,
                group,
                permutation,
                origin,
            });
            entry += group.turns.len();
        }
        Places {
            needed: &self.0,
            round,
            lanes,
        }
    }

    /// The round of `position`, and the groups that it needs, sorted by entry. Each group comes
    /// with the index of its lane among the visited lanes.
    fn groups(&self, position: u64) -> (&Round, Vec<(usize, &Needing)>) {
        let Needed {
            run,
            rounds,
            begins,
            groups,
            ..
        } = &*self.0;
        assert!(
            run.contains(&position),
            "position {position} is outside the run {run:?}"
        );
        let round = &rounds[rounds.partition_point(|round| round.base <= position) - 1];
        let mut needed = Vec::with_capacity(round.visited.len());
        for (lane, visited) in round.visited.clone().enumerate() {
            let groups = &groups[begins[visited]..begins[visited + 1]];
            let next = groups.partition_point(|needing| needing.until <= position);
            needed.extend(groups.get(next).map(|needing| (lane, needing)));
        }
        needed.sort_unstable_by_key(|(_, needing)| needing.entry);
        (round, needed)
    }
}

/// Locates the samples of a piece; made once for many positions.
pub(crate) struct Places<'a> {
    needed: &'a Needed,
    round: &'a Round,
    /// One per visited lane of the round.
    lanes: Vec<Option<LanePlace<'a>>>,
}

struct LanePlace<'a> {
    /// The index of the group's first entry among the piece's entries.
    entry: usize,
    group: &'a Group,
    permutation: Option<Permutation>,
    /// The lane's first sample, as an index into all turns laid end to end.
    origin: u64,
}

impl Places<'_> {
    /// The index in the piece's entries, the row in the chunk, and the sample at a virtual
    /// position, which must be in the piece and in a visited lane.
    pub(crate) fn locate(&self, position: u64) -> (usize, u64, u64) {
        // Divisions cost most here, and usual orders need none: one lane, or one lane for this
        // rank.
        let Needed { lanes, stride, .. } = self.needed;
        let inner = position - self.round.base;
        let count = lanes.0.lanes;
        let (lane, at) = if count == 1 {
            (0, inner)
        } else {
            (inner % count, inner / count)
        };
        let index = match lane.checked_sub(self.round.remainder) {
            Some(0) => Some(0),
            Some(lane) => usize::try_from(lane / stride).ok(),
            None => None,
        };
        let place = index.and_then(|index| self.lanes.get(index)?.as_ref());
        let place = place.filter(|place| {
            place.group.lane == lane && place.group.samples.contains(&(place.origin + at))
        });
        let place = place.unwrap_or_else(|| {
            panic!("position {position} is not in the piece, or not the rank's")
        });
        let at = place.origin + at;
        let (piece, row, id) = lanes.locate(place.group, place.permutation.as_ref(), at);
        (place.entry + piece, row, id)
    }
}

#[cfg(test)]
mod tests;
