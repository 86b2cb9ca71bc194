//! The threads of a cache: they look objects up, download blocks, and write them. One looks for reads that wait too long.

use super::{Job, LOOK, LOOKUP, Piece, REST, Shared, Waiting, lock};
use crate::error::{Error, ErrorKind, Result};
use crate::storage::SourceId;
use crate::storage::cache::config::PATIENCE;
use crate::storage::cache::entry::{Entry, Identity, State};
use crate::storage::cache::kept::{Object, is_full};
use crate::storage::cache::origin::{Found, Origin, TOUCHED, compare};
use crate::storage::cache::units::{UNIT, marks_of};
use std::collections::hash_map;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a thread does next.
pub(super) enum Work {
    /// A lookup or a block.
    Block(Job),
    Piece(Piece),
    /// The pieces of a source are written, and wait for the disk.
    Sync(SourceId),
}

/// While some of a file on a mount is read from the mount and some from the disk, it is compared so often.
const COMPARE: Duration = Duration::from_secs(1);

impl Shared {
    pub(super) fn work(&self, downloads: bool) {
        let mut buffer = Vec::new();
        while let Some(work) = self.next(downloads) {
            self.busy.fetch_add(1, Ordering::Relaxed);
            match work {
                Work::Block(job) => {
                    let run = catch_unwind(AssertUnwindSafe(|| self.run(job, &mut buffer)));
                    self.release(job, run.unwrap_or_else(|_| self.give_up()));
                }
                Work::Piece(piece) => {
                    let put = catch_unwind(AssertUnwindSafe(|| self.put(&piece)));
                    if put.is_err() {
                        self.give_up();
                    }
                    self.brought.fetch_sub(piece.bytes.len(), Ordering::Relaxed);
                }
                Work::Sync(source) => {
                    if catch_unwind(AssertUnwindSafe(|| self.sync(source, &mut buffer))).is_err() {
                        self.give_up();
                    }
                }
            }
            self.busy.fetch_sub(1, Ordering::Relaxed);
            self.progress();
        }
    }

    /// A bug of this crate. It must not cost a read; nothing more is kept.
    fn give_up(&self) -> bool {
        self.fails_until.store(u64::MAX, Ordering::Relaxed);
        true
    }

    fn next(&self, downloads: bool) -> Option<Work> {
        let mut queue = lock(&self.queue);
        loop {
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            let lookup = queue.lookups.pop_front().map(Work::Block);
            match lookup.or_else(|| if downloads { queue.next() } else { None }) {
                None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(Work::Block(job)) => {
                    if let hash_map::Entry::Vacant(vacant) = queue.running.entry(job) {
                        vacant.insert(false);
                        return Some(Work::Block(job));
                    }
                    // Another thread does the same.
                }
                piece => return piece,
            }
        }
    }

    pub(super) fn watch(&self) {
        let mut queue = lock(&self.queue);
        while !self.stop.load(Ordering::Acquire) {
            drop(self.ended.wait_timeout(queue, PATIENCE / 4).unwrap_or_else(PoisonError::into_inner));
            self.sweep();
            self.sync_soon();
            queue = lock(&self.queue);
        }
    }

    /// Sends reads to the network whose disk or process does not answer.
    fn sweep(&self) {
        let moved = self.started + Duration::from_millis(self.moved.load(Ordering::Relaxed));
        let late = |waiting: &Waiting| {
            let since = |since: Instant| since.max(moved).elapsed() > PATIENCE || since.elapsed() > 4 * PATIENCE;
            waiting.since.is_some_and(since)
        };
        let mut queue = lock(&self.queue);
        let late: Vec<_> = queue.waiting.iter().filter(|(_, waiting)| late(waiting)).map(|(job, _)| *job).collect();
        let ops: Vec<_> = late.iter().filter_map(|job| queue.waiting.remove(job)).flat_map(|late| late.ops).collect();
        drop(queue);
        if !ops.is_empty() {
            self.rest("a read waited too long", &io::ErrorKind::TimedOut.into());
            self.give_back(ops, true);
        }
    }

