//! JPEG by zune-jpeg, straight into the worker's buffer, with checks that zune lacks.
//!
//! In strict mode zune checks much. But it fills a scan that ends early with zeros, and ignores the rest of one that
//! ends late. A damaged file does either, so [`Watch`] records how far the entropy decoder reads.
//!
//! Rows below a crop are not decoded: zune reads a smaller height ([`Header::rows`]). In a picture of one scan this
//! ends the work earlier, with the same pixels.

use super::geometry::{Rect, Size};
use super::orientation::{EXIF, Orientation};
use super::{Room, bad, over};
use crate::error::Result;
use std::cell::Cell;
use zune_core::bytestream::{ZByteIoError, ZByteReaderTrait, ZSeekFrom};
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// The parts of the header that a decode depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) size: Size,
    progressive: bool,
    components: u8,
    /// Samples of all components together, padded to whole MCUs.
    samples: u64,
    /// Whether the first scan holds all components.
    one_scan: bool,
    /// Pixels of an MCU. (A scan of one component has MCUs of 8×8 with any factors: [`Header::coded_mcu`].)
    mcu: Size,
    /// MCUs between two restart markers; 0 without them.
    restart: u32,
    /// Offset of the picture's height.
    height_at: usize,
    /// Offset of the first entropy-coded byte.
    scan: usize,
    /// Start and end of the first EXIF body in an APP1 segment; 0, 0 without one.
    exif: (usize, usize),
    /// Number of bytes outside segments before the first scan, and the offset of the first.
    stray: (usize, usize),
    /// Offset of the body of a too short Adobe segment; 0 without one.
    short_adobe: usize,
}

/// Bytes of an Adobe segment up to its colour transform.
const ADOBE: usize = 12;

impl Header {
    /// Reads the segments up to the first scan.
    pub(super) fn parse(input: &[u8]) -> Result<Self> {
        let mut header: Option<Self> = None;
        let mut restart = 0;
        let (mut exif, mut stray, mut short_adobe) = ((0, 0), (0, 0), 0);
        let mut at = 2;
        loop {
            let (marker, start, end) = segment(input, at)?;
            let body = &input[start..end];
            let marker_bytes = if is_alone(marker) { 2 } else { 4 };
            // Bytes 0xFF are legal fill before a marker.
            let others = input[at..start - marker_bytes].iter().filter(|byte| **byte != 0xFF).count();
            stray = if stray.0 == 0 { (others, at) } else { (stray.0 + others, stray.1) };
            match marker {
                0xC0..=0xC2 if header.is_none() => header = Some(Self::of_frame(marker, body, start)?),
                0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF => {
                    let message = format!(
                        "JPEG of an unsupported kind (SOF{}: lossless, hierarchical or arithmetic coding)",
                        marker - 0xC0
                    );
                    return Err(bad(message));
                }
                0xD9 => return Err(bad("JPEG ends before its first scan")),
                0xDA => {
                    let header = header.ok_or_else(|| bad("JPEG without a frame header"))?;
                    let one_scan = !header.progressive && body.first() == Some(&header.components);
                    return Ok(Self { one_scan, scan: end, restart, exif, stray, short_adobe, ..header });
                }
                0xDD => {
                    let interval = body.first_chunk().ok_or_else(|| bad("JPEG with a cut restart interval"))?;
                    restart = u32::from(u16::from_be_bytes(*interval));
                }
                0xE1 if exif == (0, 0) && body.starts_with(EXIF) => exif = (start, end),
                0xEE if body.starts_with(b"Adobe") && body.len() < ADOBE => short_adobe = start,
                _ => {}
            }
            at = end;
        }
    }

