//! Arrow IPC: data sets of Hugging Face's `datasets`, in its folders and its cache, and other
//! streams and files.
//!
//! ```text
//! folder ──state.json──► shards ──messages, offsets──► index: (offset, length) of each value of each row
//! row ──index──► extents: the bytes of lists, texts and pictures, as they are stored
//!     └────────► numbers of a few bytes, which opening has read into memory
//! ```
//!
//! The first opening reads the messages and the offsets, but no texts and no lists, and keeps the
//! index beside each shard (`.fdx`). So rows have random access, and a shuffle is as fast as any
//! order. Values are read as they are stored; only booleans are unpacked.
//!
//! Read: numbers, booleans, dates and times as integers, bytes and strings (also views), lists of
//! numbers, dictionaries of all of them, parts of structures by dotted names, pictures of
//! `datasets`. Refused by name: lists of bytes and of structures, maps, unions, decimals,
//! compressed buffers.
//!
//! Limits: 16 fields; 2^32 - 1 rows per shard. Invariants: every length, offset and count of a file
//! is compared with the bytes that are there, before it is used; a batch that contradicts itself is
//! damage as a whole; a file without its end mark, or with other batches than its footer says, is
//! damage, too. A flat file of values has no checksums: see `DatasetExt::facts`.

mod batch;
mod fault;
mod folder;
mod held;
mod plan;
mod schema;
mod walk;

#[cfg(test)]
mod tests;

use self::batch::mark;
use self::fault::Fault;
use self::held::{HELD_MAX, Held};
use self::plan::{How, Leaf, Take, Wanted};
use feedline_base::error::{Error, ErrorKind, Result, Stage, config};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::own;
use feedline_core::dataset::index::{
    Entry, FIELDS_MAX, Index, Place, Scan, Settings, index_getters, index_setters,
};
use feedline_core::dataset::{Damage, DamageKind, Dataset, Digest, Framed, Parts, Sizes};
use feedline_core::storage::{Blob, Extent, SourceId, Sources};
use feedline_core::tensor::{EncodedField, Encoding, Field, Shape};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum bytes of a row of a field in a fixed shape.
const ROW_MAX: usize = 1 << 30;

/// Dataset of Arrow IPC streams and files, as Hugging Face's `datasets` writes them: a sample is a
/// row.
///
/// Opens a folder of `save_to_disk`, the files of the library's cache, and others. A field is a
/// column: a number or a list, a text, or a picture to decode.
///
/// ```no_run
/// # use feedline_core::tensor::{DType, Field}; use feedline_text::Arrow;
/// let train = Arrow::builder()
///     .up_to("input_ids", 2048)
///     .column("label")
///     .image("image")
///     .numbers(Field::fixed("embedding", DType::F32, [768]))
///     .open("imagenet/train")?; // by save_to_disk
/// # Ok::<(), feedline_core::Error>(())
/// ```
///
/// Rows have random access, so every order is possible.
pub struct Arrow {
    index: Index,
    schema: Vec<EncodedField>,
    takes: Vec<Take>,
    /// Values in memory, of fields with a few bytes.
    held: Vec<Option<Held>>,
    /// Of every field the bytes of a row, if all rows have the same size.
    row_bytes: Vec<Option<usize>>,
    /// For nulls.
    zeros: Vec<u8>,
    null_zero: bool,
    opened_bytes_max: u64,
    /// Maximum bytes that are read for a sample, and the sample.
    largest: (u64, u64),
    name: String,
}

/// Builder of [`Arrow`]: names the columns. Made by [`Arrow::builder`].
#[derive(Clone, Debug, Default)]
pub struct ArrowBuilder {
    wanted: Vec<Wanted>,
    varying: Option<usize>,
    null_zero: bool,
    place: Place,
    skip_damage: bool,
}

impl Arrow {
    index_getters!();

    /// Opens the data with every column as a field.
    ///
    /// Errors: as [`ArrowBuilder::open`].
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(pattern)
    }

    /// Starts a builder.
    pub fn builder() -> ArrowBuilder {
        ArrowBuilder::default()
    }

    /// Counts of what was left out, by reason.
    pub fn left_out(&self) -> &BTreeMap<String, u64> {
        self.index.left_out()
    }
}

