//! The verdict on a snapshot: the limiting stage, the confidence, evidence and advice. No I/O.
//!
//! ```text
//! a GPU, and no step measured on its stream? ──yes──► unknown
//!    │no
//! starved? ──no──► not starved
//!    │yes
//!    ▼
//! the consumer saturated, and no stage more loaded? ──yes──► the consumer; where slots are few, also the memory budget
//!    │no
//!    ▼
//! threads ready without a core? ──yes──► what takes the cores: a quota, other programs or ranks, other threads of the process
//!    │no
//!    ▼
//! a stage saturated that is measured exactly (copy, decode, order)? ──yes──► the one with the highest load
//!    │no
//!    ▼
//! storage always busy? ──yes──► storage (reads from memory, where no device read the bytes); where few slots keep the depth
//!    │                           from being filled, also the memory budget
//!    │no
//!    ▼
//! most of the time nothing at work? ──yes──► handing over, which takes microseconds; for longer batches unknown
//!    │no
//!    ▼
//! planner without a slot, rows without room, full slots without room on the device? ──yes──► memory budget
//! ```
//!
//! Loads (see [`load`](super::load)) are in proportion to demands, whatever the stages wait for. So
//! loads can be compared directly: a stage that mostly waited for its input has a low load. Another
//! stage with at least 1 / 1.25 of the highest load is named as well: it would be next, and the
//! measurement cannot tell the two apart.
//!
//! # Limits
//!
//! - No stage can be slower than a saturated stage with load *u* by more than a factor of 1 / *u*.
//!   So at 0.87 and above nothing else can be the cause by 20 %. Below that, stages lose time by
//!   waiting for each other, and room (slots) helps.
//! - If slots bound the reads in flight, one snapshot cannot distinguish a storage device at its
//!   limit from one with few reads that wait for its latency. The verdict then names both.
//! - The loads are means: rare stalls look like a memory budget that is too small to bridge them,
//!   and a larger budget would in fact bridge them.
//! - If the consumer does no work of its own, there is no demand and nothing is late: the text says
//!   "as fast as it goes", with the limit.
//! - A figure for more slots would be an extrapolation, so the advice gives none.
//! - Starvation is measured in the steady time: first batches of iterators are reported separately.

mod advice;
mod codes;
mod evidence;
#[cfg(test)]
pub(super) mod tests;

pub use codes::{Advice, Evidence, Measure, Remedy, Unit, Value};

use super::depth::link_is_full;
use super::load::{Cause, FILLED, LOST, Loads, PREPARED_LEAST, StageLoad, ratio};
use super::whatif::{COMPETES, WhatIf};
use super::words::time;
use crate::meter::{Effort, PipelineStage, Snapshot, Unmeasured};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The limit of a loader. `Display` is the text for people.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Verdict {
    /// The [`VERSION`](Self::VERSION) of the program that made the verdict. It increases if a field
    /// or a code changes its meaning.
    #[serde(default)]
    pub version: u32,
    /// The limiting stage.
    pub cause: Cause,
    /// Another stage that is within 20 % of being the limit.
    pub also: Option<Cause>,
    /// Share of the steady time in which the consumer (on a GPU, its stream) waited for batches; 0
    /// if the cause is [`Unknown`](Cause::Unknown).
    pub starved_share: f64,
    /// The confidence.
    pub strength: Strength,
    /// The measurements.
    pub evidence: Vec<Evidence>,
    /// Advice, the most promising first.
    pub advice: Vec<Advice>,
    /// The stages with work, from the consumer upstream.
    pub stages: Vec<StageLoad>,
    /// Whether the consumer works between two batches. If it does not, the cause is the limit of
    /// the loader alone.
    pub demand: bool,
    /// The work of the decode workers.
    pub effort: Effort,
}

/// The confidence of a verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Strength {
    /// Little evidence.
    Thin {
        /// The missing evidence.
        why: String,
    },
    /// Most likely.
    Fair,
    /// Nothing else fits what was measured.
    Strong,
}

impl fmt::Display for Strength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thin { why } => write!(f, "thin evidence: {why}"),
            Self::Fair => f.write_str("fair evidence"),
            Self::Strong => f.write_str("strong evidence"),
        }
    }
}

