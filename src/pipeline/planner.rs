//! The I/O thread: plans batches, brings bytes from storage, hands them on. It alone takes permits, and it alone
//! drives the reader; it sleeps only in [`Reader::wait`], which a completion or a wake ends.

use super::Core;
use super::chunks::{Chunks, Home};
use super::exchange::Start;
use super::fetch::{Fetch, Whose};
use super::reads::{Begun, Reads};
use super::sample::Samples;
use super::task::{Job, Run, Sample};
use super::watchdog::Doing;
use crate::error::{Error, ErrorKind, Stage};
use crate::memory::{ByteRing, FreeSlot, Region, Ticket};
use crate::meter::{Stay, Work, planner};
use crate::storage::{Completion, PageCache, Reader};
use crossbeam_channel::Receiver;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Share of rows that ask the page cache while it is thought to be cold: one in so many.
const PROBE_ONE_IN: u32 = 16;
/// Lookups after which the share of hits is believed.
const EVIDENCE: u64 = 8;
/// After planning rows for so many nanoseconds the I/O thread sends what it has to the reader and takes what has come, before
/// it goes on: an order or an index that takes long must not keep storage idle.
const PLANNING: u64 = 100_000;
/// At the end, reads in flight get this long to complete.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// What the I/O thread owns besides the core.
pub(crate) struct IoSide {
    pub(crate) frees: Receiver<FreeSlot>,
    pub(crate) idle: Receiver<Box<Sample>>,
    pub(crate) ring: Option<ByteRing>,
    /// Where the memory of chunks is, for datasets in chunks, and how many buffers there are.
    pub(crate) chunks: Option<(Arc<Home>, usize)>,
    /// What the reader may register with the kernel.
    pub(crate) regions: Vec<Arc<Region>>,
}

/// The thread's whole state.
pub(crate) struct Planner {
    core: Arc<Core>,
    frees: Receiver<FreeSlot>,
    regions: Vec<Arc<Region>>,
    free: VecDeque<FreeSlot>,
    epochs: Epochs,
    /// Rows of batches that are read without a look at the page cache, oldest first.
    cold: VecDeque<Run>,
    reads: Reads,
    /// For datasets in chunks; and those that must be read, in the order in which they are needed.
    chunks: Option<Chunks>,
    to_read: VecDeque<Fetch>,
    warmth: Warmth,
    /// What is stuck waits for bytes or permits that decoding takes away, not for the reader.
    no_room: bool,
    /// The time, as of the last look at the clock.
    now: u64,
    /// The reader must not sleep: there may be more to plan.
    unplanned: bool,
    completions: Vec<Completion>,
    /// The reader broke, and it has been said.
    broken: bool,
    ending: bool,
}

impl Planner {
    pub(crate) fn new(core: Arc<Core>, reader: Box<dyn Reader>, side: IoSide, permits: usize) -> Self {
        let IoSide { frees, idle, ring, chunks, regions } = side;
        Self {
            frees,
            regions,
            free: VecDeque::new(),
            epochs: Epochs::default(),
            cold: VecDeque::new(),
            completions: Vec::with_capacity(reader.depth()),
            reads: Reads::new(core.clone(), reader, ring, permits, idle),
            to_read: VecDeque::new(),
            chunks: chunks.map(|(home, buffers)| Chunks::new(home, buffers)),
            warmth: Warmth::new(&core),
            no_room: false,
            now: 0,
            unplanned: false,
            broken: false,
            ending: false,
            core,
        }
    }

