//! Cuts row groups into chunks and computes the memory for opening each.

use super::column::{TOGETHER, ValuePlace, Values};
use super::footer::Footer;
use super::offsets::{Claim, DataPage};
use super::unpack::Codec;
use super::{Chunk, FieldKind, Parquet, offsets, scan};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::ChunkBytes;
use parquet::basic::{Compression, Encoding, Type};
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::file::statistics::Statistics;
use std::ops::Range;

/// A row group to cut into chunks.
pub(super) struct Cut<'a> {
    pub(super) footer: &'a Footer,
    pub(super) group: &'a RowGroupMetaData,
    pub(super) number: usize,
    pub(super) columns: &'a [usize],
    pub(super) limit: u64,
}

impl Cut<'_> {
    fn wrong(&self, message: String) -> Error {
        Error::new(
            ErrorKind::Decode,
            Stage::Index,
            format!("row group {}: {message}", self.number),
        )
    }

    fn rows(&self) -> Result<u64> {
        u32::try_from(self.group.num_rows())
            .map(u64::from)
            .map_err(|_| self.wrong(format!("{} rows", self.group.num_rows())))
    }

    fn column(&self, index: usize) -> &ColumnChunkMetaData {
        self.group.column(self.columns[index])
    }

    /// Where the values of column `index` are: in all of its pages, or in no file.
    fn values(&self, index: usize) -> Result<Values> {
        match &self.footer.leaves[self.columns[index]].value {
            Some(value) => Ok(Values::Constant(value.clone())),
            None => self.whole(index).map(Values::Stored),
        }
    }

    /// Location of column `index` in the row group: all of its pages.
    fn whole(&self, index: usize) -> Result<ValuePlace> {
        let meta = self.column(index);
        let rows = self.rows()?;
        let name = meta.column_path().string();
        let number = |what: &str, value: i64| {
            u64::try_from(value)
                .map_err(|_| self.wrong(format!("column `{name}` has {value} {what}")))
        };
        let mut start = number("as its offset", meta.data_page_offset())?;
        let dictionary = meta
            .dictionary_page_offset()
            .map(|offset| number("as its dictionary's offset", offset));
        // Some writers put 0 for "no dictionary".
        let dictionary = dictionary
            .transpose()?
            .filter(|offset| *offset > 0 && *offset < start);
        if let Some(offset) = dictionary {
            start = offset;
        }
        let mut len = number("bytes", meta.compressed_size())?;
        let mut uncompressed = number("bytes when unpacked", meta.uncompressed_size())?;
        if uncompressed == 0 {
            // An earlier DuckDB omitted the size.
            let unpacked = self
                .footer
                .blob()
                .and_then(|content| scan::all_unpacked(&content, start, len));
            uncompressed = unpacked.unwrap_or(0);
        }
        let uncounted = self.uncounted_header(start, len);
        len = len.saturating_add(uncounted);
        uncompressed = uncompressed.saturating_add(uncounted);
        let values = number("values", meta.num_values())?;
        if values < rows {
            return Err(self.wrong(format!(
                "column `{name}` has {values} values for {rows} rows"
            )));
        }
        if start
            .checked_add(len)
            .is_none_or(|end| end > self.footer.len)
        {
            let message = format!(
                "row group {}: column `{name}` ends after the end of the file",
                self.number
            );
            return Err(
                Error::new(ErrorKind::Truncated, Stage::Index, message).with_range(start, len)
            );
        }
        if meta.file_path().is_some_and(|path| !path.is_empty()) {
            return Err(self.wrong(format!("column `{name}` is stored in another file")));
        }
        let compression = meta.compression();
        if !Codec::knows(compression) {
            return Err(self.wrong(format!(
                "column `{name}` is compressed by {compression}, which is not supported"
            )));
        }
        let mut place = ValuePlace {
            dictionary: None,
            data: (start, len),
            has_dictionary: has_dictionary(meta),
            uncompressed,
            unpacked_dictionary: 0,
            payload: None,
            values,
            compression,
            first_row: 0,
        };
        if outgrows_pages(meta) {
            let said = meta
                .unencoded_byte_array_data_bytes()
                .and_then(|bytes| u64::try_from(bytes).ok());
            place.payload = said.or_else(|| self.counted_payload(index, &place));
        }
        Ok(place)
    }

    /// Bytes of the dictionary's page header, if the writer did not count them in the footer, like
    /// parquet-mr before 1.2.9.
    fn uncounted_header(&self, start: u64, len: u64) -> u64 {
        let writer = self
            .footer
            .meta
            .file_metadata()
            .created_by()
            .unwrap_or_default();
        let content = if leaves_out_headers(writer) {
            self.footer.blob()
        } else {
            None
        };
        content
            .and_then(|content| scan::uncounted_header(&content, start, len))
            .unwrap_or(0)
    }

    fn counted_payload(&self, index: usize, place: &ValuePlace) -> Option<u64> {
        scan::payload(
            &self.footer.blob()?,
            &self.footer.leaves[self.columns[index]].descr,
            place,
        )
    }
}

