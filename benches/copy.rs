//! The copy stage against the driver: GB/s of a loader that fills its slots at no cost, beside bare
//! copies from the same kind of memory (the physical limit) and from pageable memory.
//!
//! ```text
//! cargo bench --bench copy                                         on the first GPU; without a GPU it prints a note
//! FEEDLINE_PAIRS=15 FEEDLINE_PAIR_SECONDS=5 cargo bench --bench copy   the ratio with its interval
//! FEEDLINE_BENCH_STANDIN=1 cargo bench --bench copy                    batches dropped at once / waited for, without a GPU
//! cargo test  --benches                                            each case once, against the stand-in driver: no figures
//! ```
//!
//! The last comparison measures waiting, not a GPU. The stand-in driver's copies take 5 ms; each of
//! 8 workers takes 40 ms per batch. A consumer that drops batches at once must be as fast as one
//! that synchronises before each drop.

mod common;
#[path = "../tests/common/driver.rs"]
mod driver;
#[path = "../tests/common/pull.rs"]
mod pull;
#[path = "../tests/common/standin.rs"]
mod standin;
#[path = "../tests/common/wait.rs"]
mod wait;

use common::{as_test, compare, pairs_wanted, spread};
use driver::{Gpu, Kind, Lane, Result, h2d_for};
use feedline::dataset::Records;
use feedline::device::cuda::cudarc::driver::{CudaContext, CudaStream};
use feedline::memory::MemoryTerm;
use feedline::{Device, Loader};
use pull::{BATCH, Puller, RECORD, counted};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Records per batch: 4.2, 38.5 and 134 MB.
const ROWS: [usize; 3] = [28, BATCH, 892];
/// Target: minimum share of the bare copies' rate, for batches of 38.5 MB.
const SHARE: f64 = 0.97;
/// Target: maximum CPU time of the transfer thread for such a batch, in microseconds.
const COPY_US: f64 = 20.0;

/// Slots and device batches of the comparison with the stand-in.
const DEPTHS: [(usize, usize); 6] = [(4, 2), (4, 3), (8, 2), (8, 3), (16, 2), (16, 3)];
/// Target: minimum rate of a consumer that drops at once, relative to one that waits.
const AT_ONCE: f64 = 0.97;
const WORKERS: usize = 8;
/// Time for a batch of one row of [`ROW`] bytes: a worker's, and a copy's.
const WORK: Duration = Duration::from_millis(40);
const COPY: Duration = Duration::from_millis(5);
const ROW: usize = 4096;

fn main() {
    if as_test() {
        let session = standin::cuda().session(standin::Config::default());
        let mut case = Case::new(2, 4096).unwrap();
        case.loader.pull(0.0).unwrap();
        bare(&case.pinned, case.size, 0.0);
        bare(&case.pageable, case.size, 0.0);
        drop((case, session));
        DEPTHS
            .iter()
            .for_each(|depth| compare_drops(*depth, 1, 0.0));
        return println!("the copy stage and bare copies run; stand-in: no figures");
    }
    let (pairs, seconds) = pairs_wanted();
    let (pairs, seconds) = if pairs == 0 {
        (7, 0.7)
    } else {
        (pairs, seconds)
    };
    if std::env::var_os("FEEDLINE_BENCH_STANDIN").is_some() {
        return DEPTHS
            .iter()
            .for_each(|depth| compare_drops(*depth, pairs, seconds.max(2.0)));
    }
    if let Err(absent) = feedline::unstable::devices() {
        return println!("no CUDA device: {absent}");
    }
    println!("{}", Device::auto());
    for rows in ROWS {
        Case::new(rows, RECORD).unwrap().measure(pairs, seconds);
    }
}

/// A batch size, and the loader and buffers that copy it.
struct Case {
    size: usize,
    loader: Puller,
    pinned: [Lane; 1],
    pageable: [Lane; 1],
    /// Last, so that it is dropped after the others.
    _gpu: Gpu,
}

