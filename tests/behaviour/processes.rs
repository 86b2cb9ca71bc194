//! Real processes are killed and resume: each rank is this test binary started again, its death is
//! a real signal, and the check reads the rows that the ranks logged.
//!
//! ```text
//! test ──start──► rank 0 … rank n-1        each: loader ─► batch ─► its log, one write(2) per step
//!   │  ◄─socket── "step done, stop?" ──►                    └─► all-reduce of the stop flag ─► rank 0 saves the state
//!   ├─ SIGKILL to all, SIGKILL to one, SIGTERM, at a random moment
//!   ├─ the next world, of another size, from the state that was saved
//!   └─ logs up to the states that were resumed ══ the uninterrupted sequence, bit by bit
//! ```
//!
//! A step is logged before its all-reduce and the state is saved after it. So all ranks have logged
//! every step of a saved state. Later steps in a log are repeated, and must have the same rows
//! again.
//!
//! A process is killed 50 times by default, 1000 times with `FEEDLINE_SWEEP=ci`. Every wait has a
//! deadline; ranks end with their parent.

use crate::common::sweep;
use crate::common::toys::Chunks;
use crate::common::*;
use feedline::order::Draws;
use feedline::storage::{Direct, Mode};
use feedline::{Batch, ErrorKind, LastBatch, Loader, LoaderBuilder, Order, Rank, State, Stop};
use rustix::process::{Pid, Signal as Number, kill_process};
use std::fs::File;
use std::io::{self, ErrorKind as Io, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a sample.
const RECORD: usize = 48;
/// Exit code of a rank that saved its state and stopped on request.
const LEFT: i32 = 75;
/// Duration of a step, so that a random moment is rarely after the end.
const COMPUTE: Duration = Duration::from_micros(300);
/// File with the state to resume.
const STATE: &str = "state.json";

/// Scenario of a run. Ranks find it by its name.
struct Scenario {
    name: &'static str,
    /// Number of samples, per chunk for data in chunks.
    rows: &'static [u64],
    order: fn() -> Order,
    /// It has lanes.
    in_turn: bool,
    last: LastBatch,
    global: u64,
    epochs: u64,
    /// Steps between two saved states.
    every: u64,
}

const SCENARIOS: [&Scenario; 5] = [&SHUFFLED, &WINDOWED, &SEQUENTIAL, &FILLED, &ALONE];

/// The last batch of an epoch has 5 rows: some ranks get blank ones.
const SHUFFLED: Scenario = Scenario {
    name: "shuffled",
    rows: &[245],
    order: || Order::shuffled(3),
    in_turn: false,
    last: LastBatch::Keep,
    global: 24,
    epochs: 4,
    every: 3,
};

const WINDOWED: Scenario = Scenario {
    name: "windowed",
    rows: &[7, 1, 0, 40, 13, 13, 64, 2, 5, 30, 30, 30],
    order: || Order::windowed(4, 2).lanes(8),
    in_turn: true,
    last: LastBatch::Keep,
    global: 16,
    epochs: 3,
    every: 2,
};

/// Epochs of two batches, so that most moments are near the end of one.
const SEQUENTIAL: Scenario = Scenario {
    name: "sequential",
    rows: &[31],
    order: Order::sequential,
    in_turn: false,
    last: LastBatch::Drop,
    global: 12,
    epochs: 25,
    every: 1,
};

const FILLED: Scenario = Scenario {
    name: "filled",
    rows: &[100],
    order: || Order::shuffled(9),
    in_turn: false,
    last: LastBatch::Pad,
    global: 9,
    epochs: 4,
    every: 5,
};

/// Rows of one process.
const ALONE: Scenario = Scenario {
    name: "alone",
    rows: &[50],
    order: || Order::shuffled(1),
    in_turn: false,
    last: LastBatch::Keep,
    global: 3,
    epochs: 4,
    every: 1,
};

impl Scenario {
    fn samples(&self) -> u64 {
        self.rows.iter().sum()
    }

    fn steps_per_epoch(&self) -> u64 {
        if self.last == LastBatch::Drop {
            self.samples() / self.global
        } else {
            self.samples().div_ceil(self.global)
        }
    }

    fn steps(&self) -> u64 {
        self.epochs * self.steps_per_epoch()
    }

    fn data(&self) -> Vec<u8> {
        noise(self.samples() as usize * RECORD, self.samples())
    }

    fn builder(&self, dir: &Path) -> LoaderBuilder {
        let path = dir.join("data.bin");
        let builder = match self.rows {
            [_] => Loader::builder(records(&path, RECORD)),
            rows => Loader::builder(Chunks::open(&path, rows, RECORD)),
        };
        builder
            .order((self.order)())
            .global_batch(self.global)
            .last_batch(self.last)
    }

    /// The rows of a rank, of those of all ranks.
    fn rows_of<T: Clone>(&self, all: &[T], rank: usize, world: usize) -> Vec<T> {
        if self.in_turn {
            return all.iter().skip(rank).step_by(world).cloned().collect();
        }
        // A smaller batch has equally many rows on every rank, before blank ones.
        let full = all.len() as u64 == self.global;
        let (each, more) = if full {
            (all.len() / world, all.len() % world)
        } else {
            (all.len().div_ceil(world), 0)
        };
        let start = rank * each + rank.min(more);
        all.iter()
            .skip(start)
            .take(each + usize::from(rank < more))
            .cloned()
            .collect()
    }

    /// Rows of each step of an uninterrupted run: the order's ids, and the file's bytes.
    fn expected(&self, dir: &Path) -> Vec<Step> {
        let data = std::fs::read(dir.join("data.bin")).unwrap();
        let loader = build(self.builder(dir));
        let mut steps = Vec::new();
        for epoch in 0..self.epochs {
            let ids = loader.preview(epoch, u64::MAX).unwrap();
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..self.samples()));
            for ids in ids
                .chunks(self.global as usize)
                .take(self.steps_per_epoch() as usize)
            {
                let rows = ids
                    .iter()
                    .map(|id| (*id, data[*id as usize * RECORD..][..RECORD].to_vec()))
                    .collect();
                steps.push(Step {
                    step: steps.len() as u64 + 1,
                    epoch,
                    rows,
                });
            }
        }
        assert_eq!(steps.len() as u64, self.steps());
        steps
    }
}

