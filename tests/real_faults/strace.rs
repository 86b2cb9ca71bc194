//! System calls that fail, one or all from some moment on, injected by strace into a process with a real loader.

use crate::child::{Ended, Outcome, Running, Task, skip, tool};
use crate::common::{Dir, READERS};
use crate::denied::denied_here;
use crate::set::Set;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Numbers in [`READERS`].
const AUTO: usize = 0;
const URING: [usize; 2] = [1, 2];
const PREAD: [usize; 2] = [3, 4];
const MMAP: usize = 5;
const ALL: [usize; 6] = [0, 1, 2, 3, 4, 5];

/// A strace that may trace; why not, if so.
fn strace() -> Result<PathBuf, String> {
    let strace = tool("strace").ok_or("no strace")?;
    let mut command = Command::new(&strace);
    let probe = command.args(["-f", "-o", "/dev/null", "-e", "inject=getppid:error=EIO:when=1", "true"]);
    let output = probe.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    let words = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(strace) } else { Err(format!("strace cannot trace here: {}", words.trim())) }
}

/// One injection: what fails, how, and when; `only_files` where the call counts that is about the data only.
struct Injection<'a> {
    calls: &'a str,
    error: &'a str,
    when: String,
    only_files: bool,
}

impl Injection<'_> {
    fn run(&self, strace: &std::path::Path, set: &Set, reader: usize) -> Ended {
        set.cool();
        let Self { calls, error, when, only_files } = self;
        let inject = format!("inject={calls}:error={error}:when={when}");
        let mut words = vec![strace.to_str().unwrap().to_string()];
        let trace = format!("trace={calls}");
        words.extend(
            ["-f", "-qqq", "-o", "/dev/null", "-e", &trace, "-e", "signal=none", "-e", &inject].map(String::from),
        );
        if *only_files {
            set.paths().iter().for_each(|path| words.extend(["-P".to_string(), path.display().to_string()]));
        }
        Running::start(Task::pull(set, reader).behind(&words)).end()
    }
}

/// What has to come of it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Must {
    /// Nobody notices.
    Recover,
    /// An error with everything there is to say.
    Fail,
    /// One or the other.
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
    table.iter().find(|(known, _)| *known == name).unwrap().1.raw_os_error()
}

/// Checks one run; returns what came of it, in words.
#[track_caller]
fn judge(what: &str, ended: &Ended, error: &str, must: Must, placed: bool) -> String {
    match ended.outcome(false) {
        Outcome::Whole => {
            assert!(must != Must::Fail, "{what}: nothing failed: {ended:#?}");
            "whole".into()
        }
        Outcome::Failed(fault) => {
            assert!(must != Must::Recover, "{what}: {fault:?}");
            assert!(fault.has_code(code(error)), "{what}: no code: {fault:?}");
            assert!(!placed || fault.is_placed(), "{what}: no place: {fault:?}");
            fault.text
        }
    }
}

/// System calls about the data, the reader that makes them, and what has to come of an error of one of them, and of all.
const CALLS: &[(&str, &[usize], &str, Must, Must)] = &[
    ("pread64", &PREAD, "EINTR", Must::Recover, Must::Fail),
    ("pread64", &PREAD, "EAGAIN", Must::Recover, Must::Fail),
    ("pread64", &PREAD, "EIO", Must::Either, Must::Fail),
    ("pread64", &PREAD, "ESTALE", Must::Either, Must::Fail),
    ("pread64", &PREAD, "ENOMEM", Must::Either, Must::Fail),
    ("preadv2", &[AUTO], "EINTR", Must::Recover, Must::Either),
    ("preadv2", &[AUTO], "EAGAIN", Must::Recover, Must::Recover),
    ("preadv2", &[AUTO], "EIO", Must::Either, Must::Either),
    ("preadv2", &[AUTO], "ENOSYS", Must::Recover, Must::Recover),
    ("openat", &PREAD, "EMFILE", Must::Either, Must::Fail),
    ("openat", &PREAD, "EIO", Must::Either, Must::Fail),
    ("openat", &PREAD, "ESTALE", Must::Either, Must::Fail),
    ("openat", &[MMAP], "EACCES", Must::Fail, Must::Fail),
    ("openat2", &[AUTO], "EMFILE", Must::Either, Must::Either),
    ("openat2", &[AUTO], "EIO", Must::Either, Must::Either),
    ("openat2", &[AUTO], "ENOSYS", Must::Recover, Must::Recover),
    ("fstat,newfstatat", &[MMAP], "EIO", Must::Either, Must::Fail),
    ("fstat,newfstatat", &[MMAP], "ESTALE", Must::Either, Must::Fail),
    ("mmap", &[MMAP], "ENOMEM", Must::Either, Must::Fail),
    ("mmap", &[MMAP], "EAGAIN", Must::Either, Must::Fail),
];

