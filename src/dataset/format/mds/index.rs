//! `index.json` of MDS: the list of shards with their descriptions. Untrusted.
//!
//! Limits: 64 MiB of JSON, nesting as deep as serde_json allows (128). Invariants: file names stay within the folder;
//! all shards have the same columns; numbers fit the shard format (32 bits).

use super::columns::Column;
use crate::error::{Error, ErrorKind, Result, Stage};
use serde_json::Value;
use std::path::{Component, Path};

/// Maximum bytes of an `index.json`: about 100,000 shards.
pub(super) const INDEX_MAX: u64 = 64 << 20;

/// A file by its index entry.
#[derive(Clone, Debug)]
pub(super) struct FileInfo {
    pub(super) name: String,
    pub(super) bytes: u64,
}

/// A shard by its index entry.
#[derive(Clone, Debug)]
pub(super) struct ShardInfo {
    pub(super) samples: u32,
    pub(super) raw: FileInfo,
    /// The compressed file, and its compression.
    pub(super) zip: Option<(FileInfo, String)>,
}

/// Reads an index. Errors: [`ErrorKind::Decode`] with the shard and the entry; [`ErrorKind::Empty`].
pub(super) fn parse(text: &[u8]) -> Result<(Vec<Column>, Vec<ShardInfo>)> {
    let root: Value = serde_json::from_slice(text).map_err(|source| bad("not JSON".into()).with_source(source))?;
    let version = number(&root, "version").map_err(bad)?;
    if version != 2 {
        return Err(bad(format!("version {version}, only 2 is supported")));
    }
    let list = entry(&root, "shards").map_err(bad)?.as_array().ok_or_else(|| bad("`shards` is no list".into()))?;
    let mut columns = None;
    let mut shards = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let named = |message: String| bad(format!("shard {index}: {message}"));
        shards.push(shard(value).map_err(named)?);
        let own = columns_of(value).map_err(named)?;
        if columns.get_or_insert_with(|| own.clone()) != &own {
            return Err(named("other columns than shard 0".into()));
        }
    }
    match columns {
        Some(columns) => Ok((columns, shards)),
        None => Err(Error::new(ErrorKind::Empty, Stage::Index, "there are no shards")),
    }
}

/// Columns of a shard, by its index entry or the shard's copy of it.
pub(super) fn columns_of(shard: &Value) -> Result<Vec<Column>, String> {
    let (version, format) = (number(shard, "version")?, text(shard, "format")?);
    if (version, format) != (2, "mds") {
        return Err(format!("format `{format}` {version}, only `mds` 2 is supported"));
    }
    let list = |key: &str| entry(shard, key)?.as_array().ok_or_else(|| format!("`{key}` is no list"));
    let (names, encodings, sizes) = (list("column_names")?, list("column_encodings")?, list("column_sizes")?);
    if names.is_empty() || names.len() != encodings.len() || names.len() != sizes.len() {
        let lens = (names.len(), encodings.len(), sizes.len());
        return Err(format!("{} column names, {} encodings, {} sizes", lens.0, lens.1, lens.2));
    }
    let mut columns: Vec<Column> = Vec::with_capacity(names.len());
    for ((name, encoding), size) in names.iter().zip(encodings).zip(sizes) {
        let (Some(name), Some(encoding)) = (name.as_str(), encoding.as_str()) else {
            return Err("the name or encoding of a column is not text".to_string());
        };
        let size = match size {
            Value::Null => None,
            size => {
                let fits = size.as_u64().and_then(|size| u32::try_from(size).ok()).filter(|size| *size > 0);
                Some(fits.ok_or_else(|| format!("column `{name}`: a size of {size}"))?)
            }
        };
        columns.push(Column { name: name.to_string(), encoding: encoding.to_string(), size });
    }
    let mut sorted: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("two columns are called `{}`", pair[0])),
        None => Ok(columns),
    }
}

fn shard(value: &Value) -> Result<ShardInfo, String> {
    let samples = number(value, "samples")?;
    let samples = u32::try_from(samples).ok().filter(|samples| *samples > 0 && *samples < u32::MAX);
    let samples = samples.ok_or_else(|| format!("{} samples", value["samples"]))?;
    let raw = file(entry(value, "raw_data")?).map_err(|message| format!("raw_data: {message}"))?;
    // Offsets within a shard are 32-bit numbers.
    if raw.bytes > u64::from(u32::MAX) {
        return Err(format!("raw_data: {} bytes, a shard holds less than 4 GiB", raw.bytes));
    }
    let compression = match value.get("compression") {
        None | Some(Value::Null) => None,
        Some(Value::String(compression)) => Some(compression.clone()),
        Some(other) => return Err(format!("a compression of {other}")),
    };
    let zip = match value.get("zip_data") {
        None | Some(Value::Null) => None,
        Some(info) => Some(file(info).map_err(|message| format!("zip_data: {message}"))?),
    };
    let zip = match (zip, compression) {
        (None, None) => None,
        (Some(zip), Some(compression)) => Some((zip, compression)),
        (Some(_), None) => return Err("a compressed file, but no compression".to_string()),
        (None, Some(compression)) => return Err(format!("compression `{compression}`, but no compressed file")),
    };
    Ok(ShardInfo { samples, raw, zip })
}

fn file(info: &Value) -> Result<FileInfo, String> {
    let (name, bytes) = (text(info, "basename")?, number(info, "bytes")?);
    let path = Path::new(name);
    let mut parts = path.components();
    let plain = parts.all(|part| matches!(part, Component::Normal(_)));
    // `components` drops `.` and doubled or trailing separators.
    let same = path.iter().map(|part| part.len() + 1).sum::<usize>() == name.len() + 1;
    if name.is_empty() || name.len() > 4096 || !plain || !same || name.contains(['\\', '\0']) {
        return Err(format!("the file name {:?} is not a plain path within the dataset's folder", clipped(name)));
    }
    Ok(FileInfo { name: name.to_string(), bytes })
}

fn clipped(text: &str) -> String {
    text.chars().take(100).collect()
}

fn entry<'a>(object: &'a Value, key: &str) -> Result<&'a Value, String> {
    object.get(key).ok_or_else(|| format!("`{key}` is missing"))
}

fn number(object: &Value, key: &str) -> Result<u64, String> {
    let value = entry(object, key)?;
    value.as_u64().ok_or_else(|| format!("`{key}` is {}, not a whole number", clipped(&value.to_string())))
}

fn text<'a>(object: &'a Value, key: &str) -> Result<&'a str, String> {
    let value = entry(object, key)?;
    value.as_str().ok_or_else(|| format!("`{key}` is {}, not text", clipped(&value.to_string())))
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::Decode, Stage::Index, message)
}
