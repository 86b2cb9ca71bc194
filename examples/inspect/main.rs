//! Prints the contents of a dataset or of a local cache, and verifies all of it on request.
//!
//! ```text
//! cargo run --release --example inspect -- --source tar --path 'train-{0000..0127}.tar'
//! cargo run --release --features parquet --example inspect -- --source parquet --path 'shards/*.parquet' --verify
//! cargo run --release --example inspect -- plan checks/ --tasks 100 --verify --source tar --path 'train-*.tar'
//! cargo run --release --example inspect -- run checks/ --part 0/8
//! cargo run --release --example inspect -- finish checks/
//! cargo run --release --features remote --example inspect -- cache /nvme/feedline --verify --trim 100GiB
//! ```
//!
//! Exit code: 0 for an intact dataset, 1 for an error, 2 for damaged samples, 3 for missing tasks
//! of a plan, 75 for a `run` that a signal stopped, 130 when interrupted.

#[path = "../prepare/job.rs"]
mod job;
#[path = "../throughput/names.rs"]
mod names;
mod parts;
#[path = "../throughput/source.rs"]
mod source;
mod tokens;

use clap::Parser;
use feedline::dataset::{Damage, Dataset, Verified, Verify};
use feedline::decode::{Image, Limits};
use feedline::tensor::Encoding;
use indicatif::{ProgressBar, ProgressStyle};
use source::{Opened, Source, SourceArgs};
use std::error::Error;
use std::io::Write;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Instant;
use tokens::Largest;

/// Prints the contents of a dataset. With --verify it reads all of it and names every damaged
/// sample.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    source: Option<SourceArgs>,
    #[command(flatten)]
    checks: Checks,
    /// Threads [default: one per core]
    #[arg(long, requires = "verify")]
    workers: Option<NonZeroUsize>,
}

/// What is read.
#[derive(clap::Args)]
struct Checks {
    /// Read everything, in parallel: structure, lengths, checksums
    #[arg(long)]
    verify: bool,
    /// Also decode every picture
    #[arg(long, requires = "verify")]
    decode: bool,
    /// Pixels of the largest picture to decode
    #[arg(long, requires = "decode", default_value_t = Limits::default().pixels)]
    max_pixels: u64,
    /// Maximum number of damaged samples to list; all are counted
    #[arg(long, default_value_t = 1000)]
    listed: usize,
}

#[derive(clap::Subcommand)]
enum What {
    Plan(Box<parts::PlanArgs>),
    Run(job::RunArgs),
    Finish(job::FinishArgs),
    #[cfg(feature = "remote")]
    Cache(cache::CacheArgs),
}

/// Like `println!`, but exits silently when the pipe is closed (`inspect … | head`).
macro_rules! say {
    ($($text:tt)*) => {
        if let Err(error) = writeln!(std::io::stdout(), $($text)*) {
            if error.kind() != std::io::ErrorKind::BrokenPipe {
                eprintln!("error: cannot write to standard output: {error}");
            }
            std::process::exit(1);
        }
    };
}

#[cfg(feature = "remote")]
mod cache;

fn main() -> ExitCode {
    feedline::setting::speak(names::name);
    match run(&source::given(Args::try_parse())) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(1)
        }
    }
}

fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    match &args.what {
        Some(What::Plan(args)) => return parts::plan(args),
        Some(What::Run(args)) => return parts::run(args),
        Some(What::Finish(args)) => return parts::finish(args),
        #[cfg(feature = "remote")]
        Some(What::Cache(cache)) => return cache::run(cache),
        None => {}
    }
    let started = Instant::now();
    let source = args
        .source
        .as_ref()
        .ok_or("name a format and a path; --help says more")?;
    let source = SourceArgs {
        skip_unsupported: true,
        ..source.clone()
    };
    let Opened { dataset, damage } = source.open_all()?;
    let tokens = matches!(source.source, Source::Tokens | Source::Megatron)
        .then(|| Largest::of(&*dataset))
        .flatten();
    let open_s = started.elapsed().as_secs_f64();
    print_dataset(&*dataset, open_s);
    for line in &damage {
        say!("damage    {line}");
    }
    if !args.checks.verify {
        if let Some(tokens) = &tokens {
            say!("tokens    {}", tokens.in_some(&dataset)?);
        }
        return Ok(ExitCode::from(if damage.is_empty() { 0 } else { 2 }));
    }
    let whole = verify(&*dataset, args, &damage, tokens.as_ref())? && damage.is_empty();
    if let Some(tokens) = &tokens {
        say!("tokens    {}", tokens.said());
    }
    Ok(ExitCode::from(if whole { 0 } else { 2 }))
}

