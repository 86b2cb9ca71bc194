//! The weights of one axis: which source pixels make an output pixel, and by how much.

use crate::Filter;

/// Bits of a weight's fraction: 1.0 is `1 << BITS`.
pub(super) const BITS: u32 = 22;

/// The parameters that determine the weights of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Side {
    /// Length of the whole source, in pixels.
    pub(super) source: u32,
    /// Start and end of the part of the source that becomes the whole output. Single precision, as
    /// in Pillow.
    pub(super) from: f32,
    pub(super) to: f32,
    /// Length of the whole output, in pixels.
    pub(super) whole: u32,
    /// The wanted pixels of the output: the first one, and their number.
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) filter: Filter,
}

/// Source pixels under an output pixel: start and end.
type Taps = (u32, u32);

impl Side {
    /// Source pixels per output pixel.
    fn scale(&self) -> f64 {
        f64::from(self.to - self.from) / f64::from(self.whole)
    }

    /// Half the width of the filter in source pixels.
    fn support(&self) -> f64 {
        radius(self.filter) * self.scale().max(1.0)
    }

    fn center(&self, at: u32) -> f64 {
        f64::from(self.from) + (f64::from(at) + 0.5) * self.scale()
    }

    /// Whether each output pixel is one source pixel. If so, all other weights are 0, for any
    /// filter.
    fn is_copy(&self) -> bool {
        self.from.fract() == 0.0 && self.to - self.from == self.whole as f32
    }

    /// The source pixels under output pixel `at`, unless the filter is [`Filter::Nearest`].
    fn taps(&self, at: u32) -> Taps {
        if self.is_copy() {
            let start = self.from as u32 + at;
            return (start, start + 1);
        }
        let center = self.center(at);
        let support = self.support();
        // A cast to unsigned gives 0 for negative values.
        let start = (center - support + 0.5) as u32;
        (start, ((center + support + 0.5) as u32).min(self.source))
    }

    /// The nearest source pixels of the wanted output pixels.
    ///
    /// Pillow adds the scale from pixel to pixel; products would round differently on ties.
    fn nearest(&self) -> impl Iterator<Item = u32> {
        let side = *self;
        let scale = self.scale();
        // Adding up many steps would take long. Sums and products then round differently anyway.
        let skipped = if side.first > 1 << 16 { side.first } else { 0 };
        let mut at = f64::from(side.from) + scale * (f64::from(skipped) + 0.5);
        (skipped..side.first + side.count).filter_map(move |k| {
            let pixel = if side.is_copy() {
                side.from as u32 + k
            } else {
                (at as u32).min(side.source - 1)
            };
            at += scale;
            (k >= side.first).then_some(pixel)
        })
    }

    /// The source pixels that the wanted output pixels need: start and end.
    pub(super) fn needed(&self) -> Taps {
        if self.filter == Filter::Nearest {
            let mut all = self.nearest();
            let first = self.first;
            let start = all.next().unwrap_or(first);
            return (start, all.last().unwrap_or(start) + 1);
        }
        (
            self.taps(self.first).0,
            self.taps(self.first + self.count - 1).1,
        )
    }

    /// The largest number of source pixels under an output pixel, or a few more.
    pub(super) fn most_taps(&self) -> usize {
        if self.filter == Filter::Nearest || self.is_copy() {
            return 1;
        }
        // An interval of length n has at most n + 1 integers; one more for rounding.
        ((2.0 * self.support()) as usize + 2).min(self.source as usize)
    }
}

/// The taps and weights of the wanted output pixels.
#[derive(Default)]
pub(super) struct Axis {
    side: Option<Side>,
    /// First source pixel of each output pixel; never decreases.
    pub(super) starts: Vec<u32>,
    /// Number of source pixels of each output pixel.
    pub(super) counts: Vec<u32>,
    /// The largest of `counts`.
    pub(super) taps: usize,
    /// `taps` weights of each output pixel; those beyond its count are 0.
    pub(super) weights: Vec<i32>,
    /// Whether weighted sums may be below 0 or above 255, and must be clamped.
    pub(super) clamps: bool,
    /// Scratch: the weights of one output pixel before rounding.
    exact: Vec<f64>,
}

