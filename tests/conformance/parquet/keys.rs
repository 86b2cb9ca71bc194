//! Columns in the names of folders, and columns that a table gives its files. The right values are
//! those of pyarrow with `partitioning="hive"`.

use super::writers::annotated;
use crate::common::{Dir, assert_says, must_fail};
use feedline::dataset::{
    Dataset, DatasetExt, FileColumn, FileValues, Nulls, Parquet, ParquetBuilder,
};
use feedline::decode::Bytes;
use feedline::{ErrorKind, Loader, Result};

/// A folder of these files; each stores the values 7 and 8 of these columns.
fn folder(files: &[&str], columns: &[&str]) -> Dir {
    let columns: Vec<_> = columns
        .iter()
        .map(|name| format!("required int32 {name};"))
        .collect();
    let bytes = annotated(&format!("message m {{ {} }}", columns.join(" ")), |_| {});
    let dir = Dir::new();
    for name in files {
        dir.write(&format!("d/{name}.parquet"), &bytes);
    }
    dir
}

/// The rows, as `7 3, 8 3`.
fn rows(dataset: Result<Parquet>) -> Result<String> {
    let dataset = dataset?;
    let text = dataset
        .schema()
        .iter()
        .filter(|field| field.as_raw().is_none());
    let text: Vec<_> = text.map(|field| field.name.clone()).collect();
    let loader = Loader::builder(dataset).batch_size(3).workers(1);
    let loader = text.iter().fold(loader, |loader, name| {
        loader.decode_field(name, Bytes::up_to(32))
    });
    let mut rows = Vec::new();
    for batch in loader.build()?.epoch(0)? {
        let batch = batch?;
        for row in 0..batch.len() {
            let values = batch.fields().map(|field| match field.lens() {
                Some(lens) => {
                    let bytes = &field.as_bytes().unwrap()[row * 32..][..lens[row] as usize];
                    String::from_utf8(bytes.to_vec()).unwrap()
                }
                None => {
                    let values = field.as_slice::<i32>().unwrap();
                    let width = values.len() / batch.len();
                    format!("{:?}", &values[row * width..][..width])
                        .trim_matches(['[', ']'])
                        .to_string()
                }
            });
            rows.push(values.collect::<Vec<_>>().join(" "));
        }
    }
    Ok(rows.join(", "))
}

fn zeros() -> ParquetBuilder {
    Parquet::builder().nulls(Nulls::Zero)
}

