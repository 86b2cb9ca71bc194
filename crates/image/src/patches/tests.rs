//! Patches against straight loops, and their sizes against those that transformers 4.57.1 computed.

use super::super::settings::Op;
use super::super::{Image, Limits, PixelLayout};
use super::*;
use feedline_base::error::ErrorKind;
use feedline_core::decode::Single;
use feedline_core::tensor::{DType, EncodedField, Shape, bf16};
use proptest::prelude::*;

/// A BMP of noise: 24 bits, the bottom row first.
fn picture(width: u32, height: u32) -> Vec<u8> {
    let stride = (3 * width as usize).next_multiple_of(4);
    let mut bytes = b"BM".to_vec();
    let header = [0, 0, 54, 40, width, height, 24 << 16 | 1, 0, 0, 0, 0, 0, 0];
    bytes.extend(header.iter().flat_map(|word| word.to_le_bytes()));
    let mut state = width * 31 + height;
    bytes.extend((0..stride * height as usize).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    }));
    bytes
}

fn single(image: &Image) -> Single {
    Single::new(image.clone(), &EncodedField::image("image")).unwrap()
}

fn decoded(image: &Image, input: &[u8]) -> Single {
    let mut single = single(image);
    single.decode(input, 0, 0, 0).unwrap();
    single
}

fn pairs(single: &Single, field: usize) -> Vec<[i32; 2]> {
    bytemuck::pod_collect_to_vec(single.bytes(field))
}

fn patches(size: u32, most: u32, rule: Rule) -> Patches {
    Patches { size, most, rule }
}

/// Width and height of the picture, and of its patches.
fn assert_sizes(how: Patches, cases: &[(u32, u32, u32, u32)]) {
    for &(width, height, columns, rows) in cases {
        let output = how.output(Size::new(width, height));
        let expected = Size::new(columns * how.size, rows * how.size);
        assert_eq!(output, expected, "{how:?} of {width}x{height}");
    }
}

#[test]
fn enlarged_pictures_have_the_sizes_of_siglip2_naflex() {
    let sixteen = [
        (1, 1, 7, 7),
        (5000, 1, 256, 1),
        (1, 3000, 1, 256),
        (16, 16, 16, 16),
        (640, 480, 18, 14),
        (1920, 1080, 21, 12),
        (6000, 4000, 19, 13),
        (53, 37, 19, 13),
        (1000, 333, 28, 9),
        (224, 224, 16, 16),
    ];
    assert_sizes(patches(16, 256, Rule::Enlarge), &sixteen);
    let fourteen = [
        (1, 1, 8, 8),
        (5000, 1, 1024, 1),
        (16, 16, 32, 32),
        (640, 480, 36, 27),
        (1920, 1080, 42, 24),
        (6000, 4000, 39, 26),
        (53, 37, 38, 26),
        (1000, 333, 55, 18),
    ];
    assert_sizes(patches(14, 1024, Rule::Enlarge), &fourteen);
    let seven = [
        (1, 1, 2, 2),
        (1, 3000, 1, 7),
        (640, 480, 3, 2),
        (1000, 333, 4, 1),
    ];
    assert_sizes(patches(14, 7, Rule::Enlarge), &seven);
    let one = [(1, 1, 1, 1), (1, 3000, 1, 1), (640, 480, 1, 1)];
    assert_sizes(patches(16, 1, Rule::Enlarge), &one);
}

#[test]
fn a_picture_that_fits_is_not_enlarged_beyond_whole_patches() {
    let cases = [
        (1, 1, 1, 1),
        (16, 16, 1, 1),
        (17, 16, 2, 1),
        (256, 256, 16, 16),
        (4096, 1, 256, 1),
        // Those that do not fit are as above.
        (5000, 1, 256, 1),
        (640, 480, 18, 14),
        (6000, 4000, 19, 13),
    ];
    assert_sizes(patches(16, 256, Rule::Native), &cases);
}

#[test]
fn pictures_of_merged_patches_have_the_sizes_of_qwen2_vl() {
    let qwen = [
        (1, 1, 4, 4),
        (640, 480, 46, 34),
        (1920, 1080, 94, 52),
        (6000, 4000, 86, 58),
        (53, 37, 6, 4),
        (1000, 333, 72, 24),
        (224, 224, 16, 16),
        (19_999, 100, 1010, 4),
        (4200, 28, 300, 2),
    ];
    assert_sizes(patches(14, 5120, Rule::Merge { side: 2, least: 16 }), &qwen);
    let small = [
        (1, 1, 2, 2),
        (640, 480, 18, 12),
        (1920, 1080, 20, 12),
        (6000, 4000, 18, 12),
        (53, 37, 4, 2),
        (1000, 333, 26, 8),
        (224, 224, 14, 14),
        // Without the budget, 226 x 2 and 194 x 2.
        (19_999, 100, 128, 2),
        (4200, 28, 128, 2),
    ];
    assert_sizes(patches(16, 256, Rule::Merge { side: 2, least: 4 }), &small);
}

