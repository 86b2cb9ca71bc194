//! Checksums for any dataset: one CRC32C per field of every sample, kept in a file, verified at
//! each read.
//!
//! ```text
//! inner.extents ──► extents, all checked ──► readers ──► bytes ──CRC32C──► inner.check ──► inner.open, if framed there
//! ```
//!
//! The first `open` reads everything once to make the file and assumes that the bytes on disk are
//! correct. Later, a byte that differs is an error with sample and place, whatever the format.
//!
//! Datasets with chunks have one CRC32C per extent of a chunk, verified before the chunk is opened.
//! One more CRC32C detects changed metadata in a file that describes itself.
//!
//! Costs: 4 bytes per field and sample (per extent, with chunks); rows are no longer read in place,
//! since they are verified first. The schema, the places of all bytes, and bytes in the inner
//! dataset's index (labels) share one CRC32C, verified when the dataset is opened.
//!
//! Invariants: an existing file is never replaced silently. It is used if its own CRC is right and
//! all sources have the same lengths, paths and modification times (memory: the same bytes). If
//! only paths or times differ, as in a copy, everything is read and compared: the checksums stay,
//! and a difference is an error. Other lengths and a damaged file are errors; only
//! [`checked_anew`](crate::dataset::DatasetExt::checked_anew) makes the file again, and
//! [`Checked::built`] reports it. A different dataset over unchanged sources is an error: a header
//! is damaged. The file is put in place by a rename.

mod file;
mod outline;
#[cfg(test)]
#[allow(clippy::missing_trait_methods, reason = "toys, not wrappers")]
mod tests;

use self::file::{Found, Head, Sums, hashes, load};
use self::outline::Outline;
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::{forward, frames_of, own};
use feedline_core::dataset::{ChunkBuf, Chunked, Dataset, Framed, Parts, Sizes, chunks, frames};
use feedline_core::decode::Scratch;
use std::path::{Path, PathBuf};

/// A dataset that verifies every read; made by
/// [`DatasetExt::checked`](crate::dataset::DatasetExt::checked).
pub struct Checked<D> {
    inner: D,
    /// CRCs by sample and field; 0 for fields in the index.
    sums: Sums,
    /// For datasets with chunks: start of each chunk's extent CRCs, then the end of all.
    pieces: Vec<usize>,
    place: PathBuf,
    origin: SumsOrigin,
}

/// Origin of the checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SumsOrigin {
    /// Made from the bytes on disk when the dataset was opened.
    Made,
    /// Read from their file; all bytes were compared with them when the dataset was opened.
    Compared,
    /// Read from their file.
    Kept,
}

