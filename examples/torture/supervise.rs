//! Runs a child process, and ensures that it ends.

use crate::job::{ChildReport, JOB, Job, REPORT};
use feedline::Stop;
use std::error::Error;
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Result of a child process.
#[derive(Debug)]
pub struct Ended {
    pub report: Option<ChildReport>,
    /// Signal that ended it, if any.
    pub signal: Option<i32>,
    /// The child exceeded the time limit and was killed.
    pub hang: bool,
    /// The last lines of its standard error.
    pub stderr: String,
}

/// Starts this program again for `job`, and waits at most `limit` for its end.
///
/// Errors: the child cannot be started; the supervisor was interrupted.
pub fn run(job: &Job, limit: Duration, stop: &Stop) -> Result<Ended, Box<dyn Error>> {
    // Files, which the child holds open whatever limits it sets, and which take any number of
    // lines.
    let stdout = job.work.join("stdout");
    let stderr = job.work.join("stderr");
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(JOB, serde_json::to_string(job)?)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(File::create(&stdout)?)
        .stderr(File::create(&stderr)?)
        // A terminal's Ctrl-C must reach the supervisor alone: a child ended by it would look
        // crashed.
        .process_group(0)
        .spawn()?;
    let until = Instant::now() + limit;
    while child.try_wait()?.is_none() && Instant::now() < until && !stop.requested() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let hang = child.try_wait()?.is_none();
    if hang {
        let _ = child.kill();
    }
    let status = child.wait()?;
    if stop.requested() {
        return Err("interrupted".into());
    }
    let stdout = fs::read_to_string(stdout)?;
    let stderr = String::from_utf8_lossy(&fs::read(stderr)?).into_owned();
    let report = stdout
        .lines()
        .find_map(|line| serde_json::from_str(line.strip_prefix(REPORT)?).ok());
    let tail: Vec<&str> = stderr
        .lines()
        .skip(stderr.lines().count().saturating_sub(5))
        .collect();
    Ok(Ended {
        report,
        signal: if hang { None } else { status.signal() },
        hang,
        stderr: tail.join("; "),
    })
}
