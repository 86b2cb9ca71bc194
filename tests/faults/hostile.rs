//! File content is data: its names never become paths elsewhere, its numbers are checked before any
//! allocation, and a file that is not regular is never waited for.

use crate::common::numeric::fixture;
use crate::common::{Dir, assert_error, build, end_of, records};
use feedline::dataset::{Dataset, DatasetExt, Mds, Records, Tar, TfRecord, Verify};
use feedline::decode::Single;
use feedline::unstable::Fingerprint;
use feedline::{Error, ErrorKind, Loader, LoaderBuilder, OnBadSample};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

pub(super) fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    let mut mkfifo = std::process::Command::new("mkfifo");
    assert!(mkfifo.arg(path).status().unwrap().success());
}

/// The error is about something that is not a regular file.
#[track_caller]
fn no_file<T>(result: Result<T, Error>) {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
}

fn substituting(dataset: impl Dataset, budget: u64) -> LoaderBuilder {
    Loader::builder(dataset).on_bad_sample(OnBadSample::Substitute { budget })
}

/// Result of `work`; panics if it does not return.
fn returns<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || drop(send.send(work())));
    receive
        .recv_timeout(Duration::from_secs(60))
        .unwrap_or_else(|_| panic!("{what} does not return"))
}

fn verify(dataset: &dyn Dataset) -> Result<(), Error> {
    let (_, mut ledger) = Verify::new().run(dataset, |_| ControlFlow::Continue(()))?;
    match ledger.is_empty() {
        true => Ok(()),
        false => Err(ledger.remove(0)),
    }
}

#[test]
fn a_fifo_in_place_of_a_file_is_an_error() {
    type Work = fn(Records, &Dir) -> Result<(), Error>;
    let table: [(&str, Work); 6] = [
        ("read_sample", |records, _| records.read_sample(1).map(drop)),
        ("verify", |records, _| verify(&records)),
        ("in_memory", |records, _| records.in_memory().map(drop)),
        ("checked", |records, dir| {
            records.facts(dir.path("crc")).checksums().open().map(drop)
        }),
        ("fingerprint", |records, _| {
            Fingerprint::of(&records).map(drop)
        }),
        ("a loader", |records, _| {
            let loader = Loader::builder(records).build()?;
            loader.epoch(0)?.next().unwrap().map(drop)
        }),
    ];
    for (name, work) in table {
        let error = returns(name, move || {
            let dir = Dir::new();
            let path = dir.write("records", &[7; 64]);
            let records = Records::builder(8).open(&path).unwrap();
            fifo(&path);
            work(records, &dir).unwrap_err()
        });
        // Some checks report the FIFO's length first.
        let known = [ErrorKind::NotAFile, ErrorKind::Changed];
        assert!(known.contains(&error.kind()), "{name}: {error}");
        let path = error.site().path.as_deref();
        let named = path.is_some_and(|path| path.ends_with("records"));
        assert!(named, "{name}: {error}");
    }
}

#[test]
fn a_fifo_in_place_of_an_index_is_not_waited_for() {
    returns("checked", || {
        let dir = Dir::new();
        let records = records(&dir.write("records", &[7; 64]), 8);
        fifo(&dir.path("crc"));
        no_file(records.facts(dir.path("crc")).checksums().open());
    });
    returns("an index file", || {
        let dir = Dir::new();
        let bytes = std::fs::read(fixture("tar/small.tar")).unwrap();
        let shard = dir.write("small.tar", &bytes);
        let open = || Tar::builder().bytes("bin").class("cls").open(&shard);
        let first = open().unwrap();
        let entries = std::fs::read_dir(dir.path("")).unwrap().flatten();
        let mut paths = entries.map(|entry| entry.path());
        let index = paths.find(|path| path.extension().is_some_and(|ending| ending == "fdx"));
        fifo(&index.unwrap());
        let again = open().unwrap();
        assert_eq!((again.len(), again.shards_scanned()), (first.len(), 1));
        // Also the shard itself, whose header names its members.
        fifo(&shard);
        no_file(again.member_name(0, 0));
    });
}

