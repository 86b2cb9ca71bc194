//! The JPEG engine: decodes coded bytes to the pixels of a crop, and no more than the crop needs.
//!
//! ```text
//!      ┌──────────────────────────────┐   rows above: codes are skipped, several by one lookup
//!      │      ┌──────────────┐        │   beside the crop: skipped, too
//!      │      │     crop     │        │   blocks of the crop, and those that interpolation of chroma reads:
//!      │      └──────────────┘        │     codes ─► coefficients ─► samples ─► rows of chroma ─► RGB
//!      │ rows below: not decoded      │     two blocks at a time      one row of MCUs, in the cache
//!      └──────────────────────────────┘
//! ```
//!
//! It decodes Huffman JPEGs of 8 bits, sequential and progressive, of 1, 3 or 4 components with any
//! sampling factors that libjpeg-turbo accepts. In the sources, `walk` reads pictures of one scan
//! and `scans` those of several.
//!
//! # Pixels
//!
//! Pixels are bit-identical to a crop of the whole picture as libjpeg-turbo decodes it by default
//! (`islow` transform, fancy upsampling), and so to Pillow and torchvision. At 1/2, 1/4 and 1/8 of
//! the size, they equal libjpeg-turbo's scaled pictures. The kernels for an instruction set give
//! the same values as the scalar ones.
//!
//! # Seek points
//!
//! A picture may carry seek points, about 1 % of its bytes: in a segment that other decoders skip
//! ([`Decoder::embed`]), or stored separately ([`Decoder::seek_points`]). With seek points,
//! decoding of each row of the crop begins near the crop's left edge. A checksum of the coded data
//! guards them: pixels never depend on points, and with wrong ones the picture is decoded without
//! them. Pictures with restart markers, damaged pictures and those of several scans have none.
//!
//! # Use
//!
//! ```
//! use feedline_jpeg::{Decoder, Header, Input, Region, RowSink, Scans};
//!
//! /// The rows of a crop, one after another.
//! struct Pixels {
//!     rgb: Vec<u8>,
//!     width: usize,
//! }
//!
//! impl RowSink for Pixels {
//!     fn row(&mut self, y: u32) -> &mut [u8] {
//!         let row = 3 * self.width;
//!         &mut self.rgb[y as usize * row..][..row]
//!     }
//! }
//!
//! /// A crop of 64 x 64 pixels, at most, from the picture's middle.
//! fn middle(bytes: &[u8]) -> Result<Vec<u8>, feedline_jpeg::Error> {
//!     let header = Header::parse(bytes)?;
//!     let width = header.width.min(64);
//!     let height = header.height.min(64);
//!     let region = Region {
//!         left: (header.width - width) / 2,
//!         top: (header.height - height) / 2,
//!         width,
//!         height,
//!     };
//!     let picture = Input {
//!         bytes,
//!         header: &header,
//!         strict: true,
//!     };
//!     let scans = Scans::of(picture, 100)?;
//!     let mut pixels = Pixels {
//!         rgb: vec![0; 3 * (width * height) as usize],
//!         width: width as usize,
//!     };
//!     // A thread keeps its decoder: the tables of the last picture are often those of the next one.
//!     Decoder::default().decode(picture, &scans, &[], region, 1, &mut pixels)?;
//!     Ok(pixels.rgb)
//! }
//! # let mut bytes = Vec::new();
//! # jpeg_encoder::Encoder::new(&mut bytes, 90)
//! #     .encode(&[128; 3 * 100 * 80], 100, 80, jpeg_encoder::ColorType::Rgb)
//! #     .unwrap();
//! # assert_eq!(middle(&bytes)?, [128; 3 * 64 * 64]);
//! # Ok::<(), feedline_jpeg::Error>(())
//! ```
//!
//! # Limits and invariants
//!
//! * Memory: two rows of MCUs of each component, at most 512 bytes per pixel of width; 8 bytes per
//!   restart interval; 256 KiB of tables. [`Scans::engine_bytes`] gives the sum, including the
//!   coefficients and tables of several scans.
//! * Time is linear in the bytes and pixels up to the crop's end: each code takes at least one bit,
//!   and MCUs of a damaged interval are not read.
//! * Input is untrusted. Reads beyond its end give zeros, which are detected within one MCU.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod bits;
mod error;
mod header;
mod huffman;
mod kernels;
mod region;
mod rows;
mod scans;
mod script;
mod seek;
mod smooth;
#[cfg(test)]
mod tests;
mod walk;

