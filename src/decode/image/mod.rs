//! Pictures: common formats in, pixels of one size out.
//!
//! ```text
//! sequential JPEG ──► crate::jpeg: the crop alone ───────── rows of RGB, in the cache ─┐
//! other JPEGs ─────► turbo | zune ─┐                                                   ├► crop + resize, one pass
//! other formats ───► other ────────┴► RGB: the picture, or the part that a crop needs ─┘         │
//!              (limits from the header)       (worker's buffer)                                  ▼
//!                                                 row ◄────────────────────────────────────  u8 pixels
//!                                                      upright, flip, dtype, layout,      (u8 NHWC: into the row,
//!                                                      normalise, one pass                 else a small buffer)
//! ```
//!
//! # Pixels
//!
//! The output is RGB, converted as by Pillow's `convert("RGB")`: grey is repeated, alpha is dropped without blending,
//! and palettes are looked up. 16 bits keep their high 8 (grey, too, where Pillow clips at 255). CMYK and YCCK JPEGs are
//! converted without a profile, as Adobe stores them. Of an animation the first picture is decoded; around it a GIF has the
//! transparent colour or the palette's first. Pixels that a run-length coded BMP leaves out are black (Pillow: the palette's
//! first colour). EXIF orientation is applied to JPEGs on request; by default it is not, as in torchvision.
//!
//! A JPEG is decoded only as far as the crop needs. The pixels under a crop equal those of the whole picture to the
//! bit, and so does the row. Resizing equals Pillow 11.3's to the bit. Newer versions do the vertical pass first for some
//! pictures: 12.3 if the height is over 100 times the width, 13 if it shrinks by more than twice as many pixels as the width.
//! Values then differ, mostly by one level. A picture is resized as stored and then turned upright: its values may differ by a
//! rounding, and by a pixel for [`Filter::Nearest`].
//!
//! # Invariants
//!
//! * The header's size is checked against [`Limits`] before any allocation.
//! * Steady state needs no allocation here. zune-jpeg, libjpeg-turbo and `image` allocate their own tables and rows per
//!   picture, within [`Limits::memory`].
//! * An earlier picture's content of a buffer never shows.
//! * A panic of one of these libraries is an error of the picture ([`ErrorKind::Panicked`]).
//!
//! # Damage
//!
//! A damaged picture is an error, never grey pixels, as far as its format can detect damage. JPEG has no checksum. A
//! cut file is always detected, and in a JPEG of one scan any missing or surplus data. Other damage is detected if it
//! puts the codes out of step. zune-jpeg detects a half of 4 KiB zeroed or of other data in progressive files, and a
//! sixth of single flipped bits.
//!
//! Rows below the crop of a sequential JPEG are not decoded. So only a crop that reaches the damage there detects it,
//! except for a cut. With seek points, the same holds for damage above and beside the crop, if it is newer than the points.
//! Restart markers are all checked for order and number, their intervals only under the crop. A
//! checksum in the dataset covers all bytes, decoded or not.

mod finish;
mod geometry;
mod orientation;
mod other;
#[cfg(test)]
#[path = "../../../tests/unit/image_parts.rs"]
mod parts_tests;
mod resize;
#[cfg(test)]
#[path = "../../../tests/unit/image.rs"]
mod tests;
#[cfg(feature = "turbojpeg")]
mod turbo;
mod zune;

use self::finish::Values;
use self::geometry::{Crop, Op, Rect, Size};
use self::orientation::Orientation;
use self::resize::{Pixels, Resizer};
use super::{Ctx, Decoder};
use crate::error::{Error, ErrorKind, Result, Stage, guarded};
use crate::jpeg::{self, Header};
use crate::memory::Row;
use crate::order::Draws;
use crate::setting::Setting;
use crate::tensor::{DType, EncodedField, Encoding, Field};

/// Order of a row's dimensions (N is the batch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelLayout {
    /// Height, width, channel: as decoded.
    Nhwc,
    /// Channel, height, width: the default of PyTorch's convolutions.
    Nchw,
}

/// Filter for resizing. All except `Nearest` average all source pixels under an output pixel (antialiasing), as Pillow
/// does, and torchvision by default. Values equal those of Pillow 11.3 to the bit; newer versions round otherwise for some
/// tall pictures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Filter {
    /// The nearest pixel, for label maps.
    Nearest,
    /// Triangle, the default.
    #[default]
    Bilinear,
    /// Cubic with a = -0.5.
    Bicubic,
    /// Windowed sinc over 6 pixels.
    Lanczos3,
}

