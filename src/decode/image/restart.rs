//! Cuts a JPEG with restart markers down to the part under a crop, without decoding.
//!
//! ```text
//! header │ seg 0 RST0 seg 1 RST1 │ seg 2 RST2 seg 3 … EOI        segments of `interval` MCUs, each decodable alone
//!                                 ▲      crop
//! smaller header (own size) │ seg 2 RST0 seg 6 RST1 seg 10 … EOI  a complete JPEG, for any decoder
//! ```
//!
//! Entropy decoding can start only at the first byte or at a restart marker. A segment is needed if it has a pixel
//! within [`MARGIN`] of the crop. Chroma is interpolated with its neighbours, so pixels at the border of the smaller
//! picture differ from the whole picture's; those of the crop do not.
//!
//! Only Huffman-coded sequential JPEGs of one scan and 1 or 3 components are cut. Their interval must divide the MCUs
//! of a row, or be a whole number of rows (then only rows are cut). Other files are decoded whole.
//!
//! Invariants: one pass reads all coded bytes and checks the order and number of all restart markers, for any crop. One
//! pass reads the header. The output is at most a constant longer than the input. Bytes inside other segments are not
//! checked; a checksum of the file (of the dataset) has to cover them.

use super::bad;
use super::geometry::{Rect, Size};
use super::jpeg::{END, Header, segment};
use crate::error::Result;

/// Distance at which a pixel may affect the crop: one sample of chroma, two pixels wide. (No decoder here interpolates
/// factors of 4.)
const MARGIN: u32 = 2;

/// Minimum width (3 samples) at which libjpeg-turbo interpolates chroma. The last segments of a row may be narrower.
const NARROW: u32 = 5;

/// Arrangement of a picture's MCUs in segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Grid {
    /// MCUs of a segment.
    interval: u32,
    /// Pixels of a segment.
    segment: Size,
    /// Segments side by side, and from top to bottom.
    columns: u32,
    rows: u32,
}

impl Grid {
    /// `None` if the picture cannot be cut.
    fn of(header: &Header) -> Option<Self> {
        let interval = header.restart();
        if interval == 0 || !header.one_scan() || !matches!(header.components(), 1 | 3) {
            return None;
        }
        let (mcu, size) = (header.coded_mcu(), header.size);
        let (across, down) = (size.width.div_ceil(mcu.width), size.height.div_ceil(mcu.height));
        let (width, rows, columns) = if across.is_multiple_of(interval) {
            (interval, 1, across / interval)
        } else if interval.is_multiple_of(across) {
            (across, interval / across, 1)
        } else {
            return None;
        };
        let segment = Size::new(width * mcu.width, (rows * mcu.height).min(size.height.next_multiple_of(mcu.height)));
        Some(Self { interval, segment, columns, rows: down.div_ceil(rows) })
    }

    /// The segments that hold `rect`, as a rectangle of segments.
    fn segments(&self, rect: Rect) -> Rect {
        let (left, top) = (rect.left / self.segment.width, rect.top / self.segment.height);
        let (right, bottom) = (rect.right().div_ceil(self.segment.width), rect.bottom().div_ceil(self.segment.height));
        Rect { left, top, size: Size::new(right - left, bottom - top) }
    }

    /// The pixels of a rectangle of segments, in a picture of size `picture`.
    fn pixels(&self, segments: Rect, picture: Size) -> Rect {
        let (left, top) = (segments.left * self.segment.width, segments.top * self.segment.height);
        let right = (segments.right() * self.segment.width).min(picture.width);
        let bottom = (segments.bottom() * self.segment.height).min(picture.height);
        Rect { left, top, size: Size::new(right - left, bottom - top) }
    }
}

/// Writes a JPEG with the pixels `needed` of `input` to `out`, and returns its rectangle in `input`.
///
/// `None` if the picture cannot be cut or is needed whole. The old content of `out` is lost in any case.
///
/// Errors, if `strict`: restart markers out of order, too few or too many, or no end marker. Otherwise such a picture
/// is not cut.
pub(super) fn cut(
    input: &[u8],
    header: &Header,
    needed: Rect,
    strict: bool,
    out: &mut Vec<u8>,
) -> Result<Option<Rect>> {
    let Some(grid) = Grid::of(header) else { return Ok(None) };
    let mut segments = grid.segments(needed.widened(MARGIN, header.size));
    if grid.pixels(segments, header.size).size.width < NARROW && segments.left > 0 {
        segments.left -= 1;
        segments.size.width += 1;
    }
    let all = segments.size == Size::new(grid.columns, grid.rows);
    if all && !strict {
        return Ok(None);
    }
    if all {
        // Checks the markers only, because zune accepts them in any order.
        segments.size = Size::new(0, 0);
    }
    out.clear();
    let there = grid.pixels(segments, header.size);
    if !all {
        out.reserve_exact(input.len() + SLACK);
        copy_header(input, header, there.size, out)?;
    }
    match copy_segments(&input[header.scan()..], &grid, segments, out) {
        Ok(()) => Ok((!all).then_some(there)),
        Err(Obstacle::Damage(message)) if strict => Err(bad(message)),
        Err(_) => Ok(None),
    }
}

