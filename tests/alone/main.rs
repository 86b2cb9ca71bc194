//! Measurements of the whole process: heap, memory, threads, descriptors, the kernel's counters.
//! Each test is a separate process, one after another.

#[path = "../common/mod.rs"]
mod common;

mod allocations;
mod cancel;
mod footprint;
mod limits;
mod shared;
mod shutdown;
mod soak;
#[cfg(feature = "remote")]
mod tables;
mod threads;
mod truth;
