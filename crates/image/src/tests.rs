//! Against Pillow and torchvision (fixtures), against straight loops (the oracle below), and
//! against damage.

use super::finish::Values;
use super::geometry::{Crop, Rect, Size};
use super::settings::Op;
use super::workspace::{Encoded, PURPOSE, Workspace};
use super::*;
use feedline_base::error::{ErrorKind, Result};
use feedline_core::decode::{Decoder, Single};
use feedline_core::order::Draws;
use feedline_core::tensor::{DType, EncodedField, Field, bf16, f16};
use feedline_jpeg as jpeg;
use feedline_jpeg::Header;
use proptest::prelude::*;
use std::path::{Path, PathBuf};

const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/images")
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(folder().join(name)).unwrap()
}

/// Every picture of the fixtures.
fn fixtures() -> Vec<(String, Vec<u8>)> {
    let names = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names
        .filter(|name| !name.ends_with("txt") && !name.ends_with("bin"))
        .collect();
    names.sort();
    names
        .into_iter()
        .map(|name| (name.clone(), fixture(&name)))
        .collect()
}

/// The whole picture as RGB.
fn whole(input: &[u8], workspace: &mut Workspace) -> Result<(Size, Vec<u8>)> {
    let mut sized = |width, height| {
        let image = Image::resize(width, height);
        decode(input, &image, Limits::default(), 0, workspace)
    };
    let Size { width, height } = sized(1, 1)?;
    let size = sized(width, height)?;
    Ok((size, workspace.resized.clone()))
}

/// Gives the size at which the picture was decoded.
fn decode(
    input: &[u8],
    image: &Image,
    limits: Limits,
    seed: u64,
    workspace: &mut Workspace,
) -> Result<Size> {
    let mut draws = Draws::new(seed, 0, 0, "test");
    let picture = workspace.decode(Encoded::alone(input), image, limits, &mut draws, None)?;
    Ok(picture.size)
}

pub(super) fn single(image: Image) -> Single {
    Single::new(image, &EncodedField::image("image")).unwrap()
}

/// Largest and mean difference.
pub(super) fn difference(a: &[u8], b: &[u8]) -> (u8, f64) {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| a.abs_diff(*b));
    (
        differences.clone().max().unwrap_or(0),
        differences.map(f64::from).sum::<f64>() / a.len() as f64,
    )
}

/// Largest and mean difference of a decoded picture from Pillow's.
///
/// None for JPEGs, lossless formats, GIF and (with this version of `image`) WebP.
fn tolerance(picture: &str) -> (u8, f64) {
    if picture.starts_with("lossy") {
        (1, 0.1)
    } else {
        (0, 0.0)
    }
}

struct Case {
    picture: String,
    words: Vec<String>,
    size: Size,
    expected: Vec<u8>,
}

fn cases() -> Vec<Case> {
    let expected = fixture("expected.bin");
    let text = String::from_utf8(fixture("cases.txt")).unwrap();
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (operation, result) = line.split_once(": ").unwrap();
            let mut words = operation.split(' ').map(String::from);
            let result: Vec<_> = result.split(' ').collect();
            let number = |at: usize| result[at].parse::<usize>().unwrap();
            let picture = words.next().unwrap();
            let expected = expected[number(3)..][..number(4)].to_vec();
            Case {
                picture,
                words: words.collect(),
                size: Size::new(number(0) as u32, number(1) as u32),
                expected,
            }
        })
        .collect()
}

#[test]
fn every_format_decodes_as_pillow_does() {
    let mut workspace = Workspace::default();
    let mut failed = false;
    for case in cases().iter().filter(|case| case.words == ["full"]) {
        let (size, pixels) = whole(&fixture(&case.picture), &mut workspace).unwrap();
        assert_eq!(size, case.size, "{}", case.picture);
        let (most, mean) = difference(&pixels, &case.expected);
        let (allowed, allowed_mean) = tolerance(&case.picture);
        let bad = most > allowed || mean > allowed_mean;
        let note = if bad { "TOO FAR" } else { "" };
        println!("{:24} {most:3} {mean:.3} {note}", case.picture);
        failed |= bad;
    }
    assert!(!failed, "see the table above");
}

fn filter_named(name: &str) -> Filter {
    match name {
        "nearest" => Filter::Nearest,
        "bicubic" => Filter::Bicubic,
        "lanczos3" => Filter::Lanczos3,
        _ => Filter::Bilinear,
    }
}

/// Runs the operation of a case; `crop` with a given box goes by the same code as a random one.
fn run(case: &Case, input: &[u8], workspace: &mut Workspace) -> Vec<u8> {
    let numbers: Vec<u32> = case.words[1..]
        .iter()
        .filter_map(|word| word.parse().ok())
        .collect();
    let image =
        match case.words[0].as_str() {
            "resize" => Image::resize(numbers[0], numbers[1]).filter(filter_named(&case.words[3])),
            "center" => Image::center_crop(numbers[0], numbers[1]),
            "crop" => {
                let (size, pixels) = whole(input, workspace).unwrap();
                let rect = Rect {
                    left: numbers[0],
                    top: numbers[1],
                    size: Size::new(numbers[2], numbers[3]),
                };
                let image = Image::random_resized_crop(numbers[4]);
                workspace.pixels = pixels;
                let crop = Crop::of_view(rect, case.size);
                workspace.resize(Rect::of(size), &crop, image.filter, None);
                return workspace.resized.clone();
            }
            words => {
                let image = Image::resize(numbers[0], numbers[1])
                    .flip(if words.starts_with("flip") { 1.0 } else { 0.0 });
                image
                    .dtype(DType::F32)
                    .layout(PixelLayout::Nchw)
                    .normalize(MEAN, STD)
            }
        };
    let mut single = single(image);
    single.decode(input, 0, 0, 0).unwrap();
    single.bytes(0).to_vec()
}

