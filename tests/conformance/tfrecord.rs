//! TFRecord files of TensorFlow are read value by value; damaged files are an error, or list
//! everything left out.

use crate::common::formats::tf_record;
use crate::common::{Dir, assert_says, build, damage, must_fail, readers};
use feedline::ErrorKind::{self, Changed, Config, Decode, Empty, NotFound, Shape, Truncated};
use feedline::dataset::{Dataset, DatasetExt, TfRecord, TfRecordBuilder};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::unstable::fuzzing;
use feedline::{Loader, Order, Result};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/tfrecord")
        .join(name)
}

/// Payload *k* of the plain files, as in `make_tfrecord.py`.
fn payload(k: usize) -> Vec<u8> {
    (0..k * k % 97)
        .map(|j| ((k * 7 + j * 13) % 251) as u8)
        .collect()
}

fn plain() -> TfRecordBuilder {
    TfRecord::builder().index(false)
}

fn example() -> TfRecordBuilder {
    plain()
        .image("image/encoded")
        .raw_bytes(Field::fixed("raw", DType::I16, [2, 3]), "raw")
        .floats(Field::up_to("boxes", DType::F32, 12), "boxes")
        .floats(Field::fixed("four", DType::F32, [4]), "four")
        .ints(Field::fixed("label", DType::I64, []), "label")
        .ints(Field::up_to("ids", DType::I64, 11), "ids")
}

fn all(dataset: &dyn Dataset) -> Result<Vec<Vec<Vec<u8>>>> {
    (0..dataset.len())
        .map(|sample| fuzzing::sample(dataset, sample))
        .collect()
}

#[test]
fn records_written_by_tensorflow_come_back_byte_by_byte() {
    let records = plain().open(fixture("plain.tfrecord")).unwrap();
    let expected: Vec<_> = (0..20).map(|k| vec![payload(k)]).collect();
    assert_eq!(all(&records).unwrap(), expected);
    assert_eq!(records.schema(), [EncodedField::bytes("record")]);
    assert_eq!(
        records.sizes().sample_bytes_max,
        16 + (0..20).map(|k| k * k % 97).max().unwrap() as u64
    );
    let ours: Vec<u8> = (0..20).flat_map(|k| tf_record(&payload(k))).collect();
    assert_eq!(
        std::fs::read(fixture("plain.tfrecord")).unwrap(),
        ours,
        "the tests' own writer"
    );
}

/// Fields of every example as TensorFlow parsed them.
fn expected_examples() -> Vec<Vec<Vec<u8>>> {
    let json = std::fs::read(fixture("example.json")).unwrap();
    let values: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let hex = |text: &str| -> Vec<u8> {
        (0..text.len() / 2)
            .map(|k| u8::from_str_radix(&text[2 * k..][..2], 16).unwrap())
            .collect()
    };
    let each = |value: &serde_json::Value, bytes: fn(i64) -> Vec<u8>| -> Vec<u8> {
        value
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|v| bytes(v.as_i64().unwrap()))
            .collect()
    };
    let example = |one: &serde_json::Value| {
        vec![
            hex(one["image"].as_str().unwrap()),
            each(&one["raw"], |v| {
                i16::try_from(v).unwrap().to_ne_bytes().to_vec()
            }),
            each(&one["boxes_bits"], |v| {
                u32::try_from(v).unwrap().to_ne_bytes().to_vec()
            }),
            each(&one["four_bits"], |v| {
                u32::try_from(v).unwrap().to_ne_bytes().to_vec()
            }),
            one["label"].as_i64().unwrap().to_ne_bytes().to_vec(),
            each(&one["ids"], |v| v.to_ne_bytes().to_vec()),
        ]
    };
    values.as_array().unwrap().iter().map(example).collect()
}