/// FNV-1a of the patches per side of 20,000 pictures, up to `strip` times as long as wide, and how
/// many these are.
fn hash(how: Patches, strip: u32) -> (usize, u64) {
    let mut state = 1_u32;
    let mut side = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        1 + (state >> 16) / (1 + (state >> 13 & 7).pow(3))
    };
    let sizes = (0..20_000)
        .map(|_| (side(), side()))
        .filter(|(w, h)| u64::from(*w.max(h)) <= u64::from(strip) * u64::from(*w.min(h)));
    let mut count = 0;
    let mut hash = 0xCBF2_9CE4_8422_2325;
    for (width, height) in sizes {
        let Size { width, height } = how.output(Size::new(width, height));
        count += 1;
        for side in [width / how.size, height / how.size] {
            hash = (hash ^ u64::from(side)).wrapping_mul(0x100_0000_01B3);
        }
    }
    (count, hash)
}

/// The hashes are those of transformers 4.57.1, for sizes of up to 65,536 pixels a side.
#[test]
fn thousands_of_sizes_are_those_of_transformers() {
    let any = u32::MAX;
    let merge = |side, least| Rule::Merge { side, least };
    for (size, most, rule, strip, count, expected) in [
        (16, 256, Rule::Enlarge, any, 20_000, 0xCD4D_710D_2259_7DBF),
        (14, 1024, Rule::Enlarge, any, 20_000, 0x5AB6_052D_BBFD_272D),
        (14, 7, Rule::Enlarge, any, 20_000, 0x90F5_DF68_DE06_4464),
        // Wider strips exceed their budget or are refused.
        (14, 5120, merge(2, 16), 200, 17_980, 0xAFEF_30DE_5C2A_8BD7),
        (16, 256, merge(2, 4), 64, 15_767, 0x01A9_61DC_16D5_AB31),
        (16, 64, merge(1, 1), 64, 15_767, 0x7040_B0B1_48A3_01CB),
    ] {
        let how = patches(size, most, rule);
        assert_eq!(hash(how, strip), (count, expected), "{how:?}");
    }
}

proptest! {
    #[test]
    fn every_size_has_one_patch_to_the_budget(
        side in 1_u32..1 << 24, other in 1_u32..1 << 24, size in 1_u32..40, most in 1_u32..5000, block in 1_u32..4, least in 1_u32..99,
    ) {
        let most = most.max(block * block);
        let rules = [Rule::Native, Rule::Enlarge, Rule::Merge { side: block, least }];
        for (picture, rule) in [(side, other), (side, 1), (1, other)].into_iter().flat_map(|p| rules.map(|rule| (p, rule))) {
            let how = patches(size, most, rule);
            let output = how.output(Size::new(picture.0, picture.1));
            let unit = size * how.block();
            prop_assert!(output.width.is_multiple_of(unit) && output.height.is_multiple_of(unit), "{output:?}");
            let count = output.pixels() / u64::from(size * size);
            prop_assert!((1..=u64::from(most)).contains(&count), "{how:?}: {count} patches of {picture:?}");
        }
    }
}

/// The values of patches, by straight loops over a picture of RGB.
fn cut(
    pixels: &[u8],
    width: usize,
    size: usize,
    places: &[[i32; 2]],
    layout: PixelLayout,
) -> Vec<u8> {
    let mut out = Vec::new();
    for [row, column] in places {
        let top = *row as usize * size;
        let left = *column as usize * size;
        for at in 0..3 * size * size {
            let (y, x, channel) = match layout {
                PixelLayout::Nhwc => (at / 3 / size, at / 3 % size, at % 3),
                PixelLayout::Nchw => (at / size % size, at % size, at / (size * size)),
            };
            out.push(pixels[3 * ((top + y) * width + left + x) + channel]);
        }
    }
    out
}

#[test]
fn patches_are_the_parts_of_the_scaled_picture_in_order() {
    let rules = [
        (70, 50, Rule::Native),
        (70, 50, Rule::Merge { side: 2, least: 4 }),
        (300, 90, Rule::Native),
        (5, 3, Rule::Enlarge),
    ];
    for (width, height, rule) in rules {
        let input = picture(width, height);
        let how = patches(8, 60, rule);
        let output = how.output(Size::new(width, height));
        let layouts = [PixelLayout::Nhwc, PixelLayout::Nchw];
        let ways = layouts.map(|layout| [(layout, 0.0), (layout, 1.0)]);
        for (layout, flip) in ways.into_iter().flatten() {
            let scaled = Image::resize(output.width, output.height).flip(flip);
            let whole = decoded(&scaled, &input);
            let image = Image::new(Op::Patches(how)).flip(flip).layout(layout);
            let row = decoded(&image, &input);
            let grid = [output.height / 8, output.width / 8].map(|side| side as i32);
            assert_eq!(pairs(&row, 2), [grid]);
            assert_eq!(pairs(&row, 3), [[height as i32, width as i32]]);
            let count = (grid[0] * grid[1]) as usize;
            let lengths = [0, 1, 2].map(|field| row.len_of(field));
            assert_eq!(lengths, [Some(count), Some(count), None]);
            let mut places: Vec<_> = (0..grid[0])
                .flat_map(|y| (0..grid[1]).map(move |x| [y, x]))
                .collect();
            if let Rule::Merge { .. } = rule {
                places.sort_by_key(|[y, x]| (y / 2, x / 2));
            }
            assert_eq!(pairs(&row, 1)[..count], places);
            let expected = cut(whole.bytes(0), output.width as usize, 8, &places, layout);
            let (filled, rest) = row.bytes(0).split_at(expected.len());
            assert!(filled == expected, "{how:?}, {layout:?}, {flip}");
            assert!(rest.iter().all(|byte| *byte == 0), "{how:?}");
            // Floats of the same bytes.
            let image = image.dtype(DType::BF16).normalize([0.5; 3], [0.25; 3]);
            let floats = decoded(&image, &input);
            let floats: Vec<bf16> = bytemuck::pod_collect_to_vec(floats.bytes(0));
            let (filled, rest) = floats.split_at(expected.len());
            let value = |byte: &u8| bf16::from_f32((f32::from(*byte) / 255.0 - 0.5) / 0.25);
            assert!(filled.iter().copied().eq(expected.iter().map(value)));
            assert!(rest.iter().all(|float| *float == bf16::ZERO));
        }
    }
}

