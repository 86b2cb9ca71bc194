//! Output files: commits them, appends lines to lists, and makes errors that name the file.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::storage::publish::{Folder, Pending, remove};
use std::io;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Starts to write `target`, which another process may also write. Errors name the file.
pub(super) fn create_shared(target: PathBuf) -> Result<Pending> {
    Pending::create(&target).map_err(|source| failed(source, &target))
}

/// Gives the file its name, after its bytes are on the device; the name itself is not synced. An
/// existing file with equal bytes stays. Errors: [`ErrorKind::Config`] for an existing file with
/// other bytes, which also stays.
pub(super) fn commit_new(pending: Pending) -> Result<()> {
    let target = pending.target.clone();
    pending.commit_new().map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => {
            let message = "the file exists with other bytes than the plan gives: move it away, \
                 and run the task again";
            Error::new(ErrorKind::Config, Stage::Write, message).with_path(&target)
        }
        io::ErrorKind::NotFound => {
            let message = "the output's temporary file is gone because the job was finished meanwhile; \
                 run again";
            Error::os(Stage::Write, message, source).with_path(&target)
        }
        _ => failed(source, &target),
    })
}

/// A line of a ledger.
pub(super) fn ledger_line(source: &str, error: &Error) -> String {
    format!(
        "{source}\t{}\n",
        error.to_string().replace(['\t', '\n', '\r'], " ")
    )
}

/// Gives the file its name, and syncs both the bytes and the name. Replaces an existing file of
/// this name.
pub(super) fn commit(pending: Pending) -> Result<()> {
    let target = pending.target.clone();
    pending
        .commit(true)
        .and_then(|()| Folder::of(&target)?.sync())
        .map_err(|source| failed(source, &target))
}

/// Removes a file. A missing file is not an error: another process may have removed it.
pub(super) fn remove_if_there(path: &Path) -> Result<()> {
    match remove(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(|source| failed(source, path)),
    }
}

/// Makes the error for output that could not be written.
pub(super) fn failed(source: io::Error, path: &Path) -> Error {
    let message = match source.kind() {
        io::ErrorKind::StorageFull => {
            "the disk is full (bytes or inodes); the incomplete file is removed"
        }
        io::ErrorKind::QuotaExceeded => "the quota is used up; the incomplete file is removed",
        _ => "cannot write the output",
    };
    Error::os(Stage::Write, message, source).with_path(path)
}

/// Adds a line to a list; a new list begins with `heading`.
pub(super) fn append_line(
    list: &mut Option<Pending>,
    path: &Path,
    heading: &str,
    line: &str,
) -> Result<()> {
    let begun = list.is_some();
    let pending = match list {
        Some(pending) => pending,
        None => list.insert(create_shared(path.to_path_buf())?),
    };
    let heading = if begun { "" } else { heading };
    let written = pending
        .write_all(heading.as_bytes())
        .and_then(|()| pending.write_all(line.as_bytes()));
    written.map_err(|source| failed(source, &pending.target))
}

/// A path as a field of a line, with `\xNN` for backslashes, control characters and bytes that are
/// not UTF-8.
pub(super) fn escaped(path: &Path) -> String {
    let mut out = String::new();
    let escape = |out: &mut String, bytes: &[u8]| {
        bytes
            .iter()
            .for_each(|byte| *out += &format!("\\x{byte:02x}"))
    };
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for c in chunk.valid().chars() {
            match c.is_control() || c == '\\' {
                true => escape(&mut out, c.encode_utf8(&mut [0; 4]).as_bytes()),
                false => out.push(c),
            }
        }
        escape(&mut out, chunk.invalid());
    }
    out
}
