//! Joins by key: tables as csv has them, both kinds of misses, two sets of shards, against a naive
//! join.

use crate::common::formats::tar_member;
use crate::common::numeric::{Row, check, one};
use crate::common::{Dir, assert_says, must_fail, must_say, noise_records};
use feedline::dataset::{Dataset, DatasetExt, Images, Missing, Mix, Table, Tar};
use feedline::tensor::{DType, EncodedField, Field};
use feedline::unstable::Fingerprint;
use feedline::{ErrorKind, Result};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The fields of all samples as text: numbers by their digits.
fn texts(dataset: &dyn Dataset) -> Vec<Vec<String>> {
    let schema = dataset.schema();
    let text = |field: &EncodedField, bytes: &[u8]| match field.as_raw().map(|raw| raw.dtype()) {
        Some(DType::I64) => i64::from_ne_bytes(bytes.try_into().unwrap()).to_string(),
        Some(DType::F64) => format!("{:?}", f64::from_ne_bytes(bytes.try_into().unwrap())),
        _ => String::from_utf8_lossy(bytes).into_owned(),
    };
    (0..dataset.len())
        .map(|sample| {
            let fields = feedline::unstable::fuzzing::sample(dataset, sample).unwrap();
            let fields = schema.iter().zip(&fields);
            fields.map(|(field, bytes)| text(field, bytes)).collect()
        })
        .collect()
}

/// A csv by its text: the rows without the key, or words of the error.
type CsvCase = (
    &'static str,
    Result<&'static [&'static [&'static str]], &'static str>,
);

const CSV: &[CsvCase] = &[
    ("k,v\na,1\nb,-2\n", Ok(&[&["1"], &["-2"]])),
    ("\u{feff}k,v\r\na,1\r\nb,2", Ok(&[&["1"], &["2"]])),
    ("\u{feff}\"k\",v\r\na,1\r\n", Ok(&[&["1"]])),
    ("v,k,w\n1,a,x\n2,b,y\n", Ok(&[&["1", "x"], &["2", "y"]])),
    (
        "k,v\n\"a, b.jpg\",\"say \"\"hi\"\"\"\nc,\"two\nlines\"\n",
        Ok(&[&["say \"hi\""], &["two\nlines"]]),
    ),
    ("k,v\nü,1\n\nb,2\n\n", Ok(&[&["1"], &["2"]])),
    (
        "k,v\na,1\nb,2.5\nc,1e3\n",
        Ok(&[&["1.0"], &["2.5"], &["1000.0"]]),
    ),
    ("k,v\na,1\nb,x\n", Ok(&[&["1"], &["x"]])),
    // Ids of 64 bits without a sign, and numbers that f64 does not hold, keep their digits.
    (
        "k,v,w\na,18446744073709551615,1\nb,1,1e999\n",
        Ok(&[&["18446744073709551615", "1"], &["1", "1e999"]]),
    ),
    (
        "k,v\na,20000001.0\nb,1700000000.25\n",
        Ok(&[&["20000001.0"], &["1700000000.25"]]),
    ),
    ("k,v\na,\nb,x\n", Ok(&[&[""], &["x"]])),
    ("k,v\na,\nb,\n", Ok(&[&[""], &[""]])),
    ("k\na\n", Ok(&[&[]])),
    (
        "k,v\na,1\nb,\n",
        Err("line 3: column \"v\" has numbers, and this cell is empty"),
    ),
    ("k,v\n\"a\nb\",1\nc, \n", Err("line 4: column \"v\"")),
    ("k,v\na,1\n,2\n", Err("line 3: the key, \"k\", is empty")),
    (
        "k,v\na,1\nb, c,2\n",
        Err("line 3: 3 cells, the header has 2"),
    ),
    ("k,v\na,1\nb\n", Err("line 3: 1 cells, the header has 2")),
    ("k,v\na,\"x\nb,2\n", Err("an odd number of quotes")),
    ("k;v\r\na;\"1;5\"\r\nb;2,5\r\n", Ok(&[&["1;5"], &["2,5"]])),
    (
        "k|v\na|1\n",
        Err("no column \"k\"; the header has [\"k|v\"]; name the column of keys"),
    ),
    (
        "K,v\na,1\n",
        Err("no column \"k\"; the header has [\"K\", \"v\"]"),
    ),
    ("k,v,v\na,1,2\n", Err("names column \"v\" twice")),
    ("k,v\n", Err("a table without rows")),
    ("", Err("an empty file: a table begins with a header")),
    ("\u{feff}", Err("an empty file")),
];

#[test]
fn tables_are_read_as_csv_says() {
    for (csv, expected) in CSV {
        let table = Table::builder("k").read_bytes(csv);
        match expected {
            Ok(rows) => assert_eq!(texts(&table.unwrap()), *rows, "{csv:?}"),
            Err(words) => drop(must_say(table, words)),
        }
    }
    let utf16 = b"\xff\xfek\0\n\0".to_vec();
    must_say(Table::builder("k").read_bytes(utf16), "UTF-16");
    let gzip = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1, 2];
    must_say(Table::builder("k").read_bytes(gzip), "gzip");
}

