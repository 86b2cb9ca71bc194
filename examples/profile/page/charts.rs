//! Charts: shares of time per stage; histograms of durations.

use super::svg::{LEFT, RIGHT, Scale, Svg, WIDTH, count, percent, share, time};
use feedline::profile::{Latency, Snapshot};

/// A stage's time: the whole, and its parts with class and name. The remainder is `rest`.
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
        let late = "idle before its request (at most)";
        let parts = vec![("starved", "starved", gpu.starved_ns as f64), ("wait", late, gpu.host_late_ns as f64)];
        bars.push(Bar { label: "GPU", whole: gpu.span_ns as f64, parts, rest: "busy" });
    }
    if let Some(copy) = &snapshot.copy {
        let parts = vec![
            ("copy", "copying", copy.busy_ns as f64),
            ("decode", "operations on the device", copy.ops_ns as f64),
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
    let parts = vec![("read", "reading", storage.busy_ns as f64), ("room", "no space", storage.blocked_ns as f64)];
    bars.push(Bar { label: "storage", whole: steady, parts, rest: "nothing to read" });
    let parts = vec![("order", "planning", order.busy_ns as f64), ("room", "no slot", order.no_slot_ns as f64)];
    bars.push(Bar { label: "order", whole: steady, parts, rest: "" });
    bars
}

/// One bar per stage for its activity in the steady time.
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
    // The parts are read one after the other, so their sum may slightly exceed the whole.
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
            // Approximate width of a letter.
            if end - x > 6.6 * text.chars().count() as f64 + 8.0 {
                svg.text(&format!("on on-{class}"), x + 6.0, y + 16.0, &text);
            }
        });
    }
}

/// Histogram of durations, in bins of a tenth of a power of ten.
pub(super) fn histogram(latency: &Latency, class: &str, what: &str) -> Option<String> {
    const EACH: f64 = 10.0;
    let bin = |ns: f64| (ns.max(1.0).log10() * EACH).floor();
    let legal = || latency.buckets.iter().filter(|(ns, count)| ns.is_finite() && *count > 0);
    let ends = legal().map(|(ns, _)| bin(*ns)).fold(None, |ends: Option<(f64, f64)>, bin| {
        Some(ends.map_or((bin, bin), |(least, most)| (least.min(bin), most.max(bin))))
    });
    let (least, most) = ends?;
    // Clamped to 1 ns … 30 years, and at least a power of ten wide.
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
    // Space above the bars for the names of marks.
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

/// A power of ten, in nanoseconds.
fn decade(power: i32) -> String {
    let unit = ["ns", "µs", "ms", "s", "ks", "Ms", "Gs"];
    let index = (power.max(0) / 3) as usize;
    format!("{} {}", ["1", "10", "100"][(power.max(0) % 3) as usize], unit[index.min(unit.len() - 1)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_bars_are_shares_of_the_recorded_values() {
        let mut latency = Latency::default();
        (latency.count, latency.buckets) = (4, vec![(1e3, 1), (1.05e3, 2), (2e6, 1)]);
        let svg = histogram(&latency, "read", "reads").unwrap();
        assert_eq!(svg.matches("<rect").count(), 2);
        assert!(svg.contains(">1 µs<") && svg.contains(">10 ms<") && !svg.contains(">100 ms<"), "{svg}");
        assert!(histogram(&Latency::default(), "read", "reads").is_none());
        let odd = [(f64::NAN, 1), (f64::INFINITY, 2), (-1.0, u64::MAX), (f64::MAX, u64::MAX), (1e3, 0)];
        (latency.buckets, latency.p50_ns, latency.p99_ns) = (odd.to_vec(), f64::NAN, f64::MAX);
        assert!(!histogram(&latency, "read", "reads").unwrap().contains("NaN"));
    }
}
