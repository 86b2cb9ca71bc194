//! Computes the load of each stage from a snapshot, as input of the verdict and the what-if model.
//! No I/O.
//!
//! ```text
//! load of a stage = time that its work took ÷ (its servers × steady time)
//! ```
//!
//! By the utilisation law a stage's load is throughput × its demand per batch, for any queues, any
//! variation of times and any number of slots. So the loads of two stages are in proportion to
//! their demands, the slowest stage has the highest load, and throughput ÷ load is the throughput
//! at which a stage is saturated.
//!
//! | stage | servers | load | the measure is |
//! |---|---|---|---|
//! | consumer | 1 | 1 − starved share | exact; on a GPU by events on its stream, unknown without them |
//! | copy | 1, its stream | copies and the operations after them | exact |
//! | decode | workers, or cores if there are fewer | busy, or CPU time | exact |
//! | order | 1 | busy | exact |
//! | storage | ? | busy | an upper bound |
//!
//! Storage has as many servers as the device has channels, an unknown number. A read in flight does
//! not show whether an additional one would have been slower. So storage counts as busy while
//! anything is in flight. That is correct if reads fill the depth, and too high if small batches
//! wait for the latency of a few reads; the ceiling is then a lower bound, and marked as one. A
//! lower bound of the load is the mean share of the depth that was filled. Comparisons with other
//! stages use the middle of both bounds.
//!
//! Threads that are ready and get no core count as busy or as waiting, whichever they were. So the
//! loads do not distinguish a slow stage from a stage without a core, but the kernel's run delay of
//! each thread does. The CPU time of the process then shows what takes the cores: the process
//! itself, or other programs or ranks. If only the loader's own threads fill the cores, cores are
//! not lacking: that stage is the cause.
//!
//! In short epochs many samples are prepared before the first batch is handed out. In the steady
//! time the stages then work on fewer samples than the consumer gets, so their loads are scaled up
//! to the consumer's number of samples.

use super::depth::{Headroom, network_share};
use crate::meter::{Cpu, DecodeStage, PipelineStage, Snapshot, StorageStage};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What limits a loader: a [stage](PipelineStage), or something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// The consumer is not starved: its own work takes the time.
    NotStarved,
    /// The consumer's own work, although it waits now and then: no stage is slower than the
    /// consumer.
    Consumer,
    /// Reads from storage.
    Storage,
    /// Decode workers: decoding, transforms, copies from memory and the page cache.
    Decode,
    /// The caller's `map_batch`, which decode workers run.
    MapBatch,
    /// Copies to the device, and the operations after them on the same stream.
    Copy,
    /// The planner's thread: it chooses samples, finds their extents and submits reads.
    Order,
    /// No stage is saturated, because too few slots (or bytes, or batches on the device) keep the
    /// stages from working at the same time.
    MemoryBudget,
    /// No stage is saturated, and slots are not lacking: handing over batches from thread to thread
    /// takes the time.
    HandOver,
    /// Reads of bytes in the page cache or in another file system in memory: copies by the reader's
    /// threads.
    PageCache,
    /// The loader's threads were ready but had no core: other programs had the cores.
    OtherPrograms,
    /// The loader's threads were ready but had no core: other ranks of the job had the cores.
    LocalRanks,
    /// The loader's threads were ready but had no core: other threads of the process had the cores.
    OwnThreads,
    /// The CPU quota of the process's control group was used up.
    CpuQuota,
    /// Nothing was measured, or too little: on a GPU, no step of the consumer's stream.
    Unknown,
}

impl From<PipelineStage> for Cause {
    fn from(stage: PipelineStage) -> Self {
        match stage {
            PipelineStage::Order => Self::Order,
            PipelineStage::Storage => Self::Storage,
            PipelineStage::Decode => Self::Decode,
            PipelineStage::Copy => Self::Copy,
            PipelineStage::Consumer => Self::Consumer,
        }
    }
}

impl Cause {
    /// The stage, if the cause is a stage.
    pub(super) fn stage(self) -> Option<PipelineStage> {
        PipelineStage::UPSTREAM
            .into_iter()
            .find(|stage| Self::from(*stage) == self)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(stage) = self.stage() {
            return stage.fmt(f);
        }
        f.write_str(match self {
            Self::MapBatch => "`map_batch`",
            Self::MemoryBudget => "the prefetch buffers",
            Self::HandOver => "handing over",
            Self::PageCache => "reads from memory",
            Self::OtherPrograms => "other programs on the cores",
            Self::LocalRanks => "the ranks of this machine on the cores",
            Self::OwnThreads => "other threads of this process on the cores",
            Self::CpuQuota => "the CPU quota",
            Self::NotStarved => return PipelineStage::Consumer.fmt(f),
            _ => "nothing known",
        })
    }
}

