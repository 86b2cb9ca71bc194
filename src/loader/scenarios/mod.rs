//! Ground truth for the profiler: the real pipeline, with storage, decoder, sampler and consumer in
//! virtual time.
//!
//! ```text
//!  scenario ──► loader with its own threads ──► snapshot, verdict, what-if ─┐
//!     │              │ clock shows virtual time                             ├─ must agree
//!     └──────────────┴──► activity log of each part ────────────────────────┘
//! ```
//!
//! The truth is independent of the profiler: each part logs its work, the consumer its requests and
//! batches. Batches stay on the host, or a GPU in virtual time copies them and runs the steps. A
//! consumer may enqueue steps without waiting for them, as training programs do.
//!
//! Limits: one host, at most one GPU.

mod gpu;
mod parts;
mod tests;
mod time;
mod verdict;

use super::Loader;
use crate::batch::Batch;
use crate::order::Order;
use feedline_core::memory::MemoryTerm;
use feedline_report::meter::Snapshot;
use gpu::{Gpu, OnGpu};
use parts::{Decode, Device, ReadLog, Samples, Slow, Storage, Times};
use std::collections::VecDeque;
use std::sync::mpsc::{TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use time::{SharedTime, Span, Went};

/// Bytes of a sample: one page, so that a ring holds one sample per page.
const SAMPLE: u64 = 4096;

/// A loader and its consumer. Times are mean nanoseconds of one read, one sample, one step.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) name: String,
    pub(super) rows: u64,
    /// Measured batches.
    pub(super) batches: u64,
    pub(super) workers: usize,
    pub(super) slots: usize,
    /// Maximum reads in flight, and reads that the device serves at once.
    pub(super) depth: usize,
    pub(super) servers: usize,
    pub(super) read: f64,
    /// Time of each read on the device's only channel.
    pub(super) channel: f64,
    pub(super) decode: f64,
    /// Time to determine the next sample.
    pub(super) order: f64,
    pub(super) step: f64,
    pub(super) varies: bool,
    /// Batches that the consumer holds besides the current one.
    pub(super) holds: usize,
    /// Drops a batch before its step, not after.
    pub(super) drops_early: bool,
    /// Uses the smallest legal memory budget.
    pub(super) tiny_ring: bool,
    /// Reads nothing.
    pub(super) in_memory: bool,
    /// Runs steps on a GPU.
    gpu: Option<OnGpu>,
    pub(super) seed: u64,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            name: String::new(),
            rows: 8,
            batches: 160,
            workers: 2,
            slots: 4,
            depth: 16,
            servers: 4,
            read: 1e6,
            channel: 0.0,
            decode: 1e6,
            order: 0.0,
            step: 1e6,
            varies: false,
            holds: 0,
            drops_early: false,
            tiny_ring: false,
            in_memory: false,
            gpu: None,
            seed: 1,
        }
    }
}

/// True times within the steady time, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Truth {
    /// The whole steady time, without the first batch.
    pub(super) steady: u64,
    pub(super) waited: u64,
    /// Time that the consumer's thread did not wait.
    pub(super) own: u64,
    /// Time with steps under way, on the GPU if there is one.
    pub(super) stepped: u64,
    /// Time with copies on the bus.
    pub(super) copying: u64,
    /// Time with any read in flight; summed over reads; summed over servers.
    pub(super) reading: u64,
    pub(super) in_flight: u64,
    pub(super) served: u64,
    pub(super) decoding: u64,
    pub(super) ordering: u64,
    /// Idle time of workers while a batch was being filled; time of batches being filled, and held
    /// by the consumer.
    pub(super) starved: u64,
    pub(super) filling: u64,
    pub(super) held: u64,
}

/// What the profiler measured, and the ground truth.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub(super) snapshot: Snapshot,
    pub(super) truth: Truth,
    /// The readable report.
    pub(super) report: String,
}

