//! Tar shards of other writers are read value by value; damage on disk is an error or in the
//! ledger, with and without an index. (`damage` sweeps bytes and cuts on shards in memory.)

mod damage;

use crate::common::sweep;
use crate::common::*;
use feedline::dataset::{DamageKind, Dataset, DatasetExt, Tar, TarBuilder};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::{ErrorKind, Loader, Order};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/tar");

fn fixture(name: &str) -> PathBuf {
    Path::new(FIXTURES).join(name)
}

/// Content of each shard by Python's webdataset: key, endings and bytes.
fn expected() -> Vec<(String, Vec<Value>)> {
    let text = std::fs::read_to_string(fixture("expected.json")).unwrap();
    let Value::Object(shards) = serde_json::from_str(&text).unwrap() else {
        panic!("shards by name")
    };
    shards
        .into_iter()
        .map(|(name, samples)| (name, samples.as_array().unwrap().clone()))
        .collect()
}

fn field(sample: &Value, ending: &str) -> Vec<u8> {
    let hex = sample["fields"][ending]
        .as_str()
        .unwrap_or_else(|| panic!("{ending} in {sample}"));
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

fn number(bytes: &[u8]) -> i64 {
    std::str::from_utf8(bytes).unwrap().parse().unwrap()
}

fn bin() -> Field {
    Field::up_to("bin", DType::U8, 600)
}

fn builder() -> TarBuilder {
    Tar::builder().raw(bin(), "bin").class("cls").index(false)
}

#[test]
fn shards_of_other_writers_are_read_as_webdataset_does() {
    let shards = expected();
    assert_eq!(shards.len(), 8);
    for (name, samples) in shards {
        for checksums in [true, false] {
            let tar = builder().checksums(checksums).open(fixture(&name)).unwrap();
            assert_eq!(tar.len(), samples.len() as u64, "{name}");
            for (id, sample) in samples.iter().enumerate() {
                let found = tar.read_sample(id as u64).unwrap();
                assert_eq!(found[0], field(sample, "bin"), "{name}, sample {id}");
                assert_eq!(
                    found[1],
                    number(&field(sample, "cls")).to_ne_bytes(),
                    "{name}, sample {id}"
                );
            }
        }
    }
    let tar = builder().open(fixture("gnu.tar")).unwrap();
    let left: Vec<_> = tar
        .left_out()
        .iter()
        .map(|(what, count)| (what.as_str(), *count))
        .collect();
    let expected = [
        ("folder", 1),
        ("hidden", 1),
        ("link", 1),
        ("notes", 1),
        ("symlink", 2),
        ("without ending", 1),
    ];
    assert_eq!(left, expected);
}

#[test]
fn fields_are_taken_from_the_first_sample() {
    let name = "webdataset.tar";
    let samples = expected()
        .into_iter()
        .find(|(own, _)| own == name)
        .unwrap()
        .1;
    let told = Tar::builder().index(false).open(fixture(name)).unwrap();
    let names: Vec<_> = told
        .schema()
        .iter()
        .map(|field| field.name.as_str())
        .collect();
    assert_eq!(names, ["image", "label"]);
    assert_eq!(told.left_out().get(".json"), Some(&3));
    let asked = Tar::builder()
        .field(EncodedField::image("picture"), "jpg;PNG")
        .bytes("json")
        .bytes("no")
        .optional();
    let asked = asked
        .class_named("class", ".cls")
        .index(false)
        .open(fixture(name))
        .unwrap();
    for (id, sample) in samples.iter().enumerate() {
        let told = told.read_sample(id as u64).unwrap();
        let asked = asked.read_sample(id as u64).unwrap();
        assert!(told[0].starts_with(b"\x89PNG"));
        assert_eq!(told[0], field(sample, "png"));
        assert_eq!(
            asked,
            [
                field(sample, "png"),
                field(sample, "json"),
                vec![],
                told[1].clone()
            ]
        );
    }
}

/// Shards with padding, written here: (key, bytes, class) of every sample.
fn shards(dir: &Dir, counts: &[usize]) -> Vec<(Vec<u8>, i64)> {
    let mut samples = Vec::new();
    for (shard, count) in counts.iter().enumerate() {
        let mut bytes = Vec::new();
        for sample in 0..*count {
            let data = noise(
                1 + (sample * 97 + shard) % 600,
                (shard * 1000 + sample) as u64,
            );
            let class = samples.len() as i64 * 3 - 50;
            member(&mut bytes, &format!("s{shard}/{sample}.bin"), &data);
            member(
                &mut bytes,
                &format!("s{shard}/{sample}.cls"),
                class.to_string().as_bytes(),
            );
            samples.push((data, class));
        }
        bytes.resize(bytes.len() + 1024, 0);
        dir.write(&format!("set/shard-{shard:03}.tar"), &bytes);
    }
    samples
}

fn member(tar: &mut Vec<u8>, name: &str, data: &[u8]) {
    header(tar, name, format!("{:011o}\0", data.len()).as_bytes());
    tar.extend_from_slice(data);
    tar.resize(tar.len().next_multiple_of(512), 0);
}

fn header(tar: &mut Vec<u8>, name: &str, size: &[u8]) {
    header_of(tar, name, size, b'0');
}

fn header_of(tar: &mut Vec<u8>, name: &str, size: &[u8], flag: u8) {
    let mut block = [0_u8; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..136].copy_from_slice(size);
    block[156] = flag;
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar.extend_from_slice(&block);
}

#[test]
fn many_tar_shards_are_shuffled_by_every_reader() {
    let dir = Dir::new();
    let samples = shards(&dir, &[20, 0, 33, 1, 50]);
    let open = |pattern: &str, checksums| {
        Tar::builder()
            .raw(bin(), "bin")
            .class("cls")
            .checksums(checksums)
            .open(dir.path(pattern))
            .unwrap()
    };
    for (mode, direct) in readers() {
        for (pattern, checksums) in [
            ("set", true),
            ("set/shard-{000..004}.tar", true),
            ("set/shard-*", false),
        ] {
            let tar = open(pattern, checksums);
            let builder = Loader::builder(tar)
                .order(Order::shuffled(3))
                .batch_size(16)
                .tuning(|t| t.reader(mode).direct(direct));
            let loader = build(builder);
            let mut seen = vec![false; samples.len()];
            for batch in loader.epoch(1).unwrap() {
                let batch = batch.unwrap();
                let labels = batch
                    .field("label")
                    .unwrap()
                    .as_slice::<i64>()
                    .unwrap()
                    .to_vec();
                for (row, id) in batch.ids().iter().enumerate() {
                    let (data, class) = &samples[*id as usize];
                    assert_eq!(labels[row], *class, "{mode:?} {direct:?}");
                    assert_eq!(
                        batch.field("bin").unwrap().row::<u8>(row).unwrap(),
                        data,
                        "{mode:?} {direct:?}"
                    );
                    assert!(!std::mem::replace(&mut seen[*id as usize], true));
                }
            }
            assert!(seen.iter().all(|seen| *seen));
        }
    }
    // Made once, then read.
    assert_eq!(open("set", true).shards_scanned(), 0);
}

#[test]
fn a_loader_names_the_member_that_was_flipped_under_it() {
    let dir = Dir::new();
    let samples = shards(&dir, &[30]);
    let path = dir.path("set/shard-000.tar");
    let tar = Tar::builder()
        .raw(bin(), "bin")
        .class("cls")
        .open(&path)
        .unwrap();
    let loader = build(Loader::builder(tar).batch_size(4));
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes
        .windows(samples[17].0.len())
        .position(|window| window == samples[17].0)
        .unwrap();
    bytes[at] ^= 0x10;
    damage(&path, &bytes);
    let mut rows = 0;
    let mut errors = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        match batch {
            Ok(batch) => rows += batch.len(),
            Err(error) => errors.push(error),
        }
    }
    let [error] = &errors[..] else {
        panic!("{errors:?} after {rows} rows")
    };
    assert_eq!(
        (error.site().sample, error.site().batch, error.site().offset),
        (Some(17), Some(4), Some(at as u64))
    );
    for words in ["s0/17.bin", "CRC32C", "shard-000.tar"] {
        assert_says(error, words);
    }
}

