//! The segments up to the first scan: sizes, tables, and the offset of the coded data.
//!
//! Invariants: every length is checked against the file before its bytes are read. A [`Scan`] from
//! [`Scan::parse`] can be decoded: one scan of all components, Huffman and quantisation tables
//! present, factors that libjpeg-turbo accepts.

use super::huffman::{HuffmanTable, STANDARD, ZIGZAG};
use crate::error::{Error, ErrorKind, Result};

/// Maximum number of blocks in an interleaved MCU (B.2.3 of the standard).
pub(super) const BLOCKS_MAX: usize = 10;

/// Start of the body of a segment with EXIF data.
pub const EXIF: &[u8] = b"Exif\0\0";

/// Marker of a segment with seek points, APP15, and the start of its body.
pub(super) const SEEK_MARKER: u8 = 0xEF;
pub(super) const SEEK: &[u8] = b"feedseek\0";

/// Bytes of padding that some encoders write before a marker.
pub(super) const SURPLUS: usize = 2;

/// Heap bytes of a decoder's tables.
const TABLES: u64 = 256 << 10;

/// Maximum heap bytes of the engine's rows, per pixel of the picture's width.
const ROW_BYTES: u64 = 512;

/// Bytes of an Adobe segment up to its colour transform.
const ADOBE: usize = 12;

/// A JPEG to decode.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// The file.
    pub bytes: &'a [u8],
    /// Its header.
    pub header: &'a Header,
    /// Whether damage is an error.
    pub strict: bool,
}

/// The parts of the header that a decode depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Whether the frame header's marker is SOF2.
    pub(crate) progressive: bool,
    pub(crate) components: u8,
    ids: [u8; 4],
    factors: [Factors; 4],
    pub(crate) colours: Colours,
    /// Whether the picture is sequential, and the first scan holds all components in the frame's
    /// order.
    pub(crate) one_scan: bool,
    /// MCUs between two restart markers; 0 without them.
    pub(crate) restart: u32,
    /// Byte offset of the picture's height field; the width follows it.
    pub(crate) height_at: usize,
    /// Offset of the first entropy-coded byte.
    #[doc(hidden)]
    pub scan: usize,
    /// Start and end of the first EXIF body in an APP1 segment; 0, 0 without one.
    pub(crate) exif: (usize, usize),
    /// Start and end of the first seek points, without the name before them; 0, 0 without any.
    points: (usize, usize),
    /// Number of bytes outside segments before the first scan, and the offset of the first such
    /// byte.
    pub(crate) stray: (usize, usize),
    /// Offset of the body of a too short Adobe segment; 0 without one.
    pub(crate) short_adobe: usize,
}

/// Sampling factors of a component: horizontal and vertical.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Factors {
    pub(super) h: u8,
    pub(super) v: u8,
}

impl Header {
    /// Reads the segments up to the first scan. Refuses 2 components, which have no colours.
    pub fn parse(input: &[u8]) -> Result<Self> {
        match Self::read(input)? {
            Self { components: 2, .. } => Err(Error::invalid(
                "JPEG of 2 components: only 1, 3 and 4 are supported",
            )),
            header => Ok(header),
        }
    }

    /// Whether this is a kind of JPEG that the engine does not decode, by its frame header.
    pub(super) fn is_unsupported(input: &[u8]) -> bool {
        let mut at = 2;
        while let Ok(Segment { marker, start, end }) = Segment::next(input, at) {
            match (marker, &input[start..end]) {
                // Unsupported: samples that do not have 8 bits, a height that comes after the scan,
                // or 2 components.
                (0xC0..=0xC2, [bits, h1, h0, _, _, components, ..]) => {
                    return *bits != 8 || [*h1, *h0] == [0, 0] || *components == 2;
                }
                (0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF | 0xDE | 0xF7, _) => return true,
                (0xDA, _) => return false,
                _ => at = end,
            }
        }
        false
    }