impl Scenario {
    /// Runs the scenario. Panics on a deadlock.
    pub(super) fn run(&self) -> Outcome {
        let all = self.batches + self.slots as u64 + 2;
        let time = SharedTime::new(self.rows, all);
        let (outcome, outcomes) = channel();
        let thread = {
            let scenario = self.clone();
            let time = time.clone();
            std::thread::Builder::new()
                .name("scenario".into())
                .spawn(move || drop(outcome.send(scenario.consume(&time, all))))
                .unwrap()
        };
        let mut tries = 0;
        loop {
            match outcomes.try_recv() {
                Ok(outcome) => {
                    thread.join().unwrap();
                    return outcome;
                }
                Err(TryRecvError::Disconnected) => panic!("{self:?}: the consumer panicked"),
                Err(TryRecvError::Empty) => {}
            }
            tries = match time.try_advance() {
                Went::On => 0,
                Went::Not => tries + 1,
                Went::Nowhere(who) => panic!("{self:?} is deadlocked: {who}"),
            };
            if tries < 8 {
                std::thread::yield_now()
            } else {
                std::thread::sleep(Duration::from_micros(20))
            }
        }
    }

    fn times(&self, mean: f64, salt: u64) -> Times {
        Times {
            mean,
            varies: self.varies,
            seed: self.seed * 8 + salt,
        }
    }

    fn build(
        &self,
        time: &Arc<SharedTime>,
        all: u64,
        gpu: Option<&Gpu>,
    ) -> (Loader, Arc<Mutex<ReadLog>>) {
        let device = Device {
            servers: self.servers,
            service: self.times(self.read, 1),
            channel: self.channel,
            depth: self.depth,
        };
        let make = |budget: Option<usize>| {
            let (opened, log) = Storage::open(time.clone(), device);
            let len = all * self.rows;
            let mut builder = Loader::builder(Samples::new(len, SAMPLE, self.in_memory))
                .decode(Decode {
                    time: time.clone(),
                    times: self.times(self.decode, 2),
                })
                .batch_size(self.rows as usize)
                .workers(self.workers)
                .tuning(|t| t.slots(self.slots).held_deadline(Duration::from_secs(3600)))
                .simulated(time.clock(), opened);
            if self.order > 0.0 {
                let times = self.times(self.order, 3);
                builder = builder.order(Order::sampler(Slow {
                    time: time.clone(),
                    times,
                    len,
                }));
            }
            if let Some(gpu) = gpu {
                builder = gpu.settings(builder);
            }
            if let Some(bytes) = budget {
                builder = builder.memory_budget(bytes);
            }
            (builder.build().unwrap(), log)
        };
        if !self.tiny_ring {
            return make(None);
        }
        let (loader, _) = make(None);
        let total = loader.plan().total();
        let ring = loader.plan().term(MemoryTerm::RING).bytes();
        drop(loader);
        // One sample, and the plan's addition for its alignment.
        make(Some(total - ring + 4 * SAMPLE as usize))
    }

