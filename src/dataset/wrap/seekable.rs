//! Seek points for the JPEGs of any dataset, kept in a file: a crop is decoded from its first row on.
//!
//! ```text
//! inner dataset ──► bytes ──► decoder ◄── ctx.seek_points() ◄── points of (sample, field), in memory ◄── the file
//! ```
//!
//! The first `open` reads everything once and passes the codes of each picture, on all cores. Later ones read the file
//! alone. Points take about 1 % of the pictures' bytes, in the file and in memory, and 8 bytes per field and sample.
//!
//! File: a header of words that identifies the dataset, the end of each entry as two words, the entries. An entry holds
//! the points of one field of one sample; it is empty for other formats, progressive JPEGs, JPEGs with restart markers
//! and damaged ones.
//!
//! Invariants: a damaged file is made again; a file of another dataset, or of another kind, is never replaced.
//! Points never change a pixel of an intact picture: the decoder compares them with the picture, see `crate::jpeg`.

use crate::dataset::digest::Digest;
use crate::dataset::forward::{forward, frames_of, own};
use crate::dataset::parallel::parallel;
use crate::dataset::sample::Plain;
use crate::dataset::words::{halves, load as load_words, seal, wide};
use crate::dataset::{Dataset, Framed, Sizes, frames};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::jpeg;
use crate::storage::Blob;
use crate::storage::publish::{Pending, publish};
use crate::tensor::Encoding;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// "feedseek" and the version, in native order.
const MAGIC: [u32; 3] = [u32::from_be_bytes(*b"feed"), u32::from_be_bytes(*b"seek"), 1];
/// Words of the header: magic; hash of the dataset, number of entries, bytes of entries (two each); CRC32C of the rest.
const HEADER: usize = 10;
/// Samples per unit of work of a thread.
const RUN: u64 = 64;

/// A dataset with seek points; made by [`DatasetExt::seekable`](crate::dataset::DatasetExt::seekable).
pub struct Seekable<D> {
    inner: D,
    /// For each field of the schema, its place among those with points.
    columns: Vec<Option<usize>>,
    /// Fields with points.
    width: usize,
    /// Content of the file.
    words: Vec<u32>,
    place: PathBuf,
    built: bool,
}

impl<D: Dataset> Seekable<D> {
    pub(crate) fn open(inner: D, place: &Path) -> Result<Self> {
        let mut width = 0;
        let column = |encoding: &Encoding| {
            has_points(encoding).then(|| {
                width += 1;
                width - 1
            })
        };
        let columns: Vec<_> = inner.schema().iter().map(|field| &field.encoding).map(column).collect();
        let (identity, entries) = (identity(&inner), inner.len() * width as u64);
        let kept = load(place, identity, entries).map_err(|error| error.with_path(place))?;
        let built = kept.is_none();
        let words = match kept {
            Some(words) => words,
            None => {
                let unwritable = |error| unwritable(error, place);
                // Begun first, so that a wrong path costs no pass over the data.
                let mut file = Pending::create(place).map_err(unwritable)?;
                let words = seal_entries(identity, &make(&inner, &columns, width)?)?;
                file.write_all(bytemuck::cast_slice(&words)).map_err(unwritable)?;
                file.commit(false).map_err(unwritable)?;
                words
            }
        };
        Ok(Self { inner, columns, width, words, place: place.to_path_buf(), built })
    }

    /// As `open`, with the points of `parts` in place of a pass over the data.
    pub(crate) fn open_from<P: Dataset>(
        inner: D,
        place: &Path,
        parts: impl IntoIterator<Item = Result<P>>,
    ) -> Result<Self> {
        let fields = inner.schema().len();
        let mut all = EntryRun { bytes: Vec::new(), lens: Vec::new() };
        let (mut samples, mut lens) = (0, Vec::new());
        for part in parts {
            let part = part?;
            if part.schema() != inner.schema() {
                return Err(other_parts("a part has other fields").with_path(place));
            }
            for sample in 0..part.len() {
                for field in (0..fields).filter(|field| has_points(&inner.schema()[*field].encoding)) {
                    let points = frames(&part).seek_points(sample, field);
                    all.bytes.extend_from_slice(points);
                    all.lens.push(points.len());
                }
            }
            samples += part.len();
            lens.extend(part.sources().ids().map(|id| part.sources().len_of(id)));
        }
        let sources = inner.sources();
        if samples != inner.len() || !sources.ids().map(|id| sources.len_of(id)).eq(lens) {
            let message =
                format!("the parts have {samples} samples, in other files than the dataset's {}", inner.len());
            return Err(other_parts(message).with_path(place));
        }
        let (identity, entries) = (identity(&inner), all.lens.len() as u64);
        // As in `open`: a file of another dataset, or of another kind, is never replaced.
        if load(place, identity, entries).map_err(|error| error.with_path(place))?.is_none() {
            let words = seal_entries(identity, &[all])?;
            publish(place, bytemuck::cast_slice(&words), true).map_err(|error| unwritable(error, place))?;
        }
        Self::open(inner, place)
    }

