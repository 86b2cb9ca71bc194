//! Who works, and who is next: the rules by which tasks on a pool empty queues, without a lost item and without waiting.
//!
//! ```text
//! push an item, then wake ──► fewer than `count` drains? ─► spawn one ─► take items until none is left ─► look once more ─► end
//! ```
//!
//! Both types know neither the pool nor the items, so that the loom models (`models.rs`) run this very code.

use super::queue::Queue;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::OnceLock;

type Spawn = Box<dyn Fn() + Send + Sync>;

/// Tasks that empty the queues; at most `count` of them run at a time.
pub(crate) struct Drains {
    count: usize,
    /// Drains that run or are about to.
    active: AtomicUsize,
    /// Has a thread call [`drain`](Self::drain), now or later.
    spawn: OnceLock<Spawn>,
}

impl Drains {
    pub(crate) fn new(count: usize) -> Self {
        Self { count, active: AtomicUsize::new(0), spawn: OnceLock::new() }
    }

    /// Says how a drain is started. Until then nobody is woken.
    pub(crate) fn spawn_by(&self, spawn: impl Fn() + Send + Sync + 'static) {
        let _ = self.spawn.set(Box::new(spawn));
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Drains that run or are about to.
    pub(crate) fn active(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// Sees to it that up to `items` more drains run. To be called after the items were put in.
    pub(crate) fn wake(&self, items: usize) {
        let Some(spawn) = self.spawn.get() else { return };
        for _ in 0..items.min(self.count) {
            if !self.enter() {
                return;
            }
            spawn();
        }
    }

    /// The life of one drain: `work` takes items until it finds none, `is_empty` says whether none is there.
    pub(crate) fn drain(&self, mut work: impl FnMut(), is_empty: impl Fn() -> bool) {
        loop {
            work();
            self.active.fetch_sub(1, Ordering::SeqCst);
            // Somebody may have put work in after the last look and found every place taken: look once more.
            if is_empty() || !self.enter() {
                return;
            }
        }
    }

    /// Takes a place, if one is free.
    fn enter(&self) -> bool {
        let more = |active: usize| (active < self.count).then_some(active + 1);
        self.active.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }
}

/// Items that are served one at a time, by whichever worker has the turn.
pub(crate) struct Turns<T> {
    waiting: Queue<T>,
    /// Somebody has the turn.
    busy: AtomicBool,
}

/// Whether an item may be served that is unlike the last one.
#[derive(Clone, Copy)]
pub(crate) enum Switch {
    Yes,
    /// Other work comes first, some of which may need what is at hand for the last one.
    No,
}

impl<T> Turns<T> {
    pub(crate) fn new() -> Self {
        Self { waiting: Queue::with_room(0), busy: AtomicBool::new(false) }
    }

    pub(crate) fn push(&self, item: T) {
        self.waiting.push(item);
    }

    /// Nobody can do anything here now: nothing waits, or somebody has the turn and will see what does.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() || self.busy.load(Ordering::SeqCst)
    }

    /// The right to serve, until it is dropped; `None` when nothing waits or somebody else has it.
    pub(crate) fn turn(&self) -> Option<Turn<'_, T>> {
        let taken = || self.busy.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst).is_err();
        if self.waiting.is_empty() || taken() {
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
    /// The first item that is like the last one; with [`Switch::Yes`] else the first.
    pub(crate) fn take(&self, switch: Switch, like: impl Fn(&T) -> bool) -> Option<T> {
        match switch {
            Switch::No => self.0.waiting.pop_first(like),
            Switch::Yes => self.0.waiting.pop_first(like).or_else(|| self.0.waiting.pop()),
        }
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::SeqCst);
    }
}
