//! The local cache of objects: the same bytes as from the store, whatever the cache holds, loses or
//! cannot keep.

use crate::common::cached::{counts, fill_blocks, wait_for};
use crate::common::got::{Got, bytes_of, same};
use crate::common::server::{Fault, Request, Server};
use crate::common::{Dir, must_say, noise, sweep, until};
use feedline::dataset::Records;
use feedline::storage::{Cache, Direct, Mode};
use feedline::{Loader, Order};
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) const RECORD: usize = 1000;
pub(crate) const COUNT: usize = 300;
pub(crate) const BLOCK: u64 = 16 << 10;
/// Blocks of both objects.
pub(crate) const BLOCKS: u64 = 2 * (RECORD as u64 * COUNT as u64 / 2).div_ceil(BLOCK);

/// A bucket of two objects, and their batches.
pub(crate) struct Bucket {
    pub(crate) server: Server,
    pub(crate) dir: Dir,
}

impl Bucket {
    pub(crate) fn new() -> Self {
        let server = Server::new();
        let bytes = noise(RECORD * COUNT, 21);
        server.put("bucket/a.bin", bytes[..bytes.len() / 2].to_vec());
        server.put("bucket/b.bin", bytes[bytes.len() / 2..].to_vec());
        Self {
            server,
            dir: Dir::new(),
        }
    }

    pub(crate) fn records(&self) -> Records {
        Records::builder(RECORD)
            .open_files(&[self.server.s3("a.bin"), self.server.s3("b.bin")])
            .unwrap()
    }

    /// From now on no read of an object succeeds.
    fn close_reads(&self) {
        let close = |request: &Request| is_read(request).then_some(Fault::Close);
        self.server.script(close);
    }

    pub(crate) fn cache(&self) -> Cache {
        Cache::at(self.dir.path("cache")).block_bytes(BLOCK)
    }

    pub(crate) fn loader(&self, order: Order, cache: Cache) -> Loader {
        self.reader(order, cache, Mode::Auto)
    }

    pub(crate) fn reader(&self, order: Order, cache: Cache, mode: Mode) -> Loader {
        Loader::builder(self.records())
            .order(order)
            .batch_size(7)
            .tuning(|t| t.reader(mode))
            .cache(cache)
            .build()
            .unwrap()
    }

    pub(crate) fn expected(&self, order: Order) -> Vec<Got> {
        let loader = Loader::builder(self.records())
            .order(order)
            .batch_size(7)
            .build()
            .unwrap();
        Got::epoch(&loader, 0)
    }

    /// Downloads of whole blocks since the last call. Reads that pass a slow disk are others: no
    /// record ends with a block.
    pub(crate) fn downloads(&self) -> u64 {
        let len = (RECORD * COUNT / 2) as u64;
        let log = self.server.take_log();
        log.iter()
            .filter(|request| {
                request.range.is_some_and(|(first, end)| {
                    first % BLOCK == 0 && end == (first + BLOCK).min(len)
                })
            })
            .count() as u64
    }

    /// The files in the cache whose names have this ending, after 25 characters of hash and number.
    pub(crate) fn files(&self, ending: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for share in std::fs::read_dir(self.dir.path("cache/v1/objects"))
            .into_iter()
            .flatten()
            .flatten()
        {
            for file in std::fs::read_dir(share.path())
                .into_iter()
                .flatten()
                .flatten()
            {
                let name = file.file_name().into_string().unwrap();
                if name.len() == 25 + ending.len() && name.ends_with(ending) {
                    found.push(file.path());
                }
            }
        }
        found.sort();
        found
    }
}

/// A file of the cache, to read and to write over.
fn to_write(path: impl AsRef<Path>) -> File {
    let mut options = File::options();
    options.read(true).write(true).open(path).unwrap()
}

fn is_read(request: &Request) -> bool {
    request.range.is_some()
}

/// Epochs until all blocks are there.
pub(crate) fn fill(loader: &Loader) {
    fill_blocks(loader, BLOCKS);
}

#[test]
fn a_full_cache_needs_no_store() {
    for mode in [Mode::Auto, Mode::Uring, Mode::Pread, Mode::Mmap] {
        for order in [Order::sequential(), Order::shuffled(4)] {
            let bucket = Bucket::new();
            let expected = bucket.expected(order.clone());
            let loader = bucket.reader(order.clone(), bucket.cache(), mode);
            same(&Got::epoch(&loader, 0), &expected, "cold");
            fill(&loader);
            bucket.close_reads();
            same(&Got::epoch(&loader, 0), &expected, "full");
            let other = bucket.reader(order, bucket.cache(), mode);
            same(&Got::epoch(&other, 0), &expected, "full, by another loader");
            assert_eq!(
                (counts(&other).misses, counts(&other).blocks),
                (0, 0),
                "{mode:?}: {}",
                counts(&other)
            );
            let said = other.report().to_string();
            assert!(
                said.contains("local cache by")
                    && said.contains("100.0 % of 300 reads served by the local disk"),
                "{said}"
            );
        }
    }
}

