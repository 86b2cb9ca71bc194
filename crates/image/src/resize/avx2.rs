//! The kernels for processors with AVX2.
//!
//! ```text
//! half a register: four values of a row, which belong to one or two output pixels
//!   16 source bytes ─► pick ─► [a₀ a₁] [b₀ b₁] [c₀ c₁] [d₀ d₁]   two taps, as words
//!                              × high and low bits of their weights, added in pairs
//! ```
//!
//! The two halves of a register hold two source rows. A weight has 23 bits and a sign, but a word
//! has 16 bits. So the horizontal pass multiplies a pair of taps by the high bits of the weights,
//! and by their low 11 bits. The vertical pass multiplies one tap at a time. A value of the ring
//! consists of two words: `v - 128` in the low one, `256 (v - 128)` in the high one. They are
//! multiplied by the low 8 bits of a weight and by its other bits, so the sum of both products is
//! exact.
//!
//! `unsafe` is needed to call functions that need AVX2, and for loads and stores at checked
//! offsets: one check for several rows.

#![allow(unsafe_code)]

use super::axis::{Axis, BITS};
use super::kernels::{KernelRows, Kernels, Prepared, Sum};
use std::arch::x86_64::*;

/// The kernels, if this processor has AVX2.
pub(super) fn kernels() -> Option<Kernels> {
    // The functions below are only reachable through this value.
    std::arch::is_x86_feature_detected!("avx2").then_some(Kernels {
        prepare,
        code,
        horizontal,
        vertical,
    })
}

fn horizontal(axis: &Axis, by: &Prepared, rows: KernelRows<'_>) {
    let call = match (axis.clamps, axis.taps.div_ceil(2)) {
        (true, _) => horizontal_avx2::<true, 0>,
        (false, 1) => horizontal_avx2::<false, 1>,
        (false, 2) => horizontal_avx2::<false, 2>,
        (false, 3) => horizontal_avx2::<false, 3>,
        (false, _) => horizontal_avx2::<false, 0>,
    };
    // SAFETY: `kernels` found AVX2.
    unsafe { call(by, axis.taps.div_ceil(2), rows) }
}

fn vertical(sum: Sum<'_>, to: &mut [u8]) {
    // SAFETY: `kernels` found AVX2.
    unsafe { vertical_avx2(sum, to) }
}

/// Bytes of a load.
const LOAD: usize = 16;
/// Bits of the low part of a weight in the horizontal pass.
const LOW: u32 = 11;
/// Maximum distance in source pixels between two output pixels of a step. Within it, one load
/// contains a pair of taps of each.
const APART: u32 = 3;

/// Shuffle masks: which bytes of a load become words. The index combines the channel of a step's
/// first value and the distance between the step's two pixels.
static PICKS: [[u8; LOAD]; 3 * (APART as usize + 1)] = picks();

const fn picks() -> [[u8; LOAD]; 3 * (APART as usize + 1)] {
    // A byte with its highest bit set gives 0.
    let mut picks = [[0x80; LOAD]; 3 * (APART as usize + 1)];
    let mut k = 0;
    while k < 4 * picks.len() {
        let pick = k / 4;
        let value = k % 4;
        let channel = pick / (APART as usize + 1) + value;
        let apart = pick % (APART as usize + 1);
        let byte = channel % 3 + if channel < 3 { 0 } else { 3 * apart };
        picks[pick][4 * value] = byte as u8;
        picks[pick][4 * value + 2] = byte as u8 + 3;
        k += 1;
    }
    picks
}

