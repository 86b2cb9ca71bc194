//! `plan`, `run`, `finish`: the files of a dataset are opened, indexed and verified by any number
//! of processes.

use super::job::{self, FinishArgs, RunArgs};
use super::source::{Opened, Source, SourceArgs};
use super::{Args, Checks};
use clap::Parser;
use feedline::dataset::{Damage, Dataset, DatasetExt, Images, Verified};
use feedline::error::Stage;
use feedline::prepare::Plan;
use feedline::{Error, ErrorKind, Stop};
use indicatif::HumanBytes;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Lists the files once, and writes OUTPUT/plan.fdp. A task opens its files, which builds their
/// indexes, and verifies them with --verify; with --seek-points it makes those of its files, and
/// `finish` joins them.
#[derive(clap::Args)]
pub struct PlanArgs {
    /// Folder for the plan and the results, reached by the same path on every machine
    output: PathBuf,
    /// Number of tasks
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    tasks: u64,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    checks: Checks,
}

pub fn plan(args: &PlanArgs) -> Outcome<ExitCode> {
    let source = &args.source;
    if source.checked.is_some() || source.in_memory {
        return Err(
            "--checked and --in-memory concern a whole dataset: leave them out of a plan".into(),
        );
    }
    if source.index.is_some() && !matches!(source.source, Source::Tar | Source::Tfrecord) {
        return Err("--index is for tar and TFRecord: the other formats need none".into());
    }
    if let Some(place) = source
        .seek_points
        .iter()
        .chain(&source.index)
        .find(|place| place.exists())
    {
        return Err(format!("{} exists: name a new file", place.display()).into());
    }
    // The options are kept as they were written, with their folder, and read again by each process.
    let here = std::env::current_dir()?.into_os_string();
    let options: Option<Vec<String>> = [here]
        .into_iter()
        .chain(std::env::args_os().skip(1))
        .map(|arg| arg.into_string().ok())
        .collect();
    let settings = options
        .ok_or("a plan needs a folder and options that are UTF-8")?
        .join("\0");
    let endings: &[&str] = match source.source {
        Source::Images if source.seek_points.is_some() => {
            return Err("--seek-points for a folder of pictures: insert restart markers by `prepare` instead".into());
        }
        Source::Megatron | Source::Mds => {
            return Err(
                "Megatron and MDS keep their index for all files: inspect a folder as a whole"
                    .into(),
            );
        }
        Source::Tar => &[".tar"],
        #[cfg(feature = "parquet")]
        Source::Parquet => &[".parquet"],
        Source::Tokens => &[".bin"],
        Source::Npy => &[".npy"],
        Source::Npz => &[".npz"],
        Source::Safetensors => &[".safetensors"],
        Source::Images | Source::Records | Source::Tfrecord => &[],
    };
    let plan = match source.source {
        Source::Images => Plan::of_pictures(&source.path, &settings, &args.output, args.tasks)?,
        _ => Plan::of_files(&source.path, endings, &settings, &args.output, args.tasks)?,
    };
    job::tell!(
        "files       {}, {}",
        plan.inputs(),
        HumanBytes(plan.bytes())
    );
    job::print_tasks(&plan);
    Ok(ExitCode::SUCCESS)
}

/// The plan and its options.
fn open(path: &Path) -> Outcome<(Plan, PlanArgs)> {
    let plan = Plan::open(path)?;
    let settings = plan
        .settings()
        .ok_or("a plan of shards: run and finish it by `prepare`")?;
    let (here, _) = settings
        .split_once('\0')
        .ok_or("the plan is of another program")?;
    // The first word is the program for clap, and the folder here.
    match Args::try_parse_from(settings.split('\0'))?.what {
        Some(super::What::Plan(mut args)) => {
            let source = &mut args.source;
            for path in [
                Some(&mut source.path),
                source.index.as_mut(),
                source.seek_points.as_mut(),
            ]
            .into_iter()
            .flatten()
            {
                if !path.to_string_lossy().contains("://") {
                    *path = Path::new(here).join(&*path);
                }
            }
            Ok((plan, *args))
        }
        _ => Err("the plan is of another program".into()),
    }
}

pub fn run(args: &RunArgs) -> Outcome<ExitCode> {
    let (plan, mut planned) = open(&args.plan)?;
    let stop = job::stop()?;
    let folder = folder_of(&args.plan);
    let points = planned
        .source
        .seek_points
        .is_some()
        .then(|| folder.join("points"));
    if let Some(points) = &points {
        std::fs::create_dir_all(points)?;
    }
    let ran = plan.run_files(&args.choice.tasks()?, &stop, job::watch, |first, files| {
        planned.source.seek_points = points.as_ref().map(|points| part_in(points, first));
        planned.one(files, args.workers, &stop)
    })?;
    Ok(job::ended(ran))
}

