//! Faults of a real machine: each test makes one happen, in a process of its own where the process must be changed, and
//! holds a real loader against it.
//!
//! ```text
//! test ── makes the fault (filter, limit, mount, strace, signal) ── child: loader ──► batches ═ oracle, then one error or none
//!                                                                          └────────► threads, descriptors, leaked
//! ```
//!
//! What must hold each time: the child ends within a deadline; the batches delivered are right and in order; then comes
//! exactly one typed error, with path, offset, sample and the system's code where there is one, or none; never a hang, a panic
//! or a wrong byte; threads and descriptors are given back, and what may still be written to is counted as leaked.
//!
//! What needs root, a tool or a kernel feature decides at run time, and says `skipped: WHAT: WHY` where it is not to be had.
//! Mounts are made in a namespace of the test's thread, so that nothing stays behind, however a test ends.

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

/// The entry of the processes that the tests start; without the variable it is nobody.
#[test]
#[ignore = "a process of the other tests, which start it"]
fn child() {
    if let Some(given) = child::Given::here() {
        child::be(&given);
    }
}
