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
//! Where to start reading: `progress` (pure: what a read asks for and how it goes on), `files` (descriptors), `pread`
//! (the simplest reader), then `uring`. `open` lies in `choice`.
//!
//! Limits: `depth` operations in flight; a descriptor budget (see `files`); one length per source, checked when it is
//! opened. Invariants:
//! * The buffer belongs to the operation from `submit` until its `Completion` (or until it is given back by `submit`).
//!   If completion cannot be established, buffer and ring are leaked and counted ([`leaked`]), never freed.
//! * Every operation ends in exactly one completion: all bytes of the extent, or one error that names path, offset
//!   and length. A short read is continued, a read of 0 before the end is [`ErrorKind::Truncated`](crate::ErrorKind).
//! * A reader is driven by one thread; only its [`Waker`] may be used from others.

mod attempt;
mod blob;
mod choice;
mod fault_hook;
#[cfg(feature = "test-util")]
mod faulty;
mod files;
pub(crate) mod listing;
mod mmap;
mod page_cache;
mod pread;
mod progress;
pub(crate) mod publish;
mod resolve_beneath;
mod retry;
mod source;
mod sys;
mod threads;
mod uring;
mod waker;

#[cfg(feature = "test-util")]
pub use attempt::Call;
pub(crate) use blob::Blob;
pub use choice::{Choice, Opened, open};
#[cfg(feature = "test-util")]
pub use faulty::{Fault, Faulty, Hit};
pub(crate) use files::{Files, descriptor_limit};
pub use page_cache::{Cached, PageCache};
pub(crate) use retry::{Again, Class, classify, may_pass};
pub use source::{DirId, Extent, SourceId, Sources};
pub use waker::Waker;

#[cfg(test)]
pub(crate) use waker::Bell;

pub use crate::meter::ReadStats;

use crate::error::{Error, Result};
use crate::memory::{ByteRing, IoBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Operations in flight at most, whatever the options say: 16 times what any NVMe queue gains from.
pub const DEPTH_MAX: u32 = 4096;
/// Threads of a pread or mmap reader at most.
pub const THREADS_MAX: u32 = 256;
/// How long dropping a reader waits for what is in flight before it leaks it.
pub const DROP_DEADLINE: Duration = Duration::from_secs(5);

/// Which reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// The page cache first; misses by io_uring where it is to be had, else by pread threads.
    #[default]
    Auto,
    /// io_uring or an error that says why not.
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
    /// Where the file system allows it; under [`Mode::Auto`] only when the dataset does not fit half of the free
    /// memory, since a second epoch then runs from memory. Never for [`Mode::Mmap`].
    ///
    /// A cold first epoch through the page cache costs CPU time, and speed where the device is slow with many small
    /// segments: the kernel puts a random extent into single pages of 4 KiB. Where each sample is read only once,
    /// [`Direct::On`] is better.
    #[default]
    Auto,
    /// Yes, or an error when opening the reader.
    On,
    /// No.
    Off,
}

/// How to open a reader.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReaderOptions {
    /// Which reader.
    pub mode: Mode,
    /// Whether to bypass the page cache.
    pub direct: Direct,
    /// Operations in flight, 1 to [`DEPTH_MAX`]. `None`, the default, is 32, where NVMe devices reach their bandwidth at
    /// 128 KiB; and 128 for io_uring through the page cache, where each operation also takes and fills its pages.
    pub depth: Option<u32>,
    /// Threads of the pread and mmap readers, at most [`THREADS_MAX`]; more than `depth` are never started. 0, the
    /// default, means `depth` of them, but at most 32: each only waits for the device.
    pub threads: u32,
    /// Descriptors that stay open per table (the reader has one, the page cache another). `None`, the default, is a
    /// quarter of the soft `RLIMIT_NOFILE`. More sources than that are opened for each read and closed after it.
    pub fds: Option<u32>,
    /// Whether io_uring registers files and buffers. Default true; off only to measure what it gains.
    pub registered: bool,
    /// For tests: the errno that setting up io_uring shall fail with.
    #[doc(hidden)]
    pub deny_uring: Option<i32>,
    /// For tests: what shall go wrong.
    #[cfg(feature = "test-util")]
    pub faulty: Option<std::sync::Arc<Faulty>>,
}

