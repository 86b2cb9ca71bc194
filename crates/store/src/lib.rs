//! The choice of readers, the reader of objects, and the local cache of objects and network mounts.
//!
//! ```text
//! extents ──► router ──► cache, if it has the blocks ──► the reader of files
//!                │  └──► objects in stores (feature `remote`), whose bytes the cache keeps
//!                └─────► the reader of files: io_uring, pread or mmap
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

pub mod cache;
pub mod choice;
#[cfg_attr(not(feature = "remote"), path = "no_remote.rs")]
mod remote;
mod router;

pub use cache::{Announcer, Cache, CacheEntry, CacheWarmed};
#[cfg(feature = "unstable")]
pub use choice::open;
pub use choice::{Choice, Opened, RemoteCounts, open_cached};
