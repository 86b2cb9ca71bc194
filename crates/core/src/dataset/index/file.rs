//! Index files: their paths, the check that they are valid for a shard, and their content, the
//! tables of one or many shards.
//!
//! Sections: a record of each shard, by ascending hash of its path; the entries of all shards; the
//! ledgers of all shards.

use super::table::{ENTRIES, Form, Notes, ShardRecord, Table};
use super::{Place, Settings};
use crate::dataset::Digest;
use crate::storage::sidefile::{NEWER, SideFound, SideKind, SideWriter, Sidefile};
use crate::storage::{Blob, remote};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{fnv, is_url};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Ending of index files.
pub(super) use crate::storage::listing::INDEX as ENDING;
pub(super) const KIND: SideKind = SideKind {
    name: *b"fdx ",
    version: 2,
    older: b"feedpak1deef1xil",
};
const SHARDS: usize = 0;
const NOTES: usize = 2;
/// Bytes at each end of a shard that are part of its version.
const ENDS: u64 = 4096;
/// Maximum bytes of the ledger in an index file. The ledger is JSON, which takes many times its
/// length in memory while it is parsed. A file with a larger ledger is ignored.
pub(super) const NOTES_MAX: u64 = 8 << 20;
const RECORD: u64 = size_of::<ShardRecord>() as u64;
/// Bytes of entries that are copied at a time.
const COPY: u64 = 64 << 10;

/// Version of a shard: detects changed content without reading all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) len: u64,
    /// Version according to storage; for a file, the modification time.
    pub(super) modified: u64,
    /// CRC32C of the first and last bytes.
    pub(super) ends: u32,
}

impl Version {
    pub(super) fn of(shard: &Blob) -> Result<Self> {
        let meta = shard.look()?;
        if meta.pin.is_some() {
            // The store's version identifies the content better than the ends do, and costs no
            // request.
            return Ok(Self {
                len: meta.len,
                modified: meta.version,
                ends: 0,
            });
        }
        let mut bytes = [0; 2 * ENDS as usize];
        let first = meta.len.min(ENDS);
        let last = (meta.len - first).min(ENDS);
        let bytes = &mut bytes[..(first + last) as usize];
        let (head, tail) = bytes.split_at_mut(first as usize);
        shard
            .read_at(0, head)
            .and_then(|()| shard.read_at(meta.len - last, tail))?;
        Ok(Self {
            len: meta.len,
            modified: meta.version,
            ends: crc32c::crc32c(bytes),
        })
    }
}

/// Adds the shard's version and the purpose of the index to a record.
pub(super) fn seal(record: &mut ShardRecord, version: &Version, purpose: u64) {
    record.purpose = purpose;
    record.len = version.len;
    record.modified = version.modified;
    record.ends = version.ends.into();
}

pub(super) fn purpose(settings: &Settings<'_>) -> u64 {
    let Settings {
        format,
        options,
        fields,
        checksums,
        ..
    } = settings;
    fnv(format!("{format}\0{options}\0{fields}\0{checksums}").as_bytes())
}

/// Path of a shard's index file. The name includes a hash of the options, so that two datasets of
/// the same shards do not overwrite each other's files. In a separate folder, it also includes a
/// hash of the shard's path.
pub(super) fn place(path: &Path, settings: &Settings<'_>, purpose: u64) -> Option<PathBuf> {
    match &settings.place {
        Place::Off | Place::File(_) => None,
        Place::Beside => beside(path, purpose),
        Place::Folder(dir) => within(dir, path, purpose),
    }
}

/// Path of the index file in a folder, whose name includes a hash of the shard's path.
fn within(dir: &Path, path: &Path, purpose: u64) -> Option<PathBuf> {
    let mut name = path.file_name()?.to_os_string();
    name.push(format!(
        ".{:016x}.{:08x}{ENDING}",
        hash_of(path)?,
        options(purpose)
    ));
    Some(dir.join(name))
}

/// Path of the index file beside a shard; of a shard in the Hub, in the folder that the processes
/// of the machine share. None for another object: nothing is written to a bucket.
pub(super) fn beside(path: &Path, purpose: u64) -> Option<PathBuf> {
    if let Some(shared) = remote::shared_folder(path) {
        return within(&shared.join("index"), path, purpose);
    }
    let mut name = path.file_name().filter(|_| !is_url(path))?.to_os_string();
    name.push(format!(".{:08x}{ENDING}", options(purpose)));
    Some(path.with_file_name(name))
}

fn options(purpose: u64) -> u32 {
    (purpose ^ purpose >> 32) as u32
}

/// Hash of a shard's URL, without the revision of a repository, or of its absolute path.
fn hash_of(shard: &Path) -> Option<u64> {
    let full = if is_url(shard) {
        remote::without_revision(shard.to_path_buf())
    } else {
        std::path::absolute(shard).ok()?
    };
    Some(fnv(full.as_os_str().as_encoded_bytes()))
}

/// Opens the index file of one shard; `None` if it is missing, unusable or unreadable.
pub(super) fn open(path: &Path) -> Option<Arc<Sidefile>> {
    match Sidefile::open(path, KIND) {
        Ok(SideFound::Whole(side)) => Some(Arc::new(side)),
        _ => None,
    }
}

