//! Pictures at their own resolution, cut into square patches. A picture has any number of patches,
//! up to a budget.
//!
//! ```text
//! picture ──output()──► sides of whole patches ──crop + resize──► pixels ──finish──► patches, in order
//!   80 × 50, patch 16            80 × 64                                             0  1  2  3  4
//!                                5 × 4 patches                                       5  6  7  8  9
//!                                                                                   10 11 …
//! ```
//!
//! # Sizes
//!
//! Sizes equal those of reference programs to the patch: `get_image_size_for_max_num_patches` of
//! SigLIP2 NaFlex, and `smart_resize` of Qwen2-VL for patches that a model merges. Both are in
//! Hugging Face's transformers 4.57. The arithmetic follows them step by step in `f64`. Without
//! enlargement, a picture that fits keeps its size, but its sides are rounded up to whole patches,
//! so it grows by less than a patch. Merged patches are in the order of blocks.
//!
//! # Limits and invariants
//!
//! * A row has 1 to `most` patches for any picture size: a strip is widened to one patch, and cut
//!   to `most` (where the reference programs would exceed the budget).
//! * `most` patches side by side have at most 2²⁴ pixels, so no side overflows.
//! * This module allocates nothing. [`Limits::memory`](super::Limits) includes the pixels before
//!   they are cut, at their maximum.

#[cfg(test)]
mod tests;

use super::geometry::Size;
use super::resize::SIDE_MAX;
use feedline_base::error::{Error, Result};
use feedline_core::memory::Row;
use feedline_core::tensor::{DType, Field};

/// How a picture becomes patches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Patches {
    /// Pixels of a patch's side.
    pub(super) size: u32,
    /// Maximum patches of a picture.
    pub(super) most: u32,
    pub(super) rule: Rule,
}

/// How the size of the output is computed from the size of the picture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rule {
    /// The rule of NaFlex, without enlargement.
    Native,
    /// The rule of NaFlex.
    Enlarge,
    /// The rule of Qwen2-VL, for a model that merges `side` × `side` patches: at least `least`
    /// patches.
    Merge { side: u32, least: u32 },
}

/// Maximum ratio of a picture's longer side to its shorter one, for [`Rule::Merge`].
const RATIO_MAX: u64 = 200;

/// A picture's output, cut into tiles of one size. A picture that stays whole is one tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    pub(super) whole: Size,
    pub(super) tile: Size,
    /// Length of a block's side, in tiles. The tiles of a block are consecutive.
    pub(super) block: u32,
}

impl Patches {
    /// The fields of a row: patches, their positions, the number of patches per side, the picture's
    /// size.
    pub(super) fn fields(&self, name: &str, dtype: DType) -> Vec<Field> {
        let most = self.most as usize;
        let size = self.size as usize;
        vec![
            Field::rows_up_to(name, dtype, most, [3 * size * size]),
            Field::rows_up_to(format!("{name}.positions"), DType::I32, most, [2]),
            Field::fixed(format!("{name}.grid"), DType::I32, [2]),
            Field::fixed(format!("{name}.size"), DType::I32, [2]),
        ]
    }

    /// Refuses illegal parameters.
    pub(super) fn check(&self) -> Result<(), String> {
        match u64::from(self.size) * u64::from(self.most) {
            0 => Err(format!(
                "at most {} patches of {} pixels: both must be at least 1",
                self.most, self.size
            )),
            side if side > u64::from(SIDE_MAX) => Err(format!(
                "{} patches of {} pixels: side by side they may have {SIDE_MAX} pixels at most",
                self.most, self.size
            )),
            _ => match self.rule {
                Rule::Merge { side, least }
                    if side == 0 || least == 0 || least.max(side.saturating_pow(2)) > self.most =>
                {
                    Err(format!(
                        "{least} to {} patches, {side} x {side} of them merged: at least 1, and a \
                         budget for those of one block",
                        self.most
                    ))
                }
                _ => Ok(()),
            },
        }
    }

    /// Length of a block's side, in patches.
    pub(super) fn block(&self) -> u32 {
        if let Rule::Merge { side, .. } = self.rule {
            side
        } else {
            1
        }
    }

    /// The size to which a picture (no side 0) is scaled: sides of whole blocks, and at most `most`
    /// patches in total.
    pub(super) fn output(&self, picture: Size) -> Size {
        let (block, [width, height]) = match self.rule {
            Rule::Merge { side, least } => (side, self.smart_resize(picture, side, least)),
            Rule::Native | Rule::Enlarge => (1, self.naflex(picture)),
        };
        // The cast saturates. A size over the budget is reduced to the budget.
        let most = self.most / (block * block);
        let width = (width as u32).clamp(1, most);
        let height = (height as u32).clamp(1, most / width);
        Size::new(width * block * self.size, height * block * self.size)
    }

