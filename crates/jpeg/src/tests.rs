//! The kernels against each other, regions against the whole picture, seek points, and damage.

use super::header::SEEK;
use super::*;
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use proptest::prelude::*;

/// Numbers of a seed (SplitMix64).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// A number between `-most` and `most`.
    fn around(&mut self, most: f64) -> f64 {
        most * (self.next() as f64 / u64::MAX as f64 * 2.0 - 1.0)
    }
}

fn with(kernels: JpegKernels) -> Decoder {
    Decoder {
        kernels,
        ..Decoder::default()
    }
}

/// All pixels of a region.
struct Pixels(Vec<u8>, usize);

impl Pixels {
    fn of(region: Region) -> Self {
        let row = 3 * region.width as usize;
        Self(vec![0x5A; row * region.height as usize], row)
    }
}

impl RowSink for Pixels {
    fn row(&mut self, y: u32) -> &mut [u8] {
        &mut self.0[y as usize * self.1..][..self.1]
    }
}

fn decode(
    decoder: &mut Decoder,
    input: &[u8],
    region: Option<Region>,
    strict: bool,
) -> Result<Vec<u8>> {
    let header = Header::parse(input)?;
    let whole = Region {
        left: 0,
        top: 0,
        width: header.width,
        height: header.height,
    };
    let region = region.unwrap_or(whole);
    let mut out = Pixels::of(region);
    let picture = Input {
        bytes: input,
        header: &header,
        strict,
    };
    decoder.decode(picture, &Scans::of(picture, 100)?, &[], region, 1, &mut out)?;
    Ok(out.0)
}

fn decode_with(points: &[u8], input: &[u8], region: Region) -> Result<Vec<u8>> {
    let mut out = Pixels::of(region);
    let picture = Input {
        bytes: input,
        header: &Header::parse(input)?,
        strict: true,
    };
    let scans = Scans::of(picture, 100)?;
    Decoder::default().decode(picture, &scans, points, region, 1, &mut out)?;
    Ok(out.0)
}

fn noise(seed: u64, count: usize, most: f64) -> Vec<u8> {
    let mut draws = Draws(seed);
    (0..count)
        .map(|at| (128.0 + 60.0 * (at as f64 / 9.0).sin() + draws.around(most)) as u8)
        .collect()
}

/// Samplings that jpeg-encoder writes in one scan.
const FACTORS: [SamplingFactor; 4] = [
    SamplingFactor::F_1_1,
    SamplingFactor::F_2_1,
    SamplingFactor::F_1_2,
    SamplingFactor::F_2_2,
];

fn encoded(seed: u64, size: (u16, u16), factor: usize, channels: usize, interval: u16) -> Vec<u8> {
    encoded_as(seed, size, factor, channels, interval, false)
}

fn encoded_as(
    seed: u64,
    size: (u16, u16),
    factor: usize,
    channels: usize,
    interval: u16,
    progressive: bool,
) -> Vec<u8> {
    let (width, height) = size;
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, 1 + (seed % 100) as u8);
    encoder.set_sampling_factor(FACTORS[factor % 4]);
    encoder.set_progressive(progressive);
    if interval > 0 {
        encoder.set_restart_interval(interval);
    }
    let count = usize::from(width) * usize::from(height) * channels;
    let most = if seed.is_multiple_of(2) { 8.0 } else { 120.0 };
    let pixels = noise(seed, count, most);
    let kind = match channels {
        1 => ColorType::Luma,
        4 => ColorType::Cmyk,
        _ => ColorType::Rgb,
    };
    encoder.encode(&pixels, width, height, kind).unwrap();
    bytes
}

