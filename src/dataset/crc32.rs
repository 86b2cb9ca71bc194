//! CRC-32 as zip has it (the IEEE polynomial, reflected), eight bytes at a time by tables.

/// `TABLES[k][b]`: what byte `b` contributes when `k` bytes follow it.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut byte = 0;
    while byte < 256 {
        let mut k = 1;
        while k < 8 {
            let before: u32 = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            k += 1;
        }
        byte += 1;
    }
    tables
}

/// The checksum of `bytes`.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut crc = u32::MAX;
    for word in words {
        let word = u64::from_le_bytes(*word) ^ u64::from(crc);
        let part = |k: usize| TABLES[7 - k][(word >> (8 * k) & 0xff) as usize];
        crc = part(0) ^ part(1) ^ part(2) ^ part(3) ^ part(4) ^ part(5) ^ part(6) ^ part(7);
    }
    for byte in rest {
        crc = (crc >> 8) ^ TABLES[0][((crc ^ u32::from(*byte)) & 0xff) as usize];
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_checksums_come_out() {
        assert_eq!(crc32(b""), 0);
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b"The quick brown fox jumps over the lazy dog"), 0x414f_a339);
    }

    #[test]
    fn words_and_single_bytes_agree_at_every_length() {
        let bytes: Vec<u8> = (0..200_u32).map(|byte| (byte * 37 + 11) as u8).collect();
        for len in 0..bytes.len() {
            let slow = bytes[..len].iter().fold(u32::MAX, |crc, byte| {
                (0..8).fold(
                    crc ^ u32::from(*byte),
                    |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 },
                )
            });
            assert_eq!(crc32(&bytes[..len]), !slow, "{len}");
        }
    }
}
