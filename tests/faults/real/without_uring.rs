//! Runs a command without io_uring, as in many containers: for tests on a machine with io_uring.
//!
//! ```sh
//! cargo build --example without_uring
//! CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=target/debug/examples/without_uring cargo test
//! ```
//!
//! `FEEDLINE_DENY_ERRNO` is the errno: 1 (EPERM, the default) or 38 (ENOSYS).

#[path = "seccomp.rs"]
mod seccomp;

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        eprintln!("usage: without_uring COMMAND [ARGUMENT …]");
        return ExitCode::from(2);
    };
    let errno = std::env::var("FEEDLINE_DENY_ERRNO").map_or(Ok(1), |text| text.parse());
    let Ok(errno @ 1..=4095) = errno else {
        eprintln!("FEEDLINE_DENY_ERRNO is not an errno");
        return ExitCode::from(2);
    };
    if let Err(error) = seccomp::deny(&seccomp::URING.map(|(_, number)| number), errno) {
        eprintln!("cannot install a seccomp filter: {error}");
        return ExitCode::from(125);
    }
    let error = Command::new(&program).args(arguments).exec();
    eprintln!("{}: {error}", program.display());
    ExitCode::from(127)
}
