//! Storage readers: they read extents into buffers. One contract, three implementations, chosen at
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
//!   error that names the path, offset and length. A short read is continued. A read of 0 bytes
//!   before the end is [`ErrorKind::Truncated`](crate::ErrorKind).
//! * One thread drives a reader; other threads may only use its `Waker`.

/// The crate whose `ObjectStore` is the trait of [registered](register) stores.
#[cfg(feature = "remote")]
pub use feedline_core::storage::object_store;
#[cfg(feature = "remote")]
#[doc(inline)]
pub use feedline_core::storage::register;
#[doc(inline)]
pub use feedline_core::storage::{
    Blob, DirId, Direct, Extent, Listed, Mode, SourceId, Sources, configure::configure, list,
    publish::publish,
};
#[doc(inline)]
pub use feedline_store::{Cache, CacheEntry, CacheWarmed, Choice};