    /// The number of patches per side.
    fn naflex(&self, picture: Size) -> [f64; 2] {
        let size = f64::from(self.size);
        let most = f64::from(self.most);
        let sides = |scale: f64| {
            [picture.width, picture.height]
                .map(|side| (f64::from(side) * scale / size).ceil().max(1.0))
        };
        let fits = |scale: f64| sides(scale).iter().product::<f64>() <= most;
        let mut low = 1e-5 / 10.0;
        let mut high = 100.0;
        if self.rule == Rule::Native && fits(1.0) {
            low = 1.0;
            high = 1.0;
        }
        while high - low >= 1e-5 {
            let middle = (low + high) / 2.0;
            *(if fits(middle) { &mut low } else { &mut high }) = middle;
        }
        sides(low)
    }

    /// The number of blocks per side.
    fn smart_resize(&self, picture: Size, side: u32, least: u32) -> [f64; 2] {
        let area = f64::from(self.size) * f64::from(self.size);
        let factor = f64::from(self.size) * f64::from(side);
        let most = f64::from(self.most) * area;
        let least = f64::from(least) * area;
        let sides = [picture.width, picture.height].map(f64::from);
        let pixels = sides[0] * sides[1];
        let near = sides.map(|side| (side / factor).round_ties_even());
        match near[0] * factor * (near[1] * factor) {
            rounded if rounded > most => {
                sides.map(|side| (side / (pixels / most).sqrt() / factor).floor())
            }
            rounded if rounded < least => {
                sides.map(|side| (side * (least / pixels).sqrt() / factor).ceil())
            }
            _ => near,
        }
    }

    /// Sets the number of patches in field `first`, and writes the fields after it.
    ///
    /// Errors: [`ErrorKind::Decode`](feedline_base::error::ErrorKind::Decode) for merged patches of a strip with a
    /// ratio over [`RATIO_MAX`].
    pub(super) fn describe(
        &self,
        tiles: Tiles,
        picture: Size,
        first: usize,
        out: &mut Row<'_>,
    ) -> Result<()> {
        let long = picture.width.max(picture.height);
        let short = picture.width.min(picture.height);
        if matches!(self.rule, Rule::Merge { .. }) && u64::from(long) > RATIO_MAX * u64::from(short)
        {
            let Size { width, height } = picture;
            let ratio = "for merged patches, the longer side may be at most 200 times the shorter";
            return Err(Error::decode(format!("{width}x{height} pixels: {ratio}")));
        }
        let grid = tiles.grid();
        let count = grid.pixels() as usize;
        out.set_len(first, count)?;
        let places = out.slice_mut::<i32>(first + 1)?.as_chunks_mut::<2>().0;
        places
            .iter_mut()
            .zip(tiles.places())
            .for_each(|(place, (y, x))| *place = [y as i32, x as i32]);
        out.set_len(first + 1, count)?;
        for (field, Size { width, height }) in [(first + 2, grid), (first + 3, picture)] {
            out.slice_mut::<i32>(field)?
                .copy_from_slice(&[height as i32, width as i32]);
        }
        Ok(())
    }
}

impl Tiles {
    /// The number of tiles per side.
    fn grid(self) -> Size {
        Size::new(
            self.whole.width / self.tile.width,
            self.whole.height / self.tile.height,
        )
    }

    /// Row and column of each tile, in the order of the output.
    fn places(self) -> impl Iterator<Item = (u32, u32)> {
        let grid = self.grid();
        let block = self.block;
        let blocks = move |side: u32| (0..side).step_by(block as usize);
        blocks(grid.height).flat_map(move |top| {
            blocks(grid.width).flat_map(move |left| {
                (top..top + block).flat_map(move |y| (left..left + block).map(move |x| (y, x)))
            })
        })
    }

    /// The rows of pixels of each tile, in the order of the output. With `flip`, the tiles are
    /// those of the mirrored picture, but the caller must mirror each row.
    pub(super) fn rows(
        self,
        pixels: &[u8],
        flip: bool,
    ) -> impl Iterator<Item = impl Iterator<Item = &[u8]>> {
        let columns = self.grid().width;
        let tile = self.tile;
        let stride = 3 * self.whole.width as usize;
        let run = 3 * tile.width as usize;
        self.places().map(move |(y, x)| {
            let x = if flip { columns - 1 - x } else { x };
            let start = stride * (y * tile.height) as usize + run * x as usize;
            pixels[start..]
                .chunks(stride)
                .take(tile.height as usize)
                .map(move |row| &row[..run])
        })
    }
}
