//! A row or a chunk together with what storage brings for it.
//!
//! ```text
//! Run (one row)       ──┬──► Fetch: its Sample, with a Piece for each part of the row or each extent of the chunk
//! Opening (one chunk) ──┘
//! ```
//!
//! A fetch owns all that is known of its row or chunk. So the dataset is asked once what storage has to bring for it, and
//! nobody relies on a second answer.

use super::chunks::Opening;
use super::task::{Place, Run, Sample};
use crate::error::{Error, Lowest, Result};
use crate::memory::IoBuf;

/// A row, or a chunk, whose bytes are on their way from storage.
pub(crate) struct Fetch {
    pub(crate) whose: Whose,
    pub(crate) sample: Box<Sample>,
    /// When its reads were submitted.
    pub(crate) since: u64,
    /// Reads in flight; all bytes are there at 0.
    pub(crate) remaining: usize,
    /// The error of the first piece that could not be read.
    error: Lowest,
}

/// Whose bytes they are.
pub(crate) enum Whose {
    /// One row's.
    Row(Run),
    Chunk(Opening),
}

impl Whose {
    /// Nobody waits for it any more.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Row(run) => run.is_cancelled(),
            Self::Chunk(opening) => opening.is_forgotten(),
        }
    }
}

impl Fetch {
    pub(crate) fn new(whose: Whose, sample: Box<Sample>) -> Self {
        Self { whose, sample, since: 0, remaining: 0, error: Lowest::default() }
    }

    /// A read has come to its end.
    pub(crate) fn complete(&mut self, number: usize, buf: IoBuf, result: Result<usize>) {
        let piece = &mut self.sample.pieces[number];
        piece.place = match (buf.into_row(), &mut self.whose) {
            (Err(span), _) => Place::Ring(span, *result.as_ref().unwrap_or(&0)),
            (Ok(span), Whose::Row(run)) => {
                run.rows.restore(span);
                Place::Row
            }
            // Chunks have none: then it is the slot's, and does not go round again.
            (Ok(_), Whose::Chunk(_)) => Place::Storage,
        };
        if let Err(error) = result {
            piece.failed = true;
            self.error.note(number as u32, error);
        }
        self.remaining -= 1;
    }

    /// The error of the first piece that could not be read.
    pub(crate) fn error(&self) -> Option<&Error> {
        self.error.error()
    }

    pub(crate) fn take_error(&mut self) -> Option<Error> {
        self.error.take()
    }
}
