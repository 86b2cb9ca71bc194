//! A training run on several ranks that is killed and resumed with another number of ranks, again
//! and again. It proves by hash that the ranks together received every sample exactly once per
//! epoch, in the order of an uninterrupted run.
//!
//! ```text
//! cargo run --release --example resume                                       # some seconds
//! cargo run --release --example resume -- --worlds 8,3,5 --kills 9-one,term --epochs 5
//! cargo run --release --example resume -- --data train.bin --record 150528   # your own records
//! ```
//!
//! One binary has two roles. The *supervisor* is launcher, network and judge. It starts itself
//! again for every *rank*, with the variables that torchrun sets:
//!
//! ```text
//! rank r:  loader ─► batch ─► train ─► log: step, ids, hashes ─► all-reduce(stop?) ─► rank 0: state.save, every k steps
//!                                       one write(2) per step     │        ▲
//! supervisor:   SIGKILL, SIGTERM  ──►   reads the logs            └─ or ───┘ over all ranks, by a socket pair per rank
//! ```
//!
//! A launcher can take the supervisor's place: torchrun, srun, mpirun, an Indexed Job
//! (`examples/jobs/`). It starts `--join DIR` as every rank, in a folder that all ranks share. Rank
//! 0 is then the network, too. `--check DIR` is the judge:
//!
//! ```text
//! srun resume --join /shared/run        # again, with any number of ranks, until the exit code is 0
//! resume --check /shared/run
//! ```
//!
//! Four rules make it exact. A real training script has to follow them, too:
//!
//! - **Save a state after a step that all ranks have finished.** Here the all-reduce of the stop
//!   flag ensures that (a byte to the supervisor and back). In a real script any collective
//!   operation of the step does. Weights belong to the same step: save them together with the
//!   state.
//! - **Ranks agree on the step at which they stop.** SIGTERM may reach one rank, or all ranks at
//!   different steps. Every step reduces the flag, so all ranks see it after the same step, save,
//!   and exit with code 75.
//! - **No rank exits before the state is saved.** A launcher kills the other ranks as soon as one
//!   has failed, and 75 counts as failed. So a last all-reduce follows the save.
//! - **The batch size counts all ranks** (`.global_batch(n)`). So another world size has the same
//!   batches, and each rank another part of them.
//!
//! Each rank logs the samples that it received. A killed run has finished steps after the last
//! saved state. The next attempt repeats those steps: their log entries do not count, but must be
//! equal. The counted entries of all ranks and attempts are compared with `loader.preview` and the
//! bytes of the file.

#[path = "throughput/names.rs"]
mod names;

use clap::{Parser, ValueEnum};
use feedline::dataset::{Dataset, Records};
use feedline::order::Draws;
use feedline::process::Signal;
use feedline::{Batch, ErrorKind, Loader, LoaderBuilder, Order, Rank, State, Stop};
use rustix::process::{Pid, Signal as Number, kill_process, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::io::{BufWriter, Read, Write, stdin};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Prints a line, and ignores a closed pipe.
macro_rules! say {
    ($($text:tt)*) => {
        let _ = writeln!(std::io::stdout(), $($text)*);
    };
}

/// Kills a training run on several ranks again and again, resumes it with another number of ranks,
/// and checks that no sample was lost or doubled.
///
/// Exit code: 0 if the samples are exact, 1 for a difference or an error, 130 when interrupted.
/// With --join: 0 at the end of the run, 75 if a signal stopped it and the state is saved.
#[derive(Parser)]
#[command(version, args_override_self = true)]
struct Args {
    /// Ranks of each attempt; the list repeats if there are more kills
    #[arg(long, value_delimiter = ',', default_value = "4,2,1,3", value_parser = clap::value_parser!(u32).range(1..=64))]
    worlds: Vec<u32>,
    /// End of each attempt except the last; the list repeats if there are more worlds
    #[arg(
        long,
        value_delimiter = ',',
        value_enum,
        default_value = "9-one,term,9"
    )]
    kills: Vec<End>,
    /// Number of epochs
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    epochs: u64,
    /// Samples per step of all ranks together
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..))]
    global_batch: u64,
    /// Steps between saved states
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    save_every: u64,
    /// Milliseconds of a training step, besides its arithmetic
    #[arg(long, default_value_t = 2)]
    step_ms: u64,
    /// File of records [default: random bytes, generated for the run]
    #[arg(long, requires = "record", conflicts_with = "samples")]
    data: Option<PathBuf>,
    /// Bytes per record; required with --data [default: 1024]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    record: Option<u32>,
    /// Records to generate
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    samples: u64,
    /// Seed of the order, the generated data and the times of kills
    /// [default: a new one for each run]
    #[arg(long)]
    seed: Option<u64>,
    /// Keep the folder with data, logs and saved state
    #[arg(long)]
    keep: bool,
    /// Be a rank that a launcher started, of the run in this folder, which all ranks share; exit
    /// code 75: start it again
    #[arg(long, value_name = "DIR", conflicts_with_all = ["worlds", "kills", "keep"])]
    join: Option<PathBuf>,
    /// Compare the samples of the finished run in this folder, whose ranks were started with --join
    #[arg(long, value_name = "DIR", conflicts_with_all = ["join", "worlds", "kills", "keep"])]
    check: Option<PathBuf>,
    /// Seconds that a rank started with --join waits for the others
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    wait: u64,
    /// Run as a rank of the run in this folder
    #[arg(long, hide = true)]
    rank_in: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum End {
    /// SIGKILL to all ranks at once
    #[value(name = "9")]
    KillAll,
    /// SIGKILL to one rank; the supervisor then kills the others, as launchers do
    #[value(name = "9-one")]
    KillOne,
    /// SIGTERM to all ranks: they save and exit
    #[value(name = "term")]
    TermAll,
    /// SIGTERM to one rank: all ranks save and exit
    #[value(name = "term-one")]
    TermOne,
}