#[test]
fn a_loader_downloads_each_block_once() {
    let bucket = Bucket::new();
    let loader = bucket.loader(Order::sequential(), bucket.cache());
    bucket.downloads();
    same(
        &Got::epoch(&loader, 0),
        &bucket.expected(Order::sequential()),
        "cold",
    );
    fill(&loader);
    assert_eq!(bucket.downloads(), BLOCKS);
}

#[test]
fn one_epoch_keeps_small_objects_of_a_shuffled_order() {
    let bucket = Bucket::new();
    let bytes = noise(RECORD * COUNT, 22);
    let names: Vec<_> = (0..COUNT)
        .map(|index| format!("small/{index}.bin"))
        .collect();
    for (name, record) in names.iter().zip(bytes.chunks(RECORD)) {
        bucket
            .server
            .put(&format!("bucket/{name}"), record.to_vec());
    }
    let urls: Vec<_> = names.iter().map(|name| bucket.server.s3(name)).collect();
    let records = || Records::builder(RECORD).open_files(&urls).unwrap();
    let loader = |cache| {
        let builder = Loader::builder(records())
            .order(Order::shuffled(5))
            .batch_size(7)
            .tuning(|t| t.slots(16));
        builder.cache(cache).build().unwrap()
    };
    let loader = loader(Cache::at(bucket.dir.path("cache")).block_bytes(1 << 20));
    bucket.server.take_log();
    Got::epoch(&loader, 0);
    wait_for(&loader, |counts| counts.blocks >= COUNT as u64);
    let log = bucket.server.take_log();
    assert_eq!(
        log.iter().filter(|request| is_read(request)).count(),
        COUNT,
        "{}",
        counts(&loader)
    );
    bucket.close_reads();
    let files = Loader::builder(Records::builder(RECORD).open_bytes(bytes).unwrap());
    let expected = Got::epoch(
        &files
            .order(Order::shuffled(5))
            .batch_size(7)
            .build()
            .unwrap(),
        0,
    );
    same(&Got::epoch(&loader, 0), &expected, "kept");
}

#[test]
fn blocks_are_downloaded_ahead_of_sequential_reads() {
    let bucket = Bucket::new();
    let builder = Loader::builder(bucket.records())
        .order(Order::sequential())
        .batch_size(1)
        .tuning(|t| t.slots(1));
    let loader = builder.cache(bucket.cache()).build().unwrap();
    let mut batches = loader.epoch(0).unwrap();
    batches.next().unwrap().unwrap();
    wait_for(&loader, |counts| counts.blocks >= 9);
    drop(batches);
}

#[test]
fn a_windowed_order_of_records_downloads_whole_blocks_ahead_of_its_reads() {
    let record = 64 << 10;
    let count = 2048;
    let block = 8 << 20;
    let server = Server::new();
    let dir = Dir::new();
    let bytes = noise(record * count, 23);
    // Objects of a block each: those of the next window are looked up first.
    let names: Vec<_> = (0..count * record / block)
        .map(|number| format!("{number:02}.bin"))
        .collect();
    for (name, bytes) in names.iter().zip(bytes.chunks(block)) {
        server.put(&format!("bucket/{name}"), bytes.to_vec());
    }
    let urls: Vec<_> = names.iter().map(|name| server.s3(name)).collect();
    let records = Records::builder(record).open_files(&urls).unwrap();
    let builder = Loader::builder(records)
        .order(Order::windowed(3, 1))
        .batch_size(16)
        .tuning(|t| t.slots(2))
        .workers(1);
    let loader = builder.cache(Cache::at(dir.path("cache"))).build().unwrap();
    server.take_log();
    let mut batches = loader.epoch(0).unwrap();
    let mut ids = Vec::new();
    let mut take = |batch: feedline::Batch| {
        let got = Got::of(&batch).unwrap();
        for (id, row) in got.ids.iter().zip(got.fields[0].bytes.chunks(record)) {
            assert!(
                row == &bytes[*id as usize * record..][..record],
                "sample {id}"
            );
            ids.push(*id);
        }
    };
    batches
        .by_ref()
        .take(8)
        .for_each(|batch| take(batch.unwrap()));
    // A window is a run of 32 MiB: 4 blocks. More of them are there without a read of the next
    // window.
    wait_for(&loader, |counts| counts.blocks >= 5);
    batches.for_each(|batch| take(batch.unwrap()));
    assert!(
        ids.chunks(512)
            .all(|window| window.iter().all(|id| id / 512 == window[0] / 512)),
        "{ids:?}"
    );
    ids.sort_unstable();
    assert!(ids.iter().copied().eq(0..count as u64));
    // Beside them, a read that the disk does not serve in time goes to the store.
    let log = server.take_log();
    let whole = log
        .iter()
        .filter(|request| request.range == Some((0, block as u64)))
        .count();
    assert_eq!(whole, names.len(), "each block comes once, whole");
}

#[test]
fn loaders_that_share_a_cache_download_each_block_once() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::sequential());
    bucket.downloads();
    let loaders: Vec<_> = (0..4)
        .map(|_| bucket.loader(Order::sequential(), bucket.cache()))
        .collect();
    std::thread::scope(|scope| {
        for loader in &loaders {
            scope.spawn(|| same(&Got::epoch(loader, 0), &expected, "shared"));
        }
    });
    let blocks: u64 = loaders.iter().map(|loader| counts(loader).blocks).sum();
    assert_eq!(blocks, bucket.downloads());
    assert!(blocks <= BLOCKS, "{blocks}");
}

