//! One table of cases and one naive oracle (`std::fs::read`) for every reader, with the known
//! hazards of readers. Files lie under `CARGO_TARGET_TMPDIR`, since tmpfs does not test alignment.

use crate::common::{DEADLINE, alone, answer, assert_says, here, must_fail, must_say, until};
use feedline::ErrorKind;
use feedline::profile::snapshot::ReaderKind;
use feedline::storage::{Direct, Extent, Mode, SourceId, Sources};
use feedline::unstable::{
    ByteRing, Cached, Completion, DEPTH_MAX, Opened, PageCache, ReadOp, Reader, ReaderOptions,
    leaked, open,
};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A folder of a test, removed afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("readers-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// A file of `len` bytes that no shifted or repeated read can imitate.
    fn file(&self, name: &str, len: usize) -> PathBuf {
        let path = self.0.join(name);
        let mut state = len as u64 ^ 0x9e37_79b9_7f4a_7c15;
        let bytes: Vec<u8> = (0..len).map(|_| random(&mut state) as u8).collect();
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// xorshift64.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed | 1;
    for index in (1..items.len()).rev() {
        items.swap(index, (random(&mut state) % (index as u64 + 1)) as usize);
    }
}

fn sources(paths: &[PathBuf]) -> Arc<Sources> {
    let mut sources = Sources::new();
    for path in paths {
        sources
            .file(path, std::fs::metadata(path).unwrap().len())
            .unwrap();
    }
    Arc::new(sources)
}

fn id(sources: &Sources, index: usize) -> SourceId {
    sources.ids().nth(index).unwrap()
}

fn extent_of(source: SourceId, offset: u64, len: u64) -> Extent {
    Extent {
        source,
        offset,
        len,
    }
}

/// The first extents of a source, each of `len` bytes.
fn pieces(source: SourceId, count: u64, len: u64) -> Vec<Extent> {
    (0..count)
        .map(|index| extent_of(source, index * len, len))
        .collect()
}

fn options_of(mode: Mode, direct: Direct) -> ReaderOptions {
    let mut options = ReaderOptions::default();
    options.mode = mode;
    options.direct = direct;
    options
}

/// Every implementation, with and without the page cache, with files kept open and opened for each
/// read.
fn all_readers() -> Vec<(String, ReaderOptions)> {
    let mut all = Vec::new();
    for mode in [Mode::Uring, Mode::Pread, Mode::Mmap] {
        for direct in [Direct::Off, Direct::On] {
            if mode == Mode::Mmap && direct == Direct::On {
                continue;
            }
            for fds in [None, Some(0)] {
                let mut options = options_of(mode, direct);
                options.fds = fds;
                all.push((format!("{mode:?} direct {direct:?} fds {fds:?}"), options));
            }
        }
    }
    all
}

/// Opens a reader; `None`, with a note on standard error, if the machine lacks that kind.
fn try_open(name: &str, sources: &Arc<Sources>, options: &ReaderOptions) -> Option<Opened> {
    match open(sources.clone(), options) {
        Ok(opened) => Some(opened),
        Err(error)
            if error.message().contains("setup refused")
                || error.message().contains("O_DIRECT") =>
        {
            eprintln!("skipped: {name}: {error}");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Every reader that the machine has, opened when its turn comes.
fn each_reader(sources: &Arc<Sources>) -> impl Iterator<Item = (String, Opened)> {
    all_readers()
        .into_iter()
        .filter_map(move |(name, options)| {
            let opened = try_open(&name, sources, &options)?;
            Some((name, opened))
        })
}

/// Submits extents that the reader and the ring have room for, numbered from 0.
fn submit_all(reader: &mut dyn Reader, ring: &ByteRing, extents: &[Extent]) {
    for (tag, extent) in (0..).zip(extents.iter().copied()) {
        let buf = ring
            .reserve(reader.footprint(&extent).bytes)
            .unwrap()
            .into();
        assert!(reader.submit(ReadOp { tag, extent, buf }).is_ok());
    }
}

type Outcome = Result<Vec<u8>, feedline::Error>;

/// Reads all extents at the reader's full depth, in the order given; the results are in that order
/// too.
fn read_all(reader: &mut dyn Reader, ring: &ByteRing, extents: &[Extent]) -> Vec<Outcome> {
    let mut results: HashMap<u64, Outcome> = HashMap::new();
    let mut next = 0;
    let mut out = Vec::new();
    let started = Instant::now();
    while results.len() < extents.len() {
        assert!(
            started.elapsed() < DEADLINE,
            "{} of {} reads completed",
            results.len(),
            extents.len()
        );
        while let Some(extent) = extents.get(next) {
            let bytes = reader.footprint(extent).bytes;
            let Some(span) = ring.reserve(bytes) else {
                break;
            };
            let op = ReadOp {
                tag: next as u64,
                extent: *extent,
                buf: span.into(),
            };
            if reader.submit(op).is_err() {
                break;
            }
            next += 1;
        }
        reader.wait(&mut out, Some(Duration::from_secs(10)));
        for completion in out.drain(..) {
            let tag = completion.tag;
            let len = extents[tag as usize].len as usize;
            let before = results.insert(tag, outcome(completion, len));
            assert!(before.is_none(), "completed twice");
        }
    }
    assert_eq!(reader.in_flight(), 0);
    (0..extents.len() as u64)
        .map(|tag| results.remove(&tag).unwrap())
        .collect()
}

fn read_one(reader: &mut dyn Reader, ring: &ByteRing, extent: Extent) -> Outcome {
    read_all(reader, ring, &[extent]).remove(0)
}

fn outcome(completion: Completion, len: usize) -> Outcome {
    let Completion {
        mut buf, result, ..
    } = completion;
    result.map(|start| buf.as_mut_slice()[start..start + len].to_vec())
}

fn ring(bytes: usize) -> ByteRing {
    ByteRing::new(bytes, DEPTH_MAX as usize, || {}).unwrap()
}

/// Offsets and lengths around every boundary of a file of `len` bytes.
fn cases(source: SourceId, len: u64) -> Vec<Extent> {
    let mut edges = vec![
        0,
        1,
        511,
        512,
        513,
        4095,
        4096,
        4097,
        8192,
        65_536,
        150_528,
        len / 2,
    ];
    edges.extend([1, 2, 511, 512, 513, 4096, 4097].map(|back| len.saturating_sub(back)));
    edges.push(len);
    edges.retain(|edge| *edge <= len);
    edges.sort_unstable();
    edges.dedup();
    let mut cases = Vec::new();
    for start in &edges {
        let ends = edges.iter().filter(|end| *end >= start);
        cases.extend(ends.map(|end| extent_of(source, *start, end - start)));
    }
    cases
}

#[test]
fn every_reader_returns_what_a_naive_read_returns() {
    let scratch = Scratch::new("conformance");
    let lens = [0, 1, 511, 512, 513, 4095, 4096, 4097, 70_000, (1 << 20) + 7];
    let paths: Vec<_> = lens
        .iter()
        .map(|len| scratch.file(&len.to_string(), *len))
        .collect();
    let sources = sources(&paths);
    let oracle: Vec<_> = paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect();
    let mut extents: Vec<_> = sources
        .ids()
        .flat_map(|id| cases(id, sources.len_of(id)))
        .collect();
    let ring = ring(16 << 20);
    for (name, options) in all_readers() {
        for depth in [1, 4, 64] {
            let mut options = options.clone();
            options.depth = Some(depth);
            let Some(mut opened) = try_open(&name, &sources, &options) else {
                continue;
            };
            if depth == 64 {
                opened.reader.register_ring(&ring);
            }
            shuffle(&mut extents, u64::from(depth));
            let results = read_all(&mut *opened.reader, &ring, &extents);
            for (extent, result) in extents.iter().zip(results) {
                let bytes = result.unwrap_or_else(|error| panic!("{name} depth {depth}: {error}"));
                let range = extent.offset as usize..(extent.offset + extent.len) as usize;
                let right = &oracle[extent.source.index()][range];
                assert!(bytes == right, "{name} depth {depth}: {extent:?}");
            }
            let stats = opened.reader.stats();
            let bytes: u64 = extents.iter().map(|extent| extent.len).sum();
            let found = (stats.ops, stats.failed, stats.bytes_asked);
            assert_eq!(found, (extents.len() as u64, 0, bytes), "{name}");
            assert!(stats.bytes_moved >= stats.bytes_asked, "{name}: {stats:?}");
            let is_direct = options.direct == Direct::On;
            assert_eq!(stats.direct_reads > 0, is_direct, "{name}: {stats:?}");
        }
    }
}

#[test]
fn the_page_cache_has_what_was_just_read() {
    let scratch = Scratch::new("cache");
    let path = scratch.file("a", 300_000);
    let sources = sources(std::slice::from_ref(&path));
    let bytes = std::fs::read(&path).unwrap();
    for fds in [None, Some(0)] {
        let cache = PageCache::new(sources.clone(), fds);
        for extent in cases(id(&sources, 0), 300_000) {
            let mut dst = vec![0; extent.len as usize];
            match cache.try_read(&extent, &mut dst) {
                Cached::Hit => {
                    let right = &bytes[extent.offset as usize..][..dst.len()];
                    assert!(dst == right, "{extent:?}");
                }
                // Memory may be short, so mostly hits are enough.
                Cached::Miss => {}
                Cached::Failed(error) => panic!("{error}"),
            }
        }
        if cache.refused().is_none() {
            let hits = cache.hits();
            let misses = cache.misses();
            assert!(hits > misses, "{hits} hits, {misses} misses");
        }
    }
}

#[test]
fn only_the_first_miss_of_a_cold_file_starts_a_read() {
    let scratch = Scratch::new("cold");
    let path = scratch.file("a", 64 << 20);
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let sources = sources(&[path]);
    let cache = PageCache::new(sources.clone(), None);
    let mut dst = vec![0; 4096];
    let mut look = |index: u64| {
        let extent = extent_of(id(&sources, 0), index << 20, 4096);
        cache.try_read(&extent, &mut dst)
    };
    for index in 0..64 {
        assert!(matches!(look(index), Cached::Miss), "read {index}");
    }
    // Had each miss started a read, all of these would be hits by now.
    std::thread::sleep(Duration::from_millis(300));
    let hits = (0..64)
        .filter(|index| matches!(look(*index), Cached::Hit))
        .count();
    assert!(hits <= 2, "{hits} misses started a read");
}

#[test]
fn memory_sources_are_copied_by_every_reader() {
    let mut table = Sources::new();
    let source = table.memory((0..=255).collect());
    let sources = Arc::new(table);
    let extent = extent_of(source, 10, 20);
    let expected: Vec<u8> = (10..30).collect();
    let ring = ring(1 << 20);
    for (name, mut opened) in each_reader(&sources) {
        let found = read_one(&mut *opened.reader, &ring, extent).unwrap();
        assert_eq!(found, expected, "{name}");
    }
    let mut dst = [0; 20];
    let cached = PageCache::new(sources, None).try_read(&extent, &mut dst);
    assert!(matches!(cached, Cached::Hit));
    assert_eq!(dst[..], expected);
}

#[test]
fn offsets_beyond_2_and_4_gib_are_not_cut() {
    let scratch = Scratch::new("sparse");
    let path = scratch.0.join("sparse");
    let file = File::create(&path).unwrap();
    let marks = [
        (1_u64 << 31) - 100,
        (1 << 31) + 4096,
        (1 << 32) - 7,
        (1 << 32) + 512,
        (5 << 30) - 200,
    ];
    file.set_len(5 << 30).unwrap();
    for mark in marks {
        file.write_all_at(&mark.to_le_bytes(), mark).unwrap();
    }
    file.sync_all().unwrap();
    let sources = sources(&[path]);
    let extents = marks.map(|offset| extent_of(id(&sources, 0), offset, 200));
    let ring = ring(1 << 20);
    for (name, mut opened) in each_reader(&sources) {
        let results = read_all(&mut *opened.reader, &ring, &extents);
        for (mark, result) in marks.iter().zip(results) {
            let bytes = result.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(bytes[..8], mark.to_le_bytes(), "{name} at {mark}");
            assert!(bytes[8..].iter().all(|byte| *byte == 0), "{name} at {mark}");
        }
    }
}

#[test]
fn an_extent_larger_than_one_call_arrives_whole() {
    let scratch = Scratch::new("huge");
    let path = scratch.0.join("sparse");
    let file = File::create(&path).unwrap();
    let len = (1_u64 << 30) + (64 << 20);
    file.set_len(len).unwrap();
    file.write_all_at(b"x", (1 << 30) + 5).unwrap();
    let sources = sources(&[path]);
    let ring = ring(len as usize);
    let options = options_of(Mode::Uring, Direct::On);
    let Some(mut opened) = try_open("huge", &sources, &options) else {
        return;
    };
    if let Some(reason) = opened.reader.register_ring(&ring) {
        eprintln!("not registered: {reason}");
    }
    let extent = extent_of(id(&sources, 0), 0, len);
    let bytes = read_one(&mut *opened.reader, &ring, extent).unwrap();
    let mark = bytes.iter().position(|byte| *byte != 0);
    assert_eq!(mark, Some((1 << 30) + 5));
    assert_eq!(opened.reader.stats().short_reads, 0);
}

#[test]
fn files_over_the_descriptor_budget_are_opened_for_each_read() {
    let scratch = Scratch::new("many");
    let paths: Vec<_> = (0..500)
        .map(|index| scratch.file(&format!("{index}"), 100 + index))
        .collect();
    let sources = sources(&paths);
    let mut extents: Vec<_> = sources
        .ids()
        .map(|source| extent_of(source, 10, sources.len_of(source) - 10))
        .collect();
    let ring = ring(8 << 20);
    for (name, mut options) in all_readers() {
        if options.fds.is_none() {
            continue;
        }
        options.fds = Some(499);
        let Some(mut opened) = try_open(&name, &sources, &options) else {
            continue;
        };
        for round in 0..2 {
            shuffle(&mut extents, 77 + round);
            let results = read_all(&mut *opened.reader, &ring, &extents);
            for (extent, result) in extents.iter().zip(results) {
                let expected = std::fs::read(&paths[extent.source.index()]).unwrap();
                assert!(result.unwrap() == expected[10..], "{name} {extent:?}");
            }
        }
        assert_eq!(opened.reader.stats().opens, 1000, "{name}");
    }
}

type Change = fn(&Path);

/// Changes to a file after indexing, and the required error of a read.
const CHANGES: [(&str, ErrorKind, Change); 8] = [
    ("vanished", ErrorKind::NotFound, |path| {
        std::fs::remove_file(path).unwrap()
    }),
    ("cut before", ErrorKind::Changed, |path| set_len(path, 9)),
    ("grown", ErrorKind::Changed, |path| set_len(path, 9000)),
    ("fifo", ErrorKind::NotAFile, |path| {
        std::fs::remove_file(path).unwrap();
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }),
    ("folder", ErrorKind::NotAFile, |path| {
        std::fs::remove_file(path).unwrap();
        std::fs::create_dir(path).unwrap();
    }),
    ("socket", ErrorKind::NotAFile, |path| {
        std::fs::remove_file(path).unwrap();
        // A socket's path may have at most 107 bytes: bind it relative to its folder.
        let folder = File::open(path.parent().unwrap()).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&folder);
        let short = format!("/proc/self/fd/{fd}/{}", path.file_name().unwrap().display());
        drop(std::os::unix::net::UnixListener::bind(short).unwrap());
    }),
    ("symlink loop", ErrorKind::NotAFile, |path| {
        std::fs::remove_file(path).unwrap();
        symlink(path, path).unwrap();
    }),
    ("unreadable", ErrorKind::Permission, |path| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o0)).unwrap();
    }),
];

