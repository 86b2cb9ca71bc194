//! Images per second on one core, step by step.
//!
//! Physical limit: entropy-coded bytes are read code by code, each at the end of the one before,
//! whatever pixels are used. libjpeg-turbo takes about 0.9 ms for the 107 KB of the average picture
//! here.
//!
//! `cargo bench --bench decode -- --quick`; real pictures: `FEEDLINE_BENCH_IMAGES=DIR` (its first
//! 200 JPEGs by name), and `FEEDLINE_BENCH_RESTART=DIR`, the same with restart markers. Without
//! them the bench generates noisy pictures of 500×375 pixels and about 107 KB.
//!
//! Ratios: `RUSTFLAGS="--cfg turbojpeg" FEEDLINE_PAIRS=15 cargo bench --bench decode --
//! none` runs the contestants of `ratios` in turn, 15 times over all pictures, and prints medians (`FEEDLINE_BENCH_CASES='NAME;NAME'`
//! selects contestants). With that flag, libjpeg-turbo and fast_image_resize without this crate are
//! among them.

#[path = "common/mod.rs"]
mod common;
#[path = "common/picture.rs"]
mod picture;
#[cfg(turbojpeg)]
#[path = "../tests/common/turbojpeg.rs"]
mod turbo;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fast_image_resize as fir;
use feedline::dataset::{DatasetExt, Framed, Images};
use feedline::decode::Single;
use feedline::decode::{Filter, Image, PixelLayout};
#[cfg(turbojpeg)]
use feedline::order::Draws;
use feedline::tensor::{DType, EncodedField};
use picture::made;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];
const FILES_MAX: usize = 200;
const MADE: u64 = 4;

fn find(folder: &Path, files: &mut Vec<PathBuf>) {
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    for path in paths {
        if files.len() == FILES_MAX {
            return;
        }
        if path.is_dir() {
            find(&path, files);
        } else if path
            .extension()
            .is_some_and(|end| end == "jpg" || end == "jpeg" || end == "JPEG")
        {
            files.push(path);
        }
    }
}

/// The pictures of a folder from an environment variable, or generated ones.
fn pictures(variable: &str, interval: u16) -> Vec<Vec<u8>> {
    let pictures: Vec<Vec<u8>> = match std::env::var_os(variable) {
        Some(folder) => {
            let mut files = Vec::new();
            find(Path::new(&folder), &mut files);
            files
                .iter()
                .map(|path| std::fs::read(path).expect("readable"))
                .collect()
        }
        None => (0..MADE).map(|id| made(id, interval)).collect(),
    };
    let bytes: usize = pictures.iter().map(Vec::len).sum();
    println!(
        "{} pictures, {} bytes on average",
        pictures.len(),
        bytes / pictures.len()
    );
    pictures
}