    /// Whether opening made the points; otherwise they came from their file.
    pub fn built(&self) -> bool {
        self.built
    }

    /// The dataset without seek points.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Bytes of all points.
    pub fn bytes(&self) -> u64 {
        bytes_of(&self.words)
    }

    fn entries(&self) -> usize {
        self.inner.len() as usize * self.width
    }
}

impl<D: Dataset> Framed for Seekable<D> {
    frames_of!(self, sample => (&self.inner, sample); check open field_bytes member);

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        frames(&self.inner).field_bytes_max(field)
    }

    fn seek_points(&self, sample: u64, field: usize) -> &[u8] {
        let Some(Some(column)) = self.columns.get(field) else { return &[] };
        let (ends, entries) = self.words[HEADER..].split_at(2 * self.entries());
        let ends: &[[u32; 2]] = bytemuck::cast_slice(ends);
        let end = |entry: Option<&[u32; 2]>| entry.map_or(0, |[low, high]| u64::from(*low) | u64::from(*high) << 32);
        let entry = sample as usize * self.width + column;
        let start = entry.checked_sub(1).map_or(0, |before| end(ends.get(before)));
        let bytes: &[u8] = bytemuck::cast_slice(entries);
        bytes.get(start as usize..end(ends.get(entry)) as usize).unwrap_or_default()
    }
}

impl<D: Dataset> Dataset for Seekable<D> {
    own!(framed);
    forward!(self => self.inner; schema len sources extents chunked identity);

    fn sizes(&self) -> Sizes {
        let inner = self.inner.sizes();
        Sizes { index_bytes: inner.index_bytes + self.words.capacity() * 4, ..inner }
    }

    fn describe(&self) -> String {
        let how = if self.built { "made now:" } else { "from" };
        let megabytes = self.bytes() as f64 / 1e6;
        format!("{}; seek points of {megabytes:.3} MB, {how} {}", self.inner.describe(), self.place.display())
    }
}

fn unwritable(error: std::io::Error, place: &Path) -> Error {
    Error::os(Stage::Index, "cannot write the seek points here: name another file", error).with_path(place)
}

fn other_parts(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}

/// Whether values of this encoding may be pictures.
fn has_points(encoding: &Encoding) -> bool {
    matches!(encoding, Encoding::Image | Encoding::Bytes)
}

/// Hash of the dataset: its samples and the lengths of its sources, the same for a copy elsewhere.
fn identity(dataset: &dyn Dataset) -> u64 {
    let sources = dataset.sources();
    let schema = crc32c::crc32c(format!("{:?}", dataset.schema()).as_bytes());
    let digest = Digest::new("seek points").word(dataset.len()).word(dataset.identity()).word(schema.into());
    sources.ids().fold(digest, |digest, id| digest.word(sources.len_of(id))).end()
}

/// Bytes of all entries, by the header.
fn bytes_of(words: &[u32]) -> u64 {
    wide(words, 7)
}

/// The file's words; nothing without a file, or if it is damaged.
///
/// Errors: it cannot be read, is another kind of file, or has the points of another dataset.
fn load(place: &Path, identity: u64, entries: u64) -> Result<Option<Vec<u32>>> {
    let file = match Blob::open(place) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let start = file.read(0, file.len().min(4 * HEADER as u64), "the seek points")?;
    let magic: [u8; 12] = bytemuck::cast(MAGIC);
    // A version of its own may follow the name.
    if !magic[..8].starts_with(&start[..start.len().min(8)]) {
        let message = "not a file of seek points; it is not overwritten: name another file";
        return Err(Error::new(ErrorKind::Config, Stage::Index, message));
    }
    let head: Vec<u32> = start.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    if head.len() < HEADER || head[..MAGIC.len()] != MAGIC {
        return Ok(None);
    }
    if !head.starts_with(&start_of(identity, entries)) {
        // Damage of the header looks the same, unless the whole file agrees with it.
        let there = wide(&head, 5);
        return match load_words(&file, &head, words_of(&head, there))? {
            None => Ok(None),
            Some(_) => {
                let message = format!(
                    "seek points of another dataset, with {there} entries in place of {entries}, or of this one before it \
                     changed: delete the file to make it again, or name another file"
                );
                Err(Error::new(ErrorKind::Changed, Stage::Index, message))
            }
        };
    }
    load_words(&file, &head, words_of(&head, entries))
}

