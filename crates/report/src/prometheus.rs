//! Writes snapshots in Prometheus' text format 0.0.4.
//!
//! ```text
//! # HELP feedline_starved_seconds_total The consumer waited …
//! # TYPE feedline_starved_seconds_total counter
//! feedline_starved_seconds_total{loader="train",rank="0"} 12.042
//! ```
//!
//! Most metrics are counters since the loader was built, so `rate()` turns them into shares and
//! means. `rate()` of a `_seconds_total` is a mean number, for instance the mean number of full
//! slots for `feedline_slot_seconds_total{state="full"}`. Seconds are exact to the nanosecond.
//! Histograms merge the meters' buckets, which are 3 % wide, into wider buckets by their midpoints,
//! so a bound is off by at most 2 %.

use super::Names;
use crate::meter::{Slots, Snapshot};
use feedline_base::meter::Latency;
use std::fmt::{Display, Write};

/// Bounds of histograms, in nanoseconds: 1, 2.5 and 5 of each power of ten from 1 µs to 100 s.
const BOUNDS: [u64; 25] = bounds();

const fn bounds() -> [u64; 25] {
    let mut bounds = [0; 25];
    let mut at = 0;
    let mut power = 1000;
    while at < bounds.len() {
        bounds[at] = power * [10, 25, 50][at % 3] / 10;
        if at % 3 == 2 {
            power *= 10;
        }
        at += 1;
    }
    bounds
}

/// Metrics of loaders as text in Prometheus' exposition format 0.0.4. Pass totals, not
/// [`Snapshot::since`], otherwise counters decrease.
///
/// ```
/// # use feedline_report::{Names, meter::Snapshot, prometheus};
/// let text = prometheus(&[(Names::new("train", 0), &Snapshot::default())]);
/// assert!(text.contains("feedline_batches_total{loader=\"train\",rank=\"0\"} 0\n"));
/// ```
pub fn prometheus(loaders: &[(Names<'_>, &Snapshot)]) -> String {
    let labels = |names: &Names<'_>| {
        format!(
            "loader=\"{}\",rank=\"{}\"",
            escape(names.loader),
            names.rank
        )
    };
    let loaders = loaders
        .iter()
        .map(|(names, snapshot)| (labels(names), *snapshot))
        .collect();
    let mut text = Text {
        out: String::new(),
        loaders,
    };
    let help = "Always 1; its label is the version of feedline.";
    text.family("info", "gauge", help, |out, labels, _| {
        line(
            out,
            format_args!("info{{{labels},version=\"{}\"}}", env!("CARGO_PKG_VERSION")),
            1,
        );
    });
    for (name, help, value) in METRICS {
        let kind = if name.ends_with("_total") {
            "counter"
        } else {
            "gauge"
        };
        text.family(name, kind, help, |out, labels, snapshot| {
            value(snapshot)
                .into_iter()
                .for_each(|value| line(out, format_args!("{name}{{{labels}}}"), value));
        });
    }
    let help = "Samples of each source of a mixture so far, of all ranks, resumes included.";
    text.family("source_samples", "gauge", help, |out, labels, snapshot| {
        for (index, source) in snapshot.consumer.sources.iter().enumerate() {
            line(
                out,
                format_args!("source_samples{{{labels},source=\"{index}\"}}"),
                source.delivered,
            );
        }
    });
    let help = "Samples that each source of a mixture should have delivered by its weight, \
         of all ranks, resumes included.";
    text.family(
        "source_samples_asked",
        "gauge",
        help,
        |out, labels, snapshot| {
            for (index, source) in snapshot.consumer.sources.iter().enumerate() {
                line(
                    out,
                    format_args!("source_samples_asked{{{labels},source=\"{index}\"}}"),
                    source.asked,
                );
            }
        },
    );
    let name = "slot_seconds_total";
    let help = "Time that slots spent in each state, summed over slots: its rate is the \
         mean number of slots in that state.";
    text.family(name, "counter", help, |out, labels, snapshot| {
        let Slots {
            free_ns,
            filling_ns,
            full_ns,
            held_ns,
            ..
        } = snapshot.slots;
        for (state, ns) in [
            ("free", free_ns),
            ("filling", filling_ns),
            ("full", full_ns),
            ("held", held_ns),
        ] {
            line(
                out,
                format_args!("{name}{{{labels},state=\"{state}\"}}"),
                Ns(ns),
            );
        }
    });
    for (name, help, latency) in HISTOGRAMS {
        text.family(name, "histogram", help, |out, labels, snapshot| {
            let Some(latency) = latency(snapshot) else {
                return;
            };
            for bound in BOUNDS {
                let bucket = format_args!("{name}_bucket{{{labels},le=\"{}\"}}", Ns(bound));
                line(out, bucket, count(latency, bound as f64));
            }
            let all = count(latency, f64::INFINITY);
            line(
                out,
                format_args!("{name}_bucket{{{labels},le=\"+Inf\"}}"),
                all,
            );
            line(
                out,
                format_args!("{name}_sum{{{labels}}}"),
                float(sum(latency) / 1e9),
            );
            line(out, format_args!("{name}_count{{{labels}}}"), all);
        });
    }
    text.out
}

fn escape(label: &str) -> String {
    label
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// A value, as the format writes it.
enum Number {
    Count(u64),
    /// Nanoseconds, written as seconds.
    Ns(u64),
}

impl Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Count(n) => write!(f, "{n}"),
            Self::Ns(ns) => {
                let text = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
                f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
            }
        }
    }
}