#[test]
fn vector_kernels_equal_the_scalar_ones() {
    let best = JpegKernels::default();
    let mut draws = Draws(1);
    let mut bytes =
        |count: usize| -> Vec<u8> { (0..count).map(|_| draws.below(256) as u8).collect() };
    for width in 0..150 {
        let near = bytes(width + 2);
        let far = bytes(width + 2);
        for out in [2 * width, (2 * width).saturating_sub(1)] {
            let both = [best, kernels::SCALAR].map(|kernels| {
                let mut rows = [out, out, width, 3 * width].map(|len| vec![0; len]);
                (kernels.h2v1)(&near, &mut rows[0]);
                (kernels.h2v2)(&near, &far, &mut rows[1]);
                (kernels.h1v2)(&near[1..=width], &far[1..=width], 2, &mut rows[2]);
                (kernels.rgb)([&near[..width], &far[..width], &near[2..]], &mut rows[3]);
                rows
            });
            assert!(both[0] == both[1], "width {width}");
        }
    }
}

#[test]
fn vector_transforms_equal_the_scalar_ones() {
    let best = JpegKernels::default();
    let mut draws = Draws(2);
    for turn in 0..20_000 {
        // All values that coded data can hold, and tables of 16 bits, at times.
        let (most, table) = if turn % 4 == 0 {
            (2048, 65_535)
        } else {
            (1 << (turn % 11), 120)
        };
        let filled = 1 + draws.below(64);
        let mut value = |k: u64| match k < filled {
            true => draws.below(2 * most) as i16 - most as i16,
            false => 0,
        };
        let blocks: [[i16; 64]; 2] =
            std::array::from_fn(|_| std::array::from_fn(|k| value(k as u64)));
        let quants: [[u16; 64]; 2] =
            std::array::from_fn(|_| std::array::from_fn(|_| 1 + draws.below(table) as u16));
        let [found, right] = [best, kernels::SCALAR].map(|kernels| {
            let transforms = [(kernels.idct, 8), (kernels.idct4, 4), (kernels.idct2, 2)];
            transforms.map(|(transform, size)| {
                let mut out = [[0; 64]; 2];
                transform(([&blocks[0], &blocks[1]], [&quants[0], &quants[1]], &mut out));
                // What lies beside the samples counts for nothing.
                let samples = (0..64).filter(|k| k / 8 < size && k % 8 < size);
                let samples: Vec<usize> = samples.collect();
                out.map(|out| samples.iter().map(|k| out[*k]).collect::<Vec<_>>())
            })
        });
        assert!(found == right, "turn {turn}");
    }
}

