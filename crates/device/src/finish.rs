//! Conversion of `u8` pictures to floats after their copy, so that the bus carries one byte per
//! value instead of four.
//!
//! ```text
//! slot [B, H, W, C] u8 ── copy ──► [B, H, W, C] u8 ── Finish ──► [B, H, W, C] or [B, C, H, W] f32, f16, bf16
//!      host                        device             y = (x / 255 - mean) / std per channel, mirrored where drawn
//! ```
//!
//! The rule is exact, and the same on the CPU (this file), on a GPU (by this file's table) and in
//! the image decoder (`decode/image/finish.rs`), bit for bit:
//!
//! ```text
//! y = dtype(f32(f32(f32(x / 255) - mean) / std))        each rounded to nearest, ties to even; never fused
//! ```
//!
//! A `u8` has 256 values, so each field gets one table with 256 results per channel. The CPU and
//! the kernels (`cuda/kernels/finish.cu`) look results up in it.
//!
//! Limits: 1 to 4 channels, fewer than 2^31 values per picture, every result finite in its dtype.
//! `build` checks all of them, and the kernels rely on them.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::tensor::{DType, EncodedField, Field, Shape, bf16, f16, normalized};

/// Maximum channels of a picture: the kernels' table has this many.
const CHANNELS_MAX: usize = 4;

/// Conversion of a `u8` image field after its copy to the device: dtype, normalisation, layout,
/// flip.
///
/// ```
/// # use feedline_core::tensor::{DType, Field, Shape};
/// # use feedline_device::Finish;
/// let finish = Finish::to(DType::F16).mean_std(&[0.485, 0.456, 0.406], &[0.229, 0.224, 0.225]).channels_first();
/// let pictures = Field::fixed("image", DType::U8, [224, 224, 3]);
/// let made = finish.output(&pictures)?;
/// assert_eq!((made.dtype(), made.shape()), (DType::F16, &Shape::Fixed(vec![3, 224, 224])));
/// # Ok::<(), feedline_base::Error>(())
/// ```
///
/// Each value `x` becomes `y = (x / 255 - mean) / std`, as in torchvision's `ToTensor` and
/// `Normalize`: three operations in `f32`, each rounded, then the result to `F16` or `BF16`.
/// Rounding is to nearest, ties to even. Results are identical to the last bit on a CPU, on a GPU,
/// and in a normalising decoder (`decode::Image::normalize`).
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    dtype: DType,
    mean: Vec<f32>,
    std: Vec<f32>,
    channels_first: bool,
    /// The probability of a mirrored picture.
    #[doc(hidden)]
    pub flip: f64,
}

impl Finish {
    /// Converts to this dtype: [`DType::F32`], [`DType::F16`] or [`DType::BF16`];
    /// [`Finish::output`] refuses others.
    ///
    /// Without [`Finish::mean_std`], the values are in 0..=1. By default the output has the layout
    /// of the input, and no picture is mirrored.
    pub fn to(dtype: DType) -> Self {
        Self {
            dtype,
            mean: vec![0.0],
            std: vec![1.0],
            channels_first: false,
            flip: 0.0,
        }
    }

    /// Mean and standard deviation, in units of 0..=1 (255 is 1); one per channel, or one for all.
    #[must_use]
    pub fn mean_std(mut self, mean: &[f32], std: &[f32]) -> Self {
        self.mean = mean.to_vec();
        self.std = std.to_vec();
        self
    }

    /// Makes pictures `[C, H, W]` instead of `[H, W, C]`.
    #[must_use]
    pub fn channels_first(mut self) -> Self {
        self.channels_first = true;
        self
    }

    /// Mirrors a picture left to right with this probability, 0..=1. The draw depends on (seed,
    /// epoch, id).
    #[must_use]
    pub fn flip(mut self, probability: f64) -> Self {
        self.flip = probability;
        self
    }

