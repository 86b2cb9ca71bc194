//! Rows stored in files in their final form: the same batches as on the host, in as few reads as
//! possible.

use super::direct_reads;
use crate::common::doubles::*;
use crate::common::numeric::fixture;
use crate::common::*;
use feedline::dataset::{Concat, Dataset, DatasetExt, Npy, Npz, Records, SafeTensors, Tokens};
use feedline::device::Finish;
use feedline::device::{Gds, Route};
use feedline::tensor::DType;
use feedline::{LastBatch, Loader, LoaderBuilder, Order, Rank, Report};
use std::sync::Arc;

type Any = Arc<dyn Dataset>;

/// Checks that two epochs equal the host's and that cuFile read every row of a direct field. Gives
/// the loader's report.
fn check(machine: &Machine, what: &str, make: &dyn Fn() -> LoaderBuilder) -> Report {
    let host = build(make());
    let loader = build(machine.direct(make()));
    assert_eq!(loader.spec(), host.spec(), "{what}");
    for epoch in 0..2 {
        same(&Got::epoch(&loader, epoch), &Got::epoch(&host, epoch), what);
    }
    let report = loader.report();
    let direct = direct_reads(&report);
    assert_eq!((direct.host_rows, &direct.why_host), (0, &None), "{what}");
    assert!(direct.reads > 0 && direct.bytes > 0, "{what}: {direct}");
    assert_eq!(direct.how, "p2p", "{what}");
    report
}

/// The fields that go directly.
fn direct_fields(report: &Report) -> Vec<&str> {
    let direct = report
        .routes
        .iter()
        .filter(|route| route.route == Route::Direct);
    direct.map(|route| route.field.as_str()).collect()
}

#[test]
fn direct_records_of_any_size_equal_the_hosts() {
    on_machine(|machine| {
        let dir = Dir::new();
        // Whole pages, parts of pages, at the start of the file or behind a header, whole or odd.
        for (count, record, header) in [
            (37, 4096, 0),
            (300, 100, 0),
            (70, 5000, 0),
            (9, 150_528, 0),
            (40, 8192, 4096),
            (40, 8192, 17),
            (50, 1, 0),
        ] {
            let mut bytes = noise(header, 1);
            bytes.extend(noise(count * record, 2));
            let path = dir.write(&format!("{count}x{record}+{header}"), &bytes);
            for (order, batch) in [
                (Order::sequential(), 7),
                (Order::shuffled(3), 16),
                (Order::shuffled(3), 1),
            ] {
                let what = format!("{count} × {record} + {header}, {order:?}, {batch}");
                let report = check(machine, &what, &|| {
                    let labels = (0..count as i64).collect::<Vec<_>>();
                    let records = Records::builder(record)
                        .header(header as u64)
                        .classes(labels)
                        .open(&path)
                        .unwrap();
                    Loader::builder(records)
                        .order(order.clone())
                        .batch_size(batch)
                });
                assert_eq!(direct_fields(&report), ["record"]);
                let bytes = direct_reads(&report).bytes;
                assert_eq!(bytes, 2 * (count * record) as u64);
            }
        }
    });
}

/// A `.npy` file of rows of `dims` bytes.
fn npy(rows: usize, dims: &[usize], seed: u64) -> Vec<u8> {
    let shape: Vec<_> = std::iter::once(&rows)
        .chain(dims)
        .map(|dim| format!("{dim}, "))
        .collect();
    let dict = format!(
        "{{'descr': '|u1', 'fortran_order': False, 'shape': ({}), }}\n",
        shape.concat()
    );
    let data = noise(rows * dims.iter().product::<usize>(), seed);
    let len = (dict.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &len[..], dict.as_bytes(), &data].concat()
}