type Anyhow<T> = Result<T, Box<dyn Error>>;

/// Exit code of a rank that saved its state and stopped on request (`EX_TEMPFAIL`: try again).
const SAVED: u8 = 75;
const INTERRUPTED: u8 = 130;
/// Torchrun's variable with the number of the attempt.
const RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";
/// Name of the saved state in the run's folder.
const STATE: &str = "state.json";

fn main() -> ExitCode {
    feedline::setting::speak(names::name);
    let args = Args::parse();
    let result = match (&args.rank_in, &args.join, &args.check) {
        (Some(folder), ..) => run_rank(&args, folder),
        (_, Some(folder), _) => join(&args, folder),
        (_, _, Some(folder)) => check(&args, folder),
        _ => supervise(args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// Settings of the run, for both roles.
impl Args {
    fn seed(&self) -> u64 {
        self.seed.unwrap_or_default()
    }

    fn record_bytes(&self) -> usize {
        self.record.unwrap_or(1024) as usize
    }

    fn data_in(&self, folder: &Path) -> PathBuf {
        self.data.clone().unwrap_or_else(|| folder.join("data.bin"))
    }

    fn loader_in(&self, folder: &Path) -> Anyhow<LoaderBuilder> {
        let records = Records::builder(self.record_bytes()).open(self.data_in(folder))?;
        Ok(Loader::builder(records)
            .order(Order::shuffled(self.seed()))
            .global_batch(self.global_batch))
    }
}

fn log_of(folder: &Path, attempt: usize, rank: u32) -> PathBuf {
    folder.join(format!("attempt-{attempt}-rank-{rank}.log"))
}

/// The saved state to resume from, if any.
fn saved_in(folder: &Path) -> Anyhow<Option<State>> {
    match State::load(folder.join(STATE)) {
        Ok(state) => Ok(Some(state)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Steps of the saved state.
fn steps_saved(folder: &Path) -> Anyhow<u64> {
    Ok(saved_in(folder)?.map_or(0, |state| state.steps()))
}

// A rank.

fn run_rank(args: &Args, folder: &Path) -> Anyhow<ExitCode> {
    // The ranks must not outlive the supervisor.
    set_parent_process_death_signal(Some(Number::KILL))?;
    let peers = Peers(File::from(stdin().as_fd().try_clone_to_owned()?));
    let attempt = std::env::var(RESTARTS)?.parse()?;
    train_all(
        args,
        folder,
        Rank::from_env()?,
        Stop::on_signals()?,
        peers,
        attempt,
    )
}

/// Trains up to the last step, or to a signal. `Peers` is closed at the end.
fn train_all(
    args: &Args,
    folder: &Path,
    rank: Rank,
    stop: Stop,
    mut peers: Peers,
    attempt: usize,
) -> Anyhow<ExitCode> {
    let first = rank.number() == 0;
    let mut builder = args.loader_in(folder)?.rank(rank).stop(stop).workers(1);
    if let Some(state) = saved_in(folder)? {
        builder = builder.resume(state);
    }
    let loader = builder.build()?;
    let mut log = File::options().append(true).create_new(true).open(log_of(
        folder,
        attempt,
        rank.number(),
    ))?;
    let mut weights = vec![0.0_f32; args.record_bytes()];
    for batch in loader.epochs(loader.next_epoch()..args.epochs)? {
        let batch = batch?;
        train(&mut weights, &batch, args.step_ms)?;
        let step = loader.state()?.steps();
        let line = serde_json::to_string(&Entry::of(&batch, step)?)? + "\n";
        log.write_all(line.as_bytes())?;
        let stopping = peers.any(loader.stop_requested())?;
        if first && (stopping || step.is_multiple_of(args.save_every)) {
            // All ranks have finished the step.
            loader.state()?.save(folder.join(STATE))?;
        }
        if stopping {
            // A launcher kills rank 0 in its save when another rank has failed, and 75 is a failure
            // to it.
            peers.any(true)?;
            return Ok(SAVED.into());
        }
    }
    if first {
        loader.state()?.save(folder.join(STATE))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A toy model: moves the weights towards the mean of the samples.
fn train(weights: &mut [f32], batch: &Batch, step_ms: u64) -> Anyhow<()> {
    let records = batch.field("record")?;
    for row in 0..batch.valid() {
        let bytes = records.row::<u8>(row)?;
        weights
            .iter_mut()
            .zip(bytes)
            .for_each(|(weight, byte)| *weight += 0.01 * (f32::from(*byte) - *weight));
    }
    black_box(weights);
    thread::sleep(Duration::from_millis(step_ms));
    Ok(())
}

/// Connection to the other ranks: a socket whose other end reduces. The supervisor's is the
/// standard input.
struct Peers(File);

impl Peers {
    /// Whether any rank's flag is set. Returns the same value on all ranks, after all have called
    /// it.
    fn any(&mut self, flag: bool) -> Anyhow<bool> {
        let mut answer = [0];
        let reduced = self
            .0
            .write_all(&[flag.into()])
            .and_then(|()| self.0.read_exact(&mut answer));
        reduced.map_err(|error| format!("another rank or the supervisor has ended: {error}"))?;
        Ok(answer != [0])
    }
}

// A rank that a launcher started.

/// Name of the file with the address of rank 0.
const ADDRESS: &str = "rank-0";

fn join(args: &Args, folder: &Path) -> Anyhow<ExitCode> {
    // From here on a signal is a request. Before, it ends the process.
    let stop = Stop::on_signals()?;
    let rank = Rank::from_env()?;
    std::fs::create_dir_all(folder)
        .map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    let until = Instant::now() + Duration::from_secs(args.wait);
    let met = match rank.number() {
        0 => {
            if args.data.is_none() && !args.data_in(folder).exists() {
                make_records(&folder.join("new"), args)?;
                std::fs::rename(folder.join("new"), args.data_in(folder))?;
            }
            meet(folder, rank.world(), &stop, until)?
        }
        _ => find(folder, rank, &stop, until)?,
    };
    let Some((peers, attempt, hub)) = met else {
        return Ok(SAVED.into());
    };
    let from = steps_saved(folder)?;
    say!("attempt {}: {rank}, from step {from}", attempt + 1);
    let end = train_all(args, folder, rank, stop, peers, attempt);
    // Other ranks may still wait for the last answer.
    drop(hub.map(JoinHandle::join));
    end
}

/// The file of an attempt: ranks, step of the state that it started from.
fn start_of(folder: &Path, attempt: usize) -> PathBuf {
    folder.join(format!("attempt-{attempt}.txt"))
}

/// The other ranks, the number of the attempt and, on rank 0, the thread that reduces for all;
/// `None` after a signal.
type Met = Option<(Peers, usize, Option<JoinHandle<()>>)>;

/// Rank 0: publishes an address, waits for the other ranks, and numbers the attempt.
fn meet(folder: &Path, world: u32, stop: &Stop, until: Instant) -> Anyhow<Met> {
    let listener = TcpListener::bind(("0.0.0.0", 0))?;
    listener.set_nonblocking(true)?;
    // An address of an earlier attempt may lead anywhere. The key shows whether it leads here.
    let key = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)?
        .as_nanos() as u64;
    let host = std::env::var("MASTER_ADDR")
        .or_else(|_| std::fs::read_to_string("/proc/sys/kernel/hostname"))?;
    let address = format!("{}:{} {key}", host.trim(), listener.local_addr()?.port());
    std::fs::write(folder.join("new"), address)?;
    std::fs::rename(folder.join("new"), folder.join(ADDRESS))?;
    let mut ranks: Vec<Option<TcpStream>> = (1..world).map(|_| None).collect();
    while ranks.iter().any(Option::is_none) {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(Duration::from_secs(5)))?;
                let Ok([its_key, rank, its_world]) = receive(&stream) else {
                    continue;
                };
                if its_key != key || rank == 0 || rank >= its_world {
                    continue;
                }
                if its_world != u64::from(world) {
                    return Err(format!(
                        "rank {rank} counts {its_world} ranks, rank 0 counts {world}"
                    )
                    .into());
                }
                // A rank that was started again replaces the one that ended.
                ranks[rank as usize - 1] = Some(stream);
            }
            Err(_) if stop.requested() => return Ok(None),
            Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
            Err(_) => {
                let missing = ranks.iter().zip(1..).filter(|(stream, _)| stream.is_none());
                let missing: Vec<_> = missing.map(|(_, rank)| rank.to_string()).collect();
                return Err(format!(
                    "of {world} ranks these did not come in time: {}",
                    missing.join(", ")
                )
                .into());
            }
        }
    }
    let attempt = (0..)
        .take_while(|number| start_of(folder, *number).exists())
        .count();
    let from = steps_saved(folder)?;
    std::fs::write(start_of(folder, attempt), format!("{world} {from}"))?;
    let (own, theirs) = UnixStream::pair()?;
    let mut sockets = vec![File::from(OwnedFd::from(theirs))];
    for stream in ranks.into_iter().flatten() {
        stream.set_read_timeout(None)?;
        stream.set_nodelay(true)?;
        let mut socket = File::from(OwnedFd::from(stream));
        // A rank that has ended meanwhile fails the first all-reduce.
        let _ = socket.write_all(&[key, attempt as u64].map(u64::to_le_bytes).concat());
        sockets.push(socket);
    }
    let hub = thread::spawn(move || all_reduce(&sockets, &AtomicU64::new(0)));
    Ok(Some((
        Peers(File::from(OwnedFd::from(own))),
        attempt,
        Some(hub),
    )))
}

/// Another rank: connects to rank 0, which may not yet have published its address.
fn find(folder: &Path, rank: Rank, stop: &Stop, until: Instant) -> Anyhow<Met> {
    let try_once = || -> Anyhow<Met> {
        let text = std::fs::read_to_string(folder.join(ADDRESS))?;
        let (address, key) = text.split_once(' ').ok_or("an address without a key")?;
        let key = key.parse()?;
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let hello = [key, u64::from(rank.number()), u64::from(rank.world())];
        stream.write_all(&hello.map(u64::to_le_bytes).concat())?;
        stream.set_read_timeout(Some(
            until
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1)),
        ))?;
        let [its_key, attempt] = receive(&stream)?;
        stream.set_read_timeout(None)?;
        match its_key == key {
            true => Ok(Some((
                Peers(File::from(OwnedFd::from(stream))),
                attempt as usize,
                None,
            ))),
            false => Err("another process answered".into()),
        }
    };
    loop {
        match try_once() {
            Err(_) if stop.requested() => return Ok(None),
            Err(_) if Instant::now() < until => thread::sleep(Duration::from_millis(50)),
            Err(error) => {
                return Err(format!(
                    "{rank}: rank 0 was not found in time by {}: {error}",
                    folder.display()
                )
                .into());
            }
            found => return found,
        }
    }
}

fn receive<const N: usize>(mut stream: &TcpStream) -> std::io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}

/// The judge of ranks that a launcher started.
fn check(args: &Args, folder: &Path) -> Anyhow<ExitCode> {
    let expected = expected(args, folder)?;
    let mut attempts: Vec<Attempt> = Vec::new();
    for number in (0..).take_while(|number| start_of(folder, *number).exists()) {
        let text = std::fs::read_to_string(start_of(folder, number))?;
        let (world, from) = text
            .split_once(' ')
            .ok_or_else(|| format!("attempt {}: {text:?}", number + 1))?;
        let from = from.parse()?;
        if let Some(last) = attempts.last_mut() {
            last.kept = from;
        }
        attempts.push(Attempt {
            world: world.parse()?,
            from,
            kept: 0,
        });
    }
    let kept = steps_saved(folder)?;
    match attempts.last_mut() {
        Some(last) => last.kept = kept,
        None => {
            return Err(format!(
                "{} holds no attempt: start ranks with --join",
                folder.display()
            )
            .into());
        }
    }
    say!("attempt  ranks  from step  to step  done again");
    for (number, attempt) in attempts.iter().enumerate() {
        say!("{}", attempt.row(folder, number)?);
    }
    let found = union(args, folder, &attempts, &expected)?;
    if kept < expected.len() as u64 {
        return Err(format!(
            "not finished: step {kept} of {}; start the ranks again",
            expected.len()
        )
        .into());
    }
    judge(args, &expected, &found)
}

/// The samples of a step, of all ranks or of one, each with a hash of its bytes.
///
/// In a log it is one line of JSON.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    step: u64,
    epoch: u64,
    samples: Vec<(u64, u64)>,
}

