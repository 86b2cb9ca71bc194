//! TFRecord: files of records, each with the CRC32C of its length and of its bytes; features of
//! `tf.train.Example` as fields.
//!
//! ```text
//! record   | length: u64 | masked CRC32C of the length | payload | masked CRC32C of the payload |
//!            └────────────────────── one extent, read once for all fields ───────────────────────┘
//! ```
//!
//! Opening walks from length to length (each with its CRC) without reading payloads. The index
//! takes 12 bytes per record (20 in files over 4 GiB) and is saved beside the file. Limits: no
//! compression; a record fits in memory. Invariants: the records add up to the file's length; a
//! record's bytes are handed out only if its length, the CRC of the length and the CRC of the
//! payload are right.
//!
//! The format cannot detect a file cut exactly between two records. An earlier index does not help,
//! since a file of another length is walked again; [`TfRecordBuilder::records`] does.

pub mod example;

use self::example::{Feature, ListKind, zeros};
use crate::{foreign, little_endian};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::{forward, own};
use feedline_core::dataset::index::{
    Entry, Index, Place, Rows, Scan, Settings, index_getters, index_setters,
};
use feedline_core::dataset::{Damage, DamageKind, Dataset, Digest, Framed, Parts, Sizes};
use feedline_core::storage::listing::expand;
use feedline_core::storage::{Extent, Listed};
use feedline_core::tensor::{DType, EncodedField, Encoding, Field, Shape, Spec};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes before a record's payload: the length, and the CRC of the length.
const HEAD: u64 = 12;
/// Bytes of a record without its payload: length, its CRC, and the payload's CRC.
const FRAME: u64 = 16;

/// Dataset of TFRecord files, in the order of the files.
///
/// Files must be uncompressed. Fields: `record` (the payload as stored), or the features named in
/// the builder.
///
/// ```no_run
/// # use feedline_core::tensor::{DType, Field}; use feedline_formats::TfRecord;
/// let images = TfRecord::builder()
///     .image("image/encoded")
///     .ints(Field::fixed("label", DType::I64, []), "image/class/label")
///     .floats(Field::up_to("boxes", DType::F32, 400), "image/object/bbox")
///     .open("train-{00000..01023}-of-01024")?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
///
/// Verified: the CRC of every length, when the index is made and when a record is read; the CRC of
/// a payload when it is read, unless [`TfRecordBuilder::checksums`] turns it off.
pub struct TfRecord {
    index: Index,
    schema: Vec<EncodedField>,
    features: Vec<Take>,
    context_only: bool,
    missing_zero: bool,
    checksums: bool,
    opened_bytes_max: u64,
    name: String,
}

/// Source of a field's bytes in a record.
#[derive(Clone, Debug)]
enum Take {
    Payload,
    /// The only value of a bytes list, as stored.
    Bytes(String),
    /// The values of a list. Includes the size of a row in bytes, and whether the list must fill
    /// the row.
    List {
        feature: String,
        kind: ListKind,
        row_bytes: usize,
        fixed: bool,
    },
}

/// Builder of [`TfRecord`]: describes the records' content. Made by [`TfRecord::builder`].
#[derive(Clone, Debug)]
pub struct TfRecordBuilder {
    record: EncodedField,
    fields: Vec<(EncodedField, String, ListKind)>,
    context_only: bool,
    missing_zero: bool,
    checksums: bool,
    records: Option<u64>,
    place: Place,
    skip_damage: bool,
}

impl TfRecord {
    index_getters!();

    /// Opens a file, a folder or a pattern (`train-{00000..00127}-of-00128`, `*.tfrecord`) with one
    /// field: `record`, the payload.
    ///
    /// Errors: as [`TfRecordBuilder::open`].
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(pattern)
    }

    /// Starts a builder.
    pub fn builder() -> TfRecordBuilder {
        TfRecordBuilder {
            record: EncodedField::bytes("record"),
            fields: Vec::new(),
            context_only: false,
            missing_zero: false,
            checksums: true,
            records: None,
            place: Place::Beside,
            skip_damage: false,
        }
    }
}

