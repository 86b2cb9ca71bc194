//! Every implementation of a trait against one table of cases and a naive oracle: readers, formats,
//! decoders, shard writers.

#[path = "../common/mod.rs"]
mod common;

#[cfg(feature = "remote")]
mod cache;
#[cfg(feature = "remote")]
mod cache_tools;
mod checked;
mod contract;
mod datasets;
mod decoders;
mod finish;
mod golden;
mod jobs;
mod join;
mod lengths;
mod mds;
mod mounts;
mod npy;
mod packed;
mod parquet;
mod readers;
#[cfg(feature = "remote")]
mod registered;
#[cfg(feature = "remote")]
mod remote;
mod safetensors;
mod seekable;
mod several;
mod shards;
mod tar;
mod tfrecord;
#[cfg(feature = "text")]
mod token_files;
#[cfg(feature = "text")]
mod tokenized;
mod tokens;