#[test]
fn a_cache_without_room_keeps_what_fits_and_fails_nothing() {
    for capacity in [0, BLOCK, 3 * BLOCK + 1] {
        for order in [Order::sequential(), Order::shuffled(8)] {
            let bucket = Bucket::new();
            let loader = bucket.loader(order.clone(), bucket.cache().capacity(capacity));
            let expected = bucket.expected(order);
            for round in 0..3 {
                same(
                    &Got::epoch(&loader, 0),
                    &expected,
                    &format!("capacity {capacity}, round {round}"),
                );
            }
            let counts = counts(&loader);
            assert!(counts.bytes <= capacity && counts.not_kept > 0, "{counts}");
            assert!(
                counts
                    .why
                    .as_ref()
                    .is_some_and(|why| why.contains("the cache is full")),
                "{counts}"
            );
        }
    }
}

#[test]
fn a_full_cache_serves_what_it_holds() {
    let bucket = Bucket::new();
    let cache = || bucket.cache().capacity(10 * BLOCK);
    let expected = bucket.expected(Order::sequential());
    same(
        &Got::epoch(&bucket.loader(Order::sequential(), cache()), 0),
        &expected,
        "first",
    );
    let loader = bucket.loader(Order::shuffled(3), cache());
    for _ in 0..2 {
        same(
            &Got::epoch(&loader, 0),
            &bucket.expected(Order::shuffled(3)),
            "full",
        );
    }
    let counts = counts(&loader);
    assert!(
        counts.hits >= counts.misses / 4 && counts.blocks <= 1,
        "{counts}"
    );
}

#[test]
fn a_cache_may_shrink_and_lose_its_files_under_a_loader() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::sequential());
    let loader = bucket.loader(Order::sequential(), bucket.cache());
    fill(&loader);
    let smaller = bucket.loader(Order::shuffled(1), bucket.cache().capacity(BLOCK));
    same(
        &Got::epoch(&smaller, 0),
        &bucket.expected(Order::shuffled(1)),
        "smaller",
    );
    assert_eq!(bucket.files("").len(), 2, "what a loader reads stays");
    std::fs::remove_dir_all(bucket.dir.path("cache")).unwrap();
    same(&Got::epoch(&loader, 0), &expected, "without its files");
    same(
        &Got::epoch(&bucket.loader(Order::sequential(), bucket.cache()), 0),
        &expected,
        "made anew",
    );
}

#[test]
fn objects_of_ended_runs_make_room_and_foreign_files_stay() {
    let bucket = Bucket::new();
    fill(&bucket.loader(Order::sequential(), bucket.cache()));
    let share = bucket.files("")[0].parent().unwrap().to_path_buf();
    let foreign = [
        "mine.txt",
        "0123456789abcdef.01234567",
        "0123456789abcdef.01234567.map",
    ]
    .map(|name| share.join(name));
    foreign
        .iter()
        .for_each(|path| std::fs::write(path, vec![7; 100_000]).unwrap());
    let other = Server::new();
    let bytes = noise(RECORD * 100, 3);
    let used = to_write(bucket.dir.path("cache/v1/used"));
    let removed = (0..4).any(|folder| {
        other.put(&format!("bucket/{folder}/c.bin"), bytes.clone());
        let records = Records::builder(RECORD)
            .open_files(&[other.s3(&format!("{folder}/c.bin"))])
            .unwrap();
        let builder = Loader::builder(records)
            .order(Order::sequential())
            .batch_size(10);
        let loader = builder
            .cache(bucket.cache().capacity(250_000))
            .build()
            .unwrap();
        assert!(bytes_of(&Got::epoch(&loader, 0), "record") == bytes);
        // The folders are spread over 64 shares, so one may share the lock of what is to go. The
        // next search is at once.
        used.write_all_at(&[0; 8], 8).unwrap();
        counts(&loader).removed > 0 && counts(&loader).blocks > 0
    });
    assert!(removed);
    assert!(foreign.iter().all(|path| path.exists()));
}

/// Changes the records of all maps: the boot's number, and the checksum after it. Pieces of an
/// earlier boot count for nothing.
fn reboot(bucket: &Bucket) {
    bucket
        .files(".units")
        .iter()
        .for_each(|units| std::fs::remove_file(units).unwrap());
    for map in bucket.files(".map") {
        let mut bytes = std::fs::read(&map).unwrap();
        for record in bytes[4096..]
            .chunks_mut(32)
            .filter(|record| record.iter().any(|byte| *byte != 0))
        {
            record[0] ^= 1;
            let sum = crc32c::crc32c(&record[..28]);
            record[28..].copy_from_slice(&sum.to_le_bytes());
        }
        std::fs::write(&map, bytes).unwrap();
    }
}