impl Case {
    fn new(rows: usize, record: usize) -> Result<Self> {
        let gpu = Gpu::new()?;
        let size = rows * record;
        let device = Device::cuda(0).map_err(|error| error.to_string())?;
        let loader = Puller::new(counted(rows, record)?.device(device), Some(gpu.stream()?))?;
        let slots = loader.loader.plan().term(MemoryTerm::SLOTS).count;
        let lane = |kind| Lane::from_several(&gpu, kind, size, slots).map(|lane| [lane]);
        let pinned = lane(Kind::Registered)?;
        let pageable = lane(Kind::Pageable)?;
        Ok(Self {
            size,
            loader,
            pinned,
            pageable,
            _gpu: gpu,
        })
    }

    fn measure(mut self, pairs: usize, seconds: f64) {
        let what = format!("{:.1} MB batches", self.size as f64 / 1e6);
        let size = self.size;
        let mut times = Vec::new();
        let limit = || bare(&self.pinned, size, seconds);
        compare(
            &format!("{what}: copy stage / bare copies (≥ {SHARE})"),
            "GB/s",
            pairs,
            || {
                let pulled = self.loader.pull(seconds).unwrap();
                times.extend(pulled.copy_us);
                pulled.gb_per_s
            },
            limit,
        );
        let pageable = || bare(&self.pageable, size, seconds);
        compare(
            &format!("{what}: bare copies, pageable / pinned"),
            "GB/s",
            pairs,
            pageable,
            limit,
        );
        let (middle, low, high) = spread(times);
        println!(
            "{what}: the copy thread takes {middle:.1} [{low:.1}, {high:.1}] µs a batch (≤ {COPY_US})"
        );
    }
}

fn bare(lane: &[Lane], size: usize, seconds: f64) -> f64 {
    h2d_for(lane, size, seconds).unwrap()
}

/// Compares batches dropped at once with batches dropped after a wait.
fn compare_drops((slots, buffers): (usize, usize), pairs: usize, seconds: f64) {
    let bandwidth = (ROW as f64 / COPY.as_secs_f64()) as u64;
    let session = standin::cuda().session(standin::Config {
        bandwidth,
        ..standin::Config::default()
    });
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let records = Records::builder(ROW)
        .open_bytes(vec![7; ROW << 12])
        .unwrap();
    let loader = Loader::builder(records)
        .map(|_, _| {
            std::thread::sleep(WORK);
            Ok(())
        })
        .batch_size(1)
        .workers(WORKERS)
        .tuning(|t| t.slots(slots));
    let loader = loader
        .tuning(|t| t.device_batches(buffers))
        .device(Device::cuda(0).unwrap())
        .stream(&stream)
        .build()
        .unwrap();
    loader.ready().unwrap();
    let what =
        format!("{slots} slots, {buffers} buffers: dropped at once / waited for (≥ {AT_ONCE})");
    let [at_once, waited] = [false, true].map(|wait| {
        let loader = &loader;
        let stream = &stream;
        move || rate(loader, wait.then_some(stream), 4 * slots, seconds)
    });
    compare(&what, "batches/s", pairs, at_once, waited);
    drop((loader, stream, session));
}

/// Batches per second, after a warm-up.
fn rate(loader: &Loader, wait_for: Option<&Arc<CudaStream>>, warm: usize, seconds: f64) -> f64 {
    let mut batches = loader.epoch(0).unwrap();
    let mut next = || {
        let batch = batches.next().unwrap().unwrap();
        wait_for
            .iter()
            .for_each(|stream| stream.synchronize().unwrap());
        drop(batch);
    };
    (0..if seconds > 0.0 { warm } else { 1 }).for_each(|_| next());
    let begun = Instant::now();
    let mut count = 0;
    while count == 0 || begun.elapsed().as_secs_f64() < seconds {
        next();
        count += 1;
    }
    f64::from(count) / begun.elapsed().as_secs_f64()
}
