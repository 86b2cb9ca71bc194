//! Tools for the local cache: what it holds, whether that is right, removal, and filling it
//! beforehand.

use crate::cache::{BLOCK, BLOCKS, Bucket, COUNT, RECORD, fill};
use crate::common::cached::counts;
use crate::common::got::{Got, same};
use crate::common::server::{Fault, Server};
use crate::common::{Dir, assert_says, must_fail, noise};
use feedline::dataset::{Dataset, Records};
use feedline::storage::{Cache, CacheEntry, CacheWarmed};
use feedline::{ErrorKind, Loader, Order};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

/// Bytes of both objects.
const BYTES: u64 = (RECORD * COUNT) as u64;

fn go_on(_: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn warm(cache: &Cache, records: &Records) -> CacheWarmed {
    cache
        .warm(records.sources(), |_| ControlFlow::Continue(()))
        .unwrap()
}

fn in_use(entries: &[CacheEntry]) -> Vec<bool> {
    entries.iter().map(|entry| entry.in_use).collect()
}

/// Writes over a byte of a file.
fn damage(path: &Path, at: u64) {
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

/// Sets the time of an entry's last use.
fn age(entry: &CacheEntry, hours: u64) {
    let map = std::fs::File::open(format!("{}.map", entry.path.display())).unwrap();
    map.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours))
        .unwrap();
}

#[test]
fn entries_tell_objects_blocks_and_readers() {
    let bucket = Bucket::new();
    let loader = bucket.loader(Order::sequential(), bucket.cache());
    fill(&loader);
    let entries = bucket.cache().entries().unwrap();
    let urls: Vec<_> = entries.iter().map(|entry| entry.url.clone()).collect();
    assert_eq!(urls, [bucket.server.s3("a.bin"), bucket.server.s3("b.bin")]);
    for entry in &entries {
        assert_eq!(
            (entry.len, entry.blocks, entry.whole),
            (BYTES / 2, BLOCKS / 2, BLOCKS / 2)
        );
        assert!(
            !entry.version.is_empty() && entry.used.elapsed().unwrap() < Duration::from_secs(60),
            "{entry:?}"
        );
        assert!(entry.bytes >= BYTES / 2 && entry.path.metadata().unwrap().len() == BYTES / 2);
    }
    assert_eq!(in_use(&entries), [true, true]);
    drop(loader);
    assert_eq!(in_use(&bucket.cache().entries().unwrap()), [false, false]);
}

#[test]
fn folders_without_a_cache_are_refused_by_name() {
    let dir = Dir::new();
    dir.write("full/mine.txt", b"mine");
    std::fs::create_dir_all(dir.path("empty")).unwrap();
    let cases = [
        ("gone", ErrorKind::NotFound),
        ("empty", ErrorKind::Config),
        ("full", ErrorKind::Config),
    ];
    for (name, kind) in cases {
        let cache = Cache::at(dir.path(name));
        let results = [
            cache.entries().map(drop),
            cache.verify(go_on).map(drop),
            cache.trim(0).map(drop),
        ];
        for error in results.map(|result| result.unwrap_err()) {
            assert_eq!(error.kind(), kind, "{error}");
            assert_says(&error, name);
        }
        assert!(!dir.path(name).join("v1").exists(), "a look makes nothing");
    }
}

#[test]
fn a_damaged_block_is_named_and_fetched_again() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::sequential());
    fill(&bucket.loader(Order::sequential(), bucket.cache()));
    assert!(bucket.cache().verify(go_on).unwrap().is_empty());
    let entry = bucket.cache().entries().unwrap().swap_remove(1);
    damage(&entry.path, 3 * BLOCK + 77);
    let found = bucket.cache().verify(go_on).unwrap();
    let [error] = &found[..] else {
        panic!("{found:?}")
    };
    let site = error.site();
    assert_eq!(
        (site.path.as_ref(), site.offset, site.len),
        (Some(&entry.path), Some(3 * BLOCK), Some(BLOCK))
    );
    assert!(
        error.to_string().contains("block 3") && error.to_string().contains("b.bin"),
        "{error}"
    );
    assert!(
        bucket.cache().verify(go_on).unwrap().is_empty(),
        "its record is gone"
    );
    assert_eq!(bucket.cache().entries().unwrap()[1].whole, BLOCKS / 2 - 1);
    bucket.downloads();
    let loader = bucket.loader(Order::sequential(), bucket.cache());
    same(&Got::epoch(&loader, 0), &expected, "healed");
    assert_eq!(
        (bucket.downloads(), counts(&loader).blocks),
        (1, 1),
        "the damaged block alone is fetched"
    );
    same(&Got::epoch(&loader, 0), &expected, "again");
    assert_eq!(bucket.cache().entries().unwrap()[1].whole, BLOCKS / 2);
    assert!(bucket.cache().verify(go_on).unwrap().is_empty());
}

