//! The limit of a loop, by what was measured. Pure.
//!
//! ```text
//! fewer than 8 batches? ──yes──► unknown
//! epochs take longer to start than the loop waits in them? ──yes──► worker start
//! waits below 5 % of the time (on a GPU, its idle time below 2 %)? ──yes──► not starved
//! a quota withheld cores? ──yes──► quota
//! worker processes?
//!   no:  what does the loop's thread do while it waits? it computes, reads, waits at a socket, for other threads
//!   yes: one always busy, the others not? ──► the slow worker
//!        all mostly without a task? ──► hand-over: the interpreter's lock, pickles, batches that are small
//!        else what do they do?  reads, sockets, locks ──► that
//!                               compute ──► no core for them: whose? idle cores: more workers; else the transform
//! ```

use crate::advice::{self, Advice};
use crate::observation::{LoaderKind, Observation, Places, Worker};
use feedline_report::{Strength, Unit};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Below this share of the time, waits are no starvation.
const FED: f64 = 0.05;
/// The same for a GPU's idle time.
const GPU_FED: f64 = 0.02;
const BATCHES_LEAST: u64 = 8;
const STEADY_LEAST_NS: u64 = 500_000_000;
/// Slow batches that are enough, in a time that is long.
const SLOW_BATCHES: u64 = 3;
const SLOW_NS: u64 = 2_000_000_000;
/// Samples of a worker's places that make a verdict more than a guess.
const LOOKS_LEAST: u64 = 15;
/// Starts of epochs limit from this share of the time on.
const STARTS: f64 = 0.15;
/// Shares that decide.
const HALF: f64 = 0.5;
/// A quota counts from this share of withheld time on.
const THROTTLED: f64 = 0.08;
/// A worker counts as slow if it always has a task, and no other one has for more than this share
/// of its time.
const ALWAYS: f64 = 0.85;
const OTHERS_IDLE: f64 = 0.7;
/// Workers lack cores if they were ready without one for this share of their CPU time and delay.
const DELAYED: f64 = 0.2;
/// Idle cores that a further worker could use.
const IDLE_CORES: f64 = 0.6;
/// Bytes of a batch that make its pickle a cost.
const LARGE_PICKLE: f64 = 200_000.0;
/// A batch that comes this fast costs mostly what every batch costs.
const SHORT_NS: f64 = 4e6;
/// Cores of other threads that can hold the interpreter's lock, and of other programs that matter.
const BUSY_THREADS: f64 = 0.3;
const CROWDED: f64 = 0.5;
/// Waits are uneven if the longest tenth has this share of the waiting time.
const UNEVEN: f64 = 0.75;

/// The limit of a loop over another loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// The step takes the time; the loader keeps up.
    NotStarved,
    /// Too few workers: they compute, and cores are idle.
    Workers,
    /// The workers' own code: it uses all cores that there are.
    Transform,
    /// Reads of files on devices of this machine.
    Storage,
    /// Reads of files on a network file system.
    NetworkStorage,
    /// Sockets: object stores and other servers.
    Network,
    /// Workers wait for something else: locks, other programs, sleeps.
    Blocked,
    /// The start of workers at each epoch.
    WorkerStart,
    /// One worker, for which the others wait.
    SlowWorker,
    /// Batches that a few samples hold up now and then.
    Uneven,
    /// Pickled batches on their way from the workers.
    Pipe,
    /// Other Python threads of the loop's process, which hold the interpreter's lock.
    Gil,
    /// The cost of a batch, whatever is in it.
    SmallBatches,
    /// Copies from memory that is not pinned.
    Pinning,
    /// The quota of CPU time.
    CpuQuota,
    /// Other programs on the cores.
    OtherPrograms,
    /// Workers and the step, which together want more cores than there are.
    Cores,
    /// Not determined.
    Unknown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarved => "the step",
            Self::Workers => "too few workers",
            Self::Transform => "the work for each sample (decoding, transforms)",
            Self::Storage => "reads from storage",
            Self::NetworkStorage => "reads from a network file system",
            Self::Network => "the network",
            Self::Blocked => "waits in the loader's own code (locks, sleeps, other programs)",
            Self::WorkerStart => "the start of each epoch",
            Self::SlowWorker => "one slow worker",
            Self::Uneven => "a few slow batches",
            Self::Pipe => "large pickles between the workers and the loop",
            Self::Gil => "Python threads of this process, which hold the GIL",
            Self::SmallBatches => "the cost of each batch",
            Self::Pinning => "copies from memory that is not pinned",
            Self::CpuQuota => "the CPU quota of the container",
            Self::OtherPrograms => "other programs on the cores",
            Self::Cores => "too few cores for the workers and the step",
            Self::Unknown => "unknown",
        })
    }
}