impl Entry {
    fn of(batch: &Batch, step: u64) -> Anyhow<Self> {
        let records = batch.field("record")?;
        // Later rows only fill up the last batch of an epoch.
        let ids = batch.ids().iter().take(batch.valid()).enumerate();
        let samples = ids
            .map(|(row, id)| Ok((*id, xxh3_64(records.row::<u8>(row)?))))
            .collect::<Anyhow<_>>()?;
        Ok(Self {
            step,
            epoch: batch.epoch(),
            samples,
        })
    }

    /// The samples of one rank: consecutive ones. A smaller last batch has blank rows until it is
    /// divisible by the ranks.
    fn part(&self, rank: usize, world: usize, global_batch: usize) -> Self {
        let size = self.samples.len().next_multiple_of(world).min(global_batch);
        let each = size / world;
        let more = size % world;
        let start = rank * each + rank.min(more);
        let samples = self
            .samples
            .iter()
            .copied()
            .skip(start)
            .take(each + usize::from(rank < more))
            .collect();
        Self { samples, ..*self }
    }
}

// The supervisor.

fn supervise(mut args: Args) -> Anyhow<ExitCode> {
    let stop = Stop::on([Signal::Int, Signal::Term, Signal::Hup])?;
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let seed = *args.seed.get_or_insert(clock.as_nanos() as u64 % 1_000_000);
    let folder = Folder::new(args.keep)?;
    if args.data.is_none() {
        make_records(&args.data_in(&folder.0), &args)?;
    }
    let expected = expected(&args, &folder.0)?;
    let steps = expected.len() as u64;
    say!(
        "{} samples in {} epochs, {steps} steps of {}, seed {seed}",
        samples(&expected),
        args.epochs,
        args.global_batch
    );
    say!("attempt  ranks  from step  to step  done again  ended by");
    let mut run = Run {
        args,
        folder: &folder.0,
        stop,
        steps,
        draws: Draws::new(seed, 0, 0, "kills"),
        attempts: Vec::new(),
    };
    while !run.attempt()? {
        if run.stop.requested() {
            eprintln!("interrupted: all ranks were killed");
            return Ok(INTERRUPTED.into());
        }
    }
    let found = union(&run.args, run.folder, &run.attempts, &expected)?;
    judge(&run.args, &expected, &found)
}

