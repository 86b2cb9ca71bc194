//! A reader for files and objects together: each read goes to the reader of its source. With a cache, what it holds is
//! read as a file; then files on network mounts count as objects.
//!
//! ```text
//! submit ─┬─ file ──────────────────────────► reader of files ─────────────────┬─► wait
//!         └─ object ─► cache ─┬─ here ──────►    ▲ │ failed: gone              │
//!                             ├─ waits ─► ready ─┘ ▼                           │
//!                             └─ missing ───────► reader of objects ───────────┘
//! ```
//!
//! The driver sleeps in the reader of files; completions from network and cache wake it there.

use super::cache::{Fill, Route};
use super::{Completion, Extent, Footprint, ReadOp, ReadStats, Reader, Sealed, Sources, Waker};
use crate::error::{Error, ErrorKind, Stage};
use crate::memory::{MemoryTerm, Region};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

pub(super) struct Mixed {
    sources: Arc<Sources>,
    files: Box<dyn Reader>,
    objects: Box<dyn Reader>,
    cached: Option<Cached>,
}

/// A cache's part of the reader.
struct Cached {
    fill: Fill,
    /// Reads that the cache holds back.
    waiting: usize,
    /// Reads of its files, which the network serves if they fail.
    on_disk: HashMap<u64, Extent>,
    ready: Vec<(ReadOp, bool)>,
    /// Reads that come back from the cache end. Until the next read after the last of them.
    cancelled: bool,
}

impl Mixed {
    /// `objects` and `fill` wake the driver of `files`.
    pub(super) fn new(
        sources: Arc<Sources>,
        files: Box<dyn Reader>,
        objects: Box<dyn Reader>,
        fill: Option<Fill>,
    ) -> Self {
        let room = files.depth();
        let on_disk = HashMap::with_capacity(room);
        let cached =
            fill.map(|fill| Cached { fill, waiting: 0, on_disk, ready: Vec::with_capacity(room), cancelled: false });
        Self { sources, files, objects, cached }
    }

    /// A source that the table lacks goes to the reader of files, which refuses it by name.
    fn is_object(&self, extent: &Extent) -> bool {
        extent.source.index() < self.sources.count()
            && match self.cached {
                Some(_) => self.sources.is_staged(extent.source),
                None => self.sources.is_remote(extent.source),
            }
    }

    /// Sends a read of an object. There is room: neither reader has less than the depth of both.
    fn send(&mut self, op: ReadOp, to_network: bool) -> Result<(), ReadOp> {
        let Some(cached) = self.cached.as_mut().filter(|_| !to_network) else { return self.objects.submit(op) };
        match cached.fill.route(op) {
            Route::Network(op) => {
                cached.fill.kept().miss(1);
                self.objects.submit(op)
            }
            Route::Disk(op) => {
                cached.fill.kept().hit(1);
                cached.on_disk.insert(op.tag, op.extent);
                self.files.submit(op)
            }
            Route::Waits => {
                cached.waiting += 1;
                Ok(())
            }
        }
    }

    /// Sends on the reads that waited for the cache, and moves their completions to `out`.
    fn take_waiting(&mut self, out: &mut Vec<Completion>) {
        let Some(cached) = &mut self.cached else { return };
        cached.waiting -= cached.fill.collect(out);
        let mut ready = std::mem::take(&mut cached.ready);
        cached.fill.take_ready(&mut ready);
        cached.waiting -= ready.len();
        let cancelled = cached.cancelled;
        for (op, to_network) in ready.drain(..) {
            if cancelled {
                let error = Error::new(ErrorKind::Cancelled, Stage::Read, "");
                out.push(Completion { tag: op.tag, buf: op.buf, result: Err(error) });
                continue;
            }
            if let (true, Some(cached)) = (to_network, &self.cached) {
                cached.fill.kept().miss(1);
            }
            let sent = self.send(op, to_network);
            debug_assert!(sent.is_ok(), "a read that waited has its place in the depth");
        }
        if let Some(cached) = &mut self.cached {
            cached.ready = ready;
        }
    }

    /// Sends failed reads of the cache's files to the network. `from`: the first completion of the reader of files.
    fn read_again(&mut self, out: &mut Vec<Completion>, from: usize) {
        let mut at = from;
        while at < out.len() {
            let Some(cached) = &mut self.cached else { return };
            let failed = out[at].result.as_ref().err().map(Error::kind).filter(|kind| *kind != ErrorKind::Cancelled);
            match (cached.on_disk.remove(&out[at].tag), failed) {
                (Some(extent), Some(kind)) if !cached.cancelled => {
                    if matches!(kind, ErrorKind::NotFound | ErrorKind::Changed | ErrorKind::Truncated | ErrorKind::Io) {
                        cached.fill.kept().lose(extent.source.index());
                    }
                    let Completion { tag, buf, .. } = out.swap_remove(at);
                    let sent = self.send(ReadOp { tag, extent, buf }, true);
                    debug_assert!(sent.is_ok(), "the read has its place in the depth");
                }
                _ => at += 1,
            }
        }
    }
}

impl Sealed for Mixed {
    fn register(&mut self, regions: &[Arc<Region>]) -> Option<String> {
        self.files.register(regions)
    }
}

impl Reader for Mixed {
    fn depth(&self) -> usize {
        // Either reader may get all reads in flight.
        self.files.depth().min(self.objects.depth())
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        match self.is_object(extent) && self.cached.is_none() {
            true => self.objects.footprint(extent),
            // The network needs no more than the file.
            false => self.files.footprint(extent),
        }
    }

    fn terms(&self) -> Vec<MemoryTerm> {
        let cached = self.cached.as_ref().map(|cached| cached.fill.term());
        self.files.terms().into_iter().chain(self.objects.terms()).chain(cached).collect()
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
        match self.is_object(&op.extent) {
            true => self.send(op, false),
            false => self.files.submit(op),
        }
    }

    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>) {
        let before = out.len();
        self.take_waiting(out);
        self.objects.wait(out, Some(Duration::ZERO));
        let timeout = if out.len() > before { Some(Duration::ZERO) } else { timeout };
        let from = out.len();
        self.files.wait(out, timeout);
        self.read_again(out, from);
        self.take_waiting(out);
        self.objects.wait(out, Some(Duration::ZERO));
    }

    fn in_flight(&self) -> usize {
        self.files.in_flight() + self.objects.in_flight() + self.cached.as_ref().map_or(0, |cached| cached.waiting)
    }

    fn cancel(&mut self) {
        if let Some(cached) = &mut self.cached {
            cached.cancelled = true;
            cached.fill.cancel();
        }
        self.files.cancel();
        self.objects.cancel();
    }

    fn waker(&self) -> Waker {
        self.files.waker()
    }

    fn stats(&self) -> ReadStats {
        let (mut all, objects) = (self.files.stats(), self.objects.stats());
        all.ops += objects.ops;
        all.failed += objects.failed;
        all.bytes_asked += objects.bytes_asked;
        all.bytes_moved += objects.bytes_moved;
        all.retries += objects.retries;
        all
    }

    fn broken(&self) -> Option<Error> {
        self.files.broken()
    }
}
