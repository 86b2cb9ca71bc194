//! The queues between the threads, and the wake that follows each `push`. Threads interact only
//! through these.
//!
//! ```text
//! iterator ──starts──►┌─────────┐──rows to fill, fetched bytes────────────►┌─────────┐
//!                     │ planner │                                          │ workers │──► slots to map, bad rows: to
//!        ┌───frees───►│         │◄──misses, chunk misses, samples──────────│         │◄── themselves
//!        │            └─────────┘                                          └────┬────┘
//!     dropped batch ◄── iterator ◄──ready── [transfer thread ◄──full──] last row┘
//! ```
//!
//! [`ToIo`] and [`ToWorkers`] are dropped with the loader's core. Slots hold the [`Exchange`], so
//! it lives as long as a batch is held. Items that arrive after the end are therefore removed
//! again.

use super::chunks::Held;
use super::drains::{Drains, Turns};
use super::fetch::Fetch;
use super::queue::Queue;
use super::sample::Samples;
use super::task::{EpochJob, RowRun, Sample};
use crate::batch::Contents;
use crossbeam_channel::{Receiver, Sender};
use feedline_base::error::{Error, Result};
use feedline_core::memory::{Filled, FreeSlot, Hooks, Lease};
use feedline_reader::Waker;
use feedline_report::meter::{Meters, Stay};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of the rows that a worker takes at a time. Large enough to hide the cost of taking them,
/// small enough that all workers finish a batch together.
const RUN_BYTES: usize = 512 << 10;

/// The queues to the I/O thread, and its waker. Permits (see [`pipeline`](super)) bound their
/// lengths.
pub(crate) struct ToIo {
    /// Runs of epochs to plan, newest last. The queue has no bound: starting an epoch must never
    /// wait for the I/O thread, and the I/O thread, which frees slots itself, must not wait for the
    /// thread that starts the epoch.
    pub(crate) starts: Queue<Start>,
    /// Tells the I/O thread to end.
    pub(crate) shutdown: AtomicBool,
    /// Rows, one per run, that missed the page cache.
    pub(crate) misses: Queue<RowRun>,
    /// Chunks that missed the page cache.
    pub(crate) chunk_misses: Queue<Fetch>,
    /// Workers return permits for samples in flight through this channel.
    pub(crate) idle: Sender<Box<Sample>>,
    pub(crate) waker: Waker,
}

impl ToIo {
    /// Queues a run of epochs for planning, and drops cancelled runs from the queue.
    pub(crate) fn start(&self, start: Start) {
        self.starts.retain(|start| !start.first.is_cancelled());
        self.starts.push(start);
        self.waker.wake();
    }

    /// Whether the loader is shutting down.
    pub(crate) fn is_ending(&self) -> bool {
        self.shutdown.load(Ordering::Acquire)
    }

    /// Returns a permit for a sample in flight.
    pub(crate) fn give_back(&self, mut sample: Box<Sample>) {
        sample.clear();
        if self.idle.send(sample).is_ok() {
            self.waker.wake();
        }
    }
}

/// A run of epochs to plan.
pub(crate) struct Start {
    pub(crate) first: Arc<EpochJob>,
    /// Batches of the run.
    pub(crate) batches: u64,
    /// Makes the next job: for a later epoch, or for batches of the same epoch that follow skipped
    /// batches.
    pub(crate) next: Box<dyn FnMut() -> Result<Arc<EpochJob>> + Send>,
}

/// Rows for a worker to fill.
pub(crate) struct ToFill {
    pub(crate) run: RowRun,
    /// The open chunks that contain the rows. `None` for a dataset without chunks, whose rows a
    /// worker looks up in memory or the page cache.
    pub(crate) held: Option<Arc<Held>>,
}

/// A row that waits for a substitute.
pub(crate) struct BadRow {
    /// One row.
    pub(crate) run: RowRun,
    pub(crate) id: u64,
    pub(crate) error: Error,
    /// For a chunked dataset: the chunks of the row's piece, and the index of the row's chunk among
    /// them.
    pub(crate) held: Option<(Arc<Held>, usize)>,
}

