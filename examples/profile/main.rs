//! Why is my GPU starving? Runs a loader on your data with a training step of a given length, and
//! names the bottleneck, the evidence, and what to change.
//!
//! ```text
//! cargo run --release --example profile -- --source images --path train/ --step-ms 120
//! cargo run --release --example profile -- --source tar --path 'train-{0000..0127}.tar' --device cuda:0 --step-ms 85 --html page.html
//! cargo run --release --example profile -- --source images --path train/ --step-ms 120 --before
//! cargo run --release --example profile -- --workload resnet50 --accelerator h100 --generate /nvme/scratch/resnet50
//! ```
//!
//! ```text
//! args ─► (data made) ─► dataset ─► loader ─► run: batch, step, batch, step … ─► answer ─► text │ JSON, trace, page
//!   └ workload: source, batch, step, required AU              └ step: a wait on the host, a kernel on a GPU
//! ```
//!
//! Guarantees: with `--json`, standard output has exactly one object. Output files are checked
//! before the run. However the run ends, Ctrl-C included, the measurements so far are printed.

mod answer;
mod args;
mod content;
#[cfg(test)]
mod folder;
mod generate;
mod gpu;
mod live;
mod measure;
mod metrics;
#[path = "../throughput/names.rs"]
mod names;
mod nvml;
mod output;
mod page;
#[path = "../throughput/settings.rs"]
mod settings;
#[path = "../throughput/source.rs"]
mod source;
mod step;
mod text;
mod workload;

use answer::{Answer, Data, Run};
use args::Given;
use feedline::dataset::Dataset;
use feedline::device::DeviceKind;
use feedline::profile::Names;
use feedline::tensor::Encoding;
use feedline::{LastBatch, Loader, LoaderBuilder, Report, Stop};
use live::{Live, Setup};
use metrics::Metrics;
use nvml::Watch;
use output::{Output, say, tell};
use source::Source;
use std::error::Error;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use step::{HostStep, Step};

type Anyhow<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    feedline::setting::speak(names::name);
    match run(Given::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(format_args!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(mut given: Given) -> Anyhow<()> {
    if given.args.live && !std::io::stdout().is_terminal() {
        return Err("--live needs a terminal, but standard output is none".into());
    }
    let files = open_outputs(&given)?;
    let metrics = given.args.prometheus.map(Metrics::listen).transpose()?;
    if let Some(metrics) = &metrics {
        tell(metrics.address());
    }
    if given.args.generate.is_some() {
        make_data(&mut given)?;
    }
    given.args.source.path = generate::data_in(std::mem::take(&mut given.args.source.path));
    let dataset = open_data(&mut given)?;
    if given.args.settings.cold {
        settings::drop_from_cache(&dataset)?;
    }
    let data = Data::of(&*dataset);
    if !given.args.json {
        say(&text::heading(&given, &dataset.describe(), &data))?;
    }
    if given.args.before {
        return before(&given, dataset);
    }
    let (loader, step) = build(&given, dataset)?;
    if let Some(metrics) = &metrics {
        metrics.serve(&loader);
    }
    let finished = measured(&given, &loader, step, &data)?;
    drop(metrics);
    finished.say(given.args.json, files)
}

/// Opens the trace and the page, if requested; before any data is made.
fn open_outputs(given: &Given) -> Result<[Option<Output>; 2], String> {
    let args = &given.args;
    let data = args.generate.as_ref().unwrap_or(&args.source.path);
    let open = |path: &Option<_>| {
        path.as_deref()
            .map(|path| Output::open(path, data))
            .transpose()
    };
    Ok([open(&args.trace)?, open(&args.html)?])
}

const ENDS: [feedline::process::Signal; 3] = [
    feedline::process::Signal::Int,
    feedline::process::Signal::Term,
    feedline::process::Signal::Hup,
];

/// Ignores a closed terminal, as under `nohup`: the run goes on.
fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & 1 == 1)
}

/// A stop flag for Ctrl-C; a second Ctrl-C ends the process.
fn stop() -> Anyhow<Stop> {
    Ok(Stop::on(
        if hangups_are_ignored() {
            &ENDS[..2]
        } else {
            &ENDS
        }
        .iter()
        .copied(),
    )?)
}

