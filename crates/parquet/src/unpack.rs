//! Unpacks pages: the codecs, and the page source for the parquet crate's column reader.
//!
//! Invariants: a page that does not unpack to exactly the size in its header is an error; [`Pages`]
//! compares a page's sizes with the footer before any allocation for it.

use super::page::{Header, PageKind, Pages};
use bytes::Bytes;
use feedline_base::error::{Error, Result};
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::ParquetError;
use std::io::Read;

/// Unpacks page bodies; keeps the codecs' state between pages.
#[derive(Default)]
pub(super) struct Codec {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Codec {
    /// Whether this compression is supported.
    pub(super) fn knows(compression: Compression) -> bool {
        use Compression::{GZIP, LZ4, LZ4_RAW, SNAPPY, UNCOMPRESSED, ZSTD};
        matches!(
            compression,
            UNCOMPRESSED | SNAPPY | GZIP(_) | LZ4 | LZ4_RAW | ZSTD(_)
        )
    }

    /// Unpacks `body` into `out`. Errors: damage, or a different length.
    pub(super) fn unpack(
        &mut self,
        compression: Compression,
        body: &[u8],
        out: &mut [u8],
    ) -> Result<()> {
        if out.is_empty() {
            // Some writers omit the body of a page with only nulls.
            return Ok(());
        }
        let wrong = |error: Box<dyn std::error::Error + Send + Sync>| {
            Error::decode("a page cannot be unpacked").with_source(error)
        };
        let len = match compression {
            Compression::ZSTD(_) => {
                if self.zstd.is_none() {
                    self.zstd =
                        Some(zstd::bulk::Decompressor::new().map_err(|error| wrong(error.into()))?);
                }
                let zstd = self.zstd.as_mut().expect("made above");
                zstd.decompress_to_buffer(body, out)
                    .map_err(|error| wrong(error.into()))?
            }
            Compression::SNAPPY => snap::raw::Decoder::new()
                .decompress(body, out)
                .map_err(|error| wrong(error.into()))?,
            Compression::LZ4_RAW => {
                lz4_flex::block::decompress_into(body, out).map_err(|error| wrong(error.into()))?
            }
            Compression::LZ4 => match hadoop_lz4(body, out) {
                Some(()) => out.len(),
                // Writers from before LZ4_RAW use the name LZ4 for different encodings.
                None => lz4_flex::block::decompress_into(body, out)
                    .map_err(|error| wrong(error.into()))?,
            },
            Compression::GZIP(_) => gzip(body, out).map_err(|error| wrong(error.into()))?,
            other => {
                return Err(Error::decode(format!(
                    "pages compressed by {other} are not supported"
                )));
            }
        };
        if len != out.len() {
            return Err(Error::decode(format!(
                "a page unpacks to {len} bytes, its header says {}",
                out.len()
            )));
        }
        Ok(())
    }
}

/// Decodes Hadoop's frame: blocks, each preceded by its unpacked and its packed length. `None` if
/// `body` has another form.
fn hadoop_lz4(mut body: &[u8], mut out: &mut [u8]) -> Option<()> {
    while !body.is_empty() {
        let ([a, b, c, d, e, f, g, h], rest) = body.split_first_chunk::<8>()?;
        let unpacked = u32::from_be_bytes([*a, *b, *c, *d]);
        let packed = u32::from_be_bytes([*e, *f, *g, *h]);
        let (block, rest) = rest.split_at_checked(packed as usize)?;
        let (place, left) = out.split_at_mut_checked(unpacked as usize)?;
        if lz4_flex::block::decompress_into(block, place).ok()? != place.len() {
            return None;
        }
        body = rest;
        out = left;
    }
    out.is_empty().then_some(())
}

/// Unpacks one or more gzip members; returns the number of their bytes, or `out.len() + 1` if they
/// do not fit.
fn gzip(body: &[u8], out: &mut [u8]) -> std::io::Result<usize> {
    let mut reader = flate2::read::MultiGzDecoder::new(body);
    let mut len = 0;
    while len < out.len() {
        match reader.read(&mut out[len..])? {
            0 => return Ok(len),
            more => len += more,
        }
    }
    Ok(len + reader.read(&mut [0])?)
}

/// Yields a column's unpacked pages one after the other, the dictionary first.
pub(super) struct Unpacked {
    parts: [Pages; 2],
    compression: Compression,
    codec: Codec,
    /// The dictionary page, if it was peeked at but not returned yet.
    dictionary: Option<Page>,
}

impl Unpacked {
    pub(super) fn new(parts: [Pages; 2], compression: Compression) -> Self {
        Self {
            parts,
            compression,
            codec: Codec::default(),
            dictionary: None,
        }
    }

    /// The unpacked dictionary; values that refer to it are slices of it.
    pub(super) fn dictionary(&mut self) -> Result<Option<Bytes>> {
        if self.dictionary.is_none()
            && self
                .head()?
                .is_some_and(|header| header.kind == PageKind::Dictionary)
        {
            self.dictionary = self.next_page()?;
        }
        Ok(self.dictionary.as_ref().map(|page| page.buffer().clone()))
    }

