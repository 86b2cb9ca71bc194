//! The reader that passes each read to the reader of its source, by a list of routes that is made
//! once. With a cache, reads of objects and of files on network mounts go to the cache first. Bytes
//! that the cache holds are read as a file.
//!
//! ```text
//! submit ─┬─ file ───────────────────────────► reader of files ─────────────────┬─► wait
//!         └─ object, mount ─► cache ─┬─ here ────►    ▲ │ failed: gone          │
//!                                    ├─ waits ─► ready ─┘ ▼                     │
//!                                    └─ missing ─► readers of objects, mounts ──┘
//! ```
//!
//! The driver sleeps in the reader of files; completions from the other readers and the cache wake
//! it there.

use crate::cache::{CacheAnswer, Fill};
use feedline_base::error::{Error, ErrorKind};
use feedline_core::memory::{MemoryTerm, Region};
use feedline_core::storage::{Extent, Sources};
use feedline_reader::counters::add;
use feedline_reader::reader::sealed::Sealed;
use feedline_reader::{Completion, Footprint, ReadOp, Reader, Waker};
use feedline_report::meter::ReadStats;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// The reader of a source, for bytes that no cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// A file that no cache stages, or memory.
    File,
    /// A file on a network mount, which a cache stages.
    Mount,
    /// An object; staged if there is a cache.
    Object,
}

/// The route of each source.
pub(super) fn plan_routes(sources: &Sources) -> Box<[Route]> {
    sources
        .ids()
        .map(|id| match (sources.is_remote(id), sources.is_staged(id)) {
            (true, _) => Route::Object,
            (false, true) => Route::Mount,
            (false, false) => Route::File,
        })
        .collect()
}

pub(super) struct Router {
    routes: Box<[Route]>,
    files: Box<dyn Reader>,
    /// The readers of other routes.
    others: Vec<(Route, Box<dyn Reader>)>,
    cached: Option<CachedReads>,
}

/// The router's state for a cache.
struct CachedReads {
    fill: Fill,
    /// Number of reads that wait in the cache.
    waiting: usize,
    /// Reads of the cache's files, by tag. If one fails, the network serves it.
    on_disk: HashMap<u64, Extent>,
    /// Whether reads that return from the cache are cancelled. The next read after the last of them
    /// resets it.
    cancelled: bool,
}

impl Router {
    /// `others` has a reader for each route except [`Route::File`]. They and `fill` wake the driver
    /// of `files`.
    pub(super) fn new(
        routes: Box<[Route]>,
        files: Box<dyn Reader>,
        others: Vec<(Route, Box<dyn Reader>)>,
        fill: Option<Fill>,
    ) -> Self {
        let room = files.depth();
        let cached = fill.map(|fill| CachedReads {
            fill,
            waiting: 0,
            on_disk: HashMap::with_capacity(room),
            cancelled: false,
        });
        Self {
            routes,
            files,
            others,
            cached,
        }
    }

    /// A source that is not in the list goes to the reader of files, whose error names it.
    fn route(&self, extent: &Extent) -> Route {
        self.routes
            .get(extent.source.index())
            .copied()
            .unwrap_or(Route::File)
    }

    /// Submits a read to the reader of a route. The reader has room: no reader's depth is less than
    /// the router's.
    fn give(&mut self, route: Route, op: ReadOp) -> Result<(), ReadOp> {
        match self.others.iter_mut().find(|(of, _)| *of == route) {
            Some((_, reader)) => reader.submit(op),
            None => self.files.submit(op),
        }
    }

    /// Forwards a read: to the cache first, unless `past_cache`.
    fn send(&mut self, op: ReadOp, past_cache: bool) -> Result<(), ReadOp> {
        let route = self.route(&op.extent);
        let Some(cached) = self
            .cached
            .as_mut()
            .filter(|_| route != Route::File && !past_cache)
        else {
            return self.give(route, op);
        };
        match cached.fill.route(op) {
            CacheAnswer::Network(op) => {
                add(&cached.fill.blocks().counts.misses, 1);
                self.give(route, op)
            }
            CacheAnswer::Disk(op) => {
                add(&cached.fill.blocks().counts.hits, 1);
                cached.on_disk.insert(op.tag, op.extent);
                self.files.submit(op)
            }
            CacheAnswer::Waits => {
                cached.waiting += 1;
                Ok(())
            }
        }
    }

    /// Collects the completions of the cache and of the other readers, and forwards the reads that
    /// waited for the cache.
    fn take_others(&mut self, out: &mut Vec<Completion>) {
        self.take_waiting(out);
        self.others
            .iter_mut()
            .for_each(|(_, reader)| reader.wait(out, Some(Duration::ZERO)));
    }

    fn take_waiting(&mut self, out: &mut Vec<Completion>) {
        let Some(cached) = &mut self.cached else {
            return;
        };
        cached.waiting -= cached.fill.collect(out);
        let ready = cached.fill.take_ready();
        cached.waiting -= ready.len();
        let cancelled = cached.cancelled;
        for (op, past_cache) in ready {
            if cancelled {
                out.push(op.cancelled());
                continue;
            }
            if let (true, Some(cached)) = (past_cache, &self.cached) {
                add(&cached.fill.blocks().counts.misses, 1);
            }
            let sent = self.send(op, past_cache);
            debug_assert!(sent.is_ok(), "a read that waited counts in the depth");
        }
    }

