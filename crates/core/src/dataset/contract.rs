//! The traits that a dataset implements. They tell where its bytes are and how many, and for a few
//! formats what the bytes mean.

use super::forward::forward;
use super::parts::{Part, Parts, lie, unframed};
use super::starts;
use crate::dataset::{Chunked, Strings};
use crate::order::Sampler;
use crate::storage::Sources;
use crate::tensor::EncodedField;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::sync::Arc;

/// A set of samples with ids 0 … len - 1. Implement this trait for your own format.
///
/// The first five methods are enough for data that is delivered exactly as stored.
#[allow(
    clippy::len_without_is_empty,
    reason = "a loader refuses an empty dataset"
)]
pub trait Dataset: Send + Sync + 'static {
    /// Stored fields of a sample, in order.
    fn schema(&self) -> &[EncodedField];

    /// Number of samples.
    fn len(&self) -> u64;

    /// Files and memory that hold the bytes.
    fn sources(&self) -> &Arc<Sources>;

    /// Sizes known from the index, for a loader's memory plan.
    fn sizes(&self) -> Sizes;

    /// Adds the location of each field's bytes to `parts`, for every field of the schema. `sample`
    /// is below `len`.
    ///
    /// It must only compute, never do I/O, since it runs at least once per sample during an epoch:
    /// in a worker that queries the page cache, in the I/O thread that submits a read, in a cuFile
    /// thread. Every call must give the same result. An error becomes the sample's error.
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()>;

    /// The dataset's operations on stored fields. Needed if `extents` gives [framed](Parts::framed)
    /// parts, or if the dataset knows more about a field than its extent shows. The default is
    /// `None`: fields are delivered as they are stored.
    fn framed(&self) -> Option<&dyn Framed> {
        None
    }

    /// The chunks, for data without random access to samples: Parquet row groups, compressed
    /// shards. The loader then never calls [`extents`](Self::extents) or [`Framed::open`].
    fn chunked(&self) -> Option<&dyn Chunked> {
        None
    }

    /// The sample order that the dataset prescribes, such as the order of a mix. A loader of this
    /// dataset then uses no other order. The default is `None`.
    ///
    /// A wrapper that keeps the ids returns the order of its inner dataset. A wrapper that gives
    /// samples other ids must refuse an inner dataset that prescribes an order.
    fn sampler(&self) -> Option<Arc<dyn Sampler>> {
        None
    }

    /// Names of all samples, in the order of their ids, by which another dataset can be joined:
    /// paths below the folder, keys of a tar, the key column of a table. They need not be UTF-8.
    /// Called while a join is opened; it may read the index or headers, not the samples. The default
    /// is `None`: the samples have no names.
    fn keys(&self) -> Result<Option<Strings>> {
        Ok(None)
    }

    /// Hash that distinguishes datasets with the same files and schema: by chosen samples, windows,
    /// strides, label maps. Saved states of a loader contain it (`State`), so it
    /// must be the same in every process and on every
    /// machine: use no addresses, no folders, none of the standard library's hashes.
    ///
    /// **A state resumes without an error in another dataset with the same files, schema, length
    /// and identity.** Include everything that chooses or orders samples
    /// (`identity_of`).
    fn identity(&self) -> u64 {
        0
    }

    /// Name of the dataset in the report, with its path.
    fn describe(&self) -> String {
        format!("{} samples", self.len())
    }
}

