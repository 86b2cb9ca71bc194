//! Real signals to separate processes: each test starts itself again as a child, which runs the
//! test's `child` and reports in lines, while the parent sends the signals. Every wait has a
//! deadline.

use crate::common::{DEADLINE, answer, here, process, told, until};
use feedline::Stop;
use feedline::process::Signal;
use rustix::process::{Pid, Signal as Number, kill_process};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A child that runs one test of this file; killed when dropped.
struct Process {
    child: Child,
    lines: Receiver<String>,
}

/// Runs `body` in this process if it is the child of `test`. Otherwise starts that child and waits
/// for its "ready".
fn start(test: &str, body: impl FnOnce()) -> Option<Process> {
    if told().is_some() {
        body();
        return None;
    }
    let mut child = process(test, "")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (sender, lines) = channel();
    let out = BufReader::new(child.stdout.take().unwrap());
    // The thread ends with the child's output, or with its receiver.
    std::thread::spawn(move || {
        out.lines()
            .map_while(Result::ok)
            .try_for_each(|line| sender.send(line))
    });
    let process = Process { child, lines };
    process.expect("ready");
    Some(process)
}

impl Process {
    fn send(&self, signal: Number) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for a line; skips the test harness's own lines.
    fn expect(&self, expected: &str) {
        let deadline = Instant::now() + DEADLINE;
        let mut seen = Vec::new();
        while let Ok(line) = self
            .lines
            .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            // The first line follows the harness's "test name ... ".
            if line.ends_with(expected) {
                return;
            }
            seen.push(line);
        }
        panic!("{expected:?} was not reported, but {seen:#?}");
    }

    fn end(&mut self) -> ExitStatus {
        answer(|| "the child ends", || self.child.try_wait().unwrap())
    }

    fn ends_by(&mut self, signal: Number) {
        let status = self.end();
        assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
    }

    /// These signals make it print `line` and end.
    fn answers(&mut self, signals: &[Number], line: &str) {
        signals.iter().for_each(|signal| self.send(*signal));
        self.expect(line);
        let status = self.end();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ready() {
    println!("ready");
}

/// The child's training loop: polls until the flag is set.
fn wait_for(stop: &Stop) {
    until("a signal comes", || stop.requested());
}

/// The child outlives every deadline of its parent, unless a signal ends it.
fn linger() {
    std::thread::sleep(2 * DEADLINE);
}

#[test]
fn sigterm_sets_the_flag_of_every_clone_and_is_named() {
    let Some(mut process) = start(&here!(), || {
        let stop = Stop::on_signals().unwrap();
        let clone = stop.clone();
        assert!(!stop.requested() && stop.signal().is_none());
        ready();
        wait_for(&stop);
        assert!(clone.requested());
        println!("{:?} {:?}", stop.signal(), clone.signal());
    }) else {
        return;
    };
    process.answers(&[Number::TERM], "Some(Term) Some(Term)");
}

#[test]
fn a_request_of_the_program_does_not_hide_a_signal() {
    let Some(mut process) = start(&here!(), || {
        let stop = Stop::on_signals().unwrap();
        stop.request();
        assert!(stop.requested() && stop.signal().is_none());
        let other = Stop::on_signals().unwrap();
        assert!(!other.requested());
        ready();
        wait_for(&other);
        println!("{:?}", stop.signal());
    }) else {
        return;
    };
    process.answers(&[Number::USR1], "Some(Usr1)");
}

#[test]
fn a_sigterm_after_repeated_sigusr1_counts_as_first() {
    let Some(mut process) = start(&here!(), || {
        let stop = Stop::on_signals().unwrap();
        let term = Stop::on([Signal::Term]).unwrap();
        ready();
        wait_for(&stop);
        println!("first {:?}, not {:?}", stop.signal(), term.signal());
        wait_for(&term);
        println!("still {:?}, now {:?}", stop.signal(), term.signal());
    }) else {
        return;
    };
    process.send(Number::USR1);
    process.expect("first Some(Usr1), not None");
    process.answers(
        &[Number::USR1, Number::TERM],
        "still Some(Usr1), now Some(Term)",
    );
}

#[test]
fn a_second_sigint_ends_the_process_and_no_other_signal_does() {
    let Some(mut process) = start(&here!(), || {
        let flags =
            [Signal::Term, Signal::Int, Signal::Hup].map(|signal| Stop::on([signal]).unwrap());
        ready();
        flags.iter().for_each(wait_for);
        println!("all came");
        linger();
    }) else {
        return;
    };
    [Number::HUP, Number::TERM, Number::INT]
        .into_iter()
        .for_each(|first| process.send(first));
    process.expect("all came");
    for again in [Number::TERM, Number::HUP, Number::TERM] {
        process.send(again);
        std::thread::sleep(Duration::from_millis(20));
    }
    process.send(Number::INT);
    process.ends_by(Number::INT);
}

#[test]
fn asking_for_signals_twice_installs_one_handler() {
    let Some(process) = start(&here!(), || {
        let stops = [
            Stop::on_signals().unwrap(),
            Stop::on_signals().unwrap(),
            Stop::on([Signal::Term]).unwrap(),
        ];
        ready();
        stops.iter().for_each(wait_for);
        let late = Stop::on_signals().unwrap();
        println!("{} {:?}", late.requested(), late.signal());
        linger();
    }) else {
        return;
    };
    process.send(Number::TERM);
    process.expect("true Some(Term)");
}

#[test]
fn the_signal_listed_first_is_named_of_several() {
    let Some(mut process) = start(&here!(), || {
        let stop = Stop::on([Signal::Usr2, Signal::Usr1, Signal::Hup]).unwrap();
        let each =
            [Signal::Usr2, Signal::Usr1, Signal::Hup].map(|signal| Stop::on([signal]).unwrap());
        ready();
        each.iter().for_each(wait_for);
        println!("{:?}", stop.signal());
    }) else {
        return;
    };
    process.answers(&[Number::USR2, Number::USR1, Number::HUP], "Some(Usr2)");
}

#[test]
fn a_signal_without_a_handler_ends_the_process() {
    for signal in [Number::TERM, Number::USR1] {
        let Some(mut process) = start(&here!(), || {
            let stop = Stop::new();
            ready();
            wait_for(&stop);
        }) else {
            return;
        };
        process.send(signal);
        process.ends_by(signal);
    }
}

#[test]
fn an_unrequested_signal_ends_the_process_at_once() {
    for signal in [Number::TERM, Number::USR1] {
        let Some(mut process) = start(&here!(), || {
            let stop = Stop::on([Signal::Usr2]).unwrap();
            ready();
            wait_for(&stop);
        }) else {
            return;
        };
        process.send(signal);
        process.ends_by(signal);
    }
}
