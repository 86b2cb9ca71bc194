//! Parquet shards: a row group, or a run of its rows, is a chunk; columns become rows of a batch without an object for
//! each.
//!
//! ```text
//! footer ──open──► chunks { file, row group, rows, where each chosen column lies }      (parquet crate, once)
//! chunk ──readers──► column chunks ──pages──► dense values ──interleave──► rows of the chunk ──► rows of batches
//!                                          └► bytes (pictures) ─────► one after the other ──► decoder
//! ```
//!
//! A row group is opened as a whole by one worker, several at once by several. Rows cannot be had one by one, so a
//! shuffled order needs [`Order::windowed`](crate::Order::windowed), unless all row groups fit the memory budget.
//!
//! Limits: numbers of up to 64 bits, fixed-length bytes, byte arrays and strings, lists of numbers (not lists of lists,
//! maps, decimals); pages without compression, by Snappy, gzip, LZ4, LZ4_RAW or zstd. A row group that takes more than
//! [`chunk_bytes`](ParquetBuilder::chunk_bytes) when open is cut into runs of rows, if the file has an offset index.
//!
//! Invariants: the footer's sizes are compared with the file's length before anything is read, and the pages' with the
//! footer's before anything is allocated; pages that carry a CRC are checked; a chunk gives as many rows as the footer
//! says, or an error.

mod column;
mod interleave;
mod page;
mod scan;
mod unpack;

pub use column::Nulls;

use self::column::{Column, Place, Scratch as Arenas, TOGETHER};
use self::unpack::Codec;
use crate::dataset::digest::Digest;
use crate::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, Parts};
use crate::decode::Scratch;
use crate::error::{Error, ErrorKind, Result, Stage, guarded};
use crate::storage::listing::expand;
use crate::storage::{Blob, Extent, SourceId, Sources};
use crate::tensor::{DType, EncodedField, Field};
use arrow_schema::{DataType, Fields};
use bytes::Bytes;
use parquet::DecodeResult;
use parquet::arrow::parquet_to_arrow_schema;
use parquet::basic::{Compression, Encoding, Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    ColumnChunkMetaData, PageIndexPolicy, ParquetMetaData, ParquetMetaDataPushDecoder, ParquetMetaDataReader,
    RowGroupMetaData,
};
use parquet::file::page_index::offset_index::{OffsetIndexMetaData, PageLocation};
use parquet::file::statistics::Statistics;
use parquet::schema::types::ColumnDescPtr;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of an open chunk above which a row group is cut into runs of rows.
const CHUNK_BYTES: u64 = 128 << 20;
/// A footer of more bytes is refused, and an offset index of more is not looked at.
const FOOTER_MAX: u64 = 256 << 20;

/// Parquet files, read by row groups.
///
/// Taken: numbers of up to 64 bits (booleans as `u8`, dates and times as integers), fixed-length bytes, byte arrays and
/// strings, lists of numbers; nested columns by their dotted names (`image.bytes`); pages without compression, by Snappy,
/// gzip, LZ4, LZ4_RAW or zstd. Refused, by name: lists of lists, maps, decimals, other compressions. Missing values are errors unless
/// [`ParquetBuilder::nulls`] says otherwise.
///
/// Rows cannot be had one by one: a row group is opened as a whole, so a shuffle needs
/// [`Order::windowed`](crate::Order::windowed), unless all row groups fit the memory budget.
///
/// ```no_run
/// # use feedline::{Loader, Order, dataset::Parquet};
/// let features: Vec<String> = (0..64).map(|i| format!("f{i:02}")).collect();
/// let dataset = Parquet::builder()
///     .stack("features", &features) // one field of shape [64]
///     .column("label")
///     .open("train-{00..07}.parquet")?;
/// let loader = Loader::builder(dataset).order(Order::windowed(7, 8)).batch_size(4096).build()?;
/// # Ok::<(), feedline::Error>(())
/// ```
pub struct Parquet {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    fields: Vec<FieldPlan>,
    /// The chosen columns, as the file's schema has them.
    leaves: Vec<ColumnDescPtr>,
    chunks: Vec<Chunk>,
    starts: Vec<u64>,
    nulls: Nulls,
    sample_bytes_max: u64,
    pruned: usize,
    name: String,
}

/// How a field is made of columns.
struct FieldPlan {
    /// Indices in `leaves`.
    columns: Range<usize>,
    kind: FieldKind,
}

#[derive(Clone, Copy)]
enum FieldKind {
    /// `columns × list` values of `width` bytes, of which the low `keep` are taken.
    Array { width: usize, keep: usize, list: usize },
    /// Any number of bytes; `width` and `keep` are those of list elements.
    Ragged { width: usize, keep: usize },
}

struct Chunk {
    file: u32,
    group: u32,
    /// Of the row group.
    rows: Range<u64>,
    places: Box<[Place]>,
    bytes: ChunkBytes,
}

/// Settings for [`Parquet`]; every call may be left out but [`open`](Self::open).
#[derive(Clone, Debug)]
#[must_use]
pub struct ParquetBuilder {
    wanted: Vec<Wanted>,
    nulls: Nulls,
    chunk_bytes: u64,
    prune: Vec<(String, f64, f64)>,
}

#[derive(Clone, Debug)]
struct Wanted {
    name: String,
    columns: Vec<String>,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Stored,
    Image,
    UpTo(usize),
}

impl Parquet {
    /// All columns of the files that `pattern` names, each a field.
    ///
    /// Errors: as [`ParquetBuilder::open`].
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(pattern)
    }

    /// Settings.
    pub fn builder() -> ParquetBuilder {
        ParquetBuilder { wanted: Vec::new(), nulls: Nulls::default(), chunk_bytes: CHUNK_BYTES, prune: Vec::new() }
    }

    /// Row groups that [`ParquetBuilder::prune`] left out.
    pub fn groups_pruned(&self) -> usize {
        self.pruned
    }
}

impl ParquetBuilder {
    fn wants(mut self, name: &str, columns: Vec<String>, how: How) -> Self {
        self.wanted.push(Wanted { name: name.into(), columns, how });
        self
    }

    /// Takes a column as the field of its name. Nested ones are named with dots (`image.bytes`); a list is named as
    /// the column. Numbers become scalars, lists of fixed size vectors, byte arrays and strings encoded bytes.
    ///
    /// When no column is named, all are taken.
    pub fn column(self, name: &str) -> Self {
        self.wants(name, vec![name.into()], How::Stored)
    }

