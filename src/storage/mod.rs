//! Storage readers: they read extents into buffers. One contract, three implementations, chosen at run time.
//!
//! ```text
//!            ┌─ cached: the page cache has it → the caller copies it at once (RWF_NOWAIT), never blocks
//! Extent ────┤
//!            └─ Reader: submit → … in flight, at most `depth` … → Completion (in any order)
//!                 uring  one ring, O_DIRECT where the file system allows it, registered buffers and files
//!                 pread  its own threads
//!                 mmap   its own threads, read-ahead by MADV_POPULATE_READ, fault-safe copies
//!                 remote objects in stores (feature `remote`); `mixed` gives each read to the reader of its source,
//!                        and asks the `cache` of objects and network mounts first
//! ```
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
mod cache;
pub(crate) mod choice;
mod done;
mod fault_hook;
#[cfg(feature = "unstable")]
pub(crate) mod faulty;
mod files;
pub(crate) mod listing;
mod meta;
mod mixed;
mod mmap;
mod mounts;
pub(crate) mod page_cache;
mod pread;
mod progress;
pub(crate) mod publish;
pub(crate) mod reader;
#[cfg(feature = "remote")]
mod remote;
mod resolve_beneath;
mod retry;
mod source;
mod sys;
mod threads;
mod uring;
pub(crate) mod waker;

/// The stand-in for object stores in a build without the feature.
#[cfg(not(feature = "remote"))]
mod remote {
    use super::meta::{FileKind, Meta};
    use crate::error::{Error, ErrorKind, Result, Stage};
    use crate::meter::Network;
    use std::ffi::OsString;
    use std::ops::Range;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    pub(crate) enum Object {}

    /// Counts the requests that there are none of.
    pub(crate) struct Meter;

    impl Meter {
        pub(crate) fn new() -> Self {
            Self
        }

        pub(crate) fn read(&self) -> Network {
            Network::default()
        }
    }

    fn absent<T>(url: &Path) -> Result<T> {
        let message = "data in object stores needs the feature `remote`; build feedline with it";
        Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(url))
    }

    impl Object {
        pub(crate) fn at(url: &Path, _: u64, _: Option<Arc<str>>) -> Result<Self> {
            absent(url)
        }

        pub(crate) fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
            match *self {}
        }

        pub(crate) fn walk<W: super::Way>(&self, ways: Vec<W>, _: impl Fn(&mut W, &[u8]) -> bool) -> Vec<W> {
            let _ = ways.iter().map(W::next);
            match *self {}
        }

        pub(crate) fn is_pinned(&self) -> bool {
            match *self {}
        }

        pub(crate) fn metered(self, _: &Arc<Meter>) -> Self {
            self
        }

        pub(crate) fn bring(self, _: Range<u64>, _: Option<Duration>, _: Vec<u8>, _: &AtomicBool) -> Result<Vec<u8>> {
            match self {}
        }
    }

    pub(crate) fn look(url: &Path) -> Result<Meta> {
        absent(url)
    }

    pub(crate) fn children(url: &Path) -> Result<Vec<(OsString, FileKind)>> {
        absent(url)
    }

    pub(crate) fn expand(urls: &[String]) -> Result<Vec<PathBuf>> {
        absent(Path::new(urls.first().map_or("", String::as_str)))
    }

    pub(crate) fn configure(store: &str, _: Vec<(String, String)>) -> Result<()> {
        absent(Path::new(store))
    }
}

/// Sets options of an object store, such as `s3://bucket`, in place of the environment's. Later opens and reads of the
/// process use them; objects keep the version that was listed.
///
/// Names are those of the crate [`object_store`](https://docs.rs/object_store): for S3 `region`, `endpoint`,
/// `access_key_id`, `secret_access_key`, `session_token`, `skip_signature`, `virtual_hosted_style_request`, and `profile`
/// for one of `~/.aws`; for GCS `service_account_path`; for Azure `account_name`, `account_key`, `sas_token`. `timeout` is for all stores:
/// a request without an answer or more bytes for so many seconds is tried again (10). Reads of a loader wait at most a
/// twelfth of its stall deadline, so that all tries fit.
///
/// Errors: [`ErrorKind::Config`](crate::ErrorKind) for an unknown option, a missing one, or a build without the feature
/// `remote`. No message shows a value.
///
/// ```
/// # #[cfg(feature = "remote")]
/// feedline::storage::configure("s3://bucket", [("endpoint", "http://localhost:9000"), ("skip_signature", "true")])?;
/// # Ok::<(), feedline::Error>(())
/// ```
pub fn configure(
    store: &str,
    options: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
) -> crate::Result<()> {
    remote::configure(store, options.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
}

pub use blob::Blob;
pub(crate) use blob::Way;
pub(crate) use cache::Announcer;
pub use cache::{Cache, CacheEntry, CacheWarmed};
pub(crate) use choice::{Choice, Opened, RemoteCounts, open};
#[cfg(feature = "unstable")]
pub(crate) use faulty::Faulty;
pub(crate) use files::{Files, descriptor_limit};
pub use listing::{Listed, expand as list};
pub(crate) use meta::{fnv, is_url};
pub(crate) use page_cache::{Cached, PageCache};
pub use publish::publish;
pub(crate) use retry::{Again, exhausted, may_pass, out_of_reach};
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
