//! The measurements as shares of times and cores, for rules and sentences. Pure.

use crate::codes::Cause;
use crate::observation::{LoaderKind, Observation, Places, Worker};

/// Below this share of the time, waits are no starvation.
pub const FED: f64 = 0.05;
/// The same for a GPU's idle time.
pub const GPU_FED: f64 = 0.02;
pub const BATCHES_LEAST: u64 = 8;
/// Slow batches that are enough, in a time that is long.
pub const SLOW_BATCHES: u64 = 3;
pub const SLOW_NS: u64 = 2_000_000_000;
/// Shares that decide.
pub const HALF: f64 = 0.5;
/// Cores of other threads that can hold the interpreter's lock, and of other programs that matter.
pub const BUSY_THREADS: f64 = 0.3;
pub const CROWDED: f64 = 0.5;

/// The measurements as shares of times, for rules and sentences.
pub struct Shares<'o> {
    pub seen: &'o Observation,
    /// Samples (or batches) per second, starts included.
    pub rate: f64,
    pub starved: f64,
    pub gpu_idle: Option<f64>,
    /// Starts of later epochs, as a share of all time but the first start.
    pub restarts: f64,
    /// Nanoseconds of a batch: all, waiting, step.
    pub period_ns: f64,
    pub wait_ns: f64,
    pub step_ns: f64,
    /// The worker processes that worked.
    pub workers: Vec<&'o Worker>,
    /// Mean share of the time in which workers had a task.
    pub busy: f64,
    /// What they did then.
    pub places: Places,
    /// Cores that workers used, each and together.
    pub worker_cores: f64,
    pub delayed: f64,
    /// Cores: idle, used by this process, by other programs.
    pub idle_cores: f64,
    pub process_cores: f64,
    pub other_cores: f64,
    pub throttled: f64,
    /// Share of the time in which the loop's thread was ready without a core.
    pub loop_delayed: f64,
    /// Cores that other threads of the loop's process use.
    pub thread_cores: f64,
    /// Bytes that workers write per batch.
    pub pickled: f64,
    /// Part of the waits in which the loop's thread computed.
    pub loop_computes: f64,
    /// Part of the lock's requests that were late.
    pub lock_late: f64,
    pub device_bytes_per_s: f64,
    pub longest: f64,
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

impl<'o> Shares<'o> {
    pub fn of(seen: &'o Observation) -> Self {
        let consumer = &seen.consumer;
        let machine = &seen.machine;
        let batches = consumer.steady_batches as f64;
        let steady = consumer.steady_ns as f64;
        let waited = consumer.waited_ns as f64;
        let items = if consumer.samples > 0 {
            consumer.samples
        } else {
            consumer.batches
        };
        let watched = machine.watched_ns as f64;
        let of_named = seen.loader.kind == LoaderKind::Torch;
        let workers: Vec<&Worker> = seen
            .workers
            .iter()
            // Other children, such as a tracker of resources, do nothing.
            .filter(|worker| of_named || worker.cpu_ns > worker.watched_ns / 20)
            .collect();
        let count = workers.len().max(1) as f64;
        let mut places = Places::default();
        workers.iter().for_each(|worker| places.add(&worker.places));
        let worker_cores: f64 = workers
            .iter()
            .map(|worker| ratio(worker.cpu_ns as f64, worker.watched_ns as f64))
            .sum();
        let cpu: u64 = workers.iter().map(|worker| worker.cpu_ns).sum();
        let delay: u64 = workers.iter().map(|worker| worker.delay_ns).sum();
        let process_cores = ratio(machine.process_ns as f64, watched);
        let cores = machine.quota.unwrap_or(f64::MAX).min(machine.cores.into());
        let busy_cores = machine
            .busy_ns
            .map_or(process_cores + worker_cores, |busy| {
                ratio(busy as f64, watched)
            });
        let written: u64 = workers.iter().map(|worker| worker.written_bytes).sum();
        let watched_workers: u64 = workers.iter().map(|worker| worker.watched_ns).sum();
        // Bytes were counted in the watched part of the steady time.
        let watched_batches = ratio(watched_workers as f64 / count, steady) * batches;
        let device: u64 = workers.iter().map(|worker| worker.device_bytes).sum();
        let threads: u64 = seen.threads.iter().map(|thread| thread.cpu_ns).sum();
        let lock = seen.interpreter.unwrap_or_default();
        Self {
            seen,
            rate: ratio(1e9 * items as f64, consumer.total_ns as f64),
            starved: ratio(waited, steady),
            gpu_idle: seen
                .gpu
                .filter(|gpu| gpu.steps >= BATCHES_LEAST)
                .map(|gpu| ratio(gpu.idle_ns as f64, gpu.span_ns as f64)),
            restarts: ratio(
                consumer.restarts_ns as f64,
                consumer.restarts_ns as f64 + steady,
            ),
            period_ns: ratio(steady, batches),
            wait_ns: ratio(waited, batches),
            step_ns: ratio(steady - waited, batches),
            busy: workers.iter().map(|worker| worker.busy()).sum::<f64>() / count,
            places,
            worker_cores,
            delayed: ratio(delay as f64, (cpu + delay) as f64),
            idle_cores: (cores - busy_cores).max(0.0),
            process_cores,
            other_cores: (busy_cores - process_cores - worker_cores).max(0.0),
            throttled: ratio(machine.throttled_ns as f64, watched),
            loop_delayed: ratio(consumer.delay_ns as f64, consumer.watched_ns as f64),
            thread_cores: ratio(threads as f64, watched),
            pickled: ratio(written as f64, watched_batches),
            loop_computes: ratio(consumer.wait_cpu_ns as f64, waited),
            lock_late: if lock.probes >= BATCHES_LEAST {
                ratio(lock.late as f64, lock.probes as f64)
            } else {
                0.0
            },
            device_bytes_per_s: ratio(1e9 * device as f64, watched_workers as f64 / count)
                + ratio(1e9 * machine.device_bytes as f64, watched),
            longest: consumer.waits.in_longest(0.1),
            workers,
        }
    }

