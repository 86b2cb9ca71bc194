//! Iterators, loaders and batches that are dropped at random points, while the kernel and a device
//! still write.
//!
//! ```text
//! a life: build ─► (epoch ─► some batches ─► dropped)*  ─► all slots at once? ─► epoch, loader, batches: dropped in any order
//!                  └──────── a point ──────────────┘                            └────────────── a point ─────────────────┘
//! ```
//!
//! Random draws alone make a life: workload, reader, device, settings, the place of the cut, and
//! the order and thread of each drop. Only the timing is up to the machine. After each cut the next
//! iterator must have the right batches; after each life nothing is left: threads, descriptors,
//! memory (of a shared budget), memory that the kernel may still write to. Held batches keep their
//! bytes, also while later loaders run.
//!
//! Some hundred points by default, 3,000 with `FEEDLINE_SWEEP=ci`, more than 100,000 with `full`;
//! `FEEDLINE_ONLY=n` runs only life *n*. One test function: threads and descriptors belong to the
//! whole process.

use crate::common::runs::*;
use crate::common::standin;
use crate::common::sweep;
use crate::common::*;
use feedline::memory::Budget;
use feedline::order::Draws;
use feedline::{Batch, Epoch, LastBatch, Loader, LoaderBuilder};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

const SEED: u64 = 7;
/// The default number ends early on a busy machine.
const TIME: Duration = Duration::from_secs(50);
/// Only a failing test waits this long.
const DEADLINE: Duration = Duration::from_secs(60);
/// Bytes of all slots of a life; more than any plan here.
const BUDGET: usize = 256 << 20;
/// Lives after which nothing may be left. The stand-in GPU keeps freed addresses, to detect their
/// use.
const EACH: u64 = 50;
/// Bytes of the allocator and the threads, which stop growing.
const MORE_MAPPINGS: usize = 300;
/// Number of epochs begun.
const EPOCHS: u64 = 3;

/// A dataset with its order and transforms, in batches of `rows`, and the expected epochs.
struct Workload {
    name: &'static str,
    run: Run,
    rows: usize,
    right: Vec<Arc<Vec<Part>>>,
}

impl Workload {
    fn new(name: &'static str, run: Run, rows: usize) -> Self {
        let cut = Cut::whole(rows as u64, LastBatch::Mask, 1);
        let right = (0..EPOCHS + 1)
            .map(|epoch| Arc::new(run.parts(&cut, epoch, 0)))
            .collect();
        Self {
            name,
            run,
            rows,
            right,
        }
    }

    /// Read in place, read through the ring, in chunks, from memory; with and without transforms.
    fn all(dir: &Dir) -> Vec<Self> {
        let shuffled = || Naive::Shuffled { seed: 3 };
        let windowed = || Naive::windowed(3, 3, 2);
        let rows = uneven(&mut Draws::new(SEED, 0, 0, "rows"), 20_000, 1_500);
        let pages = Data::file(dir, 180, 4096);
        let mixed = Run {
            map_batch: true,
            ..Run::new(&pages, shuffled()).mapped()
        };
        vec![
            Self::new("pages", Run::new(&pages, shuffled()), 12),
            Self::new("pages with transforms", mixed, 12),
            Self::new(
                "large",
                Run::new(&Data::file(dir, 48, 96 << 10), shuffled()),
                4,
            ),
            Self::new(
                "unaligned",
                Run::new(&Data::file(dir, 300, 3001), shuffled()),
                20,
            ),
            Self::new(
                "small",
                Run::new(&Data::file(dir, 900, 512), shuffled()),
                64,
            ),
            Self::new(
                "chunks",
                Run::new(&Data::chunks(dir, &rows, true, false), windowed()),
                1_000,
            ),
            Self::new("memory", Run::new(&Data::memory(400, 640), shuffled()), 32),
        ]
    }
}

/// A held batch and its expected content.
struct Held {
    batch: Batch,
    right: Arc<Vec<Part>>,
    at: usize,
}

impl Held {
    fn check(&self, what: &str) {
        let right = &self.right[self.at];
        let mut rows: Vec<_> = right.rows.iter().map(|_| Vec::new()).collect();
        for field in self.batch.fields() {
            let mut bytes = vec![0; field.size_bytes()];
            field.read_into(&mut bytes).unwrap();
            let each = bytes.len() / rows.len();
            for (number, row) in rows.iter_mut().enumerate() {
                row.extend_from_slice(&bytes[number * each..][..each]);
                row.extend(
                    field
                        .lens()
                        .into_iter()
                        .flat_map(|lens| lens[number].to_ne_bytes()),
                );
            }
        }
        assert_eq!(
            (self.batch.epoch(), self.batch.index()),
            (right.epoch, right.index),
            "{what}"
        );
        assert_eq!(rows.len(), self.batch.len(), "{what}");
        for (number, (row, right)) in rows.iter().zip(&right.rows).enumerate() {
            let found = (self.batch.ids()[number], self.batch.status()[number]);
            assert_eq!(
                found,
                (right.id, right.status),
                "{what}: row {number} of batch {}",
                self.batch.index()
            );
            assert!(
                *row == right.bytes,
                "{what}: the bytes of row {number} of batch {}",
                self.batch.index()
            );
        }
    }
}

