//! Parquet shards: each chunk is a row group or a run of rows from one; columns become rows of a
//! batch without an object per row.
//!
//! ```text
//! footer ──open──► chunks { file, row group, rows, where each chosen column lies }      (parquet crate, once)
//! chunk ──readers──► column chunks ──pages──► dense values ──interleave──► rows of the chunk ──► rows of batches
//!                                          └► bytes (pictures) ─────► one after the other ──► decoder
//! ```
//!
//! One worker opens a whole row group; several workers open several at once. Rows have no random
//! access, so a shuffled order needs `Order::windowed`, unless all row
//! groups fit the memory budget.
//!
//! Columns may also stand in the names of folders (`label=3/part-0.parquet`), or in a table's log:
//! `constants` has the rules.
//!
//! Limits: numbers of up to 64 bits, fixed-length bytes, byte arrays and strings, lists of all of
//! them but fixed-length bytes (no lists of lists, maps, decimals); pages uncompressed or with Snappy, gzip, LZ4, LZ4_RAW or
//! zstd. A row group that takes more than [`chunk_bytes`](ParquetBuilder::chunk_bytes) when open is
//! cut into runs of rows, if the file has an offset index.
//!
//! Invariants: the footer's sizes are compared with the file's length before any read, and the
//! pages' sizes with the footer before any allocation; pages with a CRC are verified; a chunk gives
//! as many rows as the footer says, or an error. An offset index cuts a row group only if every
//! page agrees with it.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

mod column;
mod constants;
mod fields;
mod footer;
mod groups;
mod interleave;
mod offsets;
mod page;
mod scan;
mod unpack;

pub use column::Nulls;
pub use constants::{FileColumn, FileValues};

use self::column::{Column, Opened, Scratch as Arenas, TOGETHER, Values};
use self::constants::excludes;
use self::fields::{SchemaPlan, prune_columns, same_columns};
use self::footer::{Constant, Footer};
use self::groups::Cut;
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{FileKind, is_url};
use feedline_base::setting::Setting;
use feedline_core::dataset::contract::chunk_member;
use feedline_core::dataset::forward::own;
use feedline_core::dataset::parallel::{by_threads, parallel_paths};
use feedline_core::dataset::sample::Plain;
use feedline_core::dataset::{
    ChunkBuf, ChunkBytes, Chunked, Dataset, Digest, Framed, Parts, Sizes,
};
use feedline_core::decode::Scratch;
use feedline_core::storage::listing::{expand_keyed, look};
use feedline_core::storage::{Extent, Listed, SourceId, Sources};
use feedline_core::tensor::EncodedField;
use parquet::schema::types::ColumnDescPtr;
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

feedline_core::debug_by_describe!(Parquet);

/// Maximum stored bytes of a column that is read to find its longest row.
const LENGTHS_MAX: u64 = 1 << 30;

/// Default of [`ParquetBuilder::chunk_bytes`].
const CHUNK_BYTES: u64 = 128 << 20;

/// Dataset of Parquet files, read by row groups.
///
/// Supported: numbers of up to 64 bits (dates and times as integers), booleans, fixed-length bytes,
/// byte arrays and strings, lists of numbers, and with a stated maximum lists of pictures
/// ([`images`](ParquetBuilder::images)) and of byte arrays ([`list`](ParquetBuilder::list)); nested
/// columns by their dotted names (`image.bytes`); pages uncompressed or with Snappy, gzip, LZ4, LZ4_RAW or zstd. Refused, with the column's name:
/// lists of lists, maps, decimals, other compressions. A null is an error unless
/// [`ParquetBuilder::nulls`] says otherwise.
///
/// Rows have no random access: a row group is opened as a whole. So a shuffle needs
/// `Order::windowed`, unless all row groups fit the memory budget.
///
/// ```no_run
/// # use feedline_parquet::Parquet;
/// let features: Vec<String> = (0..64).map(|i| format!("f{i:02}")).collect();
/// let dataset = Parquet::builder()
///     .stack("features", &features) // one field of shape [64]
///     .column("label")
///     .open("train-{00..07}.parquet")?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Parquet {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    fields: Vec<FieldPlan>,
    /// The chosen columns in each file's schema.
    leaves: Vec<Leaves>,
    chunks: Vec<Chunk>,
    starts: Vec<u64>,
    nulls: Nulls,
    sample_bytes_max: u64,
    pruned: usize,
    /// Number of row groups that are too large but not cut because the pages contradict the offset
    /// index, and the first contradiction.
    unindexed: usize,
    index_doubt: String,
    left_out: Vec<String>,
    /// The version of a table.
    snapshot: Option<String>,
    name: String,
}