    /// Whether enough batches came for more than a guess.
    pub fn has_enough(&self) -> bool {
        let consumer = &self.seen.consumer;
        let slow = consumer.steady_batches >= SLOW_BATCHES && consumer.steady_ns >= SLOW_NS;
        slow || consumer.steady_batches >= BATCHES_LEAST
    }

    /// Whether workers mostly have no task: their batches are ready.
    pub fn is_ahead(&self) -> bool {
        !self.workers.is_empty() && self.busy < HALF
    }

    /// Whether another thread of the loop's process holds the interpreter's lock in its waits. The
    /// loop's own thread holds it while it unpickles.
    pub fn lacks_lock(&self) -> bool {
        self.lock_late >= HALF && self.thread_cores >= BUSY_THREADS
    }

    /// Who takes the cores, if ready threads lack them.
    pub fn takes_cores(&self) -> Cause {
        let cores = f64::from(self.seen.machine.cores.max(1));
        if self.other_cores >= (0.25 * cores).max(CROWDED) {
            Cause::OtherPrograms
        } else {
            Cause::Cores
        }
    }

    /// Whether the loop is starved.
    pub fn starves(&self) -> bool {
        self.gpu_idle
            .map_or(self.starved >= FED, |idle| idle >= GPU_FED)
    }

    /// The busiest worker, and the share of the next one.
    pub fn slowest(&self) -> Option<(&'o Worker, f64)> {
        let mut all = self.workers.clone();
        all.sort_by(|a, b| b.busy().total_cmp(&a.busy()));
        Some((*all.first()?, all.get(1)?.busy()))
    }

    /// The part of the working time at these places.
    pub fn at(&self, places: &Places, count: u64) -> f64 {
        ratio(count as f64, (places.all() - places.tasks) as f64)
    }

    /// The places of those who make the batches: workers, or the loop itself, or threads for which
    /// it waits.
    pub fn producing(&self) -> Places {
        if !self.workers.is_empty() {
            return self.places;
        }
        let own = self.seen.consumer.places;
        if 2 * own.lock < own.all() {
            return own;
        }
        let mut threads = Places::default();
        self.seen
            .threads
            .iter()
            .for_each(|thread| threads.add(&thread.places));
        // Threads at a lock wait for others.
        threads.tasks += threads.lock;
        threads.lock = 0;
        threads
    }

    pub fn looks(&self) -> u64 {
        match self.workers.iter().map(|worker| worker.places.all()).min() {
            Some(least) => least,
            None => self.seen.consumer.places.all(),
        }
    }
}
