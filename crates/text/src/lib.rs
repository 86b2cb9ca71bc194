//! Text data sets where they lie: JSON lines, plain or compressed; Arrow streams and files.
//!
//! Written with `feedline-core` alone, as a format of another author would be.
//!
//! Every file is untrusted:
//!
//! | value from a file | compared with, before any allocation or loop |
//! |---|---|
//! | a line | 64 MiB; its bytes are UTF-8 |
//! | JSON: nesting, escapes, numbers | 128 levels, without recursion; the row's size; the dtype's range |
//! | gzip members, zstd frames | 4 GiB unpacked each; a window of 128 MiB; what the index found there |
//! | Arrow: lengths of messages | 64 MiB; the file's length |
//! | Arrow: buffers, offsets, counts of rows and nulls | the body's length; the bytes of the buffers, in their order |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

mod arrow;
mod jsonl;

pub use arrow::{Arrow, ArrowBuilder};
pub use jsonl::{Jsonl, JsonlBuilder};

#[cfg(feature = "unstable")]
pub use jsonl::fuzz;

feedline_core::debug_by_describe!(Arrow);
feedline_core::debug_by_describe!(Jsonl);
