//! Counts of readers, local caches and direct reads.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Counts of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ReadStats {
    /// Reads that ended, with or without an error.
    #[serde(rename = "reads")]
    pub ops: u64,
    /// Reads that ended with an error.
    pub failed: u64,
    /// Bytes of the requested extents.
    pub bytes_asked: u64,
    /// Bytes that reads returned: more than requested where `O_DIRECT` must read a wider range.
    #[serde(rename = "bytes")]
    pub bytes_moved: u64,
    /// Reads that returned less than requested and were continued.
    pub short_reads: u64,
    /// Reads repeated after `EINTR` or `EAGAIN`.
    pub retries: u64,
    /// Reads (system calls or queue entries) that bypassed the page cache.
    pub direct_reads: u64,
    /// Reads through the page cache, including copies from maps.
    pub buffered_reads: u64,
    /// Files or reads that went through the page cache because `O_DIRECT` was refused.
    pub fallbacks: u64,
    /// Files opened.
    pub opens: u64,
    /// `io_uring_enter` calls.
    pub enters: u64,
    /// Whether buffers are registered with io_uring.
    pub registered_buffers: bool,
}

impl ReadStats {
    /// Share of the reads that bypassed the page cache: 0 … 1.
    #[doc(hidden)]
    pub fn direct_share(&self) -> f64 {
        self.direct_reads as f64 / (self.direct_reads + self.buffered_reads).max(1) as f64
    }
}

/// Counts of a loader's local cache. A network mount counts as network, and a file on it as an
/// object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CacheReads {
    /// Reads from the local disk.
    pub hits: u64,
    /// Reads from the network.
    pub misses: u64,
    /// Blocks that were downloaded and written to the local disk.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Blocks or objects that the local cache did not keep because its disk was full, slow or
    /// failing.
    pub not_kept: u64,
    /// Cached objects of other runs that were removed to free space.
    pub removed: u64,
    /// The last reason why something was not kept.
    pub why: Option<String>,
    /// Whether that reason is a lack of room: the capacity is used up, or the disk is full.
    #[serde(default)]
    pub is_full: bool,
}

impl fmt::Display for CacheReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = 100.0 * self.hits as f64 / (self.hits + self.misses).max(1) as f64;
        let gb = self.bytes as f64 / 1e9;
        write!(
            f,
            "{share:.1} % of {} reads served by the local disk; ",
            self.hits + self.misses
        )?;
        write!(f, "{} blocks kept, {gb:.3} GB", self.blocks)?;
        if self.removed > 0 {
            write!(f, "; {} objects of other runs removed", self.removed)?;
        }
        match &self.why {
            Some(why) => write!(f, "; {} times not kept ({why})", self.not_kept),
            None => Ok(()),
        }
    }
}

/// Counts of a loader's reads from files into device memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DirectReads {
    /// The route of the bytes by cuFile's own counts: `p2p`, `nvidia-fs`, `compat` (through host
    /// memory), several, or unknown.
    pub how: String,
    /// Reads by cuFile.
    pub reads: u64,
    /// Bytes of the rows that these reads returned.
    pub bytes: u64,
    /// Rows that came through the host, because cuFile could not read them.
    pub host_rows: u64,
    /// Why the first of these rows came through the host.
    pub why_host: Option<String>,
}

impl fmt::Display for DirectReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = self.bytes as f64 / 1e9;
        write!(
            f,
            "{} reads by cuFile, {gb:.3} GB, {}; not checksummed by the host",
            self.reads, self.how
        )?;
        match (&self.why_host, self.host_rows) {
            (_, 0) => Ok(()),
            (Some(why), rows) => write!(f, "; {rows} rows by the host ({why})"),
            (None, rows) => write!(f, "; {rows} rows by the host"),
        }
    }
}
