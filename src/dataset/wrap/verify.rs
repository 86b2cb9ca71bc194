//! Reads a whole dataset and names every sample that is damaged, where a loader would stop at the first.
//!
//! ```text
//! samples, in blocks ──► threads: extents ──read──► open (checksums) ──► lengths, decoders ──► ledger
//! ```
//!
//! Plain reads through the page cache, on threads of its own; no pipeline. What is found is what the format can tell:
//! the guide [formats](crate::guide::formats) has a table of what each verifies.

use crate::dataset::{ChunkBuf, Chunked, Dataset, Part, Parts};
use crate::decode::{Decoder, Scratch, Single};
use crate::error::{Error, ErrorKind, Result, Stage, panicked};
use crate::storage::{Blob, Extent, SourceId};
use crate::tensor::{Encoding, Field, Shape};
use bytes::Bytes;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Samples that a thread takes at a time.
const BLOCK: u64 = 64;
/// Damaged samples that are listed by default; more are counted.
const LISTED: usize = 10_000;

/// Settings for reading all of a dataset.
#[derive(Clone)]
#[must_use]
pub struct Verify {
    decoders: Vec<(String, Arc<dyn Decoder>)>,
    workers: usize,
    listed: usize,
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Samples looked at.
    pub samples: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Damaged ones among the samples.
    pub damaged: u64,
}

impl Default for Verify {
    fn default() -> Self {
        Self::new()
    }
}

impl Verify {
    /// Every checksum, length and structure; no pictures are decoded.
    pub fn new() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { decoders: Vec::new(), workers, listed: LISTED }
    }

    /// Also decodes the field `name` of every sample.
    pub fn decode_field(mut self, name: &str, decoder: impl Decoder) -> Self {
        self.decoders.push((name.into(), Arc::new(decoder)));
        self
    }

    /// Threads. Default: one per core that the process may use.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.max(1);
        self
    }

    /// Damaged samples that are listed at most; all are counted. Default: 10,000.
    pub fn listed(mut self, most: usize) -> Self {
        self.listed = most;
        self
    }

    /// Reads everything. `progress` is called about once per thousand samples, from any thread; it may end the work.
    ///
    /// Gives the counts and the errors of damaged samples in the order of their ids, each with path, place and sample.
    /// An error of a chunk stands for all of its samples.
    ///
    /// Errors: a decoder for a field that the dataset has not; threads that cannot be started.
    pub fn run(
        &self,
        dataset: &dyn Dataset,
        progress: impl Fn(Verified) -> ControlFlow<()> + Sync,
    ) -> Result<(Verified, Vec<Error>)> {
        let fields = self.fields(dataset)?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.workers).build().map_err(|source| {
            Error::new(ErrorKind::Config, Stage::Build, "threads cannot be started").with_source(source)
        })?;
        let work = Work {
            dataset,
            fields,
            listed: self.listed,
            samples: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            ledger: Mutex::new(Vec::new()),
            progress: &progress,
        };
        pool.install(|| match dataset.chunked() {
            Some(chunks) => {
                let all = 0..chunks.starts().len() - 1;
                all.into_par_iter().for_each(|chunk| work.chunk(chunks, chunk));
            }
            None => {
                let blocks = 0..dataset.len().div_ceil(BLOCK);
                blocks.into_par_iter().for_each(|block| {
                    let first = block * BLOCK;
                    work.samples(first..(first + BLOCK).min(dataset.len()));
                });
            }
        });
        let done = work.done();
        let mut ledger = work.ledger.into_inner().unwrap_or_else(PoisonError::into_inner);
        ledger.sort_by_key(|error| error.site().sample);
        Ok((done, ledger))
    }

    fn fields(&self, dataset: &dyn Dataset) -> Result<Vec<Check>> {
        let schema = dataset.schema();
        for (name, _) in &self.decoders {
            if !schema.iter().any(|field| field.name == *name) {
                let message = format!("no field `{name}` to decode");
                return Err(Error::new(ErrorKind::Config, Stage::Build, message));
            }
        }
        let check = |field: &crate::tensor::EncodedField| {
            let decoder = self.decoders.iter().find(|(name, _)| *name == field.name);
            Ok(match (decoder, &field.encoding) {
                (Some((_, decoder)), _) => {
                    // Found now rather than for each sample.
                    decoder.outputs(field)?;
                    Check::Decode(field.clone(), decoder.clone())
                }
                (None, Encoding::Raw { .. }) => field.as_raw().map_or(Check::Any, Check::Raw),
                (None, _) => Check::Any,
            })
        };
        schema.iter().map(check).collect()
    }
}

