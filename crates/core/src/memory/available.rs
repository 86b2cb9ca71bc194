//! Memory that is free for this process, within the limits of the system and of its control groups
//! (v1 and v2).

use crate::order::local_ranks;
use feedline_base::cgroup;
use std::path::Path;

/// Bytes that the page cache can still take.
pub fn for_page_cache() -> Option<u64> {
    free(false, |path| std::fs::read_to_string(path).ok())
}

/// Maximum number of bytes that the process can still get, including swap and the kernel's caches
/// and reserves. A process that writes to more is killed.
pub(crate) fn at_most() -> Option<u64> {
    free(true, |path| std::fs::read_to_string(path).ok())
}

/// Memory for the ranks of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub ranks: u64,
    /// Free bytes for this rank, as of [`for_rank`].
    pub own: u64,
    /// Free bytes for memory that all ranks share, as of [`at_most`].
    pub all: u64,
    /// The machine's memory, or the limit of a control group.
    pub limit: u64,
}

/// Like [`at_most`], for one of the ranks of this machine: at most its share of all memory, so that
/// ranks that start together do not each take all free memory. Memory that ranks share is
/// subtracted once, before the rest is divided.
pub fn for_rank() -> Option<u64> {
    room().map(|room| room.own)
}

/// Memory for the ranks of this machine, if the system tells.
pub fn room() -> Option<Room> {
    of_ranks(local_ranks() as u64, |path| {
        std::fs::read_to_string(path).ok()
    })
}

fn of_ranks(ranks: u64, read: impl Fn(&Path) -> Option<String>) -> Option<Room> {
    let all = free(true, &read)?;
    let meminfo = read(Path::new("/proc/meminfo"))?;
    let machine = value(&meminfo, "MemTotal:").map_or(u64::MAX, |kib| kib * 1024);
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let limits = cgroup::folders(&groups, "memory")
        .into_iter()
        .flat_map(|folder| {
            LIMITS
                .into_iter()
                .filter_map(|name| read(&folder.join(name))?.trim().parse::<u64>().ok())
                .collect::<Vec<_>>()
        });
    let status = read(Path::new("/proc/self/status")).unwrap_or_default();
    let resident = |name: &str| value(&status, name).map_or(0, |kib| kib * 1024);
    let limit = limits.fold(machine, u64::min);
    let part = limit.saturating_sub(resident("RssShmem:")) / ranks.max(1);
    let own = match ranks {
        0 | 1 => all,
        _ => all.min(part.saturating_sub(resident("RssAnon:"))),
    };
    Some(Room {
        ranks,
        own,
        all,
        limit,
    })
}

/// Files with the limits of a group's memory. Above `memory.high` its processes are slowed down
/// until they make no progress.
const LIMITS: [&str; 3] = ["memory.max", "memory.high", "memory.limit_in_bytes"];

fn free(most: bool, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let meminfo = read(Path::new("/proc/meminfo"))?;
    let kib = |name: &str| value(&meminfo, name).map_or(0, |kib| kib * 1024);
    let mut system = value(&meminfo, "MemAvailable:")? * 1024;
    let mut swap = 0;
    if most {
        // `MemAvailable` leaves out reserves, a part of the page cache, and the whole cache of ZFS.
        let parts = [
            "MemFree:",
            "Active(file):",
            "Inactive(file):",
            "SReclaimable:",
        ]
        .map(kib);
        let zfs = read(Path::new("/proc/spl/kstat/zfs/arcstats"))
            .and_then(|text| value(&text, "size"))
            .unwrap_or(0);
        system = system.max(parts.iter().sum()) + zfs;
        swap = kib("SwapFree:");
    }
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    Some(
        of_groups(&groups, most.then_some(swap), read)
            .unwrap_or(u64::MAX)
            .min(system + swap),
    )
}

