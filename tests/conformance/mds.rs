//! Shards of MosaicML Streaming are read value by value, raw and zstd; inconsistent data is an
//! error.

use crate::common::{Dir, assert_says, build, must_fail, must_say, readers};
use feedline::dataset::{Dataset, DatasetExt, Mds, MdsBuilder};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::unstable::fuzzing;
use feedline::{ErrorKind, Loader, Order, Result};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/mds")
        .join(name)
}

fn parse(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn hex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len() / 2)
        .map(|k| u8::from_str_radix(&text[2 * k..][..2], 16).unwrap())
        .collect()
}

/// All columns; arrays that store their shape are read as arrays.
fn builder() -> MdsBuilder {
    Mds::builder()
        .raw(Field::up_to("shaped", DType::F32, 300))
        .raw(Field::fixed("free", DType::I16, [2, 3]))
}

/// Compares all samples with Streaming's values.
fn compare(dataset: &dyn Dataset, expected: &str) {
    let samples = all(dataset).unwrap();
    let expected = parse(&fixture(expected));
    let expected = expected.as_array().unwrap();
    assert_eq!(samples.len(), expected.len());
    for (id, (fields, right)) in samples.iter().zip(expected).enumerate() {
        assert_eq!(fields.len(), right.as_object().unwrap().len());
        for (field, bytes) in dataset.schema().iter().zip(fields) {
            let right = hex(&right[&field.name]);
            if field.name == "png" {
                let pixels = image::load_from_memory(bytes).unwrap().to_rgb8().into_raw();
                assert_eq!(pixels, right, "png of sample {id}");
                continue;
            }
            assert_eq!(*bytes, right, "{} of sample {id}", field.name);
        }
    }
}

fn all(dataset: &dyn Dataset) -> Result<Vec<Vec<Vec<u8>>>> {
    if let Some(chunks) = dataset.chunked() {
        let chunks: Vec<_> = (0..chunks.starts().len() - 1)
            .map(|chunk| fuzzing::chunk(dataset, chunk))
            .collect::<Result<_>>()?;
        return Ok(chunks.concat());
    }
    (0..dataset.len())
        .map(|sample| fuzzing::sample(dataset, sample))
        .collect()
}

#[test]
fn raw_shards_of_streaming_have_the_values_it_reads() {
    let mds = builder().open(fixture("raw")).unwrap();
    assert!(mds.chunked().is_none());
    compare(&mds, "values.json");
    let fixed = Mds::open(fixture("fixed")).unwrap();
    compare(&fixed, "fixed.json");
    assert_eq!(fixed.sizes().sample_bytes_max, 21);
    let said = fixed.describe();
    assert!(said.starts_with("9 samples in 3 MDS shards of "), "{said}");
    let expected = [
        EncodedField::raw(Field::fixed("x", DType::F32, [3])),
        EncodedField::raw(Field::fixed("y", DType::I64, [])),
        EncodedField::raw(Field::fixed("z", DType::U8, [])),
    ];
    assert_eq!(fixed.schema(), expected);
}

#[test]
fn columns_come_in_the_order_asked_for_beside_pickles() {
    let oracle = Oracle {
        columns: vec![("pkl", None), ("uint8", Some(1))],
        samples: vec![vec![b"..".to_vec(), vec![7]]],
    };
    let dir = Dir::new();
    let shard = oracle.shard();
    dir.write("a.mds", &shard);
    dir.write("index.json", &oracle.index(shard.len(), None));
    let words = "column `c0`: pickles (encoding `pkl`)";
    must_fail(Mds::open(dir.path("")), ErrorKind::Config, words);
    let beside = Mds::builder().columns(["c1"]).open(dir.path("")).unwrap();
    assert_eq!(all(&beside).unwrap(), [[[7]]]);
    let mds = Mds::builder().columns(["str_int", "int8"]);
    let mds = mds.open(fixture("raw")).unwrap();
    let expected = parse(&fixture("values.json"));
    let samples = all(&mds).unwrap();
    for (sample, right) in samples.iter().zip(expected.as_array().unwrap()) {
        assert_eq!(*sample, [hex(&right["str_int"]), hex(&right["int8"])]);
    }
}