pub use error::{Error, ErrorKind, Result};
pub use header::{EXIF, Header, Input};
pub use region::Region;
pub use seek::BYTES_MAX as POINTS_MAX;
// For feedline's crates, without a promise of stability.
#[doc(hidden)]
pub use header::Segment;
#[doc(hidden)]
pub use rows::{grow, sized};

use header::Component;
use header::{Colours, Scan};
use kernels::JpegKernels;
use region::RegionLayout;
use rows::PixelRows;
use scans::{Coefficients, Readers, ScanTables};
use script::Script;
use seek::{Points, SeekWriter};
use walk::{Tables, Walk};

/// Receives a region's pixels row by row, so that it can use each row while it is in the cache.
pub trait RowSink {
    /// The buffer for row `y` of the region, RGB. Rows are requested in order. If seek points turn
    /// out to be wrong, all rows are requested again from row 0 on.
    fn row(&mut self, y: u32) -> &mut [u8];
}

/// The scans of a picture, ready to be decoded.
pub struct Scans<'a>(Kind<'a>);

enum Kind<'a> {
    /// A sequential picture of one scan, with all components in the frame's order.
    One(Scan<'a>),
    Several(Script<'a>),
}

impl<'a> Scans<'a> {
    /// Finds the scans. Errors: scans that no decoder accepts, or more than `most`; if the picture
    /// is `strict`, scans that leave out coefficients.
    pub fn of(picture: Input<'a>, most: u32) -> Result<Self> {
        let kind = if picture.header.one_scan {
            Kind::One(Scan::parse(picture.bytes, picture.header)?)
        } else {
            Kind::Several(Script::parse(picture, most)?)
        };
        Ok(Self(kind))
    }

    /// Maximum heap bytes of the engine, besides its output.
    pub fn engine_bytes(&self, header: &Header) -> u64 {
        header.engine_bytes()
            + match &self.0 {
                Kind::One(_) => 0,
                Kind::Several(script) => script.engine_bytes(header),
            }
    }

    fn components(&self) -> &[Component] {
        match &self.0 {
            Kind::One(scan) => scan.components(),
            Kind::Several(script) => script.components(),
        }
    }
}

/// The result of adding seek points to a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Embedded {
    /// The output is the picture with this many bytes of points.
    Points(u32),
    /// The output is the input.
    Unchanged(WithoutPoints),
}

/// Why a picture gets no seek points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WithoutPoints {
    /// The bytes do not start with a JPEG's marker.
    NotJpeg,
    /// A kind of JPEG that is not decoded: lossless, hierarchical or arithmetic coding, 12 bits, 2
    /// components, no height.
    Unsupported,
    /// Progressive, or sequential with components in separate scans.
    SeveralScans,
    /// Restart markers serve the same purpose.
    RestartMarkers,
    /// The picture already has its seek points.
    Present,
    /// The file holds further pictures, with offsets from its start (MPF).
    SeveralPictures,
}

impl std::fmt::Display for WithoutPoints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NotJpeg => "not a JPEG",
            Self::Unsupported => "a kind of JPEG that is not decoded",
            Self::SeveralScans => "several scans",
            Self::RestartMarkers => "restart markers",
            Self::Present => "has seek points",
            Self::SeveralPictures => "further pictures in the file (MPF)",
        })
    }
}

/// A worker's tables and rows, kept from picture to picture.
#[derive(Default)]
pub struct Decoder {
    kernels: JpegKernels,
    tables: Tables,
    rows: PixelRows,
    /// Starts of restart intervals.
    starts: Vec<usize>,
    /// For pictures of several scans.
    scans: Vec<ScanTables>,
    coefficients: Coefficients,
}

