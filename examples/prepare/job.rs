//! Tasks of a plan in any number of processes: choice, signals, exit codes.

use clap::{ArgGroup, Args};
use feedline::Stop;
use feedline::prepare::{Check, Event, Plan, Ran, Tasks};
use indicatif::HumanBytes;
use std::error::Error;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

/// Prints a line. A closed pipe or a full disk of logs does not end a job.
macro_rules! tell {
    ($($text:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stdout(), format_args!("{}\n", format_args!($($text)*)));
    }};
}
pub(crate) use tell;

/// Exit code of work that was stopped by a signal: run it again ("temporary failure" in
/// sysexits.h).
pub const STOPPED: u8 = 75;
/// Exit code of a job with missing tasks.
const MISSING: u8 = 3;

/// Runs tasks of a plan; those with whole output are skipped.
///
/// SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end it after the pictures in work, with exit code 75. Exit
/// code 1: an error, or a failed task.
#[derive(Args)]
#[command(group = ArgGroup::new("choice").multiple(false))]
pub struct RunArgs {
    /// plan.fdp, or its folder
    pub plan: PathBuf,
    #[command(flatten)]
    pub choice: Chosen,
    /// Threads [default: one per core]
    #[arg(long)]
    pub workers: Option<NonZeroUsize>,
}

/// Choice of tasks [default: all]
#[derive(Args)]
pub struct Chosen {
    /// Part of the tasks, counted from 0, such as 7/1000; or 'env': the task of
    /// SLURM_ARRAY_TASK_ID, else the part of the launcher's rank
    #[arg(long, group = "choice", allow_hyphen_values = true)]
    part: Option<String>,
    /// Tasks by number, such as 3,17,40-44
    #[arg(long, group = "choice", allow_hyphen_values = true)]
    tasks: Option<String>,
}

/// Checks all tasks, merges their lists, writes the index; or prints the missing tasks, with exit
/// code 3.
#[derive(Args)]
pub struct FinishArgs {
    /// plan.fdp, or its folder
    pub plan: PathBuf,
    /// Compare the lengths of shards, do not read them: for output that a second `run` has read
    #[arg(long)]
    pub quick: bool,
}

impl Chosen {
    pub fn tasks(&self) -> Result<Tasks, Box<dyn Error>> {
        match (&self.part, &self.tasks) {
            (None, None) => Ok(Tasks::all()),
            (_, Some(list)) => Ok(Tasks::list(list)?),
            (Some(part), _) if part == "env" => Ok(Tasks::from_env()?),
            (Some(part), _) => {
                let numbers = part
                    .split_once('/')
                    .and_then(|(part, of)| Some((part.parse().ok()?, of.parse().ok()?)));
                let (part, of) = numbers
                    .ok_or_else(|| format!("--part {part}: write it as 7/1000, or 'env'"))?;
                Ok(Tasks::part(part, of)?)
            }
        }
    }
}

pub fn print_tasks(plan: &Plan) {
    let tasks = plan.tasks();
    let size = HumanBytes(plan.bytes() / tasks);
    tell!(
        "tasks       {tasks}, on average {:.1} inputs and {size}",
        plan.inputs() as f64 / tasks as f64
    );
    tell!(
        "next        run in any number of processes, as --array=0-{}, then finish",
        tasks - 1
    );
}

/// A flag that the signals of schedulers and Ctrl-C set.
pub fn stop() -> feedline::Result<Stop> {
    use feedline::process::Signal;
    Stop::on([Signal::Term, Signal::Usr1, Signal::Int, Signal::Hup])
}

/// Prints the steps that somebody may have to look at.
pub fn watch(event: Event<'_>) {
    match event {
        Event::Done(task) => tell!("done        task {task}"),
        Event::Skipped(task) => tell!("skipped     task {task}: done before"),
        Event::Again(task) => tell!("again       task {task}: its output is damaged or gone"),
        Event::Failed(task, error) => {
            let _ = writeln!(std::io::stderr(), "error: task {task}: {error}");
        }
        _ => {}
    }
}

/// Prints the outcome of a run; gives its exit code.
pub fn ended(ran: Ran) -> ExitCode {
    tell!(
        "tasks       {} done, {} skipped, {} failed",
        ran.done,
        ran.skipped,
        ran.failed
    );
    if ran == Ran::default() {
        tell!("nothing     no task is in this part");
    }
    match (ran.failed, ran.stopped) {
        (_, true) => {
            tell!("stopped     run again for the rest");
            ExitCode::from(STOPPED)
        }
        (0, false) => ExitCode::SUCCESS,
        _ => ExitCode::from(1),
    }
}

/// Finishes a plan, and prints the outcome.
pub fn finish(plan: &Plan, args: &FinishArgs) -> Result<ExitCode, Box<dyn Error>> {
    let finished = plan.finish(if args.quick {
        Check::Lengths
    } else {
        Check::Bytes
    })?;
    tell!("{finished}");
    if let Some(index) = &finished.index {
        tell!("index       {}", index.display());
    }
    Ok(ExitCode::from(if finished.missing.is_empty() {
        0
    } else {
        MISSING
    }))
}
