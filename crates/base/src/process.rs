//! Detection of forked children: a child has the loader's memory but not its threads.

#![allow(unsafe_code)]

use crate::error::{Error, ErrorKind, Result, Stage};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Identifies a process, distinct from all its ancestors. For wrappers of this crate that have
/// locks of their own, because a forked child must not wait for these locks.
///
/// It is a number. The kernel zeroes the number's page in a forked child (`MADV_WIPEONFORK`), so a
/// check is one load. `getpid` would cost a system call in each `next()` and each drop. The zeroed
/// page also reveals a child made by a raw `clone`, which skips the `pthread_atfork` handlers, and
/// a child in another pid namespace whose pid there equals its parent's pid. Kernels before 4.14
/// refuse the advice; there the number is the pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u64);

impl Process {
    /// The calling process.
    pub fn current() -> Self {
        static WORD: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();
        // Not wiped, so a child continues counting from its parent's number.
        static LAST: AtomicU64 = AtomicU64::new(0);
        let Some(word) = WORD.get_or_init(wiped_on_fork) else {
            return Self(std::process::id().into());
        };
        match word.load(Ordering::Relaxed) {
            0 => {
                let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                let raced = word.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
                Self(raced.err().unwrap_or(number))
            }
            number => Self(number),
        }
    }

    /// Whether the calling process is a forked child of this one.
    pub fn is_forked(self) -> bool {
        self != Self::current()
    }

    /// Errors: [`ErrorKind::Forked`] in a forked child.
    pub fn check(self) -> Result<()> {
        if self.is_forked() {
            let message = "this process was forked after its loader was built and lacks the loader's \
                 threads: build the loader in the child";
            return Err(Error::new(ErrorKind::Forked, Stage::Batch, message));
        }
        Ok(())
    }
}

/// A word that is 0 at first and in each new forked child. It is never unmapped.
fn wiped_on_fork() -> Option<&'static AtomicU64> {
    if cfg!(miri) {
        // Miri supports neither `madvise` nor `fork`.
        return None;
    }
    let mut map = memmap2::MmapMut::map_anon(crate::PAGE).ok()?;
    let start = map.as_mut_ptr();
    let len = map.len();
    // SAFETY: the range is a private anonymous mapping of our own, and nothing points into it yet.
    unsafe { rustix::mm::madvise(start.cast(), len, rustix::mm::Advice::LinuxWipeOnFork) }.ok()?;
    std::mem::forget(map);
    // SAFETY: the page is zeroed, aligned, larger than the word, never unmapped, and used only as
    // this atomic. The kernel wipes the child's copy before any code of the child runs.
    Some(unsafe { AtomicU64::from_ptr(start.cast()) })
}