use Number::{Count, Ns};

/// Name, help and value of a metric; the value is `None` for a loader without it.
type Metric = (&'static str, &'static str, fn(&Snapshot) -> Option<Number>);
type Histogram = (
    &'static str,
    &'static str,
    fn(&Snapshot) -> Option<&Latency>,
);

/// Counters end in `_total`; the others are gauges.
#[rustfmt::skip]
const METRICS: &[Metric] = &[
    ("uptime_seconds", "Time since the loader was built.", |s| Some(Ns(s.at_ns))),
    ("steady_seconds_total", "Time during which an iterator was alive and had delivered its first batch.", |s| Some(Ns(s.steady_ns))),
    ("batches_total", "Batches handed out.", |s| Some(Count(s.consumer.batches))),
    ("samples_total", "Samples handed out.", |s| Some(Count(s.consumer.samples))),
    ("skipped_batches_total", "Batches left out on request.", |s| Some(Count(s.consumer.skipped_batches))),
    ("substituted_samples_total", "Rows filled by substitutes for bad samples.", |s| Some(Count(s.consumer.substituted))),
    ("bytes_total", "Bytes of the fields in delivered batches.", |s| Some(Count(s.consumer.bytes))),
    ("starved_seconds_total", "Time the consumer waited for batches other than an iterator's first: \
         starvation on the host.", |s| Some(Ns(s.consumer.waited_ns))),
    ("first_wait_seconds_total", "Time the consumer waited for the first batch of each iterator.", |s| Some(Ns(s.consumer.first_ns))),
    ("own_work_seconds_total", "Time of the consumer's own work between two batches.", |s| Some(Ns(s.consumer.user_ns))),
    ("consumer_delay_seconds_total", "Time the consumer's thread was ready to run but had no core.", |s| s.consumer.delay_ns.map(Ns)),
    ("process_cpu_seconds_total", "CPU time of the process.", |s| s.cpu.as_ref().map(|cpu| Ns(cpu.process_ns))),
    ("cpu_quota_throttled_total", "Scheduler periods in which the process used up its CPU quota.", |s| s.cpu.as_ref().map(|cpu| Count(cpu.throttled))),
    ("gpu_steps_total", "Steps whose idle time on the GPU was measured.", |s| s.consumer.gpu.as_ref().map(|gpu| Count(gpu.steps))),
    ("gpu_span_seconds_total", "GPU time of the steps whose idle time was measured, idle or not.", |s| s.consumer.gpu.as_ref().map(|gpu| Ns(gpu.span_ns))),
    ("gpu_dry_steps_total", "Steps that asked for a batch when the stream had no work left.", |s| s.consumer.gpu.as_ref().map(|gpu| Count(gpu.dry_steps))),
    ("gpu_starved_seconds_total", "Time the consumer's GPU stream was idle and waited for a batch.", |s| s.consumer.gpu.as_ref().map(|gpu| Ns(gpu.starved_ns))),
    ("gpu_unmarked_steps_total", "Steps whose end is unknown, which host lateness therefore leaves out.", |s| s.consumer.gpu.as_ref().map(|gpu| Count(gpu.unmarked_steps))),
    ("gpu_pauses_total", "Pauses of the program between two steps, such as an evaluation, which are \
         not measured.", |s| s.consumer.gpu.as_ref().map(|gpu| Count(gpu.unmeasured.pauses))),
    ("gpu_host_late_seconds_total", "Time the stream was idle because of the program's own code, in the steps \
         whose end is known.", |s| s.consumer.gpu.as_ref().map(|gpu| Ns(gpu.late_ns))),
    ("order_busy_seconds_total", "Time the planning thread worked.", |s| Some(Ns(s.order.busy_ns))),
    ("order_cpu_seconds_total", "CPU time of the planning thread.", |s| s.order.cpu_ns.map(Ns)),
    ("order_no_slot_seconds_total", "Time the planner could plan nothing because no slot was free.", |s| Some(Ns(s.order.no_slot_ns))),
    ("storage_busy_seconds_total", "Time with at least one read in flight.", |s| Some(Ns(s.storage.busy_ns))),
    ("storage_blocked_seconds_total", "Time reads waited for buffer space.", |s| Some(Ns(s.storage.blocked_ns))),
    ("storage_depth_reads", "Reads in flight at most.", |s| Some(Count(s.storage.depth.into()))),
    ("storage_in_flight_seconds_total", "Time of each read in flight, summed over reads: its rate is the mean number \
         in flight.", |s| Some(Ns(s.storage.in_flight_ns))),
    ("storage_reads_total", "Reads.", |s| Some(Count(s.storage.counts.ops))),
    ("storage_bytes_total", "Bytes delivered by reads.", |s| Some(Count(s.storage.counts.bytes_moved))),
    ("storage_direct_bytes_total", "Bytes read with O_DIRECT.", |s| Some(Count(s.storage.direct_bytes))),
    ("storage_cached_bytes_total", "Bytes copied from the page cache instead of read.", |s| Some(Count(s.storage.cached_bytes))),
    ("storage_in_place_samples_total", "Samples that no worker touched.", |s| Some(Count(s.storage.in_place))),
    ("storage_fallbacks_total", "Files or reads for which the kernel refused O_DIRECT.", |s| Some(Count(s.storage.counts.fallbacks))),
    ("storage_retries_total", "Reads repeated or continued.", |s| Some(Count(s.storage.counts.retries.saturating_add(s.storage.counts.short_reads)))),
    ("storage_recovered_total", "Reads that failed and succeeded on a retry.", |s| Some(Count(s.storage.recovered))),
    ("network_requests_total", "Completed requests to object stores.", |s| Some(Count(s.storage.network.as_ref()?.requests))),
    ("network_bytes_total", "Bytes received from object stores.", |s| Some(Count(s.storage.network.as_ref()?.bytes))),
    ("network_in_flight_seconds_total", "Time of each request in flight, summed over requests: its rate is the mean \
         number in flight.", |s| Some(Ns(s.storage.network.as_ref()?.in_flight_ns))),
    ("network_waiting_seconds_total", "Time requests waited because the store or its link accepted no more at once, \
         summed over requests.", |s| Some(Ns(s.storage.network.as_ref()?.waiting_ns))),
    ("network_retries_total", "Requests to object stores that were repeated or continued.", |s| Some(Count(s.storage.network.as_ref()?.retries))),
    ("network_throttled_total", "Responses 429 and 503 of object stores.", |s| Some(Count(s.storage.network.as_ref()?.throttled))),
    ("local_cache_hits_total", "Reads of objects from the local disk.", |s| Some(Count(s.storage.local_cache.as_ref()?.hits))),
    ("local_cache_misses_total", "Reads of objects from the network, in spite of a local cache.", |s| Some(Count(s.storage.local_cache.as_ref()?.misses))),
    ("local_cache_kept_bytes_total", "Bytes that the local cache wrote.", |s| Some(Count(s.storage.local_cache.as_ref()?.bytes))),
    ("local_cache_not_kept_total", "Blocks or objects that the local cache did not keep because its disk was \
         full, slow or failing.", |s| Some(Count(s.storage.local_cache.as_ref()?.not_kept))),
    ("local_cache_removed_total", "Cached objects of other runs that were removed to free space.", |s| Some(Count(s.storage.local_cache.as_ref()?.removed))),
    ("decode_workers", "Decode workers.", |s| Some(Count(s.decode.workers.into()))),
    ("decode_cores", "Cores that the process may use.", |s| Some(Count(s.decode.cores.into()))),
    ("decode_busy_seconds_total", "Time workers worked, summed over workers.", |s| Some(Ns(s.decode.busy_ns))),
    ("decode_map_batch_seconds_total", "Worker time spent in `map_batch`, included in decode_busy.", |s| Some(Ns(s.decode.map_batch_ns))),
    ("decode_cpu_seconds_total", "CPU time of the workers.", |s| s.decode.cpu_ns.map(Ns)),
    ("decode_delay_seconds_total", "Time workers were ready to run but had no core, summed over workers.", |s| s.decode.delay_ns.map(Ns)),
    ("decode_starved_seconds_total", "Time workers waited for bytes while batches were being filled, summed over \
         workers.", |s| Some(Ns(s.decode.starved_ns))),
    ("decode_ahead_seconds_total", "Time workers had no batch to fill because they were ahead, summed over \
         workers.", |s| Some(Ns(s.decode.ahead_ns))),
    ("decode_queued_seconds_total", "Time work waited for a worker, summed over pieces of work: its rate is the \
         mean queue length.", |s| Some(Ns(s.decode.queued_ns))),
    ("decode_samples_total", "Samples decoded or copied.", |s| Some(Count(s.decode.samples))),
    ("copy_busy_seconds_total", "Time copies were on the bus, by the device's events.", |s| s.copy.as_ref().map(|copy| Ns(copy.busy_ns))),
    ("copy_ops_seconds_total", "Time operations on batches ran after their copies, by the device's events.", |s| s.copy.as_ref().map(|copy| Ns(copy.ops_ns))),
    ("copy_cpu_seconds_total", "CPU time of the thread that gives batches to the device.", |s| s.copy.as_ref().and_then(|copy| copy.cpu_ns).map(Ns)),
    ("copy_starved_seconds_total", "Time no copy was in flight and no batch was full.", |s| s.copy.as_ref().map(|copy| Ns(copy.starved_ns))),
    ("copy_blocked_seconds_total", "Time a full batch waited for device memory that the consumer holds.", |s| s.copy.as_ref().map(|copy| Ns(copy.blocked_ns))),
    ("copy_batches_total", "Batches copied.", |s| s.copy.as_ref().map(|copy| Count(copy.batches))),
    ("copy_bytes_total", "Bytes that crossed the bus.", |s| s.copy.as_ref().map(|copy| Count(copy.bytes))),
    ("copy_buffers", "Batch buffers in device memory.", |s| s.copy.as_ref().map(|copy| Count(copy.buffers.into()))),
    ("slots", "Batch slots.", |s| Some(Count(s.slots.count.into()))),
];

