//! Datasets take all valid data, name everything they leave out, and refuse ambiguous data.

use crate::common::Dir;
use feedline::ErrorKind;
use feedline::dataset::{Dataset, Images, Records};
use feedline::tensor::DType;
use std::os::unix::fs::symlink;
use std::path::Path;

fn names(images: &Images, root: &Path) -> Vec<(String, Option<usize>)> {
    (0..images.len())
        .map(|id| {
            let path = images.path_of(id);
            (path.strip_prefix(root).unwrap().display().to_string(), images.class_of(id))
        })
        .collect()
}

#[test]
fn class_folders_are_classes_in_the_order_of_their_names() {
    let dir = Dir::new();
    for name in ["b/2.PNG", "b/1.jpg", "a/z.jpeg", "a/deep/er/x.webp", "c/1.gif", "c/2.bmp"] {
        dir.write(&format!("set/{name}"), name.as_bytes());
    }
    let root = dir.path("set");
    let images = Images::open(&root).unwrap();
    assert_eq!(images.classes(), ["a", "b", "c"]);
    let expected =
        [("a/z.jpeg", 0), ("a/deep/er/x.webp", 0), ("b/1.jpg", 1), ("b/2.PNG", 1), ("c/1.gif", 2), ("c/2.bmp", 2)];
    assert_eq!(names(&images, &root), expected.map(|(name, class)| (name.to_string(), Some(class))));
    assert_eq!(images.schema().len(), 2);
    assert_eq!(images.sample_bytes_max(), 16);
}

#[test]
fn a_flat_folder_has_no_labels() {
    let dir = Dir::new();
    dir.write("set/2.jpg", b"x");
    dir.write("set/1.jpg", b"y");
    let images = Images::open(dir.path("set")).unwrap();
    assert_eq!(names(&images, &dir.path("set")), [("1.jpg".into(), None), ("2.jpg".into(), None)]);
    assert_eq!(images.schema().len(), 1);
}

#[test]
fn left_out_files_are_counted() {
    let dir = Dir::new();
    for name in ["a/1.jpg", "a/notes.txt", "a/other.txt", "a/.DS_Store", "README", "b/1.png", "b/Thumbs.db"] {
        dir.write(&format!("set/{name}"), b"x");
    }
    let images = Images::open(dir.path("set")).unwrap();
    assert_eq!(images.len(), 2);
    let left: Vec<_> = images.left_out().iter().map(|(ending, count)| (ending.as_str(), *count)).collect();
    assert_eq!(left, [(".", 1), (".db", 1), (".txt", 2), ("hidden", 1)]);
    assert!(images.describe().contains("2 .txt"), "{}", images.describe());
}

#[test]
fn an_impossible_folder_is_an_error_that_names_the_path() {
    type Make = fn(&Dir, &Path);
    let cases: [(&str, Make, ErrorKind, &str); 9] = [
        ("missing", |_, _| {}, ErrorKind::NotFound, "set"),
        ("empty", |_, root| std::fs::create_dir_all(root).unwrap(), ErrorKind::Empty, "set"),
        ("no images", |dir, _| drop(dir.write("set/a.txt", b"x")), ErrorKind::Empty, "1 .txt"),
        ("a file", |dir, _| drop(dir.write("set", b"x")), ErrorKind::Io, "set"),
        (
            "a class without images",
            |dir, root| {
                dir.write("set/a/1.jpg", b"x");
                std::fs::create_dir_all(root.join("b")).unwrap();
            },
            ErrorKind::Empty,
            "set/b",
        ),
        (
            "images beside class folders",
            |dir, _| {
                dir.write("set/a/1.jpg", b"x");
                dir.write("set/2.jpg", b"x");
            },
            ErrorKind::Config,
            "2.jpg",
        ),
        (
            "a FIFO",
            |dir, root| {
                dir.write("set/a/1.jpg", b"x");
                let made = std::process::Command::new("mkfifo").arg(root.join("a/2.jpg")).status().unwrap();
                assert!(made.success());
            },
            ErrorKind::NotAFile,
            "a/2.jpg",
        ),
        (
            "a link out of the root",
            |dir, root| {
                dir.write("set/a/1.jpg", b"x");
                let outside = dir.write("outside.jpg", b"x");
                symlink(outside, root.join("a/2.jpg")).unwrap();
            },
            ErrorKind::NotAFile,
            "a/2.jpg",
        ),
        (
            "a link without a target",
            |dir, root| {
                dir.write("set/a/1.jpg", b"x");
                symlink("nowhere", root.join("a/2.jpg")).unwrap();
            },
            ErrorKind::NotFound,
            "a/2.jpg",
        ),
    ];
    for (what, make, kind, words) in cases {
        let dir = Dir::new();
        let root = dir.path("set");
        make(&dir, &root);
        let error = Images::open(&root).err().unwrap_or_else(|| panic!("{what} was accepted"));
        assert!(error.to_string().contains(words), "{what}: {error}");
        assert_eq!(error.kind(), kind, "{what}: {error}");
    }
}

