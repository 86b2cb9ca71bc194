//! Data preparation for training: JPEGs with restart markers, and shards of many small files.
//!
//! ```text
//! folder of classes ──► restart_jpeg per picture ──► tar shards | Parquet shards | the same tree of files
//!                       (all cores, lossless)        Shards
//! ```
//!
//! # Restart markers
//!
//! The codes of a baseline JPEG can only be decoded from the front, so a random crop costs as much as the whole
//! picture. A restart marker lets a decoder begin in the middle. [`restart_jpeg`] inserts one every few MCUs, without a
//! loss. It decodes the Huffman codes and keeps every DCT coefficient. It encodes the DC differences anew where a
//! restart changes them. It makes new Huffman tables if that makes the file smaller, or if a new symbol has no code so
//! far. Any JPEG decoder reads the result, and gets the same pixels.
//!
//! Unchanged byte for byte: all segments except the Huffman tables and the restart interval (EXIF, ICC profiles,
//! Adobe's segment, comments, quantisation tables, the frame and scan header); fill bytes before them; segments between
//! the scan and the end marker; and everything after the end marker. A second picture there, as phones write, still
//! follows. An index of such pictures that counts bytes from the start of the file is not adapted.
//!
//! What may change: the padding of the last byte before a marker; up to two further bytes of padding there are dropped.
//! With new Huffman tables, tables that the scan does not use are dropped.
//!
//! Some files cannot get restart markers by this method. They are returned unchanged, with a [`Reason`], and not
//! checked further: progressive, arithmetic, lossless and hierarchical JPEGs, samples of other than 8 bits, several
//! scans, and files that are no JPEGs.
//!
//! A damaged baseline JPEG is an error with its byte offset: a code that no table has, missing or surplus data, restart
//! markers out of step, a DC coefficient out of range, bytes between segments, no end marker. JPEG has no checksum, so
//! damage that yields other legal codes is not found. The result then decodes to the same damaged pixels as the input.
//!
//! Limits: pixels and bytes as in [`RestartOptions`], checked before memory is allocated. Memory: the output. Time is
//! linear in the input.

mod bits;
mod huffman;
mod job;
mod jpeg;
mod output;
#[cfg(feature = "parquet")]
mod parquet;
mod pictures;
mod shards;
mod tar;
mod transcode;

pub use job::{Check, Event, Finished, Plan, Ran, Tasks};
pub use shards::{Format, Progress, Shards, Summary};

use self::huffman::Codes;
use self::jpeg::{Picture, Piece};
use crate::error::{Error, ErrorKind, Result, Stage};
use std::fmt;
use std::num::NonZeroU16;

/// Where restart markers are inserted, and limits of the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartOptions {
    interval: Option<NonZeroU16>,
    pixels: u64,
    bytes: usize,
}

impl Default for RestartOptions {
    /// The default interval (a divisor of the row), 64 megapixels, 256 MiB.
    fn default() -> Self {
        Self { interval: None, pixels: 64 << 20, bytes: 256 << 20 }
    }
}

impl RestartOptions {
    /// Sets the exact number of MCUs between restarts. Decoding a slice of a picture needs a divisor of the MCUs per
    /// row, as the default is. The default is the divisor from 2 to 8 that is nearest to 4 (5 rather than 3). If there
    /// is none, it is the smallest divisor above 8, which for a prime is the whole row.
    #[must_use]
    pub fn interval(mut self, mcus: NonZeroU16) -> Self {
        self.interval = Some(mcus);
        self
    }

    /// Limit of pixels in a picture.
    #[must_use]
    pub fn pixels_max(mut self, pixels: u64) -> Self {
        self.pixels = pixels;
        self
    }

    /// Limit of bytes in a file.
    #[must_use]
    pub fn bytes_max(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }
}

/// The result of [`restart_jpeg`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The output has restart markers.
    Transcoded {
        /// MCUs between restarts.
        interval: u16,
        /// Whether new Huffman tables were made.
        new_tables: bool,
    },
    /// The output is the input.
    Unchanged {
        /// The reason.
        reason: Reason,
    },
}

/// Why a file stays unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The file does not start like a JPEG.
    NotJpeg,
    /// Progressive: coefficients come in several passes.
    Progressive,
    /// Arithmetic coding.
    Arithmetic,
    /// Lossless JPEG or JPEG-LS.
    Lossless,
    /// Hierarchical: several frames.
    Hierarchical,
    /// This many bits per sample, not 8.
    Bits(u8),
    /// Sequential, but in more than one scan.
    SeveralScans,
    /// The height comes after the scan (DNL).
    NoHeight,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotJpeg => f.write_str("not a JPEG"),
            Self::Progressive => f.write_str("progressive"),
            Self::Arithmetic => f.write_str("arithmetic coding"),
            Self::Lossless => f.write_str("lossless coding"),
            Self::Hierarchical => f.write_str("hierarchical"),
            Self::Bits(bits) => write!(f, "{bits} bits per sample"),
            Self::SeveralScans => f.write_str("several scans"),
            Self::NoHeight => f.write_str("height after the scan"),
        }
    }
}

