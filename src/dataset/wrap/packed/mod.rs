//! Packed documents: whole documents in rows of one length, by best fit, once.
//!
//! ```text
//! documents ──key──► groups ──threads: best fit──► table of bins (side file)
//! bin ──table──► documents ──inner──► extents, one after the other in the row `tokens`, then padding
//!                   └──► lengths ──open──► positions, documents, cu_seqlens, max_seqlen (nothing is read)
//! ```
//!
//! A sample is a bin, so order, ranks, resume and `len` are as for any dataset. The files stay as they are.
//!
//! Limits: fewer than 2^31 documents; bins of at most 2^22 tokens; documents lie in their files unchanged, with lengths in
//! the index. Memory: some 30 bytes for each document of a group, of which at most 8
//! are packed at once; then nothing beyond the side file, which is read in place.
//!
//! Invariants: every document that is not empty is in exactly one bin, or with `split` every part of it. Documents stand
//! in a row in the order of the key. The same documents, key and settings give the same table, on any number of threads.

mod fit;
mod table;

use crate::dataset::forward::{forward, own};
use crate::dataset::parallel::by_threads;
use crate::dataset::wrap::kept::{self, Origin};
use crate::dataset::{Chunked, Dataset, Framed, Part, Parts, Sizes, no_field};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::order::{Key, Permutation};
use crate::storage::sidefile::{SideWriter, Sidefile};
use crate::storage::{Extent, SourceId};
use crate::tensor::{DType, EncodedField, Field};
use fit::{Bin, Item};
use std::ops::Range;
use std::path::{Path, PathBuf};
use table::{Check, Counts, Group, KIND, TableWriter};

/// Maximum tokens of a bin.
const ROOM_MAX: usize = 1 << 22;
const DOCUMENTS_MAX: u64 = 1 << 31;
/// Maximum documents of a bin: the table keeps their number in 16 bits.
const ITEMS_MAX: usize = 1 << 15;
/// Threads that pack, and groups whose bins are in memory together.
const THREADS_MAX: usize = 8;
const TOGETHER: usize = 32;

/// Fields of a row behind the tokens.
const POSITIONS: usize = 1;
const DOCUMENTS: usize = 2;
const ENDS: usize = 3;
const LONGEST: usize = 4;

/// Whole documents in rows of one length; made by [`DatasetExt::packed`](crate::dataset::DatasetExt::packed).
///
/// Fields of a row of `L` tokens, all of documents in one order:
///
/// | field | shape | |
/// |---|---|---|
/// | `tokens` (as it is called) | `[L]` | documents one after the other, then padding |
/// | `positions` | `[L]` i32 | place of a token in its document, or in a split document's part; 0 in padding |
/// | `documents` | `[L]` i32 | number of a token's document within the row; -1 in padding |
/// | `cu_seqlens` | up to `documents_max` + 1, i32 | 0, then the end of each document: what varlen attention takes |
/// | `max_seqlen` | `[]` i32 | tokens of the longest document of the row |
///
/// Fields that are not [kept](crate::LoaderBuilder::keep) cost nothing. A token's target is the next token of its document: the
/// targets of `tokens[..L - 1]` are `tokens[1..]` where both have the same number in `documents`, and none elsewhere.
pub struct Packed<D> {
    inner: D,
    field: usize,
    token_bytes: u64,
    long: Long,
    schema: Vec<EncodedField>,
    room: u32,
    padding: Box<[u8]>,
    file: Sidefile,
    counts: Counts,
    identity: u64,
    place: PathBuf,
    origin: Origin,
}

/// Builder of [`Packed`]. Made by [`DatasetExt::packed`](crate::dataset::DatasetExt::packed).
#[must_use]
pub struct PackedBuilder<D> {
    inner: D,
    field: String,
    room: usize,
    key: Option<u64>,
    split: bool,
    cut: bool,
    padding: u64,
    documents_max: Option<usize>,
}

/// What becomes of documents that are longer than a bin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Long {
    Refuse,
    Split,
    Cut,
}

