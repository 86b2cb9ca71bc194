//! Kind, length and version of a source, as a folder or a store names them; which paths are URLs.

use crate::error::{Error, ErrorKind, Stage};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// Whether a path is a URL: letters and `://`.
pub(crate) fn is_url(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    let scheme = bytes.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count();
    scheme > 0 && bytes[scheme..].starts_with(b"://")
}

/// Whether a name is a pattern of several.
pub(super) fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?', '['])
}

pub(super) fn bad_pattern(name: &str, error: glob::PatternError) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, "not a valid file pattern").with_source(error).with_path(name)
}

/// The kind of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    File,
    Folder,
    /// A symbolic link, which was not followed.
    Link,
    /// FIFO, socket, device.
    Other,
}

impl FileKind {
    pub(super) fn of(kind: std::fs::FileType) -> Self {
        match kind {
            kind if kind.is_file() => Self::File,
            kind if kind.is_dir() => Self::Folder,
            kind if kind.is_symlink() => Self::Link,
            _ => Self::Other,
        }
    }
}

/// A source's entry in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Meta {
    pub(crate) kind: FileKind,
    pub(crate) len: u64,
    /// Differs if the bytes do: the modification time in nanoseconds, modulo 2^64. A copy that keeps the time keeps the
    /// version.
    pub(crate) version: u64,
    /// The version of an object, as its store names it.
    pub(crate) pin: Option<Arc<str>>,
}

impl Meta {
    pub(super) fn of(meta: &std::fs::Metadata) -> Self {
        let version = nanoseconds(meta.mtime(), meta.mtime_nsec());
        Self { kind: FileKind::of(meta.file_type()), len: meta.len(), version, pin: None }
    }

    pub(super) fn of_memory(len: usize) -> Self {
        Self { kind: FileKind::File, len: len as u64, version: 0, pin: None }
    }

    /// An object of this version.
    pub(super) fn of_object(len: u64, pin: Option<Arc<str>>) -> Self {
        Self { kind: FileKind::File, len, version: fnv(pin.as_deref().unwrap_or_default().as_bytes()), pin }
    }
}

/// Modulo 2^64.
fn nanoseconds(seconds: i64, rest: i64) -> u64 {
    (seconds as u64).wrapping_mul(1_000_000_000).wrapping_add(rest as u64)
}

/// What tells contents of a file apart: the times of the last changes in nanoseconds, and the inode if it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    modified: u64,
    /// Of content or attributes. No program can set it.
    changed: u64,
    inode: u64,
    len: u64,
}

impl Version {
    pub(super) fn of(meta: &std::fs::Metadata, keeps_inode: bool) -> Self {
        Self {
            modified: nanoseconds(meta.mtime(), meta.mtime_nsec()),
            changed: nanoseconds(meta.ctime(), meta.ctime_nsec()),
            inode: if keeps_inode { meta.ino() } else { 0 },
            len: meta.len(),
        }
    }

    /// Whether only attributes may have changed.
    pub(super) fn is_same_content(self, other: Self) -> bool {
        Self { changed: other.changed, ..self } == other
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "modified {} changed {} inode {}", self.modified, self.changed, self.inode)
    }
}

/// FNV-1a, for numbers in files: the same in every build, unlike the standard library's hash.
pub(crate) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
