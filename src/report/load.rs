//! How much of its time each stage needed, from a snapshot. Pure. What the verdict and the what-if model start from.
//!
//! ```text
//! load of a stage = time that its work took ÷ (its servers × steady time)
//! ```
//!
//! By the utilisation law a stage's load is throughput × its demand for each batch, however long the queues are, however
//! much times vary and however few slots there are. So the loads of two stages are in proportion to their demands, the
//! slowest stage is the one with the highest load, and throughput ÷ load is the throughput at which it would be saturated.
//!
//! | stage | servers | load | as a measure it is |
//! |---|---|---|---|
//! | consumer | 1 | 1 − starved share | exact; on a GPU by events on its stream, without them not known |
//! | copy | 1 | time on the bus | exact |
//! | decode | workers, or cores where there are fewer | busy, or CPU time | exact |
//! | order | 1 | busy | exact |
//! | storage | ? | busy | an upper bound |
//!
//! Storage has as many servers as the device has channels, which nobody tells. A read that is in flight does not say
//! whether another one beside it would have been slower. So storage counts as busy while anything is in flight, which is
//! right when reads fill the depth while there are any, and too much when batches are small and wait for the latency of a
//! few reads. Its ceiling is a lower bound then, and says so. A lower bound of its load is the share of the depth that was
//! filled all the time; comparisons with other stages take the middle of both bounds.
//!
//! When epochs are so short that much of what was handed out had been prepared before the first batch was, the stages'
//! work in the steady time is that of fewer samples than the consumer's; their loads are scaled up to the consumer's.

use super::depth::Headroom;
use crate::meter::{Decode, Snapshot};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a loader is bound by; also the names of the stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// Not starved: the consumer's own work takes the time.
    NotStarved,
    /// The consumer's own work, although it waits now and then: for nothing that is slower than itself. Also the consumer as
    /// a stage.
    Consumer,
    /// Reads from storage.
    Storage,
    /// Decode workers: decoding, transforms, copies from memory and the page cache.
    Decode,
    /// Copies to the device.
    Copy,
    /// The thread that plans: which samples, where they lie, submitting reads.
    Order,
    /// No stage is saturated: there are too few slots (or bytes, or batches on the device) for all to work at once.
    MemoryBudget,
    /// No stage is saturated, and there is room: handing over from thread to thread takes the time.
    HandOver,
    /// Nothing was measured, or too little: on a GPU, no step of the consumer's stream.
    Unknown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarved | Self::Consumer => "the consumer",
            Self::Storage => "storage",
            Self::Decode => "decode",
            Self::Copy => "copies to the device",
            Self::Order => "order/index",
            Self::MemoryBudget => "the prefetch buffers",
            Self::HandOver => "handing over",
            Self::Unknown => "nothing known",
        })
    }
}

/// How loaded one stage was. Stages that did nothing are not listed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StageLoad {
    /// Which; the consumer is [`Cause::Consumer`].
    pub stage: Cause,
    /// Share of its time that its work took: 0 … 1.
    pub utilisation: f64,
    /// Nanoseconds of the whole stage that a batch needs: with all its workers, or all reads that were in flight.
    pub demand_ns_per_batch: f64,
    /// Samples per second that it could do if nothing kept it waiting.
    pub ceiling_items_per_s: f64,
    /// The ceiling is a lower bound.
    pub at_least: bool,
}

