//! What this process knows of a cache: for each object its file and its whole blocks. Read on the hot path, without a
//! lock.

use crate::meter::CacheReads;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The blocks of all sources of a loader.
pub(crate) struct Kept {
    block: u64,
    objects: Box<[OnceLock<Option<Object>>]>,
    counts: Counts,
}

/// Counts for the report; relaxed.
#[derive(Default)]
struct Counts {
    hits: AtomicU64,
    misses: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
    not_kept: AtomicU64,
    removed: AtomicU64,
    why: Mutex<Option<String>>,
}

/// A cached object.
pub(super) struct Object {
    pub(super) path: PathBuf,
    /// The file's inode: blocks of another file of this name do not count.
    pub(super) inode: u64,
    whole: Bits,
    /// Written in an earlier boot, and not compared since.
    unproven: Bits,
    asked: Bits,
    /// The file is gone or unreadable.
    lost: AtomicBool,
}

impl Kept {
    pub(super) fn new(sources: usize, block: u64) -> Self {
        Self { block, objects: (0..sources).map(|_| OnceLock::new()).collect(), counts: Counts::default() }
    }

    /// Heap bytes of the table without its objects.
    pub(crate) fn table_bytes(&self) -> usize {
        self.objects.len() * size_of::<OnceLock<Option<Object>>>()
    }

    pub(super) fn block(&self) -> u64 {
        self.block
    }

    /// Blocks that a range, which is not empty, needs.
    pub(super) fn blocks(&self, offset: u64, len: u64) -> RangeInclusive<u64> {
        offset / self.block..=(offset + len - 1) / self.block
    }

    /// The object, once it was looked up. `Some(None)`: it is not cached.
    pub(super) fn object(&self, source: usize) -> Option<Option<&Object>> {
        let found = self.objects[source].get()?.as_ref();
        Some(found.filter(|object| !object.lost.load(Ordering::Relaxed)))
    }

    /// Sets what a lookup found: path and inode of a file for an object of `len` bytes, or nothing.
    pub(super) fn set(&self, source: usize, file: Option<(PathBuf, u64)>, len: u64) -> Option<&Object> {
        let blocks = len.div_ceil(self.block);
        let object = file.map(|(path, inode)| Object {
            path,
            inode,
            whole: Bits::new(blocks),
            unproven: Bits::new(blocks),
            asked: Bits::new(blocks),
            lost: AtomicBool::new(false),
        });
        self.objects[source].get_or_init(|| object).as_ref()
    }

    /// The object's file cannot be read: from now on, it comes from the network.
    pub(crate) fn lose(&self, source: usize) {
        if let Some(object) = self.objects[source].get().and_then(Option::as_ref) {
            object.lost.store(true, Ordering::Relaxed);
        }
    }

    /// Whether all bytes of a range are on the disk.
    pub(crate) fn has(&self, source: usize, offset: u64, len: u64) -> bool {
        let Some(Some(object)) = self.object(source) else { return false };
        len > 0 && self.blocks(offset, len).all(|block| object.has(block))
    }

    /// Reads from the cache's disk.
    pub(crate) fn hit(&self, reads: u64) {
        self.counts.hits.fetch_add(reads, Ordering::Relaxed);
    }

    /// Reads from the network.
    pub(crate) fn miss(&self, reads: u64) {
        self.counts.misses.fetch_add(reads, Ordering::Relaxed);
    }

    /// A block of this length was written.
    pub(super) fn wrote(&self, len: u64) {
        self.counts.blocks.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(len, Ordering::Relaxed);
    }

    /// A block or object was not kept.
    pub(super) fn dropped(&self, why: String) {
        self.counts.not_kept.fetch_add(1, Ordering::Relaxed);
        *self.counts.why.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    /// Entries that were removed for room.
    pub(super) fn removed(&self, entries: u64) {
        self.counts.removed.fetch_add(entries, Ordering::Relaxed);
    }

    /// The counts so far.
    pub(crate) fn counts(&self) -> CacheReads {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { hits, misses, blocks, bytes, not_kept, removed, why } = &self.counts;
        CacheReads {
            hits: load(hits),
            misses: load(misses),
            blocks: load(blocks),
            bytes: load(bytes),
            not_kept: load(not_kept),
            removed: load(removed),
            why: why.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// The cache's file of an object.
    pub(crate) fn path(&self, source: usize) -> Option<&Path> {
        Some(&self.objects.get(source)?.get()?.as_ref()?.path)
    }
}

impl Object {
    pub(super) fn has(&self, block: u64) -> bool {
        self.whole.get(block)
    }

    /// The block's bytes are on the disk, for every thread that learns of it here.
    pub(super) fn set(&self, block: u64) {
        self.whole.set(block);
    }

    /// A block of an earlier boot.
    pub(super) fn doubt(&self, block: u64) {
        self.unproven.set(block);
    }

    /// Whether a look at the disk may bring the block.
    pub(super) fn is_unproven(&self, block: u64) -> bool {
        self.unproven.get(block)
    }

    /// True for the first one who asks for a block.
    pub(super) fn ask(&self, block: u64) -> bool {
        self.asked.set(block)
    }

    /// The block was not kept; it may be asked for again.
    pub(super) fn forget(&self, block: u64) {
        self.asked.clear(block);
        self.unproven.clear(block);
    }
}

struct Bits(Box<[AtomicU64]>);

impl Bits {
    fn new(bits: u64) -> Self {
        Self((0..bits.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn get(&self, bit: u64) -> bool {
        self.0[(bit / 64) as usize].load(Ordering::Acquire) >> (bit % 64) & 1 == 1
    }

    /// True if the bit was clear.
    fn set(&self, bit: u64) -> bool {
        let mask = 1 << (bit % 64);
        self.0[(bit / 64) as usize].fetch_or(mask, Ordering::AcqRel) & mask == 0
    }

    fn clear(&self, bit: u64) {
        self.0[(bit / 64) as usize].fetch_and(!(1 << (bit % 64)), Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_is_here_once_all_of_its_blocks_are() {
        let kept = Kept::new(1, 4096);
        assert!(!kept.has(0, 0, 1), "before the lookup");
        let object = kept.set(0, Some(("/f".into(), 1)), 70 * 4096).unwrap();
        assert!(object.ask(65) && !object.ask(65));
        object.forget(65);
        assert!(object.ask(65));
        object.set(64);
        object.set(65);
        let pages = |page: u64| page * 4096;
        let table =
            [(pages(64), 8192, true), (pages(65), 4096, true), (pages(64) - 1, 2, false), (pages(66) - 1, 2, false)];
        for (offset, len, here) in table {
            assert_eq!(kept.has(0, offset, len), here, "{offset} {len}");
        }
        kept.lose(0);
        assert!(!kept.has(0, pages(64), 1));
        assert_eq!(kept.path(0), Some(Path::new("/f")), "open descriptors still name it");
    }
}
