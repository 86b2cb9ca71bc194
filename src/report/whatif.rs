//! What another setting or another machine would give, computed from what was measured. Pure.
//!
//! ```text
//!  loads as measured ──► changed: each by its factor ──► one throughput
//!  u₁ … uₙ                u'₁ … u'ₙ                       X' = X · ‖u‖ₚ ÷ ‖u'‖ₚ
//! ```
//!
//! A stage's ceiling is throughput ÷ load, see [`load`](super::load). Were all stages always at work, the throughput would
//! be the least of the ceilings. It is less when slots are few and times vary, since stages then wait for each other; with
//! one slot they work in turn, and the demands add up. Both are a p-norm of the loads: p = 1 is the sum, p = ∞ the greatest.
//! What lies between is measured: p is chosen so that ‖u‖ₚ = 1, for the measured throughput is what the measured loads gave.
//! So without a change the model says what was measured, exactly; where some of that had been prepared before the first
//! batch, what can be kept up. For queues with exponential times p − 1 grows nearly in
//! proportion to slots − 1; that is used for a change of slots.
//!
//! Reading and decoding overlap in one slot, too, so they have a norm of their own inside of the other; and so has the
//! consumer where it holds a batch on the device instead of a slot, see [`Overlap`].
//!
//! # Limits
//!
//! - Storage's ceiling is a lower bound where reads did not fill the depth; a prediction that it bounds says "at least".
//! - Workers are taken to go as fast beside more of them. Memory bandwidth, caches and hyper-threads say otherwise at some point,
//!   and cores that the consumer's own threads need are not known.
//! - More workers than rows in the slots, or than cores, are of no use and are not counted.
//! - A change of slots is an extrapolation, to be taken as a direction.
//! - Nothing measured says how much the consumer's own work varies; behind a stage that is saturated it cannot be seen.
//! - Against the simulation of `simulator.rs`, for workers, storage and consumer, and constant as well as exponentially
//!   distributed times: nine of ten predictions are within 10 %, nearly all others say "at least" and are less than what is
//!   simulated; about 3 in 100 are off by up to 40 %, mostly with few rows for each worker, or one or two slots, where stages wait
//!   for the last row of each batch. A caveat says so where slots are few.

use super::depth::Headroom;
use super::load::{Cause, FILLED, Loads, STAGES};
use crate::meter::Latency;
use crate::meter::Snapshot;
use serde::{Deserialize, Serialize};

/// What shall be different. `Default` is nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// So many decode workers.
    pub workers: Option<u32>,
    /// So many batch slots.
    pub slots: Option<u32>,
    /// So many reads in flight at most.
    pub depth: Option<u32>,
    /// Storage so many times as fast.
    pub storage_factor: Option<f64>,
    /// Everything is in the page cache: nothing is read, and workers copy it.
    pub cached: bool,
    /// Copies to the device so many times as fast.
    pub copy_factor: Option<f64>,
    /// The consumer's own work so many times as fast.
    pub consumer_factor: Option<f64>,
    /// The device decodes, workers do nothing.
    pub gpu_decode: bool,
}

/// What a [`Change`] would give.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Prediction {
    /// Samples per second.
    pub items_per_s: f64,
    /// It is a lower bound: the stage that limits was not seen at its limit.
    pub at_least: bool,
    /// It is an upper bound: how far a change is of use was not measured. The caveats say why.
    pub at_most: bool,
    /// What would limit.
    pub bound_by: Cause,
    /// The most samples per second that each stage could do, from the consumer ([`Cause::Consumer`]) upstream. Stages that do
    /// nothing are not listed.
    pub stages: Vec<(Cause, f64)>,
    /// What was supposed, a sentence each.
    pub caveats: Vec<String>,
}

