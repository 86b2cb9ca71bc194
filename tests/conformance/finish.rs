//! `Finish` on the host: its output field, its refusals, and every element by the formula.

use crate::common::assert_says;
use feedline::ErrorKind;
use feedline::device::Finish;
use feedline::error::Stage;
use feedline::tensor::{DType, Field, bf16, f16};
use proptest::prelude::*;

fn picture(dims: impl Into<Vec<usize>>) -> Field {
    Field::fixed("image", DType::U8, dims)
}

/// One value by the formula, as the dtype's bits.
fn naive(dtype: DType, mean: f32, std: f32, x: u8) -> Vec<u8> {
    let scaled = f32::from(x) / 255.0;
    let centred = scaled - mean;
    let y = centred / std;
    match dtype {
        DType::F16 => f16::from_f32(y).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(y).to_ne_bytes().to_vec(),
        _ => y.to_ne_bytes().to_vec(),
    }
}

#[test]
fn the_output_has_the_new_dtype_and_layout_under_the_old_name() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let input = picture([5, 7, 3]);
        assert_eq!(
            Finish::to(dtype).output(&input).unwrap(),
            Field::fixed("image", dtype, [5, 7, 3])
        );
        let first = Finish::to(dtype).channels_first().output(&input).unwrap();
        assert_eq!(first, Field::fixed("image", dtype, [3, 5, 7]));
    }
}

#[test]
fn without_mean_and_std_0_is_0_and_255_is_1() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut out = vec![0; 2 * dtype.size()];
        Finish::to(dtype)
            .apply(&picture([1, 2, 1]), 1, &[0, 255], None, &mut out)
            .unwrap();
        let one = match dtype {
            DType::F16 => f16::ONE.to_ne_bytes().to_vec(),
            DType::BF16 => bf16::ONE.to_ne_bytes().to_vec(),
            _ => 1f32.to_ne_bytes().to_vec(),
        };
        assert_eq!(out, [vec![0; dtype.size()], one].concat());
    }
}

#[test]
fn impossible_finishes_are_refused_with_the_field_name() {
    let to = Finish::to;
    let rgb = || picture([4, 4, 3]);
    let cases = [
        (to(DType::U8), rgb(), "the dtype is u8"),
        (to(DType::F64), rgb(), "the dtype is f64"),
        (
            to(DType::F32),
            Field::fixed("image", DType::I8, [4, 4, 3]),
            "i8",
        ),
        (
            to(DType::F32),
            Field::up_to("image", DType::U8, 9),
            "a fixed shape",
        ),
        (to(DType::F32), picture([4, 4]), "[4, 4]"),
        (to(DType::F32), picture([1, 4, 4, 3]), "[1, 4, 4, 3]"),
        (to(DType::F32), picture([4, 4, 0]), "[4, 4, 0]"),
        (to(DType::F32), picture([4, 4, 5]), "[4, 4, 5]"),
        (to(DType::F32), picture([4, 0, 3]), "[4, 0, 3]"),
        (to(DType::F32), picture([1 << 30, 1, 2]), "2^31"),
        (to(DType::F32), picture([usize::MAX, 2, 3]), "2^31"),
        (
            to(DType::F32).mean_std(&[0.5, 0.5], &[1.0]),
            rgb(),
            "2 values of mean",
        ),
        (
            to(DType::F32).mean_std(&[0.5], &[1.0; 4]),
            rgb(),
            "4 values of std",
        ),
        (
            to(DType::F32).mean_std(&[], &[1.0]),
            rgb(),
            "0 values of mean",
        ),
        (
            to(DType::F32).mean_std(&[f32::NAN], &[1.0]),
            rgb(),
            "mean NaN",
        ),
        (
            to(DType::F32).mean_std(&[0.0, 0.0, f32::INFINITY], &[1.0]),
            rgb(),
            "channel 2",
        ),
        (to(DType::F32).mean_std(&[0.0], &[0.0]), rgb(), "std 0"),
        (to(DType::F32).mean_std(&[0.0], &[-1.0]), rgb(), "std -1"),
        (
            to(DType::F32).mean_std(&[0.0], &[f32::NAN]),
            rgb(),
            "std NaN",
        ),
        (
            to(DType::F32).mean_std(&[0.0], &[f32::INFINITY]),
            rgb(),
            "std inf",
        ),
        (
            to(DType::F32).mean_std(&[0.0], &[1e-45]),
            rgb(),
            "too large for f32",
        ),
        (
            to(DType::F32).mean_std(&[1e30], &[1e-30]),
            rgb(),
            "too large for f32",
        ),
        (
            to(DType::F32).mean_std(&[-f32::MAX], &[0.999]),
            rgb(),
            "too large for f32",
        ),
        (
            to(DType::F32).mean_std(&[1.0], &[2e-39]),
            rgb(),
            "too large for f32",
        ),
        (
            to(DType::F16).mean_std(&[0.0], &[1e-5]),
            rgb(),
            "too large for f16",
        ),
        (
            to(DType::F16).mean_std(&[-1e5], &[1.0]),
            rgb(),
            "too large for f16",
        ),
        (
            to(DType::BF16).mean_std(&[-f32::MAX], &[1.0]),
            rgb(),
            "too large for bf16",
        ),
        (to(DType::F32).flip(1.1), rgb(), "1.1"),
        (to(DType::F32).flip(-0.1), rgb(), "-0.1"),
        (to(DType::F32).flip(f64::NAN), rgb(), "NaN"),
    ];
    for (finish, field, words) in cases {
        let error = finish.output(&field).unwrap_err();
        assert_eq!(
            (error.kind(), error.stage()),
            (ErrorKind::Config, Stage::Build),
            "{error}"
        );
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert_says(&error, "`image`");
    }
}

