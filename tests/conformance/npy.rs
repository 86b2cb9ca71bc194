//! npy and npz: numpy's values are read one by one; damaged and refused files are errors that name
//! the reason.

use crate::common::numeric;
use crate::common::numeric::{Row, cases, check, fixture, flips_each, load, one, seen, sweep};
use crate::common::{Dir, assert_says, must_say};
use feedline::dataset::{Dataset, Npy, Npz};
use feedline::tensor::Shape;
use feedline::{ErrorKind, Loader};

fn npy(name: &str) -> std::path::PathBuf {
    fixture("npy").join(name)
}

#[test]
fn every_dtype_shape_and_version_is_read_as_numpy_does() {
    for prefix in [
        "dtype-",
        "shape-scalar",
        "shape-vector",
        "shape-cube",
        "shape-row",
        "version-",
        "both-orders",
    ] {
        for case in cases("npy", prefix) {
            let dataset = Npy::open(npy(&case.file)).unwrap();
            let field = dataset.schema()[0].as_raw().unwrap();
            assert_eq!(
                (field.dtype().name(), field.dims()),
                (case.dtype.as_str(), case.shape.clone()),
                "{case:?}"
            );
            check(|| Npy::open(npy(&case.file)), &[one("array", &case.bytes)]);
        }
    }
}

#[test]
fn each_file_of_a_folder_is_a_sample_in_order_of_names() {
    let expected: Vec<Row> = cases("npy", "same-")
        .iter()
        .map(|case| one("x", &case.bytes))
        .collect();
    assert_eq!(expected.len(), 4);
    for uniform in [false, true] {
        check(
            || {
                Npy::builder()
                    .field("x", npy("same-{0..3}.npy"))
                    .uniform(uniform)
                    .open()
            },
            &expected,
        );
        check(
            || {
                Npy::builder()
                    .field("x", npy("same-*.npy"))
                    .uniform(uniform)
                    .open()
            },
            &expected,
        );
    }
    let dataset = Npy::open(npy("same-*.npy")).unwrap();
    assert_eq!((dataset.len(), dataset.sizes().sample_bytes_max), (4, 24));
    assert_says(
        dataset.describe(),
        "4 npy arrays (array f32 [2, 3]) in 4 files",
    );
}

#[test]
fn first_dimensions_may_vary_and_are_padded_with_zeros() {
    let files = cases("npy", "ragged-");
    let expected: Vec<Row> = files.iter().map(|case| one("x", &case.bytes)).collect();
    check(
        || {
            Npy::builder()
                .field("x", npy("ragged-*.npy"))
                .up_to("x", 5)
                .open()
        },
        &expected,
    );
    let dataset = Npy::builder()
        .field("x", npy("ragged-*.npy"))
        .up_to("x", 3)
        .open()
        .unwrap();
    assert_eq!(
        *dataset.schema()[0].as_raw().unwrap().shape(),
        Shape::UpTo {
            max: 3,
            inner: vec![2]
        }
    );
    assert_eq!(dataset.sizes().largest_sample, Some(3));
    let loader = Loader::builder(dataset).batch_size(4).build().unwrap();
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.field("x").unwrap().lens().unwrap(), [0, 1, 2, 3]);
    assert_eq!(batch.field("x").unwrap().shape(), [4, 3, 2]);
    let error = Npy::builder()
        .field("x", npy("ragged-*.npy"))
        .up_to("x", 2)
        .open()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shape);
    assert!(
        error
            .to_string()
            .contains("3 is more than the maximum of 2: path=")
            && error.to_string().contains("ragged-3")
    );
    let error = Npy::open(npy("ragged-*.npy")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shape, "{error}");
}

#[test]
fn arrays_of_any_shape_come_flat_with_a_shape_field() {
    let files = cases("npy", "ragged-");
    let expected: Vec<Row> = (0_i64..)
        .zip(&files)
        .map(|(rows, case)| {
            let shape = [rows.to_le_bytes(), 2_i64.to_le_bytes()].concat();
            [one("x", &case.bytes), one("x.shape", &shape)].concat()
        })
        .collect();
    check(
        || {
            Npy::builder()
                .field("x", npy("ragged-*.npy"))
                .flat("x", 10)
                .open()
        },
        &expected,
    );
}