/// Whether this writer has the bug PARQUET-816: `parquet-mr` without a version or before 1.2.9.
fn leaves_out_headers(writer: &str) -> bool {
    let Some(rest) = writer.strip_prefix("parquet-mr") else {
        return false;
    };
    let version = rest.trim_start().strip_prefix("version ").unwrap_or("0");
    let numbers: Vec<u32> = version
        .split('.')
        .take(3)
        .map(|part| {
            part.chars()
                .take_while(char::is_ascii_digit)
                .collect::<String>()
                .parse()
                .unwrap_or(0_u32)
        })
        .collect();
    numbers.as_slice() < [1, 2, 9].as_slice()
}

impl Parquet {
    pub(super) fn add_group(&mut self, file: u32, cut: &Cut<'_>) -> Result<()> {
        let rows = cut.rows()?;
        if rows == 0 {
            return Ok(());
        }
        let places: Box<[Values]> = (0..cut.columns.len())
            .map(|index| cut.values(index))
            .collect::<Result<_>>()?;
        let bytes = self.bytes_of(cut, &places, rows);
        let runs = if bytes.opened > cut.limit {
            self.runs(cut, &places, rows, bytes.opened)?
        } else {
            None
        };
        match runs {
            None => self.add_chunk(file, cut, 0..rows, places, bytes),
            Some(runs) => {
                for (range, places) in runs {
                    let bytes = self.bytes_of(cut, &places, range.end - range.start);
                    self.add_chunk(file, cut, range, places, bytes);
                }
            }
        }
        Ok(())
    }

    fn add_chunk(
        &mut self,
        file: u32,
        cut: &Cut<'_>,
        rows: Range<u64>,
        places: Box<[Values]>,
        bytes: ChunkBytes,
    ) {
        let count = rows.end - rows.start;
        self.sample_bytes_max = self.sample_bytes_max.max(bytes.opened / count.max(1));
        self.starts
            .push(self.starts.last().expect("starts with 0") + count);
        self.chunks.push(Chunk {
            file,
            group: cut.number as u32,
            rows,
            places,
            bytes,
        });
    }

