//! Cost of an order: time to the first index, time per index, and memory, for feedline's computed
//! permutation and for a shuffled array.
//!
//! Physical limits: an array takes 8 bytes per sample, and is written once in random order before
//! its first index. The computed permutation is bound by the latency of 20 dependent
//! multiplications with a few cheaper steps between them: about 180 cycles if each index depends on
//! the last. The indices of a batch do not, so they overlap.
//!
//! `cargo bench --no-default-features --bench order -- --quick`
//!
//! Cost of a whole process until the first index of an epoch, prepared as by the loader; each order
//! in its own process. `benches/random_sampler.py` prints the same lines for other samplers:
//!
//! `FEEDLINE_ORDERS=5 cargo bench --no-default-features --bench order` (the median of 5 processes)
//!
//! Rate of a loader whose order is weighted, against the shuffled one, in pairs:
//!
//! `FEEDLINE_PAIRS=15 FEEDLINE_PAIR_SECONDS=2 cargo bench --no-default-features --bench order`

mod common;
#[path = "common/made.rs"]
mod made;

use common::{as_test, compare, pairs_wanted, spread};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use feedline::order::{Draws, Weights};
use feedline::unstable::{Key, Permutation};
use feedline::{Loader, Order, Rank};
use made::Made;
use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

const LENGTHS: [u64; 4] = [1_000, 1_000_000, 1_000_000_000, 1_000_000_000_000];
const WEIGHTS: [u64; 2] = [1_000_000, 100_000_000];
const CHUNKS: [u64; 4] = [1_000, 10_000, 100_000, 1_000_000];
/// Records of 128 bytes, because their reads are not measured.
const CHUNK_ROWS: u64 = 16;
const LANES: u32 = 8;
/// Largest array for a benchmark.
const STORED_MAX: u64 = 1_000_000;
/// Indices per measured step, as in some batches.
const STEP: u64 = 1000;

/// The usual order: a shuffled array of all indices.
fn stored(n: u64, key: Key) -> Vec<u64> {
    let mut entries: Vec<u64> = (0..n).collect();
    Draws::from_key(key).shuffle(&mut entries);
    entries
}

fn memory(_: &mut Criterion) {
    println!("memory in bytes:");
    for n in LENGTHS {
        let computed = Permutation::new(n, Key::new(1)).bytes();
        println!(
            "  n = {n:>13}: computed {computed:>4}, stored {:>13}",
            n * 8
        );
    }
}

fn first_index(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("first index");
    for n in LENGTHS {
        group.bench_function(BenchmarkId::new("computed", n), |bencher| {
            let mut epoch = 0;
            bencher.iter(|| {
                epoch += 1;
                Permutation::new(black_box(n), Key::new(1).derive(epoch)).get(0)
            });
        });
        if n <= STORED_MAX {
            group.bench_function(BenchmarkId::new("stored", n), |bencher| {
                bencher.iter(|| stored(black_box(n), Key::new(1))[0]);
            });
        }
    }
    group.finish();
}

fn per_index(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("per index");
    group.throughput(Throughput::Elements(STEP));
    for n in LENGTHS {
        let permutation = Permutation::new(n, Key::new(1));
        let positions = |start: &mut u64| {
            *start = (*start + STEP) % (n - STEP + 1);
            *start..*start + STEP
        };
        group.bench_function(BenchmarkId::new("computed", n), |bencher| {
            let mut start = 0;
            bencher.iter(|| {
                positions(&mut start).fold(0, |sum, position| sum ^ permutation.get(position))
            });
        });
        group.bench_function(
            BenchmarkId::new("computed, each from the last", n),
            |bencher| {
                let mut index = 0;
                bencher.iter(|| {
                    (0..STEP).for_each(|_| index = permutation.get(index));
                    index
                });
            },
        );
        if n <= STORED_MAX {
            let entries = stored(n, Key::new(1));
            group.bench_function(BenchmarkId::new("stored", n), |bencher| {
                let mut start = 0;
                bencher.iter(|| {
                    positions(&mut start).fold(0, |sum, position| sum ^ entries[position as usize])
                });
            });
        }
    }
    group.finish();
}

