//! Routes each read: to the disk, to the network, or into the queue until a block arrives.

use super::handle::{Announcer, Fill};
use super::queue::{BlockId, LOOKUP, Waiting};
use super::state::{FillState, REST};
use crate::cache::blocks::CachedObject;
use crate::cache::config::QUEUE;
use feedline_base::sync::Hold;
use feedline_core::storage::{Extent, Locality, SourceId};
use feedline_reader::ReadOp;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The destination of a read.
pub enum CacheAnswer {
    Disk(ReadOp),
    Network(ReadOp),
    /// The read returns as a completion, or from [`Fill::take_ready`].
    Waits,
}

impl Fill {
    /// The destination of a read of an object.
    pub(crate) fn route(&self, op: ReadOp) -> CacheAnswer {
        let answer = self.shared.place(op);
        if let CacheAnswer::Network(op) = &answer {
            self.shared.compare_soon(op.extent.source);
        }
        answer
    }

    /// Like [`route`](Self::route), for a read within one block. If the block is missing, the read
    /// always waits for it.
    pub(in crate::cache) fn bring(&self, op: ReadOp) -> CacheAnswer {
        let state = &*self.shared;
        let block = op.extent.offset / state.blocks.block;
        match state.blocks.object(op.extent.source.index()) {
            Some(Some(object)) if object.has(block) => CacheAnswer::Disk(op),
            Some(None) => CacheAnswer::Network(op),
            _ if !state.keeps() => CacheAnswer::Network(op),
            Some(Some(_)) => state.wait_for(op, block),
            None => state.wait_for(op, LOOKUP),
        }
    }
}

impl Announcer {
    /// Queues the blocks of a future read.
    pub fn announce(&self, extent: &Extent) {
        let state = &*self.0;
        let source = extent.source;
        let is_kept = extent.len > 0
            && state.sources.is_staged(source)
            && state.sources.check(extent).is_ok();
        if !is_kept || !state.keeps() {
            return;
        }
        match state.blocks.object(source.index()) {
            Some(Some(object)) => {
                let blocks = state.blocks.blocks(extent.offset, extent.len);
                state.ask(object, source, blocks.filter(|block| !object.has(*block)));
            }
            None if !state.blocks.is_changed(source.index()) => state.look_soon(source),
            _ => {}
        }
    }
}

impl FillState {
    fn place(&self, op: ReadOp) -> CacheAnswer {
        let extent = op.extent;
        if extent.len == 0 || self.sources.check(&extent).is_err() {
            return CacheAnswer::Network(op);
        }
        let mut blocks = self.blocks.blocks(extent.offset, extent.len);
        let object = match self.blocks.object(extent.source.index()) {
            Some(Some(object)) => object,
            Some(None) => return CacheAnswer::Network(op),
            None if self.rests(&self.flow.fails_until)
                && !self.blocks.is_changed(extent.source.index()) =>
            {
                return CacheAnswer::Network(op);
            }
            None => return self.wait_for(op, LOOKUP),
        };
        // Blocks that a slow disk does not take now may be stored in another epoch.
        let keeps = self.keeps();
        if keeps && self.locality == Locality::Sequence {
            self.ask_ahead(object, extent.source, *blocks.end() + 1);
        }
        let Some(first) = blocks.find(|block| !object.has(*block)) else {
            return CacheAnswer::Disk(op);
        };
        let piece = || {
            self.blocks
                .has_pieces(extent.source.index(), object, extent.offset, extent.len)
        };
        if self.pieces && piece() {
            return CacheAnswer::Disk(op);
        }
        if !keeps {
            return CacheAnswer::Network(op);
        }
        let rest = blocks.filter(|block| !object.has(*block));
        let is_most = self.is_most(&extent, first);
        if is_most
            && !object.is_unproven(first)
            && self.flow.busy.load(Ordering::Relaxed) >= self.downloads
        {
            // All threads are busy. The network is as fast as a download, and accepts more
            // requests.
            return CacheAnswer::Network(op);
        }
        match self.is_dense() || is_most || object.is_unproven(first) {
            true => {
                self.ask(object, extent.source, rest);
                self.wait_for(op, first)
            }
            false if self.keeps_pieces() && self.sources.is_remote(extent.source) => {
                CacheAnswer::Network(op)
            }
            false => {
                self.ask(object, extent.source, std::iter::once(first).chain(rest));
                CacheAnswer::Network(op)
            }
        }
    }

    /// Whether the order will soon read all of a block.
    pub(super) fn is_dense(&self) -> bool {
        self.locality != Locality::None
    }

    /// Whether a read needs so much of a block that a download of the block costs little more.
    fn is_most(&self, extent: &Extent, block: u64) -> bool {
        let len = self.sources.len_of(extent.source);
        let block_len = self.blocks.block.min(len - block * self.blocks.block);
        extent.len >= block_len / 4
    }

    /// Queues the lookup of an object that no read waits for. Later announcements find the object.
    fn look_soon(&self, source: SourceId) {
        let mut queue = self.queue.hold();
        let id = BlockId {
            source,
            block: LOOKUP,
        };
        let is_known = queue.waiting.contains_key(&id) || queue.running.contains_key(&id);
        if !is_known && queue.lookups.len() < QUEUE && !queue.lookups.contains(&id) {
            queue.lookups.push_back(id);
            drop(queue);
            self.changed.notify_all();
        }
    }

    /// Queues the next blocks, which a dense order will need. Without this, a few reads in flight
    /// leave most threads idle.
    fn ask_ahead(&self, object: &CachedObject, source: SourceId, next: u64) {
        let end = self
            .sources
            .len_of(source)
            .div_ceil(self.blocks.block)
            .min(next + self.downloads as u64);
        self.ask(
            object,
            source,
            (next..end).filter(|block| !object.has(*block)),
        );
    }

    /// Queues blocks that no read waits for.
    fn ask(&self, object: &CachedObject, source: SourceId, blocks: impl Iterator<Item = u64>) {
        for block in blocks.filter(|block| object.ask(*block)) {
            let mut queue = self.queue.hold();
            if queue.later.len() == QUEUE {
                // The next read asks again.
                return object.unask(block);
            }
            queue.later.push_back(BlockId { source, block });
            drop(queue);
            self.changed.notify_all();
        }
    }

    fn wait_for(&self, op: ReadOp, block: u64) -> CacheAnswer {
        let id = BlockId {
            source: op.extent.source,
            block,
        };
        let mut queue = self.queue.hold();
        if let Some(waiting) = queue.waiting.get_mut(&id) {
            waiting.ops.push(op);
            return CacheAnswer::Waits;
        }
        if queue
            .held
            .get(&id)
            .is_some_and(|since| since.elapsed() < REST)
        {
            return CacheAnswer::Network(op);
        }
        let running = queue.running.get(&id).copied();
        let since = (running != Some(true)).then(Instant::now);
        queue.waiting.insert(
            id,
            Waiting {
                ops: vec![op],
                since,
            },
        );
        if running.is_some() {
            return CacheAnswer::Waits;
        }
        match block {
            LOOKUP => queue.lookups.push_back(id),
            _ => queue.urgent.push_back(id),
        }
        drop(queue);
        // A single notified thread might be one that does not take this task.
        self.changed.notify_all();
        CacheAnswer::Waits
    }
}