    /// Cuts the row group into runs of rows within the limit, with their pages. `None` if there is
    /// no offset index, or if the pages contradict it.
    #[allow(
        clippy::type_complexity,
        reason = "a list of runs, each with its columns"
    )]
    fn runs(
        &mut self,
        cut: &Cut<'_>,
        whole: &[Values],
        rows: u64,
        opened: u64,
    ) -> Result<Option<Vec<(Range<u64>, Box<[Values]>)>>> {
        let Some(columns) = self.checked_pages(cut, whole, rows)? else {
            return Ok(None);
        };
        // Every run unpacks the dictionaries again, so a run smaller than them costs more than it
        // saves.
        let dictionaries = columns
            .iter()
            .flatten()
            .map(|pages| pages.dictionary.1)
            .fold(0, u64::saturating_add);
        let parts = opened.div_ceil(dictionaries.max(cut.limit)).clamp(1, rows);
        let step = rows.div_ceil(parts);
        let mut runs = Vec::new();
        for start in (0..rows).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
            let range = start..(start + step).min(rows);
            runs.push((
                range.clone(),
                whole
                    .iter()
                    .enumerate()
                    .map(|(leaf, values)| {
                        let (Values::Stored(whole), Some(pages)) = (values, &columns[leaf]) else {
                            return values.clone();
                        };
                        let (mut place, payload) = pages_of(whole, pages, &range);
                        if outgrows_pages(cut.column(leaf)) {
                            let summed = payload_of(&pages.data)
                                .is_some_and(|sum| Some(sum) == whole.payload);
                            place.payload = payload
                                .filter(|_| summed)
                                .or_else(|| cut.counted_payload(leaf, &place));
                        }
                        Values::Stored(place)
                    })
                    .collect(),
            ));
        }
        Ok(Some(runs))
    }

    /// The pages of all chosen columns that are stored. `None` if there is no offset index, or if the
    /// pages contradict it; the dataset's description reports the contradiction.
    ///
    /// Errors: a failed read.
    fn checked_pages(
        &mut self,
        cut: &Cut<'_>,
        whole: &[Values],
        rows: u64,
    ) -> Result<Option<Vec<Option<offsets::Pages>>>> {
        let checked = if let Some(reason) = &cut.footer.no_index {
            Err(reason.clone())
        } else {
            let index = cut.footer.meta.page_index_for_row_group(cut.number);
            let stored = whole
                .iter()
                .zip(cut.columns)
                .filter_map(|(values, column)| Some((values.place()?, column)));
            let claims = stored.map(|(whole, column)| {
                let index = index.offset_index(*column)?;
                Some(Claim {
                    descr: &cut.footer.leaves[*column].descr,
                    whole,
                    index,
                    rows,
                })
            });
            let Some(claims) = claims.collect::<Option<Vec<_>>>() else {
                return Ok(None);
            };
            offsets::check(&cut.footer.content()?, &claims)?
        };
        let reason = match checked {
            Ok(pages) => {
                let mut pages = pages.into_iter();
                let columns = whole
                    .iter()
                    .map(|values| values.place().and_then(|_| pages.next()));
                return Ok(Some(columns.collect()));
            }
            Err(reason) => reason,
        };
        self.unindexed += 1;
        if self.unindexed == 1 {
            let file = cut.footer.path.file_name().unwrap_or_default().display();
            self.index_doubt = format!("{file}, row group {}, {reason}", cut.number);
        }
        Ok(None)
    }

    /// Sizes of a chunk with these pages.
    fn bytes_of(&self, cut: &Cut<'_>, places: &[Values], rows: u64) -> ChunkBytes {
        let mut bytes = ChunkBytes::default();
        for place in places.iter().filter_map(Values::place) {
            let dictionary = place.dictionary.map_or(0, |(_, len)| len);
            bytes.encoded = bytes
                .encoded
                .saturating_add(place.data.1)
                .saturating_add(dictionary);
        }
        for field in &self.fields {
            let columns = field.columns.clone();
            match field.kind {
                FieldKind::Array { keep, list, .. } => {
                    let row = (columns.len() * keep).saturating_mul(list) as u64;
                    bytes.opened = bytes.opened.saturating_add(rows.saturating_mul(row));
                }
                FieldKind::Ragged { keep, .. } => {
                    let ragged = match &places[columns.start] {
                        Values::Stored(place) => {
                            ragged_bytes(cut.column(columns.start), place, keep as u64)
                        }
                        Values::Constant(value) => {
                            value.as_ref().map_or(0, |value| value.len() as u64)
                        }
                    };
                    bytes.opened = bytes.opened.saturating_add(ragged);
                }
                FieldKind::Many => {
                    let place = places[columns.start].place();
                    let many = place.map_or(0, |place| many_bytes(place, rows));
                    bytes.opened = bytes.opened.saturating_add(many);
                }
            }
        }
        bytes.scratch = self.scratch_of(cut, places, rows);
        bytes
    }

    /// Heap that a worker needs to open a chunk: the values of the columns interleaved at once, and
    /// the memory for reading one column.
    fn scratch_of(&self, cut: &Cut<'_>, places: &[Values], rows: u64) -> u64 {
        let mut together = 0;
        let mut reader = 0;
        for field in &self.fields {
            for columns in field.columns.clone().collect::<Vec<_>>().chunks(TOGETHER) {
                together = columns
                    .iter()
                    .map(|leaf| match field.kind {
                        FieldKind::Ragged { .. } | FieldKind::Many => 0,
                        FieldKind::Array { width, list, .. } => {
                            let in_place = places[*leaf].place().is_some_and(|place| {
                                is_plain(cut.column(*leaf))
                                    && place.compression == Compression::UNCOMPRESSED
                            });
                            if in_place {
                                0
                            } else {
                                rows.saturating_mul((width * list) as u64)
                            }
                        }
                    })
                    .fold(0, u64::saturating_add)
                    .max(together);
            }
        }
        for (leaf, values) in places.iter().enumerate() {
            if let Some(place) = values.place() {
                reader = reader_bytes(cut.column(leaf), place, rows).max(reader);
            }
        }
        together.saturating_add(reader)
    }
}

/// Total bytes of the byte arrays in these pages, if the offset index contains them.
fn payload_of(pages: &[DataPage]) -> Option<u64> {
    pages
        .iter()
        .try_fold(0_u64, |sum, page| sum.checked_add(page.payload?))
}

/// Whether values may exceed the unpacked pages: of prefix-coded columns even if each dictionary
/// entry counts once; of lists because an entry is copied for each element that refers to it.
fn outgrows_pages(meta: &ColumnChunkMetaData) -> bool {
    let is_list = meta.column_descr().max_rep_level() > 0;
    let repeats = is_list && has_dictionary(meta);
    meta.column_type() == Type::BYTE_ARRAY && (repeats || is_prefix_coded(meta))
}

fn has_dictionary(meta: &ColumnChunkMetaData) -> bool {
    // Some writers put 0 for "no dictionary", some name a dictionary only in the encodings.
    meta.dictionary_page_offset()
        .is_some_and(|offset| offset > 0)
        || meta.encodings().any(|encoding| {
            matches!(
                encoding,
                Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY
            )
        })
}

