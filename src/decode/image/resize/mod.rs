//! Resizing of RGB pictures of 8 bits, equal to Pillow's `resize` (compared with 11.3) to the bit.
//!
//! ```text
//! source rows, four at a time ──► horizontal pass ──► ring of rows ──► vertical pass ──► one row of the window
//!  (only those that are needed)    weights by column   (in the cache)   weights by row
//! ```
//!
//! # Values
//!
//! Weights are computed in `f64` and rounded to 22 bits. Each pass rounds to 8 bits, the horizontal one first. A window
//! equals the resize of the whole picture and then its crop. A part of the picture has the same weights as the whole.
//! The kernels for an instruction set equal the scalar ones. Newer versions of Pillow do the vertical pass first for some
//! tall pictures (12.3, 13); this module never does.
//!
//! Sums of 32 bits suffice: no output pixel lies so near an edge that its positive weights sum to 2 or more. Partial
//! sums of the vector kernels may overflow; they wrap, so the last sum is right.
//!
//! # Limits and invariants
//!
//! * A picture's sides have at most 2²⁴ pixels, none has 0. A window lies in the output, and the area in the picture.
//! * Memory is at most [`Plan::heap_bytes`], and steady state allocates nothing.
//! * Time is linear in the source rows times the window's width times the taps.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod axis;
mod kernels;
#[cfg(test)]
mod tests;

use super::Filter;
use super::geometry::{Crop, Part, Rect, Size};
use axis::{Axis, Side};
use kernels::{Kernels, Prepared, ROWS, padded};

/// What becomes of a picture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Plan {
    /// The whole picture: pixels beyond it do not count.
    pub(super) picture: Size,
    /// The part of the picture that is scaled. Its edges are rounded to `f32`, as by Pillow.
    pub(super) area: Part,
    /// The size to which the area is scaled.
    pub(super) output: Size,
    /// The part of the output that is wanted.
    pub(super) window: Rect,
    pub(super) filter: Filter,
}

impl Crop {
    pub(super) fn plan(&self, filter: Filter) -> Plan {
        Plan { picture: self.view.size, area: self.part, output: self.whole, window: self.window, filter }
    }

    /// The pixels of the picture that the window depends on.
    pub(super) fn needed(&self, filter: Filter) -> Rect {
        let Rect { left, top, size } = self.plan(filter).needed();
        Rect { left: self.view.left + left, top: self.view.top + top, size }
    }
}

impl Plan {
    /// The pixels of the picture that the window depends on.
    pub(super) fn needed(&self) -> Rect {
        let ((left, right), (top, bottom)) = (self.across().needed(), self.down().needed());
        Rect { left, top, size: Size::new(right - left, bottom - top) }
    }

    /// The most heap bytes that a new [`Resizer`] takes for this.
    pub(super) fn heap_bytes(&self) -> u64 {
        let (across, down) = (self.across(), self.down());
        let (width, taps) = (u64::from(across.count), across.most_taps() as u64);
        let ring = 4 * (ring_rows(&down) * padded(across.count as usize)) as u64;
        let slots = 8 * down.most_taps() as u64;
        // A row's pixels, and as many as its last step reads behind them.
        let tails = (ROWS as u64) * (3 * (u64::from(self.picture.width) + taps) + 64);
        Axis::bound(&across) + Axis::bound(&down) + Prepared::bound(width, taps) + ring + slots + tails
    }

    fn across(&self) -> Side {
        self.side((self.area.left, self.area.width), |size| size.width, self.window.left)
    }

    fn down(&self) -> Side {
        self.side((self.area.top, self.area.height), |size| size.height, self.window.top)
    }

    fn side(&self, (from, length): (f64, f64), of: impl Fn(Size) -> u32, first: u32) -> Side {
        let source = of(self.picture);
        let to = ((from + length) as f32).min(source as f32);
        let (whole, count) = (of(self.output), of(self.window.size));
        assert!(source <= SIDE_MAX, "{self:?}: sides are limited");
        assert!(count > 0 && first < whole && count <= whole - first, "{self:?}: the window lies in the output");
        let from = from as f32;
        assert!(0.0 <= from && from < to, "{self:?}: the area lies in the picture");
        Side { source, from, to, whole, first, count, filter: self.filter }
    }
}

/// Longest side of a picture: `f32` counts so far.
pub(super) const SIDE_MAX: u32 = 1 << 24;

/// Rows of the ring: those under an output row, and those that the last step made too many.
fn ring_rows(down: &Side) -> usize {
    (down.most_taps() + ROWS - 1).next_multiple_of(ROWS)
}

/// Decoded pixels of a picture, RGB.
#[derive(Clone, Copy)]
pub(super) struct Pixels<'a> {
    pub(super) bytes: &'a [u8],
    /// Bytes from row to row.
    pub(super) stride: usize,
    /// Where in the picture they are.
    pub(super) there: Rect,
}

impl<'a> Pixels<'a> {
    /// Row `y` of the picture, and whatever lies behind it.
    fn rows_from(&self, y: u32) -> &'a [u8] {
        &self.bytes[self.stride * (y - self.there.top) as usize..]
    }

    fn check(&self, needed: Rect) {
        let there = self.there;
        let inside = there.left <= needed.left && there.top <= needed.top;
        assert!(
            inside && needed.right() <= there.right() && needed.bottom() <= there.bottom(),
            "{needed:?} is needed, and {there:?} is there"
        );
        let row = 3 * there.size.width as usize;
        let end = self.stride * (there.size.height as usize - 1) + row;
        assert!(row <= self.stride && end <= self.bytes.len(), "{} bytes for {there:?}", self.bytes.len());
    }
}

