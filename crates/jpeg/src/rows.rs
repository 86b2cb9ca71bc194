//! Samples of one or two rows of MCUs, and the rows of pixels made from them.
//!
//! ```text
//!            ┌ column -1, a copy of 0 at the picture's left side     ┌ a copy of the last column, at its right side
//! row k:     ▼[ samples of the needed blocks ………………………………………………………… ]▼ (room that a kernel's last step reads)
//! ```
//!
//! A component's rows are stored in a ring of two rows of MCUs. When the pixels of one row of MCUs
//! are written, the row before it is read for the last time.

use super::header::Colours;
use super::kernels::JpegKernels;
use super::region::{Plane, RegionLayout, Up};

/// Bytes before the first column and after the last: more than a kernel reads ahead.
const MARGIN: usize = 64;

/// Number of pixels that a kernel computes in one step.
const STEP: usize = 16;

/// The rows of each component.
#[derive(Default)]
pub(super) struct PixelRows {
    rings: [RowRing; 4],
    /// One interpolated row of each component.
    full: [Vec<u8>; 4],
}

#[derive(Default)]
struct RowRing {
    bytes: Vec<u8>,
    stride: usize,
    /// Number of rows.
    count: usize,
    /// Column of the first sample.
    first: usize,
}

impl RowRing {
    fn start_of(&self, row: u32) -> usize {
        (row as usize % self.count) * self.stride + MARGIN
    }

    /// The samples of a row from `column` on. `column` may be one less than the first column.
    fn row(&self, row: u32, column: isize) -> &[u8] {
        let start = self.start_of(row);
        let from = (start as isize + column - self.first as isize) as usize;
        &self.bytes[from..start - MARGIN + self.stride]
    }
}

impl PixelRows {
    pub(super) fn start(&mut self, layout: &RegionLayout) {
        for ((ring, full), plane) in self
            .rings
            .iter_mut()
            .zip(&mut self.full)
            .zip(layout.planes())
        {
            let block = plane.block as usize;
            ring.stride = block * plane.columns.len() + 2 * MARGIN;
            ring.count = 2 * block * usize::from(plane.factors.v);
            ring.first = block * plane.columns.start as usize;
            grow(&mut ring.bytes, ring.stride * ring.count);
            let pixels = layout.region.width as usize;
            grow(
                full,
                if plane.up == Up::Same {
                    0
                } else {
                    pixels + 2 * MARGIN
                },
            );
        }
    }

    /// Heap bytes.
    pub(super) fn bytes(&self) -> usize {
        let rings: usize = self.rings.iter().map(|ring| ring.bytes.capacity()).sum();
        rings + self.full.iter().map(Vec::capacity).sum::<usize>()
    }

    /// Stores the samples of a block of `size` rows and columns, taken from the start of `samples`.
    #[inline(always)]
    pub(super) fn store(
        &mut self,
        component: usize,
        column: u32,
        row: u32,
        size: u32,
        samples: &[[u8; 8]; 8],
    ) {
        let ring = &mut self.rings[component];
        let mut at = ring.start_of(size * row) + (size * column) as usize - ring.first;
        if size == 8 {
            for samples in samples {
                ring.bytes[at..at + 8].copy_from_slice(samples);
                at += ring.stride;
            }
            return;
        }
        let size = size as usize;
        for samples in &samples[..size] {
            ring.bytes[at..at + size].copy_from_slice(&samples[..size]);
            at += ring.stride;
        }
    }

    /// Repeats the samples at the picture's left and right sides, after a row of MCUs.
    pub(super) fn pad(&mut self, layout: &RegionLayout, mcu_row: u32) {
        for (ring, plane) in self.rings.iter_mut().zip(layout.planes()) {
            if !matches!(plane.up, Up::H2V1 | Up::H2V2) {
                continue;
            }
            let rows = plane.block * u32::from(plane.factors.v);
            let width = plane.width as usize;
            let end = (plane.block * plane.columns.end) as usize;
            for row in mcu_row * rows..(mcu_row + 1) * rows {
                let start = ring.start_of(row);
                if ring.first == 0 {
                    ring.bytes[start - 1] = ring.bytes[start];
                }
                if end >= width {
                    let last = start + width - 1 - ring.first;
                    ring.bytes[last + 1] = ring.bytes[last];
                }
            }
        }
    }