/// Below this share of starvation, the consumer counts as not starved.
const FED: f64 = 0.02;
/// Stages are saturated from this load on.
const SATURATED: f64 = 0.87;
/// Another stage counts as close to the limit if its load is at least this fraction of the cause's
/// load.
const NEAR: f64 = 0.8;
/// The planner, rows or copies count as lacking room from this share of the time on (for the
/// planner, of the time in which it does not compute).
const LACKS: f64 = 0.3;
/// Hand-over is the cause if the summed work of all stages is less than this share of the time.
const AT_WORK: f64 = 0.6;
/// Decode is the caller's `map_batch` from this share of the workers' work on.
const MOSTLY_MAPS: f64 = 0.5;
/// Minimum evidence for a verdict that is more than a guess.
const BATCHES_LEAST: f64 = 8.0;
const STEADY_LEAST_NS: f64 = 0.5e9;
/// If first batches take at least this share of all time, the rest is little evidence.
const MOSTLY_FIRST: f64 = 0.5;
/// A consumer that holds this share of the slots, on average, keeps the loader from filling them.
const HOLDS: f64 = 0.75;
/// From this multiple of the sustainable rate on, the report gives both rates.
const AHEAD: f64 = 1.01;
/// With fewer busy workers than this, on average, the report says nothing about cores.
const HARDLY: f64 = 0.1;
/// Workers count as blocked when they are runnable for less than this share of their busy time.
const BLOCKED: f64 = 0.6;
/// If waits for a core take this share of the time, a device that always reads is not the cause.
const MOSTLY_LOST: f64 = 0.5;
/// The hand-over of a batch takes no longer than this.
const HANDED_NS: f64 = 2e6;

impl Verdict {
    /// The version of the verdict's fields and codes. Fields and codes may be added without a new
    /// version.
    pub const VERSION: u32 = 1;

    /// The verdict on what was measured.
    pub fn of(snapshot: &Snapshot) -> Self {
        let Some((loads, model)) = Loads::of(snapshot).zip(WhatIf::from(snapshot)) else {
            return Self::unknown(snapshot);
        };
        let (cause, also) = match decide(&loads, snapshot) {
            // No measurement shows whether the loader or the consumer was late.
            _ if loads.starved.is_none() => (Cause::Unknown, None),
            // The steady time was only a small part of all time, so it is no evidence for the rest.
            (Cause::NotStarved, _) if first_share(snapshot, &loads) >= MOSTLY_FIRST => {
                (Cause::Unknown, None)
            }
            decided => decided,
        };
        let precise = |cause| match cause {
            Cause::Storage if loads.from_memory => Cause::PageCache,
            Cause::Decode if map_share(snapshot) >= MOSTLY_MAPS => Cause::MapBatch,
            cause => cause,
        };
        let cause = precise(cause);
        let also = also.map(precise);
        let case = Case {
            snapshot,
            loads: &loads,
            model,
            cause,
            also,
        };
        Self {
            version: Self::VERSION,
            cause,
            also,
            starved_share: loads.starved.unwrap_or(0.0),
            strength: case.strength(),
            evidence: case.evidence(),
            advice: case.advice(),
            stages: loads.stages(),
            demand: loads.has_demand(),
            effort: snapshot.decode.effort,
        }
    }

    fn unknown(snapshot: &Snapshot) -> Self {
        let why = match snapshot.consumer.batches {
            0 => "no batch was handed out",
            _ => {
                "only the first batch of each iterator was handed out, and the wait for that \
                 is not starvation"
            }
        };
        let why = why.to_string();
        Self {
            version: Self::VERSION,
            cause: Cause::Unknown,
            also: None,
            starved_share: 0.0,
            strength: Strength::Thin { why },
            evidence: Vec::new(),
            advice: Vec::new(),
            stages: Vec::new(),
            demand: true,
            effort: snapshot.decode.effort,
        }
    }

    /// The limit, the starved share and the strength of the evidence, in one line.
    pub fn headline(&self) -> String {
        let starved = format!("starved {:.1} %", 100.0 * self.starved_share);
        let mut line = match self.cause {
            Cause::NotStarved => "not starved: the consumer's own work takes the time".into(),
            Cause::Consumer => format!("bound by the consumer's own work, {starved}"),
            Cause::Unknown => "cannot tell".into(),
            cause if !self.demand => format!("as fast as it goes, limited by {}", self.name(cause)),
            cause => format!("bound by {}, {starved}", self.name(cause)),
        };
        if let Some(also) = self.also {
            line += &format!(", or {}: too close to tell", self.name(also));
        }
        format!("{line} ({})", self.strength)
    }

    /// The name of a cause, for this loader.
    fn name(&self, cause: Cause) -> String {
        match cause {
            Cause::Decode if self.effort <= Effort::Light => "copies by the workers".into(),
            cause => cause.to_string(),
        }
    }
}

/// Share of the workers' work in `map_batch`.
fn map_share(snapshot: &Snapshot) -> f64 {
    (snapshot.decode.map_batch_ns as f64 / snapshot.decode.busy_ns.max(1) as f64).min(1.0)
}

