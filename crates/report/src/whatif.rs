//! Predictions for other settings or another machine, computed from a snapshot. Pure.
//!
//! ```text
//!  loads as measured ──► changed: each by its factor ──► time of a batch t(u) = most + serial · (sum − most) + rest
//!  u₁ … uₙ                u'₁ … u'ₙ                       X' = X · t(u) ÷ t(u')
//! ```
//!
//! A stage's ceiling is throughput ÷ load, see [`load`](super::load). If all stages were always at
//! work, the throughput would be the lowest ceiling. It is lower if slots are few and times vary,
//! because stages then wait for each other. With one slot they work in turn, and the demands add
//! up. The measurement is between these cases: `serial` is chosen so that t(u) = 1, because the
//! measured loads gave the measured throughput. So without a change the model gives the measured
//! rate or, if samples had been prepared before the first batch, the sustainable rate. A saturated
//! stage hides `serial`, which is then the minimum for this number of slots. For a change of slots
//! it is assumed to be inversely proportional to their number.
//!
//! # Limits
//!
//! - Storage's ceiling is a lower bound if reads did not fill the depth; a prediction bound by it
//!   says "at least".
//! - Each worker is assumed to be as fast when there are more workers. Memory bandwidth, caches and
//!   hyper-threads limit this at some point, and it is not known how many cores the consumer's own
//!   threads need.
//! - More workers than rows in the slots, or than cores, are of no use and are not counted.
//! - A prediction for other slots is an extrapolation, to be taken as a direction.
//! - No measurement shows how much the consumer's own work varies; a saturated stage hides it.
//! - More than nine of ten predictions are within 10 % of scenarios of the real pipeline
//!   (`loader::scenarios`), or say "at least". The scenarios change workers and storage, with
//!   constant as well as exponentially distributed times. With few rows for each worker, or one or
//!   two slots, stages wait for the last row of each batch. A caveat says so if slots are few.

use super::depth::{Headroom, network_share};
use super::load::{Cause, FILLED, Loads, PREPARED_LEAST, StageLoad, ratio};
use crate::meter::{PipelineStage, Snapshot};
use feedline_base::meter::Latency;
use feedline_base::setting::Setting;
use serde::{Deserialize, Serialize};

/// A change of settings or of the machine. `Default` is no change.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// Number of decode workers.
    pub workers: Option<u32>,
    /// Number of batch slots.
    pub slots: Option<u32>,
    /// Maximum number of reads in flight.
    pub depth: Option<u32>,
    /// Speed of storage, as a multiple of the present one.
    pub storage_factor: Option<f64>,
    /// All files are in the page cache: nothing is read, and workers copy the bytes.
    pub cached: bool,
    /// All objects are in the local cache: nothing comes from object stores.
    pub local_cache: bool,
    /// Speed of the consumer's own work, as a multiple of the present one.
    pub consumer_factor: Option<f64>,
    /// The device decodes, workers do nothing.
    pub gpu_decode: bool,
}

/// The predicted effect of a [`Change`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Prediction {
    /// Samples per second.
    pub items_per_s: f64,
    /// Whether the rate is a lower bound: the limiting stage was not seen at its limit.
    pub at_least: bool,
    /// Whether the rate is an upper bound: the gain of the change was not measured. The caveats
    /// give the reason.
    pub at_most: bool,
    /// The limit after the change.
    pub bound_by: Cause,
    /// The stages with work, from the consumer upstream.
    pub stages: Vec<StageLoad>,
    /// The assumptions, a sentence each.
    pub caveats: Vec<String>,
}

/// A model of a measured loader.
#[derive(Clone, Debug)]
pub struct WhatIf {
    loads: Loads,
    /// Share of the other stages' work that does not overlap with that of the busiest stage: 0 to
    /// 1.
    serial: f64,
    /// Share of the time in which no known stage was at work.
    rest: f64,
    workers: f64,
    /// Cores that workers may use; infinite when it is not known.
    cores: f64,
    slots: f64,
    /// Maximum number of reads in flight.
    depth: f64,
    /// Mean number of a batch's rows that workers can decode in parallel. It is lower than the
    /// batch size, because a few long rows occupy the slot after the others are done.
    rows: f64,
    /// Share of the workers' time that copying would add for the bytes that are now read from
    /// storage.
    caching: f64,
    /// Share of the reads that object stores served.
    network: f64,
}

