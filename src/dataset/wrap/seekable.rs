//! Seek points for the JPEGs of any dataset, kept in a side file, so that decoding a crop starts at
//! its first row.
//!
//! ```text
//! inner dataset ──► bytes ──► decoder ◄── ctx.seek_points() ◄── points of (sample, field) ◄── the side file, read in place
//! ```
//!
//! The first `open` reads everything once and walks through the codes of each picture, on all
//! cores. Later calls only open the file. In the file, points take about 1 % of the pictures'
//! bytes, and 8 bytes per field and sample. In memory they take at most 16 MiB, unless the file is
//! an object of a store; while they are made, 8 bytes per field and sample. Shards that this crate
//! writes need no such file: their pictures contain the points, see [`prepare`](feedline_prepare).
//!
//! Sections of the file: the entries, one after the other, and the end of each. An entry holds the
//! points of one field of one sample; it is empty for other formats, progressive JPEGs, JPEGs with
//! restart markers and damaged ones.
//!
//! Invariants: a file that is found to be damaged when it is opened, or is of an older version, is
//! made again; a file of another dataset, or of another kind, is never replaced. Points never
//! change a pixel of an intact picture: the decoder compares them with the picture, see the crate
//! `feedline-jpeg`. A picture whose points cannot be read later is decoded without them, and
//! counted.

use crate::dataset::wrap::pass::pass;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::forward::{forward, frames_of, own};
use feedline_core::dataset::kept::Origin;
use feedline_core::dataset::{Dataset, Framed, Sizes, frames, kept};
use feedline_core::storage::sidefile::{SideKind, SideWriter, Sidefile};
use feedline_core::tensor::Encoding;
use feedline_jpeg as jpeg;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const KIND: SideKind = SideKind {
    name: *b"seek",
    version: 2,
    older: b"deefkees",
};
const ENTRIES: usize = 0;
const ENDS: usize = 1;

/// A dataset with seek points; made by
/// [`DatasetExt::seekable`](crate::dataset::DatasetExt::seekable).
pub struct Seekable<D> {
    inner: D,
    /// For each field of the schema, its position among the fields with points.
    columns: Vec<Option<usize>>,
    /// Number of fields with points.
    width: usize,
    file: Sidefile,
    origin: Origin,
    /// Lookups that failed.
    lost: AtomicU64,
}

impl<D: Dataset> Seekable<D> {
    pub(crate) fn open(inner: D, place: &Path) -> Result<Self> {
        let (columns, width) = columns(&inner);
        let (file, origin) = open_or_make(&inner, place, width, |out| {
            make(&inner, &columns, width, out)
        })?;
        Ok(Self {
            inner,
            columns,
            width,
            file,
            origin,
            lost: AtomicU64::new(0),
        })
    }

    /// As `open`, with the points of `parts` instead of a pass over the data.
    pub(crate) fn open_from<P: Dataset>(
        inner: D,
        place: &Path,
        parts: impl IntoIterator<Item = Result<P>>,
    ) -> Result<Self> {
        let (columns, width) = columns(&inner);
        let refused =
            |message: String| Error::new(ErrorKind::Config, Stage::Index, message).with_path(place);
        let copy = |out: &mut PointsWriter<'_>| {
            let mut samples = 0;
            let mut lens = Vec::new();
            let mut buffer = Vec::new();
            for part in parts {
                let part = part?;
                if part.schema() != inner.schema() {
                    return Err(refused("a part has other fields".into()));
                }
                let fields = (0..columns.len()).filter(|field| columns[*field].is_some());
                for (sample, field) in (0..part.len())
                    .flat_map(|sample| fields.clone().map(move |field| (sample, field)))
                {
                    out.push(frames(&part).seek_points(sample, field, &mut buffer)?)?;
                }
                samples += part.len();
                lens.extend(part.sources().ids().map(|id| part.sources().len_of(id)));
            }
            let sources = inner.sources();
            if samples != inner.len() || !sources.ids().map(|id| sources.len_of(id)).eq(lens) {
                let all = inner.len();
                return Err(refused(format!(
                    "the parts have {samples} samples, in other files than the dataset's {all}"
                )));
            }
            Ok(())
        };
        let (file, _) = open_or_make(&inner, place, width, copy)?;
        // Only the parts read the data.
        let origin = Origin::Kept;
        Ok(Self {
            inner,
            columns,
            width,
            file,
            origin,
            lost: AtomicU64::new(0),
        })
    }

    /// Whether opening made the points; otherwise they came from their file.
    pub fn built(&self) -> bool {
        self.origin != Origin::Kept
    }

    /// The dataset without seek points.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Bytes of all points.
    pub fn bytes(&self) -> u64 {
        self.file.len(ENTRIES)
    }
}

