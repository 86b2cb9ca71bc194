//! Checksums for any dataset: one CRC32C per stored field of every sample, kept in a file, verified at each read.
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
//! Costs: 4 bytes per stored field and sample (per extent, in chunks); rows are no longer read in place, since they are
//! verified first. The schema, the places of all bytes, and bytes that lie in the inner dataset's index (labels) have one
//! CRC32C together, verified when the dataset is opened.
//!
//! Invariants: an existing file is never replaced in silence. It is used when its own CRC is right and all sources have the
//! same lengths, paths and modification times (memory: the same bytes). When only paths or times differ, as in a copy,
//! everything is read and compared: the checksums stay, and a difference is an error. Other lengths are an error, and so is a
//! damaged file; only [`checked_anew`](crate::dataset::DatasetExt::checked_anew) makes it anew, and [`Checked::built`] says
//! so. A dataset that is another than then although its sources are not is an error: a header is damaged. It appears by a
//! rename.

use crate::dataset::index::fnv;
use crate::dataset::parallel::parallel;
use crate::dataset::{ChunkBuf, ChunkBytes, Chunked, Dataset, Part, Parts};
use crate::decode::Scratch;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::listing::look;
use crate::storage::publish::publish;
use crate::storage::{Blob, Extent, SourceId, Sources};
use crate::tensor::{EncodedField, Spec};
use bytes::Bytes;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Samples that a thread takes at a time; part of the format, since the CRC of inline bytes depends on it.
const RUN: u64 = 4096;
/// Bytes that are read at a time while the file is made.
const STEP: usize = 1 << 20;
/// "feedcrc" and the version, in native order.
const MAGIC: [u32; 2] = [u32::from_be_bytes(*b"feed"), u32::from_be_bytes(*b"crc3")];
/// Words of the header: magic, lengths and state of the sources, samples, masks of fields (stored, inline; two each), CRC of
/// what the dataset is ([`survey`]), CRC32C of the file without this word.
const HEADER: usize = 14;
const SHAPE: usize = HEADER - 2;
const CRC: usize = HEADER - 1;
/// Files that an error names.
const LISTED: usize = 3;

/// A dataset whose every read is verified; made by [`DatasetExt::checked`](crate::dataset::DatasetExt::checked).
pub struct Checked<D> {
    inner: D,
    /// The file as it stands: header, then CRCs by sample and stored field.
    words: Vec<u32>,
    masks: Masks,
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

/// Sets of fields, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Masks {
    /// Lie in storage, for at least one sample.
    stored: u64,
    /// Lie in the index, for at least one sample.
    inline: u64,
}

impl Masks {
    fn see(&mut self, field: usize, part: Part<'_>) {
        let set = if part.extent().is_some() { &mut self.stored } else { &mut self.inline };
        *set |= 1 << field;
    }

    fn with(self, other: Self) -> Self {
        Self { stored: self.stored | other.stored, inline: self.inline | other.inline }
    }

    /// CRCs per sample.
    fn stride(self) -> usize {
        self.stored.count_ones() as usize
    }

    /// Where the CRC of a field stands among those of a sample.
    fn slot(self, field: usize) -> usize {
        (self.stored & ((1 << field) - 1)).count_ones() as usize
    }
}

impl<D: Dataset> Checked<D> {
    /// With `anew` the checksums are made from what is on disk, whatever their file says.
    pub(crate) fn open(inner: D, place: &Path, anew: bool) -> Result<Self> {
        let sources = Sourced::of(inner.sources())?;
        let outline = Outline::of(&inner)?;
        let kept = match load(place, sources.lengths)? {
            Found::Nothing => None,
            Found::Useless(error) if !anew => return Err(error.with_path(place)),
            Found::Whole(kept) if !anew => Some(kept),
            Found::Useless(_) | Found::Whole(_) => None,
        };
        let (mut words, origin) = match kept {
            Some(kept) => {
                let state = kept.state;
                // The lengths of all sources are those of then, so another outline is damage.
                let words = kept.same(&outline, place)?;
                if state == sources.state {
                    (words, Origin::Kept)
                } else {
                    outline.compare(&inner, &words, &outline.make(&inner)?, place)?;
                    (words, Origin::Compared)
                }
            }
            None => (outline.make(&inner)?, Origin::Made),
        };
        if origin != Origin::Kept {
            if Sourced::of(inner.sources())? != sources {
                let message = "a source was written to while its checksums were made";
                return Err(Error::new(ErrorKind::Changed, Stage::Index, message));
            }
            outline.seal(&mut words, sources);
            publish(place, bytemuck::cast_slice(&words), false)
                .map_err(|error| Error::os(Stage::Index, "cannot write the checksums", error).with_path(place))?;
        }
        let Outline { masks, pieces, .. } = outline;
        Ok(Self { inner, words, masks, pieces, place: place.to_path_buf(), origin })
    }

