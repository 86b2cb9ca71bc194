//! Faults of a real machine: each test makes one fault, in a separate process if it changes the
//! process, and runs a real loader against it.
//!
//! ```text
//! test ── makes the fault (filter, limit, mount, strace, signal) ── child: loader ──► batches ═ oracle, then one error or none
//!                                                                          └────────► threads, descriptors, leaked
//! ```
//!
//! Invariants each time: the child ends within a deadline; the delivered batches are right and in
//! order; then comes at most one typed error, with path, offset, sample and any system code; never
//! a hang, a panic or a wrong byte; threads and descriptors are closed, and memory that may still
//! be written to is counted as leaked.
//!
//! Tests that need root, a tool or a kernel feature check at run time and print
//! `skipped: WHAT: WHY` if it is missing. Mounts are made in a namespace of the test's thread, so
//! that nothing stays behind, however a test ends.

mod child;
mod fuse;
mod seccomp;
mod set;
mod sys;

/// io_uring is refused.
mod denied;

/// Disks that fail or are full.
mod disks;

/// Files that change under the loader.
mod files;

/// Descriptors and memory.
mod limits;

/// Processes that are stopped, or fork.
mod processes;

/// Storage that does not answer.
mod stalls;

/// System calls that fail.
mod strace;

/// Entry point of the processes that the tests start; it does nothing without the variable.
#[test]
#[ignore = "a process of the other tests, which start it"]
fn child() {
    if let Some(given) = child::Given::here() {
        child::be(&given);
    }
}
