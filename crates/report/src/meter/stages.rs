//! The meters of each stage, and the states of its threads. Each group fills its part of a
//! [`Snapshot`](super::Snapshot).

use super::reads::{DirectReads, ReadStats};
use super::snapshot::{Chunks, Consumer, CopyStage, DecodeStage, StorageStage};
use feedline_base::meter::counters::{
    Area, Counter, Flow, Histogram, Lone, Numbered, Pool, States,
};
use feedline_base::sync::Hold;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// A stage of the pipeline, from the order to the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PipelineStage {
    /// The planner's thread: it chooses samples, finds their extents and submits reads.
    Order,
    /// Reads from storage.
    Storage,
    /// Decode workers: decoding, transforms, copies from memory and the page cache.
    Decode,
    /// Copies to the device, and the operations on the copied batches.
    Copy,
    /// The consumer's own work.
    Consumer,
}

impl PipelineStage {
    /// All stages, from the consumer upstream.
    pub(crate) const UPSTREAM: [Self; 5] = [
        Self::Consumer,
        Self::Copy,
        Self::Decode,
        Self::Storage,
        Self::Order,
    ];
}

impl fmt::Display for PipelineStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Order => "order/index",
            Self::Storage => "storage",
            Self::Decode => "decode",
            Self::Copy => "copies to the device",
            Self::Consumer => "the consumer",
        })
    }
}

/// State of the planner's thread.
#[derive(Debug, Default)]
pub enum Planning {
    #[default]
    Waiting,
    Busy,
    /// Waiting for a slot, with more batches to plan.
    NoSlot,
}

/// State of the consumer.
#[derive(Debug, Default)]
pub enum Consuming {
    /// The consumer does its own work, or waits for the first batch of an iterator.
    #[default]
    Own,
    Waiting,
}

/// State of the transfer thread and the copy stream.
#[derive(Debug, Default)]
pub enum Copying {
    #[default]
    Starved,
    Busy,
    /// A full slot waits for device memory, or the oldest copy waits for the consumer's streams.
    Blocked,
}

macro_rules! numbered {
    ($($state:ty),*) => {
        $(impl Numbered for $state {
            fn number(self) -> usize {
                self as usize
            }
        })*
    };
}

numbered!(Planning, Consuming, Copying);

/// CPU time and run delay of a stage's threads.
pub(super) type CpuTimes = (Option<u64>, Option<u64>);

/// The meters of the consumer. Only the one live iterator writes them.
#[derive(Debug, Default)]
pub struct ConsumerMeters {
    pub batches: Counter,
    pub samples: Counter,
    /// Bytes of the batches' fields.
    pub bytes: Counter,
    /// Whether the consumer waits in `next()` for a batch other than the first of an iterator.
    pub states: States<Consuming, 2>,
    /// Waits for the first batch of each iterator.
    pub first_ns: Counter,
    /// Time between two calls of `next()`: the user's own work.
    pub user_ns: Counter,
    /// Waits that were not for a first batch.
    pub waits: Histogram,
}

impl ConsumerMeters {
    pub(super) fn read(&self, now: u64, (cpu_ns, delay_ns): CpuTimes) -> Consumer {
        let [waited_ns] = self.states.read([Consuming::Waiting], now);
        Consumer {
            batches: self.batches.get(),
            samples: self.samples.get(),
            bytes: self.bytes.get(),
            waited_ns,
            first_ns: self.first_ns.get(),
            user_ns: self.user_ns.get(),
            waits: self.waits.read(),
            cpu_ns,
            delay_ns,
            ..Consumer::default()
        }
    }
}

#[derive(Debug, Default)]
pub struct StorageMeters {
    /// Reads in flight.
    pub reading: Flow,
    /// The time of the consumer's last batch, and the integral of the number of reads in flight
    /// until then.
    moment: [AtomicU64; 2],
    /// Whether rows wait for room for their bytes.
    pub no_room: States<bool, 2>,
    /// Rows that were finished by reads, without a worker.
    pub in_place: Lone<Counter>,
    pub latency: Histogram,
    /// Bytes that workers copied from the page cache.
    pub cached_bytes: Lone<Counter>,
    /// The reader's counts, stored on each iteration of the planner's loop.
    pub(super) stats: Lone<Mutex<ReadStats>>,
}

impl StorageMeters {
    pub(super) fn read(&self, now: u64) -> StorageStage {
        let [blocked_ns] = self.no_room.read([true], now);
        let [in_flight_ns, busy_ns] = self.reading.read(now);
        let mut counts = *self.stats.hold();
        counts.bytes_moved = counts.bytes_moved.max(counts.bytes_asked);
        StorageStage {
            busy_ns,
            blocked_ns,
            in_flight_ns,
            counts,
            direct_bytes: (counts.bytes_moved as f64 * counts.direct_share()) as u64,
            cached_bytes: self.cached_bytes.get(),
            in_place: self.in_place.get(),
            latency: self.latency.read(),
            ..StorageStage::default()
        }
    }

