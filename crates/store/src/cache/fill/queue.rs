//! The tasks of a cache: blocks, pieces and syncs, and the reads that wait for a block.

use feedline_core::storage::SourceId;
use feedline_reader::ReadOp;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// A block of a source, or [`LOOKUP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cache) struct BlockId {
    pub(in crate::cache) source: SourceId,
    pub(in crate::cache) block: u64,
}

/// Stands for a lookup instead of a block: find or create the object's files, or compare the file
/// on the mount.
pub(super) const LOOKUP: u64 = u64::MAX;

/// Bytes that a read has received, starting at an offset.
pub(super) struct Piece {
    pub(super) source: SourceId,
    pub(super) offset: u64,
    pub(super) bytes: Vec<u8>,
}

/// The next task of a thread.
pub(super) enum FillTask {
    /// A lookup or a block.
    Block(BlockId),
    Piece(Piece),
    /// Syncs the file of a source whose pieces are written.
    Sync(SourceId),
}

#[derive(Default)]
pub(super) struct FillQueue {
    /// Lookups. One thread handles only these, so that no download delays them.
    pub(super) lookups: VecDeque<BlockId>,
    pub(super) urgent: VecDeque<BlockId>,
    /// Pieces that reads received.
    pub(super) pieces: VecDeque<Piece>,
    /// Sources whose files are to be synced.
    pub(super) syncs: VecDeque<SourceId>,
    pub(super) later: VecDeque<BlockId>,
    pub(super) waiting: HashMap<BlockId, Waiting>,
    /// Blocks that threads work on, and whether they are being downloaded. Later reads wait for
    /// them.
    pub(super) running: HashMap<BlockId, bool>,
    /// Blocks that another process claims but does not deliver, and when this was found. For a
    /// while after that, no read waits for them.
    pub(super) held: HashMap<BlockId, Instant>,
}

pub(super) struct Waiting {
    pub(super) ops: Vec<ReadOp>,
    /// Since when the reads wait for a disk or another process. A download has its own limits.
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