/// What decodes JPEGs. Tests choose one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "tests compare the others with it"))]
enum Backend {
    /// [`crate::jpeg`]; for kinds that it does not decode, libjpeg-turbo if it is built in, else zune-jpeg.
    Own,
    Turbo,
    Zune,
}

/// Limits for one picture, checked from its header before memory is allocated.
///
/// No limit is a time, because a library cannot be stopped in mid-picture. Instead the work is bounded: for all formats
/// it is linear in encoded bytes and pixels, for a JPEG in pixels times scans (`bytes + pixels × scans`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pixels of the encoded picture.
    pub pixels: u64,
    /// Bytes of the encoded picture.
    pub bytes: usize,
    /// Heap bytes of one decode in total; all workers may take as much at once. See [`Image`] for the sum.
    pub memory: usize,
    /// Scans of a JPEG with several, mostly progressive. Encoders write about 10.
    ///
    /// Each scan is a pass over all coefficients, at the cost of a hundred bytes in the file.
    pub scans: u32,
}

impl Default for Limits {
    /// 64 megapixels, 256 MiB encoded, 1 GiB of heap, 100 scans.
    fn default() -> Self {
        Self::of_pixels(64 << 20)
    }
}

impl Limits {
    /// Pictures of up to `pixels`, of any format: 4 encoded bytes and 16 bytes of heap for each pixel, but at least 64 MiB.
    pub fn of_pixels(pixels: u64) -> Self {
        let bytes = |each| usize::try_from(pixels.saturating_mul(each)).unwrap_or(usize::MAX).max(64 << 20);
        Self { pixels, bytes: bytes(4), memory: bytes(16), scans: 100 }
    }
}

/// Decodes JPEG, PNG, WebP, BMP or GIF, identified by their first bytes; then crops, resizes, flips and converts.
///
/// A JPEG is decoded only as far as the crop needs. In files with restart markers even the entropy coding beside the
/// crop is skipped. Pixels of sequential JPEGs equal those of libjpeg-turbo, and so Pillow's and torchvision's, to the
/// bit. Progressive JPEGs are decoded by libjpeg-turbo with the feature `turbojpeg`, else by zune-jpeg, whose pixels
/// differ by at most 5 of 255 (0.4 in the mean), and by up to 80 in the last column and row. So are sequential ones of
/// several scans. Kinds that zune-jpeg gets wrong are refused: see [formats](crate::guide::formats).
///
/// The row is `[height, width, 3]`, or `[3, height, width]` in [`PixelLayout::Nchw`]. Random choices depend on (seed,
/// epoch, sample id) alone.
///
/// # Memory
///
/// One decode takes at most this many heap bytes, per pixel of the encoded picture unless noted:
/// - RGB pixels: 3 (kept for the next picture). 4 to 8 for a PNG with alpha or 16 bits, 4 for a GIF. None for a sequential
///   JPEG, whose rows are scaled as they are decoded. For a progressive one by libjpeg-turbo only the decoded part
///   counts, with 4 for CMYK.
/// - Decoder, while it runs: 1 for PNG and BMP, 8 for WebP (of an animation also 1 frame as it is encoded). A JPEG of
///   several scans takes 2 per sample (progressive: 3 per pixel for 4:2:0, 6 for 4:4:4, 8 for CMYK), any other only rows,
///   512 per pixel of width.
/// - Tables: 4 MiB for formats other than JPEG, 256 KiB for JPEG; 8 bytes per restart interval.
/// - Copies of the file's metadata: as many bytes as are encoded.
/// - Resizing, with T source pixels under an output pixel in each direction: per column of the output 12 × (T + 8) for rows
///   and 24 × (T + 2) for weights; 12 per column of the source; 6 per pixel of output.
///
/// The sum is computed from the header and compared with [`Limits::memory`] before any of it is allocated. By default pictures
/// of any format fit that have the default of [`Limits::pixels`].
///
/// ```
/// use feedline::decode::{Image, PixelLayout};
/// use feedline::tensor::DType;
///
/// let train = Image::random_resized_crop(224)
///     .flip(0.5)
///     .dtype(DType::BF16)
///     .layout(PixelLayout::Nchw)
///     .normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);
/// let validate = Image::center_crop(256, 224);
/// ```
#[derive(Clone, Debug)]
pub struct Image {
    op: Op,
    flip: f64,
    values: Values,
    layout: PixelLayout,
    filter: Filter,
    limits: Limits,
    strict: bool,
    backend: Backend,
    scaling: bool,
    orient: bool,
}

