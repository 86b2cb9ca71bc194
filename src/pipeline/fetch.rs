//! The I/O thread: plans batches, brings bytes from storage, hands them on. It alone takes permits, and it alone
//! drives the reader; it sleeps only in [`Reader::wait`], which a completion or a wake ends.

use super::chunks::{Chunks, Opening};
use super::pending::{Pending, Piece};
use super::watchdog::Doing;
use super::work::{self, decode_row};
use super::{Core, IoSide, Job, Start, ticket};
use crate::dataset::{Part, Parts};
use crate::decode::Scratch;
use crate::error::{Error, ErrorKind, Result, Stage, panicked};
use crate::memory::{FreeSlot, IoBuf, Rows, Ticket};
use crate::meter::{Stay, Work, planner};
use crate::storage::{Completion, Extent, ReadOp, Reader, may_pass};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Samples of which at most this many bytes must be copied are finished by the I/O thread itself: a hop to a worker
/// costs more than the copy.
const COPY_HERE: usize = 64 << 10;
/// Share of rows that ask the page cache while it is thought to be cold: one in so many.
const PROBE_ONE_IN: u32 = 16;
/// Lookups after which the share of hits is believed.
const EVIDENCE: u64 = 8;
/// Marks the tags of reads of chunks: slot and piece stand below.
const CHUNK_TAG: u64 = 1 << 63;
/// After planning rows for so many nanoseconds the I/O thread sends what it has to the reader and takes what has come, before
/// it goes on: an order or an index that takes long must not keep storage idle.
const PLANNING: u64 = 100_000;
/// At the end, reads in flight get this long to complete.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// The thread's whole state.
pub(crate) struct Io {
    core: Arc<Core>,
    reader: Box<dyn Reader>,
    side: IoSide,
    free: VecDeque<FreeSlot>,
    runs: VecDeque<Start>,
    run: Option<Run>,
    /// Rows of batches that are read without a look at the page cache, oldest first.
    direct: VecDeque<(Arc<Job>, Rows)>,
    /// The row that waits for room or for an entry; everything else waits behind it.
    stuck: Option<(Arc<Job>, Rows)>,
    flying: Vec<Option<Box<Pending>>>,
    vacant: Vec<usize>,
    #[allow(
        clippy::vec_box,
        reason = "entries move through queues and keep their own buffers: boxed once, at the start"
    )]
    idle: Vec<Box<Pending>>,
    /// For datasets in chunks.
    chunks: Option<Chunks>,
    /// Chunks that were opened, to let one in so many ask a cold page cache.
    chunks_begun: u64,
    /// What is stuck waits for bytes or entries that decoding takes away, not for the reader.
    no_room: bool,
    /// The time, as of the last look at the clock.
    now: u64,
    /// The reader must not sleep: there may be more to plan.
    unplanned: bool,
    /// Operations that the reader had no room for.
    ops: VecDeque<ReadOp>,
    completions: Vec<Completion>,
    scratch: Scratch,
    /// Whether completions need neither decoder nor transform.
    plain: bool,
    /// Hits and misses of the page cache when it was last judged, and the judgement.
    seen: (u64, u64),
    warm: bool,
    /// The reader broke, and it has been said.
    broken: bool,
    ending: bool,
}

/// The run of epochs that is being planned.
struct Run {
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

enum Begun {
    /// Reads are on their way, or the row is done already.
    Yes,
    /// No room for its bytes yet.
    NoRoom(Arc<Job>, Rows),
}

impl Io {
    pub(crate) fn new(core: Arc<Core>, reader: Box<dyn Reader>, side: IoSide, pending: usize) -> Self {
        let parts = core.recipe.handlers.len();
        let plain = core.recipe.maps.is_empty()
            && core.recipe.handlers.iter().all(|handler| !matches!(handler.how, super::recipe::How::Decode(_)));
        let depth = reader.depth();
        let chunks = side.chunks.as_ref().map(|(home, buffers)| Chunks::new(home.clone(), *buffers));
        Self {
            reader,
            side,
            chunks,
            chunks_begun: 0,
            free: VecDeque::new(),
            runs: VecDeque::new(),
            run: None,
            direct: VecDeque::new(),
            stuck: None,
            no_room: false,
            now: 0,
            unplanned: false,
            flying: (0..pending).map(|_| None).collect(),
            vacant: (0..pending).rev().collect(),
            idle: (0..pending).map(|_| Box::new(Pending::new(parts))).collect(),
            ops: VecDeque::with_capacity(parts),
            completions: Vec::with_capacity(depth),
            scratch: Scratch::default(),
            plain,
            seen: (0, 0),
            warm: true,
            broken: false,
            ending: false,
            core,
        }
    }

