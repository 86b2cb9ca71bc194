//! Random faults of random requests, with and without a cache. Each sample is delivered once with
//! the right bytes, or one typed error ends the epoch; after the faults, the same loader delivers
//! all.
//!
//! 100 faults by default, 400 with `FEEDLINE_SWEEP=ci`, 100,000 with `full`. Each costs 5 to 10 ms
//! of a CPU in a debug build.

use super::remote::{is_read, status};
use crate::common::got::Got;
use crate::common::server::{Fault, Server};
use crate::common::{Dir, noise, sweep};
use feedline::dataset::Records;
use feedline::storage::Cache;
use feedline::{Error, ErrorKind, Loader, OnBadSample, Order, Result, Status};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Runs at a time; each has a server.
const THREADS: u64 = 4;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize].clone()
    }

    /// A fault that another try may pass.
    fn passing(&mut self, len: u64) -> Fault {
        let at = self.below(len + 1) as usize;
        match self.below(64) {
            0..10 => Fault::Reset(at),
            10..20 => Fault::Cut(at),
            20..30 => Fault::Short(at),
            30..36 => Fault::Close,
            36..42 => Fault::Long,
            42..48 => Fault::OtherRange,
            // Silence costs the most time.
            48 => Fault::Stall(at),
            // Throttling leaves fewer requests in flight.
            49 => {
                let status = self.pick(&[429, 503]);
                Fault::Status(status, self.pick(&[None, Some(0)]), "SlowDown")
            }
            50 => status(403, "ExpiredToken"),
            _ => status(self.pick(&[408, 500, 502, 504]), "InternalError"),
        }
    }

    /// A fault that no other try passes.
    fn lasting(&mut self) -> Fault {
        self.pick(&[
            status(404, "NoSuchKey"),
            status(412, "PreconditionFailed"),
            status(416, "InvalidRange"),
            status(405, "MethodNotAllowed"),
            Fault::Redirect("/bucket/elsewhere".into()),
            Fault::Whole,
            Fault::OtherVersion,
            Fault::NoVersion,
        ])
    }
}

/// Ends of epochs, by kind.
type Ends = BTreeMap<&'static str, u64>;

/// One loader with many small objects, so that most reads are requests of their own; counts the
/// faults and the ends of its epoch.
fn life(server: &Server, seed: u64, faults: &Arc<AtomicU64>, ends: &mut Ends) {
    let mut random = Random(seed);
    let record = 1 + random.below(500) as usize;
    let shards = 1 + random.below(150);
    let counts: Vec<_> = (0..shards).map(|_| 1 + random.below(6) as usize).collect();
    let count: usize = counts.iter().sum();
    let bytes = noise(record * count, seed);
    server.script(|_| None);
    let mut rest = &bytes[..];
    let mut names = Vec::new();
    for (shard, count) in counts.iter().enumerate() {
        let (own, others) = rest.split_at(record * count);
        names.push(format!("{seed}/{shard:03}.bin"));
        server.put(&format!("bucket/{seed}/{shard:03}.bin"), own.to_vec());
        rest = others;
    }
    // A name of its own has a limit of its own.
    let bucket = server.keyed_s3(&format!("-{seed}"), &[]);
    let urls = names.iter().map(|name| format!("{bucket}/{name}"));
    let urls: Vec<_> = urls.collect();
    let order = match random.below(4) {
        0 => Order::sequential(),
        _ => Order::shuffled(seed),
    };
    let builder = Loader::builder(Records::builder(record).open_files(&urls).unwrap()).order(order);
    let builder = builder.batch_size(1 + random.below(32) as usize);
    let depth = 16 + random.below(200) as u32;
    let policy = match random.below(3) {
        0 => OnBadSample::Substitute { budget: 1000 },
        _ => OnBadSample::Fail,
    };
    let deadline = Duration::from_secs(8);
    let builder = builder.tuning(|t| t.depth(depth).stall_deadline(deadline));
    let mut builder = builder.on_bad_sample(policy);
    let dir = Dir::new();
    let cached = seed.is_multiple_of(2);
    if cached {
        let cache = Cache::at(dir.path("cache")).block_bytes(random.pick(&[4096, 16384, 65536]));
        builder = builder.cache(cache.capacity(random.pick(&[0, 65536, 1 << 30])));
    }
    let loader = builder.build().unwrap();

    let rate = random.pick(&[10, 25, 35]);
    let lasting = random.below(4) == 0;
    let counted = faults.clone();
    server.script(move |request| {
        let (first, end) = request.range.filter(|_| is_read(request))?;
        let fault = match random.below(200) {
            0 if lasting => random.lasting(),
            part if part / 2 < rate => random.passing(end - first),
            _ => return None,
        };
        counted.fetch_add(1, Ordering::Relaxed);
        Some(fault)
    });
    let what = format!("seed {seed}: {count} records of {record} in {shards}");
    let end = match checked(&loader, 0, record, &bytes, &what) {
        Ok(0) => "whole",
        Ok(_) => "substituted",
        Err(error) => typed(&error, &what),
    };
    *ends.entry(end).or_default() += 1;
    let place = match cached {
        true => "with a cache",
        false => "without a cache",
    };
    *ends.entry(place).or_default() += 1;
    server.script(|_| None);
    // A cache must not have kept a wrong byte, and an error must not have harmed the loader.
    if !cached && end == "whole" {
        return;
    }
    let after = checked(&loader, 1, record, &bytes, &what)
        .unwrap_or_else(|error| panic!("{what}, afterwards: {error}"));
    // A substitute stays one: the loader knows the bad samples.
    let known = after == 0 || end == "substituted";
    assert!(known, "{what}: {after} substitutes afterwards");
}

