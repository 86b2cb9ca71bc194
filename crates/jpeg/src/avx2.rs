//! The kernels for processors with AVX2: 16 values at a time.
//!
//! A row of a block fills half a register, so the inverse DCT processes two blocks at once.
//! `unsafe` is only needed to call functions that need AVX2: rows and blocks are loaded from and
//! stored to arrays.

#![allow(unsafe_code)]

use super::kernels::{self, Blocks, JpegKernels, fixed::*};
use std::arch::x86_64::*;

/// The kernels, if this processor has AVX2.
pub(super) fn kernels() -> Option<JpegKernels> {
    let scalar = kernels::SCALAR;
    // The functions below are only reachable through this value.
    std::arch::is_x86_feature_detected!("avx2").then_some(JpegKernels {
        idct,
        idct4,
        idct2,
        h2v1,
        h2v2,
        rgb,
        ..scalar
    })
}

fn idct(blocks: Blocks<'_>) {
    // SAFETY: `kernels` found AVX2.
    unsafe { transform::<8>(blocks, kernels::SCALAR.idct) }
}

fn idct4(blocks: Blocks<'_>) {
    // SAFETY: `kernels` found AVX2.
    unsafe { transform::<4>(blocks, kernels::SCALAR.idct4) }
}

fn idct2(blocks: Blocks<'_>) {
    // SAFETY: `kernels` found AVX2.
    unsafe { transform::<2>(blocks, kernels::SCALAR.idct2) }
}

fn h2v1(input: &[u8], out: &mut [u8]) {
    // SAFETY: `kernels` found AVX2.
    unsafe { h2v1_avx2(input, out) }
}

fn h2v2(near: &[u8], far: &[u8], out: &mut [u8]) {
    // SAFETY: `kernels` found AVX2.
    unsafe { h2v2_avx2(near, far, out) }
}

fn rgb(rows: [&[u8]; 3], out: &mut [u8]) {
    // SAFETY: `kernels` found AVX2.
    unsafe { rgb_avx2(rows, out) }
}

/// Bytes of a half register, and pixels of one step of the loops below.
const STEP: usize = 16;

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; STEP]) -> __m128i {
    bytemuck::must_cast(*bytes)
}

/// The bytes from `at` on, as words.
#[inline]
#[target_feature(enable = "avx2")]
fn words(row: &[u8], at: usize) -> __m256i {
    let bytes = row[at..].first_chunk().expect("a step lies within the row");
    _mm256_cvtepu8_epi16(load(bytes))
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(value: __m128i, out: &mut [u8], at: usize) {
    *out[at..]
        .first_chunk_mut::<STEP>()
        .expect("a step lies within the row") = bytemuck::must_cast(value);
}

/// Two constants for [`_mm256_madd_epi16`], in the order of the interleaved values.
#[inline]
#[target_feature(enable = "avx2")]
fn pair(first: i32, second: i32) -> __m256i {
    _mm256_set1_epi32((second << 16) | (first & 0xFFFF))
}

/// 16 values of 32 bits, in the order in which a register of 16-bit values is unpacked.
type Wide = [__m256i; 2];

#[inline]
#[target_feature(enable = "avx2")]
fn interleaved(a: __m256i, b: __m256i) -> Wide {
    [_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)]
}

#[inline]
#[target_feature(enable = "avx2")]
fn products(of: Wide, first: i32, second: i32) -> Wide {
    let by = pair(first, second);
    [_mm256_madd_epi16(of[0], by), _mm256_madd_epi16(of[1], by)]
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum(a: Wide, b: Wide) -> Wide {
    [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])]
}

#[inline]
#[target_feature(enable = "avx2")]
fn difference(a: Wide, b: Wide) -> Wide {
    [_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])]
}

