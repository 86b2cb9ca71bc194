//! Lanes and windows against brute force: the order, what each rank needs, and with how many
//! buffers.

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
    rows.iter()
        .for_each(|rows| starts.push(starts[starts.len() - 1] + rows));
    starts.into()
}

fn cases() -> impl Strategy<Value = Case> {
    let rows = prop::collection::vec(prop_oneof![Just(0_u64), 0_u64..12], 0..25);
    (rows, 1_u64..20, 1_usize..7, any::<Option<u64>>()).prop_map(|(rows, lanes, window, seed)| {
        Case {
            starts: starts_of(&rows),
            lanes,
            window,
            key: seed.map(Key::new),
        }
    })
}

fn runs() -> impl Strategy<Value = (Case, Run)> {
    (cases(), any::<[u64; 2]>(), 0_u64..50, 1_u64..25).prop_map(|(case, ends, class, step)| {
        let [a, b] = ends.map(|end| end % (3 * case.len() + 1));
        (
            case,
            Run {
                start: a.min(b),
                end: a.max(b),
                class,
                step,
            },
        )
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
            (0..n).map(move |k| {
                permutation
                    .as_ref()
                    .map_or(k, |permutation| permutation.get(k as u64) as usize)
            })
        };
        let all = permuted(chunks, self.key.map(|key| key.named("chunks")));
        let all = all.flat_map(|chunk| {
            (self.starts[chunk]..self.starts[chunk + 1]).map(move |id| (chunk, id))
        });
        let mut all = all.collect::<Vec<_>>().into_iter().peekable();
        let mut by_lane = Vec::new();
        let mut chunks_of = ChunksOf::new();
        for lane in 0..self.lanes {
            let len = (self.len() + self.lanes - 1 - lane) / self.lanes;
            let samples: Vec<_> = all.by_ref().take(len as usize).collect();
            let pieces: Vec<_> = samples.chunk_by(|a, b| a.0 == b.0).collect();
            let mut spots = Vec::new();
            for (number, group) in (0..).zip(pieces.chunks(self.window)) {
                chunks_of.insert(
                    (lane, number),
                    group.iter().map(|piece| piece[0].0).collect(),
                );
                let samples = group.concat();
                let key = self
                    .key
                    .map(|key| key.named("group").derive(lane).derive(number));
                spots.extend(permuted(samples.len(), key).map(|k| {
                    let (chunk, id) = samples[k];
                    Spot {
                        chunk,
                        row: id - self.starts[chunk],
                        id,
                        group: (lane, number),
                    }
                }));
            }
            by_lane.push(spots);
        }
        (
            (0..self.len())
                .map(|position| {
                    by_lane[(position % self.lanes) as usize][(position / self.lanes) as usize]
                })
                .collect(),
            chunks_of,
        )
    }

    /// The list that `needs` must give.
    fn naive_needs(&self, run: &Run) -> Vec<Need> {
        let (spots, chunks_of) = self.naive();
        let mut seen = BTreeSet::new();
        let mut needs = Vec::new();
        for position in run.start..run.end {
            let base = position - position % self.len();
            let group = spots[(position - base) as usize].group;
            let first =
                (i128::from(run.class) - i128::from(base)).rem_euclid(i128::from(run.step)) as u64;
            let visited = (0..self.lanes).any(|k| (first + k * run.step) % self.lanes == group.0);
            if visited && seen.insert((base, group)) {
                let spots = &spots[..(run.end - base).min(self.len()) as usize];
                let until =
                    base + spots.iter().rposition(|spot| spot.group == group).unwrap() as u64 + 1;
                needs.extend(chunks_of[&group].iter().map(|chunk| Need {
                    chunk: *chunk,
                    until,
                }));
            }
        }
        needs
    }
}

impl Run {
    fn visited(&self) -> impl Iterator<Item = u64> {
        let class = self.class % self.step;
        let step = self.step;
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
        let piece = needs.piece(position);
        let places = needs.places(position);
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
        let entries = all_entries(&needs);
        let most = case.lanes().most(run.step);
        let mut piece = LanePiece { end: run.start, entries: vec![usize::MAX] };
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
        let buffers = case.lanes().most(run.step);
        let mut open = Vec::new();
        let mut next = 0;
        let mut end = 0;
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
fn a_window_over_everything_is_a_global_shuffle() {
    let starts: Arc<[u64]> = vec![0, 1000, 1500, 4000].into();
    let lanes = Lanes::new(&starts, 1, usize::MAX, Some(Key::new(5)));
    let needs = lanes.needs(0, 4000, 0, 1);
    assert_eq!(
        needs.piece(0),
        LanePiece {
            end: 4000,
            entries: vec![0, 1, 2]
        }
    );
    // The first thousand come from all chunks, by their sizes.
    let places = needs.places(0);
    let mut from = [0; 3];
    (0..1000).for_each(|position| from[places.locate(position).0] += 1);
    for (k, from) in from.into_iter().enumerate() {
        let chunk = needs.entry(k).unwrap().chunk;
        let expected = (starts[chunk + 1] - starts[chunk]) as f64 / 4.0;
        assert!(
            (f64::from(from) - expected).abs() < 5.0 * expected.sqrt(),
            "{from} of {expected}"
        );
    }
}

#[test]
fn another_key_needs_no_more_buffers() {
    let starts = starts_of(&[5; 40]);
    let ids = |seed| {
        let lanes = Lanes::new(&starts, 4, 3, Some(Key::new(seed)));
        assert_eq!(lanes.most(2), 6);
        (0..200)
            .map(|position| lanes.id(position))
            .collect::<Vec<_>>()
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
            assert_eq!(
                needs.places(position).locate(position).2,
                order.id(position % order.len())
            );
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
            assert_eq!(
                needs.places(position).locate(position).2,
                order.id(position % order.len())
            );
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
