//! Shares of the time per stage; starvation and queues over the whole timeline; how long things took.
//!
//! Over time a drawing has [`COLUMNS`] columns at most: where more moments fall into one, it shows their mean, and as a pale
//! band the least and the most.

use super::svg::{LEFT, RIGHT, Scale, Svg, WIDTH, count, percent, share, time};
use crate::meter::{Gauges, Latency, Snapshot, Timeline};
use crate::report::export::way::{self, Doing, FAR, Phase, Span};

/// Columns of what is drawn over time.
pub(super) const COLUMNS: usize = 240;

/// A stage's time: what it is a share of, and the parts with class and name. What is left is `rest`.
struct Bar {
    label: &'static str,
    whole: f64,
    parts: Vec<(&'static str, &'static str, f64)>,
    rest: &'static str,
}

fn bars(snapshot: &Snapshot) -> Vec<Bar> {
    let Snapshot { consumer, order, storage, decode, .. } = snapshot;
    let steady = snapshot.steady_ns as f64;
    let mut bars = vec![Bar {
        label: "consumer",
        whole: steady,
        parts: vec![("starved", "starved", consumer.waited_ns as f64), ("own", "own work", consumer.user_ns as f64)],
        rest: "",
    }];
    if let Some(gpu) = &consumer.gpu {
        let late = "idle before it asked (at most)";
        let parts = vec![("starved", "starved", gpu.starved_ns as f64), ("wait", late, gpu.host_late_ns as f64)];
        bars.push(Bar { label: "GPU", whole: steady, parts, rest: "busy, or not measured" });
    }
    if let Some(copy) = &snapshot.copy {
        let parts = vec![
            ("copy", "copying", copy.busy_ns as f64),
            ("wait", "no full batch", copy.starved_ns as f64),
            ("room", "no device memory free", copy.blocked_ns as f64),
        ];
        bars.push(Bar { label: "copy", whole: steady, parts, rest: "" });
    }
    let parts = vec![
        ("decode", "decoding", decode.busy_ns as f64),
        ("wait", "no bytes", decode.starved_ns as f64),
        ("room", "ahead", decode.ahead_ns as f64),
    ];
    bars.push(Bar { label: "decode", whole: steady * f64::from(decode.workers), parts, rest: "" });
    let parts = vec![("read", "reading", storage.busy_ns as f64), ("room", "no room", storage.blocked_ns as f64)];
    bars.push(Bar { label: "storage", whole: steady, parts, rest: "nothing to read" });
    let parts = vec![("order", "planning", order.busy_ns as f64), ("room", "no slot", order.no_slot_ns as f64)];
    bars.push(Bar { label: "order", whole: steady, parts, rest: "" });
    bars
}

/// One bar per stage: what it did in the steady time.
pub(super) fn stages(snapshot: &Snapshot) -> String {
    let bars = bars(snapshot);
    let bottom = 30.0 * bars.len() as f64 + 4.0;
    let mut svg = Svg::new(WIDTH, bottom + 34.0, "Shares of the steady time for each stage");
    let scale = Scale::new(0.0, 100.0, LEFT, RIGHT);
    for tick in (0..=100).step_by(10) {
        let x = scale.place(f64::from(tick));
        svg.line("grid", (x, 2.0), (x, bottom));
        svg.text("tick mid", x, bottom + 14.0, &format!("{tick} %"));
    }
    svg.text(
        "tick mid",
        f64::midpoint(LEFT, RIGHT),
        bottom + 30.0,
        "share of the steady time (of a worker, for decode)",
    );
    for (at, bar) in bars.iter().enumerate() {
        let y = 30.0 * at as f64 + 4.0;
        svg.text("label end", LEFT - 8.0, y + 16.0, bar.label);
        stacked(&mut svg, &scale, y, bar);
    }
    svg.finish()
}

fn stacked(svg: &mut Svg, scale: &Scale, y: f64, bar: &Bar) {
    let known: f64 = bar.parts.iter().map(|(_, _, ns)| ns).sum();
    // Measured one after the other, parts may be a little more than the whole.
    let whole = bar.whole.max(known);
    let rest = [("rest", bar.rest, whole - known)];
    let mut at = 0.0;
    for (class, name, ns) in bar.parts.iter().chain(&rest) {
        let part = 100.0 * share(*ns, whole);
        let (x, end) = (scale.place(at), scale.place(at + part));
        at += part;
        let name = if name.is_empty() { "not accounted for" } else { name };
        svg.titled(&format!("{}: {name} {}, {}", bar.label, percent(part / 100.0), time(*ns)), |svg| {
            svg.rect(class, x, y, end - x, 24.0);
            let text = format!("{name} {part:.0} %");
            // About so wide is a letter.
            if end - x > 6.6 * text.chars().count() as f64 + 8.0 {
                svg.text(&format!("on on-{class}"), x + 6.0, y + 16.0, &text);
            }
        });
    }
}

