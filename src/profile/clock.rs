//! Where the profiler and the pipeline take time from, so that tests can have time pass as they say.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Nanoseconds since the clock was made. Cheap to clone; the same for every thread.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Real(Instant),
    /// Advanced by whoever holds the other end.
    Virtual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's monotonic clock.
    pub(crate) fn real() -> Self {
        Self(Kind::Real(Instant::now()))
    }

    /// A clock that shows what the number says.
    pub(crate) fn shown(by: Arc<AtomicU64>) -> Self {
        Self(Kind::Virtual(by))
    }

    /// Nanoseconds since the clock was made; wraps after 584 years.
    pub(crate) fn now(&self) -> u64 {
        match &self.0 {
            Kind::Real(start) => start.elapsed().as_nanos() as u64,
            Kind::Virtual(now) => now.load(Ordering::Acquire),
        }
    }
}
