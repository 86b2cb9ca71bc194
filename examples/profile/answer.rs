//! What is said at the end of a run, as data: the JSON, and what the text is made of.
//!
//! Figures that are not known, or mean nothing (the AU without a step), are `null`. Shares are 0 to 1 and percentages say so in
//! their name; times are of the wall clock.

use crate::args::Given;
use crate::measure::Tally;
use crate::page_cache;
use crate::text::{bytes, number};
use crate::workload::Benchmark;
use feedline::Report;
use feedline::dataset::Dataset;
use feedline::device::DeviceKind;
use feedline::profile::{Cause, Change, Origin, Prediction, Snapshot, StageLoad, Strength, Verdict, WhatIf};
use feedline::unstable::DEPTH_MAX;
use serde::Serialize;

/// What was found out.
#[derive(Serialize)]
pub struct Answer {
    /// Accelerator utilisation: steps / time from the end of the first step to the end of the last.
    pub au: Option<f64>,
    pub au_target: Option<f64>,
    /// Not known either when the batches are not the benchmark's.
    pub pass: Option<bool>,
    pub gpu_idle_pct: Option<f64>,
    /// Not known where the consumer's steps were not measured.
    pub starved_pct: Option<f64>,
    /// Idle time that is not the loader's doing: on the host idle less starved, which is what this thread lost on busy cores. On a
    /// GPU an upper bound of what the host's own delays cost.
    pub late_pct: Option<f64>,
    pub cause: Cause,
    pub also: Option<Cause>,
    pub strength: &'static str,
    /// What is missing, where the evidence is thin.
    pub strength_why: Option<String>,
    pub evidence: Vec<String>,
    pub advice: Vec<String>,
    /// Of `steps` batches in `seconds`, as the AU; without any, of the whole run.
    pub items_per_s: f64,
    pub bytes_per_s: f64,
    pub stages: Vec<Stage>,
    pub what_if: Vec<Guess>,
    pub step_ms: f64,
    pub batch: usize,
    pub batches: u64,
    pub samples: u64,
    /// Steps from the end of the first to the end of the last, and that time: `au` = `steps` × `step_ms` / 1000 / `seconds`.
    pub steps: u64,
    pub seconds: f64,
    /// Of the whole run, and until the first batch was there.
    pub wall_seconds: f64,
    pub first_batch_seconds: f64,
    pub interrupted: bool,
    /// What ended the run before its time.
    pub error: Option<String>,
    pub device: String,
    pub reader: String,
    pub workload: Option<String>,
    pub accelerator: Option<String>,
    /// What is to be known of the run before its figures are believed.
    pub notes: Vec<String>,
    /// Share of the bytes that came from memory, what that rests on, and what it says against the figures.
    pub from_memory: Option<f64>,
    pub origin: Origin,
    pub warnings: Vec<String>,
    /// What NVML says of the GPU at the end of the run: a GPU's state, or why there is none.
    pub nvml: Option<serde_json::Value>,
    pub snapshot: Snapshot,
}

/// A stage of the loader, or the consumer.
#[derive(Serialize)]
pub struct Stage {
    pub stage: Cause,
    pub utilisation: f64,
    pub ceiling_items_per_s: f64,
    pub at_least: bool,
}

/// What a change would give.
#[derive(Serialize)]
pub struct Guess {
    pub what: String,
    pub change: Change,
    pub items_per_s: f64,
    pub at_least: bool,
    pub at_most: bool,
    pub bound_by: Cause,
    /// Of the same step.
    pub au: Option<f64>,
    pub caveats: Vec<String>,
}

/// Lateness from which on it is spoken of.
const LATE: f64 = 0.01;
/// From so many percent on it changes what the verdict means.
const LATE_MUCH: f64 = 5.0;
/// The loader's own rate is another than the run's when it differs by so much.
const OTHER_RATE: f64 = 0.01;

