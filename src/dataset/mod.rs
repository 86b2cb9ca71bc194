//! Datasets: which samples there are, where their bytes lie, and what the bytes are. No bulk I/O here.
//!
//! ```text
//! sample id ──extents──► Parts { field → extent | inline bytes } ──readers──► bytes ──open──► field's bytes ──► decoder
//! ```
//!
//! Where samples cannot be had one by one (Parquet row groups, compressed shards) a dataset deals in [chunks](Chunked).
//!
//! Limits: ids are 0 … len-1; a sample has at most one extent per field. Invariants: `extents` is arithmetic on an
//! index (it runs once per sample, on the I/O thread or a decode worker); a dataset never changes after it was
//! opened; what is on disk may, and the readers find out.
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
//! | several, a part, with checksums, in memory | [`Concat`], [`Mix`], [`Subset`], [`Checked`], [`InMemory`] |
//!
//! A dataset of your own takes a few lines; here every sample is a line of 16 bytes in one file:
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
//! Samples of varying length are [`EncodedField::bytes`](crate::tensor::EncodedField::bytes), which a
//! [decoder](crate::decode::Decoder) makes into rows. Bytes that the dataset must look at first are
//! [framed](Parts::framed): decode workers then pass them through [`open`](Dataset::open). Here each sample is a text
//! and a byte that is the sum of it:
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
//! /// Where each text begins, and where the last one ends.
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
//!     // The index is what this dataset keeps for each sample: the loader's plan shows it.
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
pub(crate) mod index;
mod parallel;
mod sample;
mod starts;
mod words;
mod wrap;

pub use crate::memory::ChunkBuf;
pub use chunked::{ChunkBytes, Chunked};
pub use damage::{Damage, DamageKind, OnDamage};
pub(crate) use fingerprint::Fingerprint;
pub(crate) use format::images::EXTENSIONS;
pub use format::images::Images;
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
pub use wrap::checked::Checked;
pub use wrap::memory::InMemory;
pub use wrap::several::{Concat, Mix};
pub use wrap::subset::Subset;
pub use wrap::verify::{Verified, Verify};

use self::forward::{debug_by_describe, forward};

use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::{Extent, SourceId, Sources};
use crate::tensor::{EncodedField, Spec};
use std::path::Path;
use std::sync::Arc;

/// A set of samples. Open: implement it for a format of your own.
#[allow(clippy::len_without_is_empty, reason = "a loader refuses an empty dataset")]
pub trait Dataset: Send + Sync + 'static {
    /// The fields of a sample as they are stored, in order.
    fn schema(&self) -> &[EncodedField];

    /// Number of samples.
    fn len(&self) -> u64;

    /// Where the bytes are.
    fn sources(&self) -> &Arc<Sources>;

    /// The most bytes that all extents of one sample have together: what the smallest memory budget must hold.
    fn sample_bytes_max(&self) -> u64;

    /// The sample with the most bytes, if the index knows it: named when the memory budget does not hold it.
    fn largest_sample(&self) -> Option<u64> {
        None
    }

    /// Says for every field of the schema where its bytes are. `sample` is below `len`.
    ///
    /// Arithmetic only: it is called once per sample on the way. Errors become errors of the sample.
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()>;

    /// Verifies the bytes of a [framed](Parts::framed) extent, before anything of them is opened. Called once each time that an
    /// extent was read, however many fields share it: `field` is the first of them that is wanted, not always field 0. In a
    /// [`Checked`] dataset it is called for extents that are not framed, too. Runs on a decode worker; the default takes all bytes.
    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        let _ = (sample, field, bytes);
        Ok(())
    }

    /// Turns the bytes of a [framed](Parts::framed) extent into the field's bytes: checks what is this field's alone, cuts
    /// off a header, and where the bytes must be made anew (unpacked, converted) makes them in `buffer`, which is empty and
    /// the worker's own. Runs on a decode worker; the bytes are untrusted. The default gives all bytes.
    ///
    /// Fields whose framed extents are the same are read once. Those that are wanted are opened in the order in which they were
    /// given; fields that nobody wants are not opened.
    fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8], buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let _ = (sample, field, buffer);
        Ok(bytes)
    }

    /// Most bytes that [`open`](Self::open) puts into its buffer: a term of the loader's sum, for each worker.
    fn opened_bytes_max(&self) -> u64 {
        0
    }

    /// The chunks, when samples cannot be had one by one: Parquet row groups, compressed shards. Then
    /// [`extents`](Self::extents) and [`open`](Self::open) are not called.
    fn chunked(&self) -> Option<&dyn Chunked> {
        None
    }

    /// What the sample is called within its file: a tar's member, a Parquet row group. For people; may read a few bytes, and is
    /// asked for only when something is wrong with the sample.
    fn member(&self, sample: u64) -> Option<String> {
        let chunks = self.chunked()?;
        let starts = chunks.starts();
        let chunk = starts::locate(starts, chunks.inner(sample))?;
        (chunk + 1 < starts.len()).then(|| chunks.chunk_name(chunk))
    }

    /// What tells it from another dataset of the same files and schema: which samples were chosen, windows, strides, label
    /// maps. Saved states of a loader remember it ([`State`](crate::State)), so it must be the same in every process and on every
    /// machine: no addresses, no folders, none of the standard library's hashes.
    fn identity(&self) -> u64 {
        0
    }

    /// Heap bytes of the index, for the loader's printed plan. **The default counts the table of sources alone**: a dataset
    /// that keeps offsets, lengths or labels adds theirs.
    fn index_bytes(&self) -> usize {
        self.sources().table_bytes()
    }

    /// What the report calls it, with its path.
    fn describe(&self) -> String {
        format!("{} samples", self.len())
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    forward!(self => (**self); schema len sources sample_bytes_max largest_sample extents check open opened_bytes_max chunked member identity index_bytes describe);
}