    /// Runs until it is told to end.
    pub(crate) fn run(&mut self) {
        // Here, since a ring belongs to the thread that drives it. Without registration everything works all the same.
        let refused = self.reads.reader.register(&self.regions);
        let core = self.core.clone();
        if let Some(why) = refused.filter(|_| self.reads.reader.name() == "io_uring") {
            let _ = core.unregistered.set(why);
        }
        let meters = &core.meters;
        self.now = meters.clock.now();
        let mut woke = self.now;
        meters.planner.enter(planner::BUSY, self.now);
        while !self.ending {
            core.watch.planner.begin(Doing::Planning, None);
            self.listen();
            self.plan();
            self.advance_chunks();
            self.issue();
            self.now = meters.clock.now();
            meters.reading.change(self.reads.reader.in_flight() as u64, self.now);
            meters.no_room.enter(usize::from(self.no_room), self.now);
            if !self.unplanned {
                let state = if self.lacks_slots() { planner::NO_SLOT } else { planner::WAITING };
                meters.planner.enter(state, self.now);
            }
            meters.rings.planner.note(woke, self.now, Work::Plan);
            // Whatever happened since rings the bell, so this returns; nothing more can be done before.
            let looks_once = self.ending || self.unplanned;
            core.watch.planner.end();
            self.reads.reader.wait(&mut self.completions, looks_once.then_some(Duration::ZERO));
            self.now = meters.clock.now();
            woke = self.now;
            meters.planner.enter(planner::BUSY, self.now);
            self.complete();
        }
        self.end();
    }

    /// There is more to plan, and no slot for it.
    fn lacks_slots(&self) -> bool {
        self.free.is_empty() && self.epochs.run.is_some()
    }

    fn listen(&mut self) {
        let to_io = &self.core.to_io;
        self.ending = to_io.shutdown.load(Ordering::Acquire);
        while let Ok(slot) = self.frees.try_recv() {
            self.free.push_back(slot);
        }
        while let Some(start) = to_io.starts.pop() {
            self.epochs.waiting.push_back(start);
        }
        self.reads.listen();
        while let Some(fetch) = to_io.chunk_misses.pop() {
            self.to_read.push_back(fetch);
        }
    }

    /// Gives every free slot the next batch.
    fn plan(&mut self) {
        while !self.free.is_empty() {
            let Some(next) = self.epochs.next_batch() else { return };
            let slot = self.free.pop_front().expect("checked above");
            slot.times().begin(self.now);
            self.core.meters.move_slot(slot.times(), Stay::Filling, self.now);
            let (job, ticket) = match next {
                Next::Batch(job, ticket) => (job, ticket),
                Next::Failed(ticket, error) => {
                    slot.begin(ticket, 1, 1).fail_row(error);
                    continue;
                }
            };
            let Some(mut run) = begin_batch(&self.core.samples, slot, job, ticket) else { continue };
            let to_workers = &self.core.to_workers;
            if let Some(chunks) = &mut self.chunks {
                chunks.plan(run);
            } else if self.warmth.look_first() {
                to_workers.fill(run, None);
            } else {
                let probes = self.warmth.probes(ticket.sequence, run.len());
                if probes > 0 {
                    to_workers.fill(run.take(probes), None);
                }
                if run.len() > 0 {
                    self.cold.push_back(run);
                }
            }
        }
    }

    /// Hands on pieces whose chunks are there, and has the next chunks opened.
    fn advance_chunks(&mut self) {
        let Self { core, chunks: Some(chunks), to_read, reads, warmth, .. } = self else { return };
        for opening in chunks.advance(|run, held| core.to_workers.fill(run, Some(held))) {
            let mut sample = Box::<Sample>::default();
            let asked = core.samples.ask_chunk(opening.chunk(), &mut sample).and_then(|()| reads.check(&sample));
            let fetch = Fetch::new(Whose::Chunk(opening), sample);
            match asked {
                Err(error) => reads.fail(fetch, error),
                Ok(()) if warmth.look_first_in_chunk() => core.to_workers.finish(fetch),
                Ok(()) => to_read.push_back(fetch),
            }
        }
    }

    /// Starts as many reads as there is room for.
    fn issue(&mut self) {
        self.unplanned = false;
        let began = self.now;
        loop {
            if !self.reads.submit() {
                return;
            }
            // Not before one more row is on its way.
            if self.now.saturating_sub(began) > PLANNING {
                self.unplanned = true;
                return;
            }
            let full = self.reads.is_full();
            if full || !self.reads.can_begin() {
                let waits = self.reads.is_stuck() || !self.cold.is_empty() || !self.core.to_io.misses.is_empty();
                self.no_room = waits && !full;
                return;
            }
            let begun = self.begin_next();
            self.no_room = matches!(begun, Some(Begun::NoRoom));
            if !matches!(begun, Some(Begun::Yes)) {
                return;
            }
        }
    }