    /// Whether the checksums were made by this call, from what was on disk then; else they came from their file.
    pub fn built(&self) -> bool {
        self.origin == Origin::Made
    }

    /// The dataset without its checks.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    fn expected(&self, sample: u64, field: usize) -> Option<u32> {
        if self.masks.stored & (1 << field) == 0 {
            return None;
        }
        let at = HEADER + sample as usize * self.masks.stride() + self.masks.slot(field);
        self.words.get(at).copied()
    }
}

impl<D: Dataset> Dataset for Checked<D> {
    fn schema(&self) -> &[EncodedField] {
        self.inner.schema()
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn sources(&self) -> &Arc<Sources> {
        self.inner.sources()
    }

    fn sample_bytes_max(&self) -> u64 {
        self.inner.sample_bytes_max()
    }

    fn largest_sample(&self) -> Option<u64> {
        self.inner.largest_sample()
    }

    fn member(&self, sample: u64) -> Option<String> {
        self.inner.member(sample)
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        self.inner.extents(sample, parts)?;
        parts.check_all();
        Ok(())
    }

    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        let found = crc32c::crc32c(bytes);
        match self.expected(sample, field) {
            Some(expected) if expected == found => {}
            Some(expected) => {
                let name = &self.schema()[field].name;
                let message = format!(
                    "field `{name}`: CRC32C {expected:08x} when it was indexed, {found:08x} now ({})",
                    self.place.display()
                );
                return Err(Error::new(ErrorKind::Decode, Stage::Decode, message).with_sample(sample));
            }
            None => {
                let message = "the dataset has bytes in storage for a field that had none when it was indexed";
                return Err(Error::new(ErrorKind::Changed, Stage::Decode, message).with_sample(sample));
            }
        }
        self.inner.check(sample, field, bytes)
    }

    fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8], buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        self.inner.open(sample, field, bytes, buffer)
    }

    fn opened_bytes_max(&self) -> u64 {
        self.inner.opened_bytes_max()
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.inner.chunked().map(|_| self as &dyn Chunked)
    }

    fn identity(&self) -> u64 {
        self.inner.identity()
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
    fn starts(&self) -> &[u64] {
        self.chunks().starts()
    }

    fn is_whole(&self) -> bool {
        self.chunks().is_whole()
    }

    fn inner(&self, sample: u64) -> u64 {
        self.chunks().inner(sample)
    }

    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        self.chunks().chunk_extents(chunk, extents)
    }

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        self.chunks().chunk_bytes(chunk)
    }

    fn open_chunk(&self, chunk: usize, pieces: &[Bytes], scratch: &mut Scratch, out: &mut ChunkBuf) -> Result<()> {
        let expected = &self.words[self.pieces[chunk]..self.pieces[chunk + 1]];
        for (number, (piece, expected)) in pieces.iter().zip(expected).enumerate() {
            let found = crc32c::crc32c(piece);
            if found != *expected {
                let mut extents = Vec::new();
                self.chunks().chunk_extents(chunk, &mut extents)?;
                let extent = extents[number];
                let message =
                    format!("CRC32C {expected:08x} when it was indexed, {found:08x} now ({})", self.place.display());
                let error = Error::new(ErrorKind::Decode, Stage::Decode, message).within(self.chunk_name(chunk));
                let path = self.inner.sources().path(extent.source);
                return Err(error.with_path(path).with_range(extent.offset, extent.len));
            }
        }
        self.chunks().open_chunk(chunk, pieces, scratch, out)
    }

    fn chunk_name(&self, chunk: usize) -> String {
        self.chunks().chunk_name(chunk)
    }
}

/// The extents of every chunk, with nothing in them that the pipeline would refuse.
fn chunk_extents(dataset: &dyn Dataset) -> Result<Vec<Vec<Extent>>> {
    let Some(chunks) = dataset.chunked() else { return Ok(Vec::new()) };
    let sources = dataset.sources();
    let of = |chunk: usize| {
        let mut extents = Vec::new();
        chunks.chunk_extents(chunk, &mut extents)?;
        let outside = extents.iter().find(|extent| {
            extent.source.index() >= sources.count()
                || extent.offset.checked_add(extent.len).is_none_or(|end| end > sources.len_of(extent.source))
        });
        outside.map_or(Ok(()), |extent| {
            let message = format!("{} lies outside of its source", chunks.chunk_name(chunk));
            Err(Error::new(ErrorKind::Truncated, Stage::Index, message).with_range(extent.offset, extent.len))
        })?;
        Ok(extents)
    };
    (0..chunks.starts().len() - 1).map(of).collect()
}