    /// Runs until it is told to end.
    pub(crate) fn run(&mut self) {
        // Here, since a ring belongs to the thread that drives it. Without registration everything works all the same.
        let refused = self.reader.register(&self.side.regions);
        let core = self.core.clone();
        if let Some(why) = refused.filter(|_| self.reader.name() == "io_uring") {
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
            meters.reading.change(self.reader.in_flight() as u64, 0, self.now);
            meters.no_room.enter(usize::from(self.no_room && self.stuck.is_some()), self.now);
            if !self.unplanned {
                let state = if self.lacks_slots() { planner::NO_SLOT } else { planner::WAITING };
                meters.planner.enter(state, self.now);
            }
            meters.rings.planner.note(woke, self.now, Work::Plan);
            // Whatever happened since rings the bell, so this returns; nothing more can be done before.
            let looks_once = self.ending || self.unplanned;
            core.watch.planner.end();
            self.reader.wait(&mut self.completions, looks_once.then_some(Duration::ZERO));
            self.now = meters.clock.now();
            woke = self.now;
            meters.planner.enter(planner::BUSY, self.now);
            self.complete();
        }
        self.end();
    }

    /// There is more to plan, and no slot for it.
    fn lacks_slots(&self) -> bool {
        self.free.is_empty() && self.run.is_some()
    }

    fn listen(&mut self) {
        self.ending = self.core.to_io.shutdown.load(Ordering::Acquire);
        while let Ok(slot) = self.side.frees.try_recv() {
            self.free.push_back(slot);
        }
        while let Some(start) = self.core.to_io.starts.pop() {
            self.runs.push_back(start);
        }
        while let Ok(pending) = self.side.idle.try_recv() {
            self.idle.push(pending);
        }
        if let Some(chunks) = &mut self.chunks {
            while let Some(opening) = self.core.to_io.chunk_misses.pop() {
                chunks.to_read.push_back(opening);
            }
        }
    }

    /// Gives every free slot the next batch.
    fn plan(&mut self) {
        while !self.free.is_empty() {
            let Some(next) = self.next_batch() else { return };
            let slot = self.free.pop_front().expect("checked above");
            let (job, ticket) = match next {
                Next::Batch(job, ticket) => (job, ticket),
                Next::Failed(ticket, error) => {
                    slot.times().begin(self.now);
                    self.core.meters.move_slot(slot.times(), Stay::Filling, self.now);
                    slot.begin(ticket, 1, 1).fail_row(error);
                    continue;
                }
            };
            slot.times().begin(self.now);
            self.core.meters.move_slot(slot.times(), Stay::Filling, self.now);
            let Some(mut rows) = begin_batch(slot, &job, ticket) else { continue };
            let count = rows.len();
            if let Some(chunks) = &mut self.chunks {
                chunks.plan(&job, rows);
            } else if !self.look_first() {
                let probes = if self.core.cache.is_some() { probes(ticket.sequence, count) } else { 0 };
                if probes > 0 {
                    work::look_up(&self.core, job.clone(), rows.take(probes));
                }
                if rows.len() > 0 {
                    self.direct.push_back((job, rows));
                }
            } else {
                work::look_up(&self.core, job, rows);
            }
        }
    }

    /// Hands on pieces whose chunks are there, and has the next chunks opened.
    fn advance_chunks(&mut self) {
        let Some(chunks) = &mut self.chunks else { return };
        let core = &self.core;
        let openings = chunks.advance(|job, rows, held| work::gather(core, job, rows, held));
        for mut opening in openings {
            let asked = self.core.extents_of_chunk(opening.chunk()).and_then(|extents| {
                opening.extents = extents;
                self.check_chunk(&opening)
            });
            if let Err(error) = asked {
                opening.fail(&self.core, error);
                continue;
            }
            self.chunks_begun += 1;
            if self.look_first()
                || (self.core.cache.is_some() && self.chunks_begun.is_multiple_of(u64::from(PROBE_ONE_IN)))
            {
                work::open_chunk(&self.core, opening);
            } else if let Some(chunks) = &mut self.chunks {
                chunks.to_read.push_back(opening);
            }
        }
    }

