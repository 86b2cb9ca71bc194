//! Datasets: the samples, the places of their bytes, and the meaning of the bytes. No bulk I/O here.
//!
//! ```text
//! sample id ──extents──► Parts { field → extent | inline bytes } ──readers──► bytes ──open──► field's bytes ──► decoder
//! ```
//!
//! Data without random access to samples (Parquet row groups, compressed shards) comes in [chunks](Chunked).
//!
//! Limits: ids are 0 … len-1; a sample has at most one extent per field. Invariants: `extents` is arithmetic on an
//! index (it may run several times per sample, on any thread of the loader, with the same answer); an opened dataset
//! never changes; the files on disk may, and the readers detect it.
//!
//! | data | dataset |
//! |---|---|
//! | folders of pictures | [`Images`] |
//! | WebDataset's tar shards | [`Tar`] |
//! | Parquet | `Parquet` (feature `parquet`) |
//! | TFRecord, `tf.train.Example` | [`TfRecord`] |
//! | MosaicML Streaming's MDS | [`Mds`] |
//! | NumPy | [`Npy`], [`Npz`] |
//! | safetensors | [`SafeTensors`] |
//! | tokens | [`Tokens`] (flat files), [`Megatron`] |
//! | records of one size | [`Records`] |
//! | several, a part, with checksums, with seek points, in memory | [`Concat`], [`Mix`], [`Subset`], [`Checked`], `Seekable`, [`InMemory`] |
//!
//! A dataset of your own takes a few lines. Here every sample is a line of 16 bytes in one file:
//!
//! ```
//! use feedline::dataset::{Dataset, Parts};
//! use feedline::storage::{Extent, SourceId, Sources};
//! use feedline::tensor::{DType, EncodedField, Field};
//! use feedline::{Error, Stage};
//! use std::sync::Arc;
//!
//! struct Lines { sources: Arc<Sources>, file: SourceId, schema: Vec<EncodedField>, len: u64 }
//!
//! impl Lines {
//!     fn open(path: &str) -> feedline::Result<Self> {
//!         let file = std::fs::metadata(path);
//!         let bytes = file.map_err(|e| Error::os(Stage::Index, "cannot open the lines", e).with_path(path))?.len();
//!         let mut sources = Sources::new();
//!         let file = sources.file(path, bytes)?;
//!         let schema = vec![EncodedField::raw(Field::fixed("line", DType::U8, [16]))];
//!         Ok(Self { sources: Arc::new(sources), file, schema, len: bytes / 16 })
//!     }
//! }
//!
//! impl Dataset for Lines {
//!     fn schema(&self) -> &[EncodedField] { &self.schema }
//!     fn len(&self) -> u64 { self.len }
//!     fn sources(&self) -> &Arc<Sources> { &self.sources }
//!     fn sample_bytes_max(&self) -> u64 { 16 }
//!     fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> feedline::Result<()> {
//!         parts.extent(0, Extent { source: self.file, offset: sample * 16, len: 16 });
//!         Ok(())
//!     }
//! }
//! # let dir = std::env::temp_dir().join(format!("feedline-doc-{}", std::process::id()));
//! # std::fs::create_dir_all(&dir).unwrap();
//! # let path = dir.join("lines");
//! # std::fs::write(&path, [7_u8; 64]).unwrap();
//! let loader = feedline::Loader::builder(Lines::open(path.to_str().unwrap())?).batch_size(3).build()?;
//! let rows: Vec<usize> = loader.epoch(0)?.map(|batch| Ok(batch?.len())).collect::<feedline::Result<_>>()?;
//! assert_eq!(rows, [3, 1]);
//! # std::fs::remove_dir_all(&dir).unwrap();
//! # let error = Lines::open(path.to_str().unwrap()).err().unwrap();
//! # assert!(error.to_string().starts_with("index: not found: cannot open the lines: path="), "{error}");
//! # Ok::<(), feedline::Error>(())
//! ```
//!
//! Samples of varying length are [`EncodedField::bytes`](crate::tensor::EncodedField::bytes); a
//! [decoder](crate::decode::Decoder) turns them into rows. Bytes that the dataset must check or convert first are
//! [framed](Parts::framed): decode workers pass them through [`open`](Dataset::open). Here each sample is a text
//! followed by its checksum, the sum of its bytes:
//!
//! ```
//! # use feedline::decode::{Ctx, Decoder};
//! use feedline::dataset::{Dataset, Parts};
//! use feedline::storage::{Extent, SourceId, Sources};
//! use feedline::tensor::EncodedField;
//! # use feedline::tensor::{DType, Field};
//! use feedline::{Error, Loader, Result};
//! use std::sync::Arc;
//!
//! /// Start of each text, then the end of the last.
//! struct Texts { sources: Arc<Sources>, source: SourceId, schema: Vec<EncodedField>, starts: Vec<u64> }
//!
//! fn sum(text: &[u8]) -> u8 { text.iter().fold(0, |sum, byte| sum.wrapping_add(*byte)) }
//!
//! impl Dataset for Texts {
//!     fn schema(&self) -> &[EncodedField] { &self.schema }
//!     fn len(&self) -> u64 { self.starts.len() as u64 - 1 }
//!     fn sources(&self) -> &Arc<Sources> { &self.sources }
//!     fn sample_bytes_max(&self) -> u64 { self.starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0) }
//!     fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
//!         let (offset, end) = (self.starts[sample as usize], self.starts[sample as usize + 1]);
//!         parts.framed(0, Extent { source: self.source, offset, len: end - offset });
//!         Ok(())
//!     }
//!     fn open<'a>(&self, _: u64, _: usize, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
//!         match bytes.split_last() {
//!             Some((last, text)) if *last == sum(text) => Ok(text),
//!             _ => Err(Error::decode("the sum of the text is wrong")),
//!         }
//!     }
//!     // The loader's plan shows the bytes that this dataset keeps per sample.
//!     fn index_bytes(&self) -> usize { self.sources.table_bytes() + self.starts.capacity() * size_of::<u64>() }
//! }
//! # struct Text;
//! # impl Decoder for Text {
//! #     fn outputs(&self, _: &EncodedField) -> Result<Vec<Field>> { Ok(vec![Field::up_to("text", DType::U8, 8)]) }
//! #     fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut feedline::Row<'_>) -> Result<()> {
//! #         let field = ctx.fields().start;
//! #         out.slice_mut::<u8>(field)?[..input.len()].copy_from_slice(input);
//! #         out.set_len(field, input.len())
//! #     }
//! # }
//!
//! let (mut bytes, mut starts, mut sources) = (Vec::new(), vec![0], Sources::new());
//! for text in ["one", "two", "three"] {
//!     bytes.extend_from_slice(text.as_bytes());
//!     bytes.push(sum(text.as_bytes()));
//!     starts.push(bytes.len() as u64);
//! }
//! let source = sources.memory(bytes.into()); // or sources.file(path, len)?
//! let schema = vec![EncodedField::bytes("text")];
//! let texts = Texts { sources: Arc::new(sources), source, schema, starts };
//! let loader = Loader::builder(texts).decode_field("text", Text).build()?; // `Text`: a decoder as on the first page
//! let batch = loader.epoch(0)?.next().unwrap()?;
//! assert_eq!(batch.field("text")?.row::<u8>(2)?, b"three");
//! # Ok::<(), feedline::Error>(())
//! ```

