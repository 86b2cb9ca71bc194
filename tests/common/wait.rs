//! Waits of tests: as long as it takes, and a message in place of a hang.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fmt::Display;
use std::time::{Duration, Instant};

/// More than any case needs on any machine; only a failing test waits this long.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Waits until `reached`, for at most [`DEADLINE`].
#[track_caller]
pub fn until(what: &str, mut reached: impl FnMut() -> bool) {
    answer(|| what, || reached().then_some(()));
}

/// Asks until there is an answer, for at most [`DEADLINE`]; then `said` has the last word.
#[track_caller]
pub fn answer<T, S: Display>(said: impl Fn() -> S, mut ask: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(started.elapsed() < DEADLINE, "never: {}", said());
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Waits until `reached`, for half of that at most: the next assertion names the failure.
pub fn soon(mut reached: impl FnMut() -> bool) {
    let started = Instant::now();
    while !reached() && started.elapsed() < DEADLINE / 2 {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// For what must not come: time in which it would.
pub fn a_moment() {
    std::thread::sleep(Duration::from_millis(30));
}
