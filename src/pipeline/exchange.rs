//! Where the threads meet: every queue between them, and who is woken when something is put there. They know nothing else of
//! each other.
//!
//! ```text
//! iterator ──starts──►┌─────────┐──rows to fill, what was fetched─────────►┌─────────┐
//!                     │ planner │                                          │ workers │──► slots to map, bad rows: to
//!        ┌───frees───►│         │◄──misses, chunk misses, samples──────────│         │◄── themselves
//!        │            └─────────┘                                          └────┬────┘
//!     dropped batch ◄── iterator ◄──ready── [transfer thread ◄──full──] last row┘
//! ```
//!
//! [`ToIo`] and [`ToWorkers`] end with the loader's core. [`Exchange`] is known to the slots themselves, so it lives as long as
//! a batch is held; therefore what arrives after the end is taken out again.

use super::chunks::Held;
use super::drains::{Drains, Turns};
use super::fetch::Fetch;
use super::queue::Queue;
use super::sample::Samples;
use super::task::{Job, Run, Sample};
use crate::batch::Contents;
use crate::error::{Error, Result};
use crate::memory::{Filled, FreeSlot, Hooks, Lease};
use crate::meter::{Meters, Stay};
use crate::storage::Waker;
use crossbeam_channel::{Receiver, Sender};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Rows that a worker takes at a time have about this many bytes: long enough that taking them does not show, short
/// enough that all workers finish a batch together.
const RUN_BYTES: usize = 512 << 10;

/// The way to the I/O thread: queues whose room is bounded by the permits, and a bell.
pub(crate) struct ToIo {
    /// Runs of epochs to plan, newest last. Not in a channel of limited room: whoever starts epochs must never wait for the
    /// I/O thread, nor the I/O thread, which frees slots itself, for them.
    pub(crate) starts: Queue<Start>,
    /// The I/O thread shall end.
    pub(crate) shutdown: AtomicBool,
    /// Rows, one each, that the page cache does not hold.
    pub(crate) misses: Queue<Run>,
    /// Chunks that the page cache does not hold.
    pub(crate) chunk_misses: Queue<Fetch>,
    /// Permits for samples in flight that workers give back.
    pub(crate) idle: Sender<Box<Sample>>,
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
    pub(crate) fn is_ending(&self) -> bool {
        self.shutdown.load(Ordering::Acquire)
    }

    /// A permit for a sample in flight is free again.
    pub(crate) fn give_back(&self, mut sample: Box<Sample>) {
        sample.clear();
        if self.idle.send(sample).is_ok() {
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

/// Rows that a worker is to fill.
pub(crate) struct ToFill {
    pub(crate) run: Run,
    /// The open chunks that they are in; without any they are looked up.
    pub(crate) held: Option<Arc<Held>>,
}

/// A row that waits for another sample than its own.
pub(crate) struct BadRow {
    /// One row.
    pub(crate) run: Run,
    pub(crate) id: u64,
    pub(crate) error: Error,
    /// The chunks that it was to come from, and the one that holds it.
    pub(crate) held: Option<(Arc<Held>, usize)>,
}

/// What is known of how much waits for the workers.
pub(crate) struct Capacity {
    pub(crate) slots: usize,
    pub(crate) samples: usize,
    pub(crate) chunks: usize,
    pub(crate) row_bytes: usize,
}

/// The way to the workers. Work lies in queues of our own, so that the pool allocates for a drain and not for a sample.
pub(crate) struct ToWorkers {
    pub(crate) drains: Arc<Drains>,
    /// Rows to look up, or whose chunks are open; split when taken.
    to_fill: Queue<ToFill>,
    /// Rows whose bytes have come, and chunks to be opened.
    fetched: Queue<Fetch>,
    /// Rows that want a substitute.
    pub(crate) bad: Turns<BadRow>,
    /// Whether they get one.
    substitutes: bool,
    /// Slots for `.map_batch`.
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
            // A batch has a piece for each chunk boundary in it; small chunks make many.
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
        self.meters.queued.enter(1, self.meters.clock.now());
        queue.push(item);
        self.drains.wake(runs);
    }

    /// Gives workers rows whose chunks are open, or rows to look up.
    pub(crate) fn fill(&self, run: Run, held: Option<Arc<Held>>) {
        let runs = run.len().div_ceil(self.run_rows) as usize;
        self.put(&self.to_fill, ToFill { run, held }, runs);
    }

    /// Gives a worker a row whose bytes have come, or a chunk to be opened.
    pub(crate) fn finish(&self, fetch: Fetch) {
        self.put(&self.fetched, fetch, 1);
    }

    /// The first row cannot have its sample; `error` names it. It waits for another one where that is done and may help, else
    /// its batch has the error.
    pub(crate) fn row_failed(
        &self,
        samples: &Samples,
        run: &mut Run,
        id: Option<u64>,
        error: Error,
        held: Option<(&Arc<Held>, usize)>,
    ) {
        match id {
            Some(id) if self.substitutes && samples.blames_sample(&error) && !run.rows.fails_anyway() => {
                let held = held.map(|(held, entry)| (held.clone(), entry));
                self.bad.push(BadRow { run: run.take(1), id, error, held });
                self.drains.wake(1);
            }
            _ => run.rows.fail_row(error),
        }
    }

    /// A slot that `.map_batch` must see.
    pub(crate) fn take_map(&self) -> Option<Filled> {
        self.maps.as_ref()?.try_recv().ok()
    }

    /// A few rows of the oldest that are to be filled, and whether these are the last of their piece of a batch.
    pub(crate) fn take_rows(&self) -> Option<(ToFill, bool)> {
        let mut queue = self.to_fill.lock();
        let ToFill { run, held } = queue.front_mut()?;
        if run.len() > self.run_rows {
            return Some((ToFill { run: run.take(self.run_rows), held: held.clone() }, false));
        }
        queue.pop_front().map(|rows| (rows, true))
    }

    pub(crate) fn take_fetched(&self) -> Option<Fetch> {
        self.fetched.pop()
    }

    /// Nothing waits for a worker, but perhaps bad rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.to_fill.is_empty() && self.fetched.is_empty() && self.maps.as_ref().is_none_or(|maps| maps.is_empty())
    }

    /// Drops what nobody will work on any more.
    pub(crate) fn let_go(&self) {
        self.to_fill.clear();
        self.fetched.clear();
        self.bad.clear();
        while self.take_map().is_some() {}
    }
}

/// Where slots go: full ones to the iterator (through `.map_batch`, if there is one), free ones to the planner.
pub(crate) struct Exchange {
    /// The iterator's run; what belongs to older runs is cancelled, and their slots are not worth handing out.
    pub(crate) generation: Arc<AtomicU64>,
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
    /// Full slots that `.map_batch` must see first; its receiver is the workers'.
    pub(crate) to_map: Option<Sender<Filled>>,
    pub(crate) drains: Arc<Drains>,
    pub(crate) meters: Arc<Meters>,
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
