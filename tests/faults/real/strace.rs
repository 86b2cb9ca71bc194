//! Failing system calls, one or all from some moment on, injected by strace into a process with a
//! real loader.

use super::child::{Ended, Outcome, Running, Task, ran, skip, some_at_a_time, tool};
use super::denied::skipped_here;
use super::set::Set;
use crate::common::sweep;
use crate::common::{Dir, READERS, has_uring};
use std::path::{Path, PathBuf};

/// Numbers in [`READERS`].
const AUTO: usize = 0;
const URING: [usize; 2] = [1, 2];
const PREAD: [usize; 2] = [3, 4];
const MMAP: usize = 5;
const ALL: [usize; 6] = [0, 1, 2, 3, 4, 5];

/// Path of a strace that may trace; `Err` has the reason.
fn strace() -> Result<PathBuf, String> {
    let strace = tool("strace").ok_or("no strace")?;
    let inject = "inject=getppid:error=EIO:when=1";
    let probe = ran(&strace, &["-f", "-o", "/dev/null", "-e", inject, "true"]);
    probe.map_err(|why| format!("strace cannot trace here: {why}"))?;
    Ok(strace)
}

/// A small set, and the strace to use on it. Without a strace it says that the test was skipped.
fn traced(test: &str, dir: &Dir) -> Option<(PathBuf, Set)> {
    match strace() {
        Ok(strace) => Some((strace, Set::usual(dir.path("")).sized(4, 16).write())),
        Err(why) => {
            skip(test, why);
            None
        }
    }
}

/// One injection: the reader, the call, its failure and its time (strace counts per thread).
struct Injection<'a> {
    reader: usize,
    calls: &'a str,
    error: &'a str,
    when: &'a str,
}

impl<'a> Injection<'a> {
    fn new(reader: usize, calls: &'a str, error: &'a str, when: &'a str) -> Self {
        Self {
            reader,
            calls,
            error,
            when,
        }
    }

    fn what(&self) -> String {
        let way = READERS[self.reader];
        format!("{} {} when={}, {way:?}", self.calls, self.error, self.when)
    }

    /// Runs it; `only` counts only calls on these files.
    fn run(&self, strace: &Path, set: &Set, only: &[PathBuf]) -> Ended {
        let calls = self.calls;
        let trace = format!("trace={calls}");
        let inject = format!("inject={calls}:error={}:when={}", self.error, self.when);
        let quiet = [strace.to_str().unwrap(), "-f", "-qqq", "-o", "/dev/null"];
        let events = ["-e", &trace, "-e", "signal=none", "-e", &inject];
        let mut words = [&quiet[..], &events].concat();
        for path in only {
            words.extend(["-P", path.to_str().unwrap()]);
        }
        let words: Vec<String> = words.into_iter().map(String::from).collect();
        // Wait long only for a ring that the kernel never serves; a thousand tries under strace
        // take long.
        let stall = match calls {
            "io_uring_enter" => 1500,
            _ => 30_000,
        };
        let task = Task::pull(set, self.reader).with("stall_ms", stall);
        Running::start(task.behind(&words)).end()
    }
}

/// Required result.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Must {
    /// All batches, without an error.
    Recover,
    /// An error with every detail.
    Fail,
    /// Either result.
    Either,
}

fn code(name: &str) -> i32 {
    use rustix::io::Errno;
    let table = [
        ("EINTR", Errno::INTR),
        ("EIO", Errno::IO),
        ("EAGAIN", Errno::AGAIN),
        ("ENOMEM", Errno::NOMEM),
        ("EBUSY", Errno::BUSY),
        ("EMFILE", Errno::MFILE),
        ("ESTALE", Errno::STALE),
        ("EPERM", Errno::PERM),
        ("ENOSYS", Errno::NOSYS),
        ("EACCES", Errno::ACCESS),
    ];
    let found = table.iter().find(|(known, _)| *known == name);
    found.unwrap().1.raw_os_error()
}

/// Checks one run; gives its description.
#[track_caller]
fn judge(what: &str, ended: &Ended, error: &str, must: Must, placed: bool) -> String {
    // An entry that the kernel neither accepts nor returns is leaked.
    match ended.outcome_leaking() {
        Outcome::Whole => {
            assert!(must != Must::Fail, "{what}: nothing failed: {ended:#?}");
            "whole".into()
        }
        Outcome::Failed(fault) => {
            assert!(must != Must::Recover, "{what}: {fault:?}");
            let coded = fault.has_code(code(error)) || fault.kind == "stalled";
            assert!(coded, "{what}: no code: {fault:?}");
            assert!(!placed || fault.is_placed(), "{what}: no place: {fault:?}");
            fault.text
        }
    }
}