// The rank: code of the child processes.

/// Instructions for a rank, besides its place in the world.
#[derive(Clone)]
struct Task {
    scenario: &'static Scenario,
    dir: PathBuf,
    attempt: usize,
    /// Steps to the next saved state.
    every: u64,
    /// Leave after this step without telling the others, and save a private state.
    halt: Option<u64>,
}

impl Task {
    fn to_text(&self) -> String {
        let Self {
            scenario,
            dir,
            attempt,
            every,
            halt,
        } = self;
        format!(
            "{} {attempt} {every} {} {}",
            scenario.name,
            halt.unwrap_or(0),
            dir.display()
        )
    }

    fn from_text(text: &str) -> Self {
        let [name, attempt, every, halt, dir] = text.splitn(5, ' ').collect::<Vec<_>>()[..] else {
            panic!("{text}")
        };
        Self {
            scenario: SCENARIOS
                .into_iter()
                .find(|scenario| scenario.name == name)
                .unwrap(),
            dir: dir.into(),
            attempt: attempt.parse().unwrap(),
            every: every.parse().unwrap(),
            halt: halt.parse().ok().filter(|step| *step > 0),
        }
    }

    fn log(&self, rank: u32) -> PathBuf {
        self.dir.join(format!("log-{}-{rank}", self.attempt))
    }

    /// File for the state of a leaving rank, for comparison.
    fn left(&self, rank: u32) -> PathBuf {
        self.dir.join(format!("left-{}-{rank}", self.attempt))
    }
}

/// Entry point of the processes that the tests start; it does nothing without the variable.
#[test]
#[ignore = "a rank of the other tests, which start it as a process of its own"]
fn rank() {
    if let Some(task) = told() {
        // It ends with its parent's thread in any case.
        rustix::process::set_parent_process_death_signal(Some(Number::KILL)).unwrap();
        std::process::exit(train(&Task::from_text(&task)));
    }
}

fn stop() -> Stop {
    Stop::on_signals().unwrap()
}

/// Without explicit io_uring: some machines lack it, and the kernel may still hold memory of ranks
/// just killed.
const WAYS: [(Mode, Direct); 5] = [
    (Mode::Auto, Direct::Auto),
    (Mode::Auto, Direct::On),
    (Mode::Pread, Direct::On),
    (Mode::Pread, Direct::Off),
    (Mode::Mmap, Direct::Off),
];

