//! Damage found while indexing a shard: kind, place, and number of samples lost.
//!
//! A sample that fails later, on a read, is a `BadSample` of the loader's ledger instead.

use feedline_base::error::{Error, ErrorKind, Stage};
use std::path::{Path, PathBuf};

/// Kind of damage, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DamageKind {
    /// A header, record or its frame violates the format (checksum, number, magic, syntax).
    Header,
    /// The shard ends within a header, record or member.
    Cut,
    /// The shard ends without its end marker.
    NoEnd,
    /// Zeros instead of data.
    Zeroed,
    /// Bytes after the end marker.
    Trailing,
    /// A key occurs twice.
    Duplicate,
    /// A sample lacks a field.
    Incomplete,
    /// Two readers of the format could read different samples.
    Ambiguous,
    /// Legal in the format, but not supported here.
    Unsupported,
    /// The bytes do not match the format's checksum.
    Checksum,
}

/// Names of the kinds in index files. The name of a kind never changes.
const KINDS: [(&str, DamageKind); 10] = [
    ("header", DamageKind::Header),
    ("cut", DamageKind::Cut),
    ("no end", DamageKind::NoEnd),
    ("zeroed", DamageKind::Zeroed),
    ("trailing", DamageKind::Trailing),
    ("duplicate", DamageKind::Duplicate),
    ("incomplete", DamageKind::Incomplete),
    ("ambiguous", DamageKind::Ambiguous),
    ("unsupported", DamageKind::Unsupported),
    ("checksum", DamageKind::Checksum),
];

impl DamageKind {
    /// Name of the kind.
    pub fn as_str(self) -> &'static str {
        KINDS
            .iter()
            .find(|(_, kind)| *kind == self)
            .map_or("other", |(name, _)| name)
    }

    pub(crate) fn from_str(name: &str) -> Option<Self> {
        KINDS
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, kind)| *kind)
    }

    /// Kind of the error that opening the shard returns for this damage, unless damage is skipped.
    fn error_kind(self) -> ErrorKind {
        match self {
            Self::Cut | Self::NoEnd => ErrorKind::Truncated,
            _ => ErrorKind::Decode,
        }
    }
}

/// One damaged range of a shard. The dataset leaves out the samples in it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// Path of the shard.
    pub path: PathBuf,
    /// Offset of the first damaged byte.
    pub offset: u64,
    /// Number of damaged bytes.
    pub len: u64,
    /// Kind, for programs.
    pub kind: DamageKind,
    /// Description for people: expected and found values.
    pub message: String,
    /// Number of samples left out. Exact for single samples. If the rest of a shard is lost it is
    /// an estimate from what can still be recognised there, and a
    /// [lower bound](Self::is_lower_bound) where bytes are missing.
    pub samples: u64,
}

impl Damage {
    /// Makes an entry; the index fills in the path.
    pub fn new(
        kind: DamageKind,
        offset: u64,
        len: u64,
        samples: u64,
        message: impl Into<String>,
    ) -> Self {
        Self {
            path: PathBuf::new(),
            offset,
            len,
            kind,
            message: message.into(),
            samples,
        }
    }

    pub(crate) fn at(mut self, path: &Path) -> Self {
        self.path = path.to_path_buf();
        self
    }

    /// Whether more than [`samples`](Self::samples) may be lost. This is so for a cut or zeroed
    /// end, because nothing shows how many samples it held.
    pub fn is_lower_bound(&self) -> bool {
        matches!(
            self.kind,
            DamageKind::Cut | DamageKind::NoEnd | DamageKind::Zeroed
        )
    }

    fn cost(&self) -> String {
        format!(
            "samples{}{}",
            if self.is_lower_bound() { ">=" } else { "=" },
            self.samples
        )
    }

    /// The error for damage that is not skipped; `others` is the number of further damaged ranges.
    pub(crate) fn refused(&self, others: usize) -> Error {
        let more = if others == 0 {
            String::new()
        } else {
            format!(" (and {others} more)")
        };
        let message = format!(
            "{}: {}{more}: {}",
            self.kind.as_str(),
            self.message,
            self.cost()
        );
        Error::new(self.kind.error_kind(), Stage::Index, message)
            .with_path(&self.path)
            .with_range(self.offset, self.len)
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            path,
            offset,
            len,
            kind,
            message,
            ..
        } = self;
        write!(
            f,
            "{}: {message}: path={} offset={offset} len={len} {}",
            kind.as_str(),
            path.display(),
            self.cost()
        )
    }
}

/// Summary of all damage for people.
pub fn cost(damage: &[Damage]) -> String {
    let lost = damage
        .iter()
        .fold(0_u64, |lost, damage| lost.saturating_add(damage.samples));
    let least = if damage.iter().any(Damage::is_lower_bound) {
        "at least "
    } else {
        ""
    };
    format!(
        "damage in {} places costs {least}{lost} samples",
        damage.len()
    )
}

/// Counts of a verification, during the run or at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Samples checked.
    pub samples: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Damaged samples.
    pub damaged: u64,
}
