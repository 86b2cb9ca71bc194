//! Pictures: any common format in, pixels of one size out.
//!
//! ```text
//! JPEG with restart markers ──restart──► a smaller JPEG ┐
//!                             (the part under the crop) ▼
//! encoded bytes ──────────────────────► jpeg | turbo | other ──► RGB: the picture, or the part of it
//!                                       (limits from the         (worker's buffer)  that a crop needs
//!                                        header)                        │
//!                          ┌──────────────crop + resize, one pass───────┘
//!                          ▼
//!                       u8 pixels ──────────────► row
//!       (u8 NHWC: into the row,   upright, flip, dtype, layout,
//!        else a small buffer)     normalise, one pass
//! ```
//!
//! What comes out is always RGB, converted as Pillow's `convert("RGB")` does: grey is repeated, alpha is dropped (not
//! blended), of 16 bits the high 8 are kept (of grey too, which Pillow would clip at 255), palettes are looked up, CMYK
//! and YCCK JPEGs are converted without a profile, as Adobe stores them. Of an animation the first picture is taken. An
//! EXIF orientation is applied on request, to JPEGs; by default not, as in torchvision.
//!
//! Of a JPEG only what the crop needs is decoded. The pixels under a crop are those of the whole picture, to the bit. A
//! random crop's row is, too; a centre crop's may differ by a level where the weights of its fractional edges, counted
//! from another corner, round differently.
//!
//! Invariants: nothing is allocated before the header's size is checked against [`Limits`] (but the bytes of a cut JPEG,
//! which are fewer than the encoded ones, after the number of pixels was); in steady state nothing is allocated here at
//! all (zune-jpeg, libjpeg-turbo, `image` and fast_image_resize allocate their own tables and rows per picture, within
//! [`Limits::memory`]; a JPEG with padding before its end marker costs libjpeg-turbo a copy); what an earlier picture
//! left in a buffer never shows.
//!
//! A panic of one of these libraries is an error of the picture ([`ErrorKind::Panicked`]), wherever it is decoded.
//!
//! A damaged picture is an error, never grey pixels, as far as its format allows to tell. JPEG has no checksum. A file
//! cut anywhere is always found, and in a JPEG of one scan any data missing or left over. Other damage is found when it
//! puts the codes out of step (by zune-jpeg, 807 damages each in 60 photographs: 4 KiB zeroed 99 %, 4 KiB of other data
//! 90 %, one bit flipped 36 %; of progressive files half, half, a sixth; libjpeg-turbo finds as many flipped bits, the rest was not tried). The rows below a
//! crop of a JPEG of one scan are not decoded, so damage down there, but for a cut, is found only by a crop that reaches
//! it. With restart markers the order and number of all of them is checked, and what lies between them only under the
//! crop. A checksum in the dataset covers all bytes, whatever is decoded of them.

mod finish;
mod geometry;
mod jpeg;
mod orientation;
mod other;
#[cfg(test)]
mod parts_tests;
mod restart;
#[cfg(test)]
mod tests;
#[cfg(feature = "turbojpeg")]
mod turbo;

use self::finish::Values;
use self::geometry::{Crop, Op, Part, Rect, Size};
use self::orientation::Orientation;
use super::{Ctx, Decoder};
use crate::error::{Error, ErrorKind, Result, Stage, guarded};
use crate::memory::Row;
use crate::order::Draws;
use crate::tensor::{DType, EncodedField, Encoding, Field};
use fast_image_resize as fir;

/// How the dimensions of a picture's row are ordered (the N is the batch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelLayout {
    /// Height, width, channel: as decoded.
    Nhwc,
    /// Channel, height, width: as PyTorch's convolutions take it by default.
    Nchw,
}

/// The filter of the resizing. All but `Nearest` average over every source pixel that an output pixel covers
/// (antialiasing), as Pillow does and torchvision by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Filter {
    /// The nearest pixel: for label maps. Exactly between two source pixels the choice may differ from Pillow's.
    Nearest,
    /// Triangle, the default.
    #[default]
    Bilinear,
    /// Cubic with a = -0.5.
    Bicubic,
    /// Windowed sinc over 6 pixels.
    Lanczos3,
}

