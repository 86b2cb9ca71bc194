//! The portable arithmetic of the two passes, which the vector kernels must equal.

use super::axis::{Axis, BITS};

/// Source rows of one step of the horizontal pass.
pub(super) const ROWS: usize = 4;

/// Source rows, and the rows between the passes that are computed from these source rows.
pub(super) type KernelRows<'a> = ([&'a [u8]; ROWS], [&'a mut [i32]; ROWS]);

/// All rows between the passes, the offsets of the rows to add, and the weights of these rows.
pub(super) type Sum<'a> = (&'a [i32], &'a [usize], &'a [i32]);

/// The functions that an instruction set can replace.
///
/// Rows between the passes have one `i32` per value. Its format is private to a set of kernels: the
/// vertical pass reads what the horizontal pass of the same set wrote.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    /// Puts the weights into the order in which the horizontal pass reads them; `left` is the
    /// source pixel at the start of a row.
    pub(super) prepare: fn(axis: &Axis, left: u32, to: &mut Prepared),
    /// Scales rows of at least [`Prepared::reach`] bytes to rows of [`padded`] values.
    pub(super) horizontal: fn(axis: &Axis, by: &Prepared, rows: KernelRows<'_>),
    /// Converts a weight to the format of the vertical pass.
    pub(super) code: fn(weight: i32) -> i32,
    /// The weighted sum of rows, in 8 bits.
    pub(super) vertical: fn(sum: Sum<'_>, to: &mut [u8]),
}

pub(super) const SCALAR: Kernels = Kernels {
    prepare,
    code: |weight| weight,
    horizontal,
    vertical,
};

/// The weights of the horizontal pass, in the order in which it reads them.
#[derive(Default)]
pub(super) struct Prepared {
    /// Bytes of a source row that are read; some may be beyond its end.
    pub(super) reach: usize,
    /// Byte offset in the row of the first pixel of each step.
    pub(super) offsets: Vec<u32>,
    /// Shuffle mask of each step: the source bytes that it takes.
    pub(super) picks: Vec<[u8; 16]>,
    /// Weights of each step and pair of taps.
    pub(super) weights: Vec<[[i16; 8]; 2]>,
    /// Output values per step.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "only vector kernels read it")
    )]
    pub(super) stride: usize,
}

impl Prepared {
    /// Heap bytes for `width` output pixels of `taps` taps.
    pub(super) fn bound(width: u64, taps: u64) -> u64 {
        // One step per pixel at most.
        width * (4 + 16 + 32 * taps.div_ceil(2))
    }

    pub(super) fn bytes(&self) -> usize {
        4 * self.offsets.capacity() + 16 * self.picks.capacity() + 32 * self.weights.capacity()
    }
}

/// The number of values of a row between the passes for `width` pixels. The last steps may write
/// and read values beyond the last pixel.
pub(super) fn padded(width: usize) -> usize {
    (3 * width + 1).next_multiple_of(32)
}

fn prepare(axis: &Axis, left: u32, to: &mut Prepared) {
    to.offsets.clear();
    to.offsets.reserve_exact(axis.starts.len());
    to.offsets
        .extend(axis.starts.iter().map(|start| 3 * (start - left)));
    let ends = to
        .offsets
        .iter()
        .zip(&axis.counts)
        .map(|(offset, count)| offset + 3 * count);
    to.reach = ends.max().unwrap_or(0) as usize;
}

fn horizontal(axis: &Axis, by: &Prepared, (from, to): KernelRows<'_>) {
    for (from, to) in from.into_iter().zip(to) {
        let weights = axis.weights.chunks_exact(axis.taps);
        let steps = by
            .offsets
            .iter()
            .zip(&axis.counts)
            .zip(weights)
            .zip(to.as_chunks_mut::<3>().0);
        for (((offset, count), weights), to) in steps {
            let pixels = &from[*offset as usize..][..3 * *count as usize];
            let mut sums = [1 << (BITS - 1); 3];
            for (pixel, weight) in pixels.as_chunks::<3>().0.iter().zip(weights) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*value) * weight;
                }
            }
            *to = sums.map(|sum| (sum >> BITS).clamp(0, 255));
        }
    }
}

fn vertical((between, starts, weights): Sum<'_>, to: &mut [u8]) {
    for (x, to) in to.iter_mut().enumerate() {
        let products = starts
            .iter()
            .zip(weights)
            .map(|(start, weight)| between[start + x] * weight);
        let sum = products.sum::<i32>() + (1 << (BITS - 1));
        *to = (sum >> BITS).clamp(0, 255) as u8;
    }
}