#[test]
fn rows_of_tables_follow_each_other_file_by_file() {
    let rows = cases("npy", "rows-");
    let expected: Vec<Row> = rows
        .iter()
        .flat_map(|case| (0..case.shape[0]).map(|row| one("y", &case.row(row))))
        .collect();
    assert_eq!(expected.len(), 3 + 4 + 3 + 4);
    check(
        || Npy::builder().field("y", npy("rows-*.npy")).rows().open(),
        &expected,
    );
    // Two fields from other files, cut in other places: 14 rows each.
    let dir = Dir::new();
    let header = |rows: usize| {
        let dict = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows},), }}\n");
        [
            b"\x93NUMPY\x01\x00",
            &(dict.len() as u16).to_le_bytes()[..],
            dict.as_bytes(),
        ]
        .concat()
    };
    for (part, range) in [(0, 0..9_u8), (1, 9..9), (2, 9..14)] {
        let bytes = [header(range.len()), range.collect()].concat();
        dir.write(&format!("labels-{part}.npy"), &bytes);
    }
    let open = || {
        Npy::builder()
            .field("y", npy("rows-*.npy"))
            .field("label", dir.path("labels-*.npy"))
            .rows()
            .open()
    };
    let expected: Vec<Row> = (0_u8..)
        .zip(expected)
        .map(|(label, row)| [row, one("label", &[label])].concat())
        .collect();
    check(open, &expected);
    dir.write("labels-2.npy", &[header(4), vec![9, 10, 11, 12]].concat());
    must_say(open(), "`label` has 13 rows, `y` has 14");
}

#[test]
fn files_are_paired_by_their_names() {
    let dir = Dir::new();
    let array = std::fs::read(npy("same-0.npy")).unwrap();
    for name in ["1_x.npy", "1_y.npy", "2_x.npy", "2_y.npy"] {
        dir.write(name, &array);
    }
    let open = || {
        Npy::builder()
            .field("x", dir.path("*_x.npy"))
            .field("y", dir.path("*_y.npy"))
            .open()
    };
    assert_eq!(open().unwrap().len(), 2);
    dir.write("3_x.npy", &array);
    assert_eq!(open().unwrap_err().kind(), ErrorKind::Shape);
    dir.write("4_y.npy", &array);
    let error = open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(
        error.to_string().contains("4_y.npy") && error.to_string().contains("3_x.npy"),
        "{error}"
    );
}

#[test]
fn archives_are_read_as_dlio_and_numpy_write_them() {
    let x = cases("npy", "unet-");
    let expected: Vec<Row> = x
        .chunks(2)
        .map(|pair| {
            let shape: Vec<u8> = pair[0]
                .shape
                .iter()
                .flat_map(|dim| (*dim as i64).to_le_bytes())
                .collect();
            [
                one("x", &pair[0].bytes),
                one("x.shape", &shape),
                one("y", &pair[1].bytes),
            ]
            .concat()
        })
        .collect();
    assert_eq!(expected.len(), 4);
    for verify in [false, true] {
        check(
            || {
                Npz::builder()
                    .flat("x", 100)
                    .verify(verify)
                    .open(npy("unet-*.npz"))
            },
            &expected,
        );
    }
    let labels: Vec<Row> = x.chunks(2).map(|pair| one("y", &pair[1].bytes)).collect();
    check(
        || Npz::builder().fields(["y"]).open(npy("unet-*.npz")),
        &labels,
    );
    must_say(
        Npz::open(npy("unet-*.npz")),
        "`x` is u8 [3, 4, 1] here and u8 [2, 5, 1] in the first file; `flat`",
    );
}

