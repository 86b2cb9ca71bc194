//! The limits of a loop and the measurements behind them, as values.

use feedline_report::Unit;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The limit of a loop over another loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// The step takes the time; the loader keeps up.
    NotStarved,
    /// Too few workers: they compute, and cores are idle.
    Workers,
    /// The workers' own code: it uses all cores that there are.
    Transform,
    /// Reads of files on devices of this machine.
    Storage,
    /// Reads of files on a network file system.
    NetworkStorage,
    /// Sockets: object stores and other servers.
    Network,
    /// Workers wait for something else: locks, other programs, sleeps.
    Blocked,
    /// The start of workers at each epoch.
    WorkerStart,
    /// One worker, for which the others wait.
    SlowWorker,
    /// Batches that a few samples hold up now and then.
    Uneven,
    /// Pickled batches on their way from the workers.
    Pipe,
    /// Other Python threads of the loop's process, which hold the interpreter's lock.
    Gil,
    /// The cost of a batch, whatever is in it.
    SmallBatches,
    /// Copies from memory that is not pinned.
    Pinning,
    /// The quota of CPU time.
    CpuQuota,
    /// Other programs on the cores.
    OtherPrograms,
    /// Workers and the step, which together want more cores than there are.
    Cores,
    /// Not determined.
    Unknown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarved => "the step",
            Self::Workers => "too few workers",
            Self::Transform => "the work for each sample (decoding, transforms)",
            Self::Storage => "reads from storage",
            Self::NetworkStorage => "reads from a network file system",
            Self::Network => "the network",
            Self::Blocked => "waits in the loader's own code (locks, sleeps, other programs)",
            Self::WorkerStart => "the start of each epoch",
            Self::SlowWorker => "one slow worker",
            Self::Uneven => "a few slow batches",
            Self::Pipe => "large pickles between the workers and the loop",
            Self::Gil => "Python threads of this process, which hold the GIL",
            Self::SmallBatches => "the cost of each batch",
            Self::Pinning => "copies from memory that is not pinned",
            Self::CpuQuota => "the CPU quota of the container",
            Self::OtherPrograms => "other programs on the cores",
            Self::Cores => "too few cores for the workers and the step",
            Self::Unknown => "unknown",
        })
    }
}

/// The measured quantity of an [`Evidence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Measure {
    /// Time in which the loop waited for batches.
    Waited,
    /// Time in which the GPU had no step.
    GpuIdle,
    /// Time in which epochs started and ended.
    Starts,
    /// Time in which workers had a task.
    WorkersBusy,
    /// The same of the busiest worker.
    BusiestWorker,
    /// Working time on cores.
    Computing,
    /// Working time in reads of files.
    Reading,
    /// Working time at sockets.
    AtSockets,
    /// Working time in other waits.
    Blocked,
    /// Time in which workers were ready without a core.
    WithoutCore,
    /// Time in which the loop's thread was ready without a core.
    LoopWithoutCore,
    /// Cores that nobody used, on average.
    IdleCores,
    /// Cores that other programs used, on average.
    OtherPrograms,
    /// Time for which the quota withheld cores.
    QuotaUsedUp,
    /// Bytes that workers wrote to pipes, per batch.
    PickledBytes,
    /// CPU time of the loop's thread in its waits.
    LoopComputing,
    /// Requests of the interpreter's lock that were late.
    LateLock,
    /// Bytes from devices, per second.
    DeviceBytes,
    /// The longest tenth of the waits, as a part of the waiting time.
    LongestWaits,
}

/// A measurement behind a diagnosis. `Display` is the sentence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Evidence {
    /// The quantity.
    pub measure: Measure,
    /// Its amount.
    pub value: f64,
    /// The unit of the amount.
    pub unit: Unit,
    /// The sentence.
    pub text: String,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
