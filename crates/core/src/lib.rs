//! The building blocks for authors of dataset formats and decoders.
//!
//! ```text
//! Dataset: schema, extents of each sample ──► reads of the loader ──► Decoder: bytes ──► Row of a batch slot
//!    ▲ indexes and side files by `Blob`, files found by `listing`
//! ```
//!
//! The formats and decoders of feedline use nothing else. Programs use the crate `feedline`, which
//! exports the stable API. Anything else here may change in any version.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    clippy::len_without_is_empty,
    clippy::new_without_default,
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

pub mod dataset;
pub mod decode;
pub mod ledger;
pub mod memory;
pub mod order;
pub mod storage;
pub mod tensor;

pub use feedline_base::{Error, ErrorKind, Result, Site, Stage};
pub use memory::{Row, Status};
