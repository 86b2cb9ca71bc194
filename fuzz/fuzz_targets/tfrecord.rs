//! Any bytes as a TFRecord file: records or errors, and the records add up to the file.
//!
//! `cargo +nightly fuzz run tfrecord fuzz/corpus/tfrecord tests/fixtures/tfrecord --
//! -rss_limit_mb=512`
#![no_main]

use feedline::dataset::{Dataset, TfRecord};
use feedline::unstable::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(records) = TfRecord::builder().open_bytes(bytes) else {
        return;
    };
    // Payloads may be wrong; lengths may not.
    let unchecked = TfRecord::builder()
        .checksums(false)
        .open_bytes(bytes)
        .expect("the same index");
    let all = |dataset| (0..records.len()).map(move |id| fuzzing::sample(dataset, id));
    let sum: usize = all(&unchecked)
        .map(|fields| 16 + fields.expect("its length is right")[0].len())
        .sum();
    assert_eq!(sum, bytes.len());
    assert!(
        all(&records)
            .flatten()
            .all(|fields| fields[0].len() < bytes.len())
    );
});