/// What the chunks are, as the files describe themselves.
fn chunk_shape(dataset: &dyn Dataset, extents: &[Vec<Extent>]) -> u32 {
    let starts = dataset.chunked().map_or(&[][..], |chunks| chunks.starts());
    let mut crc = crc32c::crc32c(format!("{:?}", dataset.schema()).as_bytes());
    crc = crc32c::crc32c_append(crc, bytemuck::cast_slice(starts));
    for extent in extents.iter().flatten() {
        crc = crc32c::crc32c_append(crc, bytemuck::cast_slice(&place_of(extent)));
    }
    crc
}

impl<D: Dataset> std::fmt::Debug for Checked<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

/// What tells one set of sources from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sourced {
    /// Of their number and lengths: other data has others, a copy of the same data has the same.
    lengths: u64,
    /// Of their paths and modification times, or of the bytes of memory.
    state: u64,
}

impl Sourced {
    fn of(sources: &Sources) -> Result<Self> {
        let runs = runs(sources.count() as u64);
        let hashes = parallel(&runs, |_, run| {
            let (mut lengths, mut state) = (0, 0);
            for id in run.clone().map(|id| SourceId::at(id as usize)) {
                lengths = fnv(format!("{lengths:x} {:x}", sources.len_of(id)).as_bytes());
                state = fnv(format!("{state:x} {:x}", source_state(sources, id)?).as_bytes());
            }
            Ok([lengths, state])
        })?;
        let of = |which: usize| {
            let hashes: Vec<u64> = hashes.iter().map(|hashes| hashes[which]).collect();
            fnv(format!("{} {hashes:x?}", sources.count()).as_bytes())
        };
        Ok(Self { lengths: of(0), state: of(1) })
    }
}

fn source_state(sources: &Sources, id: SourceId) -> Result<u64> {
    use std::os::unix::ffi::OsStrExt;
    if let Some(bytes) = sources.bytes_of(id) {
        return Ok(u64::from(crc32c::crc32c(bytes)) << 32 ^ bytes.len() as u64);
    }
    let path = sources.path(id);
    let meta = look(&path)?;
    if meta.len != sources.len_of(id) {
        let message = format!("{} bytes when it was indexed, {} now", sources.len_of(id), meta.len);
        return Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(&path));
    }
    // Opened from another folder it is the same file.
    let path = std::path::absolute(&path).unwrap_or(path);
    Ok(fnv(&[path.as_os_str().as_bytes(), &meta.version.to_ne_bytes()].concat()))
}

/// What of a dataset has a checksum, without the bytes.
struct Outline {
    /// Samples; for datasets in chunks, extents of chunks.
    count: u64,
    masks: Masks,
    /// A CRC of the schema and of the places of all bytes.
    shape: u32,
    /// For datasets in chunks: their extents, and where the CRCs of each chunk's extents start and the last ones end.
    extents: Vec<Vec<Extent>>,
    pieces: Vec<usize>,
}

impl Outline {
    fn of(dataset: &dyn Dataset) -> Result<Self> {
        if dataset.chunked().is_none() {
            if dataset.schema().len() > Spec::FIELDS_MAX {
                let message = format!("{} fields, {} are the limit", dataset.schema().len(), Spec::FIELDS_MAX);
                return Err(Error::new(ErrorKind::Config, Stage::Index, message));
            }
            let (masks, shape) = survey(dataset)?;
            return Ok(Self { count: dataset.len(), masks, shape, extents: Vec::new(), pieces: Vec::new() });
        }
        let extents = chunk_extents(dataset)?;
        let mut pieces = vec![HEADER];
        extents.iter().for_each(|extents| pieces.push(pieces[pieces.len() - 1] + extents.len()));
        let (count, shape) = ((pieces[pieces.len() - 1] - HEADER) as u64, chunk_shape(dataset, &extents));
        // As if each extent were a sample of one field.
        Ok(Self { count, masks: Masks { stored: 1, inline: 0 }, shape, extents, pieces })
    }

    /// Reads everything once: header (still empty) and CRCs.
    fn make(&self, dataset: &dyn Dataset) -> Result<Vec<u32>> {
        if self.pieces.is_empty() {
            return build(dataset, self.masks);
        }
        let crcs = parallel(&self.extents, |_, extents| {
            let mut reader = Reader { sources: dataset.sources(), open: None, buffer: Vec::new() };
            extents.iter().map(|extent| reader.crc_of(*extent)).collect::<Result<Vec<_>>>()
        })?;
        let mut words = vec![0; HEADER];
        crcs.iter().for_each(|crcs| words.extend_from_slice(crcs));
        Ok(words)
    }

