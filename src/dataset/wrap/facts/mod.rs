//! Facts about the samples of any dataset, found by one pass over the data and kept in one side file:
//! checksums, lengths, seek points and sizes of pictures.
//!
//! ```text
//! inner dataset ──first open, all cores──► wanted facts that the file lacks ──► the file, read in place
//!                                                                                      │
//! inner.extents ──► readers ──► bytes ──CRC32C──► inner.check ──► inner.open ──length──► decoder ◄── seek points
//! ```
//!
//! | fact | of | bytes in the file | compared |
//! |---|---|---|---|
//! | checksum | stored bytes of each field; with chunks, of each extent | 4 | at each read |
//! | length | each field that the index does not measure, as a decoder gets it | 4 | at each read |
//! | seek points | each JPEG, see `feedline-jpeg` | 8, and about 1 % of the picture | by the decoder |
//! | size | the picture of one field, from its header | 8 | – |
//!
//! A file may have more facts than requested. If it lacks requested facts, another pass finds them,
//! and a file with all facts replaces it.
//!
//! Invariants:
//! - A file of other data, of other settings, of another kind or of a newer version is never
//!   replaced. Only [`anew`](FactsBuilder::anew) replaces facts of other data.
//! - A damaged file is an error: it may have checksums, and the data may be damaged as well.
//! - Checksums are used if all sources have the same lengths, paths and modification times (memory:
//!   the same bytes). If only paths or times differ, as in a copy, everything is read and compared.
//!   A difference is an error. A dataset that differs although its sources are unchanged is also an
//!   error: a header is damaged.
//! - Seek points never change a pixel of an intact picture. A picture whose points cannot be read
//!   is decoded without them, and counted.
//! - A file is published by a rename, so it is never seen half written. A large one is read in
//!   place and takes no memory.
//!
//! Limits: fields below 4 GiB. Samples of several extents for one field have no checksums.

mod file;
mod make;
mod sums;
#[cfg(test)]
#[allow(clippy::missing_trait_methods, reason = "toys, not wrappers")]
mod tests;

use self::file::{FactFile, FactsWriter, Found, Head, column, find};
use self::make::Making;
use self::sums::{Outline, state_of};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::forward::{forward, frames_of, own};
#[cfg(feature = "image")]
use feedline_core::dataset::no_field;
use feedline_core::dataset::{
    ChunkBuf, Chunked, Dataset, Digest, Framed, Parts, Sizes, chunks, frames, kept, knows_lengths,
};
use feedline_core::decode::Scratch;
use feedline_core::tensor::Encoding;
#[cfg(feature = "image")]
use feedline_image::Image;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Chooses the facts about a dataset; made by
/// [`DatasetExt::facts`](crate::dataset::DatasetExt::facts).
pub struct FactsBuilder<D> {
    inner: D,
    place: PathBuf,
    /// Bits of the wanted facts.
    columns: u32,
    #[cfg(feature = "image")]
    picture: Option<(String, Image)>,
    anew: bool,
}

/// A dataset with facts about its samples; made by
/// [`DatasetExt::facts`](crate::dataset::DatasetExt::facts).
pub struct Facts<D> {
    inner: D,
    file: FactFile,
    /// Bits of the wanted facts.
    columns: u32,
    measured: Vec<Option<usize>>,
    pointed: Vec<Option<usize>>,
    /// For datasets with chunks: the index of each chunk's first extent, then the number of all
    /// extents.
    pieces: Vec<usize>,
    origin: FactsOrigin,
    /// Lookups of seek points that failed.
    lost: AtomicU64,
}

/// Origin of the wanted facts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FactsOrigin {
    /// The file.
    Kept,
    /// The file; all bytes were compared with the checksums.
    Compared,
    /// The data.
    Made,
    /// The file, and for some of them the data.
    Added,
    /// Other datasets.
    Joined,
}

