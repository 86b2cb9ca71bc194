//! Parts of JPEGs, decoded alone, are those of the whole picture, to the bit: with and without
//! restart markers, for crops of any place and size. And pictures that do not stand upright.

use super::geometry::{Rect, Size};
use super::orientation::Orientation;
use super::tests::{alike_after_any_picture, difference, single};
use super::workspace::{Encoded, Picture, Workspace, size_of};
use super::*;
use feedline_base::error::{Error, ErrorKind, Result};
use feedline_core::order::Draws;
use feedline_jpeg as jpeg;
use feedline_jpeg::Header;
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use proptest::prelude::*;
use std::path::Path;

fn folder(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(folder("jpeg").join(name)).unwrap()
}

/// What Pillow makes of a fixture.
fn expected() -> Vec<(String, Size, Vec<u8>)> {
    let pixels = std::fs::read(folder("jpeg").join("expected.bin")).unwrap();
    let text = String::from_utf8(std::fs::read(folder("jpeg").join("cases.txt")).unwrap()).unwrap();
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (name, numbers) = line.split_once(": ").unwrap();
            let numbers = numbers.split(' ').map(|word| word.parse().unwrap());
            let numbers: Vec<usize> = numbers.collect();
            let size = Size::new(numbers[0] as u32, numbers[1] as u32);
            let pixels = pixels[numbers[2]..][..numbers[3]].to_vec();
            (name.to_string(), size, pixels)
        })
        .collect()
}

/// A picture with nothing smooth about it: every pixel that is taken for another shows.
fn noise(seed: u64, size: Size, smooth: bool) -> Vec<u8> {
    let mut draws = Draws::new(seed, 0, 0, "noise");
    let width = size.width as usize;
    let height = size.height as usize;
    let a = draws.range_f64(0.05, 0.5);
    let b = draws.range_f64(0.05, 0.5);
    let mut pixels = Vec::with_capacity(3 * width * height);
    for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
        for channel in 0..3 {
            let wave = 90.0 * (a * x as f64 + b * y as f64 + f64::from(channel)).sin();
            let noise = draws.range_f64(-1.0, 1.0) * if smooth { 8.0 } else { 120.0 };
            pixels.push((128.0 + wave + noise).clamp(0.0, 255.0) as u8);
        }
    }
    pixels
}

/// How a picture is encoded.
#[derive(Clone, Copy, Debug)]
struct Kind {
    factor: SamplingFactor,
    gray: bool,
    progressive: bool,
    /// MCUs between restart markers; 0: none.
    interval: u16,
}

const COLOR: Kind = Kind {
    factor: SamplingFactor::F_2_2,
    gray: false,
    progressive: false,
    interval: 0,
};

fn encoded(pixels: &[u8], size: Size, kind: Kind, quality: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, quality);
    encoder.set_sampling_factor(kind.factor);
    encoder.set_progressive(kind.progressive);
    if kind.interval > 0 {
        encoder.set_restart_interval(kind.interval);
    }
    let gray: Vec<u8> = pixels.iter().step_by(3).copied().collect();
    let (data, color) = if kind.gray {
        (&gray[..], ColorType::Luma)
    } else {
        (pixels, ColorType::Rgb)
    };
    encoder
        .encode(data, size.width as u16, size.height as u16, color)
        .unwrap();
    bytes
}

/// A smooth picture in colour with a restart marker after so many MCUs.
fn restarting(seed: u64, size: Size, interval: u16) -> Vec<u8> {
    let kind = Kind { interval, ..COLOR };
    encoded(&noise(seed, size, true), size, kind, 80)
}

/// Pixels of an MCU.
fn mcu(kind: Kind) -> Size {
    let factors = kind.factor as u8 & 0x7F;
    match kind {
        Kind { gray: true, .. } => Size::new(8, 8),
        _ => Size::new(8 * u32::from(factors >> 4), 8 * u32::from(factors & 15)),
    }
}

/// All pixels, decoded from the file as it stands.
fn whole(input: &[u8]) -> (Size, Vec<u8>) {
    let size = size_of(&Header::parse(input).unwrap());
    let image = Image::resize(size.width, size.height);
    let mut workspace = Workspace::default();
    let picture = decode(input, &image, 0, &mut workspace).unwrap();
    assert_eq!(picture.size, size);
    (size, workspace.resized)
}

fn refusal(input: &[u8]) -> Option<Error> {
    decode(input, &Image::resize(4, 4), 0, &mut Workspace::default()).err()
}

fn decode(input: &[u8], image: &Image, seed: u64, workspace: &mut Workspace) -> Result<Picture> {
    let mut draws = Draws::new(seed, 0, 0, "t");
    let encoded = Encoded::alone(input);
    workspace.decode(encoded, image, Limits::default(), &mut draws, None)
}