#[test]
fn columns_separators_and_files_are_chosen() {
    let dir = Dir::new();
    dir.write("a/0.tsv", b"k\tv\tw\na\t1\tx, y\n");
    dir.write("a/1.csv", b"k,v,w\nb,2.5,z\n");
    let table = Table::builder("k").columns(["w", "v"]).read(dir.path("a"));
    let table = table.unwrap();
    assert_eq!(texts(&table), [["x, y", "1.0"], ["z", "2.5"]]);
    let member = table.framed().unwrap().member(1, None).unwrap();
    assert!(
        member.starts_with("line 2 of ") && member.ends_with("1.csv"),
        "{member}"
    );
    let bars = Table::builder("k").separator(b'|');
    assert_eq!(texts(&bars.read_bytes("k|v\na|1,5\n").unwrap()), [["1,5"]]);
    dir.write("a/2.csv", b"k,w,v\nb,2.5,z\n");
    must_say(
        Table::read(dir.path("a"), "k"),
        "the header is k, w, v, in the first file k, v, w",
    );
    must_say(
        Table::builder("k").columns(["x"]).read_bytes("k,v\na,1\n"),
        "no column \"x\"",
    );
}

#[test]
fn a_table_alone_is_a_dataset() {
    let rows = [7_i64, -1].map(|value| one("v", &value.to_ne_bytes()));
    check(|| Ok(table("k,v\na,7\nb,-1\n")), &rows);
}

/// A folder with these files.
fn folder(names: &[&str]) -> (Dir, Images) {
    let dir = Dir::new();
    for name in names {
        dir.write(&format!("set/{name}"), name.as_bytes());
    }
    let images = Images::open(dir.path("set")).unwrap();
    (dir, images)
}

fn table(csv: &str) -> Table {
    Table::builder("k").read_bytes(csv).unwrap()
}

/// Files, a csv, and the samples of the join with misses left out and words of its description, or
/// words of the error. With misses, the default is an error with the same words.
type Case = (&'static [&'static str], &'static str, Expected);
type Expected = Result<(&'static [[&'static str; 2]], &'static str), &'static str>;

