//! A cache of objects, and of files on network mounts, on local disks. The processes of a machine
//! share it.
//!
//! ```text
//! read of an object ──► route ─┬─ all blocks are here ─► reader of files (page cache, io_uring, O_DIRECT)
//!                              ├─ dense order, or most of a block ─► waits ─┐
//!                              ├─ else ─► network, at once ─► piece ────────┤ queue
//!                              └─ the same, small ranges ─────► block ──────┤
//!                                                                           ▼
//!             feedline-fill threads: claim ─► room ─► download a block ─► waiting reads ─► write, sync ─► record
//!                                    piece ─► room ─► write, mark ─► all of a block is here? ─► sync ─► record
//! ```
//!
//! Where to start reading: `dir` (folders, names, room), `entry` (the two files of an object),
//! `blocks` (those that this process knows), `upstream` (object or file that blocks come from),
//! `fill` (queue and threads), `tools` and `warm` (for tools), `units` (pieces of blocks),
//! `rights`. `storage::router` calls [`Fill::route`]. All of these modules treat a file on a
//! network mount as an object, and the mount as the network.
//!
//! ```text
//! DIR/v1/used                 bytes of all files, under a lock
//! DIR/v1/booked/PID.TIME.N    bytes on their way to the disk, locked by the loader that brings them
//! DIR/v1/in-use/00 … 3f       shared locks of the processes that read this share of the folders
//! DIR/v1/objects/2a/HASH      link to the file: a name for one URL, version, length and block size
//! DIR/v1/objects/2a/HASH.INC      the bytes at the object's own offsets, with holes for missing blocks
//! DIR/v1/objects/2a/HASH.INC.map  URL and version, then a record of 32 bytes for each block that is whole
//! DIR/v1/objects/2a/HASH.INC.units  which units of 4 KiB of other blocks are here, until the next boot
//! ```
//!
//! Limits: [`BLOCK`](config::BLOCK) bytes per download and thread; one download per block and
//! machine, as a rule; [`FREE`](config::FREE) of the file system stays free, at most
//! [`FREE_BLOCKS`](config::FREE_BLOCKS).
//!
//! Invariants:
//! * A file's name is never reused, and blocks are only added to it. So a reader may close and
//!   reopen it at any time.
//! * All reads of a loader return one version: the listed version of an object, or a file's version
//!   at its first read.
//! * A record is written after the block's bytes are synced. A record of an earlier boot or of
//!   another inode, or one that a verification refused, is trusted only after the block was
//!   compared with its checksum.
//! * A failing, full, slow or read-only disk never fails a read: the read goes to the network, and
//!   is counted.
//! * No read waits for a lock, a lookup or another process for longer than 4 ×
//!   [`PATIENCE`](config::PATIENCE).
//! * Only files with such a name and header are removed, and only from folders that no process
//!   reads.

pub mod blocks;
pub mod config;
pub mod dir;
pub mod entry;
pub mod fill;
pub mod rights;
pub mod tools;
pub mod units;
pub mod upstream;
pub mod warm;

pub use blocks::CachedBlocks;
pub use config::Cache;
pub use fill::{Announcer, CacheAnswer, Fill, FillSetup};
pub use tools::CacheEntry;
pub use warm::CacheWarmed;
