//! The decode workers: tasks on a private rayon pool that never wait.
//!
//! Work lies in queues of our own; a rayon task ("drain") takes from them until they are empty and then ends. So rayon
//! allocates for a drain, not for a sample; at most `workers` drains run at a time. A drain looks at rows to look up
//! before bytes to decode: misses reach storage early, and the device works while the workers decode. Rows that want a
//! substitute come first where its chunk is open, else after the rows whose chunks are (see [`Switch`]).

use super::chunks::{Held, Opening};
use super::pending::{Pending, Piece};
use super::queue::Queue;
use super::recipe::How;
use super::watchdog::{Cell, Doing};
use super::{Core, Job, Miss};
use crate::dataset::{Chunked, Part, Parts};
use crate::decode::{Ctx, Scratch};
use crate::error::{Error, ErrorKind, Result, Stage, panicked};
use crate::memory::{ChunkBuf, Filled, Rows};
use crate::meter::Work;
use crate::storage::{Cached, Extent, may_pass};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};
use bytes::Bytes;
use crossbeam_channel::Receiver;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Rows that a worker takes at a time have about this many bytes: long enough that taking them does not show, short
/// enough that all workers finish a batch together.
const RUN_BYTES: usize = 512 << 10;

/// Whether a row may be served that needs another chunk than the last one.
#[derive(Clone, Copy)]
pub(super) enum Switch {
    Yes,
    /// Others come first, some of which may need what is open: batches of several bad chunks that are under way at once
    /// would otherwise have a chunk opened for each row.
    No,
}

/// Rows whose chunks are open.
type Gather = (Arc<Job>, Rows, Arc<Held>);

/// The pool and what waits for it.
pub(crate) struct Workers {
    pub(crate) pool: rayon::ThreadPool,
    pub(crate) count: usize,
    /// Rows to look up; split when taken.
    lookups: Queue<(Arc<Job>, Rows)>,
    /// Samples whose bytes have come.
    decodes: Queue<Box<Pending>>,
    /// Rows whose chunks are open; split when taken.
    gathers: Queue<Gather>,
    /// Chunks to be opened.
    openings: Queue<Opening>,
    /// Slots for `.map_batch`.
    maps: Option<Receiver<Filled>>,
    /// Drains that run or are about to.
    active: AtomicUsize,
    states: Vec<Mutex<State>>,
    cached_bytes: usize,
    run_rows: u32,
}

/// What one worker keeps from sample to sample.
pub(super) struct State {
    scratch: Scratch,
    /// Encoded bytes from the page cache.
    bytes: Vec<u8>,
    /// How many the rows of the present run had from there: told once for them all.
    cached: u64,
    /// The same of a whole chunk. Shared with the pieces while the chunk is opened.
    encoded: Arc<Encoded>,
    /// Where the rows of a run are: which chunk of those that are held, which row in it.
    places: Vec<(u32, u32)>,
    ids: Vec<u64>,
}

/// A worker's buffer for the encoded bytes of a chunk.
struct Encoded(Option<crate::memory::RegionBytes>);

impl AsRef<[u8]> for Encoded {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |bytes| bytes.as_slice())
    }
}

impl State {
    fn new(cached_bytes: usize, chunk_bytes: usize) -> Result<Self> {
        let encoded = match chunk_bytes {
            0 => None,
            bytes => Some(crate::memory::RegionBytes::new(bytes, "a worker's encoded chunk")?),
        };
        let bytes = vec![0; cached_bytes];
        Ok(Self {
            scratch: Scratch::default(),
            bytes,
            cached: 0,
            encoded: Arc::new(Encoded(encoded)),
            places: Vec::new(),
            ids: Vec::new(),
        })
    }

    pub(super) fn scratch(&mut self) -> &mut Scratch {
        &mut self.scratch
    }
}

/// Sizes of what the workers hold.
pub(crate) struct Sizes {
    pub(crate) slots: usize,
    pub(crate) pending: usize,
    pub(crate) row_bytes: usize,
    /// Each worker's buffer for samples from the page cache.
    pub(crate) cached_bytes: usize,
    /// Chunk buffers, and each worker's buffer for a chunk from the page cache.
    pub(crate) chunks: usize,
    pub(crate) chunk_bytes: usize,
}

impl Workers {
    pub(crate) fn new(pool: rayon::ThreadPool, maps: Option<Receiver<Filled>>, sizes: &Sizes) -> Result<Self> {
        let count = pool.current_num_threads();
        let state = |number| {
            let mut state = State::new(sizes.cached_bytes, sizes.chunk_bytes)?;
            state.scratch.worker = Some(number);
            Ok(Mutex::new(state))
        };
        Ok(Self {
            pool,
            count,
            lookups: Queue::with_room(sizes.slots + 1),
            decodes: Queue::with_room(sizes.pending),
            // A batch has a piece for each chunk boundary in it; small chunks make many.
            gathers: Queue::with_room(4 * sizes.slots),
            openings: Queue::with_room(sizes.chunks),
            maps,
            active: AtomicUsize::new(0),
            states: (0..count).map(state).collect::<Result<_>>()?,
            cached_bytes: sizes.cached_bytes,
            run_rows: (RUN_BYTES / sizes.row_bytes.max(1)).clamp(1, 1 << 16) as u32,
        })
    }