/// Which library decodes JPEGs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// zune-jpeg: Rust, always there. Decodes the rows from the top of the picture to the end of the crop.
    Zune,
    /// libjpeg-turbo, with the feature `turbojpeg`: faster, and computes only the pixels of the crop. Its pixels are
    /// Pillow's, to the bit. zune-jpeg's differ from them by 5 of 255 at most, 0.4 in the mean; by up to 80 in the last
    /// column and row, where it interpolates chroma with the padding behind them.
    Turbo,
}

impl Default for Backend {
    /// `Turbo` if it is built in.
    fn default() -> Self {
        if cfg!(feature = "turbojpeg") { Self::Turbo } else { Self::Zune }
    }
}

/// What a picture may cost, checked from its header before memory is taken.
///
/// No clock is looked at: a library cannot be stopped in mid-picture. What bounds the time is that the work of all formats
/// is linear in the encoded bytes and the pixels, of a JPEG once more for each scan: `bytes + pixels × scans`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pixels of the encoded picture.
    pub pixels: u64,
    /// Bytes of the encoded picture.
    pub bytes: usize,
    /// Heap bytes of one decode, everything included; every worker may take as much at once. See [`Image`] for the sum.
    pub memory: usize,
    /// Scans of a JPEG that comes in several (progressive ones above all): each is a pass over all of its coefficients,
    /// for as little as a hundred bytes of the file. Encoders write 10 or so.
    pub scans: u32,
}

impl Default for Limits {
    /// 64 megapixels, 256 MiB encoded, 256 MiB of heap, 100 scans.
    fn default() -> Self {
        Self { pixels: 64 << 20, bytes: 256 << 20, memory: 256 << 20, scans: 100 }
    }
}