type Leaves = Arc<[ColumnDescPtr]>;

/// Plan of a field: its columns and layout.
struct FieldPlan {
    /// Indices in `leaves`.
    columns: Range<usize>,
    kind: FieldKind,
}

#[derive(Clone, Copy)]
enum FieldKind {
    /// `columns × list` values of `width` bytes, of which the low `keep` are taken.
    Array {
        width: usize,
        keep: usize,
        list: usize,
    },
    /// Any number of bytes; `width` and `keep` belong to list elements.
    Ragged { width: usize, keep: usize },
    /// Any number of byte arrays, framed as [`Many`](feedline_core::decode::Many).
    Many,
}

struct Chunk {
    file: u32,
    group: u32,
    /// Rows of the chunk, counted in the row group.
    rows: Range<u64>,
    places: Box<[Values]>,
    bytes: ChunkBytes,
}

impl Chunk {
    /// A copy of the chunk's description with these columns only.
    fn of(&self, columns: Range<usize>) -> Self {
        Self {
            rows: self.rows.clone(),
            places: self.places[columns].into(),
            ..*self
        }
    }

    /// The columns that are not stored, with their values.
    fn constants(&self) -> impl Iterator<Item = (usize, &Constant)> {
        let columns = self.places.iter().enumerate();
        columns.filter_map(|(column, values)| match values {
            Values::Stored(_) => None,
            Values::Constant(value) => Some((column, value)),
        })
    }
}

/// Builder of [`Parquet`]; every call except [`open`](Self::open) is optional.
#[derive(Clone, Debug)]
#[must_use]
pub struct ParquetBuilder {
    wanted: Vec<Wanted>,
    nulls: Nulls,
    chunk_bytes: u64,
    prune: Vec<(String, f64, f64)>,
    varying: Option<usize>,
    skip: bool,
    snapshot: Option<String>,
    field_ids: Vec<(String, i32)>,
    mapped_ids: Vec<(String, i32)>,
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
    Images(usize),
    List(usize),
}

impl How {
    fn is_picture(self) -> bool {
        matches!(self, Self::Image | Self::Images(_))
    }
}

impl Parquet {
    /// Opens the files of `pattern` with every column as a field.
    ///
    /// Errors: as [`ParquetBuilder::open`].
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(pattern)
    }

    /// Starts a builder.
    pub fn builder() -> ParquetBuilder {
        ParquetBuilder {
            wanted: Vec::new(),
            nulls: Nulls::default(),
            chunk_bytes: CHUNK_BYTES,
            prune: Vec::new(),
            varying: None,
            skip: false,
            snapshot: None,
            field_ids: Vec::new(),
            mapped_ids: Vec::new(),
        }
    }

    /// Number of row groups that [`ParquetBuilder::prune`] left out.
    pub fn groups_pruned(&self) -> usize {
        self.pruned
    }
}

impl ParquetBuilder {
    fn wants(mut self, name: &str, columns: Vec<String>, how: How) -> Self {
        self.wanted.push(Wanted {
            name: name.into(),
            columns,
            how,
        });
        self
    }

    /// Takes a column as a field of the same name. Nested columns have dotted names
    /// (`image.bytes`); a list has the column's name. Numbers become scalars, lists of fixed size
    /// become vectors, byte arrays and strings become encoded bytes.
    ///
    /// If no column is named, all columns are taken.
    pub fn column(self, name: &str) -> Self {
        self.wants(name, vec![name.into()], How::Stored)
    }