/// Widens 16-bit values to units of 1/2¹³.
#[inline]
#[target_feature(enable = "avx2")]
fn widened(value: __m256i) -> Wide {
    const SHIFT: i32 = 16 - BITS as i32;
    let [low, high] = interleaved(_mm256_setzero_si256(), value);
    [
        _mm256_srai_epi32::<SHIFT>(low),
        _mm256_srai_epi32::<SHIFT>(high),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn scaled<const SHIFT: i32>(value: Wide) -> __m256i {
    let half = _mm256_set1_epi32(1 << (SHIFT - 1));
    let low = _mm256_srai_epi32::<SHIFT>(_mm256_add_epi32(value[0], half));
    let high = _mm256_srai_epi32::<SHIFT>(_mm256_add_epi32(value[1], half));
    _mm256_packs_epi32(low, high)
}

/// The same as the scalar pass, for eight columns of two blocks.
#[inline]
#[target_feature(enable = "avx2")]
fn pass<const SHIFT: i32>(r: [__m256i; 8]) -> [__m256i; 8] {
    let z = interleaved(r[2], r[6]);
    let t2 = products(z, F_0_541, F_0_541_LESS_1_847);
    let t3 = products(z, F_0_541_PLUS_0_765, F_0_541);
    let t0 = widened(_mm256_add_epi16(r[0], r[4]));
    let t1 = widened(_mm256_sub_epi16(r[0], r[4]));
    let even = [
        sum(t0, t3),
        sum(t1, t2),
        difference(t1, t2),
        difference(t0, t3),
    ];

    let z = interleaved(_mm256_add_epi16(r[7], r[3]), _mm256_add_epi16(r[5], r[1]));
    let z3 = products(z, F_1_175_LESS_1_961, F_1_175);
    let z4 = products(z, F_1_175, F_1_175_LESS_0_390);
    let outer = interleaved(r[7], r[1]);
    let inner = interleaved(r[5], r[3]);
    let odd = [
        sum(products(outer, -F_0_899, F_1_501_LESS_0_899), z4),
        sum(products(inner, -F_2_562, F_3_072_LESS_2_562), z3),
        sum(products(inner, F_2_053_LESS_2_562, -F_2_562), z4),
        sum(products(outer, F_0_298_LESS_0_899, -F_0_899), z3),
    ];
    [
        scaled::<SHIFT>(sum(even[0], odd[0])),
        scaled::<SHIFT>(sum(even[1], odd[1])),
        scaled::<SHIFT>(sum(even[2], odd[2])),
        scaled::<SHIFT>(sum(even[3], odd[3])),
        scaled::<SHIFT>(difference(even[3], odd[3])),
        scaled::<SHIFT>(difference(even[2], odd[2])),
        scaled::<SHIFT>(difference(even[1], odd[1])),
        scaled::<SHIFT>(difference(even[0], odd[0])),
    ]
}

/// The same as the scalar pass to four values.
#[inline]
#[target_feature(enable = "avx2")]
fn pass4<const SHIFT: i32>(r: [__m256i; 8]) -> [__m256i; 8] {
    let zero = _mm256_setzero_si256();
    let t0 =
        interleaved(zero, r[0]).map(|value| _mm256_srai_epi32::<{ 16 - BITS as i32 - 1 }>(value));
    let t2 = products(interleaved(r[2], r[6]), F_1_848, -F_0_765);
    let outer = interleaved(r[1], r[3]);
    let inner = interleaved(r[5], r[7]);
    let odd = [
        sum(
            products(outer, F_2_562, F_0_899),
            products(inner, -F_0_601, -F_0_510),
        ),
        sum(
            products(outer, F_1_062, -F_2_173),
            products(inner, F_1_452, -F_0_211),
        ),
    ];
    let even = [sum(t0, t2), difference(t0, t2)];
    [
        scaled::<SHIFT>(sum(even[0], odd[0])),
        scaled::<SHIFT>(sum(even[1], odd[1])),
        scaled::<SHIFT>(difference(even[1], odd[1])),
        scaled::<SHIFT>(difference(even[0], odd[0])),
        zero,
        zero,
        zero,
        zero,
    ]
}

/// The same as the scalar pass to two values.
#[inline]
#[target_feature(enable = "avx2")]
fn pass2<const SHIFT: i32>(r: [__m256i; 8]) -> [__m256i; 8] {
    let zero = _mm256_setzero_si256();
    let even =
        interleaved(zero, r[0]).map(|value| _mm256_srai_epi32::<{ 16 - BITS as i32 - 2 }>(value));
    let outer = interleaved(r[1], r[3]);
    let inner = interleaved(r[5], r[7]);
    let odd = sum(
        products(outer, F_3_625, -F_1_273),
        products(inner, F_0_850, -F_0_721),
    );
    let both = [
        scaled::<SHIFT>(sum(even, odd)),
        scaled::<SHIFT>(difference(even, odd)),
    ];
    [both[0], both[1], zero, zero, zero, zero, zero, zero]
}

/// Transposes rows to columns, in each half of the registers.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(r: [__m256i; 8]) -> [__m256i; 8] {
    let [s0, s1] = interleaved(r[0], r[1]);
    let [s2, s3] = interleaved(r[2], r[3]);
    let [s4, s5] = interleaved(r[4], r[5]);
    let [s6, s7] = interleaved(r[6], r[7]);
    let [t0, t1] = [_mm256_unpacklo_epi32(s0, s2), _mm256_unpackhi_epi32(s0, s2)];
    let [t2, t3] = [_mm256_unpacklo_epi32(s1, s3), _mm256_unpackhi_epi32(s1, s3)];
    let [t4, t5] = [_mm256_unpacklo_epi32(s4, s6), _mm256_unpackhi_epi32(s4, s6)];
    let [t6, t7] = [_mm256_unpacklo_epi32(s5, s7), _mm256_unpackhi_epi32(s5, s7)];
    [
        _mm256_unpacklo_epi64(t0, t4),
        _mm256_unpackhi_epi64(t0, t4),
        _mm256_unpacklo_epi64(t1, t5),
        _mm256_unpackhi_epi64(t1, t5),
        _mm256_unpacklo_epi64(t2, t6),
        _mm256_unpackhi_epi64(t2, t6),
        _mm256_unpacklo_epi64(t3, t7),
        _mm256_unpackhi_epi64(t3, t7),
    ]
}

/// Row `k` of two blocks.
#[inline]
#[target_feature(enable = "avx2")]
fn both(blocks: [&[i16; 64]; 2], k: usize) -> __m256i {
    let [a, b] = blocks.map(|block| block.as_chunks::<8>().0[k]);
    _mm256_set_m128i(bytemuck::must_cast(b), bytemuck::must_cast(a))
}

/// Transforms two blocks to `N` × `N` samples each. `scalar` is the portable kernel with the same
/// result.
#[target_feature(enable = "avx2")]
fn transform<const N: usize>((coefficients, quants, out): Blocks<'_>, scalar: fn(Blocks<'_>)) {
    let original = quants;
    let quants = quants.map(bytemuck::must_cast_ref::<[u16; 64], [i16; 64]>);
    let mut rows = [_mm256_setzero_si256(); 8];
    for (k, row) in rows.iter_mut().enumerate() {
        *row = _mm256_mullo_epi16(both(coefficients, k), both(quants, k));
    }
    // The scalar code has another path for constant columns, which overflows differently. Only
    // damaged pictures overflow.
    let large = _mm256_cmpgt_epi16(
        _mm256_abs_epi16(rows[0]),
        _mm256_set1_epi16((1 << (15 - KEPT)) - 1),
    );
    let least = _mm256_cmpeq_epi16(rows[0], _mm256_set1_epi16(i16::MIN));
    if _mm256_movemask_epi8(_mm256_or_si256(large, least)) != 0 {
        return scalar((coefficients, original, out));
    }
    const FIRST_4: i32 = FIRST as i32 + 1;
    const SECOND_4: i32 = SECOND as i32 + 1;
    const FIRST_2: i32 = FIRST as i32 + 2;
    const SECOND_2: i32 = SECOND as i32 + 2;
    let rows = match N {
        8 => transposed(pass::<{ SECOND as i32 }>(transposed(pass::<
            { FIRST as i32 },
        >(rows)))),
        4 => transposed(pass4::<SECOND_4>(transposed(pass4::<FIRST_4>(rows)))),
        _ => {
            let columns = transposed(pass2::<FIRST_2>(rows));
            // The first column may exceed 16 bits.
            let full = [i16::MIN, i16::MAX]
                .map(|end| _mm256_cmpeq_epi16(columns[0], _mm256_set1_epi16(end)));
            if _mm256_movemask_epi8(_mm256_or_si256(full[0], full[1])) != 0 {
                return scalar((coefficients, original, out));
            }
            transposed(pass2::<SECOND_2>(columns))
        }
    };
    let middle = _mm256_set1_epi8(-128);
    for (k, two) in rows.as_chunks::<2>().0[..N / 2].iter().enumerate() {
        let samples = _mm256_xor_si256(_mm256_packs_epi16(two[0], two[1]), middle);
        store(_mm256_castsi256_si128(samples), &mut out[0], STEP * k);
        store(
            _mm256_extracti128_si256::<1>(samples),
            &mut out[1],
            STEP * k,
        );
    }
}

