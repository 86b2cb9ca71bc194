//! A timeline as a trace: JSON in the format of Chrome's trace events, which <https://ui.perfetto.dev> opens.
//!
//! ```text
//! process  <loader> rank <n>
//!   consumer        │ starved │ own work │ starved │ …
//!   batches, lane 1 │ batch 0 ──────────────────────│ batch 4 …     one slice a batch, its phases inside of it
//!                   │ read │ decode │ ready │ held  │
//!   batches, lane 2 │   batch 1 ────────────────────│
//!   copy stream     │ copy │ copy │ …                              one track for each thread of the loader and each stream
//!   decode worker 0 │ decode │ decode │ look up │ …
//! counters          reads in flight, pieces queued, workers working, slots (free, filling, full, held)
//! ```
//!
//! Limits: a consumer's wait is shown from `next()` on. Threads remember their last thousand spans, and batches their own
//! last thousand: the tracks may begin at different times. Slices of a track are disjoint or inside of each other; events are sorted by time. Times are microseconds
//! with three decimals, so no nanosecond is lost.

use super::Names;
use super::ways::{self, Doing, Done, FAR, Stretch, Way};
use crate::meter::{Gauges, Snapshot, Timeline, Work};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::fmt::{self, Write};

/// The consumer's thread id; lanes follow.
const CONSUMER: usize = 1;
const LANES: usize = 2;

/// A trace: JSON in the format of Chrome's trace events, to be opened with <https://ui.perfetto.dev> or `chrome://tracing`.
/// About 1 KB per batch.
///
/// ```
/// use feedline::profile::{Names, Snapshot, Timeline, trace};
///
/// let text = trace(&Timeline::default(), &Snapshot::default(), Names::new("train", 0));
/// assert!(text.contains("traceEvents"));
/// ```
pub fn trace(timeline: &Timeline, snapshot: &Snapshot, names: Names<'_>) -> String {
    let mut out = String::new();
    // A string takes everything.
    let _ = write_trace(&mut out, timeline, snapshot, names);
    out
}

fn write_trace(out: &mut String, timeline: &Timeline, snapshot: &Snapshot, names: Names<'_>) -> fmt::Result {
    let (ways, lanes) = ways::ways(&timeline.batches, snapshot.at_ns);
    let stretches = ways::consumer(timeline);
    let pid = u64::from(names.rank) + 1;
    write!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[", about(timeline, snapshot, names))?;
    let tracks = ways::tracks(timeline);
    for (at, event) in metadata(pid, lanes, &tracks, names).iter().enumerate() {
        write!(out, "{}\n{event}", if at > 0 { "," } else { "" })?;
    }
    for event in events(&ways, &stretches, &tracks, timeline) {
        out.push_str(",\n");
        event.write(out, pid, lanes)?;
    }
    out.push_str("\n]}\n");
    Ok(())
}

/// What a trace says about itself.
fn about(timeline: &Timeline, snapshot: &Snapshot, names: Names<'_>) -> Value {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let mut about = json!({
        "made by": concat!("feedline ", env!("CARGO_PKG_VERSION")),
        "loader": names.loader,
        "rank": names.rank,
        "batches shown": timeline.batches.len(),
        "batches forgotten before": timeline.forgotten,
        "steady s": seconds(snapshot.steady_ns),
        "starved s": seconds(snapshot.consumer.waited_ns),
    });
    if let (Some(gpu), Some(about)) = (&snapshot.consumer.gpu, about.as_object_mut()) {
        about.insert("gpu steps measured".into(), gpu.steps.into());
        about.insert("gpu starved s".into(), seconds(gpu.starved_ns).into());
        about.insert("gpu idle before a batch was asked for, at most, s".into(), seconds(gpu.host_late_ns).into());
    }
    about
}

/// Names of the process and its threads, in the order in which they are shown.
fn metadata(pid: u64, lanes: usize, tracks: &[Done<'_>], names: Names<'_>) -> Vec<Value> {
    let meta = |name: &str, tid: usize, key: &str, value: Value| json!({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {key: value}});
    let process = format!("feedline {} rank {}", names.loader, names.rank);
    let mut all = vec![
        meta("process_name", 0, "name", process.into()),
        meta("process_sort_index", 0, "sort_index", names.rank.into()),
    ];
    let threads = std::iter::once("consumer".to_string()).chain((1..=lanes).map(|n| format!("batches, lane {n}")));
    let threads = threads.chain(tracks.iter().map(|(name, _)| name.to_string()));
    for (tid, name) in (CONSUMER..).zip(threads) {
        all.push(meta("thread_name", tid, "name", name.into()));
        all.push(meta("thread_sort_index", tid, "sort_index", tid.into()));
    }
    all
}

/// An event that has a time.
#[derive(Clone, Copy)]
enum Event<'a> {
    Consumer(&'a Stretch<'a>),
    Batch(&'a Way<'a>),
    Phase(&'a Way<'a>, usize),
    /// Of the track with this number.
    Work(usize, &'a ways::Span<Work>),
    Gauges(&'a Gauges),
}

/// All of them by time; of slices that begin at once the outer first.
fn events<'a>(
    ways: &'a [Way<'a>],
    stretches: &'a [Stretch<'a>],
    tracks: &'a [Done<'a>],
    timeline: &'a Timeline,
) -> Vec<Event<'a>> {
    let mut all: Vec<Event<'_>> = stretches.iter().map(Event::Consumer).collect();
    for way in ways {
        all.push(Event::Batch(way));
        all.extend((0..way.phases.len()).map(|phase| Event::Phase(way, phase)));
    }
    for (at, (_, spans)) in tracks.iter().enumerate() {
        all.extend(spans.iter().map(|span| Event::Work(at, span)));
    }
    all.extend(timeline.gauges.iter().map(Event::Gauges));
    // Stable: a batch of one phase stands before that phase.
    all.sort_by_key(|event| {
        let (start, end) = event.span();
        (start, Reverse(end))
    });
    all
}