    /// Takes these columns, each as [`column`](Self::column).
    pub fn columns<'n>(self, names: impl IntoIterator<Item = &'n str>) -> Self {
        names.into_iter().fold(self, |builder, name| builder.column(name))
    }

    /// Puts columns of one dtype side by side into one field `name` of shape `[columns]` (`[columns × n]` for lists of n).
    pub fn stack(self, name: &str, columns: &[impl AsRef<str>]) -> Self {
        self.wants(name, columns.iter().map(|column| column.as_ref().to_string()).collect(), How::Stored)
    }

    /// Takes a column of encoded pictures as the field of its name; of a structure (Hugging Face's) its `bytes`.
    pub fn image(self, name: &str) -> Self {
        self.wants(name, vec![name.into()], How::Image)
    }

    /// Takes a column of lists of numbers, or of bytes, of at most `max` elements; shorter ones are padded with zeros.
    pub fn up_to(self, name: &str, max: usize) -> Self {
        self.wants(name, vec![name.into()], How::UpTo(max))
    }

    /// What becomes of missing values. Default: [`Nulls::Error`].
    pub fn nulls(mut self, nulls: Nulls) -> Self {
        self.nulls = nulls;
        self
    }

    /// Bytes of an open chunk above which a row group is cut into runs of rows, where the file has an offset index.
    /// Default: 128 MiB. Smaller chunks need less memory and shuffle better; pages are read whole.
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = bytes.max(1);
        self
    }

    /// Leaves out row groups whose statistics say that the number column `column` has no value within `min ..= max`.
    /// Rows of the other row groups all come, whatever their values.
    pub fn prune(mut self, column: &str, min: f64, max: f64) -> Self {
        self.prune.push((column.into(), min, max));
        self
    }

    /// Opens the files that `pattern` names: one file, a folder (`*.parquet` in it), or a pattern with `*`, `{a,b}`,
    /// `{000..127}`. Reads their footers, in parallel.
    ///
    /// Errors: not Parquet, damaged, a column that is not there or of an unsupported type, files that differ in the
    /// chosen columns; each names the file.
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<Parquet> {
        let files = expand(&pattern, &[".parquet"])?;
        let footers: Vec<Footer> =
            files.into_par_iter().map(|path| Footer::of_file(path, &self)).collect::<Result<_>>()?;
        let mut sources = Sources::new();
        for footer in &footers {
            sources.file(&footer.path, footer.len)?;
        }
        self.finish(sources, &footers, pattern.as_ref().display().to_string())
    }

    /// One file in memory of the process.
    ///
    /// Errors: as [`open`](Self::open).
    pub fn open_bytes(self, bytes: impl Into<Arc<[u8]>>) -> Result<Parquet> {
        let bytes: Arc<[u8]> = bytes.into();
        let footer = Footer::of_bytes(&bytes, &self)?;
        let mut sources = Sources::new();
        sources.memory(bytes);
        self.finish(sources, &[footer], "<memory>".into())
    }

    fn finish(self, sources: Sources, footers: &[Footer], name: String) -> Result<Parquet> {
        let first = &footers[0];
        let layout = SchemaPlan::new(&self.wanted, first).map_err(|error| error.with_path(&first.path))?;
        let mut dataset = Parquet {
            sources: Arc::new(sources),
            schema: layout.schema,
            fields: layout.fields,
            leaves: layout.leaves.iter().map(|leaf| leaf.descr.clone()).collect(),
            chunks: Vec::new(),
            starts: vec![0],
            nulls: self.nulls,
            sample_bytes_max: 0,
            pruned: 0,
            name,
        };
        for (file, footer) in footers.iter().enumerate() {
            let columns = same_columns(&layout.leaves, footer).map_err(|error| error.with_path(&footer.path))?;
            let prune = prune_columns(&self.prune, footer).map_err(|error| error.with_path(&footer.path))?;
            for (number, group) in footer.meta.row_groups().iter().enumerate() {
                if prune.iter().any(|(column, min, max)| outside(group.column(*column).statistics(), *min, *max)) {
                    dataset.pruned += 1;
                    continue;
                }
                let cut = Cut { footer, group, number, columns: &columns, limit: self.chunk_bytes };
                dataset.add_group(file as u32, &cut).map_err(|error| error.with_path(&footer.path))?;
            }
        }
        if dataset.len() == 0 {
            return Err(Error::new(ErrorKind::Empty, Stage::Index, "there are no rows").with_path(&first.path));
        }
        Ok(dataset)
    }
}

/// A file's footer.
struct Footer {
    path: PathBuf,
    len: u64,
    meta: ParquetMetaData,
    /// Every column, in the order of the file.
    leaves: Vec<Leaf>,
    /// All of it, when it is in memory.
    bytes: Option<Arc<[u8]>>,
}

/// A column as the file has it.
#[derive(Clone)]
struct Leaf {
    descr: ColumnDescPtr,
    /// Arrow's type of its values.
    arrow: DataType,
    list: List,
    /// The name under which it is a field: the top-level column's when that has no other.
    name: String,
}

impl Leaf {
    fn described(&self) -> String {
        match self.list {
            List::No => self.arrow.to_string(),
            List::Fixed(len) => format!("lists of {len} {}", self.arrow),
            List::Any => format!("lists of any number of {}", self.arrow),
        }
    }

    /// What two files may differ in.
    fn words(&self) -> String {
        let (defined, repeated) = (self.descr.max_def_level(), self.descr.max_rep_level());
        let nulls = if defined == repeated { "never null" } else { "nullable" };
        let stored = self.descr.physical_type();
        format!("{} ({nulls}, levels {defined} and {repeated}, stored as {stored})", self.described())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum List {
    No,
    Fixed(usize),
    Any,
}

fn unread(error: parquet::errors::ParquetError) -> Error {
    let kind =
        if matches!(error, parquet::errors::ParquetError::EOF(_)) { ErrorKind::Truncated } else { ErrorKind::Decode };
    Error::new(kind, Stage::Index, "the footer cannot be read").with_source(error)
}

fn config(message: String) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}

impl Footer {
    fn of_file(path: PathBuf, builder: &ParquetBuilder) -> Result<Self> {
        Self::of_blob(&Blob::open(&path)?, None, builder).map_err(|error| error.with_path(&path))
    }

    fn of_bytes(bytes: &Arc<[u8]>, builder: &ParquetBuilder) -> Result<Self> {
        Self::of_blob(&Blob::memory(Bytes::from_owner(bytes.clone())), Some(bytes.clone()), builder)
    }

    fn of_blob(blob: &Blob, bytes: Option<Arc<[u8]>>, builder: &ParquetBuilder) -> Result<Self> {
        let parse = || Self::new(blob.path().to_path_buf(), blob.len(), read_meta(blob, builder)?, bytes);
        guarded("the footer", Stage::Index, parse)
    }

