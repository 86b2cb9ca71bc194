//! An estimate of a run from the batches of a short probe. Pure.
//!
//! ```text
//! a probe: batches without a step ──► snapshot ──► time of a batch of the loader alone ─┐
//! the caller's step ────────────────────────────────────────────────────────────────────┴► rate, limit
//! order, plan of the memory ──► an epoch's samples, bytes, requests; memory
//! ```
//!
//! # Limits
//!
//! - The data after the probe are assumed to be like those of the probe, and the machine as idle as
//!   during it.
//! - Bytes that were in memory during the probe are assumed to be there in the run.
//! - A probe shorter than the loader's read-ahead shows less than the loader can do; `strength` is
//!   that of the verdict.
//! - On the device, operations of the loader take time from the step; the estimate assumes that
//!   they run in parallel.
//! - Other ranks on the same storage are not seen: `ranks_until_storage` divides what this process
//!   saw.

use super::load::{Cause, StageLoad, ratio};
use super::verdict::{Strength, Verdict};
use super::whatif::{Change, Prediction, WhatIf};
use super::words::{bytes, grouped, number, or_more, time};
use crate::meter::{PipelineStage, Snapshot};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A prediction of a run of a `Loader`. `Display` is a table with the source of
/// each number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Estimate {
    /// Samples per second of this rank.
    pub items_per_s: f64,
    /// The limiting stage.
    pub bound_by: Cause,
    /// The confidence in the limit.
    pub strength: Strength,
    /// The caller's step, in nanoseconds.
    pub step_ns: f64,
    /// Time that the loader alone, without a step, takes per batch, in nanoseconds.
    pub loader_ns: f64,
    /// The stages with work, at the rate of the loader alone.
    pub stages: Vec<StageLoad>,
    /// The wait for the first batch of an epoch, on average, in nanoseconds.
    pub first_batch_ns: u64,
    /// Samples of the probe.
    pub probed_samples: u64,
    /// Time of the probe after its first batch, in nanoseconds.
    pub probed_ns: u64,
    /// Share of the probe's bytes that were read from neither a device nor the network.
    pub from_memory_share: Option<f64>,
    /// The cost of an epoch of this rank.
    pub epoch: EpochCost,
    /// The rate with the same step once everything is cached: in memory, or objects on a local
    /// disk.
    pub cached: Option<Prediction>,
    /// Host memory that the loader plans, in bytes.
    pub memory_bytes: u64,
    /// The number of decode workers from which on storage is the limit. A lower bound if the probe
    /// did not saturate storage.
    pub workers_until_storage: Option<f64>,
    /// The number of ranks like this one from which on the probe's storage is the limit. Like
    /// `workers_until_storage`, it may be a lower bound.
    pub ranks_until_storage: Option<f64>,
}

/// The cost of an epoch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EpochCost {
    /// Samples of this rank.
    pub samples: u64,
    /// Batches.
    pub batches: u64,
    /// Time including the first batch, in nanoseconds.
    pub ns: f64,
    /// Bytes read, from storage or memory.
    pub bytes: f64,
    /// Requests to object stores; 0 if everything is in a local cache.
    pub requests: f64,
}

