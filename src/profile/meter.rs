//! What every stage writes while it runs: counters, areas, states, histograms. No lock, no allocation, always on.
//!
//! ```text
//! Counter    how many, how much                          any thread adds
//! Area       how many at once, over time (queue length)  any thread enters and leaves; exact, whatever the interleaving
//! States<N>  what one thread was doing, and how long     one writer
//! Histogram  how long each took                          any thread records; about 3 % wide buckets
//! ```
//!
//! The time 0 means that nothing is measured: then nothing is written.
//!
//! All are relaxed: each is right by itself, and two read one after the other may be a moment apart.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A relaxed counter: exact in sum, not ordered with anything.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The integral over time of how many there are: entering takes the time off, leaving adds it, so what is left is the sum of
/// all stays, without anybody knowing when the others came.
#[derive(Debug, Default)]
pub(crate) struct Area {
    inside: AtomicU64,
    /// Sum of the times of leaving less those of entering, modulo 2^64.
    sum: AtomicU64,
}

impl Area {
    /// `count` more, at time `now`.
    pub(crate) fn enter(&self, count: u64, now: u64) {
        if now == 0 {
            return;
        }
        self.sum.fetch_sub(count.wrapping_mul(now), Ordering::Relaxed);
        self.inside.fetch_add(count, Ordering::Relaxed);
    }

    /// `count` fewer, at time `now`.
    pub(crate) fn leave(&self, count: u64, now: u64) {
        if now == 0 {
            return;
        }
        self.sum.fetch_add(count.wrapping_mul(now), Ordering::Relaxed);
        self.inside.fetch_sub(count, Ordering::Relaxed);
    }

    /// How many there are.
    pub(crate) fn inside(&self) -> u64 {
        self.inside.load(Ordering::Relaxed)
    }

    /// Nanoseconds that all have stayed, added up, until `now`. While others enter and leave it may be off by what they are
    /// just doing, never for good.
    pub(crate) fn total_ns(&self, now: u64) -> u64 {
        // Read the number first: one that leaves in between is then counted by neither, not twice.
        let inside = self.inside.load(Ordering::Relaxed);
        let total = self.sum.load(Ordering::Relaxed).wrapping_add(inside.wrapping_mul(now));
        // A moment's inconsistency may look negative.
        if total > u64::MAX / 2 { 0 } else { total }
    }
}

/// What one thread is doing, as one of `N` states, and for how long it did each. One writer.
#[derive(Debug)]
pub(crate) struct States<const N: usize> {
    ns: [AtomicU64; N],
    now: AtomicUsize,
    since: AtomicU64,
}

impl<const N: usize> States<N> {
    /// In state `first` from time 0 on.
    pub(crate) fn new(first: usize) -> Self {
        Self { ns: std::array::from_fn(|_| AtomicU64::new(0)), now: AtomicUsize::new(first), since: AtomicU64::new(0) }
    }

    /// From `now` on it does `state`. Only its own thread calls this.
    pub(crate) fn enter(&self, state: usize, now: u64) {
        if now == 0 {
            return;
        }
        let before = self.now.load(Ordering::Relaxed);
        let since = self.since.load(Ordering::Relaxed);
        self.ns[before].fetch_add(now.saturating_sub(since), Ordering::Relaxed);
        self.since.store(now, Ordering::Relaxed);
        self.now.store(state, Ordering::Relaxed);
    }

    /// Nanoseconds in each state until `now`.
    pub(crate) fn read(&self, now: u64) -> [u64; N] {
        settled(
            || (self.now.load(Ordering::Acquire), self.since.load(Ordering::Acquire)),
            |(state, since)| {
                let mut ns = self.ns.each_ref().map(|ns| ns.load(Ordering::Acquire));
                ns[state] += now.saturating_sub(since);
                ns
            },
        )
    }
}

/// Reads sums that belong to a state, again while the state changes meanwhile, a few times at most: what is off then is what
/// the others were just doing.
fn settled<S: PartialEq + Copy, T>(state: impl Fn() -> S, read: impl Fn(S) -> T) -> T {
    let mut before = state();
    for _ in 0..8 {
        let found = read(before);
        let after = state();
        if after == before {
            return found;
        }
        before = after;
    }
    read(before)
}

/// What a pool of workers was doing, summed over them: worked; or had nothing to do, while there was something to be filled
/// (they starved) or not (they are ahead). One word changes at a time, so every nanosecond counts once.
#[derive(Debug)]
pub(crate) struct Pool {
    workers: u64,
    /// Since when (53 bits), whether something is being filled (1 bit), how many work (10 bits).
    word: AtomicU64,
    busy: Counter,
    starved: Counter,
    ahead: Counter,
}

const WORKING_BITS: u32 = 10;
const TIME_MASK: u64 = u64::MAX >> (WORKING_BITS + 1);

