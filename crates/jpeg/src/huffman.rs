//! Huffman tables for decoding. One lookup gives a symbol, a code with the value after it, or
//! several codes to skip.
//!
//! Limits: codes have at most 16 bits. A table is untrusted: it is refused if its codes do not fit
//! the code space. Symbols without a meaning in a baseline JPEG have no entry, and are an error
//! where they occur.

use super::bits::{Bits, FULL};

/// Longest code.
pub(crate) const CODE_MAX: usize = 16;
/// Width in bits of the index into a lookup table that decodes. A DC table has 8 KiB and an AC
/// table 16 KiB, so both fit the L1 cache together with the block.
const DECODE_BITS: u32 = 11;
/// Width in bits of the index into the lookup table that skips codes.
const SKIP_BITS: u32 = 12;
/// Maximum bits of a value. 8-bit samples need 11 for DC differences and 10 for AC coefficients;
/// libjpeg-turbo accepts more.
const VALUE_BITS: u32 = 15;

/// Natural (row by row) index of each coefficient, in the zigzag order of the file.
pub(super) const ZIGZAG: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20,
    13, 6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59,
    52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
];

/// For each place in zigzag order, the natural index of the coefficient before it. Places beyond
/// the block are errors, so their index is arbitrary.
const PLACES: [u8; 128] = {
    let mut places = [0; 128];
    let mut k = 0;
    while k < 64 {
        places[k + 1] = ZIGZAG[k];
        k += 1;
    }
    places
};

/// Coded data that violate a table or a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// No code begins with these bits, or its symbol has no meaning in a baseline JPEG.
    Code,
    /// A block has more than 64 coefficients.
    Long,
    /// The data end.
    End,
}

impl Fault {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Code => "no code begins with these bits",
            Self::Long => "a block of more than 64 coefficients",
            Self::End => "its data ends before the picture is complete",
        }
    }
}

/// The content of a table in a DHT segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HuffmanTable<'a> {
    /// Number of codes of each length from 1 on.
    pub(crate) counts: &'a [u8; CODE_MAX],
    /// Symbols in the order of their codes.
    pub(crate) symbols: &'a [u8],
}