/// Sequential and progressive scans in many orders, samplings with odd factors, with and without
/// restart markers.
#[test]
fn pictures_of_any_scan_script_have_libjpeg_turbos_pixels() {
    let list = std::fs::read_to_string(folder("scans").join("pixels.txt")).unwrap();
    let mut workspace = Workspace::default();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let (name, crc) = line.split_once(' ').unwrap();
        let input = std::fs::read(folder("scans").join(name)).unwrap();
        let whole = whole(&input);
        assert_eq!(format!("{:08x}", crc32c::crc32c(&whole.1)), crc, "{name}");
        for seed in 0..10 {
            let image = Image::random_resized_crop(5)
                .scale(0.01, 1.0)
                .ratio(0.2, 5.0);
            compare(&input, &image, seed, &mut workspace, &whole);
        }
    }
}

#[test]
fn an_incomplete_progressive_picture_is_smoothed_as_by_libjpeg_turbo() {
    let list = std::fs::read_to_string(folder("scans").join("cut.txt")).unwrap();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let [name, bytes, crc] = std::array::from_fn(|_| words.next().unwrap());
        let input = std::fs::read(folder("scans").join(name)).unwrap();
        let input = &input[..bytes.parse().unwrap()];
        let size = size_of(&Header::parse(input).unwrap());
        let all = cut(input, Rect::of(size), 1, false).unwrap();
        assert_eq!(format!("{:08x}", crc32c::crc32c(&all)), crc, "{line}");
        cut(input, Rect::of(size), 1, true).unwrap_err();
        let mut draws = Draws::new(crc32c::crc32c(input).into(), 0, 0, "part");
        for _ in 0..10 {
            let left = draws.below(size.width.into()) as u32;
            let top = draws.below(size.height.into()) as u32;
            let side = |rest: u32, draws: &mut Draws| 1 + draws.below(rest.into()) as u32;
            let width = side(size.width - left, &mut draws);
            let height = side(size.height - top, &mut draws);
            let rect = Rect {
                left,
                top,
                size: Size { width, height },
            };
            let part = cut(input, rect, 1, false).unwrap();
            assert!(part == pixels_of(&all, size, rect), "{line}: {rect:?}");
        }
    }
}

#[test]
fn frames_of_mjpeg_without_huffman_tables_have_the_standards() {
    let input = restarting(3, Size::new(40, 30), 0);
    let mut bare = input[..2].to_vec();
    let mut at = 2;
    loop {
        let segment = jpeg::Segment::next(&input, at).unwrap();
        if segment.marker != 0xC4 {
            bare.extend(&input[at..segment.end]);
        }
        at = segment.end;
        if segment.marker == 0xDA {
            break;
        }
    }
    bare.extend(&input[at..]);
    assert!(bare.len() + 400 < input.len());
    assert!(whole(&bare) == whole(&input));
}

#[test]
fn a_sequential_scan_with_the_parameters_of_a_progressive_one_is_taken_on_request() {
    let input = restarting(3, Size::new(40, 30), 0);
    let scan = Header::parse(&input).unwrap().scan;
    let mut odd = input.clone();
    odd[scan - 2] = 0;
    let decode = |strict| {
        let mut workspace = Workspace::default();
        let image = Image::resize(40, 30).strict(strict);
        decode(&odd, &image, 0, &mut workspace).map(|_| workspace.resized)
    };
    let error = decode(true).unwrap_err().to_string();
    assert!(error.contains("coefficients 0 to 0"), "{error}");
    assert!(decode(false).unwrap() == whole(&input).1);
}

/// All pixels of a rectangle.
struct Cut(Vec<u8>, usize);

impl jpeg::RowSink for Cut {
    fn row(&mut self, y: u32) -> &mut [u8] {
        &mut self.0[3 * y as usize * self.1..][..3 * self.1]
    }
}

/// The pixels of a part of a picture at 1 / `scale` of its size, by [`feedline_jpeg`].
fn cut(input: &[u8], rect: Rect, scale: u32, strict: bool) -> jpeg::Result<Vec<u8>> {
    let Rect {
        left,
        top,
        size: Size { width, height },
    } = rect;
    let mut cut = Cut(vec![0x5A; 3 * rect.size.pixels() as usize], width as usize);
    let header = Header::parse(input)?;
    let region = jpeg::Region {
        left,
        top,
        width,
        height,
    };
    let picture = jpeg::Input {
        bytes: input,
        header: &header,
        strict,
    };
    let scans = jpeg::Scans::of(picture, 100)?;
    jpeg::Decoder::default().decode(picture, &scans, &[], region, scale, &mut cut)?;
    Ok(cut.0)
}

fn pixels_of(pixels: &[u8], size: Size, rect: Rect) -> Vec<u8> {
    let rows = pixels
        .chunks_exact(3 * size.width as usize)
        .skip(rect.top as usize)
        .take(rect.size.height as usize);
    rows.flat_map(|row| &row[3 * rect.left as usize..3 * rect.right() as usize])
        .copied()
        .collect()
}

