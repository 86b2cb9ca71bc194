//! Cost of measuring: the same loader with and without its meters, in turn, in one process.
//!
//! ```text
//! cargo test  --benches                                                 each case once, small, to keep it working
//! cargo bench --no-default-features --features image --bench profile    the pairs
//! ```
//!
//! Cases:
//! - loaders of about 10^6 samples/s, where a cost per sample or per batch shows: records of 8 KiB
//!   from memory, and of 64 bytes from the page cache, in batches of 256;
//! - JPEGs of 500×375 pixels, cropped to 224;
//! - samples for which a worker spins exactly 100 µs;
//! - far beyond the target, 64 bytes from memory in large and small batches, about 10^7 samples/s.
//!
//! The bench runs short blocks with and without meters in turn (A B, B A, …). It builds new loaders
//! every few pairs, because the place of their memory matters more than their meters. It prints the
//! median of the pairs' ratios with its 95 % interval, for samples per second and for CPU time per
//! sample. For a loader faster than the target's 10^6 samples/s, it also compares the meters' time
//! per sample with a microsecond. An interval wider than ± 5 % is inconclusive, and only one
//! narrower than ± 1 % can show 1 %.
//!
//! The switch that turns off the meters (except those that steer the loader) exists for this bench
//! only. `FEEDLINE_PAIRS` and `FEEDLINE_PAIR_SECONDS` set the number of pairs and the length of
//! each half. `FEEDLINE_CONTROL=1` compares meters with meters, which gives the noise. Arguments
//! select cases by their names.

mod common;
#[path = "common/picture.rs"]
mod picture;

use common::{as_test, cpu_s, file, pairs_wanted, spread, warm};
use feedline::dataset::Records;
use feedline::memory::MemoryTerm;
use feedline::{Epoch, Loader, LoaderBuilder, Order};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Target: maximum cost, as a share of the throughput.
const COST: f64 = 0.01;
/// Pairs of the same two loaders.
const PAIRS_EACH: usize = 8;
/// Half width above which an interval is inconclusive.
const NOISE: f64 = 0.05;

