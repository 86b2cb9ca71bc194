//! Calls into a library that may hang, and that may close what is not its own.
//!
//! ```text
//! caller ──spawn──► thread: keep dups of 0, 1, 2 ─► the call ─► put back what was closed ─► answer
//!    └── waits for the answer or the deadline; then the thread is abandoned with all that it holds
//! ```
//!
//! A descriptor is put back by `F_DUPFD`, which takes a free number only: if another thread's `open` was given the number
//! in the meantime, it keeps it.

use rustix::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Silent {
    /// None came in time. The thread goes on.
    Late,
    /// The thread could not be started.
    NotStarted(std::io::Error),
    /// The thread panicked.
    Died,
}

/// Runs `call` on a thread of its own with standard input, output and error guarded, and waits for it for at most
/// `deadline`.
pub(super) fn within<T: Send + 'static>(
    deadline: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Silent> {
    let (answer, wait) = sync_channel(1);
    let guarded = move || {
        let kept = Kept::new();
        let result = call();
        kept.put_back();
        // Nobody waits any more when the deadline has passed.
        let _ = answer.send(result);
    };
    // The thread is never joined: what a library does at the end of a thread may hang as well.
    std::thread::Builder::new().name("feedline-cufile".into()).spawn(guarded).map_err(Silent::NotStarted)?;
    wait.recv_timeout(deadline).map_err(|error| match error {
        RecvTimeoutError::Timeout => Silent::Late,
        RecvTimeoutError::Disconnected => Silent::Died,
    })
}

/// Standard input, output and error as they were, each with its flags; `None` for one that was closed.
struct Kept([Option<(OwnedFd, FdFlags)>; 3]);

impl Kept {
    fn new() -> Self {
        let keep = |fd: BorrowedFd<'_>| Some((fcntl_dupfd_cloexec(fd, 3).ok()?, fcntl_getfd(fd).ok()?));
        Self([keep(std::io::stdin().as_fd()), keep(std::io::stdout().as_fd()), keep(std::io::stderr().as_fd())])
    }

    fn put_back(self) {
        let closed = |fd: BorrowedFd<'_>| fcntl_getfd(fd) == Err(Errno::BADF);
        let closed =
            [closed(std::io::stdin().as_fd()), closed(std::io::stdout().as_fd()), closed(std::io::stderr().as_fd())];
        for ((number, closed), kept) in (0..).zip(closed).zip(self.0) {
            let Some((copy, flags)) = kept.filter(|_| closed) else { continue };
            let Ok(back) = fcntl_dupfd_cloexec(&copy, number) else { continue };
            if back.as_raw_fd() == number {
                let _ = fcntl_setfd(&back, flags);
                // It belongs to the process again.
                let _ = back.into_raw_fd();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_comes_back_and_a_panic_is_told_from_a_late_one() {
        assert_eq!(within(Duration::from_secs(60), || 7).unwrap(), 7);
        let died = within(Duration::from_secs(60), || std::panic::resume_unwind(Box::new(())));
        assert!(matches!(died, Err::<(), _>(Silent::Died)));
        let late = within(Duration::from_millis(1), || std::thread::sleep(Duration::from_secs(600)));
        assert!(matches!(late, Err(Silent::Late)));
    }
}
