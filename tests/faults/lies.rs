//! A server that lies: every cell of a table gives right bytes or one typed error that names the
//! object, in bounded time, and leaves nothing wrong in a cache.
//!
//! ```text
//! lie (framing × coding × range × status × timing × version) × once, every third, always
//!     × no cache, cold, warm, shared by four × samples, index, listing, warming, checksums
//! ```
//!
//! Cells are drawn by a fixed rule. `FEEDLINE_LIES` sets their number, and `FEEDLINE_LIES_FROM` the
//! first.

use crate::common::got::Got;
use crate::common::lie::Lie;
use crate::common::numeric::fixture;
use crate::common::server::{Fault, Request, Server};
use crate::common::{Dir, noise};
use feedline::dataset::{Dataset, DatasetExt, Records, Tar};
use feedline::storage::{Cache, Mode};
use feedline::tensor::{DType, Field};
use feedline::{Loader, Order, Result};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const RECORD: usize = 1000;
const COUNT: usize = 48;
const BLOCK: u64 = 8 << 10;
/// No work of a cell may take longer.
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug)]
enum Often {
    Once(u64),
    EveryThird,
    Always,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kept {
    Nowhere,
    Cold,
    Warm,
    /// Four loaders at a time fill one cache.
    Shared,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    Samples,
    Index,
    Listing,
    Warming,
    Checksums,
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    number: u64,
    lie: Lie,
    often: Often,
    kept: Kept,
    work: Work,
    shuffled: bool,
}

impl Cell {
    fn of(number: u64) -> Self {
        // Numbers far apart for cells that are neighbours.
        let mut digits = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        digits ^= digits >> 31;
        digits = digits.wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (digits >> 27);
        let mut pick = |count: u64| {
            let picked = digits % count;
            digits /= count;
            picked
        };
        let often = match pick(3) {
            0 => Often::Once(pick(8)),
            1 => Often::EveryThird,
            _ => Often::Always,
        };
        let kept = [Kept::Nowhere, Kept::Cold, Kept::Warm, Kept::Shared][pick(4) as usize];
        let work = match pick(6) {
            0 | 1 => Work::Samples,
            2 => Work::Index,
            3 => Work::Listing,
            4 => Work::Warming,
            _ => Work::Checksums,
        };
        let shuffled = pick(2) == 0;
        // The six choices of a lie need more digits than are left.
        let mut digits = number.wrapping_mul(0xd6e8_feb8_6659_fd93) ^ (number << 32);
        digits ^= digits >> 29;
        let mut digits = digits.wrapping_mul(0x94d0_49bb_1331_11eb) >> 1;
        Self {
            number,
            lie: Lie::of(&mut digits),
            often,
            kept,
            work,
            shuffled,
        }
    }

    fn script(&self) -> impl FnMut(&Request) -> Option<Fault> + Send + 'static {
        let often = self.often;
        let lie = self.lie;
        let mut asked = 0;
        move |_| {
            asked += 1;
            let lies = match often {
                Often::Once(at) => asked == at + 1,
                Often::EveryThird => asked % 3 == 0,
                Often::Always => true,
            };
            lies.then_some(Fault::Lie(lie))
        }
    }

    fn order(&self) -> Order {
        match self.shuffled {
            true => Order::shuffled(self.number),
            false => Order::sequential(),
        }
    }
}

/// A server with two objects of records and a tar, and what is in them.
struct Place {
    server: Server,
    tar: Vec<u8>,
    records: Vec<u8>,
}

impl Place {
    fn new() -> Self {
        let server = Server::new();
        let records = noise(RECORD * COUNT, 7);
        server.put("bucket/a.bin", records[..RECORD * COUNT / 2].to_vec());
        server.put("bucket/b.bin", records[RECORD * COUNT / 2..].to_vec());
        let tar = std::fs::read(fixture("tar/webdataset.tar")).unwrap();
        server.put("bucket/t/x.tar", tar.clone());
        Self {
            server,
            tar,
            records,
        }
    }

    /// The URL of an object, in a store whose requests are soon tried again.
    fn url(&self, name: &str) -> String {
        let bucket = self.server.keyed_s3("", &[("timeout", "0.2")]);
        format!("{bucket}/{name}")
    }

