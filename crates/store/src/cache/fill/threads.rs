//! The threads of a cache: they look objects up, download blocks, and write them. One thread looks
//! for reads that wait too long.

use super::queue::{BlockId, FillTask, LOOKUP, Waiting};
use super::state::{FillState, REST};
use crate::cache::blocks::{CachedObject, FoundFile, is_full};
use crate::cache::config::PATIENCE;
use crate::cache::entry::{BlockState, EntryFiles, Identity};
use crate::cache::upstream::{FoundUpstream, TOUCHED, Upstream, compare};
use feedline_base::error::{Error, ErrorKind, Result};
use feedline_base::sync::Hold;
use feedline_core::storage::SourceId;
use feedline_reader::counters::add;
use std::collections::hash_map;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Pause between two checks of another process's download.
pub(super) const LOOK: Duration = Duration::from_millis(5);

/// Interval between comparisons of a file on a mount while parts of it are read from the mount and
/// parts from the disk.
const COMPARE: Duration = Duration::from_secs(1);

impl FillState {
    pub(super) fn work(&self, downloads: bool) {
        let mut buffer = Vec::new();
        while let Some(work) = self.next(downloads) {
            self.flow.busy.fetch_add(1, Ordering::Relaxed);
            let done = catch_unwind(AssertUnwindSafe(|| {
                match &work {
                    FillTask::Block(id) => return self.run(*id, &mut buffer),
                    FillTask::Piece(piece) => self.put(piece),
                    FillTask::Sync(source) => self.sync(*source, &mut buffer),
                }
                false
            }));
            let past_cache = done.unwrap_or_else(|_| {
                // A panic is a bug in this crate. It must not fail a read; nothing more is kept.
                self.flow.fails_until.store(u64::MAX, Ordering::Relaxed);
                true
            });
            match work {
                FillTask::Block(id) => self.release(id, past_cache),
                FillTask::Piece(piece) => {
                    _ = self
                        .flow
                        .brought
                        .fetch_sub(piece.bytes.len(), Ordering::Relaxed)
                }
                FillTask::Sync(_) => {}
            }
            self.flow.busy.fetch_sub(1, Ordering::Relaxed);
            // A task has ended, which counts as progress: queued reads may keep waiting for the
            // cache.
            self.flow
                .moved
                .store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
        }
    }

    fn next(&self, downloads: bool) -> Option<FillTask> {
        let mut queue = self.queue.hold();
        loop {
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            let lookup = queue.lookups.pop_front().map(FillTask::Block);
            match lookup.or_else(|| if downloads { queue.next() } else { None }) {
                None => {
                    queue = self
                        .changed
                        .wait(queue)
                        .unwrap_or_else(PoisonError::into_inner)
                }
                Some(FillTask::Block(id)) => {
                    if let hash_map::Entry::Vacant(vacant) = queue.running.entry(id) {
                        vacant.insert(false);
                        return Some(FillTask::Block(id));
                    }
                    // Another thread works on the same block.
                }
                piece => return piece,
            }
        }
    }

    pub(super) fn watch(&self) {
        let mut queue = self.queue.hold();
        while !self.stop.load(Ordering::Acquire) {
            drop(
                self.ended
                    .wait_timeout(queue, PATIENCE / 4)
                    .unwrap_or_else(PoisonError::into_inner),
            );
            self.sweep();
            self.sync_soon();
            queue = self.queue.hold();
        }
    }

    /// Sends reads to the network if their disk or process does not respond.
    fn sweep(&self) {
        let moved = self.started + Duration::from_millis(self.flow.moved.load(Ordering::Relaxed));
        let late = |waiting: &Waiting| {
            waiting.since.is_some_and(|since| {
                since.max(moved).elapsed() > PATIENCE || since.elapsed() > 4 * PATIENCE
            })
        };
        let mut queue = self.queue.hold();
        let late: Vec<_> = queue
            .waiting
            .iter()
            .filter(|(_, waiting)| late(waiting))
            .map(|(id, _)| *id)
            .collect();
        let ops: Vec<_> = late
            .iter()
            .filter_map(|id| queue.waiting.remove(id))
            .flat_map(|late| late.ops)
            .collect();
        drop(queue);
        if !ops.is_empty() {
            self.rest("a read waited too long", &io::ErrorKind::TimedOut.into());
            self.give_back(ops, true);
        }
    }

