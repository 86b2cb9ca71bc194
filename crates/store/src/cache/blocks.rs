//! This process's view of a cache: for each object, its file and its whole blocks. The hot path
//! reads it without a lock.

use super::config::{Cache, QUEUE};
use super::entry::stamp_of;
use super::units::{Units, units_of};
use feedline_base::metadata::Version;
use feedline_base::sync::Hold;
use feedline_core::storage::Sources;
use feedline_core::storage::source::CachedFiles;
use feedline_reader::counters::add;
use feedline_report::meter::CacheReads;
use std::io;
use std::io::Write;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

/// The blocks of all sources of a loader.
pub struct CachedBlocks {
    pub(super) block: u64,
    /// The folder of all objects.
    root: PathBuf,
    objects: Box<[OnceLock<Option<CachedObject>>]>,
    /// The files on mounts, by source; empty if no source is on a mount.
    mounts: Box<[OnceLock<MountedFile>]>,
    /// Maximum heap bytes besides `objects`.
    beside: usize,
    pub(crate) counts: BlockCounts,
}

/// Counts for the report; relaxed.
#[derive(Default)]
pub(crate) struct BlockCounts {
    /// Number of reads from the cache's disk, and from the network.
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    /// Blocks that were written, or that pieces completed.
    pub(super) blocks: AtomicU64,
    /// Bytes of blocks and pieces that were written.
    pub(super) bytes: AtomicU64,
    not_kept: AtomicU64,
    /// Entries that were removed to free space.
    pub(super) removed: AtomicU64,
    /// The last reason why something was not kept, and whether that is a lack of room.
    why: Mutex<Option<(String, bool)>>,
}

/// The result of an object's lookup.
pub(super) struct FoundFile {
    /// The cache's file.
    pub(super) path: PathBuf,
    pub(super) inode: u64,
    /// Length of the object.
    pub(super) len: u64,
    /// Version of a file on a mount.
    pub(super) version: Option<Version>,
}

/// Facts about a file on a mount.
struct MountedFile {
    version: Version,
    /// Whether the file was replaced or changed; then every read fails.
    changed: AtomicBool,
    /// Time of the last comparison, in milliseconds from the loader's start.
    compared: AtomicU64,
}

/// A cached object. It is small, since there may be millions.
pub(super) struct CachedObject {
    name: DataName,
    /// The file's inode: blocks of another file of this name are not used.
    pub(super) inode: u64,
    blocks: BlockFacts,
    /// Whether the file is gone or unreadable.
    lost: AtomicBool,
}

/// The numbers in the path of a data file: `root/share/hash.number`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct DataName {
    hash: u64,
    number: u32,
    share: u8,
}

impl DataName {
    fn of(path: &Path) -> Option<Self> {
        let share = path.parent()?.file_name()?.to_str()?;
        let name = path.file_name()?.to_str()?;
        let (hash, number) = name.split_once('.')?;
        let hash = u64::from_str_radix(hash, 16).ok()?;
        let number = u32::from_str_radix(number, 16).ok()?;
        Some(Self {
            hash,
            number,
            share: u8::from_str_radix(share, 16).ok()?,
        })
    }
}

impl CachedBlocks {
    pub(crate) fn new(sources: &Sources, cache: &Cache) -> Self {
        let root = std::path::absolute(&cache.dir)
            .unwrap_or_default()
            .join("v1/objects");
        let staged = || sources.ids().filter(|id| sources.is_staged(*id));
        let on_mounts = if staged().any(|id| !sources.is_remote(id)) {
            sources.count()
        } else {
            0
        };
        let mounts: Box<[_]> = (0..on_mounts).map(|_| OnceLock::new()).collect();
        let blocks = staged().map(|id| sources.len_of(id).div_ceil(cache.block));
        let (words, blocks) = blocks.fold((0, 0), |(words, all), blocks| {
            (words + BlockFacts::words(blocks), all + blocks)
        });
        let queue = blocks.min(QUEUE as u64).next_power_of_two() as usize * size_of::<(u64, u64)>();
        // The reader of files has a copy of `sources`.
        let beside = words * 8
            + size_of_val(&*mounts)
            + root.as_os_str().len()
            + queue
            + sources.table_bytes();
        let objects = (0..sources.count()).map(|_| OnceLock::new()).collect();
        Self {
            block: cache.block,
            root,
            objects,
            mounts,
            beside,
            counts: BlockCounts::default(),
        }
    }

