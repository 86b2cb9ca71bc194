//! Index files: their paths, their validity for a shard, their content.

use super::pack::hash_of;
use super::table::{Form, HEADER, Notes, Table};
use super::{Place, Settings};
#[cfg(feature = "unstable")]
use crate::dataset::words::crc;
use crate::dataset::words::{halves, load as load_words, seal as seal_words, wide};
use crate::error::Result;
use crate::storage::{Blob, fnv, is_url};
use std::path::{Path, PathBuf};

/// Ending of index files.
pub(super) use crate::storage::listing::INDEX as ENDING;
/// Bytes at each end of a shard that belong to its version.
const ENDS: u64 = 4096;
/// Maximum bytes of the ledger in an index file: JSON, which takes many times its length while it is parsed. A file
/// with a larger ledger is ignored.
pub(super) const NOTES_MAX: usize = 8 << 20;

/// Version of a shard: detects changed content without reading all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) len: u64,
    /// Version according to storage: a file's modification time.
    pub(super) modified: u64,
    /// CRC32C of the first and last bytes.
    pub(super) ends: u32,
}

impl Version {
    pub(super) fn of(shard: &Blob) -> Result<Self> {
        let meta = shard.look()?;
        if meta.pin.is_some() {
            // The store's version says more than the ends, and costs no request.
            return Ok(Self { len: meta.len, modified: meta.version, ends: 0 });
        }
        let mut bytes = [0; 2 * ENDS as usize];
        let first = meta.len.min(ENDS);
        let last = (meta.len - first).min(ENDS);
        let bytes = &mut bytes[..(first + last) as usize];
        let (head, tail) = bytes.split_at_mut(first as usize);
        shard.read_at(0, head).and_then(|()| shard.read_at(meta.len - last, tail))?;
        Ok(Self { len: meta.len, modified: meta.version, ends: crc32c::crc32c(bytes) })
    }
}

pub(super) fn purpose(settings: &Settings<'_>) -> u64 {
    let Settings { format, options, fields, checksums, .. } = settings;
    fnv(format!("{format}\0{options}\0{fields}\0{checksums}").as_bytes())
}

/// Path of a shard's index file. The name includes the options, so that two datasets of the same shards do not
/// overwrite each other's files; in a separate folder it also includes the shard's path.
pub(super) fn place(path: &Path, settings: &Settings<'_>, purpose: u64) -> Option<PathBuf> {
    match &settings.place {
        Place::Off | Place::File(_) => None,
        Place::Beside => beside(path, purpose),
        Place::Folder(dir) => {
            let mut name = path.file_name()?.to_os_string();
            name.push(format!(".{:016x}.{:08x}{ENDING}", hash_of(path)?, options(purpose)));
            Some(dir.join(name))
        }
    }
}

/// Path of the index file beside a shard. None for an object: nothing is written to a bucket.
pub(super) fn beside(path: &Path, purpose: u64) -> Option<PathBuf> {
    let mut name = path.file_name().filter(|_| !is_url(path))?.to_os_string();
    name.push(format!(".{:08x}{ENDING}", options(purpose)));
    Some(path.with_file_name(name))
}

fn options(purpose: u64) -> u32 {
    (purpose ^ purpose >> 32) as u32
}

/// Index of the header word with the CRC. Words of the header: magic and version, purpose, the shard's length, time and
/// ends, fields, form, rows, most bytes of
/// a sample, largest sample, bytes of notes, CRC32C of the file without this word.
#[cfg(any(test, feature = "unstable"))]
pub(super) const CRC: usize = HEADER - 1;
/// "feedlix" and the version. In native order like all words: a machine of the other byte order finds no index.
pub(super) const MAGIC: [u32; 2] = [u32::from_be_bytes(*b"feed"), u32::from_be_bytes(*b"lix1")];

/// Completes the file: fills in the header.
pub(super) fn seal(table: &mut Table, version: &Version, purpose: u64) {
    let [len, modified, purpose, bytes_max] = [version.len, version.modified, purpose, table.bytes_max].map(halves);
    let (ends, notes) = ([version.ends, table.fields as u32], [table.largest, table.notes_bytes as u32]);
    let form = [table.form.code(), table.rows];
    seal_words(&mut table.words, [MAGIC, purpose, len, modified, ends, form, bytes_max, notes].as_flattened());
}

/// Reads the table of an index file; `None` if the file is damaged or belongs to another version of the shard.
pub(super) fn load(file: &Blob, path: &Path, version: &Version, purpose: u64, fields: usize) -> Option<Table> {
    let mut head = [0_u32; HEADER];
    file.read_at(0, bytemuck::cast_slice_mut(&mut head)).ok()?;
    let wide = |at| wide(&head, at);
    let found = Version { len: wide(4), modified: wide(6), ends: head[8] };
    if head[..2] != MAGIC || wide(2) != purpose || found != *version || head[9] as usize != fields {
        return None;
    }
    let form = Form::from_code(head[10])?;
    let (rows, bytes_max, largest, notes_bytes) = (head[11], wide(12), head[14], head[15] as usize);
    let entries = (rows as usize).checked_mul(fields)?.checked_mul(form.stride())?;
    let words = HEADER.checked_add(entries)?.checked_add(notes_bytes.div_ceil(4))?;
    // A file's length may be forged, too (sparse files take no space): a shard has no more samples than bytes.
    if (largest >= rows && rows > 0) || u64::from(rows) > version.len || notes_bytes > NOTES_MAX {
        return None;
    }
    let all = load_words(file, &head, Some(words)).ok()??;
    let start = (HEADER + entries) * 4;
    let notes = Notes::from_bytes(&bytemuck::cast_slice::<u32, u8>(&all)[start..start + notes_bytes], path)?;
    Some(Table { words: all, rows, fields, form, notes_bytes, bytes_max, largest, notes })
}

/// For the fuzz target: takes these bytes as an index file with correct magic, purpose, shard and CRC, so that its
/// numbers count, and reads every entry. True if the file is accepted.
#[cfg(feature = "unstable")]
pub(crate) fn fuzz(bytes: &[u8]) -> bool {
    let mut words: Vec<u32> = bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    if words.len() < HEADER {
        return false;
    }
    let version = Version { len: 1 << 20, modified: 1, ends: 2 };
    words[..10].copy_from_slice(&[MAGIC[0], MAGIC[1], 7, 0, 1 << 20, 0, 1, 0, 2, 2]);
    words[CRC] = crc(&words, CRC);
    let file = Blob::memory(bytemuck::cast_slice(&words).to_vec().into());
    let Some(table) = load(&file, Path::new("shard"), &version, 7, 2) else { return false };
    for row in 0..table.rows as usize {
        let _ = (table.span(row), table.entry(row, 0), table.entry(row, 1));
    }
    true
}
