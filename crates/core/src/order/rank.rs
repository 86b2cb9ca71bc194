//! Rank and world of this process: given by the user, or read from the launcher's variables.
//!
//! ```text
//! torchrun   Open MPI   PMI   Slurm   …   the table, innermost first: each may run inside of one to its right
//!     └─────────┴────────┴──────┴─────┘
//!                        ▼
//!   the first with a rank wins; every other repeats it or counts nodes, else an error ──► Rank
//! ```
//!
//! A wrong guess would silently ruin a run: all ranks read the same samples, or one process reads
//! 1/n of them. So the module guesses nothing: [`Rank::from_env`] states the rule, and
//! tests/fixtures/ranks.txt has the cases. Only `environment` reads the process's variables; the
//! rest is pure. A rank is always below its world, and both are `u32`.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use std::collections::HashMap;
use std::fmt;

/// The rank of this process, in `0..world`. The default is rank 0 of 1.
///
/// ```
/// use feedline_core::order::Rank;
///
/// let rank = Rank::new(3, 8)?.with_local_rank(1);
/// assert_eq!(rank.to_string(), "rank 3 of 8 (local rank 1)");
/// # Ok::<(), feedline_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    number: u32,
    world: u32,
    local_rank: Option<u32>,
}

impl Rank {
    /// Process `rank` of `world`, counted from 0. Errors: [`ErrorKind::Config`] unless
    /// `rank < world`.
    pub fn new(rank: u32, world: u32) -> Result<Self> {
        if world == 0 {
            return Err(bad("a world of 0 ranks"));
        }
        if rank >= world {
            return Err(bad(format!(
                "rank {rank} of a world of {world}: ranks are counted from 0"
            )));
        }
        Ok(Self {
            number: rank,
            world,
            local_rank: None,
        })
    }

    /// The only process: rank 0 of 1.
    pub const fn single() -> Self {
        Self {
            number: 0,
            world: 1,
            local_rank: None,
        }
    }

    /// The same process, with its rank among the processes of its machine. The local rank selects a
    /// device, but no samples, and is not checked.
    #[must_use]
    pub const fn with_local_rank(mut self, local_rank: u32) -> Self {
        self.local_rank = Some(local_rank);
        self
    }

    /// The data rank if every `n` adjacent processes share their data, as in tensor, context or
    /// pipeline parallelism within data parallelism: rank `number / n` of `world / n`, with the
    /// same local rank.
    ///
    /// In other layouts, give the position on the data axis. With ranks numbered
    /// `(pp × dp_size + dp) × tp_size + tp`, that is
    /// `Rank::new(rank / tp_size % dp_size, dp_size)`.
    ///
    /// ```
    /// use feedline_core::order::Rank;
    ///
    /// let rank = Rank::new(5, 8)?.replicated(2)?;
    /// assert_eq!(rank.to_string(), "rank 2 of 4");
    /// # Ok::<(), feedline_core::Error>(())
    /// ```
    ///
    /// Errors: [`ErrorKind::Config`] unless `n` divides the world. [`agree`](Self::agree) checks
    /// all processes.
    pub fn replicated(self, n: u32) -> Result<Self> {
        if self.world.checked_rem(n) != Some(0) {
            let world = self.world;
            return Err(bad(format!(
                "a world of {world} ranks cannot be split into groups of {n} ranks that share data"
            )));
        }
        Ok(Self {
            number: self.number / n,
            world: self.world / n,
            ..self
        })
    }

    /// Checks that the processes of a run share data where they should, before anything is read.
    /// `processes[i]` is the data rank of process *i* and the ids of its next batch, from
    /// `Loader::rank` and `Loader::next_ids`.
    ///
    /// Errors: [`ErrorKind::Config`], naming two processes: of different worlds, of one rank with
    /// different ids, or of different ranks with the same ids; or naming a rank that fewer
    /// processes have than another.
    pub fn agree(processes: &[(Self, Vec<u64>)]) -> Result<()> {
        let Some((Self { world, .. }, _)) = processes.first() else {
            return Err(bad("no processes to compare"));
        };
        let mut of_rank = HashMap::new();
        let mut of_ids = HashMap::new();
        for (process, (rank, ids)) in processes.iter().enumerate() {
            if rank.world != *world {
                return Err(bad(format!(
                    "process 0 is one of {world} data ranks, process {process} one of {}",
                    rank.world
                )));
            }
            let (first, count) = of_rank.entry(rank.number).or_insert((process, 0_usize));
            *count += 1;
            if processes[*first].1 != *ids {
                return Err(bad(format!(
                    "processes {first} and {process} are {rank}, but their next batches differ"
                )));
            }
            let other = *of_ids.entry(ids).or_insert(process);
            // At the end of an epoch all rows of several ranks may be blank.
            if processes[other].0.number != rank.number && ids.iter().any(|id| *id != u64::MAX) {
                let numbers = [processes[other].0.number, rank.number]
                    .map(|number| number.to_string())
                    .join(" and ");
                return Err(bad(format!(
                    "processes {other} and {process} are ranks {numbers}, but have the same next \
                     batch"
                )));
            }
        }
        let count = processes.len();
        let each = (processes.len() / *world as usize).max(1);
        let found = |number: u32| of_rank.get(&number).map_or(0, |(_, count)| *count);
        match (0..*world).find(|number| found(*number) != each) {
            None => Ok(()),
            Some(number) => Err(bad(format!(
                "{} of {count} processes are rank {number} of {world}: each rank must have the \
                 same number of processes",
                found(number)
            ))),
        }
    }