/// A loader as it was measured, to be changed in thought.
#[derive(Clone, Debug)]
pub struct WhatIf {
    loads: Loads,
    /// How well stages work beside each other; see [`Overlap`].
    overlap: Overlap,
    /// The share of the time in which nothing that is known of was at work.
    rest: f64,
    workers: f64,
    /// Cores that workers may use; infinite when it is not known.
    cores: f64,
    slots: f64,
    /// Reads in flight at most.
    depth: f64,
    /// Rows of a batch that can be worked on at once all the time: those that take longer keep their slot while the others
    /// are done.
    rows: f64,
    /// Share of the workers' time that copying what is now read would take more.
    caching: f64,
}

/// The greatest p: so close to the maximum that it does not matter.
const P_MAX: f64 = 64.0;
/// How much p grows with each slot beyond the first, where nothing is known (0.7 is that of queues with exponential times,
/// constant ones have more), and at most.
const P_SLOT: f64 = 1.2;
const P_SLOT_MOST: f64 = 4.0;
/// The least for reading beside decoding when there are several slots, and for the device beside the host.
const P_ROWS: f64 = 4.0;
const P_DEVICE: f64 = 6.0;
/// What a worker is supposed to copy from the page cache, in bytes per nanosecond.
const CACHE_SPEED: f64 = 4.0;
/// Up to so many slots the ends of batches show.
const FEW_SLOTS: f64 = 2.0;
/// Workers compete for cores when they get less than this share of the CPU time they would use.
pub(super) const COMPETES: f64 = 0.85;

impl WhatIf {
    /// A prediction of less than so many times the present rate is no reason to change anything.
    pub const GAIN: f64 = 1.05;

    /// `None` when no batch or no time was measured.
    pub fn from(snapshot: &Snapshot) -> Option<Self> {
        let loads = Loads::of(snapshot)?;
        let (decode, slots) = (&snapshot.decode, f64::from(snapshot.slots.count.max(1)));
        let workers = f64::from(decode.workers.max(1));
        let given = if decode.cores == 0 { f64::INFINITY } else { f64::from(decode.cores) };
        // The planner's thread needs its share, too.
        let free = (given - loads.order.min(1.0)).max(1.0);
        // Workers that compete do not get more CPU time by being more.
        let got = if loads.cpu_share < COMPETES { (workers * loads.cpu_share).max(1.0) } else { f64::INFINITY };
        let mut model = Self {
            overlap: Overlap { p: P_MAX, q: P_MAX, slots_end_with_copy: snapshot.copy.is_some() },
            rest: 0.0,
            workers,
            // One that is blocked for a part of its work leaves its core to others.
            cores: free.min(got) / loads.on_cpu,
            slots,
            depth: f64::from(snapshot.storage.depth.max(1)),
            rows: loads.samples_per_batch().max(1.0) * evenness(&decode.latency),
            caching: snapshot.storage.bytes as f64 / CACHE_SPEED / loads.steady_ns,
            loads,
        };
        let loads = model.measured().map(|(_, load)| load);
        model.rest = (1.0 - loads.iter().sum::<f64>()).max(0.0);
        model.overlap = model.overlap.fitted(&loads, model.rest, slots);
        Some(model)
    }