/// Counts over all lives.
struct Sweep {
    workloads: Vec<Workload>,
    files: Vec<std::fs::File>,
    devices: Vec<feedline::Device>,
    /// Batches that outlive their loaders, with the memory that they keep.
    kept: Vec<(Vec<Held>, Budget, String)>,
    points: u64,
    slowest: (Duration, String),
    watch: Arc<Watch>,
}

/// One drawn life.
struct Life<'a> {
    what: String,
    workload: &'a Workload,
    draws: Draws,
    slots: usize,
    /// Maximum number of batches at a time.
    most: usize,
}

impl Sweep {
    /// Runs some lives with devices of their own; checks their kept batches, and that nothing is
    /// left.
    fn lives(&mut self, numbers: std::ops::Range<u64>) {
        let session = {
            let gpu = standin::Gpu::new(1 << 30, "0000:3b:00.0");
            let bandwidth = 2 << 30;
            let latency = Duration::from_micros(30);
            standin::cuda().session(standin::Config {
                devices: vec![gpu],
                bandwidth,
                latency,
                ..Default::default()
            })
        };
        self.devices.push(feedline::Device::host());
        self.devices.push(feedline::Device::cuda(0).unwrap());
        for number in numbers {
            self.life(number);
            self.forget(8);
        }
        self.forget(0);
        self.devices.clear();
        {
            // Batches that outlive their loader are freed by threads.
            crate::common::wait::soon(|| session.live() == standin::Live::default());
            assert_eq!(
                session.live(),
                standin::Live::default(),
                "alive in the driver"
            );
        }
    }

    fn life(&mut self, number: u64) {
        let mut draws = Draws::new(SEED, 0, number, "life");
        let workloads = std::mem::take(&mut self.workloads);
        let workload = &workloads[draws.below(workloads.len() as u64) as usize];
        let (mode, direct) = reader(draws.below(READERS.len() as u64) as usize);
        let device = draws.below(self.devices.len() as u64) as usize;
        let slots = 1 + draws.below(5) as usize;
        let workers = 1 + draws.below(3) as usize;
        let depth = [1, 4, 32][draws.below(3) as usize];
        let what = format!(
            "life {number}: {}, {mode:?}, O_DIRECT {direct:?}, device {device}, {slots} slots, {workers} workers, depth {depth}",
            workload.name
        );
        self.watch.begin(&what);
        if draws.below(4) == 0 {
            self.files.iter().for_each(forget_pages);
        }
        let budget = Budget::new(BUDGET, 1);
        let builder = workload
            .run
            .builder()
            .batch_size(workload.rows)
            .last_batch(LastBatch::Mask);
        let builder = builder
            .tuning(|t| t.reader(mode).direct(direct).slots(slots).depth(depth))
            .workers(workers);
        let builder = builder
            .shared_budget(&budget)
            .tuning(|t| t.held_deadline(DEADLINE));
        let (builder, most) = on_device(builder, &self.devices[device], device, slots);
        let loader = build(builder);
        let mut life = Life {
            what,
            workload,
            draws,
            slots,
            most,
        };
        let mut held = Vec::new();
        for _ in 0..life.draws.below(16) {
            self.watch.begin(&life.what);
            let (epoch, mut batches) = life.begin(&loader, held.len());
            held.append(&mut batches);
            let drops = life.drops(Some(epoch), None, &mut held);
            self.drop_all(drops, &mut life);
        }
        if life.draws.below(4) == 0 {
            held.clear();
            life.every_slot_is_back(&loader);
        }
        self.watch.begin(&life.what);
        let (epoch, mut batches) = life.begin(&loader, held.len());
        held.append(&mut batches);
        let drops = life.drops(Some(epoch), Some(loader), &mut held);
        self.drop_all(drops, &mut life);
        until(
            || loader_threads().is_empty(),
            || format!("{}: {:?} are left", life.what, loader_threads()),
        );
        held.iter().for_each(|held| held.check(&life.what));
        self.kept.push((held, budget, life.what));
        self.workloads = workloads;
    }

