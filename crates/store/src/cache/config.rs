//! The location of a cache, and its limits.

use feedline_core::storage::mounts::Mounts;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Bytes of a block: a request of this size costs little more than its bytes.
pub(super) const BLOCK: u64 = 8 << 20;

/// Share of the file system that stays free: 1 / 20, at most [`FREE_BLOCKS`].
pub(super) const FREE: u64 = 20;

/// Maximum space that stays free, in blocks: 8 GiB with the usual blocks. More free space than this
/// helps no other program.
pub(super) const FREE_BLOCKS: u64 = 1024;

/// How long a read waits for a disk, or for another process's download.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Maximum number of queued blocks that no read waits for.
pub(super) const QUEUE: usize = 1 << 16;

/// A folder on a local disk that keeps data read from object stores and from network mounts: NFS,
/// SMB, Lustre, GPFS, BeeGFS, CephFS, AFS, 9p and FUSE. Processes may share it.
///
/// A file on a mount is kept in the version that the loader first reads; if the loader then finds
/// another version, reads of the file fail (`Changed`). Files on local disks
/// are not kept.
///
/// A cached block is read like a file. Until the cache is full, sequential and windowed orders
/// download whole blocks of 8 MiB, each once per machine; a global shuffle reads missing bytes as
/// single ranges, which are kept and fill the blocks. A full cache keeps its data, except for data
/// that no process reads.
///
/// ```
/// # use feedline_store::Cache;
/// let cache = Cache::at("/nvme/feedline").capacity(2 << 40);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    pub(super) dir: PathBuf,
    pub(super) capacity: u64,
    pub(super) block: u64,
    pub(super) mount: Option<PathBuf>,
}

impl Cache {
    /// A cache in this folder, which is created if it is missing. Everyone who may write to it is
    /// trusted.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            capacity: u64::MAX,
            block: BLOCK,
            mount: None,
        }
    }

    /// Maximum bytes of the whole folder, for all processes. With or without this limit, 5 % of the
    /// file system, at most 8 GiB, stay free.
    pub fn capacity(self, bytes: u64) -> Self {
        Self {
            capacity: bytes,
            ..self
        }
    }

    /// For tests: the size of a block, a multiple of 4 KiB.
    #[cfg(feature = "unstable")]
    #[doc(hidden)]
    pub fn block_bytes(self, bytes: u64) -> Self {
        Self {
            block: bytes.next_multiple_of(4096).max(4096),
            ..self
        }
    }

    /// For tests: a folder whose files count as files on a network mount. Its path must not contain
    /// links.
    #[cfg(feature = "unstable")]
    #[doc(hidden)]
    pub fn mount(self, dir: impl Into<PathBuf>) -> Self {
        Self {
            mount: Some(dir.into()),
            ..self
        }
    }

    /// A lookup of the file-system kinds of files that are read through this cache.
    pub(crate) fn mounts(&self) -> Mounts {
        Mounts::new(self.mount.clone())
    }

    /// The name of the network mount that holds the cache itself, if any.
    pub(crate) fn own_mount(&self) -> Option<&'static str> {
        let dir = std::path::absolute(&self.dir).ok()?;
        let found = dir
            .ancestors()
            .find_map(|dir| Some((dir, std::fs::metadata(dir).ok()?)));
        found
            .and_then(|(dir, meta)| Mounts::new(None).of(dir, meta.dev()))
            .map(|mount| mount.name)
    }
}