fn decide(loads: &Loads, snapshot: &Snapshot) -> (Cause, Option<Cause>) {
    use PipelineStage::{Consumer, Copy, Decode, Order, Storage};
    // Among equal loads, the first one counts: the stage nearer to the consumer.
    let top = |among: &[PipelineStage]| {
        among.iter().copied().reduce(|best, next| {
            if loads.likely(next) > loads.likely(best) {
                next
            } else {
                best
            }
        })
    };
    let highest = top(&PipelineStage::UPSTREAM);
    let near = |cause: PipelineStage| {
        let others: Vec<PipelineStage> = PipelineStage::UPSTREAM
            .into_iter()
            .filter(|stage| *stage != cause)
            .collect();
        let least = NEAR * loads.likely(cause);
        // Storage comes last, because its load is only an upper bound.
        let storage = (cause != Storage && loads.storage >= least).then_some(Storage);
        top(&others)
            .filter(|other| loads.likely(*other) >= least)
            .or(storage)
            .map(Cause::from)
    };
    if loads.starved.is_some_and(|starved| starved < FED) {
        return (Cause::NotStarved, near(Consumer));
    }
    if loads.consumer() >= SATURATED && highest == Some(Consumer) {
        let budget = (loads.lacks_room() >= LACKS).then_some(Cause::MemoryBudget);
        return (Cause::Consumer, near(Consumer).or(budget));
    }
    // The device measures its bus; the loads of threads and reads contain their wait for a core. A
    // device that always reads is the limit, unless most of the time is such a wait.
    let reads =
        (!loads.from_memory && loads.likely(Storage) >= SATURATED).then_some(Cause::Storage);
    // More cores gain at most what the saturated stage itself lost by waiting for cores.
    let delay = snapshot.decode.delay_ns.unwrap_or(0);
    let busy = snapshot.decode.busy_ns;
    let decoding = loads.decode >= SATURATED && ratio(delay as f64, busy as f64) < 0.5 * LOST;
    if let Some(taken) = loads.taken.filter(|_| {
        !decoding && loads.copy < SATURATED && (reads.is_none() || loads.lost >= MOSTLY_LOST)
    }) {
        return (taken, reads);
    }
    let exact = top(&[Copy, Decode, Order]).filter(|stage| loads.load(*stage) > 0.0);
    if let Some(exact) = exact.filter(|exact| loads.load(*exact) >= SATURATED) {
        return (exact.into(), near(exact));
    }
    // Full slots that wait most of the time: storage and decode are ahead on average.
    let ahead = loads.slots[2] >= 0.5 * f64::from(snapshot.slots.count.max(1));
    let others = exact
        .map_or(0.0, |exact| loads.load(exact))
        .max(loads.consumer());
    if loads.storage >= SATURATED && !ahead && loads.likely(Storage) >= others {
        let budget = slots_bound_reads(loads, snapshot).then_some(Cause::MemoryBudget);
        return (Cause::Storage, budget.or_else(|| near(Storage)));
    }
    if loads.slots[3] >= HOLDS * f64::from(snapshot.slots.count.max(1)) && slots_lack(loads) {
        return (Cause::MemoryBudget, Some(Cause::Consumer));
    }
    let hand_over = match loads.steady_ns / loads.batches {
        ..HANDED_NS => (Cause::HandOver, None),
        _ => (Cause::Unknown, None),
    };
    if at_work(loads, snapshot) < AT_WORK {
        return hand_over;
    }
    match highest.filter(|stage| loads.likely(*stage) >= NEAR * SATURATED) {
        most if loads.lacks_room() >= LACKS => (Cause::MemoryBudget, most.map(Cause::from)),
        Some(most) if most != Consumer => (most.into(), near(most)),
        _ => hand_over,
    }
}

/// Whether more slots might allow more reads in flight.
fn slots_bound_reads(loads: &Loads, snapshot: &Snapshot) -> bool {
    loads.depth_filled < FILLED && slots_lack(loads) && !link_is_full(&snapshot.storage)
}

/// Share of all time that went into first batches.
fn first_share(snapshot: &Snapshot, loads: &Loads) -> f64 {
    let first = snapshot.consumer.first_ns as f64;
    first / (first + loads.steady_ns)
}

/// Whether the planner waits for slots when it does not compute.
fn slots_lack(loads: &Loads) -> bool {
    loads.no_slot >= LACKS * (1.0 - loads.order.min(1.0)).max(1e-3)
}

/// The sum of the stages' work, as a share of the time; a batch's rows are decoded in parallel.
fn at_work(loads: &Loads, snapshot: &Snapshot) -> f64 {
    let rows = loads.samples_per_batch();
    let beside = rows.clamp(1.0, f64::from(snapshot.decode.workers.max(1)));
    loads.consumer() + loads.copy + loads.working / beside + loads.storage + loads.order
}

