//! What a loader promises when something fails: a call, a sample, a file, a disk, a process, a user's function.

#[path = "../common/mod.rs"]
mod common;

mod bad_samples;
mod hostile;
mod injected;
mod real;
mod stalled;
mod substitutes;
mod torture;

// The parts of the example name each other at the root.
#[cfg(all(feature = "image", feature = "signals"))]
use torture::{copy, damage, job, scenarios, source, supervise};
