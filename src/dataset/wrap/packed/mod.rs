//! Packed documents: documents in rows of equal length, by best fit or concatenated. They are
//! packed once.
//!
//! ```text
//! documents ──key──► groups ──threads: best fit, or in turn──► table of bins (side file)
//! bin ──table──► documents ──inner──► extents of each field, one after the other in its row, then padding
//!                   └──► lengths ──open──► positions, documents, cu_seqlens, max_seqlen (nothing is read)
//! rows file, if asked for: the rows one after the other │ "feedrows" │ identity 8; then a row is one extent of it
//! ```
//!
//! A sample is a bin, so order, ranks, resume and `len` work as for any dataset. The files are not
//! changed. A row costs a read for each document that does not follow the one before it in the
//! file, unless rows are kept in their own file.
//!
//! Documents that the inner dataset opens, such as tokenised texts, are opened by a worker when their
//! row is read; their lengths are known from a pass ([`Facts`](super::Facts)), or estimated.
//!
//! Limits: fewer than 2^31 documents; bins of at most 2^22 tokens; documents in chunks must be copied
//! first ([`Copied`](super::Copied)). Memory: some 30 bytes for each document in a group, and for each
//! part of a split document; at most 8 groups are packed at once. After packing: the side file,
//! which is read in place, and the recently looked up bins.
//!
//! Invariants: every document that is not empty is in exactly one bin, and so is every part of a
//! split document. The documents in a row are in the order of the key. The same documents, key and
//! settings give the same table, on any number of threads.

mod build;
mod documents;
mod estimate;
mod fit;
mod opened;
mod rows;
mod table;

use documents::{InnerDocuments, Long};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::own;
use feedline_core::dataset::kept::Origin;
use feedline_core::dataset::{Chunked, Dataset, Framed, Parts, Sizes};
use feedline_core::storage::sidefile::{Recent, Sidefile};
use feedline_core::storage::{Extent, SourceId, Sources};
use feedline_core::tensor::EncodedField;
use fit::Bin;
use opened::OpenedRows;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use table::{BinCounts, TableCheck};

use build::ITEMS_MAX;
pub use build::PackedBuilder;

/// Number of recently looked up bins that are kept, since each field of a row asks for its bin.
const RECENT: usize = 16;

/// Fields of a row that follow the documents' fields.
const MADE: [&str; 4] = ["positions", "documents", "cu_seqlens", "max_seqlen"];
const POSITIONS: usize = 0;
const DOCUMENTS: usize = 1;
const ENDS: usize = 2;

/// Documents in rows of equal length; made by
/// [`DatasetExt::packed`](crate::dataset::DatasetExt::packed).
///
/// Fields of a row of `L` tokens; all have the documents in the same order:
///
/// | field | shape | |
/// |---|---|---|
/// | `tokens` (the documents' field, under its own name), and fields [beside](PackedBuilder::beside) | `[L]` | documents one after the other, then padding |
/// | `positions` | `[L]` i32 | place of a token in its document, or in the document's part in this row; 0 in padding |
/// | `documents` | `[L]` i32 | number of a token's document within the row; -1 in padding |
/// | `cu_seqlens` | `[D + 1]` i32, `D` = [`documents_max`](PackedBuilder::documents_max) | 0, then the end of each document; the last end repeats, like empty documents: the input of varlen attention |
/// | `max_seqlen` | `[]` i32 | tokens of the longest document of the row |
///
/// Fields that are not [kept](crate::LoaderBuilder::keep) cost nothing. A token is the target of
/// the token before it where `positions` is above 0: so no target crosses a document boundary, and
/// none is padding.
///
/// Row `b` of a batch starts at token `b × L` of the flat batch: `cu_seqlens + b × L`, row after
/// row, are the ends of all documents in the batch, where the padding of a row counts as a
/// document.
pub struct Packed<D> {
    documents: InnerDocuments<D>,
    schema: Vec<EncodedField>,
    /// A row of padding for each field.
    padding: Box<[Box<[u8]>]>,
    counts: BinCounts,
    identity: u64,
    file: Sidefile,
    origin: Origin,
    recent: Recent<Row>,
    /// The documents' sources, or the file of rows.
    sources: Arc<Sources>,
    rows: Option<PathBuf>,
    /// Tokens of a row.
    room: usize,
    /// The rows as chunks, if the inner dataset opens the documents.
    opened: Option<OpenedRows>,
    /// Tokens that were cut because lengths were estimated.
    cut: AtomicU64,
}

/// The documents of a bin.
#[derive(Default)]
struct Row {
    /// For each document, the location of each field.
    places: Vec<Extent>,
    /// Number of each document, and where its part starts in it, in tokens.
    documents: Vec<u64>,
    starts_in: Vec<u64>,
    /// Tokens of each document.
    lens: Vec<u32>,
}

impl Row {
    fn clear(&mut self) {
        self.places.clear();
        self.documents.clear();
        self.starts_in.clear();
        self.lens.clear();
    }

