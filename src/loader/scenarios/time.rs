//! Virtual time for one loader with real threads: time advances only when nothing else can proceed.
//!
//! ```text
//!  party            can proceed at the present time, unless
//!  I/O thread       it dozes in the reader and the bell is silent, or its sampler sleeps
//!  workers          every started drain sleeps in the decoder, and no work waits for an idle worker
//!  transfer thread  it waits for slots, bells and buffers, and none has come
//!  consumer         it sleeps, or waits in `next()` for a batch with rows not decoded or no copy enqueued
//!  GPU              never: it has no thread, and its host functions are called when they are due
//! ```
//!
//! When no party can proceed, the clock jumps to the earliest time that a party waits for.
//!
//! # Why this is exact
//!
//! Each party reports under one lock before it sleeps and after it wakes. A row is counted as
//! decoded under that lock before its drain continues. [`SharedTime::advance`] holds the lock
//! throughout. So a sleeping party stays asleep during the check, unless another party wakes it;
//! and that party would be found running itself:
//!
//! - The I/O thread is asleep when the bell's word says so. Every wake changes the word before the
//!   waker continues.
//! - A drain counts as active from before its spawn until it finds no more work. Between its last
//!   two looks at the queues it does not count. Then the check sees work in the queue and a free
//!   place; or, if the drain took that work meanwhile, the second read of the count includes the
//!   drain, because it cannot end without this lock.
//! - The consumer sleeps in `next()` from when it is about to wait (it counts its waits), if rows
//!   of its batch are missing. Rows decoded but not handed on belong to an active drain.
//! - The transfer thread takes input only after it has reported itself awake. It is checked after
//!   the workers, which send to it. The I/O thread and the consumer, to which it sends, are checked
//!   again after it: neither falls asleep again without this lock.
//!
//! Nothing here depends on the speed of threads or on other load of the machine.

use crate::pipeline::Core;
use feedline_base::meter::Clock;
use feedline_device::cuda::driver::simulated::Simulated;
use feedline_reader::waker::Bell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::thread::Thread;

/// The clock's first value: meters take 0 for "not measured".
pub(super) const START: u64 = 1_000_000_000;

/// An interval of virtual time.
pub(super) type Span = (u64, u64);

/// The sleeping party.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Party {
    Io,
    Worker,
    Consumer,
}