/// What a run left behind.
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
        let Run { given, tally, report, snapshot, notes, nvml } = run;
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
            gpu_idle_pct: gpu.map(|(idle, _)| idle).or(au.map(|au| 1.0 - au)).map(|share| 100.0 * share),
            starved_pct: (verdict.cause != Cause::Unknown).then_some(100.0 * verdict.starved_share),
            late_pct: gpu.map(|(_, late)| late).or(late(au, verdict)).map(|share| 100.0 * share),
            cause: verdict.cause,
            also: verdict.also,
            strength,
            strength_why,
            evidence: verdict.evidence.clone(),
            advice: verdict.advice.clone(),
            items_per_s,
            bytes_per_s,
            stages: verdict.stages.iter().map(Stage::from).collect(),
            what_if: match tally.stretch.steps {
                // Less than a millisecond of work may stand for the steady time of a single batch.
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
            workload: given.benchmark.map(|benchmark| benchmark.workload.to_string()),
            accelerator: given.benchmark.map(|benchmark| benchmark.accelerator.to_string()),
            notes,
            from_memory: report.origin.from_memory(),
            origin: report.origin,
            warnings: doubts(&report.origin, given.args.settings.past_cache(), report.reads.fallbacks),
            nvml,
            snapshot,
        }
    }

    /// How the AU stands to what is asked for, behind it.
    pub fn result(&self) -> String {
        let (Some(au), Some(target)) = (self.au, self.au_target) else { return String::new() };
        let percent = 100.0 * target;
        match self.pass {
            None => ": not the benchmark's batch, so neither PASS nor FAIL".into(),
            Some(true) => format!(": PASS ({percent:.0} % required)"),
            Some(false) => {
                let late = self.late_pct.filter(|late| au + late / 100.0 >= target).map(|late| self.without(late, au));
                format!(": FAIL ({percent:.0} % required){}", late.unwrap_or_default())
            }
        }
    }

    fn without(&self, late: f64, au: f64) -> String {
        let most = if self.on_gpu() { "up to " } else { "" };
        let then = (100.0 * au + late).min(100.0);
        format!("; without the {most}{late:.2} % lost on busy cores it would be {most}{then:.2} %")
    }

    fn on_gpu(&self) -> bool {
        self.snapshot.consumer.gpu.as_ref().is_some_and(|gpu| gpu.steps > 0)
    }

    /// That what the verdict takes for the consumer's own work was this program, late on a busy machine.
    pub fn late_step(&self) -> Option<String> {
        let late = self.late_pct.filter(|late| *late > LATE_MUCH && *late > self.starved_pct.unwrap_or(0.0))?;
        Some(match self.on_gpu() {
            true => format!(
                "The step itself was late: up to {late:.1} % of the time the GPU waited for this program to ask for a batch, as the \
                 machine was busy. What is said of the consumer's own work is not the model's alone."
            ),
            false => format!(
                "The step itself was late: for {late:.1} % of the time this program had no core, as the machine was busy. What is \
                 said of the consumer's own work is not the model's alone."
            ),
        })
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

/// Of a GPU, by events on its stream: the share of the steady time in which it had nothing to do, and of that the part before
/// the next batch was asked for. Scaled from the steps that were measured to all.
fn gpu_idle(snapshot: &Snapshot) -> Option<(f64, f64)> {
    let gpu = snapshot.consumer.gpu.as_ref().filter(|gpu| gpu.steps > 0 && snapshot.steady_ns > 0)?;
    let all = (snapshot.consumer.batches as f64 / gpu.steps as f64).max(1.0);
    let share = |ns: u64| (ns as f64 * all / snapshot.steady_ns as f64).min(1.0);
    Some((share(gpu.starved_ns.saturating_add(gpu.host_late_ns)), share(gpu.host_late_ns)))
}

/// Of the host: what is neither steps nor waits for batches.
fn late(au: Option<f64>, verdict: &Verdict) -> Option<f64> {
    Some((1.0 - au? - verdict.starved_share).max(0.0))
}

impl From<&StageLoad> for Stage {
    fn from(load: &StageLoad) -> Self {
        let StageLoad { stage, utilisation, ceiling_items_per_s, at_least, .. } = *load;
        Self { stage, utilisation, ceiling_items_per_s, at_least }
    }
}

/// What was measured, what the usual changes would give, and those that were asked for.
fn guesses(snapshot: &Snapshot, given: &Given, items_per_s: f64) -> Vec<Guess> {
    let Some(model) = WhatIf::from(snapshot) else { return Vec::new() };
    let workers = |workers| Change { workers: Some(workers), ..Change::default() };
    let now = snapshot.decode.workers.max(1);
    let mut changes = vec![
        (format!("workers {} instead of {now}", now.saturating_mul(2)), workers(now.saturating_mul(2))),
        ("storage twice as fast".into(), Change { storage_factor: Some(2.0), ..Change::default() }),
        ("all in the page cache".into(), Change { cached: true, ..Change::default() }),
    ];
    let depth = snapshot.storage.depth.max(1);
    if snapshot.storage.reads > 0 && depth < DEPTH_MAX {
        let twice = depth.saturating_mul(2).min(DEPTH_MAX);
        changes.push((format!("depth {twice} instead of {depth}"), Change { depth: Some(twice), ..Change::default() }));
    }
    if given.pictures {
        changes.push(("decoding on the GPU".into(), Change { gpu_decode: true, ..Change::default() }));
    }
    let asked =
        given.args.what_if_workers.iter().map(|count| (format!("workers {count} instead of {now}"), workers(*count)));
    for (what, change) in asked {
        if changes.iter().all(|(_, other)| *other != change) {
            changes.push((what, change));
        }
    }
    let rows = snapshot.consumer.samples as f64 / snapshot.consumer.batches.max(1) as f64;
    let guess = |(what, change)| Guess::new(what, change, &model, rows, given);
    let mut all = vec![Guess::as_it_is(&model, items_per_s, rows, given)];
    all.extend(changes.into_iter().map(guess));
    all
}

impl Guess {
    /// What the loader can keep up: the other rows are changes to that. `measured` is the rate of the run.
    fn as_it_is(model: &WhatIf, measured: f64, rows: f64, given: &Given) -> Self {
        let guess = Self::new("as it is".into(), Change::default(), model, rows, given);
        // It was measured: no bound, and nothing was supposed.
        let mut guess = Self { at_least: false, caveats: Vec::new(), ..guess };
        let kept = guess.items_per_s;
        if (kept - measured).abs() > OTHER_RATE * measured {
            guess.caveats.push(format!(
                "Rows are of what the loader can keep up. The run's own {} samples/s leave out the first step, and hold what was \
                 ready before the first batch.",
                number(measured)
            ));
        }
        guess
    }

    /// `rows`: of a batch, on average.
    fn new(what: String, change: Change, model: &WhatIf, rows: f64, given: &Given) -> Self {
        let Prediction { items_per_s, at_least, at_most, bound_by, caveats, .. } = model.with(&change);
        let busy = items_per_s / rows.max(1.0) * given.step.as_secs_f64();
        let au = (busy > 0.0).then(|| busy.min(1.0));
        Self { what, change, items_per_s, at_least, at_most, bound_by, au, caveats }
    }
}

/// The data that is read.
pub struct Data {
    /// Bytes of its files, and samples in them.
    pub bytes: u64,
    pub samples: u64,
    /// How much of it the page cache held before the run.
    pub cached: Option<f64>,
    /// Bytes of memory that the page cache might have.
    pub memory: Option<u64>,
}

impl Data {
    pub fn of(dataset: &dyn Dataset) -> Self {
        let sources = dataset.sources();
        let in_files = sources.ids().filter(|id| sources.bytes_of(*id).is_none());
        Self {
            bytes: in_files.map(|id| sources.len_of(id)).fold(0, u64::saturating_add),
            samples: dataset.len(),
            cached: page_cache::share(sources),
            memory: memory_available(),
        }
    }

    /// What is to be known before a figure is taken for that of storage; `past_cache` when all is read from there.
    pub fn warnings(&self, past_cache: bool) -> Vec<String> {
        let mut all = Vec::new();
        let cached = self.cached.unwrap_or(0.0);
        let fits = |memory: &u64| !past_cache && self.bytes > 0 && self.bytes <= *memory && cached < 0.95;
        if let Some(memory) = self.memory.filter(fits) {
            all.push(format!(
                "the data fits into memory ({} are free): what was read once may come from there; --direct on reads past the \
                 page cache",
                bytes(memory)
            ));
        }
        if cached >= 0.05 {
            all.push(format!(
                "{:.0} % of the files are in the page cache now: --cold drops them first",
                100.0 * cached
            ));
        }
        all
    }
}

/// What is to be said against a figure of storage, by where the bytes came from. `direct`: reads past the page cache were asked
/// for; `refused`: so often `O_DIRECT` was refused.
fn doubts(origin: &Origin, direct: bool, refused: u64) -> Vec<String> {
    let mut all = Vec::new();
    let uncounted = origin.direct > 0 && origin.moved.is_some_and(|moved| moved < origin.direct / 2);
    match origin.from_memory() {
        _ if uncounted => all.push(
            "reads past the page cache were not counted as coming from a device: the file system serves them from memory, or \
             the kernel does not count its reads"
                .into(),
        ),
        Some(share) if share >= 0.5 => all.push(format!(
            "this measured the page cache: {:.0} % of the bytes came from memory; use --cold, one epoch, or a larger dataset",
            100.0 * share
        )),
        Some(share) if share >= 0.05 => all.push(format!(
            "{:.0} % of the bytes came from memory: storage alone is slower than this figure",
            100.0 * share
        )),
        None if origin.delivered > 0 => all.push("the kernel does not count what came from memory".into()),
        _ => {}
    }
    if direct && refused > 0 {
        all.push(format!("O_DIRECT was refused for {refused} files or reads: these went through the page cache"));
    } else if direct && origin.direct == 0 && origin.delivered > origin.copied {
        all.push("O_DIRECT was asked for, but no read bypassed the page cache".into());
    }
    if let Some(times) = origin.amplification() {
        all.push(format!(
            "the device moved {times:.2} bytes for each byte delivered: read-ahead, alignment, samples read and not yet delivered, \
             or other reads of this process"
        ));
    }
    all
}

/// What the kernel would give without taking it from somebody: the page cache can grow by about that, or is part of it.
fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// What is to be known of a run before its figures are believed.
pub fn notes(given: &Given, tally: &Tally, data: &Data, verdict: &Verdict, per_epoch: u64) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    if let Some(benchmark) = given.benchmark {
        notes.extend(given.deviations.clone());
        notes.extend(size_of_samples(benchmark, data));
        if !notes.is_empty() {
            notes.push("so the AU is not that of the benchmark's emulation".into());
        }
    }
    if tally.interrupted {
        notes.push("the run was interrupted: figures are of what was taken until then".into());
    }
    if tally.error.is_some() {
        notes.push("an error ended the run: figures are of what was taken until then".into());
    }
    notes.extend(lateness(given, tally, verdict));
    let epochs = tally.batches as f64 / per_epoch.max(1) as f64;
    if epochs > 1.5 {
        notes.push(format!("the data was read {epochs:.0} times"));
    }
    notes
}

