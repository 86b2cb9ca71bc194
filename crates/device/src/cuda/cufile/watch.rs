//! Calls into a library that may hang, or close foreign descriptors.
//!
//! ```text
//! caller ──spawn──► thread: keep dups of 0, 1, 2 ─► the call ─► restore closed ones ─► answer
//!    └── waits for the answer or the deadline; then abandons the thread with everything it holds
//! ```
//!
//! `F_DUPFD` restores a descriptor only to a free number: if another thread's `open` got the number
//! meanwhile, that thread keeps it.

use crate::cuda::driver::beside_captures;
use feedline_base::thread;
use rustix::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// The reason why the call gave no answer.
#[derive(Debug)]
pub(super) enum Silent {
    /// The deadline passed. The thread continues.
    Late,
    /// The thread failed to start.
    NotStarted(std::io::Error),
    /// The thread panicked.
    Died,
}

/// Runs `call` on its own thread, with standard input, output and error guarded. Waits for at most
/// `deadline`.
pub(super) fn within<T: Send + 'static>(
    deadline: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Silent> {
    let (answer, wait) = sync_channel(1);
    // The thread is never joined: the library's cleanup at thread exit may hang too.
    thread::spawn("feedline-cufile", move || {
        let kept = SavedFds::new();
        // The library makes contexts, which would end another thread's capture of a graph.
        let result = beside_captures(call);
        kept.put_back();
        // After the deadline there is no receiver.
        let _ = answer.send(result);
    })
    .map_err(Silent::NotStarted)?;
    wait.recv_timeout(deadline).map_err(|error| match error {
        RecvTimeoutError::Timeout => Silent::Late,
        RecvTimeoutError::Disconnected => Silent::Died,
    })
}

/// Saved standard input, output and error with their flags; `None` for a closed one.
struct SavedFds([Option<(OwnedFd, FdFlags)>; 3]);

impl SavedFds {
    fn new() -> Self {
        let keep =
            |fd: BorrowedFd<'_>| Some((fcntl_dupfd_cloexec(fd, 3).ok()?, fcntl_getfd(fd).ok()?));
        Self([
            keep(std::io::stdin().as_fd()),
            keep(std::io::stdout().as_fd()),
            keep(std::io::stderr().as_fd()),
        ])
    }

    fn put_back(self) {
        let closed = |fd: BorrowedFd<'_>| fcntl_getfd(fd) == Err(Errno::BADF);
        let closed = [
            closed(std::io::stdin().as_fd()),
            closed(std::io::stdout().as_fd()),
            closed(std::io::stderr().as_fd()),
        ];
        for ((number, closed), kept) in (0..).zip(closed).zip(self.0) {
            let Some((copy, flags)) = kept.filter(|_| closed) else {
                continue;
            };
            let Ok(back) = fcntl_dupfd_cloexec(&copy, number) else {
                continue;
            };
            if back.as_raw_fd() == number {
                let _ = fcntl_setfd(&back, flags);
                // The process owns it again.
                let _ = back.into_raw_fd();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_panics_and_timeouts_are_distinct() {
        assert_eq!(within(Duration::from_secs(60), || 7).unwrap(), 7);
        let died = within(Duration::from_secs(60), || {
            std::panic::resume_unwind(Box::new(()))
        });
        assert!(matches!(died, Err::<(), _>(Silent::Died)));
        let late = within(Duration::from_millis(1), || {
            std::thread::sleep(Duration::from_secs(600))
        });
        assert!(matches!(late, Err(Silent::Late)));
    }
}
