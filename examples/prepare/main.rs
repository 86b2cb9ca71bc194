//! Prepares data for training: pictures become shards, JPEGs with restart markers (lossless), so that a crop decodes
//! alone, in one process or as tasks of many; objects of a store are put into a local cache.
//!
//! ```text
//! cargo run --release --example prepare -- train/ shards/ --format tar --shuffle 7
//! cargo run --release --example prepare -- train/ restarts/ --format files
//! cargo run --release --example prepare -- plan train/ shards/ --tasks 1000 --format tar --shuffle 7
//! cargo run --release --example prepare -- run shards/ --part 0/8
//! cargo run --release --example prepare -- finish shards/
//! cargo run --release --features remote --example prepare -- warm --path 's3://bucket/train-{0000..1023}.tar' --cache /nvme/cache
//! ```
//!
//! Exit code: 0 when everything is done, 1 for an error, 2 if bytes are missing (`warm`), 3 if tasks are (`finish`), 75 for a
//! `run` that a signal stopped, 130 for a `warm` that was interrupted.

mod job;
mod shards;
#[cfg(feature = "remote")]
#[path = "../throughput/source.rs"]
mod source;
#[cfg(feature = "remote")]
mod warm;

use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use feedline::prepare::{Format, RestartOptions, Shards};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use std::error::Error;
use std::num::{NonZeroU16, NonZeroUsize};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

/// Writes pictures as shards, or fills a cache of objects.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    shards: Option<ShardArgs>,
    // Beside the others: clap finds no `Option` of arguments that contain others.
    #[command(flatten)]
    options: Option<Options>,
}

#[derive(clap::Subcommand)]
enum Verb {
    Plan(shards::PlanArgs),
    Run(job::RunArgs),
    Finish(job::FinishArgs),
    #[cfg(feature = "remote")]
    Warm(Box<warm::WarmArgs>),
}

/// Writes pictures with restart markers, as shards or as files.
///
/// Ctrl-C leaves complete shards, and hidden files that a run with --force removes. `manifest.tsv` is written last.
#[derive(clap::Args)]
struct ShardArgs {
    /// Folder of pictures: a folder per class, or flat
    input: PathBuf,
    /// Folder to write to
    output: PathBuf,
    /// Samples per shard [default: those that fit 256 MiB]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    samples_per_shard: Option<u64>,
    /// Threads [default: one per core]
    #[arg(long)]
    workers: Option<NonZeroUsize>,
    /// Write into a non-empty folder, and remove earlier shards there
    #[arg(long)]
    force: bool,
    /// Flush each file to the device before it gets its name
    #[arg(long)]
    sync: bool,
}

/// Settings that decide the content of the output.
#[derive(clap::Args)]
struct Options {
    /// Output format
    #[arg(long, value_enum)]
    format: Kind,
    /// MCUs per restart interval [default: the divisor of a row nearest to 4]
    #[arg(long)]
    interval: Option<NonZeroU16>,
    /// Maximum megapixels (of 2^20) of a picture
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    megapixels: u32,
    /// Shuffle the samples over all shards with this seed [default: in the order of the folder]
    #[arg(long)]
    shuffle: Option<u64>,
    /// Skip damaged pictures and list them in damaged.tsv [default: the first ends the work, or fails its task of a plan]
    #[arg(long)]
    skip_damaged: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// WebDataset shards
    Tar,
    /// Parquet shards
    #[cfg(feature = "parquet")]
    Parquet,
    /// The same tree of files; not in a plan
    Files,
}

fn main() -> ExitCode {
    feedline::Dialect::CommandLine.speak();
    let command = Args::command();
    #[cfg(feature = "remote")]
    let command = warm::with_defaults(command);
    let parsed = command.try_get_matches().and_then(|found| Args::from_arg_matches(&found));
    #[cfg(feature = "remote")]
    let args = source::given(parsed);
    #[cfg(not(feature = "remote"))]
    let args = parsed.unwrap_or_else(|error: clap::Error| error.exit());
    let done = match (args.verb, args.shards.zip(args.options)) {
        (Some(Verb::Plan(args)), _) => shards::plan(&args),
        (Some(Verb::Run(args)), _) => shards::run(&args),
        (Some(Verb::Finish(args)), _) => shards::finish(&args),
        #[cfg(feature = "remote")]
        (Some(Verb::Warm(args)), _) => warm::run(&args),
        (None, Some((args, options))) => run(&args, &options).map(|()| ExitCode::SUCCESS),
        (None, None) => Err("name a folder of pictures and a folder to write to; --help says more".into()),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::from(1)
    })
}

impl Options {
    /// The settings, for this format.
    fn shards(&self, format: Kind) -> Shards {
        let restarts = RestartOptions::default().pixels_max(u64::from(self.megapixels) << 20);
        let restarts = self.interval.into_iter().fold(restarts, RestartOptions::interval);
        let shards = Shards::new(match format {
            Kind::Tar => Format::Tar,
            #[cfg(feature = "parquet")]
            Kind::Parquet => Format::Parquet,
            Kind::Files => Format::Files,
        });
        let shards = shards.restarts(restarts).skip_damaged(self.skip_damaged);
        self.shuffle.into_iter().fold(shards, Shards::shuffle)
    }
}

fn run(args: &ShardArgs, options: &Options) -> Result<(), Box<dyn Error>> {
    let shards = options.shards(options.format);
    let shards = shards.workers(args.workers.map_or(0, NonZeroUsize::get)).overwrite(args.force).sync(args.sync);
    let shards = args.samples_per_shard.into_iter().fold(shards, Shards::samples_per_shard);
    let bar = bar()?;
    let summary = shards.write(&args.input, &args.output, |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.pictures);
        let (before, after) = (progress.bytes_before, progress.bytes_after);
        bar.set_message(format!("{} to {}", HumanBytes(before), HumanBytes(after)));
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    println!("{}", summary?);
    Ok(())
}

fn bar() -> Result<ProgressBar, Box<dyn Error>> {
    progress("{elapsed_precise} {wide_bar} {pos}/{len} pictures, {msg} ({eta})")
}

/// A line on standard error, drawn on terminals only.
fn progress(template: &str) -> Result<ProgressBar, Box<dyn Error>> {
    Ok(ProgressBar::no_length().with_style(ProgressStyle::with_template(template)?))
}