/// A copy of a folder of MDS shards.
fn mds(dir: &Dir) -> Vec<String> {
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(fixture("mds/fixed")).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        let bytes = std::fs::read(entry.path()).unwrap();
        dir.write(&format!("set/{name}"), &bytes);
        shards.extend(name.ends_with(".mds").then_some(name));
    }
    shards.sort();
    shards
}

#[test]
fn a_shard_linked_out_of_its_folder_needs_permission() {
    let dir = Dir::new();
    let shards = mds(&dir);
    let right = |mds: &Mds| {
        let samples = (0..mds.len()).map(|sample| mds.read_sample(sample).unwrap());
        samples.collect::<Vec<_>>()
    };
    let expected = right(&Mds::open(dir.path("set")).unwrap());
    let first = dir.path("set").join(&shards[0]);
    // Links within the folder are followed.
    std::fs::rename(&first, dir.path("set/elsewhere")).unwrap();
    symlink("elsewhere", &first).unwrap();
    match Mds::open(dir.path("set")) {
        Ok(mds) => assert_eq!(right(&mds), expected),
        // Without openat2.
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}"),
    }
    // Links out of the folder are refused, absolute or relative.
    std::fs::rename(dir.path("set/elsewhere"), dir.path("outside")).unwrap();
    for target in [dir.path("outside"), "../outside".into()] {
        std::fs::remove_file(&first).unwrap();
        symlink(target, &first).unwrap();
        let error = Mds::open(dir.path("set")).unwrap_err();
        assert_error(&error, ErrorKind::NotAFile, &[&shards[0], "leads out"]);
        let followed = Mds::builder().follow_links(true);
        let followed = followed.open(dir.path("set")).unwrap();
        assert_eq!(right(&followed), expected);
    }
}

#[test]
fn a_shard_that_became_an_outward_link_is_not_read() {
    let dir = Dir::new();
    let shards = mds(&dir);
    let open = || Mds::open(dir.path("set")).unwrap();
    let loaded = open();
    let looked = open();
    let verified = open();
    let first = dir.path("set").join(&shards[0]);
    std::fs::rename(&first, dir.path("outside")).unwrap();
    symlink("../outside", &first).unwrap();
    no_file(looked.read_sample(0));
    no_file(verify(&verified));
    no_file(Fingerprint::of(&looked));
    no_file(looked.in_memory());
    let error = end_of(&build(Loader::builder(loaded)), 0);
    assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
}

/// Places in an index, as JSON pointers, with wrong values for them.
fn hostile_values() -> Vec<(&'static str, Value)> {
    let long = "x".repeat(5000);
    let names = [
        "a\u{0}b",
        "a\nb",
        "..",
        "/etc/passwd",
        "/proc/self/mem",
        "a/../../x",
        &long,
        "/dev/zero",
        "fifo",
        "//",
        "~",
    ];
    let numbers = [
        json!(u64::MAX),
        json!(-1),
        json!(1u64 << 63),
        json!(0),
        json!(1e300),
        json!("7"),
        Value::Null,
        json!([1]),
    ];
    let places = [
        "/shards/0/raw_data/bytes",
        "/shards/0/samples",
        "/shards/1/samples",
        "/shards/0/column_sizes/0",
        "/shards/0/size_limit",
        "/version",
        "/shards",
    ];
    let names = names.map(|name| ("/shards/0/raw_data/basename", json!(name)));
    let numbers = numbers
        .into_iter()
        .flat_map(|number| places.map(|place| (place, number.clone())));
    names.into_iter().chain(numbers).collect()
}