/// Opens a file for all shards. `None` if it is missing, damaged or of an older version; it is then
/// written again.
///
/// Errors: a missing, damaged or older file in a store, which is not written to; another kind of
/// file, or one of a newer version; reading errors.
pub(super) fn open_all(path: &Path) -> Result<Option<Arc<Sidefile>>> {
    match Sidefile::open(path, KIND)? {
        SideFound::Whole(side) => Ok(Some(Arc::new(side))),
        SideFound::Nothing if is_url(path) => {
            let message =
                "no such object: make the index file on a local disk first, and upload it";
            Err(Error::new(ErrorKind::NotFound, Stage::Index, message).with_path(path))
        }
        SideFound::Damaged | SideFound::Older if is_url(path) => {
            let message = "a damaged index file, or one of another version: make it on a local disk, \
                 and upload it";
            Err(Error::new(ErrorKind::Decode, Stage::Index, message).with_path(path))
        }
        SideFound::Foreign => {
            let message = "not an index file; it is not overwritten: name another file";
            Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(path))
        }
        SideFound::Newer => Err(Error::new(ErrorKind::Config, Stage::Index, NEWER).with_path(path)),
        SideFound::Nothing | SideFound::Damaged | SideFound::Older => Ok(None),
    }
}

/// Loads the table of the only shard in a file, or the table of `path` in a file for all shards.
/// `None` if it is missing, damaged, or belongs to another version of the shard.
pub(super) fn load(
    side: &Arc<Sidefile>,
    path: &Path,
    is_alone: bool,
    version: &Version,
    purpose: u64,
    fields: usize,
) -> Option<Table> {
    let record = if is_alone {
        record(side, 0)?
    } else {
        find(side, hash_of(path)?)?
    };
    let same = ShardRecord {
        purpose,
        len: version.len,
        modified: version.modified,
        ends: version.ends.into(),
        fields: fields as u64,
        ..record
    };
    let entries = record
        .entries_bytes()
        .filter(|_| record == same && record.notes_bytes <= NOTES_MAX)?;
    if record.entries.checked_add(entries)? > side.len(ENTRIES) {
        return None;
    }
    let mut buffer = Vec::new();
    let notes = side
        .read(
            NOTES,
            record.notes,
            record.notes_bytes as usize,
            &mut buffer,
        )
        .ok()?;
    let notes = Notes::from_bytes(notes, path)?;
    Some(Table {
        side: side.clone(),
        record,
        form: Form::from_code(record.form)?,
        notes,
    })
}

fn record(side: &Sidefile, number: u64) -> Option<ShardRecord> {
    side.value(SHARDS, number.checked_mul(RECORD)?).ok()
}

fn find(side: &Sidefile, hash: u64) -> Option<ShardRecord> {
    let mut start = 0;
    let mut end = side.len(SHARDS) / RECORD;
    while start < end {
        let middle = start + (end - start) / 2;
        let record = record(side, middle)?;
        match record.hash.cmp(&hash) {
            std::cmp::Ordering::Equal => return Some(record),
            std::cmp::Ordering::Less => start = middle + 1,
            std::cmp::Ordering::Greater => end = middle,
        }
    }
    None
}

/// Writes the table of one shard. Errors: I/O errors.
pub(super) fn write(target: &Path, table: &Table) -> std::io::Result<()> {
    write_tables(target, &[(0, table)])
}

/// Writes the tables of all shards. Errors: I/O errors.
pub(super) fn write_all<'a>(
    target: &Path,
    tables: impl Iterator<Item = (&'a PathBuf, &'a Table)>,
) -> std::io::Result<()> {
    let mut tables: Vec<_> = tables
        .filter_map(|(path, table)| Some((hash_of(path)?, table)))
        .collect();
    tables.sort_unstable_by_key(|(hash, _)| *hash);
    write_tables(target, &tables)
}

fn write_tables(target: &Path, tables: &[(u64, &Table)]) -> std::io::Result<()> {
    let mut out = SideWriter::create(target, KIND)?;
    let mut entries = 0;
    let mut notes = 0;
    let mut identity = Digest::new("index file");
    for (hash, table) in tables {
        let record = ShardRecord {
            hash: *hash,
            entries,
            notes,
            ..table.record
        };
        entries += table.record.entries_bytes().unwrap_or(0);
        notes += record.notes_bytes;
        identity = identity.bytes(bytemuck::bytes_of(&record));
        out.put(bytemuck::bytes_of(&record))?;
    }
    out.end_section();
    let mut buffer = Vec::new();
    for (_, table) in tables {
        let start = table.record.entries;
        let end = start + table.record.entries_bytes().unwrap_or(0);
        for at in (start..end).step_by(COPY as usize) {
            let part = table
                .side
                .read(ENTRIES, at, (end - at).min(COPY) as usize, &mut buffer);
            out.put(part.map_err(std::io::Error::other)?)?;
        }
    }
    out.end_section();
    for (_, table) in tables {
        let ShardRecord {
            notes, notes_bytes, ..
        } = table.record;
        let part = table
            .side
            .read(NOTES, notes, notes_bytes as usize, &mut buffer);
        out.put(part.map_err(std::io::Error::other)?)?;
    }
    out.end_section();
    out.publish(identity.end())
}

/// For the fuzz target: takes these bytes as the sections of an index file that is valid for a
/// shard, so that the numbers in it are used, and reads every entry. True if the file is accepted.
#[cfg(feature = "unstable")]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Some((numbers, rest)) = bytes.split_first_chunk::<{ RECORD as usize }>() else {
        return false;
    };
    let version = Version {
        len: 1 << 20,
        modified: 1,
        ends: 2,
    };
    let mut record = ShardRecord {
        fields: 2,
        ..bytemuck::pod_read_unaligned(numbers)
    };
    seal(&mut record, &version, 7);
    let side = Arc::new(Sidefile::held(&[bytemuck::bytes_of(&record), rest, rest]));
    let Some(table) = load(&side, Path::new("shard"), true, &version, 7, 2) else {
        return false;
    };
    for row in 0..table.rows() as usize {
        let _ = table.row(row, &mut [0; _]);
    }
    true
}