debug_by_describe!(Images, Mds, Megatron, Npy, Npz, Records, SafeTensors, Tar, TfRecord, Tokens);
#[cfg(feature = "parquet")]
debug_by_describe!(Parquet);
debug_by_describe!(Checked<D>, Concat, InMemory<D>, Subset<D>);

/// What every dataset can do.
pub trait DatasetExt: Dataset + Sized {
    /// Cuts the dataset in two without overlap: first about `fraction` of the samples (rounded to the nearest), then the
    /// rest, chosen by `key` alone, in no memory.
    ///
    /// ```
    /// # use feedline::dataset::{Dataset, DatasetExt, Records};
    /// # let dataset = Records::builder(1).open_bytes([7; 50])?;
    /// let (validation, training) = dataset.split(0.1, 42)?;
    /// assert_eq!((validation.len(), training.len()), (5, 45));
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: [`ErrorKind::Config`] when `fraction` is not within 0 … 1.
    fn split(self, fraction: f64, key: u64) -> Result<(Subset<Self>, Subset<Self>)> {
        Subset::split(Arc::new(self), fraction, key)
    }

    /// Only these samples, in this order; ids may repeat.
    ///
    /// Errors: [`ErrorKind::Config`] naming the first id that does not exist.
    fn subset(self, ids: impl Into<Vec<u64>>) -> Result<Subset<Self>> {
        Subset::of_ids(Arc::new(self), ids.into())
    }

    /// Verifies every byte that is read against a CRC32C per field of each sample. They are kept in the file
    /// `index`; the first time all bytes are read once to make them ([`Checked::built`] tells). Where only modification times
    /// or paths differ, as in a copy, all bytes are read once and compared. Rows are then no longer read in place. Datasets in
    /// chunks have one for each extent of a chunk.
    ///
    /// Errors: those of the file system, also when `index` cannot be written; an `index` that holds something else
    /// ([`ErrorKind::Config`]) or is damaged ([`ErrorKind::Decode`]);
    /// sources of other lengths, other bytes or other samples than when it was made
    /// ([`ErrorKind::Changed`]). It is left as it is;
    /// [`checked_anew`](Self::checked_anew) makes it anew.
    fn checked(self, index: impl AsRef<Path>) -> Result<Checked<Self>> {
        Checked::open(self, index.as_ref(), false)
    }

    /// As [`checked`](Self::checked), but makes the checksums from the bytes as they are now, whatever `index` says of them:
    /// for data that was changed on purpose.
    ///
    /// Errors: those of the file system, and an `index` that holds something else.
    fn checked_anew(self, index: impl AsRef<Path>) -> Result<Checked<Self>> {
        Checked::open(self, index.as_ref(), true)
    }

    /// Reads all files into memory, in parallel: for datasets that fit there and have small samples, which then cost no
    /// system call. The bytes are the dataset's, not part of a loader's budget.
    ///
    /// Errors: those of the file system; [`ErrorKind::Budget`] when the kernel has no such
    /// memory.
    fn in_memory(self) -> Result<InMemory<Self>> {
        InMemory::open(self)
    }