#[test]
fn blocks_of_an_earlier_boot_count_once_they_are_proven() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::sequential());
    fill(&bucket.loader(Order::sequential(), bucket.cache()));
    reboot(&bucket);
    let data = to_write(&bucket.files("")[0]);
    data.write_all_at(&[0; 512], 2 * BLOCK + 5000).unwrap();
    bucket.downloads();
    let loader = bucket.loader(Order::sequential(), bucket.cache());
    same(&Got::epoch(&loader, 0), &expected, "after the crash");
    fill_blocks(&loader, 1);
    Got::epoch(&loader, 0);
    assert_eq!(
        (counts(&loader).blocks, bucket.downloads()),
        (1, 1),
        "the torn block alone is fetched"
    );
}

#[test]
fn damaged_maps_and_foreign_links_are_not_believed() {
    for damage in 0..4 {
        let bucket = Bucket::new();
        let expected = bucket.expected(Order::sequential());
        fill(&bucket.loader(Order::sequential(), bucket.cache()));
        let map = bucket.files(".map")[0].clone();
        let mut bytes = std::fs::read(&map).unwrap();
        match damage {
            0 => bytes[4096 + 20] ^= 1,
            1 => bytes[40] ^= 1,
            2 => bytes.truncate(4096 + 40),
            _ => {
                let link = map.with_extension("").with_extension("");
                std::fs::remove_file(&link).unwrap();
                std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
            }
        }
        std::fs::write(&map, bytes).unwrap();
        let loader = bucket.loader(Order::sequential(), bucket.cache());
        same(
            &Got::epoch(&loader, 0),
            &expected,
            &format!("damage {damage}"),
        );
        // Blocks are kept behind the reads.
        until("a block is fetched anew", || {
            counts(&loader).blocks > 0 || counts(&loader).not_kept > 0
        });
    }
}

#[test]
fn a_new_version_of_an_object_is_another_entry() {
    let bucket = Bucket::new();
    fill(&bucket.loader(Order::sequential(), bucket.cache()));
    let bytes = noise(RECORD * COUNT / 2, 99);
    bucket.server.put("bucket/a.bin", bytes.clone());
    // The listing of before counts for a minute; a store of another name has none.
    let records = Records::builder(RECORD)
        .open_files(&[bucket.server.http("a.bin")])
        .unwrap();
    let builder = Loader::builder(records)
        .order(Order::sequential())
        .batch_size(10)
        .cache(bucket.cache());
    let got = Got::epoch(&builder.build().unwrap(), 0);
    assert!(bytes_of(&got, "record") == bytes);
}

#[test]
fn objects_without_a_version_are_read_and_not_kept() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::sequential());
    bucket.server.script(|_| Some(Fault::NoVersion));
    let records = Records::builder(RECORD)
        .open_files(&["a.bin", "b.bin"].map(|name| bucket.server.http(name)))
        .unwrap();
    let loader = Loader::builder(records)
        .batch_size(7)
        .order(Order::sequential())
        .cache(bucket.cache());
    let loader = loader.build().unwrap();
    same(&Got::epoch(&loader, 0), &expected, "without versions");
    assert!(
        counts(&loader).why.unwrap().contains("names no version") && bucket.files("").is_empty()
    );
}

#[test]
fn a_folder_that_cannot_be_a_cache_is_refused_by_name() {
    let bucket = Bucket::new();
    let file = bucket.dir.write("file", b"x");
    let builder = Loader::builder(bucket.records())
        .batch_size(7)
        .cache(Cache::at(&file));
    let error = builder.build().err().unwrap().to_string();
    assert!(
        error.contains("the folder cannot be used as a cache") && error.contains("file"),
        "{error}"
    );
    // It becomes unusable later: nothing is kept, and nothing fails.
    std::fs::create_dir_all(bucket.dir.path("cache/v1")).unwrap();
    let loader = bucket.loader(Order::sequential(), bucket.cache());
    std::fs::remove_dir(bucket.dir.path("cache/v1/objects")).unwrap();
    std::fs::write(bucket.dir.path("cache/v1/objects"), b"x").unwrap();
    same(
        &Got::epoch(&loader, 0),
        &bucket.expected(Order::sequential()),
        "no folder",
    );
    assert!(
        counts(&loader)
            .why
            .is_some_and(|why| why.contains("an object has no file"))
    );
}

#[test]
fn objects_and_files_on_a_mount_share_a_cache() {
    let bucket = Bucket::new();
    let bytes = noise(RECORD * COUNT, 21);
    let mount = bucket.dir.write("mount/b.bin", &bytes[bytes.len() / 2..]);
    let local = bucket.dir.write("c.bin", &bytes);
    let time = std::time::SystemTime::now() - Duration::from_secs(60);
    File::options()
        .write(true)
        .open(&mount)
        .unwrap()
        .set_modified(time)
        .unwrap();
    let cache = || {
        bucket
            .cache()
            .mount(mount.parent().unwrap().canonicalize().unwrap())
    };
    let paths = [bucket.server.s3("a.bin").into(), mount.clone(), local];
    for order in [Order::sequential(), Order::shuffled(6)] {
        let builder = || {
            Loader::builder(Records::builder(RECORD).open_files(&paths).unwrap())
                .order(order.clone())
                .batch_size(7)
        };
        let expected = Got::epoch(&builder().build().unwrap(), 0);
        let loader = builder().cache(cache()).build().unwrap();
        same(&Got::epoch(&loader, 0), &expected, "first");
        fill(&loader);
        bucket.close_reads();
        same(&Got::epoch(&loader, 0), &expected, "full");
        bucket.server.script(|_| None);
        assert!(loader.report().total.storage.network.is_some() && bucket.files("").len() == 2);
        drop(loader);
        std::fs::remove_dir_all(bucket.dir.path("cache")).unwrap();
    }
}

