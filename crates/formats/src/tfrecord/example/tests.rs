//! Examples as protobuf's rules have them: what an encoder of our own writes, in any order and with
//! unknown fields.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A list message as the oracle writes it: runs of values, each packed or one by one.
#[derive(Clone, Debug)]
enum List {
    Bytes(Vec<Vec<u8>>),
    Floats(Vec<(bool, Vec<u32>)>),
    Ints(Vec<(bool, Vec<i64>)>),
}

/// A name and the lists of each of its values.
type Entry = (String, Vec<Vec<List>>);
/// The entries of each `features` field.
type Example = Vec<Vec<Entry>>;

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn tag(number: u64, wire: u64, out: &mut Vec<u8>) {
    varint(number << 3 | wire, out);
}

fn field(number: u64, bytes: &[u8], out: &mut Vec<u8>) {
    tag(number, 2, out);
    varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// Encodes an entry of a map.
fn entry(name: &[u8], value: &[u8]) -> Vec<u8> {
    let mut entry = Vec::new();
    let mut out = Vec::new();
    field(1, name, &mut entry);
    field(2, value, &mut entry);
    field(1, &entry, &mut out);
    out
}

#[test]
fn a_sequence_example_needs_context_only() {
    let mut list = Vec::new();
    let mut feature = Vec::new();
    let mut steps = Vec::new();
    tag(1, 0, &mut list);
    varint(7, &mut list);
    field(3, &list, &mut feature);
    field(1, &feature, &mut steps);
    let lists = [entry(b"f", &steps), entry(b"g", &steps)].concat();
    let mut example = Vec::new();
    let mut before = Vec::new();
    let mut empty = Vec::new();
    field(1, &entry(b"l", &feature), &mut example);
    field(2, &lists, &mut before);
    field(2, &[], &mut empty);
    for sequence in [
        [&example[..], &before].concat(),
        [&before[..], &example].concat(),
    ] {
        for name in ["l", "f", "none"] {
            let error = Feature::find(&sequence, name, ListKind::Ints, false)
                .err()
                .unwrap();
            assert_eq!(error.kind(), ErrorKind::Decode);
            assert!(
                error
                    .message()
                    .contains(r#"feature lists are not supported: "f", "g"; `context_only"#),
                "{error}"
            );
        }
        let mut buffer = Vec::new();
        let context = Feature::find(&sequence, "l", ListKind::Ints, true).unwrap();
        assert_eq!(context.ints(8, &mut buffer).unwrap(), 7_u64.to_ne_bytes());
    }
    // Empty feature lists lose no data, so they are no error.
    assert!(Feature::find(&[example, empty].concat(), "l", ListKind::Ints, false).is_ok());
}

/// Writes an unknown field, of each wire type in turn.
fn unknown(noise: &mut u32, out: &mut Vec<u8>) {
    *noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    match *noise >> 24 {
        0..40 => {
            tag(9, 0, out);
            varint(u64::MAX, out);
        }
        40..60 => {
            tag(100, 1, out);
            out.extend([7; 8]);
        }
        60..90 => field(1_000_000, b"unknown", out),
        90..110 => {
            tag(15, 5, out);
            out.extend([9; 4]);
        }
        _ => {}
    }
}

fn list(list: &List, noise: &mut u32) -> Vec<u8> {
    let mut out = Vec::new();
    unknown(noise, &mut out);
    match list {
        List::Bytes(values) => values.iter().for_each(|value| field(1, value, &mut out)),
        List::Floats(runs) => {
            for (packed, run) in runs {
                if *packed {
                    field(
                        1,
                        &run.iter()
                            .flat_map(|bits| bits.to_le_bytes())
                            .collect::<Vec<_>>(),
                        &mut out,
                    );
                    continue;
                }
                for bits in run {
                    tag(1, 5, &mut out);
                    out.extend(bits.to_le_bytes());
                }
            }
        }
        List::Ints(runs) => {
            for (packed, run) in runs {
                let mut values = Vec::new();
                for value in run {
                    if !packed {
                        tag(1, 0, &mut values);
                    }
                    varint(*value as u64, &mut values);
                }
                if *packed {
                    field(1, &values, &mut out)
                } else {
                    out.extend(values)
                }
            }
        }
    }
    unknown(noise, &mut out);
    out
}

fn encode(example: &Example, mut noise: u32) -> Vec<u8> {
    let noise = &mut noise;
    let mut out = Vec::new();
    for features in example {
        let mut message = Vec::new();
        for (name, values) in features {
            let mut entry = Vec::new();
            unknown(noise, &mut entry);
            field(1, name.as_bytes(), &mut entry);
            for lists in values {
                let mut feature = Vec::new();
                for one in lists {
                    let number = match one {
                        List::Bytes(_) => 1,
                        List::Floats(_) => 2,
                        List::Ints(_) => 3,
                    };
                    field(number, &list(one, noise), &mut feature);
                    unknown(noise, &mut feature);
                }
                field(2, &feature, &mut entry);
            }
            field(1, &entry, &mut message);
            unknown(noise, &mut message);
        }
        unknown(noise, &mut out);
        field(1, &message, &mut out);
    }
    out
}

/// The result by protobuf's rules: maps insert, messages merge, a oneof of another kind starts
/// anew.
#[derive(Clone, Debug, PartialEq)]
enum Merged {
    Empty,
    Bytes(Vec<Vec<u8>>),
    Floats(Vec<u8>),
    Ints(Vec<u8>),
}

fn merge(merged: &mut Merged, list: &List) {
    fn bytes<T, const N: usize>(
        runs: &[(bool, Vec<T>)],
        of: impl Fn(&T) -> [u8; N] + Copy,
    ) -> Vec<u8> {
        runs.iter().flat_map(|(_, run)| run).flat_map(of).collect()
    }
    let more = match list {
        List::Bytes(values) => Merged::Bytes(values.clone()),
        List::Floats(runs) => Merged::Floats(bytes(runs, |bits| bits.to_le_bytes())),
        List::Ints(runs) => Merged::Ints(bytes(runs, |value| value.to_ne_bytes())),
    };
    match (merged, more) {
        (Merged::Bytes(all), Merged::Bytes(more)) => all.extend(more),
        (Merged::Floats(all), Merged::Floats(more)) | (Merged::Ints(all), Merged::Ints(more)) => {
            all.extend(more)
        }
        (merged, more) => *merged = more,
    }
}

fn merged(example: &Example) -> BTreeMap<&str, Merged> {
    let mut map = BTreeMap::new();
    for (name, values) in example.iter().flatten() {
        let mut feature = Merged::Empty;
        values
            .iter()
            .flatten()
            .for_each(|list| merge(&mut feature, list));
        map.insert(name.as_str(), feature);
    }
    map
}

fn any_list() -> impl Strategy<Value = List> {
    let bytes = vec(vec(any::<u8>(), 0..20), 0..3);
    let ints = prop_oneof![any::<i64>(), -3_i64..3, 100_i64..200];
    prop_oneof![
        bytes.prop_map(List::Bytes),
        vec((any::<bool>(), vec(any::<u32>(), 0..6)), 0..4).prop_map(List::Floats),
        vec((any::<bool>(), vec(ints, 0..6)), 0..4).prop_map(List::Ints),
    ]
}

fn any_example() -> impl Strategy<Value = Example> {
    // Few names, so that some repeat.
    let name = prop_oneof![
        Just("a".to_string()),
        Just("image/encoded".to_string()),
        "[a-cé]{0,3}"
    ];
    vec(vec((name, vec(vec(any_list(), 0..4), 0..3)), 0..5), 0..3)
}

fn found(example: &[u8], name: &str, kind: ListKind) -> Result<Merged> {
    let feature = Feature::find(example, name, kind, false)?;
    let mut buffer = Vec::new();
    Ok(match kind {
        ListKind::Bytes => Merged::Bytes(vec![feature.one_bytes()?.to_vec()]),
        ListKind::Floats => Merged::Floats(feature.floats(1 << 20, &mut buffer)?.to_vec()),
        ListKind::Ints => Merged::Ints(feature.ints(1 << 20, &mut buffer)?.to_vec()),
    })
}

const KINDS: [ListKind; 3] = [ListKind::Bytes, ListKind::Floats, ListKind::Ints];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn every_feature_equals_protobufs_result(example in any_example(), noise in any::<u32>()) {
        let bytes = encode(&example, noise);
        for (name, right) in merged(&example) {
            let kind = match &right {
                Merged::Empty => None,
                Merged::Bytes(_) => Some(ListKind::Bytes),
                Merged::Floats(_) => Some(ListKind::Floats),
                Merged::Ints(_) => Some(ListKind::Ints),
            };
            for wanted in KINDS {
                let found = found(&bytes, name, wanted);
                let one = !matches!(&right, Merged::Bytes(values) if values.len() != 1);
                if Some(wanted) == kind && one {
                    prop_assert_eq!(found.unwrap(), right.clone());
                } else {
                    prop_assert_eq!(found.unwrap_err().kind(), ErrorKind::Shape);
                }
            }
        }
        let error = found(&bytes, "not there", ListKind::Ints).unwrap_err();
        prop_assert_eq!(error.kind(), ErrorKind::Shape);
    }

    #[test]
    fn damaged_and_random_bytes_are_a_value_or_an_error(
        example in any_example(), cut in any::<prop::sample::Index>(), flip in any::<prop::sample::Index>(),
        bits in 1_u8.., random in vec(any::<u8>(), 0..60),
    ) {
        let mut bytes = encode(&example, 1);
        if !bytes.is_empty() {
            let at = flip.index(bytes.len());
            bytes[at] ^= bits;
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        for bytes in [&bytes, &random] {
            for kind in KINDS {
                let _ = found(bytes, "a", kind);
            }
        }
    }

    #[test]
    fn a_list_never_takes_more_of_the_buffer_than_the_row_has(
        lists in vec(any_list(), 1..4), max in 0_usize..12,
    ) {
        let example = vec![vec![("x".to_string(), vec![lists])]];
        let bytes = encode(&example, 1);
        let right = merged(&example).remove("x").unwrap();
        let mut buffer = Vec::new();
        let find = |kind| Feature::find(&bytes, "x", kind, false).unwrap();
        let (row, len, found) = match right {
            Merged::Floats(all) => (max * 4, all.len(), find(ListKind::Floats).floats(max * 4, &mut buffer).is_ok()),
            Merged::Ints(all) => (max * 8, all.len(), find(ListKind::Ints).ints(max * 8, &mut buffer).is_ok()),
            _ => return Ok(()),
        };
        prop_assert_eq!(found, len <= row);
        prop_assert!(buffer.capacity() <= row, "{} of {row}", buffer.capacity());
    }
}

#[test]
fn a_packed_run_of_floats_is_not_copied() {
    let list = List::Floats(vec![(true, vec![1, 2, 3])]);
    let bytes = encode(&vec![vec![("x".to_string(), vec![vec![list]])]], 1);
    let mut buffer = Vec::new();
    let floats = Feature::find(&bytes, "x", ListKind::Floats, false)
        .unwrap()
        .floats(12, &mut buffer)
        .unwrap();
    assert!(bytes.as_ptr_range().contains(&floats.as_ptr()));
    assert_eq!(buffer.capacity(), 0);
}

#[test]
fn malformed_examples_are_errors_with_an_offset() {
    let entry = |entry: &[u8]| {
        let mut features = Vec::new();
        let mut out = Vec::new();
        field(1, entry, &mut features);
        field(1, &features, &mut out);
        out
    };
    let table: [(Vec<u8>, &str); 10] = [
        (vec![0x0a], "a varint that does not end"),
        (vec![0x0a, 5, 1], "byte 2: 5 bytes, 1 are left"),
        (vec![0x0b], "field 1 has wire type 3"),
        (vec![0x08, 1], "features is a varint on the wire"),
        (vec![0x02, 0], "a field with the number 0"),
        (
            vec![0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
            "a varint over 64 bits",
        ),
        (
            vec![
                0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1,
            ],
            "18446744073709551615 bytes",
        ),
        (
            entry(&[0x0a, 1, b'x', 0x10, 1]),
            "byte 8: entry is a varint on the wire",
        ),
        (
            entry(&[0x0a, 1, b'x', 0x12, 2, 0x18, 1]),
            "byte 10: an int64 list is a varint on the wire",
        ),
        (
            entry(&[0x0a, 1, b'x', 0x12, 4, 0x1a, 2, 0x08, 0x80]),
            "byte 12: a varint that does not end",
        ),
    ];
    for (bytes, words) in table {
        let error = found(&bytes, "x", ListKind::Ints).unwrap_err();
        assert!(error.to_string().contains(words), "{bytes:02x?}: {error}");
        assert_eq!(error.kind(), ErrorKind::Decode);
    }
}

#[test]
fn a_missing_feature_error_lists_a_few_names() {
    let many = (0..1000)
        .map(|k| (format!("{k:0>100}"), Vec::new()))
        .collect();
    let error = found(&encode(&vec![many], 1), "x", ListKind::Ints)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("… and 988 more; ") && error.len() < 1000,
        "{error}"
    );
}
