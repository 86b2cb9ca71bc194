//! The queue between threads of the pipeline.

use feedline_base::sync::{Hold, Mutex, MutexGuard};
use std::collections::VecDeque;

/// A queue whose length is bounded by the permits of its producers. So it neither blocks nor grows
/// after warm-up. Its lock costs tens of nanoseconds per run of rows, or per sample from storage.
pub(crate) struct Queue<T>(Mutex<VecDeque<T>>);

impl<T> Queue<T> {
    pub(crate) fn with_room(room: usize) -> Self {
        Self(Mutex::new(VecDeque::with_capacity(room)))
    }

    pub(crate) fn push(&self, item: T) {
        self.lock().push_back(item);
    }

    pub(crate) fn retain(&self, keep: impl FnMut(&T) -> bool) {
        self.lock().retain(keep);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.lock().pop_front()
    }

    /// The first item that `like` accepts.
    pub(crate) fn pop_first(&self, like: impl Fn(&T) -> bool) -> Option<T> {
        let mut items = self.lock();
        let first = items.iter().position(like)?;
        items.remove(first)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Drops all items, one by one: dropping an item may take this lock.
    pub(crate) fn clear(&self) {
        while self.pop().is_some() {}
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.0.hold()
    }
}
