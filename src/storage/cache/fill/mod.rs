//! Fills a cache: the queue of blocks, the reads that wait for them, and the threads that download.
//!
//! ```text
//! route ─┬─ first read of an object ────────────────► waits ──► a thread looks the object up ──► route again
//!        ├─ missing block, and most of it is wanted ► waits ──► download ──► completed from memory ──► kept
//!        ├─ the same, but all threads download ──────► network; what it brings ─────────────────────► kept
//!        ├─ missing block, and little of it is wanted ► network; the same
//!        └─ the same, and ranges are small ──────────► network; the block is downloaded when no read waits
//! ```
//!
//! In a sequential order, threads download ahead of the reads: as many blocks of an object as there are threads. In an
//! order by blocks, the planner [announces](Announcer) those of the next window.
//!
//! So each byte comes once: as a piece of a range, or with its block. Ranges of less than [`SMALL`] bytes in the mean would
//! take longer than their blocks, and there each byte may come twice.
//!
//! Limits: a thread holds one block in memory; pieces that reads bring, and no thread has written, have the bytes of
//! [`PIECES`] blocks together, or of one under a limit of memory. A read waits at most 4 × [`PATIENCE`](super::config::PATIENCE) for disks and other processes; then it goes to
//! the network.

mod work;

use super::config::{Cache, QUEUE};
use super::dir::Dir;
use super::entry::knows_boot;
use super::kept::{Kept, Object, is_full};
#[cfg(feature = "remote")]
use super::units::{UNIT, units_of};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::MemoryTerm;
use crate::order::Locality;
use crate::storage::done::Done;
use crate::storage::mounts::Mounts;
use crate::storage::remote::Meter;
#[cfg(feature = "remote")]
use crate::storage::remote::{Keep, NoRoom};
use crate::storage::{Completion, DROP_DEADLINE, Extent, ReadOp, ReaderOptions, SourceId, Sources, Waker, is_url};
use std::collections::{HashMap, VecDeque};
use std::io;
#[cfg(feature = "remote")]
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use work::Work;

/// Offset of a piece in the data file, and the marks of its units.
type Written = (u64, Vec<u32>);

/// Downloads at a time, without a limit of memory.
const THREADS: usize = 8;

/// Blocks of memory for pieces, without a limit of memory: a shuffled order has some hundred of them in flight.
const PIECES: usize = 4;

/// Bytes of a request for a range, in the mean, below which its block is downloaded as well.
#[cfg(feature = "remote")]
const SMALL: u64 = 32 << 10;

/// Requests whose bytes tell the mean.
#[cfg(feature = "remote")]
const FIRST: u64 = 64;

/// After a block was not kept, none is asked for for so long.
const REST: Duration = Duration::from_secs(10);

/// Time to write what reads have brought, at a loader's end.
const LAST: Duration = Duration::from_secs(1);

/// Pause between two looks at another process's download.
const LOOK: Duration = Duration::from_millis(5);

/// The place that a read goes to.
pub(crate) enum Route {
    Disk(ReadOp),
    Network(ReadOp),
    /// It comes back as a completion, or from [`Fill::take_ready`].
    Waits,
}

