//! The pipeline: from an order to full slots, in bounded memory, without a thread that waits for another's permit.
//!
//! ```text
//!                  ┌────────────── planner (the I/O thread) ───────────────┐
//!  starts, free ──►│ epochs ─► batch i, slot ─► rows ─┬─► reads ─► Reader   │
//!  slots           │                    ▲             │      │              │
//!                  └────────────────────┼─────────────┼──────┼──────────────┘
//!                    misses, permits    │ rows to     │      │ rows whose
//!                    ── exchange ───────┴── look up ──┼──────┼── bytes came ──
//!                  ┌────────────────────┴─────────────▼──────▼──────────────┐
//!                  │ workers (private rayon pool): ask, fetch, fill a row;  │
//!                  │ gather rows from open chunks; find substitutes         │
//!                  └───────────────────────────┬────────────────────────────┘
//!                       last row of a slot ────▼──► ready ─► Epoch::next (restores the order) ─► Batch
//! ```
//!
//! With a GPU the [`transfer`] thread stands between the last row and `ready`: it restores the order and copies.
//!
//! # The way of a row
//!
//! | what happens | where |
//! |---|---|
//! | the iterator asks for epochs | [`exchange::Start`] |
//! | a free slot becomes batch *i*, its rows a [`task::Run`] | [`planner`] |
//! | the page cache is likely to have them, or they lie in memory: a worker asks, fetches and fills | [`rows`] |
//! | else, or where that missed: permit, sample asked for, bytes of the ring, reads: a [`fetch::Fetch`] | [`reads`] |
//! | all its bytes are there: filled by a worker, or at once where that is a small copy | [`rows`], [`reads`] |
//! | for datasets in chunks instead: chunks are opened ahead of the batches, rows gathered from open ones | [`chunks`], [`gather`] |
//! | the sample cannot be had: tried again, another one, or the error of the batch | [`rows`], [`substitute`] |
//! | the last row of the slot is done | [`Exchange`] |
//!
//! A row is filled by one function, [`sample::Samples::fill`], whatever brought the bytes; rows that are copied as they stand take a
//! fast path, many at a time. Planner, workers and substitutes know samples and tasks. They meet in the [`exchange`] alone.
//!
//! Where the cache is thought to be cold, one run of rows per batch asks it all the same, so that it is noticed when it warms.
//!
//! # Why it cannot deadlock
//!
//! Permits are slots, bytes of the ring, buffers of chunks, and samples in flight. All are taken by the I/O thread alone,
//! slots in batch order. A row takes a permit for its sample, a chunk its buffer, and then all its ring bytes at once; one of
//! them at a time waits for those, and nobody else takes any meanwhile. From then on it needs nothing but the storage device
//! and a worker. So every holder of ring bytes finishes without waiting for anybody, room comes back, and by induction over the
//! batches the oldest unfinished one always can finish. Workers take no permits and wait for nobody: what they cannot do at once goes to a queue whose
//! room is bounded by the permits. (When a read has failed, or a sample cannot be had, a worker reads itself, and then waits for
//! storage, which waits for nobody.) The consumer waits for the oldest batch only; when it holds every slot itself, `next()`
//! says so after a deadline.
//!
//! # Memory
//!
//! [`plan::MemoryPlan`] is the sum, a line and a reason for each term; `build()` reserves it. Several loaders may share a
//! [`Budget`](crate::Budget). What travels with a row in flight is part of its permit. A row that the page cache did not have
//! carries nothing: as many may wait as the slots have rows.
//!
//! # Faults
//!
//! A read that failed for a reason that may pass is tried again, a sample that cannot be had is replaced or ends the iterator:
//! [`substitute`]. Who waits for a batch can say what does not answer: [`watchdog`].
//!
//! # Ending
//!
//! Dropping an epoch marks its job cancelled: rows not yet begun are dropped (which brings their slot back), reads in
//! flight complete into memory that nobody looks at. Dropping the loader ends the I/O thread after its last completion
//! and joins the workers; what does not answer within the deadline is left behind with all the memory it can reach,
//! and counted.
//!
//! Owners: the [`runtime`] holds the [`Core`] and the workers, workers and planner hold the core, slots hold the exchange. So
//! nothing that lies in the core's queues keeps it alive; what lies in the channels of the exchange is taken out at the end.

pub(crate) mod chunks;
pub(crate) mod direct;
pub(crate) mod drains;
pub(crate) mod exchange;
pub(crate) mod fetch;
mod gather;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod placement;
pub(crate) mod plan;
pub(crate) mod planner;
pub(crate) mod queue;
mod reads;
pub(crate) mod recipe;
pub(crate) mod route;
mod rows;
pub(crate) mod runtime;
pub(crate) mod sample;
pub(crate) mod substitute;
pub(crate) mod task;
pub(crate) mod transfer;
pub(crate) mod watchdog;
mod worker;
pub(crate) mod workers;

pub(crate) use exchange::{Exchange, Start, ToDevice, ToIo};
pub use placement::Numa;
pub use plan::MemoryPlan;
pub use route::{FieldRoute, Gds, Route};
pub use substitute::OnBadSample;
pub(crate) use task::Job;

use crate::error::{Error, ErrorKind, Result, Stage};
use crate::meter::Meters;
use crate::report::spans;
use crate::storage::{Again, Extent, PageCache};
use crate::sync::Hold;
use std::sync::{Arc, Mutex, OnceLock};

/// What the threads of a loader share.
pub(crate) struct Core {
    pub(crate) samples: sample::Samples,
    pub(crate) cache: Option<Arc<PageCache>>,
    /// Reads what failed once more.
    pub(crate) again: Again,
    pub(crate) to_io: ToIo,
    pub(crate) to_workers: exchange::ToWorkers,
    pub(crate) exchange: Arc<Exchange>,
    /// The error of the loader as a whole: set once, ends every iterator.
    pub(crate) fatal: Mutex<Option<Option<Error>>>,
    pub(crate) meters: Arc<Meters>,
    /// Who is at work on what.
    pub(crate) watch: Arc<watchdog::Watch>,
    /// Why io_uring reads into memory that is not registered, if so.
    pub(crate) unregistered: OnceLock<String>,
    #[cfg(test)]
    pub(crate) dozing: transfer::Dozing,
}

impl Core {
    /// Notes an error that no batch can carry. The iterator finds it when it waits.
    pub(crate) fn fail(&self, error: Error) {
        self.fatal.hold().get_or_insert(Some(error));
    }

    /// The error of the loader as a whole, if there is one; in full for the first who asks.
    pub(crate) fn trouble(&self) -> Option<Error> {
        let error = self.fatal.hold().as_mut()?.take();
        Some(error.unwrap_or_else(|| Error::new(ErrorKind::Cancelled, Stage::Batch, "the loader failed before")))
    }

    /// Reads the extent that failed with `error` once more.
    fn read_again(&self, error: &Error, extent: &Extent, buf: &mut [u8]) -> Result<()> {
        self.again.read_after(error, extent, buf)?;
        spans::fault(error, spans::Outcome::Recovered);
        Ok(())
    }
}
