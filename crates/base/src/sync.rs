//! Atomics and locks for modelled code: the standard library's, or loom's in the models
//! (`src/pipeline/models.rs`), which thus run the same code as loaders.

#[cfg(not(loom))]
pub use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(loom)]
pub use loom::sync::{Mutex, MutexGuard, atomic};

/// Locks that ignore poisoning, because their data is consistent between any two steps.
pub trait Hold {
    type Guard<'a>
    where
        Self: 'a;

    /// Locks, even if an earlier holder panicked.
    fn hold(&self) -> Self::Guard<'_>;
}

impl<T> Hold for std::sync::Mutex<T> {
    type Guard<'a>
        = std::sync::MutexGuard<'a, T>
    where
        T: 'a;

    fn hold(&self) -> Self::Guard<'_> {
        self.lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(loom)]
impl<T> Hold for Mutex<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn hold(&self) -> Self::Guard<'_> {
        self.lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A flag, totally ordered with channel operations by `SeqCst`.
#[cfg(not(loom))]
pub type Flag = std::sync::atomic::AtomicBool;

/// Loom does not model channels. A dummy operation after each operation of the flag lets another
/// thread run before the next channel operation.
#[cfg(loom)]
pub struct Flag(atomic::AtomicBool, atomic::AtomicBool);

#[cfg(loom)]
impl Default for Flag {
    fn default() -> Self {
        let flag = Self(Default::default(), Default::default());
        // In loom a `SeqCst` load sees the newest `SeqCst` store only if all stores, the first one
        // included, are `SeqCst`.
        flag.store(false, atomic::Ordering::SeqCst);
        flag
    }
}

#[cfg(loom)]
impl Flag {
    pub fn load(&self, order: atomic::Ordering) -> bool {
        let value = self.0.load(order);
        self.1.store(value, atomic::Ordering::Relaxed);
        value
    }

    pub fn store(&self, value: bool, order: atomic::Ordering) {
        self.0.store(value, order);
        self.1.store(value, atomic::Ordering::Relaxed);
    }
}

#[cfg(not(loom))]
pub use rustix::thread::futex;

/// Model of the kernel's futex: it checks the word and puts the caller to sleep under the lock that
/// a wake takes.
#[cfg(loom)]
pub mod futex {
    use super::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};
    pub use rustix::thread::futex::{Flags, Timespec};

    loom::lazy_static! {
        static ref SLEEPERS: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    /// A timeout never expires.
    pub fn wait(
        word: &AtomicU32,
        _: Flags,
        expected: u32,
        _: Option<&Timespec>,
    ) -> rustix::io::Result<()> {
        let held = SLEEPERS.0.lock().unwrap();
        if word.load(Ordering::SeqCst) != expected {
            return Err(rustix::io::Errno::AGAIN);
        }
        drop(SLEEPERS.1.wait(held).unwrap());
        Ok(())
    }

    pub fn wake(_: &AtomicU32, _: Flags, _: u32) -> rustix::io::Result<usize> {
        drop(SLEEPERS.0.lock().unwrap());
        SLEEPERS.1.notify_all();
        Ok(1)
    }
}