#[test]
fn features_have_the_values_that_tensorflow_parses() {
    let expected = expected_examples();
    assert_eq!(expected.len(), 11);
    for name in ["example.tfrecord", "unpacked.tfrecord"] {
        let records = example().open(fixture(name)).unwrap();
        assert_eq!(all(&records).unwrap(), expected, "{name}");
        assert_eq!(records.sizes().opened_bytes_max, 88);
    }
    // Any one feature alone, so that each is the first field once.
    let alone = plain()
        .ints(Field::up_to("ids", DType::I64, 20), "ids")
        .open(fixture("example.tfrecord"))
        .unwrap();
    let ids: Vec<_> = expected
        .into_iter()
        .map(|mut fields| vec![fields.remove(5)])
        .collect();
    assert_eq!(all(&alone).unwrap(), ids);
}

#[test]
fn every_reader_gives_batches_with_the_features() {
    let expected = expected_examples();
    for (mode, direct) in readers() {
        let records = plain()
            .raw_bytes(Field::fixed("raw", DType::I16, [2, 3]), "raw")
            .floats(Field::fixed("four", DType::F32, [4]), "four")
            .ints(Field::fixed("label", DType::I64, []), "label")
            .ints(Field::up_to("ids", DType::I64, 11), "ids")
            .open(fixture("{example,unpacked}.tfrecord"))
            .unwrap();
        let loader = build(
            Loader::builder(records)
                .order(Order::shuffled(3))
                .batch_size(4)
                .workers(2)
                .tuning(|t| t.reader(mode).direct(direct)),
        );
        let mut seen = 0;
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            let labels = batch.field("label").unwrap().as_slice::<i64>().unwrap();
            let ids = batch.field("ids").unwrap();
            for (row, id) in batch.ids().iter().enumerate() {
                let right = &expected[*id as usize % 11];
                let part = |name: &str| {
                    let bytes = batch.field(name).unwrap().as_bytes().unwrap();
                    let size = bytes.len() / batch.len();
                    &bytes[row * size..][..size]
                };
                assert_eq!(labels[row].to_ne_bytes().to_vec(), right[4]);
                assert_eq!(part("raw"), right[1]);
                assert_eq!(part("four"), right[3]);
                assert_eq!(ids.lens().unwrap()[row] as usize, right[5].len() / 8);
                assert_eq!(part("ids")[..right[5].len()], right[5]);
                assert!(part("ids")[right[5].len()..].iter().all(|byte| *byte == 0));
                seen += 1;
            }
        }
        assert_eq!(seen, 22, "{mode:?} {direct:?}");
    }
}

#[test]
fn payloads_can_be_arrays_themselves() {
    let dir = Dir::new();
    for file in 0..3_u16 {
        let bytes: Vec<u8> = (0..=file)
            .flat_map(|k| tf_record(&[file.to_le_bytes(), k.to_le_bytes()].concat()))
            .collect();
        dir.write(&format!("part-{file:05}"), &bytes);
    }
    let field = || EncodedField::raw(Field::fixed("x", DType::U16, [2]));
    let open = || {
        TfRecord::builder()
            .record(field())
            .open(dir.path("part-{00000..00002}"))
            .unwrap()
    };
    let loader = build(Loader::builder(open()).batch_size(6));
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    assert_eq!(
        batch.field("x").unwrap().as_slice::<u16>().unwrap(),
        [0_u16, 0, 1, 0, 1, 1, 2, 0, 2, 1, 2, 2],
        "rows of all files"
    );
    // The folder has index files by now; they are not shards, and they save the walk.
    let folder = TfRecord::builder()
        .record(field())
        .open(dir.path(""))
        .unwrap();
    assert_eq!(
        (
            folder.len(),
            folder.shards_scanned(),
            open().shards_scanned()
        ),
        (6, 0, 0)
    );
    let half = folder.subset([5, 0]).unwrap();
    assert_eq!(fuzzing::sample(&half, 0).unwrap(), [[2, 0, 2, 0]]);
}