/// The load of one stage, as measured or as predicted for a change. Reports omit stages without
/// work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StageLoad {
    /// The stage.
    pub stage: PipelineStage,
    /// Share of the time in which the stage works: 0 … 1.
    pub utilisation: f64,
    /// Nanoseconds that the whole stage takes per batch, with all its workers or all reads in
    /// flight.
    pub demand_ns_per_batch: f64,
    /// Samples per second that the stage would reach if it never waited.
    pub ceiling_items_per_s: f64,
    /// Whether the ceiling is a lower bound.
    pub at_least: bool,
}

/// A snapshot as shares of the steady time. All are finite and not negative, for any snapshot.
#[derive(Clone, Debug)]
pub(super) struct Loads {
    pub(super) steady_ns: f64,
    pub(super) batches: f64,
    pub(super) items_per_s: f64,
    /// Share of the steady time in which the consumer waited for a batch; `None` on a GPU without a
    /// measured step. The host's wait is no measure there: the host also waits for batches ahead of
    /// the stream.
    pub(super) starved: Option<f64>,
    pub(super) copy: f64,
    pub(super) decode: f64,
    pub(super) storage: f64,
    pub(super) order: f64,
    /// Samples that workers finished in the steady time per sample handed out, at most 1.
    pub(super) prepared: f64,
    /// Mean number of reads in flight while there are any, as a share of the depth.
    pub(super) depth_filled: f64,
    /// The gain of more reads in flight, if the depth is filled.
    pub(super) headroom: Headroom,
    /// Mean number of busy workers.
    pub(super) working: f64,
    /// Share of the workers' runnable time with a core; 1 when it is not known.
    pub(super) cpu_share: f64,
    /// Share of the workers' busy time in which they were runnable; in the rest they were blocked.
    /// 1 when it is not known.
    pub(super) on_cpu: f64,
    /// Cores that the process may use, including a fraction from its quota; infinite when it is not
    /// known.
    pub(super) cores: f64,
    /// Time in which the loader's threads were ready but had no core, as a share of the steady
    /// time. Threads that waited one after the other add up.
    pub(super) lost: f64,
    /// What takes the cores, if `lost` is large.
    pub(super) taken: Option<Cause>,
    /// Whether the bytes that readers delivered came from memory.
    pub(super) from_memory: bool,
    /// Shares of the steady time in which the planner had no slot, and in which rows had no room or
    /// a full slot had no room on the device.
    pub(super) no_slot: f64,
    pub(super) no_room: f64,
    pub(super) no_buffer: f64,
    /// Mean number of free, filling, full and held slots.
    pub(super) slots: [f64; 4],
}

impl Loads {
    /// `None` when no batch or no time was measured.
    pub(super) fn of(snapshot: &Snapshot) -> Option<Self> {
        let Snapshot {
            consumer,
            order,
            storage,
            decode,
            copy,
            slots,
            ..
        } = snapshot;
        let told = consumer.waited_ns.saturating_add(consumer.user_ns);
        let steady = if snapshot.steady_ns > 0 {
            snapshot.steady_ns
        } else {
            told
        } as f64;
        let handed = consumer.handed();
        if steady == 0.0 || handed.batches == 0 {
            return None;
        }
        let share = |ns: u64| ratio(ns as f64, steady);
        // The measured work is for fewer samples than were handed out: the load for all is higher.
        let flow = |done: u64, of: u64| {
            if done == 0 {
                1.0
            } else {
                ratio(done as f64, of as f64).clamp(0.02, 1.0)
            }
        };
        let prepared = flow(
            decode.samples.saturating_add(storage.in_place),
            handed.samples,
        );
        let workers = f64::from(decode.workers.max(1));
        let working = share(decode.busy_ns);
        // Workers beyond the cores only wait for each other.
        let on_cores = match (decode.cpu_ns, decode.cores) {
            (Some(cpu), 1..) => share(cpu) / f64::from(decode.cores),
            _ => 0.0,
        };
        let (cpu_share, on_cpu) = on_cpu(decode);
        let cores = cores(snapshot);
        let lost = share(lost(snapshot, working));
        let copy = copy.clone().unwrap_or_default();
        Some(Self {
            steady_ns: steady,
            batches: handed.batches as f64,
            items_per_s: handed.samples as f64 / steady * 1e9,
            starved: starved(snapshot),
            // Operations run in parallel with the copies.
            copy: share(copy.busy_ns.max(copy.ops_ns)).min(1.0)
                / flow(copy.batches, handed.batches),
            decode: (working / workers).max(on_cores).min(1.0) / prepared,
            storage: share(storage.busy_ns).min(1.0) / prepared,
            order: share(order.busy_ns).min(1.0) / prepared,
            prepared,
            depth_filled: ratio(
                storage.in_flight_ns as f64,
                storage.busy_ns as f64 * f64::from(storage.depth.max(1)),
            )
            .min(1.0),
            headroom: Headroom::of(storage),
            working: working.min(workers),
            cpu_share,
            on_cpu,
            cores,
            lost,
            taken: taken(snapshot, lost, cores * steady),
            from_memory: from_memory(storage),
            no_slot: share(order.no_slot_ns).min(1.0),
            no_room: share(storage.blocked_ns).min(1.0),
            no_buffer: share(copy.blocked_ns).min(1.0),
            slots: [
                slots.free_ns,
                slots.filling_ns,
                slots.full_ns,
                slots.held_ns,
            ]
            .map(|ns| share(ns).min(f64::from(slots.count))),
        })
    }

