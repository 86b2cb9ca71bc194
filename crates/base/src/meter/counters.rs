//! The meters that stages write while they run: counters, areas, flows, states, histograms. No
//! lock, no allocation.
//!
//! ```text
//! Counter       how many, how much                          any thread adds
//! Area          how many at once, over time (queue length)  any thread enters and leaves; exact, whatever the interleaving
//! Flow          how many at once, and how long any          one writer
//! States<E, N>  time of one thread in each of N states      one writer
//! Histogram     how long each took                          any thread records; about 3 % wide buckets
//! ```
//!
//! A time of 0 means that nothing is measured, so nothing is written. Counters and histograms have
//! no time argument: a caller without a clock skips them, see `Meters::on`.
//!
//! All except counters and histograms have cache lines of their own (two, because processors fetch
//! lines in pairs). A counter that changes with each task or row is a [`Lone`].
//!
//! Each value is right by itself; two values that are read in turn may be a moment apart.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// A relaxed counter: its sum is exact, its order with other values is not defined.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    /// Like [`add`](Self::add), for a counter with one writer at a time; many times faster.
    pub fn add_alone(&self, by: u64) {
        put(&self.0, self.get() + by);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A value on cache lines of its own, so that writing it does not slow down threads that use
/// neighbouring values.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Lone<T>(T);

impl<T> std::ops::Deref for Lone<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// Writes a number that has one writer.
fn put(number: &AtomicU64, value: u64) {
    number.store(value, Ordering::Relaxed);
}

/// The integral of a count over time. Entering subtracts the time and leaving adds it, so the sum
/// is the total length of all stays. No thread needs the times of other threads.
///
/// A change takes more than one write, and between the writes the sum is off by the time since the
/// clock was made. `word` counts the changes in progress.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Area {
    /// Finished changes (24 bits), changes in progress (8 bits), the count (32 bits).
    word: AtomicU64,
    /// Sum of the leaving times minus the entering times, modulo 2^64.
    sum: AtomicU64,
}

/// Units of [`Area::word`]: one change in progress, and one finished change.
const CHANGING: u64 = 1 << 32;
const CHANGED: u64 = 1 << 40;
/// Attempts of a reader to find a moment without a change. After that it takes the numbers as they
/// are.
const LOOKS: usize = 10_000;

impl Area {
    /// Notes that `count` more entered at time `now`.
    pub fn enter(&self, count: u64, now: u64) {
        if now == 0 {
            return;
        }
        self.word.fetch_add(CHANGING, Ordering::SeqCst);
        self.sum
            .fetch_sub(count.wrapping_mul(now), Ordering::SeqCst);
        self.word
            .fetch_add((CHANGED - CHANGING).wrapping_add(count), Ordering::SeqCst);
    }

    /// Notes that `count` left at time `now`.
    pub fn leave(&self, count: u64, now: u64) {
        if now == 0 {
            return;
        }
        self.word.fetch_add(CHANGING, Ordering::SeqCst);
        self.sum
            .fetch_add(count.wrapping_mul(now), Ordering::SeqCst);
        self.word
            .fetch_add((CHANGED - CHANGING).wrapping_sub(count), Ordering::SeqCst);
    }

    /// The number currently inside.
    pub fn inside(&self) -> u64 {
        self.word.load(Ordering::SeqCst) & u64::from(u32::MAX)
    }

    /// The sum of all stays until `now`, in nanoseconds.
    pub fn total_ns(&self, now: u64) -> u64 {
        let (word, sum) = settled(
            || self.word.load(Ordering::Acquire),
            |word| (word, self.sum.load(Ordering::Acquire)),
            |(word, _)| (word / CHANGING).is_multiple_of(CHANGED / CHANGING),
        );
        let inside = word & u64::from(u32::MAX);
        let total = sum.wrapping_add(inside.wrapping_mul(now));
        // A thread that entered just now may have read the clock after the reader.
        if total > u64::MAX / 2 { 0 } else { total }
    }
}

/// Sums over the stretches of one thread's time, where each stretch has a state. One writer.
#[derive(Debug)]
#[repr(align(128))]
struct Stretches<const N: usize> {
    /// State of the current stretch.
    state: AtomicU64,
    /// Start of the current stretch; [`BETWEEN`] during a change.
    since: AtomicU64,
    sums: [AtomicU64; N],
}