mod chunked;
mod damage;
mod digest;
pub(crate) mod fingerprint;
mod format;
mod forward;
#[cfg(feature = "unstable")]
#[doc(hidden)]
pub mod fuzzing;
pub mod index;
mod parallel;
mod sample;
mod starts;
mod words;
mod wrap;

pub use crate::memory::ChunkBuf;
pub use chunked::{ChunkBytes, Chunked};
pub use damage::{Damage, DamageKind, OnDamage};
pub(crate) use digest::Digest;
pub(crate) use fingerprint::Fingerprint;
pub use format::images::Images;
pub(crate) use format::images::{self, EXTENSIONS};
pub use format::mds::{Mds, MdsBuilder};
pub use format::megatron::{Megatron, MegatronBuilder};
pub use format::npy::{Npy, NpyBuilder, Npz, NpzBuilder};
#[cfg(feature = "parquet")]
pub use format::parquet::{Nulls, Parquet, ParquetBuilder};
pub use format::records::{Labels, Records, RecordsBuilder};
pub use format::safetensors::{SafeTensors, SafeTensorsBuilder};
pub use format::tar::{Tar, TarBuilder};
pub use format::tfrecord::{TfRecord, TfRecordBuilder};
pub use format::tokens::{Tokens, TokensBuilder};
pub(crate) use parallel::parallel;
pub use wrap::checked::Checked;
pub use wrap::memory::InMemory;
#[cfg(feature = "image")]
pub use wrap::seekable::Seekable;
pub use wrap::several::{Concat, Mix};
pub use wrap::subset::Subset;
pub use wrap::verify::{Verified, Verify};