/// Decodes JPEG, PNG, WebP, BMP or GIF (told by their first bytes), crops, resizes, flips and converts.
///
/// Of a JPEG no more is decoded than the crop needs, as far as the [`Backend`] and the file allow: restart markers, a
/// divisor of a row's MCUs or whole rows apart, let even the entropy coding beside a crop be left out. Nothing needs to
/// be said for that; files without them are decoded as usual.
///
/// The row is `[height, width, 3]`, or `[3, height, width]` in [`PixelLayout::Nchw`]. Random choices depend on (seed,
/// epoch, sample id) alone.
///
/// # Memory
///
/// One decode takes, in bytes of heap per pixel of the encoded picture, and no more:
/// - 3 for the RGB pixels (kept for the next picture; 4 to 8 while a PNG has alpha or 16 bits, GIF 4; of a JPEG only
///   for the part that is decoded, CMYK 4 with libjpeg-turbo);
/// - for the decoder of the format, while it runs: JPEG 2 per sample when it comes in several scans (progressive: 3 per
///   pixel for 4:2:0, 6 for 4:4:4, 8 for CMYK), else only rows, 512 per pixel of width; PNG and BMP 1, GIF 4, WebP 8;
///   4 MiB for the tables of all but JPEG, 256 KiB for libjpeg-turbo's; and as much as is encoded, for copies of what a
///   file says about itself; for a cut JPEG as much again, at least a 16th of the limit;
/// - for the resizing: 3 per (pixel of width × row of output) and the filter's weights; 6 per pixel of output.
///
/// The sum is computed from the header and compared with [`Limits::memory`] before any of it is allocated.
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

    /// The middle `size` × `size` pixels of the picture, whose shorter side is first scaled to `resize_shorter_side`:
    /// torchvision's `Resize` and `CenterCrop`. A `size` over `resize_shorter_side` is refused.
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
            backend: Backend::default(),
            scaling: false,
            orient: false,
        }
    }

    /// Least and largest share of the picture's area that a random crop takes; 0.08 to 1 by default. No meaning for
    /// the other crops.
    #[must_use]
    pub fn scale(mut self, low: f64, high: f64) -> Self {
        if let Op::RandomResizedCrop { scale, .. } = &mut self.op {
            *scale = (low, high);
        }
        self
    }

    /// Least and largest width / height of a random crop; 3/4 to 4/3 by default. No meaning for the other crops.
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

    /// `U8` (the default: the pixels), `F32`, `F16` or `BF16` (scaled to 0..1).
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

    /// Subtracts `mean` from and divides by `std` the values of each channel, scaled to 0..1. Not for `U8`.
    #[must_use]
    pub fn normalize(mut self, mean: [f32; 3], std: [f32; 3]) -> Self {
        self.values.normalize = Some((mean, std));
        self
    }

    /// The filter of the resizing; [`Filter::Bilinear`] by default.
    #[must_use]
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    /// What a picture may cost.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Whether a damaged JPEG is an error; true by default. Else what can be made of it is taken, as browsers and Pillow
    /// do, and the rest is grey. Stray bytes between the segments of a header count as damage, though they may cost no
    /// pixel: what follows them may be a segment that was overwritten.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Which library decodes JPEGs; by default libjpeg-turbo, if the feature `turbojpeg` is on, else zune-jpeg.
    /// [`Backend::Turbo`] without the feature is an error when the loader is built.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Whether libjpeg-turbo may decode a JPEG to 1/2, 1/4 or 1/8 of its size where the crop stays at least as large as
    /// the output; false by default, no meaning for other backends and formats. It saves much of what is left besides the
    /// entropy coding. The pixels are others, since blocks are averaged before the filter averages: on photo-like
    /// pictures by 0.6 to 1.8 of 255 in the mean, by 26 at most. Whether it is faster depends on the sizes: 0.92 to 1.37
    /// times as fast on 100 such pictures.
    #[must_use]
    pub fn dct_scaling(mut self, scaling: bool) -> Self {
        self.scaling = scaling;
        self
    }

    /// Whether a JPEG's EXIF orientation is applied, as Pillow's `ImageOps.exif_transpose` does; false by default, as in
    /// torchvision. The crop is then chosen in the upright picture, mapped back, and only the output is turned. What
    /// cannot be read of the tag counts as upright. Other formats are taken as they are stored (a PNG's or WebP's EXIF
    /// is not looked at).
    #[must_use]
    pub fn exif_orientation(mut self, apply: bool) -> Self {
        self.orient = apply;
        self
    }

    /// Finds parameters that make no sense.
    fn check(&self) -> Result<()> {
        let config = |message: String| Err(Error::new(ErrorKind::Config, Stage::Build, message));
        let size = self.op.output();
        if ![size.width, size.height].iter().all(|side| (1..=SIDE_MAX).contains(side)) {
            return config(format!("an output of {}x{} pixels; 1 to {SIDE_MAX} a side", size.width, size.height));
        }
        match self.op {
            Op::CenterCrop { resize, size } if resize < size || resize > SIDE_MAX => {
                return config(format!("a centre crop of {size} pixels from a shorter side of {resize}"));
            }
            Op::RandomResizedCrop { scale: (low, high), .. } if !(0.0 < low && low <= high && high <= 1.0) => {
                return config(format!("crop scale {low} to {high}; it must be rising, within 0 to 1"));
            }
            Op::RandomResizedCrop { ratio: (low, high), .. } if !(0.0 < low && low <= high && high.is_finite()) => {
                return config(format!("crop ratio {low} to {high}; it must be rising and above 0"));
            }
            _ => {}
        }
        if self.backend == Backend::Turbo && !cfg!(feature = "turbojpeg") {
            return config("libjpeg-turbo is not built in; it is with the feature `turbojpeg`".into());
        }
        if !(0.0..=1.0).contains(&self.flip) {
            return config(format!("flip probability {}; 0 to 1", self.flip));
        }
        match self.values {
            Values { dtype: DType::U8, normalize: Some(_) } => config("u8 pixels cannot be normalised".into()),
            Values { dtype: DType::U8 | DType::F32 | DType::F16 | DType::BF16, normalize } => match normalize {
                Some((mean, std)) if !(mean.iter().all(|v| v.is_finite()) && std.iter().all(|v| v.is_normal())) => {
                    config(format!("mean {mean:?} and std {std:?}; they must be finite, std not 0"))
                }
                _ => Ok(()),
            },
            Values { dtype, .. } => config(format!("pixels as {dtype}; u8, f32, f16 and bf16 are supported")),
        }
    }

    /// How much smaller a JPEG can be decoded so that `crop` is still as large as the output: 1, 2, 4 or 8 times.
    fn scale_of(&self, crop: &Crop, output: Size) -> u32 {
        let fits = |scale: &u32| {
            let scaled = |side: f64| side / f64::from(*scale);
            scaled(crop.part.width) >= f64::from(output.width) && scaled(crop.part.height) >= f64::from(output.height)
        };
        let allowed = self.scaling && cfg!(feature = "turbojpeg") && self.backend == Backend::Turbo;
        [8, 4, 2].into_iter().find(|scale| allowed && fits(scale)).unwrap_or(1)
    }

    fn filter_of_fir(&self) -> fir::ResizeAlg {
        match self.filter {
            Filter::Nearest => fir::ResizeAlg::Nearest,
            Filter::Bilinear => fir::ResizeAlg::Convolution(fir::FilterType::Bilinear),
            Filter::Bicubic => fir::ResizeAlg::Convolution(fir::FilterType::CatmullRom),
            Filter::Lanczos3 => fir::ResizeAlg::Convolution(fir::FilterType::Lanczos3),
        }
    }
}

