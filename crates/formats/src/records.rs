//! Records: one or many files of fixed-size records, with optional labels.

use crate::{POINTER, fetched};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::forward::{forward, own};
use feedline_core::dataset::starts::Starts;
use feedline_core::dataset::{Dataset, Digest, Parts, Sizes};
use feedline_core::storage::listing::{expand, regular};
use feedline_core::storage::{Blob, Extent, Listed, SourceId, Sources};
use feedline_core::tensor::{DType, EncodedField, Field};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Dataset of fixed-size records in one or more files, in the order of the files.
///
/// Fields: `record` (or the given name, dtype and shape), and `label` if labels are given. Record
/// *k* of a file starts at `header + k × record_bytes`.
///
/// ```no_run
/// # use feedline_core::tensor::DType; use feedline_formats::Records;
/// let images = Records::builder(150_528)
///     .field("image", DType::U8, [3, 224, 224])
///     .labels("train.labels", DType::I64)
///     .open("train.bin")?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Records {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    starts: Starts,
    record_bytes: u64,
    header_bytes: u64,
    labels: Option<LabelBytes>,
    name: String,
}

struct LabelBytes {
    bytes: Arc<[u8]>,
    size: usize,
}

/// Source of labels.
#[derive(Clone, Debug)]
pub enum Labels {
    /// A file with exactly one number per record, in native byte order. It is kept in memory.
    File(PathBuf, DType),
    /// One class per record.
    Classes(Vec<i64>),
}

/// Builder of [`Records`]: sets the layout of records. Made by [`Records::builder`].
#[derive(Clone, Debug)]
pub struct RecordsBuilder {
    record_bytes: u64,
    header_bytes: u64,
    field: Field,
    labels: Option<Labels>,
}

impl Records {
    /// Starts a builder for records of `record_bytes` bytes: a `u8` vector unless
    /// [`RecordsBuilder::field`] is set.
    pub fn builder(record_bytes: usize) -> RecordsBuilder {
        RecordsBuilder {
            record_bytes: record_bytes as u64,
            header_bytes: 0,
            field: Field::fixed("record", DType::U8, [record_bytes]),
            labels: None,
        }
    }
}

impl RecordsBuilder {
    /// Sets the field's name, dtype and shape, which must have `record_bytes` bytes in all.
    #[must_use]
    pub fn field(mut self, name: &str, dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        self.field = Field::fixed(name, dtype, shape);
        self
    }

    /// Skips a header of `bytes` bytes at the start of every file.
    #[must_use]
    pub fn header(mut self, bytes: u64) -> Self {
        self.header_bytes = bytes;
        self
    }

    /// Adds the field `label` (a scalar) from a file with one `dtype` number per record, in native
    /// byte order. The file is read into memory.
    #[must_use]
    pub fn labels(mut self, path: impl Into<PathBuf>, dtype: DType) -> Self {
        self.labels = Some(Labels::File(path.into(), dtype));
        self
    }

    /// Adds the field `label` (a scalar `i64`) from memory.
    #[must_use]
    pub fn classes(mut self, classes: Vec<i64>) -> Self {
        self.labels = Some(Labels::Classes(classes));
        self
    }

    /// Opens one file, all regular files of a folder in the order of their names (hidden files left
    /// out), or those of a pattern such as `train-{0000..0127}.bin` or `*.bin`.
    ///
    /// Errors: not found; not a regular file; empty; a length that is not a whole number of records
    /// ([`ErrorKind::Truncated`], with the extra bytes); a wrong number of labels
    /// ([`ErrorKind::Shape`]); a field that does not have `record_bytes` bytes
    /// ([`ErrorKind::Config`]).
    pub fn open(self, path: impl AsRef<Path>) -> Result<Records> {
        let Listed { files, name, .. } = expand(path, &[])?;
        let mut records = self.open_files(&files)?;
        records.name = name;
        Ok(records)
    }

    /// Opens these files, in this order.
    ///
    /// Errors: as [`Self::open`].
    pub fn open_files(self, paths: &[impl AsRef<Path>]) -> Result<Records> {
        self.check()?;
        let mut sources = Sources::new();
        let mut counts = Vec::with_capacity(paths.len());
        for path in paths {
            let path = path.as_ref();
            let meta = regular(path)?;
            // Larger files are not opened here.
            if POINTER.contains(&meta.len) {
                fetched(&Blob::open(path)?)?;
            }
            counts.push(
                self.records_in(meta.len)
                    .map_err(|error| error.with_path(path))?,
            );
            sources.add(path, &meta)?;
        }
        let name = paths
            .first()
            .map_or(String::new(), |path| path.as_ref().display().to_string());
        self.finish(sources, counts, name)
    }