/// What the awaited batch did while the consumer waited for it.
pub(super) const CAUSES: [(&str, &str); 6] = [
    ("order", "not planned yet (order, or no slot)"),
    ("read", "being read (and decoded meanwhile)"),
    ("decode", "all read, being decoded"),
    ("queue", "full, waiting for its copy"),
    ("copy", "being copied"),
    ("ready", "being handed over"),
];

fn cause(phase: Phase) -> usize {
    match phase {
        Phase::Read => 1,
        Phase::Decode => 2,
        Phase::CopyQueue => 3,
        Phase::Copy => 4,
        Phase::Ready | Phase::Held => 5,
    }
}

/// Each wait in pieces, by what the awaited batch did.
fn waits(timeline: &Timeline) -> Vec<Span<usize>> {
    let mut pieces = Vec::new();
    for (wait, record) in way::consumer(timeline).into_iter().filter(|(span, _)| span.what == Doing::Starved) {
        let Some(way) = way::way(record, wait.end) else {
            pieces.push(Span { what: 5, start: wait.start, end: wait.end });
            continue;
        };
        let before = Span { what: 0, start: 0, end: way.start };
        let phases =
            way.phases.iter().map(|phase| Span { what: cause(phase.what), start: phase.start, end: phase.end });
        for piece in std::iter::once(before).chain(phases).filter(|piece| piece.common(&wait) > 0) {
            pieces.push(Span { what: piece.what, start: piece.start.max(wait.start), end: piece.end.min(wait.end) });
        }
    }
    pieces
}

/// Nanoseconds of all waits by cause.
pub(super) fn waits_by_cause(timeline: &Timeline) -> [f64; CAUSES.len()] {
    let mut all = [0.0; CAUSES.len()];
    waits(timeline).iter().for_each(|piece| all[piece.what] += piece.ns() as f64);
    all
}

/// Equal columns of the time from the first to the last moment of a timeline.
struct Columns {
    start: f64,
    width: f64,
    scale: Scale,
}

impl Columns {
    fn new(timeline: &Timeline) -> Option<Self> {
        let asked = timeline.batches.iter().filter(|r| r.got_ns > 0).map(|r| r.asked_ns.min(r.got_ns));
        let got = timeline.batches.iter().map(|r| r.got_ns).filter(|ns| *ns > 0);
        let moments = || timeline.gauges.iter().map(|g| g.at_ns);
        let start = asked.filter(|ns| *ns > 0).chain(moments()).min()?.min(FAR);
        let end = got.chain(moments()).max()?.clamp(start, FAR).max(start + 1);
        let width = (end - start) as f64 / COLUMNS as f64;
        let scale = Scale::new(start as f64 / 1e9, end as f64 / 1e9, LEFT, RIGHT);
        Some(Self { start: start as f64, width, scale })
    }

    /// The column of a moment.
    fn of(&self, ns: u64) -> usize {
        (((ns as f64 - self.start) / self.width) as usize).min(COLUMNS - 1)
    }

    /// Where a column begins and ends, in nanoseconds.
    fn bounds(&self, column: usize) -> (f64, f64) {
        (self.start + self.width * column as f64, self.start + self.width * (column + 1) as f64)
    }

    fn x(&self, column: usize) -> f64 {
        self.scale.place(self.bounds(column).0 / 1e9)
    }
}

/// Share of each column's time in which the consumer starved, by cause.
fn starvation(timeline: &Timeline, columns: &Columns) -> Vec<[f64; CAUSES.len()]> {
    let mut all = vec![[0.0; CAUSES.len()]; COLUMNS];
    for piece in waits(timeline) {
        let first = columns.of(piece.start);
        for (column, causes) in (first..).zip(&mut all[first..=columns.of(piece.end)]) {
            let (start, end) = columns.bounds(column);
            let common = (piece.end as f64).min(end) - (piece.start as f64).max(start);
            causes[piece.what] += (common / columns.width).clamp(0.0, 1.0);
        }
    }
    all
}