const CASES: &[Case] = &[
    (
        &["a.jpg", "b.jpg"],
        "k,v\nb.jpg,2\na.jpg,1\n",
        Ok((
            &[["a.jpg", "1"], ["b.jpg", "2"]],
            "joined to 2 rows of <memory> by key",
        )),
    ),
    (
        &["a.jpg", "b.jpg", "c.jpg"],
        "k,v\nb.jpg,2\nd.jpg,4\nc.jpg,3\n",
        Ok((
            &[["b.jpg", "2"], ["c.jpg", "3"]],
            "1 samples without a row: \"a.jpg\"; 1 rows without a sample: \"d.jpg\" (line 3)",
        )),
    ),
    (
        &["a.jpg"],
        "k,v\n\"d\n.jpg\",4\na.jpg,1\ne,5\nf,5\ng,5\nh,5\ni,5\n",
        Ok((
            &[["a.jpg", "1"]],
            "6 rows without a sample: \"d\\n.jpg\" (line 2), \"e\" (line 5), \"f\" (line 6), \"g\" (line 7), \"h\" (line 8), …",
        )),
    ),
    (
        &["a, b.jpg", "say \"hi\".jpg", "ü.jpg"],
        "k,v\nü.jpg,1\n\"a, b.jpg\",2\n\"say \"\"hi\"\".jpg\",3\n",
        Ok((
            &[["a, b.jpg", "2"], ["say \"hi\".jpg", "3"], ["ü.jpg", "1"]],
            "by key",
        )),
    ),
    (
        &["a.jpg", "b.jpg"],
        "k,v\nb,2\na,1\n",
        Ok((&[["a.jpg", "1"], ["b.jpg", "2"]], "by path without ending")),
    ),
    (
        &["x/a.jpg", "y/b.jpg"],
        "k,v\ny/b.jpg,2\nx/a.jpg,1\n",
        Ok((&[["x/a.jpg", "1"], ["y/b.jpg", "2"]], "by key")),
    ),
    (
        &["x/a.jpg", "y/b.jpg"],
        "k,v\nb.jpg,2\na.jpg,1\n",
        Ok((&[["x/a.jpg", "1"], ["y/b.jpg", "2"]], "by file name")),
    ),
    (
        &["x/a.1.jpg", "y/b.jpg"],
        "k,v\nb,2\na.1,1\n",
        Ok((
            &[["x/a.1.jpg", "1"], ["y/b.jpg", "2"]],
            "by file name without ending",
        )),
    ),
    (
        &["a.jpg", "b.jpg"],
        "k,v\n/data/b.jpg,2\nC:\\data\\a.jpg,1\n",
        Ok((
            &[["a.jpg", "1"], ["b.jpg", "2"]],
            "by file name on both sides",
        )),
    ),
    (
        &["a.jpg", "b.jpg"],
        "k,v\nmasks/b.png,2\nmasks/a.png,1\n",
        Ok((
            &[["a.jpg", "1"], ["b.jpg", "2"]],
            "by file name without ending on both sides",
        )),
    ),
    // One rule holds for all rows: one that finds most of them.
    (
        &["a.jpg", "b.jpg", "c.jpg"],
        "k,v\na,1\nb,2\nc.jpg,3\n",
        Ok((
            &[["a.jpg", "1"], ["b.jpg", "2"]],
            "1 samples without a row: \"c.jpg\"; 1 rows without a sample: \"c.jpg\" (line 4)",
        )),
    ),
    (
        &["a.jpg", "b.jpg"],
        "k,v\na.jpg,1\nb,2\n",
        Ok((
            &[["a.jpg", "1"], ["b.jpg", "2"]],
            "by file name without ending on both sides",
        )),
    ),
    (
        &["0001.jpg"],
        "k,v\n0001,1\n",
        Ok((&[["0001.jpg", "1"]], "without ending")),
    ),
    (&["0001.jpg"], "k,v\n1,1\n", Err("no sample of 1 pictures")),
    (
        &["a.jpg"],
        "k,v\na.jpg,1\nb.jpg,2\n\nb.jpg,3\na.jpg,4\n",
        Err("key \"b.jpg\" occurs twice: \"b.jpg\" (line 3) and \"b.jpg\" (line 5)"),
    ),
    (
        &["x/a.jpg", "y/a.jpg"],
        "k,v\na.jpg,1\n",
        Err(
            "key \"a.jpg\" is ambiguous (compared by file name): \"x/a.jpg\" (sample 0) and \"y/a.jpg\" (sample 1) have it",
        ),
    ),
    (
        &["a.jpg", "a.png"],
        "k,v\na,1\n",
        Err("key \"a\" is ambiguous"),
    ),
    (
        &["a.jpg"],
        "k,v\nx/a.jpg,1\ny/a.jpg,2\n",
        Err("\"x/a.jpg\" (line 2) and \"y/a.jpg\" (line 3) have it"),
    ),
];

