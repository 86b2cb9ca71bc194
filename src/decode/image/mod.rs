//! Pictures: common formats in, pixels of one size out, or patches of pictures of any size.
//!
//! ```text
//! JPEG ──────────► crate::jpeg: the crop alone ──── rows of RGB, in the cache ─┐
//! other formats ─► other ─────────────────────────► RGB, in a worker's buffer ─┴► crop + resize, one pass
//!            (limits from the header)                                                            │
//!                                                                                                ▼
//!                                                 row ◄────────────────────────────────────  u8 pixels
//!                                                      upright, flip, dtype, layout,      (u8 NHWC: into the row,
//!                                                      normalise, patches, one pass        else a small buffer)
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
//! * Steady state needs no allocation here, but for the list of a JPEG's scans. `image` allocates its own tables and rows per
//!   picture, within [`Limits::memory`].
//! * An earlier picture's content of a buffer never shows.
//! * A panic of `image` is an error of the picture ([`ErrorKind::Panicked`](crate::ErrorKind::Panicked)).
//!
//! # Damage
//!
//! A damaged picture is an error, never grey pixels, as far as its format can detect damage. JPEG has no checksum. A
//! cut file is always detected, and so are missing and surplus data of a scan, but not a whole scan behind those that are
//! complete. Other damage is detected if it puts the codes out of step.
//!
//! Rows below the crop of a JPEG are not decoded. So only a crop that reaches the damage there detects it,
//! except for a cut. With seek points, also damage above and beside the crop is found as without them, if it is newer than the
//! points: they have a checksum of the coded data.
//! Restart markers of a picture of one scan are all checked for order and number, their intervals only under the crop; those of
//! several scans down to the crop's last row. A checksum in the dataset covers all bytes, decoded or not.

mod buckets;
mod finish;
mod format;
mod geometry;
mod limits;
#[cfg(all(test, turbojpeg))]
#[path = "../../../tests/common/turbojpeg.rs"]
mod oracle;
mod orientation;
mod other;
#[cfg(test)]
#[path = "../../../tests/unit/image_parts.rs"]
mod parts_tests;
mod patches;
mod resize;
mod settings;
#[cfg(test)]
#[path = "../../../tests/unit/image.rs"]
mod tests;
mod workspace;

pub use limits::Limits;
pub use settings::{Filter, Image, PixelLayout};
