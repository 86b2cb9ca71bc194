//! Rows on their way through storage: the I/O thread's table of reads in flight.
//!
//! ```text
//! row, permit ──ask, check──► room in the ring? ──► operations ──► Reader ──► completions ──► a worker, or done here
//!                                  └ no: it waits, and all others behind it
//! ```
//!
//! A row takes a permit (an idle [`Sample`]) first, then all its bytes of the ring at once, or none.

use super::Core;
use super::recipe::Effort;
use super::task::{Piece, Place, RowTask, Run, Sample};
use super::watchdog::Doing;
use crate::decode::Scratch;
use crate::error::{Error, ErrorKind, Result, Stage, caught};
use crate::memory::{ByteRing, IoBuf};
use crate::storage::{Completion, Extent, ReadOp, Reader, may_pass};
use crate::tensor::PAGE;
use crossbeam_channel::Receiver;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Samples of which at most this many bytes must be copied are finished by the I/O thread itself: a hop to a worker
/// costs more than the copy.
const COPY_HERE: u64 = 64 << 10;

/// What a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// This entry of the table, this piece of its sample.
    Row(usize, usize),
    /// This chunk in flight, this piece of it.
    Chunk(usize, usize),
}

impl Tag {
    const CHUNK: u64 = 1 << 63;

    pub(super) fn pack(self) -> u64 {
        match self {
            Self::Row(entry, piece) => (entry as u64) << 32 | piece as u64,
            Self::Chunk(slot, piece) => Self::CHUNK | (slot as u64) << 32 | piece as u64,
        }
    }

    pub(super) fn unpack(tag: u64) -> Self {
        let (place, piece) = ((tag & !Self::CHUNK) >> 32, tag & u64::from(u32::MAX));
        match tag & Self::CHUNK {
            0 => Self::Row(place as usize, piece as usize),
            _ => Self::Chunk(place as usize, piece as usize),
        }
    }
}

/// What came of a row that was to be begun.
pub(super) enum Begun {
    /// Its reads are on their way, or it is done already.
    Yes,
    /// It waits for a permit, or for room in the ring.
    NoRoom,
}

