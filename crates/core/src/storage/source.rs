//! Where bytes are stored: files by path and expected length, objects by URL and version, or memory
//! of the process. The table holds no open descriptors.

use super::resolve_beneath;
use crate::memory::Resident;
use crate::storage::remote;
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{Meta, Stamp, is_url};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Index of a source in its [`Sources`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceId(u32);

impl SourceId {
    /// The source with this index. Sources count from 0, in the order in which they were added.
    #[inline]
    pub fn at(index: usize) -> Self {
        Self(index as u32)
    }

    /// The index.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Index of a folder in a [`Sources`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirId(u32);

/// A range of bytes in one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The source.
    pub source: SourceId,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// The files of a cache, which hold bytes of objects and of files on network mounts.
pub trait CachedFiles: Send + Sync {
    /// Whether the cache's file of the source holds all bytes of this range.
    fn has(&self, source: usize, offset: u64, len: u64) -> bool;

    /// Counts a read of the cache's file.
    fn note_hit(&self);

    /// Appends the path of the cache's file of the source. False if it has none.
    fn path_into(&self, source: usize, out: &mut Vec<u8>) -> bool;
}

/// The sources of a dataset. Each takes 32 bytes plus its file name; a folder's path is stored once
/// for all of its files.
#[derive(Clone, Default)]
pub struct Sources {
    dirs: Vec<PathBuf>,
    /// The folders that are roots, ascending; see [`Sources::root`].
    roots: Vec<u32>,
    /// The folders that are in object stores, ascending.
    stores: Vec<u32>,
    /// The versions of objects, by ascending source.
    pins: Vec<(u32, Arc<str>)>,
    names: Vec<u8>,
    entries: Vec<SourceEntry>,
    memory: Vec<Bytes>,
    /// The bytes of each source, in a table whose files were read into memory.
    resident: Vec<Option<Bytes>>,
    /// Addresses that other ranks of the machine have mapped too, with the number of ranks.
    shared: Vec<(Range<usize>, usize)>,
    bytes: u64,
    /// The folders on network mounts whose files a cache stages, ascending.
    mounts: Vec<u32>,
    /// The cache's files, if this table belongs to the reader that opens them.
    cached: Option<Arc<dyn CachedFiles>>,
}

#[derive(Clone, Copy)]
struct SourceEntry {
    /// Folder, or `MEMORY`.
    dir: u32,
    /// Inode and time of the file's [`Stamp`].
    inode: u32,
    modified: u64,
    /// Name in `names` (offset up to 2^48, length up to 2^16), or the index in `memory`.
    name: u64,
    len: u64,
}

/// The [`Stamp`] of a source whose dataset gave only its length.
const UNSEEN: Stamp = Stamp {
    modified: u64::MAX,
    inode: u32::MAX,
};

const MEMORY: u32 = u32::MAX;

impl SourceEntry {
    fn new(dir: u32, name: u64, len: u64) -> Self {
        Self {
            dir,
            inode: UNSEEN.inode,
            modified: UNSEEN.modified,
            name,
            len,
        }
    }

    fn stamp(&self) -> Stamp {
        Stamp {
            modified: self.modified,
            inode: self.inode,
        }
    }
}

impl Sources {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a folder for [`Self::file_in`].
    pub fn dir(&mut self, path: impl Into<PathBuf>) -> DirId {
        let path = path.into();
        let number = self.dirs.len() as u32;
        if is_url(&path) {
            self.stores.push(number);
        }
        self.dirs.push(path);
        DirId(number)
    }

    /// Adds a folder for [`Self::file_in`] with names that come *from a file*, such as an index or
    /// a manifest. Such a name never leads out of the folder: it is opened beneath it (`openat2`,
    /// `RESOLVE_BENEATH`). A symbolic link in its path that leaves the folder, or is absolute, is
    /// an error ([`ErrorKind::NotAFile`]). The folder's own path is the user's, and may be a link.
    /// Links of [`Self::dir`] and [`Self::file`] may lead anywhere.
    pub fn root(&mut self, path: impl Into<PathBuf>) -> DirId {
        let dir = self.dir(path);
        self.roots.push(dir.0);
        dir
    }

    /// Adds the file `name` of a folder with its length in bytes. It is an error if the file has
    /// another length when it is opened, or is not the file that the reader opened first
    /// ([`ErrorKind::Changed`]).
    ///
    /// Errors: [`ErrorKind::Limit`] for more than 2^32 sources or a name of 2^16 bytes;
    /// [`ErrorKind::NotAFile`] in a [root](Self::root) for a name that is absolute, or has `..`,
    /// `.`, an empty component or a NUL.
    pub fn file_in(
        &mut self,
        dir: DirId,
        name: impl AsRef<std::ffi::OsStr>,
        len: u64,
    ) -> Result<SourceId> {
        let name = name.as_ref();
        if self.is_root(dir.0) && !resolve_beneath::is_plain(name.as_bytes()) {
            let start: String = name.to_string_lossy().chars().take(100).collect();
            let message =
                format!("file name {start:?} is empty or leads out of the dataset's folder");
            let error = Error::new(ErrorKind::NotAFile, Stage::Index, message);
            return Err(error.with_path(&self.dirs[dir.0 as usize]));
        }
        match self.stores.binary_search(&dir.0) {
            Ok(_) => self.file(self.dirs[dir.0 as usize].join(name), len),
            Err(_) => self.entry(dir, name.as_bytes(), len),
        }
    }

    /// Like [`Self::file_in`], for a file with this stamp.
    #[doc(hidden)]
    pub fn found_in(
        &mut self,
        dir: DirId,
        name: &std::ffi::OsStr,
        len: u64,
        stamp: Option<Stamp>,
    ) -> Result<()> {
        let id = self.file_in(dir, name, len)?;
        self.stamp(id, stamp);
        Ok(())
    }

    fn entry(&mut self, dir: DirId, name: &[u8], len: u64) -> Result<SourceId> {
        let limit = |what: &str| Err(Error::new(ErrorKind::Limit, Stage::Index, what));
        if name.len() >= 1 << 16 || self.names.len() >= 1 << 48 {
            return limit("a file name does not fit the source table");
        }
        if self.entries.len() >= MEMORY as usize {
            return limit("more than 2^32 sources");
        }
        let packed = (self.names.len() as u64) << 16 | name.len() as u64;
        self.names.extend_from_slice(name);
        self.entries.push(SourceEntry::new(dir.0, packed, len));
        self.bytes = self.bytes.saturating_add(len);
        Ok(SourceId((self.entries.len() - 1) as u32))
    }

    /// Adds a file by its path and length, or an object by its URL and length. The object is looked
    /// up once, and all reads request that version.
    ///
    /// Errors: those of [`Self::file_in`], and [`ErrorKind::Config`] for a path without a file
    /// name; for an object [`ErrorKind::Changed`] if it has another length, and errors of the
    /// store.
    pub fn file(&mut self, path: impl AsRef<Path>, len: u64) -> Result<SourceId> {
        let path = path.as_ref();
        if !is_url(path) {
            return self.add_named(path, len);
        }
        let meta = remote::look(path)?;
        if meta.len != len {
            let message = format!(
                "the object has {} bytes now, {len} when it was indexed",
                meta.len
            );
            return Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(path));
        }
        self.add(path, &meta)
    }

    /// Adds the file or object at a path or URL, with its current length and version.
    ///
    /// Errors: those of [`Self::file_in`]; [`ErrorKind::NotFound`]; errors of the system or store.
    pub fn look_up(&mut self, path: impl AsRef<Path>) -> Result<SourceId> {
        let path = path.as_ref();
        self.add(path, &super::listing::regular(path)?)
    }

    /// Adds a file or object with the length and version in `meta`.
    ///
    /// Errors: those of [`Self::file_in`], and [`ErrorKind::Config`] for a path without a file
    /// name.
    #[doc(hidden)]
    pub fn add(&mut self, path: &Path, meta: &Meta) -> Result<SourceId> {
        let id = self.add_named(path, meta.len)?;
        self.stamp(id, meta.stamp);
        self.pins.extend(meta.pin.clone().map(|pin| (id.0, pin)));
        Ok(id)
    }

    fn add_named(&mut self, path: &Path, len: u64) -> Result<SourceId> {
        let Some(name) = path.file_name() else {
            return Err(
                Error::new(ErrorKind::Config, Stage::Index, "the path has no file name")
                    .with_path(path),
            );
        };
        let parent = path.parent().unwrap_or(Path::new(""));
        let dir = match self
            .dirs
            .iter()
            .rposition(|dir| dir == parent)
            .filter(|index| !self.is_root(*index as u32))
        {
            Some(index) => DirId(index as u32),
            None => self.dir(parent),
        };
        self.entry(dir, name.as_bytes(), len)
    }

    /// Adds bytes in the process's memory. Decode workers copy samples from them; no reader reads
    /// them.
    pub fn memory(&mut self, bytes: Arc<[u8]>) -> SourceId {
        self.entries.push(SourceEntry::new(
            MEMORY,
            self.memory.len() as u64,
            bytes.len() as u64,
        ));
        self.memory.push(Bytes::from_owner(bytes));
        SourceId((self.entries.len() - 1) as u32)
    }

    /// Appends all sources of `other`. Source *k* of `other` becomes source *k* plus the returned
    /// number.
    ///
    /// Errors: those of [`Self::file_in`].
    #[doc(hidden)]
    pub fn append(&mut self, other: &Sources) -> Result<usize> {
        let base = self.entries.len();
        let dirs = self.dirs.len() as u32;
        let names = self.names.len() as u64;
        let memory = self.memory.len() as u64;
        let fits = base + other.entries.len() <= MEMORY as usize
            && names + (other.names.len() as u64) < 1 << 48;
        if !fits {
            return Err(Error::new(
                ErrorKind::Limit,
                Stage::Index,
                "more than 2^32 sources, or 2^48 bytes of names",
            ));
        }
        self.dirs.extend_from_slice(&other.dirs);
        self.roots
            .extend(other.roots.iter().map(|root| root + dirs));
        self.stores
            .extend(other.stores.iter().map(|store| store + dirs));
        self.pins.extend(
            other
                .pins
                .iter()
                .map(|(id, pin)| (id + base as u32, pin.clone())),
        );
        self.names.extend_from_slice(&other.names);
        self.memory.extend_from_slice(&other.memory);
        for shared in &other.shared {
            // Two parts may have the same bytes.
            if !self.shared.contains(shared) {
                self.shared.push(shared.clone());
            }
        }
        if !(self.resident.is_empty() && other.resident.is_empty()) {
            self.resident.resize(base, None);
            self.resident.extend_from_slice(&other.resident);
        }
        self.entries
            .extend(other.entries.iter().map(|entry| match entry.dir {
                MEMORY => SourceEntry {
                    name: entry.name + memory,
                    ..*entry
                },
                dir => SourceEntry {
                    dir: dir + dirs,
                    name: entry.name + (names << 16),
                    ..*entry
                },
            }));
        self.bytes = self.bytes.saturating_add(other.bytes);
        Ok(base)
    }

    /// Number of sources.
    pub fn count(&self) -> usize {
        self.entries.len()
    }

    /// All ids.
    pub fn ids(&self) -> impl Iterator<Item = SourceId> + use<> {
        (0..self.entries.len() as u32).map(SourceId)
    }

    /// Bytes of all files together, without memory sources.
    pub fn total_bytes(&self) -> u64 {
        self.bytes
    }

    /// Length in bytes at the time the source was added.
    #[inline]
    pub fn len_of(&self, id: SourceId) -> u64 {
        self.entries[id.index()].len
    }

    /// Copies an extent that needs no read (an empty one, or one of a memory source) to the start
    /// of `dst`. False for all others.
    #[doc(hidden)]
    pub fn copy_resident(&self, extent: &Extent, dst: &mut [u8]) -> bool {
        if let Some(bytes) = self.bytes_of(extent.source) {
            let len = extent.len as usize;
            dst[..len].copy_from_slice(&bytes[extent.offset as usize..][..len]);
            return true;
        }
        extent.len == 0
    }

    /// The bytes of a memory source.
    #[inline]
    pub fn bytes_of(&self, id: SourceId) -> Option<&[u8]> {
        self.owned(id).map(|bytes| &bytes[..])
    }

    /// All bytes in memory, by ascending address. Bytes that several sources share appear once.
    #[doc(hidden)]
    pub fn resident(&self) -> Vec<Resident> {
        let ranges = self.resident_ranges().into_iter();
        ranges
            .map(|range| Resident {
                counted: self.counted(&range),
                range,
            })
            .collect()
    }

    /// The bytes of a range, with only this rank's part of those that ranks share.
    fn counted(&self, range: &Range<usize>) -> usize {
        let others = self.shared.iter().map(|(shared, ranks)| {
            let start = shared.start.max(range.start);
            let both = shared.end.min(range.end).saturating_sub(start);
            both - both.div_ceil(*ranks)
        });
        range.len() - others.sum::<usize>()
    }

    fn resident_ranges(&self) -> Vec<Range<usize>> {
        let mut all: Vec<Range<usize>> = Vec::new();
        for bytes in self
            .ids()
            .filter_map(|id| self.owned(id))
            .filter(|bytes| !bytes.is_empty())
        {
            let start = bytes.as_ptr().addr();
            // Files in memory are contiguous: millions of them form one range.
            match all.last_mut() {
                Some(last) if last.end == start => last.end += bytes.len(),
                _ => all.push(start..start + bytes.len()),
            }
        }
        all.sort_unstable_by_key(|range| range.start);
        all.dedup_by(|next, last| {
            let shared = next.start < last.end;
            last.end = if shared {
                last.end.max(next.end)
            } else {
                last.end
            };
            shared
        });
        all
    }

    /// Whether the source is in an object store.
    #[doc(hidden)]
    pub fn is_remote(&self, id: SourceId) -> bool {
        !self.stores.is_empty()
            && self
                .stores
                .binary_search(&self.entries[id.index()].dir)
                .is_ok()
    }

    /// Whether a cache may hold the source: an object, or a file on a network mount.
    #[doc(hidden)]
    pub fn is_staged(&self, id: SourceId) -> bool {
        self.is_remote(id)
            || self
                .mounts
                .binary_search(&self.entries[id.index()].dir)
                .is_ok()
    }

    /// The same table, with the folders of these files on network mounts recorded.
    #[doc(hidden)]
    pub fn with_mounts(&self, files: impl Iterator<Item = SourceId>) -> Self {
        let mut mounts: Vec<_> = files.map(|id| self.entries[id.index()].dir).collect();
        mounts.sort_unstable();
        Self {
            mounts,
            ..self.clone()
        }
    }

    /// Whether the table has a source in an object store, and whether it has a file on a disk.
    #[doc(hidden)]
    pub fn kinds(&self) -> (bool, bool) {
        (
            !self.stores.is_empty(),
            self.ids()
                .any(|id| self.owned(id).is_none() && !self.is_remote(id)),
        )
    }

    /// The object of a remote source, in the version that was listed.
    #[doc(hidden)]
    pub fn object(&self, id: SourceId) -> Result<remote::Object> {
        remote::Object::at(&self.path(id), self.len_of(id), self.pin(id))
    }

    /// The commits of the sources' repositories of the Hugging Face Hub, with the URLs of the
    /// repositories, in the order of the sources.
    #[doc(hidden)]
    pub fn commits(&self) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        for store in &self.stores {
            match remote::commit(&self.dirs[*store as usize])? {
                Some(commit) if !found.contains(&commit) => found.push(commit),
                _ => {}
            }
        }
        Ok(found)
    }

    /// The listed version of a remote source, as its store names it.
    #[doc(hidden)]
    pub fn pin(&self, id: SourceId) -> Option<Arc<str>> {
        self.pins
            .binary_search_by_key(&id.0, |(id, _)| *id)
            .ok()
            .map(|found| self.pins[found].1.clone())
    }

    fn stamp(&mut self, id: SourceId, stamp: Option<Stamp>) {
        let Stamp { modified, inode } = stamp.unwrap_or(UNSEEN);
        let entry = &mut self.entries[id.index()];
        entry.modified = modified;
        entry.inode = inode;
    }

    /// The stamp of a source's file when it was indexed; `None` if the dataset gave only its
    /// length.
    #[doc(hidden)]
    pub fn indexed(&self, id: SourceId) -> Option<Stamp> {
        Some(self.entries[id.index()].stamp()).filter(|stamp| *stamp != UNSEEN)
    }

    /// Whether there is a file for which the dataset gave only the length.
    #[doc(hidden)]
    pub fn has_unseen(&self) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.dir != MEMORY && entry.stamp() == UNSEEN)
    }

    /// Checks that the extent is within a source.
    ///
    /// Errors: [`ErrorKind::User`] for a missing source; [`ErrorKind::Truncated`], naming path and
    /// range.
    #[doc(hidden)]
    #[inline]
    pub fn check(&self, extent: &Extent) -> Result<()> {
        if extent.source.index() >= self.count() {
            let message = format!(
                "the dataset names source {} of {}, numbered from 0",
                extent.source.index(),
                self.count()
            );
            return Err(Error::new(ErrorKind::User, Stage::Read, message));
        }
        let len = self.len_of(extent.source);
        if extent
            .offset
            .checked_add(extent.len)
            .is_none_or(|end| end > len)
        {
            let message =
                format!("the extent ends past the source's indexed length of {len} bytes");
            return Err(self.at(
                Error::new(ErrorKind::Truncated, Stage::Read, message),
                extent,
            ));
        }
        Ok(())
    }

    /// Adds the path and range of the extent to the error.
    #[doc(hidden)]
    pub fn at(&self, error: Error, extent: &Extent) -> Error {
        error
            .with_path(self.path(extent.source))
            .with_range(extent.offset, extent.len)
    }

    /// The bytes of an extent of a memory source, without a copy. `None` for files that are not in
    /// memory, and for a range outside the source.
    #[doc(hidden)]
    pub fn shared(&self, extent: &Extent) -> Option<Bytes> {
        let bytes = self.owned(extent.source)?;
        let end = extent
            .offset
            .checked_add(extent.len)
            .filter(|end| *end <= bytes.len() as u64)?;
        Some(bytes.slice(extent.offset as usize..end as usize))
    }

    fn owned(&self, id: SourceId) -> Option<&Bytes> {
        if let Some(Some(bytes)) = self.resident.get(id.index()) {
            return Some(bytes);
        }
        let entry = self.entries[id.index()];
        (entry.dir == MEMORY).then(|| &self.memory[entry.name as usize])
    }

    /// The same table with the bytes of every source in memory: `bytes` in the order of the ids.
    /// The paths are kept for errors.
    #[doc(hidden)]
    pub fn with_bytes(&self, bytes: Vec<Bytes>) -> Self {
        debug_assert_eq!(bytes.len(), self.entries.len());
        Self {
            resident: bytes.into_iter().map(Some).collect(),
            bytes: 0,
            ..self.clone()
        }
    }

    /// The same table, whose bytes at these addresses are shared by so many ranks of the machine.
    #[doc(hidden)]
    pub fn sharing(mut self, addresses: Range<usize>, ranks: usize) -> Self {
        self.shared.push((addresses, ranks.max(1)));
        self
    }

    /// The same table for the reader of files. For a source in the cache, it has the path of the
    /// cache's file.
    #[doc(hidden)]
    pub fn with_cache(&self, blocks: Arc<dyn CachedFiles>) -> Self {
        Self {
            cached: Some(blocks),
            ..self.clone()
        }
    }

    /// Whether objects may have files in a cache.
    #[doc(hidden)]
    pub fn has_cache(&self) -> bool {
        self.cached.is_some()
    }

    /// Reads a staged source's bytes with `read` if a cache holds them all; true if that succeeds.
    #[doc(hidden)]
    pub fn read_cached(&self, extent: &Extent, read: impl FnOnce() -> bool) -> bool {
        let Some(blocks) = &self.cached else {
            return false;
        };
        let hit = blocks.has(extent.source.index(), extent.offset, extent.len) && read();
        if hit {
            blocks.note_hit();
        }
        hit
    }

    /// The first file of each folder that no cache stages, for at most `dirs_max` folders.
    #[doc(hidden)]
    pub fn first_of_dirs(&self, dirs_max: usize) -> Vec<SourceId> {
        let mut seen = vec![false; self.dirs.len()];
        let files = self.entries.iter().enumerate().filter(|(index, entry)| {
            self.owned(SourceId(*index as u32)).is_none()
                && entry.dir != MEMORY
                && !self.is_staged(SourceId(*index as u32))
                && !std::mem::replace(&mut seen[entry.dir as usize], true)
        });
        files
            .take(dirs_max.min(self.dirs.len()))
            .map(|(index, _)| SourceId(index as u32))
            .collect()
    }

    /// The path, or `<memory>`.
    pub fn path(&self, id: SourceId) -> PathBuf {
        let mut path = Vec::new();
        self.path_into(id, &mut path);
        PathBuf::from(<std::ffi::OsStr as OsStrExt>::from_bytes(&path))
    }

    /// The last component of a file's path; `None` for memory sources.
    pub(crate) fn name_of(&self, id: SourceId) -> Option<&[u8]> {
        let entry = self.entries[id.index()];
        let start = (entry.name >> 16) as usize;
        let len = (entry.name & 0xffff) as usize;
        let name = (entry.dir != MEMORY).then(|| &self.names[start..start + len])?;
        // `file_in` also takes names with folders.
        name.rsplit(|byte| *byte == b'/').next()
    }

    fn is_root(&self, dir: u32) -> bool {
        self.roots.binary_search(&dir).is_ok()
    }

    /// Root and name of a file that is opened beneath its folder; `None` for others.
    #[doc(hidden)]
    pub fn beneath(&self, id: SourceId) -> Option<(&Path, &[u8])> {
        let entry = self.entries[id.index()];
        if entry.dir == MEMORY || !self.is_root(entry.dir) {
            return None;
        }
        let start = (entry.name >> 16) as usize;
        let len = (entry.name & 0xffff) as usize;
        Some((
            &self.dirs[entry.dir as usize],
            &self.names[start..start + len],
        ))
    }

    /// Clears `out` and writes the path's bytes into it, without a trailing NUL. No allocation once
    /// `out` is large enough.
    pub fn path_into(&self, id: SourceId, out: &mut Vec<u8>) {
        out.clear();
        if self
            .cached
            .as_ref()
            .is_some_and(|blocks| blocks.path_into(id.index(), out))
        {
            return;
        }
        let entry = self.entries[id.index()];
        if entry.dir == MEMORY {
            return out.extend_from_slice(b"<memory>");
        }
        let dir = self.dirs[entry.dir as usize].as_os_str().as_bytes();
        out.extend_from_slice(dir);
        if !dir.is_empty() && !dir.ends_with(b"/") {
            out.push(b'/');
        }
        let start = (entry.name >> 16) as usize;
        let len = (entry.name & 0xffff) as usize;
        out.extend_from_slice(&self.names[start..start + len]);
    }

    /// Heap bytes of the table, without memory sources: a term of the loader's memory plan.
    pub fn table_bytes(&self) -> usize {
        let dirs: usize = self
            .dirs
            .iter()
            .map(|dir| dir.as_os_str().len() + size_of::<PathBuf>())
            .sum();
        let pins: usize = self
            .pins
            .iter()
            .map(|(_, pin)| pin.len() + size_of::<(u32, Arc<str>)>() + 16)
            .sum();
        let numbers = (self.roots.capacity() + self.stores.capacity() + self.mounts.capacity()) * 4;
        self.entries.capacity() * size_of::<SourceEntry>()
            + self.names.capacity()
            + numbers
            + dirs
            + pins
    }
}