/// Sizes of a dataset, known from its index.
///
/// ```
/// # use feedline_core::dataset::Sizes;
/// let raw = Sizes::new(16);
/// let offsets = vec![0_u64; 100]; // which the dataset keeps
/// let unpacked = Sizes { opened_bytes_max: 64, index_bytes: offsets.capacity() * 8, ..Sizes::new(16) };
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Maximum total bytes of the extents of one sample; an extent that several fields share counts
    /// once. Even the smallest memory budget must hold them. A sample with more bytes is an error
    /// of that sample. With chunks, the maximum over all chunks of a chunk's bytes per sample.
    pub sample_bytes_max: u64,
    /// Maximum bytes that [`Framed::open`] puts into its buffer. The loader's memory plan counts
    /// them once per worker. More bytes are an error of the sample.
    pub opened_bytes_max: u64,
    /// The sample with the most bytes, if the index knows it. The error for a memory budget that is
    /// too small names it.
    pub largest_sample: Option<u64>,
    /// Maximum number of [appended](Parts::append) extents of one sample. More extents are an error
    /// of the sample.
    pub appended_max: usize,
    /// Heap bytes of offsets, lengths or labels, without the table of sources, for the loader's
    /// printed plan.
    pub index_bytes: usize,
}

impl Sizes {
    /// Sizes for samples of at most `sample_bytes_max` bytes; the rest is 0 or unknown.
    pub fn new(sample_bytes_max: u64) -> Self {
        Self {
            sample_bytes_max,
            ..Self::default()
        }
    }
}

/// A dataset's operations on stored fields, and its knowledge about them beyond the locations of
/// their bytes. Each default is right for fields that are delivered as they are stored.
pub trait Framed: Send + Sync {
    /// Verifies the bytes of a [framed](Parts::framed) extent before any field is opened. It runs
    /// where [`open`](Self::open) runs, once per read of an extent, even if several fields share
    /// the extent. `field` is then the first of these fields that is wanted, which need not be
    /// field 0. In a dataset with checksums, it also runs for extents that are not framed.
    fn check(&self, sample: u64, field: usize, bytes: &[u8]) -> Result<()> {
        let _ = (sample, field, bytes);
        Ok(())
    }

    /// Turns the bytes of a [framed](Parts::framed) extent into the field's bytes: checks only this
    /// field's part and cuts off a header. Bytes that must be unpacked or converted go into
    /// `buffer`, which is empty and belongs to the worker. Runs on a decode worker, or on the I/O
    /// thread for samples of at most 64 KiB without a decoder or `.map`: it must not block. The
    /// bytes are untrusted.
    ///
    /// Fields with the same framed extent share one read. Wanted fields are opened in the order
    /// given to [`Parts`]; other fields are not opened.
    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let _ = (sample, field, buffer);
        Ok(bytes)
    }

    /// Makes the bytes of a [made](Parts::made) field: writes all of `out`, which has the size of a
    /// row and still holds an earlier sample's bytes. Runs where the sample is planned: on a
    /// worker, or on the I/O thread. It must not block.
    fn make(&self, sample: u64, field: usize, out: &mut [u8]) -> Result<()> {
        let _ = (sample, field, out);
        lie("the dataset gave a made part, but does not implement `make`".into())
    }

    /// Number of bytes that [`open`](Self::open) returns for a field of a sample, from the index
    /// alone; `None` if it is known only after reading. A dataset in chunks may also know it.
    /// `DatasetExt::lengths` and ragged batches need it. The lengths of fields with a fixed shape,
    /// and of fields that are not framed, are known without this method.
    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        let _ = (sample, field);
        Ok(None)
    }

    /// Maximum number of bytes that a decoder gets for a field, if the dataset can find it without
    /// calling [`field_bytes`](Self::field_bytes) for every sample. Parquet reads the column,
    /// compressed MDS the offsets of each shard.
    ///
    /// Errors: those of `DatasetExt::field_bytes_max`.
    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        let _ = field;
        Ok(None)
    }

    /// Name of the sample within its file, for people: for example a tar member. The method may
    /// read a few bytes. It is called only when the sample fails; `field` is the field with the
    /// error, if any. For a dataset in chunks that is not framed, the name of the chunk is used.
    fn member(&self, sample: u64, field: Option<usize>) -> Option<String> {
        let _ = (sample, field);
        None
    }

    /// Seek points of the picture in a field, which decoders get with its bytes; see
    /// `FactsBuilder::seek_points`. Points that are stored in a file are read
    /// into `buffer`. After an error the picture is decoded without them.
    fn seek_points<'a>(
        &'a self,
        sample: u64,
        field: usize,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let _ = (sample, field, buffer);
        Ok(&[])
    }
}

