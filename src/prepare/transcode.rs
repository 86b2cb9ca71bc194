//! The walk over the codes of a scan, for two purposes: to count symbols, and to write them anew.
//!
//! ```text
//! data ──unstuff──► bits ──codes──► DC value, (run/size, bits) … ──► Count: how often each symbol will come
//!   one restart interval at a time                              └──► Emit:  codes of the new tables, RSTn between
//! ```
//!
//! The scan is walked twice. That costs time, but no memory that a hostile file could choose. Time is linear in the
//! file: a block takes at least two bits, and a read beyond the end is detected after each block.

use super::bits::{BitReader, BitWriter, Stop, offset_of, unstuff};
use super::huffman::{Codes, Lookup, Table};
use super::jpeg::{Block, Picture, bad};
use crate::error::{Error, ErrorKind, Result, Stage};

/// Limit of DC values. Those of 8-bit samples lie within -1024..=1023; rounding by encoders stays far within this
/// limit.
const DC_MAX: i32 = 2047;
/// Limits of the bits of a DC difference, and of an AC coefficient.
const DC_BITS: u8 = 11;
const AC_BITS: u8 = 10;
/// Bytes of padding before a marker that are accepted, as some encoders write them.
const SURPLUS: usize = 2;

/// The receiver of the walk.
trait Sink {
    /// An MCU begins.
    fn mcu(&mut self);
    /// The DC coefficient of a block.
    fn dc(&mut self, block: Block, value: i32);
    /// An AC symbol and the bits that follow it.
    fn ac(&mut self, block: Block, symbol: u8, bits: u32);
}

/// The fault of a block.
enum Fault {
    Code(&'static str),
    Symbol(&'static str, u8),
    DcRange(i32),
    Long,
}

impl Fault {
    fn message(&self) -> String {
        match self {
            Self::Code(which) => format!("no {which} code begins with these bits"),
            Self::Symbol(which, symbol) => format!("{which} symbol 0x{symbol:02x} has no meaning in a baseline JPEG"),
            Self::DcRange(value) => format!("a DC coefficient of {value}; at most {DC_MAX} is allowed"),
            Self::Long => "a block of more than 64 coefficients".into(),
        }
    }
}

/// Walks over the whole scan; returns the marker behind it.
fn walk(input: &[u8], picture: &Picture, sink: &mut impl Sink, data: &mut Vec<u8>) -> Result<Stop> {
    let lookups: [Option<Lookup>; 8] = std::array::from_fn(|index| picture.tables[index].as_ref().map(Lookup::new));
    let interval = if picture.interval == 0 { picture.mcus } else { u64::from(picture.interval) };
    let (mut at, mut left, mut number) = (picture.data, picture.mcus, 0_u8);
    loop {
        let stop = unstuff(input, at, data)?;
        let here = left.min(interval);
        let mut reader = BitReader::new(data);
        walk_interval(&mut reader, picture, &lookups, here, sink).map_err(|fault| {
            let byte = reader.position() / 8;
            let missing = picture.mcus - left;
            located(fault, input, at, byte, data.len(), missing)
        })?;
        if reader.left() > SURPLUS {
            let offset = offset_of(input, at, data.len() - reader.left());
            let message = format!("{} bytes of data are left after the {here} MCUs", reader.left());
            return Err(bad(message, offset, stop.at - offset));
        }
        left -= here;
        if left == 0 {
            return Ok(stop);
        }
        if stop.marker != 0xD0 + number {
            let message = format!("restart marker {number} expected, marker 0x{:02x} found", stop.marker);
            return Err(bad(message, stop.at, stop.after - stop.at));
        }
        number = (number + 1) % 8;
        at = stop.after;
    }
}

/// The error with its offset. Fault `None`: the data ended.
fn located(fault: Option<Fault>, input: &[u8], at: usize, byte: usize, len: usize, mcu: u64) -> Error {
    match fault {
        Some(fault) if byte <= len => bad(format!("damaged JPEG: {}", fault.message()), offset_of(input, at, byte), 0),
        _ => {
            let message = format!("damaged JPEG: the data ends inside the interval that begins with MCU {mcu}");
            let offset = offset_of(input, at, len) as u64;
            Error::new(ErrorKind::Truncated, Stage::Decode, message).with_range(offset, 0)
        }
    }
}

/// Walks over `mcus` MCUs without a restart between them.
fn walk_interval(
    reader: &mut BitReader<'_>,
    picture: &Picture,
    lookups: &[Option<Lookup>; 8],
    mcus: u64,
    sink: &mut impl Sink,
) -> std::result::Result<(), Option<Fault>> {
    let mut predictors = [0; 4];
    for _ in 0..mcus {
        sink.mcu();
        for block in &picture.blocks {
            let (Some(dc), Some(ac)) = (&lookups[block.dc], &lookups[block.ac]) else { return Err(None) };
            let predictor = &mut predictors[block.component];
            walk_block(reader, *block, dc, ac, predictor, sink).map_err(Some)?;
            if reader.overrun() {
                return Err(None);
            }
        }
    }
    Ok(())
}

#[inline(always)]
fn walk_block(
    reader: &mut BitReader<'_>,
    block: Block,
    dc: &Lookup,
    ac: &Lookup,
    predictor: &mut i32,
    sink: &mut impl Sink,
) -> std::result::Result<(), Fault> {
    reader.refill();
    let size = dc.symbol(reader).ok_or(Fault::Code("DC"))?;
    if size > DC_BITS {
        return Err(Fault::Symbol("DC", size));
    }
    *predictor += extend(reader.take(u32::from(size)), u32::from(size));
    if predictor.abs() > DC_MAX {
        return Err(Fault::DcRange(*predictor));
    }
    sink.dc(block, *predictor);
    let mut next = 1;
    while next < 64 {
        reader.refill();
        let symbol = ac.symbol(reader).ok_or(Fault::Code("AC"))?;
        let (run, size) = (symbol >> 4, symbol & 15);
        if size > AC_BITS || (size == 0 && symbol != 0 && symbol != 0xF0) {
            return Err(Fault::Symbol("AC", symbol));
        }
        sink.ac(block, symbol, reader.take(u32::from(size)));
        if symbol == 0 {
            break;
        }
        next += u32::from(run) + 1;
        if next > 64 {
            return Err(Fault::Long);
        }
    }
    Ok(())
}

/// The number that these `size` bits encode (F.2.2.1).
fn extend(bits: u32, size: u32) -> i32 {
    let half = (1_i32 << size) >> 1;
    let value = bits as i32;
    if value < half { value - (1 << size) + 1 } else { value }
}

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
    fn dc(&mut self, block: Block, value: i32) {
        let (size, _) = shrink(self.restarts.difference(block.component, value));
        self.frequencies[block.dc][usize::from(size)] += 1;
    }

    #[inline(always)]
    fn ac(&mut self, block: Block, symbol: u8, _bits: u32) {
        self.frequencies[block.ac][usize::from(symbol)] += 1;
    }
}

/// Writes the codes anew.
struct Emit<'a> {
    restarts: Restarts,
    number: u8,
    codes: Box<[Codes; 8]>,
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
    fn dc(&mut self, block: Block, value: i32) {
        let (size, bits) = shrink(self.restarts.difference(block.component, value));
        self.symbol(block.dc, size, bits, u32::from(size));
    }