    /// Sends failed reads of the cache's files to the network. Completions of the reader of files
    /// start at index `from`.
    fn read_again(&mut self, out: &mut Vec<Completion>, from: usize) {
        let mut at = from;
        while at < out.len() {
            let Some(cached) = &mut self.cached else {
                return;
            };
            let failed = out[at]
                .result
                .as_ref()
                .err()
                .map(Error::kind)
                .filter(|kind| *kind != ErrorKind::Cancelled);
            match (cached.on_disk.remove(&out[at].tag), failed) {
                (Some(extent), Some(kind)) if !cached.cancelled => {
                    if matches!(
                        kind,
                        ErrorKind::NotFound
                            | ErrorKind::Changed
                            | ErrorKind::Truncated
                            | ErrorKind::Io
                    ) {
                        cached.fill.blocks().lose(extent.source.index());
                    }
                    let Completion { tag, buf, .. } = out.swap_remove(at);
                    let sent = self.send(ReadOp { tag, extent, buf }, true);
                    debug_assert!(sent.is_ok(), "the read counts in the depth");
                }
                _ => at += 1,
            }
        }
    }
}

impl Sealed for Router {
    fn register(&mut self, regions: &[Arc<Region>]) -> Option<String> {
        self.files.register(regions)
    }
}

impl Reader for Router {
    fn depth(&self) -> usize {
        // Any reader may get all reads in flight.
        self.others
            .iter()
            .fold(self.files.depth(), |depth, (_, reader)| {
                depth.min(reader.depth())
            })
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        let route = self.route(extent);
        // Bytes in a cache are read as a file; a read from the network needs no larger buffer.
        match self
            .others
            .iter()
            .find(|(of, _)| *of == route && self.cached.is_none())
        {
            Some((_, reader)) => reader.footprint(extent),
            None => self.files.footprint(extent),
        }
    }

    fn terms(&self) -> Vec<MemoryTerm> {
        let readers =
            std::iter::once(&self.files).chain(self.others.iter().map(|(_, reader)| reader));
        let cached = self.cached.as_ref().map(|cached| cached.fill.term());
        let routes = MemoryTerm::NETWORK.of(1, size_of_val(&*self.routes));
        readers
            .flat_map(|reader| reader.terms())
            .chain(cached)
            .chain([routes])
            .collect()
    }

    fn mem_align(&self) -> usize {
        self.files.mem_align()
    }

    fn submit(&mut self, op: ReadOp) -> Result<(), ReadOp> {
        if self.in_flight() == self.depth() {
            return Err(op);
        }
        if self.in_flight() == 0
            && let Some(cached) = &mut self.cached
        {
            cached.cancelled = false;
        }
        self.send(op, false)
    }

    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>) {
        let before = out.len();
        self.take_others(out);
        let timeout = if out.len() > before {
            Some(Duration::ZERO)
        } else {
            timeout
        };
        let from = out.len();
        self.files.wait(out, timeout);
        self.read_again(out, from);
        self.take_others(out);
    }

    fn in_flight(&self) -> usize {
        let others: usize = self
            .others
            .iter()
            .map(|(_, reader)| reader.in_flight())
            .sum();
        self.files.in_flight() + others + self.cached.as_ref().map_or(0, |cached| cached.waiting)
    }

    fn cancel(&mut self) {
        if let Some(cached) = &mut self.cached {
            cached.cancelled = true;
            cached.fill.cancel();
        }
        self.files.cancel();
        self.others
            .iter_mut()
            .for_each(|(_, reader)| reader.cancel());
    }

    fn waker(&self) -> Waker {
        self.files.waker()
    }

    fn stats(&self) -> ReadStats {
        let mut all = self.files.stats();
        for other in self.others.iter().map(|(_, reader)| reader.stats()) {
            all.ops += other.ops;
            all.failed += other.failed;
            all.bytes_asked += other.bytes_asked;
            all.bytes_moved += other.bytes_moved;
            all.short_reads += other.short_reads;
            all.retries += other.retries;
            all.direct_reads += other.direct_reads;
            all.buffered_reads += other.buffered_reads;
            all.fallbacks += other.fallbacks;
            all.opens += other.opens;
            all.enters += other.enters;
        }
        all
    }

    fn broken(&self) -> Option<Error> {
        self.files.broken()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_base::metadata::Meta;
    use std::path::Path;

    #[test]
    fn each_source_has_one_route() {
        let mut sources = Sources::new();
        sources.file("/local/a", 10).unwrap();
        let mounted = sources.file("/mount/b", 10).unwrap();
        sources.memory([1].into());
        sources
            .add(Path::new("s3://bucket/c"), &Meta::of_object(10, None))
            .unwrap();
        sources.file("/mount/d", 10).unwrap();
        use Route::{File, Mount, Object};
        // Without a cache, the reader of files reads mounts, too.
        assert_eq!(plan_routes(&sources)[..], [File, File, File, Object, File]);
        let staged = sources.with_mounts([mounted].into_iter());
        assert_eq!(plan_routes(&staged)[..], [File, Mount, File, Object, Mount]);
    }
}
