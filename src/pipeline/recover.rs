//! What becomes of a row whose sample cannot be had: tried again, given another sample, or the error of its batch.
//!
//! ```text
//! failed read ─ may it pass? ─yes─► Again: pause, opened anew, past the page cache ─► decode as usual (counted)
//!      │ no, or in vain
//!      ▼                                                    policy Fail, or not the sample's fault
//! failed row ──────────────────────────────────────────────────────────────► the batch's error
//!      │ policy Substitute
//!      ▼
//! queue ─► one worker at a time: draw another sample of the order ─► read it, decode it ─┬─► row, marked; noted for the ledger
//!                                  ▲                                                      │
//!                                  └────────── cannot be had either, 32 times at most ────┘─► the batch's error
//! ```
//!
//! * Which sample stands in is a keyed draw by (seed, epoch, position, attempt): the same with any workers, reader and world
//!   size, as long as the same samples are bad. It is one of the same order, so a subset gets none from outside of it.
//! * It cannot deadlock: the worker that substitutes needs storage and nothing else. It reads by plain calls into a buffer of
//!   its own, and takes no permit that another row could hold. One at a time, so that one buffer is enough: [`Room`] is its
//!   term in the memory plan.
//! * Datasets in chunks: another row of the same chunk, where it could be opened; else, or when none of them will do, of a
//!   chunk that is drawn, for which there is a buffer. It stands in for all rows of the bad one, and those that wait are
//!   served before it is closed. (Where every chunk is open all the time, any row of the order whose chunk could be opened.)
//!
//! Not a sample's fault, and so never substituted: descriptors or memory that are short, a device, a sampler's mistake, an
//! error of `.map_batch`, whatever was cancelled or stalled.

use super::chunks::Held;
use super::queue::Queue;
use super::watchdog::{Cell, Doing};
use super::work::{Looked, State, Switch, fill_from, guarded, look_up_with};
use super::{Core, Job};
use crate::dataset::Parts;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::ledger::BadSample;
use crate::memory::{ChunkBuf, RegionBytes, Rows};
use crate::order::{Draws, Key};
use crate::report::spans;
use crate::storage::{Again, Cached, Class, Extent, classify, may_pass};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Other samples that are tried in place of one.
const TRIES: u64 = 32;

/// The same where storage itself seems to be what fails: each of them takes its time to fail.
const TRIES_IN_TROUBLE: u64 = 4;

/// Draws of one try, where chunks that cannot be had are known.
const DRAWS: u64 = 64;

/// Chunks that are known to be bad, at most.
const BAD_CHUNKS: usize = 4096;

/// What to do when a sample cannot be had: it cannot be read, its checksum is wrong, it cannot be decoded, or a transform of
/// the user's fails on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnBadSample {
    /// The iterator ends with the error.
    #[default]
    Fail,
    /// Another sample takes the row, chosen by (seed, epoch, position): the batch keeps its size, its shapes and the order of
    /// its other rows. Its id is in [`Batch::ids`](crate::Batch::ids), the row's status is
    /// [`Substitute`](crate::Status::Substitute), and the ledger says what is missing
    /// ([`Loader::ledger`](crate::Loader::ledger)).
    Substitute {
        /// Distinct bad samples that are put up with, over the life of the loader. With one more the iterator ends with
        /// [`ErrorKind::BadSamples`](crate::ErrorKind::BadSamples) and the list of them.
        budget: u64,
    },
}

/// Bytes that substituting may take; 0 where nothing is substituted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Room {
    /// Encoded bytes of one sample, or chunk.
    pub(crate) encoded: usize,
    /// An open chunk, and the lists of its rows beside it.
    pub(crate) chunk: usize,
    pub(crate) lists: usize,
}

/// What the threads of a loader share for this.
pub(crate) struct Recovery {
    /// Distinct samples at most; `None` where nothing is substituted.
    budget: Option<u64>,
    room: Room,
    again: Again,
    waiting: Queue<Bad>,
    /// A worker is at it.
    busy: AtomicBool,
    spare: Mutex<Spare>,
}

/// A row that waits for another sample.
pub(crate) struct Bad {
    job: Arc<Job>,
    /// One row.
    rows: Rows,
    id: u64,
    error: Error,
    /// The chunks that it was to come from, and the one that holds it.
    held: Option<(Arc<Held>, usize)>,
}

