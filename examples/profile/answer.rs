//! The results of a run as data: the JSON, and the basis of the text.
//!
//! Unknown or meaningless figures (the AU without a step) are `null`. Shares are 0 to 1, and
//! percentages have `pct` in their name. Times are wall-clock.

use crate::args::Given;
use crate::measure::Tally;
use crate::text::{bytes, number};
use crate::workload::Benchmark;
use feedline::Report;
use feedline::dataset::Dataset;
use feedline::profile::verdict::{Advice, Cause, Evidence, Origin, StageLoad, Strength};
use feedline::profile::{Change, Prediction, Snapshot, Verdict, WhatIf};
use feedline::unstable::DEPTH_MAX;
use serde::Serialize;

/// Results of a run.
#[derive(Serialize)]
pub struct Answer {
    /// Accelerator utilisation: steps / time from the end of the first step to the end of the last.
    pub au: Option<f64>,
    pub au_target: Option<f64>,
    /// `None` too if the batches are not the benchmark's.
    pub pass: Option<bool>,
    pub gpu_idle_pct: Option<f64>,
    /// `None` if the consumer's steps were not measured.
    pub starved_pct: Option<f64>,
    /// Idle time not caused by the loader. On the host: idle less starved, lost by this thread on
    /// busy cores. On a GPU: by the program's own code, if it is known.
    pub late_pct: Option<f64>,
    pub cause: Cause,
    pub also: Option<Cause>,
    pub strength: &'static str,
    /// The missing evidence, if it is thin.
    pub strength_why: Option<String>,
    pub evidence: Vec<Evidence>,
    pub advice: Vec<Advice>,
    /// Rate of `steps` batches in `seconds`, as for the AU; without steps, of the whole run.
    pub items_per_s: f64,
    pub bytes_per_s: f64,
    pub stages: Vec<StageLoad>,
    pub what_if: Vec<Guess>,
    pub step_ms: f64,
    pub batch: usize,
    pub batches: u64,
    pub samples: u64,
    /// Steps between the ends of the first and the last, and their time: `au` = `steps` × `step_ms`
    /// / 1000 / `seconds`.
    pub steps: u64,
    pub seconds: f64,
    /// Time of the whole run, and until the first batch.
    pub wall_seconds: f64,
    pub first_batch_seconds: f64,
    pub interrupted: bool,
    /// The error that ended the run early.
    pub error: Option<String>,
    pub device: String,
    pub reader: String,
    pub workload: Option<String>,
    pub accelerator: Option<String>,
    /// Reservations about the figures.
    pub notes: Vec<String>,
    /// Share of the bytes that came from memory, its basis, and resulting doubts about the figures.
    pub from_memory: Option<f64>,
    pub origin: Origin,
    pub warnings: Vec<String>,
    /// NVML's state of the GPU at the end of the run, or the reason for none.
    pub nvml: Option<serde_json::Value>,
    pub snapshot: Snapshot,
}

/// Prediction for a change.
#[derive(Serialize)]
pub struct Guess {
    pub what: String,
    pub change: Change,
    #[serde(flatten)]
    pub then: Prediction,
    /// With the same step.
    pub au: Option<f64>,
}

/// Minimum lateness, in percent, that changes the verdict's meaning.
const LATE_MUCH: f64 = 5.0;
/// Minimum relative difference between the loader's rate and the run's to mention.
const OTHER_RATE: f64 = 0.01;

/// Raw results of a run.
pub struct Run<'a> {
    pub given: &'a Given,
    pub tally: &'a Tally,
    pub report: &'a Report,
    pub snapshot: Snapshot,
    pub notes: Vec<String>,
    pub nvml: Option<serde_json::Value>,
}