/// The least free memory of this process's groups and their ancestors: limit − (usage − file pages,
/// which can be reclaimed). With `swap`, the bytes that the system can swap and the kernel's slabs
/// also count as free.
fn of_groups(
    groups: &str,
    swap: Option<u64>,
    read: impl Fn(&Path) -> Option<String>,
) -> Option<u64> {
    let mut least: Option<u64> = None;
    for folder in cgroup::folders(groups, "memory") {
        let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
        let stat = read(&folder.join("memory.stat")).unwrap_or_default();
        // v1 does not distinguish slabs from the kernel's other memory.
        let reclaimed = file_pages(&stat)
            + swap
                .and_then(|_| {
                    value(&stat, "slab_reclaimable")
                        .or_else(|| number("memory.kmem.usage_in_bytes"))
                })
                .unwrap_or(0);
        // "max" (v2) does not parse, and v1 expresses "no limit" as a number of bytes that no
        // machine has.
        let left = |limit: &str, usage: &str, reclaimed| {
            Some(number(limit)?.saturating_sub(number(usage)?.saturating_sub(reclaimed)))
        };
        // v2 limits swap alone, v1 memory and swap together.
        let swap = left("memory.swap.max", "memory.swap.current", 0)
            .unwrap_or(u64::MAX)
            .min(swap.unwrap_or(0));
        let all = [
            left("memory.max", "memory.current", reclaimed).map(|left| left.saturating_add(swap)),
            left("memory.high", "memory.current", reclaimed).map(|left| left.saturating_add(swap)),
            left("memory.limit_in_bytes", "memory.usage_in_bytes", reclaimed)
                .map(|left| left.saturating_add(swap)),
            left(
                "memory.memsw.limit_in_bytes",
                "memory.memsw.usage_in_bytes",
                reclaimed,
            ),
        ];
        least = least.into_iter().chain(all.into_iter().flatten()).min();
    }
    least
}

/// Bytes of file pages in `memory.stat`: the group's and, in v1, those of its subgroups.
fn file_pages(stat: &str) -> u64 {
    let pages =
        |kind| value(stat, &format!("total_{kind}_file")).or(value(stat, &format!("{kind}_file")));
    pages("inactive").unwrap_or(0) + pages("active").unwrap_or(0)
}

