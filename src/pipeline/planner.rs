//! The I/O thread plans batches, reads bytes from storage and passes them on. Only this thread
//! takes permits and drives the reader. It sleeps only in [`Reader::wait`], which returns on a
//! completion or a wake.

use super::Core;
use super::chunks::{Chunks, Home};
use super::exchange::Start;
use super::fetch::{Fetch, Whose};
use super::reads::{Begun, Reads};
use super::sample::Samples;
use super::task::{EpochJob, RowRun, Sample};
use super::watchdog::Doing;
use crossbeam_channel::Receiver;
use feedline_base::error::{Error, ErrorKind, Stage};
use feedline_core::dataset::Parts;
use feedline_core::memory::{ByteRing, FreeSlot, Region, Ticket};
use feedline_reader::{Completion, PageCache, Reader};
use feedline_report::meter::{Planning, Stay, Work};
use feedline_store::Announcer;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// While the page cache counts as cold, one row in this many is still looked up in it.
const PROBE_ONE_IN: u32 = 16;
/// The share of hits is evaluated after this many lookups.
const EVIDENCE: u64 = 8;
/// After planning rows for this many nanoseconds, the I/O thread submits operations and takes
/// completions before it continues. So a slow order or index does not keep storage idle.
const PLANNING: u64 = 100_000;
/// Deadline for reads in flight at shutdown.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// State that the I/O thread owns in addition to the core.
pub(crate) struct IoSide {
    pub(crate) frees: Receiver<FreeSlot>,
    pub(crate) idle: Receiver<Box<Sample>>,
    pub(crate) ring: Option<ByteRing>,
    /// For chunked datasets: the pool of chunk buffers, and its size.
    pub(crate) chunks: Option<(Arc<Home>, usize)>,
    /// Regions that the reader may register with the kernel.
    pub(crate) regions: Vec<Arc<Region>>,
}

/// The state of the I/O thread.
pub(crate) struct Planner {
    core: Arc<Core>,
    frees: Receiver<FreeSlot>,
    regions: Vec<Arc<Region>>,
    free: VecDeque<FreeSlot>,
    epochs: Epochs,
    /// Rows to read without a lookup in the page cache, oldest batch first.
    cold: VecDeque<RowRun>,
    reads: Reads,
    /// For chunked datasets: the sequence of chunks, and the chunks to read in that sequence.
    chunks: Option<Chunks>,
    to_read: VecDeque<Fetch>,
    warmth: Warmth,
    /// Reads wait for ring bytes or permits, which decoding frees, not the reader.
    no_room: bool,
    /// The time when the clock was last read.
    now: u64,
    /// The reader must not sleep, because there may be more to plan.
    unplanned: bool,
    completions: Vec<Completion>,
    /// The reader is broken, and the error was reported.
    broken: bool,
    ending: bool,
}

