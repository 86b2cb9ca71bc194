//! Compares the ranks of a job: which ranks delay the steps, by how much, and why. No I/O.
//!
//! ```text
//! the ranks of a synchronous step wait for the last one:
//!     time of a step = work + the longest wait for a batch of any rank
//!     cost of ranks R = mean over steps of  max(0, longest wait in R − longest wait of the others)
//! ```
//!
//! The waits of the last steps are compared step by step, so that hiccups of all ranks in turn are
//! not attributed to one. Ranks count as late if they cost at least [`COSTS`] of a step and are
//! last in more steps than chance explains. More than half of the ranks count as late if each of
//! them alone waits longer than all of the others in more steps than chance explains. All ranks
//! count as late if each waits for at least [`ALL_WAIT`] of a step.
//!
//! The cause is the stage whose time for a batch exceeds the other ranks' time by the most. So a
//! slow decoder is named even if a lack of slots keeps its workers from being busy all the time,
//! because the other ranks have the same number of slots.
//!
//! If no waits show a late rank, the time for which a CPU quota kept a process off its cores may
//! show it. Such a rank is late with its own part of the step. Other programs take cores from all
//! ranks in turn, so their means prove nothing.
//!
//! # Limits
//!
//! - If a rank's own part of the step is longer, the other ranks wait for it within the step. The
//!   time between two batches is then the same on all ranks, and so are the waits for batches. So a
//!   stopped process, a thread that holds an interpreter's lock, another program on the core, or
//!   more work are seen only with `Loader::arrive`.
//! - The five longest steps of the window count as pauses, such as a checkpoint. A rank that is
//!   stopped now and then is seen only after it was stopped in more than five steps.
//! - The cost of a quota is an estimate: the time that it keeps threads off a core. Other threads
//!   may not wait for this time, and several threads of a step may lose it one after the other.
//! - On a GPU the host's waits are not waits of the stream. There, means of the stream's waits in
//!   the whole run are compared, without a test of chance. Means are also compared for ranks of
//!   different steps (epoch and batch), which share fewer than [`STEPS_LEAST`].
//! - A rank's cause is computed from its whole run, not only from the compared steps.

#[cfg(test)]
mod tests_by_model;

use super::load::{Cause, Loads};
use super::verdict::Verdict;
use super::words::{number, time};
use crate::meter::{PipelineStage, Snapshot, Timeline};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Measurements of one rank for [`Across::of`]: below 4 KiB as JSON, with arrivals 6 KiB.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RankReport {
    /// The rank.
    pub rank: u32,
    /// Ranks of the job.
    pub world: u32,
    /// Name of the rank's machine.
    pub host: String,
    /// Batches handed out.
    pub batches: u64,
    /// Samples per second.
    pub items_per_s: f64,
    /// Mean time between two batches in nanoseconds, over the last batches, without pauses.
    pub step_ns: f64,
    /// Share of the time without a ready batch.
    pub starved_share: f64,
    /// What limits the rank's loader.
    pub cause: Option<Cause>,
    /// What would limit the loader if nothing else took its cores.
    pub stage: Option<Cause>,
    /// Samples handed out.
    pub samples: u64,
    /// Rows in which another sample replaces a bad one.
    pub bad_samples: u64,
    /// Time per batch in which the rank's consumer was ready to run but had no core, in
    /// nanoseconds.
    pub without_core_ns: f64,
    /// CPU time of the rank's decode workers per batch, in nanoseconds.
    pub decode_cpu_ns: f64,
    /// What takes this rank's cores, if it takes a large share.
    pub cores_taken_by: Option<Cause>,
    /// Time per batch for which a CPU quota kept the process off its cores, in nanoseconds.
    pub throttled_ns: f64,
    /// Working time of each stage per batch, with all its workers, or all reads in flight; without
    /// waits for a core. In nanoseconds.
    pub work_ns: Vec<(Cause, f64)>,
    /// Time of reads in flight per batch, summed over the reads, in nanoseconds.
    pub reads_ns: f64,
    /// Batch slots.
    pub slots: u32,
    /// Whether the batches are on a GPU, where the host's waits are not starvation.
    pub on_device: bool,
    /// The last waits, in microseconds: epoch, first batch, and the wait for each batch from there
    /// on. Empty in an [`Across`].
    pub waits: Vec<(u64, u64, Vec<u32>)>,
    /// The rank's own part of these steps in microseconds, from the batch to
    /// `Loader::arrive`; the maximum `u32` if it is not known. Empty if
    /// none is known.
    pub own_us: Vec<u32>,
}

/// Maximum number of waits in a [`RankReport`].
const WAITS: usize = 256;
/// Ranks with fewer common steps are compared by their means.
const STEPS_LEAST: usize = 16;
/// Ranks that are last in fewer steps of the half used for testing may be last by chance.
const LAST_LEAST: f64 = 3.0;
/// The number of steps whose longest waits may be pauses.
const PAUSES: usize = 5;
/// Maximum number of ranks without a report that are named.
const MISSING_MOST: usize = 1 << 16;
/// Maximum rows of the table; those with the longest starvation are shown.
const ROWS_MOST: usize = 64;
/// Maximum runs of waits in a report: short epochs give many.
const RUNS: usize = 64;
/// Ranks that cost less than this share of a step are not reported.
const COSTS: f64 = 0.03;
/// Like [`COSTS`], for ranks that lacked cores but did not wait for batches.
const LACKS_CORES: f64 = 0.1;
/// If all ranks wait for this share of a step, all are late.
const ALL_WAIT: f64 = 0.05;
/// A stage is the cause of a wait if it explains at least this share of it.
const EXPLAINS: f64 = 0.2;
/// A stage that works for this share of the step limits the rank, or nearly so.
const FULL: f64 = 0.8;
/// A rank whose work for a batch is at least this share of the slow ranks' work counts as equally
/// slow.
const AS_SLOW: f64 = 0.9;
/// By how many standard deviations a count must exceed the count expected by chance.
const BEYOND_CHANCE: f64 = 4.0;

