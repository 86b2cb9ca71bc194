//! What an order costs: time to the first index, time per index, and memory, for the computed permutation of `feedline`
//! and for one that is shuffled into an array.
//!
//! Physical limits to hold the figures against: an array takes 8 bytes per sample, and must be written once in random
//! order before its first index is known; the computed one is bound by the latency of 20 multiplications in a row with a few cheaper
//! steps between them: some 180 cycles when every index depends on the one before; those of a batch do not, and overlap.
//!
//! `cargo bench --no-default-features --bench order -- --quick`

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use feedline::order::{Draws, Key, Permutation};
use std::hint::black_box;

const LENGTHS: [u64; 4] = [1_000, 1_000_000, 1_000_000_000, 1_000_000_000_000];
/// Beyond this an array is out of proportion to a benchmark.
const STORED_MAX: u64 = 1_000_000;
/// Indices per measured step: those of some batches.
const STEP: u64 = 1000;

/// The usual way: an array of all indices, shuffled.
fn stored(n: u64, key: Key) -> Vec<u64> {
    let mut entries: Vec<u64> = (0..n).collect();
    Draws::from_key(key).shuffle(&mut entries);
    entries
}

fn memory(_: &mut Criterion) {
    println!("memory in bytes:");
    for n in LENGTHS {
        let computed = Permutation::new(n, Key::new(1)).bytes();
        println!("  n = {n:>13}: computed {computed:>4}, stored {:>13}", n * 8);
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
            bencher.iter(|| positions(&mut start).fold(0, |sum, position| sum ^ permutation.get(position)));
        });
        group.bench_function(BenchmarkId::new("computed, each from the last", n), |bencher| {
            let mut index = 0;
            bencher.iter(|| {
                (0..STEP).for_each(|_| index = permutation.get(index));
                index
            });
        });
        group.bench_function(BenchmarkId::new("computed, inverse", n), |bencher| {
            let mut start = 0;
            bencher.iter(|| positions(&mut start).fold(0, |sum, position| sum ^ permutation.inverse(position)));
        });
        if n <= STORED_MAX {
            let entries = stored(n, Key::new(1));
            group.bench_function(BenchmarkId::new("stored", n), |bencher| {
                let mut start = 0;
                bencher.iter(|| positions(&mut start).fold(0, |sum, position| sum ^ entries[position as usize]));
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

criterion_group!(benches, memory, first_index, per_index, draws);
criterion_main!(benches);
