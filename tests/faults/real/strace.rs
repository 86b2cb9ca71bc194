//! Failing system calls, one or all from some moment on, injected by strace into a process with a
//! real loader.

use super::child::{Ended, Outcome, Running, Task, skip, some_at_a_time, tool};
use super::denied::denied_here;
use super::set::Set;
use crate::common::sweep;
use crate::common::{Dir, READERS, has_uring};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Numbers in [`READERS`].
const AUTO: usize = 0;
const URING: [usize; 2] = [1, 2];
const PREAD: [usize; 2] = [3, 4];
const MMAP: usize = 5;
const ALL: [usize; 6] = [0, 1, 2, 3, 4, 5];

/// Path of a strace that may trace; `Err` has the reason.
fn strace() -> Result<PathBuf, String> {
    let strace = tool("strace").ok_or("no strace")?;
    let mut command = Command::new(&strace);
    let probe = command.args([
        "-f",
        "-o",
        "/dev/null",
        "-e",
        "inject=getppid:error=EIO:when=1",
        "true",
    ]);
    let output = probe
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    let words = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(strace)
    } else {
        Err(format!("strace cannot trace here: {}", words.trim()))
    }
}

/// One injection: the call, its failure and its time (strace counts per thread); `only_files`
/// counts only calls on the data.
struct Injection<'a> {
    calls: &'a str,
    error: &'a str,
    when: &'a str,
    only_files: bool,
}

impl Injection<'_> {
    fn what(&self, reader: usize) -> String {
        format!(
            "{} {} when={}, {:?}",
            self.calls, self.error, self.when, READERS[reader]
        )
    }

    fn run(&self, strace: &std::path::Path, set: &Set, reader: usize) -> Ended {
        let Self {
            calls,
            error,
            when,
            only_files,
        } = self;
        let inject = format!("inject={calls}:error={error}:when={when}");
        let mut words = vec![strace.to_str().unwrap().to_string()];
        let trace = format!("trace={calls}");
        words.extend(
            [
                "-f",
                "-qqq",
                "-o",
                "/dev/null",
                "-e",
                &trace,
                "-e",
                "signal=none",
                "-e",
                &inject,
            ]
            .map(String::from),
        );
        if *only_files {
            set.paths()
                .iter()
                .for_each(|path| words.extend(["-P".to_string(), path.display().to_string()]));
        }
        // Wait long only for a ring that the kernel never serves; a thousand tries under strace
        // take long.
        let stall = if *calls == "io_uring_enter" {
            1500
        } else {
            30_000
        };
        Running::start(
            Task::pull(set, reader)
                .with("stall_ms", stall)
                .behind(&words),
        )
        .end()
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
    table
        .iter()
        .find(|(known, _)| *known == name)
        .unwrap()
        .1
        .raw_os_error()
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
            assert!(
                fault.has_code(code(error)) || fault.kind == "stalled",
                "{what}: no code: {fault:?}"
            );
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
    (
        "?open,openat,openat2",
        &PREAD,
        "EMFILE",
        Must::Either,
        Must::Fail,
    ),
    (
        "?open,openat,openat2",
        &PREAD,
        "EIO",
        Must::Either,
        Must::Fail,
    ),
    (
        "?open,openat,openat2",
        &PREAD,
        "ESTALE",
        Must::Either,
        Must::Fail,
    ),
    (
        "?open,openat,openat2",
        &[MMAP],
        "EACCES",
        Must::Either,
        Must::Fail,
    ),
    ("openat2", &[AUTO], "EMFILE", Must::Either, Must::Either),
    ("openat2", &[AUTO], "EIO", Must::Either, Must::Either),
    ("openat2", &[AUTO], "ENOSYS", Must::Recover, Must::Recover),
    ("fstat,newfstatat", &[MMAP], "EIO", Must::Either, Must::Fail),
    (
        "fstat,newfstatat",
        &[MMAP],
        "ESTALE",
        Must::Either,
        Must::Fail,
    ),
];

