//! Runs a child, and sees to it that it ends.

use crate::job::{JOB, Job, STOP_ME, TOLD, Told};
use feedline::Stop;
use rustix::process::{Pid, Signal, kill_process};
use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How a child ended.
#[derive(Debug)]
pub struct Ended {
    pub told: Option<Told>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// It did not end within the limit, and was killed.
    pub hang: bool,
    /// What it wrote to standard error, the last of it.
    pub words: String,
}

/// How long a child that asks for it is stopped.
const STOPPED: Duration = Duration::from_secs(1);

/// Starts this program again for `job`, and waits for its end, no longer than `limit`.
///
/// Errors: it cannot be started; interrupted.
pub fn run(job: &Job, limit: Duration, stop: &Stop) -> Result<Ended, Box<dyn Error>> {
    let words = job.work.join("stderr");
    let mut child = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(JOB, serde_json::to_string(job)?)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(fs::File::create(&words)?)
        // A terminal's Ctrl-C is for the supervisor alone: a child that it ended would look like one that crashed.
        .process_group(0)
        .spawn()?;
    let watched = watch(&mut child, limit, stop);
    if watched.is_err() || watched.as_ref().is_ok_and(|watched| watched.hang) {
        let _ = child.kill();
    }
    let status = child.wait()?;
    let Watched { told, hang } = watched?;
    let text = String::from_utf8_lossy(&fs::read(&words)?).into_owned();
    let tail = text.lines().rev().take(5).collect::<Vec<_>>();
    let words = tail.into_iter().rev().collect::<Vec<_>>().join("; ");
    let signal = if hang { None } else { ended_by(status) };
    Ok(Ended { told, signal, hang, words })
}

fn ended_by(status: ExitStatus) -> Option<i32> {
    status.signal()
}

struct Watched {
    told: Option<Told>,
    hang: bool,
}

fn watch(child: &mut Child, limit: Duration, stop: &Stop) -> Result<Watched, Box<dyn Error>> {
    let lines = lines(child);
    let (mut told, mut until) = (None, Instant::now() + limit);
    loop {
        if stop.requested() {
            return Err("interrupted".into());
        }
        if Instant::now() > until {
            return Ok(Watched { told, hang: true });
        }
        match lines.recv_timeout(Duration::from_millis(20)) {
            Ok(line) if line == STOP_ME => {
                pause(child);
                until += STOPPED;
            }
            Ok(line) => told = line.strip_prefix(TOLD).and_then(|text| serde_json::from_str(text).ok()).or(told),
            Err(RecvTimeoutError::Timeout) => {}
            // It has closed its output: it is about to end, or has.
            Err(RecvTimeoutError::Disconnected) => {
                if child.try_wait()?.is_some() {
                    return Ok(Watched { told, hang: false });
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