/// Limits the capacity of `cut`, and returns the limit: the bytes of the encoded picture, or a small share of `memory`.
///
/// So `cut` counts for few heap bytes after any earlier picture.
pub(super) fn bound(cut: &mut Vec<u8>, encoded: usize, memory: usize) -> usize {
    let most = (encoded + SLACK).max(memory / 16);
    if cut.capacity() > most {
        cut.shrink_to_fit();
    }
    most
}

/// Maximum bytes by which a cut JPEG exceeds the whole one.
const SLACK: usize = DRI.len() + 2 + END.len();
const DRI: [u8; 4] = [0xFF, 0xDD, 0, 4];

/// Copies the header's segments for decoding: tables, frame, scan, and the two that define the colours.
fn copy_header(input: &[u8], header: &Header, size: Size, out: &mut Vec<u8>) -> Result<()> {
    out.extend_from_slice(&input[..2]);
    let mut at = 2;
    while at < header.scan() {
        let (marker, start, end) = segment(input, at)?;
        at = end;
        match marker {
            // Skipped: markers without a body; comments, thumbnails, EXIF, profiles; the interval, written below.
            0x01 | 0xD0..=0xD9 | 0xE1..=0xED | 0xEF | 0xFE | 0xDD => continue,
            0xDA => {
                out.extend_from_slice(&DRI);
                out.extend_from_slice(&(header.restart() as u16).to_be_bytes());
            }
            _ => {}
        }
        let from = start - 4;
        if (start..end).contains(&header.height_at()) {
            let place = out.len() + header.height_at() - from;
            out.extend_from_slice(&input[from..end]);
            out[place..place + 2].copy_from_slice(&(size.height as u16).to_be_bytes());
            out[place + 2..place + 4].copy_from_slice(&(size.width as u16).to_be_bytes());
        } else {
            out.extend_from_slice(&input[from..end]);
        }
    }
    Ok(())
}

/// The reason why a picture is not cut.
enum Obstacle {
    /// An unexpected marker, such as another scan's, which the decoder handles.
    Kind,
    Damage(String),
}

/// Copies the `wanted` segments of the coded data, with renumbered restart markers, and the end marker.
fn copy_segments(coded: &[u8], grid: &Grid, wanted: Rect, out: &mut Vec<u8>) -> Result<(), Obstacle> {
    let damage = |message: String| Err(Obstacle::Damage(format!("damaged JPEG: {message}")));
    let count = grid.columns * grid.rows;
    let (mut index, mut column, mut row, mut start) = (0, 0, 0, 0);
    let mut copied = 0_u32;
    for at in memchr::memchr_iter(0xFF, coded) {
        let marker = match coded.get(at + 1) {
            // An escaped data byte, or fill before a marker.
            Some(0 | 0xFF) => continue,
            Some(marker @ (0xD0..=0xD7 | 0xD9)) => *marker,
            Some(_) => return Err(Obstacle::Kind),
            None => break,
        };
        let last = index + 1 == count;
        if (marker == 0xD9) != last {
            return damage(format!("marker {marker:02x} after {} of {count} restart intervals", index + 1));
        }
        if !last && u32::from(marker & 7) != index & 7 {
            return damage(format!("restart marker {} in place of {}", marker & 7, index & 7));
        }
        if (wanted.left..wanted.right()).contains(&column) && (wanted.top..wanted.bottom()).contains(&row) {
            if copied > 0 {
                out.extend_from_slice(&[0xFF, 0xD0 | (copied - 1) as u8 & 7]);
            }
            out.extend_from_slice(&coded[start..at]);
            copied += 1;
        }
        if last {
            out.extend_from_slice(&END);
            return Ok(());
        }
        (index, column, start) = (index + 1, column + 1, at + 2);
        if column == grid.columns {
            (column, row) = (0, row + 1);
        }
    }
    Err(Obstacle::Damage(String::from("JPEG without its end marker: the file is cut")))
}
