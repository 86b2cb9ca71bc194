//! What happened to each of the last batches, and how full the queues were: what traces and plots are drawn from. Pure data.

use serde::{Deserialize, Serialize};

/// The way of one batch; nanoseconds since the loader was built, 0 for what did not happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BatchRecord {
    /// Its number since the loader was built.
    pub sequence: u64,
    /// Epoch.
    pub epoch: u64,
    /// Batch index in the epoch.
    pub batch: u64,
    /// Rows.
    pub rows: u32,
    /// It got its slot, and its reads could begin.
    pub planned_ns: u64,
    /// The last of its reads was there; 0 when nothing was read.
    pub read_ns: u64,
    /// Its last row was done.
    pub full_ns: u64,
    /// Its copy was given to the device; 0 on the host.
    pub copied_ns: u64,
    /// The consumer asked for it.
    pub asked_ns: u64,
    /// The consumer got it.
    pub got_ns: u64,
    /// The consumer dropped it; 0 while it is held.
    pub dropped_ns: u64,
}

/// How full everything was at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gauges {
    /// Nanoseconds since the loader was built.
    pub at_ns: u64,
    /// Reads in flight.
    pub in_flight: u32,
    /// Pieces of work that wait for a worker.
    pub queued: u32,
    /// Workers that work.
    pub working: u32,
    /// Slots that are free.
    pub free_slots: u32,
    /// Slots that are being filled.
    pub filling_slots: u32,
    /// Slots that are full and wait for their turn.
    pub full_slots: u32,
    /// Batches in the consumer's hands.
    pub held: u32,
}

/// The last batches and moments, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Timeline {
    /// Batches that were handed out.
    pub batches: Vec<BatchRecord>,
    /// Moments, one for each batch at most.
    pub gauges: Vec<Gauges>,
    /// Batches that were forgotten to make room.
    pub forgotten: u64,
}
