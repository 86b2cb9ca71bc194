//! JPEG by libjpeg-turbo: the columns and rows that a crop needs, straight into the worker's buffer.
//!
//! ```text
//!      ┌──────────────────────────────┐   entropy coding: decoded down to the last row of the crop
//!      │ rows above: no IDCT          │   IDCT, chroma and colours: computed for the middle alone,
//!      │      ┌──────────────┬──┐     │   from the MCU column that holds the crop's left side, less 2 pixels,
//!      │      │     crop     │+2│     │   to 2 pixels beyond its right side
//!      │      └──────────────┴──┘     │
//!      │ rows below: nothing          │
//!      └──────────────────────────────┘
//! ```
//!
//! libjpeg-turbo interpolates chroma at the border of the decoded part as at the border of a picture. With 2 pixels
//! more, the crop itself equals the whole picture's to the bit.
//!
//! In strict mode every warning of the library is an error and ends the decode: invalid codes, data that end too early
//! or too late, markers out of order. Some encoders pad the end marker by a byte or two: such a picture is decoded
//! again without the padding, under the same rules.
//!
//! The obligations of the `unsafe` here:
//! * The library writes `rows` rows of `pitch` bytes and no more, because the size that it reads from the header is the
//!   size that we read ([`Session::region`]).
//! * One thread at a time uses a handle (`&mut`).
//! * An error leaves the handle in an unknown state, so it is destroyed.
//! * Errors unwind through the library by `longjmp`, which crosses no Rust frame: the library calls no function of
//!   ours.

#![allow(unsafe_code)]

use super::format::bad;
use super::geometry::{Rect, Size};
use super::limits::Room;
use crate::error::{Error, Result};
use crate::jpeg::{DAMAGED, Header, SURPLUS, product};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use turbojpeg_sys as sys;

/// Pixels at the border whose chroma may differ from the whole picture's.
const MARGIN: u32 = 2;
/// Bytes of the library's tables and structures, besides rows and coefficients.
const OWN: u64 = 256 << 10;

/// A worker's handle, created on first use.
#[derive(Default)]
pub(super) struct Turbo {
    handle: Option<Handle>,
}

/// A request to decode.
#[derive(Clone, Copy)]
pub(super) struct Want {
    /// Needed pixels of the encoded picture.
    pub(super) needed: Rect,
    /// Divisor of the picture's size: 1, 2, 4 or 8.
    pub(super) scale: u32,
    pub(super) strict: bool,
}

/// A decompressor of the library.
struct Handle(NonNull<c_void>);

// SAFETY: the library's only state per thread is the text of the last error without a handle. A handle may move from
// thread to thread as long as one thread at a time uses it, which `&mut` ensures.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `tj3Init` and destroyed only here.
        unsafe { sys::tj3Destroy(self.0.as_ptr()) };
    }
}

/// Failure of one attempt to decode.
enum Failure {
    /// Bytes of padding before the end marker are the only fault.
    Surplus(usize),
    Error(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl Turbo {
    /// Decodes at least the pixels `want.needed` to RGB, at the front of the room's pixels.
    ///
    /// Returns the decoded part of the (scaled) picture.
    pub(super) fn decode(&mut self, input: &[u8], header: &Header, want: Want, room: &mut Room<'_>) -> Result<Rect> {
        let surplus = match self.attempt(input, header, want, room) {
            Ok(there) => return Ok(there),
            Err(Failure::Error(error)) => return Err(error),
            Err(Failure::Surplus(surplus)) => surplus,
        };
        let end = header.end_marker(input)?;
        let kept = end.checked_sub(surplus).filter(|kept| *kept >= header.scan);
        let trimmed = kept.map(|kept| [&input[..kept], &[0xFF, 0xD9]].concat());
        match trimmed.map(|trimmed| self.attempt(&trimmed, header, want, room)) {
            Some(Ok(there)) => Ok(there),
            Some(Err(Failure::Error(error))) => Err(error),
            _ => Err(bad(format!("{}: {surplus} bytes of data are left when the picture is complete", DAMAGED))),
        }
    }

    fn attempt(&mut self, input: &[u8], header: &Header, want: Want, room: &mut Room<'_>) -> Result<Rect, Failure> {
        if want.strict {
            header.end_marker(input)?;
        }
        let handle = match self.handle.take() {
            Some(handle) => handle,
            None => Handle::new()?,
        };
        // Returned below on success. After an error it is destroyed, so that its state cannot affect the next picture.
        let mut session = Session { handle, input, header, want };
        let there = session.run(room)?;
        self.handle = Some(session.handle);
        Ok(there)
    }
}

impl Handle {
    fn new() -> Result<Self> {
        // SAFETY: no pointers are passed; the library returns null without memory.
        let handle = unsafe { sys::tj3Init(sys::TJINIT_TJINIT_DECOMPRESS as c_int) };
        NonNull::new(handle).map(Self).ok_or_else(|| bad("libjpeg-turbo could not be started"))
    }

    fn set(&mut self, parameter: sys::TJPARAM, value: c_int) -> Result<()> {
        // SAFETY: the handle is alive; parameters are numbers, which the library checks.
        match unsafe { sys::tj3Set(self.0.as_ptr(), parameter as c_int, value) } {
            0 => Ok(()),
            _ => Err(bad("libjpeg-turbo refused a setting").with_source(self.message())),
        }
    }

    fn get(&mut self, parameter: sys::TJPARAM) -> c_int {
        // SAFETY: the handle is alive; an unknown parameter gives -1.
        unsafe { sys::tj3Get(self.0.as_ptr(), parameter as c_int) }
    }

    /// Whether the library reports no more than warnings for the last call.
    fn only_warned(&mut self) -> bool {
        // SAFETY: the handle is alive.
        unsafe { sys::tj3GetErrorCode(self.0.as_ptr()) == sys::TJERR_TJERR_WARNING as c_int }
    }

    /// The library's message on one line.
    fn message(&mut self) -> String {
        // SAFETY: the handle is alive. The result is a terminated string in the handle or in this thread's memory, and
        // is copied before the library is called again.
        let message = unsafe { CStr::from_ptr(sys::tj3GetErrorStr(self.0.as_ptr())) };
        message.to_string_lossy().trim_end().replace('\n', " ")
    }
}

/// One decode.
struct Session<'a> {
    handle: Handle,
    input: &'a [u8],
    header: &'a Header,
    want: Want,
}

impl Session<'_> {
    fn run(&mut self, room: &mut Room<'_>) -> Result<Rect, Failure> {
        let (header, strict) = (self.header, self.want.strict);
        let channels = if header.components == 4 { 4 } else { 3 };
        room.admit(header.size())?;
        self.settings(room.limits.scans)?;
        self.read_header()?;
        let region = self.region()?;
        let bytes = channels as u64 * region.size.pixels();
        let pixels = room.take(header.size(), bytes, header.scratch() + OWN)?;
        if !strict {
            // An aborted decode leaves out rows, where an earlier picture's pixels must not show.
            pixels.fill(128);
        }
        self.decompress(region, channels, pixels)?;
        if channels == 4 {
            cmyk_to_rgb(region.size.pixels() as usize, pixels);
        }
        Ok(region)
    }