/// Layers above each other, from the bottom.
fn layers<const N: usize>(svg: &mut Svg, columns: &Columns, y: &Scale, classes: [&str; N], values: &[[f64; N]]) {
    let mut below = vec![0.0; values.len()];
    for (layer, class) in classes.into_iter().enumerate() {
        if values.iter().all(|value| value[layer] <= 0.0) {
            continue;
        }
        let above: Vec<f64> = below.iter().zip(values).map(|(below, value)| below + value[layer]).collect();
        let steps = |of: &[f64]| -> Vec<(f64, f64)> {
            let corners =
                |(at, value): (usize, &f64)| [(columns.x(at), y.place(*value)), (columns.x(at + 1), y.place(*value))];
            of.iter().enumerate().flat_map(corners).collect()
        };
        let mut points = steps(&above);
        points.extend(steps(&below).into_iter().rev());
        svg.path(class, &simplified(&points));
        below = above;
    }
}

/// Without the points between others on one level.
fn simplified(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut kept: Vec<(f64, f64)> = Vec::with_capacity(points.len());
    for point in points {
        if let [.., (_, one), (_, two)] = kept[..]
            && one == two
            && two == point.1
        {
            kept.pop();
        }
        kept.push(*point);
    }
    kept
}

/// Least, mean and most of a number in each column; a column without moments is as the one before.
fn sampled(gauges: &[Gauges], columns: &Columns, of: impl Fn(&Gauges) -> u32) -> Vec<[f64; 3]> {
    let mut sums = vec![(f64::INFINITY, 0.0, 0.0_f64, 0_u32); COLUMNS];
    for moment in gauges {
        let value = f64::from(of(moment));
        let (least, sum, most, count) = &mut sums[columns.of(moment.at_ns.min(FAR))];
        (*least, *sum, *most, *count) = (least.min(value), *sum + value, most.max(value), *count + 1);
    }
    let mut before = [0.0; 3];
    let each = sums.into_iter().map(|(least, sum, most, count)| {
        if count > 0 {
            before = [least, sum / f64::from(count), most];
        }
        before
    });
    each.collect()
}

/// The mean as a line, least and most as a band.
fn banded(svg: &mut Svg, columns: &Columns, y: &Scale, class: &str, values: &[[f64; 3]]) {
    let corners = |which: usize| {
        let each = values.iter().enumerate();
        each.flat_map(move |(at, value)| {
            [(columns.x(at), y.place(value[which])), (columns.x(at + 1), y.place(value[which]))]
        })
    };
    if values.iter().any(|[least, _, most]| least < most) {
        let mut band: Vec<(f64, f64)> = corners(2).collect();
        band.extend(corners(0).collect::<Vec<_>>().into_iter().rev());
        svg.path(&format!("{class} pale"), &simplified(&band));
    }
    svg.path(&format!("stroke s-{class}"), &simplified(&corners(1).collect::<Vec<_>>()));
}

const PANEL: f64 = 58.0;

/// Where the `panel`th panel begins.
fn panel(at: usize) -> f64 {
    18.0 + at as f64 * (PANEL + 27.0)
}

/// The title and scale of a panel, from 0 to `most`.
fn frame(svg: &mut Svg, at: usize, most: f64, unit: &str, title: &str) -> Scale {
    let scale = Scale::new(0.0, most, panel(at) + PANEL, panel(at));
    svg.text("label", LEFT, panel(at) - 6.0, title);
    svg.amount_axis(&scale, LEFT, RIGHT, unit);
    scale
}

/// Starvation and queues over the whole timeline; `None` when it is empty.
pub(super) fn over_time(timeline: &Timeline, snapshot: &Snapshot) -> Option<String> {
    let columns = Columns::new(timeline)?;
    let bottom = panel(4) + PANEL;
    let mut svg = Svg::new(WIDTH, bottom + 38.0, "Starvation, reads in flight, decode work and slots over time");
    svg.time_axis(&columns.scale, 6.0, bottom);
    starved(&mut svg, timeline, &columns);
    let gauges = &timeline.gauges;
    type Line = (fn(&Gauges) -> u32, u32, &'static str, &'static str);
    let lines: [Line; 3] = [
        (|g| g.in_flight, snapshot.storage.depth, "read", "reads in flight, up to the depth"),
        (|g| g.queued, 0, "order", "pieces of work that wait for a worker"),
        (|g| g.working, snapshot.decode.workers, "decode", "workers working, of all"),
    ];
    for (at, (of, limit, class, title)) in (1..).zip(lines) {
        let most = gauges.iter().map(of).max().unwrap_or(0).max(limit).max(1);
        let y = frame(&mut svg, at, most.into(), "", title);
        banded(&mut svg, &columns, &y, class, &sampled(gauges, &columns, of));
    }
    slots(&mut svg, gauges, &columns, snapshot.slots.count);
    Some(svg.finish())
}

