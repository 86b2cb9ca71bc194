//! How a failed row is handled: retry, substitute, or the error of its batch.
//!
//! ```text
//! failed read ─ transient? ─yes─► a worker: pause, opened anew, past the page cache ─► decode as usual (counted)
//!      │ no, or the retry failed
//!      ▼                                                    policy Fail, or no sample to blame
//! failed row ──────────────────────────────────────────────────────────────► the batch's error
//!      │ policy Substitute
//!      ▼
//! queue ─► one worker at a time: draw another sample of the order ─► read, decode ─┬─► row, marked; noted in ledger
//!                                  ▲                                                 │
//!                                  └────────── fails, too; 32 times at most ─────────┘─► the batch's error
//! ```
//!
//! * A keyed draw by (seed, epoch, position, attempt) chooses the substitute. It is the same with
//!   any number of workers, any reader and any world size, as long as the same samples are bad. It
//!   comes from the same order, so a subset gets no sample from outside the subset.
//! * It cannot deadlock: the substituting worker needs only storage. It reads with plain calls into
//!   its own buffer, and takes no permit that another row could hold. Only one worker substitutes
//!   at a time, so one buffer suffices: [`SpareRoom`] is its term in the memory plan.
//! * Chunked datasets: the substitute is another row of the same chunk, if the chunk could be
//!   opened. If it could not, or if no such row works, the substitute is a row of a randomly drawn
//!   chunk, which has its own buffer. The drawn chunk replaces all rows of the bad chunk, and the
//!   rows that already wait are served before it closes. (If an order keeps every chunk open, the
//!   substitute is any row of the order whose chunk could be opened.)
//!
//! Not substituted: errors that blame no sample, see [`Samples::blames_sample`], and errors of
//! `.map_batch`.

use super::chunks::{Encoded, Held};
use super::drains::Switch;
use super::exchange::BadRow;
use super::gather::opened;
use super::sample::Samples;
use super::task::{Piece, RowRun, Sample};
use super::watchdog::Doing;
use super::worker::Worker;
use super::{Core, chunks};
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught};
use feedline_base::sync::Hold;
use feedline_core::dataset::{ChunkBuf, member};
use feedline_core::ledger::{BadSample, RowPlace};
use feedline_core::memory::MemoryTerm;
use feedline_core::order::{Draws, Key};
use feedline_core::storage::{Extent, may_pass};
use feedline_reader::Cached;
use feedline_report::spans;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Number of candidates per row.
const TRIES: u64 = 32;

/// Number of candidates while storage itself seems to fail, because every candidate then takes long
/// to fail.
const TRIES_IN_TROUBLE: u64 = 4;

/// Draws per attempt, to avoid chunks that are known to be bad.
const DRAWS: u64 = 64;

/// Maximum number of remembered bad chunks.
const BAD_CHUNKS: usize = 4096;

/// What to do with a failed sample. A sample fails if it cannot be read or decoded, if its checksum
/// is wrong, or if a transform returns an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnBadSample {
    /// The iterator ends with the error.
    #[default]
    Fail,
    /// Another sample fills the row, chosen by (seed, epoch, position). The batch keeps its size,
    /// its shapes and the order of its other rows. [`Batch::ids`](crate::Batch::ids) has the
    /// substitute's id, and the row's status is [`Substitute`](crate::Status::Substitute). The
    /// ledger names the missing sample ([`Loader::ledger`](crate::Loader::ledger)).
    Substitute {
        /// Maximum number of distinct bad samples over the life of the loader. One more bad sample
        /// ends the iterator with [`ErrorKind::BadSamples`](crate::ErrorKind::BadSamples) and their
        /// list.
        budget: u64,
    },
}

/// Bytes for substitution; 0 without it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SpareRoom {
    /// Maximum number of distinct bad samples.
    pub(crate) budget: u64,
    /// Encoded bytes of one sample or chunk.
    pub(crate) encoded: usize,
    /// Bytes of an open chunk, and of the lists of its rows.
    pub(crate) chunk: usize,
    pub(crate) lists: usize,
}

impl SpareRoom {
    pub(crate) fn term(&self) -> MemoryTerm {
        MemoryTerm::SUBSTITUTES.of(
            1,
            self.encoded
                .saturating_add(self.chunk)
                .saturating_add(self.lists),
        )
    }
}

/// State of the search for substitutes. Only the worker with the turn (see
/// [`Turns`](super::drains::Turns)) uses it.
pub(crate) struct Substitutes {
    room: SpareRoom,
    spare: Mutex<Spare>,
}

