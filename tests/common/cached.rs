//! Loaders with the local cache: their counts, and epochs until blocks are there.

use super::got::Got;
use feedline::Loader;
use feedline::profile::CacheReads;
use std::time::{Duration, Instant};

pub fn counts(loader: &Loader) -> CacheReads {
    loader.report().total.storage.local_cache.unwrap()
}

/// Epochs until so many blocks are there.
pub fn fill_blocks(loader: &Loader, blocks: u64) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while counts(loader).blocks < blocks {
        assert!(Instant::now() < deadline, "{}", counts(loader));
        Got::epoch(loader, 0);
    }
}
