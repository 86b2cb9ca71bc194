//! Datasets take all valid data, name everything they leave out, and refuse ambiguous data.

use crate::common::numeric::fixture;
use crate::common::{Dir, assert_says, must_fail};
use feedline::ErrorKind::{self, Config, Empty, NotAFile, NotFound, Shape, Truncated};
use feedline::dataset::{Dataset, Images, Npy, Npz, Records, SafeTensors, Tar, TfRecord, Tokens};
use feedline::tensor::DType;
use std::os::unix::fs::symlink;
use std::path::Path;

fn names(images: &Images, root: &Path) -> Vec<(String, Option<usize>)> {
    (0..images.len())
        .map(|id| {
            let path = images.path_of(id);
            (
                path.strip_prefix(root).unwrap().display().to_string(),
                images.class_of(id),
            )
        })
        .collect()
}

#[test]
fn class_folders_are_classes_in_the_order_of_their_names() {
    let dir = Dir::new();
    for name in [
        "b/2.PNG",
        "b/1.jpg",
        "a/z.jpeg",
        "a/deep/er/x.webp",
        "c/1.gif",
        "c/2.jpe",
    ] {
        dir.write(&format!("set/{name}"), name.as_bytes());
    }
    let root = dir.path("set");
    let images = Images::open(&root).unwrap();
    assert_eq!(images.classes(), ["a", "b", "c"]);
    let expected = [
        ("a/z.jpeg", 0),
        ("a/deep/er/x.webp", 0),
        ("b/1.jpg", 1),
        ("b/2.PNG", 1),
        ("c/1.gif", 2),
        ("c/2.jpe", 2),
    ];
    assert_eq!(
        names(&images, &root),
        expected.map(|(name, class)| (name.to_string(), Some(class)))
    );
    assert_eq!(images.schema().len(), 2);
    assert_eq!(images.sizes().sample_bytes_max, 16);
}

#[test]
fn a_flat_folder_has_no_labels() {
    let dir = Dir::new();
    dir.write("set/2.jpg", b"x");
    dir.write("set/1.jpg", b"y");
    let images = Images::open(dir.path("set")).unwrap();
    assert_eq!(
        names(&images, &dir.path("set")),
        [("1.jpg".into(), None), ("2.jpg".into(), None)]
    );
    assert_eq!(images.schema().len(), 1);
}

#[test]
fn a_pattern_of_pictures_is_a_flat_list() {
    let dir = Dir::new();
    for name in ["b/2.PNG", "b/1.jpg", "a/3.jpg", "a/deep/4.jpg", "5.jpg"] {
        dir.write(&format!("set/{name}"), b"x");
    }
    let root = dir.path("set");
    let flat = |pattern: &str| names(&Images::open(root.join(pattern)).unwrap(), &root);
    let of = |names: &[&str]| {
        names
            .iter()
            .map(|name| (name.to_string(), None))
            .collect::<Vec<_>>()
    };
    assert_eq!(flat("5.jpg"), of(&["5.jpg"]));
    assert_eq!(flat("b/*"), of(&["b/1.jpg", "b/2.PNG"]));
    assert_eq!(
        flat("**"),
        of(&["5.jpg", "a/3.jpg", "a/deep/4.jpg", "b/1.jpg", "b/2.PNG"])
    );
    assert_eq!(
        flat("**/*.jpg"),
        of(&["5.jpg", "a/3.jpg", "a/deep/4.jpg", "b/1.jpg"])
    );
    assert!(
        Images::open(root.join("a/*")).is_err(),
        "a folder with a picture"
    );
    dir.write("set/notes.txt", b"x");
    assert_eq!(Images::open(root.join("**")).unwrap().left_out()[".txt"], 1);
}

#[test]
fn left_out_files_are_counted() {
    let dir = Dir::new();
    for name in [
        "a/1.jpg",
        "a/notes.txt",
        "a/other.txt",
        "a/.DS_Store",
        "README",
        "b/1.png",
        "b/Thumbs.db",
    ] {
        dir.write(&format!("set/{name}"), b"x");
    }
    let images = Images::open(dir.path("set")).unwrap();
    assert_eq!(images.len(), 2);
    let left: Vec<_> = images
        .left_out()
        .iter()
        .map(|(ending, count)| (ending.as_str(), *count))
        .collect();
    assert_eq!(
        left,
        [
            (".db", 1),
            (".txt", 2),
            ("hidden", 1),
            ("without ending", 1)
        ]
    );
    assert_says(images.describe(), "2 .txt");
}

