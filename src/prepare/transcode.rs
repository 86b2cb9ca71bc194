//! Two walks over the codes of a scan: the first counts symbols, the second writes them anew.
//!
//! ```text
//! jpeg::walk ──► DC value, (run/size, bits) … ──┬──► Count: how often each symbol will come
//!                                               └──► Emit:  codes of the new tables, RSTn between
//! ```
//!
//! That costs time, but no memory that a hostile file could choose.

use super::bits::BitWriter;
use super::huffman::{Codes, Optimal};
use super::jpeg::Picture;
use crate::error::Result;
use crate::jpeg::{Sink, walk};

/// The size and bits that encode `value`.
fn shrink(value: i32) -> (u8, u32) {
    let size = 32 - value.unsigned_abs().leading_zeros();
    let bits = if value < 0 { value - 1 } else { value };
    (size as u8, bits as u32 & ((1 << size) - 1))
}

/// DC differences with a restart every few MCUs.
struct Restarts {
    interval: u32,
    left: u32,
    predictors: [i32; 4],
}

impl Restarts {
    fn new(interval: u32) -> Self {
        Self { interval, left: interval, predictors: [0; 4] }
    }

    /// Counts an MCU; returns whether a restart comes before it.
    fn mcu(&mut self) -> bool {
        let restart = self.left == 0;
        if restart {
            self.left = self.interval;
            self.predictors = [0; 4];
        }
        self.left -= 1;
        restart
    }

    fn difference(&mut self, component: usize, value: i32) -> i32 {
        value - std::mem::replace(&mut self.predictors[component], value)
    }
}

/// The frequency of every symbol of every table.
struct Count {
    restarts: Restarts,
    frequencies: Box<[[u64; 256]; 8]>,
}

impl Sink for Count {
    fn mcu(&mut self) {
        self.restarts.mcu();
    }

    #[inline(always)]
    fn dc(&mut self, table: usize, component: usize, value: i32) {
        let (size, _) = shrink(self.restarts.difference(component, value));
        self.frequencies[table][usize::from(size)] += 1;
    }

    #[inline(always)]
    fn ac(&mut self, table: usize, symbol: u8, _bits: u32) {
        self.frequencies[table][usize::from(symbol)] += 1;
    }
}

/// Writes the codes anew.
struct Emit<'a> {
    restarts: Restarts,
    number: u8,
    codes: &'a [Codes; 8],
    writer: BitWriter<'a>,
}

impl Emit<'_> {
    #[inline(always)]
    fn symbol(&mut self, table: usize, symbol: u8, bits: u32, size: u32) {
        let (code, length) = self.codes[table].of(symbol);
        debug_assert!(length > 0, "symbol {symbol} was not counted");
        self.writer.put(code << size | bits, length + size);
    }
}

impl Sink for Emit<'_> {
    fn mcu(&mut self) {
        if self.restarts.mcu() {
            self.writer.marker(0xD0 + self.number);
            self.number = (self.number + 1) % 8;
        }
    }

    #[inline(always)]
    fn dc(&mut self, table: usize, component: usize, value: i32) {
        let (size, bits) = shrink(self.restarts.difference(component, value));
        self.symbol(table, size, bits, u32::from(size));
    }

    #[inline(always)]
    fn ac(&mut self, table: usize, symbol: u8, bits: u32) {
        self.symbol(table, symbol, bits, u32::from(symbol & 15));
    }
}

/// The result of the first walk.
pub(super) struct Counted {
    frequencies: Box<[[u64; 256]; 8]>,
    /// Offset of the marker behind the scan.
    pub(super) end: usize,
}

/// First walk: checks the whole scan, and counts its symbols for the new interval.
pub(super) fn count(input: &[u8], picture: &Picture<'_>, interval: u32) -> Result<Counted> {
    let mut sink = Count { restarts: Restarts::new(interval), frequencies: Box::new([[0; 256]; 8]) };
    let end = walk(input, &picture.header, &picture.scan, &mut sink)?;
    Ok(Counted { frequencies: sink.frequencies, end })
}

impl Counted {
    /// Codes for these symbols, and the segment of their tables; unused tables are absent. `None` if the codes `old` are as
    /// good, whose segments have `old_bytes`.
    pub(super) fn better(&self, old: &[Codes; 8], old_bytes: usize) -> Option<(Box<[Codes; 8]>, Vec<u8>)> {
        let tables = self
            .frequencies
            .each_ref()
            .map(|frequencies| frequencies.iter().any(|count| *count > 0).then(|| Optimal::new(frequencies)));
        let new = Box::new(tables.each_ref().map(|table| Codes::new(table.as_ref().map(Optimal::table))));
        let segment = segment(&tables);
        let bits = |codes: &[Codes; 8], bytes: usize| {
            let each = codes.iter().zip(&*self.frequencies).map(|(codes, frequencies)| codes.cost(frequencies));
            each.sum::<Option<u64>>().map(|sum| sum + 8 * bytes as u64)
        };
        let better = bits(old, old_bytes).is_none_or(|old| bits(&new, segment.len()).is_some_and(|new| new < old));
        better.then_some((new, segment))
    }
}

/// A DHT segment of all `tables`.
fn segment(tables: &[Option<Optimal>; 8]) -> Vec<u8> {
    let mut out = vec![0xFF, 0xC4, 0, 0];
    for (index, table) in (0..8).zip(tables) {
        if let Some(table) = table.as_ref().map(Optimal::table) {
            out.push(((index / 4) << 4) | (index % 4));
            out.extend_from_slice(table.counts);
            out.extend_from_slice(table.symbols);
        }
    }
    // At most 8 tables of 273 bytes.
    let length = (out.len() - 2) as u16;
    out[2..4].copy_from_slice(&length.to_be_bytes());
    out
}

/// Second walk: appends the entropy-coded data, with a restart marker every `interval` MCUs.
pub(super) fn emit(
    input: &[u8],
    picture: &Picture<'_>,
    codes: &[Codes; 8],
    interval: u32,
    out: &mut Vec<u8>,
) -> Result<()> {
    let mut sink = Emit { restarts: Restarts::new(interval), number: 0, codes, writer: BitWriter::new(out) };
    walk(input, &picture.header, &picture.scan, &mut sink)?;
    sink.writer.pad();
    Ok(())
}
