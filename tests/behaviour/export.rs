//! A loader's measurements as a trace, for loaders starved by one stage or by none.

use crate::common::answer;
use crate::common::synthetic::{MACHINES, measured};
use feedline::Loader;
use feedline::dataset::Records;
use feedline::profile::snapshot::{Timeline, Work};
use feedline::profile::{Names, trace};
use serde_json::Value;
use std::time::Duration;

#[test]
fn a_trace_holds_every_batch_and_wait_of_the_snapshot() {
    for machine in &MACHINES {
        let (snapshot, timeline) = measured(machine, 500);
        let text = trace(&timeline, &snapshot, Names::new(machine.name, 0));
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let count = |phase, name| {
            events
                .iter()
                .filter(|event| event["ph"] == phase && event["name"] == name)
                .count()
        };
        assert_eq!((count("b", "batch"), count("e", "batch")), (500, 500));
        assert_eq!(
            (count("C", "slots"), count("C", "reads in flight")),
            (500, 500)
        );
        let starved = events
            .iter()
            .filter(|event| event["name"].as_str().unwrap().starts_with("starved"));
        let us: f64 = starved.map(|event| event["dur"].as_f64().unwrap()).sum();
        let expected = snapshot.consumer.waited_ns as f64 / 1e3;
        assert!((us - expected).abs() < 1.0, "{us} for {expected}");
        assert!(text.len() < 2000 * 500, "{} bytes", text.len());
    }
}

#[test]
fn a_trace_has_a_track_per_thread_with_the_snapshots_times() {
    let records = Records::builder(64).open_bytes(vec![7; 64 << 6]).unwrap();
    let builder = Loader::builder(records)
        .batch_size(8)
        .workers(2)
        .map(|row, _| {
            std::thread::sleep(Duration::from_millis(2));
            row.bytes_mut(0)[0] ^= 1;
            Ok(())
        });
    let loader = builder.build().unwrap();
    assert_eq!(loader.epoch(0).unwrap().map(Result::unwrap).count(), 8);
    // A worker records a span after it hands out the row, so the last spans may still be missing.
    // 64 rows of 2 ms at least.
    let noted = |timeline: &Timeline| {
        let spans = timeline
            .tracks
            .iter()
            .skip(1)
            .flat_map(|track| &track.spans);
        spans.map(|span| span.end_ns - span.begin_ns).sum::<u64>()
    };
    let timeline = answer(
        || format!("{} ns noted", noted(&loader.timeline())),
        || Some(loader.timeline()).filter(|timeline| noted(timeline) >= 128_000_000),
    );
    let snapshot = loader.snapshot();
    let names: Vec<&str> = timeline
        .tracks
        .iter()
        .map(|track| track.name.as_str())
        .collect();
    assert_eq!(
        names,
        ["planner and reads", "decode worker 0", "decode worker 1"]
    );
    assert_eq!(
        timeline
            .batches
            .iter()
            .filter(|record| record.first)
            .count(),
        1
    );
    assert!(timeline.batches[0].first);
    let done = timeline.tracks[1..].iter().flat_map(|track| &track.spans);
    let ns = noted(&timeline);
    assert!(
        ns >= 128_000_000
            && done
                .clone()
                .all(|span| span.what == Work::LookUp && span.end_ns <= snapshot.at_ns)
    );
    let trace: Value =
        serde_json::from_str(&trace(&timeline, &snapshot, Names::new("train", 0))).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for name in names {
        assert!(
            events
                .iter()
                .any(|event| event["ph"] == "M" && event["args"]["name"] == name),
            "{name}"
        );
    }
    assert_eq!(
        events
            .iter()
            .filter(|event| event["name"] == "from cache or memory")
            .count(),
        done.count()
    );
}
