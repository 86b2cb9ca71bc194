//! Seek points: places in a scan where decoding may begin, kept beside the picture.
//!
//! ```text
//! scan:    MCU 0 ……… N ………… 2N ……… 3N ………
//! points:            ▲       ▲      ▲      each: bits since the point before, change of each DC predictor
//!                            └─ a row of a crop begins at the last point before it, and passes the rest
//! ```
//!
//! One more point is the scan's end.
//!
//! # Format
//!
//! CRC32C of all bytes before the coded data (4 bytes, little-endian); then LEB128 numbers: length of the picture, N, and
//! the points. Signed numbers are in zigzag.
//!
//! # Limits and invariants
//!
//! * Points take about 1 % of the picture's bytes: N follows from the bytes per MCU.
//! * Pictures with restart markers have no points, nor have damaged ones and those of several scans.
//! * Pixels of an intact picture do not depend on points. Header and length must agree, and so must a point that the walk
//!   passes after each jump. Otherwise the picture is decoded without points.
//! * The file of the points has a checksum. Points that are wrong nevertheless make wrong pixels at worst.

use super::bits::Place;
use super::header::Header;

/// Bytes of a picture for each byte of its points.
const SHARE: usize = 100;

/// A place in a scan, before an MCU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) mcu: u32,
    pub(super) place: Place,
    pub(super) predictors: [i32; 4],
}

/// Points of a picture, first to last.
pub(super) struct Points<'a> {
    rest: &'a [u8],
    /// MCUs from point to point.
    step: u32,
    components: usize,
    /// MCUs and bytes of the picture.
    total: u32,
    len: usize,
    /// The next point, if any.
    ahead: Option<Point>,
}

impl<'a> Points<'a> {
    /// Gives nothing if the points belong to another picture.
    pub(super) fn new(table: &'a [u8], input: &[u8], header: &Header) -> Option<Self> {
        let (crc, mut rest) = table.split_first_chunk()?;
        let len = number(&mut rest)?;
        let step = u32::try_from(number(&mut rest)?).ok().filter(|step| *step > 0)?;
        let same = len == input.len() as u64 && u32::from_le_bytes(*crc) == crc32c::crc32c(&input[..header.scan]);
        let start = Point { place: Place { byte: header.scan, bit: 0 }, ..Point::default() };
        let mut points = Self {
            rest,
            step,
            components: header.components.into(),
            total: header.mcus(),
            len: input.len(),
            ahead: None,
        };
        points.ahead = points.after(start);
        (same && header.restart == 0 && header.one_scan).then_some(points)
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

    /// Takes the points up to MCU `target`; gives the last of them.
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
            place: Place {
                byte: usize::try_from(bits / 8).ok().filter(|byte| *byte <= self.len)?,
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
pub(super) struct Writer {
    table: Vec<u8>,
    components: usize,
    before: Point,
    pub(super) step: u32,
}

impl Writer {
    pub(super) fn new(input: &[u8], header: &Header) -> Self {
        // A point takes some 2 bytes, and 3 for two components.
        let components = usize::from(header.components);
        let room = (input.len() - header.scan) / SHARE / (2 + components * 3 / 2);
        let step = header.mcus().div_ceil(room.try_into().unwrap_or(u32::MAX).max(1));
        let before = Point { place: Place { byte: header.scan, bit: 0 }, ..Point::default() };
        let mut table = crc32c::crc32c(&input[..header.scan]).to_le_bytes().to_vec();
        push(&mut table, input.len() as u64);
        push(&mut table, step.into());
        Self { table, components, before, step }
    }

    pub(super) fn push(&mut self, point: Point) {
        push(&mut self.table, point.place.bits() - self.before.place.bits());
        for index in 0..self.components {
            let change = point.predictors[index].wrapping_sub(self.before.predictors[index]);
            push(&mut self.table, u64::from((change << 1 ^ change >> 31) as u32));
        }
        self.before = point;
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.table
    }
}

/// Cuts a LEB128 number off the front.
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
