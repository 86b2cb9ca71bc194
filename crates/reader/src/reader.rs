//! The contract of a reader: `submit` takes operations, `wait` returns completions. See the
//! module's invariants.

use crate::Waker;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
#[cfg(feature = "unstable")]
use feedline_core::memory::ByteRing;
use feedline_core::memory::{IoBuf, MemoryTerm};
use feedline_core::storage::Locality;
use feedline_core::storage::{Direct, Extent, Mode, SourceId};
use feedline_report::meter::ReadStats;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use sealed::Sealed;

/// Maximum number of operations in flight for all options: 16 times the depth that any NVMe queue benefits
/// from.
pub const DEPTH_MAX: u32 = 4096;
/// Maximum number of threads in a pread or mmap reader.
pub const THREADS_MAX: u32 = 256;
/// Deadline for operations in flight when a reader is dropped. Operations that take longer are
/// leaked.
pub const DROP_DEADLINE: Duration = Duration::from_secs(5);

/// Options to open a reader.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ReaderOptions {
    /// The choice of reader.
    pub mode: Mode,
    /// Whether to bypass the page cache.
    pub direct: Direct,
    /// Operations in flight, 1 to [`DEPTH_MAX`]. `None`, the default, is 32: at this depth, NVMe
    /// devices reach their bandwidth with reads of 128 KiB. For io_uring through the page cache it
    /// is 128, because each operation also allocates and fills its pages. It is also 128 on network
    /// mounts, because each waits for a server.
    pub depth: Option<u32>,
    /// Threads of the pread and mmap readers, at most [`THREADS_MAX`] and never more than `depth`.
    /// 0, the default, means `depth` threads, but at most 32, and 128 on network mounts: each only
    /// waits for the device.
    pub threads: u32,
    /// Descriptors that stay open per table (the reader has one table, the page cache another).
    /// `None`, the default, is a quarter of the soft `RLIMIT_NOFILE`. With more sources than that,
    /// each read opens and closes its file.
    pub fds: Option<u32>,
    /// io_uring registers neither files nor buffers; only to measure their gain.
    pub unregistered: bool,
    /// Maximum time that a request to a store may receive no byte.
    pub patience: Option<std::time::Duration>,
    /// Maximum memory for connections, which bounds the default depth.
    pub connections: Option<usize>,
    /// Whether consecutive samples are close together in storage.
    pub locality: Locality,
    /// For tests: the errno with which the setup of io_uring fails.
    #[doc(hidden)]
    pub deny_uring: Option<i32>,
    /// For tests: the faults to inject.
    #[cfg(feature = "unstable")]
    pub faulty: Option<std::sync::Arc<super::Faulty>>,
}

/// A read to do: it puts the bytes of `extent` into `buf`.
pub struct ReadOp {
    /// The caller's tag, returned with the completion.
    pub tag: u64,
    /// The bytes to read.
    pub extent: Extent,
    /// The destination, at least [`Reader::footprint`] bytes.
    pub buf: IoBuf,
}

impl ReadOp {
    /// The completion of this read.
    pub fn end(self, result: Result<usize>) -> Completion {
        Completion {
            tag: self.tag,
            buf: self.buf,
            result,
        }
    }

    /// The completion of a read that was cancelled before it began.
    pub fn cancelled(self) -> Completion {
        let Extent { offset, len, .. } = self.extent;
        self.end(Err(
            Error::new(ErrorKind::Cancelled, Stage::Read, "").with_range(offset, len)
        ))
    }
}

/// The error of [`Keep::wants`] if too many bytes already wait to be written to the disk.
pub struct NoRoom;

/// Keeps the bytes that requests to stores return.
pub trait Keep: Send + Sync {
    /// The range to request instead of this one, if its bytes are to be kept. The keeper chooses
    /// the bounds, and a call of [`keep`](Self::keep) follows. `Err`: there is no room now.
    fn wants(
        &self,
        source: SourceId,
        offset: u64,
        len: u64,
    ) -> std::result::Result<Option<Range<u64>>, NoRoom>;

    /// Records that a range is read but not kept, for lack of room.
    fn pass(&self);

    /// Takes the bytes received of a range that [`wants`](Self::wants) returned: all of them, or a
    /// correct prefix.
    fn keep(&self, source: SourceId, range: Range<u64>, bytes: Vec<u8>);
}

