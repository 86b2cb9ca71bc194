//! Tables of labels, captions or small arrays, read whole into memory, to be joined to samples by a
//! key.
//!
//! ```text
//! labels.csv  file_name,label,caption ──read──► keys  b.jpg a.jpg …
//!             b.jpg,4,"a, b"                    label      4     7  …   i64, one after the other
//!             a.jpg,7,c                         caption  a, b    c  …   bytes
//! ```
//!
//! From csv and tsv files with a header, or from any dataset with a key field ([`Table::of`]), such
//! as Parquet. Csv is read as RFC 4180 says: quoted cells may hold commas, line ends and doubled
//! quotes; lines end with LF or CRLF; a UTF-8 mark at the start is skipped.
//!
//! Types of a csv's columns, each found from all its cells: whole numbers of 64 bits become `i64`;
//! other numbers `f64`; all else, whole numbers beyond 64 bits among it, stays text. An empty cell
//! is an empty text; in a column of numbers it is an error that names line and column.
//!
//! Limits: 2^32 - 2 rows; the file and its values must fit the free memory. Refused: rows of
//! another number of cells than the header, an odd number of quotes, a column named twice, UTF-16,
//! compressed files. Invariant: a table has a key for each row; whether keys are unique is the
//! join's business.

use crate::{foreign, twice};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::forward::own;
use feedline_core::dataset::sample::Plain;
use feedline_core::dataset::starts::Starts;
use feedline_core::dataset::{Dataset, Digest, Framed, Parts, Sizes, Strings, no_field};
use feedline_core::memory::available;
use feedline_core::storage::listing::expand;
use feedline_core::storage::{Blob, Listed, Sources};
use feedline_core::tensor::{DType, EncodedField, Encoding, Field};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A table in memory: a key and some fields for each row.
///
/// ```
/// # use feedline_core::dataset::Dataset; use feedline_formats::Table;
/// let csv = "file_name,label\nb.jpg,4\n\"a, b.jpg\",7\n";
/// let table = Table::builder("file_name").read_bytes(csv)?;
/// assert_eq!((table.len(), table.schema()[0].name.as_str()), (2, "label"));
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Table {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    columns: Vec<Column>,
    keys: Strings,
    origin: Origin,
    identity: u64,
    name: String,
}

/// Values of a field, row after row.
enum Column {
    Fixed { bytes: Vec<u8>, width: usize },
    Varying(Strings),
}

/// What a row was, for messages.
enum Origin {
    /// A row of a dataset.
    Row,
    /// A line of one of these files, which start at these rows. Without `lines`, each row is a line.
    Lines {
        files: Vec<PathBuf>,
        starts: Starts,
        lines: Option<Vec<u32>>,
    },
}

/// Builder of a [`Table`] from csv. Made by [`Table::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct TableBuilder {
    key: String,
    columns: Option<Vec<String>>,
    separator: Option<u8>,
}

impl Table {
    /// Starts a builder; `key` is the column of the keys.
    pub fn builder(key: &str) -> TableBuilder {
        TableBuilder {
            key: key.into(),
            columns: None,
            separator: None,
        }
    }

    /// Reads a csv with all its columns; see [`TableBuilder::read`].
    pub fn read(pattern: impl AsRef<Path>, key: &str) -> Result<Self> {
        Self::builder(key).read(pattern)
    }