/// Pillow 13 does so if the height shrinks by more than twice as many pixels as the width; ±1 then
/// (found).
fn vertical_first(case: &Case) -> bool {
    let [width, height] = [3, 4].map(|at| case.words[at].parse::<i64>().unwrap());
    let width = width - i64::from(case.size.width);
    let height = height - i64::from(case.size.height);
    height > 0 && height > 2 * width
}

/// To the bit, but for where Pillow 13 does the vertical pass first.
#[test]
fn crops_and_resizes_are_those_of_torchvision() {
    let mut workspace = Workspace::default();
    let mut failed = false;
    let cases = cases();
    let others = cases.iter().filter(|case| case.words[0] != "full");
    for case in others {
        let found = run(case, &fixture(&case.picture), &mut workspace);
        let name = format!("{} {}", case.picture, case.words.join(" "));
        let allowed = tolerance(&case.picture).0;
        let most = if case.words[0].ends_with("normalize") {
            let values = |bytes: &[u8]| bytemuck::pod_collect_to_vec::<u8, f32>(bytes);
            let found = values(&found);
            let expected = values(&case.expected);
            assert_eq!(found.len(), expected.len());
            // In levels of 1/255, of the channel with the least deviation; rounded up.
            let pairs = found.iter().zip(&expected);
            let levels = pairs.map(|(a, b)| (a - b).abs() * 255.0 * 0.224);
            (levels.fold(0.0, f32::max) - 1e-3).ceil() as u8
        } else {
            difference(&found, &case.expected).0
        };
        let allowed = allowed + u8::from(case.words[0] == "crop" && vertical_first(case));
        let bad = most > allowed;
        let note = if bad { "TOO FAR" } else { "" };
        println!("{name:50} {most} {note}");
        failed |= bad;
    }
    assert!(!failed, "see the table above");
}

/// Weights of the source pixels for one output pixel: a triangle as wide as the scaling, cut at
/// `view`, sum 1.
fn triangle(pitch: f64, output: u32, view: usize) -> Vec<(usize, f64)> {
    let center = (f64::from(output) + 0.5) * pitch;
    let radius = pitch.max(1.0);
    let weights = (0..view).map(|x| (x, 1.0 - ((x as f64 + 0.5 - center) / radius).abs()));
    let weights: Vec<_> = weights.filter(|(_, weight)| *weight > 0.0).collect();
    let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
    weights
        .into_iter()
        .map(|(x, weight)| (x, weight / sum))
        .collect()
}

/// Antialiased bilinear resize in f64, without any rounding.
fn oracle_resize(pixels: &[u8], picture: Size, crop: Crop) -> Vec<f64> {
    let Size { width, height } = crop.view.size;
    let pitch = |side: u32, whole: u32| f64::from(side) / f64::from(whole);
    let pitch_x = pitch(width, crop.whole.width);
    let pitch_y = pitch(height, crop.whole.height);
    let mut out = Vec::new();
    for y in crop.window.top..crop.window.bottom() {
        let rows = triangle(pitch_y, y, height as usize);
        for x in crop.window.left..crop.window.right() {
            let columns = triangle(pitch_x, x, width as usize);
            for channel in 0..3 {
                let mut sum = 0.0;
                for (row, row_weight) in &rows {
                    for (column, weight) in &columns {
                        let x = column + crop.view.left as usize;
                        let y = row + crop.view.top as usize;
                        let at = (y * picture.width as usize + x) * 3 + channel;
                        sum += row_weight * weight * f64::from(pixels[at]);
                    }
                }
                out.push(sum);
            }
        }
    }
    out
}

/// Resize of the shorter side, then the middle, as torchvision's two steps, in exact numbers.
fn oracle_center(picture: Size, resize: u32, size: u32) -> Crop {
    let w = f64::from(picture.width);
    let h = f64::from(picture.height);
    let long = |short: f64, long: f64| (f64::from(resize) * long / short).trunc();
    let (scaled_w, scaled_h) = if w <= h {
        (f64::from(resize), long(w, h))
    } else {
        (long(h, w), f64::from(resize))
    };
    let start = |scaled: f64| ((scaled - f64::from(size)) / 2.0).round_ties_even() as u32;
    let window = Rect {
        left: start(scaled_w),
        top: start(scaled_h),
        size: Size::new(size, size),
    };
    let whole = Size::new(scaled_w as u32, scaled_h as u32);
    Crop {
        window,
        ..Crop::of_view(Rect::of(picture), whole)
    }
}

