//! Checks the starvation of a [`Snapshot`](feedline::profile::Snapshot): scenarios in real time,
//! against a truth that is measured outside the crate.
//!
//! ```text
//! host    the bench's clock around each `next()`                           vs consumer.waited_ns
//! device  pieces of work on the consumer's stream that log their run times   vs consumer.gpu {starved_ns, late_ns}
//!
//! stream  ─ work ─┤asked├────── nothing to do ──────┤got├─ work ─┤dropped├── host is late ──┤asked├─ …
//!                       └────── starvation ────────┘             └── user's own time ──┘
//!
//! cargo test --benches                        every scenario once, small, without checks of times
//! cargo bench --bench starvation [-- WORDS]   all scenarios, or those whose names contain a word; fails if one is wrong
//! ```
//!
//! A measurement is right within 3 % of the truth or 50 µs per step, the larger of both. `asked`,
//! `got` and `dropped` are work of no length. Each piece of work is marked, so the host's lateness
//! is known.
//!
//! Truth and measurement come from the same run, so a busy machine disturbs both. Only a thread
//! that loses its core between the two readings of the clock disturbs one alone. So a wrong
//! scenario runs again, at most twice, and the table gives the number of runs. The device is the
//! tests' stand-in driver: its streams are threads, and its copies take the time of their
//! bandwidth.

mod common;
#[path = "starvation/device.rs"]
mod device;
#[path = "starvation/host.rs"]
mod host;
#[path = "../tests/common/standin.rs"]
mod standin;
#[path = "../tests/common/wait.rs"]
mod wait;

use common::as_test;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Maximum error of a measurement, as a share of the truth.
const SHARE: f64 = 0.03;
/// Maximum error per step, if that is more.
const PER_STEP: Duration = Duration::from_micros(50);
/// Maximum runs of a wrong scenario.
const TRIES: u32 = 3;

/// One comparison.
struct Line {
    what: &'static str,
    /// Steps that count, and measured steps.
    steps: (u64, u64),
    truth: Duration,
    measured: Duration,
    wall: Duration,
}

impl Line {
    /// Error of the measurement per step, in microseconds.
    fn off_us(&self) -> f64 {
        (self.measured.as_secs_f64() - self.truth.as_secs_f64()) * 1e6 / self.steps.0.max(1) as f64
    }

    fn is_right(&self) -> bool {
        let room = (self.truth.mul_f64(SHARE)).max(PER_STEP * self.steps.0 as u32);
        self.steps.0 == self.steps.1 && self.measured.abs_diff(self.truth) <= room
    }

    fn print(&self, name: &str, tries: u32) {
        println!(
            "{name:58} {:9} {:6} {:10.2}   {:9.2} {:+9.1} {:6.1}  {}{}",
            self.what,
            self.steps.0,
            self.truth.as_secs_f64() * 1e3,
            self.measured.as_secs_f64() * 1e3,
            self.off_us(),
            100.0 * self.truth.as_secs_f64() / self.wall.as_secs_f64().max(1e-9),
            if self.is_right() { "ok" } else { "OFF" },
            if tries > 1 {
                format!(" ({tries} runs)")
            } else {
                String::new()
            },
        );
        if self.steps.0 != self.steps.1 {
            println!(
                "{:58} {} of {} steps were measured",
                "", self.steps.1, self.steps.0
            );
        }
    }
}

/// A scenario: its name, its number of steps in a bench, and a function that runs a number of
/// steps.
type Scenario = (&'static str, u64, fn(u64) -> Vec<Line>);

/// Steps of a scenario in a test.
const FEW: u64 = 5;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let wanted =
        |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    println!(
        "{:58} {:9} {:>6} {:>10}   {:>9} {:>9} {:>6}",
        "scenario", "", "steps", "truth, ms", "measured", "µs/step", "%"
    );
    let mut all = 0;
    let mut right = 0;
    for (name, steps, run) in scenarios().into_iter().filter(|(name, ..)| wanted(name)) {
        all += 1;
        right += u32::from(judge(name, steps, run));
    }
    if as_test() {
        println!("{all} scenarios ran; a test does not check times");
        return ExitCode::SUCCESS;
    }
    println!(
        "{right} of {all} scenarios within {} % or {PER_STEP:?} per step of the truth",
        SHARE * 100.0
    );
    if right == all {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn scenarios() -> Vec<Scenario> {
    let mut all = host::SCENARIOS.to_vec();
    all.extend(device::SCENARIOS);
    all
}

/// Runs a scenario until it is right, a limited number of times.
fn judge(name: &str, steps: u64, run: fn(u64) -> Vec<Line>) -> bool {
    if as_test() {
        for line in run(FEW) {
            assert!(line.steps.0 > 0, "{name}: no step");
            assert_eq!(
                line.steps.1, line.steps.0,
                "{name}: steps that were measured"
            );
        }
        return true;
    }
    for tries in 1.. {
        let lines = run(steps);
        let right = lines.iter().all(Line::is_right);
        if right || tries == TRIES {
            lines.iter().for_each(|line| line.print(name, tries));
            return right;
        }
    }
    false
}

/// Sleeps for a number of microseconds.
fn rest(us: u64) {
    std::thread::sleep(Duration::from_micros(us));
}

/// Works for a number of microseconds.
fn spin(us: u64) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_micros(us) {
        std::hint::spin_loop();
    }
}

/// A pseudo-random number below `below`, by `at`.
fn random(at: u64, below: u64) -> u64 {
    let mut x = at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x ^ x >> 31) % below
}