impl Event<'_> {
    fn span(&self) -> (u64, u64) {
        match self {
            Self::Consumer((span, _)) => (span.start, span.end),
            Self::Batch(way) => (way.start, way.end),
            Self::Phase(way, phase) => (way.phases[*phase].start, way.phases[*phase].end),
            Self::Work(_, span) => (span.start, span.end),
            Self::Gauges(gauges) => (gauges.at_ns.min(FAR), gauges.at_ns.min(FAR)),
        }
    }

    /// As JSON. All text in it is ours, so nothing is escaped.
    fn write(&self, out: &mut String, pid: u64, lanes: usize) -> fmt::Result {
        let (start, end) = self.span();
        let slice = |out: &mut String, tid: usize, name: fmt::Arguments<'_>| {
            write!(
                out,
                r#"{{"ph":"X","pid":{pid},"tid":{tid},"ts":{},"dur":{},"name":"{name}""#,
                Us(start),
                Us(end - start)
            )
        };
        match self {
            Self::Consumer((span, record)) => {
                slice(out, CONSUMER, format_args!("{}", doing(span.what)))?;
                // Red where the viewer takes colours.
                let colour = if span.what == Doing::Starved { r#","cname":"terrible""# } else { "" };
                write!(out, r#"{colour},"args":{{"epoch":{},"next batch":{}}}}}"#, record.epoch, record.batch)
            }
            Self::Batch(way) => {
                let record = way.record;
                slice(out, LANES + way.lane, format_args!("batch {}", record.batch))?;
                let (epoch, rows, sequence) = (record.epoch, record.rows, record.sequence);
                write!(out, r#","args":{{"epoch":{epoch},"rows":{rows},"sequence":{sequence}}}}}"#)
            }
            Self::Phase(way, phase) => {
                slice(out, LANES + way.lane, format_args!("{}", way.phases[*phase].what.name()))?;
                write!(out, r#","args":{{"batch":{}}}}}"#, way.record.batch)
            }
            Self::Work(track, span) => {
                slice(out, LANES + lanes + track, format_args!("{}", span.what))?;
                let colour = if span.what == Work::Starved { r#","cname":"terrible""# } else { "" };
                write!(out, "{colour}}}")
            }
            Self::Gauges(gauges) => counters(out, pid, start, gauges),
        }
    }
}

fn doing(what: Doing) -> &'static str {
    match what {
        Doing::Starved => "starved: waits for a batch",
        Doing::First => "waits for the first batch",
        Doing::Own => "own work",
        Doing::Between => "between iterators",
    }
}

fn counters(out: &mut String, pid: u64, at: u64, gauges: &Gauges) -> fmt::Result {
    let Gauges { in_flight, queued, working, free_slots, filling_slots, full_slots, held, .. } = gauges;
    let one = |out: &mut String, name: &str, args: fmt::Arguments<'_>| {
        write!(out, r#"{{"ph":"C","pid":{pid},"ts":{},"name":"{name}","args":{{{args}}}}}"#, Us(at))
    };
    one(out, "reads in flight", format_args!(r#""reads":{in_flight}"#))?;
    out.push_str(",\n");
    one(out, "pieces queued for decode", format_args!(r#""pieces":{queued}"#))?;
    out.push_str(",\n");
    one(out, "workers working", format_args!(r#""workers":{working}"#))?;
    out.push_str(",\n");
    let slots = format_args!(r#""held":{held},"full":{full_slots},"filling":{filling_slots},"free":{free_slots}"#);
    one(out, "slots", slots)
}

/// Nanoseconds as microseconds, exactly.
struct Us(u64);

impl fmt::Display for Us {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::ways::tests::hostile;
    use super::*;
    use crate::meter::BatchRecord;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn parsed(timeline: &Timeline, names: Names<'_>) -> Value {
        serde_json::from_str(&trace(timeline, &Snapshot::default(), names)).unwrap()
    }

    /// (track, start, end) in nanoseconds of each slice, in the order of the file.
    fn slices(trace: &Value) -> Vec<(u64, u64, u64)> {
        let ns = |event: &Value, key: &str| (event[key].as_f64().unwrap() * 1000.0).round() as u64;
        let events = trace["traceEvents"].as_array().unwrap().iter();
        events
            .filter(|event| event["ph"] == "X")
            .map(|event| (event["tid"].as_u64().unwrap(), ns(event, "ts"), ns(event, "ts") + ns(event, "dur")))
            .collect()
    }

    #[test]
    fn times_keep_their_nanoseconds() {
        let table =
            [(0, "0.000"), (1, "0.001"), (999, "0.999"), (1_234_567, "1234.567"), (u64::MAX, "18446744073709551.615")];
        for (ns, expected) in table {
            assert_eq!(Us(ns).to_string(), expected);
        }
    }

    #[test]
    fn a_batch_is_a_slice_with_its_phases_inside_and_a_wait_is_called_starved() {
        let at = |ms: u64| ms * 1_000_000;
        let record = |batch: u64, shift: u64| BatchRecord {
            sequence: batch,
            batch,
            rows: 8,
            first: batch == 0,
            planned_ns: at(1 + shift),
            read_ns: at(4 + shift),
            full_ns: at(9 + shift),
            asked_ns: at(3 + shift),
            got_ns: at(10 + shift),
            dropped_ns: at(12 + shift),
            ..BatchRecord::default()
        };
        let gauges = vec![Gauges { at_ns: at(2), in_flight: 3, ..Gauges::default() }];
        let timeline = Timeline { batches: vec![record(0, 0), record(1, 9)], gauges, ..Timeline::default() };
        let trace = parsed(&timeline, Names::new("train", 1));
        let events = trace["traceEvents"].as_array().unwrap();
        let got: Vec<String> = events
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| {
                format!("{} {} +{} {}", event["tid"], event["ts"], event["dur"], event["name"].as_str().unwrap())
            })
            .collect();
        let expected = [
            "2 1000.0 +11000.0 batch 0",
            "2 1000.0 +3000.0 read",
            "1 3000.0 +7000.0 waits for the first batch",
            "2 4000.0 +5000.0 decode",
            "2 9000.0 +1000.0 ready",
            "3 10000.0 +11000.0 batch 1",
            "3 10000.0 +3000.0 read",
            "1 10000.0 +2000.0 own work",
            "2 10000.0 +2000.0 held",
            "1 12000.0 +7000.0 starved: waits for a batch",
            "3 13000.0 +5000.0 decode",
            "3 18000.0 +1000.0 ready",
            "3 19000.0 +2000.0 held",
        ];
        assert_eq!(got, expected);
        let named: Vec<&Value> =
            events.iter().filter(|event| event["name"] == "thread_name").map(|event| &event["args"]["name"]).collect();
        assert_eq!(named, ["consumer", "batches, lane 1", "batches, lane 2"]);
        let counted: Vec<&Value> =
            events.iter().filter(|event| event["ph"] == "C").map(|event| &event["args"]).collect();
        assert_eq!(counted.len(), 4);
        assert_eq!(counted[0]["reads"], 3);
        assert!(events.iter().all(|event| event["pid"] == 2));
    }

    #[test]
    fn any_name_is_legal() {
        for loader in ["", "\"}]", "a\\\n\t\u{0}\u{1f}", "</script>", "zażółć 🚚", "\u{2028}\u{feff}"] {
            let trace = parsed(&Timeline::default(), Names::new(loader, u32::MAX));
            assert_eq!(trace["otherData"]["loader"], loader);
            assert_eq!(trace["traceEvents"][0]["args"]["name"], format!("feedline {loader} rank {}", u32::MAX));
        }
    }

    proptest! {
        #[test]
        fn slices_are_disjoint_or_nested_and_events_sorted_whatever_the_records_say(timeline in hostile(), at_ns in any::<u64>()) {
            let snapshot = Snapshot { at_ns, ..Snapshot::default() };
            let (ways, _) = ways::ways(&timeline.batches, at_ns);
            let (stretches, tracks) = (ways::consumer(&timeline), ways::tracks(&timeline));
            let mut last = 0;
            let mut open: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
            for event in events(&ways, &stretches, &tracks, &timeline) {
                let (start, end) = event.span();
                prop_assert!(start >= last && end >= start && end <= FAR);
                last = start;
                let track = match event {
                    Event::Consumer(_) => CONSUMER,
                    Event::Batch(way) | Event::Phase(way, _) => LANES + way.lane,
                    Event::Work(at, _) => 1000 + at,
                    Event::Gauges(_) => continue,
                };
                let open = open.entry(track).or_default();
                while open.last().is_some_and(|outer| *outer <= start && *outer < end) { open.pop(); }
                prop_assert!(open.last().is_none_or(|outer| end <= *outer), "overlap on track {}", track);
                prop_assert!(open.len() < 2 || track != CONSUMER);
                open.push(end);
            }
            let text = trace(&timeline, &snapshot, Names::default());
            prop_assert!(serde_json::from_str::<Value>(&text).is_ok());
        }

        #[test]
        fn what_is_written_is_in_order_with_lengths_that_are_not_negative(timeline in hostile()) {
            let mut last = 0;
            for (_, start, end) in slices(&parsed(&timeline, Names::default())) {
                prop_assert!(start >= last && end >= start);
                last = start;
            }
        }
    }
}