#[test]
fn an_impossible_folder_is_an_error_that_names_the_path() {
    type Make = fn(&Dir, &Path);
    let cases: [(&str, Make, ErrorKind, &str); 7] = [
        ("missing", |_, _| {}, NotFound, "set"),
        (
            "empty",
            |_, root| std::fs::create_dir_all(root).unwrap(),
            Empty,
            "set",
        ),
        (
            "no images",
            |dir, _| drop(dir.write("set/a.txt", b"x")),
            Empty,
            "1 .txt",
        ),
        (
            "a class without images",
            |dir, root| {
                dir.write("set/a/1.jpg", b"x");
                std::fs::create_dir_all(root.join("b")).unwrap();
            },
            Empty,
            "set/b",
        ),
        (
            "images beside class folders",
            |dir, _| {
                dir.write("set/a/1.jpg", b"x");
                dir.write("set/2.jpg", b"x");
            },
            Config,
            "2.jpg",
        ),
        (
            "a FIFO",
            |dir, root| {
                dir.write("set/a/1.jpg", b"x");
                let made = std::process::Command::new("mkfifo")
                    .arg(root.join("a/2.jpg"))
                    .status()
                    .unwrap();
                assert!(made.success());
            },
            NotAFile,
            "a/2.jpg",
        ),
        (
            "a link without a target",
            |dir, root| {
                dir.write("set/a/1.jpg", b"x");
                symlink("nowhere", root.join("a/2.jpg")).unwrap();
            },
            NotFound,
            "a/2.jpg",
        ),
    ];
    for (what, make, kind, words) in cases {
        let dir = Dir::new();
        let root = dir.path("set");
        make(&dir, &root);
        let error = Images::open(&root)
            .err()
            .unwrap_or_else(|| panic!("{what} was accepted"));
        assert!(error.to_string().contains(words), "{what}: {error}");
        assert_eq!(error.kind(), kind, "{what}: {error}");
    }
}

#[test]
fn links_are_followed_and_a_list_without_end_is_refused() {
    let dir = Dir::new();
    let set = dir.path("set");
    let other = dir.path("other");
    let real = dir.write("other/n02/1.jpg", b"x");
    dir.write("set/a/1.jpg", b"x");
    symlink(real, set.join("a/2.jpg")).unwrap();
    symlink(other.join("n02"), set.join("n02")).unwrap();
    symlink(other.join("n02"), set.join("a/more")).unwrap();
    let images = Images::open(&set).unwrap();
    assert_eq!(
        (images.len(), images.classes()),
        (4, &["a".to_string(), "n02".into()][..])
    );
    for target in [&set, &set.join("a"), &dir.path("")] {
        let link = set.join("a/loop");
        symlink(target, &link).unwrap();
        let error = Images::open(&set).err().unwrap();
        assert_eq!(
            (error.kind(), error.site().path.as_deref()),
            (NotAFile, Some(&*link)),
            "{error}"
        );
        std::fs::remove_file(link).unwrap();
    }
    // Each leads into the other.
    symlink(&set, other.join("n02/back")).unwrap();
    assert_eq!(Images::open(&set).err().unwrap().kind(), NotAFile);
}

#[test]
fn folders_of_a_class_are_in_the_order_of_their_paths() {
    let dir = Dir::new();
    for name in [
        "a/x/1.jpg",
        "a-b/1.jpg",
        "a b/1.jpg",
        "a.b/1.jpg",
        "a/2.jpg",
        "a0/1.jpg",
        "B/1.jpg",
        "3.jpg",
    ] {
        dir.write(&format!("set/class/{name}"), b"x");
    }
    let images = Images::open(dir.path("set")).unwrap();
    let root = dir.path("set/class");
    let names: Vec<_> = (0..images.len())
        .map(|id| {
            images
                .path_of(id)
                .strip_prefix(&root)
                .unwrap()
                .to_str()
                .unwrap()
                .to_string()
        })
        .collect();
    // Those of `ImageFolder`, torchvision 0.28.
    let expected = [
        "3.jpg",
        "B/1.jpg",
        "a/2.jpg",
        "a b/1.jpg",
        "a-b/1.jpg",
        "a.b/1.jpg",
        "a/x/1.jpg",
        "a0/1.jpg",
    ];
    assert_eq!(names, expected);
}