#[deny(clippy::missing_trait_methods)]
impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    forward!(self => (**self); schema len sources sizes extents framed chunked sampler keys identity describe);
}

/// The dataset's [`Framed`] methods, or those for unframed fields if it has none.
pub fn frames<D: Dataset + ?Sized>(dataset: &D) -> &dyn Framed {
    dataset.framed().unwrap_or(&Unframed)
}

/// The chunks of a dataset. Panics if it has no chunks.
pub fn chunks<D: Dataset + ?Sized>(dataset: &D) -> &dyn Chunked {
    dataset
        .chunked()
        .expect("asked only when the dataset has chunks")
}

struct Unframed;

impl Framed for Unframed {
    fn open<'a>(&self, _: u64, _: usize, _: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        unframed()
    }
}

/// Number of bytes that a decoder gets for a field of a sample, from the index alone. `None` if it
/// is known only after reading: for most framed fields of varying length, and for fields in chunks.
pub fn field_bytes<D: Dataset + ?Sized>(
    dataset: &D,
    sample: u64,
    field: usize,
) -> Result<Option<u64>> {
    if let Some(bytes) = frames(dataset).field_bytes(sample, field)? {
        return Ok(Some(bytes));
    }
    if let Some(bytes) = dataset
        .schema()
        .get(field)
        .and_then(EncodedField::fixed_bytes)
    {
        return Ok(Some(bytes));
    }
    if dataset.chunked().is_some() {
        return Ok(None);
    }
    let mut parts = Parts::new();
    dataset.extents(sample, &mut parts)?;
    let len = |part: Part<'_>| (!matches!(part, Part::Framed(_))).then(|| part.len() as u64);
    let own = parts
        .iter()
        .filter(|one| one.field == field)
        .map(|one| len(one.part));
    Ok(own.reduce(|all, own| Some(all? + own?)).flatten())
}

/// Whether the index has the lengths of a field. Checks only three samples, since a format knows
/// the lengths of all samples or of none.
pub fn knows_lengths<D: Dataset + ?Sized>(dataset: &D, field: usize) -> bool {
    let last = dataset.len().saturating_sub(1);
    dataset.len() == 0
        || ![0, last / 2, last]
            .into_iter()
            .any(|sample| matches!(field_bytes(dataset, sample, field), Ok(None)))
}

/// Name of the sample within its file, for people.
pub fn member<D: Dataset + ?Sized>(
    dataset: &D,
    sample: u64,
    field: Option<usize>,
) -> Option<String> {
    if let Some(framed) = dataset.framed() {
        return framed.member(sample, field);
    }
    chunk_member(dataset.chunked()?, sample)
}

/// The name of the sample's chunk.
pub fn chunk_member(chunks: &dyn Chunked, sample: u64) -> Option<String> {
    let starts = chunks.starts();
    let chunk = starts::locate(starts, chunks.inner(sample))?;
    (chunk + 1 < starts.len()).then(|| chunks.chunk_name(chunk))
}

/// Refuses a dataset that prescribes an [order](Dataset::sampler), for wrappers that give samples
/// other ids. `to` says what to do with the parts of a mix. Errors: [`ErrorKind::Config`].
pub fn unordered<D: Dataset + ?Sized>(dataset: &D, to: &str) -> Result<()> {
    match dataset.sampler() {
        Some(_) => {
            let message = format!("{} is a mix: {to}", dataset.describe());
            Err(Error::new(ErrorKind::Config, Stage::Index, message))
        }
        None => Ok(()),
    }
}

/// The error message for a field name that the schema lacks.
pub fn no_field(schema: &[EncodedField], name: &str) -> String {
    let names: Vec<_> = schema.iter().map(|field| field.name.as_str()).collect();
    format!("no field `{name}`; the dataset has {}", names.join(", "))
}
