//! Any bytes as a Parquet file: an error, or as many rows as its footer says, in bounded memory.
//!
//! `cargo +nightly fuzz run parquet tests/fixtures/parquet -- -rss_limit_mb=1024`
#![no_main]

use feedline::dataset::{Dataset, Parquet, Verify};
use libfuzzer_sys::fuzz_target;
use std::ops::ControlFlow;
use std::sync::Once;

/// The parquet crate panics on some bytes; the library catches that and calls it damage. Only
/// panics of our own code, and those that leave it, end a run.
fn forgive_the_parquet_crate() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info
                .location()
                .is_some_and(|place| place.file().contains("/parquet-"))
            {
                before(info);
            }
        }));
    });
}

fuzz_target!(|bytes: &[u8]| {
    forgive_the_parquet_crate();
    // Whole row groups, or runs of their rows; every column, or those that lists of any length
    // would rule out.
    let builder = Parquet::builder().chunk_bytes(if bytes.len() % 2 == 0 { 700 } else { 1 << 27 });
    let lists = builder
        .clone()
        .up_to("tok", 8)
        .up_to("bools", 8)
        .up_to("same", 500)
        .up_to("empty.list.element.a", 4);
    let one = |name: &str| builder.clone().up_to(name, 500).open_bytes(bytes.to_vec());
    let opened = lists
        .open_bytes(bytes.to_vec())
        .or_else(|_| builder.clone().open_bytes(bytes.to_vec()));
    let opened = opened
        .or_else(|_| one("tok"))
        .or_else(|_| one("same"))
        .or_else(|_| one("empty.list.element.a"));
    let Ok(dataset) = opened else { return };
    let chunks = dataset.chunked().expect("Parquet comes in chunks");
    let largest = (0..chunks.starts().len() - 1)
        .map(|chunk| chunks.chunk_bytes(chunk))
        .map(|b| b.opened + b.scratch)
        .max();
    // A loader would refuse it by its budget.
    if largest.unwrap_or(0) > 64 << 20 {
        return;
    }
    let (done, _) = Verify::new()
        .workers(1)
        .run(&dataset, |_| ControlFlow::Continue(()))
        .expect("legal settings");
    assert_eq!(done.samples, dataset.len());
});