/// Whether the cores were too busy for the step to be emulated well.
fn lateness(given: &Given, tally: &Tally, verdict: &Verdict) -> Option<String> {
    if given.args.settings.device.kind() != DeviceKind::Host {
        return None;
    }
    let late = late(tally.stretch.utilisation(given.step), verdict).filter(|late| *late >= LATE)?;
    let each = 1e3 * late * tally.stretch.seconds / tally.stretch.steps.max(1) as f64;
    Some(format!(
        "between steps {each:.2} ms were lost on average ({:.1} % of the time) because the cores are busy; a GPU with its work in a \
         queue would not wait for that",
        100.0 * late
    ))
}

/// Whether the user's data is like the benchmark's.
fn size_of_samples(benchmark: &Benchmark, data: &Data) -> Option<String> {
    let mean = data.bytes as f64 / data.samples.max(1) as f64;
    let wanted = benchmark.sample_bytes as f64;
    // Data in memory has no files.
    (data.bytes > 0 && !(0.8..1.25).contains(&(mean / wanted)))
        .then(|| format!("the benchmark's samples have {wanted:.0} bytes, these {mean:.0} on average"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Stretch;

    fn data(cached: Option<f64>) -> Data {
        Data { bytes: 1000 * 114_660, samples: 1000, cached, memory: Some(1 << 30) }
    }

    #[test]
    fn data_that_memory_may_hold_is_warned_of_before_the_run() {
        let fits = "the data fits into memory (1.07 GB are free)";
        let (all, some) = ("100 % of the files are in the page cache", "20 % of the files are in the page cache");
        for (data, expected) in [
            (data(Some(0.0)), vec![fits]),
            (data(Some(0.2)), vec![fits, some]),
            (data(Some(1.0)), vec![all]),
            (data(None), vec![fits]),
            (Data { memory: Some(1 << 20), ..data(Some(0.0)) }, vec![]),
            (Data { memory: Some(1 << 20), ..data(Some(0.2)) }, vec![some]),
            (Data { memory: None, ..data(Some(0.0)) }, vec![]),
            (Data { bytes: 0, ..data(None) }, vec![]),
        ] {
            let warnings = data.warnings(false);
            assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
            assert!(warnings.iter().zip(&expected).all(|(warning, start)| warning.starts_with(start)), "{warnings:?}");
            // Who reads past the cache need not be told to.
            assert!(data.warnings(true).iter().all(|warning| !warning.starts_with(fits)));
        }
    }

    #[test]
    fn bytes_from_memory_cast_doubt_on_a_figure() {
        let said = |moved: Option<u64>, copied: u64, direct: u64, asked: bool, refused: u64| {
            let mut origin = Origin::default();
            (origin.delivered, origin.moved, origin.copied, origin.direct) = (1000, moved, copied, direct);
            doubts(&origin, asked, refused).join("; ")
        };
        assert_eq!(said(Some(1000), 0, 1000, true, 0), "");
        assert_eq!(said(Some(1000), 0, 0, false, 0), "");
        assert!(said(Some(30), 0, 0, false, 0).starts_with("this measured the page cache: 97 % of the bytes"));
        assert!(said(Some(770), 0, 0, false, 0).starts_with("23 % of the bytes came from memory: storage alone"));
        assert!(said(Some(1000), 1000, 0, false, 0).starts_with("this measured the page cache: 100 %"));
        assert!(said(Some(0), 0, 1000, true, 0).starts_with("reads past the page cache were not counted"));
        assert!(said(Some(1000), 0, 900, true, 2).starts_with("O_DIRECT was refused for 2 files or reads"));
        assert!(said(Some(1000), 0, 0, true, 0).starts_with("O_DIRECT was asked for, but no read bypassed"));
        assert!(said(Some(1500), 0, 1000, true, 0).starts_with("the device moved 1.50 bytes for each byte"));
        assert!(said(None, 0, 0, false, 0).starts_with("the kernel does not count"));
    }

    #[test]
    fn what_makes_a_run_another_than_the_benchmarks_is_said() {
        let notes = |words: &str, data: &Data, interrupted: bool, batches: u64| {
            let words = format!("profile --path data --device host {words}");
            let given = Given::from(words.split_whitespace()).unwrap();
            let stretch = Stretch { steps: 9, seconds: 9.0 * given.step.as_secs_f64() };
            let tally = Tally { batches, stretch, interrupted, ..Tally::default() };
            notes(&given, &tally, data, &Verdict::of(&Snapshot::default()), 10).join("; ")
        };
        let (right, resnet50) = (data(Some(0.0)), "--workload resnet50 --accelerator h100");
        assert_eq!(notes(resnet50, &right, false, 10), "");
        let text = notes(&format!("{resnet50} --batch 5"), &right, false, 10);
        assert_eq!(
            text,
            "the benchmark's batches are of 400, not 5; so the AU is not that of the benchmark's emulation"
        );
        let small = Data { samples: 2000, ..data(Some(0.0)) };
        let text = notes(resnet50, &small, false, 10);
        assert!(text.starts_with("the benchmark's samples have 114660 bytes, these 57330 on average; so"), "{text}");
        assert_eq!(notes("--source images --step-ms 5", &small, false, 10), "");
        assert!(notes(resnet50, &right, true, 10).starts_with("the run was interrupted"));
        assert_eq!(notes(resnet50, &right, false, 40), "the data was read 4 times");
    }

    #[test]
    fn time_that_busy_cores_cost_is_told_apart_from_starvation() {
        let given = Given::from("profile --source images --path data --device host --step-ms 10".split(' ')).unwrap();
        let (mut verdict, late) =
            (Verdict::of(&Snapshot::default()), "between steps 1.00 ms were lost on average (9.0 % of the time)");
        let tally = Tally { stretch: Stretch { steps: 90, seconds: 1.0 }, ..Tally::default() };
        verdict.starved_share = 0.01;
        assert!(lateness(&given, &tally, &verdict).unwrap().starts_with(late));
        verdict.starved_share = 0.095;
        assert_eq!(lateness(&given, &tally, &verdict), None);
    }
}