/// Numbers of items that determine the sizes of the queues to the workers.
pub(crate) struct Capacity {
    pub(crate) slots: usize,
    pub(crate) samples: usize,
    pub(crate) chunks: usize,
    pub(crate) row_bytes: usize,
}

/// The queues to the workers. Work is kept in queues of this crate, so that the pool allocates
/// memory per drain and not per sample.
pub(crate) struct ToWorkers {
    pub(crate) drains: Arc<Drains>,
    /// Rows to look up, and rows whose chunks are open. A worker takes a part of an entry at a
    /// time.
    to_fill: Queue<ToFill>,
    /// Rows whose bytes are in memory, and chunks to open.
    fetched: Queue<Fetch>,
    /// Rows that wait for a substitute.
    pub(crate) bad: Turns<BadRow>,
    /// Whether failed samples are substituted.
    substitutes: bool,
    /// Full slots on which `.map_batch` must still run.
    maps: Option<Receiver<Filled>>,
    run_rows: u32,
    meters: Arc<Meters>,
}

impl ToWorkers {
    pub(crate) fn new(
        drains: Arc<Drains>,
        maps: Option<Receiver<Filled>>,
        substitutes: bool,
        room: &Capacity,
        meters: Arc<Meters>,
    ) -> Self {
        Self {
            drains,
            // A batch is cut into a piece at each chunk boundary, so small chunks make many pieces.
            to_fill: Queue::with_room(4 * room.slots),
            fetched: Queue::with_room(room.samples.max(room.chunks)),
            bad: Turns::new(),
            substitutes,
            maps,
            run_rows: (RUN_BYTES / room.row_bytes.max(1)).clamp(1, 1 << 16) as u32,
            meters,
        }
    }

    fn put<T>(&self, queue: &Queue<T>, item: T, runs: usize) {
        self.meters.decode.queued.enter(1, self.meters.clock.now());
        queue.push(item);
        self.drains.wake(runs);
    }

    /// Queues rows for the workers: rows to look up, or rows whose chunks are open.
    pub(crate) fn fill(&self, run: RowRun, held: Option<Arc<Held>>) {
        let runs = run.len().div_ceil(self.run_rows) as usize;
        self.put(&self.to_fill, ToFill { run, held }, runs);
    }

    /// Queues a row whose bytes are in memory, or a chunk to open.
    pub(crate) fn finish(&self, fetch: Fetch) {
        self.put(&self.fetched, fetch, 1);
    }

    /// Handles the failed sample of the first row; `error` names it. The row waits for a substitute
    /// if the policy allows substitutes and a substitute may help. Otherwise its batch gets the
    /// error.
    pub(crate) fn row_failed(
        &self,
        samples: &Samples,
        run: &mut RowRun,
        id: Option<u64>,
        error: Error,
        held: Option<(&Arc<Held>, usize)>,
    ) {
        match id {
            Some(id)
                if self.substitutes
                    && samples.blames_sample(&error)
                    && !run.rows.fails_anyway() =>
            {
                let held = held.map(|(held, entry)| (held.clone(), entry));
                self.bad.push(BadRow {
                    run: run.take(1),
                    id,
                    error,
                    held,
                });
                self.drains.wake(1);
            }
            _ => run.rows.fail_row(error),
        }
    }

    /// The next slot for `.map_batch`.
    pub(crate) fn take_map(&self) -> Option<Filled> {
        self.maps.as_ref()?.try_recv().ok()
    }

    /// Takes some rows of the oldest run to fill, and returns whether they are the run's last rows.
    pub(crate) fn take_rows(&self) -> Option<(ToFill, bool)> {
        let mut queue = self.to_fill.lock();
        let ToFill { run, held } = queue.front_mut()?;
        if run.len() > self.run_rows {
            return Some((
                ToFill {
                    run: run.take(self.run_rows),
                    held: held.clone(),
                },
                false,
            ));
        }
        queue.pop_front().map(|rows| (rows, true))
    }

    pub(crate) fn take_fetched(&self) -> Option<Fetch> {
        self.fetched.pop()
    }