/// A worker's weights and rows, kept from picture to picture.
pub(super) struct Resizer {
    kernels: Kernels,
    across: Axis,
    down: Axis,
    /// The weights of `across` for rows that start at source pixel `left`.
    prepared: Prepared,
    left: u32,
    /// Rows between the passes.
    ring: Vec<i32>,
    /// Starts in the ring of the rows under an output row.
    slots: Vec<usize>,
    /// Copies of the source's last rows, behind which the horizontal pass may read.
    tails: Vec<u8>,
}

impl Default for Resizer {
    fn default() -> Self {
        Self::with(best())
    }
}

/// The kernels for this processor.
fn best() -> Kernels {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = avx2::kernels() {
        return kernels;
    }
    kernels::SCALAR
}

impl Resizer {
    fn with(kernels: Kernels) -> Self {
        let (across, down, prepared) = (Axis::default(), Axis::default(), Prepared::default());
        Self { kernels, across, down, prepared, left: 0, ring: Vec::new(), slots: Vec::new(), tails: Vec::new() }
    }

    /// Heap bytes that it holds.
    pub(super) fn bytes(&self) -> usize {
        let rows = 4 * self.ring.capacity() + size_of::<usize>() * self.slots.capacity() + self.tails.capacity();
        self.across.bytes() + self.down.bytes() + self.prepared.bytes() + rows
    }

    /// Frees what it holds.
    pub(super) fn release(&mut self) {
        *self = Self::with(self.kernels);
    }

    /// Writes the plan's window to `out`, RGB without gaps.
    ///
    /// `pixels` must hold [`Plan::needed`]. Panics if sizes do not fit.
    pub(super) fn resize(&mut self, pixels: Pixels<'_>, plan: &Plan, out: &mut [u8]) {
        let Size { width, height } = plan.window.size;
        assert_eq!(out.len(), 3 * width as usize * height as usize, "a buffer of the window's size");
        pixels.check(plan.needed());
        let (across, down) = (plan.across(), plan.down());
        let left = pixels.there.left;
        let renewed = self.across.update(across) || self.left != left;
        if self.down.update(down) {
            self.down.weights.iter_mut().for_each(|weight| *weight = (self.kernels.code)(*weight));
        }
        if self.across.taps == 1 && self.down.taps == 1 {
            // The rows' weights may be of an earlier call.
            self.left = u32::MAX;
            return self.copy(pixels, out);
        }
        if renewed {
            (self.kernels.prepare)(&self.across, left, &mut self.prepared);
            self.left = left;
        }
        let stride = padded(width as usize);
        grow(&mut self.ring, ring_rows(&down) * stride, 0);
        grow(&mut self.tails, ROWS * self.prepared.reach, 0);
        self.slots.clear();
        self.slots.reserve_exact(down.most_taps());
        self.passes(pixels, ring_rows(&down), stride, out);
    }

    /// Copies pixels: the weights are 1.
    fn copy(&self, pixels: Pixels<'_>, out: &mut [u8]) {
        let columns = &self.across.starts;
        let left = (columns[0] - pixels.there.left) as usize;
        // Starts never fall.
        let whole_rows = columns.windows(2).all(|two| two[1] == two[0] + 1);
        for (y, out) in self.down.starts.iter().zip(out.chunks_exact_mut(3 * columns.len())) {
            let row = pixels.rows_from(*y);
            if whole_rows {
                out.copy_from_slice(&row[3 * left..][..out.len()]);
                continue;
            }
            let row = row.as_chunks::<3>().0;
            for (x, out) in columns.iter().zip(out.as_chunks_mut::<3>().0) {
                *out = row[(x - pixels.there.left) as usize];
            }
        }
    }

    fn passes(&mut self, pixels: Pixels<'_>, rows: usize, stride: usize, out: &mut [u8]) {
        let Axis { starts, counts, .. } = &self.down;
        let (first, end) = (starts[0], starts[starts.len() - 1] + counts[counts.len() - 1]);
        let slot = |y: u32| (y - first) as usize % rows * stride;
        let mut next = first;
        for (k, out) in out.chunks_exact_mut(3 * self.across.starts.len()).enumerate() {
            let (start, count) = (self.down.starts[k], self.down.counts[k]);
            while next < start + count {
                let ring = &mut self.ring[slot(next)..][..ROWS * stride];
                let to = ring.chunks_exact_mut(stride);
                let from = sources(pixels, next, end, self.prepared.reach, &mut self.tails);
                let mut to = to.into_iter();
                let to = std::array::from_fn(|_| to.next().unwrap_or_default());
                (self.kernels.horizontal)(&self.across, &self.prepared, (from, to));
                next += ROWS as u32;
            }
            self.slots.clear();
            self.slots.extend((start..start + count).map(slot));
            let weights = &self.down.weights[k * self.down.taps..][..count as usize];
            (self.kernels.vertical)((&self.ring, &self.slots, weights), out);
        }
    }
}

/// The source rows from `next` on, of at least `reach` bytes; the last before `end` stands for those behind it.
fn sources<'a>(pixels: Pixels<'a>, next: u32, end: u32, reach: usize, tails: &'a mut [u8]) -> [&'a [u8]; ROWS] {
    let mut tails = tails.chunks_exact_mut(reach);
    std::array::from_fn(|k| {
        let row = pixels.rows_from((next + k as u32).min(end - 1));
        match (row.len() < reach, tails.next()) {
            (true, Some(tail)) => {
                tail[..row.len()].copy_from_slice(row);
                tail
            }
            _ => row,
        }
    })
}

/// Makes the list at least `len` long, with `fill` where it grows.
fn grow<T: Copy>(list: &mut Vec<T>, len: usize, fill: T) {
    if list.len() < len {
        // Freed first, because the old content is not needed.
        *list = Vec::new();
        *list = vec![fill; len];
    }
}