/// Writes a file in place and gives it a time.
fn rewrite(path: &Path, bytes: &[u8], modified: SystemTime) {
    std::fs::write(path, bytes).unwrap();
    std::fs::File::options()
        .append(true)
        .open(path)
        .unwrap()
        .set_modified(modified)
        .unwrap();
}

#[test]
fn a_changed_shard_is_detected_or_indexed_again() {
    let dir = Dir::new();
    shards(&dir, &[14]);
    let path = dir.path("set/shard-000.tar");
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    let whole = std::fs::read(&path).unwrap();
    let open = || Tar::builder().raw(bin(), "bin").class("cls").open(&path);
    let index = || {
        std::fs::read_dir(dir.path("set"))
            .unwrap()
            .flatten()
            .find(|f| f.path().extension().unwrap() == "fdx")
    };
    let tar = open().unwrap();
    let right: Vec<_> = (0..tar.len())
        .map(|id| tar.read_sample(id).unwrap())
        .collect();
    let (place, saved) = index()
        .map(|file| (file.path(), std::fs::read(file.path()).unwrap()))
        .unwrap();
    let mut by_crc = 0;
    let mut anew = 0;
    let mut refused = 0;
    let mut unharmed = 0;
    for at in (0..whole.len()).step_by(sweep::size(61, 13, 13)) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        // Bit rot: the time stays. Within 4 KiB of the ends the version of the shard changes;
        // elsewhere the CRCs detect it.
        rewrite(&path, &bytes, modified);
        std::fs::write(&place, &saved).unwrap();
        let ends = at < 4096 || at + 4096 >= whole.len();
        match open() {
            Ok(tar) => {
                assert_eq!(
                    (tar.len(), tar.shards_scanned()),
                    (right.len() as u64, usize::from(ends)),
                    "byte {at}"
                );
                for id in 0..tar.len() {
                    match tar.read_sample(id) {
                        Ok(found) if !ends => assert_eq!(found, right[id as usize], "byte {at}"),
                        Ok(found) => {
                            assert_eq!(found[0].len(), right[id as usize][0].len(), "byte {at}")
                        }
                        Err(error) => {
                            assert!(error.site().path.is_some(), "{error}");
                            by_crc += usize::from(!ends);
                        }
                    }
                }
                unharmed += 1;
            }
            Err(error) => {
                assert!(
                    ends && matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated),
                    "byte {at}: {error}"
                );
                refused += 1;
            }
        }
        // Written to: the time changes. No sample may be lost silently.
        rewrite(&path, &bytes, SystemTime::UNIX_EPOCH);
        match open() {
            Ok(tar) => {
                assert_eq!(
                    (tar.len(), tar.shards_scanned()),
                    (right.len() as u64, 1),
                    "byte {at}"
                );
                anew += 1;
            }
            Err(error) => {
                assert!(
                    matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated),
                    "byte {at}: {error}"
                )
            }
        }
    }
    println!(
        "{by_crc} by CRC, {refused} refused, {unharmed} opened; of those with another time {anew} indexed anew"
    );
    let least = sweep::size(15, 100, 100);
    assert!(
        by_crc > least && refused > least && anew > least,
        "of each more than {least}"
    );
}