/// The wanted facts.
struct Wanted {
    head: Head,
    outline: Option<Outline>,
    /// For each field of the schema, its position among the fields with lengths, and with points.
    measured: Vec<Option<usize>>,
    pointed: Vec<Option<usize>>,
    picture: Option<SizedPicture>,
}

/// The field with the pictures that have sizes.
struct SizedPicture {
    field: usize,
    size: SizeOf,
}

/// Datasets with seek points, which together contain all samples.
type PointedParts<'p> = dyn Iterator<Item = Result<Box<dyn Dataset>>> + 'p;

/// Width and height from a picture's header; `None` for damage.
type SizeOf = Box<dyn Fn(&[u8]) -> Option<(u32, u32)> + Send + Sync>;

impl<D: Dataset> FactsBuilder<D> {
    pub(crate) fn new(inner: D, place: &Path) -> Self {
        Self {
            inner,
            place: place.to_path_buf(),
            columns: 0,
            #[cfg(feature = "image")]
            picture: None,
            anew: false,
        }
    }

    fn with(mut self, column: u32) -> Self {
        self.columns |= column;
        self
    }

    /// Verifies every byte that is read, with one CRC32C per field of each sample (with chunks: per
    /// extent of a chunk). Rows are no longer read in place.
    ///
    /// The first opening assumes that the bytes on disk are correct. If only modification times or
    /// paths differ later, as in a copy, all bytes are read once and compared.
    #[must_use]
    pub fn checksums(self) -> Self {
        self.with(column::SUMS)
    }

    /// Adds the [lengths](crate::dataset::DatasetExt::lengths) of the fields for which the index
    /// has none. Damaged samples have length 0. A sample whose length differs when it is read later
    /// is an error ([`ErrorKind::Changed`]).
    #[must_use]
    pub fn lengths(self) -> Self {
        self.with(column::LENGTHS)
    }

    /// Adds seek points to the JPEGs: a decoder of crops then starts at each row of the crop instead
    /// of at the start of the picture. The pixels stay the same. JPEGs that have restart markers or
    /// already contain seek points need none.
    #[cfg(feature = "image")]
    #[must_use]
    pub fn seek_points(self) -> Self {
        self.with(column::POINTS)
    }

    /// Adds the sizes of the pictures in the field `field`, as `image` decodes them: upright, if
    /// that is [set](Image::exif_orientation). [`Facts::picture_sizes`] returns them. A picture with
    /// a damaged header has 1 × 1 pixels.
    #[cfg(feature = "image")]
    #[must_use]
    pub fn picture_sizes(mut self, field: &str, image: &Image) -> Self {
        self.picture = Some((field.into(), image.clone()));
        self.with(column::SIZES)
    }

    /// Finds all requested facts in the current bytes and ignores the file: for data that was
    /// changed on purpose, and for a damaged file. Other facts in the file are dropped.
    #[must_use]
    pub fn anew(mut self) -> Self {
        self.anew = true;
        self
    }

    /// Opens the facts. The first call reads everything once to make the file, on all cores
    /// ([`Facts::built`] reports this). Make the file before many processes open it.
    ///
    /// Errors: file system errors, including a file that cannot be written; a file of another kind
    /// ([`ErrorKind::Config`]), of another dataset, of this one with other samples or file lengths,
    /// or of other settings ([`ErrorKind::Changed`]); a damaged file ([`ErrorKind::Decode`]); with
    /// checksums, bytes that differ ([`ErrorKind::Changed`]); no requested fact, a field without
    /// pictures, a subset of a dataset with chunks ([`ErrorKind::Config`]); a field of 4 GiB or
    /// more ([`ErrorKind::Limit`]). After an error, the file is unchanged.
    pub fn open(self) -> Result<Facts<D>> {
        self.open_with(None)
    }