#[test]
fn a_hostile_index_of_shards_is_an_error_or_works() {
    for (place, value) in hostile_values() {
        let words: String = value.to_string().chars().take(60).collect();
        returns(&format!("{place} {words}"), move || {
            let dir = Dir::new();
            mds(&dir);
            fifo(&dir.path("set/fifo"));
            let bytes = std::fs::read(dir.path("set/index.json")).unwrap();
            let mut index: Value = serde_json::from_slice(&bytes).unwrap();
            *index.pointer_mut(place).unwrap() = value;
            dir.write("set/index.json", index.to_string().as_bytes());
            let Ok(mds) = Mds::open(dir.path("set")) else {
                return;
            };
            let Ok(loader) = substituting(mds, 100).build() else {
                return;
            };
            let epoch = loader.epoch(0).unwrap();
            epoch.map_while(Result::ok).for_each(drop);
            loader.ledger().to_string();
        });
    }
}

#[test]
fn devices_in_place_of_records_are_not_waited_for() {
    for path in [
        "/proc/self/mem",
        "/proc/self/maps",
        "/proc/kmsg",
        "/dev/zero",
        "/dev/stdin",
        "/sys/kernel/notes",
        "/proc/self/fd/0",
        "/dev/full",
        "/",
    ] {
        returns(path, move || {
            for record in [1, 64] {
                let Ok(records) = Records::builder(record).open(path) else {
                    continue;
                };
                if let Ok(loader) = substituting(records, 3).build()
                    && let Ok(epoch) = loader.epoch(0)
                {
                    epoch.take(3).map_while(Result::ok).for_each(drop);
                }
            }
            TfRecord::open(path).map(|dataset| dataset.len()).ok()
        });
    }
}

#[test]
fn a_sparse_file_of_8_tib_is_read() {
    returns("a sparse file", || {
        let dir = Dir::new();
        let path = dir.write("giant", b"");
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 43).unwrap();
        let loader = build(substituting(records(&path, 1 << 20), 3).batch_size(2));
        let batches = loader.epoch(0).unwrap().take(3);
        assert_eq!(batches.filter(Result::is_ok).count(), 3);
        std::fs::remove_file(&path).unwrap();
        symlink("/dev/zero", &path).unwrap();
        let batches = loader.epoch(1).unwrap().take(3);
        batches.map_while(Result::ok).for_each(drop);
    });
}

/// Runs the test again in a process with little address space, where an allocation of a promised
/// size, or a stack of a promised depth, ends the process. True in that process.
#[cfg(feature = "parquet")]
fn confined(test: &str) -> bool {
    use crate::common::alone;
    use rustix::process::{Resource, Rlimit, setrlimit};
    if !alone(test) {
        return false;
    }
    let current = Some(3 << 30);
    let maximum = current;
    setrlimit(Resource::As, Rlimit { current, maximum }).unwrap();
    true
}

#[cfg(feature = "parquet")]
mod parquet {
    use super::*;
    use crate::common::here;
    use feedline::dataset::Parquet;

    /// A structure of thrift's compact protocol.
    #[derive(Default)]
    struct Thrift {
        out: Vec<u8>,
        last: i16,
    }

    fn varint(mut value: u64, out: &mut Vec<u8>) {
        while value >= 0x80 {
            out.push(value as u8 | 0x80);
            value >>= 7;
        }
        out.push(value as u8);
    }

    impl Thrift {
        fn field(mut self, id: i16, kind: u8) -> Self {
            self.out.push(((id - self.last) as u8) << 4 | kind);
            self.last = id;
            self
        }

        fn number(self, id: i16, kind: u8, value: i64) -> Self {
            let mut this = self.field(id, kind);
            varint((value << 1 ^ value >> 63) as u64, &mut this.out);
            this
        }

        fn i32(self, id: i16, value: i64) -> Self {
            self.number(id, 5, value)
        }

        fn i64(self, id: i16, value: i64) -> Self {
            self.number(id, 6, value)
        }