fn is_prefix_coded(meta: &ColumnChunkMetaData) -> bool {
    meta.encodings()
        .any(|encoding| encoding == Encoding::DELTA_BYTE_ARRAY)
}

/// Open bytes of a column of byte arrays or lists.
fn ragged_bytes(meta: &ColumnChunkMetaData, place: &ValuePlace, keep: u64) -> u64 {
    if meta.column_type() != Type::BYTE_ARRAY {
        return place.values.saturating_mul(keep);
    }
    place
        .uncompressed
        .saturating_add(place.unpacked_dictionary)
        .saturating_add(place.payload.unwrap_or(0))
}

/// Open bytes of a column of lists of byte arrays: the elements, with the heads of their lists.
fn many_bytes(place: &ValuePlace, rows: u64) -> u64 {
    let word = size_of::<u32>() as u64;
    let unpacked = place.uncompressed.saturating_add(place.unpacked_dictionary);
    rows.saturating_add(place.values)
        .saturating_mul(word)
        .saturating_add(place.payload.unwrap_or(unpacked))
}

/// Whether values can be copied straight from every page, according to the footer.
fn is_plain(meta: &ColumnChunkMetaData) -> bool {
    let descr = meta.column_descr();
    let defined = descr.max_def_level() == 0
        || meta.statistics().and_then(Statistics::null_count_opt) == Some(0);
    descr.max_rep_level() == 0
        && meta.column_type() != Type::BOOLEAN
        && defined
        && meta
            .encodings()
            .all(|encoding| matches!(encoding, Encoding::PLAIN | Encoding::RLE))
}

/// Bytes per value in the column reader's memory.
fn value_bytes(meta: &ColumnChunkMetaData) -> u64 {
    let bytes = match meta.column_type() {
        Type::BOOLEAN => 1,
        Type::INT32 | Type::FLOAT => 4,
        Type::INT64 | Type::DOUBLE => 8,
        _ => size_of::<parquet::data_type::ByteArray>(),
    };
    bytes as u64
}

/// Heap for a column decoded by the column reader: two copies of an unpacked page, the dictionary,
/// the values and the levels.
fn reader_bytes(meta: &ColumnChunkMetaData, place: &ValuePlace, rows: u64) -> u64 {
    if is_plain(meta) {
        return if place.compression == Compression::UNCOMPRESSED {
            0
        } else {
            place.uncompressed
        };
    }
    let values = if meta.column_descr().max_rep_level() == 0 {
        rows
    } else {
        place.values
    };
    let width = value_bytes(meta);
    let dictionary = if place.unpacked_dictionary > 0 {
        place.unpacked_dictionary
    } else {
        place.uncompressed
    };
    // A dictionary entry is the value of some row and has a four-byte length before it.
    let entries = if place.has_dictionary {
        place.values.min(dictionary / 4)
    } else {
        0
    };
    // A value stored in parts is assembled in its own heap allocation.
    let whole = if meta.column_type() == Type::BYTE_ARRAY {
        place.payload.unwrap_or(0)
    } else {
        values.saturating_mul(meta.column_descr().type_length().max(0) as u64)
    };
    let whole = if is_prefix_coded(meta) {
        whole.saturating_add(values.saturating_mul(32))
    } else {
        0
    };
    let pages = place
        .uncompressed
        .saturating_mul(2)
        .saturating_add(place.unpacked_dictionary)
        .saturating_add(whole);
    pages
        .saturating_add(values.saturating_mul(width + 4))
        .saturating_add(entries.saturating_mul(width))
}

/// The part of a column that contains the rows `range`, and the bytes of its byte arrays according
/// to the index.
fn pages_of(
    whole: &ValuePlace,
    pages: &offsets::Pages,
    range: &Range<u64>,
) -> (ValuePlace, Option<u64>) {
    let data = &pages.data;
    let first = data.partition_point(|page| page.first_row <= range.start) - 1;
    let end = data
        .partition_point(|page| page.first_row < range.end)
        .max(first + 1);
    let here = &data[first..end];
    let sum = |of: fn(&DataPage) -> u64| here.iter().map(of).fold(0, u64::saturating_add);
    let (stored, unpacked) = pages.dictionary;
    let place = ValuePlace {
        dictionary: (stored > 0).then_some((whole.data.0, stored)),
        data: (data[first].offset, sum(|page| page.len)),
        has_dictionary: stored > 0,
        uncompressed: sum(|page| page.uncompressed),
        unpacked_dictionary: unpacked,
        payload: None,
        values: sum(|page| page.values),
        compression: whole.compression,
        first_row: data[first].first_row,
    };
    (place, payload_of(here))
}
