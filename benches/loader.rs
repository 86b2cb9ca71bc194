//! The whole loader. CPU time per 64-byte record from memory shows the crate's own cost. With
//! `FEEDLINE_PAIRS=15`, alternating pairs compare the loader with the machine's limits:
//!
//! ```text
//! FEEDLINE_PAIRS=15 cargo bench --bench loader -- pairs
//! ```
//!
//! `FEEDLINE_DEVICE` (`host`, the default, `auto` or `cuda:N`) selects the device of the batches.
//! On a GPU the bus is another limit, measured by `cargo bench --bench copy`; the limits here stay
//! those of the host.

mod common;

use common::{as_test, compare, cpu_s, evict, file, fio, pairs_wanted, warm};
use criterion::{Criterion, Throughput, criterion_group};
use feedline::dataset::{DatasetExt, Records, Tokens};
use feedline::storage::{Direct, Mode};
use feedline::tensor::DType;
use feedline::{Batch, Device, Loader, LoaderBuilder, Order};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const RECORD: usize = 150_528;
const BATCH: usize = 256;

fn small_records(batch: usize) -> LoaderBuilder {
    let count = if as_test() { 10_000 } else { 1_000_000 };
    let records = Records::builder(64)
        .open_bytes(vec![7; count * 64])
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(1))
        .batch_size(batch)
        .device(device())
}

/// The device of the batches.
fn device() -> Device {
    let words = std::env::var("FEEDLINE_DEVICE").unwrap_or("host".into());
    words
        .parse()
        .unwrap_or_else(|error| panic!("FEEDLINE_DEVICE={words}: {error}"))
}

/// Waits for the copy of a device batch, because batches are delivered before their copies
/// complete.
fn arrive(batch: &Batch) {
    if let Some(field) = batch
        .fields()
        .next()
        .filter(|field| field.as_bytes().is_err())
    {
        field.read_into(&mut vec![0; field.size_bytes()]).unwrap();
    }
}

/// CPU time of the whole process for `samples` records.
fn cpu_of(loader: &Loader, samples: u64) -> Duration {
    let mut epochs = loader.epochs(0..u64::MAX / 2).unwrap();
    // The first batches pay one-time costs.
    epochs
        .by_ref()
        .take(64)
        .for_each(|batch| drop(batch.unwrap()));
    let mut done = 0;
    let before = cpu_s();
    while done < samples {
        done += epochs.next().unwrap().unwrap().len() as u64;
    }
    Duration::from_secs_f64((cpu_s() - before) * samples as f64 / done as f64)
}

fn overhead(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("loader: CPU time per 64-byte record from memory");
    group.throughput(Throughput::Elements(1));
    for batch in [256, 4096] {
        let loader = small_records(batch).build().unwrap();
        group.bench_function(format!("shuffled, batch {batch}"), |bencher| {
            bencher.iter_custom(|samples| cpu_of(&loader, samples));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).measurement_time(Duration::from_secs(if as_test() { 1 } else { 5 }));
    targets = overhead
}

fn records(path: &Path, mode: Mode, direct: Direct) -> Loader {
    let len = std::fs::metadata(path).unwrap().len();
    assert_eq!(
        len % RECORD as u64,
        0,
        "the file is not a whole number of {RECORD}-byte records"
    );
    let records = Records::builder(RECORD).open(path).unwrap();
    let builder = Loader::builder(records)
        .order(Order::shuffled(1))
        .batch_size(BATCH)
        .workers(2)
        .device(device());
    builder
        .tuning(|t| t.reader(mode).direct(direct))
        .build()
        .unwrap()
}

/// GB per second of a loader for about `seconds`, from epoch `epoch` on.
fn pull(loader: &Loader, epoch: u64, seconds: f64) -> f64 {
    let started = Instant::now();
    let mut bytes = 0;
    for batch in loader.epochs(epoch..u64::MAX / 2).unwrap() {
        let batch = batch.unwrap();
        bytes += batch.field("record").unwrap().size_bytes();
        if started.elapsed().as_secs_f64() >= seconds {
            arrive(&batch);
            break;
        }
    }
    bytes as f64 / started.elapsed().as_secs_f64() / 1e9
}

/// The limit for cached data: two threads that pread random records into memory of the same size
/// and kind.
fn bare_pread(path: &Path, seconds: f64) -> f64 {
    let file = std::fs::File::open(path).unwrap();
    let count = file.metadata().unwrap().len() / RECORD as u64;
    let order = feedline::unstable::Permutation::new(count, feedline::unstable::Key::new(7));
    let bytes = 4 * BATCH * RECORD;
    let mut memory = memmap2::MmapMut::map_anon(bytes).unwrap();
    let _ = memory.advise(memmap2::Advice::HugePage);
    let _ = memory.advise(memmap2::Advice::PopulateWrite);
    let next = AtomicU64::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for half in memory.chunks_mut(bytes / 2) {
            let file = &file;
            let order = &order;
            let next = &next;
            scope.spawn(move || {
                while started.elapsed().as_secs_f64() < seconds {
                    for row in half.chunks_exact_mut(RECORD) {
                        let index = order.get(next.fetch_add(1, Ordering::Relaxed) % count);
                        file.read_exact_at(row, index * RECORD as u64).unwrap();
                    }
                }
            });
        }
    });
    next.load(Ordering::Relaxed) as f64 * RECORD as f64 / started.elapsed().as_secs_f64() / 1e9
}

