//! Settings of a picture decoder: crop, size, values, limits.

use super::finish::Values;
use super::geometry::{Crop, Rect, Size, center, cover, random_rect};
use super::limits::Limits;
use super::patches::{Patches, Rule};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::order::{Draws, GROUPS_MAX};
use feedline_core::tensor::DType;
use std::sync::Arc;

/// Longest side of an output.
const SIDE_MAX: u32 = 16_384;

/// Crop and output size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// The whole picture, to exactly this size.
    Resize(Size),
    /// `Resize(shorter side)` then `CenterCrop(size)`.
    CenterCrop { resize: u32, size: u32 },
    /// Scaled until both sides cover this size, then cropped to it: centrally, or at a random
    /// position.
    Cover { size: Size, random: bool },
    /// `RandomResizedCrop(size, scale, ratio)`.
    RandomResizedCrop {
        size: u32,
        scale: (f64, f64),
        ratio: (f64, f64),
    },
    /// The whole picture, to sides of whole patches.
    Patches(Patches),
}

/// Order of a row's dimensions (N is the batch).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelLayout {
    /// Height, width, channel: as decoded.
    Nhwc,
    /// Channel, height, width: the default of PyTorch's convolutions.
    Nchw,
}

/// Filter for resizing. All except `Nearest` average all source pixels under an output pixel
/// (antialiasing), as Pillow does, and torchvision by default. Values are bit-identical to those of
/// Pillow 11.3; newer versions round differently for some tall pictures.
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

/// Decodes JPEG, PNG, WebP, BMP or GIF, identified by their first bytes; then crops, resizes, flips
/// and converts.
///
/// A JPEG is decoded only as far as the crop needs. In files with restart markers, even entropy
/// decoding beside the crop is skipped. Pixels are bit-identical to those of libjpeg-turbo, and so
/// to those of Pillow and torchvision. This includes progressive JPEGs, and sequential ones with
/// several scans.
///
/// The row is `[height, width, 3]`, or `[3, height, width]` in [`PixelLayout::Nchw`]; see also
/// [`Image::patches`]. Random choices depend only on (seed, epoch, sample id, draw number); see
/// [`Ctx::draws`](feedline_core::decode::Ctx::draws).
///
/// # Several pictures in a sample
///
/// All decoders of a sample draw the same numbers, whatever their fields, output sizes and filters.
/// So two pictures of one size (left and right, before and after, picture and mask) get the same
/// crop and the same flip, if both are decoded with the same kind of crop; this is promised for all
/// datasets. Of pictures that differ in size, each is flipped alike but cropped by its own size:
/// [`paired`](Self::paired) refuses such a sample. For lists of pictures see
/// [`Each`](feedline_core::decode::Each).
///
/// # Memory
///
/// One decode takes at most this many heap bytes, per pixel of the encoded picture unless noted:
/// - RGB pixels: 3 (kept for the next picture). 4 to 8 for a PNG with alpha or 16 bits, 4 for a
///   GIF. None for a JPEG, whose rows are scaled as they are decoded.
/// - Decoder, while it runs: 1 for PNG and BMP; 8 for WebP, and for an animation also one encoded
///   frame. A JPEG takes 512 per pixel of width for rows; with several scans, up to 272 more per
///   pixel of width, and up to 140 KiB of tables for each scan; with `strict(false)`, an incomplete
///   progressive one takes 1/8 more per pixel.
/// - Tables: 4 MiB for formats other than JPEG, 256 KiB for JPEG; 8 bytes per restart interval.
/// - Copies of the file's metadata: as many bytes as the encoded picture has.
/// - Resizing, with T source pixels under an output pixel in each direction: per column of the
///   output 12 × (T + 8) for rows and 24 × (T + 2) for weights; 12 per column of the source; 6 per
///   pixel of the largest output.
///
/// The sum is computed from the header and compared with [`Limits::memory`] before any of it is
/// allocated. By default, pictures of any format fit if they are within the default of
/// [`Limits::pixels`].
///
/// ```
/// # use feedline_image::{Image, PixelLayout};
/// # use feedline_core::tensor::DType;
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
    pub(super) op: Op,
    /// The sizes of [`buckets`](Self::buckets).
    pub(super) buckets: Option<Arc<[Size]>>,
    pub(super) flip: f64,
    pub(super) values: Values,
    pub(super) layout: PixelLayout,
    pub(super) filter: Filter,
    pub(super) limits: Limits,
    pub(super) strict: bool,
    pub(super) scaling: bool,
    pub(super) orient: bool,
    pub(super) paired: bool,
    /// A setting that was made but does not apply to this kind of output.
    pub(super) misplaced: Option<Misplaced>,
}