    /// Reads all samples of a dataset: Parquet, for example. The field `key` has the keys, as text
    /// or whole numbers; the other fields stay as they are.
    ///
    /// Errors: reading errors; [`ErrorKind::Config`] for a missing key field or one of another type,
    /// and for a part of a dataset in chunks; [`ErrorKind::Empty`]; [`ErrorKind::Budget`] for more
    /// bytes than the free memory.
    pub fn of(dataset: &dyn Dataset, key: &str) -> Result<Self> {
        let schema = dataset.schema();
        let number = schema.iter().position(|field| field.name == key);
        let Some(number) = number else {
            return Err(refused(no_field(schema, key)));
        };
        let mut rows = ReadRows {
            key: number,
            kind: KeyKind::of(&schema[number])?,
            keys: Strings::new(),
            columns: schema.iter().map(Column::of).collect(),
        };
        let stored = dataset.sources().ids();
        fits(stored.map(|id| dataset.sources().len_of(id)).sum())?;
        let mut plain = Plain::new(dataset);
        match dataset.chunked() {
            Some(chunks) if chunks.is_whole() => {
                for chunk in 0..chunks.starts().len() - 1 {
                    let opened = plain.chunk(chunk)?;
                    for row in 0..opened.rows() {
                        for field in 0..schema.len() {
                            rows.take(field, opened.row(field, row).unwrap_or_default())?;
                        }
                    }
                }
            }
            Some(_) => {
                let message = "a part of a dataset in chunks is no table: take the whole dataset";
                return Err(refused(message));
            }
            None => {
                for sample in 0..dataset.len() {
                    plain.sample(sample, |field, bytes| rows.take(field, bytes))?;
                }
            }
        }
        let mut schema = schema.to_vec();
        schema.remove(number);
        rows.columns.remove(number);
        Self::finish(
            schema,
            rows.columns,
            rows.keys,
            Origin::Row,
            dataset.describe(),
        )
    }

    fn finish(
        schema: Vec<EncodedField>,
        mut columns: Vec<Column>,
        mut keys: Strings,
        origin: Origin,
        name: String,
    ) -> Result<Self> {
        if keys.is_empty() {
            let error = Error::new(ErrorKind::Empty, Stage::Index, "a table without rows");
            return Err(error.with_path(name));
        }
        if keys.len() >= u32::MAX as usize {
            let message = format!("{} rows; a table has at most 2^32 - 2", keys.len());
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message).with_path(name));
        }
        keys.shrink();
        columns.iter_mut().for_each(Column::shrink);
        let identity = columns
            .iter()
            .fold(sum(Digest::new("table"), &keys), |digest, column| {
                column.digest(digest)
            })
            .end();
        Ok(Self {
            sources: Arc::new(Sources::new()),
            schema,
            columns,
            keys,
            origin,
            identity,
            name,
        })
    }
}

impl TableBuilder {
    /// Takes only these columns, in this order. Default: all except the key.
    pub fn columns<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Self {
        self.columns = Some(names.into_iter().map(String::from).collect());
        self
    }

    /// Sets the byte between cells. Default: a tab in files whose names end in `.tsv`; else a comma,
    /// or a semicolon if the first line has semicolons and no comma.
    pub fn separator(mut self, byte: u8) -> Self {
        self.separator = Some(byte);
        self
    }

    /// Reads the files of `pattern`: one file, a folder (its `.csv` and `.tsv` files) or a pattern
    /// with `*`, `{a,b}`, `{000..127}`. All have the same header, with the columns' names.
    ///
    /// Errors: file system errors; [`ErrorKind::Config`] for a column that is missing or named
    /// twice, and for headers that differ; [`ErrorKind::Decode`] with the line, for an empty key, an
    /// empty cell among numbers, or a row with too many or too few cells; [`ErrorKind::Empty`] for
    /// no row; [`ErrorKind::Budget`] for more bytes than the free memory.
    pub fn read(self, pattern: impl AsRef<Path>) -> Result<Table> {
        let Listed { files, name, .. } = expand(pattern, &[".csv", ".tsv"])?;
        let mut cells = Cells::default();
        for file in &files {
            let blob = Blob::open(file)?;
            fits(blob.len())?;
            let bytes = blob.read(0, blob.len(), "the table")?;
            let ending = file.extension();
            let is_tsv = ending.is_some_and(|ending| ending.eq_ignore_ascii_case("tsv"));
            self.parse(&bytes, is_tsv, &mut cells)
                .map_err(|error| error.with_path(file))?;
        }
        cells.finish(files, name)
    }