#[test]
fn a_ledger_survives_in_the_index() {
    let dir = Dir::new();
    let samples = shards(&dir, &[10, 10]);
    let path = dir.path("set/shard-001.tar");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1024 - 600]).unwrap();
    let builder = || Tar::builder().raw(bin(), "bin").class("cls");
    for scanned in [2, 0] {
        let tar = builder().skip_damage(true).open(dir.path("set")).unwrap();
        assert_eq!((tar.len(), tar.shards_scanned()), (19, scanned));
        let [damage] = tar.damage() else {
            panic!("{:?}", tar.damage())
        };
        assert_eq!(
            (damage.kind, damage.samples, damage.path.as_path()),
            (DamageKind::Cut, 1, path.as_path())
        );
        assert_says(
            tar.describe(),
            "damage in 1 places costs at least 1 samples",
        );
        let last = tar.read_sample(18).unwrap();
        assert_eq!(last[0], samples[18].0);
        let error = builder().open(dir.path("set")).unwrap_err();
        assert_eq!(
            (error.kind(), error.site().path.as_deref()),
            (ErrorKind::Truncated, Some(path.as_path()))
        );
        assert_eq!(error.site().offset, Some(damage.offset));
        assert!(
            error.message().ends_with(": samples>=1")
                && damage.to_string().ends_with(" samples>=1"),
            "{error}"
        );
    }
}

