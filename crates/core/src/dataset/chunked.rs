//! Datasets without random access to samples: many samples form a chunk, which is read and opened
//! as a whole.
//!
//! ```text
//! chunk ──extents──► readers ──► pieces (encoded bytes) ──open, on a decode worker──► ChunkBuf ──► rows of many batches
//! ```
//!
//! Limits: the samples of a chunk have consecutive ids, and each chunk begins where the previous
//! one ends. A chunk has at most `u32::MAX` samples. Invariants: `open_chunk` runs once each time a
//! chunk is loaded into memory, with all pieces present. It writes only into a buffer of fixed
//! size. `build()` reserves the sizes declared in [`ChunkBytes`].

use crate::dataset::ChunkBuf;
use crate::decode::Scratch;
use crate::storage::Extent;
use bytes::Bytes;
use feedline_base::error::Result;

/// A [`Dataset`](super::Dataset) in chunks. Implement this trait for your own format.
pub trait Chunked: Send + Sync {
    /// First sample of every chunk, ascending from 0; the last entry is the total number of
    /// samples.
    fn starts(&self) -> &[u64];

    /// Whether the dataset has exactly the samples of the chunks, in their order. A subset returns
    /// `false` and maps ids by [`inner`](Self::inner).
    fn is_whole(&self) -> bool {
        true
    }

    /// Maps a sample id of the dataset to the sample's position in the chunks, counted like
    /// [`starts`](Self::starts).
    fn inner(&self, sample: u64) -> u64 {
        sample
    }

    /// Appends the extents of `chunk`. Called on the I/O thread; arithmetic only.
    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()>;

    /// Memory that reading and opening `chunk` needs, in bytes.
    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes;

    /// Opens a chunk: `pieces[i]` holds the bytes of extent *i*, untrusted. The method must write
    /// the rows of every field of the schema to `out`, which was [begun](ChunkBuf::begin) for the
    /// chunk's samples.
    ///
    /// Runs on a decode worker, which keeps `scratch` from chunk to chunk. An error becomes the
    /// error of every sample of the chunk.
    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()>;

    /// Name of the chunk in errors: the path and, for example, the row group.
    fn chunk_name(&self, chunk: usize) -> String;
}

/// Sizes of a chunk in bytes, known from the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkBytes {
    /// Bytes of all extents together.
    pub encoded: u64,
    /// Maximum bytes that [`Chunked::open_chunk`] puts into its buffer, plus 64 for each array.
    pub opened: u64,
    /// Maximum heap bytes that [`Chunked::open_chunk`] needs while it runs.
    pub scratch: u64,
}
