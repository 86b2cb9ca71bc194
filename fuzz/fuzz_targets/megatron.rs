//! A Megatron index, behind the length of its .bin: any bytes at all are an answer, never a panic, nor memory that the file has no bytes for.
//!
//! `cargo +nightly fuzz run megatron tests/fixtures/tokens -- -rss_limit_mb=512`
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    feedline::unstable::fuzzing::megatron(bytes);
});