#[test]
fn indexes_can_be_kept_elsewhere_or_turned_off() {
    let dir = Dir::new();
    shards(&dir, &[3, 4]);
    let builder = || Tar::builder().raw(bin(), "bin").class("cls");
    let files = |name: &str| std::fs::read_dir(dir.path(name)).map_or(0, Iterator::count);
    for scanned in [2, 2] {
        assert_eq!(
            builder()
                .index(false)
                .open(dir.path("set"))
                .unwrap()
                .shards_scanned(),
            scanned
        );
    }
    assert_eq!(files("set"), 2);
    for scanned in [2, 0] {
        let tar = builder()
            .index_dir(dir.path("cache"))
            .open(dir.path("set"))
            .unwrap();
        assert_eq!((tar.shards_scanned(), tar.index_unsaved()), (scanned, None));
    }
    assert_eq!((files("set"), files("cache")), (2, 2));
    let nowhere = builder()
        .index_dir(dir.path("set/shard-000.tar/cache"))
        .open(dir.path("set"))
        .unwrap();
    let told = nowhere.describe();
    assert!(
        told.contains("index not saved") && told.ends_with("; set `index_file` to a writable file"),
        "{told}"
    );
    for (opening, tells) in [true, false].into_iter().enumerate() {
        let told = builder().open(dir.path("set")).unwrap().describe();
        let words = ", kept beside the shards as .fdx files; set `index_file` to keep \
             them in one file elsewhere";
        assert_eq!(told.contains(words), tells, "opening {opening}: {told}");
    }
}

#[test]
fn members_over_four_gigabytes_are_read() {
    const BIG: u64 = 9 << 30;
    let dir = Dir::new();
    let mut size = [0; 12];
    size[0] = 0x80;
    size[4..12].copy_from_slice(&BIG.to_be_bytes());
    let mut base_256 = Vec::new();
    header(&mut base_256, "a.bin", &size);
    let mut pax = Vec::new();
    let record = format!("19 size={BIG}\n");
    assert_eq!(record.len(), 19);
    header_of(&mut pax, "x", b"00000000023\0", b'x');
    pax.extend_from_slice(record.as_bytes());
    pax.resize(1024, 0);
    header(&mut pax, "a.bin", b"00000000000\0");
    for (name, start) in [("base-256", base_256), ("PAX", pax)] {
        let mut end = Vec::new();
        member(&mut end, "b.bin", b"small");
        end.resize(end.len() + 1024, 0);
        let path = dir.write("big.tar", &start);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        // A hole takes no space.
        std::os::unix::fs::FileExt::write_all_at(&file, &end, start.len() as u64 + BIG).unwrap();
        let tar = Tar::builder()
            .bytes("bin")
            .checksums(false)
            .open(&path)
            .unwrap();
        assert_eq!(
            (
                tar.len(),
                tar.sizes().sample_bytes_max,
                tar.sizes().largest_sample
            ),
            (2, BIG, Some(0)),
            "{name}"
        );
        assert_eq!(tar.read_sample(1).unwrap(), [b"small"], "{name}");
        let again = Tar::builder()
            .bytes("bin")
            .checksums(false)
            .open(&path)
            .unwrap();
        assert_eq!(
            (again.shards_scanned(), again.sizes().sample_bytes_max),
            (0, BIG),
            "{name}"
        );
    }
}

#[test]
fn a_shard_without_samples_is_an_error_with_a_reason() {
    let dir = Dir::new();
    dir.write("set/empty.tar", &[0; 1024]);
    let error = builder().open(dir.path("set")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Empty);
    dir.write("set/nothing.tar", b"");
    let error = builder().open(dir.path("set")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
    must_fail(
        Tar::open(dir.path("set/empty.tar")),
        ErrorKind::Empty,
        "no samples in 1 shards",
    );
    assert_eq!(
        Tar::open(dir.path("gone-{0..3}.tar")).unwrap_err().kind(),
        ErrorKind::NotFound
    );
}

#[test]
fn a_loader_reads_checked_records_and_names_damage() {
    let dir = Dir::new();
    let (path, bytes) = records_file(&dir, 50, 4096);
    let open = || {
        records(&path, 4096)
            .facts(dir.path("records.crc"))
            .checksums()
            .open()
            .unwrap()
    };
    for (mode, direct) in readers() {
        let rows = pull(
            &build(
                Loader::builder(open())
                    .batch_size(8)
                    .tuning(|t| t.reader(mode).direct(direct)),
            ),
            0,
        )
        .unwrap();
        assert!(
            rows.iter()
                .all(|(id, row)| row[..] == bytes[*id as usize * 4096..][..4096]),
            "{mode:?} {direct:?}"
        );
    }
    let checked = open();
    assert!(!checked.built());
    let mut changed = bytes.clone();
    changed[4096 * 21 + 5] ^= 4;
    damage(&path, &changed);
    let error = pull(&build(Loader::builder(checked)), 0).unwrap_err();
    assert_eq!(
        (error.kind(), error.site().sample, error.site().offset),
        (ErrorKind::Decode, Some(21), Some(4096 * 21))
    );
    assert_says(&error, "CRC32C");
}