/// Clears `out` and writes `input` into it with restart markers, or unchanged if that is not possible. Lossless and
/// deterministic: a second pass changes nothing.
///
/// Errors, each with the byte offset: [`ErrorKind::Decode`] and [`ErrorKind::Truncated`] for damaged JPEGs,
/// [`ErrorKind::Limit`] for too many pixels or bytes. `out` is then empty.
///
/// ```
/// use feedline::prepare::{Outcome, RestartOptions, restart_jpeg};
///
/// # let jpeg = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/images/420.jpg")).unwrap();
/// let mut out = Vec::new();
/// match restart_jpeg(&jpeg, &RestartOptions::default(), &mut out)? {
///     Outcome::Transcoded { interval, .. } => println!("{} bytes, restarts every {interval} MCUs", out.len()),
///     Outcome::Unchanged { reason } => println!("unchanged: {reason}"),
///     _ => {}
/// }
/// # Ok::<(), feedline::Error>(())
/// ```
pub fn restart_jpeg(input: &[u8], options: &RestartOptions, out: &mut Vec<u8>) -> Result<Outcome> {
    out.clear();
    if input.len() > options.bytes {
        let message = format!("the file has {} bytes; at most {} are allowed", input.len(), options.bytes);
        return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
    }
    let result = transcode(input, options, out);
    match &result {
        Ok(Outcome::Unchanged { .. }) => {
            out.clear();
            out.extend_from_slice(input);
        }
        Ok(Outcome::Transcoded { .. }) => {}
        Err(_) => out.clear(),
    }
    result
}

fn transcode(input: &[u8], options: &RestartOptions, out: &mut Vec<u8>) -> Result<Outcome> {
    let picture = match Picture::parse(input, options)? {
        Ok(picture) => picture,
        Err(reason) => return Ok(Outcome::Unchanged { reason }),
    };
    let mcus_per_row = picture.header.width.div_ceil(picture.header.mcu().0);
    let interval = options.interval.map_or_else(|| interval_for(mcus_per_row), NonZeroU16::get);
    let counted = transcode::count(input, &picture, interval.into())?;
    if let Some(reason) = jpeg::check_tail(input, counted.end)? {
        return Ok(Outcome::Unchanged { reason });
    }
    let table_pieces = picture.pieces.iter().filter(|(piece, _)| *piece == Piece::Tables);
    let old = picture.scan.tables().map(Codes::new);
    let new = counted.better(&old, table_pieces.map(|(_, range)| range.len()).sum());
    out.reserve(input.len() + input.len() / 16);
    for (piece, range) in &picture.pieces {
        match piece {
            Piece::Tables if new.is_some() => {}
            Piece::Interval => {}
            _ => out.extend_from_slice(&input[range.clone()]),
        }
    }
    if let Some((_, segment)) = &new {
        out.extend_from_slice(segment);
    }
    out.extend([0xFF, 0xDD, 0, 4]);
    out.extend(interval.to_be_bytes());
    out.extend_from_slice(&input[picture.scan_header.clone()]);
    let codes = new.as_ref().map_or(&old, |(codes, _)| codes);
    transcode::emit(input, &picture, codes, interval.into(), out)?;
    out.extend_from_slice(&input[counted.end..]);
    Ok(Outcome::Transcoded { interval, new_tables: new.is_some() })
}

/// The default interval for rows of `mcus_per_row` MCUs; see [`RestartOptions::interval`].
fn interval_for(mcus_per_row: u32) -> u16 {
    let divides = |interval: &u32| mcus_per_row.is_multiple_of(*interval);
    // In this order: nearest to 4 first.
    let near = [4, 5, 3, 6, 2, 7, 8].into_iter().find(divides);
    let far = || (9..=mcus_per_row).find(divides);
    near.or_else(far).unwrap_or(1) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_divides_the_row_and_is_near_4() {
        let table = [
            (1, 1),
            (2, 2),
            (3, 3),
            (4, 4),
            (5, 5),
            (6, 3),
            (7, 7),
            (8, 4),
            (9, 3),
            (11, 11),
            (14, 2),
            (15, 5),
            (20, 4),
            (22, 2),
            (30, 5),
            (31, 31),
            (32, 4),
            (49, 7),
            (121, 11),
            (143, 11),
            (8191, 8191),
            (8192, 4),
        ];
        for (row, interval) in table {
            assert_eq!(interval_for(row), interval, "a row of {row} MCUs");
        }
    }
}
