//! Raw records cost no heap allocation per sample, and at most 4 + workers per batch, rayon's own included. A counting
//! allocator sees the whole process, so this binary holds one test.

mod common;

use common::*;
use feedline::dataset::Records;
use feedline::read::{Direct, Mode};
use feedline::{Loader, LoaderBuilder, Order};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

static COUNT: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
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

#[test]
fn raw_records_allocate_a_few_times_per_batch_and_never_per_sample() {
    let dir = Dir::new();
    let limit = (4 + WORKERS) as f64;
    // One epoch is longer than the measurement: the start of an epoch may allocate.
    let (small, _) = records_file(&dir, 256 * 600, 64);
    let (large, _) = records_file(&dir, 8 * 600, 4096);
    let (odd, _) = records_file(&dir, 8 * 600, 1000);
    let memory = || Records::builder(64).open_bytes(noise(256 * 600 * 64, 1)).unwrap();
    let mut cases = vec![("memory", Loader::builder(memory()).batch_size(256))];
    for (name, path, record, batch) in [("64", &small, 64, 256), ("4096", &large, 4096, 8), ("1000", &odd, 1000, 8)] {
        for (mode, direct) in [(Mode::Auto, Direct::Auto), (Mode::Uring, Direct::On), (Mode::Uring, Direct::Off)] {
            if record == 64 && mode == Mode::Uring {
                continue;
            }
            let builder = Loader::builder(records(path, record)).batch_size(batch).reader(mode).direct(direct);
            cases.push((name, builder));
        }
    }
    for (name, builder) in cases {
        let allocations = per_batch(builder.order(Order::shuffled(1)));
        assert!(allocations <= limit, "{name}: {allocations} allocations per batch, the limit is {limit}");
    }
}