/// A safetensors file of `rows` rows of each tensor: name, dtype, bytes of an element, elements of
/// a row.
fn safetensors(rows: usize, tensors: &[(&str, &str, usize, usize)], seed: u64) -> Vec<u8> {
    let mut end = 0;
    let mut entries = Vec::new();
    for (name, dtype, size, row) in tensors {
        let start = end;
        end += rows * size * row;
        entries.push(format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[{rows},{row}],\"data_offsets\":[{start},{end}]}}"
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let len = (header.len() as u64).to_le_bytes();
    [&len[..], header.as_bytes(), &noise(end, seed)].concat()
}

/// A dataset, and its fields with rows in final form in files.
type Format = (&'static str, Box<dyn Fn() -> Any>, Vec<&'static str>);

fn any<D: Dataset>(open: impl Fn() -> D + 'static) -> Box<dyn Fn() -> Any> {
    Box::new(move || Arc::new(open()))
}

fn formats(dir: &Dir) -> Vec<Format> {
    dir.write("tokens/0.bin", &noise(2 * 30_001, 1));
    dir.write("tokens/1.bin", &noise(2 * 7_777, 2));
    for (part, rows) in [9, 1, 14].into_iter().enumerate() {
        let seed = part as u64;
        dir.write(&format!("rows/x-{part}.npy"), &npy(rows, &[70, 61], seed));
        dir.write(&format!("records/{part}.bin"), &noise(rows * 8192, seed));
        let tensors = [
            ("x", "F32", 4, 1500),
            ("y", "U8", 1, 4096),
            ("label", "I64", 8, 1),
        ];
        let tensors = safetensors(rows, &tensors, 7);
        dir.write(&format!("st/{part}.safetensors"), &tensors);
    }
    let tokens = dir.path("tokens/*.bin");
    let rows = dir.path("rows/*.npy");
    let records = dir.path("records");
    let tensors = dir.path("st/*.safetensors");
    let table = fixture("npy/table.npz");
    let unets = fixture("npy/unet-*.npz");
    let parts = ["0", "2", "1"].map(|part| dir.path(&format!("records/{part}.bin")));
    let part = dir.path("records");
    let split = dir.path("records");
    let pages = || Records::builder(8192).field("x", DType::U8, [8192]);
    vec![
        (
            "tokens",
            any(move || {
                let builder = Tokens::builder(DType::U16).window(900).next_token();
                builder.open(&tokens).unwrap()
            }),
            vec!["tokens"],
        ),
        (
            "npy, a file each",
            any(|| Npy::open(fixture("npy/same-*.npy")).unwrap()),
            vec!["array"],
        ),
        (
            "npy, rows",
            any(move || Npy::builder().field("x", &rows).rows().open().unwrap()),
            vec!["x"],
        ),
        (
            "npz, rows",
            any(move || Npz::builder().rows().open(&table).unwrap()),
            vec!["x", "label"],
        ),
        (
            "npz of any shape",
            any(move || Npz::builder().flat("x", 100).open(&unets).unwrap()),
            vec!["y"],
        ),
        (
            "safetensors",
            any(move || SafeTensors::open(&tensors).unwrap()),
            vec!["x", "y", "label"],
        ),
        (
            "records in files",
            any(move || pages().open(&records).unwrap()),
            vec!["x"],
        ),
        (
            "several datasets",
            any(move || {
                let parts = parts.each_ref().map(|path| pages().open(path).unwrap());
                Concat::new(parts).unwrap()
            }),
            vec!["x"],
        ),
        (
            "some samples, some twice",
            any(move || {
                let all = pages().open(&part).unwrap();
                all.subset([3, 4, 5, 23, 0, 3]).unwrap()
            }),
            vec!["x"],
        ),
        (
            "a split",
            any(move || pages().open(&split).unwrap().split(0.5, 3).unwrap().1),
            vec!["x"],
        ),
    ]
}

#[test]
fn formats_with_rows_in_final_form_are_read_directly() {
    on_machine(|machine| {
        let dir = Dir::new();
        for (what, open, fields) in formats(&dir) {
            for (order, batch) in [(Order::sequential(), 5), (Order::shuffled(8), 4)] {
                let report = check(machine, &format!("{what}, {order:?}"), &|| {
                    Loader::builder(open())
                        .order(order.clone())
                        .batch_size(batch)
                });
                assert_eq!(direct_fields(&report), fields, "{what}: {report}");
            }
        }
    });
}

#[test]
fn direct_last_batches_of_every_rank_equal_the_hosts() {
    on_machine(|machine| {
        let dir = Dir::new();
        for record in [4096, 700] {
            let (path, _) = records_file(&dir, 29, record);
            for last in ALL_LAST {
                for (rank, world) in [(0, 1), (0, 3), (2, 3)] {
                    let make = || {
                        let records = Records::builder(record)
                            .classes((0..29).collect())
                            .open(&path)
                            .unwrap();
                        let builder = Loader::builder(records)
                            .order(Order::shuffled(1))
                            .global_batch(9);
                        builder
                            .last_batch(last)
                            .rank(Rank::new(rank, world).unwrap())
                    };
                    let what = format!("{record}, {last:?}, {rank} of {world}");
                    check(machine, &what, &make);
                    let batches = Got::epoch(&build(machine.direct(make())), 0);
                    for batch in &batches {
                        let rows = batch.ids.iter().zip(batch.bytes("record").chunks(record));
                        for (id, row) in rows {
                            let is_zero = row.iter().all(|byte| *byte == 0);
                            assert_eq!(*id == u64::MAX, is_zero, "{last:?}");
                        }
                    }
                    let mut ids = batches.iter().flat_map(|batch| &batch.ids);
                    let is_short = last == LastBatch::Keep && rank == 2;
                    let has_blank = is_short || last == LastBatch::Mask;
                    assert_eq!(ids.any(|id| *id == u64::MAX), has_blank);
                }
            }
        }
    });
}

#[test]
fn direct_fields_bypass_the_host_only_where_wanted() {
    on_machine(|machine| {
        let dir = Dir::new();
        let tensors = [
            ("x", "U8", 1, 6000),
            ("y", "F32", 4, 1024),
            ("label", "I64", 8, 1),
        ];
        let path = dir.write("a.safetensors", &safetensors(20, &tensors, 4));
        let make = |keep: &[&'static str]| {
            let keep = keep.to_vec();
            let path = path.clone();
            move || {
                Loader::builder(SafeTensors::open(&path).unwrap())
                    .batch_size(6)
                    .keep(keep.clone())
            }
        };
        for keep in [&["x"][..], &["label", "y"], &["y", "label", "x"]] {
            let report = check(machine, &format!("{keep:?}"), &make(keep));
            let mut direct = direct_fields(&report);
            direct.sort_unstable();
            let mut keep = keep.to_vec();
            keep.sort_unstable();
            assert_eq!(direct, keep);
        }
        // If the loader chooses the route of each field, small rows go through the host, in the
        // same batches.
        let wide = [
            ("x", "U8", 1, 20_000),
            ("y", "F32", 4, 4096),
            ("label", "I64", 8, 1),
        ];
        let path = dir.write("b.safetensors", &safetensors(20, &wide, 5));
        let make = || {
            let tensors = SafeTensors::open(&path).unwrap();
            Loader::builder(tensors)
                .batch_size(6)
                .tuning(|t| t.reader(feedline::storage::Mode::Pread))
        };
        let host = build(make());
        let loader = build(machine.on_gpu(make(), Gds::Auto));
        same(&Got::epoch(&loader, 0), &Got::epoch(&host, 0), "both ways");
        let report = loader.report();
        assert_eq!(direct_fields(&report), ["x", "y"]);
        let words =
            "label staged (rows of 8 bytes: below 16384, reads through the host are faster)";
        assert_eq!(report.routes[2].to_string(), words);
        assert_eq!(direct_reads(&report).bytes, 20 * (20_000 + 4096 * 4));
    });
}

#[test]
fn rows_of_any_length_are_one_read_each() {
    on_machine(|machine| {
        let dir = Dir::new();
        // Above the size of merged reads, and above any buffer of the host.
        for (record, header) in [(17 << 20, 0), ((17 << 20) + 5, 3)] {
            let path = dir.write("large", &noise(header + 2 * record, 9));
            let before = machine.reads();
            let report = check(machine, &format!("{record}"), &|| {
                let records = Records::builder(record)
                    .header(header as u64)
                    .open(&path)
                    .unwrap();
                Loader::builder(records)
                    .batch_size(2)
                    .tuning(|t| t.slots(2).device_batches(2))
                    .workers(1)
            });
            assert_eq!(direct_reads(&report).reads, 4);
            // And the trial.
            assert_eq!(machine.reads() - before, 5);
        }
    });
}

#[test]
fn rows_that_follow_each_other_are_one_read() {
    on_machine(|machine| {
        let dir = Dir::new();
        // Bytes of a row, rows of the file, of a batch; reads of an epoch in sequential order.
        let cases = [
            (4096, 64, 32, 2),
            (5000, 64, 32, 2),
            (16_384, 128, 128, 2),
            (20_000, 104, 104, 2),
            (100, 7, 2, 4),
        ];
        for (record, count, batch, reads) in cases {
            let (path, _) = records_file(&dir, count, record);
            let make = |order: Order| {
                let path = path.clone();
                move || {
                    Loader::builder(records(&path, record))
                        .order(order.clone())
                        .batch_size(batch)
                }
            };
            let what = format!("{record} × {count}");
            let before = machine.reads();
            let report = check(machine, &what, &make(Order::sequential()));
            assert_eq!(direct_reads(&report).reads, 2 * reads, "{what}");
            assert_eq!(machine.reads() - before, 2 * reads as i64 + 1, "{what}");
            let shuffled = check(machine, &what, &make(Order::shuffled(5)));
            let more = direct_reads(&shuffled).reads;
            assert!(more > 2 * reads, "others follow by chance only");
        }
        // Rows of two files and overlapping rows are never merged.
        dir.write("two/a", &noise(4 * 4096, 1));
        dir.write("two/b", &noise(4 * 4096, 2));
        let two = || Loader::builder(records(&dir.path("two"), 4096)).batch_size(8);
        let report = check(machine, "two files", &two);
        assert_eq!(direct_reads(&report).reads, 2 * 2);
        let path = dir.write("windows", &noise(9 * 512 * 2, 3));
        let windows = || {
            let builder = Tokens::builder(DType::U16).window(512).next_token();
            Loader::builder(builder.open(&path).unwrap()).batch_size(8)
        };
        let report = check(machine, "windows", &windows);
        assert_eq!(direct_reads(&report).reads, 2 * 8);
    });
}

#[test]
fn pictures_that_were_read_directly_are_finished_on_the_device() {
    on_machine(|machine| {
        let dir = Dir::new();
        // Aligned, and not.
        for (height, width) in [(64, 64), (31, 45)] {
            let record = height * width * 3;
            let (path, _) = records_file(&dir, 23, record);
            let finish = Finish::to(DType::F16)
                .mean_std(&[0.4, 0.5, 0.6], &[0.2, 0.3, 0.25])
                .channels_first()
                .flip(0.5);
            let report = check(machine, &format!("{height} × {width}"), &|| {
                let records =
                    Records::builder(record).field("image", DType::U8, [height, width, 3]);
                let records = records.classes((0..23).collect()).open(&path).unwrap();
                let builder = Loader::builder(records)
                    .order(Order::shuffled(2))
                    .batch_size(8);
                builder
                    .last_batch(LastBatch::Mask)
                    .finish("image", finish.clone())
            });
            assert_eq!(direct_fields(&report), ["image"]);
            // A label and a flip for each row, with an offset if rows are moved.
            let offset = if record % 4096 == 0 { 0 } else { 8 };
            let least = 2 * 24 * (8 + 1 + offset) as u64;
            let copied = report.total.copy.unwrap().bytes;
            let legal = least..least + 6 * 4096;
            assert!(legal.contains(&copied), "{copied} bytes, {least} at least");
        }
    });
}

#[test]
fn rows_unlike_the_first_go_through_the_host() {
    on_machine(|machine| {
        let dir = Dir::new();
        let (path, bytes) = records_file(&dir, 10, 16_384);
        let shifted = dir.write("shifted", &[&[0; 17][..], &bytes].concat());
        let pages = || Records::builder(16_384).field("x", DType::U8, [16_384]);
        let make = |last: Any| {
            let first: Any = Arc::new(pages().open(&path).unwrap());
            Loader::builder(Concat::new([first, last]).unwrap())
                .batch_size(4)
                .tuning(|t| t.reader(feedline::storage::Mode::Pread))
        };
        let memory = || -> Any { Arc::new(pages().open_bytes(bytes.clone()).unwrap()) };
        let odd = || -> Any { Arc::new(pages().header(17).open(&shifted).unwrap()) };
        type Open<'a> = &'a dyn Fn() -> Any;
        let cases: [(Open<'_>, &str, bool); 2] = [
            (&memory, "not stored unchanged in a file", true),
            (&odd, "not whole pages", false),
        ];
        for (open, why, also_required) in cases {
            let right = Got::epoch(&build(make(open())), 0);
            for (gds, whole) in [(Gds::Auto, true), (Gds::Require, also_required)] {
                let loader = build(machine.on_gpu(make(open()), gds));
                match Got::try_epoch(&loader, 0) {
                    Ok(found) => {
                        same(&found, &right, why);
                        let direct = direct_reads(&loader.report());
                        let counts = (direct.host_rows, direct.bytes);
                        assert!(whole && counts == (10, 10 * 16_384), "{direct}");
                        assert!(direct.why_host.as_ref().unwrap().contains(why), "{direct}");
                    }
                    // A read that cuFile cannot do is an error if direct reads are required.
                    Err(error) => {
                        let error = error.to_string();
                        assert!(!whole && error.contains(why), "{error}");
                        let is_placed = error.contains("sample=10") && error.contains("batch=2");
                        assert!(is_placed, "{error}");
                    }
                }
            }
        }
    });
}