/// The blocks of the first object that a verification by this process names.
fn damaged(cache: &Cache) -> Vec<u64> {
    cache
        .verify(go_on)
        .unwrap()
        .iter()
        .map(|error| error.site().offset.unwrap() / BLOCK)
        .collect()
}

/// The same by another process.
fn damaged_elsewhere(bucket: &Bucket) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "cache_tools::part", "--ignored", "--nocapture"])
        .env("CACHE_DIR", bucket.dir.path("cache"));
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    said.lines()
        .find_map(|line| line.strip_prefix("damaged: "))
        .unwrap()
        .to_string()
}

#[test]
#[ignore = "a part of another test, which starts it as a process of its own"]
fn part() {
    let cache = Cache::at(std::env::var("CACHE_DIR").unwrap()).block_bytes(BLOCK);
    println!("\ndamaged: {:?}", damaged(&cache));
}

#[test]
fn damage_after_a_clean_verification_is_found_by_this_process_and_by_others() {
    for order in [Order::sequential(), Order::shuffled(3)] {
        for running in [true, false] {
            let bucket = Bucket::new();
            let loader = bucket.loader(order.clone(), bucket.cache());
            fill(&loader);
            let loader = running.then_some(loader);
            let entry = bucket.cache().entries().unwrap().swap_remove(0);
            let last = BLOCKS / 2 - 1;
            let damage = |blocks: &[u64]| {
                blocks
                    .iter()
                    .for_each(|block| damage(&entry.path, block * BLOCK + 9))
            };
            for _ in 0..2 {
                assert_eq!(
                    (damaged(&bucket.cache()), damaged_elsewhere(&bucket)),
                    (vec![], "[]".to_string())
                );
            }
            damage(&[0, 4, last]);
            assert_eq!(damaged(&bucket.cache()), [0, 4, last], "running: {running}");
            assert_eq!(damaged_elsewhere(&bucket), "[]", "named once");
            damage(&[1, 2]);
            assert_eq!(damaged_elsewhere(&bucket), "[1, 2]", "running: {running}");
            damage(&[3]);
            assert_eq!(
                (damaged(&bucket.cache()), damaged(&bucket.cache())),
                (vec![3], vec![])
            );
            drop(loader);
        }
    }
}

#[test]
fn a_verification_hurts_no_loader_that_runs() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::shuffled(5));
    let loader = bucket.loader(Order::shuffled(5), bucket.cache());
    std::thread::scope(|scope| {
        let checks = scope.spawn(|| {
            for _ in 0..20 {
                assert!(bucket.cache().verify(go_on).unwrap().is_empty());
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        while !checks.is_finished() {
            same(&Got::epoch(&loader, 0), &expected, "beside");
        }
    });
    fill(&loader);
}

#[test]
fn a_damaged_map_goes_once_no_process_reads_it() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::sequential());
    let loader = bucket.loader(Order::sequential(), bucket.cache());
    fill(&loader);
    let map = bucket.files(".map").swap_remove(0);
    damage(&map, 40);
    let verified = |outcome: &str| {
        let found = bucket.cache().verify(go_on).unwrap();
        assert!(
            found.len() == 1 && found[0].to_string().contains(outcome),
            "{found:?}"
        );
    };
    verified("`trim` removes it");
    same(&Got::epoch(&loader, 0), &expected, "in use");
    drop(loader);
    verified("it is removed");
    assert_eq!(bucket.files("").len(), 1);
    let loader = bucket.loader(Order::sequential(), bucket.cache());
    same(&Got::epoch(&loader, 0), &expected, "made anew");
    assert_eq!(
        (bucket.files("").len(), counts(&loader).blocks),
        (2, BLOCKS / 2)
    );
}

