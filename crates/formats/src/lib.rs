//! File formats, one module each. The array formats share the module `arrays`.
//!
//! Every file is untrusted. Checks of each format:
//!
//! | value from a file | compared with, before any allocation or loop |
//! |---|---|
//! | any file | opened without blocking, must be regular, read up to the length found at opening |
//! | side files: indexes, checksums, seek points, plans | the file's length, a CRC of each page |
//! | index file `.fdx` | the shard's length and ends, the section's length, 8 MiB of ledger |
//! | facts: checksums, lengths | the sources, the section's length |
//! | tar: sizes, PAX, long names | the shard's end; 1 MiB and 64 KiB. Names are keys and endings, never paths |
//! | TFRecord, `Example`: lengths | the ends of shard and record; the row's size |
//! | MDS `index.json`: lengths, offsets | 64 MiB of JSON; each shard's length. Names are opened beneath the folder |
//! | zstd, Snappy, LZ4 | the size in index or footer; they write into a buffer of that size and stop |
//! | Parquet footer, pages | 256 MiB, 64 levels, 2^20 elements; the file's length; the footer. Columns in other files: refused |
//! | npy, npz | 64 KiB of header, 64 MiB of directory; the file's length. Deflated members: refused |
//! | safetensors | 100 MB of header; the file's length |
//! | csv | the free memory; the header's number of cells |
//! | Megatron, tokens, records | the counts must give the file's length exactly |
//! | pictures | `decode::Limits`: bytes, pixels, heap, scans |
//! | a loader's saved state | 64 KiB, its CRC |
//!
//! A panic in another crate's parser becomes an error; no parser runs a program or opens a
//! connection.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![allow(
    missing_docs,
    rustdoc::private_intra_doc_links,
    reason = "only the crate feedline is public API"
)]

mod arrays;
pub mod images;
pub(crate) mod mds;
pub(crate) mod megatron;
pub(crate) mod npy;
pub(crate) mod records;
pub(crate) mod safetensors;
pub(crate) mod table;
pub(crate) mod tar;
pub mod tfrecord;
pub mod tokens;

pub use images::Images;
pub use mds::{Mds, MdsBuilder};
pub use megatron::{Megatron, MegatronBuilder};
pub use npy::{Npy, NpyBuilder, Npz, NpzBuilder};
pub use records::{Labels, Records, RecordsBuilder};
pub use safetensors::{SafeTensors, SafeTensorsBuilder};
pub use table::{Table, TableBuilder};
pub use tar::{Tar, TarBuilder};
pub use tfrecord::{TfRecord, TfRecordBuilder};
pub use tokens::{Tokens, TokensBuilder};

/// Header parsers for a fuzz target. Each takes any bytes and returns whether it accepts them.
#[cfg(feature = "unstable")]
pub const HEADERS: [fn(&Blob) -> bool; 4] = [
    |file| npy::parse(file).is_ok(),
    |file| npy::parse_npz(file).is_ok(),
    |file| safetensors::header(file).is_ok(),
    megatron::is_index,
];

debug_by_describe!(
    Images,
    Mds,
    Megatron,
    Npy,
    Npz,
    Records,
    SafeTensors,
    Table,
    Tar,
    TfRecord,
    Tokens
);

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::forward::debug_by_describe;
use feedline_core::storage::Blob;
use std::collections::HashSet;

/// Refuses little-endian formats on big-endian machines: their bytes go into batches unchanged.
pub(crate) fn little_endian(format: &str) -> Result<()> {
    if cfg!(target_endian = "little") {
        return Ok(());
    }
    let message = format!("{format} is little-endian, this machine is not");
    Err(Error::new(ErrorKind::Config, Stage::Index, message))
}

const LFS: &str = "a git-lfs pointer instead of the file: run git lfs pull";