/// The measured quantity of an [`Evidence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Measure {
    /// Time in which the loop waited for batches.
    Waited,
    /// Time in which the GPU had no step.
    GpuIdle,
    /// Time in which epochs started and ended.
    Starts,
    /// Time in which workers had a task.
    WorkersBusy,
    /// The same of the busiest worker.
    BusiestWorker,
    /// Working time on cores.
    Computing,
    /// Working time in reads of files.
    Reading,
    /// Working time at sockets.
    AtSockets,
    /// Working time in other waits.
    Blocked,
    /// Time in which workers were ready without a core.
    WithoutCore,
    /// Time in which the loop's thread was ready without a core.
    LoopWithoutCore,
    /// Cores that nobody used, on average.
    IdleCores,
    /// Cores that other programs used, on average.
    OtherPrograms,
    /// Time for which the quota withheld cores.
    QuotaUsedUp,
    /// Bytes that workers wrote to pipes, per batch.
    PickledBytes,
    /// CPU time of the loop's thread in its waits.
    LoopComputing,
    /// Requests of the interpreter's lock that were late.
    LateLock,
    /// Bytes from devices, per second.
    DeviceBytes,
    /// The longest tenth of the waits, as a part of the waiting time.
    LongestWaits,
}

/// A measurement behind a diagnosis. `Display` is the sentence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Evidence {
    /// The quantity.
    pub measure: Measure,
    /// Its amount.
    pub value: f64,
    /// The unit of the amount.
    pub unit: Unit,
    /// The sentence.
    pub text: String,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What limits a loop over another loader, and what to change. `Display` is the text for people.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Diagnosis {
    /// The [`VERSION`](Self::VERSION) of the program that made it.
    pub version: u32,
    /// Samples per second of the whole loop; batches per second if their samples are not known.
    pub rate: f64,
    /// The limit.
    pub cause: Cause,
    /// Another limit of about the same size.
    pub also: Option<Cause>,
    /// Part of the steady time in which the loop waited for batches.
    pub starved_share: f64,
    /// The confidence.
    pub strength: Strength,
    /// The measurements.
    pub evidence: Vec<Evidence>,
    /// Advice, the most promising first.
    pub advice: Vec<Advice>,
}

impl Diagnosis {
    /// The version of the fields and codes. Fields and codes may be added without a new version.
    pub const VERSION: u32 = 1;

    /// The diagnosis of what was measured.
    pub fn of(observation: &Observation) -> Self {
        let shares = Shares::of(observation);
        let (cause, also) = decide(&shares);
        let case = Case {
            shares: &shares,
            cause,
        };
        Self {
            version: Self::VERSION,
            rate: shares.rate,
            cause,
            also,
            starved_share: shares.starved,
            strength: case.strength(also),
            evidence: case.evidence(),
            advice: advice::of(&shares, cause),
        }
    }

    /// The limit, the share of waits and the confidence, in one line.
    pub fn headline(&self) -> String {
        let waits = format!(
            "waits for batches {:.1} % of the time",
            100.0 * self.starved_share
        );
        let mut line = match self.cause {
            Cause::NotStarved => {
                format!("not the loader: the step takes the time; the loop {waits}")
            }
            Cause::Unknown => format!("cannot tell; the loop {waits}"),
            Cause::WorkerStart => {
                format!("limited by {}; within epochs the loop {waits}", self.cause)
            }
            cause => format!("limited by {cause}: the loop {waits}"),
        };
        if let Some(also) = self.also {
            line += &format!("; next to it {also}");
        }
        format!("{line} ({})", self.strength)
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.headline())?;
        for line in &self.evidence {
            write!(f, "\n  {line}")?;
        }
        for line in &self.advice {
            write!(f, "\n  → {line}")?;
        }
        Ok(())
    }
}

