//! Checksums for any dataset: one CRC32C per stored field of every sample, kept in a file, verified at each read.
//!
//! ```text
//! inner.extents ──► extents, all framed ──► readers ──► bytes ──CRC32C──► inner.open, if it was framed there, too
//! ```
//!
//! The first time everything is read once to make the file; what is on disk then is what is held to be right. From
//! then on, a byte that differs is an error that names sample and place, whatever the format.
//!
//! Datasets in chunks have one CRC32C for each extent of a chunk, verified before it is opened; one more tells when a
//! file describes itself in another way than before.
//!
//! Costs: 4 bytes per stored field and sample (per extent, in chunks); rows are no longer read in place, since they are
//! verified first. Bytes that lie in the inner dataset's index
//! (labels) have one CRC32C together, verified when the dataset is opened.
//!
//! Invariants: the file is used when its own CRC is right and all sources have the same paths, lengths and
//! modification times (memory: the same bytes); else it is made anew, and [`Checked::built`] says so. A dataset that is
//! another than then although its sources are not is an error: a header is damaged. It appears by a rename.

use super::images::parallel;
use super::index::{fnv, modified, save};
use super::{ChunkBuf, ChunkBytes, Chunked, Dataset, Part, Parts};
use crate::decode::Scratch;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::read::{Extent, SourceId, Sources, open_plain, open_regular};
use crate::tensor::{EncodedField, Spec};
use bytes::Bytes;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Samples that a thread takes at a time; part of the format, since the CRC of inline bytes depends on it.
const RUN: u64 = 4096;
/// Bytes that are read at a time while the file is made.
const STEP: usize = 1 << 20;
/// "feedcrc" and the version, in native order.
const MAGIC: [u32; 2] = [u32::from_be_bytes(*b"feed"), u32::from_be_bytes(*b"crc1")];
/// Words of the header: magic, identity, samples, masks of fields (stored, always framed, never framed, inline; two
/// each), CRC of the inline bytes, CRC32C of the file without this word.
const HEADER: usize = 16;
const CRC: usize = HEADER - 1;

/// A dataset whose every read is verified; made by [`DatasetExt::checked`](super::DatasetExt::checked).
pub struct Checked<D> {
    inner: D,
    /// The file as it stands: header, then CRCs by sample and stored field.
    words: Vec<u32>,
    masks: Masks,
    /// For datasets in chunks: where the CRCs of each chunk's extents start, and where they end.
    pieces: Vec<usize>,
    place: PathBuf,
    built: bool,
}

/// Sets of fields, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Masks {
    /// Lie in storage, for at least one sample.
    stored: u64,
    /// Are framed wherever they lie in storage.
    always_framed: u64,
    /// Are framed nowhere.
    never_framed: u64,
    /// Lie in the index, for at least one sample.
    inline: u64,
}

impl Masks {
    const NONE: Self = Self { stored: 0, always_framed: u64::MAX, never_framed: u64::MAX, inline: 0 };

    fn see(&mut self, field: usize, part: Part<'_>) {
        let bit = 1 << field;
        match part {
            Part::Inline(_) => self.inline |= bit,
            Part::Framed(_) => (self.stored, self.never_framed) = (self.stored | bit, self.never_framed & !bit),
            Part::Extent(_) => (self.stored, self.always_framed) = (self.stored | bit, self.always_framed & !bit),
        }
    }

