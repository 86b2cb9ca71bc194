//! The segments of a JPEG before and behind the scan.
//!
//! Invariants: every length is checked against the file before its bytes are touched. The codes of a picture from
//! [`Picture::parse`] can be walked (one scan of all components, tables present, size within the limits).

use super::huffman::Table;
use super::{Reason, RestartOptions};
use crate::error::{Error, ErrorKind, Result, Stage};
use std::ops::Range;

/// Limit of blocks in an interleaved MCU (B.2.3 of the standard).
const BLOCKS_MAX: usize = 10;

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

/// One block of an MCU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Index of the component in the scan.
    pub(super) component: usize,
    /// Index of the DC table in [`Picture::tables`].
    pub(super) dc: usize,
    /// Index of the AC table in [`Picture::tables`].
    pub(super) ac: usize,
}

/// The content of the header.
pub(super) struct Picture {
    /// The bytes up to the scan header, including fill bytes.
    pub(super) pieces: Vec<(Piece, Range<usize>)>,
    /// The scan header: marker and segment.
    pub(super) scan_header: Range<usize>,
    /// First byte of the entropy-coded data.
    pub(super) data: usize,
    /// DC tables 0 to 3, then AC tables 0 to 3.
    pub(super) tables: [Option<Table>; 8],
    /// MCUs between two restart markers; 0: none.
    pub(super) interval: u32,
    pub(super) blocks: Vec<Block>,
    pub(super) mcus_per_row: u32,
    pub(super) mcus: u64,
}

/// Either a picture, or why its bytes stay unchanged.
pub(super) type Parsed = std::result::Result<Picture, Reason>;

/// A component of the frame header: identifier, horizontal and vertical factor.
type Component = (u8, u32, u32);

struct Frame {
    width: u32,
    height: u32,
    components: Vec<Component>,
}

/// An error at `offset`.
pub(super) fn bad(message: impl Into<String>, offset: usize, len: usize) -> Error {
    Error::new(ErrorKind::Decode, Stage::Decode, message).with_range(offset as u64, len as u64)
}

fn truncated(message: &str, input: &[u8]) -> Error {
    Error::new(ErrorKind::Truncated, Stage::Decode, message).with_range(input.len() as u64, 0)
}

/// A segment: its marker's code, its start (including fill bytes), and its body.
pub(super) struct Segment {
    pub(super) marker: u8,
    pub(super) at: usize,
    pub(super) body: Range<usize>,
}

impl Segment {
    /// Reads the segment that starts at `at`.
    pub(super) fn read(input: &[u8], at: usize) -> Result<Self> {
        let cut = || truncated("the JPEG is cut in its header", input);
        let fill = input.get(at..).ok_or_else(cut)?.iter().take_while(|byte| **byte == 0xFF).count();
        let marker = *input.get(at + fill).ok_or_else(cut)?;
        if fill == 0 || marker == 0 {
            return Err(bad(format!("a marker expected, 0x{:02x} found", input[at]), at, 1));
        }
        let start = at + fill + 1;
        if matches!(marker, 0x01 | 0xD0..=0xD9) {
            return Ok(Self { marker, at, body: start..start });
        }
        let length = input.get(start..start + 2).ok_or_else(cut)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        if length < 2 {
            return Err(bad(format!("a segment of {length} bytes, at least 2 expected"), start, 2));
        }
        if start + length > input.len() {
            return Err(cut());
        }
        Ok(Self { marker, at, body: start + 2..start + length })
    }

    fn bytes<'a>(&self, input: &'a [u8]) -> &'a [u8] {
        &input[self.body.clone()]
    }

    fn bad(&self, message: impl Into<String>) -> Error {
        bad(message, self.at, self.body.end - self.at)
    }
}

