//! Concatenated datasets; [`mix`](super::mix) draws from them by weights.
//!
//! ```text
//! ids  0 … a-1 | a … a+b-1 | …              the parts in order, their sources in one table
//! ```
//!
//! Limits: parts have the same schema.

use crate::dataset::DatasetExt;
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::forward::{frames_of, own};
use feedline_core::dataset::starts::Starts;
use feedline_core::dataset::{
    ChunkBuf, ChunkBytes, Chunked, Dataset, Digest, Framed, Parts, Sizes, Strings, unordered,
};
use feedline_core::decode::Scratch;
use feedline_core::storage::{Extent, SourceId, Sources};
use feedline_core::tensor::EncodedField;
use std::sync::Arc;

/// Maximum number of parts in a description.
const SHOWN: usize = 8;

/// Concatenates datasets: the ids of each dataset follow the ids of the dataset before it.
///
/// All must have the same fields. Pass datasets of different types as `Arc<dyn Dataset>`:
///
/// ```
/// # use feedline::dataset::{Concat, Dataset, Records, Tokens};
/// # use feedline::tensor::DType;
/// # use std::sync::Arc;
/// let a: Arc<dyn Dataset> = Arc::new(Records::builder(8).field("tokens", DType::U16, [4]).open_bytes([0; 16])?);
/// let b: Arc<dyn Dataset> = Arc::new(Tokens::builder(DType::U16).window(4).open_bytes([1; 24])?);
/// let both = Concat::new([a, b])?;
/// assert_eq!((both.len(), both.origin(3)), (5, (1, 1)));
/// # Ok::<(), feedline::Error>(())
/// ```
pub struct Concat {
    parts: Vec<ConcatPart>,
    starts: Starts,
    sources: Arc<Sources>,
    chunks: Option<ConcatChunks>,
}

struct ConcatPart {
    dataset: Arc<dyn Dataset>,
    /// Offset of the part's source ids in the common table of sources.
    base: usize,
}

/// Chunks of all parts, if the parts have chunks.
struct ConcatChunks {
    /// First sample of every chunk, then the total number of samples.
    starts: Vec<u64>,
    /// Number of chunks before each part.
    before: Vec<usize>,
}

impl ConcatPart {
    fn digest(&self, digest: Digest) -> Digest {
        let dataset = &self.dataset;
        digest
            .word(dataset.len())
            .word(dataset.sources().count() as u64)
            .word(dataset.identity())
    }
}

impl Concat {
    /// Concatenates `datasets` in this order.
    ///
    /// Errors: [`ErrorKind::Config`] for no dataset, for a mixture of parts with and without
    /// chunks, for fields that differ (the message names part and field), and for a
    /// [`Mix`](super::Mix).
    pub fn new<D: Dataset>(datasets: impl IntoIterator<Item = D>) -> Result<Self> {
        let datasets: Vec<Arc<dyn Dataset>> = datasets
            .into_iter()
            .map(|part| Arc::new(part) as _)
            .collect();
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        let Some(first) = datasets.first().cloned() else {
            return bad("no datasets to concatenate".into());
        };
        let starts = Starts::of(datasets.iter().map(|part| part.len()))?;
        let mut sources = Sources::new();
        let mut parts = Vec::new();
        for (index, dataset) in datasets.into_iter().enumerate() {
            unordered(&dataset, "concatenate or mix its sources")?;
            if let Some(message) = unlike(first.schema(), dataset.schema()) {
                return bad(format!(
                    "part {index} ({}) does not fit part 0: {message}",
                    dataset.describe()
                ));
            }
            if dataset.chunked().is_some() != first.chunked().is_some() {
                return bad(format!(
                    "of part {index} and part 0, one has chunks, the other has none"
                ));
            }
            let base = sources.append(dataset.sources())?;
            parts.push(ConcatPart { dataset, base });
        }
        let chunks = first
            .chunked()
            .is_some()
            .then(|| ConcatChunks::new(&parts, starts.all()))
            .transpose()?;
        Ok(Self {
            parts,
            starts,
            sources: Arc::new(sources),
            chunks,
        })
    }

    /// Part of a sample, and its id in that part. `sample` must be below `len`.
    pub fn origin(&self, sample: u64) -> (usize, u64) {
        self.starts.locate(sample)
    }

    /// Number of parts.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Ids of the samples of part `part`.
    pub fn ids_of(&self, part: usize) -> std::ops::Range<u64> {
        self.starts.all()[part]..self.starts.all()[part + 1]
    }

    /// A hash of each part.
    pub(super) fn identities(&self) -> Vec<u64> {
        self.parts
            .iter()
            .map(|part| part.digest(Digest::new("part")).end())
            .collect()
    }

    /// Part of a sample, and the sample's id in that part.
    fn part_of(&self, sample: u64) -> (&dyn Dataset, u64) {
        let (part, local) = self.origin(sample);
        (&*self.parts[part].dataset, local)
    }

    /// Part of a chunk, and the chunk's number in that part.
    fn chunk_of(&self, chunk: usize) -> Option<(&ConcatPart, &dyn Chunked, usize)> {
        let before = &self.chunks.as_ref()?.before;
        let part = before
            .partition_point(|before| *before <= chunk)
            .checked_sub(1)?;
        let member = &self.parts[part];
        Some((member, member.dataset.chunked()?, chunk - before[part]))
    }
}