#[test]
fn arrays_that_store_their_length_are_lists() {
    let lists = Mds::builder().up_to("*", 300);
    let lists = lists.open(fixture("lists")).unwrap();
    compare(&lists, "lists.json");
    let open = |most| {
        let tokens = Mds::builder().columns(["tokens"]).up_to("tokens", most);
        tokens.open(fixture("lists")).unwrap()
    };
    let field = Field::up_to("tokens", DType::U32, 300);
    assert_eq!(open(300).schema(), [EncodedField::raw(field)]);
    let expected = parse(&fixture("lists.json"));
    for (mode, direct) in readers() {
        let builder = Loader::builder(open(300)).batch_size(5);
        let loader = build(builder.tuning(|t| t.reader(mode).direct(direct)));
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        let tokens = batch.field("tokens").unwrap();
        assert_eq!(tokens.lens().unwrap(), [300, 1, 7, 255, 256]);
        let rows = tokens.as_bytes().unwrap().chunks(1200);
        for (row, right) in rows.zip(expected.as_array().unwrap()) {
            let (values, padding) = row.split_at(hex(&right["tokens"]).len());
            assert_eq!(values, hex(&right["tokens"]));
            assert!(padding.iter().all(|byte| *byte == 0));
        }
    }
    let of = |name: &str| Mds::builder().columns([name]);
    let cases = [
        (of("free").up_to("*", 6), "free", "dtype and shape by"),
        (
            of("shaped"),
            "shaped",
            "their maximum number of elements by",
        ),
    ];
    for (builder, name, words) in cases {
        let words = format!("column `{name}`: its arrays may have any shape: give {words}");
        must_fail(builder.open(fixture("raw")), ErrorKind::Config, &words);
    }
    let short = build(Loader::builder(open(299)));
    let first = short.epoch(0).unwrap().next().unwrap();
    must_say(first, "`tokens` takes at most 299, the sample has 300");
}

const NUMBERS: [&str; 5] = ["fixed", "free", "int", "shaped", "str_float"];

/// Compares every batch of a loader with Streaming's values.
fn batches_are_right(loader: &Loader, samples: usize) {
    let expected = parse(&fixture("values.json"));
    let mut seen = 0;
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        for name in NUMBERS {
            let field = batch.field(name).unwrap();
            let row_bytes = field.size_bytes() / batch.len();
            for (row, id) in batch.ids().iter().enumerate() {
                let right = hex(&expected[*id as usize % 11][name]);
                let bytes = &field.as_bytes().unwrap()[row * row_bytes..][..row_bytes];
                assert_eq!(bytes[..right.len()], right, "{name} of {id}");
                match field.lens() {
                    Some(lens) => assert_eq!(lens[row] as usize * 4, right.len()),
                    None => assert_eq!(row_bytes, right.len()),
                }
            }
        }
        seen += batch.len();
    }
    assert_eq!(seen, samples);
}

#[test]
fn every_reader_gives_right_batches_of_raw_shards() {
    for (mode, direct) in readers() {
        let mds = builder().columns(NUMBERS).open(fixture("raw")).unwrap();
        let builder = Loader::builder(mds).order(Order::shuffled(5));
        let builder = builder.tuning(|t| t.reader(mode).direct(direct));
        batches_are_right(&build(builder.batch_size(3).workers(2)), 11);
    }
}

/// Copies a fixture and changes its index.
fn copy(name: &str, dir: &Dir, change: impl FnOnce(&mut Value)) {
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        dir.write(name, &std::fs::read(&path).unwrap());
    }
    let mut index = parse(&dir.path("index.json"));
    change(&mut index);
    dir.write("index.json", index.to_string().as_bytes());
}

/// Sets the values of an object's pointers: of all shards where they have a `*`, and takes the key
/// away where they begin with `-`.
fn set(index: &mut Value, changes: &Value) {
    for (pointer, value) in changes.as_object().unwrap() {
        for shard in 0..index["shards"].as_array().map_or(0, Vec::len) {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            let parent = parent
                .trim_start_matches('-')
                .replace('*', &shard.to_string());
            match index.pointer_mut(&parent) {
                Some(Value::Array(list)) => list[key.parse::<usize>().unwrap()] = value.clone(),
                Some(Value::Object(map)) if pointer.starts_with('-') => drop(map.remove(key)),
                Some(parent) => parent[key] = value.clone(),
                None => {}
            }
        }
    }
}