    /// Drops on this thread and on others at the same time.
    fn drop_all(&mut self, drops: [Vec<Thing>; 3], life: &mut Life<'_>) {
        let started = Instant::now();
        let [here, others @ ..] = drops;
        let threads: Vec<_> = others
            .into_iter()
            .filter(|things| !things.is_empty())
            .map(|things| std::thread::spawn(move || things.into_iter().for_each(drop)))
            .collect();
        here.into_iter().for_each(drop);
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        let took = started.elapsed();
        assert!(took < DEADLINE, "{}: a drop took {took:?}", life.what);
        if took > self.slowest.0 {
            self.slowest = (took, life.what.clone());
        }
        self.points += 1;
    }

    /// Drops kept batches until they belong to at most `most` loaders; their memory must then be
    /// returned.
    fn forget(&mut self, most: usize) {
        while self.kept.len() > most {
            let (held, budget, what) = self.kept.remove(0);
            held.iter().for_each(|held| held.check(&what));
            drop(held);
            until(
                || budget.free() == BUDGET,
                || format!("{what}: memory is not given back: {budget:?}"),
            );
        }
    }
}

/// Objects to drop.
#[allow(dead_code, reason = "held for its Drop")]
#[allow(clippy::large_enum_variant, reason = "three of them at a time")]
enum Thing {
    Epoch(Epoch),
    Loader(Loader),
    Batch(Batch),
}

impl Life<'_> {
    /// Begins one or several epochs, receives some batches, and keeps a few.
    fn begin(&mut self, loader: &Loader, held: usize) -> (Epoch, Vec<Held>) {
        let first = self.draws.below(EPOCHS);
        let across = self.draws.below(4) == 0;
        let mut epoch = if across {
            loader.epochs(first..first + 2)
        } else {
            loader.epoch(first)
        }
        .unwrap();
        let right = &self.workload.right[first as usize];
        let take = match self.draws.below(3) {
            0 => 0,
            1 => self.draws.below(4) as usize,
            _ => self.draws.below(right.len() as u64 + 2) as usize,
        };
        let mut batches = Vec::new();
        for number in 0..take {
            let epoch_of = first as usize + number / right.len();
            let at = number % right.len();
            let Some(batch) = self.receive(&mut epoch) else {
                break;
            };
            let one = Held {
                batch,
                right: self.workload.right[epoch_of].clone(),
                at,
            };
            one.check(&self.what);
            // One permit stays for later batches.
            if held + batches.len() + 1 < self.most && self.draws.below(3) == 0 {
                batches.push(one);
            }
        }
        // In the middle of a wait.
        if take < right.len() && self.draws.below(2) == 0 {
            for _ in 0..self.draws.below(20) {
                if epoch.next_within(Duration::ZERO).is_ready() {
                    break;
                }
            }
        }
        (epoch, batches)
    }

    /// The next batch, by one call or by polling.
    fn receive(&mut self, epoch: &mut Epoch) -> Option<Batch> {
        let next = if self.draws.below(2) == 0 {
            epoch.next()
        } else {
            loop {
                let limit = Duration::from_micros(self.draws.below(300));
                if let Poll::Ready(next) = epoch.next_within(limit) {
                    break next;
                }
            }
        };
        next.map(|batch| batch.unwrap_or_else(|error| panic!("{}: {error}", self.what)))
    }

    /// Drops the objects in a drawn order, here and on two other threads.
    fn drops(
        &mut self,
        epoch: Option<Epoch>,
        loader: Option<Loader>,
        held: &mut Vec<Held>,
    ) -> [Vec<Thing>; 3] {
        let mut things: Vec<_> = epoch
            .map(Thing::Epoch)
            .into_iter()
            .chain(loader.map(Thing::Loader))
            .collect();
        for _ in 0..self.draws.below(held.len() as u64 + 1) {
            let which = self.draws.below(held.len() as u64) as usize;
            things.push(Thing::Batch(held.swap_remove(which).batch));
        }
        let alone = self.draws.below(3) > 0;
        let mut places = [Vec::new(), Vec::new(), Vec::new()];
        while !things.is_empty() {
            let thing = things.swap_remove(self.draws.below(things.len() as u64) as usize);
            places[if alone {
                0
            } else {
                self.draws.below(3) as usize
            }]
            .push(thing);
        }
        places
    }

    /// Holds the maximum number of batches; the next one comes only after a drop.
    fn every_slot_is_back(&self, loader: &Loader) {
        let mut epoch = loader.epoch(EPOCHS).unwrap();
        let right = &self.workload.right[EPOCHS as usize];
        let most = self.most.min(right.len());
        let receive = |epoch: &mut Epoch| {
            epoch
                .next()
                .unwrap()
                .unwrap_or_else(|error| panic!("{}: {error}", self.what))
        };
        let mut all: Vec<_> = (0..most)
            .map(|at| Held {
                batch: receive(&mut epoch),
                right: right.clone(),
                at,
            })
            .collect();
        all.iter().for_each(|held| held.check(&self.what));
        if self.slots == self.most && most < right.len() {
            assert!(
                epoch.next_within(Duration::ZERO).is_pending(),
                "{}: more slots than there are",
                self.what
            );
            all.pop();
            drop(receive(&mut epoch));
        }
    }
}

