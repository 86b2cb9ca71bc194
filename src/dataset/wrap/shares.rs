//! The sequence of a mix whose counts repeat only after 2^32 places. Any part of it is made without
//! the parts before it.
//!
//! ```text
//! 0 ─────────────────────────── 2^32    counts before each end: 0, and those of the whole
//! 0 ────────── half ─────────── 2^32    counts before the half: each its share, rounded up or down
//!              …                        and so on, down to a block
//!              ├ block ┤                earliest deadline first, then moved at random
//! ```
//!
//! A source's count before any place must be its share, rounded up or down. The choice affects both
//! sides of the place: a source that is rounded up must find room on the left, and one that is
//! rounded down must find room on the right. All of them find room if, sorted by either end of
//! their windows, the first *n* sources together are rounded with an error below 1, for any *n*.
//! Such a rounding exists for any two orders (Knuth, Two-way rounding, 1995), and [`round`] finds
//! it bit by bit.
//!
//! Limits: sources with at least one place in each block have an error below 1 everywhere. For
//! lighter sources, earlier choices constrain the counts at the ends of a part, so shares are an
//! estimate: an error may rarely exceed 1; none of 2 or more was observed.

use feedline_core::order::{Draws, Key};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::Arc;

/// Number of places after which the counts repeat.
pub(super) const PERIOD: u64 = 1 << 32;
/// Number of places in a block, if there are few sources.
const BLOCK: u64 = 1 << 14;
/// Minimum number of places in a block for each source.
const BLOCK_OF_SOURCE: u64 = 4;
/// A source with fewer places in a part is light.
const LIGHT: u64 = 16;
/// Number of random moves per place.
const TURNS: usize = 2;
/// Maximum steps that a source is moved, if it cannot swap places directly.
const STEPS: u32 = 32;

/// How often each source occurs in a period.
pub(super) struct Shares {
    counts: Vec<u32>,
    /// The sources that occur at all, the heaviest first.
    used: Vec<u32>,
    block: u64,
    key: Key,
}

/// A part of the sequence.
pub(super) struct Block {
    pub(super) from: u64,
    /// How often each source occurs before the block.
    pub(super) first: Vec<u32>,
    /// The source at each place, and how often it occurs before that place.
    pub(super) places: Vec<(u32, u32)>,
}

impl Block {
    pub(super) fn has(&self, place: u64) -> bool {
        place
            .checked_sub(self.from)
            .is_some_and(|at| at < self.places.len() as u64)
    }
}

/// The bisections that lead to a block: the range of each halved part, and the counts before its
/// middle. Neighbouring blocks share most of them.
pub(super) type Path = Vec<(Range<u64>, Arc<[u32]>)>;

/// A source whose count before the middle of a part may be rounded up or down.
struct Free {
    source: usize,
    /// The fraction of its next place that is in the left half, in units of 2^-32.
    left: u64,
    window: Range<u64>,
}

impl Shares {
    /// `counts` add up to the period.
    pub(super) fn new(counts: &[u64], key: Key) -> Self {
        let mut used: Vec<u32> = (0..counts.len() as u32)
            .filter(|source| counts[*source as usize] > 0)
            .collect();
        used.sort_by_key(|source| Reverse(counts[*source as usize]));
        let block = (BLOCK_OF_SOURCE * used.len() as u64)
            .next_power_of_two()
            .clamp(BLOCK, PERIOD);
        Self {
            counts: counts.iter().map(|count| *count as u32).collect(),
            used,
            block,
            key,
        }
    }

    /// The block that contains a place. `variant` chooses among equally even blocks.
    pub(super) fn block(&self, place: u64, variant: u64, path: &mut Path) -> Block {
        let mut part = 0..PERIOD;
        let mut depth = 0;
        let mut first: Arc<[u32]> = vec![0; self.counts.len()].into();
        let mut last: Arc<[u32]> = self.counts.clone().into();
        while part.end - part.start > self.block {
            if path.get(depth).is_none_or(|(known, _)| *known != part) {
                path.truncate(depth);
                path.push((part.clone(), self.halve(&part, &first, &last).into()));
            }
            let counts = path[depth].1.clone();
            let half = part.start.midpoint(part.end);
            if place < half {
                part.end = half;
                last = counts;
            } else {
                part.start = half;
                first = counts;
            }
            depth += 1;
        }
        let mut draws = Draws::from_key(self.key.derive(part.start).derive(variant));
        let places = self.spread(&part, &first, &last, &mut draws);
        Block {
            from: part.start,
            first: first.to_vec(),
            places,
        }
    }