impl<D: Dataset> PackedBuilder<D> {
    pub(crate) fn new(inner: D, field: &str, room: usize) -> Self {
        Self { inner, field: field.into(), room, key: None, split: false, cut: false, padding: 0, documents_max: None }
    }

    /// Packs the documents in an order shuffled by `key`. Default: the dataset's order, for data that lie shuffled.
    pub fn shuffled(mut self, key: u64) -> Self {
        self.key = Some(key);
        self
    }

    /// `true` splits longer documents: parts that fill a bin each, and the rest. Default: `false`, where a longer document is
    /// an error of `open`.
    pub fn split(mut self, split: bool) -> Self {
        self.split = split;
        self
    }

    /// `true` cuts longer documents; [`Packed::cut_tokens`] and the report count the rest.
    pub fn cut(mut self, cut: bool) -> Self {
        self.cut = cut;
        self
    }

    /// Sets the maximum number of documents of a row, and with it the shape of `cu_seqlens`. Default: one for each 16 tokens of
    /// the row, and at least 64; rows of shorter documents stay partly empty.
    pub fn documents_max(mut self, documents: usize) -> Self {
        self.documents_max = Some(documents);
        self
    }

    /// Sets the token of the padding. Default: 0.
    pub fn padding(mut self, token: u64) -> Self {
        self.padding = token;
        self
    }

    /// Opens the table of bins in the file `index`. The first call packs all documents to make it ([`Packed::built`] tells), on
    /// all cores: some 5 bytes a document. Make it before many processes open it.
    ///
    /// Errors: [`ErrorKind::Config`] for an unknown field, one that has not one dimension or lies in frames or chunks, for
    /// impossible bins, and for an `index` that is another kind of file; [`ErrorKind::Shape`] for a document that is longer
    /// than a bin, unless it is split or cut; [`ErrorKind::Changed`] for the bins of another dataset or of other settings;
    /// [`ErrorKind::Empty`] without tokens; file system errors.
    pub fn open(self, index: impl AsRef<Path>) -> Result<Packed<D>> {
        let (inner, room, place) = (self.inner, self.room as u32, index.as_ref());
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        let Some(field) = inner.schema().iter().position(|known| known.name == self.field) else {
            return bad(no_field(inner.schema(), &self.field));
        };
        let raw = inner.schema()[field].as_raw().filter(|raw| raw.dims().len() == 1);
        let Some(dtype) = raw.map(|raw| raw.dtype()) else {
            return bad(format!(
                "field `{}` is {}; packed are rows of numbers",
                self.field,
                inner.schema()[field].encoding
            ));
        };
        if inner.chunked().is_some() {
            return bad("the samples come in chunks, and packed documents are read one by one".into());
        }
        if self.room == 0 || self.room > ROOM_MAX {
            return bad(format!("bins of {} tokens; take 1 to {ROOM_MAX}", self.room));
        }
        let most = self.documents_max.unwrap_or((self.room / 16).clamp(64, ITEMS_MAX));
        if most == 0 || most > ITEMS_MAX {
            return bad(format!("rows of {most} documents; take 1 to {ITEMS_MAX}"));
        }
        let long = match (self.split, self.cut) {
            (true, true) => return bad("longer documents are split or cut, not both".into()),
            (true, false) => Long::Split,
            (false, true) => Long::Cut,
            (false, false) => Long::Refuse,
        };
        if inner.len() >= DOCUMENTS_MAX {
            let message = format!("{} documents; fewer than {DOCUMENTS_MAX} can be packed", inner.len());
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
        }
        let padding = padding_row(self.padding, dtype, self.room)?;
        let documents = Documents { inner: &inner, field, token_bytes: dtype.size() as u64 };
        let digest = kept::identity_of("packed", &inner)
            .word(field as u64)
            .word(self.room as u64)
            .word(long as u64)
            .word(most as u64);
        let digest = self.key.map_or(digest.word(0), |key| digest.word(1).word(key));
        let order = self.key.map(|key| Permutation::new(inner.len(), Key::new(key).named("packed")));
        let size = Bin { room, most: most as u32 };
        let pack = |out: &mut SideWriter| pack(&documents, (size, long), order.as_ref(), out, place);
        let (file, origin) = kept::open_or_make(place, (KIND, "bins"), digest.end(), table::fits, pack)?;
        let (counts, identity) = (table::counts(&file)?, digest.word(self.padding).end());
        let fields = [
            Field::fixed(self.field, dtype, [self.room]),
            Field::fixed("positions", DType::I32, [self.room]),
            Field::fixed("documents", DType::I32, [self.room]),
            Field::up_to("cu_seqlens", DType::I32, most + 1),
            Field::fixed("max_seqlen", DType::I32, []),
        ];
        let (schema, token_bytes) = (fields.map(EncodedField::raw).into(), dtype.size() as u64);
        let place = place.to_path_buf();
        Ok(Packed { inner, field, token_bytes, long, schema, room, padding, file, counts, identity, place, origin })
    }
}

