//! Text data sets where they lie: JSON lines, plain or compressed; texts and conversations as tokens.
//!
//! Written with `feedline-core` alone, as a format of another author would be.
//!
//! Every file is untrusted:
//!
//! | value from a file | compared with, before any allocation or loop |
//! |---|---|
//! | a line | 64 MiB; its bytes are UTF-8 |
//! | JSON: nesting, escapes, numbers | 128 levels, without recursion; the row's size; the dtype's range |
//! | a text for a tokenizer; a rendered conversation | `text_max` and the worker's memory; 64 MiB |
//! | gzip members, zstd frames | 4 GiB unpacked each; a window of 128 MiB; what the index found there |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

#[cfg(feature = "tokenizers")]
mod chat;
mod jsonl;
#[cfg(feature = "tokenizers")]
mod tokens;

#[cfg(feature = "tokenizers")]
pub use chat::{Chat, ChatTemplate};
pub use jsonl::{Jsonl, JsonlBuilder};
#[cfg(feature = "tokenizers")]
pub use tokens::{Tokenize, Tokenizer};

#[cfg(all(feature = "tokenizers", feature = "unstable"))]
pub use chat::fuzz as fuzz_chat;
#[cfg(feature = "unstable")]
pub use jsonl::fuzz;

feedline_core::debug_by_describe!(Jsonl);
