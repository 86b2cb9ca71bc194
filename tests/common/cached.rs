//! Loaders with the local cache: their counts, and epochs until blocks are there.

use super::got::Got;
use super::wait::answer;
use feedline::Loader;
use feedline::profile::snapshot::CacheReads;

pub fn counts(loader: &Loader) -> CacheReads {
    loader.report().total.storage.local_cache.unwrap()
}

/// Waits until `enough` of the counts; a failure names them, and the room that the disk has.
#[track_caller]
pub fn wait_for(loader: &Loader, enough: impl Fn(CacheReads) -> bool) {
    answer(|| said(loader), || enough(counts(loader)).then_some(()));
}

/// Epochs until so many blocks are there.
#[track_caller]
pub fn fill_blocks(loader: &Loader, blocks: u64) {
    wait_for(loader, |counts| {
        let there = counts.blocks >= blocks;
        let full = counts.to_string().contains("its disk has no room");
        assert!(there || !full, "{}", said(loader));
        if !there {
            Got::epoch(loader, 0);
        }
        there
    });
}

/// What was kept and what was not, with the reason; and the commonest reason for nothing at all.
fn said(loader: &Loader) -> String {
    let disk = rustix::fs::statvfs(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mib = |blocks: u64| (blocks * disk.f_frsize) >> 20;
    format!(
        "{}; the tests' disk has {} MiB free of {} MiB: with less than 5 % (at most 1024 blocks) a cache keeps nothing",
        counts(loader),
        mib(disk.f_bavail),
        mib(disk.f_blocks)
    )
}