/// In `since`: a change is in progress.
const BETWEEN: u64 = u64::MAX;

/// In state 0 from time 0 on.
impl<const N: usize> Default for Stretches<N> {
    fn default() -> Self {
        Self {
            state: AtomicU64::new(0),
            since: AtomicU64::new(0),
            sums: [const { AtomicU64::new(0) }; N],
        }
    }
}

impl<const N: usize> Stretches<N> {
    /// Changes the state at time `now`. `adds(state, ns)` gives the amounts that a stretch of `ns`
    /// nanoseconds in a state adds to the sums.
    fn change(&self, state: u64, now: u64, adds: impl Fn(u64, u64) -> [u64; N]) {
        if now == 0 {
            return;
        }
        let before = self.state.load(Ordering::Relaxed);
        let since = self.since.load(Ordering::Relaxed);
        put(&self.since, BETWEEN);
        // A reader that sees the new sums then also sees the mark.
        fence(Ordering::Release);
        for (sum, more) in self
            .sums
            .iter()
            .zip(adds(before, now.saturating_sub(since)))
        {
            put(sum, sum.load(Ordering::Relaxed) + more);
        }
        put(&self.state, state);
        self.since.store(now, Ordering::Release);
    }

    /// The sums until `now`.
    fn read(&self, now: u64, adds: impl Fn(u64, u64) -> [u64; N]) -> [u64; N] {
        let state = || {
            (
                self.state.load(Ordering::Acquire),
                self.since.load(Ordering::Acquire),
            )
        };
        settled(
            state,
            |(state, since)| {
                let present = adds(state, now.saturating_sub(since));
                (
                    since,
                    std::array::from_fn(|at| self.sums[at].load(Ordering::Acquire) + present[at]),
                )
            },
            |(since, _)| *since != BETWEEN,
        )
        .1
    }
}

/// Operations in flight over time, of a thread that both starts them and sees them end.
#[derive(Debug, Default)]
pub struct Flow(Stretches<2>);

impl Flow {
    /// Sets the number in flight to `inside` at time `now`. Only the flow's own thread calls this.
    pub fn change(&self, inside: u64, now: u64) {
        self.0.change(inside, now, Self::adds);
    }

    /// The nanoseconds until `now`: the sum over all operations, and the time with at least one
    /// operation.
    pub fn read(&self, now: u64) -> [u64; 2] {
        self.0.read(now, Self::adds)
    }

    fn adds(inside: u64, ns: u64) -> [u64; 2] {
        [inside.saturating_mul(ns), if inside > 0 { ns } else { 0 }]
    }
}

/// A state of a thread, as a number. The initial state is 0.
pub trait Numbered {
    fn number(self) -> usize;
}

impl Numbered for bool {
    fn number(self) -> usize {
        self.into()
    }
}

/// The state of one thread, one of `N` states, and its time in each. One writer.
#[derive(Debug, Default)]
pub struct States<E, const N: usize>(Stretches<N>, PhantomData<E>);

impl<E: Numbered, const N: usize> States<E, N> {
    /// Sets the thread's state at time `now`. Only that thread calls this.
    pub fn enter(&self, state: E, now: u64) {
        self.0.change(state.number() as u64, now, Self::adds);
    }

    /// Nanoseconds in these states until `now`.
    pub fn read<const K: usize>(&self, states: [E; K], now: u64) -> [u64; K] {
        let ns = self.0.read(now, Self::adds);
        states.map(|state| ns[state.number()])
    }

    fn adds(state: u64, ns: u64) -> [u64; N] {
        std::array::from_fn(|at| if at as u64 == state { ns } else { 0 })
    }
}