/// Tables K.3 to K.6 of the standard: for luma and chroma, DC and AC. Frames of MJPEG leave them
/// out.
pub(super) const STANDARD: [HuffmanTable<'static>; 4] = [
    HuffmanTable {
        counts: &[0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        symbols: &SIZES,
    },
    HuffmanTable {
        counts: &[0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        symbols: &SIZES,
    },
    HuffmanTable {
        counts: &[0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 125],
        symbols: &AC_LUMA,
    },
    HuffmanTable {
        counts: &[0, 2, 1, 2, 4, 4, 3, 4, 7, 5, 4, 4, 0, 1, 2, 119],
        symbols: &AC_CHROMA,
    },
];
const SIZES: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
#[rustfmt::skip]
const AC_LUMA: [u8; 162] = [
    0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61, 0x07, 0x22, 0x71, 0x14,
    0x32, 0x81, 0x91, 0xA1, 0x08, 0x23, 0x42, 0xB1, 0xC1, 0x15, 0x52, 0xD1, 0xF0, 0x24, 0x33, 0x62, 0x72, 0x82, 0x09,
    0x0A, 0x16, 0x17, 0x18, 0x19, 0x1A, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2A, 0x34, 0x35, 0x36, 0x37, 0x38, 0x39, 0x3A,
    0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4A, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5A, 0x63, 0x64, 0x65,
    0x66, 0x67, 0x68, 0x69, 0x6A, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7A, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88,
    0x89, 0x8A, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9A, 0xA2, 0xA3, 0xA4, 0xA5, 0xA6, 0xA7, 0xA8, 0xA9,
    0xAA, 0xB2, 0xB3, 0xB4, 0xB5, 0xB6, 0xB7, 0xB8, 0xB9, 0xBA, 0xC2, 0xC3, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xCA,
    0xD2, 0xD3, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8, 0xD9, 0xDA, 0xE1, 0xE2, 0xE3, 0xE4, 0xE5, 0xE6, 0xE7, 0xE8, 0xE9, 0xEA,
    0xF1, 0xF2, 0xF3, 0xF4, 0xF5, 0xF6, 0xF7, 0xF8, 0xF9, 0xFA,
];
#[rustfmt::skip]
const AC_CHROMA: [u8; 162] = [
    0x00, 0x01, 0x02, 0x03, 0x11, 0x04, 0x05, 0x21, 0x31, 0x06, 0x12, 0x41, 0x51, 0x07, 0x61, 0x71, 0x13, 0x22, 0x32,
    0x81, 0x08, 0x14, 0x42, 0x91, 0xA1, 0xB1, 0xC1, 0x09, 0x23, 0x33, 0x52, 0xF0, 0x15, 0x62, 0x72, 0xD1, 0x0A, 0x16,
    0x24, 0x34, 0xE1, 0x25, 0xF1, 0x17, 0x18, 0x19, 0x1A, 0x26, 0x27, 0x28, 0x29, 0x2A, 0x35, 0x36, 0x37, 0x38, 0x39,
    0x3A, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48, 0x49, 0x4A, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5A, 0x63, 0x64,
    0x65, 0x66, 0x67, 0x68, 0x69, 0x6A, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7A, 0x82, 0x83, 0x84, 0x85, 0x86,
    0x87, 0x88, 0x89, 0x8A, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9A, 0xA2, 0xA3, 0xA4, 0xA5, 0xA6, 0xA7,
    0xA8, 0xA9, 0xAA, 0xB2, 0xB3, 0xB4, 0xB5, 0xB6, 0xB7, 0xB8, 0xB9, 0xBA, 0xC2, 0xC3, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8,
    0xC9, 0xCA, 0xD2, 0xD3, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8, 0xD9, 0xDA, 0xE2, 0xE3, 0xE4, 0xE5, 0xE6, 0xE7, 0xE8, 0xE9,
    0xEA, 0xF2, 0xF3, 0xF4, 0xF5, 0xF6, 0xF7, 0xF8, 0xF9, 0xFA,
];

impl<'a> HuffmanTable<'a> {
    /// Parses the table at the start of `body`. Also returns the rest.
    pub(crate) fn parse(body: &'a [u8]) -> Result<(Self, &'a [u8]), String> {
        let Some((counts, rest)) = body.split_first_chunk::<CODE_MAX>() else {
            return Err(format!(
                "a Huffman table of {} bytes, at least 16 expected",
                body.len()
            ));
        };
        let total: usize = counts.iter().map(|count| usize::from(*count)).sum();
        if total > 256 || total > rest.len() {
            return Err(format!(
                "a Huffman table of {total} symbols in {} bytes",
                rest.len()
            ));
        }
        // Code space in use, counted in codes of the maximum length.
        let used: usize = counts
            .iter()
            .enumerate()
            .map(|(index, count)| usize::from(*count) << (15 - index))
            .sum();
        if used > 1 << CODE_MAX {
            return Err("a Huffman table with more codes than its lengths allow".into());
        }
        let (symbols, rest) = rest.split_at(total);
        Ok((Self { counts, symbols }, rest))
    }

    /// Symbol, code and length of the code, shortest first.
    pub(crate) fn codes(&self) -> impl Iterator<Item = (u8, u32, u32)> + use<'a> {
        let lengths = (1_u32..)
            .zip(self.counts)
            .flat_map(|(length, count)| (0..*count).map(move |_| length));
        let mut code = 0_u32;
        let mut before = 0;
        self.symbols
            .iter()
            .zip(lengths)
            .map(move |(symbol, length)| {
                code <<= length - before;
                before = length;
                let this = code;
                code += 1;
                (*symbol, this, length)
            })
    }
}

/// Decodes any code by its length, for the few that a lookup table does not hold.
#[derive(Clone)]
struct Canonical {
    /// For each length: the first 16-bit word beyond the codes of this length or shorter.
    limits: [u32; CODE_MAX + 1],
    /// For each length: index of a symbol minus its code.
    bases: [i32; CODE_MAX + 1],
    symbols: [u8; 256],
}

impl Canonical {
    const EMPTY: Self = Self {
        limits: [0; CODE_MAX + 1],
        bases: [0; CODE_MAX + 1],
        symbols: [0; 256],
    };

    fn new(table: HuffmanTable<'_>) -> Self {
        let Self {
            mut limits,
            mut bases,
            mut symbols,
        } = Self::EMPTY;
        let mut seen = 0;
        let mut beyond = 0;
        for (index, (symbol, code, length)) in table.codes().enumerate() {
            symbols[index] = symbol;
            if seen != length {
                bases[length as usize] = index as i32 - code as i32;
                seen = length;
            }
            beyond = (code + 1) << (CODE_MAX as u32 - length);
            limits[length as usize] = beyond;
        }
        // A length without a code has the limit of the shorter lengths.
        let mut last = 0;
        for limit in &mut limits {
            last = last.max(*limit);
            *limit = last;
        }
        debug_assert_eq!(last, beyond);
        Self {
            limits,
            bases,
            symbols,
        }
    }

    /// Reads a code; 16 bits must be available.
    #[inline]
    fn symbol(&self, bits: &mut Bits<'_>) -> Result<u8, Fault> {
        let word = bits.peek(CODE_MAX as u32) as u32;
        let length = (1..=CODE_MAX)
            .find(|length| word < self.limits[*length])
            .ok_or(Fault::Code)?;
        bits.skip(length as u32);
        let index = (word >> (CODE_MAX - length)) as i32 + self.bases[length];
        self.symbols.get(index as usize).copied().ok_or(Fault::Code)
    }
}

/// The number that these `size` bits encode (F.2.2.1).
#[inline(always)]
pub(super) fn extend(bits: u32, size: u32) -> i32 {
    let half = (1_i32 << size) >> 1;
    let value = bits as i32;
    if value < half {
        value - (1 << size) + 1
    } else {
        value
    }
}

/// A lookup table that is refilled in place.
pub(super) trait Lookup {
    const EMPTY: Self;

    fn fill(&mut self, table: HuffmanTable<'_>);
}

/// DC differences.
pub(super) type Dc = Values<false>;
/// AC coefficients of a progressive scan, one by one.
pub(super) type Band = Values<true>;

/// Symbols with the values after them; with `RUNS` each also has a run.
pub(super) struct Values<const RUNS: bool> {
    /// The value in bits 16 to 31 (0 for a symbol without one), the run before it in bits 8 to 11,
    /// and the length of code and value in bits 0 to 4. All 0 if they are longer than the index.
    fast: [u32; 1 << DECODE_BITS],
    any: Canonical,
}

impl<const RUNS: bool> Lookup for Values<RUNS> {
    const EMPTY: Self = Self {
        fast: [0; 1 << DECODE_BITS],
        any: Canonical::EMPTY,
    };

    fn fill(&mut self, table: HuffmanTable<'_>) {
        self.fast.fill(0);
        for (symbol, code, length) in table.codes() {
            let (run, size) = Self::meaning(symbol);
            if size > VALUE_BITS || length + size > DECODE_BITS {
                continue;
            }
            let free = DECODE_BITS - length - size;
            for bits in 0..1 << size {
                let entry = (extend(bits, size) << 16) as u32 | run << 8 | (length + size);
                let start = ((code << size | bits) << free) as usize;
                self.fast[start..start + (1 << free)].fill(entry);
            }
        }
        self.any = Canonical::new(table);
    }
}

impl<const RUNS: bool> Values<RUNS> {
    /// A symbol's run, and the number of bits of its value.
    fn meaning(symbol: u8) -> (u32, u32) {
        let symbol = u32::from(symbol);
        if RUNS {
            (symbol >> 4, symbol & 15)
        } else {
            (0, symbol)
        }
    }

    /// Refills `bits`, then reads a symbol with its value; at least 25 bits remain available.
    /// Returns the run and the value, which is 0 for a symbol without one.
    #[inline(always)]
    pub(super) fn read(&self, bits: &mut Bits<'_>) -> Result<(u32, i32), Fault> {
        bits.refill();
        let entry = self.fast[bits.peek(DECODE_BITS)];
        if entry != 0 {
            bits.skip(entry & 31);
            return Ok((entry >> 8 & 15, entry as i32 >> 16));
        }
        let (found, after) = self.long(bits.clone())?;
        *bits = after;
        Ok(found)
    }

    #[inline(never)]
    fn long<'a>(&self, mut bits: Bits<'a>) -> Result<((u32, i32), Bits<'a>), Fault> {
        let (run, size) = Self::meaning(self.any.symbol(&mut bits)?);
        if size > VALUE_BITS {
            return Err(Fault::Code);
        }
        Ok(((run, extend(bits.take(size), size)), bits))
    }
}

/// AC coefficients.
pub(super) struct Ac {
    fast: [CodeEntry; 1 << DECODE_BITS],
    skip: [Skip; 1 << SKIP_BITS],
    any: Canonical,
}

/// What the next bits mean: one coefficient, two coefficients, or one and the end of the block.
///
/// | bits 0 to 5 | bit 7 | 8 to 15 | 16 to 23 | 32 to 47 | 48 to 63 | |
/// |---|---|---|---|---|---|---|
/// | length | 0 | steps, 1 to 16 | steps of both | value | value | two coefficients, each so many places further |
/// | length | 0 | steps | the same | value | the same | one |
/// | length | 0 | steps | [`END`] + steps + 1 | value | the same | one, and the end |
/// | length of the code | 1 | steps | 0 | size | 0 | one; its value's bits follow |
/// | length | 1 | 16 | 0 | 0 | 0 | 16 zeros |
/// | length | 1 | 0 | 0 | 0 | 0 | the end |
/// | 0 | 1 | 0 | 0 | 0 | 0 | a longer code, or none |
///
/// A shift instruction takes its distance from the lowest bits and ignores those above.
#[derive(Clone, Copy)]
struct CodeEntry(u64);

/// Number of steps that stands for the end of a block: more than any block has.
const END: usize = 128;

impl CodeEntry {
    const RARE: u64 = 1 << 7;
    const NONE: Self = Self(Self::RARE);

    fn value(bits: u32, steps: u32, value: i32) -> Self {
        let steps = u64::from(steps);
        let value = u64::from(value as u16);
        Self(u64::from(bits) | steps << 8 | steps << 16 | value << 32 | value << 48)
    }

    fn rare(bits: u32, steps: u32, size: u32) -> Self {
        Self(u64::from(bits) | Self::RARE | u64::from(steps) << 8 | u64::from(size) << 32)
    }

    /// Combines this entry with the next one, if `room` is enough for the bits of both.
    fn with(self, next: Self, room: u32) -> Self {
        let bits = self.bits() + next.bits();
        let whole = !self.is_rare() && next.bits() > 0 && bits <= room;
        let first = self.0 & 0xFFFF_0000_FF00;
        match next.is_rare() {
            false if whole => {
                let steps = (self.steps() + next.steps()) as u64;
                Self(first | u64::from(bits) | steps << 16 | (next.0 & 0xFFFF_0000_0000) << 16)
            }
            true if whole && next.steps() == 0 => {
                let steps = (END + self.steps() + 1) as u64;
                Self(first | u64::from(bits) | steps << 16 | (self.0 & 0xFFFF_0000_0000) << 16)
            }
            _ => self,
        }
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        (self.0 & 63) as u32
    }

    #[inline(always)]
    fn is_rare(self) -> bool {
        self.0 & Self::RARE != 0
    }

    #[inline(always)]
    fn steps(self) -> usize {
        (self.0 >> 8 & 0xFF) as usize
    }

    #[inline(always)]
    fn all_steps(self) -> usize {
        (self.0 >> 16 & 0xFF) as usize
    }

    /// Number of value bits that follow a rare entry.
    fn size(self) -> u32 {
        if self.is_rare() {
            (self.0 >> 32) as u32 & 15
        } else {
            0
        }
    }

    #[inline(always)]
    fn first(self) -> i16 {
        (self.0 >> 32) as i16
    }

    #[inline(always)]
    fn last(self) -> i16 {
        (self.0 >> 48) as i16
    }
}

/// Several codes to skip: how many bits they take, and by how many places they advance. The end of
/// the block counts as [`END`] + 1 places. The entry is 0 if not even one code fits the index.
#[derive(Clone, Copy, Default)]
struct Skip(u16);

impl Skip {
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from(self.0 & 15)
    }

    #[inline(always)]
    fn steps(self) -> usize {
        usize::from(self.0 >> 4)
    }
}

