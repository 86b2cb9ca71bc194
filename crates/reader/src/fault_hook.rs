//! The hook between readers and the system: every open and every read attempt goes through it, so
//! that tests can inject faults.
//!
//! ```text
//! uring, pread, mmap, cache ── inject(call) ──► Injection ── next ──► the range that is really requested
//!                                              └───── result ─► the result that the reader sees
//! ```
//!
//! All code above the hook (`progress`, `files`, the readers) is the code that users run. Without
//! the feature `unstable`, both types are empty, every method returns its input, and the compiler
//! removes them. With the feature, they come from `faulty`.

#[cfg(feature = "unstable")]
pub use super::faulty::{FaultHook, Injection};
#[cfg(not(feature = "unstable"))]
pub use plain::{FaultHook, Injection};

#[cfg(not(feature = "unstable"))]
mod plain {
    use super::super::ReaderOptions;
    use super::super::fault_point::Attempt;
    use super::super::progress::Next;
    use feedline_core::storage::SourceId;
    use rustix::io::Errno;
    use std::time::Duration;

    /// A hook and an injection without faults.
    #[derive(Clone, Default)]
    pub struct FaultHook;

    pub type Injection = FaultHook;

    impl FaultHook {
        pub fn of(_: &ReaderOptions) -> Self {
            Self
        }

        #[inline(always)]
        pub(crate) fn pause(&self, pause: Duration) -> Duration {
            pause
        }

        #[inline(always)]
        pub(crate) fn open(&self, _: SourceId) -> Self {
            Self
        }

        #[inline(always)]
        pub(in super::super) fn inject(&self, _: impl FnOnce() -> Attempt) -> Self {
            Self
        }

        #[inline(always)]
        pub(crate) fn next(&self, next: Next) -> Next {
            next
        }

        #[inline(always)]
        pub(crate) fn instead(&self) -> Option<i32> {
            None
        }

        #[inline(always)]
        pub(crate) fn opened<T>(self, open: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
            open()
        }

        #[inline(always)]
        pub(crate) fn around(
            self,
            next: Next,
            buf: &mut [u8],
            read: impl FnOnce(Next, &mut [u8]) -> Result<usize, Errno>,
        ) -> Result<usize, Errno> {
            read(next, &mut buf[next.at..next.at + next.len])
        }
    }
}
