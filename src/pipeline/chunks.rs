//! Chunked datasets: which chunks are open, which rows wait for them, and when their memory is
//! returned.
//!
//! ```text
//!            ┌──── I/O thread ─────────────────────────────┐      ┌──── decode workers ────────────────┐
//! free ────► │ open the next chunk of the sequence ────────┼────► │ page cache has it? ─yes─► open_chunk│
//! buffers    │        reads, ring ◄────────────────────────┼─ no ─┤                             │       │
//!   ▲        │          └─────────────────────────────────┼────► │ open_chunk ─────────────────┤       │
//!   │        │ pieces of batches wait for all their chunks ◄─────┼──────────── chunk is open ──┘       │
//!   │        │          └── ready ───────────────────────┼────► │ gather rows into the slot           │
//!   │        └─────────────────────────────────────────────┘      └──────────────┬─────────────────────┘
//!   └──────────────── last piece that needs the chunk is done ◄──────────────────┘
//! ```
//!
//! The order gives the sequence of chunks. It also cuts each batch into *pieces*, runs of rows that
//! need the same entries of this sequence. The planner opens chunks strictly in sequence, ahead of
//! the pieces, as buffers become free. Each entry has an end position: no piece at or after that
//! position needs the entry. The planner releases the entry when the oldest waiting piece reaches
//! that position. The buffer is returned when the last gather that uses it ends.
//!
//! It cannot deadlock: `build()` gives at least as many buffers as one piece needs. Take the last
//! entry that the oldest waiting piece needs. Each entry before it is either needed by this piece
//! too, or no longer needed by any piece (see `order::lanes`). Entries that no piece needs are held
//! only by gathers, and gathers wait for no thread. So the piece gets its buffers, and a chunk with
//! a buffer needs only the ring and a worker.

use super::queue::Queue;
use super::sample::Samples;
use super::task::{EpochJob, Place, RowRun, Sample};
use crate::order::{ChunkStarts, EpochOrder, Need};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught};
use feedline_core::dataset::{ChunkBuf, Chunked, Dataset};
use feedline_core::decode::Scratch;
use feedline_core::memory::region::Bytes as RegionBytes;
use feedline_core::memory::{MemoryTerm, plan};
use feedline_core::storage::Extent;
use feedline_reader::{Cached, Waker};
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// The pool of free chunk buffers.
pub(crate) struct Home {
    free: Queue<ChunkBuf>,
    waker: Waker,
}

impl Home {
    pub(crate) fn new(buffers: Vec<ChunkBuf>, waker: Waker) -> Self {
        let free = Queue::with_room(buffers.len());
        buffers.into_iter().for_each(|buffer| free.push(buffer));
        Self { free, waker }
    }

    fn give_back(&self, buffer: ChunkBuf) {
        self.free.push(buffer);
        self.waker.wake();
    }
}

/// A chunk that is open, being opened, or failed.
pub(crate) struct OpenChunk {
    pub(crate) chunk: usize,
    result: OnceLock<Result<ChunkBuf>>,
    home: Arc<Home>,
}

impl OpenChunk {
    /// The chunk's rows, or the error; `None` while the chunk is being opened.
    pub(crate) fn get(&self) -> Option<&Result<ChunkBuf>> {
        self.result.get()
    }

    pub(crate) fn failed(&self) -> bool {
        matches!(self.get(), Some(Err(_)))
    }
}

impl Drop for OpenChunk {
    fn drop(&mut self) {
        if let Some(Ok(buffer)) = self.result.take() {
            self.home.give_back(buffer);
        }
    }
}

/// A chunk that is being opened.
pub(crate) struct Opening {
    entry: Arc<OpenChunk>,
    buffer: Option<ChunkBuf>,
}

impl Opening {
    pub(crate) fn chunk(&self) -> usize {
        self.entry.chunk
    }

    /// Whether no piece of a batch waits for the chunk any more.
    pub(crate) fn is_forgotten(&self) -> bool {
        Arc::strong_count(&self.entry) == 1
    }