fn set_len(path: &Path, len: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(len).unwrap();
}

#[test]
fn an_unreadable_range_is_one_error_that_names_it() {
    let scratch = Scratch::new("errors");
    for (what, kind, change) in CHANGES {
        if what == "unreadable" && rustix::process::geteuid().is_root() {
            eprintln!("skipped: root reads everything");
            continue;
        }
        let paths = [scratch.file("good", 5000), scratch.file(what, 5000)];
        let sources = sources(&paths);
        change(&paths[1]);
        let extents = [0, 1, 0, 1].map(|source| extent_of(id(&sources, source), 100, 4000));
        for (name, mut opened) in each_reader(&sources) {
            let results = read_all(&mut *opened.reader, &ring(1 << 20), &extents);
            let neighbours = results[0].is_ok() && results[2].is_ok();
            assert!(neighbours, "{name}: a neighbour of {what} failed");
            for result in [&results[1], &results[3]] {
                let error = result.as_ref().unwrap_err();
                let site = error.site();
                let found = (error.kind(), &site.path, site.offset, site.len);
                let right = (kind, &Some(paths[1].clone()), Some(100), Some(4000));
                assert_eq!(found, right, "{name} {what}: {error}");
            }
            assert_eq!(opened.reader.stats().failed, 2, "{name} {what}");
        }
        for fds in [None, Some(0)] {
            match PageCache::new(sources.clone(), fds).try_read(&extents[1], &mut [0; 4000]) {
                Cached::Failed(error) => assert_eq!(error.kind(), kind, "{what}: {error}"),
                // Names outside the dentry cache are left to the reader.
                Cached::Miss => {}
                Cached::Hit => panic!("{what} was a hit"),
            }
        }
        let _ = std::fs::remove_file(&paths[1]).or_else(|_| std::fs::remove_dir(&paths[1]));
    }
}