#[test]
fn an_impossible_index_is_an_error_that_names_the_shard() {
    // Changes of the index, the kind of the error, and its words.
    let cases = r#"
        {"/version": 1} | Decode | version 1
        {"-/version": null} | Decode | `version` is missing
        {"/shards": []} | Empty | no shards
        {"/shards": {}} | Decode | `shards` is not a list
        {"-/shards/1/samples": null} | Decode | `samples`
        {"/shards/1/samples": 4} | Decode | 3 samples, the index says 4
        {"/shards/1/samples": 1000000} | Truncated | too few for the offsets
        {"/shards/1/samples": 0} | Decode | shard 1: 0 samples
        {"/shards/1/samples": -1} | Decode | shard 1: `samples`: invalid value: integer `-1`
        {"/shards/1/samples": 1.5} | Decode | shard 1: `samples`: invalid type: floating point `1.5`
        {"/shards/1/format": "json"} | Decode | format `json`
        {"/shards/1/column_sizes/0": 13} | Decode | its columns differ from those of shard 0
        {"/shards/*/column_sizes/0": 13} | Config | have 12 bytes, the index
        {"/shards/*/column_sizes/0": 0} | Decode | `column_sizes`: invalid value: integer `0`
        {"/shards/*/column_sizes": [12]} | Decode | 3 encodings, 1 sizes
        {"/shards/*/column_names/1": "x"} | Decode | called `x`
        {"/shards/*/column_encodings/1": "pkl"} | Config | pickles
        {"/shards/*/column_encodings/1": "what"} | Config | `what`
        {"/shards/*/column_encodings/0": "ndarray:float32:3,0"} | Config | `ndarray:float32:3,0` is not known
        {"/shards/*/column_encodings/0": "ndarray:float32:4294967296,4294967296"} | Config | have 18446744073709551615 bytes
        {"/shards/0/compression": "zstd"} | Decode | without `zip_data`
        {"/shards/0/zip_data": ZIP} | Decode | without `compression`
        {"/shards/0/zip_data": ZIP, "/shards/0/compression": "gz:9", "/shards/0/raw_data/basename": "gone"} | Config | compressed by `gz:9`
        {"/shards/0/raw_data/bytes": 287} | Changed | 288 bytes, the index
        {"/shards/0/raw_data/bytes": 289} | Truncated | 288 bytes, the index
        {"/shards/0/raw_data/bytes": 4294967296} | Decode | less than 4 GiB
        {"/shards/0/raw_data/basename": "gone"} | NotFound | gone
        {"/shards/0/raw_data/basename": ""} | Decode | within the dataset's folder
        {"/shards/0/raw_data/basename": "."} | Decode | within the dataset's folder
        {"/shards/1/raw_data/basename": "shard.00000.mds"} | Decode | two shards name the file
        {"/shards/0/raw_data": null} | Decode | shard 0: `raw_data`
    "#;
    let zip = r#"{"basename": "shard.00000.mds.gz", "bytes": 288, "hashes": {}}"#;
    for case in cases.replace("ZIP", zip).trim().lines() {
        println!("{case}");
        let mut words = case.trim().split(" | ");
        let [changes, kind, words] = std::array::from_fn(|_| words.next().unwrap());
        let changes: Value = serde_json::from_str(changes).unwrap();
        let dir = Dir::new();
        copy("fixed", &dir, |index| set(index, &changes));
        let error = must_say(Mds::open(dir.path("")), words);
        assert_eq!(format!("{:?}", error.kind()), kind, "{error}");
        assert!(error.site().path.is_some(), "{error}");
    }
    let dir = Dir::new();
    let kind = || Mds::open(dir.path("")).err().unwrap().kind();
    assert_eq!(kind(), ErrorKind::NotFound);
    for text in ["", "{", "[1]", "\u{0}", &"[".repeat(1 << 20)] {
        dir.write("index.json", text.as_bytes());
        assert_eq!(kind(), ErrorKind::Decode);
    }
}