use self::forward::{debug_by_describe, forward};

use crate::error::{Error, ErrorKind, Result, Stage, caught_in};
use crate::memory::available;
use crate::storage::{Extent, SourceId, Sources};
use crate::tensor::{EncodedField, Spec};
use std::path::Path;
use std::sync::Arc;

/// A set of samples with ids 0 … len - 1. Open: implement it for a format of your own.
#[allow(clippy::len_without_is_empty, reason = "a loader refuses an empty dataset")]
pub trait Dataset: Send + Sync + 'static {
    /// Stored fields of a sample, in order.
    fn schema(&self) -> &[EncodedField];

    /// Number of samples.
    fn len(&self) -> u64;

    /// Files and memory that hold the bytes.
    fn sources(&self) -> &Arc<Sources>;

    /// Maximum bytes of all extents of one sample together, one that several fields share counted once: the smallest memory
    /// budget must hold them. More is an error of the sample. With chunks, the most bytes of a chunk for each of its
    /// samples.
    fn sample_bytes_max(&self) -> u64;

    /// Bytes of a sample's field as a decoder gets them, by the index alone; `None` if only reading tells. Packed rows need
    /// it. The default knows all but [framed](Parts::framed) fields and chunks.
    ///
    /// Errors: those of [`extents`](Self::extents).
    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        sample::field_bytes(self, sample, field)
    }

    /// Maximum bytes of a field as a decoder gets them: room for texts and other bytes that are delivered as stored. The
    /// default asks [`field_bytes`](Self::field_bytes) for every sample; where that knows nothing, it is
    /// [`sample_bytes_max`](Self::sample_bytes_max). Parquet reads the column, compressed MDS the offsets of each shard.
    ///
    /// Errors: of reading; [`ErrorKind::Config`] for a column with too many bytes to read them for this.
    fn field_bytes_max(&self, field: usize) -> Result<u64> {
        let mut most = 0;
        for sample in 0..self.len() {
            match self.field_bytes(sample, field)? {
                Some(bytes) => most = most.max(bytes),
                None => return Ok(self.sample_bytes_max()),
            }
        }
        Ok(most)
    }

    /// The sample with the most bytes, if the index knows it. The error of a memory budget that is too small names it.
    fn largest_sample(&self) -> Option<u64> {
        None
    }

    /// Gives the place of the bytes of every field of the schema. `sample` is below `len`.
    ///
    /// Arithmetic only, since it runs at least once per sample during an epoch: by a worker that asks the page cache, by the
    /// I/O thread for a read, by a cuFile thread. Every call gives the same answer. An error becomes the sample's error.
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()>;

    /// Verifies the bytes of a [framed](Parts::framed) extent before any field is opened. It runs where [`open`](Self::open) does,
    /// once per read of an extent, however many fields share the extent: `field` is the first wanted one of them, not
    /// always field 0. In a [`Checked`] dataset it also runs for extents that are not framed. The default accepts all
    /// bytes.
    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        let _ = (sample, field, bytes);
        Ok(())
    }

    /// Turns the bytes of a [framed](Parts::framed) extent into the field's bytes: checks the part of this field alone
    /// and cuts off a header. Bytes that must be unpacked or converted go into `buffer`, which is empty and belongs to
    /// the worker. Runs on a decode worker, or on the I/O thread for samples of at most 64 KiB without a decoder or `.map`: it
    /// must not wait. The bytes are untrusted. The default returns all bytes.
    ///
    /// Fields with the same framed extent share one read. Wanted fields are opened in the order given to [`Parts`];
    /// other fields are not opened.
    fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8], buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let _ = (sample, field, buffer);
        Ok(bytes)
    }

    /// Seek points of the picture in a field, which decoders get with its bytes; see [`DatasetExt`]`::seekable`. The
    /// default has none.
    fn seek_points(&self, sample: u64, field: usize) -> &[u8] {
        let _ = (sample, field);
        &[]
    }

    /// Maximum bytes that [`open`](Self::open) puts into its buffer. The loader's memory plan has them once per worker. More is
    /// an error of the sample.
    fn opened_bytes_max(&self) -> u64 {
        0
    }

    /// The chunks, for data without random access to samples: Parquet row groups, compressed shards. The loader then
    /// never calls [`extents`](Self::extents) or [`open`](Self::open).
    fn chunked(&self) -> Option<&dyn Chunked> {
        None
    }

    /// Name of the sample within its file, for people: a tar member, a Parquet row group. It may read a few bytes, and
    /// is called only for errors of the sample; `field` is the field with the error, where one has it.
    fn member(&self, sample: u64, field: Option<usize>) -> Option<String> {
        let _ = field;
        let chunks = self.chunked()?;
        let starts = chunks.starts();
        let chunk = starts::locate(starts, chunks.inner(sample))?;
        (chunk + 1 < starts.len()).then(|| chunks.chunk_name(chunk))
    }

    /// Hash that separates datasets of the same files and schema: chosen samples, windows, strides, label maps. Saved
    /// states of a loader contain it ([`State`](crate::State)), so it must be the same in every process and on every
    /// machine: use no addresses, no folders, none of the standard library's hashes.
    ///
    /// **A state resumes without an error in another dataset with the same files, schema, length and identity.** Mix in all
    /// that chooses or orders samples ([`identity_of`](crate::order::identity_of)).
    fn identity(&self) -> u64 {
        0
    }

    /// Heap bytes of the index, for the loader's printed plan. **The default counts only the table of sources**: a
    /// dataset that keeps offsets, lengths or labels must add their bytes.
    fn index_bytes(&self) -> usize {
        self.sources().table_bytes()
    }

    /// Name of the dataset in the report, with its path.
    fn describe(&self) -> String {
        format!("{} samples", self.len())
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    forward!(self => (**self); schema len sources sample_bytes_max field_bytes field_bytes_max largest_sample extents check open seek_points opened_bytes_max chunked member identity index_bytes describe);
}