    fn of_frame(marker: u8, body: &[u8], at: usize) -> Result<Self> {
        let [bits, h1, h0, w1, w0, components, factors @ ..] = body else {
            return Err(bad("JPEG with a cut frame header"));
        };
        let size = Size::new(u32::from(u16::from_be_bytes([*w1, *w0])), u32::from(u16::from_be_bytes([*h1, *h0])));
        let factors = factors.as_chunks::<3>().0;
        if *bits != 8 {
            return Err(bad(format!("JPEG of {bits} bits per sample: only 8 are supported")));
        }
        if size.pixels() == 0 || factors.len() != usize::from(*components) || !matches!(components, 1 | 3 | 4) {
            let message = format!(
                "JPEG frame header of {}x{} pixels and {components} components: expected some pixels, and 1, 3 or 4 \
                 components",
                size.width, size.height
            );
            return Err(bad(message));
        }
        let most = |side: fn(u8) -> u8| 8 * u32::from(factors.iter().map(|f| side(f[1])).max().unwrap_or(1).max(1));
        Ok(Self {
            size,
            progressive: marker == 0xC2,
            components: *components,
            samples: samples(size, factors),
            one_scan: false,
            mcu: Size::new(most(|factor| factor >> 4), most(|factor| factor & 15)),
            restart: 0,
            height_at: at + 1,
            scan: 0,
            exif: (0, 0),
            stray: (0, 0),
            short_adobe: 0,
        })
    }

    /// Refuses pictures that zune decodes to wrong colours silently.
    ///
    /// They are sequential, with a scan per component, and have restart markers, or chroma with a quarter of the rows
    /// or more than 4 samples of luma (found: 4×2, 1×4 and 2×4).
    fn check_kind(&self) -> Result<()> {
        if self.progressive || self.one_scan {
            return Ok(());
        }
        let Size { width, height } = self.mcu.divided(8);
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
        while let Ok((marker, _, end)) = segment(input, at) {
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

    /// Adds advice on `strict(false)` to the error of a strict decode, and names stray bytes that may be its cause.
    pub(super) fn explain(&self, error: crate::Error) -> crate::Error {
        let (count, at) = self.stray;
        if error.kind() != crate::ErrorKind::Decode || !error.message().starts_with(DAMAGED) {
            return error;
        }
        if count == 0 {
            return error.with_note("`strict(false)` takes what can be decoded");
        }
        let message = format!(
            "JPEG with {count} stray bytes between the segments of its header, at byte {at}; `strict(false)` skips them"
        );
        bad(message).with_source(error)
    }

    /// The EXIF orientation of `input`, to which this header belongs.
    pub(super) fn orientation(&self, input: &[u8]) -> Orientation {
        input.get(self.exif.0..self.exif.1).map(Orientation::of_exif).unwrap_or_default()
    }

    /// Whether the picture is sequential with all components in one scan, so that MCU rows are decoded in order.
    pub(super) fn one_scan(&self) -> bool {
        self.one_scan
    }

    pub(super) fn components(&self) -> u8 {
        self.components
    }

    /// Pixels of an MCU of all components.
    #[cfg(feature = "turbojpeg")]
    pub(super) fn mcu(&self) -> Size {
        self.mcu
    }

    /// Pixels of an MCU as it is coded in a picture of one scan.
    pub(super) fn coded_mcu(&self) -> Size {
        if self.components == 1 { Size::new(8, 8) } else { self.mcu }
    }

    /// MCUs between two restart markers; 0 without them.
    pub(super) fn restart(&self) -> u32 {
        self.restart
    }

    /// Offset of the picture's height; the width follows it.
    pub(super) fn height_at(&self) -> usize {
        self.height_at
    }

    /// Offset of the first entropy-coded byte.
    pub(super) fn scan(&self) -> usize {
        self.scan
    }

    /// Rows to decode for the first `needed`: all of them if the picture has several scans.
    ///
    /// Else whole MCUs, and one MCU more, because the last row's chroma is interpolated with the next row's.
    pub(super) fn rows(&self, needed: u32) -> u32 {
        let rows = needed.next_multiple_of(self.mcu.height) + self.mcu.height;
        if self.one_scan { rows.min(self.size.height) } else { self.size.height }
    }

    /// Maximum heap bytes of a decoder: rows of MCUs, and the coefficients of a picture of several scans.
    pub(super) fn scratch(&self) -> u64 {
        let rows = ROW_BYTES * (u64::from(self.size.width) + 32);
        let coefficients = if self.progressive || !self.one_scan { 2 * self.samples } else { 0 };
        rows + coefficients
    }
}

/// Bytes of zune's buffers for one row of MCUs of all components, per pixel of width.
///
/// Found: 170 for 4:2:0, up to 480 for the unusual factors of 4. libjpeg-turbo takes less: bytes where zune has words
/// of 16 bits.
const ROW_BYTES: u64 = 512;

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

/// Whether the marker has neither length nor body.
fn is_alone(marker: u8) -> bool {
    matches!(marker, 0x01 | 0xD0..=0xD9)
}

/// The next segment from `at` on: its marker, and start and end of its body.
pub(super) fn segment(input: &[u8], at: usize) -> Result<(u8, usize, usize)> {
    let cut = || bad("JPEG is cut in its header");
    let rest = input.get(at..).ok_or_else(cut)?;
    let skipped = rest.windows(2).position(|pair| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF)).ok_or_else(cut)?;
    let at = at + skipped;
    let marker = input[at + 1];
    if is_alone(marker) {
        return Ok((marker, at + 2, at + 2));
    }
    let length = input.get(at + 2..at + 4).ok_or_else(cut)?;
    let end = at + 2 + usize::from(u16::from_be_bytes([length[0], length[1]]));
    if end < at + 4 || end > input.len() {
        return Err(cut());
    }
    Ok((marker, at + 4, end))
}

/// Decodes at least the pixels `needed` to RGB, at the front of the room's pixels.
///
/// Returns the decoded part of the picture: some rows from the top.
pub(super) fn decode(input: &[u8], header: &Header, needed: Rect, strict: bool, room: &mut Room<'_>) -> Result<Rect> {
    header.check_kind()?;
    let rows = header.rows(needed.bottom());
    let size = Size::new(header.size.width, rows);
    let scans = room.limits.scans as usize;
    let pixels = room.take(header.size, 3 * size.pixels(), header.scratch())?;
    let options = DecoderOptions::new_fast()
        .set_strict_mode(strict)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX))
        .jpeg_set_max_scans(scans)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    if !strict {
        // zune may leave out the end, where an earlier picture's pixels must not show.
        pixels.fill(128);
    }
    let watch = Watch::new(input, header, rows, strict)?;
    let mut decoder = JpegDecoder::new_with_options(watch.stream(), options);
    decoder.decode_headers().map_err(damaged)?;
    let found = decoder.dimensions().map(|(width, height)| Size::new(width as u32, height as u32));
    if found != Some(size) {
        return Err(bad("JPEG with a second frame header"));
    }
    decoder.decode_into(pixels).map_err(damaged)?;
    drop(decoder);
    watch.check()?;
    Ok(Rect::of(size))
}