    /// Like [`open`](Self::open), but takes the seek points from `parts`: datasets with seek points
    /// that together have the samples and files of this one, in its order. So many machines can
    /// find the points, each for some of the files.
    ///
    /// Errors: those of `open` and of `parts`; [`ErrorKind::Config`] if the parts have other
    /// samples, files or fields.
    #[cfg(feature = "image")]
    pub fn open_joined<P: Dataset>(
        self,
        parts: impl IntoIterator<Item = Result<P>>,
    ) -> Result<Facts<D>> {
        let mut parts = parts
            .into_iter()
            .map(|part| part.map(|part| Box::new(part) as Box<dyn Dataset>));
        self.with(column::POINTS).open_with(Some(&mut parts))
    }

    fn open_with(self, parts: Option<&mut PointedParts<'_>>) -> Result<Facts<D>> {
        let wanted = self.wanted()?;
        let samples = self.inner.len();
        let (old, made) = match find(&self.place, &wanted.head, samples)? {
            Found::Whole(_) if self.anew => (None, FactsOrigin::Made),
            Found::Whole(file) => (Some(file), FactsOrigin::Added),
            Found::Useless(_) if self.anew => (None, FactsOrigin::Made),
            Found::Useless(error) => return Err(error),
            Found::Nothing => (None, FactsOrigin::Made),
        };
        let missing = match &old {
            Some(old) => wanted.missing(&old.head, &self.place)?,
            None => wanted.head.columns,
        };
        let (file, origin) = match old {
            Some(old) if missing == 0 => (old, FactsOrigin::Kept),
            old => {
                let compared = old.as_ref().is_some_and(|old| old.head.has(missing));
                let origin = match missing {
                    column::POINTS if parts.is_some() => FactsOrigin::Joined,
                    column::SUMS if compared => FactsOrigin::Compared,
                    _ => made,
                };
                (self.make(&wanted, missing, old, parts)?, origin)
            }
        };
        Ok(Facts {
            inner: self.inner,
            file,
            columns: wanted.head.columns,
            measured: wanted.measured,
            pointed: wanted.pointed,
            pieces: wanted.outline.map_or(Vec::new(), |outline| outline.pieces),
            origin,
            lost: AtomicU64::new(0),
        })
    }

    fn wanted(&self) -> Result<Wanted> {
        let refused = |message: &str| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        if self.columns == 0 {
            return refused("no fact was requested: choose checksums, lengths or others");
        }
        let schema = self.inner.schema();
        let (measured, lens) =
            kept::columns(schema.len(), |field| !knows_lengths(&self.inner, field));
        let (pointed, points) = kept::columns(schema.len(), |field| {
            matches!(schema[field].encoding, Encoding::Image | Encoding::Bytes)
        });
        let mut wanted = Wanted {
            head: Head::of(&self.inner),
            outline: None,
            measured,
            pointed,
            picture: None,
        };
        let head = &mut wanted.head;
        head.columns = self.columns;
        if head.has(column::SUMS) {
            if self.inner.sizes().appended_max > 0 {
                return refused(
                    "samples of several extents for one field, such as packed documents, have no \
                     checksums",
                );
            }
            let outline = Outline::of(&self.inner)?;
            head.state = state_of(self.inner.sources())?;
            head.shape = outline.shape;
            head.sums = outline.fields as u32;
            head.extents = outline.pieces.last().copied().unwrap_or(0) as u64;
            wanted.outline = Some(outline);
        }
        if head.has(column::LENGTHS) {
            let digest = wanted
                .measured
                .iter()
                .fold(Digest::new("lengths"), |digest, column| {
                    digest.word(u64::from(column.is_some()))
                });
            head.measured = digest.end();
            head.lens = lens as u32;
        }
        if head.has(column::POINTS) {
            head.points = points as u32;
        }
        #[cfg(feature = "image")]
        if let Some((name, image)) = &self.picture {
            let Some(field) = schema.iter().position(|known| known.name == *name) else {
                return refused(&no_field(schema, name));
            };
            if schema[field].encoding != Encoding::Image {
                return refused(&format!(
                    "field `{name}` is {}; only pictures have sizes",
                    schema[field].encoding
                ));
            }
            head.pictures = Digest::new("sizes")
                .words(&[field as u64, image.turns().into()])
                .end();
            let image = image.clone();
            wanted.picture = Some(SizedPicture {
                field,
                size: Box::new(move |bytes| image.size_of(bytes).ok()),
            });
        }
        Ok(wanted)
    }