    /// The output field for `input`: the same name, the new dtype, `[H, W, C]` or `[C, H, W]`.
    ///
    /// Errors: [`ErrorKind::Config`] in these cases:
    /// * `input` is not `u8` of a fixed shape `[H, W, C]` with 1 to 4 channels and fewer than 2^31
    ///   values;
    /// * the dtype is not a float of at most 32 bits;
    /// * a mean is not finite, or a std is not finite and above 0;
    /// * the number of means or stds is neither 1 nor C;
    /// * the flip is not a probability;
    /// * a result would overflow the dtype.
    pub fn output(&self, input: &Field) -> Result<Field> {
        self.checked(input).map(|(size, _)| self.made(input, size))
    }

    /// Converts `rows` pictures on the CPU, as a loader does on the host device. Makes the table of
    /// values on each call.
    ///
    /// `pictures` holds `[rows, H, W, C]` as `input` declares. `out` receives `[rows, H, W, C]` or
    /// `[rows, C, H, W]` in native byte order, at any address. `flips` has one byte per picture,
    /// nonzero to mirror it; `None` mirrors none.
    ///
    /// Errors: as [`Finish::output`]; [`ErrorKind::Shape`] if a length does not match.
    pub fn apply(
        &self,
        input: &Field,
        rows: usize,
        pictures: &[u8],
        flips: Option<&[u8]>,
        out: &mut [u8],
    ) -> Result<()> {
        let plan = self.plan(input)?;
        let fits = |what: &str, len: usize, row: usize| match row.checked_mul(rows) {
            Some(expected) if expected == len => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Shape,
                Stage::Device,
                format!(
                    "field `{}`: {what} has {len} bytes; {rows} pictures need {row} each",
                    input.name()
                ),
            )),
        };
        fits("the input", pictures.len(), plan.input_bytes())?;
        fits("the output", out.len(), plan.output_bytes())?;
        if let Some(flips) = flips {
            fits("the list of flips", flips.len(), 1)?;
        }
        let pairs = pictures
            .chunks_exact(plan.input_bytes())
            .zip(out.chunks_exact_mut(plan.output_bytes()));
        for (row, (picture, out)) in pairs.enumerate() {
            let flip = flips
                .and_then(|flips| flips.get(row))
                .is_some_and(|flip| *flip != 0);
            plan.run_row(picture, flip, out);
        }
        Ok(())
    }

    /// Precomputes the parts that do not depend on the pictures, once per field. Errors: as
    /// [`Finish::output`].
    #[doc(hidden)]
    pub fn plan(&self, input: &Field) -> Result<FinishPlan> {
        let (size, moments) = self.checked(input)?;
        let table = match self.dtype {
            DType::F16 => {
                ConvertTable::Two(table(&moments, size, |y| f16::from_f32(y).to_ne_bytes()))
            }
            DType::BF16 => {
                ConvertTable::Two(table(&moments, size, |y| bf16::from_f32(y).to_ne_bytes()))
            }
            _ => ConvertTable::Four(table(&moments, size, f32::to_ne_bytes)),
        };
        Ok(FinishPlan {
            size,
            dtype: self.dtype,
            channels_first: self.channels_first,
            table,
        })
    }

    fn made(&self, input: &Field, size: Size) -> Field {
        let Size {
            height,
            width,
            channels,
        } = size;
        let dims = if self.channels_first {
            [channels, height, width]
        } else {
            [height, width, channels]
        };
        Field::fixed(input.name(), self.dtype, dims)
    }

    fn checked(&self, input: &Field) -> Result<(Size, Moments)> {
        let named = |message: String| {
            let message = format!("field `{}` cannot be finished: {message}", input.name());
            Error::new(ErrorKind::Config, Stage::Build, message)
        };
        let size = Size::of(input).map_err(named)?;
        self.moments(size.channels)
            .map_err(named)
            .map(|moments| (size, moments))
    }

    /// Checks all settings, and returns each channel's mean and std.
    fn moments(&self, channels: usize) -> Result<Moments, String> {
        let max = match self.dtype {
            DType::F32 => f32::MAX,
            DType::F16 => f16::MAX.to_f32(),
            DType::BF16 => bf16::MAX.to_f32(),
            other => return Err(format!("the dtype is {other}; use f32, f16 or bf16")),
        };
        if !(0.0..=1.0).contains(&self.flip) {
            return Err(format!(
                "the flip probability is {}; it must be in 0..=1",
                self.flip
            ));
        }
        let mut moments = Moments {
            mean: [0.0; CHANNELS_MAX],
            std: [1.0; CHANNELS_MAX],
        };
        for c in 0..channels {
            let mean = each("mean", &self.mean, c, channels)?;
            let std = each("std", &self.std, c, channels)?;
            if !mean.is_finite() || !std.is_finite() || std <= 0.0 {
                return Err(format!(
                    "channel {c} has mean {mean} and std {std}; both must be finite, std above 0"
                ));
            }
            moments.mean[c] = mean;
            moments.std[c] = std;
            // Every step of the rule is monotonic, including rounding, so 0 and 255 give the
            // smallest and largest results. The difference is finite because the mean is; the last
            // division may overflow.
            let fits = |x: u8| moments.of(c, x).abs() <= max;
            if !fits(0) || !fits(255) {
                return Err(format!(
                    "with mean {mean} and std {std}, channel {c} has values too large for {}",
                    self.dtype
                ));
            }
        }
        Ok(moments)
    }
}

