//! Fills a cache in advance: a driver of [`Fill`] that reads a byte of each block.
//!
//! ```text
//! blocks ──► bring ─┬─ here ─────────────────────────────► there
//!    ▲              ├─ waits ─► downloaded ─► settles ─────► there
//!    └── later ─────┴─ the disk or a process is slow
//! ```
//!
//! Limits: as many blocks in progress as [`Fill`] has download threads, so that each has a thread;
//! [`STALL`] without a new block.

use super::blocks::CachedBlocks;
use super::config::Cache;
use crate::cache::fill::BlockId;
use crate::cache::{CacheAnswer, Fill, FillSetup};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::meter::NetworkMeter as Meter;
use feedline_core::memory::ByteRing;
use feedline_core::memory::ring::SPAN_ALIGN;
use feedline_core::storage::source::CachedFiles;
use feedline_core::storage::{Blob, Extent, SourceId, Sources, out_of_reach};
use feedline_reader::waker::Bell;
use feedline_reader::{Completion, ReadOp, ReaderOptions};
use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// If no new block arrives for this long, the call ends.
const STALL: Duration = Duration::from_secs(300);

/// Pause between two checks of state that changes without a wake-up.
const LOOK: Duration = Duration::from_millis(10);

/// Pause between two calls of `seen`.
const SAY: Duration = Duration::from_millis(100);

/// A downloaded block that does not settle within this time is tried again: the disk may have
/// refused it.
const SETTLE: Duration = Duration::from_secs(10);

/// Maximum of [`CacheWarmed::errors`].
const ERRORS: usize = 1000;

/// The outcome of [`Cache::warm`].
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct CacheWarmed {
    /// Number of requested objects.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that the cache already held, or that other processes stored meanwhile.
    pub found: u64,
    /// Bytes that this call downloaded and kept.
    pub kept: u64,
    /// Why bytes are missing: an error for each object that cannot be kept, at most 1000, or one
    /// for the whole cache.
    pub errors: Vec<Error>,
}

impl CacheWarmed {
    /// Bytes that are not in the cache.
    pub fn missing(&self) -> u64 {
        self.bytes - self.found - self.kept
    }
}

impl Cache {
    /// Downloads the missing blocks of all objects and of all files on network mounts in `sources`,
    /// 8 blocks at a time. Files on local disks are left out. `seen` is called with the counts so
    /// far, about ten times a second. If it returns `Break`, this call ends with the blocks kept so
    /// far.
    ///
    /// A dataset has such a table (`Dataset::sources`). Its
    /// index, footers and listings do not go through the cache: opening a dataset always asks the
    /// store.
    ///
    /// Errors: [`ErrorKind::Config`] for a folder that cannot be used as a cache; an error of the
    /// store if it is unreachable. An object that cannot be read or kept is one of
    /// [`CacheWarmed::errors`].
    ///
    /// ```no_run
    /// # use feedline_core::dataset::Dataset;
    /// # use feedline_store::Cache;
    /// # use std::ops::ControlFlow;
    /// # fn warm(tar: impl Dataset) -> feedline_core::Result<()> {
    /// let warmed = Cache::at("/nvme/feedline").warm(tar.sources(), |_| ControlFlow::Continue(()))?;
    /// assert_eq!(warmed.missing(), 0, "{:?}", warmed.errors);
    /// # Ok(()) }
    /// ```
    pub fn warm(
        &self,
        sources: &Sources,
        mut seen: impl FnMut(&CacheWarmed) -> ControlFlow<()>,
    ) -> Result<CacheWarmed> {
        let slow = self.mounts().slow_folders(sources, usize::MAX);
        let sources = Arc::new(sources.with_mounts(slow.iter().map(|slow| slow.first)));
        let bell = Bell::futex();
        let fill = Fill::start(FillSetup {
            sources: &sources,
            blocks: Arc::new(CachedBlocks::new(&sources, self)),
            options: &ReaderOptions::default(),
            cache: self,
            meter: &Arc::new(Meter::new()),
            waker: &bell.waker(),
        })?;
        let ring = ByteRing::new(fill.downloads() * SPAN_ALIGN, fill.downloads(), || {})?;
        let done = CacheWarmed {
            objects: objects(&sources).count() as u64,
            bytes: objects(&sources).map(|id| sources.len_of(id)).sum(),
            ..CacheWarmed::default()
        };
        let warm = Warm {
            cache: self,
            fill,
            sources: &sources,
            ring,
            again: VecDeque::new(),
            settling: Vec::new(),
            flying: 0,
            failed: HashSet::new(),
            settled: 0,
            done,
        };
        warm.run(&bell, &mut seen)
    }
}

