//! Where bytes really come from, on real files: what is said against what was done to the page cache. Each test is a process of its own,
//! since the kernel counts the whole process.

use crate::common::{Dir, alone, here, noise, pull, readers, records, records_file};
use feedline::dataset::Records;
use feedline::profile::{Basis, DeviceBytes, Evidence, Truth, judge};
use feedline::storage::{Direct, Mode, PROBES_MAX, Sources, device_bytes, page_cache_share};
use feedline::{Loader, Order};
use rustix::fs::Advice;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const LEN: usize = 64 << 20;
const RECORD: usize = 128 << 10;

/// Takes the file out of the page cache, as far as the file system allows it.
fn drop_from_cache(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
}

fn cached(path: &Path) -> Result<f64, String> {
    let mut sources = Sources::new();
    sources.file(path, LEN as u64).unwrap();
    page_cache_share(&sources, PROBES_MAX).map(|cached| cached.share)
}

/// A file of 64 MiB that is not cached; `None`, with the reason, where that cannot be had.
fn cold(dir: &Dir) -> Option<std::path::PathBuf> {
    let path = dir.write("data.bin", &noise(LEN, 1));
    drop_from_cache(&path);
    match cached(&path) {
        Ok(share) if share < 0.02 => Some(path),
        Ok(share) => {
            println!("skipped: after it was dropped {share:.2} of the file is cached (tmpfs, overlayfs?)");
            None
        }
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

/// Whether the kernel counts what devices read here: not for every file system, not in every container.
fn counts(path: &Path) -> bool {
    let Ok(before) = device_bytes() else {
        println!("skipped: {:?}", device_bytes());
        return false;
    };
    std::fs::read(path).unwrap();
    let moved = device_bytes().unwrap().since(&before).read_bytes;
    drop_from_cache(path);
    if moved < LEN as u64 / 2 {
        println!("skipped: {moved} bytes were counted where {LEN} were read");
    }
    moved >= LEN as u64 / 2
}

#[test]
fn the_share_of_a_file_in_the_page_cache_follows_what_is_read_and_dropped() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let Some(path) = cold(&dir) else { return };
    let file = File::open(&path).unwrap();
    // Without read-ahead, which goes on behind the half.
    rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
    file.read_exact_at(&mut vec![0; LEN / 2], 0).unwrap();
    let share = cached(&path).unwrap();
    assert!((0.49..0.52).contains(&share), "{share} after half was read");
    assert_eq!(cached(&path).unwrap(), share, "looking changed it");
    std::fs::read(&path).unwrap();
    assert!(cached(&path).unwrap() > 0.98);
    drop_from_cache(&path);
    assert!(cached(&path).unwrap() < 0.02);
}

/// Reads the whole file by a loader, and what is to be said about that.
fn run(path: &Path, mode: Mode, direct: Direct, epochs: u64) -> (Truth, DeviceBytes) {
    let builder = Loader::builder(records(path, RECORD)).order(Order::shuffled(1)).batch_size(16);
    let loader = builder.reader(mode).direct(direct).build().unwrap();
    let mut sources = Sources::new();
    sources.file(path, LEN as u64).unwrap();
    let mut evidence = Evidence::default();
    evidence.before = page_cache_share(&sources, PROBES_MAX);
    let before = device_bytes().unwrap();
    let rows: usize = (0..epochs).map(|epoch| pull(&loader, epoch).unwrap().len()).sum();
    assert_eq!(rows, epochs as usize * LEN / RECORD);
    let moved = device_bytes().unwrap().since(&before);
    let reads = loader.report().reads;
    evidence.moved = Ok(moved);
    evidence.delivered = epochs * LEN as u64;
    evidence.direct = if reads.buffered_reads == 0 { reads.bytes_asked } else { 0 };
    evidence.copied = evidence.delivered - reads.bytes_asked.min(evidence.delivered);
    evidence.direct_asked = direct == Direct::On;
    evidence.refused = reads.fallbacks;
    let truth = judge(&evidence);
    // The loader says the same of itself, but for what its index read before.
    let own = loader.truth();
    assert_eq!(own.basis, truth.basis);
    assert!((own.from_device.unwrap() - truth.from_device.unwrap()).abs() < 0.02, "{own}, not {truth}");
    (truth, moved)
}

#[test]
fn a_cold_run_is_of_the_device_and_a_warm_one_of_memory() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let Some(path) = cold(&dir) else { return };
    if !counts(&path) {
        return;
    }
    for (mode, direct) in [(Mode::Pread, Direct::On), (Mode::Uring, Direct::On), (Mode::Pread, Direct::Off)] {
        if mode == Mode::Uring && Loader::builder(records(&path, RECORD)).reader(mode).build().is_err() {
            println!("skipped: no io_uring here");
            continue;
        }
        drop_from_cache(&path);
        let (truth, moved) = run(&path, mode, direct, 1);
        let said = format!("{mode:?} {direct:?}: {truth} {moved:?}");
        assert_eq!(truth.basis, Basis::Counted, "{said}");
        assert!(truth.from_device.unwrap() > 0.95 && truth.warnings.iter().all(|w| w.contains("read-ahead")), "{said}");
    }
    std::fs::read(&path).unwrap();
    let (truth, moved) = run(&path, Mode::Auto, Direct::Off, 1);
    assert!(truth.from_cache.unwrap() > 0.95, "{truth} {moved:?}");
    assert!(truth.warnings[0].starts_with("this measured the page cache"), "{truth}");
    // Past the page cache again, though the file is in it.
    let (truth, moved) = run(&path, Mode::Pread, Direct::On, 1);
    assert!(truth.from_device.unwrap() > 0.95, "{truth} {moved:?}");
}

#[test]
fn a_cold_run_of_several_epochs_through_the_page_cache_is_mostly_of_memory() {
    if !alone(&here!()) {
        return;
    }
    let dir = Dir::new();
    let Some(path) = cold(&dir) else { return };
    if !counts(&path) {
        return;
    }
    let (truth, moved) = run(&path, Mode::Pread, Direct::Off, 4);
    assert!((0.2..0.4).contains(&truth.from_device.unwrap()), "{truth} {moved:?}");
    assert!(truth.warnings[0].contains("read more than once"), "{truth}");
}

#[test]
fn every_sample_is_counted_once_whoever_made_it_ready() {
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
            let builder = Loader::builder(records.open(&path).unwrap()).batch_size(16).reader(mode).direct(direct);
            // Where O_DIRECT is not to be had there is nothing to count.
            let Ok(loader) = builder.build() else { continue };
            assert_eq!(loader.epoch(0).unwrap().map(Result::unwrap).count(), 40);
            let whole = loader.snapshot();
            let counted = whole.decode.samples + whole.storage.in_place;
            // Those of before the first batch are not in the steady time.
            assert!(counted <= 640, "{mode:?} {direct:?}: {counted}");
            let told = loader.report().verdict.to_string();
            let ready = 640 - (loader.plan().slots as u64 + 1) * 16;
            assert!(counted >= ready, "{mode:?} {direct:?} {labels}: {counted} of at least {ready}; {told}");
        }
    }
}