impl BadRow {
    /// The row's own chunk, if it could not be opened, so that a drawn chunk must replace it.
    fn instead_of(&self) -> Option<usize> {
        let (held, entry) = self.held.as_ref()?;
        let own = held.chunk(*entry);
        own.failed().then_some(own.chunk)
    }
}

/// The buffers, allocated at their first use.
#[derive(Default)]
struct Spare {
    /// Encoded bytes of a sample or chunk.
    encoded: Encoded,
    /// The chunk that is open here.
    chunk: Option<(usize, ChunkBuf)>,
    /// The bad chunk that it replaces.
    instead_of: Option<usize>,
    /// Chunks that could not be opened, with their errors.
    bad: BTreeMap<usize, Error>,
}

impl Substitutes {
    pub(crate) fn new(room: SpareRoom) -> Self {
        Self {
            room,
            spare: Mutex::default(),
        }
    }

    /// Finds a substitute for one waiting row. Returns false if no row may be served now, or if
    /// another worker has the turn.
    pub(super) fn serve_one(&self, core: &Core, switch: Switch, worker: &mut Worker) -> bool {
        let Some(turn) = core.to_workers.bad.turn() else {
            return false;
        };
        let mut spare = self.spare.hold();
        let bad = turn.take(switch, |bad| {
            bad.instead_of()
                .is_none_or(|chunk| spare.instead_of == Some(chunk))
        });
        let Some(bad) = bad else {
            return false;
        };
        if !bad.run.is_cancelled() {
            spare.instead_of = bad.instead_of().or(spare.instead_of);
            let held = bad.held.as_ref().map(|(held, entry)| (held, *entry));
            let search = Search {
                core,
                room: &self.room,
                held,
                spare: &mut spare,
                worker,
            };
            search.substitute(bad.run, bad.id, bad.error);
        }
        // Unlocked before the turn ends; otherwise the next worker with the turn could not lock it.
        drop(spare);
        drop(turn);
        true
    }
}

/// The search for the substitute of one row.
struct Search<'a> {
    core: &'a Core,
    room: &'a SpareRoom,
    /// The chunks of the row's piece, and the index of the row's own chunk among them.
    held: Option<(&'a Arc<Held>, usize)>,
    spare: &'a mut Spare,
    worker: &'a mut Worker,
}

/// The result of one attempt.
enum StandIn {
    /// The row has this sample.
    Filled(u64),
    /// The draw chose a sample that was tried before, or a bad chunk.
    None,
    /// This sample also failed, with this error.
    Bad(u64, Error),
    /// An error that blames no sample.
    Failed(Error),
}