impl<D: Dataset> Framed for Seekable<D> {
    frames_of!(self, sample => (&self.inner, sample); check open field_bytes member);

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        frames(&self.inner).field_bytes_max(field)
    }

    fn seek_points<'a>(
        &'a self,
        sample: u64,
        field: usize,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let Some(Some(column)) = self.columns.get(field) else {
            return Ok(&[]);
        };
        let entry = sample * self.width as u64 + *column as u64;
        let points = self
            .file
            .entry(ENTRIES, ENDS, entry, jpeg::POINTS_MAX as u64, buffer);
        points.inspect_err(|_| {
            self.lost.fetch_add(1, Ordering::Relaxed);
        })
    }
}

impl<D: Dataset> Dataset for Seekable<D> {
    own!(framed);
    forward!(self => self.inner; schema len sources extents chunked sampler identity);

    fn sizes(&self) -> Sizes {
        let inner = self.inner.sizes();
        Sizes {
            index_bytes: inner.index_bytes + self.file.heap(),
            ..inner
        }
    }

    fn describe(&self) -> String {
        let how = match self.origin {
            Origin::Kept => "from",
            Origin::Made => "made now:",
            Origin::MadeAgain => "made again, since the file was damaged or of an older version:",
        };
        let inner = self.inner.describe();
        let megabytes = self.bytes() as f64 / 1e6;
        let place = self.file.path.display();
        let lost = match self.lost.load(Ordering::Relaxed) {
            0 => String::new(),
            lost => format!("; {lost} of them could not be read: delete the file to make it again"),
        };
        format!("{inner}; seek points of {megabytes:.3} MB, {how} {place}{lost}")
    }
}

/// For each field of the schema, its position among the fields with points; then the number of
/// these fields.
fn columns(dataset: &dyn Dataset) -> (Vec<Option<usize>>, usize) {
    let schema = dataset.schema();
    kept::columns(schema.len(), |field| has_points(&schema[field].encoding))
}

/// Whether values of this encoding may be pictures.
fn has_points(encoding: &Encoding) -> bool {
    matches!(encoding, Encoding::Image | Encoding::Bytes)
}

/// Opens the file, or lets `fill` make its entries.
///
/// Errors: those of [`kept::open_or_make`].
fn open_or_make(
    dataset: &dyn Dataset,
    place: &Path,
    width: usize,
    fill: impl FnOnce(&mut PointsWriter<'_>) -> Result<()>,
) -> Result<(Sidefile, Origin)> {
    let identity = kept::identity_of("seek points", dataset).end();
    let entries = dataset.len() * width as u64;
    kept::open_or_make(
        place,
        KIND,
        "seek points",
        identity,
        |file| file.len(ENDS) == 8 * entries,
        |out| {
            let mut writer = PointsWriter {
                out,
                ends: Vec::new(),
                end: 0,
                place,
            };
            fill(&mut writer)?;
            writer.finish()
        },
    )
}

/// Writes the entries.
struct PointsWriter<'a> {
    out: &'a mut SideWriter,
    ends: Vec<u64>,
    end: u64,
    place: &'a Path,
}

impl PointsWriter<'_> {
    fn push(&mut self, points: &[u8]) -> Result<()> {
        self.end += points.len() as u64;
        self.ends.push(self.end);
        self.put(points)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.put(bytes).map_err(|error| {
            Error::os(Stage::Index, "cannot write the seek points", error).with_path(self.place)
        })
    }

    fn finish(mut self) -> Result<()> {
        self.out.end_section();
        let ends = std::mem::take(&mut self.ends);
        self.put(bytemuck::cast_slice(&ends))?;
        self.out.end_section();
        Ok(())
    }
}

/// Reads everything, and writes the entries of each run of samples.
fn make(
    dataset: &dyn Dataset,
    columns: &[Option<usize>],
    width: usize,
    out: &mut PointsWriter<'_>,
) -> Result<()> {
    pass(
        dataset,
        "seek points",
        |rows, all| {
            let mut decoder = jpeg::Decoder::default();
            let mut entries = vec![Vec::new(); rows * width];
            all(&mut |row, field, bytes| {
                if let Some(column) = columns[field] {
                    entries[row * width + column] = decoder.seek_points(bytes);
                }
            })?;
            Ok(entries)
        },
        |entries| entries.iter().try_for_each(|points| out.push(points)),
    )
}
