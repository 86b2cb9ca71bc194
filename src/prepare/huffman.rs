//! Huffman tables of JPEG: parse, look up, optimise.
//!
//! Limits: codes have at most 16 bits; the code of all ones is never assigned. A table is untrusted: it is refused if
//! its codes do not fit the code space.

use super::bits::BitReader;
use crate::error::{Error, ErrorKind, Result, Stage};

/// Codes up to this length need one lookup.
const FAST_BITS: u32 = 10;
/// Longest code.
const CODE_MAX: usize = 16;

/// The content of a table in a DHT segment: the number of codes of each length, and the symbols in the order of their
/// codes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    counts: [u8; CODE_MAX],
    symbols: Vec<u8>,
}

impl Table {
    /// Parses one table from the front of `body`, which lies at `offset` of the file; returns the rest, too.
    ///
    /// Errors: cut, more than 256 symbols, more codes than fit.
    pub(super) fn parse(body: &[u8], offset: usize) -> Result<(Self, &[u8])> {
        let bad = |message: String| {
            let error = Error::new(ErrorKind::Decode, Stage::Decode, message);
            Err(error.with_range(offset as u64, body.len() as u64))
        };
        let Some((counts, rest)) = body.split_first_chunk::<CODE_MAX>() else {
            return bad(format!("a Huffman table of {} bytes, at least 16 expected", body.len()));
        };
        let total: usize = counts.iter().map(|count| usize::from(*count)).sum();
        if total > 256 || total > rest.len() {
            return bad(format!("a Huffman table of {total} symbols in {} bytes", rest.len()));
        }
        // In units of the longest code.
        let used: usize = counts.iter().enumerate().map(|(index, count)| usize::from(*count) << (15 - index)).sum();
        if used > 1 << CODE_MAX {
            return bad("a Huffman table with more codes than its lengths allow".into());
        }
        let (symbols, rest) = rest.split_at(total);
        Ok((Self { counts: *counts, symbols: symbols.to_vec() }, rest))
    }

    /// Appends the table in the form of a DHT segment.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.counts);
        out.extend_from_slice(&self.symbols);
    }

    /// Number of bytes that [`Self::write`] appends.
    pub(super) fn bytes(&self) -> usize {
        CODE_MAX + self.symbols.len()
    }

    /// Symbol, code and length of the code, shortest first.
    fn codes(&self) -> impl Iterator<Item = (u8, u32, u32)> + '_ {
        let lengths = (1_u32..).zip(self.counts).flat_map(|(length, count)| (0..count).map(move |_| length));
        let mut code = 0_u32;
        let mut before = 0;
        self.symbols.iter().zip(lengths).map(move |(symbol, length)| {
            code <<= length - before;
            before = length;
            let this = code;
            code += 1;
            (*symbol, this, length)
        })
    }

    /// The table that encodes symbols of these frequencies in the fewest bits, with codes of at most 16 bits and none
    /// of all ones (package-merge). Symbols of frequency 0 get no code. Depends on `frequencies` alone.
    pub(super) fn optimal(frequencies: &[u64; 256]) -> Self {
        // The first leaf stands for the code of all ones. It has no weight, so it gets the longest code.
        let mut leaves: Vec<(u64, Option<u8>)> = (0..=255)
            .filter(|symbol| frequencies[usize::from(*symbol)] > 0)
            .map(|s| (frequencies[usize::from(s)], Some(s)))
            .collect();
        leaves.sort_unstable();
        leaves.insert(0, (0, None));
        let lengths = package_merge(&leaves.iter().map(|(weight, _)| *weight).collect::<Vec<_>>());
        let mut coded: Vec<(usize, u8)> =
            leaves.iter().zip(lengths).filter_map(|((_, symbol), length)| Some((length, (*symbol)?))).collect();
        coded.sort_unstable();
        let mut counts = [0; CODE_MAX];
        coded.iter().for_each(|(length, _)| counts[length - 1] += 1);
        Self { counts, symbols: coded.into_iter().map(|(_, symbol)| symbol).collect() }
    }
}