fn folder_of(plan: &Path) -> PathBuf {
    if plan.is_dir() {
        plan.into()
    } else {
        plan.parent().unwrap_or(Path::new("")).into()
    }
}

fn part_in(points: &Path, input: u64) -> PathBuf {
    points.join(format!("{input:06}.seek"))
}

impl PlanArgs {
    /// Opens these files as a dataset, and verifies it.
    fn one(
        &mut self,
        files: &[PathBuf],
        workers: Option<NonZeroUsize>,
        stop: &Stop,
    ) -> feedline::Result<Checked> {
        let opened = match self.open_one(files) {
            Ok(opened) => opened,
            Err(error) => return lost(error),
        };
        let Opened { dataset, damage } = opened;
        let samples = damage.iter().map(|damage| damage.samples).sum::<u64>();
        let mut errors: Vec<Error> = damage.iter().map(error_of).collect();
        let mut seen = Verified {
            samples: dataset.len(),
            ..Verified::default()
        };
        if self.checks.verify {
            let verify = self.checks.verification(&*dataset, workers);
            let (verified, ledger) = verify.run(&*dataset, |_| {
                if stop.requested() {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            })?;
            if stop.requested() {
                return Err(Error::new(
                    ErrorKind::Cancelled,
                    Stage::Read,
                    "stopped on request",
                ));
            }
            seen = verified;
            errors.extend(ledger);
        }
        seen.damaged += samples;
        Ok((seen, errors))
    }

    /// The dataset of a file, with the points of a task, which are made again if they are damaged.
    fn points_of(&mut self, file: &Path, part: PathBuf) -> feedline::Result<Arc<dyn Dataset>> {
        self.source.seek_points = Some(part.clone());
        let mut opened = self.open_one(&[file.into()]);
        if opened.is_err() && std::fs::remove_file(part).is_ok() {
            opened = self.open_one(&[file.into()]);
        }
        opened.map(|opened| opened.dataset).map_err(plain)
    }

    fn open_one(&mut self, files: &[PathBuf]) -> Outcome<Opened> {
        if self.source.source == Source::Images {
            let dataset: Arc<dyn Dataset> = Arc::new(Images::open_files(files)?);
            return Ok(Opened {
                dataset,
                damage: Vec::new(),
            });
        }
        // A file of its own has no index of all files.
        self.source.index = None;
        self.source.path.clone_from(&files[0]);
        self.source.open_all()
    }
}

type Checked = (Verified, Vec<Error>);

fn plain(error: Box<dyn std::error::Error>) -> Error {
    error
        .downcast::<Error>()
        .map_or_else(|other| Error::user(other.to_string()), |error| *error)
}

fn error_of(damage: &Damage) -> Error {
    let error = Error::new(
        ErrorKind::Decode,
        Stage::Index,
        format!("{}: {}", damage.kind.as_str(), damage.message),
    );
    error
        .with_path(&damage.path)
        .with_range(damage.offset, damage.len)
}

/// A file whose content cannot be opened is damaged; any other error fails the task.
fn lost(error: Box<dyn std::error::Error>) -> feedline::Result<Checked> {
    let error = plain(error);
    match error.kind() {
        ErrorKind::Decode | ErrorKind::Truncated | ErrorKind::Empty | ErrorKind::Shape => Ok((
            Verified {
                damaged: 1,
                ..Verified::default()
            },
            vec![error],
        )),
        _ => Err(error),
    }
}

/// Merges the results. With --seek-points it joins the points; with --index it writes the index of
/// all files.
pub fn finish(args: &FinishArgs) -> Outcome<ExitCode> {
    let (plan, mut planned) = open(&args.plan)?;
    let code = job::finish(&plan, args)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let place = planned.source.seek_points.take();
    if place.is_some() || planned.source.index.is_some() {
        let whole = planned.source.open_all()?.dataset;
        if let Some(index) = &planned.source.index {
            job::tell!("index       {}", index.display());
        }
        if let Some(place) = place {
            let points = folder_of(&args.plan).join("points");
            std::fs::create_dir_all(&points)?;
            let files: Vec<PathBuf> = whole
                .sources()
                .ids()
                .map(|id| whole.sources().path(id))
                .collect();
            planned.source.index = None;
            let parts = (0..)
                .zip(files)
                .map(|(input, file)| planned.points_of(&file, part_in(&points, input)));
            let joined = whole.facts(&place).open_joined(parts)?;
            job::tell!(
                "points      {}, {}",
                place.display(),
                HumanBytes(joined.points_bytes())
            );
        }
    }
    // Damage is a result, not a failure of the job.
    let damaged = folder_of(&args.plan).join("damaged.tsv").exists();
    Ok(ExitCode::from(if damaged { 2 } else { 0 }))
}
