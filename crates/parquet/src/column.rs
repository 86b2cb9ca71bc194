//! One column of one chunk: from pages to dense values, or to consecutive rows of bytes.
//!
//! ```text
//! pages ─┬─ plain, nothing missing ──► slices of the file's own bytes (unpacked into scratch when compressed)
//!        └─ dictionary, delta, nulls, lists ──► the parquet crate's column reader ──► values in scratch
//!                                                   └─ lists of byte arrays ──► framed rows (`Many`)
//! ```
//!
//! Limits: the footer's sizes bound every allocation; [`Pages`] has compared them with the page
//! headers first. Invariants: a column gives exactly the rows of its chunk, or an error; it never
//! invents a missing value unless the user asked for zeros.

use super::footer::Constant;
use super::page::{
    Header, PLAIN, PLAIN_DICTIONARY, Page, PageKind, Pages, RLE, RLE_DICTIONARY, all_defined,
};
use super::unpack::{Codec, Unpacked};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::ChunkBuf;
use feedline_core::decode::Many;
use parquet::basic::{Compression, Type};
use parquet::column::reader::{ColumnReaderImpl, get_column_reader, get_typed_column_reader};
use parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FixedLenByteArrayType, FloatType,
    Int32Type, Int64Type,
};
use parquet::errors::ParquetError;
use parquet::schema::types::ColumnDescPtr;
use std::ops::Range;

/// Policy for missing values (nulls).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nulls {
    /// The chunk's samples fail, with an error that names the row.
    #[default]
    Error,
    /// A null becomes 0, no bytes or an empty list. A null within a list stays an error.
    Zero,
}

/// Location of a column's bytes, and the footer's facts about them.
#[derive(Clone, Debug)]
pub(super) struct ValuePlace {
    /// Offset and length of the dictionary page, unless it is part of `data`.
    pub(super) dictionary: Option<(u64, u64)>,
    /// Offset and length of the pages.
    pub(super) data: (u64, u64),
    /// Whether a dictionary page is among the pages.
    pub(super) has_dictionary: bool,
    /// Maximum unpacked bytes of all pages except `dictionary`.
    pub(super) uncompressed: u64,
    /// Maximum unpacked bytes of `dictionary`.
    pub(super) unpacked_dictionary: u64,
    /// Maximum bytes of the byte arrays in the pages, if they may exceed the unpacked pages.
    pub(super) payload: Option<u64>,
    /// Maximum values in the pages, including nulls and empty lists.
    pub(super) values: u64,
    pub(super) compression: Compression,
    /// First row of the first page, counted in the row group.
    pub(super) first_row: u64,
}

/// Where the values of a chosen column of a chunk come from.
#[derive(Clone, Debug)]
pub(super) enum Values {
    Stored(ValuePlace),
    /// The same value in each row.
    Constant(Constant),
}

impl Values {
    /// Where the stored bytes are.
    pub(super) fn place(&self) -> Option<&ValuePlace> {
        match self {
            Self::Stored(place) => Some(place),
            Self::Constant(_) => None,
        }
    }
}

/// Number of columns interleaved at once: with 4 bytes each they fill a cache line.
pub(super) const TOGETHER: usize = 16;

/// Buffers that a worker reuses between columns and chunks.
#[derive(Default)]
pub(super) struct Scratch {
    /// Values, one arena for each column that is interleaved at once.
    pub(super) arenas: [Vec<u8>; TOGETHER],
    /// An unpacked page.
    unpacked: Vec<u8>,
    codec: Codec,
}

/// Rows of a chunk, as dense values of one width.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) rows: usize,
    pub(super) bytes: SegmentBytes,
}

#[derive(Debug)]
pub(super) enum SegmentBytes {
    /// Values in the stored bytes of the chunk, read in place.
    Piece(Bytes),
    /// Values in the column's arena.
    Arena(Range<usize>),
}

impl Segment {
    pub(super) fn bytes<'a>(&'a self, arena: &'a [u8]) -> &'a [u8] {
        match &self.bytes {
            SegmentBytes::Piece(bytes) => bytes,
            SegmentBytes::Arena(range) => &arena[range.clone()],
        }
    }
}

