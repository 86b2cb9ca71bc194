//! Which of how many processes this one is: rank and world, given, or found in the launchers' variables.
//!
//! ```text
//! torchrun, Open MPI, PMI, Slurm, Kubernetes        innermost first: each may have been started by one to its right
//!    │         │       │    │        │
//!    └─────────┴───────┴────┴────────┘ claims: rank, world, local rank
//!                   ▼
//!   the innermost is taken; every other must agree or be an outer level, else an error ──► Shard
//! ```
//!
//! A wrong guess would be silent and ruin a run: ranks that all read the same samples, or one process that reads 1/n of
//! them and calls it an epoch. So nothing is guessed; [`Shard::from_env`] has the rules, the tests below are their table.
//!
//! What holds, and is tested: a shard's rank is below its world; no environment panics; an error names the variables.
//! Only `environment` reads the process's variables, the rest is pure.
//!
//! Limits: ranks and worlds are `u32`.

use crate::error::{Error, ErrorKind, Result, Stage};
use std::fmt;

/// Which of how many processes this one is: its rank in `0..world`. The default is rank 0 of 1.
///
/// ```
/// use feedline::Shard;
///
/// let shard = Shard::new(3, 8)?.with_local_rank(1);
/// assert_eq!(shard.to_string(), "rank 3 of 8 (local rank 1)");
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    rank: u32,
    world: u32,
    local_rank: Option<u32>,
}

impl Shard {
    /// Process `rank` of `world`, counted from 0. Errors: [`ErrorKind::Config`] unless `rank < world`.
    pub fn new(rank: u32, world: u32) -> Result<Self> {
        if world == 0 {
            return Err(bad("a world of 0 ranks"));
        }
        if rank >= world {
            return Err(bad(format!("rank {rank} of a world of {world}: ranks are counted from 0")));
        }
        Ok(Self { rank, world, local_rank: None })
    }

    /// The only process: rank 0 of 1.
    pub const fn single() -> Self {
        Self { rank: 0, world: 1, local_rank: None }
    }

    /// The same shard, with its rank among the processes of its machine. It chooses a device and no sample, and is not
    /// checked.
    #[must_use]
    pub const fn with_local_rank(mut self, local_rank: u32) -> Self {
        self.local_rank = Some(local_rank);
        self
    }

    /// What the launchers' variables say; a single process when none is set.
    ///
    /// | launcher, innermost first | rank | world | local rank |
    /// |---|---|---|---|
    /// | torchrun | `RANK` | `WORLD_SIZE` | `LOCAL_RANK`, below `LOCAL_WORLD_SIZE` if that is set |
    /// | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |
    /// | PMI (MPICH, Intel MPI) | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID` |
    /// | Slurm | `SLURM_PROCID` | `SLURM_NTASKS` | `SLURM_LOCALID` |
    /// | Kubernetes, indexed job | `JOB_COMPLETION_INDEX` | `WORLD_SIZE`, which you set | |
    ///
    /// - An empty variable is one that is not set.
    /// - The innermost launcher that set anything is believed. torchrun and mpirun are often started once per node by
    ///   another launcher, whose variables then describe nodes: such an outer world must be smaller than the inner one and
    ///   divide it (but for Slurm around Open MPI, whose daemons are one fewer than the nodes). Any other must agree in rank and world. The local rank is that of the innermost, or of one that agrees.
    /// - Outside of a step of srun (in a batch script, in the shell of `salloc`) Slurm says `SLURM_PROCID=0`, or nothing,
    ///   whatever `SLURM_NTASKS` is. Such variables claim nothing beside another launcher's.
    /// - `WORLD_SIZE` without `RANK` is the world of an indexed job where there is a `JOB_COMPLETION_INDEX`. Elsewhere it
    ///   must equal the world that the innermost launcher claims, or be 1 where there is none. An index without a
    ///   `WORLD_SIZE` of its own (beside `RANK` it is torchrun's) claims nothing beside another launcher.
    /// - `LOCAL_RANK` without `RANK` and without any claim must be 0, and is kept: a higher one is that of a process
    ///   among several whose rank was lost.
    ///
    /// Errors, each [`ErrorKind::Config`] and naming the variables with their values: not a number; a rank that is not
    /// below its world, or a local rank not below its own; a rank without a world or the reverse; launchers that
    /// contradict each other; several Slurm tasks and no other launcher in a process that srun did not start, which
    /// as rank 0 of n would see 1/n of the data.
    pub fn from_env() -> Result<Self> {
        resolve(Env(&environment))
    }

    /// What this launcher's variables say, whatever the others'. `WORLD_SIZE` serves both torchrun and Kubernetes.
    ///
    /// Errors: [`ErrorKind::Config`] when they are not set, or not legal as in [`from_env`](Self::from_env).
    pub fn of(launcher: Launcher) -> Result<Self> {
        only(launcher, Env(&environment))
    }