impl TfRecordBuilder {
    index_setters!(TfRecord);

    /// Declares the type of the payload, if it is not an `Example`: a picture, an array of fixed
    /// shape (little-endian) or bytes.
    #[must_use]
    pub fn record(mut self, field: EncodedField) -> Self {
        self.record = field;
        self
    }

    /// Adds the field `image`: the encoded picture in the bytes feature `feature`.
    #[must_use]
    pub fn image(self, feature: &str) -> Self {
        self.field(EncodedField::image("image"), feature)
    }

    /// Adds a field with the name of the feature: the only value of the bytes feature `feature`,
    /// for your own decoder.
    #[must_use]
    pub fn bytes(self, feature: &str) -> Self {
        self.field(EncodedField::bytes(feature), feature)
    }

    /// Adds an array field: the only value of the bytes feature `feature`, in memory layout
    /// (little-endian), with the dtype and shape of `field`.
    #[must_use]
    pub fn raw_bytes(self, field: Field, feature: &str) -> Self {
        self.field(EncodedField::raw(field), feature)
    }

    /// Adds `field`: the only value of the bytes feature `feature`.
    #[must_use]
    pub fn field(mut self, field: EncodedField, feature: &str) -> Self {
        self.fields
            .push((field, feature.to_string(), ListKind::Bytes));
        self
    }

    /// Adds `field`, of dtype `f32`: the values of the float list `feature`, as many as its shape
    /// needs.
    #[must_use]
    pub fn floats(mut self, field: Field, feature: &str) -> Self {
        self.fields.push((
            EncodedField::raw(field),
            feature.to_string(),
            ListKind::Floats,
        ));
        self
    }

    /// Adds `field`, of dtype `i64`: the values of the int64 list `feature`, as many as its shape
    /// needs.
    #[must_use]
    pub fn ints(mut self, field: Field, feature: &str) -> Self {
        self.fields.push((
            EncodedField::raw(field),
            feature.to_string(),
            ListKind::Ints,
        ));
        self
    }

    /// `true` skips the feature lists of a `tf.train.SequenceExample` and reads its context like
    /// the features of an example. By default a record with feature lists is an error that names
    /// them: they are not supported.
    #[must_use]
    pub fn context_only(mut self, context_only: bool) -> Self {
        self.context_only = context_only;
        self
    }

    /// `true` reads a missing or empty feature of numbers or bytes as zeros: as many as a fixed
    /// shape needs, otherwise none. Default: an error. Pictures, and arrays in bytes features, must
    /// be present.
    #[must_use]
    pub fn missing_zero(mut self, zero: bool) -> Self {
        self.missing_zero = zero;
        self
    }

    /// Whether each read verifies the payload's CRC. Default: `true`. The CRC of the length is
    /// always verified.
    #[must_use]
    pub fn checksums(mut self, verify: bool) -> Self {
        self.checksums = verify;
        self
    }

    /// Requires this total number of records. Otherwise a file cut between two records only looks
    /// shorter.
    #[must_use]
    pub fn records(mut self, count: u64) -> Self {
        self.records = Some(count);
        self
    }

    /// Opens a file, a folder (all its files) or a pattern.
    ///
    /// Errors: no such file; [`ErrorKind::Truncated`] for a file that ends within a record,
    /// [`ErrorKind::Decode`] for a wrong length or a compressed file, both with path and offset;
    /// [`ErrorKind::Shape`] if the number of records is not [`records`](Self::records);
    /// [`ErrorKind::Config`] for impossible fields.
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<TfRecord> {
        let pattern = pattern.as_ref();
        let Listed { files, name, .. } = expand(pattern, &[])?;
        let name = if files.len() == 1 {
            name
        } else {
            format!("{} files of {name}", files.len())
        };
        self.open_as(&files, name)
    }

    fn open_as(self, files: &[PathBuf], name: String) -> Result<TfRecord> {
        let index = Index::open_or_build(files, &self.settings(), walk)?;
        self.finish(index, name)
    }