    /// Executes the task of a block. True if the reads that wait for it must go past the cache.
    fn run(&self, id: BlockId, buffer: &mut Vec<u8>) -> bool {
        let BlockId { source, block } = id;
        if block != LOOKUP
            && self
                .blocks
                .object(source.index())
                .flatten()
                .is_some_and(|object| object.has(block))
        {
            return false;
        }
        let upstream = self
            .upstream(source)
            .inspect_err(|error| self.fail(id, error));
        let Ok(Some((upstream, identity))) = upstream else {
            // The error may be temporary: the next read asks again.
            if let (Some(Some(object)), true) =
                (self.blocks.object(source.index()), block != LOOKUP)
            {
                object.unask(block);
            }
            return true;
        };
        if block == LOOKUP {
            if self.blocks.found(source.index()).is_none() {
                self.look_up(source, &upstream, &identity);
            }
            return self.blocks.object(source.index()).is_none();
        }
        let Some(Some(object)) = self.blocks.object(source.index()) else {
            return true;
        };
        let fill = || self.fill(id, &self.entry(object, &identity)?, upstream, buffer);
        let brought = fill().unwrap_or_else(|error| {
            self.not_written(source, "a block cannot be written", &error);
            None
        });
        let Some(written) = brought else {
            object.forget(block);
            return true;
        };
        object.set(block);
        add(&self.blocks.counts.blocks, u64::from(written > 0));
        add(&self.blocks.counts.bytes, written);
        false
    }

    /// The files of an object, if they are those that this process knows.
    pub(super) fn entry(
        &self,
        object: &CachedObject,
        identity: &Identity,
    ) -> io::Result<EntryFiles> {
        let entry = EntryFiles::find(&self.blocks.folder(object), identity)?;
        let known = entry.filter(|entry| object.is_at(&entry.path) && entry.inode == object.inode);
        known.ok_or(io::ErrorKind::NotFound.into())
    }

    /// Handles an error in writing the files of an object.
    pub(super) fn not_written(&self, source: SourceId, why: &str, error: &io::Error) {
        if error.kind() == io::ErrorKind::NotFound {
            self.blocks.lose(source.index());
            return self.blocks.dropped("the cache's file is gone".into());
        }
        self.rest(why, error);
    }

    /// Has a thread compare a file on a mount that is partly on the disk, because all reads must
    /// return one version.
    pub(super) fn compare_soon(&self, source: SourceId) {
        let now = self.started.elapsed().as_millis() as u64;
        let pause = COMPARE.as_millis() as u64;
        let several = self.sources.len_of(source) > self.blocks.block;
        if several && self.blocks.is_due(source.index(), now, pause) {
            self.queue.hold().lookups.push_back(BlockId {
                source,
                block: LOOKUP,
            });
            self.changed.notify_all();
        }
    }

    /// Opens the upstream of a source, which must have the version that the loader found first.
    /// `None`: nothing of the source is kept now.
    pub(super) fn upstream(&self, source: SourceId) -> Result<Option<(Upstream, Identity)>> {
        let never = |why: Option<&str>| {
            why.into_iter()
                .for_each(|why| self.blocks.dropped(why.into()));
            self.blocks.set(source.index(), None, |_| ());
            Ok(None)
        };
        let changed = |error: &Error| {
            if error.kind() == ErrorKind::Changed {
                self.blocks.change(source.index());
            }
        };
        let first = self.blocks.version(source.index());
        let found = Upstream::open(
            &self.sources,
            source,
            first.is_some(),
            &self.mounts,
            &self.meter,
        );
        let upstream = match found.inspect_err(changed)? {
            FoundUpstream::Open(upstream) => upstream,
            FoundUpstream::Never(why) => return never(why),
            FoundUpstream::Later(why) => {
                self.blocks.dropped(why.into());
                return Ok(None);
            }
        };
        if let (Some(first), Some(now)) = (first, upstream.version())
            && !compare(first, now).inspect_err(changed)?
        {
            self.blocks.lose(source.index());
            self.blocks.dropped(TOUCHED.into());
        }
        match upstream.identity(&self.sources, source, self.blocks.block) {
            Some(identity) => Ok(Some((upstream, identity))),
            None => never(Some("the URL or path is too long")),
        }
    }