impl Bad {
    /// The chunk that could not be opened and has another one stand in.
    fn instead_of(&self) -> Option<usize> {
        let (held, entry) = self.held.as_ref()?;
        let own = held.chunk(*entry);
        own.failed().then(|| own.chunk())
    }
}

/// The buffers, taken when they are needed first.
#[derive(Default)]
struct Spare {
    bytes: Vec<u8>,
    encoded: Option<Arc<RegionBytes>>,
    /// The chunk that is open here.
    chunk: Option<(usize, ChunkBuf)>,
    /// The bad chunk it was opened for.
    instead_of: Option<usize>,
    /// Chunks that could not be opened, and why.
    bad: BTreeMap<usize, Error>,
}

/// The right to substitute, until it is dropped.
struct Turn<'a>(&'a AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Recovery {
    pub(crate) fn new(policy: OnBadSample, room: Room, again: Again) -> Self {
        Self {
            budget: match policy {
                OnBadSample::Fail => None,
                OnBadSample::Substitute { budget } => Some(budget),
            },
            room,
            again,
            waiting: Queue::with_room(0),
            busy: AtomicBool::new(false),
            spare: Mutex::default(),
        }
    }

    /// Reads that worked when they were tried again.
    pub(crate) fn recovered(&self) -> u64 {
        self.again.recovered()
    }

    /// Nobody can do anything here now: nothing waits, or a worker is at it and will see what does.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() || self.busy.load(Ordering::SeqCst)
    }

    pub(crate) fn let_go(&self) {
        while self.waiting.pop().is_some() {}
    }

    /// Reads the extent that failed with `error` once more.
    pub(crate) fn again(&self, error: &Error, extent: &Extent, buf: &mut [u8]) -> Result<()> {
        self.again.read_after(error, extent, buf)?;
        spans::fault(error, spans::Outcome::Recovered);
        Ok(())
    }
}

/// Whether another sample may stand in for one that failed like this.
fn is_the_samples(error: &Error) -> bool {
    use ErrorKind as K;
    // Descriptors and memory are short for every sample.
    if classify(error) == Class::Exhausted {
        return false;
    }
    matches!(
        error.kind(),
        K::NotFound
            | K::Permission
            | K::NotAFile
            | K::Empty
            | K::Truncated
            | K::Changed
            | K::Io
            | K::Decode
            | K::Limit
            | K::Shape
            | K::User
            | K::Panicked
    )
}

impl Core {
    /// The first unfinished row cannot have its sample; `error` names it. Says whether the row waits for another one now: a
    /// thread that is not a worker then [rings](super::work::ring).
    pub(crate) fn row_failed(
        &self,
        job: &Arc<Job>,
        rows: &mut Rows,
        id: Option<u64>,
        error: Error,
        held: Option<(&Arc<Held>, usize)>,
    ) -> bool {
        match id {
            Some(id)
                if self.recovery.budget.is_some()
                    && is_the_samples(&error)
                    && !self.is_the_budgets(&error)
                    && !rows.fails_anyway() =>
            {
                let held = held.map(|(held, entry)| (held.clone(), entry));
                self.recovery.waiting.push(Bad { job: job.clone(), rows: rows.take(1), id, error, held });
                true
            }
            _ => {
                rows.fail_row(error);
                false
            }
        }
    }

    /// Gives one waiting row another sample; false when none waits that may be served, or somebody else is at it.
    pub(super) fn substitute_one(&self, switch: Switch, state: &mut State) -> bool {
        let recovery = &self.recovery;
        let taken = || recovery.busy.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_err();
        if recovery.waiting.is_empty() || taken() {
            return false;
        }
        let turn = Turn(&recovery.busy);
        let mut spare = recovery.spare.lock().unwrap_or_else(|poison| poison.into_inner());
        let like = |bad: &Bad| bad.instead_of().is_none_or(|chunk| spare.instead_of == Some(chunk));
        let bad = match switch {
            Switch::No => recovery.waiting.pop_first(like),
            Switch::Yes => recovery.waiting.pop_first(like).or_else(|| recovery.waiting.pop()),
        };
        let Some(bad) = bad else { return false };
        if !bad.job.is_cancelled() {
            spare.instead_of = bad.instead_of().or(spare.instead_of);
            substitute(self, bad, &mut spare, state);
        }
        drop(spare);
        drop(turn);
        true
    }

    /// A picture for which the memory budget leaves too little: another budget would have it.
    fn is_the_budgets(&self, error: &Error) -> bool {
        error.kind() == ErrorKind::Limit
            && error.stage() == Stage::Decode
            && self.scratch_limit < self.recipe.scratch_bytes()
    }

