//! Columns with one value for each file, which the files do not store: values in the names of
//! folders (`label=3/part-0.parquet`), and those that a table's log gives its files.
//!
//! ```text
//! names of folders ──┐
//! values of a table ─┴─► FileColumn ──► a leaf behind the stored ones of each footer, with its value ──► constants of chunks
//! ```
//!
//! The rules of names are those of pyarrow's `partitioning="hive"`: keys and values are
//! percent-decoded, a key whose values are all 32-bit integers is `i32`, other keys are text,
//! `__HIVE_DEFAULT_PARTITION__` and a missing key are nulls.
//!
//! If files store such a column, too, the values of the log count, as Delta demands, and those of
//! paths, as in pyarrow, polars and DuckDB. A path's value of another type than the stored column
//! does not count.
//!
//! Invariants: a value of a path that contradicts the file's statistics is an error. A null is an error when the dataset is opened,
//! unless the user asked for zeros.

use super::Nulls;
use super::fields::outside;
use super::footer::{Constant, Footer, Leaf, List, config};
use arrow_schema::DataType;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::is_url;
use feedline_base::setting::Setting;
use parquet::basic::{Repetition, Type};
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::statistics::Statistics;
use parquet::schema::types::{ColumnDescriptor, ColumnPath, Type as SchemaType};
use percent_encoding::percent_decode;
use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The name that stands for a null in names of folders.
const NULL: &str = "__HIVE_DEFAULT_PARTITION__";

/// A column that files do not store: it has one value for all rows of a file.
///
/// See [`ParquetBuilder::open_files`](super::ParquetBuilder::open_files).
#[derive(Clone, Debug)]
pub struct FileColumn {
    name: String,
    values: FileValues,
}

/// The values of a [`FileColumn`]: one for each file, in their order; `None` is a null.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FileValues {
    /// Booleans.
    Bool(Vec<Option<bool>>),
    /// Integers of 8 bits.
    I8(Vec<Option<i8>>),
    /// Integers of 16 bits.
    I16(Vec<Option<i16>>),
    /// Integers of 32 bits, or dates as days since 1970.
    I32(Vec<Option<i32>>),
    /// Integers of 64 bits.
    I64(Vec<Option<i64>>),
    /// Floats of 32 bits.
    F32(Vec<Option<f32>>),
    /// Floats of 64 bits.
    F64(Vec<Option<f64>>),
    /// Texts.
    Text(Vec<Option<String>>),
}