/// System calls on the data, the reader that makes them, and the required result if one fails, and
/// if all fail.
const CALLS: &[(&str, &[usize], &str, Must, Must)] = &[
    // EINTR for ever does not exist: the standard library would retry without end.
    ("pread64", &PREAD, "EINTR", Must::Recover, Must::Recover),
    ("pread64", &PREAD, "EAGAIN", Must::Recover, Must::Fail),
    ("pread64", &PREAD, "EIO", Must::Either, Must::Fail),
    ("pread64", &PREAD, "ESTALE", Must::Either, Must::Fail),
    ("pread64", &PREAD, "ENOMEM", Must::Either, Must::Fail),
    ("preadv2", &[AUTO], "EINTR", Must::Recover, Must::Either),
    ("preadv2", &[AUTO], "EAGAIN", Must::Recover, Must::Recover),
    ("preadv2", &[AUTO], "EIO", Must::Either, Must::Either),
    ("preadv2", &[AUTO], "ENOSYS", Must::Recover, Must::Recover),
    (OPENS, &PREAD, "EMFILE", Must::Either, Must::Fail),
    (OPENS, &PREAD, "EIO", Must::Either, Must::Fail),
    (OPENS, &PREAD, "ESTALE", Must::Either, Must::Fail),
    (OPENS, &[MMAP], "EACCES", Must::Either, Must::Fail),
    ("openat2", &[AUTO], "EMFILE", Must::Either, Must::Either),
    ("openat2", &[AUTO], "EIO", Must::Either, Must::Either),
    ("openat2", &[AUTO], "ENOSYS", Must::Recover, Must::Recover),
    (STATS, &[MMAP], "EIO", Must::Either, Must::Fail),
    (STATS, &[MMAP], "ESTALE", Must::Either, Must::Fail),
];
const OPENS: &str = "?open,openat,openat2";
const STATS: &str = "fstat,newfstatat";

#[test]
fn a_failed_system_call_is_recovered_or_named() {
    let dir = Dir::new();
    let Some((strace, set)) = traced("errors of system calls about the data", &dir) else {
        return;
    };
    let mut cases = Vec::new();
    for (calls, readers, error, once, always) in CALLS {
        for reader in *readers {
            for (when, must) in [("1", once), ("3", once), ("1+", always)] {
                if (*error, when) != ("EINTR", "1+") {
                    cases.push((Injection::new(*reader, calls, error, when), *must));
                }
            }
        }
    }
    let cases: Vec<_> = cases.into_iter().step_by(sweep::size(2, 1, 1)).collect();
    some_at_a_time(&cases, |(injection, must)| {
        let ended = injection.run(&strace, &set, &set.paths());
        // Errors of indexing have no sample.
        let placed = ended.said("planned").is_some();
        let what = injection.what();
        let end = judge(&what, &ended, injection.error, *must, placed);
        eprintln!("{what}: {end}");
    });
}

#[test]
fn a_failed_io_uring_call_is_recovered_or_named() {
    let test = "errors of io_uring";
    if !has_uring() {
        return skip(test, "no io_uring here");
    }
    let dir = Dir::new();
    let Some((strace, set)) = traced(test, &dir) else {
        return;
    };
    let mut cases = Vec::new();
    for reader in URING {
        for error in ["EINTR", "EAGAIN", "EBUSY", "ENOMEM"] {
            // The first is the trial of the ring, made while the loader is built.
            let trial = match error {
                "EINTR" => Must::Recover,
                _ => Must::Either,
            };
            let later = [
                ("2", Must::Recover),
                ("4", Must::Recover),
                ("3+", Must::Fail),
            ];
            for (when, must) in [("1", trial)].into_iter().chain(later) {
                cases.push((Injection::new(reader, "io_uring_enter", error, when), must));
            }
        }
    }
    for calls in ["io_uring_setup", "io_uring_register", "eventfd2"] {
        for error in ["ENOMEM", "EMFILE", "EPERM"] {
            for when in ["1", "2", "1+"] {
                for (reader, must) in [(AUTO, Must::Recover), (URING[0], Must::Either)] {
                    cases.push((Injection::new(reader, calls, error, when), must));
                }
            }
        }
    }
    // Not a period of the loops above.
    let cases: Vec<_> = cases.into_iter().step_by(sweep::size(5, 1, 1)).collect();
    some_at_a_time(&cases, |(injection, must)| {
        let ended = injection.run(&strace, &set, &[]);
        let what = injection.what();
        let end = judge(&what, &ended, injection.error, *must, false);
        eprintln!("{what}: {end}");
    });
}

/// Each start of a thread fails in turn, until a run has no more starts.
#[test]
fn threads_that_cannot_start_are_done_without_or_an_error_of_build() {
    let dir = Dir::new();
    let Some((strace, set)) = traced("threads that cannot be started", &dir) else {
        return;
    };
    some_at_a_time(&ALL, |reader| {
        let mut seen = Vec::new();
        for when in ["1+"].into_iter().chain(NUMBERS) {
            let injection = Injection::new(*reader, "clone,clone3", "EAGAIN", when);
            let ended = injection.run(&strace, &set, &[]);
            let what = injection.what();
            if skipped_here(&what, *reader, &ended) {
                return;
            }
            seen.push(judge(&what, &ended, "EAGAIN", Must::Either, false));
        }
        let way = READERS[*reader];
        assert_ne!(seen[0], "whole", "{way:?}: no thread could start");
        let last = seen.last().map(String::as_str);
        assert_eq!(last, Some("whole"), "{way:?}: {seen:#?}");
        let known = |words: &String| words == "whole" || words.starts_with("build: ");
        assert!(seen.iter().all(known), "{way:?}: {seen:#?}");
        seen.dedup();
        eprintln!("{way:?}: {seen:#?}");
    });
}

const NUMBERS: [&str; 15] = [
    "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15",
];
