//! A naive reader of baseline JPEGs, the oracle for the transcoder: bit by bit, every length checked, no code shared
//! with the crate. Gives the quantised DCT coefficients and everything else that determines the pixels.

#![allow(dead_code, reason = "each user takes its own part")]

use std::collections::BTreeMap;

/// Everything that a decoder works on.
#[derive(Debug, PartialEq, Eq)]
pub struct Coefficients {
    /// Frame header, byte for byte.
    pub frame: Vec<u8>,
    /// All segments but DHT, DRI, SOF and SOS, byte for byte.
    pub others: Vec<Vec<u8>>,
    /// Blocks in the order of the scan: component, then 64 values in zigzag order.
    pub blocks: Vec<(usize, [i32; 64])>,
    /// Bytes after the scan.
    pub tail: Vec<u8>,
}

/// For each length from 1: the first code, and its symbols in order.
type Codes = Vec<(usize, Vec<u8>)>;

/// The picture, and the number of MCUs between restarts (0: no restarts).
pub fn read(bytes: &[u8]) -> Result<(Coefficients, usize), String> {
    let byte = |at: usize| bytes.get(at).copied().ok_or(format!("ends at {at}"));
    let word = |at: usize| Ok::<usize, String>(usize::from(byte(at)?) << 8 | usize::from(byte(at + 1)?));
    let mut tables: BTreeMap<u8, Codes> = BTreeMap::new();
    let (mut frame, mut others, mut interval) = (Vec::new(), Vec::new(), 0);
    if byte(0)? != 0xFF || byte(1)? != 0xD8 {
        return Err("no start".into());
    }
    let mut at = 2;
    let scan = loop {
        if byte(at)? != 0xFF {
            return Err(format!("no marker at {at}"));
        }
        while byte(at + 1)? == 0xFF {
            at += 1;
        }
        let marker = byte(at + 1)?;
        if marker == 1 {
            at += 2;
            others.push(vec![1]);
            continue;
        }
        let len = word(at + 2)?;
        if len < 2 {
            return Err("short segment".into());
        }
        let segment = bytes.get(at + 2..at + 2 + len).ok_or("cut segment")?.to_vec();
        let body = &segment[2..];
        at += 2 + len;
        match marker {
            0xC0 | 0xC1 => frame = body.to_vec(),
            0xC4 => read_tables(body, &mut tables)?,
            0xDD => interval = usize::from(body[0]) << 8 | usize::from(body[1]),
            0xDA => break body.to_vec(),
            _ => others.push([&[marker], body].concat()),
        }
    };
    if frame.len() < 6 {
        return Err("no frame".into());
    }
    let (height, width) =
        (usize::from(frame[1]) << 8 | usize::from(frame[2]), usize::from(frame[3]) << 8 | usize::from(frame[4]));
    let factors: Vec<(usize, usize)> =
        frame[6..].chunks(3).map(|c| (usize::from(c[1] >> 4), usize::from(c[1] & 15))).collect();
    let single = factors.len() == 1;
    let h = if single { 1 } else { factors.iter().map(|f| f.0).max().unwrap() };
    let v = if single { 1 } else { factors.iter().map(|f| f.1).max().unwrap() };
    let mcus = width.div_ceil(8 * h) * height.div_ceil(8 * v);
    let mut blocks = Vec::new();
    let mut bits = Bits { bytes, at, bit: 0 };
    let mut predictors = vec![0; factors.len()];
    for mcu in 0..mcus {
        if interval > 0 && mcu > 0 && mcu % interval == 0 {
            bits.restart((mcu / interval - 1) % 8)?;
            predictors.fill(0);
        }
        for (component, factor) in factors.iter().enumerate() {
            let selector = *scan.get(2 + 2 * component).ok_or("short scan header")?;
            let dc = tables.get(&(selector >> 4)).ok_or("no DC table")?;
            let ac = tables.get(&(0x10 | selector & 15)).ok_or("no AC table")?;
            for _ in 0..if single { 1 } else { factor.0 * factor.1 } {
                let mut block = [0; 64];
                let size = bits.symbol(dc)?;
                predictors[component] += bits.number(size.into())?;
                block[0] = predictors[component];
                let mut k = 1;
                while k < 64 {
                    let symbol = bits.symbol(ac)?;
                    match (symbol >> 4, symbol & 15) {
                        (0, 0) => break,
                        (15, 0) => k += 16,
                        (run, size) => {
                            k += usize::from(run);
                            *block.get_mut(k).ok_or("a long block")? = bits.number(u32::from(size))?;
                            k += 1;
                        }
                    }
                }
                blocks.push((component, block));
            }
        }
    }
    let tail = bits.rest()?;
    Ok((Coefficients { frame, others, blocks, tail }, interval))
}