#[test]
fn values_at_the_limit_of_the_dtype_are_made() {
    let cases = [
        (DType::F32, -f32::MAX, 1.0, f32::MAX),
        (DType::F32, 0.0, 2f32.powi(-127), 2f32.powi(127)),
        (DType::F16, -65_503.0, 1.0, 65_504.0),
        (DType::BF16, -bf16::MAX.to_f32(), 1.0, bf16::MAX.to_f32()),
    ];
    for (dtype, mean, std, largest) in cases {
        let mut out = vec![0; dtype.size()];
        Finish::to(dtype)
            .mean_std(&[mean], &[std])
            .apply(&picture([1, 1, 1]), 1, &[255], None, &mut out)
            .unwrap();
        let expected = match dtype {
            DType::F16 => f16::from_f32(largest).to_ne_bytes().to_vec(),
            DType::BF16 => bf16::from_f32(largest).to_ne_bytes().to_vec(),
            _ => largest.to_ne_bytes().to_vec(),
        };
        assert_eq!(out, expected, "{dtype} {mean} {std}");
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let input = picture([2, 2, 3]);
    let run = |rows: usize, input_len: usize, flips: Option<usize>, out_len: usize| {
        let flips = flips.map(|len| vec![0; len]);
        Finish::to(DType::F16).apply(
            &input,
            rows,
            &vec![0; input_len],
            flips.as_deref(),
            &mut vec![0; out_len],
        )
    };
    run(2, 24, Some(2), 48).unwrap();
    run(0, 0, None, 0).unwrap();
    let cases = [
        (2, 23, None, 48, "the input"),
        (2, 24, None, 49, "the output"),
        (2, 24, Some(3), 48, "flips"),
        (usize::MAX, 24, None, 48, "the input"),
    ];
    for (rows, input, flips, out, words) in cases {
        let error = run(rows, input, flips, out).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Shape);
        assert!(
            error.to_string().contains(words) && error.to_string().contains("`image`"),
            "{error}"
        );
    }
}