impl Skip {
    /// Fills the table with the codes that fit in the bits of each index.
    ///
    /// This must be fast, because every picture with its own tables needs it. So the entries after
    /// a code are copied from the entries for the remaining bits, which were computed before and
    /// are the same for each value that follows the code.
    fn fill(to: &mut [Self; 1 << SKIP_BITS], table: HuffmanTable<'_>) {
        // The entries for indices of `bits` bits start at `1 << bits`.
        let mut all = [Self::default(); 2 << SKIP_BITS];
        for bits in 1..=SKIP_BITS {
            for (code, length, symbol) in
                Symbol::all(table).take_while(|(_, length, _)| *length <= bits)
            {
                let Some(free) = bits.checked_sub(length + symbol.size) else {
                    continue;
                };
                let one = 1 << free;
                let start = (1 << bits) + (code << (bits - length)) as usize;
                for behind in 0..one {
                    all[start + behind] = symbol.and(length + symbol.size, all[one + behind]);
                }
                (1..1 << symbol.size)
                    .for_each(|value| all.copy_within(start..start + one, start + value * one));
            }
        }
        to.copy_from_slice(&all[1 << SKIP_BITS..]);
    }
}

/// Meaning of a code in a baseline JPEG.
#[derive(Clone, Copy)]
struct Symbol {
    /// 0 for the end of the block.
    steps: u32,
    /// Bits of the value.
    size: u32,
}