/// A row of padding.
fn padding_row(token: u64, dtype: DType, room: usize) -> Result<Box<[u8]>> {
    let bits = 8 * dtype.size() as u32;
    if token.checked_shr(bits).is_some_and(|over| over != 0) {
        let message = format!("padding {token} does not fit {dtype}");
        return Err(Error::new(ErrorKind::Config, Stage::Index, message));
    }
    let bytes = (token << (64 - bits)).to_ne_bytes();
    let bytes = if cfg!(target_endian = "little") { &bytes[8 - dtype.size()..] } else { &bytes[..dtype.size()] };
    Ok(bytes.repeat(room).into())
}

/// The documents of a dataset.
struct Documents<'d, D> {
    inner: &'d D,
    field: usize,
    token_bytes: u64,
}

impl<'d, D: Dataset> Documents<'d, D> {
    /// The place of a document and its tokens; `parts` is room to ask the dataset.
    ///
    /// Errors: of the dataset; [`ErrorKind::Config`] for a document that does not lie in a file unchanged;
    /// [`ErrorKind::Decode`] for one that is not a whole number of tokens.
    fn find(&self, document: u64, parts: &mut Parts<'d>) -> Result<(Extent, u64)> {
        parts.clear();
        self.inner.extents(document, parts)?;
        let part = parts.iter().find(|(field, _)| *field == self.field).map(|(_, part)| part);
        let Some(Part::Extent(extent)) = part else {
            let name = self.inner.schema().get(self.field).map_or("?", |field| &field.name);
            let message = match part {
                Some(Part::Checked(_)) => format!("field `{name}` has checksums, which packed documents cannot keep"),
                _ => format!(
                    "field `{name}` lies in frames: only documents that lie in their files unchanged can be packed"
                ),
            };
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_sample(document));
        };
        if !extent.len.is_multiple_of(self.token_bytes) {
            let message = format!("{} bytes are not a whole number of {}-byte tokens", extent.len, self.token_bytes);
            let error = Error::new(ErrorKind::Decode, Stage::Index, message).with_sample(document);
            return Err(self.inner.sources().at(error, &extent));
        }
        Ok((extent, extent.len / self.token_bytes))
    }

    /// Packs the documents at these positions of the order.
    fn group(&self, positions: Range<u64>, size: Bin, long: Long, order: Option<&Permutation>) -> Result<Group> {
        let room = size.room;
        let (mut items, mut counts, mut parts) = (Vec::new(), Counts::default(), Parts::new());
        for position in positions {
            let document = order.map_or(position, |order| order.get(position));
            let (_, len) = self.find(document, &mut parts)?;
            let (whole, rest) = (len / u64::from(room), (len % u64::from(room)) as u32);
            let item = |part, len| Item { document: document as u32, part, len };
            counts.documents += u64::from(len > 0);
            counts.empty += u64::from(len == 0);
            if len <= u64::from(room) {
                items.extend((len > 0).then(|| item(None, len as u32)));
                continue;
            }
            counts.long += 1;
            match long {
                Long::Refuse => {
                    let message =
                        format!("a document of {len} tokens in bins of {room}: split or cut longer documents");
                    return Err(Error::new(ErrorKind::Shape, Stage::Index, message).with_sample(document));
                }
                Long::Cut => {
                    counts.cut += len - u64::from(room);
                    items.push(item(None, room));
                }
                Long::Split => {
                    let parts = u32::try_from(whole).map_err(|_| {
                        let message = format!("a document of {len} tokens is too long to be split");
                        Error::new(ErrorKind::Limit, Stage::Index, message).with_sample(document)
                    })?;
                    items.extend((0..parts).map(|part| item(Some(part), room)));
                    items.extend((rest > 0).then(|| item(None, rest)));
                }
            }
        }
        Ok(Group::new(&items, size, counts))
    }
}