/// Reads sums that belong to a state. Reads again while the state changes or the result is not
/// `whole`: a writer is in the middle of a change, and may have been preempted. All attempts take
/// about 10 ms; after them the result lacks that one change.
fn settled<S: PartialEq + Copy, T>(
    state: impl Fn() -> S,
    read: impl Fn(S) -> T,
    whole: impl Fn(&T) -> bool,
) -> T {
    let mut before = state();
    for look in 0..LOOKS {
        let found = read(before);
        fence(Ordering::Acquire);
        let after = state();
        if after == before && whole(&found) {
            return found;
        }
        before = after;
        if look % 100 == 99 {
            std::thread::sleep(Duration::from_micros(50))
        } else {
            std::hint::spin_loop()
        }
    }
    read(before)
}

/// Time of a pool's workers, added up: busy; starved (idle while a batch is being filled); ahead
/// (idle, and no batch to fill). All changes go through one word, so every nanosecond counts once.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Pool {
    workers: u64,
    /// Three packed numbers: the start of the current stretch (51 bits of nanoseconds, which wrap
    /// after 26 days), whether something is being filled (1 bit), the number of busy workers (12
    /// bits). A stretch of more than 13 days counts as 0.
    word: AtomicU64,
    busy: Counter,
    starved: Counter,
    ahead: Counter,
}

/// The largest count is 4095; `build` allows 1024 workers.
const WORKING_BITS: u32 = 12;
const TIME_MASK: u64 = u64::MAX >> (WORKING_BITS + 1);

impl Pool {
    pub fn new(workers: usize) -> Self {
        Self {
            workers: workers as u64,
            ..Self::default()
        }
    }

    /// Notes that one more worker is busy (`by` 1) or one fewer (-1), or that only `filling` has
    /// changed (0).
    pub fn change(&self, by: i64, filling: bool, now: u64) {
        if now == 0 {
            return;
        }
        let mut old = self.word.load(Ordering::Relaxed);
        loop {
            let working = (old & ((1 << WORKING_BITS) - 1))
                .saturating_add_signed(by)
                .min((1 << WORKING_BITS) - 1);
            // Threads read the clock before they change the word. A late writer must not move the
            // time back.
            let since = old >> (WORKING_BITS + 1);
            let at = now & TIME_MASK;
            let at = if at.wrapping_sub(since) & TIME_MASK > TIME_MASK / 2 {
                since
            } else {
                at
            };
            let new = at << (WORKING_BITS + 1) | u64::from(filling) << WORKING_BITS | working;
            match self
                .word
                .compare_exchange_weak(old, new, Ordering::SeqCst, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(changed) => old = changed,
            }
        }
        let (busy, starved, ahead) = self.stretch(old, now);
        for (sum, ns) in [
            (&self.busy, busy),
            (&self.starved, starved),
            (&self.ahead, ahead),
        ] {
            if ns > 0 {
                sum.add(ns);
            }
        }
    }

    /// Busy, starved and ahead time since the word was written.
    fn stretch(&self, word: u64, now: u64) -> (u64, u64, u64) {
        let since = word >> (WORKING_BITS + 1);
        // Threads read the clock before they change the word, so `now` may be a moment before
        // `since`.
        let len = (now & TIME_MASK).wrapping_sub(since) & TIME_MASK;
        let len = if len > TIME_MASK / 2 { 0 } else { len };
        let working = word & ((1 << WORKING_BITS) - 1);
        let idle = self.workers.saturating_sub(working) * len;
        let filling = word >> WORKING_BITS & 1 == 1;
        (
            working * len,
            if filling { idle } else { 0 },
            if filling { 0 } else { idle },
        )
    }

    /// The last value of `filling`.
    pub fn filling(&self) -> bool {
        self.word.load(Ordering::SeqCst) >> WORKING_BITS & 1 == 1
    }

    /// The number of busy workers.
    pub fn working(&self) -> u64 {
        self.word.load(Ordering::Relaxed) & ((1 << WORKING_BITS) - 1)
    }

    /// Nanoseconds busy, starved and ahead until `now`.
    pub fn read(&self, now: u64) -> (u64, u64, u64) {
        let (word, sums) = settled(
            || self.word.load(Ordering::Acquire),
            |word| {
                (
                    word,
                    [&self.busy, &self.starved, &self.ahead].map(Counter::get),
                )
            },
            |(word, sums)| self.is_whole(*word, *sums),
        );
        let (busy, starved, ahead) = self.stretch(word, now);
        (sums[0] + busy, sums[1] + starved, sums[2] + ahead)
    }

