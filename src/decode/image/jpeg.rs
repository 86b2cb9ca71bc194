//! JPEG by zune-jpeg, straight into the worker's buffer, with the checks that zune does not make.
//!
//! zune checks much in its strict mode, but a scan that ends too early is filled with zeros up to the end of the
//! picture, and one that ends too late is cut. Both are what a damaged file looks like, so [`Watch`] sees how far
//! the entropy decoder reads.

use super::geometry::Size;
use super::{Room, bad};
use crate::error::Result;
use std::cell::Cell;
use zune_core::bytestream::{ZByteIoError, ZByteReaderTrait, ZSeekFrom};
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// What the header says, as far as it decides how much memory a decode takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) size: Size,
    progressive: bool,
    components: u8,
    /// Samples of all components together, padded to whole MCUs.
    samples: u64,
    /// Whether an Adobe segment says how four components are meant.
    adobe: bool,
    /// Whether the first scan holds all components.
    one_scan: bool,
    /// Offset of the first entropy-coded byte.
    scan: usize,
}

impl Header {
    /// Reads the segments up to the first scan.
    pub(super) fn parse(input: &[u8]) -> Result<Self> {
        let mut frame = None;
        let mut adobe = false;
        let mut at = 2;
        loop {
            let (marker, start, end) = segment(input, at)?;
            let body = &input[start..end];
            match marker {
                0xC0..=0xC2 if frame.is_none() => frame = Some(Frame::parse(marker, body)?),
                0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF => {
                    let message = format!(
                        "JPEG of a kind that is not supported (SOF{}: lossless, hierarchical or \
                        arithmetic coding)",
                        marker - 0xC0
                    );
                    return Err(bad(message));
                }
                0xD9 => return Err(bad("JPEG ends before its first scan")),
                0xDA => {
                    let Frame { size, progressive, components, samples } =
                        frame.ok_or_else(|| bad("JPEG without a frame header"))?;
                    let one_scan = body.first() == Some(&components);
                    return Ok(Self { size, progressive, components, samples, adobe, one_scan, scan: end });
                }
                0xEE => adobe |= body.starts_with(b"Adobe"),
                _ => {}
            }
            at = end;
        }
    }

    /// Bytes per pixel that zune is asked for: CMYK without Adobe's segment is converted here, see `cmyk_to_rgb`.
    fn channels(&self) -> u64 {
        if self.components == 4 && !self.adobe { 4 } else { 3 }
    }

    /// Heap bytes that zune takes, at most: rows of MCUs, and coefficients when a picture comes in several scans.
    fn scratch(&self) -> u64 {
        let rows = ROW_BYTES * (u64::from(self.size.width) + 32);
        let coefficients = if self.progressive || !self.one_scan { 2 * self.samples } else { 0 };
        rows + coefficients
    }
}

/// zune's buffers for one row of MCUs of all components, per pixel of width (measured: 130 for 4:2:0).
const ROW_BYTES: u64 = 512;

struct Frame {
    size: Size,
    progressive: bool,
    components: u8,
    samples: u64,
}

impl Frame {
    fn parse(marker: u8, body: &[u8]) -> Result<Self> {
        let [bits, h1, h0, w1, w0, components, factors @ ..] = body else {
            return Err(bad("JPEG frame header is cut"));
        };
        let size = Size::new(u32::from(u16::from_be_bytes([*w1, *w0])), u32::from(u16::from_be_bytes([*h1, *h0])));
        let factors = factors.as_chunks::<3>().0;
        if *bits != 8 {
            return Err(bad(format!("JPEG of {bits} bits per sample; only 8 are supported")));
        }
        if size.pixels() == 0 || factors.len() != usize::from(*components) || !matches!(components, 1 | 3 | 4) {
            let message =
                format!("JPEG frame header of {}x{} pixels, {components} components", size.width, size.height);
            return Err(bad(message));
        }
        Ok(Self { size, progressive: marker == 0xC2, components: *components, samples: samples(size, factors) })
    }
}

/// Samples of all components, padded to whole MCUs.
fn samples(size: Size, factors: &[[u8; 3]]) -> u64 {
    let horizontal = |factor: &[u8; 3]| u32::from(factor[1] >> 4);
    let vertical = |factor: &[u8; 3]| u32::from(factor[1] & 15);
    let most = |side: &dyn Fn(&[u8; 3]) -> u32| factors.iter().map(side).max().unwrap_or(1).max(1);
    let columns = u64::from(size.width.div_ceil(8 * most(&horizontal)));
    let rows = u64::from(size.height.div_ceil(8 * most(&vertical)));
    let blocks: u64 = factors.iter().map(|factor| u64::from(horizontal(factor) * vertical(factor))).sum();
    columns * rows * blocks * 64
}

