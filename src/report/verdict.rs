//! What a loader is bound by, how sure that is, and what to do: from a snapshot. Pure.
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
//! a stage saturated that is measured exactly (copy, decode, order)? ──yes──► the one with the highest load
//!    │no
//!    ▼
//! storage always busy? ──yes──► storage; where few slots keep the depth from being filled, also the memory budget
//!    │no
//!    ▼
//! most of the time nothing at work? ──yes──► handing over
//!    │no
//!    ▼
//! planner without a slot, rows without room, full slots without room on the device? ──yes──► memory budget
//! ```
//!
//! Loads (see [`load`](super::load)) are in proportion to demands, whatever waits for whatever. So the walk upstream is a
//! comparison of numbers: a stage that mostly waited for its input has a low load. Another stage with at least
//! 1 / 1.25 of the highest load is named beside it: it would be next, and the two cannot be told apart for sure.
//!
//! # Limits
//!
//! - A saturated stage with load *u* can be slower than another by no more than 1 / *u*. So at 0.87 and above nothing else can
//!   be the cause by 20 %; below it is the waiting of stages for each other that costs, and room (slots) that helps.
//! - One snapshot cannot tell a storage device at its limit from one that few reads keep waiting for its latency, when
//!   slots bound the reads in flight. Both are named then.
//! - The loads are means: stalls once in a while look like a memory budget too small to bridge them, which they are.
//! - Starvation is that of the steady time: first batches of iterators are reported apart.

use super::depth::Headroom;
use super::load::{Cause, FILLED, Loads, STAGES, StageLoad};
use super::whatif::{COMPETES, Change, Prediction, WhatIf};
use super::words::grouped;
use crate::meter::{Snapshot, Unmeasured};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a loader is bound by. `Display` is the text for people.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Verdict {
    /// What limits.
    pub cause: Cause,
    /// What is within 20 % of limiting as well.
    pub also: Option<Cause>,
    /// Share of the steady time in which the consumer (on a GPU, its stream) waited for batches; 0 where the cause is
    /// [`Unknown`](Cause::Unknown).
    pub starved_share: f64,
    /// How far it can be trusted.
    pub strength: Strength,
    /// What was measured, a sentence each.
    pub evidence: Vec<String>,
    /// What to do, the most promising first, in the names of [`LoaderBuilder`](crate::LoaderBuilder)'s settings.
    pub advice: Vec<String>,
    /// The stages that did something, from the consumer upstream.
    pub stages: Vec<StageLoad>,
}

/// How far a verdict can be trusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Strength {
    /// Hardly.
    Thin {
        /// What is missing.
        why: String,
    },
    /// Most likely.
    Fair,
    /// Nothing else fits what was measured.
    Strong,
}

/// Below this share of starvation the consumer is fed.
const FED: f64 = 0.02;
/// Stages are saturated from this load on.
const SATURATED: f64 = 0.87;
/// Another stage is close to the cause from this part of its load on.
const NEAR: f64 = 0.8;
/// The planner, rows or copies lack room when they do for this share of the time (the planner: that it does not compute).
const LACKS: f64 = 0.3;
/// Handing over takes the time when the work of all stages, one after the other, is less than this share of it.
const AT_WORK: f64 = 0.6;
/// What it takes to be more than a guess.
const BATCHES_LEAST: f64 = 8.0;
const STEADY_LEAST_NS: f64 = 0.5e9;
/// Share of all time that first batches take from which on the rest says little.
const MOSTLY_FIRST: f64 = 0.5;
/// A consumer that holds this share of the slots, on average, keeps the loader from filling them.
const HOLDS: f64 = 0.75;
/// A rate of so many times the one that can be kept up is told apart from it.
const AHEAD: f64 = 1.01;
/// Of fewer workers at work than this, on average, nothing is said.
const HARDLY: f64 = 0.1;
/// Workers that run for less of the time that they work are blocked in the rest of it.
const BLOCKED: f64 = 0.6;
/// Samples prepared in the steady time, of those handed out in it.
const PREPARED_LEAST: f64 = 0.5;

impl Verdict {
    /// The verdict on what was measured.
    pub fn of(snapshot: &Snapshot) -> Self {
        let Some((loads, model)) = Loads::of(snapshot).zip(WhatIf::from(snapshot)) else {
            return Self::unknown(snapshot);
        };
        let (cause, also) = match decide(&loads, snapshot) {
            // Whether the loader or the consumer was late, nobody saw.
            _ if loads.starved.is_none() => (Cause::Unknown, None),
            // The consumer is fed in a small part of the time: that says nothing of the rest.
            (Cause::NotStarved, _) if first_share(snapshot, &loads) >= MOSTLY_FIRST => (Cause::Unknown, None),
            decided => decided,
        };
        let case = Case { snapshot, loads: &loads, model, cause, also };
        Self {
            cause,
            also,
            starved_share: loads.starved.unwrap_or(0.0),
            strength: case.strength(),
            evidence: case.evidence(),
            advice: case.advice(),
            stages: loads.stages(),
        }
    }

    fn unknown(snapshot: &Snapshot) -> Self {
        let why = match snapshot.consumer.batches {
            0 => "no batch was handed out",
            _ => "only the first batch of each iterator was handed out, and the wait for that is no starvation",
        };
        let why = why.to_string();
        Self {
            cause: Cause::Unknown,
            also: None,
            starved_share: 0.0,
            strength: Strength::Thin { why },
            evidence: Vec::new(),
            advice: Vec::new(),
            stages: Vec::new(),
        }
    }
}

fn decide(loads: &Loads, snapshot: &Snapshot) -> (Cause, Option<Cause>) {
    // In this order of equals: the one that is nearer to the consumer.
    let top = |among: &[Cause]| {
        among.iter().copied().reduce(|best, next| if loads.likely(next) > loads.likely(best) { next } else { best })
    };
    let near = |cause: Cause| {
        let others: Vec<Cause> = STAGES.into_iter().filter(|stage| *stage != cause).collect();
        let least = NEAR * loads.likely(cause);
        // Storage last: it is only certain not to be near when its upper bound is not.
        let storage = (cause != Cause::Storage && loads.storage >= least).then_some(Cause::Storage);
        top(&others).filter(|other| loads.likely(*other) >= least).or(storage)
    };
    if loads.starved.is_some_and(|starved| starved < FED) {
        return (Cause::NotStarved, near(Cause::Consumer));
    }
    if loads.consumer() >= SATURATED && top(&STAGES) == Some(Cause::Consumer) {
        let budget = (loads.lacks_room() >= LACKS).then_some(Cause::MemoryBudget);
        return (Cause::Consumer, near(Cause::Consumer).or(budget));
    }
    let exact = top(&[Cause::Copy, Cause::Decode, Cause::Order]).filter(|stage| loads.load(*stage) > 0.0);
    if let Some(exact) = exact.filter(|exact| loads.load(*exact) >= SATURATED) {
        return (exact, near(exact));
    }
    // Full slots that wait most of the time: what fills them is ahead on average.
    let ahead = loads.slots[2] >= 0.5 * f64::from(snapshot.slots.count.max(1));
    let others = exact.map_or(0.0, |exact| loads.load(exact)).max(loads.consumer());
    if loads.storage >= SATURATED && !ahead && loads.likely(Cause::Storage) >= others {
        let budget = slots_bound_reads(loads).then_some(Cause::MemoryBudget);
        return (Cause::Storage, budget.or_else(|| near(Cause::Storage)));
    }
    if loads.slots[3] >= HOLDS * f64::from(snapshot.slots.count.max(1)) && slots_lack(loads) {
        return (Cause::MemoryBudget, Some(Cause::Consumer));
    }
    if at_work(loads, snapshot) < AT_WORK {
        return (Cause::HandOver, None);
    }
    match top(&STAGES).filter(|stage| loads.likely(*stage) >= NEAR * SATURATED) {
        most if loads.lacks_room() >= LACKS => (Cause::MemoryBudget, most),
        Some(most) if most != Cause::Consumer => (most, near(most)),
        _ => (Cause::HandOver, None),
    }
}