impl Picture {
    pub(super) fn parse(input: &[u8], options: &RestartOptions) -> Result<Parsed> {
        const START: [u8; 3] = [0xFF, 0xD8, 0xFF];
        if START.starts_with(&input[..input.len().min(3)]) && input.len() < 3 {
            return Err(truncated("the file is too short to be recognised", input));
        }
        if !input.starts_with(&START) {
            return Ok(Err(Reason::NotJpeg));
        }
        let mut pieces = vec![(Piece::Kept, 0..2)];
        let mut frame: Option<Frame> = None;
        let mut tables: [Option<Table>; 8] = Default::default();
        let (mut interval, mut at) = (0, 2);
        loop {
            let segment = Segment::read(input, at)?;
            let mut piece = Piece::Kept;
            match segment.marker {
                0xC4 => {
                    read_tables(input, &segment, &mut tables)?;
                    piece = Piece::Tables;
                }
                0xDD => {
                    interval = read_interval(input, &segment)?;
                    piece = Piece::Interval;
                }
                0xC0 | 0xC1 if frame.is_none() => match Frame::read(input, &segment, options)? {
                    Ok(found) => frame = Some(found),
                    Err(reason) => return Ok(Err(reason)),
                },
                0xC0 | 0xC1 => return Err(segment.bad("a second frame header")),
                0xC2 => return Ok(Err(Reason::Progressive)),
                0xC3 | 0xF7 => return Ok(Err(Reason::Lossless)),
                0xC9..=0xCB => return Ok(Err(Reason::Arithmetic)),
                0xC5..=0xC7 | 0xCD..=0xCF | 0xDE | 0xDF => return Ok(Err(Reason::Hierarchical)),
                0xDA => {
                    let frame = frame.ok_or_else(|| segment.bad("a scan without a frame header"))?;
                    return finish(input, pieces, &segment, &frame, tables, interval);
                }
                0x01 | 0xCC | 0xDB | 0xDC | 0xE0..=0xEF | 0xFE => {}
                0xD9 => return Err(segment.bad("the JPEG ends before its first scan")),
                marker => return Err(segment.bad(format!("marker 0x{marker:02x} is not allowed in the header"))),
            }
            at = segment.body.end;
            keep(&mut pieces, piece, segment.at..at);
        }
    }
}

/// Adjacent pieces of one kind are merged, so that a file of tiny segments takes little memory.
fn keep(pieces: &mut Vec<(Piece, Range<usize>)>, piece: Piece, range: Range<usize>) {
    match pieces.last_mut() {
        Some((last, before)) if *last == piece => before.end = range.end,
        _ => pieces.push((piece, range)),
    }
}

fn read_tables(input: &[u8], segment: &Segment, tables: &mut [Option<Table>; 8]) -> Result<()> {
    let mut rest = segment.bytes(input);
    while let Some((which, body)) = rest.split_first() {
        let offset = segment.body.end - rest.len();
        let (class, index) = (which >> 4, which & 15);
        if class > 1 || index > 3 {
            return Err(bad(format!("a Huffman table of class {class}, number {index}"), offset, 1));
        }
        let (table, after) = Table::parse(body, offset + 1)?;
        tables[usize::from(class * 4 + index)] = Some(table);
        rest = after;
    }
    Ok(())
}

fn read_interval(input: &[u8], segment: &Segment) -> Result<u32> {
    match segment.bytes(input) {
        [high, low] => Ok(u32::from(u16::from_be_bytes([*high, *low]))),
        body => Err(segment.bad(format!("a restart interval of {} bytes, 2 expected", body.len()))),
    }
}