fn read_tables(mut body: &[u8], tables: &mut BTreeMap<u8, Codes>) -> Result<(), String> {
    while !body.is_empty() {
        let counts = body.get(1..17).ok_or("short table")?;
        let (mut table, mut code, mut at) = (Codes::new(), 0, 17);
        for count in counts {
            let symbols = body.get(at..at + usize::from(*count)).ok_or("short table")?;
            table.push((code, symbols.to_vec()));
            at += symbols.len();
            code = (code + symbols.len()) << 1;
        }
        tables.insert(body[0], table);
        body = &body[at..];
    }
    Ok(())
}

/// Bits of entropy-coded data; stuffing is skipped, a marker ends it.
struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
    bit: u32,
}

impl Bits<'_> {
    fn next(&mut self) -> Result<u32, String> {
        let byte = *self.bytes.get(self.at).ok_or("ends in data")?;
        let stuffed = byte == 0xFF;
        if stuffed && self.bytes.get(self.at + 1) != Some(&0) {
            return Err(format!("marker in data at {}", self.at));
        }
        let bit = u32::from(byte) >> (7 - self.bit) & 1;
        self.bit += 1;
        if self.bit == 8 {
            self.bit = 0;
            self.at += 1 + usize::from(stuffed);
        }
        Ok(bit)
    }

    fn symbol(&mut self, table: &Codes) -> Result<u8, String> {
        let mut code = 0_usize;
        for (first, symbols) in table {
            code = code << 1 | self.next()? as usize;
            if let Some(symbol) = code.checked_sub(*first).and_then(|index| symbols.get(index)) {
                return Ok(*symbol);
            }
        }
        Err("no such code".into())
    }

    fn number(&mut self, size: u32) -> Result<i32, String> {
        let mut value = 0_i32;
        for _ in 0..size {
            value = value << 1 | self.next()? as i32;
        }
        Ok(if size > 0 && value < 1 << (size - 1) { value - (1 << size) + 1 } else { value })
    }

    /// Skips the rest of the current byte, and up to two bytes of padding.
    fn align(&mut self) -> Result<(), String> {
        if self.bit > 0 {
            self.at += 1 + usize::from(self.bytes[self.at] == 0xFF);
            self.bit = 0;
        }
        for _ in 0..2 {
            match (self.bytes.get(self.at), self.bytes.get(self.at + 1)) {
                (Some(0xFF), Some(0)) => self.at += 2,
                (Some(0xFF), _) => return Ok(()),
                _ => self.at += 1,
            }
        }
        Ok(())
    }

    fn restart(&mut self, number: usize) -> Result<(), String> {
        self.align()?;
        while self.bytes.get(self.at + 1) == Some(&0xFF) {
            self.at += 1;
        }
        match self.bytes.get(self.at..self.at + 2) {
            Some([0xFF, marker]) if usize::from(*marker) == 0xD0 + number => self.at += 2,
            found => return Err(format!("restart {number} expected, {found:x?} found")),
        }
        Ok(())
    }

    fn rest(mut self) -> Result<Vec<u8>, String> {
        self.align()?;
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        if rest.first() != Some(&0xFF) || rest.get(1) == Some(&0) {
            return Err(format!("no marker behind the scan at {}", self.at));
        }
        Ok(rest.to_vec())
    }
}
