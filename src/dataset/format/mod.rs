//! Formats: one module each. The array formats share `arrays`.
//!
//! Every file is untrusted. Checks of each format:
//!
//! | value from a file | compared with, before any allocation or loop |
//! |---|---|
//! | any file | opened without blocking, must be regular, read up to its length at open |
//! | index file `.fdx` | the file's length, the shard's length and ends, 8 MiB of ledger, its CRC |
//! | checksums of `checked` | the file's length, the sources, its CRC |
//! | tar: sizes, PAX, long names | the shard's end; 1 MiB and 64 KiB. Names are keys and endings, never paths |
//! | TFRecord, `Example`: lengths | the ends of shard and record; the row's size |
//! | MDS `index.json`: lengths, offsets | 64 MiB of JSON; each shard's length. Names are opened beneath the folder |
//! | zstd, Snappy, LZ4 | the size in index or footer; they write into a buffer of that size and stop |
//! | Parquet footer, pages | 256 MiB, 64 levels, 2^20 elements; the file's length; the footer. Columns in other files: refused |
//! | npy, npz | 64 KiB of header, 64 MiB of directory; the file's length. Deflated members: refused |
//! | safetensors | 100 MB of header; the file's length |
//! | Megatron, tokens, records | the counts must give the file's length exactly |
//! | pictures | `decode::Limits`: bytes, pixels, heap, scans |
//! | a loader's saved state | 64 KiB, its CRC |
//!
//! A panic of another crate's parser becomes an error; no parser runs a program or opens a connection.

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

use crate::error::{Error, ErrorKind, Result, Stage};

/// Refuses little-endian formats on big-endian machines: their bytes go into batches unchanged.
pub(crate) fn little_endian(format: &str) -> Result<()> {
    if cfg!(target_endian = "little") {
        return Ok(());
    }
    let message = format!("{format} is little-endian, this machine is not");
    Err(Error::new(ErrorKind::Config, Stage::Index, message))
}

/// Parses a little-endian number of at most 8 bytes.
pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_are_little_endian() {
        assert_eq!((super::number(&[1, 2]), super::number(&[0xff; 8])), (0x0201, u64::MAX));
    }
}