/// Compares what `image` makes of the file with what it makes of the whole picture, and the pixels
/// that it needs.
fn compare(
    input: &[u8],
    image: &Image,
    seed: u64,
    workspace: &mut Workspace,
    whole: &(Size, Vec<u8>),
) {
    decode(input, image, seed, workspace).unwrap();
    let crop = image.op.crop(whole.0, &mut Draws::new(seed, 0, 0, "t"));
    let mut other = Workspace {
        pixels: whole.1.clone(),
        ..Workspace::default()
    };
    other.resize(Rect::of(whole.0), &crop, image.filter, None);
    let size = whole.0;
    let is_same = workspace.resized == other.resized;
    assert!(is_same, "{crop:?} of {size:?}, {image:?}");
    let needed = crop.needed(image.filter);
    let found = cut(input, needed, 1, true).unwrap();
    let expected = pixels_of(&whole.1, size, needed);
    assert!(found == expected, "{needed:?} of {size:?}");
}

fn factors() -> impl Strategy<Value = SamplingFactor> {
    use SamplingFactor::*;
    prop::sample::select(vec![
        F_1_1, F_2_1, F_1_2, F_2_2, F_2_2, F_4_1, F_4_2, F_1_4, F_2_4,
    ])
}

fn divisors(of: u32) -> Vec<u32> {
    (1..=of)
        .filter(|divisor| of.is_multiple_of(*divisor))
        .collect()
}

/// An interval that can be cut: a divisor of the MCUs of a row, or some rows.
fn interval(size: Size, kind: Kind, pick: usize) -> u16 {
    let across = size.width.div_ceil(mcu(kind).width);
    let mut legal = divisors(across);
    legal.extend([2 * across, 3 * across]);
    legal[pick % legal.len()] as u16
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every factor, any size, any crop; a divisor of a row, whole rows, no restart markers,
    /// progressive.
    #[test]
    fn a_part_decoded_alone_is_that_of_the_whole_picture(
        (width, height) in (1_u32..150, 1_u32..150),
        (factor, gray, progressive) in (factors(), any::<bool>(), prop::bool::weighted(0.2)),
        restart in prop::option::weighted(0.8, any::<usize>()),
        smooth in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let size = Size::new(width, height);
        let mut kind = Kind { factor, gray, progressive, interval: 0 };
        kind.interval = restart.map_or(0, |pick| interval(size, kind, pick));
        let input = encoded(&noise(seed, size, smooth), size, kind, 80);
            let whole = whole(&input);
            let mut workspace = Workspace::default();
            for turn in 0..6 {
                let image = Image::random_resized_crop(5).scale(0.001, 1.0).ratio(0.1, 10.0);
                compare(&input, &image, seed.wrapping_add(turn), &mut workspace, &whole);
            }
            for resize in [5, 9, 40] {
                compare(&input, &Image::center_crop(resize, 5), 0, &mut workspace, &whole);
            }
    }

    /// What cannot be cut is decoded as it stands, and what is damaged is an error or some pixels,
    /// never a panic.
    #[test]
    fn damaged_restart_intervals_end_in_a_row_or_an_error(
        (width, height) in (1_u32..90, 1_u32..90),
        factor in factors(),
        pick in any::<usize>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
        strict in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let size = Size::new(width, height);
        let mut kind = Kind { factor, ..COLOR };
        kind.interval = interval(size, kind, pick);
        let mut input = encoded(&noise(seed, size, true), size, kind, 60);
        for (at, value) in flips {
            let at = at.index(input.len());
            input[at] = value;
        }
        if let Some(cut) = cut {
            input.truncate(cut.index(input.len()));
        }
        let limits = Limits { pixels: 1 << 20, bytes: 1 << 20, memory: 32 << 20, ..Limits::default() };
            let image = Image::random_resized_crop(7).limits(limits).strict(strict);
            prop_assert!(alike_after_any_picture(&input, &image, limits, seed));
    }
}

/// Files by Pillow (libjpeg-turbo): the whole picture is Pillow's, every part that of the whole
/// picture.
#[test]
fn restart_intervals_by_another_encoder_are_read_alike() {
    let mut all = expected();
    all.retain(|(name, ..)| !name.starts_with("orientation"));
    for (name, size, expected) in &all {
        let input = fixture(name);
        let whole = whole(&input);
        assert_eq!(whole.0, *size);
        assert_eq!(difference(&whole.1, expected).0, 0, "{name}");
        let mut workspace = Workspace::default();
        let image = Image::random_resized_crop(5);
        for seed in 0..60 {
            compare(&input, &image, seed, &mut workspace, &whole);
        }
    }
}

/// Offsets of the restart markers, and of the end marker.
fn markers(input: &[u8]) -> Vec<usize> {
    let scan = Header::parse(input).unwrap().scan;
    let marker = |pair: &[u8]| pair[0] == 0xFF && matches!(pair[1], 0xD0..=0xD7 | 0xD9);
    input[scan..]
        .windows(2)
        .enumerate()
        .filter(|(_, pair)| marker(pair))
        .map(|(at, _)| scan + at)
        .collect()
}

