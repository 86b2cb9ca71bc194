//! The reader of objects: reads that are close together in one object share a request.
//!
//! ```text
//! submit ──► pending ──wait: sorted by object and offset──► runs of at most RUN bytes ──► one task each ──► done
//! ```
//!
//! Limits: `depth` reads in flight; gaps of at most [`GAP`] are read and discarded. A task owns the
//! buffers of its reads. An aborted task ends at its next chunk, and its reads complete as
//! cancelled.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::meter::NetworkMeter;
use feedline_core::memory::MemoryTerm;
use feedline_core::storage::{Extent, SourceId, Sources};
use feedline_reader::completions::Completions;
use feedline_reader::counters::{Counters, add};
use feedline_reader::reader::sealed::Sealed;
use feedline_reader::reader::{Keep, NoRoom, count_leaked, has_room};
use feedline_reader::{Completion, DROP_DEADLINE, Footprint, ReadOp, Reader, ReaderOptions, Waker};
use feedline_remote::climb::REQUESTS_MAX;
use feedline_remote::fetch;
use feedline_remote::fetch::Sink;
use feedline_remote::store::{lost, runtime};
use feedline_report::meter::ReadStats;
use futures_util::FutureExt;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Reads in flight by default: single reads of a shuffled order need many at a time, because each
/// waits for its first byte.
const DEPTH: u32 = 256;

/// Maximum size of a connection's read buffer, by the HTTP client's default.
const CONNECTION: usize = (8 << 10) + 100 * (4 << 10);

/// Maximum bytes of one request that serves several reads. At 100 MB/s per connection it takes
/// about the time to the first byte.
const RUN: u64 = 2 << 20;

/// Completions wake the driver together: an eighth of the requests in flight, but at most this
/// many, and after at most [`GATHER_TIME`]. With 64 single reads in flight, each took 210 to 250 µs
/// of system time with its own wake, and 150 to 160 µs with joint wakes.
const GATHER_MAX: usize = 8;
const GATHER_SHARE: usize = 8;
const GATHER_TIME: Duration = Duration::from_millis(1);

/// Interval between a request's checks for room among the bytes that wait for the cache's disk, and
/// the number of checks. Many requests wait at the same time, so a slow disk costs little.
const ROOM_LOOK: Duration = Duration::from_millis(5);
const ROOM_LOOKS: u32 = 10;

/// Maximum bytes between two reads of one request. They cost less than another request.
const GAP: u64 = 64 << 10;

/// Reads extents of objects. Other readers handle files and memory.
pub(crate) struct Remote {
    shared: Arc<RemoteState>,
    pending: Vec<ReadOp>,
    in_flight: usize,
    depth: usize,
}

struct RemoteState {
    sources: Arc<Sources>,
    counters: Counters,
    done: Completions,
    /// Number of requests in flight.
    requests: AtomicUsize,
    /// Whether a task will announce the waiting completions after [`GATHER_TIME`].
    gathers: AtomicBool,
    patience: Option<Duration>,
    /// Number of cancellations so far. A task that began before the latest cancellation must end.
    cancels: AtomicU64,
    cancelled: Notify,
    keep: Option<Arc<dyn Keep>>,
    meter: Arc<NetworkMeter>,
}

impl Remote {
    /// A reader for the objects of `sources`. `files`: wakes the driver, which sleeps in another
    /// reader. `keep` gets the bytes that are read, on the network threads.
    ///
    /// Errors: [`ErrorKind::Io`] if the system refuses threads.
    pub(crate) fn start(
        sources: Arc<Sources>,
        options: &ReaderOptions,
        meter: Arc<NetworkMeter>,
        files: Option<Waker>,
        keep: Option<Arc<dyn Keep>>,
    ) -> Result<Box<dyn Reader>> {
        runtime()?;
        let depth = options.depth.unwrap_or_else(|| {
            options
                .connections
                .map_or(DEPTH, |bytes| ((bytes / CONNECTION) as u32).clamp(4, DEPTH))
        }) as usize;
        let shared = RemoteState {
            sources,
            counters: Counters::default(),
            done: Completions::new(depth, files),
            requests: AtomicUsize::new(0),
            gathers: AtomicBool::new(false),
            patience: options.patience,
            cancels: AtomicU64::new(0),
            cancelled: Notify::new(),
            keep,
            meter,
        };
        let pending = Vec::with_capacity(depth);
        Ok(Box::new(Self {
            shared: Arc::new(shared),
            pending,
            in_flight: 0,
            depth,
        }))
    }