/// A cache's side of a loader.
pub(crate) struct Fill {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// Tells a cache of reads to come.
#[derive(Clone)]
pub(crate) struct Announcer(Arc<Shared>);

impl Announcer {
    pub(crate) fn announce(&self, extent: &Extent) {
        self.0.announce(extent);
    }
}

/// A block, or [`LOOKUP`] of an object.
type Job = (SourceId, u64);

/// Bytes from an offset on, that a read has brought.
struct Piece {
    source: SourceId,
    offset: u64,
    bytes: Vec<u8>,
}

/// In place of a block: find or make the object's files, or compare the file on the mount.
const LOOKUP: u64 = u64::MAX;

struct Shared {
    sources: Arc<Sources>,
    kept: Arc<Kept>,
    mounts: Mounts,
    dir: Dir,
    /// Samples follow each other in their objects, so that whole blocks are soon used.
    locality: Locality,
    patience: Option<Duration>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The loader ends.
    ended: Condvar,
    done: Done,
    /// Reads that waited, and whether they go to the network in any case.
    ready: Mutex<Vec<(ReadOp, bool)>>,
    waker: Waker,
    meter: Arc<Meter>,
    stop: AtomicBool,
    /// Threads that download; those of them that have a block; those that write one.
    downloads: usize,
    busy: AtomicUsize,
    writers: AtomicUsize,
    /// Bytes of pieces on their way: in requests, in [`Queue::pieces`], and in the hands of their writers.
    brought: AtomicUsize,
    /// Limit of them.
    brought_max: usize,
    /// Pieces that wait for the sync of their file, and their new bytes.
    written: Mutex<HashMap<SourceId, (Vec<Written>, u64)>>,
    /// Threads that wait for such a sync.
    syncing: AtomicUsize,
    /// Whether pieces count: not where boots cannot be told apart, nor on a mount, whose other hosts have boots of their own.
    pieces: bool,
    /// Requests of reads so far, and their bytes.
    #[cfg(feature = "remote")]
    asked: (AtomicU64, AtomicU64),
    /// When the disk may be asked again after it was full, and after it failed, in milliseconds from the start.
    full_until: AtomicU64,
    fails_until: AtomicU64,
    /// When a job ended last, in milliseconds from the start.
    moved: AtomicU64,
    started: Instant,
}

#[derive(Default)]
struct Queue {
    /// For objects that were not looked up yet. One thread does nothing else, so that no download delays them.
    lookups: VecDeque<Job>,
    urgent: VecDeque<Job>,
    /// What reads brought.
    pieces: VecDeque<Piece>,
    /// Sources whose files are to be synced.
    syncs: VecDeque<SourceId>,
    later: VecDeque<Job>,
    waiting: HashMap<Job, Waiting>,
    /// Jobs of threads, and whether they download now. Reads join them.
    running: HashMap<Job, bool>,
    /// Blocks that another process claims, and does not bring: since when no read waits for them.
    held: HashMap<Job, Instant>,
}

struct Waiting {
    ops: Vec<ReadOp>,
    /// Since when a disk or another process is waited for. A download has limits of its own.
    since: Option<Instant>,
}

impl Queue {
    fn next(&mut self) -> Option<Work> {
        let urgent = self.urgent.pop_front().map(Work::Block);
        urgent
            .or_else(|| self.syncs.pop_front().map(Work::Sync))
            .or_else(|| self.pieces.pop_front().map(Work::Piece))
            .or_else(|| self.later.pop_front().map(Work::Block))
    }
}

impl Fill {
    /// The table for what a cache holds of `sources`.
    pub(crate) fn table(sources: &Sources, cache: &Cache) -> Arc<Kept> {
        Arc::new(Kept::new(sources, cache))
    }

    /// The cache of `sources`, with their table. `meter` counts its downloads; `waker` wakes the driver.
    ///
    /// Errors: [`ErrorKind::Config`] for a folder that cannot be used.
    pub(crate) fn start(
        (sources, kept): (Arc<Sources>, Arc<Kept>),
        options: &ReaderOptions,
        cache: &Cache,
        (meter, waker): (Arc<Meter>, Waker),
    ) -> Result<Self> {
        if is_url(&cache.dir) {
            let message = "a cache is a folder on a local disk, not a URL";
            return Err(Error::new(ErrorKind::Config, Stage::Build, message).with_path(&cache.dir));
        }
        let dir = Dir::open(cache).map_err(|error| {
            let message = format!("the folder cannot be a cache: {error}");
            Error::new(ErrorKind::Config, Stage::Build, message).with_path(&cache.dir)
        })?;
        // One more block is for what reads bring.
        let fits = |bytes: usize| (bytes as u64 / cache.block).saturating_sub(1).clamp(1, THREADS as u64) as usize;
        let count = options.connections.map_or(THREADS, fits);
        let pieces = if options.connections.is_none() { PIECES } else { 1 };
        let shared = Arc::new(Shared {
            kept,
            sources,
            mounts: cache.mounts(),
            dir,
            locality: options.locality,
            patience: options.patience,
            queue: Mutex::default(),
            changed: Condvar::new(),
            ended: Condvar::new(),
            done: Done::new(0, Some(waker.clone())),
            ready: Mutex::default(),
            waker,
            meter,
            stop: AtomicBool::new(false),
            downloads: count,
            busy: AtomicUsize::new(0),
            writers: AtomicUsize::new(0),
            brought: AtomicUsize::new(0),
            brought_max: pieces * cache.block as usize,
            written: Mutex::default(),
            syncing: AtomicUsize::new(0),
            pieces: knows_boot() && cache.own_mount().is_none(),
            #[cfg(feature = "remote")]
            asked: (AtomicU64::new(0), AtomicU64::new(0)),
            full_until: AtomicU64::new(0),
            fails_until: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            started: Instant::now(),
        });
        let mut fill = Self { shared, threads: Vec::new() };
        for number in 0..=count {
            fill.spawn(format!("feedline-fill-{number}"), move |shared| shared.work(number > 0))?;
        }
        fill.spawn("feedline-fill-late".into(), Shared::watch)?;
        Ok(fill)
    }