impl Search<'_> {
    fn substitute(mut self, mut run: RowRun, id: u64, error: Error) {
        let mut tried = vec![id];
        // Formatting the error may run user code: its `Display`, or the dataset's name for the
        // sample.
        let Ok(mut noted) = self.bad_sample(&run, id, &error) else {
            return run
                .rows
                .fail_row(Error::user("the sample's error cannot be formatted").with_sample(id));
        };
        let budget = self.room.budget;
        let tries = if may_pass(&error) {
            TRIES_IN_TROUBLE
        } else {
            TRIES
        };
        for attempt in 0..tries {
            if run.is_cancelled() {
                return;
            }
            if run.rows.fails_anyway() || run.rows.bad_with(id) > budget {
                // The batch will not be delivered: it carries the row's own error, or the list of
                // bad samples over the budget.
                if run.rows.bad_with(id) <= budget.saturating_add(1) {
                    run.rows.note_bad(noted);
                }
                return run.rows.fail_row(error);
            }
            run.rows.stand_in();
            match self.stand_in(&mut run, attempt, &tried) {
                StandIn::Filled(substitute) => {
                    spans::fault(&error, spans::Outcome::Substituted);
                    noted.substitute = Some(substitute);
                    run.rows.note_bad(noted);
                    return run.rows.finish_substitute();
                }
                StandIn::Bad(candidate, error) => {
                    let said = self.bad_sample(&run, candidate, &error);
                    said.into_iter().for_each(|bad| run.rows.note_bad(bad));
                    tried.push(candidate);
                }
                StandIn::Failed(error) => return run.rows.fail_row(error),
                StandIn::None => {}
            }
        }
        run.rows.note_bad(noted);
        let note = format!(
            "no substitute found ({} others were tried)",
            tried.len() - 1
        );
        run.rows.fail_row(error.with_note(&note));
    }

    /// The ledger's entry for a failed sample.
    fn bad_sample(&mut self, run: &RowRun, id: u64, error: &Error) -> Result<BadSample> {
        let samples = &self.core.samples;
        self.worker.begins(samples, Doing::Planning, Some(id));
        self.worker.guarded(&self.core.samples, |_| {
            let ticket = run.rows.ticket();
            // The dataset itself may have failed.
            let field = samples.field_of(error);
            let member = caught(Stage::Read, || Ok(member(&*samples.dataset, id, field)))
                .ok()
                .flatten();
            let place = RowPlace {
                epoch: ticket.epoch,
                batch: ticket.batch,
                row: run.rows.first(),
            };
            Ok(BadSample::new(place, id, error, member))
        })
    }

    /// Draws a sample that is not in `not`, and fills the row with it.
    fn stand_in(&mut self, run: &mut RowRun, attempt: u64, not: &[u64]) -> StandIn {
        let Self {
            core,
            room,
            held,
            spare,
            worker,
        } = self;
        let samples = &core.samples;
        let held = *held;
        let mut candidate = None;
        worker.sample.clear();
        let done = worker.guarded(&core.samples, |worker| {
            let Some(pick) = pick(samples, run, attempt, held)? else {
                return Ok(None);
            };
            if not.contains(&pick.id) {
                return Ok(None);
            }
            candidate = Some(pick.id);
            worker.sample.id = candidate;
            worker.begins(samples, Doing::Decoding, candidate);
            match (pick.row, held) {
                (Some((InChunk::Held(entry), row)), Some((held, _))) => {
                    fill_from_chunk(samples, run, pick.id, opened(held, entry)?, row, worker)?;
                }
                (Some((InChunk::Chunk(chunk), row)), _) => {
                    let buffer = open_spare(core, room, chunk, spare, worker)?;
                    fill_from_chunk(samples, run, pick.id, buffer, row, worker)?;
                }
                _ => fill_from_storage(core, room, run, pick.id, &mut spare.encoded, worker)?,
            }
            Ok(Some(pick.id))
        });
        let named = |error| samples.named(error, &worker.sample);
        match (done, candidate) {
            (Ok(Some(substitute)), _) => StandIn::Filled(substitute),
            (Ok(None), _) => StandIn::None,
            (Err(error), Some(candidate)) if samples.blames_sample(&error) => {
                StandIn::Bad(candidate, named(error))
            }
            (Err(error), _) => StandIn::Failed(named(error)),
        }
    }
}

/// A candidate and its location.
struct Pick {
    id: u64,
    /// For chunked datasets: the row in this chunk.
    row: Option<(InChunk, usize)>,
}

#[derive(Clone, Copy)]
enum InChunk {
    /// The chunk with this index among the open chunks of the row's piece.
    Held(usize),
    /// The chunk of the dataset with this number.
    Chunk(usize),
}

/// The candidate of this attempt; `None` if the draw chose a bad chunk.
fn pick(
    samples: &Samples,
    run: &RowRun,
    attempt: u64,
    held: Option<(&Arc<Held>, usize)>,
) -> Result<Option<Pick>> {
    let job = &run.job;
    let key = Key::new(samples.seed).named("substitute").derive(job.epoch);
    let mut draws = Draws::from_key(key.derive(run.position()).derive(attempt));
    let (Some((held, bad)), Some(starts)) = (held, &samples.chunk_starts) else {
        let id = job
            .order
            .id(job.order.another(run.position(), &mut draws))?;
        return Ok(Some(Pick { id, row: None }));
    };
    let chunks = samples.in_chunks()?;
    if job.order.needs_all_chunks() {
        for _ in 0..DRAWS {
            let position = job.order.another(run.position(), &mut draws);
            let (entry, row, id) = job
                .order
                .places(position)
                .locate(position, |id| chunks.inner(id))?;
            if matches!(held.chunk(entry).get(), Some(Ok(_))) {
                return Ok(Some(Pick {
                    id,
                    row: Some((InChunk::Held(entry), row as usize)),
                }));
            }
        }
        return Ok(None);
    }
    // Otherwise the order covers the whole dataset, so every row of every chunk belongs to it.
    let rows = |chunk: usize| starts[chunk + 1] - starts[chunk];
    let own = held.chunk(bad).chunk;
    // The other open chunks must not affect the choice: they depend on the world size and on the
    // point of resume.
    let (from, chunk) = if matches!(held.chunk(bad).get(), Some(Ok(_))) && attempt < TRIES / 2 {
        (InChunk::Held(bad), own)
    } else {
        // Keyed by the bad chunk, not by the row: one chunk replaces all its rows.
        let mut draws = Draws::from_key(key.named("chunk").derive(own as u64).derive(attempt));
        let sample = draws.below(starts[starts.len() - 1]);
        let chunk = starts.partition_point(|start| *start <= sample) - 1;
        (InChunk::Chunk(chunk), chunk)
    };
    let row = draws.below(rows(chunk));
    Ok(Some(Pick {
        id: starts[chunk] + row,
        row: Some((from, row as usize)),
    }))
}

