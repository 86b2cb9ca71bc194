//! Attacks by what stands in files. All of these hold.

mod common;

use common::*;
use feedline::dataset::{Dataset, Mds, Records, TfRecord};
use feedline::{Loader, OnBadSample};
use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

fn returns<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || drop(send.send(work())));
    receive.recv_timeout(Duration::from_secs(30)).unwrap_or_else(|_| panic!("{what} hangs or panics"))
}

#[test]
fn an_index_of_shards_with_hostile_names_and_numbers_is_an_error_or_works() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mds/fixed");
    let names = [
        "a\u{0}b",
        "a\nb",
        "..",
        "/etc/passwd",
        "/proc/self/mem",
        "a/../../x",
        &"x".repeat(5000),
        "/dev/zero",
        "fifo",
        "//",
        "~",
    ];
    let numbers =
        [json!(u64::MAX), json!(-1), json!(1u64 << 63), json!(0), json!(1e300), json!("7"), Value::Null, json!([1])];
    let mut cases: Vec<(String, Value)> = Vec::new();
    for name in names {
        cases.push(("/shards/0/raw_data/basename".into(), json!(name)));
    }
    for number in &numbers {
        for pointer in [
            "/shards/0/raw_data/bytes",
            "/shards/0/samples",
            "/shards/1/samples",
            "/shards/0/column_sizes/0",
            "/shards/0/size_limit",
            "/version",
            "/shards",
        ] {
            cases.push((pointer.into(), number.clone()));
        }
    }
    for (pointer, value) in cases {
        let from = from.clone();
        returns(&format!("{pointer} {}", &value.to_string()[..value.to_string().len().min(60)]), move || {
            let dir = Dir::new();
            for file in std::fs::read_dir(&from).unwrap().flatten() {
                dir.write(file.file_name().to_str().unwrap(), &std::fs::read(file.path()).unwrap());
            }
            assert!(std::process::Command::new("mkfifo").arg(dir.path("fifo")).status().unwrap().success());
            let mut index: Value = serde_json::from_slice(&std::fs::read(dir.path("index.json")).unwrap()).unwrap();
            *index.pointer_mut(&pointer).unwrap() = value;
            dir.write("index.json", index.to_string().as_bytes());
            let Ok(mds) = Mds::open(dir.path("")) else { return };
            let loader = Loader::builder(mds).on_bad_sample(OnBadSample::Substitute { budget: 100 }).build();
            let Ok(loader) = loader else { return };
            loader.epoch(0).unwrap().map_while(Result::ok).for_each(drop);
            loader.ledger().to_string();
        });
    }
}

#[test]
fn odd_files_in_place_of_records_never_hang() {
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
                let Ok(records) = Records::builder(record).open(path) else { continue };
                let loader = Loader::builder(records).on_bad_sample(OnBadSample::Substitute { budget: 3 }).build();
                loader.map(|loader| loader.epoch(0).map(|epoch| epoch.take(3).map_while(Result::ok).count()).ok()).ok();
            }
            TfRecord::open(path).map(|dataset| dataset.len()).ok()
        });
    }
    returns("a sparse giant, replaced by a link meanwhile", || {
        let dir = Dir::new();
        let path = dir.write("giant", b"");
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 43).unwrap();
        let records = Records::builder(1 << 20).open(&path).unwrap();
        let loader = build(Loader::builder(records).batch_size(2).on_bad_sample(OnBadSample::Substitute { budget: 3 }));
        assert_eq!(loader.epoch(0).unwrap().take(3).filter(Result::is_ok).count(), 3);
        std::fs::remove_file(&path).unwrap();
        symlink("/dev/zero", &path).unwrap();
        loader.epoch(1).unwrap().take(3).map_while(Result::ok).for_each(drop);
    });
}
