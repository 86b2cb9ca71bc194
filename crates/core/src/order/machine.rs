//! The ranks on this machine, and the cores for one of them.
//!
//! ```text
//! cores of the group (cpuset) or machine ÷ local ranks ≥ cores of this process?  yes: the launcher bound each rank, it has its own
//!                                                                                no:  ranks share them, each gets its part
//! ```

use super::rank::Env;
use feedline_base::cgroup;
use rustix::thread::sched_getaffinity;
use std::fmt;
use std::path::Path;

/// Variables in which launchers give the number of local ranks, innermost first.
const SIZES: [&str; 8] = [
    "LOCAL_WORLD_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
];

/// A larger number cannot be a number of processes.
const RANKS_MAX: usize = 1 << 16;

/// The number of ranks on this machine, from the launcher's variables; 1 if they do not give it.
pub fn local_ranks() -> usize {
    local_ranks_of(Env(&super::rank::environment))
}

fn local_ranks_of(env: Env<'_>) -> usize {
    let of = |name: &str| env.get(name)?.parse::<usize>().ok();
    // Slurm counts per node: `4(x2),3` is 4, 4 and 3.
    let said = SIZES.into_iter().find_map(of).or_else(|| {
        let tasks = env
            .get("SLURM_STEP_TASKS_PER_NODE")
            .filter(|_| !env.outside_of_srun())?;
        let node = of("SLURM_NODEID").unwrap_or(0);
        let mut nodes = tasks.split(',').flat_map(|part| {
            let (tasks, times) = part.split_once("(x").unwrap_or((part, "1"));
            std::iter::repeat_n(
                tasks.parse().ok(),
                times
                    .trim_end_matches(')')
                    .parse()
                    .unwrap_or(0)
                    .min(RANKS_MAX),
            )
        });
        nodes.nth(node)?
    });
    said.filter(|ranks| (1..=RANKS_MAX).contains(ranks))
        .unwrap_or(1)
}

/// CPUs that the process may use.
pub fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The cores for this process if several ranks of a machine share them: the default number of
/// workers.
pub fn cores_of_rank() -> usize {
    Cores::here().part()
}

/// The cores for this process, and the ranks that share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Cores that the process may use.
    usable: usize,
    ranks: usize,
    /// Whether the launcher gave each rank cores of its own.
    bound: bool,
}

impl Cores {
    pub fn here() -> Self {
        let ranks = local_ranks();
        let bound = ranks > 1 && {
            let own = sched_getaffinity(None).map_or(0, |cpus| cpus.count() as usize);
            own > 0 && own <= cores_of_group().unwrap_or(0).max(own).div_ceil(ranks)
        };
        Self {
            usable: usable_cores(),
            ranks,
            bound,
        }
    }

    /// The cores, or `None` if this is the only rank.
    pub fn shared(self) -> Option<Self> {
        (self.ranks > 1).then_some(self)
    }

    /// The part of one rank, at least 1.
    pub fn part(self) -> usize {
        if self.bound {
            self.usable
        } else {
            (self.usable / self.ranks).max(1)
        }
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            usable,
            ranks,
            bound,
        } = self;
        let how = if *bound {
            "each has its own"
        } else {
            "they share them"
        };
        write!(
            f,
            "{} for this process: {usable} usable, {ranks} ranks on this machine, {how}",
            self.part()
        )
    }
}

/// Number of cores of this process's control group, or of the machine.
fn cores_of_group() -> Option<usize> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let own = cgroup::folders(&groups, "cpuset")
        .into_iter()
        .find_map(|folder| {
            let files = ["cpuset.cpus.effective", "cpuset.effective_cpus"];
            files
                .into_iter()
                .find_map(|name| count(&read(&folder.join(name))?))
        });
    own.or_else(|| count(&read(Path::new("/sys/devices/system/cpu/online"))?))
}

/// Counts a list of CPUs in the kernel's format: `0-3,8`.
fn count(list: &str) -> Option<usize> {
    list.trim()
        .split(',')
        .map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            (last.parse::<usize>().ok()? + 1).checked_sub(first.parse().ok()?)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_say_how_many_ranks_a_machine_has() {
        let table = [
            ("", 1),
            ("RANK=3 WORLD_SIZE=8", 1),
            ("LOCAL_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=2", 8),
            ("OMPI_COMM_WORLD_LOCAL_SIZE=2", 2),
            ("MPI_LOCALNRANKS=6", 6),
            ("LOCAL_WORLD_SIZE=0", 1),
            ("LOCAL_WORLD_SIZE=many", 1),
            ("LOCAL_WORLD_SIZE=99999999", 1),
            (
                "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=4(x2),3",
                3,
            ),
            (
                "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2),3",
                4,
            ),
            (
                "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_NODEID=9 SLURM_STEP_TASKS_PER_NODE=4(x2),3",
                1,
            ),
            ("SLURM_JOB_ID=1 SLURM_STEP_TASKS_PER_NODE=4", 1),
        ];
        for (variables, expected) in table {
            let find = |name: &str| {
                variables
                    .split(' ')
                    .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=').map(String::from))
            };
            assert_eq!(local_ranks_of(Env(&find)), expected, "{variables}");
        }
    }

    #[test]
    fn ranks_divide_cores_that_no_launcher_has_divided() {
        let part = |usable, ranks, bound| {
            Cores {
                usable,
                ranks,
                bound,
            }
            .part()
        };
        assert_eq!(
            [
                part(64, 8, false),
                part(8, 8, true),
                part(2, 8, false),
                part(7, 2, false)
            ],
            [8, 8, 1, 3]
        );
        assert_eq!(
            [count("0-3,8\n"), count("5"), count(""), count("7-3")],
            [Some(5), Some(1), None, None]
        );
    }
}
