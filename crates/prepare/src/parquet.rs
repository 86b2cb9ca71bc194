//! Parquet shards: columns `image` (binary) and, with classes, `label` (int64), neither null.
//!
//! Pages are uncompressed and plain: a JPEG does not get smaller, and a reader can then deliver its
//! bytes in place. A reader takes a row group at a time, so row groups are small.

use super::output;
use arrow_array::{ArrayRef, BinaryArray, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::storage::publish::Pending;
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use std::path::PathBuf;
use std::sync::Arc;

/// A row group ends with this many rows or bytes, whichever comes first.
const ROWS_MAX: usize = 512;
const BYTES_MAX: usize = 64 << 20;
/// A page ends with the row that reaches this size.
const PAGE_BYTES: usize = 1 << 20;

pub(super) struct Writer {
    writer: ArrowWriter<Pending>,
    schema: Arc<Schema>,
    target: PathBuf,
    images: Vec<Vec<u8>>,
    labels: Vec<i64>,
    bytes: usize,
}

impl Writer {
    /// Begins the file.
    pub(super) fn new(file: Pending, labelled: bool) -> Result<Self> {
        let target = file.target.clone();
        let mut fields = vec![Field::new("image", DataType::Binary, false)];
        if labelled {
            fields.push(Field::new("label", DataType::Int64, false));
        }
        let schema = Arc::new(Schema::new(fields));
        let properties = WriterProperties::builder()
            .set_compression(Compression::UNCOMPRESSED)
            .set_dictionary_enabled(false)
            // Minimum and maximum of JPEG bytes are useless as statistics. The offset index is
            // written anyway.
            .set_statistics_enabled(EnabledStatistics::None)
            .set_data_page_size_limit(PAGE_BYTES)
            // The writer checks the page limit after this many rows, and a few pictures fill a
            // page.
            .set_write_batch_size(1)
            .build();
        let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties));
        let writer = writer.map_err(|error| failed(error, &target))?;
        Ok(Self {
            writer,
            schema,
            target,
            images: Vec::new(),
            labels: Vec::new(),
            bytes: 0,
        })
    }

    pub(super) fn append(&mut self, image: Vec<u8>, label: i64) -> Result<()> {
        if !self.images.is_empty() && self.bytes.saturating_add(image.len()) > BYTES_MAX {
            self.flush()?;
        }
        self.bytes += image.len();
        self.images.push(image);
        self.labels.push(label);
        if self.images.len() == ROWS_MAX {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Writes the waiting rows as a row group.
    fn flush(&mut self) -> Result<()> {
        if self.images.is_empty() {
            return Ok(());
        }
        // The array counts bytes in 31 bits.
        if self.bytes > i32::MAX as usize {
            let message = format!(
                "a picture of {} bytes does not fit a Parquet column",
                self.bytes
            );
            return Err(Error::new(ErrorKind::Limit, Stage::Write, message).with_path(&self.target));
        }
        let images = BinaryArray::from_iter_values(self.images.drain(..));
        let mut columns: Vec<ArrayRef> = vec![Arc::new(images)];
        let labels = std::mem::take(&mut self.labels);
        if self.schema.fields().len() > 1 {
            columns.push(Arc::new(Int64Array::from(labels)));
        }
        self.bytes = 0;
        let batch = RecordBatch::try_new(self.schema.clone(), columns).map_err(ParquetError::from);
        let written = batch
            .and_then(|batch| self.writer.write(&batch))
            .and_then(|()| self.writer.flush());
        written.map_err(|error| failed(error, &self.target))
    }

    /// Writes the remaining rows and the footer. The returned file does not have its name yet.
    pub(super) fn finish(mut self) -> Result<Pending> {
        self.flush()?;
        self.writer
            .into_inner()
            .map_err(|error| failed(error, &self.target))
    }
}

/// Uses the operating system's error, if there is one, so that the message names a full disk.
fn failed(error: ParquetError, target: &std::path::Path) -> Error {
    let source = match error {
        ParquetError::External(source) => match source.downcast() {
            Ok(source) => return output::failed(*source, target),
            Err(source) => source,
        },
        error => error.into(),
    };
    Error::new(ErrorKind::Io, Stage::Write, "cannot write the output")
        .with_source(source)
        .with_path(target)
}