/// The picture by the larger of both factors, then a part of it, in exact numbers.
fn oracle_cover(picture: Size, size: Size, random: bool, draws: &mut Draws) -> Crop {
    let w = picture.width;
    let h = picture.height;
    let across = size.width;
    let down = size.height;
    let whole = [
        Size::new(across, h * across / w),
        Size::new(w * down / h, down),
    ];
    let whole = whole
        .into_iter()
        .find(|whole| whole.width >= across && whole.height >= down)
        .unwrap();
    let mut start = |scaled: u32, side: u32| match random {
        true => draws.below(u64::from(scaled - side + 1)) as u32,
        false => (f64::from(scaled - side) / 2.0).round_ties_even() as u32,
    };
    let window = Rect {
        left: start(whole.width, across),
        top: start(whole.height, down),
        size,
    };
    Crop {
        window,
        ..Crop::of_view(Rect::of(picture), whole)
    }
}

/// `RandomResizedCrop.get_params`, line by line.
fn oracle_random(picture: Size, scale: (f64, f64), ratio: (f64, f64), draws: &mut Draws) -> Rect {
    let width = f64::from(picture.width);
    let height = f64::from(picture.height);
    let area = height * width;
    for _ in 0..10 {
        let target_area = area * draws.range_f64(scale.0, scale.1);
        let aspect_ratio = f64::exp(draws.range_f64(ratio.0.ln(), ratio.1.ln()));
        let w = (target_area * aspect_ratio).sqrt().round_ties_even();
        let h = (target_area / aspect_ratio).sqrt().round_ties_even();
        if 0.0 < w && w <= width && 0.0 < h && h <= height {
            let i = draws.below((height - h) as u64 + 1) as u32;
            let j = draws.below((width - w) as u64 + 1) as u32;
            return Rect {
                left: j,
                top: i,
                size: Size::new(w as u32, h as u32),
            };
        }
    }
    let in_ratio = width / height;
    let (w, h) = if in_ratio < ratio.0 {
        (width, (width / ratio.0).round_ties_even())
    } else if in_ratio > ratio.1 {
        ((height * ratio.1).round_ties_even(), height)
    } else {
        (width, height)
    };
    let size = Size::new(w as u32, h as u32);
    Rect {
        left: (picture.width - size.width) / 2,
        top: (picture.height - size.height) / 2,
        size,
    }
}

/// The values of a row as f64, whatever its dtype.
fn values(bytes: &[u8], dtype: DType) -> Vec<f64> {
    fn wide<T: bytemuck::Pod + Into<f64>>(bytes: &[u8]) -> Vec<f64> {
        let values = bytemuck::pod_collect_to_vec::<u8, T>(bytes);
        values.into_iter().map(Into::into).collect()
    }
    match dtype {
        DType::U8 => wide::<u8>(bytes),
        DType::F16 => wide::<f16>(bytes),
        DType::BF16 => wide::<bf16>(bytes),
        _ => wide::<f32>(bytes),
    }
}

/// Half a unit in the last place, relative.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 1e-6,
    }
}

/// Column, row and channel of the element at `at`.
fn place(at: usize, layout: PixelLayout, size: Size) -> (usize, usize, usize) {
    let width = size.width as usize;
    let height = size.height as usize;
    match layout {
        PixelLayout::Nhwc => (at / 3 % width, at / 3 / width, at % 3),
        PixelLayout::Nchw => (at % width, at / width % height, at / width / height),
    }
}

/// What a level (0..255) becomes, and how far apart two levels are then.
fn oracle_value(level: f64, channel: usize, values: Values) -> (f64, f64) {
    match (values.dtype, values.normalize) {
        (DType::U8, _) => (level, 1.0),
        (_, None) => (level / 255.0, 1.0 / 255.0),
        (_, Some((mean, std))) => {
            let mean = f64::from(mean[channel]);
            let std = f64::from(std[channel]);
            ((level / 255.0 - mean) / std, 1.0 / 255.0 / std)
        }
    }
}

/// One level for the two roundings of the resizing (half a level each), a little for its weights in
/// 16 bits, and the rounding of the dtype.
fn compare(row: &[u8], image: &Image, resized: &[f64], flip: bool) {
    let size = image.op.output();
    let found = values(row, image.values.dtype);
    assert_eq!(found.len(), resized.len());
    for (at, value) in found.into_iter().enumerate() {
        let (x, y, channel) = place(at, image.layout, size);
        let x = if flip { size.width as usize - 1 - x } else { x };
        let level = resized[(y * size.width as usize + x) * 3 + channel];
        let (expected, step) = oracle_value(level, channel, image.values);
        let allowed = 1.05 * step + expected.abs() * rounding(image.values.dtype);
        assert!(
            (value - expected).abs() <= allowed,
            "{image:?}, element {at}: {value} instead of {expected}"
        );
    }
}