/// Tokens per window, and windows per batch.
const WINDOW: usize = 2048;
const WINDOWS: usize = 64;

/// Millions of windows per second of a loader.
fn windows(loader: &Loader, seconds: f64) -> f64 {
    let started = Instant::now();
    let mut rows = 0;
    for batch in loader.epochs(0..u64::MAX / 2).unwrap() {
        let batch = batch.unwrap();
        rows += batch.len();
        if started.elapsed().as_secs_f64() >= seconds {
            arrive(&batch);
            break;
        }
    }
    rows as f64 / started.elapsed().as_secs_f64() / 1e6
}

/// The limit: two threads that copy the same windows in the same order into memory of the same
/// kind, by `copy`.
fn bare_windows(count: u64, seconds: f64, copy: impl Fn(u64, &mut [u8]) + Sync) -> f64 {
    let order = feedline::unstable::Permutation::new(count, feedline::unstable::Key::new(7));
    let batch = WINDOWS * WINDOW * 2;
    let mut memory = memmap2::MmapMut::map_anon(16 * batch).unwrap();
    let _ = memory.advise(memmap2::Advice::HugePage);
    let _ = memory.advise(memmap2::Advice::PopulateWrite);
    let next = AtomicU64::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for half in memory.chunks_mut(8 * batch) {
            let order = &order;
            let next = &next;
            let copy = &copy;
            scope.spawn(move || {
                while started.elapsed().as_secs_f64() < seconds {
                    for rows in half.chunks_exact_mut(batch) {
                        let first = next.fetch_add(WINDOWS as u64, Ordering::Relaxed);
                        for (index, row) in (first..).zip(rows.chunks_exact_mut(WINDOW * 2)) {
                            copy(order.get(index % count) * (WINDOW as u64 * 2), row);
                        }
                    }
                }
            });
        }
    });
    next.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64() / 1e6
}

/// Shuffled windows of tokens from the page cache. `FEEDLINE_BENCH_TOKENS` names your own file of
/// `u16`.
fn tokens(count: usize, seconds: f64) {
    let own = std::env::var_os("FEEDLINE_BENCH_TOKENS").map(std::path::PathBuf::from);
    let path = own.unwrap_or_else(|| file(1 << 30));
    let len = std::fs::metadata(&path).unwrap().len();
    warm(&path, 0..len);
    let open = || {
        Tokens::builder(DType::U16)
            .window(WINDOW)
            .open(&path)
            .unwrap()
    };
    let total = feedline::dataset::Dataset::len(&open());
    let shuffled = |builder: LoaderBuilder| {
        builder
            .order(Order::shuffled(1))
            .batch_size(WINDOWS)
            .workers(2)
            .device(device())
    };
    let loader = shuffled(Loader::builder(open())).build().unwrap();
    let loader_speed = || windows(&loader, seconds);
    let opened = std::fs::File::open(&path).unwrap();
    let what = "tokens: shuffled windows of 2048 u16, loader, auto, 2 workers";
    let unit = "M windows/s";
    compare(
        &format!("{what} / pread loop on 2 threads"),
        unit,
        count,
        loader_speed,
        || {
            bare_windows(total, seconds, |at, row| {
                opened.read_exact_at(row, at).unwrap()
            })
        },
    );
    // Replaces a populated map of the file, which needs unsafe code: populated pages of the same
    // size.
    let mut pages = memmap2::MmapMut::map_anon(len as usize).unwrap();
    let _ = pages.advise(memmap2::Advice::NoHugePage);
    opened.read_exact_at(&mut pages, 0).unwrap();
    let by_copy = |at: u64, row: &mut [u8]| row.copy_from_slice(&pages[at as usize..][..row.len()]);
    compare(
        &format!("{what} / copy loop from mapped pages on 2 threads"),
        unit,
        count,
        loader_speed,
        || bare_windows(total, seconds, by_copy),
    );
    drop(loader);
    let memory = DatasetExt::in_memory(open()).unwrap();
    let loader = shuffled(Loader::builder(memory)).build().unwrap();
    let what = "tokens: the same from a dataset in memory";
    compare(
        &format!("{what} / copy loop from mapped pages on 2 threads"),
        unit,
        count,
        || windows(&loader, seconds),
        || bare_windows(total, seconds, by_copy),
    );
    println!("{}", loader.report());
}

