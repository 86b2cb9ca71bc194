//! The counters of readers.

use crate::meter::ReadStats;
use std::sync::atomic::{AtomicU64, Ordering};

/// [`ReadStats`] of readers with their own threads. The counters are relaxed: pure statistics.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) ops: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) bytes_asked: AtomicU64,
    pub(super) bytes_moved: AtomicU64,
    pub(super) short_reads: AtomicU64,
    pub(super) retries: AtomicU64,
    pub(super) direct_reads: AtomicU64,
    pub(super) buffered_reads: AtomicU64,
}

impl Counters {
    pub(super) fn snapshot(&self) -> ReadStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReadStats {
            ops: load(&self.ops),
            failed: load(&self.failed),
            bytes_asked: load(&self.bytes_asked),
            bytes_moved: load(&self.bytes_moved),
            short_reads: load(&self.short_reads),
            retries: load(&self.retries),
            direct_reads: load(&self.direct_reads),
            buffered_reads: load(&self.buffered_reads),
            ..ReadStats::default()
        }
    }
}

pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
