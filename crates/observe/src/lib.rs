//! Measures a loop over any other loader, and finds what limits it.
//!
//! ```text
//! the loop's thread ──starts, asks, gets, ends──► Observer ──► Observation ──► Diagnosis   cause, evidence, advice
//! sampler thread, some 20 times a second ────────────┘ │          (numbers)      (values, and words for people)
//!   /proc/PID/{syscall,stat,schedstat,io}  worker processes, threads of this process
//!   /proc/stat, control groups             the machine
//! ```
//!
//! The loader is not changed, and no code runs in its processes. Counters of the kernel give times
//! of cores and bytes of devices. A worker's place (on a core, in a read of a file, at a socket, at
//! the pipe where it waits for work) is sampled. Everything is counted in the *steady time* alone:
//! from the first batch of an epoch to its last, without the time in which the epoch runs dry.
//! Starts of epochs are counted apart.
//!
//! # Limits
//!
//! - Places are samples: a run of two seconds has some 40 for each worker.
//! - A place needs the right to read `/proc/PID/syscall`, which a process has for its children. If
//!   the kernel refuses it, workers count as running, reading or waiting, by their state.
//! - Threads that make batches in this process (DALI, tf.data) cannot be told from other threads.
//!   They are those that work while the loop waits.
//! - Predictions are lower bounds, from the measured times alone; there is none for a change whose
//!   effect was not measured.
//! - The sampler runs between the first batch and the end of an epoch only, so that a loader that
//!   forks at the start of an epoch forks without it.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

mod advice;
mod codes;
mod diagnosis;
mod evidence;
mod iter;
mod machine;
mod notes;
mod observation;
mod observer;
mod place;
mod process;
mod sampler;
mod shares;
#[cfg(test)]
mod tests;
mod text;

pub use advice::{Advice, Gain, Remedy, Value};
pub use codes::{Cause, Evidence, Measure};
pub use diagnosis::Diagnosis;
pub use iter::{Observed, observe};
pub use notes::{Probe, WorkerId};
pub use observation::{
    GpuTime, Interpreter, LoaderFacts, LoaderKind, Loop, Machine, Observation, Places, ThreadUse,
    Waits, Worker,
};
pub use observer::Observer;