    /// Ends the opening with an error.
    pub(crate) fn fail(&self, samples: &Samples, sample: &Sample, error: Error) {
        let error = match sample.pieces.first().and_then(|piece| piece.extent) {
            Some(first) if error.site().path.is_none() => {
                error.with_path(samples.sources.path(first.source))
            }
            _ => error,
        };
        self.settle(Err(error));
    }

    /// Opens the chunk from the extents in `sample`. All their bytes are in memory, some possibly
    /// in `encoded`.
    pub(crate) fn open(
        mut self,
        samples: &Samples,
        sample: &mut Sample,
        encoded: &Encoded,
        scratch: &mut Scratch,
    ) {
        let mut buffer = self.buffer.take().expect("taken once");
        // Frees the ring bytes and the worker's buffer before any thread sees the open chunk.
        let opened = open(
            samples,
            self.entry.chunk,
            sample,
            encoded,
            scratch,
            &mut buffer,
        );
        match opened {
            Ok(()) => self.settle(Ok(buffer)),
            Err(error) => {
                self.buffer = Some(buffer);
                self.fail(samples, sample, error);
            }
        }
    }

    fn settle(&self, result: Result<ChunkBuf>) {
        let _ = self.entry.result.set(result);
        self.entry.home.waker.wake();
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.entry.home.give_back(buffer);
        }
    }
}

/// Calls the dataset to open a chunk into `buffer`. Afterwards the memory of the encoded bytes is
/// free again.
pub(super) fn open(
    samples: &Samples,
    chunk: usize,
    sample: &mut Sample,
    encoded: &Encoded,
    scratch: &mut Scratch,
    buffer: &mut ChunkBuf,
) -> Result<()> {
    let rows = samples.rows_of_chunk(chunk);
    let handlers = &samples.recipe.handlers;
    buffer.begin(rows as usize, handlers.len());
    let pieces = encoded.pieces(samples, sample);
    caught(Stage::Decode, || {
        samples
            .in_chunks()?
            .open_chunk(chunk, &pieces, scratch, buffer)
    })?;
    buffer.incomplete().map_or(Ok(()), |(field, there)| {
        let name = handlers.get(field).map_or("?", |handler| &handler.name);
        let message = format!("the chunk has {rows} samples, but {there} of field `{name}`");
        Err(Error::new(ErrorKind::Decode, Stage::Decode, message))
    })
}

/// A buffer for the encoded bytes of one chunk or one sample. It is reused unless slices of the
/// last chunk's bytes are still in use.
#[derive(Default)]
pub(crate) struct Encoded(Option<Arc<RegionBytes>>);

impl Encoded {
    /// Allocates nothing for 0 bytes.
    pub(crate) fn new(bytes: usize, what: &str) -> Result<Self> {
        Ok(Self(
            (bytes > 0)
                .then(|| RegionBytes::new(bytes, what).map(Arc::new))
                .transpose()?,
        ))
    }

    /// Allocates the buffer if there is none, or if slices of the last chunk's bytes are still in
    /// use.
    pub(crate) fn make_free(&mut self, bytes: usize, what: &str) -> Result<()> {
        if self.0.as_mut().and_then(Arc::get_mut).is_none() {
            *self = Self::new(bytes, what)?;
        }
        Ok(())
    }