    /// Opens records in memory: decode workers copy them, without I/O.
    ///
    /// Errors: as [`open`](Self::open).
    pub fn open_bytes(self, bytes: impl Into<Arc<[u8]>>) -> Result<TfRecord> {
        let index = Index::of_bytes(bytes.into(), &self.settings(), walk)?;
        self.finish(index, "<memory>".to_string())
    }

    fn settings(&self) -> Settings<'static> {
        let mut settings = Settings::new("tfrecord 1", 1);
        settings.place = self.place.clone();
        settings.skip_damage = self.skip_damage;
        settings
    }

    fn finish(self, index: Index, name: String) -> Result<TfRecord> {
        if let Some(records) = self.records.filter(|records| *records != index.len()) {
            let message = format!("{} records, {records} expected", index.len());
            return Err(Error::new(ErrorKind::Shape, Stage::Index, message).with_path(&name));
        }
        index.not_empty("there are no records", &name)?;
        let (schema, features) = self.fields()?;
        let opened_bytes_max = features
            .iter()
            .map(|take| {
                if let Take::List { row_bytes, .. } = take {
                    *row_bytes as u64
                } else {
                    0
                }
            })
            .max()
            .unwrap_or(0);
        let Self {
            context_only,
            missing_zero,
            checksums,
            ..
        } = self;
        Ok(TfRecord {
            index,
            schema,
            features,
            context_only,
            missing_zero,
            checksums,
            opened_bytes_max,
            name,
        })
    }

    fn fields(&self) -> Result<(Vec<EncodedField>, Vec<Take>)> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        little_endian("TFRecord")?;
        if self.fields.is_empty() {
            return Ok((vec![self.record.clone()], vec![Take::Payload]));
        }
        let mut features = Vec::with_capacity(self.fields.len());
        for (index, (field, feature, kind)) in self.fields.iter().enumerate() {
            if self.fields[..index]
                .iter()
                .any(|(other, ..)| other.name == field.name)
            {
                return bad(format!("two fields are called `{}`", field.name));
            }
            if self.fields[..index]
                .iter()
                .any(|(_, other, of)| other == feature && of != kind)
            {
                return bad(format!(
                    "feature {feature:?} is requested as two kinds of list, but has one kind: name \
                     it once"
                ));
            }
            features.push(match kind {
                ListKind::Bytes => Take::Bytes(feature.clone()),
                ListKind::Floats => list(field, feature, *kind, DType::F32)?,
                ListKind::Ints => list(field, feature, *kind, DType::I64)?,
            });
        }
        if features.len() > Spec::FIELDS_MAX {
            return bad(format!(
                "{} fields, at most {} are possible",
                features.len(),
                Spec::FIELDS_MAX
            ));
        }
        Ok((
            self.fields
                .iter()
                .map(|(field, ..)| field.clone())
                .collect(),
            features,
        ))
    }
}

/// Adds a list of numbers, whose dtype the format determines.
fn list(field: &EncodedField, feature: &str, kind: ListKind, holds: DType) -> Result<Take> {
    let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
    let Encoding::Raw { dtype, shape } = &field.encoding else {
        return bad(format!("field `{}` must be an array", field.name));
    };
    if *dtype != holds {
        return bad(format!(
            "field `{}` is {dtype}, the values of its feature are {holds}",
            field.name
        ));
    }
    let fixed = matches!(shape, Shape::Fixed(_));
    let row_bytes = field.as_raw().map_or(usize::MAX, |field| field.row_bytes());
    if row_bytes == 0 || row_bytes >= 1 << 47 {
        return bad(format!(
            "rows of field `{}` have a size that cannot be stored",
            field.name
        ));
    }
    Ok(Take::List {
        feature: feature.to_string(),
        kind,
        row_bytes,
        fixed,
    })
}

