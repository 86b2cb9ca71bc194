//! Datasets with samples or chunks from several places, or with decoders that need more memory than
//! they get.

use crate::common::formats::tf_record;
use crate::common::toys::Chunks;
use crate::common::{Dir, noise, records_file};
use bytes::Bytes;
use feedline::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, Framed, Parts, Sizes};
use feedline::decode::{Ctx, Decoder, Scratch};
use feedline::error::Stage;
use feedline::storage::{Extent, SourceId, Sources};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{Error, ErrorKind, Result, Row};
use std::path::PathBuf;
use std::sync::Arc;

/// Chunks of 8-byte samples with their ids; the chunks `bad` cannot be opened.
pub fn numbered(dir: &Dir, rows: &[u64], bad: &[usize]) -> Arc<Chunks> {
    let bytes: Vec<u8> = (0..rows.iter().sum()).flat_map(u64::to_ne_bytes).collect();
    let path = dir.write(&format!("numbers to {}", bytes.len()), &bytes);
    let mut chunks = Chunks::open(&path, rows, 8);
    chunks.bad = bad.into();
    Arc::new(chunks)
}

/// The same, but each chunk also needs a table in memory.
pub struct Mixed(Arc<Chunks>, Arc<Sources>);

impl Mixed {
    pub fn new(chunks: Arc<Chunks>) -> Self {
        let file = SourceId::at(0);
        let mut sources = Sources::new();
        sources
            .file(chunks.sources().path(file), chunks.sources().len_of(file))
            .unwrap();
        sources.memory(vec![7; 16].into());
        Self(chunks, Arc::new(sources))
    }
}

impl Dataset for Mixed {
    fn schema(&self) -> &[EncodedField] {
        self.0.schema()
    }
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.1
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(9)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.0.extents(sample, parts)
    }
    fn chunked(&self) -> Option<&dyn Chunked> {
        Some(self)
    }
}

impl Chunked for Mixed {
    fn starts(&self) -> &[u64] {
        self.0.starts()
    }
    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        self.0.chunk_extents(chunk, extents)?;
        extents.push(Extent {
            source: SourceId::at(1),
            offset: 0,
            len: 16,
        });
        Ok(())
    }
    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        let bytes = self.0.chunk_bytes(chunk);
        ChunkBytes {
            encoded: bytes.encoded + 16,
            ..bytes
        }
    }
    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        self.0.open_chunk(chunk, pieces, scratch, out)
    }
    fn chunk_name(&self, chunk: usize) -> String {
        self.0.chunk_name(chunk)
    }
}

/// Four fields cut from one framed extent, as of a TFRecord of several features.
pub struct Frames {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    record: u64,
    count: u64,
}

impl Frames {
    pub fn new(dir: &Dir, count: u64, record: usize) -> Self {
        let (path, bytes) = records_file(dir, count as usize, record);
        let mut sources = Sources::new();
        sources.file(path, bytes.len() as u64).unwrap();
        let fields =
            ["a", "b", "c", "d"].map(|name| EncodedField::raw(Field::fixed(name, DType::U8, [8])));
        Self {
            sources: Arc::new(sources),
            schema: fields.into(),
            record: record as u64,
            count,
        }
    }
}

impl Dataset for Frames {
    fn schema(&self) -> &[EncodedField] {
        &self.schema
    }
    fn len(&self) -> u64 {
        self.count
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.sources
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(self.record)
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let extent = Extent {
            source: SourceId::at(0),
            offset: sample * self.record,
            len: self.record,
        };
        (0..4).for_each(|field| parts.framed(field, extent));
        Ok(())
    }
    fn framed(&self) -> Option<&dyn Framed> {
        Some(self)
    }
}

impl Framed for Frames {
    fn open<'a>(
        &self,
        _: u64,
        field: usize,
        bytes: &'a [u8],
        _: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        Ok(&bytes[field * 8..][..8])
    }
}

/// A hundred pictures of one byte, without a file.
pub struct Pictures(Arc<Sources>, Vec<EncodedField>);

impl Pictures {
    pub fn new() -> Self {
        Self(Arc::new(Sources::new()), vec![EncodedField::image("x")])
    }
}

impl Dataset for Pictures {
    fn schema(&self) -> &[EncodedField] {
        &self.1
    }
    fn len(&self) -> u64 {
        100
    }
    fn sources(&self) -> &Arc<Sources> {
        &self.0
    }
    fn sizes(&self) -> Sizes {
        Sizes::new(1)
    }
    fn extents<'a>(&'a self, _: u64, parts: &mut Parts<'a>) -> Result<()> {
        parts.inline(0, &[7]);
        Ok(())
    }
}

/// A decoder that reserves much memory and needs it for one sample in ten.
pub struct Hungry;

impl Decoder for Hungry {
    fn outputs(&self, _: &EncodedField) -> Result<Vec<Field>> {
        Ok(vec![Field::fixed("out", DType::U8, [1])])
    }
    fn scratch_bytes(&self) -> usize {
        64 << 20
    }
    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        if ctx.id() % 10 == 3 && ctx.scratch_limit() < 48 << 20 {
            return Err(Error::new(
                ErrorKind::Limit,
                Stage::Decode,
                "a large picture",
            ));
        }
        out.copy_from(ctx.fields().start, &input[..1])
    }
}

/// A TFRecord file of `count` pictures of this size, each with its label.
pub fn labelled_pictures(dir: &Dir, count: u8, picture: usize) -> PathBuf {
    let field =
        |number: u8, bytes: &[u8]| [&[number << 3 | 2][..], &varint(bytes.len()), bytes].concat();
    let feature = |name: &str, kind: u8, list: &[u8]| {
        field(
            1,
            &[field(1, name.as_bytes()), field(2, &field(kind, list))].concat(),
        )
    };
    let mut file = Vec::new();
    for id in 0..count {
        let image = feature("image", 1, &field(1, &noise(picture, u64::from(id))));
        let label = feature("label", 3, &field(1, &[id]));
        file.extend(tf_record(&field(1, &[image, label].concat())));
    }
    dir.write("pictures.tfrecord", &file)
}

/// A length, as protocol buffers have it.
fn varint(mut value: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 128 {
        out.push(value as u8 | 128);
        value >>= 7;
    }
    out.push(value as u8);
    out
}
