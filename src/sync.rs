//! Atomics and locks of the parts whose interleavings are modelled: the standard library's, and loom's in the models
//! (`pipeline/models.rs`), which then run the very code that loaders run.

#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(all(test, loom))]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};

/// A flag that is totally ordered with the steps of channels by `SeqCst`.
#[cfg(not(all(test, loom)))]
pub(crate) type Flag = std::sync::atomic::AtomicBool;

/// Loom sees no channel. So that another thread may go on between a step of the flag and one of a channel, each step of the
/// flag is followed by one that does nothing.
#[cfg(all(test, loom))]
pub(crate) struct Flag(atomic::AtomicBool, atomic::AtomicBool);

#[cfg(all(test, loom))]
impl Default for Flag {
    fn default() -> Self {
        let flag = Self(Default::default(), Default::default());
        // To loom a `SeqCst` load sees nothing older than the newest `SeqCst` store if all are such stores, the first one, too.
        flag.store(false, atomic::Ordering::SeqCst);
        flag
    }
}

#[cfg(all(test, loom))]
impl Flag {
    pub(crate) fn load(&self, order: atomic::Ordering) -> bool {
        let value = self.0.load(order);
        self.1.store(value, atomic::Ordering::Relaxed);
        value
    }

    pub(crate) fn store(&self, value: bool, order: atomic::Ordering) {
        self.0.store(value, order);
        self.1.store(value, atomic::Ordering::Relaxed);
    }
}

#[cfg(not(all(test, loom)))]
pub(crate) use rustix::thread::futex;

/// What the kernel does for a futex: it looks at the word and puts the caller to sleep under the lock that a wake takes.
#[cfg(all(test, loom))]
pub(crate) mod futex {
    use super::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};
    pub(crate) use rustix::thread::futex::{Flags, Timespec};

    loom::lazy_static! {
        static ref SLEEPERS: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    /// A timeout is never over.
    pub(crate) fn wait(word: &AtomicU32, _: Flags, expected: u32, _: Option<&Timespec>) -> rustix::io::Result<()> {
        let held = SLEEPERS.0.lock().unwrap();
        if word.load(Ordering::SeqCst) != expected {
            return Err(rustix::io::Errno::AGAIN);
        }
        drop(SLEEPERS.1.wait(held).unwrap());
        Ok(())
    }

    pub(crate) fn wake(_: &AtomicU32, _: Flags, _: u32) -> rustix::io::Result<usize> {
        drop(SLEEPERS.0.lock().unwrap());
        SLEEPERS.1.notify_all();
        Ok(1)
    }
}
