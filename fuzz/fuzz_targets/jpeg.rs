//! A JPEG of any scans: whole, at a part of its size and cut from its middle, without seek points,
//! with those beside it and in it, its pixels are libjpeg-turbo's to the bit, if both take it. So
//! is what both show of a damaged progressive one.
//!
//! An input is a JPEG file, or (any other first bytes) a recipe of one, which both take or neither,
//! unless the recipe damages it. `FEEDLINE_JPEG=out.jpg` keeps the picture of a recipe.
//!
//! `cargo +nightly fuzz run jpeg --features turbojpeg tests/fixtures/images tests/fixtures/jpeg --
//! -rss_limit_mb=512`
#![no_main]

#[path = "jpeg/recipe.rs"]
mod recipe;
#[path = "../../tests/common/turbojpeg.rs"]
mod turbo;

use feedline::decode::Image;
use feedline::decode::Single;
use feedline::tensor::EncodedField;
use feedline::unstable::embed_seek_points;
use libfuzzer_sys::fuzz_target;

const PIXELS_MAX: usize = 1 << 18;

/// Start of seek points in a picture.
const NAME: &[u8] = b"feedseek\0";

fuzz_target!(|bytes: &[u8]| {
    if bytes.starts_with(&[0xFF, 0xD8]) {
        compare(bytes, false);
        return;
    }
    let recipe::Made { picture, intact } = recipe::picture(bytes);
    if let Some(path) = std::env::var_os("FEEDLINE_JPEG") {
        std::fs::write(path, &picture).expect("a file that can be written");
    }
    compare(&picture, intact);
});

/// Compares what can be compared. If `both`, one must not refuse what the other takes.
fn compare(picture: &[u8], both: bool) {
    // Points made to deceive may change pixels.
    if picture.windows(NAME.len()).any(|name| name == NAME) {
        return;
    }
    let Some((width, height)) = turbo::size(picture) else {
        return;
    };
    // The longer side first: a size that the library does not know is the largest of all numbers.
    if width.max(height) > 16_384 || width * height > PIXELS_MAX {
        return;
    }
    let draw = picture.iter().fold(7_usize, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add((*byte).into())
    });
    let seekable = embed_seek_points(picture).ok();
    for scale in [1, [2, 4, 8][draw % 3]] {
        // Otherwise the last pixel's width is a fraction, and the picture is resampled.
        if width % scale == 0 && height % scale == 0 {
            compare_scaled(
                (picture, seekable.as_deref()),
                (width / scale, height / scale),
                scale,
                (draw / 3, both),
            );
        }
    }
}

/// Compares the picture at 1 / `scale` of its size, which is `width` × `height` then.
fn compare_scaled(
    (picture, seekable): (&[u8], Option<&[u8]>),
    (width, height): (usize, usize),
    scale: usize,
    (draw, both): (usize, bool),
) {
    let right = turbo::pixels(picture, scale).map(|(size, pixels)| {
        assert_eq!(size, (width, height));
        pixels
    });
    let whole = decode(
        &mut single(Image::resize(width as u32, height as u32), scale),
        picture,
        &[],
    );
    let check = |right: &[u8], found: &[u8], width: usize, what: &str| {
        let found = difference(right, found, width);
        assert!(found.is_none(), "{what}: {}", found.unwrap_or_default());
    };
    let what = format!("1/{scale} of {width}x{height} pixels");
    let taken = (right.is_some(), whole.is_ok());
    assert!(
        !both || taken.0 == taken.1,
        "{what}: libjpeg-turbo takes it: {}; {:?}",
        taken.0,
        whole.err()
    );
    let (strict, right, whole) = match (right, whole) {
        (Some(right), Ok(whole)) => (true, right, whole),
        _ if !turbo::is_progressive(picture) => return,
        _ => {
            let mut single = single(
                Image::resize(width as u32, height as u32).strict(false),
                scale,
            );
            let shown = (
                turbo::shown(picture, scale),
                decode(&mut single, picture, &[]),
            );
            let (Some((_, right)), Ok(whole)) = shown else {
                return;
            };
            (false, right, whole)
        }
    };
    check(&right, &whole, width, &format!("{what}, strict: {strict}"));
    let shorter = width.min(height);
    let size = 1 + draw % shorter;
    let cut = cut(&right, (width, height), size);
    let mut single = self::single(
        Image::center_crop(shorter as u32, size as u32).strict(strict),
        scale,
    );
    let seekable = match strict {
        true => seekable.expect("what is decoded whole gets seek points, or stays as it is"),
        false => picture,
    };
    let same = turbo::pixels(seekable, scale).is_some_and(|(_, pixels)| pixels == right);
    assert!(same || !strict, "libjpeg-turbo, seek points");
    let points = points_of(seekable);
    for (place, picture, points) in [
        ("none", picture, &[][..]),
        ("beside", picture, points),
        ("inside", seekable, &[]),
    ] {
        let what = format!("cut of {size}, {what}, strict: {strict}, seek points: {place}");
        let found = decode(&mut single, picture, points).expect("the whole was decoded");
        check(&cut, &found, size, &what);
    }
}

/// The seek points in a picture; empty without any.
fn points_of(picture: &[u8]) -> &[u8] {
    let Some(at) = picture.windows(NAME.len()).position(|name| name == NAME) else {
        return &[];
    };
    let length = usize::from(u16::from_be_bytes([picture[at - 2], picture[at - 1]]));
    &picture[at + NAME.len()..at - 2 + length]
}

fn single(image: Image, scale: usize) -> Single {
    Single::new(image.dct_scaling(scale > 1), &EncodedField::image("image"))
        .expect("legal settings")
}

fn decode(single: &mut Single, picture: &[u8], points: &[u8]) -> Result<Vec<u8>, feedline::Error> {
    single.decode_seeking(picture, points, 0, 0, 0)?;
    Ok(single.bytes(0).to_vec())
}

/// The middle of a picture, as a centre crop takes it.
fn cut(pixels: &[u8], (width, height): (usize, usize), size: usize) -> Vec<u8> {
    let start = |side: usize| ((side - size) as f64 / 2.0).round_ties_even() as usize;
    let rows = pixels
        .chunks_exact(3 * width)
        .skip(start(height))
        .take(size);
    rows.flat_map(|row| &row[3 * start(width)..][..3 * size])
        .copied()
        .collect()
}

/// What differs, in words.
fn difference(right: &[u8], found: &[u8], width: usize) -> Option<String> {
    assert_eq!(right.len(), found.len());
    let mut wrong = right
        .iter()
        .zip(found)
        .enumerate()
        .filter(|(_, (right, found))| right != found);
    let (at, (right, found)) = wrong.next()?;
    let row = at / 3 / width;
    let column = at / 3 % width;
    let channel = at % 3;
    let count = 1 + wrong.count();
    Some(format!(
        "{count} values; the first in row {row}, column {column}, channel {channel}: {found}, not {right}"
    ))
}