debug_by_describe!(Images, Mds, Megatron, Npy, Npz, Records, SafeTensors, Tar, TfRecord, Tokens);
#[cfg(feature = "parquet")]
debug_by_describe!(Parquet);
#[cfg(feature = "image")]
debug_by_describe!(Seekable<D>);
debug_by_describe!(Checked<D>, Concat, InMemory<D>, Subset<D>);

/// Methods of every dataset.
pub trait DatasetExt: Dataset + Sized {
    /// Cuts the dataset in two parts without overlap: about `fraction` of the samples (rounded to the nearest), and the
    /// rest. `key` alone decides the parts. No memory is needed.
    ///
    /// ```
    /// # use feedline::dataset::{Dataset, DatasetExt, Records};
    /// # let dataset = Records::builder(1).open_bytes([7; 50])?;
    /// let (validation, training) = dataset.split(0.1, 42)?;
    /// assert_eq!((validation.len(), training.len()), (5, 45));
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: [`ErrorKind::Config`] if `fraction` is not within 0 … 1.
    fn split(self, fraction: f64, key: u64) -> Result<(Subset<Self>, Subset<Self>)> {
        Subset::split(Arc::new(self), fraction, key)
    }

    /// Takes only these samples, in this order; ids may repeat.
    ///
    /// Errors: [`ErrorKind::Config`] with the first id that does not exist.
    fn subset(self, ids: impl Into<Vec<u64>>) -> Result<Subset<Self>> {
        Subset::of_ids(Arc::new(self), ids.into())
    }

    /// Verifies every byte that is read by one CRC32C per field of each sample (with chunks: per extent of a chunk).
    /// The file `index` keeps them. The first call reads all bytes once to make it ([`Checked::built`] tells). If only
    /// modification times or paths differ later, as in a copy, all bytes are read once and compared. Rows are no longer
    /// read in place.
    ///
    /// Errors: file system errors, also if `index` cannot be written; an `index` that is another kind of file
    /// ([`ErrorKind::Config`]) or is damaged ([`ErrorKind::Decode`]); sources with other lengths, bytes or samples than
    /// when it was made ([`ErrorKind::Changed`]). The file is left as it is; [`checked_anew`](Self::checked_anew)
    /// replaces it.
    fn checked(self, index: impl AsRef<Path>) -> Result<Checked<Self>> {
        Checked::open(self, index.as_ref(), false)
    }