    /// What the change would give.
    pub fn with(&self, change: &Change) -> Prediction {
        let mut caveats = Vec::new();
        let loads = self.changed(change, &mut caveats);
        let overlap = self.overlap_for(change, &mut caveats);
        if self.slots <= FEW_SLOTS && *change != Change::default() {
            caveats.push(
                "With so few slots stages wait for the last row of each batch: it may be up to 30 % less.".into(),
            );
        }
        if self.loads.starved.is_none() {
            caveats.push("The consumer's stream is not known, and with it the consumer's own limit.".into());
        }
        let now = self.overlap.time(&self.measured().map(|(_, load)| load), self.rest);
        let then = overlap.time(&loads.map(|(_, load)| load), self.rest);
        let rate = self.loads.sustained();
        let stages: Vec<(Cause, f64)> =
            loads.iter().filter(|(_, load)| *load > 0.0).map(|(stage, load)| (*stage, finite(rate / load))).collect();
        let mut items_per_s = if then > 0.0 { finite(rate * now / then) } else { rate };
        let least = stages.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((_, ceiling)) = least {
            items_per_s = items_per_s.min(ceiling);
        }
        if change.cached {
            // How fast workers copy is a guess. What they do not copy is read as now: so it is not less than without.
            items_per_s = items_per_s.max(self.with(&Change { cached: false, ..change.clone() }).items_per_s);
        }
        let bound_by = match least {
            Some((stage, ceiling)) if items_per_s >= SERIAL * ceiling => stage,
            _ if self.rest > SERIAL * then => Cause::HandOver,
            Some(_) => Cause::MemoryBudget,
            None => Cause::HandOver,
        };
        // Also when it merely slows down what limits.
        let storage = loads.iter().find(|(stage, _)| *stage == Cause::Storage).map_or(0.0, |(_, load)| *load);
        let seen_less = self.loads.at_least(Cause::Storage) && storage > 0.6 * then;
        if seen_less {
            let filled = 100.0 * self.loads.depth_filled;
            caveats.push(format!(
                "Storage may do more than was seen: only {filled:.0} % of the reads that may be in flight were, while any were."
            ));
        }
        let depth = change.depth.map_or(self.depth, |depth| f64::from(depth.max(1)));
        let at_least = seen_less || depth < self.depth;
        let at_most = (depth > self.depth || change.gpu_decode) && items_per_s > rate;
        Prediction { items_per_s, at_least, at_most, bound_by, stages, caveats }
    }

    /// Workers that can work at once.
    fn parallel(&self, workers: f64, slots: f64) -> f64 {
        // What works now can.
        workers.max(1.0).min((slots.max(1.0) * self.rows).max(self.loads.working)).min(self.cores)
    }

    /// The loads at the rate that can be kept up.
    fn measured(&self) -> [(Cause, f64); 5] {
        STAGES.map(|stage| {
            let load = match stage {
                Cause::Decode if self.loads.decode > 0.0 => {
                    let parallel = self.parallel(self.workers, self.slots);
                    (self.loads.working / parallel / self.loads.prepared).max(self.loads.decode)
                }
                _ => self.loads.load(stage),
            };
            (stage, (load / self.loads.over()).min(1.0))
        })
    }

    fn changed(&self, change: &Change, caveats: &mut Vec<String>) -> [(Cause, f64); 5] {
        let mut factor = |what: &str, by: Option<f64>| match by {
            None => 1.0,
            Some(by) if by > 0.0 && by.is_finite() => by,
            Some(by) => {
                caveats.push(format!("{what} {by} times as fast is no speed, and was left out."));
                1.0
            }
        };
        let storage = factor("Storage", change.storage_factor);
        let copy = factor("Copies", change.copy_factor);
        let consumer = factor("A consumer", change.consumer_factor);
        let storage = storage * self.deeper(change, caveats);
        self.measured().map(|(stage, load)| {
            let changed = match stage {
                Cause::Consumer => load / consumer,
                Cause::Copy => load / copy,
                Cause::Storage if change.cached => 0.0,
                Cause::Storage => load / storage,
                Cause::Decode => self.decode(load, change, caveats),
                _ => load,
            };
            (stage, finite(changed))
        })
    }

    /// How many times as fast storage is with another depth, at most.
    fn deeper(&self, change: &Change, caveats: &mut Vec<String>) -> f64 {
        let depth = change.depth.map_or(self.depth, |depth| f64::from(depth.max(1)));
        let (now, filled) = (self.depth, self.loads.depth_filled);
        let in_flight = now * filled;
        if depth == now || self.loads.storage == 0.0 {
            return 1.0;
        }
        if depth < now {
            caveats.push("With fewer reads in flight each may take less time: storage may do more.".into());
            return (depth / in_flight.max(1.0)).min(1.0);
        }
        if filled < FILLED {
            caveats
                .push(format!("A larger depth gives nothing: only {in_flight:.0} of {now:.0} reads were in flight."));
            return 1.0;
        }
        match self.loads.headroom {
            Headroom::Limit { times } => {
                caveats.push(format!(
                    "A larger depth gives nothing: {now:.0} reads in flight wait for each other, half of them took {times:.1} \
                     times as long as the fastest."
                ));
                return 1.0;
            }
            Headroom::Left => caveats.push("A larger depth gives that much if reads do not begin to wait for each other.".into()),
            Headroom::Unknown => caveats.push(
                "Whether a larger depth gives anything cannot be known: latencies do not tell whether storage is at its limit."
                    .into(),
            ),
        }
        depth / now
    }

