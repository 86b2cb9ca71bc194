//! What the page cache holds of a dataset's files, and what the kernel counts for this process: the evidence for
//! [`profile::judge`](crate::profile::judge).
//!
//! ```text
//! all bytes ──cut into at most 256 equal parts──► a window of up to 4 MiB in each ──► cachestat │ mincore │ RWF_NOWAIT
//! ```
//!
//! Limits: one open and one or two system calls per window; a share of a large dataset is a sample, good to some 3 % (one
//! standard deviation at most) where whole files are cached or not. Files of up to 1 GiB together are looked at whole.
//!
//! The best way that works is used; what is refused once is not tried again. Traps, all of them seen:
//! * `cachestat` says that nothing of a file on overlayfs (a container's own files) is cached, whatever is.
//! * `mincore` says that everything is, of files that the process neither owns nor may write.
//! * `RWF_NOWAIT` brings what it misses into the cache: one byte is read, and read-ahead is off.
//! * ZFS has a cache of its own, which nobody here can see.

use super::files::{OPEN_FLAGS, open, with_path};
use super::{SourceId, Sources, sys};
use crate::meter::{CacheProbe, Cached, DeviceBytes};
use crate::order::Draws;
use memmap2::MmapOptions;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Access, Advice, AtFlags, CWD, FileType};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::io::IoSliceMut;

/// Places of a dataset that are looked at, at most.
pub const PROBES_MAX: u32 = 256;

/// Bytes that are looked at in one place, at most.
const WINDOW: u64 = 4 << 20;

/// File systems by `statfs`.
const OVERLAYFS: u64 = 0x794c_7630;
const ZFS: u64 = 0x2fc1_2fc1;

/// How much of the files of these sources the page cache holds, without changing that (but for `RWF_NOWAIT`, which brings
/// in a page for each miss). At most `probes_max` places are looked at, and [`PROBES_MAX`].
///
/// Errors: why it is not known, in words.
pub fn page_cache_share(sources: &Sources, probes_max: u32) -> Result<Cached, String> {
    share_from(CacheProbe::Cachestat, sources, probes_max)
}

/// What the kernel counted for this process so far, all its threads together.
///
/// Errors: why it is not known, in words: some containers and kernels have no `/proc/self/io`.
pub fn device_bytes() -> Result<DeviceBytes, String> {
    let path = "/proc/self/io";
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    DeviceBytes::parse(&text)
}

/// A place to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    source: SourceId,
    /// A multiple of the page size.
    offset: u64,
    len: u64,
}

/// Why a window gave no answer.
enum Miss {
    /// This way is refused: another one may work.
    Refused(String),
    /// This file cannot be looked at.
    Failed(String),
}

/// The share, by that way or one behind it.
fn share_from(best: CacheProbe, sources: &Sources, probes_max: u32) -> Result<Cached, String> {
    let page = rustix::param::page_size() as u64;
    let windows = windows(sources, probes_max.min(PROBES_MAX), page);
    let mut how = best;
    let (mut sum, mut probes, mut why) = (0.0, 0, None);
    for window in windows {
        match look(sources, window, page, &mut how) {
            Ok(share) => {
                sum += share;
                probes += 1;
            }
            Err(Miss::Refused(words) | Miss::Failed(words)) => why = why.or(Some(words)),
        }
    }
    match (probes, why) {
        (0, Some(why)) => Err(why),
        (0, None) => Err("no bytes of files".into()),
        _ => Ok(Cached::new(sum / f64::from(probes), probes, how)),
    }
}

/// One in each of at most `count` equal parts of all bytes of files, at a place that depends on the part alone.
fn windows(sources: &Sources, count: u32, page: u64) -> Vec<Window> {
    let len_of = |id: SourceId| if sources.bytes_of(id).is_some() { 0 } else { sources.len_of(id) };
    let total = sources.ids().map(len_of).fold(0_u64, u64::saturating_add);
    let count = u64::from(count).min(total.div_ceil(page));
    if count == 0 {
        return Vec::new();
    }
    // Multiplied wide: the product of any two numbers of 64 bits fits.
    let part = |index: u64| (u128::from(total) * u128::from(index) / u128::from(count)) as u64;
    let place = |index: u64| {
        let (start, end) = (part(index), part(index + 1));
        let room = (end - start).saturating_sub(WINDOW);
        (start + Draws::new(0, 0, index, "page cache").below(room + 1), (end - start).min(WINDOW))
    };
    let mut places = (0..count).map(place).peekable();
    let mut windows = Vec::with_capacity(count as usize);
    let mut before = 0_u64;
    for id in sources.ids() {
        let len = len_of(id);
        while let Some((at, room)) = places.next_if(|(at, _)| *at - before < len) {
            let offset = (at - before) / page * page;
            windows.push(Window { source: id, offset, len: room.min(len - offset) });
        }
        before = before.saturating_add(len);
    }
    windows
}