impl FileColumn {
    /// A column of this name.
    pub fn new(name: impl Into<String>, values: FileValues) -> Self {
        Self {
            name: name.into(),
            values,
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Number of files.
    pub(super) fn len(&self) -> usize {
        match &self.values {
            FileValues::Bool(values) => values.len(),
            FileValues::I8(values) => values.len(),
            FileValues::I16(values) => values.len(),
            FileValues::I32(values) => values.len(),
            FileValues::I64(values) => values.len(),
            FileValues::F32(values) => values.len(),
            FileValues::F64(values) => values.len(),
            FileValues::Text(values) => values.len(),
        }
    }

    /// The value of a file. Numbers of fewer than 32 bits are stored as 32 bits.
    fn of(&self, file: usize) -> Constant {
        match &self.values {
            FileValues::Bool(values) => values[file].map(|value| [u8::from(value)].into()),
            FileValues::I8(values) => {
                values[file].map(|value| i32::from(value).to_le_bytes().into())
            }
            FileValues::I16(values) => {
                values[file].map(|value| i32::from(value).to_le_bytes().into())
            }
            FileValues::I32(values) => values[file].map(|value| value.to_le_bytes().into()),
            FileValues::I64(values) => values[file].map(|value| value.to_le_bytes().into()),
            FileValues::F32(values) => values[file].map(|value| value.to_le_bytes().into()),
            FileValues::F64(values) => values[file].map(|value| value.to_le_bytes().into()),
            FileValues::Text(values) => values[file].as_deref().map(|text| text.as_bytes().into()),
        }
    }

    /// The value of a file in the type of a stored column; `None` if that has another kind.
    fn of_stored_type(&self, file: usize, leaf: &Leaf) -> Option<Constant> {
        if leaf.list != List::No {
            return None;
        }
        match (&self.values, &leaf.arrow, leaf.descr.physical_type()) {
            (FileValues::I32(_), DataType::Int32, Type::INT32)
            | (FileValues::Text(_), DataType::Utf8 | DataType::LargeUtf8, Type::BYTE_ARRAY) => {
                Some(self.of(file))
            }
            (FileValues::I32(values), DataType::Int64, Type::INT64) => {
                Some(values[file].map(|value| i64::from(value).to_le_bytes().into()))
            }
            _ => None,
        }
    }

    /// The column as one that a file could store.
    fn leaf(&self) -> Result<Leaf> {
        let (stored, arrow) = match &self.values {
            FileValues::Bool(_) => (Type::BOOLEAN, DataType::Boolean),
            FileValues::I8(_) => (Type::INT32, DataType::Int8),
            FileValues::I16(_) => (Type::INT32, DataType::Int16),
            FileValues::I32(_) => (Type::INT32, DataType::Int32),
            FileValues::I64(_) => (Type::INT64, DataType::Int64),
            FileValues::F32(_) => (Type::FLOAT, DataType::Float32),
            FileValues::F64(_) => (Type::DOUBLE, DataType::Float64),
            FileValues::Text(_) => (Type::BYTE_ARRAY, DataType::Utf8),
        };
        let primitive = SchemaType::primitive_type_builder(&self.name, stored)
            .with_repetition(Repetition::OPTIONAL)
            .build()
            .map_err(|error| {
                config(format!("column `{}` cannot be made", self.name)).with_source(error)
            })?;
        let path = ColumnPath::new(vec![self.name.clone()]);
        Ok(Leaf {
            descr: Arc::new(ColumnDescriptor::new(Arc::new(primitive), 1, 0, path)),
            arrow,
            list: List::No,
            name: self.name.clone(),
            value: None,
        })
    }
}

/// The columns that stand in the names of folders. `folder`: the folder whose files these are; the
/// folders above it count only if it is `None`.
///
/// Errors: a key or value that is not UTF-8, or an empty key; each with the file.
pub(super) fn in_paths(files: &[PathBuf], folder: Option<&Path>) -> Result<Vec<FileColumn>> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut columns: Vec<(String, Vec<Option<String>>)> = Vec::new();
    for (file, path) in files.iter().enumerate() {
        for (key, value) in pairs_in(path, folder).map_err(|error| error.with_path(path))? {
            let place = *places.entry(key.clone()).or_insert_with(|| {
                columns.push((key, Vec::new()));
                columns.len() - 1
            });
            let values = &mut columns[place].1;
            // As in pyarrow, the outermost folder counts if a key comes twice.
            if values.len() <= file {
                values.resize(file, None);
                values.push((value != NULL).then_some(value));
            }
        }
    }
    let columns = columns.into_iter().map(|(key, mut values)| {
        values.resize(files.len(), None);
        let is_integer = values.iter().any(Option::is_some)
            && values.iter().flatten().all(|text| integer(text).is_some());
        let values = if is_integer {
            FileValues::I32(
                values
                    .iter()
                    .map(|text| integer(text.as_deref()?))
                    .collect(),
            )
        } else {
            FileValues::Text(values)
        };
        FileColumn::new(key, values)
    });
    Ok(columns.collect())
}

/// The decoded keys and values of the folders in a path.
fn pairs_in(path: &Path, folder: Option<&Path>) -> Result<Vec<(String, String)>> {
    let inner = folder.and_then(|folder| path.strip_prefix(folder).ok());
    let inner = inner.unwrap_or(path);
    let text = inner.as_os_str().as_bytes();
    // Names in HTTP URLs are encoded once more, and a question mark ends them.
    let is_http = is_url(path) && path.as_os_str().as_bytes().starts_with(b"http");
    let text = match text.iter().position(|byte| *byte == b'?') {
        Some(end) if is_http => &text[..end],
        _ => text,
    };
    let mut pairs = Vec::new();
    let mut names = text.split(|byte| *byte == b'/');
    // The file's own name.
    names.next_back();
    for name in names {
        let once: Vec<u8> = match is_http {
            true => percent_decode(name).collect(),
            false => name.to_vec(),
        };
        let Some(equals) = once.iter().position(|byte| *byte == b'=') else {
            continue;
        };
        let key = decoded(&once[..equals], name)?;
        if key.is_empty() {
            let name = String::from_utf8_lossy(name);
            return Err(config(format!(
                "the folder `{name}` names a column without a name: rename it"
            )));
        }
        pairs.push((key, decoded(&once[equals + 1..], name)?));
    }
    Ok(pairs)
}

fn decoded(text: &[u8], folder: &[u8]) -> Result<String> {
    let text = percent_decode(text).decode_utf8();
    text.map(String::from).map_err(|_| {
        let folder = String::from_utf8_lossy(folder);
        let message = format!("the folder `{folder}` names a column or a value that is not UTF-8");
        Error::new(ErrorKind::Decode, Stage::Index, message)
    })
}

/// A 32-bit integer as Arrow reads it: digits with an optional minus, or `0x` and hexadecimal ones.
fn integer(text: &str) -> Option<i32> {
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let is_hex = hex.len() <= 8 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        return u32::from_str_radix(hex, 16)
            .ok()
            .filter(|_| is_hex)
            .map(u32::cast_signed);
    }
    text.parse().ok().filter(|_| !text.starts_with('+'))
}

