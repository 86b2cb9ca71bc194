//! The segments of a JPEG as the output keeps them, and what the transcoder cannot take.

use super::{Reason, RestartOptions};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::jpeg::{Header, Scan, Segment};
use std::ops::Range;

/// How the output treats a piece of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Always copied.
    Kept,
    /// Huffman tables: copied unless new ones are written.
    Tables,
    /// The restart interval: always written anew.
    Interval,
}

/// A picture whose codes can be walked.
pub(super) struct Picture<'a> {
    /// The bytes up to the scan header, including fill bytes.
    pub(super) pieces: Vec<(Piece, Range<usize>)>,
    /// The scan header: marker and segment.
    pub(super) scan_header: Range<usize>,
    pub(super) header: Header,
    pub(super) scan: Scan<'a>,
}

/// Either a picture, or why its bytes stay unchanged.
type Parsed<'a> = std::result::Result<Picture<'a>, Reason>;

impl<'a> Picture<'a> {
    pub(super) fn parse(input: &'a [u8], options: &RestartOptions) -> Result<Parsed<'a>> {
        const START: [u8; 3] = [0xFF, 0xD8, 0xFF];
        if input.len() < 3 && START.starts_with(input) {
            let error = Error::new(ErrorKind::Truncated, Stage::Decode, "the file is too short to be recognised");
            return Err(error.with_range(input.len() as u64, 0));
        }
        if !input.starts_with(&START) {
            return Ok(Err(Reason::NotJpeg));
        }
        let mut pieces = vec![(Piece::Kept, 0..2)];
        let mut at = 2;
        let (scan_header, coded) = loop {
            let segment = Segment::at(input, at)?;
            let body = &input[segment.start..segment.end];
            if let Some(reason) = reason(segment.marker, body) {
                return Ok(Err(reason));
            }
            if !fits(segment.marker, body) {
                let message = format!("segment 0x{:02x} has {} bytes, which do not fit it", segment.marker, body.len());
                return Err(bad(message, at, segment.end));
            }
            let piece = match segment.marker {
                0xC4 => Piece::Tables,
                0xDD => Piece::Interval,
                0x01 | 0xC0 | 0xC1 | 0xCC | 0xDB | 0xDC | 0xE0..=0xEF | 0xFE => Piece::Kept,
                0xDA => break (at..segment.end, body[0]),
                0xD9 => return Err(bad("the JPEG ends before its first scan", at, segment.end)),
                marker => {
                    let message = format!("marker 0x{marker:02x} is not allowed in the header");
                    return Err(bad(message, at, segment.end));
                }
            };
            keep(&mut pieces, piece, at..segment.end);
            at = segment.end;
        };
        let in_header = |error: Error| error.with_range(0, scan_header.end as u64);
        let header = Header::read(input).map_err(in_header)?;
        let Header { width, height, .. } = header;
        if u64::from(width) * u64::from(height) > options.pixels {
            let message = format!("{width}x{height} pixels; at most {} are allowed", options.pixels);
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        if (1..header.components).contains(&coded) {
            return Ok(Err(Reason::SeveralScans));
        }
        let scan = Scan::read(input, &header).map_err(in_header)?;
        Ok(Ok(Self { pieces, scan_header, header, scan }))
    }
}

fn bad(message: impl Into<String>, at: usize, end: usize) -> Error {
    Error::decode(message.into()).with_range(at as u64, (end - at) as u64)
}

/// Why a picture with this segment stays unchanged.
fn reason(marker: u8, body: &[u8]) -> Option<Reason> {
    match (marker, body) {
        (0xC0 | 0xC1, [bits, ..]) if *bits != 8 => Some(Reason::Bits(*bits)),
        (0xC0 | 0xC1, [_, 0, 0, ..]) if fits(marker, body) => Some(Reason::NoHeight),
        (0xC2, _) => Some(Reason::Progressive),
        (0xC3 | 0xF7, _) => Some(Reason::Lossless),
        (0xC9..=0xCB, _) => Some(Reason::Arithmetic),
        (0xC5..=0xC7 | 0xCD..=0xCF | 0xDE | 0xDF, _) => Some(Reason::Hierarchical),
        _ => None,
    }
}

/// Whether the segment has its length, and the scan all coefficients. The engine is more lenient.
fn fits(marker: u8, body: &[u8]) -> bool {
    match (marker, body) {
        (0xC0 | 0xC1, [_, _, _, _, _, count, rest @ ..]) => rest.len() == 3 * usize::from(*count),
        (0xDA, [count, rest @ ..]) => rest.len() == 2 * usize::from(*count) + 3 && rest.ends_with(&[0, 63, 0]),
        (0xC0 | 0xC1 | 0xDA, _) => false,
        (0xDD, _) => body.len() == 2,
        _ => true,
    }
}

/// Adjacent pieces of one kind are merged, so that a file of tiny segments takes little memory.
fn keep(pieces: &mut Vec<(Piece, Range<usize>)>, piece: Piece, range: Range<usize>) {
    match pieces.last_mut() {
        Some((last, before)) if *last == piece => before.end = range.end,
        _ => pieces.push((piece, range)),
    }
}

/// Checks the segments behind the scan, from its marker at `at` on: tables and comments, then the end. Bytes after the
/// end are ignored.
pub(super) fn check_tail(input: &[u8], mut at: usize) -> Result<Option<Reason>> {
    loop {
        let Segment { marker, end, .. } = Segment::at(input, at)?;
        match marker {
            0xD9 => return Ok(None),
            0xDA => return Ok(Some(Reason::SeveralScans)),
            0x01 | 0xC4 | 0xDB..=0xDD | 0xE0..=0xEF | 0xFE => at = end,
            _ => {
                return Err(bad(format!("the end of the picture expected, marker 0x{marker:02x} found"), at, end));
            }
        }
    }
}