/// The minimum of `serial` with two slots; with more slots it is proportionally lower.
const SERIAL_LEAST: f64 = 0.15;
/// Assumed speed of a worker's copies from the page cache, in bytes per nanosecond.
const CACHE_SPEED: f64 = 4.0;
/// With at most this many slots, workers idle at the end of each batch.
const FEW_SLOTS: f64 = 2.0;
/// Workers compete for cores when they get less than this share of the CPU time they would use.
pub(super) const COMPETES: f64 = 0.85;

impl WhatIf {
    /// A predicted rate below this multiple of the present rate does not justify a change.
    pub const GAIN: f64 = 1.05;

    /// `None` when no batch or no time was measured.
    pub fn from(snapshot: &Snapshot) -> Option<Self> {
        let loads = Loads::of(snapshot)?;
        let decode = &snapshot.decode;
        let slots = f64::from(snapshot.slots.count.max(1));
        let workers = f64::from(decode.workers.max(1));
        // The planner's thread needs its share, too.
        let free = (loads.cores - loads.order.min(1.0)).max(1.0);
        // Workers that compete do not get more CPU time if there are more of them.
        let got = if loads.cpu_share < COMPETES {
            (workers * loads.cpu_share).max(1.0)
        } else {
            f64::INFINITY
        };
        let mut model = Self {
            serial: 0.0,
            rest: 0.0,
            workers,
            // A worker that is blocked for a part of its work leaves its core to others.
            cores: free.min(got) / loads.on_cpu,
            slots,
            depth: f64::from(snapshot.storage.depth.max(1)),
            rows: loads.samples_per_batch().max(1.0) * evenness(&decode.latency),
            caching: snapshot.storage.counts.bytes_moved as f64 / CACHE_SPEED / loads.steady_ns,
            network: network_share(&snapshot.storage),
            loads,
        };
        let loads = model.measured().map(|(_, load)| load);
        let (most, sum) = most_and_sum(&loads);
        model.rest = (1.0 - sum).max(0.0);
        let measured = (1.0 - model.rest - most) / (sum - most).max(1e-9);
        model.serial = measured.clamp(SERIAL_LEAST / (slots - 1.0).max(1.0), 1.0);
        Some(model)
    }

    /// The predicted effect of the change.
    pub fn with(&self, change: &Change) -> Prediction {
        let mut caveats = Vec::new();
        let loads = self.changed(change, &mut caveats);
        let serial = self.serial_with(change, &mut caveats);
        if self.slots <= FEW_SLOTS && *change != Change::default() {
            caveats.push(
                "With so few slots stages wait for the last row of each batch: it may be up \
                 to 30 % less."
                    .into(),
            );
        }
        if self.loads.starved.is_none() {
            caveats.push(
                "The consumer's stream is not known, so the consumer's own limit is not known \
                 either."
                    .into(),
            );
        }
        let now = self.time(self.measured(), self.serial);
        let then = self.time(loads, serial);
        let rate = self.loads.sustained();
        let mut stages = self
            .loads
            .with_work(loads.map(|(stage, load)| (stage, load * self.loads.over())));
        let mut items_per_s = if then > 0.0 {
            finite(rate * now / then)
        } else {
            rate
        };
        let least = least(&stages);
        if let Some(StageLoad {
            ceiling_items_per_s: ceiling,
            ..
        }) = least
        {
            // The upper bound assumes that stages never wait for each other.
            let waits = !(change.local_cache && self.network > 0.0);
            items_per_s = if waits {
                items_per_s.min(ceiling)
            } else {
                ceiling
            };
        }
        if change.cached {
            // The speed of workers' copies is a guess. Bytes that they do not copy are read as now,
            // so the rate is not less.
            items_per_s = items_per_s.max(
                self.with(&Change {
                    cached: false,
                    ..change.clone()
                })
                .items_per_s,
            );
        }
        let bound_by = match least {
            Some(load) if items_per_s >= SERIAL * load.ceiling_items_per_s => load.stage.into(),
            _ if self.rest > SERIAL * then => Cause::HandOver,
            Some(_) => Cause::MemoryBudget,
            None => Cause::HandOver,
        };
        for load in &mut stages {
            load.utilisation = ratio(items_per_s, load.ceiling_items_per_s).min(1.0);
        }
        // The bound also applies if storage merely slows down the limiting stage.
        let storage = loads
            .iter()
            .find(|(stage, _)| *stage == PipelineStage::Storage)
            .map_or(0.0, |(_, load)| *load);
        let seen_less = self.loads.at_least(PipelineStage::Storage) && storage > 0.6 * then;
        if seen_less {
            let filled = 100.0 * self.loads.depth_filled;
            caveats.push(format!(
                "Storage may deliver more than was measured: its reads filled only \
                 {filled:.0} % of the depth."
            ));
        }
        let depth = change
            .depth
            .map_or(self.depth, |depth| f64::from(depth.max(1)));
        let at_least = seen_less || depth < self.depth;
        let unseen = depth > self.depth || change.gpu_decode || change.local_cache;
        let at_most = unseen && items_per_s > rate;
        Prediction {
            items_per_s,
            at_least,
            at_most,
            bound_by,
            stages,
            caveats,
        }
    }