impl Decoder {
    /// Frees rows and starts of earlier pictures if they take more than `bytes`.
    pub fn release_beyond(&mut self, bytes: u64) {
        let starts = self.starts.capacity() * size_of::<usize>();
        let scans: usize = self.scans.iter().map(ScanTables::bytes).sum();
        if (self.rows.bytes() + starts + scans + self.coefficients.bytes()) as u64 > bytes {
            self.rows = PixelRows::default();
            self.starts = Vec::new();
            self.coefficients = Coefficients::default();
            self.scans = Vec::new();
        }
    }

    /// Decodes the pixels of `region` to RGB. The region is within the picture at 1 / `scale` of
    /// its size, each side rounded up; `scale` is 1, 2, 4 or 8. After an error, some rows may have
    /// been written.
    ///
    /// If `picture` is not `strict`, damage ends the restart interval or the scan. In a sequential
    /// picture of one scan, the remaining MCUs are grey; with several scans, the damaged one adds
    /// nothing more. A progressive picture has the pixels of libjpeg-turbo. If `picture` is
    /// `strict`, damage is an error, with its byte and MCU.
    ///
    /// `points` are those of [`seek_points`](Self::seek_points), or empty. They take precedence
    /// over those in the picture.
    pub fn decode(
        &mut self,
        picture: Input<'_>,
        scans: &Scans<'_>,
        points: &[u8],
        region: Region,
        scale: u32,
        to: &mut dyn RowSink,
    ) -> Result<()> {
        let Input {
            bytes: input,
            header,
            ..
        } = picture;
        let layout = RegionLayout::new(header, scans.components(), region, scale);
        let scan = match &scans.0 {
            Kind::One(scan) => scan,
            Kind::Several(script) => return self.run_script(picture, script, &layout, to),
        };
        self.tables.update(scan);
        let mut tables = [points, header.points_of(input)].into_iter();
        // Points never decide the result: if decoding with them fails, the picture is decoded
        // without.
        let points = tables.find_map(|table| Points::new(table, input, header));
        if points.is_some()
            && self
                .run(
                    Input {
                        strict: true,
                        ..picture
                    },
                    scan,
                    points,
                    &layout,
                    to,
                )
                .is_ok()
        {
            return Ok(());
        }
        self.run(picture, scan, None, &layout, to)
    }

    fn run_script(
        &mut self,
        picture: Input<'_>,
        script: &Script<'_>,
        layout: &RegionLayout,
        to: &mut dyn RowSink,
    ) -> Result<()> {
        let header = picture.header;
        let Self {
            kernels,
            rows,
            coefficients,
            ..
        } = self;
        let smoothing = scans::survey(picture, script, &mut self.scans, coefficients)?;
        rows.start(layout);
        coefficients.start(header, layout);
        let mut readers = Readers::new(picture, script, &mut self.scans);
        let mut next = layout.region.top;
        for row in 0..layout.mcu_rows.end {
            let needed = layout.mcu_rows.contains(&row);
            readers.read(row, needed, coefficients)?;
            if needed {
                if let Some(smoothing) = &smoothing {
                    coefficients.smooth(layout, row, &script.quants, smoothing);
                }
                coefficients.transform(layout, row, &script.quants, rows, kernels);
                next = write(layout, row, next, header.colours, rows, kernels, to);
            }
        }
        readers.finish()
    }

    /// Seek points of a JPEG, for [`decode`](Self::decode). Empty if it can have none.
    pub fn seek_points(&mut self, input: &[u8]) -> Vec<u8> {
        match self.survey(input, POINTS_MAX) {
            Ok(Ok((_, points))) => points,
            Ok(Err(_)) | Err(_) => Vec::new(),
        }
    }

