//! Objects in S3, GCS and Azure buckets, on HTTP servers and the Hugging Face Hub: listing, single reads, and the reader
//! for samples.
//!
//! ```text
//! s3://bucket/train-{0000..1023}.tar ──listing──► Meta: length, pin (etag) ──► Sources
//!                                                                                │ extents
//! Reader::wait ──reads that lie close──► one ranged GET, If-Match ──► limit ──► body ──copy──► rows, ring
//!                                            ▲                                   │ cut, reset, 503, stall
//!                                            └────── the rest, signed anew ◄─────┘
//! ```
//!
//! An object's address is its URL, which is passed as a path. Where to start reading: `url`,
//! `store` (clients), `credentials`, `lookup` (listings), `fetch` (one range, with retries),
//! `reader`.
//!
//! Limits: requests in flight per store (`limit`, additive increase and multiplicative decrease;
//! `climb`, by the rate of the link); [`fetch::TRIES`] tries in a row without progress; a try ends
//! if 16 KiB take longer than 10 s, or than the option `timeout`; one body chunk in memory per
//! request.
//!
//! Invariants:
//! * Every byte comes from the version that was listed. Each request names it (`If-Match`), and the
//!   range, object length and etag of each answer are compared. So a server that ignores the
//!   condition is detected.
//! * Bytes are used only if range, length, coding and body of their answer agree. If an answer with
//!   an announced length is cut, its bytes are used, and the rest is requested. No byte of any
//!   other wrong answer is used (`fetch`).
//! * Each request is signed when it is sent, with credentials that are valid then.
//! * Messages name store, key, range, status and request id. They never hold a query, a header or a
//!   credential. A URL with a user name or a query is refused.
//!
//! Threads: a runtime of two threads for all loaders of the process (`feedline-net`), and one more
//! while the command of a profile runs. A forked child has its own runtime.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

pub mod climb;
mod credentials;
pub mod fetch;
mod http;
mod hub;
mod limit;
mod lookup;
mod odd;
mod profile;
mod proxy;
mod registry;
mod repo;
mod shared;
pub mod store;
mod tree;
mod url;

pub use feedline_base::meter::NetworkMeter as Meter;
pub use hub::shared_folder;
pub use lookup::{children, commit, expand, look, paused};
pub use object_store;
pub use registry::register;
pub use repo::without_revision;
pub use store::{Object, configure};

/// A walk through an object, range by range.
pub trait Way: Send + 'static {
    /// Offset and length of the next range. It is cut at the object's end.
    fn next(&self) -> (u64, u64);
}
