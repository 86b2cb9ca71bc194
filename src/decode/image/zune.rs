//! JPEGs of several scans (mostly progressive) by zune-jpeg, straight into the worker's buffer; and what image decoding
//! asks of any JPEG's header.
//!
//! In strict mode zune checks much, but not that the file is whole; so the end marker is looked for.

use super::format::bad;
use super::geometry::{Rect, Size};
use super::limits::{Room, over};
use super::orientation::Orientation;
use crate::error::Result;
use crate::jpeg::{self, Colours, DAMAGED, Header, Segment};
use crate::setting::Setting;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// Whether what the scans share is the same for all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scans {
    Alike,
    /// Quantisation tables or the Adobe marker change between scans.
    Changing,
}

impl Header {
    pub(super) fn size(&self) -> Size {
        Size::new(self.width, self.height)
    }

    /// Refuses pictures of kinds that zune does not decode, or decodes to wrong colours silently.
    ///
    /// Those are sequential, of several scans, unless no component is subsampled, luma comes first and no restart markers
    /// are used; sampling factors of 3, and of chroma over those of luma; and quantisation tables that change between scans.
    fn check_kind(&self, scans: Scans) -> Result<()> {
        let plain = self.restart == 0 && self.largest_factors() == (1, 1) && self.in_order;
        if self.one_scan {
            return Ok(());
        }
        if !self.factors_are_plain() {
            return Err(unsupported("sampling factors of 3, or chroma finer than luma, in several scans"));
        }
        if !self.progressive && !plain {
            return Err(unsupported("sequential, in several scans"));
        }
        match scans {
            Scans::Alike => Ok(()),
            Scans::Changing => Err(unsupported("quantisation tables or colours that change between its scans")),
        }
    }

    /// Refuses a picture of more than `most` scans, and if `strict`, one whose scans do not hold all coefficients. (The
    /// libraries read no further scan than the first of one-scan files.)
    pub(super) fn check_scans(&self, input: &[u8], most: u32, strict: bool) -> Result<Scans> {
        let mut kind = Scans::Alike;
        if self.one_scan {
            return Ok(kind);
        }
        let (mut scans, mut at, mut left) = (0_u32, 2, [[u8::MAX; 64]; 4]);
        // A cut file has no more scans; other checks find the cut.
        while let Ok(Segment { marker, start, end }) = Segment::next(input, at) {
            match marker {
                0xD9 if strict && left[..usize::from(self.components)].iter().flatten().any(|left| *left > 0) => {
                    return Err(bad(format!("{DAMAGED}: its {scans} scans leave out coefficients")));
                }
                0xD9 => break,
                0xDA => {
                    scans += 1;
                    self.note_scan(&input[start..end], &mut left);
                }
                // A repeated segment is among those of the header.
                0xDB | 0xEE if memchr::memmem::find(&input[..self.scan], &input[start..end]).is_none() => {
                    kind = Scans::Changing;
                }
                _ => {}
            }
            if scans > most {
                return Err(over(format!("JPEG of more than {most} scans; the limit is {most}")));
            }
            at = end;
        }
        Ok(kind)
    }

    /// Refuses bytes between the segments of the header.
    pub(super) fn check_stray(&self) -> Result<()> {
        match self.stray {
            (0, _) => Ok(()),
            (count, at) => {
                let message = format!("JPEG with {count} stray bytes between the segments of its header, at byte {at}");
                Err(bad(message + &Setting::Strict.hint(|strict| format!("; {strict} skips them"))))
            }
        }
    }

    /// The EXIF orientation of `input`, to which this header belongs.
    pub(super) fn orientation(&self, input: &[u8]) -> Orientation {
        input.get(self.exif.0..self.exif.1).map(Orientation::of_exif).unwrap_or_default()
    }

    /// Maximum heap bytes of another decoder: rows of MCUs, and the coefficients of a picture of several scans.
    pub(super) fn scratch(&self) -> u64 {
        let rows = ROW_BYTES * (u64::from(self.width) + 32);
        let coefficients = if self.one_scan { 0 } else { 2 * self.samples() };
        rows + coefficients
    }
}

/// Bytes of zune's buffers for one row of MCUs of all components, per pixel of width.
///
/// Found: 170 for 4:2:0, up to 480 for the unusual factors of 4. libjpeg-turbo takes less: bytes where zune has words
/// of 16 bits.
const ROW_BYTES: u64 = 512;

/// Decodes the picture to RGB, at the front of the room's pixels.
pub(super) fn decode(
    input: &[u8],
    (header, scans): (&Header, Scans),
    strict: bool,
    room: &mut Room<'_>,
) -> Result<Rect> {
    header.check_kind(scans)?;
    let size = header.size();
    let scans = room.limits.scans as usize;
    let pixels = room.take(size, 3 * size.pixels(), header.scratch())?;
    let options = DecoderOptions::new_fast()
        .set_strict_mode(strict)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_max_scans(scans)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut input = input;
    if strict {
        input = &input[..header.end_marker(input)? + 2];
    } else {
        // zune may leave out the end, where an earlier picture's pixels must not show.
        pixels.fill(128);
    }
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(input), options);
    decoder.decode_headers().map_err(damaged)?;
    let found = decoder.dimensions().map(|(width, height)| Size::new(width as u32, height as u32));
    if found != Some(size) {
        return Err(bad("JPEG with a second frame header"));
    }
    let found = colours(&decoder, header);
    let swapped = (found, header.colours) == (Colours::Rgb, Colours::YCbCr);
    if found != header.colours && !swapped {
        return Err(unsupported("colour markers that contradict each other, in several scans"));
    }
    decoder.decode_into(pixels).map_err(damaged)?;
    if swapped {
        let pixels = pixels.as_chunks_mut::<3>().0;
        pixels.iter_mut().for_each(|[y, cb, cr]| (*y, *cb, *cr) = jpeg::pixel(*y, *cb, *cr).into());
    }
    Ok(Rect::of(size))
}

/// The colour space that zune assumes; libjpeg may assume another.
fn colours(decoder: &JpegDecoder<ZCursor<&[u8]>>, header: &Header) -> Colours {
    match (header.components, decoder.input_colorspace()) {
        (1, _) => Colours::Grey,
        (3, Some(ColorSpace::RGB | ColorSpace::CMYK)) => Colours::Rgb,
        (3, _) | (_, Some(ColorSpace::YCbCr)) => Colours::YCbCr,
        (_, Some(ColorSpace::YCCK)) => Colours::Ycck,
        _ => Colours::Cmyk,
    }
}

fn unsupported(what: &str) -> crate::Error {
    let turbo = Setting::Turbo.hint(|turbo| format!("the feature {turbo} decodes it, or "));
    bad(format!("JPEG of an unsupported kind ({what}): {turbo}re-save it in one scan (jpegtran does, without loss)"))
}

/// An error with zune's message on one line; some of its messages end in a line break.
fn damaged(error: zune_jpeg::errors::DecodeErrors) -> crate::Error {
    bad(DAMAGED).with_source(error.to_string().trim_end().replace('\n', " "))
}
