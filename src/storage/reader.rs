//! The contract of a reader: operations go in by `submit`, completions come out of `wait`. See the module's invariants.

use super::{Direct, Extent, Mode, ReadStats, Waker};
use crate::error::{Error, Result};
#[cfg(feature = "unstable")]
use crate::memory::ByteRing;
use crate::memory::IoBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) use sealed::Sealed;

/// Operations in flight at most, whatever the options say: 16 times what any NVMe queue gains from.
pub const DEPTH_MAX: u32 = 4096;
/// Threads of a pread or mmap reader at most.
pub const THREADS_MAX: u32 = 256;
/// How long dropping a reader waits for what is in flight before it leaks it.
pub const DROP_DEADLINE: Duration = Duration::from_secs(5);

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
    #[cfg(feature = "unstable")]
    pub faulty: Option<std::sync::Arc<super::Faulty>>,
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
            #[cfg(feature = "unstable")]
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
    /// up to 1 ms late where many small reads are in flight and their completions are worth gathering. Neither `submit` nor
    /// `wait` blocks on storage: a hung read must not hold the planner.
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
    #[cfg(feature = "unstable")]
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

pub(super) fn count_leaked(ops: usize) {
    LEAKED.fetch_add(ops as u64, Ordering::Relaxed);
}