    /// The bytes that a CRC is of, and their sample where there is one.
    fn place(&self, dataset: &dyn Dataset, at: usize) -> Result<Option<(Extent, Option<u64>)>> {
        if !self.pieces.is_empty() {
            let chunk = self.pieces.partition_point(|start| *start <= at) - 1;
            return Ok(Some((self.extents[chunk][at - self.pieces[chunk]], None)));
        }
        let (sample, slot) = ((at - HEADER) / self.masks.stride(), (at - HEADER) % self.masks.stride());
        let mut parts = Parts::new();
        parts_of(dataset, sample as u64, &mut parts)?;
        let stored = |field: usize| self.masks.stored & 1 << field != 0 && self.masks.slot(field) == slot;
        let extent = parts.iter().filter(|(field, _)| stored(*field)).find_map(|(_, part)| part.extent());
        Ok(extent.map(|extent| (extent, Some(sample as u64))))
    }

    /// Errors: [`ErrorKind::Changed`], naming the files that differ and the first place in them.
    fn compare(&self, dataset: &dyn Dataset, then: &[u32], now: &[u32], place: &Path) -> Result<()> {
        let differ: Vec<usize> = (HEADER..now.len()).filter(|at| then.get(*at) != Some(&now[*at])).collect();
        let (mut first, mut files, mut seen) = (None, Vec::new(), std::collections::HashSet::new());
        for at in &differ {
            let Some((extent, sample)) = self.place(dataset, *at)? else { continue };
            if seen.insert(extent.source) && files.len() < LISTED {
                files.push(format!("{} at byte {}", dataset.sources().path(extent.source).display(), extent.offset));
            }
            first.get_or_insert((extent, sample));
        }
        let Some((extent, sample)) = first else { return Ok(()) };
        let more = if seen.len() > files.len() { format!(", … ({} files)", seen.len()) } else { String::new() };
        let message = format!(
            "the files have other times or paths than when the checksums in {} were made, and {} of {} checksums differ, \
             first in {}{more}; restore these files, or make the checksums anew (`checked_anew`)",
            place.display(),
            differ.len(),
            now.len() - HEADER,
            files.join(", "),
        );
        let error = Error::new(ErrorKind::Changed, Stage::Index, message);
        let error = error.with_path(dataset.sources().path(extent.source)).with_range(extent.offset, extent.len);
        Err(sample.into_iter().fold(error, Error::with_sample))
    }

    fn seal(&self, words: &mut [u32], sources: Sourced) {
        words[..2].copy_from_slice(&MAGIC);
        let wide = [sources.lengths, sources.state, self.count, self.masks.stored, self.masks.inline];
        for (place, value) in words[2..SHAPE].chunks_mut(2).zip(wide) {
            place.copy_from_slice(&[value as u32, (value >> 32) as u32]);
        }
        words[SHAPE] = self.shape;
        words[CRC] = crc_of(words);
    }
}

/// The numbers below `len`, in runs.
fn runs(len: u64) -> Vec<Range<u64>> {
    (0..len.div_ceil(RUN)).map(|run| run * RUN..((run + 1) * RUN).min(len)).collect()
}

/// Asks for the parts of every sample: which fields lie where, and a CRC of what the dataset is: its schema, its
/// samples' places, and all bytes that lie in the index.
fn survey(dataset: &dyn Dataset) -> Result<(Masks, u32)> {
    let found = parallel(&runs(dataset.len()), |_, run| {
        let (mut masks, mut crc) = (Masks::default(), 0);
        let mut parts = Parts::new();
        for sample in run.clone() {
            parts_of(dataset, sample, &mut parts)?;
            for (field, part) in parts.iter() {
                masks.see(field, part);
                let (kind, numbers, bytes) = match part {
                    Part::Inline(bytes) => (0, [0, 0, bytes.len() as u64], bytes),
                    Part::Extent(extent) => (1, place_of(&extent), &[][..]),
                    Part::Checked(extent) | Part::Framed(extent) => (2, place_of(&extent), &[][..]),
                };
                crc = crc32c::crc32c_append(crc, &[field as u8, kind]);
                crc = crc32c::crc32c_append(crc, bytemuck::cast_slice(&numbers));
                crc = crc32c::crc32c_append(crc, bytes);
            }
        }
        Ok((masks, crc))
    })?;
    let masks = found.iter().fold(Masks::default(), |all, (masks, _)| all.with(*masks));
    let schema = crc32c::crc32c(format!("{:?}", dataset.schema()).as_bytes());
    let crc = found.iter().fold(schema, |all, (_, crc)| crc32c::crc32c_append(all, &crc.to_le_bytes()));
    Ok((masks, crc))
}

fn place_of(extent: &Extent) -> [u64; 3] {
    [extent.source.index() as u64, extent.offset, extent.len]
}

