//! Time to open a dataset of shards: 1,000,000 samples of two fields in tar, as 1, 100 and 1000
//! shards; the first time (scanning all shards) and from the index files. And time to join as many
//! names to a csv in another order, with 1 % misses on both sides.
//!
//! Physical limit: reading the same index files by `std::fs::read`, one after the other.
//!
//! `cargo bench --no-default-features --bench index` (writes 1.5 GB below `target/` and removes
//! them)

mod common;

use common::{as_test, figure, spread};
use feedline::dataset::{Dataset, DatasetExt, Missing, Table, Tar, TfRecord};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Targets: time from the page cache in ms, and index bytes per sample.
const OPEN_MS: f64 = 50.0;
const SAMPLE_BYTES: f64 = 40.0;

fn index_bytes(dataset: &dyn Dataset) -> usize {
    dataset.sizes().index_bytes + dataset.sources().table_bytes()
}

fn main() {
    let samples = if as_test() { 2000 } else { 1_000_000 };
    let repeats = if as_test() { 1 } else { 21 };
    let dir =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-index-{}", std::process::id()));
    for shards in [1, 100, 1000] {
        write_shards(&dir, samples, shards);
        measure(&dir, samples, shards, repeats);
        std::fs::remove_dir_all(&dir).unwrap();
    }
    measure_records(&dir, samples, repeats);
    std::fs::remove_dir_all(&dir).unwrap();
    measure_join(samples as u64, repeats.min(5));
}

/// Pictures in a thousand folders and their labels.
fn measure_join(samples: u64, repeats: usize) {
    let name = |number: u64| format!("n{:03}/{number:08}.jpg", number % 1000);
    let mut names = String::from("file_name\n");
    let mut labels = String::from("file_name,label\n");
    for step in 0..samples {
        names += &format!("{}\n", name(step));
        let number = step * 999_983 % samples;
        let missing = if number % 100 == 7 { samples } else { 0 };
        labels += &format!("{},{number}\n", name(number + missing));
    }
    let read = |csv: &str| Table::builder("file_name").read_bytes(csv).unwrap();
    let mut bytes = 0.0;
    let times = (0..repeats).map(|_| {
        let pictures = read(&names);
        let start = Instant::now();
        let table = read(&labels);
        let tables = pictures.sizes().index_bytes + table.sizes().index_bytes;
        let joined = pictures.join(table).missing(Missing::Skip).open().unwrap();
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!(joined.len(), samples - samples / 100);
        bytes = (joined.sizes().index_bytes - tables) as f64 / joined.len() as f64;
        seconds
    });
    let (seconds, low, high) = spread(times.collect());
    println!(
        "{samples} names: csv read and joined in {seconds:.2} s [{low:.2}, {high:.2}]; {bytes:.1} bytes a row beside the tables"
    );
}

/// The same measurement for TFRecord: records of 116 bytes in 4 files.
fn measure_records(dir: &Path, samples: usize, repeats: usize) {
    std::fs::create_dir_all(dir).unwrap();
    let masked = |bytes: &[u8]| {
        crc32c::crc32c(bytes)
            .rotate_right(15)
            .wrapping_add(0xa282_ead8)
            .to_le_bytes()
    };
    let len = 100_u64.to_le_bytes();
    let data = [7; 100];
    let record = [&len[..], &masked(&len), &data, &masked(&data)]
        .concat()
        .repeat(samples / 4);
    (0..4).for_each(|shard| std::fs::write(dir.join(format!("{shard}")), &record).unwrap());
    let open = || TfRecord::open(dir).unwrap();
    let start = Instant::now();
    let records = open();
    let first = start.elapsed().as_secs_f64();
    assert_eq!(
        (records.len(), records.shards_scanned()),
        (samples as u64, 4)
    );
    let times = (0..repeats).map(|_| {
        let start = Instant::now();
        assert_eq!(open().shards_scanned(), 0);
        start.elapsed().as_secs_f64() * 1e3
    });
    let (ms, low, high) = spread(times.collect());
    let bytes = index_bytes(&records) as f64 / samples as f64;
    println!(
        "{samples} records: scanned in {first:.2} s; from the index {ms:.1} ms [{low:.1}, {high:.1}]; {bytes:.1} bytes per record"
    );
}

fn measure(dir: &Path, samples: usize, shards: usize, repeats: usize) {
    let open = || Tar::builder().bytes("bin").class("cls").open(dir).unwrap();
    let start = Instant::now();
    let tar = open();
    let first = start.elapsed().as_secs_f64();
    assert_eq!((tar.len(), tar.shards_scanned()), (samples as u64, shards));
    let gigabytes = tar.sources().total_bytes() as f64 / 1e9;
    let class = |id| i64::from_ne_bytes(tar.read_sample(id).unwrap().remove(1).try_into().unwrap());
    assert_eq!(class(samples as u64 - 1), (samples / shards - 1) as i64);
    let times = (0..repeats).map(|_| {
        let start = Instant::now();
        let tar = open();
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!(tar.shards_scanned(), 0);
        seconds * 1e3
    });
    let times: Vec<f64> = times.collect();
    figure(&format!("open {shards} shards"), "ms", &times);
    let (ms, low, high) = spread(times);
    let indexes: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .flatten()
        .map(|file| file.path())
        .filter(|path| is_index(path))
        .collect();
    let plain = (0..repeats).map(|_| {
        let start = Instant::now();
        indexes
            .iter()
            .for_each(|path| drop(std::hint::black_box(std::fs::read(path).unwrap())));
        start.elapsed().as_secs_f64() * 1e3
    });
    let plain: Vec<f64> = plain.collect();
    figure(&format!("read the index of {shards} shards"), "ms", &plain);
    let (plain_ms, ..) = spread(plain);
    let bytes = index_bytes(&tar) as f64 / samples as f64;
    println!(
        "{samples} samples in {shards:4} shards: scanned in {first:.2} s ({:.2} GB/s); from the index {ms:.1} ms [{low:.1}, \
         {high:.1}], its files by std::fs::read {plain_ms:.1} ms; {bytes:.1} bytes a sample",
        gigabytes / first
    );
    if !as_test() && (ms > OPEN_MS || bytes > SAMPLE_BYTES) {
        println!("  over the target of {OPEN_MS} ms or {SAMPLE_BYTES} bytes");
    }
}

fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "fdx")
}

/// Samples of an empty member and a class, with the headers of a real shard.
fn write_shards(dir: &Path, samples: usize, shards: usize) {
    std::fs::create_dir_all(dir).unwrap();
    for shard in 0..shards {
        let mut bytes = Vec::new();
        for sample in 0..samples / shards {
            member(&mut bytes, &format!("{sample:07}.bin"), b"");
            member(
                &mut bytes,
                &format!("{sample:07}.cls"),
                sample.to_string().as_bytes(),
            );
        }
        bytes.resize(bytes.len() + 1024, 0);
        std::fs::write(dir.join(format!("{shard:04}.tar")), bytes).unwrap();
    }
}

fn member(tar: &mut Vec<u8>, name: &str, data: &[u8]) {
    let mut block = [0_u8; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    block[156] = b'0';
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar.extend_from_slice(&block);
    tar.extend_from_slice(data);
    tar.resize(tar.len().next_multiple_of(512), 0);
}
