//! Settings of packed documents, and the packing.

use super::documents::{Documents, Long};
use super::fit::{Bin, InTurn};
use super::table::{self, KIND, TableWriter};
use super::{Packed, RECENT};
use crate::dataset::parallel::by_threads;
use crate::dataset::wrap::kept;
use crate::dataset::{Dataset, Parts, no_field};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::order::{Key, Permutation};
use crate::storage::sidefile::{Recent, SideWriter};
use crate::sync::Hold;
use crate::tensor::{DType, EncodedField, Field};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Maximum tokens of a bin.
const ROOM_MAX: usize = 1 << 22;
const DOCUMENTS_MAX: u64 = 1 << 31;
/// Maximum documents of a bin: the table keeps their number in 16 bits.
const ITEMS_MAX: usize = 1 << 15;
/// Threads that pack, and groups whose bins are in memory together.
const THREADS_MAX: usize = 8;
const TOGETHER: usize = 32;

/// Builder of [`Packed`]. Made by [`DatasetExt::packed`](crate::dataset::DatasetExt::packed).
#[must_use]
pub struct PackedBuilder<D> {
    inner: D,
    field: String,
    room: usize,
    key: Option<u64>,
    long: Long,
    padding: u64,
    documents_max: Option<usize>,
    rows: Option<PathBuf>,
}

impl<D: Dataset> PackedBuilder<D> {
    pub(crate) fn new(inner: D, field: &str, room: usize) -> Self {
        let (key, long, padding, documents_max, rows) = (None, Long::Refuse, 0, None, None);
        Self { inner, field: field.into(), room, key, long, padding, documents_max, rows }
    }

    /// Packs the documents in an order shuffled by `key`. Default: the dataset's order, for data that lie shuffled.
    pub fn shuffled(mut self, key: u64) -> Self {
        self.key = Some(key);
        self
    }

    /// Splits documents that are longer than a bin: parts that fill one each, and the rest. Default: such a document is an
    /// error of `open`.
    pub fn split(mut self) -> Self {
        self.long = Long::Split;
        self
    }

    /// Cuts documents that are longer than a bin, in place of [`split`](Self::split); [`Packed::cut_tokens`] and the report
    /// count the rest.
    pub fn cut(mut self) -> Self {
        self.long = Long::Cut;
        self
    }

    /// Concatenates the documents, in place of best fit: rows are full, and a document that reaches over the end of one goes on in
    /// the next, as a part with positions of its own. Documents that follow each other in their file are then one read.
    pub fn concatenated(mut self) -> Self {
        self.long = Long::Concatenate;
        self
    }

    /// Sets the maximum number of documents of a row, and with it the shape of `cu_seqlens`. Default: one for each 16 tokens of
    /// the row, and at least 64; rows of shorter documents stay partly empty.
    pub fn documents_max(mut self, documents: usize) -> Self {
        self.documents_max = Some(documents);
        self
    }

    /// Keeps the rows in this file, too: their tokens, row after row. Opening writes it if it is not there, by one pass over the
    /// documents; it takes the disk space of the tokens. A row is then one read, as a window of a token file, in place of a
    /// read for each document. A state of a run without it does not fit, since the rows are the dataset's files then.
    pub fn rows(mut self, file: impl Into<PathBuf>) -> Self {
        self.rows = Some(file.into());
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
    /// than a bin, unless it is split, cut or concatenated; [`ErrorKind::Changed`] for bins or rows of another dataset or of other settings;
    /// [`ErrorKind::Empty`] without tokens; file system errors.
    pub fn open(self, index: impl AsRef<Path>) -> Result<Packed<D>> {
        let (field, dtype, size) = self.checked()?;
        let padding = padding_row(self.padding, dtype, self.room)?;
        let (key, by_key) = (self.key.unwrap_or(0), self.key.is_some().into());
        let settings = [field as u64, self.room as u64, self.long as u64, size.most.into(), by_key, key];
        let digest = kept::identity_of("packed", &self.inner).words(&settings);
        let order = self.key.map(|key| Permutation::new(self.inner.len(), Key::new(key).named("packed")));
        let documents = Documents { inner: self.inner, field, token_bytes: dtype.size() as u64, size, long: self.long };
        // Kept bins do not tell whether these documents can be packed.
        documents.part(0, None, 0, &mut Parts::new())?;
        let place = index.as_ref();
        if self.rows.as_deref() == Some(place) {
            let message = "bins and rows in one file: name two";
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(place));
        }
        let fill = |out: &mut SideWriter| pack(&documents, order.as_ref(), out, place);
        let (file, origin) =
            kept::open_or_make(place, (KIND, "bins"), digest.end(), |file| table::fits(file, size), fill)?;
        let fields = [
            Field::fixed(self.field, dtype, [self.room]),
            Field::fixed("positions", DType::I32, [self.room]),
            Field::fixed("documents", DType::I32, [self.room]),
            Field::fixed("cu_seqlens", DType::I32, [size.most as usize + 1]),
            Field::fixed("max_seqlen", DType::I32, []),
        ];
        let mut packed = Packed {
            schema: fields.map(EncodedField::raw).into(),
            padding,
            counts: table::counts(&file)?,
            identity: digest.word(self.padding).end(),
            file,
            origin,
            recent: Recent::new(RECENT),
            sources: documents.inner.sources().clone(),
            rows: None,
            documents,
        };
        self.rows.map_or(Ok(()), |rows| packed.take_rows(rows))?;
        Ok(packed)
    }

