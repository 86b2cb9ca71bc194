//! The files of a folder that `datasets` wrote.
//!
//! ```text
//! save_to_disk   state.json names the files: data-00000-of-00003.arrow, …      dataset_dict.json: one folder a split
//! cache          NAME-train.arrow, or NAME-train-00000-of-00002.arrow, …       without a list: one split, all of its parts
//! ```

use feedline_base::error::{Error, ErrorKind, Result, Stage, config};
use feedline_base::metadata::FileKind;
use feedline_core::storage::listing::{expand, look};
use feedline_core::storage::{Blob, Listed};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Endings of files that a folder's listing takes.
const ENDINGS: [&str; 3] = [".arrow", ".feather", ".ipc"];

/// Maximum bytes of a JSON file of a folder.
const JSON_MAX: u64 = 64 << 20;

/// The files of a path or pattern, and its name.
pub(super) fn files(pattern: &Path) -> Result<(Vec<PathBuf>, String)> {
    if let Some(found) = saved(pattern)? {
        return Ok((found, pattern.display().to_string()));
    }
    let Listed {
        files,
        name,
        folder,
        ..
    } = expand(pattern, &ENDINGS)?;
    if folder.is_some() {
        one_split(&files).map_err(|error| error.with_path(pattern))?;
    }
    Ok((files, name))
}

/// The files of a folder of `save_to_disk`; `None` if it is no such folder.
fn saved(folder: &Path) -> Result<Option<Vec<PathBuf>>> {
    let state = match json(folder, "state.json")? {
        Some(state) => state,
        None => {
            let Some(splits) = json(folder, "dataset_dict.json")? else {
                return Ok(None);
            };
            let names = splits["splits"].as_array().into_iter().flatten();
            let names: Vec<_> = names.filter_map(Value::as_str).collect();
            let message = format!(
                "a folder of splits: open the folder of one of them: {}",
                names.join(", ")
            );
            return Err(config(message).with_path(folder));
        }
    };
    let indices = &state["_indices_data_files"];
    if indices.as_array().is_some_and(|files| !files.is_empty()) {
        return Err(config(
            "the rows are chosen by a table of indices: save the data set anew, as by flatten_indices().save_to_disk(…)",
        )
        .with_path(folder));
    }
    let files = state["_data_files"].as_array();
    let files = files.ok_or_else(|| wrong(folder, "no list `_data_files`"))?;
    let names = files.iter().map(|file| {
        let name = file["filename"].as_str().filter(|name| is_plain(name));
        name.map(|name| folder.join(name)).ok_or_else(|| {
            wrong(
                folder,
                &format!("{file} is no name of a file in the folder"),
            )
        })
    });
    names.collect::<Result<_>>().map(Some)
}

fn wrong(folder: &Path, what: &str) -> Error {
    let message = format!("state.json: {what}");
    Error::new(ErrorKind::Decode, Stage::Index, message).with_path(folder)
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != ".." && name != "." && !name.contains(['/', '\0'])
}

/// A JSON file of a folder; `None` if there is none.
fn json(folder: &Path, name: &str) -> Result<Option<Value>> {
    if look(folder).is_ok_and(|meta| meta.kind != FileKind::Folder) {
        return Ok(None);
    }
    let blob = match Blob::open_beneath(folder, name) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if blob.len() > JSON_MAX {
        let message = format!("{} bytes, at most {JSON_MAX} are read", blob.len());
        return Err(blob.wrong(message, 0, blob.len()));
    }
    let bytes = blob.read(0, blob.len(), name)?;
    let value = serde_json::from_slice(&bytes);
    value
        .map(Some)
        .map_err(|error| blob.wrong(format!("cannot be read: {error}"), 0, blob.len()))
}

/// Refuses a folder with several splits, or with a part of one: nothing says which rows are meant.
fn one_split(files: &[PathBuf]) -> Result<()> {
    let mut splits: BTreeMap<&str, (Option<u32>, u32)> = BTreeMap::new();
    for file in files {
        let stem = file
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or_default();
        let (name, parts) = parts(stem);
        let (expected, found) = splits.entry(name).or_insert((parts, 0));
        *found += 1;
        *expected = parts.max(*expected);
    }
    let mut all = splits.iter();
    let is_one = all.all(|(name, (expected, _))| expected.is_none() && !is_split(name));
    if splits.len() > 1 && !is_one {
        let names: Vec<_> = splits.keys().take(16).copied().collect();
        return Err(config(format!(
            "several splits or tables in a folder: name one by a pattern, as in \"{}*.arrow\"; there are {}",
            names[0],
            names.join(", ")
        )));
    }
    match splits.into_iter().next() {
        Some((name, (Some(expected), found))) if expected != found => {
            let message = format!("{name}: {found} of {expected} parts are in the folder");
            Err(Error::new(ErrorKind::Truncated, Stage::Index, message))
        }
        _ => Ok(()),
    }
}

/// A file's name without the number of its part, and the number of all parts, if the name says it.
fn parts(stem: &str) -> (&str, Option<u32>) {
    let split = stem.rsplit_once("-of-").filter(|(_, all)| is_number(all));
    let numbered = split.and_then(|(before, all)| {
        let (name, number) = before.rsplit_once('-')?;
        is_number(number).then_some((name, all.parse().ok()))
    });
    numbered.unwrap_or_else(|| (stem.trim_end_matches(|c: char| c.is_ascii_digit()), None))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether a name says that its file is one of several splits.
fn is_split(name: &str) -> bool {
    let words = ["train", "test", "validation", "valid", "val", "dev"];
    let last = name.rsplit(['-', '_']).next().unwrap_or(name);
    words.contains(&last)
}