    /// The rank of this process, below [`world`](Self::world).
    pub const fn rank(&self) -> u32 {
        self.rank
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

impl Default for Shard {
    fn default() -> Self {
        Self::single()
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)?;
        self.local_rank.map_or(Ok(()), |local| write!(f, " (local rank {local})"))
    }
}

/// What starts the processes of a run and tells each its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// PyTorch's torchrun, and whatever sets `RANK` and `WORLD_SIZE` like it.
    Torchrun,
    /// mpirun of Open MPI.
    OpenMpi,
    /// mpiexec of MPICH and Intel MPI (Hydra).
    Pmi,
    /// srun.
    Slurm,
    /// A Kubernetes job in completion mode `Indexed`, with `WORLD_SIZE` set to its number of completions.
    Kubernetes,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Slurm => "Slurm",
            Self::Kubernetes => "Kubernetes",
        })
    }
}

/// The names of a launcher's variables.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    local_rank: Option<&'static str>,
    local_world: Option<&'static str>,
}

/// Innermost first.
const LAUNCHERS: [&Names; 5] = [&TORCHRUN, &OPEN_MPI, &PMI, &SLURM, &KUBERNETES];

static TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    world: "WORLD_SIZE",
    local_rank: Some("LOCAL_RANK"),
    local_world: Some("LOCAL_WORLD_SIZE"),
};

static OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    world: "OMPI_COMM_WORLD_SIZE",
    local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
    local_world: None,
};

static PMI: Names = Names {
    launcher: Launcher::Pmi,
    rank: "PMI_RANK",
    world: "PMI_SIZE",
    local_rank: Some("MPI_LOCALRANKID"),
    local_world: None,
};

static SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    world: "SLURM_NTASKS",
    local_rank: Some("SLURM_LOCALID"),
    local_world: None,
};

static KUBERNETES: Names = Names {
    launcher: Launcher::Kubernetes,
    rank: "JOB_COMPLETION_INDEX",
    world: "WORLD_SIZE",
    local_rank: None,
    local_world: None,
};

impl Launcher {
    fn names(self) -> &'static Names {
        match self {
            Self::Torchrun => &TORCHRUN,
            Self::OpenMpi => &OPEN_MPI,
            Self::Pmi => &PMI,
            Self::Slurm => &SLURM,
            Self::Kubernetes => &KUBERNETES,
        }
    }
}

/// Step ids above this one are not steps of srun (Slurm's `SLURM_MAX_NORMAL_STEP_ID`): the shell of `salloc` has
/// `SLURM_STEP_ID=4294967290`.
const SLURM_STEP_MAX: u32 = 0xffff_fff0;