impl Symbol {
    /// `None` for bytes without a meaning.
    fn of(byte: u8) -> Option<Self> {
        let run = u32::from(byte >> 4);
        let size = u32::from(byte & 15);
        match (run, size) {
            (0, 0) => Some(Self { steps: 0, size }),
            (15, 0) => Some(Self { steps: 16, size }),
            (_, 1..=VALUE_BITS) => Some(Self {
                steps: run + 1,
                size,
            }),
            _ => None,
        }
    }

    /// Codes, their lengths and symbols, shortest first.
    fn all(table: HuffmanTable<'_>) -> impl Iterator<Item = (u32, u32, Self)> {
        table
            .codes()
            .filter_map(|(byte, code, length)| Some((code, length, Self::of(byte)?)))
    }

    /// The entry for this symbol, of `bits` bits, joined with `behind`, the symbols after it, if a
    /// block has places for all of them.
    fn and(self, bits: u32, behind: Skip) -> Skip {
        let steps = self.steps as usize;
        match behind.steps() {
            _ if steps == 0 => Skip(((END + 1) << 4) as u16 | bits as u16),
            more if steps + more % END <= 64 => {
                Skip(((steps + more) << 4) as u16 | (bits + behind.bits()) as u16)
            }
            _ => Skip((steps << 4) as u16 | bits as u16),
        }
    }
}