    /// Like [`read`](Self::read), from bytes in memory.
    pub fn read_bytes(self, bytes: impl AsRef<[u8]>) -> Result<Table> {
        let mut cells = Cells::default();
        self.parse(bytes.as_ref(), false, &mut cells)?;
        cells.finish(vec!["<memory>".into()], "<memory>".into())
    }

    /// Adds the rows of one file to `cells`.
    fn parse(&self, bytes: &[u8], is_tsv: bool, cells: &mut Cells) -> Result<()> {
        let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or(bytes);
        let separator = match self.separator {
            Some(separator) => separator,
            None if is_tsv => b'\t',
            None if first.contains(&b';') && !first.contains(&b',') => b';',
            None => b',',
        };
        if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
            return Err(damaged("a table in UTF-16: save it as UTF-8"));
        }
        if let Some(what) = foreign(&bytes[..bytes.len().min(262)]) {
            return Err(damaged(format!("not a table of text: {what}")));
        }
        if memchr::memchr_iter(b'"', bytes).count() % 2 == 1 {
            let message = "an odd number of quotes (\"): one is not closed, or stands in a cell \
                           that is not quoted";
            return Err(damaged(message));
        }
        let mut reader = csv::ReaderBuilder::new()
            .delimiter(separator)
            .from_reader(bytes);
        let header = reader.byte_headers().map_err(|error| cut(&error, bytes))?;
        let header: Vec<String> = header
            .iter()
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .collect();
        cells.choose(self, header)?;
        cells.files.push(cells.keys.len() as u64);
        let mut record = csv::ByteRecord::new();
        while reader
            .read_byte_record(&mut record)
            .map_err(|error| cut(&error, bytes))?
        {
            cells.take(&record, line_of(record.position(), bytes))?;
        }
        Ok(())
    }
}

/// The cells of all files as texts, while they are read.
#[derive(Default)]
struct Cells {
    header: Vec<String>,
    /// Index of the key's column, and those of the chosen ones, in the header.
    key: usize,
    chosen: Vec<usize>,
    keys: Strings,
    texts: Vec<Strings>,
    /// Line of each row in its file.
    lines: Vec<u32>,
    /// First row of each file.
    files: Vec<u64>,
}

impl Cells {
    /// Finds the columns in the header of a file, which is that of all files.
    fn choose(&mut self, builder: &TableBuilder, header: Vec<String>) -> Result<()> {
        if !self.files.is_empty() {
            return match self.header == header {
                true => Ok(()),
                false => Err(refused(format!(
                    "the header is {}, in the first file {}",
                    header.join(", "),
                    self.header.join(", ")
                ))),
            };
        }
        if header.is_empty() {
            let message = "an empty file: a table begins with a header, the names of its columns";
            return Err(Error::new(ErrorKind::Empty, Stage::Index, message));
        }
        if let Some(name) = twice(header.iter().map(String::as_str)) {
            return Err(refused(format!("the header names column {name:?} twice")));
        }
        self.key = place_of(&builder.key, &header).map_err(|error| {
            let way = Setting::JoinKey.hint(|key| format!("; name the column of keys by {key}"));
            refused(format!("{}{way}", error.message()))
        })?;
        self.chosen = match &builder.columns {
            None => (0..header.len()).filter(|at| *at != self.key).collect(),
            Some(names) => names
                .iter()
                .map(|name| place_of(name, &header))
                .collect::<Result<_>>()?,
        };
        self.texts = vec![Strings::new(); self.chosen.len()];
        self.header = header;
        Ok(())
    }

