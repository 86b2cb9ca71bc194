//! The snapshots so far, and the figures derived from them. Independent of the terminal.
//!
//! ```text
//! history   │s│s│s│s│s│s│s│s│   snapshots of the last minute; now = the last one minus the one a window earlier
//! points    │·│·│·│·│·│·│·│·│   samples and starvation between two snapshots, of the last minutes: the plots
//! timeline  the last batches: the start of each one's step, and whether it is still held
//! ```
//!
//! The loader counts a wait at its end. A wait longer than the interval of snapshots is distributed over the points
//! before, because it can only have been then. So are the samples of a batch after points without a batch: otherwise a
//! plot of large batches would show the times of snapshots.

use super::Setup;
use feedline::profile::{Latency, Snapshot, Timeline, Verdict};
use std::collections::VecDeque;

/// Window lengths, in seconds.
const WINDOWS: [u64; 6] = [1, 2, 5, 10, 30, 60];
const WINDOW_FIRST: usize = 1;
/// With fewer batches, the window is extended up to this length.
const BATCHES_LEAST: u64 = 8;
const EXTENDED_MOST: u64 = 30 * SECOND;
/// How long points are kept.
pub(super) const PLOTTED_MOST: u64 = 300 * SECOND;
/// A longer gap without a batch is reported if it also exceeds several mean batch times.
const SILENT_LEAST: u64 = SECOND;
const SILENT_TIMES: f64 = 4.0;
pub(super) const SECOND: u64 = 1_000_000_000;

/// Changes between two snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Point {
    pub(super) from_ns: u64,
    pub(super) to_ns: u64,
    /// A batch came.
    pub(super) came: bool,
    pub(super) samples: f64,
    pub(super) starved_ns: u64,
    pub(super) steady_ns: u64,
}

impl Point {
    pub(super) fn ns(&self) -> u64 {
        self.to_ns.saturating_sub(self.from_ns)
    }
}

pub(super) struct State {
    setup: Setup,
    history: VecDeque<Snapshot>,
    points: VecDeque<Point>,
    timeline: Timeline,
    window: usize,
    whole: bool,
    paused: bool,
}

/// Progress of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// No batch has come yet.
    Waiting,
    Running,
    /// No batch for this long; the last one is still held, or not.
    Silent {
        ns: u64,
        held: bool,
    },
    /// No iterator is active.
    Between,
}

/// Speeds; `None` without time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Figures {
    pub(super) samples_per_s: Option<f64>,
    pub(super) gb_per_s: Option<f64>,
    pub(super) starved: Option<f64>,
    pub(super) au: Option<f64>,
}

/// Median and 99th percentile, in nanoseconds.
pub(super) type Quantiles = Option<[f64; 2]>;

