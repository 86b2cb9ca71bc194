//! PNG, WebP, BMP and GIF: decoded by the `image` crate into the worker's buffer, then converted to RGB in place.

use super::geometry::Size;
use super::{Format, Room, bad, over};
use crate::error::{Error, Result};
use image::codecs::{bmp::BmpDecoder, gif::GifDecoder, png::PngDecoder, webp::WebPDecoder};
use image::{ColorType, ImageDecoder, ImageError};
use std::io::Cursor;

/// Decodes to RGB at the front of the room's pixels. Of an animation it decodes the first picture.
pub(super) fn decode(format: Format, input: &[u8], room: &mut Room<'_>) -> Result<Size> {
    let reader = Cursor::new(input);
    let refused = |error| refused(format, error);
    match format {
        Format::Png => {
            // The decoder may inflate colour profiles and texts before it reports the size.
            read(format, PngDecoder::with_limits(reader, allowance(SCRATCH)).map_err(refused)?, room)
        }
        Format::WebP => read(format, WebPDecoder::new(reader).map_err(refused)?, room),
        Format::Bmp => read(format, BmpDecoder::new(reader).map_err(refused)?, room),
        _ => read(format, GifDecoder::new(reader).map_err(refused)?, room),
    }
}

fn allowance(bytes: u64) -> image::Limits {
    let mut allowance = image::Limits::no_limits();
    allowance.max_alloc = Some(bytes);
    allowance
}

fn read(format: Format, mut decoder: impl ImageDecoder, room: &mut Room<'_>) -> Result<Size> {
    let (width, height) = decoder.dimensions();
    let size = Size::new(width, height);
    if size.pixels() == 0 {
        return Err(bad(format!("{} of {width}x{height} pixels", format.name())));
    }
    let color = decoder.color_type();
    let native = size.pixels().saturating_mul(u64::from(color.bytes_per_pixel()));
    let own = native.max(size.pixels().saturating_mul(3));
    let theirs = size.pixels().saturating_mul(scratch_per_pixel(format)).saturating_add(SCRATCH);
    let pixels = room.take(size, own, theirs)?;
    // GIF and BMP may leave pixels out, where an earlier picture's must not show.
    pixels.fill(0);
    decoder.set_limits(allowance(theirs)).map_err(|error| refused(format, error))?;
    decoder.read_image(&mut pixels[..native as usize]).map_err(|error| refused(format, error))?;
    to_rgb(color, size.pixels() as usize, pixels)?;
    Ok(size)
}

/// Bytes for tables, windows and rows of any of these decoders, and for a PNG's metadata.
const SCRATCH: u64 = 4 << 20;

/// Bytes per pixel of the decoder's own memory: WebP's planes, transforms and alpha (found: 6.5 for lossy with alpha),
/// GIF's frame.
fn scratch_per_pixel(format: Format) -> u64 {
    match format {
        Format::WebP => 8,
        Format::Gif => 4,
        _ => 1,
    }
}

/// Converts as Pillow's `convert("RGB")`: drops alpha without blending, and keeps the high 8 of 16 bits.
fn to_rgb(color: ColorType, count: usize, pixels: &mut [u8]) -> Result<()> {
    let high = |pixels: &[u8], at: usize| (u16::from_ne_bytes([pixels[at], pixels[at + 1]]) >> 8) as u8;
    match color {
        ColorType::Rgb8 => {}
        ColorType::Rgba8 => narrow(count, pixels, |pixels, pixel| [0, 1, 2].map(|c| pixels[4 * pixel + c])),
        ColorType::Rgb16 => narrow(count, pixels, |pixels, pixel| [0, 1, 2].map(|c| high(pixels, 6 * pixel + 2 * c))),
        ColorType::Rgba16 => narrow(count, pixels, |pixels, pixel| [0, 1, 2].map(|c| high(pixels, 8 * pixel + 2 * c))),
        ColorType::La16 => narrow(count, pixels, |pixels, pixel| [high(pixels, 4 * pixel); 3]),
        ColorType::L8 => widen(count, pixels, |pixels, pixel| pixels[pixel]),
        ColorType::La8 => widen(count, pixels, |pixels, pixel| pixels[2 * pixel]),
        ColorType::L16 => widen(count, pixels, |pixels, pixel| high(pixels, 2 * pixel)),
        other => return Err(bad(format!("pixels of type {other:?} are not supported"))),
    }
    Ok(())
}

/// Converts pixels of 4 or more bytes, front to back, because they shrink.
fn narrow(count: usize, pixels: &mut [u8], rgb: impl Fn(&[u8], usize) -> [u8; 3]) {
    for pixel in 0..count {
        let rgb = rgb(pixels, pixel);
        pixels[3 * pixel..3 * pixel + 3].copy_from_slice(&rgb);
    }
}

/// Converts grey pixels of 1 or 2 bytes, back to front, because they grow.
fn widen(count: usize, pixels: &mut [u8], gray: impl Fn(&[u8], usize) -> u8) {
    for pixel in (0..count).rev() {
        let gray = gray(pixels, pixel);
        pixels[3 * pixel..3 * pixel + 3].fill(gray);
    }
}

fn refused(format: Format, error: ImageError) -> Error {
    let name = format.name();
    match error {
        ImageError::Limits(_) => over(format!("{name} needs more memory than its header declares")),
        ImageError::Unsupported(_) => bad(format!("{name} of an unsupported kind")),
        _ => bad(format!("damaged {name}")),
    }
    .with_source(error.to_string().trim_end().replace('\n', " "))
}