#[test]
fn a_flat_block_equals_its_transform() {
    let pairs = (-2048..2048).flat_map(|dc| [1, 3, 16, 99, 255].map(|quant| (dc, quant)));
    // Beyond that, 16 bits overflow.
    let fits = |dc: i16, quant: u16| i32::from(dc).unsigned_abs() * u32::from(quant) < 8192;
    for (dc, quant) in pairs.filter(|(dc, quant)| fits(*dc, *quant)) {
        let mut block = [0; 64];
        block[0] = dc;
        let mut out = [[0; 64]; 2];
        (kernels::SCALAR.idct)(([&block, &block], [&[quant; 64], &[quant; 64]], &mut out));
        assert_eq!([[kernels::flat(dc, quant); 64]; 2], out, "{dc} × {quant}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_region_is_a_cut_of_the_whole_picture(
        (width, height) in (1_u16..130, 1_u16..130),
        (factor, channels) in (0_usize..4, prop::sample::select(vec![1_usize, 3, 3, 4])),
        interval in prop_oneof![Just(0_u16), 1_u16..12],
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 8),
        (seed, progressive) in any::<(u64, bool)>(),
    ) {
        let input = encoded_as(seed, (width, height), factor, channels, interval, progressive);
        let mut decoder = Decoder::default();
        let whole = decode(&mut decoder, &input, None, true).unwrap();
        prop_assert!(decode(&mut with(kernels::SCALAR), &input, None, true).unwrap() == whole, "scalar kernels differ");
        for ends in places.chunks(2) {
            let side = |ends: [prop::sample::Index; 2], of: u16| {
                let [a, b] = ends.map(|end| end.index(usize::from(of)) as u32);
                (a.min(b), a.abs_diff(b) + 1)
            };
            let ((left, wide), (top, high)) =
                (side([ends[0].0, ends[1].0], width), side([ends[0].1, ends[1].1], height));
            let region = Region { left, top, width: wide, height: high };
            let found = decode(&mut decoder, &input, Some(region), true).unwrap();
            let rows = whole.chunks(3 * usize::from(width)).skip(top as usize).take(high as usize);
            let cut: Vec<u8> = rows.flat_map(|row| &row[3 * left as usize..3 * (left + wide) as usize]).copied().collect();
            prop_assert!(found == cut, "{region:?} of {width}x{height}");
        }
    }

    /// Beside the picture and in it: their own, damaged and cut ones, and those of other codes.
    #[test]
    fn seek_points_change_no_pixel(
        (width, height) in (1_u16..300, 1_u16..200),
        (factor, channels) in (0_usize..4, prop::sample::select(vec![1_usize, 3, 3, 4])),
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 2),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        seed in any::<u64>(),
    ) {
        let input = encoded(seed, (width, height), factor, channels, 0);
        let points = Decoder::default().seek_points(&input);
        let [(left, wide), (top, high)] = [(0, width), (1, height)].map(|(axis, of)| {
            let end = |at: usize| [places[at].0, places[at].1][axis].index(usize::from(of)) as u32;
            (end(0).min(end(1)), end(0).abs_diff(end(1)) + 1)
        });
        let region = Region { left, top, width: wide, height: high };
        let right = decode(&mut Decoder::default(), &input, Some(region), true).unwrap();
        let mut damaged = points.clone();
        for (at, value) in &flips {
            damaged[at.index(points.len())] = *value;
        }
        let cut = &points[..flips[0].0.index(points.len())];
        for points in [&points, &damaged, cut] {
            prop_assert!(decode_with(points, &input, region).unwrap() == right, "{region:?} of {width}x{height}");
            prop_assert!(decode_with(&[], &with_segment(&input, points), region).unwrap() == right);
            // Of points in both places, those beside the picture come first.
            prop_assert!(decode_with(points, &embedded(&input).1, region).unwrap() == right);
        }
        // Made to deceive.
        prop_assert!(decode_with(&resealed(&damaged, &input), &input, region).is_ok());
        // The same header and length, other coded data.
        let mut other = input.clone();
        let scan = Header::parse(&input).unwrap().scan;
        for (at, value) in flips {
            other[scan + at.index(input.len() - scan - 2)] = value;
        }
        let right = decode(&mut Decoder::default(), &other, Some(region), true).ok();
        prop_assert!(decode_with(&points, &other, region).ok() == right);
        prop_assert!(decode_with(&[], &with_segment(&other, &points), region).ok() == right);
    }

    /// Any bytes: pixels or an error. What it makes of them depends on them alone.
    #[test]
    fn damaged_bytes_end_in_pixels_or_an_error(
        (width, height) in (1_u16..90, 1_u16..90),
        (factor, channels) in (0_usize..4, prop::sample::select(vec![1_usize, 3, 3, 4])),
        interval in prop_oneof![Just(0_u16), 1_u16..12],
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..9),
        (header, cut) in (any::<bool>(), prop::option::weighted(0.2, any::<prop::sample::Index>())),
        (strict, progressive) in any::<(bool, bool)>(),
        seed in any::<u64>(),
    ) {
        let mut input = encoded_as(seed, (width, height), factor, channels, interval, progressive);
        let reach = if header { 700.min(input.len()) } else { input.len() };
        for (at, value) in flips {
            input[at.index(reach)] = value;
        }
        if let Some(cut) = cut {
            input.truncate(cut.index(input.len()));
        }
        let small = |input: &[u8]| Header::parse(input).is_ok_and(|header| {
            u64::from(header.width) * u64::from(header.height) <= 1 << 20
        });
        if small(&input) {
            let mut used = Decoder::default();
            decode(&mut used, &encoded(seed ^ 1, (40, 30), 3, 3, 0), None, true).unwrap();
            let kernels = [JpegKernels::default(), kernels::SCALAR].map(with).into_iter();
            let all: Vec<_> = kernels.chain([used])
                .map(|mut decoder| decode(&mut decoder, &input, None, strict).map_err(|error| error.to_string()))
                .collect();
            prop_assert!(all[0] == all[1] && all[1] == all[2], "{:?}", all.iter().map(Result::is_ok).collect::<Vec<_>>());
            // A part of a damaged picture, too, is a cut of the whole.
            let header = Header::parse(&input).unwrap();
            let left = header.width / 2;
            let top = header.height / 3;
            let region = Region { left, top, width: header.width - left, height: header.height - top };
            let part = decode(&mut Decoder::default(), &input, Some(region), false);
            if let (false, Ok(whole), Ok(part)) = (strict, &all[0], part) {
                let rows = whole.chunks(3 * header.width as usize).skip(top as usize);
                let cut: Vec<u8> = rows.flat_map(|row| &row[3 * left as usize..]).copied().collect();
                prop_assert!(part == cut);
            }
        }
    }
}