impl Planner {
    pub(crate) fn new(
        core: Arc<Core>,
        reader: Box<dyn Reader>,
        side: IoSide,
        permits: usize,
    ) -> Self {
        let IoSide {
            frees,
            idle,
            ring,
            chunks,
            regions,
        } = side;
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

    /// Runs until shutdown.
    pub(crate) fn run(&mut self) {
        // Registration happens here because an io_uring belongs to the thread that drives it.
        // Registration is optional.
        let core = self.core.clone();
        if let Some(why) = self.reads.reader.register(&self.regions) {
            let _ = core.unregistered.set(why);
        }
        let meters = &core.meters;
        self.now = meters.clock.now();
        let mut woke = self.now;
        meters.planner.enter(Planning::Busy, self.now);
        while !self.ending {
            core.watch.planner.begin(Doing::Planning, None);
            self.listen();
            self.plan();
            self.advance_chunks();
            self.issue();
            self.now = meters.clock.now();
            meters
                .storage
                .reading
                .change(self.reads.reader.in_flight() as u64, self.now);
            meters.storage.no_room.enter(self.no_room, self.now);
            if !self.unplanned {
                let state = if self.lacks_slots() {
                    Planning::NoSlot
                } else {
                    Planning::Waiting
                };
                meters.planner.enter(state, self.now);
            }
            meters.rings.planner.note(woke, self.now, Work::Plan);
            // Every event since `listen` wakes the reader, so `wait` returns. Until then there is
            // nothing more to do.
            let looks_once = self.ending || self.unplanned;
            core.watch.planner.end();
            self.reads
                .reader
                .wait(&mut self.completions, looks_once.then_some(Duration::ZERO));
            self.now = meters.clock.now();
            woke = self.now;
            meters.planner.enter(Planning::Busy, self.now);
            self.complete();
        }
        self.end();
    }

    /// Whether there are more batches to plan but no free slot.
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
            let Some(next) = self.epochs.next_batch() else {
                return;
            };
            let slot = self.free.pop_front().expect("checked above");
            slot.times().begin(self.now);
            self.core
                .meters
                .move_slot(slot.times(), Stay::Filling, self.now);
            let (job, ticket) = match next {
                Next::Batch(job, ticket) => (job, ticket),
                Next::Failed(ticket, error) => {
                    slot.begin(ticket, 1, 1).fail_row(error);
                    continue;
                }
            };
            let Some(mut run) = begin_batch(&self.core.samples, slot, job, ticket) else {
                continue;
            };
            if let Some(announcer) = &self.core.announcer {
                announce(announcer, &self.core.samples, &run);
            }
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

    /// Passes pieces of batches whose chunks are open to the workers, and starts to open the next
    /// chunks.
    fn advance_chunks(&mut self) {
        let Self {
            core,
            chunks: Some(chunks),
            to_read,
            reads,
            warmth,
            ..
        } = self
        else {
            return;
        };
        for opening in chunks.advance(|run, held| core.to_workers.fill(run, Some(held))) {
            let mut sample = Box::<Sample>::default();
            let asked = core
                .samples
                .ask_chunk(opening.chunk(), &mut sample)
                .and_then(|()| reads.check(&sample));
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
            // Checked here, after `submit`, so that each call starts the reads of at least one more
            // row.
            if self.now.saturating_sub(began) > PLANNING {
                self.unplanned = true;
                return;
            }
            let full = self.reads.is_full();
            if full || !self.reads.can_begin() {
                let waits = self.reads.is_stuck()
                    || !self.cold.is_empty()
                    || !self.core.to_io.misses.is_empty();
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

    /// Begins a chunk or row; `None` if there is none. A fetch that waits for ring bytes goes
    /// first, then chunks to read. Misses of the page cache follow, because their batches are
    /// almost complete. The other planned rows come last.
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
        Some(if run.is_cancelled() {
            Begun::Yes
        } else {
            self.reads.begin(run, &mut self.now)
        })
    }

    fn complete(&mut self) {
        let core = self.core.clone();
        // Read statistics are updated first, so that the receiver of a batch finds all its reads in
        // the report.
        core.meters.note_reads(|| self.reads.reader.stats());
        let mut completions = std::mem::take(&mut self.completions);
        core.meters
            .storage
            .reading
            .change(self.reads.reader.in_flight() as u64, self.now);
        for completion in completions.drain(..) {
            self.reads.complete(completion, self.now);
        }
        self.completions = completions;
        if let Some(error) = self
            .reads
            .reader
            .broken()
            .filter(|_| !std::mem::replace(&mut self.broken, true))
        {
            core.fail(error);
        }
    }

    /// Drops all work. Reads in flight complete first, within a deadline.
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
            self.completions.push(Completion {
                tag: op.tag,
                buf: op.buf,
                result,
            });
        }
        self.complete();
        self.reads.reader.cancel();
        let deadline = Instant::now() + SHUTDOWN;
        while self.reads.reader.in_flight() > 0 && Instant::now() < deadline {
            self.reads
                .reader
                .wait(&mut self.completions, Some(Duration::from_millis(50)));
            self.complete();
        }
        // Reads that are still in flight stay with the reader, which leaks and counts them. By then
        // this thread counts as abandoned, which is correct: a thread whose reads never complete
        // can never end.
    }
}

/// Informs the cache of the reads that are one window ahead of the batch. Errors are ignored here,
/// because the reads report them later.
fn announce(announcer: &Announcer, samples: &Samples, run: &RowRun) {
    let job = &run.job;
    let ticket = run.rows.ticket();
    let positions = (0..run.len()).map(|row| job.batches.position(ticket.batch, row));
    for id in job.order.ahead(positions, job.batches.step()) {
        let mut parts = Parts::new();
        if samples.parts(id, &mut parts).is_ok() {
            parts
                .iter()
                .filter_map(|one| one.part.extent())
                .for_each(|extent| announcer.announce(&extent));
        }
    }
}

/// Starts the batch in `slot` and returns the rows that have a sample. Blank rows are finished
/// here.
fn begin_batch(
    samples: &Samples,
    slot: FreeSlot,
    job: Arc<EpochJob>,
    ticket: Ticket,
) -> Option<RowRun> {
    let batches = &job.batches;
    let batch = ticket.batch;
    let mut rows = slot.begin(ticket, batches.rows(batch), batches.valid(batch));
    let filled = batches.filled(batch);
    samples.place_packed(&job, batch, &mut rows, filled);
    if filled == rows.len() {
        return Some(RowRun { job, rows });
    }
    let with_samples = (filled > 0).then(|| rows.take(filled));
    rows.blank();
    with_samples.map(|rows| RowRun { job, rows })
}

/// The batches of all started epochs, in order.
#[derive(Default)]
struct Epochs {
    waiting: VecDeque<Start>,
    run: Option<EpochRun>,
}

/// The run of epochs that the planner works on.
struct EpochRun {
    start: Start,
    job: Arc<EpochJob>,
    batch: u64,
    sequence: u64,
}

enum Next {
    Batch(Arc<EpochJob>, Ticket),
    /// The reason why there is no batch. The error is delivered instead of the batch: it belongs to
    /// one run, not to the loader, and must not overtake earlier batches.
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
                self.run = Some(EpochRun {
                    start,
                    job,
                    batch,
                    sequence: 0,
                });
            }
            let run = self.run.as_mut()?;
            if run.job.is_cancelled() || run.sequence == run.start.batches {
                self.run = None;
                continue;
            }
            if run.batch < run.job.batches.end() {
                let ticket = run.job.ticket(run.sequence, run.batch);
                run.batch += 1;
                run.sequence += 1;
                return Some(Next::Batch(run.job.clone(), ticket));
            }
            match (run.start.next)() {
                Ok(job) => (run.batch, run.job) = (job.batches.first(), job),
                Err(error) => {
                    let epoch = run.job.epoch.saturating_add(1);
                    let ticket = Ticket {
                        epoch,
                        batch: 0,
                        position: 0,
                        ..run.job.ticket(run.sequence, 0)
                    };
                    self.run = None;
                    return Some(Next::Failed(ticket, error));
                }
            }
        }
    }
}

