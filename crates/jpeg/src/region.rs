//! The samples, blocks and neighbours of each component that a region needs.

use super::header::{Component, Factors, Header};
use std::ops::Range;

/// A rectangle of the picture's pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// First column.
    pub left: u32,
    /// First row.
    pub top: u32,
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

/// How libjpeg-turbo upsamples a component to the picture's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Up {
    Same,
    /// Interpolated: twice the width, twice the height, or both.
    H2V1,
    H1V2,
    H2V2,
    /// Each sample is repeated this many times, across and down.
    Box(u32, u32),
}

/// The part of a component that a region needs.
#[derive(Clone, Debug)]
pub(super) struct Plane {
    pub(super) up: Up,
    pub(super) factors: Factors,
    /// Number of samples that a block is decoded to, across and down: 8, 4, 2 or 1.
    pub(super) block: u32,
    /// Size of the component in samples, without padding.
    pub(super) width: u32,
    pub(super) height: u32,
    /// Blocks that are needed.
    pub(super) columns: Range<u32>,
    pub(super) rows: Range<u32>,
}

/// The part of a picture that a region needs.
#[derive(Clone, Debug)]
pub(super) struct RegionLayout {
    pub(super) region: Region,
    /// Divisor of the picture's size.
    pub(super) scale: u32,
    planes: [Plane; 4],
    count: usize,
    /// MCUs across and down the picture.
    pub(super) mcus: (u32, u32),
    /// MCUs that hold a needed block.
    pub(super) mcu_columns: Range<u32>,
    pub(super) mcu_rows: Range<u32>,
}

impl RegionLayout {
    /// `region` must not be empty, and must be within the picture at 1 / `scale` of its size;
    /// `scale` is 1, 2, 4 or 8.
    pub(super) fn new(
        header: &Header,
        components: &[Component],
        region: Region,
        scale: u32,
    ) -> Self {
        let most = header.largest_factors();
        let plane = |factors: Factors| Plane::new(header, factors, most, region, scale);
        let count = components.len();
        let mut all = [const { Plane::NONE }; 4];
        for (slot, component) in all.iter_mut().zip(components) {
            *slot = plane(component.factors);
        }
        let alone = count == 1;
        if alone {
            // A scan of one component has MCUs of one block.
            all[0].factors = Factors { h: 1, v: 1 };
        }
        let planes = &all[..count];
        let (h, v) = if alone { (1, 1) } else { most };
        let hull = |range: fn(&Plane) -> (Range<u32>, u32)| {
            let part = |plane: &Plane| {
                let (range, factor) = range(plane);
                (range.start / factor, range.end.div_ceil(factor))
            };
            let start = planes.iter().map(|plane| part(plane).0).min().unwrap_or(0);
            start..planes.iter().map(|plane| part(plane).1).max().unwrap_or(0)
        };
        let mcu_columns = hull(|plane| (plane.columns.clone(), plane.factors.h.into()));
        let mcu_rows = hull(|plane| (plane.rows.clone(), plane.factors.v.into()));
        let mcus = (header.width.div_ceil(8 * h), header.height.div_ceil(8 * v));
        Self {
            region,
            scale,
            planes: all,
            count,
            mcus,
            mcu_columns,
            mcu_rows,
        }
    }

    pub(super) fn planes(&self) -> &[Plane] {
        &self.planes[..self.count]
    }

    /// First row of pixels that cannot be written yet after row `row` of MCUs was decoded.
    pub(super) fn ready(&self, row: u32) -> u32 {
        let end = self.region.top + self.region.height;
        self.planes()
            .iter()
            .map(|plane| {
                let there = (row + 1) * plane.block * u32::from(plane.factors.v);
                if there >= plane.height {
                    return end;
                }
                match plane.up {
                    Up::Same | Up::H2V1 => there,
                    // The last of these rows needs the next row of samples.
                    Up::H1V2 | Up::H2V2 => 2 * there - 1,
                    Up::Box(_, v) => v * there,
                }
            })
            .min()
            .unwrap_or(end)
            .clamp(self.region.top, end)
    }
}

impl Plane {
    const NONE: Self = Self {
        up: Up::Same,
        factors: Factors { h: 1, v: 1 },
        block: 8,
        width: 0,
        height: 0,
        columns: 0..0,
        rows: 0..0,
    };

    fn new(
        header: &Header,
        factors: Factors,
        most: (u32, u32),
        region: Region,
        scale: u32,
    ) -> Self {
        let h = u32::from(factors.h);
        let v = u32::from(factors.v);
        let least = 8 / scale;
        // A subsampled component keeps more of its samples while this reduces upsampling in both
        // directions.
        let mut block = least;
        let twice = |block: u32| {
            (most.0 * least).is_multiple_of(2 * h * block)
                && (most.1 * least).is_multiple_of(2 * v * block)
        };
        while block < 8 && twice(block) {
            block *= 2;
        }
        let wider = most.0 * least / (h * block);
        let higher = most.1 * least / (v * block);
        let width = (header.width * h * block).div_ceil(8 * most.0);
        let height = (header.height * v * block).div_ceil(8 * most.1);
        let smooth = least > 1;
        let up = match (wider, higher) {
            (1, 1) => Up::Same,
            (2, 1) if smooth && width > 2 => Up::H2V1,
            (1, 2) if smooth => Up::H1V2,
            (2, 2) if smooth && width > 2 => Up::H2V2,
            _ => Up::Box(wider, higher),
        };
        let beside = matches!(up, Up::H2V1 | Up::H2V2);
        let above = matches!(up, Up::H1V2 | Up::H2V2);
        let blocks = |start: u32, len: u32, times: u32, neighbour: bool, all: u32| {
            let first = (start / times).saturating_sub(neighbour.into());
            let end = ((start + len).div_ceil(times) + u32::from(neighbour)).min(all);
            first / block..end.div_ceil(block)
        };
        let columns = blocks(region.left, region.width, wider, beside, width);
        let rows = blocks(region.top, region.height, higher, above, height);
        Self {
            up,
            factors,
            block,
            width,
            height,
            columns,
            rows,
        }
    }
}
