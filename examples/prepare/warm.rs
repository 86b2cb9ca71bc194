//! Fills a local cache with the objects of a dataset.

use crate::progress;
use crate::source::SourceArgs;
use clap::{Args, Command};
use feedline::Stop;
use feedline::dataset::Dataset;
use feedline::process::Signal;
use feedline::storage::Cache;
use indicatif::HumanBytes;
use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

/// Number of errors in the answer.
const LISTED: usize = 20;

/// Downloads objects into a local cache, where loaders find them.
///
/// Without --source, --path names the objects themselves: a URL, a pattern, or a folder. A second
/// run downloads what is missing. Ctrl-C ends it; what was kept stays.
#[derive(Args)]
pub struct WarmArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// Folder of the cache, on a local disk
    #[arg(long)]
    cache: PathBuf,
    /// Limit of the folder in GiB, such as 0.5 [default: the disk less 5 %, at most 8 GiB]
    #[arg(long)]
    cache_gib: Option<f64>,
}

/// Objects are records of a byte, unless --source names another format.
pub fn with_defaults(command: Command) -> Command {
    command.mut_subcommand("warm", |warm| {
        let warm = warm.mut_arg("source", |arg| arg.required(false).default_value("records"));
        warm.mut_arg("record_bytes", |arg| arg.default_value("1"))
    })
}

pub fn run(args: &WarmArgs) -> Result<ExitCode, Box<dyn Error>> {
    let stop = Stop::on([Signal::Int, Signal::Term])?;
    let dataset = args.source.open()?;
    let cache = Cache::at(&args.cache);
    let cache = match args.cache_gib {
        Some(gib) => cache.capacity((gib * f64::from(1 << 30)) as u64),
        None => cache,
    };
    let bar = progress(
        "{elapsed_precise} {wide_bar} {bytes}/{total_bytes} ({bytes_per_sec}, {eta} left) {msg}",
    )?;
    let warmed = cache.warm(dataset.sources(), |so_far| {
        bar.set_length(so_far.bytes);
        bar.set_position(so_far.found + so_far.kept);
        bar.set_message(format!("{} objects failed", so_far.errors.len()));
        if stop.requested() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    bar.finish_and_clear();
    let warmed = warmed?;
    for error in warmed.errors.iter().take(LISTED) {
        eprintln!("not kept: {error}");
    }
    if warmed.errors.len() > LISTED {
        eprintln!("not kept: {} objects more", warmed.errors.len() - LISTED);
    }
    println!(
        "{} objects, {}: {} kept now, {} were there, {} missing",
        warmed.objects,
        HumanBytes(warmed.bytes),
        HumanBytes(warmed.kept),
        HumanBytes(warmed.found),
        HumanBytes(warmed.missing()),
    );
    Ok(ExitCode::from(match warmed.missing() {
        0 => 0,
        _ if stop.requested() => 130,
        _ => 2,
    }))
}