/// The next segment from `at` on: its marker and where its body lies.
fn segment(input: &[u8], at: usize) -> Result<(u8, usize, usize)> {
    let cut = || bad("JPEG is cut in its header");
    let rest = input.get(at..).ok_or_else(cut)?;
    let skipped = rest.windows(2).position(|pair| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF)).ok_or_else(cut)?;
    let at = at + skipped;
    let marker = input[at + 1];
    if matches!(marker, 0x01 | 0xD0..=0xD9) {
        return Ok((marker, at + 2, at + 2));
    }
    let length = input.get(at + 2..at + 4).ok_or_else(cut)?;
    let end = at + 2 + usize::from(u16::from_be_bytes([length[0], length[1]]));
    if end < at + 4 || end > input.len() {
        return Err(cut());
    }
    Ok((marker, at + 4, end))
}

/// Decodes to RGB, which lies in the front of the room's pixels afterwards.
pub(super) fn decode(input: &[u8], strict: bool, room: &mut Room<'_>) -> Result<Size> {
    let header = Header::parse(input)?;
    let channels = header.channels();
    let pixels = room.take(header.size, header.size.pixels() * channels, header.scratch())?;
    let colors = if channels == 4 { ColorSpace::CMYK } else { ColorSpace::RGB };
    let options = DecoderOptions::new_fast()
        .set_strict_mode(strict)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_out_colorspace(colors);
    let watch = Watch::new(input, &header, strict)?;
    let stream = watch.stream();
    let mut decoder = JpegDecoder::new_with_options(stream, options);
    decoder.decode_headers().map_err(damaged)?;
    let found = decoder.dimensions().map(|(width, height)| Size::new(width as u32, height as u32));
    if found != Some(header.size) {
        return Err(bad("JPEG with a second frame header"));
    }
    decoder.decode_into(pixels).map_err(damaged)?;
    drop(decoder);
    if strict {
        watch.check()?;
    }
    if channels == 4 {
        cmyk_to_rgb(pixels);
    }
    Ok(header.size)
}

/// The bytes that zune gets, and how far its entropy decoder read.
///
/// The end marker of a picture of one scan is put off by some zeros: a decoder that is in step with the data never
/// sees them but for what it reads ahead, so whoever uses more of them is short of data.
struct Watch<'a> {
    /// Up to the end marker, which is left out when `tail` has it.
    bytes: &'a [u8],
    tail: &'static [u8],
    /// One past the last byte that the entropy decoder took.
    reached: Cell<usize>,
    /// Offset of the first entropy-coded byte.
    scan: usize,
}

/// The end marker after more zeros than zune reads ahead (`SLACK`).
const TAIL: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xD9];
/// zune holds at most 63 bits.
const SLACK: usize = 8;
const END: [u8; 2] = [0xFF, 0xD9];

impl<'a> Watch<'a> {
    fn new(input: &'a [u8], header: &Header, strict: bool) -> Result<Self> {
        let reached = Cell::new(header.scan);
        if !strict {
            return Ok(Self { bytes: input, tail: &[], reached, scan: header.scan });
        }
        // From the back: a thumbnail in the header has an end marker too.
        let end = input[header.scan..].windows(2).rposition(|pair| pair == END);
        let end = end.ok_or_else(|| bad("JPEG without its end marker: the file is cut"))? + header.scan;
        let watched = header.one_scan && !header.progressive;
        let (bytes, tail) = if watched { (&input[..end], TAIL) } else { (&input[..end + 2], &[][..]) };
        Ok(Self { bytes, tail, reached, scan: header.scan })
    }

    fn stream(&self) -> Input<'_> {
        Input { bytes: self.bytes, tail: self.tail, position: 0, reached: &self.reached }
    }

    /// Whether the scan was as long as the picture.
    fn check(&self) -> Result<()> {
        let (reached, end) = (self.reached.get(), self.bytes.len());
        if self.tail.is_empty() {
            return Ok(());
        }
        if reached > end + SLACK {
            return Err(bad("damaged JPEG: its data ends before the picture is complete"));
        }
        // The end marker may come earlier than ours: a second picture may follow in the file.
        let rest = &self.bytes[reached.saturating_sub(2).clamp(self.scan, end)..];
        let extra = rest.windows(2).position(|pair| pair == END).unwrap_or(rest.len());
        if extra > SLACK {
            return Err(bad(format!("damaged JPEG: {extra} bytes of data are left when the picture is complete")));
        }
        Ok(())
    }
}

