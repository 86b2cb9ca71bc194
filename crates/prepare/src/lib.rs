//! Data preparation for training: many small pictures become shards, whose JPEGs can be decoded
//! from the middle.
//!
//! ```text
//! folder ──listed once──► plan.fdp ──task k──► shard-00000k.tar, record ──all records──► index.fdx, manifest.tsv
//!                         settings, inputs     pictures k/n to (k+1)/n of the order
//! ```
//!
//! [`Shards::write`] does all of this in one process, and continues where an earlier call was
//! killed. [`Shards::plan`], [`Plan::run`] and [`Plan::finish`] are its steps, for many processes
//! and machines.
//!
//! Each sequential JPEG gets *seek points*, in a segment that every decoder skips: places in the
//! coded data at which a decoder can start. A random crop is decoded from the nearest place, not
//! from the start of the picture. Seek points add about 1 % to a picture's bytes; all other bytes
//! stay the same. For each picture without seek points, the manifest gives the reason. A damaged
//! sequential JPEG is an error, or is listed and left out; other pictures are copied unread.
//!
//! [`documents()`] writes documents of tokens, of any dataset, as Megatron's files. [`TokenFiles`]
//! makes such files from texts, by the same plans. The rest of this page is about pictures.
//!
//! # Invariants
//!
//! - The output depends only on the plan: the settings, and the paths, lengths and times of the
//!   pictures. It does not depend on machines, workers, timing, or how often the work was killed.
//! - A file gets its name only when it is complete and on the device. A record is written after its
//!   shard, the manifest last: a folder with a manifest is complete.
//! - Every picture is in a shard or in the ledger; anything else is an error. A picture that
//!   changed since it was listed is an error.
//! - A file that no record covers is never replaced or removed.
//!
//! # Limits
//!
//! The output folder is not a bucket. Memory does not depend on the number of pictures: a process
//! holds two windows of at most 256 pictures or 32 MiB (but at least one picture), with their bytes
//! before and after processing, and for Parquet a row group of 64 MiB twice. A picture has at most
//! 256 MiB unless [`Shards::bytes_max`] says otherwise.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

mod documents;
mod job;
mod output;
#[cfg(feature = "parquet")]
mod parquet;
mod pictures;
mod shards;
mod tar;
mod tokens;

pub use documents::{Written, documents};
pub use job::{Check, Event, Finished, Plan, Ran, Tasks};
pub use shards::{Format, Shards};
pub use tokens::TokenFiles;
