//! Parquet files written by pyarrow (`fixtures/make_parquet.py`), value by value, and damaged in
//! every way.
#![cfg(feature = "parquet")]

mod keys;
mod lists;
mod offsets;
mod writers;

use crate::common::sweep::places;
use crate::common::*;
use feedline::dataset::{Dataset, Nulls, Parquet, ParquetBuilder};
use feedline::memory::MemoryTerm;
use feedline::tensor::DType;
use feedline::{Batch, Error, ErrorKind, Loader, Order, Result};
use std::path::{Path, PathBuf};

const ROWS: u64 = 150;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/parquet")
        .join(name)
}

/// All columns of the fixtures, as fields. Some files lack `word`.
fn everything(word: bool) -> ParquetBuilder {
    let features: Vec<String> = (0..18).map(|c| format!("f{c}")).collect();
    let builder = Parquet::builder().stack("features", &features);
    let builder = builder.columns(["i8", "u16", "i64", "f64", "b", "emb", "fsb", "h"]);
    let builder = builder.up_to("text", 12).up_to("blob", 50).up_to("tok", 5);
    if word {
        builder.up_to("word", 3)
    } else {
        builder
    }
}

/// The elements of a row's field.
fn get<T: feedline::tensor::Element>(batch: &Batch, name: &str, row: usize) -> Vec<T> {
    let field = batch.field(name).unwrap();
    let all = field.as_slice::<T>().unwrap();
    let each = all.len() / batch.len();
    let len = field.lens().map_or(each, |lens| lens[row] as usize);
    all[row * each..][..len].to_vec()
}

/// The columns that every fixture has.
fn check_columns(batch: &Batch, row: usize, word: bool) {
    let r = batch.ids()[row];
    let i = r as i64;
    assert_eq!(get::<i64>(batch, "i64", row), [i * 1_000_003 - 5]);
    assert_eq!(
        get::<f32>(batch, "emb", row),
        (0..4).map(|k| (r + k) as f32).collect::<Vec<_>>()
    );
    assert_eq!(
        get::<u8>(batch, "text", row),
        format!("row {r}").into_bytes()
    );
    assert_eq!(
        get::<u8>(batch, "blob", row),
        (0..r % 50).map(|k| (r + k) as u8).collect::<Vec<_>>()
    );
    assert_eq!(
        get::<i32>(batch, "tok", row),
        (0..r % 6).map(|k| (r * 10 + k) as i32).collect::<Vec<_>>()
    );
    if word {
        assert_eq!(
            get::<u8>(batch, "word", row),
            ["a", "bb", "ccc"][r as usize % 3].as_bytes()
        );
    }
}

fn check_row(batch: &Batch, row: usize, word: bool) {
    let r = batch.ids()[row];
    let i = r as i64;
    let features: Vec<f32> = (0..18)
        .map(|c| (r as f64 * 0.5 + f64::from(c)) as f32)
        .collect();
    assert_eq!(get::<f32>(batch, "features", row), features, "row {r}");
    assert_eq!(get::<i8>(batch, "i8", row), [(i % 251 - 125) as i8]);
    assert_eq!(get::<u16>(batch, "u16", row), [(i * 7 % 65536) as u16]);
    assert_eq!(get::<f64>(batch, "f64", row), [r as f64 / 3.0]);
    assert_eq!(batch.field("b").unwrap().dtype(), DType::Bool);
    assert_eq!(get::<u8>(batch, "b", row), [u8::from(r.is_multiple_of(3))]);
    assert_eq!(
        get::<u8>(batch, "fsb", row),
        (0..3).map(|k| (r + k) as u8).collect::<Vec<_>>()
    );
    assert_eq!(
        get::<feedline::tensor::f16>(batch, "h", row),
        [feedline::tensor::f16::from_f64((r % 2048) as f64)]
    );
    check_columns(batch, row, word);
}

const FILES: [(&str, bool); 5] = [
    ("default.parquet", true),
    ("plain.parquet", true),
    ("zstd_v2.parquet", true),
    ("snappy_required.parquet", true),
    ("encodings.parquet", false),
];

