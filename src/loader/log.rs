//! Scalars for a training log: rates and shares of the time since the last call.
//!
//! ```text
//! meters ──► Sums now ──┐
//!            Sums then ─┴─► Log   differences ÷ time
//! ```
//!
//! On the host, a call makes no system call, except for the kernel's count of the process's reads,
//! which it reads at most once per second. On a GPU it also asks the driver for the events of the
//! last steps.

use super::{Loader, LoaderState};
use feedline_base::meter::Counts;
use feedline_base::sync::Hold;
use feedline_report::meter::{GpuIdle, Totals, device_bytes};
use serde::Serialize;

/// Scalars of the time since the last [`Loader::log`]. A value is `None` where nothing was
/// measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Log {
    /// Time in which an iterator was alive. The two rates are per second of this time: pauses for
    /// an evaluation do not count.
    pub seconds: f64,
    /// Samples handed out per second.
    pub samples_per_s: Option<f64>,
    /// Share of the time in which the consumer's thread (on a GPU, its stream) had no ready batch.
    /// The first batches of iterators do not count.
    pub starved_share: Option<f64>,
    /// On a GPU, share of the time in which the program left the stream idle. See
    /// [`GpuIdle::host_late_ns`].
    pub host_late_share: Option<f64>,
    /// 99th percentile of the waits for a batch, in seconds.
    pub wait_p99_s: Option<f64>,
    /// Bytes per second that the storage reader reads, including those that the kernel serves from
    /// the page cache. Bytes that workers copy from the page cache themselves are not included.
    pub read_bytes_per_s: Option<f64>,
    /// Share of the bytes that were not read from a device, as the kernel counts for the process.
    /// It covers the last whole second, or the time since the last call. `None` for object stores
    /// and mounts with a cache.
    pub from_memory_share: Option<f64>,
    /// Share of the workers' time in decoding, transforms and copies, without `map_batch`.
    pub decode_busy_share: Option<f64>,
    /// Share of the workers' time in `map_batch`. `None` without a `map_batch`.
    pub map_batch_busy_share: Option<f64>,
    /// Number of rows that got a substitute because their sample was bad.
    pub bad_samples: u64,
    /// Rows of a whole epoch, over all ranks, that repeat a sample to fill up a batch. The number
    /// is known before the first batch.
    pub epoch_repeated: u64,
    /// Samples of a whole epoch that fill no batch and are dropped.
    pub epoch_left_out: u64,
}

