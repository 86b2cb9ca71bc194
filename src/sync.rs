//! Atomics and locks of the parts whose interleavings are modelled: the standard library's, and loom's in the models
//! (`pipeline/models.rs`), which then run the very code that loaders run.

#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

#[cfg(all(test, loom))]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};

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