    /// The one of the two parts that contains the next page.
    fn part(&mut self) -> &mut Pages {
        let [first, second] = &mut self.parts;
        if first.is_empty() { second } else { first }
    }

    /// Header of the next page with values.
    fn head(&mut self) -> Result<Option<Header>> {
        loop {
            match self.part().head()? {
                Some((header, _)) if header.kind == PageKind::Other => {
                    self.part().next()?;
                }
                other => return Ok(other.map(|(header, _)| header)),
            }
        }
    }

    fn next_page(&mut self) -> Result<Option<Page>> {
        if self.head()?.is_none() {
            return Ok(None);
        }
        let [first, second] = &mut self.parts;
        let pages = if first.is_empty() { second } else { first };
        let all = pages.bytes.clone();
        let Some(page) = pages.next()? else {
            return Ok(None);
        };
        let header = page.header;
        let body = page.body;
        let (levels, packed) = match header.kind {
            PageKind::DataV2 {
                def_bytes,
                rep_bytes,
                compressed,
                ..
            } => (def_bytes as usize + rep_bytes as usize, compressed),
            _ => (0, true),
        };
        let buf = if !packed || self.compression == Compression::UNCOMPRESSED {
            all.slice_ref(body)
        } else {
            let mut out = vec![0; header.uncompressed];
            let (Some((before, body)), true) = (body.split_at_checked(levels), levels <= out.len())
            else {
                return Err(Error::decode(format!(
                    "levels of {levels} bytes in a page of {} bytes",
                    out.len()
                )));
            };
            out[..levels].copy_from_slice(before);
            self.codec
                .unpack(self.compression, body, &mut out[levels..])?;
            out.into()
        };
        page_of(header, buf).map(Some)
    }
}

fn encoding(number: i32) -> Result<Encoding> {
    Ok(match number {
        0 => Encoding::PLAIN,
        2 => Encoding::PLAIN_DICTIONARY,
        3 => Encoding::RLE,
        #[allow(deprecated, reason = "levels of old files")]
        4 => Encoding::BIT_PACKED,
        5 => Encoding::DELTA_BINARY_PACKED,
        6 => Encoding::DELTA_LENGTH_BYTE_ARRAY,
        7 => Encoding::DELTA_BYTE_ARRAY,
        8 => Encoding::RLE_DICTIONARY,
        9 => Encoding::BYTE_STREAM_SPLIT,
        other => return Err(Error::decode(format!("encoding {other} is not supported"))),
    })
}

fn page_of(header: Header, buf: Bytes) -> Result<Page> {
    let num_values = header.values as u32;
    let encoded = encoding(header.encoding)?;
    Ok(match header.kind {
        PageKind::Dictionary => Page::DictionaryPage {
            buf,
            num_values,
            encoding: encoded,
            is_sorted: false,
        },
        PageKind::DataV2 {
            nulls,
            rows,
            def_bytes,
            rep_bytes,
            compressed,
        } => Page::DataPageV2 {
            buf,
            num_values,
            encoding: encoded,
            num_nulls: nulls,
            num_rows: rows,
            def_levels_byte_len: def_bytes,
            rep_levels_byte_len: rep_bytes,
            is_compressed: compressed,
            statistics: None,
        },
        PageKind::Data | PageKind::Other => Page::DataPage {
            buf,
            num_values,
            encoding: encoded,
            def_level_encoding: encoding(header.def_encoding)?,
            rep_level_encoding: encoding(header.rep_encoding)?,
            statistics: None,
        },
    })
}

fn outside(error: Error) -> ParquetError {
    ParquetError::External(Box::new(error))
}

impl Iterator for Unpacked {
    type Item = parquet::errors::Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Unpacked {
    fn get_next_page(&mut self) -> parquet::errors::Result<Option<Page>> {
        match self.dictionary.take() {
            Some(page) => Ok(Some(page)),
            None => self.next_page().map_err(outside),
        }
    }

    fn peek_next_page(&mut self) -> parquet::errors::Result<Option<PageMetadata>> {
        if self.dictionary.is_some() {
            return Ok(Some(PageMetadata {
                num_rows: None,
                num_levels: None,
                is_dict: true,
            }));
        }
        let header = self.head().map_err(outside)?;
        Ok(header.map(|header| match header.kind {
            PageKind::Dictionary => PageMetadata {
                num_rows: None,
                num_levels: None,
                is_dict: true,
            },
            PageKind::DataV2 { rows, .. } => PageMetadata {
                num_rows: Some(rows as usize),
                num_levels: Some(header.values),
                is_dict: false,
            },
            PageKind::Data | PageKind::Other => PageMetadata {
                num_rows: None,
                num_levels: Some(header.values),
                is_dict: false,
            },
        }))
    }

    fn skip_next_page(&mut self) -> parquet::errors::Result<()> {
        if self.dictionary.take().is_none() {
            self.head()
                .and_then(|_| self.part().next().map(|_| ()))
                .map_err(outside)?;
        }
        Ok(())
    }
}