    /// Drains that run or are about to.
    pub(crate) fn active(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// Drops what nobody will work on any more.
    pub(crate) fn let_go(&self) {
        while self.lookups.pop().is_some() {}
        while self.decodes.pop().is_some() {}
        while self.gathers.pop().is_some() {}
        while self.openings.pop().is_some() {}
        while self.maps.as_ref().is_some_and(|maps| maps.try_recv().is_ok()) {}
    }

    /// Nothing waits for a worker.
    pub(crate) fn is_empty(&self) -> bool {
        self.lookups.is_empty()
            && self.decodes.is_empty()
            && self.gathers.is_empty()
            && self.openings.is_empty()
            && self.maps.as_ref().is_none_or(|maps| maps.is_empty())
    }

    /// A few rows of the oldest batch that is to be looked up, and whether these are its last.
    fn take_lookup(&self) -> Option<((Arc<Job>, Rows), bool)> {
        let mut queue = self.lookups.lock();
        let (job, rows) = queue.front_mut()?;
        if rows.len() > self.run_rows {
            return Some(((job.clone(), rows.take(self.run_rows)), false));
        }
        queue.pop_front().map(|entry| (entry, true))
    }
}

impl Workers {
    /// A few rows of the oldest piece whose chunks are open, and whether these are its last.
    fn take_gather(&self) -> Option<(Gather, bool)> {
        let mut queue = self.gathers.lock();
        let (job, rows, held) = queue.front_mut()?;
        if rows.len() > self.run_rows {
            return Some(((job.clone(), rows.take(self.run_rows), held.clone()), false));
        }
        queue.pop_front().map(|entry| (entry, true))
    }
}

/// Gives workers rows whose chunks are open.
pub(crate) fn gather(core: &Arc<Core>, job: Arc<Job>, rows: Rows, held: Arc<Held>) {
    let runs = rows.len().div_ceil(core.work.run_rows) as usize;
    core.meters.queued.enter(1, core.meters.clock.now());
    core.work.gathers.push((job, rows, held));
    ring(core, runs);
}

/// Gives a worker a chunk to open.
pub(crate) fn open_chunk(core: &Arc<Core>, opening: Opening) {
    core.meters.queued.enter(1, core.meters.clock.now());
    core.work.openings.push(opening);
    ring(core, 1);
}

/// Gives workers rows to look up.
pub(crate) fn look_up(core: &Arc<Core>, job: Arc<Job>, rows: Rows) {
    let runs = rows.len().div_ceil(core.work.run_rows) as usize;
    core.meters.queued.enter(1, core.meters.clock.now());
    core.work.lookups.push((job, rows));
    ring(core, runs);
}

/// Gives a worker a sample whose bytes have come.
pub(crate) fn decode(core: &Arc<Core>, pending: Box<Pending>) {
    core.meters.queued.enter(1, core.meters.clock.now());
    core.work.decodes.push(pending);
    ring(core, 1);
}

/// Sees to it that up to `items` more drains run.
pub(crate) fn ring(core: &Arc<Core>, items: usize) {
    let work = &core.work;
    for _ in 0..items.min(work.count) {
        let more = |active: usize| (active < work.count).then_some(active + 1);
        if work.active.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_err() {
            return;
        }
        // One allocation of rayon's per drain.
        let core = core.clone();
        work.pool.spawn(move || drain(&core));
    }
}

fn drain(core: &Core) {
    let work = &core.work;
    let index = rayon::current_thread_index().unwrap_or(0);
    // A decoder that uses rayon itself may find this drain on its own thread; then the state is taken already.
    let mut own = work.states.get(index).and_then(|state| state.try_lock().ok());
    // What was under way on this thread, and is again afterwards.
    let outer = own.is_none().then(|| core.watch.workers.get(index).map(|cell| cell.now())).flatten();
    let mut spare = None;
    let state = match &mut own {
        Some(state) => &mut **state,
        // Without a buffer for chunks: those it finds take the way through the ring.
        None => {
            let state = spare.insert(State::new(work.cached_bytes, 0).expect("only chunk buffers can fail"));
            state.scratch.worker = Some(index);
            state
        }
    };
    let meters = &core.meters;
    loop {
        let mut before = meters.clock.now();
        meters.change_working(1, before);
        while let Some(what) = step(core, state, before) {
            let now = meters.clock.now();
            if meters.on {
                meters.work_latency.record(now.saturating_sub(before));
                meters.rings.worked(index, before, now, what);
            }
            before = now;
        }
        meters.change_working(-1, before);
        if let Some(cell) = core.watch.workers.get(index) {
            // Below a drain on its own thread goes on what called it.
            match outer {
                Some((doing, sample)) => cell.begin(doing, sample),
                None => cell.end(),
            }
        }
        work.active.fetch_sub(1, Ordering::SeqCst);
        // Somebody may have put work in after the last look and found every place taken: look once more.
        let again = !(work.is_empty() && core.recovery.is_idle())
            && work
                .active
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| (n < work.count).then_some(n + 1))
                .is_ok();
        if !again {
            break;
        }
    }
}