/// Names the format that the first bytes of a file identify beyond doubt (12 bytes are enough, 262
/// for tar). By chance, at most one in 10^7 files of tokens or records begins with such bytes.
pub(crate) fn foreign(head: &[u8]) -> Option<&'static str> {
    Some(match head {
        _ if head.get(257..262) == Some(b"ustar") => {
            "a tar archive: read it as source tar or webdataset"
        }
        [
            b'v',
            b'e',
            b'r',
            b's',
            b'i',
            b'o',
            b'n',
            b' ',
            b'h',
            b't',
            b't',
            b'p',
            ..,
        ] => LFS,
        [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => "a NumPy array: read it as source npy",
        [b'P', b'K', 3, 4, ..] => {
            "a zip archive (.npz, .pt): read NumPy's as source npz, unpack others"
        }
        // gzip: method deflate, known flags, any time, and a level and system that gzip defines.
        [
            0x1f,
            0x8b,
            8,
            0..0x20,
            _,
            _,
            _,
            _,
            0 | 2 | 4,
            0..14 | 255,
            ..,
        ] => "a gzip file: unpack it first",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "a zstd file: unpack it first",
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => "an xz file: unpack it first",
        [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, ..] => {
            "a bzip2 file: unpack it first"
        }
        [4, 0x22, 0x4d, 0x18, ..] => "an lz4 file: unpack it first",
        [0x89, b'H', b'D', b'F', b'\r', b'\n', ..] => "an HDF5 file",
        [0x89, b'P', b'N', b'G', b'\r', b'\n', ..] => "a picture: read it as source images",
        [0x7f, b'E', b'L', b'F', 1 | 2, 1 | 2, 1, ..] => "a program",
        [b'G', b'G', b'U', b'F', 1..8, 0, 0, 0, ..] => "a model in GGUF",
        [b'F', b'E', b'A', b'1', 0, 0, 0, 0, ..] => "a Feather file: write it as Parquet",
        [b'P', b'A', b'R', b'1', ..] => "a Parquet file: read it as source parquet",
        [b'A', b'R', b'R', b'O', b'W', b'1', 0, 0, ..] => "an Arrow file: write it as Parquet",
        [_, _, _, _, 0, 0, 0, 0, b'{', b'"', ..] => {
            "a safetensors file: read it as source safetensors"
        }
        // Pickle: protocol 4 begins with a frame length; protocols 2 and 3 begin with a list, a
        // dict, NumPy's name or PyTorch's magic.
        [0x80, 4 | 5, 0x95, _, _, _, _, _, 0, 0, 0, ..]
        | [0x80, 2 | 3, b']' | b'}', b'q', 0, ..]
        | [0x80, 2 | 3, b'c', b'n', b'u', b'm', ..]
        | [0x80, 2, 0x8a, 10, 0x6c, 0xfc, ..] => "a pickle, which can run code and is never read",
        [b'M', b'M', b'I', b'D', b'I', b'D', b'X', 0, ..] => {
            "a Megatron index: read it as source megatron"
        }
        [0xc6..=0xc8, 0xd7, 0x34, 1, ..] | [0x8a, 0xd8, 0x34, 1, ..] => {
            "an llm.c model, tokenizer or evaluation file"
        }
        _ => return None,
    })
}

/// Possible lengths of a git-lfs pointer, in bytes.
pub(crate) const POINTER: std::ops::Range<u64> = 100..1024;

/// Refuses a file that is only a git-lfs pointer. Files outside `POINTER` are not read.
pub(crate) fn fetched(input: &Blob) -> Result<()> {
    if !POINTER.contains(&input.len()) {
        return Ok(());
    }
    match foreign(&input.read(0, input.len().min(12), "the first bytes")?) {
        Some(LFS) => Err(input.wrong(format!("this is {LFS}"), 0, input.len())),
        _ => Ok(()),
    }
}

/// Returns a name that occurs more than once.
pub(crate) fn twice<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = HashSet::new();
    names.find(|name| !seen.insert(*name))
}

/// Parses a little-endian number of at most 8 bytes.
pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_are_little_endian() {
        assert_eq!(
            (super::number(&[1, 2]), super::number(&[0xff; 8])),
            (0x0201, u64::MAX)
        );
    }
}
