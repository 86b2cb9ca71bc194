//! Files that appear whole or not at all: written under a hidden name, then renamed.

use crate::error::{Error, Result, Stage};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Begin and end of the hidden names.
const PREFIX: &str = ".";
const SUFFIX: &str = ".partial";
const BUFFER: usize = 1 << 20;

/// Whether a file of this name was being written.
pub(super) fn is_partial(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// A file that is being written. Dropped before [`Pending::commit`] it leaves nothing.
pub(super) struct Pending {
    file: Option<BufWriter<File>>,
    hidden: PathBuf,
    target: PathBuf,
}

impl Pending {
    /// Begins `target`. Errors name it.
    pub(super) fn create(target: PathBuf) -> Result<Self> {
        let mut name = std::ffi::OsString::from(PREFIX);
        name.push(target.file_name().unwrap_or_default());
        name.push(SUFFIX);
        let hidden = target.with_file_name(name);
        let file = File::create(&hidden).map_err(|source| failed(source, &target))?;
        Ok(Self { file: Some(BufWriter::with_capacity(BUFFER, file)), hidden, target })
    }

    /// Gives the file its name; with `sync` once its bytes are on the device, and the name is, too.
    pub(super) fn commit(mut self, sync: bool) -> Result<()> {
        self.finish(sync).map_err(|source| failed(source, &self.target))
    }

    fn finish(&mut self, sync: bool) -> io::Result<()> {
        let Some(file) = self.file.take() else { return Ok(()) };
        let file = file.into_inner().map_err(|error| error.into_error())?;
        if sync {
            file.sync_all()?;
        }
        drop(file);
        std::fs::rename(&self.hidden, &self.target)?;
        match self.target.parent() {
            Some(dir) if sync => File::open(dir)?.sync_all(),
            _ => Ok(()),
        }
    }

    /// Names the file that could not be written.
    pub(super) fn failed(&self, source: io::Error) -> Error {
        failed(source, &self.target)
    }
}

impl Write for Pending {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.file {
            Some(file) => file.write(bytes),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            // What is buffered is not wanted any more.
            drop(file.into_parts());
        }
        // After the renaming there is no such file, and that is well.
        let _ = std::fs::remove_file(&self.hidden);
    }
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
