//! How fast does feedline deliver your data? No training, just batches.
//!
//! ```text
//! cargo run --release --example throughput -- --source images --path train/ --crop 224
//! cargo run --release --features parquet --example throughput -- --source parquet --path '*.parquet' --shuffle 1 --window 8
//! cargo run --release --example throughput -- --source records --path raw.bin --record-bytes 150528 --shuffle 1 --cold
//! ```

mod source;

use clap::{Parser, ValueEnum};
use feedline::dataset::Dataset;
use feedline::decode::{Bytes, Image, PixelLayout};
use feedline::read::{Direct, Mode};
use feedline::tensor::{DType, Encoding};
use feedline::{Batch, Device, FieldView, Gds, Loader, LoaderBuilder, Order};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use source::SourceArgs;
use std::error::Error;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Measures a loader on your own data: batches per second without a training step.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Rows of a batch
    #[arg(long, default_value_t = 256)]
    batch: usize,
    /// Decode workers [default: one per core]
    #[arg(long)]
    workers: Option<usize>,
    /// Images: RandomResizedCrop to N × N pixels, with horizontal flip
    #[arg(long, default_value_t = 224)]
    crop: u32,
    /// Images: element type of the batch (floats are normalised with ImageNet's mean and deviation)
    #[arg(long, value_enum, default_value_t = Type::U8)]
    dtype: Type,
    /// Images: order of dimensions
    #[arg(long, value_enum, default_value_t = Layout::Nhwc)]
    layout: Layout,
    /// How storage is read
    #[arg(long, value_enum, default_value_t = Reader::Auto)]
    reader: Reader,
    /// Whether reads bypass the page cache
    #[arg(long, value_enum, default_value_t = Bypass::Auto)]
    direct: Bypass,
    /// Reads in flight at most
    #[arg(long, default_value_t = 32)]
    depth: u32,
    /// Shuffle with this seed [default: sequential]
    #[arg(long)]
    shuffle: Option<u64>,
    /// Shuffle within groups of so many chunks (row groups, compressed shards) [default: over everything]
    #[arg(long, requires = "shuffle")]
    window: Option<usize>,
    /// Run for about so long, over as many epochs as it takes [default: one epoch]
    #[arg(long, conflicts_with = "batches", value_parser = seconds)]
    seconds: Option<f64>,
    /// Stop after N batches
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    batches: Option<u64>,
    /// Where batches are handed out: auto, host or cuda:N
    #[arg(long, default_value = "auto")]
    device: Device,
    /// Whether fields whose rows stand in files as they are go straight to the device: auto, require or off
    #[arg(long, default_value = "auto")]
    gds: Gds,
    /// Most MiB of memory [default: as much as the defaults need]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    budget_mib: Option<u32>,
    /// Drop the files from the page cache first
    #[arg(long)]
    cold: bool,
    /// Hash the delivered bytes (costs time)
    #[arg(long)]
    hash: bool,
    /// One line of JSON instead of the report (peak_anon_mib is the loader's memory; peak_rss_mib counts mapped files, too)
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Type {
    U8,
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, ValueEnum)]
enum Layout {
    Nhwc,
    Nchw,
}

#[derive(Clone, Copy, ValueEnum)]
enum Reader {
    Auto,
    Uring,
    Pread,
    Mmap,
}

#[derive(Clone, Copy, ValueEnum)]
enum Bypass {
    Auto,
    On,
    Off,
}

fn main() {
    if let Err(error) = run(&Args::parse()) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let dataset = args.source.open()?;
    if args.cold {
        drop_from_cache(&dataset)?;
    }
    let (schema, bytes_max) = (dataset.schema().to_vec(), dataset.sample_bytes_max() as usize);
    let mut builder = Loader::builder(dataset);
    for field in schema {
        builder = match field.encoding {
            Encoding::Image => builder.decode_field(&field.name, pictures(args)),
            Encoding::Bytes => builder.decode_field(&field.name, Bytes::up_to(bytes_max)),
            _ => builder,
        };
    }
    let memory = MemoryWatch::start();
    let built = Instant::now();
    let loader = configure(builder, args).build()?;
    let build_s = built.elapsed().as_secs_f64();
    let tally = pull(&loader, args)?;
    let figures = Figures { build_s, memory: memory.stop(), tally };
    if args.json {
        println!("{}", figures.json(&loader));
    } else {
        println!("{}\n\n{}", loader.report(), figures.text());
    }
    Ok(())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > 0.0 => Ok(seconds),
        _ => Err("a number of seconds above 0 is wanted".into()),
    }
}

