//! Cuts row groups into chunks and computes the memory for opening each.

use super::column::{Place, TOGETHER};
use super::footer::Footer;
use super::unpack::Codec;
use super::{Chunk, FieldKind, Parquet, scan};
use crate::dataset::ChunkBytes;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::Blob;
use parquet::basic::{Compression, Encoding, Type};
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::file::page_index::offset_index::{OffsetIndexMetaData, PageLocation};
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
        Error::new(ErrorKind::Decode, Stage::Index, format!("row group {}: {message}", self.number))
    }

    fn rows(&self) -> Result<u64> {
        u32::try_from(self.group.num_rows())
            .map(u64::from)
            .map_err(|_| self.wrong(format!("{} rows", self.group.num_rows())))
    }

    fn column(&self, index: usize) -> &ColumnChunkMetaData {
        self.group.column(self.columns[index])
    }

    /// Place of the whole column `index`.
    fn whole(&self, index: usize) -> Result<Place> {
        let (meta, rows) = (self.column(index), self.rows()?);
        let name = meta.column_path().string();
        let number = |what: &str, value: i64| {
            u64::try_from(value).map_err(|_| self.wrong(format!("column `{name}` has {value} {what}")))
        };
        let mut start = number("as its offset", meta.data_page_offset())?;
        let dictionary = meta.dictionary_page_offset().map(|offset| number("as its dictionary's offset", offset));
        // Some writers put 0 for "no dictionary".
        let dictionary = dictionary.transpose()?.filter(|offset| *offset > 0 && *offset < start);
        if let Some(offset) = dictionary {
            start = offset;
        }
        let mut len = number("bytes", meta.compressed_size())?;
        let mut uncompressed = number("bytes when unpacked", meta.uncompressed_size())?;
        if uncompressed == 0 {
            // DuckDB left it out once.
            let unpacked = self.footer.blob().and_then(|content| scan::all_unpacked(&content, start, len));
            uncompressed = unpacked.unwrap_or(0);
        }
        let uncounted = self.uncounted_header(start, len);
        (len, uncompressed) = (len.saturating_add(uncounted), uncompressed.saturating_add(uncounted));
        let values = number("values", meta.num_values())?;
        if values < rows {
            return Err(self.wrong(format!("column `{name}` has {values} values for {rows} rows")));
        }
        if start.checked_add(len).is_none_or(|end| end > self.footer.len) {
            let message = format!("row group {}: column `{name}` ends behind the end of the file", self.number);
            return Err(Error::new(ErrorKind::Truncated, Stage::Index, message).with_range(start, len));
        }
        if meta.file_path().is_some_and(|path| !path.is_empty()) {
            return Err(self.wrong(format!("column `{name}` lies in another file")));
        }
        let compression = meta.compression();
        if !Codec::knows(compression) {
            return Err(self.wrong(format!("column `{name}` is compressed by {compression}, which is not supported")));
        }
        // Some writers name a dictionary only in the encodings.
        let coded = |encoding| matches!(encoding, Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY);
        let has_dictionary = dictionary.is_some() || meta.encodings().any(coded);
        let mut place = Place {
            dictionary: None,
            data: (start, len),
            has_dictionary,
            uncompressed,
            unpacked_dictionary: 0,
            payload: None,
            values,
            compression,
            first_row: 0,
            rows,
        };
        if outgrows_pages(meta) {
            let said = meta.unencoded_byte_array_data_bytes().and_then(|bytes| u64::try_from(bytes).ok());
            place.payload = said.or_else(|| self.counted_payload(index, &place));
        }
        Ok(place)
    }

    /// Bytes of the dictionary's header that the footer does not count, as with parquet-mr before 1.2.9.
    fn uncounted_header(&self, start: u64, len: u64) -> u64 {
        let writer = self.footer.meta.file_metadata().created_by().unwrap_or_default();
        let content = if leaves_out_headers(writer) { self.footer.blob() } else { None };
        content.and_then(|content| scan::uncounted_header(&content, start, len)).unwrap_or(0)
    }

    fn counted_payload(&self, index: usize, place: &Place) -> Option<u64> {
        scan::payload(&self.footer.blob()?, &self.footer.leaves[self.columns[index]].descr, place)
    }
}

