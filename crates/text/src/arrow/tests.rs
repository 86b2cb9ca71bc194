//! Streams and files of pyarrow against the rows that its script wrote, and against damage.

use super::*;
use ErrorKind::{Config, Decode, Empty, Shape as Uneven, Truncated, Unsupported};
use feedline_core::dataset::sample::read;
use feedline_core::tensor::DType;

const STREAM: &[u8] = include_bytes!("../../../../tests/fixtures/arrow/small.arrow");
/// With other widths of offsets, views, and a footer.
const FILE: &[u8] = include_bytes!("../../../../tests/fixtures/arrow/small.feather");
const ROWS: u64 = 11;

/// Names and bytes.
type Files<'a> = &'a [(&'a str, &'a [u8])];

fn all() -> ArrowBuilder {
    Arrow::builder()
        .columns(["label", "text", "flag", "box", "kind"])
        .up_to("ids", 3)
        .up_to("flags", 10)
        .numbers(Field::fixed("grid", DType::I16, [2, 2]))
        .image("image")
}

/// The fields of row `k`, as tests/fixtures/make_arrow.py writes them; `None` for a null.
fn expected(k: u64) -> Vec<Option<Vec<u8>>> {
    let number = k as i64;
    let ids = (0..k % 4).flat_map(|n| ((k + n) as i32).to_le_bytes());
    let floats = [k as f32, 0.5, -1.0];
    let grid = [k as i16, 1, 2, 3];
    [
        Some((number - 3).to_le_bytes().to_vec()),
        (k != 5).then(|| b"abcdefghijklmnopq"[..k as usize + 5].to_vec()),
        Some(vec![u8::from(k.is_multiple_of(3))]),
        Some(floats.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Some([&b"cat"[..], b"dog"][k as usize % 2].to_vec()),
        Some(ids.collect()),
        Some((0..k % 11).map(|n| u8::from(n % 2 == k % 2)).collect()),
        Some(grid.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Some(vec![k as u8; k as usize]),
    ]
    .into()
}

#[test]
fn rows_of_streams_and_files_are_those_that_were_written() {
    for bytes in [STREAM, FILE] {
        let rows = all().null_zero(true).open_bytes(bytes).unwrap();
        assert_eq!(rows.len(), ROWS);
        for k in 0..ROWS {
            let expected = expected(k).into_iter().map(Option::unwrap_or_default);
            let found = read(&rows, k).unwrap();
            assert_eq!(found, expected.collect::<Vec<_>>(), "row {k}");
            for (field, bytes) in found.iter().enumerate() {
                let len = rows.field_bytes(k, field).unwrap();
                assert_eq!(len, Some(bytes.len() as u64), "row {k} field {field}");
            }
        }
    }
}

#[test]
fn values_that_are_not_held_are_read_from_the_file() {
    let mut rows = all().null_zero(true).open_bytes(STREAM).unwrap();
    let held: Vec<_> = (0..ROWS).map(|k| read(&rows, k).unwrap()).collect();
    let index = &rows.index;
    rows.held = held::read(index, &rows.schema, &rows.takes, 0).unwrap();
    rows.largest = rows.find_largest().unwrap();
    assert!(rows.held.iter().all(Option::is_none));
    let read: Vec<_> = (0..ROWS).map(|k| read(&rows, k).unwrap()).collect();
    assert_eq!(read, held);
}

#[test]
fn a_null_is_an_error_of_its_row() {
    let rows = all().open_bytes(STREAM).unwrap();
    assert!(read(&rows, 4).is_ok() && read(&rows, 6).is_ok());
    let error = read(&rows, 5).unwrap_err();
    let words = "row 5: column `text`: null; `nulls(Nulls::Zero)` reads it as 0 or empty";
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    let numbers = |dtype, dims: &[usize]| Field::fixed("ids", dtype, dims);
    let grid = |dims: &[usize]| Field::fixed("grid", DType::I16, dims);
    let cases = [
        (
            Arrow::builder(),
            "`ids` (list of i32): a list of any length: give the maximum with `up_to`",
        ),
        (
            Arrow::builder().column("x"),
            "no column `x`; there are label, ids, text",
        ),
        (
            Arrow::builder().column("image"),
            "choose one of its parts, as in \"image.bytes\", or read pictures by `image`",
        ),
        (
            Arrow::builder().column("label").column("label"),
            "named twice",
        ),
        (
            Arrow::builder().image("label"),
            "encoded pictures are bytes",
        ),
        (
            Arrow::builder().up_to("label", 4),
            "a single value, not a list",
        ),
        (
            Arrow::builder().up_to("grid", 4),
            "lists of lists need a shape",
        ),
        (
            Arrow::builder().numbers(numbers(DType::I64, &[4])),
            "i32 is stored, i64 asked for",
        ),
        (
            Arrow::builder().numbers(numbers(DType::I32, &[0])),
            "lists of no elements",
        ),
        (
            Arrow::builder().numbers(grid(&[4])),
            "lists of another shape",
        ),
    ];
    for (builder, words) in cases {
        let error = builder.open_bytes(STREAM).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.kind(), Config, "{error}");
    }
    // Of other numbers of elements are only the rows.
    for (builder, row, words) in [
        (
            Arrow::builder().numbers(numbers(DType::I32, &[2])),
            1,
            "1 values, 2 are needed",
        ),
        (
            Arrow::builder().numbers(grid(&[2, 3])),
            0,
            "lists within the list have other lengths",
        ),
    ] {
        let error = read(&builder.open_bytes(STREAM).unwrap(), row).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.kind(), Uneven, "{error}");
    }
    for (bytes, kind) in [
        (&b""[..], Unsupported),
        (b"PAR1....PAR1", Unsupported),
        (b"FEA1....", Unsupported),
        (b"no Arrow at all", Decode),
        (&STREAM[..40], Truncated),
        (&FILE[..FILE.len() - 1], Truncated),
    ] {
        let error = Arrow::builder()
            .column("label")
            .open_bytes(bytes)
            .unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
    }
}