#[test]
fn every_dtype_layout_and_crop_is_that_of_the_straight_loops() {
    let input = fixture("rgb.png");
    let (picture, pixels) = whole(&input, &mut Workspace::default()).unwrap();
    let center = |resize, size| Op::CenterCrop { resize, size };
    let ops = [
        Op::Resize(Size::new(13, 29)),
        Op::Resize(Size::new(70, 50)),
        Op::Resize(picture),
        center(31, 24),
        center(47, 46),
        center(20, 20),
        Op::Cover {
            size: Size::new(30, 21),
            random: false,
        },
        Op::Cover {
            size: Size::new(9, 40),
            random: true,
        },
        Op::RandomResizedCrop {
            size: 17,
            scale: (0.08, 1.0),
            ratio: (0.75, 4.0 / 3.0),
        },
    ];
    let all = ops.map(|op| (0..5).map(move |id| (op, id)));
    for (op, id) in all.into_iter().flatten() {
        let mut draws = Draws::new(3, 1, id, PURPOSE);
        let flip = draws.bool(0.5);
        let crop = match op {
            Op::Resize(size) => Crop::of_view(Rect::of(picture), size),
            Op::CenterCrop { resize, size } => oracle_center(picture, resize, size),
            Op::Cover { size, random } => oracle_cover(picture, size, random, &mut draws),
            Op::RandomResizedCrop { scale, ratio, .. } => {
                let view = oracle_random(picture, scale, ratio, &mut draws);
                Crop::of_view(view, op.output())
            }
            Op::Patches(_) => unreachable!("not in the list"),
        };
        let resized = oracle_resize(&pixels, picture, crop);
        for dtype in [DType::U8, DType::F32, DType::F16, DType::BF16] {
            for layout in [PixelLayout::Nhwc, PixelLayout::Nchw] {
                let plain = Image::new(op).dtype(dtype).layout(layout).flip(0.5);
                let normalized = (dtype != DType::U8).then(|| plain.clone().normalize(MEAN, STD));
                for image in [Some(plain), normalized].into_iter().flatten() {
                    let mut single = single(image.clone());
                    single.decode(&input, 3, 1, id).unwrap();
                    compare(single.bytes(0), &image, &resized, flip);
                }
            }
        }
    }
}

#[test]
fn random_crops_are_those_of_torchvision_given_the_same_draws() {
    let sizes = [
        (500, 375),
        (375, 500),
        (1, 1),
        (1, 900),
        (900, 1),
        (64, 64),
        (4000, 30),
        (3, 2),
    ];
    let scale = (0.08, 1.0);
    let ratio = (3.0 / 4.0, 4.0 / 3.0);
    let size = 8;
    let op = Op::RandomResizedCrop { size, scale, ratio };
    let all = sizes.map(|size| (0..200).map(move |id| (size, id)));
    for ((width, height), id) in all.into_iter().flatten() {
        let picture = Size::new(width, height);
        let crop = op.crop(picture, &mut Draws::new(0, 0, id, "t"));
        let Rect { left, top, size } = crop.view;
        assert!(size.pixels() > 0 && left + size.width <= width && top + size.height <= height);
        let mut expected = oracle_random(picture, scale, ratio, &mut Draws::new(0, 0, id, "t"));
        // A central part of no pixels, where torchvision fails.
        expected.size = Size::new(expected.size.width.max(1), expected.size.height.max(1));
        assert_eq!(size, expected.size, "{picture:?}");
    }
}

