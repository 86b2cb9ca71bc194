//! Why is my GPU starving? A loader is run on your data with a training step of a length that you say, and the answer names what
//! limits it, the evidence, and what to change.
//!
//! ```text
//! cargo run --release --example profile -- --source images --path train/ --step-ms 120
//! cargo run --release --example profile -- --source tar --path 'train-{0000..0127}.tar' --device cuda:0 --step-ms 85 --html page.html
//! cargo run --release --example profile -- --workload resnet50 --accelerator h100 --generate /nvme/scratch/resnet50
//! ```
//!
//! ```text
//! args ─► (data made) ─► dataset ─► loader ─► run: batch, step, batch, step … ─► answer ─► text │ JSON, trace, page
//!   └ workload: source, batch, step, the AU to reach                  └ step: a wait on the host, a kernel on a GPU
//! ```
//!
//! What holds: with `--json` standard output has one object and nothing else; files are checked before the run; whatever ends the
//! run, Ctrl-C included, what was measured until then is said.

mod answer;
mod args;
mod content;
#[cfg(test)]
mod folder;
mod generate;
#[cfg(feature = "cuda")]
mod gpu;
mod measure;
mod output;
#[path = "../throughput/settings.rs"]
mod settings;
#[path = "../throughput/source.rs"]
mod source;
mod step;
mod text;
mod watch;
mod workload;

use answer::{Answer, Data, Run};
use args::Given;
use feedline::dataset::Dataset;
#[cfg(feature = "cuda")]
use feedline::device::DeviceKind;
use feedline::profile::export::{self, Names, Server};
use feedline::profile::{DeviceBytes, Evidence, Snapshot, Truth, Verdict, judge};
use feedline::read::device_bytes;
use feedline::tensor::Encoding;
use feedline::{LastBatch, Loader, LoaderBuilder, Report, Stop};
use measure::Limit;
use output::{Output, say, tell};
use source::Source;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use step::{HostStep, Step};
use watch::Watch;