/// A channel's value from a list with one value per channel, or one value for all.
fn each(what: &str, values: &[f32], channel: usize, channels: usize) -> Result<f32, String> {
    let at = if values.len() == 1 { 0 } else { channel };
    match values.get(at) {
        Some(value) if values.len() == 1 || values.len() == channels => Ok(*value),
        _ => Err(format!(
            "{} values of {what} for {channels} channels; set 1 or {channels}",
            values.len()
        )),
    }
}

/// Mean and std per channel; 0 and 1 for absent channels.
struct Moments {
    mean: [f32; CHANNELS_MAX],
    std: [f32; CHANNELS_MAX],
}

impl Moments {
    /// Applies the rule to one value, without the dtype conversion.
    fn of(&self, channel: usize, x: u8) -> f32 {
        normalized(x, self.mean[channel], self.std[channel])
    }
}

/// Dimensions of one picture, each at least 1; `height * width * channels < 2^31`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    /// Lines.
    pub(crate) height: usize,
    /// Pixels per line.
    pub(crate) width: usize,
    /// Values per pixel, 1 to 4.
    pub(crate) channels: usize,
}

impl Size {
    fn of(input: &Field) -> Result<Self, String> {
        let wanted = "it must be u8 of a fixed shape [H, W, C] with 1 to 4 channels";
        let dims = match input.shape() {
            _ if input.varies_by_group() => {
                return Err("its shape depends on the group: let the decoder make floats".into());
            }
            Shape::Fixed(dims) if input.dtype() == DType::U8 => dims.as_slice(),
            _ => {
                return Err(format!(
                    "{wanted}, not {}",
                    EncodedField::raw(input.clone()).encoding
                ));
            }
        };
        let &[height, width, channels @ 1..=CHANNELS_MAX] = dims else {
            return Err(format!("{wanted}, not {dims:?}"));
        };
        match height
            .checked_mul(width)
            .and_then(|plane| plane.checked_mul(channels))
        {
            Some(values) if values > 0 && i32::try_from(values).is_ok() => Ok(Self {
                height,
                width,
                channels,
            }),
            _ => Err(format!(
                "the picture is {dims:?}; it must have 1 to 2^31 - 1 values"
            )),
        }
    }

    fn values(self) -> usize {
        self.height * self.width * self.channels
    }
}

/// For each channel, the results of all 256 pixel values, `N` bytes each; zeros for absent
/// channels.
type FinishValues<const N: usize> = Box<[[[u8; N]; 256]; CHANNELS_MAX]>;