    fn new(path: PathBuf, len: u64, meta: ParquetMetaData, bytes: Option<Arc<[u8]>>) -> Result<Self> {
        let file = meta.file_metadata();
        let descr = file.schema_descr_ptr();
        let arrow = parquet_to_arrow_schema(&descr, file.key_value_metadata()).map_err(unread)?;
        let mut types = Vec::new();
        for field in arrow.fields() {
            let before = types.len();
            leaf_types(field.data_type(), List::No, &mut types);
            if types.len() == before {
                return Err(config(format!("column `{}` of type {} has no values", field.name(), field.data_type())));
            }
        }
        if types.len() != descr.num_columns() {
            let message = format!("the schema has {} columns, the file {}", types.len(), descr.num_columns());
            return Err(Error::new(ErrorKind::Decode, Stage::Index, message));
        }
        let alone = |root: &str| descr.columns().iter().filter(|column| column.path().parts()[0] == root).count() == 1;
        let leaves = descr.columns().iter().zip(types).map(|(descr, (arrow, list))| {
            let root = &descr.path().parts()[0];
            let name = if list != List::No && alone(root) { root.clone() } else { descr.path().string() };
            Leaf { descr: descr.clone(), arrow, list, name }
        });
        let leaves = leaves.collect();
        Ok(Self { path, len, meta, leaves, bytes })
    }

    /// The file, for what is read of it beside the footer.
    fn blob(&self) -> Option<Blob> {
        match &self.bytes {
            Some(bytes) => Some(Blob::memory(Bytes::from_owner(bytes.clone()))),
            None => Blob::open(&self.path).ok(),
        }
    }

    fn find(&self, name: &str) -> Result<usize> {
        let is = |leaf: &Leaf| leaf.name == name || leaf.descr.path().string() == name;
        self.leaves.iter().position(is).ok_or_else(|| {
            let names: Vec<_> = self.leaves.iter().take(64).map(|leaf| leaf.name.as_str()).collect();
            config(format!("no column `{name}`; there are {}", names.join(", ")))
        })
    }
}

/// The footer, its length checked against the file before it is read.
fn read_meta(blob: &Blob, builder: &ParquetBuilder) -> Result<ParquetMetaData> {
    let len = blob.len();
    let wrong = |kind, message: String| Err(Error::new(kind, Stage::Index, message));
    if len < 12 {
        return wrong(ErrorKind::Truncated, format!("{len} bytes are too few for a Parquet file"));
    }
    let [a, b, c, d, magic @ ..] = blob.array::<8>(len - 8, "the footer")?;
    match &magic {
        b"PAR1" => {}
        b"PARE" => return wrong(ErrorKind::Decode, "an encrypted file, such files are not read".into()),
        _ => return wrong(ErrorKind::Decode, "not a Parquet file, or cut: it does not end in PAR1".into()),
    }
    let footer = u64::from(u32::from_le_bytes([a, b, c, d]));
    if footer > len - 12 || footer > FOOTER_MAX {
        return wrong(ErrorKind::Truncated, format!("a footer of {footer} bytes in a file of {len}"));
    }
    let start = len - 8 - footer;
    let bytes = Bytes::from(blob.read(start, footer, "the footer")?);
    let clean = page::check_footer(&bytes).map_err(|error| {
        Error::new(error.kind(), Stage::Index, format!("the footer: {}", error.message())).with_range(start, footer)
    })?;
    let meta = ParquetMetaDataReader::decode_metadata(clean.as_deref().unwrap_or(&bytes)).map_err(unread)?;
    drop(bytes);
    let counted = meta.row_groups().iter().fold(0_i64, |rows, group| rows.saturating_add(group.num_rows()));
    // Some writers leave the number of all rows out.
    if ![0, counted].contains(&meta.file_metadata().num_rows()) {
        let all = meta.file_metadata().num_rows();
        let message = format!(
            "the footer counts {all} rows, its row groups {counted}: a row group is lost, or the footer damaged"
        );
        return Err(Error::new(ErrorKind::Decode, Stage::Index, message).with_range(start, footer));
    }
    if clean.is_some() {
        // The offset index is looked for by the parquet crate's own reading of the footer.
        return Ok(meta);
    }
    let large =
        |group: &RowGroupMetaData| u64::try_from(group.total_byte_size()).is_ok_and(|b| b > builder.chunk_bytes / 2);
    // Where the pages lie matters only for row groups that may have to be cut.
    if !meta.row_groups().iter().any(large) || offset_index_bytes(&meta) > FOOTER_MAX {
        return Ok(meta);
    }
    with_offset_index(blob, meta)
}

/// The same footer, with the places of the pages.
fn with_offset_index(blob: &Blob, meta: ParquetMetaData) -> Result<ParquetMetaData> {
    let mut decoder = ParquetMetaDataPushDecoder::try_new_with_metadata(blob.len(), meta)
        .map_err(unread)?
        .with_column_index_policy(PageIndexPolicy::Skip)
        .with_offset_index_policy(PageIndexPolicy::Optional);
    loop {
        match decoder.try_decode().map_err(unread)? {
            DecodeResult::Data(meta) => return Ok(meta),
            DecodeResult::Finished => return Err(unread(ParquetError::General("no metadata".into()))),
            DecodeResult::NeedsData(ranges) => {
                let read = |range: &Range<u64>| blob.read(range.start, range.end - range.start, "the offset index");
                let pieces = ranges.iter().map(|range| read(range).map(Bytes::from)).collect::<Result<_>>()?;
                decoder.push_ranges(ranges, pieces).map_err(unread)?;
            }
        }
    }
}

/// What is read at once for the offset indexes of all columns: from the first to the end of the last.
fn offset_index_bytes(meta: &ParquetMetaData) -> u64 {
    let places = meta.row_groups().iter().flat_map(RowGroupMetaData::columns).filter_map(|column| {
        let start = u64::try_from(column.offset_index_offset()?).ok()?;
        Some((start, start.saturating_add(u64::try_from(column.offset_index_length()?).ok()?)))
    });
    let (start, end) = places.fold((u64::MAX, 0), |(start, end), place| (start.min(place.0), end.max(place.1)));
    end.saturating_sub(start)
}

/// The types of the leaves below a column, in the order in which Parquet stores them.
fn leaf_types(of: &DataType, list: List, out: &mut Vec<(DataType, List)>) {
    let deeper = |more: List| if list == List::No { more } else { List::Any };
    let each = |fields: &Fields, out: &mut Vec<_>| {
        fields.iter().for_each(|field| leaf_types(field.data_type(), list, out));
    };
    match of {
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field) => {
            leaf_types(field.data_type(), deeper(List::Any), out);
        }
        DataType::FixedSizeList(field, len) => {
            leaf_types(field.data_type(), deeper(List::Fixed(usize::try_from(*len).unwrap_or(0))), out);
        }
        DataType::Map(field, _) => leaf_types(field.data_type(), List::Any, out),
        DataType::Struct(fields) => each(fields, out),
        DataType::Dictionary(_, value) => leaf_types(value, list, out),
        other => out.push((other.clone(), list)),
    }
}

