//! What travels between the threads: rows of a batch, and what a sample or a chunk is made of.
//!
//! ```text
//! Job ──► Run (rows without samples)        Sample (id, and a Piece for each part that it is made of)
//! ```

use crate::error::Result;
use crate::memory::{RingSpan, Rows, Ticket};
use crate::order::{Batches, EpochOrder};
use crate::storage::Extent;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One epoch being planned and filled.
pub(crate) struct Job {
    /// The run of the iterator that it belongs to, and the one that is wanted now, as the exchange knows it.
    pub(crate) generation: u64,
    pub(crate) current: Arc<AtomicU64>,
    pub(crate) epoch: u64,
    pub(crate) order: EpochOrder,
    pub(crate) batches: Batches,
}

impl Job {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.current.load(Ordering::Relaxed) != self.generation
    }

    /// A run's place of a batch: tickets count across its epochs.
    pub(crate) fn ticket(&self, sequence: u64, batch: u64) -> Ticket {
        let position = self.batches.position(batch, 0);
        Ticket { generation: self.generation, sequence, epoch: self.epoch, batch, position }
    }
}

/// Rows of one batch that wait for their samples, and the job that they belong to.
pub(crate) struct Run {
    pub(crate) job: Arc<Job>,
    pub(crate) rows: Rows,
}

impl Run {
    /// Takes the first `count` rows.
    pub(crate) fn take(&mut self, count: u32) -> Self {
        Self { job: self.job.clone(), rows: self.rows.take(count) }
    }

    pub(crate) fn len(&self) -> u32 {
        self.rows.len()
    }

    /// Position in the epoch of the first row; past its end for rows that fill up.
    pub(crate) fn position(&self) -> u64 {
        self.job.batches.position(self.rows.ticket().batch, self.rows.first())
    }

    /// Sample id of the first row. The sampler may be the user's.
    pub(crate) fn id(&self) -> Result<u64> {
        self.job.order.id(self.position())
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.job.is_cancelled()
    }
}

/// What a sample, or a chunk, is made of, and where its bytes are. Reused from sample to sample; those of the planner are
/// permits.
#[derive(Default)]
pub(crate) struct Sample {
    /// Nothing before the order has named it, and for a chunk.
    pub(crate) id: Option<u64>,
    pub(crate) pieces: Vec<Piece>,
    /// Bytes of the index that a decoder wants.
    pub(super) index: Vec<u8>,
}

/// The bytes of one part of a sample, or of one extent of a chunk.
pub(crate) struct Piece {
    /// Number of the field in the dataset's schema; of a chunk, 0.
    pub(crate) field: usize,
    /// The bytes go through `Dataset::check`, so that storage does not write them into the row.
    pub(crate) checked: bool,
    /// They go through `Dataset::open`, too.
    pub(crate) framed: bool,
    /// Where they are in the dataset's sources; only the length means something for bytes of the index.
    pub(crate) extent: Option<Extent>,
    pub(crate) place: Place,
    /// It could not be read.
    pub(crate) failed: bool,
}

/// Where the bytes of a piece are now.
pub(crate) enum Place {
    /// In a file, or on the way from there.
    Storage,
    /// In a source that is memory.
    Memory,
    /// At this offset of the sample's own bytes, so many.
    Index(usize, usize),
    /// They are those of the last piece that is not like this.
    Same,
    /// Where the batch will have them, or to be read to there.
    Row,
    /// In the ring, from this offset of the span.
    Ring(RingSpan, usize),
    /// At this offset of a buffer of the worker's.
    Buffer(usize),
}

impl Sample {
    /// Bytes of one in flight beside its struct, with so many parts.
    pub(crate) fn heap_bytes(parts: usize) -> usize {
        parts * (size_of::<Piece>() + INDEX_BYTES)
    }

    pub(crate) fn with_room(parts: usize) -> Self {
        Self { id: None, pieces: Vec::with_capacity(parts), index: Vec::with_capacity(parts * INDEX_BYTES) }
    }

    /// Lets go of all bytes.
    pub(crate) fn clear(&mut self) {
        self.id = None;
        self.pieces.clear();
        self.index.clear();
    }

    /// The place of its first bytes in storage.
    pub(crate) fn first_extent(&self) -> Option<Extent> {
        self.pieces.iter().filter(|piece| !matches!(piece.place, Place::Memory)).find_map(|piece| piece.extent)
    }

    /// Extents that storage has to bring, beside those that it can write into the row.
    pub(crate) fn stored(&self) -> impl Iterator<Item = Extent> {
        let stored = self.pieces.iter().filter(|piece| matches!(piece.place, Place::Storage));
        stored.filter_map(|piece| piece.extent).filter(|extent| extent.len > 0)
    }

    /// Bytes that were read and must be copied or decoded.
    pub(crate) fn staged(&self) -> u64 {
        let staged = self.pieces.iter().filter(|piece| matches!(piece.place, Place::Ring(..)));
        staged.map(Piece::len).sum()
    }
}

/// Room for a label, say, in a part of the index; more is taken when it is needed.
const INDEX_BYTES: usize = 16;

impl Piece {
    /// Bytes that are taken as they stand.
    pub(crate) fn new(field: usize, extent: Option<Extent>, place: Place) -> Self {
        Self { field, checked: false, framed: false, extent, place, failed: false }
    }

    /// Bytes in the source.
    pub(crate) fn len(&self) -> u64 {
        self.extent.map_or(0, |extent| extent.len)
    }
}
