//! The report: measurements, with their interpretation and the decisions of `build`. Pure.

use super::origin::Origin;
use crate::pipeline::FieldRoute;
use feedline_base::setting::Setting;
use feedline_core::ledger::Ledger;
use feedline_core::memory::MemoryPlan;
use feedline_report::meter::{EpochCounts, GpuIdle, ReadStats, Snapshot, SourceCount};
use feedline_report::{Cause, Verdict};
use feedline_store::Choice;
use std::fmt;

/// Maximum number of a mixture's sources in the text.
const SOURCES_SHOWN: usize = 8;

/// Report on a run so far. `Display` gives the readable text; its alternate form `{:#}` omits the
/// verdict.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Description of the dataset.
    pub dataset: String,
    /// Description of the device.
    pub device: String,
    /// NUMA node of threads and memory, or the reason for none; `None` if placement is off. See
    /// [`Numa`](crate::memory::Numa).
    pub numa: Option<String>,
    /// The cores of this rank, if this machine has several ranks. It says so if the ranks together have
    /// more decode workers than cores.
    pub cores: Option<String>,
    /// Thread groups of this process that run with fewer threads than wanted, and the limits that
    /// prevented more.
    pub threads: Option<String>,
    /// Rank and world size; `None` for a single rank.
    pub rank: Option<String>,
    /// All measurements since the loader was built; the consumer's measurements and `steady_ns`
    /// equal those of [`snapshot`].
    ///
    /// The other stages also work before the first batch of an iterator, so their times can exceed
    /// `steady_ns`. The [`verdict`](Self::verdict) is therefore based on [`snapshot`].
    ///
    /// [`snapshot`]: crate::Loader::snapshot
    pub total: Snapshot,
    /// The bottleneck, and what to change.
    pub verdict: Verdict,
    /// The memory plan.
    pub plan: MemoryPlan,
    /// The chosen reader, and the reason.
    pub choice: Choice,
    /// Route of each field of the dataset, with the reason; empty on the host.
    pub routes: Vec<FieldRoute>,
    /// For datasets in chunks: the planned [read amplification](Snapshot::read_amplification) of a
    /// whole epoch over all ranks.
    pub planned_amplification: Option<f64>,
    /// Origin of the bytes: storage or memory.
    pub origin: Origin,
    /// Failed samples, and the number of substituted rows.
    pub bad: Ledger,
    /// Objects left behind in this process because the kernel or a device may still use them.
    pub leaked: u64,
}

impl Report {
    /// For datasets in chunks, how many were opened.
    fn chunks(&self) -> Option<String> {
        let chunks = self.total.decode.chunks?;
        let amplified = self.total.read_amplification();
        let amplified = amplified.map_or(String::new(), |times| {
            format!(", with {times:.2} × the samples delivered")
        });
        let planned = self.planned_amplification.filter(|_| self.rank.is_some());
        let planned = planned.map_or(String::new(), |times| {
            format!("; planned over all ranks {times:.2} ×")
        });
        Some(format!(
            "{} opened{amplified}; the dataset has {}{planned}",
            chunks.opened, chunks.count
        ))
    }

    /// For mixtures, the samples that each source has delivered.
    fn mixture(&self) -> Option<String> {
        let source = |(index, source): (usize, &SourceCount)| {
            let SourceCount {
                delivered,
                asked,
                samples,
                passes,
                ..
            } = source;
            format!(
                "source {index}: {delivered} samples of {asked:.1} asked, {passes:.2} passes \
                 over {samples}"
            )
        };
        let sources = &self.total.consumer.sources;
        let mut lines: Vec<String> = sources
            .iter()
            .enumerate()
            .take(SOURCES_SHOWN)
            .map(source)
            .collect();
        if sources.len() > SOURCES_SHOWN {
            let off = |(_, source): &(usize, &SourceCount)| {
                (source.delivered as f64 - source.asked).abs()
            };
            let worst = sources
                .iter()
                .enumerate()
                .max_by(|a, b| off(a).total_cmp(&off(b)))
                .map(source);
            let more = sources.len() - SOURCES_SHOWN;
            lines.push(format!(
                "and {more} more; the farthest from its share is {}",
                worst.unwrap_or_default()
            ));
        }
        (!lines.is_empty()).then(|| lines.join("\n          "))
    }

    /// Wait of the consumer's thread or, on a GPU, of its stream, because the thread may run ahead.
    fn waits(&self) -> String {
        let consumer = &self.total.consumer;
        let [waited, steady, first, own] = [
            consumer.waited_ns,
            self.total.steady_ns,
            consumer.first_ns,
            consumer.user_ns,
        ]
        .map(seconds);
        let starved = match self.verdict.cause {
            _ if self.total.copy.is_none() => {
                format!(
                    "starved {:.1} % ({waited:.2} s of {steady:.2} s)",
                    100.0 * self.total.waited_share()
                )
            }
            Cause::Unknown => {
                format!("GPU starved: unknown; consumer {waited:.2} s of {steady:.2} s")
            }
            _ => {
                let percent = 100.0 * self.verdict.starved_share;
                let idle = consumer.gpu.as_ref().map_or(String::new(), others_idle);
                format!("GPU starved {percent:.1} %{idle}; consumer {waited:.2} s of {steady:.2} s")
            }
        };
        format!("{starved}; first batches {first:.3} s; own work {own:.2} s")
    }
}