/// What the batch's fields are made of.
struct SchemaPlan {
    schema: Vec<EncodedField>,
    fields: Vec<FieldPlan>,
    leaves: Vec<Leaf>,
}

impl SchemaPlan {
    fn new(wanted: &[Wanted], footer: &Footer) -> Result<Self> {
        let all: Vec<Wanted>;
        let wanted = if wanted.is_empty() {
            let one =
                |leaf: &Leaf| Wanted { name: leaf.name.clone(), columns: vec![leaf.name.clone()], how: How::Stored };
            all = footer.leaves.iter().map(one).collect();
            &all
        } else {
            wanted
        };
        let mut plan = Self { schema: Vec::new(), fields: Vec::new(), leaves: Vec::new() };
        for field in wanted {
            plan.add(field, footer)?;
        }
        Ok(plan)
    }

    fn add(&mut self, wanted: &Wanted, footer: &Footer) -> Result<()> {
        let start = self.leaves.len();
        for column in &wanted.columns {
            // Pictures of Hugging Face's datasets are a structure of `bytes` and `path`.
            let nested = || footer.find(&format!("{column}.bytes")).ok().filter(|_| wanted.how == How::Image);
            let leaf = footer.find(column).or_else(|error| nested().ok_or(error))?;
            self.leaves.push(footer.leaves[leaf].clone());
        }
        let leaves = &self.leaves[start..];
        let Some(first) = leaves.first() else {
            return Err(config(format!("field `{}` is made of no column", wanted.name)));
        };
        if let Some(other) = leaves.iter().find(|leaf| leaf.arrow != first.arrow || leaf.list != first.list) {
            let message = format!(
                "`{}` and `{}` cannot be stacked: {} and {}",
                first.name,
                other.name,
                first.described(),
                other.described()
            );
            return Err(config(message));
        }
        let (encoded, kind) = encoded_field(wanted, first, leaves.len())?;
        self.schema.push(encoded);
        self.fields.push(FieldPlan { columns: start..self.leaves.len(), kind });
        Ok(())
    }
}

/// A value's dtype, its bytes in the file, and those that are kept. A fixed-size byte array is a vector of bytes.
fn number(leaf: &Leaf) -> Option<(DType, usize, usize)> {
    Some(match (&leaf.arrow, leaf.descr.physical_type()) {
        (DataType::Boolean, Type::BOOLEAN) => (DType::U8, 1, 1),
        (DataType::Int8, Type::INT32) => (DType::I8, 4, 1),
        (DataType::UInt8, Type::INT32) => (DType::U8, 4, 1),
        (DataType::Int16, Type::INT32) => (DType::I16, 4, 2),
        (DataType::UInt16, Type::INT32) => (DType::U16, 4, 2),
        (DataType::UInt32, Type::INT32) => (DType::U32, 4, 4),
        // Version 1 of the format had no unsigned numbers.
        (DataType::UInt32, Type::INT64) => (DType::U32, 8, 4),
        (DataType::Int32 | DataType::Date32 | DataType::Date64 | DataType::Time32(_), Type::INT32) => {
            (DType::I32, 4, 4)
        }
        (DataType::UInt64, Type::INT64) => (DType::U64, 8, 8),
        (
            DataType::Int64 | DataType::Date64 | DataType::Time64(_) | DataType::Timestamp(..) | DataType::Duration(_),
            Type::INT64,
        ) => (DType::I64, 8, 8),
        (DataType::Float16, Type::FIXED_LEN_BYTE_ARRAY) => (DType::F16, 2, 2),
        (DataType::Float32, Type::FLOAT) => (DType::F32, 4, 4),
        (DataType::Float64, Type::DOUBLE) => (DType::F64, 8, 8),
        _ => return None,
    })
}

fn is_decimal(of: &DataType) -> bool {
    use DataType::{Decimal32, Decimal64, Decimal128, Decimal256};
    matches!(of, Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..))
}

/// Why a column cannot be a field as it was asked for.
fn refusal(leaf: &Leaf) -> String {
    let list = leaf.list != List::No;
    match (&leaf.arrow, leaf.descr.physical_type()) {
        _ if leaf.descr.max_rep_level() > 1 => "lists within lists are not read".into(),
        (of, _) if is_decimal(of) => "decimals are not read".into(),
        (_, Type::INT96) => "timestamps of 96 bits are not read".into(),
        (_, Type::BYTE_ARRAY) if list => "lists of byte arrays are not read".into(),
        (DataType::FixedSizeBinary(_), _) if list => "lists of byte arrays are not read".into(),
        (_, Type::BYTE_ARRAY) => "byte arrays cannot be stacked".into(),
        _ if number(leaf).is_none() => "values of this type are not read".into(),
        _ if list => "a list is a field by `.up_to(name, max)`, one of fixed size also by `.column(name)`".into(),
        _ => "a number is a field by `.column(name)`".into(),
    }
}

fn encoded_field(wanted: &Wanted, leaf: &Leaf, columns: usize) -> Result<(EncodedField, FieldKind)> {
    let name = &wanted.name;
    let unsupported = || {
        let stored = leaf.descr.physical_type();
        Err(config(format!("column `{}` ({}, stored as {stored}): {}", leaf.name, leaf.described(), refusal(leaf))))
    };
    if leaf.descr.max_rep_level() > 1 {
        return unsupported();
    }
    if let (DataType::FixedSizeBinary(_), List::No) = (&leaf.arrow, leaf.list) {
        let width = leaf.descr.type_length().max(0) as usize;
        let shape = if columns == 1 { vec![width] } else { vec![columns, width] };
        let kind = FieldKind::Array { width, keep: width, list: 1 };
        return Ok((EncodedField::raw(Field::fixed(name, DType::U8, shape)), kind));
    }
    let any_bytes = FieldKind::Ragged { width: 1, keep: 1 };
    let bytes = leaf.descr.physical_type() == Type::BYTE_ARRAY && leaf.list == List::No && columns == 1;
    let bytes = bytes && !is_decimal(&leaf.arrow);
    match (number(leaf), leaf.list, wanted.how) {
        (None, _, How::Image) if bytes => Ok((EncodedField::image(name), any_bytes)),
        (None, _, How::Stored) if bytes => Ok((EncodedField::bytes(name), any_bytes)),
        (None, _, How::UpTo(max)) if bytes => Ok((EncodedField::raw(Field::up_to(name, DType::U8, max)), any_bytes)),
        (Some((dtype, width, keep)), List::No, How::Stored) => {
            let shape = if columns == 1 { vec![] } else { vec![columns] };
            let kind = FieldKind::Array { width, keep, list: 1 };
            Ok((EncodedField::raw(Field::fixed(name, dtype, shape)), kind))
        }
        (Some((dtype, width, keep)), List::Fixed(list), How::Stored) if list > 0 => {
            let kind = FieldKind::Array { width, keep, list };
            Ok((EncodedField::raw(Field::fixed(name, dtype, [columns * list])), kind))
        }
        (Some((dtype, width, keep)), List::Any | List::Fixed(_), How::UpTo(max)) if columns == 1 => {
            let kind = FieldKind::Ragged { width, keep };
            Ok((EncodedField::raw(Field::up_to(name, dtype, max)), kind))
        }
        (Some(_), List::Any, How::Stored) => Err(config(format!(
            "column `{}` holds lists of any length: say the largest with `.up_to(\"{}\", max)`",
            leaf.name, leaf.name
        ))),
        _ => unsupported(),
    }
}