/// Whether the page cache is likely to hold the planned rows.
struct Warmth {
    cache: Option<Arc<PageCache>>,
    /// All sources are in memory.
    in_memory: bool,
    /// The page cache's numbers of hits and misses at the last estimate, and the estimate itself.
    seen: (u64, u64),
    warm: bool,
    /// Number of opened chunks; decides which of them are looked up in a cold page cache.
    chunks: u64,
}

impl Warmth {
    fn new(core: &Core) -> Self {
        let in_memory = core.samples.sources.total_bytes() == 0;
        Self {
            cache: core.cache.clone(),
            in_memory,
            seen: (0, 0),
            warm: true,
            chunks: 0,
        }
    }

    /// Whether workers look up rows before they are read from storage.
    fn look_first(&mut self) -> bool {
        if self.in_memory {
            return true;
        }
        let Some(cache) = &self.cache else {
            return false;
        };
        let hits = cache.hits();
        let misses = cache.misses();
        let new_hits = hits - self.seen.0;
        let new_misses = misses - self.seen.1;
        if new_hits + new_misses >= EVIDENCE {
            self.seen = (hits, misses);
            self.warm = new_hits * u64::from(PROBE_ONE_IN) >= new_hits + new_misses;
        }
        self.warm
    }

    /// Like [`look_first`](Self::look_first), for a chunk. One chunk in [`PROBE_ONE_IN`] is also
    /// looked up in a cold page cache.
    fn look_first_in_chunk(&mut self) -> bool {
        self.chunks += 1;
        let probe = self.cache.is_some() && self.chunks.is_multiple_of(u64::from(PROBE_ONE_IN));
        self.look_first() || probe
    }

    /// Number of rows of a batch to look up in a cold page cache, so that the planner notices when
    /// the cache becomes warm.
    fn probes(&self, sequence: u64, count: u32) -> u32 {
        if self.cache.is_some() {
            probes(sequence, count)
        } else {
            0
        }
    }
}

/// Number of rows of a batch to look up in a cold page cache. Only some of the small batches have
/// such a row.
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
    fn one_row_in_sixteen_probes_a_cold_cache_at_any_batch_size() {
        for count in [1_u32, 2, 5, 15, 16, 100, 4096] {
            let asked: u32 = (0..480).map(|sequence| probes(sequence, count)).sum();
            let share = f64::from(asked) / (480.0 * f64::from(count));
            assert!((0.03..0.08).contains(&share), "{count}: {share}");
        }
    }
}