#[test]
fn the_error_of_a_missing_feature_lists_the_others() {
    let dir = Dir::new();
    let good = tf_record(b"abc");
    let at = |name: &str, bytes: &[u8]| plain().open(dir.write(name, bytes));
    let scalar = |dtype| Field::fixed("x", dtype, []);
    let labels = || fixture("example.tfrecord");
    let cases = [
        (plain().open(fixture("plain.tfrecord.gz")), Decode, "gzip"),
        (plain().open(fixture("plain.tfrecord.zz")), Decode, "zlib"),
        (at("empty", b""), Empty, "no records"),
        (at("short", &good[..15]), Truncated, "15 bytes"),
        (
            at("cut", &[&good[..], &good[..18]].concat()),
            Truncated,
            "offset=19 len=18",
        ),
        (
            at("tail", &[&good[..], b"x"].concat()),
            Truncated,
            "offset=19 len=1",
        ),
        (at("zeroes", &[0; 64]), Decode, "CRC"),
        (
            at("long", &tf_record(&[0; 100])[..60]),
            Truncated,
            "a record of 100 bytes, 44 are left",
        ),
        (plain().open(dir.path("gone")), NotFound, "gone"),
        (
            plain().records(21).open(fixture("plain.tfrecord")),
            Shape,
            "20 records, 21 expected",
        ),
        (
            plain().floats(scalar(DType::F64), "f").open(labels()),
            Config,
            "f32",
        ),
        (
            plain().ints(scalar(DType::I32), "f").open(labels()),
            Config,
            "i64",
        ),
        (
            plain().bytes("a").bytes("a").open(labels()),
            Config,
            "two fields",
        ),
        (
            plain()
                .image("a")
                .ints(scalar(DType::I64), "a")
                .open(labels()),
            Config,
            "two kinds of list",
        ),
        (
            plain()
                .ints(Field::fixed("x", DType::I64, [0]), "f")
                .open(labels()),
            Config,
            "size",
        ),
    ];
    for (index, (result, kind, words)) in cases.into_iter().enumerate() {
        let error = result
            .err()
            .unwrap_or_else(|| panic!("case {index} was accepted"));
        assert_eq!(error.kind(), kind, "case {index}: {error}");
        assert!(error.to_string().contains(words), "case {index}: {error}");
    }
    let samples = [
        (
            plain().ints(scalar(DType::I64), "nope"),
            "no feature \"nope\"; there are \"raw\", \"boxes\", ",
        ),
        (
            plain().ints(scalar(DType::I64), "four"),
            "feature \"four\" is a float list, not an int64 list",
        ),
        (
            plain().floats(Field::fixed("x", DType::F32, [5]), "four"),
            "feature \"four\": 4 values, 5 expected",
        ),
        (
            plain().floats(Field::up_to("x", DType::F32, 3), "four"),
            "at least 4 values, at most 3",
        ),
        (
            plain().bytes("label"),
            "feature \"label\" is an int64 list, not a bytes list; read it by `TfRecordBuilder::ints`",
        ),
    ];
    for (builder, words) in samples {
        let error = must_fail(
            fuzzing::sample(&builder.open(labels()).unwrap(), 2),
            Shape,
            words,
        );
        assert_says(&error, "example.tfrecord");
        assert_eq!(error.site().sample, Some(2), "{error}");
    }
}

/// An `Example` of one feature, as protobuf encodes it: the list of field `kind` (1 bytes, 2
/// floats, 3 ints) with these bytes; without a kind a feature that says none.
fn one_feature(name: &str, kind: Option<u8>, list: &[u8]) -> Vec<u8> {
    let field = |number: u8, bytes: &[u8]| [&[number << 3 | 2, bytes.len() as u8], bytes].concat();
    let feature = kind.map_or(Vec::new(), |kind| field(kind, list));
    let entry = [field(1, name.as_bytes()), field(2, &feature)].concat();
    field(1, &field(1, &entry))
}

