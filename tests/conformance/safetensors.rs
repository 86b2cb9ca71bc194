//! safetensors: numpy's and torch's values are read one by one; a damaged file is an error that
//! names the damage.

use crate::common::numeric;
use crate::common::numeric::{Case, Row, cases, check, fixture, flips_each, one, seen, sweep};
use crate::common::{Dir, assert_says, must_say};
use feedline::ErrorKind::{Decode, Empty, Limit, NotFound, Shape};
use feedline::Loader;
use feedline::dataset::{Dataset, SafeTensors};
use feedline::tensor::{DType, bf16};

fn file(name: &str) -> std::path::PathBuf {
    fixture("safetensors").join(name)
}

/// Row by row, the fields in this order.
fn rows(cases: &[Case], names: &[&str]) -> Vec<Row> {
    let find = |name: &str| cases.iter().find(|case| case.member == name).unwrap();
    (0..find(names[0]).shape[0])
        .map(|row| {
            names
                .iter()
                .flat_map(|name| one(name, &find(name).row(row)))
                .collect()
        })
        .collect()
}

fn names(dataset: &SafeTensors) -> Vec<String> {
    dataset
        .schema()
        .iter()
        .map(|field| field.name.clone())
        .collect()
}

#[test]
fn every_dtype_is_read_as_it_was_written() {
    let written = cases("safetensors", "numpy");
    assert_eq!(written.len(), 12);
    let dataset = SafeTensors::open(file("numpy.safetensors")).unwrap();
    assert_eq!(dataset.len(), 4);
    for case in &written {
        let field = dataset
            .schema()
            .iter()
            .find(|field| field.name == case.member)
            .unwrap()
            .as_raw()
            .unwrap();
        assert_eq!(
            (field.dtype().name(), field.dims()),
            (case.dtype.as_str(), vec![3]),
            "{case:?}"
        );
    }
    let names = names(&dataset);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    check(
        || SafeTensors::open(file("numpy.safetensors")),
        &rows(&written, &names),
    );
}

#[test]
fn chosen_tensors_come_in_the_order_asked_for() {
    let names = ["label", "bf16", "half", "f8"];
    let mut expected = rows(&cases("safetensors", "torch-0"), &names);
    expected.extend(rows(&cases("safetensors", "torch-1"), &names));
    assert_eq!(expected.len(), 5 + 6);
    check(
        || {
            SafeTensors::builder()
                .tensors(names)
                .open(file("torch-{0..1}.safetensors"))
        },
        &expected,
    );
    let some = |dataset: SafeTensors| {
        let loader = Loader::builder(dataset).batch_size(11).build().unwrap();
        loader.epoch(0).unwrap().next().unwrap().unwrap()
    };
    let batch = some(
        SafeTensors::builder()
            .tensors(["bf16", "f8"])
            .open(file("torch-*.safetensors"))
            .unwrap(),
    );
    assert_eq!(
        batch
            .field("bf16")
            .unwrap()
            .as_slice::<bf16>()
            .unwrap()
            .len(),
        22
    );
    assert_eq!(batch.field("f8").unwrap().dtype(), DType::U8);
    assert_eq!(batch.field("f8").unwrap().shape(), [11, 3]);
}

#[test]
fn an_incompatible_file_is_named() {
    let of = |names: &[&'static str]| SafeTensors::builder().tensors(names.iter().copied());
    let cases = [
        (
            SafeTensors::open(file("uneven.safetensors")),
            Shape,
            "different first dimensions",
        ),
        (
            SafeTensors::open(file("scalar.safetensors")),
            Shape,
            "a scalar has no rows",
        ),
        (
            SafeTensors::open(file("complex.safetensors")),
            Decode,
            "`x` is C64",
        ),
        (
            of(&["z"]).open(file("uneven.safetensors")),
            Empty,
            "no tensors",
        ),
        (
            of(&["x", "z"]).open(file("uneven.safetensors")),
            Decode,
            "no tensor `z`",
        ),
        (
            SafeTensors::open(file("{torch-0,numpy}.safetensors")),
            Decode,
            "no tensor `",
        ),
        (SafeTensors::open(file("cases.txt")), Limit, "cases.txt"),
        (
            SafeTensors::open(file("gone.safetensors")),
            NotFound,
            "gone",
        ),
    ];
    for (index, (result, kind, words)) in cases.into_iter().enumerate() {
        let error = result
            .err()
            .unwrap_or_else(|| panic!("case {index} was accepted"));
        assert_eq!(error.kind(), kind, "case {index}: {error}");
        assert!(error.to_string().contains(words), "case {index}: {error}");
    }
    assert_eq!(
        of(&["x"]).open(file("uneven.safetensors")).unwrap().len(),
        4
    );
}

#[test]
fn an_extra_tensor_in_a_later_file_is_an_error() {
    let dir = Dir::new();
    let write = |name: &str, tensors: &[&str]| {
        let one = |(index, name): (usize, &&str)| {
            format!(
                r#""{name}":{{"dtype":"U8","shape":[2],"data_offsets":[{},{}]}}"#,
                index * 2,
                index * 2 + 2
            )
        };
        let header = format!(
            "{{{}}}",
            tensors
                .iter()
                .enumerate()
                .map(one)
                .collect::<Vec<_>>()
                .join(",")
        );
        let data = vec![7; tensors.len() * 2];
        dir.write(
            name,
            &[
                &(header.len() as u64).to_le_bytes()[..],
                header.as_bytes(),
                &data,
            ]
            .concat(),
        );
    };
    write("0.safetensors", &["x"]);
    write("1.safetensors", &["x", "y"]);
    let error = must_say(
        SafeTensors::open(dir.path("")),
        "`y` is a tensor of this file but not of the first one: path=",
    );
    assert_says(&error, "1.safetensors");
    assert_eq!(
        SafeTensors::builder()
            .tensors(["x"])
            .open(dir.path(""))
            .unwrap()
            .len(),
        4
    );
}

#[test]
fn damaged_headers_never_change_samples_silently() {
    let dir = Dir::new();
    let bytes = std::fs::read(file("torch-0.safetensors")).unwrap();
    dir.write("a.safetensors", &bytes);
    let names = ["label", "bf16", "half", "f8"];
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // bf16 [5, 2], half [5], f8 [5, 3], label [5] of 8 bytes.
    let data = 5 * 2 * 2 + 5 * 2 + 5 * 3 + 5 * 8;
    assert_eq!(bytes.len() - header, data);
    let (cuts, flips) = sweep(&dir, "a.safetensors", 0..bytes.len(), || {
        seen(
            SafeTensors::builder()
                .tensors(names)
                .open(dir.path("a.safetensors")),
        )
    });
    assert_eq!(cuts.refused, bytes.len(), "{cuts:?}");
    assert!(flips.structure.is_empty(), "{:?}", flips.structure);
    // The data has no checksum.
    assert_eq!(flips.values, data * flips_each(), "{flips:?}");
    assert_eq!(
        flips.refused + flips.harmless,
        header * flips_each(),
        "{flips:?}"
    );
}

proptest::proptest! {
    #[test]
    fn no_safetensors_bytes_make_the_parser_panic(bytes in numeric::mangled(std::fs::read(fixture("safetensors").join("torch-0.safetensors")).unwrap())) {
        feedline::unstable::fuzzing::headers(&bytes);
    }
}

#[test]
fn the_fuzzed_parsers_accept_whole_files() {
    let file = std::fs::read(fixture("safetensors").join("torch-0.safetensors")).unwrap();
    assert_eq!(feedline::unstable::fuzzing::headers(&file), 1);
}
