//! Measures how fast feedline delivers your data: batches without training.
//!
//! ```text
//! cargo run --release --example throughput -- --source images --path train/ --crop 224
//! cargo run --release --features parquet --example throughput -- --source parquet --path '*.parquet' --shuffle 1 --window 8
//! cargo run --release --example throughput -- --source records --path raw.bin --record-bytes 150528 --shuffle 1 --cold
//! ```

mod names;
mod settings;
mod source;

use clap::Parser;
use feedline::{Batch, FieldView, Loader};
use indicatif::{ProgressBar, ProgressStyle};
use settings::{Settings, drop_from_cache, seconds};
use source::SourceArgs;
use std::error::Error;
use std::time::Instant;
use xxhash_rust::xxh3::Xxh3;

/// Measures a loader on your own data: batches per second without a training step.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    settings: Settings,
    /// Run for about this many seconds, over several epochs if needed [default: one epoch]
    #[arg(long, conflicts_with = "batches", value_parser = seconds)]
    seconds: Option<f64>,
    /// Stop after N batches
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    batches: Option<u64>,
    /// Hash the delivered bytes (costs time)
    #[arg(long)]
    hash: bool,
    /// Print one line of JSON instead of the report (anon_mib is the loader's memory; peak_rss_mib
    /// includes mapped files)
    #[arg(long)]
    json: bool,
}

fn main() {
    feedline::setting::speak(names::name);
    if let Err(error) = run(&source::given(Args::try_parse())) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let dataset = args.source.open_within(args.settings.budget())?;
    if args.settings.cold {
        drop_from_cache(&dataset)?;
    }
    let builder = args.settings.loader(dataset, true)?;
    let built = Instant::now();
    let loader = builder.build()?;
    let build_s = built.elapsed().as_secs_f64();
    let tally = pull(&loader, args)?;
    let figures = Figures {
        build_s,
        memory: memory_mib(),
        tally,
    };
    if args.json {
        println!("{}", figures.json(&loader));
    } else {
        println!("{}\n\n{}", loader.report(), figures.text());
    }
    Ok(())
}

/// Delivered samples and bytes, with times.
struct Tally {
    samples: u64,
    bytes: u64,
    first_batch_s: f64,
    wall_s: f64,
    cpu_s: f64,
    order_hash: u64,
    data_hash: Option<u64>,
}

fn pull(loader: &Loader, args: &Args) -> Result<Tally, Box<dyn Error>> {
    let per_epoch = loader.batches_per_epoch();
    let limit = match (args.batches, args.seconds) {
        (Some(batches), _) => batches,
        (None, Some(_)) => u64::MAX,
        (None, None) => per_epoch,
    };
    if per_epoch == 0 {
        return Err("an epoch has no batch: give more data or a smaller --batch".into());
    }
    let bar = progress(limit);
    let mut order = Xxh3::new();
    let mut data = Xxh3::new();
    let mut copy = Vec::new();
    let mut samples = 0;
    let mut bytes = 0;
    let mut batches = 0;
    let mut first_batch_s = 0.0;
    let started = Instant::now();
    let cpu = cpu_s();
    for batch in loader.epochs(0..limit.div_ceil(per_epoch))? {
        let batch = batch?;
        if batches == 0 {
            first_batch_s = started.elapsed().as_secs_f64();
        }
        batches += 1;
        samples += batch.len() as u64;
        bytes += batch
            .fields()
            .map(|field| field.size_bytes() as u64)
            .sum::<u64>();
        batch
            .ids()
            .iter()
            .for_each(|id| order.update(&id.to_le_bytes()));
        if args.hash {
            hash_rows(&batch, &mut data, &mut copy)?;
        }
        bar.inc(1);
        let last = batches == limit
            || args
                .seconds
                .is_some_and(|seconds| started.elapsed().as_secs_f64() >= seconds);
        if last {
            // Device batches are delivered before their copies complete; this waits for the last
            // one.
            batch
                .fields()
                .try_for_each(|field| copy_of(&field, &mut copy).map(|_| ()))?;
            break;
        }
    }
    bar.finish_and_clear();
    let wall_s = started.elapsed().as_secs_f64();
    let data_hash = args.hash.then(|| data.digest());
    Ok(Tally {
        samples,
        bytes,
        first_batch_s,
        wall_s,
        cpu_s: cpu_s() - cpu,
        order_hash: order.digest(),
        data_hash,
    })
}