fn judge(args: &Args, expected: &[Entry], found: &[Entry]) -> Anyhow<ExitCode> {
    if let Some(difference) = difference(expected, found) {
        return Err(format!("not exact: {difference}").into());
    }
    say!(
        "exact: {} samples in {} epochs, hash {:016x}",
        samples(found),
        args.epochs,
        hash(found)
    );
    Ok(ExitCode::SUCCESS)
}

/// Folder of the run, removed at the end unless it is kept.
struct Folder(PathBuf, bool);

impl Folder {
    fn new(keep: bool) -> Anyhow<Self> {
        let path = std::env::temp_dir().join(format!("feedline-resume-{}", std::process::id()));
        std::fs::create_dir(&path)
            .map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Ok(Self(path, keep))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        match self.1 {
            true => eprintln!("kept: {}", self.0.display()),
            false => drop(std::fs::remove_dir_all(&self.0)),
        }
    }
}

fn make_records(path: &Path, args: &Args) -> Anyhow<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut record = vec![0; args.record_bytes()];
    for id in 0..args.samples {
        let mut draws = Draws::new(args.seed(), 0, id, "data");
        record
            .chunks_mut(8)
            .for_each(|word| word.copy_from_slice(&draws.next_u64().to_le_bytes()[..word.len()]));
        file.write_all(&record)?;
    }
    file.into_inner()?;
    Ok(())
}