/// Where the chosen columns are in this file. Errors: one is missing, or of another type.
fn same_columns(leaves: &[Leaf], footer: &Footer) -> Result<Vec<usize>> {
    let place = |leaf: &Leaf| {
        let path = leaf.descr.path().string();
        let index = footer.find(&path)?;
        let here = &footer.leaves[index];
        let same = |a: &ColumnDescPtr, b: &ColumnDescPtr| {
            a.physical_type() == b.physical_type()
                && a.max_def_level() == b.max_def_level()
                && a.max_rep_level() == b.max_rep_level()
                && a.type_length() == b.type_length()
        };
        if here.arrow != leaf.arrow || here.list != leaf.list || !same(&here.descr, &leaf.descr) {
            let message = format!("column `{path}` is {} here, {} in the first file", here.words(), leaf.words());
            return Err(Error::new(ErrorKind::Shape, Stage::Index, message));
        }
        Ok(index)
    };
    leaves.iter().map(place).collect()
}

fn prune_columns(prune: &[(String, f64, f64)], footer: &Footer) -> Result<Vec<(usize, f64, f64)>> {
    let place = |(name, min, max): &(String, f64, f64)| {
        let index = footer.find(name)?;
        match number(&footer.leaves[index]) {
            Some((DType::U32 | DType::U64, ..)) | None => {
                Err(config(format!("column `{name}` ({}) has no statistics to prune by", footer.leaves[index].arrow)))
            }
            Some(_) => Ok((index, *min, *max)),
        }
    };
    prune.iter().map(place).collect()
}

/// Whether the statistics say that no value lies within `min ..= max`.
fn outside(statistics: Option<&Statistics>, min: f64, max: f64) -> bool {
    let (low, high) = match statistics {
        Some(Statistics::Int32(s)) => (s.min_opt().map(|v| f64::from(*v)), s.max_opt().map(|v| f64::from(*v))),
        // Beyond 2^53 a bound moves by rounding: widened, so that nothing is left out by it.
        Some(Statistics::Int64(s)) => {
            (s.min_opt().map(|v| (*v as f64).next_down()), s.max_opt().map(|v| (*v as f64).next_up()))
        }
        Some(Statistics::Float(s)) => (s.min_opt().map(|v| f64::from(*v)), s.max_opt().map(|v| f64::from(*v))),
        Some(Statistics::Double(s)) => (s.min_opt().copied(), s.max_opt().copied()),
        _ => (None, None),
    };
    low.is_some_and(|low| low > max) || high.is_some_and(|high| high < min)
}

/// A row group that is to be cut into chunks.
struct Cut<'a> {
    footer: &'a Footer,
    group: &'a RowGroupMetaData,
    number: usize,
    columns: &'a [usize],
    limit: u64,
}

impl Cut<'_> {
    fn wrong(&self, message: String) -> Error {
        Error::new(ErrorKind::Decode, Stage::Index, format!("row group {}: {message}", self.number))
    }

    fn rows(&self) -> Result<u64> {
        u32::try_from(self.group.num_rows())
            .map(u64::from)
            .map_err(|_| self.wrong(format!("{} rows", self.group.num_rows())))
    }

    fn column(&self, index: usize) -> &ColumnChunkMetaData {
        self.group.column(self.columns[index])
    }

    /// Where column `index` lies as a whole.
    fn whole(&self, index: usize) -> Result<Place> {
        let (meta, rows) = (self.column(index), self.rows()?);
        let name = meta.column_path().string();
        let number = |what: &str, value: i64| {
            u64::try_from(value).map_err(|_| self.wrong(format!("column `{name}` has {value} {what}")))
        };
        let mut start = number("as its offset", meta.data_page_offset())?;
        let dictionary = meta.dictionary_page_offset().map(|offset| number("as its dictionary's offset", offset));
        // Some writers put 0 where there is none.
        let dictionary = dictionary.transpose()?.filter(|offset| *offset > 0 && *offset < start);
        if let Some(offset) = dictionary {
            start = offset;
        }
        let mut len = number("bytes", meta.compressed_size())?;
        let mut uncompressed = number("bytes when unpacked", meta.uncompressed_size())?;
        let uncounted = self.uncounted_header(start, len);
        (len, uncompressed) = (len.saturating_add(uncounted), uncompressed.saturating_add(uncounted));
        let values = number("values", meta.num_values())?;
        if values < rows {
            return Err(self.wrong(format!("column `{name}` has {values} values for {rows} rows")));
        }
        if start.checked_add(len).is_none_or(|end| end > self.footer.len) {
            let message = format!("row group {}: column `{name}` ends behind the end of the file", self.number);
            return Err(Error::new(ErrorKind::Truncated, Stage::Index, message).with_range(start, len));
        }
        if meta.file_path().is_some_and(|path| !path.is_empty()) {
            return Err(self.wrong(format!("column `{name}` lies in another file")));
        }
        let compression = meta.compression();
        if !Codec::knows(compression) {
            return Err(self.wrong(format!("column `{name}` is compressed by {compression}, which is not supported")));
        }
        // Some writers name a dictionary nowhere but in the encodings.
        let coded = |encoding| matches!(encoding, Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY);
        let has_dictionary = dictionary.is_some() || meta.encodings().any(coded);
        let mut place = Place {
            dictionary: None,
            data: (start, len),
            has_dictionary,
            uncompressed,
            unpacked_dictionary: 0,
            payload: None,
            values,
            compression,
            first_row: 0,
            rows,
        };
        if outgrows_pages(meta) {
            let said = meta.unencoded_byte_array_data_bytes().and_then(|bytes| u64::try_from(bytes).ok());
            place.payload = said.or_else(|| self.counted_payload(index, &place));
        }
        Ok(place)
    }

    /// Bytes of the dictionary's header that the footer leaves out of the sizes of a column, as parquet-mr before 1.2.9 did.
    fn uncounted_header(&self, start: u64, len: u64) -> u64 {
        let writer = self.footer.meta.file_metadata().created_by().unwrap_or_default();
        let content = if leaves_out_headers(writer) { self.footer.blob() } else { None };
        content.and_then(|content| scan::uncounted_header(&content, start, len)).unwrap_or(0)
    }

    fn counted_payload(&self, index: usize, place: &Place) -> Option<u64> {
        scan::payload(&self.footer.blob()?, &self.footer.leaves[self.columns[index]].descr, place)
    }
}

