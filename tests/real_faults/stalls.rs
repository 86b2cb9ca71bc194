//! Storage that does not answer: waits end, what the kernel may still write to is left to it and counted, and nothing hangs.

use crate::child::{Running, Task, skip};
use crate::common::{Dir, READERS};
use crate::denied::denied_here;
use crate::fuse::{Fuse, Reads};
use rustix::io::Errno;
use std::time::Duration;

#[test]
fn storage_that_never_answers_is_left_behind_and_counted_and_dropping_the_loader_returns() {
    std::thread::scope(|scope| {
        for (reader, way) in READERS.iter().enumerate() {
            for reads in [Reads::Never, Reads::NeverOpened] {
                scope.spawn(move || {
                    let dir = Dir::new();
                    let mut fuse = match Fuse::new(&dir.path("mount"), reads) {
                        Ok(fuse) => fuse,
                        Err(why) => return skip("storage that never answers", why),
                    };
                    let task = Task::pull(&fuse.set, reader).with("patience", 1500);
                    let go = dir.path("go");
                    let mut child = Running::start(task.with("go", go.display()).command());
                    if child.until("planned") {
                        fuse.begin();
                        std::fs::write(go, "").unwrap();
                    }
                    let came = child.until("end");
                    let held = fuse.held();
                    // Now it can end: a process with a thread in such a read cannot, by any means.
                    fuse.abort();
                    let ended = child.end();
                    if denied_here(&ended) && reader != 0 {
                        return skip("storage that never answers", format!("{way:?}: no io_uring here"));
                    }
                    assert!(came, "{way:?}, {reads:?}: {ended:#?}");
                    assert!(held > 0, "{way:?}, {reads:?}: nothing was held: {ended:#?}");
                    assert!(ended.said("pending").is_some(), "{way:?}, {reads:?}: {ended:#?}");
                    // Of 32 batches those of the first file, but for what was not yet decoded.
                    assert!(ended.number("delivered") >= 8, "{way:?}, {reads:?}: {ended:#?}");
                    assert!(ended.number("leaked") > 0, "{way:?}, {reads:?}: {ended:#?}");
                    let drop_ms = ended.number("drop_ms");
                    assert!(drop_ms < 30_000, "{way:?}, {reads:?}: {drop_ms} ms");
                    let leaked = ended.number("leaked");
                    eprintln!("{way:?}, {reads:?}: dropped in {drop_ms} ms, {leaked} left behind");
                });
            }
        }
    });
}

#[test]
fn storage_that_answers_late_is_waited_for_and_nothing_is_lost() {
    let time = Duration::from_millis(300);
    each("storage that answers late", Reads::Late(time), |way, ended| {
        eprintln!("{way}: whole");
        ended.whole();
    });
}

#[test]
fn storage_that_answers_short_or_with_an_error_is_an_error_with_file_offset_sample_and_code() {
    each("storage that answers with EIO", Reads::Fails(Errno::IO), |way, ended| {
        let fault = ended.failed();
        assert!(fault.is_placed() && fault.has_code(Errno::IO.raw_os_error()), "{way}: {fault:?}");
        eprintln!("{way}: {}", fault.text);
    });
    each("storage that answers short", Reads::Short, |way, ended| {
        let fault = ended.failed();
        // A map tells no more than that a page cannot be had.
        let kinds = ["truncated", "changed since it was indexed", "I/O error"];
        assert!(kinds.contains(&fault.kind.as_str()), "{way}: {fault:?}");
        assert!(fault.is_placed(), "{way}: {fault:?}");
        eprintln!("{way}: {}", fault.text);
    });
}

fn each(test: &str, reads: Reads, judge: impl Fn(&str, &crate::child::Ended)) {
    for (reader, way) in READERS.iter().enumerate() {
        let dir = Dir::new();
        let fuse = match Fuse::new(&dir.path("mount"), reads) {
            Ok(fuse) => fuse,
            Err(why) => return skip(test, why),
        };
        let ended = Task::pull(&fuse.set, reader).run();
        if denied_here(&ended) && reader != 0 {
            skip(test, format!("{way:?}: no io_uring here"));
            continue;
        }
        judge(&format!("{way:?}"), &ended);
    }
}