    /// Reads the segments up to the first scan.
    fn read(input: &[u8]) -> Result<Self> {
        let mut header: Option<Self> = None;
        let mut restart = 0;
        let mut exif = (0, 0);
        let mut points = (0, 0);
        let mut stray = (0, 0);
        let mut short_adobe = 0;
        let mut at = 2;
        let mut jfif = false;
        let mut adobe = None;
        loop {
            let segment = Segment::next(input, at)?;
            let Segment { marker, start, end } = segment;
            let body = &input[start..end];
            // Bytes 0xFF are legal fill before a marker.
            let others = input[at..segment.marker_at()]
                .iter()
                .filter(|byte| **byte != 0xFF)
                .count();
            stray = if stray.0 == 0 {
                (others, at)
            } else {
                (stray.0 + others, stray.1)
            };
            match marker {
                0xC0..=0xC2 if header.is_none() => {
                    header = Some(Self::of_frame(marker, body, start)?)
                }
                0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF => {
                    let message = format!(
                        "JPEG of an unsupported kind (SOF{}: lossless, hierarchical or arithmetic \
                         coding)",
                        marker - 0xC0
                    );
                    return Err(Error::invalid(message));
                }
                0xDE => {
                    return Err(Error::invalid(
                        "JPEG of an unsupported kind (DHP: hierarchical coding)",
                    ));
                }
                0xD9 => return Err(Error::invalid("JPEG ends before its first scan")),
                0xDA => {
                    let header =
                        header.ok_or_else(|| Error::invalid("JPEG without a frame header"))?;
                    let names = body
                        .iter()
                        .skip(1)
                        .step_by(2)
                        .take(header.components.into());
                    let in_order = names.eq(&header.ids[..usize::from(header.components)]);
                    let whole =
                        body.first() == Some(&header.components) && body.ends_with(&[0, 63, 0]);
                    let one_scan = !header.progressive && whole && in_order;
                    let colours =
                        colours(&header.ids[..usize::from(header.components)], jfif, adobe);
                    let header = Self {
                        one_scan,
                        colours,
                        restart,
                        ..header
                    };
                    return Ok(Self {
                        scan: end,
                        exif,
                        points,
                        stray,
                        short_adobe,
                        ..header
                    });
                }
                0xDD => restart = restart_interval(body)?,
                0xE0 if body.len() >= 14 && body.starts_with(b"JFIF\0") => jfif = true,
                0xE1 if exif == (0, 0) && body.starts_with(EXIF) => exif = (start, end),
                SEEK_MARKER if points == (0, 0) && body.starts_with(SEEK) => {
                    points = (start + SEEK.len(), end)
                }
                0xEE if body.starts_with(b"Adobe") => match body.get(ADOBE - 1) {
                    Some(transform) => adobe = Some(*transform),
                    None => short_adobe = start,
                },
                _ => {}
            }
            at = end;
        }
    }

    /// Whether the file has an index of further pictures, with offsets from its start.
    pub(super) fn has_further_pictures(&self, input: &[u8]) -> bool {
        self.segments(input)
            .any(|(marker, _, body)| marker == 0xE2 && body.starts_with(b"MPF\0"))
    }

    /// Refuses bytes between the segments of the header.
    pub fn check_stray(&self) -> Result<()> {
        match self.stray {
            (0, _) => Ok(()),
            (count, at) => {
                let message = format!(
                    "JPEG with {count} stray bytes between the segments of its header, at byte \
                     {at}"
                );
                Err(Error::new(ErrorKind::Damaged, message))
            }
        }
    }

    fn of_frame(marker: u8, body: &[u8], at: usize) -> Result<Self> {
        let [bits, h1, h0, w1, w0, components, rest @ ..] = body else {
            return Err(Error::invalid("the JPEG's frame header is truncated"));
        };
        let side = |high: &u8, low: &u8| u32::from(u16::from_be_bytes([*high, *low]));
        let width = side(w1, w0);
        let height = side(h1, h0);
        let described = rest.as_chunks::<3>().0;
        if *bits != 8 {
            return Err(Error::invalid(format!(
                "JPEG of {bits} bits per sample: only 8 are supported"
            )));
        }
        if height == 0 && width > 0 {
            let message = "JPEG whose height comes after its data (DNL), which is not supported";
            return Err(Error::invalid(message));
        }
        if width == 0 || described.len() != usize::from(*components) || !matches!(components, 1..=4)
        {
            let message = format!(
                "JPEG frame header of {width}x{height} pixels and {components} components: \
                 expected some pixels, and 1 to 4 components"
            );
            return Err(Error::invalid(message));
        }
        let mut ids = [0; 4];
        let mut factors = [Factors::default(); 4];
        for ((id, factors), [name, both, _]) in ids.iter_mut().zip(&mut factors).zip(described) {
            *id = *name;
            *factors = Factors {
                h: both >> 4,
                v: both & 15,
            };
        }
        Ok(Self {
            width,
            height,
            progressive: marker == 0xC2,
            components: *components,
            ids,
            factors,
            colours: Colours::Grey,
            one_scan: false,
            restart: 0,
            height_at: at + 1,
            scan: 0,
            exif: (0, 0),
            points: (0, 0),
            stray: (0, 0),
            short_adobe: 0,
        })
    }