/// Whether files of this writer have PARQUET-816: `parquet-mr`, without a version or before 1.2.9.
fn leaves_out_headers(writer: &str) -> bool {
    let Some(rest) = writer.strip_prefix("parquet-mr") else { return false };
    let version = rest.trim_start().strip_prefix("version ").unwrap_or("0");
    let number =
        |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0_u32);
    let numbers: Vec<u32> = version.split('.').take(3).map(number).collect();
    numbers.as_slice() < [1, 2, 9].as_slice()
}

impl Parquet {
    fn add_group(&mut self, file: u32, cut: &Cut<'_>) -> Result<()> {
        let rows = cut.rows()?;
        if rows == 0 {
            return Ok(());
        }
        let places: Box<[Place]> = (0..self.leaves.len()).map(|index| cut.whole(index)).collect::<Result<_>>()?;
        let bytes = self.bytes_of(cut, &places, rows);
        let runs = if bytes.opened > cut.limit { self.runs(cut, &places, rows, bytes.opened) } else { None };
        match runs {
            None => self.add_chunk(file, cut, 0..rows, places, bytes),
            Some(runs) => {
                for (range, places) in runs {
                    let bytes = self.bytes_of(cut, &places, range.end - range.start);
                    self.add_chunk(file, cut, range, places, bytes);
                }
            }
        }
        Ok(())
    }

    fn add_chunk(&mut self, file: u32, cut: &Cut<'_>, rows: Range<u64>, places: Box<[Place]>, bytes: ChunkBytes) {
        let count = rows.end - rows.start;
        self.sample_bytes_max = self.sample_bytes_max.max(bytes.opened / count.max(1));
        self.starts.push(self.starts.last().expect("starts with 0") + count);
        self.chunks.push(Chunk { file, group: cut.number as u32, rows, places, bytes });
    }

    /// Runs of rows that need at most the limit, with the pages that hold them; `None` without an offset index.
    #[allow(clippy::type_complexity, reason = "a list of runs, each with its columns")]
    fn runs(&self, cut: &Cut<'_>, whole: &[Place], rows: u64, opened: u64) -> Option<Vec<(Range<u64>, Box<[Place]>)>> {
        let index = cut.footer.meta.page_index_for_row_group(cut.number);
        let content = cut.footer.blob()?;
        let dictionary = |(leaf, whole): (usize, &Place)| {
            let first = index.page_locations(cut.columns[leaf])?.first()?.offset;
            let before = u64::try_from(first).ok()?.checked_sub(whole.data.0)?;
            if before == 0 {
                Some(0)
            } else {
                Some(scan::page_sizes(&content, [(whole.data.0, before)].into_iter())?.0)
            }
        };
        let unpacked: Vec<u64> = whole.iter().enumerate().map(dictionary).collect::<Option<_>>()?;
        // Every run unpacks the dictionaries anew: one that is smaller than they are costs more than it saves.
        let limit = unpacked.iter().copied().fold(0, u64::saturating_add).max(cut.limit);
        let parts = opened.div_ceil(limit).clamp(1, rows);
        let step = rows.div_ceil(parts);
        let mut runs = Vec::new();
        for start in (0..rows).step_by(usize::try_from(step).ok()?) {
            let range = start..(start + step).min(rows);
            let place = |(leaf, whole): (usize, &Place)| {
                let pages = index.offset_index(cut.columns[leaf])?;
                let mut place = pages_of(whole, pages.page_locations(), &range, rows, cut.footer.len)?;
                place.unpacked_dictionary = unpacked[leaf];
                self.size_run(cut, leaf, &mut place, pages, &content);
                Some(place)
            };
            runs.push((range.clone(), whole.iter().enumerate().map(place).collect::<Option<_>>()?));
        }
        Some(runs)
    }

    /// What the pages of a run unpack to, at most. The offset index does not say it; values of fixed width, and byte
    /// arrays whose sizes it has, cannot be more than themselves with their levels. Of others the page headers say it.
    fn size_run(&self, cut: &Cut<'_>, leaf: usize, run: &mut Place, pages: &OffsetIndexMetaData, content: &Blob) {
        let descr = &self.leaves[leaf];
        let here = || pages.page_locations().iter().filter(|page| run.holds(page.offset));
        let payload = payload(run, pages);
        let kind = self.fields.iter().find(|field| field.columns.contains(&leaf)).map(|field| field.kind);
        let (values, each) = match (descr.physical_type(), kind) {
            (Type::BYTE_ARRAY, _) => (payload.map(|_| run.rows), 4),
            // How lists of any length share the values is not known.
            (_, Some(FieldKind::Ragged { .. }) | None) => (None, 0),
            (of, Some(FieldKind::Array { list, .. })) => {
                let each = if of == Type::FIXED_LEN_BYTE_ARRAY { descr.type_length().max(4) as u64 } else { 8 };
                (Some(run.rows.saturating_mul(list as u64)), each)
            }
        };
        let most = run.uncompressed;
        let bytes = if let Some(values) = values.map(|values| values.min(run.values)) {
            let levels = values.saturating_mul(4);
            let data = values.saturating_mul(each).saturating_add(payload.unwrap_or(0));
            data.saturating_add(levels).saturating_add(here().count() as u64 * 4096)
        } else {
            let size = |page: &PageLocation| {
                Some((u64::try_from(page.offset).ok()?, u64::try_from(page.compressed_page_size).ok()?))
            };
            let sizes: Option<Vec<_>> = here().map(size).collect();
            let sizes = sizes.and_then(|sizes| scan::page_sizes(content, sizes.into_iter()));
            let (bytes, values) = sizes.unwrap_or((most, run.values));
            run.values = values.min(run.values);
            bytes
        };
        run.uncompressed = bytes.min(most);
        if outgrows_pages(cut.column(leaf)) {
            run.payload = payload.or_else(|| cut.counted_payload(leaf, run));
        }
    }

