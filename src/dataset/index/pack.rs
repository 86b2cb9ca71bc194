//! One file with the indexes of all shards: a bucket's index is one request.
//!
//! ```text
//! "feedpak1" | shards 8 | shards × (hash of the path 8, offset 8, length 8) | CRC32C of all before 4, 0 4 | index files
//! ```
//!
//! Each part is a whole index file, with its own version of the shard and CRC.

use super::table::Table;
use crate::error::{ErrorKind, Result};
use crate::storage::publish::publish;
use crate::storage::{Blob, fnv, is_url};
use bytes::Bytes;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"feedpak1";
const HEAD: usize = 16;
const PLACE: usize = 24;

/// The parts of a file, by ascending hash.
pub(super) struct Pack {
    bytes: Bytes,
    places: Vec<[u64; 3]>,
}

impl Pack {
    /// Reads a pack. `None` if the file is missing, or damaged; then it is written anew.
    ///
    /// Errors: a missing or damaged pack in a store, which is not written to; errors of reading.
    pub(super) fn open(path: &Path) -> Result<Option<Self>> {
        let blob = match Blob::open(path) {
            Ok(blob) => blob,
            Err(error) if error.kind() == ErrorKind::NotFound && !is_url(path) => return Ok(None),
            Err(error) => return Err(error.with_note("make the index file on a local disk first, and upload it")),
        };
        let bytes = blob.read(0, blob.len(), "the index file")?.into();
        match Self::parse(bytes) {
            None if is_url(path) => Err(blob.wrong("not an index file of shards, or a damaged one", 0, blob.len())),
            pack => Ok(pack),
        }
    }

    fn parse(bytes: Bytes) -> Option<Self> {
        let number = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let count = usize::try_from(number(8)?).ok()?;
        let end = count.checked_mul(PLACE)?.checked_add(HEAD)?;
        let head = bytes.get(..end).filter(|head| head.starts_with(MAGIC))?;
        if number(end)? != u64::from(crc32c::crc32c(head)) {
            return None;
        }
        let numbers = head[HEAD..].chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let numbers: Vec<u64> = numbers.collect();
        let places = numbers.chunks_exact(3).map(|place| [place[0], place[1], place[2]]).collect();
        Some(Self { bytes, places })
    }

    /// The index file of a shard.
    pub(super) fn part(&self, shard: &Path) -> Option<Blob> {
        let found = self.places.binary_search_by_key(&hash_of(shard)?, |place| place[0]).ok()?;
        let [_, offset, len] = self.places[found];
        let (start, end) = (usize::try_from(offset).ok()?, usize::try_from(offset.checked_add(len)?).ok()?);
        (start <= end && end <= self.bytes.len()).then(|| Blob::memory(self.bytes.slice(start..end)))
    }

    /// Writes the sealed tables of all shards. Errors: the system's.
    pub(super) fn write<'a>(
        target: &Path,
        parts: impl Iterator<Item = (&'a PathBuf, &'a Table)>,
    ) -> std::io::Result<()> {
        if is_url(target) {
            return Err(std::io::Error::other("nothing is written to a store; make it on a local disk, and upload it"));
        }
        let mut parts: Vec<_> = parts.filter_map(|(path, table)| Some((hash_of(path)?, table))).collect();
        parts.sort_unstable_by_key(|(hash, _)| *hash);
        let mut out = Vec::from(MAGIC);
        out.extend_from_slice(&(parts.len() as u64).to_le_bytes());
        let mut offset = (HEAD + parts.len() * PLACE + 8) as u64;
        for (hash, table) in &parts {
            let len = table.words.len() as u64 * 4;
            out.extend([*hash, offset, len].iter().flat_map(|number| number.to_le_bytes()));
            offset += len;
        }
        let crc = crc32c::crc32c(&out);
        out.extend_from_slice(&u64::from(crc).to_le_bytes());
        parts.iter().for_each(|(_, table)| out.extend_from_slice(bytemuck::cast_slice(&table.words)));
        publish(target, &out, true)
    }
}

/// Hash of a shard's URL or absolute path.
pub(super) fn hash_of(shard: &Path) -> Option<u64> {
    let full = if is_url(shard) { shard.to_path_buf() } else { std::path::absolute(shard).ok()? };
    Some(fnv(full.as_os_str().as_encoded_bytes()))
}