impl Party {
    /// By thread name; the test's own thread is the consumer.
    pub(super) fn here() -> Self {
        match std::thread::current().name() {
            Some("feedline-io") => Self::Io,
            Some(name) if name.starts_with("feedline-dec-") => Self::Worker,
            _ => Self::Consumer,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Io {
    Running,
    Dozing,
    Sleeping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Consumer {
    Running,
    Sleeping,
    /// In `next()` for that batch, with the number of waits before.
    Waiting(u64, u64),
}

struct Sleeper {
    due: u64,
    party: Party,
    thread: Thread,
    woken: Arc<AtomicBool>,
}

pub(super) struct TimeState {
    io: Io,
    consumer: Consumer,
    workers_asleep: usize,
    sleepers: Vec<Sleeper>,
    /// Time of the reader's next completion.
    read_due: Option<u64>,
    /// Decoded rows of each batch.
    decoded: Vec<u64>,
    rows: u64,
    ended: bool,
    /// Ground truth for the oracle: intervals of work of the decoder and the sampler.
    pub(super) decodes: Vec<Span>,
    pub(super) orders: Vec<Span>,
}

/// Result of an attempt to advance time.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Went {
    On,
    /// A party still runs.
    Not,
    /// No party runs, and none waits for a time: a deadlock.
    Nowhere(String),
}

/// Virtual time of one loader.
pub(super) struct SharedTime {
    now: Arc<AtomicU64>,
    /// Number of waits begun by the consumer's thread.
    waits: Arc<AtomicU64>,
    /// The device of the copies.
    gpu: OnceLock<Arc<Simulated>>,
    pub(super) bell: Arc<Bell>,
    core: OnceLock<Weak<Core>>,
    state: Mutex<TimeState>,
}

impl SharedTime {
    /// For batches of `rows` samples with ids 0, 1, 2 …
    pub(super) fn new(rows: u64, batches: u64) -> Arc<Self> {
        let state = TimeState {
            io: Io::Running,
            consumer: Consumer::Running,
            workers_asleep: 0,
            sleepers: Vec::new(),
            read_due: None,
            decoded: vec![0; batches as usize],
            rows,
            ended: false,
            decodes: Vec::new(),
            orders: Vec::new(),
        };
        Arc::new(Self {
            now: Arc::new(AtomicU64::new(START)),
            waits: Arc::default(),
            gpu: OnceLock::new(),
            bell: Bell::futex(),
            core: OnceLock::new(),
            state: Mutex::new(state),
        })
    }

    pub(super) fn now(&self) -> u64 {
        self.now.load(Ordering::Acquire)
    }

    pub(super) fn clock(&self) -> Clock {
        Clock::shown(self.now.clone())
    }

    /// The virtual clock's value.
    pub(super) fn shown(&self) -> Arc<AtomicU64> {
        self.now.clone()
    }

    /// Sets the loader and GPU to watch. Called by the consumer's thread.
    pub(super) fn watch(&self, core: &Arc<Core>, gpu: Option<&Arc<Simulated>>) {
        Clock::count_waits(self.waits.clone());
        gpu.into_iter()
            .for_each(|gpu| drop(self.gpu.set(gpu.clone())));
        let _ = self.core.set(Arc::downgrade(core));
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, TimeState> {
        self.state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    /// Lets the calling thread work for `ns`. For the consumer, 0 waits until the present moment
    /// has no more events.
    pub(super) fn sleep(&self, ns: u64) {
        let party = Party::here();
        let woken = Arc::new(AtomicBool::new(false));
        let mut state = self.lock();
        let from = self.now();
        if state.ended || (ns == 0 && party != Party::Consumer) {
            return;
        }
        let due = from + ns;
        match party {
            Party::Io => state.io = Io::Sleeping,
            Party::Worker => state.workers_asleep += 1,
            Party::Consumer => state.consumer = Consumer::Sleeping,
        }
        match party {
            Party::Io => state.orders.push((from, due)),
            Party::Worker => state.decodes.push((from, due)),
            Party::Consumer => {}
        }
        state.sleepers.push(Sleeper {
            due,
            party,
            thread: std::thread::current(),
            woken: woken.clone(),
        });
        self.advance(&mut state);
        drop(state);
        while !woken.load(Ordering::Acquire) {
            std::thread::park();
        }
    }

    /// A worker has decoded a sample.
    pub(super) fn decoded(&self, id: u64) {
        let mut state = self.lock();
        let batch = (id / state.rows) as usize;
        state.decoded[batch] += 1;
    }

    /// The consumer asks for a batch: until [`got`](Self::got) it only runs `next()`.
    pub(super) fn asks(&self, batch: u64) {
        self.lock().consumer = Consumer::Waiting(batch, self.waits.load(Ordering::Acquire));
    }

    pub(super) fn got(&self) {
        self.lock().consumer = Consumer::Running;
    }

    /// The I/O thread is about to doze, until the bell rings or `due`. Errors as [`Bell::doze`].
    pub(super) fn doze(
        &self,
        mut state: MutexGuard<'_, TimeState>,
        due: Option<u64>,
    ) -> Result<(), bool> {
        self.bell.doze()?;
        state.io = Io::Dozing;
        state.read_due = due;
        self.advance(&mut state);
        Ok(())
    }

    pub(super) fn rise(&self) -> bool {
        let woken = self.bell.rise();
        let mut state = self.lock();
        state.io = Io::Running;
        state.read_due = None;
        woken
    }

    pub(super) fn has_ended(state: &TimeState) -> bool {
        state.ended
    }

    /// Ends virtual time: all parties run freely.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        self.wake_until(&mut state, u64::MAX);
        self.bell.nudge();
        self.gpu.get().iter().for_each(|gpu| gpu.call(u64::MAX));
    }

    /// Advances time if no party runs.
    pub(super) fn try_advance(&self) -> Went {
        // A lock holder runs, and checks for itself before it sleeps.
        self.state
            .try_lock()
            .map_or(Went::Not, |mut state| self.advance(&mut state))
    }

    fn advance(&self, state: &mut TimeState) -> Went {
        if state.ended || self.anybody_runs(state) {
            return Went::Not;
        }
        let on_gpu = self.gpu.get().and_then(|gpu| gpu.due());
        let due = state
            .sleepers
            .iter()
            .map(|sleeper| sleeper.due)
            .chain(state.read_due)
            .chain(on_gpu)
            .min();
        let Some(due) = due else {
            return Went::Nowhere(format!("{:?}, {:?}", state.io, state.consumer));
        };
        let now = due.max(self.now());
        self.now.store(now, Ordering::Release);
        self.wake_until(state, now);
        if state.read_due.is_some_and(|due| due <= now) {
            self.bell.nudge();
        }
        self.gpu.get().iter().for_each(|gpu| gpu.call(now));
        Went::On
    }

    fn anybody_runs(&self, state: &TimeState) -> bool {
        let consumer = || match state.consumer {
            Consumer::Running => true,
            Consumer::Sleeping => false,
            Consumer::Waiting(batch, waits) => {
                self.waits.load(Ordering::Acquire) == waits
                    || self
                        .gpu
                        .get()
                        .map_or(state.decoded[batch as usize] == state.rows, |gpu| {
                            gpu.copied() > batch
                        })
            }
        };
        let io = || match state.io {
            Io::Running => true,
            Io::Dozing => !self.bell.is_asleep(),
            Io::Sleeping => false,
        };
        if consumer() || io() {
            return true;
        }
        let Some(core) = self.core.get().and_then(Weak::upgrade) else {
            return true;
        };
        let active = || core.to_workers.drains.active();
        // The order matters; see the module documentation.
        active() != state.workers_asleep
            || (!core.to_workers.is_empty() && state.workers_asleep < core.to_workers.drains.count)
            || active() != state.workers_asleep
            || (self.gpu.get().is_some() && !core.dozing.is_asleep())
            || io()
            || consumer()
    }

    fn wake_until(&self, state: &mut TimeState, now: u64) {
        let TimeState {
            sleepers,
            io,
            consumer,
            workers_asleep,
            ..
        } = state;
        sleepers.retain(|sleeper| {
            if sleeper.due > now {
                return true;
            }
            match sleeper.party {
                Party::Io => *io = Io::Running,
                Party::Worker => *workers_asleep -= 1,
                Party::Consumer => *consumer = Consumer::Running,
            }
            sleeper.woken.store(true, Ordering::Release);
            sleeper.thread.unpark();
            false
        });
    }
}