/// The parts of a sample, with nothing in them that the pipeline would refuse.
fn parts_of<'a>(dataset: &'a dyn Dataset, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
    parts.clear();
    dataset.extents(sample, parts).map_err(|error| error.with_sample(sample))?;
    let sources = dataset.sources();
    for (field, part) in parts.iter() {
        let lie = |message: String| Err(Error::new(ErrorKind::User, Stage::Index, message).with_sample(sample));
        if field >= dataset.schema().len() {
            return lie(format!("the dataset names field {field}, its schema has {}", dataset.schema().len()));
        }
        let Some(extent) = part.extent() else { continue };
        if extent.source.index() >= sources.count() {
            return lie(format!("the dataset names source {}, it has {}", extent.source.index(), sources.count()));
        }
        let len = sources.len_of(extent.source);
        if extent.offset.checked_add(extent.len).is_none_or(|end| end > len) {
            let error = Error::new(ErrorKind::Truncated, Stage::Index, format!("the source has {len} bytes"));
            let error = error.with_path(sources.path(extent.source)).with_range(extent.offset, extent.len);
            return Err(error.with_sample(sample));
        }
    }
    Ok(())
}

/// Reads everything once: header (still empty) and CRCs.
fn build(dataset: &dyn Dataset, masks: Masks) -> Result<Vec<u32>> {
    let stride = masks.stride();
    let found = parallel(&runs(dataset.len()), |_, run| {
        let mut reader = Reader { sources: dataset.sources(), open: None, buffer: Vec::new() };
        let mut crcs = vec![0; (run.end - run.start) as usize * stride];
        let mut parts = Parts::new();
        for (sample, own) in run.clone().zip(crcs.chunks_mut(stride.max(1))) {
            parts_of(dataset, sample, &mut parts)?;
            let mut before: Option<(Extent, u32)> = None;
            for (field, part) in parts.iter() {
                let Some(extent) = part.extent() else { continue };
                let crc = match before {
                    Some((same, crc)) if same == extent => crc,
                    _ => reader.crc(extent).map_err(|error| {
                        let error = error.with_path(dataset.sources().path(extent.source));
                        error.with_range(extent.offset, extent.len).with_sample(sample)
                    })?,
                };
                before = Some((extent, crc));
                own[masks.slot(field)] = crc;
            }
        }
        Ok(crcs)
    })?;
    let mut words = Vec::with_capacity(HEADER + dataset.len() as usize * stride);
    words.resize(HEADER, 0);
    found.iter().for_each(|crcs| words.extend_from_slice(crcs));
    Ok(words)
}

/// Reads extents in pieces; the last file stays open.
struct Reader<'a> {
    sources: &'a Sources,
    open: Option<(SourceId, Blob)>,
    buffer: Vec<u8>,
}

impl Reader<'_> {
    fn crc_of(&mut self, extent: Extent) -> Result<u32> {
        let path = self.sources.path(extent.source);
        self.crc(extent).map_err(|error| error.with_path(path).with_range(extent.offset, extent.len))
    }

    fn crc(&mut self, extent: Extent) -> Result<u32> {
        let Extent { source, offset, len } = extent;
        if self.open.as_ref().is_none_or(|(open, _)| *open != source) {
            self.open = Some((source, Blob::of_source(self.sources, source)?));
        }
        let Some((_, blob)) = &self.open else { return Ok(0) };
        let mut crc = 0;
        let mut done = 0;
        while done < len {
            let step = (len - done).min(STEP as u64) as usize;
            if self.buffer.len() < step {
                self.buffer.resize(step, 0);
            }
            let bytes = &mut self.buffer[..step];
            blob.read_at(offset + done, bytes)?;
            crc = crc32c::crc32c_append(crc, bytes);
            done += step as u64;
        }
        Ok(crc)
    }
}

fn crc_of(words: &[u32]) -> u32 {
    let crc = crc32c::crc32c(bytemuck::cast_slice(&words[..CRC]));
    crc32c::crc32c_append(crc, bytemuck::cast_slice(&words[HEADER..]))
}

/// A file of checksums that is whole.
struct Loaded {
    words: Vec<u32>,
    masks: Masks,
    count: u64,
    state: u64,
}

impl Loaded {
    /// The checksums, and the lengths of the sources that they were made from.
    fn of(words: Vec<u32>) -> (Self, u64) {
        let wide = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        let (lengths, state, count) = (wide(2), wide(4), wide(6));
        let masks = Masks { stored: wide(8), inline: wide(10) };
        (Self { words, masks, count, state }, lengths)
    }

    /// The words, when they are those of such a dataset. Errors: [`ErrorKind::Changed`].
    fn same(self, outline: &Outline, place: &Path) -> Result<Vec<u32>> {
        if self.count == outline.count && self.masks == outline.masks && self.words[SHAPE] == outline.shape {
            return Ok(self.words);
        }
        let message = "the sources have the lengths of when the checksums were made, but the dataset is another: a file \
                       that describes itself is damaged, or it is opened in another way (then use `checked_anew`)";
        Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(place))
    }
}

/// What stands where the checksums are kept.
enum Found {
    /// No file, or an empty one.
    Nothing,
    Whole(Loaded),
    /// Checksums that cannot be used, and why.
    Useless(Error),
}