fn make_data(given: &mut Given) -> Anyhow<()> {
    let Some(dir) = &given.args.generate else {
        return Ok(());
    };
    let stop = stop()?;
    let made = generate::ensure(dir, &given.wanted(), || stop.requested())?;
    let gb = made.bytes as f64 / 1e9;
    let how = if made.before {
        "made by an earlier run"
    } else {
        "made"
    };
    tell(format_args!(
        "{gb:.3} GB of {} in {}, {how}",
        given.args.source.source,
        made.path.display()
    ));
    given.args.source.path = made.path;
    if !made.before {
        // Fresh data is in memory, but a first epoch must read from storage.
        given.args.settings.cold = true;
    }
    Ok(())
}

/// Opens the data. Archives of unet3d need no description.
fn open_data(given: &mut Given) -> Anyhow<Arc<dyn Dataset>> {
    let args = &mut given.args.source;
    let scans = given.benchmark.is_some() && args.source == Source::Npz && args.columns.is_empty();
    if scans && !args.rows && args.up_to.is_empty() && args.flat.is_none() {
        args.columns.push("x".into());
        if given.args.generate.is_none() {
            args.flat = largest(&args.path);
        }
    }
    let dataset = args.open_within(given.args.settings.budget())?;
    given.pictures = given.decode()
        && dataset
            .schema()
            .iter()
            .any(|field| field.encoding == Encoding::Image);
    Ok(dataset)
}

/// Bytes of the largest file: no byte array in it can be longer.
fn largest(path: &std::path::Path) -> Option<usize> {
    let files = std::fs::read_dir(path).ok().into_iter().flatten().flatten();
    let sizes = files
        .filter_map(|entry| entry.metadata().ok())
        .map(|data| data.len());
    let most = sizes
        .max()
        .or_else(|| std::fs::metadata(path).ok().map(|data| data.len()))?;
    usize::try_from(most).ok()
}

/// Least time of a probe, over several epochs if they are short.
const EPOCH_LEAST: Duration = Duration::from_secs(1);

/// Takes batches without a step, and prints the estimate of a run.
fn before(given: &Given, dataset: Arc<dyn Dataset>) -> Anyhow<()> {
    let loader = given
        .args
        .settings
        .loader(dataset, given.decode())?
        .build()?;
    let stop = stop()?;
    let seconds = given.args.seconds.unwrap_or(3.0);
    let probe = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    let mut batches = loader.epochs(0..)?;
    let mut first = None;
    // A whole epoch is enough, unless it is over at once: a second one may find in memory what the
    // first one read.
    let least = || {
        if loader.next_epoch() == 0 {
            probe
        } else {
            probe.min(EPOCH_LEAST)
        }
    };
    while !stop.requested() && first.is_none_or(|first: Instant| first.elapsed() < least()) {
        match batches.next_within(measure::LOOK) {
            Poll::Pending => continue,
            Poll::Ready(None) => break,
            Poll::Ready(Some(batch)) => drop(batch?),
        }
        first.get_or_insert_with(Instant::now);
    }
    let estimate = loader
        .estimate(given.step)
        .ok_or("no batch behind the first one of an epoch: a smaller --batch, more data, or more --seconds")?;
    Ok(say(&if given.args.json {
        format!("{}\n", serde_json::to_string(&estimate)?)
    } else {
        format!("{estimate}\n")
    })?)
}

/// The loader, and the consumer of its batches.
fn build(given: &Given, dataset: Arc<dyn Dataset>) -> Anyhow<(Arc<Loader>, Step)> {
    let settings = &given.args.settings;
    let mut builder = settings.loader(dataset, given.decode())?;
    if given.benchmark.is_some() {
        builder = builder.last_batch(LastBatch::Drop);
    }
    let (builder, step) = step_of(given, builder)?;
    Ok((Arc::new(builder.build()?), step))
}

fn step_of(given: &Given, builder: LoaderBuilder) -> Anyhow<(LoaderBuilder, Step)> {
    let DeviceKind::Cuda(ordinal) = given.args.settings.device.kind() else {
        return Ok((builder, Step::Host(HostStep::new(given.step))));
    };
    let step = gpu::GpuStep::new(ordinal, given.step)
        .map_err(|error| format!("the step on cuda:{ordinal}: {error}"))?;
    Ok((builder.stream(step.stream()), Step::Gpu(step)))
}

