//! EXIF orientation: turns stored pixels upright.
//!
//! ```text
//! crop of the upright picture ──stored()──► crop of the stored one ──decode, resize──► small ──turn()──► upright
//! ```
//!
//! Only the part under the crop is decoded, and only the small output is turned. The tag comes from
//! the first APP1 segment of a JPEG. An unreadable tag (cut, odd offsets, values beyond 1 to 8)
//! counts as upright, as in Pillow and browsers: metadata is not part of the picture, and the row
//! is right without it.

use super::geometry::{Crop, CropPart, Rect, Size};
use feedline_jpeg::EXIF;

/// Maps the upright pixel (x, y) to the stored pixel (x, y), or to (y, x) if `swapped`.
///
/// Stored coordinates count from the other end along mirrored axes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Orientation {
    swapped: bool,
    mirror_x: bool,
    mirror_y: bool,
}

const TAG: u16 = 0x0112;
const SHORT: u16 = 3;
const LONG: u16 = 4;

impl Orientation {
    /// The orientation in the body of an APP1 segment.
    pub(super) fn of_exif(body: &[u8]) -> Self {
        body.strip_prefix(EXIF)
            .and_then(tag)
            .and_then(Self::of_value)
            .unwrap_or_default()
    }

    /// The orientation for a tag value, 1 to 8.
    fn of_value(value: u16) -> Option<Self> {
        let (swapped, mirror_x, mirror_y) = match value {
            1 => (false, false, false),
            2 => (false, true, false),
            3 => (false, true, true),
            4 => (false, false, true),
            5 => (true, false, false),
            6 => (true, false, true),
            7 => (true, true, true),
            8 => (true, true, false),
            _ => return None,
        };
        Some(Self {
            swapped,
            mirror_x,
            mirror_y,
        })
    }

    pub(super) fn is_upright(self) -> bool {
        self == Self::default()
    }

    /// Converts the stored size to the upright size, or the upright size to the stored size.
    pub(super) fn size(self, size: Size) -> Size {
        if self.swapped {
            Size::new(size.height, size.width)
        } else {
            size
        }
    }

    /// Maps `crop` of the upright picture to the stored one, of size `stored`.
    pub(super) fn stored(self, crop: Crop, stored: Size) -> Crop {
        let CropPart {
            left: x,
            top: y,
            width,
            height,
        } = crop.part;
        let swap = |Rect { left, top, size }: Rect| match self.swapped {
            true => Rect {
                left: top,
                top: left,
                size: self.size(size),
            },
            false => Rect { left, top, size },
        };
        let mut view = swap(crop.view);
        let whole = self.size(crop.whole);
        let mut window = swap(crop.window);
        let mut part = match self.swapped {
            true => CropPart {
                left: y,
                top: x,
                width: height,
                height: width,
            },
            false => crop.part,
        };
        let side = view.size;
        if self.mirror_x {
            view.left = stored.width - view.right();
            window.left = whole.width - window.right();
            part.left = (f64::from(side.width) - part.left - part.width).max(0.0);
        }
        if self.mirror_y {
            view.top = stored.height - view.bottom();
            window.top = whole.height - window.bottom();
            part.top = (f64::from(side.height) - part.top - part.height).max(0.0);
        }
        Crop {
            view,
            part,
            whole,
            window,
        }
    }

    /// Writes stored RGB pixels of size `stored` (top row first) upright to `out`.
    pub(super) fn turn(self, pixels: &[u8], stored: Size, out: &mut [u8]) {
        let upright = self.size(stored);
        let pixels = pixels.as_chunks::<3>().0;
        let out = out.as_chunks_mut::<3>().0;
        let width = stored.width as usize;
        let height = stored.height as usize;
        for (y, row) in out.chunks_exact_mut(upright.width as usize).enumerate() {
            for (x, pixel) in row.iter_mut().enumerate() {
                let (column, line) = if self.swapped { (y, x) } else { (x, y) };
                let column = if self.mirror_x {
                    width - 1 - column
                } else {
                    column
                };
                let line = if self.mirror_y {
                    height - 1 - line
                } else {
                    line
                };
                *pixel = pixels[line * width + column];
            }
        }
    }
}

