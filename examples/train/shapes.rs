//! Makes the image set that the example trains on: eight simple shapes, drawn the way a camera
//! might see them. Every picture has its own size, background, light, clutter and sensor noise,
//! so that the network has to learn the outline of the shape and nothing cheaper.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use image::RgbImage;
use image::codecs::jpeg::JpegEncoder;
use rayon::prelude::*;

/// The classes, one folder each. In alphabetical order, so that a label is an index into this list.
pub const CLASSES: [&str; 8] = ["circle", "crescent", "cross", "heart", "ring", "square", "star", "triangle"];

const JPEG_QUALITY: u8 = 90;

/// Draws `n_per_class` pictures of each class into `dir/<class>/`. `progress` is told how many
/// pictures are done, from several threads.
///
/// A folder that is there already is left as it is. It is a whole set: the pictures go to a
/// temporary folder first, which gets its name only once the last picture is in it.
/// The same seed draws the same pictures.
pub fn make_shapes(dir: &Path, n_per_class: usize, seed: u64, progress: impl Fn(u64) + Sync) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    // The process id keeps two runs that start together out of each other's folder.
    let mut partial = dir.as_os_str().to_owned();
    partial.push(format!(".partial-{}", std::process::id()));
    let partial = Path::new(&partial);

    let made = draw_all(partial, n_per_class, seed, progress).and_then(|()| fs::rename(partial, dir));
    if made.is_err() {
        // The error that counts is the first one; what cannot be removed now does no harm.
        let _ = fs::remove_dir_all(partial);
        if dir.is_dir() {
            return Ok(()); // another run was faster
        }
    }
    made
}

fn draw_all(dir: &Path, n_per_class: usize, seed: u64, progress: impl Fn(u64) + Sync) -> io::Result<()> {
    for class in CLASSES {
        fs::create_dir_all(dir.join(class))?;
    }
    let done = AtomicU64::new(0);
    (0..CLASSES.len() * n_per_class).into_par_iter().try_for_each(|i| {
        let (class, number) = (i / n_per_class, i % n_per_class);
        // A generator of its own for each picture: the order of the threads has no say.
        let picture = Scene::random(class, Rng::new(seed, i as u64)).photograph();
        let mut jpeg = Vec::new();
        JpegEncoder::new_with_quality(&mut jpeg, JPEG_QUALITY).encode_image(&picture).map_err(io::Error::other)?;
        fs::write(dir.join(CLASSES[class]).join(format!("{number:05}.jpg")), jpeg)?;
        progress(done.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(())
    })
}

/// SplitMix64: a small, fast random number generator with a reproducible stream.
pub struct Rng(u64);

impl Rng {
    /// The generator number `stream` of those that belong to `seed`.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut rng = Rng(seed);
        rng.0 = rng.next() ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
        rng
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform in `low..high`.
    pub fn range(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * unit(self.next())
    }

    /// Roughly normal, with mean 0 and standard deviation 1: the sum of four uniform numbers.
    pub fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The upper bits of `bits` as a number in `0.0..1.0`.
fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1u64 << 24) as f32
}

type Rgb = [f32; 3];

fn random_colour(rng: &mut Rng, low: f32, high: f32) -> Rgb {
    std::array::from_fn(|_| rng.range(low, high))
}

fn blend(from: Rgb, to: Rgb, amount: f32) -> Rgb {
    std::array::from_fn(|i| from[i] + (to[i] - from[i]) * amount)
}

/// Euclidean distance; the eye tells colours apart from about 0.2 on.
fn contrast(a: Rgb, b: Rgb) -> f32 {
    a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f32>().sqrt()
}

/// A linear ramp over the picture, 0 on one side and 1 on the other.
struct Ramp {
    across: f32,
    down: f32,
}

impl Ramp {
    fn random(rng: &mut Rng, width: f32, height: f32) -> Self {
        let angle = rng.range(0.0, std::f32::consts::TAU);
        Ramp { across: angle.cos() / width, down: angle.sin() / height }
    }

    /// `x` and `y` in pixels from the centre of the picture.
    fn at(&self, x: f32, y: f32) -> f32 {
        (0.5 + x * self.across + y * self.down).clamp(0.0, 1.0)
    }
}

/// Value noise: smooth random hills, in three sizes.
struct Texture {
    seed: u64,
    hill: f32,
    strength: f32,
}

impl Texture {
    fn random(rng: &mut Rng) -> Self {
        Texture { seed: rng.next(), hill: rng.range(6.0, 40.0), strength: rng.range(0.05, 0.35) }
    }

    /// About `-strength..strength`.
    fn at(&self, x: f32, y: f32) -> f32 {
        let octave = |i: i32| {
            let zoom = 2f32.powi(i);
            (self.hills(x * zoom / self.hill, y * zoom / self.hill, i as u64) - 0.5) / zoom
        };
        (0..3).map(octave).sum::<f32>() * self.strength
    }

    fn hills(&self, x: f32, y: f32, layer: u64) -> f32 {
        let (left, top) = (x.floor(), y.floor());
        let height = |dx: i64, dy: i64| {
            let (column, row) = (left as i64 + dx, top as i64 + dy);
            unit(mix(self.seed ^ mix((column << 32 ^ row & 0xffff_ffff) as u64 ^ layer << 60)))
        };
        let smooth = |t: f32| t * t * (3.0 - 2.0 * t);
        let lerp = |a: f32, b: f32, t: f32| a + (b - a) * t;
        let (s, t) = (smooth(x - left), smooth(y - top));
        lerp(lerp(height(0, 0), height(1, 0), s), lerp(height(0, 1), height(1, 1), s), t)
    }
}