    fn decode(&self, load: f64, change: &Change, caveats: &mut Vec<String>) -> f64 {
        if change.gpu_decode {
            caveats.push(
                "How fast the device decodes is not known, nor what that takes from its other work: it is an upper bound."
                    .into(),
            );
            return 0.0;
        }
        let slots = change.slots.map_or(self.slots, f64::from);
        let wanted = change.workers.map_or(self.workers, f64::from);
        let (now, then) = (self.parallel(self.workers, self.slots), self.parallel(wanted, slots));
        if wanted > then && wanted > self.workers {
            caveats.push(match then < self.cores {
                true => format!("There are rows for {then:.0} workers only: more `slots` or a larger `batch_size`."),
                false => format!("There are cores for {then:.1} workers only."),
            });
        } else if then > now {
            caveats.push(
                "Workers are supposed to be as fast beside more of them, on cores that nobody else needs.".into(),
            );
        }
        let copying = if change.cached { self.caching / now } else { 0.0 };
        if copying > 0.0 {
            caveats.push(format!("A worker is supposed to copy {CACHE_SPEED} GB/s from the page cache."));
        }
        (load + copying) * now / then
    }

    fn overlap_for(&self, change: &Change, caveats: &mut Vec<String>) -> Overlap {
        let slots = change.slots.map_or(self.slots, |slots| f64::from(slots.max(1)));
        if slots == self.slots {
            return self.overlap;
        }
        caveats
            .push("What more or fewer slots give is extrapolated from how often stages waited for each other.".into());
        let each = if self.slots > 1.0 { (self.overlap.p - 1.0) / (self.slots - 1.0) } else { P_SLOT };
        let p = (1.0 + each * (slots - 1.0)).clamp(1.0, P_MAX);
        Overlap { p, q: self.overlap.q.max(p), ..self.overlap }
    }
}

/// How the loads of stages that work more or less beside each other make up the time of a batch.
#[derive(Clone, Copy, Debug)]
struct Overlap {
    /// Of stages that each have a slot of their own.
    p: f64,
    /// Of reading and decoding, which are beside each other in one slot, too.
    q: f64,
    /// The consumer has no slot, but a batch on the device.
    slots_end_with_copy: bool,
}

impl Overlap {
    /// The time that a batch takes, in that of the measured ones.
    fn time(&self, &[consumer, copy, decode, storage, order]: &[f64; 5], rest: f64) -> f64 {
        let filling = norm(&[decode, storage], self.q);
        if self.slots_end_with_copy {
            let slots = norm(&[copy, filling, order, rest], self.p);
            norm(&[consumer, slots], self.p.max(P_DEVICE))
        } else {
            norm(&[consumer, filling, order, rest], self.p)
        }
    }

    /// With the exponents that make the measured loads take the time that they took.
    fn fitted(self, loads: &[f64; 5], rest: f64, slots: f64) -> Self {
        let with = |exponent: f64| match slots > 1.0 {
            true => Self { p: exponent, q: exponent.max(P_ROWS), ..self },
            // One slot: a batch is read and decoded, and then used. Nothing else is beside anything.
            false => Self { p: 1.0, q: exponent, ..self },
        };
        let most = if slots > 1.0 { (1.0 + P_SLOT_MOST * (slots - 1.0)).min(P_MAX) } else { P_MAX };
        // Where one stage is saturated, how far p is above that does not show: then it is not taken to be the greatest.
        let (mut low, mut high) = (1.0, if with(most).time(loads, rest) > 1.02 { P_MAX } else { most });
        for _ in 0..50 {
            let middle = 0.5 * (low + high);
            if with(middle).time(loads, rest) > 1.0 { low = middle } else { high = middle }
        }
        with(high)
    }
}