/// Errors: [`ErrorKind::Config`] for a buffer that is too small for a read.
pub fn has_room(room: usize, needed: usize) -> Result<()> {
    if room >= needed {
        return Ok(());
    }
    let message = format!("the buffer has {room} bytes, but the read needs {needed}");
    Err(Error::new(ErrorKind::Config, Stage::Read, message))
}

/// A completed read.
pub struct Completion {
    /// The operation's tag.
    pub tag: u64,
    /// The operation's buffer. The kernel has released it.
    pub buf: IoBuf,
    /// Offset in `buf` of the extent's `len` bytes: 0, or more if the read had to be wider than the
    /// extent.
    pub result: Result<usize>,
}

/// The requirements of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of buffer that the read needs.
    pub bytes: usize,
    /// Whether the read puts exactly the extent's bytes at the start of the buffer. Such a buffer
    /// may be their final place, if it is aligned to [`Reader::mem_align`] in its region.
    pub in_place: bool,
}

pub mod sealed {
    use feedline_core::memory::Region;
    use std::sync::Arc;

    pub trait Sealed {
        /// Registers memory for buffers, so that the kernel pins it once and not for each read.
        /// Replaces the memory registered before. Call it on the thread that drives the reader,
        /// with nothing in flight. Returns the reason if registration failed; the reader works
        /// without it. Only io_uring registers memory.
        #[allow(
            private_interfaces,
            reason = "sealed: no code outside of the crate can name the trait"
        )]
        fn register(&mut self, _: &[Arc<Region>]) -> Option<String> {
            None
        }
    }
}

/// Reads extents into memory. One thread drives it: the first one that calls `submit` or `wait`.
/// Another thread may take over once the reader is empty (`in_flight() == 0`).
///
/// Dropping it cancels the operations in flight, and waits for them for at most [`DROP_DEADLINE`];
/// see [`leaked`].
pub trait Reader: Sealed + Send {
    /// Maximum number of operations in flight.
    fn depth(&self) -> usize;

    /// The requirements of a read of `extent`.
    fn footprint(&self, extent: &Extent) -> Footprint;

    /// Memory that the reader needs besides the buffers of its reads.
    fn terms(&self) -> Vec<MemoryTerm> {
        Vec::new()
    }

    /// Alignment in bytes of every buffer within its region; a power of two, 1 for none.
    fn mem_align(&self) -> usize;

    /// Takes a read; returns it if `depth` operations are in flight. The read starts with the next
    /// [`Reader::wait`].
    ///
    /// An operation that cannot work (a buffer too small, an extent past the end) is taken, too,
    /// and completes with the error.
    #[allow(clippy::result_large_err, reason = "the operation itself comes back")]
    fn submit(&mut self, op: ReadOp) -> std::result::Result<(), ReadOp>;

    /// Sends the submitted operations as one batch and appends completions to `out`. Returns after
    /// at least one completion, a wake, or `timeout` (`None`: no timeout; zero: checks once). It
    /// may return early without a completion. It may return up to 1 ms late if many small reads are
    /// in flight, to gather their completions. Neither `submit` nor `wait` blocks on storage: a
    /// hung read must not hold the planner.
    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>);

    /// Submitted operations whose completion was not returned yet.
    fn in_flight(&self) -> usize;

    /// Makes the operations in flight end soon. Every operation still completes: with success, with
    /// its own error or with `ErrorKind::Cancelled`.
    fn cancel(&mut self);

    /// A handle that ends a `wait` from any thread.
    fn waker(&self) -> Waker;

    /// The statistics so far.
    fn stats(&self) -> ReadStats;

    /// Why the reader can no longer read, if so. Operations in flight may then never complete.
    fn broken(&self) -> Option<Error> {
        None
    }

    /// Registers a ring's memory with the kernel (see [`ReadStats::registered_buffers`]). The
    /// loader does that itself for its own rings. Returns the reason if registration failed, which
    /// is no error.
    #[cfg(feature = "unstable")]
    fn register_ring(&mut self, ring: &ByteRing) -> Option<String> {
        self.register(std::slice::from_ref(ring.region()))
    }
}

/// Operations of this process that did not end within [`DROP_DEADLINE`]. Their buffers were leaked,
/// because the kernel may still write to them. A number above 0 means that a device does not
/// answer.
pub fn leaked() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

static LEAKED: AtomicU64 = AtomicU64::new(0);

pub fn count_leaked(ops: usize) {
    LEAKED.fetch_add(ops as u64, Ordering::Relaxed);
}
