//! One system call, as injected faults see it.

use super::progress::Next;
use feedline_core::storage::Extent;
use std::ops::Range;

/// The kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(not(feature = "unstable"), allow(dead_code, reason = "for faults"))]
pub enum Call {
    /// Opening a file.
    Open,
    /// A read: an entry of io_uring, or `pread`.
    Read,
    /// A read that must not block: from the page cache.
    Cached,
    /// Read-ahead of a map's pages.
    Populate,
    /// A copy out of a map.
    Copy,
}

/// A read attempt. `next` is the requested range, in multiples of `align` bytes. `there` is the
/// range of the file that could be requested: the whole file, or the range of a map.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "unstable"), allow(dead_code, reason = "for faults"))]
pub(super) struct Attempt {
    pub(super) call: Call,
    pub(super) extent: Extent,
    pub(super) next: Next,
    pub(super) align: usize,
    pub(super) there: Range<u64>,
}