    fn spawn(&mut self, name: String, work: impl FnOnce(&Shared) + Send + 'static) -> Result<()> {
        let shared = self.shared.clone();
        let started = std::thread::Builder::new().name(name).spawn(move || work(&shared));
        let refused = |error| Error::os(Stage::Build, "cannot start a thread of the cache", error);
        self.threads.push(started.map_err(refused)?);
        Ok(())
    }

    pub(crate) fn announcer(&self) -> Announcer {
        Announcer(self.shared.clone())
    }

    /// What is on the disk.
    pub(crate) fn kept(&self) -> &Arc<Kept> {
        &self.shared.kept
    }

    /// The place for a read of an object.
    pub(crate) fn route(&self, op: ReadOp) -> Route {
        self.shared.route(op)
    }

    /// As [`route`](Self::route), for a read within one block that waits for it in any case.
    pub(super) fn bring(&self, op: ReadOp) -> Route {
        self.shared.bring(op)
    }

    /// Keeps what the network brings for reads.
    #[cfg(feature = "remote")]
    pub(crate) fn taker(&self) -> Arc<dyn Keep> {
        self.shared.clone()
    }

    /// Moves the completions of reads that waited to `out`; gives their number.
    pub(crate) fn collect(&self, out: &mut Vec<Completion>) -> usize {
        self.shared.done.wait(out, Some(Duration::ZERO))
    }

    /// Reads that waited, and whether they go to the network in any case.
    pub(crate) fn take_ready(&self, out: &mut Vec<(ReadOp, bool)>) {
        out.append(&mut lock(&self.shared.ready));
    }

    /// Completes the reads that wait as cancelled. Downloads go on.
    pub(crate) fn cancel(&self) {
        let waiting: Vec<_> = lock(&self.shared.queue).waiting.drain().collect();
        let ready: Vec<_> = lock(&self.shared.ready).drain(..).map(|(op, _)| op).collect();
        let ops = waiting.into_iter().flat_map(|(_, waiting)| waiting.ops).chain(ready);
        self.shared.done.extend(ops.map(|op| {
            let error = Error::new(ErrorKind::Cancelled, Stage::Read, "").with_range(op.extent.offset, op.extent.len);
            Completion { tag: op.tag, buf: op.buf, result: Err(error) }
        }));
    }

    /// Downloads at a time.
    pub(super) fn downloads(&self) -> usize {
        self.shared.downloads
    }

    /// Whether the disk was full lately, or the capacity is used up.
    pub(super) fn is_full(&self) -> bool {
        self.shared.rests(&self.shared.full_until)
    }