impl Image {
    /// The whole picture, scaled to `width` × `height` pixels.
    pub fn resize(width: u32, height: u32) -> Self {
        Self::new(Op::Resize(Size::new(width, height)))
    }

    /// The middle `size` × `size` pixels of the picture, after scaling its shorter side to `resize_shorter_side`.
    ///
    /// The same as torchvision's `Resize` and `CenterCrop`. `build()` refuses a `size` over `resize_shorter_side`.
    pub fn center_crop(resize_shorter_side: u32, size: u32) -> Self {
        Self::new(Op::CenterCrop { resize: resize_shorter_side, size })
    }

    /// A random part of the picture, scaled to `size` × `size` pixels: torchvision's `RandomResizedCrop`.
    pub fn random_resized_crop(size: u32) -> Self {
        Self::new(Op::RandomResizedCrop { size, scale: (0.08, 1.0), ratio: (3.0 / 4.0, 4.0 / 3.0) })
    }

    fn new(op: Op) -> Self {
        Self {
            op,
            flip: 0.0,
            values: Values { dtype: DType::U8, normalize: None },
            layout: PixelLayout::Nhwc,
            filter: Filter::default(),
            limits: Limits::default(),
            strict: true,
            backend: Backend::Own,
            scaling: false,
            orient: false,
        }
    }

    /// Smallest and largest share of the picture's area for a random crop; 0.08 to 1 by default. Other crops ignore it.
    #[must_use]
    pub fn scale(mut self, low: f64, high: f64) -> Self {
        if let Op::RandomResizedCrop { scale, .. } = &mut self.op {
            *scale = (low, high);
        }
        self
    }

    /// Smallest and largest width / height of a random crop; 3/4 to 4/3 by default. Other crops ignore it.
    #[must_use]
    pub fn ratio(mut self, low: f64, high: f64) -> Self {
        if let Op::RandomResizedCrop { ratio, .. } = &mut self.op {
            *ratio = (low, high);
        }
        self
    }

    /// Mirrors left and right with probability `p`; 0 by default.
    #[must_use]
    pub fn flip(mut self, p: f64) -> Self {
        self.flip = p;
        self
    }

