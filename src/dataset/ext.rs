//! Methods of every dataset: parts of it, wrappers, lengths.

use super::contract::{Dataset, field_bytes, frames};
use super::sample;
use super::wrap::{Checked, Copied, InMemory, Measured, PackedBuilder, Subset};
#[cfg(feature = "image")]
use super::wrap::{Seekable, picture_sizes::picture_sizes};
#[cfg(feature = "image")]
use crate::decode::Image;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::available;
use crate::memory::plan::PROCESS;
use crate::setting::Setting;
use crate::tensor::EncodedField;
use std::path::Path;
use std::sync::Arc;

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
    /// start. Pixels stay the same. The file `index` keeps the points; it takes about 1 % of the pictures' bytes on
    /// disk, and at most 16 MiB in memory (all of it, if it is an object of a store). The first call reads everything once to make it, on all cores ([`Seekable::built`] tells).
    /// Make it before many processes open it.
    ///
    /// JPEGs with restart markers, and those with seek points in them, need no file.
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

    /// Copies documents, the samples' first field of `fields`, into the file `copy`, with the other `fields` beside them. There each
    /// can be read alone, as [`packed`](Self::packed) needs it: for rows in chunks (Parquet, compressed MDS), in frames (tar, TFRecord,
    /// MDS) or with checksums, which are verified now. The copy takes the disk space of the tokens. The first call reads everything
    /// once, on all cores, and writes the file ([`Copied::built`] tells). Make it before many processes open it.
    ///
    /// ```no_run
    /// # #[cfg(feature = "parquet")] {
    /// # use feedline::dataset::{DatasetExt, Parquet};
    /// let lists = Parquet::builder().up_to("input_ids", 1 << 30).open("corpus/*.parquet")?;
    /// let packed = lists.copied(["input_ids"], "corpus.copy")?.packed("input_ids", 4096).open("corpus.bins")?;
    /// # }
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: of reading, also of damaged samples; [`ErrorKind::Config`] for an unknown field, one that has not one dimension, a part of
    /// a dataset with chunks, and for a `copy` that is another kind of file; [`ErrorKind::Shape`] for fields of different lengths;
    /// [`ErrorKind::Changed`] for a copy of another dataset or of this one before it changed; file system errors.
    fn copied<'n>(
        self,
        fields: impl IntoIterator<Item = &'n str>,
        copy: impl AsRef<Path>,
    ) -> Result<Copied> {
        let fields: Vec<String> = fields.into_iter().map(String::from).collect();
        Copied::open(&self, &fields, copy.as_ref())
    }

    /// Packs documents, the samples' field `field`, into rows of `tokens` elements: whole documents by best fit, planned once and
    /// kept in a side file. See [`Packed`](super::Packed) for the fields of a row.
    ///
    /// ```no_run
    /// # use feedline::dataset::{DatasetExt, Megatron};
    /// let documents = Megatron::builder().documents(1 << 30).open("corpus_text_document")?;
    /// let packed = documents.packed("tokens", 4096).shuffled(7).split().open("corpus.bins")?;
    /// # Ok::<(), feedline::Error>(())
    /// ```
    fn packed(self, field: &str, tokens: usize) -> PackedBuilder<Self> {
        PackedBuilder::new(self, field, tokens)
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
        InMemory::open(
            self,
            budget,
            available::for_rank().map(|free| free.saturating_sub(PROCESS as u64)),
        )
    }

    /// Length of a field of every sample, by the index alone: the first dimension of a raw field, the bytes of an encoded
    /// one. For samplers of batches with similar lengths.
    ///
    /// A dataset of your own gives them by [`Framed::field_bytes`](super::Framed::field_bytes), if its extents do not say them.
    ///
    /// Errors: [`ErrorKind::Config`] for an unknown field, and where only reading tells: most Parquet columns and fields in
    /// frames whose length varies. [`measured`](Self::measured) reads them. [`ErrorKind::Decode`] for a part of an element.
    fn lengths(&self, field: &str) -> Result<Vec<u64>> {
        let refused = |message| Error::new(ErrorKind::Config, Stage::Index, message);
        let number = self.schema().iter().position(|known| known.name == field);
        let number = number.ok_or_else(|| refused(no_field(self.schema(), field)))?;
        let unit = self.schema()[number].unit_bytes();
        let unknown = || {
            let way = Setting::Measured.hint(|measured| format!(": {measured} reads them once"));
            refused(format!("the index has no lengths of field `{field}`{way}"))
        };
        let length = |sample| match field_bytes(self, sample, number)?.ok_or_else(unknown)? {
            bytes if bytes.is_multiple_of(unit) => Ok(bytes / unit),
            bytes => {
                let message = format!(
                    "field `{field}` has {bytes} bytes, not a multiple of its element's {unit}"
                );
                Err(Error::new(ErrorKind::Decode, Stage::Index, message))
            }
        };
        (0..self.len())
            .map(|sample| {
                length(sample).map_err(|error| error.in_stage(Stage::Index).with_sample(sample))
            })
            .collect()
    }

    /// Width and height of the picture of every sample in the field `field`, as `image` decodes it: upright, if that is
    /// [set](Image::exif_orientation). For [`Image::groups`] and [`Image::patch_counts`]. The file `index` keeps them, in 8 bytes
    /// per sample; the first call reads everything once to make it, on all cores. A picture with a damaged header has
    /// 1 × 1 pixels.
    ///
    /// Errors: [`ErrorKind::Config`] for a field without pictures; file system errors, and those of an `index` as of
    /// [`measured`](Self::measured).
    #[cfg(feature = "image")]
    fn picture_sizes(
        &self,
        field: &str,
        image: &Image,
        index: impl AsRef<Path>,
    ) -> Result<Vec<(u32, u32)>> {
        picture_sizes(self, field, image, index.as_ref())
    }

    /// Adds the [lengths](Self::lengths) of fields whose index has none. The file `index` keeps them, in 4 bytes per sample
    /// and such field. The first call reads everything once to make it, on all cores ([`Measured::built`] tells). Make it before many
    /// processes open it. Samples that are damaged have length 0. Later, a sample of another length is an error of
    /// [`ErrorKind::Changed`].
    ///
    /// Errors: file system errors; an `index` that is another kind of file ([`ErrorKind::Config`]), or has the lengths of
    /// another dataset, also of this one with other samples or lengths of files ([`ErrorKind::Changed`]); a part of a dataset
    /// with chunks ([`ErrorKind::Config`]); a field of 4 GiB or more ([`ErrorKind::Limit`]).
    fn measured(self, index: impl AsRef<Path>) -> Result<Measured<Self>> {
        Measured::open(self, index.as_ref())
    }

    /// Maximum bytes of a field as a decoder gets them, by its number in the schema: room for texts and other bytes that
    /// are delivered as stored. Known by the index, or by reading a column or the offsets of shards
    /// ([`Framed::field_bytes_max`](super::Framed::field_bytes_max)); else it is [`Sizes::sample_bytes_max`](super::Sizes::sample_bytes_max).
    ///
    /// Errors: of reading; [`ErrorKind::Config`] for a column with too many bytes to read them for this.
    fn field_bytes_max(&self, field: usize) -> Result<u64> {
        if let Some(most) = frames(self).field_bytes_max(field)? {
            return Ok(most);
        }
        let mut most = 0;
        for sample in 0..self.len() {
            match field_bytes(self, sample, field)? {
                Some(bytes) => most = most.max(bytes),
                None => return Ok(self.sizes().sample_bytes_max),
            }
        }
        Ok(most)
    }

    /// Gives the bytes of every field of one sample as a decoder gets them, verified. It reads by plain calls on this
    /// thread: to look at data, not to train.
    ///
    /// Errors: [`ErrorKind::Config`] for a missing sample or a dataset with chunks; errors of [`Framed::open`](super::Framed::open)
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
