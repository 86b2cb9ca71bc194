//! Any bytes at all: never a panic, and what has restart markers afterwards has the coefficients that it had before, as a
//! naive reader sees them.
//!
//! `cargo +nightly fuzz run transcode tests/fixtures/images tests/fixtures/prepare -- -rss_limit_mb=512`
#![no_main]

#[path = "../../tests/common/naive_jpeg.rs"]
mod naive_jpeg;

use feedline::prepare::{Outcome, RestartOptions, restart_jpeg};
use libfuzzer_sys::fuzz_target;
use std::num::NonZeroU16;

fuzz_target!(|bytes: &[u8]| {
    // The interval depends on the bytes, too: 0 stands for the default.
    let interval = bytes.last().copied().and_then(|byte| NonZeroU16::new(u16::from(byte) % 9));
    let mut options = RestartOptions::default().pixels_max(1 << 18);
    if let Some(interval) = interval {
        options = options.interval(interval);
    }
    let mut out = Vec::new();
    match restart_jpeg(bytes, &options, &mut out) {
        Ok(Outcome::Transcoded { interval, .. }) => {
            let (before, _) = naive_jpeg::read(bytes).expect("what was transcoded can be read");
            let (after, found) = naive_jpeg::read(&out).expect("the result can be read");
            assert!(before == after, "coefficients differ");
            assert_eq!(found, usize::from(interval));
            let mut twice = Vec::new();
            restart_jpeg(&out, &options, &mut twice).expect("the result can be transcoded");
            assert!(twice == out, "a second pass changes something");
        }
        Ok(_) => assert!(out == bytes),
        Err(_) => assert!(out.is_empty()),
    }
});
