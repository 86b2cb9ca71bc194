//! PNG, WebP, BMP and GIF: decoded by the `image` crate into the worker's buffer, then converted to
//! RGB in place.

use super::format::Format;
use super::geometry::Size;
use super::limits::{PictureRoom, over};
use feedline_base::error::{Error, Result};
use image::codecs::bmp::BmpDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::{ColorType, ImageDecoder, ImageError};
use std::io::Cursor;

/// Decodes to RGB, at the start of the pixel buffer in `room`. Of an animation, decodes the first
/// frame.
pub(super) fn decode(format: Format, input: &[u8], room: &mut PictureRoom<'_>) -> Result<Size> {
    let reader = Cursor::new(input);
    let refused = |error| refused(format, error);
    match format {
        Format::Png if input.get(12..16) == Some(b"CgBI") => Err(Error::decode(
            "PNG of an unsupported kind (Apple's CgBI): re-save it as a plain PNG",
        )),
        Format::Png => {
            // The decoder may inflate colour profiles and texts before it reports the size.
            read(
                format,
                PngDecoder::with_limits(reader, allowance(SCRATCH)).map_err(refused)?,
                room,
                0,
            )
        }
        Format::Gif => gif(input, room),
        Format::WebP => webp(input, room),
        // The decoder does not check the offset of the pixels. (Older headers have no number of
        // bits here.)
        _ if u32_at(input, 14) >= 40
            && matches!(input.get(28), Some(1..=8))
            && u32_at(input, 10) <= 54 =>
        {
            Err(Error::decode(
                "damaged BMP: its pixels begin within its palette",
            ))
        }
        _ => read(format, BmpDecoder::new(reader).map_err(refused)?, room, 0),
    }
}

/// The size of the decoded picture, according to its header.
pub(super) fn size(format: Format, input: &[u8]) -> Result<Size> {
    let reader = Cursor::new(input);
    let refused = |error| refused(format, error);
    let (width, height) = match format {
        Format::Png => PngDecoder::with_limits(reader, allowance(SCRATCH))
            .map_err(refused)?
            .dimensions(),
        Format::WebP => WebPDecoder::new(reader).map_err(refused)?.dimensions(),
        Format::Gif => return gif_frame(input).map(|(.., size)| size),
        _ => BmpDecoder::new(reader).map_err(refused)?.dimensions(),
    };
    match Size::new(width, height) {
        size if size.pixels() == 0 => Err(Error::decode(format!(
            "{} of {width}x{height} pixels",
            format.name()
        ))),
        size => Ok(size),
    }
}

/// The little-endian number at offset `at`; 0 beyond the end.
fn u32_at(input: &[u8], at: usize) -> u32 {
    input
        .get(at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |number| u32::from_le_bytes(*number))
}

/// Decodes a WebP. The first frame of an animation is decoded as a separate still picture, because
/// the decoder of animations blends it. The rest of the canvas is black.
fn webp(input: &[u8], room: &mut PictureRoom<'_>) -> Result<Size> {
    let whole = 8 + u64::from(u32_at(input, 4));
    if whole > input.len() as u64 {
        return Err(Error::decode(format!(
            "damaged WebP: {} of {whole} bytes: the file is cut",
            input.len()
        )));
    }
    let open =
        |input| WebPDecoder::new(Cursor::new(input)).map_err(|error| refused(Format::WebP, error));
    let decoder = open(input)?;
    if !decoder.has_animation() {
        return read(Format::WebP, decoder, room, 0);
    }
    let (width, height) = decoder.dimensions();
    let frame = first_frame(input);
    let canvas = Size::new(width, height);
    let (left, top, still) =
        frame.ok_or_else(|| Error::decode("damaged WebP: an animation without a frame"))?;
    room.admit(canvas)?;
    room.encoded += still.len();
    let size = read(Format::WebP, open(&still)?, room, 3 * canvas.pixels())?;
    if left + size.width > canvas.width || top + size.height > canvas.height {
        return Err(Error::decode("damaged WebP: a frame beyond its canvas"));
    }
    let from = 3 * size.width as usize;
    let to = 3 * canvas.width as usize;
    let start = 3 * left as usize;
    // From the last row to the first, because rows grow.
    for y in (0..canvas.height as usize).rev() {
        let row = y
            .checked_sub(top as usize)
            .filter(|row| *row < size.height as usize);
        let filled = y * to + start..y * to + start + row.map_or(0, |_| from);
        row.into_iter().for_each(|row| {
            room.pixels
                .copy_within(row * from..(row + 1) * from, filled.start)
        });
        room.pixels[y * to..filled.start].fill(0);
        room.pixels[filled.end..(y + 1) * to].fill(0);
    }
    Ok(canvas)
}

