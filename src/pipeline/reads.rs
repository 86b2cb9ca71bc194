//! Rows and chunks that are being read from storage: the I/O thread's table of reads in flight.
//!
//! ```text
//! row, permit ──ask, check──► room in the ring? ──► operations ──► Reader ──► completions ──► a worker, or done here
//! chunk, buffer ─────────────────┘ └ no: it waits, and all others behind it
//! ```
//!
//! First a row takes a permit (an idle [`Sample`]), a chunk its buffer. Then each takes all its
//! ring bytes at once, or none.

use super::Core;
use super::fetch::{Fetch, Whose};
use super::recipe::How;
use super::task::{Place, RowRun, Sample};
use super::watchdog::Doing;
use crossbeam_channel::Receiver;
use feedline_base::PAGE;
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught};
use feedline_core::decode::Scratch;
use feedline_core::memory::{ByteRing, IoBuf};
use feedline_core::storage::{Extent, may_pass};
use feedline_reader::{Completion, ReadOp, Reader};
use feedline_report::meter::Effort;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The I/O thread itself finishes samples that copy at most this many bytes. Passing them to a
/// worker costs more than the copy.
const COPY_HERE: u64 = 64 << 10;

/// Result of an attempt to begin a row or chunk.
pub(super) enum Begun {
    /// Its reads are queued, or it is complete.
    Yes,
    /// It waits for room in the ring.
    NoRoom,
}

/// Reads in flight and their resources.
pub(super) struct Reads {
    core: Arc<Core>,
    pub(super) reader: Box<dyn Reader>,
    pub(super) ring: Option<ByteRing>,
    /// Indexed by the upper half of an operation's tag. The lower half is the index of the piece in
    /// its sample.
    flying: Vec<Option<Fetch>>,
    vacant: Vec<usize>,
    /// Idle permits, and the channel by which workers return them.
    #[allow(
        clippy::vec_box,
        reason = "permits move through queues and keep their own buffers: boxed once, at the \
             start"
    )]
    idle: Vec<Box<Sample>>,
    given_back: Receiver<Box<Sample>>,
    /// The fetch that waits for room in the ring. Everything else waits behind it.
    stuck: Option<Fetch>,
    /// Operations that did not fit into the reader.
    pub(super) ops: VecDeque<ReadOp>,
    scratch: Scratch,
    /// Whether a single row needs neither a decoder nor a transform.
    light: bool,
}

impl Reads {
    pub(super) fn new(
        core: Arc<Core>,
        reader: Box<dyn Reader>,
        ring: Option<ByteRing>,
        permits: usize,
        given_back: Receiver<Box<Sample>>,
    ) -> Self {
        let parts = core.samples.recipe.parts_max(&core.samples.promised);
        let places = core.watch.reads.len();
        Self {
            reader,
            ring,
            flying: (0..places).map(|_| None).collect(),
            vacant: (0..places).rev().collect(),
            idle: (0..permits)
                .map(|_| Box::new(Sample::with_room(parts)))
                .collect(),
            given_back,
            stuck: None,
            ops: VecDeque::with_capacity(parts),
            scratch: Scratch::default(),
            light: core.samples.recipe.effort() <= Effort::Light
                && core.samples.chunk_starts.is_none(),
            core,
        }
    }

    /// Collects the permits that workers returned.
    pub(super) fn listen(&mut self) {
        while let Ok(sample) = self.given_back.try_recv() {
            self.idle.push(sample);
        }
    }

    /// Whether a row can begin: one waits with its permit for ring bytes, or a permit is idle.
    pub(super) fn can_begin(&self) -> bool {
        self.stuck.is_some() || !self.idle.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.reader.in_flight() >= self.reader.depth()
    }

