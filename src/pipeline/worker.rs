//! One worker: what it keeps from sample to sample, and how user code runs on it.

use super::chunks::Encoded;
use super::sample::Samples;
use super::task::{Job, Sample};
use super::watchdog::Doing;
use crate::decode::Scratch;
use crate::error::{Result, Stage, panicked};
use crate::memory::Rows;
use crate::storage::{Cached, Extent};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What one worker keeps from sample to sample.
pub(crate) struct Worker {
    pub(crate) scratch: Scratch,
    /// The sample that is being looked up, or stands in for another one.
    pub(crate) sample: Sample,
    /// Encoded bytes from the page cache.
    pub(crate) bytes: Vec<u8>,
    /// How many the rows of the present run had from there: told once for them all.
    pub(crate) cached: u64,
    /// The same of a whole chunk.
    pub(crate) chunk: Encoded,
    /// Where the rows of a run are: which chunk of those that are held, which row in it.
    pub(crate) places: Vec<(u32, u32)>,
    pub(crate) ids: Vec<u64>,
}

impl Worker {
    pub(crate) fn new(number: usize, cached_bytes: usize, chunk: Encoded) -> Self {
        let mut scratch = Scratch::default();
        scratch.worker = Some(number);
        Self {
            scratch,
            sample: Sample::default(),
            bytes: vec![0; cached_bytes],
            cached: 0,
            chunk,
            places: Vec::new(),
            ids: Vec::new(),
        }
    }

    /// It begins something, for whoever waits.
    pub(crate) fn begins(&self, samples: &Samples, doing: Doing, sample: Option<u64>) {
        samples.watch.worker(self.scratch.worker, |cell| cell.begin(doing, sample));
    }

    /// Runs code that may be the user's or a third party's; a panic becomes an error and the worker's scratch is made anew.
    pub(crate) fn guarded<R>(&mut self, work: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.scratch.mapping = false;
        match catch_unwind(AssertUnwindSafe(|| work(self))) {
            Ok(result) => result,
            Err(panic) => {
                let stage = if self.scratch.mapping { Stage::Map } else { Stage::Decode };
                let number = self.scratch.worker;
                self.scratch = Scratch::default();
                self.scratch.worker = number;
                Err(panicked(panic, stage))
            }
        }
    }

    /// Asks for sample `id`, brings its bytes by `read`, by way of `buffer` where they do not go into the row itself, and fills the
    /// first row; false when something is missing.
    pub(crate) fn fill_by(
        &mut self,
        samples: &Samples,
        job: &Job,
        id: u64,
        rows: &mut Rows,
        buffer: &mut [u8],
        mut read: impl FnMut(&Extent, &mut [u8]) -> Cached,
    ) -> Result<bool> {
        let Self { scratch, sample, .. } = self;
        samples.ask(id, sample, rows)?;
        let number = scratch.worker;
        let fetch = |extent: &Extent, to: &mut [u8]| {
            samples.watch.worker(number, |cell| cell.read(Some(id), extent));
            let read = read(extent, to);
            samples.watch.worker(number, |cell| cell.begin(Doing::Decoding, Some(id)));
            read
        };
        if !samples.fetch(sample, Some(rows), buffer, fetch)? {
            return Ok(false);
        }
        samples.fill(job, id, rows, scratch, samples.given(sample, buffer))?;
        Ok(true)
    }
}
