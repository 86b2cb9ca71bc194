//! Readers of files: they read extents into buffers. One contract, three implementations, chosen at
//! run time.
//!
//! ```text
//!            ┌─ cached: the page cache has it → the caller copies it at once (RWF_NOWAIT), never blocks
//! Extent ────┤
//!            └─ Reader: submit → … in flight, at most `depth` … → Completion (in any order)
//!                 uring  one ring, O_DIRECT where the file system allows it, registered buffers and files
//!                 pread  its own threads
//!                 mmap   its own threads, read-ahead by MADV_POPULATE_READ, fault-safe copies
//!                 remote objects in stores (feature `remote`); `router` gives each read to the reader of its source,
//!                        and asks the `cache` of objects and network mounts first
//! ```
//!
//! Limits: `depth` operations in flight; a descriptor budget (see `files`); one length per source,
//! checked when it is opened.
//!
//! Invariants:
//! * An operation owns its buffer from `submit` until its `Completion`, or until `submit` returns
//!   it. If it is unknown whether an operation ended, its buffer and ring are leaked and counted
//!   (`Report::leaked`), never freed.
//! * Every operation ends in exactly one completion. It carries all bytes of the extent, or one
//!   error that names the path, offset and length. A short read is continued. A read of 0 before
//!   the end is [`ErrorKind::Truncated`](feedline_base::ErrorKind).
//! * One thread drives a reader; other threads may only use its `Waker`.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

pub mod completions;
pub mod counters;
pub mod fault_hook;
pub mod fault_point;
#[cfg(feature = "unstable")]
pub mod faulty;
pub mod files;
pub mod mmap;
pub mod page_cache;
pub mod pread;
pub mod progress;
pub mod reader;
pub mod retry;
pub mod syscalls;
pub mod threads;
pub mod uring;
pub mod waker;

#[cfg(feature = "unstable")]
pub use faulty::Faulty;
pub use files::Files;
pub use page_cache::{Cached, PageCache};
pub use reader::{
    Completion, DEPTH_MAX, DROP_DEADLINE, Footprint, ReadOp, Reader, ReaderOptions, Sealed,
    THREADS_MAX, leaked,
};
pub use retry::Again;
pub use waker::Waker;
