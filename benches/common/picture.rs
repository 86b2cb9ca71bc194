//! Generated JPEGs of 500×375 pixels and about 107 KB, like the average picture of ImageNet.

use feedline::order::Draws;
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};

/// Smooth shapes with sensor noise, and a restart marker every `interval` MCUs unless it is 0.
pub fn made(id: u64, interval: u16) -> Vec<u8> {
    const WIDTH: usize = 500;
    const HEIGHT: usize = 375;
    let mut draws = Draws::new(1, 0, id, "bench");
    let waves: Vec<[f64; 4]> = (0..9)
        .map(|_| std::array::from_fn(|_| draws.range_f64(-0.1, 0.1)))
        .collect();
    let mut pixels = Vec::with_capacity(3 * WIDTH * HEIGHT);
    for y in 0..HEIGHT {
        for x in 0..WIDTH {
            let noise = draws.range_f64(-16.0, 16.0);
            for channel in 0..3 {
                let smooth: f64 = (0..3)
                    .map(|i| waves[3 * channel + i])
                    .map(|[a, b, c, d]| {
                        35.0 * (a * x as f64 + b * y as f64 + 30.0 * c).sin() * (0.3 + 7.0 * d)
                    })
                    .sum();
                pixels.push((128.0 + smooth + noise).clamp(0.0, 255.0) as u8);
            }
        }
    }
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, 94);
    encoder.set_sampling_factor(SamplingFactor::F_2_2);
    if interval > 0 {
        encoder.set_restart_interval(interval);
    }
    encoder
        .encode(&pixels, WIDTH as u16, HEIGHT as u16, ColorType::Rgb)
        .expect("sizes fit");
    bytes
}