/// The measurements as shares of times, for rules and sentences.
pub(crate) struct Shares<'o> {
    pub seen: &'o Observation,
    /// Samples (or batches) per second, starts included.
    pub rate: f64,
    pub starved: f64,
    pub gpu_idle: Option<f64>,
    /// Starts of later epochs, as a share of all time but the first start.
    pub restarts: f64,
    /// Nanoseconds of a batch: all, waiting, step.
    pub period_ns: f64,
    pub wait_ns: f64,
    pub step_ns: f64,
    /// The worker processes that worked.
    pub workers: Vec<&'o Worker>,
    /// Mean share of the time in which workers had a task.
    pub busy: f64,
    /// What they did then.
    pub places: Places,
    /// Cores that workers used, each and together.
    pub worker_cores: f64,
    pub delayed: f64,
    /// Cores: idle, used by this process, by other programs.
    pub idle_cores: f64,
    pub process_cores: f64,
    pub other_cores: f64,
    pub throttled: f64,
    /// Share of the time in which the loop's thread was ready without a core.
    pub loop_delayed: f64,
    /// Cores that other threads of the loop's process use.
    pub thread_cores: f64,
    /// Bytes that workers write per batch.
    pub pickled: f64,
    /// Part of the waits in which the loop's thread computed.
    pub loop_computes: f64,
    /// Part of the lock's requests that were late.
    pub lock_late: f64,
    pub device_bytes_per_s: f64,
    pub longest: f64,
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

impl<'o> Shares<'o> {
    fn of(seen: &'o Observation) -> Self {
        let consumer = &seen.consumer;
        let machine = &seen.machine;
        let batches = consumer.steady_batches as f64;
        let steady = consumer.steady_ns as f64;
        let waited = consumer.waited_ns as f64;
        let items = if consumer.samples > 0 {
            consumer.samples
        } else {
            consumer.batches
        };
        let watched = machine.watched_ns as f64;
        let of_named = seen.loader.kind == LoaderKind::Torch;
        let workers: Vec<&Worker> = seen
            .workers
            .iter()
            // Other children, such as a tracker of resources, do nothing.
            .filter(|worker| of_named || 200 * worker.cpu_ns > worker.watched_ns)
            .collect();
        let count = workers.len().max(1) as f64;
        let mut places = Places::default();
        workers.iter().for_each(|worker| places.add(&worker.places));
        let worker_cores: f64 = workers
            .iter()
            .map(|worker| ratio(worker.cpu_ns as f64, worker.watched_ns as f64))
            .sum();
        let cpu: u64 = workers.iter().map(|worker| worker.cpu_ns).sum();
        let delay: u64 = workers.iter().map(|worker| worker.delay_ns).sum();
        let process_cores = ratio(machine.process_ns as f64, watched);
        let cores = machine.quota.unwrap_or(f64::MAX).min(machine.cores.into());
        let busy_cores = machine
            .busy_ns
            .map_or(process_cores + worker_cores, |busy| {
                ratio(busy as f64, watched)
            });
        let written: u64 = workers.iter().map(|worker| worker.written_bytes).sum();
        let watched_workers: u64 = workers.iter().map(|worker| worker.watched_ns).sum();
        // Bytes were counted in the watched part of the steady time.
        let watched_batches = ratio(watched_workers as f64 / count, steady) * batches;
        let device: u64 = workers.iter().map(|worker| worker.device_bytes).sum();
        let threads: u64 = seen.threads.iter().map(|thread| thread.cpu_ns).sum();
        let lock = seen.interpreter.unwrap_or_default();
        Self {
            seen,
            rate: ratio(1e9 * items as f64, consumer.total_ns as f64),
            starved: ratio(waited, steady),
            gpu_idle: seen
                .gpu
                .filter(|gpu| gpu.steps >= BATCHES_LEAST)
                .map(|gpu| ratio(gpu.idle_ns as f64, gpu.span_ns as f64)),
            restarts: ratio(
                consumer.restarts_ns as f64,
                consumer.restarts_ns as f64 + steady,
            ),
            period_ns: ratio(steady, batches),
            wait_ns: ratio(waited, batches),
            step_ns: ratio(steady - waited, batches),
            busy: workers.iter().map(|worker| worker.busy()).sum::<f64>() / count,
            places,
            worker_cores,
            delayed: ratio(delay as f64, (cpu + delay) as f64),
            idle_cores: (cores - busy_cores).max(0.0),
            process_cores,
            other_cores: (busy_cores - process_cores - worker_cores).max(0.0),
            throttled: ratio(machine.throttled_ns as f64, watched),
            loop_delayed: ratio(consumer.delay_ns as f64, consumer.watched_ns as f64),
            thread_cores: ratio(threads as f64, watched),
            pickled: ratio(written as f64, watched_batches),
            loop_computes: ratio(consumer.wait_cpu_ns as f64, waited),
            lock_late: if lock.probes >= BATCHES_LEAST {
                ratio(lock.late as f64, lock.probes as f64)
            } else {
                0.0
            },
            device_bytes_per_s: ratio(1e9 * device as f64, watched_workers as f64 / count)
                + ratio(1e9 * machine.device_bytes as f64, watched),
            longest: consumer.waits.in_longest(0.1),
            workers,
        }
    }

