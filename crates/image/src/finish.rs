//! The last pass over the resized pixels: flip, dtype, layout and normalisation in one pass.
//!
//! A table per channel maps the 256 pixel values to output values. So every dtype costs the same,
//! and the values equal torchvision's to the last bit.

use super::geometry::Size;
use super::patches::Tiles;
use crate::PixelLayout;
use bytemuck::Pod;
use feedline_core::tensor::{DType, bf16, f16, normalized};

/// Output value for each channel and pixel value.
type ValueTable<T> = [[T; 256]; 3];

/// How pixel values become output values.
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

/// Writes the tiles of resized pixels (RGB, top row first) to `row`, which has at least their
/// length.
pub(super) fn write(
    pixels: &[u8],
    tiles: Tiles,
    flip: bool,
    values: Values,
    layout: PixelLayout,
    row: &mut [u8],
) {
    match values.dtype {
        _ if in_place(values, layout) => copy(pixels, tiles, flip, row),
        DType::U8 => spread(pixels, tiles, flip, layout, &table(|_, v| v), row),
        DType::F16 => spread(
            pixels,
            tiles,
            flip,
            layout,
            &table(|c, v| f16::from_f32(value(values, c, v))),
            cast(row),
        ),
        DType::BF16 => spread(
            pixels,
            tiles,
            flip,
            layout,
            &table(|c, v| bf16::from_f32(value(values, c, v))),
            cast(row),
        ),
        _ => spread(
            pixels,
            tiles,
            flip,
            layout,
            &table(|c, v| value(values, c, v)),
            cast(row),
        ),
    }
}

/// Writes tiles without converting their pixels.
fn copy(pixels: &[u8], tiles: Tiles, flip: bool, out: &mut [u8]) {
    let lengths = (
        3 * tiles.tile.pixels() as usize,
        3 * tiles.tile.width as usize,
    );
    for (rows, out) in tiles
        .rows(pixels, flip)
        .zip(out.chunks_exact_mut(lengths.0))
    {
        rows.zip(out.chunks_exact_mut(lengths.1))
            .for_each(|(row, out)| out.copy_from_slice(row));
        if flip {
            self::flip(out, tiles.tile);
        }
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

fn table<T: Copy + Default>(entry: impl Fn(usize, u8) -> T) -> ValueTable<T> {
    let mut table = [[T::default(); 256]; 3];
    for (channel, entries) in table.iter_mut().enumerate() {
        for (pixel, slot) in (0..=255).zip(entries) {
            *slot = entry(channel, pixel);
        }
    }
    table
}

fn spread<T: Copy>(
    pixels: &[u8],
    tiles: Tiles,
    flip: bool,
    layout: PixelLayout,
    table: &ValueTable<T>,
    out: &mut [T],
) {
    let width = tiles.tile.width as usize;
    let each = 3 * tiles.tile.pixels() as usize;
    for (rows, out) in tiles.rows(pixels, flip).zip(out.chunks_exact_mut(each)) {
        match layout {
            PixelLayout::Nhwc => interleaved(rows, width, flip, table, out),
            PixelLayout::Nchw => planes(rows, width, flip, table, out),
        }
    }
}

fn interleaved<'a, T: Copy>(
    rows: impl Iterator<Item = &'a [u8]>,
    width: usize,
    flip: bool,
    table: &ValueTable<T>,
    out: &mut [T],
) {
    for (source, out) in rows.zip(out.chunks_exact_mut(3 * width)) {
        let source = source.as_chunks::<3>().0;
        let out = out.as_chunks_mut::<3>().0;
        let put = |(out, pixel): (&mut [T; 3], &[u8; 3])| {
            *out = [0, 1, 2].map(|c| table[c][usize::from(pixel[c])])
        };
        if flip {
            out.iter_mut().zip(source.iter().rev()).for_each(put);
        } else {
            out.iter_mut().zip(source).for_each(put);
        }
    }
}

fn planes<'a, T: Copy>(
    rows: impl Iterator<Item = &'a [u8]>,
    width: usize,
    flip: bool,
    table: &ValueTable<T>,
    out: &mut [T],
) {
    let plane = out.len() / 3;
    let (red, rest) = out.split_at_mut(plane);
    let (green, blue) = rest.split_at_mut(plane);
    let outs = red
        .chunks_exact_mut(width)
        .zip(green.chunks_exact_mut(width))
        .zip(blue.chunks_exact_mut(width));
    for (source, ((red, green), blue)) in rows.zip(outs) {
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