/// Looks at the file. Errors: it cannot be opened, or holds something else than checksums: a name mistaken for another must
/// not cost the user's data.
fn load(place: &Path, lengths: u64) -> Result<Found> {
    let file = match Blob::open(place) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) => return Err(error),
    };
    if file.len() == 0 {
        return Ok(Found::Nothing);
    }
    let start = file.read(0, file.len().min(4 * HEADER as u64), "the checksums")?;
    let magic: [u8; 8] = bytemuck::cast(MAGIC);
    let like = |range: Range<usize>| start.get(range.clone()) == Some(&magic[range]);
    if !magic.starts_with(&start) && !like(0..4) && !like(4..8) {
        let message = "a file that holds something else than checksums; it is not overwritten";
        return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(place));
    }
    let useless = |kind, what: &str| {
        let message = format!("{what}; where that is right, make the checksums anew (`checked_anew`)");
        Ok(Found::Useless(Error::new(kind, Stage::Index, message)))
    };
    match read_words(&file)? {
        None => useless(ErrorKind::Decode, "the file of checksums is damaged, or of another version"),
        Some(words) => match Loaded::of(words) {
            (kept, of) if of == lengths => Ok(Found::Whole(kept)),
            _ => useless(
                ErrorKind::Changed,
                "the sources do not have the lengths of when the checksums were made: a file was cut, extended, added, \
                 removed or renamed, or the checksums are of another dataset",
            ),
        },
    }
}

