//! Shared code of the tests of numeric formats: fixtures with other libraries' values, and a
//! loader's rows.

#![allow(dead_code, reason = "each test binary uses its own part")]

use super::sweep;
use super::{Dir, READERS, had};
use feedline::dataset::Dataset;
use feedline::storage::{Direct, Mode};
use feedline::{Loader, Order, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name and true bytes of each field.
pub type Row = Vec<(String, Vec<u8>)>;

pub fn fixture(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.join("fixtures").join(name)
}

/// An array as read by the library that wrote it.
#[derive(Clone, Debug)]
pub struct Case {
    pub file: String,
    pub member: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Case {
    /// The bytes of a row of the first axis.
    pub fn row(&self, row: usize) -> Vec<u8> {
        let len = self.bytes.len() / self.shape[0];
        self.bytes[row * len..][..len].to_vec()
    }
}

/// The arrays of a fixture folder whose file names start with `prefix`.
pub fn cases(folder: &str, prefix: &str) -> Vec<Case> {
    let text = std::fs::read_to_string(fixture(folder).join("cases.txt")).unwrap();
    let data = std::fs::read(fixture(folder).join("expected.bin")).unwrap();
    let case = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let start: usize = words[4].parse().unwrap();
        let len: usize = words[5].parse().unwrap();
        let dims = words[3].split('x').filter(|dim| *dim != "-");
        Case {
            file: words[0].into(),
            member: words[1].into(),
            dtype: words[2].into(),
            shape: dims.map(|dim| dim.parse().unwrap()).collect(),
            bytes: data[start..start + len].to_vec(),
        }
    };
    let found: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with(prefix))
        .map(case)
        .collect();
    assert!(!found.is_empty(), "no case starts with {prefix}");
    found
}

/// One way to load.
pub const ORDERS: [fn() -> Order; 2] = [Order::sequential, || Order::shuffled(3)];

/// Rows of an epoch by sample id, from a loader. Each id must come once, and bytes after the end of
/// a varying field must be zero.
pub fn load_by(
    dataset: impl Dataset,
    order: Order,
    mode: Mode,
    direct: Direct,
) -> Result<BTreeMap<u64, Row>> {
    let len = dataset.len();
    let loader = Loader::builder(dataset)
        .order(order)
        .batch_size(3)
        .workers(1)
        .tuning(|t| t.reader(mode).direct(direct))
        .build()?;
    let mut out = BTreeMap::new();
    for batch in loader.epoch(0)? {
        let batch = batch?;
        for (row, id) in batch.ids().iter().enumerate() {
            let mut fields = Row::new();
            for field in batch.fields() {
                let row_bytes = field.size_bytes() / batch.len();
                let bytes = &field.as_bytes().unwrap()[row * row_bytes..][..row_bytes];
                let used = field.lens().map_or(row_bytes, |lens| {
                    row_bytes / field.shape()[1] * lens[row] as usize
                });
                assert!(
                    bytes[used..].iter().all(|byte| *byte == 0),
                    "sample {id}: the padding is not zero"
                );
                fields.push((field.name().to_string(), bytes[..used].to_vec()));
            }
            assert!(out.insert(*id, fields).is_none(), "sample {id} came twice");
        }
    }
    assert_eq!(out.len() as u64, len);
    Ok(out)
}

/// As [`load_by`], by the plainest reader, sequentially.
pub fn load(dataset: impl Dataset) -> Result<BTreeMap<u64, Row>> {
    load_by(dataset, Order::sequential(), Mode::Pread, Direct::Off)
}

/// Opens by `open` for every order and some readers, and compares with the expected rows.
pub fn check<D: Dataset>(open: impl Fn() -> Result<D>, expected: &[Row]) {
    let expected: BTreeMap<u64, Row> = (0..).zip(expected.iter().cloned()).collect();
    for order in ORDERS {
        for (mode, direct) in had([READERS[0], READERS[1], READERS[4]]) {
            let dataset = open().unwrap();
            let way = format!("{}, {:?}, {mode:?}", dataset.describe(), order());
            let found = load_by(dataset, order(), mode, direct).unwrap();
            assert!(found == expected, "{way}:\n{found:?}\n{expected:?}");
        }
    }
}