    fn bad_sample(&self, rows: &Rows, id: u64, error: &Error) -> BadSample {
        let ticket = rows.ticket();
        // The dataset may be what fails.
        let member = catch_unwind(AssertUnwindSafe(|| self.dataset.member(id))).ok().flatten();
        BadSample::new((ticket.epoch, ticket.batch, rows.first()), id, error, member)
    }
}

fn substitute(core: &Core, bad: Bad, spare: &mut Spare, state: &mut State) {
    let Bad { job, mut rows, id, error, held } = bad;
    let held = held.as_ref().map(|(held, entry)| (&**held, *entry));
    let mut tried = Vec::new();
    // Nothing gets here without a budget.
    let budget = core.recovery.budget.unwrap_or(0);
    // What is said of it may be the user's code, too: the words of an error, a name that the dataset gives.
    core.watch_worker(state, Doing::Planning, Some(id));
    let noted = guarded(state, |_| Ok(core.bad_sample(&rows, id, &error)));
    let Ok(mut noted) = noted else {
        return rows.fail_row(Error::user("an error that cannot be said").with_sample(id));
    };
    let tries = if may_pass(&error) { TRIES_IN_TROUBLE } else { TRIES };
    for attempt in 0..tries {
        if job.is_cancelled() {
            return;
        }
        if rows.fails_anyway() || rows.bad_with(id) > budget {
            // The batch will not be handed out: with the row's own error, or with the list of what is too much.
            if rows.bad_with(id) <= budget.saturating_add(1) {
                rows.note_bad(noted);
            }
            return rows.fail_row(error);
        }
        match stand_in(core, &job, &mut rows, attempt, held, (id, &tried), spare, state) {
            StandIn::Filled(substitute) => {
                spans::fault(&error, spans::Outcome::Substituted);
                noted.substitute = Some(substitute);
                rows.note_bad(noted);
                return rows.finish_substitute();
            }
            StandIn::Bad(candidate, error) => {
                core.watch_worker(state, Doing::Planning, Some(candidate));
                let said = guarded(state, |_| {
                    let error = core.named(error, Some(candidate));
                    Ok(core.bad_sample(&rows, candidate, &error))
                });
                said.into_iter().for_each(|bad| rows.note_bad(bad));
                tried.push(candidate);
            }
            StandIn::Failed(error) => return rows.fail_row(error),
            StandIn::None => {}
        }
    }
    rows.note_bad(noted);
    rows.fail_row(error.and_no_substitute(tried.len()));
}

/// What one attempt came to.
enum StandIn {
    /// The row has this sample.
    Filled(u64),
    /// The draw fell on a sample that was tried already, or on a chunk that cannot be had.
    None,
    /// This sample cannot be had either.
    Bad(u64, Error),
    /// Not a sample's fault.
    Failed(Error),
}

/// Draws a sample that is none of `not` (the bad one, and those tried in vain) and fills the row with it.
#[allow(clippy::too_many_arguments, reason = "one row's whole context; a struct would only rename it")]
fn stand_in(
    core: &Core,
    job: &Job,
    rows: &mut Rows,
    attempt: u64,
    held: Option<(&Held, usize)>,
    not: (u64, &[u64]),
    spare: &mut Spare,
    state: &mut State,
) -> StandIn {
    let mut candidate = None;
    let done = guarded(state, |state| {
        let Some(pick) = pick(core, job, job.position(rows), attempt, held)? else { return Ok(None) };
        if pick.id == not.0 || not.1.contains(&pick.id) {
            return Ok(None);
        }
        candidate = Some(pick.id);
        core.watch_worker(state, Doing::Decoding, Some(pick.id));
        fill(core, job, &pick, held, rows, spare, state)?;
        Ok(Some(pick.id))
    });
    match (done, candidate) {
        (Ok(Some(substitute)), _) => StandIn::Filled(substitute),
        (Ok(None), _) => StandIn::None,
        (Err(error), Some(candidate)) if is_the_samples(&error) && !core.is_the_budgets(&error) => {
            StandIn::Bad(candidate, error)
        }
        (Err(error), candidate) => StandIn::Failed(core.named(error, candidate)),
    }
}

/// Another sample, and where it is.
struct Pick {
    id: u64,
    /// For datasets in chunks: the row in this chunk.
    row: Option<(From, usize)>,
}