    /// Mean reads in flight since the last call; one thread calls this. The momentary number would
    /// often be 0, because the loader hands out a batch just after its last read.
    pub(super) fn mean_in_flight(&self, now: u64) -> u32 {
        let [total, _] = self.reading.read(now);
        let [at, before] = self
            .moment
            .each_ref()
            .map(|number| number.load(Ordering::Relaxed));
        for (place, value) in self.moment.iter().zip([now, total]) {
            place.store(value, Ordering::Relaxed);
        }
        let ns = now.saturating_sub(at).max(1);
        (total.saturating_sub(before).saturating_add(ns / 2) / ns).min(u32::MAX.into()) as u32
    }
}

#[derive(Debug, Default)]
pub struct DecodeMeters {
    pub(crate) pool: Pool,
    /// Number of work items in the workers' queues.
    pub queued: Area,
    pub latency: Histogram,
    /// Time of workers in `map_batch`.
    pub map_batch_ns: Counter,
    /// Rows given to workers.
    pub samples: Lone<Counter>,
    /// Chunks opened, and the samples in them.
    pub chunks: Counter,
    pub chunk_rows: Counter,
}

impl DecodeMeters {
    /// `chunks`: the number of chunks, for datasets in chunks.
    pub(super) fn read(
        &self,
        now: u64,
        (cpu_ns, delay_ns): CpuTimes,
        chunks: Option<u64>,
    ) -> DecodeStage {
        let (busy_ns, starved_ns, ahead_ns) = self.pool.read(now);
        DecodeStage {
            busy_ns,
            map_batch_ns: self.map_batch_ns.get(),
            cpu_ns,
            delay_ns,
            starved_ns,
            ahead_ns,
            queued_ns: self.queued.total_ns(now),
            samples: self.samples.get(),
            chunks: chunks.map(|count| Chunks {
                opened: self.chunks.get(),
                samples: self.chunk_rows.get(),
                count,
            }),
            latency: self.latency.read(),
            ..DecodeStage::default()
        }
    }
}

/// Meters of the copies to the device.
#[derive(Debug, Default)]
pub struct CopyMeters {
    pub states: States<Copying, 3>,
    /// Time with copies on the bus, by the device's clock. `latency` has the duration of each copy.
    pub bus_ns: Counter,
    /// Time of the operations on batches, by the same clock.
    pub ops_ns: Counter,
    pub latency: Histogram,
    pub batches: Counter,
    pub bytes: Counter,
    pub pinned_slots: Counter,
    pub(crate) pageable_slots: Counter,
    /// The reason why a slot could not be pinned.
    pageable: Mutex<Option<String>>,
    pub direct: DirectMeters,
}

/// Direct reads, their bytes, and rows that came through the host instead.
#[derive(Debug, Default)]
pub struct DirectMeters {
    pub reads: Counter,
    pub bytes: Counter,
    pub host_rows: Counter,
    /// The reason for the first of these rows.
    by_host: Mutex<Option<String>>,
}

impl CopyMeters {
    pub(super) fn read(&self, now: u64, (cpu_ns, delay_ns): CpuTimes) -> CopyStage {
        let [starved_ns, blocked_ns] = self.states.read([Copying::Starved, Copying::Blocked], now);
        CopyStage {
            busy_ns: self.bus_ns.get(),
            ops_ns: self.ops_ns.get(),
            starved_ns,
            blocked_ns,
            cpu_ns,
            delay_ns,
            batches: self.batches.get(),
            bytes: self.bytes.get(),
            pinned_slots: self.pinned_slots.get(),
            pageable_slots: self.pageable_slots.get(),
            why_pageable: self.pageable.hold().clone(),
            latency: self.latency.read(),
            ..CopyStage::default()
        }
    }

    /// Notes a slot that is copied from pageable memory because it could not be pinned.
    pub fn note_pageable(&self, why: &feedline_base::error::Error) {
        self.pageable_slots.add(1);
        self.pageable
            .hold()
            .get_or_insert_with(|| why.message().to_string());
    }
}

impl DirectMeters {
    /// Notes the reason why a direct read was not possible.
    pub fn note_by_host(&self, why: &str) {
        self.by_host.hold().get_or_insert_with(|| why.to_string());
    }

    pub fn read(&self, how: String) -> DirectReads {
        DirectReads {
            how,
            reads: self.reads.get(),
            bytes: self.bytes.get(),
            host_rows: self.host_rows.get(),
            why_host: self.by_host.hold().clone(),
        }
    }
}