    /// The whole buffer; empty while slices of it are still in use.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.0
            .as_mut()
            .and_then(Arc::get_mut)
            .map_or(&mut [], RegionBytes::as_mut_slice)
    }

    /// Reads the sample's pieces that are in storage into this buffer, by calling `read`. Returns
    /// false if a piece is missing or the buffer is too small; then all stored pieces count as
    /// missing.
    pub(crate) fn fetch(
        &mut self,
        samples: &Samples,
        sample: &mut Sample,
        read: impl FnMut(&Extent, &mut [u8]) -> Cached,
    ) -> Result<bool> {
        let all = samples.fetch(sample, None, self.bytes_mut(), read)?;
        if !all {
            let brought = sample
                .pieces
                .iter_mut()
                .filter(|piece| matches!(piece.place, Place::Buffer(_)));
            brought.for_each(|piece| piece.place = Place::Storage);
        }
        Ok(all)
    }

    /// Takes the bytes out of all pieces. All bytes are in memory, some possibly in this buffer.
    fn pieces(&self, samples: &Samples, sample: &mut Sample) -> Vec<Bytes> {
        let all = self
            .0
            .clone()
            .map_or_else(Bytes::new, |bytes| Bytes::from_owner(SharedBytes(bytes)));
        sample
            .pieces
            .iter_mut()
            .map(|piece| {
                let len = piece.len() as usize;
                match std::mem::replace(&mut piece.place, Place::Storage) {
                    Place::Ring(span, start) => Bytes::from_owner(span).slice(start..start + len),
                    Place::Buffer(start) => all.slice(start..start + len),
                    Place::Memory => piece
                        .extent
                        .and_then(|extent| samples.sources.shared(&extent))
                        .unwrap_or_default(),
                    _ => Bytes::new(),
                }
            })
            .collect()
    }
}

/// A handle to the buffer of an [`Encoded`]; the pieces share its ownership.
struct SharedBytes(Arc<RegionBytes>);

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

/// The chunks that a piece of a batch needs, each open or failed.
pub(crate) struct Held(Vec<Arc<OpenChunk>>);

impl Held {
    pub(crate) fn chunk(&self, entry: usize) -> &OpenChunk {
        &self.0[entry]
    }
}

/// Rows of a batch that wait for the same chunks.
struct WaitingRows {
    run: RowRun,
    position: u64,
    /// The needed entries of the sequence; pieces of many batches share the list.
    entries: Arc<[usize]>,
}

/// An entry of the sequence, from its opening until no piece needs it.
struct ChunkEntry {
    open: Arc<OpenChunk>,
    /// The position from which on no piece needs the chunk.
    until: u64,
}

/// The I/O thread's side of chunked datasets.
pub(crate) struct Chunks {
    home: Arc<Home>,
    /// The epoch whose chunks are being opened.
    job: Option<Arc<EpochJob>>,
    /// The sequence from entry `base` to the last opened one; `None` for an entry that no piece
    /// needs any more.
    entries: VecDeque<Option<ChunkEntry>>,
    base: usize,
    waiting: VecDeque<WaitingRows>,
    /// The last planned piece: its epoch, its end position, and the entries of the sequence that it
    /// needs.
    piece: Option<(Arc<EpochJob>, u64, Arc<[usize]>)>,
}

impl Chunks {
    pub(crate) fn new(home: Arc<Home>, buffers: usize) -> Self {
        Self {
            home,
            job: None,
            entries: VecDeque::with_capacity(buffers),
            base: 0,
            waiting: VecDeque::new(),
            piece: None,
        }
    }

    /// Cuts the rows of a batch into pieces, each of which waits for its chunks.
    pub(crate) fn plan(&mut self, mut run: RowRun) {
        while run.len() > 0 {
            let position = run.position();
            let (end, entries) = self.piece(&run.job, position);
            let count = (end - position).div_ceil(run.job.batches.stride()).max(1);
            let count = u32::try_from(count).unwrap_or(u32::MAX).min(run.len());
            self.waiting.push_back(WaitingRows {
                run: run.take(count),
                position,
                entries,
            });
        }
    }

    /// End position of the piece that contains `position`, and the entries of the sequence that it
    /// needs.
    fn piece(&mut self, job: &Arc<EpochJob>, position: u64) -> (u64, Arc<[usize]>) {
        if let Some((before, end, entries)) = &self.piece
            && Arc::ptr_eq(before, job)
            && position < *end
        {
            // Positions only increase, so one remembered piece suffices.
            return (*end, entries.clone());
        }
        let piece = job.order.piece(position);
        let entries: Arc<[usize]> = piece.entries.into();
        self.piece = Some((job.clone(), piece.end, entries.clone()));
        (piece.end, entries)
    }