#[test]
fn a_changed_file_names_both_lengths() {
    let scratch = Scratch::new("lengths");
    let path = scratch.file("a", 5000);
    let sources = sources(std::slice::from_ref(&path));
    set_len(&path, 123);
    for (name, mut opened) in each_reader(&sources) {
        let extent = extent_of(id(&sources, 0), 0, 10);
        let outcome = read_one(&mut *opened.reader, &ring(1 << 20), extent);
        let error = must_say(outcome, "123 bytes now, 5000 when it was indexed");
        assert_eq!(error.kind(), ErrorKind::Changed, "{name}");
    }
}

/// Truncated under an open descriptor, and under a map: in the middle of a page, where a map shows
/// zeros, and before the page, where a touch raises SIGBUS.
#[test]
fn a_file_cut_after_open_is_an_error_not_zeros_or_a_signal() {
    let scratch = Scratch::new("cut");
    let ring = ring(4 << 20);
    for (name, mut options) in all_readers() {
        options.fds = None;
        let path = scratch.file("a", 100_000);
        let sources = sources(std::slice::from_ref(&path));
        let Some(mut opened) = try_open(&name, &sources, &options) else {
            continue;
        };
        let extent = |offset, len| extent_of(id(&sources, 0), offset, len);
        let first = read_one(&mut *opened.reader, &ring, extent(90_000, 10_000));
        assert!(first.is_ok(), "{name}");
        for (left, expected) in [(95_000, 5000), (90_112, 112), (50_000, 0), (0, 0)] {
            set_len(&path, left);
            let error = read_one(&mut *opened.reader, &ring, extent(90_000, 10_000)).unwrap_err();
            let words = format!("10000 bytes expected, {expected} read");
            let found = (error.kind(), error.message().contains(&words));
            assert_eq!(
                found,
                (ErrorKind::Truncated, true),
                "{name} left {left}: {error}"
            );
            // What is left can still be read.
            let before = left.min(1000);
            let bytes = read_one(&mut *opened.reader, &ring, extent(0, before)).unwrap();
            assert_eq!(bytes.len() as u64, before, "{name} left {left}");
        }
    }
}

