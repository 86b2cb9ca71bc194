//! The contract of every decoder: one table, one set of tests, through the public API alone.
#![allow(missing_docs)]

use feedline::decode::Single;
use feedline::decode::{Ctx, Decoder, Filter, Image, Limits, PixelLayout, Raw};
use feedline::error::Stage;
use feedline::tensor::{DType, EncodedField, Encoding, Field};
use feedline::{Error, ErrorKind, Result, Row};
use std::path::Path;

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fixtures/images")
            .join(name),
    )
    .unwrap()
}

/// A user's decoder: two fields from one input, one of them random.
#[derive(Clone)]
struct SumAndDraw;

impl Decoder for SumAndDraw {
    fn outputs(&self, input: &EncodedField) -> Result<Vec<Field>> {
        match input.encoding {
            Encoding::Bytes => Ok(vec![
                Field::fixed("sum", DType::U32, []),
                Field::fixed("draw", DType::U64, []),
            ]),
            _ => Err(Error::new(ErrorKind::Config, Stage::Build, "bytes only")),
        }
    }

    fn decode(&self, input: &[u8], ctx: &mut Ctx<'_>, out: &mut Row<'_>) -> Result<()> {
        if input.is_empty() {
            return Err(Error::decode("nothing to sum"));
        }
        let first = ctx.fields().start;
        out.slice_mut::<u32>(first)?[0] = input.iter().map(|byte| u32::from(*byte)).sum();
        out.slice_mut::<u64>(first + 1)?[0] = ctx.draws("draw").next_u64();
        *ctx.scratch().get::<u64>() += 1;
        Ok(())
    }
}

struct Case {
    name: &'static str,
    make: Box<dyn Fn() -> Single>,
    good: Vec<Vec<u8>>,
    bad: Vec<(Vec<u8>, ErrorKind)>,
    /// Whether the row depends on seed, epoch and sample id.
    random: bool,
}

fn case<D: Decoder + Clone>(
    name: &'static str,
    decoder: D,
    input: EncodedField,
    random: bool,
) -> Case {
    let make = Box::new(move || Single::new(decoder.clone(), &input).unwrap());
    Case {
        name,
        make,
        good: Vec::new(),
        bad: Vec::new(),
        random,
    }
}

fn raw_cases() -> Vec<Case> {
    let fixed = EncodedField::raw(Field::fixed("x", DType::U16, [2, 3]));
    let up_to = EncodedField::raw(Field::up_to("x", DType::U16, 6));
    vec![
        Case {
            good: vec![vec![7; 12], (0..12).collect()],
            bad: vec![
                (vec![7; 11], ErrorKind::Shape),
                (vec![], ErrorKind::Shape),
                (vec![0; 14], ErrorKind::Shape),
            ],
            ..case("raw, fixed", Raw, fixed, false)
        },
        Case {
            good: vec![vec![7; 12], vec![1, 2], vec![]],
            bad: vec![
                (vec![7; 11], ErrorKind::Shape),
                (vec![0; 14], ErrorKind::Shape),
            ],
            ..case("raw, up to", Raw, up_to, false)
        },
    ]
}

fn image_cases() -> Vec<Case> {
    let random = || Image::random_resized_crop(16).flip(0.5);
    let mean = [0.485, 0.456, 0.406];
    let std = [0.229, 0.224, 0.225];
    let strict_limits = Limits {
        pixels: 3000,
        ..Limits::default()
    };
    let images = [
        ("resize", Image::resize(9, 31), false),
        (
            "centre crop",
            Image::center_crop(30, 24).filter(Filter::Bicubic),
            false,
        ),
        ("patches", Image::patches(7, 20), false),
        (
            "patches, merged f32",
            Image::patches(7, 20).merge(2, 8).dtype(DType::F32),
            false,
        ),
        ("random crop, u8 NHWC", random(), true),
        (
            "random crop, u8 NCHW",
            random().layout(PixelLayout::Nchw),
            true,
        ),
        (
            "random crop, f32 NHWC",
            random().dtype(DType::F32).normalize(mean, std),
            true,
        ),
        (
            "random crop, bf16 NCHW",
            random().dtype(DType::BF16).layout(PixelLayout::Nchw),
            true,
        ),
        (
            "random crop, f16 NCHW",
            random()
                .dtype(DType::F16)
                .layout(PixelLayout::Nchw)
                .normalize(mean, std),
            true,
        ),
    ];
    let names = [
        "420.jpg",
        "progressive.jpg",
        "gray.jpg",
        "cmyk.jpg",
        "rgb.png",
        "rgba.png",
        "lossy.webp",
    ];
    let names = names
        .into_iter()
        .chain(["lossless.webp", "rgb.bmp", "plain.gif", "one-pixel.jpg"]);
    let good: Vec<_> = names.map(fixture).collect();
    let bad: Vec<_> = [
        (vec![], ErrorKind::Decode),
        (b"hello, this is text".to_vec(), ErrorKind::Decode),
        (fixture("420.jpg")[..900].to_vec(), ErrorKind::Decode),
        (fixture("rgb.png")[..900].to_vec(), ErrorKind::Decode),
        (fixture("420-large.jpg"), ErrorKind::Limit),
    ]
    .into();
    images
        .into_iter()
        .map(|(name, image, random)| Case {
            good: good.clone(),
            bad: bad.clone(),
            ..case(
                name,
                image.limits(strict_limits),
                EncodedField::image("image"),
                random,
            )
        })
        .collect()
}