    /// Whether enough batches came for more than a guess.
    fn has_enough(&self) -> bool {
        let consumer = &self.seen.consumer;
        let slow = consumer.steady_batches >= SLOW_BATCHES && consumer.steady_ns >= SLOW_NS;
        slow || consumer.steady_batches >= BATCHES_LEAST
    }

    /// Whether another thread of the loop's process holds the interpreter's lock in its waits. The
    /// loop's own thread holds it while it unpickles.
    fn lacks_lock(&self) -> bool {
        self.lock_late >= HALF && self.thread_cores >= BUSY_THREADS
    }

    /// Who takes the cores, if ready threads lack them.
    fn takes_cores(&self) -> Cause {
        let cores = f64::from(self.seen.machine.cores.max(1));
        if self.other_cores >= (0.25 * cores).max(CROWDED) {
            Cause::OtherPrograms
        } else {
            Cause::Cores
        }
    }

    /// Whether the loop is starved.
    fn starves(&self) -> bool {
        self.gpu_idle
            .map_or(self.starved >= FED, |idle| idle >= GPU_FED)
    }

    /// The busiest worker, and the share of the next one.
    pub fn slowest(&self) -> Option<(&'o Worker, f64)> {
        let mut all = self.workers.clone();
        all.sort_by(|a, b| b.busy().total_cmp(&a.busy()));
        Some((*all.first()?, all.get(1)?.busy()))
    }

    /// The part of the working time at these places.
    pub fn at(&self, places: &Places, count: u64) -> f64 {
        ratio(count as f64, (places.all() - places.tasks) as f64)
    }

    /// The places of those who make the batches: workers, or the loop itself, or threads for which
    /// it waits.
    pub fn producing(&self) -> Places {
        if !self.workers.is_empty() {
            return self.places;
        }
        let own = self.seen.consumer.places;
        if 2 * own.lock < own.all() {
            return own;
        }
        let mut threads = Places::default();
        self.seen
            .threads
            .iter()
            .for_each(|thread| threads.add(&thread.places));
        // Threads at a lock wait for others.
        threads.tasks += threads.lock;
        threads.lock = 0;
        threads
    }

    fn looks(&self) -> u64 {
        match self.workers.iter().map(|worker| worker.places.all()).min() {
            Some(least) => least,
            None => self.seen.consumer.places.all(),
        }
    }
}

fn decide(shares: &Shares<'_>) -> (Cause, Option<Cause>) {
    let consumer = &shares.seen.consumer;
    if shares.restarts >= STARTS && consumer.restarts_ns >= consumer.waited_ns {
        return (Cause::WorkerStart, None);
    }
    if !shares.has_enough() {
        return (Cause::Unknown, None);
    }
    if !shares.starves() {
        return (Cause::NotStarved, None);
    }
    if shares.starved < FED {
        // The GPU idles, and not for want of a batch: by copies, or by the step's own code.
        let pageable = shares.seen.loader.pin_memory == Some(false);
        return match pageable {
            true => (Cause::Pinning, None),
            false => (Cause::NotStarved, None),
        };
    }
    if shares.throttled >= THROTTLED {
        return (Cause::CpuQuota, None);
    }
    let also = (shares.restarts >= STARTS).then_some(Cause::WorkerStart);
    (starved(shares), also)
}

/// The cause of a loop's waits.
fn starved(shares: &Shares<'_>) -> Cause {
    if shares.workers.is_empty() {
        return without_workers(shares);
    }
    let one_slow = shares
        .slowest()
        .is_some_and(|(worker, next)| worker.busy() >= ALWAYS && next <= OTHERS_IDLE);
    if one_slow {
        return Cause::SlowWorker;
    }
    if shares.busy < HALF {
        return handed_over(shares);
    }
    match waiting(shares) {
        Some(cause) => cause,
        None if shares.busy < ALWAYS && shares.longest >= UNEVEN => Cause::Uneven,
        None => computing(shares),
    }
}

