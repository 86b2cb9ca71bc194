//! Estimates of the AC coefficients that an incomplete progressive picture lacks, from the
//! surrounding DC coefficients.
//!
//! They follow section K.8 of the standard, and equal those of libjpeg-turbo, which uses 5 × 5
//! blocks. Its weights, and its rules at the picture's sides and after the end of truncated data,
//! were found with pictures made for this purpose.
//!
//! Memory: 2 bytes per block of the picture. The scans are read twice.

use super::header::Header;
use super::huffman::ZIGZAG;
use super::region::RegionLayout;
use super::script::{Estimated, UNSEEN};

/// Weights of a window of DC coefficients, in 1/256.
type Weights = [[i16; 5]; 5];

const DC: Weights = [
    [-2, -6, -8, -6, -2],
    [-6, 6, 42, 6, -6],
    [-8, 42, 152, 42, -8],
    [-6, 6, 42, 6, -6],
    [-2, -6, -8, -6, -2],
];
const FIRST: Weights = [
    [-1, -1, 0, 1, 1],
    [-3, 13, 0, -13, 3],
    [-3, 38, 0, -38, 3],
    [-3, 13, 0, -13, 3],
    [-1, -1, 0, 1, 1],
];
const SECOND: Weights = [
    [0; 5],
    [0, 2, -5, 2, 0],
    [1, 7, -14, 7, 1],
    [0, 2, -5, 2, 0],
    [0; 5],
];
const THIRD: Weights = [
    [0; 5],
    [0, 1, 0, -1, 0],
    [0, 2, 0, -2, 0],
    [0, 1, 0, -1, 0],
    [0; 5],
];
const BOTH: Weights = [
    [-1, 0, 0, 0, 1],
    [0, 9, 0, -9, 0],
    [0; 5],
    [0, -9, 0, 9, 0],
    [1, 0, 0, 0, -1],
];
const MIXED: Weights = [[0; 5], [0, 1, -3, 1, 0], [0; 5], [0, -1, 3, -1, 0], [0; 5]];
/// What to estimate for a component without any AC coefficient: the coefficient's place in the
/// order of the file, the weights, and whether the weights are transposed.
const DC_ALONE: [(usize, &Weights, bool); 10] = [
    (0, &DC, false),
    (1, &FIRST, false),
    (2, &FIRST, true),
    (3, &SECOND, true),
    (4, &BOTH, false),
    (5, &SECOND, false),
    (6, &THIRD, false),
    (7, &MIXED, false),
    (8, &MIXED, true),
    (9, &THIRD, true),
];

const FIRST_OF_SOME: Weights = [[0; 5], [0; 5], [-7, 50, 0, -50, 7], [0; 5], [0; 5]];
const SECOND_OF_SOME: Weights = [[0; 5], [0; 5], [-1, 13, -24, 13, -1], [0; 5], [0; 5]];
const BOTH_OF_SOME: Weights = [
    [0, -1, 0, 1, 0],
    [-1, 10, 0, -10, 1],
    [0; 5],
    [1, -10, 0, 10, -1],
    [0, 1, 0, -1, 0],
];
/// What to estimate for a component that has some AC coefficients.
const SOME_AC: [(usize, &Weights, bool); 5] = [
    (1, &FIRST_OF_SOME, false),
    (2, &FIRST_OF_SOME, true),
    (3, &SECOND_OF_SOME, true),
    (4, &BOTH_OF_SOME, false),
    (5, &SECOND_OF_SOME, false),
];

/// DC coefficients of an incomplete picture.
pub(super) struct Smoothing {
    planes: [Plane; 4],
    lacks: Estimated,
    /// The row of MCUs of all components at which the last scan ends.
    end: u32,
    /// Number of rows of MCUs.
    total: u32,
}

#[derive(Default)]
struct Plane {
    /// DC coefficients, including the blocks that pad MCUs.
    dc: Vec<i16>,
    padded: u32,
    across: u32,
    down: u32,
    /// Rows of blocks per MCU.
    v: u32,
}