    /// Blocks in memory, and the tables.
    pub(crate) fn term(&self) -> MemoryTerm {
        let blocks = self.shared.downloads * self.shared.kept.block() as usize + self.shared.brought_max;
        MemoryTerm::NETWORK.of(1, blocks + self.shared.kept.table_bytes())
    }
}

impl Drop for Fill {
    /// Blocks that reads brought are written first, within [`LAST`].
    fn drop(&mut self) {
        let deadline = Instant::now() + LAST;
        while self.shared.has_pieces_to_write() && Instant::now() < deadline {
            self.shared.sync_soon();
            std::thread::sleep(LOOK / 5);
        }
        self.end();
    }
}

impl Fill {
    /// Ends all downloads. Blocks that came are written.
    pub(super) fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // A thread that hangs in a disk keeps no buffer of a read.
        self.cancel();
        self.collect(&mut Vec::new());
        // Between a thread's look at `stop` and its sleep lies the lock.
        drop(lock(&self.shared.queue));
        self.shared.changed.notify_all();
        self.shared.ended.notify_all();
        let deadline = Instant::now() + DROP_DEADLINE;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(feature = "remote")]
impl Keep for Shared {
    fn wants(&self, source: SourceId, offset: u64, len: u64) -> std::result::Result<Option<Range<u64>>, NoRoom> {
        let (all, size) = (self.sources.len_of(source), self.kept.block());
        let Some(Some(_)) = self.kept.object(source.index()) else { return Ok(None) };
        let is_block = offset.next_multiple_of(size) + size <= offset + len || len == all;
        // In a dense order, the block itself comes soon.
        let pieces = self.pieces && (is_block || !self.is_dense() && self.keeps_pieces());
        let units = units_of(offset, len);
        let wide = units.start * UNIT..(units.end * UNIT).min(all);
        let room = (wide.end - wide.start) as usize;
        let rests = self.rests(&self.full_until) || self.rests(&self.fails_until);
        if !pieces || rests || room > self.brought_max {
            self.count(len);
            return Ok(None);
        }
        if self.brought.fetch_add(room, Ordering::Relaxed) + room > self.brought_max {
            self.brought.fetch_sub(room, Ordering::Relaxed);
            return Err(NoRoom);
        }
        self.count(len);
        Ok(Some(wide))
    }

    fn pass(&self) {
        self.kept.dropped("ranges come faster than the disk takes them".into());
    }

    fn keep(&self, source: SourceId, wide: Range<u64>, mut bytes: Vec<u8>) {
        let room = (wide.end - wide.start) as usize;
        // Of a range that was cut, whole units count.
        if bytes.len() < room {
            bytes.truncate(bytes.len() / UNIT as usize * UNIT as usize);
            bytes.shrink_to_fit();
        }
        self.brought.fetch_sub(room - bytes.len(), Ordering::Relaxed);
        if !bytes.is_empty() {
            lock(&self.queue).pieces.push_back(Piece { source, offset: wide.start, bytes });
            self.changed.notify_all();
        }
    }
}

impl Shared {
    fn route(&self, op: ReadOp) -> Route {
        let route = self.place(op);
        if let Route::Network(op) = &route {
            self.compare_soon(op.extent.source);
        }
        route
    }

    fn place(&self, op: ReadOp) -> Route {
        let extent = op.extent;
        if extent.len == 0 || self.sources.check(&extent).is_err() {
            return Route::Network(op);
        }
        let mut blocks = self.kept.blocks(extent.offset, extent.len);
        let object = match self.kept.object(extent.source.index()) {
            Some(Some(object)) => object,
            Some(None) => return Route::Network(op),
            None if self.rests(&self.fails_until) && !self.kept.is_changed(extent.source.index()) => {
                return Route::Network(op);
            }
            None => return self.wait_for(op, LOOKUP),
        };
        // What a slow disk does not take now, another epoch may bring.
        let keeps = self.keeps();
        if keeps && self.locality == Locality::Sequence {
            self.ask_ahead(object, extent.source, *blocks.end() + 1);
        }
        let Some(first) = blocks.find(|block| !object.has(*block)) else { return Route::Disk(op) };
        let piece = || self.kept.has_pieces(extent.source.index(), object, extent.offset, extent.len);
        if self.pieces && piece() {
            return Route::Disk(op);
        }
        if !keeps {
            return Route::Network(op);
        }
        let rest = blocks.filter(|block| !object.has(*block));
        let is_most = self.is_most(&extent, first);
        if is_most && !object.is_unproven(first) && self.busy.load(Ordering::Relaxed) >= self.downloads {
            // The network is as fast as a download here, and has more requests to give.
            return Route::Network(op);
        }
        match self.is_dense() || is_most || object.is_unproven(first) {
            true => {
                self.ask(object, extent.source, rest);
                self.wait_for(op, first)
            }
            false if self.keeps_pieces() && self.sources.is_remote(extent.source) => Route::Network(op),
            false => {
                self.ask(object, extent.source, std::iter::once(first).chain(rest));
                Route::Network(op)
            }
        }
    }