#[test]
fn a_rule_for_what_varies_leaves_other_members_as_they_are() {
    let x = |rows: i32| {
        (0..2 * rows)
            .flat_map(|k| (k as f32).to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let scalars = |k: i64| {
        [
            one("y", &(k + 7).to_le_bytes()),
            one("z", &(k as i32).to_le_bytes()),
        ]
        .concat()
    };
    let expected: Vec<Row> = [(3, 0), (5, 1)]
        .map(|(rows, k)| [one("x", &x(rows)), scalars(k)].concat())
        .into_iter()
        .collect();
    check(
        || Npz::builder().up_to("*", 8).open(npy("mixed-*.npz")),
        &expected,
    );
    let dataset = Npz::builder()
        .up_to("*", 8)
        .open(npy("mixed-*.npz"))
        .unwrap();
    let shapes: Vec<Shape> = dataset
        .schema()
        .iter()
        .map(|field| field.as_raw().unwrap().shape().clone())
        .collect();
    assert_eq!(
        shapes,
        [
            Shape::UpTo {
                max: 8,
                inner: vec![2]
            },
            Shape::Fixed(vec![1]),
            Shape::Fixed(vec![])
        ]
    );
    // A rule by name goes before, and is for one shape, too.
    let named = Npz::builder()
        .fields(["x", "y"])
        .up_to("y", 2)
        .flat("*", 10)
        .open(npy("mixed-*.npz"))
        .unwrap();
    let names: Vec<String> = named
        .schema()
        .iter()
        .map(|field| format!("{} {}", field.name, field.encoding))
        .collect();
    assert_eq!(
        names,
        ["x f32 up to [10]", "x.shape i64 [2]", "y i64 up to [2]"]
    );
    let open = |builder: feedline::dataset::NpzBuilder| {
        builder.open(npy("mixed-*.npz")).unwrap_err().to_string()
    };
    assert!(open(Npz::builder().up_to("*", 4)).contains("5 is more than the maximum of 4"));
    assert!(open(Npz::builder().up_to("*", 8).flat("*", 8)).contains("`*` has two rules"));
    assert!(
        open(Npz::builder().fields(["z"]).up_to("z", 8))
            .contains("`z` is i32 []: a scalar has no first dimension")
    );
    assert!(open(Npz::builder().rows().up_to("*", 8)).contains("`x`: rows have one shape"));
    let same = Npy::builder()
        .field("x", npy("same-*.npy"))
        .up_to("*", 9)
        .open()
        .unwrap();
    assert_eq!(
        *same.schema()[0].as_raw().unwrap().shape(),
        Shape::Fixed(vec![2, 3])
    );
}

#[test]
fn a_member_that_is_no_array_of_numbers_is_named() {
    let dir = Dir::new();
    let text = std::fs::read(npy("text.npz")).unwrap();
    dir.write("text.npz", &text);
    let error = Npz::open(dir.path("text.npz")).unwrap_err().to_string();
    assert_says(
        &error,
        "`names.npy`: text (`<U2`) is not supported in a batch",
    );
    assert_eq!(
        Npz::builder()
            .fields(["x"])
            .open(dir.path("text.npz"))
            .unwrap()
            .len(),
        1
    );
    // The header of the array of text, and its array of 2 times 2 letters, in place of an array.
    let at = text
        .windows(9)
        .rposition(|bytes| bytes == b"names.npy")
        .unwrap();
    let local = u32::from_le_bytes(text[at - 4..at].try_into().unwrap()) as usize;
    let magic = local
        + text[local..]
            .windows(6)
            .position(|bytes| bytes == b"\x93NUMPY")
            .unwrap();
    let mut broken = text.clone();
    broken[magic..magic + 6].copy_from_slice(b"hello ");
    dir.write("text.npz", &broken);
    let error = Npz::open(dir.path("text.npz")).unwrap_err().to_string();
    assert_says(
        &error,
        "`names.npy`: not an npy array: it starts with [68, 65, 6c, 6c, 6f, 20]",
    );
}

/// As Python's zipfile, by which `np.load` reads.
#[test]
fn bytes_behind_an_archive_and_folders_in_it_are_passed() {
    let dir = Dir::new();
    let good = std::fs::read(npy("table.npz")).unwrap();
    let whole: Row = cases("npy", "table.npz")
        .iter()
        .flat_map(|case| one(&case.member, &case.bytes))
        .collect();
    let (body, end) = good.split_at(good.len() - 22);
    let word = |at: usize| u32::from_le_bytes(end[at..at + 4].try_into().unwrap());
    let (members, directory) = body.split_at(word(16) as usize);
    let part = |magic: &[u8], len: usize, name_at: usize| {
        let mut out = [magic, &vec![0; len - 4]].concat();
        out[name_at] = 4;
        out.extend(b"sub/");
        out
    };
    let local = part(b"PK\x03\x04", 30, 26);
    let mut entry = part(b"PK\x01\x02", 46, 28);
    entry[42..46].copy_from_slice(&word(16).to_le_bytes());
    let mut last = end.to_vec();
    last[8] = end[8] + 1;
    last[10] = end[10] + 1;
    last[12..16].copy_from_slice(&(word(12) + 50).to_le_bytes());
    last[16..20].copy_from_slice(&(word(16) + 34).to_le_bytes());
    let folder = [members, &local, directory, &entry, &last].concat();
    let behind = [&b"\n"[..], &[0; 512], &[7; 65_535]].map(|behind| [&good[..], behind].concat());
    for bytes in behind.into_iter().chain([folder]) {
        dir.write("a.npz", &bytes);
        check(
            || Npz::open(dir.path("a.npz")),
            std::slice::from_ref(&whole),
        );
    }
}

#[test]
fn rows_of_an_archive_can_be_samples() {
    let table = cases("npy", "table.npz");
    let expected: Vec<Row> = (0..6)
        .map(|row| {
            table
                .iter()
                .flat_map(|case| one(&case.member, &case.row(row)))
                .collect()
        })
        .collect();
    check(|| Npz::builder().rows().open(npy("table.npz")), &expected);
    let whole: Row = table
        .iter()
        .flat_map(|case| one(&case.member, &case.bytes))
        .collect();
    check(|| Npz::open(npy("table.npz")), &[whole]);
}

#[test]
fn the_error_of_a_refused_array_says_what_to_do() {
    let cases = [
        ("refused-fortran.npy", "np.ascontiguousarray"),
        ("refused-big-endian.npy", "byte order"),
        ("refused-objects.npy", "never read"),
        ("refused-complex.npy", "`<c8`"),
        ("refused-text.npy", "`<U2`"),
        ("refused-bytes.npy", "`|S2`"),
        ("refused-dates.npy", "`<M8[D]`"),
        ("refused-structured.npy", "structured"),
        ("shape-empty.npy", "samples have no bytes"),
        ("deflated.npz", "not an npy array: it is a zip archive"),
    ];
    for (name, words) in cases {
        let error = Npy::open(npy(name)).unwrap_err();
        assert!(
            error.to_string().contains(words) && error.to_string().contains(name),
            "{error}"
        );
    }
    must_say(
        Npz::open(npy("deflated.npz")),
        "`x.npy` is deflated: write the archive with np.savez,",
    );
    let open = |builder: feedline::dataset::NpzBuilder| {
        builder.open(npy("table.npz")).unwrap_err().to_string()
    };
    assert!(open(Npz::builder().fields(["z"])).contains("no member `z`; there are x, label"));
    assert!(open(Npz::builder().up_to("z", 3)).contains("no field `z`; there are x, label"));
    assert!(open(Npz::builder().rows().verify(true)).contains("whole members"));
    assert!(open(Npz::builder().rows().up_to("x", 3)).contains("`x`: rows have one shape"));
    assert!(
        Npy::builder()
            .open()
            .unwrap_err()
            .to_string()
            .contains("no field")
    );
    assert!(Npy::open(npy("gone.npy")).unwrap_err().kind() == ErrorKind::NotFound);
}

#[test]
fn uniform_files_must_be_as_long_as_the_first() {
    let dir = Dir::new();
    for index in 0..200 {
        let name = if index == 150 {
            "ragged-1.npy"
        } else {
            "same-0.npy"
        };
        dir.write(
            &format!("a/{index:03}.npy"),
            &std::fs::read(npy(name)).unwrap(),
        );
    }
    let error = Npy::builder()
        .field("x", dir.path("a"))
        .uniform(true)
        .open()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shape);
    assert!(
        error.to_string().contains("150.npy") && error.to_string().contains("132 bytes"),
        "{error}"
    );
}

#[test]
fn an_ambiguous_archive_is_refused() {
    let dir = Dir::new();
    let good = std::fs::read(npy("table.npz")).unwrap();
    let find = |needle: &[u8], nth: usize| {
        good.windows(needle.len())
            .enumerate()
            .filter(|(_, window)| *window == needle)
            .nth(nth)
            .unwrap()
            .0
    };
    // The name is in the local header and in the directory.
    let local = find(b"label.npy", 0);
    let directory = find(b"label.npy", 1);
    let mut cases = Vec::new();
    for (what, at) in [("local name", local), ("name in the directory", directory)] {
        let mut bytes = good.clone();
        bytes[at] = b'L';
        cases.push((what, bytes));
    }
    cases.push((
        "bytes before the first member",
        [b"#!/bin/sh\n", &good[..]].concat(),
    ));
    cases.push((
        "a comment that is cut",
        [&good[..good.len() - 2], &[9, 0, b'c']].concat(),
    ));
    let end = good.len() - 22;
    let mut fewer = good.clone();
    fewer[end + 8] = 1;
    fewer[end + 10] = 1;
    cases.push(("an entry more than is said", fewer));
    let mut doubled = good.clone();
    doubled[directory..directory + 9].copy_from_slice(b"x.npy\0\0\0\0");
    cases.push(("another name of the same length", doubled));
    for (what, bytes) in cases {
        dir.write("a.npz", &bytes);
        let error = Npz::open(dir.path("a.npz"))
            .err()
            .unwrap_or_else(|| panic!("{what} was accepted"));
        assert!(
            matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated),
            "{what}: {error}"
        );
    }
}