/// Number of entries of at most [`DECODE_BITS`] bits between two refills.
const PER_REFILL: u32 = FULL / DECODE_BITS;

impl Lookup for Ac {
    const EMPTY: Self = Self {
        fast: [CodeEntry::NONE; 1 << DECODE_BITS],
        skip: [Skip(0); 1 << SKIP_BITS],
        any: Canonical::EMPTY,
    };

    fn fill(&mut self, table: HuffmanTable<'_>) {
        let mut single = [CodeEntry::NONE; 1 << DECODE_BITS];
        for (code, bits, symbol) in Symbol::all(table).filter(|(_, bits, _)| *bits <= DECODE_BITS) {
            let steps = symbol.steps;
            let size = symbol.size;
            let mut fill = |code: u32, bits: u32, entry: CodeEntry| {
                let free = DECODE_BITS - bits;
                let start = (code << free) as usize;
                single[start..start + (1 << free)].fill(entry);
            };
            match bits + size {
                all @ ..=DECODE_BITS if size > 0 => {
                    for value in 0..1 << size {
                        fill(
                            code << size | value,
                            all,
                            CodeEntry::value(all, steps, extend(value, size)),
                        );
                    }
                }
                _ => fill(code, bits, CodeEntry::rare(bits, steps, size)),
            }
        }
        // Zeros follow the shifted index: the next entry is valid only if it needs none of them.
        let next = |index: usize, entry: CodeEntry| {
            single[index << entry.bits() & ((1 << DECODE_BITS) - 1)]
        };
        for (index, (to, entry)) in self.fast.iter_mut().zip(single).enumerate() {
            *to = entry.with(next(index, entry), DECODE_BITS);
        }
        Skip::fill(&mut self.skip, table);
        self.any = Canonical::new(table);
    }
}

