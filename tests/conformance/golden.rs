//! Files of the crate's own formats, as an earlier build wrote them: this build reads them, and
//! makes none anew.
//!
//! A version of a format whose files are here may only go with its name in CHANGELOG.md. `cargo
//! test --features remote --test conformance golden -- --ignored` writes them: for a new version,
//! beside the old ones.

use crate::common::formats::tar_member;
use crate::common::got::{Got, same};
use crate::common::{Dir, assert_says, must_say};
use feedline::dataset::{Dataset, DatasetExt, Facts, Framed, Megatron, Tar, TarBuilder};
use feedline::decode::Image;
use feedline::prepare::{Check, Format, Plan, Shards, Tasks};
use feedline::{Loader, Result, Stop};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const PICTURES: [&str; 2] = ["gray.jpg", "420.jpg"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

/// The shard whose index and facts are here.
fn shard() -> Vec<u8> {
    let members: Vec<Vec<u8>> = PICTURES
        .iter()
        .enumerate()
        .map(|(number, name)| {
            let picture = std::fs::read(fixture("images").join(name)).unwrap();
            let class = tar_member(&format!("{number}.cls"), number.to_string().as_bytes());
            [tar_member(&format!("{number}.jpg"), &picture), class].concat()
        })
        .collect();
    [members.concat(), vec![0; 1024]].concat()
}

fn builder() -> TarBuilder {
    Tar::builder().image("jpg").class("cls")
}

/// Writes the shard with the time of change that its index names.
fn put_shard(dir: &Dir) -> PathBuf {
    let path = dir.write("train.tar", &shard());
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(time)
        .unwrap();
    path
}

fn rows(dataset: impl Dataset) -> Vec<Got> {
    let loader = Loader::builder(dataset)
        .decode(Image::center_crop(16, 8))
        .batch_size(1);
    Got::epoch(&loader.build().unwrap(), 0)
}

/// Every file below a folder, by its name there.
fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![root.to_path_buf()];
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(&dir).unwrap().flatten() {
            match entry.file_type().unwrap() {
                kind if kind.is_dir() => todo.push(entry.path()),
                kind if kind.is_file() => {
                    let name = entry.path().strip_prefix(root).unwrap().to_path_buf();
                    found.insert(name, std::fs::read(entry.path()).unwrap());
                }
                _ => {}
            }
        }
    }
    found
}

/// The golden files in a folder of their own.
fn copy() -> (Dir, BTreeMap<PathBuf, Vec<u8>>) {
    let dir = Dir::new();
    let golden = files(&fixture("golden"));
    for (name, bytes) in &golden {
        dir.write(name.to_str().unwrap(), bytes);
    }
    (dir, golden)
}

/// Sets the checksum of the first page.
fn seal(bytes: &mut [u8]) {
    let end = bytes.len().min(4096) - 4;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&[0; 8]), &bytes[..end]);
    bytes[end..end + 4].copy_from_slice(&crc.to_le_bytes());
}

fn is_unchanged(dir: &Dir, golden: &BTreeMap<PathBuf, Vec<u8>>, name: &str) -> bool {
    golden
        .iter()
        .filter(|(path, _)| path.starts_with(name))
        .all(|(path, bytes)| {
            let path = dir.path(path.to_str().unwrap());
            std::fs::read(path).unwrap() == *bytes
        })
}

#[test]
fn an_index_of_version_2_is_read() {
    let (dir, _) = copy();
    let tar = builder().open(put_shard(&dir)).unwrap();
    assert_eq!((tar.shards_scanned(), tar.len()), (0, 2));
    same(
        &rows(tar),
        &rows(builder().open_bytes(shard()).unwrap()),
        "by the index",
    );
}

#[test]
fn a_file_of_indexes_of_version_2_is_read() {
    let (dir, golden) = copy();
    let path = put_shard(&dir);
    std::fs::remove_file(dir.path(index_name(&golden))).unwrap();
    // The file names the shard by a hash of its path, which is another in each folder: the first
    // number behind the head.
    let mut pack = golden[Path::new("pack.fdx")].clone();
    let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let hash = path
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, fnv);
    pack[16..24].copy_from_slice(&hash.to_le_bytes());
    seal(&mut pack);
    let pack = dir.write("pack.fdx", &pack);
    let tar = builder().index_file(pack).open(path).unwrap();
    assert_eq!((tar.shards_scanned(), tar.len()), (0, 2));
    same(
        &rows(tar),
        &rows(builder().open_bytes(shard()).unwrap()),
        "by the file of indexes",
    );
}

