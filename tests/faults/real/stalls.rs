//! Storage that does not answer: waits end, memory that the kernel may still write to is leaked and
//! counted, and nothing hangs.

use super::child::{Ended, Outcome, Running, Task, skip};
use super::denied::skipped_here;
use super::fuse::{Fuse, Reads};
use crate::common::sweep;
use crate::common::{Dir, READERS};
use rustix::io::Errno;
use std::time::Duration;

/// Ends when the stall is reported, or when the test stops waiting: both drop a loader over endless
/// reads.
#[test]
fn storage_that_never_answers_does_not_block_the_drop() {
    std::thread::scope(|scope| {
        for reader in 0..READERS.len() {
            for reads in [Reads::Never, Reads::NeverOpened] {
                scope.spawn(move || never(reader, reads, true));
            }
            scope.spawn(move || never(reader, Reads::Never, false));
        }
    });
}

fn never(reader: usize, reads: Reads, reported: bool) {
    let test = "storage that never answers";
    let dir = Dir::new();
    let what = format!("{:?}, {reads:?}", READERS[reader]);
    let mut fuse = match Fuse::new(&dir.path("mount"), reads) {
        Ok(fuse) => fuse,
        Err(why) => return skip(test, why),
    };
    let go = dir.path("go");
    let task = Task::pull(&fuse.set, reader).with("go", go.display());
    let limit = if reported { "stall_ms" } else { "patience" };
    let mut child = Running::start(task.with(limit, 1200).command());
    if child.until("planned") {
        fuse.begin();
        std::fs::write(go, "").unwrap();
    }
    let came = child.until("end");
    let held = fuse.held();
    // Only now the process can end: a thread in such a read prevents it.
    fuse.abort();
    let ended = child.end();
    if skipped_here(test, reader, &ended) {
        return;
    }
    assert!(came, "{what}: {ended:#?}");
    assert!(held > 0, "{what}: nothing was held: {ended:#?}");
    // The batches of the first file, plus any from read-ahead, of 32.
    assert!(ended.number("delivered") >= 8, "{what}: {ended:#?}");
    let drop_ms = ended.number("drop_ms");
    let leaked = ended.number("leaked");
    assert!(leaked > 0 && drop_ms < 30_000, "{what}: {ended:#?}");
    if !reported {
        assert!(ended.said("pending").is_some(), "{what}: {ended:#?}");
        return eprintln!("{what}: dropped in {drop_ms} ms, {leaked} left behind");
    }
    let Outcome::Failed(fault) = ended.outcome(true) else {
        panic!("{what}: nothing failed: {ended:#?}")
    };
    let text = &fault.text;
    assert_eq!(fault.kind, "stalled", "{what}: {text}");
    assert!(fault.is_placed(), "{what}: {text}");
    assert!(
        text.contains("001.bin") && text.contains(" s"),
        "{what}: {text}"
    );
    eprintln!("{what}: {text}; dropped in {drop_ms} ms, {leaked} left behind");
}

/// Before the build: the loader can do without some facts about the files, and reports the others
/// as errors.
#[test]
fn storage_that_stops_before_build_is_an_error() {
    let stops = |reader: usize| {
        let dir = Dir::new();
        let what = format!("{:?}", READERS[reader]);
        let mut fuse = match Fuse::new(&dir.path("mount"), Reads::Never) {
            Ok(fuse) => fuse,
            Err(why) => return skip("storage that stops before", why),
        };
        fuse.begin();
        let go = dir.path("go");
        std::fs::write(&go, "").unwrap();
        let task = Task::pull(&fuse.set, reader).with("go", go.display());
        let mut child = Running::start(task.with("stall_ms", 1200).command());
        let came = child.until("end");
        fuse.abort();
        let ended = child.end();
        assert!(came, "{what}: {ended:#?}");
        let text = format!("{ended:?}");
        assert!(text.contains("stalled"), "{what}: {ended:#?}");
    };
    std::thread::scope(|scope| {
        for reader in [0, 3, 4] {
            scope.spawn(move || stops(reader));
        }
    });
}

#[test]
fn slow_storage_is_waited_for_and_loses_nothing() {
    let time = Duration::from_millis(sweep::size(50, 200, 200));
    let test = "storage that answers late";
    each(test, Reads::Late(time), |way, ended| {
        eprintln!("{way}: whole");
        ended.whole();
    });
}

#[test]
fn storage_that_answers_short_is_an_error_with_its_place() {
    let test = "storage that answers with EIO";
    each(test, Reads::Fails(Errno::IO), |way, ended| {
        let fault = ended.failed();
        let coded = fault.has_code(Errno::IO.raw_os_error());
        assert!(coded && fault.is_placed(), "{way}: {fault:?}");
        eprintln!("{way}: {}", fault.text);
    });
    // Past the page cache: within it the kernel takes a short answer for the end of the file, and
    // shows zeros after it once it has asked for the length again. Only a checksum can tell these
    // from bytes of the file.
    each("storage that answers short", Reads::Short, |way, ended| {
        if way.contains("On)") {
            let fault = ended.failed();
            let known = ["truncated", "changed since it was indexed"];
            assert!(known.contains(&fault.kind.as_str()), "{way}: {fault:?}");
            assert!(fault.is_placed(), "{way}: {fault:?}");
            eprintln!("{way}: {}", fault.text);
        }
    });
}

fn each(test: &str, reads: Reads, judge: impl Fn(&str, &Ended) + Sync) {
    let judge = &judge;
    std::thread::scope(|scope| {
        for (reader, way) in READERS.iter().enumerate() {
            scope.spawn(move || {
                let dir = Dir::new();
                let fuse = match Fuse::new(&dir.path("mount"), reads) {
                    Ok(fuse) => fuse,
                    Err(why) => return skip(test, why),
                };
                let go = dir.path("go");
                let task = Task::pull(&fuse.set, reader).with("go", go.display());
                let mut child = Running::start(task.command());
                if child.until("planned") {
                    fuse.begin();
                    std::fs::write(go, "").unwrap();
                }
                let ended = child.end();
                if !skipped_here(test, reader, &ended) {
                    judge(&format!("{way:?}"), &ended);
                }
            });
        }
    });
}