    /// Finds the facts `missing`, writes them to a file together with the facts of `old`, and opens
    /// the file.
    fn make(
        &self,
        wanted: &Wanted,
        missing: u32,
        old: Option<FactFile>,
        parts: Option<&mut PointedParts<'_>>,
    ) -> Result<FactFile> {
        let place = &self.place;
        let mut head = wanted.head;
        if let Some(old) = &old {
            head.take(old.head.columns & !head.columns, &old.head);
        }
        let mut out = FactsWriter::create(place, head.has(column::POINTS), self.anew)?;
        let mut finds = missing;
        if let Some(parts) = parts.filter(|_| missing & column::POINTS != 0) {
            wanted.join(&self.inner, parts, &mut out, place)?;
            finds &= !column::POINTS;
        }
        let making = Making {
            dataset: &self.inner,
            wanted,
            head,
            finds,
            old: old.as_ref(),
            place,
        };
        let most = making.write(&mut out)?;
        if wanted.outline.is_some() && state_of(self.inner.sources())? != head.state {
            let message = "a source was written to while its facts were made";
            return Err(Error::new(ErrorKind::Changed, Stage::Index, message));
        }
        out.publish(&head, &most)?;
        match find(place, &head, self.inner.len())? {
            // Another process may have added facts during the pass.
            Found::Whole(file) if matches!(wanted.missing(&file.head, place), Ok(0)) => Ok(file),
            _ => {
                let message =
                    "the file of facts changed while it was written: name a file of its own";
                Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(place))
            }
        }
    }
}

impl Wanted {
    /// Bits of the wanted facts that the file with this head lacks, or that must be compared.
    ///
    /// Errors: [`ErrorKind::Changed`] for facts of other settings.
    fn missing(&self, old: &Head, place: &Path) -> Result<u32> {
        let own = &self.head;
        let both = own.columns & old.columns;
        let refused = |message: &str| {
            Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(place))
        };
        if both & column::SUMS != 0 && own.shape != old.shape {
            return Err(file::another(place));
        }
        if both & column::LENGTHS != 0 && own.measured != old.measured {
            return refused("the file has the lengths of other fields: name another file");
        }
        if both & column::SIZES != 0 && own.pictures != old.pictures {
            return refused(
                "the file has the sizes of pictures of another field or orientation: name \
                 another file",
            );
        }
        let compared = match both & column::SUMS != 0 && own.state != old.state {
            true => column::SUMS,
            false => 0,
        };
        Ok(own.columns & !old.columns | compared)
    }

    /// Writes the seek points of `parts`.
    fn join(
        &self,
        inner: &dyn Dataset,
        parts: &mut PointedParts<'_>,
        out: &mut FactsWriter<'_>,
        place: &Path,
    ) -> Result<()> {
        let refused =
            |message: String| Error::new(ErrorKind::Config, Stage::Index, message).with_path(place);
        let mut samples = 0;
        let mut lens = Vec::new();
        let mut buffer = Vec::new();
        for part in parts {
            let part = part?;
            if part.schema() != inner.schema() {
                return Err(refused(
                    "the fields of a part differ from the dataset's".into(),
                ));
            }
            for sample in 0..part.len() {
                for (field, position) in self.pointed.iter().enumerate() {
                    if position.is_some() {
                        out.points(frames(&*part).seek_points(sample, field, &mut buffer)?)?;
                    }
                }
            }
            samples += part.len();
            lens.extend(part.sources().ids().map(|id| part.sources().len_of(id)));
        }
        let sources = inner.sources();
        if samples == inner.len() && sources.ids().map(|id| sources.len_of(id)).eq(lens) {
            return Ok(());
        }
        let all = inner.len();
        Err(refused(format!(
            "the parts have {samples} samples, the dataset {all}, or their files differ"
        )))
    }
}