    #[inline(always)]
    fn ac(&mut self, block: Block, symbol: u8, bits: u32) {
        self.symbol(block.ac, symbol, bits, u32::from(symbol & 15));
    }
}

/// The result of the first walk.
pub(super) struct Counted {
    frequencies: Box<[[u64; 256]; 8]>,
    /// The marker behind the scan.
    pub(super) stop: Stop,
}

/// First walk: checks the whole scan, and counts its symbols for the new interval.
pub(super) fn count(input: &[u8], picture: &Picture, interval: u32, data: &mut Vec<u8>) -> Result<Counted> {
    let mut sink = Count { restarts: Restarts::new(interval), frequencies: Box::new([[0; 256]; 8]) };
    let stop = walk(input, picture, &mut sink, data)?;
    Ok(Counted { frequencies: sink.frequencies, stop })
}

impl Counted {
    /// Tables for these symbols; unused tables are absent. `None` if the picture's own tables are as good. `old_bytes`
    /// is the size of the segments that new tables would replace.
    pub(super) fn better_tables(&self, old: &[Option<Table>; 8], old_bytes: usize) -> Option<[Option<Table>; 8]> {
        let (mut before, mut after) = (Some(8 * old_bytes as u64), 8 * SEGMENT_BYTES as u64);
        let new: [Option<Table>; 8] = std::array::from_fn(|index| {
            let frequencies = &self.frequencies[index];
            let table = (frequencies.iter().any(|count| *count > 0)).then(|| Table::optimal(frequencies))?;
            let cost = |table: &Table| Codes::new(table).cost(frequencies);
            after += cost(&table).unwrap_or(0) + 8 * (1 + table.bytes() as u64);
            before = before.zip(old[index].as_ref().and_then(cost)).map(|(sum, cost)| sum + cost);
            Some(table)
        });
        before.is_none_or(|before| after < before).then_some(new)
    }
}

/// Marker and length of the segment that holds all tables.
const SEGMENT_BYTES: usize = 4;

/// Appends a segment of all `tables`.
pub(super) fn write_tables(tables: &[Option<Table>; 8], out: &mut Vec<u8>) {
    let there = || tables.iter().enumerate().filter_map(|(index, table)| Some((index, table.as_ref()?)));
    // At most 8 tables of 273 bytes.
    let bytes: usize = 2 + there().map(|(_, table)| 1 + table.bytes()).sum::<usize>();
    out.extend([0xFF, 0xC4]);
    out.extend((bytes as u16).to_be_bytes());
    for (index, table) in there() {
        out.push(((index as u8 / 4) << 4) | (index as u8 % 4));
        table.write(out);
    }
}

/// Second walk: appends the entropy-coded data, with a restart marker every `interval` MCUs.
pub(super) fn emit(
    input: &[u8],
    picture: &Picture,
    tables: &[Option<Table>; 8],
    interval: u32,
    data: &mut Vec<u8>,
    out: &mut Vec<u8>,
) -> Result<()> {
    let none = Table::optimal(&[0; 256]);
    let codes = Box::new(std::array::from_fn(|index| Codes::new(tables[index].as_ref().unwrap_or(&none))));
    let mut sink = Emit { restarts: Restarts::new(interval), number: 0, codes, writer: BitWriter::new(out) };
    walk(input, picture, &mut sink, data)?;
    sink.writer.pad();
    Ok(())
}