/// Mean and standard error of the mean.
fn mean(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let variance = values.map(|v| (v - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, (variance / count).sqrt())
}

#[test]
fn areas_ratios_and_places_of_random_crops_are_distributed_as_torchvisions() {
    const COUNT: u64 = 20_000;
    let picture = Size::new(500, 375);
    let scale = (0.08, 1.0);
    let ratio = (3.0 / 4.0, 4.0 / 3.0);
    let size = 8;
    let op = Op::RandomResizedCrop { size, scale, ratio };
    let ours: Vec<_> = (0..COUNT)
        .map(|id| op.crop(picture, &mut Draws::new(9, 4, id, PURPOSE)).view)
        .collect();
    let theirs: Vec<_> = (0..COUNT)
        .map(|id| oracle_random(picture, scale, ratio, &mut Draws::new(77, 0, id, "other")))
        .collect();
    let area = |rect: &Rect| rect.size.pixels() as f64 / 187_500.0;
    let ratio = |rect: &Rect| (f64::from(rect.size.width) / f64::from(rect.size.height)).ln();
    let statistics: [&dyn Fn(&Rect) -> f64; 6] = [
        &area,
        &|rect| area(rect).powi(2),
        &ratio,
        &|rect| ratio(rect).powi(2),
        &|rect| f64::from(rect.left) + f64::from(rect.size.width) / 2.0,
        &|rect| f64::from(rect.top) + f64::from(rect.size.height) / 2.0,
    ];
    for (index, statistic) in statistics.into_iter().enumerate() {
        let (a, a_error) = mean(ours.iter().map(statistic));
        let (b, b_error) = mean(theirs.iter().map(statistic));
        // Four standard errors: 1 in 16,000 by chance, and the draws are fixed.
        let allowed = 4.0 * a_error.hypot(b_error);
        assert!(
            (a - b).abs() < allowed,
            "statistic {index}: {a} {b} ± {a_error}"
        );
    }
    // Where there is room, every place is as likely as any other: chi-square of 10 bins, 9 degrees,
    // 1 in 10,000.
    let columns = ours.iter().map(|rect| (rect.left, 500 - rect.size.width));
    let rows = ours.iter().map(|rect| (rect.top, 375 - rect.size.height));
    for places in [columns.collect::<Vec<_>>(), rows.collect()] {
        let mut bins = [0.0_f64; 10];
        let mut count = 0.0;
        for (start, room) in places.into_iter().filter(|(_, room)| *room >= 50) {
            bins[(u64::from(start) * 10 / (u64::from(room) + 1)) as usize] += 1.0;
            count += 1.0;
        }
        let expected = count / 10.0;
        let parts = bins.map(|bin| (bin - expected).powi(2) / expected);
        let chi_square: f64 = parts.iter().sum();
        assert!(chi_square < 33.7, "{chi_square} {bins:?}");
    }
    // The whole area when the ratio leaves no choice: uniform over the scale.
    let ratio = (1.0, 1.0);
    let op = Op::RandomResizedCrop { size, scale, ratio };
    let square = Size::new(2000, 2000);
    let areas = (0..COUNT).map(|id| {
        let crop = op.crop(square, &mut Draws::new(5, 0, id, PURPOSE));
        crop.view.size.pixels() as f64 / 4e6
    });
    let (area, error) = mean(areas);
    assert!((area - 0.54).abs() < 4.0 * error, "{area} ± {error}");
}

#[test]
fn a_row_depends_on_seed_epoch_and_sample_alone() {
    let input = fixture("420-large.jpg");
    let image = Image::random_resized_crop(20)
        .flip(0.5)
        .dtype(DType::F32)
        .normalize(MEAN, STD);
    let mut single = single(image.clone());
    let mut row = |seed, epoch, id| {
        single.decode(&input, seed, epoch, id).unwrap();
        single.bytes(0).to_vec()
    };
    let first = row(1, 2, 3);
    let others = [row(1, 2, 4), row(1, 3, 3), row(2, 2, 3)];
    assert!(others.iter().all(|other| *other != first));
    assert_eq!(row(1, 2, 3), first);
    let mut fresh = self::single(image);
    fresh.decode(&input, 1, 2, 3).unwrap();
    assert_eq!(fresh.bytes(0), first, "another worker");
}

#[test]
fn half_of_the_rows_are_flipped_and_the_flip_leaves_the_crop_alone() {
    let input = fixture("rgb.png");
    let image = |flip| single(Image::random_resized_crop(9).flip(flip));
    let mut never = image(0.0);
    let mut sometimes = image(0.5);
    let mut always = image(1.0);
    let mut flipped = 0;
    for id in 0..400 {
        for single in [&mut never, &mut sometimes, &mut always] {
            single.decode(&input, 0, 0, id).unwrap();
        }
        let mut mirrored = never.bytes(0).to_vec();
        finish::flip(&mut mirrored, Size::new(9, 9));
        assert_eq!(always.bytes(0), mirrored);
        let is_flipped = sometimes.bytes(0) == mirrored;
        assert!(is_flipped || sometimes.bytes(0) == never.bytes(0));
        flipped += u32::from(is_flipped);
    }
    assert!((140..=260).contains(&flipped), "{flipped} of 400");
}

#[test]
fn a_cut_jpeg_is_an_error_wherever_it_is_cut() {
    let mut workspace = Workspace::default();
    for (name, input) in fixtures().iter().filter(|(name, _)| name.ends_with("jpg")) {
        whole(input, &mut workspace).unwrap();
        for length in 0..input.len() {
            let place = format!("{name} cut at {length},");
            let error = whole(&input[..length], &mut workspace).expect_err(&place);
            assert_eq!(error.kind(), ErrorKind::Decode, "{place}: {error}");
        }
    }
}

/// What is missing may be what follows the pixels.
#[test]
fn a_cut_picture_of_another_format_is_an_error_or_complete() {
    let mut workspace = Workspace::default();
    for (name, input) in fixtures().iter().filter(|(name, _)| !name.ends_with("jpg")) {
        let good = whole(input, &mut workspace).unwrap();
        for lost in (1..=input.len()).filter(|lost| *lost <= 40 || lost % 9 == 1) {
            let place = format!("{name} without the last {lost} bytes");
            // Other pixels than the last picture's, so that what is not written shows.
            workspace.pixels.fill(0x5A);
            match whole(&input[..input.len() - lost], &mut workspace) {
                Ok(found) => assert!(found == good, "{place}"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Decode, "{place}: {error}"),
            }
        }
    }
}

/// The last place of these bytes.
fn last(input: &[u8], bytes: &[u8]) -> usize {
    memchr::memmem::rfind(input, bytes).unwrap()
}

/// Offset of the first entropy-coded byte.
fn scan_of(input: &[u8]) -> usize {
    let at = last(input, &[0xFF, 0xDA]);
    at + 2 + usize::from(u16::from_be_bytes([input[at + 2], input[at + 3]]))
}

/// A hole in the file, with the end marker in place.
#[test]
fn a_jpeg_that_lacks_data_in_the_middle_is_an_error() {
    let mut workspace = Workspace::default();
    let names = [
        "progressive.jpg",
        "420.jpg",
        "422.jpg",
        "444.jpg",
        "420-large.jpg",
        "gray.jpg",
        "cmyk.jpg",
        "exif.jpg",
        "restart.jpg",
    ];
    for name in names {
        let input = fixture(name);
        let scan = scan_of(&input);
        let end = input.len() - 2;
        for kept in (scan..end - 2).rev().step_by(3) {
            let damaged = [&input[..kept], &input[end..]].concat();
            let found = whole(&damaged, &mut workspace);
            assert!(found.is_err(), "{name}: {kept} of {end} bytes");
        }
        let doubled = [&input[..end], &input[end - 40..]].concat();
        let found = whole(&doubled, &mut workspace);
        assert!(found.is_err(), "{name}: too much data");
    }
}

/// A figure for the documentation: the format has no checksum, and Huffman codes fall into step
/// again.
#[test]
fn some_flipped_bits_of_a_jpeg_are_noticed() {
    let mut workspace = Workspace::default();
    let mut noticed = 0;
    let mut harmless = 0;
    let mut all = 0;
    for name in ["420.jpg", "444.jpg", "420-large.jpg"] {
        let input = fixture(name);
        let (_, good) = whole(&input, &mut workspace).unwrap();
        for at in (scan_of(&input)..input.len() - 2).step_by(3) {
            let mut damaged = input.clone();
            damaged[at] ^= 1 << (at % 8);
            all += 1;
            match whole(&damaged, &mut workspace) {
                Err(_) => noticed += 1,
                Ok((_, pixels)) if pixels == good => harmless += 1,
                Ok(_) => {}
            }
        }
    }
    println!("{noticed} of {all} flipped bits noticed, {harmless} without effect");
    assert!(noticed * 8 > all, "{noticed} of {all}");
}

#[test]
fn what_browsers_show_of_a_cut_jpeg_is_had_on_request() {
    let input = fixture("420-large.jpg");
    let cut = &input[..input.len() / 2];
    let mut strict = single(Image::resize(9, 9));
    let error = strict.decode(cut, 0, 0, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "decode: cannot decode: JPEG without its end marker: the file is cut"
    );
    assert!(strict.bytes(0).is_empty());
    let mut lenient = single(Image::resize(9, 9).strict(false));
    lenient.decode(cut, 0, 0, 0).unwrap();
}

/// As Pillow's libjpeg does.
#[test]
fn stray_bytes_in_a_jpeg_header_are_skipped_on_request() {
    let good = fixture("420.jpg");
    let second = jpeg::Segment::next(&good, 2).unwrap().end;
    let with = |stray: &[u8]| [&good[..second], stray, &good[second..]].concat();
    // An Adobe segment whose last byte is missing is no Adobe segment.
    let short_adobe = with(b"\xFF\xEE\0\x0DAdobe\0d\0\0\0\0");
    let cases = [
        with(b"hello"),
        with(b"\xFF\0\0\x02"),
        with(b"\x04\x06\0\0\0\0\0\0\0\x07\0\x04\0\0\0\0"),
        with(b"\x01"),
        short_adobe,
    ];
    let decode = |input: &[u8], strict| {
        let mut single = single(Image::resize(40, 40).strict(strict));
        single
            .decode(input, 0, 0, 0)
            .map(|()| single.bytes(0).to_vec())
    };
    let expected = decode(&good, true).unwrap();
    let advice = "; `strict(false)` decodes the readable part";
    for (case, input) in cases.iter().enumerate() {
        assert!(decode(input, false).unwrap() == expected, "case {case}");
        match decode(input, true) {
            // What a library skips in its own strict mode, too.
            Ok(pixels) => assert!(case > 0 && pixels == expected, "case {case}"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Decode);
                assert!(error.message().ends_with(advice), "case {case}: {error}");
            }
        }
    }
    let mut damaged = good.clone();
    let scan = Header::parse(&good).unwrap().scan;
    damaged[scan + 20..scan + 40].fill(0xFF);
    let error = decode(&damaged, true).unwrap_err();
    assert!(error.message().ends_with(advice), "{error}");
    // Within a shard the place is that of the member: the pipeline adds the file's.
    assert_eq!(error.site().offset, None);
    let cut = &good[..good.len() - 2];
    let embedded = jpeg::Decoder::default().embed(cut, &mut Vec::new());
    let error = embedded.unwrap_err();
    let error = feedline_base::error::Error::of_jpeg(error, cut);
    assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
    assert_eq!(error.site().offset, Some(cut.len() as u64));
    decode(&damaged, false).unwrap();
    let error = decode(&cases[0], true).unwrap_err();
    let words =
        format!("JPEG with 5 stray bytes between the segments of its header, at byte {second}");
    assert!(error.message().starts_with(&words), "{error}");
}

