//! Runs a child process, and ensures that it ends.

use crate::job::{ChildReport, JOB, Job, REPORT, STOP_ME};
use feedline::Stop;
use rustix::process::{Pid, Signal, kill_process};
use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
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

/// Duration of a requested stop of the child.
const STOPPED: Duration = Duration::from_secs(1);

/// Starts this program again for `job`, and waits at most `limit` for its end.
///
/// Errors: the child cannot be started; the supervisor was interrupted.
pub fn run(job: &Job, limit: Duration, stop: &Stop) -> Result<Ended, Box<dyn Error>> {
    let stderr = job.work.join("stderr");
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(JOB, serde_json::to_string(job)?)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(fs::File::create(&stderr)?)
        // A terminal's Ctrl-C must reach the supervisor alone: a child ended by it would look crashed.
        .process_group(0)
        .spawn()?;
    let watched = watch(&mut child, limit, stop);
    if watched.is_err() || watched.as_ref().is_ok_and(|watched| watched.hang) {
        let _ = child.kill();
    }
    let status = child.wait()?;
    let Watched { report, hang } = watched?;
    let text = String::from_utf8_lossy(&fs::read(&stderr)?).into_owned();
    let tail = text.lines().rev().take(5).collect::<Vec<_>>();
    let stderr = tail.into_iter().rev().collect::<Vec<_>>().join("; ");
    let signal = if hang { None } else { status.signal() };
    Ok(Ended { report, signal, hang, stderr })
}

struct Watched {
    report: Option<ChildReport>,
    hang: bool,
}

fn watch(child: &mut Child, limit: Duration, stop: &Stop) -> Result<Watched, Box<dyn Error>> {
    let lines = lines(child);
    let (mut report, mut until) = (None, Instant::now() + limit);
    loop {
        if stop.requested() {
            return Err("interrupted".into());
        }
        if Instant::now() > until {
            return Ok(Watched { report, hang: true });
        }
        match lines.recv_timeout(Duration::from_millis(20)) {
            Ok(line) if line == STOP_ME => {
                pause(child);
                until += STOPPED;
            }
            Ok(line) => report = line.strip_prefix(REPORT).and_then(|text| serde_json::from_str(text).ok()).or(report),
            Err(RecvTimeoutError::Timeout) => {}
            // The child has closed its output: it has ended, or will soon.
            Err(RecvTimeoutError::Disconnected) => {
                if child.try_wait()?.is_some() {
                    return Ok(Watched { report, hang: false });
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

fn lines(child: &mut Child) -> Receiver<String> {
    let (sender, receiver) = channel();
    if let Some(out) = child.stdout.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
    }
    receiver
}

fn pause(child: &Child) {
    let Some(pid) = Pid::from_raw(child.id() as i32) else { return };
    let _ = kill_process(pid, Signal::STOP);
    std::thread::sleep(STOPPED);
    let _ = kill_process(pid, Signal::CONT);
}