/// All data of the drawing.
pub(super) struct Shown<'s> {
    pub(super) setup: &'s Setup,
    pub(super) phase: Phase,
    pub(super) paused: bool,
    pub(super) at_ns: u64,
    pub(super) batches: u64,
    pub(super) epoch: Option<u64>,
    pub(super) now: Figures,
    pub(super) mean: Figures,
    /// Scope of stages, queues and verdict: the whole run, or else the window.
    pub(super) whole: bool,
    /// Length of the window: as chosen, and actual.
    pub(super) window_s: u64,
    pub(super) span_ns: u64,
    /// Measurements of the whole run or the window, with their verdict.
    pub(super) scope: Snapshot,
    pub(super) verdict: Verdict,
    /// Of reads, pieces of work, copies and waits.
    pub(super) latencies: [(&'static str, Quantiles); 4],
    pub(super) points: &'s VecDeque<Point>,
}

impl State {
    pub(super) fn new(mut setup: Setup) -> Self {
        setup.step = setup.step.filter(|step| !step.is_zero());
        setup.au_target = setup.au_target.filter(|target| (target * 100.0).is_finite());
        let (history, points) = (VecDeque::new(), VecDeque::new());
        Self {
            setup,
            history,
            points,
            timeline: Timeline::default(),
            window: WINDOW_FIRST,
            whole: false,
            paused: false,
        }
    }

    pub(super) fn pause(&mut self) {
        self.paused = !self.paused;
    }

    pub(super) fn change_window(&mut self, by: isize) {
        self.window = self.window.saturating_add_signed(by).min(WINDOWS.len() - 1);
    }

    pub(super) fn toggle_whole(&mut self) {
        self.whole = !self.whole;
    }

    /// Takes a snapshot unless paused; returns whether it did.
    pub(super) fn push(&mut self, look: impl FnOnce() -> (Snapshot, Timeline)) -> bool {
        if self.paused {
            return false;
        }
        let (snapshot, timeline) = look();
        self.timeline = timeline;
        if let Some(before) = self.history.back() {
            let point = point(before, &snapshot);
            self.plot(point);
        }
        let keep = snapshot.at_ns.saturating_sub((WINDOWS[WINDOWS.len() - 1] + 1) * SECOND);
        while self.history.front().is_some_and(|oldest| oldest.at_ns < keep) {
            self.history.pop_front();
        }
        self.history.push_back(snapshot);
        true
    }

    fn plot(&mut self, mut point: Point) {
        let mut more = point.starved_ns.saturating_sub(point.steady_ns);
        point.starved_ns -= more;
        for before in self.points.iter_mut().rev() {
            if more == 0 {
                break;
            }
            let part = more.min(before.steady_ns.saturating_sub(before.starved_ns));
            before.starved_ns += part;
            more -= part;
        }
        self.points.push_back(point);
        if point.came {
            self.spread(point.samples);
        }
        while self.points.front().is_some_and(|oldest| oldest.to_ns.saturating_add(PLOTTED_MOST) < point.to_ns) {
            self.points.pop_front();
        }
    }

    /// Distributes the samples of the last point over the earlier points without a batch.
    fn spread(&mut self, samples: f64) {
        let silent = self.points.iter().rev().skip(1).take_while(|point| !point.came && point.steady_ns > 0).count();
        let part = self.points.len() - silent - 1;
        let all: f64 = self.points.range(part..).map(|point| point.ns() as f64).sum();
        if all > 0.0 {
            self.points.range_mut(part..).for_each(|point| point.samples = samples * (point.ns() as f64 / all));
        }
    }

    pub(super) fn shown(&self) -> Shown<'_> {
        let zero = Snapshot::default();
        let last = self.history.back().unwrap_or(&zero);
        let base = self.base().unwrap_or(&zero);
        let now = last.since(base);
        let (verdict_now, verdict_mean) = (Verdict::of(&now), Verdict::of(last));
        let latencies = latencies(last, if self.whole { None } else { Some(base) });
        let au_now = self.au(base, last);
        let mut shown = Shown {
            setup: &self.setup,
            phase: self.phase(),
            paused: self.paused,
            at_ns: last.at_ns,
            batches: last.consumer.batches,
            epoch: self.timeline.batches.last().map(|record| record.epoch),
            now: figures(&now, &verdict_now, au_now),
            mean: figures(last, &verdict_mean, self.au_mean(last)),
            whole: self.whole,
            window_s: WINDOWS[self.window],
            span_ns: now.at_ns,
            scope: now,
            verdict: verdict_now,
            latencies,
            points: &self.points,
        };
        if self.whole {
            (shown.span_ns, shown.scope, shown.verdict) = (last.at_ns, last.clone(), verdict_mean);
        }
        shown
    }

    /// The snapshot at the window's beginning.
    fn base(&self) -> Option<&Snapshot> {
        let last = self.history.back()?;
        let from = last.at_ns.saturating_sub(WINDOWS[self.window] * SECOND);
        let most = last.at_ns.saturating_sub(EXTENDED_MOST).min(from);
        let enough = |before: &Snapshot| {
            let batches = last.consumer.batches.saturating_sub(before.consumer.batches);
            before.at_ns <= from && (batches >= BATCHES_LEAST || before.at_ns <= most)
        };
        let earlier = self.history.iter().rev().skip(1);
        earlier.clone().find(|before| enough(before)).or_else(|| earlier.last())
    }

    fn phase(&self) -> Phase {
        let mut latest = self.history.iter().rev();
        let (last, before) = (latest.next(), latest.next());
        let Some(last) = last.filter(|last| last.consumer.batches > 0) else { return Phase::Waiting };
        if before.is_some_and(|before| before.steady_ns == last.steady_ns && before.at_ns < last.at_ns) {
            return Phase::Between;
        }
        let Some(record) = self.timeline.batches.last() else { return Phase::Running };
        let ns = last.at_ns.saturating_sub(record.got_ns);
        let each = last.steady_ns as f64 / last.consumer.batches as f64;
        match ns > SILENT_LEAST && ns as f64 > SILENT_TIMES * each {
            true => Phase::Silent { ns, held: record.dropped_ns == 0 },
            false => Phase::Running,
        }
    }

    /// Share of the steady time between two snapshots that steps filled, including partial ones.
    fn au(&self, base: &Snapshot, last: &Snapshot) -> Option<f64> {
        let step = u64::try_from(self.setup.step?.as_nanos()).ok()?;
        let steady = last.steady_ns.saturating_sub(base.steady_ns);
        let known = self.timeline.forgotten == 0
            || self.timeline.batches.first().is_some_and(|oldest| oldest.got_ns <= base.at_ns);
        let worked = if known {
            let inside = |got: u64| got.saturating_add(step).min(last.at_ns).saturating_sub(got.max(base.at_ns));
            self.timeline.batches.iter().map(|record| inside(record.got_ns) as f64).sum()
        } else {
            last.consumer.batches.saturating_sub(base.consumer.batches) as f64 * step as f64
        };
        (steady > 0).then(|| (worked / steady as f64).min(1.0))
    }

    /// As `au`, for the whole run without its first step; the last step may be partial.
    fn au_mean(&self, last: &Snapshot) -> Option<f64> {
        let step = self.setup.step?.as_nanos() as f64;
        let under_way = self.timeline.batches.last().map_or(step, |record| {
            let got = last.at_ns.saturating_sub(record.got_ns) as f64;
            got.min(step)
        });
        let between = last.consumer.batches.checked_sub(2)? as f64 * step;
        let time = last.steady_ns as f64 - step;
        (time > 0.0).then(|| ((between + under_way) / time).min(1.0))
    }
}