    /// The seek points in `input`, to which this header belongs; empty without any.
    pub(super) fn points_of<'a>(&self, input: &'a [u8]) -> &'a [u8] {
        &input[self.points.0..self.points.1]
    }

    pub(super) fn factors(&self) -> &[Factors] {
        &self.factors[..usize::from(self.components)]
    }

    /// Index of the component with this identifier.
    pub(super) fn component(&self, name: u8) -> Option<usize> {
        self.ids[..usize::from(self.components)]
            .iter()
            .position(|id| *id == name)
    }

    /// Largest sampling factors of the components, at least 1. An MCU has 8 times as many pixels in
    /// each direction.
    pub(crate) fn largest_factors(&self) -> (u32, u32) {
        let most = |side: fn(&Factors) -> u8| {
            u32::from(self.factors().iter().map(side).max().unwrap_or(1).max(1))
        };
        (most(|factors| factors.h), most(|factors| factors.v))
    }

    /// Width and height in pixels of an MCU in a picture of one scan.
    pub(crate) fn mcu(&self) -> (u32, u32) {
        // One component is not interleaved.
        let (h, v) = if self.components == 1 {
            (1, 1)
        } else {
            self.largest_factors()
        };
        (8 * h, 8 * v)
    }

    /// Blocks across and down of a component in a scan of its own.
    pub(super) fn blocks(&self, component: usize) -> (u32, u32) {
        let most = self.largest_factors();
        let own = self.factors()[component];
        let blocks =
            |side: u32, own: u8, most: u32| (side * u32::from(own)).div_ceil(most).div_ceil(8);
        (
            blocks(self.width, own.h, most.0),
            blocks(self.height, own.v, most.1),
        )
    }

    /// Number of MCUs in a picture of one scan.
    pub(super) fn mcus(&self) -> u32 {
        let (width, height) = self.mcu();
        self.width.div_ceil(width) * self.height.div_ceil(height)
    }

    /// Number of restart intervals in a picture of one scan.
    pub(super) fn intervals(&self) -> usize {
        if self.restart == 0 {
            1
        } else {
            self.mcus().div_ceil(self.restart) as usize
        }
    }

    /// Maximum heap bytes of the engine for this picture, besides its output.
    pub(crate) fn engine_bytes(&self) -> u64 {
        ROW_BYTES * (u64::from(self.width) + 32) + TABLES + 8 * (self.intervals() as u64 + 1)
    }

    /// The body of the first segment with EXIF data, from [`EXIF`] on. `input` is the file of this
    /// header.
    pub fn exif<'a>(&self, input: &'a [u8]) -> Option<&'a [u8]> {
        let (start, end) = self.exif;
        input.get(start..end).filter(|body| !body.is_empty())
    }

    /// Offset of the end marker. Errors: a truncated file has none.
    pub(crate) fn end_marker(&self, input: &[u8]) -> Result<usize> {
        let coded = &input[self.scan..];
        // From the back, because a second picture may follow the first in the file.
        let end = memchr::memrchr_iter(0xFF, coded).find(|at| coded.get(at + 1) == Some(&0xD9));
        Ok(self.scan
            + end.ok_or_else(|| Error::invalid("JPEG without its end marker: the file is cut"))?)
    }

    /// The segments of the header, each as marker, start of the body, and body.
    pub(super) fn segments<'a>(
        &self,
        input: &'a [u8],
    ) -> impl Iterator<Item = (u8, usize, &'a [u8])> + use<'a> {
        let mut at = 2;
        let end = self.scan;
        std::iter::from_fn(move || {
            let segment = Segment::next(&input[..end], at).ok()?;
            at = segment.end;
            Some((
                segment.marker,
                segment.start,
                &input[segment.start..segment.end],
            ))
        })
    }
}

/// A segment's marker, and start and end of its body.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// The second byte of the marker.
    pub marker: u8,
    /// Offset of the body.
    pub start: usize,
    /// Offset after the body.
    pub end: usize,
}

/// Whether the marker has neither length nor body.
fn is_alone(marker: u8) -> bool {
    matches!(marker, 0x01 | 0xD0..=0xD9)
}