impl Answer {
    pub fn new(run: Run<'_>) -> Self {
        let Run {
            given,
            tally,
            report,
            snapshot,
            notes,
            nvml,
        } = run;
        let verdict = &report.verdict;
        let (items_per_s, bytes_per_s) = tally.rates();
        let au = tally.stretch.utilisation(given.step);
        let target = given.benchmark.map(|benchmark| benchmark.au_target);
        let gpu = gpu_idle(&snapshot);
        let (strength, strength_why) = strength(&verdict.strength);
        Self {
            au,
            au_target: target,
            pass: au.zip(given.au_target()).map(|(au, target)| au >= target),
            gpu_idle_pct: gpu
                .map(|(idle, _)| idle)
                .or(au.map(|au| 1.0 - au))
                .map(|share| 100.0 * share),
            starved_pct: (verdict.cause != Cause::Unknown).then_some(100.0 * verdict.starved_share),
            late_pct: gpu
                .map_or(late(au, verdict), |(_, late)| late)
                .map(|share| 100.0 * share),
            cause: verdict.cause,
            also: verdict.also,
            strength,
            strength_why,
            evidence: verdict.evidence.clone(),
            advice: verdict.advice.clone(),
            items_per_s,
            bytes_per_s,
            stages: verdict.stages.clone(),
            what_if: match tally.stretch.steps {
                // Less than a millisecond of work may represent the steady time of a single batch.
                0 => Vec::new(),
                _ => guesses(&snapshot, given, items_per_s),
            },
            step_ms: 1e3 * given.step.as_secs_f64(),
            batch: given.args.settings.batch,
            batches: tally.batches,
            samples: tally.samples,
            steps: tally.stretch.steps,
            seconds: tally.stretch.seconds,
            wall_seconds: tally.wall_s,
            first_batch_seconds: tally.first_batch_s,
            interrupted: tally.interrupted,
            error: tally.error.as_ref().map(ToString::to_string),
            device: report.device.clone(),
            reader: report.choice.to_string(),
            workload: given
                .benchmark
                .map(|benchmark| benchmark.workload.to_string()),
            accelerator: given
                .benchmark
                .map(|benchmark| benchmark.accelerator.to_string()),
            notes,
            from_memory: report.origin.from_memory(),
            origin: report.origin,
            warnings: doubts(
                &report.origin,
                given.args.settings.past_cache(),
                report.total.storage.counts.fallbacks,
            ),
            nvml,
            snapshot,
        }
    }

    /// Result against the required AU, appended to the AU.
    pub fn result(&self) -> String {
        let Some(target) = self.au_target.filter(|_| self.au.is_some()) else {
            return String::new();
        };
        let percent = 100.0 * target;
        match self.pass {
            None => ": not the benchmark's batch, so neither PASS nor FAIL".into(),
            Some(true) => format!(": PASS ({percent:.0} % required)"),
            Some(false) => format!(": FAIL ({percent:.0} % required)"),
        }
    }

    fn on_gpu(&self) -> bool {
        self.snapshot
            .consumer
            .gpu
            .as_ref()
            .is_some_and(|gpu| gpu.steps > 0)
    }

