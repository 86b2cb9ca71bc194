//! Offset indexes, trusted only if the pages agree: before a row group is cut by its index, the
//! place, size and rows of each page are compared with the page's header, with its neighbours and
//! with the column chunk.
//!
//! ```text
//! index:  │ offset, size, first row │ …      every entry ends where the next begins
//! pages:  │ header: size, values, rows │ …   lists in pages of version 1: rows are counted in the repetition levels
//! ```
//!
//! Limits: a contradiction is not an error; the row group is then read as a whole, as without an
//! index. A failed read is an error, so that cuts never depend on the storage.

use super::column::ValuePlace;
use super::page::{Header, PageKind, RLE, Thrift};
use super::scan::{HEAD, HEAD_MAX};
use super::unpack::Codec;
use feedline_base::error::Result;
use feedline_core::dataset::parallel::{by_threads, parallel};
use feedline_core::storage::Blob;
use parquet::basic::Compression;
use parquet::file::page_index::offset_index::OffsetIndexMetaData;
use parquet::schema::types::ColumnDescPtr;
use std::io::Read;

/// Bytes of a compressed page that are searched for its levels before the whole page is read.
const LEVELS: u64 = 16 << 10;
const OBJECT_THREADS: usize = 32;

/// A data page, as both the index and its header describe it.
#[derive(Clone, Debug)]
pub(super) struct DataPage {
    pub(super) offset: u64,
    /// Length with the header.
    pub(super) len: u64,
    pub(super) first_row: u64,
    pub(super) uncompressed: u64,
    pub(super) values: u64,
    /// Bytes of its byte arrays, if the index has them.
    pub(super) payload: Option<u64>,
}

/// The data pages of a column chunk, and its dictionary before them.
pub(super) struct Pages {
    /// Stored and unpacked bytes; 0 without a dictionary.
    pub(super) dictionary: (u64, u64),
    pub(super) data: Vec<DataPage>,
}

/// A column chunk with its offset index.
pub(super) struct Claim<'a> {
    pub(super) descr: &'a ColumnDescPtr,
    pub(super) whole: &'a ValuePlace,
    pub(super) index: &'a OffsetIndexMetaData,
    pub(super) rows: u64,
}

/// A result, or the reason why the index is not used.
pub(super) type Checked<T> = std::result::Result<T, String>;

/// Compares the indexes of all chosen columns of a row group with the pages.
///
/// Errors: a failed read.
pub(super) fn check(blob: &Blob, claims: &[Claim<'_>]) -> Result<Checked<Vec<Pages>>> {
    let mut columns = Vec::with_capacity(claims.len());
    for claim in claims {
        match claim.pages() {
            Ok(pages) => columns.push(pages),
            Err(reason) => return Ok(Err(claim.named(&reason))),
        }
    }
    let pages = claims.iter().zip(&columns).flat_map(|(claim, pages)| {
        let ends = pages
            .data
            .iter()
            .skip(1)
            .map(|page| page.first_row)
            .chain([claim.rows]);
        pages
            .data
            .iter()
            .zip(ends)
            .enumerate()
            .map(move |(number, (page, end))| (claim, number, page, end))
    });
    let pages: Vec<_> = pages.collect();
    let look = |_, (claim, number, page, end): (&Claim<'_>, usize, &DataPage, u64)| {
        let head = head(blob, page, claim, end - page.first_row)?;
        Ok(head.map_err(|reason| claim.named(&format!("page {number}: {reason}"))))
    };
    let heads = if blob.is_object() {
        by_threads(OBJECT_THREADS, pages, look)?
    } else {
        parallel(pages, look)?
    };
    let mut heads = heads.into_iter();
    for (claim, pages) in claims.iter().zip(&mut columns) {
        for (page, head) in pages.data.iter_mut().zip(&mut heads) {
            match head {
                Ok(header) => {
                    (page.uncompressed, page.values) =
                        (header.uncompressed as u64, header.values as u64)
                }
                Err(reason) => return Ok(Err(reason)),
            }
        }
        if pages.dictionary.0 > 0 {
            match dictionary(blob, claim.whole.data.0, pages.dictionary.0)? {
                Ok(unpacked) => pages.dictionary.1 = unpacked,
                Err(reason) => return Ok(Err(claim.named(&reason))),
            }
        }
    }
    Ok(Ok(columns))
}

impl Claim<'_> {
    fn named(&self, reason: &str) -> String {
        format!("column `{}`: {reason}", self.descr.path().string())
    }

    /// The pages, if they and their rows follow each other without gaps from the chunk's start to
    /// its end.
    fn pages(&self) -> Checked<Pages> {
        let start = self.whole.data.0;
        let end = self.whole.data.0 + self.whole.data.1;
        let payloads = self.index.unencoded_byte_array_data_bytes();
        let mut data = Vec::new();
        let mut dictionary = 0;
        let mut at = start;
        let mut row = 0;
        for (number, said) in self.index.page_locations().iter().enumerate() {
            let place = || {
                let offset = u64::try_from(said.offset).ok()?;
                let len = u64::try_from(said.compressed_page_size).ok()?;
                Some((offset, len, u64::try_from(said.first_row_index).ok()?))
            };
            let (offset, len, first_row) =
                place().ok_or_else(|| format!("page {number} has a negative number"))?;
            if number == 0 {
                dictionary = offset
                    .checked_sub(start)
                    .ok_or("the pages begin before the column")?;
                at = offset;
            }
            if offset != at {
                return Err(format!(
                    "page {number} begins at byte {offset}, the page before it ends at {at}"
                ));
            }
            if first_row < row || first_row > self.rows || (number == 0 && first_row > 0) {
                return Err(format!(
                    "page {number} begins with row {first_row} of {}",
                    self.rows
                ));
            }
            at = at.saturating_add(len);
            row = first_row;
            let payload = payloads.and_then(|all| u64::try_from(*all.get(number)?).ok());
            data.push(DataPage {
                offset,
                len,
                first_row,
                uncompressed: 0,
                values: 0,
                payload,
            });
        }
        if data.is_empty() || at != end {
            return Err(format!("the pages end at byte {at}, the column at {end}"));
        }
        Ok(Pages {
            dictionary: (dictionary, 0),
            data,
        })
    }
}