    /// Begins a chunk or row: the one that waits for room, else one that the page cache did not have (they belong to batches that
    /// are almost there), else the next one. `None` when there is none.
    fn begin_next(&mut self) -> Option<Begun> {
        if let Some(fetch) = self.reads.take_stuck().or_else(|| self.to_read.pop_front()) {
            if fetch.whose.is_over() {
                self.reads.recycle(fetch);
                return Some(Begun::Yes);
            }
            return Some(self.reads.read(fetch, self.now));
        }
        let miss = self.core.to_io.misses.pop();
        let next = miss.or_else(|| match self.cold.front_mut() {
            Some(run) if run.len() > 1 && !run.is_cancelled() => Some(run.take(1)),
            _ => self.cold.pop_front(),
        });
        let run = next?;
        Some(if run.is_cancelled() { Begun::Yes } else { self.reads.begin(run, &mut self.now) })
    }

    fn complete(&mut self) {
        let core = self.core.clone();
        // First: who has received a batch finds all of its reads in the report.
        core.meters.note_reads(|| self.reads.reader.stats());
        let mut completions = std::mem::take(&mut self.completions);
        core.meters.reading.change(self.reads.reader.in_flight() as u64, self.now);
        for completion in completions.drain(..) {
            self.reads.complete(completion, self.now);
        }
        self.completions = completions;
        if let Some(error) = self.reads.reader.broken().filter(|_| !std::mem::replace(&mut self.broken, true)) {
            core.fail(error);
        }
    }

    /// Lets go of everything; reads in flight complete first, within a deadline.
    fn end(&mut self) {
        self.epochs = Epochs::default();
        self.cold.clear();
        self.reads.take_stuck();
        if let Some(chunks) = &mut self.chunks {
            chunks.clear();
        }
        self.to_read.clear();
        self.core.to_io.chunk_misses.clear();
        self.core.to_io.misses.clear();
        for op in std::mem::take(&mut self.reads.ops) {
            let result = Err(Error::new(ErrorKind::Cancelled, Stage::Read, ""));
            self.completions.push(Completion { tag: op.tag, buf: op.buf, result });
        }
        self.complete();
        self.reads.reader.cancel();
        let deadline = Instant::now() + SHUTDOWN;
        while self.reads.reader.in_flight() > 0 && Instant::now() < deadline {
            self.reads.reader.wait(&mut self.completions, Some(Duration::from_millis(50)));
            self.complete();
        }
        // What is still in flight stays with the reader, which leaks it and counts it. Until then this thread has been left
        // behind, and so it must be: a thread that has given the kernel reads that never end can never end itself.
    }
}

/// Starts the batch in `slot`; the rows that have a sample. Blank ones are finished here.
fn begin_batch(samples: &Samples, slot: FreeSlot, job: Arc<Job>, ticket: Ticket) -> Option<Run> {
    let (batches, batch) = (&job.batches, ticket.batch);
    let mut rows = slot.begin(ticket, batches.rows(batch), batches.valid(batch));
    let filled = batches.filled(batch);
    samples.place_packed(&job, batch, &mut rows, filled);
    if filled == rows.len() {
        return Some(Run { job, rows });
    }
    let with_samples = (filled > 0).then(|| rows.take(filled));
    rows.blank();
    with_samples.map(|rows| Run { job, rows })
}

/// The batches of the epochs that were asked for, in order.
#[derive(Default)]
struct Epochs {
    waiting: VecDeque<Start>,
    run: Option<EpochRun>,
}

/// The run of epochs that is being planned.
struct EpochRun {
    start: Start,
    job: Arc<Job>,
    epochs_done: u64,
    batch: u64,
    sequence: u64,
}

