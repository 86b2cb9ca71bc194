//! The counters of readers.

use feedline_report::meter::ReadStats;
use std::sync::atomic::{AtomicU64, Ordering};

/// [`ReadStats`] of readers with their own threads. The counters are relaxed: pure statistics.
#[derive(Default)]
pub struct Counters {
    pub ops: AtomicU64,
    pub failed: AtomicU64,
    pub bytes_asked: AtomicU64,
    pub bytes_moved: AtomicU64,
    pub(super) short_reads: AtomicU64,
    pub retries: AtomicU64,
    pub(super) direct_reads: AtomicU64,
    pub(super) buffered_reads: AtomicU64,
}

impl Counters {
    pub fn snapshot(&self) -> ReadStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut stats = ReadStats::default();
        stats.ops = load(&self.ops);
        stats.failed = load(&self.failed);
        stats.bytes_asked = load(&self.bytes_asked);
        stats.bytes_moved = load(&self.bytes_moved);
        stats.short_reads = load(&self.short_reads);
        stats.retries = load(&self.retries);
        stats.direct_reads = load(&self.direct_reads);
        stats.buffered_reads = load(&self.buffered_reads);
        stats
    }
}

pub fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
