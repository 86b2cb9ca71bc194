//! Tests that run themselves, or another test, in a separate process: resources of the whole
//! process (descriptors, threads, limits, signals, counters) then belong to one test alone.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// Variable with the purpose of a process: only a test in a separate process sees it.
const TOLD: &str = "FEEDLINE_CHILD";

/// The harness's name of the test that calls.
#[allow(unused_macros, reason = "each test binary uses its own part")]
macro_rules! here {
    () => {{
        fn place() {}
        $crate::common::child::name_of(std::any::type_name_of_val(&place))
    }};
}

/// The harness's name of a test of the module that calls.
#[allow(unused_macros, reason = "each test binary uses its own part")]
macro_rules! beside {
    ($test:literal) => {
        $crate::common::child::name_of(concat!(module_path!(), "::", $test, "::place"))
    };
}

pub(crate) use {beside, here};

/// Without the crate, and without the macros' suffix of a test's name.
pub fn name_of(place: &str) -> String {
    let words = place
        .split("::")
        .skip(1)
        .filter(|word| !matches!(*word, "place" | "{{closure}}"));
    words.collect::<Vec<_>>().join("::")
}

/// Makes a command of this program run only that test, and passes it its purpose.
pub fn tell<'a>(command: &'a mut Command, test: &str, told: impl AsRef<OsStr>) -> &'a mut Command {
    // One thread: the test then runs on the main thread, and only our code starts threads.
    command.args([test, "--exact", "--include-ignored"]);
    command
        .args(["--nocapture", "--test-threads=1"])
        .env(TOLD, told)
}

/// A process that runs that test alone.
pub fn process(test: &str, told: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    tell(&mut command, test, told);
    command
}

/// In such a process: its purpose.
pub fn told() -> Option<String> {
    std::env::var(TOLD).ok()
}

/// The test again, in a separate process for this folder; `shell` goes before it.
pub fn child(test: &str, dir: &Path, shell: &str) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("{shell}; exec \"$0\" \"$@\"")])
        .arg(std::env::current_exe().unwrap());
    tell(&mut command, test, dir).current_dir(dir);
    command
}

/// In such a process: its folder.
pub fn in_child() -> Option<PathBuf> {
    told().map(PathBuf::from)
}

/// Runs it to its end, which must be a success; gives its output.
#[track_caller]
pub fn run(mut child: Command) -> String {
    let output = child.output().unwrap();
    let text = printed(&output);
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{}: {text}", output.status);
    text
}

/// Its output, then its errors.
pub fn printed(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    format!("{said}{errors}")
}

/// Runs the calling test again in a separate process, one such test after another; gives whether
/// this is that process.
#[track_caller]
pub fn alone(test: &str) -> bool {
    static ONE: Mutex<()> = Mutex::new(());
    if told().is_some() {
        return true;
    }
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    if std::env::args().any(|word| word == "--nocapture") {
        let status = process(test, "").status().unwrap();
        assert!(status.success(), "{test} failed, in a process of its own");
    } else {
        print!("{}", run(process(test, "")));
    }
    false
}

/// Runs a test in so many processes at once, each told its part; gives the sum of the numbers that
/// they print after [`MADE`].
#[track_caller]
pub fn in_parts(test: &str, parts: usize, told: impl Fn(usize) -> String) -> usize {
    let children: Vec<_> = (0..parts)
        .map(|part| {
            let mut command = process(test, told(part));
            std::thread::spawn(move || command.output().unwrap())
        })
        .collect();
    let made = children.into_iter().enumerate().map(|(part, child)| {
        let output = child.join().unwrap();
        let text = printed(&output);
        let made = text
            .lines()
            .find_map(|line| line.split_once(MADE)?.1.parse::<usize>().ok());
        let made = made.filter(|_| output.status.success());
        made.unwrap_or_else(|| panic!("part {part}: {}\n{text}", output.status))
    });
    made.sum()
}

/// What a part of a sweep says before the number of its failures.
pub const MADE: &str = "failures made: ";
