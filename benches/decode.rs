//! Images per second on one core, step by step.
//!
//! Physical limits to hold the figures against: the entropy-coded bytes are read bit by bit (libjpeg-turbo needs some
//! 0.9 ms for the 107 KB of the average picture here, whatever it does with the pixels afterwards), so "full decode" is
//! the floor under everything that follows, and the steps after it should be small beside it.
//!
//! `cargo bench --bench decode -- --quick`; real pictures: `FEEDLINE_BENCH_IMAGES=DIR` (its first 200 JPEGs by name).
//! Without it some noisy pictures of 500×375 pixels and about 107 KB are made.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fast_image_resize as fir;
use feedline::decode::{Filter, Image, PixelLayout, Single};
use feedline::order::Draws;
use feedline::tensor::{DType, EncodedField};
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions};
use zune_jpeg::JpegDecoder;

const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];
const FILES_MAX: usize = 200;
const MADE: u64 = 4;

/// Smooth shapes with sensor noise.
fn made(id: u64) -> Vec<u8> {
    const WIDTH: usize = 500;
    const HEIGHT: usize = 375;
    let mut draws = Draws::new(1, 0, id, "bench");
    let waves: Vec<[f64; 4]> = (0..9).map(|_| std::array::from_fn(|_| draws.range_f64(-0.1, 0.1))).collect();
    let mut pixels = Vec::with_capacity(3 * WIDTH * HEIGHT);
    for y in 0..HEIGHT {
        for x in 0..WIDTH {
            let noise = draws.range_f64(-16.0, 16.0);
            for channel in 0..3 {
                let smooth: f64 = (0..3)
                    .map(|i| waves[3 * channel + i])
                    .map(|[a, b, c, d]| 35.0 * (a * x as f64 + b * y as f64 + 30.0 * c).sin() * (0.3 + 7.0 * d))
                    .sum();
                pixels.push((128.0 + smooth + noise).clamp(0.0, 255.0) as u8);
            }
        }
    }
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, 94);
    encoder.set_sampling_factor(SamplingFactor::F_2_2);
    encoder.encode(&pixels, WIDTH as u16, HEIGHT as u16, ColorType::Rgb).expect("sizes fit");
    bytes
}

fn find(folder: &Path, files: &mut Vec<PathBuf>) {
    let mut paths: Vec<_> = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        if files.len() == FILES_MAX {
            return;
        }
        if path.is_dir() {
            find(&path, files);
        } else if path.extension().is_some_and(|end| end == "jpg" || end == "jpeg" || end == "JPEG") {
            files.push(path);
        }
    }
}

fn pictures() -> Vec<Vec<u8>> {
    let pictures: Vec<Vec<u8>> = match std::env::var_os("FEEDLINE_BENCH_IMAGES") {
        Some(folder) => {
            let mut files = Vec::new();
            find(Path::new(&folder), &mut files);
            files.iter().map(|path| std::fs::read(path).expect("readable")).collect()
        }
        None => (0..MADE).map(made).collect(),
    };
    let bytes: usize = pictures.iter().map(Vec::len).sum();
    println!("{} pictures, {} bytes on average", pictures.len(), bytes / pictures.len());
    pictures
}

fn options() -> DecoderOptions {
    DecoderOptions::new_fast().jpeg_set_out_colorspace(ColorSpace::RGB)
}

fn images(criterion: &mut Criterion) {
    let pictures = pictures();
    let mut group = criterion.benchmark_group("images");
    group.throughput(Throughput::Elements(1));
    let mut turn = pictures.iter().cycle();
    let mut next = || turn.next().expect("not empty").as_slice();

    group.bench_function("header (zune)", |bencher| {
        bencher.iter(|| {
            let mut decoder = JpegDecoder::new_with_options(ZCursor::new(next()), options());
            decoder.decode_headers().unwrap();
            black_box(decoder.dimensions())
        });
    });
    let mut pixels = vec![0; 1 << 24];
    group.bench_function("full decode (zune)", |bencher| {
        bencher.iter(|| {
            let mut decoder = JpegDecoder::new_with_options(ZCursor::new(next()), options());
            decoder.decode_into(&mut pixels).unwrap();
        });
    });
    group.bench_function("resize 500x375 to 224x224 (fast_image_resize)", |bencher| {
        let mut resizer = fir::Resizer::new();
        let mut out = fir::images::Image::new(224, 224, fir::PixelType::U8x3);
        let source = fir::images::ImageRef::new(500, 375, &pixels[..3 * 500 * 375], fir::PixelType::U8x3).unwrap();
        let bilinear = fir::ResizeAlg::Convolution(fir::FilterType::Bilinear);
        let options = fir::ResizeOptions::new().resize_alg(bilinear);
        bencher.iter(|| resizer.resize(&source, &mut out, &options).unwrap());
    });

    let train = Image::random_resized_crop(224).flip(0.5);
    let normalized = train.clone().normalize(MEAN, STD);
    let cases = [
        ("random crop 224, u8 NHWC", train.clone()),
        ("random crop 224, u8 NCHW", train.clone().layout(PixelLayout::Nchw)),
        ("random crop 224, f32 NHWC normalised", normalized.clone().dtype(DType::F32)),
        ("random crop 224, f32 NCHW normalised", normalized.clone().dtype(DType::F32).layout(PixelLayout::Nchw)),
        ("random crop 224, bf16 NCHW normalised", normalized.dtype(DType::BF16).layout(PixelLayout::Nchw)),
        ("random crop 224, bicubic u8 NHWC", train.filter(Filter::Bicubic)),
        ("centre crop 256 to 224, u8 NHWC", Image::center_crop(256, 224)),
    ];
    for (name, decoder) in cases {
        let mut single = Single::new(decoder, &EncodedField::image("image")).unwrap();
        let mut id = 0;
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                id += 1;
                single.decode(next(), 1, 0, id).unwrap();
            });
        });
    }
    group.finish();
}

criterion_group!(benches, images);
criterion_main!(benches);