    fn consume(&self, time: &Arc<SharedTime>, all: u64) -> Outcome {
        let gpu = self
            .gpu
            .map(|on| Gpu::new(on, time, self.times(on.copy, 5)));
        let (loader, log) = self.build(time, all, gpu.as_ref());
        time.watch(
            loader.shared.runtime.core(),
            gpu.as_ref().map(Gpu::simulated),
        );
        let steps = self.times(self.step, 4);
        let mut epoch = loader.epoch(0).unwrap();
        let mut held = VecDeque::<(u64, Batch)>::new();
        let mut drops = Vec::new();
        let mut queued = VecDeque::new();
        let mut first = 0;
        let mut waited = 0;
        let mut own = 0;
        for number in 0..self.batches {
            let asked = time.now();
            time.asks(number);
            let batch = epoch.next().unwrap().unwrap();
            time.got();
            assert_eq!(batch.ids()[0], number * self.rows);
            let got = time.now();
            if number == 0 {
                first = got
            } else {
                waited += got - asked
            }
            let step = steps.of(number).max(1);
            match &gpu {
                Some(gpu) => queued.push_back(gpu.step(&batch, step)),
                None => queued.push_back(got + step),
            }
            held.push_back((got, batch));
            let mut let_go = || {
                let more = held.len().saturating_sub(self.holds);
                drops.extend(held.drain(..more).map(|(got, _)| (got, time.now())));
            };
            if self.drops_early {
                let_go();
            }
            while queued.len() > self.gpu.map_or(0, |on| on.ahead) {
                let end = queued.pop_front().unwrap_or_default();
                time.sleep(end.saturating_sub(time.now()).max(1));
            }
            own += time.now() - got;
            let_go();
        }
        // Waits until the present moment has no more events.
        time.sleep(0);
        let window = (first, time.now());
        let mut snapshot = loader.snapshot();
        let report = loader.report().to_string();
        // Workers in virtual time use no cores, and virtual storage is no device.
        snapshot.decode.cpu_ns = None;
        snapshot.decode.cores = 1024;
        snapshot.cpu = None;
        snapshot.storage.device_bytes = None;
        let holding = held
            .iter()
            .map(|(got, _)| (*got, window.1))
            .chain(drops)
            .collect::<Vec<_>>();
        drop(held);
        // The remaining batches, so that the timeline has all of them.
        for number in self.batches..all {
            time.asks(number);
            drop(epoch.next().unwrap().unwrap());
            time.got();
        }
        let filling: Vec<_> = loader
            .timeline()
            .batches
            .iter()
            .map(|batch| (batch.planned_ns, batch.full_ns))
            .collect();
        let mut truth = self.truth(time, &log, window);
        (truth.waited, truth.own, truth.stepped) = (waited, own, own);
        if let Some(gpu) = &gpu {
            truth.stepped = added(&gpu.steps(), window);
            truth.copying = added(&gpu.copies(), window);
        }
        truth.held = added(&holding, window);
        truth.filling = added(&filling, window);
        truth.starved = self.starved(&time.lock().decodes, &filling, window);
        time.end();
        drop((epoch, loader));
        Outcome {
            snapshot,
            truth,
            report,
        }
    }

    /// Idle time of workers, summed, while a batch was being filled.
    fn starved(&self, decodes: &[Span], filling: &[Span], window: Span) -> u64 {
        let ends = |spans: &[Span], of: i64| {
            spans
                .iter()
                .flat_map(|(from, to)| [(*from, of), (*to, -of)])
                .collect::<Vec<_>>()
        };
        // Decodes count as 1, batches as 1 << 20.
        let mut events = [ends(decodes, 1), ends(filling, 1 << 20)].concat();
        events.sort_unstable();
        let mut inside = 0_i64;
        let mut since = 0;
        let mut sum = 0;
        for (at, change) in events {
            let working = inside & 0xf_ffff;
            let batches = inside >> 20;
            if batches > 0 {
                sum += (self.workers as u64 - working as u64) * within((since, at), window);
            }
            inside += change;
            since = at;
        }
        sum
    }

    fn truth(&self, time: &SharedTime, reads: &Mutex<ReadLog>, window: Span) -> Truth {
        // Locks are taken in the same order as in the storage, which reads the clock before it
        // sends.
        let state = time.lock();
        let reads = reads.lock().unwrap();
        Truth {
            steady: window.1 - window.0,
            reading: covered(&reads.flights, window),
            in_flight: added(&reads.flights, window),
            served: added(&reads.served, window),
            decoding: added(&state.decodes, window),
            ordering: added(&state.orders, window),
            ..Truth::default()
        }
    }
}

/// The part of a span within the window.
fn within((from, to): Span, window: Span) -> u64 {
    to.min(window.1).saturating_sub(from.max(window.0))
}

/// Sum of lengths within the window.
fn added(spans: &[Span], window: Span) -> u64 {
    spans.iter().map(|span| within(*span, window)).sum()
}

/// Length of the union of spans within the window.
fn covered(spans: &[Span], window: Span) -> u64 {
    let mut spans = spans.to_vec();
    spans.sort_unstable();
    let mut sum = 0;
    let mut end = 0;
    for (from, to) in spans {
        sum += within((from.max(end), to.max(end)), window);
        end = end.max(to);
    }
    sum
}
