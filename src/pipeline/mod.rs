//! The pipeline: from an order to full slots, in bounded memory and without deadlock.
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
//! With a GPU, the [`transfer`] thread works between the last row and `ready`. It restores the
//! order and copies.
//!
//! # Stages of a row
//!
//! | stage | where |
//! |---|---|
//! | the iterator starts epochs | [`exchange::Start`] |
//! | a free slot becomes batch *i*; its rows become a [`task::RowRun`] | [`planner`] |
//! | hit: in memory or likely in the page cache; a worker asks, fetches and fills | [`rows`] |
//! | miss: permit, dataset asked, ring bytes reserved, reads submitted: a [`fetch::Fetch`] | [`reads`] |
//! | all bytes are in memory: a worker fills the row; the I/O thread does so if the copy is small | [`rows`], [`reads`] |
//! | chunked datasets: chunks open ahead of the batches; rows are gathered from open chunks | [`chunks`], [`gather`] |
//! | the sample failed: retry, substitute, or error of the batch | [`rows`], [`substitute`] |
//! | the last row of the slot is done | [`Exchange`] |
//!
//! One function fills a row, [`sample::Samples::fill`], for every source of bytes. Rows that are
//! copied unchanged take a fast path, many at a time. Planner, workers and substitutes use samples
//! and tasks. They communicate only through the [`exchange`].
//!
//! While the page cache counts as cold, about one row in 16 is still looked up in it. So the
//! planner notices when the cache becomes warm.
//!
//! # Why it cannot deadlock
//!
//! Permits are slots, ring bytes, chunk buffers and samples in flight. Only the I/O thread takes
//! permits, and it takes slots in batch order. A row first takes the permit of its sample, a chunk
//! its buffer. Then each takes all its ring bytes at once. Only one row or chunk at a time waits
//! for ring bytes, and nothing overtakes it. Once it has the bytes, it needs only the storage
//! device and a worker. So every holder of ring bytes finishes without waiting for another holder,
//! and ring bytes become free. By induction over the batches, the oldest unfinished batch can
//! always finish.
//!
//! Workers take no permits and wait for no thread. Work that a worker cannot do at once goes to a
//! queue, and the permits bound the length of that queue. After a failed read, or for a substitute,
//! the worker itself performs the read. Then it waits for storage, and storage waits for no thread.
//! The consumer waits only for the oldest batch. If the consumer holds every slot itself, `next()`
//! reports that after a deadline.
//!
//! # Memory
//!
//! [`MemoryPlan`](crate::memory::MemoryPlan) lists every term with its reason, and the sum; `build()`
//! reserves the sum. Several loaders may share a [`Budget`](crate::memory::Budget). The permit of a row in
//! flight covers all memory that travels with the row. A row that missed the page cache carries no
//! memory, so all rows of all slots may wait as misses.
//!
//! # Faults
//!
//! A transient read error is retried. A failed sample is replaced, or ends the iterator:
//! [`substitute`]. A thread that waits for a batch can name the stalled operation: [`watchdog`].
//!
//! # Ending
//!
//! Dropping an epoch cancels its job. Rows that have not begun are dropped, which returns their
//! slot. Reads in flight complete into memory that is then ignored. Dropping the loader ends the
//! I/O thread after its last completion, and joins the workers. A thread that misses the deadline
//! is abandoned with all memory it can reach, and counted.
//!
//! Ownership: the [`runtime`] holds the [`Core`] and the workers; workers and planner hold the
//! core; slots hold the exchange. So an item in a queue of the core does not keep the core alive.
//! Items in the channels of the exchange are removed at the end.

pub(crate) mod chunks;
pub(crate) mod direct;
pub(crate) mod drains;
pub(crate) mod exchange;
pub(crate) mod fetch;
mod gather;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod placement;
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
pub use route::{FieldRoute, Gds, Route};
pub use substitute::OnBadSample;
pub(crate) use task::EpochJob;

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use feedline_core::storage::Extent;
use feedline_reader::{Again, PageCache};
use feedline_report::meter::Meters;
use feedline_report::spans;
use feedline_store::Announcer;
use std::sync::{Arc, Mutex, OnceLock};

/// State shared by a loader's threads.
pub(crate) struct Core {
    pub(crate) samples: sample::Samples,
    pub(crate) cache: Option<Arc<PageCache>>,
    /// Tells the block cache which reads come next, if the order visits the data block by block.
    pub(crate) announcer: Option<Announcer>,
    /// Retries failed reads.
    pub(crate) again: Again,
    pub(crate) to_io: ToIo,
    pub(crate) to_workers: exchange::ToWorkers,
    pub(crate) exchange: Arc<Exchange>,
    /// The error of the whole loader. It is set once and ends every iterator.
    pub(crate) fatal: Mutex<Option<Option<Error>>>,
    pub(crate) meters: Arc<Meters>,
    /// What each thread is doing.
    pub(crate) watch: Arc<watchdog::Watch>,
    /// Why io_uring reads into unregistered memory, if it does.
    pub(crate) unregistered: OnceLock<String>,
    #[cfg(test)]
    pub(crate) dozing: transfer::Dozing,
}

impl Core {
    /// Records an error that no batch can carry. The iterator finds it when it waits.
    pub(crate) fn fail(&self, error: Error) {
        self.fatal.hold().get_or_insert(Some(error));
    }

    /// The error of the whole loader, if any. Only the first caller gets it in full.
    pub(crate) fn trouble(&self) -> Option<Error> {
        let error = self.fatal.hold().as_mut()?.take();
        Some(error.unwrap_or_else(|| {
            Error::new(
                ErrorKind::Cancelled,
                Stage::Batch,
                "the loader failed before",
            )
        }))
    }

    /// Retries the read of `extent` that failed with `error`.
    fn read_again(&self, error: &Error, extent: &Extent, buf: &mut [u8]) -> Result<()> {
        self.again.read_after(error, extent, buf)?;
        spans::fault(error, spans::Outcome::Recovered);
        Ok(())
    }
}