/// The share of starvation: its causes above each other under an orange line.
fn starved(svg: &mut Svg, timeline: &Timeline, columns: &Columns) {
    let y = frame(svg, 0, 100.0, " %", "time in which the consumer starved, by what the awaited batch was doing");
    let shares: Vec<_> =
        starvation(timeline, columns).into_iter().map(|causes| causes.map(|cause| 100.0 * cause)).collect();
    layers(svg, columns, &y, CAUSES.map(|(class, _)| class), &shares);
    let all: Vec<[f64; 3]> = shares.iter().map(|causes| [causes.iter().sum(); 3]).collect();
    banded(svg, columns, &y, "starved", &all);
}

fn slots(svg: &mut Svg, gauges: &[Gauges], columns: &Columns, count: u32) {
    let of: [fn(&Gauges) -> u32; 4] = [|g| g.held, |g| g.full_slots, |g| g.filling_slots, |g| g.free_slots];
    let means = of.map(|of| sampled(gauges, columns, of));
    let stacked: Vec<[f64; 4]> = (0..COLUMNS).map(|at| [0, 1, 2, 3].map(|state| means[state][at][1])).collect();
    let most = stacked.iter().map(|slots| slots.iter().sum()).fold(f64::from(count.max(1)), f64::max);
    let y = frame(
        svg,
        4,
        most,
        "",
        "slots: held by the consumer (dark grey), full (light), being filled (blue), free (palest)",
    );
    layers(svg, columns, &y, ["own", "ready", "read", "free"], &stacked);
}

/// How long things took: shares in tenths of a power of ten.
pub(super) fn histogram(latency: &Latency, class: &str, what: &str) -> Option<String> {
    const EACH: f64 = 10.0;
    let bin = |ns: f64| (ns.max(1.0).log10() * EACH).floor();
    let legal = || latency.buckets.iter().filter(|(ns, count)| ns.is_finite() && *count > 0);
    let ends = legal().map(|(ns, _)| bin(*ns)).fold(None, |ends: Option<(f64, f64)>, bin| {
        Some(ends.map_or((bin, bin), |(least, most)| (least.min(bin), most.max(bin))))
    });
    let (least, most) = ends?;
    // From 1 ns to 30 years, whatever is in it, and a power of ten at least.
    let (from, to) = ((least / EACH).floor().min(17.0), ((most + 1.0) / EACH).ceil().min(18.0));
    let mut bins = vec![0.0; ((to - from) * EACH) as usize];
    let all: f64 = legal().map(|(_, count)| *count as f64).sum();
    for (ns, count) in legal() {
        let at = ((bin(*ns) - from * EACH) as usize).min(bins.len() - 1);
        bins[at] += 100.0 * *count as f64 / all;
    }
    Some(draw_histogram(latency, (class, what), (from, to), &bins))
}

fn draw_histogram(latency: &Latency, (class, what): (&str, &str), (from, to): (f64, f64), bins: &[f64]) -> String {
    let (left, right, top, bottom) = (44.0, 514.0, 26.0, 150.0);
    let mut svg = Svg::new(540.0, 186.0, what);
    svg.text("label", left, 12.0, what);
    let x = Scale::new(from, to, left, right);
    // Room above the bars for the marks' names.
    let y = Scale::new(0.0, 1.3 * bins.iter().copied().fold(0.0, f64::max), bottom, top);
    svg.amount_axis(&y, left, right, " %");
    for power in from as i32..=to as i32 {
        let at = x.place(power.into());
        svg.line("grid", (at, top), (at, bottom));
        svg.text("tick mid", at, bottom + 14.0, &decade(power));
    }
    let width = (right - left) / bins.len().max(1) as f64;
    for (at, bin) in bins.iter().enumerate() {
        let y = y.place(*bin);
        svg.rect(class, left + width * at as f64 + 0.5, y, width - 1.0, bottom - y);
    }
    svg.line("axis", (left, bottom), (right, bottom));
    let marks = [("median", latency.p50_ns), ("p99", latency.p99_ns)];
    for (name, ns) in marks.into_iter().filter(|(_, ns)| *ns > 0.0) {
        let at = x.place(ns.log10());
        svg.line("mark", (at, top - 4.0), (at, bottom));
        let anchor = if at > f64::midpoint(left, right) { "end" } else { "" };
        let shift = if anchor == "end" { -4.0 } else { 4.0 };
        let line = if name == "p99" { 18.0 } else { 0.0 };
        svg.text(&format!("tick strong {anchor}"), at + shift, top + 4.0 + line, &format!("{name} {}", time(ns)));
    }
    let note = format!("time, by powers of ten; {} in all", count(latency.count));
    svg.text("tick mid", f64::midpoint(left, right), bottom + 30.0, &note);
    svg.finish()
}