/// A case: its name, number of pairs, seconds of a block, and loader.
type Case = (&'static str, usize, f64, fn() -> LoaderBuilder);

fn cases() -> Vec<Case> {
    vec![
        ("8 KiB from memory, batches of 256", 400, 0.05, || {
            from_memory(8 << 10, 256)
        }),
        (
            "64 bytes from the page cache, batches of 256",
            400,
            0.05,
            cached,
        ),
        ("pictures, batches of 8", 160, 0.2, pictures),
        ("100 µs of work, batches of 64", 200, 0.1, working),
        ("64 bytes from memory, batches of 4096", 400, 0.05, || {
            from_memory(64, 4096)
        }),
        ("64 bytes from memory, batches of 256", 400, 0.05, || {
            from_memory(64, 256)
        }),
    ]
}

/// Records from memory, the same for all loaders, because its place affects their speed.
fn from_memory(record: usize, rows: usize) -> LoaderBuilder {
    static BYTES: OnceLock<Arc<[u8]>> = OnceLock::new();
    let bytes = BYTES.get_or_init(|| vec![7; 16 << 20].into()).clone();
    let records = Records::builder(record).open_bytes(bytes).unwrap();
    Loader::builder(records)
        .order(Order::shuffled(1))
        .batch_size(rows)
}

/// Records of 64 bytes from a file in the page cache.
fn cached() -> LoaderBuilder {
    let path = file(16 << 20);
    warm(&path, 0..16 << 20);
    Loader::builder(Records::builder(64).open(path).unwrap())
        .order(Order::shuffled(1))
        .batch_size(256)
}

/// Samples that take a worker 100 µs.
fn working() -> LoaderBuilder {
    let records = Records::builder(64).open_bytes(vec![7; 64 << 12]).unwrap();
    Loader::builder(records).batch_size(64).map(|row, _| {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(100) {
            std::hint::spin_loop();
        }
        row.bytes_mut(0)[0] ^= 1;
        Ok(())
    })
}

/// A folder of JPEGs.
fn pictures() -> LoaderBuilder {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("profile-pictures");
    let count = if as_test() { 4 } else { 32 };
    std::fs::create_dir_all(folder.join("class")).unwrap();
    for id in 0..count {
        let path = folder.join(format!("class/{id:02}.jpg"));
        if !path.exists() {
            // Renamed when complete, because another process may use the folder.
            let own = folder.join(format!("{id}-{}", std::process::id()));
            std::fs::write(&own, picture::made(id, 0)).unwrap();
            std::fs::rename(own, path).unwrap();
        }
    }
    Loader::builder(feedline::dataset::Images::open(folder).unwrap())
        .decode(feedline::decode::Image::random_resized_crop(224).flip(0.5))
        .order(Order::shuffled(1))
        .batch_size(8)
}

fn main() {
    let (pairs, seconds) = pairs_wanted();
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let wanted =
        |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    println!(
        "target: meters take at most {} % of the throughput",
        COST * 100.0
    );
    for (name, usual, block, builder) in cases().into_iter().filter(|(name, ..)| wanted(name)) {
        let (pairs, block) = match pairs {
            _ if as_test() => (1, 0.02),
            0 => (usual, block),
            pairs => (pairs, seconds),
        };
        println!("{name}");
        compared(builder, pairs, block);
    }
}

/// An endless loader.
struct Side {
    loader: Loader,
    batches: Epoch,
}

/// Figures of a block.
struct Block {
    samples: f64,
    seconds: f64,
    cpu: f64,
}

impl Side {
    fn new(builder: LoaderBuilder) -> Self {
        let loader = builder.build().unwrap();
        let batches = loader.epochs(0..u64::MAX).unwrap();
        Self { loader, batches }
    }

    fn take(&mut self) -> usize {
        self.batches
            .next()
            .expect("the epochs are endless")
            .unwrap()
            .len()
    }

    /// Takes batches for about `seconds`, after those that were ready. (The other side may still
    /// fill its slots then.)
    fn block(&mut self, seconds: f64) -> Block {
        (0..2 * self.loader.plan().term(MemoryTerm::SLOTS).count).for_each(|_| _ = self.take());
        let begin = Instant::now();
        let cpu = cpu_s();
        let mut samples = 0;
        loop {
            samples += self.take();
            let elapsed = begin.elapsed().as_secs_f64();
            if elapsed >= seconds {
                return Block {
                    samples: samples as f64,
                    seconds: elapsed,
                    cpu: cpu_s() - cpu,
                };
            }
        }
    }
}

/// Runs pairs of blocks with and without meters, and prints the costs.
fn compared(builder: fn() -> LoaderBuilder, pairs: usize, seconds: f64) {
    let control = std::env::var_os("FEEDLINE_CONTROL").is_some();
    let without = || {
        if control {
            builder()
        } else {
            builder().tuning(|t| t.unmeasured())
        }
    };
    let mut rates = Vec::new();
    let mut ratios = Vec::new();
    let mut cpu = Vec::new();
    for round in 0..pairs.div_ceil(PAIRS_EACH) {
        let (mut on, mut off) = if round % 2 == 0 {
            let on = Side::new(builder());
            (on, Side::new(without()))
        } else {
            let off = Side::new(without());
            (Side::new(builder()), off)
        };
        for pair in 0..PAIRS_EACH.min(pairs - round * PAIRS_EACH) {
            let (a, b) = if pair % 2 == 0 {
                let a = on.block(seconds);
                (a, off.block(seconds))
            } else {
                let b = off.block(seconds);
                (on.block(seconds), b)
            };
            rates.push(a.samples / a.seconds);
            ratios.push(b.seconds / b.samples / (a.seconds / a.samples));
            cpu.push(a.cpu / a.samples / (b.cpu / b.samples));
        }
    }
    let (rate, ..) = spread(rates);
    let reached = if rate >= 1e6 { ", 10^6 and more" } else { "" };
    println!("  {rate:.0} samples/s with meters{reached}; {pairs} pairs of {seconds} s");
    if as_test() {
        return;
    }
    // Less than 1 if meters cost time.
    let (ratio, low, high) = spread(ratios);
    say("throughput", [1.0 - ratio, 1.0 - high, 1.0 - low]);
    if rate > 1e6 {
        // The same nanoseconds per sample, relative to a microsecond.
        say(
            "the same at 10^6 samples/s",
            [1.0 - ratio, 1.0 - high, 1.0 - low].map(|share| share * 1e6 / rate),
        );
    }
    let (ratio, low, high) = spread(cpu);
    say("CPU time per sample", [ratio - 1.0, low - 1.0, high - 1.0]);
}

/// Prints a cost with its interval and verdict.
fn say(what: &str, [cost, low, high]: [f64; 3]) {
    let verdict = match (high - low) / 2.0 {
        _ if high <= COST => "met",
        _ if low > COST => "MISSED",
        width if width > NOISE => "inconclusive: machine too noisy",
        _ => "neither shown nor excluded",
    };
    let [cost, low, high] = [cost, low, high].map(|share| 100.0 * share);
    println!(
        "  {what}: meters cost {cost:+.2} % [{low:+.2}, {high:+.2}]: at most {} %: {verdict}",
        100.0 * COST
    );
}