    /// Maximum heap bytes of the table, once all objects are known, including the queue of blocks.
    pub(crate) fn table_bytes(&self) -> usize {
        size_of_val(&*self.objects) + self.beside
    }

    /// The blocks that a range, which must not be empty, needs.
    pub(super) fn blocks(&self, offset: u64, len: u64) -> RangeInclusive<u64> {
        offset / self.block..=(offset + len - 1) / self.block
    }

    /// The object, if it was looked up and has not changed. `Some(None)`: it is not cached.
    pub(super) fn object(&self, source: usize) -> Option<Option<&CachedObject>> {
        let found = self.objects[source].get()?.as_ref();
        if self.is_changed(source) {
            return None;
        }
        Some(found.filter(|object| !object.lost.load(Ordering::Relaxed)))
    }

    /// The object that a lookup found, even if it was lost or changed since.
    pub(super) fn found(&self, source: usize) -> Option<&CachedObject> {
        self.objects[source].get()?.as_ref()
    }

    /// Sets the result of a lookup; `None`: the object is not kept. `mark` sets the blocks that are
    /// on the disk, before any read finds the object.
    pub(super) fn set(
        &self,
        source: usize,
        file: Option<FoundFile>,
        mark: impl FnOnce(&CachedObject),
    ) -> Option<&CachedObject> {
        let version = file.as_ref().and_then(|file| file.version);
        let object = file.and_then(|file| {
            Some(CachedObject {
                name: DataName::of(&file.path)?,
                inode: file.inode,
                blocks: BlockFacts::new(file.len.div_ceil(self.block)),
                lost: AtomicBool::new(false),
            })
        });
        if let Some(object) = &object {
            mark(object);
        }
        self.objects[source]
            .get_or_init(|| {
                if let (Some(mount), Some(version)) = (self.mounts.get(source), version) {
                    let changed = AtomicBool::new(false);
                    let compared = AtomicU64::new(0);
                    mount.get_or_init(|| MountedFile {
                        version,
                        changed,
                        compared,
                    });
                }
                object
            })
            .as_ref()
    }

    /// Records that the object's file cannot be read. From now on, the object is read from the
    /// network.
    pub(crate) fn lose(&self, source: usize) {
        if let Some(object) = self.objects[source].get().and_then(Option::as_ref) {
            object.lost.store(true, Ordering::Relaxed);
        }
    }