    /// As [`checked`](Self::checked), but always makes the checksums from the present bytes, whatever `index` holds:
    /// for data that was changed on purpose.
    ///
    /// Errors: file system errors, and an `index` that is another kind of file.
    fn checked_anew(self, index: impl AsRef<Path>) -> Result<Checked<Self>> {
        Checked::open(self, index.as_ref(), true)
    }

    /// Adds seek points to the JPEGs: a decoder of crops then begins at each row of the crop, not at the picture's
    /// start. Pixels stay the same. The file `index` keeps the points; it takes about 1 % of the pictures' bytes, on
    /// disk and in memory. The first call reads everything once to make it, on all cores ([`Seekable::built`] tells).
    /// Make it before many processes open it.
    ///
    /// JPEGs with restart markers need no points. Damage above and beside a crop is not detected then, unless the
    /// dataset is [`checked`](Self::checked), too.
    ///
    /// Errors: file system errors; an `index` that is another kind of file ([`ErrorKind::Config`]), or has the points of
    /// another dataset, also of this one with other samples or lengths of files ([`ErrorKind::Changed`]).
    #[cfg(feature = "image")]
    fn seekable(self, index: impl AsRef<Path>) -> Result<Seekable<Self>> {
        Seekable::open(self, index.as_ref())
    }

    /// As [`seekable`](Self::seekable), with the points of `parts`: seekable datasets that together have the samples and
    /// files of this one, in its order. So many machines make the points, each for some of the files.
    ///
    /// Errors: as of `seekable`; those of `parts`; [`ErrorKind::Config`] if they have other samples, files or fields.
    #[cfg(feature = "image")]
    fn seekable_from<P: Dataset>(
        self,
        index: impl AsRef<Path>,
        parts: impl IntoIterator<Item = Result<P>>,
    ) -> Result<Seekable<Self>> {
        Seekable::open_from(self, index.as_ref(), parts)
    }

    /// Reads all files into memory, in parallel. For datasets that fit there and have small samples, which then cost no
    /// system call. The dataset owns the bytes; the plan and the budget of each of its loaders count them.
    ///
    /// Errors: file system errors; [`ErrorKind::Budget`], before the first read, if the files have more bytes than the
    /// process can get: its container's limit counts, and what the kernel can reclaim is free.
    fn in_memory(self) -> Result<InMemory<Self>> {
        self.in_memory_within(usize::MAX)
    }

    /// As [`in_memory`](Self::in_memory), for a loader with this
    /// [`memory_budget`](crate::LoaderBuilder::memory_budget): more bytes are refused before the first read.
    fn in_memory_within(self, budget: usize) -> Result<InMemory<Self>> {
        InMemory::open(self, budget, available::at_most())
    }

    /// Bytes of a field of every sample, by the index alone: for samplers of batches with similar lengths.
    ///
    /// Errors: [`ErrorKind::Config`] for an unknown field, and where only reading tells: Parquet, most fields in frames.
    fn lengths(&self, field: &str) -> Result<Vec<u64>> {
        let refused = |message| Error::new(ErrorKind::Config, Stage::Index, message);
        let number = self.schema().iter().position(|known| known.name == field);
        let number = number.ok_or_else(|| refused(no_field(self.schema(), field)))?;
        let unknown = || refused(format!("the index has no lengths of field `{field}`"));
        let length = |sample| self.field_bytes(sample, number)?.ok_or_else(unknown);
        let located = |error: Error, sample| error.in_stage(Stage::Index).with_sample(sample);
        (0..self.len()).map(|sample| length(sample).map_err(|error| located(error, sample))).collect()
    }

    /// Gives the bytes of every field of one sample as a decoder gets them, verified. It reads by plain calls on this
    /// thread: to look at data, not to train.
    ///
    /// Errors: [`ErrorKind::Config`] for a missing sample or a dataset with chunks; errors of [`open`](Dataset::open)
    /// and of the file system.
    fn read_sample(&self, sample: u64) -> Result<Vec<Vec<u8>>> {
        sample::read(self, sample)
    }
}