    fn settings(&mut self, scans: u32) -> Result<()> {
        let number = |number: u64| c_int::try_from(number).unwrap_or(c_int::MAX);
        let pixels = number(self.header.size().pixels());
        // In MiB, mostly of coefficients: a second limit, besides the sum that `Room` checks.
        let memory = number((self.header.scratch() + OWN).div_ceil(1 << 20) + 1);
        self.handle.set(sys::TJPARAM_TJPARAM_STOPONWARNING, c_int::from(self.want.strict))?;
        // At least 1, because 0 means no limit.
        self.handle.set(sys::TJPARAM_TJPARAM_SCANLIMIT, number(scans.max(1).into()))?;
        self.handle.set(sys::TJPARAM_TJPARAM_SAVEMARKERS, 0)?;
        self.handle.set(sys::TJPARAM_TJPARAM_MAXMEMORY, memory)?;
        self.handle.set(sys::TJPARAM_TJPARAM_MAXPIXELS, pixels)
    }

    fn read_header(&mut self) -> Result<(), Failure> {
        let (input, handle) = (self.input, self.handle.0.as_ptr());
        // SAFETY: the handle is alive, and `input` for the length of the call; the library reads within it.
        let code = unsafe { sys::tj3DecompressHeader(handle, input.as_ptr(), input.len() as sys::size_t) };
        self.check(code)?;
        let side = |side: u32| side as c_int;
        let found = [sys::TJPARAM_TJPARAM_JPEGWIDTH, sys::TJPARAM_TJPARAM_JPEGHEIGHT].map(|side| self.handle.get(side));
        if found != [side(self.header.width), side(self.header.height)] {
            return Err(bad("JPEG with a second frame header").into());
        }
        Ok(())
    }

    /// Requests the part to decode, and returns it. Needs [`read_header`](Self::read_header), which checks the size.
    fn region(&mut self) -> Result<Rect> {
        let Want { needed, scale, .. } = self.want;
        let picture = self.header.size();
        let scaled = picture.divided(scale);
        let factor = sys::tjscalingfactor { num: 1, denom: scale as c_int };
        // SAFETY: the handle is alive; the factor is passed by value and checked by the library.
        if unsafe { sys::tj3SetScalingFactor(self.handle.0.as_ptr(), factor) } != 0 {
            return Err(bad("libjpeg-turbo refused a scale").with_source(self.handle.message()));
        }
        let wide = needed.widened(MARGIN * scale, picture);
        // A multiple of the MCU, which is a multiple of the scale.
        let mcu = 8 * self.header.largest_factors().0;
        let left = wide.left / mcu * mcu / scale;
        let (right, top) = (wide.right().div_ceil(scale), needed.top / scale);
        let size = Size::new(right - left, needed.bottom().div_ceil(scale) - top);
        let mut region = Rect { left, top, size };
        let unusual = self.handle.get(sys::TJPARAM_TJPARAM_SUBSAMP) == sys::TJSAMP_TJSAMP_UNKNOWN;
        if unusual || size == scaled {
            region = Rect::of(scaled);
        }
        let request = match region == Rect::of(scaled) {
            true => sys::tjregion { x: 0, y: 0, w: 0, h: 0 },
            false => sys::tjregion {
                x: region.left as c_int,
                y: region.top as c_int,
                w: region.size.width as c_int,
                h: region.size.height as c_int,
            },
        };
        // SAFETY: the handle is alive; the region is passed by value and checked by the library.
        if unsafe { sys::tj3SetCroppingRegion(self.handle.0.as_ptr(), request) } != 0 {
            return Err(bad("libjpeg-turbo refused a region").with_source(self.handle.message()));
        }
        Ok(region)
    }