impl Smoothing {
    /// Creates it without DC coefficients. `layout` is that of the whole picture.
    pub(super) fn new(header: &Header, layout: &RegionLayout, lacks: Estimated) -> Self {
        let mut planes: [Plane; 4] = Default::default();
        for (index, (plane, part)) in planes.iter_mut().zip(layout.planes()).enumerate() {
            let (across, down) = header.blocks(index);
            let padded = layout.mcus.0 * u32::from(part.factors.h);
            *plane = Plane {
                dc: Vec::new(),
                padded,
                across,
                down,
                v: header.factors()[index].v.into(),
            };
            plane
                .dc
                .reserve_exact((padded * layout.mcus.1 * u32::from(part.factors.v)) as usize);
        }
        Self {
            planes,
            lacks,
            end: 0,
            total: header.height.div_ceil(8 * header.largest_factors().1),
        }
    }

    /// The DC coefficients of each component, to which each row of MCUs is appended in turn.
    pub(super) fn planes(&mut self) -> impl Iterator<Item = &mut Vec<i16>> {
        self.planes.iter_mut().map(|plane| &mut plane.dc)
    }

    /// Sets the row of MCUs in which the last scan ends.
    pub(super) fn end_in(&mut self, row: u32, header: &Header) {
        // A picture of one component is read by rows of blocks.
        self.end = if header.components == 1 {
            row / header.largest_factors().1
        } else {
            row
        };
    }

    /// Adds estimates to a row of a component's blocks, the first of which is in column `x`.
    /// Returns whether it added any.
    pub(super) fn estimate(
        &self,
        component: usize,
        x: u32,
        y: u32,
        quant: &[u16; 64],
        blocks: &mut [[i16; 64]],
    ) -> bool {
        let plane = &self.planes[component];
        // Blocks that the last scan does not reach are as the scan before left them.
        let lacks = &self.lacks[usize::from(y / plane.v > self.end)][component];
        let kinds = if lacks[1..].iter().all(|lacks| *lacks == UNSEEN) {
            &DC_ALONE[..]
        } else {
            &SOME_AC
        };
        if lacks[1..].iter().all(|lacks| *lacks == 0) {
            return false;
        }
        let rows = plane.rows_around(y, self.total);
        for (x, block) in (x..).zip(blocks) {
            let last = plane.across as usize - 1;
            let window: [[i16; 5]; 5] = std::array::from_fn(|down| {
                std::array::from_fn(|right| {
                    let column = (x as usize + right).saturating_sub(2).min(last);
                    rows[down].get(column).copied().unwrap_or(0)
                })
            });
            for (place, weights, turned) in kinds {
                let natural = usize::from(ZIGZAG[*place]);
                if *place > 0 && (lacks[*place] == 0 || block[natural] != 0) {
                    continue;
                }
                let sum = i64::from(quant[0])
                    * (0..25)
                        .map(|k| {
                            let (down, right) = if *turned {
                                (k % 5, k / 5)
                            } else {
                                (k / 5, k % 5)
                            };
                            i64::from(weights[k / 5][k % 5]) * i64::from(window[down][right])
                        })
                        .sum::<i64>();
                let lacks = if *place == 0 { UNSEEN } else { lacks[*place] };
                block[natural] = estimate(sum, quant[natural], lacks);
            }
        }
        true
    }
}

impl Plane {
    /// The five rows around row `y`. Rows at the top and bottom of the picture are repeated.
    fn rows_around(&self, y: u32, total: u32) -> [&[i16]; 5] {
        let row = y / self.v;
        let last = self.down - 1;
        let alone = self.down.saturating_sub(row * self.v) == 1 || self.v == 1;
        let above = if row == 1 && alone {
            y - 1
        } else {
            y.saturating_sub(2)
        };
        // This row may be in the padding of an MCU.
        let below = if row + 1 < total && !(alone && row + 2 >= total) {
            y + 2
        } else {
            (y + 2).min(last)
        };
        [above, y.saturating_sub(1), y, (y + 1).min(last), below].map(|row| {
            let start = (row * self.padded) as usize;
            self.dc
                .get(start..start + self.across as usize)
                .unwrap_or_default()
        })
    }
}

/// `sum` / 256 in units of `quant`, rounded. Limited to values below the lowest bit that is known.
fn estimate(sum: i64, quant: u16, lacks: u8) -> i16 {
    let quant = i64::from(quant);
    let size = ((quant << 7) + sum.abs()) / (quant << 8);
    let most = if lacks == UNSEEN || lacks == 0 {
        i64::MAX
    } else {
        (1 << lacks) - 1
    };
    (sum.signum() * size.min(most)) as i16
}