pub fn one(name: &str, bytes: &[u8]) -> Row {
    vec![(name.to_string(), bytes.to_vec())]
}

/// Results of damaged files.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// Refused when opened, or the sample's error.
    pub refused: usize,
    /// No change: the byte has no meaning.
    pub harmless: usize,
    /// Values differ, structure does not.
    pub values: usize,
    /// Silently fewer or other samples, fields, dtypes or shapes.
    pub structure: Vec<String>,
}

/// A file as a user sees it: fields with dtype and shape, and rows.
pub type Seen = (String, BTreeMap<u64, Row>);

pub fn seen<D: Dataset>(dataset: Result<D>) -> Result<Seen> {
    let dataset = dataset?;
    Ok((format!("{:?}", dataset.schema()), load(dataset)?))
}

/// Flips of a byte by [`sweep`].
pub fn flips_each() -> usize {
    sweep::size(1, 8, 8)
}

/// The bits of a byte that are flipped: one in turn, or all.
fn bits(at: usize) -> impl Iterator<Item = usize> {
    (at..at + flips_each()).map(|bit| bit % 8)
}

/// Damages `name` in every way: cuts it at every length, and flips one bit, or each bit in turn, of
/// every byte of `flip`. `look` opens the folder.
pub fn sweep(
    dir: &Dir,
    name: &str,
    flip: std::ops::Range<usize>,
    look: impl Fn() -> Result<Seen>,
) -> (Sweep, Sweep) {
    let bytes = std::fs::read(dir.path(name)).unwrap();
    let good = look().unwrap();
    let shape = |field: &(String, Vec<u8>)| (field.0.clone(), field.1.len());
    let judge = |sweep: &mut Sweep, what: String| match look() {
        Err(error) => {
            assert!(error.site().path.is_some(), "{what}: no path in {error}");
            sweep.refused += 1;
        }
        Ok(found) if found == good => sweep.harmless += 1,
        Ok((schema, rows)) => {
            let shapes = rows.values().flatten().map(shape);
            if schema == good.0 && shapes.eq(good.1.values().flatten().map(shape)) {
                sweep.values += 1;
            } else {
                sweep.structure.push(format!("{what}: {schema}"));
            }
        }
    };
    let mut cuts = Sweep::default();
    let mut flips = Sweep::default();
    for len in 0..bytes.len() {
        dir.write(name, &bytes[..len]);
        judge(&mut cuts, format!("{name} cut to {len}"));
    }
    for at in flip {
        for bit in bits(at) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            dir.write(name, &damaged);
            judge(&mut flips, format!("{name} bit {bit} of byte {at} flipped"));
        }
    }
    dir.write(name, &bytes);
    assert!(look().unwrap() == good);
    println!("{name}: cuts {cuts:?}; flips {flips:?}");
    (cuts, flips)
}

/// `bytes` with some of them written over, cut or made longer: cases beyond single flips.
pub fn mangled(bytes: Vec<u8>) -> impl proptest::strategy::Strategy<Value = Vec<u8>> {
    use proptest::prelude::*;
    let len = bytes.len();
    let byte = prop_oneof![any::<u8>(), Just(0), Just(0xff), Just(b'0')];
    let spots = prop::collection::vec((0..len, byte), 0..8);
    let tail = prop_oneof![4 => Just(Vec::new()), 1 => prop::collection::vec(any::<u8>(), 0..40)];
    let end = prop_oneof![4 => Just(len), 1 => 0..=len];
    (spots, end, tail).prop_map(move |(spots, end, tail)| {
        let mut out = bytes.clone();
        spots.into_iter().for_each(|(at, byte)| out[at] = byte);
        out.truncate(end);
        out.extend(tail);
        out
    })
}
