//! The walk over all codes of a scan, for transcoding: symbols and bits as they are, DC values as sums.
//!
//! Limits: no memory but tables. Time is linear in the input: a block takes at least two bits, and a shortage is detected
//! after each block. Errors have their offset.

use super::bits::{Bits, Place};
use super::header::{DAMAGED, Factors, Header, SURPLUS, Scan, Segment};
use super::huffman::{Fault, Symbols, extend};
use crate::error::{Error, ErrorKind, Result, Stage};

/// Limit of DC values. Those of 8-bit samples lie within -1024..=1023; rounding by encoders stays far within it.
const DC_MAX: i32 = 2047;
/// Most bits of a DC difference, and of an AC coefficient, of 8-bit samples.
const DC_BITS: u32 = 11;
const AC_BITS: u32 = 10;

/// The receiver of the codes. Tables have their numbers in [`Scan::tables`].
pub(crate) trait Sink {
    /// An MCU begins.
    fn mcu(&mut self);
    /// The DC value of a block of this component.
    fn dc(&mut self, table: usize, component: usize, value: i32);
    /// An AC symbol, and the bits that follow it.
    fn ac(&mut self, table: usize, symbol: u8, bits: u32);
}

/// The blocks of a component in an MCU, and their tables with their numbers.
struct Part {
    component: usize,
    blocks: u32,
    dc: (usize, Symbols),
    ac: (usize, Symbols),
}

/// Walks over the whole scan; returns the offset behind its data.
pub(crate) fn walk(input: &[u8], header: &Header, scan: &Scan<'_>, sink: &mut impl Sink) -> Result<usize> {
    let parts = parts(scan)?;
    let total = header.mcus();
    let interval = if header.restart == 0 { total } else { header.restart };
    let (mut at, mut mcu) = (header.scan, 0);
    loop {
        let mut bits = Bits::new(input, Place { byte: at, bit: 0 });
        let (first, mut predictors) = (mcu, [0; 4]);
        while mcu < total && mcu - first < interval {
            sink.mcu();
            // A copy stays in registers.
            let mut copy = bits.clone();
            let done = walk_mcu(&parts, &mut copy, &mut predictors, sink);
            bits = copy;
            done.map_err(|fault| located(fault, &bits, input, (mcu, total)))?;
            mcu += 1;
        }
        let end = end(input, &bits, mcu)?;
        if mcu == total {
            return Ok(end);
        }
        let (number, segment) = ((first / interval) as u8 % 8, Segment::at(input, end)?);
        if segment.marker != 0xD0 + number {
            let message = format!("restart marker {number} expected, marker 0x{:02x} found", segment.marker);
            return Err(Error::decode(message).with_range(end as u64, 2));
        }
        at = segment.end;
    }
}

fn parts(scan: &Scan<'_>) -> Result<Vec<Part>> {
    let (tables, parts) = (scan.tables(), scan.components());
    let table = |number: usize| match tables[number] {
        Some(table) => Ok((number, Symbols::new(table))),
        None => Err(Error::decode("JPEG without a Huffman table that it names")),
    };
    let blocks = |factors: Factors| if parts.len() == 1 { 1 } else { u32::from(factors.h) * u32::from(factors.v) };
    let each = parts.iter().enumerate().map(|(component, part)| {
        Ok(Part { component, blocks: blocks(part.factors), dc: table(part.dc)?, ac: table(4 + part.ac)? })
    });
    each.collect()
}

#[inline(always)]
fn walk_mcu(parts: &[Part], bits: &mut Bits<'_>, predictors: &mut [i32; 4], sink: &mut impl Sink) -> Result<(), Fault> {
    for part in parts {
        for _ in 0..part.blocks {
            walk_block(part, bits, &mut predictors[part.component], sink)?;
            if bits.overrun() {
                return Err(Fault::End);
            }
        }
    }
    Ok(())
}

#[inline(always)]
fn walk_block(part: &Part, bits: &mut Bits<'_>, predictor: &mut i32, sink: &mut impl Sink) -> Result<(), Fault> {
    let size = u32::from(part.dc.1.read(bits)?);
    if size > DC_BITS {
        return Err(Fault::Code);
    }
    *predictor += extend(bits.take(size), size);
    if predictor.abs() > DC_MAX {
        return Err(Fault::Range);
    }
    sink.dc(part.dc.0, part.component, *predictor);
    let mut next = 1;
    while next < 64 {
        let symbol = part.ac.1.read(bits)?;
        let (run, size) = (symbol >> 4, u32::from(symbol & 15));
        if size > AC_BITS || (size == 0 && !matches!(symbol, 0 | 0xF0)) {
            return Err(Fault::Code);
        }
        sink.ac(part.ac.0, symbol, bits.take(size));
        if symbol == 0 {
            return Ok(());
        }
        next += u32::from(run) + 1;
    }
    if next == 64 { Ok(()) } else { Err(Fault::Long) }
}

/// Offset of the marker behind the data of an interval, which has at most a little padding.
fn end(input: &[u8], bits: &Bits<'_>, mcu: u32) -> Result<usize> {
    let (next, end) = (bits.next_byte(), bits.end().ok_or_else(|| cut(input))?);
    let left = end - next - memchr::memchr_iter(0xFF, &input[next..end]).count();
    if left > SURPLUS {
        let message = format!("{DAMAGED}: {left} bytes of data are left after MCU {mcu}");
        return Err(Error::decode(message).with_range(next as u64, (end - next) as u64));
    }
    Ok(end)
}

#[cold]
fn located(fault: Fault, bits: &Bits<'_>, input: &[u8], (mcu, total): (u32, u32)) -> Error {
    let (fault, kind, offset) = match bits.overrun() {
        true if bits.end().is_none() => return cut(input),
        true => (Fault::End, ErrorKind::Truncated, bits.next_byte()),
        false => (fault, ErrorKind::Decode, bits.place().byte),
    };
    let message = format!("{DAMAGED}: {}, in MCU {mcu} of {total}", fault.words());
    Error::new(kind, Stage::Decode, message).with_range(offset as u64, 0)
}

fn cut(input: &[u8]) -> Error {
    let message = "the JPEG ends inside its entropy-coded data, without an end marker";
    Error::new(ErrorKind::Truncated, Stage::Decode, message).with_range(input.len() as u64, 0)
}