/// Packs all documents into the file.
fn pack<D: Dataset>(
    documents: &Documents<'_, D>,
    (size, long): (Bin, Long),
    order: Option<&Permutation>,
    out: &mut SideWriter,
    place: &Path,
) -> Result<()> {
    let failed = |error| Error::os(Stage::Index, "cannot write the bins", error).with_path(place);
    let (len, threads) = (documents.inner.len(), std::thread::available_parallelism().map_or(2, usize::from));
    // A group has many bins, of which the last ones are not full.
    let step = u64::from(size.room).saturating_mul(16).clamp(1 << 16, 1 << 19);
    let starts: Vec<u64> = (0..len.div_ceil(step)).map(|group| group * step).collect();
    let mut writer = TableWriter::default();
    for some in starts.chunks(TOGETHER) {
        let group = |_, start: &u64| documents.group(*start..(start + step).min(len), size, long, order);
        for group in by_threads(threads.min(THREADS_MAX), some, group)? {
            writer.add(&group, out).map_err(failed)?;
        }
    }
    if writer.counts.bins == 0 {
        let message = format!("{len} documents without a token");
        return Err(Error::new(ErrorKind::Empty, Stage::Index, message));
    }
    writer.finish(out).map_err(failed)
}

impl<D: Dataset> Packed<D> {
    /// Whether opening packed the documents; otherwise the bins came from their file.
    pub fn built(&self) -> bool {
        self.origin != Origin::Kept
    }

    /// The documents.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Number of documents in the bins.
    pub fn documents(&self) -> u64 {
        self.counts.documents
    }

    /// Number of tokens in the bins; the rest of `len` × tokens per bin is padding.
    pub fn tokens(&self) -> u64 {
        self.counts.tokens
    }

    /// Number of empty documents, which are in no bin.
    pub fn empty_documents(&self) -> u64 {
        self.counts.empty
    }

    /// Number of documents that were longer than a bin.
    pub fn long_documents(&self) -> u64 {
        self.counts.long
    }

    /// Number of tokens cut off.
    pub fn cut_tokens(&self) -> u64 {
        self.counts.cut
    }

    /// Calls `each` with the place and the tokens of every document of a bin. The tokens fit the row.
    ///
    /// Errors: of the dataset and of the table; [`ErrorKind::Changed`] for other lengths than when the bins were made.
    fn each(&self, bin: u64, mut each: impl FnMut(Extent, usize)) -> Result<()> {
        let documents = Documents { inner: &self.inner, field: self.field, token_bytes: self.token_bytes };
        let (room, mut total, mut check) = (u64::from(self.room), 0, Check::default());
        let mut parts = Parts::new();
        let changed = || {
            let message = format!(
                "the documents of bin {bin} have other lengths than when they were packed: delete {} to pack them again",
                self.place.display()
            );
            Error::new(ErrorKind::Changed, Stage::Read, message)
        };
        let found = table::items(&self.file, bin, |document, part| {
            if document >= self.inner.len() {
                return Err(changed());
            }
            let (extent, len) = documents.find(document, &mut parts)?;
            let (from, len) = match (part, self.long) {
                (Some(part), _) => (u64::from(part) * room, room),
                (None, Long::Split) if len > room => (len - len % room, len % room),
                (None, Long::Cut) => (0, len.min(room)),
                (None, _) => (0, len),
            };
            let (offset, len_bytes) = (from * self.token_bytes, len * self.token_bytes);
            total += len;
            if len == 0 || total > room || offset + len_bytes > extent.len {
                return Err(changed());
            }
            check.add(len as u32);
            each(Extent { offset: extent.offset + offset, len: len_bytes, ..extent }, len as usize);
            Ok(())
        });
        match found? {
            found if found == check.end() && total > 0 => Ok(()),
            _ => Err(changed()),
        }
    }

