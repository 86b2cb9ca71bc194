//! Lengths of the fields for which the index has none, made by one pass over the data and kept in a
//! side file.
//!
//! ```text
//! inner dataset ──first open, all cores──► bytes of each such field and sample ──► side file ──► field_bytes
//!                                                                    and each read is compared with them
//! ```
//!
//! Sections of the file: 4 bytes per sample and measured field, then the maximum bytes of each
//! field. A large file is read in place, a page at a time. Limits: 4 GiB per field of a sample.
//!
//! Invariants: those of `feedline_core::dataset::kept`. A sample that is damaged when it is measured has length 0;
//! the loader reports it.

use crate::dataset::wrap::pass::pass;
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::forward::{forward, frames_of, own};
use feedline_core::dataset::kept::Origin;
use feedline_core::dataset::{
    ChunkBuf, Chunked, Dataset, Framed, Sizes, chunks, frames, kept, knows_lengths,
};
use feedline_core::decode::Scratch;
use feedline_core::storage::sidefile::{SideKind, Sidefile};
use std::path::Path;

const KIND: SideKind = SideKind {
    name: *b"lens",
    version: 1,
    older: b"",
};
const LENGTHS: usize = 0;
const MOST: usize = 1;

/// A dataset with lengths of all fields; made by
/// [`DatasetExt::measured`](crate::dataset::DatasetExt::measured).
pub struct Measured<D> {
    inner: D,
    /// For each field of the schema, its position among the measured fields.
    columns: Vec<Option<usize>>,
    /// Number of measured fields.
    width: usize,
    file: Sidefile,
    origin: Origin,
}

impl<D: Dataset> Measured<D> {
    pub(crate) fn open(inner: D, place: &Path) -> Result<Self> {
        let (columns, width) =
            kept::columns(inner.schema().len(), |field| !knows_lengths(&inner, field));
        let digest = columns
            .iter()
            .fold(kept::identity_of("lengths", &inner), |digest, column| {
                digest.word(u64::from(column.is_some()))
            });
        let sizes = [inner.len() * 4 * width as u64, 8 * width as u64];
        let (file, origin) = kept::open_or_make(
            place,
            KIND,
            "lengths",
            digest.end(),
            |file| [file.len(LENGTHS), file.len(MOST)] == sizes,
            |out| {
                let failed = |error| {
                    Error::os(Stage::Index, "cannot write the lengths", error).with_path(place)
                };
                let mut most = vec![0_u64; width];
                let schema = inner.schema();
                if width > 0 {
                    pass(
                        &inner,
                        "lengths",
                        |rows, all| {
                            let mut lens = vec![0_u32; rows * width];
                            let mut long = None;
                            all(&mut |row, field, bytes| match (
                                columns[field],
                                u32::try_from(bytes.len()),
                            ) {
                                (Some(column), Ok(len)) => lens[row * width + column] = len,
                                (Some(_), Err(_)) => {
                                    long = Some(too_long(&schema[field].name, bytes.len()))
                                }
                                (None, _) => {}
                            })?;
                            long.map_or(Ok(lens), Err)
                        },
                        |lens| {
                            for row in lens.chunks_exact(width) {
                                most.iter_mut()
                                    .zip(row)
                                    .for_each(|(most, len)| *most = u64::from(*len).max(*most));
                            }
                            out.put(bytemuck::cast_slice(&lens)).map_err(failed)
                        },
                    )?;
                }
                out.end_section();
                out.put(bytemuck::cast_slice(&most)).map_err(failed)?;
                out.end_section();
                Ok(())
            },
        )?;
        Ok(Self {
            inner,
            columns,
            width,
            file,
            origin,
        })
    }

    /// Whether opening made the lengths; otherwise they came from their file.
    pub fn built(&self) -> bool {
        self.origin != Origin::Kept
    }

    /// The inner dataset.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Offset of a sample's lengths in their section.
    fn at(&self, sample: u64, column: usize) -> u64 {
        4 * (sample * self.width as u64 + column as u64)
    }

    /// Errors: [`ErrorKind::Changed`] for a field whose number of bytes differs from when it was
    /// measured.
    fn compare(&self, sample: u64, field: usize, measured: u32, found: usize) -> Result<()> {
        if measured as usize == found {
            return Ok(());
        }
        let name = &self.schema()[field].name;
        let place = self.file.path.display();
        let message = format!(
            "field `{name}` has {found} bytes, and {measured} in the lengths: the data changed, delete {place} to measure them \
             again"
        );
        Err(Error::new(ErrorKind::Changed, Stage::Decode, message).with_sample(sample))
    }
}

fn too_long(name: &str, bytes: usize) -> Error {
    let message = format!(
        "field `{name}` of a sample has {bytes} bytes; {} can be measured",
        u32::MAX
    );
    Error::new(ErrorKind::Limit, Stage::Index, message)
}

impl<D: Dataset> Dataset for Measured<D> {
    own!(framed);
    forward!(self => self.inner; schema len sources extents sampler identity);

    fn sizes(&self) -> Sizes {
        let inner = self.inner.sizes();
        Sizes {
            index_bytes: inner.index_bytes + self.file.heap(),
            ..inner
        }
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.inner.chunked().map(|_| self as &dyn Chunked)
    }

    fn describe(&self) -> String {
        let how = if self.built() {
            "measured now:"
        } else {
            "from"
        };
        format!(
            "{}; lengths {how} {}",
            self.inner.describe(),
            self.file.path.display()
        )
    }
}

impl<D: Dataset> Framed for Measured<D> {
    frames_of!(self, sample => (&self.inner, sample); check member seek_points);

    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let opened = frames(&self.inner).open(sample, field, bytes, buffer)?;
        if let Some(column) = self.columns[field] {
            self.compare(
                sample,
                field,
                self.file.value(LENGTHS, self.at(sample, column))?,
                opened.len(),
            )?;
        }
        Ok(opened)
    }

    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        match self.columns.get(field).copied().flatten() {
            Some(column) => Ok(Some(
                self.file
                    .value::<u32>(LENGTHS, self.at(sample, column))?
                    .into(),
            )),
            None => frames(&self.inner).field_bytes(sample, field),
        }
    }

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        match self.columns.get(field).copied().flatten() {
            Some(column) => self.file.value(MOST, 8 * column as u64).map(Some),
            None => frames(&self.inner).field_bytes_max(field),
        }
    }
}

impl<D: Dataset> Chunked for Measured<D> {
    forward!(self => chunks(&self.inner); starts is_whole inner chunk_extents chunk_bytes chunk_name);

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        chunks(&self.inner).open_chunk(chunk, pieces, scratch, out)?;
        let first = self.starts()[chunk];
        let mut lens = vec![0_u32; out.rows() * self.width];
        self.file.fill(
            LENGTHS,
            self.at(first, 0),
            bytemuck::cast_slice_mut(&mut lens),
        )?;
        let measured =
            (0..self.columns.len()).filter_map(|field| Some((field, self.columns[field]?)));
        for (field, column) in measured {
            for row in 0..out.rows() {
                let found = out.row(field, row).map_or(0, <[u8]>::len);
                self.compare(
                    first + row as u64,
                    field,
                    lens[row * self.width + column],
                    found,
                )?;
            }
        }
        Ok(())
    }
}