impl Estimate {
    /// `None` without a batch after the first. `total` has the counts since the loader was built,
    /// `snapshot` those of the steady time, `epoch` an epoch's samples and batches.
    /// `from_memory_share` and `memory_bytes` are as in [`Estimate`].
    #[doc(hidden)]
    pub fn of(
        total: &Snapshot,
        snapshot: &Snapshot,
        step_ns: f64,
        epoch: EpochCost,
        from_memory_share: Option<f64>,
        memory_bytes: u64,
    ) -> Option<Self> {
        let model = WhatIf::from(snapshot)?;
        let verdict = Verdict::of(snapshot);
        let consumer = &total.consumer;
        let firsts = consumer
            .batches
            .saturating_sub(snapshot.consumer.handed().batches)
            .max(1);
        let first_ns = consumer.first_ns / firsts;
        // Batches that were ready before the first one count only with the time that they took
        // before it.
        let whole_ns = ratio(
            (consumer.first_ns as f64) + snapshot.steady_ns as f64,
            consumer.batches as f64,
        );
        let least_ns = if model.is_short() { whole_ns } else { 0.0 };
        let rows = ratio(epoch.samples as f64, epoch.batches as f64);
        let beside = |alone: &Prediction| model.beside(alone, rows, step_ns, least_ns);
        let alone = model.alone(&Change::default());
        let (items_per_s, loader_ns) = beside(&alone);
        let bound_by = match verdict.cause {
            _ if step_ns >= loader_ns => Cause::Consumer,
            Cause::Unknown | Cause::NotStarved | Cause::Consumer => alone.bound_by,
            cause => cause,
        };
        let storage = &total.storage;
        let decode = &total.decode;
        let rows = decode
            .samples
            .saturating_add(storage.in_place)
            .max(consumer.samples);
        let read = storage
            .counts
            .bytes_moved
            .saturating_add(storage.cached_bytes);
        let each = |amount: u64| ratio(amount as f64, rows as f64) * epoch.samples as f64;
        let requests = storage
            .network
            .as_ref()
            .map_or(0, |network| network.requests);
        let from_memory_share = from_memory_share.filter(|_| requests == 0);
        // If most bytes came from memory, the few reads show nothing about storage.
        let is_seen = requests > 0 || from_memory_share.is_some_and(|share| share < MOSTLY);
        let limit = ceiling(&alone.stages, PipelineStage::Storage).filter(|_| is_seen);
        let change = Change {
            cached: requests == 0,
            local_cache: requests > 0,
            ..Change::default()
        };
        let cached = limit.map(|_| {
            let then = model.alone(&change);
            Prediction {
                items_per_s: beside(&then).0,
                ..then
            }
        });
        let thin = matches!(verdict.strength, Strength::Thin { .. });
        let counts = limit.filter(|_| !thin);
        let works = decode.samples > 0;
        let each_worker = ceiling(&alone.stages, PipelineStage::Decode).filter(|_| works);
        let each_worker = each_worker.map(|all| all / f64::from(decode.workers.max(1)));
        Some(Self {
            items_per_s,
            bound_by,
            strength: verdict.strength,
            step_ns,
            loader_ns,
            first_batch_ns: first_ns,
            probed_samples: total.consumer.samples,
            probed_ns: snapshot.steady_ns,
            from_memory_share,
            epoch: EpochCost {
                ns: ratio(epoch.samples as f64, items_per_s) * 1e9 + first_ns as f64,
                bytes: each(read),
                requests: each(requests),
                ..epoch
            },
            cached,
            memory_bytes,
            workers_until_storage: counts
                .zip(each_worker)
                .map(|(limit, each)| ratio(limit, each)),
            ranks_until_storage: counts.map(|limit| ratio(limit, items_per_s)),
            stages: alone.stages,
        })
    }
}

/// If at least this share of the bytes came from memory, the probe hardly used storage.
const MOSTLY: f64 = 0.5;

