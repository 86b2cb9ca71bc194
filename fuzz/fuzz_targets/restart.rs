//! A JPEG with restart markers: the row is that of the same picture without them, to the bit; and
//! whatever is done to the bytes, never a panic.
//!
//! `cargo +nightly fuzz run restart -- -rss_limit_mb=512`
#![no_main]

use feedline::decode::Single;
use feedline::decode::{Image, Limits};
use feedline::tensor::EncodedField;
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
use libfuzzer_sys::fuzz_target;

/// How the fuzzer's first bytes describe a picture.
struct Recipe {
    width: u16,
    height: u16,
    factor: SamplingFactor,
    gray: bool,
    interval: u16,
    id: u64,
}

impl Recipe {
    fn of(head: &[u8; 8]) -> Self {
        use SamplingFactor::{F_1_1, F_1_2, F_2_1, F_2_2};
        let [width, height, factor, gray, interval, id @ ..] = *head;
        Self {
            width: 1 + u16::from(width) % 160,
            height: 1 + u16::from(height) % 160,
            factor: [F_1_1, F_2_1, F_1_2, F_2_2][usize::from(factor) % 4],
            gray: gray % 4 == 0,
            interval: 1 + u16::from(interval) % 60,
            id: u64::from(u32::from_le_bytes([id[0], id[1], id[2], 0])),
        }
    }

    /// Pixels from the fuzzer's bytes, over and over, on a slope.
    fn encode(&self, bytes: &[u8], marked: bool) -> Vec<u8> {
        let channels = if self.gray { 1 } else { 3 };
        let count = usize::from(self.width) * usize::from(self.height) * channels;
        let pixels: Vec<u8> = (0..count)
            .map(|at| {
                bytes
                    .get(at % bytes.len().max(1))
                    .copied()
                    .unwrap_or(0)
                    .wrapping_add((at / 7) as u8)
            })
            .collect();
        let mut out = Vec::new();
        let mut encoder = Encoder::new(&mut out, 85);
        encoder.set_sampling_factor(self.factor);
        if marked {
            encoder.set_restart_interval(self.interval);
        }
        let color = if self.gray {
            ColorType::Luma
        } else {
            ColorType::Rgb
        };
        encoder
            .encode(&pixels, self.width, self.height, color)
            .expect("a legal picture");
        out
    }
}

fn row(strict: bool, input: &[u8], id: u64) -> Option<Vec<u8>> {
    let mut limits = Limits::default();
    limits.pixels = 1 << 20;
    limits.memory = 64 << 20;
    let image = Image::random_resized_crop(16)
        .scale(0.01, 1.0)
        .limits(limits)
        .strict(strict);
    let mut single = Single::new(image, &EncodedField::image("image")).expect("legal settings");
    single.decode(input, 0, 0, id).ok()?;
    Some(single.bytes(0).to_vec())
}

fuzz_target!(|bytes: &[u8]| {
    let Some((head, rest)) = bytes.split_first_chunk() else {
        return;
    };
    let recipe = Recipe::of(head);
    let plain = recipe.encode(rest, false);
    let mut marked = recipe.encode(rest, true);
    let expected = row(true, &plain, recipe.id).expect("a good picture");
    assert!(
        row(true, &marked, recipe.id) == Some(expected),
        "with and without markers differ"
    );
    // Then damage: every three bytes are a place and a value.
    for damage in rest.chunks_exact(3).take(8) {
        let at = usize::from(u16::from_le_bytes([damage[0], damage[1]])) % marked.len();
        marked[at] = damage[2];
    }
    for strict in [true, false] {
        row(strict, &marked, recipe.id);
    }
});