    /// Whether no work is waiting, except bad rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.to_fill.is_empty()
            && self.fetched.is_empty()
            && self.maps.as_ref().is_none_or(|maps| maps.is_empty())
    }

    /// Drops all remaining work.
    pub(crate) fn let_go(&self) {
        self.to_fill.clear();
        self.fetched.clear();
        self.bad.clear();
        while self.take_map().is_some() {}
    }
}

/// The channels of slots: full slots go to the iterator (through `.map_batch`, if set), free slots
/// to the planner.
pub(crate) struct Exchange {
    /// The iterator's current run. Older runs are cancelled, and their slots are not delivered.
    pub(crate) generation: Arc<AtomicU64>,
    pub(crate) ready: Sender<Contents>,
    pub(crate) ready_out: Receiver<Contents>,
    /// Full slots go here first when batches are delivered on a device.
    pub(crate) to_device: Option<ToDevice>,
    pub(crate) frees: Sender<FreeSlot>,
    pub(crate) frees_out: Receiver<FreeSlot>,
    /// The loader is gone, so slots that still arrive are removed from the channels. A slot holds
    /// this exchange, so a slot left in a channel would keep both alive forever.
    pub(crate) closed: feedline_base::sync::Flag,
    pub(crate) waker: Waker,
    /// Full slots that `.map_batch` must see first; the workers have the receiver.
    pub(crate) to_map: Option<Sender<Filled>>,
    pub(crate) drains: Arc<Drains>,
    pub(crate) meters: Arc<Meters>,
    /// The loader's share of a shared budget. All threads and slots hold this exchange. So the
    /// share is returned with the last of the memory, never while a batch is held.
    #[allow(dead_code, reason = "held for its Drop")]
    pub(crate) lease: Option<Lease>,
}

/// The channels to the transfer thread.
pub(crate) struct ToDevice {
    pub(crate) full: Sender<Filled>,
    pub(crate) full_out: Receiver<Filled>,
    /// Wakes the transfer thread after a run ended.
    pub(crate) bell: Sender<()>,
}

impl Hooks for Exchange {
    fn full(&self, slot: Filled) {
        let now = self.meters.clock.now();
        slot.times().full.store(now, Ordering::Relaxed);
        self.meters.move_slot(slot.times(), Stay::Full, now);
        if slot.ticket().generation != self.generation.load(Ordering::Acquire) {
            return drop(slot);
        }
        match &self.to_map {
            Some(to_map) if !slot.failed() => {
                if to_map.send(slot).is_ok() {
                    self.drains.wake(1);
                }
            }
            _ => self.hand_out(slot),
        }
    }

    fn free(&self, slot: FreeSlot) {
        self.meters
            .move_slot(slot.times(), Stay::Free, self.meters.clock.now());
        // The channel has room for every slot, and its receiver lives in `self`.
        let _ = self.frees.send(slot);
        if self.closed.load(Ordering::SeqCst) {
            return self.empty();
        }
        self.waker.wake();
    }
}

impl Exchange {
    /// Sends a full slot to the iterator or to the transfer thread. The channels have room for
    /// every slot.
    pub(crate) fn hand_out(&self, slot: Filled) {
        match &self.to_device {
            Some(to_device) => drop(to_device.full.send(slot)),
            None => drop(self.ready.send(Contents::Host(slot))),
        }
        self.empty_if_closed();
    }

    /// Called after each send to a channel, because no thread receives from it after the loader's
    /// end.
    pub(crate) fn empty_if_closed(&self) {
        if self.closed.load(Ordering::SeqCst) {
            self.empty();
        }
    }

    /// Called after the threads have ended. Every later sender sees the flag, or its item is
    /// removed here, because both operations are totally ordered.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.empty();
    }

    /// Wakes the threads that wait for slots of a run that has ended.
    pub(crate) fn ring(&self) {
        self.waker.wake();
        if let Some(to_device) = &self.to_device {
            // If the channel is full, the thread will check anyway.
            let _ = to_device.bell.try_send(());
        }
    }

    fn empty(&self) {
        while self.ready_out.try_recv().is_ok() {}
        while self
            .to_device
            .as_ref()
            .is_some_and(|to_device| to_device.full_out.try_recv().is_ok())
        {}
        while self.frees_out.try_recv().is_ok() {}
    }
}