impl Frame {
    fn read(input: &[u8], segment: &Segment, options: &RestartOptions) -> Result<std::result::Result<Self, Reason>> {
        let [bits, h1, h0, w1, w0, count, rest @ ..] = segment.bytes(input) else {
            return Err(segment.bad("the frame header is cut"));
        };
        let size = |high: &u8, low: &u8| u32::from(u16::from_be_bytes([*high, *low]));
        let (width, height) = (size(w1, w0), size(h1, h0));
        let factors = rest.as_chunks::<3>().0;
        if *bits != 8 {
            return Ok(Err(Reason::Bits(*bits)));
        }
        if width == 0 || !matches!(count, 1..=4) || rest.len() != 3 * usize::from(*count) {
            let message = format!("a frame header of {width}x{height} pixels, {count} components");
            return Err(segment.bad(message));
        }
        if height == 0 {
            return Ok(Err(Reason::NoHeight));
        }
        if u64::from(width) * u64::from(height) > options.pixels {
            let message = format!("{width}x{height} pixels; at most {} are allowed", options.pixels);
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        let components: Vec<Component> =
            factors.iter().map(|[id, both, _]| (*id, u32::from(both >> 4), u32::from(both & 15))).collect();
        for (index, (id, horizontal, vertical)) in components.iter().enumerate() {
            if !(1..=4).contains(horizontal) || !(1..=4).contains(vertical) {
                return Err(segment.bad(format!("sampling factors {horizontal}x{vertical}, 1 to 4 expected")));
            }
            if components[..index].iter().any(|(other, ..)| other == id) {
                return Err(segment.bad(format!("two components are called {id}")));
            }
        }
        Ok(Ok(Self { width, height, components }))
    }

    /// MCUs of a row and of the picture, in a scan of all components.
    fn mcus(&self) -> (u32, u64) {
        let most = |side: fn(&Component) -> u32| self.components.iter().map(side).max().unwrap_or(1);
        // A scan of a single component is not interleaved: its MCU is one block, whatever the factors.
        let (h, v) = if self.components.len() == 1 { (1, 1) } else { (most(|c| c.1), most(|c| c.2)) };
        let (columns, rows) = (self.width.div_ceil(8 * h), self.height.div_ceil(8 * v));
        (columns, u64::from(columns) * u64::from(rows))
    }
}

/// Reads the scan header.
fn finish(
    input: &[u8],
    pieces: Vec<(Piece, Range<usize>)>,
    segment: &Segment,
    frame: &Frame,
    tables: [Option<Table>; 8],
    interval: u32,
) -> Result<Parsed> {
    let body = segment.bytes(input);
    let count = body.first().map_or(0, |count| usize::from(*count));
    if !(1..=4).contains(&count) || body.len() != 4 + 2 * count {
        return Err(segment.bad(format!("a scan header of {} bytes for {count} components", body.len())));
    }
    if body[1 + 2 * count..] != [0, 63, 0] {
        return Err(segment.bad("a scan of part of the coefficients in a sequential JPEG"));
    }
    if count < frame.components.len() {
        return Ok(Err(Reason::SeveralScans));
    }
    let mut blocks = Vec::with_capacity(BLOCKS_MAX);
    for (component, [id, selectors]) in body[1..1 + 2 * count].as_chunks::<2>().0.iter().enumerate() {
        // The standard requires the order of the frame; so each component occurs once.
        let (_, horizontal, vertical) = match frame.components.get(component) {
            Some(found) if found.0 == *id => found,
            _ => return Err(segment.bad(format!("component {id} of the scan is not in the frame header's order"))),
        };
        let (dc, ac) = (usize::from(selectors >> 4), 4 + usize::from(selectors & 15));
        for index in [dc, ac] {
            let there = if index == dc { dc < 4 } else { ac < 8 } && tables[index].is_some();
            if !there {
                return Err(segment.bad(format!("component {id} needs a Huffman table that is missing")));
            }
        }
        let here = if count == 1 { 1 } else { horizontal * vertical };
        blocks.extend((0..here).map(|_| Block { component, dc, ac }));
    }
    if blocks.len() > BLOCKS_MAX {
        return Err(segment.bad(format!("{} blocks in an MCU, at most {BLOCKS_MAX} expected", blocks.len())));
    }
    let (mcus_per_row, mcus) = frame.mcus();
    let (scan_header, data) = (segment.at..segment.body.end, segment.body.end);
    Ok(Ok(Picture { pieces, scan_header, data, tables, interval, blocks, mcus_per_row, mcus }))
}

/// Checks the segments behind the scan, from its marker at `at` on: tables and comments, then the end. Bytes after the
/// end are ignored.
pub(super) fn check_tail(input: &[u8], mut at: usize) -> Result<Option<Reason>> {
    loop {
        let segment = Segment::read(input, at)?;
        match segment.marker {
            0xD9 => return Ok(None),
            0xDA => return Ok(Some(Reason::SeveralScans)),
            0x01 | 0xC4 | 0xDB..=0xDD | 0xE0..=0xEF | 0xFE => at = segment.body.end,
            marker => return Err(segment.bad(format!("the end of the picture expected, marker 0x{marker:02x} found"))),
        }
    }
}