    /// Writes the pixels of row `y` within the region.
    pub(super) fn write(
        &mut self,
        layout: &RegionLayout,
        colours: Colours,
        y: u32,
        kernels: &JpegKernels,
        out: &mut [u8],
    ) {
        let left = layout.region.left as usize;
        let width = layout.region.width as usize;
        for ((ring, full), plane) in self.rings.iter().zip(&mut self.full).zip(layout.planes()) {
            ring.widen(plane, y, left, width, kernels, full);
        }
        let row = |index: usize| {
            let plane = &layout.planes()[index];
            let from = match plane.up {
                Up::Same => self.rings[index].row(y, left as isize),
                Up::H2V1 | Up::H2V2 => &self.full[index][left % 2..],
                Up::H1V2 | Up::Box(..) => &self.full[index],
            };
            &from[..width]
        };
        match colours {
            Colours::Grey => {
                let pixels = out.as_chunks_mut::<3>().0;
                pixels
                    .iter_mut()
                    .zip(row(0))
                    .for_each(|(pixel, grey)| *pixel = [*grey; 3]);
            }
            Colours::YCbCr => (kernels.rgb)([row(0), row(1), row(2)], out),
            Colours::Rgb => {
                let parts = row(0).iter().zip(row(1)).zip(row(2));
                out.as_chunks_mut::<3>()
                    .0
                    .iter_mut()
                    .zip(parts)
                    .for_each(|(pixel, ((r, g), b))| *pixel = [*r, *g, *b]);
            }
            Colours::Cmyk => {
                let parts = row(0).iter().zip(row(1)).zip(row(2)).zip(row(3));
                for (pixel, (((cyan, magenta), yellow), black)) in
                    out.as_chunks_mut::<3>().0.iter_mut().zip(parts)
                {
                    *pixel = [*cyan, *magenta, *yellow].map(|ink| product(ink, *black));
                }
            }
            Colours::Ycck => {
                (kernels.rgb)([row(0), row(1), row(2)], out);
                for (pixel, black) in out.as_chunks_mut::<3>().0.iter_mut().zip(row(3)) {
                    *pixel = pixel.map(|ink| product(255 - ink, *black));
                }
            }
        }
    }
}

/// Makes the list at least `len` long, with unspecified content.
pub fn grow<T: Copy + Default>(list: &mut Vec<T>, len: usize) {
    if list.len() < len {
        // Freed first, because the old content is not needed.
        *list = Vec::new();
        *list = vec![T::default(); len];
    }
}

/// Returns the list with this length and unspecified content. Its capacity does not exceed the
/// longest length requested.
pub fn sized<T: Clone>(list: &mut Vec<T>, len: usize, value: T) -> &mut [T] {
    if list.capacity() < len {
        // Freed first, because the old content is not needed.
        *list = Vec::new();
        list.reserve_exact(len);
    }
    list.resize(len, value);
    list
}

/// The product of an inverted ink and inverted black, both in units of 1/255.
fn product(ink: u8, black: u8) -> u8 {
    let product = u32::from(ink) * u32::from(black) + 128;
    ((product + (product >> 8)) >> 8) as u8
}

impl RowRing {
    /// Upsamples the row of pixels `y` to the picture's size.
    fn widen(
        &self,
        plane: &Plane,
        y: u32,
        left: usize,
        width: usize,
        kernels: &JpegKernels,
        full: &mut [u8],
    ) {
        // Rounded up to whole steps: the surplus samples come from the margin, and their pixels are
        // not used.
        let pairs = ((left + width).div_ceil(2) - left / 2).next_multiple_of(STEP);
        let around = |row: u32| &self.row(row, left as isize / 2 - 1)[..pairs + 2];
        let far = |row: u32| match y % 2 {
            0 => row.saturating_sub(1),
            _ => (row + 1).min(plane.height - 1),
        };
        match plane.up {
            Up::Same => {}
            Up::H2V1 => (kernels.h2v1)(around(y), &mut full[..2 * pairs]),
            Up::H2V2 => (kernels.h2v2)(around(y / 2), around(far(y / 2)), &mut full[..2 * pairs]),
            Up::H1V2 => {
                let row = |row: u32| &self.row(row, left as isize)[..width];
                (kernels.h1v2)(
                    row(y / 2),
                    row(far(y / 2)),
                    1 + (y % 2) as u8,
                    &mut full[..width],
                );
            }
            Up::Box(h, v) => {
                let row = self.row(y / v, (left / h as usize) as isize);
                let columns = (left..left + width).map(|x| x / h as usize - left / h as usize);
                full.iter_mut()
                    .zip(columns)
                    .for_each(|(out, column)| *out = row[column]);
            }
        }
    }
}
