//! Prepares data for training: pictures become shards, JPEGs with seek points, from which a crop is
//! decoded, and texts become files of tokens, in one process or as tasks of many; documents of
//! tokens become Megatron's files; objects of a store are put into a local cache.
//!
//! ```text
//! cargo run --release --example prepare -- train/ shards/ --format tar --shuffle 7
//! cargo run --release --example prepare -- plan train/ shards/ --tasks 1000 --format tar --shuffle 7
//! cargo run --release --example prepare -- run shards/ --part 0/8
//! cargo run --release --example prepare -- finish shards/
//! cargo run --release --features parquet --example prepare -- documents 'corpus/*.parquet' corpus --source parquet --columns input_ids
//! cargo run --release --features tokenizers --example prepare -- tokens 'corpus/*.jsonl' tokens/ --tokenizer tokenizer.json --append-eod '<|endoftext|>'
//! cargo run --release --features remote --example prepare -- warm --path 's3://bucket/train-{0000..1023}.tar' --cache /nvme/cache
//! ```
//!
//! Exit code: 0 when everything is done, 1 for an error, 2 if bytes are missing (`warm`), 3 if
//! tasks are (`finish`), 75 for one that a signal stopped (run it again; without a verb, `run` or
//! `documents`), 130 for a `warm` that was interrupted.

mod documents;
mod job;
#[path = "../throughput/names.rs"]
mod names;
mod shards;
#[path = "../throughput/source.rs"]
mod source;
#[cfg(feature = "tokenizers")]
mod tokens;
#[cfg(feature = "remote")]
mod warm;

use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use feedline::prepare::{Event, Finished, Format, Shards};
use feedline::{ErrorKind, Stop};
use indicatif::{ProgressBar, ProgressStyle};
use std::error::Error;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

/// Writes pictures as shards, texts or documents as Megatron's files, or fills a cache of objects.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
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
    Documents(Box<documents::DocumentsArgs>),
    #[cfg(feature = "tokenizers")]
    Tokens(Box<tokens::TokensArgs>),
    #[cfg(feature = "remote")]
    Warm(Box<warm::WarmArgs>),
}

/// Writes a folder of pictures as shards, JPEGs with seek points.
///
/// Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP end it after the pictures in work, with exit code 75. Run
/// again with the same arguments, it goes on from there; so it does after a crash. `manifest.tsv`
/// is written last.
#[derive(clap::Args)]
struct ShardArgs {
    /// Folder of pictures: a folder per class, or flat
    input: PathBuf,
    /// Folder to write to: new, empty, or left by an earlier run with the same arguments
    output: PathBuf,
    /// Maximum samples per shard [default: as many as have 256 MiB on average]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    samples_per_shard: Option<u64>,
    /// Threads [default: one per core]
    #[arg(long)]
    workers: Option<NonZeroUsize>,
}

/// Settings that decide the content of the output.
#[derive(clap::Args)]
struct Options {
    /// Output format
    #[arg(long, value_enum)]
    format: Kind,
    /// Copy JPEGs as they are, without seek points
    #[arg(long)]
    no_seek_points: bool,
    /// Shuffle the samples over all shards with this seed [default: in the order of the folder]
    #[arg(long)]
    shuffle: Option<u64>,
    /// Skip damaged pictures and list them in damaged.tsv [default: the first ends the work, or
    /// fails its task of a plan]
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
}

fn main() -> ExitCode {
    feedline::setting::speak(names::name);
    let command = documents::with_input(Args::command());
    #[cfg(feature = "remote")]
    let command = warm::with_defaults(command);
    let args = source::given(
        command
            .try_get_matches()
            .and_then(|found| Args::from_arg_matches(&found)),
    );
    let done = match (args.verb, args.shards.zip(args.options)) {
        (Some(Verb::Plan(args)), _) => shards::plan(&args),
        (Some(Verb::Run(args)), _) => shards::run(&args),
        (Some(Verb::Finish(args)), _) => shards::finish(&args),
        (Some(Verb::Documents(args)), _) => documents::run(*args),
        #[cfg(feature = "tokenizers")]
        (Some(Verb::Tokens(args)), _) => tokens::tokens(&args),
        #[cfg(feature = "remote")]
        (Some(Verb::Warm(args)), _) => warm::run(&args),
        (None, Some((args, options))) => run(&args, &options),
        (None, None) => {
            Err("name a folder of pictures and a folder to write to; --help says more".into())
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::from(1)
    })
}

impl Options {
    fn shards(&self) -> Shards {
        let shards = Shards::new(match self.format {
            Kind::Tar => Format::Tar,
            #[cfg(feature = "parquet")]
            Kind::Parquet => Format::Parquet,
        });
        let shards = shards
            .seek_points(!self.no_seek_points)
            .skip_damaged(self.skip_damaged);
        self.shuffle.into_iter().fold(shards, Shards::shuffle)
    }
}

fn run(args: &ShardArgs, options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let stop = job::stop()?;
    let shards = options
        .shards()
        .workers(args.workers.map_or(0, NonZeroUsize::get));
    let shards = args
        .samples_per_shard
        .into_iter()
        .fold(shards, Shards::samples_per_shard);
    let bar = progress("{elapsed_precise} {wide_bar} {pos}/{len} pictures ({eta})")?;
    let finished = shards.write(&args.input, &args.output, |event| shown(&bar, &stop, event));
    ended(&bar, finished)
}

/// Moves the bar, and ends the work when the user asks for it.
fn shown(bar: &ProgressBar, stop: &Stop, event: Event<'_>) -> ControlFlow<()> {
    if let Event::Inputs { done, total, .. } = event {
        bar.set_length(total);
        bar.set_position(done);
    }
    if stop.requested() {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

/// Prints what was written, or that the user ended it.
fn ended(
    bar: &ProgressBar,
    finished: feedline::Result<Finished>,
) -> Result<ExitCode, Box<dyn Error>> {
    bar.finish_and_clear();
    match finished {
        Err(error) if error.kind() == ErrorKind::Cancelled => {
            eprintln!("{error}");
            Ok(ExitCode::from(job::STOPPED))
        }
        finished => {
            println!("{}", finished?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A line on standard error, drawn on terminals only.
fn progress(template: &str) -> Result<ProgressBar, Box<dyn Error>> {
    Ok(ProgressBar::no_length().with_style(ProgressStyle::with_template(template)?))
}