/// What a row takes on average, for what a long one takes: 1 when all take the same.
fn evenness(latency: &Latency) -> f64 {
    let share = latency.mean_ns / latency.p90_ns;
    if share.is_finite() { share.clamp(0.1, 1.0) } else { 1.0 }
}

/// Below this share of the least ceiling it is not that stage that limits.
const SERIAL: f64 = 0.8;

fn finite(value: f64) -> f64 {
    if value.is_finite() { value } else { f64::MAX }
}

/// (Σ uᵖ)^(1/p), computed so that nothing underflows.
fn norm(loads: &[f64], p: f64) -> f64 {
    let greatest = loads.iter().copied().fold(0.0, f64::max);
    if greatest <= 0.0 {
        return 0.0;
    }
    finite(greatest * loads.iter().map(|load| (load / greatest).powf(p)).sum::<f64>().powf(1.0 / p))
}

#[cfg(test)]
mod tests {
    use super::super::simulator::{Gpu, Pipe};
    use super::*;
    use crate::meter::Handed;

    fn pipes() -> Vec<Pipe> {
        let mut all = Vec::new();
        let times = [(4e6, 20e6, 3e6), (10e6, 12e6, 5e6), (20e6, 6e6, 3e6), (12e6, 8e6, 14e6), (2e6, 30e6, 10e6)];
        for (rows, channels) in [(16, 6), (24, 8)] {
            for (slots, varies) in [1, 2, 4, 12].into_iter().flat_map(|slots| [(slots, false), (slots, true)]) {
                for (read, decode, user_ns) in times {
                    for copy in [None, Some(Gpu { copy_ns: 4e6, buffers: 3 })] {
                        all.push(Pipe {
                            batches: 120,
                            rows,
                            slots,
                            read_ns: read * channels as f64 / rows as f64,
                            depth: 16,
                            channels,
                            decode_ns: decode * 2.0 / rows as f64,
                            workers: 2,
                            user_ns,
                            copy,
                            varies,
                            seed: slots * 31 + rows,
                            ..Pipe::default()
                        });
                    }
                }
            }
        }
        all
    }

    /// A change, and the same in the simulation.
    fn changes(pipe: &Pipe) -> Vec<(Change, Pipe)> {
        let mut all = Vec::new();
        for workers in [1, 4, 8] {
            let change = Change { workers: Some(workers as u32), ..Change::default() };
            all.push((change, Pipe { workers, ..pipe.clone() }));
        }
        for by in [0.5, 2.0, 4.0] {
            let change = Change { storage_factor: Some(by), ..Change::default() };
            all.push((change, Pipe { read_ns: pipe.read_ns / by, ..pipe.clone() }));
        }
        let change = Change { consumer_factor: Some(2.0), ..Change::default() };
        all.push((change, Pipe { user_ns: pipe.user_ns / 2.0, ..pipe.clone() }));
        all
    }

    #[test]
    fn predictions_are_within_ten_percent_of_a_simulation_of_the_change() {
        let (mut within, mut excused, mut off, mut all) = (0, 0, Vec::new(), 0);
        for pipe in pipes() {
            let model = WhatIf::from(&pipe.run()).unwrap();
            for (change, changed) in changes(&pipe) {
                let then = model.with(&change);
                let by = then.items_per_s / changed.throughput();
                all += 1;
                if (0.9..=1.1).contains(&by) {
                    within += 1;
                } else if then.at_least && by < 1.0 {
                    excused += 1;
                } else {
                    let Pipe { slots, rows, varies, .. } = pipe;
                    off.push(format!("{by:.2} {slots} slots, {rows} rows, {varies}, {change:?} {model:?}"));
                    let said = then.caveats.iter().any(|caveat| caveat.contains("up to 30 % less"));
                    assert!((0.8..=1.35).contains(&by) && (by < 1.15 || said), "{}", off[off.len() - 1]);
                }
            }
        }
        println!("{within} of {all} within 10 %, {excused} more than the \"at least\" they said\n{}", off.join("\n"));
        assert!(off.len() * 50 <= all, "{} of {all}", off.len());
        assert!(excused * 20 <= all, "{excused} of {all}");
    }