/// The exact numbers of repeated and left-out samples.
fn epoch_in_words(epoch: &EpochCounts) -> String {
    let EpochCounts {
        samples,
        batches,
        repeated,
        left_out,
        ..
    } = *epoch;
    let share = |part: u64| match part {
        0 => "0".into(),
        _ => format!(
            "{part} ({:.2} %)",
            100.0 * part as f64 / samples.max(1) as f64
        ),
    };
    let repeated = share(repeated);
    let left_out = share(left_out);
    format!(
        "{samples} samples in {batches} batches; last batches repeat {repeated} and \
         leave out {left_out}"
    )
}

/// Idle time of the GPU with causes outside the loader, and pauses.
fn others_idle(gpu: &GpuIdle) -> String {
    let mut words = match gpu.host_late_ns() {
        Some(late) => format!(
            ", host late {:.1} %",
            100.0 * late as f64 / gpu.span_ns.max(1) as f64
        ),
        None => Setting::Mark.hint(|mark| format!(", host late unknown ({mark} after each step)")),
    };
    match gpu.unmeasured.pauses {
        0 => {}
        1 => words.push_str(", a pause"),
        pauses => words.push_str(&format!(", {pauses} pauses")),
    }
    words
}

/// The nonzero counters.
fn reads_in_words(reads: &ReadStats) -> String {
    if reads.ops == 0 {
        return "no reads".into();
    }
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let mut words = vec![format!(
        "{} reads, {:.3} GB",
        reads.ops,
        gb(reads.bytes_asked)
    )];
    if reads.bytes_moved > reads.bytes_asked {
        words.push(format!("{:.3} GB moved", gb(reads.bytes_moved)));
    }
    let counts = [
        // Counts system calls or queue entries; one read may need several.
        (
            reads.direct_reads,
            "operations that bypassed the page cache",
        ),
        (reads.buffered_reads, "operations through the page cache"),
        (reads.short_reads, "short reads continued"),
        (reads.retries, "repeated"),
        (
            reads.fallbacks,
            "refused by O_DIRECT, then read through the page cache",
        ),
        (reads.failed, "failed"),
        (reads.opens, "files opened"),
    ];
    words.extend(
        counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}")),
    );
    if reads.registered_buffers {
        words.push("registered buffers".into());
    }
    words.join(", ")
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Snapshot {
            consumer,
            storage,
            decode,
            copy,
            ..
        } = &self.total;
        let seconds = seconds(self.total.steady_ns.saturating_add(consumer.first_ns));
        let rate = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let batches = consumer.batches;
        let samples = consumer.samples;
        let gb = consumer.bytes as f64 / 1e9;
        let rates = format!(
            "{:.0} samples/s, {:.3} GB/s",
            rate(samples as f64),
            rate(gb)
        );
        let delivered =
            format!("{batches} batches, {samples} samples, {gb:.3} GB in {seconds:.2} s = {rates}");
        let busy = (rate(decode.busy_ns as f64 / 1e9) / f64::from(decode.workers.max(1))).min(1.0);
        let routes: Vec<String> = self.routes.iter().map(ToString::to_string).collect();
        let left = "objects that the kernel or a device may still use";
        let lines = [
            ("dataset", Some(self.dataset.clone())),
            ("device", Some(self.device.clone())),
            ("numa", self.numa.clone()),
            ("cores", self.cores.clone()),
            ("threads", self.threads.clone()),
            ("rank", self.rank.clone()),
            ("epoch", Some(epoch_in_words(&self.total.epoch))),
            ("delivered", Some(delivered)),
            (
                "skipped",
                (consumer.skipped_batches > 0)
                    .then(|| format!("{} batches of the order", consumer.skipped_batches)),
            ),
            ("mixture", self.mixture()),
            ("waits", Some(self.waits())),
            (
                "workers",
                Some(format!(
                    "{} decode workers, busy {:.0} %",
                    decode.workers,
                    100.0 * busy
                )),
            ),
            ("reader", Some(self.choice.to_string())),
            ("storage", Some(reads_in_words(&storage.counts))),
            (
                "bytes",
                self.origin.from_memory().map(|_| self.origin.to_string()),
            ),
            (
                "cache",
                storage.page_cache.map(|lookups| lookups.to_string()),
            ),
            (
                "network",
                storage
                    .network
                    .as_ref()
                    .filter(|network| network.requests > 0)
                    .map(ToString::to_string),
            ),
            (
                "local",
                storage.local_cache.as_ref().map(ToString::to_string),
            ),
            ("chunks", self.chunks()),
            (
                "routes",
                (!routes.is_empty()).then(|| routes.join("\n          ")),
            ),
            (
                "direct",
                copy.as_ref()
                    .and_then(|copy| copy.direct.as_ref())
                    .map(ToString::to_string),
            ),
            ("copies", copy.as_ref().map(ToString::to_string)),
            (
                "recovered",
                (storage.recovered > 0)
                    .then(|| format!("{} failed reads by retrying", storage.recovered)),
            ),
            (
                "bad",
                (!self.bad.samples.is_empty()).then(|| self.bad.to_string()),
            ),
            (
                "leaked",
                (self.leaked > 0).then(|| format!("{} {left}", self.leaked)),
            ),
        ];
        for (name, text) in lines
            .into_iter()
            .filter_map(|(name, text)| Some((name, text?)))
        {
            writeln!(f, "{name:<9} {text}")?;
        }
        write!(f, "memory\n{}", self.plan)?;
        if f.alternate() {
            Ok(())
        } else {
            write!(f, "\nverdict   {}", self.verdict)
        }
    }
}
