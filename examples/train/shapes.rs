//! Makes the image set that the example trains on: eight simple shapes. Every picture has its own
//! size, colours, light and noise, and its shape its own place, turn and size, so that the network
//! has to learn the outline and nothing cheaper.

use feedline::order::Draws;
use image::codecs::jpeg::JpegEncoder;
use image::{Rgb, RgbImage};
use rayon::prelude::*;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The classes, one folder each. In alphabetical order, so that a label is an index into this list.
pub const CLASSES: [&str; 8] = [
    "circle", "crescent", "cross", "heart", "ring", "square", "star", "triangle",
];

const JPEG_QUALITY: u8 = 90;

/// Draws `n_per_class` pictures of each class into `dir/<class>/`. `progress` is told how many
/// pictures are done, from several threads.
///
/// A folder that is there already is left as it is. It is a whole set: the pictures go to a
/// temporary folder first, which gets its name only once the last picture is in it.
/// The same seed draws the same pictures.
pub fn make_shapes(
    dir: &Path,
    n_per_class: usize,
    seed: u64,
    progress: impl Fn(u64) + Sync,
) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    // The process id keeps two runs that start together out of each other's folder.
    let mut partial = dir.as_os_str().to_owned();
    partial.push(format!(".partial-{}", std::process::id()));
    let partial = Path::new(&partial);

    let made =
        draw_all(partial, n_per_class, seed, progress).and_then(|()| fs::rename(partial, dir));
    if made.is_err() {
        // The error that counts is the first one; what cannot be removed now does no harm.
        let _ = fs::remove_dir_all(partial);
        if dir.is_dir() {
            return Ok(()); // another run was faster
        }
    }
    made
}

fn draw_all(
    dir: &Path,
    n_per_class: usize,
    seed: u64,
    progress: impl Fn(u64) + Sync,
) -> io::Result<()> {
    for class in CLASSES {
        fs::create_dir_all(dir.join(class))?;
    }
    let done = AtomicU64::new(0);
    (0..CLASSES.len() * n_per_class)
        .into_par_iter()
        .try_for_each(|i| {
            let class = i / n_per_class;
            let number = i % n_per_class;
            // Draws of its own for each picture: the order of the threads has no say.
            let picture = draw(class, Draws::new(seed, 0, i as u64, "shape"));
            let mut jpeg = Vec::new();
            JpegEncoder::new_with_quality(&mut jpeg, JPEG_QUALITY)
                .encode_image(&picture)
                .map_err(io::Error::other)?;
            fs::write(
                dir.join(CLASSES[class]).join(format!("{number:05}.jpg")),
                jpeg,
            )?;
            progress(done.fetch_add(1, Ordering::Relaxed) + 1);
            Ok(())
        })
}

/// A picture of the class: a light shape, wholly inside, on a darker ground that is lit from one
/// side.
fn draw(class: usize, mut draws: Draws) -> RgbImage {
    let mut between = |low: f64, high: f64| draws.range_f64(low, high) as f32;
    let width = between(96.0, 161.0).floor();
    let height = between(96.0, 129.0).floor();
    let mut colour = |low, high| [(); 3].map(|()| between(low, high));
    let ground = colour(0.05, 0.4);
    let shape = colour(0.5, 1.0);
    let radius = between(0.24, 0.42) * width.min(height);
    let x = between(radius.into(), (width - radius).into());
    let y = between(radius.into(), (height - radius).into());
    let (sin, cos) = between(0.0, std::f64::consts::TAU).sin_cos();
    let light = between(-0.5, 0.5);
    let noise = f64::from(between(0.02, 0.1));
    let outline = outline(class);
    RgbImage::from_fn(width as u32, height as u32, |column, row| {
        let u = column as f32 - x;
        let v = row as f32 - y;
        let (u, v) = ((u * cos + v * sin) / radius, (v * cos - u * sin) / radius);
        // From 0 outside to 1 inside, in between on the outline.
        let cover = (0.5 - outline(u, v) * radius).clamp(0.0, 1.0);
        let lit = 1.0 + light * (column as f32 / width - 0.5);
        Rgb([0, 1, 2].map(|i| {
            let clean = (ground[i] + (shape[i] - ground[i]) * cover) * lit;
            ((clean + draws.range_f64(-noise, noise) as f32) * 255.0).round() as u8 // `as` clamps to 0..=255
        }))
    })
}

/// The outline of a class as a signed distance: negative inside a shape of radius 1 about the
/// origin, positive outside.
fn outline(class: usize) -> fn(f32, f32) -> f32 {
    match CLASSES[class] {
        "circle" => |u, v| u.hypot(v) - 0.9,
        "crescent" => |u, v| (u.hypot(v) - 0.95).max(0.8 - (u - 0.5).hypot(v)),
        "cross" => |u, v| {
            let long = u.abs().max(v.abs());
            let short = u.abs().min(v.abs());
            (long - 0.95).max(short - 0.3)
        },
        "heart" => |u, v| {
            let point = (u.abs() + (v - 0.05).abs() - 0.85) / 2f32.sqrt();
            point.min((u.abs() - 0.425).hypot(v + 0.375) - 0.6)
        },
        "ring" => |u, v| (u.hypot(v) - 0.72).abs() - 0.22,
        "square" => |u, v| star(u, v, 4.0, 0.5f32.sqrt()),
        "star" => |u, v| star(u, v, 5.0, 0.42),
        "triangle" => |u, v| star(u, v, 3.0, 0.5),
        other => unreachable!("no outline for {other}"),
    }
}

/// A star with `points` tips on the unit circle and its notches on a circle of radius `notch`.
/// A regular polygon is a star, too: one whose notches lie on the straight line between the tips.
fn star(u: f32, v: f32, points: f32, notch: f32) -> f32 {
    // Fold the plane into half a tip: the tip lies at angle 0, the notch at `half`.
    let half = std::f32::consts::PI / points;
    let angle = (v.atan2(u).rem_euclid(2.0 * half) - half).abs();
    let angle = half - angle;
    let x = u.hypot(v) * angle.cos();
    let y = u.hypot(v) * angle.sin();
    // The distance to the line through the tip (1, 0) and the notch.
    let edge_x = notch * half.cos() - 1.0;
    let edge_y = notch * half.sin();
    ((x - 1.0) * edge_y - y * edge_x) / edge_x.hypot(edge_y)
}