/// The picture with these points in it.
fn with_segment(input: &[u8], points: &[u8]) -> Vec<u8> {
    let length = ((points.len() + 2 + SEEK.len()) as u16).to_be_bytes();
    let (start, rest) = input.split_at(2);
    [start, &[0xFF, 0xEF], &length, SEEK, points, rest].concat()
}

/// Where the first segment of this kind begins.
fn segment_of(picture: &[u8], marker: u8) -> usize {
    memchr::memmem::find(picture, &[0xFF, marker]).unwrap()
}

fn embedded(input: &[u8]) -> (Embedded, Vec<u8>) {
    let mut out = vec![1, 2, 3];
    let done = Decoder::default().embed(input, &mut out).unwrap();
    (done, out)
}

/// The points with the CRC that this picture asks for.
fn resealed(points: &[u8], input: &[u8]) -> Vec<u8> {
    let header = Header::parse(input).unwrap();
    let numbers = &points[4..];
    let crc = seek::identity(input, &header, header.end_marker(input).unwrap(), numbers);
    [&crc.to_le_bytes(), numbers].concat()
}

/// Whether the points in a picture belong to it.
fn fit(picture: &[u8]) -> bool {
    let header = Header::parse(picture).unwrap();
    Points::new(header.points_of(picture), picture, &header).is_some()
}

#[test]
fn a_crop_with_seek_points_does_not_decode_what_is_above_and_beside_it() {
    let input = encoded(40, (400, 300), 3, 3, 0);
    let points = Decoder::default().seek_points(&input);
    let scan = Header::parse(&input).unwrap().scan;
    let region = Region {
        left: 200,
        top: 200,
        width: 90,
        height: 60,
    };
    let right = decode(&mut Decoder::default(), &input, Some(region), true).unwrap();
    let mut holed = input.clone();
    holed[scan..scan + (input.len() - scan) / 2].fill(0);
    let points = resealed(&points, &holed);
    assert!(decode_with(&points, &holed, region).unwrap() == right);
    assert!(decode_with(&[], &with_segment(&holed, &points), region).unwrap() == right);
    assert!(decode(&mut Decoder::default(), &holed, Some(region), true).ok() != Some(right));
}

#[test]
fn seek_points_stay_with_their_codes() {
    let (_, picture) = embedded(&encoded(40, (300, 200), 3, 3, 0));
    assert!(fit(&picture));
    let comment = [0xFF, 0xFE, 0, 6, b't', b'e', b'x', b't'];
    let app15 = segment_of(&picture, 0xEF);
    let next = Segment::next(&picture, app15).unwrap().end;
    // Metadata, quantisation, and bytes behind the picture.
    let header = Header::parse(&picture).unwrap();
    for at in [2, app15, next, header.height_at - 5] {
        let commented = [&picture[..at], &comment, &picture[at..]].concat();
        assert!(fit(&commented), "{at}");
    }
    let quants = segment_of(&picture, 0xDB);
    let changed = |at: usize| {
        let mut picture = picture.clone();
        picture[at] ^= 1;
        picture
    };
    assert!(fit(&changed(quants + 20)));
    assert!(fit(&[&picture[..], &[0; 1000], &picture].concat()));
    // Points, size, tables, codes, and a cut end.
    let tables = segment_of(&picture, 0xC4);
    let end = header.end_marker(&picture).unwrap();
    for at in [
        app15 + 4 + SEEK.len(),
        next - 1,
        header.height_at + 1,
        tables + 6,
        header.scan,
        header.scan + 1000,
        end - 1,
    ] {
        assert!(!fit(&changed(at)), "{at}");
    }
    assert!(!fit(&picture[..end - 1]));
    // A restart interval.
    let interval = [0xFF, 0xDD, 0, 4, 0, 9];
    assert!(!fit(&[&picture[..2], &interval, &picture[2..]].concat()));
}

