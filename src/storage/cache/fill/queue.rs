//! What a cache has to do: blocks, pieces and syncs, and the reads that wait for a block.

use crate::storage::{ReadOp, SourceId};
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// A block of a source, or [`LOOKUP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::storage::cache) struct BlockId {
    pub(in crate::storage::cache) source: SourceId,
    pub(in crate::storage::cache) block: u64,
}

/// In place of a block: find or make the object's files, or compare the file on the mount.
pub(super) const LOOKUP: u64 = u64::MAX;

/// Bytes from an offset on, that a read has brought.
pub(super) struct Piece {
    pub(super) source: SourceId,
    pub(super) offset: u64,
    pub(super) bytes: Vec<u8>,
}

/// What a thread does next.
pub(super) enum FillTask {
    /// A lookup or a block.
    Block(BlockId),
    Piece(Piece),
    /// The pieces of a source are written, and wait for the disk.
    Sync(SourceId),
}

#[derive(Default)]
pub(super) struct FillQueue {
    /// For objects that were not looked up yet. One thread does nothing else, so that no download delays them.
    pub(super) lookups: VecDeque<BlockId>,
    pub(super) urgent: VecDeque<BlockId>,
    /// What reads brought.
    pub(super) pieces: VecDeque<Piece>,
    /// Sources whose files are to be synced.
    pub(super) syncs: VecDeque<SourceId>,
    pub(super) later: VecDeque<BlockId>,
    pub(super) waiting: HashMap<BlockId, Waiting>,
    /// Blocks of threads, and whether they download now. Reads join them.
    pub(super) running: HashMap<BlockId, bool>,
    /// Blocks that another process claims, and does not bring: since when no read waits for them.
    pub(super) held: HashMap<BlockId, Instant>,
}

pub(super) struct Waiting {
    pub(super) ops: Vec<ReadOp>,
    /// Since when a disk or another process is waited for. A download has limits of its own.
    pub(super) since: Option<Instant>,
}

impl FillQueue {
    pub(super) fn next(&mut self) -> Option<FillTask> {
        let urgent = self.urgent.pop_front().map(FillTask::Block);
        urgent
            .or_else(|| self.syncs.pop_front().map(FillTask::Sync))
            .or_else(|| self.pieces.pop_front().map(FillTask::Piece))
            .or_else(|| self.later.pop_front().map(FillTask::Block))
    }
}
