//! Orders over chunks for many ranks: lanes walked side by side, and the chunks that a rank needs at each position. Pure.
//!
//! ```text
//! permuted chunks   │ 7 │  2  │ 9 │   0   │ 4 │ 5 │  8  │ …    every sample once, N in all
//! cut in L lanes    └───── lane 0 ────┴───── lane 1 ────┘ …    a chunk on a cut has a piece in both lanes
//! groups of W       └── 7 2 ──┴─ 9 0 ─┴─ 0 4 ─┴── 5 8 ──┘ …    each group's samples permuted
//! positions         0 L 2L …          1 L+1 2L+1 …             position p is entry p / L of lane p % L
//! ```
//!
//! A rank visits the positions p ≡ class (mod step). With g = gcd(L, step) these lie in the lanes l ≡ class (mod g), so
//! it reads L / g lanes of L. When step (the number of ranks, say) divides L, no two ranks read the same lane, and a chunk
//! is read twice only where a cut goes through it; otherwise step / g ranks read each lane. The order itself knows nothing
//! of ranks.
//!
//! *Virtual* positions go on past N for the padding at an epoch's end: v stands for v % N. Round k is [kN, (k + 1)N);
//! there a rank visits the lanes l ≡ class - kN (mod g).
//!
//! # Why opening in sequence cannot get stuck
//!
//! [`Needs`] lists the pieces of a rank, group by group, by *first need* f: the group's first virtual position in the
//! run. A pipeline opens them strictly in that sequence in at least [`Lanes::most`] buffers. When the oldest waiting
//! position p reaches an entry's `until`, the entry is *done*: let go of or, if a rank that skips positions never came to
//! need it, passed over without a buffer. Let A be what p needs: of every visited lane of p's round the first group that
//! is not done at p. Then **every entry before the last one of A is in A or done at p**, so that before all of A is open
//! only entries of A have buffers, and A has at most `most`:
//!
//! - Entries of earlier rounds are done at p; those of later rounds have a later f than all of A's.
//! - A lane that has a position of the run left in the round has one in [p, p + L): its positions are L apart and the
//!   first is below kN + L. So f(y) < p + L for each y in A.
//! - Let x of the round be neither in A nor done. An earlier group of its lane is in A and ends at p or later; x begins L
//!   after the end of such a group at the earliest: f(x) ≥ p + L, so x comes after all of A.
//!
//! Limits: any L, W ≥ 1, any number of samples. An order takes O(chunks) memory, whatever L is; `Needs` take
//! O(chunks + min(L, N)) per round that the run touches, and each `piece` of them O(lanes visited × W).

use super::gcd;
use super::key::{Key, Permutation};
use std::ops::Range;
use std::sync::Arc;

/// The order. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Lanes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// First sample of each chunk, and the number of all.
    starts: Arc<[u64]>,
    /// The chunks in their order, without empty ones. An index of it is a *turn*.
    sequence: Vec<usize>,
    /// Samples before each turn, and the number of all.
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
    /// Counted in its lane.
    number: u64,
    turns: Range<usize>,
    /// Its samples, counted with all turns end to end.
    samples: Range<u64>,
}

impl Lanes {
    /// `starts` ascend from 0: the first sample of each chunk, then the number of all. Without a key nothing is permuted;
    /// with one lane and a window of 1 that is the sequential order. 0 lanes and a window of 0 count as 1.
    pub(crate) fn new(starts: &Arc<[u64]>, lanes: u64, window: usize, key: Option<Key>) -> Self {
        let chunks = starts.len().saturating_sub(1);
        let permutation = key.map(|key| Permutation::new(chunks as u64, key.named("chunks")));
        let (mut sequence, mut before, mut sum) = (Vec::with_capacity(chunks), Vec::with_capacity(chunks + 1), 0);
        for k in 0..chunks {
            let chunk = permutation.as_ref().map_or(k, |permutation| permutation.get(k as u64) as usize);
            let rows = starts[chunk + 1] - starts[chunk];
            if rows > 0 {
                sequence.push(chunk);
                before.push(sum);
                sum += rows;
            }
        }
        before.push(sum);
        let (lanes, window) = (lanes.max(1), window.max(1));
        Self(Arc::new(Inner { starts: starts.clone(), sequence, before, lanes, window, key }))
    }