impl<D: Dataset> Facts<D> {
    /// Whether opening made a pass over the data to find facts; otherwise all facts came from the
    /// file.
    pub fn built(&self) -> bool {
        matches!(self.origin, FactsOrigin::Made | FactsOrigin::Added)
    }

    /// The dataset without facts.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Bytes of all seek points.
    pub fn points_bytes(&self) -> u64 {
        self.file.points_bytes()
    }

    /// Width and height of every sample's picture, for [`Image::groups`](crate::decode::Image::groups)
    /// and [`Image::patch_counts`](crate::decode::Image::patch_counts).
    ///
    /// Errors: [`ErrorKind::Config`] without [`FactsBuilder::picture_sizes`]; reading errors.
    #[cfg(feature = "image")]
    pub fn picture_sizes(&self) -> Result<Vec<(u32, u32)>> {
        if !self.has(column::SIZES) {
            let message = "sizes of pictures are not among the facts: add picture_sizes";
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        (0..self.inner.len())
            .map(|sample| self.file.size(sample).map(Into::into))
            .collect()
    }

    fn has(&self, column: u32) -> bool {
        self.columns & column != 0
    }

    /// Position of a field among the measured fields, if lengths are requested.
    fn measured(&self, field: usize) -> Option<usize> {
        let position = self.measured.get(field).copied().flatten();
        position.filter(|_| self.has(column::LENGTHS))
    }

    /// Errors: [`ErrorKind::Decode`] with both CRCs.
    fn verify(&self, expected: u32, bytes: &[u8]) -> Result<()> {
        let found = crc32c::crc32c(bytes);
        if found == expected {
            return Ok(());
        }
        let message = format!(
            "CRC32C {expected:08x} when it was indexed, {found:08x} now ({})",
            self.file.file.path.display()
        );
        Err(Error::new(ErrorKind::Decode, Stage::Decode, message))
    }

    /// Errors: [`ErrorKind::Changed`] for a field whose number of bytes differs from when it was
    /// measured.
    fn compare_len(&self, sample: u64, field: usize, found: usize) -> Result<()> {
        let Some(position) = self.measured(field) else {
            return Ok(());
        };
        let measured = self.file.len(sample, position)?;
        if measured as usize == found {
            return Ok(());
        }
        let name = &self.schema()[field].name;
        let place = self.file.file.path.display();
        let message = format!(
            "field `{name}` has {found} bytes, but {measured} in the lengths: the data changed, \
             make the facts in {place} anew"
        );
        Err(Error::new(ErrorKind::Changed, Stage::Decode, message).with_sample(sample))
    }

    /// Verifies the extents of a chunk.
    fn verify_chunk(&self, chunk: usize, pieces: &[Bytes]) -> Result<()> {
        for (number, piece) in pieces.iter().enumerate() {
            let extent = self.pieces[chunk] + number;
            let verified = self
                .file
                .extent_sum(extent as u64)
                .and_then(|expected| self.verify(expected, piece));
            if let Err(error) = verified {
                let mut extents = Vec::new();
                chunks(&self.inner).chunk_extents(chunk, &mut extents)?;
                let error = error.within(self.chunk_name(chunk));
                return Err(self.inner.sources().at(error, &extents[number]));
            }
        }
        Ok(())
    }
}

impl<D: Dataset> Dataset for Facts<D> {
    own!(framed);
    forward!(self => self.inner; schema len sources sampler keys identity);

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.inner.extents(sample, parts)?;
        if self.has(column::SUMS) {
            parts.check_all();
        }
        Ok(())
    }