#[test]
fn an_error_of_a_system_call_about_the_data_is_recovered_or_named_with_file_offset_sample_and_code() {
    let strace = match strace() {
        Ok(strace) => strace,
        Err(why) => return skip("errors of system calls about the data", why),
    };
    let dir = Dir::new();
    let set = Set { files: 4, per_file: 16, ..Set::usual(dir.path("")) }.write();
    for (calls, readers, error, once, always) in CALLS {
        for reader in *readers {
            for (when, must) in [("1", once), ("3", once), ("3+", always)] {
                let injection = Injection { calls, error, when: when.into(), only_files: true };
                let ended = injection.run(&strace, &set, *reader);
                let what = format!("{calls} {error} when={when}, {:?}", READERS[*reader]);
                // Of indexing, when there was no sample yet.
                let placed = ended.said("built").is_some();
                let words = judge(&what, &ended, error, *must, placed);
                eprintln!("{what}: {words}");
            }
        }
    }
}

#[test]
fn an_error_of_io_uring_is_recovered_or_named_and_what_was_under_way_is_not_lost() {
    let strace = match strace() {
        Ok(strace) => strace,
        Err(why) => return skip("errors of io_uring", why),
    };
    let dir = Dir::new();
    let set = Set { files: 4, per_file: 16, ..Set::usual(dir.path("")) }.write();
    let table =
        [("EINTR", Must::Recover), ("EAGAIN", Must::Recover), ("EBUSY", Must::Recover), ("ENOMEM", Must::Either)];
    for reader in URING {
        for (error, once) in table {
            // The first is the trial of the ring, made while the loader is built.
            for when in ["1", "2", "3", "5", "3+"] {
                let injection = Injection { calls: "io_uring_enter", error, when: when.into(), only_files: false };
                let ended = injection.run(&strace, &set, reader);
                if denied_here(&ended) && when != "1" {
                    return skip("errors of io_uring", "no io_uring here");
                }
                let must = if when == "3+" || when == "1" { Must::Either } else { once };
                let what = format!("io_uring_enter {error} when={when}, {:?}", READERS[reader]);
                eprintln!("{what}: {}", judge(&what, &ended, error, must, false));
            }
        }
    }
    for reader in [AUTO, 1, 2] {
        for calls in ["io_uring_setup", "io_uring_register", "eventfd2"] {
            for error in ["ENOMEM", "EMFILE", "EPERM"] {
                for when in ["1", "2", "3", "1+"] {
                    let injection = Injection { calls, error, when: when.into(), only_files: false };
                    let ended = injection.run(&strace, &set, reader);
                    let what = format!("{calls} {error} when={when}, {:?}", READERS[reader]);
                    let must = if reader == AUTO { Must::Recover } else { Must::Either };
                    eprintln!("{what}: {}", judge(&what, &ended, error, must, false));
                }
            }
        }
    }
}

/// The process also makes these for itself, so each of the first ones fails in turn, until a run has none left to fail.
#[test]
fn no_thread_no_memory_and_futexes_that_are_interrupted_end_in_a_typed_error_or_not_at_all() {
    let strace = match strace() {
        Ok(strace) => strace,
        Err(why) => return skip("errors of threads, memory and futexes", why),
    };
    let dir = Dir::new();
    let set = Set { files: 4, per_file: 16, ..Set::usual(dir.path("")) }.write();
    for reader in ALL {
        for (calls, error, most) in [("clone3", "EAGAIN", 14), ("futex", "EINTR", 6), ("futex", "EAGAIN", 6)] {
            let mut words = Vec::new();
            for when in 1..=most {
                let injection = Injection { calls, error, when: when.to_string(), only_files: false };
                let ended = injection.run(&strace, &set, reader);
                if !ended.started() {
                    continue;
                }
                let what = format!("{calls} {error} when={when}, {:?}", READERS[reader]);
                let must = if calls == "futex" { Must::Recover } else { Must::Either };
                let words_now = judge_unless_denied(&what, &ended, error, must, reader);
                words.push(words_now);
            }
            words.dedup();
            eprintln!("{calls} {error}, {:?}: {words:#?}", READERS[reader]);
        }
    }
}

fn judge_unless_denied(what: &str, ended: &Ended, error: &str, must: Must, reader: usize) -> String {
    if denied_here(ended) && reader != AUTO {
        return "no io_uring here".into();
    }
    judge(what, ended, error, must, false)
}
