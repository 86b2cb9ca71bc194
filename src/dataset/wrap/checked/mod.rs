//! Checksums for any dataset: one CRC32C per field of every sample, kept in a file, verified at each read.
//!
//! ```text
//! inner.extents ──► extents, all checked ──► readers ──► bytes ──CRC32C──► inner.check ──► inner.open, if framed there
//! ```
//!
//! The first time everything is read once to make the file; what is on disk then is what is held to be right. From
//! then on, a byte that differs is an error that names sample and place, whatever the format.
//!
//! Datasets in chunks have one CRC32C for each extent of a chunk, verified before it is opened; one more tells when a
//! file describes itself in another way than before.
//!
//! Costs: 4 bytes per field and sample (per extent, in chunks); rows are no longer read in place, since they are
//! verified first. The schema, the places of all bytes, and bytes that lie in the inner dataset's index (labels) have one
//! CRC32C together, verified when the dataset is opened.
//!
//! Invariants: an existing file is never replaced in silence. It is used when its own CRC is right and all sources have the
//! same lengths, paths and modification times (memory: the same bytes). When only paths or times differ, as in a copy,
//! everything is read and compared: the checksums stay, and a difference is an error. Other lengths are an error, and so is a
//! damaged file; only [`checked_anew`](crate::dataset::DatasetExt::checked_anew) makes it anew, and [`Checked::built`] says
//! so. A dataset that is another than then although its sources are not is an error: a header is damaged. It appears by a
//! rename.

mod file;
mod outline;
#[cfg(test)]
mod tests;

use self::file::{Found, HEADER, Head, hashes, load};
use self::outline::Outline;
use crate::dataset::forward::forward;
use crate::dataset::{ChunkBuf, Chunked, Dataset, Parts};
use crate::decode::Scratch;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::publish::publish;
use bytes::Bytes;
use std::path::{Path, PathBuf};

/// A dataset whose every read is verified; made by [`DatasetExt::checked`](crate::dataset::DatasetExt::checked).
pub struct Checked<D> {
    inner: D,
    /// The file as it stands: header, then CRCs by sample and field; 0 for fields in the index.
    words: Vec<u32>,
    /// For datasets in chunks: where the CRCs of each chunk's extents start, and where they end.
    pieces: Vec<usize>,
    place: PathBuf,
    origin: Origin,
}

/// Where the checksums come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// What was on disk when the dataset was opened.
    Made,
    /// Their file, with which all bytes were compared when the dataset was opened.
    Compared,
    /// Their file.
    Kept,
}

impl<D: Dataset> Checked<D> {
    /// With `anew` the checksums are made from what is on disk, whatever their file says.
    pub(crate) fn open(inner: D, place: &Path, anew: bool) -> Result<Self> {
        let (hashes, outline) = (hashes(inner.sources())?, Outline::of(&inner)?);
        let Outline { count, fields, shape, .. } = outline;
        let head = Head { lengths: hashes[0], state: hashes[1], count, fields: fields as u32, shape };
        let (mut words, origin) = match load(place, head.lengths)? {
            Found::Useless(error) if !anew => return Err(error.with_path(place)),
            Found::Whole(then, words) if !anew => {
                if (Head { state: head.state, ..then }) != head {
                    return Err(another(place));
                }
                if then == head {
                    (words, Origin::Kept)
                } else {
                    outline.compare(&inner, &words, &outline.make(&inner)?, place)?;
                    (words, Origin::Compared)
                }
            }
            _ => (outline.make(&inner)?, Origin::Made),
        };
        if origin != Origin::Kept {
            if self::hashes(inner.sources())? != hashes {
                let message = "a source was written to while its checksums were made";
                return Err(Error::new(ErrorKind::Changed, Stage::Index, message));
            }
            head.seal(&mut words);
            publish(place, bytemuck::cast_slice(&words), false)
                .map_err(|error| Error::os(Stage::Index, "cannot write the checksums", error).with_path(place))?;
        }
        Ok(Self { inner, words, pieces: outline.pieces, place: place.to_path_buf(), origin })
    }

    /// Whether the checksums were made by this call, from what was on disk then; else they came from their file.
    pub fn built(&self) -> bool {
        self.origin == Origin::Made
    }

    /// The dataset without its checks.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Errors: [`ErrorKind::Decode`] with both CRCs.
    fn compare(&self, expected: u32, bytes: &[u8]) -> Result<()> {
        let found = crc32c::crc32c(bytes);
        if found == expected {
            return Ok(());
        }
        let message = format!("CRC32C {expected:08x} when it was indexed, {found:08x} now ({})", self.place.display());
        Err(Error::new(ErrorKind::Decode, Stage::Decode, message))
    }
}

/// The lengths of all sources are those of then, so another dataset is damage.
fn another(place: &Path) -> Error {
    let message = "the sources have the lengths of when the checksums were made, but the dataset is another: a file \
                   that describes itself is damaged, or it is opened in another way (then use `checked_anew`)";
    Error::new(ErrorKind::Changed, Stage::Index, message).with_path(place)
}

impl<D: Dataset> Dataset for Checked<D> {
    forward!(self => self.inner; schema len sources sample_bytes_max largest_sample member open opened_bytes_max identity);

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.inner.extents(sample, parts)?;
        parts.check_all();
        Ok(())
    }

    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        let fields = self.schema().len();
        let expected = self.words[HEADER + sample as usize * fields + field];
        self.compare(expected, bytes)
            .map_err(|error| error.within(format_args!("field `{}`", self.schema()[field].name)).with_sample(sample))?;
        self.inner.check(sample, field, bytes)
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.inner.chunked().map(|_| self as &dyn Chunked)
    }

    fn index_bytes(&self) -> usize {
        self.inner.index_bytes() + self.words.capacity() * 4 + self.pieces.capacity() * size_of::<usize>()
    }

    fn describe(&self) -> String {
        let how = match self.origin {
            Origin::Made => "made now:",
            Origin::Compared => "compared now with all bytes, since times or paths had changed:",
            Origin::Kept => "from",
        };
        format!("{}; checked: CRC32Cs {how} {}", self.inner.describe(), self.place.display())
    }
}

impl<D: Dataset> Checked<D> {
    fn chunks(&self) -> &dyn Chunked {
        self.inner.chunked().expect("asked only when the inner dataset has chunks")
    }
}

impl<D: Dataset> Chunked for Checked<D> {
    forward!(self => self.chunks(); starts is_whole inner chunk_extents chunk_bytes chunk_name);

    fn open_chunk(&self, chunk: usize, pieces: &[Bytes], scratch: &mut Scratch, out: &mut ChunkBuf) -> Result<()> {
        let expected = &self.words[self.pieces[chunk]..self.pieces[chunk + 1]];
        for (number, (piece, expected)) in pieces.iter().zip(expected).enumerate() {
            if let Err(error) = self.compare(*expected, piece) {
                let mut extents = Vec::new();
                self.chunks().chunk_extents(chunk, &mut extents)?;
                return Err(self.inner.sources().at(error.within(self.chunk_name(chunk)), &extents[number]));
            }
        }
        self.chunks().open_chunk(chunk, pieces, scratch, out)
    }
}