#[test]
fn seek_points_follow_the_first_segments_and_replace_wrong_ones() {
    let plain = encoded(40, (300, 200), 3, 3, 0);
    let jfif = Segment::next(&plain, 2).unwrap();
    assert_eq!(jfif.marker, 0xE0);
    let exif = [0xFF, 0xE1, 0, 8, b'E', b'x', b'i', b'f', 0, 0];
    let input = [&plain[..jfif.end], &exif, &plain[jfif.end..], b"behind"].concat();
    let (Embedded::Points(bytes), picture) = embedded(&input) else {
        panic!("no points")
    };
    let at = jfif.end + exif.len();
    let points = Decoder::default().seek_points(&input);
    assert_eq!(bytes as usize, points.len());
    let segment = &with_segment(&input, &points)[2..][..4 + SEEK.len() + points.len()];
    assert!(picture == [&input[..at], segment, &input[at..]].concat());
    assert!(Decoder::default().seek_points(&picture) == points);
    // Also where other programs put them, and before other bytes.
    let moved = with_segment(&[&input[..], &[7; 9999]].concat(), &points);
    for picture in [&picture, &moved] {
        let unchanged = Embedded::Unchanged(WithoutPoints::Present);
        assert!(embedded(picture) == (unchanged, picture.clone()));
    }
    // Wrong ones and more than one.
    for wrong in [
        &[][..],
        &[1, 2, 3],
        &points[..points.len() - 1],
        &[&points[..], &[0]].concat(),
    ] {
        let wrong = with_segment(&with_segment(&input, &points), wrong);
        assert!(embedded(&wrong) == (Embedded::Points(bytes), picture.clone()));
    }
    // Right by their CRC alone.
    let mut points = points;
    points[9] ^= 1;
    let wrong = with_segment(&input, &resealed(&points, &input));
    let mut found = Vec::new();
    let done = Decoder::default().embed(&wrong, &mut found).unwrap();
    assert!(!matches!(done, Embedded::Unchanged(_)));
    let pixels = |picture: &[u8]| decode(&mut Decoder::default(), picture, None, true).unwrap();
    assert!(pixels(&found) == pixels(&input));
}

#[test]
fn seek_points_fit_their_segment() {
    for (seed, factor, channels) in [(98, 0, 4), (41, 3, 3), (99, 0, 1)] {
        let input = encoded(seed, (200, 160), factor, channels, 0);
        let region = Region {
            left: 50,
            top: 90,
            width: 60,
            height: 40,
        };
        let right = decode(&mut Decoder::default(), &input, Some(region), true).unwrap();
        for most in 45..200 {
            let (_, points) = Decoder::default().survey(&input, most).unwrap().unwrap();
            assert!(points.len() <= most, "{} of {most} bytes", points.len());
            assert!(decode_with(&points, &input, region).unwrap() == right);
        }
    }
}

#[test]
fn seek_points_take_about_a_hundredth_of_the_picture() {
    for (seed, factor, channels) in [
        (10, 3, 3),
        (40, 3, 3),
        (75, 1, 3),
        (90, 0, 3),
        (60, 0, 1),
        (80, 3, 4),
    ] {
        let input = encoded(seed, (500, 375), factor, channels, 0);
        let points = Decoder::default().seek_points(&input);
        let share = points.len() as f64 / input.len() as f64;
        assert!((0.005..0.013).contains(&share), "{share}, seed {seed}");
    }
}