    /// Reads rank and world from the launcher's variables; without any it is the only process.
    ///
    /// The world counts all processes. If some of them share their data, use
    /// [`replicated`](Self::replicated).
    ///
    /// | launcher, innermost first | rank | world | local rank |
    /// |---|---|---|---|
    /// | torchrun, and DeepSpeed, Ray Train, Accelerate, SageMaker, Kubeflow | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` |
    /// | Lightning's own, on the first node (`NODE_RANK=0`, no `RANK`) | `LOCAL_RANK` | `WORLD_SIZE` | `LOCAL_RANK` |
    /// | horovodrun with Gloo | `HOROVOD_RANK` | `HOROVOD_SIZE` | `HOROVOD_LOCAL_RANK` |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |
    /// | MVAPICH2 | `MV2_COMM_WORLD_RANK` | `MV2_COMM_WORLD_SIZE` | `MV2_COMM_WORLD_LOCAL_RANK` |
    /// | jsrun (LSF) | `JSM_NAMESPACE_RANK` | `JSM_NAMESPACE_SIZE` | `JSM_NAMESPACE_LOCAL_RANK` |
    /// | PMI (MPICH, Intel MPI, Cray PALS) | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID`, `PMI_LOCAL_RANK` or `PALS_LOCAL_RANKID` |
    /// | Flux | `FLUX_TASK_RANK` | `FLUX_JOB_SIZE` | `FLUX_TASK_LOCAL_ID` |
    /// | Slurm | `SLURM_PROCID` | `SLURM_NTASKS` | `SLURM_LOCALID` |
    /// | Kubernetes, indexed job | `JOB_COMPLETION_INDEX` | `WORLD_SIZE`, which you set | |
    ///
    /// The first launcher of the table whose rank is set wins. Every other one must give the same
    /// rank and world, or count nodes: a smaller world that divides the winner's, as when srun
    /// starts torchrun once per node. Anything else is an error. The local rank comes from the
    /// first launcher that gives the same rank and world and a local rank.
    ///
    /// - An empty variable counts as unset.
    /// - Two launchers number nodes in their own way: torchrun with one process per node
    ///   (`TORCHELASTIC_RUN_ID` is set) may give other ranks than the launcher around it, and Open
    ///   MPI inside of Slurm sees one node too few.
    /// - In a batch script and in the shell of `salloc`, Slurm's variables describe tasks that srun
    ///   has not started. They are ignored if another launcher is present; without one, more than
    ///   one task is an error.
    /// - `JOB_COMPLETION_INDEX` without a `WORLD_SIZE` of its own (together with `RANK` it belongs
    ///   to torchrun) is ignored if another launcher is present. `WORLD_SIZE` alone must equal the
    ///   world that was found.
    /// - Without any rank, `LOCAL_RANK=0` is kept. A higher `LOCAL_RANK`, or a variable such as
    ///   `PMIX_RANK` above 0, is an error. So are the processes of Lightning's launcher on further
    ///   nodes, whose rank only torch.distributed knows.
    ///
    /// Errors: [`ErrorKind::Config`], with the variables and their values: not a number; a rank
    /// that is not below its world; a rank without a world, or the reverse; two launchers that
    /// contradict each other; a forgotten srun.
    pub fn from_env() -> Result<Self> {
        resolve(Env(&environment))
    }

    /// Whether a launcher gives this process a rank.
    #[doc(hidden)]
    pub fn is_launched() -> bool {
        let env = Env(&environment);
        TABLE.iter().any(|row| {
            env.has(row.rank) && (row.launcher != Launcher::Lightning || env.of_lightning())
        })
    }

    /// Reads only the local rank. `LOCAL_RANK` gives it even if no variable gives the rank.
    #[doc(hidden)]
    pub fn local_from_env() -> Result<Option<u32>> {
        local(Env(&environment))
    }

