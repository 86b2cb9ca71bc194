//! The promises of a loader on a CUDA device, against the stand-in driver. The same loader on the
//! host is the oracle.

/// The consumer's streams: begin and end of its reads.
mod streams;

/// CUDA graphs captured beside a loader, and from its streams.
mod captures;

/// Choice of device and context, and reasons for having none.
mod devices;

/// Reservations, and the driver calls of a batch.
mod hot;

/// Hardware queues that the streams of one priority share.
mod queues;

/// Release of slots, and the copies meanwhile.
mod slots;

/// Idle time of the consumer's stream.
mod idle;

/// A training and a validation loader on one device and stream.
mod pair;

/// Iterators and loaders dropped while the device works.
mod ends;

/// Ranges for tools that listen to NVTX.
mod nvtx;

/// Stalled devices and streams.
mod stalls;
