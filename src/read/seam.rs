//! Where readers meet the system: every open and every attempt to read goes through here, so that tests can make it fail.
//!
//! ```text
//! uring, pread, mmap, cache ── turn(call) ──► Turn ── next ──► what is really asked for
//!                                              └───── result ─► what the reader is told
//! ```
//!
//! Everything above (`progress`, `files`, the readers) is the code that users run. Without the feature `test-util` both
//! types are empty, every method gives back what it was given, and nothing is left of them in the program. With it they are
//! those of `faulty`.

use super::Extent;
use super::progress::Next;
use std::ops::Range;

/// What is asked of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(not(feature = "test-util"), allow(dead_code, reason = "for faults"))]
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
#[cfg_attr(not(feature = "test-util"), allow(dead_code, reason = "for faults"))]
pub(super) struct Attempt {
    pub(super) call: Call,
    pub(super) extent: Extent,
    pub(super) next: Next,
    pub(super) align: usize,
    pub(super) there: Range<u64>,
}

#[cfg(feature = "test-util")]
pub(crate) use super::faulty::{Seam, Turn};
#[cfg(not(feature = "test-util"))]
pub(crate) use plain::{Seam, Turn};

#[cfg(not(feature = "test-util"))]
mod plain {
    use super::super::{ReaderOptions, SourceId};
    use super::{Attempt, Next};
    use rustix::io::Errno;
    use std::time::Duration;

    /// Nothing.
    #[derive(Clone)]
    pub(crate) struct Seam;

    /// Nothing.
    #[derive(Default)]
    pub(crate) struct Turn;

    impl Seam {
        pub(crate) fn none() -> Self {
            Self
        }

        pub(crate) fn of(_: &ReaderOptions) -> Self {
            Self
        }

        #[inline(always)]
        pub(crate) fn pause(&self, pause: Duration) -> Duration {
            pause
        }

        #[inline(always)]
        pub(crate) fn open(&self, _: SourceId) -> Turn {
            Turn
        }

        #[inline(always)]
        pub(in super::super) fn turn(&self, _: impl FnOnce() -> Attempt) -> Turn {
            Turn
        }
    }

    impl Turn {
        #[inline(always)]
        pub(crate) fn next(&self, next: Next) -> Next {
            next
        }

        #[inline(always)]
        pub(crate) fn instead(&self) -> Option<i32> {
            None
        }

        #[inline(always)]
        pub(crate) fn opened<T>(self, open: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
            open()
        }

        #[inline(always)]
        pub(crate) fn around(
            self,
            next: Next,
            buf: &mut [u8],
            read: impl FnOnce(Next, &mut [u8]) -> Result<usize, Errno>,
        ) -> Result<usize, Errno> {
            read(next, &mut buf[next.at..next.at + next.len])
        }
    }
}