    fn records(&self) -> Result<Records> {
        Records::builder(RECORD).open_files(&[self.url("a.bin"), self.url("b.bin")])
    }

    /// The work of a cell. `Ok(false)`: its bytes are wrong. The lies begin once all workers of the
    /// cell are there.
    fn work(&self, cell: &Cell, cache: Option<&Cache>, dir: &Dir, all: &Barrier) -> Result<bool> {
        let lies = || {
            if all.wait().is_leader() {
                self.server.script(cell.script());
            }
        };
        match cell.work {
            Work::Samples => {
                let records = honest(|| self.records());
                lies();
                self.samples(Arc::new(records), cell, cache)
            }
            Work::Listing => {
                let name = self.url("*.bin");
                lies();
                self.samples(Arc::new(Records::builder(RECORD).open(name)?), cell, cache)
            }
            Work::Index => {
                let name = self.url("t/x.tar");
                lies();
                let bin = || Field::up_to("bin", DType::U8, 600);
                let open = |path: &str| {
                    let builder = Tar::builder().index(false).raw(bin(), "bin");
                    builder.class("cls").open(path)
                };
                let tar = open(&name)?;
                let told = open(dir.write("x.tar", &self.tar).to_str().unwrap())?;
                let found = rows(Arc::new(tar), cell.order(), cache)?;
                Ok(found == rows(Arc::new(told), cell.order(), None)?)
            }
            Work::Warming => {
                let records = honest(|| self.records());
                let own = Cache::at(dir.path("warmed")).block_bytes(BLOCK);
                lies();
                let cache = cache.unwrap_or(&own);
                let warmed = cache.warm(records.sources(), |_| ControlFlow::Continue(()))?;
                match warmed.errors.into_iter().next() {
                    Some(error) => Err(error),
                    None => self.samples(Arc::new(records), cell, Some(cache)),
                }
            }
            Work::Checksums => {
                let records = honest(|| self.records());
                lies();
                let checked = records.facts(dir.path("crcs")).checksums().open()?;
                self.server.script(|_| None);
                // A wrong checksum would refuse the right bytes.
                self.samples(Arc::new(checked), cell, cache)
            }
        }
    }

    fn samples(
        &self,
        dataset: Arc<dyn Dataset>,
        cell: &Cell,
        cache: Option<&Cache>,
    ) -> Result<bool> {
        let found = rows(dataset, cell.order(), cache)?;
        let record = |id: u64| &self.records[id as usize * RECORD..][..RECORD];
        Ok(found.len() == COUNT && found.iter().all(|(id, row)| row == record(*id)))
    }
}

/// Ids and bytes of an epoch's samples.
fn rows(
    dataset: Arc<dyn Dataset>,
    order: Order,
    cache: Option<&Cache>,
) -> Result<Vec<(u64, Vec<u8>)>> {
    // A ring costs more than all the rest of a cell.
    let builder = Loader::builder(dataset).order(order).batch_size(5);
    let builder = builder.tuning(|t| t.reader(Mode::Pread).slots(3).depth(8));
    let deadline = Duration::from_secs(40);
    let mut builder = builder.workers(1).tuning(|t| t.stall_deadline(deadline));
    if let Some(cache) = cache {
        builder = builder.cache(cache.clone());
    }
    let loader = builder.build()?;
    let mut rows = Vec::new();
    for got in Got::try_epoch(&loader, 0)? {
        for (row, id) in got.ids.iter().enumerate().take(got.valid) {
            let mut bytes = Vec::new();
            for field in &got.fields {
                let each = field.bytes.len() / got.len;
                bytes.extend_from_slice(&field.bytes[row * each..][..each]);
            }
            rows.push((*id, bytes));
        }
    }
    Ok(rows)
}

/// The result of work with an honest server. On a busy machine it may be slower than the timeout.
fn honest<T>(mut work: impl FnMut() -> Result<T>) -> T {
    let started = Instant::now();
    loop {
        match work() {
            Ok(done) => return done,
            Err(error) => assert!(started.elapsed() < LONGEST, "an honest server: {error}"),
        }
    }
}