/// Does one piece of work, and says what it was; `None` when there is none.
fn step(core: &Core, state: &mut State, now: u64) -> Option<Work> {
    let meters = &core.meters;
    // An entry of many rows leaves the queue with its last ones.
    let took = |rows: u64, left: bool| {
        if meters.on {
            meters.worked.add(rows);
        }
        if left {
            meters.queued.leave(1, now);
        }
    };
    if let Some(slot) = core.work.maps.as_ref().and_then(|maps| maps.try_recv().ok()) {
        core.watch_worker(state, Doing::Mapping, None);
        map_batch(core, state, slot);
        Some(Work::MapBatch)
    } else if core.substitute_one(Switch::No, state) {
        Some(Work::Decode)
    } else if let Some(((job, rows, held), left)) = core.work.take_gather() {
        took(rows.len().into(), left);
        gather_rows(core, &job, rows, &held, state);
        Some(Work::Gather)
    } else if core.substitute_one(Switch::Yes, state) {
        Some(Work::Decode)
    } else if let Some(opening) = core.work.openings.pop() {
        took(0, true);
        open(core, opening, state);
        Some(Work::Open)
    } else if let Some(((job, rows), left)) = core.work.take_lookup() {
        took(0, left);
        meters.worked.add(look_up_rows(core, &job, rows, state).into());
        Some(Work::LookUp)
    } else if let Some(pending) = core.work.decodes.pop() {
        took(1, true);
        decode_pending(core, pending, state);
        Some(Work::Decode)
    } else {
        None
    }
}

/// Rows that are copied from memory at a time: their ids are kept that long.
const COPY_ROWS: u32 = 256;

/// Copies plain rows from memory sources, as many as can be, and says how many: nothing of what a row costs elsewhere
/// (a guard against panics, marks, a decoder's context) is paid for each. What is left takes the usual way.
fn copy_from_memory<'d>(core: &'d Core, job: &Job, rows: &mut Rows, parts: &mut Parts<'d>, state: &mut State) -> usize {
    let count = rows.len().min(COPY_ROWS);
    let first = job.position(rows);
    let mut ids = std::mem::take(&mut state.ids);
    ids.clear();
    core.watch_worker(state, Doing::Decoding, None);
    // The dataset and the sampler are the user's: a panic ends the run here, and the usual way names it.
    let _ = guarded(state, |_| {
        for row in 0..count as usize {
            let id = job.order.id(first + row as u64 * job.batches.stride())?;
            core.parts_of(id, parts)?;
            for (field, part) in parts.iter() {
                let handler = &core.recipe.handlers[field];
                let bytes = match part {
                    Part::Inline(bytes) => bytes,
                    Part::Extent(extent) => core.memory_bytes(&extent)?,
                    Part::Framed(_) => return Ok(()),
                };
                let How::InPlace(row_bytes) = handler.how else { return Ok(()) };
                if bytes.len() != row_bytes {
                    return Ok(());
                }
                let run = rows.run_mut(handler.outputs.start, row as u32 + 1);
                run[row * row_bytes..].copy_from_slice(bytes);
            }
            ids.push(id);
        }
        Ok(())
    });
    let done = ids.len();
    if done > 0 {
        rows.finish_run(&ids);
    }
    state.ids = ids;
    done
}

pub(super) enum Looked {
    Done,
    Missing,
}

/// Fills rows from memory and the page cache, and has the others read. How many it filled, or failed.
fn look_up_rows(core: &Core, job: &Arc<Job>, mut rows: Rows, state: &mut State) -> u32 {
    let mut parts = Parts::new();
    let (all, mut missed) = (rows.len(), 0);
    let mut from_memory = core.in_memory && core.recipe.is_plain();
    while rows.len() > 0 && !job.is_cancelled() {
        if from_memory {
            from_memory = copy_from_memory(core, job, &mut rows, &mut parts, state) > 0;
            continue;
        }
        let mut id = None;
        let looked = guarded(state, |state| {
            // Before the sampler is asked, which is the user's, and with what it said.
            core.watch_worker(state, Doing::Planning, None);
            let id = *id.insert(job.id_of(&rows)?);
            core.watch_worker(state, Doing::Decoding, Some(id));
            look_up_one(core, job, id, &mut rows, &mut parts, state)
        });
        match looked {
            Ok(Looked::Done) => {
                if rows.len() == 1 {
                    // First: who receives the batch finds them in the report.
                    core.note_cached(&mut state.cached);
                }
                rows.finish_row();
            }
            Ok(Looked::Missing) => {
                let rows = rows.take(1);
                core.to_io.misses.push(Miss { job: job.clone(), rows });
                missed += 1;
            }
            Err(error) => {
                core.row_failed(job, &mut rows, id, core.named(error, id), None);
            }
        }
    }
    core.note_cached(&mut state.cached);
    if missed > 0 {
        core.to_io.waker.wake();
    }
    all - rows.len() - missed
}