/// Prepares steps of four values or, if pixels are too far apart, of one pixel.
fn prepare(axis: &Axis, left: u32, to: &mut Prepared) {
    let near = axis.starts.windows(2).all(|two| two[1] - two[0] <= APART);
    to.stride = if near { 4 } else { 3 };
    let width = axis.starts.len();
    let steps = (3 * width).div_ceil(to.stride);
    let pairs = axis.taps.div_ceil(2);
    to.offsets.clear();
    to.offsets.reserve_exact(steps);
    to.picks.clear();
    to.picks.reserve_exact(steps);
    to.weights.clear();
    to.weights.reserve_exact(steps * pairs);
    for step in 0..steps {
        let pixel = step * to.stride / 3;
        let channel = step * to.stride % 3;
        let next = if near && pixel + 1 < width {
            pixel + 1
        } else {
            pixel
        };
        let apart = axis.starts[next] - axis.starts[pixel];
        to.offsets.push(3 * (axis.starts[pixel] - left));
        to.picks
            .push(PICKS[channel * (APART as usize + 1) + apart as usize]);
        let weights = [pixel, next].map(|at| &axis.weights[at * axis.taps..][..axis.taps]);
        for pair in 0..pairs {
            to.weights.push(words(weights, channel, pair));
        }
    }
    // `starts` never decreases, so the last offset is the largest.
    to.reach = to.offsets.last().map_or(0, |last| *last as usize) + 6 * (pairs - 1) + LOAD;
}

/// The weights of a pair of taps for each of a step's four values: the high parts first, then the
/// low parts.
fn words(weights: [&[i32]; 2], channel: usize, pair: usize) -> [[i16; 8]; 2] {
    let mut words = [[0; 8]; 2];
    for value in 0..4 {
        for tap in 0..2 {
            let weight = weights[(channel + value) / 3]
                .get(2 * pair + tap)
                .copied()
                .unwrap_or(0);
            words[0][2 * value + tap] = (weight >> LOW) as i16;
            words[1][2 * value + tap] = (weight & ((1 << LOW) - 1)) as i16;
        }
    }
    words
}

/// A weight of the vertical pass: its low 8 bits in the low word, the others in the high one.
fn code(weight: i32) -> i32 {
    ((weight >> 8) << 16) | (weight & 0xFF)
}

/// Loads the value into both halves of a register.
#[inline]
#[target_feature(enable = "avx2")]
fn twice<T: bytemuck::Pod>(half: &T) -> __m256i {
    const { assert!(size_of::<T>() == 16) };
    // SAFETY: the load reads exactly the 16 bytes of the reference. The compiler turns such a load
    // into a broadcast, but not a copy.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(std::ptr::from_ref(half).cast()) })
}

/// Loads bytes of two rows from `at` on. Both rows must contain them: [`horizontal_avx2`] checks
/// this.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load(low: &[u8], high: &[u8], at: usize) -> __m256i {
    debug_assert!(at + LOAD <= low.len().min(high.len()));
    // SAFETY: the caller checked that both rows contain the load.
    unsafe { _mm256_loadu2_m128i(high.as_ptr().add(at).cast(), low.as_ptr().add(at).cast()) }
}

/// Stores four values in each of two rows at `at`. Both rows must have room for them:
/// [`horizontal_avx2`] checks this.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store(value: __m256i, low: &mut [i32], high: &mut [i32], at: usize) {
    debug_assert!(at + 4 <= low.len().min(high.len()));
    // SAFETY: the caller checked that both rows have room for the store.
    unsafe {
        _mm256_storeu2_m128i(
            high.as_mut_ptr().add(at).cast(),
            low.as_mut_ptr().add(at).cast(),
            value,
        )
    }
}

/// Combines the two sums to values minus 128, in the ring's format.
#[inline]
#[target_feature(enable = "avx2")]
fn ring_form<const CLAMPS: bool>(high: __m256i, low: __m256i) -> __m256i {
    let sum = _mm256_add_epi32(_mm256_slli_epi32::<{ LOW as i32 }>(high), low);
    let mut value = _mm256_srai_epi32::<{ BITS as i32 }>(sum);
    if CLAMPS {
        value = _mm256_min_epi32(value, _mm256_set1_epi32(127));
        value = _mm256_max_epi32(value, _mm256_set1_epi32(-128));
    }
    _mm256_blend_epi16::<0b1010_1010>(value, _mm256_slli_epi32::<24>(value))
}

