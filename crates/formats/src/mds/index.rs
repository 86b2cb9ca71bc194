//! `index.json` of MDS: the list of shards with their descriptions. Untrusted.
//!
//! Limits: 64 MiB of JSON, nesting as deep as serde_json allows (128). Invariants: file names stay
//! within the folder; all shards have the same columns; no two shards share a file; numbers fit the
//! shard format (32 bits).

use super::columns::Column;
use crate::twice;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use serde::Deserialize;
use serde_json::Value;
use std::num::NonZeroU32;
use std::path::{Component, Path};

/// Maximum bytes of an `index.json`: about 100,000 shards.
pub(super) const INDEX_MAX: u64 = 64 << 20;

/// A file, as its index entry describes it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct FileInfo {
    #[serde(rename = "basename")]
    pub(super) name: String,
    pub(super) bytes: u64,
}

/// A shard, as its index entry describes it.
#[derive(Clone, Debug)]
pub(super) struct ShardInfo {
    pub(super) samples: u32,
    pub(super) raw: FileInfo,
    /// The compressed file, and its compression.
    pub(super) zip: Option<(FileInfo, String)>,
}

/// Reads an index. Errors: [`ErrorKind::Decode`] with the shard and the entry;
/// [`ErrorKind::Empty`].
pub(super) fn parse(text: &[u8]) -> Result<(Vec<Column>, Vec<ShardInfo>)> {
    let root: Value = serde_json::from_slice(text)
        .map_err(|source| bad("not JSON".into()).with_source(source))?;
    let version: u64 = entry(&root, "version").map_err(bad)?;
    if version != 2 {
        return Err(bad(format!("version {version}, only 2 is supported")));
    }
    let list = root
        .get("shards")
        .and_then(Value::as_array)
        .ok_or_else(|| bad("`shards` is not a list".into()))?;
    let mut columns = None;
    let mut shards = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        let named = |message: String| bad(format!("shard {index}: {message}"));
        shards.push(shard(value).map_err(named)?);
        let own = columns_of(value).map_err(named)?;
        if columns.get_or_insert_with(|| own.clone()) != &own {
            return Err(named("its columns differ from those of shard 0".into()));
        }
    }
    let names = shards.iter().flat_map(|shard| {
        let zip = shard.zip.iter().map(|(file, _)| &*file.name);
        zip.chain([&*shard.raw.name])
    });
    if let Some(name) = twice(names) {
        return Err(bad(format!(
            "two shards name the file {:?}: its samples would be delivered twice",
            clipped(name)
        )));
    }
    match columns {
        Some(columns) => Ok((columns, shards)),
        None => Err(Error::new(
            ErrorKind::Empty,
            Stage::Index,
            "there are no shards",
        )),
    }
}

/// Columns of a shard, from its index entry or from the shard's copy of that entry.
pub(super) fn columns_of(shard: &Value) -> Result<Vec<Column>, String> {
    let version: u64 = entry(shard, "version")?;
    let format: &str = entry(shard, "format")?;
    if (version, format) != (2, "mds") {
        return Err(format!(
            "format `{format}` {version}, only `mds` 2 is supported"
        ));
    }
    let names: Vec<String> = entry(shard, "column_names")?;
    let encodings: Vec<String> = entry(shard, "column_encodings")?;
    let sizes: Vec<Option<NonZeroU32>> = entry(shard, "column_sizes")?;
    if names.is_empty() || names.len() != encodings.len() || names.len() != sizes.len() {
        let lens = (names.len(), encodings.len(), sizes.len());
        return Err(format!(
            "{} column names, {} encodings, {} sizes",
            lens.0, lens.1, lens.2
        ));
    }
    if let Some(name) = twice(names.iter().map(String::as_str)) {
        return Err(format!("two columns are called `{name}`"));
    }
    Ok(names
        .into_iter()
        .zip(encodings)
        .zip(sizes)
        .map(|((name, encoding), size)| Column {
            name,
            encoding,
            size: size.map(NonZeroU32::get),
        })
        .collect())
}

fn shard(value: &Value) -> Result<ShardInfo, String> {
    let samples: u32 = entry(value, "samples")?;
    if samples == 0 || samples == u32::MAX {
        return Err(format!("{samples} samples"));
    }
    let raw: FileInfo = entry(value, "raw_data")?;
    // Offsets within a shard are 32-bit numbers.
    if raw.bytes > u64::from(u32::MAX) {
        return Err(format!(
            "raw_data: {} bytes, a shard holds less than 4 GiB",
            raw.bytes
        ));
    }
    let zip = match (
        entry::<Option<FileInfo>>(value, "zip_data")?,
        entry::<Option<String>>(value, "compression")?,
    ) {
        (None, None) => None,
        (Some(zip), Some(compression)) => Some((zip, compression)),
        (Some(_), None) => return Err("`zip_data` without `compression`".to_string()),
        (None, Some(compression)) => {
            return Err(format!("compression `{compression}` without `zip_data`"));
        }
    };
    check_name(&raw)?;
    zip.iter().try_for_each(|(zip, _)| check_name(zip))?;
    Ok(ShardInfo { samples, raw, zip })
}

fn check_name(FileInfo { name, .. }: &FileInfo) -> Result<(), String> {
    let path = Path::new(name);
    let mut parts = path.components();
    let plain = parts.all(|part| matches!(part, Component::Normal(_)));
    // `components` drops `.` and doubled or trailing separators.
    let same = path.iter().map(|part| part.len() + 1).sum::<usize>() == name.len() + 1;
    if name.is_empty() || name.len() > 4096 || !plain || !same || name.contains(['\\', '\0']) {
        return Err(format!(
            "the file name {:?} is not a plain path within the dataset's folder",
            clipped(name)
        ));
    }
    Ok(())
}

fn clipped(text: &str) -> String {
    text.chars().take(100).collect()
}

/// The value of `key`. A missing key counts as `null` if the type accepts `null`.
fn entry<'a, T: Deserialize<'a>>(object: &'a Value, key: &str) -> Result<T, String> {
    match object.get(key) {
        None => T::deserialize(&Value::Null).map_err(|_| format!("`{key}` is missing")),
        Some(value) => T::deserialize(value)
            .map_err(|error| format!("`{key}`: {}", clipped(&error.to_string()))),
    }
}

fn bad(message: String) -> Error {
    Error::new(ErrorKind::Decode, Stage::Index, message)
}