#[test]
fn missing_and_empty_features_are_zeros_where_asked_for() {
    let of = |kind, values: &[u8]| {
        tf_record(&one_feature(
            "a",
            kind,
            &[&[0x0a, values.len() as u8], values].concat(),
        ))
    };
    let none = |kind| tf_record(&one_feature("a", kind, b""));
    // TensorFlow: FixedLenFeature with the default 0, VarLenFeature.
    let ints = [
        of(Some(3), &[7]),
        none(Some(3)),
        none(None),
        tf_record(&one_feature("b", Some(3), b"")),
        tf_record(b""),
    ];
    let floats = [
        of(Some(2), &1.5_f32.to_le_bytes()),
        none(Some(2)),
        none(None),
    ];
    let bytes = [of(Some(1), b"xyz"), none(Some(1)), none(None)];
    let scalar = |dtype| Field::fixed("x", dtype, []);
    let open = |builder: TfRecordBuilder, records: &[Vec<u8>]| {
        builder.missing_zero(true).open_bytes(records.concat())
    };
    let first = |dataset: &TfRecord| {
        all(dataset)
            .unwrap()
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
    };

    let fixed = open(plain().ints(scalar(DType::I64), "a"), &ints).unwrap();
    assert_eq!(
        first(&fixed),
        [7_i64, 0, 0, 0, 0].map(|value| value.to_ne_bytes().to_vec())
    );
    let lists = open(plain().ints(Field::up_to("x", DType::I64, 2), "a"), &ints).unwrap();
    assert_eq!(
        first(&lists),
        [7_i64.to_ne_bytes().to_vec(), vec![], vec![], vec![], vec![]]
    );
    let fixed = open(plain().floats(scalar(DType::F32), "a"), &floats).unwrap();
    assert_eq!(
        first(&fixed),
        [1.5_f32, 0.0, 0.0].map(|value| value.to_ne_bytes().to_vec())
    );
    let texts = open(plain().bytes("a"), &bytes).unwrap();
    assert_eq!(first(&texts), [b"xyz".to_vec(), vec![], vec![]]);

    let strict = plain()
        .ints(scalar(DType::I64), "a")
        .open_bytes(ints.concat())
        .unwrap();
    let advice = "; `missing_zero(true)` reads it as zeros";
    for (sample, words) in [
        (1, "0 values, 1 expected"),
        (2, "is empty, not an int64 list"),
        (3, "no feature \"a\""),
    ] {
        let error = fuzzing::sample(&strict, sample).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains(advice), "{error}");
    }
    // A list of another kind, a picture, and a list of fewer values are no missing numbers.
    let others = [
        (
            plain().floats(scalar(DType::F32), "a"),
            "feature \"a\" is an int64 list, not a float list",
        ),
        (plain().image("b"), "no feature \"b\""),
        (
            plain().ints(Field::fixed("x", DType::I64, [2]), "a"),
            "1 values, 2 expected; `Field::up_to` accepts any number",
        ),
    ];
    for (builder, words) in others {
        let error = fuzzing::sample(&open(builder, &ints).unwrap(), 0)
            .unwrap_err()
            .to_string();
        assert!(error.contains(words) && !error.contains(advice), "{error}");
    }
}

#[test]
fn a_shard_of_no_records_is_one_of_no_samples() {
    let dir = Dir::new();
    for (name, payloads) in [("a", 0..0), ("b", 0..2_u8), ("c", 0..0), ("d", 2..3)] {
        dir.write(
            name,
            &payloads.flat_map(|k| tf_record(&[k])).collect::<Vec<_>>(),
        );
    }
    for indexed in [false, true, true] {
        let records = TfRecord::builder()
            .index(indexed)
            .open(dir.path(""))
            .unwrap();
        assert_eq!(all(&records).unwrap(), [[[0]], [[1]], [[2]]]);
        assert_eq!(records.damage(), []);
    }
    let error = plain().open(dir.path("{a,c}")).err().unwrap();
    assert_eq!(error.kind(), Empty, "{error}");
}