#[test]
fn a_damaged_npy_file_never_changes_samples_silently() {
    let dir = Dir::new();
    for name in ["same-0.npy", "same-1.npy"] {
        dir.write(&format!("a/{name}"), &std::fs::read(npy(name)).unwrap());
    }
    let len = std::fs::metadata(npy("same-1.npy")).unwrap().len() as usize;
    let (cuts, flips) = sweep(&dir, "a/same-1.npy", 0..len, || {
        seen(Npy::open(dir.path("a")))
    });
    assert_eq!(
        (cuts.refused, cuts.harmless, cuts.values),
        (len, 0, 0),
        "{cuts:?}"
    );
    assert!(
        cuts.structure.is_empty() && flips.structure.is_empty(),
        "{flips:?}"
    );
    // Values: the data, which has no checksum: 6 numbers of 4 bytes. Harmless: `<f4` and `=f4`
    // differ in one bit.
    assert_eq!(
        (flips.refused + flips.harmless, flips.values),
        (128 * flips_each(), 24 * flips_each()),
        "{flips:?}"
    );
    assert!(flips.harmless <= 1, "{flips:?}");
}

#[test]
fn a_damaged_npz_archive_never_changes_samples_silently() {
    let dir = Dir::new();
    let bytes = std::fs::read(npy("unet-0.npz")).unwrap();
    dir.write("a.npz", &bytes);
    for verify in [false, true] {
        let (cuts, flips) = sweep(&dir, "a.npz", 0..bytes.len(), || {
            seen(Npz::builder().verify(verify).open(dir.path("a.npz")))
        });
        assert_eq!(
            (cuts.refused, cuts.structure.len()),
            (bytes.len(), 0),
            "{cuts:?}"
        );
        // A field has its member's name, which changes only if a bit is flipped in both places.
        assert!(flips.structure.is_empty(), "{:?}", flips.structure);
        // x has 10 bytes, y 8.
        assert_eq!(
            flips.values,
            if verify { 0 } else { 18 * flips_each() },
            "{flips:?}"
        );
    }
}

