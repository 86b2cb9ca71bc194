//! Size of sweeps, repetitions and random draws: small by default, larger by `FEEDLINE_SWEEP`.
//!
//! | `FEEDLINE_SWEEP` | what runs | where |
//! |---|---|---|
//! | not set | every kind of case, a few seconds for each test | `cargo test`, `.ci/run` |
//! | `ci` | every case | by hand, before a release |
//! | `full` | every case in every way, up to hours | by hand |
//!
//! `FEEDLINE_ONLY` restricts a sweep to the cases whose names hold one of its words, with commas
//! between them; in the sweep of drops it is the number of a life.

use proptest::test_runner::Config;

/// The value for this run.
pub fn size<T>(short: T, ci: T, full: T) -> T {
    match std::env::var("FEEDLINE_SWEEP").as_deref() {
        Err(_) => short,
        Ok("ci") => ci,
        Ok("full") => full,
        Ok(other) => panic!("FEEDLINE_SWEEP={other}: expected ci or full"),
    }
}

pub fn is_short() -> bool {
    size(true, false, false)
}

pub fn is_full() -> bool {
    size(false, false, true)
}

/// Places of a sweep over bytes: all of them, or every `step`th.
pub fn places(range: std::ops::Range<usize>, step: usize) -> impl Iterator<Item = usize> {
    range.step_by(size(step, 1, 1))
}

/// A property's cases: some by default, `cases` in full.
pub fn cases(cases: u32) -> Config {
    Config {
        cases: size(cases.min(64), cases, cases),
        failure_persistence: None,
        ..Config::default()
    }
}

/// Words of `FEEDLINE_ONLY`; none if it is not set.
pub fn only() -> Option<String> {
    std::env::var("FEEDLINE_ONLY").ok()
}

/// Whether this case is selected.
pub fn wanted(name: &str) -> bool {
    only().is_none_or(|words| words.split(',').any(|word| name.contains(word)))
}