    /// `U8` (pixel values, the default), or `F32`, `F16`, `BF16` (values scaled to 0..1).
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.values.dtype = dtype;
        self
    }

    /// The order of dimensions; [`PixelLayout::Nhwc`] by default.
    #[must_use]
    pub fn layout(mut self, layout: PixelLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Normalises each channel: scales values to 0..1, subtracts `mean`, divides by `std`. Not for `U8`.
    #[must_use]
    pub fn normalize(mut self, mean: [f32; 3], std: [f32; 3]) -> Self {
        self.values.normalize = Some((mean, std));
        self
    }

    /// The filter for resizing; [`Filter::Bilinear`] by default.
    #[must_use]
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    /// The limits for one picture.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Whether a damaged JPEG is an error; true by default.
    ///
    /// If false, its readable part is decoded, as by browsers and Pillow, and the rest is grey. Stray bytes between the
    /// segments of a header count as damage even if no pixel changes: the bytes after them may be an overwritten
    /// segment.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    #[cfg(test)]
    fn backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Whether a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size; false by default.
    ///
    /// It is, if the crop stays at least as large as the output. Other formats ignore this, and so do progressive JPEGs
    /// without the feature `turbojpeg`. It saves much of the work besides entropy coding. Pixels change, because blocks are
    /// averaged before the filter averages: on photo-like pictures by 0.6 to 1.8 of 255 in the mean, by at most 26. Before
    /// the filter they equal libjpeg-turbo's at that scale to the bit.
    #[must_use]
    pub fn dct_scaling(mut self, scaling: bool) -> Self {
        self.scaling = scaling;
        self
    }

    /// Whether to apply a JPEG's EXIF orientation, as Pillow's `ImageOps.exif_transpose`; false by default, as in
    /// torchvision.
    ///
    /// The crop is chosen in the upright picture and mapped back, and only the output is turned. An unreadable tag
    /// counts as upright. Other formats decode as stored; the EXIF data of PNG and WebP is ignored.
    #[must_use]
    pub fn exif_orientation(mut self, apply: bool) -> Self {
        self.orient = apply;
        self
    }

    /// Refuses illegal parameters.
    fn check(&self) -> Result<()> {
        let config = |message: String| Err(Error::new(ErrorKind::Config, Stage::Build, message));
        let size = self.op.output();
        if ![size.width, size.height].iter().all(|side| (1..=SIDE_MAX).contains(side)) {
            return config(format!(
                "an output of {}x{} pixels: each side must be 1 to {SIDE_MAX}",
                size.width, size.height
            ));
        }
        match self.op {
            Op::CenterCrop { resize, size } if resize < size || resize > SIDE_MAX => {
                return config(format!(
                    "a centre crop of {size} pixels from a shorter side of {resize}: the side must be at least the crop \
                     and at most {SIDE_MAX}"
                ));
            }
            Op::RandomResizedCrop { scale: (low, high), .. } if !(0.0 < low && low <= high && high <= 1.0) => {
                return config(format!("crop scale {low} to {high}: it must rise, above 0 and up to 1"));
            }
            Op::RandomResizedCrop { ratio: (low, high), .. } if !(0.0 < low && low <= high && high.is_finite()) => {
                return config(format!("crop ratio {low} to {high}: it must rise, above 0 and finite"));
            }
            _ => {}
        }
        if !(0.0..=1.0).contains(&self.flip) {
            return config(format!("flip probability {}: it must be 0 to 1", self.flip));
        }
        match self.values {
            Values { dtype: DType::U8, normalize: Some(_) } => {
                config("u8 pixels cannot be normalised: choose another dtype".into())
            }
            Values { dtype: DType::U8 | DType::F32 | DType::F16 | DType::BF16, normalize } => match normalize {
                Some((mean, std)) if !(mean.iter().all(|v| v.is_finite()) && std.iter().all(|v| v.is_normal())) => {
                    config(format!("mean {mean:?} and std {std:?}: they must be finite, std not 0"))
                }
                _ => Ok(()),
            },
            Values { dtype, .. } => config(format!("pixels as {dtype}: u8, f32, f16 and bf16 are supported")),
        }
    }

    /// The largest divisor (1, 2, 4 or 8) of a JPEG's size at which `crop` is still as large as the output.
    fn scale_of(&self, header: &Header, crop: &Crop) -> u32 {
        // zune-jpeg decodes full sizes alone.
        let zune = match self.backend {
            backend => backend == Backend::Zune,
        };
        if !self.scaling || zune {
            return 1;
        }
        let fits = |scale: &u32| {
            let scaled = |side: f64| side / f64::from(*scale);
            let Size { width, height } = crop.whole;
            scaled(crop.part.width) >= f64::from(width) && scaled(crop.part.height) >= f64::from(height)
        };
        [8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }
}

/// Purpose of this decoder's draws: one for the flip, then those of the crop.
const PURPOSE: &str = "feedline image";

/// Longest side of an output.
const SIDE_MAX: u32 = 16_384;

impl Decoder for Image {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        if !matches!(input.encoding, Encoding::Image | Encoding::Bytes) {
            let message = format!("field `{}` is {}: this decoder takes encoded pictures", input.name, input.encoding);
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        self.check()?;
        let Size { width, height } = self.op.output();
        let (width, height) = (width as usize, height as usize);
        let shape = match self.layout {
            PixelLayout::Nhwc => [height, width, 3],
            PixelLayout::Nchw => [3, height, width],
        };
        Ok(vec![Field::fixed(&input.name, self.values.dtype, shape)])
    }

    /// [`Limits::memory`].
    fn scratch_bytes(&self) -> usize {
        self.limits.memory
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let done = guarded("a picture", Stage::Decode, || self.decode_one(input, ctx, out));
        if done.as_ref().is_err_and(|error| error.kind() == ErrorKind::Panicked) {
            // The panic may have left it half done.
            *ctx.scratch().get::<Workspace>() = Workspace::default();
        }
        done
    }
}

impl Image {
    fn decode_one(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        let mut draws = ctx.draws(PURPOSE);
        let field = ctx.fields().start;
        let limits = Limits { memory: self.limits.memory.min(ctx.scratch_limit()), ..self.limits };
        let points = ctx.seek_points();
        let scratch: &mut Workspace = ctx.scratch().get();
        // Drawn first, so that the flip does not depend on the picture's size.
        let flip = draws.bool(self.flip);
        let (size, row) = (self.op.output(), out.bytes_mut(field));
        let in_place = finish::in_place(self.values, self.layout);
        let encoded = Encoded { bytes: input, points };
        let Picture { orientation, stored, .. } =
            scratch.decode(encoded, self, limits, &mut draws, in_place.then_some(&mut *row))?;
        if in_place {
            if !orientation.is_upright() {
                orientation.turn(&scratch.resized, stored, row);
            }
            if flip {
                finish::flip(row, size);
            }
            return Ok(());
        }
        finish::write(scratch.upright(orientation, stored), size, flip, self.values, self.layout, row);
        Ok(())
    }
}

/// An encoded picture and its seek points.
#[derive(Clone, Copy)]
struct Encoded<'a> {
    bytes: &'a [u8],
    points: &'a [u8],
}

