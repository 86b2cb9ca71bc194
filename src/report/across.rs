//! One view of the ranks of a job: the ranks that hold a step up, the cost, and the cause. Pure.
//!
//! ```text
//! the ranks of a synchronous step wait for the last one:
//!     time of a step = work + the longest wait for a batch of any rank
//!     cost of ranks R = mean over steps of  max(0, longest wait in R − longest wait of the others)
//! ```
//!
//! The waits of the last steps are compared step by step, so that hiccups of all ranks by turns are not the fault of one. Ranks
//! are held responsible where they cost at least [`COSTS`] of a step and are last in more steps than chance makes them.
//!
//! Where no waits tell, the time does that the consumers' threads stood ready without a core because of a CPU quota: such a rank is
//! late with its own part of the step. Other programs take cores from all ranks by turns, so their means prove nothing.
//!
//! # Limits
//!
//! - A rank with more work of its own is not seen: the others wait for it within the step, not for a batch.
//! - On a GPU the host's waits are no waits of the stream. Means of the stream's waits in the whole run are compared there, without
//!   a test of chance. So they are for ranks of different steps (epoch and batch), that share fewer than [`STEPS_LEAST`].
//! - Causes are those of each rank's whole run.
//! - Slow ranks that are more than half of all are not named: the table shows them.

use super::load::{Cause, Loads};
use super::verdict::Verdict;
use super::words::{number, time};
use crate::meter::{Snapshot, Timeline};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Measurements of one rank for [`Across::of`]: below 4 KiB as JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct RankReport {
    /// The rank.
    pub rank: u32,
    /// Ranks of the job.
    pub world: u32,
    /// Name of its machine.
    pub host: String,
    /// Batches handed out.
    pub batches: u64,
    /// Samples per second.
    pub items_per_s: f64,
    /// Time from batch to batch, the median of the last ones, in nanoseconds.
    pub step_ns: f64,
    /// Share of the time without a ready batch.
    pub starved_share: f64,
    /// The limit of its loader.
    pub cause: Option<Cause>,
    /// The limit if no others took its cores.
    pub stage: Option<Cause>,
    /// Samples handed out.
    pub samples: u64,
    /// Rows for which others stood in.
    pub bad_samples: u64,
    /// Time of each batch that its consumer stood ready without a core, in nanoseconds.
    pub without_core_ns: f64,
    /// CPU time of its decode workers for each batch, in nanoseconds.
    pub decode_cpu_ns: f64,
    /// The takers of its cores, where they take much.
    pub cores_taken_by: Option<Cause>,
    /// On a GPU, where the host's waits are no starvation.
    pub on_device: bool,
    /// The last waits, in microseconds: epoch, first batch, and the wait for each batch from there on. Empty in an [`Across`].
    pub waits: Vec<(u64, u64, Vec<u32>)>,
}

/// Waits of a [`RankReport`].
const WAITS: usize = 256;
/// Fewer common steps are compared by their means.
const STEPS_LEAST: usize = 16;
/// Ranks that are last in fewer steps of a half may be so by chance.
const LAST_LEAST: f64 = 3.0;
/// So many steps have the longest waits of pauses.
const PAUSES: usize = 5;
/// Ranks without a report that are named.
const MISSING_MOST: usize = 1 << 16;
/// Rows of the table; those with the longest starvation are shown.
const ROWS_MOST: usize = 64;
/// Runs of waits in a report: those of short epochs are many.
const RUNS: usize = 64;
/// Ranks that cost less than this share of a step are not worth a word.
const COSTS: f64 = 0.03;
/// The same, for ranks whose batches were there.
const LACKS_CORES: f64 = 0.1;
/// Standard deviations above chance.
const BEYOND_CHANCE: f64 = 4.0;