    /// Decodes the requested region, with `channels` bytes per pixel.
    fn decompress(&mut self, region: Rect, channels: usize, pixels: &mut [u8]) -> Result<(), Failure> {
        let pitch = channels * region.size.width as usize;
        let format = if channels == 4 { sys::TJPF_TJPF_CMYK } else { sys::TJPF_TJPF_RGB };
        assert!(pixels.len() >= pitch * region.size.height as usize, "the buffer is too small for the region");
        let (input, handle) = (self.input, self.handle.0.as_ptr());
        // SAFETY: the handle is alive, `input` and `pixels` for the length of the call. The library reads the same
        // header again, whose size is that of `self.header` (checked by `read_header`). It writes the region that was
        // set for it: `region.size.height` rows of `region.size.width` pixels, `pitch` bytes apart, which fit
        // (assertion above).
        let code = unsafe {
            sys::tj3Decompress8(
                handle,
                input.as_ptr(),
                input.len() as sys::size_t,
                pixels.as_mut_ptr(),
                pitch as c_int,
                format as c_int,
            )
        };
        self.check(code)
    }

    /// Turns a return code into a result.
    fn check(&mut self, code: c_int) -> Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        if !self.want.strict && self.handle.only_warned() {
            return Ok(());
        }
        let message = self.handle.message();
        match surplus(&message) {
            Some(surplus @ 1..=SURPLUS) => Err(Failure::Surplus(surplus)),
            _ => Err(bad(DAMAGED).with_source(message).into()),
        }
    }
}

/// The number of bytes in the library's warning about padding before the end marker.
fn surplus(message: &str) -> Option<usize> {
    message.strip_prefix("Corrupt JPEG data: ")?.strip_suffix(" extraneous bytes before marker 0xd9")?.parse().ok()
}

/// Converts inverted CMYK, as Adobe stores it, to RGB in place: each ink times black.
fn cmyk_to_rgb(count: usize, pixels: &mut [u8]) {
    for pixel in 0..count {
        let [cyan, magenta, yellow, black] = *pixels[4 * pixel..].first_chunk::<4>().expect("four bytes per pixel");
        pixels[3 * pixel..3 * pixel + 3].copy_from_slice(&[cyan, magenta, yellow].map(|ink| product(ink, black)));
    }
}

/// Settings of a JPEG that libjpeg-turbo writes for a test.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    pub(super) subsampling: c_int,
    pub(super) quality: c_int,
    /// MCUs between restart markers; 0: none.
    pub(super) interval: c_int,
    pub(super) progressive: bool,
}

/// Encodes a JPEG by libjpeg-turbo.
#[cfg(test)]
pub(super) fn encoded(pixels: &[u8], size: Size, written: Written) -> Vec<u8> {
    assert_eq!(pixels.len() as u64, 3 * size.pixels());
    // SAFETY: no pointers are passed.
    let handle = unsafe { sys::tj3Init(sys::TJINIT_TJINIT_COMPRESS as c_int) };
    let handle = Handle(NonNull::new(handle).expect("a compressor"));
    let settings = [
        (sys::TJPARAM_TJPARAM_SUBSAMP, written.subsampling),
        (sys::TJPARAM_TJPARAM_QUALITY, written.quality),
        (sys::TJPARAM_TJPARAM_RESTARTBLOCKS, written.interval),
        (sys::TJPARAM_TJPARAM_PROGRESSIVE, c_int::from(written.progressive)),
    ];
    for (parameter, value) in settings {
        // SAFETY: the handle is alive.
        assert_eq!(unsafe { sys::tj3Set(handle.0.as_ptr(), parameter as c_int, value) }, 0);
    }
    let (mut start, mut length) = (std::ptr::null_mut(), 0);
    let (width, height, format) = (size.width as c_int, size.height as c_int, sys::TJPF_TJPF_RGB as c_int);
    // SAFETY: `pixels` has width × height pixels (assertion above). Null lets the library allocate the output; the
    // returned length of it is copied, and it is freed once.
    unsafe {
        let source = pixels.as_ptr();
        let code = sys::tj3Compress8(handle.0.as_ptr(), source, width, 0, height, format, &mut start, &mut length);
        assert_eq!(code, 0);
        let bytes = std::slice::from_raw_parts(start, length as usize).to_vec();
        sys::tj3Free(start.cast());
        bytes
    }
}