type Open = fn(&Path) -> feedline::Result<Box<dyn Dataset>>;

/// Each source of files: the endings that it takes from a folder (none: all), a file for it, its
/// call.
fn sources() -> Vec<(&'static [&'static str], &'static str, Open)> {
    vec![
        (&["tar"], "tar/small.tar", |path| {
            Ok(Box::new(Tar::open(path)?))
        }),
        (&["npy"], "npy/same-0.npy", |path| {
            Ok(Box::new(Npy::open(path)?))
        }),
        (&["npz"], "npy/unet-0.npz", |path| {
            Ok(Box::new(Npz::builder().flat("x", 1 << 20).open(path)?))
        }),
        (
            &["safetensors"],
            "safetensors/torch-0.safetensors",
            |path| Ok(Box::new(SafeTensors::open(path)?)),
        ),
        (&["bin"], "tokens/flat.bin", |path| {
            Ok(Box::new(Tokens::builder(DType::U16).window(4).open(path)?))
        }),
        (&[], "tokens/flat.bin", |path| {
            Ok(Box::new(Records::builder(2).open(path)?))
        }),
        (&[], "tfrecord/plain.tfrecord", |path| {
            Ok(Box::new(TfRecord::open(path)?))
        }),
        #[cfg(feature = "text")]
        (&["jsonl", "ndjson"], "jsonl/small.jsonl", |path| {
            Ok(Box::new(feedline::dataset::Jsonl::open(path)?))
        }),
        #[cfg(feature = "text")]
        (&["arrow", "feather", "ipc"], "arrow/small.arrow", |path| {
            let label = feedline::dataset::Arrow::builder().column("label");
            Ok(Box::new(label.open(path)?))
        }),
        #[cfg(feature = "parquet")]
        (&["parquet", "parq", "pq"], "parquet/tiny.parquet", |path| {
            Ok(Box::new(feedline::dataset::Parquet::open(path)?))
        }),
    ]
}

#[test]
fn every_source_takes_a_folders_files_or_tells() {
    for (endings, file, open) in sources() {
        let dir = Dir::new();
        let bytes = std::fs::read(fixture(file)).unwrap();
        let one = open(&dir.write("one", &bytes)).unwrap().len();
        let first = endings.first().copied().unwrap_or("data");
        let mut taken: Vec<String> = endings.iter().map(|ending| format!("a.{ending}")).collect();
        taken.extend([
            "b.".to_string() + &first.to_uppercase(),
            format!("c.x.{first}"),
        ]);
        taken
            .iter()
            .for_each(|name| drop(dir.write(&format!("set/{name}"), &bytes)));
        for name in [
            ".hidden",
            "a.fdx",
            "empty/README",
            "_log/a.PARQUET",
            ".git/a.tar",
            "_log/.x/a.npy",
        ] {
            dir.write(&format!("set/{name}"), b"not data");
        }
        if endings.is_empty() {
            std::fs::remove_dir_all(dir.path("set/empty")).unwrap();
        } else {
            dir.write("set/a.csv", b"not data");
            dir.write("set/LICENSE", b"not data");
        }
        let set = open(&dir.path("set")).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!(set.len(), one * taken.len() as u64, "{file}");
        let told = match endings.is_empty() {
            true => "; left out: 1 folder, 2 hidden",
            false => "; left out: 1 .csv, 2 folder, 2 hidden, 1 without ending",
        };
        assert!(set.describe().contains(told), "{file}: {}", set.describe());
        // A folder with more of them is no silent loss.
        dir.write(&format!("set/deep/er/d.{first}"), &bytes);
        let error = open(&dir.path("set")).err().unwrap();
        assert_eq!(error.kind(), NotAFile, "{file}: {error}");
        let pattern = dir.path("set/**");
        assert!(
            error.message().contains(&format!("{pattern:?}")),
            "{file}: {error}"
        );
        assert!(open(&dir.path("set/*")).is_err(), "{file}");
        dir.write(&format!("set/deep/er/E.{}", first.to_uppercase()), &bytes);
        let all = open(&pattern).unwrap();
        assert_eq!(all.len(), one * (taken.len() as u64 + 2), "{file}");
        assert!(
            all.describe().contains("; left out: 1 "),
            "{file}: {}",
            all.describe()
        );
        let lower = taken
            .iter()
            .filter(|name| name.ends_with(&format!(".{first}")))
            .count();
        let some = open(&dir.path(&format!("set/**/*.{first}"))).unwrap();
        assert_eq!(some.len(), one * (lower as u64 + 1), "{file}");
        // A folder of links, as download tools make it, is no less.
        std::fs::create_dir_all(dir.path("linked/snapshot")).unwrap();
        symlink(
            dir.path("one"),
            dir.path(&format!("linked/snapshot/a.{first}")),
        )
        .unwrap();
        dir.write(&format!("linked/b.{first}"), &bytes);
        assert!(open(&dir.path("linked")).is_err(), "{file}");
        assert_eq!(
            open(&dir.path("{linked,linked/snapshot}/**"))
                .unwrap()
                .len(),
            3 * one,
            "{file}"
        );
        assert_eq!(open(&dir.path("l*/**")).unwrap().len(), 2 * one, "{file}");
        // Links that lead around would give each file without end.
        symlink("../..", dir.path("set/deep/up")).unwrap();
        symlink("..", dir.path("set/deep/er/up")).unwrap();
        for pattern in ["set/**", "set/**/*.*"] {
            must_fail(open(&dir.path(pattern)), NotAFile, "remove the link");
        }
    }
}