impl RankReport {
    /// The report of a loader of this rank of `world`, on the machine `host`.
    pub fn of(rank: u32, world: u32, host: &str, snapshot: &Snapshot, timeline: &Timeline) -> Self {
        let (verdict, handed) = (Verdict::of(snapshot), snapshot.consumer.handed());
        let each = |amount: f64| if handed.batches > 0 { amount / handed.batches as f64 } else { 0.0 };
        let mean_ns = each(snapshot.steady_ns as f64);
        let mut waits: Vec<(u64, u64, Vec<u32>)> = Vec::new();
        let steady = timeline.batches.iter().filter(|record| !record.first);
        for record in steady.rev().take(WAITS).collect::<Vec<_>>().into_iter().rev() {
            let us = u32::try_from(record.got_ns.saturating_sub(record.asked_ns) / 1000).unwrap_or(u32::MAX);
            match waits.last_mut() {
                Some((epoch, first, run)) if (*epoch, *first + run.len() as u64) == (record.epoch, record.batch) => {
                    run.push(us)
                }
                _ => waits.push((record.epoch, record.batch, vec![us])),
            }
        }
        waits.drain(..waits.len().saturating_sub(RUNS));
        Self {
            rank,
            world,
            host: host.chars().take(255).collect(),
            batches: snapshot.consumer.batches,
            samples: snapshot.consumer.samples,
            items_per_s: if mean_ns > 0.0 { each(handed.samples as f64) / mean_ns * 1e9 } else { 0.0 },
            step_ns: median_step(timeline).unwrap_or(mean_ns),
            starved_share: verdict.starved_share,
            cause: Some(verdict.cause),
            stage: Some(Verdict::of(&Snapshot { cpu: None, ..snapshot.clone() }).cause),
            bad_samples: snapshot.consumer.substituted,
            without_core_ns: each(snapshot.consumer.delay_ns.unwrap_or(0) as f64),
            decode_cpu_ns: each(snapshot.decode.cpu_ns.unwrap_or(0) as f64),
            cores_taken_by: Loads::of(snapshot).and_then(|loads| loads.taken),
            on_device: snapshot.copy.is_some(),
            waits,
        }
    }

    /// Wait for each batch, in nanoseconds.
    fn by_step(&self) -> BTreeMap<(u64, u64), f64> {
        let runs = self.waits.iter();
        runs.flat_map(|(epoch, first, waits)| {
            waits.iter().zip(*first..u64::MAX).map(|(us, batch)| ((*epoch, batch), 1e3 * f64::from(*us)))
        })
        .collect()
    }
}

/// The median time between the last batches of an iterator, in nanoseconds.
fn median_step(timeline: &Timeline) -> Option<f64> {
    let last = timeline.batches.iter().rev().take(WAITS + 1).collect::<Vec<_>>();
    let follow = last.windows(2).filter(|pair| !pair[0].first);
    let mut steps: Vec<u64> = follow.map(|pair| pair[0].got_ns.saturating_sub(pair[1].got_ns)).collect();
    steps.sort_unstable();
    steps.get(steps.len() / 2).map(|ns| *ns as f64)
}

/// All ranks in one view. `Display` is a table and a sentence.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Across {
    /// The ranks that reported, in their order. The cause of late ones is that beside the others.
    pub ranks: Vec<RankReport>,
    /// Ranks without a report.
    pub missing: Vec<u32>,
    /// Steps that were compared; 0 where means were.
    pub steps: u64,
    /// Whether the reports were enough to compare the ranks.
    pub compared: bool,
    /// The ranks that hold the others up.
    pub late: Option<Late>,
}

/// Ranks that hold the others up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Late {
    /// The ranks.
    pub ranks: Vec<u32>,
    /// Their machine, where they are all of its ranks and there are others.
    pub host: Option<String>,
    /// A step would be shorter by so many nanoseconds, were they like the others.
    pub cost_ns: f64,
    /// The same as a share of the step.
    pub share: f64,
    /// The limit of most of their loaders.
    pub cause: Cause,
    /// A CPU quota kept their own threads from a core, too: their batches are not all of it.
    pub without_core: bool,
    /// The share of their samples that was bad, where the others had less than half of it.
    pub bad_share: Option<f64>,
}