    /// Number of documents of a bin.
    fn count(&self, bin: u64) -> Result<usize> {
        let mut count = 0;
        self.each(bin, |_, _| count += 1).map(|()| count)
    }
}

impl<D: Dataset> Dataset for Packed<D> {
    own!(schema framed);
    forward!(self => self.inner; sources);

    fn len(&self) -> u64 {
        self.counts.bins
    }

    fn sizes(&self) -> Sizes {
        let (room, items) = (u64::from(self.room), self.counts.items_max as usize);
        Sizes {
            sample_bytes_max: room * self.token_bytes,
            opened_bytes_max: 4 * room.max(items as u64 + 1),
            appended_max: items - 1,
            largest_sample: None,
            index_bytes: self.inner.sizes().index_bytes + self.file.heap() + self.padding.len(),
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let mut filled = 0;
        self.each(sample, |extent, len| {
            match filled {
                0 => parts.extent(0, extent),
                _ => parts.append(0, extent),
            }
            filled += len;
        })?;
        if filled < self.room as usize {
            parts.append_inline(0, &self.padding[filled * self.token_bytes as usize..]);
        }
        // `open` makes the other fields of nothing.
        let nothing = Extent { source: SourceId::at(0), offset: 0, len: 0 };
        (POSITIONS..=LONGEST).for_each(|field| parts.framed(field, nothing));
        Ok(())
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        None
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn describe(&self) -> String {
        let Counts { documents, bins, tokens, empty, long, cut, .. } = self.counts;
        let (room, place) = (self.room, self.place.display());
        let filled = 100.0 * tokens as f64 / (bins as f64 * f64::from(room));
        let how = if self.built() { "packed now:" } else { "from" };
        let long = match self.long {
            Long::Refuse => String::new(),
            Long::Split => format!(", {long} longer ones split"),
            Long::Cut => format!(", {long} longer ones cut by {cut} tokens"),
        };
        format!(
            "{bins} bins of {room} tokens, {filled:.2} % full, with {documents} documents{long}, {empty} empty ones left out, \
             {how} {place}; of {}",
            self.inner.describe()
        )
    }
}

impl<D: Dataset> Framed for Packed<D> {
    fn check(&self, _: u64, _: usize, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8], buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let room = self.room as usize;
        let (mut filled, mut document, mut longest) = (0, 0_i32, 0_i32);
        if field == ENDS {
            buffer.extend_from_slice(&0_i32.to_ne_bytes());
        }
        self.each(sample, |_, len| {
            filled += len;
            match field {
                POSITIONS => buffer.extend((0..len as i32).flat_map(i32::to_ne_bytes)),
                DOCUMENTS => buffer.resize(4 * filled, 0),
                ENDS => buffer.extend_from_slice(&(filled as i32).to_ne_bytes()),
                _ => longest = longest.max(len as i32),
            }
            if field == DOCUMENTS {
                let own = &mut buffer[4 * (filled - len)..];
                own.as_chunks_mut().0.iter_mut().for_each(|place| *place = document.to_ne_bytes());
            }
            document += 1;
        })?;
        match field {
            POSITIONS => buffer.resize(4 * room, 0),
            // -1 in each.
            DOCUMENTS => buffer.resize(4 * room, 0xff),
            ENDS => {}
            LONGEST => buffer.extend_from_slice(&longest.to_ne_bytes()),
            _ => return Ok(bytes),
        }
        Ok(buffer)
    }

    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        match field {
            ENDS => Ok(Some(4 * (self.count(sample)? as u64 + 1))),
            _ => self.field_bytes_max(field),
        }
    }

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        Ok(self.schema.get(field).and_then(EncodedField::as_raw).map(|field| field.row_bytes() as u64))
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