#[rustfmt::skip]
const HISTOGRAMS: &[Histogram] = &[
    ("wait_seconds", "Duration of each wait for a batch.", |s| Some(&s.consumer.waits)),
    ("read_seconds", "How long each read took.", |s| Some(&s.storage.latency)),
    ("network_first_byte_seconds", "Time to the first byte of each answer of an object store.", |s| s.storage.network.as_ref().map(|network| &network.first_byte)),
    ("decode_seconds", "Duration of each piece of a worker's work.", |s| Some(&s.decode.latency)),
    ("copy_seconds", "Time each copy was on the bus, by the device's events.", |s| s.copy.as_ref().map(|copy| &copy.latency)),
];

struct Text<'a> {
    out: String,
    loaders: Vec<(String, &'a Snapshot)>,
}

impl Text<'_> {
    /// The lines of one metric of all loaders below its head, if there are any.
    fn family(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        lines: impl Fn(&mut String, &str, &Snapshot),
    ) {
        let mut all = String::new();
        self.loaders
            .iter()
            .for_each(|(labels, snapshot)| lines(&mut all, labels, snapshot));
        if !all.is_empty() {
            self.out +=
                &format!("# HELP feedline_{name} {help}\n# TYPE feedline_{name} {kind}\n{all}");
        }
    }
}