type Anyhow<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run(Given::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(format_args!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(mut given: Given) -> Anyhow<()> {
    let open = |path: &Option<std::path::PathBuf>| path.as_deref().map(Output::open).transpose();
    let files = (open(&given.args.trace)?, open(&given.args.html)?);
    if given.args.generate.is_some() {
        make_data(&mut given)?;
    }
    let dataset = open_data(&mut given)?;
    if given.args.settings.cold {
        settings::drop_from_cache(&dataset)?;
    }
    given.pictures = given.decode() && dataset.schema().iter().any(|field| field.encoding == Encoding::Image);
    let data = Data::of(&*dataset);
    if !given.args.json {
        say(&text::heading(&given, &dataset.describe(), &data))?;
    }
    let (loader, step) = build(&given, dataset)?;
    let finished = measured(&given, &loader, step, &data)?;
    finished.write(files)?;
    if given.args.json {
        return Ok(say(&format!("{}\n", finished.answer.json()?))?);
    }
    Ok(say(&finished.text())?)
}

/// A flag that Ctrl-C sets; the second one ends the process.
fn stop() -> Anyhow<Stop> {
    #[cfg(feature = "signals")]
    return Ok(Stop::on([feedline::Signal::Int, feedline::Signal::Term])?);
    #[cfg(not(feature = "signals"))]
    Ok(Stop::new())
}

fn make_data(given: &mut Given) -> Anyhow<()> {
    let Some(dir) = &given.args.generate else { return Ok(()) };
    let stop = stop()?;
    let made = generate::ensure(dir, &given.wanted(), || stop.requested())?;
    let gb = made.bytes as f64 / 1e9;
    let how = if made.before { "made by an earlier run" } else { "made" };
    tell(format_args!("{gb:.3} GB of {} in {}, {how}", given.args.source.source, made.path.display()));
    given.args.source.path = made.path;
    if !made.before {
        // What was written last is in memory; a first epoch shall read from storage.
        given.args.settings.cold = true;
    }
    Ok(())
}

/// Opens it; the archives of unet3d without being told what is in them.
fn open_data(given: &mut Given) -> Anyhow<Arc<dyn Dataset>> {
    let args = &mut given.args.source;
    let scans = given.benchmark.is_some() && args.source == Source::Npz && args.columns.is_empty();
    if scans && !args.rows && args.up_to.is_none() && args.flat.is_none() {
        args.columns.push("x".into());
        if given.args.generate.is_none() {
            args.flat = largest(&args.path);
        }
    }
    args.open()
}

/// Bytes of the largest file: no array of bytes in it has more elements.
fn largest(path: &std::path::Path) -> Option<usize> {
    let files = std::fs::read_dir(path).ok().into_iter().flatten().flatten();
    let sizes = files.filter_map(|entry| entry.metadata().ok()).map(|data| data.len());
    let most = sizes.max().or_else(|| std::fs::metadata(path).ok().map(|data| data.len()))?;
    usize::try_from(most).ok()
}

/// The loader, and who takes its batches.
fn build(given: &Given, dataset: Arc<dyn Dataset>) -> Anyhow<(Arc<Loader>, Step)> {
    let settings = &given.args.settings;
    let mut builder = settings.loader(dataset, given.decode());
    if given.benchmark.is_some() {
        builder = builder.last_batch(LastBatch::Drop);
    }
    let (builder, step) = step_of(given, builder)?;
    Ok((Arc::new(builder.build()?), step))
}

#[cfg(feature = "cuda")]
fn step_of(given: &Given, builder: LoaderBuilder) -> Anyhow<(LoaderBuilder, Step)> {
    let DeviceKind::Cuda(ordinal) = given.args.settings.device.kind() else {
        return Ok((builder, Step::Host(HostStep::new(given.step))));
    };
    let step =
        gpu::GpuStep::new(ordinal, given.step).map_err(|error| format!("the step on cuda:{ordinal}: {error}"))?;
    Ok((builder.stream(step.stream()), Step::Gpu(step)))
}

#[cfg(not(feature = "cuda"))]
fn step_of(given: &Given, builder: LoaderBuilder) -> Anyhow<(LoaderBuilder, Step)> {
    Ok((builder, Step::Host(HostStep::new(given.step))))
}

/// Everything that a run gave.
struct Finished {
    answer: Answer,
    loader: Arc<Loader>,
    report: Report,
    verdict: Verdict,
    gpu: Option<String>,
}

fn measured(given: &Given, loader: &Arc<Loader>, step: Step, data: &Data) -> Anyhow<Finished> {
    let args = &given.args;
    let server = args.prometheus.map(|port| metrics(loader, port)).transpose()?;
    let stop = stop()?;
    let watch = Watch::start(&args.settings.device);
    let before = device_bytes();
    let tally = measure::run(loader, step, Limit::new(args.seconds, args.batches, args.epochs), || stop.requested())?;
    let moved = device_bytes().and_then(|after| before.map(|before| after.since(&before)));
    drop(server);
    let (gpu, nvml) = watch.map(Watch::end).unzip();
    let (snapshot, report) = (loader.snapshot(), loader.report());
    let verdict = Verdict::of(&snapshot);
    let truth = truth(data, moved, &report, &snapshot, matches!(args.settings.direct, settings::Bypass::On));
    let notes = answer::notes(given, &tally, data, loader.batches_per_epoch()?);
    let run = Run { given, tally: &tally, report: &report, snapshot, verdict: &verdict, truth, notes, nvml };
    Ok(Finished { answer: Answer::new(run), loader: loader.clone(), report, verdict, gpu })
}

impl Finished {
    fn write(&self, (trace, html): (Option<Output>, Option<Output>)) -> Anyhow<()> {
        let (timeline, snapshot) = (self.loader.timeline(), &self.answer.snapshot);
        if let Some(file) = trace {
            file.write(&export::trace(&timeline, snapshot, Names::new("profile", 0)))?;
        }
        if let Some(file) = html {
            let verdict: Vec<String> = self.verdict.to_string().lines().map(|line| line.trim().to_string()).collect();
            let title = format!("feedline profile: {}", self.report.dataset);
            file.write(&export::html(snapshot, &timeline, &verdict, &title, &self.report.to_string()))?;
        }
        Ok(())
    }

    fn text(&self) -> String {
        let report = self.report.to_string();
        // Said above, with its evidence.
        let facts = report.split("\nverdict ").next().unwrap_or_default();
        text::answer(&self.answer, &self.verdict.to_string(), facts, self.gpu.as_deref())
    }
}

/// Where the bytes came from, of a loader that has just ended.
fn truth(data: &Data, moved: Result<DeviceBytes, String>, report: &Report, snapshot: &Snapshot, direct: bool) -> Truth {
    let (reads, copied) = (&report.reads, snapshot.storage.cached_bytes);
    let mut evidence = Evidence::default();
    evidence.before = data.cached.clone();
    evidence.moved = moved;
    evidence.delivered = reads.bytes_asked.saturating_add(copied);
    evidence.copied = copied;
    evidence.direct = if reads.buffered_reads == 0 { reads.bytes_asked } else { snapshot.storage.direct_bytes };
    evidence.direct_asked = direct;
    evidence.refused = reads.fallbacks;
    judge(&evidence)
}

/// Serves the metrics while it runs.
fn metrics(loader: &Arc<Loader>, port: u16) -> Anyhow<Server> {
    let loader = loader.clone();
    let server = Server::loopback(port, move || export::prometheus(&[(Names::new("profile", 0), &loader.snapshot())]))?;
    tell(format_args!("http://{}/metrics", server.address()));
    Ok(server)
}