    /// The effect of a change on the loader alone, without the consumer's work.
    pub(super) fn alone(&self, change: &Change) -> Prediction {
        self.with(&Change {
            consumer_factor: Some(1e6),
            ..change.clone()
        })
    }

    /// Whether most samples were ready before the first batch of their epoch.
    pub(super) fn is_short(&self) -> bool {
        self.loads.prepared < PREPARED_LEAST
    }

    /// The rate in samples per second of the loader alongside a step of `step_ns`, and the loader's
    /// time for a batch of `rows` rows, at least `least_ns`.
    pub(super) fn beside(
        &self,
        alone: &Prediction,
        rows: f64,
        step_ns: f64,
        least_ns: f64,
    ) -> (f64, f64) {
        let loader_ns = ratio(rows * 1e9, alone.items_per_s).max(least_ns);
        // With one slot the stages work in turn.
        let serial = if self.slots < 2.0 {
            1.0
        } else {
            SERIAL_LEAST / (self.slots - 1.0)
        };
        let batch_ns = loader_ns.max(step_ns) + serial * loader_ns.min(step_ns);
        (finite(ratio(rows * 1e9, batch_ns)), finite(loader_ns))
    }

    /// Workers that can work at once.
    fn parallel(&self, workers: f64, slots: f64) -> f64 {
        // Count at least as many as work now.
        workers
            .max(1.0)
            .min((slots.max(1.0) * self.rows).max(self.loads.working))
            .min(self.cores)
    }

    /// The loads at the sustainable rate.
    fn measured(&self) -> [(PipelineStage, f64); 5] {
        PipelineStage::UPSTREAM.map(|stage| {
            let load = match stage {
                PipelineStage::Decode if self.loads.decode > 0.0 => {
                    let parallel = self.parallel(self.workers, self.slots);
                    (self.loads.working / parallel / self.loads.prepared).max(self.loads.decode)
                }
                _ => self.loads.load(stage),
            };
            (stage, (load / self.loads.over()).min(1.0))
        })
    }

    fn changed(&self, change: &Change, caveats: &mut Vec<String>) -> [(PipelineStage, f64); 5] {
        let mut factor = |what: &str, by: Option<f64>| match by {
            None => 1.0,
            Some(by) if by > 0.0 && by.is_finite() => by,
            Some(by) => {
                caveats.push(format!(
                    "{what}: a factor of {by} was ignored; it must be positive."
                ));
                1.0
            }
        };
        let storage = factor("Storage", change.storage_factor);
        let consumer = factor("A consumer", change.consumer_factor);
        let storage = storage * self.deeper(change, caveats);
        let local = change.local_cache && self.network > 0.0;
        if change.local_cache {
            caveats.push(match local {
                true => "The speed of the local disk is not known: this is an upper bound.".into(),
                false => "Neither object stores nor network mounts served reads: a local cache \
                     changes nothing."
                    .into(),
            });
        }
        self.measured().map(|(stage, load)| {
            let changed = match stage {
                PipelineStage::Consumer => load / consumer,
                // Network reads may be few or many; their share of the time is not known.
                PipelineStage::Storage if change.cached || local => 0.0,
                PipelineStage::Storage => load / storage,
                PipelineStage::Decode => self.decode(load, change, caveats),
                _ => load,
            };
            (stage, finite(changed))
        })
    }