#[test]
fn every_type_encoding_and_codec_is_read_as_pyarrow_wrote_it() {
    for (name, word) in FILES {
        // Whole row groups, and runs of rows in files with an offset index.
        for chunk_bytes in [1 << 30, 5000, 700] {
            for order in [
                Order::sequential(),
                Order::windowed(3, 2),
                Order::shuffled(1),
            ] {
                let dataset = everything(word)
                    .chunk_bytes(chunk_bytes)
                    .open(fixture(name))
                    .unwrap();
                let chunks = dataset.chunked().unwrap().starts().len() - 1;
                let indexed = matches!(
                    name,
                    "plain.parquet" | "zstd_v2.parquet" | "snappy_required.parquet"
                );
                assert_eq!(
                    chunks > 3,
                    indexed && chunk_bytes < 1 << 20,
                    "{name}: {chunks} chunks"
                );
                let loader = build(Loader::builder(dataset).order(order).batch_size(37));
                let mut ids = Vec::new();
                for batch in loader.epoch(0).unwrap() {
                    let batch =
                        batch.unwrap_or_else(|error| panic!("{name} {chunk_bytes}: {error}"));
                    (0..batch.len()).for_each(|row| check_row(&batch, row, word));
                    ids.extend_from_slice(batch.ids());
                }
                ids.sort_unstable();
                assert_eq!(ids, (0..ROWS).collect::<Vec<_>>(), "{name}");
            }
        }
    }
}

#[test]
fn every_reader_gives_the_same_rows() {
    for (mode, direct) in readers() {
        let dataset = everything(true)
            .open(fixture("{plain,zstd_v2}.parquet"))
            .unwrap();
        assert_eq!(dataset.len(), 2 * ROWS);
        let loader = build(
            Loader::builder(dataset)
                .batch_size(100)
                .tuning(|t| t.reader(mode).direct(direct)),
        );
        let mut rows = 0;
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            let features = batch.field("features").unwrap();
            for (row, id) in batch.ids().iter().enumerate() {
                assert_eq!(
                    features.as_slice::<f32>().unwrap()[row * 18],
                    ((id % ROWS) as f64 * 0.5) as f32
                );
                rows += 1;
            }
        }
        assert_eq!(rows, 2 * ROWS, "{mode:?} {direct:?}");
    }
}

fn first_error(dataset: Result<Parquet>) -> Error {
    let dataset = match dataset {
        Ok(dataset) => dataset,
        Err(error) => return error,
    };
    match Loader::builder(dataset).build() {
        Ok(loader) => loader
            .epoch(0)
            .unwrap()
            .find_map(Result::err)
            .expect("an error"),
        Err(error) => error,
    }
}

#[test]
fn an_unsupported_column_is_named() {
    let table: [(Result<Parquet>, ErrorKind, &str); 8] = [
        (
            Parquet::builder()
                .column("nul")
                .open(fixture("plain.parquet")),
            ErrorKind::Decode,
            "column `nul`: row 3 of the row group is null",
        ),
        (
            Parquet::builder()
                .column("gone")
                .open(fixture("plain.parquet")),
            ErrorKind::Config,
            "no column `gone`; there are f0, f1",
        ),
        (
            Parquet::builder()
                .column("tok")
                .open(fixture("plain.parquet")),
            ErrorKind::Config,
            "maximum with `up_to`",
        ),
        (
            Parquet::builder()
                .up_to("tok", 4)
                .open(fixture("plain.parquet")),
            ErrorKind::Shape,
            "takes at most 4",
        ),
        (
            Parquet::builder()
                .stack("x", &["f0", "i64"])
                .open(fixture("plain.parquet")),
            ErrorKind::Config,
            "cannot be stacked",
        ),
        (
            Parquet::builder()
                .column("i64")
                .open(fixture("{tiny,nested}.parquet")),
            ErrorKind::Config,
            "nested.parquet",
        ),
        (
            Parquet::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")),
            ErrorKind::Decode,
            "PAR1",
        ),
        (
            Parquet::open(fixture("gone.parquet")),
            ErrorKind::NotFound,
            "gone.parquet",
        ),
    ];
    for (dataset, kind, words) in table {
        let error = first_error(dataset);
        assert_eq!(error.kind(), kind, "{error}");
        assert!(
            error.to_string().contains(words),
            "{words} is missing in {error}"
        );
    }
}