impl ArrowBuilder {
    index_setters!(Arrow);

    /// Takes a column as a field of the same name: a number, a list of a length that the schema
    /// states, a text or other bytes. Parts of structures have dotted names (`answer.text`). If no
    /// column is named, all columns are taken.
    #[must_use]
    pub fn column(self, name: &str) -> Self {
        self.wants(name, How::Stored)
    }

    /// Takes several columns, each as [`column`](Self::column) does.
    #[must_use]
    pub fn columns<'n>(self, names: impl IntoIterator<Item = &'n str>) -> Self {
        names.into_iter().fold(self, Self::column)
    }

    /// Takes a column of encoded pictures: bytes, or the `bytes` of `datasets`' `Image`. If all
    /// columns are taken, those that `datasets` calls `Image` are pictures.
    #[must_use]
    pub fn image(self, name: &str) -> Self {
        self.wants(name, How::Image)
    }

    /// Takes a column of lists of numbers, or of bytes, with at most `max` elements.
    #[must_use]
    pub fn up_to(self, name: &str, max: usize) -> Self {
        self.wants(name, How::UpTo(max))
    }

    /// Takes the column with the name of `field` in the field's shape, as an embedding of
    /// `Field::fixed("x", DType::F32, [768])` in lists of any length. The dtype is the stored one.
    #[must_use]
    pub fn numbers(self, field: Field) -> Self {
        let name = field.name().to_string();
        self.wants(&name, How::Shaped(field))
    }

    /// Takes every list of numbers of any length with at most `max` elements, unless it has an
    /// [`up_to`](Self::up_to) of its own.
    #[must_use]
    pub fn varying_up_to(mut self, max: usize) -> Self {
        self.varying = Some(max);
        self
    }

    /// `true` reads a null as zeros (as many as a fixed shape needs), as an empty text or as no
    /// elements. A null within a list stays an error. Default: an error of the sample.
    #[must_use]
    pub fn null_zero(mut self, zero: bool) -> Self {
        self.null_zero = zero;
        self
    }

    fn wants(mut self, name: &str, how: How) -> Self {
        self.wanted.push(Wanted {
            name: name.into(),
            how,
        });
        self
    }

    /// Opens a folder of `save_to_disk`, another folder with the files of one split, a file or a
    /// pattern (`imdb-train-*.arrow`).
    ///
    /// Errors: no such file; no rows; damage, with path and offset; a column that is missing, is of
    /// another type or is not read; a folder of several splits; rows chosen by a table of indices.
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<Arrow> {
        let (files, name) = folder::files(pattern.as_ref())?;
        let name = match files.len() {
            1 => name,
            count => format!("{count} files of {name}"),
        };
        self.open_as(&files, name)
    }

    fn open_as(self, files: &[PathBuf], name: String) -> Result<Arrow> {
        let Some(first) = files.first() else {
            return Err(Error::new(ErrorKind::Empty, Stage::Index, "no files").with_path(name));
        };
        let (schema, takes) = self.plan(&Blob::open(first)?)?;
        let options = format!("{takes:?}");
        let index = Index::open_or_build(
            files,
            &self.settings(&options, takes.len()),
            |input, rows| walk::walk(input, rows, &takes),
        )?;
        self.finish(index, schema, takes, name)
    }

    /// Opens a stream or file in memory: decode workers copy its bytes, without I/O.
    ///
    /// Errors: as [`open`](Self::open).
    pub fn open_bytes(self, bytes: impl Into<Arc<[u8]>>) -> Result<Arrow> {
        let bytes = bytes.into();
        let blob = Blob::memory(bytes::Bytes::from_owner(bytes.clone()));
        let (schema, takes) = self.plan(&blob)?;
        let index = Index::of_bytes(bytes, &self.settings("", takes.len()), |input, rows| {
            walk::walk(input, rows, &takes)
        })?;
        self.finish(index, schema, takes, "<memory>".into())
    }

    /// The fields, by the schema of the first file.
    fn plan(&self, first: &Blob) -> Result<(Vec<EncodedField>, Vec<Take>)> {
        let columns = walk::schema(&mut Scan::new(first, false)).map_err(|fault| match fault {
            Fault::Failed(error) => error,
            Fault::Damage(kind, message) => {
                let kind = match kind {
                    DamageKind::Unsupported => ErrorKind::Unsupported,
                    DamageKind::Cut | DamageKind::NoEnd => ErrorKind::Truncated,
                    _ => ErrorKind::Decode,
                };
                first.error(kind, message, 0, first.len())
            }
        })?;
        let (fields, takes) = plan::plan(&columns, &self.wanted, self.varying)
            .map_err(|error| error.with_path(first.path()))?;
        match takes.len() {
            0 => Err(config("no columns").with_path(first.path())),
            count if count > FIELDS_MAX => Err(config(format!(
                "{count} columns, at most {FIELDS_MAX} are read: choose them with {}",
                Setting::Columns
            ))),
            _ => Ok((fields, takes)),
        }
    }

    fn settings<'a>(&self, options: &'a str, fields: usize) -> Settings<'a> {
        let mut settings = Settings::new("arrow 1", fields);
        settings.options = options;
        settings.place = self.place.clone();
        settings.skip_damage = self.skip_damage;
        settings
    }

    fn finish(
        self,
        index: Index,
        schema: Vec<EncodedField>,
        takes: Vec<Take>,
        name: String,
    ) -> Result<Arrow> {
        index.not_empty("there are no rows", &name)?;
        let held = held::read(&index, &schema, &takes, HELD_MAX)?;
        let row_bytes: Vec<Option<usize>> = schema.iter().map(row_bytes).collect();
        let longest = row_bytes.iter().flatten().copied().max().unwrap_or(0);
        if longest > ROW_MAX {
            return Err(config(format!(
                "a row of {longest} bytes, at most {ROW_MAX} are read"
            )));
        }
        let zeros = vec![0; if self.null_zero { longest } else { 0 }];
        // Eight in a byte.
        let has_bits = takes.iter().any(|take| take.leaf == Leaf::Bits);
        let opened_bytes_max = match has_bits {
            true => index.sizes().sample_bytes_max.saturating_mul(8),
            false => 0,
        };
        let mut arrow = Arrow {
            index,
            schema,
            takes,
            held,
            row_bytes,
            zeros,
            null_zero: self.null_zero,
            opened_bytes_max,
            largest: (0, 0),
            name,
        };
        arrow.largest = arrow.find_largest()?;
        Ok(arrow)
    }
}