/// Hashes sample by sample, field by field, so the hash does not depend on the batch size.
fn hash_rows(batch: &Batch, hash: &mut Xxh3, copy: &mut Vec<u8>) -> feedline::Result<()> {
    for part in batch.micro(batch.len())? {
        for field in part.fields() {
            hash.update(copy_of(&field, copy)?);
        }
    }
    Ok(())
}

/// The field's bytes, copied if they are on a device.
fn copy_of<'a>(field: &FieldView<'a>, copy: &'a mut Vec<u8>) -> feedline::Result<&'a [u8]> {
    if let Ok(bytes) = field.as_bytes() {
        return Ok(bytes);
    }
    copy.resize(field.size_bytes(), 0);
    field.read_into(copy)?;
    Ok(copy)
}

/// Drawn on terminals only.
fn progress(batches: u64) -> ProgressBar {
    let (bar, style) = match batches {
        u64::MAX => (
            ProgressBar::no_length(),
            "{elapsed_precise} {pos} batches ({per_sec})",
        ),
        _ => (
            ProgressBar::new(batches),
            "{elapsed_precise} {wide_bar} {pos}/{len} batches ({per_sec})",
        ),
    };
    bar.with_style(
        ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()),
    )
}

struct Figures {
    build_s: f64,
    /// Of [`memory_mib`], before the loader ends.
    memory: (f64, f64),
    tally: Tally,
}

impl Figures {
    fn json(&self, loader: &Loader) -> String {
        let Tally {
            samples,
            bytes,
            first_batch_s,
            wall_s,
            cpu_s,
            order_hash,
            data_hash,
        } = self.tally;
        let report = loader.report();
        let choice = &report.choice;
        let routes: Vec<String> = report.routes.iter().map(ToString::to_string).collect();
        let rounded =
            |value: f64, digits: i32| (value * 10_f64.powi(digits)).round() / 10_f64.powi(digits);
        serde_json::json!({
            "items_per_s": rounded(samples as f64 / wall_s, 1),
            "gb_per_s": rounded(bytes as f64 / wall_s / 1e9, 4),
            "first_batch_s": rounded(first_batch_s, 4),
            "wall_s": rounded(wall_s, 3),
            "cpu_s_per_10k": rounded(cpu_s / samples.max(1) as f64 * 1e4, 4),
            "peak_rss_mib": rounded(self.memory.0, 1),
            "anon_mib": rounded(self.memory.1, 1),
            "reader": choice.reader.to_string(),
            "direct": choice.direct,
            "order_hash": format!("{order_hash:016x}"),
            "data_hash": data_hash.map(|hash| format!("{hash:016x}")),
            "items": samples,
            "build_s": rounded(self.build_s, 4),
            "plan_mib": rounded(loader.plan().total() as f64 / f64::from(1 << 20), 1),
            "device": report.device,
            "routes": routes,
        })
        .to_string()
    }

    fn text(&self) -> String {
        let Tally {
            samples,
            bytes,
            first_batch_s,
            wall_s,
            cpu_s,
            order_hash,
            data_hash,
        } = self.tally;
        let data_hash = data_hash.map_or(String::new(), |hash| format!(", data hash {hash:016x}"));
        format!(
            "{samples} samples in {wall_s:.2} s: {:.0} samples/s, {:.3} GB/s delivered\nfirst batch {first_batch_s:.3} s \
             after a build of {:.3} s; {:.2} CPU-s per 10,000 samples\nmemory at most {:.0} MiB resident, \
             {:.0} MiB anonymous\norder hash {order_hash:016x}{data_hash}",
            samples as f64 / wall_s,
            bytes as f64 / wall_s / 1e9,
            self.build_s,
            cpu_s / samples.max(1) as f64 * 1e4,
            self.memory.0,
            self.memory.1,
        )
    }
}

/// CPU time of all threads of the process.
fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Peak of the resident memory, and the anonymous and shared memory now, which a loader holds from
/// `build` to its end; in MiB.
fn memory_mib() -> (f64, f64) {
    let mib = |key| status_kib(key) as f64 / 1024.0;
    (mib("VmHWM:"), mib("RssAnon:") + mib("RssShmem:"))
}

fn status_kib(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}