/// All facts about the tar shard.
fn facts(file: PathBuf) -> Result<Facts<Tar>> {
    let tar = builder().open_bytes(shard())?.facts(file);
    let image = Image::resize(8, 8);
    let facts = tar.checksums().lengths().seek_points();
    facts.picture_sizes("image", &image).open()
}

#[test]
fn facts_of_version_1_are_read() {
    let (dir, golden) = copy();
    let tar = facts(dir.path("facts")).unwrap();
    assert!(!tar.built() && is_unchanged(&dir, &golden, "facts"));
    assert!((0..2).all(|sample| {
        !tar.seek_points(sample, 0, &mut Vec::new())
            .unwrap()
            .is_empty()
    }));
    let anew = facts(dir.path("anew")).unwrap();
    assert_eq!(tar.picture_sizes().unwrap(), anew.picture_sizes().unwrap());
    same(
        &rows(tar),
        &rows(builder().open_bytes(shard()).unwrap()),
        "with facts",
    );
}

#[test]
fn a_plan_of_version_2_and_a_record_are_read() {
    let (dir, golden) = copy();
    let plan = Plan::open(dir.path("job")).unwrap();
    assert_eq!(
        (plan.tasks(), plan.inputs(), plan.bytes()),
        (1, 2, 1519 + 970)
    );
    let record = String::from_utf8(golden[Path::new("job/tasks/000000.tsv")].clone()).unwrap();
    assert_says(&record, &format!("{:016x}", plan.id()));
    let finished = plan.finish(Check::Bytes).unwrap();
    assert_eq!(
        (finished.samples, finished.damaged, finished.missing),
        (2, 0, vec![])
    );
    assert!(is_unchanged(&dir, &golden, "job"));
}

#[test]
fn older_side_files_are_made_again_and_say_so_or_are_refused() {
    let (dir, golden) = copy();
    let path = put_shard(&dir);
    std::fs::remove_file(dir.path(index_name(&golden))).unwrap();
    std::fs::rename(
        dir.path("older/train.tar.5d96618f.fdx"),
        dir.path("train.tar.5d96618f.fdx"),
    )
    .unwrap();
    for (scanned, again) in [(1, "an older index"), (0, "the new one")] {
        let tar = builder().open(&path).unwrap();
        assert_eq!(tar.shards_scanned(), scanned, "{again}");
        assert_eq!(
            tar.describe().contains("indexes made now: 1"),
            scanned == 1,
            "{}",
            tar.describe()
        );
    }
    let pack = || {
        builder()
            .index_file(dir.path("older/pack.fdx"))
            .open(&path)
            .unwrap()
            .shards_scanned()
    };
    assert_eq!(pack(), 0, "the index beside the shard");
    std::fs::remove_file(dir.path("train.tar.5d96618f.fdx")).unwrap();
    assert_eq!(pack(), 0, "the new file of indexes");
    must_say(
        Plan::open(dir.path("older/plan.fdp")),
        "make the plan again",
    );
}

