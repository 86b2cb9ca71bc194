//! `plan`, `run` and `finish`: shards or tokens by any number of processes.

use super::Options;
use super::job::{self, FinishArgs, RunArgs};
use clap::Args;
use feedline::prepare::Plan;
use indicatif::HumanBytes;
use std::error::Error;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

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

pub fn plan(args: &PlanArgs) -> Result<ExitCode, Box<dyn Error>> {
    let plan = args
        .options
        .shards()
        .plan(&args.input, &args.output, args.tasks)?;
    job::tell!(
        "pictures    {}, {}",
        plan.inputs(),
        HumanBytes(plan.bytes())
    );
    for (ending, count) in plan.left_out() {
        job::tell!("left out    {count}: {ending}, not pictures");
    }
    job::print_tasks(&plan);
    Ok(ExitCode::SUCCESS)
}

pub fn run(args: &RunArgs) -> Result<ExitCode, Box<dyn Error>> {
    let plan = Plan::open(&args.plan)?;
    #[cfg(feature = "tokenizers")]
    if plan.is_of_tokens() {
        return super::tokens::run(&plan, args);
    }
    let stop = job::stop()?;
    let ran = plan.run(
        &args.choice.tasks()?,
        args.workers.map_or(0, NonZeroUsize::get),
        &stop,
        job::watch,
    )?;
    Ok(job::ended(ran))
}

pub fn finish(args: &FinishArgs) -> Result<ExitCode, Box<dyn Error>> {
    let plan = Plan::open(&args.plan)?;
    match plan.settings() {
        None => job::finish(&plan, args),
        Some(_) if plan.is_of_tokens() => job::finish(&plan, args),
        Some(_) => Err("a plan of files: finish it by `inspect finish`".into()),
    }
}