    /// The bytes of every field of one sample as a decoder would get them, read and verified by plain calls on this
    /// thread: to look at data, not to train.
    ///
    /// Errors: [`ErrorKind::Config`] when there is no such sample or the dataset deals in
    /// chunks; what [`open`](Dataset::open) and the file system say.
    fn read_sample(&self, sample: u64) -> Result<Vec<Vec<u8>>> {
        sample::read(self, sample)
    }
}

impl<D: Dataset> DatasetExt for D {}

/// Whether bytes go through [`Dataset::check`] or [`Dataset::open`], by a few samples: rows are then not read in place, whatever their fields.
pub(crate) fn opens_bytes(dataset: &dyn Dataset) -> bool {
    let len = dataset.len();
    let framed = |sample| {
        let mut parts = Parts::new();
        dataset.extents(sample, &mut parts).is_err() || parts.iter().any(|(_, part)| part.is_checked())
    };
    // A dataset of the user's may panic here; what it does then is seen, and named, when the sample is planned.
    let asked = std::panic::AssertUnwindSafe(|| [0, len / 2, len.saturating_sub(1)].into_iter().any(framed));
    dataset.chunked().is_none() && len > 0 && std::panic::catch_unwind(asked).unwrap_or(true)
}

/// Where the bytes of one sample's fields are, filled by [`Dataset::extents`].
pub struct Parts<'a> {
    /// The first few lie here, so that a list costs no allocation for any usual schema.
    few: [(usize, Part<'a>); PARTS_INLINE],
    more: Vec<(usize, Part<'a>)>,
    len: usize,
}

const PARTS_INLINE: usize = 8;

/// Where the bytes of one field are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// In storage, as they stand: they may be read in place.
    Extent(Extent),
    /// In storage, to be passed through [`Dataset::check`].
    Checked(Extent),
    /// In storage, to be passed through [`Dataset::check`] and [`Dataset::open`].
    Framed(Extent),
    /// In the index.
    Inline(&'a [u8]),
}

impl Part<'_> {
    /// Where in the sources the bytes are, unless they are the index's own.
    pub(crate) fn extent(&self) -> Option<Extent> {
        match *self {
            Self::Extent(extent) | Self::Checked(extent) | Self::Framed(extent) => Some(extent),
            Self::Inline(_) => None,
        }
    }

    /// Whether the dataset is to see the bytes before they are used.
    pub(crate) fn is_checked(&self) -> bool {
        matches!(self, Self::Checked(_) | Self::Framed(_))
    }

    /// Whether the bytes are those of the file part before it, so that they are read once.
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

    /// Asks what a sample is made of, with nothing in the answer that a reader could not rely on: every one of the `fields` has
    /// bytes exactly once, every extent lies within its source.
    pub(crate) fn ask(
        &mut self,
        dataset: &'a dyn Dataset,
        sources: &Sources,
        fields: usize,
        sample: u64,
    ) -> Result<()> {
        self.clear();
        dataset.extents(sample, self)?;
        let lie = |message: String| Err(Error::new(ErrorKind::User, Stage::Read, message));
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
        match (0..fields).find(|field| seen & (1 << field) == 0) {
            Some(field) => lie(format!("the dataset gave no bytes for field `{}`", name(field))),
            None => Ok(()),
        }
    }

    /// As [`ask`](Self::ask), for all that the dataset has. Errors name the sample.
    fn ask_all(&mut self, dataset: &'a dyn Dataset, sample: u64) -> Result<()> {
        let fields = dataset.schema().len();
        self.ask(dataset, dataset.sources(), fields, sample).map_err(|error| error.with_sample(sample))
    }

    /// Parts so far.
    fn len(&self) -> usize {
        self.len
    }

    /// The parts from number `from` on are of sources `by` places further on, in a table that was appended to another.
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

    /// All that is in storage is to be checked.
    fn check_all(&mut self) {
        for (_, part) in self.few[..self.len.min(PARTS_INLINE)].iter_mut().chain(&mut self.more) {
            if let Part::Extent(extent) = *part {
                *part = Part::Checked(extent);
            }
        }
    }

    /// Field `field` is these bytes as they stand.
    pub fn extent(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::Extent(extent));
    }

    /// Field `field` is what [`Dataset::open`] makes of these bytes. Several fields may be cut from the same extent:
    /// give them one after the other.
    pub fn framed(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::Framed(extent));
    }

    /// Field `field` is these bytes of the index itself (a label).
    pub fn inline(&mut self, field: usize, bytes: &'a [u8]) {
        self.push(field, Part::Inline(bytes));
    }
}