    /// Reads the variables of this launcher and of no other. `WORLD_SIZE` serves both torchrun and
    /// Kubernetes.
    ///
    /// Errors: [`ErrorKind::Config`] when they are unset, or illegal as in
    /// [`from_env`](Self::from_env).
    pub fn of(launcher: Launcher) -> Result<Self> {
        only(launcher, Env(&environment))
    }

    /// The rank of this process, below [`world`](Self::world).
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// The number of processes, at least 1.
    pub const fn world(&self) -> u32 {
        self.world
    }

    /// The rank among the processes of this machine, if it is known.
    pub const fn local_rank(&self) -> Option<u32> {
        self.local_rank
    }
}

impl Default for Rank {
    fn default() -> Self {
        Self::single()
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.number, self.world)?;
        self.local_rank
            .map_or(Ok(()), |local| write!(f, " (local rank {local})"))
    }
}

/// The program that starts the processes of a run and gives each its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// PyTorch's torchrun, and programs that set `RANK` and `WORLD_SIZE` like it.
    Torchrun,
    /// PyTorch Lightning without another launcher; the rank is known on the first node only.
    Lightning,
    /// horovodrun with Gloo.
    Horovod,
    /// mpirun of Open MPI.
    OpenMpi,
    /// mpirun_rsh and mpiexec of MVAPICH2.
    Mvapich,
    /// jsrun of IBM's LSF.
    Jsrun,
    /// mpiexec of MPICH and Intel MPI (Hydra) and of HPE Cray PALS.
    Pmi,
    /// flux run.
    Flux,
    /// srun.
    Slurm,
    /// A Kubernetes job in completion mode `Indexed`, with `WORLD_SIZE` set to its number of
    /// completions.
    Kubernetes,
}

/// A row of the table: a launcher and the names of its variables.
struct LauncherRow {
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    /// Variables with the local rank; the first one that is set counts.
    local_rank: &'static [&'static str],
}

const WORLD_SIZE: &str = "WORLD_SIZE";