/// Parses the header at `offset`, where `len` bytes follow. Returns it and its length.
fn header(blob: &Blob, offset: u64, len: u64) -> Result<Checked<(Header, u64)>> {
    let mut most = HEAD;
    loop {
        let bytes = blob.read(offset, len.min(most), "a page header")?;
        match Header::parse(&bytes) {
            Ok((header, bytes)) => return Ok(Ok((header, bytes as u64))),
            Err(_) if most < len.min(HEAD_MAX) => most = HEAD_MAX,
            Err(error) => return Ok(Err(error.message().into())),
        }
    }
}

/// Unpacked size of the dictionary page, which must fill the `len` bytes from `offset`.
fn dictionary(blob: &Blob, offset: u64, len: u64) -> Result<Checked<u64>> {
    Ok(header(blob, offset, len)?.and_then(|(header, bytes)| {
        let fills = header.kind == PageKind::Dictionary && bytes + header.compressed as u64 == len;
        fills
            .then_some(header.uncompressed as u64)
            .ok_or(format!("{len} bytes before the pages are not a dictionary"))
    }))
}

/// The page's header, if it has this page's size and rows.
fn head(blob: &Blob, page: &DataPage, claim: &Claim<'_>, rows: u64) -> Result<Checked<Header>> {
    let (header, bytes) = match header(blob, page.offset, page.len)? {
        Ok(found) => found,
        Err(reason) => return Ok(Err(reason)),
    };
    let len = bytes + header.compressed as u64;
    if len != page.len {
        return Ok(Err(format!("{} bytes, its header says {len}", page.len)));
    }
    let nested = claim.descr.max_rep_level();
    let there = match header.kind {
        PageKind::Dictionary | PageKind::Other => return Ok(Err("it is not a data page".into())),
        PageKind::Data | PageKind::DataV2 { .. } if nested == 0 => header.values as u64,
        PageKind::DataV2 { rows, .. } => u64::from(rows),
        PageKind::Data if nested > 1 => return Ok(Err("lists of lists".into())),
        PageKind::Data => match lists(blob, &header, page.offset + bytes, claim.whole.compression)?
        {
            Some(lists) => lists,
            None => return Ok(Err("its levels do not begin with a row".into())),
        },
    };
    Ok(if there == rows {
        Ok(header)
    } else {
        Err(format!("{rows} rows, its header says {there}"))
    })
}

/// Number of lists that begin in a page of version 1. `None` if the first does not begin with the
/// page, or the levels cannot be read.
fn lists(blob: &Blob, header: &Header, body: u64, compression: Compression) -> Result<Option<u64>> {
    if header.rep_encoding != RLE || header.values == 0 {
        return Ok((header.values == 0).then_some(0));
    }
    let len = header.compressed as u64;
    let bytes = blob.read(body, len.min(LEVELS), "the levels of a page")?;
    let found = levels(header, &bytes, compression);
    if found.is_some() || len <= LEVELS {
        return Ok(found.and_then(|levels| zeros(&levels, header.values)));
    }
    let bytes = blob.read(body, len, "the levels of a page")?;
    Ok(levels(header, &bytes, compression).and_then(|levels| zeros(&levels, header.values)))
}

