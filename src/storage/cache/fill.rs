//! Fills a cache: the queue of blocks, the reads that wait for them, and the threads that download.
//!
//! ```text
//! route ─┬─ first read of an object ────────────────► waits ──► a thread looks the object up ──► route again
//!        ├─ missing block, and most of it is wanted ► waits ──► download ──► completed from memory ──► kept
//!        └─ missing block, and little of it is wanted ► network; the block is downloaded when no read waits
//! ```
//!
//! Limits: a thread holds one block in memory. A read waits at most 4 × [`PATIENCE`] for disks and other processes; then
//! it goes to the network.

use super::config::{Cache, PATIENCE};
use super::dir::Dir;
use super::entry::{Entry, Identity, State};
use super::kept::{Kept, Object};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::done::Done;
use crate::storage::{Completion, DROP_DEADLINE, Extent, ReadOp, ReaderOptions, SourceId, Sources, Waker, remote};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Downloads at a time, without a limit of memory.
const THREADS: usize = 8;

/// After a block was not kept, none is asked for for so long.
const REST: Duration = Duration::from_secs(10);

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

/// A block, or [`LOOKUP`] of an object.
type Job = (SourceId, u64);

/// In place of a block: find or make the object's files.
const LOOKUP: u64 = u64::MAX;

struct Shared {
    sources: Arc<Sources>,
    kept: Arc<Kept>,
    dir: Dir,
    /// Samples follow each other in their objects, so that whole blocks are soon used.
    dense: bool,
    patience: Option<Duration>,
    queue: Mutex<Queue>,
    changed: Condvar,
    done: Done,
    /// Reads that waited, and whether they go to the network in any case.
    ready: Mutex<Vec<(ReadOp, bool)>>,
    waker: Waker,
    stop: AtomicBool,
    /// Threads that download; those of them that have a block; those that write one.
    downloads: usize,
    busy: AtomicUsize,
    writers: AtomicUsize,
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
    later: VecDeque<Job>,
    waiting: HashMap<Job, Waiting>,
}

struct Waiting {
    ops: Vec<ReadOp>,
    /// Since when a disk or another process is waited for. A download has limits of its own.
    since: Option<Instant>,
}

impl Fill {
    /// The table for what a cache holds of `sources`.
    pub(crate) fn table(sources: &Sources, cache: &Cache) -> Arc<Kept> {
        Arc::new(Kept::new(sources.count(), cache.block))
    }

    /// The cache of `sources`, with their table. `waker`: wakes the driver.
    ///
    /// Errors: [`ErrorKind::Config`] for a folder that cannot be used.
    pub(crate) fn start(
        (sources, kept): (Arc<Sources>, Arc<Kept>),
        options: &ReaderOptions,
        cache: &Cache,
        waker: Waker,
    ) -> Result<Self> {
        let dir = Dir::open(cache).map_err(|error| {
            let message = format!("the folder cannot be a cache: {error}");
            Error::new(ErrorKind::Config, Stage::Build, message).with_path(&cache.dir)
        })?;
        let fits = |bytes: usize| (bytes as u64 / cache.block).clamp(1, THREADS as u64) as usize;
        let count = options.connections.map_or(THREADS, fits);
        let shared = Arc::new(Shared {
            kept,
            sources,
            dir,
            dense: options.dense,
            patience: options.patience,
            queue: Mutex::default(),
            changed: Condvar::new(),
            done: Done::new(0, Some(waker.clone())),
            ready: Mutex::default(),
            waker,
            stop: AtomicBool::new(false),
            downloads: count,
            busy: AtomicUsize::new(0),
            writers: AtomicUsize::new(0),
            full_until: AtomicU64::new(0),
            fails_until: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            started: Instant::now(),
        });
        let mut fill = Self { shared, threads: Vec::new() };
        for number in 0..=count {
            let shared = fill.shared.clone();
            let thread = std::thread::Builder::new().name(format!("feedline-fill-{number}"));
            let started = thread.spawn(move || shared.work(number > 0));
            fill.threads
                .push(started.map_err(|error| Error::os(Stage::Build, "cannot start a thread of the cache", error))?);
        }
        let watched = Arc::downgrade(&fill.shared);
        remote::spawn(async move {
            loop {
                remote::sleep(PATIENCE / 4).await;
                match watched.upgrade() {
                    Some(shared) if !shared.stop.load(Ordering::Relaxed) => shared.sweep(),
                    _ => return,
                }
            }
        })?;
        Ok(fill)
    }