impl RankReport {
    /// The report of a loader of this rank of `world`, on the machine `host`.
    pub fn of(rank: u32, world: u32, host: &str, snapshot: &Snapshot, timeline: &Timeline) -> Self {
        let verdict = Verdict::of(snapshot);
        let handed = snapshot.consumer.handed();
        let loads = Loads::of(snapshot);
        let each = |amount: f64| {
            if handed.batches > 0 {
                amount / handed.batches as f64
            } else {
                0.0
            }
        };
        let mean_ns = each(snapshot.steady_ns as f64);
        let mut waits: Vec<(u64, u64, Vec<u32>)> = Vec::new();
        let steady = timeline.batches.iter().filter(|record| !record.first);
        let mut own_us = Vec::new();
        let us =
            |from: u64, to: u64| u32::try_from(to.saturating_sub(from) / 1000).unwrap_or(u32::MAX);
        for record in steady
            .rev()
            .take(WAITS)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
        {
            own_us.push(if record.arrived_ns > 0 {
                us(record.got_ns, record.arrived_ns)
            } else {
                u32::MAX
            });
            let us = us(record.asked_ns, record.got_ns);
            match waits.last_mut() {
                Some((epoch, first, run))
                    if (*epoch, *first + run.len() as u64) == (record.epoch, record.batch) =>
                {
                    run.push(us)
                }
                _ => waits.push((record.epoch, record.batch, vec![us])),
            }
        }
        let left_out: usize = waits
            .drain(..waits.len().saturating_sub(RUNS))
            .map(|(_, _, run)| run.len())
            .sum();
        own_us.drain(..left_out);
        if own_us.iter().all(|us| *us == u32::MAX) {
            own_us.clear();
        }
        Self {
            rank,
            world,
            host: host.chars().take(255).collect(),
            batches: snapshot.consumer.batches,
            samples: snapshot.consumer.samples,
            items_per_s: if mean_ns > 0.0 {
                each(handed.samples as f64) / mean_ns * 1e9
            } else {
                0.0
            },
            step_ns: mean_step(timeline).unwrap_or(mean_ns),
            starved_share: verdict.starved_share,
            cause: Some(verdict.cause),
            stage: Some(
                Verdict::of(&Snapshot {
                    cpu: None,
                    ..snapshot.clone()
                })
                .cause,
            ),
            bad_samples: snapshot.consumer.substituted,
            without_core_ns: each(snapshot.consumer.delay_ns.unwrap_or(0) as f64),
            decode_cpu_ns: each(snapshot.decode.cpu_ns.unwrap_or(0) as f64),
            cores_taken_by: loads.as_ref().and_then(|loads| loads.taken),
            throttled_ns: each(snapshot.cpu.as_ref().map_or(0, |cpu| cpu.throttled_ns) as f64),
            work_ns: loads
                .map(|loads| work(&loads, snapshot))
                .unwrap_or_default(),
            reads_ns: each(snapshot.storage.in_flight_ns as f64),
            slots: snapshot.slots.count,
            on_device: snapshot.copy.is_some(),
            waits,
            own_us,
        }
    }

    /// For each batch the wait for it and, if known, the rank's own part of its step, in
    /// nanoseconds.
    fn by_step(&self) -> BTreeMap<(u64, u64), (f64, Option<f64>)> {
        let ns = |us: u32| 1e3 * f64::from(us);
        let waits = self.waits.iter().flat_map(|(epoch, first, waits)| {
            waits
                .iter()
                .zip(*first..u64::MAX)
                .map(|(us, batch)| ((*epoch, batch), *us))
        });
        let own = |at: usize| {
            self.own_us
                .get(at)
                .copied()
                .filter(|us| *us < u32::MAX)
                .map(ns)
        };
        waits
            .enumerate()
            .map(|(at, (step, wait))| (step, (ns(wait), own(at))))
            .collect()
    }

    /// The work of a stage for a batch, to compare with that of other ranks. For storage it is the
    /// sum of all reads: if enough reads are in flight, the time with any in flight is the whole
    /// step.
    fn effort_of(&self, stage: Cause) -> f64 {
        match stage {
            Cause::Storage | Cause::PageCache => self.reads_ns,
            stage => self.work_of(stage),
        }
    }

    fn work_of(&self, stage: Cause) -> f64 {
        self.work_ns
            .iter()
            .filter(|(cause, _)| *cause == stage)
            .map(|(_, ns)| ns)
            .sum()
    }
}

/// The mean time between the last batches of an iterator in nanoseconds, without pauses.
fn mean_step(timeline: &Timeline) -> Option<f64> {
    let last = timeline
        .batches
        .iter()
        .rev()
        .take(WAITS + 1)
        .collect::<Vec<_>>();
    let follow = last.windows(2).filter(|pair| !pair[0].first);
    let steps = follow.map(|pair| vec![pair[0].got_ns.saturating_sub(pair[1].got_ns) as f64]);
    let steps = without_pauses(steps.collect());
    (!steps.is_empty()).then(|| steps.iter().flatten().sum::<f64>() / steps.len() as f64)
}

/// The work of all stages but the consumer for a batch: see [`RankReport::work_ns`].
fn work(loads: &Loads, snapshot: &Snapshot) -> Vec<(Cause, f64)> {
    let decode = &snapshot.decode;
    let of_busy = |ns: u64| (ns as f64 / decode.busy_ns.max(1) as f64).min(1.0);
    let maps = of_busy(decode.map_batch_ns);
    let mut all = Vec::new();
    for stage in loads.stages() {
        let ns = stage.demand_ns_per_batch;
        match stage.stage {
            PipelineStage::Consumer => {}
            PipelineStage::Decode => {
                let on_core = ns * (1.0 - of_busy(decode.delay_ns.unwrap_or(0)));
                all.extend([
                    (Cause::Decode, on_core * (1.0 - maps)),
                    (Cause::MapBatch, on_core * maps),
                ]);
            }
            PipelineStage::Storage if loads.from_memory => all.push((Cause::PageCache, ns)),
            stage => all.push((stage.into(), ns)),
        }
    }
    all
}

