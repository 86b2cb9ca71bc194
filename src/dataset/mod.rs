//! Datasets: the samples, the locations of their bytes, and the meaning of the bytes. No bulk I/O
//! here.
//!
//! ```text
//! sample id ──extents──► Parts { field → extent | inline bytes | made } ──readers──► bytes ──open──► field's bytes ──► decoder
//! ```
//!
//! Data without random access to samples (Parquet row groups, compressed shards) comes in
//! [chunks](Chunked).
//!
//! Limits: ids are 0 … len-1; a sample has one extent per field, or several that together make up a
//! row ([`Parts::append`]). Invariants: `extents` is arithmetic on an index (it may run several
//! times per sample, on any thread of the loader, with the same answer); an opened dataset never
//! changes; the files on disk may change, and the readers detect that.
//!
//! Each format is a separate type, listed below; the guide [formats](crate::guide::formats) opens
//! them all. Datasets are built from other datasets by [`Concat`], [`Mix`], [`Subset`], [`Joined`],
//! [`Facts`], [`Copied`], [`Packed`] and [`InMemory`]: see
//! [`DatasetExt`].
//!
//! Your own dataset takes a few lines. Here every sample is a line of 16 bytes in one file:
//!
//! ```
//! use feedline::dataset::{Dataset, Parts, Sizes};
//! use feedline::storage::{Extent, SourceId, Sources};
//! use feedline::tensor::{DType, EncodedField, Field};
//! use feedline::error::Stage;
//! use feedline::Error;
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
//!     fn sizes(&self) -> Sizes { Sizes::new(16) }
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
//! Samples of varying length are declared as
//! [`EncodedField::bytes`](crate::tensor::EncodedField::bytes); a [decoder](crate::decode::Decoder)
//! turns them into rows. Bytes that the dataset must check or convert first are
//! [framed](Parts::framed): decode workers pass them through [`open`](Framed::open). Here each
//! sample is a text followed by its checksum, the sum of its bytes:
//!
//! ```
//! # use feedline::decode::{Ctx, Decoder};
//! use feedline::dataset::{Dataset, Framed, Parts, Sizes};
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
//!     fn sizes(&self) -> Sizes {
//!         Sizes::new(self.starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0))
//!     }
//!     fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
//!         let offset = self.starts[sample as usize];
//!         let end = self.starts[sample as usize + 1];
//!         parts.framed(0, Extent { source: self.source, offset, len: end - offset });
//!         Ok(())
//!     }
//!     fn framed(&self) -> Option<&dyn Framed> { Some(self) }
//! }
//!
//! impl Framed for Texts {
//!     fn open<'a>(&self, _: u64, _: usize, bytes: &'a [u8], _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
//!         match bytes.split_last() {
//!             Some((last, text)) if *last == sum(text) => Ok(text),
//!             _ => Err(Error::decode("the sum of the text is wrong")),
//!         }
//!     }
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
//! let mut bytes = Vec::new();
//! let mut starts = vec![0];
//! let mut sources = Sources::new();
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

mod ext;
#[cfg(feature = "unstable")]
#[doc(hidden)]
pub mod fuzzing;
mod wrap;

pub use ext::DatasetExt;
#[doc(inline)]
pub use feedline_core::dataset::index;
#[doc(inline)]
pub use feedline_core::dataset::{
    ChunkBuf, ChunkBytes, Chunked, Damage, DamageKind, Dataset, Framed, Parts, Sizes, Strings,
    Verified, stoppable,
};
#[doc(inline)]
pub use feedline_formats::{
    Images, Labels, Mds, MdsBuilder, Megatron, MegatronBuilder, Npy, NpyBuilder, Npz, NpzBuilder,
    Records, RecordsBuilder, SafeTensors, SafeTensorsBuilder, Table, TableBuilder, Tar, TarBuilder,
    TfRecord, TfRecordBuilder, Tokens, TokensBuilder,
};
#[cfg(feature = "parquet")]
#[doc(inline)]
pub use feedline_parquet::{FileColumn, FileValues, Nulls, Parquet, ParquetBuilder};
#[cfg(feature = "text")]
#[doc(inline)]
pub use feedline_text::{Arrow, ArrowBuilder, Jsonl, JsonlBuilder};
pub use wrap::*;