    /// The highest load of any stage, at least 1. It is above 1 if samples had been prepared before
    /// the first batch and a stage could not keep up with the rate.
    pub(super) fn over(&self) -> f64 {
        PipelineStage::UPSTREAM
            .into_iter()
            .map(|stage| self.load(stage))
            .fold(1.0, f64::max)
    }

    /// The sustainable rate in samples per second, which does not count on samples that were ready
    /// before the first batch.
    pub(super) fn sustained(&self) -> f64 {
        self.items_per_s / self.over()
    }

    pub(super) fn samples_per_batch(&self) -> f64 {
        ratio(self.items_per_s * self.steady_ns / 1e9, self.batches)
    }

    /// A stage's load to compare with others: for storage, the middle of its bounds.
    pub(super) fn likely(&self, stage: PipelineStage) -> f64 {
        if stage == PipelineStage::Storage {
            0.5 * self.storage * (1.0 + self.depth_filled)
        } else {
            self.load(stage)
        }
    }

    /// Share of the time without room: the planner had no slot while it did not compute, or rows or
    /// full slots had no room.
    pub(super) fn lacks_room(&self) -> f64 {
        // If most slots are free, slots are not lacking.
        let free = ratio(self.slots[0], self.slots.iter().sum());
        let slots = if free > 0.5 {
            0.0
        } else {
            ratio(self.no_slot, 1.0 - self.order.min(1.0) + 1e-3)
        };
        slots.max(self.no_room).max(self.no_buffer).min(1.0)
    }

    /// Whether the consumer works between two batches, so that there is a demand. A loop without
    /// own work has none.
    pub(super) fn has_demand(&self) -> bool {
        self.starved.is_none() || self.consumer() * self.steady_ns / self.batches >= STEP_LEAST_NS
    }

    /// 0 when it is not known.
    pub(super) fn consumer(&self) -> f64 {
        self.starved.map_or(0.0, |starved| 1.0 - starved)
    }

    pub(super) fn load(&self, stage: PipelineStage) -> f64 {
        match stage {
            PipelineStage::Consumer => self.consumer(),
            PipelineStage::Copy => self.copy,
            PipelineStage::Decode => self.decode,
            PipelineStage::Storage => self.storage,
            PipelineStage::Order => self.order,
        }
    }

    /// Whether a stage's ceiling is a lower bound.
    pub(super) fn at_least(&self, stage: PipelineStage) -> bool {
        stage == PipelineStage::Storage && self.depth_filled < FILLED
    }

    /// All stages with work, from the consumer upstream.
    pub(super) fn stages(&self) -> Vec<StageLoad> {
        self.with_work(PipelineStage::UPSTREAM.map(|stage| (stage, self.load(stage))))
    }

    /// The stages with work, for these loads at the measured rate.
    pub(super) fn with_work(&self, loads: [(PipelineStage, f64); 5]) -> Vec<StageLoad> {
        loads
            .into_iter()
            .filter(|(_, load)| *load > 0.0)
            .map(|(stage, load)| StageLoad {
                stage,
                utilisation: load.min(1.0),
                demand_ns_per_batch: (load * self.steady_ns / self.batches).min(f64::MAX),
                ceiling_items_per_s: (self.items_per_s / load).min(f64::MAX),
                at_least: self.at_least(stage),
            })
            .collect()
    }
}

/// If less than this share of the samples was prepared in the steady time, most samples were ready
/// before the first batch.
pub(super) const PREPARED_LEAST: f64 = 0.5;
/// Reads count as filling the depth if at least this share of it is in flight.
pub(super) const FILLED: f64 = 0.9;

/// A consumer with less own work than this for each batch only measures the loader.
const STEP_LEAST_NS: f64 = 0.5e6;
/// A lack of cores counts as the limit from this share of the time on. Other programs count as the
/// reason for it if they took this share of the cores.
pub(super) const LOST: f64 = 0.15;
/// A process fills the cores by itself from this share of them on. Used only if the time of others
/// is not known.
const ALL_CORES: f64 = 0.8;
/// Threads that are not the loader's take the cores from this share of the process's CPU time on.
const NOT_OURS: f64 = 0.3;
/// From this share of throttled periods on, the CPU quota counts as a limit.
const THROTTLED: f64 = 0.1;
/// Bytes were in memory if devices read less than this part of them.
const FROM_DEVICES: f64 = 0.05;