/// The samples of an uninterrupted run: the loader's order, and the bytes of the file.
fn expected(args: &Args, folder: &Path) -> Anyhow<Vec<Entry>> {
    let world = args.worlds.iter().copied().max().unwrap_or(1);
    // A rank of the largest world, so that an illegal world size is an error at once.
    let loader = args
        .loader_in(folder)?
        .rank(Rank::new(0, world)?)
        .workers(1)
        .build()?;
    let file = File::open(args.data_in(folder))?;
    let mut record = vec![0; args.record_bytes()];
    let samples = Records::builder(record.len())
        .open(args.data_in(folder))?
        .len();
    let mut hashes = Vec::new();
    for id in 0..samples {
        let offset = id * record.len() as u64;
        file.read_exact_at(&mut record, offset)?;
        hashes.push(xxh3_64(&record));
    }
    let mut steps = Vec::new();
    for epoch in 0..args.epochs {
        let ids = loader.preview(epoch, loader.samples_per_epoch())?;
        for ids in ids.chunks(usize::try_from(args.global_batch)?) {
            let samples = ids.iter().map(|id| (*id, hashes[*id as usize])).collect();
            steps.push(Entry {
                step: steps.len() as u64 + 1,
                epoch,
                samples,
            });
        }
    }
    Ok(steps)
}