    /// Takes several columns, each as [`column`](Self::column) does.
    pub fn columns<'n>(self, names: impl IntoIterator<Item = &'n str>) -> Self {
        names
            .into_iter()
            .fold(self, |builder, name| builder.column(name))
    }

    /// Stacks columns of one dtype into the field `name` of shape `[columns]` (`[columns × n]` for
    /// lists of n).
    pub fn stack(self, name: &str, columns: &[impl AsRef<str>]) -> Self {
        self.wants(
            name,
            columns
                .iter()
                .map(|column| column.as_ref().to_string())
                .collect(),
            How::Stored,
        )
    }

    /// Takes a column of encoded pictures as a field of the same name. If the column is a
    /// structure, as in Hugging Face's datasets, its `bytes` are taken.
    pub fn image(self, name: &str) -> Self {
        self.wants(name, vec![name.into()], How::Image)
    }

    /// Takes a column of lists of numbers, or of bytes, with at most `max` elements. Zeros pad
    /// shorter rows.
    pub fn up_to(self, name: &str, max: usize) -> Self {
        self.wants(name, vec![name.into()], How::UpTo(max))
    }

    /// Takes a column of lists of encoded pictures, such as the frames of a clip, with at most `max`
    /// pictures per row; decode it with [`Each`](feedline_core::decode::Each). If the elements are
    /// structures, as in Hugging Face's datasets, their `bytes` are taken. A longer list is an error
    /// of its sample; a null within a list fails the samples of the chunk, as all nulls do.
    pub fn images(self, name: &str, max: usize) -> Self {
        self.wants(name, vec![name.into()], How::Images(max))
    }

    /// Takes a column of lists of byte arrays or strings, with at most `max` elements per row, as
    /// [`images`](Self::images) does. `Each::new(Bytes::up_to(64))` makes rows of them.
    pub fn list(self, name: &str, max: usize) -> Self {
        self.wants(name, vec![name.into()], How::List(max))
    }

    /// Takes every list of numbers of any length, and every byte array that is not a picture, with at most
    /// `max` elements, unless it has an [`up_to`](Self::up_to) of its own. Other columns stay as
    /// they are.
    pub fn varying_up_to(mut self, max: usize) -> Self {
        self.varying = Some(max);
        self
    }

    /// If all columns are taken, leaves out those that cannot be read; the description names them.
    /// Default: `false`; such a column is then an error.
    pub fn skip_unsupported(mut self, skip: bool) -> Self {
        self.skip = skip;
        self
    }

    /// Sets the policy for nulls. Default: [`Nulls::Error`].
    pub fn nulls(mut self, nulls: Nulls) -> Self {
        self.nulls = nulls;
        self
    }

    /// Maximum bytes of an open chunk: a larger row group is cut into runs of rows, if the file has
    /// an offset index. Default: 128 MiB. Smaller chunks need less memory and shuffle better; pages
    /// are always read whole. Opening reads the header of each page of such a row group, and reads
    /// the group whole if a page contradicts the index.
    pub fn chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = bytes.max(1);
        self
    }

    /// Leaves out row groups whose statistics exclude all values of number column `column` within
    /// `min ..= max`. All rows of the other row groups are delivered, whatever their values.
    pub fn prune(mut self, column: &str, min: f64, max: f64) -> Self {
        self.prune.push((column.into(), min, max));
        self
    }

    /// Names the version of the table whose files are opened, for the description. A run does not
    /// resume with another version, even of the same files.
    pub fn snapshot(mut self, name: impl Into<String>) -> Self {
        self.snapshot = Some(name.into());
        self
    }

    /// The ids that a table gives its columns, as Iceberg does: a file whose column of this name has
    /// another id, or none, is refused, and so is one that has the id under another name.
    pub fn field_ids(mut self, ids: impl IntoIterator<Item = (String, i32)>) -> Self {
        self.field_ids = ids.into_iter().collect();
        self
    }

    /// The ids of columns by their names in files that store no ids, as in Iceberg's name mapping:
    /// files of other programs that were added to the table. Used by [`field_ids`](Self::field_ids).
    pub fn mapped_ids(mut self, names: impl IntoIterator<Item = (String, i32)>) -> Self {
        self.mapped_ids = names.into_iter().collect();
        self
    }

    /// Opens the files of `pattern`: one file, a folder (`*.parquet` in it), or a pattern with `*`,
    /// `{a,b}`, `{000..127}`. Reads their footers in parallel.
    ///
    /// Names of folders such as `label=3` are columns behind the stored ones, with the types that
    /// pyarrow gives them: `i32` if all values are such integers, else text.
    /// `__HIVE_DEFAULT_PARTITION__` and a missing key are nulls. Of a folder, the folders in it
    /// count, and those of this kind are opened, too; of a file or a pattern, all of the path. If a
    /// file stores the column with the same type, the value of the path counts.
    ///
    /// Errors: not Parquet; damage; a column that is missing or has an unsupported type; files
    /// whose chosen columns differ. Each error names the file.
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<Parquet> {
        let listed = expand_keyed(pattern, &[".parquet", ".parq", ".pq"])?;
        let Listed {
            files,
            name,
            folder,
            ..
        } = listed;
        if let Some(folder) = &folder {
            refuse_table(folder)?;
        }
        let columns = constants::in_paths(&files, folder.as_deref())?;
        let name = match &*columns {
            [] => name,
            columns => {
                let names: Vec<_> = columns.iter().map(FileColumn::name).collect();
                format!("{name}; columns of the paths: {}", names.join(", "))
            }
        };
        self.open_all(&files, &columns, false, name)
    }

    /// Opens the files of a table, in this order, with columns that the files do not store, such as
    /// the partition values of a table's log. Names of folders are no columns.
    ///
    /// A column that only some files store is null in the others, as in a table to which it was
    /// added.
    ///
    /// Errors: as [`open`](Self::open); a column that has not one value for each file.
    pub fn open_files(
        self,
        files: &[impl AsRef<Path>],
        columns: impl IntoIterator<Item = FileColumn>,
    ) -> Result<Parquet> {
        let files: Vec<PathBuf> = files.iter().map(|file| file.as_ref().into()).collect();
        let columns: Vec<FileColumn> = columns.into_iter().collect();
        let Some(first) = files.first() else {
            let message = match &self.snapshot {
                Some(snapshot) => format!("the table has no files: {snapshot}"),
                None => "there are no files".into(),
            };
            return Err(Error::new(ErrorKind::Empty, Stage::Index, message));
        };
        let mut names = HashSet::new();
        if let Some(again) = columns.iter().find(|column| !names.insert(column.name())) {
            let message = format!("column `{}` is given twice", again.name());
            return Err(footer::config(message));
        }
        if let Some(odd) = columns.iter().find(|column| column.len() != files.len()) {
            return Err(footer::config(format!(
                "column `{}` has {} values for {} files: give one for each",
                odd.name(),
                odd.len(),
                files.len()
            )));
        }
        let name = match files.len() - 1 {
            0 => first.display().to_string(),
            others => format!("{} and {others} more", first.display()),
        };
        self.open_all(&files, &columns, true, name)
    }

    /// `is_table`: a column that only some files store is null in the others.
    fn open_all(
        self,
        files: &[PathBuf],
        columns: &[FileColumn],
        is_table: bool,
        name: String,
    ) -> Result<Parquet> {
        let mut footers = parallel_paths(files, |_, path| Footer::of_file(path.clone(), &self))?;
        let mut sources = Sources::new();
        for footer in &footers {
            sources.add(&footer.path, &footer.version)?;
        }
        for footer in &footers {
            footer.check_ids(&self.field_ids, &self.mapped_ids)?;
        }
        let ignored = constants::give_values(&mut footers, columns, is_table)?;
        let names = self.names(&footers);
        let lacking = if is_table {
            constants::give_nulls(&mut footers, &names)
        } else {
            Vec::new()
        };
        let all = self.wanted.is_empty();
        let paths = if is_table { &[] } else { columns };
        let mut dataset = self.finish(sources, &footers, paths, name)?;
        dataset.left_out.extend(ignored);
        if all {
            let new = names.iter().filter(|name| !footers[0].has(name));
            let new =
                new.map(|name| format!("column `{name}`, which the first file does not have"));
            dataset.left_out.extend(new);
        }
        for (name, count) in lacking {
            let note = format!("; `{name}` is null in {count} files, which do not store it");
            dataset.name.push_str(&note);
        }
        Ok(dataset)
    }

    /// The chosen columns and those to prune by, or all of all files.
    fn names(&self, footers: &[Footer]) -> Vec<String> {
        if !self.wanted.is_empty() {
            let columns = self.wanted.iter().flat_map(|wanted| &wanted.columns);
            let prune = self.prune.iter().map(|(column, _, _)| column);
            return columns.chain(prune).cloned().collect();
        }
        let mut seen = HashSet::new();
        let leaves = footers.iter().flat_map(|footer| &footer.leaves);
        let new = leaves.filter(|leaf| seen.insert(&leaf.name));
        new.map(|leaf| leaf.name.clone()).collect()
    }

    /// Opens one file in memory.
    ///
    /// Errors: as [`open`](Self::open).
    pub fn open_bytes(self, bytes: impl Into<Arc<[u8]>>) -> Result<Parquet> {
        let bytes: Arc<[u8]> = bytes.into();
        let footer = Footer::of_bytes(&bytes, &self)?;
        let mut sources = Sources::new();
        sources.memory(bytes);
        self.finish(sources, &[footer], &[], "<memory>".into())
    }

    /// `in_paths`: columns of the paths, which must not contradict stored ones.
    fn finish(
        self,
        sources: Sources,
        footers: &[Footer],
        in_paths: &[FileColumn],
        name: String,
    ) -> Result<Parquet> {
        let first = &footers[0];
        let layout = SchemaPlan::new(&self.wanted, self.varying, self.skip, first)
            .map_err(|error| error.with_path(&first.path))?;
        if layout.schema.is_empty() {
            let message = format!("no column can be read: {}", layout.left_out.join("; "));
            return Err(footer::config(message).with_path(&first.path));
        }
        let mut dataset = Parquet {
            sources: Arc::new(sources),
            schema: layout.schema,
            fields: layout.fields,
            leaves: Vec::with_capacity(footers.len()),
            chunks: Vec::new(),
            starts: vec![0],
            nulls: self.nulls,
            sample_bytes_max: 0,
            pruned: 0,
            unindexed: 0,
            index_doubt: String::new(),
            left_out: layout.left_out,
            snapshot: self.snapshot,
            name,
        };
        let chosen = footers.iter().map(|footer| {
            same_columns(&layout.leaves, footer).map_err(|error| error.with_path(&footer.path))
        });
        let chosen: Vec<Vec<usize>> = chosen.collect::<Result<_>>()?;
        constants::check_nulls(footers, &chosen, self.nulls)?;
        for (file, (footer, columns)) in footers.iter().zip(&chosen).enumerate() {
            constants::check_stored(footer, file, in_paths, columns)
                .map_err(|error| error.with_path(&footer.path))?;
            dataset.add_leaves(
                columns
                    .iter()
                    .map(|column| footer.leaves[*column].descr.clone())
                    .collect(),
            );
            let prune = prune_columns(&self.prune, footer)
                .map_err(|error| error.with_path(&footer.path))?;
            for (number, group) in footer.meta.row_groups().iter().enumerate() {
                if prune
                    .iter()
                    .any(|(column, min, max)| excludes(footer, group, *column, *min, *max))
                {
                    dataset.pruned += 1;
                    continue;
                }
                let cut = Cut {
                    footer,
                    group,
                    number,
                    columns,
                    limit: self.chunk_bytes,
                };
                dataset
                    .add_group(file as u32, &cut)
                    .map_err(|error| error.with_path(&footer.path))?;
            }
        }
        if dataset.len() == 0 {
            return Err(
                Error::new(ErrorKind::Empty, Stage::Index, "there are no rows")
                    .with_path(&first.path),
            );
        }
        Ok(dataset)
    }
}