#[test]
fn some_pictures_have_no_seek_points_for_a_reason() {
    let input = encoded(9, (64, 64), 3, 3, 0);
    let frame = Header::parse(&input).unwrap().height_at - 5;
    let with = |at: usize, bytes: &[u8]| {
        let mut input = input.clone();
        input[frame + at..][..bytes.len()].copy_from_slice(bytes);
        input
    };
    let progressive = encoded_as(9, (64, 64), 3, 3, 0, true);
    for (input, why) in [
        (b"text".to_vec(), WithoutPoints::NotJpeg),
        (progressive, WithoutPoints::SeveralScans),
        (encoded(9, (64, 64), 3, 3, 2), WithoutPoints::RestartMarkers),
        // Lossless, arithmetic, 12 bits, no height.
        (with(1, &[0xC3]), WithoutPoints::Unsupported),
        (with(1, &[0xC9]), WithoutPoints::Unsupported),
        (with(4, &[12]), WithoutPoints::Unsupported),
        (with(5, &[0, 0]), WithoutPoints::Unsupported),
    ] {
        let (done, picture) = embedded(&input);
        assert!(done == Embedded::Unchanged(why), "{why:?}");
        assert!(picture == input, "{why:?}");
        assert!(Decoder::default().seek_points(&input).is_empty());
    }
}

#[test]
fn damaged_pictures_get_no_points_but_strict_decodings_error() {
    let input = encoded(9, (64, 64), 3, 3, 0);
    let scan = Header::parse(&input).unwrap().scan;
    let mut code = input.clone();
    code[scan + 40..scan + 48].copy_from_slice(&[0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0]);
    let surplus = [&input[..input.len() - 2], &[0; 9], &[0xFF, 0xD9]].concat();
    let short = [&input[..input.len() - 60], &[0xFF, 0xD9]].concat();
    for damaged in [
        &input[..input.len() - 2],
        &input[..300],
        &input[..4],
        &code,
        &surplus,
        &short,
    ] {
        let mut out = vec![1];
        let error = Decoder::default().embed(damaged, &mut out).unwrap_err();
        let strict = decode(&mut Decoder::default(), damaged, None, true).unwrap_err();
        assert_eq!(error.message(), strict.message());
        let kinds = [ErrorKind::Damaged, ErrorKind::Invalid, ErrorKind::Truncated];
        assert!(kinds.contains(&error.kind()) && out.is_empty(), "{error}");
        assert!(Decoder::default().seek_points(damaged).is_empty());
    }
    let jfif = Segment::next(&input, 2).unwrap().end;
    let stray = [&input[..jfif], &[1, 2], &input[jfif..]].concat();
    let embedded = Decoder::default().embed(&stray, &mut Vec::new());
    let error = embedded.unwrap_err();
    assert!(error.message().contains("2 stray bytes"), "{error}");
}

#[test]
fn errors_name_the_byte_and_the_mcu() {
    let input = encoded(4, (64, 64), 3, 3, 0);
    let scan = Header::parse(&input).unwrap().scan;
    let mut damaged = input.clone();
    // No code has ones alone.
    damaged[scan + 40..scan + 48].copy_from_slice(&[0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0]);
    let error = decode(&mut Decoder::default(), &damaged, None, true).unwrap_err();
    let words: Vec<&str> = error.message().split(' ').collect();
    let byte = words.iter().position(|word| *word == "byte").unwrap();
    let offset: usize = words[byte + 1].parse().unwrap();
    assert!((scan + 30..scan + 80).contains(&offset), "{error}");
    assert!(error.message().contains("in MCU "), "{error}");
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    let cut = [&input[..input.len() - 60], &[0xFF, 0xD9]].concat();
    let error = decode(&mut Decoder::default(), &cut, None, true).unwrap_err();
    let words = "data ends before the picture is complete";
    assert!(error.message().contains(words), "{error}");
}