    /// Finds or creates the files of an object, and reads the states of their blocks.
    fn look_up(&self, source: SourceId, upstream: &Upstream, identity: &Identity) {
        let found = || -> io::Result<(EntryFiles, Vec<BlockState>)> {
            let folder = self.dir.folder(&upstream.name(&self.sources, source))?;
            let entry = match EntryFiles::find(&folder, identity)? {
                Some(found) => found,
                None => {
                    let bytes = identity.layout.map_bytes();
                    add(&self.blocks.counts.removed, self.dir.reserve(bytes)?);
                    let made = EntryFiles::make(&folder, identity);
                    match made {
                        Ok(_) => self.dir.written(bytes),
                        Err(_) => self.dir.release(bytes),
                    }
                    made?
                }
            };
            entry.touch();
            let states = entry.states()?;
            Ok((entry, states))
        };
        match found() {
            Ok((entry, states)) => {
                let EntryFiles {
                    ref path,
                    inode,
                    ref layout,
                    ..
                } = entry;
                let file = FoundFile {
                    path: path.clone(),
                    inode,
                    len: layout.len,
                    version: upstream.version(),
                };
                // The blocks are set before reads find the object.
                self.blocks.set(source.index(), Some(file), |object| {
                    for (state, block) in states.iter().zip(0..) {
                        match state {
                            BlockState::Whole => object.set(block),
                            BlockState::Unproven(_) => object.doubt(block),
                            BlockState::Missing => {}
                        }
                    }
                });
            }
            // A full cache has no room for the object in this run; other objects are still looked
            // up.
            Err(error) if error.kind() == io::ErrorKind::InvalidData || is_full(&error) => {
                self.blocks.refused("an object has no file", &error);
                self.blocks.set(source.index(), None, |_| ());
            }
            // The error may be temporary: the next read after the pause looks the object up again.
            Err(error) => self.rest("an object has no file", &error),
        }
    }

    /// Stores one block on the disk. Returns the number of bytes written. `None`: another process
    /// downloads it, or the network failed.
    fn fill(
        &self,
        id: BlockId,
        entry: &EntryFiles,
        upstream: Upstream,
        buffer: &mut Vec<u8>,
    ) -> io::Result<Option<u64>> {
        let block = id.block;
        let started = Instant::now();
        self.queue
            .hold()
            .held
            .retain(|_, since| since.elapsed() < REST);
        while !entry.claim(block) {
            if entry.state(block)? == BlockState::Whole {
                return Ok(Some(0));
            }
            let mut queue = self.queue.hold();
            // A process that holds one block for long may hold more, so the next wait is shorter.
            let patience = if queue.held.is_empty() {
                PATIENCE
            } else {
                PATIENCE / 8
            };
            let late = started.elapsed() > patience;
            if late && queue.held.insert(id, Instant::now()).is_none() {
                self.blocks
                    .dropped("another process has reserved a block and does not fetch it".into());
            }
            if late || !queue.waiting.contains_key(&id) || self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            drop(queue);
            std::thread::sleep(LOOK);
        }
        let state = entry.state(block)?;
        match state {
            BlockState::Whole => return Ok(Some(0)),
            BlockState::Unproven(crc) if entry.prove(block, crc, buffer)? => {
                add(&self.blocks.counts.hits, self.serve(id, buffer));
                return Ok(Some(0));
            }
            BlockState::Unproven(_) | BlockState::Missing => {}
        }
        if entry.complete(block, buffer)? {
            add(&self.blocks.counts.blocks, 1);
            add(&self.blocks.counts.hits, self.serve(id, buffer));
            return Ok(Some(0));
        }
        // A block that was wrong already occupies its space, and so do pieces.
        let len = entry.layout.block_len(block);
        let there = entry.brought(block * entry.layout.block, len);
        let room = if state == BlockState::Missing {
            len.next_multiple_of(4096).saturating_sub(there)
        } else {
            0
        };
        add(&self.blocks.counts.removed, self.dir.reserve(room)?);
        if let Err(error) = self.download(upstream, id, len, buffer) {
            self.dir.release(room);
            self.fail(id, &error);
            return Ok(None);
        }
        add(&self.blocks.counts.misses, self.serve(id, buffer));
        self.flow.writers.fetch_add(1, Ordering::Relaxed);
        let kept = entry.keep(block, buffer);
        self.flow.writers.fetch_sub(1, Ordering::Relaxed);
        kept.inspect_err(|_| self.dir.release(room))?;
        self.dir.written(room);
        self.queue.hold().held.remove(&id);
        Ok(Some(len))
    }

    fn download(
        &self,
        upstream: Upstream,
        id: BlockId,
        len: u64,
        buffer: &mut Vec<u8>,
    ) -> Result<()> {
        let downloads = |now: bool| {
            let mut queue = self.queue.hold();
            queue.running.insert(id, now);
            if let Some(waiting) = queue.waiting.get_mut(&id) {
                waiting.since = (!now).then(Instant::now);
            }
        };
        downloads(true);
        let start = id.block * self.blocks.block;
        // If this download fails, the reads send their own requests. Both must fit the stall
        // deadline.
        let patience = self.patience.map(|patience| patience / 2);
        let brought = upstream.bring(
            start..start + len,
            patience,
            std::mem::take(buffer),
            &self.stop,
        );
        downloads(false);
        *buffer = brought?;
        Ok(())
    }
}
