//! The state shared by the threads of a cache and its driver. It completes waiting reads, and
//! pauses the use of a full or failing disk.

use super::queue::{BlockId, FillQueue, Waiting};
use crate::cache::CachedBlocks;
use crate::cache::blocks::is_full;
use crate::cache::dir::CacheDir;
use feedline_base::error::{Error, ErrorKind};
use feedline_base::meter::NetworkMeter as Meter;
use feedline_base::sync::Hold;
use feedline_core::storage::mounts::Mounts;
use feedline_core::storage::{Locality, SourceId, Sources};
use feedline_reader::completions::Completions;
use feedline_reader::reader::has_room;
use feedline_reader::{ReadOp, Waker};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Pause before blocks are requested again after a block was not kept.
pub(super) const REST: Duration = Duration::from_secs(10);

pub(super) struct FillState {
    pub(super) sources: Arc<Sources>,
    pub(super) blocks: Arc<CachedBlocks>,
    pub(super) mounts: Mounts,
    pub(super) dir: CacheDir,
    /// How close consecutive samples are in their objects. If they are close, whole blocks are soon
    /// used.
    pub(super) locality: Locality,
    pub(super) patience: Option<Duration>,
    pub(super) queue: Mutex<FillQueue>,
    pub(super) changed: Condvar,
    /// Notified when the loader ends.
    pub(super) ended: Condvar,
    pub(super) done: Completions,
    /// Reads that no longer wait, and whether each must go to the network.
    pub(super) ready: Mutex<Vec<(ReadOp, bool)>>,
    pub(super) waker: Waker,
    pub(super) meter: Arc<Meter>,
    pub(super) stop: AtomicBool,
    /// Number of threads that download.
    pub(super) downloads: usize,
    /// Maximum value of [`Flow::brought`].
    pub(super) brought_max: usize,
    /// Pieces that wait for the sync of their file.
    pub(super) written: Mutex<HashMap<SourceId, WrittenPieces>>,
    /// Whether pieces are used. They are not if boots cannot be distinguished, nor on a mount,
    /// because its other hosts have their own boots.
    pub(super) pieces: bool,
    pub(super) flow: Flow,
    pub(super) started: Instant,
}

/// Current activity, in relaxed atomics. Times are milliseconds since the loader started.
#[derive(Default)]
pub(super) struct Flow {
    /// Numbers of threads: with a task, writing a block, waiting for the sync of pieces.
    pub(super) busy: AtomicUsize,
    pub(super) writers: AtomicUsize,
    pub(super) syncing: AtomicUsize,
    /// Bytes of pieces in progress: in requests, in [`FillQueue::pieces`], and being written.
    pub(super) brought: AtomicUsize,
    /// Requests of reads so far, and the sum of their bytes.
    pub(super) requests: AtomicU64,
    pub(super) requested: AtomicU64,
    /// When the disk may be used again after it was full, and after it failed.
    pub(super) full_until: AtomicU64,
    pub(super) fails_until: AtomicU64,
    /// When the last task ended.
    pub(super) moved: AtomicU64,
}

/// Pieces of a source that are written to its file.
#[derive(Default)]
pub(super) struct WrittenPieces {
    /// Offset of each, and the marks of its units.
    pub(super) pieces: Vec<(u64, Vec<u32>)>,
    /// Number of their bytes that are new.
    pub(super) new: u64,
}

impl FillState {
    pub(super) fn rests(&self, until: &AtomicU64) -> bool {
        let until = until.load(Ordering::Relaxed);
        until > 0 && (self.started.elapsed().as_millis() as u64) < until
    }

    /// Records that something is not kept. For a while, no block is requested; if the disk failed,
    /// nothing is looked up either.
    pub(super) fn rest(&self, why: &str, error: &io::Error) {
        self.blocks.refused(why, error);
        let until = if is_full(error) {
            &self.flow.full_until
        } else {
            &self.flow.fails_until
        };
        until.fetch_max(
            (self.started.elapsed() + REST).as_millis() as u64,
            Ordering::Relaxed,
        );
    }

    /// Completes the reads that wait for an object that cannot be read at all. After an I/O error
    /// or a stall, the reads send their own requests instead.
    pub(super) fn fail(&self, id: BlockId, error: &Error) {
        if matches!(error.kind(), ErrorKind::Io | ErrorKind::Stalled) {
            return;
        }
        let Some(waiting) = self.queue.hold().waiting.remove(&id) else {
            return;
        };
        self.done.extend(waiting.ops.into_iter().map(|op| {
            let error = self.sources.at(error.clone_lossy(), &op.extent);
            op.end(Err(error))
        }));
    }

    /// Completes the reads that wait for this block and need no other block; returns their number.
    pub(super) fn serve(&self, id: BlockId, bytes: &[u8]) -> u64 {
        let Some(waiting) = self.queue.hold().waiting.remove(&id) else {
            return 0;
        };
        let start = id.block * self.blocks.block;
        let (here, others): (Vec<_>, Vec<_>) = waiting.ops.into_iter().partition(|op| {
            op.extent.offset >= start
                && op.extent.offset + op.extent.len <= start + bytes.len() as u64
        });
        let count = here.len() as u64;
        self.done.extend(here.into_iter().map(|mut op| {
            let piece = &bytes[(op.extent.offset - start) as usize..][..op.extent.len as usize];
            let result = has_room(op.buf.len(), piece.len()).map(|()| {
                op.buf.as_mut_slice()[..piece.len()].copy_from_slice(piece);
                0
            });
            let result = result.map_err(|error| self.sources.at(error, &op.extent));
            op.end(result)
        }));
        // These reads need more blocks, and find this one on the disk.
        if !others.is_empty() {
            let mut queue = self.queue.hold();
            let again = queue.waiting.entry(id).or_insert(Waiting {
                ops: Vec::new(),
                since: Some(Instant::now()),
            });
            again.ops.extend(others);
        }
        count
    }

    /// Ends a task, and returns the reads that wait for it to the driver.
    pub(super) fn release(&self, id: BlockId, to_network: bool) {
        let mut queue = self.queue.hold();
        queue.running.remove(&id);
        let waiting = queue.waiting.remove(&id);
        drop(queue);
        if let Some(waiting) = waiting {
            self.give_back(waiting.ops, to_network);
        }
    }

    pub(super) fn give_back(&self, ops: Vec<ReadOp>, to_network: bool) {
        self.ready
            .hold()
            .extend(ops.into_iter().map(|op| (op, to_network)));
        self.waker.wake();
    }

    /// Whether the disk takes blocks now.
    pub(super) fn keeps(&self) -> bool {
        // The network is faster than a disk that most downloads wait for.
        let is_slow = 2 * self.flow.writers.load(Ordering::Relaxed) > self.downloads;
        !(self.rests(&self.flow.full_until) || self.rests(&self.flow.fails_until) || is_slow)
    }
}