    /// Whether the writer of `word` has added the stretch before it. The sums then hold all
    /// workers' time.
    fn is_whole(&self, word: u64, sums: [u64; 3]) -> bool {
        let since = word >> (WORKING_BITS + 1);
        let sum = sums.into_iter().fold(0, u64::wrapping_add);
        sum.wrapping_sub(self.workers.wrapping_mul(since)) & TIME_MASK == 0
    }
}

/// Sub-buckets of each power of two: buckets are 1/32 wide, about 3 %.
const SUB_BITS: u32 = 5;
const SUB: usize = 1 << SUB_BITS;
/// From 1 ns to about 36 minutes; longer times count as 36 minutes.
const POWERS: usize = 41 - SUB_BITS as usize;
const BUCKETS: usize = SUB * (POWERS + 1);

/// For each bucket of a histogram: its count at the last call of `quantile_since`, and how much the
/// count had grown since the call before that.
#[derive(Debug, Default)]
pub struct Counts(Vec<[u64; 2]>);

/// Durations, in buckets of about 3 %.
pub struct Histogram {
    buckets: Box<[AtomicU64; BUCKETS]>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: Box::new(std::array::from_fn(|_| AtomicU64::new(0))),
        }
    }
}

impl Histogram {
    pub fn record(&self, ns: u64) {
        self.buckets[bucket(ns)].fetch_add(1, Ordering::Relaxed);
    }

    /// A quantile of the durations recorded since the last call with these `counts`; `None` if
    /// there were none.
    pub fn quantile_since(&self, counts: &mut Counts, share: f64) -> Option<f64> {
        counts.0.resize(BUCKETS, [0; 2]);
        let mut all = 0;
        for (bucket, [total, new]) in self.buckets.iter().zip(&mut counts.0) {
            let now = bucket.load(Ordering::Relaxed);
            *new = now.saturating_sub(*total);
            *total = now;
            all += *new;
        }
        quantile(counts.0.iter().map(|[_, new]| *new), all, share)
    }

