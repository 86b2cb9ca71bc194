//! Any numbers and entries in an index file whose checksums are right: taken or not, never a panic,
//! no memory that the file has not.
//!
//! `cargo +nightly fuzz run index -- -rss_limit_mb=512`
#![no_main]

use feedline::unstable::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    fuzzing::index(bytes);
});