#[test]
fn a_read_that_cannot_work_returns_its_buffer() {
    let scratch = Scratch::new("misuse");
    let sources = sources(&[scratch.file("a", 10_000)]);
    let source = id(&sources, 0);
    let ring = ring(1 << 20);
    let table = [
        (extent_of(source, 9000, 1001), 4096, ErrorKind::Truncated),
        (extent_of(source, u64::MAX, 2), 4096, ErrorKind::Truncated),
        (extent_of(source, 0, 5000), 4999, ErrorKind::Config),
    ];
    for (name, mut opened) in each_reader(&sources) {
        for (extent, room, kind) in table {
            let op = ReadOp {
                tag: 9,
                extent,
                buf: ring.reserve(room).unwrap().into(),
            };
            assert!(opened.reader.submit(op).is_ok());
            let mut out = Vec::new();
            while out.is_empty() {
                opened.reader.wait(&mut out, Some(Duration::from_secs(5)));
            }
            let completion = out.pop().unwrap();
            assert_eq!((completion.tag, completion.buf.len()), (9, room), "{name}");
            let error = completion.result.unwrap_err();
            let found = (error.kind(), error.site().path.is_some());
            assert_eq!(found, (kind, true), "{name}: {error}");
        }
    }
}

#[test]
fn buffered_io_uring_keeps_more_reads_in_flight() {
    let scratch = Scratch::new("depths");
    let sources = sources(&[scratch.file("a", 100_000)]);
    for (name, Opened { reader, choice, .. }) in each_reader(&sources) {
        let buffered = choice.reader.kind == ReaderKind::Uring && !choice.direct;
        assert_eq!(reader.depth(), if buffered { 128 } else { 32 }, "{name}");
    }
}