    /// Note that the consumer's own work includes this program's delays on a busy machine.
    pub fn late_step(&self) -> Option<String> {
        let late = self
            .late_pct
            .filter(|late| *late > LATE_MUCH && *late > self.starved_pct.unwrap_or(0.0))?;
        let why = match self.on_gpu() {
            true => "for {} of the time the GPU waited for this program to ask for a batch",
            false => "for {} of the time this program had no core",
        };
        let why = why.replace("{}", &format!("{late:.1} %"));
        Some(format!(
            "The step itself was late: {why}, because the machine was busy. The consumer's own work in the verdict includes it."
        ))
    }

    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

fn strength(strength: &Strength) -> (&'static str, Option<String>) {
    match strength {
        Strength::Thin { why } => ("thin", Some(why.clone())),
        Strength::Fair => ("fair", None),
        Strength::Strong => ("strong", None),
        _ => ("unknown", None),
    }
}

/// Idle shares of a GPU's stream, by events on it: of the measured steps, and of that the part by
/// the program's own code.
fn gpu_idle(snapshot: &Snapshot) -> Option<(f64, Option<f64>)> {
    let gpu = snapshot
        .consumer
        .gpu
        .as_ref()
        .filter(|gpu| gpu.span_ns > 0)?;
    let share = |ns: u64| (ns as f64 / gpu.span_ns as f64).min(1.0);
    Some((
        share(gpu.starved_ns.saturating_add(gpu.late_ns)),
        gpu.host_late_ns().map(share),
    ))
}

/// Lateness on the host: time in neither steps nor waits for batches.
fn late(au: Option<f64>, verdict: &Verdict) -> Option<f64> {
    Some((1.0 - au? - verdict.starved_share).max(0.0))
}

/// The measurement, and predictions for usual changes.
fn guesses(snapshot: &Snapshot, given: &Given, items_per_s: f64) -> Vec<Guess> {
    let Some(model) = WhatIf::from(snapshot) else {
        return Vec::new();
    };
    let now = snapshot.decode.workers.max(1);
    let twice = now.saturating_mul(2);
    let twice_as_fast = Change {
        storage_factor: Some(2.0),
        ..Change::default()
    };
    let mut changes = vec![
        (
            format!("workers {twice} instead of {now}"),
            Change {
                workers: Some(twice),
                ..Change::default()
            },
        ),
        ("storage twice as fast".into(), twice_as_fast),
        (
            "all in the page cache".into(),
            Change {
                cached: true,
                ..Change::default()
            },
        ),
    ];
    let depth = snapshot.storage.depth.max(1);
    if snapshot.storage.counts.ops > 0 && depth < DEPTH_MAX {
        let twice = depth.saturating_mul(2).min(DEPTH_MAX);
        changes.push((
            format!("depth {twice} instead of {depth}"),
            Change {
                depth: Some(twice),
                ..Change::default()
            },
        ));
    }
    if snapshot.storage.network.is_some() {
        changes.push((
            "all in the local cache".into(),
            Change {
                local_cache: true,
                ..Change::default()
            },
        ));
    }
    if given.pictures {
        changes.push((
            "decoding on the GPU".into(),
            Change {
                gpu_decode: true,
                ..Change::default()
            },
        ));
    }
    let rows = snapshot.consumer.samples as f64 / snapshot.consumer.batches.max(1) as f64;
    let guess = |(what, change): (String, Change)| {
        let then = model.with(&change);
        let busy = then.items_per_s / rows.max(1.0) * given.step.as_secs_f64();
        Guess {
            what,
            change,
            then,
            au: (busy > 0.0).then(|| busy.min(1.0)),
        }
    };
    let mut now = guess(("as it is".into(), Change::default()));
    // Measured: neither bounds nor assumptions.
    now.then.at_least = false;
    now.then.caveats = Vec::new();
    if (now.then.items_per_s - items_per_s).abs() > OTHER_RATE * items_per_s {
        now.then.caveats.push(format!(
            "Rows show the loader's sustained rate. The run's own {} samples/s omit the first step, and include batches \
             that were ready before the first one was taken.",
            number(items_per_s)
        ));
    }
    std::iter::once(now)
        .chain(changes.into_iter().map(guess))
        .collect()
}

/// The input data.
pub struct Data {
    /// Bytes of its files, and number of samples.
    pub bytes: u64,
    pub samples: u64,
    /// Memory available to the page cache, in bytes.
    pub memory: Option<u64>,
}

impl Data {
    pub fn of(dataset: &dyn Dataset) -> Self {
        let sources = dataset.sources();
        let is_url = |id| sources.path(id).to_string_lossy().contains("://");
        let in_files = sources
            .ids()
            .filter(|id| sources.bytes_of(*id).is_none() && !is_url(*id));
        Self {
            bytes: in_files
                .map(|id| sources.len_of(id))
                .fold(0, u64::saturating_add),
            samples: dataset.len(),
            memory: memory_available(),
        }
    }

    /// The doubt about a storage figure before the run. `past_cache`: all reads bypass the page
    /// cache.
    pub fn warning(&self, past_cache: bool) -> Option<String> {
        let fits = |memory: &u64| !past_cache && self.bytes > 0 && self.bytes <= *memory;
        self.memory.filter(fits).map(|memory| {
            format!(
                "the data fits into memory ({} are free), so reads may come from there: --cold drops cached files first, \
                 --direct on bypasses the page cache",
                bytes(memory as f64)
            )
        })
    }
}

/// Doubts about a storage figure, by the origin of the bytes. `direct`: reads were to bypass the
/// page cache. `refused`: number of refusals of `O_DIRECT`.
fn doubts(origin: &Origin, direct: bool, refused: u64) -> Vec<String> {
    let mut all = Vec::new();
    match origin.from_memory() {
        Some(share) if share >= 0.5 => all.push(format!(
            "this measured the page cache: {:.0} % of the bytes came from memory; use --cold, one epoch, or a larger dataset",
            100.0 * share
        )),
        Some(share) if share >= 0.05 => all.push(format!(
            "{:.0} % of the bytes came from memory: storage alone is slower than this figure",
            100.0 * share
        )),
        None if origin.delivered > 0 => all.push("the kernel does not count bytes from memory".into()),
        _ => {}
    }
    if direct && (refused > 0 || origin.direct == 0 && origin.delivered > origin.copied) {
        all.push(format!(
            "O_DIRECT was refused {refused} times: these reads went through the page cache"
        ));
    }
    if let Some(times) = origin.amplification() {
        all.push(format!(
            "the device moved {times:.2} bytes for each byte delivered: read-ahead, alignment, or samples not yet delivered"
        ));
    }
    all
}

/// Memory that the kernel can provide without eviction: the page cache is part of it, or can grow
/// by about that.
fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Reservations about a run's figures.
pub fn notes(given: &Given, tally: &Tally, data: &Data, per_epoch: u64) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    if let Some(benchmark) = given.benchmark {
        notes.extend(given.deviations.clone());
        notes.extend(size_of_samples(benchmark, data));
        if !notes.is_empty() {
            notes.push("so the AU is not comparable to the benchmark's".into());
        }
    }
    if tally.interrupted || tally.error.is_some() {
        notes.push("the run ended early: figures cover the batches before that".into());
    }
    let epochs = tally.batches as f64 / per_epoch.max(1) as f64;
    if epochs > 1.5 {
        notes.push(format!("the data was read {epochs:.0} times"));
    }
    notes
}