    /// Positions of an epoch: every sample has one.
    pub(crate) fn len(&self) -> u64 {
        self.0.before.last().copied().unwrap_or(0)
    }

    /// Whether positions are samples, with one chunk at a time.
    pub(crate) fn is_sequential(&self) -> bool {
        self.0.key.is_none() && self.0.lanes == 1 && self.0.window == 1
    }

    /// The sample at `position`, which must be below `len`.
    pub(crate) fn id(&self, position: u64) -> u64 {
        assert!(position < self.len(), "position {position} of an epoch of {}", self.len());
        let lane = position % self.0.lanes;
        let at = self.span(lane).start + position / self.0.lanes;
        let group = self.group(lane, at);
        self.locate(&group, self.permutation(&group).as_ref(), at).2
    }

    /// The most entries that a piece of a rank with this `step` has, in any round and whatever the key and the class.
    pub(crate) fn most(&self, step: u64) -> usize {
        let lanes = self.0.lanes.min(self.len()).div_ceil(gcd(self.0.lanes, step.max(1)));
        let lanes = usize::try_from(lanes).unwrap_or(usize::MAX);
        // Beside its first piece a lane has only chunks that no earlier lane has.
        let exist = self.0.sequence.len().saturating_add(lanes.saturating_sub(1));
        lanes.saturating_mul(self.0.window).min(exist)
    }

    /// Rows that `world` ranks with this `step` open in an epoch, per row of the dataset, when a chunk counts with all its
    /// rows each time it is opened. 1 is the least; NaN without samples.
    pub(crate) fn amplification(&self, world: u64, step: u64) -> f64 {
        let Inner { starts, sequence, lanes, .. } = &*self.0;
        let rows = |turn: usize| u128::from(starts[sequence[turn] + 1] - starts[sequence[turn]]);
        let once: u128 = (0..self.len().min(*lanes)).flat_map(|lane| self.turns(lane)).map(rows).sum();
        // So many ranks read each lane.
        let ranks = world.max(1) / gcd(*lanes, step.max(1));
        once as f64 * ranks as f64 / self.len() as f64
    }