/// Bytes of each row of a field, if its shape is fixed.
fn row_bytes(field: &EncodedField) -> Option<usize> {
    match &field.encoding {
        Encoding::Raw {
            shape: Shape::Fixed(_),
            ..
        } => field.as_raw().map(|own| own.row_bytes()),
        _ => None,
    }
}

impl Arrow {
    /// Number of bytes of a value; `None` for a row that cannot be a sample.
    fn value_bytes(&self, field: usize, entry: Entry) -> Option<u64> {
        match self.takes[field].leaf {
            _ if entry.crc >= mark::UNEVEN => None,
            Leaf::Bits => Some(mark::first_and_count(entry.crc).1 as u64),
            _ => Some(entry.len),
        }
    }

    /// The most bytes that are read for a sample, without the values in memory, and the sample.
    fn find_largest(&self) -> Result<(u64, u64)> {
        let mut largest = (0, 0);
        if self.held.iter().all(Option::is_some) {
            return Ok(largest);
        }
        let mut row = [None; FIELDS_MAX];
        for sample in 0..self.index.len() {
            self.index.row(sample, &mut row)?;
            let read = (0..self.held.len()).filter(|field| self.held[*field].is_none());
            let lens = read.filter_map(|field| Some(row[field]?.len));
            let bytes = lens.sum();
            if bytes > largest.0 {
                largest = (bytes, sample);
            }
        }
        Ok(largest)
    }

    fn fits(&self, field: usize, entry: Entry) -> bool {
        let bytes = self.value_bytes(field, entry);
        bytes.is_some_and(|bytes| self.row_bytes[field].is_none_or(|row| bytes == row as u64))
    }