/// Whether this writer has the bug PARQUET-816: `parquet-mr` without a version or before 1.2.9.
fn leaves_out_headers(writer: &str) -> bool {
    let Some(rest) = writer.strip_prefix("parquet-mr") else { return false };
    let version = rest.trim_start().strip_prefix("version ").unwrap_or("0");
    let number =
        |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0_u32);
    let numbers: Vec<u32> = version.split('.').take(3).map(number).collect();
    numbers.as_slice() < [1, 2, 9].as_slice()
}

impl Parquet {
    pub(super) fn add_group(&mut self, file: u32, cut: &Cut<'_>) -> Result<()> {
        let rows = cut.rows()?;
        if rows == 0 {
            return Ok(());
        }
        let places: Box<[Place]> = (0..cut.columns.len()).map(|index| cut.whole(index)).collect::<Result<_>>()?;
        let bytes = self.bytes_of(cut, &places, rows);
        let runs = if bytes.opened > cut.limit { self.runs(cut, &places, rows, bytes.opened) } else { None };
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

    fn add_chunk(&mut self, file: u32, cut: &Cut<'_>, rows: Range<u64>, places: Box<[Place]>, bytes: ChunkBytes) {
        let count = rows.end - rows.start;
        self.sample_bytes_max = self.sample_bytes_max.max(bytes.opened / count.max(1));
        self.starts.push(self.starts.last().expect("starts with 0") + count);
        self.chunks.push(Chunk { file, group: cut.number as u32, rows, places, bytes });
    }

    /// Cuts the row group into runs of rows within the limit, with their pages; `None` without an offset index.
    #[allow(clippy::type_complexity, reason = "a list of runs, each with its columns")]
    fn runs(&self, cut: &Cut<'_>, whole: &[Place], rows: u64, opened: u64) -> Option<Vec<(Range<u64>, Box<[Place]>)>> {
        let index = cut.footer.meta.page_index_for_row_group(cut.number);
        let content = cut.footer.blob()?;
        let dictionary = |(leaf, whole): (usize, &Place)| {
            let first = index.page_locations(cut.columns[leaf])?.first()?.offset;
            let before = u64::try_from(first).ok()?.checked_sub(whole.data.0)?;
            if before == 0 {
                Some(0)
            } else {
                Some(scan::page_sizes(&content, [(whole.data.0, before)].into_iter())?.0)
            }
        };
        let unpacked: Vec<u64> = whole.iter().enumerate().map(dictionary).collect::<Option<_>>()?;
        // Every run unpacks the dictionaries again, so a run smaller than them costs more than it saves.
        let limit = unpacked.iter().copied().fold(0, u64::saturating_add).max(cut.limit);
        let parts = opened.div_ceil(limit).clamp(1, rows);
        let step = rows.div_ceil(parts);
        let mut runs = Vec::new();
        for start in (0..rows).step_by(usize::try_from(step).ok()?) {
            let range = start..(start + step).min(rows);
            let place = |(leaf, whole): (usize, &Place)| {
                let pages = index.offset_index(cut.columns[leaf])?;
                let mut place = pages_of(whole, pages.page_locations(), &range, rows, cut.footer.len)?;
                place.unpacked_dictionary = unpacked[leaf];
                self.size_run(cut, leaf, &mut place, pages, &content);
                Some(place)
            };
            runs.push((range.clone(), whole.iter().enumerate().map(place).collect::<Option<_>>()?));
        }
        Some(runs)
    }

    /// Sets the maximum unpacked bytes of a run's pages, which the offset index does not give. Fixed-width values, and
    /// byte arrays with sizes in the index, take at most their own bytes and levels. For others the page headers are
    /// read.
    fn size_run(&self, cut: &Cut<'_>, leaf: usize, run: &mut Place, pages: &OffsetIndexMetaData, content: &Blob) {
        let descr = &cut.footer.leaves[cut.columns[leaf]].descr;
        let here = || pages.page_locations().iter().filter(|page| run.holds(page.offset));
        let payload = payload(run, pages);
        let kind = self.fields.iter().find(|field| field.columns.contains(&leaf)).map(|field| field.kind);
        let (values, each) = match (descr.physical_type(), kind) {
            (Type::BYTE_ARRAY, _) => (payload.map(|_| run.rows), 4),
            // The number of values in these lists is unknown.
            (_, Some(FieldKind::Ragged { .. }) | None) => (None, 0),
            (of, Some(FieldKind::Array { list, .. })) => {
                let each = if of == Type::FIXED_LEN_BYTE_ARRAY { descr.type_length().max(4) as u64 } else { 8 };
                (Some(run.rows.saturating_mul(list as u64)), each)
            }
        };
        let most = run.uncompressed;
        let bytes = if let Some(values) = values.map(|values| values.min(run.values)) {
            let levels = values.saturating_mul(4);
            let data = values.saturating_mul(each).saturating_add(payload.unwrap_or(0));
            data.saturating_add(levels).saturating_add(here().count() as u64 * 4096)
        } else {
            let size = |page: &PageLocation| {
                Some((u64::try_from(page.offset).ok()?, u64::try_from(page.compressed_page_size).ok()?))
            };
            let sizes: Option<Vec<_>> = here().map(size).collect();
            let sizes = sizes.and_then(|sizes| scan::page_sizes(content, sizes.into_iter()));
            let (bytes, values) = sizes.unwrap_or((most, run.values));
            run.values = values.min(run.values);
            bytes
        };
        run.uncompressed = bytes.min(most);
        if outgrows_pages(cut.column(leaf)) {
            run.payload = payload.or_else(|| cut.counted_payload(leaf, run));
        }
    }

    /// Sizes of a chunk with these pages.
    fn bytes_of(&self, cut: &Cut<'_>, places: &[Place], rows: u64) -> ChunkBytes {
        let mut bytes = ChunkBytes::default();
        for place in places {
            let dictionary = place.dictionary.map_or(0, |(_, len)| len);
            bytes.encoded = bytes.encoded.saturating_add(place.data.1).saturating_add(dictionary);
        }
        for field in &self.fields {
            let columns = field.columns.clone();
            match field.kind {
                FieldKind::Array { keep, list, .. } => {
                    let row = (columns.len() * keep).saturating_mul(list) as u64;
                    bytes.opened = bytes.opened.saturating_add(rows.saturating_mul(row));
                }
                FieldKind::Ragged { keep, .. } => {
                    let ragged = ragged_bytes(cut.column(columns.start), &places[columns.start], keep as u64);
                    bytes.opened = bytes.opened.saturating_add(ragged);
                }
            }
        }
        bytes.scratch = self.scratch_of(cut, places, rows);
        bytes
    }

    /// Heap that a worker needs to open a chunk: the values of the columns interleaved at once, and the memory for
    /// reading one column.
    fn scratch_of(&self, cut: &Cut<'_>, places: &[Place], rows: u64) -> u64 {
        let (mut together, mut reader) = (0, 0);
        for field in &self.fields {
            for columns in field.columns.clone().collect::<Vec<_>>().chunks(TOGETHER) {
                let arena = |leaf: &usize| match field.kind {
                    FieldKind::Ragged { .. } => 0,
                    FieldKind::Array { width, list, .. } => {
                        let (meta, plain) = (cut.column(*leaf), is_plain(cut.column(*leaf)));
                        let in_place = plain && meta.compression() == Compression::UNCOMPRESSED;
                        if in_place { 0 } else { rows.saturating_mul((width * list) as u64) }
                    }
                };
                together = columns.iter().map(arena).fold(0, u64::saturating_add).max(together);
            }
        }
        for (leaf, place) in places.iter().enumerate() {
            reader = reader_bytes(cut.column(leaf), place, rows).max(reader);
        }
        together.saturating_add(reader)
    }
}

/// Bytes of the byte arrays in a run's pages, if the index has them.
fn payload(run: &Place, pages: &OffsetIndexMetaData) -> Option<u64> {
    let sizes = pages.page_locations().iter().zip(pages.unencoded_byte_array_data_bytes()?);
    let mut here = sizes.filter(|(page, _)| run.holds(page.offset)).map(|(_, bytes)| u64::try_from(*bytes).ok());
    here.try_fold(0_u64, |sum, bytes| sum.checked_add(bytes?))
}

/// Whether values may exceed the unpacked pages, although each dictionary entry counts once.
fn outgrows_pages(meta: &ColumnChunkMetaData) -> bool {
    meta.column_type() == Type::BYTE_ARRAY && is_prefix_coded(meta)
}

fn is_prefix_coded(meta: &ColumnChunkMetaData) -> bool {
    meta.encodings().any(|encoding| encoding == Encoding::DELTA_BYTE_ARRAY)
}

/// Open bytes of a column of byte arrays or lists.
fn ragged_bytes(meta: &ColumnChunkMetaData, place: &Place, keep: u64) -> u64 {
    if meta.column_type() != Type::BYTE_ARRAY {
        return place.values.saturating_mul(keep);
    }
    place.uncompressed.saturating_add(place.unpacked_dictionary).saturating_add(place.payload.unwrap_or(0))
}

/// Whether values can be copied straight from every page, according to the footer.
fn is_plain(meta: &ColumnChunkMetaData) -> bool {
    let plain = |encoding| matches!(encoding, Encoding::PLAIN | Encoding::RLE);
    let descr = meta.column_descr();
    let defined = descr.max_def_level() == 0 || meta.statistics().and_then(Statistics::null_count_opt) == Some(0);
    descr.max_rep_level() == 0 && meta.column_type() != Type::BOOLEAN && defined && meta.encodings().all(plain)
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

/// Heap for a column that goes through the column reader: an unpacked page twice, dictionary, values, levels.
fn reader_bytes(meta: &ColumnChunkMetaData, place: &Place, rows: u64) -> u64 {
    if is_plain(meta) {
        return if place.compression == Compression::UNCOMPRESSED { 0 } else { place.uncompressed };
    }
    let values = if meta.column_descr().max_rep_level() == 0 { rows } else { place.values };
    let width = value_bytes(meta);
    let dictionary = if place.unpacked_dictionary > 0 { place.unpacked_dictionary } else { place.uncompressed };
    // A dictionary entry is the value of some row and has a four-byte length before it.
    let entries = if place.has_dictionary { place.values.min(dictionary / 4) } else { 0 };
    // A value stored in parts is assembled in its own heap allocation.
    let whole = if meta.column_type() == Type::BYTE_ARRAY {
        place.payload.unwrap_or(0)
    } else {
        values.saturating_mul(meta.column_descr().type_length().max(0) as u64)
    };
    let whole = if is_prefix_coded(meta) { whole.saturating_add(values.saturating_mul(32)) } else { 0 };
    let pages = place.uncompressed.saturating_mul(2).saturating_add(place.unpacked_dictionary).saturating_add(whole);
    pages.saturating_add(values.saturating_mul(width + 4)).saturating_add(entries.saturating_mul(width))
}

/// The part of a column with `range` of the row group's `rows`, by its pages. `None` if the index is inconsistent.
fn pages_of(whole: &Place, pages: &[PageLocation], range: &Range<u64>, rows: u64, file_len: u64) -> Option<Place> {
    let first_row = |page: usize| pages.get(page).map_or(Some(rows), |page| u64::try_from(page.first_row_index).ok());
    let starts: Vec<u64> = (0..=pages.len()).map(first_row).collect::<Option<_>>()?;
    if starts[0] != 0 || starts.windows(2).any(|pair| pair[0] > pair[1]) {
        return None;
    }
    let first = starts.partition_point(|start| *start <= range.start) - 1;
    let last = starts[..pages.len()].partition_point(|start| *start < range.end) - 1;
    let offset = |page: usize| u64::try_from(pages[page].offset).ok();
    let start = offset(first)?;
    let end = offset(last)?.checked_add(u64::try_from(pages[last].compressed_page_size).ok()?)?;
    let (whole_start, whole_end) = (whole.data.0, whole.data.0 + whole.data.1);
    if start < whole_start || end > whole_end || end > file_len || start >= end {
        return None;
    }
    let before = offset(0)?.checked_sub(whole_start)?;
    Some(Place {
        dictionary: (before > 0).then_some((whole_start, before)),
        data: (start, end - start),
        has_dictionary: before > 0,
        uncompressed: whole.uncompressed,
        unpacked_dictionary: whole.uncompressed,
        payload: None,
        values: whole.values,
        compression: whole.compression,
        first_row: starts[first],
        rows: starts[last + 1] - starts[first],
    })
}
