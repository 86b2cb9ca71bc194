//! A reader for files and objects together: each read goes to the reader of its source.
//!
//! The driver sleeps in the reader of files; completions from the network wake it there.

use super::{Completion, Extent, Footprint, ReadOp, ReadStats, Reader, Sealed, Sources, Waker};
use crate::error::Error;
use crate::memory::Region;
use std::sync::Arc;
use std::time::Duration;

pub(super) struct Mixed {
    sources: Arc<Sources>,
    files: Box<dyn Reader>,
    objects: Box<dyn Reader>,
}

impl Mixed {
    /// `objects` wakes the driver of `files` for each completion.
    pub(super) fn new(sources: Arc<Sources>, files: Box<dyn Reader>, objects: Box<dyn Reader>) -> Self {
        Self { sources, files, objects }
    }

    /// A source that the table lacks goes to the reader of files, which refuses it by name.
    fn is_object(&self, extent: &Extent) -> bool {
        extent.source.index() < self.sources.count() && self.sources.is_remote(extent.source)
    }
}

impl Sealed for Mixed {
    fn register(&mut self, regions: &[Arc<Region>]) -> Option<String> {
        self.files.register(regions)
    }
}

impl Reader for Mixed {
    fn name(&self) -> &'static str {
        match self.files.name() {
            "io_uring" => "io_uring and network",
            "mmap" => "mmap and network",
            _ => "pread and network",
        }
    }

    fn depth(&self) -> usize {
        // Either reader may get all reads in flight.
        self.files.depth().min(self.objects.depth())
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        match self.is_object(extent) {
            true => self.objects.footprint(extent),
            false => self.files.footprint(extent),
        }
    }

    fn bytes_beside(&self) -> usize {
        self.files.bytes_beside() + self.objects.bytes_beside()
    }

    fn mem_align(&self) -> usize {
        self.files.mem_align()
    }

    fn submit(&mut self, op: ReadOp) -> std::result::Result<(), ReadOp> {
        if self.in_flight() == self.depth() {
            return Err(op);
        }
        match self.is_object(&op.extent) {
            true => self.objects.submit(op),
            false => self.files.submit(op),
        }
    }

    fn wait(&mut self, out: &mut Vec<Completion>, timeout: Option<Duration>) {
        let before = out.len();
        self.objects.wait(out, Some(Duration::ZERO));
        let timeout = if out.len() > before { Some(Duration::ZERO) } else { timeout };
        self.files.wait(out, timeout);
        self.objects.wait(out, Some(Duration::ZERO));
    }

    fn in_flight(&self) -> usize {
        self.files.in_flight() + self.objects.in_flight()
    }

    fn cancel(&mut self) {
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