#[test]
fn submit_returns_the_operation_at_full_depth() {
    let scratch = Scratch::new("depth");
    let sources = sources(&[scratch.file("a", 100_000)]);
    let ring = ring(1 << 20);
    for (name, mut options) in all_readers() {
        options.depth = Some(3);
        let Some(Opened { mut reader, .. }) = try_open(&name, &sources, &options) else {
            continue;
        };
        let op = |tag| {
            let extent = extent_of(id(&sources, 0), 4096 * tag, 4096);
            let buf = ring.reserve(4096).unwrap().into();
            ReadOp { tag, extent, buf }
        };
        (0..3).for_each(|tag| assert!(reader.submit(op(tag)).is_ok()));
        let refused = reader.submit(op(3)).err().unwrap();
        let found = (refused.tag, reader.in_flight(), reader.depth());
        assert_eq!(found, (3, 3, 3), "{name}");
        let mut out = Vec::new();
        while out.is_empty() {
            reader.wait(&mut out, None);
        }
        assert!(reader.submit(refused).is_ok(), "{name}");
    }
}

#[test]
fn an_aligned_extent_is_read_in_place() {
    let scratch = Scratch::new("footprint");
    let sources = sources(&[scratch.file("a", 100_000)]);
    for (name, options) in all_readers() {
        let Some(Opened { reader, choice, .. }) = try_open(&name, &sources, &options) else {
            continue;
        };
        let found = (choice.direct, choice.cached_first);
        assert_eq!(found, (options.direct == Direct::On, false), "{name}");
        let align = reader.mem_align() as u64;
        assert_eq!(align > 1, choice.direct, "{name}");
        let footprint = |offset, len| {
            let footprint = reader.footprint(&extent_of(id(&sources, 0), offset, len));
            (footprint.bytes as u64, footprint.in_place)
        };
        assert_eq!(footprint(8192, 8192), (8192, true), "{name}");
        let across = match choice.direct {
            true => (2 * align, false),
            false => (2, true),
        };
        assert_eq!(footprint(8191, 2), across, "{name}");
    }
}

#[test]
fn a_wait_ends_by_timeout_or_by_a_wake() {
    let sources = sources(&[]);
    for (name, mut options) in all_readers() {
        if options.direct == Direct::On {
            continue;
        }
        options.depth = Some(2);
        let Some(Opened { mut reader, .. }) = try_open(&name, &sources, &options) else {
            continue;
        };
        let mut out = Vec::new();
        let start = Instant::now();
        reader.wait(&mut out, Some(Duration::from_millis(30)));
        let waited = start.elapsed();
        assert!(waited >= Duration::from_millis(29), "{name}: {waited:?}");
        reader.wait(&mut out, Some(Duration::ZERO));
        let waker = reader.waker();
        waker.wake();
        reader.wait(&mut out, None);
        for _ in 0..200 {
            let waker = waker.clone();
            let thread = std::thread::spawn(move || waker.wake());
            reader.wait(&mut out, None);
            thread.join().unwrap();
        }
        assert!(out.is_empty(), "{name}");
    }
}

