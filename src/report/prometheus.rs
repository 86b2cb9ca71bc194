//! A snapshot as Prometheus' text, format 0.0.4.
//!
//! ```text
//! # HELP feedline_starved_seconds_total The consumer waited …
//! # TYPE feedline_starved_seconds_total counter
//! feedline_starved_seconds_total{loader="train",rank="0"} 12.042
//! ```
//!
//! All but a few are counters since the loader was built, so `rate()` makes shares and means of them: that of `_seconds_total`
//! is how many did it on average, of `feedline_slot_seconds_total{state="full"}` the mean number of full slots. Seconds are
//! exact to the nanosecond. Histograms are put from the meters' 3 % wide buckets into wide ones by the middles, so a bound
//! is off by 2 % at most.

use super::Names;
use crate::meter::{Latency, Snapshot};
use std::fmt::{Display, Write};

/// Bounds of histograms, in nanoseconds: 1, 2.5 and 5 of each power of ten from 1 µs to 100 s.
const BOUNDS: [u64; 25] = bounds();

const fn bounds() -> [u64; 25] {
    let (mut bounds, mut at, mut power) = ([0; 25], 0, 1000);
    while at < bounds.len() {
        bounds[at] = power * [10, 25, 50][at % 3] / 10;
        if at % 3 == 2 {
            power *= 10;
        }
        at += 1;
    }
    bounds
}