fn pictures(args: &Args) -> Image {
    let dtype = match args.dtype {
        Type::U8 => DType::U8,
        Type::F32 => DType::F32,
        Type::F16 => DType::F16,
        Type::Bf16 => DType::BF16,
    };
    let layout = match args.layout {
        Layout::Nhwc => PixelLayout::Nhwc,
        Layout::Nchw => PixelLayout::Nchw,
    };
    let decoder = Image::random_resized_crop(args.crop).flip(0.5).dtype(dtype).layout(layout);
    if dtype == DType::U8 {
        return decoder;
    }
    decoder.normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
}

/// Asks the kernel to forget the files. Pages that others use or that are not yet written stay: hence the sync.
fn drop_from_cache(dataset: &impl Dataset) -> Result<(), Box<dyn Error>> {
    let sources = dataset.sources();
    for id in sources.ids().filter(|id| sources.bytes_of(*id).is_none()) {
        let path = sources.path(id);
        let file = std::fs::File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        // Written pages cannot be dropped; read-only media refuse to sync, and have none.
        let _ = file.sync_data();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

fn configure(builder: LoaderBuilder, args: &Args) -> LoaderBuilder {
    let mut builder = builder
        .batch_size(args.batch)
        .order(match (args.shuffle, args.window) {
            (None, _) => Order::sequential(),
            (Some(seed), None) => Order::shuffled(seed),
            (Some(seed), Some(chunks)) => Order::windowed(seed, chunks),
        })
        .depth(args.depth)
        .reader(match args.reader {
            Reader::Auto => Mode::Auto,
            Reader::Uring => Mode::Uring,
            Reader::Pread => Mode::Pread,
            Reader::Mmap => Mode::Mmap,
        })
        .direct(match args.direct {
            Bypass::Auto => Direct::Auto,
            Bypass::On => Direct::On,
            Bypass::Off => Direct::Off,
        })
        .device(args.device.clone())
        .gds(args.gds);
    if let Some(workers) = args.workers {
        builder = builder.workers(workers);
    }
    if let Some(mib) = args.budget_mib {
        builder = builder.memory_budget((mib as usize) << 20);
    }
    builder
}

/// What was pulled, and in which time.
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
    let per_epoch = loader.batches_per_epoch()?;
    let limit = match (args.batches, args.seconds) {
        (Some(batches), _) => batches,
        (None, Some(_)) => u64::MAX,
        (None, None) => per_epoch,
    };
    if per_epoch == 0 {
        return Err("an epoch has no batch".into());
    }
    let bar = progress(limit);
    let (mut order, mut data, mut copy) = (Xxh3::new(), Xxh3::new(), Vec::new());
    let (mut samples, mut bytes, mut batches, mut first_batch_s) = (0, 0, 0, 0.0);
    let (started, cpu) = (Instant::now(), cpu_s());
    for batch in loader.epochs(0..limit.div_ceil(per_epoch))? {
        let batch = batch?;
        if batches == 0 {
            first_batch_s = started.elapsed().as_secs_f64();
        }
        batches += 1;
        samples += batch.len() as u64;
        bytes += batch.fields().map(|field| field.size_bytes() as u64).sum::<u64>();
        batch.ids().iter().for_each(|id| order.update(&id.to_le_bytes()));
        if args.hash {
            hash_rows(&batch, &mut data, &mut copy)?;
        }
        bar.inc(1);
        let last = batches == limit || args.seconds.is_some_and(|seconds| started.elapsed().as_secs_f64() >= seconds);
        if last {
            // Batches on a device are handed out while their copies are on their way: the last one is waited for.
            batch.fields().try_for_each(|field| copy_of(&field, &mut copy).map(|_| ()))?;
            break;
        }
    }
    bar.finish_and_clear();
    let wall_s = started.elapsed().as_secs_f64();
    let data_hash = args.hash.then(|| data.digest());
    Ok(Tally { samples, bytes, first_batch_s, wall_s, cpu_s: cpu_s() - cpu, order_hash: order.digest(), data_hash })
}

/// Sample by sample, field by field: the hash does not depend on the batch size.
fn hash_rows(batch: &Batch, hash: &mut Xxh3, copy: &mut Vec<u8>) -> feedline::Result<()> {
    for part in batch.micro(batch.len())? {
        for field in part.fields() {
            hash.update(copy_of(&field, copy)?);
        }
    }
    Ok(())
}

/// The field's bytes: those of the host as they are, those of a device copied.
fn copy_of<'a>(field: &FieldView<'a>, copy: &'a mut Vec<u8>) -> feedline::Result<&'a [u8]> {
    if let Ok(bytes) = field.as_bytes() {
        return Ok(bytes);
    }
    copy.resize(field.size_bytes(), 0);
    field.read_into(copy)?;
    Ok(copy)
}

fn progress(batches: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let endless = batches == u64::MAX;
    let bar = if endless { ProgressBar::no_length() } else { ProgressBar::new(batches) };
    let style = ProgressStyle::with_template(match endless {
        true => "{elapsed_precise} {pos} batches ({per_sec})",
        false => "{elapsed_precise} {wide_bar} {pos}/{len} batches ({per_sec})",
    });
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
    bar
}

struct Figures {
    build_s: f64,
    /// Peaks of RSS and of anonymous + shared memory, in MiB.
    memory: (f64, f64),
    tally: Tally,
}

impl Figures {
    fn json(&self, loader: &Loader) -> String {
        let Tally { samples, bytes, first_batch_s, wall_s, cpu_s, order_hash, data_hash } = self.tally;
        let choice = loader.report().choice;
        let data_hash = data_hash.map_or("null".into(), |hash| format!("\"{hash:016x}\""));
        format!(
            "{{\"items_per_s\":{:.1},\"gb_per_s\":{:.4},\"first_batch_s\":{first_batch_s:.4},\"wall_s\":{wall_s:.3},\
             \"cpu_s_per_10k\":{:.4},\"peak_rss_mib\":{:.1},\"peak_anon_mib\":{:.1},\"reader\":\"{}\",\"direct\":{},\
             \"order_hash\":\"{order_hash:016x}\",\"data_hash\":{data_hash},\"items\":{samples},\"build_s\":{:.4},\
             \"plan_mib\":{:.1}}}",
            samples as f64 / wall_s,
            bytes as f64 / wall_s / 1e9,
            cpu_s / samples.max(1) as f64 * 1e4,
            self.memory.0,
            self.memory.1,
            choice.reader,
            choice.direct,
            self.build_s,
            loader.plan().total() as f64 / f64::from(1 << 20),
        )
    }

    fn text(&self) -> String {
        let Tally { samples, bytes, first_batch_s, wall_s, cpu_s, order_hash, data_hash } = self.tally;
        let data_hash = data_hash.map_or(String::new(), |hash| format!(", data hash {hash:016x}"));
        format!(
            "{samples} samples in {wall_s:.2} s: {:.0} samples/s, {:.3} GB/s delivered\nfirst batch {first_batch_s:.3} s \
             after a build of {:.3} s; {:.2} CPU-s per 10,000 samples\npeak memory {:.0} MiB resident, {:.0} MiB \
             anonymous\norder hash {order_hash:016x}{data_hash}",
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

/// Looks at the process's memory 20 times a second: the kernel keeps a peak of RSS only.
struct MemoryWatch {
    stop: Arc<AtomicBool>,
    peak_anon_kib: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

impl MemoryWatch {
    fn start() -> Self {
        let (stop, peak_anon_kib) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ended, peak) = (stop.clone(), peak_anon_kib.clone());
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                peak.fetch_max(status_kib("RssAnon:") + status_kib("RssShmem:"), Ordering::Relaxed);
                std::thread::park_timeout(Duration::from_millis(50));
            }
        });
        Self { stop, peak_anon_kib, thread }
    }

    fn stop(self) -> (f64, f64) {
        let anon = status_kib("RssAnon:") + status_kib("RssShmem:");
        self.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        // It cannot panic; if it did, the last look is all there is.
        let _ = self.thread.join();
        let mib = |kib: u64| kib as f64 / 1024.0;
        (mib(status_kib("VmHWM:")), mib(anon.max(self.peak_anon_kib.load(Ordering::Relaxed))))
    }
}

fn status_kib(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
