//! Bits of entropy-coded data, read in place.
//!
//! Invariants: at a marker and at the end of the input, the reader supplies zeros and counts them.
//! So no read needs a check, and [`Bits::overrun`] detects missing data afterwards. The position is
//! exact at any bit, even with stuffed bytes.

/// Position of a bit in the input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BitPlace {
    pub(super) byte: usize,
    pub(super) bit: u8,
}

impl BitPlace {
    /// Number of input bits before this position.
    pub(super) fn bits(self) -> u64 {
        8 * self.byte as u64 + u64::from(self.bit)
    }
}

/// Minimum number of bits that are available after [`Bits::refill`].
pub(super) const FULL: u32 = 56;

/// Number of bytes at the start of `bytes` that encode one data byte 0xFF: perhaps fill bytes, then
/// 0xFF and the zero that escapes it. 0 if `bytes` starts with anything else.
fn escaped(bytes: &[u8]) -> usize {
    let ones = bytes.iter().take_while(|byte| **byte == 0xFF).count();
    if ones > 0 && bytes.get(ones) == Some(&0) {
        ones + 1
    } else {
        0
    }
}

/// Reads bits, from the highest bit of each byte to the lowest.
#[derive(Clone)]
pub(super) struct Bits<'a> {
    input: &'a [u8],
    /// Next byte to load.
    at: usize,
    /// The next bits, left-aligned. Below the `count` valid bits there may be copies of later bits.
    word: u64,
    count: u32,
    /// Number of zero bytes supplied for missing data.
    fed: u32,
}

const ONES: u64 = 0x0101_0101_0101_0101;

impl<'a> Bits<'a> {
    /// Starts at bit `place.bit` of the byte at `place.byte`.
    pub(super) fn new(input: &'a [u8], place: BitPlace) -> Self {
        let mut bits = Self {
            input,
            at: place.byte,
            word: 0,
            count: 0,
            fed: 0,
        };
        bits.refill();
        bits.skip(u32::from(place.bit));
        bits
    }

    /// Makes at least [`FULL`] bits available.
    #[inline(always)]
    pub(super) fn refill(&mut self) {
        if let Some(chunk) = self
            .input
            .get(self.at..)
            .and_then(|rest| rest.first_chunk())
        {
            let word = u64::from_be_bytes(*chunk);
            // Whether one of the bytes is 0xFF: then its complement is zero.
            if (!word).wrapping_sub(ONES) & word & (ONES << 7) == 0 {
                self.word |= word >> self.count;
                self.at += ((63 - self.count) / 8) as usize;
                self.count |= FULL;
                return;
            }
        }
        // By value, so that the fields stay in registers on the path above.
        *self = self.clone().refilled();
    }

    #[cold]
    #[inline(never)]
    fn refilled(mut self) -> Self {
        while self.count < FULL {
            let byte = match self.input.get(self.at..) {
                Some([0xFF, 0, ..]) => {
                    self.at += 2;
                    0xFF
                }
                Some([byte, ..]) if *byte != 0xFF => {
                    self.at += 1;
                    *byte
                }
                // Fill is measured once: after the end of the data, `at` does not change.
                rest => match if self.fed > 0 {
                    0
                } else {
                    escaped(rest.unwrap_or_default())
                } {
                    0 => {
                        self.fed = self.fed.saturating_add(1);
                        0
                    }
                    bytes => {
                        self.at += bytes;
                        0xFF
                    }
                },
            };
            self.word |= u64::from(byte) << (56 - self.count);
            self.count += 8;
        }
        self
    }

    /// The next `count` (1 to 32) bits, without consuming them.
    #[inline(always)]
    pub(super) fn peek(&self, count: u32) -> usize {
        (self.word >> (64 - count)) as usize
    }

    /// Consumes `count` bits, which must be available.
    #[inline(always)]
    pub(super) fn skip(&mut self, count: u32) {
        self.word <<= count;
        self.count = self.count.wrapping_sub(count);
    }

    /// Consumes the next `count` (0 to 16) bits, which must be available.
    #[inline(always)]
    pub(super) fn take(&mut self, count: u32) -> u32 {
        // Two shifts, because one shift by 64 overflows.
        let bits = ((self.word >> 1) >> (63 - count)) as u32;
        self.skip(count);
        bits
    }

    /// A reader whose position is `count` (at most 16) bits earlier.
    #[cold]
    pub(super) fn back(&self, count: u32) -> Self {
        let over = (8 * self.fed).saturating_sub(self.count);
        let BitPlace { mut byte, bit } = if over > 0 {
            BitPlace {
                byte: self.at,
                bit: 0,
            }
        } else {
            self.place()
        };
        let mut bit = i64::from(bit) - i64::from(count.saturating_sub(over));
        while bit < 0 && byte > 0 {
            byte = self.before(byte);
            bit += 8;
        }
        let mut before = Self::new(
            self.input,
            BitPlace {
                byte,
                bit: bit.max(0) as u8,
            },
        );
        for _ in count..over {
            before.refill();
            before.skip(1);
        }
        before
    }