#[test]
fn shards_that_are_replaced_after_opening_are_refused() {
    for follow in [false, true] {
        let dir = Dir::new();
        copy("raw", &dir, |_| ());
        let mds = Mds::builder()
            .columns(["int"])
            .follow_links(follow)
            .open(dir.path(""))
            .unwrap();
        let loader = build(Loader::builder(mds).batch_size(1));
        let names = std::fs::read_dir(dir.path("")).unwrap().flatten();
        for entry in names.filter(|entry| entry.file_name() != "index.json") {
            let other = dir.path("other");
            std::fs::copy(entry.path(), &other).unwrap();
            std::fs::rename(&other, entry.path()).unwrap();
        }
        let mut epoch = loader.epoch(0).unwrap();
        let error = epoch.find_map(Result::err).expect("an error");
        assert_eq!(error.kind(), ErrorKind::Changed, "{error}");
    }
}

#[test]
fn names_in_the_index_stay_within_the_folder() {
    let good = std::fs::read(fixture("fixed/shard.00000.mds")).unwrap();
    let dir = Dir::new();
    let outside = dir.write("outside.mds", &good);
    dir.write("set/sub/deep/a.mds", &good);
    let open = |name: &str| {
        let mut index = parse(&fixture("fixed/index.json"));
        index["shards"].as_array_mut().unwrap().truncate(1);
        index["shards"][0]["raw_data"]["basename"] = json!(name);
        dir.write("set/index.json", index.to_string().as_bytes());
        Mds::open(dir.path("set"))
    };
    assert_eq!(open("sub/deep/a.mds").unwrap().len(), 3);
    let absolute = outside.to_str().unwrap();
    let names = [
        absolute,
        "../outside.mds",
        "sub/../../outside.mds",
        "sub/../sub/deep/a.mds",
        "./sub/deep/a.mds",
        "sub//deep/a.mds",
        "sub/deep/a.mds/",
        "sub/./deep/a.mds",
        "..",
        "/",
        "sub\\deep\\a.mds",
        "sub/deep/a.mds\u{0}",
    ];
    for name in names {
        println!("{name:?}");
        must_fail(open(name), ErrorKind::Decode, "within the dataset's folder");
    }
    assert_eq!(open("sub").err().unwrap().kind(), ErrorKind::NotAFile);
}

#[test]
fn open_refuses_fields_that_a_column_cannot_hold() {
    let of = |name: &str| Mds::builder().columns([name]);
    let fixed = |name: &str, dtype, dims: &[usize]| Field::fixed(name, dtype, dims.to_vec());
    let nope = "no column `nope`; there are bytes, fixed, float16";
    let twice = Mds::builder().columns(["int", "int"]);
    let none = Mds::builder().columns(Vec::<String>::new());
    let shaped = of("shaped").raw(fixed("shaped", DType::F64, &[6]));
    let int = of("int").raw(fixed("int", DType::I64, &[2]));
    let up_to = of("fixed").raw(Field::up_to("fixed", DType::U8, 12));
    let cases = [
        (of("nope"), nope),
        (twice, "selected twice"),
        (none, "0 columns"),
        (
            Mds::builder().raw(fixed("nope", DType::U8, &[])),
            "no column `nope`",
        ),
        (
            of("int").raw(fixed("free", DType::I16, &[6])),
            "not one of the selected columns",
        ),
        (shaped, "its arrays are f32, the field is f64"),
        (int, "its values have 8 bytes, the field has 16"),
        (up_to, "its values have 12 bytes"),
    ];
    for (builder, words) in cases {
        must_fail(builder.open(fixture("raw")), ErrorKind::Config, words);
    }
    // A single sample with another shape is the sample's error.
    let turned = fixed("free", DType::I16, &[3, 2]);
    let halves = fixed("free", DType::F16, &[2, 3]);
    let cases = [
        (turned, "shape [2, 3], expected [3, 2]"),
        (halves, "an array of i16, expected f16"),
        (
            Field::up_to("free", DType::I16, 6),
            "shape [2, 3], expected",
        ),
    ];
    for (field, words) in cases {
        let mds = Mds::builder().columns(["int", "free"]).raw(field);
        let mds = mds.open(fixture("raw")).unwrap();
        let error = must_say(fuzzing::sample(&mds, 1), words);
        assert_says(&error, "column `free`");
        assert_eq!(error.site().sample, Some(1));
    }
}