#[test]
fn keys_in_paths_have_the_values_of_pyarrow() {
    let table: [(&[&str], &str); 15] = [
        (&["l=3/a", "l=4/a"], "7 3, 8 3, 7 4, 8 4"),
        (&["l=01/a", "l=-2/a"], "7 -2, 8 -2, 7 1, 8 1"),
        (&["l=+1/a", "l=2/a"], "7 +1, 8 +1, 7 2, 8 2"),
        (&["l=3000000000/a"], "7 3000000000, 8 3000000000"),
        (&["l=0x1F/a"], "7 31, 8 31"),
        (&["l=-0x1/a"], "7 -0x1, 8 -0x1"),
        (&["l=3/a", "l=b/a"], "7 3, 8 3, 7 b, 8 b"),
        (&["l=2024-01-02/a"], "7 2024-01-02, 8 2024-01-02"),
        (&["y=2024/m=01/g=en/a"], "7 2024 1 en, 8 2024 1 en"),
        (&["y=1/other/m=2/a"], "7 1 2, 8 1 2"),
        (&["k%20y=a%2Fb/a"], "7 a/b, 8 a/b"),
        (&["l=50%/a", "l=a%zz/a"], "7 50%, 8 50%, 7 a%zz, 8 a%zz"),
        (&["läß=a=b/a"], "7 a=b, 8 a=b"),
        (&["y=1/y=2/a", "_x=1/a", "y=1/_a", ".z=1/a"], "7 1, 8 1"),
        (&["l=/a", "l=1/a"], "7 , 8 , 7 1, 8 1"),
    ];
    for (files, expected) in table {
        let dir = folder(files, &["x"]);
        let all = rows(Parquet::open(dir.path("d/**"))).unwrap();
        assert_eq!(all, expected, "{files:?}");
        // Only folders with a key are opened without a pattern.
        match rows(Parquet::open(dir.path("d"))) {
            Ok(rows) => assert_eq!(rows, expected, "{files:?}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotAFile, "{files:?}: {error}"),
        }
    }
}

#[test]
fn what_the_paths_do_not_tell_is_refused_by_name() {
    let null = "l=__HIVE_DEFAULT_PARTITION__/a";
    let table: [(&[&str], &[&str], ErrorKind, &str); 6] = [
        (
            &["l=3/a", null],
            &["x"],
            ErrorKind::Decode,
            "column `l` has no value in 1 of 2 files",
        ),
        (
            &["y=1/a", "y=1/m=2/a"],
            &["x"],
            ErrorKind::Decode,
            "column `m` has no value in 1 of 2 files",
        ),
        (
            &["y=1/a", "b"],
            &["x"],
            ErrorKind::Decode,
            "column `y` has no value in 1 of 2 files",
        ),
        (
            &["l=%ff/a"],
            &["x"],
            ErrorKind::Decode,
            "`l=%ff` names a column or a value that is not UTF-8",
        ),
        (
            &["=3/a"],
            &["x"],
            ErrorKind::Config,
            "`=3` names a column without a name",
        ),
        (
            &["l=9/a"],
            &["x", "l"],
            ErrorKind::Decode,
            "column `l` is stored with other values",
        ),
    ];
    for (files, columns, kind, words) in table {
        let error = must_fail(Parquet::open(folder(files, columns).path("d")), kind, words);
        assert!(error.site().path.is_some(), "{error}");
    }
    for (files, expected) in [
        (["l=3/a", null], "7 3, 8 3, 7 0, 8 0"),
        (["l=b/a", null], "7 , 8 , 7 b, 8 b"),
        (["l=3/m=1/a", "l=3/b"], "7 3 0, 8 3 0, 7 3 1, 8 3 1"),
    ] {
        let found = rows(zeros().open(folder(&files, &["x"]).path("d"))).unwrap();
        let sorted = |rows: &str| {
            let mut rows: Vec<_> = rows.split(", ").map(String::from).collect();
            rows.sort();
            rows
        };
        assert_eq!(sorted(&found), sorted(expected), "{files:?}");
    }
    // The values of the paths count if the stored ones have the same type, and the description says
    // which do not.
    for (key, expected, ignored) in [
        ("7", "7 7, 7 8", "stored values of `l`"),
        ("b", "7 7, 8 8", "values of `l` beside the stored ones"),
    ] {
        let dir = folder(&[&format!("l={key}/a")], &["l", "x"]);
        let dataset = Parquet::open(dir.path("d")).unwrap();
        assert_says(dataset.describe(), ignored);
        assert_eq!(rows(Ok(dataset)).unwrap(), expected);
    }
}

#[test]
fn keys_work_as_stored_columns_do() {
    let dir = folder(&["y=3/m=1/a", "y=4/m=2/a"], &["x"]);
    let open = |builder: ParquetBuilder| builder.open(dir.path("d"));
    let table = [
        (Parquet::builder().column("m"), "1, 1, 2, 2"),
        (
            Parquet::builder().stack("k", &["y", "m"]),
            "3, 1, 3, 1, 4, 2, 4, 2",
        ),
        (
            Parquet::builder().stack("k", &["m", "x"]),
            "1, 7, 1, 8, 2, 7, 2, 8",
        ),
        (Parquet::builder().column("x").prune("y", 4.0, 9.0), "7, 8"),
        (
            Parquet::builder().columns(["m", "x"]).prune("y", 0.0, 3.0),
            "1 7, 1 8",
        ),
    ];
    for (builder, expected) in table {
        assert_eq!(rows(open(builder)).unwrap(), expected);
    }
    let error = must_fail(
        open(Parquet::builder().column("z")),
        ErrorKind::Config,
        "no column `z`",
    );
    assert!(error.message().contains("there are x, y, m"), "{error}");
    // A file and a pattern have all keys of their path, as in pyarrow.
    for pattern in ["d/y=3/m=1/a.parquet", "d/y=3/*/*.parquet"] {
        assert_eq!(
            rows(Parquet::open(dir.path(pattern))).unwrap(),
            "7 3 1, 8 3 1"
        );
    }
    assert_eq!(rows(Parquet::open(dir.path("d/y=3"))).unwrap(), "7 1, 8 1");
}

#[test]
fn the_description_and_the_identity_have_the_keys() {
    let dir = folder(&["l=b/a", "l=b/.a", "l=b/_b"], &["x"]);
    for name in ["_SUCCESS", "l=b/.a.parquet.crc", "_metadata", "l=b/c.txt"] {
        dir.write(&format!("d/{name}"), b"x");
    }
    let dataset = Parquet::open(dir.path("d")).unwrap();
    let words = "left out: 1 .txt, 3 beginning with _, 2 hidden; columns of the paths: l";
    assert!(dataset.describe().contains(words), "{}", dataset.describe());
    assert_eq!(dataset.field_bytes_max(1).unwrap(), 1);
    let other = folder(&["l=c/a"], &["x"]);
    let other = Parquet::open(other.path("d")).unwrap();
    assert_ne!(dataset.identity(), other.identity());
}

#[test]
fn a_table_gives_its_files_values() {
    let dir = folder(&["l=1/a", "b"], &["x"]);
    let wide = annotated("message m { required int32 x; required int32 w; }", |_| {});
    dir.write("d/c.parquet", &wide);
    let files = ["l=1/a", "b", "c"].map(|name| dir.path(&format!("d/{name}.parquet")));
    let open = |builder: ParquetBuilder, count: i32| {
        let values = (0..count).map(|value| (value != 1).then_some(value));
        let column = FileColumn::new("p", FileValues::I32(values.collect()));
        builder.open_files(&files, [column])
    };
    let found = rows(open(zeros(), 3)).unwrap();
    assert_eq!(found, "7 0 0, 8 0 0, 7 0 0, 8 0 0, 7 2 7, 8 2 8");
    // A file without the column may have any value.
    let found = rows(open(Parquet::builder().column("x").prune("w", 9.0, 9.0), 3)).unwrap();
    assert!(found.starts_with("7, 8, 7, 8"), "{found}");
    let column = FileColumn::new("p", FileValues::I32(vec![None; 3]));
    must_fail(
        zeros().open_files(&files, [column.clone(), column]),
        ErrorKind::Config,
        "column `p` is given twice",
    );
    let table = [
        (
            open(Parquet::builder().columns(["x", "w"]), 3),
            ErrorKind::Decode,
            "column `w` has no value in 2 of 3 files",
        ),
        (
            open(Parquet::builder().columns(["x", "p"]), 3),
            ErrorKind::Decode,
            "column `p` has no value in 1 of 3 files",
        ),
        (
            open(zeros(), 2),
            ErrorKind::Config,
            "column `p` has 2 values for 3 files",
        ),
        (
            open(Parquet::builder().column("l"), 3),
            ErrorKind::Config,
            "no column `l`",
        ),
        (
            Parquet::builder().open_files(&files[..0], []),
            ErrorKind::Empty,
            "no files",
        ),
    ];
    for (opened, kind, words) in table {
        must_fail(opened, kind, words);
    }
    let one = open(zeros().snapshot("version 3"), 3).unwrap();
    let two = open(zeros().snapshot("version 4"), 3).unwrap();
    assert_ne!(one.identity(), two.identity());
    for words in ["version 3", "`w` is null in 2 files"] {
        assert!(one.describe().contains(words), "{}", one.describe());
    }
}