#[test]
fn ten_thousand_files_take_few_bytes_and_open_quickly() {
    let dir = Dir::new();
    let array = std::fs::read(npy("same-0.npy")).unwrap();
    for index in 0..10_000 {
        dir.write(&format!("a/{index:05}.npy"), &array);
    }
    let dataset = Npy::open(dir.path("a")).unwrap();
    assert_eq!(dataset.len(), 10_000);
    let bytes = dataset.sizes().index_bytes + dataset.sources().table_bytes();
    assert!(bytes <= 10_000 * 68, "{bytes} bytes");
    let last = load(Npy::open(dir.path("a")).unwrap())
        .unwrap()
        .pop_last()
        .unwrap();
    assert_eq!(last, (9999, one("array", &array[128..])));
}

proptest::proptest! {
    #[test]
    fn no_npy_bytes_make_the_parser_panic(bytes in numeric::mangled(std::fs::read(fixture("npy").join("shape-cube.npy")).unwrap())) {
        feedline::unstable::fuzzing::headers(&bytes);
    }

    #[test]
    fn no_npz_bytes_make_the_parser_panic(bytes in numeric::mangled(std::fs::read(fixture("npy").join("table.npz")).unwrap())) {
        feedline::unstable::fuzzing::headers(&bytes);
    }
}

#[test]
fn the_fuzzed_parsers_accept_whole_files() {
    assert_eq!(
        feedline::unstable::fuzzing::headers(
            &std::fs::read(fixture("npy").join("shape-cube.npy")).unwrap()
        ),
        1
    );
    assert_eq!(
        feedline::unstable::fuzzing::headers(
            &std::fs::read(fixture("npy").join("table.npz")).unwrap()
        ),
        1
    );
}
