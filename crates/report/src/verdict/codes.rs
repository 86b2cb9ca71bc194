//! Advice and evidence as values: codes, settings, amounts with units. The sentences with them are
//! for people.

use crate::Prediction;
use feedline_base::setting::Setting;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fmt::{Debug, Display};

/// A change that raises the rate, or may. `Display` is the sentence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Advice {
    /// The kind of change.
    pub remedy: Remedy,
    /// The setting to change, by its name in this program: in Rust, in Python or on the command
    /// line.
    pub setting: Option<String>,
    /// The setting's new value. `None` if the value depends on the machine or the data; the text
    /// then says in which direction to change it.
    pub value: Option<Value>,
    /// The predicted effect, if there is a model of it.
    pub prediction: Option<Prediction>,
    /// The sentence.
    pub text: String,
}

/// The value of a setting: in JSON a number or a string.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// A number.
    Count(u64),
    /// The name of a choice.
    Name(String),
}

/// The kind of an [`Advice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Remedy {
    /// Another number of decode workers.
    Workers,
    /// More batch slots.
    Slots,
    /// More reads in flight.
    Depth,
    /// Another reader.
    Reader,
    /// More batches in device memory.
    DeviceBatches,
    /// More host memory for the loader.
    MemoryBudget,
    /// Larger batches.
    BatchSize,
    /// Tell the loader on which stream the steps run.
    Stream,
    /// Reading ahead across the ends of epochs.
    Epochs,
    /// A local cache of the store's objects, or a larger one.
    Cache,
    /// Storage with more throughput, or memory for the page cache.
    Storage,
    /// Reads through the page cache.
    PageCache,
    /// A check of storage whose reads fail or are short.
    Repeated,
    /// Fewer requests at a time, or a higher quota of the store.
    Throttled,
    /// Small files packed into shards.
    Pack,
    /// Less work for each sample in decoders, transforms or `map_batch`.
    LessWork,
    /// Fewer bytes for each sample.
    FewerBytes,
    /// More cores.
    Cores,
    /// No other programs on the cores.
    OtherPrograms,
    /// Fewer threads of other libraries in this process.
    OwnThreads,
    /// A higher CPU quota.
    CpuQuota,
    /// A faster consumer; the loader keeps up.
    Consumer,
    /// Batches dropped earlier.
    DropBatches,
    /// Less work in operations on the device.
    DeviceOps,
    /// Pinned memory on the node of the device.
    Pinned,
    /// A cheaper sampler.
    Sampler,
}

/// A measurement behind a verdict. `Display` is the sentence, which may contain more measurements.
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

/// The quantity of an [`Evidence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Measure {
    /// Time in which the consumer (on a GPU, its stream) waited for batches.
    Starved,
    /// Time in which the consumer's thread waited, if its stream was not measured.
    HostWaits,
    /// The sustainable rate.
    SustainedRate,
    /// Time in first batches of epochs.
    FirstBatches,
    /// Time with copies on the bus.
    CopiesOnBus,
    /// Time in which the workers worked.
    WorkersBusy,
    /// Time in which the workers ran `map_batch`.
    MapBatch,
    /// Scheduler periods in which the process used up its CPU quota.
    QuotaUsedUp,
    /// Decode workers of the ranks of this machine, if they are more than its cores.
    LocalWorkers,
    /// Time in which the loader's threads were ready but had no core.
    WithoutCore,
    /// Workers on a core, of those that could run.
    OnCore,
    /// Working time in which the workers waited for something other than a core.
    WorkBlocked,
    /// Time with reads in flight.
    ReadsInFlight,
    /// Bytes from the page cache, if nothing was read.
    CachedBytes,
    /// Requests to object stores in flight, on average.
    RequestsInFlight,
    /// Reads that the local cache served.
    LocalCacheHits,
    /// Time in which the planner had no free slot.
    NoSlot,
    /// Time in which the planner computed.
    PlannerBusy,
}

/// The unit of an [`Evidence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Unit {
    /// A share between 0 and 1.
    Share,
    /// Samples per second.
    SamplesPerS,
    /// Bytes.
    Bytes,
    /// A number, on average.
    Count,
}

impl Advice {
    pub(super) fn new(remedy: Remedy, text: impl Into<String>) -> Self {
        Self {
            remedy,
            setting: None,
            value: None,
            prediction: None,
            text: text.into(),
        }
    }

    /// Advice to give the setting this value; `None` if there is no such setting.
    pub(super) fn set(
        remedy: Remedy,
        setting: Setting,
        value: impl Debug,
        rest: impl Display,
    ) -> Option<Self> {
        let with = setting.there()?.with(&value);
        Some(Self::new(remedy, format!("{with}{rest}")).valued(setting, value))
    }

    /// Adds the name of the setting that the sentence is about.
    pub(super) fn about(self, setting: Setting) -> Self {
        let name = setting
            .there()
            .map(|setting| setting.to_string().trim_matches('`').to_string());
        Self {
            setting: name,
            ..self
        }
    }

    /// Adds the setting and its new value.
    pub(super) fn valued(self, setting: Setting, value: impl Debug) -> Self {
        let value = format!("{value:?}").to_lowercase();
        let value = value.parse().map_or(Value::Name(value), Value::Count);
        Self {
            value: Some(value),
            ..self.about(setting)
        }
    }

    pub(super) fn predicting(self, then: &Prediction) -> Self {
        Self {
            prediction: Some(then.clone()),
            ..self
        }
    }
}

impl Evidence {
    pub(super) fn new(measure: Measure, value: f64, unit: Unit, text: impl Into<String>) -> Self {
        Self {
            measure,
            value,
            unit,
            text: text.into(),
        }
    }

    /// A part of the time, or of something else.
    pub(super) fn share(measure: Measure, value: f64, text: impl Into<String>) -> Self {
        Self::new(measure, value.clamp(0.0, 1.0), Unit::Share, text)
    }
}

impl Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
