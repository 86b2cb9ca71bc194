//! io_uring refused in every way a machine can refuse it: batches still come, and the report has
//! the reason.

use super::child::{Ended, Outcome, Task, skip};
use super::seccomp::URING;
use super::set::Set;
use crate::common::{Dir, READERS, has_uring};
use rustix::io::Errno;
use std::process::{Command, Stdio};

/// Numbers in [`READERS`](crate::common::READERS).
const AUTO: usize = 0;
const URING_DIRECT: usize = 1;
const URING_BUFFERED: usize = 2;

const REFUSED: &str = "io_uring is refused on this machine as it is";

const IMPOSSIBLE: &str = "not possible on this machine";

/// Every call of io_uring, and each of them alone: a filter may allow creating a ring but not
/// entering it.
fn filters() -> Vec<(String, String)> {
    let all = URING.map(|(_, number)| number.to_string()).join(",");
    let each = URING.map(|(name, number)| (name.to_string(), number.to_string()));
    let all = ("all of io_uring".to_string(), all);
    [all].into_iter().chain(each).collect()
}

#[test]
fn a_seccomp_filter_without_io_uring_leaves_pread_threads() {
    if !has_uring() {
        return skip("seccomp", REFUSED);
    }
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    for (errno, word) in [(Errno::PERM, "EPERM"), (Errno::NOSYS, "ENOSYS")] {
        for (what, calls) in filters() {
            let code = errno.raw_os_error();
            let deny = |task: Task| task.with("deny", &calls).with("errno", code);
            set.cool();
            let ended = deny(Task::pull(&set, AUTO)).run();
            if let Some(why) = ended.skipped() {
                return skip("seccomp", why);
            }
            ended.whole();
            let choice = ended.said("choice").unwrap();
            let named = choice.contains("pread") && choice.contains(word);
            assert!(named, "{what}, {word}: {choice}");
            for reader in [URING_DIRECT, URING_BUFFERED] {
                let fault = deny(Task::pull(&set, reader)).run().failed();
                let seen = (fault.kind.as_str(), fault.stage.as_str());
                assert_eq!(seen, (IMPOSSIBLE, "build"), "{fault:?}");
                let named = fault.text.contains(word) && fault.has_code(code);
                assert!(named, "{what}: {fault:?}");
            }
        }
    }
}

/// Without the capability, and with a memlock limit of zero or below the buffers: newer kernels
/// then refuse the ring itself, or the registration of its buffers.
#[test]
fn too_little_lockable_memory_is_only_a_reason() {
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    for limit in [0, 96 << 10] {
        for reader in [AUTO, URING_DIRECT, URING_BUFFERED] {
            set.cool();
            let task = Task::pull(&set, reader).with("memlock", limit);
            let ended = task.with("plain", 1).run();
            if let Some(why) = ended.skipped() {
                return skip("RLIMIT_MEMLOCK", why);
            }
            if denied_here(&ended) {
                return skip("RLIMIT_MEMLOCK", REFUSED);
            }
            let words = match ended.outcome(false) {
                Outcome::Whole => {
                    let registered = ended.said("registered") == Some("true");
                    assert!(!registered, "{limit}: {ended:#?}");
                    ended.said("choice").unwrap().to_string()
                }
                Outcome::Failed(fault) => {
                    assert_ne!(reader, AUTO, "{limit}: {fault:?}");
                    let seen = (
                        fault.kind.as_str(),
                        fault.stage.as_str(),
                        fault.has_code(12),
                    );
                    assert_eq!(seen, (IMPOSSIBLE, "build", true), "{limit}: {fault:?}");
                    fault.text
                }
            };
            assert!(words.contains("RLIMIT_MEMLOCK"), "{limit}: {words}");
            eprintln!("{limit} bytes, {reader}: {words}");
        }
    }
}

/// Whether a reader other than the default one could not run for want of io_uring; then it says
/// that the test was skipped.
pub fn skipped_here(test: &str, reader: usize, ended: &Ended) -> bool {
    let denied = reader != AUTO && denied_here(ended);
    if denied {
        skip(test, format!("{:?}: no io_uring here", READERS[reader]));
    }
    denied
}

/// Whether io_uring is missing for another reason than the test's.
pub fn denied_here(ended: &Ended) -> bool {
    let denied = |text: &str| text.contains("setup refused") && !text.contains("RLIMIT_MEMLOCK");
    ended.said("error").is_some_and(denied) || ended.said("choice").is_some_and(denied)
}

const SWITCH: &str = "/proc/sys/kernel/io_uring_disabled";

/// Turns io_uring off for the whole machine; a process of its own turns it on again, also when this
/// one is killed.
struct Switch {
    restorer: std::process::Child,
}

impl Switch {
    fn off(before: &str) -> std::io::Result<Self> {
        // It waits for the end of its input, at the latest the end of this process.
        let before = before.trim();
        let script = format!("trap '' HUP INT TERM; cat >/dev/null; echo {before} >{SWITCH}");
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &script]);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let switch = Self {
            restorer: command.spawn()?,
        };
        std::fs::write(SWITCH, "2")?;
        Ok(switch)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        drop(self.restorer.stdin.take());
        let _ = self.restorer.wait();
    }
}

#[test]
fn the_kernel_switch_against_io_uring_is_named() {
    let test = "kernel.io_uring_disabled";
    if std::env::var_os("FEEDLINE_SYSCTL").is_none_or(|value| value != "1") {
        let why = "it is of the whole machine: set FEEDLINE_SYSCTL=1 to let the test do it";
        return skip(test, why);
    }
    let dir = Dir::new();
    let set = Set::usual(dir.path("")).write();
    let Ok(before) = std::fs::read_to_string(SWITCH) else {
        return skip(test, "no such switch");
    };
    let switch = match Switch::off(&before) {
        Ok(switch) => switch,
        Err(error) => return skip(test, error),
    };
    let auto = Task::pull(&set, AUTO).run();
    let explicit = Task::pull(&set, URING_DIRECT).run();
    drop(switch);
    let after = std::fs::read_to_string(SWITCH).unwrap();
    assert_eq!(after, before, "not restored");
    auto.whole();
    let choice = auto.said("choice").unwrap();
    let fault = explicit.failed();
    let named = "kernel.io_uring_disabled = 2";
    assert!(
        choice.contains(named) && choice.contains("pread"),
        "{choice}"
    );
    assert!(fault.text.contains(named), "{fault:?}");
}