    fn with(self, other: Self) -> Self {
        Self {
            stored: self.stored | other.stored,
            always_framed: self.always_framed & other.always_framed,
            never_framed: self.never_framed & other.never_framed,
            inline: self.inline | other.inline,
        }
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
    pub(super) fn open(inner: D, place: &Path) -> Result<Self> {
        let config = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        if inner.chunked().is_some() {
            return Self::open_chunks(inner, place);
        }
        if inner.schema().len() > Spec::FIELDS_MAX {
            return config(format!("{} fields, {} are the limit", inner.schema().len(), Spec::FIELDS_MAX));
        }
        let identity = sources_identity(inner.sources())?;
        let (masks, shape) = survey(&inner)?;
        if let Some(loaded) = load(place, identity) {
            // The length and time of every source are those of then, so what is different now is damage.
            let words = loaded.same(inner.len(), masks, shape, place)?;
            return Ok(Self { inner, words, masks, pieces: Vec::new(), place: place.to_path_buf(), built: false });
        }
        not_foreign(place)?;
        let mut words = build(&inner, masks)?;
        if sources_identity(inner.sources())? != identity {
            let message = "a source was written to while its checksums were made";
            return Err(Error::new(ErrorKind::Changed, Stage::Index, message));
        }
        seal(&mut words, identity, inner.len(), masks, shape);
        save(place, bytemuck::cast_slice(&words))
            .map_err(|error| Error::os(Stage::Index, "cannot write the checksums", error).with_path(place))?;
        Ok(Self { inner, words, masks, pieces: Vec::new(), place: place.to_path_buf(), built: true })
    }

    fn open_chunks(inner: D, place: &Path) -> Result<Self> {
        let extents = chunk_extents(&inner)?;
        let mut pieces = vec![HEADER];
        extents.iter().for_each(|extents| pieces.push(pieces[pieces.len() - 1] + extents.len()));
        let count = pieces[pieces.len() - 1] - HEADER;
        let (identity, shape) = (sources_identity(inner.sources())?, chunk_shape(&inner, &extents));
        // As if each extent were a sample of one field.
        let masks = Masks { stored: 1, ..Masks::NONE };
        let place_buf = place.to_path_buf();
        if let Some(loaded) = load(place, identity) {
            let words = loaded.same(count as u64, masks, shape, place)?;
            return Ok(Self { inner, words, masks, pieces, place: place_buf, built: false });
        }
        not_foreign(place)?;
        let crcs = parallel(&extents, |_, extents| {
            let mut reader = Reader { sources: inner.sources(), open: None, buffer: Vec::new() };
            extents.iter().map(|extent| reader.crc_of(*extent)).collect::<Result<Vec<_>>>()
        })?;
        let mut words = vec![0; HEADER];
        crcs.iter().for_each(|crcs| words.extend_from_slice(crcs));
        if sources_identity(inner.sources())? != identity {
            let message = "a source was written to while its checksums were made";
            return Err(Error::new(ErrorKind::Changed, Stage::Index, message));
        }
        seal(&mut words, identity, count as u64, masks, shape);
        save(place, bytemuck::cast_slice(&words))
            .map_err(|error| Error::os(Stage::Index, "cannot write the checksums", error).with_path(place))?;
        Ok(Self { inner, words, masks, pieces, place: place_buf, built: true })
    }

    /// Whether the checksums were made by this call, from what was on disk then; else they came from their file.
    pub fn built(&self) -> bool {
        self.built
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

    /// Whether the inner dataset wants to open the bytes of that field.
    fn is_framed(&self, sample: u64, field: usize) -> Result<bool> {
        let bit = 1 << field;
        if self.masks.always_framed & bit != 0 || self.masks.never_framed & bit != 0 {
            return Ok(self.masks.never_framed & bit == 0);
        }
        let mut parts = Parts::new();
        self.inner.extents(sample, &mut parts)?;
        Ok(parts.iter().any(|(own, part)| own == field && matches!(part, Part::Framed(_))))
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
        parts.frame();
        Ok(())
    }

    fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8], buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
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
        if self.is_framed(sample, field)? { self.inner.open(sample, field, bytes, buffer) } else { Ok(bytes) }
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
        let how = if self.built { "made now" } else { "from" };
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

/// What tells one set of sources, and one state of them, from another.
fn sources_identity(sources: &Sources) -> Result<u64> {
    let runs = runs(sources.count() as u64);
    let hashes = parallel(&runs, |_, run| {
        let mut hash = 0;
        for id in run.clone() {
            hash = fnv(format!("{hash:x} {:x}", source_identity(sources, SourceId::at(id as usize))?).as_bytes());
        }
        Ok(hash)
    })?;
    Ok(fnv(format!("{} {hashes:x?}", sources.count()).as_bytes()))
}

fn source_identity(sources: &Sources, id: SourceId) -> Result<u64> {
    use std::os::unix::ffi::OsStrExt;
    if let Some(bytes) = sources.bytes_of(id) {
        return Ok(u64::from(crc32c::crc32c(bytes)) << 32 ^ bytes.len() as u64);
    }
    let path = sources.path(id);
    let meta = std::fs::metadata(&path)
        .map_err(|source| Error::os(Stage::Index, "cannot look at the source", source).with_path(&path))?;
    if meta.len() != sources.len_of(id) {
        let message = format!("{} bytes when it was indexed, {} now", sources.len_of(id), meta.len());
        return Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(&path));
    }
    let numbers = [meta.len(), modified(&meta)];
    // Opened from another folder it is the same file.
    let path = std::path::absolute(&path).unwrap_or(path);
    Ok(fnv(&[path.as_os_str().as_bytes(), bytemuck::cast_slice(&numbers)].concat()))
}

/// The numbers below `len`, in runs.
fn runs(len: u64) -> Vec<Range<u64>> {
    (0..len.div_ceil(RUN)).map(|run| run * RUN..((run + 1) * RUN).min(len)).collect()
}

/// Asks for the parts of every sample: which fields lie where, and a CRC of what the dataset is: its schema, its
/// samples' places, and all bytes that lie in the index.
fn survey(dataset: &dyn Dataset) -> Result<(Masks, u32)> {
    let found = parallel(&runs(dataset.len()), |_, run| {
        let (mut masks, mut crc) = (Masks::NONE, 0);
        let mut parts = Parts::new();
        for sample in run.clone() {
            parts_of(dataset, sample, &mut parts)?;
            for (field, part) in parts.iter() {
                masks.see(field, part);
                let (kind, numbers, bytes) = match part {
                    Part::Inline(bytes) => (0, [0, 0, bytes.len() as u64], bytes),
                    Part::Extent(extent) => (1, place_of(&extent), &[][..]),
                    Part::Framed(extent) => (2, place_of(&extent), &[][..]),
                };
                crc = crc32c::crc32c_append(crc, &[field as u8, kind]);
                crc = crc32c::crc32c_append(crc, bytemuck::cast_slice(&numbers));
                crc = crc32c::crc32c_append(crc, bytes);
            }
        }
        Ok((masks, crc))
    })?;
    let masks = found.iter().fold(Masks::NONE, |all, (masks, _)| all.with(*masks));
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
        let (Part::Extent(extent) | Part::Framed(extent)) = part else { continue };
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
                let (Part::Extent(extent) | Part::Framed(extent)) = part else { continue };
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
    open: Option<(SourceId, File)>,
    buffer: Vec<u8>,
}

impl Reader<'_> {
    fn crc_of(&mut self, extent: Extent) -> Result<u32> {
        let path = self.sources.path(extent.source);
        self.crc(extent).map_err(|error| error.with_path(path).with_range(extent.offset, extent.len))
    }