impl Default for ReaderOptions {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            direct: Direct::Auto,
            depth: None,
            threads: 0,
            fds: None,
            registered: true,
            deny_uring: None,
            #[cfg(feature = "test-util")]
            faulty: None,
        }
    }
}

/// A read to be done: the bytes of `extent` into `buf`.
pub struct ReadOp {
    /// The caller's, given back with the completion.
    pub tag: u64,
    /// Which bytes.
    pub extent: Extent,
    /// Where to: at least [`Reader::footprint`] bytes.
    pub buf: IoBuf,
}

/// A read that ended.
pub struct Completion {
    /// The operation's tag.
    pub tag: u64,
    /// The operation's buffer; the kernel has let go of it.
    pub buf: IoBuf,
    /// Where in `buf` the `len` bytes of the extent start: 0, or more when the read had to be wider than the extent.
    pub result: Result<usize>,
}

/// What a read needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of buffer.
    pub bytes: usize,
    /// Exactly the extent's bytes are read, to the start of the buffer: it may be their final place, provided that it
    /// is aligned to [`Reader::mem_align`] in its region.
    pub in_place: bool,
}

mod sealed {
    use crate::memory::Region;
    use std::sync::Arc;

    pub trait Sealed {
        /// Registers memory that buffers will lie in, so that the kernel pins it once and not for each read; replaces
        /// what was registered before. With nothing in flight, and on the thread that drives the reader. Returns the
        /// reason when it was not to be had; everything works all the same.
        #[allow(private_interfaces, reason = "sealed: nobody outside of the crate can name the trait")]
        fn register(&mut self, regions: &[Arc<Region>]) -> Option<String>;
    }
}
pub(crate) use sealed::Sealed;

/// Brings extents into memory. Driven by one thread: the one that first calls `submit` or `wait`; to hand a reader on
/// to another thread, let it run empty first (`in_flight() == 0`).
///
/// Dropping it cancels and then waits for what is in flight, for at most [`DROP_DEADLINE`]; see [`leaked`].
pub trait Reader: Sealed + Send {
    /// `io_uring`, `pread` or `mmap`.
    fn name(&self) -> &'static str;

    /// Operations in flight at most.
    fn depth(&self) -> usize;

    /// What the read of `extent` needs.
    fn footprint(&self, extent: &Extent) -> Footprint;

    /// Alignment in bytes of every buffer, within its region; a power of two, 1 when it does not matter.
    fn mem_align(&self) -> usize;

    /// Takes a read over; gives it back when `depth` are in flight. It starts with the next [`Reader::wait`].
    ///
    /// An operation that cannot work (a buffer too small, an extent behind the end) is taken too and completes with
    /// the error.
    #[allow(clippy::result_large_err, reason = "the operation itself comes back")]
    fn submit(&mut self, op: ReadOp) -> std::result::Result<(), ReadOp>;

    /// Sends what was submitted as one batch and appends what completed to `out`. Returns when that is at least one,
    /// or after a wake, or after `timeout` (`None`: never; zero: looks once). It may also return early with nothing, and
    /// up to 1 ms late where many small reads are in flight and their completions are worth gathering.
    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>);

    /// Operations submitted whose completion was not handed out yet.
    fn in_flight(&self) -> usize;

    /// Asks for what is in flight to end soon. Every operation still completes: well, with its own error or with
    /// [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled).
    fn cancel(&mut self);

    /// Ends a `wait` from any thread.
    fn waker(&self) -> Waker;

    /// What it did so far.
    fn stats(&self) -> ReadStats;

    /// Why it cannot read any more, if so. What is in flight may then never complete.
    fn broken(&self) -> Option<Error> {
        None
    }

    /// Registers a ring's memory with the kernel (see [`ReadStats::registered_buffers`]); the loader does that itself
    /// for its own. Returns the reason when it was not to be had, which is no error.
    fn register_ring(&mut self, ring: &ByteRing) -> Option<String> {
        self.register(std::slice::from_ref(ring.region()))
    }
}

/// Operations of this process whose end could not be established within [`DROP_DEADLINE`]: their buffers were leaked,
/// because the kernel may still write to them. Not 0 means a device that does not answer.
pub fn leaked() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

static LEAKED: AtomicU64 = AtomicU64::new(0);

fn count_leaked(ops: usize) {
    LEAKED.fetch_add(ops as u64, Ordering::Relaxed);
}

/// [`ReadStats`] for readers with threads of their own: relaxed counters, each a statistic and nothing else.
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
