//! Pieces of blocks: bytes that reads received from the network are written, synced and marked.

use super::queue::Piece;
use super::state::{FillState, Flow, WrittenPieces};
use crate::cache::blocks::CachedObject;
use crate::cache::entry::{BlockState, EntryFiles};
use crate::cache::units::{UNIT, marks_of, units_of};
use feedline_base::sync::Hold;
use feedline_core::storage::SourceId;
use feedline_reader::counters::add;
use feedline_reader::reader::{Keep, NoRoom};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// If requests for ranges have fewer bytes than this on average, their blocks are downloaded as
/// well.
const SMALL: u64 = 32 << 10;

/// Number of requests after which the average counts.
const FIRST: u64 = 64;

impl Keep for FillState {
    fn wants(
        &self,
        source: SourceId,
        offset: u64,
        len: u64,
    ) -> std::result::Result<Option<Range<u64>>, NoRoom> {
        let all = self.sources.len_of(source);
        let size = self.blocks.block;
        let Some(Some(_)) = self.blocks.object(source.index()) else {
            return Ok(None);
        };
        let is_block = offset.next_multiple_of(size) + size <= offset + len || len == all;
        // In a dense order, the block itself is downloaded soon.
        let pieces = self.pieces && (is_block || !self.is_dense() && self.keeps_pieces());
        let units = units_of(offset, len);
        let wide = units.start * UNIT..(units.end * UNIT).min(all);
        let room = (wide.end - wide.start) as usize;
        let rests = self.rests(&self.flow.full_until) || self.rests(&self.flow.fails_until);
        if !pieces || rests || room > self.brought_max {
            self.count(len);
            return Ok(None);
        }
        if self.flow.brought.fetch_add(room, Ordering::Relaxed) + room > self.brought_max {
            self.flow.brought.fetch_sub(room, Ordering::Relaxed);
            return Err(NoRoom);
        }
        self.count(len);
        Ok(Some(wide))
    }

    fn pass(&self) {
        self.blocks
            .dropped("ranges arrive faster than the disk can write them".into());
    }

    fn keep(&self, source: SourceId, wide: Range<u64>, mut bytes: Vec<u8>) {
        let room = (wide.end - wide.start) as usize;
        // Only whole units of a truncated range are kept.
        if bytes.len() < room {
            bytes.truncate(bytes.len() / UNIT as usize * UNIT as usize);
            bytes.shrink_to_fit();
        }
        self.flow
            .brought
            .fetch_sub(room - bytes.len(), Ordering::Relaxed);
        if !bytes.is_empty() {
            self.queue.hold().pieces.push_back(Piece {
                source,
                offset: wide.start,
                bytes,
            });
            self.changed.notify_all();
        }
    }
}

impl FillState {
    /// Whether ranges are large enough for their pieces to fill the cache.
    pub(super) fn keeps_pieces(&self) -> bool {
        let Flow {
            requests,
            requested,
            ..
        } = &self.flow;
        let requests = requests.load(Ordering::Relaxed);
        let bytes = requested.load(Ordering::Relaxed);
        self.pieces && (requests < FIRST || bytes >= SMALL * requests)
    }

    /// Counts a request of a read.
    fn count(&self, len: u64) {
        add(&self.flow.requests, 1);
        add(&self.flow.requested, len);
    }

    /// Writes a piece. Bytes that cannot be written are downloaded again.
    pub(super) fn put(&self, piece: &Piece) {
        let Piece {
            source,
            offset,
            ref bytes,
        } = *piece;
        let len = bytes.len() as u64;
        self.in_entry(source, |entry, _| {
            let room = len
                .next_multiple_of(4096)
                .saturating_sub(entry.brought(offset, len));
            add(&self.blocks.counts.removed, self.dir.reserve(room)?);
            entry
                .put(offset, bytes)
                .inspect_err(|_| self.dir.release(room))?;
            self.dir.written(room);
            let mut all = self.written.hold();
            let written = all.entry(source).or_default();
            written.pieces.push((offset, marks_of(bytes)));
            written.new += len.min(room);
            Ok(())
        });
    }

    /// Queues the syncs of files with new pieces: about twice a second, because each sync takes
    /// long.
    pub(super) fn sync_soon(&self) {
        let sources: Vec<_> = self.written.hold().keys().copied().collect();
        if !sources.is_empty() {
            let mut queue = self.queue.hold();
            let new = sources
                .into_iter()
                .filter(|source| !queue.syncs.contains(source))
                .collect::<Vec<_>>();
            queue.syncs.extend(new);
            drop(queue);
            self.changed.notify_all();
        }
    }

    pub(super) fn has_pieces_to_write(&self) -> bool {
        self.flow.brought.load(Ordering::Relaxed) > 0
            || !self.written.hold().is_empty()
            || self.flow.syncing.load(Ordering::Relaxed) > 0
    }

    /// Marks the pieces of a source, and writes the records of blocks that they complete.
    pub(super) fn sync(&self, source: SourceId, buffer: &mut Vec<u8>) {
        self.flow.syncing.fetch_add(1, Ordering::Relaxed);
        let WrittenPieces { pieces, new } = self.written.hold().remove(&source).unwrap_or_default();
        if !pieces.is_empty() {
            self.in_entry(source, |entry, object| {
                entry.mark(&pieces)?;
                add(&self.blocks.counts.bytes, new);
                let blocks = pieces.iter().flat_map(|(offset, marks)| {
                    self.blocks.blocks(*offset, marks.len() as u64 * UNIT)
                });
                for block in blocks.filter(|block| !object.has(*block)) {
                    // The process that marks the last piece sees all of them. It checks before it
                    // claims: a needless claim would keep another process from completing the
                    // block.
                    if entry.is_brought(block)
                        && entry.claim(block)
                        && entry.state(block)? == BlockState::Missing
                        && entry.complete(block, buffer)?
                    {
                        add(&self.blocks.counts.blocks, 1);
                        object.set(block);
                    }
                }
                Ok(())
            });
        }
        self.flow.syncing.fetch_sub(1, Ordering::Relaxed);
    }

    /// Calls `work` with the files of an object, if they are those that this process knows.
    fn in_entry(
        &self,
        source: SourceId,
        work: impl FnOnce(&EntryFiles, &CachedObject) -> io::Result<()>,
    ) {
        let Ok(Some((_, identity))) = self.upstream(source) else {
            return;
        };
        let Some(Some(object)) = self.blocks.object(source.index()) else {
            return;
        };
        if let Err(error) = self
            .entry(object, &identity)
            .and_then(|entry| work(&entry, object))
        {
            self.not_written(source, "a piece cannot be written", &error);
        }
    }
}