/// What a field's bytes are held against.
enum Check {
    Any,
    Raw(Field),
    Decode(crate::tensor::EncodedField, Arc<dyn Decoder>),
}

struct Work<'a, P> {
    dataset: &'a dyn Dataset,
    fields: Vec<Check>,
    listed: usize,
    samples: AtomicU64,
    bytes: AtomicU64,
    damaged: AtomicU64,
    stopped: AtomicBool,
    ledger: Mutex<Vec<Error>>,
    progress: &'a P,
}

/// What a thread keeps from sample to sample.
#[derive(Default)]
struct Keep {
    blob: Option<(SourceId, Blob)>,
    bytes: Vec<u8>,
    opened: Vec<u8>,
    decoders: Vec<Option<Single>>,
}

impl<P: Fn(Verified) -> ControlFlow<()> + Sync> Work<'_, P> {
    fn done(&self) -> Verified {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Verified { samples: get(&self.samples), bytes: get(&self.bytes), damaged: get(&self.damaged) }
    }

    fn note(&self, samples: u64) {
        let before = self.samples.fetch_add(samples, Ordering::Relaxed);
        if before / 1000 != (before + samples) / 1000 && (self.progress)(self.done()).is_break() {
            self.stopped.store(true, Ordering::Relaxed);
        }
    }

    fn damage(&self, error: Error, samples: u64) {
        self.damaged.fetch_add(samples, Ordering::Relaxed);
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        if ledger.len() < self.listed {
            ledger.push(error);
        }
    }

    fn samples(&self, ids: Range<u64>) {
        let mut keep = Keep::default();
        let count = ids.end - ids.start;
        for id in ids {
            if self.stopped.load(Ordering::Relaxed) {
                return;
            }
            let seen = catch_unwind(AssertUnwindSafe(|| self.sample(id, &mut keep)));
            if let Err(error) = seen.unwrap_or_else(|panic| Err(panicked(&*panic, Stage::Decode))) {
                self.damage(error.with_sample(id), 1);
                // Whatever a panic left half done is made anew.
                keep.decoders.clear();
            }
        }
        self.note(count);
    }

    fn sample(&self, id: u64, keep: &mut Keep) -> Result<()> {
        let mut parts = Parts::new();
        self.dataset.extents(id, &mut parts)?;
        let mut last = None;
        for (field, part) in parts.iter() {
            let site = |error: Error| match part.extent() {
                Some(extent) => self.at(error, &extent),
                None => error,
            };
            let bytes = match part.extent() {
                None => {
                    if let Part::Inline(bytes) = part {
                        bytes
                    } else {
                        &[]
                    }
                }
                Some(extent) => {
                    if !part.shares(last.replace(part)) {
                        self.read(&extent, keep)?;
                        if part.is_checked() {
                            self.dataset.check(id, field, &keep.bytes).map_err(site)?;
                        }
                    }
                    &keep.bytes
                }
            };
            keep.opened.clear();
            let bytes = match part {
                Part::Framed(_) => self.dataset.open(id, field, bytes, &mut keep.opened).map_err(site)?,
                _ => bytes,
            };
            self.check(id, field, bytes, &mut keep.decoders).map_err(site)?;
        }
        Ok(())
    }

    fn at(&self, error: Error, extent: &Extent) -> Error {
        error.with_path(self.dataset.sources().path(extent.source)).with_range(extent.offset, extent.len)
    }

    fn check(&self, id: u64, field: usize, bytes: &[u8], decoders: &mut Vec<Option<Single>>) -> Result<()> {
        let wrong = |field: &Field| {
            let message = format!("`{}` has {} bytes, its rows {}", field.name(), bytes.len(), field.row_bytes());
            Err(Error::new(ErrorKind::Shape, Stage::Decode, message))
        };
        match self.fields.get(field) {
            Some(Check::Raw(raw)) => {
                let fits = match raw.shape() {
                    Shape::Fixed(_) => bytes.len() == raw.row_bytes(),
                    Shape::UpTo { max, .. } => {
                        bytes.len() <= raw.row_bytes() && bytes.len().is_multiple_of(raw.row_bytes() / max)
                    }
                };
                if fits { Ok(()) } else { wrong(raw) }
            }
            Some(Check::Decode(input, decoder)) => {
                decoders.resize_with(self.fields.len(), || None);
                let single = match &mut decoders[field] {
                    Some(single) => single,
                    place => place.insert(Single::new(decoder.clone(), input)?),
                };
                single.decode(bytes, 0, 0, id)
            }
            _ => Ok(()),
        }
    }

    /// The bytes of an extent into the thread's buffer.
    fn read(&self, extent: &Extent, keep: &mut Keep) -> Result<()> {
        let sources = self.dataset.sources();
        if extent.source.index() >= sources.count() {
            let message = format!("the dataset names source {} of {}", extent.source.index(), sources.count());
            return Err(Error::new(ErrorKind::User, Stage::Read, message));
        }
        let end = extent.offset.checked_add(extent.len).filter(|end| *end <= sources.len_of(extent.source));
        if end.is_none() {
            let message = "the extent ends behind the end of its source";
            return Err(self.at(Error::new(ErrorKind::Truncated, Stage::Read, message), extent));
        }
        keep.bytes.resize(extent.len as usize, 0);
        if keep.blob.as_ref().is_none_or(|(source, _)| *source != extent.source) {
            keep.blob = Some((extent.source, Blob::of_source(sources, extent.source)?));
        }
        if let Some((_, blob)) = &keep.blob {
            blob.read_at(extent.offset, &mut keep.bytes)?;
        }
        self.bytes.fetch_add(extent.len, Ordering::Relaxed);
        Ok(())
    }

    fn chunk(&self, chunks: &dyn Chunked, chunk: usize) {
        if self.stopped.load(Ordering::Relaxed) {
            return;
        }
        let rows = chunks.starts()[chunk]..chunks.starts()[chunk + 1];
        let count = rows.end - rows.start;
        let seen = catch_unwind(AssertUnwindSafe(|| self.open_chunk(chunks, chunk, rows.clone())));
        if let Err(error) = seen.unwrap_or_else(|panic| Err(panicked(&*panic, Stage::Decode))) {
            let more = if count > 1 { format!("{count} samples in ") } else { String::new() };
            self.damage(
                error.within(format_args!("{more}{}", chunks.chunk_name(chunk))).with_sample(rows.start),
                count,
            );
        }
        self.note(count);
    }

    fn open_chunk(&self, chunks: &dyn Chunked, chunk: usize, rows: Range<u64>) -> Result<()> {
        let mut extents = Vec::new();
        chunks.chunk_extents(chunk, &mut extents)?;
        let mut keep = Keep::default();
        let mut pieces = Vec::with_capacity(extents.len());
        for extent in &extents {
            self.read(extent, &mut keep)?;
            pieces.push(Bytes::from(std::mem::take(&mut keep.bytes)));
        }
        let opened = chunks.chunk_bytes(chunk).opened.saturating_add(64 * self.fields.len() as u64);
        let mut buffer = ChunkBuf::new(usize::try_from(opened).unwrap_or(usize::MAX))?;
        buffer.begin((rows.end - rows.start) as usize, self.fields.len());
        chunks.open_chunk(chunk, &pieces, &mut Scratch::default(), &mut buffer)?;
        if let Some((field, there)) = buffer.incomplete() {
            let message = format!("{there} rows of field {field} in a chunk of {}", rows.end - rows.start);
            return Err(Error::new(ErrorKind::Decode, Stage::Decode, message));
        }
        for id in rows.clone() {
            for field in 0..self.fields.len() {
                let bytes = buffer.row(field, (id - rows.start) as usize).unwrap_or_default();
                if let Err(error) = self.check(id, field, bytes, &mut keep.decoders) {
                    self.damage(error.within(chunks.chunk_name(chunk)).with_sample(id), 1);
                }
            }
        }
        Ok(())
    }
}