/// Words of the whole file.
fn words_of(head: &[u32], entries: u64) -> Option<usize> {
    let words = entries.checked_mul(2)?.checked_add(bytes_of(head).div_ceil(4))?;
    usize::try_from(words.checked_add(HEADER as u64)?).ok()
}

/// The header up to the bytes of entries.
fn start_of(identity: u64, entries: u64) -> Vec<u32> {
    [&MAGIC[..], &halves(identity), &halves(entries)].concat()
}

/// The entries of some samples, one after the other.
struct EntryRun {
    bytes: Vec<u8>,
    /// Length of each entry.
    lens: Vec<usize>,
}

/// Joins the entries to the file's words.
fn seal_entries(identity: u64, runs: &[EntryRun]) -> Result<Vec<u32>> {
    let count = runs.iter().map(|run| run.lens.len()).sum::<usize>();
    let bytes = runs.iter().map(|run| run.bytes.len()).sum::<usize>();
    let mut words = Vec::new();
    let len = HEADER + 2 * count + bytes.div_ceil(4);
    words.try_reserve_exact(len).map_err(|_| {
        let message = format!("{} bytes for the seek points could not be reserved", 4 * len);
        Error::new(ErrorKind::Budget, Stage::Index, message)
    })?;
    words.resize(len, 0);
    let (ends, entries) = words[HEADER..].split_at_mut(2 * count);
    let mut end = 0;
    for (place, len) in ends.as_chunks_mut::<2>().0.iter_mut().zip(runs.iter().flat_map(|run| &run.lens)) {
        end += *len as u64;
        *place = halves(end);
    }
    let mut entries: &mut [u8] = bytemuck::cast_slice_mut(entries);
    for run in runs {
        let (own, rest) = entries.split_at_mut(run.bytes.len());
        own.copy_from_slice(&run.bytes);
        entries = rest;
    }
    let head = [start_of(identity, count as u64), halves(bytes as u64).to_vec()].concat();
    seal(&mut words, &head);
    Ok(words)
}

/// Reads everything; gives the entries of each run of samples.
fn make(dataset: &dyn Dataset, columns: &[Option<usize>], width: usize) -> Result<Vec<EntryRun>> {
    let starts: Arc<[u64]> = match dataset.chunked() {
        Some(chunks) if chunks.is_whole() => chunks.starts().into(),
        Some(_) => {
            let message = "a part of a dataset with chunks: make the seek points of the whole, then take the part";
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        None => (0..dataset.len()).step_by(RUN as usize).chain([dataset.len()]).collect(),
    };
    parallel(starts.windows(2).enumerate(), |_, (run, ends)| {
        let mut entries = vec![Vec::new(); (ends[1] - ends[0]) as usize * width];
        let (mut decoder, mut plain) = (jpeg::Decoder::default(), Plain::new(dataset));
        let mut put = |row: usize, field: usize, bytes: &[u8]| {
            if let Some(column) = columns[field] {
                entries[row * width + column] = decoder.seek_points(bytes);
            }
        };
        if dataset.chunked().is_some() {
            let chunk = intact(plain.chunk(run))?;
            let rows = chunk.as_ref().map_or(0, |chunk| chunk.rows());
            for (row, field) in (0..rows).flat_map(|row| (0..columns.len()).map(move |field| (row, field))) {
                put(row, field, chunk.as_ref().and_then(|chunk| chunk.row(field, row)).unwrap_or_default());
            }
        } else {
            for (row, sample) in (ends[0]..ends[1]).enumerate() {
                intact(plain.sample(sample, |field, bytes| {
                    put(row, field, bytes);
                    Ok(())
                }))?;
            }
        }
        // One allocation for each run, because there may be millions of entries.
        Ok(EntryRun { bytes: entries.concat(), lens: entries.iter().map(Vec::len).collect() })
    })
}

/// Damaged samples have no points; the loader reports them.
fn intact<T>(done: Result<T>) -> Result<Option<T>> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) if matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated | ErrorKind::Limit) => Ok(None),
        Err(error) => Err(error),
    }
}
