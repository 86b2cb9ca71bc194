//! File content is data: its names never become paths elsewhere, its numbers are checked before any
//! allocation, and a file that is not regular is never waited for.

use crate::common::{Dir, build};
use feedline::dataset::{Dataset, DatasetExt, Mds, Records, Tar, TfRecord, Verify};
use feedline::unstable::{Fingerprint, Single};
use feedline::{Error, ErrorKind, Loader, OnBadSample};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    assert!(
        std::process::Command::new("mkfifo")
            .arg(path)
            .status()
            .unwrap()
            .success()
    );
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
    if ledger.is_empty() {
        Ok(())
    } else {
        Err(ledger.remove(0))
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
            Loader::builder(records)
                .build()?
                .epoch(0)?
                .next()
                .unwrap()
                .map(drop)
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
        assert!(
            matches!(error.kind(), ErrorKind::NotAFile | ErrorKind::Changed),
            "{name}: {error}"
        );
        assert!(
            error
                .site()
                .path
                .as_deref()
                .is_some_and(|path| path.ends_with("records")),
            "{name}: {error}"
        );
    }
}

#[test]
fn a_fifo_in_place_of_an_index_is_not_waited_for() {
    let error = returns("checked", || {
        let dir = Dir::new();
        let records = Records::builder(8)
            .open(dir.write("records", &[7; 64]))
            .unwrap();
        fifo(&dir.path("crc"));
        records
            .facts(dir.path("crc"))
            .checksums()
            .open()
            .unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
    returns("an index file", || {
        let dir = Dir::new();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tar/small.tar");
        let shard = dir.write("small.tar", &std::fs::read(fixture).unwrap());
        let open = || Tar::builder().bytes("bin").class("cls").open(&shard);
        let first = open().unwrap();
        let index = std::fs::read_dir(dir.path(""))
            .unwrap()
            .flatten()
            .map(|entry| entry.path());
        fifo(
            &index
                .into_iter()
                .find(|path| path.extension().is_some_and(|ending| ending == "fdx"))
                .unwrap(),
        );
        let again = open().unwrap();
        assert_eq!((again.len(), again.shards_scanned()), (first.len(), 1));
        // Also the shard itself, whose header names its members.
        fifo(&shard);
        assert_eq!(
            again.member_name(0, 0).unwrap_err().kind(),
            ErrorKind::NotAFile
        );
    });
}

/// A copy of a folder of MDS shards.
fn mds(dir: &Dir) -> Vec<String> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/mds/fixed");
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        dir.write(
            &format!("set/{name}"),
            &std::fs::read(entry.path()).unwrap(),
        );
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
        (0..mds.len())
            .map(|sample| mds.read_sample(sample).unwrap())
            .collect::<Vec<_>>()
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
        assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
        assert!(
            error.to_string().contains(&shards[0]) && error.message().contains("leads out"),
            "{error}"
        );
        let followed = Mds::builder()
            .follow_links(true)
            .open(dir.path("set"))
            .unwrap();
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
    let error = looked.read_sample(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
    assert_eq!(verify(&verified).unwrap_err().kind(), ErrorKind::NotAFile);
    assert_eq!(
        Fingerprint::of(&looked).unwrap_err().kind(),
        ErrorKind::NotAFile
    );
    assert_eq!(looked.in_memory().unwrap_err().kind(), ErrorKind::NotAFile);
    let loader = Loader::builder(loaded).build().unwrap();
    let error = loader.epoch(0).unwrap().find_map(Result::err).unwrap();
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
    let mut values: Vec<_> = names
        .iter()
        .map(|name| ("/shards/0/raw_data/basename", json!(name)))
        .collect();
    values.extend(
        numbers
            .iter()
            .flat_map(|number| places.map(|place| (place, number.clone()))),
    );
    values
}

#[test]
fn a_hostile_index_of_shards_is_an_error_or_works() {
    for (place, value) in hostile_values() {
        let words: String = value.to_string().chars().take(60).collect();
        returns(&format!("{place} {words}"), move || {
            let dir = Dir::new();
            mds(&dir);
            fifo(&dir.path("set/fifo"));
            let mut index: Value =
                serde_json::from_slice(&std::fs::read(dir.path("set/index.json")).unwrap())
                    .unwrap();
            *index.pointer_mut(place).unwrap() = value;
            dir.write("set/index.json", index.to_string().as_bytes());
            let Ok(mds) = Mds::open(dir.path("set")) else {
                return;
            };
            let loader = Loader::builder(mds)
                .on_bad_sample(OnBadSample::Substitute { budget: 100 })
                .build();
            let Ok(loader) = loader else { return };
            loader
                .epoch(0)
                .unwrap()
                .map_while(Result::ok)
                .for_each(drop);
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
                let loader = Loader::builder(records)
                    .on_bad_sample(OnBadSample::Substitute { budget: 3 })
                    .build();
                loader
                    .map(|loader| {
                        loader
                            .epoch(0)
                            .map(|epoch| epoch.take(3).map_while(Result::ok).count())
                            .ok()
                    })
                    .ok();
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
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(1 << 43)
            .unwrap();
        let records = Records::builder(1 << 20).open(&path).unwrap();
        let loader = build(
            Loader::builder(records)
                .batch_size(2)
                .on_bad_sample(OnBadSample::Substitute { budget: 3 }),
        );
        assert_eq!(
            loader
                .epoch(0)
                .unwrap()
                .take(3)
                .filter(Result::is_ok)
                .count(),
            3
        );
        std::fs::remove_file(&path).unwrap();
        symlink("/dev/zero", &path).unwrap();
        loader
            .epoch(1)
            .unwrap()
            .take(3)
            .map_while(Result::ok)
            .for_each(drop);
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
    let most = Some(3 << 30);
    setrlimit(
        Resource::As,
        Rlimit {
            current: most,
            maximum: most,
        },
    )
    .unwrap();
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
        Thrift::default()
            .i32(3, 0)
            .text(4, name)
            .i32(5, children)
            .end()
    }

    fn leaf(name: &str) -> Vec<u8> {
        Thrift::default().i32(1, 2).i32(3, 0).text(4, name).end()
    }

    fn file(pages: &[u8], schema: (usize, &[u8]), groups: (usize, &[u8])) -> Vec<u8> {
        let footer = Thrift::default()
            .i32(1, 1)
            .list(2, 12, schema.0, schema.1)
            .i64(3, 1);
        let footer = footer.list(4, 12, groups.0, groups.1).end();
        let len = (footer.len() as u32).to_le_bytes();
        [b"PAR1", pages, &footer, &len, b"PAR1"].concat()
    }

    /// A file of one `i64`, 7, whose dictionary page claims `entries` entries.
    fn one_value(entries: i64) -> Vec<u8> {
        let kind = Thrift::default().i32(1, entries).i32(2, 0).end();
        let dictionary = Thrift::default()
            .i32(1, 2)
            .i32(2, 8)
            .i32(3, 8)
            .inner(7, &kind)
            .end();
        let kind = Thrift::default()
            .i32(1, 1)
            .i32(2, 8)
            .i32(3, 3)
            .i32(4, 3)
            .end();
        let data = Thrift::default()
            .i32(1, 0)
            .i32(2, 3)
            .i32(3, 3)
            .inner(5, &kind)
            .end();
        let before = [dictionary, 7_i64.to_le_bytes().to_vec()].concat();
        let pages = [before.clone(), data, vec![1, 2, 0]].concat();
        let sizes = (pages.len() as i64, 4 + before.len() as i64);
        let encodings: Vec<u8> = [0, 8, 3].iter().map(|encoding| encoding << 1).collect();
        let meta = Thrift::default()
            .i32(1, 2)
            .list(2, 5, 3, &encodings)
            .list(3, 8, 1, b"\x01x")
            .i32(4, 0)
            .i64(5, 1);
        let meta = meta
            .i64(6, sizes.0)
            .i64(7, sizes.0)
            .i64(9, sizes.1)
            .i64(11, 4)
            .end();
        let column = Thrift::default().i64(2, 0).inner(3, &meta).end();
        let rows = Thrift::default()
            .list(1, 12, 1, &column)
            .i64(2, sizes.0)
            .i64(3, 1)
            .end();
        file(
            &pages,
            (2, &[group("root", 1), leaf("x")].concat()),
            (1, &rows),
        )
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
            assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
            assert!(
                error.to_string().contains(&format!("{entries} values")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_schema_nested_deeper_than_any_stack_is_an_error() {
        if !confined(&here!()) {
            return;
        }
        for depth in [100, 1000, 1_000_000] {
            let mut schema = group("root", 1);
            (0..depth).for_each(|_| schema.extend(group("g", 1)));
            schema.extend(leaf("x"));
            let error = read(file(&[], (depth + 2, &schema), (0, &[]))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Limit, "{depth}: {error}");
        }
        // A realistic depth is accepted.
        let mut schema = group("root", 1);
        (0..20).for_each(|_| schema.extend(group("g", 1)));
        schema.extend(leaf("x"));
        let error = read(file(&[], (22, &schema), (0, &[]))).unwrap_err();
        assert!(
            error.to_string().contains("its row groups 0"),
            "the schema is read: {error}"
        );
    }

    #[test]
    fn lists_that_the_footer_cannot_hold_take_no_memory() {
        if !confined(&here!()) {
            return;
        }
        let schema = [group("root", 1), leaf("x")].concat();
        let wide = [group("root", i64::from(i32::MAX)), leaf("x")].concat();
        let table = [
            ("children", file(&[], (2, &wide), (0, &[]))),
            ("elements", file(&[], (1 << 30, &schema), (0, &[]))),
            ("row groups", file(&[], (2, &schema), (1 << 30, &[]))),
            // Elements of one byte each, which would take hundreds of bytes in memory.
            (
                "empty row groups",
                file(&[], (2, &schema), (100 << 20, &vec![0; 100 << 20])),
            ),
        ];
        for (what, bytes) in table {
            let error = read(bytes).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Limit | ErrorKind::Decode),
                "{what}: {error}"
            );
        }
    }
}

mod pictures {
    use super::*;
    use feedline::decode::{Image, Limits};
    use feedline::tensor::EncodedField;

    fn fixture(name: &str) -> Vec<u8> {
        std::fs::read(
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("fixtures/images")
                .join(name),
        )
        .unwrap()
    }

    fn decode(image: Image, input: &[u8]) -> feedline::Result<()> {
        Single::new(image, &EncodedField::image("x"))?.decode(input, 0, 0, 0)
    }

    /// Offsets of the scans' markers, then the offset of the end.
    fn scans(jpeg: &[u8]) -> Vec<usize> {
        let is = |pair: &[u8]| pair[0] == 0xFF && matches!(pair[1], 0xDA | 0xD9);
        jpeg.windows(2)
            .enumerate()
            .filter(|(_, pair)| is(pair))
            .map(|(at, _)| at)
            .collect()
    }

    #[test]
    fn a_jpeg_of_too_many_scans_is_refused() {
        let jpeg = fixture("progressive.jpg");
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
        for (scans, input) in [
            (count - 1, &jpeg),
            (1, &jpeg),
            (0, &jpeg),
            (Limits::default().scans, &bomb),
        ] {
            let error = decode(image(scans), input).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Limit, "{scans}: {error}");
            assert!(
                error
                    .message()
                    .contains(&format!("more than {scans} scans")),
                "{error}"
            );
        }
        // A single scan is accepted under any limit.
        decode(image(0), &fixture("420.jpg")).unwrap();
    }
}
