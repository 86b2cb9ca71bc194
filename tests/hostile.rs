//! What stands in a file is data: its names never become paths to elsewhere, its numbers never become memory before they
//! were compared with what is there, and what is no regular file is never waited for.

mod common;

use common::Dir;
use feedline::dataset::{Dataset, DatasetExt, Fingerprint, Mds, Records, Tar, Verify};
use feedline::{Error, ErrorKind, Loader};
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// What `work` returns; a panic when it does not return.
fn returns<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || drop(send.send(work())));
    receive.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| panic!("{what} does not return"))
}

fn verify(dataset: &dyn Dataset) -> Result<(), Error> {
    let (_, mut ledger) = Verify::new().run(dataset, |_| ControlFlow::Continue(()))?;
    if ledger.is_empty() { Ok(()) } else { Err(ledger.remove(0)) }
}

#[test]
fn a_fifo_in_place_of_a_file_is_an_error_and_not_a_wait_for_ever() {
    type Work = fn(Records, &Dir) -> Result<(), Error>;
    let table: [(&str, Work); 6] = [
        ("read_sample", |records, _| records.read_sample(1).map(drop)),
        ("verify", |records, _| verify(&records)),
        ("in_memory", |records, _| records.in_memory().map(drop)),
        ("checked", |records, dir| records.checked(dir.path("crc")).map(drop)),
        ("fingerprint", |records, _| Fingerprint::of(&records).map(drop)),
        ("a loader", |records, _| Loader::builder(records).build()?.epoch(0)?.next().unwrap().map(drop)),
    ];
    for (name, work) in table {
        let error = returns(name, move || {
            let dir = Dir::new();
            let path = dir.write("records", &[7; 64]);
            let records = Records::builder(8).open(&path).unwrap();
            fifo(&path);
            work(records, &dir).unwrap_err()
        });
        // A FIFO has a length, too, of which some speak first.
        assert!(matches!(error.kind(), ErrorKind::NotAFile | ErrorKind::Changed), "{name}: {error}");
        assert!(error.site().path.as_deref().is_some_and(|path| path.ends_with("records")), "{name}: {error}");
    }
}

#[test]
fn a_fifo_where_checksums_or_an_index_should_lie_is_not_waited_for() {
    let error = returns("checked", || {
        let dir = Dir::new();
        let records = Records::builder(8).open(dir.write("records", &[7; 64])).unwrap();
        fifo(&dir.path("crc"));
        records.checked(dir.path("crc")).unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
    returns("an index file", || {
        let dir = Dir::new();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tar/small.tar");
        let shard = dir.write("small.tar", &std::fs::read(fixture).unwrap());
        let open = || Tar::builder().bytes("bin").class("cls").open(&shard);
        let first = open().unwrap();
        let index = std::fs::read_dir(dir.path("")).unwrap().flatten().map(|entry| entry.path());
        fifo(&index.into_iter().find(|path| path.extension().is_some_and(|ending| ending == "fdx")).unwrap());
        let again = open().unwrap();
        assert_eq!((again.len(), again.shards_scanned()), (first.len(), 1));
        // And the shard itself, whose header names its members.
        fifo(&shard);
        assert_eq!(again.member_name(0, 0).unwrap_err().kind(), ErrorKind::NotAFile);
    });
}

/// A copy of a folder of MDS shards.
fn mds(dir: &Dir) -> Vec<String> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mds/fixed");
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        dir.write(&format!("set/{name}"), &std::fs::read(entry.path()).unwrap());
        shards.extend(name.ends_with(".mds").then_some(name));
    }
    shards.sort();
    shards
}

#[test]
fn a_shard_of_an_index_that_links_lead_out_of_the_folder_is_refused_unless_the_user_allows_it() {
    let dir = Dir::new();
    let shards = mds(&dir);
    let right = |mds: &Mds| (0..mds.len()).map(|sample| mds.read_sample(sample).unwrap()).collect::<Vec<_>>();
    let expected = right(&Mds::open(dir.path("set")).unwrap());
    let first = dir.path("set").join(&shards[0]);
    // Within the folder links are followed.
    std::fs::rename(&first, dir.path("set/elsewhere")).unwrap();
    symlink("elsewhere", &first).unwrap();
    match Mds::open(dir.path("set")) {
        Ok(mds) => assert_eq!(right(&mds), expected),
        // Where there is no openat2.
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}"),
    }
    // Out of it they are not, whatever leads out.
    std::fs::rename(dir.path("set/elsewhere"), dir.path("outside")).unwrap();
    for target in [dir.path("outside"), "../outside".into()] {
        std::fs::remove_file(&first).unwrap();
        symlink(target, &first).unwrap();
        let error = Mds::open(dir.path("set")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
        assert!(error.to_string().contains(&shards[0]) && error.message().contains("leads out"), "{error}");
        let followed = Mds::builder().follow_links(true).open(dir.path("set")).unwrap();
        assert_eq!(right(&followed), expected);
    }
}

#[test]
fn a_shard_that_became_a_link_out_of_the_folder_after_it_was_opened_is_not_read() {
    let dir = Dir::new();
    let shards = mds(&dir);
    let open = || Mds::open(dir.path("set")).unwrap();
    let (loaded, looked, verified) = (open(), open(), open());
    let first = dir.path("set").join(&shards[0]);
    std::fs::rename(&first, dir.path("outside")).unwrap();
    symlink("../outside", &first).unwrap();
    let error = looked.read_sample(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
    assert_eq!(verify(&verified).unwrap_err().kind(), ErrorKind::NotAFile);
    assert_eq!(Fingerprint::of(&looked).unwrap_err().kind(), ErrorKind::NotAFile);
    assert_eq!(looked.in_memory().unwrap_err().kind(), ErrorKind::NotAFile);
    let loader = Loader::builder(loaded).build().unwrap();
    let error = loader.epoch(0).unwrap().find_map(Result::err).unwrap();
    assert_eq!(error.kind(), ErrorKind::NotAFile, "{error}");
}