    /// As for samples: what can never fit the ring must not wait for it.
    fn check_chunk(&self, opening: &Opening) -> Result<()> {
        let from_files = |extent: &&Extent| extent.len > 0 && self.core.sources.bytes_of(extent.source).is_none();
        let (mut pieces, mut bytes) = (0, 0_usize);
        for extent in opening.extents.iter().filter(from_files) {
            let need = self.reader.footprint(extent).bytes.checked_next_multiple_of(crate::tensor::PAGE);
            (pieces, bytes) = (pieces + 1, bytes.saturating_add(need.unwrap_or(usize::MAX)));
        }
        if pieces == 0 || self.side.ring.as_ref().is_some_and(|ring| ring.can_hold(pieces, bytes)) {
            return Ok(());
        }
        let message = format!(
            "the chunk's {pieces} extents need {bytes} bytes of buffer; the dataset named fewer when the loader was built"
        );
        Err(Error::new(ErrorKind::Limit, Stage::Read, message))
    }

    /// Queues the reads of chunks for which there is room.
    fn read_chunks(&mut self) -> bool {
        let Some(chunks) = &mut self.chunks else { return false };
        let (core, reader, ring) = (&self.core, &self.reader, self.side.ring.as_ref());
        let memory = |extent: &Extent| core.sources.shared(extent);
        let reserve = |extent: &Extent| ring?.reserve(reader.footprint(extent).bytes);
        let Some(reads) = chunks.begin_read(memory, reserve) else { return false };
        let none = reads.is_empty();
        for read in reads {
            if read.first {
                core.watch.reads[self.flying.len() + read.slot].read(None, &read.extent);
            }
            let tag = CHUNK_TAG | (read.slot as u64) << 32 | read.piece as u64;
            self.ops.push_back(ReadOp { tag, extent: read.extent, buf: IoBuf::from(read.span) });
        }
        if none {
            self.finish_chunks();
        }
        true
    }

    /// Chunks of which nothing had to be read.
    fn finish_chunks(&mut self) {
        let Some(chunks) = &mut self.chunks else { return };
        for slot in 0..chunks.slots() {
            if let Some((opening, error)) = chunks.take_complete(slot) {
                finish_chunk(&self.core, opening, error);
            }
        }
    }