    /// Does a job; true if the reads that wait for it are to go to the network.
    fn run(&self, job: Job, buffer: &mut Vec<u8>) -> bool {
        let (source, block) = job;
        if block != LOOKUP && self.kept.object(source.index()).flatten().is_some_and(|object| object.has(block)) {
            return false;
        }
        let origin = self.origin(source).inspect_err(|error| self.fail(job, error));
        let Ok(Some((origin, identity))) = origin else {
            // It may pass: the next read asks again.
            if let (Some(Some(object)), true) = (self.kept.object(source.index()), block != LOOKUP) {
                object.unask(block);
            }
            return true;
        };
        if block == LOOKUP {
            if self.kept.found(source.index()).is_none() {
                self.look_up(source, &origin, &identity);
            }
            return self.kept.object(source.index()).is_none();
        }
        let Some(Some(object)) = self.kept.object(source.index()) else { return true };
        let fill = || match Entry::find(&self.kept.folder(object), &identity)? {
            Some((entry, path)) if object.is_at(&path) && entry.inode == object.inode => {
                self.fill(job, (&entry, &identity, &path), (origin, buffer))
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        match fill() {
            Ok(Some(written)) => {
                object.set(block);
                if written > 0 {
                    self.kept.wrote(written);
                }
                false
            }
            Ok(None) => {
                object.forget(block);
                true
            }
            Err(error) => {
                match error.kind() {
                    io::ErrorKind::NotFound => {
                        self.kept.lose(source.index());
                        self.kept.dropped("the cache's file is gone".into());
                    }
                    _ => self.rest("a block cannot be written", &error),
                }
                object.forget(block);
                true
            }
        }
    }

    /// Lets a thread compare a file on a mount of which some is on the disk: all reads are to bring one version.
    pub(super) fn compare_soon(&self, source: SourceId) {
        let (now, pause) = (self.started.elapsed().as_millis() as u64, COMPARE.as_millis() as u64);
        let several = self.sources.len_of(source) > self.kept.block();
        if several && self.kept.is_due(source.index(), now, pause) {
            lock(&self.queue).lookups.push_back((source, LOOKUP));
            self.changed.notify_all();
        }
    }

    /// Opens where a source's blocks come from, which must be what the loader met first. `None`: nothing of it is kept
    /// now.
    fn origin(&self, source: SourceId) -> Result<Option<(Origin, Identity)>> {
        let never = |why: Option<&str>| {
            why.into_iter().for_each(|why| self.kept.dropped(why.into()));
            self.kept.set(source.index(), None, 0, |_| ());
            Ok(None)
        };
        let changed = |error: &Error| {
            if error.kind() == ErrorKind::Changed {
                self.kept.change(source.index());
            }
        };
        let first = self.kept.version(source.index());
        let found = Origin::open(&self.sources, source, first.is_some(), (&self.mounts, &self.meter));
        let origin = match found.inspect_err(changed)? {
            Found::Origin(origin) => origin,
            Found::Never(why) => return never(why),
            Found::Later(why) => {
                self.kept.dropped(why.into());
                return Ok(None);
            }
        };
        if let (Some(first), Some(now)) = (first, origin.version())
            && !compare(first, now).inspect_err(changed)?
        {
            self.kept.lose(source.index());
            self.kept.dropped(TOUCHED.into());
        }
        match origin.identity(&self.sources, source, self.kept.block()) {
            Some(identity) => Ok(Some((origin, identity))),
            None => never(Some("the URL or path is too long")),
        }
    }

    /// Finds or makes the files of an object, and what they hold.
    fn look_up(&self, source: SourceId, origin: &Origin, identity: &Identity) {
        let found = || -> io::Result<(Entry, PathBuf, Vec<State>)> {
            let folder = self.dir.folder(&origin.name(&self.sources, source))?;
            let (entry, path) = match Entry::find(&folder, identity)? {
                Some(found) => found,
                None => {
                    let removed = self.dir.reserve(identity.map_bytes())?;
                    self.kept.removed(removed);
                    let made = Entry::make(&folder, identity);
                    match made {
                        Ok(_) => self.dir.written(identity.map_bytes()),
                        Err(_) => self.dir.release(identity.map_bytes()),
                    }
                    made?
                }
            };
            entry.touch();
            let states = entry.states(identity)?;
            Ok((entry, path, states))
        };
        match found() {
            Ok((entry, path, states)) => {
                // Reads find the object with its blocks.
                let mark = |object: &Object| {
                    for (state, block) in states.iter().zip(0..) {
                        match state {
                            State::Whole => object.set(block),
                            State::Unproven(_) => object.doubt(block),
                            State::Missing => {}
                        }
                    }
                };
                self.kept.set(source.index(), Some((path, entry.inode, origin.version())), identity.len, mark);
            }
            // A full cache has no room for the object in this run; others are looked up.
            Err(error) if error.kind() == io::ErrorKind::InvalidData || is_full(&error) => {
                self.kept.refused("an object has no file", &error);
                self.kept.set(source.index(), None, 0, |_| ());
            }
            // It may pass: the next read after the rest looks again.
            Err(error) => self.rest("an object has no file", &error),
        }
    }

    /// Brings one block to the disk; gives the bytes that it wrote. `None`: another process downloads it, or the network
    /// failed.
    fn fill(
        &self,
        job: Job,
        (entry, identity, path): (&Entry, &Identity, &Path),
        (origin, buffer): (Origin, &mut Vec<u8>),
    ) -> io::Result<Option<u64>> {
        let block = job.1;
        let started = Instant::now();
        lock(&self.queue).held.retain(|_, since| since.elapsed() < REST);
        while !entry.claim(block) {
            if entry.state(identity, block)? == State::Whole {
                return Ok(Some(0));
            }
            let mut queue = lock(&self.queue);
            // Whoever holds one block for long may hold more.
            let patience = if queue.held.is_empty() { PATIENCE } else { PATIENCE / 8 };
            let late = started.elapsed() > patience;
            if late && queue.held.insert(job, Instant::now()).is_none() {
                self.kept.dropped("another process holds a block, and does not bring it".into());
            }
            if late || !queue.waiting.contains_key(&job) || self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            drop(queue);
            std::thread::sleep(LOOK);
        }
        let state = entry.state(identity, block)?;
        match state {
            State::Whole => return Ok(Some(0)),
            State::Unproven(crc) if entry.prove(identity, block, crc, buffer)? => {
                let reads = self.serve(job, buffer);
                self.kept.hit(reads);
                return Ok(Some(0));
            }
            State::Unproven(_) | State::Missing => {}
        }
        if entry.complete(identity, path, block, buffer)? {
            self.kept.completed();
            let reads = self.serve(job, buffer);
            self.kept.hit(reads);
            return Ok(Some(0));
        }
        // A block that was wrong has its room, and so have pieces.
        let len = identity.block_len(block);
        let there = entry.brought(identity, path, (block * identity.block, len));
        let room = if state == State::Missing { len.next_multiple_of(4096).saturating_sub(there) } else { 0 };
        let removed = self.dir.reserve(room)?;
        self.kept.removed(removed);
        if let Err(error) = self.download((origin, job), len, buffer) {
            self.dir.release(room);
            self.fail(job, &error);
            return Ok(None);
        }
        let reads = self.serve(job, buffer);
        self.kept.miss(reads);
        self.writers.fetch_add(1, Ordering::Relaxed);
        let kept = entry.keep(identity, block, buffer);
        self.writers.fetch_sub(1, Ordering::Relaxed);
        kept.inspect_err(|_| self.dir.release(room))?;
        self.dir.written(room);
        lock(&self.queue).held.remove(&job);
        Ok(Some(len))
    }

    /// Writes a piece. What cannot be written comes from the network again.
    fn put(&self, piece: &Piece) {
        let (source, range) = (piece.source, (piece.offset, piece.bytes.len() as u64));
        self.in_entry(source, |entry, identity, path, _| {
            let there = entry.brought(identity, path, range);
            let room = range.1.next_multiple_of(4096).saturating_sub(there);
            self.kept.removed(self.dir.reserve(room)?);
            entry.put(range.0, &piece.bytes).inspect_err(|_| self.dir.release(room))?;
            self.dir.written(room);
            let mut all = lock(&self.written);
            let (pieces, new) = all.entry(source).or_default();
            pieces.push((piece.offset, marks_of(&piece.bytes)));
            *new += range.1.min(room);
            Ok(())
        });
    }

    /// Queues the syncs of files with new pieces: some twice a second, for each takes long.
    pub(super) fn sync_soon(&self) {
        let sources: Vec<_> = lock(&self.written).keys().copied().collect();
        if !sources.is_empty() {
            let mut queue = lock(&self.queue);
            let new = sources.into_iter().filter(|source| !queue.syncs.contains(source)).collect::<Vec<_>>();
            queue.syncs.extend(new);
            drop(queue);
            self.changed.notify_all();
        }
    }

    pub(super) fn has_pieces_to_write(&self) -> bool {
        self.brought.load(Ordering::Relaxed) > 0
            || !lock(&self.written).is_empty()
            || self.syncing.load(Ordering::Relaxed) > 0
    }

    /// Marks the pieces of a source, and gives the blocks that they complete their records.
    fn sync(&self, source: SourceId, buffer: &mut Vec<u8>) {
        self.syncing.fetch_add(1, Ordering::Relaxed);
        let (pieces, new) = lock(&self.written).remove(&source).unwrap_or_default();
        if !pieces.is_empty() {
            self.in_entry(source, |entry, identity, path, object| {
                entry.mark(path, &pieces)?;
                self.kept.wrote_piece(new);
                let bytes = |marks: &Vec<u32>| marks.len() as u64 * UNIT;
                let blocks = pieces.iter().flat_map(|(offset, marks)| self.kept.blocks(*offset, bytes(marks)));
                for block in blocks.filter(|block| !object.has(*block)) {
                    // Whoever marks the last piece sees them all, and looks before it claims: a claim for nothing would
                    // keep another from completing the block.
                    if entry.is_brought(identity, path, block)
                        && entry.claim(block)
                        && entry.state(identity, block)? == State::Missing
                        && entry.complete(identity, path, block, buffer)?
                    {
                        self.kept.completed();
                        object.set(block);
                    }
                }
                Ok(())
            });
        }
        self.syncing.fetch_sub(1, Ordering::Relaxed);
    }

    /// Does something with the files of an object, if they are those that this process knows.
    fn in_entry(&self, source: SourceId, work: impl FnOnce(&Entry, &Identity, &Path, &Object) -> io::Result<()>) {
        let Ok(Some((_, identity))) = self.origin(source) else { return };
        let Some(Some(object)) = self.kept.object(source.index()) else { return };
        let done = || {
            let (entry, path) = Entry::find(&self.kept.folder(object), &identity)?.ok_or(io::ErrorKind::NotFound)?;
            match object.is_at(&path) && entry.inode == object.inode {
                true => work(&entry, &identity, &path, object),
                false => Err(io::ErrorKind::NotFound.into()),
            }
        };
        match done() {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.kept.lose(source.index());
                self.kept.dropped("the cache's file is gone".into());
            }
            Err(error) => self.rest("a piece cannot be written", &error),
        }
    }

    fn download(&self, (origin, job): (Origin, Job), len: u64, buffer: &mut Vec<u8>) -> Result<()> {
        let downloads = |now: bool| {
            let mut queue = lock(&self.queue);
            queue.running.insert(job, now);
            if let Some(waiting) = queue.waiting.get_mut(&job) {
                waiting.since = (!now).then(Instant::now);
            }
        };
        downloads(true);
        let start = job.1 * self.kept.block();
        // The reads' own requests follow if this one brings nothing: both fit the stall deadline.
        let patience = self.patience.map(|patience| patience / 2);
        let brought = origin.bring(start..start + len, patience, std::mem::take(buffer), &self.stop);
        downloads(false);
        *buffer = brought?;
        Ok(())
    }
}