    /// Heap bytes, without the chunk starts, which are the dataset's.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.0.sequence) + size_of_val(&*self.0.before)
    }

    /// The needs of a rank that visits the virtual positions p ≡ `class` (mod `step`) of `start..end`.
    pub(crate) fn needs(&self, start: u64, end: u64, class: u64, step: u64) -> Needs {
        let (len, stride) = (self.len(), gcd(self.0.lanes, step.max(1)));
        let end = if len == 0 { start } else { end.max(start) };
        let (mut rounds, mut begins, mut groups, mut firsts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut base = if start < end { start - start % len } else { end };
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
            rounds.push(Round { base, remainder, visited: first..begins.len() });
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
        Needs(Arc::new(Needed { lanes: self.clone(), run: start..end, stride, rounds, begins, groups, sequence }))
    }

    /// Adds the groups of `lane` that have a position in `run` (of the round that begins at `base`), and their first needs.
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
        // An entry of the lane has a position below `len`, so only the base can take the sum past 64 bits.
        let position = |at: u64| base.saturating_add(lane + (at - start) * lanes);
        let (mut at, end) = (reached(run.start), reached(run.end));
        while at < end {
            let group = self.group(lane, at);
            firsts.push((position(at), groups.len()));
            at = group.samples.end;
            groups.push(Needing { until: position(at.min(end) - 1).saturating_add(1), group, entry: 0 });
        }
    }

    /// Where the entries of a lane are when all turns are laid end to end.
    fn span(&self, lane: u64) -> Range<u64> {
        let (each, more) = (self.len() / self.0.lanes, self.len() % self.0.lanes);
        let start = |lane: u64| lane * each + lane.min(more);
        start(lane)..start(lane + 1)
    }

    /// The turn in which the sample at `at` is.
    fn turn(&self, at: u64) -> usize {
        self.0.before.partition_point(|before| *before <= at) - 1
    }

    /// The turns that have a piece in a lane that is not empty.
    fn turns(&self, lane: u64) -> Range<usize> {
        let span = self.span(lane);
        self.turn(span.start)..self.turn(span.end - 1) + 1
    }

    fn group(&self, lane: u64, at: u64) -> Group {
        let Inner { before, window, .. } = &*self.0;
        let (span, turns) = (self.span(lane), self.turns(lane));
        let number = (self.turn(at) - turns.start) / window;
        let first = turns.start + number * window;
        let turns = first..first.saturating_add(*window).min(turns.end);
        let samples = before[turns.start].max(span.start)..before[turns.end].min(span.end);
        Group { lane, number: number as u64, turns, samples }
    }

    fn permutation(&self, group: &Group) -> Option<Permutation> {
        let key = self.0.key?.named("group").derive(group.lane).derive(group.number);
        Some(Permutation::new(group.samples.end - group.samples.start, key))
    }

    /// The piece of the group, the row in its chunk, and the sample that comes at `at`.
    fn locate(&self, group: &Group, permutation: Option<&Permutation>, at: u64) -> (usize, u64, u64) {
        let Inner { starts, sequence, before, .. } = &*self.0;
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
    let (class, base) = (class % stride, base % stride);
    if class >= base { class - base } else { stride - (base - class) }
}

/// The sequence in which a rank needs pieces of chunks. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Needs(Arc<Needed>);

#[derive(Debug)]
struct Needed {
    lanes: Lanes,
    run: Range<u64>,
    /// The distance between visited lanes.
    stride: u64,
    rounds: Vec<Round>,
    /// First of `groups` of each visited lane of each round, and the number of all.
    begins: Vec<usize>,
    /// By round, lane, and position.
    groups: Vec<Needing>,
    /// Indices of `groups` by their first need, and so by entry.
    sequence: Vec<usize>,
}

#[derive(Debug)]
struct Round {
    /// Its first virtual position.
    base: u64,
    /// The first visited lane.
    remainder: u64,
    /// Its part of `begins`.
    visited: Range<usize>,
}

#[derive(Debug)]
struct Needing {
    group: Group,
    until: u64,
    /// The first of its entries; there is one per piece.
    entry: usize,
}

/// An entry of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) chunk: usize,
    /// The first virtual position that does not need it any more: one past the last of the run (visited or not) that
    /// its group has in this lane and round.
    pub(crate) until: u64,
}

/// A run of positions that needs the same entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The first virtual position that needs others.
    pub(crate) end: u64,
    /// The entries that it needs, ascending.
    pub(crate) entries: Vec<usize>,
}

