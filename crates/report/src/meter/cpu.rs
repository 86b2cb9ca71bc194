//! CPU time of a loader's threads, of the process and its control groups, as the kernel counts
//! them.
//!
//! Each thread enlists itself, and a report asks the kernel for its times: threads write nothing
//! while they run. Threads of a reader (pread, maps) and of rayon's global pool are not enlisted.
//! Of the user's threads, only those that call `next()` are enlisted.

use super::snapshot::Cpu;
use crate::meter::PipelineStage;
use feedline_base::cgroup;
use feedline_base::sync::Hold;
use feedline_core::order::Cores;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// The threads of one loader. A thread takes the lock at its start; a report takes it too.
#[derive(Debug, Default)]
pub struct Threads {
    all: Mutex<Vec<Enlisted>>,
    /// The last thread that called `next()`.
    consumer: AtomicU32,
}

/// A thread's stage, its id, and its CPU time and run delay before it was enlisted.
type Enlisted = (PipelineStage, u32, (u64, u64));

impl Threads {
    /// Enlists the calling thread in the stage.
    pub fn enlist(&self, stage: PipelineStage) {
        let id = own_id();
        let mut all = self.all.hold();
        if !all
            .iter()
            .any(|(of, known, _)| (*of, *known) == (stage, id))
        {
            all.push((stage, id, scheduled(id).unwrap_or_default()));
        }
    }

    /// Notes that the calling thread requests a batch. Costs one comparison, unless another thread
    /// made the last request.
    pub fn consumes(&self) {
        thread_local!(static ID: u32 = own_id());
        let id = ID.with(|id| *id);
        if self.consumer.load(Ordering::Relaxed) != id {
            self.consumer.store(id, Ordering::Relaxed);
            self.enlist(PipelineStage::Consumer);
        }
    }

    /// CPU time of all threads of a stage, and their run delay: the time that they were runnable
    /// without a core. `None` if no such thread is alive, or if the kernel does not count these
    /// times.
    pub(crate) fn times(&self, stage: PipelineStage) -> Option<(u64, u64)> {
        let threads = self.all.hold();
        threads
            .iter()
            .filter_map(|(of, id, before)| {
                let (cpu, delay) = (*of == stage).then(|| scheduled(*id)).flatten()?;
                Some((cpu.saturating_sub(before.0), delay.saturating_sub(before.1)))
            })
            .reduce(|a, b| (a.0.saturating_add(b.0), a.1.saturating_add(b.1)))
    }
}

fn own_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

fn scheduled(thread: u32) -> Option<(u64, u64)> {
    // Nanoseconds on a CPU, nanoseconds runnable without one, switches.
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    let mut times = text.split_whitespace().map(|time| time.parse().ok());
    Some((times.next()??, times.next()??))
}

impl Cpu {
    /// CPU time of the process, and the tightest quota of its control groups.
    pub fn now() -> Self {
        let process = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let process_ns = process.tv_sec as u64 * 1_000_000_000 + process.tv_nsec as u64;
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
        let others_ns = cores_ns().map(|all| all.saturating_sub(process_ns));
        let loaders_ns = loaders_ns().unwrap_or(0);
        let cores = Cores::here();
        Self {
            process_ns,
            loaders_ns,
            others_ns,
            local_ranks: cores.ranks() as u32,
            sharing_ranks: cores.sharing() as u32,
            ..Self::of_groups(&groups, cores_at_once(), read)
        }
    }

    /// Reads the quota and its counts, for a process that uses at most `cores` cores at once.
    fn of_groups(groups: &str, cores: u64, read: impl Fn(&Path) -> Option<String>) -> Self {
        let mut own = Self::default();
        for folder in cgroup::folders(groups, "cpu") {
            let text = |name: &str| read(&folder.join(name));
            let number = |text: &str| text.trim().parse::<f64>().ok();
            // v2 has quota and period in one file; -1 (v1) and "max" (v2) mean no quota.
            let both = text("cpu.max").or_else(|| {
                Some(format!(
                    "{} {}",
                    text("cpu.cfs_quota_us")?.trim(),
                    text("cpu.cfs_period_us")?
                ))
            });
            let quota = both.as_deref().and_then(|both| both.split_once(' '));
            let Some((quota, period)) =
                quota.and_then(|(of, period)| Some((number(of)?, number(period)?)))
            else {
                continue;
            };
            if quota <= 0.0
                || period <= 0.0
                || own.quota.is_some_and(|least| least <= quota / period)
            {
                continue;
            }
            let stat = text("cpu.stat").unwrap_or_default();
            let count = |name: &str| -> Option<u64> {
                stat.lines()
                    .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
            };
            own.quota = Some(quota / period);
            own.periods = count("nr_periods").unwrap_or(0);
            own.throttled = count("nr_throttled").unwrap_or(0);
            // The name in v1, then the name in v2.
            let ns = count("throttled_time")
                .or_else(|| Some(count("throttled_usec")?.saturating_mul(1000)));
            own.throttled_ns = ns.unwrap_or(0) / cores.max(1);
        }
        own
    }
}

/// The number of cores that the process may use, or the number of its threads if that is smaller.
fn cores_at_once() -> u64 {
    let cores = rustix::thread::sched_getaffinity(None).map_or(1, |cores| cores.count().into());
    let threads =
        std::fs::read_dir("/proc/self/task").map_or(u64::MAX, |tasks| tasks.count() as u64);
    threads.min(cores).max(1)
}