/// The draws of this decoder: one for the flip, then those of the crop.
const PURPOSE: &str = "feedline image";

/// Longest side of an output.
const SIDE_MAX: u32 = 16_384;

impl Decoder for Image {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        if !matches!(input.encoding, Encoding::Image | Encoding::Bytes) {
            let message = format!("field `{}` is {:?}, not an encoded picture", input.name, input.encoding);
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
            // Whatever it left half done is made anew.
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
        let scratch: &mut Workspace = ctx.scratch().get();
        // Drawn first, so that a flip does not depend on the picture's size.
        let flip = draws.bool(self.flip);
        let picture = scratch.decode(input, self, limits, &mut draws)?;
        let size = self.op.output();
        let row = out.bytes_mut(field);
        if finish::in_place(self.values, self.layout) {
            match picture.orientation.is_upright() {
                true => scratch.resize(&picture, size, self.filter_of_fir(), Some(row))?,
                false => {
                    let stored = picture.orientation.size(size);
                    scratch.resize(&picture, stored, self.filter_of_fir(), None)?;
                    picture.orientation.turn(&scratch.resized, stored, row);
                }
            }
            if flip {
                finish::flip(row, size);
            }
            return Ok(());
        }
        scratch.resize_upright(&picture, size, self.filter_of_fir())?;
        finish::write(&scratch.resized, size, flip, self.values, self.layout, row);
        Ok(())
    }
}

/// A worker's buffers; they grow to the largest picture within the limits and stay.
#[derive(Default)]
struct Workspace {
    /// What was decoded of the picture, RGB.
    pixels: Vec<u8>,
    /// The output before its last pass.
    resized: Vec<u8>,
    /// The same, turned upright.
    upright: Vec<u8>,
    /// A JPEG cut down to the part under the crop.
    cut: Vec<u8>,
    resizer: fir::Resizer,
    #[cfg(feature = "turbojpeg")]
    turbo: turbo::Turbo,
}

/// What was decoded.
struct Picture {
    /// Of the pixels in the workspace.
    size: Size,
    /// What to cut from them.
    crop: Crop,
    /// How they are stored.
    orientation: Orientation,
}