fn samples(steps: &[Entry]) -> usize {
    steps.iter().map(|entry| entry.samples.len()).sum()
}

/// Hash of all samples in their order.
fn hash(steps: &[Entry]) -> u64 {
    let mut hash = Xxh3::new();
    for Entry { epoch, samples, .. } in steps {
        for (id, bytes) in samples {
            [*epoch, *id, *bytes]
                .iter()
                .for_each(|number| hash.update(&number.to_le_bytes()));
        }
    }
    hash.digest()
}

/// Text of the first difference.
fn difference(expected: &[Entry], found: &[Entry]) -> Option<String> {
    if hash(expected) == hash(found) && expected == found {
        return None;
    }
    let Some((expected, found)) = expected
        .iter()
        .zip(found)
        .find(|(expected, found)| expected != found)
    else {
        return Some(format!("{} steps, not {}", found.len(), expected.len()));
    };
    let at = expected
        .samples
        .iter()
        .zip(&found.samples)
        .take_while(|(a, b)| a == b)
        .count();
    let show = |entry: &Entry| {
        entry
            .samples
            .get(at)
            .map_or("nothing".into(), |(id, hash)| format!("{id}:{hash:016x}"))
    };
    let is = show(found);
    let should = show(expected);
    Some(format!(
        "step {}, epoch {}, sample {at} of the batch: {is}, not {should}",
        expected.step, expected.epoch
    ))
}

struct Run<'a> {
    args: Args,
    folder: &'a Path,
    stop: Stop,
    /// Steps of the whole run.
    steps: u64,
    draws: Draws,
    attempts: Vec<Attempt>,
}

/// End of an attempt: its kind, and its time as steps and a delay.
struct Kill {
    end: End,
    steps: u64,
    delay: Duration,
}

/// An attempt that has ended.
struct Attempt {
    world: u32,
    /// Step of the state that it started from.
    from: u64,
    /// Step of the state that the next attempt starts from. Steps up to here count.
    kept: u64,
}

impl Run<'_> {
    /// Runs an attempt, and prints its steps. Returns whether the run is over.
    fn attempt(&mut self) -> Anyhow<bool> {
        let number = self.attempts.len();
        let from = self.attempts.last().map_or(0, |last| last.kept);
        let world = self.args.worlds[number % self.args.worlds.len()];
        let kill = self.kill(number, from);
        let mut ranks = World::start(self.folder, number, world, self.args.seed())?;
        let Some((ended_by, over)) = ranks.live(kill, &self.stop, &mut self.draws)? else {
            return Ok(false);
        };
        let kept = steps_saved(self.folder)?;
        self.attempts.push(Attempt { world, from, kept });
        say!(
            "{}  {ended_by}",
            self.attempts[number].row(self.folder, number)?
        );
        Ok(over || kept == self.steps)
    }

    /// The end of this attempt; `None` for the last one.
    fn kill(&mut self, number: usize, from: u64) -> Option<Kill> {
        let Args {
            worlds,
            kills,
            step_ms,
            ..
        } = &self.args;
        let left = worlds.len().max(kills.len() + 1) - number - 1;
        if left == 0 {
            return None;
        }
        let end = kills[number % kills.len()];
        // On average each attempt gets the same part. SIGTERM needs ranks that have installed their
        // handler.
        let least = u64::from(matches!(end, End::TermAll | End::TermOne));
        let steps = self
            .draws
            .below(2 * self.steps.saturating_sub(from) / (left as u64 + 1) + 1)
            .max(least);
        // Without a step, the kill falls into the start of the ranks.
        let most = if steps == 0 {
            50_000
        } else {
            1000 * step_ms.saturating_add(1).min(10_000)
        };
        Some(Kill {
            end,
            steps,
            delay: Duration::from_micros(self.draws.below(most)),
        })
    }
}

