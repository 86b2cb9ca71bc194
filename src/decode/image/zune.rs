//! JPEGs of several scans (mostly progressive) by zune-jpeg, straight into the worker's buffer; and what image decoding
//! asks of any JPEG's header.
//!
//! In strict mode zune checks much, but not that the file is whole; so the end marker is looked for.

use super::geometry::{Rect, Size};
use super::orientation::Orientation;
use super::{Room, bad, over};
use crate::error::Result;
use crate::jpeg::{DAMAGED, Header, Segment};
use crate::setting::Setting;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

impl Header {
    pub(super) fn size(&self) -> Size {
        Size::new(self.width, self.height)
    }

    /// Refuses pictures that zune decodes to wrong colours silently.
    ///
    /// They are sequential, with a scan per component, and have restart markers, or chroma with a quarter of the rows
    /// or more than 4 samples of luma (found: 4×2, 1×4 and 2×4).
    fn check_kind(&self) -> Result<()> {
        if self.progressive || self.one_scan {
            return Ok(());
        }
        let (width, height) = self.largest_factors();
        let what = match (self.restart, width * height) {
            (1.., _) => String::from("restart markers"),
            (_, 5..) => format!("sampling factors of {width}x{height}"),
            _ if height > 2 => format!("sampling factors of {width}x{height}"),
            _ => return Ok(()),
        };
        let message = format!("sequential JPEG of several scans with {what}: zune-jpeg does not decode it");
        Err(bad(message + "; libjpeg-turbo does (feature `turbojpeg`)"))
    }

    /// Refuses a picture of more than `most` scans. (The libraries read no further scan than the first of one-scan
    /// files.)
    pub(super) fn check_scans(&self, input: &[u8], most: u32) -> Result<()> {
        if self.one_scan {
            return Ok(());
        }
        // The first scan's header is read already.
        let (mut scans, mut at) = (1_u32, self.scan);
        // A cut file has no more scans; other checks find the cut.
        while let Ok(Segment { marker, end, .. }) = Segment::next(input, at) {
            match marker {
                0xD9 => break,
                0xDA => scans = scans.saturating_add(1),
                _ => {}
            }
            if scans > most {
                break;
            }
            at = end;
        }
        if scans > most {
            return Err(over(format!("JPEG of more than {most} scans; the limit is {most}")));
        }
        Ok(())
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
pub(super) fn decode(input: &[u8], header: &Header, strict: bool, room: &mut Room<'_>) -> Result<Rect> {
    header.check_kind()?;
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
    decoder.decode_into(pixels).map_err(damaged)?;
    Ok(Rect::of(size))
}

/// An error with zune's message on one line; some of its messages end in a line break.
fn damaged(error: zune_jpeg::errors::DecodeErrors) -> crate::Error {
    bad(DAMAGED).with_source(error.to_string().trim_end().replace('\n', " "))
}
