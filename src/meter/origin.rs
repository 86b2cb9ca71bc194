//! Where bytes can come from, as numbers: what the page cache holds, and what the kernel counts for this process.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How much of a dataset's files the page cache held at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Cached {
    /// 0 to 1, of the bytes of all files.
    pub share: f64,
    /// Places that were looked at, spread evenly over the bytes.
    pub probes: u32,
    /// How they were looked at.
    pub how: CacheProbe,
}

impl Cached {
    /// From the mean over `probes` places.
    pub fn new(share: f64, probes: u32, how: CacheProbe) -> Self {
        Self { share: if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }, probes, how }
    }
}

/// Ways to ask what the page cache holds, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CacheProbe {
    /// `cachestat(2)`: Linux 6.5; files that the process owns or may write.
    Cachestat,
    /// `mincore(2)` on small maps; files that the process owns or may write.
    Mincore,
    /// Reading one byte without waiting (`RWF_NOWAIT`): any file, but a miss brings its page into the cache.
    Nowait,
}

impl fmt::Display for CacheProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cachestat => "cachestat",
            Self::Mincore => "mincore",
            Self::Nowait => "RWF_NOWAIT",
        })
    }
}

impl fmt::Display for Cached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} % of the files in the page cache ({} places, {})", 100.0 * self.share, self.probes, self.how)
    }
}

/// What the kernel counted for this process, all its threads together: `/proc/self/io`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceBytes {
    /// Bytes that block devices (or NFS servers) were asked for on behalf of this process, read-ahead included.
    pub read_bytes: u64,
    /// Bytes that `read` and its like returned, wherever they came from; neither io_uring nor maps count.
    pub rchar: u64,
}

impl DeviceBytes {
    /// From the text of `/proc/self/io`.
    ///
    /// Errors: which line is missing or is no number, in words: kernels can be built without it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let number = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let digits = line.ok_or_else(|| format!("the kernel does not count `{name}`"))?.trim();
            digits.parse().map_err(|_| format!("`{name}` is no number: {digits:?}"))
        };
        Ok(Self { read_bytes: number("read_bytes")?, rchar: number("rchar")? })
    }

    /// What was counted after `before`, an earlier count of the same process.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            rchar: self.rchar.saturating_sub(before.rchar),
        }
    }
}
