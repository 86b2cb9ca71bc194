//! Completions from other threads, and the bell of the driver that waits for them.

use super::waker::Bell;
use crate::{Completion, Waker};
use feedline_base::sync::Hold;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The completions of a reader whose threads do the reads.
pub struct Completions {
    completions: Mutex<Vec<Completion>>,
    bell: Arc<Bell>,
    /// Wakes the driver if it sleeps in another reader.
    other: Option<Waker>,
}

impl Completions {
    /// Room for `depth` completions. `other`: wakes the driver, which may sleep in another reader.
    pub fn new(depth: usize, other: Option<Waker>) -> Self {
        Self {
            completions: Mutex::new(Vec::with_capacity(depth)),
            bell: Bell::futex(),
            other,
        }
    }

    /// Number of completions that were not collected yet.
    pub(super) fn len(&self) -> usize {
        self.completions.hold().len()
    }

    /// Adds completions: one lock and one wake for all of them.
    pub fn extend(&self, completions: impl IntoIterator<Item = Completion>) {
        self.add(completions);
        self.announce();
    }

    /// Adds completions. The driver learns of them at the next [`announce`](Self::announce).
    /// Returns the number of completions that wait.
    pub fn add(&self, completions: impl IntoIterator<Item = Completion>) -> usize {
        let mut waiting = self.completions.hold();
        waiting.extend(completions);
        waiting.len()
    }

    /// Wakes the driver if it sleeps.
    pub fn announce(&self) {
        self.bell.nudge();
        if let Some(other) = &self.other {
            other.wake();
        }
    }

    /// Like [`Reader::wait`](super::Reader::wait); returns the number of completions.
    pub fn wait(&self, out: &mut Vec<Completion>, timeout: Option<Duration>) -> usize {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let found = self.collect(out);
            if found > 0 || timeout == Some(Duration::ZERO) {
                return found;
            }
            match self.bell.doze() {
                Err(woken) if woken => return 0,
                // A completion came after `collect` looked.
                Err(_) => continue,
                Ok(()) => self.bell.sleep(deadline),
            }
            if self.bell.rise() || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return self.collect(out);
            }
        }
    }

    fn collect(&self, out: &mut Vec<Completion>) -> usize {
        let mut completions = self.completions.hold();
        let found = completions.len();
        out.append(&mut completions);
        found
    }

    pub fn waker(&self) -> Waker {
        self.bell.waker()
    }
}