    /// The maximum factor by which another depth can multiply storage's speed.
    fn deeper(&self, change: &Change, caveats: &mut Vec<String>) -> f64 {
        let depth = change
            .depth
            .map_or(self.depth, |depth| f64::from(depth.max(1)));
        let now = self.depth;
        let filled = self.loads.depth_filled;
        let in_flight = now * filled;
        if depth == now || self.loads.storage == 0.0 {
            return 1.0;
        }
        if depth < now {
            caveats.push(
                "With fewer reads in flight each may take less time: storage may deliver \
                 more."
                    .into(),
            );
            return (depth / in_flight.max(1.0)).min(1.0);
        }
        if filled < FILLED {
            caveats.push(format!(
                "A larger depth gives nothing: only {in_flight:.0} of {now:.0} reads were in \
                     flight."
            ));
            return 1.0;
        }
        match self.loads.headroom {
            Headroom::Limit { times } => {
                caveats.push(format!(
                    "A larger depth gives nothing: {now:.0} reads in flight wait for each other, \
                     half of them took {times:.1} times as long as the fastest."
                ));
                return 1.0;
            }
            Headroom::Left => caveats
                .push("This gain assumes that reads do not begin to wait for each other.".into()),
            Headroom::Unknown => caveats.push(
                "Whether a larger depth gives anything cannot be known: latencies do not \
                 tell whether storage is at its limit."
                    .into(),
            ),
        }
        depth / now
    }

    fn decode(&self, load: f64, change: &Change, caveats: &mut Vec<String>) -> f64 {
        if change.gpu_decode {
            caveats.push(
                "The device's decoding speed is not known, nor how much decoding slows its \
                 other work: this is an upper bound."
                    .into(),
            );
            return 0.0;
        }
        let slots = change.slots.map_or(self.slots, f64::from);
        let wanted = change.workers.map_or(self.workers, f64::from);
        let now = self.parallel(self.workers, self.slots);
        let then = self.parallel(wanted, slots);
        if wanted > then && wanted > self.workers {
            caveats.push(match then < self.cores {
                true => format!(
                    "There are rows for only {then:.0} workers: use more {} or a larger {}.",
                    Setting::Slots,
                    Setting::BatchSize
                ),
                false => format!("There are cores for only {then:.1} workers."),
            });
        } else if then > now {
            caveats.push(
                "Assumes that more workers do not slow each other down, and that their cores \
                     are free."
                    .into(),
            );
        }
        let copying = if change.cached {
            self.caching / now
        } else {
            0.0
        };
        if copying > 0.0 {
            caveats.push(format!(
                "Assumes that a worker copies {CACHE_SPEED} GB/s from the page cache."
            ));
        }
        (load + copying) * now / then
    }

    fn serial_with(&self, change: &Change, caveats: &mut Vec<String>) -> f64 {
        let slots = change
            .slots
            .map_or(self.slots, |slots| f64::from(slots.max(1)));
        if slots == self.slots {
            return self.serial;
        }
        caveats.push(
            "The effect of the number of slots is extrapolated from how often stages waited \
                 for each other."
                .into(),
        );
        (self.serial * self.slots / slots).min(1.0)
    }

    /// The time per batch, as a multiple of the measured one.
    fn time(&self, loads: [(PipelineStage, f64); 5], serial: f64) -> f64 {
        let (most, sum) = most_and_sum(&loads.map(|(_, load)| load));
        most + serial * (sum - most) + self.rest
    }
}

fn most_and_sum(loads: &[f64; 5]) -> (f64, f64) {
    (
        loads.iter().copied().fold(0.0, f64::max),
        loads.iter().sum(),
    )
}

/// The stage with the lowest ceiling.
pub(super) fn least(stages: &[StageLoad]) -> Option<StageLoad> {
    stages
        .iter()
        .copied()
        .min_by(|a, b| a.ceiling_items_per_s.total_cmp(&b.ceiling_items_per_s))
}

/// Mean time of a row as a share of a long row's: 1 if all rows take the same time.
fn evenness(latency: &Latency) -> f64 {
    let share = latency.mean_ns / latency.p90_ns;
    if share.is_finite() {
        share.clamp(0.1, 1.0)
    } else {
        1.0
    }
}

/// A stage that works at less than this share of its ceiling is not the limit.
const SERIAL: f64 = 0.8;