/// All results of a run.
struct Finished {
    answer: Answer,
    loader: Arc<Loader>,
    report: Report,
    gpu: Option<String>,
}

fn measured(given: &Given, loader: &Arc<Loader>, step: Step, data: &Data) -> Anyhow<Finished> {
    let args = &given.args;
    let stop = stop()?;
    let watch = Watch::start(&args.settings.device);
    let live = args.live.then(|| dashboard(given, loader)).transpose()?;
    let tally = measure::run(loader, step, given.limit(), || {
        stop.requested() || live.as_ref().is_some_and(Live::quit)
    })?;
    drop(live);
    let (gpu, nvml) = watch.map(Watch::end).unzip();
    let snapshot = loader.snapshot();
    let report = loader.report();
    let notes = answer::notes(given, &tally, data, loader.batches_per_epoch());
    let run = Run {
        given,
        tally: &tally,
        report: &report,
        snapshot,
        notes,
        nvml,
    };
    Ok(Finished {
        answer: Answer::new(run),
        loader: loader.clone(),
        report,
        gpu,
    })
}

fn dashboard(given: &Given, loader: &Arc<Loader>) -> Anyhow<Live> {
    let title = loader.report().dataset;
    let step = Some(given.step).filter(|step| !step.is_zero());
    Live::start(
        loader.clone(),
        Setup {
            title,
            step,
            au_target: given.au_target(),
        },
    )
}