    /// The places where a source may occur after `earlier` occurrences, so that its count is its
    /// share, rounded up or down.
    fn window(&self, source: usize, earlier: u32) -> Range<u64> {
        let count = u64::from(self.counts[source]);
        let earlier = u64::from(earlier);
        earlier * PERIOD / count
            ..((u128::from(earlier) + 1) * u128::from(PERIOD)).div_ceil(count.into()) as u64
    }

    /// The counts before the middle of a part, from the counts before its ends.
    fn halve(&self, part: &Range<u64>, first: &[u32], last: &[u32]) -> Vec<u32> {
        let half = part.start.midpoint(part.end);
        let mut counts = first.to_vec();
        let mut free = Vec::new();
        for source in self.used.iter().map(|source| *source as usize) {
            let share = half * u64::from(self.counts[source]);
            let low = ((share >> 32) as u32).clamp(first[source], last[source]);
            counts[source] = low;
            if low < last[source] && share > u64::from(low) << 32 {
                free.push(self.free(source, low, part, half));
            }
        }
        let placed: u64 = self
            .used
            .iter()
            .map(|source| *source as usize)
            .map(|at| u64::from(counts[at] - first[at]))
            .sum();
        let open = (half - part.start) as i64 - placed as i64;
        let light = free.partition_point(|free| {
            u64::from(self.counts[free.source]) >= LIGHT * (PERIOD / (part.end - part.start))
        });
        for (source, up) in rounded(
            &free,
            open.clamp(0, free.len() as i64) as u64,
            light,
            self.key.derive(half),
        ) {
            counts[source] += u32::from(up);
        }
        // Needed only if light sources were constrained too tightly.
        let mut off = open - open.clamp(0, free.len() as i64);
        for source in self.used.iter().map(|source| *source as usize).cycle() {
            match off.signum() {
                1 if counts[source] < last[source] => {
                    (counts[source], off) = (counts[source] + 1, off - 1)
                }
                -1 if counts[source] > first[source] => {
                    (counts[source], off) = (counts[source] - 1, off + 1)
                }
                0 => break,
                _ => {}
            }
        }
        counts
    }

    fn free(&self, source: usize, earlier: u32, part: &Range<u64>, half: u64) -> Free {
        let count = u128::from(self.counts[source]);
        let begin = u128::from(earlier) << 32;
        // In units of 2^-32 of this source's next place; the part may contain only a piece of that
        // place.
        let start = (u128::from(part.start) * count).max(begin);
        let end = (u128::from(part.end) * count)
            .min(begin + u128::from(PERIOD))
            .max(start + 1);
        let middle = (u128::from(half) * count).clamp(start, end);
        let left = ((middle - start) * u128::from(PERIOD) / (end - start)) as u64;
        let Range { start, end } = self.window(source, earlier);
        Free {
            source,
            left,
            window: start.max(part.start)..end.min(part.end),
        }
    }

    /// The source at each place of a part, and how often it occurs before that place. Places are
    /// assigned by earliest deadline first, then moved at random.
    fn spread(
        &self,
        part: &Range<u64>,
        first: &[u32],
        last: &[u32],
        draws: &mut Draws,
    ) -> Vec<(u32, u32)> {
        let at = |place: u64| (place.clamp(part.start, part.end) - part.start) as u32;
        let mut jobs = Vec::with_capacity((part.end - part.start) as usize);
        for source in &self.used {
            let index = *source as usize;
            jobs.extend((first[index]..last[index]).map(|earlier| {
                let Range { start, end } = self.window(index, earlier);
                (at(start), at(end), *source, earlier)
            }));
        }
        jobs.sort_unstable();
        let mut waiting = BinaryHeap::new();
        let mut next = 0;
        let mut places: Vec<(Range<u32>, u32, u32)> = Vec::with_capacity(jobs.len());
        for place in 0..jobs.len() as u32 {
            while next < jobs.len() && (jobs[next].0 <= place || waiting.is_empty()) {
                let (start, end, source, earlier) = jobs[next];
                waiting.push(Reverse((end, source, earlier, start)));
                next += 1;
            }
            let Some(Reverse((end, source, earlier, start))) = waiting.pop() else {
                break;
            };
            places.push((start..end, source, earlier));
        }
        moved(&mut places, draws);
        places
            .into_iter()
            .map(|(_, source, earlier)| (source, earlier))
            .collect()
    }
}

