//! Any bytes as an Arrow stream or file: rows or errors, never more than there was.
//!
//! `cargo +nightly fuzz run arrow fuzz/corpus/arrow tests/fixtures/arrow -- -rss_limit_mb=1024`
#![no_main]

use feedline::dataset::{Arrow, Dataset};
use feedline::tensor::{DType, Field};
use feedline::unstable::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let named = Arrow::builder()
        .columns(["label", "text", "flag", "box", "kind"])
        .up_to("ids", 3)
        .up_to("flags", 10)
        .numbers(Field::fixed("grid", DType::I16, [2, 2]))
        .image("image");
    for builder in [named, Arrow::builder().varying_up_to(8)] {
        let builder = builder.null_zero(true).skip_damage(true);
        let Ok(rows) = builder.open_bytes(bytes) else {
            continue;
        };
        // Eight booleans are in a byte.
        let most = bytes.len() * 8 + 64;
        for id in 0..rows.len() {
            for field in fuzzing::sample(&rows, id).unwrap_or_default() {
                assert!(field.len() <= most);
            }
        }
    }
});
