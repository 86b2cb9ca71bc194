//! A file while it is being indexed: few bytes at known places, each read checked against the file's length first.
//!
//! What all formats owe to files that may be anything at all:
//!
//! | read from a file | compared with, before memory is taken or a loop is run |
//! |---|---|
//! | any file | opened without waiting, regular, and read up to the length that it had then |
//! | index file `.fdx` | the file's length, the shard's length and ends, 8 MiB of ledger, its CRC |
//! | checksums of `checked` | the file's length, the sources, its CRC |
//! | tar: sizes, PAX, long names | the shard's end; 1 MiB and 64 KiB. Names are keys and endings, never paths |
//! | TFRecord, `Example`: lengths | the shard's end; the record's; what the row holds |
//! | MDS `index.json`: lengths, offsets | 64 MiB of JSON; each shard's own length. Names are opened beneath the folder |
//! | zstd, Snappy, LZ4 | what index or footer promised; they write into a buffer of that size and stop |
//! | Parquet footer, pages | 256 MiB, 64 levels, 2^20 elements; the file's length; the footer. Columns in other files: refused |
//! | npy, npz | 64 KiB of header, 64 MiB of directory; the file's length. Deflated members: refused |
//! | safetensors | 100 MB of header; the file's length |
//! | Megatron, tokens, records | the counts must give the file's length exactly |
//! | pictures | `decode::Limits`: bytes, pixels, heap, scans |
//! | a loader's saved state | 64 KiB, its CRC |
//!
//! A panic of another crate's parser is an error; none of them runs a program or opens a connection.
//!
//! Limits: nothing is read past the length that the file had when it was opened. Invariants: memory is taken only for
//! bytes that the file has; every error names the path.

use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::{SourceId, Sources, open_plain, open_regular};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A regular file, or bytes in its place (fuzzing, tests).
pub(crate) struct Input<'a> {
    bytes: Bytes<'a>,
    path: &'a Path,
    len: u64,
}

enum Bytes<'a> {
    File(File),
    Memory(&'a [u8]),
}

impl<'a> Input<'a> {
    /// Opens a regular file. A FIFO in its place is an error, not an endless wait.
    pub(crate) fn open(path: &'a Path) -> Result<Self> {
        let (file, len) = open_regular(path)?;
        Ok(Self { bytes: Bytes::File(file), path, len })
    }

    /// The file of a source, whose path is `path`: one whose name came from a file is opened beneath its folder.
    pub(crate) fn of_source(sources: &Sources, id: SourceId, path: &'a Path) -> Result<Self> {
        let file = open_plain(sources, id)?;
        let failed = |source| Error::os(Stage::Index, "cannot look at the file", source).with_path(path);
        let len = file.metadata().map_err(failed)?.len();
        Ok(Self { bytes: Bytes::File(file), path, len })
    }

    /// Bytes that stand for a file.
    pub(crate) fn memory(bytes: &'a [u8]) -> Self {
        Self { bytes: Bytes::Memory(bytes), path: Path::new("<memory>"), len: bytes.len() as u64 }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// An error about `len` bytes at `offset`.
    pub(crate) fn error(&self, kind: ErrorKind, message: impl Into<String>, offset: u64, len: u64) -> Error {
        Error::new(kind, Stage::Index, message).with_path(self.path).with_range(offset, len)
    }

    /// The bytes are not what the format says.
    pub(crate) fn wrong(&self, message: impl Into<String>, offset: u64, len: u64) -> Error {
        self.error(ErrorKind::Decode, message, offset, len)
    }

    /// Fills `out` from `offset`. Errors: [`ErrorKind::Truncated`] naming `what` when the file ends before.
    pub(crate) fn fill(&self, offset: u64, out: &mut [u8], what: &str) -> Result<()> {
        self.has(offset, out.len() as u64, what)?;
        match &self.bytes {
            Bytes::Memory(bytes) => out.copy_from_slice(&bytes[offset as usize..][..out.len()]),
            Bytes::File(file) => file.read_exact_at(out, offset).map_err(|source| {
                let message = format!("cannot read {what}");
                Error::os(Stage::Index, message, source).with_path(self.path).with_range(offset, out.len() as u64)
            })?,
        }
        Ok(())
    }

    /// `len` bytes from `offset`; the caller has compared `len` with a limit. Errors: as [`fill`](Self::fill).
    pub(crate) fn read(&self, offset: u64, len: u64, what: &str) -> Result<Vec<u8>> {
        self.has(offset, len, what)?;
        let mut out = vec![0; len as usize];
        self.fill(offset, &mut out, what)?;
        Ok(out)
    }

    /// `N` bytes from `offset`. Errors: as [`fill`](Self::fill).
    pub(crate) fn array<const N: usize>(&self, offset: u64, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.fill(offset, &mut out, what)?;
        Ok(out)
    }

    fn has(&self, offset: u64, len: u64, what: &str) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let message = format!("the file of {} bytes ends before the end of {what}", self.len);
        Err(self.error(ErrorKind::Truncated, message, offset, len))
    }
}

/// Refuses little-endian formats where numbers have the other byte order: their bytes go into batches as they stand.
pub(crate) fn little_endian(format: &str) -> Result<()> {
    if cfg!(target_endian = "little") {
        return Ok(());
    }
    let message = format!("{format} is little-endian, this machine is not");
    Err(Error::new(ErrorKind::Config, Stage::Index, message))
}

/// A little-endian number of `bytes`, which are at most 8.
pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_past_the_end_and_the_error_says_what_is_missing() {
        let input = Input::memory(&[1, 2, 3, 4]);
        assert_eq!(input.array::<2>(2, "the tail").unwrap(), [3, 4]);
        for (offset, len) in [(3, 2), (4, 1), (u64::MAX, 1), (1, u64::MAX)] {
            let error = input.read(offset, len, "the tail").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Truncated);
            assert!(error.message().contains("the file of 4 bytes ends before the end of the tail"), "{error}");
            assert_eq!((error.site().offset, error.site().len), (Some(offset), Some(len)));
        }
        assert_eq!(number(&[1, 2]), 0x0201);
        assert_eq!(number(&[0xff; 8]), u64::MAX);
    }

    #[test]
    fn folders_devices_and_missing_files_are_typed_errors() {
        let cases = [("/", ErrorKind::NotAFile), ("/dev/null", ErrorKind::NotAFile), ("/gone", ErrorKind::NotFound)];
        for (path, kind) in cases {
            let error = Input::open(Path::new(path)).err().unwrap();
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(error.site().path.as_deref(), Some(Path::new(path)));
        }
    }
}