fn print_dataset(dataset: &dyn Dataset, open_s: f64) {
    say!("dataset   {}", dataset.describe());
    say!("samples   {}", dataset.len());
    let sources = dataset.sources();
    say!(
        "sources   {} files, {:.3} GB; opened in {open_s:.3} s",
        sources.count(),
        sources.total_bytes() as f64 / 1e9
    );
    for field in dataset.schema() {
        say!("field     {:<16} {}", field.name, field.encoding);
    }
    let mean = dataset.sources().total_bytes() / dataset.len().max(1);
    match dataset.chunked() {
        None => {
            say!(
                "sample    at most {} bytes stored; the files have {mean} for each",
                dataset.sizes().sample_bytes_max
            )
        }
        Some(_) => say!("sample    the files have {mean} bytes for each"),
    }
    if let Some(chunks) = dataset.chunked() {
        let sizes = (0..chunks.starts().len() - 1).map(|chunk| chunks.chunk_bytes(chunk).opened);
        let largest = sizes.max().unwrap_or(0) as f64 / f64::from(1 << 20);
        say!(
            "chunks    {}, the largest takes {largest:.1} MiB when open",
            chunks.starts().len() - 1
        );
    }
    let index = dataset.sizes().index_bytes + sources.table_bytes();
    say!(
        "index     {:.1} bytes per sample in memory",
        index as f64 / dataset.len().max(1) as f64
    );
}

fn verify(
    dataset: &dyn Dataset,
    args: &Args,
    damage: &[Damage],
    tokens: Option<&Largest>,
) -> Result<bool, Box<dyn Error>> {
    let verify = args.checks.verification(dataset, args.workers);
    let verify = tokens.into_iter().fold(verify, |verify, tokens| {
        verify.decode_field(tokens::FIELD, tokens.clone())
    });
    let bar = progress(dataset.len());
    let started = Instant::now();
    let (done, ledger) = verify.run(dataset, |seen: Verified| {
        bar.set_position(seen.samples);
        if seen.damaged > 0 {
            bar.set_message(format!("{} damaged", seen.damaged));
        }
        ControlFlow::Continue(())
    })?;
    bar.finish_and_clear();
    for error in &ledger {
        say!("damaged   {error}");
    }
    let listed = ledger.len() as u64;
    let seconds = started.elapsed().as_secs_f64();
    say!(
        "verified  {} samples, {:.3} GB in {seconds:.2} s = {:.3} GB/s; {} damaged{}{}",
        done.samples,
        done.bytes as f64 / 1e9,
        done.bytes as f64 / 1e9 / seconds.max(1e-9),
        done.damaged,
        if listed < done.damaged {
            format!(", {listed} errors listed")
        } else {
            String::new()
        },
        lost(damage),
    );
    Ok(done.damaged == 0)
}

impl Checks {
    /// The verification of a dataset.
    fn verification(&self, dataset: &dyn Dataset, workers: Option<NonZeroUsize>) -> Verify {
        let verify = Verify::new().listed(self.listed);
        let verify = workers
            .into_iter()
            .fold(verify, |verify, workers| verify.workers(workers.get()));
        let pictures = dataset
            .schema()
            .iter()
            .filter(|field| self.decode && field.encoding == Encoding::Image);
        // A resize decodes the whole picture; a crop would not.
        let image = Image::resize(8, 8).limits(Limits::of_pixels(self.max_pixels));
        pictures.fold(verify, |verify, field| {
            verify.decode_field(&field.name, image.clone())
        })
    }
}

/// The samples that damaged files no longer contain.
fn lost(damage: &[Damage]) -> String {
    if damage.is_empty() {
        return String::new();
    }
    let samples: u64 = damage.iter().map(|damage| damage.samples).sum();
    let least = if damage.iter().any(Damage::is_lower_bound) {
        "at least "
    } else {
        ""
    };
    format!(
        "; {least}{samples} more lost in the {} damaged places listed first",
        damage.len()
    )
}

/// Drawn on terminals only.
fn progress(samples: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{elapsed_precise} {wide_bar} {pos}/{len} ({per_sec}, {eta} left) {msg}",
    );
    ProgressBar::new(samples).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