    fn bring(&self, op: ReadOp) -> Route {
        let block = op.extent.offset / self.kept.block();
        match self.kept.object(op.extent.source.index()) {
            Some(Some(object)) if object.has(block) => Route::Disk(op),
            Some(None) => Route::Network(op),
            _ if !self.keeps() => Route::Network(op),
            Some(Some(_)) => self.wait_for(op, block),
            None => self.wait_for(op, LOOKUP),
        }
    }

    /// Whether the order soon wants all of a block.
    fn is_dense(&self) -> bool {
        self.locality != Locality::None
    }

    /// Whether the disk takes blocks now.
    fn keeps(&self) -> bool {
        !(self.rests(&self.full_until) || self.rests(&self.fails_until) || self.is_disk_slow())
    }

    /// Whether a read wants so much of a block that its download costs little more.
    fn is_most(&self, extent: &Extent, block: u64) -> bool {
        let len = self.sources.len_of(extent.source);
        let block_len = self.kept.block().min(len - block * self.kept.block());
        extent.len >= block_len / 4
    }

    /// Queues the blocks of a read to come.
    pub(super) fn announce(&self, extent: &Extent) {
        let source = extent.source;
        if extent.len == 0 || !self.sources.is_staged(source) || self.sources.check(extent).is_err() || !self.keeps() {
            return;
        }
        match self.kept.object(source.index()) {
            Some(Some(object)) => {
                let blocks = self.kept.blocks(extent.offset, extent.len);
                self.ask(object, source, blocks.filter(|block| !object.has(*block)));
            }
            None if !self.kept.is_changed(source.index()) => self.look_soon(source),
            _ => {}
        }
    }

    /// Queues the look at an object that no read waits for; later announcements of it find the object.
    fn look_soon(&self, source: SourceId) {
        let (mut queue, job) = (lock(&self.queue), (source, LOOKUP));
        let is_known = queue.waiting.contains_key(&job) || queue.running.contains_key(&job);
        if !is_known && queue.lookups.len() < QUEUE && !queue.lookups.contains(&job) {
            queue.lookups.push_back(job);
            drop(queue);
            self.changed.notify_all();
        }
    }

    /// Queues the blocks that follow. Their time comes, as the order is dense: without this, a few reads in flight leave
    /// most threads idle.
    fn ask_ahead(&self, object: &Object, source: SourceId, next: u64) {
        let end = self.sources.len_of(source).div_ceil(self.kept.block()).min(next + self.downloads as u64);
        self.ask(object, source, (next..end).filter(|block| !object.has(*block)));
    }

    /// Counts a request of a read.
    #[cfg(feature = "remote")]
    fn count(&self, len: u64) {
        self.asked.0.fetch_add(1, Ordering::Relaxed);
        self.asked.1.fetch_add(len, Ordering::Relaxed);
    }

    /// Whether ranges are so large that their pieces fill the cache well.
    fn keeps_pieces(&self) -> bool {
        #[cfg(feature = "remote")]
        {
            let (requests, bytes) = (self.asked.0.load(Ordering::Relaxed), self.asked.1.load(Ordering::Relaxed));
            self.pieces && (requests < FIRST || bytes >= SMALL * requests)
        }
        // Nothing keeps what the reader of files reads on a mount.
        #[cfg(not(feature = "remote"))]
        false
    }

    /// Queues blocks that no read waits for.
    fn ask(&self, object: &Object, source: SourceId, blocks: impl Iterator<Item = u64>) {
        for block in blocks.filter(|block| object.ask(*block)) {
            let mut queue = lock(&self.queue);
            if queue.later.len() == QUEUE {
                // The next read asks again.
                return object.unask(block);
            }
            queue.later.push_back((source, block));
            drop(queue);
            self.changed.notify_all();
        }
    }