    /// Passes rows whose chunks are open to `ready`, releases entries that are no longer needed,
    /// and returns the chunks to open next.
    pub(crate) fn advance(&mut self, mut ready: impl FnMut(RowRun, Arc<Held>)) -> Vec<Opening> {
        let mut openings = Vec::new();
        loop {
            while self
                .waiting
                .front()
                .is_some_and(|waiting| waiting.run.is_cancelled())
            {
                self.waiting.pop_front();
            }
            let Some(front) = self.waiting.front() else {
                break;
            };
            let job = front.run.job.clone();
            let position = front.position;
            let entries = front.entries.clone();
            self.turn_to(&job);
            self.let_go(position);
            self.open_ahead(position, &mut openings);
            let Some(held) = self.held(&entries) else {
                break;
            };
            let waiting = self.waiting.pop_front().expect("looked at above");
            ready(waiting.run, held);
        }
        openings
    }

    /// Releases entries that no piece needs from `position` on.
    fn let_go(&mut self, position: u64) {
        for entry in &mut self.entries {
            if entry.as_ref().is_some_and(|entry| entry.until <= position) {
                *entry = None;
            }
        }
        while matches!(self.entries.front(), Some(None)) {
            self.entries.pop_front();
            self.base += 1;
        }
    }

    /// The chunks of `entries`, once all of them are open or failed.
    fn held(&self, entries: &[usize]) -> Option<Arc<Held>> {
        Some(Arc::new(Held(
            entries
                .iter()
                .map(|number| {
                    let entry = self.entries.get(number.checked_sub(self.base)?)?.as_ref()?;
                    entry.open.get().is_some().then(|| entry.open.clone())
                })
                .collect::<Option<_>>()?,
        )))
    }

    /// Switches to the chunk sequence of another epoch. Chunks that begin the new sequence stay
    /// open if they are open already.
    fn turn_to(&mut self, job: &Arc<EpochJob>) {
        if self
            .job
            .as_ref()
            .is_some_and(|before| Arc::ptr_eq(before, job))
        {
            return;
        }
        let old: Vec<ChunkEntry> = std::mem::take(&mut self.entries)
            .into_iter()
            .flatten()
            .collect();
        self.base = 0;
        while let Some(Need { chunk, until }) = job.order.need(self.entries.len()) {
            let Some(entry) = old
                .iter()
                .find(|entry| entry.open.chunk == chunk && !entry.open.failed())
            else {
                break;
            };
            self.entries.push_back(Some(ChunkEntry {
                open: entry.open.clone(),
                until,
            }));
        }
        self.job = Some(job.clone());
    }

    fn open_ahead(&mut self, position: u64, openings: &mut Vec<Opening>) {
        let Some(job) = &self.job else { return };
        while let Some(Need { chunk, until }) = job.order.need(self.base + self.entries.len()) {
            if until <= position {
                // A rank takes only some of the positions, so it may need no sample of a small
                // group.
                self.entries.push_back(None);
                continue;
            }
            let Some(buffer) = self.home.free.pop() else {
                return;
            };
            let open = Arc::new(OpenChunk {
                chunk,
                result: OnceLock::new(),
                home: self.home.clone(),
            });
            self.entries.push_back(Some(ChunkEntry {
                open: open.clone(),
                until,
            }));
            openings.push(Opening {
                entry: open,
                buffer: Some(buffer),
            });
        }
    }

    /// Drops everything that is not in flight.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
        self.entries.clear();
        self.job = None;
        self.piece = None;
    }
}

/// The memory that open chunks need.
pub(crate) struct ChunkRoom {
    /// Buffers, each for the largest chunk and the lists of its rows.
    pub(crate) open: MemoryTerm,
    /// The sequences of chunks of this epoch and the next.
    pub(crate) tables: MemoryTerm,
    /// Heap bytes of each worker while it opens a chunk.
    pub(crate) opening: usize,
    /// Encoded bytes of the largest chunk.
    pub(crate) encoded: usize,
    /// The largest number of extents in a chunk.
    pub(crate) pieces: usize,
    /// For errors: the largest chunk, and the reason for the number of buffers.
    pub(crate) largest: String,
}