impl Needs {
    /// Heap bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        let Needed { rounds, begins, groups, sequence, .. } = &*self.0;
        size_of_val(&**rounds) + size_of_val(&**begins) + size_of_val(&**groups) + size_of_val(&**sequence)
    }

    /// Entry `k`; `None` past the end.
    pub(crate) fn entry(&self, k: usize) -> Option<Need> {
        let Needed { lanes, groups, sequence, .. } = &*self.0;
        let after = sequence.partition_point(|group| groups[*group].entry <= k);
        let Needing { group, until, entry } = &groups[*sequence.get(after.checked_sub(1)?)?];
        let turn = group.turns.start + (k - entry);
        group.turns.contains(&turn).then(|| Need { chunk: lanes.0.sequence[turn], until: *until })
    }

    /// The entries that `position` (virtual, in the run, visited or not) needs, and the end of this need: at most the end of the
    /// round and of the run. Each visited lane of the round adds the group of its next entry; a lane without one needs nothing.
    pub(crate) fn piece(&self, position: u64) -> Piece {
        let (round, groups) = self.groups(position);
        let round_end = round.base.saturating_add(self.0.lanes.len());
        let ends = groups.iter().map(|(_, needing)| needing.until);
        let end = ends.fold(self.0.run.end.min(round_end), u64::min);
        let entries = groups.iter().flat_map(|(_, needing)| (needing.entry..).take(needing.group.turns.len()));
        Piece { end, entries: entries.collect() }
    }

    /// The same, ready for many lookups.
    pub(crate) fn places(&self, position: u64) -> Places<'_> {
        let (round, groups) = self.groups(position);
        let mut lanes: Vec<_> = round.visited.clone().map(|_| None).collect();
        let mut entry = 0;
        for (lane, Needing { group, .. }) in groups {
            let (permutation, origin) = (self.0.lanes.permutation(group), self.0.lanes.span(group.lane).start);
            lanes[lane] = Some(Place { entry, group, permutation, origin });
            entry += group.turns.len();
        }
        Places { needed: &self.0, round, lanes }
    }

    /// The round of a position, and the groups that it needs by entry, each with the index of its lane among the visited.
    fn groups(&self, position: u64) -> (&Round, Vec<(usize, &Needing)>) {
        let Needed { run, rounds, begins, groups, .. } = &*self.0;
        assert!(run.contains(&position), "position {position} of the run {run:?}");
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

/// The places of a piece's samples; made once for many positions.
pub(crate) struct Places<'a> {
    needed: &'a Needed,
    round: &'a Round,
    /// By visited lane of the round.
    lanes: Vec<Option<Place<'a>>>,
}

struct Place<'a> {
    /// The group's first index in the piece's entries.
    entry: usize,
    group: &'a Group,
    permutation: Option<Permutation>,
    /// The first of the lane's samples.
    origin: u64,
}