#[test]
fn a_failed_system_call_is_recovered_or_named() {
    let strace = match strace() {
        Ok(strace) => strace,
        Err(why) => return skip("errors of system calls about the data", why),
    };
    let dir = Dir::new();
    let set = Set {
        files: 4,
        per_file: 16,
        ..Set::usual(dir.path(""))
    }
    .write();
    let mut cases = Vec::new();
    for (calls, readers, error, once, always) in CALLS {
        for reader in *readers {
            let always = Some(("1+", always)).filter(|_| *error != "EINTR");
            let cases_now = [("1", once), ("3", once)].into_iter().chain(always);
            cases.extend(cases_now.map(|(when, must)| {
                (
                    Injection {
                        calls,
                        error,
                        when,
                        only_files: true,
                    },
                    *reader,
                    *must,
                )
            }));
        }
    }
    let cases: Vec<_> = cases.into_iter().step_by(sweep::size(2, 1, 1)).collect();
    some_at_a_time(&cases, |(injection, reader, must)| {
        let ended = injection.run(&strace, &set, *reader);
        // Errors of indexing have no sample.
        let placed = ended.said("planned").is_some();
        let what = injection.what(*reader);
        eprintln!(
            "{what}: {}",
            judge(&what, &ended, injection.error, *must, placed)
        );
    });
}

#[test]
fn a_failed_io_uring_call_is_recovered_or_named() {
    let strace = match strace() {
        Ok(strace) => strace,
        Err(why) => return skip("errors of io_uring", why),
    };
    if !has_uring() {
        return skip("errors of io_uring", "no io_uring here");
    }
    let dir = Dir::new();
    let set = Set {
        files: 4,
        per_file: 16,
        ..Set::usual(dir.path(""))
    }
    .write();
    let mut cases = Vec::new();
    for reader in URING {
        for error in ["EINTR", "EAGAIN", "EBUSY", "ENOMEM"] {
            // The first is the trial of the ring, made while the loader is built.
            let trial = if error == "EINTR" {
                Must::Recover
            } else {
                Must::Either
            };
            for (when, must) in [
                ("1", trial),
                ("2", Must::Recover),
                ("4", Must::Recover),
                ("3+", Must::Fail),
            ] {
                cases.push((
                    Injection {
                        calls: "io_uring_enter",
                        error,
                        when,
                        only_files: false,
                    },
                    reader,
                    must,
                ));
            }
        }
    }
    for calls in ["io_uring_setup", "io_uring_register", "eventfd2"] {
        for error in ["ENOMEM", "EMFILE", "EPERM"] {
            for when in ["1", "2", "1+"] {
                let injection = |reader, must| {
                    (
                        Injection {
                            calls,
                            error,
                            when,
                            only_files: false,
                        },
                        reader,
                        must,
                    )
                };
                cases.extend([
                    injection(AUTO, Must::Recover),
                    injection(URING[0], Must::Either),
                ]);
            }
        }
    }
    // Not a period of the loops above.
    let cases: Vec<_> = cases.into_iter().step_by(sweep::size(5, 1, 1)).collect();
    some_at_a_time(&cases, |(injection, reader, must)| {
        let ended = injection.run(&strace, &set, *reader);
        let what = injection.what(*reader);
        eprintln!(
            "{what}: {}",
            judge(&what, &ended, injection.error, *must, false)
        );
    });
}

/// Each start of a thread fails in turn, until a run has no more starts.
#[test]
fn threads_that_cannot_start_are_done_without_or_an_error_of_build() {
    let strace = match strace() {
        Ok(strace) => strace,
        Err(why) => return skip("threads that cannot be started", why),
    };
    let dir = Dir::new();
    let set = Set {
        files: 4,
        per_file: 16,
        ..Set::usual(dir.path(""))
    }
    .write();
    some_at_a_time(&ALL, |reader| {
        let mut seen = Vec::new();
        for when in ["1+"].into_iter().chain(NUMBERS) {
            let injection = Injection {
                calls: "clone,clone3",
                error: "EAGAIN",
                when,
                only_files: false,
            };
            let ended = injection.run(&strace, &set, *reader);
            let what = injection.what(*reader);
            if denied_here(&ended) && *reader != AUTO {
                return skip(&what, "no io_uring here");
            }
            seen.push(judge(&what, &ended, "EAGAIN", Must::Either, false));
        }
        let way = READERS[*reader];
        assert_ne!(seen[0], "whole", "{way:?}: no thread could start");
        assert_eq!(
            seen.last().map(String::as_str),
            Some("whole"),
            "{way:?}: {seen:#?}"
        );
        assert!(
            seen.iter()
                .all(|words| words == "whole" || words.starts_with("build: ")),
            "{way:?}: {seen:#?}"
        );
        seen.dedup();
        eprintln!("{way:?}: {seen:#?}");
    });
}

const NUMBERS: [&str; 15] = [
    "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15",
];
