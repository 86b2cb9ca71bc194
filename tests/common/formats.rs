//! Encoders of records and members, after the definitions of the formats.

#![allow(dead_code, reason = "each test binary uses its own part")]

/// A record of a TFRecord file, with another CRC implementation than the crate's.
pub fn tf_record(payload: &[u8]) -> Vec<u8> {
    let masked = |bytes: &[u8]| {
        let mut crc = !0_u32;
        for byte in bytes {
            crc ^= u32::from(*byte);
            (0..8).for_each(|_| crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 });
        }
        (!crc)
            .rotate_right(15)
            .wrapping_add(0xa282_ead8)
            .to_le_bytes()
    };
    let len = (payload.len() as u64).to_le_bytes();
    [&len[..], &masked(&len), payload, &masked(payload)].concat()
}

/// A tar member with a short name.
pub fn tar_member(name: &str, bytes: &[u8]) -> Vec<u8> {
    let mut block = [0_u8; 512];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(124, format!("{:011o}\0", bytes.len()).as_bytes());
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut out = [&block[..], bytes].concat();
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

/// A picture without compression; `pixels` gives the bytes of all rows.
pub fn bmp(width: u32, height: u32, pixels: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
    let row = (width * 3).next_multiple_of(4);
    let words = |words: &[u32]| {
        words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect::<Vec<_>>()
    };
    let header = words(&[
        54 + row * height,
        0,
        54,
        40,
        width,
        height,
        1 | 24 << 16,
        0,
        row * height,
        0,
        0,
        0,
        0,
    ]);
    [b"BM".to_vec(), header, pixels((row * height) as usize)].concat()
}
