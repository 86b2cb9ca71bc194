//! The pipeline: from an order to full slots, in bounded memory, without a thread that waits for another's permit.
//!
//! ```text
//!                    ┌────────────── I/O thread (plans, reads) ──────────────┐
//!   free slots ────► │ plan batch i ─► rows ─┬─► Reader ─► completions ──┐    │
//!                    └───────────▲───────────┼──────────────────────────┼────┘
//!                        misses  │           │ rows to look up          │ bytes to decode
//!                    ┌───────────┴───────────▼──────────────────────────▼────┐
//!                    │ decode workers (private rayon pool): page cache or     │
//!                    │ memory → decode → transform → row of the slot          │
//!                    └───────────────────────────┬────────────────────────────┘
//!                         last row of a slot ────▼──► ready ─► Epoch::next (restores the order) ─► Batch
//! ```
//!
//! With a GPU the [`transfer`] thread stands between the last row and `ready`: it restores the order and copies.
//!
//! A batch's rows go one of two ways. When the page cache is likely to hold them (or they lie in memory), workers look
//! them up themselves and decode what they find; what is missing comes back to the I/O thread. Otherwise the I/O
//! thread reads them at once, and one run of rows per batch still asks the cache, so that it is noticed when it warms.
//!
//! Datasets in chunks go another way, see [`chunks`]: the I/O thread has chunks opened ahead of the batches, and rows are
//! gathered from open ones.
//!
//! # Why it cannot deadlock
//!
//! Permits are slots, bytes of the ring, buffers of chunks, and entries for samples in flight. All are taken by the I/O thread alone,
//! slots in batch order. A sample takes ring bytes and an entry only when it already has its row, and takes them all
//! at once; from then on it needs nothing but the storage device and a worker. So every holder of ring bytes finishes
//! without waiting for anybody, room comes back, and by induction over the batches the oldest unfinished one always
//! can finish. Workers take no permits and wait for nobody: what they cannot do at once goes to a queue whose room is
//! bounded by the permits. (When a read has failed, or a sample cannot be had, a worker reads itself, and then waits for
//! storage, which waits for nobody.) The consumer waits for the oldest batch only; when it holds every slot itself, `next()`
//! says so after a deadline.
//!
//! # Memory
//!
//! [`plan::MemoryPlan`] is the sum, a line and a reason for each term; `build()` reserves it. Several loaders may share a
//! [`Budget`](crate::Budget).
//!
//! # Faults
//!
//! A read that failed for a reason that may pass is tried again, a sample that cannot be had is replaced or ends the iterator:
//! [`recover`]. Who waits for a batch can say what does not answer: [`watchdog`].
//!
//! # Ending
//!
//! Dropping an epoch marks its job cancelled: rows not yet begun are dropped (which brings their slot back), reads in
//! flight complete into memory that nobody looks at. Dropping the loader ends the I/O thread after its last completion
//! and joins the workers; what does not answer within the deadline is left behind with all the memory it can reach,
//! and counted.

pub(crate) mod chunks;
#[cfg(feature = "cuda")]
pub(crate) mod direct;
pub(crate) mod fetch;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod pending;
pub(crate) mod placement;
pub(crate) mod plan;
pub(crate) mod queue;
pub(crate) mod recipe;
pub(crate) mod recover;
pub(crate) mod route;
pub(crate) mod runtime;
#[cfg(feature = "cuda")]
pub(crate) mod transfer;
pub(crate) mod watchdog;
pub(crate) mod work;

pub use placement::Numa;
pub use plan::MemoryPlan;
pub use recover::OnBadSample;
pub use route::{FieldRoute, Gds, Route};

use crate::batch::Contents;
use crate::dataset::Dataset;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::{ByteRing, Filled, FreeSlot, Hooks, Lease, Region, Rows, Ticket};
use crate::meter::{Meters, Stay};
use crate::order::{Batches, EpochOrder};
use crate::storage::{PageCache, Sources, Waker};
use crossbeam_channel::{Receiver, Sender};
use recipe::Recipe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// One epoch being planned and filled.
pub(crate) struct Job {
    pub(crate) generation: u64,
    pub(crate) epoch: u64,
    pub(crate) order: EpochOrder,
    pub(crate) batches: Batches,
    /// Shared by all epochs of one iterator.
    pub(crate) cancelled: Arc<AtomicBool>,
}

impl Job {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Position in the epoch of the first unfinished row; past its end for rows that fill up.
    pub(crate) fn position(&self, rows: &Rows) -> u64 {
        self.batches.position(rows.ticket().batch, rows.first())
    }