    /// Starts a task for each run of pending reads.
    fn send(&mut self) {
        self.pending
            .sort_unstable_by_key(|op| (op.extent.source, op.extent.offset));
        let mut run: Option<Reads> = None;
        for op in self.pending.drain(..) {
            let Some(op) = self.shared.needs_request(op) else {
                continue;
            };
            match &mut run {
                Some(reads) if reads.takes(&op.extent) => reads.push(op),
                _ => {
                    if let Some(reads) = run.replace(Reads::new(op)) {
                        self.shared.begin(reads);
                    }
                }
            }
        }
        if let Some(reads) = run {
            self.shared.begin(reads);
        }
    }
}

fn end_of(extent: &Extent) -> u64 {
    extent.offset.saturating_add(extent.len)
}

impl RemoteState {
    /// Completes reads that cannot work or need no request.
    fn needs_request(&self, mut op: ReadOp) -> Option<ReadOp> {
        let extent = op.extent;
        let checked = self
            .sources
            .check(&extent)
            .and_then(|()| has_room(op.buf.len(), extent.len as usize));
        match checked {
            Err(error) => self.complete(op, Err(error)),
            Ok(()) if self.sources.copy_resident(&extent, op.buf.as_mut_slice()) => {
                self.complete(op, Ok(0))
            }
            Ok(()) => return Some(op),
        }
        None
    }

    /// Starts the task of a request. This allocates its future and the list of its reads, in
    /// addition to the request's own cost.
    fn begin(self: &Arc<Self>, reads: Reads) {
        let shared = self.clone();
        let cancels = self.cancels.load(Ordering::Acquire);
        match runtime() {
            Ok(runtime) => {
                self.requests.fetch_add(1, Ordering::Relaxed);
                drop(runtime.spawn(async move { shared.run(reads, cancels).await }));
            }
            Err(error) => self.done.extend(
                reads
                    .ops
                    .into_iter()
                    .map(|op| self.end(op, Err(error.clone_lossy()))),
            ),
        }
    }

    fn complete(&self, op: ReadOp, result: Result<usize>) {
        self.done.extend([self.end(op, result)]);
    }

    fn end(&self, op: ReadOp, result: Result<usize>) -> Completion {
        add(&self.counters.ops, 1);
        add(&self.counters.bytes_asked, op.extent.len);
        add(&self.counters.failed, u64::from(result.is_err()));
        let result = result.map_err(|error| self.sources.at(error, &op.extent));
        op.end(result)
    }

    async fn run(self: Arc<Self>, mut reads: Reads, cancels: u64) {
        let mut cancel = std::pin::pin!(self.cancelled.notified());
        let keep = &self.keep;
        if let Some(keep) = keep {
            self.widen(&**keep, &mut reads).await;
        }
        // Listens before it checks, so that no cancellation is missed.
        cancel.as_mut().enable();
        let brought = match self.cancels.load(Ordering::Acquire) == cancels {
            false => Err(cancelled()),
            true => tokio::select! {
                brought = self.bring(&mut reads) => brought,
                () = cancel => Err(cancelled()),
            },
        };
        add(&self.counters.bytes_moved, reads.proven - reads.start);
        add(&self.counters.retries, reads.retries);
        if let (Some(keep), Some(mut bytes)) = (keep, reads.held.take()) {
            bytes.truncate((reads.proven - reads.start) as usize);
            keep.keep(reads.source, reads.start..reads.end, bytes);
        }
        let waiting = self.done.add(reads.ops.into_iter().map(|op| {
            // A read that was proven before a failure is complete.
            let whole = end_of(&op.extent) <= reads.proven;
            let result = if whole {
                Ok(0)
            } else {
                brought.as_ref().map(|()| 0).map_err(Error::clone_lossy)
            };
            self.end(op, result)
        }));
        let enough =
            (self.requests.fetch_sub(1, Ordering::Relaxed) / GATHER_SHARE).clamp(1, GATHER_MAX);
        if waiting >= enough {
            self.done.announce();
        } else if !self.gathers.swap(true, Ordering::AcqRel) {
            tokio::time::sleep(GATHER_TIME).await;
            self.gathers.store(false, Ordering::Release);
            self.done.announce();
        }
    }

    /// Widens a request to the range that the keeper wants. Waits for room for a while.
    async fn widen(&self, keep: &dyn Keep, reads: &mut Reads) {
        for _ in 0..ROOM_LOOKS {
            match keep.wants(reads.source, reads.start, reads.end - reads.start) {
                Ok(Some(range)) => return reads.widen(range),
                Ok(None) => return,
                Err(NoRoom) => tokio::time::sleep(ROOM_LOOK).await,
            }
        }
        keep.pass();
    }

