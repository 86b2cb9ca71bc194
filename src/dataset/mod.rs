//! Datasets: which samples there are, where their bytes lie, and what the bytes are. No bulk I/O here.
//!
//! ```text
//! sample id ──extents──► Parts { field → extent | inline bytes } ──readers──► bytes ──open──► field's bytes ──► decoder
//! ```
//!
//! Limits: ids are 0 … len-1; a sample has at most one extent per field. Invariants: `extents` is arithmetic on an
//! index (it runs once per sample, on the I/O thread or a decode worker); a dataset never changes after it was
//! opened; what is on disk may, and the readers find out.
//!
//! A dataset of your own takes a few lines; here every sample is a line of 16 bytes in one file:
//!
//! ```
//! use feedline::dataset::{Dataset, Parts};
//! use feedline::read::{Extent, SourceId, Sources};
//! use feedline::tensor::{DType, EncodedField, Field};
//! use std::sync::Arc;
//!
//! struct Lines { sources: Arc<Sources>, file: SourceId, schema: Vec<EncodedField>, len: u64 }
//!
//! impl Lines {
//!     fn open(path: &str) -> feedline::Result<Self> {
//!         let bytes = std::fs::metadata(path).map_err(|e| feedline::Error::user("no such file").with_source(e))?.len();
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
//! # Ok::<(), feedline::Error>(())
//! ```

mod images;
mod records;
mod subset;

pub use images::{EXTENSIONS, Images};
pub use records::{Labels, Records, RecordsBuilder};
pub use subset::Subset;

use crate::error::Result;
use crate::read::{Extent, Sources};
use crate::tensor::EncodedField;
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

    /// Turns the bytes of a [framed](Parts::framed) extent into the field's bytes: checks a header or checksum and
    /// cuts it off. Runs on a decode worker; the bytes are untrusted. The default gives all bytes.
    fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8]) -> Result<&'a [u8]> {
        let _ = (sample, field);
        Ok(bytes)
    }

    /// Heap bytes of the index, for the loader's printed sum.
    fn index_bytes(&self) -> usize {
        self.sources().table_bytes()
    }

    /// What the report calls it, with its path.
    fn describe(&self) -> String {
        format!("{} samples", self.len())
    }
}

impl<D: Dataset + ?Sized> Dataset for Arc<D> {
    fn schema(&self) -> &[EncodedField] {
        (**self).schema()
    }
    fn len(&self) -> u64 {
        (**self).len()
    }
    fn sources(&self) -> &Arc<Sources> {
        (**self).sources()
    }
    fn sample_bytes_max(&self) -> u64 {
        (**self).sample_bytes_max()
    }
    fn largest_sample(&self) -> Option<u64> {
        (**self).largest_sample()
    }
    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        (**self).extents(sample, parts)
    }
    fn open<'a>(&self, sample: u64, field: usize, bytes: &'a [u8]) -> Result<&'a [u8]> {
        (**self).open(sample, field, bytes)
    }
    fn index_bytes(&self) -> usize {
        (**self).index_bytes()
    }
    fn describe(&self) -> String {
        (**self).describe()
    }
}

/// What every dataset can do.
pub trait DatasetExt: Dataset + Sized {
    /// Cuts the dataset in two without overlap: about `fraction` of the samples (rounded to the nearest) and the rest,
    /// chosen by `key` alone, in no memory.
    ///
    /// Errors: [`ErrorKind::Config`](crate::ErrorKind::Config) when `fraction` is not within 0 … 1.
    fn split(self, fraction: f64, key: u64) -> Result<(Subset<Self>, Subset<Self>)> {
        Subset::split(Arc::new(self), fraction, key)
    }

    /// Only these samples, in this order; ids may repeat.
    ///
    /// Errors: [`ErrorKind::Config`](crate::ErrorKind::Config) naming the first id that does not exist.
    fn subset(self, ids: impl Into<Vec<u64>>) -> Result<Subset<Self>> {
        Subset::of_ids(Arc::new(self), ids.into())
    }
}

impl<D: Dataset> DatasetExt for D {}

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
    /// In storage, to be passed through [`Dataset::open`].
    Framed(Extent),
    /// In the index.
    Inline(&'a [u8]),
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

    fn push(&mut self, field: usize, part: Part<'a>) {
        match self.few.get_mut(self.len) {
            Some(place) => *place = (field, part),
            None => self.more.push((field, part)),
        }
        self.len += 1;
    }

    /// Field `field` is these bytes as they stand.
    pub fn extent(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::Extent(extent));
    }

    /// Field `field` is what [`Dataset::open`] makes of these bytes.
    pub fn framed(&mut self, field: usize, extent: Extent) {
        self.push(field, Part::Framed(extent));
    }

    /// Field `field` is these bytes of the index itself (a label).
    pub fn inline(&mut self, field: usize, bytes: &'a [u8]) {
        self.push(field, Part::Inline(bytes));
    }
}