    /// The part of a field whose row is null or cannot be a sample.
    #[cold]
    fn without(&self, sample: u64, field: usize, entry: Option<Entry>) -> Result<&[u8]> {
        let name = &self.schema[field].name;
        let (shard, row) = self.index.locate(sample);
        let why = match entry {
            None if self.null_zero => {
                return Ok(&self.zeros[..self.row_bytes[field].unwrap_or(0)]);
            }
            None => {
                let hint =
                    Setting::NullZero.hint(|setting| format!("; {setting} reads it as 0 or empty"));
                match self.schema[field].encoding {
                    Encoding::Image => {
                        format!("null, or a picture that is stored as a path only{hint}")
                    }
                    _ => format!("null{hint}"),
                }
            }
            Some(Entry {
                crc: mark::NULL_WITHIN,
                ..
            }) => "a null within the list".into(),
            Some(Entry {
                crc: mark::UNEVEN, ..
            }) => "lists within the list have other lengths".into(),
            Some(entry) => {
                let bytes = self.value_bytes(field, entry).unwrap_or(0);
                let needed = self.row_bytes[field].unwrap_or(0) as u64;
                let unit = match &self.schema[field].encoding {
                    Encoding::Raw { dtype, .. } => dtype.size() as u64,
                    _ => 1,
                };
                format!("{} values, {} are needed", bytes / unit, needed / unit)
            }
        };
        let message = format!("row {row}: column `{name}`: {why}");
        Err(Error::new(ErrorKind::Shape, Stage::Read, message)
            .with_path(self.sources().path(SourceId::at(shard))))
    }
}

impl Dataset for Arrow {
    own!(schema framed);

    fn len(&self) -> u64 {
        self.index.len()
    }

    fn sources(&self) -> &Arc<Sources> {
        self.index.sources()
    }

    fn sizes(&self) -> Sizes {
        let sizes = self.index.sizes();
        let held = self.held.iter().flatten().map(Held::heap).sum::<usize>();
        Sizes {
            sample_bytes_max: self.largest.0,
            largest_sample: (self.largest.0 > 0).then_some(self.largest.1),
            opened_bytes_max: self.opened_bytes_max,
            index_bytes: sizes.index_bytes + held,
            ..sizes
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let mut row = [None; FIELDS_MAX];
        let mut source = None;
        for (field, held) in self.held.iter().enumerate() {
            if let Some(bytes) = held.as_ref().and_then(|held| held.row(sample)) {
                parts.inline(field, bytes);
                continue;
            }
            let source = match source {
                Some(source) => source,
                None => *source.insert(self.index.row(sample, &mut row)?),
            };
            let fitting = row[field].filter(|entry| self.fits(field, *entry));
            let Some(Entry { offset, len, .. }) = fitting else {
                parts.inline(field, self.without(sample, field, row[field])?);
                continue;
            };
            let extent = Extent {
                source,
                offset,
                len,
            };
            match self.takes[field].leaf {
                Leaf::Bits => parts.framed(field, extent),
                _ => parts.extent(field, extent),
            }
        }
        Ok(())
    }

    fn identity(&self) -> u64 {
        let digest = Digest::new("arrow")
            .word(self.index.places())
            .word(u64::from(self.null_zero));
        digest.end()
    }

    fn describe(&self) -> String {
        let mut text = format!("{} rows of {}", self.len(), self.name);
        if !self.damage().is_empty() {
            text += &format!("; {}", feedline_core::dataset::damage::cost(self.damage()));
        }
        text + &self.index.made()
    }
}

impl Framed for Arrow {
    /// Only booleans are framed.
    fn open<'a>(
        &self,
        sample: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let entry = self.index.entry(sample, field)?;
        let (_, entry) = entry.ok_or_else(|| Error::decode("a null is opened"))?;
        held::unpack(bytes, entry.crc, |_, bit| buffer.push(bit))?;
        Ok(buffer)
    }

    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        let entry = self.index.entry(sample, field)?.map(|(_, entry)| entry);
        Ok(Some(match entry {
            None => self.row_bytes[field].unwrap_or(0) as u64,
            Some(entry) => self.value_bytes(field, entry).unwrap_or(0),
        }))
    }

    fn member(&self, sample: u64, _field: Option<usize>) -> Option<String> {
        Some(format!("row {}", self.index.locate(sample).1))
    }
}