/// 10 to a power, in nanoseconds.
fn decade(power: i32) -> String {
    let unit = ["ns", "µs", "ms", "s", "ks", "Ms", "Gs"];
    let index = (power.max(0) / 3) as usize;
    format!("{} {}", ["1", "10", "100"][(power.max(0) % 3) as usize], unit[index.min(unit.len() - 1)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::BatchRecord;

    fn waited(planned_ns: u64, read_ns: u64, full_ns: u64, asked_ns: u64, got_ns: u64) -> BatchRecord {
        BatchRecord { planned_ns, read_ns, full_ns, asked_ns, got_ns, ..BatchRecord::default() }
    }

    #[test]
    fn a_wait_is_split_by_what_its_batch_did() {
        let batches = vec![
            BatchRecord { first: true, ..waited(1, 2, 3, 4, 10) },
            BatchRecord { batch: 1, ..waited(5, 30, 45, 20, 50) },
            // Planned only after it was asked for.
            BatchRecord { batch: 2, ..waited(70, 80, 81, 60, 81) },
        ];
        let timeline = Timeline { batches, ..Timeline::default() };
        assert_eq!(waits_by_cause(&timeline), [10.0, 10.0 + 10.0, 15.0 + 1.0, 0.0, 0.0, 5.0]);
        // The columns hold the same.
        let columns = Columns::new(&timeline).unwrap();
        let mut sums = [0.0; CAUSES.len()];
        for column in starvation(&timeline, &columns) {
            column.iter().zip(&mut sums).for_each(|(share, sum)| *sum += share * columns.width);
        }
        for (sum, expected) in sums.iter().zip(waits_by_cause(&timeline)) {
            assert!((sum - expected).abs() < 1e-6, "{sum} for {expected}");
        }
    }

    #[test]
    fn columns_hold_least_mean_and_most_and_an_empty_one_is_as_before() {
        let gauges: Vec<Gauges> = [(0, 1), (1, 5), (2400, 9)]
            .map(|(at_ns, in_flight)| Gauges { at_ns, in_flight, ..Gauges::default() })
            .to_vec();
        let timeline = Timeline { gauges, ..Timeline::default() };
        let columns = Columns::new(&timeline).unwrap();
        let got = sampled(&timeline.gauges, &columns, |g| g.in_flight);
        assert_eq!((got[0], got[1], got[COLUMNS - 1]), ([1.0, 3.0, 5.0], [1.0, 3.0, 5.0], [9.0; 3]));
    }

    #[test]
    fn points_on_one_level_are_two() {
        let points = [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (2.0, 3.0), (3.0, 3.0)];
        assert_eq!(simplified(&points), [(0.0, 1.0), (2.0, 1.0), (2.0, 3.0), (3.0, 3.0)]);
    }

    #[test]
    fn a_histogram_s_bars_are_shares_of_what_was_recorded() {
        let latency = Latency { count: 4, buckets: vec![(1e3, 1), (1.05e3, 2), (2e6, 1)], ..Latency::default() };
        let svg = histogram(&latency, "read", "reads").unwrap();
        assert_eq!(svg.matches("<rect").count(), 2);
        assert!(svg.contains(">1 µs<") && svg.contains(">10 ms<") && !svg.contains(">100 ms<"), "{svg}");
        assert!(histogram(&Latency::default(), "read", "reads").is_none());
        let odd = [(f64::NAN, 1), (f64::INFINITY, 2), (-1.0, u64::MAX), (f64::MAX, u64::MAX), (1e3, 0)];
        let latency = Latency { buckets: odd.to_vec(), p50_ns: f64::NAN, p99_ns: f64::MAX, ..Latency::default() };
        assert!(!histogram(&latency, "read", "reads").unwrap().contains("NaN"));
    }
}