/// A naive writer: columns of (encoding, fixed size), samples of values.
struct Oracle {
    columns: Vec<(&'static str, Option<usize>)>,
    samples: Vec<Vec<Vec<u8>>>,
}

impl Oracle {
    fn description(&self) -> Value {
        let names: Vec<String> = (0..self.columns.len()).map(|k| format!("c{k}")).collect();
        let encodings: Vec<_> = self.columns.iter().map(|column| column.0).collect();
        let sizes: Vec<_> = self.columns.iter().map(|column| column.1).collect();
        json!({ "version": 2, "format": "mds", "column_names": names, "column_encodings": encodings, "column_sizes": sizes })
    }

    fn shard(&self) -> Vec<u8> {
        let config = self.description().to_string();
        let body = |sample: &Vec<Vec<u8>>| -> Vec<u8> {
            let sizes = self
                .columns
                .iter()
                .zip(sample)
                .filter(|(column, _)| column.1.is_none());
            let head: Vec<u8> = sizes
                .flat_map(|(_, value)| (value.len() as u32).to_le_bytes())
                .collect();
            [head, sample.concat()].concat()
        };
        let bodies: Vec<Vec<u8>> = self.samples.iter().map(body).collect();
        let mut offset = 4 * (bodies.len() + 2) + config.len();
        let mut out = (bodies.len() as u32).to_le_bytes().to_vec();
        out.extend((offset as u32).to_le_bytes());
        for body in &bodies {
            offset += body.len();
            out.extend((offset as u32).to_le_bytes());
        }
        out.extend(config.bytes());
        out.extend(bodies.concat());
        out
    }

    fn index(&self, raw: usize, zip: Option<usize>) -> Vec<u8> {
        let mut shard = self.description();
        shard["samples"] = json!(self.samples.len());
        shard["raw_data"] = json!({ "basename": "a.mds", "bytes": raw, "hashes": {} });
        shard["zip_data"] = zip.map_or(
            Value::Null,
            |zip| json!({ "basename": "a.zstd", "bytes": zip, "hashes": {} }),
        );
        shard["compression"] = zip.map_or(Value::Null, |_| json!("zstd"));
        json!({ "version": 2, "shards": [shard] })
            .to_string()
            .into_bytes()
    }

    fn open(&self, shard: &[u8]) -> Result<Mds> {
        fuzzing::mds(&self.index(shard.len(), None), shard)
    }

    fn small() -> Self {
        let samples = (0..4_u8)
            .map(|k| vec![vec![k; 3], vec![k, 1], (0..k).collect(), vec![9; 2]])
            .collect();
        Self {
            columns: vec![
                ("ndarray:uint8:3", Some(3)),
                ("bytes", None),
                ("str", None),
                ("uint16", Some(2)),
            ],
            samples,
        }
    }

