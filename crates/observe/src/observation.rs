//! What was measured around a loader, as numbers.

use serde::{Deserialize, Serialize};

/// The kind of a loader: it decides the names of settings in advice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LoaderKind {
    /// `torch.utils.data.DataLoader` and loaders around it.
    Torch,
    /// NVIDIA DALI.
    Dali,
    /// `tf.data`.
    TfData,
    /// Google's Grain.
    Grain,
    /// Any other iterable.
    #[default]
    Other,
}

/// The settings of the loader, as far as they are known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct LoaderFacts {
    pub kind: LoaderKind,
    /// The loader's class.
    pub name: String,
    /// Number of worker processes; 0 if the loop's own process makes the batches.
    pub workers: Option<u32>,
    /// Batches that each worker prepares ahead.
    pub prefetch_factor: Option<u32>,
    /// Whether workers live on between epochs.
    pub persistent_workers: Option<bool>,
    /// Whether batches are copied to pinned memory.
    pub pin_memory: Option<bool>,
    /// Whether batches come in the order of the sampler, whatever worker is done first.
    pub in_order: Option<bool>,
    /// Samples of a batch.
    pub batch_size: Option<u64>,
    /// Batches of an epoch.
    pub batches: Option<u64>,
    /// Whether a GPU is used in this process.
    pub gpu: bool,
}

impl LoaderFacts {
    /// Settings that are not known, of a loader of this kind and class.
    pub fn new(kind: LoaderKind, name: impl Into<String>) -> Self {
        Self {
            kind,
            name: name.into(),
            ..Self::default()
        }
    }
}

/// Everything that was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Observation {
    pub loader: LoaderFacts,
    #[serde(rename = "loop")]
    pub consumer: Loop,
    pub interpreter: Option<Interpreter>,
    /// Worker processes, by their numbers.
    pub workers: Vec<Worker>,
    /// Other threads of the loop's process that worked in the steady time, the busiest first.
    pub threads: Vec<ThreadUse>,
    pub machine: Machine,
    pub gpu: Option<GpuTime>,
}

/// The loop's thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Loop {
    /// Epochs that were begun.
    pub epochs: u64,
    /// Batches, with the first one of each epoch.
    pub batches: u64,
    /// Samples in them; 0 if unknown.
    pub samples: u64,
    /// From the first start to the last event.
    pub total_ns: u64,
    /// Time in which epochs were started: until their first batch, and from their last one to the
    /// end of the iterator.
    pub starts_ns: u64,
    /// The same without the first epoch's start and the last epoch's end.
    pub restarts_ns: u64,
    /// Steps and waits, without starts.
    pub steady_ns: u64,
    /// Batches that came in the steady time.
    pub steady_batches: u64,
    /// Part of the steady time in which the loop waited for batches.
    pub waited_ns: u64,
    /// CPU time of the loop's thread in these waits.
    pub wait_cpu_ns: u64,
    /// CPU time of the loop's thread in its steps.
    pub step_cpu_ns: u64,
    /// Steady time in which the sampler watched the loop's thread.
    pub watched_ns: u64,
    /// Part of it in which the thread was ready without a core.
    pub delay_ns: u64,
    /// How long the waits took.
    pub waits: Waits,
    /// The places of the loop's thread while it waited.
    pub places: Places,
}

/// Waits by their length: each entry is twice as long as the one before, the first below 2 µs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Waits {
    pub counts: Vec<u64>,
    pub sums_ns: Vec<u64>,
    pub longest_ns: u64,
}

impl Waits {
    pub(crate) fn add(&mut self, ns: u64) {
        let at = (ns / 1000).max(1).ilog2() as usize;
        if self.counts.len() <= at {
            self.counts.resize(at + 1, 0);
            self.sums_ns.resize(at + 1, 0);
        }
        self.counts[at] += 1;
        self.sums_ns[at] += ns;
        self.longest_ns = self.longest_ns.max(ns);
    }

    /// The part of the waiting time in the longest waits, which are at most `share` of all.
    pub(crate) fn in_longest(&self, share: f64) -> f64 {
        let mut left = share * self.counts.iter().sum::<u64>() as f64;
        let mut sum = 0.0;
        for (count, ns) in self.counts.iter().zip(&self.sums_ns).rev() {
            let count = *count as f64;
            if count == 0.0 {
                continue;
            }
            sum += *ns as f64 * (left / count).min(1.0);
            left -= count;
            if left <= 0.0 {
                break;
            }
        }
        sum / self.sums_ns.iter().sum::<u64>().max(1) as f64
    }
}