/// `PAIRS` is the number of pairs of taps, or 0 for any number.
#[target_feature(enable = "avx2")]
fn horizontal_avx2<const CLAMPS: bool, const PAIRS: usize>(
    by: &Prepared,
    pairs: usize,
    (from, to): KernelRows<'_>,
) {
    let pairs = if PAIRS == 0 { pairs } else { PAIRS };
    let reach = by.reach;
    let from = from.map(|row| &row[..reach]);
    let len = to[0].len();
    let [to0, to1, to2, to3] = to.map(|row| &mut row[..len]);
    let start = _mm256_set1_epi32((1 << (BITS - 1)) - (128 << BITS));
    let steps = by
        .offsets
        .iter()
        .zip(&by.picks)
        .zip(by.weights.chunks_exact(pairs));
    for (step, ((offset, pick), weights)) in steps.enumerate() {
        let pick = twice(pick);
        let mut high = [_mm256_setzero_si256(); 2];
        let mut low = [start; 2];
        let mut at = *offset as usize;
        assert!(
            at + 6 * (pairs - 1) + LOAD <= reach,
            "a step lies within the reach"
        );
        for weights in weights {
            let [by_high, by_low] = [0, 1].map(|k| twice(&weights[k]));
            for k in 0..2 {
                // SAFETY: `at` is at most the checked offset, and each row has `reach` bytes.
                let bytes = unsafe { load(from[2 * k], from[2 * k + 1], at) };
                let taps = _mm256_shuffle_epi8(bytes, pick);
                high[k] = _mm256_add_epi32(high[k], _mm256_madd_epi16(taps, by_high));
                low[k] = _mm256_add_epi32(low[k], _mm256_madd_epi16(taps, by_low));
            }
            at += 6;
        }
        let at = step * by.stride;
        assert!(at + 4 <= len, "a padded row");
        let done = [0, 1].map(|k| ring_form::<CLAMPS>(high[k], low[k]));
        // SAFETY: all rows have `len` values.
        unsafe {
            store(done[0], to0, to1, at);
            store(done[1], to2, to3, at);
        }
    }
}

/// Number of values that one step of the vertical pass computes.
const BLOCK: usize = 32;

#[target_feature(enable = "avx2")]
fn vertical_avx2((between, starts, weights): Sum<'_>, to: &mut [u8]) {
    // The ring stores values minus 128, so add 128 times each weight.
    let sum = weights.iter().fold(0_i32, |sum, code| {
        sum.wrapping_add(((code >> 16) << 8) + (code & 0xFF))
    });
    let start = sum.wrapping_mul(128).wrapping_add(1 << (BITS - 1));
    let len = to.len().next_multiple_of(BLOCK);
    assert!(
        starts
            .iter()
            .all(|row| between.len() >= len && *row <= between.len() - len),
        "padded rows"
    );
    let (blocks, rest) = to.as_chunks_mut::<BLOCK>();
    let x = BLOCK * blocks.len();
    for (k, to) in blocks.iter_mut().enumerate() {
        // SAFETY: the block ends before `len`.
        *to = unsafe { block(between, starts, weights, start, BLOCK * k) };
    }
    if !rest.is_empty() {
        // The ring's rows are padded, the output is not.
        // SAFETY: the block ends at `len`.
        let last = unsafe { block(between, starts, weights, start, x) };
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// The values from `x` on. `between` must contain the block's values for each of `starts`:
/// [`vertical_avx2`] checks this.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn block(
    between: &[i32],
    starts: &[usize],
    weights: &[i32],
    start: i32,
    x: usize,
) -> [u8; BLOCK] {
    let mut sums = [_mm256_set1_epi32(start); 4];
    for (row, code) in starts.iter().zip(weights) {
        let by = _mm256_set1_epi32(*code);
        debug_assert!(row + x + BLOCK <= between.len());
        // SAFETY: the caller checked that `between` contains the block.
        let values = unsafe { &*between.as_ptr().add(row + x).cast::<[[i32; 8]; 4]>() };
        for (sum, values) in sums.iter_mut().zip(values) {
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(bytemuck::must_cast(*values), by));
        }
    }
    let [a, b, c, d] = sums.map(|sum| _mm256_srai_epi32::<{ BITS as i32 }>(sum));
    let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    // The pack instructions work on each half separately.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    bytemuck::must_cast(_mm256_permutevar8x32_epi32(bytes, order))
}