/// Reads in flight, and what they need.
pub(super) struct Reads {
    core: Arc<Core>,
    pub(super) reader: Box<dyn Reader>,
    pub(super) ring: Option<ByteRing>,
    /// Rows by the number in their tags.
    flying: Vec<Option<RowTask>>,
    vacant: Vec<usize>,
    /// Permits that nobody uses, and the way by which workers give them back.
    #[allow(
        clippy::vec_box,
        reason = "permits move through queues and keep their own buffers: boxed once, at the start"
    )]
    idle: Vec<Box<Sample>>,
    given_back: Receiver<Box<Sample>>,
    /// The row that waits for room in the ring; everything else waits behind it.
    stuck: Option<RowTask>,
    /// Operations that the reader had no room for.
    pub(super) ops: VecDeque<ReadOp>,
    scratch: Scratch,
    /// Rows need neither decoder nor transform.
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
        let parts = core.samples.recipe.handlers.len();
        Self {
            reader,
            ring,
            flying: (0..permits).map(|_| None).collect(),
            vacant: (0..permits).rev().collect(),
            idle: (0..permits).map(|_| Box::new(Sample::with_room(parts))).collect(),
            given_back,
            stuck: None,
            ops: VecDeque::with_capacity(parts),
            scratch: Scratch::default(),
            light: core.samples.recipe.effort() != Effort::Decode,
            core,
        }
    }

    /// Takes back the permits that workers no longer need.
    pub(super) fn listen(&mut self) {
        while let Ok(sample) = self.given_back.try_recv() {
            self.idle.push(sample);
        }
    }

    /// A row has a permit, or can have one.
    pub(super) fn can_begin(&self) -> bool {
        self.stuck.is_some() || !self.idle.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.reader.in_flight() >= self.reader.depth()
    }

    /// The row that waits for room.
    pub(super) fn take_stuck(&mut self) -> Option<RowTask> {
        self.stuck.take()
    }

    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.is_some()
    }

    /// Hands operations to the reader; false when it has no room for all.
    pub(super) fn submit(&mut self) -> bool {
        while let Some(op) = self.ops.pop_front() {
            if let Err(op) = self.reader.submit(op) {
                self.ops.push_front(op);
                return false;
            }
        }
        true
    }

    /// Asks what the row's sample is made of, and has it read. There must be a permit.
    pub(super) fn begin(&mut self, mut run: Run, now: &mut u64) -> Begun {
        let core = self.core.clone();
        let samples = &core.samples;
        let mut sample = self.idle.pop().expect("checked by the caller");
        let asked = caught(Stage::Read, || {
            let id = run.id()?;
            core.watch.planner.begin(Doing::Planning, Some(id));
            samples.ask(id, &mut sample, &mut run.rows)?;
            self.check(&sample)
        });
        *now = core.meters.clock.now();
        let mut task = RowTask::new(run, sample);
        match asked {
            Ok(()) => self.read(task, *now),
            Err(error) => {
                self.row_failed(&mut task, error);
                self.recycle(task);
                Begun::Yes
            }
        }
    }

    /// What can never fit the ring must not wait for it.
    fn check(&self, sample: &Sample) -> Result<()> {
        let outside =
            sample.stored().filter(|(_, piece)| !self.goes_into_row(piece)).filter_map(|(_, piece)| piece.extent);
        let need = |extent: Extent| self.reader.footprint(&extent).bytes.checked_next_multiple_of(PAGE);
        let bytes = outside.map(|extent| need(extent).unwrap_or(usize::MAX)).fold(0, usize::saturating_add);
        let room = self.ring.as_ref().map_or(0, ByteRing::capacity);
        if bytes <= room {
            return Ok(());
        }
        let message =
            format!("sample needs {bytes} bytes of read buffer, but by `sample_bytes_max()` only {room} are reserved");
        Err(Error::new(ErrorKind::Limit, Stage::Read, message))
    }

    /// The reader can write the piece straight into its row.
    fn goes_into_row(&self, piece: &Piece) -> bool {
        // Row addresses: the array starts on a page when it is large enough to matter; else alignment 1 is needed.
        let aligned = |extent: Extent| {
            self.reader.footprint(&extent).in_place && (extent.len as usize).is_multiple_of(self.reader.mem_align())
        };
        self.core.samples.goes_into_row(piece) && piece.extent.is_some_and(aligned)
    }

    /// Has the row's bytes read when there is room for all of them.
    pub(super) fn read(&mut self, mut task: RowTask, now: u64) -> Begun {
        if !self.reserve(&mut task.sample) {
            self.stuck = Some(task);
            return Begun::NoRoom;
        }
        let entry = self.vacant.pop().expect("as many places as permits");
        task.since = now;
        let RowTask { run, sample, remaining, .. } = &mut task;
        for (number, piece) in sample.pieces.iter_mut().enumerate() {
            let buf = match std::mem::replace(&mut piece.place, Place::Storage) {
                Place::Ring(span, _) => IoBuf::from(span),
                Place::Row => IoBuf::from(run.rows.lend(self.core.samples.recipe.handlers[piece.field].outputs.start)),
                other => {
                    piece.place = other;
                    continue;
                }
            };
            let Some(extent) = piece.extent else { continue };
            if *remaining == 0 {
                self.core.watch.reads[entry].read(sample.id, &extent);
            }
            *remaining += 1;
            self.ops.push_back(ReadOp { tag: Tag::Row(entry, number).pack(), extent, buf });
        }
        let done = task.remaining == 0;
        self.flying[entry] = Some(task);
        if done {
            self.finish(entry, now);
        }
        Begun::Yes
    }

    /// Says for each piece where it is read to, and takes that of the ring; all of it, or nothing and false.
    fn reserve(&self, sample: &mut Sample) -> bool {
        for number in 0..sample.pieces.len() {
            let piece = &sample.pieces[number];
            let Some(extent) = piece.extent.filter(|extent| extent.len > 0) else { continue };
            if !matches!(piece.place, Place::Storage) {
                continue;
            }
            let place = if self.goes_into_row(piece) {
                Some(Place::Row)
            } else {
                let need = self.reader.footprint(&extent).bytes;
                self.ring.as_ref().and_then(|ring| ring.reserve(need)).map(|span| Place::Ring(span, 0))
            };
            let Some(place) = place else {
                let taken =
                    sample.pieces.iter_mut().filter(|piece| matches!(piece.place, Place::Row | Place::Ring(..)));
                taken.for_each(|piece| piece.place = Place::Storage);
                return false;
            };
            sample.pieces[number].place = place;
        }
        true
    }

    /// A read of a row has ended.
    pub(super) fn complete(&mut self, entry: usize, piece: usize, completion: Completion, now: u64) {
        let task = self.flying[entry].as_mut().expect("a completion belongs to a row in flight");
        task.complete(piece, completion.buf, completion.result);
        if self.core.meters.on {
            self.core.meters.read_latency.record(now.saturating_sub(task.since));
        }
        if task.remaining == 0 {
            self.finish(entry, now);
        }
    }

    /// All reads of a row have ended.
    fn finish(&mut self, entry: usize, now: u64) {
        let mut task = self.flying[entry].take().expect("in flight");
        self.vacant.push(entry);
        self.core.watch.reads[entry].end();
        task.run.rows.times().read.fetch_max(now, Ordering::Relaxed);
        if task.run.is_cancelled() {
            return self.recycle(task);
        }
        let here = match task.error() {
            // A worker tries again: it may sleep, and this thread may not.
            Some(error) => !may_pass(error),
            None => self.light && task.sample.staged() <= COPY_HERE,
        };
        if !here {
            return self.core.to_workers.decode(task);
        }
        if let Some((error, _)) = task.take_error() {
            self.row_failed(&mut task, error);
            return self.recycle(task);
        }
        let (samples, scratch) = (&self.core.samples, &mut self.scratch);
        match caught(Stage::Read, || samples.fill_task(&mut task, scratch)) {
            Ok(()) => {
                task.run.rows.finish_row();
                self.core.meters.read_in_place.add_alone(1);
            }
            Err(error) => self.row_failed(&mut task, error),
        }
        self.recycle(task);
    }

    /// The row cannot have its sample: a worker finds another one, or the batch has the error.
    fn row_failed(&self, task: &mut RowTask, error: Error) {
        let samples = &self.core.samples;
        let error = samples.named(error, &task.sample);
        self.core.to_workers.row_failed(samples, &mut task.run, task.sample.id, error, None);
    }

    /// Nobody needs the permit any more.
    pub(super) fn recycle(&mut self, task: RowTask) {
        let RowTask { run, mut sample, .. } = task;
        drop(run);
        sample.clear();
        self.idle.push(sample);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_what_was_packed() {
        for tag in [Tag::Row(0, 0), Tag::Row(4095, 63), Tag::Chunk(0, 0), Tag::Chunk(77, 1 << 20)] {
            assert_eq!(Tag::unpack(tag.pack()), tag);
        }
    }
}