    /// The next batch of the run.
    fn next_batch(&mut self) -> Option<Next> {
        loop {
            if self.run.is_none() {
                let start = self.runs.pop_front()?;
                let job = start.first.clone();
                let batch = job.batches.first();
                self.run = Some(Run { start, job, epochs_done: 0, batch, sequence: 0 });
            }
            let run = self.run.as_mut()?;
            if run.job.is_cancelled() || run.epochs_done == run.start.epochs || run.sequence == run.start.batches {
                self.run = None;
                continue;
            }
            if run.batch < run.job.batches.end() {
                let ticket = ticket(&run.job, run.sequence, run.batch);
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
                        let ticket = Ticket { epoch, batch: 0, position: 0, ..ticket(&run.job, run.sequence, 0) };
                        self.run = None;
                        return Some(Next::Failed(ticket, error));
                    }
                }
            }
        }
    }

    /// Whether workers look rows up before storage is asked.
    fn look_first(&mut self) -> bool {
        if self.core.sources.total_bytes() == 0 {
            return true;
        }
        let Some(cache) = &self.core.cache else { return false };
        let (hits, misses) = (cache.hits(), cache.misses());
        let (new_hits, new_misses) = (hits - self.seen.0, misses - self.seen.1);
        if new_hits + new_misses >= EVIDENCE {
            self.seen = (hits, misses);
            self.warm = new_hits * u64::from(PROBE_ONE_IN) >= new_hits + new_misses;
        }
        self.warm
    }

    /// Starts as many reads as there is room for.
    fn issue(&mut self) {
        self.unplanned = false;
        let began = self.now;
        loop {
            while let Some(op) = self.ops.pop_front() {
                if let Err(op) = self.reader.submit(op) {
                    self.ops.push_front(op);
                    return;
                }
            }
            if self.read_chunks() {
                continue;
            }
            // Not before one more row is on its way.
            if self.now.saturating_sub(began) > PLANNING {
                self.unplanned = true;
                return;
            }
            let Some((job, rows)) = self.next_row() else { return };
            if job.is_cancelled() {
                continue;
            }
            let full = self.reader.in_flight() >= self.reader.depth();
            if self.idle.is_empty() || full {
                self.no_room = !full;
                self.stuck = Some((job, rows));
                return;
            }
            if let Begun::NoRoom(job, rows) = self.begin(job, rows) {
                self.no_room = true;
                self.stuck = Some((job, rows));
                return;
            }
        }
    }

    /// Misses first: they belong to batches that are almost there.
    fn next_row(&mut self) -> Option<(Arc<Job>, Rows)> {
        if let Some(stuck) = self.stuck.take() {
            return Some(stuck);
        }
        if let Some(miss) = self.core.to_io.misses.pop() {
            return Some((miss.job, miss.rows));
        }
        let (job, rows) = self.direct.front_mut()?;
        if rows.len() > 1 && !job.is_cancelled() {
            return Some((job.clone(), rows.take(1)));
        }
        self.direct.pop_front()
    }

    fn begin(&mut self, job: Arc<Job>, mut rows: Rows) -> Begun {
        let core = self.core.clone();
        let mut parts = Parts::new();
        let mut id = None;
        let planned = catch_unwind(AssertUnwindSafe(|| -> Result<()> {
            let sample = *id.insert(job.id_of(&rows)?);
            core.watch.planner.begin(Doing::Planning, Some(sample));
            core.parts_of(sample, &mut parts)?;
            self.check(&parts)
        }));
        let planned = planned.unwrap_or_else(|panic| Err(panicked(&*panic, Stage::Read)));
        self.now = core.meters.clock.now();
        if let Err(error) = planned {
            self.row_failed(&job, &mut rows, id, error);
            return Begun::Yes;
        }
        let mut pending = self.idle.pop().expect("checked by the caller");
        pending.id = id.expect("set on success");
        if !self.reserve(&mut pending, &parts, &mut rows) {
            pending.pieces.clear();
            self.idle.push(pending);
            return Begun::NoRoom(job, rows);
        }
        pending.job = Some(job);
        pending.rows = Some(rows);
        self.launch(pending, &parts);
        Begun::Yes
    }

    /// What can never fit the ring must not wait for it.
    fn check(&self, parts: &Parts<'_>) -> Result<()> {
        let mut bytes = 0_usize;
        let mut before = None;
        for (field, part) in parts.iter() {
            if let Some(extent) = self.core.file_extent(part)
                && !part.shares(before.replace(part))
                && self.in_place(field, part, &extent).is_none()
            {
                let need = self.reader.footprint(&extent).bytes;
                bytes = bytes.saturating_add(need.checked_next_multiple_of(crate::tensor::PAGE).unwrap_or(usize::MAX));
            }
        }
        let room = self.side.ring.as_ref().map_or(0, crate::memory::ByteRing::capacity);
        if bytes <= room {
            return Ok(());
        }
        let message =
            format!("the sample needs {bytes} bytes of buffer, the dataset said so little that only {room} are there");
        Err(Error::new(ErrorKind::Limit, Stage::Read, message))
    }

    /// The field of the row that the part can be read into.
    fn in_place(&self, field: usize, part: Part<'_>, extent: &Extent) -> Option<usize> {
        let field_out = self.core.recipe.handlers[field].outputs.start;
        let fits = self.core.reads_in_place(field, part) && self.reader.footprint(extent).in_place;
        // Row addresses: the array starts on a page when it is large enough to matter; else alignment 1 is needed.
        let row_bytes = extent.len as usize;
        (fits && row_bytes.is_multiple_of(self.reader.mem_align())).then_some(field_out)
    }

    /// Takes the bytes of the ring for all parts, or none; false when there is no room.
    fn reserve(&self, pending: &mut Pending, parts: &Parts<'_>, rows: &mut Rows) -> bool {
        debug_assert!(rows.len() == 1);
        let mut before = None;
        for (field, part) in parts.iter() {
            let mut piece = Piece { span: None, start: 0, len: 0, in_memory: false, shared: false, failed: false };
            match self.core.file_extent(part) {
                Some(_) if part.shares(before.replace(part)) => piece.shared = true,
                Some(extent) if extent.len > 0 => {
                    piece.len = extent.len as usize;
                    if self.in_place(field, part, &extent).is_none() {
                        let need = self.reader.footprint(&extent).bytes;
                        piece.span = self.side.ring.as_ref().and_then(|ring| ring.reserve(need));
                        if piece.span.is_none() {
                            return false;
                        }
                    }
                }
                Some(_) => {}
                None => piece.in_memory = !matches!(part, Part::Inline(_)),
            }
            pending.pieces.push(piece);
        }
        true
    }

    /// Turns the reserved pieces into operations.
    fn launch(&mut self, mut pending: Box<Pending>, parts: &Parts<'_>) {
        let index = self.vacant.pop().expect("as many places as entries");
        let rows = pending.rows.as_mut().expect("set by the caller");
        pending.remaining = 0;
        pending.since = self.now;
        for (number, (field, part)) in parts.iter().enumerate() {
            let piece = &mut pending.pieces[number];
            let Some(extent) = self.core.file_extent(part).filter(|_| piece.len > 0) else { continue };
            let buf = match piece.span.take() {
                Some(span) => IoBuf::from(span),
                None => IoBuf::from(rows.lend(self.core.recipe.handlers[field].outputs.start)),
            };
            if pending.remaining == 0 {
                self.core.watch.reads[index].read(Some(pending.id), &extent);
            }
            pending.remaining += 1;
            self.ops.push_back(ReadOp { tag: (index as u64) << 8 | number as u64, extent, buf });
        }
        let done = pending.remaining == 0;
        self.flying[index] = Some(pending);
        if done {
            self.finish(index);
        }
    }

    fn complete(&mut self) {
        // First: who has received a batch finds all of its reads in the report.
        self.core.meters.note_reads(|| self.reader.stats());
        let mut completions = std::mem::take(&mut self.completions);
        self.core.meters.reading.change(self.reader.in_flight() as u64, completions.len() as u64, self.now);
        for completion in completions.drain(..) {
            if completion.tag & CHUNK_TAG != 0 {
                self.complete_chunk(completion);
                continue;
            }
            let (index, number) = ((completion.tag >> 8) as usize, (completion.tag & 0xff) as usize);
            let pending = self.flying[index].as_mut().expect("a completion belongs to a sample in flight");
            match completion.buf.into_row() {
                Ok(span) => pending.rows.as_mut().expect("in flight").restore(span),
                Err(span) => pending.pieces[number].span = Some(span),
            }
            match completion.result {
                Ok(start) => pending.pieces[number].start = start,
                Err(error) => {
                    pending.pieces[number].failed = true;
                    if pending.error.as_ref().is_none_or(|(first, _)| number < *first) {
                        pending.error = Some((number, error));
                    }
                }
            }
            pending.remaining -= 1;
            if self.core.meters.on {
                self.core.meters.read_latency.record(self.now.saturating_sub(pending.since));
            }
            if pending.remaining == 0 {
                self.finish(index);
            }
        }
        self.completions = completions;
        if let Some(error) = self.reader.broken().filter(|_| !std::mem::replace(&mut self.broken, true)) {
            self.core.fail(error);
        }
    }

    fn complete_chunk(&mut self, completion: Completion) {
        let (slot, piece) = ((completion.tag & !CHUNK_TAG) >> 32, completion.tag & 0xffff_ffff);
        let (Some(chunks), Some(span)) = (&mut self.chunks, completion.buf.into_span()) else { return };
        if let Some((opening, error)) = chunks.complete(slot as usize, piece as usize, span, completion.result) {
            self.core.watch.reads[self.flying.len() + slot as usize].end();
            finish_chunk(&self.core, opening, error);
        }
    }

    /// All reads of a sample are done.
    fn finish(&mut self, index: usize) {
        let mut pending = self.flying[index].take().expect("in flight");
        self.vacant.push(index);
        self.core.watch.reads[index].end();
        if let Some(rows) = &pending.rows {
            rows.times().read.fetch_max(self.now, Ordering::Relaxed);
        }
        let cancelled = pending.job.as_ref().is_none_or(|job| job.is_cancelled());
        if !cancelled && pending.error.as_ref().is_some_and(|(_, error)| may_pass(error)) {
            // A worker tries again: it may sleep, and this thread may not.
            return work::decode(&self.core, pending);
        }
        let (id, error) = (pending.id, pending.error.take());
        if error.is_none() && !cancelled && !(self.plain && pending.staged() <= COPY_HERE) {
            return work::decode(&self.core, pending);
        }
        let (job, mut rows) = (pending.job.take(), pending.rows.take().expect("in flight"));
        if let (Some((_, error)), Some(job)) = (error, &job) {
            if cancelled {
                rows.fail_row(error.with_sample(id));
            } else {
                self.row_failed(job, &mut rows, Some(id), error);
            }
        } else if let (Some(job), false) = (job, cancelled) {
            let (core, scratch, pieces) = (&self.core, &mut self.scratch, &pending.pieces);
            let done = catch_unwind(AssertUnwindSafe(|| decode_row(core, &job, id, pieces, &mut rows, scratch)));
            match done.unwrap_or_else(|panic| Err(panicked(&*panic, Stage::Read))) {
                Ok(()) => {
                    rows.finish_row();
                    core.meters.read_in_place.add_alone(1);
                }
                Err(error) => self.row_failed(&job, &mut rows, Some(id), error),
            }
        }
        drop(rows);
        pending.pieces.clear();
        self.idle.push(pending);
    }

    /// As [`Core::row_failed`]: a worker finds another sample.
    fn row_failed(&self, job: &Arc<Job>, rows: &mut Rows, id: Option<u64>, error: Error) {
        if self.core.row_failed(job, rows, id, self.core.named(error, id), None) {
            work::ring(&self.core, 1);
        }
    }

    /// Lets go of everything; reads in flight complete first, within a deadline.
    fn end(&mut self) {
        self.run = None;
        self.runs.clear();
        self.direct.clear();
        self.stuck = None;
        if let Some(chunks) = &mut self.chunks {
            chunks.clear();
        }
        while self.core.to_io.chunk_misses.pop().is_some() {}
        while self.core.to_io.misses.pop().is_some() {}
        let ops: Vec<_> = self.ops.drain(..).collect();
        for op in ops {
            let result = Err(Error::new(ErrorKind::Cancelled, Stage::Read, ""));
            self.completions.push(Completion { tag: op.tag, buf: op.buf, result });
        }
        self.complete();
        self.reader.cancel();
        let deadline = Instant::now() + SHUTDOWN;
        while self.reader.in_flight() > 0 && Instant::now() < deadline {
            self.reader.wait(&mut self.completions, Some(Duration::from_millis(50)));
            self.complete();
        }
        // What is still in flight stays with the reader, which leaks it and counts it. Until then this thread has been left
        // behind, and so it must be: a thread that has given the kernel reads that never end can never end itself.
    }
}

/// All bytes of a chunk are there, or some cannot be had.
fn finish_chunk(core: &Arc<Core>, opening: Opening, error: Option<Error>) {
    match error {
        Some(error) => opening.fail(core, error),
        None if opening.is_forgotten() => {}
        None => work::open_chunk(core, opening),
    }
}

/// Starts the batch in `slot`; the rows that have a sample. Blank ones are finished here.
fn begin_batch(slot: FreeSlot, job: &Job, ticket: Ticket) -> Option<Rows> {
    let (batches, batch) = (&job.batches, ticket.batch);
    let mut rows = slot.begin(ticket, batches.rows(batch), batches.valid(batch));
    let filled = batches.filled(batch);
    if filled == rows.len() {
        return Some(rows);
    }
    let with_samples = (filled > 0).then(|| rows.take(filled));
    rows.blank();
    with_samples
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