#[cfg(test)]
impl<'a> Encoded<'a> {
    /// Without seek points.
    fn alone(bytes: &'a [u8]) -> Self {
        Self { bytes, points: &[] }
    }
}

/// A worker's buffers. They grow to the largest picture within the limits, and stay.
#[derive(Default)]
struct Workspace {
    /// The decoded part of a picture that is not scaled row by row, RGB.
    pixels: Vec<u8>,
    /// The output before its last pass.
    resized: Vec<u8>,
    /// `resized`, turned upright.
    upright: Vec<u8>,
    resizer: Resizer,
    jpeg: jpeg::Decoder,
    #[cfg(feature = "turbojpeg")]
    turbo: turbo::Turbo,
}

/// A picture that was decoded, cropped and scaled.
struct Picture {
    /// The size at which it was decoded.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests ask for it"))]
    size: Size,
    /// The size of the output as stored.
    stored: Size,
    orientation: Orientation,
}

impl Workspace {
    /// Decodes, crops and scales: upright pictures into `row`, if there is one, others as stored into `self.resized`.
    fn decode(
        &mut self,
        encoded: Encoded<'_>,
        image: &Image,
        limits: Limits,
        draws: &mut Draws,
        row: Option<&mut [u8]>,
    ) -> Result<Picture> {
        let input = encoded.bytes;
        if input.len() > limits.bytes {
            return Err(over_limit(format!("{} encoded bytes; the limit is {}", input.len(), limits.bytes)));
        }
        match Format::of(input)? {
            Format::Jpeg => self.decode_jpeg(encoded, image, limits, draws, row),
            format => {
                let crop = |size| image.op.crop(size, &mut draws.clone());
                let resizing = |size| resizing(&crop(size), image.filter);
                // Less than what other formats are charged for tables.
                self.jpeg.release_beyond(1 << 20);
                let Self { pixels, resizer, .. } = self;
                let mut room = Room { limits, encoded: input.len(), resizing: &resizing, pixels, resizer };
                let size = other::decode(format, input, &mut room)?;
                let crop = crop(size);
                self.resize(Rect::of(size), &crop, image.filter, row);
                Ok(Picture { size, stored: crop.window.size, orientation: Orientation::default() })
            }
        }
    }