/// Picks random entries, [`TURNS`] per place, and moves each toward a random place in its window:
/// by swapping with the entry there if that one fits here, otherwise step by step, at most
/// [`STEPS`], while each entry passed fits one place over.
fn moved(places: &mut [(Range<u32>, u32, u32)], draws: &mut Draws) {
    let fits = |entry: &(Range<u32>, u32, u32), other: &(Range<u32>, u32, u32), to: usize| {
        entry.1 != other.1 && entry.0.contains(&(to as u32))
    };
    for _ in 0..TURNS * places.len() {
        let turn = draws.below(places.len() as u64) as usize;
        let window = places[turn].0.clone();
        if !window.contains(&(turn as u32)) {
            continue;
        }
        let to = window.start as usize + draws.below((window.end - window.start).into()) as usize;
        if fits(&places[to], &places[turn], turn) {
            places.swap(turn, to);
            continue;
        }
        let mut at = turn;
        for _ in 0..STEPS {
            let next = if at < to {
                at + 1
            } else {
                at.saturating_sub(1)
            };
            if at == to || !fits(&places[next], &places[at], at) {
                break;
            }
            places.swap(at, next);
            at = next;
        }
    }
}

/// Rounds `ups` of the sources up and the others down. The sources from index `light` on are light.
fn rounded(free: &[Free], ups: u64, light: usize, key: Key) -> impl Iterator<Item = (usize, bool)> {
    let mut shares: Vec<u64> = free.iter().map(|free| free.left).collect();
    for start in [light, 0] {
        let (kept, changed) = shares.split_at_mut(start);
        let rest = (ups * PERIOD).saturating_sub(kept.iter().sum());
        let most = changed.len() as u64 * PERIOD;
        level(changed, rest.min(most));
    }
    let sorted = |end: fn(&Free) -> u64| {
        let mut order: Vec<u32> = (0..free.len() as u32).collect();
        order.sort_by_cached_key(|index| (end(&free[*index as usize]), *index));
        order
    };
    round(
        &mut shares,
        [
            sorted(|free| free.window.start),
            sorted(|free| free.window.end),
        ],
        key,
    );
    free.iter()
        .map(|free| free.source)
        .zip(shares)
        .map(|(source, share)| (source, share == PERIOD))
}

/// Adjusts the shares so that they add up to `sum`. Each stays between 0 and the period. They
/// already add up to `sum`, except for sources that the ends of a part constrain.
fn level(shares: &mut [u64], sum: u64) {
    let has: u64 = shares.iter().sum();
    let raised = has < sum;
    // How much each share can rise or fall.
    let room = |share: u64| if raised { PERIOD - share } else { share };
    let all: u64 = shares.iter().map(|share| room(*share)).sum();
    let whole = has.abs_diff(sum);
    let mut left = has.abs_diff(sum);
    let mut change = |share: &mut u64, by: u64| {
        let by = by.min(left).min(room(*share));
        left -= by;
        *share = if raised { *share + by } else { *share - by };
    };
    for share in &mut *shares {
        let by = u128::from(room(*share)) * u128::from(whole) / u128::from(all.max(1));
        change(share, by as u64);
    }
    // Distributes the remainders of the divisions.
    shares.iter_mut().for_each(|share| change(share, PERIOD));
}