#[test]
fn links_within_the_root_may_lead_to_files_only() {
    let dir = Dir::new();
    let root = dir.path("set");
    let real = dir.write("set/a/1.jpg", b"x");
    symlink(real, root.join("a/2.jpg")).unwrap();
    assert_eq!(Images::open(&root).unwrap().len(), 2);
    symlink(&root, root.join("a/loop")).unwrap();
    assert_eq!(Images::open(&root).err().unwrap().kind(), ErrorKind::NotAFile);
}

#[test]
fn ten_thousand_files_are_indexed_in_order_by_many_threads() {
    let dir = Dir::new();
    for class in 0..10 {
        for file in 0..1000 {
            dir.write(&format!("set/{class}/{file:04}.jpg"), &vec![0; 1 + file % 7]);
        }
    }
    let images = Images::open(dir.path("set")).unwrap();
    assert_eq!(images.len(), 10_000);
    for id in [0, 1, 999, 1000, 5432, 9999] {
        assert_eq!(images.class_of(id), Some(id as usize / 1000));
        assert!(images.path_of(id).ends_with(format!("{}/{:04}.jpg", id / 1000, id % 1000)));
        let source = feedline::storage::SourceId::at(id as usize);
        assert_eq!(images.sources().len_of(source), 1 + id % 1000 % 7);
    }
    assert!(images.index_bytes() < 10_000 * 64, "{} bytes", images.index_bytes());
}

#[test]
fn records_refuse_partial_records_and_wrong_label_counts() {
    let dir = Dir::new();
    let good = dir.write("good.bin", &[0; 100]);
    let cut = dir.write("cut.bin", &[0; 105]);
    let empty = dir.write("empty.bin", &[]);
    let short = dir.write("short.labels", &[0; 9]);
    std::fs::create_dir_all(dir.path("nothing")).unwrap();
    let cases = [
        (Records::builder(10).open(&cut), ErrorKind::Truncated, "5 over"),
        (Records::builder(10).open(&empty), ErrorKind::Empty, "no records"),
        (Records::builder(10).open(dir.path("gone")), ErrorKind::NotFound, "gone"),
        (Records::builder(10).open(dir.path("nothing")), ErrorKind::Empty, "nothing"),
        (Records::builder(0).open(&good), ErrorKind::Config, "0 bytes"),
        (Records::builder(10).header(200).open(&good), ErrorKind::Truncated, "header"),
        (Records::builder(10).field("x", DType::F32, [2]).open(&good), ErrorKind::Config, "8 bytes"),
        (Records::builder(10).labels(&short, DType::U8).open(&good), ErrorKind::Shape, "9 labels for 10 records"),
        (Records::builder(10).classes(vec![1]).open(&good), ErrorKind::Shape, "1 labels for 10 records"),
        (Records::builder(10).open("/dev/null"), ErrorKind::NotAFile, "/dev/null"),
    ];
    for (index, (result, kind, words)) in cases.into_iter().enumerate() {
        let error = result.err().unwrap_or_else(|| panic!("case {index} was accepted"));
        assert_eq!(error.kind(), kind, "case {index}: {error}");
        assert!(error.to_string().contains(words), "case {index}: {error}");
    }
}

#[test]
fn labels_come_from_a_file_with_their_dtype() {
    let dir = Dir::new();
    let data = dir.write("data.bin", &[7; 40]);
    let labels = dir.write("labels.bin", &[9, 0, 8, 0, 7, 0, 6, 0]);
    let records = Records::builder(10).labels(labels, DType::U16).open(data).unwrap();
    let loader = feedline::Loader::builder(records).build().unwrap();
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.field("label").unwrap().as_slice::<u16>().unwrap(), [9, 8, 7, 6]);
    assert_eq!(batch.field("label").unwrap().shape(), [4]);
}