enum ConvertTable {
    Two(FinishValues<2>),
    Four(FinishValues<4>),
}

fn table<const N: usize>(
    moments: &Moments,
    size: Size,
    bytes: impl Fn(f32) -> [u8; N],
) -> FinishValues<N> {
    let mut table = Box::new([[[0; N]; 256]; CHANNELS_MAX]);
    for (channel, entries) in table.iter_mut().enumerate().take(size.channels) {
        for (x, entry) in (0..=255).zip(entries) {
            *entry = bytes(moments.of(channel, x));
        }
    }
    table
}

/// A [`Finish`] for one field, ready to run: by [`FinishPlan::run_row`] on the CPU, by kernels on a
/// GPU.
pub struct FinishPlan {
    /// Dimensions of a picture.
    pub(crate) size: Size,
    /// Output dtype: `F32`, `F16` or `BF16`.
    pub(crate) dtype: DType,
    /// Whether the output is `[C, H, W]`.
    pub(crate) channels_first: bool,
    table: ConvertTable,
}

impl FinishPlan {
    /// Input bytes of one picture.
    pub fn input_bytes(&self) -> usize {
        self.size.values()
    }

    /// Output bytes of one picture.
    pub fn output_bytes(&self) -> usize {
        self.size.values() * self.dtype.size()
    }

    /// The table as the kernels read it: 256 results per channel.
    pub(crate) fn table(&self) -> &[u8] {
        match &self.table {
            ConvertTable::Two(table) => table.as_flattened().as_flattened(),
            ConvertTable::Four(table) => table.as_flattened().as_flattened(),
        }
    }

    /// Converts one picture without allocating.
    ///
    /// `input` has [`FinishPlan::input_bytes`]; `out` has [`FinishPlan::output_bytes`], at any
    /// address.
    pub fn run_row(&self, input: &[u8], flip: bool, out: &mut [u8]) {
        debug_assert_eq!(
            (input.len(), out.len()),
            (self.input_bytes(), self.output_bytes())
        );
        match &self.table {
            ConvertTable::Two(table) => self.channels(table, input, flip, out.as_chunks_mut().0),
            ConvertTable::Four(table) => self.channels(table, input, flip, out.as_chunks_mut().0),
        }
    }

    fn channels<const N: usize>(
        &self,
        table: &FinishValues<N>,
        input: &[u8],
        flip: bool,
        out: &mut [[u8; N]],
    ) {
        match self.size.channels {
            1 => self.spread::<N, 1>(table, input, flip, out),
            2 => self.spread::<N, 2>(table, input, flip, out),
            3 => self.spread::<N, 3>(table, input, flip, out),
            _ => self.spread::<N, 4>(table, input, flip, out),
        }
    }

    fn spread<const N: usize, const C: usize>(
        &self,
        table: &FinishValues<N>,
        input: &[u8],
        flip: bool,
        out: &mut [[u8; N]],
    ) {
        let pixels = input.as_chunks::<C>().0;
        let Size { height, width, .. } = self.size;
        if !self.channels_first {
            let out = out.as_chunks_mut::<C>().0;
            return lines(pixels, width, flip, out, |pixel| {
                std::array::from_fn(|c| table[c][usize::from(pixel[c])])
            });
        }
        for (c, plane) in out.chunks_exact_mut(height * width).enumerate().take(C) {
            lines(pixels, width, flip, plane, |pixel| {
                table[c][usize::from(pixel[c])]
            });
        }
    }
}

/// Maps pixels to `out`, line by line; with `flip`, each line backwards.
fn lines<P, T>(pixels: &[P], width: usize, flip: bool, out: &mut [T], made: impl Fn(&P) -> T) {
    for (line, out) in pixels.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let put = |(out, pixel): (&mut T, &P)| *out = made(pixel);
        if flip {
            out.iter_mut().zip(line.iter().rev()).for_each(put);
        } else {
            out.iter_mut().zip(line).for_each(put);
        }
    }
}