    /// Opens records in memory, without I/O.
    ///
    /// Errors: as [`Self::open`], for the length of `bytes`.
    pub fn open_bytes(self, bytes: impl Into<Arc<[u8]>>) -> Result<Records> {
        self.check()?;
        let bytes = bytes.into();
        let count = self.records_in(bytes.len() as u64)?;
        let mut sources = Sources::new();
        sources.memory(bytes);
        self.finish(sources, vec![count], "<memory>".into())
    }

    fn check(&self) -> Result<()> {
        let bytes = self.field.row_bytes() as u64;
        if self.record_bytes == 0 || bytes != self.record_bytes {
            let message = format!(
                "a record of {} bytes cannot be the field `{}` of {bytes} bytes",
                self.record_bytes,
                self.field.name()
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        Ok(())
    }

    fn records_in(&self, len: u64) -> Result<u64> {
        let body = len.checked_sub(self.header_bytes).ok_or_else(|| {
            let message = format!(
                "{len} bytes are less than the header of {}",
                self.header_bytes
            );
            Error::new(ErrorKind::Truncated, Stage::Index, message)
        })?;
        let over = body % self.record_bytes;
        if over != 0 {
            let message = format!(
                "{body} bytes are not a whole number of {}-byte records: {over} left over",
                self.record_bytes
            );
            return Err(Error::new(ErrorKind::Truncated, Stage::Index, message)
                .with_range(len - over, over));
        }
        Ok(body / self.record_bytes)
    }

    fn finish(self, sources: Sources, counts: Vec<u64>, name: String) -> Result<Records> {
        let starts = Starts::of(counts)?;
        let len = starts.len();
        if len == 0 {
            return Err(
                Error::new(ErrorKind::Empty, Stage::Index, "there are no records").with_path(name),
            );
        }
        let mut schema = vec![EncodedField::raw(self.field)];
        let labels = self.labels.map(|labels| labels.load(len)).transpose()?;
        let labels = labels.map(|(bytes, dtype)| {
            schema.push(EncodedField::raw(Field::fixed("label", dtype, [])));
            LabelBytes {
                bytes,
                size: dtype.size(),
            }
        });
        let record_bytes = self.record_bytes;
        let header_bytes = self.header_bytes;
        Ok(Records {
            sources: Arc::new(sources),
            schema,
            starts,
            record_bytes,
            header_bytes,
            labels,
            name,
        })
    }
}

impl Labels {
    fn load(self, records: u64) -> Result<(Arc<[u8]>, DType)> {
        let wrong = |labels: u64, path: Option<&Path>| {
            let message = format!("{labels} labels for {records} records");
            let error = Error::new(ErrorKind::Shape, Stage::Index, message);
            Err(match path {
                Some(path) => error.with_path(path),
                None => error,
            })
        };
        match self {
            Self::Classes(classes) if classes.len() as u64 != records => {
                wrong(classes.len() as u64, None)
            }
            Self::Classes(classes) => Ok((bytemuck::cast_slice(&classes).into(), DType::I64)),
            Self::File(path, dtype) => {
                // Check the length first: a wrong file must not be read into memory.
                let input = Blob::open(&path)?;
                let len = input.len();
                if Some(len) != records.checked_mul(dtype.size() as u64) {
                    return wrong(len / dtype.size() as u64, Some(&path));
                }
                Ok((input.read(0, len, "the labels")?.into(), dtype))
            }
        }
    }
}

impl Dataset for Records {
    own!(schema sources);
    forward!(self => self.starts; len);

    fn sizes(&self) -> Sizes {
        let labels = self.labels.as_ref().map_or(0, |labels| labels.bytes.len());
        Sizes {
            index_bytes: self.starts.heap() + labels,
            ..Sizes::new(self.record_bytes)
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let (file, record) = self.starts.locate(sample);
        let offset = self.header_bytes + record * self.record_bytes;
        parts.extent(
            0,
            Extent {
                source: SourceId::at(file),
                offset,
                len: self.record_bytes,
            },
        );
        if let Some(labels) = &self.labels {
            let start = sample as usize * labels.size;
            parts.inline(1, &labels.bytes[start..start + labels.size]);
        }
        Ok(())
    }

    fn identity(&self) -> u64 {
        let labels = self.labels.as_ref().map_or(&[][..], |labels| &labels.bytes);
        Digest::new("records")
            .word(self.header_bytes)
            .bytes(labels)
            .end()
    }

    fn describe(&self) -> String {
        format!(
            "{} records of {} bytes in {}",
            self.len(),
            self.record_bytes,
            self.name
        )
    }
}