/// All ranks in one view. `Display` is a table and a sentence.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Across {
    /// The ranks that reported, in the order of their numbers. The cause of a late rank is relative
    /// to the other ranks.
    pub ranks: Vec<RankReport>,
    /// Ranks without a report.
    pub missing: Vec<u32>,
    /// Steps that were compared; 0 if means were compared.
    pub steps: u64,
    /// Whether the reports were enough to compare the ranks.
    pub compared: bool,
    /// Whether the ranks' own parts of the steps were compared, too: each calls
    /// `Loader::arrive`.
    pub own_parts: bool,
    /// Mean lateness of the last rank of each step, whichever it was, in nanoseconds: its wait for
    /// the batch, plus its own part if own parts were compared.
    pub last_ns: f64,
    /// The ranks that delay the others.
    pub late: Option<Late>,
}

/// How many of the ranks are late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HowMany {
    /// At most half of them.
    Few,
    /// More than half.
    Most,
    /// All of them: there are no others to delay.
    All,
}

/// Ranks that delay the others, or all ranks if all wait for their batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Late {
    /// The ranks.
    pub ranks: Vec<u32>,
    /// Whether these are few, most or all of the ranks.
    pub how_many: HowMany,
    /// The machine of these ranks, if they are all of its ranks, and other machines have ranks,
    /// too.
    pub host: Option<String>,
    /// The time in nanoseconds by which a step would be shorter if these ranks were like the
    /// others; for all ranks, if they had no waits.
    pub cost_ns: f64,
    /// The same as a share of the step.
    pub share: f64,
    /// The stage with the most work beyond that of the others, for most of these ranks; for all
    /// ranks, their limit.
    pub cause: Cause,
    /// Whether a CPU quota kept their own threads off a core, too: their batches are not the whole
    /// cause.
    pub without_core: bool,
    /// The share of bad samples on these ranks, if the other ranks had less than half of it.
    pub bad_share: Option<f64>,
}

impl Across {
    /// Compares the ranks of these reports. Of several reports with the same rank, the last one
    /// counts.
    pub fn of(reports: impl IntoIterator<Item = RankReport>) -> Self {
        let by_rank: BTreeMap<u32, RankReport> = reports
            .into_iter()
            .map(|report| (report.rank, report))
            .collect();
        let world = by_rank
            .values()
            .map(|report| report.world)
            .max()
            .unwrap_or(0);
        let missing = (0..world)
            .filter(|rank| !by_rank.contains_key(rank))
            .take(MISSING_MOST)
            .collect();
        let mut ranks: Vec<RankReport> = by_rank.into_values().collect();
        let compared = world == 1 || is_comparable(&ranks);
        let mut view = Self {
            missing,
            compared,
            ..Self::default()
        };
        if compared && ranks.len() > 1 {
            let steps = Steps::of(&ranks);
            view.steps = steps.count;
            view.own_parts = steps.late.is_some();
            view.last_ns = mean_longest(steps.late.as_ref().unwrap_or(&steps.waits));
            view.late = find(&ranks, &steps)
                .map(|found| found.widened(&ranks, &steps).explained(&mut ranks, &steps));
        }
        for rank in &mut ranks {
            rank.waits.clear();
            rank.own_us.clear();
        }
        Self { ranks, ..view }
    }
}

