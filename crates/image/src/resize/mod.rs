//! Resizing of RGB pictures of 8 bits, equal to Pillow's `resize` (compared with 11.3) to the bit.
//!
//! ```text
//! source rows, four at a time ──► horizontal pass ──► ring of rows ──► vertical pass ──► one row of the window
//!  (only those that are needed)    weights by column   (in the cache)   weights by row
//! ```
//!
//! The rows come from a whole picture ([`Resizer::resize`]), or one at a time from a decoder
//! ([`Resizer::start`]).
//!
//! # Values
//!
//! Weights are computed in `f64` and rounded to 22 fraction bits. Each pass rounds to 8 bits, the
//! horizontal one first. A window equals a crop of the whole resized picture. A part of the picture
//! has the same weights as the whole. The kernels for an instruction set give the same values as
//! the scalar ones. Newer versions of Pillow do the vertical pass first for some tall pictures
//! (12.3, 13); this module never does.
//!
//! Sums of 32 bits suffice: no output pixel is so near an edge that its positive weights sum to 2
//! or more. Partial sums of the vector kernels may overflow; they wrap, so the final sum is right.
//!
//! # Limits and invariants
//!
//! * A picture's sides have 1 to 2²⁴ pixels. The window is within the output, and the area is
//!   within the picture.
//! * Memory is at most [`ResizePlan::heap_bytes`], and steady state allocates nothing.
//! * Time is linear in the source rows times the window's width times the taps.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod axis;
mod kernels;
#[cfg(test)]
mod tests;

use super::geometry::{Crop, CropPart, Rect, Size};
use crate::Filter;
use axis::{Axis, Side};
use feedline_jpeg::{RowSink, grow};
use kernels::{Kernels, Prepared, ROWS, padded};

/// How a picture is resized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ResizePlan {
    /// The size of the whole picture: pixels beyond it do not count.
    pub(super) picture: Size,
    /// The part of the picture that is scaled. Its edges are rounded to `f32`, as by Pillow.
    pub(super) area: CropPart,
    /// The size to which the area is scaled.
    pub(super) output: Size,
    /// The part of the output that is wanted.
    pub(super) window: Rect,
    pub(super) filter: Filter,
}

impl Crop {
    pub(super) fn plan(&self, filter: Filter) -> ResizePlan {
        ResizePlan {
            picture: self.view.size,
            area: self.part,
            output: self.whole,
            window: self.window,
            filter,
        }
    }

    /// The pixels of the picture that the window depends on.
    pub(super) fn needed(&self, filter: Filter) -> Rect {
        let Rect { left, top, size } = self.plan(filter).needed();
        Rect {
            left: self.view.left + left,
            top: self.view.top + top,
            size,
        }
    }
}

impl ResizePlan {
    /// The pixels of the picture that the window depends on.
    pub(super) fn needed(&self) -> Rect {
        let (left, right) = self.across().needed();
        let (top, bottom) = self.down().needed();
        Rect {
            left,
            top,
            size: Size::new(right - left, bottom - top),
        }
    }

    /// Maximum heap bytes that a new [`Resizer`] takes for this plan.
    pub(super) fn heap_bytes(&self) -> u64 {
        let across = self.across();
        let down = self.down();
        let width = u64::from(across.count);
        let taps = across.most_taps() as u64;
        let ring = 4 * (ring_rows(&down) * padded(across.count as usize)) as u64;
        let slots = 8 * down.most_taps() as u64;
        // A row's pixels, and those that its last step reads beyond them.
        let band = (ROWS as u64) * (3 * (u64::from(self.picture.width) + taps) + 64);
        Axis::bound(&across)
            + Axis::bound(&down)
            + Prepared::bound(width, taps)
            + ring
            + slots
            + band
    }

    fn across(&self) -> Side {
        self.side(
            self.area.left,
            self.area.width,
            |size| size.width,
            self.window.left,
        )
    }

    fn down(&self) -> Side {
        self.side(
            self.area.top,
            self.area.height,
            |size| size.height,
            self.window.top,
        )
    }

    fn side(&self, from: f64, length: f64, of: impl Fn(Size) -> u32, first: u32) -> Side {
        let source = of(self.picture);
        let to = ((from + length) as f32).min(source as f32);
        let whole = of(self.output);
        let count = of(self.window.size);
        assert!(source <= SIDE_MAX, "{self:?}: sides are limited");
        assert!(
            count > 0 && first < whole && count <= whole - first,
            "{self:?}: the window lies in the output"
        );
        let from = from as f32;
        assert!(
            0.0 <= from && from < to,
            "{self:?}: the area must lie within the picture"
        );
        Side {
            source,
            from,
            to,
            whole,
            first,
            count,
            filter: self.filter,
        }
    }
}

/// Longest side of a picture: `f32` holds all integers up to this one.
pub(super) const SIDE_MAX: u32 = 1 << 24;

/// Number of rows in the ring: the source rows under an output row, and the surplus rows of the
/// last step.
fn ring_rows(down: &Side) -> usize {
    (down.most_taps() + ROWS - 1).next_multiple_of(ROWS)
}

