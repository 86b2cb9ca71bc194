//! A copy of documents in a file from which each document can be read alone: for rows in chunks, in
//! frames, or with checksums.
//!
//! ```text
//! dataset ──first open, all cores──► copy: documents │ tokens of each 4 │ CRC32C of these 8 │ "feedcopy" │ identity 8
//!                                          document: its fields, one after the other
//! ```
//!
//! Memory: 8 bytes for each document. Invariants: the copy has the dataset's documents, in the
//! dataset's order; the file appears only when it is complete; a copy of another dataset, or
//! another kind of file, is never replaced; the lengths are checked against their CRC32C and the
//! file's length.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::forward::own;
use feedline_core::dataset::{
    Chunked, Dataset, Digest, Framed, Parts, Sizes, TokenFields, fingerprint, kept, read_all,
    unordered,
};
use feedline_core::storage::publish::Pending;
use feedline_core::storage::{Blob, Extent, SourceId, Sources};
use feedline_core::tensor::{EncodedField, Field};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MARK: [u8; 8] = *b"feedcopy";
/// Bytes after the lengths: their CRC32C, the mark `feedcopy` and the identity, 8 bytes each.
const TAIL: u64 = 24;
/// Number of lengths that are read at once.
const STEP: u64 = 1 << 16;

/// Documents in a file of their own; made by
/// [`DatasetExt::copied`](crate::dataset::DatasetExt::copied).
pub struct Copied {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    /// Bytes of an element of each field. `token_bytes` is their sum.
    element_bytes: Box<[u64]>,
    token_bytes: u64,
    /// Ends of the documents in tokens; the first entry is 0.
    ends: Box<[u64]>,
    longest: u64,
    identity: u64,
    built: bool,
    place: PathBuf,
    of: String,
}

impl Copied {
    pub(crate) fn open<D: Dataset>(inner: &D, names: &[String], place: &Path) -> Result<Self> {
        unordered(inner, "copy its sources, then mix them")?;
        let fields = TokenFields::of(inner.schema(), names)?;
        let digest =
            fields
                .fields
                .iter()
                .fold(kept::identity_of("copied", inner), |digest, field| {
                    digest
                        .bytes(field.name().as_bytes())
                        .bytes(field.dtype().name().as_bytes())
                });
        let digest = digest
            .word(fingerprint::ends_of_all(inner.sources())?)
            .end();
        let end = [MARK, digest.to_le_bytes()].concat();
        let element_bytes = fields.element_bytes().collect::<Box<[u64]>>();
        let len = inner.len();
        let token_bytes = element_bytes.iter().sum();
        let (blob, built) = kept::open_or_write(
            place,
            "copied documents",
            "this dataset",
            &end,
            |blob| blob.len() >= 4 * len + TAIL,
            |out| write(inner, &fields, out),
        )?;
        let (ends, crc) = ends(&blob, len)?;
        let tokens = ends[len as usize];
        if tokens
            .checked_mul(token_bytes)
            .and_then(|bytes| bytes.checked_add(4 * len + TAIL))
            != Some(blob.len())
        {
            return Err(damaged(&blob));
        }
        let mut sources = Sources::new();
        sources.add(place, &blob.look()?)?;
        let longest = ends
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .max()
            .unwrap_or(0);
        Ok(Self {
            sources: Arc::new(sources),
            schema: fields
                .fields
                .iter()
                .map(|field| {
                    EncodedField::raw(Field::up_to(
                        field.name(),
                        field.dtype(),
                        longest.max(1) as usize,
                    ))
                })
                .collect(),
            element_bytes,
            token_bytes,
            ends,
            longest,
            identity: Digest::new("copied").word(digest).word(crc.into()).end(),
            built,
            place: place.into(),
            of: inner.describe(),
        })
    }

    /// Whether opening wrote the copy; otherwise it already existed.
    pub fn built(&self) -> bool {
        self.built
    }

    /// Number of tokens in the copy.
    pub fn tokens(&self) -> u64 {
        self.ends[self.ends.len() - 1]
    }
}

/// Writes the documents, their lengths and the CRC of the lengths.
fn write(dataset: &dyn Dataset, fields: &TokenFields, out: &mut Pending) -> Result<()> {
    let failed = |error, out: &Pending| {
        Error::os(Stage::Index, "cannot write the copied documents", error).with_path(&out.target)
    };
    let mut lens = Vec::with_capacity(usize::try_from(dataset.len()).unwrap_or(0).min(1 << 24));
    read_all(dataset, fields, |documents| {
        lens.extend(documents.lens);
        out.write_all(&documents.bytes)
            .map_err(|error| failed(error, out))
    })?;
    let mut crc = 0;
    for some in lens.chunks(STEP as usize) {
        let bytes: Vec<u8> = some.iter().flat_map(|len| len.to_le_bytes()).collect();
        crc = crc32c::crc32c_append(crc, &bytes);
        out.write_all(&bytes).map_err(|error| failed(error, out))?;
    }
    out.write_all(&u64::from(crc).to_le_bytes())
        .map_err(|error| failed(error, out))
}

/// Reads the ends of `len` documents, in tokens, and the CRC of their lengths.
fn ends(blob: &Blob, len: u64) -> Result<(Box<[u64]>, u32)> {
    let first = blob.len() - TAIL - 4 * len;
    let mut crc = 0;
    let mut end = 0_u64;
    let mut ends = Vec::with_capacity(len as usize + 1);
    ends.push(0);
    for start in (0..len).step_by(STEP as usize) {
        let count = (len - start).min(STEP);
        let bytes = blob.read(first + 4 * start, 4 * count, "the lengths of the documents")?;
        crc = crc32c::crc32c_append(crc, &bytes);
        for own in bytes.as_chunks::<4>().0 {
            end += u64::from(u32::from_le_bytes(*own));
            ends.push(end);
        }
    }
    let kept: [u8; 8] = blob.array(blob.len() - TAIL, "the end of the copied documents")?;
    if u64::from_le_bytes(kept) != u64::from(crc) {
        return Err(damaged(blob));
    }
    Ok((ends.into(), crc))
}

fn damaged(blob: &Blob) -> Error {
    let message = "the copied documents are damaged: delete the file to copy them again";
    Error::new(ErrorKind::Decode, Stage::Index, message).with_path(blob.path())
}

impl Dataset for Copied {
    own!(schema sources unordered unnamed);

    fn len(&self) -> u64 {
        self.ends.len() as u64 - 1
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            index_bytes: size_of_val(&*self.ends),
            ..Sizes::new(self.longest * self.token_bytes)
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let start = self.ends[sample as usize];
        let end = self.ends[sample as usize + 1];
        let mut offset = start * self.token_bytes;
        for (field, size) in self.element_bytes.iter().enumerate() {
            let len = (end - start) * size;
            parts.extent(
                field,
                Extent {
                    source: SourceId::at(0),
                    offset,
                    len,
                },
            );
            offset += len;
        }
        Ok(())
    }

    fn framed(&self) -> Option<&dyn Framed> {
        None
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        None
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn describe(&self) -> String {
        let how = if self.built {
            "copied now to"
        } else {
            "copied in"
        };
        format!(
            "{} documents of {} tokens, {how} {}; of {}",
            self.len(),
            self.tokens(),
            self.place.display(),
            self.of
        )
    }
}