/// A thing in the picture: an outline with a place, a turn, a size and a colour.
struct Thing {
    outline: fn(f32, f32) -> f32,
    x: f32,
    y: f32,
    sin: f32,
    cos: f32,
    radius: f32,
    colour: Rgb,
}

impl Thing {
    /// How much of the pixel at `x`, `y` the thing covers: 0 to 1, in between on the outline.
    fn cover(&self, x: f32, y: f32) -> f32 {
        let (x, y) = (x - self.x, y - self.y);
        let (u, v) = (x * self.cos + y * self.sin, y * self.cos - x * self.sin);
        let pixels = (self.outline)(u / self.radius, v / self.radius) * self.radius;
        (0.5 - pixels).clamp(0.0, 1.0)
    }
}

/// The outline of a class as a signed distance: negative inside a shape of radius 1 about the
/// origin, positive outside.
fn outline(class: usize) -> fn(f32, f32) -> f32 {
    match CLASSES[class] {
        "circle" => |u, v| u.hypot(v) - 0.9,
        "crescent" => |u, v| (u.hypot(v) - 0.95).max(0.8 - (u - 0.5).hypot(v)),
        "cross" => |u, v| {
            let (long, short) = (u.abs().max(v.abs()), u.abs().min(v.abs()));
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
    let (x, y) = (u.hypot(v) * angle.cos(), u.hypot(v) * angle.sin());
    // The distance to the line through the tip (1, 0) and the notch.
    let (edge_x, edge_y) = (notch * half.cos() - 1.0, notch * half.sin());
    ((x - 1.0) * edge_y - y * edge_x) / edge_x.hypot(edge_y)
}

/// A strip with round ends: the clutter behind the shape. It looks like none of the classes.
fn strip(u: f32, v: f32) -> f32 {
    (u.abs() - 0.85).max(0.0).hypot(v) - 0.15
}

/// Everything that is in one picture.
struct Scene {
    width: u32,
    height: u32,
    background: [Rgb; 2],
    ramp: Ramp,
    texture: Texture,
    light: Ramp,
    brightness: [f32; 2],
    clutter: Vec<Thing>,
    shape: Thing,
    sensor_noise: f32,
    rng: Rng,
}

impl Scene {
    fn random(class: usize, mut rng: Rng) -> Self {
        let (width, height) = (rng.range(96.0, 161.0).floor(), rng.range(96.0, 129.0).floor());
        let background = [(); 2].map(|()| random_colour(&mut rng, 0.05, 0.5));
        let clutter = (0..3)
            .map(|_| {
                let (size, colour) = (rng.range(0.15, 0.4), random_colour(&mut rng, 0.05, 0.6));
                random_thing(&mut rng, strip, width, height, size, colour)
            })
            .collect();
        // The shape is lighter than what lies around it, by and large. With any colour on any other,
        // several times as many pictures would be needed to learn from.
        let colour = loop {
            let colour = random_colour(&mut rng, 0.4, 1.0);
            if background.iter().all(|&b| contrast(colour, b) > 0.4) {
                break colour;
            }
        };
        let size = rng.range(0.24, 0.42);
        Scene {
            width: width as u32,
            height: height as u32,
            background,
            ramp: Ramp::random(&mut rng, width, height),
            texture: Texture::random(&mut rng),
            light: Ramp::random(&mut rng, width, height),
            brightness: [rng.range(0.5, 1.0), rng.range(0.9, 1.2)],
            clutter,
            shape: random_thing(&mut rng, outline(class), width, height, size, colour),
            sensor_noise: rng.range(0.01, 0.06),
            rng,
        }
    }

    fn photograph(mut self) -> RgbImage {
        let mut picture = RgbImage::new(self.width, self.height);
        let (middle_x, middle_y) = (self.width as f32 / 2.0, self.height as f32 / 2.0);
        for (column, row, pixel) in picture.enumerate_pixels_mut() {
            let colour = self.colour_at(column as f32 - middle_x, row as f32 - middle_y);
            let noisy = colour.map(|c| c + self.sensor_noise * self.rng.normal());
            pixel.0 = noisy.map(|c| (c * 255.0).round() as u8); // `as` clamps to 0..=255
        }
        picture
    }

    fn colour_at(&self, x: f32, y: f32) -> Rgb {
        let mut colour = blend(self.background[0], self.background[1], self.ramp.at(x, y));
        for thing in self.clutter.iter().chain([&self.shape]) {
            colour = blend(colour, thing.colour, thing.cover(x, y));
        }
        let [dark, bright] = self.brightness;
        let light = dark + (bright - dark) * self.light.at(x, y) + self.texture.at(x, y);
        colour.map(|c| c * light)
    }
}

/// A thing in a random place and turn, wholly inside the picture. `size` is its radius as a part
/// of the shorter side.
fn random_thing(rng: &mut Rng, outline: fn(f32, f32) -> f32, width: f32, height: f32, size: f32, colour: Rgb) -> Thing {
    let radius = size * width.min(height);
    let (room_x, room_y) = (width / 2.0 - radius, height / 2.0 - radius);
    let (sin, cos) = rng.range(0.0, std::f32::consts::TAU).sin_cos();
    Thing { outline, x: rng.range(-room_x, room_x), y: rng.range(-room_y, room_y), sin, cos, radius, colour }
}
