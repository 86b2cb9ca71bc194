//! The portable arithmetic of pixels, which the vector kernels must equal.
//!
//! Inverse DCT, interpolation of chroma and colour conversion use the integer formulas of
//! libjpeg-turbo's defaults (`islow`, fancy upsampling), with 16-bit overflow where its vector code
//! overflows.

/// Pairs of blocks: the coefficients, their quantisation tables, and the samples.
pub(super) type Blocks<'a> = (
    [&'a [i16; 64]; 2],
    [&'a [u16; 64]; 2],
    &'a mut [[u8; 64]; 2],
);

/// The functions that an instruction set can replace.
#[derive(Clone, Copy)]
pub(super) struct JpegKernels {
    /// Computes the 8 × 8 samples of two blocks. `idct4` and `idct2` compute only 4 × 4 and 2 × 2
    /// samples, and store them at the start of a block's first rows.
    pub(super) idct: fn(Blocks<'_>),
    pub(super) idct4: fn(Blocks<'_>),
    pub(super) idct2: fn(Blocks<'_>),
    /// Doubles the width of a row. `input` has one extra sample at each end.
    pub(super) h2v1: fn(input: &[u8], out: &mut [u8]),
    /// Doubles the width of a row interpolated between two rows, with weights 3 (`near`) and 1
    /// (`far`).
    pub(super) h2v2: fn(near: &[u8], far: &[u8], out: &mut [u8]),
    /// Interpolates a row between two rows, with weights 3 (`near`) and 1 (`far`); the rounding
    /// term `bias` is 1 or 2.
    pub(super) h1v2: fn(near: &[u8], far: &[u8], bias: u8, out: &mut [u8]),
    /// Converts luma and both chroma to RGB: three rows of one length to one of three times that
    /// length.
    pub(super) rgb: fn([&[u8]; 3], &mut [u8]),
}

impl JpegKernels {
    /// Samples of two blocks, of `size` (2, 4 or 8) rows and columns.
    #[inline(always)]
    pub(super) fn samples(
        &self,
        size: u32,
        blocks: [&[i16; 64]; 2],
        quants: [&[u16; 64]; 2],
    ) -> [[u8; 64]; 2] {
        let mut samples = [[0; 64]; 2];
        let idct = match size {
            8 => self.idct,
            4 => self.idct4,
            _ => self.idct2,
        };
        idct((blocks, quants, &mut samples));
        samples
    }
}

pub(super) const SCALAR: JpegKernels = JpegKernels {
    idct,
    idct4,
    idct2,
    h2v1,
    h2v2,
    h1v2,
    rgb,
};

/// Constants of the inverse DCT in units of 1/2¹³, as sums by which vector code multiplies.
pub(super) mod fixed {
    pub(crate) const F_0_541: i32 = 4433;
    pub(crate) const F_0_541_PLUS_0_765: i32 = 4433 + 6270;
    pub(crate) const F_0_541_LESS_1_847: i32 = 4433 - 15137;
    pub(crate) const F_1_175: i32 = 9633;
    pub(crate) const F_1_175_LESS_1_961: i32 = 9633 - 16069;
    pub(crate) const F_1_175_LESS_0_390: i32 = 9633 - 3196;
    pub(crate) const F_0_298_LESS_0_899: i32 = 2446 - 7373;
    pub(crate) const F_1_501_LESS_0_899: i32 = 12299 - 7373;
    pub(crate) const F_0_899: i32 = 7373;
    pub(crate) const F_2_053_LESS_2_562: i32 = 16819 - 20995;
    pub(crate) const F_3_072_LESS_2_562: i32 = 25172 - 20995;
    pub(crate) const F_2_562: i32 = 20995;
    // For the transforms to 4 and 2 samples.
    pub(crate) const F_0_211: i32 = 1730;
    pub(crate) const F_0_510: i32 = 4176;
    pub(crate) const F_0_601: i32 = 4926;
    pub(crate) const F_0_721: i32 = 5906;
    pub(crate) const F_0_765: i32 = 6270;
    pub(crate) const F_0_850: i32 = 6967;
    pub(crate) const F_1_062: i32 = 8697;
    pub(crate) const F_1_273: i32 = 10426;
    pub(crate) const F_1_452: i32 = 11893;
    pub(crate) const F_1_848: i32 = 15137;
    pub(crate) const F_2_173: i32 = 17799;
    pub(crate) const F_3_625: i32 = 29692;
    /// Fraction bits of the constants above, and fraction bits that the first pass keeps in its
    /// results.
    pub(crate) const BITS: u32 = 13;
    pub(crate) const KEPT: u32 = 2;
    /// How many low bits each of the two passes drops.
    pub(crate) const FIRST: u32 = BITS - KEPT;
    pub(crate) const SECOND: u32 = BITS + KEPT + 3;
}

fn idct(blocks: Blocks<'_>) {
    transform(
        blocks,
        |block| block[8..].iter().all(|value| *value == 0),
        pass,
        0,
    );
}

fn idct4(blocks: Blocks<'_>) {
    // The fifth row is not read.
    transform(
        blocks,
        |block| (8..64).filter(|k| k / 8 != 4).all(|k| block[k] == 0),
        pass4,
        1,
    );
}

fn idct2((coefficients, quants, out): Blocks<'_>) {
    for ((coefficients, quant), out) in coefficients.into_iter().zip(quants).zip(out) {
        let column = |column: usize| {
            let value = |row: usize| {
                coefficients[8 * row + column].wrapping_mul(quant[8 * row + column] as i16)
            };
            pass2(i32::from(value(0)), [1, 3, 5, 7].map(value))
                .map(|sum| rounded(sum, fixed::FIRST + 2))
        };
        let columns = [0, 1, 3, 5, 7].map(column);
        for row in 0..2 {
            let [first, odd @ ..] = columns.map(|column| column[row]);
            // The first column keeps 32 bits, as in libjpeg-turbo's vector code.
            let sums = pass2(first, odd.map(saturated));
            for (at, sum) in sums.into_iter().enumerate() {
                out[8 * row + at] = (rounded(sum, fixed::SECOND + 2).clamp(-128, 127) + 128) as u8;
            }
        }
    }
}

/// Transforms columns, then rows. `pass` drops `more` additional bits. In a block that
/// `lacks_rows`, only the first value of a column may be nonzero; such columns overflow differently
/// from sums.
fn transform(
    (coefficients, quants, out): Blocks<'_>,
    lacks_rows: impl Fn(&[i16; 64]) -> bool,
    pass: fn([i16; 8], u32) -> [i16; 8],
    more: u32,
) {
    for ((coefficients, quant), out) in coefficients.into_iter().zip(quants).zip(out) {
        let mut block: [i16; 64] =
            std::array::from_fn(|k| coefficients[k].wrapping_mul(quant[k] as i16));
        if lacks_rows(coefficients) {
            let kept: [i16; 8] =
                std::array::from_fn(|column| block[column].wrapping_shl(fixed::KEPT));
            block.as_chunks_mut::<8>().0.fill(kept);
        } else {
            for column in 0..8 {
                let done = pass(
                    std::array::from_fn(|row| block[8 * row + column]),
                    fixed::FIRST + more,
                );
                (0..8).for_each(|row| block[8 * row + column] = done[row]);
            }
        }
        for (row, out) in block
            .as_chunks::<8>()
            .0
            .iter()
            .zip(out.as_chunks_mut::<8>().0)
        {
            let done = pass(*row, fixed::SECOND + more);
            *out = done.map(|value| (value.clamp(-128, 127) + 128) as u8);
        }
    }
}

/// The only sample of a block that is decoded at an eighth of its size.
#[inline]
pub(super) fn mean(dc: i16, quant: u16) -> u8 {
    let product = i32::from(dc) * i32::from(quant as i16);
    // libjpeg-turbo's table lookup uses the low 10 bits.
    let ten = ((product + 4) >> 3) << 22 >> 22;
    (ten.clamp(-128, 127) + 128) as u8
}

/// The samples of a block with no coefficient except DC. At a quarter of the size, valid only up to
/// [`QUARTER_MAX`].
#[inline]
pub(super) fn flat(dc: i16, quant: u16) -> u8 {
    let kept = dc.wrapping_mul(quant as i16).wrapping_shl(fixed::KEPT);
    (((i32::from(kept) + 16) >> 5).clamp(-128, 127) + 128) as u8
}

/// Largest product of a DC coefficient and its quantisation value without overflow.
pub(super) const QUARTER_MAX: u32 = (1 << (15 - fixed::KEPT)) - 1;

/// Transforms the eight values of a row or column (Loeffler, Ligtenberg and Moschytz), and drops
/// their last `shift` bits.
fn pass(input: [i16; 8], shift: u32) -> [i16; 8] {
    use fixed::*;
    let [i0, i1, i2, i3, i4, i5, i6, i7] = input;
    let wide = |value: i16| i32::from(value);
    let [z2, z3] = [i2, i6].map(wide);
    let t2 = z2 * F_0_541 + z3 * F_0_541_LESS_1_847;
    let t3 = z2 * F_0_541_PLUS_0_765 + z3 * F_0_541;
    let t0 = wide(i0.wrapping_add(i4)) << BITS;
    let t1 = wide(i0.wrapping_sub(i4)) << BITS;
    let even = [t0 + t3, t1 + t2, t1 - t2, t0 - t3];
    let odd3 = wide(i7.wrapping_add(i3));
    let odd4 = wide(i5.wrapping_add(i1));
    let z3 = odd3 * F_1_175_LESS_1_961 + odd4 * F_1_175;
    let z4 = odd3 * F_1_175 + odd4 * F_1_175_LESS_0_390;
    let [i1, i3, i5, i7] = [i1, i3, i5, i7].map(wide);
    let odd = [
        i1 * F_1_501_LESS_0_899 - i7 * F_0_899 + z4,
        i3 * F_3_072_LESS_2_562 - i5 * F_2_562 + z3,
        i5 * F_2_053_LESS_2_562 - i3 * F_2_562 + z4,
        i7 * F_0_298_LESS_0_899 - i1 * F_0_899 + z3,
    ];
    std::array::from_fn(|k| {
        let sum = if k < 4 {
            even[k].wrapping_add(odd[k])
        } else {
            even[7 - k].wrapping_sub(odd[7 - k])
        };
        scaled(sum, shift)
    })
}

fn rounded(sum: i32, shift: u32) -> i32 {
    sum.wrapping_add(1 << (shift - 1)) >> shift
}

fn saturated(value: i32) -> i16 {
    value.clamp(i16::MIN.into(), i16::MAX.into()) as i16
}

fn scaled(sum: i32, shift: u32) -> i16 {
    saturated(rounded(sum, shift))
}

/// Transforms to four values, followed by zeros.
fn pass4(input: [i16; 8], shift: u32) -> [i16; 8] {
    use fixed::*;
    let [i0, i1, i2, i3, _, i5, i6, i7] = input.map(i32::from);
    let t0 = i0 << (BITS + 1);
    let t2 = i2 * F_1_848 - i6 * F_0_765;
    let even = [t0 + t2, t0 - t2];
    let odd = [
        i1 * F_2_562 + i3 * F_0_899 - i5 * F_0_601 - i7 * F_0_510,
        i1 * F_1_062 - i3 * F_2_173 + i5 * F_1_452 - i7 * F_0_211,
    ];
    std::array::from_fn(|k| match k {
        0 | 1 => scaled(even[k].wrapping_add(odd[k]), shift),
        2 | 3 => scaled(even[3 - k].wrapping_sub(odd[3 - k]), shift),
        _ => 0,
    })
}

/// Transforms the first value and the odd ones to two sums.
fn pass2(first: i32, odd: [i16; 4]) -> [i32; 2] {
    use fixed::*;
    let [i1, i3, i5, i7] = odd.map(i32::from);
    let even = first.wrapping_shl(BITS + 2);
    let odd = (i1 * F_3_625 - i3 * F_1_273).wrapping_add(i5 * F_0_850 - i7 * F_0_721);
    [even.wrapping_add(odd), even.wrapping_sub(odd)]
}

pub(super) fn h2v1(input: &[u8], out: &mut [u8]) {
    for (around, out) in input.windows(3).zip(out.chunks_mut(2)) {
        let [before, this, after] = [around[0], around[1], around[2]].map(u32::from);
        let both =
            [(3 * this + before + 1) >> 2, (3 * this + after + 2) >> 2].map(|value| value as u8);
        out.copy_from_slice(&both[..out.len()]);
    }
}

pub(super) fn h2v2(near: &[u8], far: &[u8], out: &mut [u8]) {
    for ((near, far), out) in near.windows(3).zip(far.windows(3)).zip(out.chunks_mut(2)) {
        let [before, this, after] =
            std::array::from_fn(|k| 3 * u32::from(near[k]) + u32::from(far[k]));
        let both =
            [(3 * this + before + 8) >> 4, (3 * this + after + 7) >> 4].map(|value| value as u8);
        out.copy_from_slice(&both[..out.len()]);
    }
}

pub(super) fn h1v2(near: &[u8], far: &[u8], bias: u8, out: &mut [u8]) {
    for ((near, far), out) in near.iter().zip(far).zip(out) {
        *out = ((3 * u32::from(*near) + u32::from(*far) + u32::from(bias)) >> 2) as u8;
    }
}

pub(super) fn rgb([y, cb, cr]: [&[u8]; 3], out: &mut [u8]) {
    for (((y, cb), cr), out) in y.iter().zip(cb).zip(cr).zip(out.as_chunks_mut::<3>().0) {
        *out = pixel(*y, *cb, *cr);
    }
}

/// Converts colours by ITU-R BT.601, with factors in units of 1/2¹⁶.
#[inline(always)]
fn pixel(y: u8, cb: u8, cr: u8) -> [u8; 3] {
    let y = i32::from(y);
    let cb = i32::from(cb) - 128;
    let cr = i32::from(cr) - 128;
    let red = y + ((91881 * cr + (1 << 15)) >> 16);
    let green = y + ((-22554 * cb - 46802 * cr + (1 << 15)) >> 16);
    let blue = y + ((116130 * cb + (1 << 15)) >> 16);
    [red, green, blue].map(|value| value.clamp(0, 255) as u8)
}
