//! The limits for one picture, and the memory that it gets within these limits.

use super::geometry::Size;
use super::resize;
use super::resize::Resizer;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_jpeg::grow;

/// Limits for one picture, checked from its header before memory is allocated.
///
/// There is no time limit, because a library cannot be stopped in the middle of a picture. Instead
/// the work is bounded: it is linear in encoded bytes and pixels, and for a JPEG in `bytes + pixels
/// × scans`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of pixels of the encoded picture.
    pub pixels: u64,
    /// Bytes of the encoded picture.
    pub bytes: usize,
    /// Maximum heap bytes of one decode. All workers may use as much at the same time. See
    /// [`Image`](super::Image) for what is counted.
    pub memory: usize,
    /// Maximum number of scans of a JPEG with several scans (usually a progressive one). Encoders
    /// write about 10.
    ///
    /// Each scan is a pass over all coefficients, and takes only a hundred bytes in the file.
    pub scans: u32,
}

impl Default for Limits {
    /// 64 megapixels, 256 MiB encoded, 1 GiB of heap, 100 scans.
    fn default() -> Self {
        Self::of_pixels(64 << 20)
    }
}

impl Limits {
    /// Limits for pictures of up to `pixels` in any format: 4 encoded bytes and 16 heap bytes per
    /// pixel, but at least 64 MiB of each.
    pub fn of_pixels(pixels: u64) -> Self {
        let bytes = |each| {
            usize::try_from(pixels.saturating_mul(each))
                .unwrap_or(usize::MAX)
                .max(64 << 20)
        };
        Self {
            pixels,
            bytes: bytes(4),
            memory: bytes(16),
            scans: 100,
        }
    }
}

/// The only source of memory for a picture: it checks the limits.
pub(super) struct PictureRoom<'a> {
    pub(super) limits: Limits,
    /// Bytes of the encoded picture.
    pub(super) encoded: usize,
    /// Returns the heap bytes for resizing a picture of a given size.
    pub(super) resizing: &'a dyn Fn(Size) -> u64,
    pub(super) pixels: &'a mut Vec<u8>,
    pub(super) resizer: &'a mut Resizer,
}

impl PictureRoom<'_> {
    /// Refuses a picture with too many pixels.
    pub(super) fn admit(&self, picture: Size) -> Result<()> {
        let Size { width, height } = picture;
        let limit = self.limits.pixels;
        match picture.pixels() {
            pixels if pixels > limit => {
                let message = format!("{width}x{height} = {pixels} pixels; the limit is {limit}");
                Err(over_limit(message).with_amounts(pixels, limit))
            }
            _ if width.max(height) > resize::SIDE_MAX => Err(over(format!(
                "{width}x{height} pixels; sides of at most {} are supported",
                resize::SIDE_MAX
            ))),
            _ => Ok(()),
        }
    }

    /// Returns `own` bytes with unspecified content for the pixels of a picture of size `picture`.
    ///
    /// Errors: [`ErrorKind::Limit`] if the picture has too many pixels, or if these bytes, the
    /// encoded ones, `theirs` for the decoder and those for resizing together exceed the limit.
    pub(super) fn take(&mut self, picture: Size, own: u64, theirs: u64) -> Result<&mut [u8]> {
        self.admit(picture)?;
        let Size { width, height } = picture;
        let resizing = (self.resizing)(picture);
        let limit = self.limits.memory as u64;
        let theirs = theirs.saturating_add(self.encoded as u64);
        let sum = own.saturating_add(theirs).saturating_add(resizing);
        if sum > limit {
            let message =
                format!("{width}x{height} pixels take {sum} bytes to decode; the limit is {limit}");
            return Err(over_limit(message)
                .with_amounts(sum, limit)
                .with_note(&format!(
                    "a small {} lowers this limit",
                    Setting::MemoryBudget
                )));
        }
        let kept = (self.pixels.len().max(own as usize) + self.resizer.bytes()) as u64;
        if kept.saturating_add(resizing).saturating_add(theirs) > limit {
            // Buffers of earlier pictures leave too little for this one.
            *self.pixels = Vec::new();
            self.resizer.release();
        }
        grow(self.pixels, own as usize);
        Ok(&mut self.pixels[..own as usize])
    }
}

pub(super) fn over(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Limit, Stage::Decode, message)
}

/// An error for a limit that a setting can raise.
pub(super) fn over_limit(message: String) -> Error {
    over(message + &Setting::MaxPixels.hint(|most| format!(" ({most} raises it)")))
}