    /// The fetch that waits for room.
    pub(super) fn take_stuck(&mut self) -> Option<Fetch> {
        self.stuck.take()
    }

    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.is_some()
    }

    /// Submits operations to the reader; returns false if the reader has no room for all of them.
    pub(super) fn submit(&mut self) -> bool {
        while let Some(op) = self.ops.pop_front() {
            if let Err(op) = self.reader.submit(op) {
                self.ops.push_front(op);
                return false;
            }
        }
        true
    }

    /// Asks the dataset for the parts of the row's sample, and starts their reads. A permit must be
    /// free.
    pub(super) fn begin(&mut self, mut run: RowRun, now: &mut u64) -> Begun {
        let core = self.core.clone();
        let samples = &core.samples;
        let mut sample = self.idle.pop().expect("checked by the caller");
        let asked = caught(Stage::Read, || {
            let id = run.id()?;
            core.watch.planner.begin(Doing::Planning, Some(id));
            samples.ask(id, &mut sample, &mut run.rows)?;
            for piece in sample
                .pieces
                .iter_mut()
                .filter(|piece| matches!(piece.place, Place::Row))
            {
                let part = piece
                    .at
                    .map(|start| (start, &samples.recipe.handlers[piece.field].how));
                if !piece
                    .extent
                    .is_some_and(|extent| self.writes_rows(&extent, part))
                {
                    piece.place = Place::Storage;
                }
            }
            self.check(&sample)
        });
        *now = core.meters.clock.now();
        let fetch = Fetch::new(Whose::Row(run), sample);
        match asked {
            Ok(()) => self.read(fetch, *now),
            Err(error) => {
                self.fail(fetch, error);
                Begun::Yes
            }
        }
    }

    /// Rejects a fetch that can never fit the ring, so that it does not wait forever.
    pub(super) fn check(&self, sample: &Sample) -> Result<()> {
        let mut count = 0;
        let mut bytes = 0_usize;
        for extent in sample.stored() {
            let need = self
                .reader
                .footprint(&extent)
                .bytes
                .checked_next_multiple_of(PAGE);
            count += 1;
            bytes = bytes.saturating_add(need.unwrap_or(usize::MAX));
        }
        if count == 0
            || self
                .ring
                .as_ref()
                .is_some_and(|ring| ring.can_hold(count, bytes))
        {
            return Ok(());
        }
        let room = self.ring.as_ref().map_or(0, ByteRing::capacity);
        let message = match sample.id {
            Some(_) => {
                format!(
                    "the sample needs {bytes} bytes of read buffer, but only {room} were reserved, \
                     for the largest sample that the dataset announced"
                )
            }
            None => {
                format!(
                    "the chunk's {count} extents need {bytes} bytes of buffer; the dataset \
                     announced less when the loader was built"
                )
            }
        };
        Err(Error::new(ErrorKind::Limit, Stage::Read, message)
            .with_amounts(bytes as u64, room as u64))
    }

    /// Whether the reader can write the bytes directly into their row. `part`: the offset of the
    /// bytes in the row and how the field is filled, unless the bytes are the whole row.
    fn writes_rows(&self, extent: &Extent, part: Option<(usize, &How)>) -> bool {
        // An array that is large enough to matter starts on a page; any other needs a reader with
        // alignment 1.
        let aligned = |bytes: usize| bytes.is_multiple_of(self.reader.mem_align());
        let begins_aligned = match part {
            None => true,
            Some((start, How::InPlace(row_bytes))) => aligned(start) && aligned(*row_bytes),
            Some(_) => false,
        };
        self.reader.footprint(extent).in_place && aligned(extent.len as usize) && begins_aligned
    }

    /// Starts the reads if the ring has room for all their bytes; otherwise the fetch waits.
    pub(super) fn read(&mut self, mut fetch: Fetch, now: u64) -> Begun {
        if !self.reserve(&mut fetch.sample) {
            self.stuck = Some(fetch);
            return Begun::NoRoom;
        }
        let entry = self
            .vacant
            .pop()
            .expect("as many places as permits and chunks");
        fetch.since = now;
        let Fetch {
            whose,
            sample,
            remaining,
            ..
        } = &mut fetch;
        for (number, piece) in sample.pieces.iter_mut().enumerate() {
            let Some(extent) = piece.extent.filter(|extent| extent.len > 0) else {
                continue;
            };
            let buf = match (
                std::mem::replace(&mut piece.place, Place::Storage),
                &mut *whose,
            ) {
                (Place::Ring(span, _), _) => IoBuf::from(span),
                (Place::Row, Whose::Row(run)) => {
                    let field = self.core.samples.recipe.handlers[piece.field].outputs.start;
                    IoBuf::from(run.rows.lend(field, piece.in_row()))
                }
                (other, _) => {
                    piece.place = other;
                    continue;
                }
            };
            if *remaining == 0 {
                self.core.watch.reads[entry].read(sample.id, &extent);
            }
            *remaining += 1;
            self.ops.push_back(ReadOp {
                tag: (entry as u64) << 32 | number as u64,
                extent,
                buf,
            });
        }
        let done = fetch.remaining == 0;
        self.flying[entry] = Some(fetch);
        if done {
            self.finish(entry, now);
        }
        Begun::Yes
    }

    /// Reserves ring bytes for all pieces that must be read from storage. If there is no room for
    /// all, it reserves none and returns false.
    fn reserve(&self, sample: &mut Sample) -> bool {
        for number in 0..sample.pieces.len() {
            let piece = &mut sample.pieces[number];
            let (Some(extent), Place::Storage) =
                (piece.extent.filter(|extent| extent.len > 0), &piece.place)
            else {
                continue;
            };
            let need = self.reader.footprint(&extent).bytes;
            let Some(span) = self.ring.as_ref().and_then(|ring| ring.reserve(need)) else {
                let taken = sample
                    .pieces
                    .iter_mut()
                    .filter(|piece| matches!(piece.place, Place::Ring(..)));
                taken.for_each(|piece| piece.place = Place::Storage);
                return false;
            };
            piece.place = Place::Ring(span, 0);
        }
        true
    }

    /// Records the end of one read.
    pub(super) fn complete(&mut self, completion: Completion, now: u64) {
        let entry = (completion.tag >> 32) as usize;
        let piece = completion.tag as u32 as usize;
        let fetch = self.flying[entry]
            .as_mut()
            .expect("a completion belongs to a fetch in flight");
        fetch.complete(piece, completion.buf, completion.result);
        if self.core.meters.on {
            self.core
                .meters
                .storage
                .latency
                .record(now.saturating_sub(fetch.since));
        }
        if fetch.remaining == 0 {
            self.finish(entry, now);
        }
    }

    /// Passes on a row or chunk whose reads have all ended.
    fn finish(&mut self, entry: usize, now: u64) {
        let mut fetch = self.flying[entry].take().expect("in flight");
        self.vacant.push(entry);
        self.core.watch.reads[entry].end();
        if let Whose::Row(run) = &fetch.whose {
            run.rows.times().read.fetch_max(now, Ordering::Relaxed);
        }
        if fetch.whose.is_over() {
            return self.recycle(fetch);
        }
        match fetch.error() {
            Some(error) if !may_pass(error) => {
                if let Some(error) = fetch.take_error() {
                    self.fail(fetch, error);
                }
            }
            None if self.light && fetch.sample.staged() <= COPY_HERE => self.fill(fetch),
            // A worker retries failed pieces: it may sleep, and this thread may not.
            _ => self.core.to_workers.finish(fetch),
        }
    }

    /// Fills a row on this thread.
    fn fill(&mut self, mut fetch: Fetch) {
        let samples = &self.core.samples;
        if let Whose::Row(run) = &mut fetch.whose {
            if let Err(error) = Scratch::guarded(
                &mut self.scratch,
                |own| own,
                |scratch| samples.fill_fetched(run, &fetch.sample, scratch),
            ) {
                let error = samples.in_field(error, &self.scratch);
                return self.fail(fetch, error);
            }
            run.rows.finish_row();
            self.core.meters.storage.in_place.add_alone(1);
        }
        self.recycle(fetch);
    }

    /// Ends a failed fetch. For a row, a worker finds a substitute, or the batch gets the error.
    /// For a chunk, all its rows get the error.
    pub(super) fn fail(&mut self, mut fetch: Fetch, error: Error) {
        let samples = &self.core.samples;
        let sample = &fetch.sample;
        match &mut fetch.whose {
            Whose::Row(run) => {
                self.core.to_workers.row_failed(
                    samples,
                    run,
                    sample.id,
                    samples.named(error, sample),
                    None,
                );
            }
            Whose::Chunk(opening) => opening.fail(samples, sample, error),
        }
        self.recycle(fetch);
    }

    /// Takes the permit back. Only rows have one.
    pub(super) fn recycle(&mut self, fetch: Fetch) {
        let Fetch {
            whose: Whose::Row(run),
            mut sample,
            ..
        } = fetch
        else {
            return;
        };
        drop(run);
        sample.clear();
        self.idle.push(sample);
    }
}
