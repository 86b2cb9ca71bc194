//! What a loader promises on a CUDA device, against the stand-in driver. The same loader on the host is the oracle.
#![cfg(feature = "cuda")]

/// Bytes, shapes and numbers of batches are those of the host.
mod conformance;

/// The consumer's streams: when it may read, and until when.
mod streams;

/// CUDA graphs that are captured beside a loader, and of its streams.
mod captures;

/// Which device, whose context, and why none.
mod devices;

/// What is reserved when, and what a batch costs.
mod hot;

/// When slots are free again, and what the copies do meanwhile.
mod slots;

/// How long the consumer's stream had nothing to do.
mod idle;

/// Iterators and loaders that are dropped while the device works.
mod ends;

/// What does not answer, and what cannot be had.
mod stalls;
