//! Waits for keys, and sees when the terminal they would come from goes away.
//!
//! ```text
//! gone? ─► read already? ─► wait here ─► gone? ─► read
//!             crossterm, which is never let wait: at the end of a terminal it turns in circles, and does not return
//! ```

use crossterm::event;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::io::{self, IsTerminal};
use std::time::Duration;

/// Where keys come from: standard input, or the terminal of the process.
pub(super) struct Keys {
    /// `None` when there is neither; then crossterm says why.
    tty: Option<OwnedFd>,
}

impl Keys {
    /// What crossterm will read.
    pub(super) fn open() -> Self {
        let stdin = io::stdin();
        let tty = if stdin.is_terminal() {
            stdin.as_fd().try_clone_to_owned().ok()
        } else {
            std::fs::File::options().read(true).write(true).open("/dev/tty").ok().map(OwnedFd::from)
        };
        Self { tty }
    }

    /// Whether there is something to read, after `limit` at the latest; `None` when the terminal is gone. The size may
    /// have changed, too.
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

/// Waits for input; whether there will be none any more.
fn gone(tty: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(tty, PollFlags::IN)];
    match poll(&mut fds, Timespec::try_from(limit).ok().as_ref()) {
        // A signal: the size has changed, perhaps.
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
    fn a_terminal_whose_other_end_is_closed_is_gone_also_while_it_is_waited_for() {
        let (mut keyboard, tty) = UnixStream::pair().unwrap();
        assert!(!gone(tty.as_fd(), Duration::ZERO).unwrap());
        keyboard.write_all(b"q").unwrap();
        assert!(!gone(tty.as_fd(), Duration::from_secs(60)).unwrap());
        drop(keyboard);
        // What was pressed before is not read any more.
        assert!(gone(tty.as_fd(), Duration::ZERO).unwrap());
        let (keyboard, tty) = UnixStream::pair().unwrap();
        let waits = std::thread::spawn(move || gone(tty.as_fd(), Duration::from_secs(60)).unwrap());
        drop(keyboard);
        assert!(waits.join().unwrap());
        let keys = Keys { tty: Some(UnixStream::pair().unwrap().1.into()) };
        assert_eq!(keys.wait(Duration::from_secs(60)).unwrap(), None);
    }
}