impl Attempt {
    /// Its row of the table.
    fn row(&self, folder: &Path, number: usize) -> Anyhow<String> {
        let Self { world, from, kept } = self;
        if kept < from {
            return Err(format!(
                "not exact: the state of step {from} was followed by one of step {kept}"
            )
            .into());
        }
        let logs = (0..*world)
            .map(|rank| entries(folder, number, rank))
            .collect::<Anyhow<Vec<_>>>()?;
        let to = logs
            .iter()
            .flatten()
            .map(|entry| entry.step)
            .max()
            .unwrap_or(*from);
        Ok(format!(
            "{:>7}  {world:>5}  {from:>9}  {to:>7}  {:>10}",
            number + 1,
            to.saturating_sub(*kept)
        ))
    }
}

/// The entries of a log, without a last line that a kill cut.
fn entries(folder: &Path, attempt: usize, rank: u32) -> Anyhow<Vec<Entry>> {
    let path = log_of(folder, attempt, rank);
    if !path.exists() {
        return Ok(Vec::new()); // killed before it created the log
    }
    let text = std::fs::read_to_string(&path)?;
    let lines = text
        .split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n'));
    lines
        .map(|line| {
            serde_json::from_str(line)
                .map_err(|error| format!("{}: {line:?}: {error}", path.display()).into())
        })
        .collect()
}

/// The counted samples of all ranks and attempts, joined step by step.
fn union(
    args: &Args,
    folder: &Path,
    attempts: &[Attempt],
    expected: &[Entry],
) -> Anyhow<Vec<Entry>> {
    let mut union: Vec<Entry> = Vec::new();
    for (number, Attempt { world, from, kept }) in attempts.iter().enumerate() {
        let mut logs = Vec::new();
        for rank in 0..*world {
            let log = entries(folder, number, rank)?;
            let of_rank = format!("not exact: attempt {}, rank {rank}", number + 1);
            let last = from + log.len() as u64;
            if !log.iter().map(|entry| entry.step).eq(from + 1..=last) || last < *kept {
                let count = log.len();
                let first = log.first().map_or(0, |entry| entry.step);
                return Err(format!(
                    "{of_rank}: {count} steps from {first} on, not {} to {kept}",
                    from + 1
                )
                .into());
            }
            for entry in log.iter().skip_while(|entry| entry.step <= *kept) {
                let again = expected.get(entry.step as usize - 1).map(|all| {
                    all.part(rank as usize, *world as usize, args.global_batch as usize)
                });
                if again.as_ref() != Some(entry) {
                    return Err(format!(
                        "{of_rank}: step {} was repeated with other samples",
                        entry.step
                    )
                    .into());
                }
            }
            logs.push(log);
        }
        union.extend(
            (0..(kept - from) as usize).map(|step| together(logs.iter().map(|log| &log[step]))),
        );
    }
    Ok(union)
}

/// The samples of all ranks in the order of the epoch: those of a rank are consecutive.
fn together<'a>(ranks: impl Iterator<Item = &'a Entry>) -> Entry {
    let ranks: Vec<&Entry> = ranks.collect();
    let samples = ranks
        .iter()
        .flat_map(|entry| entry.samples.iter().copied())
        .collect();
    Entry {
        step: ranks[0].step,
        epoch: ranks[0].epoch,
        samples,
    }
}

/// The processes of an attempt. Dropping it kills them.
struct World {
    ranks: Vec<Child>,
    ended: Vec<Option<ExitStatus>>,
    /// Open until all ranks have ended, so that a rank whose peer died waits until it is killed.
    sockets: Arc<Vec<File>>,
    /// Completed all-reduces.
    rounds: Arc<AtomicU64>,
    hub: Option<JoinHandle<()>>,
}

impl World {
    fn start(folder: &Path, attempt: usize, world: u32, seed: u64) -> Anyhow<Self> {
        let ended = vec![None; world as usize];
        let sockets = Arc::default();
        let rounds = Arc::default();
        let mut started = Self {
            ranks: Vec::new(),
            ended,
            sockets,
            rounds,
            hub: None,
        };
        let mut sockets = Vec::new();
        for rank in 0..world {
            let (socket, theirs) = UnixStream::pair()?;
            let mut command = Command::new(std::env::current_exe()?);
            command
                .args(std::env::args_os().skip(1))
                .args(["--seed", &seed.to_string(), "--rank-in"])
                .arg(folder);
            let variables = [
                ("RANK", rank),
                ("WORLD_SIZE", world),
                ("LOCAL_RANK", rank),
                (RESTARTS, attempt as u32),
            ];
            command.envs(variables.map(|(name, value)| (name, value.to_string())));
            started.ranks.push(
                command
                    .stdin(OwnedFd::from(theirs))
                    .stdout(Stdio::null())
                    .spawn()?,
            );
            sockets.push(File::from(OwnedFd::from(socket)));
        }
        started.sockets = Arc::new(sockets);
        let sockets = started.sockets.clone();
        let rounds = started.rounds.clone();
        started.hub = Some(thread::spawn(move || all_reduce(&sockets, &rounds)));
        Ok(started)
    }