/// A snapshot as shares of the steady time. All are finite, and not negative, whatever the snapshot holds.
#[derive(Clone, Debug)]
pub(super) struct Loads {
    pub(super) steady_ns: f64,
    pub(super) batches: f64,
    pub(super) items_per_s: f64,
    /// Share of the steady time in which the consumer had to wait for a batch; `None` on a GPU of whose stream no step was
    /// measured. What the host waits there says nothing: it waits for batches ahead of the stream, too.
    pub(super) starved: Option<f64>,
    pub(super) copy: f64,
    pub(super) decode: f64,
    pub(super) storage: f64,
    pub(super) order: f64,
    /// Samples that workers finished in the steady time for each that was handed out, at most 1.
    pub(super) prepared: f64,
    /// Mean number of reads in flight while there are any, of those that may be.
    pub(super) depth_filled: f64,
    /// What more of them would give, where the depth is filled.
    pub(super) headroom: Headroom,
    /// Workers that work at once, on average.
    pub(super) working: f64,
    /// Of the time that workers could have run, the share in which they had a core; 1 when it is not known.
    pub(super) cpu_share: f64,
    /// Of the time that they worked, the share in which they ran or could have: the rest they were blocked. 1 when it is not
    /// known.
    pub(super) on_cpu: f64,
    /// Shares of the steady time: the planner had no slot; rows had no room; a full slot had no room on the device.
    pub(super) no_slot: f64,
    pub(super) no_room: f64,
    pub(super) no_buffer: f64,
    /// Mean number of slots that are free, filled, full and held.
    pub(super) slots: [f64; 4],
}

impl Loads {
    /// `None` when no batch or no time was measured.
    pub(super) fn of(snapshot: &Snapshot) -> Option<Self> {
        let Snapshot { consumer, order, storage, decode, copy, slots, .. } = snapshot;
        let told = consumer.waited_ns.saturating_add(consumer.user_ns);
        let steady = if snapshot.steady_ns > 0 { snapshot.steady_ns } else { told } as f64;
        let handed = consumer.handed();
        if steady == 0.0 || handed.batches == 0 {
            return None;
        }
        let share = |ns: u64| ratio(ns as f64, steady);
        // Work for fewer samples than were handed out, in the same time: the load of all of them is more.
        let flow = |done: u64, of: u64| if done == 0 { 1.0 } else { ratio(done as f64, of as f64).clamp(0.02, 1.0) };
        let prepared = flow(decode.samples.saturating_add(storage.in_place), handed.samples);
        let workers = f64::from(decode.workers.max(1));
        let working = share(decode.busy_ns);
        // Workers beyond the cores only wait for each other.
        let on_cores = match (decode.cpu_ns, decode.cores) {
            (Some(cpu), 1..) => share(cpu) / f64::from(decode.cores),
            _ => 0.0,
        };
        let (cpu_share, on_cpu) = on_cpu(decode);
        let copy = copy.clone().unwrap_or_default();
        Some(Self {
            steady_ns: steady,
            batches: handed.batches as f64,
            items_per_s: handed.samples as f64 / steady * 1e9,
            starved: starved(snapshot, told as f64, steady),
            copy: share(copy.busy_ns).min(1.0) / flow(copy.batches, handed.batches),
            decode: (working / workers).max(on_cores).min(1.0) / prepared,
            storage: share(storage.busy_ns).min(1.0) / prepared,
            order: share(order.busy_ns).min(1.0) / prepared,
            prepared,
            depth_filled: ratio(storage.in_flight_ns as f64, storage.busy_ns as f64 * f64::from(storage.depth.max(1)))
                .min(1.0),
            headroom: Headroom::of(storage),
            working: working.min(workers),
            cpu_share,
            on_cpu,
            no_slot: share(order.no_slot_ns).min(1.0),
            no_room: share(storage.blocked_ns).min(1.0),
            no_buffer: share(copy.blocked_ns).min(1.0),
            slots: [slots.free_ns, slots.filling_ns, slots.full_ns, slots.held_ns]
                .map(|ns| share(ns).min(f64::from(slots.count))),
        })
    }

    /// The highest load, at least 1: above 1 where samples that were handed out had been prepared before the first batch, and
    /// some stage could not keep up with that.
    pub(super) fn over(&self) -> f64 {
        STAGES.into_iter().map(|stage| self.load(stage)).fold(1.0, f64::max)
    }

    /// Samples per second that can be kept up: those handed out, without what was ready before the first batch.
    pub(super) fn sustained(&self) -> f64 {
        self.items_per_s / self.over()
    }

    pub(super) fn samples_per_batch(&self) -> f64 {
        ratio(self.items_per_s * self.steady_ns / 1e9, self.batches)
    }