    fn take(&mut self, record: &csv::ByteRecord, line: u64) -> Result<()> {
        let key = record.get(self.key).unwrap_or_default();
        if key.is_empty() {
            let name = &self.header[self.key];
            return Err(damaged(format!("line {line}: the key, {name:?}, is empty")));
        }
        self.keys.push(key);
        self.lines.push(u32::try_from(line).unwrap_or(u32::MAX));
        for (texts, at) in self.texts.iter_mut().zip(&self.chosen) {
            texts.push(record.get(*at).unwrap_or_default());
        }
        Ok(())
    }

    fn finish(self, files: Vec<PathBuf>, name: String) -> Result<Table> {
        let ends = self.files.iter().skip(1).copied();
        let ends = ends.chain([self.keys.len() as u64]);
        let starts = Starts::of(ends.zip(&self.files).map(|(end, start)| end - start))?;
        let mut fields = Vec::new();
        let mut columns = Vec::new();
        for (texts, at) in self.texts.into_iter().zip(&self.chosen) {
            let name = &self.header[*at];
            let kind = texts.iter().filter_map(CellKind::of).max();
            let kind = kind.unwrap_or(CellKind::Text);
            columns.push(Column::of_texts(texts, kind).map_err(|row| {
                let (file, _) = starts.locate(row as u64);
                let message = format!(
                    "line {}: column {name:?} has numbers, and this cell is empty: fill it, or \
                     leave the column out",
                    self.lines[row]
                );
                damaged(message).with_path(&files[file])
            })?);
            fields.push(match kind {
                CellKind::Whole => EncodedField::raw(Field::fixed(name, DType::I64, [])),
                CellKind::Number => EncodedField::raw(Field::fixed(name, DType::F64, [])),
                CellKind::Text => EncodedField::bytes(name),
            });
        }
        let is_regular = (0..).zip(&self.lines).all(|(row, line)| {
            let (_, local) = starts.locate(row);
            u64::from(*line) == local + 2
        });
        let origin = Origin::Lines {
            files,
            starts,
            lines: (!is_regular).then_some(self.lines),
        };
        Table::finish(fields, columns, self.keys, origin, name)
    }
}

/// What a cell can be read as; a column is what all of its cells are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CellKind {
    Whole,
    Number,
    Text,
}

impl CellKind {
    /// `None` for an empty cell, which is of any kind.
    fn of(cell: &[u8]) -> Option<Self> {
        let cell = cell.trim_ascii();
        let digits = cell.strip_prefix(b"-").unwrap_or(cell);
        Some(match cell {
            [] => return None,
            _ if parsed::<i64>(cell).is_some() => Self::Whole,
            // Beyond 64 bits: a float would lose digits of what may be an id.
            _ if digits.iter().all(u8::is_ascii_digit) => Self::Text,
            _ if float(cell).is_some() => Self::Number,
            _ => Self::Text,
        })
    }
}

fn parsed<T: std::str::FromStr>(cell: &[u8]) -> Option<T> {
    std::str::from_utf8(cell).ok()?.trim_ascii().parse().ok()
}

/// A number that `f64` can hold; digits beyond it parse as infinite.
fn float(cell: &[u8]) -> Option<f64> {
    let float: f64 = parsed(cell)?;
    let has_digits = cell.iter().any(u8::is_ascii_digit);
    (float.is_finite() || !has_digits).then_some(float)
}

impl Column {
    /// An empty column for a field of a dataset.
    fn of(field: &EncodedField) -> Self {
        match field.as_raw() {
            Some(raw) if !raw.is_up_to() => Self::Fixed {
                bytes: Vec::new(),
                width: raw.row_bytes(),
            },
            _ => Self::Varying(Strings::new()),
        }
    }

    /// A column of cells that are all of this kind or empty. `Err` is the row of an empty cell among
    /// numbers.
    fn of_texts(texts: Strings, kind: CellKind) -> std::result::Result<Self, usize> {
        let mut bytes = Vec::new();
        let width = match kind {
            CellKind::Whole => size_of::<i64>(),
            CellKind::Number => size_of::<f64>(),
            CellKind::Text => return Ok(Self::Varying(texts)),
        };
        bytes.reserve_exact(texts.len() * width);
        for (row, cell) in texts.iter().enumerate() {
            match kind {
                CellKind::Whole => {
                    let value: i64 = parsed(cell).ok_or(row)?;
                    bytes.extend_from_slice(&value.to_ne_bytes());
                }
                _ => bytes.extend_from_slice(&float(cell).ok_or(row)?.to_ne_bytes()),
            }
        }
        Ok(Self::Fixed { bytes, width })
    }