/// The rows of damaged bytes, if they open.
fn swept(bytes: &[u8], skip: bool) -> Option<Vec<Result<Vec<Vec<u8>>>>> {
    let rows = all().skip_damage(skip).open_bytes(bytes).ok()?;
    Some((0..rows.len()).map(|k| read(&rows, k)).collect())
}

/// Every byte on request.
fn step() -> usize {
    match std::env::var_os("FEEDLINE_SWEEP") {
        Some(_) => 1,
        None => 5,
    }
}

#[test]
fn a_cut_is_an_error_and_leaves_the_rows_before_it() {
    let step = step();
    for bytes in [STREAM, FILE] {
        for len in (0..bytes.len()).rev().step_by(step) {
            assert!(swept(&bytes[..len], false).is_none(), "{len} bytes");
            for (k, row) in (0..).zip(swept(&bytes[..len], true).unwrap_or_default()) {
                let expected: Option<Vec<_>> = expected(k).into_iter().collect();
                assert_eq!(row.ok(), expected, "{len} bytes, row {k}");
            }
        }
        let longer = [bytes, &[0; 8]].concat();
        assert!(swept(&longer, false).is_none());
    }
}

#[test]
fn no_byte_that_changes_loses_a_row_in_silence() {
    let step = step();
    for bytes in [STREAM, FILE] {
        // Values themselves have no redundancy; the number of rows has.
        for at in (0..bytes.len()).step_by(step) {
            let mut bytes = bytes.to_vec();
            bytes[at] ^= [0x01, 0x80, 0xff][at % 3];
            let rows = swept(&bytes, false);
            assert!(
                rows.is_none_or(|rows| rows.len() as u64 == ROWS),
                "byte {at}"
            );
        }
    }
}

#[test]
fn a_folder_is_what_datasets_wrote_or_one_split() {
    let dir = std::env::temp_dir().join(format!("feedline-arrow-{}", std::process::id()));
    let write = |names: Files<'_>| {
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        for (name, bytes) in names {
            std::fs::write(dir.join(name), bytes).unwrap();
        }
        Arrow::builder().column("label").index(false).open(&dir)
    };
    let state = |files: &[&str], indices: &[&str]| {
        let named = |names: &[&str]| {
            let all = names
                .iter()
                .map(|name| format!(r#"{{"filename":"{name}"}}"#));
            all.collect::<Vec<_>>().join(",")
        };
        let (files, indices) = (named(files), named(indices));
        format!(r#"{{"_data_files":[{files}],"_indices_data_files":[{indices}]}}"#)
    };
    let two = state(&["b.arrow", "a.arrow"], &[]);
    let rows = write(&[
        ("a.arrow", FILE),
        ("b.arrow", STREAM),
        ("c.arrow", b""),
        ("state.json", two.as_bytes()),
    ])
    .unwrap();
    assert_eq!(rows.len(), 2 * ROWS);
    assert!(rows.sources().path(SourceId::at(0)).ends_with("b.arrow"));
    let parts = write(&[
        ("x-train-00000-of-00002.arrow", STREAM),
        ("x-train-00001-of-00002.arrow", STREAM),
    ]);
    assert_eq!(parts.unwrap().len(), 2 * ROWS);
    let indices = state(&["a.arrow"], &["indices.arrow"]);
    let outside = state(&["../a.arrow"], &[]);
    let none = state(&[], &[]);
    let cases: [(Files<'_>, ErrorKind, &str); 7] = [
        (
            &[("dataset_dict.json", br#"{"splits":["train","test"]}"#)],
            Config,
            "one of them: train, test",
        ),
        (
            &[("state.json", indices.as_bytes())],
            Config,
            "a table of indices",
        ),
        (
            &[("state.json", outside.as_bytes())],
            Decode,
            "no name of a file in the folder",
        ),
        (&[("state.json", b"{")], Decode, "cannot be read"),
        (&[("state.json", none.as_bytes())], Empty, "no files"),
        (
            &[("x-train.arrow", STREAM), ("x-test.arrow", STREAM)],
            Config,
            "several splits",
        ),
        (
            &[
                ("x-00000-of-00003.arrow", STREAM),
                ("x-00002-of-00003.arrow", STREAM),
            ],
            Truncated,
            "2 of 3 parts",
        ),
    ];
    for (files, kind, words) in cases {
        let error = write(files).unwrap_err();
        assert!(
            error.kind() == kind && error.to_string().contains(words),
            "{error}"
        );
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