impl Pool {
    pub(crate) fn new(workers: usize) -> Self {
        let (busy, starved, ahead) = Default::default();
        Self { workers: workers as u64, word: AtomicU64::new(0), busy, starved, ahead }
    }

    /// One worker more works (`by` 1) or one fewer (-1), or only `filling` has changed (0).
    pub(crate) fn change(&self, by: i64, filling: bool, now: u64) {
        if now == 0 {
            return;
        }
        let mut old = self.word.load(Ordering::Relaxed);
        loop {
            let working = (old & ((1 << WORKING_BITS) - 1)).saturating_add_signed(by).min((1 << WORKING_BITS) - 1);
            // Threads read the clock before they change the word, and may come late: time does not go back.
            let (since, at) = (old >> (WORKING_BITS + 1), now & TIME_MASK);
            let at = if at.wrapping_sub(since) & TIME_MASK > TIME_MASK / 2 { since } else { at };
            let new = at << (WORKING_BITS + 1) | u64::from(filling) << WORKING_BITS | working;
            match self.word.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(changed) => old = changed,
            }
        }
        let (busy, starved, ahead) = self.stretch(old, now);
        self.busy.add(busy);
        self.starved.add(starved);
        self.ahead.add(ahead);
    }

    /// What became of the time since the word was written.
    fn stretch(&self, word: u64, now: u64) -> (u64, u64, u64) {
        let since = word >> (WORKING_BITS + 1);
        // Threads read the clock before they change the word: one may be a moment behind.
        let len = (now & TIME_MASK).wrapping_sub(since) & TIME_MASK;
        let len = if len > TIME_MASK / 2 { 0 } else { len };
        let working = word & ((1 << WORKING_BITS) - 1);
        let idle = self.workers.saturating_sub(working) * len;
        let filling = word >> WORKING_BITS & 1 == 1;
        (working * len, if filling { idle } else { 0 }, if filling { 0 } else { idle })
    }

    /// How many work.
    pub(crate) fn working(&self) -> u64 {
        self.word.load(Ordering::Relaxed) & ((1 << WORKING_BITS) - 1)
    }

    /// Nanoseconds busy, starved and ahead until `now`.
    pub(crate) fn read(&self, now: u64) -> (u64, u64, u64) {
        settled(
            || self.word.load(Ordering::Acquire),
            |word| {
                let (busy, starved, ahead) = self.stretch(word, now);
                (self.busy.get() + busy, self.starved.get() + starved, self.ahead.get() + ahead)
            },
        )
    }
}

/// Sub-buckets of each power of two: buckets are 1/32 wide, about 3 %.
const SUB_BITS: u32 = 5;
const SUB: usize = 1 << SUB_BITS;
/// From 1 ns to about 18 minutes; what is longer counts as that.
const POWERS: usize = 41 - SUB_BITS as usize;
const BUCKETS: usize = SUB * (POWERS + 1);

/// How long things took, in buckets of about 3 %.
pub(crate) struct Histogram {
    buckets: Box<[AtomicU64; BUCKETS]>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: Box::new(std::array::from_fn(|_| AtomicU64::new(0))) }
    }
}

impl Histogram {
    pub(crate) fn record(&self, ns: u64) {
        self.buckets[bucket(ns)].fetch_add(1, Ordering::Relaxed);
    }

    /// What was recorded so far.
    pub(crate) fn read(&self) -> Latency {
        let counts: Vec<u64> = self.buckets.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let all: u64 = counts.iter().sum();
        let sum = counts.iter().enumerate().map(|(at, count)| *count as f64 * middle(at)).sum::<f64>();
        let quantile = |share: f64| {
            let wanted = ((all as f64 * share).ceil() as u64).max(1);
            let mut seen = 0;
            let found = counts.iter().position(|count| {
                seen += count;
                seen >= wanted
            });
            found.map_or(0.0, middle)
        };
        let last = counts.iter().rposition(|count| *count > 0);
        Latency {
            count: all,
            mean_ns: if all > 0 { sum / all as f64 } else { 0.0 },
            p50_ns: if all > 0 { quantile(0.5) } else { 0.0 },
            p90_ns: if all > 0 { quantile(0.9) } else { 0.0 },
            p99_ns: if all > 0 { quantile(0.99) } else { 0.0 },
            max_ns: last.map_or(0.0, middle),
            buckets: counts
                .iter()
                .enumerate()
                .filter(|(_, count)| **count > 0)
                .map(|(at, c)| (middle(at), *c))
                .collect(),
        }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let read = self.read();
        write!(f, "{} recorded, median {:.0} ns", read.count, read.p50_ns)
    }
}