/// Prefix of messages about damage that only strict decoding refuses.
pub(super) const DAMAGED: &str = "damaged JPEG";

/// An error with zune's message on one line; some of its messages end in a line break.
fn damaged(error: zune_jpeg::errors::DecodeErrors) -> crate::Error {
    bad(DAMAGED).with_source(error.to_string().trim_end().replace('\n', " "))
}

/// Offset of the end marker.
pub(super) fn end_of(input: &[u8], header: &Header) -> Result<usize> {
    // From the back, because a thumbnail in the header has an end marker too.
    let end = input[header.scan..].windows(2).rposition(|pair| pair == END);
    Ok(end.ok_or_else(|| bad("JPEG without its end marker: the file is cut"))? + header.scan)
}

/// The input for zune, and how far its entropy decoder has read.
///
/// In a picture of one scan, bytes that decode to nothing precede the end marker. So zune reports data that lack a
/// single code; once it has seen the marker it would go on with zeros.
struct Watch<'a> {
    /// The input up to the end marker; without the marker if `tail` has it.
    bytes: &'a [u8],
    tail: &'static [u8],
    header: &'a Header,
    /// The height that zune reads.
    rows: u32,
    /// End of the bytes that the entropy decoder has read.
    reached: Cell<usize>,
}

/// More 1 bits than zune reads ahead (`SLACK`), then the end marker. All ones are not a code of any Huffman table.
const TAIL: &[u8] = b"\xFF\0\xFF\0\xFF\0\xFF\0\xFF\0\xFF\0\xFF\0\xFF\0\xFF\0\xFF\0\xFF\0\xFF\0\xFF\xD9";
/// Bytes that zune reads ahead: at most 63 bits, and a byte of ones is stored as two.
const SLACK: usize = 16;
/// Bytes of padding that some encoders write before the end marker.
pub(super) const SURPLUS: usize = 2;
pub(super) const END: [u8; 2] = [0xFF, 0xD9];

