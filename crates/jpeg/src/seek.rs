//! Seek points: places in a scan where decoding may begin, stored in the picture or separately.
//!
//! ```text
//! scan:    MCU 0 ……… N ………… 2N ……… 3N ………
//! points:            ▲       ▲      ▲      each: bits since the point before, change of each DC predictor
//!                            └─ a row of a crop begins at the last point before it, and skips the rest
//! ```
//!
//! One more point marks the scan's end.
//!
//! # Format
//!
//! A CRC32C (4 bytes, little-endian), then LEB128 numbers: the number of bytes of coded data, N,
//! and the points. Signed numbers have zigzag encoding. The CRC covers the segments that the codes
//! depend on (frame, Huffman tables, restart interval, scan), each from the marker's second byte
//! on, then the coded data, then the numbers.
//!
//! In a picture, the points follow the name `feedseek\0` in an APP15 segment, which other decoders
//! skip.
//!
//! # Limits and invariants
//!
//! * Points take about 1 % of the picture's bytes, and fit a segment: N follows from the bytes per
//!   MCU.
//! * Pictures with restart markers, damaged pictures, and those of several scans have no points.
//! * Pixels do not depend on points. If the codes change, the CRC differs, and the picture is
//!   decoded without points. The same happens if the next point that the walk reaches after a jump
//!   does not agree. Metadata and bytes after the coded data do not matter.
//! * The CRC check reads all coded data, including those below a crop.
//! * Forged points with the right CRC cause wrong pixels at worst.

use super::bits::BitPlace;
use super::header::{Header, SEEK, SEEK_MARKER, Segment};

/// Minimum bytes of coded data per byte of seek points.
const SHARE: usize = 100;

/// Maximum bytes of points in a segment, whose length field counts itself.
pub const BYTES_MAX: usize = 0xFFFF - 2 - SEEK.len();

/// A place in a scan, before an MCU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) mcu: u32,
    pub(super) place: BitPlace,
    pub(super) predictors: [i32; 4],
}

/// Reads the points of a picture from first to last.
pub(super) struct Points<'a> {
    rest: &'a [u8],
    /// Number of MCUs between two points.
    pub(super) step: u32,
    components: usize,
    /// Number of MCUs of the picture, and the byte offset at which its coded data end.
    total: u32,
    end: usize,
    /// The next point, if any.
    ahead: Option<Point>,
}

impl<'a> Points<'a> {
    /// Returns `None` if the points belong to another picture.
    pub(super) fn new(table: &'a [u8], input: &[u8], header: &Header) -> Option<Self> {
        let (crc, numbers) = table.split_first_chunk()?;
        let mut rest = numbers;
        let end = header
            .scan
            .checked_add(number(&mut rest)?.try_into().ok()?)?;
        let step = u32::try_from(number(&mut rest)?)
            .ok()
            .filter(|step| *step > 0)?;
        if header.restart > 0 || !header.one_scan || end > input.len() {
            return None;
        }
        if u32::from_le_bytes(*crc) != identity(input, header, end, numbers) {
            return None;
        }
        let components = header.components.into();
        let total = header.mcus();
        let mut points = Self {
            rest,
            step,
            components,
            total,
            end,
            ahead: None,
        };
        points.ahead = points.after(start(header));
        Some(points)
    }

    /// MCU of the next point, if any.
    pub(super) fn next_mcu(&self) -> Option<u32> {
        self.ahead.map(|point| point.mcu)
    }

    /// Takes the next point.
    pub(super) fn take(&mut self) -> Option<Point> {
        let point = self.ahead?;
        self.ahead = self.after(point);
        Some(point)
    }

    /// Takes the points up to MCU `target`. Returns the last of them.
    pub(super) fn take_until(&mut self, target: u32) -> Option<Point> {
        let mut last = None;
        while self.ahead.is_some_and(|point| point.mcu <= target) {
            last = self.take();
        }
        last
    }

    fn after(&mut self, before: Point) -> Option<Point> {
        if before.mcu == self.total {
            return None;
        }
        let bits = before.place.bits().checked_add(number(&mut self.rest)?)?;
        let mut point = Point {
            mcu: before.mcu.saturating_add(self.step).min(self.total),
            place: BitPlace {
                byte: usize::try_from(bits / 8)
                    .ok()
                    .filter(|byte| *byte <= self.end)?,
                bit: (bits % 8) as u8,
            },
            predictors: before.predictors,
        };
        for predictor in &mut point.predictors[..self.components] {
            let change = number(&mut self.rest)? as u32;
            *predictor = predictor.wrapping_add((change >> 1) as i32 ^ -((change & 1) as i32));
        }
        Some(point)
    }
}