    fn crc(&mut self, extent: Extent) -> Result<u32> {
        let Extent { source, offset, len } = extent;
        if let Some(bytes) = self.sources.bytes_of(source) {
            return Ok(crc32c::crc32c(&bytes[offset as usize..(offset + len) as usize]));
        }
        if self.open.as_ref().is_none_or(|(open, _)| *open != source) {
            self.open = Some((source, open_plain(self.sources, source)?));
        }
        let Some((_, file)) = &self.open else { return Ok(0) };
        let mut crc = 0;
        let mut done = 0;
        while done < len {
            let step = (len - done).min(STEP as u64) as usize;
            if self.buffer.len() < step {
                self.buffer.resize(step, 0);
            }
            let bytes = &mut self.buffer[..step];
            file.read_exact_at(bytes, offset + done)
                .map_err(|error| Error::os(Stage::Read, "cannot read the source", error))?;
            crc = crc32c::crc32c_append(crc, bytes);
            done += step as u64;
        }
        Ok(crc)
    }
}

fn seal(words: &mut [u32], identity: u64, samples: u64, masks: Masks, inline: u32) {
    words[..2].copy_from_slice(&MAGIC);
    let wide = [identity, samples, masks.stored, masks.always_framed, masks.never_framed, masks.inline];
    for (place, value) in words[2..14].chunks_mut(2).zip(wide) {
        place.copy_from_slice(&[value as u32, (value >> 32) as u32]);
    }
    words[14] = inline;
    words[CRC] = crc_of(words);
}

fn crc_of(words: &[u32]) -> u32 {
    let crc = crc32c::crc32c(bytemuck::cast_slice(&words[..CRC]));
    crc32c::crc32c_append(crc, bytemuck::cast_slice(&words[HEADER..]))
}