/// The share of one window that is cached. What is refused moves `how` on to the next way, for all windows to come.
fn look(sources: &Sources, window: Window, page: u64, how: &mut CacheProbe) -> Result<f64, Miss> {
    let failed = |errno: Errno| Miss::Failed(format!("{}: {errno}", sources.path(window.source).display()));
    let file = open(sources, window.source, OPEN_FLAGS).map_err(failed)?;
    let stat = rustix::fs::fstat(&file).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Miss::Failed(format!("{} is no file", sources.path(window.source).display())));
    }
    let kind = rustix::fs::fstatfs(&file).map_or(0, |fs| fs.f_type as u64);
    if kind == ZFS {
        return Err(Miss::Failed("ZFS keeps a cache of its own, which cannot be looked into".into()));
    }
    if kind == OVERLAYFS && *how == CacheProbe::Cachestat {
        *how = CacheProbe::Mincore;
    }
    loop {
        let answer = match how {
            CacheProbe::Cachestat => by_cachestat(&file, window, page),
            CacheProbe::Mincore if !tells_the_truth(sources, window.source, stat.st_uid) => {
                Err(Miss::Refused("mincore does not tell of files of others".into()))
            }
            CacheProbe::Mincore => by_mincore(&file, window, page),
            CacheProbe::Nowait => return by_nowait(&file, window, page).map_err(|miss| at_file(miss, sources, window)),
        };
        match answer {
            Err(Miss::Refused(_)) if *how == CacheProbe::Cachestat => *how = CacheProbe::Mincore,
            Err(Miss::Refused(_)) => *how = CacheProbe::Nowait,
            answer => return answer.map_err(|miss| at_file(miss, sources, window)),
        }
    }
}

fn at_file(miss: Miss, sources: &Sources, window: Window) -> Miss {
    let (Miss::Refused(words) | Miss::Failed(words)) = miss;
    Miss::Failed(format!("{}: {words}", sources.path(window.source).display()))
}

/// Pages that a window touches; it starts at one.
fn pages(window: Window, page: u64) -> u64 {
    window.len.div_ceil(page).max(1)
}

fn by_cachestat(file: &OwnedFd, window: Window, page: u64) -> Result<f64, Miss> {
    let cached = sys::cached_pages(file.as_fd(), window.offset, window.len);
    let cached = cached.map_err(|error| Miss::Refused(format!("cachestat: {error}")))?;
    Ok(cached.min(pages(window, page)) as f64 / pages(window, page) as f64)
}

/// The owner of a file, and who may write it, are told what of it is cached; others that all of it is.
fn tells_the_truth(sources: &Sources, id: SourceId, owner: u32) -> bool {
    let writable =
        || with_path(sources, id, |path| rustix::fs::accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)).is_ok();
    rustix::process::geteuid().as_raw() == owner || writable()
}

fn by_mincore(file: &OwnedFd, window: Window, page: u64) -> Result<f64, Miss> {
    let refused = |error: std::io::Error| Miss::Refused(format!("mincore: {error}"));
    let map = MmapOptions::new().offset(window.offset).len(window.len as usize).map_raw_read_only(&file.as_fd());
    let cached = sys::resident_pages(&map.map_err(refused)?).map_err(refused)?;
    Ok(cached as f64 / pages(window, page) as f64)
}