#[test]
fn samples_meet_their_rows_by_name() {
    for (names, csv, expected) in CASES {
        let (dir, images) = folder(names);
        let flat = dir.path("set/**");
        // Without the labels of class folders.
        let images = match images.classes() {
            [] => images,
            _ => Images::open(flat).unwrap(),
        };
        let strict = Images::open_files(&paths(&images)).unwrap();
        let strict = strict.join(table(csv));
        let joined = images.join(table(csv)).missing(Missing::Skip).open();
        let (rows, words) = match expected {
            Ok(expected) => expected,
            Err(words) => {
                must_fail(joined, ErrorKind::Config, words);
                continue;
            }
        };
        let joined = joined.unwrap();
        assert_eq!(texts(&joined), *rows, "{csv:?}");
        assert_says(joined.describe(), words);
        if words.contains("without a") {
            let error = must_fail(strict.open(), ErrorKind::Config, "missing(Missing::Skip)");
            assert_says(error, words);
        }
    }
}

fn paths(images: &Images) -> Vec<std::path::PathBuf> {
    (0..images.len()).map(|id| images.path_of(id)).collect()
}

/// A shard of members.
fn shard(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes: Vec<u8> = members
        .iter()
        .flat_map(|(name, bytes)| tar_member(name, bytes))
        .collect();
    bytes.extend([0; 1024]);
    bytes
}

fn bytes_of(ending: &str, dir: &Dir, pattern: &str) -> Tar {
    let field = Field::fixed(ending, DType::U8, [3]);
    let builder = Tar::builder().raw(field, ending).index(false);
    builder.open(dir.path(pattern)).unwrap()
}

/// Keys in folders, a member that no field takes before a sample's, a long name.
fn two_tars(dir: &Dir) -> [Tar; 2] {
    let pax = |path: &str| {
        let record = format!(" path={path}\n");
        let len = (record.len() + 2).to_string();
        let mut header = tar_member("x", (len + &record).as_bytes());
        header[156] = b'x';
        let sum: u32 = header[..512].iter().map(|byte| u32::from(*byte)).sum();
        let old: u32 = header[148..156].iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{:06o}\0 ", sum - old + 8 * 32).as_bytes());
        header
    };
    let first = shard(&[
        ("x/a.json", b"{}"),
        ("x/a.bin", b"xa1"),
        ("x/b.bin", b"xb1"),
    ]);
    let long = [pax("y/a.bin"), shard(&[("short.bin", b"ya1")])].concat();
    dir.write("left/0.tar", &first);
    dir.write("left/1.tar", &long);
    dir.write(
        "right/0.tar",
        &shard(&[("y/a.lat", b"ya2"), ("x/b.lat", b"xb2")]),
    );
    dir.write(
        "right/1.tar",
        &shard(&[("x/c.lat", b"xc2"), ("x/a.lat", b"xa2")]),
    );
    [bytes_of("bin", dir, "left"), bytes_of("lat", dir, "right")]
}

fn row(fields: &[(&str, &[u8])]) -> Row {
    let fields = fields.iter();
    fields
        .map(|(name, bytes)| (name.to_string(), bytes.to_vec()))
        .collect()
}

#[test]
fn two_sets_of_shards_are_read_together() {
    let dir = Dir::new();
    let rows: Vec<Row> = [("xa1", "xa2"), ("xb1", "xb2"), ("ya1", "ya2")]
        .map(|(bin, lat)| row(&[("bin", bin.as_bytes()), ("lat", lat.as_bytes())]))
        .into();
    let open = || {
        let [left, right] = two_tars(&dir);
        left.join(right).missing(Missing::Skip).open()
    };
    check(open, &rows);
    let joined = open().unwrap();
    assert_eq!((joined.sources().count(), joined.origin(1)), (4, (1, 1)));
    assert_says(
        joined.describe(),
        "left out: 1 rows without a sample: \"x/c\" (x/c.lat)",
    );
    assert_eq!(
        joined.framed().unwrap().member(1, Some(1)).unwrap(),
        "x/b.lat"
    );
    let [left, right] = two_tars(&dir);
    must_say(left.join(right).open(), "1 rows without a sample");
    let [left, right] = two_tars(&dir);
    // The other way around a sample lacks its row, and ids change.
    let turned = right.join(left).missing(Missing::Skip).open().unwrap();
    assert_eq!((turned.len(), turned.origin(2)), (3, (3, 0)));
}