/// Stores words below 256 as bytes: those of `low` at even places, those of `high` between them.
#[inline]
#[target_feature(enable = "avx2")]
fn interleave(low: __m256i, high: __m256i, out: &mut [u8], at: usize) {
    let bytes = _mm256_or_si256(low, _mm256_slli_epi16::<8>(high));
    *out[at..]
        .first_chunk_mut::<32>()
        .expect("a step lies within the row") = bytemuck::must_cast(bytes);
}

#[target_feature(enable = "avx2")]
fn h2v1_avx2(input: &[u8], out: &mut [u8]) {
    let mut done = 0;
    let one = _mm256_set1_epi16(1);
    let two = _mm256_set1_epi16(2);
    let three = _mm256_set1_epi16(3);
    while 2 * (done + STEP) <= out.len() && done + STEP + 2 <= input.len() {
        let this = _mm256_mullo_epi16(words(input, done + 1), three);
        let left = _mm256_add_epi16(_mm256_add_epi16(this, words(input, done)), one);
        let right = _mm256_add_epi16(_mm256_add_epi16(this, words(input, done + 2)), two);
        interleave(
            _mm256_srli_epi16::<2>(left),
            _mm256_srli_epi16::<2>(right),
            out,
            2 * done,
        );
        done += STEP;
    }
    kernels::h2v1(&input[done..], &mut out[2 * done..]);
}