    /// Clears `out` and writes `input` to it, with its seek points in a segment, or unchanged. This
    /// is lossless: any decoder gets the same pixels. A second pass changes nothing. Wrong points
    /// are replaced.
    ///
    /// All other bytes stay, including those after the picture.
    ///
    /// Errors: those of strict decoding, for a damaged picture that could have points. `out` is
    /// then empty.
    pub fn embed(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<Embedded> {
        out.clear();
        let why = match self.survey(input, POINTS_MAX)? {
            Ok((header, points)) => {
                header.check_stray()?;
                match points == header.points_of(input) {
                    true => WithoutPoints::Present,
                    false if header.has_further_pictures(input) => WithoutPoints::SeveralPictures,
                    false => {
                        seek::embed(input, &header, &points, out);
                        return Ok(Embedded::Points(points.len() as u32));
                    }
                }
            }
            Err(why) => why,
        };
        out.extend_from_slice(input);
        Ok(Embedded::Unchanged(why))
    }

    /// Walks through a picture. Returns its header and at most `most` bytes of seek points, or the
    /// reason why it has none.
    fn survey(
        &mut self,
        input: &[u8],
        most: usize,
    ) -> Result<std::result::Result<(Header, Vec<u8>), WithoutPoints>> {
        if !input.starts_with(&[0xFF, 0xD8]) {
            return Ok(Err(WithoutPoints::NotJpeg));
        }
        let header = match Header::parse(input) {
            Ok(header) if !header.one_scan => return Ok(Err(WithoutPoints::SeveralScans)),
            Ok(header) if header.restart > 0 => return Ok(Err(WithoutPoints::RestartMarkers)),
            Err(_) if Header::is_unsupported(input) => return Ok(Err(WithoutPoints::Unsupported)),
            header => header?,
        };
        header
            .end_marker(input)
            .map_err(|error| Error::new(ErrorKind::Truncated, error.message()))?;
        let scan = Scan::parse(input, &header)?;
        self.tables.update(&scan);
        // Valid points in the picture keep their step, so they stay the same even if bytes follow
        // the picture.
        let there = Points::new(header.points_of(input), input, &header).map(|points| points.step);
        let mut step = there.unwrap_or_else(|| seek::step(input, &header, most));
        loop {
            let picture = Input {
                bytes: input,
                header: &header,
                strict: true,
            };
            let points = Walk::new(picture, &scan, &self.tables, &[], None)?
                .survey(SeekWriter::new(&header, step))?;
            if points.len() <= most || step >= header.mcus() {
                return Ok(Ok((header, points)));
            }
            step = step.saturating_mul(2);
        }
    }

    fn run(
        &mut self,
        picture: Input<'_>,
        scan: &Scan<'_>,
        points: Option<Points<'_>>,
        layout: &RegionLayout,
        to: &mut dyn RowSink,
    ) -> Result<()> {
        self.rows.start(layout);
        walk::starts(picture, &mut self.starts)?;
        let mut walk = Walk::new(picture, scan, &self.tables, &self.starts, points)?;
        let mut next = layout.region.top;
        for row in layout.mcu_rows.clone() {
            walk.row(layout, row, &mut self.rows, &self.kernels)?;
            next = write(
                layout,
                row,
                next,
                scan.colours,
                &mut self.rows,
                &self.kernels,
                to,
            );
        }
        walk.finish()
    }
}

/// Writes the rows of pixels from `next` on that are complete after a row of MCUs. Returns the
/// first row that is not.
fn write(
    layout: &RegionLayout,
    row: u32,
    next: u32,
    colours: Colours,
    rows: &mut PixelRows,
    kernels: &JpegKernels,
    to: &mut dyn RowSink,
) -> u32 {
    rows.pad(layout, row);
    let ready = layout.ready(row);
    for y in next..ready {
        rows.write(layout, colours, y, kernels, to.row(y - layout.region.top));
    }
    next.max(ready)
}

impl Default for JpegKernels {
    /// The kernels for this processor.
    fn default() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(kernels) = avx2::kernels() {
            return kernels;
        }
        kernels::SCALAR
    }
}