#[test]
fn missing_values_are_zeros_when_the_user_says_so() {
    for name in ["plain.parquet", "default.parquet", "zstd_v2.parquet"] {
        let dataset = Parquet::builder()
            .column("nul")
            .nulls(Nulls::Zero)
            .open(fixture(name))
            .unwrap();
        let loader = build(Loader::builder(dataset).batch_size(ROWS as usize));
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        let values: Vec<i32> = (0..ROWS as i32)
            .map(|i| if i % 10 == 3 { 0 } else { i })
            .collect();
        assert_eq!(
            batch.field("nul").unwrap().as_slice::<i32>().unwrap(),
            values,
            "{name}"
        );
    }
}

#[test]
fn nested_columns_are_named_with_dots() {
    let dataset = Parquet::builder()
        .up_to("image.bytes", 8)
        .column("label")
        .open(fixture("nested.parquet"))
        .unwrap();
    let loader = build(Loader::builder(dataset).batch_size(20));
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    let lens: Vec<u64> = batch.field("image.bytes").unwrap().lens().unwrap().to_vec();
    assert_eq!(lens, (0..20).map(|i| i % 5).collect::<Vec<_>>());
    assert_eq!(
        batch.field("label").unwrap().as_slice::<i64>().unwrap(),
        (0..20).collect::<Vec<_>>()
    );
}

/// All rows of a ragged field of `lists.parquet`.
fn lists<T: feedline::tensor::Element>(column: &str, nulls: Nulls) -> Result<Vec<Vec<T>>> {
    let dataset = Parquet::builder()
        .up_to(column, 3)
        .nulls(nulls)
        .open(fixture("lists.parquet"))?;
    let loader = Loader::builder(dataset).batch_size(4).build()?;
    let batch = loader.epoch(0)?.next().unwrap()?;
    let field = batch.field(column)?;
    let all = field.as_slice::<T>()?;
    let lens = field.lens().unwrap();
    Ok((0..4)
        .map(|row| all[row * 3..][..lens[row] as usize].to_vec())
        .collect())
}

#[test]
fn lists_of_structures_are_read_as_pyarrow_wrote_them() {
    let empty = lists::<f32>("empty.list.element.a", Nulls::Error).unwrap();
    assert_eq!(empty, [vec![1.0, 3.0], vec![], vec![4.0], vec![]]);
    assert_eq!(
        lists::<u8>("bools", Nulls::Error).unwrap(),
        [vec![1, 0], vec![], vec![1], vec![0]]
    );
    let half = feedline::tensor::f16::from_f32;
    let halves = lists::<feedline::tensor::f16>("halves", Nulls::Error).unwrap();
    assert_eq!(
        halves,
        [
            vec![half(1.0), half(2.0)],
            vec![],
            vec![half(3.0)],
            vec![half(4.0)]
        ]
    );
}

#[test]
fn a_null_structure_within_a_list_never_makes_the_list_shorter() {
    for nulls in [Nulls::Error, Nulls::Zero] {
        let error = lists::<f32>("null_inside.list.element.a", nulls).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Decode);
        for words in [
            "column `null_inside.list.element.a`",
            "a null within the list of row 0",
        ] {
            assert!(
                error.to_string().contains(words),
                "{words} is missing in {error}"
            );
        }
    }
}

/// Every value of the first field, and the memory planned for opening chunks.
fn all_values<T: feedline::tensor::Element>(
    builder: ParquetBuilder,
    name: &str,
) -> (Vec<T>, usize) {
    let loader = build(
        Loader::builder(builder.open(fixture(name)).unwrap())
            .workers(1)
            .batch_size(100),
    );
    let mut values = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap_or_else(|error| panic!("{name}: {error}"));
        values.extend_from_slice(batch.fields().next().unwrap().as_slice::<T>().unwrap());
    }
    (values, loader.plan().term(MemoryTerm::OPENING).each)
}

