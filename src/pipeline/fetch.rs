//! A row or a chunk, together with the bytes that are read from storage for it.
//!
//! ```text
//! RowRun (one row)       ──┬──► Fetch: its Sample, with a Piece for each part of the row or each extent of the chunk
//! Opening (one chunk) ──┘
//! ```
//!
//! A fetch stores everything that the dataset answered about its row or chunk. So the dataset is
//! not asked again for the extents to read, and no code relies on a second answer.

use super::chunks::Opening;
use super::task::{Place, RowRun, Sample};
use feedline_base::error::{Error, Lowest, Result};
use feedline_core::memory::{IoBuf, MemoryTerm};

/// Memory for the tables of at most `pending` samples in flight.
pub(crate) fn tables(pending: usize, parts: usize) -> MemoryTerm {
    MemoryTerm::TABLES.of(
        pending,
        size_of::<Fetch>() + size_of::<Sample>() + Sample::heap_bytes(parts),
    )
}

/// A row or chunk, and the state of the reads of its bytes.
pub(crate) struct Fetch {
    pub(crate) whose: Whose,
    pub(crate) sample: Box<Sample>,
    /// Clock time at which its reads were submitted.
    pub(crate) since: u64,
    /// Number of reads in flight; at 0 all bytes are in memory.
    pub(crate) remaining: usize,
    /// The error of the first failed piece.
    error: Lowest,
}

/// The row or chunk for which the bytes are read.
pub(crate) enum Whose {
    /// One row.
    Row(RowRun),
    Chunk(Opening),
}

impl Whose {
    /// Whether no thread waits for the bytes any more.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Row(run) => run.is_cancelled(),
            Self::Chunk(opening) => opening.is_forgotten(),
        }
    }
}

impl Fetch {
    pub(crate) fn new(whose: Whose, sample: Box<Sample>) -> Self {
        Self {
            whose,
            sample,
            since: 0,
            remaining: 0,
            error: Lowest::default(),
        }
    }

    /// Records the end of one read.
    pub(crate) fn complete(&mut self, number: usize, buf: IoBuf, result: Result<usize>) {
        let piece = &mut self.sample.pieces[number];
        piece.place = match (buf.into_row(), &mut self.whose) {
            (Err(span), _) => Place::Ring(span, *result.as_ref().unwrap_or(&0)),
            (Ok(span), Whose::Row(run)) => {
                run.rows.restore(span);
                Place::Row
            }
            // A chunk has no row. A row span here belongs to a slot, and its slot is not reused.
            (Ok(_), Whose::Chunk(_)) => Place::Storage,
        };
        if let Err(error) = result {
            piece.failed = true;
            self.error.note(number as u32, error);
        }
        self.remaining -= 1;
    }

    /// The error of the first failed piece.
    pub(crate) fn error(&self) -> Option<&Error> {
        self.error.error()
    }

    pub(crate) fn take_error(&mut self) -> Option<Error> {
        self.error.take()
    }
}
