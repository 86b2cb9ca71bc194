//! What the loader observed: counters that every stage writes without a lock, and the report made of them.
//!
//! Knows stages only as labels. Two clocks matter to the user: how long `next()` waited for a batch (the device had
//! nothing to do because of the loader), and how long the user's own code took between two calls.

mod clock;
mod load;
mod meter;
mod report;
#[cfg(test)]
mod simulator;
mod snapshot;
mod timeline;
mod verdict;
mod whatif;

pub use load::{Cause, StageLoad};
pub use report::{Bound, Copies, DirectReads, Report};

pub(crate) use meter::Counter;
pub use meter::Latency;
pub use snapshot::{Consumer, Copy, Decode, GpuIdle, Order, Slots, Snapshot, Storage};
pub use timeline::{BatchRecord, Gauges, Timeline};
pub use verdict::{Strength, Verdict};
pub use whatif::{Change, Prediction, WhatIf};

use crate::read::{ReadStats, Reader};
use std::sync::Mutex;

/// All counters of a loader.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    pub(crate) batches: Counter,
    pub(crate) samples: Counter,
    /// Bytes of the batches' fields.
    pub(crate) bytes: Counter,
    /// The consumer waited in `next()`.
    pub(crate) wait_ns: Counter,
    /// Of that, for the first batch of each iterator.
    pub(crate) first_wait_ns: Counter,
    /// Between two calls of `next()`: the user's own work.
    pub(crate) user_ns: Counter,
    /// Workers were looking up, decoding or transforming (sum over workers).
    pub(crate) decode_busy_ns: Counter,
    /// Chunks opened, and the samples in them.
    pub(crate) chunks: Counter,
    pub(crate) chunk_rows: Counter,
    pub(crate) device: DeviceMeters,
    reads: Mutex<ReadStats>,
}

/// What the way onto the device counted.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "no device counts here"))]
#[derive(Debug, Default)]
pub(crate) struct DeviceMeters {
    pub(crate) copies: Counter,
    pub(crate) bytes: Counter,
    pub(crate) pinned_slots: Counter,
    pub(crate) pageable_slots: Counter,
    /// Direct reads, their bytes, and rows that came by the host instead.
    pub(crate) reads: Counter,
    pub(crate) direct_bytes: Counter,
    pub(crate) host_rows: Counter,
    /// Why the first of these did.
    by_host: Mutex<Option<String>>,
    /// Why a slot could not be pinned.
    pageable: Mutex<Option<String>>,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "no device counts here"))]
impl DeviceMeters {
    /// A slot is copied from pageable memory, since it could not be pinned.
    pub(crate) fn note_pageable(&self, why: &crate::Error) {
        self.pageable_slots.add(1);
        let mut reason = self.pageable.lock().unwrap_or_else(|poison| poison.into_inner());
        reason.get_or_insert_with(|| why.message().to_string());
    }

    /// A direct read was not possible.
    pub(crate) fn note_by_host(&self, why: &str) {
        self.by_host.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert_with(|| why.to_string());
    }

    pub(crate) fn direct(&self, how: String) -> DirectReads {
        DirectReads {
            how,
            reads: self.reads.get(),
            bytes: self.direct_bytes.get(),
            host_rows: self.host_rows.get(),
            why_host: self.by_host.lock().unwrap_or_else(|poison| poison.into_inner()).clone(),
        }
    }

    pub(crate) fn copies(&self) -> Copies {
        Copies {
            batches: self.copies.get(),
            bytes: self.bytes.get(),
            pinned_slots: self.pinned_slots.get(),
            pageable_slots: self.pageable_slots.get(),
            why_pageable: self.pageable.lock().unwrap_or_else(|poison| poison.into_inner()).clone(),
        }
    }
}

impl Meters {
    /// Takes over what the reader counted. A lock per wake of the I/O thread, contended only while a report is made.
    pub(crate) fn note_reads(&self, reader: &dyn Reader) {
        *self.reads.lock().unwrap_or_else(|poison| poison.into_inner()) = reader.stats();
    }

    pub(crate) fn reads(&self) -> ReadStats {
        *self.reads.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}