#[test]
fn o_direct_reads_what_the_cache_wrote() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::shuffled(2));
    let builder = Loader::builder(bucket.records())
        .order(Order::shuffled(2))
        .batch_size(7);
    let loader = builder
        .tuning(|t| t.reader(Mode::Uring).direct(Direct::On))
        .cache(bucket.cache())
        .build()
        .unwrap();
    fill(&loader);
    bucket.close_reads();
    same(&Got::epoch(&loader, 0), &expected, "O_DIRECT");
}

/// Another process that reads the bucket through the cache: `once`, or until it is killed.
fn child(bucket: &Bucket, once: bool, capacity: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "cache::part", "--ignored", "--nocapture"])
        .stdout(Stdio::null());
    command
        .env("CACHE_URL", bucket.server.http(""))
        .env("CACHE_DIR", bucket.dir.path("cache"));
    command
        .env("CACHE_ONCE", once.to_string())
        .env("CACHE_CAPACITY", capacity.to_string())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "a part of other tests, which start it as a process of its own"]
fn part() {
    let url = std::env::var("CACHE_URL").unwrap();
    let dir = std::env::var("CACHE_DIR").unwrap();
    let records = Records::builder(RECORD)
        .open_files(&["a.bin", "b.bin"].map(|name| format!("{url}{name}")))
        .unwrap();
    let capacity = std::env::var("CACHE_CAPACITY").unwrap().parse().unwrap();
    let cache = Cache::at(dir).block_bytes(BLOCK).capacity(capacity);
    let loader = Loader::builder(records)
        .order(Order::sequential())
        .batch_size(7)
        .cache(cache)
        .build()
        .unwrap();
    let expected = noise(RECORD * COUNT, 21);
    loop {
        let bytes = bytes_of(&Got::epoch(&loader, 0), "record");
        assert!(bytes[..expected.len()] == expected);
        if std::env::var("CACHE_ONCE").unwrap() == "true" {
            return;
        }
    }
}

#[test]
fn a_kill_while_blocks_are_written_leaves_no_wrong_byte() {
    let bucket = Bucket::new();
    let records = || {
        let urls = ["a.bin", "b.bin"].map(|name| bucket.server.http(name));
        Records::builder(RECORD).open_files(&urls).unwrap()
    };
    let expected = Got::epoch(
        &Loader::builder(records()).batch_size(7).build().unwrap(),
        0,
    );
    // Long enough that most kills meet a cache that fills.
    bucket
        .server
        .script(|request| is_read(request).then_some(Fault::Delay(Duration::from_millis(3))));
    for kill in 0..sweep::size(20, 100, 1000) {
        if kill % 4 == 0 {
            let _ = std::fs::remove_dir_all(bucket.dir.path("cache"));
        }
        let mut child = child(&bucket, false, u64::MAX);
        std::thread::sleep(Duration::from_micros(20_000 + 977 * (kill * 37 % 60)));
        child.kill().unwrap();
        child.wait().unwrap();
        let builder = Loader::builder(records())
            .batch_size(7)
            .cache(bucket.cache());
        same(
            &Got::epoch(&builder.build().unwrap(), 0),
            &expected,
            &format!("kill {kill}"),
        );
    }
}

#[test]
fn kills_beside_a_living_loader_leak_no_room() {
    // Without a limit, and with room for one version of the objects.
    [u64::MAX, (BLOCKS + 4) * BLOCK]
        .into_iter()
        .for_each(kills_leak_no_room);
}

fn kills_leak_no_room(capacity: u64) {
    let kills: u64 = std::env::var("FEEDLINE_KILLS").map_or(12, |kills| kills.parse().unwrap());
    let bucket = Bucket::new();
    bucket
        .server
        .put("bucket/other/c.bin", noise(RECORD * 20, 3));
    let other = Records::builder(RECORD)
        .open(bucket.server.http("other/c.bin"))
        .unwrap();
    let living = Loader::builder(other)
        .batch_size(5)
        .cache(bucket.cache())
        .build()
        .unwrap();
    fill_blocks(&living, (RECORD as u64 * 20).div_ceil(BLOCK));
    let bytes = noise(RECORD * COUNT, 21);
    for kill in 0..kills {
        // Other versions, so each child books room.
        bucket
            .server
            .put("bucket/a.bin", bytes[..bytes.len() / 2].to_vec());
        bucket
            .server
            .put("bucket/b.bin", bytes[bytes.len() / 2..].to_vec());
        let mut child = child(&bucket, false, capacity);
        std::thread::sleep(Duration::from_micros(15_000 + 977 * (kill * 37 % 40)));
        child.kill().unwrap();
        child.wait().unwrap();
        if capacity == u64::MAX && kill % 25 == 24 {
            bucket.cache().trim(0).unwrap();
        }
    }
    drop(bucket.loader(Order::sequential(), bucket.cache().capacity(capacity)));
    // Counts anew, as a loader does that finds no room.
    bucket.cache().trim(u64::MAX).unwrap();
    let mut sum = [0; 8];
    File::open(bucket.dir.path("cache/v1/used"))
        .unwrap()
        .read_exact_at(&mut sum, 0)
        .unwrap();
    let sum: u64 = u64::from_le_bytes(sum);
    let on_disk: u64 = bucket
        .cache()
        .entries()
        .unwrap()
        .iter()
        .map(|entry| entry.bytes)
        .sum();
    println!("{kills} kills, capacity {capacity}: {sum} bytes in the sum, {on_disk} on the disk");
    // A killed child may have had a block of each thread on its way.
    assert!(
        sum <= on_disk + 8 * BLOCK,
        "{sum} bytes in the sum, {on_disk} on the disk"
    );
    // Since the last count, each may have left as much on the disk.
    assert!(
        on_disk <= sum + (kills % 25 + 1) * 8 * BLOCK,
        "{sum} bytes in the sum, {on_disk} on the disk"
    );
    assert!(
        on_disk <= capacity.saturating_add(8 * BLOCK),
        "{on_disk} on the disk of {capacity}"
    );
    assert_eq!(
        std::fs::read_dir(bucket.dir.path("cache/v1/booked"))
            .unwrap()
            .count(),
        1,
        "the living loader"
    );
    drop(living);
}

