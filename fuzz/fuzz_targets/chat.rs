//! Any text as a chat template, and any bytes behind it as a conversation: a text or an error.
//!
//! `cargo +nightly fuzz run chat fuzz/corpus/chat tests/fixtures/chat -- -rss_limit_mb=1024`
#![no_main]

use feedline::unstable::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let at = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (source, conversation) = bytes.split_at(at);
    if let Ok(source) = std::str::from_utf8(source) {
        fuzzing::chat(source, conversation.get(1..).unwrap_or_default());
    }
});