/// The bucket of a value: the first are one wide, then each power of two has [`SUB`].
fn bucket(ns: u64) -> usize {
    if ns < SUB as u64 {
        return ns as usize;
    }
    let power = 63 - ns.leading_zeros();
    let sub = (ns >> (power - SUB_BITS)) as usize & (SUB - 1);
    ((power - SUB_BITS + 1) as usize * SUB + sub).min(BUCKETS - 1)
}

/// The middle of a bucket.
fn middle(at: usize) -> f64 {
    if at < SUB {
        return at as f64;
    }
    let (power, sub) = (at / SUB - 1, at % SUB);
    let width = (1_u64 << power) as f64;
    (SUB + sub) as f64 * width + (width - 1.0) / 2.0
}

/// What a histogram holds. Values are the middles of buckets, at most 2 % off.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Latency {
    /// How many were recorded.
    pub count: u64,
    /// Mean, in nanoseconds.
    pub mean_ns: f64,
    /// Half of them took at most this.
    pub p50_ns: f64,
    /// 90 of 100 took at most this.
    pub p90_ns: f64,
    /// 99 of 100 took at most this.
    pub p99_ns: f64,
    /// The longest.
    pub max_ns: f64,
    /// (nanoseconds, how many), ascending; empty buckets left out.
    pub buckets: Vec<(f64, u64)>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_area_is_the_sum_of_all_stays_in_whatever_order_they_are_noted(
            stays in prop::collection::vec((1_u64..1 << 40, 0_u64..1 << 30), 0..50), seed in any::<u64>()
        ) {
            let area = Area::default();
            let mut notes: Vec<(u64, bool)> = Vec::new();
            for (start, len) in &stays {
                notes.push((*start, true));
                notes.push((start + len, false));
            }
            // In any order that has as many inside as there can be: all entries first is one, and the harshest.
            let mut state = seed | 1;
            notes.sort_by_cached_key(|(_, enters)| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                (!*enters, state)
            });
            for (at, enters) in notes {
                if enters { area.enter(1, at) } else { area.leave(1, at) }
            }
            prop_assert_eq!(area.total_ns(u64::MAX / 4), stays.iter().map(|(_, len)| len).sum::<u64>());
            prop_assert_eq!(area.inside(), 0);
        }

        #[test]
        fn a_bucket_s_middle_is_within_two_percent_of_what_it_holds(ns in 0_u64..1 << 40) {
            let middle = middle(bucket(ns));
            prop_assert!((middle - ns as f64).abs() <= 0.02 * ns as f64, "{} for {}", middle, ns);
        }
    }

    #[test]
    fn every_nanosecond_of_every_worker_is_busy_starved_or_ahead() {
        let pool = Pool::new(3);
        pool.change(0, true, 100); // 3 × 100 ahead
        pool.change(1, true, 150); // 3 × 50 starved
        pool.change(1, true, 170); // 20 busy, 2 × 20 starved
        pool.change(0, false, 180); // 2 × 10 busy, 10 starved
        pool.change(-1, false, 200); // 2 × 20 busy, 20 ahead
        assert_eq!(pool.read(210), (20 + 20 + 40 + 10, 150 + 40 + 10, 300 + 20 + 20));
        assert_eq!(pool.working(), 1);
        let (busy, starved, ahead) = pool.read(1_000);
        assert_eq!(busy + starved + ahead, 3 * 1_000);
    }

    #[test]
    fn those_inside_count_until_now() {
        let area = Area::default();
        area.enter(3, 100);
        assert_eq!(area.total_ns(110), 30);
        area.leave(1, 110);
        assert_eq!((area.total_ns(120), area.inside()), (50, 2));
    }

    #[test]
    fn the_times_of_all_states_add_up_to_now() {
        let states = States::<3>::new(1);
        states.enter(0, 10);
        states.enter(2, 25);
        states.enter(1, 25);
        assert_eq!(states.read(40), [15, 25, 0]);
    }

    #[test]
    fn quantiles_are_those_of_what_was_recorded() {
        let histogram = Histogram::default();
        (1..=1000).for_each(|us| histogram.record(us * 1000));
        let read = histogram.read();
        assert_eq!(read.count, 1000);
        for (got, expected) in [(read.p50_ns, 500e3), (read.p90_ns, 900e3), (read.p99_ns, 990e3), (read.max_ns, 1e6)] {
            assert!((got - expected).abs() < 0.03 * expected, "{got} for {expected}");
        }
        assert!((read.mean_ns - 500.5e3).abs() < 0.02 * 500e3);
        assert_eq!(Histogram::default().read(), Latency::default());
    }

    #[test]
    fn what_is_longer_than_the_last_bucket_counts_as_that() {
        let histogram = Histogram::default();
        histogram.record(u64::MAX);
        assert!(histogram.read().max_ns > 1e12);
    }
}