/// Decoded pixels of a picture, RGB.
#[derive(Clone, Copy)]
pub(super) struct Pixels<'a> {
    pub(super) bytes: &'a [u8],
    /// Bytes from the start of one row to the next.
    pub(super) stride: usize,
    /// The part of the picture that the pixels cover.
    pub(super) there: Rect,
}

impl<'a> Pixels<'a> {
    /// Row `y` of the picture, and all bytes after it.
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
        assert!(
            row <= self.stride && end <= self.bytes.len(),
            "{} bytes for {there:?}",
            self.bytes.len()
        );
    }
}

/// A worker's weights and rows, kept from picture to picture.
#[derive(Default)]
pub(super) struct Resizer {
    passes: Passes,
    /// The last source rows: rows of a decoder, or copies of rows that end before the reach of the
    /// horizontal pass.
    band: Vec<u8>,
}

/// Both passes, and the rows between them.
#[derive(Default)]
struct Passes {
    kernels: Kernels,
    across: Axis,
    down: Axis,
    /// The weights of `across` for rows that start at source pixel `left`, unless the last work was
    /// a copy.
    prepared: Prepared,
    left: u32,
    kind: RowWork,
    /// Rows between the passes: `rows` rows of `stride` values.
    ring: Vec<i32>,
    rows: usize,
    stride: usize,
    /// Offsets in the ring of the rows under an output row.
    slots: Vec<usize>,
    /// The first source row.
    first: u32,
    /// Number of output rows written.
    written: usize,
}

/// The work on a row.
#[derive(Clone, Copy, Default, PartialEq)]
enum RowWork {
    /// The output's pixels are adjacent source pixels.
    Copy,
    /// The output's pixels are single source pixels.
    Pick,
    #[default]
    Weigh,
}

/// Scales one picture whose rows arrive one at a time.
pub(super) struct Resizing<'a> {
    passes: &'a mut Passes,
    /// The source rows of the next step: [`ROWS`] rows.
    band: &'a mut [u8],
    /// Number of source rows received so far.
    came: u32,
    needed: Rect,
    out: &'a mut [u8],
}

impl Default for Kernels {
    /// The kernels for this processor.
    fn default() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(kernels) = avx2::kernels() {
            return kernels;
        }
        kernels::SCALAR
    }
}

impl Resizer {
    /// Heap bytes that the resizer holds.
    pub(super) fn bytes(&self) -> usize {
        self.passes.bytes() + self.band.capacity()
    }

    /// Frees the heap memory that the resizer holds.
    pub(super) fn release(&mut self) {
        self.passes = Passes::with(self.passes.kernels);
        self.band = Vec::new();
    }

    /// Writes the plan's window to `out`, RGB without gaps.
    ///
    /// `pixels` must hold [`ResizePlan::needed`]. Panics if sizes do not fit.
    pub(super) fn resize(&mut self, pixels: Pixels<'_>, plan: &ResizePlan, out: &mut [u8]) {
        let needed = plan.needed();
        pixels.check(needed);
        let reach = self.passes.start(plan, pixels.there.left, needed.top, out);
        grow(&mut self.band, ROWS * reach);
        for next in (needed.top..needed.bottom()).step_by(ROWS) {
            let from = sources(pixels, next, needed.bottom(), reach, &mut self.band);
            self.passes.step(next, from, out);
        }
    }

    /// Writes the plan's window to `out`, RGB without gaps, from rows of [`ResizePlan::needed`]
    /// that arrive one at a time.
    ///
    /// Panics if sizes do not fit.
    pub(super) fn start<'a>(&'a mut self, plan: &ResizePlan, out: &'a mut [u8]) -> Resizing<'a> {
        let needed = plan.needed();
        let reach = self.passes.start(plan, needed.left, needed.top, out);
        let len = ROWS * reach.max(3 * needed.size.width as usize);
        grow(&mut self.band, len);
        Resizing {
            passes: &mut self.passes,
            band: &mut self.band[..len],
            came: 0,
            needed,
            out,
        }
    }
}

impl RowSink for Resizing<'_> {
    fn row(&mut self, y: u32) -> &mut [u8] {
        if y == 0 {
            self.came = 0;
            self.passes.written = 0;
        }
        assert_eq!(self.came, y, "rows come in order");
        if y > 0 && y.is_multiple_of(ROWS as u32) {
            self.step();
        }
        self.came += 1;
        let stride = self.band.len() / ROWS;
        &mut self.band[y as usize % ROWS * stride..][..3 * self.needed.size.width as usize]
    }
}

impl Resizing<'_> {
    /// Writes the output's last rows. Panics if rows are missing.
    pub(super) fn finish(mut self) {
        assert_eq!(self.came, self.needed.size.height, "all rows came");
        self.step();
    }

    /// Scales the rows of the band. Missing rows repeat the last row received.
    fn step(&mut self) {
        let last = self.came - 1;
        let start = last - last % ROWS as u32;
        let stride = self.band.len() / ROWS;
        let from = std::array::from_fn(|k| {
            &self.band[k.min((last - start) as usize) * stride..][..stride]
        });
        self.passes.step(self.needed.top + start, from, self.out);
    }
}