/// Note if the data differs from the benchmark's.
fn size_of_samples(benchmark: &Benchmark, data: &Data) -> Option<String> {
    let mean = data.bytes as f64 / data.samples.max(1) as f64;
    let wanted = benchmark.sample_bytes as f64;
    // Data in memory has no files.
    (data.bytes > 0 && !(0.8..1.25).contains(&(mean / wanted))).then(|| {
        format!("the benchmark's samples have {wanted:.0} bytes, these {mean:.0} on average")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Stretch;

    const DATA: Data = Data {
        bytes: 1000 * 114_660,
        samples: 1000,
        memory: Some(1 << 30),
    };

    #[test]
    fn a_warning_names_data_that_fits_into_memory() {
        let warning = DATA.warning(false).unwrap();
        assert!(
            warning.starts_with("the data fits into memory (1.07 GB are free)"),
            "{warning}"
        );
        // Direct reads need no such hint.
        assert_eq!(DATA.warning(true), None);
        for data in [
            Data {
                memory: Some(1 << 20),
                ..DATA
            },
            Data { bytes: 0, ..DATA },
        ] {
            assert_eq!(data.warning(false), None);
        }
    }

    #[test]
    fn bytes_from_memory_cast_doubt_on_figures() {
        for (moved, copied, direct, asked, said) in [
            (Some(1000), 0, 1000, true, ""),
            (
                Some(30),
                0,
                0,
                false,
                "this measured the page cache: 97 % of the bytes",
            ),
            (
                Some(770),
                0,
                0,
                false,
                "23 % of the bytes came from memory: storage alone",
            ),
            (Some(1000), 0, 0, true, "O_DIRECT was refused"),
            (
                Some(1500),
                0,
                1000,
                true,
                "the device moved 1.50 bytes for each byte",
            ),
            (None, 0, 0, false, "the kernel does not count"),
        ] {
            let mut origin = Origin::default();
            origin.delivered = 1000;
            origin.moved = moved;
            origin.copied = copied;
            origin.direct = direct;
            let doubts = doubts(&origin, asked, 0).join("; ");
            assert!(
                doubts.starts_with(said) && doubts.is_empty() == said.is_empty(),
                "{doubts}, not {said}"
            );
        }
    }

    #[test]
    fn notes_name_deviations_from_the_benchmark() {
        let notes = |words: &str, data: &Data, interrupted: bool, batches: u64| {
            let words = format!("profile --path data --device host {words}");
            let given = Given::from(words.split_whitespace()).unwrap();
            let tally = Tally {
                batches,
                stretch: Stretch::default(),
                interrupted,
                ..Tally::default()
            };
            notes(&given, &tally, data, 10).join("; ")
        };
        let right = DATA;
        let resnet50 = "--workload resnet50 --accelerator h100";
        assert_eq!(notes(resnet50, &right, false, 10), "");
        let text = notes(&format!("{resnet50} --batch 5"), &right, false, 10);
        assert_eq!(
            text,
            "the benchmark's batches are of 400, not 5; so the AU is not comparable to the benchmark's"
        );
        let small = Data {
            samples: 2000,
            ..DATA
        };
        let text = notes(resnet50, &small, false, 10);
        assert!(
            text.starts_with(
                "the benchmark's samples have 114660 bytes, these 57330 on average; so"
            ),
            "{text}"
        );
        assert_eq!(notes("--source images --step-ms 5", &small, false, 10), "");
        assert!(notes(resnet50, &right, true, 10).starts_with("the run ended early"));
        assert_eq!(
            notes(resnet50, &right, false, 40),
            "the data was read 4 times"
        );
    }
}