enum Next {
    Batch(Arc<Job>, Ticket),
    /// Why there is no batch. It goes in the batch's place: an error of one run is none of the loader's, and must not
    /// overtake the batches before it.
    Failed(Ticket, Error),
}

impl Epochs {
    /// The next batch of the run.
    fn next_batch(&mut self) -> Option<Next> {
        loop {
            if self.run.is_none() {
                let start = self.waiting.pop_front()?;
                let job = start.first.clone();
                let batch = job.batches.first();
                self.run = Some(EpochRun { start, job, epochs_done: 0, batch, sequence: 0 });
            }
            let run = self.run.as_mut()?;
            if run.job.is_cancelled() || run.epochs_done == run.start.epochs || run.sequence == run.start.batches {
                self.run = None;
                continue;
            }
            if run.batch < run.job.batches.end() {
                let ticket = run.job.ticket(run.sequence, run.batch);
                run.batch += 1;
                run.sequence += 1;
                return Some(Next::Batch(run.job.clone(), ticket));
            }
            run.epochs_done += 1;
            run.batch = 0;
            if run.epochs_done < run.start.epochs {
                match (run.start.next)(run.epochs_done) {
                    Ok(job) => run.job = job,
                    Err(error) => {
                        let epoch = run.job.epoch.saturating_add(1);
                        let ticket = Ticket { epoch, batch: 0, position: 0, ..run.job.ticket(run.sequence, 0) };
                        self.run = None;
                        return Some(Next::Failed(ticket, error));
                    }
                }
            }
        }
    }
}

/// Whether the page cache is likely to have what is planned.
struct Warmth {
    cache: Option<Arc<PageCache>>,
    /// Everything lies in memory.
    in_memory: bool,
    /// Hits and misses of the page cache when it was last judged, and the judgement.
    seen: (u64, u64),
    warm: bool,
    /// Chunks that were opened, to let one in so many ask a cold page cache.
    chunks: u64,
}

impl Warmth {
    fn new(core: &Core) -> Self {
        let in_memory = core.samples.sources.total_bytes() == 0;
        Self { cache: core.cache.clone(), in_memory, seen: (0, 0), warm: true, chunks: 0 }
    }

    /// Whether workers look rows up before storage is asked.
    fn look_first(&mut self) -> bool {
        if self.in_memory {
            return true;
        }
        let Some(cache) = &self.cache else { return false };
        let (hits, misses) = (cache.hits(), cache.misses());
        let (new_hits, new_misses) = (hits - self.seen.0, misses - self.seen.1);
        if new_hits + new_misses >= EVIDENCE {
            self.seen = (hits, misses);
            self.warm = new_hits * u64::from(PROBE_ONE_IN) >= new_hits + new_misses;
        }
        self.warm
    }

    /// The same for a chunk; now and then one asks also while the cache is thought to be cold.
    fn look_first_in_chunk(&mut self) -> bool {
        self.chunks += 1;
        let probe = self.cache.is_some() && self.chunks.is_multiple_of(u64::from(PROBE_ONE_IN));
        self.look_first() || probe
    }

    /// Rows of a batch that ask the page cache all the same, so that it is noticed when it warms.
    fn probes(&self, sequence: u64, count: u32) -> u32 {
        if self.cache.is_some() { probes(sequence, count) } else { 0 }
    }
}

/// Rows of a batch that ask the page cache while it is thought to be cold: of small batches only some ask at all.
fn probes(sequence: u64, count: u32) -> u32 {
    if count >= PROBE_ONE_IN {
        return count / PROBE_ONE_IN;
    }
    u32::from(sequence.is_multiple_of(u64::from(PROBE_ONE_IN / count)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn about_one_row_in_sixteen_asks_a_cold_cache_whatever_the_batch_size() {
        for count in [1_u32, 2, 5, 15, 16, 100, 4096] {
            let asked: u32 = (0..480).map(|sequence| probes(sequence, count)).sum();
            let share = f64::from(asked) / (480.0 * f64::from(count));
            assert!((0.03..0.08).contains(&share), "{count}: {share}");
        }
    }
}