    /// Sample id of the first unfinished row.
    pub(crate) fn id_of(&self, rows: &Rows) -> Result<u64> {
        self.order.id(self.position(rows))
    }
}

/// What every thread of a loader knows.
pub(crate) struct Core {
    pub(crate) dataset: Arc<dyn Dataset>,
    /// The first sample of every chunk and the number of all, as they were when the loader was built.
    pub(crate) chunk_starts: Option<Arc<[u64]>>,
    pub(crate) sources: Arc<Sources>,
    /// Nothing lies in storage.
    pub(crate) in_memory: bool,
    /// Some field of the dataset is not wanted.
    pub(crate) skips: bool,
    pub(crate) recipe: Recipe,
    pub(crate) seed: u64,
    pub(crate) cache: Option<Arc<PageCache>>,
    pub(crate) work: work::Workers,
    pub(crate) to_io: ToIo,
    pub(crate) exchange: Arc<Exchange>,
    /// The error of the loader as a whole: set once, ends every iterator.
    pub(crate) fatal: std::sync::Mutex<Option<Option<Error>>>,
    pub(crate) meters: Arc<Meters>,
    /// What becomes of rows whose sample cannot be had.
    pub(crate) recovery: recover::Recovery,
    /// Who is at work on what.
    pub(crate) watch: watchdog::Watch,
    /// Heap bytes that decoders may take on each worker.
    pub(crate) scratch_limit: usize,
    /// Why io_uring reads into memory that is not registered, if so.
    pub(crate) unregistered: std::sync::OnceLock<String>,
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) dozing: transfer::Dozing,
}

impl Core {
    /// Notes an error that no batch can carry. The iterator finds it when it waits.
    pub(crate) fn fail(&self, error: Error) {
        self.fatal.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(Some(error));
    }

    /// The error of the loader as a whole, if there is one; in full for the first who asks.
    pub(crate) fn trouble(&self) -> Option<Error> {
        let mut fatal = self.fatal.lock().unwrap_or_else(|poison| poison.into_inner());
        let error = fatal.as_mut()?.take();
        Some(error.unwrap_or_else(|| Error::new(ErrorKind::Cancelled, Stage::Batch, "the loader failed before")))
    }
}

/// The way to the I/O thread: queues whose room is bounded by the permits, and a bell.
pub(crate) struct ToIo {
    /// Runs to plan, newest last. Not in a channel of limited room: whoever starts epochs must never wait for the I/O
    /// thread, nor the I/O thread, which frees slots itself, for them.
    pub(crate) starts: queue::Queue<Start>,
    /// The I/O thread shall end.
    pub(crate) shutdown: AtomicBool,
    pub(crate) misses: queue::Queue<Miss>,
    /// Chunks that the page cache does not hold.
    pub(crate) chunk_misses: queue::Queue<chunks::Opening>,
    pub(crate) idle: Sender<Box<pending::Pending>>,
    pub(crate) waker: Waker,
}

impl ToIo {
    /// Has a run of epochs planned. Runs that were cancelled meanwhile make room.
    pub(crate) fn start(&self, start: Start) {
        self.starts.retain(|start| !start.first.is_cancelled());
        self.starts.push(start);
        self.waker.wake();
    }

    /// The loader ends.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_ending(&self) -> bool {
        self.shutdown.load(Ordering::Acquire)
    }

    /// An entry for a sample in flight is free again.
    pub(crate) fn give_back(&self, pending: Box<pending::Pending>) {
        if self.idle.send(pending).is_ok() {
            self.waker.wake();
        }
    }
}

/// A run of epochs to plan.
pub(crate) struct Start {
    pub(crate) first: Arc<Job>,
    /// Epochs in the run, and batches at most.
    pub(crate) epochs: u64,
    pub(crate) batches: u64,
    /// Makes the job of a later epoch of the run.
    pub(crate) next: Box<dyn Fn(u64) -> Result<Arc<Job>> + Send>,
}

/// A row whose bytes must come from storage.
pub(crate) struct Miss {
    pub(crate) job: Arc<Job>,
    pub(crate) rows: Rows,
}

