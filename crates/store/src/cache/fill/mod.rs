//! Fills a cache: the queue of blocks, the reads that wait for them, and the threads that download.
//!
//! ```text
//! route ─┬─ first read of an object ────────────────► waits ──► a thread looks the object up ──► route again
//!        ├─ missing block, and most of it is wanted ► waits ──► download ──► completed from memory ──► kept
//!        ├─ the same, but all threads download ──────► network; what it brings ─────────────────────► kept
//!        ├─ missing block, and little of it is wanted ► network; the same
//!        └─ the same, and ranges are small ──────────► network; the block is downloaded when no read waits
//! ```
//!
//! In a sequential order, threads download ahead of the reads: as many blocks of an object as there
//! are threads. If the order visits the data block by block, the planner [announces](Announcer) the blocks of the next
//! window.
//!
//! So each byte is downloaded once: as a piece of a range, or with its block. Ranges of less than
//! `pieces::SMALL` bytes on average would take longer than their blocks. With such ranges, each
//! byte may be downloaded twice.
//!
//! Limits: a thread holds one block in memory; pieces that are received but not yet written take at
//! most the bytes of `handle::PIECES` blocks together, or of one block under a memory limit. A read
//! waits at most 4 × [`PATIENCE`](super::config::PATIENCE) for disks and other processes; then it
//! goes to the network.

mod handle;
mod pieces;
pub mod queue;
mod route;
mod state;
mod threads;

pub use handle::{Announcer, Fill, FillSetup};
pub(super) use queue::BlockId;
pub use route::CacheAnswer;