#[test]
fn ten_thousand_files_are_indexed_in_order_by_many_threads() {
    let dir = Dir::new();
    for class in 0..10 {
        for file in 0..1000 {
            dir.write(
                &format!("set/{class}/{file:04}.jpg"),
                &vec![0; 1 + file % 7],
            );
        }
    }
    let images = Images::open(dir.path("set")).unwrap();
    assert_eq!(images.len(), 10_000);
    for id in [0, 1, 999, 1000, 5432, 9999] {
        assert_eq!(images.class_of(id), Some(id as usize / 1000));
        assert!(
            images
                .path_of(id)
                .ends_with(format!("{}/{:04}.jpg", id / 1000, id % 1000))
        );
        let source = feedline::storage::SourceId::at(id as usize);
        assert_eq!(images.sources().len_of(source), 1 + id % 1000 % 7);
    }
    let bytes = images.sizes().index_bytes + images.sources().table_bytes();
    assert!(bytes < 10_000 * 72, "{bytes} bytes");
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
        (Records::builder(10).open(&cut), Truncated, "5 left over"),
        (Records::builder(10).open(&empty), Empty, "no records"),
        (
            Records::builder(10).open(dir.path("gone")),
            NotFound,
            "gone",
        ),
        (
            Records::builder(10).open(dir.path("nothing")),
            Empty,
            "nothing",
        ),
        (Records::builder(0).open(&good), Config, "0 bytes"),
        (
            Records::builder(10).header(200).open(&good),
            Truncated,
            "header",
        ),
        (
            Records::builder(10).field("x", DType::F32, [2]).open(&good),
            Config,
            "8 bytes",
        ),
        (
            Records::builder(10).labels(&short, DType::U8).open(&good),
            Shape,
            "9 labels for 10 records",
        ),
        (
            Records::builder(10).classes(vec![1]).open(&good),
            Shape,
            "1 labels for 10 records",
        ),
        (
            Records::builder(10).open("/dev/null"),
            NotAFile,
            "/dev/null",
        ),
    ];
    for (index, (result, kind, words)) in cases.into_iter().enumerate() {
        let error = result
            .err()
            .unwrap_or_else(|| panic!("case {index} was accepted"));
        assert_eq!(error.kind(), kind, "case {index}: {error}");
        assert!(error.to_string().contains(words), "case {index}: {error}");
    }
}

#[test]
fn labels_come_from_a_file_with_their_dtype() {
    let dir = Dir::new();
    let data = dir.write("data.bin", &[7; 40]);
    let labels = dir.write("labels.bin", &[9, 0, 8, 0, 7, 0, 6, 0]);
    let records = Records::builder(10)
        .labels(labels, DType::U16)
        .open(data)
        .unwrap();
    let loader = feedline::Loader::builder(records).build().unwrap();
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    assert_eq!(
        batch.field("label").unwrap().as_slice::<u16>().unwrap(),
        [9, 8, 7, 6]
    );
    assert_eq!(batch.field("label").unwrap().shape(), [4]);
}