impl Across {
    /// The view of these reports. Of several with the same rank the last one counts.
    pub fn of(reports: impl IntoIterator<Item = RankReport>) -> Self {
        let by_rank: BTreeMap<u32, RankReport> = reports.into_iter().map(|report| (report.rank, report)).collect();
        let world = by_rank.values().map(|report| report.world).max().unwrap_or(0);
        let missing = (0..world).filter(|rank| !by_rank.contains_key(rank)).take(MISSING_MOST).collect();
        let mut ranks: Vec<RankReport> = by_rank.into_values().collect();
        let compared = world == 1 || is_comparable(&ranks);
        let (mut late, mut steps) = (None, 0);
        if compared && ranks.len() > 1 {
            let (waits, count) = waits(&ranks);
            steps = count;
            let usual = (median(&ranks, |rank| rank.without_core_ns), median(&ranks, |rank| rank.decode_cpu_ns));
            let limit = |rank: &RankReport| limit(rank, usual);
            late = by_waits(&ranks, &waits, COSTS, limit).or_else(|| by_cores(&ranks));
            let is_late = |rank: &&mut RankReport| late.iter().any(|late| late.ranks.contains(&rank.rank));
            ranks.iter_mut().filter(is_late).for_each(|rank| rank.cause = limit(rank).or(rank.cause));
        }
        ranks.iter_mut().for_each(|rank| rank.waits.clear());
        Self { ranks, missing, steps, compared, late }
    }
}

