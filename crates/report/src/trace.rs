//! A timeline as a trace: JSON in the format of Chrome's trace events, which
//! <https://ui.perfetto.dev> opens.
//!
//! ```text
//! process  <loader> rank <n>
//!   batch           │ batch ────────────────────────│              one asynchronous slice per batch, its phases inside
//!                   │ read │ decode │ ready │ held  │              the viewer gives overlapping batches rows of their own
//!   consumer        │ starved │ own work │ starved │ …             one track per thread of the loader and per stream
//!   copy stream     │ copy │ copy │ …
//!   decode worker 0 │ decode │ decode │ from cache or memory │ …
//! counters          reads in flight, pieces queued, workers working, slots (free, filling, full, held)
//! ```
//!
//! Limits: the trace shows a wait from the call of `next()` on. The loader keeps the last 1024
//! batches, and the last 1024 spans of each thread, so the tracks can begin at different times.
//! Times are microseconds with three decimals: exact to the nanosecond.
//!
//! Even if records contradict themselves, a phase ends no earlier than it begins, slices of a track
//! are disjoint or nested, and all times end before [`FAR`].

use super::Names;
use crate::meter::{BatchRecord, Gauges, Snapshot, Span, Timeline, Work};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::fmt;
use std::fmt::Write;

/// The consumer's thread id; the tracks of a timeline follow.
const CONSUMER: usize = 1;
/// The latest moment shown: 146 years. Viewers count signed nanoseconds and can still add two of
/// these.
const FAR: u64 = 1 << 62;
/// The consumer waits in `next()`, not for the first batch of an iterator.
const STARVED: &str = "starved: waits for a batch";

/// A trace: JSON in the format of Chrome's trace events, to be opened with
/// <https://ui.perfetto.dev> or `chrome://tracing`. Less than 2 KB per batch.
///
/// ```
/// # use feedline_report::{Names, meter::{Snapshot, Timeline}, trace};
/// let text = trace(&Timeline::default(), &Snapshot::default(), Names::new("train", 0));
/// assert!(text.contains("traceEvents"));
/// ```
pub fn trace(timeline: &Timeline, snapshot: &Snapshot, names: Names<'_>) -> String {
    let about = about(timeline, snapshot, names);
    let out = format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{about},\"traceEvents\":[");
    let mut text = Text {
        out,
        pid: u64::from(names.rank) + 1,
    };
    text.names(
        &timeline
            .tracks
            .iter()
            .map(|track| track.name.as_str())
            .collect::<Vec<_>>(),
        names,
    );
    for record in &timeline.batches {
        text.batch(record, snapshot.at_ns);
    }
    for (doing, start, end, record) in consumer(&timeline.batches) {
        let args = format_args!(
            r#","args":{{"epoch":{},"next batch":{}}}"#,
            record.epoch, record.batch
        );
        text.slice(CONSUMER, doing, doing == STARVED, start, end, args);
    }
    for (tid, track) in (CONSUMER + 1..).zip(&timeline.tracks) {
        for Span {
            begin_ns,
            end_ns,
            what,
        } in nested(&track.spans)
        {
            text.slice(
                tid,
                what,
                what == Work::Starved,
                begin_ns,
                end_ns,
                format_args!(""),
            );
        }
    }
    timeline
        .gauges
        .iter()
        .for_each(|gauges| text.counters(gauges));
    text.out + "\n]}\n"
}

/// The trace's own description.
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
        about.insert(
            "gpu time of these steps, s".into(),
            seconds(gpu.span_ns).into(),
        );
        about.insert(
            "gpu steps whose request came to an idle stream".into(),
            gpu.dry_steps.into(),
        );
        about.insert("gpu starved s".into(), seconds(gpu.starved_ns).into());
        about.insert(
            "gpu idle by the program's own code, s".into(),
            gpu.host_late_ns().map(seconds).into(),
        );
    }
    about
}

/// A trace that is being written.
struct Text {
    out: String,
    pid: u64,
}

impl Text {
    /// One event. `name` is ours, so it is not escaped.
    fn event(&mut self, phase: char, name: impl fmt::Display, rest: fmt::Arguments<'_>) {
        let comma = if self.out.ends_with('[') { "" } else { "," };
        let pid = self.pid;
        // Writing to a string cannot fail.
        let _ = write!(
            self.out,
            "{comma}\n{{\"ph\":\"{phase}\",\"name\":\"{name}\",\"pid\":{pid}{rest}}}"
        );
    }

