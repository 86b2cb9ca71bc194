//! Is the starvation that a [`Snapshot`](feedline::profile::Snapshot) gives true? Scenarios in real time, against a truth that
//! is taken outside of the crate.
//!
//! ```text
//! host    the bench's clock around each `next()`                           vs consumer.waited_ns
//! device  pieces of work on the consumer's stream that log when they ran   vs consumer.gpu {starved_ns, host_late_ns}
//!
//! stream  ─ work ─┤asked├────── nothing to do ──────┤got├─ work ─┤dropped├── host is late ──┤asked├─ …
//!                       └────── starvation ────────┘             └─ user's own doing ─┘
//!
//! cargo test --benches                        every scenario once, small, without a judgement of times
//! cargo bench --bench starvation [-- WORDS]   all of them (or those whose names hold a word); fails when one is off
//! ```
//!
//! Right is what is within 3 % of the truth or 50 µs per step, whichever is larger. `asked`, `got` and `dropped` are work of no
//! length. The host's lateness is an upper bound by definition, since work may follow the drop: it must not be below the truth,
//! and right where nothing follows.
//!
//! Truth and measurement come from the same run, so a busy machine disturbs both. What disturbs only one is a thread that loses
//! its core just between the two looks at the clock: a scenario that is off is run again, twice at most, and the table says how
//! often. The device is the stand-in driver of the tests: its streams are threads, its copies take as long as their bandwidth
//! says.

mod common;
#[cfg(feature = "cuda")]
#[path = "starvation/device.rs"]
mod device;
#[path = "starvation/host.rs"]
mod host;
#[cfg(feature = "cuda")]
#[path = "../tests/common/standin.rs"]
mod standin;

use common::as_test;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Share of the truth by which a measurement may be off.
const SHARE: f64 = 0.03;
/// For each step, if that is more.
const PER_STEP: Duration = Duration::from_micros(50);
/// Runs of a scenario that is off.
const TRIES: u32 = 3;

/// How a measurement has to stand to the truth.
#[derive(Clone, Copy, PartialEq)]
enum Must {
    Equal,
    NotBeBelow,
}

/// One comparison.
struct Line {
    what: &'static str,
    must: Must,
    /// Steps that count, and how many were measured.
    steps: (u64, u64),
    truth: Duration,
    measured: Duration,
    wall: Duration,
}

impl Line {
    /// What the measurement is off by, per step, in microseconds.
    fn off_us(&self) -> f64 {
        (self.measured.as_secs_f64() - self.truth.as_secs_f64()) * 1e6 / self.steps.0.max(1) as f64
    }

    fn is_right(&self) -> bool {
        let room = (self.truth.mul_f64(SHARE)).max(PER_STEP * self.steps.0 as u32);
        let below = self.truth.saturating_sub(self.measured) > room;
        let above = self.measured.saturating_sub(self.truth) > room;
        self.steps.0 == self.steps.1 && !below && (!above || self.must == Must::NotBeBelow)
    }

    fn print(&self, name: &str, tries: u32) {
        let sign = if self.must == Must::Equal { ' ' } else { '≤' };
        println!(
            "{name:58} {:9} {:6} {:10.2} {sign} {:9.2} {:+9.1} {:6.1}  {}{}",
            self.what,
            self.steps.0,
            self.truth.as_secs_f64() * 1e3,
            self.measured.as_secs_f64() * 1e3,
            self.off_us(),
            100.0 * self.truth.as_secs_f64() / self.wall.as_secs_f64().max(1e-9),
            if self.is_right() { "ok" } else { "OFF" },
            if tries > 1 { format!(" ({tries} runs)") } else { String::new() },
        );
        if self.steps.0 != self.steps.1 {
            println!("{:58} {} of {} steps were measured", "", self.steps.1, self.steps.0);
        }
    }
}

/// A name, how many steps it has in a bench, and what it does with so many.
type Scenario = (&'static str, u64, fn(u64) -> Vec<Line>);

/// Steps of a scenario in a test.
const FEW: u64 = 5;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wanted = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    println!(
        "{:58} {:9} {:>6} {:>10}   {:>9} {:>9} {:>6}",
        "scenario", "", "steps", "truth, ms", "measured", "µs/step", "%"
    );
    let (mut all, mut right) = (0, 0);
    for (name, steps, run) in scenarios().into_iter().filter(|(name, ..)| wanted(name)) {
        all += 1;
        right += u32::from(judge(name, steps, run));
    }
    if as_test() {
        println!("{all} scenarios ran; as a test: times were not judged");
        return ExitCode::SUCCESS;
    }
    println!("{right} of {all} scenarios within {} % or {PER_STEP:?} per step of the truth", SHARE * 100.0);
    if right == all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn scenarios() -> Vec<Scenario> {
    let mut all = host::SCENARIOS.to_vec();
    #[cfg(feature = "cuda")]
    all.extend(device::SCENARIOS);
    all
}

/// Runs a scenario until it is right, some times at most.
fn judge(name: &str, steps: u64, run: fn(u64) -> Vec<Line>) -> bool {
    if as_test() {
        for line in run(FEW) {
            assert!(line.steps.0 > 0, "{name}: no step");
            assert_eq!(line.steps.1, line.steps.0, "{name}: steps that were measured");
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

/// Nothing, for so many microseconds.
fn rest(us: u64) {
    std::thread::sleep(Duration::from_micros(us));
}

/// Work, for so many microseconds.
fn spin(us: u64) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_micros(us) {
        std::hint::spin_loop();
    }
}

/// A number that is another one for each `at`, below `below`.
fn random(at: u64, below: u64) -> u64 {
    let mut x = at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x ^ x >> 31) % below
}
