//! Times of the batch in a slot. Stages write them, the profiler reads them.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The state of one slot (free, filling, …), and the times of its batch (nanoseconds; 0 for a step
/// that did not happen).
#[derive(Debug, Default)]
pub struct SlotTimes {
    /// One more than the state's number; 0 before the slot is announced.
    stay: AtomicU8,
    pub(crate) planned: AtomicU64,
    pub read: AtomicU64,
    pub full: AtomicU64,
}

impl SlotTimes {
    /// Sets the slot's state to this number, and returns the previous one. A slot belongs to one
    /// thread at a time.
    pub fn enter(&self, stay: u8) -> Option<u8> {
        let before = self.stay.load(Ordering::Relaxed);
        self.stay.store(stay + 1, Ordering::Relaxed);
        before.checked_sub(1)
    }

    /// Notes the start of a batch in the slot.
    pub fn begin(&self, now: u64) {
        if now == 0 {
            return;
        }
        self.planned.store(now, Ordering::Relaxed);
        self.read.store(0, Ordering::Relaxed);
        self.full.store(0, Ordering::Relaxed);
    }

    /// When the slot's batch was planned, when it was read, and when the slot was full.
    pub fn read_all(&self) -> [u64; 3] {
        [&self.planned, &self.read, &self.full].map(|time| time.load(Ordering::Relaxed))
    }
}