fn draws(criterion: &mut Criterion) {
    criterion.bench_function("draws of one sample", |bencher| {
        let mut id = 0;
        bencher.iter(|| {
            id += 1;
            Draws::new(1, 2, black_box(id), "crop").next_f64()
        });
    });
}

/// Rank 0 of 8 over `chunks` chunks in memory, windows of 4 in 8 lanes.
fn lanes(chunks: u64) -> Loader {
    let dataset = Made::chunks(Made::memory(1 << 20), chunks, CHUNK_ROWS, 8);
    let order = Order::windowed(1, 4).lanes(LANES);
    Loader::builder(dataset)
        .order(order)
        .rank(Rank::new(0, LANES).unwrap())
        .batch_size(1)
        .workers(1)
        .build()
        .unwrap()
}

/// Prepares an epoch up to its first index. For lanes this includes the rank's schedule of chunks,
/// which a loader prepares before its first read.
fn first_index_of_an_epoch(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("first index of an epoch");
    for n in LENGTHS {
        group.bench_function(BenchmarkId::new("shuffled", n), |bencher| {
            let mut epoch = 0;
            bencher.iter(|| {
                epoch += 1;
                Order::shuffled(1).preview(black_box(n), epoch, 1)
            });
        });
    }
    for n in WEIGHTS.into_iter().take(if as_test() { 1 } else { 2 }) {
        let weights: Vec<f64> = (0..n).map(|sample| (1 + sample % 7) as f64).collect();
        let started = Instant::now();
        let order = Order::weighted(1, Weights::new(&weights).unwrap());
        println!(
            "  table of {n} weights: {:.3} s",
            started.elapsed().as_secs_f64()
        );
        group.bench_function(BenchmarkId::new("weighted", n), |bencher| {
            let mut epoch = 0;
            bencher.iter(|| {
                epoch += 1;
                order.preview(black_box(n), epoch, 1)
            });
        });
        group.bench_function(BenchmarkId::new("weighted, 1000 indices", n), |bencher| {
            let mut epoch = 0;
            bencher.iter(|| {
                epoch += 1;
                order.preview(black_box(n), epoch, STEP)
            });
        });
    }
    group.sample_size(10);
    for chunks in CHUNKS
        .into_iter()
        .take(if as_test() { 2 } else { CHUNKS.len() })
    {
        let loader = lanes(chunks);
        group.bench_function(BenchmarkId::new("8 lanes over chunks", chunks), |bencher| {
            let mut epoch = 0;
            bencher.iter(|| {
                epoch += 1;
                loader.preview(epoch, 1)
            });
        });
        group.bench_function(
            BenchmarkId::new("8 lanes over chunks, and a rank's schedule", chunks),
            |bencher| {
                bencher.iter_custom(|rounds| {
                    (0..rounds)
                        .map(|epoch| {
                            let started = Instant::now();
                            let epoch = loader.epoch(epoch).unwrap();
                            let time = started.elapsed();
                            drop(epoch);
                            time
                        })
                        .sum::<Duration>()
                });
            },
        );
    }
    group.finish();
}

/// Samples of the loaders whose rates are compared, and the bytes of each.
const DELIVERED: [(u64, usize); 3] = [(1_000_000, 4096), (1_000_000, 150_528), (100_000_000, 4096)];

/// Samples per second of a loader without a step.
fn delivered(samples: u64, record: usize, order: &Order, seconds: f64) -> f64 {
    let data = Made::samples(Made::memory(64 << 20), samples, record);
    let loader = Loader::builder(data)
        .order(order.clone())
        .batch_size(64)
        .build()
        .unwrap();
    let mut count = 0;
    let started = Instant::now();
    for batch in loader.epoch(0).unwrap() {
        count += batch.unwrap().len();
        if started.elapsed().as_secs_f64() > seconds {
            break;
        }
    }
    count as f64 / started.elapsed().as_secs_f64()
}