/// The orientation tag of the first directory of a TIFF structure.
fn tag(tiff: &[u8]) -> Option<u16> {
    let little = match tiff.get(..4)? {
        b"II*\0" => true,
        b"MM\0*" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes = *tiff.get(at..)?.first_chunk::<2>()?;
        Some(if little {
            u16::from_le_bytes(bytes)
        } else {
            u16::from_be_bytes(bytes)
        })
    };
    let long = |at: usize| {
        let bytes = *tiff.get(at..)?.first_chunk::<4>()?;
        Some(if little {
            u32::from_le_bytes(bytes)
        } else {
            u32::from_be_bytes(bytes)
        })
    };
    let directory = long(4)? as usize;
    let entries = usize::from(short(directory)?);
    // A segment has at most 64 KiB, so an entry past its end stops this early.
    for entry in 0..entries {
        let at = directory.checked_add(2 + 12 * entry)?;
        if short(at)? == TAG {
            return match (short(at + 2)?, long(at + 4)?) {
                (SHORT, 1) => short(at + 8),
                (LONG, 1) => u16::try_from(long(at + 8)?).ok(),
                _ => None,
            };
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A directory of two entries, the second the orientation.
    fn exif(little: bool, value: u16) -> Vec<u8> {
        let mut out = EXIF.to_vec();
        let order = |bytes: &[u8]| -> Vec<u8> {
            // `bytes` are big-endian.
            if little {
                bytes.iter().rev().copied().collect()
            } else {
                bytes.to_vec()
            }
        };
        out.extend(if little { b"II" } else { b"MM" });
        out.extend(order(&42_u16.to_be_bytes()));
        out.extend(order(&8_u32.to_be_bytes()));
        out.extend(order(&2_u16.to_be_bytes()));
        for (tag, value) in [(0x0100_u16, 7), (TAG, value)] {
            out.extend(order(&tag.to_be_bytes()));
            out.extend(order(&SHORT.to_be_bytes()));
            out.extend(order(&1_u32.to_be_bytes()));
            out.extend(order(&value.to_be_bytes()));
            out.extend([0, 0]);
        }
        out
    }

    #[test]
    fn the_tag_is_read_in_both_byte_orders_and_a_bad_one_is_upright() {
        for little in [true, false] {
            for value in 1..=8 {
                let exif = exif(little, value);
                let found = Orientation::of_exif(&exif);
                assert_eq!(Some(found), Orientation::of_value(value));
                assert_eq!(found.is_upright(), value == 1);
                for length in 0..exif.len() - 2 {
                    assert!(
                        Orientation::of_exif(&exif[..length]).is_upright(),
                        "cut at {length}"
                    );
                }
            }
            for value in [0, 9, 0x0600, u16::MAX] {
                assert!(
                    Orientation::of_exif(&exif(little, value)).is_upright(),
                    "{value}"
                );
            }
        }
        let mut far = exif(false, 6);
        far[10..14].fill(0xFF);
        assert!(
            Orientation::of_exif(&far).is_upright(),
            "a directory beyond the end"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_give_an_orientation(bytes in prop::collection::vec(any::<u8>(), 0..80), head in any::<bool>()) {
            let head: &[u8] = if head { b"Exif\0\0II*\0" } else { b"Exif\0\0" };
            Orientation::of_exif(&[head, &bytes].concat());
        }

        #[test]
        fn an_upright_crop_equals_the_turned_crop_of_the_stored_picture(
            (width, height) in (1_u32..12, 1_u32..12), value in 1_u16..9, seed in any::<u64>(),
        ) {
            let orientation = Orientation::of_value(value).unwrap();
            let stored = Size::new(width, height);
            let pixels: Vec<u8> = (0..width * height).flat_map(|at| [at as u8, value as u8, 3]).collect();
            let cut = |pixels: &[u8], size: Size, rect: Rect| -> Vec<u8> {
                let rows = pixels.chunks_exact(3 * size.width as usize).skip(rect.top as usize);
                let row = |row: &[u8]| row[3 * rect.left as usize..3 * rect.right() as usize].to_vec();
                rows.take(rect.size.height as usize).flat_map(row).collect()
            };
            let upright = orientation.size(stored);
            let mut all = vec![0; pixels.len()];
            orientation.turn(&pixels, stored, &mut all);
            let mut draws = feedline_core::order::Draws::new(seed, 0, 0, "test");
            let mut part = |side: u32| {
                let start = draws.below(u64::from(side)) as u32;
                (start, 1 + draws.below(u64::from(side - start)) as u32)
            };
            let (left, w) = part(upright.width);
            let (top, h) = part(upright.height);
            let rect = Rect { left, top, size: Size::new(w, h) };
            let crop = orientation.stored(Crop::of_view(rect, Size::new(5, 7)), stored);
            let whole = Crop::of_view(crop.view, orientation.size(Size::new(5, 7)));
            prop_assert_eq!(crop, whole, "a whole view stays whole");
            let mut turned = vec![0; 3 * rect.size.pixels() as usize];
            orientation.turn(&cut(&pixels, stored, crop.view), crop.view.size, &mut turned);
            prop_assert_eq!(turned, cut(&all, upright, rect));
        }
    }
}