/// Left and top of the first frame of an animated WebP, and the frame as a still WebP.
fn first_frame(input: &[u8]) -> Option<(u32, u32, Vec<u8>)> {
    let mut at = 12;
    while input.get(at..at + 4)? != b"ANMF" {
        at += 8 + (u32_at(input, at + 4) as usize).next_multiple_of(2);
    }
    let [left, top] = [0, 3].map(|part| 2 * (u32_at(input, at + 8 + part) & 0xFF_FFFF));
    let size = input.get(at + 14..at + 20)?;
    let end = at + 8 + u32_at(input, at + 4) as usize;
    let frame = input.get(at + 24..end)?;
    // A separate alpha chunk needs the extended header.
    let header = if frame.starts_with(b"ALPH") {
        [b"VP8X\x0A\0\0\0\x10\0\0\0", size].concat()
    } else {
        Vec::new()
    };
    let length = (4 + header.len() + frame.len()) as u32;
    Some((
        left,
        top,
        [
            b"RIFF".as_slice(),
            &length.to_le_bytes(),
            b"WEBP",
            &header,
            frame,
        ]
        .concat(),
    ))
}

/// The decoder of a GIF, its first frame, and the size of its canvas, which grows to hold the
/// frame.
fn gif_frame(input: &[u8]) -> Result<(gif::Decoder<&[u8]>, gif::Frame<'static>, Size)> {
    let mut options = gif::DecodeOptions::new();
    options.allow_unknown_blocks(true);
    let mut decoder = options.read_info(input).map_err(damaged_gif)?;
    check_blocks(input)?;
    let frame = decoder.next_frame_info().map_err(damaged_gif)?.cloned();
    let frame = frame.ok_or_else(|| Error::decode("GIF without a picture"))?;
    if frame.width == 0 || frame.height == 0 {
        return Err(Error::decode(format!(
            "GIF of {}x{} pixels",
            frame.width, frame.height
        )));
    }
    let side = |screen: u16, start: u16, own: u16| {
        u32::from(screen).max(u32::from(start) + u32::from(own))
    };
    let width = side(decoder.width(), frame.left, frame.width);
    let size = Size::new(width, side(decoder.height(), frame.top, frame.height));
    Ok((decoder, frame, size))
}

fn damaged_gif(error: gif::DecodingError) -> Error {
    Error::decode("damaged GIF").with_source(error.to_string())
}

/// Decodes the first frame of a GIF. As in Pillow, the rest of the canvas has the transparent
/// colour, or the first one of the palette.
fn gif(input: &[u8], room: &mut PictureRoom<'_>) -> Result<Size> {
    let (mut decoder, frame, size) = gif_frame(input)?;
    let left = frame.left;
    let top = frame.top;
    let elsewhere = usize::from(frame.transparent.unwrap_or(0));
    let own = Size::new(frame.width.into(), frame.height.into());
    // Colours beyond the palette are black.
    let mut palette = [[0; 3]; 256];
    let colours = decoder.palette().map_err(damaged_gif)?.as_chunks::<3>().0;
    palette
        .iter_mut()
        .zip(colours)
        .for_each(|(entry, colour)| *entry = *colour);
    let all = 3 * size.pixels();
    let (pixels, indices) = room
        .take(size, all + own.pixels(), SCRATCH)?
        .split_at_mut(all as usize);
    decoder.read_into_buffer(indices).map_err(damaged_gif)?;
    let pixels = pixels.as_chunks_mut::<3>().0;
    pixels.fill(palette[elsewhere]);
    let rows = pixels
        .chunks_exact_mut(size.width as usize)
        .skip(top.into());
    for (row, indices) in rows.zip(indices.chunks_exact(own.width as usize)) {
        let pairs = row[usize::from(left)..].iter_mut().zip(indices);
        pairs.for_each(|(pixel, index)| *pixel = palette[usize::from(*index)]);
    }
    Ok(size)
}