    fn push(&mut self, value: &[u8]) -> Result<()> {
        match self {
            Self::Fixed { bytes, width } if value.len() == *width => bytes.extend_from_slice(value),
            Self::Fixed { width, .. } => {
                let message = format!("a value of {} bytes, {width} expected", value.len());
                return Err(Error::new(ErrorKind::Shape, Stage::Index, message));
            }
            Self::Varying(strings) => strings.push(value),
        }
        Ok(())
    }

    fn get(&self, row: usize) -> &[u8] {
        match self {
            Self::Fixed { bytes, width } => &bytes[row * width..][..*width],
            Self::Varying(strings) => strings.get(row),
        }
    }

    fn shrink(&mut self) {
        match self {
            Self::Fixed { bytes, .. } => bytes.shrink_to_fit(),
            Self::Varying(strings) => strings.shrink(),
        }
    }

    fn heap(&self) -> usize {
        match self {
            Self::Fixed { bytes, .. } => bytes.capacity(),
            Self::Varying(strings) => strings.heap(),
        }
    }

    fn digest(&self, digest: Digest) -> Digest {
        match self {
            Self::Fixed { bytes, width } => bytes_sum(digest.word(*width as u64), bytes),
            Self::Varying(strings) => sum(digest, strings),
        }
    }
}

/// Adds strings and their boundaries.
fn sum(digest: Digest, strings: &Strings) -> Digest {
    let mut lens = 0;
    for string in strings.iter() {
        lens = crc32c::crc32c_append(lens, &(string.len() as u64).to_le_bytes());
    }
    bytes_sum(digest.word(lens.into()), strings.bytes())
}

/// Adds many bytes by two sums of 32 bits.
fn bytes_sum(digest: Digest, bytes: &[u8]) -> Digest {
    digest
        .word(bytes.len() as u64)
        .word(crc32c::crc32c(bytes).into())
        .word(crc32fast::hash(bytes).into())
}

/// How the bytes of a key field become keys.
#[derive(Clone, Copy)]
enum KeyKind {
    Text,
    /// A whole number of this type, which becomes its digits.
    Whole(DType),
}

impl KeyKind {
    fn of(field: &EncodedField) -> Result<Self> {
        match &field.encoding {
            Encoding::Bytes => return Ok(Self::Text),
            Encoding::Raw { dtype, .. } => {
                let raw = field.as_raw().filter(|raw| raw.dims().is_empty());
                let is_whole = matches!(
                    dtype,
                    DType::I8
                        | DType::U8
                        | DType::I16
                        | DType::U16
                        | DType::I32
                        | DType::U32
                        | DType::I64
                        | DType::U64
                );
                if raw.is_some() && is_whole {
                    return Ok(Self::Whole(*dtype));
                }
            }
            _ => {}
        }
        let message = format!(
            "field `{}` is {}: keys are text or whole numbers",
            field.name, field.encoding
        );
        Err(refused(message))
    }

    fn push(self, bytes: &[u8], keys: &mut Strings) {
        let Self::Whole(dtype) = self else {
            return keys.push(bytes);
        };
        let is_signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
        let is_negative = is_signed && bytes.last().is_some_and(|last| *last >= 0x80);
        let mut wide = [if is_negative { 0xff } else { 0 }; 8];
        let len = bytes.len().min(8);
        wide[..len].copy_from_slice(&bytes[..len]);
        let text = match is_signed {
            true => i64::from_le_bytes(wide).to_string(),
            false => u64::from_le_bytes(wide).to_string(),
        };
        keys.push(text.as_bytes());
    }
}