#[test]
fn results_equal_exact_arithmetic() {
    // Rounded from fractions, step by step. All except those of 0, 1 or 255 differ in f32 when 255
    // or std is replaced by its reciprocal, when scale and bias are computed beforehand, and when
    // only the last step is rounded.
    let cases: [(f32, f32, u8, u32, u16, u16); 12] = [
        (0.0, 1.0, 1, 0x3b80_8081, 0x1c04, 0x3b81),
        (0.0, 1.0, 255, 0x3f80_0000, 0x3c00, 0x3f80),
        (0.485, 0.229, 0, 0xc007_8bbd, 0xc03c, 0xc008),
        (0.485, 0.229, 118, 0xbdc7_07e5, 0xae38, 0xbdc7),
        (0.485, 0.229, 255, 0x400f_ee1d, 0x407f, 0x4010),
        (0.456, 0.224, 27, 0xbfc8_1136, 0xbe41, 0xbfc8),
        (0.456, 0.224, 98, 0xbea3_dab5, 0xb51f, 0xbea4),
        (0.456, 0.224, 100, 0xbe91_ed5a, 0xb48f, 0xbe92),
        (0.406, 0.225, 49, 0xbf73_4e53, 0xbb9a, 0xbf73),
        (0.406, 0.225, 101, 0xbd34_9dc7, 0xa9a5, 0xbd35),
        (0.406, 0.225, 107, 0x3d77_b939, 0x2bbe, 0x3d78),
        (0.406, 0.225, 255, 0x4028_f5c3, 0x4148, 0x4029),
    ];
    for (mean, std, x, single, half, brain) in cases {
        let made = |dtype: DType| {
            let mut out = vec![0; dtype.size()];
            let finish = Finish::to(dtype).mean_std(&[mean], &[std]);
            finish
                .apply(&picture([1, 1, 1]), 1, &[x], None, &mut out)
                .unwrap();
            out
        };
        assert_eq!(
            made(DType::F32),
            single.to_ne_bytes(),
            "{x} with {mean} and {std}"
        );
        assert_eq!(
            made(DType::F16),
            half.to_ne_bytes(),
            "{x} with {mean} and {std}"
        );
        assert_eq!(
            made(DType::BF16),
            brain.to_ne_bytes(),
            "{x} with {mean} and {std}"
        );
    }
}

proptest! {
    #[test]
    fn every_element_follows_the_formula(
        (height, width, channels) in (1usize..6, 1usize..9, 1usize..5),
        flips in proptest::option::of(proptest::collection::vec(0u8..3, 3)),
        dtype in proptest::sample::select(vec![DType::F32, DType::F16, DType::BF16]),
        first in any::<bool>(),
        one in any::<bool>(),
        mean in proptest::array::uniform4(-2.0f32..2.0),
        std in proptest::array::uniform4(0.001f32..3.0),
        pixels in proptest::collection::vec(any::<u8>(), 3 * 5 * 8 * 4),
    ) {
        let values = height * width * channels;
        let pixels = &pixels[..3 * values];
        let size = dtype.size();
        let count = if one { 1 } else { channels };
        let mut finish = Finish::to(dtype).mean_std(&mean[..count], &std[..count]);
        if first {
            finish = finish.channels_first();
        }
        let mut out = vec![0xaa; 3 * values * size];
        finish.apply(&picture([height, width, channels]), 3, pixels, flips.as_deref(), &mut out).unwrap();
        for (row, c) in (0..3).flat_map(|row| (0..channels).map(move |c| (row, c))) {
            for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
                let flip = flips.as_ref().is_some_and(|flips| flips[row] != 0);
                let from = if flip { width - 1 - x } else { x };
                let source = pixels[row * values + (y * width + from) * channels + c];
                let at = if first { (c * height + y) * width + x } else { (y * width + x) * channels + c };
                let at = (row * values + at) * size;
                let channel = if one { 0 } else { c };
                prop_assert_eq!(&out[at..at + size], naive(dtype, mean[channel], std[channel], source));
            }
        }
    }
}