/// See [`Loads::cores`]. The number of cores is the quota without its fraction.
fn cores(snapshot: &Snapshot) -> f64 {
    let whole = match snapshot.decode.cores {
        0 => f64::INFINITY,
        cores => f64::from(cores),
    };
    let quota = snapshot.cpu.as_ref().and_then(|cpu| cpu.quota);
    quota.filter(|quota| *quota < whole + 1.0).unwrap_or(whole)
}

/// Nanoseconds that the loader's threads were runnable without a core. Workers wait in parallel,
/// the others in turn. The consumer's thread counts while it waits for a batch, not in its own work.
fn lost(snapshot: &Snapshot, working: f64) -> u64 {
    let consumer = &snapshot.consumer;
    let delays = [
        snapshot.order.delay_ns,
        consumer.delay_ns.map(|delay| delay.min(consumer.waited_ns)),
        snapshot.copy.as_ref().and_then(|copy| copy.delay_ns),
        snapshot
            .decode
            .delay_ns
            .map(|delay| (delay as f64 / working.max(1.0)) as u64),
    ];
    delays.into_iter().flatten().fold(0, u64::saturating_add)
}

/// The cause that takes the cores; `None` if the loader's own work fills them, or the kernel does
/// not count.
fn taken(snapshot: &Snapshot, lost: f64, capacity: f64) -> Option<Cause> {
    let cpu = snapshot.cpu.as_ref()?;
    if ratio(cpu.throttled as f64, cpu.periods as f64) >= THROTTLED {
        return Some(Cause::CpuQuota);
    }
    if lost < LOST || capacity.is_infinite() {
        return None;
    }
    let process = cpu.process_ns as f64;
    let loaders = cpu.loaders_ns as f64;
    let others = match cpu.others_ns {
        Some(others) => others as f64 >= (LOST * capacity).max(process - loaders),
        // If the process itself used most of the cores, other programs cannot have taken them.
        None => process < ALL_CORES * capacity,
    };
    match others {
        true if are_ranks(cpu) => Some(Cause::LocalRanks),
        true => Some(Cause::OtherPrograms),
        false => (process - loaders >= NOT_OURS * process).then_some(Cause::OwnThreads),
    }
}

/// Whether the other ranks that share these cores account for most of what others took, if each uses as
/// much CPU time as this one.
fn are_ranks(cpu: &Cpu) -> bool {
    let ranks = u64::from(cpu.sharing_ranks.saturating_sub(1)).saturating_mul(cpu.process_ns);
    cpu.others_ns
        .is_some_and(|others| ranks as f64 >= 0.5 * others as f64)
        && ranks > 0
}

/// Whether the bytes that readers delivered were in memory. Network file systems have no devices.
fn from_memory(storage: &StorageStage) -> bool {
    let devices = storage
        .device_bytes
        .map(|bytes| bytes.max(storage.direct_bytes));
    let buffered = storage.counts.bytes_moved > 0 && network_share(storage) == 0.0;
    buffered
        && devices
            .is_some_and(|bytes| (bytes as f64) < FROM_DEVICES * storage.counts.bytes_moved as f64)
}

/// On a GPU the wait of its stream, as a share of the measured steps; on the host the wait of
/// `next()`.
fn starved(snapshot: &Snapshot) -> Option<f64> {
    match &snapshot.consumer.gpu {
        Some(gpu) if gpu.steps > 0 && gpu.span_ns > 0 => {
            Some(ratio(gpu.starved_ns as f64, gpu.span_ns as f64).min(1.0))
        }
        None if snapshot.copy.is_none() => Some(snapshot.waited_share()),
        _ => None,
    }
}

/// The shares of [`Loads::cpu_share`] and [`Loads::on_cpu`].
fn on_cpu(decode: &DecodeStage) -> (f64, f64) {
    let busy = decode.busy_ns as f64;
    match (decode.cpu_ns, decode.delay_ns) {
        (Some(cpu), Some(delay)) if cpu > 0 => {
            let runnable = cpu as f64 + delay as f64;
            (
                cpu as f64 / runnable,
                if busy > 0.0 {
                    (runnable / busy).clamp(0.01, 1.0)
                } else {
                    1.0
                },
            )
        }
        // If the kernel reports no run delay, all busy time without CPU counts as run delay.
        (Some(cpu), None) => (ratio(cpu as f64, busy).min(1.0), 1.0),
        _ => (1.0, 1.0),
    }
}

/// `part` / `whole`; 0 if `whole` is 0.
pub(super) fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