impl<D: Dataset> Checked<D> {
    /// `anew` makes the checksums from the bytes on disk, whatever their file says.
    pub(crate) fn open(inner: D, place: &Path, anew: bool) -> Result<Self> {
        if inner.sizes().appended_max > 0 {
            let message = "samples of several extents for one field, such as packed documents, have no checksums";
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        let hashes = hashes(inner.sources())?;
        let outline = Outline::of(&inner)?;
        let Outline {
            count,
            fields,
            shape,
            ..
        } = outline;
        let head = Head {
            lengths: hashes[0],
            state: hashes[1],
            count,
            fields: fields as u32,
            shape,
        };
        let (sums, made, origin) = match load(place, head.lengths)? {
            Found::Useless(error) if !anew => return Err(error.with_path(place)),
            Found::Whole(sums) if !anew => {
                if (Head {
                    state: head.state,
                    ..sums.head
                }) != head
                {
                    return Err(another(place));
                }
                if sums.head == head {
                    (Some(sums), None, SumsOrigin::Kept)
                } else {
                    let now = outline.make(&inner)?;
                    outline.compare(&inner, &sums, &now, place)?;
                    (None, Some(now), SumsOrigin::Compared)
                }
            }
            _ => (None, Some(outline.make(&inner)?), SumsOrigin::Made),
        };
        if let Some(made) = made {
            if self::hashes(inner.sources())? != hashes {
                let message = "a source was written to while its checksums were made";
                return Err(Error::new(ErrorKind::Changed, Stage::Index, message));
            }
            head.write(place, &made)?;
        }
        let sums = match sums {
            Some(sums) => sums,
            None => match load(place, head.lengths)? {
                Found::Whole(sums) if sums.head == head => sums,
                _ => {
                    let message = "the file of checksums changed while it was written: name a file of its own";
                    return Err(
                        Error::new(ErrorKind::Changed, Stage::Index, message).with_path(place)
                    );
                }
            },
        };
        Ok(Self {
            inner,
            sums,
            pieces: outline.pieces,
            place: place.to_path_buf(),
            origin,
        })
    }

    /// Whether opening made the checksums from the bytes on disk; otherwise they came from their
    /// file.
    pub fn built(&self) -> bool {
        self.origin == SumsOrigin::Made
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
        let message = format!(
            "CRC32C {expected:08x} when it was indexed, {found:08x} now ({})",
            self.place.display()
        );
        Err(Error::new(ErrorKind::Decode, Stage::Decode, message))
    }
}

/// Error for a dataset that differs although all sources have the same lengths: that is damage.
fn another(place: &Path) -> Error {
    let message = "the sources have the same lengths as when the checksums were made, but the dataset differs: a file \
                   that describes itself is damaged, or it is opened in another way";
    let message =
        message.to_string() + &Setting::CheckedAnew.hint(|anew| format!(" (then use {anew})"));
    Error::new(ErrorKind::Changed, Stage::Index, message).with_path(place)
}

impl<D: Dataset> Dataset for Checked<D> {
    own!(framed);
    forward!(self => self.inner; schema len sources sampler identity);

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.inner.extents(sample, parts)?;
        parts.check_all();
        Ok(())
    }

    fn sizes(&self) -> Sizes {
        let inner = self.inner.sizes();
        let pieces = self.pieces.capacity() * size_of::<usize>();
        Sizes {
            index_bytes: inner.index_bytes + self.sums.heap() + pieces,
            ..inner
        }
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.inner.chunked().map(|_| self as &dyn Chunked)
    }

    fn describe(&self) -> String {
        let how = match self.origin {
            SumsOrigin::Made => "made now:",
            SumsOrigin::Compared => {
                "compared now with all bytes, since times or paths had changed:"
            }
            SumsOrigin::Kept => "from",
        };
        format!(
            "{}; checked: CRC32Cs {how} {}",
            self.inner.describe(),
            self.place.display()
        )
    }
}

impl<D: Dataset> Framed for Checked<D> {
    frames_of!(self, sample => (&self.inner, sample); open field_bytes member seek_points);

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        frames(&self.inner).field_bytes_max(field)
    }

    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        let fields = self.schema().len();
        let expected = self.sums.get(sample as usize * fields + field);
        expected
            .and_then(|expected| self.compare(expected, bytes))
            .map_err(|error| {
                error
                    .within(format_args!("field `{}`", self.schema()[field].name))
                    .with_sample(sample)
            })?;
        frames(&self.inner).check(sample, field, bytes)
    }
}

impl<D: Dataset> Chunked for Checked<D> {
    forward!(self => chunks(&self.inner); starts is_whole inner chunk_extents chunk_bytes chunk_name);

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        for (number, (piece, at)) in pieces
            .iter()
            .zip(self.pieces[chunk]..self.pieces[chunk + 1])
            .enumerate()
        {
            if let Err(error) = self
                .sums
                .get(at)
                .and_then(|expected| self.compare(expected, piece))
            {
                let mut extents = Vec::new();
                chunks(&self.inner).chunk_extents(chunk, &mut extents)?;
                return Err(self
                    .inner
                    .sources()
                    .at(error.within(self.chunk_name(chunk)), &extents[number]));
            }
        }
        chunks(&self.inner).open_chunk(chunk, pieces, scratch, out)
    }
}