    /// The reads for one of `fields` fields; documents that follow each other in a file are one
    /// read.
    fn reads(&self, field: usize, fields: usize) -> impl Iterator<Item = Extent> + '_ {
        let mut places = self
            .places
            .iter()
            .skip(field)
            .step_by(fields)
            .copied()
            .peekable();
        std::iter::from_fn(move || {
            let mut read = places.next()?;
            while let Some(next) = places
                .next_if(|next| next.source == read.source && next.offset == read.offset + read.len)
            {
                read.len += next.len;
            }
            Some(read)
        })
    }
}

impl<D: Dataset> Packed<D> {
    /// Whether opening packed the documents; otherwise the bins came from their file.
    pub fn built(&self) -> bool {
        self.origin != Origin::Kept
    }

    /// Number of tokens in the bins; the rest of `len` × tokens per bin is padding.
    pub fn tokens(&self) -> u64 {
        self.counts.tokens
    }

    /// Number of documents that were longer than a bin; with concatenated documents, the number
    /// that span several rows.
    pub fn long_documents(&self) -> u64 {
        self.counts.long
    }

    /// Number of tokens cut off.
    pub fn cut_tokens(&self) -> u64 {
        self.counts.cut
    }

    /// Looks up the place and the number of tokens of every document of a bin, and checks that they
    /// fit the row.
    ///
    /// Errors: those of the dataset and of the table; [`ErrorKind::Changed`] if lengths differ from
    /// when the bins were made.
    fn look_up(&self, bin: u64, row: &mut Row) -> Result<()> {
        let mut left = self.documents.size.room;
        let mut check = TableCheck::default();
        let mut parts = Parts::new();
        let changed = || {
            let message = format!(
                "the lengths of the documents of bin {bin} changed since they were packed: delete \
                 {}, and the file of rows if there is one, to pack them again",
                self.file.path.display()
            );
            Error::new(ErrorKind::Changed, Stage::Read, message)
        };
        let found = table::items(&self.file, bin, |document, part| {
            let (from, len) = self
                .documents
                .part(document, part, left, &mut parts, &mut row.places)?
                .ok_or_else(changed)?;
            left = left.checked_sub(len).ok_or_else(changed)?;
            check.add(len);
            row.documents.push(document);
            row.starts_in.push(from);
            row.lens.push(len);
            Ok(())
        });
        match found? {
            found if found == check.end() && !row.lens.is_empty() => Ok(()),
            _ => Err(changed()),
        }
    }

    /// Calls `take` with the documents of a bin, which are found by [`look_up`](Self::look_up)
    /// unless they are kept.
    fn with<T>(&self, bin: u64, take: impl FnOnce(&Row) -> T) -> Result<T> {
        self.recent.with(
            bin,
            |row| {
                row.clear();
                self.look_up(bin, row)
            },
            take,
        )
    }

    fn row_bytes(&self) -> u64 {
        self.padding.iter().map(|row| row.len() as u64).sum()
    }

    /// Explains why the bins are not full, and how to fill them; empty if they are full enough.
    fn why_empty(&self, filled: f64) -> String {
        let BinCounts {
            documents,
            bins,
            tokens,
            ended,
            items_max,
            ..
        } = self.counts;
        let Bin { room, most } = self.documents.size;
        if filled >= 90.0 || bins * u64::from(room) - tokens <= u64::from(room) {
            return String::new();
        }
        let now = Setting::DocumentsMax.with(most);
        let needed = (f64::from(room) * documents as f64 / tokens as f64 * 1.25).ceil() as usize;
        let needed = needed.next_power_of_two().min(ITEMS_MAX);
        match 100.0 * ended as f64 / bins as f64 {
            share if share >= 1.0 && needed > most as usize => {
                let then = Setting::DocumentsMax.with(needed);
                format!(
                    " ({now} limits {share:.0} % of them: {then} has room for documents as short \
                     as these)"
                )
            }
            share if share >= 1.0 => format!(" ({now} limits {share:.0} % of them)"),
            // A file of an older version has no count.
            _ if ended == 0 && items_max == u64::from(most) => {
                format!(" ({now} limits some of them)")
            }
            _ => " (few documents fit together: use another row length, or concatenate the \
                  documents)"
                .into(),
        }
    }
}

/// Writes a field of a row that is made from its documents' lengths; `field` is its number in
/// [`MADE`].
fn make(field: usize, lens: &[u32], out: &mut [u8]) {
    let lens = lens.iter().copied();
    match field {
        POSITIONS | DOCUMENTS => {
            // Padding: 0, or -1.
            out.fill(if field == DOCUMENTS { 0xff } else { 0 });
            let mut rest = out.as_chunks_mut::<4>().0;
            for (number, len) in lens.enumerate() {
                let (own, later) = rest.split_at_mut(len as usize);
                match field {
                    DOCUMENTS => own.fill((number as i32).to_ne_bytes()),
                    _ => own
                        .iter_mut()
                        .zip(0_i32..)
                        .for_each(|(place, at)| *place = at.to_ne_bytes()),
                }
                rest = later;
            }
        }
        ENDS => {
            let mut end: u32 = 0;
            let places = out.as_chunks_mut::<4>().0.iter_mut();
            for (place, len) in places.zip(lens.chain(std::iter::repeat(0))) {
                *place = end.to_ne_bytes();
                end += len;
            }
        }
        _ => out.copy_from_slice(&lens.max().unwrap_or(0).to_ne_bytes()),
    }
}

