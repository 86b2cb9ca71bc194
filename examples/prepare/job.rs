//! `plan`, `run`, `finish`: shards by any number of processes.

use super::{Kind, Options};
use clap::{ArgGroup, Args};
use feedline::Stop;
use feedline::prepare::{Event, Plan, Shards, Tasks};
use indicatif::HumanBytes;
use std::error::Error;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code of a run that was stopped by a signal: run it again ("temporary failure" in sysexits.h).
const STOPPED: u8 = 75;
/// Exit code of a job with missing tasks.
const MISSING: u8 = 2;

/// Lists the pictures once, and writes OUTPUT/plan.fdp: task k of n writes shard k.
#[derive(Args)]
pub struct PlanArgs {
    /// Folder of pictures: a folder per class, or flat
    input: PathBuf,
    /// Folder to write to, reached by the same path on every machine
    output: PathBuf,
    /// Number of tasks, and of shards
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    tasks: u64,
    #[command(flatten)]
    options: Options,
}

/// Runs tasks of a plan; those with whole output are skipped.
///
/// SIGTERM, SIGUSR1 and Ctrl-C end it after the pictures in work, with exit code 75. Exit code 1: an error, or a failed
/// task.
#[derive(Args)]
#[command(group = ArgGroup::new("choice").multiple(false))]
pub struct RunArgs {
    /// plan.fdp, or its folder
    plan: PathBuf,
    #[command(flatten)]
    pub choice: Chosen,
    /// Threads [default: one per core]
    #[arg(long)]
    workers: Option<NonZeroUsize>,
}

/// Choice of tasks [default: all]
#[derive(Args)]
pub struct Chosen {
    /// Part of the tasks, counted from 0, such as 7/1000; or 'env': the task of SLURM_ARRAY_TASK_ID, else the part of the
    /// launcher's rank
    #[arg(long, group = "choice")]
    part: Option<String>,
    /// Tasks by number, such as 3,17,40-44
    #[arg(long, group = "choice")]
    tasks: Option<String>,
}

/// Checks all tasks, merges their lists, writes the index; or prints the missing tasks, with exit code 2.
#[derive(Args)]
pub struct FinishArgs {
    /// plan.fdp, or its folder
    plan: PathBuf,
}

impl Chosen {
    pub fn tasks(&self) -> Result<Tasks, Box<dyn Error>> {
        match (&self.part, &self.tasks) {
            (None, None) => Ok(Tasks::all()),
            (_, Some(list)) => Ok(Tasks::list(list)?),
            (Some(part), _) if part == "env" => Ok(Tasks::from_env()?),
            (Some(part), _) => {
                let numbers = part.split_once('/').and_then(|(part, of)| Some((part.parse().ok()?, of.parse().ok()?)));
                let (part, of) = numbers.ok_or_else(|| format!("--part {part}: write it as 7/1000, or 'env'"))?;
                Ok(Tasks::part(part, of)?)
            }
        }
    }
}

pub fn plan(args: &PlanArgs) -> Result<ExitCode, Box<dyn Error>> {
    let shards: Shards = args.options.shards(match args.options.format {
        Kind::Files => return Err("a plan writes shards: choose --format tar or parquet".into()),
        format => format,
    });
    let plan = shards.plan(&args.input, &args.output, args.tasks)?;
    println!("pictures    {}, {}", plan.inputs(), HumanBytes(plan.bytes()));
    for (ending, count) in plan.left_out() {
        println!("left out    {count}: {ending}, not pictures");
    }
    print_tasks(&plan);
    Ok(ExitCode::SUCCESS)
}

pub fn print_tasks(plan: &Plan) {
    let tasks = plan.tasks();
    let size = HumanBytes(plan.bytes() / tasks);
    println!("tasks       {tasks}, some {} inputs and {size} each", plan.inputs().div_ceil(tasks));
    println!("next        run in any number of processes, as --array=0-{}, then finish", tasks - 1);
}

pub fn run(args: &RunArgs) -> Result<ExitCode, Box<dyn Error>> {
    let plan = Plan::open(&args.plan)?;
    let stop = stop()?;
    let ran = plan.run(&args.choice.tasks()?, args.workers.map_or(0, NonZeroUsize::get), &stop, watch)?;
    Ok(ended(ran))
}

/// A flag that the signals of schedulers and Ctrl-C set.
#[cfg(feature = "signals")]
pub fn stop() -> feedline::Result<Stop> {
    use feedline::Signal;
    Stop::on([Signal::Term, Signal::Usr1, Signal::Int])
}

#[cfg(not(feature = "signals"))]
pub fn stop() -> feedline::Result<Stop> {
    Ok(Stop::new())
}

/// Prints the steps that somebody may have to look at.
pub fn watch(event: Event<'_>) {
    match event {
        Event::Done(task) => println!("done        task {task}"),
        Event::Skipped(task) => println!("skipped     task {task}: done before"),
        Event::Again(task) => println!("again       task {task}: its output is damaged or gone"),
        Event::Failed(task, error) => eprintln!("error: task {task}: {error}"),
        _ => {}
    }
}

/// Prints the outcome of a run; gives its exit code.
pub fn ended(ran: feedline::prepare::Ran) -> ExitCode {
    println!("tasks       {} done, {} skipped, {} failed", ran.done, ran.skipped, ran.failed);
    match (ran.failed, ran.stopped) {
        (_, true) => {
            println!("stopped     run again for the rest");
            ExitCode::from(STOPPED)
        }
        (0, false) => ExitCode::SUCCESS,
        _ => ExitCode::from(1),
    }
}

pub fn finish(args: &FinishArgs) -> Result<ExitCode, Box<dyn Error>> {
    let finished = Plan::open(&args.plan)?.finish()?;
    println!("{finished}");
    if let Some(index) = &finished.index {
        println!("index       {}", index.display());
    }
    Ok(ExitCode::from(if finished.missing.is_empty() { 0 } else { MISSING }))
}