#[test]
fn a_cancelled_reader_completes_everything_and_reads_on() {
    let scratch = Scratch::new("cancel");
    let sources = sources(&[scratch.file("a", 4 << 20)]);
    let ring = ring(8 << 20);
    let extents = pieces(id(&sources, 0), 64, 1 << 16);
    for (name, mut options) in all_readers() {
        options.depth = Some(64);
        for sent in [false, true] {
            let Some(Opened { mut reader, .. }) = try_open(&name, &sources, &options) else {
                continue;
            };
            submit_all(&mut *reader, &ring, &extents);
            let mut out = Vec::new();
            if sent {
                reader.wait(&mut out, Some(Duration::ZERO));
            }
            reader.cancel();
            reader.cancel();
            while reader.in_flight() > 0 {
                reader.wait(&mut out, Some(Duration::from_secs(5)));
            }
            let mut tags: Vec<_> = out.iter().map(|completion| completion.tag).collect();
            tags.sort_unstable();
            assert_eq!(tags, (0..64).collect::<Vec<_>>(), "{name}");
            for completion in out.drain(..) {
                if let Err(error) = completion.result {
                    assert_eq!(error.kind(), ErrorKind::Cancelled, "{name}: {error}");
                }
            }
            let again = read_all(&mut *reader, &ring, &extents);
            assert!(again.iter().all(Result::is_ok), "{name}");
        }
    }
}

#[test]
fn an_empty_reader_moves_to_another_thread() {
    let scratch = Scratch::new("moved");
    let sources = sources(&[scratch.file("a", 100_000), scratch.file("b", 5000)]);
    let extents: Vec<_> = sources
        .ids()
        .map(|source| extent_of(source, 7, 4000))
        .collect();
    let ring = ring(1 << 20);
    for (name, Opened { mut reader, .. }) in each_reader(&sources) {
        reader.register_ring(&ring);
        for _ in 0..3 {
            let extents = &extents;
            let ring = &ring;
            let read = move || {
                let results = read_all(&mut *reader, ring, extents);
                assert!(results.iter().all(Result::is_ok));
                reader
            };
            reader = std::thread::scope(|scope| scope.spawn(read).join().unwrap());
        }
        assert_eq!(reader.stats().failed, 0, "{name}");
    }
}

