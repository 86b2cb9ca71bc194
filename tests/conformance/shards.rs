//! A folder becomes shards: the same samples, the same bytes every time, no partial output, no silent loss.

use crate::common::Dir;
use feedline::prepare::{Format, Outcome, Reason, RestartOptions, Shards, Summary, restart_jpeg};
use feedline::{ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images").join(name)).unwrap()
}

fn transcoded(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let outcome = restart_jpeg(bytes, &RestartOptions::default(), &mut out).unwrap();
    assert!(matches!(outcome, Outcome::Transcoded { .. }));
    out
}

const NAMES: [&str; 5] = ["420.jpg", "422.jpg", "444.jpg", "gray.jpg", "restart.jpg"];

/// Three classes with `count` JPEGs each; every JPEG has its own comment, so no two are equal.
fn folder(dir: &Dir, count: usize) -> PathBuf {
    for class in 0..3 {
        for k in 0..count {
            let mut bytes = fixture(NAMES[(class + k) % NAMES.len()]);
            let number = (class * count + k) as u32;
            bytes.splice(2..2, [&[0xFF, 0xFE, 0, 6][..], &number.to_be_bytes()].concat());
            dir.write(&format!("in/class{class}/{k:04}.JPEG"), &bytes);
        }
    }
    dir.path("in")
}

fn write(shards: &Shards, from: &Path, to: &Path) -> Result<Summary> {
    shards.write(from, to, |_| ControlFlow::Continue(()))
}

/// Names in a folder, including hidden ones.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Members of a tar, read without any library: name and bytes.
fn members(path: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    let (mut at, mut out) = (0, Vec::new());
    while bytes[at] != 0 {
        let header = &bytes[at..at + 512];
        let text = |range: std::ops::Range<usize>| {
            let field = header[range].split(|byte| *byte == 0).next().unwrap();
            String::from_utf8(field.to_vec()).unwrap().trim().to_string()
        };
        let number = |range| usize::from_str_radix(&text(range), 8).unwrap();
        let sum: usize =
            header.iter().enumerate().map(|(k, b)| if (148..156).contains(&k) { 32 } else { usize::from(*b) }).sum();
        assert_eq!(number(148..156), sum, "checksum");
        assert_eq!((number(108..116), number(116..124), number(136..148)), (0, 0, 0), "owner and time");
        assert_eq!(&header[257..265], b"ustar\x0000");
        let size = number(124..136);
        out.push((text(0..100), bytes[at + 512..at + 512 + size].to_vec()));
        at += 512 + size.next_multiple_of(512);
    }
    assert!(bytes.len() == at + 1024 && bytes[at..].iter().all(|byte| *byte == 0), "two empty blocks end a tar");
    out
}

/// All samples of all tar shards: key, image, label.
fn samples(dir: &Path) -> Vec<(String, Vec<u8>, String)> {
    let mut out = Vec::new();
    for name in names(dir).iter().filter(|name| name.ends_with(".tar")) {
        for pair in members(&dir.join(name)).chunks(2) {
            let [(image, bytes), (class, label)] = pair else { panic!("{pair:?}") };
            let key = image.strip_suffix(".jpg").unwrap();
            assert_eq!(class, &format!("{key}.cls"));
            out.push((key.to_string(), bytes.clone(), String::from_utf8(label.clone()).unwrap()));
        }
    }
    out
}

#[test]
fn the_tars_hold_every_picture_once_in_folder_order() {
    let dir = Dir::new();
    let (from, to) = (folder(&dir, 7), dir.path("out"));
    let summary = write(&Shards::new(Format::Tar).samples_per_shard(5), &from, &to).unwrap();
    assert_eq!((summary.pictures, summary.transcoded, summary.files, summary.damaged), (21, 21, 5, 0));
    let shards: Vec<_> = (0..5).map(|k| format!("shard-{k:06}.tar")).collect();
    assert_eq!(names(&to), [&["manifest.tsv".to_string()], &shards[..]].concat());
    let samples = samples(&to);
    assert_eq!(samples.len(), 21);
    let manifest = std::fs::read_to_string(to.join("manifest.tsv")).unwrap();
    let mut lines = manifest.lines().skip(1);
    for (k, (key, bytes, label)) in samples.iter().enumerate() {
        let (class, number) = (k / 7, k % 7);
        let source = format!("class{class}/{number:04}.JPEG");
        let input = std::fs::read(from.join(&source)).unwrap();
        assert_eq!((key, label), (&format!("{k:08}"), &class.to_string()));
        assert!(*bytes == transcoded(&input), "{source}");
        let line: Vec<&str> = lines.next().unwrap().split('\t').collect();
        let shard = format!("shard-{:06}.tar", k / 5);
        let sizes = (input.len().to_string(), bytes.len().to_string());
        assert_eq!([line[0], line[1], line[2], line[3]], [key, &*shard, label, &*source]);
        assert!(line[4].starts_with("restarts every "), "{line:?}");
        assert_eq!((line[5], line[6]), (&*sizes.0, &*sizes.1));
    }
    assert_eq!(lines.next(), None);
    let sum = samples.iter().map(|(_, bytes, _)| bytes.len() as u64).sum::<u64>();
    assert_eq!((summary.bytes.1, summary.transcoded_bytes.1), (sum, sum));
}