impl<D: Dataset> DatasetExt for D {}

/// The message for a name that the schema lacks.
pub(crate) fn no_field(schema: &[EncodedField], name: &str) -> String {
    let names: Vec<_> = schema.iter().map(|field| field.name.as_str()).collect();
    format!("no field `{name}`; the dataset has {}", names.join(", "))
}

/// The error of a dataset that breaks its word.
pub(crate) fn lie<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::User, Stage::Read, message))
}

/// Where `part` lies in `whole`, unless it was copied.
fn offset_in(part: &[u8], whole: &[u8]) -> Option<u64> {
    let within = whole.as_ptr_range().contains(&part.as_ptr());
    within.then(|| (part.as_ptr().addr() - whole.as_ptr().addr()) as u64)
}

/// Checks the bytes that `open` made of `given` against the dataset's bound. A part of the given ones takes no memory.
pub(crate) fn within_opened(opened: &[u8], given: &[u8], most: u64) -> Result<()> {
    match opened.len() as u64 <= most || offset_in(opened, given).is_some() {
        true => Ok(()),
        false => lie(format!("`open` gave {} bytes, the dataset's `opened_bytes_max` is {most}", opened.len())),
    }
}

/// Moves a range that code gave within its `bytes` to its place in the file; `given` are the bytes of the extent.
pub(crate) fn placed(error: Error, bytes: &[u8], given: &[u8], extent: &Extent) -> Error {
    match offset_in(bytes, given) {
        Some(within) => error.moved(extent.offset + within),
        None => error.with_range_in_words(),
    }
}

/// Whether bytes go through [`Dataset::check`] or [`Dataset::open`], judged by a few samples. Rows are then not read in
/// place, whatever their fields.
pub(crate) fn opens_bytes(dataset: &dyn Dataset) -> bool {
    let len = dataset.len();
    let framed = |sample| {
        let mut parts = Parts::new();
        dataset.extents(sample, &mut parts).is_err() || parts.iter().any(|(_, part)| part.is_checked())
    };
    // A user's dataset may panic here; planning the sample meets the panic again and names it.
    let asked = std::panic::AssertUnwindSafe(|| [0, len / 2, len.saturating_sub(1)].into_iter().any(framed));
    dataset.chunked().is_none() && len > 0 && std::panic::catch_unwind(asked).unwrap_or(true)
}

