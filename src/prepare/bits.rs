//! Bits of entropy-coded data: unstuffed, read, written, stuffed again.
//!
//! Invariants: a read beyond the end gives zeros and is detected afterwards ([`BitReader::overrun`]), so the fast path
//! has no check per bit. After [`BitWriter::pad`], the output is whole bytes.

use crate::error::{Error, ErrorKind, Result, Stage};

/// The end of a restart interval's data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    /// Offset of the first 0xFF of the marker, fill bytes included.
    pub(super) at: usize,
    /// The marker's code.
    pub(super) marker: u8,
    /// Offset behind the marker.
    pub(super) after: usize,
}

/// Clears `out` and copies the data from `at` up to the next marker into it, without the zeros that follow a 0xFF.
///
/// Errors: the file ends without a marker, or fill bytes come before a stuffed zero (decoders disagree on their
/// meaning).
pub(super) fn unstuff(input: &[u8], at: usize, out: &mut Vec<u8>) -> Result<Stop> {
    out.clear();
    let mut from = at;
    loop {
        let rest = input.get(from..).unwrap_or_default();
        let Some(found) = memchr::memchr(0xFF, rest) else { return Err(cut(input)) };
        let marker_at = from + found;
        let mut code_at = marker_at + 1;
        while input.get(code_at) == Some(&0xFF) {
            code_at += 1;
        }
        match input.get(code_at) {
            None => return Err(cut(input)),
            Some(0) if code_at == marker_at + 1 => {
                out.extend_from_slice(&input[from..=marker_at]);
                from = code_at + 1;
            }
            Some(0) => {
                let message = "fill bytes inside the entropy-coded data";
                return Err(Error::new(ErrorKind::Decode, Stage::Decode, message).with_range(marker_at as u64, 2));
            }
            Some(marker) => {
                out.extend_from_slice(&input[from..marker_at]);
                return Ok(Stop { at: marker_at, marker: *marker, after: code_at + 1 });
            }
        }
    }
}

fn cut(input: &[u8]) -> Error {
    let message = "the JPEG ends inside its entropy-coded data, without an end marker";
    Error::new(ErrorKind::Truncated, Stage::Decode, message).with_range(input.len() as u64, 0)
}

/// Offset in `input` of byte `index` of the output of [`unstuff`] from `at` on. Slow: only for messages.
pub(super) fn offset_of(input: &[u8], at: usize, index: usize) -> usize {
    let mut offset = at;
    for _ in 0..index {
        let stuffed = input.get(offset) == Some(&0xFF) && input.get(offset + 1) == Some(&0);
        offset = (offset + 1 + usize::from(stuffed)).min(input.len());
    }
    offset
}

/// Reads bits, the highest of a byte first.
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    /// Next byte to load; continues beyond the end.
    at: usize,
    /// The next bits, left-aligned. Below the `bits` valid ones there may be copies of later bits.
    word: u64,
    bits: u32,
}

impl<'a> BitReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, word: 0, bits: 0 }
    }

    /// Makes at least 32 bits available.
    #[inline(always)]
    pub(super) fn refill(&mut self) {
        if self.bits >= 32 {
            return;
        }
        match self.bytes.get(self.at..).and_then(|rest| rest.first_chunk()) {
            Some(chunk) => {
                self.word |= u64::from_be_bytes(*chunk) >> self.bits;
                self.at += ((63 - self.bits) / 8) as usize;
                self.bits |= 56;
            }
            None => self.refill_slowly(),
        }
    }

    #[cold]
    fn refill_slowly(&mut self) {
        while self.bits < 56 {
            let byte = self.bytes.get(self.at).copied().unwrap_or(0);
            self.word |= u64::from(byte) << (56 - self.bits);
            self.bits += 8;
            self.at += 1;
        }
    }

    /// The next `count` (1 to 32) bits, without consuming them.
    #[inline(always)]
    pub(super) fn peek(&self, count: u32) -> u32 {
        (self.word >> (64 - count)) as u32
    }

    #[inline(always)]
    pub(super) fn skip(&mut self, count: u32) {
        self.word <<= count;
        self.bits -= count;
    }

    /// Consumes the next `count` (0 to 16) bits. The caller has made 32 bits available.
    #[inline(always)]
    pub(super) fn take(&mut self, count: u32) -> u32 {
        // Two shifts, because one shift by 64 overflows.
        let bits = ((self.word >> 1) >> (63 - count)) as u32;
        self.skip(count);
        bits
    }

    /// Number of consumed bits.
    pub(super) fn position(&self) -> usize {
        self.at * 8 - self.bits as usize
    }

    /// Whether more bits were consumed than exist.
    #[inline(always)]
    pub(super) fn overrun(&self) -> bool {
        self.position() > self.bytes.len() * 8
    }

    /// Number of whole bytes that are not yet begun.
    pub(super) fn left(&self) -> usize {
        self.bytes.len().saturating_sub(self.position().div_ceil(8))
    }
}

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

    #[test]
    fn written_bits_of_any_length_are_read_back() {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32
        };
        // Every third value is all ones, so that stuffing happens at every position.
        let values: Vec<(u32, u32)> = (0..5000)
            .map(|k| {
                let count = next() % 17;
                let mask = ((1_u64 << count) - 1) as u32;
                (if k % 3 == 0 { mask } else { next() & mask }, count)
            })
            .collect();
        let mut out = Vec::new();
        let mut writer = BitWriter::new(&mut out);
        values.iter().for_each(|(bits, count)| writer.put(*bits, *count));
        writer.marker(0xD9);
        let mut plain = Vec::new();
        let stop = unstuff(&out, 0, &mut plain).unwrap();
        assert_eq!((stop.marker, stop.after), (0xD9, out.len()));
        assert!(out.len() > plain.len() + 20, "nothing was stuffed");
        let mut reader = BitReader::new(&plain);
        for (bits, count) in values {
            reader.refill();
            assert_eq!(reader.take(count), bits);
        }
        assert!(!reader.overrun() && reader.left() == 0);
    }

    #[test]
    fn the_data_ends_at_a_marker_and_not_at_a_stuffed_byte() {
        let mut out = Vec::new();
        let input = [1, 0xFF, 0, 0xFF, 0, 2, 0xFF, 0xFF, 0xFF, 0xD0, 9];
        let stop = unstuff(&input, 0, &mut out).unwrap();
        assert_eq!((stop.at, stop.marker, stop.after, &out[..]), (6, 0xD0, 10, &[1, 0xFF, 0xFF, 2][..]));
        assert_eq!((0..4).map(|index| offset_of(&input, 0, index)).collect::<Vec<_>>(), [0, 1, 3, 5]);
        for (cut, kind) in [(&[1, 2][..], ErrorKind::Truncated), (&[1, 0xFF], ErrorKind::Truncated)] {
            assert_eq!(unstuff(cut, 0, &mut out).unwrap_err().kind(), kind);
        }
        let error = unstuff(&[7, 0xFF, 0xFF, 0, 1], 0, &mut out).unwrap_err();
        assert_eq!((error.kind(), error.site().offset), (ErrorKind::Decode, Some(1)));
    }

    #[test]
    fn reading_beyond_the_end_gives_zeros_and_is_detected() {
        let mut reader = BitReader::new(&[0xFF; 3]);
        reader.refill();
        assert_eq!((reader.take(16), reader.overrun(), reader.left()), (0xFFFF, false, 1));
        reader.refill();
        assert_eq!((reader.take(8), reader.overrun(), reader.left()), (0xFF, false, 0));
        reader.refill();
        assert_eq!((reader.take(1), reader.overrun(), reader.left()), (0, true, 0));
    }
}