/// Innermost first, in the order of [`Launcher`].
#[rustfmt::skip]
static TABLE: [LauncherRow; 10] = [
    row(Launcher::Torchrun, "RANK", WORLD_SIZE, &["LOCAL_RANK"]),
    row(Launcher::Lightning, "LOCAL_RANK", WORLD_SIZE, &["LOCAL_RANK"]),
    row(Launcher::Horovod, "HOROVOD_RANK", "HOROVOD_SIZE", &["HOROVOD_LOCAL_RANK"]),
    row(Launcher::OpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", &["OMPI_COMM_WORLD_LOCAL_RANK"]),
    row(Launcher::Mvapich, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", &["MV2_COMM_WORLD_LOCAL_RANK"]),
    row(Launcher::Jsrun, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", &["JSM_NAMESPACE_LOCAL_RANK"]),
    row(Launcher::Pmi, "PMI_RANK", "PMI_SIZE", &["MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"]),
    row(Launcher::Flux, "FLUX_TASK_RANK", "FLUX_JOB_SIZE", &["FLUX_TASK_LOCAL_ID"]),
    row(Launcher::Slurm, "SLURM_PROCID", "SLURM_NTASKS", &["SLURM_LOCALID"]),
    row(Launcher::Kubernetes, "JOB_COMPLETION_INDEX", WORLD_SIZE, &[]),
];

const fn row(
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static [&'static str],
) -> LauncherRow {
    LauncherRow {
        launcher,
        rank,
        world,
        local_rank,
    }
}

/// Variables with a rank that comes without a world, or does not count all processes.
const RANKS_ALONE: [&str; 6] = [
    "LOCAL_RANK",
    "PMIX_RANK",
    "PMI_ID",
    "PALS_RANKID",
    "GROUP_RANK",
    "NODE_RANK",
];

/// The highest step id of srun (Slurm's `SLURM_MAX_NORMAL_STEP_ID`); the shell of `salloc` has
/// `SLURM_STEP_ID=4294967290`.
const SLURM_STEP_MAX: u32 = 0xffff_fff0;

/// A variable of this process. A value that is not Unicode becomes text that does not parse as a
/// number.
pub(super) fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Looks up variables.
#[derive(Clone, Copy)]
pub(super) struct Env<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    /// The value, unless it is empty.
    pub(super) fn get(self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn has(self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn number(self, name: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value.parse();
        number.map(Some).map_err(|_| {
            bad(format!(
                "{name}={value:?} is not a whole number from 0 to {}",
                u32::MAX
            ))
        })
    }

    /// Whether Lightning's own launcher set the variables: the one for the rank is missing.
    fn of_lightning(self) -> bool {
        !self.has("RANK")
            && ["LOCAL_RANK", "NODE_RANK", WORLD_SIZE]
                .into_iter()
                .all(|name| self.has(name))
    }

    /// Whether this is a batch script or the shell of `salloc`: a part of a Slurm job, but none of
    /// its tasks.
    pub(super) fn outside_of_srun(self) -> bool {
        let step = self
            .get("SLURM_STEP_ID")
            .and_then(|id| id.parse::<u32>().ok());
        self.has("SLURM_JOB_ID") && step.is_none_or(|id| id > SLURM_STEP_MAX)
    }
}

impl LauncherRow {
    /// Reads the variables in the presence of other launchers' variables. `None` if they do not
    /// describe this process.
    fn claim(&'static self, env: Env<'_>) -> Result<Option<Claim>> {
        let silent = match self.launcher {
            Launcher::Torchrun => !env.has(self.rank),
            Launcher::Slurm => env.outside_of_srun(),
            Launcher::Kubernetes => {
                env.has("RANK") || env.of_lightning() || !env.has(self.rank) || !env.has(self.world)
            }
            _ => false,
        };
        if silent { Ok(None) } else { self.read(env) }
    }

    /// Reads the variables; `None` when neither rank nor world is set.
    fn read(&'static self, env: Env<'_>) -> Result<Option<Claim>> {
        if self.launcher == Launcher::Lightning
            && !(env.of_lightning() && env.number("NODE_RANK")? == Some(0))
        {
            return Ok(None);
        }
        let half = |set: &str, value: u32, missing: &str| {
            Err(bad(format!(
                "{set}={value} is set but {missing} is not; set {missing}, or unset {set}"
            )))
        };
        let (rank, world) = match (env.number(self.rank)?, env.number(self.world)?) {
            (Some(rank), Some(world)) => (rank, world),
            (None, None) => return Ok(None),
            (Some(rank), None) => return half(self.rank, rank, self.world),
            (None, Some(world)) => return half(self.world, world, self.rank),
        };
        let local = self.local_rank.iter().copied().find(|name| env.has(name));
        let local_rank = local.map_or(Ok(None), |name| env.number(name))?;
        for (name, value) in std::iter::once((self.rank, rank)).chain(local.zip(local_rank)) {
            if value >= world {
                return Err(bad(format!(
                    "{name}={value} is not below {}={world}",
                    self.world
                )));
            }
        }
        if self.launcher == Launcher::Slurm
            && let Some(of_step) = env.number("SLURM_STEP_NUM_TASKS")?
            && of_step != world
        {
            let message =
                format!("SLURM_NTASKS={world} contradicts SLURM_STEP_NUM_TASKS={of_step}");
            return Err(bad(message + "; unset one" + &explicit(", or use")));
        }
        Ok(Some(Claim {
            row: self,
            rank: Rank {
                number: rank,
                world,
                local_rank,
            },
        }))
    }
}

/// One launcher's rank and world for this process.
struct Claim {
    row: &'static LauncherRow,
    rank: Rank,
}

impl Claim {
    fn agrees(&self, other: &Self) -> bool {
        (self.rank.number, self.rank.world) == (other.rank.number, other.rank.world)
    }

    /// Refuses an outer launcher that neither agrees nor counts the nodes on which this one started
    /// processes.
    fn check_outer(&self, outer: &Self, env: Env<'_>) -> Result<()> {
        let world = self.rank.world;
        let outer_world = outer.rank.world;
        let nodes = match (self.row.launcher, outer.row.launcher) {
            // mpirun starts its daemons with srun, on every node but its own; the ranks inherit
            // their variables.
            (Launcher::OpenMpi, Launcher::Slurm) => outer_world < world,
            // With one process per node the worlds are equal, and torchrun ranks the nodes in the
            // order of their arrival.
            (Launcher::Torchrun, _) if env.has("TORCHELASTIC_RUN_ID") => {
                world.is_multiple_of(outer_world)
            }
            _ => outer_world < world && world.is_multiple_of(outer_world),
        };
        if nodes || self.agrees(outer) {
            return Ok(());
        }
        let of = |claim: &Self| {
            Setting::RankOf.hint(|of| format!(", use {}", of.with(claim.row.launcher)))
        };
        Err(bad(format!(
            "{self} contradicts {outer}: an outer launcher must give the same rank and \
             world, or a number of nodes that divides the inner world; unset the \
             variables of one{}{}{}",
            of(self),
            of(outer),
            explicit(", or use")
        )))
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}={} {}={}",
            self.row.rank, self.rank.number, self.row.world, self.rank.world
        )
    }
}

/// Applies the rule of [`Rank::from_env`] to any environment.
fn resolve(env: Env<'_>) -> Result<Rank> {
    let mut claims = Vec::new();
    for row in &TABLE {
        claims.extend(row.claim(env)?);
    }
    let rank = match claims.split_first() {
        None => unclaimed(env)?,
        Some((inner, outer)) => {
            outer
                .iter()
                .try_for_each(|outer| inner.check_outer(outer, env))?;
            let local_rank = claims
                .iter()
                .filter(|claim| inner.agrees(claim))
                .find_map(|claim| claim.rank.local_rank);
            Rank {
                local_rank,
                ..inner.rank
            }
        }
    };
    match env.number(WORLD_SIZE)? {
        Some(world)
            if world != rank.world && claims.iter().all(|claim| claim.row.world != WORLD_SIZE) =>
        {
            Err(bad(format!(
                "WORLD_SIZE={world} is set but RANK is not, and without it this is {rank}; \
                 set RANK, or unset WORLD_SIZE{}",
                explicit(", or use")
            )))
        }
        _ => Ok(rank),
    }
}

/// The rank if no launcher gives one: a single process, unless a variable shows that there are
/// more.
fn unclaimed(env: Env<'_>) -> Result<Rank> {
    refuse_without_srun(env)?;
    for name in RANKS_ALONE {
        if let Some(rank) = env.number(name)?
            && rank > 0
        {
            let message = format!(
                "{name}={rank} is set, but no variables give both the rank among all \
                 processes and their number; initialise torch.distributed first"
            );
            return Err(bad(message + &explicit(", or use")));
        }
    }
    if env.has("JOB_COMPLETION_INDEX") {
        return only(Launcher::Kubernetes, env);
    }
    Ok(Rank {
        local_rank: env.number("LOCAL_RANK")?,
        ..Rank::single()
    })
}

/// Applies the rule of [`Rank::local_from_env`] to any environment.
fn local(env: Env<'_>) -> Result<Option<u32>> {
    match resolve(env) {
        Err(_) if env.has("LOCAL_RANK") && !env.has("RANK") => env.number("LOCAL_RANK"),
        rank => rank.map(|rank| rank.local_rank),
    }
}

/// Refuses a batch script of several tasks: as rank 0 it would read only a part of the data.
fn refuse_without_srun(env: Env<'_>) -> Result<()> {
    let names = ["SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"];
    let Some(name) = names
        .into_iter()
        .find(|name| env.outside_of_srun() && env.has(name))
    else {
        return Ok(());
    };
    match env.number(name)? {
        Some(tasks) if tasks > 1 => Err(bad(format!(
            "{name}={tasks}, but srun did not start this process (SLURM_STEP_ID is unset \
             or not a step of srun), so it has no rank; start it with srun{}",
            Setting::WholeData.hint(|whole| format!(", or use {whole}"))
        ))),
        _ => Ok(()),
    }
}

fn only(launcher: Launcher, env: Env<'_>) -> Result<Rank> {
    if launcher == Launcher::Slurm {
        refuse_without_srun(env)?;
    }
    let row = &TABLE[launcher as usize];
    let claim = row.read(env)?;
    claim.map(|claim| claim.rank).ok_or_else(|| {
        bad(format!(
            "the launcher {launcher:?} gives no rank here: it sets {} and {}",
            row.rank, row.world
        ))
    })
}

/// Advice to set the rank in the program, which needs no variables.
fn explicit(link: &str) -> String {
    Setting::Rank.hint(|rank| format!("{link} {rank}"))
}

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Variables<'a> = Vec<(&'a str, String)>;

    /// `A=1 B=` → A is "1", B is empty.
    fn parse(text: &str) -> Variables<'_> {
        text.split_whitespace()
            .map(|word| word.split_once('=').unwrap())
            .map(|(name, value)| (name, value.into()))
            .collect()
    }

    fn lookup<T>(variables: &Variables<'_>, of: impl Fn(Env<'_>) -> Result<T>) -> Result<T> {
        let get = |name: &str| {
            variables
                .iter()
                .find(|(other, _)| *other == name)
                .map(|(_, value)| value.clone())
        };
        of(Env(&get))
    }

    /// Checks rows of variables with the rank that they give.
    fn accepted(rows: &[(&str, &str)], of: impl Fn(Env<'_>) -> Result<Rank>) {
        for (variables, expected) in rows {
            let rank = lookup(&parse(variables), &of)
                .unwrap_or_else(|error| panic!("{variables}: {error}"));
            assert_eq!(rank.to_string(), *expected, "{variables}");
        }
    }

    /// Checks rows of variables with the error that they give.
    fn refused(rows: &[(&str, &str)], of: impl Fn(Env<'_>) -> Result<Rank>) {
        for (variables, expected) in rows {
            let error = lookup(&parse(variables), &of).expect_err(variables);
            assert_eq!(
                (error.kind(), error.stage()),
                (ErrorKind::Config, Stage::Build)
            );
            assert_eq!(error.message(), *expected, "{variables}");
        }
    }

    #[test]
    fn a_shard_is_a_rank_below_a_world() {
        let rank = Rank::new(3, 8).unwrap();
        assert_eq!(
            (rank.number(), rank.world(), rank.local_rank()),
            (3, 8, None)
        );
        assert_eq!(rank.to_string(), "rank 3 of 8");
        assert_eq!(rank.with_local_rank(1).local_rank(), Some(1));
        assert_eq!(
            rank.with_local_rank(1).to_string(),
            "rank 3 of 8 (local rank 1)"
        );
        assert_eq!(
            (Rank::default(), Rank::single()),
            (Rank::new(0, 1).unwrap(), Rank::new(0, 1).unwrap())
        );
        assert!(Rank::new(u32::MAX - 1, u32::MAX).is_ok());
        for (rank, world, words) in [
            (0, 0, "a world of 0 ranks"),
            (8, 8, "rank 8 of a world of 8: ranks are counted from 0"),
            (
                u32::MAX,
                1,
                "rank 4294967295 of a world of 1: ranks are counted from 0",
            ),
        ] {
            let error = Rank::new(rank, world).unwrap_err();
            assert_eq!(
                (error.kind(), error.stage(), error.message()),
                (ErrorKind::Config, Stage::Build, words)
            );
        }
    }

    #[test]
    fn adjacent_ranks_share_data() {
        let of = |rank, world, n| {
            Rank::new(rank, world)
                .unwrap()
                .with_local_rank(1)
                .replicated(n)
        };
        let ranks: Vec<_> = (0..8)
            .map(|rank| of(rank, 8, 2).unwrap().number())
            .collect();
        assert_eq!(ranks, [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(
            of(5, 8, 4).unwrap(),
            Rank::new(1, 2).unwrap().with_local_rank(1)
        );
        assert_eq!(
            (of(3, 8, 1).unwrap(), of(7, 8, 8).unwrap().world()),
            (of(3, 8, 1).unwrap(), 1)
        );
        for n in [0, 3, 5, 16, u32::MAX] {
            let error = of(3, 8, n).unwrap_err();
            let words = format!(
                "a world of 8 ranks cannot be split into groups of {n} ranks that share data"
            );
            assert_eq!(
                (error.kind(), error.message()),
                (ErrorKind::Config, words.as_str())
            );
        }
    }

    #[test]
    fn processes_that_share_data_agree() {
        let ids = |number: u32| vec![u64::from(number), 9];
        let of = |number, world| (Rank::new(number, world).unwrap(), ids(number));
        let blank = |number| (Rank::new(number, 2).unwrap(), vec![u64::MAX; 2]);
        for processes in [
            vec![of(0, 1)],
            vec![of(0, 1), of(0, 1)],
            vec![of(0, 2), of(0, 2), of(1, 2), of(1, 2)],
            vec![of(1, 2), of(0, 2), of(1, 2), of(0, 2)],
            vec![of(0, 2), blank(1)],
            vec![blank(0), blank(1)],
        ] {
            Rank::agree(&processes).unwrap();
        }
        let same = (Rank::new(1, 2).unwrap(), ids(0));
        let other = (Rank::new(0, 2).unwrap(), vec![7, 8]);
        let many = "each rank must have the same number of processes";
        for (processes, words) in [
            (vec![], "no processes to compare".to_owned()),
            // One process took all ranks for data ranks.
            (
                vec![of(0, 2), of(0, 2), of(1, 2), of(3, 4)],
                "process 0 is one of 2 data ranks, process 3 one of 4".into(),
            ),
            (
                vec![of(0, 2), of(0, 2), of(1, 2)],
                format!("2 of 3 processes are rank 0 of 2: {many}"),
            ),
            (
                vec![of(0, 2), of(0, 2)],
                format!("2 of 2 processes are rank 0 of 2: {many}"),
            ),
            (
                vec![of(1, 2)],
                format!("0 of 1 processes are rank 0 of 2: {many}"),
            ),
            (
                vec![of(7, u32::MAX)],
                format!("0 of 1 processes are rank 0 of 4294967295: {many}"),
            ),
            (
                vec![of(0, 2), of(1, 2), other],
                "processes 0 and 2 are rank 0 of 2, but their next batches differ".into(),
            ),
            (
                vec![of(0, 2), same],
                "processes 0 and 1 are ranks 0 and 1, but have the same next batch".into(),
            ),
        ] {
            let error = Rank::agree(&processes).unwrap_err();
            assert_eq!(
                (error.kind(), error.message()),
                (ErrorKind::Config, words.as_str())
            );
        }
    }

    /// The cases of tests/fixtures/ranks.txt.
    fn cases(error: bool) -> Vec<(&'static str, &'static str)> {
        let text = include_str!("../../../../tests/fixtures/ranks.txt");
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let rows = lines
            .filter_map(|line| line.split_once("-> "))
            .filter(|(_, said)| said.starts_with("! ") == error);
        rows.map(|(variables, said)| (variables, said.trim_start_matches("! ")))
            .collect()
    }

    #[test]
    fn launcher_variables_give_this_shard() {
        let rows = cases(false);
        assert_eq!(rows.len(), 45);
        accepted(&rows, resolve);
    }

    #[test]
    fn ambiguous_variables_are_refused_by_name() {
        let rows = cases(true);
        assert_eq!(rows.len(), 45);
        refused(&rows, resolve);
        let lines = vec![("RANK", "1\n2".to_owned()), ("WORLD_SIZE", "4".to_owned())];
        assert!(
            lookup(&lines, resolve)
                .unwrap_err()
                .message()
                .starts_with(r#"RANK="1\n2" is not"#),
            "one line"
        );
    }

    #[test]
    fn a_named_launcher_is_read_alone() {
        let all = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 HOROVOD_RANK=0 HOROVOD_SIZE=2 \
             OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=5 MV2_COMM_WORLD_RANK=5 \
             MV2_COMM_WORLD_SIZE=8 JSM_NAMESPACE_RANK=6 JSM_NAMESPACE_SIZE=9 PMI_RANK=3 \
             PMI_SIZE=6 FLUX_TASK_RANK=7 FLUX_JOB_SIZE=10 SLURM_PROCID=4 SLURM_NTASKS=7 \
             SLURM_LOCALID=2 JOB_COMPLETION_INDEX=3";
        let ranks = [
            "rank 1 of 4 (local rank 0)",
            "rank 0 of 2",
            "rank 2 of 5",
            "rank 5 of 8",
            "rank 6 of 9",
            "rank 3 of 6",
            "rank 7 of 10",
            "rank 4 of 7 (local rank 2)",
            "rank 3 of 4",
        ];
        let lightning = "LOCAL_RANK=2 NODE_RANK=0 WORLD_SIZE=8 PMI_RANK=3 PMI_SIZE=6";
        accepted(&[(lightning, "rank 2 of 8 (local rank 2)")], |env| {
            only(Launcher::Lightning, env)
        });
        refused(
            &[(
                all,
                "the launcher Lightning gives no rank here: it sets LOCAL_RANK and WORLD_SIZE",
            )],
            |env| only(Launcher::Lightning, env),
        );
        let alone = TABLE
            .iter()
            .filter(|row| row.launcher != Launcher::Lightning);
        for (row, rank) in alone.zip(ranks) {
            let launcher = row.launcher;
            assert_eq!(TABLE[launcher as usize].launcher, launcher);
            accepted(&[(all, rank)], |env| only(launcher, env));
            let unset = format!(
                "the launcher {launcher:?} gives no rank here: it sets {} and {}",
                row.rank, row.world
            );
            refused(
                &[("", &unset), ("HOME=/root LOCAL_RANK=1", &unset)],
                |env| only(launcher, env),
            );
        }
        let half = "RANK=1 is set but WORLD_SIZE is not; set WORLD_SIZE, or unset RANK";
        refused(&[("RANK=1 PMI_RANK=0 PMI_SIZE=1", half)], |env| {
            only(Launcher::Torchrun, env)
        });
        let batch = parse("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=8");
        let error = lookup(&batch, |env| only(Launcher::Slurm, env)).unwrap_err();
        assert!(
            error
                .message()
                .starts_with("SLURM_NTASKS=8, but srun did not start"),
            "{error}"
        );
    }

    #[test]
    fn the_environment_is_that_of_the_process() {
        let variables: Vec<(String, String)> = std::env::vars_os()
            .filter_map(|(name, value)| {
                Some((
                    name.into_string().ok()?,
                    value.to_string_lossy().into_owned(),
                ))
            })
            .collect();
        assert!(
            variables
                .iter()
                .all(|(name, value)| environment(name).as_ref() == Some(value))
        );
        assert_eq!(environment("FEEDLINE_NO_SUCH_VARIABLE"), None);
        let variables: Variables<'_> = variables
            .iter()
            .map(|(name, value)| (name.as_str(), value.clone()))
            .collect();
        let text = |result: Result<Rank>| result.map_err(|error| error.to_string());
        assert_eq!(text(Rank::from_env()), text(lookup(&variables, resolve)));
        for launcher in TABLE.iter().map(|row| row.launcher) {
            assert_eq!(
                text(Rank::of(launcher)),
                text(lookup(&variables, |env| only(launcher, env)))
            );
        }
    }

    #[test]
    fn a_local_rank_needs_no_rank() {
        #[rustfmt::skip]
        let rows = [
            ("", None),
            ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1", Some(1)),
            ("SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=3", Some(3)),
            ("LOCAL_RANK=1", Some(1)),
            ("LOCAL_RANK=1 NODE_RANK=1 WORLD_SIZE=4", Some(1)),
        ];
        for (variables, expected) in rows {
            assert_eq!(
                lookup(&parse(variables), local).unwrap(),
                expected,
                "{variables}"
            );
        }
        for variables in ["PMIX_RANK=1", "RANK=many LOCAL_RANK=1", "LOCAL_RANK=x"] {
            assert!(lookup(&parse(variables), local).is_err(), "{variables}");
        }
    }

    const FURTHER: [&str; 6] = [
        "HOME",
        "NODE_RANK",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "PMIX_RANK",
        "TORCHELASTIC_RUN_ID",
    ];

    /// Some launchers' claims, some of them made invalid by further variables, so that some of the
    /// environments are legal.
    fn any_environment() -> impl Strategy<Value = Variables<'static>> {
        let value = prop_oneof![
            5 => (0_u32..5).prop_map(|number| number.to_string()),
            1 => any::<u64>().prop_map(|number| number.to_string()),
            1 => any::<String>(),
        ];
        let names = TABLE.iter().flat_map(|row| {
            [row.rank, row.world]
                .into_iter()
                .chain(row.local_rank.iter().copied())
        });
        let names: Vec<&str> = names.chain(FURTHER).collect();
        let claims = proptest::collection::vec((0..TABLE.len(), 0_u32..4, 1_u32..5), 0..3);
        let further = proptest::collection::vec((proptest::sample::select(names), value), 0..4);
        (claims, further).prop_map(|(claims, further)| {
            let mut variables = std::collections::BTreeMap::new();
            for (launcher, rank, world) in claims {
                variables.insert(TABLE[launcher].rank, rank.to_string());
                variables.insert(TABLE[launcher].world, world.to_string());
            }
            variables.extend(further);
            variables.into_iter().collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn any_environment_gives_a_legal_shard_or_a_named_error(variables in any_environment()) {
            for row in &TABLE {
                if let Ok(rank) = lookup(&variables, |env| only(row.launcher, env)) {
                    prop_assert!(rank.number() < rank.world());
                }
            }
            match lookup(&variables, resolve) {
                Ok(rank) => {
                    prop_assert!(rank.number() < rank.world());
                    prop_assert!(rank.local_rank().is_none_or(|local| local < rank.world()));
                    // The innermost launcher alone would say the same.
                    let inner = TABLE.iter().find(|row| lookup(&variables, |env| row.claim(env)).unwrap().is_some());
                    if let Some(row) = inner {
                        let only = lookup(&variables, |env| only(row.launcher, env)).unwrap();
                        prop_assert_eq!((rank.number(), rank.world()), (only.number(), only.world()));
                    }
                }
                Err(error) => {
                    prop_assert_eq!((error.kind(), error.stage()), (ErrorKind::Config, Stage::Build));
                    let named = variables.iter().any(|(name, _)| error.message().contains(name));
                    prop_assert!(named && !error.message().contains(char::is_control), "{}", error);
                }
            }
        }

        #[test]
        fn an_outer_claim_agrees_or_divides_the_inner_world(
            inner in 1_u32..40, outer in 1_u32..40, rank in 0_u32..40, outer_rank in 0_u32..40, which in 0_usize..7
        ) {
            let rank = rank % inner;
            let outer_rank = outer_rank % outer;
            let rows: Vec<_> = TABLE.iter().filter(|row| row.launcher != Launcher::Lightning).collect();
            let one = rows[which];
            let other = rows[which + 1];
            let variables = vec![
                (one.rank, rank.to_string()),
                (one.world, inner.to_string()),
                (other.rank, outer_rank.to_string()),
                (other.world, outer.to_string()),
            ];
            let legal = (outer == inner && outer_rank == rank) || (outer < inner && (2..=inner).any(|n| n * outer == inner));
            let result = lookup(&variables, resolve);
            prop_assert_eq!(result.is_ok(), legal);
            if let Ok(found) = result {
                prop_assert_eq!(found, Rank::new(rank, inner).unwrap());
            }
        }
    }
}
