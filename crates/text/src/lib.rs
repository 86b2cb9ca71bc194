//! Text data sets where they lie: JSON lines, plain or compressed.
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

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

mod jsonl;
#[cfg(feature = "tokenizers")]
mod tokens;

pub use jsonl::{Jsonl, JsonlBuilder};
#[cfg(feature = "tokenizers")]
pub use tokens::{Tokenize, Tokenizer};

#[cfg(feature = "unstable")]
pub use jsonl::fuzz;

feedline_core::debug_by_describe!(Jsonl);