fn cases() -> Vec<Case> {
    let own = Case {
        good: vec![vec![1, 2], vec![255; 40]],
        bad: vec![(vec![], ErrorKind::Decode)],
        ..case("the user's own", SumAndDraw, EncodedField::bytes("x"), true)
    };
    raw_cases()
        .into_iter()
        .chain(image_cases())
        .chain([own])
        .collect()
}

/// All fields of the row that `single` makes from `input`.
fn row(single: &mut Single, input: &[u8], (seed, epoch, id): (u64, u64, u64)) -> Vec<Vec<u8>> {
    single.decode(input, seed, epoch, id).unwrap();
    (0..single.fields().len())
        .map(|field| single.bytes(field).to_vec())
        .collect()
}

#[test]
fn a_row_has_the_bytes_of_its_fields() {
    for case in cases() {
        let mut single = (case.make)();
        for input in &case.good {
            let row = row(&mut single, input, (0, 0, 0));
            let expected: Vec<_> = single.fields().iter().map(Field::row_bytes).collect();
            assert_eq!(
                row.iter().map(Vec::len).collect::<Vec<_>>(),
                expected,
                "{}",
                case.name
            );
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_worker_or_earlier_rows() {
    for case in cases() {
        let mut busy = (case.make)();
        for (id, input) in case.good.iter().enumerate() {
            let key = (5, 6, id as u64);
            let first = row(&mut (case.make)(), input, key);
            for other in &case.good {
                busy.decode(other, 0, 0, 99).unwrap();
                assert_eq!(row(&mut busy, input, key), first, "{}", case.name);
            }
        }
    }
}

#[test]
fn only_random_decoders_depend_on_seed_epoch_and_sample() {
    for case in cases() {
        let mut single = (case.make)();
        let input = &case.good[0];
        let first = row(&mut single, input, (1, 2, 3));
        for key in [(9, 2, 3), (1, 9, 3), (1, 2, 9)] {
            assert_eq!(
                row(&mut single, input, key) != first,
                case.random,
                "{} {key:?}",
                case.name
            );
        }
    }
}

#[test]
fn a_bad_sample_is_one_line_and_harms_no_other_sample() {
    for case in cases() {
        let mut single = (case.make)();
        let first = row(&mut single, &case.good[0], (1, 2, 3));
        for (input, kind) in &case.bad {
            let error = single.decode(input, 1, 2, 4).unwrap_err();
            assert_eq!(error.kind(), *kind, "{}: {error}", case.name);
            assert!(!error.to_string().contains('\n'), "{error}");
            assert!(
                (0..single.fields().len()).all(|field| single.bytes(field).is_empty()),
                "{}",
                case.name
            );
            assert_eq!(
                row(&mut single, &case.good[0], (1, 2, 3)),
                first,
                "{}",
                case.name
            );
        }
    }
}

#[test]
fn build_refuses_a_field_that_the_decoder_cannot_take() {
    let raw = EncodedField::raw(Field::fixed("x", DType::U8, [3]));
    let refused: [Result<Single>; 3] = [
        Single::new(Raw, &EncodedField::image("x")),
        Single::new(Image::resize(2, 2), &raw),
        Single::new(SumAndDraw, &raw),
    ];
    for error in refused {
        assert_eq!(error.map(|_| ()).unwrap_err().kind(), ErrorKind::Config);
    }
}

#[test]
fn decoders_say_how_much_memory_a_sample_may_take() {
    assert_eq!(Raw.scratch_bytes(), 0);
    let limits = Limits {
        memory: 1 << 20,
        ..Limits::default()
    };
    assert_eq!(Image::resize(2, 2).limits(limits).scratch_bytes(), 1 << 20);
    assert_eq!(
        Image::resize(2, 2).scratch_bytes(),
        Limits::default().memory
    );
}

/// Files of `tests/fixtures/make_odd.py`, which has the format of `cases.txt`.
#[test]
fn odd_pictures_are_as_in_pillow_or_refused_by_name() {
    let file = |name: &str| fixture(&format!("../odd/{name}"));
    let cases = String::from_utf8(file("cases.txt")).unwrap();
    for case in cases.lines() {
        let mut words = case.splitn(4, ' ');
        let [name, width, height] = std::array::from_fn(|_| words.next().unwrap());
        let [width, height] = [width, height].map(|side| side.parse::<u32>().unwrap());
        let image = Image::resize(width.max(1), height.max(1));
        let mut single = Single::new(image, &EncodedField::image("x")).unwrap();
        match (single.decode(&file(name), 0, 0, 0), words.next()) {
            (Ok(()), _) => {
                let right = file(&format!("{name}.rgb"));
                let most = single
                    .bytes(0)
                    .iter()
                    .zip(&right)
                    .map(|(a, b)| a.abs_diff(*b))
                    .max();
                assert!(
                    single.bytes(0).len() == right.len() && most <= Some(0),
                    "{name}: {most:?}"
                );
            }
            (Err(error), Some(words)) => {
                assert!(error.to_string().contains(words), "{name}: {error}")
            }
            (Err(error), None) => panic!("{name}: {error}"),
        }
    }
}