/// The rows of a dataset, while they are read.
struct ReadRows {
    /// Number of the key's field.
    key: usize,
    kind: KeyKind,
    keys: Strings,
    columns: Vec<Column>,
}

impl ReadRows {
    fn take(&mut self, field: usize, bytes: &[u8]) -> Result<()> {
        if field == self.key {
            self.kind.push(bytes, &mut self.keys);
            return Ok(());
        }
        self.columns[field].push(bytes)
    }
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::Index, message)
}

fn damaged(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Decode, Stage::Index, message)
}

/// Line of a record, whose position is that of the empty lines before it.
fn line_of(position: Option<&csv::Position>, bytes: &[u8]) -> u64 {
    let Some(position) = position else {
        return 0;
    };
    let start = usize::try_from(position.byte()).unwrap_or(usize::MAX);
    let before = bytes.get(start..).unwrap_or_default().iter();
    let empty = before.take_while(|byte| matches!(byte, b'\n' | b'\r'));
    position.line() + empty.filter(|byte| **byte == b'\n').count() as u64
}

/// The error for a row with other cells than the header.
fn cut(error: &csv::Error, bytes: &[u8]) -> Error {
    match error.kind() {
        csv::ErrorKind::UnequalLengths {
            pos,
            expected_len,
            len,
        } => damaged(format!(
            "line {}: {len} cells, the header has {expected_len}: cells that hold the separator \
             or a line end need quotes",
            line_of(pos.as_ref(), bytes)
        )),
        _ => damaged(error.to_string()),
    }
}

/// Index of a column in a header.
fn place_of(name: &str, header: &[String]) -> Result<usize> {
    let place = header.iter().position(|own| own == name);
    place.ok_or_else(|| refused(format!("no column {name:?}; the header has {header:?}")))
}

/// Refuses a table larger than the free memory.
fn fits(bytes: u64) -> Result<()> {
    let free = available::for_rank().unwrap_or(u64::MAX);
    if bytes <= free {
        return Ok(());
    }
    let message = format!("a table of {bytes} bytes is read whole, and {free} bytes are free");
    Err(Error::new(ErrorKind::Budget, Stage::Index, message).with_amounts(bytes, free))
}

impl Dataset for Table {
    own!(schema sources framed);

    fn len(&self) -> u64 {
        self.keys.len() as u64
    }

    fn sizes(&self) -> Sizes {
        let lines = match &self.origin {
            Origin::Lines { lines, .. } => lines.as_ref().map_or(0, |lines| lines.capacity() * 4),
            Origin::Row => 0,
        };
        let columns: usize = self.columns.iter().map(Column::heap).sum();
        Sizes {
            index_bytes: columns + self.keys.heap() + lines,
            ..Sizes::new(0)
        }
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        for (field, column) in self.columns.iter().enumerate() {
            parts.inline(field, column.get(sample as usize));
        }
        Ok(())
    }

    fn keys(&self) -> Result<Option<Strings>> {
        Ok(Some(self.keys.clone()))
    }

    /// All values and keys.
    fn identity(&self) -> u64 {
        self.identity
    }

    fn describe(&self) -> String {
        format!("{} rows of {}", self.len(), self.name)
    }
}

impl Framed for Table {
    /// The row's place in its file, for people.
    fn member(&self, sample: u64, _: Option<usize>) -> Option<String> {
        let Origin::Lines {
            files,
            starts,
            lines,
        } = &self.origin
        else {
            return Some(format!("row {sample}"));
        };
        let (file, local) = starts.locate(sample);
        let line = match lines {
            Some(lines) => u64::from(*lines.get(sample as usize)?),
            None => local + 2,
        };
        Some(match files.len() {
            1 => format!("line {line}"),
            _ => format!("line {line} of {}", files[file].display()),
        })
    }
}