#[test]
fn newer_side_files_and_those_of_others_are_named_and_never_overwritten() {
    let (dir, golden) = copy();
    let path = put_shard(&dir);
    let documents = || {
        Megatron::builder()
            .documents(100)
            .open(fixture("tokens/megatron-u16"))
    };
    type Open<'a> = Box<dyn Fn(PathBuf) -> Result<()> + 'a>;
    let cases: [(&str, Open<'_>); 5] = [
        (
            index_name(&golden),
            Box::new(|_| builder().open(&path).map(drop)),
        ),
        (
            "pack.fdx",
            Box::new(|file| builder().index_file(file).open(&path).map(drop)),
        ),
        ("facts", Box::new(|file| facts(file).map(drop))),
        (
            "job/plan.fdp",
            Box::new(|_| Plan::open(dir.path("job")).map(drop)),
        ),
        (
            "bins",
            Box::new(|file| documents()?.packed("tokens", 100).open(file).map(drop)),
        ),
    ];
    for (name, open) in &cases {
        if !golden.contains_key(Path::new(name)) {
            open(dir.path(name)).unwrap();
        }
        let good = std::fs::read(dir.path(name)).unwrap();
        let version = u32::from_le_bytes(good[12..16].try_into().unwrap());
        for (start, number, words) in [
            (*b"feedside", version + 1, "newer version"),
            (*b"feedside", version.swap_bytes(), "other byte order"),
            (*b"my notes", version, "not"),
        ] {
            let mut bytes = good.clone();
            bytes[..8].copy_from_slice(&start);
            bytes[12..16].copy_from_slice(&number.to_le_bytes());
            seal(&mut bytes);
            dir.write(name, &bytes);
            // An index beside its shard is not needed: the shard is scanned.
            let said = match open(dir.path(name)) {
                Err(error) => error.message().to_string(),
                Ok(()) => builder()
                    .open(&path)
                    .unwrap()
                    .index_unsaved()
                    .unwrap()
                    .to_string(),
            };
            assert!(said.contains(words), "{name}: {said}");
            assert!(
                std::fs::read(dir.path(name)).unwrap() == bytes,
                "{name} is overwritten: {words}"
            );
        }
        dir.write(name, &good);
    }
}

#[cfg(feature = "remote")]
#[test]
fn a_cache_of_version_1_is_read() {
    use std::ops::ControlFlow;
    let (dir, _) = copy();
    std::fs::create_dir_all(dir.path("cache/v1/in-use")).unwrap();
    let cache = feedline::storage::Cache::at(dir.path("cache"));
    let entries = cache.entries().unwrap();
    let [entry] = &entries[..] else {
        panic!("{entries:?}")
    };
    assert!(
        entry.url.starts_with("s3://bucket-") && entry.url.ends_with("/a.bin"),
        "{entry:?}"
    );
    assert_eq!((entry.len, entry.blocks, entry.whole), (64, 1, 1));
    assert!(
        cache
            .verify(|_| ControlFlow::Continue(()))
            .unwrap()
            .is_empty()
    );
    assert_eq!(
        std::fs::read(&entry.path).unwrap(),
        (0..64).collect::<Vec<u8>>()
    );
}

fn index_name(golden: &BTreeMap<PathBuf, Vec<u8>>) -> &str {
    let name = golden
        .keys()
        .find(|path| path.to_str().unwrap().starts_with("train.tar."));
    name.expect("an index").to_str().unwrap()
}

/// Keeps those files of a folder, below a name.
fn keep(from: &Path, name: &str) {
    for (path, bytes) in files(from).iter().filter(|(_, bytes)| !bytes.is_empty()) {
        let path = fixture("golden").join(name).join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

#[test]
#[ignore = "writes tests/fixtures/golden"]
fn the_golden_files_are_written() {
    let dir = Dir::new();
    let path = put_shard(&dir);
    drop(builder().open(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    keep(&dir.path(""), "");

    let dir = Dir::new();
    drop(
        builder()
            .index_file(dir.path("pack.fdx"))
            .open(put_shard(&dir))
            .unwrap(),
    );
    std::fs::create_dir(dir.path("side")).unwrap();
    std::fs::rename(dir.path("pack.fdx"), dir.path("side/pack.fdx")).unwrap();
    drop(facts(dir.path("side/facts")).unwrap());
    keep(&dir.path("side"), "");

    // The plan names the folder of its pictures.
    let dir = Dir::in_memory(1 << 20);
    for name in PICTURES {
        dir.write(
            &format!("in/class/{name}"),
            &std::fs::read(fixture("images").join(name)).unwrap(),
        );
    }
    let shards = Shards::new(Format::Tar).seek_points(false);
    let plan = shards.plan(dir.path("in"), dir.path("job"), 1).unwrap();
    plan.run(&Tasks::all(), 1, &Stop::new(), |_| {}).unwrap();
    keep(&dir.path("job"), "job");

    #[cfg(feature = "remote")]
    {
        let dir = Dir::new();
        let server = crate::common::server::Server::new();
        server.put("bucket/a.bin", (0..64).collect::<Vec<u8>>());
        let records = feedline::dataset::Records::builder(16)
            .open_files(&[server.s3("a.bin")])
            .unwrap();
        let cache = feedline::storage::Cache::at(dir.path("cache"));
        cache
            .warm(records.sources(), |_| std::ops::ControlFlow::Continue(()))
            .unwrap();
        std::fs::remove_dir_all(dir.path("cache/v1/booked")).unwrap();
        std::fs::remove_file(dir.path("cache/v1/CACHEDIR.TAG")).unwrap();
        keep(&dir.path("cache"), "cache");
    }
}