    /// Records that the file on the mount was replaced or changed. From now on, its reads fail.
    pub(super) fn change(&self, source: usize) {
        if let Some(mount) = self.on_mount(source) {
            mount.changed.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn is_changed(&self, source: usize) -> bool {
        self.on_mount(source)
            .is_some_and(|mount| mount.changed.load(Ordering::Relaxed))
    }

    /// The version of a file on a mount that is, or was, cached.
    pub(super) fn version(&self, source: usize) -> Option<Version> {
        self.on_mount(source).map(|mount| mount.version)
    }

    /// Whether a cached file on a mount is due for a comparison: true once in `pause` milliseconds.
    pub(super) fn is_due(&self, source: usize, now: u64, pause: u64) -> bool {
        let (Some(mount), Some(Some(_))) = (self.on_mount(source), self.object(source)) else {
            return false;
        };
        let last = mount.compared.load(Ordering::Relaxed);
        if now < last + pause {
            return false;
        }
        // Only one of several threads compares.
        let swapped =
            mount
                .compared
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed);
        swapped.is_ok()
    }

    fn on_mount(&self, source: usize) -> Option<&MountedFile> {
        self.mounts.get(source)?.get()
    }

    /// Records that a block or object was not kept.
    pub(super) fn dropped(&self, why: String) {
        self.not_kept(why, false);
    }

    /// Like [`Self::dropped`], for an error of the disk.
    pub(super) fn refused(&self, why: &str, error: &io::Error) {
        self.not_kept(format!("{why}: {error}"), is_full(error));
    }

    fn not_kept(&self, why: String, is_full: bool) {
        add(&self.counts.not_kept, 1);
        *self.counts.why.hold() = Some((why, is_full));
    }

    /// The counts so far.
    pub(crate) fn counts(&self) -> CacheReads {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let BlockCounts {
            hits,
            misses,
            blocks,
            bytes,
            not_kept,
            removed,
            why,
        } = &self.counts;
        let (why, is_full) = why.hold().clone().unzip();
        let mut counts = CacheReads::default();
        counts.hits = load(hits);
        counts.misses = load(misses);
        counts.blocks = load(blocks);
        counts.bytes = load(bytes);
        counts.not_kept = load(not_kept);
        counts.removed = load(removed);
        counts.why = why;
        counts.is_full = is_full.unwrap_or(false);
        counts
    }

    /// Whether pieces cover the part of a range that whole blocks do not cover. Reads the marks
    /// from the file, because other processes add marks, too.
    pub(super) fn has_pieces(
        &self,
        source: usize,
        object: &CachedObject,
        offset: u64,
        len: u64,
    ) -> bool {
        let mut path = Vec::with_capacity(128);
        let found = self.path_into(source, &mut path);
        let path = Path::new(std::ffi::OsStr::from_bytes(&path));
        let units = if found {
            Units::find(path, stamp_of(object.inode))
        } else {
            None
        };
        let Some(units) = units else { return false };
        let missing = self.blocks(offset, len).filter(|block| !object.has(*block));
        // Whole blocks need no marks.
        missing
            .map(|block| {
                let start = offset.max(block * self.block);
                let end = (offset + len).min((block + 1) * self.block);
                units_of(start, end - start)
            })
            .all(|range| units.has(&range))
    }

    /// The folder of an object's file.
    pub(super) fn folder(&self, object: &CachedObject) -> PathBuf {
        self.root.join(format!("{:02x}", object.name.share))
    }
}

impl CachedFiles for CachedBlocks {
    fn has(&self, source: usize, offset: u64, len: u64) -> bool {
        let Some(Some(object)) = self.object(source) else {
            return false;
        };
        len > 0 && self.blocks(offset, len).all(|block| object.has(block))
    }

    fn note_hit(&self) {
        add(&self.counts.hits, 1);
    }

    fn path_into(&self, source: usize, out: &mut Vec<u8>) -> bool {
        let object = self
            .objects
            .get(source)
            .and_then(OnceLock::get)
            .and_then(Option::as_ref);
        let Some(CachedObject { name, .. }) = object else {
            return false;
        };
        out.extend_from_slice(self.root.as_os_str().as_bytes());
        write!(
            out,
            "/{:02x}/{:016x}.{:08x}",
            name.share, name.hash, name.number
        )
        .is_ok()
    }
}

/// Whether the error means that the disk, or the cache's capacity, is full.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

impl CachedObject {
    /// Whether `path` is the path of the object's data file.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        DataName::of(path) == Some(self.name)
    }

    pub(super) fn has(&self, block: u64) -> bool {
        self.blocks.get(WHOLE, block)
    }

    /// Records that the block's bytes are on the disk. A thread that sees this may read them.
    pub(super) fn set(&self, block: u64) {
        self.blocks.set(WHOLE, block);
    }

    /// Records that the block was written in an earlier boot.
    pub(super) fn doubt(&self, block: u64) {
        self.blocks.set(UNPROVEN, block);
    }

    /// Whether the block was written in an earlier boot and is not compared yet.
    pub(super) fn is_unproven(&self, block: u64) -> bool {
        self.blocks.get(UNPROVEN, block)
    }

    /// Requests a block; true for the first request.
    pub(super) fn ask(&self, block: u64) -> bool {
        self.blocks.set(ASKED, block)
    }

    /// Withdraws the request for a block.
    pub(super) fn unask(&self, block: u64) {
        self.blocks.clear(ASKED, block);
    }

    /// Records that the block was not kept. It may be requested again.
    pub(super) fn forget(&self, block: u64) {
        self.blocks.clear(ASKED, block);
        self.blocks.clear(UNPROVEN, block);
    }
}

/// Fact about a block: all its bytes are on the disk.
const WHOLE: u64 = 0;
/// Fact about a block: it was written in an earlier boot, and not compared since.
const UNPROVEN: u64 = 1;
const ASKED: u64 = 2;
const FACTS: u64 = 3;