    /// Whether a byte of the shard belongs to a value.
    fn is_value(&self, shard: &[u8], at: usize) -> bool {
        let heads: Vec<usize> = (0..self.samples.len())
            .map(|k| u32::from_le_bytes(shard[4 + 4 * k..][..4].try_into().unwrap()) as usize)
            .collect();
        let head = 4 * self
            .columns
            .iter()
            .filter(|column| column.1.is_none())
            .count();
        at >= heads[0]
            && !heads
                .iter()
                .any(|start| (*start..start + head).contains(&at))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn mds_reads_all_written_values(
        columns in vec(prop_oneof![
            Just(("bytes", None)), Just(("str", None)), Just(("uint32", Some(4))), Just(("ndarray:int16:2,3", Some(12))),
        ], 1..6),
        lens in vec(vec(0_usize..50, 6), 1..20),
        seed in any::<u64>(),
    ) {
        let value = |row: usize, column: usize, len| crate::common::noise(len, seed ^ (row * 100 + column) as u64);
        let sample = |(row, lens): (usize, &Vec<usize>)| -> Vec<Vec<u8>> {
            columns.iter().enumerate().map(|(k, column)| value(row, k, column.1.unwrap_or(lens[k]))).collect()
        };
        let samples = lens.iter().enumerate().map(sample).collect();
        let oracle = Oracle { columns: columns.clone(), samples };
        let shard = oracle.shard();
        let mds = oracle.open(&shard).unwrap();
        prop_assert_eq!(all(&mds).unwrap(), oracle.samples);
    }
}

#[test]
fn a_flip_in_a_raw_shard_changes_one_value_or_is_an_error() {
    let oracle = Oracle::small();
    let shard = oracle.shard();
    let mut refused = 0;
    let mut failed = 0;
    let mut silent = 0;
    for at in 0..shard.len() {
        for bits in [0x01, 0x04, 0x20, 0x80, 0xff] {
            let mut bytes = shard.clone();
            bytes[at] ^= bits;
            let Ok(mds) = oracle.open(&bytes) else {
                refused += 1;
                continue;
            };
            assert_eq!(mds.len(), 4, "byte {at} bits {bits:02x}");
            let Ok(samples) = all(&mds) else {
                failed += 1;
                continue;
            };
            let lens = |samples: &[Vec<Vec<u8>>]| -> Vec<usize> {
                samples.iter().flatten().map(Vec::len).collect()
            };
            let same = lens(&samples) == lens(&oracle.samples);
            // JSON with other white space or an unused key describes the same columns.
            let wrong = samples != oracle.samples;
            assert!(
                same && wrong == oracle.is_value(&shard, at),
                "byte {at} bits {bits:02x}"
            );
            silent += usize::from(wrong);
        }
    }
    let values: usize = oracle.samples.iter().flatten().map(Vec::len).sum();
    assert_eq!(
        silent,
        values * 5,
        "every flip of a value goes undetected: the format has no checksum"
    );
    assert!(refused > 0 && failed > 0, "{refused} {failed}");
}

/// Flips every byte of a shard under an open `.facts().checksums().open()` dataset: the values stay right, or it is
/// an error.
fn flips_behind_checksums(shard: &[u8], name: &str, index: &[u8]) -> usize {
    let dir = Dir::new();
    let path = dir.write(name, shard);
    dir.write("index.json", index);
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    let open =
        || Mds::open(dir.path("")).and_then(|mds| mds.facts(dir.path("crcs")).checksums().open());
    let checked = open().unwrap();
    assert!(checked.built());
    let right = all(&checked).unwrap();
    let mut errors = 0;
    for at in 0..shard.len() {
        for bits in [0x01, 0x80, 0xff] {
            let mut bytes = shard.to_vec();
            bytes[at] ^= bits;
            let file = std::fs::File::create(&path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
            file.set_modified(modified).unwrap();
            match open().and_then(|checked| all(&checked)) {
                Ok(samples) => {
                    assert_eq!(samples, right, "byte {at} bits {bits:02x}: silently wrong")
                }
                Err(_) => errors += 1,
            }
        }
    }
    errors
}

#[test]
fn checked_finds_every_flip_of_a_raw_shard() {
    let oracle = Oracle::small();
    let shard = oracle.shard();
    let values: usize = oracle.samples.iter().flatten().map(Vec::len).sum();
    assert!(
        flips_behind_checksums(&shard, "a.mds", &oracle.index(shard.len(), None)) >= values * 3
    );
}

#[test]
fn a_raw_shard_cut_anywhere_is_an_error() {
    let oracle = Oracle::small();
    let shard = oracle.shard();
    for len in 0..shard.len() {
        let error = fuzzing::mds(&oracle.index(shard.len(), None), &shard[..len]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Truncated, "cut at {len}: {error}");
        assert!(oracle.open(&shard[..len]).is_err(), "cut at {len}");
    }
    for over in 1..20 {
        let longer = [&shard[..], &vec![0; over]].concat();
        assert!(oracle.open(&longer).is_err(), "{over} over");
    }
}

#[test]
fn a_flipped_byte_of_the_index_is_an_error_or_changes_nothing() {
    let oracle = Oracle::small();
    let shard = oracle.shard();
    let index = oracle.index(shard.len(), None);
    let mut unchanged = Vec::new();
    for at in 0..index.len() {
        for bits in [0x01, 0x02, 0x08, 0x20, 0x80] {
            let mut bytes = index.clone();
            bytes[at] ^= bits;
            let Ok(mds) = fuzzing::mds(&bytes, &shard) else {
                continue;
            };
            let samples = all(&mds).unwrap();
            assert_eq!(samples, oracle.samples, "byte {at} bits {bits:02x}");
            assert_eq!(mds.schema(), oracle.open(&shard).unwrap().schema());
            unchanged.push(at);
        }
    }
    // Most of it matters.
    let count = unchanged.len();
    assert!(count < index.len(), "{count}");
}

#[cfg(feature = "zstd")]
mod compressed {
    use super::*;

    #[test]
    fn zstd_shards_of_streaming_have_the_values_it_reads() {
        let mds = builder().open(fixture("zstd")).unwrap();
        assert_eq!(mds.chunked().unwrap().starts().last(), Some(&11));
        compare(&mds, "values.json");
        assert_says(mds.describe(), "4 compressed by zstd");
    }

    #[test]
    fn lists_in_compressed_shards_have_their_values() {
        let mds = Mds::builder().up_to("*", 300);
        let mds = mds.open(fixture("lists-zstd")).unwrap();
        compare(&mds, "lists.json");
    }

    #[test]
    fn a_sample_of_a_compressed_shard_has_a_maximum_of_its_own() {
        let mds = builder().open(fixture("zstd")).unwrap();
        let values = all(&mds).unwrap();
        let rows = values
            .iter()
            .map(|fields| fields.iter().map(|value| value.len() as u64).sum::<u64>());
        let row = rows.max().unwrap() + 4 * mds.schema().len() as u64;
        for field in 0..mds.schema().len() {
            let lens = values.iter().map(|fields| fields[field].len() as u64);
            let longest = lens.max().unwrap();
            let found = mds.field_bytes_max(field).unwrap();
            assert!(
                (longest..=row).contains(&found),
                "field {field}: {found} for {longest}, a row has {row}"
            );
        }
        // Exact for a column alone, also where the offsets fill more than a block of zstd.
        let samples = (0..40_000_usize)
            .map(|k| vec![crate::common::noise(k * 7 % 29, k as u64)])
            .collect();
        let columns = vec![("bytes", None)];
        let oracle = Oracle { columns, samples };
        let shard = oracle.shard();
        let zip = packed(&shard, false);
        let mds = fuzzing::mds(&oracle.index(shard.len(), Some(zip.len())), &zip).unwrap();
        let lens = oracle.samples.iter().map(|fields| fields[0].len() as u64);
        assert_eq!(mds.field_bytes_max(0).unwrap(), lens.max().unwrap());
        // A hostile number of samples takes no memory.
        let index = String::from_utf8(oracle.index(shard.len(), Some(zip.len()))).unwrap();
        let index = index.replace("\"samples\":40000", "\"samples\":4000000000");
        let mds = fuzzing::mds(index.as_bytes(), &zip).unwrap();
        let most = mds.field_bytes_max(0);
        must_fail(most, ErrorKind::Truncated, "4000000000 samples");
    }

    #[test]
    fn a_decompressed_copy_of_a_shard_is_read_instead() {
        for raw in [vec![1], vec![0, 1, 2, 3]] {
            let dir = Dir::new();
            copy("zstd", &dir, |_| {});
            for shard in &raw {
                let zip = dir.path(&format!("shard.{shard:05}.mds.zstd"));
                let raw = zstd::bulk::decompress(&std::fs::read(&zip).unwrap(), 1 << 20).unwrap();
                dir.write(&format!("shard.{shard:05}.mds"), &raw);
                std::fs::remove_file(zip).unwrap();
            }
            let mds = builder().open(dir.path("")).unwrap();
            assert_eq!(mds.chunked().is_some(), raw.len() == 1);
            compare(&mds, "values.json");
        }
    }

    #[test]
    fn every_reader_gives_right_batches_of_zstd_shards() {
        for (mode, direct) in readers() {
            for order in [Order::sequential(), Order::shuffled(5)] {
                let mds = builder().columns(NUMBERS).open(fixture("zstd")).unwrap();
                let builder = Loader::builder(mds).order(order);
                let builder = builder.tuning(|t| t.reader(mode).direct(direct));
                batches_are_right(&build(builder.batch_size(3).workers(2)), 11);
            }
        }
        let whole = builder().columns(NUMBERS).open(fixture("zstd")).unwrap();
        let part = whole.subset([10, 3, 7]).unwrap();
        let loader = build(Loader::builder(part).batch_size(3));
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        let values = parse(&fixture("values.json"));
        let int = |id: usize| i64::from_le_bytes(hex(&values[id]["int"]).try_into().unwrap());
        let found = batch.field("int").unwrap().as_slice::<i64>().unwrap();
        assert_eq!(found, [10, 3, 7].map(int));
    }

    fn packed(shard: &[u8], checksum: bool) -> Vec<u8> {
        let mut zstd = zstd::bulk::Compressor::new(3).unwrap();
        zstd.include_checksum(checksum).unwrap();
        zstd.compress(shard).unwrap()
    }

    /// Flips and cuts a compressed shard; counts flips, silently wrong values and errors. The
    /// structure must never be wrong.
    fn sweep(index: &[u8], zip: &[u8]) -> [usize; 3] {
        let open = |zip: &[u8]| fuzzing::mds(index, zip).and_then(|mds| fuzzing::chunk(&mds, 0));
        let right = open(zip).unwrap();
        let lens = |samples: &[Vec<Vec<u8>>]| -> Vec<Vec<usize>> {
            samples
                .iter()
                .map(|fields| fields.iter().map(Vec::len).collect())
                .collect()
        };
        let [mut cases, mut silent, mut errors] = [0; 3];
        for at in 0..zip.len() {
            for bits in [0x01, 0x04, 0x20, 0x80, 0xff] {
                let mut bytes = zip.to_vec();
                bytes[at] ^= bits;
                cases += 1;
                match open(&bytes) {
                    Ok(samples) => {
                        assert_eq!(lens(&samples), lens(&right), "byte {at} bits {bits:02x}");
                        silent += usize::from(samples != right);
                    }
                    Err(_) => errors += 1,
                }
            }
        }
        for len in 0..zip.len() {
            assert!(open(&zip[..len]).is_err(), "cut at {len}");
        }
        [cases, silent, errors]
    }

    #[test]
    fn a_damaged_zstd_shard_never_loses_samples() {
        let oracle = Oracle::small();
        let shard = oracle.shard();
        let swept = |checksum| {
            let zip = packed(&shard, checksum);
            sweep(&oracle.index(shard.len(), Some(zip.len())), &zip)
        };
        let [cases, silent, _] = swept(false);
        println!(
            "zstd without a frame checksum, as Streaming writes it: {silent} of {cases} flips are silent"
        );
        assert!(silent * 3 < cases, "{silent} of {cases}");
        assert_eq!(swept(true)[1], 0);
        // By Streaming itself.
        let mut index = parse(&fixture("lists-zstd/index.json"));
        index["shards"].as_array_mut().unwrap().truncate(1);
        let zip = std::fs::read(fixture("lists-zstd/shard.00000.mds.zstd")).unwrap();
        let [cases, silent, errors] = sweep(index.to_string().as_bytes(), &zip);
        println!("a zstd shard of Streaming's: {silent} of {cases} flips are silent");
        assert!(
            errors > 0 && silent > 0,
            "{errors} errors, {silent} silent: it has no frame checksum"
        );
    }

    #[test]
    fn checked_finds_every_flip_of_a_zstd_shard() {
        let oracle = Oracle::small();
        let shard = oracle.shard();
        let zip = packed(&shard, false);
        let index = oracle.index(shard.len(), Some(zip.len()));
        assert_eq!(
            flips_behind_checksums(&zip, "a.zstd", &index),
            zip.len() * 3
        );
    }

    #[test]
    fn an_oversized_frame_is_refused_before_allocation() {
        let oracle = Oracle::small();
        let shard = oracle.shard();
        let bomb = packed(&vec![0; 64 << 20], false);
        let open = |zip: &[u8]| fuzzing::mds(&oracle.index(shard.len(), Some(zip.len())), zip);
        must_say(open(&bomb), "decompresses to 67108864 bytes");
        // A first frame that fits, with more data after it.
        let two = [packed(&shard, false), packed(&[0; 1 << 20], false)].concat();
        let error = fuzzing::chunk(&open(&two).unwrap(), 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Decode);
        // A shorter frame.
        let short = packed(&shard[..shard.len() - 1], false);
        let chunk = fuzzing::chunk(&open(&short).unwrap(), 0);
        must_fail(chunk, ErrorKind::Truncated, "the index says");
    }
}

#[cfg(not(feature = "zstd"))]
#[test]
fn a_compressed_shard_without_the_feature_is_an_error() {
    let refused = builder().open(fixture("zstd"));
    must_fail(refused, ErrorKind::Config, "feature `zstd`");
}