/// A setting that does not apply to this kind of output: its name, and the kind of output to which
/// it applies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Misplaced {
    pub(super) setting: &'static str,
    pub(super) of: &'static str,
}

impl Op {
    /// The size of the output, or of a patch.
    pub(super) fn output(&self) -> Size {
        match *self {
            Self::Resize(size) | Self::Cover { size, .. } => size,
            Self::CenterCrop { size, .. }
            | Self::RandomResizedCrop { size, .. }
            | Self::Patches(Patches { size, .. }) => Size::new(size, size),
        }
    }

    /// Whether the part of the picture is drawn.
    pub(super) fn is_random(&self) -> bool {
        match *self {
            Self::RandomResizedCrop { .. } => true,
            Self::Cover { random, .. } => random,
            Self::Resize(_) | Self::CenterCrop { .. } | Self::Patches(_) => false,
        }
    }

    /// Maximum pixels of an output.
    pub(super) fn most_pixels(&self) -> u64 {
        let patches = if let Self::Patches(patches) = self {
            u64::from(patches.most)
        } else {
            1
        };
        patches * self.output().pixels()
    }

    /// The part of a picture of size `picture` (no side 0) that becomes the output.
    pub(super) fn crop(&self, picture: Size, draws: &mut Draws) -> Crop {
        match *self {
            Self::Resize(size) => Crop::of_view(Rect::of(picture), size),
            Self::CenterCrop { resize, size } => center(picture, resize, size),
            Self::Cover { size, random } => cover(picture, size, random.then_some(draws)),
            Self::Patches(patches) => Crop::of_view(Rect::of(picture), patches.output(picture)),
            Self::RandomResizedCrop { scale, ratio, .. } => {
                Crop::of_view(random_rect(picture, scale, ratio, draws), self.output())
            }
        }
    }
}

impl Image {
    /// The whole picture, scaled to `width` × `height` pixels.
    pub fn resize(width: u32, height: u32) -> Self {
        Self::new(Op::Resize(Size::new(width, height)))
    }

    /// The middle `size` × `size` pixels of the picture, after scaling its shorter side to
    /// `resize_shorter_side`.
    ///
    /// The same as torchvision's `Resize` and `CenterCrop`. `build()` refuses a `size` over
    /// `resize_shorter_side`.
    pub fn center_crop(resize_shorter_side: u32, size: u32) -> Self {
        Self::new(Op::CenterCrop {
            resize: resize_shorter_side,
            size,
        })
    }

    /// A random part of the picture, scaled to `size` × `size` pixels: torchvision's
    /// `RandomResizedCrop`.
    pub fn random_resized_crop(size: u32) -> Self {
        Self::new(Op::RandomResizedCrop {
            size,
            scale: (0.08, 1.0),
            ratio: (3.0 / 4.0, 4.0 / 3.0),
        })
    }

    /// The whole picture as square patches of `size` × `size` pixels, at most `most` of them.
    ///
    /// The picture keeps its aspect ratio and, if it fits, its size: sides are rounded up to whole
    /// patches, as by SigLIP2 NaFlex in Hugging Face's transformers. A larger one is scaled down.
    /// The fields of a row, for an encoded field `image`:
    ///
    /// | field | shape | content |
    /// |---|---|---|
    /// | `image` | up to `most` of `[size · size · 3]` | patches, row by row; values in the order height, width, channel, in [`PixelLayout::Nchw`] channel, height, width |
    /// | `image.positions` | up to `most` of `[2]`, `i32` | row and column of each patch |
    /// | `image.grid` | `[2]`, `i32` | rows and columns of patches |
    /// | `image.size` | `[2]`, `i32` | height and width of the picture before it was scaled |
    ///
    /// `FieldView::lens` has the numbers of patches; their cumulative
    /// sums are the `cu_seqlens` of a batch.
    /// `build()` refuses `most` patches that have more than 2²⁴ pixels side by side.
    pub fn patches(size: u32, most: u32) -> Self {
        Self::new(Op::Patches(Patches {
            size,
            most,
            rule: Rule::Native,
        }))
    }