impl Places<'_> {
    /// The index in the piece's entries, the row in the chunk, and the sample at a virtual position, which must lie in the
    /// piece and in a visited lane.
    pub(crate) fn locate(&self, position: u64) -> (usize, u64, u64) {
        // Divisions cost most here, and usual orders need none: one lane, or one lane of this rank's.
        let Needed { lanes, stride, .. } = self.needed;
        let (inner, count) = (position - self.round.base, lanes.0.lanes);
        let (lane, at) = if count == 1 { (0, inner) } else { (inner % count, inner / count) };
        let index = match lane.checked_sub(self.round.remainder) {
            Some(0) => Some(0),
            Some(lane) => usize::try_from(lane / stride).ok(),
            None => None,
        };
        let place = index.and_then(|index| self.lanes.get(index)?.as_ref());
        let here = |place: &&Place<'_>| place.group.lane == lane && place.group.samples.contains(&(place.origin + at));
        let place = place.filter(here);
        let place = place.unwrap_or_else(|| panic!("position {position} is not in the piece, or not the rank's"));
        let at = place.origin + at;
        let (piece, row, id) = lanes.locate(place.group, place.permutation.as_ref(), at);
        (place.entry + piece, row, id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// The sample at a position, with its lane and group.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Spot {
        chunk: usize,
        row: u64,
        id: u64,
        group: (u64, u64),
    }

    /// By lane and group.
    type ChunksOf = BTreeMap<(u64, u64), Vec<usize>>;

    /// An order, drawn.
    #[derive(Clone, Debug)]
    struct Case {
        starts: Arc<[u64]>,
        lanes: u64,
        window: usize,
        key: Option<Key>,
    }

    /// The run of a rank, drawn.
    #[derive(Clone, Debug)]
    struct Run {
        start: u64,
        end: u64,
        class: u64,
        step: u64,
    }

    fn starts_of(rows: &[u64]) -> Arc<[u64]> {
        let mut starts = vec![0];
        rows.iter().for_each(|rows| starts.push(starts[starts.len() - 1] + rows));
        starts.into()
    }

    fn cases() -> impl Strategy<Value = Case> {
        let rows = prop::collection::vec(prop_oneof![Just(0_u64), 0_u64..12], 0..25);
        (rows, 1_u64..20, 1_usize..7, any::<Option<u64>>()).prop_map(|(rows, lanes, window, seed)| Case {
            starts: starts_of(&rows),
            lanes,
            window,
            key: seed.map(Key::new),
        })
    }

    fn runs() -> impl Strategy<Value = (Case, Run)> {
        (cases(), any::<[u64; 2]>(), 0_u64..50, 1_u64..25).prop_map(|(case, ends, class, step)| {
            let [a, b] = ends.map(|end| end % (3 * case.len() + 1));
            (case, Run { start: a.min(b), end: a.max(b), class, step })
        })
    }

    impl Case {
        fn lanes(&self) -> Lanes {
            Lanes::new(&self.starts, self.lanes, self.window, self.key)
        }

        fn len(&self) -> u64 {
            self.starts[self.starts.len() - 1]
        }

        /// The whole order, and the chunks of each group, by brute force.
        fn naive(&self) -> (Vec<Spot>, ChunksOf) {
            let chunks = self.starts.len() - 1;
            let permuted = |n: usize, key: Option<Key>| {
                let permutation = key.map(|key| Permutation::new(n as u64, key));
                (0..n).map(move |k| permutation.as_ref().map_or(k, |permutation| permutation.get(k as u64) as usize))
            };
            let all = permuted(chunks, self.key.map(|key| key.named("chunks")));
            let all = all.flat_map(|chunk| (self.starts[chunk]..self.starts[chunk + 1]).map(move |id| (chunk, id)));
            let mut all = all.collect::<Vec<_>>().into_iter().peekable();
            let (mut by_lane, mut chunks_of) = (Vec::new(), ChunksOf::new());
            for lane in 0..self.lanes {
                let len = (self.len() + self.lanes - 1 - lane) / self.lanes;
                let samples: Vec<_> = all.by_ref().take(len as usize).collect();
                let pieces: Vec<_> = samples.chunk_by(|a, b| a.0 == b.0).collect();
                let mut spots = Vec::new();
                for (number, group) in (0..).zip(pieces.chunks(self.window)) {
                    chunks_of.insert((lane, number), group.iter().map(|piece| piece[0].0).collect());
                    let samples = group.concat();
                    let key = self.key.map(|key| key.named("group").derive(lane).derive(number));
                    spots.extend(permuted(samples.len(), key).map(|k| {
                        let (chunk, id) = samples[k];
                        Spot { chunk, row: id - self.starts[chunk], id, group: (lane, number) }
                    }));
                }
                by_lane.push(spots);
            }
            let spot = |position: u64| by_lane[(position % self.lanes) as usize][(position / self.lanes) as usize];
            ((0..self.len()).map(spot).collect(), chunks_of)
        }

        /// The list that `needs` must give.
        fn naive_needs(&self, run: &Run) -> Vec<Need> {
            let (spots, chunks_of) = self.naive();
            let (mut seen, mut needs) = (BTreeSet::new(), Vec::new());
            for position in run.start..run.end {
                let base = position - position % self.len();
                let group = spots[(position - base) as usize].group;
                let first = (i128::from(run.class) - i128::from(base)).rem_euclid(i128::from(run.step)) as u64;
                let visited = (0..self.lanes).any(|k| (first + k * run.step) % self.lanes == group.0);
                if visited && seen.insert((base, group)) {
                    let spots = &spots[..(run.end - base).min(self.len()) as usize];
                    let until = base + spots.iter().rposition(|spot| spot.group == group).unwrap() as u64 + 1;
                    needs.extend(chunks_of[&group].iter().map(|chunk| Need { chunk: *chunk, until }));
                }
            }
            needs
        }
    }

    impl Run {
        fn visited(&self) -> impl Iterator<Item = u64> {
            let (class, step) = (self.class % self.step, self.step);
            (self.start..self.end).filter(move |position| position % step == class)
        }
    }

    fn all_entries(needs: &Needs) -> Vec<Need> {
        (0..).map_while(|k| needs.entry(k)).collect()
    }

    /// The visited positions with their samples, piece by piece.
    fn walk(needs: &Needs, run: &Run) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        let mut visited = run.visited().peekable();
        while let Some(position) = visited.peek().copied() {
            let (piece, places) = (needs.piece(position), needs.places(position));
            while let Some(position) = visited.next_if(|position| *position < piece.end) {
                out.push((position, places.locate(position).2));
            }
        }
        out
    }

    proptest! {
        #[test]
        fn every_sample_comes_once_as_by_brute_force(case in cases()) {
            let lanes = case.lanes();
            prop_assert_eq!(lanes.len(), case.len());
            let ids: Vec<u64> = (0..lanes.len()).map(|position| lanes.id(position)).collect();
            prop_assert_eq!(&ids, &case.naive().0.iter().map(|spot| spot.id).collect::<Vec<_>>());
            let mut sorted = ids;
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..lanes.len()).collect::<Vec<_>>());
        }

        #[test]
        fn needs_match_brute_force_and_cover_each_visit((case, run) in runs()) {
            let needs = case.lanes().needs(run.start, run.end, run.class, run.step);
            prop_assert_eq!(all_entries(&needs), case.naive_needs(&run));
            let spots = case.naive().0;
            for position in run.visited() {
                // Looked up from any position before it in its piece.
                let mut from = position;
                while from > run.start && needs.piece(from - 1).end > position {
                    from -= 1;
                }
                let spot = spots[(position % case.len()) as usize];
                for from in [from, position] {
                    let (index, row, id) = needs.places(from).locate(position);
                    let need = needs.entry(needs.piece(from).entries[index]).unwrap();
                    prop_assert_eq!((need.chunk, row, id), (spot.chunk, spot.row, spot.id));
                    prop_assert!(need.until > position);
                }
            }
        }

        #[test]
        fn entries_before_the_last_needed_are_needed_or_done((case, run) in runs()) {
            let needs = case.lanes().needs(run.start, run.end, run.class, run.step);
            let (entries, most) = (all_entries(&needs), case.lanes().most(run.step));
            let mut piece = Piece { end: run.start, entries: vec![usize::MAX] };
            for position in run.start..run.end {
                let next = needs.piece(position);
                prop_assert!(next.end > position && next.end <= run.end);
                if position < piece.end {
                    prop_assert_eq!(&next, &piece, "the same up to its end");
                } else {
                    // Two rounds without a need meet at the round's end.
                    let nothing = next.entries.is_empty() && position % case.len() == 0;
                    prop_assert!(nothing || next.entries != piece.entries, "a piece ends where others are needed");
                }
                piece = next;
                prop_assert!(piece.entries.len() <= most, "{} of {most}", piece.entries.len());
                prop_assert!(piece.entries.is_sorted_by(|a, b| a < b));
                let up_to = piece.entries.last().map_or(0, |last| last + 1);
                for (k, entry) in entries[..up_to].iter().enumerate() {
                    prop_assert_eq!(piece.entries.contains(&k), entry.until > position, "entry {} at {}", k, position);
                }
            }
        }

        #[test]
        fn a_pipeline_with_the_fewest_buffers_never_stops((case, run) in runs(), whole: bool) {
            let run = if whole { Run { start: 0, end: case.len(), ..run } } else { run };
            let needs = case.lanes().needs(run.start, run.end, run.class, run.step);
            let (buffers, mut open, mut next, mut end) = (case.lanes().most(run.step), Vec::new(), 0, 0);
            for position in run.visited() {
                if position < end {
                    continue;
                }
                open.retain(|k| needs.entry(*k).unwrap().until > position);
                while open.len() < buffers && needs.entry(next).is_some() {
                    // An entry that is done before it is open is skipped.
                    open.extend(Some(next).filter(|k| needs.entry(*k).unwrap().until > position));
                    next += 1;
                }
                let piece = needs.piece(position);
                prop_assert!(piece.entries.iter().all(|k| open.contains(k)), "{:?} of {:?}", open, piece);
                end = piece.end;
            }
            if whole {
                // No piece is listed twice: their number is that of the pieces in the rank's lanes.
                let lanes = case.lanes();
                let g = gcd(case.lanes, run.step);
                let pieces = (0..case.lanes.min(case.len())).filter(|lane| lane % g == run.class % g);
                let pieces: usize = pieces.map(|lane| lanes.turns(lane).len()).sum();
                prop_assert_eq!(all_entries(&needs).len(), pieces);
            }
        }

        #[test]
        fn a_rank_that_starts_anywhere_goes_on_as_from_the_start((case, run) in runs()) {
            let lanes = case.lanes();
            let from_0 = Run { start: 0, ..run.clone() };
            let before = lanes.needs(0, run.end, run.class, run.step);
            let all = walk(&before, &from_0);
            let chunks = |needs: &Needs, position: u64| {
                let entries = needs.piece(position).entries;
                let mut chunks: Vec<_> = entries.into_iter().map(|k| needs.entry(k).unwrap()).collect();
                chunks.sort_unstable_by_key(|need| (need.chunk, need.until));
                chunks
            };
            for start in 0..run.end {
                let run = Run { start, ..run.clone() };
                let needs = lanes.needs(start, run.end, run.class, run.step);
                let rest = all.partition_point(|(position, _)| *position < start);
                prop_assert_eq!(&walk(&needs, &run), &all[rest..]);
                prop_assert_eq!(chunks(&needs, start), chunks(&before, start));
            }
        }

        #[test]
        fn amplification_counts_the_chunks_of_all_ranks(case in cases(), world in 1_u64..25) {
            prop_assume!(case.len() > 0);
            let lanes = case.lanes();
            let needs = (0..world).flat_map(|rank| all_entries(&lanes.needs(0, lanes.len(), rank, world)));
            let rows: u64 = needs.map(|need| case.starts[need.chunk + 1] - case.starts[need.chunk]).sum();
            prop_assert_eq!(lanes.amplification(world, world), rows as f64 / case.len() as f64);
        }
    }

    #[test]
    fn one_lane_with_window_one_is_the_sequential_order() {
        let lanes = Lanes::new(&starts_of(&[3, 0, 4, 2]), 1, 1, None);
        assert_eq!((0..9).map(|position| lanes.id(position)).collect::<Vec<_>>(), (0..9).collect::<Vec<_>>());
        let needs = lanes.needs(0, 9, 0, 1);
        let expected = [(0, 3), (2, 7), (3, 9)].map(|(chunk, until)| Need { chunk, until });
        assert_eq!(all_entries(&needs), expected);
        assert_eq!(needs.piece(3), Piece { end: 7, entries: vec![1] });
        assert_eq!(needs.places(3).locate(5), (0, 2, 5));
        assert_eq!((lanes.most(1), lanes.most(7)), (1, 1));
    }

    #[test]
    fn a_window_over_everything_is_a_global_shuffle() {
        let starts: Arc<[u64]> = vec![0, 1000, 1500, 4000].into();
        let lanes = Lanes::new(&starts, 1, usize::MAX, Some(Key::new(5)));
        let needs = lanes.needs(0, 4000, 0, 1);
        assert_eq!(needs.piece(0), Piece { end: 4000, entries: vec![0, 1, 2] });
        // The first thousand come from all chunks, by their sizes.
        let places = needs.places(0);
        let mut from = [0; 3];
        (0..1000).for_each(|position| from[places.locate(position).0] += 1);
        for (k, from) in from.into_iter().enumerate() {
            let chunk = needs.entry(k).unwrap().chunk;
            let expected = (starts[chunk + 1] - starts[chunk]) as f64 / 4.0;
            assert!((f64::from(from) - expected).abs() < 5.0 * expected.sqrt(), "{from} of {expected}");
        }
    }

    #[test]
    fn ranks_that_divide_the_lanes_read_little_twice() {
        let rows: Vec<u64> = (0..400).map(|chunk| 900 + chunk * 7 % 200).collect();
        for seed in 0..20 {
            let lanes = Lanes::new(&starts_of(&rows), 8, 4, Some(Key::new(seed)));
            for world in [1, 2, 4, 8] {
                let amplification = lanes.amplification(world, world);
                assert!((1.0..=1.05).contains(&amplification), "{amplification} for {world}");
            }
            assert!(lanes.amplification(3, 3) >= 3.0, "each rank reads all lanes");
            assert_eq!(Lanes::new(&starts_of(&rows), 1, 4, Some(Key::new(seed))).amplification(1, 1), 1.0);
        }
    }

    #[test]
    fn another_key_needs_no_more_buffers() {
        let starts = starts_of(&[5; 40]);
        let ids = |seed| {
            let lanes = Lanes::new(&starts, 4, 3, Some(Key::new(seed)));
            assert_eq!(lanes.most(2), 6);
            (0..200).map(|position| lanes.id(position)).collect::<Vec<_>>()
        };
        assert_ne!(ids(1), ids(2));
        assert_eq!(ids(1), ids(1));
    }

    #[test]
    fn the_largest_sizes_work_at_once() {
        let large = starts_of(&[1_000_000_000; 1000]);
        for lanes in [1, 8, 1000, 65_536] {
            let order = Lanes::new(&large, lanes, 3, Some(Key::new(1)));
            assert_eq!(order.len(), 1_000_000_000_000);
            assert_ne!(order.id(0), order.id(order.len() - 1));
            for position in [0, 7, 123_456_789_012, 999_999_999_999, 2_999_999_999_999] {
                let needs = order.needs(position, 3_000_000_000_000, position, 8);
                assert_eq!(needs.places(position).locate(position).2, order.id(position % order.len()));
            }
        }
        // The most lanes allowed: empty lanes and those of other ranks take no memory.
        let step = u64::from(u32::MAX);
        let order = Lanes::new(&large, step, 3, None);
        assert_eq!(
            order.id(order.len() - 1),
            order.len() - 1 - (step - 1 - (order.len() - 1) % step) * (order.len() / step)
        );
        assert_eq!(order.needs(0, order.len(), 5, step).0.begins.len(), 2);
        let order = Lanes::new(&starts_of(&[700, 300]), step, 3, None);
        assert_eq!(order.needs(0, 1000, 0, 1).piece(999).entries, [999]);
        assert_eq!(order.most(1), 1001);
    }

    #[test]
    fn positions_near_the_end_of_64_bits_do_not_overflow() {
        let end = u64::MAX;
        for (rows, lanes) in [(vec![1 << 62; 3], 5), (vec![3, 4], 3), (vec![u64::MAX], 5)] {
            let order = Lanes::new(&starts_of(&rows), lanes, 2, Some(Key::new(1)));
            let needs = order.needs(end - 20, end, end, 1);
            for position in end - 20..end {
                assert!(needs.piece(position).end > position);
                assert_eq!(needs.places(position).locate(position).2, order.id(position % order.len()));
            }
        }
    }

    #[test]
    fn no_samples_need_nothing() {
        for rows in [vec![], vec![0, 0]] {
            let order = Lanes::new(&starts_of(&rows), 4, 2, Some(Key::new(1)));
            assert_eq!((order.len(), order.most(2)), (0, 0));
            assert_eq!(all_entries(&order.needs(0, 100, 0, 2)), []);
            assert_eq!(all_entries(&order.needs(9, 3, 0, 2)), []);
        }
    }
}