#[test]
fn shards_do_not_depend_on_the_number_of_workers() {
    let dir = Dir::new();
    let from = folder(&dir, 100);
    let run = |name: &str, seed: Option<u64>, workers: usize| {
        let mut shards = Shards::new(Format::Tar).bytes_per_shard(100_000).workers(workers);
        if let Some(seed) = seed {
            shards = shards.shuffle(seed);
        }
        let to = dir.path(name);
        write(&shards, &from, &to).unwrap();
        names(&to)
            .into_iter()
            .map(|name| (name.clone(), std::fs::read(to.join(name)).unwrap()))
            .collect::<BTreeMap<_, _>>()
    };
    let one = run("one", Some(3), 1);
    assert!(one.len() > 4, "{:?}", one.keys());
    assert!(one == run("three", Some(3), 3), "the number of workers shows");
    let (plain, other) = (run("plain", None, 2), run("other", Some(4), 2));
    assert!(one != plain && one != other);
    let sorted = |name: &str| {
        let mut all: Vec<_> = samples(&dir.path(name)).into_iter().map(|(_, bytes, label)| (bytes, label)).collect();
        all.sort();
        all
    };
    assert!(sorted("one") == sorted("plain") && sorted("one") == sorted("other"), "a shuffle loses or doubles samples");
    // Well mixed: every stretch has all classes.
    assert!(samples(&dir.path("one")).chunks(30).all(|part| part.iter().any(|(.., label)| label == "2")));
    for (name, bytes) in one.iter().filter(|(name, _)| name.ends_with(".tar")) {
        assert!(bytes.len() < 100_000 + 1024 * 200, "{name} has {} bytes", bytes.len());
    }
}

#[test]
fn a_file_that_is_not_transcoded_is_copied() {
    let dir = Dir::new();
    let inputs = [
        ("in/a.jpg", "420.jpg"),
        ("in/b.jpeg", "progressive.jpg"),
        ("in/c.png", "rgb.png"),
        ("in/d.JFIF", "progressive-444.jpg"),
        ("in/e.jpg", "rgba.png"),
    ];
    for (name, source) in inputs {
        dir.write(name, &fixture(source));
    }
    dir.write("in/notes.txt", b"x");
    let (from, to) = (dir.path("in"), dir.path("out"));
    let summary = write(&Shards::new(Format::Tar), &from, &to).unwrap();
    let expected = [(Reason::NotJpeg, (2, from.join("c.png"))), (Reason::Progressive, (2, from.join("b.jpeg")))];
    assert_eq!(summary.unchanged, BTreeMap::from(expected));
    assert_eq!(summary.left_out, BTreeMap::from([(".txt".to_string(), 1)]));
    let text = summary.to_string();
    for words in ["2: progressive (the first is", "2: not a JPEG", "1: .txt", "transcoded  1,"] {
        assert!(text.contains(words), "{text}");
    }
    // A flat folder has no labels. The ending is the original one, but the same for all JPEGs.
    let found = members(&to.join("shard-000000.tar"));
    let endings = ["jpg", "jpg", "png", "jpg", "jpg"];
    assert_eq!(found.len(), 5);
    for (k, (name, bytes)) in found.iter().enumerate() {
        let input = fixture(inputs[k].1);
        assert_eq!(name, &format!("{k:08}.{}", endings[k]));
        assert!(*bytes == if k == 0 { transcoded(&input) } else { input });
    }
}

