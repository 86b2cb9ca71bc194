//! Schedules the workers: tasks on a thread pool (*drains*) empty the queues. No item is lost, and
//! no task blocks.
//!
//! ```text
//! push an item, then wake ──► fewer than `count` drains? ─► spawn one ─► take all items ─► look once more ─► end
//! ```
//!
//! `Drains` and `Turns` do not depend on the pool or the items, so the loom models (`models.rs`)
//! run exactly this code.

use super::queue::Queue;
use feedline_base::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::OnceLock;

type Spawn = Box<dyn Fn() + Send + Sync>;

/// Tasks that empty the queues; at most `count` run at a time.
pub(crate) struct Drains {
    pub(crate) count: usize,
    /// Number of drains that run or are about to run.
    active: AtomicUsize,
    /// Makes a thread call [`drain`](Self::drain), now or later.
    spawn: OnceLock<Spawn>,
}

impl Drains {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            count,
            active: AtomicUsize::new(0),
            spawn: OnceLock::new(),
        }
    }

    /// Sets how a drain starts. Before that, `wake` has no effect.
    pub(crate) fn spawn_by(&self, spawn: impl Fn() + Send + Sync + 'static) {
        let _ = self.spawn.set(Box::new(spawn));
    }

    /// Number of drains that run or are about to run.
    pub(crate) fn active(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// Makes up to `items` more drains run. Call it after the items were pushed.
    pub(crate) fn wake(&self, items: usize) {
        let Some(spawn) = self.spawn.get() else {
            return;
        };
        for _ in 0..items.min(self.count) {
            if !self.enter() {
                return;
            }
            spawn();
        }
    }

    /// Runs one drain: `work` takes items until it finds none; `is_empty` tells whether none is
    /// left.
    pub(crate) fn drain(&self, mut work: impl FnMut(), is_empty: impl Fn() -> bool) {
        loop {
            work();
            self.active.fetch_sub(1, Ordering::SeqCst);
            // A thread may have pushed work after the last check and found all `count` drains
            // active. So check again.
            if is_empty() || !self.enter() {
                return;
            }
        }
    }

    /// Counts one more drain, if fewer than `count` run.
    fn enter(&self) -> bool {
        self.active
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |active| {
                (active < self.count).then_some(active + 1)
            })
            .is_ok()
    }
}

/// Items that are served one at a time, by the worker that has the turn.
pub(crate) struct Turns<T> {
    waiting: Queue<T>,
    /// Whether a worker has the turn.
    busy: AtomicBool,
}

/// Whether to serve an item that is unlike the last one (a bad row that needs another drawn chunk).
#[derive(Clone, Copy)]
pub(crate) enum Switch {
    Yes,
    /// Other work comes first; some of it may need the chunk of the last item.
    No,
}

impl<T> Turns<T> {
    pub(crate) fn new() -> Self {
        Self {
            waiting: Queue::with_room(0),
            busy: AtomicBool::new(false),
        }
    }

    pub(crate) fn push(&self, item: T) {
        self.waiting.push(item);
    }

    /// Whether there is nothing to do: no item waits, or the worker with the turn will see it.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() || self.busy.load(Ordering::SeqCst)
    }

    /// The right to serve, until dropped; `None` if no item waits or another worker has the turn.
    pub(crate) fn turn(&self) -> Option<Turn<'_, T>> {
        if self.waiting.is_empty() {
            return None;
        }
        let taken = self
            .busy
            .compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst)
            .is_err();
        if taken {
            return None;
        }
        Some(Turn(self))
    }

    pub(crate) fn clear(&self) {
        self.waiting.clear();
    }
}

/// The right to serve the items of [`Turns`].
pub(crate) struct Turn<'a, T>(&'a Turns<T>);

impl<T> Turn<'_, T> {
    /// The first item that `like` accepts. If there is none, [`Switch::Yes`] gives the first item
    /// of any kind.
    pub(crate) fn take(&self, switch: Switch, like: impl Fn(&T) -> bool) -> Option<T> {
        match switch {
            Switch::No => self.0.waiting.pop_first(like),
            Switch::Yes => self
                .0
                .waiting
                .pop_first(like)
                .or_else(|| self.0.waiting.pop()),
        }
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::SeqCst);
    }
}