/// Life of a rank; gives its exit code.
fn train(task: &Task) -> i32 {
    let rank = Rank::from_env().unwrap();
    let stop = stop();
    let mut peers = Peers::new(rank.world(), task.halt.is_none());
    let loader = task.loader(rank, stop);
    let state = task.dir.join(STATE);
    let mut log = File::options()
        .append(true)
        .create(true)
        .open(task.log(rank.number()))
        .unwrap();
    // Both ways to resume.
    let batches = if task.attempt.is_multiple_of(2) {
        loader
            .epochs(loader.next_epoch()..task.scenario.epochs)
            .unwrap()
    } else {
        loader
            .steps(task.scenario.steps() - loader.state().unwrap().steps())
            .unwrap()
    };
    for batch in batches {
        let batch = batch.unwrap();
        let stand = loader.state().unwrap();
        let entry = Step::of(&batch, stand.steps()).to_bytes();
        assert_eq!(log.write(&entry).unwrap(), entry.len());
        std::thread::sleep(COMPUTE);
        let stopping = peers.any(loader.stop_requested());
        let saves = rank.number() == 0 && task.halt.is_none();
        if saves && (stand.steps().is_multiple_of(task.every) || stopping) {
            // A killed process cannot lose data that the kernel has, so both ways must work.
            if stand.steps().is_multiple_of(2) {
                stand.save(&state)
            } else {
                stand.save_unsynced(&state)
            }
            .unwrap();
        }
        if stopping || task.halt == Some(stand.steps()) {
            stand.save_unsynced(task.left(rank.number())).unwrap();
            return LEFT;
        }
    }
    if rank.number() == 0 {
        loader.state().unwrap().save(&state).unwrap();
    }
    0
}