/// Adds each column to the files. The values of a table's log count in place of stored ones, and so
/// do those of paths, if the stored ones have the same type. Returns what does not count.
pub(super) fn give_values(
    footers: &mut [Footer],
    columns: &[FileColumn],
    is_table: bool,
) -> Result<Vec<String>> {
    let mut ignored = Vec::new();
    for column in columns {
        let name = &column.name;
        let leaf = column.leaf()?;
        let mut stored = false;
        let mut given = false;
        for (file, footer) in footers.iter_mut().enumerate() {
            let at = footer.leaves.iter().position(|leaf| leaf.is_called(name));
            match at {
                Some(at) if is_table => {
                    footer.leaves[at] = Leaf {
                        value: Some(column.of(file)),
                        ..leaf.clone()
                    };
                    stored = true;
                }
                Some(at) => match column.of_stored_type(file, &footer.leaves[at]) {
                    Some(value) => {
                        footer.leaves[at].value = Some(value);
                        stored = true;
                    }
                    None => given = true,
                },
                None if footer.has(name) => given = true,
                None => {
                    footer.leaves.push(Leaf {
                        value: Some(column.of(file)),
                        ..leaf.clone()
                    });
                }
            }
        }
        if stored {
            ignored.push(format!("stored values of `{name}`"));
        }
        if given {
            ignored.push(format!("values of `{name}` beside the stored ones"));
        }
    }
    Ok(ignored)
}

/// Adds nulls to the files of a table that lack a column of other files. Returns the number of
/// these files by column.
pub(super) fn give_nulls(footers: &mut [Footer], names: &[String]) -> Vec<(String, usize)> {
    let mut lacking = Vec::new();
    for name in names {
        let leaf = footers
            .iter()
            .find_map(|footer| footer.leaves.iter().find(|leaf| leaf.is_called(name)));
        let Some(leaf) = leaf.cloned() else { continue };
        let without = footers.iter_mut().filter(|footer| !footer.has(name));
        let count = without
            .map(|footer| {
                footer.leaves.push(Leaf {
                    value: Some(None),
                    ..leaf.clone()
                });
            })
            .count();
        if count > 0 {
            lacking.push((leaf.name, count));
        }
    }
    lacking
}