#[test]
fn rows_that_pack_better_than_their_row_group_are_read() {
    for chunk_bytes in [50_000, 500_000, 1 << 30] {
        let open = |column: &str| Parquet::builder().chunk_bytes(chunk_bytes).column(column);
        let (x, _) = all_values::<f64>(open("x"), "uneven.parquet");
        assert_eq!(x.len(), 400_000);
        assert!(
            x.iter()
                .enumerate()
                .all(|(row, x)| (*x == 0.0) == (row < 398_000)),
            "{chunk_bytes}"
        );
        let (n, _) = all_values::<i64>(open("n"), "uneven.parquet");
        assert!(
            n.iter().enumerate().all(|(row, n)| *n == row as i64 / 4000),
            "{chunk_bytes}"
        );
        let words = Parquet::builder()
            .chunk_bytes(chunk_bytes)
            .up_to("word", 400);
        let (words, _) = all_values::<u8>(words, "large_dictionary.parquet");
        assert_eq!(words.len(), 20_000 * 400);
        for (row, word) in words.chunks(400).enumerate() {
            assert_eq!(
                word,
                format!("{:0400}", row % 5000).as_bytes(),
                "{chunk_bytes}, row {row}"
            );
        }
    }
}

#[test]
fn lists_that_unpack_to_a_hundred_times_their_size_are_read() {
    for builder in [
        Parquet::builder().up_to("same", 500),
        Parquet::builder().column("fixed"),
    ] {
        let (values, opening) = all_values::<f32>(builder, "one_value.parquet");
        assert!(values.len() == 500_000 && values.iter().all(|value| *value == 0.0));
        // Values with their levels, 4 bytes each.
        assert!(opening >= 500_000 * 8, "{opening}");
    }
}

#[test]
fn pictures_in_a_structure_are_found_by_its_name() {
    use feedline::decode::Bytes;
    let dataset = Parquet::builder()
        .image("image")
        .column("label")
        .open(fixture("nested.parquet"))
        .unwrap();
    let loader = build(
        Loader::builder(dataset)
            .decode_field("image", Bytes::up_to(8))
            .batch_size(20),
    );
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    assert_eq!(
        batch.field("image").unwrap().lens().unwrap().to_vec(),
        (0..20).map(|i| i % 5).collect::<Vec<_>>()
    );
}

#[test]
fn row_groups_are_pruned_by_their_statistics() {
    // Row groups of 60 rows: i64 is row × 1000003 - 5.
    let open = |min: f64, max: f64| {
        Parquet::builder()
            .column("i64")
            .prune("i64", min, max)
            .open(fixture("plain.parquet"))
    };
    let dataset = open(65e6, 110e6).unwrap();
    assert_eq!((dataset.len(), dataset.groups_pruned()), (60, 2));
    let loader = build(Loader::builder(dataset));
    assert_eq!(
        loader
            .epoch(0)
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .field("i64")
            .unwrap()
            .as_slice::<i64>()
            .unwrap()[0],
        60 * 1_000_003 - 5
    );
    assert_eq!(open(f64::MIN, f64::MAX).unwrap().groups_pruned(), 0);
    assert_eq!(open(-9.0, -8.0).unwrap_err().kind(), ErrorKind::Empty);
}

#[test]
fn a_budget_below_a_row_group_is_refused_by_file_and_row_group() {
    let dataset = everything(true).open(fixture("default.parquet")).unwrap();
    let error = Loader::builder(dataset)
        .memory_budget(100_000)
        .build()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Budget);
    for words in ["default.parquet", "row group", "open chunks"] {
        assert!(
            error.to_string().contains(words),
            "{words} is missing in {error}"
        );
    }
}

/// Rows of a damaged file: the values, an error, or nothing if it could not be opened.
fn read_damaged(bytes: &[u8]) -> Result<Vec<(f32, i64)>> {
    let dataset = Parquet::builder()
        .columns(["f0", "i64"])
        .open_bytes(bytes.to_vec())?;
    let loader = Loader::builder(dataset)
        .workers(1)
        .tuning(|t| t.slots(1))
        .batch_size(64)
        .memory_budget(64 << 20)
        .build()?;
    let mut rows = Vec::new();
    for batch in loader.epoch(0)? {
        let batch = batch?;
        let f0 = batch.field("f0")?;
        let i64s = batch.field("i64")?;
        rows.extend(
            f0.as_slice::<f32>()?
                .iter()
                .copied()
                .zip(i64s.as_slice::<i64>()?.iter().copied()),
        );
    }
    Ok(rows)
}