/// Runs code that may be the user's or a third party's; a panic becomes an error and the worker's state is made anew.
pub(super) fn guarded<R>(state: &mut State, work: impl FnOnce(&mut State) -> Result<R>) -> Result<R> {
    state.scratch.mapping = false;
    match catch_unwind(AssertUnwindSafe(|| work(state))) {
        Ok(result) => result,
        Err(panic) => {
            let stage = if state.scratch.mapping { Stage::Map } else { Stage::Decode };
            let worker = state.scratch.worker;
            state.scratch = Scratch::default();
            state.scratch.worker = worker;
            let error = panicked(&*panic, stage);
            // What was thrown is the user's as well, and may throw when it is dropped.
            if let Err(again) = catch_unwind(AssertUnwindSafe(move || drop(panic))) {
                std::mem::forget(again);
            }
            Err(error)
        }
    }
}

/// Fills the first row from memory and the page cache, or says that something must be read.
fn look_up_one<'d>(
    core: &'d Core,
    job: &Job,
    id: u64,
    rows: &mut Rows,
    parts: &mut Parts<'d>,
    state: &mut State,
) -> Result<Looked> {
    core.parts_of(id, parts)?;
    let cell = core.cell_of(state);
    let State { scratch, bytes, cached, .. } = state;
    look_up_with(core, job, id, rows, parts, scratch, bytes, |extent, to| {
        // It does not wait, if the file system keeps its word.
        cell.iter().for_each(|cell| cell.read(Some(id), extent));
        let found = core.cached(extent, to);
        cell.iter().for_each(|cell| cell.begin(Doing::Decoding, Some(id)));
        if matches!(found, Cached::Hit) {
            *cached += extent.len;
        }
        found
    })
}

/// Fills the first row with bytes that `fetch` gives, by way of `buffer` where they are not read in place.
#[allow(clippy::too_many_arguments, reason = "one sample's whole context; a struct would only rename it")]
pub(super) fn look_up_with(
    core: &Core,
    job: &Job,
    id: u64,
    rows: &mut Rows,
    parts: &mut Parts<'_>,
    scratch: &mut Scratch,
    buffer: &mut [u8],
    mut fetch: impl FnMut(&Extent, &mut [u8]) -> Cached,
) -> Result<Looked> {
    // All bytes first: nothing is decoded for a sample of which something is missing.
    let mut used = 0;
    let mut before = None;
    for (field, part) in parts.iter() {
        let Some(extent) = core.file_extent(part) else { continue };
        if part.shares(before.replace(part)) {
            continue;
        }
        let handler = &core.recipe.handlers[field];
        if core.reads_in_place(field, part) {
            match fetch(&extent, rows.row().bytes_mut(handler.outputs.start)) {
                Cached::Hit => {}
                Cached::Miss => return Ok(Looked::Missing),
                Cached::Failed(error) => return Err(error),
            }
        } else {
            let len = extent.len as usize;
            let Some(place) = buffer.get_mut(used..).and_then(|rest| rest.get_mut(..len)) else {
                return Ok(Looked::Missing);
            };
            match fetch(&extent, place) {
                Cached::Hit => used += len,
                Cached::Miss => return Ok(Looked::Missing),
                Cached::Failed(error) => return Err(error),
            }
        }
    }
    let mut used = 0;
    let mut before = None;
    for (field, part) in parts.iter() {
        let bytes = match (core.file_extent(part), part) {
            (Some(_), _) if core.reads_in_place(field, part) => continue,
            (Some(extent), _) if part.shares(before.replace(part)) => &buffer[used - extent.len as usize..used],
            (Some(extent), _) => {
                used += extent.len as usize;
                &buffer[used - extent.len as usize..used]
            }
            (None, Part::Inline(bytes)) => bytes,
            (None, Part::Extent(extent) | Part::Framed(extent)) => core.memory_bytes(&extent)?,
        };
        core.fill_field(job, id, field, part, bytes, rows, scratch)?;
    }
    core.finish_row(job, id, rows, scratch)?;
    Ok(Looked::Done)
}

fn decode_pending(core: &Core, mut pending: Box<Pending>, state: &mut State) {
    let job = pending.job.take().expect("a pending sample has its job");
    let mut rows = pending.rows.take().expect("a pending sample has its row");
    if !job.is_cancelled() {
        let id = pending.id;
        core.watch_worker(state, Doing::Decoding, Some(id));
        let done = guarded(state, |state| {
            if let Some(error) = pending.take_error() {
                if rows.fails_anyway() {
                    // Where nothing can be read (no descriptors, a dead disk) each try takes its time.
                    return Err(error);
                }
                let cell = core.cell_of(state);
                read_again(core, id, &error, &mut pending.pieces, &mut rows, cell)?;
                core.watch_worker(state, Doing::Decoding, Some(id));
            }
            decode_row(core, &job, id, &pending.pieces, &mut rows, &mut state.scratch)
        });
        match done {
            Ok(()) => rows.finish_row(),
            Err(error) => {
                core.row_failed(&job, &mut rows, Some(id), core.named(error, Some(id)), None);
            }
        }
    }
    drop(rows);
    pending.pieces.clear();
    core.to_io.give_back(pending);
}

