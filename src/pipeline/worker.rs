//! One worker: its state between samples, and how user code runs on it.

use super::chunks::Encoded;
use super::sample::Samples;
use super::task::{EpochJob, Sample};
use super::watchdog::Doing;
use feedline_base::error::Result;
use feedline_core::decode::Scratch;
use feedline_core::memory::Rows;
use feedline_core::storage::Extent;
use feedline_reader::Cached;

/// The state that one worker keeps between samples.
pub(crate) struct Worker {
    pub(crate) scratch: Scratch,
    /// The sample being looked up, or the candidate for a substitute.
    pub(crate) sample: Sample,
    /// Encoded bytes from the page cache.
    pub(crate) bytes: Vec<u8>,
    /// Bytes that the rows of the current run got from the page cache. Counted once per run.
    pub(crate) cached: u64,
    /// Encoded bytes of a whole chunk.
    pub(crate) chunk: Encoded,
    /// Location of each row of a run: the index of its chunk among the open chunks, and the row in
    /// that chunk.
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

    /// Marks the start of an activity, for threads that wait for a batch.
    pub(crate) fn begins(&self, samples: &Samples, doing: Doing, sample: Option<u64>) {
        samples
            .watch
            .worker(self.scratch.worker, |cell| cell.begin(doing, sample));
    }

    /// Runs code that may be the user's or a third party's. A panic becomes an error, and the
    /// worker gets a new scratch.
    pub(crate) fn guarded<R>(
        &mut self,
        samples: &Samples,
        work: impl FnOnce(&mut Self) -> Result<R>,
    ) -> Result<R> {
        let done = Scratch::guarded(self, |worker| &mut worker.scratch, work);
        done.map_err(|error| samples.in_field(error, &self.scratch))
    }

    /// Asks for sample `id`, fetches its bytes with `read` and fills the first row. Bytes that are
    /// not read directly into the row go through `buffer`. Returns false if bytes are missing.
    pub(crate) fn fill_by(
        &mut self,
        samples: &Samples,
        job: &EpochJob,
        id: u64,
        rows: &mut Rows,
        buffer: &mut [u8],
        mut read: impl FnMut(&Extent, &mut [u8]) -> Cached,
    ) -> Result<bool> {
        let Self {
            scratch, sample, ..
        } = self;
        samples.ask(id, sample, rows)?;
        let number = scratch.worker;
        let fetch = |extent: &Extent, to: &mut [u8]| {
            samples
                .watch
                .worker(number, |cell| cell.read(Some(id), extent));
            let read = read(extent, to);
            samples
                .watch
                .worker(number, |cell| cell.begin(Doing::Decoding, Some(id)));
            read
        };
        if !samples.fetch(sample, Some(rows), buffer, fetch)? {
            return Ok(false);
        }
        samples.fill(job, id, rows, scratch, samples.given(sample, buffer))?;
        Ok(true)
    }
}
