//! A sample between its reads and its decoder.

use super::Job;
use crate::error::Error;
use crate::memory::{RingSpan, Rows};
use std::sync::Arc;

/// A sample whose bytes are on their way: the permit for it, reused from sample to sample.
pub(crate) struct Pending {
    pub(crate) job: Option<Arc<Job>>,
    pub(crate) rows: Option<Rows>,
    pub(crate) id: u64,
    pub(crate) pieces: Vec<Piece>,
    /// When its reads were submitted.
    pub(super) since: u64,
    /// Operations in flight; the sample is complete at 0.
    pub(super) remaining: usize,
    /// The error of the first failed piece.
    pub(super) error: Option<(usize, Error)>,
}

/// The bytes of one part of a sample.
pub(crate) struct Piece {
    pub(super) span: Option<RingSpan>,
    pub(super) start: usize,
    pub(super) len: usize,
    /// The part lies in a memory source: nothing is read.
    pub(crate) in_memory: bool,
    /// The bytes are those of the last piece that is not shared.
    pub(crate) shared: bool,
    /// Its read failed.
    pub(crate) failed: bool,
}

impl Pending {
    pub(crate) fn new(parts: usize) -> Self {
        Self { job: None, rows: None, id: 0, pieces: Vec::with_capacity(parts), since: 0, remaining: 0, error: None }
    }

    /// Why the sample must be read again, if it must.
    pub(crate) fn take_error(&mut self) -> Option<Error> {
        self.error.take().map(|(_, error)| error)
    }

    /// Bytes that must be copied or decoded.
    pub(super) fn staged(&self) -> usize {
        self.pieces.iter().map(|piece| if piece.span.is_some() { piece.len } else { 0 }).sum()
    }
}

impl Piece {
    /// The bytes that were read, unless they were read in place.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        self.span.as_ref().map(|span| &span.as_slice()[self.start..self.start + self.len])
    }

    /// Where they are read to, unless that is their place; from its start.
    pub(crate) fn room(&mut self) -> Option<&mut [u8]> {
        self.start = 0;
        self.span.as_mut().map(RingSpan::as_mut_slice)
    }
}