impl Parquet {
    /// Adds the columns of the next file. Columns equal to those of the file before, the usual
    /// case, are stored once.
    fn add_leaves(&mut self, leaves: Leaves) {
        let same = self.leaves.last().filter(|last| **last == leaves).cloned();
        self.leaves.push(same.unwrap_or(leaves));
    }

    /// Bytes of the longest value of a column that no file stores.
    fn longest_constant(&self, column: usize) -> Option<usize> {
        let values = self.chunks.iter().map(|chunk| &chunk.places[column]);
        let lengths = values.map(|values| match values {
            Values::Stored(_) => None,
            Values::Constant(value) => Some(value.as_ref().map_or(0, |value| value.len())),
        });
        lengths.collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    fn open_fields(
        &self,
        chunk: &Chunk,
        pieces: &[Bytes],
        arenas: &mut Arenas,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let none = Bytes::new();
        let mut pieces = pieces.iter();
        let mut parts = Vec::with_capacity(chunk.places.len());
        for values in &chunk.places {
            let mut piece = || pieces.next().unwrap_or(&none);
            let Some(place) = values.place() else {
                parts.push((&none, &none));
                continue;
            };
            let dictionary = if place.dictionary.is_some() {
                piece()
            } else {
                &none
            };
            parts.push((dictionary, piece()));
        }
        let column = |leaf: usize| match &chunk.places[leaf] {
            Values::Constant(value) => Opened::Constant {
                value,
                rows: (chunk.rows.end - chunk.rows.start) as usize,
            },
            Values::Stored(place) => Opened::Stored(Column {
                descr: &self.leaves[chunk.file as usize][leaf],
                place,
                dictionary: parts[leaf].0,
                data: parts[leaf].1,
                rows: chunk.rows.clone(),
                nulls: self.nulls,
            }),
        };
        for (number, field) in self.fields.iter().enumerate() {
            match field.kind {
                FieldKind::Array { width, keep, list } => {
                    let row_bytes = field.columns.len() * keep * list;
                    let rows = out.fixed(number, row_bytes)?;
                    for first in field.columns.clone().step_by(TOGETHER) {
                        let columns = first..(first + TOGETHER).min(field.columns.end);
                        let at = (first - field.columns.start) * keep * list;
                        let out = Interleaved {
                            rows,
                            row_bytes,
                            at,
                        };
                        interleave_columns(columns.map(column), width, keep, list, arenas, out)?;
                    }
                }
                FieldKind::Ragged { width, keep } => {
                    column(field.columns.start).ragged(arenas, width, keep, &mut *out, number)?;
                }
                FieldKind::Many => {
                    column(field.columns.start).many(arenas, &mut *out, number)?;
                }
            }
        }
        Ok(())
    }
}

/// Errors: the folder is a Delta table.
fn refuse_table(folder: &Path) -> Result<()> {
    let log = folder.join("_delta_log");
    // A look into a store would cost a round trip at each opening.
    let is_table = !is_url(folder) && look(&log).is_ok_and(|found| found.kind == FileKind::Folder);
    if !is_table {
        return Ok(());
    }
    let how = Setting::DeltaTable.hint(|how| format!(": {how}"));
    let message = format!(
        "this folder is a Delta table, and files in it may have rows that were deleted or \
         replaced{how}"
    );
    Err(footer::config(message).with_path(folder))
}

/// Output rows, in which columns are written side by side from byte `at` of each row on.
struct Interleaved<'o> {
    rows: &'o mut [u8],
    row_bytes: usize,
    at: usize,
}

