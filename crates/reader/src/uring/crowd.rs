//! Which buffered reads go to the kernel's workers (`IOSQE_ASYNC`) instead of the ring's thread.
//!
//! The kernel copies a buffered read on the thread that submits it. For small reads on a free core
//! that is the cheapest way: 4 KiB by workers cost 1.75 times the CPU time. But the scheduler
//! shares busy cores among threads, so one thread for all copies gets one share. With six busy
//! programs on two cores, it ran for 0.17 s and waited for 0.6 s. 32 reader threads took half of
//! the time for the same epoch. So workers, each with its own share, execute
//!
//! * reads of [`LARGE`] bytes or more: cores copy them in parallel, also on a free machine. One
//!   submission of many such reads can delay a crowded thread's next check for a third of a second.
//! * all reads, while the ring's thread waits for a core.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// On two otherwise idle cores, workers took 0.96 of the time for cold reads of 256 KiB, and 0.98
/// for 1 MiB. Smaller reads take as long, with more CPU time.
const LARGE: usize = 256 << 10;
/// Interval between checks. It is so long that a single wait for the end of another thread's time
/// slice (3 ms) does not decide.
const WINDOW: Duration = Duration::from_millis(20);
/// The thread is crowded if it waited for a core during 1 / `PART` of a window.
const PART: u32 = 4;
/// How long a crowded thread sends its reads to workers. The next window is without workers again:
/// a thread that hands its reads off hardly runs, so its waits say little.
const CROWDED: Duration = Duration::from_secs(1);

/// The waits of one thread for a core.
pub(super) struct Crowd {
    /// The thread's `schedstat`; `None` if the kernel has none, or no decision depends on it.
    stat: Option<File>,
    waited: Duration,
    since: Instant,
    crowded: bool,
    /// Reads of at least this many bytes always go to workers.
    large: usize,
}

impl Crowd {
    /// A state that hands nothing off.
    pub(super) fn none() -> Self {
        Self {
            stat: None,
            waited: Duration::ZERO,
            since: Instant::now(),
            crowded: false,
            large: usize::MAX,
        }
    }

    /// The state of the calling thread, which alone may call [`look`](Self::look).
    pub(super) fn here() -> Self {
        let stat = File::open("/proc/thread-self/schedstat").ok();
        let waited = stat.as_ref().and_then(waits).unwrap_or_default();
        Self {
            stat,
            waited,
            large: LARGE,
            ..Self::none()
        }
    }

    /// Whether workers execute a buffered read of `len` bytes.
    pub(super) fn hands_off(&self, len: usize) -> bool {
        self.crowded || len >= self.large
    }

    /// Asks the kernel for the thread's waits once per window.
    pub(super) fn look(&mut self, now: Instant) {
        let due = if self.crowded { CROWDED } else { WINDOW };
        if let Some(stat) = self
            .stat
            .as_ref()
            .filter(|_| now.saturating_duration_since(self.since) >= due)
        {
            self.judge(waits(stat).unwrap_or_default(), now);
        }
    }

    fn judge(&mut self, waited: Duration, now: Instant) {
        let window = now.saturating_duration_since(self.since);
        self.crowded = !self.crowded && waited.saturating_sub(self.waited) * PART > window;
        self.waited = waited;
        self.since = now;
    }
}

/// The time that the thread has waited for a core: the second number, after its time on a core.
fn waits(stat: &File) -> Option<Duration> {
    let mut text = [0; 64];
    let read = stat.read_at(&mut text, 0).ok()?;
    std::str::from_utf8(&text[..read])
        .ok()?
        .split(' ')
        .nth(1)?
        .parse()
        .ok()
        .map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Crowd {
        /// A fixed verdict.
        pub(in super::super) fn known(crowded: bool) -> Self {
            Self {
                crowded,
                ..Self::none()
            }
        }
    }

    #[test]
    fn a_quarter_of_a_window_makes_a_crowd_until_the_next_look() {
        let mut crowd = Crowd::none();
        let start = crowd.since;
        let ms = Duration::from_millis;
        // Time, waits so far, crowded.
        for (now, waited, crowded) in [
            (20, 5, false),
            (40, 11, true),
            (1040, 900, false),
            (1060, 906, true),
        ] {
            crowd.judge(ms(waited), start + ms(now));
            assert_eq!(
                (crowd.hands_off(1), crowd.waited),
                (crowded, ms(waited)),
                "{now}"
            );
        }
    }

    #[test]
    fn a_thread_looks_once_per_window() {
        let mut crowd = Crowd::here();
        assert!(crowd.hands_off(LARGE) && !crowd.hands_off(LARGE - 1));
        crowd.crowded = true;
        crowd.look(crowd.since + CROWDED / 2);
        assert!(crowd.hands_off(1));
        crowd.look(crowd.since + CROWDED);
        assert!(!crowd.hands_off(1) || crowd.stat.is_none());
    }
}