fn point(before: &Snapshot, after: &Snapshot) -> Point {
    Point {
        from_ns: before.at_ns,
        to_ns: after.at_ns,
        came: after.consumer.batches > before.consumer.batches,
        samples: after.consumer.samples.saturating_sub(before.consumer.samples) as f64,
        starved_ns: starved_ns(after).saturating_sub(starved_ns(before)),
        steady_ns: after.steady_ns.saturating_sub(before.steady_ns),
    }
}

/// Starvation: on a GPU of its stream, scaled from the measured steps to all; on the host, of `next()`.
fn starved_ns(snapshot: &Snapshot) -> u64 {
    let consumer = &snapshot.consumer;
    match &consumer.gpu {
        Some(gpu) => {
            let all = (consumer.batches as f64 / gpu.steps.max(1) as f64).max(1.0);
            (gpu.starved_ns as f64 * all) as u64
        }
        None => consumer.waited_ns,
    }
}

fn figures(part: &Snapshot, verdict: &Verdict, au: Option<f64>) -> Figures {
    let ns = part.steady_ns.saturating_add(part.consumer.first_ns);
    let rate = |amount: u64| (ns > 0).then(|| amount as f64 / ns as f64 * 1e9);
    Figures {
        samples_per_s: rate(part.consumer.samples),
        gb_per_s: rate(part.consumer.bytes).map(|bytes| bytes / 1e9),
        // Without a stage there is no verdict.
        starved: (!verdict.stages.is_empty()).then_some(verdict.starved_share),
        au,
    }
}