/// Errors: a chosen column has no value in some files, and nulls are errors.
pub(super) fn check_nulls(footers: &[Footer], chosen: &[Vec<usize>], nulls: Nulls) -> Result<()> {
    if nulls == Nulls::Zero {
        return Ok(());
    }
    let Some(width) = chosen.first().map(Vec::len) else {
        return Ok(());
    };
    for column in 0..width {
        let without: Vec<(&Footer, usize)> = footers
            .iter()
            .zip(chosen)
            .map(|(footer, chosen)| (footer, chosen[column]))
            .filter(|(footer, leaf)| footer.rows() > 0 && footer.leaves[*leaf].value == Some(None))
            .collect();
        let Some((first, leaf)) = without.first() else {
            continue;
        };
        let message = format!(
            "column `{}` has no value in {} of {} files ({} reads nulls as 0 or empty, {} chooses \
             other columns)",
            first.leaves[*leaf].name,
            without.len(),
            footers.len(),
            Setting::NullZero,
            Setting::Columns
        );
        return Err(Error::new(ErrorKind::Decode, Stage::Index, message).with_path(&first.path));
    }
    Ok(())
}

/// Errors: a chosen column is stored in the file, and its statistics exclude the value that the
/// file should have.
pub(super) fn check_stored(
    footer: &Footer,
    file: usize,
    columns: &[FileColumn],
    chosen: &[usize],
) -> Result<()> {
    for column in columns {
        let stored = chosen
            .iter()
            .find(|index| **index < footer.stored() && footer.leaves[**index].name == column.name);
        let (Some(stored), Some(value)) = (stored, column.of(file)) else {
            continue;
        };
        let leaf = column.leaf()?;
        for group in footer.meta.row_groups() {
            let statistics = group.column(*stored).statistics();
            let is_other = match (statistics, number(&leaf, &value)) {
                (Some(Statistics::ByteArray(statistics)), None) => {
                    let least = statistics.min_bytes_opt();
                    let most = statistics.max_bytes_opt();
                    least.is_some_and(|least| least > &*value)
                        || most.is_some_and(|most| most < &*value)
                }
                (statistics, Some(value)) => outside(statistics, value, value),
                _ => false,
            };
            if is_other {
                let name = &column.name;
                let message = format!(
                    "column `{name}` is stored with other values than the path or the table gives the \
                     file; choose other columns with {}",
                    Setting::Columns
                );
                return Err(Error::new(ErrorKind::Decode, Stage::Index, message));
            }
        }
    }
    Ok(())
}

/// Whether the file's metadata exclude all values of a column of a row group within `min ..= max`.
pub(super) fn excludes(
    footer: &Footer,
    group: &RowGroupMetaData,
    column: usize,
    min: f64,
    max: f64,
) -> bool {
    match &footer.leaves[column].value {
        Some(value) => is_outside(&footer.leaves[column], value, min, max),
        None => outside(group.column(column).statistics(), min, max),
    }
}

/// Whether the value is certainly not within `min ..= max`.
fn is_outside(leaf: &Leaf, value: &Constant, min: f64, max: f64) -> bool {
    let value = value.as_deref().and_then(|value| number(leaf, value));
    value.is_some_and(|value| value.next_up() < min || value.next_down() > max)
}

fn number(leaf: &Leaf, value: &[u8]) -> Option<f64> {
    match leaf.descr.physical_type() {
        Type::BOOLEAN => Some(f64::from(*value.first()?)),
        Type::INT32 => Some(f64::from(i32::from_le_bytes(value.try_into().ok()?))),
        Type::INT64 => Some(i64::from_le_bytes(value.try_into().ok()?) as f64),
        Type::FLOAT => Some(f64::from(f32::from_le_bytes(value.try_into().ok()?))),
        Type::DOUBLE => Some(f64::from_le_bytes(value.try_into().ok()?)),
        _ => None,
    }
}