/// Runs a cell; what is wrong with it.
fn run(place: &Place, cell: &Cell, dir: &Dir) -> Result<(), String> {
    let cache =
        (cell.kept != Kept::Nowhere).then(|| Cache::at(dir.path("cache")).block_bytes(BLOCK));
    place.server.script(|_| None);
    if let (Kept::Warm, Some(cache)) = (cell.kept, &cache) {
        let warm = || cache.warm(place.records()?.sources(), |_| ControlFlow::Continue(()));
        while honest(warm).missing() > 0 {}
    }
    let judge = |done: Result<bool>| match done {
        Ok(true) => Ok(()),
        Ok(false) => Err("wrong bytes".to_string()),
        Err(error) if error.to_string().contains("://bucket-") => Ok(()),
        Err(error) => Err(format!("an error without the object: {error}")),
    };
    let together = Barrier::new(4);
    let done = match cell.kept {
        Kept::Shared if cell.work == Work::Samples => std::thread::scope(|scope| {
            let work = || place.work(cell, cache.as_ref(), dir, &together);
            let all: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            let mut ends = all.into_iter().map(|one| one.join().map_err(|_| "a panic"));
            ends.try_for_each(|end| judge(end?))
        }),
        _ => judge(place.work(cell, cache.as_ref(), dir, &Barrier::new(1))),
    };
    place.server.script(|_| None);
    done?;
    if let Some(cache) = &cache {
        if !honest(|| place.samples(Arc::new(place.records()?), cell, Some(cache))) {
            return Err("wrong bytes of a later run on the same cache".into());
        }
        let damaged = cache.verify(|_| ControlFlow::Continue(())).unwrap();
        if !damaged.is_empty() {
            return Err(format!("damaged blocks: {damaged:?}"));
        }
    }
    Ok(())
}

/// Runs cells until there are no more; gives those that are wrong, and the longest time of one.
fn worker(next: &'static AtomicU64, end: u64) -> (Vec<String>, Duration) {
    let mut place = Arc::new(Place::new());
    let mut wrong = Vec::new();
    let mut longest = Duration::ZERO;
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= end {
            return (wrong, longest);
        }
        let cell = Cell::of(number);
        let here = place.clone();
        let started = Instant::now();
        let (send, done) = sync_channel(1);
        std::thread::spawn(move || {
            let dir = Dir::in_memory(1 << 30);
            let _ = send.send(run(&here, &cell, &dir));
        });
        match done.recv_timeout(3 * LONGEST) {
            Ok(Ok(())) => {}
            Ok(Err(what)) => wrong.push(format!("{what}: {cell:?}")),
            Err(RecvTimeoutError::Timeout) => {
                wrong.push(format!("no end: {cell:?}"));
                place = Arc::new(Place::new());
            }
            Err(RecvTimeoutError::Disconnected) => wrong.push(format!("a panic: {cell:?}")),
        }
        longest = longest.max(started.elapsed());
    }
}

fn number(name: &str, default: u64) -> u64 {
    let text = std::env::var(name);
    text.map_or(default, |text| text.parse().expect(name))
}

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mut lines = status.lines();
    let peak = lines.find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").trim().parse().unwrap()
}

#[test]
fn a_server_that_lies_gives_right_bytes_or_an_error_that_names_the_object() {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let from = number("FEEDLINE_LIES_FROM", 0);
    let count = number("FEEDLINE_LIES", 400);
    NEXT.store(from, Ordering::Relaxed);
    let worker = move || worker(&NEXT, from + count);
    let workers: Vec<_> = (0..8).map(|_| std::thread::spawn(worker)).collect();
    let mut wrong = Vec::new();
    let mut longest = Duration::ZERO;
    for worker in workers {
        let (more, time) = worker.join().unwrap();
        wrong.extend(more);
        longest = longest.max(time);
    }
    let peak = peak_kib();
    println!("{count} cells, the longest took {longest:?}, peak {peak} KiB");
    assert!(wrong.is_empty(), "of {count} cells: {wrong:#?}");
    // Eight cells of some MiB each and the test itself; an answer of 256 MiB is not kept.
    assert!(peak < 400 << 10, "{peak} KiB");
}