#[test]
fn a_table_joins_shards_and_joins_follow_each_other() {
    let dir = Dir::new();
    let csv = "k,v\nya,7\ny/a,3\nx/b,2\nx/a,1\n";
    let [left, right] = two_tars(&dir);
    let joined = left.join(table(csv)).missing(Missing::Skip).open().unwrap();
    let joined = joined.join(right).missing(Missing::Skip).open().unwrap();
    assert_eq!(
        texts(&joined),
        [
            ["xa1", "1", "xa2"],
            ["xb1", "2", "xb2"],
            ["ya1", "3", "ya2"]
        ]
    );
    let part = joined.subset([2, 0]).unwrap();
    let again = table("k,w\nx/a,6\ny/a,5\n");
    let again = part.join(again).open().unwrap();
    assert_eq!(
        texts(&again),
        [["ya1", "3", "ya2", "5"], ["xa1", "1", "xa2", "6"]]
    );
}

#[test]
fn shards_with_lists_have_keys() {
    let dir = Dir::new();
    let members: [(&str, &[u8]); 5] = [
        ("a.txt", b"of no field"),
        ("a.1.bin", b"A1"),
        ("a.0.bin", b"A0"),
        ("b.cls", b"7"),
        ("b.0.bin", b"B0"),
    ];
    dir.write("0.tar", &shard(&members));
    let builder = Tar::builder().list("*.bin", 2).index(false);
    let tar = builder.open(dir.path("0.tar")).unwrap();
    let joined = tar.join(table("k,v\nb,2\na,1\n")).open().unwrap();
    let values: Vec<_> = texts(&joined).iter().map(|row| row[1].clone()).collect();
    assert_eq!(values, ["1", "2"]);
}

