//! Counters of the kernel for a process or a thread.

use std::fs;
use std::path::PathBuf;

/// A process, or a thread of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Task {
    /// Another process, by its first thread.
    Process(u32),
    /// A thread of a process: process, thread.
    Thread(u32, u32),
}

impl Task {
    /// A file of the kernel about the task.
    pub fn file(self, name: &str) -> PathBuf {
        match self {
            Self::Process(process) => format!("/proc/{process}/{name}"),
            Self::Thread(process, thread) => format!("/proc/{process}/task/{thread}/{name}"),
        }
        .into()
    }

    fn read(self, name: &str) -> Option<String> {
        fs::read_to_string(self.file(name)).ok()
    }

    /// CPU time of the task and the time in which it was ready without a core, in nanoseconds. Of a
    /// process these are the times of its first thread.
    pub fn scheduled(self) -> Option<(u64, u64)> {
        scheduled(&self.read("schedstat")?)
    }

    /// CPU time of all threads of the process, of those that ended as well, in nanoseconds. The
    /// kernel counts it in hundredths of a second.
    pub fn cpu_ns(self) -> Option<u64> {
        let ticks = cpu_ticks(&self.read("stat")?)?;
        Some(ticks * (1_000_000_000 / rustix::param::clock_ticks_per_second()))
    }

    /// The state: running, asleep, in uninterruptible sleep.
    pub fn state(self) -> Option<char> {
        state(&self.read("stat")?)
    }

    pub fn bytes(self) -> Option<Bytes> {
        Some(Bytes::of(&self.read("io")?))
    }

    /// Resident memory, in bytes.
    pub fn resident(self) -> Option<u64> {
        let text = self.read("statm")?;
        let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
        Some(pages * rustix::param::page_size() as u64)
    }

    /// The name of the thread, or of the process's first one.
    pub fn name(self) -> Option<String> {
        Some(self.read("comm")?.trim_end().to_string())
    }

    /// The threads of the task's process.
    pub fn threads(self) -> Vec<u32> {
        let (Self::Process(process) | Self::Thread(process, _)) = self;
        let Ok(all) = fs::read_dir(format!("/proc/{process}/task")) else {
            return Vec::new();
        };
        all.flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect()
    }
}

/// The children of a process that live.
pub fn children(process: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for thread in Task::Process(process).threads() {
        let text = Task::Thread(process, thread)
            .read("children")
            .unwrap_or_default();
        all.extend(
            text.split_whitespace()
                .filter_map(|id| id.parse::<u32>().ok()),
        );
    }
    all.sort_unstable();
    all
}

/// Bytes that a process moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// By devices, read-ahead included.
    pub device: u64,
    /// By system calls: files, sockets and pipes.
    pub read: u64,
    pub written: u64,
}

impl Bytes {
    fn of(text: &str) -> Self {
        Self {
            device: count(text, "read_bytes:"),
            read: count(text, "rchar:"),
            written: count(text, "wchar:"),
        }
    }
}

fn count(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        .unwrap_or(0)
}

fn scheduled(text: &str) -> Option<(u64, u64)> {
    let mut times = text.split_whitespace().map(|time| time.parse().ok());
    Some((times.next()??, times.next()??))
}

/// The fields of `stat` behind the name, which may contain anything.
fn behind_name(stat: &str) -> Option<std::str::SplitAsciiWhitespace<'_>> {
    Some(stat.rsplit_once(')')?.1.split_ascii_whitespace())
}

fn state(stat: &str) -> Option<char> {
    behind_name(stat)?.next()?.chars().next()
}

fn cpu_ticks(stat: &str) -> Option<u64> {
    // User and system time are the 14th and 15th field, and the state is the third one.
    let mut times = behind_name(stat)?
        .skip(11)
        .map(|time| time.parse::<u64>().ok());
    Some(times.next()?? + times.next()??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_from_the_texts_of_the_kernel() {
        let stat = "58 (a ) b) S 57 58 11 0 -1 4194304 137 0 1 0 12 30 0 0 20 0 1 0 2903 29 414";
        assert_eq!(state(stat), Some('S'));
        assert_eq!(cpu_ticks(stat), Some(42));
        assert_eq!(
            scheduled("1266105 1672487 4\n"),
            Some((1_266_105, 1_672_487))
        );
        let io = "rchar: 6976\nwchar: 5\nsyscr: 10\nsyscw: 0\nread_bytes: 36864\nwrite_bytes: 0\n";
        let bytes = Bytes {
            device: 36864,
            read: 6976,
            written: 5,
        };
        assert_eq!(Bytes::of(io), bytes);
    }

    #[test]
    fn texts_that_are_cut_give_nothing() {
        for text in ["", "58 (a", "58 (a) S 1 2", "x y"] {
            assert_eq!(cpu_ticks(text), None, "{text}");
            assert_eq!(scheduled(text), None, "{text}");
        }
        assert_eq!(state(""), None);
        assert_eq!(Bytes::of(""), Bytes::default());
    }

    #[test]
    fn this_process_has_counters_and_threads() {
        let own = Task::Process(std::process::id());
        assert!(own.cpu_ns().is_some() && own.resident() > Some(0));
        assert!(own.threads().contains(&std::process::id()));
        assert_eq!(Task::Process(u32::MAX).cpu_ns(), None);
    }
}