#[test]
fn files_keep_their_tree_and_names() {
    let dir = Dir::new();
    let (from, to) = (folder(&dir, 3), dir.path("deep/er/out"));
    dir.write("in/class0/sub/x.png", &fixture("rgb.png"));
    let summary = write(&Shards::new(Format::Files).shuffle(1), &from, &to).unwrap();
    assert_eq!((summary.files, summary.transcoded), (10, 9));
    assert_eq!(names(&to), ["class0", "class1", "class2"]);
    assert_eq!(names(&to.join("class0")), ["0000.JPEG", "0001.JPEG", "0002.JPEG", "sub"]);
    assert!(std::fs::read(to.join("class0/sub/x.png")).unwrap() == fixture("rgb.png"));
    for class in 0..3 {
        for k in 0..3 {
            let name = format!("class{class}/{k:04}.JPEG");
            assert!(std::fs::read(to.join(&name)).unwrap() == transcoded(&std::fs::read(from.join(&name)).unwrap()));
        }
    }
}

#[test]
fn a_damaged_picture_ends_the_run_or_is_in_the_ledger() {
    for format in [Format::Tar, Format::Files] {
        let dir = Dir::new();
        let from = folder(&dir, 3);
        let cut = fixture("420.jpg")[..800].to_vec();
        dir.write("in/class1/0001.JPEG", &cut);
        dir.write("in/class2/0000.JPEG", b"");
        dir.write("in/class2/tab\t\\ \u{e9}.jpg", &cut);
        let error = write(&Shards::new(format), &from, &dir.path("refused")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
        assert!(error.site().path.as_ref().unwrap().ends_with("class1/0001.JPEG"), "{error}");
        assert!(error.site().offset.is_some() && error.site().sample == Some(4), "{error}");
        if format == Format::Tar {
            assert_eq!(names(&dir.path("refused")), [""; 0], "what was half written is still there");
        }
        let to = dir.path("skipped");
        let summary = write(&Shards::new(format).skip_damaged(true), &from, &to).unwrap();
        assert_eq!((summary.damaged, summary.transcoded, summary.pictures), (3, 7, 10));
        assert!(summary.to_string().contains("3: damaged, listed in damaged.tsv"), "{summary}");
        let ledger = std::fs::read_to_string(to.join("damaged.tsv")).unwrap();
        let lines: Vec<&str> = ledger.lines().skip(1).collect();
        assert_eq!(lines.len(), 3, "{ledger}");
        assert!(lines[0].starts_with("class1/0001.JPEG\tdecode: truncated"), "{ledger}");
        assert!(lines[1].starts_with("class2/0000.JPEG\tdecode: empty"), "{ledger}");
        assert!(lines[2].starts_with("class2/tab\\x09\\x5c \u{e9}.jpg\t"), "{ledger}");
        if format == Format::Tar {
            let keys: Vec<_> = samples(&to).into_iter().map(|(key, ..)| key).collect();
            assert_eq!(keys, (0..7).map(|k| format!("{k:08}")).collect::<Vec<_>>(), "keys have no gaps");
        } else {
            assert!(!to.join("class1/0001.JPEG").exists());
        }
    }
    let dir = Dir::new();
    dir.write("in/a.jpg", b"");
    let shards = Shards::new(Format::Tar).skip_damaged(true);
    assert_eq!(write(&shards, &dir.path("in"), &dir.path("out")).unwrap_err().kind(), ErrorKind::Empty);
}

#[test]
fn a_file_changed_during_the_run_is_not_damage() {
    let dir = Dir::new();
    let from = folder(&dir, 200);
    // The last window is made only after the first two were written.
    let victim = from.join("class2/0199.JPEG");
    let result = Shards::new(Format::Tar).skip_damaged(true).write(&from, dir.path("out"), |progress| {
        if progress.pictures == 256 {
            std::fs::write(&victim, b"another length").unwrap();
        }
        ControlFlow::Continue(())
    });
    let error = result.unwrap_err();
    assert_eq!((error.kind(), error.site().path.as_deref()), (ErrorKind::Changed, Some(&*victim)), "{error}");
}

#[test]
fn existing_shards_are_kept_unless_overwriting_is_allowed() {
    let dir = Dir::new();
    let (from, to) = (folder(&dir, 4), dir.path("out"));
    let shards = Shards::new(Format::Tar).samples_per_shard(2);
    write(&shards, &from, &to).unwrap();
    dir.write("out/keep.me", b"mine");
    dir.write("out/shard-x.tar", b"mine");
    let before = names(&to);
    let error = write(&shards, &from, &to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("not empty"), "{error}");
    assert_eq!(names(&to), before);
    // Fewer shards than before: shards and indexes of the earlier run must not stay among them.
    dir.write("out/shard-000003.tar.0a1b2c3d.fdx", b"an index");
    write(&shards.clone().samples_per_shard(6).overwrite(true), &from, &to).unwrap();
    assert_eq!(names(&to), ["keep.me", "manifest.tsv", "shard-000000.tar", "shard-000001.tar", "shard-x.tar"]);
    assert_eq!(std::fs::read(to.join("shard-x.tar")).unwrap(), b"mine");
    std::fs::remove_file(to.join("shard-x.tar")).unwrap();
    assert_eq!(samples(&to).len(), 12);
}

#[test]
fn files_of_a_killed_run_are_no_obstacle() {
    let dir = Dir::new();
    let (from, to) = (folder(&dir, 1), dir.path("out"));
    dir.write("out/.shard-000000.tar.partial", b"half a shard");
    dir.write("out/.manifest.tsv.partial", b"half a manifest");
    write(&Shards::new(Format::Tar), &from, &to).unwrap();
    assert_eq!(names(&to), ["manifest.tsv", "shard-000000.tar"]);
}

#[test]
fn a_refused_run_after_an_interrupted_one_removes_nothing() {
    let dir = Dir::new();
    let (from, to) = (folder(&dir, 1), dir.path("out"));
    let shards = Shards::new(Format::Tar).samples_per_shard(2);
    let left = [".manifest.tsv.partial", ".shard-000001.tar.partial", "shard-000000.tar"];
    left.iter().for_each(|name| drop(dir.write(&format!("out/{name}"), b"half")));
    let error = write(&shards, &from, &to).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    for words in ["2 hidden files of a run that was interrupted", "overwrite(true)"] {
        assert!(error.message().contains(words), "{error}");
    }
    assert_eq!(names(&to), left);
    write(&shards.overwrite(true), &from, &to).unwrap();
    assert!(names(&to).iter().all(|name| !name.ends_with("partial")), "{:?}", names(&to));
}

#[test]
fn nested_input_and_output_folders_are_refused() {
    let dir = Dir::new();
    let from = folder(&dir, 1);
    std::os::unix::fs::symlink(&from, dir.path("link")).unwrap();
    for to in [from.clone(), from.join("new/out"), dir.path("link/out"), dir.path("")] {
        let error = write(&Shards::new(Format::Files).overwrite(true), &from, &to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    assert_eq!(names(&from), ["class0", "class1", "class2"]);
}

#[test]
fn a_cancelled_run_leaves_whole_shards_only() {
    let dir = Dir::new();
    let (from, to) = (folder(&dir, 200), dir.path("out"));
    let mut calls = Vec::new();
    let error = Shards::new(Format::Tar).samples_per_shard(100).write(&from, &to, |progress| {
        calls.push((progress.pictures, progress.total));
        if calls.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(calls, [(256, 600), (512, 600)]);
    let expected: Vec<_> = (0..5).map(|k| format!("shard-{k:06}.tar")).collect();
    assert_eq!(names(&to), expected, "no manifest, no hidden file, no sixth shard");
    assert_eq!(samples(&to).len(), 500);
}

#[test]
fn a_full_disk_is_named_and_leaves_no_partial_file() {
    let dir = Dir::new();
    let (from, to) = (folder(&dir, 200), dir.path("out"));
    let error = Shards::new(Format::Tar).samples_per_shard(100).write(&from, &to, |progress| {
        if progress.pictures == 256 {
            // The fifth shard is written to a device that is always full.
            std::os::unix::fs::symlink("/dev/full", to.join(".shard-000004.tar.partial")).unwrap();
        }
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("the disk is full"), "{error}");
    assert!(error.site().path.as_ref().unwrap().ends_with("shard-000004.tar"), "{error}");
    assert_eq!(names(&to), (0..4).map(|k| format!("shard-{k:06}.tar")).collect::<Vec<_>>());
}

#[cfg(feature = "parquet")]
mod parquet_shards {
    use super::*;
    use arrow_array::cast::AsArray;
    use arrow_array::types::Int64Type;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
    use parquet::basic::{Compression, Encoding};
    use parquet::file::metadata::ParquetMetaDataReader;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use std::fs::File;

    fn read(path: &Path) -> Vec<(Vec<u8>, i64)> {
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap().build().unwrap();
        let mut out = Vec::new();
        for batch in reader {
            let batch = batch.unwrap();
            let (images, labels) = (batch.column(0).as_binary::<i32>(), batch.column(1).as_primitive::<Int64Type>());
            out.extend(
                images.iter().zip(labels.iter()).map(|(image, label)| (image.unwrap().to_vec(), label.unwrap())),
            );
        }
        out
    }

    #[test]
    fn parquet_shards_hold_the_same_samples_as_tars() {
        let dir = Dir::new();
        let from = folder(&dir, 250);
        write(&Shards::new(Format::Tar).shuffle(5), &from, &dir.path("tar")).unwrap();
        let shards = Shards::new(Format::Parquet).shuffle(5).samples_per_shard(600);
        let summary = write(&shards, &from, &dir.path("parquet")).unwrap();
        assert_eq!(summary.files, 2);
        let names = names(&dir.path("parquet"));
        assert_eq!(names, ["manifest.tsv", "shard-000000.parquet", "shard-000001.parquet"]);
        let rows: Vec<_> = names[1..].iter().flat_map(|name| read(&dir.path("parquet").join(name))).collect();
        let tar = samples(&dir.path("tar"));
        assert_eq!(rows.len(), 750);
        assert!(rows.iter().zip(&tar).all(|(row, (_, image, label))| row.0 == *image && row.1.to_string() == *label));
    }

    #[test]
    fn pages_are_plain_and_the_offset_index_is_there() {
        let dir = Dir::new();
        let from = folder(&dir, 250);
        write(&Shards::new(Format::Parquet), &from, &dir.path("out")).unwrap();
        let file = File::open(dir.path("out/shard-000000.parquet")).unwrap();
        let metadata = ParquetMetaDataReader::new().parse_and_finish(&file).unwrap();
        let rows: Vec<i64> = metadata.row_groups().iter().map(|group| group.num_rows()).collect();
        assert_eq!(rows, [512, 238]);
        for column in metadata.row_groups().iter().flat_map(|group| group.columns()) {
            assert_eq!(column.compression(), Compression::UNCOMPRESSED);
            assert!(column.dictionary_page_offset().is_none() && column.offset_index_offset().is_some());
            let encodings: Vec<Encoding> = column.encodings().collect();
            assert!(!encodings.contains(&Encoding::RLE_DICTIONARY) && encodings.contains(&Encoding::PLAIN));
        }
    }

    #[test]
    fn pages_hold_about_a_mebibyte() {
        let dir = Dir::new();
        let mut bytes = fixture("420.jpg");
        bytes.splice(2..2, [&[0xFF, 0xFE, 0xFF, 0xFF][..], &[7; 65533]].concat());
        (0..70).for_each(|k| drop(dir.write(&format!("in/{k:02}.jpg"), &bytes)));
        write(&Shards::new(Format::Parquet), &dir.path("in"), &dir.path("out")).unwrap();
        let file = SerializedFileReader::new(File::open(dir.path("out/shard-000000.parquet")).unwrap()).unwrap();
        let group = file.get_row_group(0).unwrap();
        let pages: Vec<_> = group.get_column_page_reader(0).unwrap().map(|page| page.unwrap().num_values()).collect();
        assert_eq!(pages, [16, 16, 16, 16, 6]);
    }

    #[test]
    fn a_flat_folder_has_no_label_and_a_failed_run_leaves_nothing() {
        let dir = Dir::new();
        dir.write("in/a.jpg", &fixture("420.jpg"));
        write(&Shards::new(Format::Parquet), &dir.path("in"), &dir.path("out")).unwrap();
        let file = File::open(dir.path("out/shard-000000.parquet")).unwrap();
        let schema = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().schema().clone();
        assert_eq!(schema.fields().iter().map(|field| field.name().as_str()).collect::<Vec<_>>(), ["image"]);
        dir.write("in/b.jpg", b"\xFF\xD8\xFF");
        let to = dir.path("failed");
        assert_eq!(
            write(&Shards::new(Format::Parquet), &dir.path("in"), &to).unwrap_err().kind(),
            ErrorKind::Truncated
        );
        assert_eq!(names(&to), [""; 0]);
    }

    #[test]
    fn a_full_disk_is_named_for_parquet_too() {
        let dir = Dir::new();
        let (from, to) = (folder(&dir, 200), dir.path("out"));
        let error = Shards::new(Format::Parquet).samples_per_shard(100).write(&from, &to, |progress| {
            if progress.pictures == 256 {
                std::os::unix::fs::symlink("/dev/full", to.join(".shard-000004.parquet.partial")).unwrap();
            }
            ControlFlow::Continue(())
        });
        let error = error.unwrap_err();
        assert!(error.to_string().contains("the disk is full"), "{error}");
        assert_eq!(names(&to), (0..4).map(|k| format!("shard-{k:06}.parquet")).collect::<Vec<_>>());
    }
}