impl Log {
    /// Name and value of each scalar that was measured. The names are the field names of [`Log`],
    /// and do not change.
    pub fn scalars(&self) -> impl Iterator<Item = (&'static str, f64)> {
        [
            ("seconds", Some(self.seconds)),
            ("samples_per_s", self.samples_per_s),
            ("starved_share", self.starved_share),
            ("host_late_share", self.host_late_share),
            ("wait_p99_s", self.wait_p99_s),
            ("read_bytes_per_s", self.read_bytes_per_s),
            ("from_memory_share", self.from_memory_share),
            ("decode_busy_share", self.decode_busy_share),
            ("map_batch_busy_share", self.map_batch_busy_share),
            ("bad_samples", Some(self.bad_samples as f64)),
            ("epoch_repeated", Some(self.epoch_repeated as f64)),
            ("epoch_left_out", Some(self.epoch_left_out as f64)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }

    /// The scalars for the time between two readings of the sums.
    fn between(before: &Sums, now: &Sums, workers: u32) -> Self {
        let then = &before.totals;
        let totals = &now.totals;
        let alive = now.alive_ns.saturating_sub(before.alive_ns);
        let steady = alive.saturating_sub(totals.first_ns.saturating_sub(then.first_ns));
        let per_s =
            |now: u64, then: u64| share(now.saturating_sub(then), alive).map(|per_ns| 1e9 * per_ns);
        let part = |part: fn(&Sums) -> u64, whole| {
            share(part(now).saturating_sub(part(before)), whole).map(|of| of.min(1.0))
        };
        let span = now.gpu.span_ns.saturating_sub(before.gpu.span_ns);
        let mut gpu = GpuIdle::default();
        gpu.steps = now.gpu.steps.saturating_sub(before.gpu.steps);
        gpu.late_ns = now.gpu.late_ns.saturating_sub(before.gpu.late_ns);
        gpu.unmarked_steps = now
            .gpu
            .unmarked_steps
            .saturating_sub(before.gpu.unmarked_steps);
        let late = gpu.host_late_ns();
        let all_workers =
            u64::from(workers).saturating_mul(totals.at_ns.saturating_sub(then.at_ns));
        Self {
            seconds: alive as f64 / 1e9,
            samples_per_s: per_s(totals.samples, then.samples),
            starved_share: match now.on_device {
                true => part(|sums| sums.gpu.starved_ns, span),
                false => part(|sums| sums.totals.waited_ns, steady),
            },
            host_late_share: late
                .and_then(|late| share(late, span))
                .map(|of| of.min(1.0)),
            read_bytes_per_s: per_s(totals.read_bytes, then.read_bytes),
            decode_busy_share: part(
                |sums| {
                    sums.totals
                        .decode_ns
                        .saturating_sub(sums.totals.map_batch_ns)
                },
                all_workers,
            ),
            map_batch_busy_share: part(|sums| sums.totals.map_batch_ns, all_workers)
                .filter(|_| totals.map_batch_ns > 0),
            bad_samples: now.substituted.saturating_sub(before.substituted),
            ..Self::default()
        }
    }
}

/// `None` if `whole` is 0.
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Sums since the loader was built.
#[derive(Clone, Debug, Default)]
struct Sums {
    totals: Totals,
    /// Time in which an iterator was alive.
    alive_ns: u64,
    substituted: u64,
    on_device: bool,
    gpu: GpuIdle,
}

/// The state after the last call of [`Loader::log`].
#[derive(Default)]
pub(super) struct Logged {
    sums: Sums,
    waits: Counts,
    memory: Memory,
}

/// The share of bytes from memory, updated at most once per second, because the kernel's count must
/// be read from a file.
#[derive(Default)]
struct Memory {
    looked_ns: u64,
    delivered: u64,
    moved: Option<u64>,
    share: Option<f64>,
}

const LOOK_NS: u64 = 1_000_000_000;

impl Memory {
    fn look(&mut self, totals: &Totals, built: Option<u64>) -> Option<f64> {
        if self.looked_ns > 0 && totals.at_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return self.share;
        }
        let now = device_bytes();
        let delivered = totals.read_bytes.saturating_add(totals.cached_bytes);
        let moved = now
            .zip(self.moved.or(built))
            .map(|(now, then)| now.saturating_sub(then));
        let more = delivered.saturating_sub(self.delivered);
        self.share = moved.and_then(|moved| Some(1.0 - share(moved.min(more), more)?));
        self.looked_ns = totals.at_ns;
        self.delivered = delivered;
        self.moved = now;
        self.share
    }
}

impl Loader {
    /// Scalars for a training log, for the time since the last call or since the loader was built.
    /// Meant to be called at every step.
    ///
    /// Call it from one place only: if two callers log alternately, each gets a part of the time.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// # let path = std::env::temp_dir().join(format!("feedline-log-{}", std::process::id()));
    /// # std::fs::write(&path, vec![7; 6400]).unwrap();
    /// let loader = Loader::builder(Records::builder(64).open(&path)?).batch_size(10).build()?;
    /// for batch in loader.epoch(0)? {
    ///     batch?;
    ///     for (name, value) in loader.log().scalars() {
    ///         println!("feedline/{name} {value}");
    ///     }
    /// }
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn log(&self) -> Log {
        if self.shared.info.process.is_forked() {
            return Log::default();
        }
        let mut last = self.shared.logged.hold();
        let now = self.shared.sums();
        let meters = &self.shared.runtime.core().meters;
        let wait = meters.consumer.waits.quantile_since(&mut last.waits, 0.99);
        let local = self.shared.facts.remote.is_none();
        let memory = if local {
            last.memory
                .look(&now.totals, self.shared.facts.before.moved())
        } else {
            None
        };
        let log = Log::between(&last.sums, &now, self.shared.facts.settings.workers);
        last.sums = now;
        let epoch = self.shared.whole.counts();
        Log {
            wait_p99_s: wait.map(|ns| ns / 1e9),
            from_memory_share: memory,
            epoch_repeated: epoch.repeated,
            epoch_left_out: epoch.left_out,
            ..log
        }
    }
}

impl LoaderState {
    fn sums(&self) -> Sums {
        let totals = self.runtime.core().meters.totals();
        let steady_ns = {
            let steady = self.steady.hold();
            let since = steady
                .since
                .as_ref()
                .map_or(0, |since| totals.at_ns.saturating_sub(since.at_ns));
            steady
                .sum
                .as_ref()
                .map_or(0, |sum| sum.steady_ns)
                .saturating_add(since)
        };
        Sums {
            totals,
            alive_ns: steady_ns.saturating_add(totals.first_ns),
            substituted: self.ledger().ledger.substituted,
            on_device: self.facts.settings.buffers.is_some(),
            gpu: self
                .idle
                .as_ref()
                .map(|idle| idle.totals())
                .unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu_idle(scale: u64) -> GpuIdle {
        let mut gpu = GpuIdle::default();
        gpu.span_ns = 10 * scale;
        gpu.starved_ns = 4 * scale;
        gpu.late_ns = scale;
        gpu
    }

    #[test]
    fn shares_and_rates_are_those_between_two_sums() {
        let sums = |scale: u64, on_device| Sums {
            totals: Totals {
                at_ns: 12 * scale,
                waited_ns: 2 * scale,
                first_ns: 2 * scale,
                samples: 50 * scale,
                read_bytes: 500 * scale,
                cached_bytes: 0,
                decode_ns: 18 * scale,
                map_batch_ns: 6 * scale,
            },
            alive_ns: 10 * scale,
            substituted: 3 * scale,
            on_device,
            gpu: gpu_idle(scale),
        };
        let of = |on_device| Log::between(&sums(5, on_device), &sums(6, on_device), 4);
        let host = Log {
            seconds: 10e-9,
            samples_per_s: Some(5e9),
            starved_share: Some(0.25),
            host_late_share: Some(0.1),
            read_bytes_per_s: Some(50e9),
            decode_busy_share: Some(0.25),
            map_batch_busy_share: Some(0.125),
            bad_samples: 3,
            ..Log::default()
        };
        assert_eq!(of(false), host);
        assert_eq!(
            of(true),
            Log {
                starved_share: Some(0.4),
                ..host
            }
        );
    }

    #[test]
    fn nothing_since_the_last_call_is_no_value() {
        let same = Sums::default();
        let log = Log::between(&same, &same, 4);
        assert_eq!(log, Log::default());
        let counts = ["seconds", "bad_samples", "epoch_repeated", "epoch_left_out"];
        assert_eq!(
            log.scalars().collect::<Vec<_>>(),
            counts.map(|name| (name, 0.0))
        );
    }
}