        fn text(self, id: i16, text: &str) -> Self {
            let mut this = self.field(id, 8);
            varint(text.len() as u64, &mut this.out);
            this.out.extend_from_slice(text.as_bytes());
            this
        }

        fn inner(self, id: i16, inner: &[u8]) -> Self {
            let mut this = self.field(id, 12);
            this.out.extend_from_slice(inner);
            this
        }

        /// `count` elements of one kind, unchanged from `items`.
        fn list(self, id: i16, kind: u8, count: usize, items: &[u8]) -> Self {
            let mut this = self.field(id, 9);
            this.out.push(0xf0 | kind);
            varint(count as u64, &mut this.out);
            this.out.extend_from_slice(items);
            this
        }

        fn end(mut self) -> Vec<u8> {
            self.out.push(0);
            self.out
        }
    }

    fn group(name: &str, children: i64) -> Vec<u8> {
        let named = Thrift::default().i32(3, 0).text(4, name);
        named.i32(5, children).end()
    }

    fn leaf(name: &str) -> Vec<u8> {
        Thrift::default().i32(1, 2).i32(3, 0).text(4, name).end()
    }

    fn file(pages: &[u8], schema: (usize, &[u8]), groups: (usize, &[u8])) -> Vec<u8> {
        let footer = Thrift::default().i32(1, 1);
        let footer = footer.list(2, 12, schema.0, schema.1).i64(3, 1);
        let footer = footer.list(4, 12, groups.0, groups.1).end();
        let len = (footer.len() as u32).to_le_bytes();
        [b"PAR1", pages, &footer, &len, b"PAR1"].concat()
    }

    /// A file of one `i64`, 7, whose dictionary page claims `entries` entries.
    fn one_value(entries: i64) -> Vec<u8> {
        // The fields from 1 on, all numbers of 32 bits.
        let numbers = |values: &[i64]| {
            let fields = (1..).zip(values);
            fields.fold(Thrift::default(), |all, (id, value)| all.i32(id, *value))
        };
        let kind = numbers(&[entries, 0]).end();
        let dictionary = numbers(&[2, 8, 8]).inner(7, &kind).end();
        let kind = numbers(&[1, 8, 3, 3]).end();
        let data = numbers(&[0, 3, 3]).inner(5, &kind).end();
        let before = [dictionary, 7_i64.to_le_bytes().to_vec()].concat();
        let pages = [before.clone(), data, vec![1, 2, 0]].concat();
        let sizes = (pages.len() as i64, 4 + before.len() as i64);
        let encodings = [0_u8, 8, 3].map(|encoding| encoding << 1);
        let meta = numbers(&[2]).list(2, 5, 3, &encodings);
        let meta = meta.list(3, 8, 1, b"\x01x").i32(4, 0).i64(5, 1);
        let meta = meta.i64(6, sizes.0).i64(7, sizes.0);
        let meta = meta.i64(9, sizes.1).i64(11, 4).end();
        let column = Thrift::default().i64(2, 0).inner(3, &meta).end();
        let rows = Thrift::default().list(1, 12, 1, &column);
        let rows = rows.i64(2, sizes.0).i64(3, 1).end();
        let schema = [group("root", 1), leaf("x")].concat();
        file(&pages, (2, &schema), (1, &rows))
    }

    fn read(bytes: Vec<u8>) -> feedline::Result<Vec<i64>> {
        let loader = Loader::builder(Parquet::builder().open_bytes(bytes)?).build()?;
        let mut out = Vec::new();
        for batch in loader.epoch(0)? {
            out.extend_from_slice(batch?.field("x")?.as_slice::<i64>()?);
        }
        Ok(out)
    }

    #[test]
    fn an_oversized_dictionary_claim_takes_no_memory() {
        if !confined(&here!()) {
            return;
        }
        assert_eq!(read(one_value(1)).unwrap(), [7]);
        for entries in [2, 1 << 20, i64::from(i32::MAX)] {
            let error = read(one_value(entries)).unwrap_err();
            assert_error(&error, ErrorKind::Limit, &[&format!("{entries} values")]);
        }
    }