/// Whether more slots might bring more reads in flight.
fn slots_bound_reads(loads: &Loads) -> bool {
    loads.depth_filled < FILLED && slots_lack(loads)
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

/// The stages' work one after the other, as a share of the time; a batch's rows are decoded beside each other.
fn at_work(loads: &Loads, snapshot: &Snapshot) -> f64 {
    let rows = loads.samples_per_batch();
    let beside = rows.clamp(1.0, f64::from(snapshot.decode.workers.max(1)));
    loads.consumer() + loads.copy + loads.working / beside + loads.storage + loads.order
}

/// A verdict on its way.
struct Case<'s> {
    snapshot: &'s Snapshot,
    loads: &'s Loads,
    model: WhatIf,
    cause: Cause,
    also: Option<Cause>,
}

impl Case<'_> {
    fn strength(&self) -> Strength {
        let (loads, gpu) = (self.loads, &self.snapshot.consumer.gpu);
        let thin = |why: String| Strength::Thin { why };
        if let Some(why) = self.unmeasured() {
            return thin(why.into());
        }
        if loads.batches < BATCHES_LEAST {
            let (count, verb) = (loads.batches, if loads.batches == 1.0 { " is" } else { "es are" });
            return thin(format!("{count:.0} batch{verb} too few"));
        }
        if loads.steady_ns < STEADY_LEAST_NS {
            return thin(format!("{} are too short", time(loads.steady_ns)));
        }
        if loads.starved.is_none() {
            return thin("the consumer's stream has not come to its second step".into());
        }
        if let Some(gpu) = gpu.as_ref().filter(|gpu| (gpu.steps as f64) < BATCHES_LEAST) {
            return thin(format!("only {} steps were measured on the GPU", gpu.steps));
        }
        if self.cause == Cause::Unknown {
            let share = 100.0 * first_share(self.snapshot, loads);
            return thin(format!("{share:.0} % of the time went into first batches of iterators"));
        }
        if loads.prepared < PREPARED_LEAST {
            let late = 100.0 * loads.prepared;
            return thin(format!(
                "only {late:.0} % of the samples were prepared after the first batch of their epoch was: epochs are too short"
            ));
        }
        let highest = STAGES.into_iter().map(|stage| loads.load(stage)).fold(0.0, f64::max);
        let clear = match self.cause {
            Cause::NotStarved => loads.starved.is_some_and(|starved| starved < 0.5 * FED),
            Cause::Storage => !loads.at_least(Cause::Storage) && loads.storage * loads.depth_filled >= SATURATED,
            Cause::Consumer | Cause::Copy | Cause::Decode | Cause::Order => loads.load(self.cause) >= 0.9,
            Cause::MemoryBudget => loads.lacks_room() >= 2.0 * LACKS && highest < NEAR && self.more_slots().is_some(),
            _ => false,
        };
        if clear && self.also.is_none() { Strength::Strong } else { Strength::Fair }
    }

    /// Why no step could be measured on a GPU.
    fn unmeasured(&self) -> Option<&'static str> {
        if self.loads.starved.is_some() {
            return None;
        }
        let unmeasured = self.snapshot.consumer.gpu.as_ref().map(|gpu| gpu.unmeasured);
        match unmeasured {
            Some(Unmeasured { no_stream: 0, no_event: 0 }) => None,
            Some(Unmeasured { no_stream: 0, .. }) => Some("the driver refused the events of the consumer's steps"),
            _ => Some(NO_STREAM),
        }
    }
}

/// What was measured.
impl Case<'_> {
    fn evidence(&self) -> Vec<String> {
        let storage = self.snapshot.storage.reads > 0 || self.snapshot.storage.cached_bytes > 0;
        let mut all = vec![self.waits()];
        all.extend(self.read_ahead());
        all.extend(self.first_batches());
        all.extend(self.snapshot.copy.is_some().then(|| self.copies()));
        all.push(self.workers());
        all.extend(self.cores());
        all.extend(storage.then(|| self.reads()));
        all.push(self.slots());
        all.extend((self.cause == Cause::Order || self.also == Some(Cause::Order)).then(|| self.planner()));
        all
    }

    fn waits(&self) -> String {
        let (loads, consumer) = (self.loads, &self.snapshot.consumer);
        let (all, rate) = (time(loads.steady_ns), number(loads.items_per_s));
        let batches = grouped(&consumer.batches.to_string());
        let plural = if consumer.batches == 1 { "" } else { "es" };
        let of = format!("of {all} for {batches} batch{plural}, {rate} samples/s");
        let host = 100.0 * consumer.waited_ns as f64 / loads.steady_ns;
        let Some(starved) = loads.starved else {
            return format!("`next()` waited {host:.1} % {of}. Whether the GPU had work meanwhile is not known.");
        };
        let percent = 100.0 * starved;
        if self.snapshot.consumer.gpu.is_some() {
            let ahead = host > percent + 100.0 * FED;
            let host =
                if ahead { format!(" `next()` waited {host:.1} %, ahead of the stream.") } else { String::new() };
            return format!("The GPU's stream waited {percent:.1} % {of}.{host}");
        }
        let mut text = format!("The consumer waited {percent:.1} % {of}");
        if consumer.waits.count > 0 && starved >= FED {
            let (half, most) = (time(consumer.waits.p50_ns), time(consumer.waits.p99_ns));
            text += &format!("; half of the waits took at most {half}, 99 % of them {most}");
        }
        text + "."
    }

    /// That the rate is more than can be kept up.
    fn read_ahead(&self) -> Option<String> {
        let (rate, kept) = (self.loads.items_per_s, self.loads.sustained());
        (rate > AHEAD * kept).then(|| {
            format!(
                "Some of these samples were ready before the first batch: {} samples/s can be kept up.",
                number(kept)
            )
        })
    }

    fn first_batches(&self) -> Option<String> {
        let first = self.snapshot.consumer.first_ns as f64;
        let share = first_share(self.snapshot, self.loads);
        (share >= 0.1).then(|| {
            format!(
                "Beside that, first batches of epochs took {}, {:.0} % of all time; that does not count as starved.",
                time(first),
                100.0 * share
            )
        })
    }

    fn copies(&self) -> String {
        let (loads, copy) = (self.loads, self.snapshot.copy.clone().unwrap_or_default());
        // Copies that are shorter than a tick of the device's clock have no rate.
        let speed = match copy.busy_ns {
            0 => String::new(),
            busy => format!(", at {:.1} GB/s then", copy.bytes as f64 / busy as f64),
        };
        format!(
            "Copies to the device were on the bus {:.0} % of the time{speed}; {:.0} % of the time the next one waited for \
             device memory that the consumer used.",
            100.0 * loads.copy.min(1.0),
            100.0 * loads.no_buffer
        )
    }

    fn workers(&self) -> String {
        let decode = &self.snapshot.decode;
        let all = f64::from(decode.workers.max(1)) * self.loads.steady_ns;
        let percent = |ns: u64| (100.0 * ns as f64 / all).min(100.0);
        format!(
            "{} decode workers worked {:.0} % of their time; {:.0} % they waited for samples, {:.0} % there was no batch to fill.",
            decode.workers,
            percent(decode.busy_ns),
            percent(decode.starved_ns),
            percent(decode.ahead_ns)
        )
    }

    /// Whether workers get less CPU time than they would use.
    fn competes(&self) -> bool {
        self.loads.cpu_share < COMPETES && self.loads.working > HARDLY
    }

    /// Whether what workers do waits, for something else than a core.
    fn blocked(&self) -> bool {
        self.loads.on_cpu < BLOCKED && self.loads.working > HARDLY
    }

    fn cores(&self) -> Option<String> {
        let decode = &self.snapshot.decode;
        if self.competes() {
            let wanted = self.loads.working * self.loads.on_cpu;
            let got = wanted * self.loads.cpu_share;
            return Some(format!(
                "Of {wanted:.1} workers that could have run {got:.1} were on a core, on average; the process may use {} cores.",
                decode.cores
            ));
        }
        self.blocked().then(|| {
            let percent = 100.0 * (1.0 - self.loads.on_cpu);
            format!("For {percent:.0} % of the time that workers worked, what they did waited: not for a core.")
        })
    }

    fn reads(&self) -> String {
        let (loads, storage) = (self.loads, &self.snapshot.storage);
        if storage.reads == 0 {
            return format!(
                "{:.2} GB came from the page cache, and nothing was read.",
                storage.cached_bytes as f64 / 1e9
            );
        }
        let depth = f64::from(storage.depth.max(1));
        let mut text = format!(
            "Reads were in flight {:.0} % of the time, then {:.1} of {depth:.0} at once; {:.3} GB/s in reads of {}",
            100.0 * loads.storage.min(1.0),
            loads.depth_filled * depth,
            storage.bytes as f64 / loads.steady_ns,
            bytes(self.bytes_per_read()),
        );
        if storage.latency.count > 0 {
            let (half, most) = (time(storage.latency.p50_ns), time(storage.latency.p99_ns));
            text += &format!(", half of which took at most {half}, 99 % {most}");
        }
        if let (Headroom::Limit { times }, true) = (loads.headroom, loads.depth_filled >= FILLED) {
            text += &format!(", {times:.1} times as long as the fastest: they waited for each other");
        }
        if storage.cached_bytes > 0 {
            let all = storage.cached_bytes as f64 + storage.bytes as f64;
            text +=
                &format!("; {:.0} % of the bytes came from the page cache", 100.0 * storage.cached_bytes as f64 / all);
        }
        text + "."
    }

    fn slots(&self) -> String {
        let [free, filling, full, held] = self.loads.slots;
        let mut text = format!(
            "Of {} slots {free:.1} were free, {filling:.1} being filled, {full:.1} full and waiting, {held:.1} with the consumer, on \
             average; the planner had none for {:.0} % of the time",
            self.snapshot.slots.count,
            100.0 * self.loads.no_slot
        );
        if self.loads.no_room >= 0.05 {
            text += &format!(", and no room for encoded bytes {:.0} %", 100.0 * self.loads.no_room);
        }
        text + "."
    }

    fn planner(&self) -> String {
        let each = time(self.loads.order * self.loads.steady_ns / self.loads.batches);
        format!(
            "The planner's thread computed {:.0} % of the time, {each} for each batch.",
            100.0 * self.loads.order.min(1.0)
        )
    }

    fn bytes_per_read(&self) -> f64 {
        let storage = &self.snapshot.storage;
        storage.bytes as f64 / (storage.reads.max(1)) as f64
    }
}