    /// Whether more bits were consumed than exist.
    #[inline(always)]
    pub(super) fn overrun(&self) -> bool {
        self.fed > 0 && self.fed * 8 > self.count
    }

    /// Position of the next bit; only approximate after an overrun.
    pub(super) fn place(&self) -> BitPlace {
        let unread = self.count - 8 * self.fed.min(self.count / 8);
        let mut at = self.at;
        // A partly read byte counts as unread: callers need its offset.
        for _ in 0..unread.div_ceil(8) {
            at = self.before(at);
        }
        BitPlace {
            byte: at,
            bit: (unread.next_multiple_of(8) - unread) as u8,
        }
    }

    /// Offset of the data byte before the one at `at`, which must not be the first.
    fn before(&self, mut at: usize) -> usize {
        while self.input.get(at) == Some(&0xFF) && self.input[at - 1] == 0xFF {
            at -= 1;
        }
        at - if self.input[..at].ends_with(&[0xFF, 0]) {
            2
        } else {
            1
        }
    }

    /// The first marker from the current position on, after any padding.
    pub(super) fn end_marker(&self) -> Option<u8> {
        let rest = &self.input[self.next_byte()..];
        rest.windows(2)
            .find(|pair| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF))
            .map(|pair| pair[1])
    }

    /// Offset of the first 0xFF from the current position on that is not followed by a zero: a
    /// marker, or fill before a marker.
    pub(super) fn end(&self) -> Option<usize> {
        let mut at = self.next_byte();
        loop {
            at += memchr::memchr(0xFF, &self.input[at..])?;
            match escaped(&self.input[at..]) {
                0 => return Some(at),
                bytes => at += bytes,
            }
        }
    }

    /// Offset of the first byte of which no bit was read.
    pub(super) fn next_byte(&self) -> usize {
        let place = self.place();
        let stuffed = self
            .input
            .get(place.byte..)
            .is_some_and(|rest| rest.starts_with(&[0xFF, 0]));
        match place.bit {
            0 => place.byte,
            _ if stuffed => place.byte + 2,
            _ => place.byte + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(input: &[u8]) -> Vec<(u32, BitPlace)> {
        let mut out = Vec::new();
        let mut at = 0;
        while at < input.len() {
            let stuffed = input[at] == 0xFF;
            if stuffed
                && input.get(at + 1) == Some(&0xFF)
                && input[at..].iter().find(|byte| **byte != 0xFF) == Some(&0)
            {
                // Fill.
                at += 1;
                continue;
            }
            if stuffed && input.get(at + 1) != Some(&0) {
                break;
            }
            out.extend((0..8).map(|bit| {
                (
                    u32::from(input[at] >> (7 - bit) & 1),
                    BitPlace { byte: at, bit },
                )
            }));
            at += if stuffed { 2 } else { 1 };
        }
        out
    }

    #[test]
    fn bits_and_their_places_equal_a_naive_walk() {
        let mut state = 7_u64;
        let mut next = |below: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let mut input: Vec<u8> = Vec::new();
            for _ in 0..next(60) {
                match next(4) {
                    0 => {
                        let fill = [0, 0, 1, 2, 80][next(5) as usize];
                        input.extend([0xFF].repeat(fill + 1).iter().chain(&[0]));
                    }
                    1 => input.push(0),
                    _ => input.push(next(255) as u8),
                }
            }
            let end: &[u8] =
                [&[0xFF, 0xD9][..], &[0xFF, 0xFF, 0xD0], &[], &[0xFF]][next(4) as usize];
            input.extend(end);
            let right = naive(&input);
            let mut bits = Bits::new(&input, BitPlace::default());
            let mut done = 0;
            while done < right.len() {
                let count = (next(17) as usize).min(right.len() - done);
                bits.refill();
                assert_eq!(bits.place(), right[done].1, "{input:02x?} at bit {done}");
                let mut jumped = Bits::new(&input, bits.place());
                jumped.refill();
                let value = right[done..done + count]
                    .iter()
                    .fold(0, |value, (bit, _)| value << 1 | bit);
                assert_eq!(
                    (bits.take(count as u32), jumped.take(count as u32)),
                    (value, value),
                    "{input:02x?}"
                );
                assert!(!bits.overrun());
                done += count;
            }
            bits.refill();
            assert_eq!(bits.next_byte(), input.len() - end.len(), "{input:02x?}");
            assert_eq!((bits.take(1), bits.overrun()), (0, true), "{input:02x?}");
        }
    }
}