struct Input<'a> {
    bytes: &'a [u8],
    tail: &'static [u8],
    position: usize,
    reached: &'a Cell<usize>,
}

impl Input<'_> {
    fn total(&self) -> usize {
        self.bytes.len() + self.tail.len()
    }

    fn byte(&self, at: usize) -> Option<u8> {
        self.bytes.get(at).or_else(|| self.tail.get(at - self.bytes.len())).copied()
    }

    /// Fills the front of `buf` from `position` on.
    #[cold]
    fn copy_slowly(&self, buf: &mut [u8]) -> usize {
        let available = (self.position..self.total()).map_while(|at| self.byte(at));
        buf.iter_mut().zip(available).map(|(slot, byte)| *slot = byte).count()
    }
}

impl ZByteReaderTrait for Input<'_> {
    /// Only the entropy decoder uses this (and two bytes of the header).
    #[inline(always)]
    fn read_byte_no_error(&mut self) -> u8 {
        let byte = match self.bytes.get(self.position) {
            Some(byte) => *byte,
            None => self.byte(self.position).unwrap_or(0),
        };
        self.position += 1;
        self.reached.set(self.position);
        byte
    }

    #[inline(always)]
    fn read_exact_bytes(&mut self, buf: &mut [u8]) -> Result<(), ZByteIoError> {
        let end = self.position + buf.len();
        match self.bytes.get(self.position..end) {
            Some(bytes) => buf.copy_from_slice(bytes),
            None => {
                let copied = self.copy_slowly(buf);
                if copied < buf.len() {
                    return Err(ZByteIoError::NotEnoughBytes(copied, buf.len()));
                }
            }
        }
        self.position = end;
        // The entropy decoder takes four bytes at a time, the search for a marker single ones.
        if buf.len() == 4 {
            self.reached.set(end);
        }
        Ok(())
    }

    fn read_bytes(&mut self, buf: &mut [u8]) -> Result<usize, ZByteIoError> {
        let copied = self.copy_slowly(buf);
        self.position += copied;
        Ok(copied)
    }

    fn peek_bytes(&mut self, buf: &mut [u8]) -> Result<usize, ZByteIoError> {
        Ok(self.copy_slowly(buf))
    }

    fn peek_exact_bytes(&mut self, buf: &mut [u8]) -> Result<(), ZByteIoError> {
        match self.copy_slowly(buf) {
            copied if copied == buf.len() => Ok(()),
            copied => Err(ZByteIoError::NotEnoughBytes(copied, buf.len())),
        }
    }

    fn z_seek(&mut self, from: ZSeekFrom) -> Result<u64, ZByteIoError> {
        let target = match from {
            ZSeekFrom::Start(offset) => usize::try_from(offset).ok(),
            ZSeekFrom::End(offset) => self.total().checked_add_signed(offset as isize),
            ZSeekFrom::Current(offset) => self.position.checked_add_signed(offset as isize),
        };
        // Nothing is beyond the end, and sums of positions must not overflow.
        self.position = target.ok_or(ZByteIoError::SeekError("seek before the start"))?.min(self.total());
        Ok(self.position as u64)
    }

    #[inline(always)]
    fn is_eof(&mut self) -> Result<bool, ZByteIoError> {
        Ok(self.position >= self.total())
    }

    fn z_position(&mut self) -> Result<u64, ZByteIoError> {
        Ok(self.position as u64)
    }

    fn read_remaining(&mut self, sink: &mut Vec<u8>) -> Result<usize, ZByteIoError> {
        let rest = self.total().saturating_sub(self.position);
        sink.extend((self.position..self.total()).filter_map(|at| self.byte(at)));
        self.position += rest;
        Ok(rest)
    }
}

/// zune's words on one line: some of its messages end in a line break.
fn damaged(error: zune_jpeg::errors::DecodeErrors) -> crate::Error {
    bad("damaged JPEG").with_source(error.to_string().trim_end().replace('\n', " "))
}

/// Pillow's conversion of CMYK that is not Adobe's (whose values are stored inverted, which zune takes for granted).
fn cmyk_to_rgb(pixels: &mut [u8]) {
    let white = |ink: u8| 255 - u16::from(ink);
    for pixel in 0..pixels.len() / 4 {
        let [c, m, y, k] = std::array::from_fn(|channel| pixels[4 * pixel + channel]);
        for (channel, ink) in [c, m, y].into_iter().enumerate() {
            let product = u32::from(white(ink)) * u32::from(white(k)) + 127;
            pixels[3 * pixel + channel] = (product / 255) as u8;
        }
    }
}