impl Passes {
    fn with(kernels: Kernels) -> Self {
        Self {
            kernels,
            ..Self::default()
        }
    }

    fn bytes(&self) -> usize {
        let rows = 4 * self.ring.capacity() + size_of::<usize>() * self.slots.capacity();
        self.across.bytes() + self.down.bytes() + self.prepared.bytes() + rows
    }

    /// Prepares for source rows from `first` on, which start at source pixel `left`. Returns the
    /// number of bytes of each row that [`step`](Self::step) may read.
    fn start(&mut self, plan: &ResizePlan, left: u32, first: u32, out: &[u8]) -> usize {
        let Size { width, height } = plan.window.size;
        assert_eq!(
            out.len(),
            3 * width as usize * height as usize,
            "a buffer of the window's size"
        );
        self.first = first;
        self.written = 0;
        let across = plan.across();
        let down = plan.down();
        let renewed =
            self.across.update(across) || self.left != left || self.kind != RowWork::Weigh;
        self.left = left;
        if self.down.update(down) {
            self.down
                .weights
                .iter_mut()
                .for_each(|weight| *weight = (self.kernels.code)(*weight));
        }
        if self.across.taps == 1 && self.down.taps == 1 {
            // The weights are 1. `starts` never decreases.
            let adjacent = self
                .across
                .starts
                .windows(2)
                .all(|two| two[1] == two[0] + 1);
            self.kind = if adjacent {
                RowWork::Copy
            } else {
                RowWork::Pick
            };
            return self
                .across
                .starts
                .last()
                .map_or(0, |last| 3 * (last + 1 - left) as usize);
        }
        if renewed {
            (self.kernels.prepare)(&self.across, left, &mut self.prepared);
        }
        self.kind = RowWork::Weigh;
        self.rows = ring_rows(&down);
        self.stride = padded(width as usize);
        grow(&mut self.ring, self.rows * self.stride);
        self.slots.clear();
        self.slots.reserve_exact(down.most_taps());
        self.prepared.reach
    }

    /// Takes the source rows from `next` on, and writes the output rows that need no later source
    /// row.
    fn step(&mut self, next: u32, from: [&[u8]; ROWS], out: &mut [u8]) {
        if self.kind != RowWork::Weigh {
            return self.copy(next, from, out);
        }
        let Self {
            across,
            down,
            stride,
            rows,
            first,
            ..
        } = self;
        let slot = |y: u32| (y - *first) as usize % *rows * *stride;
        let mut to = self.ring[slot(next)..][..ROWS * *stride].chunks_exact_mut(*stride);
        let to = std::array::from_fn(|_| to.next().unwrap_or_default());
        (self.kernels.horizontal)(across, &self.prepared, (from, to));
        let there = next + ROWS as u32;
        for out in out
            .chunks_exact_mut(3 * across.starts.len())
            .skip(self.written)
        {
            let start = down.starts[self.written];
            let count = down.counts[self.written];
            if start + count > there {
                break;
            }
            self.slots.clear();
            self.slots.extend((start..start + count).map(slot));
            let weights = &down.weights[self.written * down.taps..][..count as usize];
            (self.kernels.vertical)((&self.ring, &self.slots, weights), out);
            self.written += 1;
        }
    }

    /// Does the work of [`step`](Self::step) if the weights are 1.
    fn copy(&mut self, next: u32, from: [&[u8]; ROWS], out: &mut [u8]) {
        let columns = &self.across.starts;
        let left = self.left;
        for out in out.chunks_exact_mut(3 * columns.len()).skip(self.written) {
            let Some(row) = from.get((self.down.starts[self.written] - next) as usize) else {
                break;
            };
            self.written += 1;
            if self.kind == RowWork::Copy {
                out.copy_from_slice(&row[3 * (columns[0] - left) as usize..][..out.len()]);
                continue;
            }
            let row = row.as_chunks::<3>().0;
            for (x, out) in columns.iter().zip(out.as_chunks_mut::<3>().0) {
                *out = row[(x - left) as usize];
            }
        }
    }
}

/// The source rows from `next` on, of at least `reach` bytes. Rows from `end` on repeat the last
/// row before `end`.
fn sources<'a>(
    pixels: Pixels<'a>,
    next: u32,
    end: u32,
    reach: usize,
    band: &'a mut [u8],
) -> [&'a [u8]; ROWS] {
    let mut band = band.chunks_exact_mut(reach);
    std::array::from_fn(|k| {
        let row = pixels.rows_from((next + k as u32).min(end - 1));
        match (row.len() < reach, band.next()) {
            (true, Some(copy)) => {
                copy[..row.len()].copy_from_slice(row);
                copy
            }
            _ => row,
        }
    })
}
