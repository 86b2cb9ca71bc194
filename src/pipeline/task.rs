//! The items that the threads pass to each other: rows of a batch, and the parts of a sample or
//! chunk.
//!
//! ```text
//! EpochJob ──► RowRun (rows without samples)        Sample (id, and a Piece for each of its parts)
//! ```

use crate::order::{Batches, EpochOrder};
use feedline_base::error::Result;
use feedline_core::memory::{RingSpan, Rows, Ticket};
use feedline_core::storage::Extent;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One epoch being planned and filled.
pub(crate) struct EpochJob {
    /// The run of the iterator that this job belongs to, and the run that the iterator currently
    /// wants.
    pub(crate) generation: u64,
    pub(crate) current: Arc<AtomicU64>,
    pub(crate) epoch: u64,
    pub(crate) order: EpochOrder,
    pub(crate) batches: Batches,
}

impl EpochJob {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.current.load(Ordering::Relaxed) != self.generation
    }

    /// The ticket of a batch. Tickets count across all epochs of the run.
    pub(crate) fn ticket(&self, sequence: u64, batch: u64) -> Ticket {
        let position = self.batches.position(batch, 0);
        let group = self.batches.group(batch);
        Ticket {
            generation: self.generation,
            sequence,
            epoch: self.epoch,
            batch,
            position,
            group,
        }
    }
}

/// Rows of one batch that wait for their samples, and their job.
pub(crate) struct RowRun {
    pub(crate) job: Arc<EpochJob>,
    pub(crate) rows: Rows,
}

impl RowRun {
    /// Takes the first `count` rows.
    pub(crate) fn take(&mut self, count: u32) -> Self {
        Self {
            job: self.job.clone(),
            rows: self.rows.take(count),
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.rows.len()
    }

    /// Position of the first row in the epoch; padding rows are past the end.
    pub(crate) fn position(&self) -> u64 {
        self.job
            .batches
            .position(self.rows.ticket().batch, self.rows.first())
    }

    /// Sample id of the first row. The sampler may be user code.
    pub(crate) fn id(&self) -> Result<u64> {
        self.job.order.id(self.position())
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.job.is_cancelled()
    }
}

/// The parts of a sample or chunk, and where their bytes are. Reused between samples; each `Sample`
/// of the planner is a permit for one sample in flight.
#[derive(Default)]
pub(crate) struct Sample {
    /// `None` for a chunk, and until the order has named the sample.
    pub(crate) id: Option<u64>,
    pub(crate) pieces: Vec<Piece>,
    /// Index bytes that a decoder needs.
    pub(super) index: Vec<u8>,
}

/// The bytes of one part of a sample, or of one extent of a chunk.
pub(crate) struct Piece {
    /// Number of the field in the dataset's schema; 0 in a chunk.
    pub(crate) field: usize,
    /// The bytes go through `Framed::check`, so storage must not write them into the row.
    pub(crate) checked: bool,
    /// The bytes also go through `Framed::open`.
    pub(crate) framed: bool,
    /// Location in the dataset's sources. For index bytes, only the length has a meaning.
    pub(crate) extent: Option<Extent>,
    pub(crate) place: Place,
    /// The offset of the bytes in the row, for a field of several parts.
    pub(crate) at: Option<usize>,
    /// The read of this piece failed.
    pub(crate) failed: bool,
}

/// Where the bytes of a piece currently are.
pub(crate) enum Place {
    /// In a file, or being read from it.
    Storage,
    /// In a memory source.
    Memory,
    /// In the sample's own bytes: offset and length.
    Index(usize, usize),
    /// The same bytes as the last piece whose place is not `Same`.
    Same,
    /// In the row of the batch, or to be read into it.
    Row,
    /// In the ring, from this offset of the span.
    Ring(RingSpan, usize),
    /// At this offset of a worker's buffer.
    Buffer(usize),
}

impl Sample {
    /// Heap bytes of one sample in flight with this many parts.
    pub(crate) fn heap_bytes(parts: usize) -> usize {
        parts * (size_of::<Piece>() + INDEX_BYTES)
    }

    pub(crate) fn with_room(parts: usize) -> Self {
        Self {
            id: None,
            pieces: Vec::with_capacity(parts),
            index: Vec::with_capacity(parts * INDEX_BYTES),
        }
    }

    /// Drops all bytes.
    pub(crate) fn clear(&mut self) {
        self.id = None;
        self.pieces.clear();
        self.index.clear();
    }

    /// The location of the sample's first bytes in storage.
    pub(crate) fn first_extent(&self) -> Option<Extent> {
        self.pieces
            .iter()
            .filter(|piece| !matches!(piece.place, Place::Memory))
            .find_map(|piece| piece.extent)
    }

    /// Extents that must be read from storage, apart from those read directly into the row.
    pub(crate) fn stored(&self) -> impl Iterator<Item = Extent> {
        let stored = self
            .pieces
            .iter()
            .filter(|piece| matches!(piece.place, Place::Storage));
        stored
            .filter_map(|piece| piece.extent)
            .filter(|extent| extent.len > 0)
    }

    /// Bytes that were read and must still be copied or decoded.
    pub(crate) fn staged(&self) -> u64 {
        let staged = self
            .pieces
            .iter()
            .filter(|piece| matches!(piece.place, Place::Ring(..)));
        staged.map(Piece::len).sum()
    }
}

/// Room for one index part, such as a label. Larger parts allocate.
const INDEX_BYTES: usize = 16;

impl Piece {
    /// A piece whose bytes need no check.
    pub(crate) fn new(field: usize, extent: Option<Extent>, place: Place) -> Self {
        Self {
            field,
            checked: false,
            framed: false,
            extent,
            place,
            at: None,
            failed: false,
        }
    }

    /// Length of the bytes in the source.
    pub(crate) fn len(&self) -> u64 {
        self.extent.map_or(0, |extent| extent.len)
    }

    /// The byte range that the piece fills in the row.
    pub(crate) fn in_row(&self) -> Range<usize> {
        let start = self.at.unwrap_or(0);
        start..start + self.len() as usize
    }
}