/// Lengths of an optimal code of at most 16 bits for leaves of ascending weight; the first leaf has the longest code.
fn package_merge(weights: &[u64]) -> Vec<usize> {
    if weights.len() < 2 {
        return vec![1; weights.len()];
    }
    // Per level, the merged list of leaves and of pairs of the level below, as (weight, is a leaf).
    let mut levels: Vec<Vec<(u64, bool)>> = Vec::with_capacity(CODE_MAX);
    for _ in 0..CODE_MAX {
        let below = levels.last().map_or(&[][..], Vec::as_slice);
        let mut list: Vec<(u64, bool)> = weights.iter().map(|weight| (*weight, true)).collect();
        list.extend(below.chunks_exact(2).map(|pair| (pair[0].0 + pair[1].0, false)));
        // Stable: among equal weights, leaves come first, in their order.
        list.sort_by_key(|(weight, _)| *weight);
        levels.push(list);
    }
    let mut lengths = vec![0; weights.len()];
    let mut wanted = 2 * weights.len() - 2;
    for level in levels.iter().rev() {
        let leaves = level[..wanted].iter().filter(|(_, leaf)| *leaf).count();
        lengths[..leaves].iter_mut().for_each(|length| *length += 1);
        wanted = 2 * (wanted - leaves);
    }
    lengths
}

/// Finds symbols by their codes.
pub(super) struct Lookup {
    /// Indexed by the next 10 bits: symbol and length of the code. Length 0 for longer codes, and for none.
    fast: Box<[u16; 1 << FAST_BITS]>,
    /// For each longer length: the first 16-bit word beyond the codes of this length or shorter.
    limits: [u32; CODE_MAX + 1],
    /// For each length: index of a symbol minus its code.
    bases: [i32; CODE_MAX + 1],
    symbols: Vec<u8>,
}

impl Lookup {
    pub(super) fn new(table: &Table) -> Self {
        let mut fast = Box::new([0; 1 << FAST_BITS]);
        let (mut limits, mut bases) = ([0; CODE_MAX + 1], [0; CODE_MAX + 1]);
        let mut seen = 0;
        for (index, (symbol, code, length)) in table.codes().enumerate() {
            if length <= FAST_BITS {
                let start = (code << (FAST_BITS - length)) as usize;
                fast[start..start + (1 << (FAST_BITS - length))].fill(u16::from(symbol) << 8 | length as u16);
            }
            if seen != length {
                bases[length as usize] = index as i32 - code as i32;
                seen = length;
            }
            limits[length as usize] = (code + 1) << (CODE_MAX as u32 - length);
        }
        Self { fast, limits, bases, symbols: table.symbols.clone() }
    }

    /// Reads one code of at most 16 bits. The caller has made 32 bits available. `None`: no symbol has this code.
    #[inline(always)]
    pub(super) fn symbol(&self, reader: &mut BitReader<'_>) -> Option<u8> {
        let entry = self.fast[reader.peek(FAST_BITS) as usize];
        if entry & 0xFF == 0 {
            return self.long(reader);
        }
        reader.skip(u32::from(entry & 0xFF));
        Some((entry >> 8) as u8)
    }

    fn long(&self, reader: &mut BitReader<'_>) -> Option<u8> {
        let word = reader.peek(CODE_MAX as u32);
        let length = (FAST_BITS as usize + 1..=CODE_MAX).find(|length| word < self.limits[*length])?;
        reader.skip(length as u32);
        let index = (word >> (CODE_MAX - length)) as i32 + self.bases[length];
        self.symbols.get(usize::try_from(index).ok()?).copied()
    }
}

/// Finds codes by their symbols.
pub(super) struct Codes([(u32, u32); 256]);

impl Codes {
    pub(super) fn new(table: &Table) -> Self {
        let mut codes = [(0, 0); 256];
        for (symbol, code, length) in table.codes() {
            // If a symbol is listed twice, the shorter code counts.
            if codes[usize::from(symbol)].1 == 0 {
                codes[usize::from(symbol)] = (code, length);
            }
        }
        Self(codes)
    }

    /// Code and its length; length 0 if the symbol has none.
    #[inline(always)]
    pub(super) fn of(&self, symbol: u8) -> (u32, u32) {
        self.0[usize::from(symbol)]
    }