/// Whether the page in the middle is cached.
fn by_nowait(file: &OwnedFd, window: Window, page: u64) -> Result<f64, Miss> {
    // A miss shall bring in one page and not those behind it, too.
    let _ = rustix::fs::fadvise(file, 0, None, Advice::Random);
    let middle = window.offset + pages(window, page) / 2 * page;
    let at = if middle < window.offset + window.len { middle } else { window.offset };
    let mut byte = [0];
    loop {
        return match preadv2(file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT) {
            Ok(0) => Err(Miss::Failed("shorter than it was".into())),
            Ok(_) => Ok(1.0),
            Err(Errno::AGAIN) => Ok(0.0),
            Err(Errno::INTR) => continue,
            Err(errno) => Err(Miss::Refused(format!("reading without waiting: {errno}"))),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::FileExt;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU64, Ordering};

    const PAGE: u64 = 4096;

    fn sources(lens: &[u64]) -> Sources {
        let mut sources = Sources::new();
        for (index, len) in lens.iter().enumerate() {
            sources.file(format!("/data/{index}"), *len).unwrap();
        }
        sources
    }

    /// A file of so many pages below the target folder, removed at the end.
    struct File(PathBuf);

    impl File {
        fn new(pages: usize) -> Self {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let folder = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("tmp");
            std::fs::create_dir_all(&folder).unwrap();
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let file = Self(folder.join(format!("truth-{}-{number}", std::process::id())));
            std::fs::write(&file.0, vec![7; pages * rustix::param::page_size()]).unwrap();
            file
        }

        /// Makes that nothing of it is cached; false where that cannot be had.
        fn dropped(&self) -> bool {
            let file = std::fs::File::open(&self.0).unwrap();
            let _ = file.sync_all();
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).is_ok()
        }

        /// Brings these pages in, and no others.
        fn read(&self, pages: std::ops::Range<u64>) {
            let file = std::fs::File::open(&self.0).unwrap();
            rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
            let page = rustix::param::page_size() as u64;
            pages.for_each(|index| assert_eq!(file.read_at(&mut [0], index * page).unwrap(), 1));
        }

        fn sources(&self) -> Sources {
            let mut sources = Sources::new();
            sources.file(&self.0, std::fs::metadata(&self.0).unwrap().len()).unwrap();
            sources
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    /// A file of 64 pages of which the first are cached, or why there is none here.
    fn cached_file(pages: u64) -> Result<File, String> {
        let file = File::new(64);
        if !file.dropped() {
            return Err("the cache cannot be dropped".into());
        }
        let left = share_from(CacheProbe::Mincore, &file.sources(), PROBES_MAX)?;
        if left.how == CacheProbe::Nowait || left.share > 0.0 {
            return Err(format!("{left} after it was dropped"));
        }
        file.read(0..pages);
        Ok(file)
    }

    /// What a way says of a file of which these pages were read; or why there is no answer here.
    fn seen(how: CacheProbe, pages: u64) -> Result<Cached, String> {
        let file = cached_file(pages)?;
        // The last way brings in what it misses: one look.
        let looks = if how == CacheProbe::Nowait { 1 } else { 3 };
        let mut looks = (0..looks).map(|_| share_from(how, &file.sources(), PROBES_MAX));
        let first = looks.next().unwrap()?;
        assert!(looks.all(|look| look.as_ref() == Ok(&first)), "{how}: looking changed what there is");
        if first.how == how { Ok(first) } else { Err(format!("{how} is refused here: {first}")) }
    }

    #[test]
    fn every_way_sees_what_is_cached() {
        for how in [CacheProbe::Cachestat, CacheProbe::Mincore, CacheProbe::Nowait] {
            for (pages, expected) in [(0, 0.0), (32, 0.5), (64, 1.0)] {
                // The cache is the whole machine's, and what was read may come and go by itself: once in some hundred runs.
                let mut tries = (0..10).map(|_| seen(how, pages).map(|cached| (cached.share, cached.probes)));
                match tries.find(|seen| seen.is_err() || *seen == Ok((expected, 64))) {
                    Some(Ok(_)) => {}
                    Some(Err(why)) => return println!("skipped: {why}"),
                    None => panic!("{how}: ten times not {expected} of 64 pages: {:?}", seen(how, pages)),
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_looked_at_is_said_with_its_path() {
        let page = PAGE;
        let error = page_cache_share(&sources(&[3 * page]), 4).unwrap_err();
        assert!(error.contains("/data/0"), "{error}");
        let mut folder = Sources::new();
        folder.file(Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), 3 * page).unwrap();
        assert!(page_cache_share(&folder, 4).unwrap_err().contains("is no file"));
        let mut memory = Sources::new();
        memory.memory(vec![0; 100].into());
        assert!(page_cache_share(&memory, 4).unwrap_err().contains("no bytes of files"));
        let file = File::new(1);
        assert!(page_cache_share(&file.sources(), 0).is_err());
    }

    #[test]
    fn a_file_that_is_gone_does_not_hide_the_others() {
        let file = File::new(4);
        file.read(0..4);
        let mut sources = file.sources();
        sources.file("/data/gone", 4 * rustix::param::page_size() as u64).unwrap();
        match page_cache_share(&sources, PROBES_MAX) {
            Ok(cached) => assert_eq!((cached.share, cached.probes), (1.0, 4)),
            Err(why) => assert!(!why.is_empty(), "skipped: nothing can be told here: {why}"),
        }
    }

    #[test]
    fn a_small_dataset_is_looked_at_whole() {
        let whole =
            |lens: &[u64]| windows(&sources(lens), PROBES_MAX, PAGE).iter().map(|window| window.len).sum::<u64>();
        assert_eq!(whole(&[64 << 20]), 64 << 20);
        assert_eq!(whole(&[1 << 30]), 1 << 30);
        assert_eq!(whole(&[1]), 1);
        assert_eq!(whole(&[0, 0]), 0);
        assert_eq!(whole(&[]), 0);
    }

    #[test]
    fn numbers_at_the_edge_do_not_overflow() {
        for lens in [&[u64::MAX][..], &[u64::MAX, u64::MAX], &[1, u64::MAX, 1]] {
            let windows = windows(&sources(lens), PROBES_MAX, PAGE);
            assert!(!windows.is_empty() && windows.len() <= PROBES_MAX as usize);
            assert!(windows.iter().all(|window| window.offset.checked_add(window.len).is_some()));
        }
    }

    #[test]
    fn the_kernels_count_of_this_process_can_be_read_or_says_why_not() {
        match device_bytes() {
            Ok(before) => {
                let path = File::new(4);
                std::fs::read(&path.0).unwrap();
                let since = device_bytes().unwrap().since(&before);
                assert!(since.rchar >= 4 * rustix::param::page_size() as u64, "{since:?}");
            }
            Err(why) => assert!(why.contains("/proc/self/io") || why.contains("does not count"), "{why}"),
        }
    }

    proptest! {
        #[test]
        fn windows_lie_in_their_files_in_order_and_spread_over_the_bytes(
            lens in proptest::collection::vec(prop_oneof![0_u64..20_000, 0_u64..1 << 36], 1..40), count in 1_u32..300,
        ) {
            let sources = sources(&lens);
            let windows = windows(&sources, count, PAGE);
            let total: u64 = lens.iter().sum();
            let expected = u64::from(count).min(total.div_ceil(PAGE));
            prop_assert_eq!(windows.len() as u64, expected);
            let before = |id: SourceId| lens[..id.index()].iter().sum::<u64>();
            for (index, window) in windows.iter().enumerate() {
                prop_assert!(window.len > 0 && window.len <= WINDOW && window.offset % PAGE == 0);
                prop_assert!(window.offset + window.len <= lens[window.source.index()]);
                // In its own part, but for the start of its page.
                let part = |index: u64| (u128::from(total) * u128::from(index) / u128::from(expected)) as u64;
                let at = before(window.source) + window.offset;
                prop_assert!(at + PAGE > part(index as u64) && at < part(index as u64 + 1));
            }
        }

        #[test]
        fn the_share_of_a_large_dataset_is_met_by_its_sample(
            cached in proptest::collection::vec(any::<bool>(), 400), len in (64_u64 << 20)..(1 << 30),
        ) {
            // Whole files are cached or not: the mean over the windows against the truth.
            let sources = sources(&vec![len; cached.len()]);
            let windows = windows(&sources, PROBES_MAX, PAGE);
            let hits = windows.iter().filter(|window| cached[window.source.index()]).count();
            let truth = cached.iter().filter(|cached| **cached).count() as f64 / cached.len() as f64;
            let share = hits as f64 / windows.len() as f64;
            // Four standard deviations of an unstratified sample.
            prop_assert!((share - truth).abs() < 4.0 * (0.25 / windows.len() as f64).sqrt(), "{share} for {truth}");
        }
    }
}