#[test]
fn a_stopped_process_that_claims_blocks_delays_others_once() {
    let bucket = Bucket::new();
    let asked = Arc::new(AtomicU64::new(0));
    let counter = asked.clone();
    bucket.server.script(move |request| {
        counter.fetch_add(u64::from(is_read(request)), Ordering::Relaxed);
        is_read(request).then_some(Fault::Delay(Duration::from_secs(5)))
    });
    let mut stopped = child(&bucket, true, u64::MAX);
    until("the child asks for four blocks", || {
        asked.load(Ordering::Relaxed) >= 4
    });
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&stopped),
        rustix::process::Signal::STOP,
    )
    .unwrap();
    bucket.server.script(|_| None);
    // The child's URLs.
    let urls = ["a.bin", "b.bin"].map(|name| bucket.server.http(name));
    let records = Records::builder(RECORD).open_files(&urls).unwrap();
    let builder = Loader::builder(records)
        .order(Order::sequential())
        .batch_size(7);
    let loader = builder.cache(bucket.cache()).build().unwrap();
    for _ in 0..2 {
        same(
            &Got::epoch(&loader, 0),
            &bucket.expected(Order::sequential()),
            "beside a stopped process",
        );
    }
    let counts = counts(&loader);
    assert!(
        counts
            .why
            .as_ref()
            .is_some_and(|why| why.contains("another process has reserved a block")),
        "{counts}"
    );
    stopped.kill().unwrap();
    stopped.wait().unwrap();
}

#[test]
fn eight_processes_on_one_cache_download_each_block_once() {
    let bucket = Bucket::new();
    bucket.downloads();
    let children: Vec<_> = (0..8).map(|_| child(&bucket, true, u64::MAX)).collect();
    children
        .into_iter()
        .for_each(|mut child| assert!(child.wait().unwrap().success()));
    let downloads = bucket.downloads();
    assert!(
        (1..=BLOCKS + BLOCKS / 20).contains(&downloads),
        "{downloads} downloads of {BLOCKS} blocks"
    );
}

/// The rights of all that a cache holds.
fn rights(dir: &Path, found: &mut Vec<(PathBuf, u32)>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        let meta = entry.path().symlink_metadata().unwrap();
        if meta.is_dir() {
            rights(&path, found);
        }
        if !meta.is_symlink() {
            found.push((path, meta.permissions().mode() & 0o777));
        }
    }
}