    async fn bring(&self, reads: &mut Reads) -> Result<()> {
        let object = self.sources.object(reads.source)?.metered(&self.meter);
        let range = reads.start..reads.end;
        // A task that panicked would keep the buffers of its reads.
        let patience = object.store.of_run(self.patience);
        let fetched = AssertUnwindSafe(fetch::fetch(&object, range, patience, reads))
            .catch_unwind()
            .await;
        fetched.unwrap_or_else(|_| Err(lost()))
    }
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, Stage::Read, "")
}

/// The reads of one request, sorted by offset; none is empty.
struct Reads {
    ops: Vec<ReadOp>,
    source: SourceId,
    start: u64,
    end: u64,
    /// All bytes before this offset in the object have arrived, and are proven right.
    proven: u64,
    /// End of the last chunk, and the first read that is not complete before it.
    at: u64,
    first: usize,
    retries: u64,
    /// All bytes of the request, if they are to be kept.
    held: Option<Vec<u8>>,
}

impl Reads {
    fn new(op: ReadOp) -> Self {
        let source = op.extent.source;
        let start = op.extent.offset;
        let end = end_of(&op.extent);
        Self {
            ops: vec![op],
            source,
            start,
            end,
            proven: start,
            at: start,
            first: 0,
            retries: 0,
            held: None,
        }
    }

    /// Whether the read `next` joins this request. It must not begin before the reads in the
    /// request.
    fn takes(&self, next: &Extent) -> bool {
        self.source == next.source
            && next.offset <= self.end.saturating_add(GAP)
            && end_of(next).saturating_sub(self.start) <= RUN
    }

    /// Widens the request to a range, and holds all its bytes.
    fn widen(&mut self, range: Range<u64>) {
        (self.start, self.end, self.proven, self.at) =
            (range.start, range.end, range.start, range.start);
        self.held = Some(Vec::with_capacity((range.end - range.start) as usize));
    }

    fn push(&mut self, op: ReadOp) {
        self.end = self.end.max(end_of(&op.extent));
        self.ops.push(op);
    }
}

impl Sink for Reads {
    /// Copies a chunk into every read that it belongs to.
    fn take(&mut self, at: u64, chunk: &[u8]) {
        let end = at + chunk.len() as u64;
        if let Some(held) = &mut self.held {
            held.truncate((at - self.start) as usize);
            held.extend_from_slice(chunk);
        }
        if at < self.at {
            self.first = 0;
        }
        while self
            .ops
            .get(self.first)
            .is_some_and(|op| end_of(&op.extent) <= at)
        {
            self.first += 1;
        }
        for op in &mut self.ops[self.first..] {
            let Extent { offset, len, .. } = op.extent;
            if offset >= end {
                break;
            }
            let from = offset.max(at);
            let to = (offset + len).min(end);
            if from < to {
                let piece = &chunk[(from - at) as usize..(to - at) as usize];
                op.buf.as_mut_slice()[(from - offset) as usize..][..piece.len()]
                    .copy_from_slice(piece);
            }
        }
        self.at = end;
    }

    fn prove(&mut self, end: u64) {
        self.proven = end;
    }

    fn retried(&mut self) {
        self.retries += 1;
    }
}

impl Sealed for Remote {}

impl Reader for Remote {
    fn depth(&self) -> usize {
        self.depth
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        Footprint {
            bytes: usize::try_from(extent.len).unwrap_or(usize::MAX),
            in_place: true,
        }
    }

    fn terms(&self) -> Vec<MemoryTerm> {
        vec![MemoryTerm::NETWORK.of(self.depth.min(REQUESTS_MAX), CONNECTION)]
    }

    fn mem_align(&self) -> usize {
        1
    }

    fn submit(&mut self, op: ReadOp) -> std::result::Result<(), ReadOp> {
        if self.in_flight == self.depth {
            return Err(op);
        }
        self.in_flight += 1;
        self.pending.push(op);
        Ok(())
    }

    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>) {
        self.send();
        self.in_flight -= self.shared.done.wait(out, timeout);
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn cancel(&mut self) {
        let shared = &self.shared;
        shared.done.extend(
            self.pending
                .drain(..)
                .map(|op| shared.end(op, Err(cancelled()))),
        );
        shared.cancels.fetch_add(1, Ordering::AcqRel);
        shared.cancelled.notify_waiters();
    }

    fn waker(&self) -> Waker {
        self.shared.done.waker()
    }

    fn stats(&self) -> ReadStats {
        self.shared.counters.snapshot()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.cancel();
        let deadline = Instant::now() + DROP_DEADLINE;
        let mut out = Vec::new();
        while self.in_flight > 0 && Instant::now() < deadline {
            self.wait(&mut out, Some(deadline - Instant::now()));
        }
        if self.in_flight > 0 {
            // The network threads own these buffers.
            count_leaked(self.in_flight);
        }
    }
}
