//! Ends a `wait` from another thread, at the cost of one atomic if no thread waits.
//!
//! One word holds AWAKE, SLEEPING, NUDGED (a completion of the reader's own threads) or NOTIFIED (a
//! wake). The driver sleeps only after AWAKE → SLEEPING succeeded. `wake` raises the word to
//! NOTIFIED, and makes a system call only if it found SLEEPING.
//!
//! No wake-up is lost, because all changes of one atomic are totally ordered. If the raise comes
//! first, the driver's exchange fails and it does not sleep. If the exchange comes first, the waker
//! finds SLEEPING and signals. The signal itself cannot be lost either: an eventfd stays readable
//! until it is read, and a futex wait returns at once if the word is no longer SLEEPING. Writes
//! before `wake` are visible after `wait`, because both sides change the same word (acquire,
//! release).

use feedline_base::sync::atomic::{AtomicU32, Ordering};
use feedline_base::sync::futex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

const AWAKE: u32 = 0;
const SLEEPING: u32 = 1;
const NUDGED: u32 = 2;
const NOTIFIED: u32 = 3;

/// Ends a [`Reader::wait`](super::Reader::wait) from any thread: the current one or the next one.
#[derive(Clone)]
pub struct Waker(Arc<Bell>);

impl Waker {
    /// Ends the wait. Costs one atomic exchange while the reader is not asleep.
    pub fn wake(&self) {
        self.0.ring();
    }
}

/// The reader's side of a [`Waker`].
pub struct Bell {
    state: AtomicU32,
    /// The descriptor that a ring can poll; without it, the driver waits on the word itself.
    event: Option<OwnedFd>,
}

impl Bell {
    /// For readers that sleep in [`Bell::sleep`].
    pub fn futex() -> Arc<Self> {
        Arc::new(Self {
            state: AtomicU32::new(AWAKE),
            event: None,
        })
    }

    /// For readers that sleep in a ring and poll [`Bell::event`].
    pub(crate) fn eventfd() -> std::io::Result<Arc<Self>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self {
            state: AtomicU32::new(AWAKE),
            event: Some(event),
        }))
    }

    pub fn waker(self: &Arc<Self>) -> Waker {
        Waker(self.clone())
    }

    pub(crate) fn event(&self) -> Option<BorrowedFd<'_>> {
        self.event.as_ref().map(AsFd::as_fd)
    }

    /// Rings for a wake, which ends the wait.
    pub(crate) fn ring(&self) {
        self.raise(NOTIFIED);
    }

    /// Rings for a completion, so that the driver looks again.
    pub fn nudge(&self) {
        self.raise(NUDGED);
    }

    fn raise(&self, state: u32) {
        if self.state.fetch_max(state, Ordering::AcqRel) != SLEEPING {
            return;
        }
        match &self.event {
            // Fails only with 2^64 - 2 pending signals, and then the eventfd is readable anyway.
            Some(event) => drop(rustix::io::write(event, &1_u64.to_ne_bytes())),
            None => drop(futex::wake(&self.state, futex::Flags::PRIVATE, 1)),
        }
    }

    /// Announces sleep. An error means an event since the last `rise`, which this call consumes: do
    /// not sleep. The error is true for a wake, false for a completion.
    pub fn doze(&self) -> Result<(), bool> {
        match self
            .state
            .compare_exchange(AWAKE, SLEEPING, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => Ok(()),
            Err(_) => Err(self.rise()),
        }
    }

    /// Ends the sleep that `doze` announced; true if a wake arrived.
    pub fn rise(&self) -> bool {
        self.state.swap(AWAKE, Ordering::AcqRel) == NOTIFIED
    }

    /// Whether the driver sleeps and no event has come since.
    #[cfg(any(test, feature = "unstable"))]
    pub fn is_asleep(&self) -> bool {
        self.state.load(Ordering::Acquire) == SLEEPING
    }

    /// Empties the eventfd after the ring saw it readable.
    pub(crate) fn drain(&self) {
        if let Some(event) = &self.event {
            let _ = rustix::io::read(event, &mut [0_u8; 8]);
        }
    }

    /// Sleeps after `doze` until `ring` or `deadline`.
    pub fn sleep(&self, deadline: Option<Instant>) {
        while self.state.load(Ordering::Acquire) == SLEEPING {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return;
            }
            let timeout = left.and_then(|left| left.try_into().ok());
            // After every error look at the word again: EAGAIN, EINTR, ETIMEDOUT.
            let _ = futex::wait(
                &self.state,
                futex::Flags::PRIVATE,
                SLEEPING,
                timeout.as_ref(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_before_the_sleep_prevents_it() {
        let bell = Bell::futex();
        bell.waker().wake();
        assert_eq!(bell.doze(), Err(true));
        assert_eq!(bell.doze(), Ok(()), "it was consumed");
        bell.ring();
        bell.sleep(None);
        assert!(bell.rise() && !bell.rise());
    }

    #[test]
    fn a_completion_does_not_hide_a_wake() {
        let bell = Bell::futex();
        bell.ring();
        bell.nudge();
        assert_eq!(bell.doze(), Err(true));
        bell.nudge();
        assert_eq!(bell.doze(), Err(false));
    }

    #[test]
    fn an_eventfd_is_written_only_for_a_sleeper() {
        let bell = Bell::eventfd().unwrap();
        let readable =
            |bell: &Bell| rustix::io::read(bell.event().unwrap(), &mut [0_u8; 8]).is_ok();
        bell.ring();
        assert!(!readable(&bell) && bell.rise());
        assert_eq!(bell.doze(), Ok(()));
        bell.ring();
        bell.ring();
        assert!(readable(&bell) && bell.rise());
    }

    #[test]
    fn no_wake_up_is_lost_in_a_hundred_thousand_races() {
        let bell = Bell::futex();
        let turns = if cfg!(miri) { 100 } else { 100_000_u32 };
        let seen = Arc::new(AtomicU32::new(0));
        let waker = bell.waker();
        let acknowledged = seen.clone();
        let other = std::thread::spawn(move || {
            for turn in 0..turns {
                waker.wake();
                while acknowledged.load(Ordering::Acquire) <= turn {
                    std::hint::spin_loop();
                    std::thread::yield_now();
                }
            }
        });
        for turn in 0..turns {
            let deadline = Instant::now() + Duration::from_secs(60);
            let mut woken = false;
            while !woken {
                assert!(Instant::now() < deadline, "wake {turn} was lost");
                woken = bell.doze().map_or_else(
                    |woken| woken,
                    |()| {
                        bell.sleep(Some(deadline));
                        bell.rise()
                    },
                );
            }
            seen.store(turn + 1, Ordering::Release);
        }
        other.join().unwrap();
    }
}
