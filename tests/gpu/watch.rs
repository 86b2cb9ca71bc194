//! Commands that may not end, crash, or leave something behind: each in a process group of its own,
//! with a deadline.
//!
//! Whoever does not end in time is killed with its group. A process that even then does not go (it
//! is stuck in the kernel, in a driver) is left where it is: nothing here waits for it.

use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How long output is waited for after the process has gone: a child of its own may hold the pipe.
const GRACE: Duration = Duration::from_secs(2);
/// How long a killed process may take.
const DEATH: Duration = Duration::from_secs(5);
/// Lines of standard error that are kept.
const TAIL: usize = 40;

/// How a command ended.
#[derive(Debug)]
pub enum End {
    /// With this status.
    Gone(ExitStatus),
    /// It was killed at the deadline.
    Late,
    /// It could not be started, or not be waited for.
    Not(String),
}

impl End {
    pub fn well(&self) -> bool {
        matches!(self, Self::Gone(status) if status.success())
    }

    /// In words.
    pub fn words(&self) -> String {
        match self {
            Self::Gone(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("it ended with {code}"),
                (None, signal) => format!("signal {} ended it", signal.unwrap_or(0)),
            },
            Self::Late => "it did not end in time and was killed".into(),
            Self::Not(why) => why.clone(),
        }
    }
}

enum Line {
    Out(String),
    Err(String),
}

/// Runs `command` for at most `limit`, gives each line of its standard output to `each`, and
/// returns how it ended and the last lines of its standard error.
pub fn run(
    mut command: Command,
    limit: Duration,
    mut each: impl FnMut(&str),
) -> (End, Vec<String>) {
    let deadline = Instant::now() + limit;
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            return (
                End::Not(format!(
                    "{:?} does not start: {error}",
                    command.get_program()
                )),
                Vec::new(),
            );
        }
    };
    let lines = lines_of(&mut child);
    let mut tail = Vec::new();
    let mut take = |line: Line| match line {
        Line::Out(line) => each(&line),
        Line::Err(line) => {
            if tail.len() == TAIL {
                tail.remove(0);
            }
            tail.push(line);
        }
    };
    let end = loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => take(line),
            // Both pipes are closed: the end is near, but need not come.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Duration::from_millis(5)),
            Err(RecvTimeoutError::Timeout) => {}
        }
        match child.try_wait() {
            Ok(Some(status)) => break End::Gone(status),
            Ok(None) if Instant::now() < deadline => {}
            Ok(None) => {
                kill(&mut child);
                break End::Late;
            }
            Err(error) => break End::Not(error.to_string()),
        }
    };
    let grace = Instant::now() + GRACE;
    while let Ok(line) = lines.recv_timeout(grace.saturating_duration_since(Instant::now())) {
        take(line);
    }
    (end, tail)
}

/// The same with all of the standard output.
pub fn output(command: Command, limit: Duration) -> (End, String, Vec<String>) {
    let mut text = String::new();
    let (end, tail) = run(command, limit, |line| {
        text.push_str(line);
        text.push('\n');
    });
    (end, text, tail)
}

fn lines_of(child: &mut Child) -> Receiver<Line> {
    let (send, lines) = channel();
    if let Some(pipe) = child.stdout.take() {
        forward(pipe, send.clone(), Line::Out);
    }
    if let Some(pipe) = child.stderr.take() {
        forward(pipe, send, Line::Err);
    }
    lines
}

/// A thread that ends with the pipe. It is never joined: a process that nobody can kill keeps it.
fn forward(pipe: impl Read + Send + 'static, to: Sender<Line>, as_line: fn(String) -> Line) {
    std::thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut bytes = Vec::new();
        while matches!(pipe.read_until(b'\n', &mut bytes), Ok(1..)) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_string();
            bytes.clear();
            if to.send(as_line(line)).is_err() {
                return;
            }
        }
    });
}

fn kill(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let death = Instant::now() + DEATH;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < death {
        std::thread::sleep(Duration::from_millis(20));
    }
}