    /// A stage's load to compare with others: for storage, the middle of its bounds.
    pub(super) fn likely(&self, stage: Cause) -> f64 {
        if stage == Cause::Storage { 0.5 * self.storage * (1.0 + self.depth_filled) } else { self.load(stage) }
    }

    /// How much of the time that the planner did not compute it had no slot, or else rows or full slots no room.
    pub(super) fn lacks_room(&self) -> f64 {
        // Where most are free it is not slots that lack.
        let free = ratio(self.slots[0], self.slots.iter().sum());
        let slots = if free > 0.5 { 0.0 } else { ratio(self.no_slot, 1.0 - self.order.min(1.0) + 1e-3) };
        slots.max(self.no_room).max(self.no_buffer).min(1.0)
    }

    /// 0 when it is not known.
    pub(super) fn consumer(&self) -> f64 {
        self.starved.map_or(0.0, |starved| 1.0 - starved)
    }

    pub(super) fn load(&self, stage: Cause) -> f64 {
        match stage {
            Cause::Consumer => self.consumer(),
            Cause::Copy => self.copy,
            Cause::Decode => self.decode,
            Cause::Storage => self.storage,
            Cause::Order => self.order,
            _ => 0.0,
        }
    }

    /// Samples per second at which a stage would be saturated; `None` when it did nothing.
    pub(super) fn ceiling(&self, stage: Cause) -> Option<f64> {
        let load = self.load(stage);
        (load > 0.0).then(|| (self.items_per_s / load).min(f64::MAX))
    }

    /// Whether there may be more in a stage than its ceiling says.
    pub(super) fn at_least(&self, stage: Cause) -> bool {
        stage == Cause::Storage && self.depth_filled < FILLED
    }

    /// All stages that did something, from the consumer upstream.
    pub(super) fn stages(&self) -> Vec<StageLoad> {
        let stage = |stage| {
            let ceiling_items_per_s = self.ceiling(stage)?;
            Some(StageLoad {
                stage,
                utilisation: self.load(stage).min(1.0),
                demand_ns_per_batch: self.load(stage) * self.steady_ns / self.batches,
                ceiling_items_per_s,
                at_least: self.at_least(stage),
            })
        };
        STAGES.into_iter().filter_map(stage).collect()
    }
}

/// From the consumer upstream.
pub(super) const STAGES: [Cause; 5] = [Cause::Consumer, Cause::Copy, Cause::Decode, Cause::Storage, Cause::Order];

/// Reads count as filling the depth from this share of it on.
pub(super) const FILLED: f64 = 0.9;

/// On a GPU what its stream waited, scaled to all steps from those that were measured; on the host what `next()` waited.
fn starved(snapshot: &Snapshot, told: f64, steady: f64) -> Option<f64> {
    let consumer = &snapshot.consumer;
    match &consumer.gpu {
        Some(gpu) if gpu.steps > 0 => {
            let all = ratio(consumer.handed().batches as f64, gpu.steps as f64).max(1.0);
            Some(ratio(gpu.starved_ns as f64 * all, steady).min(1.0))
        }
        None if snapshot.copy.is_none() => Some(ratio(consumer.waited_ns as f64, told).min(1.0)),
        _ => None,
    }
}

/// The shares of [`Loads::cpu_share`] and [`Loads::on_cpu`].
fn on_cpu(decode: &Decode) -> (f64, f64) {
    let busy = decode.busy_ns as f64;
    match (decode.cpu_ns, decode.delay_ns) {
        (Some(cpu), Some(delay)) if cpu > 0 => {
            let runnable = cpu as f64 + delay as f64;
            (cpu as f64 / runnable, if busy > 0.0 { (runnable / busy).clamp(0.01, 1.0) } else { 1.0 })
        }
        // Without the delay all that is missing counts as such.
        (Some(cpu), None) => (ratio(cpu as f64, busy).min(1.0), 1.0),
        _ => (1.0, 1.0),
    }
}

/// 0 for nothing of nothing.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