/// Where slots go: full ones to the iterator (through `.map_batch`, if there is one), free ones to the planner.
pub(crate) struct Exchange {
    /// The iterator's run; slots of older runs are not worth handing out.
    pub(crate) generation: AtomicU64,
    pub(crate) ready: Sender<Contents>,
    pub(crate) ready_out: Receiver<Contents>,
    /// Where full slots go first when batches are handed out on a device.
    pub(crate) to_device: Option<ToDevice>,
    pub(crate) frees: Sender<FreeSlot>,
    pub(crate) frees_out: Receiver<FreeSlot>,
    /// The loader is gone: what still arrives in the channels is taken out again. Slots know this exchange, so one that
    /// lay in its channels for ever would keep both alive.
    pub(crate) closed: crate::sync::Flag,
    pub(crate) waker: Waker,
    /// Full slots that `.map_batch` must see first; its receiver is the workers.
    pub(crate) to_map: Option<Sender<Filled>>,
    pub(crate) meters: Arc<Meters>,
    /// Rings when something was put into `to_map`.
    pub(crate) map_bell: std::sync::OnceLock<std::sync::Weak<Core>>,
    /// What the loader took of a shared budget. Threads and slots all know this exchange, so it is given back with the last
    /// of the memory, and not while a batch is held.
    #[allow(dead_code, reason = "held for its Drop")]
    pub(crate) lease: Option<Lease>,
}

/// The way to the transfer thread.
pub(crate) struct ToDevice {
    pub(crate) full: Sender<Filled>,
    pub(crate) full_out: Receiver<Filled>,
    /// Something ended: look.
    pub(crate) bell: Sender<()>,
}

impl Hooks for Arc<Exchange> {
    fn full(&self, slot: Filled) {
        let now = self.meters.clock.now();
        slot.times().full.store(now, Ordering::Relaxed);
        self.meters.move_slot(slot.times(), Stay::Full, now);
        if slot.ticket().generation != self.generation.load(Ordering::Acquire) {
            return drop(slot);
        }
        if let (Some(to_map), false) = (&self.to_map, slot.failed()) {
            if to_map.send(slot).is_ok()
                && let Some(core) = self.map_bell.get().and_then(std::sync::Weak::upgrade)
            {
                work::ring(&core, 1);
            }
            return;
        }
        self.hand_out(slot);
    }

    fn free(&self, slot: FreeSlot) {
        self.meters.move_slot(slot.times(), Stay::Free, self.meters.clock.now());
        // It has room for every slot, and its receiver lives in `self`.
        let _ = self.frees.send(slot);
        if self.closed.load(Ordering::SeqCst) {
            return self.empty();
        }
        self.waker.wake();
    }
}

impl Exchange {
    /// Puts a full slot where the iterator takes it, or the transfer thread. The channels have room for every slot there is.
    pub(crate) fn hand_out(&self, slot: Filled) {
        match &self.to_device {
            Some(to_device) => drop(to_device.full.send(slot)),
            None => drop(self.ready.send(Contents::Host(slot))),
        }
        self.empty_if_closed();
    }

    /// For whoever has put something into a channel: nobody looks there after the end.
    pub(crate) fn empty_if_closed(&self) {
        if self.closed.load(Ordering::SeqCst) {
            self.empty();
        }
    }

    /// After the threads have ended. Whoever sends later sees the flag, or was seen here: both are totally ordered.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.empty();
    }

    /// A run ended: whoever waits for its slots shall look.
    pub(crate) fn ring(&self) {
        self.waker.wake();
        if let Some(to_device) = &self.to_device {
            // Full: it will look anyhow.
            let _ = to_device.bell.try_send(());
        }
    }

    fn empty(&self) {
        while self.ready_out.try_recv().is_ok() {}
        while self.to_device.as_ref().is_some_and(|to_device| to_device.full_out.try_recv().is_ok()) {}
        while self.frees_out.try_recv().is_ok() {}
    }
}

/// A run's place of every batch: tickets count across its epochs.
pub(crate) fn ticket(job: &Job, sequence: u64, batch: u64) -> Ticket {
    let position = job.batches.position(batch, 0);
    Ticket { generation: job.generation, sequence, epoch: job.epoch, batch, position }
}

/// Receivers that the I/O thread owns.
pub(crate) struct IoSide {
    pub(crate) frees: Receiver<FreeSlot>,
    pub(crate) idle: Receiver<Box<pending::Pending>>,
    pub(crate) ring: Option<ByteRing>,
    /// Where the memory of chunks is, for datasets in chunks, and how many buffers there are.
    pub(crate) chunks: Option<(Arc<chunks::Home>, usize)>,
    /// What the reader may register with the kernel.
    pub(crate) regions: Vec<Arc<Region>>,
}