/// First difference between two schemas.
fn unlike(first: &[EncodedField], other: &[EncodedField]) -> Option<String> {
    let names = |fields: &[EncodedField]| {
        fields
            .iter()
            .map(|field| field.name.clone())
            .collect::<Vec<_>>()
            .join(", ")
    };
    if names(first) != names(other) {
        return Some(format!(
            "its fields are {}, not {}",
            names(other),
            names(first)
        ));
    }
    let (a, b) = first.iter().zip(other).find(|(a, b)| a != b)?;
    Some(format!(
        "its field `{}` is {}, not {}",
        b.name, b.encoding, a.encoding
    ))
}

impl ConcatChunks {
    fn new(parts: &[ConcatPart], part_starts: &[u64]) -> Result<Self> {
        let mut starts = Vec::new();
        let mut before = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            before.push(starts.len());
            // A subset's sample ids are not the ids in its chunks.
            let whole = part.dataset.chunked().filter(|chunks| chunks.is_whole());
            let own = whole.map_or(&[][..], Chunked::starts);
            let Some((last, own)) = own
                .split_last()
                .filter(|(last, _)| **last == part.dataset.len())
            else {
                let message = format!(
                    "the chunks of part {index} do not end with its last sample; split datasets \
                     with chunks by files"
                );
                return Err(Error::new(ErrorKind::User, Stage::Index, message));
            };
            debug_assert!(own.iter().all(|start| start <= last));
            starts.extend(own.iter().map(|start| start + part_starts[index]));
        }
        starts.push(part_starts[parts.len()]);
        Ok(Self { starts, before })
    }
}

impl Dataset for Concat {
    fn schema(&self) -> &[EncodedField] {
        self.parts[0].dataset.schema()
    }

    fn len(&self) -> u64 {
        self.starts.len()
    }

    own!(sources framed unordered);

    fn sizes(&self) -> Sizes {
        // The parts also keep their own tables of sources.
        let chunks = self
            .chunks
            .as_ref()
            .map_or(0, |chunks| chunks.starts.capacity() * 8);
        let mut all = Sizes {
            index_bytes: chunks,
            ..Sizes::new(0)
        };
        for (part, first) in self.parts.iter().zip(self.starts.all()) {
            let own = part.dataset.sizes();
            let table = part.dataset.sources().table_bytes();
            // If several parts have the maximum, the last of them counts.
            if own.sample_bytes_max >= all.sample_bytes_max {
                all.sample_bytes_max = own.sample_bytes_max;
                all.largest_sample = own.largest_sample.map(|sample| first + sample);
            }
            all.appended_max = all.appended_max.max(own.appended_max);
            all.opened_bytes_max = all.opened_bytes_max.max(own.opened_bytes_max);
            all.index_bytes += own.index_bytes + table;
        }
        all
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let (part, local) = self.origin(sample);
        let member = &self.parts[part];
        let before = parts.len();
        member.dataset.extents(local, parts)?;
        parts.move_sources(before, member.base);
        Ok(())
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.chunks.is_some().then_some(self)
    }

    fn keys(&self) -> Result<Option<Strings>> {
        let mut all = Strings::new();
        for part in &self.parts {
            let Some(own) = part.dataset.keys()? else {
                return Ok(None);
            };
            all.extend(own.iter());
        }
        Ok(Some(all))
    }

    fn identity(&self) -> u64 {
        self.parts
            .iter()
            .fold(Digest::new("concat"), |digest, part| part.digest(digest))
            .end()
    }

    fn describe(&self) -> String {
        let mut parts: Vec<String> = self
            .parts
            .iter()
            .take(SHOWN)
            .map(|part| part.dataset.describe())
            .collect();
        if self.parts.len() > SHOWN {
            parts.push(format!("and {} more", self.parts.len() - SHOWN));
        }
        format!(
            "{} samples of {} parts: {}",
            self.len(),
            self.parts.len(),
            parts.join("; ")
        )
    }
}

impl Framed for Concat {
    frames_of!(self, sample => self.part_of(sample); check open make field_bytes member seek_points);

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        self.parts
            .iter()
            .try_fold(0, |most, part| {
                Ok(part.dataset.field_bytes_max(field)?.max(most))
            })
            .map(Some)
    }
}

impl Chunked for Concat {
    fn starts(&self) -> &[u64] {
        self.chunks.as_ref().map_or(&[], |chunks| &chunks.starts)
    }

    fn is_whole(&self) -> bool {
        true
    }

    fn inner(&self, sample: u64) -> u64 {
        sample
    }

    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        let Some((member, chunked, local)) = self.chunk_of(chunk) else {
            return Err(no_chunk(chunk));
        };
        let before = extents.len();
        chunked.chunk_extents(local, extents)?;
        for extent in &mut extents[before..] {
            extent.source = SourceId::at(extent.source.index() + member.base);
        }
        Ok(())
    }

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        self.chunk_of(chunk)
            .map_or(ChunkBytes::default(), |(_, chunked, local)| {
                chunked.chunk_bytes(local)
            })
    }

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        let Some((_, chunked, local)) = self.chunk_of(chunk) else {
            return Err(no_chunk(chunk));
        };
        chunked.open_chunk(local, pieces, scratch, out)
    }

    fn chunk_name(&self, chunk: usize) -> String {
        self.chunk_of(chunk)
            .map_or(String::new(), |(_, chunked, local)| {
                chunked.chunk_name(local)
            })
    }
}

fn no_chunk(chunk: usize) -> Error {
    Error::new(
        ErrorKind::User,
        Stage::Read,
        format!("there is no chunk {chunk}"),
    )
}
