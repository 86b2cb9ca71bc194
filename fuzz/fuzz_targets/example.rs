//! Any bytes as a `tf.train.Example`: a list within the row's size, or an error.
//!
//! `cargo +nightly fuzz run example -- -rss_limit_mb=512`
#![no_main]

use feedline::unstable::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for (name, kind) in ["", "a", "label"]
        .into_iter()
        .flat_map(|name| (0..3).map(move |kind| (name, kind)))
    {
        let Ok(values) = fuzzing::feature(bytes, name, kind, 4096) else {
            continue;
        };
        assert!(values.len() <= if kind == 0 { bytes.len() } else { 4096 });
    }
});
