//! Any bytes at all: never a panic, never more memory than the limits allow.
//!
//! `cargo +nightly fuzz run image tests/fixtures/images -- -rss_limit_mb=512`
#![no_main]

use feedline::decode::Single;
use feedline::decode::{Image, Limits};
use feedline::tensor::EncodedField;
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;

thread_local! {
    static SINGLE: RefCell<Single> = RefCell::new({
        let decoder = Image::random_resized_crop(16).limits(tight());
        Single::new(decoder, &EncodedField::image("image")).expect("legal settings")
    });
}

fuzz_target!(|bytes: &[u8]| {
    // Errors are right answers; what must not happen is a panic (caught, and an error of its own
    // kind), a hang or an allocation out of bounds.
    SINGLE.with_borrow_mut(|single| {
        if let Err(error) = single.decode(bytes, 0, 0, bytes.len() as u64) {
            assert_ne!(error.kind(), feedline::ErrorKind::Panicked, "{error}");
        }
    });
});

fn tight() -> Limits {
    let mut limits = Limits::default();
    limits.pixels = 1 << 20;
    limits
}
