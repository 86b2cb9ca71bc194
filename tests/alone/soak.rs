//! Long runs with a fault every second: every row is right or named, and the system resources of
//! the process do not grow.
//!
//! ```text
//! every second: a fault ──► reads of files or objects ──► loader (substitutes) ──► rows against the oracle
//! every few seconds: the loader is dropped, the process is looked at, another one is built: next reader, next dataset
//! ```
//!
//! `cargo test` runs it for some seconds; `FEEDLINE_SWEEP=full cargo test --release --test alone
//! soak:: -- --nocapture` for an hour, and prints a line a minute.

use crate::common::sweep;
use crate::common::*;
use feedline::dataset::DatasetExt;
#[cfg(feature = "remote")]
use feedline::dataset::Records;
use feedline::unstable::{Fault, Faulty};
use feedline::{Loader, OnBadSample, Order, Status};
use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "remote")]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const RECORD: usize = 3000;
const COUNT: usize = 2000;

/// System resources of the process without a loader.
#[derive(Clone, Copy, Debug, Default)]
struct House {
    anonymous_kib: u64,
    descriptors: u64,
    threads: u64,
    maps: u64,
}

impl House {
    fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let number = |key: &str| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix(key))
                .unwrap_or_default();
            line.split_whitespace()
                .next()
                .and_then(|word| word.parse().ok())
                .unwrap_or(0)
        };
        let maps = std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .count() as u64;
        let anonymous_kib = number("RssAnon:");
        let threads = number("Threads:");
        Self {
            anonymous_kib,
            descriptors: descriptors().len() as u64,
            threads,
            maps,
        }
    }

    fn most(self, other: Self) -> Self {
        Self {
            anonymous_kib: self.anonymous_kib.max(other.anonymous_kib),
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
            maps: self.maps.max(other.maps),
        }
    }
}

/// A fault each second, of every kind in turn: some are transient, some are errors, some hit many
/// reads in a row.
fn break_things(faulty: &Faulty, stop: &AtomicBool, every: Duration) {
    let codes = [5, 11, 4, 116, 2, 12, 13, 110, 6];
    let mut turn = 0_usize;
    while !stop.load(Ordering::Relaxed) {
        let fault = match turn % 8 {
            0 | 4 => Fault::Error(codes[turn / 4 % codes.len()]),
            1 => Fault::Flipped,
            2 => Fault::Short(700),
            3 => Fault::Zero,
            5 => Fault::Late(Duration::from_millis(80)),
            6 => Fault::Elsewhere,
            _ => Fault::Error(5),
        };
        faulty.inject([1, 3, 1, 12][turn % 4], fault);
        turn += 1;
        std::thread::sleep(every);
    }
}

#[derive(Default)]
struct Done {
    rows: u64,
    substituted: u64,
    recovered: u64,
    errors: u64,
}

/// Epochs for about `time`, every row compared.
fn run(loader: &Loader, bytes: &[u8], time: Duration, done: &mut Done) {
    let started = Instant::now();
    let mut epoch = 0;
    while started.elapsed() < time {
        for batch in loader.epoch(epoch).unwrap() {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    // Not the sample's fault, as when memory or descriptors are short: it is
                    // printed, and the run continues.
                    assert!(
                        error.site().path.is_some() && error.site().sample.is_some(),
                        "{error}"
                    );
                    done.errors += 1;
                    break;
                }
            };
            for ((id, row), status) in rows(&batch).into_iter().zip(batch.status()) {
                assert!(
                    row == bytes[id as usize * RECORD..][..RECORD],
                    "row of {id}, status {status}"
                );
                done.rows += 1;
                done.substituted += u64::from(*status == Status::Substitute as u8);
            }
            if started.elapsed() >= time {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        epoch += 1;
    }
    done.recovered += loader.report().total.storage.recovered;
    assert_eq!(loader.report().leaked, 0);
}

fn life(
    path: &Path,
    index: &Path,
    bytes: &[u8],
    turn: usize,
    faulty: &Arc<Faulty>,
    time: Duration,
    done: &mut Done,
) {
    let (mode, direct) = reader(turn);
    let dataset = records(path, RECORD)
        .facts(index)
        .checksums()
        .open()
        .unwrap();
    let builder = Loader::builder(dataset)
        .order(Order::shuffled(turn as u64))
        .batch_size(32)
        .workers(2);
    let policy = OnBadSample::Substitute { budget: u64::MAX };
    let loader = build(
        builder
            .tuning(|t| t.reader(mode).direct(direct).faulty(faulty.clone()))
            .on_bad_sample(policy),
    );
    run(&loader, bytes, time, done);
}

/// Lives one after another; system resources in the first half, after `warm` lives, and in the
/// second half.
fn lives(
    seconds: u64,
    warm: usize,
    mut life: impl FnMut(usize, Duration, &mut Done),
) -> (Done, House, House) {
    let time = Duration::from_secs(seconds);
    let one = (time / 20).clamp(Duration::from_millis(300), Duration::from_secs(10));
    let mut done = Done::default();
    let mut early = House::default();
    let mut late = House::default();
    let started = Instant::now();
    let mut turn = 0;
    let mut minute = 0;
    while started.elapsed() < time {
        life(turn, one, &mut done);
        let house = House::now();
        if turn >= warm && started.elapsed() < time / 2 {
            early = early.most(house);
        } else if started.elapsed() >= time / 2 {
            late = late.most(house);
        }
        turn += 1;
        if started.elapsed().as_secs() / 60 > minute {
            minute = started.elapsed().as_secs() / 60;
            println!("minute {minute}: {house:?}");
        }
    }
    (done, early, late)
}

