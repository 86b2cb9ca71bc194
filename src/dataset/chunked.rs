//! Datasets whose samples cannot be had one by one: many lie in a chunk that is read and opened as a whole.
//!
//! ```text
//! chunk ──extents──► readers ──► pieces (encoded bytes) ──open, on a decode worker──► ChunkBuf ──► rows of many batches
//! ```
//!
//! Limits: samples of a chunk have consecutive ids, chunks follow each other; a chunk holds at most `u32::MAX` samples.
//! Invariants: `open` runs once for each time that a chunk is brought into memory, with all pieces there; it writes
//! into a buffer of fixed size and nowhere else; what it declares in [`ChunkBytes`] is reserved by `build()`.

use crate::decode::Scratch;
use crate::error::Result;
use crate::memory::ChunkBuf;
use crate::storage::Extent;
use bytes::Bytes;

/// The side of a [`Dataset`](super::Dataset) that deals in chunks. Open: implement it for a format of your own.
pub trait Chunked: Send + Sync {
    /// The first sample of every chunk, ascending from 0, and the number of all samples as the last entry.
    fn starts(&self) -> &[u64];

    /// Whether the dataset's samples are exactly those of the chunks, in that order. A subset says no, and gives the
    /// places by [`inner`](Self::inner).
    fn is_whole(&self) -> bool {
        true
    }

    /// The number among [`starts`](Self::starts) that sample `sample` of the dataset has.
    fn inner(&self, sample: u64) -> u64 {
        sample
    }

    /// Appends what is to be read for `chunk`. Called on the I/O thread; arithmetic only.
    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()>;

    /// What `chunk` takes.
    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes;

    /// Opens a chunk: `pieces[i]` are the bytes of extent *i*, untrusted. Every field of the schema gets its rows in
    /// `out`, which was [begun](ChunkBuf::begin) for the chunk's samples.
    ///
    /// Runs on a decode worker, whose `scratch` survives from chunk to chunk. An error becomes the error of every sample of the chunk.
    fn open_chunk(&self, chunk: usize, pieces: &[Bytes], scratch: &mut Scratch, out: &mut ChunkBuf) -> Result<()>;

    /// What an error calls it: the path and, for example, the row group.
    fn chunk_name(&self, chunk: usize) -> String;
}

/// The sizes of a chunk in bytes, known from the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkBytes {
    /// All extents together.
    pub encoded: u64,
    /// What [`Chunked::open_chunk`] puts into its buffer at most; 64 more for each array.
    pub opened: u64,
    /// Heap that it needs while it runs, at most.
    pub scratch: u64,
}