    /// All durations recorded so far.
    pub fn read(&self) -> Latency {
        let counts: Vec<u64> = self
            .buckets
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect();
        let all: u64 = counts.iter().sum();
        let sum = counts
            .iter()
            .enumerate()
            .map(|(at, count)| *count as f64 * middle(at))
            .sum::<f64>();
        let quantile = |share: f64| quantile(counts.iter().copied(), all, share).unwrap_or(0.0);
        let last = counts.iter().rposition(|count| *count > 0);
        Latency {
            count: all,
            mean_ns: if all > 0 { sum / all as f64 } else { 0.0 },
            p50_ns: quantile(0.5),
            p90_ns: quantile(0.9),
            p99_ns: quantile(0.99),
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

/// The middle of the bucket that contains the quantile `share` of `all` values; `None` without
/// values.
fn quantile(mut counts: impl Iterator<Item = u64>, all: u64, share: f64) -> Option<f64> {
    let wanted = ((all as f64 * share).ceil() as u64).max(1);
    let mut seen = 0;
    let found = counts.position(|count| {
        seen += count;
        seen >= wanted
    });
    found.map(middle)
}

/// The bucket of a value. The first buckets are 1 ns wide; then each power of two has [`SUB`]
/// buckets.
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
    let power = at / SUB - 1;
    let sub = at % SUB;
    let width = (1_u64 << power) as f64;
    (SUB + sub) as f64 * width + (width - 1.0) / 2.0
}

/// The contents of a histogram. Values are the middles of buckets, at most 2 % off.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Latency {
    /// Recorded durations.
    pub count: u64,
    /// Mean, in nanoseconds.
    pub mean_ns: f64,
    /// The median: half of the durations are at most this.
    pub p50_ns: f64,
    /// 90 of 100 durations are at most this.
    pub p90_ns: f64,
    /// 99 of 100 durations are at most this.
    pub p99_ns: f64,
    /// The longest duration.
    pub max_ns: f64,
    /// Pairs (nanoseconds, count), ascending, without empty buckets.
    pub buckets: Vec<(f64, u64)>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicUsize;

    proptest! {
        #[test]
        fn an_area_is_the_sum_of_all_stays_in_any_order(
            stays in prop::collection::vec((1_u64..1 << 40, 0_u64..1 << 30), 0..50), seed in any::<u64>()
        ) {
            let area = Area::default();
            let mut notes: Vec<(u64, bool)> = Vec::new();
            for (start, len) in &stays {
                notes.push((*start, true));
                notes.push((start + len, false));
            }
            // In a random order with all entries first: the hardest case, with as many inside as
            // possible.
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
        fn the_middle_of_a_bucket_is_within_two_percent_of_its_values(ns in 0_u64..1 << 40) {
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
        assert_eq!(
            pool.read(210),
            (20 + 20 + 40 + 10, 150 + 40 + 10, 300 + 20 + 20)
        );
        assert_eq!(pool.working(), 1);
        let (busy, starved, ahead) = pool.read(1_000);
        assert_eq!(busy + starved + ahead, 3 * 1_000);
    }

    #[test]
    fn sums_before_the_writer_added_its_time_are_not_whole() {
        let pool = Pool::new(3);
        let look = || {
            (
                pool.word.load(Ordering::Acquire),
                [&pool.busy, &pool.starved, &pool.ahead].map(Counter::get),
            )
        };
        pool.change(1, true, 100);
        let (word, sums) = look();
        assert!(pool.is_whole(word, sums));
        pool.change(0, true, 150);
        assert!(!pool.is_whole(look().0, sums) && pool.is_whole(look().0, look().1));
    }

    #[test]
    fn a_pool_counts_the_most_workers_that_build_allows() {
        let pool = Pool::new(1024);
        (0..1024).for_each(|_| pool.change(1, true, 100));
        assert_eq!((pool.working(), pool.filling()), (1024, true));
        assert_eq!(pool.read(110), (1024 * 10, 0, 1024 * 100));
    }

    /// Has `writers` threads make changes while this one reads. A writer that loses its core in the
    /// middle of a change, for longer than a reader tries, makes a reading wrong. That happens on a
    /// busy machine, but to fewer than one reading in a hundred.
    fn while_it_changes(writers: usize, change: impl Fn(u64) + Sync, is_whole: impl Fn() -> bool) {
        let ended = AtomicUsize::new(0);
        let mut reads = 0;
        let mut off = 0;
        std::thread::scope(|scope| {
            for _ in 0..writers {
                scope.spawn(|| {
                    for number in 0..20_000 {
                        (0..100).for_each(|_| std::hint::spin_loop());
                        change(number);
                    }
                    ended.fetch_add(1, Ordering::SeqCst);
                });
            }
            while ended.load(Ordering::SeqCst) < writers {
                reads += 1;
                off += usize::from(!is_whole());
            }
        });
        assert!(off * 100 <= reads, "{off} of {reads}");
    }

    #[test]
    fn a_pool_counts_all_time_once_while_it_changes() {
        let pool = Pool::new(3);
        let clock = AtomicU64::new(1);
        while_it_changes(
            3,
            |number| {
                let by = if number % 2 == 0 { 1 } else { -1 };
                pool.change(by, number % 3 == 0, clock.fetch_add(1, Ordering::SeqCst));
            },
            || {
                let now = clock.load(Ordering::SeqCst);
                let (busy, starved, ahead) = pool.read(now);
                let sum = busy + starved + ahead;
                let later = clock.load(Ordering::SeqCst);
                sum % 3 == 0 && (now..=later).contains(&(sum / 3))
            },
        );
        assert_eq!(pool.working(), 0);
    }

    #[test]
    fn a_flow_counts_all_time_once_while_it_changes() {
        let flow = Flow::default();
        let clock = AtomicU64::new(2);
        flow.change(2, 1);
        while_it_changes(
            1,
            |_| flow.change(2, clock.fetch_add(1, Ordering::SeqCst)),
            || {
                let now = clock.load(Ordering::SeqCst);
                let [area, busy] = flow.read(now);
                area == 2 * busy && (now - 2..=clock.load(Ordering::SeqCst)).contains(&busy)
            },
        );
    }

    #[test]
    fn open_stays_count_until_now() {
        let area = Area::default();
        area.enter(3, 100);
        assert_eq!(area.total_ns(110), 30);
        area.leave(1, 110);
        assert_eq!((area.total_ns(120), area.inside()), (50, 2));
    }

    #[test]
    fn a_flow_adds_up_stays_and_the_time_with_any() {
        let flow = Flow::default();
        for (inside, now) in [(3, 100), (8, 130), (0, 190), (1, 300)] {
            flow.change(inside, now);
        }
        assert_eq!(flow.read(305), [3 * 30 + 8 * 60 + 5, 30 + 60 + 5]);
    }

    #[test]
    fn an_area_is_right_while_it_changes() {
        // A change read in the middle would be off by the clock itself.
        const START: u64 = 1 << 40;
        let area = Area::default();
        let clock = AtomicU64::new(START);
        while_it_changes(
            2,
            |number| {
                let now = clock.fetch_add(1, Ordering::SeqCst);
                if number % 2 == 0 {
                    area.enter(1, now)
                } else {
                    area.leave(1, now)
                }
            },
            || {
                let total = area.total_ns(clock.load(Ordering::SeqCst));
                total <= 2 * (clock.load(Ordering::SeqCst) - START)
            },
        );
        assert_eq!(area.inside(), 0);
    }

    #[test]
    fn states_count_no_time_twice_while_they_change() {
        let states = States::<bool, 2>::default();
        let now = AtomicU64::new(1);
        let ended = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0.. {
                    // Each stay is long, so that a stay counted twice is noticed.
                    states.enter(
                        turn % 2 == 1,
                        now.fetch_add(1 << 20, Ordering::SeqCst) + (1 << 20),
                    );
                    if ended.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
            let wrong = (0..200_000).find_map(|_| {
                let all: u64 = states
                    .read([false, true], now.load(Ordering::SeqCst))
                    .iter()
                    .sum();
                // Time may advance during the read.
                let most = now.load(Ordering::SeqCst);
                (all > most).then_some((all, most))
            });
            ended.store(true, Ordering::Relaxed);
            assert_eq!(wrong, None, "more time than there was");
        });
    }

    #[test]
    fn the_times_of_all_states_add_up_to_now() {
        #[derive(Debug, Default)]
        struct Place(usize);
        impl Numbered for Place {
            fn number(self) -> usize {
                self.0
            }
        }
        let states = States::<Place, 3>::default();
        states.enter(Place(1), 10);
        states.enter(Place(2), 25);
        states.enter(Place(0), 25);
        assert_eq!(states.read([0, 1, 2].map(Place), 40), [25, 15, 0]);
    }

    #[test]
    fn quantiles_match_the_recorded_durations() {
        let histogram = Histogram::default();
        (1..=1000).for_each(|us| histogram.record(us * 1000));
        let read = histogram.read();
        assert_eq!(read.count, 1000);
        for (got, expected) in [
            (read.p50_ns, 500e3),
            (read.p90_ns, 900e3),
            (read.p99_ns, 990e3),
            (read.max_ns, 1e6),
        ] {
            assert!(
                (got - expected).abs() < 0.03 * expected,
                "{got} for {expected}"
            );
        }
        assert!((read.mean_ns - 500.5e3).abs() < 0.02 * 500e3);
        assert_eq!(Histogram::default().read(), Latency::default());
    }

    #[test]
    fn a_quantile_is_that_of_the_time_since_the_last_call() {
        let histogram = Histogram::default();
        let mut counts = Counts::default();
        assert_eq!(histogram.quantile_since(&mut counts, 0.99), None);
        for (values, p99) in [
            (1..=100, 99),
            (1000..=1000, 1000),
            (1..=1000, 990),
            (7..=8, 8),
        ] {
            values.for_each(|ns| histogram.record(ns));
            let found = histogram.quantile_since(&mut counts, 0.99).unwrap();
            assert_eq!(bucket(found as u64), bucket(p99), "{found}");
        }
        assert_eq!(histogram.quantile_since(&mut counts, 0.99), None);
    }

    #[test]
    fn too_long_durations_go_into_the_last_bucket() {
        let histogram = Histogram::default();
        histogram.record(u64::MAX);
        assert!(histogram.read().max_ns > 1e12);
    }
}
