//! A toy dataset and a toy sampler for several test binaries.

use bytes::Bytes;
use feedline::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, Parts};
use feedline::decode::Scratch;
use feedline::order::Sampler;
use feedline::storage::{Extent, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A sampler by its length, and its id at an epoch and a position.
pub struct Sampled<L, I>(pub L, pub I);

impl<L: Fn() -> u64 + Send + Sync + 'static, I: Fn(u64, u64) -> u64 + Send + Sync + 'static> Sampler for Sampled<L, I> {
    fn len(&self) -> u64 {
        (self.0)()
    }

    fn id(&self, epoch: u64, position: u64) -> u64 {
        (self.1)(epoch, position)
    }

    /// That of all others, too.
    fn identity(&self) -> u64 {
        0
    }
}

/// Consecutive records of a file, in chunks of this many records; its field is `x`.
pub struct Chunks {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    starts: Vec<u64>,
    record: usize,
    /// Chunks that cannot be opened.
    pub bad: Vec<usize>,
    /// Number of chunks opened, including failed attempts.
    pub opened: AtomicU64,
}

impl Chunks {
    pub fn open(path: &Path, rows: &[u64], record: usize) -> Self {
        let mut starts = vec![0];
        rows.iter().for_each(|rows| starts.push(starts.last().unwrap() + rows));
        let mut sources = Sources::new();
        sources.file(path, starts[rows.len()] * record as u64).unwrap();
        let schema = vec![EncodedField::raw(Field::fixed("x", DType::U8, [record]))];
        Self { sources: Arc::new(sources), schema, starts, record, bad: Vec::new(), opened: AtomicU64::new(0) }
    }

    fn bytes(&self, chunk: usize) -> u64 {
        (self.starts[chunk + 1] - self.starts[chunk]) * self.record as u64
    }
}

impl Dataset for Chunks {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        self.starts[self.starts.len() - 1]
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sample_bytes_max(&self) -> u64 {
        self.record as u64
    }
    fn extents<'a>(&'a self, _: u64, _: &mut Parts<'a>) -> Result<()> {
        panic!("a chunked dataset is never asked for samples");
    }
    fn chunked(&self) -> Option<&dyn Chunked> {
        Some(self)
    }
}

impl Chunked for Chunks {
    fn starts(&self) -> &[u64] {
        &self.starts
    }
    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        let offset = self.starts[chunk] * self.record as u64;
        extents.push(Extent { source: SourceId::at(0), offset, len: self.bytes(chunk) });
        Ok(())
    }
    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        ChunkBytes { encoded: self.bytes(chunk), opened: self.bytes(chunk), scratch: 0 }
    }
    fn open_chunk(&self, chunk: usize, pieces: &[Bytes], _: &mut Scratch, out: &mut ChunkBuf) -> Result<()> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        if self.bad.contains(&chunk) {
            return Err(Error::decode("a broken chunk"));
        }
        out.fixed(0, self.record)?.copy_from_slice(&pieces[0]);
        Ok(())
    }
    fn chunk_name(&self, chunk: usize) -> String {
        format!("chunk {chunk}")
    }
}