/// A file of checksums that is whole and was made from sources of these lengths and times.
struct Loaded {
    words: Vec<u32>,
    masks: Masks,
    samples: u64,
}

impl Loaded {
    /// The words, when they are those of such a dataset. Errors: [`ErrorKind::Changed`].
    fn same(self, samples: u64, masks: Masks, shape: u32, place: &Path) -> Result<Vec<u32>> {
        if self.samples == samples && self.masks == masks && self.words[14] == shape {
            return Ok(self.words);
        }
        let message = "the sources have the length and time of when the checksums were made, but the dataset is another: \
                       a file that describes itself is damaged, or it is opened in another way (then remove this file)";
        Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(place))
    }
}

/// Refuses to write where something else lies than checksums (damaged ones are made anew): a name mistaken for another
/// must not cost the user's data. Errors: [`ErrorKind::Config`].
fn not_foreign(place: &Path) -> Result<()> {
    // What cannot be opened is said when it cannot be written.
    let mut file = match open_regular(place) {
        Ok((file, _)) => file,
        Err(error) if error.kind() == ErrorKind::NotAFile => return Err(error),
        Err(_) => return Ok(()),
    };
    let magic: [u8; 8] = bytemuck::cast(MAGIC);
    let mut start = Vec::new();
    let read = (&mut file).take(magic.len() as u64).read_to_end(&mut start);
    let like = |range: Range<usize>| start.get(range.clone()) == Some(&magic[range]);
    if read.is_err() || magic.starts_with(&start) || like(0..4) || like(4..8) {
        return Ok(());
    }
    let message = "a file that holds something else than checksums; it is not overwritten";
    Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(place))
}

/// The file, when it is right and for these sources.
fn load(place: &Path, identity: u64) -> Option<Loaded> {
    let (file, len) = open_regular(place).ok()?;
    let mut head = [0_u32; HEADER];
    file.read_exact_at(bytemuck::cast_slice_mut(&mut head), 0).ok()?;
    let wide = |at: usize| u64::from(head[at]) | u64::from(head[at + 1]) << 32;
    if head[..2] != MAGIC || wide(2) != identity {
        return None;
    }
    let samples = wide(4);
    let masks = Masks { stored: wide(6), always_framed: wide(8), never_framed: wide(10), inline: wide(12) };
    // Memory is taken for what the file has, and only when that is what its header says.
    let words = usize::try_from(samples).ok()?.checked_mul(masks.stride())?.checked_add(HEADER)?;
    if words.checked_mul(4)? as u64 != len {
        return None;
    }
    let mut all = vec![0_u32; words];
    file.read_exact_at(bytemuck::cast_slice_mut(&mut all), 0).ok()?;
    (all[..HEADER] == head && crc_of(&all) == head[CRC]).then_some(Loaded { words: all, masks, samples })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::{DatasetExt, Images, Records, Tar};
    use crate::tensor::DType;
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
    fn a_file_of_checksums_that_is_flipped_or_cut_anywhere_is_made_anew() {
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
            let checked = match open() {
                Ok(checked) => checked,
                // Sealed, and of another dataset.
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Changed, "case {case}");
                    continue;
                }
            };
            for (sample, found) in all(&checked).into_iter().enumerate() {
                assert!(found.is_err() || found.unwrap() == expected[sample], "case {case}");
            }
            assert!(checked.built() || bytes.len() == whole.len(), "case {case}");
        }
    }

    #[test]
    fn what_changed_is_indexed_anew_and_other_labels_are_noticed() {
        let dir = Dir::new();
        let (path, place) = (dir.0.join("records"), dir.0.join("sub/records.crc"));
        std::fs::write(&path, bytes(64)).unwrap();
        let open = |class| Records::builder(8).classes(vec![class; 8]).open(&path).unwrap().checked(&place);
        let built = |class| open(class).unwrap().built();
        assert_eq!([built(1), built(1)], [true, false]);
        // The same file with other labels: damage, or another dataset. Never taken for what it was.
        assert_eq!(open(2).unwrap_err().kind(), ErrorKind::Changed);
        File::options().append(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!([built(2), built(2)], [true, false]);
        std::fs::write(&path, bytes(65)).unwrap();
        let records = Records::builder(13).open(&path).unwrap().checked(&place).unwrap();
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

        let shard: &[u8] = include_bytes!("../../tests/fixtures/tar/small.tar");
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