/// A variable of this process. One that is not Unicode is kept as text that is no number.
fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Where variables are looked up.
#[derive(Clone, Copy)]
struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    /// The value, unless it is empty.
    fn get(self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn has(self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn number(self, name: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.parse();
        number.map(Some).map_err(|_| bad(format!("{name}={value:?} is not a whole number from 0 to {}", u32::MAX)))
    }
}

/// What one launcher says of this process.
struct Claim {
    names: &'static Names,
    shard: Shard,
}

impl Claim {
    /// `None` when neither rank nor world is set.
    fn read(names: &'static Names, env: Env<'_>) -> Result<Option<Self>> {
        let (rank, world) = match (env.number(names.rank)?, env.number(names.world)?) {
            (Some(rank), Some(world)) => (rank, world),
            (None, None) => return Ok(None),
            (Some(rank), None) => return Err(half(names, names.rank, rank, names.world)),
            (None, Some(world)) => return Err(half(names, names.world, world, names.rank)),
        };
        if world == 0 {
            return Err(empty_world(names));
        }
        below(names.rank, rank, names.world, world)?;
        Ok(Some(Self { names, shard: Shard { rank, world, local_rank: local_rank(names, world, env)? } }))
    }

    /// Refuses a claim of an outer launcher that neither agrees nor describes a level above this one.
    fn check_outer(&self, outer: &Self) -> Result<()> {
        let (inner_world, outer_world) = (self.shard.world, outer.shard.world);
        if inner_world != outer_world {
            // mpirun starts its daemons by srun, one fewer than there are nodes, and the ranks below see their variables.
            let daemons = (self.names.launcher, outer.names.launcher) == (Launcher::OpenMpi, Launcher::Slurm);
            if outer_world < inner_world && (daemons || inner_world.is_multiple_of(outer_world)) {
                return Ok(());
            }
            let why = "the world of an outer launcher must be smaller than the inner one's and divide it";
            return Err(contradiction(
                (self, self.names.world, inner_world),
                (outer, outer.names.world, outer_world),
                why,
            ));
        }
        if self.agrees(outer) {
            return Ok(());
        }
        let why = format!("they are two ranks of one world of {inner_world}");
        let (inner, outer_rank) = (self.shard.rank, outer.shard.rank);
        Err(contradiction((self, self.names.rank, inner), (outer, outer.names.rank, outer_rank), &why))
    }

    fn agrees(&self, other: &Self) -> bool {
        (self.shard.rank, self.shard.world) == (other.shard.rank, other.shard.world)
    }
}

fn local_rank(names: &Names, world: u32, env: Env<'_>) -> Result<Option<u32>> {
    let Some(name) = names.local_rank else { return Ok(None) };
    let Some(local) = env.number(name)? else { return Ok(None) };
    if let Some(size) = names.local_world
        && let Some(local_world) = env.number(size)?
    {
        below(name, local, size, local_world)?;
        if local_world > world {
            return Err(bad(format!("{size}={local_world} is more than {}={world}", names.world)));
        }
    }
    below(name, local, names.world, world)?;
    Ok(Some(local))
}

/// The rules of [`Shard::from_env`], over any environment.
fn resolve(env: Env<'_>) -> Result<Shard> {
    let mut claims = claims(env)?;
    if claims.is_empty() {
        claims.extend(slurm_outside_of_a_step(env)?);
    }
    let Some((inner, outer)) = claims.split_first() else { return unclaimed(env) };
    for claim in outer {
        // With one process per node the worlds are equal, and torchrun numbers the nodes as they happen to meet.
        let nodes = inner.names.launcher == Launcher::Torchrun && env.has("TORCHELASTIC_RUN_ID");
        if !(nodes && inner.shard.world == claim.shard.world) {
            inner.check_outer(claim)?;
        }
    }
    // A world that is no launcher's own.
    if claims.iter().all(|claim| claim.names.world != TORCHRUN.world) {
        check_spare_world(inner, env)?;
    }
    let same_level = claims.iter().filter(|claim| inner.agrees(claim));
    let local_rank = same_level.filter_map(|claim| claim.shard.local_rank).next();
    Ok(Shard { local_rank, ..inner.shard })
}

/// What the launchers claim, innermost first.
fn claims(env: Env<'_>) -> Result<Vec<Claim>> {
    let mut claims = Vec::new();
    for names in LAUNCHERS {
        let claims_nothing = match names.launcher {
            Launcher::Torchrun => !env.has(TORCHRUN.rank),
            Launcher::OpenMpi | Launcher::Pmi => false,
            Launcher::Slurm => outside_of_a_step(env)?,
            // Every indexed job has the index, and no world but the one that the user or torchrun set.
            Launcher::Kubernetes => env.has(TORCHRUN.rank) || !env.has(KUBERNETES.rank) || !env.has(KUBERNETES.world),
        };
        if !claims_nothing {
            claims.extend(Claim::read(names, env)?);
        }
    }
    match (env.number(SLURM.world)?, env.number("SLURM_STEP_NUM_TASKS")?) {
        (Some(tasks), Some(of_step))
            if tasks != of_step && claims.iter().any(|claim| claim.names.world == SLURM.world) =>
        {
            Err(bad(format!(
                "SLURM_NTASKS={tasks} contradicts SLURM_STEP_NUM_TASKS={of_step}: the step has another number of tasks; \
                 unset one, or use `Shard::new(rank, world)`"
            )))
        }
        _ => Ok(claims),
    }
}

/// Whether Slurm's variables are those of a batch script or of the shell of `salloc`: they then count the tasks that srun
/// would start, and this process is none of them.
fn outside_of_a_step(env: Env<'_>) -> Result<bool> {
    let step = env.get("SLURM_STEP_ID").is_some_and(|id| id.parse().is_ok_and(|id: u32| id <= SLURM_STEP_MAX));
    Ok(env.has("SLURM_JOB_ID") && !step && env.number(SLURM.rank)?.is_none_or(|rank| rank == 0))
}

/// What Slurm's variables are worth where srun has started nothing, nor another launcher: one task is this process,
/// several are refused.
fn slurm_outside_of_a_step(env: Env<'_>) -> Result<Option<Claim>> {
    if !outside_of_a_step(env)? {
        return Ok(None);
    }
    let (mut name, mut tasks) = (SLURM.world, env.number(SLURM.world)?);
    if tasks.is_none() {
        (name, tasks) = ("SLURM_NTASKS_PER_NODE", env.number("SLURM_NTASKS_PER_NODE")?);
    }
    let tasks = tasks.unwrap_or(0);
    if tasks > 1 {
        let step = env.get("SLURM_STEP_ID").map_or("not set".into(), |id| format!("{id:?}, no step of srun"));
        return Err(bad(format!(
            "{name}={tasks} but SLURM_STEP_ID is {step}: srun did not start this process, so it has no rank among the \
             tasks, and as rank 0 it would see 1/{tasks} of the data; start it by srun, or use `Shard::single()`"
        )));
    }
    if env.has(SLURM.rank) && env.has(SLURM.world) { Claim::read(&SLURM, env) } else { Ok(None) }
}

/// Refuses a `WORLD_SIZE` that contradicts the claim.
fn check_spare_world(inner: &Claim, env: Env<'_>) -> Result<()> {
    let (launcher, name, world) = (inner.names.launcher, inner.names.world, inner.shard.world);
    match env.number(TORCHRUN.world)? {
        Some(spare) if spare != world => Err(bad(format!(
            "WORLD_SIZE={spare} contradicts {name}={world} of {launcher}; unset it, or choose by \
             `Shard::of(Launcher::{launcher:?})` or `Shard::new(rank, world)`"
        ))),
        _ => Ok(()),
    }
}

/// Ranks of launchers that are not read: above 0, this process is not the only one.
const OTHERS: [&str; 5] = ["PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "GROUP_RANK", "NODE_RANK"];

/// Without a claim: a single process, unless something says that it is not alone.
fn unclaimed(env: Env<'_>) -> Result<Shard> {
    if env.has(KUBERNETES.rank) {
        return only(Launcher::Kubernetes, env);
    }
    match env.number(TORCHRUN.world)? {
        None | Some(1) => {}
        Some(0) => return Err(empty_world(&TORCHRUN)),
        Some(world) => return Err(half(&TORCHRUN, TORCHRUN.world, world, TORCHRUN.rank)),
    }
    for name in OTHERS {
        if let Some(rank) = env.number(name)?
            && rank > 0
        {
            let message = format!("{name}={rank} is set, but nothing says of how many; use `Shard::new(rank, world)`");
            return Err(bad(message));
        }
    }
    match env.number("LOCAL_RANK")? {
        None => Ok(Shard::single()),
        Some(0) => Ok(Shard::single().with_local_rank(0)),
        Some(local) => Err(half(&TORCHRUN, "LOCAL_RANK", local, TORCHRUN.rank)),
    }
}

fn only(launcher: Launcher, env: Env<'_>) -> Result<Shard> {
    if launcher == Launcher::Slurm {
        slurm_outside_of_a_step(env)?;
    }
    let names = launcher.names();
    match Claim::read(names, env)? {
        Some(claim) => Ok(claim.shard),
        None => Err(bad(format!("no rank from {launcher}: {} and {} are not set", names.rank, names.world))),
    }
}

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}

fn empty_world(names: &Names) -> Error {
    bad(format!("{}=0: a world has at least one rank", names.world))
}

fn below(rank: &str, value: u32, world: &str, size: u32) -> Result<()> {
    if value < size {
        return Ok(());
    }
    Err(bad(format!("{rank}={value} is not below {world}={size}")))
}

fn half(names: &Names, there: &str, value: u32, missing: &str) -> Error {
    let message = if names.launcher == Launcher::Kubernetes && missing == names.world {
        "Kubernetes does not say how many pods a job has; set WORLD_SIZE to the job's number of completions".into()
    } else if names.launcher == Launcher::Kubernetes {
        format!("Kubernetes sets {missing} in the pods of an indexed job only")
    } else {
        format!("{} sets both; set {missing}, or unset {there}", names.launcher)
    };
    bad(format!("{there}={value} is set but {missing} is not: {message}"))
}

fn contradiction(inner: (&Claim, &str, u32), outer: (&Claim, &str, u32), why: &str) -> Error {
    let [(one, one_name, one_value), (other, other_name, other_value)] = [inner, outer];
    let (one, other) = (one.names.launcher, other.names.launcher);
    bad(format!(
        "{one_name}={one_value} of {one} contradicts {other_name}={other_value} of {other}: {why}; choose by \
         `Shard::of(Launcher::{one:?})`, `Shard::of(Launcher::{other:?})` or `Shard::new(rank, world)`"
    ))
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
        let get = |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value.clone());
        of(Env(&get))
    }

    fn from(variables: &Variables<'_>) -> Result<Shard> {
        lookup(variables, resolve)
    }

    /// Checks rows of variables and what comes of them: the shard's text or the error's.
    fn check(rows: &[(&str, &str)], of: impl Fn(Env<'_>) -> Result<Shard>) {
        for (variables, expected) in rows {
            let result = lookup(&parse(variables), &of);
            if let Err(error) = &result {
                assert_eq!((error.kind(), error.stage()), (ErrorKind::Config, Stage::Build));
            }
            let text = result.map_or_else(|error| error.message().to_string(), |shard| shard.to_string());
            assert_eq!(text, *expected, "{variables}");
        }
    }

    #[test]
    fn a_shard_is_a_rank_below_a_world() {
        let shard = Shard::new(3, 8).unwrap();
        assert_eq!((shard.rank(), shard.world(), shard.local_rank()), (3, 8, None));
        assert_eq!(shard.to_string(), "rank 3 of 8");
        assert_eq!(shard.with_local_rank(1).local_rank(), Some(1));
        assert_eq!(shard.with_local_rank(1).to_string(), "rank 3 of 8 (local rank 1)");
        assert_eq!((Shard::default(), Shard::single()), (Shard::new(0, 1).unwrap(), Shard::new(0, 1).unwrap()));
        assert!(Shard::new(u32::MAX - 1, u32::MAX).is_ok());
        for (rank, world, words) in [
            (0, 0, "a world of 0 ranks"),
            (8, 8, "rank 8 of a world of 8: ranks are counted from 0"),
            (u32::MAX, 1, "rank 4294967295 of a world of 1: ranks are counted from 0"),
        ] {
            let error = Shard::new(rank, world).unwrap_err();
            assert_eq!((error.kind(), error.stage(), error.message()), (ErrorKind::Config, Stage::Build, words));
        }
    }

    #[test]
    fn each_launcher_s_variables_give_its_shard() {
        let rows = [
            ("", "rank 0 of 1"),
            ("RANK= WORLD_SIZE= SLURM_PROCID= JOB_COMPLETION_INDEX=", "rank 0 of 1"),
            ("HOME=/root PATH=x", "rank 0 of 1"),
            ("RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8", "rank 9 of 16 (local rank 1)"),
            ("RANK=9 WORLD_SIZE=16", "rank 9 of 16"),
            ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", "rank 0 of 1 (local rank 0)"),
            ("RANK=4294967294 WORLD_SIZE=4294967295", "rank 4294967294 of 4294967295"),
            (
                "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_LOCAL_RANK=2",
                "rank 5 of 6 (local rank 2)",
            ),
            ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0", "rank 1 of 2 (local rank 0)"),
            ("SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=3", "rank 3 of 8 (local rank 3)"),
            (
                "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0",
                "rank 0 of 8 (local rank 0)",
            ),
            ("JOB_COMPLETION_INDEX=2 WORLD_SIZE=4", "rank 2 of 4"),
            ("WORLD_SIZE=1", "rank 0 of 1"),
            ("LOCAL_RANK=0", "rank 0 of 1 (local rank 0)"),
            ("WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", "rank 0 of 1 (local rank 0)"),
        ];
        check(&rows, resolve);
    }

    #[test]
    fn the_innermost_launcher_counts_and_outer_ones_describe_nodes_or_agree() {
        let rows = [
            // torchrun once per node of a Slurm job, and of a Kubernetes job.
            (
                "RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0",
                "rank 9 of 16 (local rank 1)",
            ),
            ("RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 JOB_COMPLETION_INDEX=1", "rank 9 of 16 (local rank 1)"),
            // torchrun once per node, one process each: nodes are numbered as they meet.
            (
                "RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=x SLURM_JOB_ID=7 SLURM_STEP_ID=0 \
                 SLURM_PROCID=1 SLURM_NTASKS=4",
                "rank 0 of 4 (local rank 0)",
            ),
            // A local rank of the node level is not taken.
            ("RANK=9 WORLD_SIZE=16 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0", "rank 9 of 16"),
            // srun --mpi=pmi2 sets both; PMI alone has no local rank there.
            ("PMI_RANK=3 PMI_SIZE=8 SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=1", "rank 3 of 8 (local rank 1)"),
            // A script that exports torchrun's variables from mpirun's.
            (
                "RANK=3 WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=3",
                "rank 3 of 8 (local rank 3)",
            ),
            (
                "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=2",
                "rank 3 of 8 (local rank 1)",
            ),
            // Three levels.
            (
                "RANK=9 WORLD_SIZE=16 PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 SLURM_PROCID=1 SLURM_NTASKS=2",
                "rank 9 of 16",
            ),
            ("WORLD_SIZE=8 SLURM_PROCID=3 SLURM_NTASKS=8", "rank 3 of 8"),
            ("WORLD_SIZE=2 JOB_COMPLETION_INDEX=1 PMI_RANK=5 PMI_SIZE=8", "rank 5 of 8"),
            ("JOB_COMPLETION_INDEX=1 PMI_RANK=5 PMI_SIZE=8", "rank 5 of 8"),
            ("LOCAL_RANK=1 PMI_RANK=5 PMI_SIZE=8", "rank 5 of 8"),
        ];
        check(&rows, resolve);
    }

    #[test]
    fn outside_of_a_step_of_srun_slurm_gives_no_rank() {
        const REFUSED: &str = "SLURM_NTASKS=8 but SLURM_STEP_ID is not set: srun did not start this process, so it has no \
                               rank among the tasks, and as rank 0 it would see 1/8 of the data; start it by srun, or use \
                               `Shard::single()`";
        const REFUSED_SHELL: &str = "SLURM_NTASKS=8 but SLURM_STEP_ID is \"4294967290\", no step of srun: srun did not \
                                     start this process, so it has no rank among the tasks, and as rank 0 it would see \
                                     1/8 of the data; start it by srun, or use `Shard::single()`";
        let rows = [
            // A batch script: several tasks; one; not said how many.
            ("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", REFUSED),
            ("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0", "rank 0 of 1 (local rank 0)"),
            ("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0", "rank 0 of 1"),
            (
                "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS_PER_NODE=4",
                "SLURM_NTASKS_PER_NODE=4 but SLURM_STEP_ID is not set: srun did not start this process, so it has no rank \
                 among the tasks, and as rank 0 it would see 1/4 of the data; start it by srun, or use `Shard::single()`",
            ),
            // The shell of salloc, on the login node and on a compute node.
            ("SLURM_JOB_ID=7 SLURM_NTASKS=8", REFUSED),
            ("SLURM_JOB_ID=7 SLURM_NTASKS=1", "rank 0 of 1"),
            ("SLURM_JOB_ID=7 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", REFUSED_SHELL),
            ("SLURM_JOB_ID=7 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_LOCALID=0", "rank 0 of 1"),
            // torchrun or mpirun there.
            (
                "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=3 RANK=5 WORLD_SIZE=8 LOCAL_RANK=5",
                "rank 5 of 8 (local rank 5)",
            ),
            ("SLURM_JOB_ID=7 SLURM_NTASKS=8 OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8", "rank 5 of 8"),
            // The daemon of one of four nodes was started by srun, as one of three.
            (
                "OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_SIZE=32 SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=3",
                "rank 9 of 32",
            ),
            ("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=8 WORLD_SIZE=1 RANK=0", "rank 0 of 1"),
            // Steps, and whatever is not a job, are believed.
            ("SLURM_JOB_ID=7 SLURM_STEP_ID=4 SLURM_PROCID=0 SLURM_NTASKS=8", "rank 0 of 8"),
            ("SLURM_JOB_ID=7 SLURM_PROCID=1 SLURM_NTASKS=8", "rank 1 of 8"),
            ("SLURM_PROCID=0 SLURM_NTASKS=8", "rank 0 of 8"),
            (
                "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=1 WORLD_SIZE=4",
                "WORLD_SIZE=4 contradicts SLURM_NTASKS=1 of Slurm; unset it, or choose by `Shard::of(Launcher::Slurm)` or \
                 `Shard::new(rank, world)`",
            ),
        ];
        check(&rows, resolve);
        check(&rows[..2], |env| only(Launcher::Slurm, env));
    }

    #[test]
    fn half_a_claim_is_an_error_that_names_what_is_there_and_what_is_missing() {
        let rows = [
            ("RANK=3", "RANK=3 is set but WORLD_SIZE is not: torchrun sets both; set WORLD_SIZE, or unset RANK"),
            (
                "RANK=3 WORLD_SIZE=",
                "RANK=3 is set but WORLD_SIZE is not: torchrun sets both; set WORLD_SIZE, or unset RANK",
            ),
            ("WORLD_SIZE=4", "WORLD_SIZE=4 is set but RANK is not: torchrun sets both; set RANK, or unset WORLD_SIZE"),
            (
                "RANK=3 JOB_COMPLETION_INDEX=3",
                "RANK=3 is set but WORLD_SIZE is not: torchrun sets both; set WORLD_SIZE, or unset RANK",
            ),
            (
                "OMPI_COMM_WORLD_RANK=0 RANK=0 WORLD_SIZE=2",
                "OMPI_COMM_WORLD_RANK=0 is set but OMPI_COMM_WORLD_SIZE is not: Open MPI sets both; set \
                 OMPI_COMM_WORLD_SIZE, or unset OMPI_COMM_WORLD_RANK",
            ),
            ("PMI_SIZE=4", "PMI_SIZE=4 is set but PMI_RANK is not: PMI sets both; set PMI_RANK, or unset PMI_SIZE"),
            (
                "SLURM_PROCID=3",
                "SLURM_PROCID=3 is set but SLURM_NTASKS is not: Slurm sets both; set SLURM_NTASKS, or unset SLURM_PROCID",
            ),
            (
                "SLURM_NTASKS=4",
                "SLURM_NTASKS=4 is set but SLURM_PROCID is not: Slurm sets both; set SLURM_PROCID, or unset SLURM_NTASKS",
            ),
            (
                "JOB_COMPLETION_INDEX=2",
                "JOB_COMPLETION_INDEX=2 is set but WORLD_SIZE is not: Kubernetes does not say how many pods a job has; set \
                 WORLD_SIZE to the job's number of completions",
            ),
            ("LOCAL_RANK=1", "LOCAL_RANK=1 is set but RANK is not: torchrun sets both; set RANK, or unset LOCAL_RANK"),
            (
                "LOCAL_RANK=1 WORLD_SIZE=1",
                "LOCAL_RANK=1 is set but RANK is not: torchrun sets both; set RANK, or unset LOCAL_RANK",
            ),
        ];
        check(&rows, resolve);
    }

    #[test]
    fn illegal_values_are_named() {
        let rows = [
            ("RANK=x WORLD_SIZE=4", "RANK=\"x\" is not a whole number from 0 to 4294967295"),
            ("RANK=-1 WORLD_SIZE=4", "RANK=\"-1\" is not a whole number from 0 to 4294967295"),
            ("RANK=1.0 WORLD_SIZE=4", "RANK=\"1.0\" is not a whole number from 0 to 4294967295"),
            ("RANK=0 WORLD_SIZE=4294967296", "WORLD_SIZE=\"4294967296\" is not a whole number from 0 to 4294967295"),
            ("RANK=4 WORLD_SIZE=4", "RANK=4 is not below WORLD_SIZE=4"),
            ("JOB_COMPLETION_INDEX=4 WORLD_SIZE=4", "JOB_COMPLETION_INDEX=4 is not below WORLD_SIZE=4"),
            ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0: a world has at least one rank"),
            ("WORLD_SIZE=0", "WORLD_SIZE=0: a world has at least one rank"),
            ("WORLD_SIZE=two", "WORLD_SIZE=\"two\" is not a whole number from 0 to 4294967295"),
            ("LOCAL_RANK=x", "LOCAL_RANK=\"x\" is not a whole number from 0 to 4294967295"),
            ("RANK=4 WORLD_SIZE=8 LOCAL_RANK=4 LOCAL_WORLD_SIZE=4", "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
            ("RANK=4 WORLD_SIZE=8 LOCAL_RANK=9 LOCAL_WORLD_SIZE=16", "LOCAL_WORLD_SIZE=16 is more than WORLD_SIZE=8"),
            ("RANK=4 WORLD_SIZE=8 LOCAL_RANK=9", "LOCAL_RANK=9 is not below WORLD_SIZE=8"),
            ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=2", "MPI_LOCALRANKID=2 is not below PMI_SIZE=2"),
            // Also those of outer launchers.
            ("RANK=0 WORLD_SIZE=4 SLURM_PROCID=2 SLURM_NTASKS=2", "SLURM_PROCID=2 is not below SLURM_NTASKS=2"),
        ];
        check(&rows, resolve);
        let error = from(&vec![("RANK", "1\n2".into()), ("WORLD_SIZE", "4".into())]).unwrap_err();
        assert_eq!(error.message(), r#"RANK="1\n2" is not a whole number from 0 to 4294967295"#, "one line");
    }

    #[test]
    fn launchers_that_contradict_each_other_are_named_with_the_way_out() {
        let rows = [
            (
                "RANK=1 WORLD_SIZE=8 SLURM_PROCID=2 SLURM_NTASKS=8",
                "RANK=1 of torchrun contradicts SLURM_PROCID=2 of Slurm: they are two ranks of one world of 8; choose by \
                 `Shard::of(Launcher::Torchrun)`, `Shard::of(Launcher::Slurm)` or `Shard::new(rank, world)`",
            ),
            // Left over in a shell profile.
            (
                "RANK=0 WORLD_SIZE=1 SLURM_PROCID=2 SLURM_NTASKS=8",
                "WORLD_SIZE=1 of torchrun contradicts SLURM_NTASKS=8 of Slurm: the world of an outer launcher must be \
                 smaller than the inner one's and divide it; choose by `Shard::of(Launcher::Torchrun)`, \
                 `Shard::of(Launcher::Slurm)` or `Shard::new(rank, world)`",
            ),
            (
                "JOB_COMPLETION_INDEX=1 WORLD_SIZE=8 PMI_RANK=5 PMI_SIZE=8",
                "PMI_RANK=5 of PMI contradicts JOB_COMPLETION_INDEX=1 of Kubernetes: they are two ranks of one world of 8; \
                 choose by `Shard::of(Launcher::Pmi)`, `Shard::of(Launcher::Kubernetes)` or `Shard::new(rank, world)`",
            ),
            (
                "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2",
                "SLURM_NTASKS=8 contradicts SLURM_STEP_NUM_TASKS=2: the step has another number of tasks; unset one, or use \
                 `Shard::new(rank, world)`",
            ),
            ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE=8 is more than WORLD_SIZE=2"),
            ("PMIX_RANK=1", "PMIX_RANK=1 is set, but nothing says of how many; use `Shard::new(rank, world)`"),
            ("NODE_RANK=3", "NODE_RANK=3 is set, but nothing says of how many; use `Shard::new(rank, world)`"),
            (
                "WORLD_SIZE=4 SLURM_PROCID=3 SLURM_NTASKS=8",
                "WORLD_SIZE=4 contradicts SLURM_NTASKS=8 of Slurm; unset it, or choose by `Shard::of(Launcher::Slurm)` or \
                 `Shard::new(rank, world)`",
            ),
        ];
        check(&rows, resolve);
    }

    #[test]
    fn a_named_launcher_is_the_only_one_asked() {
        let variables = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=5 PMI_RANK=3 PMI_SIZE=6 \
                         SLURM_PROCID=4 SLURM_NTASKS=7 SLURM_LOCALID=2 JOB_COMPLETION_INDEX=3";
        let rows = [
            (
                Launcher::Torchrun,
                "rank 1 of 4 (local rank 0)",
                "no rank from torchrun: RANK and WORLD_SIZE are not set",
            ),
            (
                Launcher::OpenMpi,
                "rank 2 of 5",
                "no rank from Open MPI: OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are not set",
            ),
            (Launcher::Pmi, "rank 3 of 6", "no rank from PMI: PMI_RANK and PMI_SIZE are not set"),
            (
                Launcher::Slurm,
                "rank 4 of 7 (local rank 2)",
                "no rank from Slurm: SLURM_PROCID and SLURM_NTASKS are not set",
            ),
            (
                Launcher::Kubernetes,
                "rank 3 of 4",
                "no rank from Kubernetes: JOB_COMPLETION_INDEX and WORLD_SIZE are not set",
            ),
        ];
        for (launcher, there, missing) in rows {
            check(&[(variables, there), ("", missing), ("HOME=/root LOCAL_RANK=1", missing)], |env| {
                only(launcher, env)
            });
        }
        let words = "RANK=1 is set but WORLD_SIZE is not: torchrun sets both; set WORLD_SIZE, or unset RANK";
        check(&[("RANK=1 PMI_RANK=0 PMI_SIZE=1", words)], |env| only(Launcher::Torchrun, env));
    }

    #[test]
    fn the_environment_is_the_process_s() {
        let variables: Vec<(String, String)> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
            .collect();
        assert!(variables.iter().all(|(name, value)| environment(name).as_ref() == Some(value)));
        assert_eq!(environment("FEEDLINE_NO_SUCH_VARIABLE"), None);
        let variables: Variables<'_> = variables.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        assert_eq!(
            Shard::from_env().map_err(|error| error.to_string()),
            from(&variables).map_err(|error| error.to_string())
        );
        for launcher in LAUNCHERS.map(|names| names.launcher) {
            let expected = lookup(&variables, |env| only(launcher, env)).map_err(|error| error.to_string());
            assert_eq!(Shard::of(launcher).map_err(|error| error.to_string()), expected);
        }
    }

    const ALL: [&str; 17] = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "JOB_COMPLETION_INDEX",
        "HOME",
    ];

    fn value() -> impl Strategy<Value = String> {
        prop_oneof![
            5 => (0_u32..5).prop_map(|number| number.to_string()),
            1 => any::<u64>().prop_map(|number| number.to_string()),
            1 => any::<String>(),
        ]
    }

    /// Some launchers' claims, some of them spoilt by further variables: so that a part of the environments is legal.
    fn any_environment() -> impl Strategy<Value = Variables<'static>> {
        let claims = proptest::collection::vec((0..LAUNCHERS.len(), 0_u32..4, 1_u32..5), 0..3);
        let further = proptest::collection::vec((proptest::sample::select(&ALL[..]), value()), 0..4);
        (claims, further).prop_map(|(claims, further)| {
            let mut variables = std::collections::BTreeMap::new();
            for (launcher, rank, world) in claims {
                variables.insert(LAUNCHERS[launcher].rank, rank.to_string());
                variables.insert(LAUNCHERS[launcher].world, world.to_string());
            }
            variables.extend(further);
            variables.into_iter().collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn no_environment_panics_and_a_shard_is_always_a_rank_below_its_world(
            variables in any_environment()
        ) {
            for launcher in LAUNCHERS.map(|names| names.launcher) {
                if let Ok(shard) = lookup(&variables, |env| only(launcher, env)) {
                    prop_assert!(shard.rank() < shard.world());
                }
            }
            let has = |name| variables.iter().any(|(other, value)| *other == name && !value.is_empty());
            match from(&variables) {
                Ok(shard) => {
                    prop_assert!(shard.rank() < shard.world());
                    prop_assert!(shard.local_rank().is_none_or(|local| local < shard.world()));
                    // What is believed is what the innermost launcher alone would say.
                    let inner = LAUNCHERS.iter().find(|names| has(names.rank) && names.launcher != Launcher::Slurm);
                    if let Some(names) = inner && !has("SLURM_PROCID") && has(names.world) {
                        let only = lookup(&variables, |env| only(names.launcher, env)).unwrap();
                        prop_assert_eq!((shard.rank(), shard.world()), (only.rank(), only.world()));
                    }
                }
                Err(error) => {
                    prop_assert_eq!((error.kind(), error.stage()), (ErrorKind::Config, Stage::Build));
                    prop_assert!(ALL.iter().any(|name| has(name) && error.message().contains(name)), "{}", error);
                    prop_assert!(!error.message().contains(char::is_control));
                }
            }
        }

        #[test]
        fn two_claims_pass_when_they_agree_or_the_outer_world_is_a_part_of_the_inner_one(
            inner in 1_u32..40, outer in 1_u32..40, rank in 0_u32..40, outer_rank in 0_u32..40, which in 0_usize..3
        ) {
            let (rank, outer_rank) = (rank % inner, outer_rank % outer);
            let (one, other) = (&LAUNCHERS[which], &LAUNCHERS[which + 1]);
            let variables = vec![
                (one.rank, rank.to_string()),
                (one.world, inner.to_string()),
                (other.rank, outer_rank.to_string()),
                (other.world, outer.to_string()),
            ];
            let legal = (outer == inner && outer_rank == rank) || (outer < inner && (2..=inner).any(|n| n * outer == inner));
            let result = from(&variables);
            prop_assert_eq!(result.is_ok(), legal);
            if let Ok(shard) = result {
                prop_assert_eq!(shard, Shard::new(rank, inner).unwrap());
            }
        }
    }
}
