//! Shared by all crates of feedline: errors with their location, secrets, threads, counters.
//!
//! ```text
//! feedline-base ◄── feedline-remote ◄── feedline-core ◄── formats, image, parquet, report, prepare ◄── feedline
//! ```
//!
//! Programs use the crate `feedline`, which exports the stable API. Anything else here may change
//! in any version.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

pub mod cgroup;
pub mod error;
pub mod metadata;
pub mod meter;
pub mod process;
pub mod secret;
pub mod setting;
pub mod stop;
pub mod sync;
pub mod thread;

pub use error::{Error, ErrorKind, Result, Site, Stage};

/// A page: alignment of larger arrays, and the largest alignment that O_DIRECT requires in
/// practice.
pub const PAGE: usize = 4096;