fn finite(value: f64) -> f64 {
    if value.is_finite() { value } else { f64::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::{CacheReads, Handed};
    use feedline_base::meter::Network;

    /// 100 batches of 16 rows in ten seconds: the shares of the time that the consumer, decode,
    /// storage and the order took.
    fn measured([consumer, decode, storage, order]: [f64; 4], slots: u32) -> Snapshot {
        let ns = |share: f64| (share * 10e9) as u64;
        let mut s = Snapshot {
            at_ns: ns(1.0),
            steady_ns: ns(1.0),
            ..Snapshot::default()
        };
        s.consumer.batches = 100;
        s.consumer.samples = 1600;
        s.consumer.bytes = 1_600_000;
        s.consumer.user_ns = ns(consumer);
        s.consumer.waited_ns = ns(1.0 - consumer);
        s.decode.workers = 4;
        s.decode.cores = 64;
        s.decode.samples = 1600;
        s.decode.busy_ns = 4 * ns(decode);
        s.storage.counts.ops = 1600;
        s.storage.counts.bytes_moved = 1_600_000;
        s.storage.depth = 16;
        s.storage.busy_ns = ns(storage);
        s.storage.in_flight_ns = 16 * ns(storage);
        s.order.busy_ns = ns(order);
        s.slots.count = slots;
        s
    }

    const SHARES: [[f64; 4]; 6] = [
        [0.25, 1.0, 0.25, 0.01],
        [0.3, 0.6, 0.6, 0.1],
        [0.9, 0.5, 0.4, 0.0],
        [0.4, 0.4, 0.2, 0.0],
        [0.1, 0.2, 0.99, 0.02],
        [0.05, 0.1, 0.1, 0.05],
    ];

    fn all() -> impl Iterator<Item = Snapshot> {
        SHARES
            .into_iter()
            .flat_map(|shares| [1, 2, 4, 12].map(|slots| measured(shares, slots)))
    }

    fn rate(snapshot: &Snapshot, change: Change) -> f64 {
        WhatIf::from(snapshot).unwrap().with(&change).items_per_s
    }

    fn workers(count: u32) -> Change {
        Change {
            workers: Some(count),
            ..Change::default()
        }
    }

    fn about(value: f64, expected: f64) {
        assert!(
            (value / expected - 1.0).abs() < 0.03,
            "{value}, not {expected}"
        );
    }

    #[test]
    fn without_a_change_the_model_gives_the_measured_rate() {
        for snapshot in all() {
            let slots = Some(snapshot.slots.count);
            for change in [
                Change::default(),
                Change {
                    slots,
                    storage_factor: Some(1.0),
                    ..workers(4)
                },
            ] {
                let got = rate(&snapshot, change);
                assert!((got / 160.0 - 1.0).abs() < 1e-9, "{got}, not 160");
            }
        }
    }

    #[test]
    fn a_full_local_cache_leaves_the_limits_of_other_stages() {
        let mut storing = measured([0.5, 0.2, 1.0, 0.01], 12);
        let local = Change {
            local_cache: true,
            ..Change::default()
        };
        about(rate(&storing, local.clone()), 160.0);
        let network = storing.storage.network.insert(Network::default());
        network.requests = 1600;
        let then = WhatIf::from(&storing).unwrap().with(&local);
        about(then.items_per_s, 2.0 * 160.0);
        assert!(then.at_most, "{then:?}");
        storing.storage.local_cache = Some(CacheReads {
            hits: 1200,
            misses: 400,
            ..CacheReads::default()
        });
        about(rate(&storing, local), 2.0 * 160.0);
    }

    #[test]
    fn a_saturated_stage_gives_way_to_the_next() {
        let decoding = measured([0.25, 1.0, 0.25, 0.01], 12);
        about(rate(&decoding, workers(8)), 2.0 * 160.0);
        // Then the consumer limits.
        about(
            rate(
                &decoding,
                Change {
                    gpu_decode: true,
                    ..Change::default()
                },
            ),
            3.9 * 160.0,
        );
        let storing = measured([0.5, 0.2, 1.0, 0.01], 12);
        about(
            rate(
                &storing,
                Change {
                    storage_factor: Some(4.0),
                    ..Change::default()
                },
            ),
            2.0 * 160.0,
        );
        about(rate(&storing, workers(8)), 160.0);
    }

    #[test]
    fn with_one_slot_the_times_of_stages_add_up() {
        let serial = measured([0.4, 0.4, 0.2, 0.0], 1);
        about(
            rate(
                &serial,
                Change {
                    storage_factor: Some(2.0),
                    ..Change::default()
                },
            ),
            160.0 / 0.9,
        );
        about(
            rate(
                &serial,
                Change {
                    consumer_factor: Some(4.0),
                    ..Change::default()
                },
            ),
            160.0 / 0.7,
        );
        assert!(
            rate(
                &serial,
                Change {
                    slots: Some(4),
                    ..Change::default()
                }
            ) > 1.4 * 160.0
        );
    }

    #[test]
    fn samples_ready_before_the_first_batch_raise_no_rate() {
        for mut snapshot in all() {
            for ready in [0.0, 0.1, 0.4] {
                let samples = (1600.0 * (1.0 + ready)) as u64;
                snapshot.consumer.steady = Some(Handed {
                    batches: 100,
                    samples,
                });
                let model = WhatIf::from(&snapshot).unwrap();
                let now = model.with(&Change::default());
                let least = least(&now.stages).unwrap().ceiling_items_per_s;
                assert!(now.items_per_s <= least * 1.000001, "{ready} {now:?}");
            }
        }
    }

    #[test]
    fn more_resources_never_give_less_nor_pass_a_ceiling() {
        for snapshot in all() {
            let model = WhatIf::from(&snapshot).unwrap();
            let rate = |change: Change| {
                let then = model.with(&change);
                let least = least(&then.stages).unwrap().ceiling_items_per_s;
                assert!(then.items_per_s <= least, "{then:?}");
                then.items_per_s
            };
            let rises = |rates: Vec<f64>| {
                assert!(
                    rates.windows(2).all(|pair| pair[1] >= 0.9999 * pair[0]),
                    "{rates:?}"
                )
            };
            rises((1..10).map(|count| rate(workers(count))).collect());
            rises(
                (1..20)
                    .map(|slots| {
                        rate(Change {
                            slots: Some(slots),
                            ..Change::default()
                        })
                    })
                    .collect(),
            );
            let factors = || [0.1, 0.5, 1.0, 3.0, 1e9].into_iter().map(Some);
            rises(
                factors()
                    .map(|storage_factor| {
                        rate(Change {
                            storage_factor,
                            ..Change::default()
                        })
                    })
                    .collect(),
            );
            rises(
                factors()
                    .map(|consumer_factor| {
                        rate(Change {
                            consumer_factor,
                            ..Change::default()
                        })
                    })
                    .collect(),
            );
        }
    }

    #[test]
    fn a_stage_without_work_has_no_ceiling() {
        let model = WhatIf::from(&measured([0.05, 1.0, 0.06, 0.01], 6)).unwrap();
        let now = model.with(&Change::default());
        assert_eq!(now.bound_by, Cause::Decode);
        let stages = |then: &Prediction| {
            then.stages
                .iter()
                .map(|load| load.stage)
                .collect::<Vec<_>>()
        };
        let cached = model.with(&Change {
            cached: true,
            ..Change::default()
        });
        assert!(
            !stages(&cached).contains(&PipelineStage::Storage),
            "{cached:?}"
        );
        let decoded = model.with(&Change {
            gpu_decode: true,
            ..Change::default()
        });
        assert!(
            !stages(&decoded).contains(&PipelineStage::Decode)
                && decoded.bound_by == Cause::Storage,
            "{decoded:?}"
        );
        assert!(
            decoded.items_per_s > 10.0 * now.items_per_s && !decoded.caveats.is_empty(),
            "{decoded:?}"
        );
        for by in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let then = model.with(&Change {
                storage_factor: Some(by),
                consumer_factor: Some(by),
                ..Change::default()
            });
            assert_eq!(
                (then.items_per_s, then.caveats.len()),
                (now.items_per_s, now.caveats.len() + 2)
            );
        }
    }

    #[test]
    fn workers_beyond_the_cores_give_nothing() {
        let mut snapshot = measured([0.05, 1.0, 0.06, 0.01], 32);
        assert!(rate(&snapshot, workers(8)) > 1.9 * rate(&snapshot, workers(4)));
        snapshot.decode.cores = 5;
        let times = rate(&snapshot, workers(8)) / rate(&snapshot, workers(4));
        assert!((1.2..1.26).contains(&times), "{times}");
        let then = WhatIf::from(&snapshot).unwrap().with(&workers(8));
        assert!(
            then.caveats
                .iter()
                .any(|caveat| caveat.contains("cores for only 5.0 workers")),
            "{:?}",
            then.caveats
        );
        // Four workers that got two cores.
        snapshot.decode.cores = 64;
        snapshot.decode.cpu_ns = Some(snapshot.decode.busy_ns / 2);
        assert!(rate(&snapshot, workers(8)) < 1.01 * rate(&snapshot, workers(4)));
    }
}