impl Workspace {
    /// Decodes at least what the crop needs.
    fn decode(&mut self, input: &[u8], image: &Image, limits: Limits, draws: &mut Draws) -> Result<Picture> {
        if input.len() > limits.bytes {
            return Err(over(format!("{} encoded bytes; the limit is {}", input.len(), limits.bytes)));
        }
        match Format::of(input)? {
            Format::Jpeg => self.decode_jpeg(input, image, limits, draws),
            format => {
                let output = image.op.output();
                let Self { pixels, cut: spare, resizer, .. } = self;
                let mut room = Room { limits, encoded: input.len(), copy: 0, output, pixels, spare, resizer };
                let size = other::decode(format, input, &mut room)?;
                Ok(Picture { size, crop: image.op.crop(size, draws), orientation: Orientation::default() })
            }
        }
    }

    fn decode_jpeg(&mut self, input: &[u8], image: &Image, limits: Limits, draws: &mut Draws) -> Result<Picture> {
        let header = jpeg::Header::parse(input)?;
        header.check_scans(input, limits.scans)?;
        let orientation = if image.orient { header.orientation(input) } else { Orientation::default() };
        let output = orientation.size(image.op.output());
        let crop = orientation.stored(image.op.crop(orientation.size(header.size), draws), header.size);
        let scale = image.scale_of(&crop, output);
        let needed = crop.needed(output);
        let crop = if scale == 1 { crop } else { crop.scaled(scale, header.size.divided(scale)) };
        let (mut cut, mut none) = (std::mem::take(&mut self.cut), Vec::new());
        let origin = match header.size.pixels() <= limits.pixels {
            // At a smaller scale two pixels of chroma are more of the picture's.
            true => restart::cut(input, &header, needed.widened(2 * (scale - 1), header.size), image.strict, &mut cut)?,
            // Refused below.
            false => None,
        };
        let (bytes, header, origin, copy, spare) = match origin {
            None => (input, header, Rect::of(header.size), 0, &mut cut),
            Some(origin) => {
                let copy = restart::bound(&mut cut, input.len(), limits.memory);
                (cut.as_slice(), jpeg::Header::parse(&cut)?, origin, copy, &mut none)
            }
        };
        let (pixels, resizer, needed) = (&mut self.pixels, &mut self.resizer, needed.seen_from(origin));
        let mut room = Room { limits, encoded: input.len(), copy, output, pixels, spare, resizer };
        let there = match image.backend {
            #[cfg(feature = "turbojpeg")]
            Backend::Turbo => {
                let want = turbo::Want { needed, scale, strict: image.strict };
                self.turbo.decode(bytes, &header, want, &mut room)
            }
            _ => jpeg::decode(bytes, &header, needed, image.strict, &mut room),
        };
        self.cut = cut;
        let explained = |error| if image.strict { header.explain(error) } else { error };
        let there = there.map_err(explained)?.moved(origin.left / scale, origin.top / scale);
        Ok(Picture { size: there.size, crop: crop.within(there), orientation })
    }

    /// The output, upright, in `self.resized`; `size` is its size.
    fn resize_upright(&mut self, picture: &Picture, size: Size, algorithm: fir::ResizeAlg) -> Result<()> {
        let stored = picture.orientation.size(size);
        self.resize(picture, stored, algorithm, None)?;
        if !picture.orientation.is_upright() {
            self.upright.resize(self.resized.len(), 0);
            picture.orientation.turn(&self.resized, stored, &mut self.upright);
            std::mem::swap(&mut self.resized, &mut self.upright);
        }
        Ok(())
    }

