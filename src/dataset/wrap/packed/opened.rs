//! Rows of documents that the inner dataset opens, such as texts that are tokenised: each row is a
//! chunk, which a worker makes.
//!
//! ```text
//! bin ──table──► documents ──inner──► extents ──► pieces ──inner.check, inner.open──► tokens │ padding
//!                                                        └──► lengths ──► positions, documents, …
//! ```
//!
//! Invariants: with known lengths a row has exactly the tokens of the table, or is an error. With
//! estimated ones, tokens past the end of the row are cut, and counted.

use super::documents::Access;
use super::{MADE, Packed, Row, make};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, frames, member};
use feedline_core::decode::Scratch;
use feedline_core::storage::Extent;
use std::sync::atomic::Ordering;

/// The rows as chunks.
pub(super) struct OpenedRows {
    /// One row for each chunk.
    pub(super) starts: Vec<u64>,
    /// Bytes of the documents of each row.
    pub(super) encoded: Vec<u64>,
}

impl Row {
    /// The reads of a row: one for fields that share a place.
    fn pieces(&self) -> impl Iterator<Item = Extent> + '_ {
        let mut before = None;
        let places = self.places.iter().copied();
        places.filter(move |place| before.replace(*place) != Some(*place))
    }
}

impl<D: Dataset> Packed<D> {
    /// Looks up all rows once, for the bytes of each.
    pub(super) fn opened_rows(&self) -> Result<OpenedRows> {
        let mut encoded = Vec::with_capacity(self.counts.bins as usize);
        let mut row = Row::default();
        for bin in 0..self.counts.bins {
            row.clear();
            self.look_up(bin, &mut row)?;
            encoded.push(row.pieces().map(|piece| piece.len).sum());
        }
        Ok(OpenedRows {
            starts: (0..=self.counts.bins).collect(),
            encoded,
        })
    }

    fn opened(&self) -> &OpenedRows {
        self.opened
            .as_ref()
            .expect("asked only when there are chunks")
    }

    /// Opens document number `at` of a row, and appends its tokens to `rows`, one row for each
    /// field. Returns the number of its tokens.
    fn append(
        &self,
        row: &Row,
        at: usize,
        left: usize,
        pieces: &mut dyn Iterator<Item = &Bytes>,
        rows: &mut [Vec<u8>],
    ) -> Result<usize> {
        let inner = &self.documents.inner;
        let frames = frames(inner);
        let document = row.documents[at];
        let from = row.starts_in[at] as usize;
        let mut before: Option<(Extent, &Bytes)> = None;
        let mut taken = None;
        let mut buffer = Vec::new();
        for (field, number) in self.documents.fields.numbers.iter().enumerate() {
            let place = row.places[at * rows.len() + field];
            let piece = match before {
                Some((same, piece)) if same == place => piece,
                _ => {
                    let piece = pieces.next().ok_or_else(|| {
                        let message = "a row has fewer pieces than documents";
                        Error::new(ErrorKind::User, Stage::Decode, message)
                    })?;
                    frames.check(document, *number, piece)?;
                    piece
                }
            };
            before = Some((place, piece));
            buffer.clear();
            let bytes = frames.open(document, *number, piece, &mut buffer)?;
            let size = self.documents.fields.fields[field].dtype().size();
            let there = bytes.len() / size;
            let len = match self.documents.access {
                Access::Estimated(_) => there.min(left),
                _ => row.lens[at] as usize,
            };
            let own = bytes.get(from * size..(from + len) * size);
            let (Some(own), true) = (own, *taken.get_or_insert(len) == len) else {
                let message = format!(
                    "document {document} has {there} tokens, but {len} from token {from} are packed"
                );
                return Err(Error::new(ErrorKind::Changed, Stage::Decode, message));
            };
            if field == 0 && self.is_estimated() {
                self.cut.fetch_add((there - len) as u64, Ordering::Relaxed);
            }
            rows[field].extend_from_slice(own);
        }
        Ok(taken.unwrap_or(0))
    }

    /// Bytes of a field of a row that is made from its documents' lengths.
    fn made_bytes(&self, number: usize) -> usize {
        let field = self.schema[self.padding.len() + number].as_raw();
        field.map_or(0, |field| field.row_bytes())
    }

    pub(super) fn is_estimated(&self) -> bool {
        matches!(self.documents.access, Access::Estimated(_))
    }
}

impl<D: Dataset> Chunked for Packed<D> {
    fn starts(&self) -> &[u64] {
        &self.opened().starts
    }

    fn is_whole(&self) -> bool {
        true
    }

    fn inner(&self, sample: u64) -> u64 {
        sample
    }

    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        self.with(chunk as u64, |row| extents.extend(row.pieces()))
    }

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        let fields = self.schema.len() as u64;
        let made: u64 = (0..MADE.len())
            .map(|number| self.made_bytes(number) as u64)
            .sum();
        let opened = self.documents.inner.sizes().opened_bytes_max;
        ChunkBytes {
            encoded: self.opened().encoded[chunk],
            opened: self.row_bytes() + made + 64 * fields,
            scratch: self.row_bytes() + opened,
        }
    }

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        _: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let mut row = Row::default();
        self.look_up(chunk as u64, &mut row)?;
        let padding = self.padding.iter();
        let mut rows: Vec<Vec<u8>> = padding.map(|row| Vec::with_capacity(row.len())).collect();
        let mut left = self.room;
        let mut lens = Vec::with_capacity(row.documents.len());
        let mut pieces = pieces.iter();
        for at in 0..row.documents.len() {
            let len = self.append(&row, at, left, &mut pieces, &mut rows);
            let len = len.map_err(|error| {
                let document = row.documents[at];
                let inner = &self.documents.inner;
                let error = error.within(format_args!("document {document}"));
                let error = inner
                    .sources()
                    .at(error, &row.places[at * self.padding.len()]);
                match member(inner, document, Some(self.documents.fields.numbers[0])) {
                    Some(member) => error.with_member(member),
                    None => error,
                }
            })?;
            left -= len;
            lens.push(len as u32);
        }
        for (field, (own, padding)) in rows.iter().zip(&self.padding).enumerate() {
            let whole = out.fixed(field, padding.len())?;
            whole[..own.len()].copy_from_slice(own);
            whole[own.len()..].copy_from_slice(&padding[own.len()..]);
        }
        for number in 0..MADE.len() {
            let field = self.padding.len() + number;
            make(number, &lens, out.fixed(field, self.made_bytes(number))?);
        }
        Ok(())
    }

    fn chunk_name(&self, chunk: usize) -> String {
        format!("row {chunk} of {}", self.file.path.display())
    }
}