/// The median of a value over ranks; 0 without ranks.
fn median<'a>(
    ranks: impl IntoIterator<Item = &'a RankReport>,
    value: impl Fn(&RankReport) -> f64,
) -> f64 {
    let mut values: Vec<f64> = ranks.into_iter().map(value).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Whether the reports suffice: several ranks, some steps of each, on a GPU its idle time.
fn is_comparable(ranks: &[RankReport]) -> bool {
    let waits = |rank: &RankReport| {
        rank.waits
            .iter()
            .map(|(_, _, waits)| waits.len())
            .sum::<usize>()
    };
    ranks.len() > 1
        && ranks.iter().all(|rank| {
            waits(rank) >= STEPS_LEAST && (!rank.on_device || rank.cause != Some(Cause::Unknown))
        })
}

/// The steps that all ranks have in common. Times are in nanoseconds, indexed by step and by the
/// rank's position in the list.
struct Steps {
    /// Waits for the batch of the step. If too few steps are common: one step of means.
    waits: Vec<Vec<f64>>,
    /// How much later each rank arrived than the first: its wait plus its own part of the step,
    /// less the smallest such sum of that step. `None` without arrivals.
    late: Option<Vec<Vec<f64>>>,
    /// Steps that were compared; 0 if means were compared.
    count: u64,
    /// The mean time of a step.
    step_ns: f64,
}

impl Steps {
    fn of(ranks: &[RankReport]) -> Self {
        let all: Vec<_> = ranks.iter().map(RankReport::by_step).collect();
        let common: BTreeSet<(u64, u64)> = all
            .first()
            .into_iter()
            .flat_map(|first| first.keys().copied())
            .collect();
        let common = common
            .into_iter()
            .filter(|step| all.iter().all(|steps| steps.contains_key(step)));
        let steps: Vec<Vec<(f64, Option<f64>)>> = common
            .map(|step| all.iter().map(|steps| steps[&step]).collect())
            .collect();
        let step_ns = median(ranks, |rank| rank.step_ns);
        if steps.len() < STEPS_LEAST || ranks.iter().any(|rank| rank.on_device) {
            let means = ranks
                .iter()
                .map(|rank| rank.starved_share * rank.step_ns)
                .collect();
            return Self {
                waits: vec![means],
                late: None,
                count: 0,
                step_ns,
            };
        }
        let waits = steps
            .iter()
            .map(|step| step.iter().map(|(wait, _)| *wait).collect());
        let waits = without_pauses(waits.collect());
        let arrivals = |step: &Vec<(f64, Option<f64>)>| {
            step.iter()
                .map(|(wait, own)| Some(wait + (*own)?))
                .collect()
        };
        let arrivals: Vec<Vec<f64>> = steps.iter().filter_map(arrivals).collect();
        // Unless the ranks waited for each other after them, arrivals were recorded too late to
        // show anything.
        let met = arrivals.len() >= STEPS_LEAST
            && (0..ranks.len())
                .any(|place| (ranks[place].step_ns - mean(&arrivals, place)) > 0.01 * step_ns);
        let late = met.then(|| {
            without_pauses(
                arrivals
                    .iter()
                    .map(|of_step| {
                        let first = of_step.iter().copied().fold(f64::INFINITY, f64::min);
                        of_step.iter().map(|arrival| arrival - first).collect()
                    })
                    .collect(),
            )
        });
        Self {
            waits,
            late,
            count: steps.len() as u64,
            step_ns,
        }
    }
}

/// Times, with those of the few longest steps capped: a pause of one rank may be longer than all
/// waits of the slow one.
fn without_pauses(mut steps: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let mut longest: Vec<f64> = steps
        .iter()
        .map(|times| times.iter().copied().fold(0.0, f64::max))
        .collect();
    longest.sort_by(f64::total_cmp);
    let most = longest
        .get(longest.len().saturating_sub(PAUSES))
        .copied()
        .unwrap_or(0.0);
    steps
        .iter_mut()
        .flatten()
        .for_each(|time| *time = time.min(most));
    steps
}

/// The mean time of the rank at position `place`.
fn mean(steps: &[Vec<f64>], place: usize) -> f64 {
    steps.iter().map(|times| times[place]).sum::<f64>() / steps.len().max(1) as f64
}

fn mean_longest(steps: &[Vec<f64>]) -> f64 {
    let longest = steps
        .iter()
        .map(|times| times.iter().copied().fold(0.0, f64::max));
    longest.sum::<f64>() / steps.len().max(1) as f64
}

/// Late ranks by their positions in the list, before the cause is known.
struct Found {
    places: Vec<usize>,
    cost_ns: f64,
    without_core: bool,
}

/// The ranks that arrive last, because of their batches or their own part; or all ranks, if all
/// wait for batches.
fn find(ranks: &[RankReport], steps: &Steps) -> Option<Found> {
    let step_ns = steps.step_ns;
    if step_ns.is_nan() || step_ns <= 0.0 {
        return None;
    }
    let by_cores = || by_cores(ranks, step_ns);
    let all_wait = all(&steps.waits, ALL_WAIT * step_ns);
    match &steps.late {
        Some(late) => {
            // Distinguishes ranks that wait in turn from those that work in turn.
            let found = by_steps(late, step_ns, COSTS).or_else(|| {
                let found = by_steps(&steps.waits, step_ns, COSTS)?;
                let cost_ns = cost_of(&found.places, late);
                (cost_ns >= COSTS * step_ns).then_some(Found { cost_ns, ..found })
            });
            larger(found, all_wait, 2.0).or_else(by_cores)
        }
        None => larger(
            larger(by_steps(&steps.waits, step_ns, COSTS), all_wait, 2.0),
            by_cores(),
            1.0,
        ),
    }
}

/// Returns `first`, unless `second` costs more than `times` times as much.
fn larger(first: Option<Found>, second: Option<Found>, times: f64) -> Option<Found> {
    let cost = |found: &Option<Found>| found.as_ref().map_or(0.0, |found| found.cost_ns);
    if cost(&second) > times * cost(&first) {
        second
    } else {
        first
    }
}

/// All ranks, if each of them is late by at least `least_ns` on average.
fn all(steps: &[Vec<f64>], least_ns: f64) -> Option<Found> {
    let places: Vec<usize> = (0..steps.first()?.len()).collect();
    let each = places.iter().all(|place| mean(steps, *place) >= least_ns);
    each.then(|| Found {
        places,
        cost_ns: mean_longest(steps),
        without_core: false,
    })
}

/// Ranks whose quota kept their process off its cores: the loader's threads and their own. Not on a
/// GPU, where threads run ahead of the stream.
fn by_cores(ranks: &[RankReport], step_ns: f64) -> Option<Found> {
    let usual = median(ranks, |rank| rank.without_core_ns);
    let means = [ranks
        .iter()
        .map(|rank| {
            if rank.on_device || rank.cores_taken_by != Some(Cause::CpuQuota) {
                return 0.0;
            }
            // Other threads do work of the step, too, such as that of a collective operation.
            let own = rank.without_core_ns - usual + rank.starved_share * rank.step_ns;
            own.max(rank.throttled_ns).clamp(0.0, step_ns)
        })
        .collect()];
    let found = larger(
        by_steps(&means, step_ns, LACKS_CORES),
        all(&means, LACKS_CORES * step_ns),
        2.0,
    )?;
    Some(Found {
        without_core: true,
        ..found
    })
}

/// The ranks that are last in more of these steps than by chance, if they cost at least the share
/// `least` of a step.
fn by_steps(steps: &[Vec<f64>], step_ns: f64, least: f64) -> Option<Found> {
    // One half of the steps selects the ranks, the other half tests them, because among many ranks
    // some are always last by chance. The halves have no period.
    let part = |first: bool| {
        steps
            .iter()
            .enumerate()
            .filter(move |(place, _)| {
                (((*place) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 63 == 0) == first
            })
            .map(|(_, times)| times)
    };
    let all: Vec<_> = steps.iter().collect();
    let (chooses, tests): (Vec<_>, Vec<_>) = match steps.len() {
        1 => (all.clone(), all.clone()),
        _ => (part(true).collect(), part(false).collect()),
    };
    let ranks = steps.first()?.len();
    let mut sums: Vec<(usize, f64)> = (0..ranks)
        .map(|place| (place, chooses.iter().map(|times| times[place]).sum()))
        .collect();
    sums.sort_by(|a, b| b.1.total_cmp(&a.1));
    let order: Vec<usize> = sums.iter().map(|(place, _)| *place).collect();
    let chosen = costs(&order, &chooses);
    let costs = costs(&order, &all);
    let is_late = |count: &usize| {
        let (theirs, others) = order.split_at(*count);
        let cost_ns = costs[count - 1];
        // Smaller differences between times are no evidence.
        let least_ns = (0.01 * step_ns).max(0.5 * cost_ns);
        let last = match 2 * count <= ranks {
            true => is_last(theirs, others, &tests, least_ns),
            false => theirs
                .iter()
                .all(|one| is_last(&[*one], others, &tests, least_ns)),
        };
        last && cost_ns >= least * step_ns
    };
    // At most half: the fewest ranks with nearly the highest cost. More than half: those before the
    // largest gap.
    let best = chosen[..ranks / 2].iter().copied().fold(0.0, f64::max);
    let few = (1..=ranks / 2).find(|count| chosen[count - 1] >= 0.8 * best);
    let gap = |count: &usize| sums[count - 1].1 - sums[*count].1;
    let most = (ranks / 2 + 1..ranks).max_by(|a, b| gap(a).total_cmp(&gap(b)));
    let found = |count: usize| Found {
        places: order[..count].to_vec(),
        cost_ns: costs[count - 1],
        without_core: false,
    };
    larger(
        few.filter(is_late).map(found),
        most.filter(is_late).map(found),
        1.25,
    )
}

/// Whether these ranks are last in more steps than by chance, of the steps in which any rank is
/// late by more than `least_ns`.
fn is_last(theirs: &[usize], others: &[usize], steps: &[&Vec<f64>], least_ns: f64) -> bool {
    if steps.len() < 2 {
        return true;
    }
    let longest = |ranks: &[usize], times: &[f64]| {
        ranks.iter().map(|place| times[*place]).fold(0.0, f64::max)
    };
    let longest = steps
        .iter()
        .map(|times| (longest(theirs, times), longest(others, times)));
    let longest: Vec<(f64, f64)> = longest.collect();
    let waited = longest
        .iter()
        .filter(|(own, rest)| own.max(*rest) > least_ns)
        .count() as f64;
    let last = longest
        .iter()
        .filter(|(own, rest)| own - rest > least_ns)
        .count() as f64;
    let chance = theirs.len() as f64 / (theirs.len() + others.len()) as f64;
    let by_chance = waited * chance + BEYOND_CHANCE * (waited * chance * (1.0 - chance)).sqrt();
    last >= LAST_LEAST && last > by_chance.min(0.9 * waited)
}

/// The mean cost per step of the first rank in `order`, of the first two, and so on, up to all but
/// one.
fn costs(order: &[usize], steps: &[&Vec<f64>]) -> Vec<f64> {
    let mut sets = vec![0.0; order.len().saturating_sub(1)];
    let mut others = vec![0.0; order.len() + 1];
    for times in steps {
        for (at, place) in order.iter().enumerate().rev() {
            others[at] = times[*place].max(others[at + 1]);
        }
        let mut theirs = 0.0_f64;
        for (at, set) in sets.iter_mut().enumerate() {
            theirs = theirs.max(times[order[at]]);
            *set += (theirs - others[at + 1]).max(0.0) / steps.len() as f64;
        }
    }
    sets
}

/// The mean cost per step of these ranks.
fn cost_of(places: &[usize], steps: &[Vec<f64>]) -> f64 {
    let gaps: f64 = steps
        .iter()
        .map(|times| {
            let mut theirs = 0.0_f64;
            let mut others = 0.0_f64;
            for (place, time) in times.iter().enumerate() {
                let longest = if places.contains(&place) {
                    &mut theirs
                } else {
                    &mut others
                };
                *longest = longest.max(*time);
            }
            (theirs - others).max(0.0)
        })
        .sum();
    gaps / steps.len().max(1) as f64
}

impl Found {
    /// Adds the ranks whose stage is equally slow: of equally slow ranks only the slowest waits,
    /// because the others get ahead meanwhile.
    fn widened(self, ranks: &[RankReport], steps: &Steps) -> Self {
        let rest: Vec<&RankReport> = (0..ranks.len())
            .filter(|place| !self.places.contains(place))
            .map(|place| &ranks[place])
            .collect();
        let own = self
            .places
            .iter()
            .any(|place| self.is_own_part(*place, ranks.len(), steps));
        let first = &ranks[self.places[0]];
        let Some(stage) =
            limit(first, &rest, EXPLAINS * self.cost_ns).filter(|_| !own && !self.without_core)
        else {
            return self;
        };
        // The stage must be their own limit. If they have no more work in it than others, only
        // ranks that need all the time for it can be meant.
        let least = self
            .places
            .iter()
            .map(|place| ranks[*place].effort_of(stage))
            .fold(f64::INFINITY, f64::min);
        let full = |rank: &RankReport| rank.work_of(stage) >= FULL * steps.step_ns;
        let is_as_slow = |rank: &RankReport| rank.effort_of(stage) >= AS_SLOW * least && full(rank);
        if least <= 0.0 || !full(first) {
            return self;
        }
        let places: Vec<usize> = (0..ranks.len())
            .filter(|place| self.places.contains(place) || is_as_slow(&ranks[*place]))
            .collect();
        let lateness = steps
            .late
            .as_ref()
            .filter(|_| places.len() < ranks.len())
            .unwrap_or(&steps.waits);
        let cost_ns = cost_of(&places, lateness);
        Self {
            places,
            cost_ns: cost_ns.max(self.cost_ns),
            ..self
        }
    }

    /// Whether a rank's own part of the steps contributes more to its lateness than its waits do.
    fn is_own_part(&self, place: usize, ranks: usize, steps: &Steps) -> bool {
        let others: Vec<usize> = (0..ranks)
            .filter(|place| !self.places.contains(place))
            .collect();
        let beyond = |of: &[Vec<f64>]| {
            let usual = others.iter().map(|place| mean(of, *place)).sum::<f64>()
                / others.len().max(1) as f64;
            mean(of, place) - usual
        };
        let late = steps.late.as_ref().filter(|_| !others.is_empty());
        late.is_some_and(|late| beyond(late) > 2.0 * beyond(&steps.waits))
    }

    /// Adds the cause of each late rank, and stores it in the rank's report, too.
    fn explained(self, ranks: &mut [RankReport], steps: &Steps) -> Late {
        let (late, others): (Vec<usize>, Vec<usize>) =
            (0..ranks.len()).partition(|place| self.places.contains(place));
        let theirs: Vec<&RankReport> = late.iter().map(|place| &ranks[*place]).collect();
        let rest: Vec<&RankReport> = others.iter().map(|place| &ranks[*place]).collect();
        let cause = |place: &usize| match self.without_core {
            true => Some(Cause::CpuQuota),
            false if self.is_own_part(*place, ranks.len(), steps) => Some(Cause::Consumer),
            false => limit(&ranks[*place], &rest, EXPLAINS * self.cost_ns),
        };
        let causes: Vec<Option<Cause>> = late.iter().map(cause).collect();
        let host = &theirs[0].host;
        let is_there = |rank: &&RankReport| rank.host == *host;
        let whole = late.len() > 1
            && !rest.is_empty()
            && theirs.iter().all(is_there)
            && !rest.iter().any(is_there);
        let bad = bad_share(&theirs);
        let explained = Late {
            ranks: theirs.iter().map(|rank| rank.rank).collect(),
            how_many: match late.len() {
                all if all == ranks.len() => HowMany::All,
                most if 2 * most > ranks.len() => HowMany::Most,
                _ => HowMany::Few,
            },
            host: whole.then(|| host.clone()),
            cost_ns: self.cost_ns,
            share: (self.cost_ns / steps.step_ns).min(1.0),
            cause: causes
                .iter()
                .copied()
                .flatten()
                .max_by_key(|one| causes.iter().filter(|cause| **cause == Some(*one)).count())
                .unwrap_or(Cause::Unknown),
            without_core: self.without_core,
            bad_share: (bad > 2.0 * bad_share(&rest)).then_some(bad),
        };
        for (place, cause) in late.into_iter().zip(causes) {
            ranks[place].cause = cause.or(ranks[place].cause);
        }
        explained
    }
}

fn bad_share(ranks: &[&RankReport]) -> f64 {
    let sum = |count: fn(&RankReport) -> u64| {
        ranks
            .iter()
            .fold(0_u64, |sum, rank| sum.saturating_add(count(rank)))
    };
    sum(|rank| rank.bad_samples) as f64 / sum(|rank| rank.samples).max(1) as f64
}

/// The limit of a late rank: the stage whose work for a batch exceeds that of the others by the
/// most, if by at least `least_ns`; otherwise a lack of slots, if the others have more; otherwise
/// its own verdict.
///
/// Other programs are its limit only if it lacks cores more than the others do, and its workers
/// need no more CPU time than theirs.
fn limit(rank: &RankReport, others: &[&RankReport], least_ns: f64) -> Option<Cause> {
    let usual = |value: fn(&RankReport) -> f64| median(others.iter().copied(), value);
    let as_others = rank.without_core_ns <= 2.0 * usual(|rank| rank.without_core_ns)
        || rank.decode_cpu_ns > 2.0 * usual(|rank| rank.decode_cpu_ns);
    let verdict = match rank.cause {
        Some(Cause::OtherPrograms | Cause::LocalRanks | Cause::OwnThreads) if as_others => {
            rank.stage
        }
        cause => cause,
    };
    let verdict = verdict
        .filter(|cause| !matches!(cause, Cause::NotStarved | Cause::Consumer | Cause::Unknown));
    let cores = matches!(
        verdict,
        Some(Cause::CpuQuota | Cause::OtherPrograms | Cause::LocalRanks | Cause::OwnThreads)
    );
    let more = rank
        .work_ns
        .iter()
        .map(|(cause, ns)| {
            // The minimum, because some of the others may be equally slow.
            (
                *cause,
                ns - others
                    .iter()
                    .map(|rank| rank.work_of(*cause))
                    .reduce(f64::min)
                    .unwrap_or(0.0),
            )
        })
        .max_by(|a, b| a.1.total_cmp(&b.1));
    let more = more.filter(|(_, ns)| *ns >= least_ns);
    // The workers' time excludes their waits for a core.
    let workers = more.is_some_and(|(cause, _)| matches!(cause, Cause::Decode | Cause::MapBatch));
    if cores && !workers {
        return verdict;
    }
    let more = more.map(|(cause, _)| cause);
    let fewer = f64::from(rank.slots) < usual(|rank| rank.slots.into()) && !others.is_empty();
    more.or(fewer.then_some(Cause::MemoryBudget)).or(verdict)
}

impl fmt::Display for Across {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "rank  host              samples/s  batch to batch  starved  bad  limited by"
        )?;
        let mut shown: Vec<&RankReport> = self.ranks.iter().collect();
        shown.sort_by(|a, b| b.starved_share.total_cmp(&a.starved_share));
        shown.truncate(ROWS_MOST);
        shown.sort_by_key(|rank| rank.rank);
        for rank in shown {
            let rate = number(rank.items_per_s);
            let step = time(rank.step_ns);
            let starved = 100.0 * rank.starved_share;
            let cause = rank
                .cause
                .map_or_else(|| "?".into(), |cause| cause.to_string());
            let late = self
                .late
                .as_ref()
                .is_some_and(|late| late.ranks.contains(&rank.rank));
            let number = rank.rank;
            let host = &rank.host;
            let bad = rank.bad_samples;
            let mark = if late { "  ◀" } else { "" };
            writeln!(
                f,
                "{number:>4}  {host:<16}  {rate:>9}  {step:>14}  {starved:>5.1} %  {bad:>3}  \
                 {cause}{mark}"
            )?;
        }
        if !self.missing.is_empty() {
            writeln!(f, "without a report: {}", list(&self.missing))?;
        }
        let Some(late) = &self.late else {
            return self.none_late(f);
        };
        late.fmt(f)
    }
}