/// The cause if the workers have batches ready.
fn handed_over(shares: &Shares<'_>) -> Cause {
    if shares.lacks_lock() {
        return Cause::Gil;
    }
    if shares.loop_delayed >= HALF * shares.starved {
        return shares.takes_cores();
    }
    if shares.pickled >= LARGE_PICKLE {
        return Cause::Pipe;
    }
    if shares.period_ns < SHORT_NS {
        return Cause::SmallBatches;
    }
    if shares.longest >= UNEVEN {
        return Cause::Uneven;
    }
    if shares.loop_computes >= HALF {
        return Cause::Transform;
    }
    Cause::Unknown
}

/// The cause if the loop's own process makes the batches.
fn without_workers(shares: &Shares<'_>) -> Cause {
    if shares.lacks_lock() && shares.loop_computes < HALF {
        return Cause::Gil;
    }
    if let Some(cause) = waiting(shares) {
        return cause;
    }
    let tiny = shares.wait_ns < SHORT_NS / 8.0 && shares.step_ns < SHORT_NS / 8.0;
    if tiny && shares.loop_computes >= HALF {
        return Cause::SmallBatches;
    }
    if shares.producing().running == 0 && shares.loop_computes < HALF {
        return Cause::Unknown;
    }
    computing(shares)
}

/// The cause if those who make the batches mostly wait.
fn waiting(shares: &Shares<'_>) -> Option<Cause> {
    let places = shares.producing();
    let share = |count| shares.at(&places, count);
    let reading = share(places.storage + places.network_storage);
    let blocked = share(places.lock + places.sleep + places.pipe + places.other);
    let table = [
        (share(places.network), Cause::Network),
        (blocked, Cause::Blocked),
        (
            reading,
            if places.network_storage > places.storage {
                Cause::NetworkStorage
            } else {
                Cause::Storage
            },
        ),
    ];
    let most = table.into_iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
    (most.0 >= HALF).then_some(most.1)
}

/// The cause if those who make the batches mostly compute.
fn computing(shares: &Shares<'_>) -> Cause {
    let has_workers = !shares.workers.is_empty();
    let delayed = if has_workers {
        shares.delayed
    } else {
        shares.loop_delayed
    };
    let crowded = shares.takes_cores() == Cause::OtherPrograms;
    if delayed >= DELAYED && (crowded || has_workers && shares.process_cores >= 0.4) {
        return shares.takes_cores();
    }
    if shares.idle_cores >= IDLE_CORES && advice::more_workers(shares).is_some() {
        return Cause::Workers;
    }
    // More workers would find the cores taken.
    let few = shares.workers.len() < shares.seen.machine.cores as usize;
    if crowded && few {
        Cause::OtherPrograms
    } else {
        Cause::Transform
    }
}

/// A diagnosis that is being made.
struct Case<'c> {
    shares: &'c Shares<'c>,
    cause: Cause,
}