struct Warm<'a> {
    cache: &'a Cache,
    fill: Fill,
    sources: &'a Sources,
    ring: ByteRing,
    /// Blocks to try again.
    again: VecDeque<BlockId>,
    /// Blocks that were downloaded and are being written.
    settling: Vec<(BlockId, Instant)>,
    /// Number of reads in `fill`.
    flying: usize,
    /// Objects that cannot be kept.
    failed: HashSet<SourceId>,
    /// Bytes in the cache.
    settled: u64,
    done: CacheWarmed,
}

impl Warm<'_> {
    fn run(
        mut self,
        bell: &Bell,
        seen: &mut impl FnMut(&CacheWarmed) -> ControlFlow<()>,
    ) -> Result<CacheWarmed> {
        let mut left = blocks(self.sources, self.cache.block).peekable();
        let mut moved = Instant::now();
        let mut said = Instant::now();
        loop {
            let before = self.settled;
            self.settle();
            self.collect()?;
            self.submit(&mut left)?;
            if self.fill.is_full() {
                let why = self.fill.blocks().counts().why.unwrap_or_default();
                self.stop(&why);
                break;
            }
            if self.flying + self.settling.len() + self.again.len() == 0 && left.peek().is_none() {
                break;
            }
            if self.settled > before {
                moved = Instant::now();
            } else if bell.doze().is_ok() {
                bell.sleep(Some(Instant::now() + LOOK));
                bell.rise();
            }
            if moved.elapsed() > STALL {
                let why = self.fill.blocks().counts().why.unwrap_or_default();
                self.stop(&format!(
                    "no block was kept for {} s: {why}",
                    STALL.as_secs()
                ));
                break;
            }
            if said.elapsed() > SAY {
                said = Instant::now();
                self.sum(self.settled);
                if seen(&self.done).is_break() {
                    break;
                }
            }
        }
        Ok(self.end())
    }

    /// Submits blocks while there is room, those to try again first. Errors: those of
    /// [`collect`](Self::collect).
    fn submit(&mut self, blocks: &mut impl Iterator<Item = BlockId>) -> Result<()> {
        let mut tries = self.again.len();
        while self.flying + self.settling.len() < self.fill.downloads() {
            let old = if tries > 0 {
                self.again.pop_front()
            } else {
                None
            };
            tries = tries.saturating_sub(1);
            let Some(id) = old.or_else(|| {
                if self.again.is_empty() {
                    blocks.next()
                } else {
                    None
                }
            }) else {
                break;
            };
            if self.failed.contains(&id.source) {
                continue;
            }
            match self.ring.reserve(1) {
                Some(span) => {
                    let extent = Extent {
                        source: id.source,
                        offset: id.block * self.cache.block,
                        len: 1,
                    };
                    self.route(ReadOp {
                        tag: tag_of(id),
                        extent,
                        buf: span.into(),
                    })?;
                }
                // A thread still holds the buffer of a block that was returned.
                None => {
                    self.again.push_front(id);
                    break;
                }
            }
        }
        Ok(())
    }

    fn route(&mut self, op: ReadOp) -> Result<()> {
        let id = id_of(op.tag);
        match self.fill.bring(op) {
            CacheAnswer::Disk(_) => self.settled += self.len_of(id),
            CacheAnswer::Waits => self.flying += 1,
            CacheAnswer::Network(_)
                if matches!(self.fill.blocks().object(id.source.index()), Some(None)) =>
            {
                let why = self.fill.blocks().counts().why.unwrap_or_default();
                let error = Error::new(
                    ErrorKind::Io,
                    Stage::Write,
                    format!("the object is not cached: {why}"),
                );
                self.note(id.source, error.with_path(self.sources.path(id.source)));
            }
            // The disk is slow, or is not used for a while.
            CacheAnswer::Network(_) => self.again.push_back(id),
        }
        Ok(())
    }

    /// Collects the results from `fill`. Errors: the store is unreachable.
    fn collect(&mut self) -> Result<()> {
        let mut done = Vec::new();
        self.flying -= self.fill.collect(&mut done);
        for Completion { tag, result, .. } in done {
            let id = id_of(tag);
            match result {
                Ok(_) => self.settling.push((id, Instant::now())),
                Err(error) => self.fail(id.source, error)?,
            }
        }
        let ready = self.fill.take_ready();
        self.flying -= ready.len();
        for (op, to_network) in ready {
            let id = id_of(op.tag);
            if !to_network {
                self.route(op)?;
                continue;
            }
            // The store failed, or another process holds the block. A read from the store itself,
            // or from the mount, tells which. It reads the whole block, because one byte may arrive
            // where a block does not.
            let mut block = vec![0; self.len_of(id) as usize];
            match Blob::of_source(self.sources, id.source)
                .and_then(|blob| blob.read_at(op.extent.offset, &mut block))
            {
                Ok(()) => self.again.push_back(id),
                Err(error) => self.fail(id.source, self.sources.at(error, &op.extent))?,
            }
        }
        Ok(())
    }

    fn settle(&mut self) {
        for (id, since) in std::mem::take(&mut self.settling) {
            match self.has(id) {
                true => self.settled += self.len_of(id),
                false if since.elapsed() > SETTLE => self.again.push_back(id),
                false => self.settling.push((id, since)),
            }
        }
    }

    /// Records that an object cannot be read. Errors: no other object of the store can be read
    /// either.
    fn fail(&mut self, source: SourceId, error: Error) -> Result<()> {
        if out_of_reach(&error) {
            return Err(error);
        }
        self.note(source, error);
        Ok(())
    }

    /// Records that an object cannot be kept.
    fn note(&mut self, source: SourceId, error: Error) {
        if self.failed.insert(source) && self.done.errors.len() < ERRORS {
            self.done.errors.push(error);
        }
    }

    /// Records that nothing more can be kept.
    fn stop(&mut self, why: &str) {
        self.done
            .errors
            .push(Error::new(ErrorKind::Io, Stage::Write, why).with_path(&self.cache.dir));
    }

    fn has(&self, id: BlockId) -> bool {
        self.fill
            .blocks()
            .has(id.source.index(), id.block * self.cache.block, 1)
    }

    fn len_of(&self, id: BlockId) -> u64 {
        self.cache
            .block
            .min(self.sources.len_of(id.source) - id.block * self.cache.block)
    }

    /// Updates the counts for this many bytes in the cache.
    fn sum(&mut self, settled: u64) {
        self.done.kept = self.fill.blocks().counts().bytes.min(settled);
        self.done.found = settled - self.done.kept;
    }

    /// Ends all downloads, and counts the bytes in the cache.
    fn end(mut self) -> CacheWarmed {
        self.fill.end();
        let all = blocks(self.sources, self.cache.block);
        let settled = all
            .filter(|id| self.has(*id))
            .map(|id| self.len_of(id))
            .sum();
        self.sum(settled);
        self.done
    }
}

fn objects(sources: &Sources) -> impl Iterator<Item = SourceId> {
    sources.ids().filter(|id| sources.is_staged(*id))
}

fn blocks(sources: &Sources, block: u64) -> impl Iterator<Item = BlockId> {
    objects(sources).flat_map(move |source| {
        (0..sources.len_of(source).div_ceil(block)).map(move |block| BlockId { source, block })
    })
}

fn tag_of(id: BlockId) -> u64 {
    (id.source.index() as u64) << 32 | id.block
}

fn id_of(tag: u64) -> BlockId {
    BlockId {
        source: SourceId::at((tag >> 32) as usize),
        block: tag & u64::from(u32::MAX),
    }
}