impl Task {
    fn loader(&self, rank: Rank, stop: Stop) -> Loader {
        let (mode, direct) = WAYS[(self.attempt + rank.number() as usize) % WAYS.len()];
        let builder = self
            .scenario
            .builder(&self.dir)
            .rank(rank)
            .stop(stop)
            .workers(1)
            .tuning(|t| t.reader(mode).direct(direct));
        match State::load(self.dir.join(STATE)) {
            Ok(state) => build(builder.resume(state)),
            Err(error) if error.kind() == ErrorKind::NotFound => build(builder),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Connection to the other ranks through the test: standard input is one end of a socket pair.
struct Peers(Option<UnixStream>);

impl Peers {
    fn new(world: u32, in_step: bool) -> Self {
        Self((world > 1 && in_step).then(|| {
            let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
            socket.set_read_timeout(Some(DEADLINE)).unwrap();
            socket
        }))
    }

    /// Whether any rank sets the flag: the same answer on all, once all have asked.
    fn any(&mut self, flag: bool) -> bool {
        let Some(socket) = &mut self.0 else {
            return flag;
        };
        let mut answer = [0];
        socket
            .write_all(&[flag.into()])
            .and_then(|()| socket.read_exact(&mut answer))
            .expect("the all-reduce");
        answer != [0]
    }
}

/// Rows of a step: all, or the rows that one rank received.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    step: u64,
    epoch: u64,
    rows: Vec<(u64, Vec<u8>)>,
}

impl Step {
    fn of(batch: &Batch, step: u64) -> Self {
        Self {
            step,
            epoch: batch.epoch(),
            rows: rows(batch).into_iter().take(batch.valid()).collect(),
        }
    }

    /// A log entry: a checksum over the rest, step, epoch, number of rows, rows.
    fn to_bytes(&self) -> Vec<u8> {
        let mut body = [self.step, self.epoch, self.rows.len() as u64]
            .map(u64::to_le_bytes)
            .concat();
        for (id, bytes) in &self.rows {
            body.extend(id.to_le_bytes());
            body.extend(bytes);
        }
        [&xxhash_rust::xxh3::xxh3_64(&body).to_le_bytes()[..], &body].concat()
    }

    /// Takes the first entry; `None` at the end, or for a cut entry.
    fn take(log: &mut &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(log.get(at..at + 8)?.try_into().unwrap()));
        let check = number(0)?;
        let step = number(8)?;
        let epoch = number(16)?;
        let count = number(24)? as usize;
        let body = log.get(8..32 + count * (8 + RECORD))?;
        assert_eq!(
            xxhash_rust::xxh3::xxh3_64(body),
            check,
            "an entry of step {step} that was not written so"
        );
        let rows = body[24..].chunks(8 + RECORD);
        let rows = rows
            .map(|row| {
                (
                    u64::from_le_bytes(row[..8].try_into().unwrap()),
                    row[8..].to_vec(),
                )
            })
            .collect();
        *log = &log[8 + body.len()..];
        Some(Self { step, epoch, rows })
    }

    /// All entries; the last one may have been cut.
    fn all(mut log: &[u8]) -> Vec<Self> {
        std::iter::from_fn(|| Self::take(&mut log)).collect()
    }
}

// The test: starts worlds, ends them, reads their logs.

/// The parent's handle of a rank; kills it on drop.
struct Process {
    child: Child,
    socket: UnixStream,
}

impl Process {
    fn start(task: &Task, rank: u32, world: u32) -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut command = process(&beside!("rank"), task.to_text());
        // Variables of a launcher around the test would contradict.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if ["SLURM_", "OMPI_", "PMI_", "MPI_", "LOCAL_", "JOB_"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
            {
                command.env_remove(&*name);
            }
        }
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string());
        command.env("LOCAL_RANK", rank.to_string());
        let child = command
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, socket }
    }

    /// Unless it has ended: then its id may belong to another process.
    fn send(&mut self, signal: Number) {
        if self.ended().is_none() {
            kill_process(Pid::from_child(&self.child), signal).unwrap();
        }
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    fn end(&mut self) -> ExitStatus {
        answer(|| "a rank is still there", || self.ended())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a flag from every rank and tells all whether any was set, until a rank is gone; counts the
/// rounds.
fn all_reduce(sockets: &[UnixStream], rounds: &AtomicU64) {
    loop {
        let mut any = [0];
        for (rank, mut socket) in sockets.iter().enumerate() {
            let mut flag = [0];
            match socket.read_exact(&mut flag) {
                Ok(()) => any[0] |= flag[0],
                Err(error) if matches!(error.kind(), Io::WouldBlock | Io::TimedOut) => {
                    panic!("rank {rank} hangs")
                }
                Err(_) => return,
            }
        }
        // The next round notices a rank killed meanwhile.
        sockets
            .iter()
            .for_each(|mut socket| drop(socket.write_all(&any)));
        rounds.fetch_add(1, Ordering::Release);
    }
}

/// End of a world.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    ByItself,
    KillAll,
    KillOneThenTheOthers,
    TermAll,
    TermOne,
}

impl End {
    /// Applies it to the ranks.
    fn come(self, ranks: &mut [Process], draws: &mut Draws) {
        let one = draws.below(ranks.len() as u64) as usize;
        match self {
            Self::ByItself => {}
            Self::KillAll => ranks.iter_mut().for_each(|rank| rank.send(Number::KILL)),
            Self::KillOneThenTheOthers => {
                ranks[one].send(Number::KILL);
                // The others would wait for it for ever.
                std::thread::sleep(Duration::from_micros(draws.below(5000)));
                ranks.iter_mut().for_each(|rank| rank.send(Number::KILL));
            }
            Self::TermAll => ranks.iter_mut().for_each(|rank| rank.send(Number::TERM)),
            Self::TermOne => ranks[one].send(Number::TERM),
        }
    }

    fn is_kill(self) -> bool {
        matches!(self, Self::KillAll | Self::KillOneThenTheOthers)
    }

    /// Whether a process can have this exit status when the world ends this way, unless the run was
    /// over before.
    fn explains(self, status: ExitStatus) -> bool {
        match self {
            Self::ByItself => false,
            Self::KillAll | Self::KillOneThenTheOthers => {
                status.signal() == Some(Number::KILL.as_raw())
            }
            Self::TermAll | Self::TermOne => status.code() == Some(LEFT),
        }
    }
}

/// A run over several worlds.
struct Run {
    dir: Dir,
    scenario: &'static Scenario,
    draws: Draws,
    /// Size and first step of each world so far.
    attempts: Vec<(u32, u64)>,
    /// Processes that died of SIGKILL.
    killed: usize,
}

impl Run {
    fn new(scenario: &'static Scenario, seed: u64) -> Self {
        let dir = Dir::new();
        dir.write("data.bin", &scenario.data());
        Self {
            dir,
            scenario,
            draws: Draws::new(seed, 0, 0, scenario.name),
            attempts: Vec::new(),
            killed: 0,
        }
    }

    fn task(&self, attempt: usize) -> Task {
        let scenario = self.scenario;
        let dir = self.dir.path("");
        Task {
            scenario,
            dir,
            attempt,
            every: scenario.every,
            halt: None,
        }
    }

    /// The last saved state. It must load at any time, unless nothing was saved yet.
    fn state(&self) -> Option<State> {
        let state = State::load(self.dir.path(STATE));
        state
            .map_err(|error| assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"))
            .ok()
    }

    /// Steps that the next world does not repeat.
    fn stands(&self) -> u64 {
        self.state().map_or(0, |state| state.steps())
    }

    /// Starts a world and ends it this way at a random moment, on average after this part of the
    /// remaining steps.
    fn live(&mut self, world: u32, end: End, part: f64) {
        let attempt = self.attempts.len();
        let task = self.task(attempt);
        let from = self.stands();
        self.attempts.push((world, from));
        // SIGTERM is for ranks that have installed their handlers; SIGKILL may come at any time.
        let most = 2.0 * part * (self.scenario.steps() - from) as f64;
        let rounds_wanted = self
            .draws
            .below(most as u64 + 1)
            .max(u64::from(!end.is_kill()));
        let delay =
            Duration::from_micros(
                self.draws
                    .below(if rounds_wanted == 0 { 60_000 } else { 3000 }),
            );
        let rounds = AtomicU64::new(0);
        let draws = &mut self.draws;
        let statuses: Vec<ExitStatus> = std::thread::scope(|scope| {
            // Moved in here, so that a panic ends the ranks, and with them the waiting thread.
            let mut ranks: Vec<Process> = (0..world)
                .map(|rank| Process::start(&task, rank, world))
                .collect();
            let sockets: Vec<UnixStream> = ranks
                .iter()
                .map(|rank| rank.socket.try_clone().unwrap())
                .collect();
            let rounds = &rounds;
            let hub = scope.spawn(move || {
                if world > 1 {
                    all_reduce(&sockets, rounds)
                }
            });
            let steps = |ranks: &[Process]| match ranks {
                [_] => std::fs::read(task.log(0)).map_or(0, |log| Step::all(&log).len() as u64),
                _ => rounds.load(Ordering::Acquire),
            };
            answer(
                || "the world makes no steps",
                || {
                    let over = ranks.iter_mut().any(|rank| rank.ended().is_some());
                    (over || steps(&ranks) >= rounds_wanted).then_some(())
                },
            );
            std::thread::sleep(delay);
            end.come(&mut ranks, draws);
            let statuses = ranks.iter_mut().map(Process::end).collect();
            hub.join().expect("the all-reduce");
            statuses
        });
        let explained = |status: &ExitStatus| status.success() || end.explains(*status);
        assert!(
            statuses.iter().all(explained),
            "{end:?} of {world} ranks: {statuses:?}"
        );
        self.killed += statuses
            .iter()
            .filter(|status| End::KillAll.explains(**status))
            .count();
        if statuses.iter().any(|status| status.code() == Some(LEFT)) {
            self.check_that_all_left_at(attempt, world);
        }
    }

    /// After SIGTERM: no rank is missing, and every rank has the saved state.
    fn check_that_all_left_at(&self, attempt: usize, world: u32) {
        let states = self.left(attempt, world);
        State::agree(&states).unwrap();
        assert_eq!(self.state().as_ref(), Some(&states[0]));
    }

    fn left(&self, attempt: usize, world: u32) -> Vec<State> {
        let task = self.task(attempt);
        (0..world)
            .map(|rank| State::load(task.left(rank)).unwrap())
            .collect()
    }

    /// Checks the logs of all worlds of a finished run.
    fn check(&self) {
        let last = self.state().expect("a run that is over has saved");
        assert_eq!(
            (last.steps(), last.epoch(), last.position()),
            (self.scenario.steps(), self.scenario.epochs, 0)
        );
        let expected = self.scenario.expected(&self.dir.path(""));
        let mut union = Vec::new();
        for (attempt, (world, from)) in self.attempts.iter().enumerate() {
            let kept = self
                .attempts
                .get(attempt + 1)
                .map_or(last.steps(), |(_, from)| *from);
            let logs: Vec<Vec<Step>> = (0..*world).map(|rank| self.log(attempt, rank)).collect();
            for (rank, log) in logs.iter().enumerate() {
                let numbers = log.iter().map(|entry| entry.step);
                assert!(
                    numbers.eq(from + 1..=from + log.len() as u64),
                    "world {attempt}, rank {rank}: steps"
                );
                let done_again = log.iter().filter(|entry| entry.step > kept);
                for entry in done_again {
                    let rows = self.scenario.rows_of(
                        &expected[entry.step as usize - 1].rows,
                        rank,
                        *world as usize,
                    );
                    assert_eq!(
                        entry.rows, rows,
                        "world {attempt}, rank {rank}, step {}",
                        entry.step
                    );
                }
            }
            for step in 0..(kept - from) as usize {
                let entries: Vec<&Step> = logs
                    .iter()
                    .map(|log| {
                        log.get(step)
                            .expect("a saved state stands for steps of all")
                    })
                    .collect();
                union.push(together(&entries, self.scenario.in_turn));
            }
        }
        let difference = expected
            .iter()
            .zip(&union)
            .find(|(expected, found)| expected != found);
        assert_eq!(difference, None);
        assert_eq!(union.len(), expected.len());
    }

    fn log(&self, attempt: usize, rank: u32) -> Vec<Step> {
        // A rank killed during start-up has no log.
        std::fs::read(self.task(attempt).log(rank)).map_or(Vec::new(), |log| Step::all(&log))
    }
}

/// The rows of all ranks in their order: those of a rank are consecutive, but in lanes ranks take
/// turns.
fn together(entries: &[&Step], in_turn: bool) -> Step {
    let Step { step, epoch, .. } = *entries[0];
    assert!(
        entries
            .iter()
            .all(|entry| (entry.step, entry.epoch) == (step, epoch))
    );
    if !in_turn {
        return Step {
            step,
            epoch,
            rows: entries
                .iter()
                .flat_map(|entry| entry.rows.clone())
                .collect(),
        };
    }
    let mut rows = Vec::new();
    let most = entries.iter().map(|entry| entry.rows.len()).max().unwrap();
    for row in 0..most {
        rows.extend(
            entries
                .iter()
                .filter_map(|entry| entry.rows.get(row).cloned()),
        );
    }
    Step { step, epoch, rows }
}

/// Runs a scenario through worlds with these ends, then through further worlds to its end.
fn survives(scenario: &'static Scenario, worlds: &[u32], ends: &[End]) {
    for seed in 0..3 {
        let mut run = Run::new(scenario, seed);
        for (attempt, world) in worlds.iter().enumerate() {
            // Slightly later there is nothing left to kill.
            if run.stands() < scenario.steps() {
                run.live(
                    *world,
                    ends[attempt % ends.len()],
                    1.0 / (worlds.len() - attempt + 1) as f64,
                );
            }
        }
        run.live(worlds[seed as usize], End::ByItself, 0.0);
        run.check();
        let attempts: Vec<String> = run
            .attempts
            .iter()
            .map(|(world, from)| format!("{world} from {from}"))
            .collect();
        eprintln!(
            "{}: worlds of {}; {} killed",
            scenario.name,
            attempts.join(", "),
            run.killed
        );
    }
}

#[test]
fn worlds_killed_at_once_leave_an_exact_union() {
    survives(&SHUFFLED, &[8, 3, 1, 5, 2, 7, 4, 6], &[End::KillAll]);
}

#[test]
fn worlds_that_lose_one_rank_leave_an_exact_union() {
    survives(
        &SHUFFLED,
        &[4, 8, 2, 3, 6, 5, 1, 7],
        &[End::KillOneThenTheOthers],
    );
}

#[test]
fn lanes_of_a_chunked_dataset_go_on_with_any_number_of_ranks() {
    survives(
        &WINDOWED,
        &[8, 4, 2, 1, 3, 8, 2],
        &[End::KillAll, End::KillOneThenTheOthers],
    );
}

#[test]
fn kills_around_the_end_of_epochs_leave_an_exact_union() {
    survives(
        &SEQUENTIAL,
        &[2, 1, 3, 2, 4, 5, 2],
        &[End::KillOneThenTheOthers, End::KillAll],
    );
}

#[test]
fn padding_rows_are_no_samples_before_and_after_a_kill() {
    survives(
        &FILLED,
        &[2, 4, 3, 1, 8, 5],
        &[End::KillAll, End::KillOneThenTheOthers],
    );
}

#[test]
fn sigterm_stops_all_ranks_after_the_same_step() {
    survives(
        &SHUFFLED,
        &[4, 2, 8, 1, 3, 5],
        &[End::TermOne, End::TermAll],
    );
    survives(
        &WINDOWED,
        &[3, 8, 2, 4],
        &[End::TermAll, End::KillAll, End::TermOne],
    );
}

#[test]
fn ranks_of_any_world_save_the_same_state() {
    let mut seen = None;
    for world in 1..=8 {
        let run = Run::new(&SHUFFLED, 0);
        halt(&run, &vec![14; world as usize]);
        let states = run.left(0, world);
        State::agree(&states).unwrap();
        for rank in 0..world {
            let bytes = std::fs::read(run.task(0).left(rank)).unwrap();
            assert_eq!(
                *seen.get_or_insert_with(|| bytes.clone()),
                bytes,
                "rank {rank} of {world}"
            );
        }
    }
    assert_eq!(State::from_bytes(&seen.unwrap()).unwrap().steps(), 14);
}

#[test]
fn ranks_that_stopped_at_other_steps_are_named() {
    let run = Run::new(&SHUFFLED, 0);
    halt(&run, &[7, 7, 7, 6, 7, 6, 9]);
    let error = State::agree(&run.left(0, 7)).unwrap_err();
    let expected =
        "ranks 3, 5 are at step 6, the others at 7; rank 6 is at step 9, the others at 7";
    assert_eq!(
        (error.kind(), error.message()),
        (ErrorKind::State, expected)
    );
}

/// A world whose ranks do not wait for each other: rank *i* leaves after `steps[i]`.
fn halt(run: &Run, steps: &[u64]) {
    let mut ranks: Vec<Process> = steps
        .iter()
        .enumerate()
        .map(|(rank, step)| {
            let task = Task {
                halt: Some(*step),
                ..run.task(0)
            };
            Process::start(&task, rank as u32, steps.len() as u32)
        })
        .collect();
    ranks
        .iter_mut()
        .for_each(|rank| assert_eq!(rank.end().code(), Some(LEFT)));
}

/// Phases in which kills have hit a process.
#[derive(Debug, Default)]
struct Met {
    start_up: u32,
    /// A temporary file was left.
    saving: u32,
    between: u32,
    over: u32,
}

#[test]
fn a_process_killed_anywhere_loses_and_doubles_nothing() {
    let kills: u32 = sweep::size(50, 1000, 1000);
    let begin = Instant::now();
    let mut met = Met::default();
    let mut runs = 0;
    let mut done = 0;
    let mut longest = 20_000.0_f64;
    while done < kills {
        let mut run = Run::new(&ALONE, runs);
        while run.stands() < ALONE.steps() {
            let attempt = run.attempts.len();
            let from = run.stands();
            let task = Task {
                every: 1 + attempt as u64 % 3,
                ..run.task(attempt)
            };
            run.attempts.push((1, from));
            let mut process = Process::start(&task, 0, 1);
            std::thread::sleep(Duration::from_micros(run.draws.below(longest as u64)));
            process.send(Number::KILL);
            let status = process.end();
            assert!(
                status.success() || End::KillAll.explains(status),
                "{status}"
            );
            done += u32::from(!status.success());
            met.count(&run, status);
            // Half of the kills must hit start-up, however fast the machine is.
            longest *= if run.log(attempt, 0).is_empty() {
                1.05
            } else {
                0.95
            };
            longest = longest.min(2e6);
            assert!(attempt < 200, "stands at step {from}");
        }
        run.check();
        runs += 1;
    }
    eprintln!(
        "{done} kills in {runs} runs, {:.1} s, up to {longest:.0} µs after the start: {met:?}",
        begin.elapsed().as_secs_f64()
    );
    assert!(
        kills < 100
            || [met.start_up, met.saving, met.between]
                .iter()
                .all(|times| *times > 0),
        "{met:?}"
    );
}

impl Met {
    fn count(&mut self, run: &Run, status: ExitStatus) {
        let left = std::fs::read_dir(run.dir.path(""))
            .unwrap()
            .flatten()
            .filter(|entry| {
                entry
                    .path()
                    .extension()
                    .is_some_and(|ending| ending == "tmp")
            });
        let saving = left
            .map(|entry| std::fs::remove_file(entry.path()).unwrap())
            .count()
            > 0;
        let place = match () {
            () if status.success() => &mut self.over,
            () if saving => &mut self.saving,
            () if run.log(run.attempts.len() - 1, 0).is_empty() => &mut self.start_up,
            () => &mut self.between,
        };
        *place += 1;
    }
}
