//! Tools for the contents of a cache: a list, a comparison with all checksums, removal.
//!
//! Loaders may run meanwhile. A list holds locks only for a moment. A comparison protects the
//! entries that it reads from removal, as a loader does, and claims the block that it compares.
//! Removal needs a share that no process reads.

use super::config::Cache;
use super::dir::{CacheDir, FoundEntry};
use super::entry::EntryFiles;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::SystemTime;

/// An object in a [`Cache`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheEntry {
    /// URL of the object. Empty for files that a crash left without one; no loader reads them.
    pub url: String,
    /// Version of the object, as its store names it.
    pub version: String,
    /// Length of the object in bytes.
    pub len: u64,
    /// Blocks of the object.
    pub blocks: u64,
    /// Blocks that are kept.
    pub whole: u64,
    /// Bytes on the disk.
    pub bytes: u64,
    /// When a loader last began to read it.
    pub used: SystemTime,
    /// Whether a running process may read it. Objects of one folder of a store share this value,
    /// and several folders may share it.
    pub in_use: bool,
    /// The file with its bytes, sparse where blocks are missing.
    pub path: PathBuf,
}

impl Cache {
    /// The objects in the folder, in the order of their URLs. Running loaders may add more. Foreign
    /// files are left out.
    ///
    /// Errors: [`ErrorKind::NotFound`] for a missing folder; [`ErrorKind::Config`] for a folder
    /// that is not a cache; the system's.
    pub fn entries(&self) -> Result<Vec<CacheEntry>> {
        let dir = self.existing(false)?;
        let (found, _) = dir.all().map_err(|error| self.failed("list", error))?;
        let mut read = BTreeMap::new();
        let mut entries: Vec<_> = (found.into_iter().filter(FoundEntry::is_own))
            .map(|old| {
                let in_use = *read
                    .entry(old.share)
                    .or_insert_with(|| dir.is_read(old.share));
                entry_of(old, in_use)
            })
            .collect();
        entries.sort_unstable_by(|a, b| (&a.url, &a.path).cmp(&(&b.url, &b.path)));
        Ok(entries)
    }

    /// Reads all kept blocks from the disk and compares each with its checksum. `seen` is called
    /// with the number of bytes read so far; it may stop the run. Returns an error for each damaged
    /// block, with path and range.
    ///
    /// Loaders that start later compare a damaged block again, and download it. Loaders that
    /// already run do not learn of the damage. An object whose map is damaged is removed, unless a
    /// process reads it.
    ///
    /// Errors: those of [`entries`](Self::entries); [`ErrorKind::Permission`] for a folder of
    /// another user.
    pub fn verify(&self, mut seen: impl FnMut(u64) -> ControlFlow<()>) -> Result<Vec<Error>> {
        let dir = self.existing(true)?;
        let (found, _) = dir.all().map_err(|error| self.failed("list", error))?;
        let mut damaged = Vec::new();
        let mut bytes = 0;
        for old in found
            .iter()
            .filter(|old| old.link.is_some() && old.is_own())
        {
            let looked = verify_entry(&dir, old, &mut damaged, &mut |len| {
                bytes += len;
                seen(bytes)
            });
            match looked {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => break,
                // Another process removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(
                        Error::os(Stage::Read, "cannot verify this cached object", error)
                            .with_path(&old.data),
                    );
                }
            }
        }
        Ok(damaged)
    }

    /// Removes objects that no process reads, the least recently used first, until the folder holds
    /// at most `bytes`. Returns the number of freed bytes.
    ///
    /// Errors: those of [`verify`](Self::verify).
    pub fn trim(&self, bytes: u64) -> Result<u64> {
        let dir = self.existing(true)?;
        let (mut found, total) = dir.all().map_err(|error| self.failed("list", error))?;
        found.sort_unstable_by_key(|old| old.used);
        let mut freed = 0;
        for old in found {
            if total - freed <= bytes {
                break;
            }
            freed += dir
                .discard(&old)
                .map_err(|error| self.failed("trim", error))?;
        }
        dir.recount().map_err(|error| self.failed("trim", error))?;
        Ok(freed)
    }

    fn existing(&self, write: bool) -> Result<CacheDir> {
        CacheDir::existing(self, write).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory if self.dir.is_dir() => {
                let message = format!(
                    "this folder is not a cache; give the folder that loaders use ({})",
                    Setting::Cache
                );
                Error::new(ErrorKind::Config, Stage::Open, message).with_path(&self.dir)
            }
            _ => self.failed("open", error),
        })
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        Error::os(Stage::Open, format!("cannot {what} the cache"), error).with_path(&self.dir)
    }
}

fn entry_of(old: FoundEntry, in_use: bool) -> CacheEntry {
    let FoundEntry {
        used,
        data: path,
        bytes,
        ..
    } = old;
    let opened = EntryFiles::open(&path, false).ok().flatten();
    let (url, version, len, blocks, whole) =
        opened.map_or_else(Default::default, |(entry, url, version)| {
            let whole = entry
                .checksums()
                .map_or(0, |blocks| blocks.iter().flatten().count() as u64);
            (url, version, entry.layout.len, entry.layout.blocks(), whole)
        });
    CacheEntry {
        url,
        version,
        len,
        blocks,
        whole,
        bytes,
        used,
        in_use,
        path,
    }
}

/// Compares the blocks of an entry, and refuses those that are wrong. `read` is called with the
/// number of bytes of each block.
fn verify_entry(
    dir: &CacheDir,
    old: &FoundEntry,
    damaged: &mut Vec<Error>,
    read: &mut impl FnMut(u64) -> ControlFlow<()>,
) -> io::Result<ControlFlow<()>> {
    let in_use = dir.is_read(old.share);
    let lease = dir.protect(old.share)?;
    let Some((entry, url, _)) = EntryFiles::open(&old.data, true)? else {
        drop(lease);
        let removed = dir.discard(old)? > 0;
        dir.recount()?;
        let outcome = if removed {
            "it is removed"
        } else {
            "`trim` removes it when no process reads it"
        };
        let message = format!("the map of an object is damaged; {outcome}");
        damaged.push(Error::new(ErrorKind::Io, Stage::Read, message).with_path(&old.data));
        return Ok(ControlFlow::Continue(()));
    };
    let mut buffer = Vec::new();
    if !in_use {
        entry.drop_pages();
    }
    for (crc, block) in entry.checksums()?.into_iter().zip(0..) {
        let Some(crc) = crc else { continue };
        // Another holder of the claim compares or replaces the block.
        if !entry.claim(block) {
            continue;
        }
        // Another process may have replaced the block since.
        let is_wrong =
            entry.checksum(block)? == Some(crc) && !entry.compare(block, crc, &mut buffer);
        if is_wrong {
            entry.refuse(block, crc)?;
            let message = format!(
                "block {block} of {url} does not match its checksum; it is downloaded again when \
                 it is used"
            );
            let error = Error::new(ErrorKind::Io, Stage::Read, message).with_path(&old.data);
            damaged
                .push(error.with_range(block * entry.layout.block, entry.layout.block_len(block)));
        }
        entry.yield_claims();
        if read(entry.layout.block_len(block)).is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    if !in_use {
        entry.drop_pages();
    }
    Ok(ControlFlow::Continue(()))
}