#[test]
fn a_cache_belongs_to_its_owner_or_to_the_group_of_its_folder() {
    for (folder, file, made) in [
        (0o700, 0o600, None),
        (0o700, 0o600, Some(0o755)),
        (0o770, 0o660, Some(0o2770)),
    ] {
        let bucket = Bucket::new();
        let cache = bucket.dir.path("cache");
        if let Some(mode) = made {
            std::fs::create_dir(&cache).unwrap();
            std::fs::set_permissions(&cache, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        fill(&bucket.loader(Order::sequential(), bucket.cache()));
        let mut found = Vec::new();
        rights(&cache, &mut found);
        assert!(found.len() > 8, "{found:?}");
        for (path, mode) in found {
            assert_eq!(
                mode,
                if path.is_dir() { folder } else { file },
                "{} of {made:?}",
                path.display()
            );
        }
    }
}

#[test]
fn a_folder_that_everyone_could_read_is_closed() {
    let bucket = Bucket::new();
    fill(&bucket.loader(Order::sequential(), bucket.cache()));
    let root = bucket.dir.path("cache/v1");
    std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o755)).unwrap();
    drop(bucket.loader(Order::sequential(), bucket.cache()));
    assert_eq!(root.metadata().unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn links_and_pipes_in_a_cache_hold_nothing_and_lead_nowhere() {
    let bucket = Bucket::new();
    let expected = bucket.expected(Order::sequential());
    fill(&bucket.loader(Order::sequential(), bucket.cache()));
    let victim = bucket.dir.write("victim", b"untouched bytes");
    let root = bucket.dir.path("cache/v1");
    let pipe = |path: &Path| {
        let done = Command::new("mkfifo").arg(path).status().unwrap();
        assert!(done.success());
    };
    // Beside the entries, in the place of their maps, and among the loaders' bookings.
    let map = bucket.files(".map").remove(0);
    std::fs::remove_file(&map).unwrap();
    pipe(&map);
    pipe(&map.with_file_name("0123456789abcdef.01234567.map"));
    std::fs::write(map.with_file_name("0123456789abcdef.01234567"), b"x").unwrap();
    pipe(&root.join("booked/pipe"));
    assert_eq!(bucket.cache().entries().unwrap().len(), 1);
    bucket
        .cache()
        .verify(|_| std::ops::ControlFlow::Continue(()))
        .unwrap();
    same(
        &Got::epoch(&bucket.loader(Order::sequential(), bucket.cache()), 0),
        &expected,
        "beside pipes",
    );
    for name in ["used", "in-use/00"] {
        let _ = std::fs::remove_file(root.join(name));
        std::os::unix::fs::symlink(&victim, root.join(name)).unwrap();
    }
    must_say(
        Loader::builder(bucket.records())
            .batch_size(7)
            .cache(bucket.cache())
            .build(),
        "cannot be used as a cache",
    );
    assert!(bucket.cache().entries().is_err());
    assert_eq!(std::fs::read(&victim).unwrap(), b"untouched bytes");
}

#[test]
fn room_that_the_dead_have_booked_comes_back_while_others_live() {
    let bucket = Bucket::new();
    let living = bucket.loader(Order::sequential(), bucket.cache());
    fill(&living);
    let root = bucket.dir.path("cache/v1");
    let used = to_write(root.join("used"));
    let number = |file: &File, at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_le_bytes(bytes)
    };
    // As a killed loader leaves it: a file without a lock, and its bytes in the sum.
    let before = number(&used, 0);
    let lost = 1_u64 << 20;
    std::fs::write(root.join("booked/1.2.3"), lost.to_le_bytes()).unwrap();
    used.write_all_at(&(before + lost).to_le_bytes(), 0)
        .unwrap();
    // The count that looks for room.
    let server = Server::new();
    let bytes = noise(RECORD * 20, 3);
    server.put("bucket/c.bin", bytes);
    let late = Records::builder(RECORD)
        .open_files(&[server.s3("c.bin")])
        .unwrap();
    let late = Loader::builder(late)
        .order(Order::sequential())
        .batch_size(5);
    let late = late
        .cache(bucket.cache().capacity(before + lost / 2))
        .build()
        .unwrap();
    assert!(late.epoch(0).unwrap().all(|batch| batch.is_ok()));
    wait_for(&late, |counts| counts.blocks >= 2);
    assert!(!root.join("booked/1.2.3").exists());
    assert!(number(&used, 0) < before + lost);
    drop((living, late));
}

/// Records of 70,000 bytes: too far apart for requests that serve several, and worth keeping one by
/// one.
struct Large {
    server: Server,
    dir: Dir,
    bytes: Vec<u8>,
}

impl Large {
    const RECORD: usize = 70_000;
    const COUNT: usize = 100;

    fn new() -> Self {
        let server = Server::new();
        let bytes = noise(Self::RECORD * Self::COUNT, 33);
        server.put("bucket/large.bin", bytes.clone());
        Self {
            server,
            dir: Dir::new(),
            bytes,
        }
    }

    fn loader(&self, seed: u64) -> Loader {
        self.loader_of(seed, 6)
    }

    fn loader_of(&self, seed: u64, slots: usize) -> Loader {
        let records = Records::builder(Self::RECORD)
            .open(self.server.s3("large.bin"))
            .unwrap();
        let cache = Cache::at(self.dir.path("cache")).block_bytes(2 << 20);
        let builder = Loader::builder(records)
            .order(Order::shuffled(seed))
            .batch_size(4)
            .tuning(|t| t.slots(slots));
        builder.cache(cache).build().unwrap()
    }

    /// Reads batches, and compares them.
    fn read(&self, loader: &Loader, epoch: u64, batches: usize) {
        for got in loader
            .epoch(epoch)
            .unwrap()
            .take(batches)
            .map(|batch| Got::of(&batch.unwrap()).unwrap())
        {
            for (row, id) in got.ids.iter().enumerate() {
                let found = &got.fields[0].bytes[row * Self::RECORD..][..Self::RECORD];
                assert!(
                    found == &self.bytes[*id as usize * Self::RECORD..][..Self::RECORD],
                    "sample {id}"
                );
            }
        }
    }

    /// Bytes of ranges that were asked for since the last call, and their number.
    fn asked(&self) -> (usize, usize) {
        let ranges: Vec<_> = self
            .server
            .take_log()
            .iter()
            .filter_map(|request| request.range)
            .collect();
        (
            ranges
                .iter()
                .map(|(first, end)| (end - first) as usize)
                .sum(),
            ranges.len(),
        )
    }

    fn files(&self, ending: &str) -> Vec<PathBuf> {
        let shares = std::fs::read_dir(self.dir.path("cache/v1/objects"))
            .unwrap()
            .flatten();
        let files = shares.flat_map(|share| std::fs::read_dir(share.path()).unwrap().flatten());
        files
            .map(|file| file.path())
            .filter(|path| path.to_str().unwrap().ends_with(ending))
            .collect()
    }
}

#[test]
fn each_byte_of_a_shuffled_order_comes_once() {
    let large = Large::new();
    let loader = large.loader(1);
    large.read(&loader, 0, usize::MAX);
    let (bytes, _) = large.asked();
    // Each range is widened to units of 4 KiB.
    assert!(
        bytes <= large.bytes.len() + Large::COUNT * 8192,
        "{bytes} bytes for {}",
        large.bytes.len()
    );
    wait_for(&loader, |counts| counts.bytes as usize >= large.bytes.len());
    let blocks = large.bytes.len().div_ceil(2 << 20) as u64;
    wait_for(&loader, |counts| counts.blocks >= blocks);
    for (epoch, loader) in [(1, &loader), (0, &large.loader(7))] {
        large.read(loader, epoch, usize::MAX);
        assert_eq!(large.asked(), (0, 0), "all is there");
    }
    let cache = Cache::at(large.dir.path("cache"));
    assert_eq!(cache.entries().unwrap()[0].whole, blocks);
    assert!(
        cache
            .verify(|_| std::ops::ControlFlow::Continue(()))
            .unwrap()
            .is_empty()
    );
}

#[test]
fn pieces_of_one_loader_serve_another_until_the_next_boot() {
    let large = Large::new();
    let first = large.loader(1);
    large.read(&first, 0, 12);
    let (begun, _) = large.asked();
    wait_for(&first, |counts| {
        counts.bytes as usize >= 12 * 4 * Large::RECORD
    });
    let other = large.loader(9);
    large.read(&other, 0, usize::MAX);
    let (bytes, _) = large.asked();
    // What the first had asked for when its iterator was dropped may not have come.
    assert!(
        begun + bytes <= large.bytes.len() + Large::COUNT * 8192 + 40 * Large::RECORD,
        "{begun} and {bytes}"
    );
    assert!(bytes < large.bytes.len() * 7 / 10, "{bytes}");
    drop((first, other));
    // In another boot nothing but whole blocks counts.
    let half = Large::new();
    let loader = half.loader(1);
    half.read(&loader, 0, 3);
    wait_for(&loader, |counts| {
        counts.bytes as usize >= 3 * 4 * Large::RECORD
    });
    drop(loader);
    for path in half.files(".units") {
        let file = to_write(path);
        file.write_all_at(&[7; 8], 0).unwrap();
    }
    for path in half.files(".map") {
        let data = path.with_extension("");
        let file = to_write(data);
        // As a crash may leave data that was not synced.
        file.write_all_at(&vec![0; half.bytes.len()], 0).unwrap();
    }
    let again = half.loader(1);
    half.read(&again, 0, usize::MAX);
    let (bytes, _) = half.asked();
    assert!(bytes >= half.bytes.len());
}

#[test]
fn a_damaged_block_is_refused_with_its_pieces() {
    let large = Large::new();
    let loader = large.loader(1);
    large.read(&loader, 0, usize::MAX);
    wait_for(&loader, |counts| counts.bytes as usize >= large.bytes.len());
    wait_for(&loader, |counts| {
        counts.blocks >= large.bytes.len().div_ceil(2 << 20) as u64
    });
    drop(loader);
    let data = large.files(".map").remove(0).with_extension("");
    to_write(&data).write_all_at(&[1; 5000], 3 << 20).unwrap();
    let damaged = Cache::at(large.dir.path("cache"))
        .verify(|_| std::ops::ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(damaged.len(), 1, "{damaged:?}");
    large.read(&large.loader(2), 0, usize::MAX);
}

#[test]
fn a_piece_that_rots_never_becomes_a_block() {
    let large = Large::new();
    let loader = large.loader_of(1, 2);
    let got: Vec<_> = loader
        .epoch(0)
        .unwrap()
        .take(3)
        .map(|batch| Got::of(&batch.unwrap()).unwrap())
        .collect();
    wait_for(&loader, |counts| {
        counts.bytes as usize >= 3 * 4 * Large::RECORD
    });
    drop(loader);
    let data = large.files(".map").remove(0).with_extension("");
    let file = to_write(&data);
    let place = got[0].ids[0] * Large::RECORD as u64 + 30_000;
    let mut byte = [0];
    file.read_exact_at(&mut byte, place).unwrap();
    file.write_all_at(&[byte[0] ^ 1], place).unwrap();
    // Within a boot, a read may meet it. The block is compared when its last piece comes.
    let loader = large.loader(2);
    assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
    wait_for(&loader, |counts| {
        counts.blocks >= large.bytes.len().div_ceil(2 << 20) as u64 - 1
    });
    drop(loader);
    let later = large.loader(3);
    large.read(&later, 0, usize::MAX);
    wait_for(&later, |counts| counts.blocks >= 1);
    drop(later);
    assert!(
        Cache::at(large.dir.path("cache"))
            .verify(|_| std::ops::ControlFlow::Continue(()))
            .unwrap()
            .is_empty()
    );
    large.read(&large.loader(4), 0, usize::MAX);
}