    /// The sizes of a chunk with these pages.
    fn bytes_of(&self, cut: &Cut<'_>, places: &[Place], rows: u64) -> ChunkBytes {
        let mut bytes = ChunkBytes::default();
        for place in places {
            let dictionary = place.dictionary.map_or(0, |(_, len)| len);
            bytes.encoded = bytes.encoded.saturating_add(place.data.1).saturating_add(dictionary);
        }
        for field in &self.fields {
            let columns = field.columns.clone();
            match field.kind {
                FieldKind::Array { keep, list, .. } => {
                    let row = (columns.len() * keep).saturating_mul(list) as u64;
                    bytes.opened = bytes.opened.saturating_add(rows.saturating_mul(row));
                }
                FieldKind::Ragged { keep, .. } => {
                    let ragged = ragged_bytes(cut.column(columns.start), &places[columns.start], keep as u64);
                    bytes.opened = bytes.opened.saturating_add(ragged);
                }
            }
        }
        bytes.scratch = self.scratch_of(cut, places, rows);
        bytes
    }

    /// Heap that a worker takes while it opens a chunk: values of the columns that are woven together, and what reading
    /// one of them takes.
    fn scratch_of(&self, cut: &Cut<'_>, places: &[Place], rows: u64) -> u64 {
        let (mut together, mut reader) = (0, 0);
        for field in &self.fields {
            for columns in field.columns.clone().collect::<Vec<_>>().chunks(TOGETHER) {
                let arena = |leaf: &usize| match field.kind {
                    FieldKind::Ragged { .. } => 0,
                    FieldKind::Array { width, list, .. } => {
                        let (meta, plain) = (cut.column(*leaf), is_plain(cut.column(*leaf)));
                        let in_place = plain && meta.compression() == Compression::UNCOMPRESSED;
                        if in_place { 0 } else { rows.saturating_mul((width * list) as u64) }
                    }
                };
                together = columns.iter().map(arena).fold(0, u64::saturating_add).max(together);
            }
        }
        for (leaf, place) in places.iter().enumerate() {
            reader = reader_bytes(cut.column(leaf), place, rows).max(reader);
        }
        together.saturating_add(reader)
    }

    fn open_fields(&self, chunk: &Chunk, pieces: &[Bytes], arenas: &mut Arenas, out: &mut ChunkBuf) -> Result<()> {
        let none = Bytes::new();
        let mut pieces = pieces.iter();
        let mut parts = Vec::with_capacity(chunk.places.len());
        for place in &chunk.places {
            let mut piece = || pieces.next().unwrap_or(&none);
            let dictionary = if place.dictionary.is_some() { piece() } else { &none };
            parts.push((dictionary, piece()));
        }
        let column = |leaf: usize| Column {
            descr: &self.leaves[leaf],
            place: &chunk.places[leaf],
            dictionary: parts[leaf].0,
            data: parts[leaf].1,
            rows: chunk.rows.clone(),
            nulls: self.nulls,
        };
        for (number, field) in self.fields.iter().enumerate() {
            match field.kind {
                FieldKind::Array { width, keep, list } => {
                    let row_bytes = field.columns.len() * keep * list;
                    let rows = out.fixed(number, row_bytes)?;
                    for first in field.columns.clone().step_by(TOGETHER) {
                        let columns = first..(first + TOGETHER).min(field.columns.end);
                        let at = (first - field.columns.start) * keep * list;
                        weave_columns(columns.map(column), (width, keep, list), arenas, rows, row_bytes, at)?;
                    }
                }
                FieldKind::Ragged { width, keep } => {
                    column(field.columns.start).ragged(arenas, (width, keep), (&mut *out, number))?;
                }
            }
        }
        Ok(())
    }
}

/// Decodes up to 16 columns and writes them side by side.
fn weave_columns<'c>(
    columns: impl Iterator<Item = Column<'c>>,
    (width, keep, list): (usize, usize, usize),
    arenas: &mut Arenas,
    rows: &mut [u8],
    row_bytes: usize,
    at: usize,
) -> Result<()> {
    let mut segments = Vec::with_capacity(TOGETHER);
    for (place, column) in columns.enumerate() {
        segments.push(column.dense(list, arenas, place)?);
    }
    // A list is one wide value, unless its elements must be made narrower.
    let (width, keep) = if width == keep { (width * list, keep * list) } else { (width, keep) };
    let elements = if width == keep { 1 } else { list };
    let mut cursors: Vec<(usize, usize)> = vec![(0, 0); segments.len()];
    let (mut done, count) = (0, rows.len() / row_bytes);
    while done < count {
        // As far as every column's segment goes.
        let left = |(list, cursor): (&Vec<column::Segment>, &(usize, usize))| list[cursor.0].rows - cursor.1;
        let step = segments.iter().zip(&cursors).map(left).min().unwrap_or(0);
        let mut slices: [&[u8]; TOGETHER] = [&[]; TOGETHER];
        for (place, (list, (segment, row))) in segments.iter().zip(&mut cursors).enumerate() {
            let bytes = list[*segment].bytes(&arenas.arenas[place]);
            slices[place] = &bytes[*row * width * elements..(*row + step) * width * elements];
            *row += step;
            if *row == list[*segment].rows {
                (*segment, *row) = (*segment + 1, 0);
            }
        }
        let slices = &slices[..segments.len()];
        let out = &mut rows[done * row_bytes..(done + step) * row_bytes];
        if elements == 1 {
            interleave::interleave(slices, width, keep, out, row_bytes, at);
        } else {
            interleave::narrow(slices, width, keep, elements, out, row_bytes, at);
        }
        done += step;
    }
    Ok(())
}

/// Bytes of the byte arrays in the pages of a run, if the index says it.
fn payload(run: &Place, pages: &OffsetIndexMetaData) -> Option<u64> {
    let sizes = pages.page_locations().iter().zip(pages.unencoded_byte_array_data_bytes()?);
    let mut here = sizes.filter(|(page, _)| run.holds(page.offset)).map(|(_, bytes)| u64::try_from(*bytes).ok());
    here.try_fold(0_u64, |sum, bytes| sum.checked_add(bytes?))
}

/// Whether values may take more than the pages unpack to, though each dictionary entry is taken once.
fn outgrows_pages(meta: &ColumnChunkMetaData) -> bool {
    meta.column_type() == Type::BYTE_ARRAY && is_prefix_coded(meta)
}

fn is_prefix_coded(meta: &ColumnChunkMetaData) -> bool {
    meta.encodings().any(|encoding| encoding == Encoding::DELTA_BYTE_ARRAY)
}

/// What a column of byte arrays or lists takes when open.
fn ragged_bytes(meta: &ColumnChunkMetaData, place: &Place, keep: u64) -> u64 {
    if meta.column_type() != Type::BYTE_ARRAY {
        return place.values.saturating_mul(keep);
    }
    place.uncompressed.saturating_add(place.unpacked_dictionary).saturating_add(place.payload.unwrap_or(0))
}

/// Whether every page can be copied from as it is, by what the footer says.
fn is_plain(meta: &ColumnChunkMetaData) -> bool {
    let plain = |encoding| matches!(encoding, Encoding::PLAIN | Encoding::RLE);
    let descr = meta.column_descr();
    let defined = descr.max_def_level() == 0 || meta.statistics().and_then(Statistics::null_count_opt) == Some(0);
    descr.max_rep_level() == 0 && meta.column_type() != Type::BOOLEAN && defined && meta.encodings().all(plain)
}