    pub(super) fn new(op: Op) -> Self {
        Self {
            op,
            buckets: None,
            flip: 0.0,
            values: Values {
                dtype: DType::U8,
                normalize: None,
            },
            layout: PixelLayout::Nhwc,
            filter: Filter::default(),
            limits: Limits::default(),
            strict: true,
            scaling: false,
            orient: false,
            paired: false,
            misplaced: None,
        }
    }

    /// Smallest and largest share of the picture's area for a random crop; 0.08 to 1 by default.
    /// `build()` refuses it for other crops.
    #[must_use]
    pub fn scale(mut self, low: f64, high: f64) -> Self {
        match &mut self.op {
            Op::RandomResizedCrop { scale, .. } => *scale = (low, high),
            _ => self.misplace("scale", "random_resized_crop"),
        }
        self
    }

    /// Smallest and largest width / height of a random crop; 3/4 to 4/3 by default.
    /// `build()` refuses it for other crops.
    #[must_use]
    pub fn ratio(mut self, low: f64, high: f64) -> Self {
        match &mut self.op {
            Op::RandomResizedCrop { ratio, .. } => *ratio = (low, high),
            _ => self.misplace("ratio", "random_resized_crop"),
        }
        self
    }

    /// Whether a picture with fewer [patches](Self::patches) than the maximum is enlarged until no
    /// more patches fit, at most 100-fold per side, as by SigLIP2 NaFlex; false by default.
    /// `build()` refuses it for other crops, and together with [`merge`](Self::merge).
    #[must_use]
    pub fn enlarge(mut self, enlarge: bool) -> Self {
        match &mut self.op {
            Op::Patches(Patches {
                rule: Rule::Merge { .. },
                ..
            }) => self.misplace("enlarge", "patches without merge"),
            Op::Patches(patches) if enlarge => patches.rule = Rule::Enlarge,
            Op::Patches(patches) => patches.rule = Rule::Native,
            _ => self.misplace("enlarge", "patches"),
        }
        self
    }

    /// Makes [patches](Self::patches) for a model that merges blocks of `side` × `side` patches.
    /// Sizes follow `smart_resize` of Qwen2-VL in Hugging Face's transformers, with at least
    /// `least` patches, in the order of blocks. `build()` refuses it for other crops.
    ///
    /// Sides are rounded to the nearest whole block. `Image::patches(14, 5120).merge(2, 16)` are
    /// Qwen2-VL's defaults. A picture with a side over 200 times the other is an error of the
    /// sample. Below that, a strip that is too long is cut to the budget.
    #[must_use]
    pub fn merge(mut self, side: u32, least: u32) -> Self {
        match &mut self.op {
            Op::Patches(patches) if patches.rule == Rule::Enlarge => {
                self.misplace("enlarge", "patches without merge");
            }
            Op::Patches(patches) => patches.rule = Rule::Merge { side, least },
            _ => self.misplace("merge", "patches"),
        }
        self
    }