/// The words of the file, unless they contradict its header or its CRC.
fn read_words(file: &Blob) -> Result<Option<Vec<u32>>> {
    let mut head = [0_u32; HEADER];
    if file.len() < 4 * HEADER as u64 {
        return Ok(None);
    }
    file.fill(0, bytemuck::cast_slice_mut(&mut head), "the checksums")?;
    // Memory is taken for what the file has, and only when that is what its header says.
    let stride = (u64::from(head[8]) | u64::from(head[9]) << 32).count_ones() as usize;
    let words = usize::try_from(u64::from(head[6]) | u64::from(head[7]) << 32)
        .ok()
        .and_then(|count| count.checked_mul(stride)?.checked_add(HEADER));
    let Some(words) = words.filter(|words| words.checked_mul(4).is_some_and(|bytes| bytes as u64 == file.len())) else {
        return Ok(None);
    };
    let mut all = vec![0_u32; words];
    file.fill(0, bytemuck::cast_slice_mut(&mut all), "the checksums")?;
    Ok((head[..2] == MAGIC && all[..HEADER] == head && crc_of(&all) == head[CRC]).then_some(all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::{DatasetExt, Images, Records, Tar};
    use crate::tensor::DType;
    use std::fs::File;
    use std::sync::atomic::{AtomicU64, Ordering};

    struct Dir(PathBuf);

    impl Dir {
        fn new() -> Self {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let name = format!("feedline-checked-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|k| (k * k / 7 + k) as u8).collect()
    }

    fn all(dataset: &impl Dataset) -> Vec<Result<Vec<Vec<u8>>>> {
        (0..dataset.len()).map(|sample| dataset.read_sample(sample)).collect()
    }

    fn right(dataset: &impl Dataset) -> Vec<Vec<Vec<u8>>> {
        all(dataset).into_iter().map(|sample| sample.unwrap()).collect()
    }

    #[test]
    fn every_flipped_byte_and_every_cut_of_records_is_an_error_with_the_right_sample() {
        let dir = Dir::new();
        let (path, place) = (dir.0.join("records"), dir.0.join("records.crc"));
        let shard = bytes(16 + 40 * 32);
        std::fs::write(&path, &shard).unwrap();
        let open = || Records::builder(32).header(16).classes((0..40).collect()).open(&path).unwrap().checked(&place);
        let checked = open().unwrap();
        assert!(checked.built() && !open().unwrap().built());
        let expected = right(checked.inner());
        assert_eq!(right(&checked), expected);
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        let write = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            File::options().append(true).open(&path).unwrap().set_modified(modified).unwrap();
        };
        for at in 0..shard.len() {
            for bits in [0x01, 0x10, 0xff] {
                let mut bytes = shard.clone();
                bytes[at] ^= bits;
                write(&bytes);
                let mut wrong = Vec::new();
                for (sample, found) in all(&checked).into_iter().enumerate() {
                    match found {
                        Ok(found) => assert_eq!(found, expected[sample], "byte {at}"),
                        Err(error) => {
                            assert_eq!((error.kind(), error.site().sample), (ErrorKind::Decode, Some(sample as u64)));
                            assert!(error.to_string().contains("field `record`: CRC32C"), "{error}");
                            wrong.push(sample);
                        }
                    }
                }
                // The header belongs to no sample.
                assert_eq!(wrong, Vec::from_iter(at.checked_sub(16).map(|at| at / 32)), "byte {at}");
            }
        }
        // Time and length are the same: what was indexed still counts.
        let again = open().unwrap();
        assert!(!again.built() && all(&again).iter().any(Result::is_err));
        for len in 0..shard.len() {
            write(&shard[..len]);
            for (sample, found) in all(&checked).into_iter().enumerate() {
                assert_eq!(found.is_ok(), 16 + (sample + 1) * 32 <= len, "cut at {len}");
            }
            // Opened anew, the source is refused, or honestly shorter and indexed anew.
            match Records::builder(32).header(16).classes((0..40).collect()).open(&path) {
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::Truncated | ErrorKind::Shape | ErrorKind::Empty))
                }
                Ok(_) => panic!("40 labels for fewer records"),
            }
        }
    }

    #[test]
    fn damaged_checksums_are_refused_and_stay() {
        let dir = Dir::new();
        let (path, place) = (dir.0.join("records"), dir.0.join("records.crc"));
        std::fs::write(&path, bytes(64)).unwrap();
        let open = || Records::builder(8).classes(vec![5; 8]).open(&path).unwrap().checked(&place);
        let expected = right(&open().unwrap());
        let whole = std::fs::read(&place).unwrap();
        assert_eq!(whole.len(), HEADER * 4 + 8 * 4);
        let mut hostile: Vec<Vec<u8>> = (0..whole.len()).map(|len| whole[..len].to_vec()).collect();
        for at in 0..whole.len() {
            for bits in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= bits;
                hostile.push(bytes.clone());
                // With a right CRC, too: only its own checksums make a file of another dataset legal.
                let mut words: Vec<u32> = bytemuck::pod_collect_to_vec(&bytes);
                words[CRC] = crc_of(&words);
                if at / 4 != CRC && at < HEADER * 4 {
                    hostile.push(bytemuck::cast_slice(&words).to_vec());
                }
            }
        }
        for (case, bytes) in hostile.iter().enumerate() {
            std::fs::write(&place, bytes).unwrap();
            match open() {
                // An empty file is none yet; of sealed ones, those with another state of the sources are compared.
                Ok(checked) => {
                    assert!(checked.built() == bytes.is_empty() && right(&checked) == expected, "case {case}");
                }
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::Changed | ErrorKind::Decode), "case {case}: {error}");
                    assert!(error.to_string().contains("checked_anew"), "case {case}: {error}");
                    assert_eq!(std::fs::read(&place).unwrap(), *bytes, "case {case}");
                }
            }
        }
        let anew = Records::builder(8).classes(vec![5; 8]).open(&path).unwrap().checked_anew(&place).unwrap();
        assert!(anew.built() && right(&anew) == expected);
        assert_eq!(std::fs::read(&place).unwrap(), whole);
    }

    #[test]
    fn other_lengths_and_labels_are_refused_until_made_anew() {
        let dir = Dir::new();
        let (path, place) = (dir.0.join("records"), dir.0.join("sub/records.crc"));
        std::fs::write(&path, bytes(64)).unwrap();
        let open = |class| Records::builder(8).classes(vec![class; 8]).open(&path).unwrap().checked(&place);
        let built = |class| open(class).unwrap().built();
        assert_eq!([built(1), built(1)], [true, false]);
        // The same file with other labels: damage, or another dataset. Never taken for what it was.
        assert_eq!(open(2).unwrap_err().kind(), ErrorKind::Changed);
        File::options().append(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(open(2).unwrap_err().kind(), ErrorKind::Changed);
        let anew = Records::builder(8).classes(vec![2; 8]).open(&path).unwrap().checked_anew(&place);
        assert_eq!([anew.unwrap().built(), built(2)], [true, false]);
        std::fs::write(&path, bytes(65)).unwrap();
        let kept = std::fs::read(&place).unwrap();
        let longer = || Records::builder(13).open(&path).unwrap();
        let error = longer().checked(&place).unwrap_err();
        assert!(error.kind() == ErrorKind::Changed && error.to_string().contains("checked_anew"), "{error}");
        assert_eq!(std::fs::read(&place).unwrap(), kept);
        let records = longer().checked_anew(&place).unwrap();
        assert!(records.built() && right(&records).len() == 5);
        // A mistaken name does not cost a file.
        for other in [&path, &dir.0.join("other")] {
            std::fs::write(other, bytes(65)).unwrap();
            let error = Records::builder(13).open(&path).unwrap().checked(other).unwrap_err();
            assert!(error.kind() == ErrorKind::Config && error.to_string().contains("not overwritten"), "{error}");
            assert_eq!(std::fs::read(other).unwrap(), bytes(65));
        }
        let unwritable = Records::builder(13).open(&path).unwrap().checked(path.join("sub"));
        assert!(unwritable.unwrap_err().to_string().contains("records/sub"));
    }

    #[test]
    fn a_copy_is_compared_and_a_damaged_copy_is_refused() {
        let dir = Dir::new();
        let place = dir.0.join("records.crc");
        let shards = [bytes(64), bytes(80)];
        let write = |folder: &str, shards: &[Vec<u8>; 2]| {
            std::fs::create_dir_all(dir.0.join(folder)).unwrap();
            for (number, shard) in shards.iter().enumerate() {
                std::fs::write(dir.0.join(folder).join(format!("{number}.bin")), shard).unwrap();
            }
        };
        let records = |folder: &str| Records::builder(8).open(dir.0.join(folder)).unwrap();
        write("data", &shards);
        assert!(records("data").checked(&place).unwrap().built());
        write("copy", &shards);
        let copy = records("copy").checked(&place).unwrap();
        assert!(!copy.built() && copy.describe().contains("compared now with all bytes"), "{copy:?}");
        // Once compared, it is not compared again.
        assert!(records("copy").checked(&place).unwrap().describe().contains("CRC32Cs from"));
        let kept = std::fs::read(&place).unwrap();
        let mut damaged = shards.clone();
        (damaged[0][17], damaged[1][79], damaged[1][3]) = (!damaged[0][17], !damaged[1][79], !damaged[1][3]);
        write("damaged", &damaged);
        let error = records("damaged").checked(&place).unwrap_err();
        let site = error.site();
        assert_eq!(
            (error.kind(), site.offset, site.len, site.sample),
            (ErrorKind::Changed, Some(16), Some(8), Some(2))
        );
        assert_eq!(site.path, Some(dir.0.join("damaged/0.bin")));
        for words in ["3 of 18 checksums differ", "damaged/0.bin at byte 16", "damaged/1.bin at byte 0", "checked_anew"]
        {
            assert!(error.message().contains(words), "{error}");
        }
        assert_eq!(std::fs::read(&place).unwrap(), kept);
        assert!(records("damaged").checked_anew(&place).unwrap().built());
        assert!(right(&records("damaged").checked(&place).unwrap())[2][0] == damaged[0][16..24]);
    }

    #[test]
    fn any_dataset_can_be_checked_also_one_that_opens_its_bytes_itself() {
        let dir = Dir::new();
        for (name, len) in [("a/1.jpg", 100), ("a/2.jpg", 5000), ("b/1.jpg", 3_000_000)] {
            let path = dir.0.join("images").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes(len)).unwrap();
        }
        let images = || Images::open(dir.0.join("images")).unwrap();
        let expected = right(&images());
        let checked = images().checked(dir.0.join("images.crc")).unwrap();
        assert_eq!(right(&checked), expected);
        std::fs::write(dir.0.join("images/b/1.jpg"), vec![1; 3_000_000]).unwrap();
        assert_eq!(all(&checked).iter().map(Result::is_ok).collect::<Vec<_>>(), [true, true, false]);

        let shard: &[u8] = include_bytes!("../../../tests/fixtures/tar/small.tar");
        let tar = || {
            let builder = Tar::builder().checksums(false).bytes("bin").class("cls");
            builder.open_bytes(shard).unwrap()
        };
        let checked = tar().checked(dir.0.join("tar.crc")).unwrap();
        assert_eq!(right(&checked), right(&tar()));
        // A split keeps what the whole has.
        let (first, _) = tar().checked(dir.0.join("tar.crc")).unwrap().split(0.5, 1).unwrap();
        assert!(all(&first).iter().all(Result::is_ok));
    }

    #[test]
    fn fields_framed_in_some_samples_only_are_asked_for() {
        /// Sample 0 is raw, sample 1 framed, sample 2 inline; framed bytes are opened to their reverse.
        struct Mixed(Records);
        impl Dataset for Mixed {
            fn schema(&self) -> &[EncodedField] {
                self.0.schema()
            }
            fn len(&self) -> u64 {
                3
            }
            fn sources(&self) -> &Arc<Sources> {
                self.0.sources()
            }
            fn sample_bytes_max(&self) -> u64 {
                4
            }
            fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
                let extent = Extent { source: SourceId::at(0), offset: sample * 4, len: 4 };
                match sample {
                    0 => parts.extent(0, extent),
                    1 => parts.framed(0, extent),
                    _ => parts.inline(0, b"here"),
                }
                Ok(())
            }
            fn open<'a>(&self, _: u64, _: usize, bytes: &'a [u8], buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
                buffer.extend(bytes.iter().rev());
                Ok(buffer)
            }
        }
        let dir = Dir::new();
        let records = Records::builder(4).field("x", DType::U8, [4]).open_bytes(*b"abcdefgh").unwrap();
        let place = dir.0.join("mixed.crc");
        let checked = Mixed(records).checked(&place).unwrap();
        assert_eq!(right(&checked), [[b"abcd".to_vec()], [b"hgfe".to_vec()], [b"here".to_vec()]]);
    }
}