    fn decode_jpeg(
        &mut self,
        encoded: Encoded<'_>,
        image: &Image,
        limits: Limits,
        draws: &mut Draws,
        row: Option<&mut [u8]>,
    ) -> Result<Picture> {
        let input = encoded.bytes;
        let header = Header::parse(input)?;
        let scans = header.check_scans(input, limits.scans, image.strict)?;
        if image.strict {
            header.check_stray()?;
        }
        let orientation = if image.orient { header.orientation(input) } else { Orientation::default() };
        let row = row.filter(|_| orientation.is_upright());
        let crop = orientation.stored(image.op.crop(orientation.size(header.size()), draws), header.size());
        let scale = image.scale_of(&header, &crop);
        #[cfg(feature = "turbojpeg")]
        let full = crop.needed(image.filter);
        let size = header.size().divided(scale);
        let crop = if scale == 1 { crop } else { crop.scaled(scale, size) };
        let (pixels, resizer) = (&mut self.pixels, &mut self.resizer);
        let resizing = |_| resizing(&crop, image.filter);
        let mut room = Room { limits, encoded: input.len(), resizing: &resizing, pixels, resizer };
        let done = match image.backend {
            Backend::Own if header.one_scan => {
                self.jpeg.release_beyond(header.engine_bytes());
                let taken = room.take(header.size(), 0, header.engine_bytes()).map(drop);
                taken.and_then(|()| self.decode_rows(encoded, (&header, None, image), (&crop, scale), row))
            }
            Backend::Own => {
                let picture = jpeg::Input { bytes: input, header: &header, strict: image.strict };
                let script = jpeg::Script::parse(picture, limits.scans)?;
                let bytes = header.engine_bytes() + script.engine_bytes(&header);
                self.jpeg.release_beyond(bytes);
                let taken = room.take(header.size(), 0, bytes).map(drop);
                taken.and_then(|()| self.decode_rows(encoded, (&header, Some(&script), image), (&crop, scale), row))
            }
            #[cfg(feature = "turbojpeg")]
            Backend::Turbo => {
                let want = turbo::Want { needed: full, scale, strict: image.strict };
                let there = self.turbo.decode(input, &header, want, &mut room);
                there.map(|there| self.resize(there, &crop, image.filter, row))
            }
            _ => {
                let there = zune::decode(input, (&header, scans), image.strict, &mut room);
                there.map(|there| self.resize(there, &crop, image.filter, row))
            }
        };
        let damaged = |error: &Error| error.kind() == ErrorKind::Decode && error.message().starts_with(jpeg::DAMAGED);
        done.map_err(|error| match image.strict && damaged(&error) {
            true => Setting::Strict
                .there()
                .into_iter()
                .fold(error, |error, strict| error.with_note(&format!("{strict} takes what can be decoded"))),
            false => error,
        })?;
        Ok(Picture { size, stored: crop.window.size, orientation })
    }

    /// Decodes the rows of a sequential JPEG at 1 / `scale` of its size, and scales each while it is in the cache.
    fn decode_rows(
        &mut self,
        Encoded { bytes, points }: Encoded<'_>,
        (header, script, image): (&Header, Option<&jpeg::Script<'_>>, &Image),
        (crop, scale): (&Crop, u32),
        row: Option<&mut [u8]>,
    ) -> Result<()> {
        let Rect { left, top, size: Size { width, height } } = crop.needed(image.filter);
        let region = jpeg::Region { left, top, width, height };
        let out = target(row, &mut self.resized, crop);
        let mut rows = self.resizer.start(&crop.plan(image.filter), out);
        let picture = jpeg::Input { bytes, header, strict: image.strict };
        match script {
            Some(script) => self.jpeg.decode_scans(picture, script, (region, scale), &mut rows)?,
            None => self.jpeg.decode(picture, points, (region, scale), &mut rows)?,
        }
        rows.finish();
        Ok(())
    }

    /// `self.resized`, turned upright.
    fn upright(&mut self, orientation: Orientation, stored: Size) -> &[u8] {
        if orientation.is_upright() {
            return &self.resized;
        }
        self.upright.resize(self.resized.len(), 0);
        orientation.turn(&self.resized, stored, &mut self.upright);
        &self.upright
    }

    /// Crops and scales the pixels, which are `there` in the picture, into `row`, or into `self.resized`.
    fn resize(&mut self, there: Rect, crop: &Crop, filter: Filter, row: Option<&mut [u8]>) {
        let seen = crop.view.common(there);
        let stride = 3 * there.size.width as usize;
        let start = stride * (seen.top - there.top) as usize + 3 * (seen.left - there.left) as usize;
        let bytes = &self.pixels[start..3 * there.size.pixels() as usize];
        // The view is the picture of the plan.
        let place = Rect { left: seen.left - crop.view.left, top: seen.top - crop.view.top, size: seen.size };
        let out = target(row, &mut self.resized, crop);
        self.resizer.resize(Pixels { bytes, stride, there: place }, &crop.plan(filter), out);
    }
}

/// The place of the crop's output: `row`, or `resized`.
fn target<'a>(row: Option<&'a mut [u8]>, resized: &'a mut Vec<u8>, crop: &Crop) -> &'a mut [u8] {
    row.unwrap_or_else(|| {
        resized.resize(3 * crop.window.size.pixels() as usize, 0);
        resized
    })
}

/// The only source of memory for a picture: it checks the limits.
struct Room<'a> {
    limits: Limits,
    /// Bytes of the encoded picture.
    encoded: usize,
    /// Heap bytes for resizing a picture of this size.
    resizing: &'a dyn Fn(Size) -> u64,
    pixels: &'a mut Vec<u8>,
    resizer: &'a mut Resizer,
}