/// The submitting thread is gone: its operations in flight still complete on the next thread.
#[test]
fn operations_of_an_ended_thread_still_complete() {
    let scratch = Scratch::new("orphans");
    let sources = sources(&[scratch.file("a", 4 << 20)]);
    let ring = ring(8 << 20);
    for (name, Opened { mut reader, .. }) in each_reader(&sources) {
        let extents = &pieces(id(&sources, 0), 16, 1 << 16);
        let ring = &ring;
        let submit = move || {
            submit_all(&mut *reader, ring, extents);
            let mut out = Vec::new();
            reader.wait(&mut out, Some(Duration::ZERO));
            (reader, out)
        };
        let (mut reader, mut out) = std::thread::scope(|scope| scope.spawn(submit).join().unwrap());
        until(&name, || {
            reader.wait(&mut out, Some(Duration::from_secs(1)));
            reader.in_flight() == 0
        });
        let read = out.iter().filter(|completion| completion.result.is_ok());
        assert_eq!((out.len(), read.count()), (16, 16), "{name}");
    }
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn dropping_a_reader_with_reads_in_flight_leaves_nothing() {
    if !alone(&here!()) {
        return;
    }
    let scratch = Scratch::new("drop");
    let sources = sources(&[scratch.file("a", 16 << 20), scratch.file("b", 5000)]);
    let fds = entries("/proc/self/fd");
    let threads = entries("/proc/self/task");
    for (name, mut options) in all_readers() {
        options.depth = Some(64);
        for sent in [false, true] {
            let ring = ring(32 << 20);
            let Some(Opened { mut reader, .. }) = try_open(&name, &sources, &options) else {
                continue;
            };
            reader.register_ring(&ring);
            submit_all(&mut *reader, &ring, &pieces(id(&sources, 0), 64, 1 << 18));
            if sent {
                reader.wait(&mut Vec::new(), Some(Duration::ZERO));
            }
            let start = Instant::now();
            drop(reader);
            let took = start.elapsed();
            assert!(took < DEADLINE / 4, "{name}: {took:?}");
            let whole = ring.reserve(32 << 20);
            assert!(whole.is_some(), "{name}: a buffer was lost");
        }
    }
    assert_eq!(leaked(), 0);
    // io_uring's own workers end a little later than the ring.
    let now = || (entries("/proc/self/fd"), entries("/proc/self/task"));
    answer(
        || format!("{:?}, before {:?}", now(), (fds, threads)),
        || (now() == (fds, threads)).then_some(()),
    );
}

#[test]
fn out_of_descriptors_is_an_error_that_names_the_limit() {
    if !alone(&here!()) {
        return;
    }
    let scratch = Scratch::new("emfile");
    let sources = sources(&[scratch.file("a", 5000)]);
    let ring = ring(1 << 20);
    let descriptors = entries("/proc/self/fd");
    for (name, options) in all_readers() {
        // A ring's own descriptors close a little later than it ends.
        until("the descriptors are closed", || {
            entries("/proc/self/fd") <= descriptors
        });
        let Some(Opened { mut reader, .. }) = try_open(&name, &sources, &options) else {
            continue;
        };
        let mut hoard = Vec::new();
        let resource = rustix::process::Resource::Nofile;
        let before = rustix::process::getrlimit(resource);
        let few = rustix::process::Rlimit {
            current: Some(64),
            ..before
        };
        rustix::process::setrlimit(resource, few).unwrap();
        while let Ok(file) = File::open("/dev/null") {
            hoard.push(file);
        }
        let extent = extent_of(id(&sources, 0), 0, 100);
        let error = read_one(&mut *reader, &ring, extent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Limit, "{name}: {error}");
        drop(hoard);
        rustix::process::setrlimit(resource, before).unwrap();
        assert!(read_one(&mut *reader, &ring, extent).is_ok(), "{name}");
    }
}

#[test]
fn auto_reads_by_pread_where_io_uring_is_refused() {
    let scratch = Scratch::new("refused");
    let sources = sources(&[scratch.file("a", 50_000)]);
    let ring = ring(1 << 20);
    for (errno, word) in [(1, "EPERM"), (38, "ENOSYS"), (12, "ENOMEM"), (13, "EACCES")] {
        let mut options = ReaderOptions::default();
        options.deny_uring = Some(errno);
        let mut opened = open(sources.clone(), &options).unwrap();
        let choice = &opened.choice;
        assert_eq!(
            (choice.reader.kind, choice.cached_first),
            (ReaderKind::Pread, true)
        );
        for words in ["setup refused with", word, "so pread threads"] {
            assert_says(choice, words);
        }
        let extent = extent_of(id(&sources, 0), 3, 40_000);
        assert!(read_one(&mut *opened.reader, &ring, extent).is_ok());
        options.mode = Mode::Uring;
        let refused = open(sources.clone(), &options);
        must_fail(refused, ErrorKind::Unsupported, word);
    }
}

#[test]
fn readers_work_without_locked_memory() {
    if !alone(&here!()) {
        return;
    }
    let scratch = Scratch::new("memlock");
    let path = scratch.file("a", 300_000);
    let sources = sources(std::slice::from_ref(&path));
    let bytes = std::fs::read(&path).unwrap();
    let ring = ring(8 << 20);
    let none = rustix::thread::CapabilitySet::empty();
    let sets = rustix::thread::CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    if let Err(errno) = rustix::thread::set_capabilities(None, sets) {
        return eprintln!("skipped: cannot drop capabilities: {errno}");
    }
    for limit in [1 << 20, 0] {
        let current = Some(limit);
        let maximum = Some(limit);
        let rlimit = rustix::process::Rlimit { current, maximum };
        rustix::process::setrlimit(rustix::process::Resource::Memlock, rlimit).unwrap();
        let mut opened = open(sources.clone(), &ReaderOptions::default()).unwrap();
        let reason = opened.reader.register_ring(&ring);
        eprintln!("limit {limit}: {} {reason:?}", opened.choice);
        let uring = opened.choice.reader.kind == ReaderKind::Uring;
        assert!(!opened.reader.stats().registered_buffers && reason.is_some() == uring);
        let extent = extent_of(id(&sources, 0), 5, 200_000);
        assert!(read_one(&mut *opened.reader, &ring, extent).unwrap()[..] == bytes[5..200_005]);
    }
}

#[test]
fn missing_o_direct_is_an_error_or_a_reason() {
    let mut table = Sources::new();
    // procfs refuses O_DIRECT.
    table.file("/proc/self/status", 0).unwrap();
    let sources = Arc::new(table);
    for mode in [Mode::Uring, Mode::Pread] {
        let mut options = options_of(mode, Direct::On);
        let error = open(sources.clone(), &options).err().unwrap();
        let found = (error.kind(), error.site().path.as_deref());
        let path = Path::new("/proc/self/status");
        assert_eq!(found, (ErrorKind::Unsupported, Some(path)), "{error}");
        options.direct = Direct::Auto;
        let Some(opened) = try_open("auto", &sources, &options) else {
            continue;
        };
        assert!(!opened.choice.direct, "{}", opened.choice);
        assert_says(&opened.choice, "O_DIRECT (/proc");
    }
}

/// sysfs refuses O_DIRECT too, and this file of it has a true length. 64 folders before it prevent
/// a probe of it.
#[test]
fn a_file_that_refuses_o_direct_later_is_read_buffered() {
    let path = Path::new("/sys/kernel/btf/vmlinux");
    let Ok(bytes) = std::fs::read(path) else {
        return eprintln!("skipped: no {}", path.display());
    };
    let scratch = Scratch::new("fallback");
    let mut paths: Vec<_> = (0..64)
        .map(|index| {
            std::fs::create_dir(scratch.0.join(index.to_string())).unwrap();
            scratch.file(&format!("{index}/a"), 5000)
        })
        .collect();
    paths.push(path.to_path_buf());
    let sources = sources(&paths);
    if sources.len_of(id(&sources, 64)) != bytes.len() as u64 {
        return eprintln!("skipped: {} does not tell its length", path.display());
    }
    let ring = ring(1 << 20);
    for (name, options) in all_readers() {
        if options.direct == Direct::Off {
            continue;
        }
        let Some(Opened { mut reader, .. }) = try_open(&name, &sources, &options) else {
            continue;
        };
        let extent = |source, offset, len| extent_of(id(&sources, source), offset, len);
        let extents = [
            extent(64, 1000, 5000),
            extent(0, 0, 5000),
            extent(64, 4096, 4096),
        ];
        let results = read_all(&mut *reader, &ring, &extents);
        for (result, range) in [(&results[0], 1000..6000), (&results[2], 4096..8192)] {
            assert!(result.as_ref().unwrap()[..] == bytes[range], "{name}");
        }
        let stats = reader.stats();
        let counts = [stats.fallbacks, stats.direct_reads, stats.buffered_reads];
        assert!(counts.iter().all(|count| *count > 0), "{name}: {stats:?}");
    }
}

#[test]
fn a_dataset_that_fits_memory_is_read_buffered() {
    let scratch = Scratch::new("auto");
    let sources = sources(&[scratch.file("a", 50_000)]);
    let opened = open(sources.clone(), &ReaderOptions::default()).unwrap();
    assert!(opened.cache.is_some() && !opened.choice.direct);
    assert_says(&opened.choice, "fits half of");
    let mut table = Sources::new();
    table.file(sources.path(id(&sources, 0)), 1 << 50).unwrap();
    let opened = open(Arc::new(table), &ReaderOptions::default()).unwrap();
    assert_says(&opened.choice, "does not fit half of");
}

#[test]
fn no_reader_follows_a_name_out_of_its_root() {
    let scratch = Scratch::new("beneath");
    std::fs::create_dir_all(scratch.0.join("root/sub")).unwrap();
    let inside = scratch.file("root/sub/a", 5000);
    let secret = scratch.file("secret", 5000);
    // The user chose the root's path: it may lead anywhere.
    symlink("root", scratch.0.join("link")).unwrap();
    symlink("../secret", scratch.0.join("root/outside")).unwrap();
    symlink("..", scratch.0.join("root/up")).unwrap();
    symlink(&inside, scratch.0.join("root/absolute")).unwrap();
    let mut table = Sources::new();
    let root = table.root(scratch.0.join("link"));
    let ids = ["sub/a", "outside", "up/secret", "absolute", "gone"]
        .map(|name| table.file_in(root, name, 5000));
    let ids: Vec<_> = ids.into_iter().map(Result::unwrap).collect();
    // The same files are followed by names that the user wrote.
    let followed = table.file(scratch.0.join("root/outside"), 5000).unwrap();
    for name in [
        "../secret",
        "/etc/hostname",
        "sub/../sub/a",
        "sub//a",
        "./sub/a",
        "",
        "sub/\0",
    ] {
        let error = table.file_in(root, name, 5000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotAFile, "{name:?}: {error}");
    }
    let sources = Arc::new(table);
    let ring = ring(1 << 20);
    let extent = |source| extent_of(source, 1, 4999);
    let expected = |path: &Path| std::fs::read(path).unwrap()[1..].to_vec();
    for (name, mut opened) in each_reader(&sources) {
        for _ in 0..2 {
            let mut read = |source| read_one(&mut *opened.reader, &ring, extent(source));
            assert!(read(ids[0]).unwrap() == expected(&inside), "{name}");
            assert!(read(followed).unwrap() == expected(&secret), "{name}");
            for outside in &ids[1..4] {
                println!("{name}");
                let words = "leads out of the dataset's root";
                must_fail(read(*outside), ErrorKind::NotAFile, words);
            }
            let error = read(ids[4]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotFound, "{name}: {error}");
        }
    }
    for fds in [None, Some(0)] {
        let cache = PageCache::new(sources.clone(), fds);
        for outside in &ids[1..4] {
            // Without openat2 there may be no reason to report.
            match cache.try_read(&extent(*outside), &mut [0; 4999]) {
                Cached::Hit => panic!("read outside of the root"),
                Cached::Miss => {}
                Cached::Failed(error) => assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}"),
            }
        }
    }
    // A missing folder is an error of the file, too.
    std::fs::remove_file(scratch.0.join("link")).unwrap();
    for (name, options) in all_readers() {
        if options.direct == Direct::On {
            continue;
        }
        let Some(mut opened) = try_open(&name, &sources, &options) else {
            continue;
        };
        let error = read_one(&mut *opened.reader, &ring, extent(ids[0])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{name}: {error}");
    }
}