impl ChunkRoom {
    /// Returns the memory that the chunks of this order need; `None` if the dataset has no chunks.
    pub(crate) fn new(
        dataset: &dyn Dataset,
        order: &EpochOrder,
        workers: usize,
    ) -> Result<Option<Self>> {
        let Some(chunks) = dataset.chunked() else {
            return Ok(None);
        };
        let count = chunks.starts().len() - 1;
        let fields = dataset.schema().len() as u64;
        let pieces = pieces_max(chunks)?;
        let mut bytes = 0;
        let mut name = String::new();
        let mut lists = 0;
        let mut encoded = 0;
        let mut opening = 0;
        for chunk in 0..count {
            let needs = chunks.chunk_bytes(chunk);
            // Every array may start on the next cache line.
            let opened = to_usize(needs.opened.saturating_add(64 * fields));
            if opened > bytes {
                bytes = opened;
                name = chunks.chunk_name(chunk);
            }
            encoded = encoded.max(to_usize(needs.encoded));
            opening = opening.max(to_usize(needs.scratch));
            let rows = chunks.starts()[chunk + 1] - chunks.starts()[chunk];
            lists = lists
                .max(to_usize(rows.saturating_mul(fields)).saturating_mul(ChunkBuf::LIST_ENTRY));
        }
        let bytes = ChunkBuf::size_for(bytes);
        let each = bytes.saturating_add(lists);
        let most = order.entries_most();
        let (least, wanted, why) = match order {
            order if order.needs_all_chunks() => (count, count, order.why_all_chunks()),
            _ if most > 1 => (
                most,
                (2 * most).min(count.max(most)),
                "the windows of this rank's lanes",
            ),
            _ => (1, (workers + 2).min(count), "a sequential order"),
        };
        // While the last batches of an epoch are in flight, the tables of the next epoch are
        // prepared.
        let tables = order.heap_bytes().saturating_mul(2);
        Ok(Some(Self {
            open: MemoryTerm::CHUNKS
                .of(wanted, each)
                .taking(bytes)
                .or_least(least, each, 0),
            tables: MemoryTerm::new(
                MemoryTerm::TABLES.name,
                "samples in flight, order of chunks",
            )
            .of(1, tables),
            opening,
            encoded,
            pieces,
            largest: format!(
                "largest chunk: {name}, {} when open, {least} at once: {why}",
                plan::ShownBytes(bytes)
            ),
        }))
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The largest number of extents in a chunk.
fn pieces_max(chunks: &dyn Chunked) -> Result<usize> {
    let mut extents = Vec::new();
    (0..chunks.starts().len() - 1).try_fold(0, |most, chunk| {
        extents.clear();
        chunks.chunk_extents(chunk, &mut extents)?;
        Ok(most.max(extents.len()))
    })
}

/// The chunk starts of a dataset, for its orders.
pub(crate) fn starts_of(dataset: &dyn Dataset) -> Result<Option<ChunkStarts>> {
    let Some(chunks) = dataset.chunked() else {
        return Ok(None);
    };
    let starts = chunks.starts();
    let rising = starts.first() == Some(&0) && starts.windows(2).all(|pair| pair[0] <= pair[1]);
    let whole = chunks.is_whole();
    let small = starts
        .windows(2)
        .all(|pair| pair[1] - pair[0] <= u64::from(u32::MAX));
    if !rising || !small || (whole && starts.last() != Some(&dataset.len())) {
        let message = "chunk starts must ascend from 0 to the dataset's length, with fewer than \
             2^32 samples per chunk";
        return Err(Error::new(ErrorKind::User, Stage::Build, message));
    }
    Ok(Some(ChunkStarts {
        starts: starts.into(),
        whole,
    }))
}