    fn sizes(&self) -> Sizes {
        let inner = self.inner.sizes();
        let pieces = self.pieces.capacity() * size_of::<usize>();
        Sizes {
            index_bytes: inner.index_bytes + self.file.file.heap() + pieces,
            ..inner
        }
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.inner.chunked().map(|_| self as &dyn Chunked)
    }

    fn describe(&self) -> String {
        let points = format!("seek points of {:.3} MB", self.points_bytes() as f64 / 1e6);
        let names = [
            (column::SUMS, "CRC32Cs"),
            (column::LENGTHS, "lengths"),
            (column::POINTS, &points),
            (column::SIZES, "sizes of pictures"),
        ];
        let names: Vec<_> = names
            .into_iter()
            .filter(|(column, _)| self.has(*column))
            .map(|(_, name)| name)
            .collect();
        let how = match self.origin {
            FactsOrigin::Kept => "from",
            FactsOrigin::Compared => {
                "compared now with all bytes, since times or paths had changed:"
            }
            FactsOrigin::Made => "made now:",
            FactsOrigin::Added => "added now to",
            FactsOrigin::Joined => "joined now in",
        };
        let lost = match self.lost.load(Ordering::Relaxed) {
            0 => String::new(),
            lost => format!("; {lost} of them could not be read: make the facts anew"),
        };
        let inner = self.inner.describe();
        let place = self.file.file.path.display();
        format!("{inner}; {} {how} {place}{lost}", names.join(", "))
    }
}

impl<D: Dataset> Framed for Facts<D> {
    frames_of!(self, sample => (&self.inner, sample); make member);

    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        if self.has(column::SUMS) {
            let verified = self
                .file
                .sum(sample, field)
                .and_then(|expected| self.verify(expected, bytes));
            verified.map_err(|error| {
                let name = &self.schema()[field].name;
                error
                    .within(format_args!("field `{name}`"))
                    .with_sample(sample)
            })?;
        }
        frames(&self.inner).check(sample, field, bytes)
    }

    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let opened = frames(&self.inner).open(sample, field, bytes, buffer)?;
        self.compare_len(sample, field, opened.len())?;
        Ok(opened)
    }

    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        match self.measured(field) {
            Some(position) => Ok(Some(self.file.len(sample, position)?.into())),
            None => frames(&self.inner).field_bytes(sample, field),
        }
    }

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        match self.measured(field) {
            Some(position) => self.file.most(position).map(Some),
            None => frames(&self.inner).field_bytes_max(field),
        }
    }

    fn seek_points<'a>(
        &'a self,
        sample: u64,
        field: usize,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        if !self.has(column::POINTS) {
            return frames(&self.inner).seek_points(sample, field, buffer);
        }
        let Some(Some(position)) = self.pointed.get(field) else {
            return Ok(&[]);
        };
        let entry = sample * u64::from(self.file.head.points) + *position as u64;
        let points = self.file.points(entry, buffer);
        points.inspect_err(|_| {
            self.lost.fetch_add(1, Ordering::Relaxed);
        })
    }
}

impl<D: Dataset> Chunked for Facts<D> {
    forward!(self => chunks(&self.inner); starts is_whole inner chunk_extents chunk_bytes chunk_name);

    fn open_chunk(
        &self,
        chunk: usize,
        pieces: &[Bytes],
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
    ) -> Result<()> {
        if self.has(column::SUMS) {
            self.verify_chunk(chunk, pieces)?;
        }
        chunks(&self.inner).open_chunk(chunk, pieces, scratch, out)?;
        if !self.has(column::LENGTHS) {
            return Ok(());
        }
        let first = self.starts()[chunk];
        for row in 0..out.rows() {
            for field in 0..self.measured.len() {
                let found = out.row(field, row).map_or(0, <[u8]>::len);
                self.compare_len(first + row as u64, field, found)?;
            }
        }
        Ok(())
    }
}
