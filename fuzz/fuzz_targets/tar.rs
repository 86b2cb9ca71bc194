//! Any bytes as a shard: an error, or samples that can all be read, in bounded memory.
//!
//! `cargo +nightly fuzz run tar tests/fixtures/tar -- -rss_limit_mb=512`
#![no_main]

use feedline::dataset::{Dataset, Tar, Verify};
use libfuzzer_sys::fuzz_target;
use std::ops::ControlFlow;

fuzz_target!(|bytes: &[u8]| {
    for skip in [false, true] {
        let Ok(tar) = Tar::builder().skip_damage(skip).open_bytes(bytes.to_vec()) else {
            continue;
        };
        let (done, damaged) = Verify::new()
            .workers(1)
            .run(&tar, |_| ControlFlow::Continue(()))
            .expect("legal settings");
        // Payloads are what they were when they were indexed; whether a label is a number shows
        // only now.
        assert_eq!(done.samples, tar.len());
        for error in damaged {
            assert!(
                error.to_string().contains("a whole number expected"),
                "{error}"
            );
        }
    }
});