/// On the host the slots bound the held batches; on a device its buffers do.
fn on_device(
    builder: LoaderBuilder,
    device: &feedline::Device,
    number: usize,
    slots: usize,
) -> (LoaderBuilder, usize) {
    if number == 0 {
        return (builder.device(device.clone()), slots);
    }
    let buffers = 2 + slots / 2;
    (
        builder
            .device(device.clone())
            .tuning(|t| t.device_batches(buffers)),
        buffers,
    )
}

/// Makes the next reads of the file reach storage, through any reader.
fn forget_pages(file: &std::fs::File) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count()
}

#[track_caller]
fn until(mut reached: impl FnMut() -> bool, what: impl Fn() -> String) {
    let started = Instant::now();
    while !reached() {
        assert!(started.elapsed() < DEADLINE, "{}", what());
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Ends the process, with a message, if a part of a life does not end.
struct Watch {
    what: Mutex<String>,
    begun: AtomicU64,
    over: AtomicBool,
}

impl Watch {
    fn start() -> Arc<Self> {
        let watch = Arc::new(Self {
            what: Mutex::default(),
            begun: AtomicU64::new(0),
            over: AtomicBool::new(false),
        });
        let own = watch.clone();
        std::thread::spawn(move || {
            let mut last = (0, Instant::now());
            while !own.over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(200));
                let begun = own.begun.load(Ordering::Relaxed);
                if begun != last.0 {
                    last = (begun, Instant::now());
                } else if last.1.elapsed() > 2 * DEADLINE {
                    eprintln!(
                        "no end: {}\nthreads: {:?}",
                        own.what.lock().unwrap(),
                        loader_threads()
                    );
                    std::process::exit(101);
                }
            }
        });
        watch
    }

    fn begin(&self, what: &str) {
        let mut now = self.what.lock().unwrap();
        now.clear();
        now.push_str(what);
        self.begun.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn dropping_anything_at_any_time_never_hangs_or_corrupts() {
    if !alone(&here!()) {
        return;
    }
    let full = sweep::is_full();
    let points = sweep::size(400, 3_000, 100_000);
    let alone: Option<u64> = sweep::only().map(|life| life.parse().expect("the number of a life"));
    let dir = Dir::new();
    let watch = Watch::start();
    let workloads = Workload::all(&dir);
    let files: Vec<_> = std::fs::read_dir(dir.path("")).unwrap().flatten().collect();
    let files: Vec<_> = files
        .iter()
        .map(|file| std::fs::File::open(file.path()).unwrap())
        .collect();
    // Only files can leave the page cache.
    files.iter().for_each(|file| file.sync_all().unwrap());
    let kept = Vec::new();
    let slowest = Default::default();
    let mut sweep = Sweep {
        workloads,
        files,
        devices: Vec::new(),
        kept,
        points: 0,
        slowest,
        watch: watch.clone(),
    };
    let started = Instant::now();
    // Resources opened once per process exist after some lives.
    sweep.lives(u64::MAX - EACH..u64::MAX);
    let before = (descriptors(), mappings());
    let mut lives = 0;
    let number = alone.unwrap_or(0);
    loop {
        let each = if alone.is_some() { 1 } else { EACH };
        sweep.lives(number + lives..number + lives + each);
        lives += each;
        assert_eq!(descriptors(), before.0, "up to life {lives}");
        if full && lives.is_multiple_of(20 * EACH) {
            println!(
                "{} points in {lives} lives, {:.0?}",
                sweep.points,
                started.elapsed()
            );
        }
        let enough = sweep.points >= points || (!full && started.elapsed() > TIME);
        if alone.is_some() || enough {
            break;
        }
    }
    watch.over.store(true, Ordering::Relaxed);
    assert_eq!(feedline::unstable::leaked(), 0);
    let more = mappings().saturating_sub(before.1);
    assert!(more < MORE_MAPPINGS, "{more} mappings more than before");
    let (slowest, what) = &sweep.slowest;
    println!(
        "{} points in {lives} lives, {:.1?}; the slowest drop: {slowest:.1?} ({what})",
        sweep.points,
        started.elapsed()
    );
}
