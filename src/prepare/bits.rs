//! Bits of entropy-coded data, written and stuffed.
//!
//! Invariant: after [`BitWriter::pad`], the output is whole bytes.

/// Writes bits, with stuffing.
pub(super) struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    /// The lowest `count` bits wait for output; fewer than 32 between two calls.
    word: u64,
    count: u32,
}

impl<'a> BitWriter<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, word: 0, count: 0 }
    }

    /// Appends the lowest `count` (up to 32) bits; the bits above them must be zero.
    #[inline(always)]
    pub(super) fn put(&mut self, bits: u32, count: u32) {
        self.word = self.word << count | u64::from(bits);
        self.count += count;
        if self.count >= 32 {
            self.count -= 32;
            let four = (self.word >> self.count) as u32;
            // Whether one of the bytes is 0xFF: then its complement is zero.
            if (!four).wrapping_sub(0x0101_0101) & four & 0x8080_8080 == 0 {
                self.out.extend_from_slice(&four.to_be_bytes());
            } else {
                four.to_be_bytes().into_iter().for_each(|byte| self.byte(byte));
            }
        }
    }

    fn byte(&mut self, byte: u8) {
        self.out.push(byte);
        if byte == 0xFF {
            self.out.push(0);
        }
    }

    /// Fills the last byte with ones, as the standard requires, and writes all waiting bits.
    pub(super) fn pad(&mut self) {
        let missing = (8 - self.count % 8) % 8;
        self.put((1 << missing) - 1, missing);
        while self.count > 0 {
            self.count -= 8;
            self.byte((self.word >> self.count) as u8);
        }
    }

    /// Pads, then writes a marker.
    pub(super) fn marker(&mut self, code: u8) {
        self.pad();
        self.out.extend([0xFF, code]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Draws;

    #[test]
    fn written_bits_are_stuffed_and_padded_with_ones() {
        for seed in 0..50 {
            let mut draws = Draws::new(seed, 0, 0, "bits");
            let (mut out, mut right) = (Vec::new(), Vec::new());
            let mut writer = BitWriter::new(&mut out);
            for k in 0..500 {
                let count = draws.below(33) as u32;
                // Every third value is all ones, so that stuffing happens at every position.
                let bits = (if k % 3 == 0 { u64::MAX } else { draws.below(1 << 32) } & ((1 << count) - 1)) as u32;
                writer.put(bits, count);
                right.extend((0..count).rev().map(|bit| bits >> bit & 1));
            }
            writer.marker(0xD9);
            right.resize(right.len().next_multiple_of(8), 1);
            let bytes = right.chunks(8).map(|byte| byte.iter().fold(0, |all, bit| all << 1 | *bit as u8));
            let stuffed: Vec<u8> =
                bytes.flat_map(|byte| [byte, 0].into_iter().take(1 + usize::from(byte == 0xFF))).collect();
            assert!(out == [&stuffed[..], &[0xFF, 0xD9]].concat(), "seed {seed}");
        }
    }
}
