//! The header of any format: any bytes at all are an answer, never a panic, nor memory that the
//! file has no bytes for.
//!
//! `cargo +nightly fuzz run headers tests/fixtures/{npy,safetensors,tokens} -- -rss_limit_mb=512`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    feedline::unstable::fuzzing::headers(bytes);
});