/// The last number in the line that begins with `name`.
fn value(text: &str, name: &str) -> Option<u64> {
    let words = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(char::is_whitespace))?;
    words
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .next_back()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Free memory of a machine with these files, without and with reclaimable memory.
    fn free_of(files: &[(&str, &str)]) -> (Option<u64>, Option<u64>) {
        let files: HashMap<&str, &str> = files.iter().copied().collect();
        let read = |path: &Path| files.get(path.to_str()?).map(|text| text.to_string());
        (free(false, read), free(true, read))
    }

    const HUGE: (&str, &str) = (
        "/proc/meminfo",
        "MemTotal: 9000000 kB\nMemAvailable: 9000000 kB\nSwapFree: 0 kB\n",
    );
    const NO_LIMIT: &str = "9223372036854771712\n";

    #[test]
    fn available_memory_is_read_from_meminfo() {
        let text = "MemTotal: 24000000 kB\nMemFree:  1 kB\nMemAvailable:   22000000 kB\n";
        let available = Some(22_000_000 * 1024);
        assert_eq!(free_of(&[("/proc/meminfo", text)]), (available, available));
        assert_eq!(
            free_of(&[("/proc/meminfo", "MemTotal: 1 kB")]),
            (None, None)
        );
        assert!(for_page_cache().is_some() && at_most().is_some());
    }

    #[test]
    fn swap_caches_and_reserves_count_only_before_a_refusal() {
        let text = "MemFree: 5 kB\nMemAvailable: 6 kB\nActive(file): 2 kB\nInactive(file): 3 \
             kB\nSwapFree: 100 kB\nSReclaimable: 1 kB\n";
        let kib = |count: u64| Some(count * 1024);
        assert_eq!(free_of(&[("/proc/meminfo", text)]), (kib(6), kib(111)));
        let arc = (
            "/proc/spl/kstat/zfs/arcstats",
            "name type data\nc_max 4 9\nsize                            4    2048\n",
        );
        assert_eq!(free_of(&[("/proc/meminfo", text), arc]), (kib(6), kib(113)));
    }

    #[test]
    fn the_tightest_cgroup_v1_or_v2_bounds_the_page_cache() {
        let files = [
            HUGE,
            ("/sys/fs/cgroup/a/memory.max", "8000\n"),
            ("/sys/fs/cgroup/a/memory.current", "3000\n"),
            (
                "/sys/fs/cgroup/a/memory.stat",
                "anon 1000\ninactive_file 1500\nactive_file 500\nslab_reclaimable 100\n",
            ),
            ("/sys/fs/cgroup/h/memory.max", "8000\n"),
            ("/sys/fs/cgroup/h/memory.high", "6000\n"),
            ("/sys/fs/cgroup/h/memory.current", "1000\n"),
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/b/memory.current", "3000\n"),
            (
                "/sys/fs/cgroup/memory/docker/memory.limit_in_bytes",
                "5000\n",
            ),
            (
                "/sys/fs/cgroup/memory/docker/memory.usage_in_bytes",
                "4000\n",
            ),
            (
                "/sys/fs/cgroup/memory/docker/memory.kmem.usage_in_bytes",
                "40\n",
            ),
            (
                "/sys/fs/cgroup/memory/docker/memory.stat",
                "inactive_file 1\ntotal_inactive_file 700\n",
            ),
        ];
        let all = Some(9_000_000 * 1024);
        let table = [
            ("0::/a/b\n", (Some(7000), Some(7100))),
            // Above `memory.high` processes make no progress.
            ("0::/h/c\n", (Some(5000), Some(5000))),
            (
                "5:cpu,memory:/docker\n3:pids:/docker\n",
                (Some(1700), Some(1740)),
            ),
            ("0::/\n", (all, all)),
            ("nonsense", (all, all)),
        ];
        for (groups, expected) in table {
            let files: Vec<_> = files
                .into_iter()
                .chain([("/proc/self/cgroup", groups)])
                .collect();
            assert_eq!(free_of(&files), expected, "{groups}");
        }
    }

    #[test]
    fn a_rank_gets_its_part_of_the_limit_and_no_more_than_is_free() {
        let of = |ranks, current: &str, own: &str| {
            let files: HashMap<&str, &str> = HashMap::from([
                (
                    "/proc/meminfo",
                    "MemTotal: 9000 kB\nMemAvailable: 9000 kB\n",
                ),
                ("/proc/self/cgroup", "0::/job\n"),
                ("/proc/self/status", own),
                ("/sys/fs/cgroup/job/memory.max", "max"),
                ("/sys/fs/cgroup/job/memory.high", "4096000"),
                ("/sys/fs/cgroup/job/memory.current", current),
            ]);
            let room = of_ranks(ranks, |path| Some(files.get(path.to_str()?)?.to_string()));
            room.map(|room| room.own)
        };
        let all = 4_096_000;
        let own = "VmRSS:\t 900 kB\nRssAnon:\t 100 kB\n";
        assert_eq!(of(1, "96000", own), Some(all - 96_000));
        // The first of four ranks, and the last one after the others have taken their shares.
        assert_eq!(of(4, "96000", own), Some(all / 4 - 102_400));
        assert_eq!(of(4, "3996000", own), Some(100_000));
        assert_eq!(of(4, "96000", "RssAnon: 2000 kB"), Some(0));
        // What the ranks share is there once, not in each.
        let sharing = "RssAnon: 100 kB\nRssShmem: 2000 kB";
        assert_eq!(
            of(4, "96000", sharing),
            Some((all - 2_048_000) / 4 - 102_400)
        );
    }

    #[test]
    fn a_group_swaps_as_far_as_it_may() {
        let meminfo = (
            "/proc/meminfo",
            "MemAvailable: 9000000 kB\nSwapFree: 4 kB\n",
        );
        let v2 = |swap| {
            [
                meminfo,
                ("/proc/self/cgroup", "0::/\n"),
                ("/sys/fs/cgroup/memory.max", "8000\n"),
                ("/sys/fs/cgroup/memory.current", "3000\n"),
                ("/sys/fs/cgroup/memory.swap.current", "100\n"),
                ("/sys/fs/cgroup/memory.swap.max", swap),
            ]
        };
        for (swap, most) in [("max\n", 5000 + 4096), ("0\n", 5000), ("1100\n", 6000)] {
            assert_eq!(free_of(&v2(swap)), (Some(5000), Some(most)), "{swap}");
        }
        let v1 = |both| {
            [
                meminfo,
                ("/proc/self/cgroup", "4:memory:/x\n"),
                ("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "8000\n"),
                ("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "3000\n"),
                (
                    "/sys/fs/cgroup/memory/x/memory.memsw.usage_in_bytes",
                    "3100\n",
                ),
                ("/sys/fs/cgroup/memory/x/memory.memsw.limit_in_bytes", both),
            ]
        };
        for (both, most) in [(NO_LIMIT, 5000 + 4096), ("8000\n", 4900), ("9100\n", 6000)] {
            assert_eq!(free_of(&v1(both)).1, Some(most), "{both}");
        }
    }
}