impl<'a> Watch<'a> {
    fn new(input: &'a [u8], header: &'a Header, rows: u32, strict: bool) -> Result<Self> {
        let reached = Cell::new(header.scan);
        if !strict {
            return Ok(Self { bytes: input, tail: &[], reached, header, rows });
        }
        let end = end_of(input, header)?;
        let (bytes, tail) = if header.one_scan { (&input[..end], TAIL) } else { (&input[..end + 2], &[][..]) };
        Ok(Self { bytes, tail, reached, header, rows })
    }

    fn stream(&self) -> Input<'_> {
        Input { watch: self, bytes: self.bytes, position: 0 }
    }

    /// Whether only some rows are decoded.
    fn partial(&self) -> bool {
        self.rows != self.header.size.height
    }

    /// Checks that the scan's data ended with the picture.
    fn check(&self) -> Result<()> {
        let (reached, end) = (self.reached.get(), self.bytes.len());
        if self.tail.is_empty() {
            return Ok(());
        }
        if reached > end + SLACK {
            return Err(bad(format!("{DAMAGED}: its data ends before the picture is complete")));
        }
        if self.partial() {
            return Ok(());
        }
        // The picture's end marker may precede the last one, if a second picture follows in the file. It may be read
        // already.
        let start = reached.saturating_sub(2).clamp(self.header.scan, end);
        let rest = &self.bytes[start..];
        let stop = start + rest.windows(2).position(|pair| pair == END).unwrap_or(rest.len());
        if stop > reached + SURPLUS {
            let surplus = stop - reached;
            return Err(bad(format!("{DAMAGED}: {surplus} bytes of data are left when the picture is complete")));
        }
        Ok(())
    }
}

struct Input<'a> {
    watch: &'a Watch<'a>,
    /// Copy of `watch.bytes`, which saves an indirection.
    bytes: &'a [u8],
    position: usize,
}

impl Input<'_> {
    fn total(&self) -> usize {
        self.bytes.len() + self.watch.tail.len()
    }

    fn byte(&self, at: usize) -> Option<u8> {
        self.bytes.get(at).or_else(|| self.watch.tail.get(at - self.bytes.len())).copied()
    }

    /// Copies bytes from `position` on to the front of `buf`, and returns their number.
    #[cold]
    fn copy_slowly(&self, buf: &mut [u8]) -> usize {
        let available = (self.position..self.total()).map_while(|at| self.byte(at));
        buf.iter_mut().zip(available).map(|(slot, byte)| *slot = byte).count()
    }
}

impl ZByteReaderTrait for Input<'_> {
    /// Used by the entropy decoder only (and for two bytes of the header).
    #[inline(always)]
    fn read_byte_no_error(&mut self) -> u8 {
        let byte = match self.bytes.get(self.position) {
            Some(byte) => *byte,
            None => self.byte(self.position).unwrap_or(0),
        };
        self.position += 1;
        self.watch.reached.set(self.position);
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
        match buf.len() {
            // The entropy decoder reads four bytes at a time.
            4 => self.watch.reached.set(end),
            // The search for the next marker reads single bytes. After part of the picture it must find none.
            1 if self.watch.partial() && end > self.watch.header.scan => {
                return Err(ZByteIoError::NotEnoughBytes(0, 1));
            }
            // The header parser reads pairs: here the height.
            2 if self.position == self.watch.header.height_at => {
                buf.copy_from_slice(&(self.watch.rows as u16).to_be_bytes());
            }
            _ => {}
        }
        self.position = end;
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
        if self.position == self.watch.header.short_adobe && self.position != 0 {
            // zune would refuse the picture; libjpeg ignores the segment as another application's.
            buf.fill(0);
            return Ok(());
        }
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
        // Limited to the end, so that sums of positions cannot overflow.
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