/// Wherever the crop lies.
#[test]
fn restart_markers_that_are_missing_doubled_or_out_of_order_are_errors() {
    let size = Size::new(160, 96);
    let good = restarting(3, size, 2);
    let markers = markers(&good);
    assert_eq!(markers.len(), 5 * 6);
    let mut bad = Vec::new();
    for (index, at) in markers.iter().enumerate().take(29) {
        let before = &good[..*at];
        let after = &good[at + 2..];
        bad.push(("missing", [before, after].concat()));
        let doubled = &good[*at..at + 2];
        bad.push(("doubled", [before, doubled, &good[*at..]].concat()));
        let another = [0xFF, 0xD0 | (index as u8 + 3) & 7];
        bad.push(("another", [before, &another, after].concat()));
        let rest = &good[markers[index + 1]..];
        bad.push(("a segment is missing", [before, rest].concat()));
        bad.push(("the end", [before, &[0xFF, 0xD9]].concat()));
        bad.push(("cut", before.to_vec()));
    }
    for (what, input) in bad {
        for seed in 0..4 {
            let image = Image::random_resized_crop(5).scale(0.05, 0.1);
            let mut workspace = Workspace::default();
            let mut decode = |image: &Image| decode(&input, image, seed, &mut workspace).map(drop);
            let error = decode(&image).expect_err(what);
            assert_eq!(error.kind(), ErrorKind::Decode);
            decode(&Image::resize(5, 5)).expect_err(what);
            decode(&image.strict(false)).expect(what);
        }
    }
}

#[test]
fn a_lost_restart_interval_leaves_the_others_in_their_places() {
    let size = Size::new(160, 96);
    let row = 3 * 160;
    let good = restarting(3, size, 10);
    let all = cut(&good, Rect::of(size), 1, true).unwrap();
    let markers = markers(&good);
    for lost in 0..4 {
        let bad = [&good[..markers[lost]], &good[markers[lost + 1]..]].concat();
        let found = cut(&bad, Rect::of(size), 1, false).unwrap();
        let start = row * 16 * (lost + 1);
        let end = row * 16 * (lost + 2);
        assert!(found[..start - row] == all[..start - row], "{lost}");
        assert!(found[start..end] != all[start..end], "{lost}");
        assert!(found[end + row..] == all[end + row..], "{lost}");
    }
    let mut renumbered = good.clone();
    markers[..5].iter().for_each(|at| renumbered[at + 1] ^= 5);
    assert!(refusal(&renumbered).is_some());
    assert!(cut(&renumbered, Rect::of(size), 1, false).unwrap() == all);
}

#[test]
fn segments_may_follow_the_last_restart_interval() {
    let good = restarting(3, Size::new(160, 96), 2);
    let (data, end) = good.split_at(good.len() - 2);
    for more in [
        &b"\xFF\xFE\0\x04ab"[..],
        b"\xFF\xE5\0\x02",
        b"\xFF\xDC\0\x04\0\x60",
        b"\xFF\xD5\xFF\xFE\0\x02",
    ] {
        let found = whole(&[data, more, end].concat());
        assert!(found == whole(&good), "{more:02x?}");
        let refused = refusal(&[data, more].concat());
        assert!(refused.is_some(), "without an end marker");
    }
    let refused = refusal(&[data, b"\xFF\xC8\0\x02", end].concat());
    assert!(refused.is_some(), "a marker that follows no data");
}

#[test]
fn segments_that_are_passed_may_have_a_length_below_2() {
    let good = restarting(3, Size::new(40, 30), 0);
    for empty in [b"\xFF\xE5\0\0", b"\xFF\xFE\0\x01", b"\xFF\xDC\0\0"] {
        assert!(whole(&[&good[..2], empty, &good[2..]].concat()) == whole(&good));
    }
    let refused = refusal(&[&good[..2], b"\xFF\xDB\0\0", &good[2..]].concat());
    assert!(refused.is_some(), "a table without content");
}

/// Restart markers may follow fill bytes, and a segment's data may be a stuffed byte of ones.
#[test]
fn fill_bytes_before_restart_markers_are_no_data() {
    let size = Size::new(96, 64);
    let interval = 1;
    let kind = Kind { interval, ..COLOR };
    let good = encoded(&noise(4, size, false), size, kind, 95);
    let mut filled = good.clone();
    for at in markers(&good).into_iter().rev() {
        filled.splice(at..at, [0xFF, 0xFF]);
    }
    let whole = whole(&good);
    for seed in 0..20 {
        let image = Image::random_resized_crop(5).scale(0.05, 0.5);
        compare(&filled, &image, seed, &mut Workspace::default(), &whole);
    }
}

/// Among the intervals of the crop, damage is found as it is in a whole picture.
#[test]
fn damage_under_the_crop_is_found_and_beside_it_is_not_looked_at() {
    let good = restarting(5, Size::new(160, 96), 2);
    let needed = Rect {
        left: 40,
        top: 20,
        size: Size::new(20, 20),
    };
    let decode = |input: &[u8]| cut(input, needed, 1, true).ok();
    let first = decode(&good).unwrap();
    let mut within = 0;
    let mut beside = 0;
    for (index, at) in markers(&good).into_iter().enumerate() {
        // Zeros just before a marker: a byte of data at least.
        let mut damaged = good.clone();
        damaged[at - 3..at].copy_from_slice(&[0x55, 0x10, 0x55]);
        let row = index / 5;
        let column = index % 5;
        let needs = (0..=2).contains(&row) && (1..=1).contains(&column);
        let same = decode(&damaged).as_ref() == Some(&first);
        assert!(same || needs, "interval {index}");
        within += usize::from(!same);
        beside += usize::from(!needs);
    }
    assert!(within > 0 && beside > 20, "{within} {beside}");
}

