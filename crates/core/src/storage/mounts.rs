//! Which sources are on a network or parallel file system, and how readers treat them.
//!
//! ```text
//! first file of each folder ──stat──► device ──statfs, once per device──► kind of file system ──► Mount, or a local disk
//! ```
//!
//! With a cache, such files are staged like objects: `cache::upstream` reads their blocks, `router`
//! reads the rest from the files themselves. Without a cache, only the readers differ: `choice`
//! allows more reads at once, and no O_DIRECT if [`Mount`] says so. The kinds are those of `statfs`
//! (`linux/magic.h`, and the file systems' own headers).

use crate::storage::{SourceId, Sources};
use feedline_base::sync::Hold;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A kind of file system with the latency of a network.
#[derive(Debug, PartialEq, Eq)]
pub struct Mount {
    pub name: &'static str,
    /// A file keeps its inode number when its file system is mounted again. FUSE programs and SMB
    /// clients may invent numbers.
    pub keeps_inodes: bool,
    /// Reads may use O_DIRECT by default. The other kinds refuse it, or would bypass the page cache
    /// that a machine's processes share.
    pub direct: bool,
}

const fn mount(name: &'static str, keeps_inodes: bool, direct: bool) -> Mount {
    Mount {
        name,
        keeps_inodes,
        direct,
    }
}

const FUSE: u32 = 0x6573_5546;

/// The file system of each `f_type` that `statfs` returns.
const KINDS: &[(u32, Mount)] = &[
    (0x6969, mount("NFS", true, false)),
    (0x517b, mount("SMB", false, false)),
    (0xff53_4d42, mount("SMB", false, false)),
    (0xfe53_4d42, mount("SMB", false, false)),
    (0x0bd0_0bd0, mount("Lustre", true, true)),
    (0x4750_4653, mount("GPFS", true, true)),
    (0x1983_0326, mount("BeeGFS", true, true)),
    (0x00c3_6400, mount("CephFS", true, true)),
    (0x5346_414f, mount("AFS", true, false)),
    (0x6b41_4653, mount("AFS", true, false)),
    (0x0102_1997, mount("9p", true, false)),
    (FUSE, mount("FUSE", false, false)),
];

/// The mount of this magic number; `None` for local disks and memory.
fn by_magic(magic: u32, device: u64) -> Option<&'static Mount> {
    // A FUSE program for a local disk has the disk's device number.
    let on_disk = magic == FUSE && rustix::fs::major(device) != 0;
    KINDS
        .iter()
        .find(|(kind, _)| *kind == magic && !on_disk)
        .map(|(_, mount)| mount)
}

/// Local file systems that give an inode a new number once the kernel has dropped it: FAT, exFAT,
/// VirtualBox's folders, and overlays after a copy.
const INVENTIVE: [u32; 4] = [0x4d44, 0x2011_bab0, 0x786f_4256, 0x794c_7630];

/// Whether a file of this file system may get another inode number while a loader runs.
pub(super) fn invents_inodes(magic: u32, device: u64) -> bool {
    INVENTIVE.contains(&magic) || by_magic(magic, device).is_some_and(|mount| !mount.keeps_inodes)
}

/// The kinds of file systems, each looked up once per device.
pub struct Mounts {
    devices: Mutex<HashMap<u64, Option<&'static Mount>>>,
    /// For tests: a folder that counts as a mount.
    also: Option<PathBuf>,
}

/// The mount of a test's folder.
static TEST: Mount = mount("a test's mount", true, false);

/// A folder on a mount.
pub struct Slow {
    pub first: SourceId,
    pub(super) path: PathBuf,
    pub mount: &'static Mount,
}

impl Slow {
    /// Describes the folder, for the reasons in the report.
    pub fn words(&self) -> String {
        let folder = self.path.parent().unwrap_or(&self.path);
        format!("{} on {}", folder.display(), self.mount.name)
    }
}

impl Mounts {
    pub fn new(also: Option<PathBuf>) -> Self {
        Self {
            devices: Mutex::default(),
            also,
        }
    }

    /// The mount of a file or folder on a device; `None` on local disks.
    pub fn of(&self, path: &Path, device: u64) -> Option<&'static Mount> {
        if self
            .also
            .as_ref()
            .is_some_and(|also| path.starts_with(also))
        {
            return Some(&TEST);
        }
        let mut devices = self.devices.hold();
        *devices
            .entry(device)
            .or_insert_with(|| by_magic(rustix::fs::statfs(path).ok()?.f_type as u32, device))
    }

    /// The folders of `sources` that are on mounts, each found by its first file. Checks at most
    /// `dirs_max` folders.
    pub fn slow_folders(&self, sources: &Sources, dirs_max: usize) -> Vec<Slow> {
        sources
            .first_of_dirs(dirs_max)
            .into_iter()
            .filter_map(|first| {
                let path = sources.path(first);
                // If its metadata cannot be read, the file gives its own error when it is read.
                let mount = self.of(&path, std::fs::metadata(&path).ok()?.dev())?;
                Some(Slow { first, path, mount })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_file_system_decides_what_is_staged() {
        let ext4 = 0xef53;
        for (magic, device, name) in [
            (0x6969, 0, Some("NFS")),
            (0xfe53_4d42, 0, Some("SMB")),
            (0x0bd0_0bd0, 0x1234_5678, Some("Lustre")),
            (FUSE, rustix::fs::makedev(0, 39), Some("FUSE")),
            (FUSE, rustix::fs::makedev(8, 1), None),
            (ext4, rustix::fs::makedev(8, 1), None),
        ] {
            assert_eq!(
                by_magic(magic, device).map(|mount| mount.name),
                name,
                "{magic:x}"
            );
        }
        for (magic, device, invents) in [
            (ext4, 5, false),
            (0x6969, 5, false),
            (FUSE, 5, true),
            (0x4d44, 5, true),
        ] {
            assert_eq!(invents_inodes(magic, device), invents, "{magic:x}");
        }
    }

    #[test]
    fn local_folders_are_not_slow_unless_a_test_says_so() {
        let path = std::env::temp_dir().join(format!("feedline-mounts-{}", std::process::id()));
        std::fs::write(&path, [1; 10]).unwrap();
        let mut sources = Sources::new();
        let id = sources.file(&path, 10).unwrap();
        sources
            .file(path.with_extension("gone").join("a"), 10)
            .unwrap();
        let found = |also: Option<&Path>| {
            let slow = Mounts::new(also.map(Path::to_path_buf)).slow_folders(&sources, 8);
            slow.iter().map(|slow| slow.first).collect::<Vec<_>>()
        };
        assert_eq!((found(None), found(path.parent())), (vec![], vec![id]));
        std::fs::remove_file(&path).unwrap();
    }
}
