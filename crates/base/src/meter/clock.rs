//! The clock of the meters and the pipeline. Tests replace it with a clock that they set.

#[cfg(any(test, feature = "unstable"))]
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::time::Instant;

/// Nanoseconds since the clock was made. Cheap to clone; the same for every thread.
#[derive(Clone, Debug, Default)]
pub struct Clock(ClockKind);

#[derive(Clone, Debug, Default)]
enum ClockKind {
    Real(Instant),
    /// Advanced by a test.
    #[cfg(any(test, feature = "unstable"))]
    Virtual(Arc<AtomicU64>),
    /// Always 0: nothing is measured.
    #[default]
    Still,
}

#[cfg(any(test, feature = "unstable"))]
thread_local! {
    /// See [`Clock::count_waits`].
    static WAITS: std::cell::RefCell<Option<Arc<AtomicU64>>> = const { std::cell::RefCell::new(None) };
}

impl Clock {
    /// The machine's monotonic clock.
    pub fn real() -> Self {
        Self(ClockKind::Real(Instant::now()))
    }

    /// A clock that always shows 0, which means "not measured" to meters. For benchmarks of the
    /// meters' own cost.
    #[cfg(any(test, feature = "unstable"))]
    pub fn still() -> Self {
        Self(ClockKind::Still)
    }

    /// Whether this is the machine's clock, which timers follow.
    pub fn is_real(&self) -> bool {
        matches!(self.0, ClockKind::Real(_))
    }

    /// Whether time passes, so that meters can measure.
    pub fn goes(&self) -> bool {
        !matches!(self.0, ClockKind::Still)
    }

    /// A clock that shows the value of `by`, which should not be 0.
    #[cfg(any(test, feature = "unstable"))]
    pub fn shown(by: Arc<AtomicU64>) -> Self {
        Self(ClockKind::Virtual(by))
    }

    /// Counts how often this thread begins to wait for a batch.
    #[cfg(any(test, feature = "unstable"))]
    pub fn count_waits(counter: Arc<AtomicU64>) {
        WAITS.set(Some(counter));
    }

    /// Notes that this thread begins to wait for a batch.
    #[cfg(any(test, feature = "unstable"))]
    pub fn waits() {
        WAITS.with_borrow(|waits| {
            if let Some(waits) = waits {
                waits.fetch_add(1, Ordering::Release);
            }
        });
    }

    /// Nanoseconds since the clock was made; wraps after 584 years.
    pub fn now(&self) -> u64 {
        match &self.0 {
            ClockKind::Real(start) => start.elapsed().as_nanos() as u64,
            #[cfg(any(test, feature = "unstable"))]
            ClockKind::Virtual(now) => now.load(Ordering::Acquire),
            ClockKind::Still => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_real_still_or_set_by_a_test() {
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