/// Weighted against shuffled, in pairs.
fn weighted(pairs: usize, seconds: f64) {
    for (samples, record) in DELIVERED {
        let weights: Vec<f64> = (0..samples).map(|sample| (1 + sample % 7) as f64).collect();
        let drawn = Order::weighted(1, Weights::new(&weights).unwrap());
        let shuffled = Order::shuffled(1);
        compare(
            &format!("{samples} samples of {record} bytes: weighted against shuffled"),
            "samples/s",
            pairs,
            || delivered(samples, record, &drawn, seconds),
            || delivered(samples, record, &shuffled, seconds),
        );
    }
}

/// Peak and present resident memory, in bytes.
fn resident() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = |name| {
        status
            .lines()
            .find_map(|line: &str| line.strip_prefix(name))
            .unwrap()
    };
    let bytes = |name| {
        line(name)
            .trim()
            .trim_end_matches(" kB")
            .parse::<u64>()
            .unwrap()
            * 1024
    };
    (bytes("VmHWM:"), bytes("VmRSS:"))
}

/// Prints the seconds of `first`, and its bytes beyond those resident before.
fn measure_first<T>(first: impl FnOnce() -> T) {
    // Resets the peak.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let (_, before) = resident();
    let started = Instant::now();
    let made = black_box(first());
    let seconds = started.elapsed().as_secs_f64();
    let (peak, _) = resident();
    println!("{seconds} {}", peak.saturating_sub(before));
    drop(made);
}

/// Measures one order in this process.
fn measure_one(what: &str) {
    let (kind, n) = what.split_once(' ').unwrap();
    let n: u64 = n.parse().unwrap();
    let shuffled = |n| Order::shuffled(1).preview(n, 0, 1).unwrap();
    // A short order first, so that the program's own pages do not count.
    if kind == "shuffled" {
        shuffled(10);
        measure_first(|| shuffled(n));
    } else {
        drop(lanes(10).epoch(0).unwrap());
        let loader = lanes(n);
        measure_first(|| loader.epoch(0).unwrap());
    }
}

/// Measures each order in processes of its own.
fn orders(processes: usize) {
    let shuffled = (3..=12).map(|exponent| ("shuffled", 10_u64.pow(exponent)));
    for (kind, n) in shuffled.chain(CHUNKS.map(|n| ("lanes", n))) {
        let run = |_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            // Freed memory returns to the kernel; reused memory would not count.
            command.env("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072");
            let output = command
                .env("FEEDLINE_ORDER", format!("{kind} {n}"))
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let (seconds, bytes) = text
                .trim()
                .split_once(' ')
                .expect("a process that prints its figures");
            (
                seconds.parse::<f64>().unwrap(),
                bytes.parse::<f64>().unwrap(),
            )
        };
        let (seconds, bytes): (Vec<f64>, Vec<f64>) = (0..processes).map(run).unzip();
        let seconds = spread(seconds).0;
        let bytes = spread(bytes).0;
        let what = if kind == "lanes" {
            "feedline, chunks in 8 lanes"
        } else {
            "feedline, shuffled"
        };
        println!(
            r#"{{"what": "{what}", "n": {n}, "first_index_s": {seconds:.9}, "peak_bytes": {bytes}}}"#
        );
    }
}

criterion_group!(
    benches,
    memory,
    first_index,
    per_index,
    draws,
    first_index_of_an_epoch
);

fn main() {
    if let Ok(what) = std::env::var("FEEDLINE_ORDER") {
        return measure_one(&what);
    }
    match std::env::var("FEEDLINE_ORDERS")
        .ok()
        .and_then(|processes| processes.parse().ok())
    {
        Some(processes) if !as_test() => orders(processes),
        _ if pairs_wanted().0 > 0 => {
            let (pairs, seconds) = pairs_wanted();
            weighted(pairs, seconds);
        }
        _ => {
            benches();
            Criterion::default().configure_from_args().final_summary();
        }
    }
}