impl Room<'_> {
    /// Refuses a picture with too many pixels.
    fn admit(&self, picture: Size) -> Result<()> {
        let (Size { width, height }, limit) = (picture, self.limits.pixels);
        match picture.pixels() {
            pixels if pixels > limit => {
                Err(over_limit(format!("{width}x{height} = {pixels} pixels; the limit is {limit}")))
            }
            _ if width.max(height) > resize::SIDE_MAX => {
                Err(over(format!("{width}x{height} pixels; sides of at most {} are supported", resize::SIDE_MAX)))
            }
            _ => Ok(()),
        }
    }

    /// Returns `own` bytes, of any content, for the pixels of a picture of size `picture`.
    ///
    /// Errors: [`ErrorKind::Limit`] if these, `theirs` for the decoder and those for resizing exceed the limits.
    fn take(&mut self, picture: Size, own: u64, theirs: u64) -> Result<&mut [u8]> {
        self.admit(picture)?;
        let Size { width, height } = picture;
        let (resizing, limit) = ((self.resizing)(picture), self.limits.memory as u64);
        let theirs = theirs.saturating_add(self.encoded as u64);
        let sum = own.saturating_add(theirs).saturating_add(resizing);
        if sum > limit {
            let message = format!("{width}x{height} pixels take {sum} bytes to decode; the limit is {limit}");
            return Err(over_limit(message).with_note(&format!("a tight {} lowers it", Setting::MemoryBudget)));
        }
        let kept = (self.pixels.len().max(own as usize) + self.resizer.bytes()) as u64;
        if kept.saturating_add(resizing).saturating_add(theirs) > limit {
            // Buffers of earlier pictures leave too little for this one.
            *self.pixels = Vec::new();
            self.resizer.release();
        }
        if self.pixels.len() < own as usize {
            // Freed first, because the old pixels are not needed.
            *self.pixels = Vec::new();
            *self.pixels = vec![0; own as usize];
        }
        Ok(&mut self.pixels[..own as usize])
    }
}

/// Maximum heap bytes for resizing: the resizer's, and the output before its last pass, as stored and turned upright.
fn resizing(crop: &Crop, filter: Filter) -> u64 {
    crop.plan(filter).heap_bytes() + 6 * crop.window.size.pixels()
}

/// Format of a file, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Jpeg,
    Png,
    WebP,
    Bmp,
    Gif,
}

impl Format {
    fn of(input: &[u8]) -> Result<Self> {
        match input {
            [0xFF, 0xD8, 0xFF, ..] => Ok(Self::Jpeg),
            [0x89, b'P', b'N', b'G', 0x0D, 0x0A, 0x1A, 0x0A, ..] => Ok(Self::Png),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Ok(Self::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Ok(Self::Gif),
            [b'B', b'M', ..] => Ok(Self::Bmp),
            [] => Err(bad("no bytes at all")),
            _ => Err(unknown(input)),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Jpeg => "JPEG",
            Self::Png => "PNG",
            Self::WebP => "WebP",
            Self::Bmp => "BMP",
            Self::Gif => "GIF",
        }
    }
}

/// The error for an unsupported format, with its name if known, and its first bytes.
fn unknown(input: &[u8]) -> Error {
    let name = match input {
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => "TIFF",
        [_, _, _, _, b'f', b't', b'y', b'p', b'a', b'v', b'i', ..] => "AVIF",
        [_, _, _, _, b'f', b't', b'y', b'p', b'h' | b'm', ..] => "HEIF",
        [0xFF, 0x0A, ..] | [0, 0, 0, 12, b'J', b'X', b'L', b' ', ..] => "JPEG XL",
        [0, 0, 0, 12, b'j', b'P', ..] => "JPEG 2000",
        [b'<', ..] => "text (HTML, XML, SVG)",
        _ => "not a picture",
    };
    let start: Vec<_> = input.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let message = format!(
        "{name}, starting with {}, {} bytes; JPEG, PNG, WebP, BMP and GIF are supported",
        start.join(" "),
        input.len()
    );
    bad(message)
}

fn bad(message: impl Into<String>) -> Error {
    Error::decode(message)
}

fn over(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Limit, Stage::Decode, message)
}

/// For the limits that a setting raises.
fn over_limit(message: String) -> Error {
    over(message + &Setting::MaxPixels.hint(|most| format!(" ({most} raises it)")))
}