/// How often a thread was at each place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Places {
    /// On a core, or ready for one.
    pub running: u64,
    /// At the queue of its tasks.
    pub tasks: u64,
    /// Reading a file of this machine.
    pub storage: u64,
    /// Reading a file of a network file system.
    pub network_storage: u64,
    /// At a socket.
    pub network: u64,
    /// At a pipe of another program.
    pub pipe: u64,
    /// At a lock of this process.
    pub lock: u64,
    /// Asleep, by its own wish.
    pub sleep: u64,
    /// Elsewhere in the kernel.
    pub other: u64,
    /// Asleep, where the kernel does not tell system calls.
    pub unknown: u64,
}

impl Places {
    /// Whether the kernel told the place for less than half of the samples.
    pub(crate) fn are_unknown(&self) -> bool {
        self.unknown > self.all()
    }

    /// The samples whose place is known.
    pub(crate) fn all(&self) -> u64 {
        self.running + self.tasks + self.busy_waits()
    }

    /// In the kernel, but not for want of tasks.
    fn busy_waits(&self) -> u64 {
        self.storage
            + self.network_storage
            + self.network
            + self.pipe
            + self.lock
            + self.sleep
            + self.other
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.running += other.running;
        self.tasks += other.tasks;
        self.storage += other.storage;
        self.network_storage += other.network_storage;
        self.network += other.network;
        self.pipe += other.pipe;
        self.lock += other.lock;
        self.sleep += other.sleep;
        self.other += other.other;
        self.unknown += other.unknown;
    }

    /// The part of the samples in which the thread had a task.
    pub(crate) fn busy(&self) -> f64 {
        (self.running + self.busy_waits()) as f64 / self.all().max(1) as f64
    }
}

/// A worker process, or all that had this number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Worker {
    /// The loader's number of the worker.
    pub number: u32,
    /// The process that had the number last.
    pub pid: u32,
    /// Steady time in which it was watched.
    pub watched_ns: u64,
    /// CPU time of all its threads.
    pub cpu_ns: u64,
    /// Time in which its first thread was ready without a core.
    pub delay_ns: u64,
    /// Bytes that devices read for it.
    pub device_bytes: u64,
    /// Bytes that it read by system calls, from files, sockets and pipes.
    pub read_bytes: u64,
    /// Bytes that it wrote by system calls, pipes among them.
    pub written_bytes: u64,
    pub places: Places,
}

impl Worker {
    /// The part of the time in which the worker had a task; if its places are not known, in which
    /// it computed or wanted to.
    pub(crate) fn busy(&self) -> f64 {
        if self.places.are_unknown() {
            let computing = self.cpu_ns.saturating_add(self.delay_ns) as f64;
            return (computing / self.watched_ns.max(1) as f64).min(1.0);
        }
        self.places.busy()
    }
}

/// Another thread of the loop's process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ThreadUse {
    /// The kernel's name of the thread, of at most 15 bytes.
    pub name: String,
    pub id: u32,
    pub cpu_ns: u64,
    pub delay_ns: u64,
    /// Its places while the loop waited.
    pub places: Places,
}

/// Python's lock, asked for while the loop waited for a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Interpreter {
    /// How often it was asked for.
    pub probes: u64,
    /// How often it took longer than 0.5 ms to get it.
    pub late: u64,
    pub waited_ns: u64,
}

/// The machine in the steady time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Machine {
    /// Cores that the process may use.
    pub cores: u32,
    /// The time over which the machine was watched.
    pub watched_ns: u64,
    /// Time that these cores were busy, for whatever program. `None` if the kernel does not tell.
    pub busy_ns: Option<u64>,
    /// CPU time of the loop's process.
    pub process_ns: u64,
    /// Bytes that devices read for the loop's process.
    pub device_bytes: u64,
    /// The tightest quota of CPU time, in cores.
    pub quota: Option<f64>,
    /// Time for which the quota withheld a core from ready threads, the mean over the cores.
    pub throttled_ns: u64,
    /// Largest memory of the process and its workers together that was seen, with shared memory
    /// counted for each.
    pub resident_bytes: u64,
    /// The part of `resident_bytes` in the loop's process.
    pub process_resident_bytes: u64,
}

/// The GPU between the loop's steps, by events on its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct GpuTime {
    pub steps: u64,
    /// Time from the first step's begin to the last one's end.
    pub span_ns: u64,
    /// Part of it in which the stream had no step.
    pub idle_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_hold_their_part_of_the_time() {
        let mut waits = Waits::default();
        for _ in 0..90 {
            waits.add(1_000_000);
        }
        for _ in 0..10 {
            waits.add(91_000_000);
        }
        assert!((waits.in_longest(0.1) - 0.91).abs() < 0.01, "{waits:?}");
        assert!((waits.in_longest(0.05) - 0.455).abs() < 0.01);
        assert!((waits.in_longest(1.0) - 1.0).abs() < 1e-9);
        assert_eq!(Waits::default().in_longest(0.1), 0.0);
    }
}
