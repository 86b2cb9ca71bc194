//! Kind, length and version of a source, as its folder or store reports them. Also tells URLs from
//! paths.

use crate::error::{Error, ErrorKind, Stage};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// Whether a path is a URL: letters and `://`.
pub fn is_url(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    let scheme = bytes
        .iter()
        .take_while(|byte| byte.is_ascii_alphanumeric())
        .count();
    scheme > 0 && bytes[scheme..].starts_with(b"://")
}

/// Whether a name is a pattern, which may match several names.
pub fn is_pattern(name: &str) -> bool {
    name.contains(['*', '?', '['])
}

pub fn bad_pattern(name: &str, error: glob::PatternError) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, "not a valid file pattern")
        .with_source(error)
        .with_path(name)
}

/// Kind of a file, or of a key in a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    File,
    Folder,
    /// A symbolic link, which was not followed.
    Link,
    /// FIFO, socket, device.
    Other,
    /// A key in a bucket that cannot be a path in a folder, such as `a//b`.
    Odd,
}

/// Label of [`FileKind::Odd`] keys in counts.
pub const ODD: &str =
    "with an odd key (an empty or relative part, or a control character; rename it)";

impl FileKind {
    pub fn of(kind: std::fs::FileType) -> Self {
        match kind {
            kind if kind.is_file() => Self::File,
            kind if kind.is_dir() => Self::Folder,
            kind if kind.is_symlink() => Self::Link,
            _ => Self::Other,
        }
    }
}

/// A source's entry in its folder or bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    pub kind: FileKind,
    pub len: u64,
    /// Differs if the bytes differ: the modification time in nanoseconds, modulo 2^64. A copy that
    /// keeps the time keeps the version.
    pub version: u64,
    /// The version of an object, as its store names it.
    pub pin: Option<Arc<str>>,
    /// The version of a file.
    pub stamp: Option<Stamp>,
}

impl Meta {
    pub fn of(meta: &std::fs::Metadata) -> Self {
        let version = nanoseconds(meta.mtime(), meta.mtime_nsec());
        let stamp = Some(Stamp::new(version, meta.ino()));
        Self {
            kind: FileKind::of(meta.file_type()),
            len: meta.len(),
            version,
            pin: None,
            stamp,
        }
    }

    /// Whether length and version are the same.
    pub fn same_bytes(&self, other: &Self) -> bool {
        (self.len, self.version) == (other.len, other.version)
    }

    pub fn of_memory(len: usize) -> Self {
        Self {
            kind: FileKind::File,
            len: len as u64,
            version: 0,
            pin: None,
            stamp: None,
        }
    }

    /// An object of this version.
    pub fn of_object(len: u64, pin: Option<Arc<str>>) -> Self {
        let version = fnv(pin.as_deref().unwrap_or_default().as_bytes());
        Self {
            kind: FileKind::File,
            len,
            version,
            pin,
            stamp: None,
        }
    }
}

/// Distinguishes files that had the same path and length: the time of the last write, and the
/// inode.
///
/// The device number is not part of it: an automatic mount may return with another number. Nor is
/// the ctime: `chmod`, a link or a backup changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// In nanoseconds, modulo 2^64.
    pub modified: u64,
    /// Folded to 32 bits.
    pub inode: u32,
}

impl Stamp {
    pub(super) fn new(modified: u64, inode: u64) -> Self {
        Self {
            modified,
            inode: (inode ^ inode >> 32) as u32,
        }
    }

    pub fn of(stat: &rustix::fs::Stat) -> Self {
        Self::new(
            nanoseconds(stat.st_mtime, stat.st_mtime_nsec as i64),
            stat.st_ino,
        )
    }
}

/// Formats the time like `2026-09-01 10:00:00.000000000 UTC`.
impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.modified / 1_000_000_000;
        let rest = self.modified % 1_000_000_000;
        let days = seconds / 86_400;
        let second = seconds % 86_400;
        // Years begin in March, so that a leap day is the last day of its year; 719,468 days
        // precede 1970.
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day = shifted % 146_097;
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let year = year + era * 400 + u64::from(month >= 10);
        let month = if month < 10 { month + 3 } else { month - 9 };
        let hour = second / 3600;
        let minute = second / 60 % 60;
        let second = second % 60;
        write!(
            f,
            "{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{rest:09} UTC"
        )
    }
}

/// The time in nanoseconds, modulo 2^64.
fn nanoseconds(seconds: i64, rest: i64) -> u64 {
    (seconds as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(rest as u64)
}

/// Distinguishes contents of a file: the times of the last changes in nanoseconds, and the inode if
/// it is stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    modified: u64,
    /// Time of the last change of content or attributes. No program can set it.
    changed: u64,
    inode: u64,
    len: u64,
}

impl Version {
    pub fn of(meta: &std::fs::Metadata, keeps_inode: bool) -> Self {
        Self {
            modified: nanoseconds(meta.mtime(), meta.mtime_nsec()),
            changed: nanoseconds(meta.ctime(), meta.ctime_nsec()),
            inode: if keeps_inode { meta.ino() } else { 0 },
            len: meta.len(),
        }
    }

    /// Whether only attributes may have changed.
    pub fn is_same_content(self, other: Self) -> bool {
        Self {
            changed: other.changed,
            ..self
        } == other
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "modified {} changed {} inode {}",
            self.modified, self.changed, self.inode
        )
    }
}

/// FNV-1a, for numbers in files: the same in every build, unlike the standard library's hash.
pub fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_as_dates() {
        for (seconds, date) in [
            (0, "1970-01-01 00:00:00.000000007 UTC"),
            (951_782_399, "2000-02-28 23:59:59.000000007 UTC"),
            (951_782_400, "2000-02-29 00:00:00.000000007 UTC"),
            (1_798_761_599, "2026-12-31 23:59:59.000000007 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00.000000007 UTC"),
        ] {
            assert_eq!(Stamp::new(seconds * 1_000_000_000 + 7, 1).to_string(), date);
        }
    }
}