fn latencies(last: &Snapshot, base: Option<&Snapshot>) -> [(&'static str, Quantiles); 4] {
    let of = |which: fn(&Snapshot) -> Option<&Latency>| {
        let (all, before) = (which(last)?, base.and_then(which));
        match before {
            Some(before) => quantiles(all, before),
            None => (all.count > 0).then_some([all.p50_ns, all.p99_ns]),
        }
    };
    [
        ("read", of(|snapshot| Some(&snapshot.storage.latency))),
        ("work", of(|snapshot| Some(&snapshot.decode.latency))),
        ("copy", of(|snapshot| snapshot.copy.as_ref().map(|copy| &copy.latency))),
        ("wait", of(|snapshot| Some(&snapshot.consumer.waits))),
    ]
}

/// Quantiles of the values after `before`. Buckets only grow, so the difference is a histogram too.
fn quantiles(all: &Latency, before: &Latency) -> Quantiles {
    let mut old = before.buckets.iter().peekable();
    let mut later: Vec<(f64, u64)> = Vec::with_capacity(all.buckets.len());
    for &(ns, count) in &all.buckets {
        while old.next_if(|(bucket, _)| *bucket < ns).is_some() {}
        let known = old.next_if(|(bucket, _)| *bucket == ns).map_or(0, |(_, count)| *count);
        later.push((ns, count.saturating_sub(known)));
    }
    let count = later.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
    let at = |share: f64| {
        let (wanted, mut sum) = ((share * count as f64).max(1.0), 0_u64);
        let reached = later.iter().find(|(_, count)| {
            sum = sum.saturating_add(*count);
            sum as f64 >= wanted
        });
        reached.map(|(ns, _)| *ns)
    };
    Some([at(0.5)?, at(0.99)?]).filter(|_| count > 0)
}

/// States for tests of the drawing.
#[cfg(test)]
pub(super) mod samples {
    use super::*;
    use feedline::profile::{BatchRecord, Copy, GpuIdle};
    use std::time::Duration;

    pub(crate) const MS: u64 = 1_000_000;

    pub(crate) fn setup() -> Setup {
        Setup { title: "images, train/".into(), step: Some(Duration::from_millis(150)), au_target: Some(0.9) }
    }

    fn latency(ns: f64, count: u64) -> Latency {
        let mut latency = Latency::default();
        (latency.count, latency.p50_ns, latency.p99_ns) = (count, ns, 3.0 * ns);
        latency.buckets = vec![(ns, count - count / 50), (3.0 * ns, count / 50)];
        latency
    }

    /// A snapshot after `ms` with a batch of 256 every 200 ms. The consumer works `work_ms` of them, decode is busy
    /// `decode`.
    pub(crate) fn snapshot(ms: u64, work_ms: u64, decode: f64) -> Snapshot {
        let (mut snapshot, ns, batches) = (Snapshot::default(), ms * MS, ms / 200);
        (snapshot.at_ns, snapshot.steady_ns) = (ns + 500 * MS, ns);
        let consumer = &mut snapshot.consumer;
        (consumer.batches, consumer.samples, consumer.bytes) = (batches, batches * 256, batches * 256 * 150_528);
        (consumer.waited_ns, consumer.user_ns) = (batches * (200 - work_ms) * MS, batches * work_ms * MS);
        (consumer.first_ns, consumer.waits) = (300 * MS, latency(50e6, batches));
        snapshot.order.busy_ns = ns / 250;
        let storage = &mut snapshot.storage;
        (storage.busy_ns, storage.depth, storage.in_flight_ns) = (ns / 10 * 7, 32, ns * 9);
        (storage.reads, storage.bytes, storage.latency) =
            (batches * 256, batches * 256 * 110_000, latency(1.2e6, batches * 256));
        let workers = &mut snapshot.decode;
        (workers.workers, workers.cores, workers.samples) = (4, 8, batches * 256);
        workers.busy_ns = (4.0 * decode * ns as f64) as u64;
        workers.cpu_ns = Some(workers.busy_ns);
        workers.ahead_ns = 4 * ns - workers.busy_ns.min(4 * ns);
        (workers.queued_ns, workers.latency) = (ns * 5, latency(2.9e6, batches * 256));
        let slots = &mut snapshot.slots;
        (slots.count, slots.held_ns, slots.filling_ns) = (6, ns / 200 * work_ms, ns * 3);
        slots.free_ns = ns * 6 - slots.filling_ns - slots.held_ns;
        snapshot
    }

    pub(crate) fn timeline(ms: u64, work_ms: u64) -> Timeline {
        let mut timeline = Timeline::default();
        for batch in 0..ms / 200 {
            let mut record = BatchRecord::default();
            record.batch = batch;
            record.got_ns = (batch * 200 + 500) * MS;
            record.dropped_ns = record.got_ns + work_ms * MS;
            timeline.batches.push(record);
        }
        timeline
    }

    /// A minute of a loader, with a snapshot every 250 ms.
    pub(crate) fn minute(work_ms: u64, decode: f64) -> State {
        let mut state = State::new(setup());
        for ms in (0..=60_000).step_by(250) {
            state.push(|| (snapshot(ms, work_ms, decode), timeline(ms, work_ms)));
        }
        state
    }

    pub(crate) fn starved_by_decode() -> State {
        minute(150, 0.99)
    }

    pub(crate) fn fed() -> State {
        minute(200, 0.3)
    }

    pub(crate) fn on_a_gpu() -> State {
        let mut state = State::new(setup());
        for ms in (0..=60_000).step_by(250) {
            let mut snapshot = snapshot(ms, 150, 0.99);
            let mut gpu = GpuIdle::default();
            (gpu.steps, gpu.span_ns, gpu.starved_ns, gpu.host_late_ns) = (ms / 200, ms * MS, ms * MS / 5, ms * MS / 20);
            snapshot.consumer.gpu = Some(gpu);
            let mut copy = Copy::default();
            (copy.busy_ns, copy.batches, copy.bytes, copy.buffers) = (ms * MS / 20, ms / 200, ms * 100_000, 2);
            copy.latency = latency(10e6, ms / 200);
            snapshot.copy = Some(copy);
            state.push(|| (snapshot, timeline(ms, 150)));
        }
        state
    }
}

#[cfg(test)]
mod tests {
    use super::samples::*;
    use super::*;
    use std::time::Duration;

    fn near(value: Option<f64>, wanted: f64) -> bool {
        value.is_some_and(|value| (value - wanted).abs() <= 0.01 * wanted.abs())
    }

    #[test]
    fn figures_cover_the_window_and_the_whole_run() {
        // Starved for 30 s, then fed for 10 s.
        let mut state = State::new(setup());
        let mut seen = snapshot(30_000, 150, 0.99);
        for ms in (0..=30_000).step_by(250) {
            state.push(|| (snapshot(ms, 150, 0.99), timeline(ms, 150)));
        }
        for _ in 0..40 {
            let later = &mut seen;
            (later.at_ns, later.steady_ns) = (later.at_ns + 250 * MS, later.steady_ns + 250 * MS);
            later.consumer.user_ns += 250 * MS;
            (later.consumer.batches, later.consumer.samples) =
                (later.consumer.batches + 2, later.consumer.samples + 512);
            state.push(|| (later.clone(), Timeline::default()));
        }
        let shown = state.shown();
        assert!(near(shown.now.samples_per_s, 2048.0), "{:?}", shown.now);
        assert!(shown.now.starved.is_some_and(|starved| starved == 0.0), "{:?}", shown.now);
        assert!(near(shown.mean.starved, 0.25 * 30.0 / 40.0), "{:?}", shown.mean);
        assert!(near(shown.mean.samples_per_s, (150.0 + 80.0) * 256.0 / 40.3), "{:?}", shown.mean);
        assert_eq!((shown.window_s, shown.span_ns), (2, 2 * SECOND));
        assert!(shown.verdict.starved_share == 0.0);
        state.toggle_whole();
        assert!(near(Some(state.shown().verdict.starved_share), 0.25 * 30.0 / 40.0));
    }

    #[test]
    fn windows_with_few_batches_are_extended() {
        let mut state = State::new(Setup::default());
        for second in 0..100 {
            let mut seen = Snapshot::default();
            (seen.at_ns, seen.steady_ns, seen.consumer.batches) = (second * SECOND, second * SECOND, second / 2);
            state.push(|| (seen, Timeline::default()));
        }
        // 8 batches take 16 s.
        assert_eq!(state.shown().span_ns / SECOND, 16);
        (0..9).for_each(|_| state.change_window(1));
        assert_eq!((state.shown().window_s, state.shown().span_ns / SECOND), (60, 60));
        (0..9).for_each(|_| state.change_window(-1));
        assert_eq!((state.shown().window_s, state.shown().span_ns / SECOND), (1, 16));
        assert!(state.history.len() <= 63);
    }

    #[test]
    fn steps_count_only_within_the_window() {
        let step = |step_ms| Setup { step: Some(Duration::from_millis(step_ms)), ..Setup::default() };
        for (step_ms, wanted) in [(150, 0.75), (200, 1.0), (50, 0.25), (1000, 1.0)] {
            let mut state = State::new(step(step_ms));
            // Not a whole number of batches per window.
            for ms in (0..=20_030).step_by(130) {
                state.push(|| (snapshot(ms, 150, 0.99), timeline(ms, 150)));
            }
            let shown = state.shown();
            assert!(near(shown.mean.au, wanted), "{step_ms}: {:?}", shown.mean);
            // The window does not end at a batch. Everything is exact to the nanosecond except the start of the steady
            // time.
            assert!(shown.now.au.is_some_and(|au| (au - wanted).abs() < 0.08), "{step_ms}: {:?}", shown.now);
        }
        assert_eq!(State::new(step(0)).shown().now.au, None);
        let mut state = State::new(Setup::default());
        state.push(|| (snapshot(1000, 150, 0.99), timeline(1000, 150)));
        assert_eq!(state.shown().mean.au, None);
    }

    #[test]
    fn long_waits_are_plotted_at_their_times() {
        let mut state = State::new(Setup::default());
        for second in 0..=10 {
            let mut seen = Snapshot::default();
            (seen.at_ns, seen.steady_ns, seen.consumer.batches) = (second * SECOND, second * SECOND, 1 + second / 10);
            // From 2.5 s until 9.5 s.
            seen.consumer.waited_ns = if second >= 10 { 7 * SECOND } else { 0 };
            state.push(|| (seen, Timeline::default()));
        }
        let starved: Vec<u64> = state.points.iter().map(|point| point.starved_ns / SECOND).collect();
        // Within a second of its time, and with its length exact to the nanosecond.
        assert_eq!(starved, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn samples_are_spread_since_the_previous_batch() {
        let mut state = State::new(Setup::default());
        for (second, steady, batches) in
            [(0, 0, 0), (2, 0, 0), (3, 1, 1), (4, 2, 1), (5, 3, 1), (6, 4, 2), (7, 5, 3), (8, 6, 3)]
        {
            let mut seen = Snapshot::default();
            (seen.at_ns, seen.steady_ns) = (second * SECOND, steady * SECOND);
            (seen.consumer.batches, seen.consumer.samples) = (batches, batches * 30);
            state.push(|| (seen, Timeline::default()));
        }
        let samples: Vec<f64> = state.points.iter().map(|point| point.samples).collect();
        // Not over the time before the first batch.
        assert_eq!(samples, [0.0, 30.0, 10.0, 10.0, 10.0, 30.0, 0.0]);
    }

    #[test]
    fn points_are_kept_for_some_minutes() {
        let mut state = State::new(Setup::default());
        for second in 0..1000 {
            let mut seen = Snapshot::default();
            seen.at_ns = second * SECOND;
            state.push(|| (seen, Timeline::default()));
        }
        assert!((300..=302).contains(&state.points.len()), "{}", state.points.len());
    }

    #[test]
    fn phases_follow_the_batches() {
        let mut state = State::new(setup());
        assert_eq!(state.shown().phase, Phase::Waiting);
        assert_eq!(state.shown().now, Figures::default());
        state.push(|| (Snapshot::default(), Timeline::default()));
        assert_eq!(state.shown().phase, Phase::Waiting);
        state.push(|| (snapshot(2000, 150, 0.99), timeline(2000, 150)));
        state.push(|| (snapshot(4000, 150, 0.99), timeline(4000, 150)));
        assert_eq!(state.shown().phase, Phase::Running);
        let mut later = snapshot(4000, 150, 0.99);
        (later.at_ns, later.steady_ns) = (later.at_ns + 5 * SECOND, later.steady_ns + 5 * SECOND);
        state.push(|| (later.clone(), timeline(4000, 150)));
        assert_eq!(state.shown().phase, Phase::Silent { ns: 5200 * MS, held: false });
        later.at_ns += SECOND;
        state.push(|| (later.clone(), timeline(4000, 150)));
        assert_eq!(state.shown().phase, Phase::Between);
        assert_eq!(state.shown().mean.samples_per_s.map(f64::is_finite), Some(true));
    }

    #[test]
    fn a_paused_screen_takes_no_snapshots() {
        let mut state = starved_by_decode();
        let (before, figures) = (state.history.len(), state.shown().now);
        state.pause();
        assert!(!state.push(|| unreachable!("a paused screen takes no snapshot")));
        assert_eq!((state.history.len(), state.shown().now, state.shown().paused), (before, figures, true));
        state.pause();
        assert!(state.push(|| (snapshot(61_000, 150, 0.99), timeline(61_000, 150))));
    }

    #[test]
    fn window_latencies_cover_only_the_window() {
        let histogram = |buckets: &[(f64, u64)]| {
            let mut latency = Latency::default();
            latency.buckets = buckets.to_vec();
            latency
        };
        for (all, before, wanted) in [
            (&[(1.0, 100), (9.0, 5)][..], &[(1.0, 100)][..], Some([9.0, 9.0])),
            (&[(1.0, 100), (9.0, 5)], &[(1.0, 2), (9.0, 5)], Some([1.0, 1.0])),
            (&[(1.0, 100), (4.0, 1), (9.0, 100)], &[(4.0, 1)], Some([1.0, 9.0])),
            (&[(1.0, 50), (4.0, 99)], &[(2.0, 7), (3.0, 1)], Some([4.0, 4.0])),
            (&[(1.0, 5)], &[(1.0, 5)], None),
            (&[(1.0, 5)], &[(1.0, 6)], None),
            (&[], &[], None),
        ] {
            assert_eq!(quantiles(&histogram(all), &histogram(before)), wanted, "{all:?} − {before:?}");
        }
    }
}