fn images(criterion: &mut Criterion) {
    let pictures = pictures("FEEDLINE_BENCH_IMAGES", 0);
    let mut group = criterion.benchmark_group("images");
    group.throughput(Throughput::Elements(1));
    let mut turn = pictures.iter().cycle();
    let mut next = || turn.next().expect("not empty").as_slice();

    let pixels = vec![90; 3 * 500 * 375];
    group.bench_function("resize 500x375 to 224x224 (fast_image_resize)", |bencher| {
        let mut resizer = fir::Resizer::new();
        let mut out = fir::images::Image::new(224, 224, fir::PixelType::U8x3);
        let source = fir::images::ImageRef::new(500, 375, &pixels, fir::PixelType::U8x3).unwrap();
        let bilinear = fir::ResizeAlg::Convolution(fir::FilterType::Bilinear);
        let options = fir::ResizeOptions::new().resize_alg(bilinear);
        bencher.iter(|| resizer.resize(&source, &mut out, &options).unwrap());
    });

    let train = Image::random_resized_crop(224).flip(0.5);
    let normalized = train.clone().normalize(MEAN, STD);
    let cases = [
        ("random crop 224, u8 NHWC", train.clone()),
        (
            "random crop 224, u8 NCHW",
            train.clone().layout(PixelLayout::Nchw),
        ),
        (
            "random crop 224, f32 NHWC normalised",
            normalized.clone().dtype(DType::F32),
        ),
        (
            "random crop 224, f32 NCHW normalised",
            normalized
                .clone()
                .dtype(DType::F32)
                .layout(PixelLayout::Nchw),
        ),
        (
            "random crop 224, bf16 NCHW normalised",
            normalized.dtype(DType::BF16).layout(PixelLayout::Nchw),
        ),
        (
            "random crop 224, bicubic u8 NHWC",
            train.filter(Filter::Bicubic),
        ),
        (
            "centre crop 256 to 224, u8 NHWC",
            Image::center_crop(256, 224),
        ),
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

/// A contestant: a name, and a function of picture number and pictures with and without restart
/// markers.
type Contestant = (String, Box<dyn FnMut(usize, &[u8], &[u8])>);

/// Seek points of the pictures; prints their size and the time to make them.
fn seek_points(pictures: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let folder = std::env::temp_dir().join(format!("feedline-bench-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("images")).unwrap();
    for (id, picture) in pictures.iter().enumerate() {
        std::fs::write(folder.join(format!("images/{id:06}.jpg")), picture).unwrap();
    }
    let images = Images::open(folder.join("images")).unwrap();
    let start = common::cpu_s();
    let seekable = images
        .facts(folder.join("seek"))
        .seek_points()
        .open()
        .unwrap();
    let rate = pictures.len() as f64 / (common::cpu_s() - start);
    let share = 100.0 * seekable.points_bytes() as f64
        / pictures.iter().map(Vec::len).sum::<usize>() as f64;
    println!(
        "seek points: {share:.2} % of the pictures' bytes, made at {rate:.0} images/s of CPU time"
    );
    let points = (0..pictures.len() as u64)
        .map(|id| {
            seekable
                .seek_points(id, 0, &mut Vec::new())
                .unwrap()
                .to_vec()
        })
        .collect();
    std::fs::remove_dir_all(folder).unwrap();
    points
}

fn loaders(plain: &[Vec<u8>]) -> Vec<Contestant> {
    let mut out: Vec<Contestant> = Vec::new();
    let u8_nhwc = Image::random_resized_crop(224).flip(0.5);
    let f32_nchw = u8_nhwc
        .clone()
        .normalize(MEAN, STD)
        .dtype(DType::F32)
        .layout(PixelLayout::Nchw);
    let scaled = u8_nhwc.clone().dct_scaling(true);
    let whole = Image::resize(224, 224);
    let kinds = [
        ("u8 NHWC", u8_nhwc),
        ("f32 NCHW", f32_nchw),
        ("whole, u8 NHWC", whole.clone()),
        ("u8 NHWC, scaled", scaled),
        ("whole, u8 NHWC, scaled", whole.dct_scaling(true)),
    ];
    for ((kind, image), restart) in kinds
        .into_iter()
        .flat_map(|kind| [(kind.clone(), false), (kind, true)])
    {
        let name = format!(
            "Image, {kind}{}",
            if restart { ", restart markers" } else { "" }
        );
        let mut single = Single::new(image, &EncodedField::image("image")).unwrap();
        out.push((
            name,
            Box::new(move |id, plain, marked| {
                single
                    .decode(if restart { marked } else { plain }, 1, 0, id as u64)
                    .unwrap();
            }),
        ));
    }
    let points = seek_points(plain);
    let mut single = Single::new(
        Image::random_resized_crop(224).flip(0.5),
        &EncodedField::image("image"),
    )
    .unwrap();
    out.push((
        String::from("Image, u8 NHWC, seek points"),
        Box::new(move |id, plain, _| {
            single
                .decode_seeking(plain, &points[id], 1, 0, id as u64)
                .unwrap();
        }),
    ));
    // At their own sizes: nothing is resized.
    let mut sized: HashMap<(u32, u32), Single> = HashMap::new();
    out.push((
        String::from("Image, full decode"),
        Box::new(move |_, plain, _| {
            let size = size_of(plain);
            sized
                .entry(size)
                .or_insert_with(|| {
                    Single::new(Image::resize(size.0, size.1), &EncodedField::image("image"))
                        .unwrap()
                })
                .decode(plain, 1, 0, 0)
                .unwrap();
        }),
    ));
    out
}

/// Width and height by the frame header.
fn size_of(picture: &[u8]) -> (u32, u32) {
    let mut at = 2;
    loop {
        let side = |offset| {
            u32::from(u16::from_be_bytes([
                picture[at + offset],
                picture[at + offset + 1],
            ]))
        };
        if matches!(picture[at + 1], 0xC0..=0xC2) {
            return (side(7), side(5));
        }
        at += 2 + side(2) as usize;
    }
}

/// The crop of `Image` for picture `id`.
#[cfg(turbojpeg)]
fn crop_of(id: usize, width: u32, height: u32) -> turbo::Region {
    let mut draws = Draws::new(1, 0, id as u64, "feedline image");
    draws.bool(0.5);
    let area = f64::from(width) * f64::from(height);
    for _ in 0..10 {
        let target = area * draws.range_f64(0.08, 1.0);
        let aspect = draws.range_f64(0.75_f64.ln(), (4.0_f64 / 3.0).ln()).exp();
        let w = (target * aspect).sqrt().round_ties_even() as u32;
        let h = (target / aspect).sqrt().round_ties_even() as u32;
        if w <= width && h <= height {
            let top = draws.below(u64::from(height - h) + 1) as u32;
            return [draws.below(u64::from(width - w) + 1) as u32, top, w, h];
        }
    }
    [0, 0, width, height]
}

/// Contestants: the libraries without this crate.
fn libraries() -> Vec<Contestant> {
    // Up to 22 megapixels.
    #[cfg_attr(
        not(turbojpeg),
        allow(unused_mut, reason = "only libjpeg-turbo adds some")
    )]
    let mut out: Vec<Contestant> = Vec::new();
    #[cfg(turbojpeg)]
    {
        let mut turbo = turbo::Turbo::default();
        out.push((
            String::from("libjpeg-turbo, full decode"),
            Box::new(move |_, plain, _| {
                turbo.decode(plain, |_, _| None);
            }),
        ));
        let mut turbo = turbo::Turbo::default();
        out.push((
            String::from("libjpeg-turbo, crop region"),
            Box::new(move |id, plain, _| {
                turbo.decode(plain, |w, h| Some(crop_of(id, w, h)));
            }),
        ));
        let mut turbo = turbo::Turbo::default();
        let mut resizer = fir::Resizer::new();
        let mut target = fir::images::Image::new(224, 224, fir::PixelType::U8x3);
        let both = move |id, plain: &[u8], _: &[u8]| {
            let mut crop = [0; 4];
            let there = turbo.decode(plain, |w, h| {
                crop = crop_of(id, w, h);
                Some(crop)
            });
            let pixels = &turbo.pixels[..(3 * there[2] * there[3]) as usize];
            let source =
                fir::images::ImageRef::new(there[2], there[3], pixels, fir::PixelType::U8x3)
                    .unwrap();
            let bilinear = fir::ResizeAlg::Convolution(fir::FilterType::Bilinear);
            let left = f64::from(crop[0] - there[0]);
            let options = fir::ResizeOptions::new().resize_alg(bilinear).crop(
                left,
                0.0,
                f64::from(crop[2]),
                f64::from(crop[3]),
            );
            resizer.resize(&source, &mut target, &options).unwrap();
        };
        out.push((
            String::from("libjpeg-turbo, crop region, fast_image_resize"),
            Box::new(both),
        ));
    }
    out
}

/// Runs all contestants in turn, again and again; prints medians, and ratios to the last library.
fn ratios(_: &mut Criterion) {
    let (rounds, _) = common::pairs_wanted();
    if rounds == 0 {
        return;
    }
    let plain = pictures("FEEDLINE_BENCH_IMAGES", 0);
    let marked = pictures("FEEDLINE_BENCH_RESTART", 4);
    let count = plain.len().min(marked.len());
    let mut contestants = libraries();
    let reference = contestants.last().expect("not empty").0.clone();
    contestants.extend(loaders(&plain));
    if let Ok(words) = std::env::var("FEEDLINE_BENCH_CASES") {
        contestants
            .retain(|(name, _)| *name == reference || words.split(';').any(|word| word == name));
    }
    let reference = contestants
        .iter()
        .position(|(name, _)| *name == reference)
        .expect("kept");
    let mut speeds = vec![Vec::new(); contestants.len()];
    for _ in 0..rounds {
        for ((_, run), speeds) in contestants.iter_mut().zip(&mut speeds) {
            // CPU time of this thread alone, because the machine may be shared.
            let start = common::cpu_s();
            for id in 0..count {
                run(id, &plain[id], &marked[id]);
            }
            speeds.push(count as f64 / (common::cpu_s() - start));
        }
    }
    for ((name, _), own) in contestants.iter().zip(&speeds) {
        common::figure(name, "images/s", own);
        let ratio = own
            .iter()
            .zip(&speeds[reference])
            .map(|(own, other)| own / other)
            .collect();
        let ((speed, ..), (ratio, low, high)) =
            (common::spread(own.clone()), common::spread(ratio));
        println!("{name:48} {speed:7.0} images/s, ratio {ratio:.3} [{low:.3}, {high:.3}]");
    }
}

criterion_group!(benches, images, ratios);
criterion_main!(benches);