/// Walks from record to record and indexes each.
fn walk(input: &mut Scan<'_>, rows: &mut Rows) -> Result<()> {
    let len = input.len();
    let mut at = 0;
    while at < len {
        let left = len - at;
        match record_at(input, at, left) {
            Ok(bytes) => {
                rows.push(&[Some(Entry {
                    offset: at,
                    len: bytes,
                    crc: 0,
                })])?;
                at += bytes;
            }
            Err(RecordWalk::Damage(kind, message)) => {
                // Estimates the lost samples by the mean length so far; at least the damaged one is
                // lost.
                let samples = (left * rows.len() as u64)
                    .checked_div(at)
                    .unwrap_or(0)
                    .max(1);
                rows.damage(Damage::new(kind, at, left, samples, message));
                return Ok(());
            }
            Err(RecordWalk::Io(error)) => return Err(error),
        }
    }
    Ok(())
}

enum RecordWalk {
    Io(Error),
    Damage(DamageKind, String),
}

/// Length of the record at `at`, at most `left`.
fn record_at(input: &mut Scan<'_>, at: u64, left: u64) -> Result<u64, RecordWalk> {
    if left < FRAME {
        return Err(RecordWalk::Damage(
            DamageKind::Cut,
            format!("{left} bytes, a record has at least {FRAME}"),
        ));
    }
    let head = input.bytes(at, HEAD as usize).map_err(RecordWalk::Io)?;
    let first = [head[0], head[1], head[2]];
    match payload_len(head) {
        Ok(payload) if payload <= left - FRAME => Ok(payload + FRAME),
        Ok(payload) => {
            let message = format!("a record of {payload} bytes, {} are left", left - FRAME);
            Err(RecordWalk::Damage(DamageKind::Cut, message))
        }
        // A valid length may begin with these bytes, too, but then its CRC is right.
        Err(_) if at == 0 && compressed(first) => {
            let message =
                "the file is compressed (gzip or zlib); only uncompressed TFRecord files are read";
            Err(RecordWalk::Damage(
                DamageKind::Unsupported,
                message.to_string(),
            ))
        }
        Err(message) => Err(match foreign(head).filter(|_| at == 0) {
            Some(name) => RecordWalk::Damage(
                DamageKind::Unsupported,
                format!("not a TFRecord file but {name}"),
            ),
            None => RecordWalk::Damage(DamageKind::Header, message),
        }),
    }
}

/// Whether the bytes are the magic of gzip with deflate, or a zlib header.
fn compressed(first: [u8; 3]) -> bool {
    let zlib =
        first[0] & 0x8f == 0x08 && u16::from_be_bytes([first[0], first[1]]).is_multiple_of(31);
    first == [0x1f, 0x8b, 8] || zlib
}

/// Parses the payload's length from the first bytes of a record (at least 12).
fn payload_len(head: &[u8]) -> Result<u64, String> {
    let found = masked_crc(&head[..8]);
    let stored = u32_at(head, 8);
    if found != stored {
        return Err(format!(
            "the CRC of a record's length is {found:08x}, the file says {stored:08x}"
        ));
    }
    Ok(u64::from_le_bytes(head[..8].try_into().expect("8 bytes")))
}

/// CRC32C as TFRecord stores it: rotated and shifted, since a CRC over bytes that hold their own
/// CRC is weak.
pub(crate) fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
}