/// Compares each delivered sample; gives the number of substitutes.
fn checked(loader: &Loader, epoch: u64, record: usize, bytes: &[u8], what: &str) -> Result<usize> {
    let mut seen = vec![0; bytes.len() / record];
    let mut rows = 0;
    let mut substitutes = 0;
    for batch in loader.epoch(epoch)? {
        let got = Got::of(&batch?)?;
        let records = got.fields[0].bytes.chunks(record);
        for (row, found) in records.enumerate().take(got.valid) {
            let id = got.ids[row] as usize;
            let right = &bytes[id * record..][..record];
            assert!(found == right, "{what}: bytes of sample {id}");
            let own = got.status[row] == Status::Real as u8;
            seen[id] += usize::from(own);
            rows += 1;
            substitutes += usize::from(!own);
        }
        let once = seen.iter().all(|times| *times <= 1);
        assert!(once, "{what}: a sample came twice");
    }
    assert_eq!(rows, seen.len(), "{what}");
    let missing = seen.iter().filter(|times| **times == 0).count();
    assert_eq!(missing, substitutes, "{what}");
    Ok(substitutes)
}

/// The kind of an error that names what failed.
fn typed(error: &Error, what: &str) -> &'static str {
    use ErrorKind::{Changed, Config, Io, NotFound, Permission, Stalled};
    let said = error.to_string();
    let kinds = [Io, Permission, NotFound, Changed, Config, Stalled];
    assert!(kinds.contains(&error.kind()), "{what}: {said}");
    assert!(said.contains("s3://bucket-"), "{what}: {said}");
    assert!(!said.contains("do-not-show-me"), "{what}: {said}");
    let site = error.site();
    assert!(
        site.offset.is_some() && site.sample.is_some(),
        "{what}: {said}"
    );
    error.kind().as_str()
}

#[test]
fn random_faults_leave_every_sample_right_or_one_typed_error() {
    let wanted = sweep::size(100, 400, 100_000);
    let started = Instant::now();
    let faults = Arc::new(AtomicU64::new(0));
    let lives = AtomicU64::new(0);
    let mut all = Ends::new();
    std::thread::scope(|scope| {
        let threads = (0..THREADS).map(|_| {
            scope.spawn(|| {
                let server = Server::new();
                let mut ends = Ends::new();
                while faults.load(Ordering::Relaxed) < wanted {
                    let seed = lives.fetch_add(1, Ordering::Relaxed);
                    life(&server, seed, &faults, &mut ends);
                    server.clear();
                    if seed % 100 == 99 {
                        let faults = faults.load(Ordering::Relaxed);
                        println!("{faults} faults, {seed} lives, {:?}", started.elapsed());
                    }
                }
                ends
            })
        });
        for thread in threads.collect::<Vec<_>>() {
            for (end, times) in thread.join().unwrap() {
                *all.entry(end).or_default() += times;
            }
        }
    });
    let lives = lives.into_inner();
    let faults = faults.load(Ordering::Relaxed);
    println!(
        "{faults} faults, {lives} lives, {:?}: {all:?}",
        started.elapsed()
    );
    assert!(all["with a cache"] > 0, "{all:?}");
    assert!(all["without a cache"] > 0, "{all:?}");
    assert!(!sweep::is_full() || all.len() > 6, "{all:?}");
}
