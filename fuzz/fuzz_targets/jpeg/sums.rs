//! Whether an inverse DCT can overflow.

#[path = "../../../tests/common/naive_jpeg.rs"]
mod naive_jpeg;

/// The largest sum of a block's coefficients, all as positive; nothing if a naive reader refuses the picture.
///
/// Up to 4000, no step of a transform exceeds what libjpeg-turbo has room for: 16 bits, and a table of 1024 samples at 1/8.
pub fn largest(picture: &[u8]) -> Option<u64> {
    let (read, _) = naive_jpeg::read(picture).ok()?;
    let mut quants = [[0; 64]; 4];
    for segment in read.others.iter().filter(|segment| segment[0] == 0xDB) {
        let mut body = &segment[1..];
        while let Some((which, rest)) = body.split_first() {
            let (values, after) = rest.split_at_checked(64 << (which >> 4))?;
            let step = values.len() / 64;
            let value = |bytes: &[u8]| bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
            let target = quants.get_mut(usize::from(which & 15))?;
            target.iter_mut().zip(values.chunks_exact(step)).for_each(|(quant, bytes)| *quant = value(bytes));
            body = after;
        }
    }
    let quant = |component: usize| quants.get(usize::from(read.frame[6 + 3 * component + 2]));
    let sum = |(component, values): &(usize, [i32; 64])| {
        Some(quant(*component)?.iter().zip(values).map(|(quant, value)| quant * u64::from(value.unsigned_abs())).sum())
    };
    read.blocks.iter().map(sum).max().flatten()
}
