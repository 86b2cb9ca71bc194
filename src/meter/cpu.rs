//! CPU time of a loader's threads: each enlists itself, and a report asks the kernel for its times.
//!
//! The kernel counts, so threads write nothing while they run. Threads of a reader (pread, maps), of rayon's global pool and of
//! the user are not enlisted.

use crate::sync::Hold;
use std::sync::Mutex;

/// The purpose of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Plans, submits reads and takes their completions.
    Planner,
    /// Decodes.
    Worker,
    /// Gives full slots to a device.
    Copier,
    /// Has rows read directly into device memory.
    Direct,
}

/// The threads of one loader. A thread takes the lock at its start, and a report takes it.
#[derive(Debug, Default)]
pub(crate) struct Threads(Mutex<Vec<(Role, u32)>>);

impl Threads {
    /// The calling thread is one of these.
    pub(crate) fn enlist(&self, role: Role) {
        let id = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        self.0.hold().push((role, id));
    }

    /// CPU time of all threads of a role, and their run delay: the time that they were runnable without a core. `None` without
    /// such a thread, or when the kernel does not count.
    pub(crate) fn times(&self, role: Role) -> Option<(u64, u64)> {
        let threads = self.0.hold();
        let of_role = threads.iter().filter(|(of, _)| *of == role).map(|(_, id)| scheduled(*id));
        let sum = |a: Option<(u64, u64)>, b: Option<(u64, u64)>| {
            let ((cpu, delay), (more_cpu, more_delay)) = (a?, b?);
            Some((cpu.saturating_add(more_cpu), delay.saturating_add(more_delay)))
        };
        of_role.reduce(sum).flatten()
    }
}

fn scheduled(thread: u32) -> Option<(u64, u64)> {
    // Nanoseconds on a CPU, nanoseconds runnable without one, switches.
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    let mut times = text.split_whitespace().map(|time| time.parse().ok());
    Some((times.next()??, times.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn enlisted_threads_are_counted_by_role() {
        let threads = Threads::default();
        assert_eq!(threads.times(Role::Worker), None);
        threads.enlist(Role::Worker);
        if std::fs::metadata("/proc/self/task").is_err() || threads.times(Role::Worker).is_none() {
            return println!("skipped: this kernel does not count it");
        }
        let (before, began) = (threads.times(Role::Worker).unwrap().0, Instant::now());
        while threads.times(Role::Worker).unwrap().0 < before + 5_000_000 {
            assert!(began.elapsed() < Duration::from_secs(60), "a thread that works is not counted");
        }
        assert_eq!(threads.times(Role::Planner), None);
    }
}
