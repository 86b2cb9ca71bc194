//! The ranks on this machine, and the cores for one of them.
//!
//! ```text
//! cores of the group (cpuset) or machine ÷ local ranks ≥ cores of this process?  yes: the launcher bound each rank, it has its own
//!                                                                                no:  ranks share them, each gets its part
//! ```

use super::rank::Env;
use feedline_base::cgroup;
use rustix::thread::sched_getaffinity;
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

/// Variables that tell the jobs of a user apart.
const JOBS: [&str; 6] = [
    "SLURM_JOB_ID",
    "PALS_APID",
    "PMIX_NAMESPACE",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
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
        // Only a request of tasks per node sets the second one.
        let tasks = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"]
            .into_iter()
            .find_map(|name| env.get(name))
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

/// The job of this process, by the launcher's variables. All of its ranks have the same.
pub fn job() -> String {
    let env = Env(&super::rank::environment);
    let values = JOBS.map(|name| env.get(name).unwrap_or_default());
    values.join("\n")
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

impl Cores {
    /// Number of ranks on this machine.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// Number of ranks that share these cores; 1 if each has its own.
    pub fn sharing(self) -> usize {
        if self.bound { 1 } else { self.ranks }
    }

    /// The line of a report, for a rank with so many decode workers.
    pub fn in_words(self, workers: usize) -> String {
        let Self { usable, ranks, .. } = self;
        let how = if self.bound {
            "each has its own"
        } else {
            "they share them"
        };
        let all = workers.saturating_mul(ranks);
        let crowd = match self.bound {
            false if all > usable => {
                format!("; with {workers} decode workers each, they have {all} on {usable} cores")
            }
            _ => String::new(),
        };
        let part = self.part();
        format!(
            "{part} for this process: {usable} usable, {ranks} ranks on this machine, {how}{crowd}"
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
            ("SLURM_JOB_ID=1 SLURM_NTASKS_PER_NODE=4", 1),
            ("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_NTASKS_PER_NODE=4", 4),
            ("PMI_RANK=1 PMI_SIZE=4 PMI_LOCAL_SIZE=2", 2),
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

    #[test]
    fn the_report_names_more_workers_than_cores() {
        let words = |bound, workers| {
            let cores = Cores {
                usable: 16,
                ranks: 8,
                bound,
            };
            cores.in_words(workers)
        };
        let shared = "2 for this process: 16 usable, 8 ranks on this machine, they share them";
        let own = "16 for this process: 16 usable, 8 ranks on this machine, each has its own";
        let table = [
            (false, 2, String::from(shared)),
            (
                false,
                4,
                format!("{shared}; with 4 decode workers each, they have 32 on 16 cores"),
            ),
            (true, 16, String::from(own)),
        ];
        for (bound, workers, expected) in table {
            assert_eq!(words(bound, workers), expected);
        }
    }
}