/// The payload: the bytes between a record's two checksums.
fn payload_of(record: &[u8]) -> Result<&[u8]> {
    let end = record.len().checked_sub((FRAME - HEAD) as usize);
    end.and_then(|end| record.get(HEAD as usize..end))
        .ok_or_else(|| {
            let message = format!("{} bytes, a record has at least {FRAME}", record.len());
            Error::new(ErrorKind::Truncated, Stage::Decode, message)
        })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

impl Dataset for TfRecord {
    own!(schema framed);
    forward!(self => self.index; len sources);

    fn sizes(&self) -> Sizes {
        Sizes {
            opened_bytes_max: self.opened_bytes_max,
            ..self.index.sizes()
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        if let Some((source, entry)) = self.index.entry(sample, 0)? {
            let extent = Extent {
                source,
                offset: entry.offset,
                len: entry.len,
            };
            (0..self.features.len()).for_each(|field| parts.framed(field, extent));
        }
        Ok(())
    }

    fn identity(&self) -> u64 {
        self.features
            .iter()
            .fold(Digest::new("tfrecord"), |digest, take| match take {
                Take::Payload => digest.word(0),
                Take::Bytes(feature) => digest.word(1).bytes(feature.as_bytes()),
                // The field's dtype determines the kind of list.
                Take::List { feature, .. } => digest.word(2).bytes(feature.as_bytes()),
            })
            .end()
    }

    fn describe(&self) -> String {
        format!(
            "{} records in {}{}",
            self.index.len(),
            self.name,
            self.index.made()
        )
    }
}

impl Framed for TfRecord {
    fn check(&self, _sample: u64, _field: usize, record: &[u8]) -> Result<()> {
        let wrong = |kind, message| Err(Error::new(kind, Stage::Decode, message));
        let payload = payload_of(record)?;
        match payload_len(record) {
            Ok(len) if len == payload.len() as u64 => {}
            Ok(len) => {
                let message = format!(
                    "the record's length is {len}, the index says {}",
                    payload.len()
                );
                return wrong(ErrorKind::Changed, message);
            }
            Err(message) => return wrong(ErrorKind::Decode, message),
        }
        let stored = u32_at(record, HEAD as usize + payload.len());
        match self.checksums.then(|| masked_crc(payload)) {
            Some(found) if found != stored => wrong(
                ErrorKind::Decode,
                format!("the CRC of the record is {found:08x}, the file says {stored:08x}"),
            ),
            _ => Ok(()),
        }
    }

    /// Known for whole records; the sizes of features are inside the records.
    fn field_bytes(&self, sample: u64, field: usize) -> Result<Option<u64>> {
        match self.features[field] {
            Take::Payload => Ok(self
                .index
                .entry(sample, 0)?
                .map(|(_, entry)| entry.len.saturating_sub(FRAME))),
            _ => Ok(None),
        }
    }

    fn open<'a>(
        &self,
        _sample: u64,
        field: usize,
        bytes: &'a [u8],
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        let payload = payload_of(bytes)?;
        let (feature, kind, row_bytes, fixed) = match &self.features[field] {
            Take::Payload => return Ok(payload),
            Take::Bytes(feature) if self.schema[field].encoding == Encoding::Bytes => {
                (feature, ListKind::Bytes, 0, false)
            }
            Take::Bytes(feature) => {
                let found = Feature::find(payload, feature, ListKind::Bytes, self.context_only)?;
                return found.one_bytes().map_err(|error| of(feature, error));
            }
            Take::List {
                feature,
                kind,
                row_bytes,
                fixed,
            } => (feature, *kind, *row_bytes, *fixed),
        };
        if self.missing_zero && Feature::is_empty(payload, feature, self.context_only)? {
            buffer.resize(if fixed { row_bytes } else { 0 }, 0);
            return Ok(buffer);
        }
        let list = Feature::find(payload, feature, kind, self.context_only)?;
        let (values, size) = match kind {
            ListKind::Ints => (list.ints(row_bytes, buffer), 8),
            ListKind::Floats => (list.floats(row_bytes, buffer), 4),
            ListKind::Bytes => (list.one_bytes(), 1),
        };
        let values = values.map_err(|error| of(feature, error))?;
        if fixed && values.len() != row_bytes {
            let message = format!(
                "{} values, {} expected",
                values.len() / size,
                row_bytes / size
            );
            let advice = if values.is_empty() {
                zeros(kind)
            } else {
                format!("; {} accepts any number", Setting::AnyCount)
            };
            return Err(of(
                feature,
                Error::new(ErrorKind::Shape, Stage::Decode, message + &advice),
            ));
        }
        Ok(values)
    }
}

/// Adds the feature's name to an error.
#[cold]
fn of(feature: &str, error: Error) -> Error {
    error.within(format_args!("feature {feature:?}"))
}