/// For each of the three facts, the blocks that it applies to. One word is enough for a small
/// object.
enum BlockFacts {
    Few(AtomicU64),
    Many(Box<[AtomicU64]>),
}

/// Maximum number of blocks that fit one word.
const FEW: u64 = 64 / FACTS;

impl BlockFacts {
    fn new(blocks: u64) -> Self {
        match Self::words(blocks) {
            0 => Self::Few(AtomicU64::new(0)),
            words => Self::Many((0..words).map(|_| AtomicU64::new(0)).collect()),
        }
    }

    /// Number of words on the heap.
    fn words(blocks: u64) -> usize {
        if blocks <= FEW {
            0
        } else {
            (FACTS * blocks.div_ceil(64)) as usize
        }
    }

    /// The word and the bit of a fact.
    fn place(&self, fact: u64, block: u64) -> (&AtomicU64, u64) {
        let (words, bit) = match self {
            Self::Few(word) => (std::slice::from_ref(word), fact * FEW + block),
            Self::Many(words) => (&**words, fact * (words.len() as u64 / FACTS * 64) + block),
        };
        (&words[(bit / 64) as usize], 1 << (bit % 64))
    }

    fn get(&self, fact: u64, block: u64) -> bool {
        let (word, mask) = self.place(fact, block);
        word.load(Ordering::Acquire) & mask != 0
    }

    /// Sets a fact; true if it was not set.
    fn set(&self, fact: u64, block: u64) -> bool {
        let (word, mask) = self.place(fact, block);
        word.fetch_or(mask, Ordering::AcqRel) & mask == 0
    }

    fn clear(&self, fact: u64, block: u64) {
        let (word, mask) = self.place(fact, block);
        word.fetch_and(!mask, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_is_here_once_all_of_its_blocks_are() {
        let mut sources = Sources::new();
        sources.file("/a", 70 * 4096).unwrap();
        let blocks = CachedBlocks::new(
            &sources,
            &Cache {
                block: 4096,
                ..Cache::at("/c")
            },
        );
        assert!(!blocks.has(0, 0, 1), "before the lookup");
        let path = "/c/v1/objects/2a/0123456789abcdef.00000007";
        let file = FoundFile {
            path: path.into(),
            inode: 1,
            len: 70 * 4096,
            version: None,
        };
        let object = blocks.set(0, Some(file), |_| ()).unwrap();
        assert!(object.ask(65) && !object.ask(65));
        object.forget(65);
        assert!(object.ask(65));
        object.set(64);
        object.set(65);
        let pages = |page: u64| page * 4096;
        let table = [
            (pages(64), 8192, true),
            (pages(65), 4096, true),
            (pages(64) - 1, 2, false),
            (pages(66) - 1, 2, false),
        ];
        for (offset, len, here) in table {
            assert_eq!(blocks.has(0, offset, len), here, "{offset} {len}");
        }
        blocks.lose(0);
        assert!(!blocks.has(0, pages(64), 1));
        let mut named = Vec::new();
        assert!(
            blocks.path_into(0, &mut named) && object.is_at(Path::new(path)),
            "open descriptors still name it"
        );
        assert_eq!(named, path.as_bytes());
        assert_eq!(blocks.folder(object), Path::new("/c/v1/objects/2a"));
    }

    #[test]
    fn facts_of_blocks_are_independent() {
        for blocks in [1, FEW, FEW + 1, 64, 65, 1000] {
            let set = BlockFacts::new(blocks);
            let all = || (0..FACTS).flat_map(|fact| (0..blocks).map(move |block| (fact, block)));
            for (fact, block) in all() {
                assert!(
                    set.set(fact, block) && !set.set(fact, block),
                    "{fact} {block} of {blocks}"
                );
            }
            for (fact, block) in all() {
                set.clear(fact, block);
                assert!(!set.get(fact, block));
                assert_eq!(
                    all().filter(|(fact, block)| set.get(*fact, *block)).count() as u64,
                    FACTS * blocks - 1
                );
                set.set(fact, block);
            }
        }
    }

    #[test]
    fn a_small_object_takes_no_more_than_64_bytes() {
        assert!(
            size_of::<OnceLock<Option<CachedObject>>>() <= 64,
            "{}",
            size_of::<OnceLock<Option<CachedObject>>>()
        );
    }
}
