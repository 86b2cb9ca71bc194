//! Raw records, verified records and tar shards cost no heap allocation per sample, and at most 4 +
//! workers per batch, including rayon's. A counting allocator sees the whole process, so this
//! binary holds one test.

use crate::common::*;
use feedline::dataset::{DatasetExt, Records, Tar};
use feedline::storage::{Direct, Mode};
use feedline::tensor::{DType, Field};
use feedline::{Loader, LoaderBuilder, Order};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

static COUNT: AtomicU64 = AtomicU64::new(0);
static HEAP: AtomicUsize = AtomicUsize::new(0);

/// Bytes on the heap of the process.
#[cfg(feature = "remote")]
pub fn heap() -> usize {
    HEAP.load(Ordering::Relaxed)
}

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        HEAP.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        HEAP.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        HEAP.fetch_add(new_size.wrapping_sub(layout.size()), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WORKERS: usize = 2;
const WARM_UP: usize = 100;
const MEASURED: usize = 400;

/// Allocations per batch after warm-up.
fn per_batch(builder: LoaderBuilder) -> f64 {
    let loader = build(builder.workers(WORKERS));
    let mut epochs = loader.epochs(0..u64::MAX / 2).unwrap();
    for _ in 0..WARM_UP {
        epochs.next().unwrap().unwrap();
    }
    let before = COUNT.load(Ordering::Relaxed);
    for _ in 0..MEASURED {
        epochs.next().unwrap().unwrap();
    }
    (COUNT.load(Ordering::Relaxed) - before) as f64 / MEASURED as f64
}

/// A tar shard of samples of 64 bytes and a class.
fn shard(samples: usize) -> Vec<u8> {
    let mut tar = Vec::new();
    for sample in 0..samples {
        for (ending, data) in [
            ("bin", noise(64, sample as u64)),
            ("cls", sample.to_string().into_bytes()),
        ] {
            let name = format!("{sample:08}.{ending}");
            let mut block = [0_u8; 512];
            block[..name.len()].copy_from_slice(name.as_bytes());
            block[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
            block[156] = b'0';
            block[257..265].copy_from_slice(b"ustar\x0000");
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            tar.extend_from_slice(&block);
            tar.extend_from_slice(&data);
            tar.resize(tar.len().next_multiple_of(512), 0);
        }
    }
    tar.resize(tar.len() + 1024, 0);
    tar
}

/// Allocations per row group of 60 rows, two columns: some for each page and column, fewer than
/// rows.
#[cfg(feature = "parquet")]
fn parquet_per_chunk(dir: &Dir) -> f64 {
    let bytes = std::fs::read(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/parquet/plain.parquet"
    ))
    .unwrap();
    for copy in 0..10 {
        dir.write(&format!("parquet/{copy}.parquet"), &bytes);
    }
    let dataset = feedline::dataset::Parquet::builder()
        .columns(["f0", "i64"])
        .open(dir.path("parquet"))
        .unwrap();
    per_batch(Loader::builder(dataset).batch_size(50))
}

#[test]
fn no_sample_allocates_and_a_batch_a_few_times() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let limit = (4 + WORKERS) as f64;
    // One epoch is longer than the measurement: the start of an epoch may allocate.
    let (small, _) = records_file(&dir, 256 * 600, 64);
    let (large, _) = records_file(&dir, 8 * 600, 4096);
    let (odd, _) = records_file(&dir, 8 * 600, 1000);
    let shard = dir.write("shard.tar", &shard(8 * 600));
    let memory = || {
        Records::builder(64)
            .open_bytes(noise(256 * 600 * 64, 1))
            .unwrap()
    };
    let mut cases = vec![("memory", Loader::builder(memory()).batch_size(256))];
    for (name, path, record, batch) in [
        ("64", &small, 64, 256),
        ("4096", &large, 4096, 8),
        ("1000", &odd, 1000, 8),
    ] {
        for (mode, direct) in had([
            (Mode::Auto, Direct::Auto),
            (Mode::Uring, Direct::On),
            (Mode::Uring, Direct::Off),
        ]) {
            if record == 64 && mode == Mode::Uring {
                continue;
            }
            let builder = Loader::builder(records(path, record))
                .batch_size(batch)
                .tuning(|t| t.reader(mode).direct(direct));
            cases.push((name, builder));
        }
    }
    for (mode, direct) in had([(Mode::Auto, Direct::Auto), (Mode::Uring, Direct::On)]) {
        let checked = records(&large, 4096)
            .facts(dir.path("large.crc"))
            .checksums()
            .open()
            .unwrap();
        let tar = Tar::builder()
            .raw(Field::fixed("bin", DType::U8, [64]), "bin")
            .class("cls");
        let tar = tar.open(&shard).unwrap();
        cases.push((
            "checked",
            Loader::builder(checked)
                .batch_size(8)
                .tuning(|t| t.reader(mode).direct(direct)),
        ));
        cases.push((
            "tar",
            Loader::builder(tar)
                .batch_size(8)
                .tuning(|t| t.reader(mode).direct(direct)),
        ));
    }
    #[cfg(feature = "parquet")]
    {
        let allocations = parquet_per_chunk(&dir);
        assert!(
            allocations <= 40.0,
            "{allocations} allocations per chunk of 60 rows"
        );
    }
    for (name, builder) in cases {
        let allocations = per_batch(builder.order(Order::shuffled(1)));
        assert!(
            allocations <= limit,
            "{name}: {allocations} allocations per batch, the limit is {limit}"
        );
    }
}
