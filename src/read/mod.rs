//! Storage readers: extents in, bytes out. One contract, three implementations, chosen at run time.
//!
//! ```text
//!            ┌─ cached: the page cache has it → copied at once by whoever asks (RWF_NOWAIT), never waits
//! Extent ────┤
//!            └─ Reader: submit → … in flight, at most `depth` … → Completion (in any order)
//!                 uring  one ring, O_DIRECT where the file system allows it, registered buffers and files
//!                 pread  threads of its own
//!                 mmap   threads of its own, read-ahead by MADV_POPULATE_READ, fault-safe copies
//! ```
//!
//! Limits: `depth` operations in flight; a descriptor budget (see `files`); one length per source, checked when it is
//! opened. Invariants:
//! * The buffer belongs to the operation from `submit` until its `Completion` (or until it is given back by `submit`).
//!   If completion cannot be established, buffer and ring are leaked and counted, never freed.
//! * Every operation ends in exactly one completion: all bytes of the extent, or one error that names path, offset
//!   and length. A short read is continued, a read of 0 before the end is [`ErrorKind::Truncated`](crate::ErrorKind).
//! * A reader is driven by one thread; only its [`Waker`] may be used from others.

mod source;

pub use source::{DirId, Extent, SourceId, Sources};