    fn wait_for(&self, op: ReadOp, block: u64) -> Route {
        let job = (op.extent.source, block);
        let mut queue = lock(&self.queue);
        if let Some(waiting) = queue.waiting.get_mut(&job) {
            waiting.ops.push(op);
            return Route::Waits;
        }
        if queue.held.get(&job).is_some_and(|since| since.elapsed() < REST) {
            return Route::Network(op);
        }
        let running = queue.running.get(&job).copied();
        let since = (running != Some(true)).then(Instant::now);
        queue.waiting.insert(job, Waiting { ops: vec![op], since });
        if running.is_some() {
            return Route::Waits;
        }
        match block {
            LOOKUP => queue.lookups.push_back(job),
            _ => queue.urgent.push_back(job),
        }
        drop(queue);
        // One alone might be the thread that does not want this job.
        self.changed.notify_all();
        Route::Waits
    }

    /// Whether most downloads wait for the disk, so that the network is faster.
    fn is_disk_slow(&self) -> bool {
        2 * self.writers.load(Ordering::Relaxed) > self.downloads
    }

    fn rests(&self, until: &AtomicU64) -> bool {
        let until = until.load(Ordering::Relaxed);
        until > 0 && (self.started.elapsed().as_millis() as u64) < until
    }

    /// Something is not kept. For a while no block is asked for; where the disk fails, nothing is looked up either.
    fn rest(&self, why: &str, error: &io::Error) {
        self.kept.refused(why, error);
        let until = if is_full(error) { &self.full_until } else { &self.fails_until };
        until.fetch_max((self.started.elapsed() + REST).as_millis() as u64, Ordering::Relaxed);
    }

    /// Threads and downloads move, so reads in the queue may wait.
    fn progress(&self) {
        self.moved.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Completes the reads that wait for an object that cannot be read at all. Others try it themselves.
    fn fail(&self, job: Job, error: &Error) {
        if matches!(error.kind(), ErrorKind::Io | ErrorKind::Stalled) {
            return;
        }
        let Some(waiting) = lock(&self.queue).waiting.remove(&job) else { return };
        self.done.extend(waiting.ops.into_iter().map(|op| {
            let result = Err(self.sources.at(error.clone_lossy(), &op.extent));
            Completion { tag: op.tag, buf: op.buf, result }
        }));
    }

    /// Completes the reads that wait for a block and need no other one; gives their number.
    fn serve(&self, job: Job, bytes: &[u8]) -> u64 {
        let Some(waiting) = lock(&self.queue).waiting.remove(&job) else { return 0 };
        let start = job.1 * self.kept.block();
        let within =
            |op: &ReadOp| op.extent.offset >= start && op.extent.offset + op.extent.len <= start + bytes.len() as u64;
        let (here, others): (Vec<_>, Vec<_>) = waiting.ops.into_iter().partition(within);
        let count = here.len() as u64;
        self.done.extend(here.into_iter().map(|mut op| {
            let piece = &bytes[(op.extent.offset - start) as usize..][..op.extent.len as usize];
            let room = op.buf.as_mut_slice();
            let result = match room.len() >= piece.len() {
                true => {
                    room[..piece.len()].copy_from_slice(piece);
                    Ok(0)
                }
                false => {
                    let message = format!("the buffer has {} bytes, but the read needs {}", room.len(), piece.len());
                    Err(self.sources.at(Error::new(ErrorKind::Config, Stage::Read, message), &op.extent))
                }
            };
            Completion { tag: op.tag, buf: op.buf, result }
        }));
        // Those need more blocks, and find this one on the disk.
        if !others.is_empty() {
            let mut queue = lock(&self.queue);
            let again = queue.waiting.entry(job).or_insert(Waiting { ops: Vec::new(), since: Some(Instant::now()) });
            again.ops.extend(others);
        }
        count
    }

    /// Ends a job, and gives the reads that wait for it back to the driver.
    fn release(&self, job: Job, to_network: bool) {
        let mut queue = lock(&self.queue);
        queue.running.remove(&job);
        let waiting = queue.waiting.remove(&job);
        drop(queue);
        if let Some(waiting) = waiting {
            self.give_back(waiting.ops, to_network);
        }
    }

    fn give_back(&self, ops: Vec<ReadOp>, to_network: bool) {
        lock(&self.ready).extend(ops.into_iter().map(|op| (op, to_network)));
        self.waker.wake();
    }
}
