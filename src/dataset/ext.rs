//! Methods of every dataset: subsets, wrappers, lengths.

use super::wrap::{Copied, FactsBuilder, InMemory, JoinBuilder, PackedBuilder, Subset, Tokenized};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::{Dataset, field_bytes, frames, no_field, sample};
use feedline_core::decode::ToIds;
use feedline_core::memory::available;
use std::path::Path;
use std::sync::Arc;

/// Methods of every dataset.
pub trait DatasetExt: Dataset + Sized {
    /// Splits the dataset into two disjoint parts: about `fraction` of the samples (rounded to the
    /// nearest), and the rest. `key` alone decides which samples are in which part. No memory is
    /// needed.
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

    /// Adds facts about the samples, kept in the side file `file`: checksums, lengths, seek points,
    /// sizes of pictures. One pass over the data finds all requested facts; later openings read the
    /// file. The same file may serve several openings with different facts.
    ///
    /// ```no_run
    /// # use feedline::dataset::{DatasetExt, Tar};
    /// let tar = Tar::builder().bytes("txt").open("train-{000..146}.tar")?;
    /// let tar = tar.facts("train.facts").checksums().lengths().open()?;
    /// let lengths = tar.lengths("txt")?;
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Like every pass over the data, it can be [stopped](crate::dataset::stoppable):
    ///
    /// ```
    /// # use feedline::{ErrorKind, Stop, dataset::{DatasetExt, Records, stoppable}};
    /// let stop = Stop::new();
    /// stop.request(); // elsewhere
    /// # let bytes = [0; 64];
    /// # let file = std::env::temp_dir().join(format!("feedline-stop-{}", std::process::id()));
    /// let dataset = Records::builder(8).open_bytes(bytes)?;
    /// let error = stoppable(&stop, || dataset.facts(&file).checksums().open()).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Cancelled);
    /// # assert!(!file.exists());
    /// # Ok::<(), feedline::Error>(())
    /// ```
    fn facts(self, file: impl AsRef<Path>) -> FactsBuilder<Self> {
        FactsBuilder::new(self, file.as_ref())
    }