/// Reads the pieces of a sample that failed once more, to where they were to be.
fn read_again(
    core: &Core,
    id: u64,
    error: &Error,
    pieces: &mut [Piece],
    rows: &mut Rows,
    cell: Option<&Cell>,
) -> Result<()> {
    let mut parts = Parts::new();
    core.parts_of(id, &mut parts)?;
    for (piece, (field, part)) in pieces.iter_mut().zip(parts.iter()).filter(|(piece, _)| piece.failed) {
        let extent = core.file_extent(part).filter(|extent| extent.len > 0).ok_or_else(|| unsteady(id))?;
        cell.iter().for_each(|cell| cell.read(Some(id), &extent));
        if let Some(room) = piece.room() {
            let room = room.get_mut(..extent.len as usize).ok_or_else(|| unsteady(id))?;
            core.recovery.again(error, &extent, room)?;
        } else if core.reads_in_place(field, part) {
            let output = core.recipe.handlers[field].outputs.start;
            core.recovery.again(error, &extent, rows.row().bytes_mut(output))?;
        } else {
            return Err(unsteady(id));
        }
        piece.failed = false;
    }
    Ok(())
}

/// Fills the row from bytes that were read.
pub(crate) fn decode_row(
    core: &Core,
    job: &Job,
    id: u64,
    pieces: &[Piece],
    rows: &mut Rows,
    scratch: &mut Scratch,
) -> Result<()> {
    let mut parts = Parts::new();
    core.parts_of(id, &mut parts)?;
    for (index, (field, part)) in parts.iter().enumerate() {
        let mut piece = pieces.get(index).ok_or_else(|| unsteady(id))?;
        if piece.shared {
            piece = pieces[..index].iter().rfind(|piece| piece.bytes().is_some()).ok_or_else(|| unsteady(id))?;
        }
        let bytes = match (piece.bytes(), part) {
            (Some(bytes), _) => bytes,
            (None, Part::Inline(bytes)) => bytes,
            (None, Part::Extent(extent) | Part::Framed(extent)) if piece.in_memory => core.memory_bytes(&extent)?,
            (None, Part::Extent(extent) | Part::Framed(extent)) if extent.len == 0 => &[],
            // Read in place.
            (None, _) => continue,
        };
        core.fill_field(job, id, field, part, bytes, rows, scratch)?;
    }
    core.finish_row(job, id, rows, scratch)
}

fn unsteady(id: u64) -> Error {
    let message = "the dataset gave other parts for the same sample when asked again";
    Error::new(ErrorKind::User, Stage::Read, message).with_sample(id)
}

/// Opens a chunk whose bytes were read or lie in the page cache; else sends it to be read.
fn open(core: &Core, mut opening: Opening, state: &mut State) {
    if opening.is_forgotten() {
        return;
    }
    core.watch_worker(state, Doing::Decoding, None);
    if let Err(error) = opening.read_again(core, core.cell_of(state)) {
        return opening.fail(core, error);
    }
    if let Some(pieces) = opening.extents.iter().map(|extent| core.sources.shared(extent)).collect() {
        opening.pieces = pieces;
    } else if opening.pieces.is_empty() && !opening.extents.is_empty() {
        match cached_pieces(core, &opening.extents, state) {
            Ok(Some(pieces)) => opening.pieces = pieces,
            Ok(None) => {
                core.to_io.chunk_misses.push(opening);
                return core.to_io.waker.wake();
            }
            Err(error) => return opening.fail(core, error),
        }
    }
    opening.open(core, &mut state.scratch);
}

/// All extents from the page cache, or nothing.
fn cached_pieces(core: &Core, extents: &[Extent], state: &mut State) -> Result<Option<Vec<Bytes>>> {
    // Somebody may have kept a piece of the last chunk; then the ring serves this one.
    let Some(Encoded(Some(buffer))) = Arc::get_mut(&mut state.encoded) else { return Ok(None) };
    let mut used = 0;
    for extent in extents {
        let Some(place) = buffer.as_mut_slice().get_mut(used..used + extent.len as usize) else { return Ok(None) };
        match core.cached(extent, place) {
            Cached::Hit => {
                used += extent.len as usize;
                core.note_cached(&mut { extent.len });
            }
            Cached::Miss => return Ok(None),
            Cached::Failed(error) => return Err(error),
        }
    }
    let all = Bytes::from_owner(Shared(state.encoded.clone()));
    let mut end = 0;
    let piece = |extent: &Extent| {
        let start = end;
        end += extent.len as usize;
        all.slice(start..end)
    };
    Ok(Some(extents.iter().map(piece).collect()))
}