fn ceiling(stages: &[StageLoad], stage: PipelineStage) -> Option<f64> {
    stages
        .iter()
        .find(|load| load.stage == stage)
        .map(|load| load.ceiling_items_per_s)
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row =
            |name: &str, value: String, source: &str| writeln!(f, "{name:<14}{value:<44}{source}");
        let step = time(self.step_ns);
        let loader = time(self.loader_ns);
        row(
            "rate",
            format!("{} samples/s", number(self.items_per_s)),
            &format!("per batch the loader takes {loader}, your step {step}"),
        )?;
        row(
            "limit",
            self.bound_by.to_string(),
            &self.strength.to_string(),
        )?;
        let samples = grouped(&self.probed_samples.to_string());
        let probed = time(self.probed_ns as f64);
        let memory = self.from_memory_share.map_or(String::new(), |share| {
            format!(", {:.0} % of the bytes from memory", 100.0 * share)
        });
        row(
            "probe",
            format!("{samples} samples in {probed}"),
            &format!("the batches so far{memory}"),
        )?;
        row(
            "first batch",
            time(self.first_batch_ns as f64),
            "the probe's, averaged over epochs",
        )?;
        let EpochCost {
            samples,
            batches,
            ns,
            bytes: read,
            requests,
        } = &self.epoch;
        let samples = grouped(&samples.to_string());
        let batches = grouped(&batches.to_string());
        row(
            "an epoch",
            format!("{samples} samples, {batches} batches, {}", time(*ns)),
            "of this rank: the order, at the rate",
        )?;
        row(
            "",
            format!("{} read", bytes(*read)),
            "the probe's bytes for each sample",
        )?;
        if *requests >= 1.0 {
            let count = number(*requests);
            row(
                "",
                format!("{count} requests to stores"),
                "the probe's for each sample; 0 when all is in a local cache",
            )?;
        }
        if let Some(cached) = &self.cached {
            let most = if cached.at_most { "at most " } else { "" };
            let rate = number(cached.items_per_s);
            row(
                "all cached",
                format!("{most}{rate} samples/s"),
                "the model without reads from storage",
            )?;
        }
        row(
            "memory",
            bytes(self.memory_bytes as f64),
            "the loader's plan, at most",
        )?;
        let storage = self
            .stages
            .iter()
            .find(|load| load.stage == PipelineStage::Storage);
        let at_least = storage.is_some_and(|load| load.at_least);
        let more = |least: f64| format!("{least:.1}{}", or_more(at_least));
        if let Some(workers) = self.workers_until_storage {
            row(
                "workers",
                format!("storage limits from {} on", more(workers)),
                "ceilings of storage and of one worker",
            )?;
        }
        if let Some(ranks) = self.ranks_until_storage {
            row(
                "ranks",
                format!("this storage feeds {}", more(ranks)),
                "its ceiling over the rate",
            )?;
        }
        f.write_str(
            "Assumed: the rest of the data is like the probe's, and the machine is as \
             idle as during the probe.",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::verdict::tests::decoding;
    use super::*;

    fn estimate(step_ns: f64, memory: f64, change: impl FnOnce(&mut Snapshot)) -> Estimate {
        let mut snapshot = decoding();
        change(&mut snapshot);
        let epoch = EpochCost {
            samples: 1_000_000,
            batches: 10_000,
            ..EpochCost::default()
        };
        Estimate::of(&snapshot, &snapshot, step_ns, epoch, Some(memory), 1 << 30).unwrap()
    }

    #[test]
    fn the_slower_of_loader_and_step_is_the_limit() {
        // Workers give 1,010 samples/s: 99 ms a batch.
        for (step_ns, rate, limit) in [
            (0.0, 1010.0, Cause::Decode),
            (50e6, 1000.0, Cause::Decode),
            (200e6, 500.0, Cause::Consumer),
        ] {
            let made = estimate(step_ns, 0.0, |_| ());
            assert!(
                (made.items_per_s / rate - 1.0).abs() < 0.05 && made.bound_by == limit,
                "{step_ns}: {made}"
            );
            assert!((made.loader_ns / 99e6 - 1.0).abs() < 0.05, "{made}");
        }
    }

    #[test]
    fn an_epoch_costs_what_the_samples_of_the_probe_did() {
        let made = estimate(0.0, 0.0, |s| {
            (s.consumer.batches, s.consumer.steady) = (
                104,
                Some(crate::meter::Handed {
                    batches: 100,
                    samples: 10_000,
                }),
            );
            s.consumer.first_ns = 400_000_000;
            let network = s.storage.network.insert(Default::default());
            network.requests = 500;
            network.bytes = 1;
        });
        assert_eq!(
            (made.epoch.bytes, made.epoch.requests),
            (110e9, 50_000.0),
            "110 kB and 0.05 requests for each sample"
        );
        assert!(
            (made.epoch.ns / 1e12 - 0.99).abs() < 0.05 && made.first_batch_ns == 100_000_000,
            "of four epochs"
        );
        let text = made.to_string();
        for part in [
            "1,000,000 samples, 10,000 batches, ",
            "50,000 requests to stores",
            "the loader's plan",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn storage_limits_from_so_many_workers_and_ranks_on() {
        let made = estimate(0.0, 0.1, |_| ());
        // Storage gives 2,500 samples/s, a worker 252.
        let workers = made.workers_until_storage.unwrap();
        let ranks = made.ranks_until_storage.unwrap();
        assert!(
            (workers - 9.9).abs() < 0.2 && (ranks - 2.5).abs() < 0.1,
            "{workers} {ranks}"
        );
        let memory = estimate(0.0, 1.0, |_| ());
        assert_eq!(
            (memory.workers_until_storage, memory.ranks_until_storage),
            (None, None),
            "storage was not seen"
        );
    }
}