/// The repetition levels at the start of a page of version 1, whose first bytes are `bytes`.
fn levels(header: &Header, bytes: &[u8], compression: Compression) -> Option<Vec<u8>> {
    let mut levels = front(header, bytes, compression, 4)?;
    let len = u32::from_le_bytes(levels[..4].try_into().ok()?) as usize;
    let end = len
        .checked_add(4)
        .filter(|end| *end <= header.uncompressed)?;
    if levels.len() < end {
        levels = front(header, bytes, compression, end)?;
    }
    levels.truncate(end);
    levels.drain(..4);
    Some(levels)
}

/// Unpacks at least the first `need` bytes; `None` if `bytes` yield fewer.
fn front(header: &Header, bytes: &[u8], compression: Compression, need: usize) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    match compression {
        Compression::UNCOMPRESSED => out.extend_from_slice(bytes.get(..need)?),
        Compression::SNAPPY => snappy(bytes, need, &mut out)?,
        // Bytes that were unpacked before the input ended are valid.
        Compression::ZSTD(_) => drop(
            zstd::Decoder::new(bytes)
                .ok()?
                .take(need as u64)
                .read_to_end(&mut out),
        ),
        Compression::GZIP(_) => {
            drop(
                flate2::read::MultiGzDecoder::new(bytes)
                    .take(need as u64)
                    .read_to_end(&mut out),
            );
        }
        _ if bytes.len() == header.compressed => {
            out.try_reserve_exact(header.uncompressed).ok()?;
            out.resize(header.uncompressed, 0);
            Codec::default().unpack(compression, bytes, &mut out).ok()?;
        }
        _ => return None,
    }
    (out.len() >= need).then_some(out)
}

/// Unpacks at least the first `need` bytes of Snappy's raw format.
fn snappy(bytes: &[u8], need: usize, out: &mut Vec<u8>) -> Option<()> {
    let mut thrift = Thrift::new(bytes);
    thrift.varint().ok()?;
    let mut bytes = thrift.rest();
    let number = |bytes: &[u8]| {
        bytes
            .iter()
            .rev()
            .fold(0_usize, |number, byte| number << 8 | usize::from(*byte))
    };
    while out.len() < need {
        let (tag, rest) = bytes.split_first()?;
        let high = usize::from(tag >> 2);
        // Number of bytes after the tag, which hold a length or an offset.
        let extra = match tag & 3 {
            0 => high.saturating_sub(59),
            1 => 1,
            2 => 2,
            _ => 4,
        };
        let (numbers, rest) = rest.split_at_checked(extra)?;
        if tag & 3 == 0 {
            let len = if extra == 0 { high } else { number(numbers) } + 1;
            // A literal may be cut at the end of the bytes.
            let here = len.min(rest.len()).min(need - out.len());
            out.extend_from_slice(&rest[..here]);
            bytes = rest.get(len..).unwrap_or_default();
            continue;
        }
        let (len, back) = match tag & 3 {
            1 => (4 + (high & 7), (high >> 3) << 8 | number(numbers)),
            _ => (high + 1, number(numbers)),
        };
        let start = out.len().checked_sub(back).filter(|_| back > 0)?;
        (start..start + len).for_each(|at| out.push(out[at]));
        bytes = rest;
    }
    Some(())
}

/// Number of zeros among the first `count` one-bit levels in the RLE / bit-packed hybrid. `None`
/// unless the first level is zero.
fn zeros(mut levels: &[u8], count: usize) -> Option<u64> {
    let mut left = count;
    let mut zeros = 0_usize;
    while left > 0 {
        let mut thrift = Thrift::new(levels);
        let run = thrift.varint().ok()?;
        let bytes = thrift.rest();
        let long = usize::try_from(run >> 1).ok()?;
        if run & 1 == 0 {
            let (value, rest) = bytes.split_first()?;
            let here = long.min(left);
            if here == 0 || *value > 1 || (left == count && *value > 0) {
                return None;
            }
            zeros += if *value == 0 { here } else { 0 };
            levels = rest;
            left -= here;
        } else {
            let here = long.saturating_mul(8).min(left);
            let (packed, rest) = bytes.split_at(long.min(bytes.len()));
            if here == 0 || packed.len() < here.div_ceil(8) || (left == count && packed[0] & 1 > 0)
            {
                return None;
            }
            let ones: usize = packed[..here / 8]
                .iter()
                .map(|byte| byte.count_ones() as usize)
                .sum();
            let last = packed
                .get(here / 8)
                .map_or(0, |byte| byte & ((1 << (here % 8)) - 1));
            zeros += here - ones - last.count_ones() as usize;
            levels = rest;
            left -= here;
        }
    }
    Some(zeros as u64)
}
