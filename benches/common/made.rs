//! Datasets of any length without storage: their samples repeat a few sources.

use bytes::Bytes;
use feedline::Result;
use feedline::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, Parts, Sizes};
use feedline::decode::Scratch;
use feedline::storage::{Extent, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use std::sync::Arc;

/// Sample *i* is a record in source *i* mod their number.
pub struct Made {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    len: u64,
    /// Bytes per sample.
    record: u64,
    /// Rows per chunk, and the first sample of each chunk; `None` for single samples.
    rows: u64,
    starts: Vec<u64>,
}

impl Made {
    /// Samples of `record` bytes, read one by one.
    pub fn samples(sources: Sources, len: u64, record: usize) -> Self {
        let schema = vec![EncodedField::raw(Field::fixed(
            "record",
            DType::U8,
            [record],
        ))];
        Self {
            sources: Arc::new(sources),
            schema,
            len,
            record: record as u64,
            rows: 0,
            starts: Vec::new(),
        }
    }

    /// Chunks of `rows` such samples.
    pub fn chunks(sources: Sources, chunks: u64, rows: u64, record: usize) -> Self {
        let starts = (0..=chunks).map(|chunk| chunk * rows).collect();
        Self {
            rows,
            starts,
            ..Self::samples(sources, chunks * rows, record)
        }
    }

    /// A single source: bytes of this process.
    pub fn memory(bytes: usize) -> Sources {
        let mut sources = Sources::new();
        sources.memory(vec![7; bytes].into());
        sources
    }

    /// The extent of piece `index` of `len` bytes.
    fn extent(&self, index: u64, len: u64) -> Extent {
        let count = self.sources.count() as u64;
        let source = SourceId::at((index % count) as usize);
        let pieces = self.sources.len_of(source) / len;
        Extent {
            source,
            offset: index / count % pieces * len,
            len,
        }
    }
}

impl Dataset for Made {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        self.len
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(self.record)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        parts.extent(0, self.extent(sample, self.record));
        Ok(())
    }
    fn chunked(&self) -> Option<&dyn Chunked> {
        (self.rows > 0).then_some(self)
    }
}

impl Chunked for Made {
    fn starts(&self) -> &[u64] {
        &self.starts
    }
    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        extents.push(self.extent(chunk as u64, self.rows * self.record));
        Ok(())
    }
    fn chunk_bytes(&self, _: usize) -> ChunkBytes {
        let bytes = self.rows * self.record;
        ChunkBytes {
            encoded: bytes,
            opened: bytes,
            scratch: 0,
        }
    }
    fn open_chunk(
        &self,
        _: usize,
        pieces: &[Bytes],
        _: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        out.fixed(0, self.record as usize)?
            .copy_from_slice(&pieces[0]);
        Ok(())
    }
    fn chunk_name(&self, chunk: usize) -> String {
        format!("made chunk {chunk}")
    }
}