fn line(out: &mut String, series: std::fmt::Arguments<'_>, value: impl Display) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "feedline_{series} {value}");
}

/// Durations of at most `bound` nanoseconds. Infinity counts all, so that `+Inf` is the count for
/// any contents.
fn count(latency: &Latency, bound: f64) -> u64 {
    let within = latency
        .buckets
        .iter()
        .filter(|(ns, _)| *ns <= bound || bound.is_infinite());
    within.fold(0, |sum, (_, count)| sum.saturating_add(*count))
}

/// All durations in nanoseconds, added up.
fn sum(latency: &Latency) -> f64 {
    latency
        .buckets
        .iter()
        .map(|(ns, count)| ns * *count as f64)
        .sum()
}

/// A float, with the format's words for values that are not finite.
fn float(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "+Inf".into(),
        f64::NEG_INFINITY => "-Inf".into(),
        value => format!("{value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::{CopyStage, GpuIdle, SourceCount};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn latency(buckets: Vec<(f64, u64)>) -> Latency {
        let mut latency = Latency::default();
        latency.buckets = buckets;
        latency
    }

    /// A naive reader of the format: `name{labels}` → value; checks the rules of the format.
    fn read(text: &str) -> BTreeMap<String, f64> {
        let mut values = BTreeMap::new();
        let mut family = String::new();
        let mut done = BTreeSet::new();
        let mut kind = "";
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                family = help.split(' ').next().unwrap().to_string();
                assert!(done.insert(family.clone()), "{family} comes twice");
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, of) = rest.split_once(' ').unwrap();
                assert_eq!(name, family);
                assert!(["counter", "gauge", "histogram"].contains(&of));
                assert_eq!(of == "counter", name.ends_with("_total"), "{name}");
                kind = of;
            } else {
                let (name, value) = line.rsplit_once(' ').unwrap();
                let bare = name.split('{').next().unwrap();
                let suffix = bare
                    .strip_prefix(&family)
                    .unwrap_or_else(|| panic!("{line} stands in {family}"));
                let histogram = ["_bucket", "_sum", "_count"].contains(&suffix);
                assert!(
                    if kind == "histogram" {
                        histogram
                    } else {
                        suffix.is_empty()
                    },
                    "{line}"
                );
                assert!(
                    values
                        .insert(name.to_string(), value.parse().unwrap())
                        .is_none(),
                    "{line} comes twice"
                );
            }
        }
        values
    }

    #[test]
    fn the_dashboard_of_grafana_shows_metrics_that_exist() {
        let dashboard = include_str!("../../../examples/profile/grafana.json");
        let lists = METRICS
            .iter()
            .map(|metric| metric.0)
            .chain(HISTOGRAMS.iter().map(|histogram| histogram.0));
        let known: Vec<&str> = lists
            .chain(["info", "source_samples", "slot_seconds_total"])
            .collect();
        let shown = dashboard.split("feedline_").skip(1).map(|rest| {
            let end = rest
                .find(|c: char| !c.is_ascii_lowercase() && c != '_')
                .unwrap_or(rest.len());
            rest[..end].trim_end_matches("_bucket")
        });
        let shown: Vec<&str> = shown.collect();
        assert!(shown.len() > 50, "{shown:?}");
        assert!(shown.iter().all(|name| known.contains(name)), "{shown:?}");
    }

    #[test]
    fn metrics_are_the_snapshots_numbers() {
        let mut snapshot = Snapshot {
            at_ns: 12_345_678_901,
            ..Snapshot::default()
        };
        snapshot.consumer.batches = 7;
        snapshot.consumer.waited_ns = 1_500_000_000;
        snapshot.storage.counts.bytes_moved = 1 << 40;
        snapshot.slots.full_ns = 1;
        snapshot.consumer.sources =
            vec![SourceCount::new(5, 4.75, 4), SourceCount::new(9, 9.25, 4)];
        let values = read(&prometheus(&[(Names::new("train", 3), &snapshot)]));
        let table = [
            (
                "feedline_uptime_seconds{loader=\"train\",rank=\"3\"}",
                12.345678901,
            ),
            ("feedline_batches_total{loader=\"train\",rank=\"3\"}", 7.0),
            (
                "feedline_starved_seconds_total{loader=\"train\",rank=\"3\"}",
                1.5,
            ),
            (
                "feedline_storage_bytes_total{loader=\"train\",rank=\"3\"}",
                (1_u64 << 40) as f64,
            ),
            (
                "feedline_slot_seconds_total{loader=\"train\",rank=\"3\",state=\"full\"}",
                1e-9,
            ),
            (
                "feedline_source_samples{loader=\"train\",rank=\"3\",source=\"1\"}",
                9.0,
            ),
            (
                "feedline_source_samples_asked{loader=\"train\",rank=\"3\",source=\"1\"}",
                9.25,
            ),
        ];
        for (name, expected) in table {
            assert_eq!(values.get(name), Some(&expected), "{name}");
        }
        assert!(
            !values
                .keys()
                .any(|name| name.contains("gpu") || name.contains("copy")),
            "there is none"
        );
    }

    #[test]
    fn several_loaders_share_the_head_of_a_metric() {
        let host = Snapshot::default();
        let mut gpu = Snapshot::default();
        gpu.consumer.gpu = Some(GpuIdle::default());
        gpu.copy = Some(CopyStage::default());
        let values = read(&prometheus(&[
            (Names::new("a", 0), &host),
            (Names::new("b", 0), &gpu),
        ]));
        for (name, of) in [
            ("slots", "a"),
            ("slots", "b"),
            ("gpu_steps_total", "b"),
            ("copy_seconds_count", "b"),
        ] {
            assert!(
                values.contains_key(&format!("feedline_{name}{{loader=\"{of}\",rank=\"0\"}}")),
                "{name} of {of}"
            );
        }
        assert!(!values.contains_key("feedline_gpu_steps_total{loader=\"a\",rank=\"0\"}"));
        assert_eq!(prometheus(&[]), "");
    }

    #[test]
    fn labels_are_escaped() {
        let text = prometheus(&[(Names::new("a\\b\"c\nd", 0), &Snapshot::default())]);
        assert!(
            text.contains(r#"feedline_slots{loader="a\\b\"c\nd",rank="0"} 0"#),
            "{text}"
        );
        read(&text);
    }

    #[test]
    fn a_bucket_counts_durations_up_to_its_bound() {
        let mut snapshot = Snapshot::default();
        snapshot.consumer.waits = latency(vec![(900.0, 2), (3e6, 5), (2e12, 1)]);
        let values = read(&prometheus(&[(Names::default(), &snapshot)]));
        let bucket = |le: &str| {
            values[&format!("feedline_wait_seconds_bucket{{loader=\"\",rank=\"0\",le=\"{le}\"}}")]
        };
        let table = [
            ("0.000001", 2.0),
            ("0.0025", 2.0),
            ("0.005", 7.0),
            ("100", 7.0),
            ("+Inf", 8.0),
        ];
        for (le, expected) in table {
            assert_eq!(bucket(le), expected, "{le}");
        }
        assert_eq!(
            values["feedline_wait_seconds_count{loader=\"\",rank=\"0\"}"],
            8.0
        );
        assert_eq!(
            values["feedline_wait_seconds_sum{loader=\"\",rank=\"0\"}"],
            2000.0150018
        );
    }

    proptest! {
        #[test]
        fn buckets_never_fall_and_the_last_is_the_count(
            buckets in prop::collection::vec((any::<f64>(), any::<u64>()), 0..20), name in any::<String>()
        ) {
            let mut snapshot = Snapshot::default();
            snapshot.storage.latency = latency(buckets);
            let text = prometheus(&[(Names::new(&name.replace('\r', ""), 0), &snapshot)]);
            let counts: Vec<u64> = text
                .split('\n')
                .filter(|line| line.starts_with("feedline_read_seconds_bucket"))
                .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
                .collect();
            prop_assert_eq!(counts.len(), BOUNDS.len() + 1);
            prop_assert!(counts.is_sorted());
            let all = text.split('\n').find(|line| line.starts_with("feedline_read_seconds_count")).unwrap();
            let last = counts[BOUNDS.len()].to_string();
            prop_assert_eq!(all.rsplit_once(' ').unwrap().1, last);
        }
    }
}
