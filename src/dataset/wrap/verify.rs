//! Reads a whole dataset and names every damaged sample; a loader would stop at the first.
//!
//! ```text
//! samples, in blocks ──► threads: extents ──read──► open (checksums) ──► lengths, decoders ──► ledger
//! ```
//!
//! It uses plain reads through the page cache, on its own threads; no pipeline. It finds the damage
//! that the format can detect: the guide [formats](crate::guide::formats) has a table of each
//! format's checks.

use feedline_base::error::{Error, ErrorKind, Result, Stage, caught};
use feedline_base::sync::Hold;
use feedline_base::thread;
use feedline_core::dataset::sample::Plain;
use feedline_core::dataset::{Chunked, Dataset, Verified, no_field};
use feedline_core::decode::{Decoder, Single};
use feedline_core::tensor::{EncodedField, Field, Shape};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Samples per unit of work of a thread.
const BLOCK: u64 = 64;
/// Default of [`Verify::listed`].
const LISTED: usize = 10_000;

/// Builder of a full verification: reads every sample of a dataset and lists the damaged ones.
#[derive(Clone)]
#[must_use]
pub struct Verify {
    decoders: Vec<(String, Arc<dyn Decoder>)>,
    workers: usize,
    listed: usize,
}

impl Default for Verify {
    fn default() -> Self {
        Self::new()
    }
}

impl Verify {
    /// Checks every checksum, length and structure; decodes no pictures.
    pub fn new() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            decoders: Vec::new(),
            workers,
            listed: LISTED,
        }
    }

    /// Also decodes the field `name` of every sample.
    pub fn decode_field(mut self, name: &str, decoder: impl Decoder) -> Self {
        self.decoders.push((name.into(), Arc::new(decoder)));
        self
    }

    /// Sets the number of threads. Default: one per core that the process may use.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.max(1);
        self
    }

    /// Sets the maximum number of listed damaged samples; all are counted. Default: 10,000.
    pub fn listed(mut self, most: usize) -> Self {
        self.listed = most;
        self
    }

    /// Reads the whole dataset. `progress` is called about once per thousand samples, on any
    /// thread; it may stop the work.
    ///
    /// Returns the counts, and the damaged samples' errors in the order of ids, each with its path,
    /// offset and sample. An error of a chunk counts for all of its samples.
    ///
    /// Errors: a decoder for a missing field; threads that cannot be started.
    pub fn run(
        &self,
        dataset: &dyn Dataset,
        progress: impl Fn(Verified) -> ControlFlow<()> + Sync,
    ) -> Result<(Verified, Vec<Error>)> {
        let fields = self.fields(dataset)?;
        let (pool, _) = thread::pool("checks", "feedline-check", self.workers, |_| || ())?;
        let work = VerifyWork {
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
                all.into_par_iter()
                    .for_each(|chunk| work.chunk(chunks, chunk));
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
        let mut ledger = work
            .ledger
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        ledger.sort_by_key(|error| error.site().sample);
        Ok((done, ledger))
    }

    fn fields(&self, dataset: &dyn Dataset) -> Result<Vec<Check>> {
        let schema = dataset.schema();
        for (name, _) in &self.decoders {
            if !schema.iter().any(|field| field.name == *name) {
                return Err(Error::new(
                    ErrorKind::Config,
                    Stage::Build,
                    no_field(schema, name),
                ));
            }
        }
        schema
            .iter()
            .map(|field| {
                let decoder = self.decoders.iter().find(|(name, _)| *name == field.name);
                let Some((_, decoder)) = decoder else {
                    return Ok(field.as_raw().map_or(Check::Any, Check::Raw));
                };
                // Report a wrong decoder once, not for each sample.
                decoder.outputs(field)?;
                Ok(Check::Decode(field.clone(), decoder.clone()))
            })
            .collect()
    }
}

/// Check of a field's bytes.
enum Check {
    Any,
    Raw(Field),
    Decode(EncodedField, Arc<dyn Decoder>),
}