impl Case<'_> {
    fn strength(&self, also: Option<Cause>) -> Strength {
        let shares = self.shares;
        let consumer = &shares.seen.consumer;
        let thin = |why: String| Strength::Thin { why };
        if self.cause == Cause::WorkerStart {
            return match consumer.epochs {
                ..=2 => thin(format!("{} epochs are few", consumer.epochs)),
                _ => Strength::Strong,
            };
        }
        if !shares.has_enough() {
            return thin(format!("{} batches are too few", consumer.steady_batches));
        }
        if consumer.steady_ns < STEADY_LEAST_NS {
            let ms = consumer.steady_ns / 1_000_000;
            return thin(format!("{ms} ms are too short"));
        }
        let measured = matches!(self.cause, Cause::NotStarved | Cause::CpuQuota);
        if !measured && shares.looks() < LOOKS_LEAST {
            let looks = shares.looks();
            return thin(format!("the workers were looked at {looks} times"));
        }
        let clear = match self.cause {
            Cause::NotStarved => shares.starved < 0.5 * FED,
            Cause::Unknown => return thin("no measurement explains the waits".into()),
            _ => shares.starved >= 2.0 * FED,
        };
        if clear && also.is_none() {
            Strength::Strong
        } else {
            Strength::Fair
        }
    }

    fn evidence(&self) -> Vec<Evidence> {
        let shares = self.shares;
        let consumer = &shares.seen.consumer;
        let mut all = Vec::new();
        let mut share = |measure, value: f64, words: &str| {
            all.push(Evidence {
                measure,
                value: value.clamp(0.0, 1.0),
                unit: Unit::Share,
                text: format!(
                    "{words}: {:.0} % of the time",
                    100.0 * value.clamp(0.0, 1.0)
                ),
            });
        };
        if consumer.steady_batches == 0 {
            return all;
        }
        share(
            Measure::Waited,
            shares.starved,
            "the loop waits for batches",
        );
        if let Some(idle) = shares.gpu_idle {
            share(Measure::GpuIdle, idle, "the GPU has no step");
        }
        if shares.restarts >= 0.02 {
            share(Measure::Starts, shares.restarts, "epochs start and end");
        }
        if matches!(self.cause, Cause::NotStarved | Cause::WorkerStart) {
            return all;
        }
        if shares.throttled >= 0.02 {
            share(
                Measure::QuotaUsedUp,
                shares.throttled,
                "the quota withholds a core",
            );
        }
        if !shares.workers.is_empty() {
            share(Measure::WorkersBusy, shares.busy, "workers have a task");
        }
        if self.cause == Cause::SlowWorker
            && let Some((worker, next)) = shares.slowest()
        {
            let words = format!(
                "worker {} has a task (the next one {:.0} %)",
                worker.number,
                100.0 * next
            );
            share(Measure::BusiestWorker, worker.busy(), &words);
        }
        let places = shares.producing();
        let by_workers = !shares.workers.is_empty();
        let reads = places.storage + places.network_storage;
        let blocked = places.lock + places.sleep + places.pipe + places.other;
        let table = [
            (Measure::Computing, places.running, "compute", "computes"),
            (Measure::Reading, reads, "read files", "reads files"),
            (
                Measure::AtSockets,
                places.network,
                "wait at sockets",
                "waits at sockets",
            ),
            (
                Measure::Blocked,
                blocked,
                "wait for something else",
                "waits for something else",
            ),
        ];
        for (measure, count, many, one) in table {
            let part = shares.at(&places, count);
            if part < 0.1 {
                continue;
            }
            let words = if by_workers {
                format!("workers with a task {many}")
            } else {
                format!("while the loop waits, the loader {one}")
            };
            share(measure, part, &words);
        }
        if shares.delayed >= 0.1 && shares.worker_cores >= 0.2 {
            share(
                Measure::WithoutCore,
                shares.delayed,
                "workers that could compute have no core",
            );
        }
        if shares.loop_delayed >= 0.05 {
            share(
                Measure::LoopWithoutCore,
                shares.loop_delayed,
                "the loop's own thread has no core",
            );
        }
        if shares.loop_computes >= 0.3 {
            share(
                Measure::LoopComputing,
                shares.loop_computes,
                "in its waits the loop's own thread computes",
            );
        }
        if shares.lock_late >= 0.3 {
            share(
                Measure::LateLock,
                shares.lock_late,
                "in waits the GIL is taken",
            );
        }
        if self.cause == Cause::Uneven {
            share(
                Measure::LongestWaits,
                shares.longest,
                "the longest tenth of the waits is of the waiting time",
            );
        }
        let mut amount = |measure, value, unit, text| {
            all.push(Evidence {
                measure,
                value,
                unit,
                text,
            });
        };
        if shares.pickled >= 50_000.0 {
            let text = format!("a batch is pickled in {:.1} MB", shares.pickled / 1e6);
            amount(Measure::PickledBytes, shares.pickled, Unit::Bytes, text);
        }
        if matches!(self.cause, Cause::Storage | Cause::NetworkStorage) {
            let text = match shares.device_bytes_per_s {
                0.0 => "no device read a byte: the files are in the page cache".to_string(),
                rate => format!("devices read {:.1} MB/s", rate / 1e6),
            };
            let rate = shares.device_bytes_per_s;
            amount(Measure::DeviceBytes, rate, Unit::Bytes, text);
        }
        if matches!(
            self.cause,
            Cause::Workers | Cause::Transform | Cause::Cores | Cause::OtherPrograms
        ) {
            let cores = shares.seen.machine.cores;
            let idle = shares.idle_cores;
            let text = format!("of {cores} cores {idle:.1} are idle, on average");
            amount(Measure::IdleCores, idle, Unit::Count, text);
        }
        if shares.other_cores >= 0.3 {
            let text = format!("other programs use {:.1} cores", shares.other_cores);
            amount(
                Measure::OtherPrograms,
                shares.other_cores,
                Unit::Count,
                text,
            );
        }
        all
    }
}