/// Decodes up to 16 columns and writes them side by side.
fn interleave_columns<'c>(
    columns: impl Iterator<Item = Opened<'c>>,
    width: usize,
    keep: usize,
    list: usize,
    arenas: &mut Arenas,
    out: Interleaved<'_>,
) -> Result<()> {
    let Interleaved {
        rows,
        row_bytes,
        at,
    } = out;
    let mut segments = Vec::with_capacity(TOGETHER);
    for (place, column) in columns.enumerate() {
        segments.push(column.dense(width, list, arenas, place)?);
    }
    // A list is one wide value, unless its elements must be narrowed.
    let (width, keep) = if width == keep {
        (width * list, keep * list)
    } else {
        (width, keep)
    };
    let elements = if width == keep { 1 } else { list };
    let mut cursors: Vec<(usize, usize)> = vec![(0, 0); segments.len()];
    let mut done = 0;
    let count = rows.len() / row_bytes;
    while done < count {
        // Rows until the first column's segment ends.
        let step = segments
            .iter()
            .zip(&cursors)
            .map(|(list, cursor)| list[cursor.0].rows - cursor.1)
            .min()
            .unwrap_or(0);
        let mut slices: [&[u8]; TOGETHER] = [&[]; TOGETHER];
        for (place, (list, (segment, row))) in segments.iter().zip(&mut cursors).enumerate() {
            let bytes = list[*segment].bytes(&arenas.arenas[place]);
            slices[place] = &bytes[*row * width * elements..(*row + step) * width * elements];
            *row += step;
            if *row == list[*segment].rows {
                *segment += 1;
                *row = 0;
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

impl Dataset for Parquet {
    own!(schema sources framed);

    fn len(&self) -> u64 {
        *self.starts.last().expect("starts with 0")
    }

    fn sizes(&self) -> Sizes {
        let places: usize = self
            .chunks
            .iter()
            .map(|chunk| chunk.places.len() * size_of::<Values>())
            .sum();
        let leaves = self.leaves.capacity() * size_of::<Leaves>();
        let index_bytes = leaves
            + self.starts.capacity() * 8
            + self.chunks.capacity() * size_of::<Chunk>()
            + places;
        Sizes {
            index_bytes,
            ..Sizes::new(self.sample_bytes_max)
        }
    }

    fn extents<'a>(&'a self, sample: u64, _: &mut Parts<'a>) -> Result<()> {
        let message = "rows of a Parquet file have no random access; read its chunks";
        Err(Error::new(ErrorKind::Config, Stage::Read, message).with_sample(sample))
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        Some(self)
    }

    fn identity(&self) -> u64 {
        let digest = Digest::new("parquet").word(u64::from(self.nulls == Nulls::Zero));
        let digest = self.fields.iter().fold(digest, |digest, field| {
            let columns = &self.leaves[0][field.columns.clone()];
            let digest = digest.word(columns.len() as u64);
            columns.iter().fold(digest, |digest, leaf| {
                digest.bytes(leaf.path().string().as_bytes())
            })
        });
        let digest = self.chunks.iter().fold(digest, |digest, chunk| {
            let digest = digest
                .word(u64::from(chunk.file))
                .word(u64::from(chunk.group))
                .word(chunk.rows.start);
            chunk.constants().fold(digest, |digest, (column, value)| {
                let digest = digest.word(column as u64).word(u64::from(value.is_some()));
                digest.bytes(value.as_deref().unwrap_or_default())
            })
        });
        let snapshot = self.snapshot.as_deref();
        snapshot
            .map_or(digest, |name| digest.bytes(name.as_bytes()))
            .end()
    }

    fn describe(&self) -> String {
        let pruned = if self.pruned > 0 {
            format!(", {} row groups left out", self.pruned)
        } else {
            String::new()
        };
        let doubt = match self.unindexed {
            0 => String::new(),
            many => format!(
                ", {many} row groups read whole, as their offset index is wrong ({})",
                self.index_doubt
            ),
        };
        let left_out = match &*self.left_out {
            [] => String::new(),
            columns => format!("; left out: {}", columns.join("; ")),
        };
        let snapshot = self.snapshot.as_deref();
        let snapshot = snapshot.map_or(String::new(), |name| format!("; {name}"));
        format!(
            "{} rows in {} chunks of {} Parquet files{pruned}{doubt} in {}{snapshot}{left_out}",
            self.len(),
            self.chunks.len(),
            self.sources.count(),
            self.name
        )
    }
}

impl Framed for Parquet {
    /// Reads the field's column: neither the footer nor the index contains the lengths of rows.
    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        let FieldPlan { columns, kind } = &self.fields[field];
        let bytes = self
            .chunks
            .iter()
            .map(|chunk| {
                chunk.places[columns.clone()]
                    .iter()
                    .filter_map(Values::place)
                    .map(|place| place.data.1)
                    .sum::<u64>()
            })
            .fold(0, u64::saturating_add);
        if bytes > LENGTHS_MAX {
            let name = &self.schema[field].name;
            let message = format!(
                "column `{name}` has {bytes} bytes, too many to search for the longest row: give its \
                 length"
            );
            return Err(footer::config(
                message + &Setting::UpTo.hint(|up_to| format!(" by {up_to}")),
            ));
        }
        if let FieldKind::Ragged { .. } = kind
            && let Some(most) = self.longest_constant(columns.start)
        {
            return Ok(Some(most as u64));
        }
        let alone = Self {
            sources: self.sources.clone(),
            schema: vec![self.schema[field].clone()],
            fields: vec![FieldPlan {
                columns: 0..columns.len(),
                kind: *kind,
            }],
            leaves: self
                .leaves
                .iter()
                .map(|leaves| leaves[columns.clone()].into())
                .collect(),
            chunks: self
                .chunks
                .iter()
                .map(|chunk| chunk.of(columns.clone()))
                .collect(),
            starts: self.starts.clone(),
            index_doubt: String::new(),
            left_out: Vec::new(),
            snapshot: None,
            name: String::new(),
            ..*self
        };
        // Each thread holds the opened rows of one chunk in memory, so use few threads.
        let found = by_threads(4, 0..alone.chunks.len(), |chunk, _| {
            let rows = Plain::new(&alone).chunk(chunk)?;
            Ok((0..rows.rows())
                .filter_map(|row| rows.row(0, row))
                .map(<[u8]>::len)
                .max()
                .unwrap_or(0))
        })?;
        Ok(Some(found.into_iter().max().unwrap_or(0) as u64))
    }

    fn member(&self, sample: u64, _: Option<usize>) -> Option<String> {
        chunk_member(self, sample)
    }
}

impl Chunked for Parquet {
    fn starts(&self) -> &[u64] {
        &self.starts
    }

    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        let chunk = &self.chunks[chunk];
        let source = SourceId::at(chunk.file as usize);
        for place in chunk.places.iter().filter_map(Values::place) {
            let parts = place.dictionary.iter().chain([&place.data]);
            extents.extend(parts.map(|(offset, len)| Extent {
                source,
                offset: *offset,
                len: *len,
            }));
        }
        Ok(())
    }

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        self.chunks[chunk].bytes
    }

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let named = &self.chunks[chunk];
        self.open_fields(named, pieces, scratch.get(), out)
            .map_err(|error| {
                let path = self.sources.path(SourceId::at(named.file as usize));
                error
                    .within(format_args!("row group {}", named.group))
                    .with_path(path)
            })
    }

    fn chunk_name(&self, chunk: usize) -> String {
        let Chunk {
            file, group, rows, ..
        } = &self.chunks[chunk];
        let path = self.sources.path(SourceId::at(*file as usize));
        format!(
            "{}, row group {group}, rows {} to {}",
            path.display(),
            rows.start,
            rows.end
        )
    }
}