struct VerifyWork<'a, P> {
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

impl<P: Fn(Verified) -> ControlFlow<()> + Sync> VerifyWork<'_, P> {
    fn done(&self) -> Verified {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Verified {
            samples: get(&self.samples),
            bytes: get(&self.bytes),
            damaged: get(&self.damaged),
        }
    }

    fn note(&self, samples: u64) {
        let before = self.samples.fetch_add(samples, Ordering::Relaxed);
        if before / 1000 != (before + samples) / 1000 && (self.progress)(self.done()).is_break() {
            self.stopped.store(true, Ordering::Relaxed);
        }
    }

    fn damage(&self, error: Error, samples: u64) {
        self.damaged.fetch_add(samples, Ordering::Relaxed);
        let mut ledger = self.ledger.hold();
        if ledger.len() < self.listed {
            ledger.push(error);
        }
    }

    fn samples(&self, ids: Range<u64>) {
        let mut plain = None;
        let mut decoders = Vec::new();
        let count = ids.end - ids.start;
        for id in ids {
            if self.stopped.load(Ordering::Relaxed) {
                return;
            }
            let seen = caught(Stage::Decode, || {
                let plain = plain.get_or_insert_with(|| Plain::new(self.dataset));
                let seen = plain.sample(id, |field, bytes| {
                    self.check(id, field, bytes, &mut decoders)
                });
                self.bytes
                    .fetch_add(std::mem::take(&mut plain.read), Ordering::Relaxed);
                seen
            });
            if let Err(error) = seen {
                self.damage(error.with_sample(id), 1);
                // A panic may leave decoders in an inconsistent state: make them again.
                decoders.clear();
            }
        }
        self.note(count);
    }

    fn check(
        &self,
        id: u64,
        field: usize,
        bytes: &[u8],
        decoders: &mut Vec<Option<Single>>,
    ) -> Result<()> {
        let wrong = |field: &Field| {
            let message = format!(
                "`{}` has {} bytes, its rows {}",
                field.name(),
                bytes.len(),
                field.row_bytes()
            );
            Err(Error::new(ErrorKind::Shape, Stage::Decode, message))
        };
        match self.fields.get(field) {
            Some(Check::Raw(raw)) => {
                let fits = match raw.shape() {
                    Shape::Fixed(_) => bytes.len() == raw.row_bytes(),
                    Shape::UpTo { max, .. } => {
                        bytes.len() <= raw.row_bytes()
                            && bytes.len().is_multiple_of(raw.row_bytes() / max)
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

    fn chunk(&self, chunks: &dyn Chunked, chunk: usize) {
        if self.stopped.load(Ordering::Relaxed) {
            return;
        }
        let rows = chunks.starts()[chunk]..chunks.starts()[chunk + 1];
        let count = rows.end - rows.start;
        if let Err(error) = caught(Stage::Decode, || {
            self.open_chunk(chunks, chunk, rows.clone())
        }) {
            let more = if count > 1 {
                format!("{count} samples in ")
            } else {
                String::new()
            };
            self.damage(
                error
                    .within(format_args!("{more}{}", chunks.chunk_name(chunk)))
                    .with_sample(rows.start),
                count,
            );
        }
        self.note(count);
    }

    fn open_chunk(&self, chunks: &dyn Chunked, chunk: usize, rows: Range<u64>) -> Result<()> {
        let mut plain = Plain::new(self.dataset);
        let opened = plain.chunk(chunk);
        self.bytes.fetch_add(plain.read, Ordering::Relaxed);
        let buffer = opened?;
        let mut decoders = Vec::new();
        for id in rows.clone() {
            for field in 0..self.fields.len() {
                let bytes = buffer
                    .row(field, (id - rows.start) as usize)
                    .unwrap_or_default();
                if let Err(error) = self.check(id, field, bytes, &mut decoders) {
                    self.damage(error.within(chunks.chunk_name(chunk)).with_sample(id), 1);
                }
            }
        }
        Ok(())
    }
}
