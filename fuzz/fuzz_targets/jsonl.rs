//! Any bytes as a file of JSON lines, plain or compressed, and as a line: samples or errors; what is
//! found is UTF-8, and never more than there was.
//!
//! `cargo +nightly fuzz run jsonl fuzz/corpus/jsonl tests/fixtures/jsonl -- -rss_limit_mb=1024`
#![no_main]

use feedline::dataset::{Dataset, Jsonl};
use feedline::tensor::{DType, Field};
use feedline::unstable::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let (is_object, text) = fuzzing::json(bytes, "a.b[0]").expect("a right path");
    if let Some(text) = text.filter(|_| is_object) {
        assert!(text.len() <= bytes.len() && std::str::from_utf8(&text).is_ok());
    }
    let builder = Jsonl::builder()
        .text("text")
        .texts("a[].b", 4)
        .numbers(Field::up_to("ids", DType::I32, 8), "ids")
        .missing_zero(true)
        .skip_damage(true);
    let Ok(lines) = builder.open_bytes(bytes) else {
        return;
    };
    if let Some(chunks) = lines.chunked() {
        (0..chunks.starts().len() - 1).for_each(|chunk| drop(fuzzing::chunk(&lines, chunk)));
    } else {
        (0..lines.len()).for_each(|id| drop(fuzzing::sample(&lines, id)));
    }
});