/// Writes the points of a picture.
pub(super) struct SeekWriter {
    points: Vec<u8>,
    components: usize,
    before: Point,
    pub(super) step: u32,
}

impl SeekWriter {
    /// Writes a point every `step` MCUs.
    pub(super) fn new(header: &Header, step: u32) -> Self {
        Self {
            points: Vec::new(),
            components: header.components.into(),
            before: start(header),
            step,
        }
    }

    pub(super) fn push(&mut self, point: Point) {
        push(
            &mut self.points,
            point.place.bits() - self.before.place.bits(),
        );
        for index in 0..self.components {
            let change = point.predictors[index].wrapping_sub(self.before.predictors[index]);
            push(
                &mut self.points,
                u64::from((change << 1 ^ change >> 31) as u32),
            );
        }
        self.before = point;
    }

    /// The points of a picture whose coded data end at `end`.
    pub(super) fn finish(self, input: &[u8], header: &Header, end: usize) -> Vec<u8> {
        let mut numbers = Vec::with_capacity(self.points.len() + 16);
        push(&mut numbers, (end - header.scan) as u64);
        push(&mut numbers, self.step.into());
        numbers.extend(self.points);
        [
            &identity(input, header, end, &numbers).to_le_bytes()[..],
            &numbers,
        ]
        .concat()
    }
}

/// Number of MCUs between two points, chosen so that all points take at most about `most` bytes.
pub(super) fn step(input: &[u8], header: &Header, most: usize) -> u32 {
    // A point takes about 2 bytes, and 3 for every two components.
    let point = 2 + usize::from(header.components) * 3 / 2;
    let room = ((input.len() - header.scan) / SHARE).min(most) / point;
    header
        .mcus()
        .div_ceil(room.try_into().unwrap_or(u32::MAX).max(1))
}

/// CRC32C of the data that points depend on, and of their numbers. The coded data end at `end`.
pub(super) fn identity(input: &[u8], header: &Header, end: usize, numbers: &[u8]) -> u32 {
    let segments = header
        .segments(input)
        .filter(|(marker, ..)| matches!(marker, 0xC0..=0xCF | 0xDA | 0xDD));
    // From the marker's second byte on: 2 bytes of length precede the body.
    let crc = segments.fold(0, |crc, (_, start, body)| {
        crc32c::crc32c_append(crc, &input[start - 3..start + body.len()])
    });
    crc32c::crc32c_append(
        crc32c::crc32c_append(crc, &input[header.scan..end]),
        numbers,
    )
}

/// The point at the start of the scan, from which the first stored point counts.
fn start(header: &Header) -> Point {
    Point {
        place: BitPlace {
            byte: header.scan,
            bit: 0,
        },
        ..Point::default()
    }
}

/// Whether a segment holds seek points.
pub(super) fn is_segment(input: &[u8], segment: &Segment) -> bool {
    segment.marker == SEEK_MARKER && input[segment.start..segment.end].starts_with(SEEK)
}

/// Writes the picture to `out` with these points, which replace any others. The points follow the
/// first segments (JFIF, EXIF, comments), which some programs expect at the start.
pub(super) fn embed(input: &[u8], header: &Header, points: &[u8], out: &mut Vec<u8>) {
    out.reserve_exact(input.len() + 4 + SEEK.len() + points.len());
    let mut at = 2;
    let mut copied = 0;
    let mut inside = false;
    while let Ok(segment) = Segment::next(&input[..header.scan], at) {
        if !inside && !matches!(segment.marker, 0xE0..=0xEF | 0xFE) {
            out.extend_from_slice(&input[copied..at]);
            out.extend([0xFF, SEEK_MARKER]);
            out.extend(((2 + SEEK.len() + points.len()) as u16).to_be_bytes());
            out.extend_from_slice(SEEK);
            out.extend_from_slice(points);
            copied = at;
            inside = true;
        }
        if is_segment(input, &segment) {
            out.extend_from_slice(&input[copied..segment.marker_at()]);
            copied = segment.end;
        }
        at = segment.end;
    }
    out.extend_from_slice(&input[copied..]);
}

/// Removes a LEB128 number from the start of `bytes`.
fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7F) << shift;
        if *byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn push(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}
