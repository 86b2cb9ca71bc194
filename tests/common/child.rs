//! Tests that run once more in a process of their own.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The test once more, in a process of its own that is about this folder; `shell` goes before it.
pub fn child(test: &str, dir: &Path, shell: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{shell}; exec \"$0\" \"$@\"")]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", test, "--nocapture", "--test-threads", "1"]);
    command.env("FEEDLINE_CHILD", dir).current_dir(dir);
    command
}

/// Runs it to its end, which must be a good one.
pub fn run(mut child: Command) {
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{}: {text}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// In such a process: the folder that it is about.
pub fn in_child() -> Option<PathBuf> {
    std::env::var_os("FEEDLINE_CHILD").map(PathBuf::from)
}