fn fill_from_chunk(
    samples: &Samples,
    run: &mut RowRun,
    id: u64,
    buffer: &ChunkBuf,
    row: usize,
    worker: &mut Worker,
) -> Result<()> {
    let given = samples.given_by_chunk(buffer, row);
    samples.fill(&run.job, id, &mut run.rows, &mut worker.scratch, given)
}

/// Reads a sample with plain calls and fills the row with it.
fn fill_from_storage(
    core: &Core,
    room: &SpareRoom,
    run: &mut RowRun,
    id: u64,
    encoded: &mut Encoded,
    worker: &mut Worker,
) -> Result<()> {
    encoded.make_free(room.encoded, "the sample of a substitute")?;
    if worker.fill_by(
        &core.samples,
        &run.job,
        id,
        &mut run.rows,
        encoded.bytes_mut(),
        |extent, to| by_plain_calls(core, extent, to),
    )? {
        return Ok(());
    }
    Err(too_large("sample", &worker.sample, room))
}

fn by_plain_calls(core: &Core, extent: &Extent, to: &mut [u8]) -> Cached {
    core.again
        .read(extent, to)
        .map_or_else(Cached::Failed, |()| Cached::Hit)
}

fn too_large(what: &str, sample: &Sample, room: &SpareRoom) -> Error {
    let need: u64 = sample.pieces.iter().map(Piece::len).sum();
    let message = format!(
        "the {what} has {need} encoded bytes, but the dataset announced at most {}",
        room.encoded
    );
    Error::new(ErrorKind::Limit, Stage::Read, message).with_amounts(need, room.encoded as u64)
}

/// The candidate's chunk in the spare buffer. It is opened here unless it is the chunk that was
/// opened last.
fn open_spare<'s>(
    core: &Core,
    room: &SpareRoom,
    chunk: usize,
    spare: &'s mut Spare,
    worker: &mut Worker,
) -> Result<&'s ChunkBuf> {
    let samples = &core.samples;
    if let Some(error) = spare.bad.get(&chunk) {
        return Err(error.clone_lossy());
    }
    if spare.chunk.as_ref().is_none_or(|(open, _)| *open != chunk) {
        let mut buffer = match spare.chunk.take() {
            Some((_, buffer)) => buffer,
            None => ChunkBuf::new(room.chunk)?,
        };
        let opened =
            read_spare(core, room, chunk, &mut spare.encoded, worker).and_then(|mut sample| {
                chunks::open(
                    samples,
                    chunk,
                    &mut sample,
                    &spare.encoded,
                    &mut worker.scratch,
                    &mut buffer,
                )
            });
        // No chunk has this number, so no row uses the buffer's current content.
        spare.chunk = Some((if opened.is_ok() { chunk } else { usize::MAX }, buffer));
        if let Err(error) = opened {
            let error = samples.named_as_chunk(error, chunk);
            if !may_pass(&error) && spare.bad.len() < BAD_CHUNKS {
                spare.bad.insert(chunk, error.clone_lossy());
            }
            return Err(error);
        }
    }
    let buffer = spare.chunk.as_ref().map(|(_, buffer)| buffer);
    buffer.ok_or_else(|| Error::new(ErrorKind::Cancelled, Stage::Decode, "the chunk is not open"))
}

/// The pieces of a chunk, with their bytes in `encoded` or in memory.
fn read_spare(
    core: &Core,
    room: &SpareRoom,
    chunk: usize,
    encoded: &mut Encoded,
    worker: &Worker,
) -> Result<Sample> {
    let samples = &core.samples;
    let mut sample = Sample::default();
    samples.ask_chunk(chunk, &mut sample)?;
    if sample.stored().next().is_some() {
        encoded.make_free(room.encoded, "the chunk of a substitute")?;
    }
    let read = encoded.fetch(samples, &mut sample, |extent, to| {
        core.watch
            .worker(worker.scratch.worker, |cell| cell.read(None, extent));
        by_plain_calls(core, extent, to)
    })?;
    if read {
        Ok(sample)
    } else {
        Err(too_large("chunk", &sample, room))
    }
}
