//! What a loader promises on a CUDA device, against the stand-in driver. The same loader on the host is the oracle.
#![cfg(feature = "cuda")]

mod common;
#[path = "common/cuda.rs"]
mod gpu;
#[path = "common/runs.rs"]
mod runs;
#[path = "common/standin.rs"]
mod standin;

/// Bytes, shapes and numbers of batches are those of the host.
#[path = "cuda/conformance.rs"]
mod conformance;

/// The consumer's streams: when it may read, and until when.
#[path = "cuda/streams.rs"]
mod streams;

/// CUDA graphs that are captured beside a loader, and of its streams.
#[path = "cuda/captures.rs"]
mod captures;

/// Which device, whose context, and why none.
#[path = "cuda/devices.rs"]
mod devices;

/// What is reserved when, and what a batch costs.
#[path = "cuda/hot.rs"]
mod hot;

/// When slots are free again, and what the copies do meanwhile.
#[path = "cuda/slots.rs"]
mod slots;

/// How long the consumer's stream had nothing to do.
#[path = "cuda/idle.rs"]
mod idle;

/// Iterators and loaders that are dropped while the device works.
#[path = "cuda/ends.rs"]
mod ends;

/// What does not answer, and what cannot be had.
#[path = "cuda/stalls.rs"]
mod stalls;