/// The median of a value of all ranks.
fn median(ranks: &[RankReport], value: impl Fn(&RankReport) -> f64) -> f64 {
    let mut values: Vec<f64> = ranks.iter().map(value).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The limit of a late rank. Of other programs it is late only where it lacks cores more than the others do, and its workers need
/// no more CPU time than theirs: both medians are of a step.
fn limit(rank: &RankReport, (without_core_ns, decode_cpu_ns): (f64, f64)) -> Option<Cause> {
    let as_others = rank.without_core_ns <= 2.0 * without_core_ns || rank.decode_cpu_ns > 2.0 * decode_cpu_ns;
    let cause = match rank.cause {
        Some(Cause::OtherPrograms | Cause::OwnThreads) if as_others => rank.stage,
        cause => cause,
    };
    cause.filter(|cause| !matches!(cause, Cause::NotStarved | Cause::Consumer))
}

/// Whether the reports have enough of each rank: several ranks, some steps, on a GPU its idle time.
fn is_comparable(ranks: &[RankReport]) -> bool {
    let waits = |rank: &RankReport| rank.waits.iter().map(|(_, _, waits)| waits.len()).sum::<usize>();
    let known = |rank: &RankReport| !rank.on_device || rank.cause != Some(Cause::Unknown);
    ranks.len() > 1 && ranks.iter().all(|rank| waits(rank) >= STEPS_LEAST && known(rank))
}

/// The waits of all ranks for each common step, and the number of steps; one step of means where too few are common.
fn waits(ranks: &[RankReport]) -> (Vec<Vec<f64>>, u64) {
    let all: Vec<_> = ranks.iter().map(RankReport::by_step).collect();
    let common: BTreeSet<(u64, u64)> = all.first().into_iter().flat_map(|first| first.keys().copied()).collect();
    let common = common.into_iter().filter(|step| all.iter().all(|waits| waits.contains_key(step)));
    let steps: Vec<Vec<f64>> = common.map(|step| all.iter().map(|waits| waits[&step]).collect()).collect();
    let count = steps.len() as u64;
    if steps.len() < STEPS_LEAST || ranks.iter().any(|rank| rank.on_device) {
        return (vec![ranks.iter().map(|rank| rank.starved_share * rank.step_ns).collect()], 0);
    }
    (without_pauses(steps), count)
}

/// Waits without the longest of few steps: a pause of one rank may be longer than all waits of the slow one.
fn without_pauses(mut steps: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let mut longest: Vec<f64> = steps.iter().map(|waits| waits.iter().copied().fold(0.0, f64::max)).collect();
    longest.sort_by(f64::total_cmp);
    let most = longest.get(longest.len().saturating_sub(PAUSES)).copied().unwrap_or(0.0);
    steps.iter_mut().flatten().for_each(|wait| *wait = wait.min(most));
    steps
}

/// Ranks whose quota kept their threads from a core, the loader's and their own. On a GPU threads run ahead of the stream.
fn by_cores(ranks: &[RankReport]) -> Option<Late> {
    let lacks = |rank: &RankReport| !rank.on_device && rank.cores_taken_by == Some(Cause::CpuQuota);
    let waits = |rank: &RankReport| rank.starved_share * rank.step_ns;
    let lack = |rank: &RankReport| if lacks(rank) { rank.without_core_ns + waits(rank) } else { 0.0 };
    let means = [ranks.iter().map(lack).collect()];
    let late = by_waits(ranks, &means, LACKS_CORES, |rank| rank.cores_taken_by)?;
    Some(Late { without_core: true, ..late })
}

/// The ranks that are last in more of these steps than by chance, where they cost at least the share `least` of a step.
fn by_waits(
    ranks: &[RankReport],
    steps: &[Vec<f64>],
    least: f64,
    cause: impl Fn(&RankReport) -> Option<Cause>,
) -> Option<Late> {
    let step_ns = ranks.iter().map(|rank| rank.step_ns).fold(0.0, f64::max);
    if step_ns <= 0.0 {
        return None;
    }
    // One half of the steps chooses the ranks, the other one tests them: of many ranks some were always last by chance. The halves
    // have no period.
    let half = |place: usize| (place as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 63 == 0;
    let part =
        |first: bool| steps.iter().enumerate().filter(move |(place, _)| half(*place) == first).map(|(_, waits)| waits);
    let (chooses, tests): (Vec<_>, Vec<_>) = match steps.len() {
        1 => (steps.iter().collect(), steps.iter().collect()),
        _ => (part(true).collect(), part(false).collect()),
    };
    let mut order: Vec<(usize, f64)> =
        (0..ranks.len()).map(|place| (place, chooses.iter().map(|waits| waits[place]).sum())).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let sets = costs(&order, &chooses, step_ns);
    let best = sets.iter().map(|set| set.0).fold(0.0, f64::max);
    let most = 1 + sets.iter().position(|set| set.0 >= 0.8 * best)?;
    let (cost_ns, last) = costs(&order, &tests, step_ns)[most - 1];
    // Of the steps in which any rank waited.
    let waited = tests.iter().filter(|waits| waits.iter().any(|wait| *wait > 0.01 * step_ns)).count() as f64;
    let chance = most as f64 / ranks.len() as f64;
    let by_chance = waited * chance + BEYOND_CHANCE * (waited * chance * (1.0 - chance)).sqrt();
    let by_luck = steps.len() > 1 && (last < LAST_LEAST || last <= by_chance.min(0.9 * waited));
    if cost_ns < least * step_ns || by_luck {
        return None;
    }
    Some(Late { cost_ns, share: cost_ns / step_ns, ..named(ranks, &order, most, cause) })
}

/// For the first one, two … half of the ranks of this order: their mean cost of a step, and the steps in which they are last.
fn costs(order: &[(usize, f64)], steps: &[&Vec<f64>], step_ns: f64) -> Vec<(f64, f64)> {
    let mut sets = vec![(0.0, 0.0); order.len() / 2];
    let mut others = vec![0.0; order.len() + 1];
    for waits in steps {
        for (at, (place, _)) in order.iter().enumerate().rev() {
            others[at] = waits[*place].max(others[at + 1]);
        }
        let mut theirs = 0.0_f64;
        for (at, set) in sets.iter_mut().enumerate() {
            theirs = theirs.max(waits[order[at].0]);
            let gap = (theirs - others[at + 1]).max(0.0);
            set.0 += gap / steps.len() as f64;
            set.1 += f64::from(u8::from(gap > 0.01 * step_ns));
        }
    }
    sets
}

/// The first `most` ranks of the order, without a cost.
fn named(
    ranks: &[RankReport],
    order: &[(usize, f64)],
    most: usize,
    cause: impl Fn(&RankReport) -> Option<Cause>,
) -> Late {
    let bad = |of: &[(usize, f64)]| {
        let sum = |count: fn(&RankReport) -> u64| {
            of.iter().fold(0_u64, |sum, (place, _)| sum.saturating_add(count(&ranks[*place])))
        };
        sum(|rank| rank.bad_samples) as f64 / sum(|rank| rank.samples).max(1) as f64
    };
    let (theirs, others) = (bad(&order[..most]), bad(&order[most..]));
    let mut late: Vec<&RankReport> = order[..most].iter().map(|(place, _)| &ranks[*place]).collect();
    late.sort_by_key(|rank| rank.rank);
    let host = &late[0].host;
    let of_host = ranks.iter().filter(|rank| rank.host == *host).count();
    let whole = late.iter().all(|rank| rank.host == *host) && of_host == late.len() && late.len() > 1;
    let causes: Vec<Cause> = late.iter().filter_map(|rank| cause(rank)).collect();
    let count = |one: &Cause| causes.iter().filter(|cause| *cause == one).count();
    Late {
        ranks: late.iter().map(|rank| rank.rank).collect(),
        host: whole.then(|| host.clone()),
        cost_ns: 0.0,
        share: 0.0,
        cause: causes.iter().copied().max_by_key(count).unwrap_or(Cause::Unknown),
        without_core: false,
        bad_share: (theirs > 2.0 * others).then_some(theirs),
    }
}

impl fmt::Display for Across {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rank  host              samples/s  batch to batch  starved  bad  limited by")?;
        let mut shown: Vec<&RankReport> = self.ranks.iter().collect();
        shown.sort_by(|a, b| b.starved_share.total_cmp(&a.starved_share));
        shown.truncate(ROWS_MOST);
        shown.sort_by_key(|rank| rank.rank);
        for rank in shown {
            let (rate, step, starved) = (number(rank.items_per_s), time(rank.step_ns), 100.0 * rank.starved_share);
            let cause = rank.cause.map_or_else(|| "?".into(), |cause| cause.to_string());
            let late = self.late.as_ref().is_some_and(|late| late.ranks.contains(&rank.rank));
            let (number, host, bad, mark) = (rank.rank, &rank.host, rank.bad_samples, if late { "  ◀" } else { "" });
            writeln!(f, "{number:>4}  {host:<16}  {rate:>9}  {step:>14}  {starved:>5.1} %  {bad:>3}  {cause}{mark}")?;
        }
        if !self.missing.is_empty() {
            writeln!(f, "without a report: {}", list(&self.missing))?;
        }
        let Some(Late { ranks, host, cost_ns, share, cause, without_core, bad_share }) = &self.late else {
            return f.write_str(match self.compared {
                true => "No rank holds the others up.",
                false => "Too little was measured to compare the ranks: some steps of each, on a GPU with the loader's stream.",
            });
        };
        let who = match (host, &ranks[..]) {
            (Some(host), _) => format!("All ranks of {host}, {}, hold", list(ranks)),
            (None, [one]) => format!("Rank {one} holds"),
            (None, _) => format!("Ranks {} hold", list(ranks)),
        };
        let (cost, percent) = (time(*cost_ns), 100.0 * share);
        write!(f, "{who} the others up by {cost} a step, {percent:.0} % of it, limited by {cause}")?;
        if *without_core {
            f.write_str(", which also kept threads of the step from a core")?;
        }
        match bad_share {
            Some(bad) => write!(f, ", with {:.1} % bad samples.", 100.0 * bad),
            None => f.write_str("."),
        }
    }
}

fn list(ranks: &[u32]) -> String {
    let all: Vec<String> = ranks.iter().take(ROWS_MOST).map(u32::to_string).collect();
    let more = ranks.len().saturating_sub(ROWS_MOST);
    all.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Eight ranks on two hosts with these waits in microseconds: of rank and step.
    fn job(wait: impl Fn(u32, u64) -> u32) -> Vec<RankReport> {
        let report = |rank| RankReport {
            rank,
            world: 8,
            host: format!("node{}", rank / 4),
            step_ns: 10e6,
            cause: Some(if rank == 5 { Cause::Storage } else { Cause::NotStarved }),
            waits: vec![(3, 40, (0..100).map(|step| wait(rank, step)).collect())],
            ..RankReport::default()
        };
        (0..8).map(report).collect()
    }

    /// A value that looks random.
    fn noise(rank: u32, step: u64) -> u32 {
        let mixed = (step * 8 + u64::from(rank)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> 54) as u32
    }

    #[test]
    fn the_slow_rank_is_named_with_its_cost_and_cause() {
        let view = Across::of(job(|rank, step| noise(rank, step) / 4 + if rank == 5 { 2000 } else { 0 }));
        let late = view.late.clone().unwrap();
        assert_eq!((&late.ranks[..], late.host, late.cause, view.steps), (&[5][..], None, Cause::Storage, 100));
        assert!((1.7e6..2.0e6).contains(&late.cost_ns) && (0.17..0.2).contains(&late.share), "{view}");
        assert!(view.to_string().contains("Rank 5 holds the others up by 1."), "{view}");
    }

    #[test]
    fn ranks_that_are_late_by_turns_are_not_blamed() {
        let view = Across::of(job(|rank, step| noise(rank, step) * 3));
        assert_eq!(view.late, None, "{view}");
        let pause = |rank, step| if rank == 2 && step == 50 { 900_000 } else { noise(rank, step) };
        let view = Across::of(job(pause));
        assert_eq!(view.late, None, "one pause: {view}");
        let view = Across::of(job(|rank, step| pause(rank, step) + if rank == 5 { 2000 } else { 0 }));
        assert_eq!(view.late.map(|late| late.ranks), Some(vec![5]), "a pause of another rank");
    }

    #[test]
    fn a_rank_whose_quota_is_used_up_is_named_where_its_batches_are_there() {
        let slow = |taker| {
            let mut reports = job(|_, _| 0);
            (reports[3].without_core_ns, reports[3].cores_taken_by) = (2e6, Some(taker));
            Across::of(reports)
        };
        let view = slow(Cause::CpuQuota);
        let late = view.late.clone().unwrap();
        assert_eq!((late.ranks, late.cause, late.without_core), (vec![3], Cause::CpuQuota, true));
        assert!(view.to_string().contains("limited by the CPU quota, which also kept"), "{view}");
        assert_eq!(slow(Cause::OtherPrograms).late, None);
    }

    #[test]
    fn cores_that_all_ranks_lack_are_not_the_cause_of_one() {
        let cause = |own, decode| {
            let mut reports = job(|rank, _| if rank == 5 { 2000 } else { 0 });
            reports.iter_mut().for_each(|report| (report.without_core_ns, report.decode_cpu_ns) = (1e6, 1e5));
            let late = &mut reports[5];
            (late.cause, late.stage, late.without_core_ns) = (Some(Cause::OtherPrograms), Some(Cause::Decode), own);
            late.decode_cpu_ns = decode;
            let view = Across::of(reports);
            let late = view.late.unwrap();
            assert_eq!(view.ranks[5].cause, Some(late.cause), "the table says what the sentence says");
            late.cause
        };
        assert_eq!((cause(1.5e6, 1e5), cause(3e6, 1e5)), (Cause::Decode, Cause::OtherPrograms));
        assert_eq!(cause(3e6, 1e6), Cause::Decode, "its own work sets it apart");
    }

    #[test]
    fn of_many_ranks_none_is_blamed_by_chance() {
        for ranks in [32, 64, 256] {
            let stalls = |rank: u32, step: u64| u64::from(noise(7, step)) % u64::from(ranks) == u64::from(rank);
            let report = |rank| RankReport {
                waits: vec![(0, 0, (0..256).map(|step| if stalls(rank, step) { 10_000 } else { 0 }).collect())],
                ..RankReport { rank, world: ranks, step_ns: 10e6, ..RankReport::default() }
            };
            assert_eq!(Across::of((0..ranks).map(report)).late, None, "{ranks}");
        }
    }

    #[test]
    fn a_gpu_without_a_measured_stream_is_not_compared() {
        let mut reports = job(|_, _| 0);
        for report in &mut reports {
            (report.on_device, report.cause) = (true, Some(Cause::Unknown));
        }
        let view = Across::of(reports);
        assert!(
            !view.compared && view.late.is_none() && view.to_string().contains("Too little was measured"),
            "{view}"
        );
    }

    #[test]
    fn a_slow_machine_is_told_from_slow_ranks() {
        let view = Across::of(job(|rank, step| noise(rank, step) + if rank >= 4 { 2000 } else { 0 }));
        let late = view.late.clone().unwrap();
        assert_eq!((&late.ranks[..], late.host.as_deref()), (&[4, 5, 6, 7][..], Some("node1")), "{view}");
        let view = Across::of(job(|rank, _| if [1, 6].contains(&rank) { 2000 } else { 0 }));
        assert_eq!(view.late.map(|late| (late.ranks, late.host)), Some((vec![1, 6], None)));
        assert_eq!(Across::of(job(|_, _| 5000)).late, None, "all wait alike");
    }

    #[test]
    fn a_rank_that_stops_now_and_then_is_named() {
        let stops = |every| {
            move |rank, step: u64| {
                noise(rank, step) / 20 + if rank == 5 && step.is_multiple_of(every) { 40_000 } else { 0 }
            }
        };
        assert_eq!(Across::of(job(stops(10))).late.map(|late| late.ranks), Some(vec![5]));
        assert_eq!(Across::of(job(stops(30))).late, None, "four stops are too few");
    }

    #[test]
    fn bad_samples_of_the_late_rank_are_told() {
        let mut reports = job(|rank, _| if rank == 5 { 2000 } else { 0 });
        for report in &mut reports {
            (report.samples, report.bad_samples) = (1000, if report.rank == 5 { 300 } else { 10 });
        }
        let view = Across::of(reports.clone());
        assert_eq!(view.late.as_ref().unwrap().bad_share, Some(0.3));
        assert!(view.to_string().ends_with("limited by storage, with 30.0 % bad samples."), "{view}");
        reports[0].bad_samples = 900;
        assert_eq!(Across::of(reports).late.unwrap().bad_share, Some(0.3), "the mean of the others counts");
    }

    #[test]
    fn ranks_without_a_report_are_named() {
        let reports = job(|_, _| 0).into_iter().filter(|report| ![2, 7].contains(&report.rank));
        let view = Across::of(reports);
        assert_eq!(view.missing, [2, 7]);
        assert!(view.to_string().contains("without a report: 2, 7"), "{view}");
        assert_eq!(Across::of([]), Across::default());
        let mut short = job(|rank, _| if rank == 5 { 2000 } else { 0 });
        short.iter_mut().for_each(|report| report.waits[0].2.truncate(STEPS_LEAST - 1));
        let view = Across::of(short);
        assert!(
            view.late.is_none() && view.to_string().contains("Too little was measured to compare the ranks"),
            "{view}"
        );
    }

    #[test]
    fn a_report_has_less_than_4_kib() {
        let mut report = job(|_, _| u32::MAX).remove(7);
        report.host = "h".repeat(255);
        report.waits = vec![(u64::MAX, u64::MAX - 300, vec![9_999_999; WAITS])];
        let json = serde_json::to_string(&report).unwrap();
        assert!(json.len() < 4096, "{}", json.len());
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