    /// Copies documents (the first of `fields` in each sample) into the file `copy`, together with
    /// the other `fields`. Each document can be read alone from the copy, as
    /// [`packed`](Self::packed) requires. This is for rows in chunks (Parquet, compressed MDS), in
    /// frames (tar, TFRecord, MDS) or with checksums, which are verified during the copy. The copy
    /// takes as much disk space as the tokens. The first call reads everything once, on all cores,
    /// and writes the file ([`Copied::built`] reports this). Make the copy before many processes
    /// open it.
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
    /// Errors: reading errors, also of damaged samples; file system errors;
    /// - [`ErrorKind::Config`] if a field is unknown or not one-dimensional, if the dataset is a
    ///   subset of a dataset with chunks, or if `copy` is another kind of file;
    /// - [`ErrorKind::Shape`] if fields of a sample differ in length;
    /// - [`ErrorKind::Changed`] if the copy was made from another dataset, or from an older state of
    ///   this one.
    fn copied<'n>(
        self,
        fields: impl IntoIterator<Item = &'n str>,
        copy: impl AsRef<Path>,
    ) -> Result<Copied> {
        let fields: Vec<String> = fields.into_iter().map(String::from).collect();
        Copied::open(&self, &fields, copy.as_ref())
    }

    /// Turns the texts of a field into tokens: the field `input_ids` in its place. The workers do it
    /// each time a text is read, and every pass over the data does. So the tokens of texts have
    /// [lengths](FactsBuilder::lengths), can be [copied](Self::copied) once, and
    /// [packed](Self::packed).
    ///
    /// ```no_run
    /// # #[cfg(feature = "tokenizers")] {
    /// use feedline::dataset::{DatasetExt, Jsonl};
    /// use feedline::decode::{Tokenize, Tokenizer};
    ///
    /// let tokenize = Tokenize::new(Tokenizer::open("models/llama")?, 4096).cut();
    /// let tokens = Jsonl::builder().text("text").open("train.jsonl")?.tokenized("text", tokenize)?;
    /// // One pass, kept in a file: the exact lengths.
    /// let tokens = tokens.facts("train.lengths").lengths().open()?;
    /// let packed = tokens.packed("input_ids", 4096).shuffled(7).open("train.bins")?;
    /// # }
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: [`ErrorKind::Config`] for a field that is unknown, no text, or in the index, and for
    /// a dataset that has a field `input_ids`.
    fn tokenized(self, field: &str, ids: impl ToIds) -> Result<Tokenized<Self>> {
        Tokenized::new(self, field, Arc::new(ids))
    }

    /// Packs documents (the field `field` of each sample) into rows of `tokens` elements: whole
    /// documents by best fit. The packing is planned once and kept in a side file. See
    /// [`Packed`](super::Packed) for the fields of a row.
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

    /// Adds the fields of `other`, whose rows have the [keys](Dataset::keys) of these samples in any
    /// order: a [`Table`](super::Table) of labels, or a second set of tar shards. The keys are
    /// compared when the join is opened; samples without a row and rows without a sample are an
    /// error, unless [`missing`](JoinBuilder::missing) leaves them out.
    ///
    /// Keys are the paths of pictures below their folder, the keys of tar shards, and the key column
    /// of tables. A row may also give the file name alone, or path or file name without ending; see
    /// the guide [formats](crate::guide::formats).
    ///
    /// ```no_run
    /// # use feedline::dataset::{DatasetExt, Images, Missing, Table};
    /// let labels = Table::read("train.csv", "file_name")?;
    /// let train = Images::open("train/")?.join(labels).missing(Missing::Skip).open()?;
    /// println!("{train:?}"); // how many were left out, and the first of them
    /// # Ok::<(), feedline::Error>(())
    /// ```
    fn join(self, other: impl Dataset) -> JoinBuilder {
        JoinBuilder::new(self, other)
    }

    /// Reads all files into memory, in parallel. Use it for datasets that fit in memory and have
    /// small samples: a sample then costs no system call. The dataset owns the bytes; the plan and
    /// the budget of each of its loaders count them.
    ///
    /// The ranks of a machine share one copy: the first one reads the files, the others wait and map
    /// its memory, and each plan counts bytes / local ranks. The guide [ranks](crate::guide::ranks)
    /// tells when they can.
    ///
    /// Errors: file system errors; [`ErrorKind::Budget`], before the first read, if the files have
    /// more bytes than the process can allocate; with a copy in each rank, more than its part. The container's limit applies; memory that the
    /// kernel can reclaim counts as free.
    fn in_memory(self) -> Result<InMemory<Self>> {
        self.in_memory_within(usize::MAX)
    }

    /// Like [`in_memory`](Self::in_memory), for a loader with this
    /// [`memory_budget`](crate::LoaderBuilder::memory_budget): larger files are refused before the
    /// first read. Of a copy that ranks share, this process counts its part.
    fn in_memory_within(self, budget: usize) -> Result<InMemory<Self>> {
        InMemory::open(self, budget, available::room())
    }

    /// Returns the length of a field for every sample, from the index alone: the first dimension of
    /// a raw field, the number of bytes of an encoded field. For samplers that batch samples of
    /// similar length.
    ///
    /// Your own dataset provides lengths through
    /// [`Framed::field_bytes`](feedline_core::dataset::Framed::field_bytes), if its extents do not
    /// determine them.
    ///
    /// Errors: [`ErrorKind::Config`] for an unknown field, and for lengths that are known only
    /// after reading: those of most Parquet columns and of framed fields of varying length
    /// ([`FactsBuilder::lengths`] reads them); [`ErrorKind::Decode`] for a field that is not a
    /// whole number of elements.
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

    /// Returns the maximum number of bytes that a decoder gets for a field, given by its number in
    /// the schema. This is the space needed for texts and other bytes that are delivered as stored.
    /// The maximum is known from the index, or by reading a column or the offsets of shards
    /// ([`Framed::field_bytes_max`](feedline_core::dataset::Framed::field_bytes_max)); otherwise it
    /// is [`Sizes::sample_bytes_max`](feedline_core::dataset::Sizes::sample_bytes_max).
    ///
    /// Errors: reading errors; [`ErrorKind::Config`] for a column that is too large to be read for
    /// this purpose.
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

    /// Returns the verified bytes of every field of one sample, as a decoder gets them. Reads with
    /// plain calls on this thread: for looking at data, not for training.
    ///
    /// Errors: [`ErrorKind::Config`] for a missing sample or a dataset with chunks; errors of
    /// [`Framed::open`](feedline_core::dataset::Framed::open) and of the file system.
    fn read_sample(&self, sample: u64) -> Result<Vec<Vec<u8>>> {
        sample::read(self, sample)
    }
}

impl<D: Dataset> DatasetExt for D {}
