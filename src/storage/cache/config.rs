//! Where a cache lies, and its limits.

use crate::storage::mounts::Mounts;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Bytes of a block: a request of this size costs little more than its bytes.
pub(super) const BLOCK: u64 = 8 << 20;

/// Share of the file system that stays free: 1 / 20, at most [`FREE_BLOCKS`].
pub(super) const FREE: u64 = 20;

/// More free space than this serves nobody else: 8 GiB with the usual blocks.
pub(super) const FREE_BLOCKS: u64 = 1024;

/// A read waits so long for a disk, or for another process's download.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Blocks that wait for their download without a read.
pub(super) const QUEUE: usize = 1 << 16;

/// A folder on a local disk that keeps what is read from object stores and from network mounts: NFS, SMB, Lustre, GPFS,
/// BeeGFS, CephFS, AFS, 9p and FUSE. Processes may share it.
///
/// A file on a mount is kept in the version that the loader first reads; if another one is met, its reads fail
/// ([`Changed`](crate::ErrorKind)). Files on local disks are not kept.
///
/// A cached block is read like a file. Until the cache is full, sequential and windowed orders download whole blocks of
/// 8 MiB, each once per machine; a global shuffle reads what it misses as single ranges, which are kept and fill
/// the blocks. A full cache keeps what it has, except for data that no process reads.
///
/// ```no_run
/// # fn main() -> feedline::Result<()> {
/// use feedline::{Loader, dataset, storage::Cache};
/// let tar = dataset::Tar::open("s3://bucket/train-{0000..1023}.tar")?;
/// let loader = Loader::builder(tar).cache(Cache::at("/nvme/feedline").capacity(2 << 40)).build()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    pub(super) dir: PathBuf,
    pub(super) capacity: u64,
    pub(super) block: u64,
    pub(super) mount: Option<PathBuf>,
}

impl Cache {
    /// A cache in this folder, which is made if it is missing. Everyone who may write to it is trusted.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            capacity: u64::MAX,
            block: BLOCK,
            mount: None,
        }
    }

    /// Limit of bytes of the whole folder, for all processes. By default, and in any case, 5 % of the file system stay
    /// free, at most 8 GiB.
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

    /// For tests: a folder whose files count as files on a network mount. Its path has no links.
    #[cfg(feature = "unstable")]
    #[doc(hidden)]
    pub fn mount(self, dir: impl Into<PathBuf>) -> Self {
        Self {
            mount: Some(dir.into()),
            ..self
        }
    }

    /// The kinds of file systems of what is read through this cache.
    pub(crate) fn mounts(&self) -> Mounts {
        Mounts::new(self.mount.clone())
    }

    /// The network mount that the cache itself lies on.
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