/// What to do.
impl Case<'_> {
    fn advice(&self) -> Vec<String> {
        let mut all = self.advice_on(self.cause);
        if let Some(also) = self.also {
            // The first of each is the one that says the most, unless it changes what is advised to change already.
            let first = self.advice_on(also).into_iter().next();
            let of = first.as_deref().and_then(setting);
            let known = of.is_some() && all.iter().any(|advice| setting(advice) == of);
            all.extend(first.filter(|_| !known));
        }
        all.extend(self.epochs());
        all
    }

    fn advice_on(&self, cause: Cause) -> Vec<String> {
        match cause {
            Cause::NotStarved | Cause::Consumer => self.consumer_advice(),
            Cause::Storage => self.storage_advice(),
            Cause::Decode => self.decode_advice(),
            Cause::Copy => vec![
                "Fewer bytes over the bus: keep pictures as `u8` and have the device convert them (`finish`), drop fields that are \
                 not used (`keep`)."
                    .into(),
                "The report says whether slots are pinned; copies from memory that is not are slower. `numa` next to the device."
                    .into(),
            ],
            Cause::Order => vec![
                "A larger `batch_size` costs the planner less for each sample; so do fewer, larger reads: where each sample is a \
                 file of its own, `prepare::Shards` packs them into shards."
                    .into(),
                "A `Sampler` of your own runs on this thread: make it cheaper.".into(),
            ],
            Cause::MemoryBudget => self.memory_advice(),
            Cause::HandOver => {
                let each = time(self.loads.steady_ns / self.loads.batches);
                vec![format!("A larger `batch_size`: a batch takes {each}, mostly going from thread to thread.")]
            }
            Cause::Unknown if self.unmeasured() == Some(NO_STREAM) => {
                vec!["Give the loader the stream of the steps: `stream(…)`, or `batch.bind(…)` for each batch.".into()]
            }
            Cause::Unknown => Vec::new(),
        }
    }

    fn consumer_advice(&self) -> Vec<String> {
        let faster = self.model.with(&Change { consumer_factor: Some(1e6), ..Change::default() });
        if !self.gains(&faster) {
            return Vec::new();
        }
        let most = self.rate(&faster);
        let next = self.next(&faster);
        vec![format!("The consumer's own work takes the time; with less of it the loader would give {most}{next}.")]
    }

    fn decode_advice(&self) -> Vec<String> {
        let decode = &self.snapshot.decode;
        let needed = self.cores_needed();
        let mut all = Vec::new();
        let more = self.better_workers();
        match &more {
            Some((workers, then)) if self.blocked() => all.push(format!(
                "What workers do waits (sleeps, locks, the network, page faults): `workers({workers})` would give {}{}, without \
                 more cores.",
                self.rate(then),
                self.next(then)
            )),
            _ if decode.cores > 0 && decode.workers > decode.cores && !self.blocked() => all.push(format!(
                "`workers({})`: {} workers share {} cores, more than there are cores do not decode faster.",
                decode.cores, decode.workers, decode.cores
            )),
            _ if self.competes() => all.push(
                "Workers wait for cores that others take: threads of this process (give those of the consumer's tensor library \
                 fewer), or other programs."
                    .into(),
            ),
            Some((workers, then)) => {
                let (rate, next) = (self.rate(then), self.next(then));
                // Without a step that takes time there is no end of what could be used.
                let needs = match self.loads.consumer() {
                    0.01.. => format!("Decode needs {needed:.1} cores, has {}: ", decode.workers),
                    _ => String::new(),
                };
                all.push(format!("{needs}`workers({workers})` would give {rate}{next}."));
            }
            None if self.loads.consumer() < 0.01 => {
                all.push("More workers would not help: more cores would, or less work for each sample.".into())
            }
            None => all.push(format!(
                "Decode needs {needed:.1} cores, has {}, and more workers would not help: more cores would, or less work for each \
                 sample.",
                decode.workers.min(if decode.cores > 0 { decode.cores } else { u32::MAX })
            )),
        }
        all.push(
            "Less work for each sample. For pictures: `dct_scaling`, `backend` and a smaller `resize` of `decode::Image`, or made \
             ready once by `prepare` (smaller, or with restart markers, so that crops decode only their part)."
                .into(),
        );
        all
    }

    /// Cores that decoding for the next limit needs.
    fn cores_needed(&self) -> f64 {
        let others = self.model.with(&Change { gpu_decode: true, ..Change::default() });
        let limit = others.stages.iter().map(|(_, ceiling)| *ceiling).fold(f64::INFINITY, f64::min);
        let now = self.now();
        let times = if now > 0.0 { limit / now } else { 1.0 };
        let times = if times.is_finite() { times.clamp(0.0, 1e3) } else { 1.0 };
        self.loads.working * self.loads.cpu_share * times
    }

    /// The fewest workers that give nearly as much as any number does, if that is 5 % more than now.
    fn better_workers(&self) -> Option<(u32, Prediction)> {
        let decode = &self.snapshot.decode;
        let most = match decode.cores {
            0 => decode.workers.saturating_mul(4),
            // Those that are blocked leave their cores to others; how far that goes nobody has tried.
            cores if self.blocked() => {
                ((f64::from(cores) / self.loads.on_cpu) as u32).min(decode.workers.saturating_mul(8))
            }
            cores => cores,
        };
        let most = most.min(1024);
        let with = |workers| self.model.with(&Change { workers: Some(workers), ..Change::default() });
        let now = self.now();
        let best = with(most.max(decode.workers)).items_per_s;
        if best <= WhatIf::GAIN * now {
            return None;
        }
        let more = decode.workers.saturating_add(1)..=most;
        more.map(|workers| (workers, with(workers))).find(|(_, then)| then.items_per_s >= 0.97 * best)
    }

    fn storage_advice(&self) -> Vec<String> {
        let (loads, storage) = (self.loads, &self.snapshot.storage);
        let depth = storage.depth.max(1);
        let mut all = Vec::new();
        let filled = loads.depth_filled >= FILLED;
        all.extend(self.other_reader());
        if loads.no_room >= LACKS {
            all.push(MORE_ROOM.into());
        } else if slots_bound_reads(loads) {
            let reads = loads.depth_filled * f64::from(depth);
            all.push(format!(
                "`slots({})` or a larger `batch_size` (with the `memory_budget` for it): slots allowed {reads:.0} reads in flight of \
                 {depth}. If storage has more to give, up to {:.1} times as much.",
                twice(self.snapshot.slots.count),
                (1.0 / loads.depth_filled.clamp(0.01, 1.0)).min(2.0)
            ));
        } else if filled && loads.headroom == Headroom::Left {
            all.extend(self.deeper("and took hardly longer than the fastest"));
        }
        if self.bytes_per_read() < 65536.0 && storage.reads > 0 {
            let each = bytes(self.bytes_per_read());
            all.push(format!(
                "Reads of {each} are small: where each is a file of its own, `prepare::Shards` packs them into shards."
            ));
        }
        let cached = self.model.with(&Change { cached: true, ..Change::default() });
        if self.gains(&cached) {
            let (rate, next) = (self.rate(&cached), self.next(&cached));
            all.push(format!(
                "Faster storage (local NVMe), fewer bytes for each sample (`prepare`), or memory for the page cache: with all of \
                 it cached, {rate}{next}."
            ));
        }
        if filled && loads.headroom == Headroom::Unknown {
            all.extend(self.deeper("which helps unless the device is at its limit, and latencies do not tell"));
        }
        if storage.direct_bytes > 0 && storage.cached_bytes == 0 {
            all.push(
                "Reads bypass the page cache: with memory to spare, `direct` and `reader` can go through it.".into(),
            );
        }
        if storage.retries > storage.reads / 100 {
            all.push(format!(
                "{} reads were repeated or continued: look at the storage.",
                number(storage.retries as f64)
            ));
        }
        all
    }

    /// More reads in flight, where that might give anything.
    fn deeper(&self, why: &str) -> Option<String> {
        let depth = self.snapshot.storage.depth.max(1);
        let then = self.model.with(&Change { depth: Some(twice(depth)), ..Change::default() });
        let (rate, next) = (number(then.items_per_s), self.next(&then));
        self.gains(&then).then(|| {
            let more = twice(depth);
            format!("`depth({more})`: all {depth} reads were in flight, {why}. At most {rate} samples/s{next}.")
        })
    }

    /// Whether a change is worth a word.
    fn gains(&self, then: &Prediction) -> bool {
        then.items_per_s >= WhatIf::GAIN * self.now()
    }

    /// Samples per second as it is.
    fn now(&self) -> f64 {
        self.model.with(&Change::default()).items_per_s
    }

    /// Where the caller named a reader that costs more for each read than another.
    fn other_reader(&self) -> Option<String> {
        let reader = self.snapshot.storage.reader.as_ref().filter(|reader| reader.explicit)?;
        let lacks = match reader.name.as_str() {
            "mmap" => "`mmap` has no `O_DIRECT`: each read faults pages into the page cache and copies them from there",
            "pread" => "`pread` needs a thread and a system call for each read in flight",
            _ => return None,
        };
        Some(format!(
            "`reader(auto)`: {lacks}; io_uring, where the kernel allows it, submits many reads at once into registered memory."
        ))
    }

    fn memory_advice(&self) -> Vec<String> {
        let (loads, slots) = (self.loads, self.snapshot.slots.count);
        let mut all = Vec::new();
        if loads.slots[3] >= 0.5 * f64::from(slots.max(2)) {
            all.push(format!(
                "The consumer holds {:.1} of {slots} slots: drop batches as soon as they are used.",
                loads.slots[3]
            ));
        }
        if loads.no_buffer >= LACKS {
            let buffers = self.snapshot.copy.as_ref().map_or(0, |copy| copy.buffers);
            all.push(format!("`device_batches({})`: full slots wait for device memory.", buffers.saturating_add(2)));
        }
        if loads.no_room >= LACKS {
            all.push(MORE_ROOM.into());
        }
        if slots_lack(loads) || all.is_empty() {
            let more = twice(slots);
            all.push(match self.more_slots() {
                Some(then) => format!(
                    "`slots({more})`, with the `memory_budget` for it: about {}{}. Stages wait for each other with {slots}.",
                    self.rate(&then),
                    self.next(&then)
                ),
                None => format!(
                    "`slots({more})`, with the `memory_budget` for it, may help: stages wait for each other with {slots}; how much \
                     the model cannot tell. So may a larger `batch_size`."
                ),
            });
        }
        all
    }

    /// What twice the slots would give, if that is more than now.
    fn more_slots(&self) -> Option<Prediction> {
        let change = Change { slots: Some(twice(self.snapshot.slots.count)), ..Change::default() };
        Some(self.model.with(&change)).filter(|then| self.gains(then))
    }

    /// Epochs that begin anew each time.
    fn epochs(&self) -> Option<String> {
        (first_share(self.snapshot, self.loads) >= 0.2).then(|| {
            "Much of the time goes into first batches: `epochs(a..b)` reads ahead across the end of an epoch.".into()
        })
    }

    fn rate(&self, then: &Prediction) -> String {
        format!("{} samples/s{}", number(then.items_per_s), or_more(then.at_least))
    }

    /// What limits then.
    fn next(&self, then: &Prediction) -> String {
        let least = then.stages.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1));
        match least.filter(|(stage, _)| *stage == then.bound_by) {
            Some((stage, ceiling)) => {
                let (verb, what) = (if stage == Cause::Copy { "limit" } else { "limits" }, number(ceiling));
                format!(", then {stage} {verb} at {what}{}", or_more(self.loads.at_least(stage)))
            }
            None => format!(", then {} limits", then.bound_by),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cause {
            Cause::NotStarved => write!(f, "not starved: the consumer's own work takes the time")?,
            Cause::Consumer => {
                write!(f, "bound by the consumer's own work, starved {:.1} %", 100.0 * self.starved_share)?
            }
            Cause::Unknown => write!(f, "cannot tell")?,
            cause => write!(f, "bound by {cause}, starved {:.1} %", 100.0 * self.starved_share)?,
        }
        if let Some(also) = self.also {
            write!(f, ", or {also}: too close to tell")?;
        }
        match &self.strength {
            Strength::Thin { why } => write!(f, " (thin evidence: {why})")?,
            Strength::Fair => write!(f, " (fair evidence)")?,
            Strength::Strong => write!(f, " (strong evidence)")?,
        }
        for line in &self.evidence {
            write!(f, "\n  {line}")?;
        }
        for line in &self.advice {
            write!(f, "\n  → {line}")?;
        }
        Ok(())
    }
}