    /// Names of the process and its threads, in the order in which they are shown.
    fn names(&mut self, tracks: &[&str], names: Names<'_>) {
        let mut meta = |tid: usize, of: &str, name: &str, place: Value| {
            let name = Value::from(name);
            self.event(
                'M',
                format_args!("{of}_name"),
                format_args!(r#","tid":{tid},"args":{{"name":{name}}}"#),
            );
            let args = format_args!(r#","tid":{tid},"args":{{"sort_index":{place}}}"#);
            self.event('M', format_args!("{of}_sort_index"), args);
        };
        meta(
            0,
            "process",
            &format!("feedline {} rank {}", names.loader, names.rank),
            names.rank.into(),
        );
        for (tid, name) in (CONSUMER..).zip(std::iter::once(&"consumer").chain(tracks)) {
            meta(tid, "thread", name, tid.into());
        }
    }

    /// A slice of a thread's track; red if the viewer supports colours.
    fn slice(
        &mut self,
        tid: usize,
        what: impl fmt::Display,
        red: bool,
        start: u64,
        end: u64,
        args: fmt::Arguments<'_>,
    ) {
        let colour = if red { r#","cname":"terrible""# } else { "" };
        let length = Us(end - start);
        let start = Us(start);
        self.event(
            'X',
            what,
            format_args!(r#","tid":{tid},"ts":{start},"dur":{length}{colour}{args}"#),
        );
    }

    /// A batch and its phases, as asynchronous slices with one id. The id contains the process, so
    /// that traces of several ranks can be merged. All batches have one name: viewers show slices
    /// of one name together.
    fn batch(&mut self, record: &BatchRecord, now: u64) {
        let phases = phases(record, now);
        let (Some((_, start, _)), Some((_, _, end))) = (phases.first(), phases.last()) else {
            return;
        };
        let BatchRecord {
            sequence,
            epoch,
            batch,
            rows,
            ..
        } = record;
        let pid = self.pid;
        let mut edge = |edge: char, name: &str, at: u64, args: fmt::Arguments<'_>| {
            self.event(
                edge,
                name,
                format_args!(
                    r#","cat":"batch","id":"{pid}.{sequence}","ts":{}{args}"#,
                    Us(at)
                ),
            )
        };
        let args = format_args!(r#","args":{{"batch":{batch},"epoch":{epoch},"rows":{rows}}}"#);
        edge('b', "batch", *start, args);
        for (name, start, end) in &phases {
            edge('b', name, *start, format_args!(""));
            edge('e', name, *end, format_args!(""));
        }
        edge('e', "batch", *end, format_args!(""));
    }

    fn counters(&mut self, gauges: &Gauges) {
        let Gauges {
            at_ns,
            in_flight,
            queued,
            working,
            free_slots,
            filling_slots,
            full_slots,
            held,
        } = gauges;
        let mut one = |name: &str, args: fmt::Arguments<'_>| {
            self.event(
                'C',
                name,
                format_args!(r#","ts":{},"args":{{{args}}}"#, Us((*at_ns).min(FAR))),
            );
        };
        one("reads in flight", format_args!(r#""reads":{in_flight}"#));
        one(
            "pieces queued for decode",
            format_args!(r#""pieces":{queued}"#),
        );
        one("workers working", format_args!(r#""workers":{working}"#));
        let slots = format_args!(
            r#""held":{held},"full":{full_slots},"filling":{filling_slots},"free":{free_slots}"#
        );
        one("slots", slots);
    }
}

/// Name, start and end of a batch's phases: adjacent, none of them empty. The consumer holds a
/// batch without a drop until `now`. A record without a beginning has no phases.
fn phases(record: &BatchRecord, now: u64) -> Vec<(&'static str, u64, u64)> {
    let turn = if record.copied_ns > 0 {
        "copy, then ready"
    } else {
        "ready"
    };
    let held = match (record.got_ns, record.dropped_ns) {
        (0, _) => 0,
        (_, 0) => now,
        (_, dropped) => dropped,
    };
    let ends = [
        ("read", record.read_ns),
        ("decode", record.full_ns),
        ("waits for copy", record.copied_ns),
        (turn, record.got_ns),
        ("held", held),
    ];
    let mut at = record.planned_ns.min(FAR);
    let phases = ends.into_iter().map(|(name, end)| {
        let start = at;
        at = end.clamp(start, FAR);
        (name, start, at)
    });
    phases
        .filter(|(_, start, end)| record.planned_ns > 0 && end > start)
        .collect()
}

/// The consumer's periods in order (name, start, end, batch), none of them empty: each wait for a
/// batch, and before it the time since the previous batch.
fn consumer(batches: &[BatchRecord]) -> Vec<(&'static str, u64, u64, &BatchRecord)> {
    let mut records: Vec<&BatchRecord> =
        batches.iter().filter(|record| record.got_ns > 0).collect();
    records.sort_by_key(|record| (record.got_ns, record.sequence));
    let mut all = Vec::with_capacity(2 * records.len());
    let mut since = None;
    for record in records {
        let got = record.got_ns.min(FAR);
        let asked = if record.asked_ns == 0 {
            got
        } else {
            record.asked_ns.min(got)
        };
        let asked = asked.max(since.unwrap_or(0));
        let (pause, wait) = match record.first {
            true => ("between iterators", "waits for the first batch"),
            false => ("own work", STARVED),
        };
        all.push((pause, since.unwrap_or(asked), asked, record));
        all.push((wait, asked, got, record));
        since = Some(got);
    }
    all.retain(|(_, start, end, _)| end > start);
    all
}

/// Spans in order of time, disjoint or nested, none of them empty. A span that extends past its
/// enclosing span is cut off. A worker's spans can overlap in this way, because short gaps between
/// spans are closed.
fn nested(spans: &[Span]) -> Vec<Span> {
    let mut all: Vec<Span> = spans
        .iter()
        .map(|span| Span::new(span.begin_ns.min(FAR), span.end_ns.min(FAR), span.what))
        .filter(|span| span.end_ns > span.begin_ns)
        .collect();
    all.sort_by_key(|span| (span.begin_ns, Reverse(span.end_ns)));
    let mut around: Vec<u64> = Vec::new();
    for span in &mut all {
        while around.last().is_some_and(|end| *end <= span.begin_ns) {
            around.pop();
        }
        span.end_ns = around
            .last()
            .map_or(span.end_ns, |end| span.end_ns.min(*end));
        around.push(span.end_ns);
    }
    all
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
    use super::*;
    use crate::meter::Track;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn parsed(timeline: &Timeline, names: Names<'_>) -> Value {
        serde_json::from_str(&trace(timeline, &Snapshot::default(), names)).unwrap()
    }

    #[test]
    fn times_keep_their_nanoseconds() {
        let table = [
            (0, "0.000"),
            (1, "0.001"),
            (999, "0.999"),
            (1_234_567, "1234.567"),
            (u64::MAX, "18446744073709551.615"),
        ];
        for (ns, expected) in table {
            assert_eq!(Us(ns).to_string(), expected);
        }
    }

    #[test]
    fn a_batch_holds_its_phases_and_a_wait_is_called_starved() {
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
        let gauges = vec![Gauges {
            at_ns: at(2),
            in_flight: 3,
            ..Gauges::default()
        }];
        let timeline = Timeline {
            batches: vec![record(0, 0), record(1, 9)],
            gauges,
            ..Timeline::default()
        };
        let trace = parsed(&timeline, Names::new("train", 1));
        let events = trace["traceEvents"].as_array().unwrap();
        let shown = |event: &&Value| ["b", "e", "X"].contains(&event["ph"].as_str().unwrap());
        let line = |event: &Value| {
            let whose = if event["ph"] == "X" {
                format!("+{}", event["dur"])
            } else {
                event["id"].to_string()
            };
            format!("{} {} {whose} {}", event["ph"], event["ts"], event["name"]).replace('"', "")
        };
        let expected = [
            "b 1000.0 2.0 batch",
            "b 1000.0 2.0 read",
            "e 4000.0 2.0 read",
            "b 4000.0 2.0 decode",
            "e 9000.0 2.0 decode",
            "b 9000.0 2.0 ready",
            "e 10000.0 2.0 ready",
            "b 10000.0 2.0 held",
            "e 12000.0 2.0 held",
            "e 12000.0 2.0 batch",
            "b 10000.0 2.1 batch",
            "b 10000.0 2.1 read",
            "e 13000.0 2.1 read",
            "b 13000.0 2.1 decode",
            "e 18000.0 2.1 decode",
            "b 18000.0 2.1 ready",
            "e 19000.0 2.1 ready",
            "b 19000.0 2.1 held",
            "e 21000.0 2.1 held",
            "e 21000.0 2.1 batch",
            "X 3000.0 +7000.0 waits for the first batch",
            "X 10000.0 +2000.0 own work",
            "X 12000.0 +7000.0 starved: waits for a batch",
        ];
        assert_eq!(
            events.iter().filter(shown).map(line).collect::<Vec<_>>(),
            expected
        );
        let begun = events
            .iter()
            .rfind(|event| event["name"] == "batch" && event["ph"] == "b")
            .unwrap();
        assert_eq!(begun["args"], json!({"batch": 1, "epoch": 0, "rows": 8}));
        let named = |event: &&Value| event["name"] == "thread_name";
        let named: Vec<&Value> = events
            .iter()
            .filter(named)
            .map(|event| &event["args"]["name"])
            .collect();
        assert_eq!(named, ["consumer"]);
        let counted: Vec<&Value> = events
            .iter()
            .filter(|event| event["ph"] == "C")
            .map(|event| &event["args"])
            .collect();
        assert_eq!(counted.len(), 4);
        assert_eq!(counted[0]["reads"], 3);
        assert!(events.iter().all(|event| event["pid"] == 2));
    }

    #[test]
    fn any_name_is_legal() {
        for loader in [
            "",
            "\"}]",
            "a\\\n\t\u{0}\u{1f}",
            "</script>",
            "zażółć 🚚",
            "\u{2028}\u{feff}",
        ] {
            let trace = parsed(&Timeline::default(), Names::new(loader, u32::MAX));
            assert_eq!(trace["otherData"]["loader"], loader);
            assert_eq!(
                trace["traceEvents"][0]["args"]["name"],
                format!("feedline {loader} rank {}", u32::MAX)
            );
        }
    }

    #[test]
    fn the_consumer_waits_and_works_in_turn() {
        let record = |planned_ns, asked_ns, got_ns| BatchRecord {
            planned_ns,
            asked_ns,
            got_ns,
            ..BatchRecord::default()
        };
        let batches = [
            BatchRecord {
                first: true,
                ..record(1, 10, 30)
            },
            record(2, 40, 45),
            record(41, 60, 70),
            BatchRecord {
                first: true,
                ..record(90, 95, 99)
            },
        ];
        let all = consumer(&batches);
        let got: Vec<_> = all
            .iter()
            .map(|(what, start, end, of)| (*what, *start, *end, of.planned_ns))
            .collect();
        let first = "waits for the first batch";
        let between = "between iterators";
        let expected = [
            (first, 10, 30, 1),
            ("own work", 30, 40, 2),
            (STARVED, 40, 45, 2),
            ("own work", 45, 60, 41),
            (STARVED, 60, 70, 41),
            (between, 70, 95, 90),
            (first, 95, 99, 90),
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn spans_stay_inside_others_or_are_cut_off() {
        let spans = [(5, 8), (1, 10), (12, 12), (20, 30), (25, 40)]
            .map(|(begin, end)| Span::new(begin, end, Work::Decode));
        let got: Vec<_> = nested(&spans)
            .iter()
            .map(|span| (span.begin_ns, span.end_ns))
            .collect();
        assert_eq!(got, [(1, 10), (5, 8), (20, 30), (25, 30)]);
    }

    #[test]
    fn a_phase_that_did_not_happen_is_not_shown() {
        let all = BatchRecord {
            planned_ns: 1,
            read_ns: 2,
            full_ns: 4,
            copied_ns: 7,
            got_ns: 11,
            dropped_ns: 16,
            ..BatchRecord::default()
        };
        let read = "read";
        let decode = "decode";
        let queue = "waits for copy";
        let copy = "copy, then ready";
        let ready = "ready";
        let held = "held";
        let table = [
            (
                all,
                vec![(read, 1), (decode, 2), (queue, 3), (copy, 4), (held, 5)],
            ),
            (
                BatchRecord {
                    copied_ns: 0,
                    ..all
                },
                vec![(read, 1), (decode, 2), (ready, 7), (held, 5)],
            ),
            (
                BatchRecord { read_ns: 0, ..all },
                vec![(decode, 3), (queue, 3), (copy, 4), (held, 5)],
            ),
            // Still held, at 100.
            (
                BatchRecord {
                    dropped_ns: 0,
                    ..all
                },
                vec![(read, 1), (decode, 2), (queue, 3), (copy, 4), (held, 89)],
            ),
            (
                BatchRecord {
                    got_ns: 0,
                    dropped_ns: 0,
                    ..all
                },
                vec![(read, 1), (decode, 2), (queue, 3)],
            ),
            // The last read was seen after the last row: then decoding takes no time.
            (
                BatchRecord { read_ns: 5, ..all },
                vec![(read, 4), (queue, 2), (copy, 4), (held, 5)],
            ),
            (
                BatchRecord {
                    planned_ns: 0,
                    ..all
                },
                vec![],
            ),
        ];
        for (record, expected) in table {
            let got: Vec<_> = phases(&record, 100)
                .iter()
                .map(|(name, start, end)| (*name, end - start))
                .collect();
            assert_eq!(got, expected, "{record:?}");
        }
    }

    /// Impossible moments among some plausible ones.
    fn moment() -> impl Strategy<Value = u64> {
        prop_oneof![3 => 0_u64..50, 2 => 0_u64..1 << 40, 1 => Just(0), 1 => any::<u64>(), 1 => Just(u64::MAX)]
    }

    prop_compose! {
        fn any_record()(at in prop::array::uniform7(moment()), first in any::<bool>(), sequence in any::<u64>(), epoch in 0_u64..3, batch in moment(), rows in any::<u32>()) -> BatchRecord {
            let [planned_ns, read_ns, full_ns, copied_ns, asked_ns, got_ns, dropped_ns] = at;
            BatchRecord { sequence, epoch, batch, rows, planned_ns, read_ns, full_ns, copied_ns, first, asked_ns, got_ns, dropped_ns, arrived_ns: 0 }
        }
    }

    prop_compose! {
        fn gauges()(at_ns in moment(), n in prop::array::uniform7(prop_oneof![0_u32..9, any::<u32>()])) -> Gauges {
            let [in_flight, queued, working, free_slots, filling_slots, full_slots, held] = n;
            Gauges { at_ns, in_flight, queued, working, free_slots, filling_slots, full_slots, held }
        }
    }

    prop_compose! {
        fn any_span()(begin_ns in moment(), end_ns in moment(), step in any::<bool>()) -> Span {
            Span::new(begin_ns, end_ns, if step { Work::Step } else { Work::Decode })
        }
    }

    prop_compose! {
        fn track()(name in ".*", spans in prop::collection::vec(any_span(), 0..20)) -> Track {
            let mut track = Track::default();
            (track.name, track.spans) = (name, spans);
            track
        }
    }

    prop_compose! {
        fn hostile()(tracks in prop::collection::vec(track(), 0..4), batches in prop::collection::vec(any_record(), 0..40), gauges in prop::collection::vec(gauges(), 0..40), forgotten in moment()) -> Timeline {
            Timeline { batches, gauges, tracks, forgotten }
        }
    }

    proptest! {
        #[test]
        fn slices_are_disjoint_or_nested_for_any_records(timeline in hostile(), now in moment()) {
            for record in &timeline.batches {
                let phases = phases(record, now);
                prop_assert!(phases.windows(2).all(|pair| pair[0].2 == pair[1].1));
                prop_assert!(phases.iter().all(|(_, start, end)| start < end && *end <= FAR));
            }
            let mut at = 0;
            for (_, start, end, _) in consumer(&timeline.batches) {
                prop_assert!(start >= at && end > start && end <= FAR);
                at = end;
            }
            for track in &timeline.tracks {
                let mut last = 0;
                let mut open = Vec::new();
                for Span { begin_ns, end_ns, .. } in nested(&track.spans) {
                    prop_assert!(begin_ns >= last && end_ns > begin_ns && end_ns <= FAR);
                    last = begin_ns;
                    while open.last().is_some_and(|outer| *outer <= begin_ns) { open.pop(); }
                    prop_assert!(open.last().is_none_or(|outer| end_ns <= *outer));
                    open.push(end_ns);
                }
            }
        }

        #[test]
        fn each_asynchronous_slice_ends_after_it_begins(timeline in hostile()) {
            let trace = parsed(&timeline, Names::default());
            let mut open: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
            for event in trace["traceEvents"].as_array().unwrap() {
                let of = || (event["name"].to_string(), event["ts"].as_f64().unwrap());
                let open = open.entry(event["id"].to_string()).or_default();
                match event["ph"].as_str().unwrap() {
                    "b" => open.push(of()),
                    "e" => {
                        let (name, start) = open.pop().unwrap();
                        let (ended, end) = of();
                        prop_assert!(name == ended && start <= end);
                    }
                    _ => {}
                }
            }
            prop_assert!(open.values().all(Vec::is_empty), "{open:?}");
        }
    }
}