#[test]
fn a_length_that_looks_like_gzip_is_a_length() {
    let bytes = tf_record(&vec![1; 0x8b1f]);
    assert_eq!(bytes[..2], [0x1f, 0x8b]);
    let records = plain().open_bytes(bytes).unwrap();
    assert_eq!(fuzzing::sample(&records, 0).unwrap()[0].len(), 0x8b1f);
}

/// The small file of the sweeps: records of 0 to 7 bytes.
fn small() -> (Vec<u8>, Vec<Vec<Vec<u8>>>) {
    let payloads: Vec<Vec<u8>> = (0..8)
        .map(|k| (0..k).map(|j| (k * 16 + j) as u8).collect())
        .collect();
    let bytes = payloads
        .iter()
        .flat_map(|payload| tf_record(payload))
        .collect();
    (
        bytes,
        payloads.into_iter().map(|payload| vec![payload]).collect(),
    )
}

#[test]
fn every_flipped_byte_costs_its_own_record_alone() {
    let (whole, right) = small();
    let mut refused = 0;
    let mut failed = 0;
    for at in 0..whole.len() {
        for bits in [0x01, 0x02, 0x10, 0x80, 0x55, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= bits;
            match plain().open_bytes(bytes) {
                Err(error) => {
                    assert!(error.site().offset.is_some(), "{error}");
                    refused += 1;
                }
                Ok(records) => {
                    assert_eq!(records.len(), 8);
                    let wrong: Vec<u64> = (0..8)
                        .filter(|id| match fuzzing::sample(&records, *id) {
                            Ok(fields) => {
                                assert_eq!(
                                    fields, right[*id as usize],
                                    "byte {at} bits {bits:02x}: silently wrong"
                                );
                                false
                            }
                            Err(_) => true,
                        })
                        .collect();
                    assert_eq!(wrong.len(), 1, "byte {at}");
                    failed += 1;
                }
            }
        }
    }
    // Twelve bytes of a record are length and CRC, which `open` checks.
    assert_eq!((refused, failed), (8 * 12 * 6, (whole.len() - 8 * 12) * 6));
}

#[test]
fn every_cut_is_an_error_or_found_by_the_record_count() {
    let (whole, right) = small();
    let mut between = 0;
    for len in 0..whole.len() {
        let counted = plain().records(8).open_bytes(&whole[..len]);
        assert!(counted.is_err(), "cut at {len}");
        if let Ok(records) = plain().open_bytes(&whole[..len]) {
            let left = records.len() as usize;
            assert_eq!(all(&records).unwrap(), right[..left], "cut at {len}");
            between += 1;
        }
    }
    assert_eq!(between, 7);
    assert_eq!(
        all(&plain().records(8).open_bytes(whole).unwrap()).unwrap(),
        right
    );
}

#[test]
fn examples_with_a_flipped_byte_are_right_or_an_error() {
    let whole = std::fs::read(fixture("example.tfrecord")).unwrap();
    let right = expected_examples();
    let mut errors = 0;
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0xff;
        let Ok(records) = example().open_bytes(bytes) else {
            errors += 1;
            continue;
        };
        for (id, right) in right.iter().enumerate() {
            match fuzzing::sample(&records, id as u64) {
                Ok(fields) => assert_eq!(fields, *right, "byte {at}, sample {id}"),
                Err(_) => errors += 1,
            }
        }
    }
    assert_eq!(
        errors,
        whole.len(),
        "each flip fails one file or one sample"
    );
}