/// A short run breaks things faster, so that it sees some.
fn pause(seconds: u64) -> Duration {
    if seconds >= 60 {
        Duration::from_secs(1)
    } else {
        Duration::from_millis(20)
    }
}

#[test]
fn a_long_run_with_faults_is_right_and_does_not_grow() {
    if !alone(&here!()) {
        return;
    }
    let seconds = sweep::size(3, 6, 3600);
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, COUNT, RECORD);
    let index = dir.path("records.crc");
    let faulty = Arc::new(Faulty::new());
    let stop = AtomicBool::new(false);
    let (done, early, late) = std::thread::scope(|scope| {
        scope.spawn(|| break_things(&faulty, &stop, pause(seconds)));
        // Every reader has run once before anything is compared.
        let seen = lives(seconds, READERS.len(), |turn, one, done| {
            life(&path, &index, &bytes, turn, &faulty, one, done)
        });
        stop.store(true, Ordering::Relaxed);
        seen
    });
    println!(
        "{seconds} s: {} faults, {} rows right, {} substituted, {} reads recovered, {} errors; {early:?}, then {late:?}",
        faulty.injected(),
        done.rows,
        done.substituted,
        done.recovered,
        done.errors
    );
    assert!(faulty.injected() > 0 && done.rows > 0);
    if early.threads > 0 {
        assert!(
            late.descriptors <= early.descriptors && late.threads <= early.threads,
            "{early:?} {late:?}"
        );
        // The allocator's arenas, and cached stacks.
        assert!(
            late.anonymous_kib <= early.anonymous_kib + 16_384 && late.maps <= early.maps + 40,
            "{early:?} {late:?}"
        );
    }
}

/// Without a cache, with one, and with one that has room for a tenth of the object.
#[cfg(feature = "remote")]
#[test]
fn a_long_run_from_a_failing_object_store_is_right_and_does_not_grow() {
    use crate::common::server::{Fault, Server};
    use feedline::storage::Cache;
    if !alone(&here!()) {
        return;
    }
    let seconds = sweep::size(3, 6, 3600);
    let server = Server::new();
    let dir = Dir::new();
    let bytes = noise(COUNT * RECORD, 5);
    server.put("bucket/a.bin", bytes.clone());
    let mut faults = vec![
        Fault::Close,
        Fault::Cut(500),
        Fault::Status(503, Some(0), "SlowDown"),
        Fault::Reset(100),
        Fault::Status(404, None, "NoSuchKey"),
        Fault::OtherRange,
        Fault::Short(700),
        Fault::Status(500, None, "InternalError"),
        Fault::Long,
    ];
    faults.extend((seconds >= 60).then_some(Fault::Stall(60)));
    let every = pause(seconds);
    let injected = Arc::new(AtomicU64::new(0));
    let counter = injected.clone();
    let mut last = Instant::now();
    let mut good = 0;
    server.script(move |request| {
        good += u32::from(request.range.is_some());
        // A read that fails six times in a row is a store out of reach, which is another test.
        let due = request.range.is_some() && good > 8 && last.elapsed() >= every;
        due.then(|| {
            last = Instant::now();
            good = 0;
            faults[counter.fetch_add(1, Ordering::Relaxed) as usize % faults.len()].clone()
        })
    });
    let (done, early, late) = lives(seconds, 3, |turn, one, done| {
        let dataset = Records::builder(RECORD).open(server.s3("a.bin")).unwrap();
        let builder = Loader::builder(dataset)
            .order(Order::shuffled(turn as u64))
            .batch_size(32)
            .workers(2);
        let builder = builder.tuning(|t| t.stall_deadline(Duration::from_secs(8)).depth(16));
        let builder = builder.on_bad_sample(OnBadSample::Substitute { budget: u64::MAX });
        let cache = |capacity| {
            Cache::at(dir.path("cache"))
                .block_bytes(64 << 10)
                .capacity(capacity)
        };
        let loader = build(match turn % 3 {
            0 => builder,
            1 => builder.cache(cache(u64::MAX)),
            _ => builder.cache(cache((COUNT * RECORD / 10) as u64)),
        });
        run(&loader, &bytes, one, done);
        drop(loader);
        if turn % 3 == 2 {
            std::fs::remove_dir_all(dir.path("cache")).unwrap();
        }
        server.take_log();
    });
    let injected = injected.load(Ordering::Relaxed);
    println!(
        "{seconds} s: {injected} faults of a store, {} rows right, {} substituted, {} errors; {early:?}, then {late:?}",
        done.rows, done.substituted, done.errors
    );
    assert!(injected > 0 && done.rows > 0);
    // 24 requests at once leave as many idle connections, each with three descriptors and a thread
    // of the server, which is in this process.
    let most = early.most(late);
    assert!(
        most.descriptors < 160 && most.threads < 80,
        "{early:?} {late:?}"
    );
    if early.threads > 0 {
        assert!(
            late.anonymous_kib <= early.anonymous_kib + 16_384,
            "{early:?} {late:?}"
        );
    }
}