impl Segment {
    /// The next segment from `at` on.
    pub fn next(input: &[u8], at: usize) -> Result<Self> {
        let cut = || Error::invalid("the JPEG ends within its header");
        let rest = input.get(at..).ok_or_else(cut)?;
        let skipped = rest
            .windows(2)
            .position(|pair| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF))
            .ok_or_else(cut)?;
        let at = at + skipped;
        let marker = input[at + 1];
        if is_alone(marker) {
            return Ok(Self {
                marker,
                start: at + 2,
                end: at + 2,
            });
        }
        let length = input.get(at + 2..at + 4).ok_or_else(cut)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        // libjpeg-turbo treats a segment that it skips as empty if its length is too small.
        let passed = matches!(marker, 0xDC | 0xE0..=0xEF | 0xFE);
        let length = if passed { length.max(2) } else { length };
        if length < 2 {
            return Err(Error::invalid(format!(
                "JPEG segment {marker:02x} of length {length}: it must be at least 2"
            )));
        }
        let end = at + 2 + length;
        if end > input.len() {
            return Err(cut());
        }
        Ok(Self {
            marker,
            start: at + 4,
            end,
        })
    }

    pub(super) fn marker_at(&self) -> usize {
        self.start - if is_alone(self.marker) { 2 } else { 4 }
    }
}

/// Colours of the components.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colours {
    Grey,
    Rgb,
    YCbCr,
    /// Inverted, as Adobe stores it.
    Cmyk,
    Ycck,
}

/// How a scan codes a component.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Component {
    pub(super) factors: Factors,
    /// Index of the quantisation table.
    pub(super) quant: usize,
    /// Indices of the Huffman tables.
    pub(super) dc: usize,
    pub(super) ac: usize,
}