#[derive(Clone, Copy)]
enum From {
    /// Of those that the piece has open.
    Held(usize),
    /// This one of the dataset.
    Chunk(usize),
}

/// The sample of this attempt, unless it falls on a chunk that cannot be had.
fn pick(core: &Core, job: &Job, position: u64, attempt: u64, held: Option<(&Held, usize)>) -> Result<Option<Pick>> {
    let key = Key::new(core.seed).named("substitute").derive(job.epoch);
    let mut draws = Draws::from_key(key.derive(position).derive(attempt));
    let (Some((held, bad)), Some(starts)) = (held, &core.chunk_starts) else {
        let id = job.order.id(draws.below(job.order.len()))?;
        return Ok(Some(Pick { id, row: None }));
    };
    let chunks = core.in_chunks()?;
    if job.order.needs_all_chunks() {
        for _ in 0..DRAWS {
            let position = draws.below(job.order.len());
            let (entry, row, id) = job.order.places(position).locate(position, |id| chunks.inner(id))?;
            if matches!(held.chunk(entry).get(), Some(Ok(_))) {
                return Ok(Some(Pick { id, row: Some((From::Held(entry), row as usize)) }));
            }
        }
        return Ok(None);
    }
    // Otherwise the order is one of the whole dataset: every row of every chunk is one of it.
    let rows = |chunk: usize| starts[chunk + 1] - starts[chunk];
    let own = held.chunk(bad).chunk();
    // Which other chunks are open depends on the world size and on where a run was taken up: not to be asked.
    let (from, chunk) = if matches!(held.chunk(bad).get(), Some(Ok(_))) && attempt < TRIES / 2 {
        (From::Held(bad), own)
    } else {
        // By the bad chunk, not by the row: one chunk stands in for all of its rows.
        let mut draws = Draws::from_key(key.named("chunk").derive(own as u64).derive(attempt));
        let sample = draws.below(starts[starts.len() - 1]);
        let chunk = starts.partition_point(|start| *start <= sample) - 1;
        (From::Chunk(chunk), chunk)
    };
    let row = draws.below(rows(chunk));
    Ok(Some(Pick { id: starts[chunk] + row, row: Some((from, row as usize)) }))
}

/// Fills the row with the sample that was picked.
fn fill(
    core: &Core,
    job: &Job,
    pick: &Pick,
    held: Option<(&Held, usize)>,
    rows: &mut Rows,
    spare: &mut Spare,
    state: &mut State,
) -> Result<()> {
    match (pick.row, held) {
        (Some((From::Held(entry), row)), Some((held, _))) => match held.chunk(entry).get() {
            Some(Ok(buffer)) => fill_from(core, job, pick.id, row, buffer, rows, state.scratch()),
            _ => Err(Error::new(ErrorKind::Cancelled, Stage::Decode, "the chunk is not open")),
        },
        (Some((From::Chunk(chunk), row)), _) => {
            let buffer = open_spare(core, chunk, spare, state)?;
            fill_from(core, job, pick.id, row, buffer, rows, state.scratch())
        }
        _ => fill_sample(core, job, pick.id, rows, &mut spare.bytes, state),
    }
}

/// Reads a sample by plain calls and decodes it.
fn fill_sample(core: &Core, job: &Job, id: u64, rows: &mut Rows, bytes: &mut Vec<u8>, state: &mut State) -> Result<()> {
    let mut parts = Parts::new();
    core.parts_of(id, &mut parts)?;
    let mut before = None;
    let mut need = 0_u64;
    for (_, part) in parts.iter() {
        // Fields that are cut from the same bytes have them read once.
        if let Some(extent) = core.file_extent(part).filter(|_| !part.shares(before.replace(part))) {
            need = need.saturating_add(extent.len);
        }
    }
    let need = usize::try_from(need).unwrap_or(usize::MAX);
    let too_large = || {
        let message = format!("the sample has {need} bytes, the dataset said at most {}", core.recovery.room.encoded);
        Error::new(ErrorKind::Limit, Stage::Read, message)
    };
    if need > core.recovery.room.encoded {
        return Err(too_large());
    }
    if bytes.len() < need {
        // Not both at once.
        *bytes = Vec::new();
        *bytes = vec![0; need];
    }
    let cell = core.cell_of(state);
    let fetch = |extent: &Extent, to: &mut [u8]| {
        cell.iter().for_each(|cell| cell.read(Some(id), extent));
        let read = core.recovery.again.read(extent, to);
        cell.iter().for_each(|cell| cell.begin(Doing::Decoding, Some(id)));
        read.map_or_else(Cached::Failed, |()| Cached::Hit)
    };
    match look_up_with(core, job, id, rows, &mut parts, state.scratch(), bytes, fetch)? {
        Looked::Done => Ok(()),
        Looked::Missing => Err(too_large()),
    }
}