impl Finished {
    /// Prints the answer, then writes the files, even after a failure; returns the failures.
    fn say(self, json: bool, files: [Option<Output>; 2]) -> Anyhow<()> {
        let answer = if json {
            format!("{}\n", self.answer.json()?)
        } else {
            self.text()
        };
        let mut failed: Vec<String> = say(&answer).err().into_iter().collect();
        failed.extend(self.write(files));
        failed.extend(self.answer.error);
        let last = failed.pop();
        for error in failed {
            tell(format_args!("error: {error}"));
        }
        last.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Errors of each file.
    fn write(&self, [trace, html]: [Option<Output>; 2]) -> Vec<String> {
        let snapshot = &self.answer.snapshot;
        let trace = trace.map(|file| {
            let text = feedline::profile::trace(
                &self.loader.timeline(),
                snapshot,
                Names::new("profile", 0),
            );
            file.write(&text)
        });
        let html = html.map(|file| {
            let lines = text::lines(&self.answer, &self.report.verdict);
            let title = format!("feedline profile: {}", self.report.dataset);
            file.write(&page::html(snapshot, &lines, &title, &self.text()))
        });
        [trace, html]
            .into_iter()
            .flatten()
            .filter_map(Result::err)
            .collect()
    }

    fn text(&self) -> String {
        // The verdict is printed above, with its evidence.
        let facts = format!("{:#}", self.report);
        text::answer(
            &self.answer,
            &self.report.verdict,
            &facts,
            self.gpu.as_deref(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;
    use serde_json::Value;
    use std::path::Path;

    const RECORDS: &str = "--source records --record-bytes 1000 --generate-mib 1 --batch 10";

    /// Runs with these arguments on generated data; returns the JSON and the text.
    fn profile(words: &str, folder: &Folder) -> (Value, String) {
        let finished = finished(words, folder);
        (
            serde_json::from_str(&finished.answer.json().unwrap()).unwrap(),
            finished.text(),
        )
    }

    fn finished(words: &str, folder: &Folder) -> Finished {
        let words = format!(
            "profile --generate {} --device host {words}",
            folder.join("made").display()
        );
        let mut given = Given::from(words.split_whitespace()).unwrap();
        make_data(&mut given).unwrap();
        let dataset = open_data(&mut given).unwrap();
        let data = Data::of(&*dataset);
        let (loader, step) = build(&given, dataset).unwrap();
        measured(&given, &loader, step, &data).unwrap()
    }

    #[test]
    fn json_has_every_field_with_its_type() {
        let folder = Folder::new();
        let (json, _) = profile(&format!("{RECORDS} --epochs 1 --step-ms 1"), &folder);
        for (kind, names) in [
            (
                "number",
                "au gpu_idle_pct starved_pct late_pct items_per_s bytes_per_s step_ms seconds batch batches samples steps",
            ),
            ("string", "cause strength device reader"),
            ("array", "evidence advice stages what_if notes warnings"),
            ("object", "origin snapshot"),
            ("null", "au_target pass workload accelerator nvml error"),
        ] {
            for name in names.split(' ') {
                let found = match json
                    .get(name)
                    .unwrap_or_else(|| panic!("{name} is missing"))
                {
                    Value::Number(_) => "number",
                    Value::String(_) => "string",
                    Value::Array(_) => "array",
                    Value::Object(_) => "object",
                    Value::Null => "null",
                    Value::Bool(_) => "bool",
                };
                assert_eq!(found, kind, "{name}");
            }
        }
        assert_eq!(
            (json["batches"].as_u64(), json["samples"].as_u64()),
            (Some(105), Some(1048))
        );
        let stage = &json["stages"][0];
        assert!(
            stage["stage"].is_string()
                && stage["utilisation"].is_f64()
                && stage["at_least"].is_boolean()
        );
    }

    #[test]
    fn au_is_step_time_and_idle_is_the_rest() {
        let folder = Folder::new();
        let (json, text) = profile(&format!("{RECORDS} --batches 41 --step-ms 2"), &folder);
        let number = |name: &str| json[name].as_f64().unwrap();
        let au = 40.0 * 0.002 / number("seconds");
        assert!(
            (number("au") - au).abs() < 1e-9 && au <= 1.0,
            "{au} {}",
            json["au"]
        );
        assert!((number("gpu_idle_pct") - 100.0 * (1.0 - au)).abs() < 1e-6);
        assert!(number("late_pct") <= number("gpu_idle_pct") + 1e-6);
        assert!(
            text.contains(&format!("\nAU        {:.2} %\n", 100.0 * au)),
            "{text}"
        );
        let (json, text) = profile(&format!("{RECORDS} --epochs 1"), &folder);
        assert!(
            json["au"].is_null() && json["gpu_idle_pct"].is_null() && !text.contains("\nAU "),
            "{text}"
        );
    }

    #[test]
    fn workloads_pass_or_fail_in_the_text() {
        let folder = Folder::new();
        let workload = "--workload cosmoflow --accelerator a100 --generate-mib 12";
        let (json, text) = profile(&format!("{workload} --epochs 1"), &folder);
        let pass = json["pass"].as_bool().unwrap();
        assert_eq!(pass, json["au"].as_f64().unwrap() >= 0.7);
        assert!(
            text.contains(if pass {
                ": PASS (70 % required)"
            } else {
                ": FAIL (70 % required)"
            }),
            "{text}"
        );
        assert_eq!(
            (json["batch"].as_u64(), json["step_ms"].as_f64()),
            (Some(1), Some(5.51))
        );
        assert_eq!(
            json["notes"].to_string().matches("benchmark").count(),
            0,
            "{}",
            json["notes"]
        );
        let (json, text) = profile(&format!("{workload} --batch 2"), &folder);
        assert!(
            json["pass"].is_null()
                && json["au"].is_f64()
                && json["au_target"].as_f64() == Some(0.7)
        );
        assert!(
            text.contains(" %: not the benchmark's batch, so neither PASS nor FAIL\n"),
            "{text}"
        );
    }

    #[test]
    fn the_verdict_mentions_a_step_later_than_starvation() {
        let folder = Folder::new();
        let mut finished = finished(&format!("{RECORDS} --epochs 1 --step-ms 1"), &folder);
        for (late, starved, said) in [(12.0, 3.0, true), (12.0, 13.0, false), (4.9, 0.0, false)] {
            finished.answer.late_pct = Some(late);
            finished.answer.starved_pct = Some(starved);
            let line = "\n  ! The step itself was late: for 12.0 % of the time";
            assert_eq!(finished.text().contains(line), said);
        }
    }

    #[test]
    fn text_json_and_table_show_one_rate() {
        let folder = Folder::new();
        let (json, text) = profile(&format!("{RECORDS} --epochs 1 --step-ms 1"), &folder);
        let rate = json["items_per_s"].as_f64().unwrap();
        assert!(
            (rate - 1038.0 / json["seconds"].as_f64().unwrap()).abs() < 1e-6 * rate,
            "{json}"
        );
        let line = format!("\nrate      {} samples/s", text::number(rate));
        assert!(
            text.contains(&line) && text.contains("over 104 batches"),
            "{text}"
        );
        // The table shows the loader's own rate: no stage can do less, and no improvement gives
        // less.
        let rates = |list: &str, name: &str| -> Vec<f64> {
            json[list]
                .as_array()
                .unwrap()
                .iter()
                .map(|row| row[name].as_f64().unwrap())
                .collect()
        };
        let kept = rates("what_if", "items_per_s");
        let could = rates("stages", "ceiling_items_per_s");
        assert!(
            kept.iter()
                .chain(&could)
                .all(|rate| *rate >= 0.9999 * kept[0]),
            "{kept:?} {could:?}"
        );
    }

    #[test]
    fn a_single_batch_has_the_rate_of_the_whole_run() {
        let folder = Folder::new();
        let (json, text) = profile(&format!("{RECORDS} --batches 1 --step-ms 1"), &folder);
        let rate = json["items_per_s"].as_f64().unwrap();
        let wall = json["wall_seconds"].as_f64().unwrap();
        assert!(
            (rate * wall - 10.0).abs() < 1e-6 && json["bytes_per_s"].as_f64().unwrap() > 0.0,
            "{json}"
        );
        assert!(
            json["pass"].is_null()
                && json["au"].is_null()
                && json["what_if"].as_array().unwrap().is_empty()
        );
        assert!(
            text.contains("\nAU        not known") && text.contains("of 1 batch and its step"),
            "{text}"
        );
    }

    #[test]
    fn an_error_keeps_the_measurements() {
        let folder = Folder::new();
        let data = Folder::new();
        let file = |number| data.join(format!("{number}.bin"));
        (0..10).for_each(|number| std::fs::write(file(number), [7; 10_000]).unwrap());
        let words = "profile --source records --record-bytes 1000 --batch 10 --device host --epochs 1 --step-ms 1 --path";
        let path = data.to_string_lossy().into_owned();
        let mut given = Given::from(words.split(' ').chain([path.as_str()])).unwrap();
        let dataset = open_data(&mut given).unwrap();
        let data = Data::of(&*dataset);
        let (loader, step) = build(&given, dataset).unwrap();
        std::fs::remove_file(file(5)).unwrap();
        let finished = measured(&given, &loader, step, &data).unwrap();
        let said = finished.answer.error.clone().unwrap();
        let text = finished.text();
        assert!(
            finished.answer.batches == 5 && said.contains("5.bin") && finished.answer.au.is_some(),
            "{said}"
        );
        assert!(
            text.trim_start().starts_with("ERROR ")
                && text.contains("VERDICT")
                && text.contains("AU "),
            "{text}"
        );
        let page = folder.join("page.html");
        let files = [Path::new("/dev/full"), &page]
            .map(|path| Some(Output::open(path, Path::new("/none")).unwrap()));
        // Returns the last error; one failed file does not prevent the other.
        assert_eq!(finished.say(true, files).unwrap_err().to_string(), said);
        assert!(std::fs::metadata(&page).unwrap().len() > 0);
    }

    #[test]
    fn usual_changes_are_predicted() {
        let folder = Folder::new();
        let (json, text) = profile(&format!("{RECORDS} --epochs 1 --workers 2"), &folder);
        let whats = json["what_if"]
            .as_array()
            .unwrap()
            .iter()
            .map(|guess| guess["what"].as_str().unwrap());
        // Cached data is not read, so depth does not matter.
        let whats: Vec<&str> = whats.filter(|what| !what.starts_with("depth ")).collect();
        assert_eq!(
            whats,
            [
                "as it is",
                "workers 4 instead of 2",
                "storage twice as fast",
                "all in the page cache"
            ]
        );
        assert!(text.contains("workers 4 instead of 2"));
    }

    #[test]
    fn text_fits_100_columns_except_for_long_words() {
        let folder = Folder::new();
        let (_, text) = profile(
            "--source images --generate-mib 1 --batch 4 --epochs 1 --crop 32 --step-ms 1",
            &folder,
        );
        let long = |line: &&str| {
            line.chars().count() > 100
                && line
                    .split_whitespace()
                    .all(|word| word.chars().count() < 80)
        };
        assert_eq!(text.lines().filter(long).collect::<Vec<_>>(), [""; 0]);
        assert!(text.contains("decoding on the GPU"), "{text}");
    }
}