impl Ac {
    /// Reads the coefficients after the first. Returns the place after the last one that was read.
    #[inline(always)]
    pub(super) fn read(&self, bits: &mut Bits<'_>, out: &mut [i16; 64]) -> Result<usize, Fault> {
        let mut next = 1;
        loop {
            bits.refill();
            for _ in 0..PER_REFILL {
                let entry = self.fast[bits.peek(DECODE_BITS)];
                let one = next + entry.steps();
                let both = next + entry.all_steps();
                if entry.is_rare() || both > 64 {
                    if entry.is_rare() && entry.steps() == 0 && entry.bits() != 0 {
                        bits.skip(entry.bits());
                        return Ok(next);
                    }
                    if both > END && one < 64 {
                        bits.skip(entry.bits());
                        out[usize::from(PLACES[one & 127]) & 63] = entry.first();
                        return Ok(one);
                    }
                    let after;
                    (next, after) = self.rare(bits.clone(), entry, next, out)?;
                    *bits = after;
                    break;
                }
                bits.skip(entry.bits());
                // A single coefficient is stored twice.
                out[usize::from(PLACES[one & 127]) & 63] = entry.first();
                out[usize::from(PLACES[both & 127]) & 63] = entry.last();
                next = both;
                if next == 64 {
                    break;
                }
            }
            if next >= 64 {
                return if next == 64 { Ok(64) } else { Err(Fault::Long) };
            }
        }
    }

    /// Does one step of [`read`](Self::read): a long code or value, zeros, the end, or the last
    /// coefficient.
    #[inline(never)]
    fn rare<'a>(
        &self,
        mut bits: Bits<'a>,
        entry: CodeEntry,
        mut next: usize,
        out: &mut [i16; 64],
    ) -> Result<(usize, Bits<'a>), Fault> {
        bits.refill();
        let (steps, size) = self.one(&mut bits, entry)?;
        if steps == END {
            // The end has a long code. After the last place of a block, an end is an error.
            return if next <= 63 {
                Ok((64, bits))
            } else {
                Err(Fault::Long)
            };
        }
        next += steps;
        if size > 0 {
            out[usize::from(PLACES[next & 127]) & 63] = extend(bits.take(size), size) as i16;
        }
        Ok((next, bits))
    }

    /// Reads a code. Returns its steps ([`END`] for the end), and the size of its value, which
    /// follows.
    #[inline(always)]
    fn one(&self, bits: &mut Bits<'_>, entry: CodeEntry) -> Result<(usize, u32), Fault> {
        if entry.is_rare() && entry.bits() != 0 {
            bits.skip(entry.bits());
            return Ok((
                if entry.steps() == 0 {
                    END
                } else {
                    entry.steps()
                },
                entry.size(),
            ));
        }
        let symbol = Symbol::of(self.any.symbol(bits)?).ok_or(Fault::Code)?;
        Ok((
            if symbol.steps == 0 {
                END
            } else {
                symbol.steps as usize
            },
            symbol.size,
        ))
    }

    /// Skips the coefficients after the first.
    #[inline(always)]
    pub(super) fn skip(&self, bits: &mut Bits<'_>) -> Result<(), Fault> {
        let mut next = 1;
        loop {
            bits.refill();
            for _ in 0..FULL / SKIP_BITS {
                let entry = self.skip[bits.peek(SKIP_BITS)];
                let after = next + entry.steps();
                if entry.0 == 0 || (after > 64 && after < END) || after > END + 64 {
                    let (steps, rest) = self.skip_one(bits.clone())?;
                    *bits = rest;
                    next += steps;
                    break;
                }
                bits.skip(entry.bits());
                next = after;
                if next >= 64 {
                    return Ok(());
                }
            }
            match next {
                0..64 => {}
                64 | END.. => return Ok(()),
                _ => return Err(Fault::Long),
            }
        }
    }

    #[inline(never)]
    fn skip_one<'a>(&self, mut bits: Bits<'a>) -> Result<(usize, Bits<'a>), Fault> {
        bits.refill();
        let entry = self.fast[bits.peek(DECODE_BITS)];
        let (steps, size) = self.one(&mut bits, entry)?;
        bits.skip(size);
        Ok((steps, bits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_tables_are_refused() {
        let table = |counts: &[u8], symbols: usize| {
            [counts, &vec![0; 16 - counts.len()], &vec![7; symbols]].concat()
        };
        assert!(
            HuffmanTable::parse(&table(&[2], 2)).is_ok(),
            "two codes of one bit fill the code space"
        );
        let wrong = [
            table(&[3], 3),
            table(&[1, 3], 4),
            table(&[0, 0, 1], 0),
            table(&[0; 15], 0)[..15].to_vec(),
        ];
        for bytes in wrong
            .into_iter()
            .chain([[vec![0; 14], vec![255, 255], vec![1; 510]].concat()])
        {
            assert!(HuffmanTable::parse(&bytes).is_err(), "{bytes:?}");
        }
    }
}
