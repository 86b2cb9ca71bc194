//! Damage: what the index of a shard finds wrong with it, where, and how many samples that costs.
//!
//! A sample that fails later, when it is read, is a `BadSample` of the loader's ledger instead.

use crate::error::{Error, ErrorKind, Stage};
use std::path::{Path, PathBuf};

/// What happens when the index of a shard finds damage. For samples that fail when they are read see
/// [`OnBadSample`](crate::OnBadSample).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDamage {
    /// The dataset does not open: the first damage becomes its error.
    #[default]
    Fail,
    /// The dataset opens with the samples that are whole. Each damage is listed, with the samples that it costs.
    Skip,
}

/// Kinds of damage, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DamageKind {
    /// A header or record frame is not what the format allows (checksum, number, magic).
    Header,
    /// The shard ends in the middle of something.
    Cut,
    /// The shard ends without its end marker.
    NoEnd,
    /// Zeroes where bytes must be.
    Zeroed,
    /// Bytes behind the end marker.
    Trailing,
    /// A key was there before.
    Duplicate,
    /// A sample lacks a field.
    Incomplete,
    /// Two readers of the format would see different things.
    Ambiguous,
    /// Legal in the format, but not read here.
    Unsupported,
    /// The bytes have another checksum than the format says.
    Checksum,
}

/// Names and kinds, for the index files. A kind keeps its name.
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
    /// A word for it.
    pub fn as_str(self) -> &'static str {
        KINDS.iter().find(|(_, kind)| *kind == self).map_or("other", |(name, _)| name)
    }

    pub(crate) fn from_str(name: &str) -> Option<Self> {
        KINDS.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind)
    }

    /// The kind of the error when damage is refused.
    fn error_kind(self) -> ErrorKind {
        match self {
            Self::Cut | Self::NoEnd => ErrorKind::Truncated,
            _ => ErrorKind::Decode,
        }
    }
}

/// One damaged place of a shard. The dataset does not have the samples that lie there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// The shard.
    pub path: PathBuf,
    /// First byte that is concerned.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// What it is, for programs.
    pub kind: DamageKind,
    /// What it is, for people: what was expected and found.
    pub message: String,
    /// Samples that are left out for it. Exact where single samples are concerned; where the rest of a shard is lost,
    /// an estimate from what can still be recognised there, and a [lower bound](Self::is_lower_bound) where bytes are missing.
    pub samples: u64,
}

impl Damage {
    /// An entry; the path is filled in by the index.
    pub(crate) fn new(kind: DamageKind, offset: u64, len: u64, samples: u64, message: impl Into<String>) -> Self {
        Self { path: PathBuf::new(), offset, len, kind, message: message.into(), samples }
    }

    pub(crate) fn at(mut self, path: &Path) -> Self {
        self.path = path.to_path_buf();
        self
    }

    /// Whether more than [`samples`](Self::samples) may be lost: where a shard ends early or is zeroed nobody can tell.
    pub fn is_lower_bound(&self) -> bool {
        matches!(self.kind, DamageKind::Cut | DamageKind::NoEnd | DamageKind::Zeroed)
    }

    fn cost(&self) -> String {
        format!("samples{}{}", if self.is_lower_bound() { ">=" } else { "=" }, self.samples)
    }

    /// The error that it is when damage is refused; `others` more were found.
    pub(crate) fn refused(&self, others: usize) -> Error {
        let more = if others == 0 { String::new() } else { format!(" (and {others} more)") };
        let message = format!("{}: {}{more}: {}", self.kind.as_str(), self.message, self.cost());
        Error::new(self.kind.error_kind(), Stage::Index, message)
            .with_path(&self.path)
            .with_range(self.offset, self.len)
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, offset, len, kind, message, .. } = self;
        write!(f, "{}: {message}: path={} offset={offset} len={len} {}", kind.as_str(), path.display(), self.cost())
    }
}

/// What all of it costs, in words.
pub(crate) fn cost(damage: &[Damage]) -> String {
    let lost = damage.iter().fold(0_u64, |lost, damage| lost.saturating_add(damage.samples));
    let least = if damage.iter().any(Damage::is_lower_bound) { "at least " } else { "" };
    format!("damage in {} places costs {least}{lost} samples", damage.len())
}
