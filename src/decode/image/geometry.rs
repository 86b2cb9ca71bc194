//! Which part of a picture becomes the output. Pure arithmetic, after torchvision's `transforms`.

use crate::order::Draws;

/// Width and height in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) width: u32,
    pub(super) height: u32,
}

impl Size {
    pub(super) fn new(width: u32, height: u32) -> Self {
        Self { width, height }
    }

    pub(super) fn pixels(self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }
}

/// What the picture is cut to and scaled to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// The whole picture, to exactly this size.
    Resize(Size),
    /// `Resize(shorter side)` then `CenterCrop(size)`.
    CenterCrop { resize: u32, size: u32 },
    /// `RandomResizedCrop(size, scale, ratio)`.
    RandomResizedCrop { size: u32, scale: (f64, f64), ratio: (f64, f64) },
}

/// A rectangle of whole pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rect {
    pub(super) left: u32,
    pub(super) top: u32,
    pub(super) size: Size,
}

/// The source of the resampling: `view` is all that its filter may see (torchvision crops first, so pixels outside of
/// a random crop must not bleed in), `part` is the rectangle of the view that is scaled to the output (a centre crop
/// of the scaled picture is a part with fractional edges of the whole picture, whose neighbours do count).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Crop {
    pub(super) view: Rect,
    pub(super) part: Part,
}

/// A rectangle of the view, in pixels and fractions of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Part {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// Source pixels, times the scaling, that the widest filter (Lanczos3) looks at on either side.
const FILTER_RADIUS: f64 = 3.0;

impl Op {
    /// The size of the output.
    pub(super) fn output(&self) -> Size {
        match *self {
            Self::Resize(size) => size,
            Self::CenterCrop { size, .. } | Self::RandomResizedCrop { size, .. } => Size::new(size, size),
        }
    }

    /// The part of a picture of size `picture` (no side 0) that becomes the output.
    pub(super) fn crop(&self, picture: Size, draws: &mut Draws) -> Crop {
        match *self {
            Self::Resize(_) => Crop::of_view(Rect { left: 0, top: 0, size: picture }),
            Self::CenterCrop { resize, size } => center(picture, resize, size),
            Self::RandomResizedCrop { scale, ratio, .. } => Crop::of_view(random_rect(picture, scale, ratio, draws)),
        }
    }
}

impl Crop {
    pub(super) fn of_view(view: Rect) -> Self {
        let Size { width, height } = view.size;
        Self { view, part: Part { left: 0.0, top: 0.0, width: f64::from(width), height: f64::from(height) } }
    }

    /// Rows from the top of the picture that matter to an output of size `output`, with any filter.
    pub(super) fn rows(&self, output: Size) -> u32 {
        let pitch = (self.part.height / f64::from(output.height)).max(1.0);
        let bottom = self.part.top + self.part.height + FILTER_RADIUS * pitch + 1.0;
        // The part lies in the view, so the cast is of a small number.
        self.view.top + (bottom.ceil() as u32).min(self.view.size.height)
    }

    /// The same crop of a picture of which only the first `rows` rows are there; all that matter are.
    pub(super) fn within(mut self, rows: u32) -> Self {
        self.view.size.height = self.view.size.height.min(rows - self.view.top);
        self
    }
}

/// The part that `Resize(resize)` followed by `CenterCrop(size)` shows, for `size <= resize`.
fn center(picture: Size, resize: u32, size: u32) -> Crop {
    let shorter = u64::from(picture.width.min(picture.height));
    // torchvision: the longer side is int(resize * long / short).
    let scaled = |side: u32| u64::from(resize) * u64::from(side) / shorter;
    let (left, width) = center_of(picture.width, scaled(picture.width), size);
    let (top, height) = center_of(picture.height, scaled(picture.height), size);
    Crop { view: Rect { left: 0, top: 0, size: picture }, part: Part { left, top, width, height } }
}

/// Start and length, in pixels of a side of `side` pixels, of the middle `size` of its `scaled` pixels.
fn center_of(side: u32, scaled: u64, size: u32) -> (f64, f64) {
    let rest = scaled - u64::from(size);
    if rest == 0 {
        // Exactly the side: a product of quotients could end a rounding error outside of the picture.
        return (0.0, f64::from(side));
    }
    let pitch = f64::from(side) / scaled as f64;
    // Python's round() goes to the even neighbour at one half.
    let start = (rest as f64 / 2.0).round_ties_even();
    (start * pitch, f64::from(size) * pitch)
}

/// torchvision's `RandomResizedCrop.get_params`: ten tries, then the largest central part of a legal ratio.
fn random_rect(picture: Size, scale: (f64, f64), ratio: (f64, f64), draws: &mut Draws) -> Rect {
    let Size { width, height } = picture;
    let area = picture.pixels() as f64;
    let (log_low, log_high) = (ratio.0.ln(), ratio.1.ln());
    for _ in 0..10 {
        let target = area * draws.range_f64(scale.0, scale.1);
        let aspect = draws.range_f64(log_low, log_high).exp();
        // Rounded as Python does; a cast of a float saturates, so absurd ratios are simply too large.
        let w = (target * aspect).sqrt().round_ties_even() as u32;
        let h = (target / aspect).sqrt().round_ties_even() as u32;
        if 0 < w && w <= width && 0 < h && h <= height {
            let top = draws.below(u64::from(height - h) + 1) as u32;
            let left = draws.below(u64::from(width - w) + 1) as u32;
            return Rect { left, top, size: Size::new(w, h) };
        }
    }
    central_rect(picture, ratio)
}

fn central_rect(picture: Size, ratio: (f64, f64)) -> Rect {
    let Size { width, height } = picture;
    let side = |length: f64, most: u32| (length.round_ties_even() as u32).clamp(1, most);
    let have = f64::from(width) / f64::from(height);
    let size = if have < ratio.0 {
        Size::new(width, side(f64::from(width) / ratio.0, height))
    } else if have > ratio.1 {
        Size::new(side(f64::from(height) * ratio.1, width), height)
    } else {
        picture
    };
    Rect { left: (width - size.width) / 2, top: (height - size.height) / 2, size }
}
