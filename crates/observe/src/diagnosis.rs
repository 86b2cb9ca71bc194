//! The limit of a loop, by what was measured. Pure.
//!
//! ```text
//! fewer than 8 batches? ──yes──► unknown
//! epochs take longer to start than the loop waits in them? ──yes──► worker start
//! waits below 5 % of the time (on a GPU, its idle time below 2 %)? ──yes──► not starved
//! a quota withheld cores? ──yes──► quota
//! workers have batches ready, and waits are below 12 %? ──yes──► not starved: a batch is handed over
//! worker processes?
//!   no:  what does the loop's thread do while it waits? it computes, reads, waits at a socket, for other threads
//!   yes: one always busy, the others not? ──► the slow worker
//!        all mostly without a task? ──► hand-over: the interpreter's lock, pickles, batches that are small
//!        else what do they do?  reads, sockets, locks ──► that
//!                               compute ──► no core for them: whose? idle cores: more workers; else the transform
//! ```

use crate::advice::{self, Advice};
use crate::codes::{Cause, Evidence};
use crate::evidence;
use crate::observation::Observation;
use crate::shares::{FED, HALF, Shares};
use feedline_report::Strength;
use serde::{Deserialize, Serialize};
use std::fmt;

const STEADY_LEAST_NS: u64 = 500_000_000;
/// Samples of a worker's places that make a verdict more than a guess.
const LOOKS_LEAST: u64 = 15;
/// Starts of epochs limit from this share of the time on.
const STARTS: f64 = 0.15;
/// A quota counts from this share of withheld time on.
const THROTTLED: f64 = 0.08;
/// A worker counts as slow if it always has a task, and no other one has for more than this share
/// of its time.
const ALWAYS: f64 = 0.85;
const OTHERS_IDLE: f64 = 0.7;
/// Workers lack cores if they were ready without one for this share of their CPU time and delay.
const DELAYED: f64 = 0.2;
/// Waits below this share, for workers that have batches ready, are what a batch costs to hand over.
const HANDED: f64 = 0.12;
/// Reads limit from this share of the work on, if devices read at least so many bytes per second.
const READING: f64 = 0.35;
const DEVICE_READS: f64 = 1e7;
/// Idle cores that a further worker could use.
const IDLE_CORES: f64 = 0.6;
/// Bytes of a batch that make its pickle a cost.
const LARGE_PICKLE: f64 = 200_000.0;
/// A batch that comes this fast costs mostly what every batch costs.
const SHORT_NS: f64 = 4e6;
/// Waits are uneven if the longest tenth has this share of the waiting time.
const UNEVEN: f64 = 0.75;

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
        Self {
            version: Self::VERSION,
            rate: shares.rate,
            cause,
            also,
            starved_share: shares.starved,
            strength: strength(&shares, cause, also),
            evidence: evidence::of(&shares, cause),
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
    if shares.is_ahead() && shares.starved < HANDED {
        return (Cause::NotStarved, None);
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
    if shares.is_ahead() {
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
    if places.are_unknown() {
        return None;
    }
    let reading = places.storage + places.network_storage;
    let blocked = places.lock + places.sleep + places.pipe + places.other;
    let files = if places.network_storage > places.storage {
        Cause::NetworkStorage
    } else {
        Cause::Storage
    };
    let table = [
        (places.network, Cause::Network),
        (blocked, Cause::Blocked),
        (reading, files),
    ];
    let (count, cause) = table.into_iter().max_by_key(|(count, _)| *count)?;
    // The copy of what a device read is computing.
    let from_device = cause == files && shares.device_bytes_per_s >= DEVICE_READS;
    let least = if from_device { READING } else { HALF };
    (shares.at(&places, count) >= least).then_some(cause)
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
    // Workers that wait for no core are too few as long as there are more cores, also where other
    // programs use these.
    let few = shares.workers.len() < shares.seen.machine.cores as usize;
    let room = shares.idle_cores >= IDLE_CORES || crowded && few;
    if room && advice::more_workers(shares).is_some() {
        Cause::Workers
    } else {
        Cause::Transform
    }
}

fn thin(why: impl Into<String>) -> Strength {
    Strength::Thin { why: why.into() }
}

/// The confidence in a cause.
fn strength(shares: &Shares<'_>, cause: Cause, also: Option<Cause>) -> Strength {
    let consumer = &shares.seen.consumer;
    if cause == Cause::WorkerStart {
        return match consumer.epochs {
            ..=2 => thin(format!("{} epochs are few", consumer.epochs)),
            _ if consumer.total_ns < STEADY_LEAST_NS => thin("the epochs are too short"),
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
    let measured = matches!(cause, Cause::NotStarved | Cause::CpuQuota);
    if !measured && shares.looks() < LOOKS_LEAST {
        let looks = shares.looks();
        return thin(format!("the workers were looked at {looks} times"));
    }
    if !measured && shares.places.are_unknown() {
        return thin("the kernel does not tell what the workers wait for");
    }
    let clear = match cause {
        Cause::NotStarved => shares.starved < 0.5 * FED,
        Cause::Unknown => return thin("no measurement explains the waits"),
        _ => shares.starved >= 2.0 * FED,
    };
    if clear && also.is_none() {
        Strength::Strong
    } else {
        Strength::Fair
    }
}
