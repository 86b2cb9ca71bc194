//! The last pass over the resized pixels: flip, dtype, layout and normalisation in one pass.
//!
//! A table per channel maps the 256 pixel values to output values. So every dtype costs the same, and the values equal
//! torchvision's to the last bit.

use super::PixelLayout;
use super::geometry::Size;
use crate::tensor::{DType, bf16, f16, normalized};
use bytemuck::Pod;

/// Output value for each channel and pixel value.
type Table<T> = [[T; 256]; 3];

/// Conversion of the pixel values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Values {
    pub(super) dtype: DType,
    /// Mean and standard deviation per channel, for values scaled to 0..1.
    pub(super) normalize: Option<([f32; 3], [f32; 3])>,
}

/// Whether the row holds the resized pixels unchanged, except for the flip.
pub(super) fn in_place(values: Values, layout: PixelLayout) -> bool {
    values.dtype == DType::U8 && layout == PixelLayout::Nhwc
}

/// Mirrors the picture in place.
pub(super) fn flip(pixels: &mut [u8], size: Size) {
    for row in pixels.chunks_exact_mut(3 * size.width as usize) {
        row.as_chunks_mut::<3>().0.reverse();
    }
}

/// Writes resized pixels (RGB, top row first) to `row`, which has the length of the declared field.
pub(super) fn write(pixels: &[u8], size: Size, flip: bool, values: Values, layout: PixelLayout, row: &mut [u8]) {
    let width = size.width as usize;
    match values.dtype {
        DType::U8 => spread(pixels, width, flip, layout, &table(|_, v| v), row),
        DType::F16 => spread(pixels, width, flip, layout, &table(|c, v| f16::from_f32(value(values, c, v))), cast(row)),
        DType::BF16 => {
            spread(pixels, width, flip, layout, &table(|c, v| bf16::from_f32(value(values, c, v))), cast(row))
        }
        _ => spread(pixels, width, flip, layout, &table(|c, v| value(values, c, v)), cast(row)),
    }
}

/// Rows of a slot start at multiples of the element's size.
fn cast<T: Pod>(row: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(row)
}

/// The normalised value, scaled to 0..1 first. The default mean 0 and std 1 change no bit.
fn value(values: Values, channel: usize, pixel: u8) -> f32 {
    let (mean, std) = values.normalize.unwrap_or(([0.0; 3], [1.0; 3]));
    normalized(pixel, mean[channel], std[channel])
}

fn table<T: Copy + Default>(entry: impl Fn(usize, u8) -> T) -> Table<T> {
    let mut table = [[T::default(); 256]; 3];
    for (channel, entries) in table.iter_mut().enumerate() {
        for (pixel, slot) in (0..=255).zip(entries) {
            *slot = entry(channel, pixel);
        }
    }
    table
}

fn spread<T: Copy>(pixels: &[u8], width: usize, flip: bool, layout: PixelLayout, table: &Table<T>, out: &mut [T]) {
    match layout {
        PixelLayout::Nhwc => interleaved(pixels, width, flip, table, out),
        PixelLayout::Nchw => planes(pixels, width, flip, table, out),
    }
}

fn interleaved<T: Copy>(pixels: &[u8], width: usize, flip: bool, table: &Table<T>, out: &mut [T]) {
    for (source, out) in pixels.chunks_exact(3 * width).zip(out.chunks_exact_mut(3 * width)) {
        let (source, out) = (source.as_chunks::<3>().0, out.as_chunks_mut::<3>().0);
        let put = |(out, pixel): (&mut [T; 3], &[u8; 3])| *out = [0, 1, 2].map(|c| table[c][usize::from(pixel[c])]);
        if flip {
            out.iter_mut().zip(source.iter().rev()).for_each(put);
        } else {
            out.iter_mut().zip(source).for_each(put);
        }
    }
}

fn planes<T: Copy>(pixels: &[u8], width: usize, flip: bool, table: &Table<T>, out: &mut [T]) {
    let plane = out.len() / 3;
    let (red, rest) = out.split_at_mut(plane);
    let (green, blue) = rest.split_at_mut(plane);
    let rows = red.chunks_exact_mut(width).zip(green.chunks_exact_mut(width)).zip(blue.chunks_exact_mut(width));
    for (source, ((red, green), blue)) in pixels.chunks_exact(3 * width).zip(rows) {
        let source = source.as_chunks::<3>().0;
        let outs = red.iter_mut().zip(green).zip(blue);
        let put = |(((red, green), blue), pixel): (((&mut T, &mut T), &mut T), &[u8; 3])| {
            *red = table[0][usize::from(pixel[0])];
            *green = table[1][usize::from(pixel[1])];
            *blue = table[2][usize::from(pixel[2])];
        };
        if flip {
            outs.zip(source.iter().rev()).for_each(put);
        } else {
            outs.zip(source).for_each(put);
        }
    }
}