/// Objects of several folders, so that they lie in several shares; those used longest ago first.
fn aged(bucket: &Bucket) -> Vec<CacheEntry> {
    let names = ["x/a.bin", "y/b.bin", "z/c.bin", "w/d.bin"];
    for (name, hours) in names.iter().zip([4, 3, 2, 1]) {
        bucket
            .server
            .put(&format!("bucket/{name}"), noise(4 * BLOCK as usize, hours));
        let records = Records::builder(1).open(bucket.server.s3(name)).unwrap();
        assert_eq!(warm(&bucket.cache(), &records).missing(), 0);
        let entries = bucket.cache().entries().unwrap();
        age(
            entries
                .iter()
                .find(|entry| entry.url.ends_with(name))
                .unwrap(),
            hours,
        );
    }
    let mut entries = bucket.cache().entries().unwrap();
    entries.sort_by_key(|entry| entry.used);
    entries
}

#[test]
fn a_trim_removes_what_was_used_longest_ago() {
    let bucket = Bucket::new();
    let entries = aged(&bucket);
    let total: u64 = entries.iter().map(|entry| entry.bytes).sum();
    assert_eq!(bucket.cache().trim(total).unwrap(), 0);
    assert_eq!(bucket.cache().trim(total - 1).unwrap(), entries[0].bytes);
    let last = entries[3].bytes;
    assert_eq!(
        bucket.cache().trim(last + 1).unwrap(),
        total - entries[0].bytes - last
    );
    let left = bucket.cache().entries().unwrap();
    assert_eq!(left, entries[3..]);
    // The room counts for loaders at once.
    let number = std::fs::File::open(bucket.dir.path("cache/v1/used")).unwrap();
    let mut used = [0; 8];
    number.read_exact_at(&mut used, 0).unwrap();
    assert!(u64::from_le_bytes(used) <= last + BLOCK, "{used:?}");
}

#[test]
fn a_trim_spares_what_a_process_reads_and_what_is_foreign() {
    let bucket = Bucket::new();
    let entries = aged(&bucket);
    let records = Records::builder(BLOCK as usize)
        .open(bucket.server.s3("x/a.bin"))
        .unwrap();
    let loader = Loader::builder(records)
        .batch_size(1)
        .cache(bucket.cache())
        .build()
        .unwrap();
    Got::epoch(&loader, 0);
    let share = entries[1].path.parent().unwrap();
    let foreign = [
        "mine.txt",
        "0123456789abcdef.01234567",
        "0123456789abcdef.01234567.map",
    ]
    .map(|name| share.join(name));
    foreign
        .iter()
        .for_each(|path| std::fs::write(path, vec![7; 100_000]).unwrap());
    let listed = bucket.cache().entries().unwrap();
    assert_eq!(listed.len(), 4, "foreign files are not listed: {listed:?}");
    bucket.cache().trim(0).unwrap();
    let left: Vec<_> = bucket
        .cache()
        .entries()
        .unwrap()
        .into_iter()
        .filter(|entry| !entry.in_use)
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(entries[0].path.exists() && foreign.iter().all(|path| path.exists()));
    assert_eq!(Got::epoch(&loader, 0).len(), 4);
    assert_eq!(counts(&loader).misses, 0, "{}", counts(&loader));
}

#[test]
fn a_warm_cache_needs_no_store() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::shuffled(6));
    bucket.downloads();
    let first = warm(&bucket.cache(), &bucket.records());
    assert_eq!(
        (first.objects, first.bytes, first.found, first.kept),
        (2, BYTES, 0, BYTES),
        "{first:?}"
    );
    assert_eq!((first.missing(), bucket.downloads()), (0, BLOCKS));
    let second = warm(&bucket.cache(), &bucket.records());
    assert_eq!(
        (second.found, second.kept, bucket.downloads()),
        (BYTES, 0, 0),
        "{second:?}"
    );
    let records = bucket.records();
    bucket.server.script(|_| Some(Fault::Close));
    let loader = Loader::builder(records)
        .order(Order::shuffled(6))
        .batch_size(7)
        .cache(bucket.cache());
    let loader = loader.build().unwrap();
    same(&Got::epoch(&loader, 0), &expected, "warm");
    assert_eq!(counts(&loader).misses, 0);
}