/// A handle on a worker's buffer that the pieces own together.
struct Shared(Arc<Encoded>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

/// Fills rows from open chunks.
fn gather_rows(core: &Core, job: &Arc<Job>, mut rows: Rows, held: &Arc<Held>, state: &mut State) {
    if job.is_cancelled() {
        return;
    }
    core.watch_worker(state, Doing::Planning, None);
    let first = job.position(&rows);
    let (mut places, mut ids) = (std::mem::take(&mut state.places), std::mem::take(&mut state.ids));
    places.clear();
    ids.clear();
    let located = guarded(state, |_| {
        let (chunks, order) = (core.in_chunks()?, job.order.places(first));
        for row in 0..u64::from(rows.len()) {
            let position = first + row * job.batches.stride();
            let (entry, row, id) = order.locate(position, |id| chunks.inner(id))?;
            places.push((entry as u32, row as u32));
            ids.push(id);
        }
        Ok(())
    });
    match located {
        Err(error) => {
            // A sampler's mistake: every row of the run is without a sample.
            rows.fail_row(error);
        }
        Ok(()) if core.recipe.is_plain() && !held.any_failed() && copy_runs(core, &mut rows, held, &places) => {
            rows.finish_run(&ids);
        }
        Ok(()) => {
            for (place, id) in places.iter().zip(&ids) {
                if job.is_cancelled() {
                    break;
                }
                core.watch_worker(state, Doing::Decoding, Some(*id));
                match guarded(state, |state| gather_row(core, job, *id, *place, held, &mut rows, &mut state.scratch)) {
                    Ok(()) => rows.finish_row(),
                    Err(error) => {
                        let entry = place.0 as usize;
                        let error = core.named_in_chunk(error, *id, held.chunk(entry).chunk());
                        core.row_failed(job, &mut rows, Some(*id), error, Some((held, entry)));
                    }
                }
            }
        }
    }
    (state.places, state.ids) = (places, ids);
}

/// Copies whole rows of all fields, when every field of every chunk is an array of such rows; false when not.
fn copy_runs(core: &Core, rows: &mut Rows, held: &Held, places: &[(u32, u32)]) -> bool {
    for (field, handler) in core.recipe.handlers.iter().enumerate() {
        let row_bytes = match handler.how {
            How::InPlace(row_bytes) => row_bytes,
            How::Skip | How::Direct => continue,
            _ => return false,
        };
        let array = |buffer: Option<&ChunkBuf>| buffer.and_then(|buffer| buffer.array(field).map(|(_, bytes)| bytes));
        if held.buffers().any(|buffer| array(buffer) != Some(row_bytes)) {
            return false;
        }
        let out = rows.run_mut(handler.outputs.start, places.len() as u32);
        let mut start = 0;
        while start < places.len() {
            let (entry, row) = places[start];
            let follows = |(at, place): (usize, &(u32, u32))| *place == (entry, row + at as u32);
            let run = places[start..].iter().enumerate().take_while(|(at, place)| follows((*at, place))).count();
            let Some(Ok(buffer)) = held.chunk(entry as usize).get() else { return false };
            let Some((array, _)) = buffer.array(field) else { return false };
            let from = row as usize * row_bytes;
            let (to, bytes) = (start * row_bytes, run * row_bytes);
            out[to..to + bytes].copy_from_slice(&array[from..from + bytes]);
            start += run;
        }
    }
    true
}

fn gather_row(
    core: &Core,
    job: &Job,
    id: u64,
    (entry, row): (u32, u32),
    held: &Held,
    rows: &mut Rows,
    scratch: &mut Scratch,
) -> Result<()> {
    let buffer = match held.chunk(entry as usize).get() {
        Some(Ok(buffer)) => buffer,
        Some(Err(error)) => return Err(error.again()),
        None => return Err(Error::new(ErrorKind::Cancelled, Stage::Decode, "the chunk is not open")),
    };
    fill_from(core, job, id, row as usize, buffer, rows, scratch)
}

/// Fills the first row from a row of an open chunk.
pub(super) fn fill_from(
    core: &Core,
    job: &Job,
    id: u64,
    row: usize,
    buffer: &ChunkBuf,
    rows: &mut Rows,
    scratch: &mut Scratch,
) -> Result<()> {
    for field in 0..core.recipe.handlers.len() {
        let bytes = buffer.row(field, row).ok_or_else(|| {
            let message = format!("the chunk has no row {row} of field `{}`", core.recipe.handlers[field].name);
            Error::new(ErrorKind::Decode, Stage::Decode, message)
        })?;
        core.fill_field(job, id, field, Part::Inline(bytes), bytes, rows, scratch)?;
    }
    core.finish_row(job, id, rows, scratch)
}

fn map_batch(core: &Core, state: &mut State, mut slot: Filled) {
    let ticket = slot.ticket();
    let mapped = guarded(state, |state| {
        state.scratch.mapping = true;
        let mut batch = slot.batch_mut();
        for map in &core.recipe.map_batches {
            let fields = 0..core.recipe.spec.fields().len();
            let mut ctx = Ctx::new(core.seed, ticket.epoch, ticket.position, fields, &mut state.scratch);
            map(&mut batch, &mut ctx)?;
        }
        if core.recipe.finishes_late() {
            core.recipe.finishes.iter().for_each(|finishing| finishing.run_late(&mut slot, core.seed));
        }
        Ok(())
    });
    state.scratch.mapping = false;
    if let Err(error) = mapped {
        slot.note_failure(error);
    }
    core.exchange.hand_out(slot);
}

impl Core {
    /// The error with the sample's id and, unless it names a place already, that of the sample's first bytes.
    pub(crate) fn named(&self, error: Error, id: Option<u64>) -> Error {
        let Some(id) = id else { return error };
        let error = error.with_sample(id);
        if error.site().path.is_some() {
            return error;
        }
        // The dataset may be what failed: it must not panic once more.
        let first = catch_unwind(AssertUnwindSafe(|| {
            let mut parts = Parts::new();
            self.parts_of(id, &mut parts).ok()?;
            parts.iter().find_map(|(_, part)| self.file_extent(part))
        }));
        match first.ok().flatten() {
            Some(extent) => error.with_path(self.sources.path(extent.source)).with_range(extent.offset, extent.len),
            None => error,
        }
    }

    /// The side of the dataset that deals in chunks. The user's code: it may panic, or change its mind.
    pub(crate) fn in_chunks(&self) -> Result<&dyn Chunked> {
        self.dataset.chunked().ok_or_else(|| {
            Error::new(
                ErrorKind::User,
                Stage::Read,
                "the dataset had chunks when the loader was built, and has none now",
            )
        })
    }

    /// The extents of a chunk, checked.
    pub(crate) fn extents_of_chunk(&self, chunk: usize) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let asked = catch_unwind(AssertUnwindSafe(|| {
            let chunks = self.in_chunks()?;
            chunks.chunk_extents(chunk, &mut extents)?;
            Ok(chunks.chunk_bytes(chunk).encoded)
        }));
        let said = asked.unwrap_or_else(|panic| Err(panicked(&*panic, Stage::Read)))?;
        extents.iter().try_for_each(|extent| self.check_extent(extent))?;
        let bytes: u64 = extents.iter().map(|extent| extent.len).fold(0, u64::saturating_add);
        if bytes > said {
            let message = format!("the dataset said that the chunk has {said} encoded bytes, its extents have {bytes}");
            return Err(Error::new(ErrorKind::User, Stage::Read, message));
        }
        Ok(extents)
    }

    /// As [`named`](Self::named), also for samples in chunks.
    pub(crate) fn named_anywhere(&self, error: Error, id: u64) -> Error {
        match &self.chunk_starts {
            Some(starts) if starts.last().is_some_and(|end| id < *end) => {
                self.named_in_chunk(error, id, starts.partition_point(|start| *start <= id) - 1)
            }
            _ => self.named(error, Some(id)),
        }
    }

    /// The error with the sample's id and the chunk's place.
    fn named_in_chunk(&self, error: Error, id: u64, chunk: usize) -> Error {
        self.named_as_chunk(error.with_sample(id), chunk)
    }

    /// The error with the chunk's name and, unless it names a place already, that of its first bytes.
    pub(super) fn named_as_chunk(&self, error: Error, chunk: usize) -> Error {
        if error.site().path.is_some() {
            return error;
        }
        let named = catch_unwind(AssertUnwindSafe(|| {
            let (chunks, mut extents) = (self.in_chunks().ok()?, Vec::new());
            chunks.chunk_extents(chunk, &mut extents).ok()?;
            let first = extents.into_iter().next()?;
            (first.source.index() < self.sources.count()).then(|| (first, chunks.chunk_name(chunk)))
        }));
        match named.ok().flatten() {
            Some((first, name)) => {
                error.with_path(self.sources.path(first.source)).with_range(first.offset, first.len).within(name)
            }
            None => error,
        }
    }

    fn check_extent(&self, extent: &Extent) -> Result<()> {
        if extent.source.index() >= self.sources.count() {
            let (source, count) = (extent.source.index(), self.sources.count());
            let message = format!("the dataset names source {source}, it has {count}");
            return Err(Error::new(ErrorKind::User, Stage::Read, message));
        }
        let len = self.sources.len_of(extent.source);
        if extent.offset.checked_add(extent.len).is_none_or(|end| end > len) {
            let message = format!("the extent ends behind the end of the source, of {len} bytes when it was indexed");
            let error = Error::new(ErrorKind::Truncated, Stage::Read, message);
            return Err(error.with_path(self.sources.path(extent.source)).with_range(extent.offset, extent.len));
        }
        Ok(())
    }

    /// What a sample is made of, checked: datasets are open, and everything behind here relies on it. Every field of
    /// the schema has bytes exactly once, every extent lies within its source.
    pub(crate) fn parts_of<'d>(&'d self, id: u64, parts: &mut Parts<'d>) -> Result<()> {
        self.all_parts_of(id, parts)?;
        if self.skips {
            parts.retain(|field| !matches!(self.recipe.handlers[field].how, How::Skip | How::Direct));
        }
        Ok(())
    }

    /// As [`parts_of`](Self::parts_of), with those that the host does not need.
    pub(crate) fn all_parts_of<'d>(&'d self, id: u64, parts: &mut Parts<'d>) -> Result<()> {
        parts.clear();
        self.dataset.extents(id, parts)?;
        let lie = |message: String| Err(Error::new(ErrorKind::User, Stage::Read, message));
        let mut seen = 0_u64;
        for (field, part) in parts.iter() {
            let Some(handler) = self.recipe.handlers.get(field) else {
                return lie(format!("the dataset names field {field}, its schema has {}", self.recipe.handlers.len()));
            };
            if seen & (1 << field) != 0 {
                return lie(format!("the dataset gave bytes for field `{}` twice", handler.name));
            }
            seen |= 1 << field;
            let (Part::Extent(extent) | Part::Framed(extent)) = part else { continue };
            self.check_extent(&extent)?;
        }
        let missing = (0..self.recipe.handlers.len()).find(|field| seen & (1 << field) == 0);
        if let Some(field) = missing {
            return lie(format!("the dataset gave no bytes for field `{}`", self.recipe.handlers[field].name));
        }
        Ok(())
    }

    /// The extent of a part that lies in a file.
    pub(crate) fn file_extent(&self, part: Part<'_>) -> Option<Extent> {
        match part {
            Part::Extent(extent) | Part::Framed(extent) if self.sources.bytes_of(extent.source).is_none() => {
                Some(extent)
            }
            _ => None,
        }
    }

    /// Whether storage may write the part straight into the row.
    pub(crate) fn reads_in_place(&self, field: usize, part: Part<'_>) -> bool {
        let How::InPlace(row_bytes) = self.recipe.handlers[field].how else { return false };
        matches!(part, Part::Extent(extent) if extent.len == row_bytes as u64)
    }

    pub(crate) fn memory_bytes(&self, extent: &Extent) -> Result<&[u8]> {
        let all = self.sources.bytes_of(extent.source).unwrap_or_default();
        let range = extent.offset as usize..(extent.offset.saturating_add(extent.len)) as usize;
        all.get(range).ok_or_else(|| {
            let message = format!("the source has {} bytes", all.len());
            Error::new(ErrorKind::Truncated, Stage::Read, message).with_range(extent.offset, extent.len)
        })
    }

    fn cached(&self, extent: &Extent, dst: &mut [u8]) -> Cached {
        if extent.len == 0 {
            return Cached::Hit;
        }
        match self.cache.as_ref().map_or(Cached::Miss, |cache| cache.try_read(extent, dst)) {
            // The reader may have it, and tries again.
            Cached::Failed(error) if may_pass(&error) => Cached::Miss,
            found => found,
        }
    }

    /// The worker whose state this is begins something.
    pub(super) fn watch_worker(&self, state: &State, doing: Doing, sample: Option<u64>) {
        self.cell_of(state).iter().for_each(|cell| cell.begin(doing, sample));
    }

    /// Where it says what it does.
    pub(super) fn cell_of(&self, state: &State) -> Option<&Cell> {
        state.scratch.worker.and_then(|worker| self.watch.workers.get(worker))
    }

    /// Workers got so many bytes from the page cache.
    fn note_cached(&self, bytes: &mut u64) {
        let bytes = std::mem::take(bytes);
        if bytes > 0 && self.meters.on {
            self.meters.cached_bytes.add(bytes);
        }
    }

    /// Turns the bytes of one part into the fields of its handler.
    #[allow(clippy::too_many_arguments, reason = "one sample's whole context; a struct would only rename it")]
    fn fill_field(
        &self,
        job: &Job,
        id: u64,
        field: usize,
        part: Part<'_>,
        bytes: &[u8],
        rows: &mut Rows,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let site = |error: Error| match part {
            Part::Extent(extent) | Part::Framed(extent) => {
                error.with_path(self.sources.path(extent.source)).with_range(extent.offset, extent.len)
            }
            Part::Inline(_) => error,
        };
        let handler = &self.recipe.handlers[field];
        // Out of the scratch while the decoder has the rest of it.
        let mut opened = std::mem::take(&mut scratch.opened);
        opened.clear();
        let bytes = match part {
            Part::Framed(_) => self.dataset.open(id, field, bytes, &mut opened).map_err(site)?,
            _ => bytes,
        };
        let mut row = rows.row();
        let done = match &handler.how {
            How::InPlace(_) | How::Copy => row.copy_from(handler.outputs.start, bytes).map_err(site),
            How::Skip | How::Direct => Ok(()),
            How::Decode(decoder) => {
                handler.outputs.clone().for_each(|field| row.clear_len(field));
                let mut ctx = Ctx::new(self.seed, job.epoch, id, handler.outputs.clone(), scratch)
                    .with_scratch_limit(self.scratch_limit);
                decoder.decode(bytes, &mut ctx, &mut row.only(mask(&handler.outputs))).map_err(site)
            }
        };
        scratch.opened = opened;
        done
    }

    /// Transforms and marks a row all of whose fields are there.
    pub(crate) fn finish_row(&self, job: &Job, id: u64, rows: &mut Rows, scratch: &mut Scratch) -> Result<()> {
        let mut row = rows.row();
        for field in self.recipe.added.clone() {
            row.clear(field);
        }
        scratch.mapping = true;
        if let (Some(worker), false) = (scratch.worker, self.recipe.maps.is_empty())
            && let Some(cell) = self.watch.workers.get(worker)
        {
            cell.begin(Doing::Mapping, Some(id));
        }
        for map in &self.recipe.maps {
            let fields = 0..self.recipe.spec.fields().len();
            let mut ctx = Ctx::new(self.seed, job.epoch, id, fields, scratch).with_scratch_limit(self.scratch_limit);
            map(&mut row, &mut ctx)?;
        }
        scratch.mapping = false;
        if !self.recipe.finishes_late() {
            self.recipe.finish(&mut row, self.seed, job.epoch, id);
        }
        row.mark(id);
        Ok(())
    }
}

fn mask(range: &std::ops::Range<usize>) -> u64 {
    let below = |end: usize| if end >= 64 { u64::MAX } else { (1 << end) - 1 };
    below(range.end) & !below(range.start)
}
