//! Storage readers: they read extents into buffers. One contract, three implementations, chosen at run time.
//!
//! ```text
//!            ┌─ cached: the page cache has it → the caller copies it at once (RWF_NOWAIT), never blocks
//! Extent ────┤
//!            └─ Reader: submit → … in flight, at most `depth` … → Completion (in any order)
//!                 uring  one ring, O_DIRECT where the file system allows it, registered buffers and files
//!                 pread  its own threads
//!                 mmap   its own threads, read-ahead by MADV_POPULATE_READ, fault-safe copies
//! ```
//!
//! Where to start reading: `progress` (pure: the next read, and how it continues), `files` (descriptors), `pread` (the
//! simplest reader), then `uring`. `open` lies in `choice`.
//!
//! Limits: `depth` operations in flight; a descriptor budget (see `files`); one length per source, checked when it is
//! opened.
//!
//! Invariants:
//! * An operation owns its buffer from `submit` until its `Completion`, or until `submit` returns it. If the end of an
//!   operation is unknown, buffer and ring are leaked and counted (`Report::leaked`), never freed.
//! * Every operation ends in exactly one completion. It has all bytes of the extent, or one error that names path,
//!   offset and length. A short read is continued. A read of 0 before the end is
//!   [`ErrorKind::Truncated`](crate::ErrorKind).
//! * One thread drives a reader; other threads may only use its `Waker`.

pub(crate) mod attempt;
mod blob;
pub(crate) mod choice;
mod fault_hook;
#[cfg(feature = "unstable")]
pub(crate) mod faulty;
mod files;
pub(crate) mod listing;
mod mmap;
pub(crate) mod page_cache;
mod pread;
mod progress;
pub(crate) mod publish;
pub(crate) mod reader;
mod resolve_beneath;
mod retry;
mod source;
mod sys;
mod threads;
mod uring;
pub(crate) mod waker;

pub(crate) use blob::Blob;
pub(crate) use choice::{Choice, Opened, open};
#[cfg(feature = "unstable")]
pub(crate) use faulty::Faulty;
pub(crate) use files::{Files, descriptor_limit};
pub(crate) use page_cache::{Cached, PageCache};
pub(crate) use retry::{Again, exhausted, may_pass};
pub use source::{DirId, Extent, SourceId, Sources};
pub(crate) use waker::Waker;

#[cfg(test)]
pub(crate) use waker::Bell;

pub(crate) use crate::meter::ReadStats;
pub(crate) use reader::{
    Completion, DEPTH_MAX, DROP_DEADLINE, Footprint, ReadOp, Reader, ReaderOptions, Sealed, THREADS_MAX, leaked,
};

use reader::count_leaked;
use std::sync::atomic::{AtomicU64, Ordering};

/// The choice of reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// The page cache first; misses go to io_uring if it is available, else to pread threads.
    #[default]
    Auto,
    /// io_uring, or an error that says why not.
    Uring,
    /// Threads that call `pread`.
    Pread,
    /// Threads that copy out of memory maps.
    Mmap,
}

/// Whether reads bypass the page cache (`O_DIRECT`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Direct {
    /// `O_DIRECT` if the file system allows it. Under [`Mode::Auto`] only if the dataset exceeds half of the free
    /// memory; otherwise a second epoch runs from memory. Never for [`Mode::Mmap`].
    ///
    /// A cold first epoch through the page cache costs CPU time. It also costs speed on devices that are slow with many
    /// small segments, because the kernel puts a random extent into single pages of 4 KiB. If each sample is read only
    /// once, [`Direct::On`] is better.
    #[default]
    Auto,
    /// Always; an error on opening the reader if it is not possible.
    On,
    /// Never.
    Off,
}

/// [`ReadStats`] of readers with their own threads. The counters are relaxed: pure statistics.
#[derive(Default)]
struct Counters {
    ops: AtomicU64,
    failed: AtomicU64,
    bytes_asked: AtomicU64,
    bytes_moved: AtomicU64,
    short_reads: AtomicU64,
    retries: AtomicU64,
    direct_reads: AtomicU64,
    buffered_reads: AtomicU64,
}

impl Counters {
    fn snapshot(&self) -> ReadStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReadStats {
            ops: load(&self.ops),
            failed: load(&self.failed),
            bytes_asked: load(&self.bytes_asked),
            bytes_moved: load(&self.bytes_moved),
            short_reads: load(&self.short_reads),
            retries: load(&self.retries),
            direct_reads: load(&self.direct_reads),
            buffered_reads: load(&self.buffered_reads),
            ..ReadStats::default()
        }
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