fn unread(error: ParquetError) -> Error {
    match error {
        // This crate's page reader returned the error through the parquet crate.
        ParquetError::External(source) => match source.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::decode("the column cannot be read").with_source(source),
        },
        error => Error::decode("the column cannot be read").with_source(error),
    }
}

/// A column of a chunk that is opened.
pub(super) enum Opened<'a> {
    Stored(Column<'a>),
    Constant { value: &'a Constant, rows: usize },
}

impl Opened<'_> {
    /// The rows as dense values: `list` values of `width` bytes each.
    pub(super) fn dense(
        &self,
        width: usize,
        list: usize,
        scratch: &mut Scratch,
        arena: usize,
    ) -> Result<Vec<Segment>> {
        let (value, rows) = match self {
            Self::Stored(column) => return column.dense(list, scratch, arena),
            Self::Constant { value, rows } => (value, *rows),
        };
        let arena = &mut scratch.arenas[arena];
        arena.clear();
        arena.resize(rows * width * list, 0);
        if let Some(value) = value {
            arena
                .chunks_exact_mut(value.len())
                .for_each(|row| row.copy_from_slice(value));
        }
        Ok(vec![Segment {
            rows,
            bytes: SegmentBytes::Arena(0..arena.len()),
        }])
    }

    /// Copies rows of any length, as [`Column::ragged`].
    pub(super) fn ragged(
        &self,
        scratch: &mut Scratch,
        width: usize,
        keep: usize,
        out: &mut ChunkBuf,
        field: usize,
    ) -> Result<()> {
        let (value, rows) = match self {
            Self::Stored(column) => return column.ragged(scratch, width, keep, out, field),
            Self::Constant { value, rows } => (value.as_deref().unwrap_or_default(), *rows),
        };
        same_rows(value, rows, out, field)
    }

    /// Copies rows of any number of byte arrays, as [`Column::many`]. A list that a file does not
    /// store is empty.
    pub(super) fn many(
        &self,
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
        field: usize,
    ) -> Result<()> {
        match self {
            Self::Stored(column) => column.many(scratch, out, field),
            Self::Constant { rows, .. } => same_rows(&[], *rows, out, field),
        }
    }
}

/// Gives each row the same bytes, of which there is one copy.
fn same_rows(value: &[u8], rows: usize, out: &mut ChunkBuf, field: usize) -> Result<()> {
    let room = out.room(value.len())?;
    out.bytes_mut(room.clone()).copy_from_slice(value);
    (0..rows).for_each(|_| out.place(field, room.clone()));
    Ok(())
}

/// A column to decode.
pub(super) struct Column<'a> {
    pub(super) descr: &'a ColumnDescPtr,
    pub(super) place: &'a ValuePlace,
    /// Bytes of `place.dictionary` (empty without one) and of `place.data`.
    pub(super) dictionary: &'a Bytes,
    pub(super) data: &'a Bytes,
    /// The chunk's rows, counted in the row group.
    pub(super) rows: Range<u64>,
    pub(super) nulls: Nulls,
}