/// Everything needed to decode the data of a sequential picture of one scan.
#[derive(Clone, Debug)]
pub(crate) struct Scan<'a> {
    pub(super) components: [Component; 4],
    ids: [u8; 4],
    count: usize,
    pub(super) colours: Colours,
    /// Quantisation tables in natural order.
    pub(super) quants: [[u16; 64]; 4],
    pub(super) dc: [Option<HuffmanTable<'a>>; 4],
    pub(super) ac: [Option<HuffmanTable<'a>>; 4],
}

impl<'a> Scan<'a> {
    /// Reads all tables of a picture with this header, which has one scan.
    pub(super) fn parse(input: &'a [u8], header: &Header) -> Result<Self> {
        let mut scan = Self::empty(header);
        for (marker, start, body) in header.segments(input) {
            match marker {
                0xC0 | 0xC1 if scan.count == 0 => scan.read_frame(body),
                0xC0..=0xC2 => return Err(Error::invalid("JPEG with a second frame header")),
                0xC4 => scan.read_huffman(body, start)?,
                0xDA => scan.read_scan(body, start)?,
                _ => {}
            }
        }
        let blocks: u32 = scan
            .components()
            .iter()
            .map(|part| u32::from(part.factors.h) * u32::from(part.factors.v))
            .sum();
        let few = scan.count == 1 || blocks <= BLOCKS_MAX as u32;
        scan.check_factors(|own| few && (1..=4).contains(&own.h) && (1..=4).contains(&own.v))?;
        let mut have = [false; 4];
        for (_, start, body) in header
            .segments(input)
            .filter(|(marker, ..)| *marker == 0xDB)
        {
            scan.read_quants(body, start, &mut have)?;
        }
        if !scan
            .components()
            .iter()
            .all(|part| have.get(part.quant).is_some_and(|have| *have))
        {
            let message = "the JPEG uses a quantisation table that it does not define";
            return Err(Error::invalid(message).at(header.scan));
        }
        let (h, v) = header.largest_factors();
        // libjpeg-turbo refuses other factors.
        scan.check_factors(|own| h.is_multiple_of(own.h.into()) && v.is_multiple_of(own.v.into()))?;
        Ok(scan)
    }

    /// The state before any segment is read: only the standard's Huffman tables are set.
    pub(super) fn empty(header: &Header) -> Self {
        Self {
            components: [Component::default(); 4],
            ids: header.ids,
            count: 0,
            colours: header.colours,
            quants: [[0; 64]; 4],
            dc: [Some(STANDARD[0]), Some(STANDARD[1]), None, None],
            ac: [Some(STANDARD[2]), Some(STANDARD[3]), None, None],
        }
    }

    pub(super) fn components(&self) -> &[Component] {
        &self.components[..self.count]
    }

    pub(super) fn read_frame(&mut self, body: &[u8]) {
        let described = body[6..].as_chunks::<3>().0;
        for (component, [_, both, quant]) in self.components.iter_mut().zip(described) {
            let factors = Factors {
                h: both >> 4,
                v: both & 15,
            };
            *component = Component {
                factors,
                quant: usize::from(*quant),
                dc: 0,
                ac: 0,
            };
            self.count += 1;
        }
    }

    pub(super) fn read_huffman(&mut self, mut body: &'a [u8], start: usize) -> Result<()> {
        let end = start + body.len();
        while let Some((which, rest)) = body.split_first() {
            let class = which >> 4;
            let index = usize::from(which & 15);
            if class > 1 || index > 3 {
                let message = format!("JPEG with a Huffman table of class {class}, number {index}");
                return Err(Error::invalid(message).at(end - body.len()));
            }
            let (table, after) = HuffmanTable::parse(rest).map_err(|message| {
                Error::invalid(format!("JPEG with {message}")).at(end - body.len())
            })?;
            *(if class == 0 {
                &mut self.dc[index]
            } else {
                &mut self.ac[index]
            }) = Some(table);
            body = after;
        }
        Ok(())
    }

    pub(super) fn read_quants(
        &mut self,
        mut body: &[u8],
        start: usize,
        have: &mut [bool; 4],
    ) -> Result<()> {
        let end = start + body.len();
        while let Some((which, rest)) = body.split_first() {
            let wide = which >> 4;
            let index = usize::from(which & 15);
            let bytes = if wide == 0 { 64 } else { 128 };
            if wide > 1 || index > 3 || rest.len() < bytes {
                let message = format!(
                    "JPEG with a quantisation table 0x{which:02x} in {} bytes, {bytes} expected",
                    rest.len()
                );
                return Err(Error::invalid(message).at(end - body.len()));
            }
            for (k, natural) in ZIGZAG.iter().enumerate() {
                let value = if wide == 0 {
                    rest[k].into()
                } else {
                    u16::from_be_bytes([rest[2 * k], rest[2 * k + 1]])
                };
                self.quants[index][usize::from(*natural)] = value;
            }
            have[index] = true;
            body = &rest[bytes..];
        }
        Ok(())
    }

    fn read_scan(&mut self, body: &[u8], start: usize) -> Result<()> {
        let count = self.count;
        let selectors = body
            .get(1..1 + 2 * count)
            .unwrap_or_default()
            .as_chunks::<2>()
            .0;
        if selectors.len() != count || body.get(1 + 2 * count..) != Some(&[0, 63, 0]) {
            let message = "JPEG with a scan header that does not fit its frame";
            return Err(Error::invalid(message).at(start));
        }
        for ((component, id), [name, tables]) in self.components[..count]
            .iter_mut()
            .zip(self.ids)
            .zip(selectors)
        {
            if id != *name {
                let message = "JPEG whose scan has its components in another order than the frame";
                return Err(Error::invalid(message).at(start));
            }
            component.dc = usize::from(tables >> 4);
            component.ac = usize::from(tables & 15);
            let there = component.dc < 4 && component.ac < 4;
            if !there || self.dc[component.dc].is_none() || self.ac[component.ac].is_none() {
                let message = format!("JPEG component {id} needs a Huffman table that is missing");
                return Err(Error::invalid(message).at(start));
            }
        }
        Ok(())
    }

    pub(super) fn check_factors(&self, fits: impl Fn(Factors) -> bool) -> Result<()> {
        let parts = self.components();
        if parts.iter().all(|part| fits(part.factors)) {
            return Ok(());
        }
        let list: Vec<_> = parts
            .iter()
            .map(|part| format!("{}x{}", part.factors.h, part.factors.v))
            .collect();
        Err(Error::invalid(format!(
            "JPEG with sampling factors of {}, which no decoder accepts",
            list.join(", ")
        )))
    }
}

/// MCUs between two restart markers, from a DRI segment.
pub(super) fn restart_interval(body: &[u8]) -> Result<u32> {
    let bytes = body
        .first_chunk()
        .ok_or_else(|| Error::invalid("the JPEG's restart interval is truncated"))?;
    Ok(u16::from_be_bytes(*bytes).into())
}

/// Guesses the colours as libjpeg does.
fn colours(ids: &[u8], jfif: bool, adobe: Option<u8>) -> Colours {
    match (ids.len(), adobe) {
        (1, _) => Colours::Grey,
        (3, _) if jfif => Colours::YCbCr,
        (3, Some(0)) => Colours::Rgb,
        (3, None) if ids == b"RGB" => Colours::Rgb,
        (3, _) => Colours::YCbCr,
        (_, Some(0) | None) => Colours::Cmyk,
        _ => Colours::Ycck,
    }
}
