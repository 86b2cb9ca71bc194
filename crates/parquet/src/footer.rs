//! Footers, read through a blob and checked before use, and their columns.

use super::{ParquetBuilder, page};
use arrow_schema::{DataType, Fields};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage, guarded};
use feedline_base::metadata::Meta;
use feedline_base::setting::Setting;
use feedline_core::storage::Blob;
use parquet::DecodeResult;
use parquet::arrow::{ProjectionMask, parquet_to_arrow_schema_by_columns};
use parquet::basic::Type;
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    PageIndexPolicy, ParquetMetaData, ParquetMetaDataPushDecoder, ParquetMetaDataReader,
    RowGroupMetaData,
};
use parquet::schema::types::ColumnDescPtr;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Maximum bytes of a footer (a larger one is refused) and of the offset indexes (larger ones are
/// ignored).
const FOOTER_MAX: u64 = 256 << 20;

/// A value in the encoding of the stored ones, or a null.
pub(super) type Constant = Option<Arc<[u8]>>;

/// A file's footer.
pub(super) struct Footer {
    pub(super) path: PathBuf,
    pub(super) len: u64,
    pub(super) version: Meta,
    pub(super) meta: ParquetMetaData,
    /// All leaf columns, in the order of the file; then those that it does not store.
    pub(super) leaves: Vec<Leaf>,
    /// Reason why the offset index cannot be used.
    pub(super) no_index: Option<String>,
    /// The whole file, if it is in memory.
    pub(super) bytes: Option<Arc<[u8]>>,
}

/// A leaf column of the file.
#[derive(Clone)]
pub(super) struct Leaf {
    pub(super) descr: ColumnDescPtr,
    /// Arrow type of the values.
    pub(super) arrow: DataType,
    pub(super) list: List,
    /// Name of its field: the top-level column's name, if that column has no other leaf.
    pub(super) name: String,
    /// The value of all rows, which counts in place of stored ones; `None` if the stored ones count.
    pub(super) value: Option<Constant>,
}

impl Leaf {
    /// Whether a user means this column by the name.
    pub(super) fn is_called(&self, name: &str) -> bool {
        // Outside of lists the name is the path.
        self.name == name || (self.list != List::No && self.descr.path().string() == name)
    }

    /// Whether this is the column of the name, or one within it.
    fn belongs_to(&self, name: &str) -> bool {
        self.is_called(name) || self.descr.path().parts()[0] == name
    }

    pub(super) fn described(&self) -> String {
        match self.list {
            List::No => self.arrow.to_string(),
            List::Fixed(len) => format!("lists of {len} {}", self.arrow),
            List::Any => format!("lists of any number of {}", self.arrow),
        }
    }

    /// Text for errors: every property in which the values of two files may differ.
    pub(super) fn words(&self) -> String {
        let stored = self.descr.physical_type();
        let len = self.descr.type_length();
        let len = if stored == Type::FIXED_LEN_BYTE_ARRAY {
            format!(" of {len} bytes")
        } else {
            String::new()
        };
        format!("{} (stored as {stored}{len})", self.described())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum List {
    No,
    Fixed(usize),
    Any,
}

fn unread(error: parquet::errors::ParquetError) -> Error {
    let kind = if matches!(error, parquet::errors::ParquetError::EOF(_)) {
        ErrorKind::Truncated
    } else {
        ErrorKind::Decode
    };
    Error::new(kind, Stage::Index, "the footer cannot be read").with_source(error)
}

pub(super) fn config(message: String) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}

impl Footer {
    pub(super) fn of_file(path: PathBuf, builder: &ParquetBuilder) -> Result<Self> {
        Self::of_blob(&Blob::open(&path)?, None, builder).map_err(|error| error.with_path(&path))
    }

    pub(super) fn of_bytes(bytes: &Arc<[u8]>, builder: &ParquetBuilder) -> Result<Self> {
        Self::of_blob(
            &Blob::memory(Bytes::from_owner(bytes.clone())),
            Some(bytes.clone()),
            builder,
        )
    }

    fn of_blob(blob: &Blob, bytes: Option<Arc<[u8]>>, builder: &ParquetBuilder) -> Result<Self> {
        guarded("the footer", Stage::Index, || {
            let (meta, odd, clean) = read_meta(blob)?;
            let mut footer = Self::new(blob, meta, &odd, bytes)?;
            // To find the offset index, the parquet crate would parse the footer itself, including
            // the removed fields.
            if clean {
                footer.add_offset_index(blob, builder)?;
            }
            Ok(footer)
        })
    }

    /// `odd`: columns whose annotations were removed.
    fn new(
        blob: &Blob,
        meta: ParquetMetaData,
        odd: &[usize],
        bytes: Option<Arc<[u8]>>,
    ) -> Result<Self> {
        let descr = meta.file_metadata().schema_descr_ptr();
        let mut types = types_of(&meta);
        for leaf in odd {
            types
                .get_mut(*leaf)
                .ok_or_else(|| config("the schema has fewer columns".into()))?
                .0 = UNREAD;
        }
        let alone = |root: &str| {
            descr
                .columns()
                .iter()
                .filter(|column| column.path().parts()[0] == root)
                .count()
                == 1
        };
        let leaves = descr
            .columns()
            .iter()
            .zip(types)
            .map(|(descr, (arrow, list))| {
                let root = &descr.path().parts()[0];
                let name = if list != List::No && alone(root) {
                    root.clone()
                } else {
                    descr.path().string()
                };
                Leaf {
                    descr: descr.clone(),
                    arrow,
                    list,
                    name,
                    value: None,
                }
            });
        let leaves = leaves.collect();
        let path = blob.path().to_path_buf();
        Ok(Self {
            path,
            len: blob.len(),
            version: blob.look()?,
            meta,
            leaves,
            no_index: None,
            bytes,
        })
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> i64 {
        let groups = self.meta.row_groups().iter();
        groups.map(RowGroupMetaData::num_rows).sum()
    }

    /// Whether there is a column of this name, perhaps a structure.
    pub(super) fn has(&self, name: &str) -> bool {
        self.leaves.iter().any(|leaf| leaf.belongs_to(name))
    }

    /// Number of leaves that the file stores; they come first.
    pub(super) fn stored(&self) -> usize {
        self.meta.file_metadata().schema_descr().num_columns()
    }

    /// The field ids of a stored leaf and of the columns around it. A column without one has that of
    /// its name in the table's mapping.
    fn ids_of(&self, leaf: &Leaf, mapped: &[(String, i32)]) -> Vec<i32> {
        let mut ids = Vec::new();
        let mut name = String::new();
        let mut of = self.meta.file_metadata().schema_descr().root_schema();
        for part in leaf.descr.path().parts() {
            let Some(inner) = of.get_fields().iter().find(|inner| inner.name() == part) else {
                break;
            };
            of = inner;
            name += if name.is_empty() { "" } else { "." };
            name += part;
            let info = of.get_basic_info();
            if info.has_id() {
                ids.push(info.id());
            } else {
                let known = mapped.iter().find(|(known, _)| *known == name);
                ids.extend(known.map(|(_, id)| *id));
            }
        }
        ids
    }

    /// Errors: a column has another id in the file than in the table, or the id another name.
    pub(super) fn check_ids(&self, ids: &[(String, i32)], mapped: &[(String, i32)]) -> Result<()> {
        let stored = &self.leaves[..self.stored()];
        for (name, id) in ids {
            let own = stored.iter().find(|leaf| leaf.belongs_to(name));
            let what = match own.map(|leaf| self.ids_of(leaf, mapped)) {
                Some(found) if found.contains(id) => continue,
                Some(found) => match found.last() {
                    Some(other) => format!("has the id {other} in this file"),
                    None => "has no id in this file".into(),
                },
                None => match stored
                    .iter()
                    .find(|leaf| self.ids_of(leaf, mapped).contains(id))
                {
                    Some(other) => format!("is `{}` in this file", other.name),
                    None => continue,
                },
            };
            let columns = Setting::Columns;
            let message = format!(
                "column `{name}` has the id {id} in the table and {what}: columns that were renamed \
                 or replaced are not read; choose other columns with {columns}, or rewrite the table"
            );
            let error = Error::new(ErrorKind::Unsupported, Stage::Index, message);
            return Err(error.with_path(&self.path));
        }
        Ok(())
    }

    /// Adds the page locations, if a row group may have to be cut. A malformed index is not used.
    fn add_offset_index(&mut self, blob: &Blob, builder: &ParquetBuilder) -> Result<()> {
        let any_large = self.meta.row_groups().iter().any(|group| {
            u64::try_from(group.total_byte_size())
                .is_ok_and(|bytes| bytes > builder.chunk_bytes / 2)
        });
        if !any_large || offset_index_bytes(&self.meta) > FOOTER_MAX {
            return Ok(());
        }
        let meta = self.meta.clone();
        match guarded("the offset index", Stage::Index, || {
            with_offset_index(blob, meta)
        }) {
            Ok(meta) => self.meta = meta,
            Err(error) if is_malformed(&error) => {
                self.no_index = Some("the offset index cannot be read".into())
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The file, for reads of anything but the footer.
    pub(super) fn content(&self) -> Result<Blob> {
        match &self.bytes {
            Some(bytes) => Ok(Blob::memory(Bytes::from_owner(bytes.clone()))),
            None => {
                let blob = Blob::open(&self.path)?;
                // If the file has changed, the footer does not describe it.
                if blob.look()?.same_bytes(&self.version) {
                    return Ok(blob);
                }
                let message =
                    "the file was written or replaced while it was indexed; open the dataset again";
                Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(&self.path))
            }
        }
    }

    /// As [`content`](Self::content), but `None` on an error. Used for sizes that are checked again
    /// when the chunk is opened.
    pub(super) fn blob(&self) -> Option<Blob> {
        self.content().ok()
    }
}

/// Type of a column whose annotation cannot be read. The column is refused if it is requested;
/// other columns are not affected.
const UNREAD: DataType = DataType::Null;

/// The types of all leaves.
fn types_of(meta: &ParquetMetaData) -> Vec<(DataType, List)> {
    let descr = meta.file_metadata().schema_descr();
    let hints = meta.file_metadata().key_value_metadata();
    let of = |mask: ProjectionMask, leaves: usize| {
        // The schema that Arrow's writers add is a hint.
        [hints, None].into_iter().find_map(|hints| {
            let schema = parquet_to_arrow_schema_by_columns(descr, mask.clone(), hints).ok()?;
            let mut types = Vec::new();
            schema
                .fields()
                .iter()
                .for_each(|field| leaf_types(field.data_type(), List::No, &mut types));
            (types.len() == leaves).then_some(types)
        })
    };
    let all = of(ProjectionMask::all(), descr.num_columns());
    all.unwrap_or_else(|| {
        let roots = 0..descr.root_schema().get_fields().len();
        roots
            .flat_map(|root| {
                let leaves = (0..descr.num_columns())
                    .filter(|leaf| descr.get_column_root_idx(*leaf) == root)
                    .count();
                of(ProjectionMask::roots(descr, [root]), leaves)
                    .unwrap_or_else(|| vec![(UNREAD, List::No); leaves])
            })
            .collect()
    })
}

/// Reads the footer after checking its length against the file. Also returns the columns whose
/// annotations had to be removed, and whether nothing was removed.
fn read_meta(blob: &Blob) -> Result<(ParquetMetaData, Vec<usize>, bool)> {
    let len = blob.len();
    let wrong = |kind, message: String| Err(Error::new(kind, Stage::Index, message));
    if len < 12 {
        return wrong(
            ErrorKind::Truncated,
            format!("{len} bytes are too few for a Parquet file"),
        );
    }
    let [a, b, c, d, magic @ ..] = blob.array::<8>(len - 8, "the footer")?;
    match &magic {
        b"PAR1" => {}
        b"PARE" => {
            return wrong(
                ErrorKind::Decode,
                "the file is encrypted, which is not supported".into(),
            );
        }
        _ => {
            return wrong(
                ErrorKind::Decode,
                "not a Parquet file, or truncated: it does not end in PAR1".into(),
            );
        }
    }
    let footer = u64::from(u32::from_le_bytes([a, b, c, d]));
    if footer > len - 12 || footer > FOOTER_MAX {
        return wrong(
            ErrorKind::Truncated,
            format!("a footer of {footer} bytes in a file of {len}"),
        );
    }
    let start = len - 8 - footer;
    let bytes = Bytes::from(blob.read(start, footer, "the footer")?);
    let mut annotated = Vec::new();
    let mut clean = page::check_footer(&bytes, &mut annotated).map_err(|error| {
        Error::new(
            error.kind(),
            Stage::Index,
            format!("the footer: {}", error.message()),
        )
        .with_range(start, footer)
    })?;
    let mut odd = Vec::new();
    let meta = match ParquetMetaDataReader::decode_metadata(clean.as_deref().unwrap_or(&bytes)) {
        Err(_) if clean.is_none() => {
            annotated.retain(|column| {
                ParquetMetaDataReader::decode_metadata(&column.alone(&bytes)).is_err()
            });
            odd = annotated.iter().map(|column| column.leaf).collect();
            clean = page::without_annotations(&bytes, annotated)?;
            ParquetMetaDataReader::decode_metadata(clean.as_deref().unwrap_or(&bytes))
        }
        read => read,
    };
    let meta = meta.map_err(unread)?;
    drop(bytes);
    let counted = meta
        .row_groups()
        .iter()
        .fold(0_i64, |rows, group| rows.saturating_add(group.num_rows()));
    // Some writers omit the total number of rows.
    if ![0, counted].contains(&meta.file_metadata().num_rows()) {
        let all = meta.file_metadata().num_rows();
        let message = format!(
            "the footer counts {all} rows, its row groups {counted}: a row group is \
             lost, or the footer is damaged"
        );
        return Err(Error::new(ErrorKind::Decode, Stage::Index, message).with_range(start, footer));
    }
    Ok((meta, odd, clean.is_none()))
}

/// Whether the bytes are malformed, as opposed to a failed read.
fn is_malformed(error: &Error) -> bool {
    use ErrorKind::{Decode, Limit, Panicked, Truncated};
    matches!(error.kind(), Decode | Limit | Panicked | Truncated)
}

/// Adds the page locations to the footer.
fn with_offset_index(blob: &Blob, meta: ParquetMetaData) -> Result<ParquetMetaData> {
    let mut decoder = ParquetMetaDataPushDecoder::try_new_with_metadata(blob.len(), meta)
        .map_err(unread)?
        .with_column_index_policy(PageIndexPolicy::Skip)
        .with_offset_index_policy(PageIndexPolicy::Optional);
    loop {
        match decoder.try_decode().map_err(unread)? {
            DecodeResult::Data(meta) => return Ok(meta),
            DecodeResult::Finished => {
                return Err(unread(ParquetError::General("no metadata".into())));
            }
            DecodeResult::NeedsData(ranges) => {
                let read = |range: &Range<u64>| {
                    blob.read(range.start, range.end - range.start, "the offset index")
                };
                let pieces = ranges
                    .iter()
                    .map(|range| read(range).map(Bytes::from))
                    .collect::<Result<_>>()?;
                decoder.push_ranges(ranges, pieces).map_err(unread)?;
            }
        }
    }
}

/// Bytes that one read of all columns' offset indexes takes: from the start of the first index to
/// the end of the last.
fn offset_index_bytes(meta: &ParquetMetaData) -> u64 {
    let places = meta
        .row_groups()
        .iter()
        .flat_map(RowGroupMetaData::columns)
        .filter_map(|column| {
            let start = u64::try_from(column.offset_index_offset()?).ok()?;
            Some((
                start,
                start.saturating_add(u64::try_from(column.offset_index_length()?).ok()?),
            ))
        });
    let (start, end) = places.fold((u64::MAX, 0), |(start, end), place| {
        (start.min(place.0), end.max(place.1))
    });
    end.saturating_sub(start)
}

/// Types of the leaves below a column, in Parquet's storage order.
fn leaf_types(of: &DataType, list: List, out: &mut Vec<(DataType, List)>) {
    let deeper = |more: List| if list == List::No { more } else { List::Any };
    let each = |fields: &Fields, out: &mut Vec<_>| {
        fields
            .iter()
            .for_each(|field| leaf_types(field.data_type(), list, out));
    };
    match of {
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field) => {
            leaf_types(field.data_type(), deeper(List::Any), out);
        }
        DataType::FixedSizeList(field, len) => {
            leaf_types(
                field.data_type(),
                deeper(List::Fixed(usize::try_from(*len).unwrap_or(0))),
                out,
            );
        }
        DataType::Map(field, _) => leaf_types(field.data_type(), List::Any, out),
        DataType::Struct(fields) => each(fields, out),
        DataType::Dictionary(_, value) => leaf_types(value, list, out),
        other => out.push((other.clone(), list)),
    }
}