    pub(super) fn misplace(&mut self, setting: &'static str, of: &'static str) {
        self.misplaced = Some(Misplaced { setting, of });
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

    /// Normalises each channel: scales values to 0..1, subtracts `mean`, divides by `std`. Not for
    /// `U8`.
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
    /// If false, its readable part is decoded, as by browsers and Pillow, and the rest is grey. A
    /// damaged progressive JPEG has the pixels of libjpeg-turbo 3.1, which smooths incomplete
    /// parts; this takes twice the time. Stray bytes between the segments of a header count as
    /// damage even if no pixel changes: the bytes after them may be an overwritten segment.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Whether a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size; false by default.
    ///
    /// The smaller size is used if the crop stays at least as large as the output. Other formats
    /// ignore this. Scaling saves much of the work other than entropy decoding. Pixels change,
    /// because blocks are averaged before the filter averages: on photo-like pictures by 0.6 to 1.8
    /// of 255 in the mean, by at most 26. Before the filter, they are bit-identical to those of
    /// libjpeg-turbo at that scale.
    #[must_use]
    pub fn dct_scaling(mut self, scaling: bool) -> Self {
        self.scaling = scaling;
        self
    }

    /// Whether to apply a JPEG's EXIF orientation, as Pillow's `ImageOps.exif_transpose`; false by
    /// default, as in torchvision.
    ///
    /// The crop is chosen in the upright picture and mapped back, and only the output is turned. An
    /// unreadable tag counts as upright. Other formats decode as stored; the EXIF data of PNG and
    /// WebP is ignored.
    #[must_use]
    pub fn exif_orientation(mut self, apply: bool) -> Self {
        self.orient = apply;
        self
    }

    /// Whether the pictures of a sample must have one size for a random crop; false by default.
    ///
    /// If true, a picture that differs in size from the one that was cropped at random before it in
    /// the same sample, by a decoder that is `paired`, too, is an error of the sample
    /// ([`ErrorKind::Shape`]) with both sizes: one crop does not fit both.
    #[must_use]
    pub fn paired(mut self, paired: bool) -> Self {
        self.paired = paired;
        self
    }

    /// Refuses illegal parameters.
    pub(super) fn check(&self) -> Result<()> {
        let config = |message: String| Err(Error::new(ErrorKind::Config, Stage::Build, message));
        if let Some(Misplaced { setting, of }) = self.misplaced {
            return config(format!(
                "`{setting}` is for `{of}`: leave it out for these pictures"
            ));
        }
        let output = [self.op.output()];
        let sizes = self.buckets.as_deref().unwrap_or(&output);
        if !(1..=GROUPS_MAX).contains(&sizes.len()) {
            return config(format!(
                "{} buckets of pictures; give 1 to {GROUPS_MAX}",
                sizes.len()
            ));
        }
        let illegal = sizes.iter().find(|size| {
            ![size.width, size.height]
                .iter()
                .all(|side| (1..=SIDE_MAX).contains(side))
        });
        if let Some(Size { width, height }) = illegal {
            return config(format!(
                "an output of {width}x{height} pixels: each side must be 1 to {SIDE_MAX}"
            ));
        }
        match self.op {
            Op::Patches(patches) => patches.check().or_else(config)?,
            Op::CenterCrop { resize, size } if resize < size || resize > SIDE_MAX => {
                return config(format!(
                    "a centre crop of {size} pixels from a shorter side of {resize}: the side \
                     must be at least the crop and at most {SIDE_MAX}"
                ));
            }
            Op::RandomResizedCrop {
                scale: (low, high), ..
            } if !(0.0 < low && low <= high && high <= 1.0) => {
                return config(format!(
                    "crop scale {low} to {high}: both must be above 0 and at most 1, the first \
                     not larger"
                ));
            }
            Op::RandomResizedCrop {
                ratio: (low, high), ..
            } if !(0.0 < low && low <= high && high.is_finite()) => {
                return config(format!(
                    "crop ratio {low} to {high}: both must be finite and above 0, the first not \
                     larger"
                ));
            }
            _ => {}
        }
        if !(0.0..=1.0).contains(&self.flip) {
            return config(format!("flip probability {}: it must be 0 to 1", self.flip));
        }
        match self.values {
            Values {
                dtype: DType::U8,
                normalize: Some(_),
            } => config("u8 pixels cannot be normalised: choose another dtype".into()),
            Values {
                dtype: DType::U8 | DType::F32 | DType::F16 | DType::BF16,
                normalize,
            } => match normalize {
                Some((mean, std))
                    if !(mean.iter().all(|v| v.is_finite())
                        && std.iter().all(|v| v.is_normal())) =>
                {
                    config(format!(
                        "mean {mean:?} and std {std:?}: they must be finite, std not 0"
                    ))
                }
                _ => Ok(()),
            },
            Values { dtype, .. } => config(format!(
                "pixels as {dtype}: u8, f32, f16 and bf16 are supported"
            )),
        }
    }

    /// The largest divisor (1, 2, 4 or 8) of a JPEG's size at which `crop` is still as large as the
    /// output.
    pub(super) fn scale_of(&self, crop: &Crop) -> u32 {
        if !self.scaling {
            return 1;
        }
        [8, 4, 2]
            .into_iter()
            .find(|scale| {
                let scaled = |side: f64| side / f64::from(*scale);
                let Size { width, height } = crop.whole;
                scaled(crop.part.width) >= f64::from(width)
                    && scaled(crop.part.height) >= f64::from(height)
            })
            .unwrap_or(1)
    }
}