    #[test]
    fn a_schema_nested_deeper_than_any_stack_is_an_error() {
        if !confined(&here!()) {
            return;
        }
        let nested = |depth| {
            let schema = [group("root", 1), group("g", 1).repeat(depth), leaf("x")].concat();
            read(file(&[], (depth + 2, &schema), (0, &[]))).unwrap_err()
        };
        for depth in [100, 1000, 1_000_000] {
            let error = nested(depth);
            assert_eq!(error.kind(), ErrorKind::Limit, "{depth}: {error}");
        }
        // A realistic depth is accepted, and the schema is read.
        let error = nested(20).to_string();
        assert!(error.contains("its row groups 0"), "{error}");
    }

    #[test]
    fn lists_that_the_footer_cannot_hold_take_no_memory() {
        if !confined(&here!()) {
            return;
        }
        let schema = [group("root", 1), leaf("x")].concat();
        let wide = [group("root", i64::from(i32::MAX)), leaf("x")].concat();
        // Elements of one byte each, which would take hundreds of bytes in memory.
        let empty = vec![0_u8; 100 << 20];
        let table = [
            ("children", file(&[], (2, &wide), (0, &[]))),
            ("elements", file(&[], (1 << 30, &schema), (0, &[]))),
            ("row groups", file(&[], (2, &schema), (1 << 30, &[]))),
            ("empty", file(&[], (2, &schema), (empty.len(), &empty))),
        ];
        drop(empty);
        for (what, bytes) in table {
            let error = read(bytes).unwrap_err();
            let known = [ErrorKind::Limit, ErrorKind::Decode];
            assert!(known.contains(&error.kind()), "{what}: {error}");
        }
    }
}

mod pictures {
    use super::*;
    use feedline::decode::{Image, Limits};
    use feedline::tensor::EncodedField;

    fn picture(name: &str) -> Vec<u8> {
        std::fs::read(fixture("images").join(name)).unwrap()
    }

    fn decode(image: Image, input: &[u8]) -> feedline::Result<()> {
        Single::new(image, &EncodedField::image("x"))?.decode(input, 0, 0, 0)
    }

    /// Offsets of the scans' markers, then the offset of the end.
    fn scans(jpeg: &[u8]) -> Vec<usize> {
        let is = |pair: &[u8]| pair[0] == 0xFF && matches!(pair[1], 0xDA | 0xD9);
        let places = 0..jpeg.len() - 1;
        places.filter(|at| is(&jpeg[*at..at + 2])).collect()
    }

    #[test]
    fn a_jpeg_of_too_many_scans_is_refused() {
        let jpeg = picture("progressive.jpg");
        let places = scans(&jpeg);
        let count = places.len() as u32 - 1;
        assert!(count > 3, "{count}");
        // The last scan a thousand times: the fewest bytes that force a pass over the whole
        // picture.
        let end = *places.last().unwrap();
        let last = &jpeg[places[places.len() - 2]..end];
        let bomb = [&jpeg[..end], &last.repeat(1000), &jpeg[end..]].concat();
        let image = |scans| {
            let limits = Limits {
                scans,
                ..Limits::default()
            };
            Image::resize(8, 8).limits(limits).strict(false)
        };
        decode(image(count), &jpeg).unwrap();
        let usual = Limits::default().scans;
        for (scans, input) in [(count - 1, &jpeg), (1, &jpeg), (0, &jpeg), (usual, &bomb)] {
            let error = decode(image(scans), input).unwrap_err();
            let words = format!("more than {scans} scans");
            assert_error(&error, ErrorKind::Limit, &[&words]);
        }
        // A single scan is accepted under any limit.
        decode(image(0), &picture("420.jpg")).unwrap();
    }
}