fn pairs(count: usize, seconds: f64) {
    if cases().contains("tokens") {
        tokens(count, seconds);
    }
    if !["cold", "mixed", "warm"]
        .iter()
        .any(|case| cases().contains(case))
    {
        return;
    }
    let path = file(14_000 * RECORD as u64);
    let len = std::fs::metadata(&path).unwrap().len();
    println!(
        "{} ({:.2} GB), {count} pairs of {seconds} s",
        path.display(),
        len as f64 / 1e9
    );

    let wanted = cases();
    let direct = records(&path, Mode::Uring, Direct::On);
    if wanted.contains("cold") {
        evict(&path, 0..len);
        cold(&path, &direct, count, seconds);
    }
    if wanted.contains("mixed") {
        mixed(&path, &direct, count);
    }
    if wanted.contains("warm") {
        warm(&path, 0..len);
        let cached = records(&path, Mode::Auto, Direct::Auto);
        compare(
            "warm: loader, auto, 2 workers / bare pread loop on 2 threads",
            "GB/s",
            count,
            || pull(&cached, 0, seconds),
            || bare_pread(&path, seconds),
        );
    }
}

/// The comparisons to run.
fn cases() -> String {
    std::env::var("FEEDLINE_BENCH_CASES").unwrap_or("cold,mixed,warm,tokens".into())
}

fn cold(path: &Path, direct: &Loader, count: usize, seconds: f64) {
    let mut epoch = 0;
    compare(
        "cold: loader, O_DIRECT, shuffled / fio randread, same block and depth",
        "GB/s",
        count,
        || {
            pull(
                direct,
                {
                    epoch += 1;
                    epoch
                },
                seconds,
            )
        },
        || fio(path, RECORD as u64, 32, seconds).map_or(f64::NAN, |fio| fio.gb_per_s),
    );
}

/// With half of the file in the page cache. Each run is one pass over part of a shuffled epoch,
/// because longer runs of the buffered reader would cache the other half, too.
fn mixed(path: &Path, direct: &Loader, count: usize) {
    let len = std::fs::metadata(path).unwrap().len();
    let half = len / 2 / RECORD as u64 * RECORD as u64;
    let buffered = records(path, Mode::Uring, Direct::Off);
    let auto = records(path, Mode::Auto, Direct::On);
    let one = |loader: &Loader| {
        evict(path, half..len);
        warm(path, 0..half);
        let started = Instant::now();
        let bytes: usize = loader
            .epoch(0)
            .unwrap()
            .take(30)
            .map(|batch| batch.unwrap().len() * RECORD)
            .sum();
        bytes as f64 / started.elapsed().as_secs_f64() / 1e9
    };
    compare(
        "half cached: auto / io_uring O_DIRECT",
        "GB/s",
        count,
        || one(&auto),
        || one(direct),
    );
    compare(
        "half cached: auto / io_uring buffered",
        "GB/s",
        count,
        || one(&auto),
        || one(&buffered),
    );
}

fn main() {
    let (count, seconds) = pairs_wanted();
    if device() != Device::host() {
        println!("batches go to {}", device());
    }
    if count > 0 {
        pairs(count, seconds);
    } else {
        benches();
        Criterion::default().configure_from_args().final_summary();
    }
}
