//! Computes which part of a picture becomes the output, like torchvision's `transforms`. No I/O.

use feedline_core::order::Draws;

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

    /// Divides each side, rounded up.
    pub(super) fn divided(self, by: u32) -> Self {
        Self::new(self.width.div_ceil(by), self.height.div_ceil(by))
    }
}

/// A rectangle of whole pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rect {
    pub(super) left: u32,
    pub(super) top: u32,
    pub(super) size: Size,
}

/// A crop for resampling: the filter reads only pixels of `view`, scales `part` of it to `whole`,
/// and keeps the `window`.
///
/// For a random crop, torchvision crops first, so pixels outside must not bleed in: `view` is the
/// crop. For a centre crop it scales the whole picture first, so neighbouring pixels count: `view`
/// is the picture, `window` the middle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Crop {
    pub(super) view: Rect,
    /// Fractional only if the picture was decoded at a reduced size.
    pub(super) part: CropPart,
    pub(super) whole: Size,
    pub(super) window: Rect,
}

/// Position of the output in the upright picture: the picture's size, its scaled size, and the part
/// of the scaled picture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    pub(super) picture: Size,
    pub(super) whole: Size,
    pub(super) window: Rect,
}

/// A rectangle in the view, in fractional pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CropPart {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl Crop {
    /// A crop that scales all of `view` to `output`.
    pub(super) fn of_view(view: Rect, output: Size) -> Self {
        let Size { width, height } = view.size;
        let part = CropPart {
            left: 0.0,
            top: 0.0,
            width: f64::from(width),
            height: f64::from(height),
        };
        Self {
            view,
            part,
            whole: output,
            window: Rect::of(output),
        }
    }

    /// Position of this crop's output in the upright picture of this size.
    pub(super) fn placed(&self, picture: Size) -> Placed {
        Placed {
            picture,
            whole: self.whole,
            window: self.window,
        }
    }

    /// The same crop, in the coordinates of the picture scaled to 1 / `denominator`.
    ///
    /// The view is rounded outwards, so a random crop's edges include parts of neighbouring scaled
    /// pixels.
    pub(super) fn scaled(self, denominator: u32, picture: Size) -> Self {
        let d = f64::from(denominator);
        let Rect { left, top, size } = self.view;
        let x = left / denominator;
        let y = top / denominator;
        let right = (left + size.width).div_ceil(denominator).min(picture.width);
        let bottom = (top + size.height)
            .div_ceil(denominator)
            .min(picture.height);
        let view = Rect {
            left: x,
            top: y,
            size: Size::new(right - x, bottom - y),
        };
        let start =
            |view: u32, part: f64, scaled: u32| (f64::from(view) + part) / d - f64::from(scaled);
        let part_left = start(left, self.part.left, x);
        let part_top = start(top, self.part.top, y);
        let width = (self.part.width / d).min(f64::from(view.size.width) - part_left);
        let height = (self.part.height / d).min(f64::from(view.size.height) - part_top);
        Self {
            view,
            part: CropPart {
                left: part_left,
                top: part_top,
                width,
                height,
            },
            ..self
        }
    }
}

impl Rect {
    /// The whole picture.
    pub(super) fn of(size: Size) -> Self {
        Self {
            left: 0,
            top: 0,
            size,
        }
    }

    pub(super) fn right(&self) -> u32 {
        self.left + self.size.width
    }

    pub(super) fn bottom(&self) -> u32 {
        self.top + self.size.height
    }

    /// The intersection, which must not be empty.
    pub(super) fn common(&self, other: Self) -> Self {
        let left = self.left.max(other.left);
        let top = self.top.max(other.top);
        let size = Size::new(
            self.right().min(other.right()) - left,
            self.bottom().min(other.bottom()) - top,
        );
        Self { left, top, size }
    }
}

/// `Resize(resize)`, then `CenterCrop(size)`, for `size <= resize`.
pub(super) fn center(picture: Size, resize: u32, size: u32) -> Crop {
    let shorter = u64::from(picture.width.min(picture.height));
    // torchvision: the longer side is int(resize * long / short).
    let scaled = |side: u32| {
        u32::try_from(u64::from(resize) * u64::from(side) / shorter).unwrap_or(u32::MAX)
    };
    let whole = Size::new(scaled(picture.width), scaled(picture.height));
    // Python's round() rounds halves to even.
    let start = |scaled: u32| (f64::from(scaled - size) / 2.0).round_ties_even() as u32;
    let window = Rect {
        left: start(whole.width),
        top: start(whole.height),
        size: Size::new(size, size),
    };
    Crop {
        window,
        ..Crop::of_view(Rect::of(picture), whole)
    }
}

/// Scales the picture until it just covers `size`, then crops the side that is too long.
pub(super) fn cover(picture: Size, size: Size, draws: Option<&mut Draws>) -> Crop {
    let is_wide = u64::from(picture.width) * u64::from(size.height)
        >= u64::from(picture.height) * u64::from(size.width);
    // Rounds as torchvision. The quotient is at least the other side of `size`.
    let scaled = |side: u32, to: u32, by: u32| {
        u32::try_from(u64::from(side) * u64::from(to) / u64::from(by)).unwrap_or(u32::MAX)
    };
    let whole = match is_wide {
        true => Size::new(
            scaled(picture.width, size.height, picture.height),
            size.height,
        ),
        false => Size::new(
            size.width,
            scaled(picture.height, size.width, picture.width),
        ),
    };
    let left_over = [whole.width - size.width, whole.height - size.height];
    let [left, top] = match draws {
        Some(draws) => left_over.map(|most| draws.below(u64::from(most) + 1) as u32),
        None => left_over.map(|most| (f64::from(most) / 2.0).round_ties_even() as u32),
    };
    Crop {
        window: Rect { left, top, size },
        ..Crop::of_view(Rect::of(picture), whole)
    }
}

/// torchvision's `RandomResizedCrop.get_params`: ten tries, then the largest central part with a
/// legal ratio.
pub(super) fn random_rect(
    picture: Size,
    scale: (f64, f64),
    ratio: (f64, f64),
    draws: &mut Draws,
) -> Rect {
    let Size { width, height } = picture;
    let area = picture.pixels() as f64;
    let log_low = ratio.0.ln();
    let log_high = ratio.1.ln();
    for _ in 0..10 {
        let target = area * draws.range_f64(scale.0, scale.1);
        let aspect = draws.range_f64(log_low, log_high).exp();
        // Rounds as Python does. A float cast saturates, so absurd ratios are simply too large.
        let w = (target * aspect).sqrt().round_ties_even() as u32;
        let h = (target / aspect).sqrt().round_ties_even() as u32;
        if 0 < w && w <= width && 0 < h && h <= height {
            let top = draws.below(u64::from(height - h) + 1) as u32;
            let left = draws.below(u64::from(width - w) + 1) as u32;
            return Rect {
                left,
                top,
                size: Size::new(w, h),
            };
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
    Rect {
        left: (width - size.width) / 2,
        top: (height - size.height) / 2,
        size,
    }
}