#[test]
fn a_picture_is_turned_upright_on_request_as_pillow_does() {
    let mut all = expected();
    all.retain(|(name, ..)| name.starts_with("orientation"));
    for (name, size, expected) in &all {
        let input = fixture(name);
        let image = Image::resize(size.width, size.height);
        let upright = image.clone().exif_orientation(true);
        let mut planes = single(upright.clone().layout(PixelLayout::Nchw));
        let mut upright = single(upright);
        upright.decode(&input, 0, 0, 0).unwrap();
        assert_eq!(difference(upright.bytes(0), expected).0, 0, "{name}");
        planes.decode(&input, 0, 0, 0).unwrap();
        let count = size.pixels() as usize;
        let interleaved = (0..3 * count).map(|at| planes.bytes(0)[at % 3 * count + at / 3]);
        let interleaved: Vec<u8> = interleaved.collect();
        assert_eq!(interleaved, upright.bytes(0), "{name}: planes");
        // Off by default.
        let stored = decode(&input, &image, 0, &mut Workspace::default()).unwrap();
        assert_eq!(stored.size, Size::new(29, 18));
        assert_eq!(stored.orientation, Orientation::default());
    }
}

/// Crop, flip and all are those of the upright picture: as if it had been stored so.
#[test]
fn crops_of_a_turned_picture_are_those_of_the_upright_one() {
    let size = Size::new(61, 47);
    for value in 1..=8_u8 {
        let mut exif = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".to_vec();
        exif.extend([value, 0, 0, 0, 0, 0, 0, 0]);
        let orientation = Orientation::of_exif(&[b"Exif\0\0", &exif[..]].concat());
        let upright_size = orientation.size(size);
        let upright = noise(u64::from(value), upright_size, true);
        let mut stored = vec![0; upright.len()];
        // The turn that undoes it: both quarter turns are each other's, the others their own.
        let inverse = match value {
            6 => Orientation::of_exif(&[b"Exif\0\0", &exif[..18], &[8, 0, 0, 0]].concat()),
            8 => Orientation::of_exif(&[b"Exif\0\0", &exif[..18], &[6, 0, 0, 0]].concat()),
            _ => orientation,
        };
        inverse.turn(&upright, upright_size, &mut stored);
        let encode = |pixels: &[u8], size: Size, exif: Option<&[u8]>| {
            let mut bytes = Vec::new();
            let mut encoder = Encoder::new(&mut bytes, 100);
            encoder.set_sampling_factor(SamplingFactor::F_1_1);
            if let Some(exif) = exif {
                encoder.add_exif_metadata(exif).unwrap();
            }
            let [width, height] = [size.width, size.height].map(|side| side as u16);
            encoder
                .encode(pixels, width, height, ColorType::Rgb)
                .unwrap();
            bytes
        };
        let turned = encode(&stored, size, Some(&exif));
        let straight = encode(&upright, upright_size, None);
        for image in [
            Image::random_resized_crop(24).flip(0.5),
            Image::center_crop(40, 33),
            Image::resize(30, 20),
        ] {
            let mut turned_up = single(image.clone().exif_orientation(true));
            let mut plain = single(image);
            for id in 0..10 {
                turned_up.decode(&turned, 0, 0, id).unwrap();
                plain.decode(&straight, 0, 0, id).unwrap();
                let (most, _) = difference(turned_up.bytes(0), plain.bytes(0));
                // Two encodings of the same pixels, rounded along other axes.
                assert!(most <= 4, "orientation {value}: {most}");
            }
        }
    }
}

/// jpeg-encoder writes factors of 4 in scans of one component.
#[test]
fn chroma_of_any_sampling_is_in_its_place() {
    use SamplingFactor::*;
    let size = Size::new(90, 70);
    let pixels = noise(1, size, true);
    let factors = [F_4_2, F_1_4, F_2_4, F_4_1, F_1_1, F_2_1, F_1_2, F_2_2];
    let all = factors.map(|factor| [(factor, 0), (factor, 5)]);
    for (factor, interval) in all.into_iter().flatten() {
        let kind = Kind {
            factor,
            interval,
            ..COLOR
        };
        let (_, found) = whole(&encoded(&pixels, size, kind, 90));
        let (_, mean) = difference(&found, &pixels);
        // Chroma of the wrong place: over 100.
        assert!(mean < 40.0, "{factor:?}: {mean}");
    }
}

#[cfg(turbojpeg)]
mod turbo {
    use super::super::oracle::{self, Written};
    use super::super::workspace::PURPOSE;
    use super::*;

    /// All pixels by libjpeg-turbo.
    fn right(input: &[u8]) -> (Size, Vec<u8>) {
        let ((width, height), pixels) = oracle::pixels(input, 1).unwrap();
        (Size::new(width as u32, height as u32), pixels)
    }