/// Where rows wait for room.
/// The setting that an advice begins with.
fn setting(advice: &str) -> Option<&str> {
    advice.strip_prefix('`')?.split('(').next()
}

const MORE_ROOM: &str = "A larger `memory_budget`: reads wait for room for their bytes.";

/// Where a GPU's idle time is not measured.
const NO_STREAM: &str = "the consumer's stream is not known";

/// Twice as many slots, or reads; no more than there may be.
fn twice(count: u32) -> u32 {
    count.max(1).saturating_mul(2).min(4096)
}

/// Behind a number that is a lower bound.
fn or_more(at_least: bool) -> &'static str {
    if at_least { " or more" } else { "" }
}

/// Three digits that mean something, and commas between thousands.
fn number(value: f64) -> String {
    if value < 100.0 {
        return format!("{value:.1}");
    }
    if value >= 1e15 {
        return format!("{value:.1e}");
    }
    grouped(&format!("{value:.0}"))
}

fn time(ns: f64) -> String {
    match ns {
        1e9.. => format!("{:.2} s", ns / 1e9),
        1e6.. => format!("{:.2} ms", ns / 1e6),
        _ => format!("{:.1} µs", ns / 1e3),
    }
}

fn bytes(count: f64) -> String {
    match count {
        1e6.. => format!("{:.1} MB", count / 1e6),
        1e3.. => format!("{:.0} kB", count / 1e3),
        _ => format!("{count:.0} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulator::{Gpu, Pipe};
    use super::*;
    use crate::meter::ReaderInUse;
    use std::collections::BTreeMap;

    /// A pipe of which each stage needs so many nanoseconds for a batch.
    fn pipe(demands: [(Cause, f64); 5], slots: u64, rows: u64, channels: u64, varies: bool, gpu: bool) -> Pipe {
        let of = |stage| demands.iter().find(|(named, _)| *named == stage).map_or(0.0, |(_, ns)| *ns);
        let (depth, workers) = (16, 4);
        Pipe {
            batches: 150,
            rows,
            slots,
            plan_ns: of(Cause::Order),
            read_ns: of(Cause::Storage) * channels.min(depth) as f64 / rows as f64,
            depth,
            channels,
            decode_ns: of(Cause::Decode) * workers as f64 / rows as f64,
            workers,
            copy: gpu.then_some(Gpu { copy_ns: of(Cause::Copy), buffers: 3 }),
            user_ns: of(Cause::Consumer),
            varies,
            seed: slots * 1000 + rows,
            ..Pipe::default()
        }
    }

    /// The cause and what is close to it, as stages.
    fn said_by(verdict: &Verdict) -> [Option<Cause>; 2] {
        let stage = |cause| if cause == Cause::NotStarved { Cause::Consumer } else { cause };
        [Some(stage(verdict.cause)), verdict.also.map(stage)]
    }

    /// The slowest stage, the next one by a factor, the others far behind.
    fn scenarios() -> Vec<(Cause, Cause, f64, Pipe)> {
        let mut all = Vec::new();
        for slowest in STAGES {
            for second in STAGES.into_iter().filter(|second| *second != slowest) {
                for by in [1.08, 1.25, 2.5] {
                    for (rows, channels, slots) in
                        [(16, 6, 2), (16, 6, 6), (6, 4, 3), (6, 4, 12), (6, 32, 2), (6, 32, 8)]
                    {
                        for varies in [false, true] {
                            let gpu = slowest == Cause::Copy || second == Cause::Copy || rows == 16;
                            let ns = |stage| match stage {
                                _ if stage == slowest => 10e6,
                                _ if stage == second => 10e6 / by,
                                _ => 1.5e6 / by,
                            };
                            let demands = STAGES.map(|stage| (stage, ns(stage)));
                            all.push((slowest, second, by, pipe(demands, slots, rows, channels, varies, gpu)));
                        }
                    }
                }
            }
        }
        all
    }

    /// What a verdict may say, by simulating the same with plenty of slots.
    fn truth(slowest: Cause, pipe: &Pipe) -> Vec<Cause> {
        let roomy = Pipe { slots: 64, copy: pipe.copy.map(|gpu| Gpu { buffers: 64, ..gpu }), ..pipe.clone() };
        match pipe.throughput() / roomy.throughput() {
            0.9.. => vec![slowest],
            ..0.75 => vec![Cause::MemoryBudget],
            _ => vec![slowest, Cause::MemoryBudget],
        }
    }

    #[test]
    fn the_cause_is_the_stage_that_a_simulation_was_given_as_the_slowest() {
        let mut matrix = BTreeMap::<String, BTreeMap<String, u32>>::new();
        let (mut right, mut wrong, mut pairs, mut strays) = (0_u32, Vec::new(), [0_u32; 2], 0_u32);
        for (slowest, second, by, pipe) in scenarios() {
            let snapshot = pipe.run();
            let verdict = Verdict::of(&snapshot);
            let fed = verdict.starved_share < FED;
            let said = said_by(&verdict);
            let legal = if fed { vec![Cause::Consumer] } else { truth(slowest, &pipe) };
            let row = matrix.entry(format!("{:?}", legal[0])).or_default();
            *row.entry(format!("{:?}", verdict.cause)).or_default() += 1;
            let room = legal.contains(&Cause::MemoryBudget) && said.contains(&Some(Cause::MemoryBudget));
            let ok = if by < 1.2 {
                let both = said.contains(&Some(slowest)) && said.contains(&Some(second));
                pairs[usize::from(both)] += 1;
                both || room
            } else {
                // Few slots and the latency of storage cannot be told from its limit: both are named.
                legal.iter().any(|cause| Some(*cause) == said[0]) || room
            };
            assert!(fed == (verdict.cause == Cause::NotStarved), "{verdict}");
            let stray =
                by > 2.0 && verdict.also.is_some_and(|also| !legal.contains(&also) && also != Cause::MemoryBudget);
            strays += u32::from(stray);
            if ok {
                right += 1;
            } else {
                let Pipe { slots, rows, channels, varies, .. } = pipe;
                wrong.push(format!(
                    "{slowest:?} {by}x{second:?} {slots} slots {rows}/{channels} {varies}: {legal:?} {verdict}"
                ));
            }
        }
        let all = right + wrong.len() as u32;
        println!("rows: the truth; columns: the verdict");
        matrix.iter().for_each(|(truth, said)| println!("{truth:>14} {said:?}"));
        println!("{right} of {all} right; of pairs within 20 % [one, both] are named: {pairs:?}");
        println!("{strays} named a second stage that is far behind");
        println!("{}", wrong.join("\n"));
        assert!(f64::from(right) >= 0.98 * f64::from(all), "{right} of {all}");
    }

    #[test]
    fn so_it_is_for_random_pipelines() {
        let (mut clear, mut close) = ([0_u32; 2], [0_u32; 2]);
        for pipe in (0..150).map(Pipe::random) {
            let demands = pipe.demands();
            let mut order: Vec<usize> = (0..STAGES.len()).collect();
            order.sort_by(|a, b| demands[*b].total_cmp(&demands[*a]));
            let [slowest, second] = [STAGES[order[0]], STAGES[order[1]]];
            let verdict = Verdict::of(&pipe.run());
            let fed = verdict.starved_share < FED;
            let legal = if fed { vec![Cause::Consumer] } else { truth(slowest, &pipe) };
            let said = said_by(&verdict);
            let room = legal.contains(&Cause::MemoryBudget) && said.contains(&Some(Cause::MemoryBudget));
            if demands[order[0]] >= 1.2 * demands[order[1]] {
                clear[usize::from(room || legal.iter().any(|cause| Some(*cause) == said[0]))] += 1;
            } else {
                close[usize::from(room || [slowest, second].iter().all(|stage| said.contains(&Some(*stage))))] += 1;
            }
        }
        println!("[wrong, right] clear {clear:?}, within 20 % {close:?}");
        assert!(clear[0] * 50 <= clear[1] && close[0] * 8 <= close[1], "{clear:?} {close:?}");
    }

    /// Four of sixteen cores decode all the time; a batch of 100 each 0.1 s; the consumer needs 0.05 s of it.
    fn decoding() -> Snapshot {
        let mut snapshot = Snapshot { at_ns: 11_000_000_000, steady_ns: 10_000_000_000, ..Snapshot::default() };
        let Snapshot { consumer, order, storage, decode, slots, .. } = &mut snapshot;
        (consumer.batches, consumer.samples, consumer.bytes) = (100, 10_000, 1_000_000_000);
        (consumer.user_ns, consumer.waited_ns) = (5_000_000_000, 5_000_000_000);
        (order.busy_ns, order.no_slot_ns) = (100_000_000, 8_000_000_000);
        (storage.busy_ns, storage.depth, storage.in_flight_ns) = (4_000_000_000, 32, 120_000_000_000);
        (storage.reads, storage.bytes) = (10_000, 1_100_000_000);
        (decode.workers, decode.cores, decode.samples) = (4, 16, 10_000);
        (decode.busy_ns, decode.cpu_ns) = (39_600_000_000, Some(39_200_000_000));
        (slots.count, slots.filling_ns, slots.held_ns) = (4, 35_000_000_000, 5_000_000_000);
        snapshot
    }

    #[test]
    fn a_verdict_names_cause_evidence_and_what_to_do_in_numbers() {
        let verdict = Verdict::of(&decoding());
        println!("{verdict}");
        assert_eq!((verdict.cause, verdict.also, verdict.strength.clone()), (Cause::Decode, None, Strength::Strong));
        assert_eq!(verdict.starved_share, 0.5);
        let stages: Vec<Cause> = verdict.stages.iter().map(|stage| stage.stage).collect();
        assert_eq!(stages, [Cause::Consumer, Cause::Decode, Cause::Storage, Cause::Order]);
        let decode = &verdict.stages[1];
        assert!((decode.utilisation - 0.99).abs() < 1e-9 && (decode.ceiling_items_per_s - 1010.1).abs() < 0.1);
        assert!((decode.demand_ns_per_batch - 99e6).abs() < 1.0 && !decode.at_least);
        let text = verdict.to_string();
        for part in [
            "bound by decode, starved 50.0 % (strong evidence)",
            "The consumer waited 50.0 % of 10.00 s for 100 batches, 1,000 samples/s",
            "4 decode workers worked 99 % of their time",
            "Reads were in flight 40 % of the time, then 30.0 of 32 at once; 0.110 GB/s in reads of 110 kB",
            "the planner had none for 80 % of the time",
            "Decode needs 7.8 cores, has 4: `workers(",
            "then the consumer limits at 2,000",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    /// What is said of the snapshot after a change to it.
    fn said(change: impl FnOnce(&mut Snapshot)) -> (Cause, String) {
        let mut snapshot = decoding();
        change(&mut snapshot);
        let verdict = Verdict::of(&snapshot);
        (verdict.cause, verdict.to_string())
    }

    fn assert_said(expected: Cause, part: &str, (cause, text): (Cause, String)) {
        assert!(cause == expected && text.contains(part), "{expected:?}, {part}: {cause:?} {text}");
    }

    #[test]
    fn what_the_gpu_s_stream_waited_counts_and_not_what_the_host_did() {
        let gpu = |steps, starved_ns| Some(crate::meter::GpuIdle { steps, starved_ns, ..Default::default() });
        assert_said(Cause::NotStarved, "own work", said(|s| s.consumer.gpu = gpu(100, 50_000_000)));
        assert_said(
            Cause::Decode,
            "The GPU's stream waited 40.0 %",
            said(|s| s.consumer.gpu = gpu(100, 4_000_000_000)),
        );
        // Half of the steps were not measured.
        assert_said(Cause::Decode, "waited 40.0 %", said(|s| s.consumer.gpu = gpu(50, 2_000_000_000)));
        assert_said(Cause::Decode, "only 5 steps", said(|s| s.consumer.gpu = gpu(5, 200_000_000)));
        let starved = said(|s| {
            (s.consumer.user_ns, s.consumer.waited_ns) = (10_000_000_000, 0);
            s.consumer.gpu = gpu(100, 3_000_000_000);
        });
        assert_said(Cause::Decode, "starved 30.0 %", starved);
        let ahead = said(|s| s.consumer.gpu = gpu(100, 0));
        let text =
            "The GPU's stream waited 0.0 % of 10.00 s for 100 batches, 1,000 samples/s. `next()` waited 50.0 %, ahead";
        assert_said(Cause::NotStarved, text, ahead);
    }

    #[test]
    fn without_a_measured_step_on_a_gpu_no_cause_is_named() {
        let gpu = |no_stream, no_event| {
            let unmeasured = Unmeasured { no_stream, no_event };
            Some(crate::meter::GpuIdle { unmeasured, ..Default::default() })
        };
        let copies = |gpu| {
            said(move |s| {
                (s.copy, s.consumer.gpu) = (Some(crate::meter::Copy { busy_ns: 1_000_000, ..Default::default() }), gpu);
            })
        };
        assert_said(Cause::Unknown, "the driver refused the events", copies(gpu(0, 99)));
        assert_said(Cause::Unknown, "has not come to its second step", copies(gpu(0, 0)));
        for gpu in [None, gpu(99, 0)] {
            let verdict = copies(gpu);
            assert_said(
                Cause::Unknown,
                "cannot tell (thin evidence: the consumer's stream is not known)",
                verdict.clone(),
            );
            assert_said(Cause::Unknown, "Whether the GPU had work meanwhile is not known", verdict.clone());
            assert_said(Cause::Unknown, "`stream(…)`, or `batch.bind(…)`", verdict.clone());
            assert!(!verdict.1.contains("starved"), "{}", verdict.1);
        }
    }

    #[test]
    fn copies_say_their_share_and_rate_on_the_bus() {
        let copied = said(|s| {
            s.consumer.gpu = Some(crate::meter::GpuIdle { steps: 100, ..Default::default() });
            let (busy_ns, blocked_ns, bytes) = (2_000_000_000, 7_000_000_000, 50_000_000_000);
            s.copy = Some(crate::meter::Copy { busy_ns, blocked_ns, bytes, batches: 100, ..Default::default() });
        });
        let line = "on the bus 20 % of the time, at 25.0 GB/s then; 70 % of the time the next one waited";
        assert_said(Cause::NotStarved, line, copied);
    }

    #[test]
    fn little_evidence_is_called_thin() {
        assert_said(Cause::Decode, "thin evidence: 7 batches", said(|s| s.consumer.batches = 7));
        let short = said(|s| {
            let Snapshot { steady_ns, consumer, storage, decode, .. } = s;
            for ns in
                [steady_ns, &mut consumer.user_ns, &mut consumer.waited_ns, &mut storage.busy_ns, &mut decode.busy_ns]
            {
                *ns /= 100;
            }
            (decode.cpu_ns, s.order.busy_ns) = (None, 1_000_000);
        });
        assert_said(Cause::Decode, "thin evidence: 100.00 ms are too short", short);
        // Most was ready before the first batch was handed out.
        let short = said(|s| {
            (s.decode.samples, s.decode.busy_ns) = (3_000, 12_000_000_000);
            s.consumer.first_ns = 5_000_000_000;
        });
        assert_said(Cause::Decode, "epochs are too short", short.clone());
        assert_said(Cause::Decode, "`epochs(a..b)`", short);
        let nothing = Verdict::of(&Snapshot::default());
        assert!(nothing.cause == Cause::Unknown && matches!(nothing.strength, Strength::Thin { .. }), "{nothing}");
    }

    #[test]
    fn workers_that_compete_for_cores_are_not_told_to_be_more() {
        let crowded = said(|s| {
            (s.decode.workers, s.decode.cores) = (16, 4);
            s.decode.busy_ns *= 4;
        });
        assert_said(Cause::Decode, "`workers(4)`: 16 workers share 4 cores", crowded);
        let competing = said(|s| s.decode.cpu_ns = Some(20_000_000_000));
        assert_said(Cause::Decode, "Of 4.0 workers that could have run 2.0 were on a core", competing.clone());
        assert_said(Cause::Decode, "wait for cores that others take", competing);
        assert_said(Cause::Decode, "more workers would not help", said(|s| s.decode.cores = 4));
    }

    #[test]
    fn workers_that_are_blocked_do_not_compete_and_are_told_to_be_more() {
        // They sleep nine tenths of the time that they work.
        let sleeping = said(|s| {
            (s.decode.cpu_ns, s.decode.delay_ns) = (Some(3_900_000_000), Some(100_000_000));
            s.decode.cores = 2;
        });
        assert_said(Cause::Decode, "For 90 % of the time that workers worked, what they did waited", sleeping.clone());
        assert_said(Cause::Decode, "`workers(11)` would give", sleeping);
        let mut snapshot = decoding();
        (snapshot.decode.cpu_ns, snapshot.decode.delay_ns) = (Some(3_900_000_000), Some(100_000_000));
        (snapshot.decode.cores, snapshot.consumer.user_ns) = (2, 1_000_000);
        let model = WhatIf::from(&snapshot).unwrap();
        let with = |workers| model.with(&Change { workers: Some(workers), ..Change::default() }).items_per_s;
        assert!((1.8..2.2).contains(&(with(8) / with(4))), "{} {}", with(4), with(8));
        // Those that have no core do compete.
        let competing = said(|s| (s.decode.cpu_ns, s.decode.delay_ns) = (Some(20_000_000_000), Some(19_600_000_000)));
        assert_said(Cause::Decode, "Of 4.0 workers that could have run 2.0 were on a core", competing);
    }

    #[test]
    fn a_consumer_that_holds_all_slots_is_told_so() {
        let holding = said(|s| {
            (s.decode.busy_ns, s.decode.cpu_ns, s.storage.busy_ns) = (1_000_000_000, None, 100_000_000);
            (s.consumer.user_ns, s.consumer.waited_ns) = (10_000_000, 9_990_000_000);
            (s.slots.held_ns, s.slots.filling_ns, s.order.no_slot_ns) = (39_900_000_000, 100_000_000, 9_900_000_000);
        });
        assert_said(Cause::MemoryBudget, "The consumer holds 4.0 of 4 slots: drop batches", holding);
    }

    #[test]
    fn of_epochs_of_one_batch_nothing_is_said() {
        use crate::meter::Handed;
        let verdict = |batches, samples, steady_ns, first_ns| {
            let mut snapshot = decoding();
            snapshot.consumer.steady = Some(Handed { batches, samples });
            (snapshot.steady_ns, snapshot.consumer.first_ns) = (steady_ns, first_ns);
            (snapshot.consumer.user_ns, snapshot.consumer.waited_ns) = (steady_ns, 0);
            Verdict::of(&snapshot)
        };
        let single = verdict(0, 0, 1_000_000, 10_000_000_000);
        assert!(
            single.cause == Cause::Unknown && single.to_string().contains("only the first batch of each"),
            "{single}"
        );
        let mostly = verdict(50, 5_000, 1_000_000_000, 9_000_000_000);
        assert!(
            mostly.cause == Cause::Unknown && mostly.to_string().contains("90 % of the time went into first"),
            "{mostly}"
        );
        assert!(mostly.advice.iter().any(|line| line.contains("`epochs(a..b)`")), "{mostly}");
        // Rates are those of the steady time.
        let some = verdict(50, 5_000, 5_000_000_000, 1_000_000_000);
        assert!(some.to_string().contains("1,000 samples/s"), "{some}");
    }

    #[test]
    fn advice_that_by_its_own_numbers_gives_nothing_makes_no_promise() {
        let short = said(|s| {
            (s.decode.busy_ns, s.decode.cpu_ns, s.storage.busy_ns) = (37_000_000_000, None, 3_000_000_000);
            (s.consumer.user_ns, s.consumer.waited_ns) = (2_000_000_000, 8_000_000_000);
            s.decode.busy_ns = 33_000_000_000;
            s.order.no_slot_ns = 9_000_000_000;
            s.slots.count = 4096;
            (s.slots.filling_ns, s.slots.held_ns) = (40_000_000_000_000, 0);
        });
        assert!(!short.1.contains("slots(8192)"), "{}", short.1);
    }

    #[test]
    fn storage_is_advised_by_what_keeps_reads_from_being_more() {
        let reading = |in_flight_ns| {
            said(move |s| {
                (s.decode.busy_ns, s.decode.cpu_ns) = (8_000_000_000, None);
                (s.storage.busy_ns, s.storage.in_flight_ns) = (9_900_000_000, in_flight_ns);
            })
        };
        let full = reading(310_000_000_000);
        assert_said(Cause::Storage, "(strong evidence)", full.clone());
        assert_said(Cause::Storage, "`depth(64)`: all 32 reads", full);
        let slots = reading(99_000_000_000);
        assert_said(
            Cause::Storage,
            "bound by storage, starved 50.0 %, or the prefetch buffers: too close to tell",
            slots.clone(),
        );
        assert_eq!(slots.1.matches("`slots(").count(), 1, "one number for one setting: {}", slots.1);
        assert_said(Cause::Storage, "slots allowed 10 reads in flight of 32", slots);
    }

    /// Bound by storage: all of 32 reads are in flight, and took so many milliseconds each.
    fn reading(latencies: &[(f64, u64)]) -> Snapshot {
        let mut snapshot = decoding();
        (snapshot.decode.busy_ns, snapshot.decode.cpu_ns) = (8_000_000_000, None);
        (snapshot.storage.busy_ns, snapshot.storage.in_flight_ns) = (9_900_000_000, 310_000_000_000);
        let buckets: Vec<(f64, u64)> = latencies.iter().map(|(ms, count)| (ms * 1e6, *count)).collect();
        let count = buckets.iter().map(|bucket| bucket.1).sum();
        snapshot.storage.latency = crate::meter::Latency { count, buckets, ..Default::default() };
        snapshot
    }

    #[test]
    fn a_larger_depth_is_advised_first_only_while_reads_do_not_wait_for_each_other() {
        let deeper = |snapshot: &Snapshot| {
            let change = Change { depth: Some(64), ..Change::default() };
            WhatIf::from(snapshot).unwrap().with(&change)
        };
        for (name, latencies, first, at_limit) in [
            ("a device with room", &[(0.9, 100), (1.0, 9000), (1.5, 900)][..], true, false),
            ("a throttled disk", &[(0.2, 8), (30.0, 400), (190.0, 3000), (195.0, 3000), (210.0, 3000)], false, true),
            ("a device of four channels", &[(1.0, 4), (4.0, 20), (7.0, 2000), (8.0, 6000), (9.0, 1900)], false, true),
            ("latencies that vary on their own", &[(0.1, 500), (1.0, 2000), (4.0, 4000), (9.0, 3500)], false, false),
        ] {
            let (snapshot, now) = (reading(latencies), 1000.0);
            let (verdict, then) = (Verdict::of(&snapshot), deeper(&snapshot));
            assert_eq!(verdict.cause, Cause::Storage, "{name}: {verdict}");
            let place = verdict.advice.iter().position(|line| line.starts_with("`depth(64)`"));
            assert_eq!(place == Some(0), first, "{name}: {verdict}");
            assert_eq!(place.is_none(), at_limit, "{name}: {verdict}");
            assert_eq!(verdict.to_string().contains("as long as the fastest: they waited for each other"), at_limit);
            // What doubling gives is said, or that it cannot be known.
            assert_eq!(then.at_most, !at_limit, "{name}: {then:?}");
            assert_eq!(then.items_per_s > 1.05 * now, !at_limit, "{name}: {then:?}");
            let caveat = match (first, at_limit) {
                (true, _) => "if reads do not begin to wait for each other",
                (_, true) => "A larger depth gives nothing: 32 reads in flight wait for each other",
                _ => "cannot be known",
            };
            assert!(then.caveats.iter().any(|said| said.contains(caveat)), "{name}: {then:?}");
        }
    }

    #[test]
    fn advice_names_only_changes_that_gain() {
        // Busy workers and a busy consumer: (share of the time, share of the time) → what is promised of the one or the other.
        for (decoding_ns, user_ns, ready) in [
            (39_600_000_000, 9_950_000_000, 0),
            (38_000_000_000, 6_200_000_000, 0),
            (39_600_000_000, 9_000_000_000, 4_000),
            (20_000_000_000, 9_900_000_000, 0),
            (8_000_000_000, 9_400_000_000, 0),
            (36_000_000_000, 9_000_000_000, 2_000),
        ] {
            let mut snapshot = decoding();
            (snapshot.decode.busy_ns, snapshot.decode.cpu_ns) = (decoding_ns, Some(decoding_ns));
            snapshot.decode.samples -= ready;
            (snapshot.consumer.user_ns, snapshot.consumer.waited_ns) = (user_ns, 10_000_000_000 - user_ns);
            let (verdict, model) = (Verdict::of(&snapshot), WhatIf::from(&snapshot).unwrap());
            let now = model.with(&Change::default()).items_per_s;
            let faster = model.with(&Change { consumer_factor: Some(1e6), ..Change::default() }).items_per_s;
            let said = verdict.advice.iter().any(|line| line.contains("with less of it"));
            let asked = [Some(verdict.cause), verdict.also]
                .iter()
                .any(|cause| matches!(cause, Some(Cause::Consumer | Cause::NotStarved)));
            assert_eq!(said, asked && faster >= WhatIf::GAIN * now, "{now} {faster} {verdict}");
            // What can be done is not less than what is done, and a rate that is above it is said to be so.
            let least = verdict.stages.iter().map(|stage| stage.ceiling_items_per_s).fold(f64::INFINITY, f64::min);
            assert!(now <= 1.000001 * least, "{now} {verdict}");
            assert_eq!(verdict.to_string().contains("can be kept up"), 1000.0 > 1.01 * least, "{verdict}");
        }
    }

    #[test]
    fn a_depth_that_is_not_filled_is_not_made_larger() {
        let mut snapshot = reading(&[(1.0, 10_000)]);
        snapshot.storage.in_flight_ns = 99_000_000_000;
        let model = WhatIf::from(&snapshot).unwrap();
        let with = |depth| model.with(&Change { depth: Some(depth), ..Change::default() });
        let now = model.with(&Change::default()).items_per_s;
        assert!(with(64).items_per_s == now && with(64).caveats[0].contains("only 10 of 32 reads"), "{:?}", with(64));
        assert!(with(16).items_per_s == now && with(5).items_per_s < 0.6 * now && with(5).at_least, "{:?}", with(5));
        assert!(!Verdict::of(&snapshot).to_string().contains("`depth("));
    }

    #[test]
    fn an_explicit_reader_that_storage_waits_for_is_the_first_advice() {
        let first = |name: &str, explicit, in_flight_ns| {
            let mut snapshot = decoding();
            (snapshot.decode.busy_ns, snapshot.decode.cpu_ns) = (8_000_000_000, None);
            (snapshot.storage.busy_ns, snapshot.storage.in_flight_ns) = (9_900_000_000, in_flight_ns);
            snapshot.storage.reader = Some(ReaderInUse { name: name.into(), explicit });
            let verdict = Verdict::of(&snapshot);
            assert_eq!(verdict.cause, Cause::Storage, "{verdict}");
            verdict.advice[0].clone()
        };
        for in_flight_ns in [310_000_000_000, 99_000_000_000] {
            for (name, explicit, lacks) in [
                ("mmap", true, Some("`mmap` has no `O_DIRECT`")),
                ("pread", true, Some("`pread` needs a thread")),
                ("io_uring", true, None),
                // The loader chose it: another is not to be had.
                ("pread", false, None),
            ] {
                let advice = first(name, explicit, in_flight_ns);
                match lacks {
                    Some(lacks) => assert!(advice.starts_with(&format!("`reader(auto)`: {lacks}")), "{name}: {advice}"),
                    None => assert!(!advice.contains("`reader(auto)`"), "{name}: {advice}"),
                }
            }
        }
        // While decoding limits the reader does not matter.
        let decoding = said(|s| s.storage.reader = Some(ReaderInUse { name: "mmap".into(), explicit: true }));
        assert!(!decoding.1.contains("`reader(auto)`"), "{}", decoding.1);
    }

    #[test]
    fn room_that_lacks_is_named_where_it_lacks() {
        let idle = |change: fn(&mut Snapshot)| {
            said(move |s| {
                (s.decode.busy_ns, s.decode.cpu_ns, s.storage.busy_ns) = (12_000_000_000, None, 3_000_000_000);
                s.order.no_slot_ns = 0;
                change(s);
            })
        };
        let budget = Cause::MemoryBudget;
        assert_said(budget, "`slots(8)`", idle(|s| s.order.no_slot_ns = 9_000_000_000));
        assert_said(budget, "wait for room for their bytes", idle(|s| s.storage.blocked_ns = 6_000_000_000));
        let held = idle(|s| {
            s.order.no_slot_ns = 9_000_000_000;
            (s.slots.held_ns, s.slots.filling_ns) = (32_000_000_000, 8_000_000_000);
        });
        assert_said(budget, "The consumer holds 3.2 of 4 slots", held);
        let buffers = idle(|s| {
            s.copy =
                Some(crate::meter::Copy { blocked_ns: 5_000_000_000, buffers: 3, batches: 100, ..Default::default() });
            let (steps, starved_ns) = (100, 5_000_000_000);
            s.consumer.gpu = Some(crate::meter::GpuIdle { steps, starved_ns, ..Default::default() });
        });
        assert_said(budget, "`device_batches(5)`", buffers);
    }

    #[test]
    fn tiny_batches_that_only_change_hands_are_bound_by_that() {
        let tiny = Pipe {
            rows: 1,
            slots: 8,
            plan_ns: 2e3,
            read_ns: 0.0,
            decode_ns: 5e3,
            user_ns: 1e3,
            wake_ns: 400e3,
            ..Pipe::default()
        };
        let verdict = Verdict::of(&Pipe { batches: 20_000, ..tiny }.run());
        assert!(verdict.cause == Cause::HandOver && verdict.advice[0].contains("`batch_size`"), "{verdict}");
    }

    #[test]
    fn copies_and_the_planner_are_named_when_they_are_the_slowest() {
        let copy = Some(Gpu { copy_ns: 20e6, buffers: 3 });
        let verdict = Verdict::of(&Pipe { copy, ..Pipe::default() }.run());
        assert!(verdict.cause == Cause::Copy && verdict.advice[0].contains("`finish`"), "{verdict}");
        let verdict = Verdict::of(&Pipe { plan_ns: 20e6, ..Pipe::default() }.run());
        assert!(
            verdict.cause == Cause::Order && verdict.evidence.iter().any(|line| line.contains("planner's")),
            "{verdict}"
        );
    }

    #[test]
    fn a_verdict_survives_json() {
        let verdict = Verdict::of(&decoding());
        let text = serde_json::to_string(&verdict).unwrap();
        assert!(text.contains(r#""cause":"decode""#) && text.contains(r#""strength":"strong""#), "{text}");
        assert_eq!(serde_json::from_str::<Verdict>(&text).unwrap(), verdict);
    }

    #[test]
    fn numbers_are_written_for_people() {
        let cases = [
            (0.0, "0.0"),
            (7.34, "7.3"),
            (999.6, "1,000"),
            (1780.2, "1,780"),
            (1234567.0, "1,234,567"),
            (1e300, "1.0e300"),
        ];
        cases.iter().for_each(|(value, text)| assert_eq!(number(*value), *text));
        assert_eq!([time(1500.0), time(2.5e6), time(3e9)], ["1.5 µs", "2.50 ms", "3.00 s"]);
        assert_eq!([bytes(17.0), bytes(4096.0), bytes(2.5e6)], ["17 bytes", "4 kB", "2.5 MB"]);
    }

    /// A snapshot with these numbers in its fields, whatever they mean.
    fn hostile(numbers: &[u64]) -> Snapshot {
        let mut numbers = numbers.iter().copied().cycle();
        let mut next = || numbers.next().unwrap_or(0);
        let mut value = serde_json::to_value(Snapshot {
            copy: (next() % 2 == 0).then(Default::default),
            decode: crate::meter::Decode { cpu_ns: (next() % 2 == 0).then_some(0), ..Default::default() },
            consumer: crate::meter::Consumer { gpu: (next() % 2 == 0).then(Default::default), ..Default::default() },
            ..Snapshot::default()
        })
        .unwrap();
        fn fill(value: &mut serde_json::Value, key: &str, next: &mut impl FnMut() -> u64) {
            match value {
                serde_json::Value::Object(map) => map.iter_mut().for_each(|(key, value)| fill(value, key, next)),
                serde_json::Value::Number(number) if number.is_u64() => {
                    let narrow = ["depth", "workers", "cores", "buffers"].contains(&key) || key == "count";
                    *number = if narrow { next() & u64::from(u32::MAX) } else { next() }.into();
                }
                _ => {}
            }
        }
        fill(&mut value, "", &mut next);
        serde_json::from_value(value).unwrap()
    }

    proptest::proptest! {
        #[test]
        fn no_snapshot_makes_it_panic_or_say_what_is_no_number(
            numbers in proptest::collection::vec(
                proptest::prop_oneof![
                    proptest::strategy::Just(0), proptest::strategy::Just(1), proptest::strategy::Just(u64::MAX),
                    proptest::num::u64::ANY, 0_u64..1000, 1_000_000_u64..10_000_000_000,
                ],
                1..60,
            ),
            factor in proptest::num::f64::ANY,
        ) {
            let snapshot = hostile(&numbers);
            let verdict = Verdict::of(&snapshot);
            let _ = verdict.to_string();
            assert!((0.0..=1.0).contains(&verdict.starved_share), "{verdict}");
            for StageLoad { utilisation, demand_ns_per_batch, ceiling_items_per_s, .. } in &verdict.stages {
                assert!((0.0..=1.0).contains(utilisation), "{verdict}");
                assert!(demand_ns_per_batch.is_finite() && ceiling_items_per_s.is_finite(), "{verdict:?}");
                assert!(*demand_ns_per_batch >= 0.0 && *ceiling_items_per_s >= 0.0, "{verdict:?}");
            }
            let fed = verdict.starved_share < FED && verdict.cause != Cause::Unknown;
            assert_eq!(fed, verdict.cause == Cause::NotStarved, "{}", verdict);
            assert!(verdict.also != Some(verdict.cause), "{}", verdict);
            assert_eq!(serde_json::from_str::<Verdict>(&serde_json::to_string(&verdict).unwrap()).unwrap().cause, verdict.cause);
            let Some(model) = WhatIf::from(&snapshot) else { return Ok(()) };
            let by = Some(factor);
            for change in [
                Change::default(),
                Change { cached: true, gpu_decode: true, ..Change::default() },
                Change { workers: Some(numbers[0] as u32), slots: Some(numbers[0] as u32), ..Change::default() },
                Change { storage_factor: by, copy_factor: by, consumer_factor: by, ..Change::default() },
            ] {
                let then = model.with(&change);
                let finite = |value: f64| value.is_finite() && value >= 0.0;
                assert!(finite(then.items_per_s) && then.stages.iter().all(|stage| finite(stage.1)), "{then:?}");
            }
        }
    }
}
