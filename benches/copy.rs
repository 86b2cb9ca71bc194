//! The copy stage against the driver: what a loader brings onto a GPU when its slots are filled for nothing, beside bare
//! copies from the same kind of memory (the physical limit) and from memory that is not pinned.
//!
//! ```text
//! cargo bench --bench copy                                         on the first GPU; without one it says so
//! FEEDLINE_PAIRS=15 FEEDLINE_PAIR_SECONDS=5 cargo bench --bench copy   the ratio with its interval
//! cargo test  --benches                                            each case once, against the stand-in driver: no figures
//! ```

mod common;
#[path = "../tests/common/driver.rs"]
mod driver;
#[path = "../tests/common/pull.rs"]
mod pull;
#[path = "../tests/common/standin.rs"]
mod standin;

use common::{as_test, compare, pairs_wanted, spread};
use driver::{Gpu, Kind, Lane, Result, h2d_for};
use feedline::Device;
use pull::{BATCH, Puller, RECORD, counted};

/// Records of a batch: 4.2, 38.5 and 134 MB.
const ROWS: [usize; 3] = [28, BATCH, 892];
/// Least share of the bare copies' rate, for batches of 38.5 MB.
const SHARE: f64 = 0.97;
/// Most CPU time of the transfer thread for such a batch, in microseconds.
const COPY_US: f64 = 20.0;

fn main() {
    if as_test() {
        let session = standin::cuda().session(standin::Config::default());
        let mut case = Case::new(2, 4096).unwrap();
        case.loader.pull(0.0).unwrap();
        bare(&case.pinned, case.size, 0.0);
        bare(&case.pageable, case.size, 0.0);
        drop((case, session));
        return println!("the copy stage and bare copies run; stand-in: no figures");
    }
    let (pairs, seconds) = pairs_wanted();
    let (pairs, seconds) = if pairs == 0 { (7, 0.7) } else { (pairs, seconds) };
    if let Err(absent) = feedline::device::cuda::devices() {
        return println!("no CUDA device: {absent}");
    }
    println!("{}", Device::auto());
    for rows in ROWS {
        Case::new(rows, RECORD).unwrap().measure(pairs, seconds);
    }
}

/// A size of batches, and what copies them.
struct Case {
    size: usize,
    loader: Puller,
    pinned: [Lane; 1],
    pageable: [Lane; 1],
    /// Last: the others are gone when it goes.
    _gpu: Gpu,
}

impl Case {
    fn new(rows: usize, record: usize) -> Result<Self> {
        let (gpu, size) = (Gpu::new()?, rows * record);
        let device = Device::cuda(0).map_err(|error| error.to_string())?;
        let loader = Puller::new(counted(rows, record)?.device(device), Some(gpu.stream()?))?;
        let slots = loader.loader.plan().slots;
        let lane = |kind| Lane::from_several(&gpu, kind, size, slots).map(|lane| [lane]);
        let (pinned, pageable) = (lane(Kind::Registered)?, lane(Kind::Pageable)?);
        Ok(Self { size, loader, pinned, pageable, _gpu: gpu })
    }

    fn measure(mut self, pairs: usize, seconds: f64) {
        let (what, size) = (format!("{:.1} MB batches", self.size as f64 / 1e6), self.size);
        let mut times = Vec::new();
        let ours = || {
            let pulled = self.loader.pull(seconds).unwrap();
            times.extend(pulled.copy_us);
            pulled.gb_per_s
        };
        let limit = || bare(&self.pinned, size, seconds);
        compare(&format!("{what}: copy stage / bare copies (≥ {SHARE})"), "GB/s", pairs, ours, limit);
        let pageable = || bare(&self.pageable, size, seconds);
        compare(&format!("{what}: bare copies, pageable / pinned"), "GB/s", pairs, pageable, limit);
        let (middle, low, high) = spread(times);
        println!("{what}: the copy thread takes {middle:.1} [{low:.1}, {high:.1}] µs a batch (≤ {COPY_US})");
    }
}

fn bare(lane: &[Lane], size: usize, seconds: f64) -> f64 {
    h2d_for(lane, size, seconds).unwrap()
}