/// A verdict that is being made.
struct Case<'s> {
    snapshot: &'s Snapshot,
    loads: &'s Loads,
    model: WhatIf,
    cause: Cause,
    also: Option<Cause>,
}

impl Case<'_> {
    /// Number of ranks that share the cores of this process; 0 or 1 if it has its own.
    fn sharing_ranks(&self) -> u32 {
        let cpu = self.snapshot.cpu.as_ref();
        cpu.map_or(0, |cpu| cpu.sharing_ranks)
    }

    fn strength(&self) -> Strength {
        let loads = self.loads;
        let gpu = &self.snapshot.consumer.gpu;
        let thin = |why: String| Strength::Thin { why };
        if let Some(why) = self.unmeasured() {
            return thin(why.to_string());
        }
        if loads.batches < BATCHES_LEAST {
            let count = loads.batches;
            let verb = if loads.batches == 1.0 {
                " is"
            } else {
                "es are"
            };
            return thin(format!("{count:.0} batch{verb} too few"));
        }
        if loads.steady_ns < STEADY_LEAST_NS {
            return thin(format!("{} are too short", time(loads.steady_ns)));
        }
        if loads.starved.is_none() {
            return thin("the consumer's stream has not come to its second step".into());
        }
        if let Some(gpu) = gpu
            .as_ref()
            .filter(|gpu| (gpu.steps as f64) < BATCHES_LEAST)
        {
            return thin(format!("only {} steps were measured on the GPU", gpu.steps));
        }
        let first = first_share(self.snapshot, loads);
        if self.cause == Cause::Unknown && first < MOSTLY_FIRST {
            return thin("for most of the time no stage was at work".into());
        }
        if self.cause == Cause::Unknown {
            let share = 100.0 * first;
            return thin(format!(
                "{share:.0} % of the time went into first batches of iterators"
            ));
        }
        if loads.prepared < PREPARED_LEAST {
            let late = 100.0 * loads.prepared;
            return thin(format!(
                "only {late:.0} % of the samples were prepared after the first batch of \
                 their epoch: epochs are too short"
            ));
        }
        let highest = PipelineStage::UPSTREAM
            .into_iter()
            .map(|stage| loads.load(stage))
            .fold(0.0, f64::max);
        let clear = match self.cause {
            Cause::NotStarved => loads.starved.is_some_and(|starved| starved < 0.5 * FED),
            Cause::Storage => {
                !loads.at_least(PipelineStage::Storage)
                    && loads.storage * loads.depth_filled >= SATURATED
            }
            Cause::OtherPrograms | Cause::LocalRanks | Cause::OwnThreads | Cause::CpuQuota => {
                loads.lost >= 0.3
            }
            Cause::MemoryBudget => {
                loads.lacks_room() >= 2.0 * LACKS && highest < NEAR && self.more_slots().is_some()
            }
            Cause::MapBatch => loads.load(PipelineStage::Decode) >= 0.9,
            cause => cause.stage().is_some_and(|stage| loads.load(stage) >= 0.9),
        };
        if clear && self.also.is_none() {
            Strength::Strong
        } else {
            Strength::Fair
        }
    }

    /// Whether workers lack cores.
    fn competes(&self) -> bool {
        self.loads.cpu_share < COMPETES && self.loads.working > HARDLY
    }

    /// Whether the workers' own work waits for something other than a core.
    fn blocked(&self) -> bool {
        self.loads.on_cpu < BLOCKED && self.loads.working > HARDLY
    }

    fn bytes_per_read(&self) -> f64 {
        let storage = &self.snapshot.storage;
        storage.counts.bytes_moved as f64 / (storage.counts.ops.max(1)) as f64
    }

    /// The reason why no step was measured on a GPU.
    fn unmeasured(&self) -> Option<WhyUnmeasured> {
        if self.loads.starved.is_some() {
            return None;
        }
        let unmeasured = self
            .snapshot
            .consumer
            .gpu
            .as_ref()
            .map(|gpu| gpu.unmeasured);
        match unmeasured {
            Some(Unmeasured {
                no_stream: 0,
                no_event: 0,
                ..
            }) => None,
            Some(Unmeasured { no_stream: 0, .. }) => Some(WhyUnmeasured::EventsRefused),
            _ => Some(WhyUnmeasured::NoStream),
        }
    }
}

impl fmt::Display for Verdict {
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

/// The reason when a GPU's idle time is not measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WhyUnmeasured {
    NoStream,
    EventsRefused,
}

impl fmt::Display for WhyUnmeasured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoStream => "the consumer's stream is not known",
            Self::EventsRefused => "the driver refused the events of the consumer's steps",
        })
    }
}