impl Axis {
    /// Computes the weights, unless `side` is that of the last call. Returns whether they are new.
    pub(super) fn update(&mut self, side: Side) -> bool {
        if self.side == Some(side) {
            return false;
        }
        self.side = None;
        self.reserve(&side);
        if side.filter == Filter::Nearest || side.is_copy() {
            self.fill_copies(&side);
        } else {
            self.fill_weights(&side);
        }
        self.side = Some(side);
        true
    }

    fn reserve(&mut self, side: &Side) {
        let count = side.count as usize;
        let most = side.most_taps();
        for list in [&mut self.starts, &mut self.counts] {
            list.clear();
            list.reserve_exact(count);
        }
        self.weights.clear();
        self.weights.reserve_exact(count * most);
        self.exact.clear();
        self.exact.reserve_exact(most);
        self.clamps = false;
    }

    fn fill_copies(&mut self, side: &Side) {
        self.starts.extend(side.nearest());
        self.counts.resize(self.starts.len(), 1);
        self.weights.resize(self.starts.len(), 1 << BITS);
        self.taps = 1;
    }

    fn fill_weights(&mut self, side: &Side) {
        let taps = (side.first..side.first + side.count).map(|at| side.taps(at));
        self.starts.extend(taps.clone().map(|(start, _)| start));
        self.counts.extend(taps.map(|(start, end)| end - start));
        self.taps = self.counts.iter().copied().max().unwrap_or(0) as usize;
        debug_assert!(
            self.taps <= side.most_taps(),
            "{} taps of {side:?}",
            self.taps
        );
        match side.filter {
            Filter::Nearest | Filter::Bilinear => self.weigh(side, bilinear),
            Filter::Bicubic => self.weigh(side, bicubic),
            Filter::Lanczos3 => self.weigh(side, lanczos3),
        }
        // With so many taps, the sum of rounded weights could exceed 1 by too much.
        self.clamps = side.filter != Filter::Bilinear || self.taps > 1 << 13;
    }

    fn weigh(&mut self, side: &Side, filter: impl Fn(f64) -> f64) {
        self.weights.resize(self.starts.len() * self.taps, 0);
        let shrink = 1.0 / side.scale().max(1.0);
        let pixels = self
            .starts
            .iter()
            .zip(&self.counts)
            .zip(self.weights.chunks_exact_mut(self.taps));
        for (at, ((start, count), weights)) in (side.first..).zip(pixels) {
            let center = side.center(at);
            self.exact.clear();
            self.exact.extend(
                (*start..start + count).map(|x| filter((f64::from(x) - center + 0.5) * shrink)),
            );
            // Summed in this order, as in Pillow.
            let sum: f64 = self.exact.iter().sum();
            for (weight, exact) in weights.iter_mut().zip(&self.exact) {
                *weight = fixed(if sum == 0.0 { *exact } else { exact / sum });
            }
        }
        debug_assert!(
            self.weights
                .iter()
                .all(|weight| weight.unsigned_abs() < 2 << BITS),
            "{side:?}"
        );
    }

    /// Heap bytes of an axis for `side`.
    pub(super) fn bound(side: &Side) -> u64 {
        let count = u64::from(side.count);
        let most = side.most_taps() as u64;
        4 * count * (2 + most) + 8 * most
    }

    pub(super) fn bytes(&self) -> usize {
        4 * (self.starts.capacity() + self.counts.capacity() + self.weights.capacity())
            + 8 * self.exact.capacity()
    }
}

/// Half the width of a filter, in pixels of the smaller picture.
fn radius(filter: Filter) -> f64 {
    match filter {
        Filter::Nearest => 0.0,
        Filter::Bilinear => 1.0,
        Filter::Bicubic => 2.0,
        Filter::Lanczos3 => 3.0,
    }
}

/// A weight as an integer: halves are rounded away from 0.
fn fixed(weight: f64) -> i32 {
    let scaled = weight * f64::from(1 << BITS);
    (scaled + if weight < 0.0 { -0.5 } else { 0.5 }) as i32
}

fn bilinear(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

/// Cubic with a = -0.5.
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

fn lanczos3(x: f64) -> f64 {
    if (-3.0..3.0).contains(&x) {
        sinc(x) * sinc(x / 3.0)
    } else {
        0.0
    }
}

fn sinc(x: f64) -> f64 {
    let angle = x * std::f64::consts::PI;
    if x == 0.0 { 1.0 } else { angle.sin() / angle }
}