#[test]
fn a_smaller_picture_leaves_nothing_of_a_larger_one() {
    let mut single = single(&Image::patches(8, 60));
    single.decode(&picture(200, 100), 0, 0, 0).unwrap();
    single.decode(&picture(9, 3), 0, 0, 1).unwrap();
    assert_eq!(single.len_of(0), Some(2));
    assert_eq!(pairs(&single, 2), [[1, 2]]);
    let values = &single.bytes(0)[2 * 192..];
    let places = &single.bytes(1)[16..];
    assert!(values.iter().chain(places).all(|byte| *byte == 0));
}

#[test]
fn an_upright_picture_has_its_upright_grid_and_size() {
    let input = include_bytes!("../../../../tests/fixtures/jpeg/orientation-6.jpg");
    let stored = decoded(&Image::patches(8, 500), input);
    let upright = decoded(&Image::patches(8, 500).exif_orientation(true), input);
    for field in [2, 3] {
        let mut swapped = pairs(&stored, field);
        swapped.iter_mut().for_each(|pair| pair.reverse());
        assert_eq!(pairs(&upright, field), swapped, "{field}");
    }
    assert_ne!(pairs(&upright, 3), pairs(&stored, 3));
}

#[test]
fn strips_and_hostile_sizes_are_errors_that_name_them() {
    let mut merged = single(&Image::patches(8, 60).merge(2, 4));
    merged.decode(&picture(200, 1), 0, 0, 0).unwrap();
    let error = merged.decode(&picture(201, 1), 0, 0, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Decode);
    let text = error.to_string();
    assert!(text.contains("201x1 pixels: for merged patches"), "{text}");
    let mut hostile = picture(9, 3);
    hostile[18..22].copy_from_slice(&65_535_u32.to_le_bytes());
    hostile[22..26].copy_from_slice(&65_535_u32.to_le_bytes());
    for image in [
        Image::patches(16, 256),
        Image::patches(16, 256).enlarge(true),
        Image::patches(16, 256).merge(2, 4),
    ] {
        let error = single(&image).decode(&hostile, 0, 0, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
    }
    // What it is scaled to counts, too.
    let limits = Limits {
        memory: 6 << 20,
        ..Limits::default()
    };
    let large = Image::patches(512, 1 << 14).limits(limits).enlarge(true);
    let refused = single(&large).decode(&picture(9, 3), 0, 0, 0);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Limit);
    decoded(&Image::patches(16, 256).limits(limits), &picture(9, 3));
}

#[test]
fn settings_of_patches_that_make_no_sense_are_found_at_build() {
    let make = Image::patches;
    let cases = [
        (make(0, 5), "pixels: each side must be 1"),
        (make(16, 0), "at most 0 patches of 16 pixels"),
        (make(16, 1 << 21), "may have 16777216 pixels at most"),
        (make(16, 256).merge(0, 1), "0 x 0 of them merged"),
        (make(16, 256).merge(17, 1), "17 x 17 of them merged"),
        (make(16, 256).merge(2, 0), "0 to 256 patches"),
        (make(16, 256).merge(2, 257), "257 to 256 patches"),
    ];
    for (image, words) in cases {
        let made = Single::new(image, &EncodedField::image("image"));
        let error = made.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(words), "{error}");
    }
    let fields = single(&Image::patches(16, 256)).fields().to_vec();
    let shapes = fields.iter().map(|field| (field.name(), field.dims()));
    let shapes: Vec<_> = shapes.collect();
    let expected = [
        ("image", vec![256, 768]),
        ("image.positions", vec![256, 2]),
        ("image.grid", vec![2]),
        ("image.size", vec![2]),
    ];
    assert_eq!(shapes, expected);
    assert!(matches!(fields[1].shape(), Shape::UpTo { .. }));
}