#[target_feature(enable = "avx2")]
fn h2v2_avx2(near: &[u8], far: &[u8], out: &mut [u8]) {
    let mut done = 0;
    let seven = _mm256_set1_epi16(7);
    let eight = _mm256_set1_epi16(8);
    let three = _mm256_set1_epi16(3);
    while 2 * (done + STEP) <= out.len() && done + STEP + 2 <= near.len().min(far.len()) {
        let sum = |at| _mm256_add_epi16(_mm256_mullo_epi16(words(near, at), three), words(far, at));
        let this = _mm256_mullo_epi16(sum(done + 1), three);
        let left = _mm256_add_epi16(_mm256_add_epi16(this, sum(done)), eight);
        let right = _mm256_add_epi16(_mm256_add_epi16(this, sum(done + 2)), seven);
        interleave(
            _mm256_srli_epi16::<4>(left),
            _mm256_srli_epi16::<4>(right),
            out,
            2 * done,
        );
        done += STEP;
    }
    kernels::h2v2(&near[done..], &far[done..], &mut out[2 * done..]);
}

#[target_feature(enable = "avx2")]
fn rgb_avx2([y, cb, cr]: [&[u8]; 3], out: &mut [u8]) {
    let mut done = 0;
    let middle = _mm256_set1_epi16(128);
    let one = _mm256_set1_epi16(1);
    let half = _mm256_set1_epi32(1 << 15);
    // Factors in units of 1/2¹⁶, without the integer parts: 1.402 = 1 + 0.402, 1.772 = 2 - 0.228,
    // -0.71414 = 0.28586 - 1.
    let to_red = _mm256_set1_epi16(26345);
    let to_blue = _mm256_set1_epi16(-14942);
    let to_green = pair(-22554, 18734);
    // Half of the product of 2 × value, rounded.
    let share = |value, by| {
        let product = _mm256_mulhi_epi16(_mm256_add_epi16(value, value), by);
        _mm256_srai_epi16::<1>(_mm256_add_epi16(product, one))
    };
    while done + STEP <= y.len().min(cb.len()).min(cr.len()) {
        let y = words(y, done);
        let cb = _mm256_sub_epi16(words(cb, done), middle);
        let cr = _mm256_sub_epi16(words(cr, done), middle);
        let red = _mm256_add_epi16(y, _mm256_add_epi16(cr, share(cr, to_red)));
        let blue = _mm256_add_epi16(
            y,
            _mm256_add_epi16(_mm256_add_epi16(cb, cb), share(cb, to_blue)),
        );
        let green = [_mm256_unpacklo_epi16(cb, cr), _mm256_unpackhi_epi16(cb, cr)].map(|both| {
            _mm256_srai_epi32::<16>(_mm256_add_epi32(_mm256_madd_epi16(both, to_green), half))
        });
        let green = _mm256_add_epi16(
            y,
            _mm256_sub_epi16(_mm256_packs_epi32(green[0], green[1]), cr),
        );
        store_pixels([red, green, blue], &mut out[3 * done..]);
        done += STEP;
    }
    kernels::rgb([&y[done..], &cb[done..], &cr[done..]], &mut out[3 * done..]);
}

/// Stores 16 pixels from words of red, green and blue.
#[inline]
#[target_feature(enable = "avx2")]
fn store_pixels(colours: [__m256i; 3], out: &mut [u8]) {
    let [red, green, blue] = colours.map(|words| {
        _mm_packus_epi16(
            _mm256_castsi256_si128(words),
            _mm256_extracti128_si256::<1>(words),
        )
    });
    // Shuffle mask for a third of the output: the source index of each byte, or -1 for bytes of
    // another colour.
    let places = |third: usize, colour: usize| -> __m128i {
        bytemuck::must_cast::<[i8; 16], __m128i>(std::array::from_fn(|k| {
            if (16 * third + k) % 3 == colour {
                ((16 * third + k) / 3) as i8
            } else {
                -1
            }
        }))
    };
    for third in 0..3 {
        let part = |colour: __m128i, number| _mm_shuffle_epi8(colour, places(third, number));
        let bytes = _mm_or_si128(_mm_or_si128(part(red, 0), part(green, 1)), part(blue, 2));
        store(bytes, out, STEP * third);
    }
}