#[test]
fn warming_again_takes_up_what_a_stopped_run_kept() {
    let bucket = Bucket::new();
    bucket.server.script(|request| {
        request
            .range
            .map(|_| Fault::Delay(Duration::from_millis(60)))
    });
    let stopped = bucket
        .cache()
        .warm(bucket.records().sources(), |so_far| match so_far.kept > 0 {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        });
    let stopped = stopped.unwrap();
    assert!(
        stopped.kept > 0 && stopped.missing() > 0 && stopped.errors.is_empty(),
        "{stopped:?}"
    );
    assert!(bucket.cache().verify(go_on).unwrap().is_empty());
    let rest = warm(&bucket.cache(), &bucket.records());
    assert_eq!(
        (rest.found, rest.kept, rest.missing()),
        (stopped.kept, stopped.missing(), 0),
        "{rest:?}"
    );
}

#[test]
fn two_that_warm_one_cache_download_each_block_once() {
    let bucket = Bucket::new();
    bucket.downloads();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert_eq!(warm(&bucket.cache(), &bucket.records()).missing(), 0));
        }
    });
    assert_eq!(bucket.downloads(), BLOCKS);
}

#[test]
fn objects_that_cannot_be_kept_are_named_and_others_are_kept() {
    let bucket = Bucket::new();
    let records = bucket.records();
    bucket.server.remove("bucket/a.bin");
    let warmed = warm(&bucket.cache(), &records);
    assert_eq!(
        (warmed.kept, warmed.missing(), warmed.errors.len()),
        (BYTES / 2, BYTES / 2, 1),
        "{warmed:?}"
    );
    assert_eq!(warmed.errors[0].kind(), ErrorKind::NotFound);
    assert_says(&warmed.errors[0], "a.bin");
}

#[test]
fn a_full_cache_ends_the_warming_with_what_fits() {
    for capacity in [0, 9 * BLOCK] {
        let bucket = Bucket::new();
        let warmed = warm(&bucket.cache().capacity(capacity), &bucket.records());
        assert!(
            warmed.kept <= capacity && warmed.missing() > 0,
            "{warmed:?}"
        );
        assert!(warmed.kept > 0 || capacity == 0, "{warmed:?}");
        assert!(
            warmed
                .errors
                .iter()
                .any(|error| error.to_string().contains("the cache is full")),
            "{warmed:?}"
        );
    }
}

#[test]
fn an_unversioned_object_and_a_dead_store_are_told_apart() {
    let bucket = Bucket::new();
    bucket.server.script(|_| Some(Fault::NoVersion));
    let records = Records::builder(RECORD)
        .open(bucket.server.http("a.bin"))
        .unwrap();
    let warmed = warm(&bucket.cache(), &records);
    assert_eq!((warmed.missing(), warmed.errors.len()), (BYTES / 2, 1));
    assert_says(&warmed.errors[0], "names no version");
    let dead = Server::new();
    dead.put("bucket/c.bin", noise(RECORD, 5));
    let records = Records::builder(RECORD).open(dead.s3("c.bin")).unwrap();
    dead.script(|_| Some(Fault::Status(503, None, "SlowDown")));
    must_fail(
        bucket
            .cache()
            .warm(records.sources(), |_| ControlFlow::Continue(())),
        ErrorKind::Io,
        "503",
    );
}

#[test]
fn a_block_that_fails_once_is_tried_again() {
    let bucket = Bucket::new();
    let mut left = 12;
    // More than the tries of a download.
    bucket.server.script(move |request| {
        left -= i32::from(request.range.is_some() && left > 0);
        (request.range.is_some() && left > 0).then_some(Fault::Close)
    });
    let warmed = warm(&bucket.cache(), &bucket.records());
    assert_eq!((warmed.missing(), warmed.kept), (0, BYTES), "{warmed:?}");
}
