//! Time and memory at sizes that one machine does not reach: plans, orders, ranks, states.
//!
//! ```text
//! cargo test  --benches                 each case once, small, to keep it working
//! cargo bench --features unstable --bench scale
//!                                       one line of JSON per case: seconds, and the peak of resident memory in bytes beyond
//!                                       those before; each case in a process of its own
//! ```
//!
//! * `plan` writes a plan of n pictures in 10^5 tasks (fewer for small n): 24 bytes and the name
//!   for each. The pictures are those of a small folder over and over, so that `run` finds them. It
//!   lists and measures no files; that takes one `stat` per file, and 64 MiB for a folder of more
//!   names.
//! * `run` runs one task of that plan, of 64 pictures, in shuffled order.
//! * `ranks` builds the loader of the last of 10^4 ranks for 10^12 samples, receives a batch, saves
//!   the state, and resumes.
//! * `lanes` does the same for 10^6 chunks of 10^6 samples in 10^4 lanes. It receives no batch,
//!   because a chunk would be 10^6 samples.
//! * `shards` does the same for 10^6 files of 2^20 samples; all are the same file.
//!
//! Physical limits: `plan` and `run` against the bytes of the plan, written or read once.

mod common;
#[path = "common/made.rs"]
mod made;

use common::as_test;
use feedline::prepare::{Format, Plan, Shards, Tasks};
use feedline::storage::Sources;
use feedline::{Loader, LoaderBuilder, Order, Rank, State, Stop};
use made::Made;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

const RANKS: u32 = 10_000;
const BATCH: usize = 8;

fn main() {
    if let Ok(case) = std::env::var("FEEDLINE_SCALE") {
        let (kind, n) = case.split_once(' ').unwrap();
        return one(kind, n.parse().unwrap());
    }
    let most = if as_test() { 4 } else { 8 };
    let (samples, parts) = if as_test() {
        (1_000_000, 100)
    } else {
        (1_000_000_000_000, 1_000_000)
    };
    let plans =
        (3..=most).flat_map(|exponent| ["plan", "run"].map(|kind| (kind, 10_u64.pow(exponent))));
    for (kind, n) in plans.chain([("ranks", samples), ("lanes", parts), ("shards", parts)]) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        // Freed memory returns to the kernel; reused memory would not count.
        command.env("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072");
        let status = command
            .env("FEEDLINE_SCALE", format!("{kind} {n}"))
            .args(std::env::args().skip(1))
            .status();
        assert!(status.unwrap().success(), "{kind} {n}");
    }
}

/// Measures one case in this process.
fn one(kind: &str, n: u64) {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("scale");
    std::fs::create_dir_all(dir.join("in")).unwrap();
    let picture = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/images/420.jpg"
    );
    for path in (0..16)
        .map(|k| dir.join(format!("in/{k:020}.jpg")))
        .filter(|path| !path.exists())
    {
        std::fs::copy(picture, path).unwrap();
    }
    let out = dir.join(format!("plan-{n}"));
    match kind {
        "plan" => {
            let _ = std::fs::remove_dir_all(&out);
            let shards = Shards::new(Format::Tar).shuffle(1);
            let tasks = (n / 64).clamp(1, 100_000);
            measure(kind, n, || {
                shards
                    .plan_repeated(dir.join("in"), &out, tasks, n)
                    .unwrap()
            });
        }
        "run" => {
            let tasks = Plan::open(&out).unwrap().tasks();
            // As many tasks as have 64 pictures or a few more.
            let pictures = n.div_ceil(tasks);
            measure(&format!("run of {pictures}"), n, || {
                let plan = Plan::open(&out).unwrap();
                let stop = Stop::new();
                let ran = plan
                    .run(
                        &Tasks::list(&(tasks - 1).to_string()).unwrap(),
                        1,
                        &stop,
                        |_| {},
                    )
                    .unwrap();
                assert_eq!(ran.done, 1);
            });
            std::fs::remove_dir_all(&out).unwrap();
        }
        "ranks" => {
            let dataset = Arc::new(Made::samples(Made::memory(1 << 20), n, 64));
            measure(kind, n, || {
                start(
                    || Loader::builder(dataset.clone()).order(Order::shuffled(1)),
                    true,
                )
            });
        }
        "lanes" => {
            let dataset = Arc::new(Made::chunks(Made::memory(1 << 20), n, 1_000_000, 1));
            let lanes = RANKS.min(n as u32);
            measure(kind, n, || {
                start(
                    || Loader::builder(dataset.clone()).order(Order::windowed(1, 4).lanes(lanes)),
                    false,
                )
            });
        }
        "shards" => {
            let mut sources = Sources::new();
            let folder = sources.dir(&dir);
            std::fs::File::create(dir.join("shard-00000000.bin"))
                .unwrap()
                .set_len(1 << 30)
                .unwrap();
            for _ in 0..n {
                sources
                    .file_in(folder, "shard-00000000.bin", 1 << 30)
                    .unwrap();
            }
            let dataset = Arc::new(Made::samples(sources, n * (1 << 20), 1024));
            measure(kind, n, || {
                start(
                    || Loader::builder(dataset.clone()).order(Order::shuffled(1)),
                    false,
                )
            });
        }
        other => panic!("no case {other}"),
    }
}

/// Builds the loader of the last rank, starts an epoch, saves its state, and resumes from it.
fn start(builder: impl Fn() -> LoaderBuilder, receives: bool) -> usize {
    let rank = || {
        builder()
            .rank(Rank::new(RANKS - 1, RANKS).unwrap())
            .batch_size(BATCH)
            .workers(1)
    };
    let loader = rank().build().unwrap();
    if receives {
        loader.epoch(0).unwrap().next().unwrap().unwrap();
    }
    let state = loader.state().unwrap().to_bytes();
    let resumed = rank()
        .resume(State::from_bytes(&state).unwrap())
        .build()
        .unwrap();
    assert_eq!(resumed.state().unwrap().to_bytes(), state);
    state.len()
}

/// Prints seconds and bytes of `work`.
fn measure<T>(kind: &str, n: u64, work: impl FnOnce() -> T) {
    // Resets the peak.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = resident("VmRSS:");
    let started = Instant::now();
    let made = std::hint::black_box(work());
    let seconds = started.elapsed().as_secs_f64();
    let bytes = resident("VmHWM:").saturating_sub(before);
    println!(r#"{{"what": "{kind}", "n": {n}, "seconds": {seconds:.6}, "peak_bytes": {bytes}}}"#);
    drop(made);
}

fn resident(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}
