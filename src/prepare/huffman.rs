//! Huffman tables to write with: the best ones, and codes by their symbols.
//!
//! Limits: codes have at most 16 bits; the code of all ones is never assigned.

use crate::jpeg::{CODE_MAX, Table};

/// A table of its own: the number of codes of each length, and the symbols in the order of their codes.
pub(super) struct Optimal {
    counts: [u8; CODE_MAX],
    symbols: Vec<u8>,
}

impl Optimal {
    /// The table that encodes symbols of these frequencies in the fewest bits, with codes of at most 16 bits and none
    /// of all ones (package-merge). Symbols of frequency 0 get no code. Depends on `frequencies` alone.
    pub(super) fn new(frequencies: &[u64; 256]) -> Self {
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

    pub(super) fn table(&self) -> Table<'_> {
        Table { counts: &self.counts, symbols: &self.symbols }
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

/// Finds codes by their symbols.
pub(super) struct Codes([(u32, u32); 256]);

impl Codes {
    /// Those of `table`; none without a table.
    pub(super) fn new(table: Option<Table<'_>>) -> Self {
        let mut codes = [(0, 0); 256];
        for (symbol, code, length) in table.iter().flat_map(Table::codes) {
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
                assert_eq!(
                    Codes::new(Some(Optimal::new(&frequencies).table())).cost(&frequencies),
                    Some(cost),
                    "seed {seed}"
                );
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
            let optimal = Optimal::new(&frequencies);
            let table = optimal.table();
            let bytes = [&table.counts[..], table.symbols].concat();
            assert_eq!(Table::parse(&bytes).unwrap(), (table, &[][..]));
            for (symbol, code, length) in table.codes() {
                assert!((1..=16).contains(&length) && code < (1 << length) - 1, "{symbol}: {code:b} of {length} bits");
            }
            let coded = frequencies.iter().filter(|weight| **weight > 0).count();
            assert_eq!(table.symbols.len(), coded);
        }
    }
}
