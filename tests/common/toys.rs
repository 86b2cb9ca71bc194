//! A toy dataset and a toy sampler for several test binaries.

use bytes::Bytes;
use feedline::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, Parts, Sizes};
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

impl<L: Fn() -> u64 + Send + Sync + 'static, I: Fn(u64, u64) -> u64 + Send + Sync + 'static> Sampler
    for Sampled<L, I>
{
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

/// A piece of a source.
pub fn extent(source: usize, offset: u64, len: u64) -> Extent {
    Extent {
        source: SourceId::at(source),
        offset,
        len,
    }
}

/// Consecutive records of a file, in chunks of this many records; its field is `x`. When it is
/// ragged, a second field, `head`, has as many of a record's bytes as its first byte says.
pub struct Chunks {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    pub starts: Vec<u64>,
    record: usize,
    /// Chunks that cannot be opened.
    pub bad: Vec<usize>,
    /// Number of openings of each chunk, including failed attempts.
    pub opened: Vec<AtomicU64>,
}

impl Chunks {
    pub fn open(path: &Path, rows: &[u64], record: usize) -> Self {
        let mut starts = vec![0];
        for rows in rows {
            starts.push(starts.last().unwrap() + rows);
        }
        let mut sources = Sources::new();
        let len = starts[rows.len()] * record as u64;
        sources.file(path, len).unwrap();
        let schema = vec![EncodedField::raw(Field::fixed("x", DType::U8, [record]))];
        let opened = rows.iter().map(|_| AtomicU64::new(0)).collect();
        Self {
            sources: Arc::new(sources),
            schema,
            starts,
            record,
            bad: Vec::new(),
            opened,
        }
    }

    /// The field gets another name.
    pub fn named(mut self, name: &str) -> Self {
        self.schema[0] = EncodedField::raw(Field::fixed(name, DType::U8, [self.record]));
        self
    }

    pub fn ragged(mut self) -> Self {
        let head = Field::up_to("head", DType::U8, self.record);
        self.schema.push(EncodedField::raw(head));
        self
    }

    /// Number of openings of all chunks.
    pub fn opened(&self) -> u64 {
        let counts = self.opened.iter();
        counts.map(|opened| opened.load(Ordering::Relaxed)).sum()
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
    fn sizes(&self) -> Sizes {
        Sizes::new(self.record as u64)
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
        extents.push(extent(0, offset, self.bytes(chunk)));
        Ok(())
    }
    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        let bytes = self.bytes(chunk);
        ChunkBytes {
            encoded: bytes,
            opened: bytes * self.schema.len() as u64,
            scratch: 0,
        }
    }
    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        _: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        self.opened[chunk].fetch_add(1, Ordering::Relaxed);
        if self.bad.contains(&chunk) {
            return Err(Error::decode("a broken chunk"));
        }
        out.fixed(0, self.record)?.copy_from_slice(&pieces[0]);
        if self.schema.len() > 1 {
            for record in pieces[0].chunks(self.record) {
                out.push(1, &record[..head_len(record)])?;
            }
        }
        Ok(())
    }
    fn chunk_name(&self, chunk: usize) -> String {
        format!("chunk {chunk}")
    }
}

/// Bytes in the field `head` of a record.
pub fn head_len(record: &[u8]) -> usize {
    usize::from(record[0]) % (record.len() + 1)
}