/// Pillow refuses it. The profile changes no stored pixel, and no profile is applied here.
#[test]
fn a_png_with_a_colour_profile_that_cannot_be_read_has_its_pixels() {
    let good = fixture("rgb.png");
    let body = b"iCCPname\0\x01not deflate";
    let length = big_endian(body.len() as u32 - 4);
    let crc = big_endian(png_crc(body));
    let odd = [&good[..33], &length, body, &crc, &good[33..]].concat();
    let workspace = &mut Workspace::default();
    assert!(whole(&odd, workspace).unwrap() == whole(&good, workspace).unwrap());
}

fn big_endian(value: u32) -> [u8; 4] {
    value.to_be_bytes()
}

/// Headers of pictures of 65,535 × 65,535 pixels (16,383 a side in WebP).
fn bombs() -> Vec<(&'static str, Vec<u8>)> {
    let mut jpeg = fixture("420.jpg");
    let frame = last(&jpeg, &[0xFF, 0xC0, 0, 17]);
    jpeg[frame + 5..frame + 9].fill(0xFF);
    let mut progressive = fixture("progressive.jpg");
    let frame = last(&progressive, &[0xFF, 0xC2, 0, 17]);
    progressive[frame + 5..frame + 9].fill(0xFF);
    let mut png = fixture("rgb.png");
    png[16..20].copy_from_slice(&big_endian(65_535));
    png[20..24].copy_from_slice(&big_endian(65_535));
    let crc = png_crc(&png[12..29]);
    png[29..33].copy_from_slice(&big_endian(crc));
    let mut gif = fixture("plain.gif");
    gif[6..10].fill(0xFF);
    let mut bmp = fixture("rgb.bmp");
    bmp[18..22].copy_from_slice(&65_535_u32.to_le_bytes());
    bmp[22..26].copy_from_slice(&65_535_u32.to_le_bytes());
    let mut webp = fixture("lossless.webp");
    let at = last(&webp, b"VP8L");
    // Width - 1 and height - 1 in 14 bits each, behind a byte of signature.
    let sides = 16_382 | 16_382 << 14 | u32::from(webp[at + 12] & 0xF0) << 24;
    webp[at + 9..at + 13].copy_from_slice(&sides.to_le_bytes());
    vec![
        ("JPEG", jpeg),
        ("progressive JPEG", progressive),
        ("PNG", png),
        ("GIF", gif),
        ("BMP", bmp),
        ("WebP", webp),
    ]
}