/// Refuses anything but extensions, known or not, before the first frame.
fn check_blocks(input: &[u8]) -> Result<()> {
    let palette = input
        .get(10)
        .filter(|flags| **flags & 0x80 != 0)
        .map_or(0, |flags| 6 << (flags & 7));
    let mut at = 13 + palette;
    while input.get(at) == Some(&0x21) {
        at += 2;
        while let Some(length @ 1..) = input.get(at) {
            at += 1 + usize::from(*length);
        }
        at += 1;
    }
    match input.get(at) {
        Some(0x2C) => Ok(()),
        _ => Err(Error::decode(format!(
            "damaged GIF: no picture after its extensions, at byte {at} of the picture"
        ))),
    }
}

fn allowance(bytes: u64) -> image::Limits {
    let mut allowance = image::Limits::no_limits();
    allowance.max_alloc = Some(bytes);
    allowance
}

/// Decodes to RGB in a buffer of at least `least` bytes from `room`.
fn read(
    format: Format,
    mut decoder: impl ImageDecoder,
    room: &mut PictureRoom<'_>,
    least: u64,
) -> Result<Size> {
    let (width, height) = decoder.dimensions();
    let size = Size::new(width, height);
    if size.pixels() == 0 {
        return Err(Error::decode(format!(
            "{} of {width}x{height} pixels",
            format.name()
        )));
    }
    let color = decoder.color_type();
    let native = size
        .pixels()
        .saturating_mul(u64::from(color.bytes_per_pixel()));
    let own = native.max(size.pixels().saturating_mul(3)).max(least);
    let theirs = size
        .pixels()
        .saturating_mul(scratch_per_pixel(format))
        .saturating_add(SCRATCH);
    let pixels = room.take(size, own, theirs)?;
    // A BMP may leave out pixels. Pixels of an earlier picture must not show through there.
    pixels.fill(0);
    decoder
        .set_limits(allowance(theirs))
        .map_err(|error| refused(format, error))?;
    decoder
        .read_image(&mut pixels[..native as usize])
        .map_err(|error| refused(format, error))?;
    to_rgb(color, size.pixels() as usize, pixels)?;
    Ok(size)
}

/// Bytes for tables, windows and rows of any of these decoders, and for a PNG's metadata.
const SCRATCH: u64 = 4 << 20;

/// The decoder's own memory in bytes per pixel. For WebP: planes, transforms and alpha (measured:
/// 6.5 for lossy with alpha).
fn scratch_per_pixel(format: Format) -> u64 {
    if format == Format::WebP { 8 } else { 1 }
}

/// Converts as Pillow's `convert("RGB")`: drops alpha without blending, and keeps the high 8 of 16
/// bits.
fn to_rgb(color: ColorType, count: usize, pixels: &mut [u8]) -> Result<()> {
    let high =
        |pixels: &[u8], at: usize| (u16::from_ne_bytes([pixels[at], pixels[at + 1]]) >> 8) as u8;
    match color {
        ColorType::Rgb8 => {}
        ColorType::Rgba8 => narrow(count, pixels, |pixels, pixel| {
            [0, 1, 2].map(|c| pixels[4 * pixel + c])
        }),
        ColorType::Rgb16 => narrow(count, pixels, |pixels, pixel| {
            [0, 1, 2].map(|c| high(pixels, 6 * pixel + 2 * c))
        }),
        ColorType::Rgba16 => narrow(count, pixels, |pixels, pixel| {
            [0, 1, 2].map(|c| high(pixels, 8 * pixel + 2 * c))
        }),
        ColorType::La16 => narrow(count, pixels, |pixels, pixel| [high(pixels, 4 * pixel); 3]),
        ColorType::L8 => widen(count, pixels, |pixels, pixel| pixels[pixel]),
        ColorType::La8 => widen(count, pixels, |pixels, pixel| pixels[2 * pixel]),
        ColorType::L16 => widen(count, pixels, |pixels, pixel| high(pixels, 2 * pixel)),
        other => {
            return Err(Error::decode(format!(
                "pixels of type {other:?} are not supported"
            )));
        }
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
        ImageError::Unsupported(_) => Error::decode(format!("{name} of an unsupported kind")),
        _ => Error::decode(format!("damaged {name}")),
    }
    .with_source(error.to_string().trim_end().replace('\n', " "))
}
