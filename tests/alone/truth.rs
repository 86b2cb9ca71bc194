//! The true origin of bytes, on real files: compares the report with the known state of the page
//! cache. Each test is a separate process, since the kernel counts the whole process.

use crate::common::{Dir, alone, here, noise, pull, readers, records, records_file};
use feedline::dataset::Records;
use feedline::memory::MemoryTerm;
use feedline::profile::verdict::Origin;
use feedline::storage::{Direct, Mode};
use feedline::{Loader, Order};
use rustix::fs::Advice;
use std::fs::File;
use std::path::{Path, PathBuf};

const LEN: usize = 64 << 20;
const RECORD: usize = 128 << 10;

/// Takes the file out of the page cache, as far as the file system allows it.
fn drop_from_cache(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
}

/// Bytes that storage moved for this process so far.
fn moved() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("read_bytes:"))?
        .trim()
        .parse()
        .ok()
}

/// A file of 64 MiB that is not cached; `None`, with the reason, if the file system or container
/// does not allow it or the kernel does not count.
fn cold(dir: &Dir) -> Option<PathBuf> {
    let path = dir.write("data.bin", &noise(LEN, 1));
    drop_from_cache(&path);
    let before = moved();
    std::fs::read(&path).unwrap();
    let moved = before.zip(moved()).map(|(before, now)| now - before);
    drop_from_cache(&path);
    let counted = moved.is_some_and(|moved| moved >= LEN as u64 / 2);
    if !counted {
        println!("skipped: {moved:?} bytes were counted where {LEN} were read");
    }
    counted.then_some(path)
}

/// Reads the whole file by a loader; gives the reported origin of its bytes.
fn run(path: &Path, mode: Mode, direct: Direct, epochs: u64) -> Origin {
    let builder = Loader::builder(records(path, RECORD))
        .order(Order::shuffled(1))
        .batch_size(16);
    let loader = builder
        .tuning(|t| t.reader(mode).direct(direct))
        .build()
        .unwrap();
    let rows: usize = (0..epochs)
        .map(|epoch| pull(&loader, epoch).unwrap().len())
        .sum();
    assert_eq!(rows, epochs as usize * LEN / RECORD);
    let report = loader.report();
    assert_eq!(report.origin.delivered, epochs * LEN as u64);
    assert!(
        report
            .to_string()
            .contains(&format!("\nbytes     {}\n", report.origin)),
        "{report}"
    );
    report.origin
}

#[test]
fn a_cold_run_reads_the_device_and_a_warm_run_memory() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let Some(path) = cold(&dir) else { return };
    for (mode, direct) in [
        (Mode::Pread, Direct::On),
        (Mode::Uring, Direct::On),
        (Mode::Pread, Direct::Off),
    ] {
        if mode == Mode::Uring
            && Loader::builder(records(&path, RECORD))
                .tuning(|t| t.reader(mode))
                .build()
                .is_err()
        {
            println!("skipped: no io_uring here");
            continue;
        }
        drop_from_cache(&path);
        let origin = run(&path, mode, direct, 1);
        assert!(
            origin.from_memory().unwrap() < 0.05,
            "{mode:?} {direct:?}: {origin}"
        );
    }
    std::fs::read(&path).unwrap();
    let origin = run(&path, Mode::Auto, Direct::Off, 1);
    assert!(origin.from_memory().unwrap() > 0.95, "{origin}");
    // Past the page cache again, though the file is in it.
    let origin = run(&path, Mode::Pread, Direct::On, 1);
    assert!(origin.from_memory().unwrap() < 0.05, "{origin}");
}

#[test]
fn later_epochs_of_a_cold_run_come_from_the_page_cache() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let Some(path) = cold(&dir) else { return };
    let origin = run(&path, Mode::Pread, Direct::Off, 4);
    assert!(
        (0.6..0.8).contains(&origin.from_memory().unwrap()),
        "{origin}"
    );
}

#[test]
fn every_sample_is_counted_once() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let (path, _) = records_file(&dir, 640, 4096);
    for (mode, direct) in readers() {
        for labels in [false, true] {
            let mut records = Records::builder(4096);
            if labels {
                records = records.classes((0..640).collect());
            }
            let builder = Loader::builder(records.open(&path).unwrap())
                .batch_size(16)
                .tuning(|t| t.reader(mode).direct(direct));
            // Without O_DIRECT there is nothing to count.
            let Ok(loader) = builder.build() else {
                continue;
            };
            assert_eq!(loader.epoch(0).unwrap().map(Result::unwrap).count(), 40);
            let whole = loader.snapshot();
            let counted = whole.decode.samples + whole.storage.in_place;
            // Reads before the first batch are not in the steady time.
            assert!(counted <= 640, "{mode:?} {direct:?}: {counted}");
            let told = loader.report().verdict.to_string();
            let ready = 640 - (loader.plan().term(MemoryTerm::SLOTS).count as u64 + 1) * 16;
            assert!(
                counted >= ready,
                "{mode:?} {direct:?} {labels}: {counted} of at least {ready}; {told}"
            );
        }
    }
}