fn png_crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 {
                (crc >> 1) ^ 0xEDB8_8320
            } else {
                crc >> 1
            }
        })
    })
}

#[test]
fn a_header_over_the_limits_is_refused_before_memory_is_taken() {
    for (name, input) in bombs() {
        let mut workspace = Workspace::default();
        let error = whole(&input, &mut workspace).map(|_| ()).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::Limit, "{name}: {error}");
        let text = error.to_string();
        let side = if name == "WebP" {
            "16383x16383"
        } else {
            "65535x65535"
        };
        assert!(text.contains(side) && text.contains("67108864"), "{text}");
        assert_eq!(workspace.pixels.capacity(), 0, "{name}");
    }
}

#[test]
fn the_message_of_a_limit_names_the_header_and_the_limit() {
    let input = fixture("progressive.jpg");
    let many = 1 << 20;
    for (pixels, bytes, memory, words) in [
        (2000, many, many, "61x43 = 2623 pixels; the limit is 2000"),
        (1 << 20, 1000, many, "1393 encoded bytes; the limit is 1000"),
        (1 << 20, many, 1000, "61x43 pixels take "),
    ] {
        let image = Image::resize(8, 8).limits(Limits {
            pixels,
            bytes,
            memory,
            ..Limits::default()
        });
        let error = single(image).decode(&input, 0, 0, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Limit);
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn what_an_earlier_picture_left_makes_room_for_a_later_one() {
    let input = fixture("progressive.jpg");
    let image = Image::resize(4, 4);
    let within = |memory, workspace: &mut Workspace| {
        let limits = Limits {
            memory,
            ..Limits::default()
        };
        decode(&input, &image, limits, 0, workspace)
    };
    let mut workspace = Workspace {
        pixels: vec![0; 1 << 20],
        ..Workspace::default()
    };
    within(4 << 20, &mut workspace).unwrap();
    assert_eq!(workspace.pixels.len(), 1 << 20, "kept while there is room");
    let mut sizes = (1..).map(|kib| kib << 10);
    let enough = sizes.find(|memory| within(*memory, &mut Workspace::default()).is_ok());
    within(enough.unwrap(), &mut workspace).unwrap();
    assert!(workspace.pixels.len() < 1 << 20);
}

#[test]
fn parameters_that_make_no_sense_are_found_when_the_loader_is_built() {
    let random = || Image::random_resized_crop(8);
    let floats = || random().dtype(DType::F32);
    let no_scale = "`scale` is for `random_resized_crop`";
    let no_ratio = "`ratio` is for `random_resized_crop`";
    let no_merge = "`patches without merge`";
    let cases = [
        (Image::resize(0, 5), "0x5"),
        (Image::resize(5, 100_000), "5x100000"),
        (Image::center_crop(20, 21), "centre crop of 21"),
        (Image::center_crop(20, 0), "0x0"),
        (Image::center_crop(100_000, 20), "shorter side of 100000"),
        (random().scale(0.0, 1.0), "scale 0 to 1"),
        (random().scale(0.5, 0.4), "scale 0.5 to 0.4"),
        (random().scale(0.5, 1.1), "scale 0.5 to 1.1"),
        (random().scale(f64::NAN, 1.0), "scale NaN"),
        (random().ratio(0.0, 1.0), "ratio 0 to 1"),
        (random().ratio(2.0, 1.0), "ratio 2 to 1"),
        (random().ratio(1.0, f64::INFINITY), "ratio 1 to inf"),
        (Image::resize(8, 8).scale(0.5, 1.0), no_scale),
        (Image::center_crop(8, 8).ratio(0.5, 1.0), no_ratio),
        (random().enlarge(false), "`enlarge` is for `patches`"),
        (random().merge(2, 4), "`merge` is for `patches`"),
        (Image::patches(8, 64).merge(2, 4).enlarge(false), no_merge),
        (Image::patches(8, 64).enlarge(true).merge(2, 4), no_merge),
        (random().random_crop(true), "`random_crop` is for `buckets`"),
        (random().flip(1.5), "flip probability 1.5"),
        (random().flip(f64::NAN), "flip probability NaN"),
        (random().dtype(DType::I64), "pixels as i64"),
        (
            random().normalize(MEAN, STD),
            "u8 pixels cannot be normalised",
        ),
        (floats().normalize(MEAN, [1.0, 0.0, 1.0]), "std"),
        (floats().normalize([f32::NAN, 0.0, 0.0], STD), "mean"),
    ];
    for (image, words) in cases {
        let error = image.outputs(&EncodedField::image("x")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(words), "{error}");
    }
    let raw = EncodedField::raw(Field::fixed("x", DType::U8, [3]));
    let error = random().outputs(&raw).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let planes = random().dtype(DType::BF16).layout(PixelLayout::Nchw);
    let field = planes.outputs(&EncodedField::bytes("x")).unwrap();
    assert_eq!(field, [Field::fixed("x", DType::BF16, [3, 8, 8])]);
}

#[test]
fn what_is_not_a_picture_is_told_by_its_first_bytes() {
    let cases: [(&[u8], &str); 8] = [
        (b"", "no bytes at all"),
        (
            b"<!DOCTYPE html>",
            "text (HTML, XML, SVG), starting with 3c 21 44 4f 43 54 59 50, 15 bytes",
        ),
        (b"II*\0....", "TIFF, starting with 49 49 2a 00"),
        (b"\0\0\0\x20ftypavif", "AVIF"),
        (b"\xFF\x0A..", "JPEG XL"),
        (
            &[0; 100],
            "not a picture, starting with 00 00 00 00 00 00 00 00, 100 bytes; JPEG, PNG, \
             WebP, BMP and GIF",
        ),
        (b"\xFF\xD8\xFF", "the JPEG ends within its header"),
        (b"\x89PNG\r\n\x1a\n", "damaged PNG"),
    ];
    let mut single = single(Image::resize(2, 2));
    for (input, words) in cases {
        let error = single.decode(input, 0, 0, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Decode);
        let text = error.to_string();
        assert!(text.contains(words) && !text.contains('\n'), "{text}");
    }
}

/// JPEGs of a kind that is not decoded say so.
#[test]
fn jpegs_of_unusual_kinds_are_named() {
    let base = fixture("420.jpg");
    let frame = last(&base, &[0xFF, 0xC0, 0, 17]);
    for (at, byte, words) in [
        (1, 0xC3, "SOF3: lossless, hierarchical or arithmetic"),
        (1, 0xC9, "SOF9"),
        (4, 12, "12 bits per sample"),
        (9, 2, "2 components"),
    ] {
        let mut input = base.clone();
        input[frame + at] = byte;
        let error = whole(&input, &mut Workspace::default()).unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    let mut low = base.clone();
    low[frame + 5..frame + 7].fill(0);
    let segment = &base[frame + 2..frame + 19];
    let hierarchical = [&base[..frame], &[0xFF, 0xDE], segment, &base[frame..]].concat();
    for (input, words) in [
        (low, "height comes after its data (DNL)"),
        (hierarchical, "DHP: hierarchical"),
    ] {
        for strict in [true, false] {
            let image = Image::resize(8, 8).strict(strict);
            let workspace = &mut Workspace::default();
            let error = decode(&input, &image, Limits::default(), 0, workspace).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}

/// Whether what an earlier picture left in the buffer does not show, within the memory that is
/// allowed.
pub(super) fn alike_after_any_picture(
    input: &[u8],
    image: &Image,
    limits: Limits,
    seed: u64,
) -> bool {
    let row = |left_over: Vec<u8>| {
        let mut workspace = Workspace {
            pixels: left_over,
            ..Workspace::default()
        };
        decode(input, image, limits, seed, &mut workspace).ok()?;
        assert!(workspace.pixels.capacity() <= limits.memory);
        Some(workspace.resized)
    };
    row(Vec::new()) == row(vec![0x5A; 3 << 20])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// Never a panic, never more memory than the limit, whatever the bytes.
    #[test]
    fn damaged_pictures_of_every_format_end_in_a_row_or_an_error(
        which in any::<prop::sample::Index>(),
        cut in prop::option::of(any::<prop::sample::Index>()),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
        head in any::<bool>(),
        strict in any::<bool>(),
    ) {
        let fixtures = fixtures();
        let (_, mut input) = which.get(&fixtures).clone();
        if let Some(cut) = cut {
            input.truncate(cut.index(input.len()));
        }
        // Half of the time in the header, where it matters most.
        let reach = if head { input.len().min(200) } else { input.len() };
        for (at, value) in flips.into_iter().filter(|_| reach > 0) {
            input[at.index(reach)] = value;
        }
        let limits = Limits { pixels: 1 << 20, bytes: 1 << 20, memory: 32 << 20, ..Limits::default() };
            let image = Image::random_resized_crop(7).limits(limits).strict(strict);
            prop_assert!(alike_after_any_picture(&input, &image, limits, 0));
    }
}