    /// The field of the documents, its dtype, and the size of a bin.
    fn checked(&self) -> Result<(usize, DType, Bin)> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        let schema = self.inner.schema();
        let Some(field) = schema.iter().position(|known| known.name == self.field) else {
            return bad(no_field(schema, &self.field));
        };
        let encoding = &schema[field].encoding;
        let Some(raw) = schema[field].as_raw().filter(|raw| raw.dims().len() == 1) else {
            return bad(format!("field `{}` is {encoding}; packed are rows of numbers", self.field));
        };
        if self.inner.chunked().is_some() {
            return bad("the samples come in chunks, and packed documents are read one by one".into());
        }
        if self.room == 0 || self.room > ROOM_MAX {
            return bad(format!("bins of {} tokens; take 1 to {ROOM_MAX}", self.room));
        }
        let most = self.documents_max.unwrap_or((self.room / 16).clamp(64, ITEMS_MAX));
        if most == 0 || most > ITEMS_MAX {
            return bad(format!("rows of {most} documents; take 1 to {ITEMS_MAX}"));
        }
        if self.inner.len() >= DOCUMENTS_MAX {
            let message = format!("{} documents; fewer than {DOCUMENTS_MAX} can be packed", self.inner.len());
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
        }
        Ok((field, raw.dtype(), Bin { room: self.room as u32, most: most as u32 }))
    }
}

/// A row of padding.
fn padding_row(token: u64, dtype: DType, room: usize) -> Result<Box<[u8]>> {
    let (mut bytes, size) = (token.to_le_bytes(), dtype.size());
    if bytes[size..].iter().any(|byte| *byte != 0) {
        let message = format!("padding {token} does not fit {dtype}");
        return Err(Error::new(ErrorKind::Config, Stage::Index, message));
    }
    if cfg!(target_endian = "big") {
        bytes[..size].reverse();
    }
    Ok(bytes[..size].repeat(room).into())
}

/// Packs all documents into the file.
fn pack<D: Dataset>(
    documents: &Documents<D>,
    order: Option<&Permutation>,
    out: &mut SideWriter,
    place: &Path,
) -> Result<()> {
    let failed = |error| Error::os(Stage::Index, "cannot write the bins", error).with_path(place);
    let (len, threads) = (documents.inner.len(), std::thread::available_parallelism().map_or(2, usize::from));
    // A group has many bins, of which the last ones are not full.
    let step = u64::from(documents.size.room).saturating_mul(16).clamp(1 << 16, 1 << 19);
    let starts: Vec<u64> = (0..len.div_ceil(step)).map(|group| group * step).collect();
    // A bin that is filled in turn depends on those before.
    let (in_turn, is_in_turn) = (Mutex::new(InTurn::default()), documents.long == Long::Concatenate);
    let threads = if is_in_turn { 1 } else { threads.min(THREADS_MAX) };
    let mut writer = TableWriter::default();
    for some in starts.chunks(TOGETHER) {
        let group = |_, start: &u64| match (*start..(start + step).min(len), is_in_turn) {
            (positions, true) => documents.concatenate(positions, order, &mut in_turn.hold()),
            (positions, false) => documents.group(positions, order),
        };
        for group in by_threads(threads, some, group)? {
            writer.add(&group, out).map_err(failed)?;
        }
    }
    if writer.counts.bins == 0 {
        let message = format!("{len} documents without a token");
        return Err(Error::new(ErrorKind::Empty, Stage::Index, message));
    }
    writer.finish(out).map_err(failed)
}