/// Bytes of a value in the column reader's memory.
fn value_bytes(meta: &ColumnChunkMetaData) -> u64 {
    let bytes = match meta.column_type() {
        Type::BOOLEAN => 1,
        Type::INT32 | Type::FLOAT => 4,
        Type::INT64 | Type::DOUBLE => 8,
        _ => size_of::<parquet::data_type::ByteArray>(),
    };
    bytes as u64
}

/// Heap for a column that goes through the column reader: a page packed out twice, dictionary, values, levels.
fn reader_bytes(meta: &ColumnChunkMetaData, place: &Place, rows: u64) -> u64 {
    if is_plain(meta) {
        return if place.compression == Compression::UNCOMPRESSED { 0 } else { place.uncompressed };
    }
    let values = if meta.column_descr().max_rep_level() == 0 { rows } else { place.values };
    let width = value_bytes(meta);
    let dictionary = if place.unpacked_dictionary > 0 { place.unpacked_dictionary } else { place.uncompressed };
    // An entry of a dictionary is a value of some row, and has its length of four bytes before it.
    let entries = if place.has_dictionary { place.values.min(dictionary / 4) } else { 0 };
    // Values that are stored in parts are put together one by one, each in heap of its own.
    let whole = if meta.column_type() == Type::BYTE_ARRAY {
        place.payload.unwrap_or(0)
    } else {
        values.saturating_mul(meta.column_descr().type_length().max(0) as u64)
    };
    let whole = if is_prefix_coded(meta) { whole.saturating_add(values.saturating_mul(32)) } else { 0 };
    let pages = place.uncompressed.saturating_mul(2).saturating_add(place.unpacked_dictionary).saturating_add(whole);
    pages.saturating_add(values.saturating_mul(width + 4)).saturating_add(entries.saturating_mul(width))
}

/// The part of a column that holds `range` of the row group's `rows`, by its pages. `None` when the index makes no sense.
fn pages_of(whole: &Place, pages: &[PageLocation], range: &Range<u64>, rows: u64, file_len: u64) -> Option<Place> {
    let first_row = |page: usize| pages.get(page).map_or(Some(rows), |page| u64::try_from(page.first_row_index).ok());
    let starts: Vec<u64> = (0..=pages.len()).map(first_row).collect::<Option<_>>()?;
    if starts[0] != 0 || starts.windows(2).any(|pair| pair[0] > pair[1]) {
        return None;
    }
    let first = starts.partition_point(|start| *start <= range.start) - 1;
    let last = starts[..pages.len()].partition_point(|start| *start < range.end) - 1;
    let offset = |page: usize| u64::try_from(pages[page].offset).ok();
    let start = offset(first)?;
    let end = offset(last)?.checked_add(u64::try_from(pages[last].compressed_page_size).ok()?)?;
    let (whole_start, whole_end) = (whole.data.0, whole.data.0 + whole.data.1);
    if start < whole_start || end > whole_end || end > file_len || start >= end {
        return None;
    }
    let before = offset(0)?.checked_sub(whole_start)?;
    Some(Place {
        dictionary: (before > 0).then_some((whole_start, before)),
        data: (start, end - start),
        has_dictionary: before > 0,
        uncompressed: whole.uncompressed,
        unpacked_dictionary: whole.uncompressed,
        payload: None,
        values: whole.values,
        compression: whole.compression,
        first_row: starts[first],
        rows: starts[last + 1] - starts[first],
    })
}

impl Dataset for Parquet {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }

    fn len(&self) -> u64 {
        *self.starts.last().expect("starts with 0")
    }

    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }

    fn sample_bytes_max(&self) -> u64 {
        self.sample_bytes_max
    }

    fn extents<'a>(&'a self, sample: u64, _: &mut Parts<'a>) -> Result<()> {
        let message = "rows of a Parquet file come by the chunk";
        Err(Error::new(ErrorKind::Config, Stage::Read, message).with_sample(sample))
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        Some(self)
    }

    fn identity(&self) -> u64 {
        let digest = Digest::new("parquet").word(u64::from(self.nulls == Nulls::Zero));
        let field = |digest: Digest, field: &FieldPlan| {
            let columns = &self.leaves[field.columns.clone()];
            let digest = digest.word(columns.len() as u64);
            columns.iter().fold(digest, |digest, leaf| digest.bytes(leaf.path().string().as_bytes()))
        };
        let digest = self.fields.iter().fold(digest, field);
        let chunk = |digest: Digest, chunk: &Chunk| {
            digest.word(u64::from(chunk.file)).word(u64::from(chunk.group)).word(chunk.rows.start)
        };
        self.chunks.iter().fold(digest, chunk).end()
    }

    fn index_bytes(&self) -> usize {
        let places: usize = self.chunks.iter().map(|chunk| chunk.places.len() * size_of::<Place>()).sum();
        self.sources.table_bytes() + self.starts.capacity() * 8 + self.chunks.capacity() * size_of::<Chunk>() + places
    }

    fn describe(&self) -> String {
        let pruned = if self.pruned > 0 { format!(", {} row groups left out", self.pruned) } else { String::new() };
        format!(
            "{} rows in {} chunks of {} Parquet files{pruned} in {}",
            self.len(),
            self.chunks.len(),
            self.sources.count(),
            self.name
        )
    }
}

impl Chunked for Parquet {
    fn starts(&self) -> &[u64] {
        &self.starts
    }

    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        let chunk = &self.chunks[chunk];
        let source = SourceId::at(chunk.file as usize);
        for place in &chunk.places {
            let parts = place.dictionary.iter().chain([&place.data]);
            extents.extend(parts.map(|(offset, len)| Extent { source, offset: *offset, len: *len }));
        }
        Ok(())
    }

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        self.chunks[chunk].bytes
    }

    fn open_chunk(&self, chunk: usize, pieces: &[Bytes], scratch: &mut Scratch, out: &mut ChunkBuf) -> Result<()> {
        let named = &self.chunks[chunk];
        self.open_fields(named, pieces, scratch.get(), out).map_err(|error| {
            let path = self.sources.path(SourceId::at(named.file as usize));
            error.within(format_args!("row group {}", named.group)).with_path(path)
        })
    }

    fn chunk_name(&self, chunk: usize) -> String {
        let Chunk { file, group, rows, .. } = &self.chunks[chunk];
        let path = self.sources.path(SourceId::at(*file as usize));
        format!("{}, row group {group}, rows {} to {}", path.display(), rows.start, rows.end)
    }
}

impl std::fmt::Debug for Parquet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}