    /// Number of bits for all symbols together; `None` if one has no code.
    pub(super) fn cost(&self, frequencies: &[u64; 256]) -> Option<u64> {
        let used = self.0.iter().zip(frequencies).filter(|(_, frequency)| **frequency > 0);
        used.map(|((_, length), frequency)| (*length > 0).then_some(u64::from(*length) * frequency)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Draws;
    use crate::prepare::bits::{BitWriter, unstuff};
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    fn frequencies(seed: u64) -> [u64; 256] {
        let mut draws = Draws::new(seed, 0, 0, "frequencies");
        let used = draws.below(257);
        let steep = draws.below(12) as u32;
        let mut out = [0; 256];
        for _ in 0..used {
            let scale = 1 << draws.below(u64::from(steep) + 1);
            let weight = 1 + draws.below(scale);
            out[draws.below(256) as usize] = weight;
        }
        out
    }

    /// Bits of the best code without a length limit, with one unused leaf of no weight; and its longest code.
    fn unlimited(frequencies: &[u64; 256]) -> (u64, u32) {
        let used = frequencies.iter().filter(|weight| **weight > 0);
        let mut heap: BinaryHeap<_> = used.map(|weight| Reverse((*weight, 0))).chain([Reverse((0, 0))]).collect();
        let (mut cost, mut deepest) = (0, 0);
        while let (Some(Reverse(a)), Some(Reverse(b))) = (heap.pop(), heap.pop()) {
            cost += a.0 + b.0;
            deepest = a.1.max(b.1) + 1;
            heap.push(Reverse((a.0 + b.0, deepest)));
        }
        (cost, deepest)
    }

    #[test]
    fn an_optimal_table_matches_huffman_if_16_bits_suffice() {
        let mut compared = 0;
        for seed in 0..300 {
            let frequencies = frequencies(seed);
            let (cost, deepest) = unlimited(&frequencies);
            if deepest <= 16 {
                compared += 1;
                assert_eq!(Codes::new(&Table::optimal(&frequencies)).cost(&frequencies), Some(cost), "seed {seed}");
            }
        }
        assert!(compared > 200, "{compared}");
    }

    #[test]
    fn an_optimal_table_keeps_16_bits_and_never_uses_all_ones() {
        // Fibonacci weights would give codes of 40 bits.
        let mut steep = [0; 256];
        let (mut a, mut b) = (1, 1);
        for weight in steep.iter_mut().take(41) {
            *weight = a;
            (a, b) = (b, a + b);
        }
        assert!(unlimited(&steep).1 > 30);
        for frequencies in (0..200).map(frequencies).chain([steep, [1; 256], [u64::MAX >> 12; 256]]) {
            let table = Table::optimal(&frequencies);
            let mut bytes = Vec::new();
            table.write(&mut bytes);
            assert_eq!(bytes.len(), table.bytes());
            let (read, rest) = Table::parse(&bytes, 0).unwrap();
            assert!(read == table && rest.is_empty());
            for (symbol, code, length) in table.codes() {
                assert!((1..=16).contains(&length) && code < (1 << length) - 1, "{symbol}: {code:b} of {length} bits");
            }
            let coded = frequencies.iter().filter(|weight| **weight > 0).count();
            assert_eq!(table.symbols.len(), coded);
        }
    }

    #[test]
    fn only_codes_of_the_table_are_symbols() {
        for seed in 0..60 {
            let table = Table::optimal(&frequencies(seed));
            let (codes, lookup) = (Codes::new(&table), Lookup::new(&table));
            for symbol in &table.symbols {
                let (code, length) = codes.of(*symbol);
                for after in [0, u32::MAX] {
                    let mut bytes = Vec::new();
                    let mut writer = BitWriter::new(&mut bytes);
                    writer.put(code, length);
                    (0..4).for_each(|_| writer.put(after & 0x7F, 7));
                    writer.marker(0xD9);
                    let mut plain = Vec::new();
                    unstuff(&bytes, 0, &mut plain).unwrap();
                    let mut reader = BitReader::new(&plain);
                    reader.refill();
                    assert_eq!(lookup.symbol(&mut reader), Some(*symbol), "seed {seed}");
                    assert_eq!(reader.position(), length as usize);
                }
            }
            let mut reader = BitReader::new(&[0xFF; 8]);
            reader.refill();
            assert_eq!(lookup.symbol(&mut reader), None, "all ones are a code");
        }
    }

    #[test]
    fn impossible_tables_are_refused() {
        let table = |counts: &[u8], symbols: usize| [counts, &vec![0; 16 - counts.len()], &vec![7; symbols]].concat();
        assert!(Table::parse(&table(&[2], 2), 0).is_ok(), "two codes of one bit fill the code space");
        let wrong = [table(&[3], 3), table(&[1, 3], 4), table(&[0, 0, 1], 0), table(&[0; 15], 0)[..15].to_vec()];
        for bytes in wrong.into_iter().chain([[vec![0; 14], vec![255, 255], vec![1; 510]].concat()]) {
            assert_eq!(Table::parse(&bytes, 5).unwrap_err().kind(), ErrorKind::Decode, "{bytes:?}");
        }
    }
}