    #[test]
    fn so_they_mostly_are_for_random_pipelines() {
        let (mut within, mut excused, mut off) = (0, 0, Vec::new());
        for pipe in (0..80).map(Pipe::random) {
            let model = WhatIf::from(&pipe.run()).unwrap();
            for (change, changed) in changes(&pipe) {
                let then = model.with(&change);
                match then.items_per_s / changed.throughput() {
                    0.9..=1.1 => within += 1,
                    by if then.at_least && by < 1.0 => excused += 1,
                    by => off.push(by),
                }
            }
        }
        println!("{within} within 10 %, {excused} more than the \"at least\" they said, others {off:.2?}");
        assert!(off.len() * 20 <= 80 * 7 && within * 10 >= 80 * 7 * 9, "{off:?}");
        assert!(off.iter().all(|by| (0.6..=1.6).contains(by)), "{off:?}");
    }

    #[test]
    fn without_a_change_it_says_what_was_measured() {
        for pipe in pipes() {
            let mut snapshot = pipe.run();
            // As the loader counts: without the first batch.
            snapshot.consumer.steady = Some(Handed { batches: pipe.batches, samples: snapshot.decode.samples });
            let same = WhatIf::from(&snapshot).unwrap().with(&Change::default());
            let measured = snapshot.decode.samples as f64 / snapshot.steady_ns as f64 * 1e9;
            assert!((same.items_per_s / measured - 1.0).abs() < 1e-9, "{same:?}");
            let (workers, slots) = (Some(snapshot.decode.workers), Some(snapshot.slots.count));
            let ones = Change { workers, slots, storage_factor: Some(1.0), ..Change::default() };
            let same = WhatIf::from(&snapshot).unwrap().with(&ones);
            assert!((same.items_per_s / measured - 1.0).abs() < 1e-9, "{same:?}");
        }
    }

    #[test]
    fn samples_that_were_ready_before_the_first_batch_raise_no_rate() {
        for pipe in pipes() {
            for ready in [0.0, 0.1, 0.4] {
                let mut snapshot = pipe.run();
                let handed = snapshot.decode.samples as f64 * (1.0 + ready);
                snapshot.consumer.steady = Some(Handed { batches: pipe.batches, samples: handed as u64 });
                let model = WhatIf::from(&snapshot).unwrap();
                let now = model.with(&Change::default());
                let stages = Loads::of(&snapshot).unwrap().stages();
                let least = stages.iter().map(|stage| stage.ceiling_items_per_s).fold(f64::INFINITY, f64::min);
                assert!(now.items_per_s <= least * 1.000001, "{ready} {now:?} {pipe:?}");
                for change in [
                    Change { gpu_decode: true, ..Change::default() },
                    Change { cached: true, ..Change::default() },
                    Change { consumer_factor: Some(1e6), ..Change::default() },
                    Change { storage_factor: Some(2.0), ..Change::default() },
                ] {
                    let then = model.with(&change);
                    assert!(then.items_per_s >= 0.9999 * now.items_per_s, "{ready} {change:?} {then:?} {now:?}");
                }
            }
        }
    }

