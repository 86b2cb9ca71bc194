//! Files of the output: errors that name them.

use crate::error::{Error, Result, Stage};
use crate::storage::publish::{Folder, Pending};
use std::io;
use std::path::{Path, PathBuf};

/// Begins `target`. Errors name it.
pub(super) fn create(target: PathBuf) -> Result<Pending> {
    Pending::create_alone(&target).map_err(|source| failed(source, &target))
}

/// Gives the file its name; with `sync` once its bytes are on the device, and the name is, too.
pub(super) fn commit(pending: Pending, sync: bool) -> Result<()> {
    let target = pending.target().to_path_buf();
    let named = pending.commit(sync).and_then(|()| if sync { Folder::of(&target)?.sync() } else { Ok(()) });
    named.map_err(|source| failed(source, &target))
}

/// An output that could not be written.
pub(super) fn failed(source: io::Error, path: &Path) -> Error {
    let message = match source.kind() {
        io::ErrorKind::StorageFull => "the disk is full; what was half written is removed",
        io::ErrorKind::QuotaExceeded => "the quota is used up; what was half written is removed",
        _ => "cannot write the output",
    };
    Error::os(Stage::Write, message, source).with_path(path)
}