impl Across {
    /// Writes the sentence for the case that no rank is late, including what the comparison cannot
    /// show.
    fn none_late(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.compared {
            let least =
                "each rank needs some steps, and on a GPU the loader must know their stream";
            return write!(f, "Too little was measured to compare the ranks: {least}.");
        }
        let step_ns = median(&self.ranks, |rank| rank.step_ns);
        if self.last_ns < COSTS * step_ns {
            f.write_str("No rank holds the others up.")?;
        } else {
            let late = time(self.last_ns);
            let percent = (100.0 * self.last_ns / step_ns).min(100.0);
            write!(
                f,
                "No rank holds the others up: they are late in turn, by {late} a step, \
                 {percent:.0} % of it."
            )?;
        }
        match self.own_parts || self.ranks.len() < 2 {
            true => Ok(()),
            false => f.write_str(
                " Only waits for batches were compared: other delays of a rank are seen with \
                 `loader.arrive()`.",
            ),
        }
    }
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = list(&self.ranks);
        let who = match (self.how_many, &self.host) {
            (HowMany::All, _) => "All ranks wait for batches".into(),
            (HowMany::Most, _) => format!("Most ranks, {ranks}, hold the others up"),
            (HowMany::Few, Some(host)) => {
                format!("All ranks of {host}, {ranks}, hold the others up")
            }
            (HowMany::Few, None) if self.ranks.len() == 1 => {
                format!("Rank {ranks} holds the others up")
            }
            (HowMany::Few, None) => format!("Ranks {ranks} hold the others up"),
        };
        let cost = if self.without_core { "about " } else { "" }.to_string() + &time(self.cost_ns);
        let cause = match self.cause {
            Cause::Consumer => "work between the batch and `arrive`".into(),
            cause => cause.to_string(),
        };
        write!(
            f,
            "{who} by {cost} a step, {:.0} % of it, limited by {cause}",
            100.0 * self.share
        )?;
        if self.without_core {
            f.write_str(", which also kept threads of the training step off the cores")?;
        }
        match self.bad_share {
            Some(bad) => write!(f, ", with {:.1} % bad samples.", 100.0 * bad),
            None => f.write_str("."),
        }
    }
}