/// The chunk in the buffer that is there for this, opened unless it is the one that was opened last.
fn open_spare<'s>(core: &Core, chunk: usize, spare: &'s mut Spare, state: &mut State) -> Result<&'s ChunkBuf> {
    if let Some(error) = spare.bad.get(&chunk) {
        return Err(error.again());
    }
    if spare.chunk.as_ref().is_none_or(|(open, _)| *open != chunk) {
        let mut buffer = match spare.chunk.take() {
            Some((_, buffer)) => buffer,
            None => ChunkBuf::new(core.recovery.room.chunk)?,
        };
        let cell = core.cell_of(state);
        let opened = read_spare(core, chunk, &mut spare.encoded, cell)
            .and_then(|pieces| super::chunks::open(core, chunk, &pieces, state.scratch(), &mut buffer));
        // A number that no chunk has: what is in the buffer now is nobody's.
        spare.chunk = Some((if opened.is_ok() { chunk } else { usize::MAX }, buffer));
        if let Err(error) = opened {
            let error = core.named_as_chunk(error, chunk);
            if !may_pass(&error) && spare.bad.len() < BAD_CHUNKS {
                spare.bad.insert(chunk, error.again());
            }
            return Err(error);
        }
    }
    let buffer = spare.chunk.as_ref().map(|(_, buffer)| buffer);
    buffer.ok_or_else(|| Error::new(ErrorKind::Cancelled, Stage::Decode, "the chunk is not open"))
}

struct Encoded(Arc<RegionBytes>);

impl AsRef<[u8]> for Encoded {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

/// The bytes of a chunk's extents.
fn read_spare(
    core: &Core,
    chunk: usize,
    encoded: &mut Option<Arc<RegionBytes>>,
    cell: Option<&Cell>,
) -> Result<Vec<Bytes>> {
    let extents = core.extents_of_chunk(chunk)?;
    if let Some(pieces) = extents.iter().map(|extent| core.sources.shared(extent)).collect() {
        return Ok(pieces);
    }
    let room = core.recovery.room.encoded;
    let need = extents.iter().fold(0_u64, |sum, extent| sum.saturating_add(extent.len));
    if need > room as u64 {
        let message = format!("the chunk has {need} encoded bytes, the dataset said at most {room}");
        return Err(Error::new(ErrorKind::Limit, Stage::Read, message));
    }
    // Somebody may have kept a piece of the last one.
    let mut buffer = match encoded.take().map(Arc::try_unwrap) {
        Some(Ok(buffer)) => buffer,
        _ => RegionBytes::new(room, "the chunk of a substitute")?,
    };
    let mut end = 0;
    for extent in &extents {
        let start = end;
        end += extent.len as usize;
        cell.iter().for_each(|cell| cell.read(None, extent));
        core.recovery.again.read(extent, &mut buffer.as_mut_slice()[start..end])?;
    }
    let buffer = encoded.insert(Arc::new(buffer)).clone();
    let all = Bytes::from_owner(Encoded(buffer));
    let mut end = 0;
    let piece = |extent: &Extent| {
        let start = end;
        end += extent.len as usize;
        all.slice(start..end)
    };
    Ok(extents.iter().map(piece).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_short_for_all_is_not_a_sample_s_fault() {
        let os = |code| Error::os(Stage::Read, "", std::io::Error::from_raw_os_error(code));
        for (error, is) in [
            (os(5), true),
            (os(2), true),
            (os(116), true),
            (os(12), false),
            (os(23), false),
            (os(24), false),
            (Error::decode(""), true),
            (Error::user(""), true),
            (Error::new(ErrorKind::Panicked, Stage::Map, ""), true),
            (Error::new(ErrorKind::Cancelled, Stage::Read, ""), false),
            (Error::new(ErrorKind::Config, Stage::Order, ""), false),
            (Error::new(ErrorKind::Device, Stage::Device, ""), false),
            (Error::new(ErrorKind::Stalled, Stage::Read, ""), false),
        ] {
            assert_eq!(is_the_samples(&error), is, "{error}");
        }
    }
}