impl Column<'_> {
    /// Pages of a separate dictionary, and all other pages.
    pub(super) fn parts(&self) -> [Pages; 2] {
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let place = self.place;
        let at = place.dictionary.map_or(0, |(offset, _)| offset);
        [
            Pages::new(self.dictionary, size(place.unpacked_dictionary), at),
            Pages::new(self.data, size(place.uncompressed), place.data.0),
        ]
    }

    /// Stored bytes of a fixed-width value.
    fn width(&self) -> usize {
        match self.descr.physical_type() {
            Type::INT32 | Type::FLOAT => 4,
            Type::INT64 | Type::DOUBLE => 8,
            Type::FIXED_LEN_BYTE_ARRAY => self.descr.type_length().max(0) as usize,
            _ => 0,
        }
    }

    /// Number of rows in the chunk.
    fn len(&self) -> usize {
        (self.rows.end - self.rows.start) as usize
    }

    /// Decodes the chunk's rows to dense values: `list` values per row.
    pub(super) fn dense(
        &self,
        list: usize,
        scratch: &mut Scratch,
        arena: usize,
    ) -> Result<Vec<Segment>> {
        self.segments(list, scratch, arena)
            .map_err(|error| self.named(error))
    }

    fn named(&self, error: Error) -> Error {
        error.within(format_args!("column `{}`", self.descr.path().string()))
    }

    fn segments(&self, list: usize, scratch: &mut Scratch, arena: usize) -> Result<Vec<Segment>> {
        if let Some(segments) = self.plain(scratch, arena)? {
            return Ok(segments);
        }
        let arena = &mut scratch.arenas[arena];
        arena.clear();
        match self.descr.physical_type() {
            Type::INT32 => {
                self.values::<Int32Type>(list, arena, |value, out| out.extend(value.to_le_bytes()))?
            }
            Type::INT64 => {
                self.values::<Int64Type>(list, arena, |value, out| out.extend(value.to_le_bytes()))?
            }
            Type::FLOAT => {
                self.values::<FloatType>(list, arena, |value, out| out.extend(value.to_le_bytes()))?
            }
            Type::DOUBLE => self
                .values::<DoubleType>(list, arena, |value, out| out.extend(value.to_le_bytes()))?,
            Type::BOOLEAN => {
                self.values::<BoolType>(list, arena, |value, out| out.push(u8::from(*value)))?
            }
            Type::FIXED_LEN_BYTE_ARRAY => {
                self.values::<FixedLenByteArrayType>(list, arena, |value, out| {
                    out.extend(value.data())
                })?;
            }
            other => {
                return Err(Error::decode(format!(
                    "values of type {other} have no fixed width"
                )));
            }
        }
        Ok(vec![Segment {
            rows: self.len(),
            bytes: SegmentBytes::Arena(0..arena.len()),
        }])
    }

    /// Returns the values without decoding, if every page is plain and no value is missing.
    fn plain(&self, scratch: &mut Scratch, arena: usize) -> Result<Option<Vec<Segment>>> {
        let width = self.width();
        let compressed = self.place.compression != Compression::UNCOMPRESSED;
        let mut segments = Vec::new();
        let mut fits = true;
        let mut unpacked = std::mem::take(&mut scratch.arenas[arena]);
        unpacked.clear();
        // Sixteen interleaved buffers that all start on a memory page would compete for the same L1
        // cache ways.
        unpacked.resize(if compressed { arena * 192 } else { 0 }, 0);
        // One allocation, not one per page.
        unpacked.reserve(if compressed {
            self.len().saturating_mul(width)
        } else {
            0
        });
        let walked = self.each_plain(scratch, &mut |page| {
            let values = page
                .values
                .get(page.rows.start * width..page.rows.end * width);
            let Some(values) = values.filter(|_| width > 0) else {
                fits = false;
                return Ok(());
            };
            let bytes = if compressed {
                let start = unpacked.len();
                unpacked.extend_from_slice(values);
                SegmentBytes::Arena(start..unpacked.len())
            } else {
                SegmentBytes::Piece(self.data.slice_ref(values))
            };
            segments.push(Segment {
                rows: page.rows.len(),
                bytes,
            });
            Ok(())
        });
        scratch.arenas[arena] = unpacked;
        if !walked? || width == 0 {
            return Ok(None);
        }
        let rows: usize = segments.iter().map(|segment| segment.rows).sum();
        if !fits || rows != self.len() {
            return Err(self.wrong_count(rows));
        }
        Ok(Some(segments))
    }

    fn wrong_count(&self, rows: usize) -> Error {
        Error::decode(format!(
            "the pages hold {rows} of the chunk's {} rows",
            self.len()
        ))
    }

    /// Calls `body` for every page up to the first that is not plain. Returns whether all pages are
    /// plain.
    fn each_plain(
        &self,
        scratch: &mut Scratch,
        body: &mut dyn FnMut(PlainPage<'_>) -> Result<()>,
    ) -> Result<bool> {
        let mut plain = self.dictionary.is_empty() && self.descr.max_rep_level() == 0;
        let mut row = self.place.first_row;
        let [mut before, mut pages] = self.parts();
        let mut dictionary = false;
        while let Some(page) = before.next()? {
            self.check_dictionary(&page)?;
            dictionary |= page.header.kind == PageKind::Dictionary;
        }
        let mut values = self.place.values;
        let mut unpacked = std::mem::take(&mut scratch.unpacked);
        let result = (|| {
            while let Some(page) = pages.next()? {
                if matches!(page.header.kind, PageKind::Data | PageKind::DataV2 { .. }) {
                    // The column reader allocates memory for this number of values.
                    values = values
                        .checked_sub(page.header.values as u64)
                        .ok_or_else(|| {
                            let message = format!(
                                "the pages hold more than the {} values of the footer",
                                self.place.values
                            );
                            Error::new(ErrorKind::Limit, Stage::Decode, message)
                        })?;
                    // The parquet crate panics on such a page.
                    if !dictionary
                        && [PLAIN_DICTIONARY, RLE_DICTIONARY].contains(&page.header.encoding)
                    {
                        return Err(Error::decode(
                            "a page refers to a dictionary, but the column chunk has none before it",
                        ));
                    }
                }
                match page.header.kind {
                    PageKind::Dictionary => {
                        self.check_dictionary(&page)?;
                        dictionary = true;
                        plain = false;
                    }
                    PageKind::Other => {}
                    PageKind::Data | PageKind::DataV2 { .. } if plain => {
                        let values = page.header.values;
                        let Some(bytes) = self.plain_values(&page, scratch, &mut unpacked)? else {
                            plain = false;
                            continue;
                        };
                        let end = row.saturating_add(values as u64);
                        let range = self.rows.start.clamp(row, end)..self.rows.end.clamp(row, end);
                        let rows = (range.start - row) as usize..(range.end - row) as usize;
                        if !rows.is_empty() {
                            body(PlainPage {
                                values: bytes,
                                rows,
                            })?;
                        }
                        row = end;
                    }
                    PageKind::Data | PageKind::DataV2 { .. } => {}
                }
            }
            Ok(plain)
        })();
        scratch.unpacked = unpacked;
        result
    }

    /// Refuses a dictionary with more values than its bytes can hold, because the reader allocates
    /// memory for the stated number of values.
    fn check_dictionary(&self, page: &Page<'_>) -> Result<()> {
        let least = match self.descr.physical_type() {
            Type::BYTE_ARRAY => 4,
            _ => self.width().max(1),
        };
        let Page { header, .. } = page;
        if header.kind == PageKind::Dictionary && header.values > header.uncompressed / least {
            let message = format!(
                "a dictionary of {} values in {} bytes",
                header.values, header.uncompressed
            );
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        Ok(())
    }

    /// The values of a page, if it is plain and no value is missing.
    fn plain_values<'p>(
        &self,
        page: &Page<'p>,
        scratch: &mut Scratch,
        unpacked: &'p mut Vec<u8>,
    ) -> Result<Option<&'p [u8]>> {
        let header = &page.header;
        let max = self.descr.max_def_level();
        if header.encoding != PLAIN {
            return Ok(None);
        }
        match header.kind {
            PageKind::Data => {
                let bytes = self.unpack(page.body, header.uncompressed, scratch, unpacked)?;
                if max == 0 {
                    return Ok(Some(bytes));
                }
                let (levels, values) = levels_v1(header, bytes).unzip();
                Ok(values.filter(|_| {
                    levels.is_some_and(|levels| all_defined(levels, header.values, max))
                }))
            }
            PageKind::DataV2 {
                nulls: 0,
                def_bytes,
                rep_bytes: 0,
                compressed,
                ..
            } => {
                let Some((levels, body)) = page.body.split_at_checked(def_bytes as usize) else {
                    return Ok(None);
                };
                if max > 0 && !all_defined(levels, header.values, max) {
                    return Ok(None);
                }
                let size = header.uncompressed.saturating_sub(def_bytes as usize);
                if compressed {
                    self.unpack(body, size, scratch, unpacked).map(Some)
                } else {
                    Ok(Some(body))
                }
            }
            _ => Ok(None),
        }
    }

    /// Unpacks a compressed body to `size` bytes; `size` was compared with the footer.
    fn unpack<'p>(
        &self,
        body: &'p [u8],
        size: usize,
        scratch: &mut Scratch,
        out: &'p mut Vec<u8>,
    ) -> Result<&'p [u8]> {
        if self.place.compression == Compression::UNCOMPRESSED {
            return Ok(body);
        }
        if out.len() < size {
            out.resize(size, 0);
        }
        scratch
            .codec
            .unpack(self.place.compression, body, &mut out[..size])?;
        Ok(&out[..size])
    }

    /// Makes the parquet crate's reader of this column, at the chunk's first row, with the
    /// dictionary.
    fn reader<T: DataType>(&self) -> Result<(ColumnReaderImpl<T>, Option<Bytes>)> {
        let mut pages = Unpacked::new(self.parts(), self.place.compression);
        let dictionary = pages.dictionary()?;
        let mut reader =
            get_typed_column_reader::<T>(get_column_reader(self.descr.clone(), Box::new(pages)));
        let skip = (self.rows.start - self.place.first_row) as usize;
        if skip > 0 && reader.skip_records(skip).map_err(unread)? != skip {
            return Err(self.wrong_count(0));
        }
        Ok((reader, dictionary))
    }

    /// Reads the values and levels of all rows.
    fn read<T: DataType>(&self) -> Result<Read<T::T>> {
        let (mut reader, dictionary) = self.reader::<T>()?;
        let mut read = Read {
            values: Vec::new(),
            def: Vec::new(),
            rep: Vec::new(),
            dictionary,
        };
        // One exact allocation, as the plan counts it: a growing vector could take twice as much.
        let most = usize::try_from(self.place.values).unwrap_or(usize::MAX);
        let most = if self.descr.max_rep_level() == 0 {
            most.min(self.len())
        } else {
            most
        };
        let levels = |is: bool| if is { most } else { 0 };
        let reserved = read
            .values
            .try_reserve_exact(most)
            .and_then(|()| {
                read.def
                    .try_reserve_exact(levels(self.descr.max_def_level() > 0))
            })
            .and_then(|()| {
                read.rep
                    .try_reserve_exact(levels(self.descr.max_rep_level() > 0))
            });
        reserved.map_err(|_| {
            Error::new(
                ErrorKind::Limit,
                Stage::Decode,
                format!("no memory for {most} values"),
            )
        })?;
        let mut rows = 0;
        let wanted = self.len();
        while rows < wanted {
            let def = Some(&mut read.def);
            let rep = Some(&mut read.rep);
            let (more, _, _) = reader
                .read_records(wanted - rows, def, rep, &mut read.values)
                .map_err(unread)?;
            if more == 0 {
                return Err(self.wrong_count(rows));
            }
            rows += more;
        }
        Ok(read)
    }

    /// Calls `row` with the values of every row, in order; `None` for a missing value or list.
    fn each_row<T: DataType>(
        &self,
        row: impl FnMut(usize, Option<&[T::T]>) -> Result<()>,
    ) -> Result<()> {
        self.each_row_of(&self.read::<T>()?, row)
    }

    fn each_row_of<V>(
        &self,
        read: &Read<V>,
        mut row: impl FnMut(usize, Option<&[V]>) -> Result<()>,
    ) -> Result<()> {
        let max_def = self.descr.max_def_level();
        let max_rep = self.descr.max_rep_level();
        if max_rep > 1 {
            return Err(Error::decode("lists of lists are not supported"));
        }
        let levels = if max_def > 0 {
            read.def.len()
        } else {
            read.rep.len().max(read.values.len())
        };
        // Lowest definition level at which a list has an element.
        let element = self.descr.repeated_ancestor_def_level();
        let mut value = 0;
        let mut level = 0;
        let mut number = 0;
        while level < levels {
            let start = value;
            let mut there = false;
            let mut missing = false;
            loop {
                match read.def.get(level) {
                    Some(def) if *def == max_def => (there, value) = (true, value + 1),
                    None => (there, value) = (true, value + 1),
                    // The list has an element, but the element or its selected part is null.
                    Some(def) if max_rep > 0 && *def >= element => {
                        let row = self.rows.start + number as u64;
                        return Err(Error::decode(format!(
                            "a null within the list of row {row}"
                        )));
                    }
                    // An empty list.
                    Some(def) if max_rep > 0 && *def + 1 == element => there = true,
                    Some(_) => missing = true,
                }
                level += 1;
                if max_rep == 0 || read.rep.get(level).is_none_or(|rep| *rep == 0) {
                    break;
                }
            }
            let values = read
                .values
                .get(start..value)
                .ok_or_else(|| Error::decode("fewer values than levels"))?;
            if missing && self.nulls == Nulls::Error {
                return Err(self.missing(number));
            }
            row(number, there.then_some(values))?;
            number += 1;
        }
        if number != self.len() {
            return Err(self.wrong_count(number));
        }
        Ok(())
    }

    fn missing(&self, row: usize) -> Error {
        let row = self.rows.start + row as u64;
        Error::decode(format!(
            "row {row} of the row group is null ({} reads nulls as 0 or empty)",
            Setting::NullZero
        ))
    }

    /// Writes all values with `put`: `list` per row, or one per row for a column without lists.
    fn values<T: DataType>(
        &self,
        list: usize,
        out: &mut Vec<u8>,
        put: impl Fn(&T::T, &mut Vec<u8>),
    ) -> Result<()> {
        let boolean = self.descr.physical_type() == Type::BOOLEAN;
        let row_bytes = list * if boolean { 1 } else { self.width() };
        self.each_row::<T>(|number, values| {
            let values = values.unwrap_or_default();
            if values.len() != list && !(values.is_empty() && self.nulls == Nulls::Zero) {
                let row = self.rows.start + number as u64;
                let message = format!(
                    "row {row} of the row group has a list of {} values, not {list}",
                    values.len()
                );
                return Err(Error::new(ErrorKind::Shape, Stage::Decode, message));
            }
            let end = out.len() + row_bytes;
            values.iter().for_each(|value| put(value, out));
            if out.len() != end && !values.is_empty() {
                return Err(Error::decode(format!(
                    "a value does not have the column's {} bytes",
                    self.width()
                )));
            }
            // Zeros instead of nulls.
            out.resize(end, 0);
            Ok(())
        })
    }

    /// Copies rows of any length into field `field` of `out`: byte arrays, or lists of numbers. Of
    /// each number it takes the low `keep` of `width` bytes.
    pub(super) fn ragged(
        &self,
        scratch: &mut Scratch,
        width: usize,
        keep: usize,
        out: &mut ChunkBuf,
        field: usize,
    ) -> Result<()> {
        if self.descr.physical_type() == Type::BYTE_ARRAY {
            return self
                .byte_arrays(scratch, out, field)
                .map_err(|error| self.named(error));
        }
        let mut narrow = Vec::new();
        let lists = self.lists_of(scratch, &mut |row| {
            if width == keep {
                return out.push(field, row);
            }
            narrow.clear();
            row.chunks_exact(width)
                .for_each(|value| narrow.extend(&value[..keep]));
            out.push(field, &narrow)
        });
        lists.map_err(|error| self.named(error))
    }

    fn lists_of(
        &self,
        scratch: &mut Scratch,
        row: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        match self.descr.physical_type() {
            Type::INT32 => self.lists::<Int32Type>(scratch, row),
            Type::INT64 => self.lists::<Int64Type>(scratch, row),
            Type::FLOAT => self.lists::<FloatType>(scratch, row),
            Type::DOUBLE => self.lists::<DoubleType>(scratch, row),
            Type::BOOLEAN => self.lists::<BoolType>(scratch, row),
            Type::FIXED_LEN_BYTE_ARRAY => {
                let mut list = Vec::new();
                self.each_plain(scratch, &mut |_| Ok(()))?;
                self.each_row::<FixedLenByteArrayType>(|_, values| {
                    list.clear();
                    values
                        .unwrap_or_default()
                        .iter()
                        .for_each(|value| list.extend_from_slice(value.data()));
                    row(&list)
                })
            }
            other => Err(Error::decode(format!("lists of {other} are not supported"))),
        }
    }

    fn lists<T: DataType>(
        &self,
        scratch: &mut Scratch,
        row: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()>
    where
        T::T: bytemuck::NoUninit,
    {
        self.each_plain(scratch, &mut |_| Ok(()))?;
        self.each_row::<T>(|_, values| row(bytemuck::cast_slice(values.unwrap_or_default())))
    }

    /// Copies rows of any number of byte arrays into field `field` of `out`, framed as [`Many`].
    pub(super) fn many(
        &self,
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
        field: usize,
    ) -> Result<()> {
        self.each_plain(scratch, &mut |_| Ok(()))
            .and_then(|_| {
                self.each_row::<ByteArrayType>(|_, values| {
                    let values = values.unwrap_or_default();
                    let head = Many::head_bytes(values.len());
                    let bytes: usize = values.iter().map(ByteArray::len).sum();
                    let row = out.next_room(head.saturating_add(bytes))?;
                    let framed = out.bytes_mut(row.clone());
                    let (lens, mut rest) = framed.split_at_mut(head);
                    Many::write_head(values.iter().map(ByteArray::len), lens)?;
                    for value in values {
                        let (place, after) = rest.split_at_mut(value.len());
                        place.copy_from_slice(value.data());
                        rest = after;
                    }
                    out.place(field, row);
                    Ok(())
                })
            })
            .map_err(|error| self.named(error))
    }

    fn byte_arrays(&self, scratch: &mut Scratch, out: &mut ChunkBuf, field: usize) -> Result<()> {
        // Check before the first row is written: a later page may not be plain.
        if self.descr.max_rep_level() == 0 && self.each_plain(scratch, &mut |_| Ok(()))? {
            return self.plain_byte_arrays(scratch, out, field);
        }
        let read = self.read::<ByteArrayType>()?;
        let dictionary = read.dictionary.clone().unwrap_or_default();
        // The chunk holds each dictionary entry once, however many rows refer to it. So the rows
        // take no more bytes than the pages.
        let entries = out.room(dictionary.len())?;
        out.bytes_mut(entries.clone()).copy_from_slice(&dictionary);
        self.each_row_of(&read, |_, values| {
            let value = match values.unwrap_or_default() {
                [] => &[],
                [value] => value.data(),
                _ => return Err(Error::decode("lists of byte arrays are not supported")),
            };
            // Values from dictionary pages are slices of the dictionary.
            match (value.as_ptr() as usize).checked_sub(dictionary.as_ptr() as usize) {
                Some(at) if at + value.len() <= dictionary.len() && !value.is_empty() => {
                    let start = entries.start + at;
                    out.place(field, start..start + value.len());
                    Ok(())
                }
                _ => out.push(field, value),
            }
        })
    }

    fn plain_byte_arrays(
        &self,
        scratch: &mut Scratch,
        out: &mut ChunkBuf,
        field: usize,
    ) -> Result<()> {
        let mut rows = 0;
        self.each_plain(scratch, &mut |page| {
            rows += page.rows.len();
            let mut values = page.values;
            for number in 0..page.rows.end {
                let value = values.split_first_chunk::<4>().and_then(|(len, rest)| {
                    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
                });
                let (value, rest) =
                    value.ok_or_else(|| Error::decode("a value is longer than its page"))?;
                values = rest;
                if number >= page.rows.start {
                    out.push(field, value)?;
                }
            }
            Ok(())
        })?;
        if rows == self.len() {
            Ok(())
        } else {
            Err(self.wrong_count(rows))
        }
    }
}

/// Splits an unpacked page of version 1 into definition levels and values. A length precedes the
/// levels.
pub(super) fn levels_v1<'p>(header: &Header, page: &'p [u8]) -> Option<(&'p [u8], &'p [u8])> {
    levels_of(header.def_encoding, page)
}

/// Splits an unpacked page of version 1 into repetition levels and all that follows them.
pub(super) fn rep_levels_v1<'p>(header: &Header, page: &'p [u8]) -> Option<(&'p [u8], &'p [u8])> {
    levels_of(header.rep_encoding, page)
}

fn levels_of(encoding: i32, page: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = (encoding == RLE)
        .then(|| page.split_first_chunk::<4>())
        .flatten()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
}

/// The chunk's rows in a plain page.
struct PlainPage<'a> {
    values: &'a [u8],
    rows: Range<usize>,
}

struct Read<T> {
    values: Vec<T>,
    def: Vec<i16>,
    rep: Vec<i16>,
    /// Buffer that holds the values of dictionary pages.
    dictionary: Option<Bytes>,
}
