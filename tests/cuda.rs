//! What a loader promises on a CUDA device, against the stand-in driver. The same loader on the host is the oracle.
#![cfg(feature = "cuda")]

mod common;
#[path = "common/cuda.rs"]
mod gpu;
#[path = "common/standin.rs"]
mod standin;

/// Bytes, shapes and numbers of batches are those of the host.
#[path = "cuda/conformance.rs"]
mod conformance;

/// The consumer's streams: when it may read, and until when.
#[path = "cuda/streams.rs"]
mod streams;
