//! Formats: one file or folder each. `arrays` is what the array formats share.

mod arrays;
pub(crate) mod images;
pub(crate) mod mds;
pub(crate) mod megatron;
pub(crate) mod npy;
#[cfg(feature = "parquet")]
pub(crate) mod parquet;
pub(crate) mod records;
pub(crate) mod safetensors;
pub(crate) mod tar;
pub(crate) mod tfrecord;
pub(crate) mod tokens;