    /// The picture with its seek points, or as it is.
    fn embedded(input: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        jpeg::Decoder::default().embed(input, &mut out).unwrap();
        out
    }

    fn fixtures() -> Vec<Vec<u8>> {
        let files = ["jpeg", "images", "scans"]
            .into_iter()
            .flat_map(|name| std::fs::read_dir(folder(name)).unwrap());
        let mut paths: Vec<_> = files.map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|end| end == "jpg"));
        // Damaged: strict decoders refuse it.
        let damaged = [
            "fill-in-data.jpg",
            "lines.jpg",
            "long-fill.jpg",
            "lost-scan.jpg",
            "overwritten.jpg",
        ];
        paths.retain(|path| !damaged.iter().any(|name| path.ends_with(name)));
        paths.sort();
        paths
            .iter()
            .map(|path| std::fs::read(path).unwrap())
            .collect()
    }

    /// Every fixture, CMYK and progressive among them: parts are those of the whole picture, also
    /// with seek points.
    #[test]
    fn a_part_of_every_kind_of_picture_is_that_of_the_whole() {
        let all = fixtures().into_iter();
        for input in all.flat_map(|input| [embedded(&input), input]) {
            let whole = right(&input);
            for seed in 0..30 {
                let image = Image::random_resized_crop(5).scale(0.01, 1.0);
                compare(&input, &image, seed, &mut Workspace::default(), &whole);
            }
        }
    }

    /// libjpeg-turbo writes factors of 4 in one scan, which jpeg-encoder does not: 4:4:4, 4:2:2,
    /// 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1; sequential and progressive, with and without restart
    /// markers.
    #[test]
    fn pictures_by_libjpeg_turbo_are_decoded_as_by_libjpeg_turbo() {
        let kinds = (0..7).flat_map(|samp| [(samp, false), (samp, true)]);
        let kinds = kinds.flat_map(|(samp, kind)| (0..6).map(move |seed| (samp, kind, seed)));
        for (subsampling, progressive, seed) in kinds {
            let size = Size::new(60 + 13 * seed as u32, 90 - 9 * seed as u32);
            let pixels = noise(seed, size, seed % 2 == 0);
            for interval in [0, 1, 2, 3, 5] {
                let written = Written {
                    subsampling,
                    quality: 90,
                    interval,
                    progressive,
                };
                let input = oracle::encoded(&pixels, (size.width, size.height), written);
                let expected = right(&input);
                assert!(whole(&input) == expected, "{written:?} {seed}");
                let mut workspace = Workspace::default();
                for turn in 0..4 {
                    let image = Image::random_resized_crop(5)
                        .scale(0.01, 1.0)
                        .ratio(0.2, 5.0);
                    compare(&input, &image, seed + 100 * turn, &mut workspace, &expected);
                }
            }
        }
    }

    /// A block with a DC difference of 13 bits and an AC coefficient of 12, which no picture of 8
    /// bits needs.
    #[test]
    fn values_beyond_those_of_8_bits_are_libjpeg_turbos() {
        let table = |class: u8, counts: [u8; 2], symbols: &[u8]| {
            let body = [&[class], &counts[..], &[0; 14], symbols].concat();
            [&[0xFF, 0xC4, 0, 2 + body.len() as u8], &body[..]].concat()
        };
        for bits in [0x2800_u32, 0x1234, 0x3FFF, 0] {
            let frame =
                b"\xFF\xC1\0\x0B\x08\0\x08\0\x08\x01\x01\x11\0\xFF\xDA\0\x08\x01\x01\0\0\x3F\0";
            let quants = [&b"\xFF\xD8\xFF\xDB\0\x43\0"[..], &[1; 64]].concat();
            // 0 and 13 bits, 0 and 12 bits, 10; ones.
            let data =
                (u64::from(bits & 0x1FFF) << 50 | u64::from(bits & 0xFFF) << 37 | 0b10 << 35)
                    | ((1 << 35) - 1);
            let mut stuffed = Vec::new();
            for byte in &data.to_be_bytes()[..4] {
                let stuffing: &[u8] = if *byte == 0xFF { &[0] } else { &[] };
                stuffed.push(*byte);
                stuffed.extend(stuffing);
            }
            let tables = [table(0, [1, 0], &[13]), table(0x10, [1, 1], &[12, 0])].concat();
            let input = [&quants, &tables, &frame[..], &stuffed, b"\xFF\xD9"].concat();
            assert!(whole(&input) == right(&input), "{bits:x}");
        }
    }

    /// Cut, or with other bytes; the whole and a part, at a part of the size, too.
    #[test]
    fn damaged_progressive_pictures_are_shown_as_by_libjpeg_turbo() {
        let mut shown = 0;
        for seed in 0..400 {
            let mut draws = Draws::new(seed, 0, 0, "damage");
            let [width, height] = [0, 1].map(|_| 1 + draws.below(120) as u32);
            let written = Written {
                subsampling: draws.below(7) as i32,
                quality: 20 + draws.below(80) as i32,
                interval: draws.below(30) as i32 * i32::from(draws.below(3) == 0),
                progressive: true,
            };
            let size = Size::new(width, height);
            let mut input = oracle::encoded(&noise(seed, size, true), (width, height), written);
            let start = Header::parse(&input).unwrap().scan;
            let mut any = |from: usize, input: &[u8]| {
                from + draws.below((input.len() - from) as u64) as usize
            };
            match seed % 3 {
                0 => (0..3).for_each(|value| {
                    let at = any(start, &input);
                    input[at] = 77 * value;
                }),
                _ => input.truncate(any(start, &input)),
            }
            let scale = [1, 1, 2, 4, 8][draws.below(5) as usize];
            let Some((_, right)) = oracle::shown(&input, scale as usize) else {
                continue;
            };
            let size = size.divided(scale);
            let own = cut(&input, Rect::of(size), scale, false).unwrap();
            let case = format!("seed {seed}, 1/{scale} of {width}x{height} pixels, {written:?}");
            assert!(own == right, "{case}");
            shown += 1;
            let left = draws.below(size.width.into()) as u32;
            let top = draws.below(size.height.into()) as u32;
            let rect = Rect {
                left,
                top,
                size: Size::new(size.width - left, (size.height - top).div_ceil(2)),
            };
            let part = cut(&input, rect, scale, false).unwrap();
            assert!(part == pixels_of(&right, size, rect), "{rect:?}, {case}");
        }
        assert!(shown > 150, "{shown}");
    }

    /// Behind the start, before a scan and between two; of lengths that no body has, too.
    #[test]
    fn a_segment_that_libjpeg_turbo_takes_changes_no_pixel() {
        let size = Size::new(40, 30);
        let pixels = noise(3, size, true);
        let mut taken = 0;
        for (progressive, strict) in [(false, true), (true, true), (true, false)] {
            let written = Written {
                subsampling: 2,
                quality: 80,
                interval: 0,
                progressive,
            };
            let good = oracle::encoded(&pixels, (40, 30), written);
            let scans = memchr::memmem::find_iter(&good, b"\xFF\xDA").take(2);
            let places: Vec<usize> = scans.chain([2]).collect();
            let markers = (1..=0xFE).filter(|marker| *marker != 0xD9);
            let segments = markers.flat_map(|marker| (0..6).map(move |length| (marker, length)));
            for (marker, length) in segments {
                let segment = &[0xFF, marker, 0, length, 0, 0, 0][..2 + usize::from(length.max(2))];
                for at in &places {
                    let input = [&good[..*at], segment, &good[*at..]].concat();
                    let right = match oracle::size(&input) {
                        Some((40, 30)) if strict => oracle::pixels(&input, 1),
                        Some((40, 30)) => oracle::shown(&input, 1),
                        _ => None,
                    };
                    let Some((_, right)) = right else { continue };
                    taken += 1;
                    let found = cut(&input, Rect::of(size), 1, strict).unwrap();
                    assert!(
                        found == right,
                        "{segment:02x?} at {at}, progressive: {progressive}, strict: {strict}"
                    );
                }
            }
        }
        assert!(taken > 500, "{taken}");
    }

    /// All pixels at 1 / `scale` of the size, by the engine and by libjpeg-turbo; nothing of large
    /// pictures.
    fn scaled(input: &[u8], scale: u32) -> [Option<Vec<u8>>; 2] {
        let size = Header::parse(input).ok().map(|header| size_of(&header));
        let Some(size) = size.filter(|size| size.pixels() <= 1 << 20) else {
            return [None, None];
        };
        let own = cut(input, Rect::of(size.divided(scale)), scale, true);
        let turbo = oracle::pixels(input, scale as usize);
        [own.ok(), turbo.map(|(_, pixels)| pixels)]
    }

    fn written() -> impl Strategy<Value = Written> {
        let fields = (
            0..7,
            1..=100,
            prop_oneof![2 => Just(0), 1 => 1..8],
            any::<bool>(),
        );
        fields.prop_map(|(subsampling, quality, interval, progressive)| Written {
            subsampling,
            quality,
            interval,
            progressive,
        })
    }

    proptest! {
        // Ten thousand: `PROPTEST_CASES=10000`.
        #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(600)))]

        #[test]
        fn pictures_of_every_sampling_quality_and_size_equal_libjpeg_turbos(
            (width, height) in prop_oneof![8 => (1_u32..80, 1_u32..80), 1 => (1_u32..700, 1_u32..500)],
            written in written(),
            scale in prop::sample::select(vec![2, 4, 8]),
            seed in any::<u64>(),
        ) {
            let size = Size::new(width, height);
            let input = oracle::encoded(&noise(seed, size, seed.is_multiple_of(2)), (width, height), written);
            let expected = right(&input);
            prop_assert!(whole(&input) == expected, "whole");
            let image = Image::random_resized_crop(5).scale(0.01, 1.0).ratio(0.2, 5.0);
            let seekable = embedded(&input);
            prop_assert!(right(&seekable) == expected, "libjpeg-turbo's with seek points");
            for (turn, picture) in [&input, &seekable, &input, &seekable].into_iter().enumerate() {
                compare(picture, &image, seed ^ turn as u64, &mut Workspace::default(), &expected);
            }
            let [own, turbo] = scaled(&input, scale);
            prop_assert!(turbo.is_some() && own == turbo, "1/{scale}");
        }

        /// What both take for a picture is the same picture.
        #[test]
        fn damaged_pictures_are_refused_or_decoded_as_by_libjpeg_turbo(
            (width, height) in (1_u32..80, 1_u32..80),
            written in written(),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..3),
            header in any::<bool>(),
            scale in prop::sample::select(vec![1, 1, 2, 4, 8]),
            seed in any::<u64>(),
        ) {
            let size = Size::new(width, height);
            let mut input = oracle::encoded(&noise(seed, size, seed.is_multiple_of(2)), (width, height), written);
            let reach = if header { input.len().min(640) } else { input.len() };
            flips.into_iter().for_each(|(at, value)| input[at.index(reach)] = value);
            let [own, turbo] = scaled(&input, scale);
            prop_assert!(own.is_none() || turbo.is_none() || own == turbo);
        }
    }

    #[test]
    fn a_byte_or_two_before_the_end_marker_are_an_encoders_habit() {
        let size = Size::new(40, 30);
        for interval in [0, 3, 1] {
            let good = restarting(1, size, interval);
            let end = good.len() - 2;
            let mut single = single(Image::resize(8, 8));
            single.decode(&good, 0, 0, 0).unwrap();
            let expected = single.bytes(0).to_vec();
            for surplus in 1..=2 {
                let input = [&good[..end], &vec![0; surplus], &good[end..]].concat();
                single.decode(&input, 0, 0, 0).unwrap();
                assert_eq!(single.bytes(0), expected, "{surplus} bytes");
            }
            let input = [&good[..end], &[1; 24], &good[end..]].concat();
            let case = format!("interval {interval}");
            let error = single.decode(&input, 0, 0, 0).expect_err(&case);
            assert_eq!(error.kind(), ErrorKind::Decode);
        }
    }

    #[test]
    fn a_progressive_picture_of_too_many_scans_is_refused() {
        let size = Size::new(16, 16);
        let kind = Kind {
            progressive: true,
            ..COLOR
        };
        let input = encoded(&noise(1, size, true), size, kind, 80);
        // The last scan, again and again.
        let start = memchr::memmem::rfind(&input, b"\xFF\xDA").unwrap();
        let mut many = input[..start].to_vec();
        for _ in 0..150 {
            many.extend(&input[start..input.len() - 2]);
        }
        many.extend([0xFF, 0xD9]);
        for strict in [true, false] {
            let mut single = single(Image::resize(8, 8).strict(strict));
            single.decode(&input, 0, 0, 0).unwrap();
            let error = single.decode(&many, 0, 0, 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
            single.decode(&input, 0, 0, 0).unwrap();
        }
    }

    /// Slow waves: nothing that averaging in another order could change by much, but a shift by
    /// half a pixel would show.
    fn waves(seed: u64, size: Size) -> Vec<u8> {
        let mut draws = Draws::new(seed, 0, 0, "waves");
        let [a, b] = [0, 1].map(|_| draws.range_f64(0.02, 0.05));
        let pixel = |x: u32, y: u32| {
            let phase = a * f64::from(x) + b * f64::from(y);
            [0.0, 1.0, 2.0].map(|channel: f64| (128.0 + 110.0 * (phase + channel).sin()) as u8)
        };
        (0..size.height)
            .flat_map(|y| (0..size.width).flat_map(move |x| pixel(x, y)))
            .collect()
    }

    /// DCT scaling averages blocks first; what it gives is where it should be, and near what it
    /// would be without.
    #[test]
    fn scaled_decoding_is_near_the_whole() {
        for (output, scale) in [(60, 2), (30, 4), (15, 8)] {
            let mut most = 0;
            let mut mean = 0.0_f64;
            for seed in 0..20 {
                let size = Size::new(180 + seed as u32, 140);
                let interval = if seed % 2 == 0 { 1 } else { 0 };
                let kind = Kind { interval, ..COLOR };
                let input = encoded(&waves(seed, size), size, kind, 95);
                for image in [
                    Image::center_crop(output, output),
                    Image::random_resized_crop(output).scale(0.9, 1.0),
                ] {
                    let scaled = image.clone().dct_scaling(true);
                    let crop = image.op.crop(size, &mut Draws::new(0, 0, seed, PURPOSE));
                    if crop.part.width.min(crop.part.height) >= f64::from(scale * output) {
                        assert_eq!(scaled.scale_of(&crop), scale);
                    }
                    let mut exact = single(image);
                    let mut scaled = single(scaled);
                    exact.decode(&input, 0, 0, seed).unwrap();
                    scaled.decode(&input, 0, 0, seed).unwrap();
                    let (max, average) = difference(exact.bytes(0), scaled.bytes(0));
                    most = most.max(max);
                    mean = mean.max(average);
                }
            }
            println!("1/{scale}: most {most}, mean {mean:.2}");
            assert!(most <= 12 && mean <= 2.0, "1/{scale}: {most} {mean}");
        }
    }
}
