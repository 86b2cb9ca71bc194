//! Waits for keys, and detects the loss of their terminal.
//!
//! ```text
//! gone? ─► input buffered? ─► wait here ─► gone? ─► read
//!             by crossterm, which must never wait: at the end of a terminal it loops for ever
//! ```

use crossterm::event;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io::{self, IsTerminal};
use std::time::Duration;

/// The source of keys: standard input, or the terminal of the process.
pub(super) struct Keys {
    /// `None` without either; then crossterm gives the reason.
    tty: Option<OwnedFd>,
}

impl Keys {
    /// Opens the source that crossterm reads.
    pub(super) fn open() -> Self {
        let stdin = io::stdin();
        let tty = if stdin.is_terminal() {
            stdin.as_fd().try_clone_to_owned().ok()
        } else {
            std::fs::File::options().read(true).write(true).open("/dev/tty").ok().map(OwnedFd::from)
        };
        Self { tty }
    }

    /// Waits at most `limit`; returns whether there is input, or `None` if the terminal is gone. Returns early after a
    /// change of size.
    pub(super) fn wait(&self, limit: Duration) -> io::Result<Option<bool>> {
        let Some(tty) = &self.tty else { return event::poll(limit).map(Some) };
        for limit in [Duration::ZERO, limit] {
            if gone(tty.as_fd(), limit)? {
                return Ok(None);
            }
            if event::poll(Duration::ZERO)? {
                return Ok(Some(true));
            }
        }
        Ok(Some(false))
    }
}

/// Waits for input; returns whether there can be none any more.
fn gone(tty: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(tty, PollFlags::IN)];
    match poll(&mut fds, Timespec::try_from(limit).ok().as_ref()) {
        // A signal, perhaps of a new size.
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_closed_terminal_is_gone_even_during_a_wait() {
        let (mut keyboard, tty) = UnixStream::pair().unwrap();
        assert!(!gone(tty.as_fd(), Duration::ZERO).unwrap());
        keyboard.write_all(b"q").unwrap();
        assert!(!gone(tty.as_fd(), Duration::from_secs(60)).unwrap());
        drop(keyboard);
        // Earlier keys are not read any more.
        assert!(gone(tty.as_fd(), Duration::ZERO).unwrap());
        let (keyboard, tty) = UnixStream::pair().unwrap();
        let waits = std::thread::spawn(move || gone(tty.as_fd(), Duration::from_secs(60)).unwrap());
        drop(keyboard);
        assert!(waits.join().unwrap());
        let keys = Keys { tty: Some(UnixStream::pair().unwrap().1.into()) };
        assert_eq!(keys.wait(Duration::from_secs(60)).unwrap(), None);
    }
}