/// Rounds each share to 0 or a period. In either order, the first *n* shares keep their sum with an
/// error below a period. The sum of all shares must be a multiple of the period.
///
/// From the lowest bit on, the shares with the bit set are rounded to clear it, half of them up and
/// half down. In either order, consecutive shares of this kind form pairs that are rounded in
/// opposite directions. Every share has one partner in each order, so the pairs form cycles of even
/// length, for which this is possible.
fn round(shares: &mut [u64], orders: [Vec<u32>; 2], key: Key) {
    let mut draws = Draws::from_key(key);
    let mut mates = [vec![0_u32; shares.len()], vec![0_u32; shares.len()]];
    for bit in 0..PERIOD.trailing_zeros() {
        let unit = 1 << bit;
        for (order, mates) in orders.iter().zip(&mut mates) {
            let mut odd = order
                .iter()
                .filter(|index| shares[**index as usize] & unit != 0);
            while let (Some(one), Some(other)) = (odd.next(), odd.next()) {
                (mates[*one as usize], mates[*other as usize]) = (*other, *one);
            }
        }
        for index in 0..shares.len() {
            let mut at = index;
            let mut up = None;
            while shares[at] & unit != 0 {
                let mate = mates[0][at] as usize;
                let up = *up.get_or_insert_with(|| draws.bool(0.5));
                let (raised, lowered) = if up { (at, mate) } else { (mate, at) };
                shares[raised] += unit;
                shares[lowered] -= unit;
                at = mates[1][mate] as usize;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks some parts of the sequence, each by itself: the error at every place, and that the
    /// counts have no gap.
    fn checked(counts: &[u64], parts: impl Iterator<Item = u64>, most: u64) -> u64 {
        let shares = Shares::new(counts, Key::new(5));
        let mut before = None;
        let mut draws = 0;
        for place in parts {
            let Block {
                from,
                first,
                places,
            } = shares.block(place, 0, &mut Path::new());
            let mut done = first.clone();
            if let Some((_, before)) = before.filter(|(end, _)| *end == from) {
                assert_eq!(first, before, "the counts where two parts meet, {counts:?}");
            }
            for (place, (source, earlier)) in (from..).zip(&places) {
                let index = *source as usize;
                let count = i128::from(counts[*source as usize]);
                assert_eq!(*earlier, done[index], "source {source} at {place}");
                done[index] += 1;
                // The error of a source is greatest just before or just after it is drawn.
                let off = |drawn: u32, place: u64| {
                    (i128::from(drawn) * i128::from(PERIOD) - i128::from(place) * count).abs()
                };
                let worst = off(*earlier, place).max(off(earlier + 1, place + 1));
                assert!(
                    worst < i128::from(most) * i128::from(PERIOD),
                    "source {source} at {place}: {worst}, {counts:?}"
                );
            }
            draws += places.len() as u64;
            before = Some((from + places.len() as u64, done));
        }
        draws
    }

    /// Counts in these ratios.
    fn of(weights: impl Iterator<Item = f64>) -> Vec<u64> {
        let weights: Vec<f64> = weights.collect();
        let sum: f64 = weights.iter().sum();
        let mut counts: Vec<u64> = weights
            .iter()
            .map(|weight| (weight / sum * PERIOD as f64) as u64)
            .collect();
        counts[0] += PERIOD - counts.iter().sum::<u64>();
        counts
    }

    #[test]
    fn every_source_is_within_one_sample_of_its_share_at_every_place() {
        // `FEEDLINE_SWEEP` walks 10^7 places, also with 100,000 sources.
        let (all, places) = match std::env::var_os("FEEDLINE_SWEEP").is_some() {
            true => (&[2, 3, 10, 1000, 100_000][..], 10_000_000),
            false => (&[2, 3, 10, 1000][..], 100_000),
        };
        for sources in all {
            let counts = of((1..=*sources).map(|source| 1.0 / f64::from(source)));
            let block = Shares::new(&counts, Key::new(0)).block;
            assert!(checked(&counts, (0..places).step_by(block as usize), 1) >= places);
        }
    }

    #[test]
    fn parts_anywhere_meet_with_an_error_below_one() {
        let mut draws = Draws::from_key(Key::new(8));
        for case in 0..40 {
            let sources = 2 + draws.below(30);
            // Either sources that all occur in every part, or one source that takes nearly all.
            let counts = of((0..sources).map(|source| match (case % 2, source) {
                (0, _) => draws.range_f64(0.0, 5.0).exp(),
                (_, 0) => 20.0 * sources as f64,
                _ => draws.range_f64(1.0, 2.0),
            }));
            let place = draws.below(PERIOD - BLOCK);
            checked(&counts, [place, place + BLOCK].into_iter(), 1);
        }
        // Light sources are never off by two either.
        for _ in 0..20 {
            let counts = of((0..8).map(|_| draws.range_f64(0.0, 18.0).exp()));
            let place = draws.below(PERIOD - BLOCK);
            checked(&counts, [place, place + BLOCK].into_iter(), 2);
        }
    }

    #[test]
    fn a_rounding_keeps_the_sums_of_both_orders() {
        let mut draws = Draws::from_key(Key::new(9));
        for case in 0..200 {
            let mut shares: Vec<u64> = (0..1 + case % 40)
                .map(|_| draws.below(PERIOD + 1))
                .collect();
            let ups = draws.below(shares.len() as u64 + 1);
            level(&mut shares, ups * PERIOD);
            assert_eq!(shares.iter().sum::<u64>(), ups * PERIOD);
            let orders: [Vec<u32>; 2] = std::array::from_fn(|_| {
                let mut order: Vec<u32> = (0..shares.len() as u32).collect();
                draws.shuffle(&mut order);
                order
            });
            let exact = shares.clone();
            round(&mut shares, orders.clone(), Key::new(case));
            for order in orders {
                let mut off = 0_i64;
                for index in order.iter().map(|index| *index as usize) {
                    assert!([0, PERIOD].contains(&shares[index]));
                    off += shares[index] as i64 - exact[index] as i64;
                    assert!(off.unsigned_abs() < PERIOD, "{exact:?} became {shares:?}");
                }
            }
        }
    }

    #[test]
    fn a_rare_source_comes_to_every_row_of_a_batch() {
        let counts = of([0.9, 0.1].into_iter());
        let Block { places, .. } = Shares::new(&counts, Key::new(1)).block(0, 0, &mut Path::new());
        let mut rows = [0; 10];
        places
            .iter()
            .enumerate()
            .filter(|(_, (source, _))| *source == 1)
            .for_each(|(place, _)| rows[place % 10] += 1);
        // 164 each on average.
        assert!(
            rows.iter().all(|times| (40..400).contains(times)),
            "{rows:?}"
        );
    }
}
