//! Where the profiler and the pipeline take time from, so that tests can have time pass as they say.

#[cfg(test)]
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::time::Instant;

/// Nanoseconds since the clock was made. Cheap to clone; the same for every thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Kind);

#[derive(Clone, Debug, Default)]
enum Kind {
    Real(Instant),
    /// Advanced by whoever holds the other end.
    #[cfg(test)]
    Virtual(Arc<AtomicU64>),
    /// Always 0: nothing is measured.
    #[default]
    Still,
}

#[cfg(all(test, feature = "cuda"))]
thread_local! {
    /// See [`Clock::count_waits`].
    static WAITS: std::cell::RefCell<Option<Arc<AtomicU64>>> = const { std::cell::RefCell::new(None) };
}

impl Clock {
    /// The machine's monotonic clock.
    pub(crate) fn real() -> Self {
        Self(Kind::Real(Instant::now()))
    }

    /// A clock that stands still. Meters take 0 for "not measured", so nothing is: for measuring what measuring costs.
    pub(crate) fn still() -> Self {
        Self(Kind::Still)
    }

    /// Whether time passes, so that there is something to measure.
    pub(crate) fn goes(&self) -> bool {
        !matches!(self.0, Kind::Still)
    }

    /// A clock that shows what the number says, which should not be 0.
    #[cfg(test)]
    pub(crate) fn shown(by: Arc<AtomicU64>) -> Self {
        Self(Kind::Virtual(by))
    }

    /// Counts how often this thread begins to wait for a batch.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn count_waits(counter: Arc<AtomicU64>) {
        WAITS.set(Some(counter));
    }

    /// This thread has done all that it can before a batch comes.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn waits() {
        WAITS.with_borrow(|waits| {
            if let Some(waits) = waits {
                waits.fetch_add(1, Ordering::Release);
            }
        });
    }

    /// Nanoseconds since the clock was made; wraps after 584 years.
    pub(crate) fn now(&self) -> u64 {
        match &self.0 {
            Kind::Real(start) => start.elapsed().as_nanos() as u64,
            #[cfg(test)]
            Kind::Virtual(now) => now.load(Ordering::Acquire),
            Kind::Still => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_goes_on_stands_still_or_shows_what_it_is_told() {
        let real = Clock::real();
        let first = real.now();
        assert!(real.clone().now() >= first);
        assert_eq!(Clock::still().now(), 0);
        let told = Arc::new(AtomicU64::new(5));
        let shown = Clock::shown(told.clone());
        told.store(9, Ordering::Release);
        assert_eq!(shown.now(), 9);
    }
}