#[test]
fn what_cannot_be_joined_is_refused_by_name() {
    let (_dir, images) = folder(&["x/a.jpg", "y/b.jpg"]);
    let images: Arc<dyn Dataset> = Arc::new(images);
    let labels = || table("k,label\nx/a.jpg,1\ny/b.jpg,2\n");
    must_fail(
        images.clone().join(labels()).open(),
        ErrorKind::Config,
        "both sides of the join have a field `label`",
    );
    must_fail(
        noise_records(2, 8, 1).join(labels()).open(),
        ErrorKind::Config,
        "have no names to join by",
    );
    must_say(
        images.clone().join(noise_records(2, 8, 1)).open(),
        "2 records",
    );
    let mix = Mix::new([(images, 1.0)], 7).unwrap();
    must_fail(
        mix.join(labels()).open(),
        ErrorKind::Config,
        "is a mix: join its sources",
    );
    must_fail(
        Table::of(&noise_records(2, 8, 1), "record"),
        ErrorKind::Config,
        "keys are text or whole numbers",
    );
    must_fail(
        Table::of(&noise_records(2, 8, 1), "x"),
        ErrorKind::Config,
        "no field `x`",
    );
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_is_a_table_and_no_side_with_chunks() {
    use crate::common::numeric::fixture;
    use feedline::dataset::Parquet;
    let open = |columns: &[&str]| {
        let builder = Parquet::builder().columns(columns.iter().copied());
        builder.open(fixture("parquet/plain.parquet")).unwrap()
    };
    let rows = Table::of(&open(&["i64", "emb"]), "i64").unwrap();
    let whole = open(&["emb"]);
    assert_eq!((rows.len(), rows.schema()), (whole.len(), whole.schema()));
    let keys = rows.keys().unwrap().unwrap();
    let named = Table::builder("k")
        .read_bytes(format!("k,v\n{},1\n", String::from_utf8_lossy(keys.get(3))));
    let joined = named
        .unwrap()
        .join(rows)
        .missing(Missing::Skip)
        .open()
        .unwrap();
    assert_eq!(joined.origin(0), (0, 3));
    let chunk = feedline::unstable::fuzzing::chunk(&whole, 0).unwrap();
    let sample = feedline::unstable::fuzzing::sample(&joined, 0).unwrap();
    assert_eq!(sample[1], chunk[3][0]);
    must_fail(
        open(&["i64"]).join(table("k,v\na,1\n")).open(),
        ErrorKind::Config,
        "rows in chunks",
    );
    must_fail(
        Table::of(&open(&["emb"]).subset([0]).unwrap(), "emb"),
        ErrorKind::Config,
        "keys are text",
    );
}

#[test]
fn another_table_is_another_dataset() {
    let (_dir, images) = folder(&["a.jpg", "b.jpg"]);
    let images = Arc::new(images);
    let print = |csv: &str| {
        let joined = images
            .clone()
            .join(table(csv))
            .missing(Missing::Skip)
            .open();
        Fingerprint::of(&joined.unwrap()).unwrap()
    };
    let first = print("k,v\na.jpg,1\nb.jpg,2\n");
    assert!(first == print("k,v\r\na.jpg,1\r\nb.jpg,2\r\n"));
    for csv in [
        "k,v\na.jpg,2\nb.jpg,1\n",
        "k,v\na.jpg,1\nb.jpg,3\n",
        "k,w\na.jpg,1\nb.jpg,2\n",
        "k,v\na.jpg,1\n",
    ] {
        assert!(first != print(csv), "{csv:?}");
    }
}

/// The join by definition: equal keys, in the order of the samples.
fn naive(samples: &[String], rows: &BTreeMap<String, i64>) -> Vec<Vec<String>> {
    let met = samples.iter().filter_map(|key| Some((key, rows.get(key)?)));
    met.map(|(_, value)| vec![value.to_string()]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn joins_agree_with_a_naive_one(
        samples in prop::collection::btree_set("[ab,\"\nü.]{1,3}", 1..12),
        rows in prop::collection::btree_map("[ab,\"\nü.]{1,3}", -5..5_i64, 1..12),
        turn in any::<usize>(),
    ) {
        let mut samples: Vec<String> = samples.into_iter().collect();
        let at = turn % samples.len();
        samples.rotate_left(at);
        let quoted = |key: &String| format!("\"{}\"", key.replace('"', "\"\""));
        let left: String = samples.iter().map(|key| quoted(key) + "\n").collect();
        let right: String = rows.iter().map(|(key, value)| format!("{},{value}\n", quoted(key))).collect();
        let expected = naive(&samples, &rows);
        let joined = table(&format!("k\n{left}")).join(table(&format!("k,v\n{right}")));
        match joined.missing(Missing::Skip).open() {
            Ok(joined) if 2 * expected.len() > samples.len().min(rows.len()) => {
                prop_assert_eq!(texts(&joined), expected);
            }
            // Other rules may find more rows then.
            Ok(joined) => prop_assert!(joined.len() >= expected.len() as u64),
            Err(_) => prop_assert!(expected.is_empty()),
        }
    }
}

#[test]
fn a_join_takes_few_bytes_a_row() {
    const COUNT: u64 = 100_000;
    let name = |number: u64| format!("n{:03}/{number:08}, ü.jpg", number % 1000);
    let mut names = String::from("k\n");
    let mut csv = String::from("file_name,label\n");
    for step in 0..COUNT {
        names += &format!("\"{}\"\n", name(step));
        // In another order; one row in a hundred is of no sample.
        let number = step * 99_991 % COUNT;
        let number = if number % 100 == 7 {
            number + COUNT
        } else {
            number
        };
        csv += &format!("\"{}\",{number}\n", name(number));
    }
    let samples = Table::builder("k").read_bytes(&names).unwrap();
    let table = Table::builder("file_name").read_bytes(&csv).unwrap();
    let tables = samples.sizes().index_bytes + table.sizes().index_bytes;
    let joined = samples.join(table).missing(Missing::Skip).open().unwrap();
    assert_eq!(joined.len(), COUNT - COUNT / 100);
    assert_says(
        joined.describe(),
        "1000 samples without a row: \"n007/00000007, ü.jpg\"",
    );
    assert_says(joined.describe(), "1000 rows without a sample");
    for sample in 0..joined.len() {
        let (left, _) = joined.origin(sample);
        let fields = feedline::unstable::fuzzing::sample(&joined, sample).unwrap();
        assert_eq!(fields[0], left.to_ne_bytes());
    }
    let index = joined.sizes().index_bytes - tables;
    assert!(index as u64 <= 64 * joined.len(), "{index}");
}