/// Places of the bytes of one sample's fields, filled by [`Dataset::extents`].
pub struct Parts<'a> {
    /// The first few parts, inline: a usual schema needs no allocation.
    few: [(usize, Part<'a>); PARTS_INLINE],
    more: Vec<(usize, Part<'a>)>,
    len: usize,
}

const PARTS_INLINE: usize = 8;

/// Place of one field's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// In storage and final: they may be read in place.
    Extent(Extent),
    /// In storage; they must pass through [`Dataset::check`].
    Checked(Extent),
    /// In storage; they must pass through [`Dataset::check`] and [`Dataset::open`].
    Framed(Extent),
    /// In the index.
    Inline(&'a [u8]),
}

impl Part<'_> {
    /// Extent in the sources; `None` for bytes of the index.
    pub(crate) fn extent(&self) -> Option<Extent> {
        match *self {
            Self::Extent(extent) | Self::Checked(extent) | Self::Framed(extent) => Some(extent),
            Self::Inline(_) => None,
        }
    }

    /// Whether the dataset must check the bytes before use.
    pub(crate) fn is_checked(&self) -> bool {
        matches!(self, Self::Checked(_) | Self::Framed(_))
    }

    /// Whether this part has the same extent as the part `before`, so that one read serves both.
    pub(crate) fn shares(&self, before: Option<Part<'_>>) -> bool {
        let before = before.filter(|before| self.is_checked() && before.is_checked());
        before.is_some_and(|before| {
            self.extent() == before.extent() && self.extent().is_some_and(|extent| extent.len > 0)
        })
    }
}

impl<'a> Parts<'a> {
    pub(crate) fn new() -> Self {
        Self { few: [(0, Part::Inline(&[])); PARTS_INLINE], more: Vec::new(), len: 0 }
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
        self.more.clear();
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, Part<'a>)> + '_ {
        self.few[..self.len.min(PARTS_INLINE)].iter().chain(&self.more).copied()
    }

    /// Asks the dataset for the parts of a sample and checks them: every one of the `fields` must have bytes exactly
    /// once, and every extent must lie within its source.
    pub(crate) fn ask(
        &mut self,
        dataset: &'a dyn Dataset,
        sources: &Sources,
        fields: usize,
        sample: u64,
    ) -> Result<()> {
        self.clear();
        let ask = || dataset.extents(sample, self).map_err(|error| error.in_stage(Stage::Read));
        caught_in("the dataset's `extents`", Stage::Read, ask)?;
        let name = |field: usize| dataset.schema().get(field).map_or("?", |field| &field.name);
        if fields > Spec::FIELDS_MAX {
            return lie(format!("{fields} fields, {} are the limit", Spec::FIELDS_MAX));
        }
        let mut seen = 0_u64;
        for (field, part) in self.iter() {
            if field >= fields {
                return lie(format!("the dataset names field {field}, its schema has {fields}"));
            }
            if seen & (1 << field) != 0 {
                return lie(format!("the dataset gave bytes for field `{}` twice", name(field)));
            }
            seen |= 1 << field;
            part.extent().map_or(Ok(()), |extent| sources.check(&extent))?;
        }
        let missing = seen.trailing_ones() as usize;
        if missing < fields {
            return lie(format!("the dataset gave no bytes for field `{}`", name(missing)));
        }
        Ok(())
    }

    /// Checks the bytes of all extents, the read buffers' share, against the dataset's bound.
    pub(crate) fn within(&self, sample_bytes_max: u64) -> Result<()> {
        match self.stored_bytes() {
            bytes if bytes <= sample_bytes_max => Ok(()),
            bytes => {
                lie(format!("the sample has {bytes} bytes, the dataset's `sample_bytes_max` is {sample_bytes_max}"))
            }
        }
    }

    /// As [`ask`](Self::ask), for all fields and sources of the dataset. Errors name the sample.
    fn ask_all(&mut self, dataset: &'a dyn Dataset, sample: u64) -> Result<()> {
        let fields = dataset.schema().len();
        self.ask(dataset, dataset.sources(), fields, sample).map_err(|error| error.with_sample(sample))
    }

    /// Bytes of all extents; one that follows itself counts once.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let (mut before, mut sum) = (None, 0_u64);
        for extent in self.iter().filter_map(|(_, part)| part.extent()) {
            if before.replace(extent) != Some(extent) {
                sum = sum.saturating_add(extent.len);
            }
        }
        sum
    }

    /// Number of parts so far.
    fn len(&self) -> usize {
        self.len
    }

    /// Adds `by` to the source ids of the parts from number `from` on: their table was appended to another.
    fn move_sources(&mut self, from: usize, by: usize) {
        for (_, part) in self.few[..self.len.min(PARTS_INLINE)].iter_mut().chain(&mut self.more).skip(from) {
            if let Part::Extent(extent) | Part::Checked(extent) | Part::Framed(extent) = part {
                extent.source = SourceId::at(extent.source.index() + by);
            }
        }
    }

    fn push(&mut self, field: usize, part: Part<'a>) {
        match self.few.get_mut(self.len) {
            Some(place) => *place = (field, part),
            None => self.more.push((field, part)),
        }
        self.len += 1;
    }

    /// Marks all parts in storage for [`Dataset::check`].
    fn check_all(&mut self) {
        for (_, part) in self.few[..self.len.min(PARTS_INLINE)].iter_mut().chain(&mut self.more) {
            if let Part::Extent(extent) = *part {
                *part = Part::Checked(extent);
            }
        }
    }

    /// Gives field `field` the bytes of this extent, unchanged.
    pub fn extent(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::Extent(extent));
    }

    /// Gives field `field` the result of [`Dataset::open`] for this extent. Several fields may share an extent: add
    /// them one after the other.
    pub fn framed(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::Framed(extent));
    }

    /// Gives field `field` these bytes of the index itself (a label).
    pub fn inline(&mut self, field: usize, bytes: &'a [u8]) {
        self.push(field, Part::Inline(bytes));
    }
}