    /// Cuts and scales the decoded picture into `row`, or into `self.resized`.
    fn resize(
        &mut self,
        picture: &Picture,
        size: Size,
        algorithm: fir::ResizeAlg,
        row: Option<&mut [u8]>,
    ) -> Result<()> {
        let Picture { size: Size { width, height }, crop, .. } = *picture;
        let pixels = &self.pixels[..3 * picture.size.pixels() as usize];
        let source =
            fir::images::TypedImageRef::<fir::pixels::U8x3>::from_buffer(width, height, pixels).map_err(unresized)?;
        let Rect { left, top, size: Size { width, height } } = crop.view;
        let view = fir::images::TypedCroppedImage::from_ref(&source, left, top, width, height).map_err(unresized)?;
        let target = match row {
            Some(row) => row,
            None => {
                self.resized.resize(3 * size.pixels() as usize, 0);
                &mut self.resized
            }
        };
        let mut target = fir::images::TypedImage::<fir::pixels::U8x3>::from_buffer(size.width, size.height, target)
            .map_err(unresized)?;
        let Part { left, top, width, height } = crop.part;
        // After cuts and turns a rounding error might lie outside of the view.
        let width = width.min(f64::from(crop.view.size.width) - left);
        let height = height.min(f64::from(crop.view.size.height) - top);
        let options = fir::ResizeOptions::new().resize_alg(algorithm).crop(left, top, width, height).use_alpha(false);
        self.resizer.resize_typed(&view, &mut target, &options).map_err(unresized)
    }
}

/// The only way to memory for a picture: past the limits.
struct Room<'a> {
    limits: Limits,
    /// Bytes of the encoded picture.
    encoded: usize,
    /// Bytes of what was cut from it, at most.
    copy: usize,
    output: Size,
    pixels: &'a mut Vec<u8>,
    /// Kept from an earlier picture, without a use for this one.
    spare: &'a mut Vec<u8>,
    resizer: &'a mut fir::Resizer,
}

impl Room<'_> {
    /// Refuses a picture of too many pixels.
    fn admit(&self, picture: Size) -> Result<()> {
        let (Size { width, height }, limit) = (picture, self.limits.pixels);
        match picture.pixels() {
            pixels if pixels > limit => Err(over(format!("{width}x{height} = {pixels} pixels; the limit is {limit}"))),
            _ => Ok(()),
        }
    }

    /// `own` bytes (of any content) for the pixels of a picture of size `picture`, if they, `theirs` of the decoder
    /// and those of the resizing are within the limits.
    fn take(&mut self, picture: Size, own: u64, theirs: u64) -> Result<&mut [u8]> {
        self.admit(picture)?;
        let Size { width, height } = picture;
        let (resizing, limit) = (resizing(picture, self.output), self.limits.memory as u64);
        let theirs = theirs.saturating_add(self.encoded as u64).saturating_add(self.copy as u64);
        let sum = own.saturating_add(theirs).saturating_add(resizing);
        if sum > limit {
            return Err(over(format!("{width}x{height} pixels take {sum} bytes to decode; the limit is {limit}")));
        }
        let kept = (self.pixels.len().max(own as usize) + self.resizer.size_of_internal_buffers()) as u64;
        let spare = self.spare.capacity() as u64;
        if kept.max(own.saturating_add(resizing)).saturating_add(theirs).saturating_add(spare) > limit {
            // What earlier pictures left would not leave enough for this one.
            *self.pixels = Vec::new();
            *self.spare = Vec::new();
            self.resizer.reset_internal_buffers();
        }
        if self.pixels.len() < own as usize {
            // Freed first: nothing of the old pixels is needed.
            *self.pixels = Vec::new();
            *self.pixels = vec![0; own as usize];
        }
        Ok(&mut self.pixels[..own as usize])
    }
}

/// Heap bytes of scaling a picture to `output`, at most: the rows between the two passes, the weights of the widest
/// filter (6 source pixels per output pixel, in f64 and once more as integers), and the output before its last pass,
/// as it is stored and turned upright.
fn resizing(picture: Size, output: Size) -> u64 {
    let sides = [picture.width, picture.height, output.width, output.height].map(u64::from);
    let rows = 3 * (u64::from(picture.width) + 1) * u64::from(output.height);
    let weights = 16 * 8 * sides.iter().sum::<u64>();
    rows + weights + 6 * output.pixels()
}

/// Sizes that do not fit each other; they are computed here, so this is a defect of this crate.
fn unresized(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    bad("the picture could not be resized").with_source(error)
}

/// What the first bytes say.
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

/// Names what it is, where that is known, and the first bytes in any case.
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
