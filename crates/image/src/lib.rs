//! Decodes pictures of common formats to pixels of one size, or to patches of pictures of any size.
//!
//! ```text
//! JPEG ──────────► feedline-jpeg: the crop alone ──── rows of RGB, in the cache ─┐
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
//! The output is RGB, converted as by Pillow's `convert("RGB")`: grey is repeated, alpha is dropped
//! without blending, and palettes are looked up. Of 16-bit values, the high 8 bits are kept (for
//! grey, too, where Pillow clips at 255). CMYK and YCCK JPEGs are converted without a profile, as
//! Adobe stores them. Only the first frame of an animation is decoded; outside it, a GIF has the
//! transparent colour or the first of the palette. Pixels that a run-length coded BMP leaves out
//! are black (Pillow: the palette's first colour). EXIF orientation is applied to JPEGs on request;
//! by default it is not, as in torchvision.
//!
//! A JPEG is decoded only as far as the crop needs. The pixels in a crop are bit-identical to the
//! same pixels of a full decode, so the row is identical, too. Resizing is bit-identical to that of
//! Pillow 11.3. Newer versions do the vertical pass first for some pictures: 12.3 if the height is
//! over 100 times the width, 13 if the height shrinks by more than twice as many pixels as the
//! width. Values then differ, mostly by one level. A picture is resized as stored and then turned
//! upright, so its values may differ by a rounding, and with [`Filter::Nearest`] by one pixel.
//!
//! # Invariants
//!
//! * The header's size is checked against [`Limits`] before any allocation.
//! * In steady state this module allocates nothing except the list of a JPEG's scans. `image`
//!   allocates its own tables and rows per picture, within [`Limits::memory`].
//! * A buffer's content from an earlier picture never reaches the output.
//! * A panic in the crate `image` becomes an error of the picture
//!   ([`ErrorKind::Panicked`](feedline_base::error::ErrorKind::Panicked)).
//!
//! # Damage
//!
//! A damaged picture is an error, never grey pixels, if its format can detect the damage. JPEG has
//! no checksum. A truncated file is always detected, and so are missing and surplus data within a
//! scan. A surplus scan after complete ones is not detected. Other damage is detected if it
//! desynchronises the codes.
//!
//! Rows below the crop of a JPEG are not decoded. So damage there is found only by a crop that
//! reaches it, except for truncation. Seek points contain a checksum of the coded data. So damage
//! above and beside the crop is also found with seek points, if it happened after the points were
//! made. In a picture of one scan, the order and number of all restart markers are checked, but
//! only the intervals under the crop. In a picture of several scans, markers are checked down to
//! the crop's last row. A checksum in the dataset covers all bytes, decoded or not.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

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
mod parts_tests;
mod patches;
mod resize;
mod settings;
#[cfg(test)]
mod tests;
mod workspace;

pub use limits::Limits;
pub use settings::{Filter, Image, PixelLayout};