    /// What is on the disk.
    pub(crate) fn kept(&self) -> &Arc<Kept> {
        &self.shared.kept
    }

    /// The place for a read of an object.
    pub(crate) fn route(&self, op: ReadOp) -> Route {
        self.shared.route(op)
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

    /// Bytes of blocks in memory.
    pub(crate) fn bytes(&self) -> usize {
        (self.threads.len() - 1) * self.shared.kept.block() as usize + self.shared.kept.table_bytes()
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // A thread that hangs in a disk keeps no buffer of a read.
        self.cancel();
        self.collect(&mut Vec::new());
        // Between a thread's look at `stop` and its sleep lies the lock.
        drop(lock(&self.shared.queue));
        self.shared.changed.notify_all();
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

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl Shared {
    fn route(&self, op: ReadOp) -> Route {
        let extent = op.extent;
        if extent.len == 0 || self.sources.check(&extent).is_err() {
            return Route::Network(op);
        }
        let mut blocks = self.kept.blocks(extent.offset, extent.len);
        let object = match self.kept.object(extent.source.index()) {
            Some(Some(object)) => object,
            Some(None) => return Route::Network(op),
            None if self.rests(&self.fails_until) => return Route::Network(op),
            None => return self.wait_for(op, LOOKUP),
        };
        let Some(first) = blocks.find(|block| !object.has(*block)) else { return Route::Disk(op) };
        // What a slow disk does not take now, another epoch may bring.
        if self.rests(&self.full_until) || self.rests(&self.fails_until) || self.is_disk_slow() {
            return Route::Network(op);
        }
        let rest = blocks.filter(|block| !object.has(*block));
        let is_most = self.is_most(&extent, first);
        if is_most && !object.is_unproven(first) && self.busy.load(Ordering::Relaxed) >= self.downloads {
            // The network is as fast as a download here, and has more requests to give.
            return Route::Network(op);
        }
        match self.dense || is_most || object.is_unproven(first) {
            true => {
                self.ask(object, extent.source, rest);
                self.wait_for(op, first)
            }
            false => {
                self.ask(object, extent.source, std::iter::once(first).chain(rest));
                Route::Network(op)
            }
        }
    }

    /// Whether a read wants so much of a block that its download costs little more.
    fn is_most(&self, extent: &Extent, block: u64) -> bool {
        let len = self.sources.len_of(extent.source);
        let block_len = self.kept.block().min(len - block * self.kept.block());
        extent.len >= block_len / 4
    }

    /// Queues blocks that no read waits for.
    fn ask(&self, object: &Object, source: SourceId, blocks: impl Iterator<Item = u64>) {
        for block in blocks.filter(|block| object.ask(*block)) {
            lock(&self.queue).later.push_back((source, block));
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
        queue.waiting.insert(job, Waiting { ops: vec![op], since: Some(Instant::now()) });
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
        (self.started.elapsed().as_millis() as u64) < until.load(Ordering::Relaxed)
    }

    /// Something is not kept. For a while no block is asked for; where the disk fails, nothing is looked up either.
    fn rest(&self, why: &str, error: &io::Error) {
        self.kept.dropped(format!("{why}: {error}"));
        let until = if is_full(error) { &self.full_until } else { &self.fails_until };
        until.fetch_max((self.started.elapsed() + REST).as_millis() as u64, Ordering::Relaxed);
    }

    fn work(&self, downloads: bool) {
        let mut buffer = Vec::new();
        while let Some(job) = self.next(downloads) {
            self.busy.fetch_add(1, Ordering::Relaxed);
            if catch_unwind(AssertUnwindSafe(|| self.run(job, &mut buffer))).is_err() {
                // A bug of this crate. It must not cost a read; nothing more is kept.
                self.fails_until.store(u64::MAX, Ordering::Relaxed);
                self.release(job, true);
            }
            self.busy.fetch_sub(1, Ordering::Relaxed);
            self.progress();
        }
    }

    /// Threads and downloads move, so reads in the queue may wait.
    fn progress(&self) {
        self.moved.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn next(&self, downloads: bool) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            let lookup = queue.lookups.pop_front();
            if let Some(job) = lookup {
                return Some(job);
            }
            if downloads && let Some(job) = queue.urgent.pop_front().or_else(|| queue.later.pop_front()) {
                return Some(job);
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, job: Job, buffer: &mut Vec<u8>) {
        let (source, block) = job;
        let identity = self.identity(source);
        if block == LOOKUP {
            match identity {
                Some(identity) => self.look_up(source, &identity),
                None => {
                    self.kept.dropped("the store names no version, or the URL is too long".into());
                    self.kept.set(source.index(), None, 0);
                }
            }
            return self.release(job, self.kept.object(source.index()).is_none());
        }
        let (Some(identity), Some(Some(object))) = (identity, self.kept.object(source.index())) else {
            return self.release(job, true);
        };
        let mut fill = || {
            let folder = object.path.parent().unwrap_or(&object.path);
            match Entry::find(folder, &identity)? {
                Some((entry, path)) if path == object.path && entry.inode == object.inode => {
                    self.fill(job, &entry, &identity, buffer)
                }
                _ => Err(io::ErrorKind::NotFound.into()),
            }
        };
        match fill() {
            Ok(Some(written)) => {
                object.set(block);
                if written > 0 {
                    self.kept.wrote(written);
                }
                self.release(job, false);
            }
            Ok(None) => {
                object.forget(block);
                self.release(job, true);
            }
            Err(error) => {
                match error.kind() {
                    io::ErrorKind::NotFound => {
                        self.kept.lose(source.index());
                        self.kept.dropped("the cache's file is gone".into());
                    }
                    _ => self.rest("a block cannot be written", &error),
                }
                object.forget(block);
                self.release(job, true);
            }
        }
    }

    fn identity(&self, source: SourceId) -> Option<Identity> {
        let pin = self.sources.pin(source).filter(|_| self.sources.object(source).is_ok_and(|it| it.is_pinned()))?;
        let (mut url, len) = (Vec::new(), self.sources.len_of(source));
        self.sources.path_into(source, &mut url);
        Identity::new(&url, &pin, len, self.kept.block())
    }

    /// Finds or makes the files of an object, and what they hold.
    fn look_up(&self, source: SourceId, identity: &Identity) {
        let found = || -> io::Result<(Entry, PathBuf, Vec<State>)> {
            let folder = self.dir.folder(&self.sources.path(source))?;
            let (entry, path) = match Entry::find(&folder, identity)? {
                Some(found) => found,
                None => {
                    let removed = self.dir.reserve(identity.map_bytes())?;
                    self.kept.removed(removed);
                    let made = Entry::make(&folder, identity);
                    match made {
                        Ok(_) => self.dir.written(identity.map_bytes()),
                        Err(_) => self.dir.release(identity.map_bytes()),
                    }
                    made?
                }
            };
            entry.touch();
            let states = entry.states(identity)?;
            Ok((entry, path, states))
        };
        match found() {
            Ok((entry, path, states)) => {
                let object = self.kept.set(source.index(), Some((path, entry.inode)), identity.len);
                // Another lookup may have been faster, and found another file.
                let Some(object) = object.filter(|object| object.inode == entry.inode) else { return };
                for (state, block) in states.iter().zip(0..) {
                    match state {
                        State::Whole => object.set(block),
                        State::Unproven(_) => object.doubt(block),
                        State::Missing => {}
                    }
                }
            }
            // A full cache has no room for the object in this run; others are looked up.
            Err(error) if error.kind() == io::ErrorKind::InvalidData || is_full(&error) => {
                self.kept.dropped(format!("an object has no file: {error}"));
                self.kept.set(source.index(), None, 0);
            }
            // It may pass: the next read after the rest looks again.
            Err(error) => self.rest("an object has no file", &error),
        }
    }

    /// Brings one block to the disk; gives the bytes that it wrote. `None`: another process downloads it, or the network
    /// failed.
    fn fill(&self, job: Job, entry: &Entry, identity: &Identity, buffer: &mut Vec<u8>) -> io::Result<Option<u64>> {
        let block = job.1;
        let started = Instant::now();
        while !entry.claim(block) {
            if entry.state(identity, block)? == State::Whole {
                return Ok(Some(0));
            }
            let waits = lock(&self.queue).waiting.contains_key(&job);
            if !waits || started.elapsed() > PATIENCE || self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            std::thread::sleep(LOOK);
        }
        let state = entry.state(identity, block)?;
        match state {
            State::Whole => return Ok(Some(0)),
            State::Unproven(crc) if entry.prove(identity, block, crc, buffer)? => {
                let reads = self.serve(job, buffer);
                self.kept.hit(reads);
                return Ok(Some(0));
            }
            State::Unproven(_) | State::Missing => {}
        }
        // A block that was wrong has its room.
        let len = identity.block_len(block);
        let room = if state == State::Missing { len.next_multiple_of(4096) } else { 0 };
        let removed = self.dir.reserve(room)?;
        self.kept.removed(removed);
        if let Err(error) = self.download(job, len, buffer) {
            self.dir.release(room);
            self.fail(job, &error);
            return Ok(None);
        }
        let reads = self.serve(job, buffer);
        self.kept.miss(reads);
        self.writers.fetch_add(1, Ordering::Relaxed);
        let kept = entry.keep(identity, block, buffer);
        self.writers.fetch_sub(1, Ordering::Relaxed);
        kept.inspect_err(|_| self.dir.release(room))?;
        self.dir.written(room);
        Ok(Some(len))
    }

    fn download(&self, (source, block): Job, len: u64, buffer: &mut Vec<u8>) -> Result<()> {
        if let Some(waiting) = lock(&self.queue).waiting.get_mut(&(source, block)) {
            waiting.since = None;
        }
        let start = block * self.kept.block();
        // The reads' own requests follow if this one brings nothing: both fit the stall deadline.
        let patience = self.patience.map(|patience| patience / 2);
        let object = self.sources.object(source)?;
        *buffer = object.bring(start..start + len, patience, std::mem::take(buffer), &self.stop)?;
        Ok(())
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

    /// Gives the reads that wait for a block back to the driver.
    fn release(&self, job: Job, to_network: bool) {
        let Some(waiting) = lock(&self.queue).waiting.remove(&job) else { return };
        self.give_back(waiting.ops, to_network);
    }

    fn give_back(&self, ops: Vec<ReadOp>, to_network: bool) {
        lock(&self.ready).extend(ops.into_iter().map(|op| (op, to_network)));
        self.waker.wake();
    }

    /// Sends reads to the network whose disk or process does not answer.
    fn sweep(&self) {
        let moved = self.started + Duration::from_millis(self.moved.load(Ordering::Relaxed));
        let late = |waiting: &Waiting| {
            let since = |since: Instant| since.max(moved).elapsed() > PATIENCE || since.elapsed() > 4 * PATIENCE;
            waiting.since.is_some_and(since)
        };
        let mut queue = lock(&self.queue);
        let late: Vec<_> = queue.waiting.iter().filter(|(_, waiting)| late(waiting)).map(|(job, _)| *job).collect();
        let ops: Vec<_> = late.iter().filter_map(|job| queue.waiting.remove(job)).flat_map(|late| late.ops).collect();
        drop(queue);
        if !ops.is_empty() {
            self.rest("a read waited too long", &io::ErrorKind::TimedOut.into());
            self.give_back(ops, true);
        }
    }
}
