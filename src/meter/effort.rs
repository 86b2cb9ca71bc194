//! How often meters looked at the clock and wrote: what the cost of measuring is made of. Counted in builds for tests alone;
//! elsewhere nothing is left of it.

#[cfg(any(test, feature = "effort"))]
mod counted {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Mutex, PoisonError};

    /// Looks, writes and stores of one thread, which alone writes them. They outlive it.
    type Own = &'static [AtomicU64; 3];

    static ALL: Mutex<Vec<Own>> = Mutex::new(Vec::new());

    thread_local! {
        static OWN: Own = {
            let own: Own = Box::leak(Box::default());
            ALL.lock().unwrap_or_else(PoisonError::into_inner).push(own);
            own
        };
    }

    fn count(which: usize, by: u64) {
        // A thread that ends may have lost its own.
        let _ = OWN.try_with(|own| own[which].store(own[which].load(Ordering::Relaxed) + by, Ordering::Relaxed));
    }

    pub(crate) fn look() {
        count(0, 1);
    }

    pub(crate) fn write(times: u64) {
        count(1, times);
    }

    pub(crate) fn store(times: u64) {
        count(2, times);
    }

    /// Of all meters of this process so far: looks at clocks, writes to numbers that several threads may write, and stores to
    /// those that one writes.
    #[cfg_attr(not(feature = "effort"), allow(dead_code, reason = "for a bench"))]
    pub fn effort() -> [u64; 3] {
        let all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        [0, 1, 2].map(|which| all.iter().map(|own| own[which].load(Ordering::Relaxed)).sum())
    }
}

#[cfg(feature = "effort")]
pub use counted::effort;
#[cfg(any(test, feature = "effort"))]
pub(crate) use counted::{look, store, write};

#[cfg(not(any(test, feature = "effort")))]
#[inline(always)]
pub(crate) fn look() {}

#[cfg(not(any(test, feature = "effort")))]
#[inline(always)]
pub(crate) fn write(_: u64) {}

#[cfg(not(any(test, feature = "effort")))]
#[inline(always)]
pub(crate) fn store(_: u64) {}