#[test]
fn damage_in_a_payload_is_found_for_any_kept_field() {
    let whole = std::fs::read(fixture("example.tfrecord")).unwrap();
    let payload = u64::from_le_bytes(whole[..8].try_into().unwrap());
    let errors = |bytes: &[u8], keep: &str| -> Vec<ErrorKind> {
        let records = plain()
            .image("image/encoded")
            .ints(Field::fixed("label", DType::I64, []), "label");
        let records = records
            .floats(Field::fixed("four", DType::F32, [4]), "four")
            .open_bytes(bytes)
            .unwrap();
        let loader = build(
            Loader::builder(records)
                .keep([keep])
                .batch_size(1)
                .workers(2),
        );
        loader
            .epoch(0)
            .unwrap()
            .filter_map(|batch| batch.err().map(|error| error.kind()))
            .collect()
    };
    // A byte of the first record's picture, which no field uses.
    let marker = [0xff, 0xd8].as_slice();
    let picture = whole
        .windows(2)
        .take(payload as usize)
        .position(|bytes| bytes == marker);
    for at in [12, 12 + payload as usize / 2]
        .into_iter()
        .chain(picture.map(|at| at + 2))
    {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        for keep in ["label", "four"] {
            assert_eq!(errors(&whole, keep), []);
            assert_eq!(errors(&bytes, keep), [Decode], "byte {at}, {keep} kept");
        }
    }
}

#[test]
fn only_flipped_payloads_pass_without_checksums() {
    let (whole, right) = small();
    let mut silent = 0;
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        let Ok(records) = plain().checksums(false).open_bytes(bytes) else {
            continue;
        };
        let fields = all(&records).unwrap();
        assert_eq!(fields.len(), 8);
        for (found, right) in fields.iter().zip(&right) {
            assert_eq!(found[0].len(), right[0].len());
        }
        silent += usize::from(fields != right);
    }
    assert_eq!(silent, (0..8).sum::<usize>(), "the payload bytes");
}

#[test]
fn reported_damage_leaves_the_records_before_it() {
    let dir = Dir::new();
    let (whole, right) = small();
    let mut broken = whole.clone();
    // The length of the sixth record.
    let at: usize = (0..5).map(|k| 16 + k).sum();
    broken[at] ^= 1;
    dir.write("a", &whole);
    dir.write("b", &broken);
    dir.write("c", &whole[..whole.len() - 1]);
    assert_eq!(plain().open(dir.path("")).err().unwrap().kind(), Decode);
    let records = plain().skip_damage(true).open(dir.path("")).unwrap();
    let expected: Vec<_> = [&right[..], &right[..5], &right[..7]].concat();
    assert_eq!(all(&records).unwrap(), expected);
    let ledger: Vec<_> = records
        .damage()
        .iter()
        .map(|d| (d.path.clone(), d.offset, d.len, d.samples))
        .collect();
    let len = whole.len() as u64;
    assert_eq!(
        ledger,
        [
            (dir.path("b"), at as u64, len - at as u64, 3),
            (dir.path("c"), len - 23, 22, 1)
        ]
    );
}

#[test]
fn a_file_changed_after_indexing_is_detected() {
    let dir = Dir::new();
    let path = dir.write("x", &[tf_record(&[1; 8]), tf_record(&[2; 24])].concat());
    let records = plain().checksums(false).open(&path).unwrap();
    damage(&path, &[tf_record(&[2; 24]), tf_record(&[1; 8])].concat());
    must_fail(
        fuzzing::sample(&records, 0),
        Changed,
        "the record's length is 24, the index says 8",
    );
}

#[test]
fn index_files_go_to_the_chosen_folder() {
    let dir = Dir::new();
    let path = dir.write("x", &small().0);
    let folder = || {
        TfRecord::builder()
            .index_dir(dir.path("indexes"))
            .open_files(&[&path])
            .unwrap()
    };
    assert_eq!(
        (
            folder().shards_scanned(),
            folder().shards_scanned(),
            folder().index_unsaved()
        ),
        (1, 0, None)
    );
    // Not even root can make a folder of a file.
    let nowhere = TfRecord::builder()
        .index_dir(path.join("sub"))
        .open(&path)
        .unwrap();
    assert_eq!((nowhere.len(), nowhere.shards_scanned()), (8, 1));
    assert_says(nowhere.index_unsaved().unwrap(), "x/sub");
}