    #[test]
    fn more_is_never_less_and_never_beyond_the_least_ceiling() {
        for pipe in pipes() {
            let model = WhatIf::from(&pipe.run()).unwrap();
            let rate = |change: Change| {
                let then = model.with(&change);
                let least = then.stages.iter().map(|(_, ceiling)| *ceiling).fold(f64::INFINITY, f64::min);
                assert!(then.items_per_s <= least, "{then:?}");
                then.items_per_s
            };
            let rises =
                |rates: Vec<f64>| assert!(rates.windows(2).all(|pair| pair[1] >= 0.9999 * pair[0]), "{rates:?}");
            rises((1..10).map(|workers| rate(Change { workers: Some(workers), ..Change::default() })).collect());
            rises((1..20).map(|slots| rate(Change { slots: Some(slots), ..Change::default() })).collect());
            let factors = || [0.1, 0.5, 1.0, 3.0, 1e9].into_iter().map(Some);
            rises(factors().map(|storage_factor| rate(Change { storage_factor, ..Change::default() })).collect());
            rises(factors().map(|consumer_factor| rate(Change { consumer_factor, ..Change::default() })).collect());
            rises(factors().map(|copy_factor| rate(Change { copy_factor, ..Change::default() })).collect());
        }
    }

    #[test]
    fn twice_the_slots_are_within_a_quarter_of_a_simulation() {
        let mut off = Vec::new();
        for pipe in pipes() {
            let model = WhatIf::from(&pipe.run()).unwrap();
            let then = model.with(&Change { slots: Some(2 * pipe.slots as u32), ..Change::default() });
            let by = then.items_per_s / Pipe { slots: 2 * pipe.slots, ..pipe.clone() }.throughput();
            // Of one slot nothing is known about how stages would work beside each other.
            let least = if pipe.slots == 1 { 0.65 } else { 0.75 };
            off.extend((!(least..=1.25).contains(&by)).then(|| format!("{by:.2} {pipe:?} {model:?}")));
        }
        assert!(off.is_empty(), "{}", off.join("\n"));
    }

    #[test]
    fn a_stage_that_is_gone_has_no_ceiling_and_nonsense_is_left_out() {
        let model = WhatIf::from(&Pipe { decode_ns: 20e6, ..Pipe::default() }.run()).unwrap();
        let now = model.with(&Change::default());
        assert_eq!(now.bound_by, Cause::Decode);
        let stages = |then: &Prediction| then.stages.iter().map(|(stage, _)| *stage).collect::<Vec<_>>();
        let cached = model.with(&Change { cached: true, ..Change::default() });
        assert!(!stages(&cached).contains(&Cause::Storage), "{cached:?}");
        let decoded = model.with(&Change { gpu_decode: true, ..Change::default() });
        assert!(!stages(&decoded).contains(&Cause::Decode) && decoded.bound_by == Cause::Consumer, "{decoded:?}");
        assert!(decoded.items_per_s > 10.0 * now.items_per_s && !decoded.caveats.is_empty(), "{decoded:?}");
        for by in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let then = model.with(&Change { storage_factor: Some(by), copy_factor: Some(by), ..Change::default() });
            assert_eq!((then.items_per_s, then.caveats.len()), (now.items_per_s, now.caveats.len() + 2));
        }
    }

    #[test]
    fn workers_beyond_the_cores_or_that_already_compete_give_nothing() {
        let mut snapshot = Pipe { decode_ns: 20e6, slots: 32, ..Pipe::default() }.run();
        let rate = |snapshot: &Snapshot, workers| {
            WhatIf::from(snapshot).unwrap().with(&Change { workers: Some(workers), ..Change::default() })
        };
        assert!(rate(&snapshot, 8).items_per_s > 1.9 * rate(&snapshot, 4).items_per_s);
        snapshot.decode.cores = 5;
        let then = rate(&snapshot, 8);
        let times = then.items_per_s / rate(&snapshot, 4).items_per_s;
        assert!((1.2..1.26).contains(&times), "{times}");
        assert!(then.caveats.iter().any(|caveat| caveat.contains("cores for 5.0 workers")), "{:?}", then.caveats);
        // Four workers that got two cores.
        snapshot.decode.cores = 64;
        snapshot.decode.cpu_ns = Some(snapshot.decode.busy_ns / 2);
        assert!(rate(&snapshot, 8).items_per_s < 1.01 * rate(&snapshot, 4).items_per_s);
    }
}