fn list(ranks: &[u32]) -> String {
    let all: Vec<String> = ranks.iter().take(ROWS_MOST).map(u32::to_string).collect();
    let more = ranks.len().saturating_sub(ROWS_MOST);
    all.join(", ")
        + &if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Eight ranks on two hosts; `wait` gives the wait of a rank at a step in microseconds.
    fn job(wait: impl Fn(u32, u64) -> u32) -> Vec<RankReport> {
        (0..8)
            .map(|rank| RankReport {
                rank,
                world: 8,
                host: format!("node{}", rank / 4),
                step_ns: 10e6,
                cause: Some(if rank == 5 {
                    Cause::Storage
                } else {
                    Cause::NotStarved
                }),
                waits: vec![(3, 40, (0..100).map(|step| wait(rank, step)).collect())],
                ..RankReport::default()
            })
            .collect()
    }

    /// A value that looks random.
    fn noise(rank: u32, step: u64) -> u32 {
        let mixed = (step * 8 + u64::from(rank)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> 54) as u32
    }

    #[test]
    fn the_slow_rank_is_named_with_its_cost_and_cause() {
        let view = Across::of(job(|rank, step| {
            noise(rank, step) / 4 + if rank == 5 { 2000 } else { 0 }
        }));
        let late = view.late.clone().unwrap();
        assert_eq!(
            (&late.ranks[..], late.host, late.cause, view.steps),
            (&[5][..], None, Cause::Storage, 100)
        );
        assert!(
            (1.7e6..2.0e6).contains(&late.cost_ns) && (0.17..0.2).contains(&late.share),
            "{view}"
        );
        assert!(
            view.to_string()
                .contains("Rank 5 holds the others up by 1."),
            "{view}"
        );
        let view = Across::of(job(|rank, step| {
            noise(rank, step) / 4 + if rank < 5 { 2000 } else { 0 }
        }));
        assert!(
            view.to_string()
                .contains("Most ranks, 0, 1, 2, 3, 4, hold the others up by 2.01 ms"),
            "{view}"
        );
    }

    #[test]
    fn ranks_that_are_late_by_turns_are_not_blamed() {
        let view = Across::of(job(|rank, step| noise(rank, step) * 3 / 4));
        assert!(
            view.late.is_none()
                && view
                    .to_string()
                    .contains("late in turn, by 715.7 µs a step, 7 % of it"),
            "{view}"
        );
        let pause = |rank, step| {
            if rank == 2 && step == 50 {
                900_000
            } else {
                noise(rank, step)
            }
        };
        let view = Across::of(job(pause));
        assert_eq!(view.late, None, "one pause: {view}");
        let view = Across::of(job(|rank, step| {
            pause(rank, step) + if rank == 5 { 2000 } else { 0 }
        }));
        assert_eq!(
            view.late.map(|late| late.ranks),
            Some(vec![5]),
            "a pause of another rank"
        );
    }

    #[test]
    fn a_rank_whose_quota_is_used_up_is_named_where_its_batches_are_there() {
        let slow = |taker| {
            let mut reports = job(|_, _| 0);
            reports[3].without_core_ns = 2e6;
            reports[3].cores_taken_by = Some(taker);
            Across::of(reports)
        };
        let view = slow(Cause::CpuQuota);
        let late = view.late.clone().unwrap();
        assert_eq!(
            (late.ranks, late.cause, late.without_core),
            (vec![3], Cause::CpuQuota, true)
        );
        assert!(
            view.to_string()
                .contains("limited by the CPU quota, which also kept"),
            "{view}"
        );
        assert_eq!(slow(Cause::OtherPrograms).late, None);
    }

    #[test]
    fn cores_that_all_ranks_lack_are_not_the_cause_of_one() {
        let cause = |own, decode| {
            let mut reports = job(|rank, _| if rank == 5 { 2000 } else { 0 });
            reports
                .iter_mut()
                .for_each(|report| (report.without_core_ns, report.decode_cpu_ns) = (1e6, 1e5));
            let late = &mut reports[5];
            late.cause = Some(Cause::OtherPrograms);
            late.stage = Some(Cause::Decode);
            late.without_core_ns = own;
            late.decode_cpu_ns = decode;
            let view = Across::of(reports);
            let late = view.late.unwrap();
            assert_eq!(
                view.ranks[5].cause,
                Some(late.cause),
                "the table says what the sentence says"
            );
            late.cause
        };
        assert_eq!(
            (cause(1.5e6, 1e5), cause(3e6, 1e5)),
            (Cause::Decode, Cause::OtherPrograms)
        );
        assert_eq!(cause(3e6, 1e6), Cause::Decode, "its own work sets it apart");
    }

    #[test]
    fn of_many_ranks_none_is_blamed_by_chance() {
        for ranks in [32, 64, 256] {
            let stalls = |rank: u32, step: u64| {
                u64::from(noise(7, step)) % u64::from(ranks) == u64::from(rank)
            };
            let report = |rank| RankReport {
                waits: vec![(
                    0,
                    0,
                    (0..256)
                        .map(|step| if stalls(rank, step) { 10_000 } else { 0 })
                        .collect(),
                )],
                ..RankReport {
                    rank,
                    world: ranks,
                    step_ns: 10e6,
                    ..RankReport::default()
                }
            };
            assert_eq!(Across::of((0..ranks).map(report)).late, None, "{ranks}");
        }
    }

    #[test]
    fn a_gpu_without_a_measured_stream_is_not_compared() {
        let mut reports = job(|_, _| 0);
        for report in &mut reports {
            report.on_device = true;
            report.cause = Some(Cause::Unknown);
        }
        let view = Across::of(reports);
        assert!(
            !view.compared
                && view.late.is_none()
                && view.to_string().contains("Too little was measured"),
            "{view}"
        );
    }

    #[test]
    fn a_slow_machine_is_told_from_slow_ranks() {
        let view = Across::of(job(|rank, step| {
            noise(rank, step) + if rank >= 4 { 2000 } else { 0 }
        }));
        let late = view.late.clone().unwrap();
        assert_eq!(
            (&late.ranks[..], late.host.as_deref()),
            (&[4, 5, 6, 7][..], Some("node1")),
            "{view}"
        );
        let view = Across::of(job(|rank, _| if [1, 6].contains(&rank) { 2000 } else { 0 }));
        assert_eq!(
            view.late.map(|late| (late.ranks, late.host)),
            Some((vec![1, 6], None))
        );
        let view = Across::of(job(|_, _| 5000));
        let late = view.late.clone().unwrap();
        assert_eq!(
            (late.ranks.len(), late.how_many, late.host),
            (8, HowMany::All, None)
        );
        assert!(
            view.to_string().contains(
                "All ranks wait for batches by 5.00 ms a step, 50 % of it, limited by storage."
            ),
            "{view}"
        );
    }

    #[test]
    fn a_rank_that_stops_now_and_then_is_named() {
        let stops = |every| {
            move |rank, step: u64| {
                noise(rank, step) / 20
                    + if rank == 5 && step.is_multiple_of(every) {
                        40_000
                    } else {
                        0
                    }
            }
        };
        assert_eq!(
            Across::of(job(stops(10))).late.map(|late| late.ranks),
            Some(vec![5])
        );
        assert_eq!(
            Across::of(job(stops(30))).late,
            None,
            "four stops are too few"
        );
    }

    #[test]
    fn bad_samples_of_the_late_rank_are_told() {
        let mut reports = job(|rank, _| if rank == 5 { 2000 } else { 0 });
        for report in &mut reports {
            report.samples = 1000;
            report.bad_samples = if report.rank == 5 { 300 } else { 10 };
        }
        let view = Across::of(reports.clone());
        assert_eq!(view.late.as_ref().unwrap().bad_share, Some(0.3));
        assert!(
            view.to_string()
                .ends_with("limited by storage, with 30.0 % bad samples."),
            "{view}"
        );
        reports[0].bad_samples = 900;
        assert_eq!(
            Across::of(reports).late.unwrap().bad_share,
            Some(0.3),
            "the mean of the others counts"
        );
    }

    #[test]
    fn ranks_without_a_report_are_named() {
        let reports = job(|_, _| 0)
            .into_iter()
            .filter(|report| ![2, 7].contains(&report.rank));
        let view = Across::of(reports);
        assert_eq!(view.missing, [2, 7]);
        assert!(
            view.to_string().contains("without a report: 2, 7"),
            "{view}"
        );
        assert_eq!(Across::of([]), Across::default());
        let mut short = job(|rank, _| if rank == 5 { 2000 } else { 0 });
        short
            .iter_mut()
            .for_each(|report| report.waits[0].2.truncate(STEPS_LEAST - 1));
        let view = Across::of(short);
        assert!(
            view.late.is_none()
                && view
                    .to_string()
                    .contains("Too little was measured to compare the ranks"),
            "{view}"
        );
    }

    #[test]
    fn a_report_has_less_than_4_kib_and_with_arrivals_6() {
        let mut report = job(|_, _| u32::MAX).remove(7);
        report.host = "h".repeat(255);
        report.waits = vec![(u64::MAX, u64::MAX - 300, vec![9_999_999; WAITS])];
        let stages = [
            Cause::Copy,
            Cause::Decode,
            Cause::MapBatch,
            Cause::PageCache,
            Cause::Order,
        ];
        report.work_ns = stages.map(|stage| (stage, 1e10 / 3.0)).to_vec();
        assert!(serde_json::to_string(&report).unwrap().len() < 4096);
        report.own_us = vec![9_999_999; WAITS];
        let json = serde_json::to_string(&report).unwrap();
        assert!(json.len() < 6144, "{}", json.len());
        assert_eq!(serde_json::from_str::<RankReport>(&json).unwrap(), report);
    }

    proptest! {
        #[test]
        fn any_reports_give_a_view(
            waits in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..40), 0..9),
            steps in prop::collection::vec(prop_oneof![Just(0.0), any::<f64>()], 9), device in any::<bool>()
        ) {
            let report = |(rank, waits): (usize, Vec<u32>)| RankReport {
                rank: rank as u32, world: 12, step_ns: steps[rank], starved_share: steps[8 - rank], on_device: device,
                waits: vec![(u64::MAX, u64::MAX - 20, waits)], ..RankReport::default()
            };
            let view = Across::of(waits.into_iter().enumerate().map(report));
            let _ = view.to_string();
            prop_assert!(view.late.is_none_or(|late| late.share >= COSTS));
        }
    }
}