/// Counts of errors, of silently lost or added rows, and of wrong values in the right number of
/// rows.
fn sweep(bytes: &[u8], damage: impl Iterator<Item = Vec<u8>>) -> (usize, usize, usize) {
    let whole = read_damaged(bytes).unwrap();
    assert_eq!(whole.len(), 40);
    let mut errors = 0;
    let mut lost = 0;
    let mut wrong = 0;
    for damaged in damage {
        match read_damaged(&damaged) {
            Err(_) => errors += 1,
            Ok(rows) if rows.len() != whole.len() => lost += 1,
            Ok(rows) => wrong += usize::from(rows != whole),
        }
    }
    (errors, lost, wrong)
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    for name in ["tiny.parquet", "tiny_nocrc.parquet"] {
        let bytes = std::fs::read(fixture(name)).unwrap();
        let (errors, lost, wrong) =
            sweep(&bytes, (0..bytes.len()).map(|len| bytes[..len].to_vec()));
        assert_eq!((errors, lost, wrong), (bytes.len(), 0, 0), "{name}");
    }
}

#[test]
fn a_flipped_byte_never_loses_a_row() {
    for (name, checksums) in [("tiny.parquet", true), ("tiny_nocrc.parquet", false)] {
        let bytes = std::fs::read(fixture(name)).unwrap();
        let flips =
            places(0..bytes.len(), 7).flat_map(|at| [1_u8, 0x80, 0xff].map(|mask| (at, mask)));
        let damaged = flips.map(|(at, mask)| {
            let mut damaged = bytes.clone();
            damaged[at] ^= mask;
            damaged
        });
        let (errors, lost, wrong) = sweep(&bytes, damaged);
        println!(
            "{name}: {} flips, {errors} errors, {lost} lost, {wrong} wrong",
            3 * places(0..bytes.len(), 7).count()
        );
        assert_eq!(lost, 0, "{name}");
        // The footer has no checksum: a changed type or name goes unnoticed if it still fits the
        // pages.
        assert!(
            wrong <= if checksums { 0 } else { 3 * 480 + 8 },
            "{name}: {wrong} wrong"
        );
    }
}

#[test]
fn hostile_sizes_allocate_nothing() {
    let bytes = std::fs::read(fixture("tiny.parquet")).unwrap();
    let len = bytes.len();
    for footer in [u32::MAX, 1 << 31, (len as u32) - 11, 0] {
        let mut damaged = bytes.clone();
        damaged[len - 8..len - 4].copy_from_slice(&footer.to_le_bytes());
        assert!(read_damaged(&damaged).is_err(), "{footer}");
    }
}

#[test]
fn checked_finds_every_flip_of_a_parquet_file() {
    use feedline::dataset::DatasetExt;
    let dir = Dir::new();
    let bytes = std::fs::read(fixture("tiny_nocrc.parquet")).unwrap();
    let path = dir.write("shard.parquet", &bytes);
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    let read = || -> Result<Vec<(f32, i64)>> {
        let dataset = Parquet::builder()
            .columns(["f0", "i64"])
            .open(&path)?
            .facts(dir.path("crcs"))
            .checksums()
            .open()?;
        let loader = Loader::builder(dataset)
            .workers(1)
            .tuning(|t| t.slots(1))
            .batch_size(64)
            .build()?;
        let mut rows = Vec::new();
        for batch in loader.epoch(0)? {
            let batch = batch?;
            let f0 = batch.field("f0")?;
            let i64s = batch.field("i64")?;
            rows.extend(
                f0.as_slice::<f32>()?
                    .iter()
                    .copied()
                    .zip(i64s.as_slice::<i64>()?.iter().copied()),
            );
        }
        Ok(rows)
    };
    let whole = read().unwrap();
    let mut errors = 0;
    let mut same = 0;
    for at in places(0..bytes.len(), 7) {
        let mut damaged = bytes.clone();
        damaged[at] ^= if at % 2 == 0 { 0x01 } else { 0xff };
        std::fs::write(&path, &damaged).unwrap();
        // Like a disk error, which no other check detects.
        std::fs::File::options()
            .append(true)
            .open(&path)
            .unwrap()
            .set_modified(modified)
            .unwrap();
        match read() {
            Err(_) => errors += 1,
            Ok(rows) => {
                assert_eq!(rows, whole, "byte {at}");
                same += 1;
            }
        }
    }
    println!("{errors} errors, {same} without effect");
    assert!(errors > same);
}