/// CPU time of the threads whose names begin with `feedline`. Reads one file per thread of the
/// process, and is called only at the start of an iterator and for a report.
fn loaders_ns() -> Option<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?.flatten();
    let ours = tasks.filter(|task| {
        std::fs::read(task.path().join("comm")).is_ok_and(|name| name.starts_with(b"feedline"))
    });
    let times = ours.filter_map(|task| scheduled(task.file_name().to_str()?.parse().ok()?));
    Some(times.fold(0, |sum, (cpu, _)| sum + cpu))
}

/// Busy time of the cores that the process may use, since the machine was booted.
fn cores_ns() -> Option<u64> {
    let cores = rustix::thread::sched_getaffinity(None).ok()?;
    busy_ns(&std::fs::read_to_string("/proc/stat").ok()?, |core| {
        cores.is_set(core)
    })
}

/// Busy time of the cores for which `counts` is true, from the text of `/proc/stat`. `None` if the
/// text has no counts, as in some sandboxes.
fn busy_ns(stat: &str, counts: impl Fn(usize) -> bool) -> Option<u64> {
    let mut ticks = 0_u64;
    let tick_ns = 1_000_000_000 / rustix::param::clock_ticks_per_second();
    for line in stat.lines() {
        let mut words = line.strip_prefix("cpu").unwrap_or_default().split(' ');
        if !words
            .next()
            .and_then(|core| core.parse().ok())
            .is_some_and(&counts)
        {
            continue;
        }
        // User, nice, system, idle, waiting for devices, interrupts, soft interrupts, stolen by
        // other guests.
        let times: Vec<u64> = words.map_while(|time| time.parse().ok()).collect();
        ticks += [0, 1, 2, 5, 6, 7]
            .iter()
            .filter_map(|at| times.get(*at))
            .sum::<u64>();
    }
    (ticks > 0).then(|| ticks * tick_ns)
}

/// Bytes that devices read for the process, including read-ahead. Some kernels and containers do
/// not count them.
pub fn device_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("read_bytes:"))?
        .trim()
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::time::{Duration, Instant};

    #[test]
    fn enlisted_threads_are_counted_by_stage() {
        let threads = Threads::default();
        assert_eq!(threads.times(PipelineStage::Decode), None);
        threads.enlist(PipelineStage::Decode);
        if std::fs::metadata("/proc/self/task").is_err()
            || threads.times(PipelineStage::Decode).is_none()
        {
            return println!("skipped: this kernel does not count it");
        }
        let before = threads.times(PipelineStage::Decode).unwrap().0;
        let began = Instant::now();
        while threads.times(PipelineStage::Decode).unwrap().0 < before + 5_000_000 {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "a thread that works is not counted"
            );
        }
        assert_eq!(threads.times(PipelineStage::Order), None);
    }

    #[test]
    fn the_tightest_quota_of_v1_and_v2_is_found_with_its_counts() {
        let files: HashMap<&str, &str> = HashMap::from([
            ("/sys/fs/cgroup/pod/cpu.max", "150000 100000\n"),
            (
                "/sys/fs/cgroup/pod/cpu.stat",
                "usage_usec 9\nnr_periods 126\nnr_throttled 46\nthrottled_usec 7\n",
            ),
            ("/sys/fs/cgroup/pod/own/cpu.max", "max 100000\n"),
            ("/sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us", "50000\n"),
            ("/sys/fs/cgroup/cpu/docker/cpu.cfs_period_us", "100000\n"),
            (
                "/sys/fs/cgroup/cpu/docker/cpu.stat",
                "nr_periods 10\nnr_throttled 9\nthrottled_time 5\n",
            ),
            ("/sys/fs/cgroup/cpu/free/cpu.cfs_quota_us", "-1\n"),
            ("/sys/fs/cgroup/cpu/free/cpu.cfs_period_us", "100000\n"),
        ]);
        let table = [
            ("0::/pod/own\n", Some(1.5), (126, 46, 3500)),
            ("5:cpu,cpuacct:/docker\n0::/\n", Some(0.5), (10, 9, 2)),
            ("1:cpu:/free\n", None, (0, 0, 0)),
            ("nonsense", None, (0, 0, 0)),
        ];
        for (groups, quota, counts) in table {
            let found = Cpu::of_groups(groups, 2, |path| {
                files.get(path.to_str()?).map(|text| text.to_string())
            });
            let told = (found.periods, found.throttled, found.throttled_ns);
            assert_eq!((found.quota, told), (quota, counts), "{groups}");
        }
        assert!(Cpu::now().process_ns > 0);
    }

    #[test]
    fn busy_time_is_that_of_the_cores_of_the_process() {
        let stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 3 5000 70 4 5 6 0 0\ncpu1 1 0 0 9 0 0 \
             0 0\nintr 7\n";
        for (cores, ticks) in [
            (0..2, Some(139)),
            (0..1, Some(138)),
            (1..2, Some(1)),
            (2..3, None),
        ] {
            assert_eq!(
                busy_ns(stat, |core| cores.contains(&core)),
                ticks.map(|ticks| ticks * 10_000_000),
                "{cores:?}"
            );
        }
        assert_eq!(
            busy_ns("cpu  0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n", |_| true),
            None
        );
    }

    #[test]
    fn threads_that_take_batches_are_listed_once() {
        let threads = Threads::default();
        for _ in 0..3 {
            threads.consumes();
            std::thread::scope(|scope| drop(scope.spawn(|| threads.consumes())));
        }
        assert_eq!(threads.all.hold().len(), 4);
    }
}