/// Metrics of loaders as text in Prometheus' exposition format 0.0.4. Give totals, not [`Snapshot::since`], or counters fall.
///
/// ```
/// use feedline::profile::{Names, Snapshot, prometheus};
///
/// let text = prometheus(&[(Names::new("train", 0), &Snapshot::default())]);
/// assert!(text.contains("feedline_batches_total{loader=\"train\",rank=\"0\"} 0\n"));
/// ```
pub fn prometheus(loaders: &[(Names<'_>, &Snapshot)]) -> String {
    let labels = |names: &Names<'_>| format!("loader=\"{}\",rank=\"{}\"", escape(names.loader), names.rank);
    let loaders = loaders.iter().map(|(names, snapshot)| (labels(names), *snapshot)).collect();
    let mut text = Text { out: String::new(), loaders };
    text.info();
    text.consumer();
    text.gpu();
    text.order();
    text.storage();
    text.decode();
    text.copy();
    text.slots();
    text.out
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

struct Text<'a> {
    out: String,
    loaders: Vec<(String, &'a Snapshot)>,
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

impl Text<'_> {
    /// One metric of all loaders that have it.
    fn metric(&mut self, name: &str, help: &str, value: impl Fn(&Snapshot) -> Option<Number>) {
        self.by("", name, help, |snapshot| value(snapshot).map(|value| ("", value)).into_iter().collect());
    }

    /// One metric with a label of its own.
    fn by(&mut self, label: &str, name: &str, help: &str, values: impl Fn(&Snapshot) -> Vec<(&'static str, Number)>) {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let mut begun = false;
        for (labels, snapshot) in &self.loaders {
            for (state, value) in values(snapshot) {
                if !std::mem::replace(&mut begun, true) {
                    let _ = write!(self.out, "# HELP feedline_{name} {help}\n# TYPE feedline_{name} {kind}\n");
                }
                let own = if label.is_empty() { String::new() } else { format!(",{label}=\"{state}\"") };
                let _ = writeln!(self.out, "feedline_{name}{{{labels}{own}}} {value}");
            }
        }
    }

    fn histogram(&mut self, name: &str, help: &str, latency: impl Fn(&Snapshot) -> Option<&Latency>) {
        let mut begun = false;
        for (labels, snapshot) in &self.loaders {
            let Some(latency) = latency(snapshot) else { continue };
            if !std::mem::replace(&mut begun, true) {
                let _ = write!(self.out, "# HELP feedline_{name} {help}\n# TYPE feedline_{name} histogram\n");
            }
            for bound in BOUNDS {
                let count = count(latency, bound as f64);
                let _ = writeln!(self.out, "feedline_{name}_bucket{{{labels},le=\"{}\"}} {count}", Ns(bound));
            }
            let all = count(latency, f64::INFINITY);
            let _ = writeln!(self.out, "feedline_{name}_bucket{{{labels},le=\"+Inf\"}} {all}");
            let _ = writeln!(self.out, "feedline_{name}_sum{{{labels}}} {}", float(sum(latency) / 1e9));
            let _ = writeln!(self.out, "feedline_{name}_count{{{labels}}} {all}");
        }
    }

    fn info(&mut self) {
        let version = env!("CARGO_PKG_VERSION");
        self.by("version", "info", "Always 1; its label is the version of feedline.", |_| vec![(version, Count(1))]);
        let help = "Time since the loader was built.";
        self.metric("uptime_seconds", help, |s| Some(Ns(s.at_ns)));
        let help = "Time in which an iterator had delivered its first batch: what shares are of.";
        self.metric("steady_seconds_total", help, |s| Some(Ns(s.steady_ns)));
    }

    fn consumer(&mut self) {
        self.metric("batches_total", "Batches handed out.", |s| Some(Count(s.consumer.batches)));
        self.metric("samples_total", "Samples handed out.", |s| Some(Count(s.consumer.samples)));
        let help = "Samples that could not be had and that others stand in for.";
        self.metric("substituted_samples_total", help, |s| Some(Count(s.consumer.substituted)));
        self.metric("bytes_total", "Bytes of the fields handed out.", |s| Some(Count(s.consumer.bytes)));
        let help = "The consumer waited for batches other than the first of an iterator: starvation on the host.";
        self.metric("starved_seconds_total", help, |s| Some(Ns(s.consumer.waited_ns)));
        let help = "The consumer waited for the first batch of each iterator.";
        self.metric("first_wait_seconds_total", help, |s| Some(Ns(s.consumer.first_ns)));
        let help = "The consumer's own work between two batches.";
        self.metric("own_work_seconds_total", help, |s| Some(Ns(s.consumer.user_ns)));
        self.histogram("wait_seconds", "How long each wait for a batch was.", |s| Some(&s.consumer.waits));
    }

    fn gpu(&mut self) {
        let help = "Steps whose idle time on the GPU was measured.";
        self.metric("gpu_steps_total", help, |s| s.consumer.gpu.as_ref().map(|gpu| Count(gpu.steps)));
        let help = "The consumer's stream on the GPU was idle and waited for a batch.";
        self.metric("gpu_starved_seconds_total", help, |s| s.consumer.gpu.as_ref().map(|gpu| Ns(gpu.starved_ns)));
        let help = "The stream was idle before a batch was asked for, at most.";
        self.metric("gpu_host_late_seconds_total", help, |s| s.consumer.gpu.as_ref().map(|gpu| Ns(gpu.host_late_ns)));
    }

    fn order(&mut self) {
        self.metric("order_busy_seconds_total", "The planning thread worked.", |s| Some(Ns(s.order.busy_ns)));
        self.metric("order_cpu_seconds_total", "CPU time of the planning thread.", |s| s.order.cpu_ns.map(Ns));
        let help = "Nothing could be planned since no slot was free.";
        self.metric("order_no_slot_seconds_total", help, |s| Some(Ns(s.order.no_slot_ns)));
    }

    fn storage(&mut self) {
        let help = "At least one read was in flight.";
        self.metric("storage_busy_seconds_total", help, |s| Some(Ns(s.storage.busy_ns)));
        let help = "Reads waited for room for their bytes.";
        self.metric("storage_blocked_seconds_total", help, |s| Some(Ns(s.storage.blocked_ns)));
        self.metric("storage_depth_reads", "Reads in flight at most.", |s| Some(Count(s.storage.depth.into())));
        let help = "Time that all reads were in flight, added up: its rate is their mean number.";
        self.metric("storage_in_flight_seconds_total", help, |s| Some(Ns(s.storage.in_flight_ns)));
        self.metric("storage_reads_total", "Reads.", |s| Some(Count(s.storage.reads)));
        self.metric("storage_bytes_total", "Bytes that reads brought.", |s| Some(Count(s.storage.bytes)));
        let help = "Bytes of them that bypassed the page cache.";
        self.metric("storage_direct_bytes_total", help, |s| Some(Count(s.storage.direct_bytes)));
        let help = "Bytes copied from the page cache instead of read.";
        self.metric("storage_cached_bytes_total", help, |s| Some(Count(s.storage.cached_bytes)));
        let help = "Samples read straight into their rows.";
        self.metric("storage_in_place_samples_total", help, |s| Some(Count(s.storage.in_place)));
        let help = "Files or reads that O_DIRECT was refused for.";
        self.metric("storage_fallbacks_total", help, |s| Some(Count(s.storage.fallbacks)));
        self.metric("storage_retries_total", "Reads repeated or continued.", |s| Some(Count(s.storage.retries)));
        let help = "Reads that failed and worked when they were tried again.";
        self.metric("storage_recovered_total", help, |s| Some(Count(s.storage.recovered)));
        self.histogram("read_seconds", "How long each read took.", |s| Some(&s.storage.latency));
    }

    fn decode(&mut self) {
        self.metric("decode_workers", "Decode workers.", |s| Some(Count(s.decode.workers.into())));
        self.metric("decode_cores", "Cores that the process may use.", |s| Some(Count(s.decode.cores.into())));
        self.metric("decode_busy_seconds_total", "Workers worked, summed.", |s| Some(Ns(s.decode.busy_ns)));
        self.metric("decode_cpu_seconds_total", "CPU time of the workers.", |s| s.decode.cpu_ns.map(Ns));
        let help = "Workers waited for bytes while batches were being filled, summed.";
        self.metric("decode_starved_seconds_total", help, |s| Some(Ns(s.decode.starved_ns)));
        let help = "Workers had no batch to fill, summed: they are ahead.";
        self.metric("decode_ahead_seconds_total", help, |s| Some(Ns(s.decode.ahead_ns)));
        let help = "Time that all work waited for a worker, added up: its rate is the mean length of the queue.";
        self.metric("decode_queued_seconds_total", help, |s| Some(Ns(s.decode.queued_ns)));
        self.metric("decode_samples_total", "Samples decoded or copied.", |s| Some(Count(s.decode.samples)));
        self.histogram("decode_seconds", "How long each piece of work took.", |s| Some(&s.decode.latency));
    }

    fn copy(&mut self) {
        let help = "At least one copy to the device was in flight.";
        self.metric("copy_busy_seconds_total", help, |s| s.copy.as_ref().map(|copy| Ns(copy.busy_ns)));
        let help = "CPU time of the thread that gives batches to the device.";
        self.metric("copy_cpu_seconds_total", help, |s| s.copy.as_ref().and_then(|copy| copy.cpu_ns).map(Ns));
        let help = "No copy was in flight and no batch was full.";
        self.metric("copy_starved_seconds_total", help, |s| s.copy.as_ref().map(|copy| Ns(copy.starved_ns)));
        let help = "A full batch waited for device memory that the consumer holds.";
        self.metric("copy_blocked_seconds_total", help, |s| s.copy.as_ref().map(|copy| Ns(copy.blocked_ns)));
        self.metric("copy_batches_total", "Batches copied.", |s| s.copy.as_ref().map(|copy| Count(copy.batches)));
        self.metric("copy_bytes_total", "Bytes that crossed the bus.", |s| s.copy.as_ref().map(|c| Count(c.bytes)));
        let help = "Batches in device memory at most.";
        self.metric("copy_buffers", help, |s| s.copy.as_ref().map(|copy| Count(copy.buffers.into())));
        let help = "How long each copy took until it was seen done.";
        self.histogram("copy_seconds", help, |s| s.copy.as_ref().map(|copy| &copy.latency));
    }

    fn slots(&mut self) {
        self.metric("slots", "Batch slots.", |s| Some(Count(s.slots.count.into())));
        let help = "Time of all slots in each state, added up: its rate is how many are in it on average.";
        self.by("state", "slot_seconds_total", help, |s| {
            let slots = &s.slots;
            vec![
                ("free", Ns(slots.free_ns)),
                ("filling", Ns(slots.filling_ns)),
                ("full", Ns(slots.full_ns)),
                ("held", Ns(slots.held_ns)),
            ]
        });
    }
}

/// How many took at most `bound` nanoseconds. All of them for infinity, so that `+Inf` is the count whatever it holds.
fn count(latency: &Latency, bound: f64) -> u64 {
    let within = latency.buckets.iter().filter(|(ns, _)| *ns <= bound || bound.is_infinite());
    within.fold(0, |sum, (_, count)| sum.saturating_add(*count))
}

/// Nanoseconds of all.
fn sum(latency: &Latency) -> f64 {
    latency.buckets.iter().map(|(ns, count)| ns * *count as f64).sum()
}

/// As the format writes what is not finite.
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
    use crate::meter::{Copy, GpuIdle};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn latency(buckets: Vec<(f64, u64)>) -> Latency {
        Latency { buckets, ..Latency::default() }
    }

    /// A naive reader of the format: `name{labels}` → value; checks what the format asks for.
    fn read(text: &str) -> BTreeMap<String, f64> {
        let mut values = BTreeMap::new();
        let (mut family, mut done, mut kind) = (String::new(), BTreeSet::new(), "");
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
                let suffix = bare.strip_prefix(&family).unwrap_or_else(|| panic!("{line} stands in {family}"));
                let histogram = ["_bucket", "_sum", "_count"].contains(&suffix);
                assert!(if kind == "histogram" { histogram } else { suffix.is_empty() }, "{line}");
                assert!(values.insert(name.to_string(), value.parse().unwrap()).is_none(), "{line} comes twice");
            }
        }
        values
    }

    #[test]
    fn numbers_are_the_snapshot_s_in_seconds_and_bytes() {
        let mut snapshot = Snapshot { at_ns: 12_345_678_901, ..Snapshot::default() };
        snapshot.consumer.batches = 7;
        snapshot.consumer.waited_ns = 1_500_000_000;
        snapshot.storage.bytes = 1 << 40;
        snapshot.slots.full_ns = 1;
        let values = read(&prometheus(&[(Names::new("train", 3), &snapshot)]));
        let table = [
            ("feedline_uptime_seconds{loader=\"train\",rank=\"3\"}", 12.345678901),
            ("feedline_batches_total{loader=\"train\",rank=\"3\"}", 7.0),
            ("feedline_starved_seconds_total{loader=\"train\",rank=\"3\"}", 1.5),
            ("feedline_storage_bytes_total{loader=\"train\",rank=\"3\"}", (1_u64 << 40) as f64),
            ("feedline_slot_seconds_total{loader=\"train\",rank=\"3\",state=\"full\"}", 1e-9),
        ];
        for (name, expected) in table {
            assert_eq!(values.get(name), Some(&expected), "{name}");
        }
        assert!(!values.keys().any(|name| name.contains("gpu") || name.contains("copy")), "there is none");
    }

    #[test]
    fn several_loaders_share_each_metric_s_head() {
        let (host, mut gpu) = (Snapshot::default(), Snapshot::default());
        gpu.consumer.gpu = Some(GpuIdle::default());
        gpu.copy = Some(Copy::default());
        let values = read(&prometheus(&[(Names::new("a", 0), &host), (Names::new("b", 0), &gpu)]));
        for (name, of) in [("slots", "a"), ("slots", "b"), ("gpu_steps_total", "b"), ("copy_seconds_count", "b")] {
            assert!(values.contains_key(&format!("feedline_{name}{{loader=\"{of}\",rank=\"0\"}}")), "{name} of {of}");
        }
        assert!(!values.contains_key("feedline_gpu_steps_total{loader=\"a\",rank=\"0\"}"));
        assert_eq!(prometheus(&[]), "");
    }

    #[test]
    fn labels_are_escaped() {
        let text = prometheus(&[(Names::new("a\\b\"c\nd", 0), &Snapshot::default())]);
        assert!(text.contains(r#"feedline_slots{loader="a\\b\"c\nd",rank="0"} 0"#), "{text}");
        read(&text);
    }

    #[test]
    fn a_histogram_counts_what_took_at_most_its_bound() {
        let mut snapshot = Snapshot::default();
        snapshot.consumer.waits = latency(vec![(900.0, 2), (3e6, 5), (2e12, 1)]);
        let values = read(&prometheus(&[(Names::default(), &snapshot)]));
        let bucket = |le: &str| values[&format!("feedline_wait_seconds_bucket{{loader=\"\",rank=\"0\",le=\"{le}\"}}")];
        let table = [("0.000001", 2.0), ("0.0025", 2.0), ("0.005", 7.0), ("100", 7.0), ("+Inf", 8.0)];
        for (le, expected) in table {
            assert_eq!(bucket(le), expected, "{le}");
        }
        assert_eq!(values["feedline_wait_seconds_count{loader=\"\",rank=\"0\"}"], 8.0);
        assert_eq!(values["feedline_wait_seconds_sum{loader=\"\",rank=\"0\"}"], 2000.0150018);
    }

    proptest! {
        #[test]
        fn buckets_never_fall_and_the_last_is_the_count_whatever_was_recorded(
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
