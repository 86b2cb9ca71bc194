//! The promises of a loader under faults: a failing call, sample, file, disk, process or user
//! function.

#[path = "../common/mod.rs"]
mod common;

mod bad_samples;
#[cfg(feature = "remote")]
mod connections;
#[cfg(feature = "remote")]
mod credentials;
mod hostile;
mod injected;
#[cfg(feature = "remote")]
mod lies;
mod real;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "remote")]
mod remote_sweep;
mod stalled;
mod substitutes;
mod torture;

// The parts of the example refer to each other at the crate root.
use torture::{copy, job, scenarios, source, supervise};