impl<D: Dataset> Dataset for Packed<D> {
    own!(schema framed unordered unnamed);

    fn len(&self) -> u64 {
        self.counts.bins
    }

    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    fn sizes(&self) -> Sizes {
        let items = self.counts.items_max as usize;
        let fields = self.padding.len();
        let row_bytes = self.row_bytes();
        let row = items * (fields * size_of::<Extent>() + 2 * size_of::<u64>() + size_of::<u32>());
        if let (Some(opened), None) = (&self.opened, &self.rows) {
            let heap = size_of_val(&*opened.starts) + size_of_val(&*opened.encoded);
            return Sizes {
                sample_bytes_max: opened.encoded.iter().copied().max().unwrap_or(0),
                index_bytes: self.documents.inner.sizes().index_bytes
                    + self.file.heap()
                    + row_bytes as usize
                    + heap
                    + RECENT * row,
                ..Sizes::default()
            };
        }
        Sizes {
            sample_bytes_max: row_bytes,
            opened_bytes_max: 0,
            // Includes the padding.
            appended_max: if self.rows.is_some() {
                0
            } else {
                items * fields
            },
            largest_sample: None,
            index_bytes: self.documents.inner.sizes().index_bytes
                + self.file.heap()
                + row_bytes as usize
                + RECENT * row,
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        if self.chunked().is_some() {
            let message = "documents that are opened are read in rows";
            return Err(Error::new(ErrorKind::User, Stage::Read, message));
        }
        if self.rows.is_some() {
            let mut offset = sample * self.row_bytes();
            for (field, padding) in self.padding.iter().enumerate() {
                let len = padding.len() as u64;
                let extent = Extent {
                    source: SourceId::at(0),
                    offset,
                    len,
                };
                parts.extent(field, extent);
                offset += len;
            }
        } else {
            self.with(sample, |row| {
                for (field, padding) in self.padding.iter().enumerate() {
                    let mut filled = 0;
                    for read in row.reads(field, self.padding.len()) {
                        match filled {
                            0 => parts.extent(field, read),
                            _ => parts.append(field, read),
                        }
                        filled += read.len as usize;
                    }
                    if filled < padding.len() {
                        parts.append_inline(field, &padding[filled..]);
                    }
                }
            })?;
        }
        let first = self.padding.len();
        (first..first + MADE.len()).for_each(|field| parts.made(field));
        Ok(())
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        let is_opened = self.opened.is_some() && self.rows.is_none();
        is_opened.then_some(self as &dyn Chunked)
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn describe(&self) -> String {
        let BinCounts {
            documents,
            bins,
            tokens,
            empty,
            long,
            cut,
            ..
        } = self.counts;
        let room = self.room;
        let place = self.file.path.display();
        let filled = 100.0 * tokens as f64 / (bins as f64 * room as f64);
        let why = match self.is_estimated() {
            true => {
                let cut = self.cut.load(Ordering::Relaxed);
                format!(" by estimated lengths ({cut} tokens cut so far)")
            }
            false => self.why_empty(filled),
        };
        let rows = self.rows.as_ref().map_or(String::new(), |rows| {
            format!(", rows in {}", rows.display())
        });
        let how = if self.built() { "packed now:" } else { "from" };
        let long = match self.documents.long {
            Long::Refuse => String::new(),
            Long::Split => format!(", {long} longer ones split"),
            Long::Cut => format!(", {long} longer ones cut by {cut} tokens"),
            Long::Concatenate => format!(", {long} of them in several rows"),
        };
        format!(
            "{bins} bins of {room} tokens, {filled:.2} % full{why}, with {documents} \
             documents{long}, {empty} empty ones left out, {how} {place}{rows}; of {}",
            self.documents.inner.describe()
        )
    }
}

impl<D: Dataset> Framed for Packed<D> {
    fn check(&self, _: u64, _: usize, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn open<'a>(&self, _: u64, _: usize, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        Ok(bytes)
    }

    fn make(&self, sample: u64, field: usize, out: &mut [u8]) -> Result<()> {
        let number = field - self.padding.len();
        self.with(sample, |row| {
            make(number, &row.lens, out);
        })
    }

    fn field_bytes(&self, _: u64, field: usize) -> Result<Option<u64>> {
        self.field_bytes_max(field)
    }

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        Ok(self
            .schema
            .get(field)
            .and_then(EncodedField::as_raw)
            .map(|field| field.row_bytes() as u64))
    }

    fn member(&self, sample: u64, _: Option<usize>) -> Option<String> {
        let mut names = Vec::new();
        table::items(&self.file, sample, |document, _| {
            names.push(document.to_string());
            Ok(())
        })
        .ok()?;
        Some(format!("documents {}", names.join(", ")))
    }

    fn seek_points<'a>(&'a self, _: u64, _: usize, _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        Ok(&[])
    }
}
