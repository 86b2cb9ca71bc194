//! One call of the system, as faults see it.

use super::Extent;
use super::progress::Next;
use std::ops::Range;

/// What is asked of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(not(feature = "unstable"), allow(dead_code, reason = "for faults"))]
pub enum Call {
    /// Opening a file.
    Open,
    /// A read: an entry of io_uring, or `pread`.
    Read,
    /// A read that must not wait: what the page cache has.
    Cached,
    /// Having pages of a map read ahead.
    Populate,
    /// A copy out of a map.
    Copy,
}

/// What a read attempt is about. `next` says what is asked for, in multiples of `align` bytes; `there` are the bytes of the file
/// that could be asked for: all, or those of a map.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "unstable"), allow(dead_code, reason = "for faults"))]
pub(super) struct Attempt {
    pub(super) call: Call,
    pub(super) extent: Extent,
    pub(super) next: Next,
    pub(super) align: usize,
    pub(super) there: Range<u64>,
}