    /// Waits until all ranks have ended. Returns the cause, and whether the run is over; `None` if
    /// interrupted.
    fn live(
        &mut self,
        kill: Option<Kill>,
        stop: &Stop,
        draws: &mut Draws,
    ) -> Anyhow<Option<(String, bool)>> {
        let mut due = None;
        let mut how = None;
        let mut failed = None;
        while self.ended.contains(&None) {
            if stop.requested() {
                return Ok(None);
            }
            self.poll()?;
            // The others would wait for a failed rank, so a launcher kills them.
            if failed.is_none()
                && let Some(rank) = self
                    .ended
                    .iter()
                    .position(|ended| ended.is_some_and(is_failure))
            {
                failed = Some(rank);
                self.send(Number::KILL);
            }
            if let (Some(kill), None) = (&kill, &how)
                && self.rounds.load(Ordering::Acquire) >= kill.steps
                && *due.get_or_insert_with(|| Instant::now() + kill.delay) <= Instant::now()
            {
                how = Some(self.kill(kill.end, draws));
            }
            thread::sleep(Duration::from_millis(1));
        }
        let all =
            |good: fn(ExitStatus) -> bool| self.ended.iter().flatten().all(|status| good(*status));
        match (how, failed) {
            // A terminal's Ctrl-C reaches the ranks, too.
            _ if stop.requested() => Ok(None),
            _ if all(|status| status.success()) => Ok(Some(("its end".into(), true))),
            (Some(how), _)
                if all(has_saved) || all(|status| is_killed(status) || status.success()) =>
            {
                Ok(Some((how, false)))
            }
            (_, Some(rank)) => Err(format!(
                "rank {rank} failed: {}",
                self.ended[rank].unwrap_or_default()
            )
            .into()),
            (_, None) => Err("some ranks saved and stopped, others finished".into()),
        }
    }

    /// Records the ranks that have ended.
    fn poll(&mut self) -> Anyhow<()> {
        for (rank, ended) in self.ranks.iter_mut().zip(&mut self.ended) {
            if ended.is_none() {
                *ended = rank.try_wait()?;
            }
        }
        Ok(())
    }

    fn kill(&mut self, kill: End, draws: &mut Draws) -> String {
        let one = draws.below(self.ranks.len() as u64) as usize;
        let (signal, name) = match kill {
            End::KillAll | End::KillOne => (Number::KILL, "SIGKILL"),
            End::TermAll | End::TermOne => (Number::TERM, "SIGTERM"),
        };
        match kill {
            End::KillAll | End::TermAll => {
                self.send(signal);
                format!("{name} to all")
            }
            End::KillOne | End::TermOne => {
                self.send_to(one, signal);
                format!("{name} to rank {one}")
            }
        }
    }

    fn send(&mut self, signal: Number) {
        (0..self.ranks.len()).for_each(|rank| self.send_to(rank, signal));
    }

    /// Signals a rank unless its end is recorded: then its pid may belong to another process.
    fn send_to(&mut self, rank: usize, signal: Number) {
        if self.ended[rank].is_none() {
            let _ = kill_process(Pid::from_child(&self.ranks[rank]), signal);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
        if let Some(hub) = self.hub.take() {
            let _ = hub.join();
        }
    }
}

fn has_saved(status: ExitStatus) -> bool {
    status.code() == Some(SAVED.into())
}

fn is_killed(status: ExitStatus) -> bool {
    status.signal() == Some(Number::KILL.as_raw())
}

fn is_failure(status: ExitStatus) -> bool {
    !status.success() && !has_saved(status)
}

/// Reduces a byte of every rank to whether any is not 0, and sends it to all, until a rank ends.
fn all_reduce(sockets: &[File], rounds: &AtomicU64) {
    loop {
        let mut any = [0];
        for mut socket in sockets {
            let mut flag = [0];
            if socket.read_exact(&mut flag).is_err() {
                return;
            }
            any[0] |= flag[0];
        }
        // A rank that has ended fails the next round.
        sockets
            .iter()
            .for_each(|mut socket| drop(socket.write_all(&any)));
        rounds.fetch_add(1, Ordering::Release);
    }
}
