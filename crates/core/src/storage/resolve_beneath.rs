//! Files whose names come from a file: opened beneath a folder, and nowhere else.
//!
//! ```text
//! root (the user's path, links followed) ──► folder ──openat2(RESOLVE_BENEATH, NO_MAGICLINKS)──► file
//!                                                └── without openat2: one component at a time, no link at all
//! ```
//!
//! A name from the user or from a folder listing may be a link to anywhere. A name in an index or a
//! manifest is untrusted. [`is_plain`] refuses it if it is absolute, or has `..`, `.`, an empty
//! component or a NUL. The kernel refuses it if a link on its path leads out of the root (`EXDEV`),
//! or is a magic link of `/proc` (`ELOOP`). An absolute link counts as leading out, wherever it
//! ends.
//!
//! Limits: before Linux 5.6, and under filters that refuse `openat2`, links within the root are
//! refused as well. The root is opened anew each time, so that a remounted file system is found
//! again.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::path::Path;

/// How names are resolved.
pub const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);

/// Maximum number of tries when folders are renamed during the resolution.
const TRIES: u32 = 16;

/// Whether a name from a file is allowed: relative, of plain components.
pub(crate) fn is_plain(name: &[u8]) -> bool {
    name.split(|byte| *byte == b'/')
        .all(|part| !part.is_empty() && part != b"." && part != b"..")
        && !name.contains(&0)
}

/// Opens the folder of a root.
pub fn root(path: &Path) -> Result<OwnedFd, Errno> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    rustix::fs::open(
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// Opens `name`, which [`is_plain`], beneath `root`.
///
/// Errors: `EXDEV` if a link leads out of the root.
pub(crate) fn open(root: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    for _ in 0..TRIES {
        match rustix::fs::openat2(root, name, flags, Mode::empty(), RESOLVE) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(Errno::NOSYS | Errno::PERM) => return walk(root, name, flags),
            opened => return opened,
        }
    }
    Err(Errno::AGAIN)
}

/// Like [`open`] with `openat` only: one component after the other, links refused.
fn walk(root: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    let folder = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut here: Option<OwnedFd> = None;
    let mut parts = name.to_bytes().split(|byte| *byte == b'/').peekable();
    while let Some(part) = parts.next() {
        let at = here.as_ref().map_or(root, AsFd::as_fd);
        let last = parts.peek().is_none();
        let wanted = if last {
            flags | OFlags::NOFOLLOW
        } else {
            folder
        };
        let opened = rustix::fs::openat(at, part, wanted, Mode::empty())
            .map_err(|errno| refused(at, part, errno))?;
        if last {
            return Ok(opened);
        }
        here = Some(opened);
    }
    Err(Errno::NOENT)
}

/// Maps a link, which fails in many ways, to `EXDEV`.
fn refused(at: BorrowedFd<'_>, part: &[u8], errno: Errno) -> Errno {
    let is_link = || {
        let stat = rustix::fs::statat(at, part, AtFlags::SYMLINK_NOFOLLOW);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
    };
    if matches!(errno, Errno::LOOP | Errno::NOTDIR) && is_link() {
        Errno::XDEV
    } else {
        errno
    }
}

/// Like [`open`], without I/O: `EAGAIN` if I/O would be needed.
pub fn open_cached(root: &Path, name: &CStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    let folder = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let path = if root.as_os_str().is_empty() {
        Path::new(".")
    } else {
        root
    };
    let root = rustix::fs::openat2(CWD, path, folder, Mode::empty(), ResolveFlags::CACHED)?;
    rustix::fs::openat2(
        &root,
        name,
        flags,
        Mode::empty(),
        RESOLVE | ResolveFlags::CACHED,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    const FLAGS: OFlags = crate::storage::opened::OPEN_FLAGS;

    #[test]
    fn names_that_are_not_plain_relative_paths_are_refused() {
        let table: [(&[u8], bool); 14] = [
            (b"a", true),
            (b"a/b.mds", true),
            (b"..a/b..", true),
            (b"\xff", true),
            (b"", false),
            (b"/", false),
            (b"/etc/passwd", false),
            (b"..", false),
            (b"a/../b", false),
            (b"a/..", false),
            (b"./a", false),
            (b"a//b", false),
            (b"a/", false),
            (b"a\0b", false),
        ];
        for (name, plain) in table {
            assert_eq!(is_plain(name), plain, "{}", name.escape_ascii());
        }
    }

    /// A folder with links of every kind, next to a file that must stay out of reach.
    fn folder(name: &str) -> PathBuf {
        let base =
            std::env::temp_dir().join(format!("feedline-beneath-{name}-{}", std::process::id()));
        let root = base.join("root");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        std::fs::write(base.join("secret"), "secret").unwrap();
        std::fs::write(root.join("sub/file"), "file").unwrap();
        symlink("sub", root.join("folder")).unwrap();
        symlink("sub/file", root.join("inside")).unwrap();
        symlink("../secret", root.join("outside")).unwrap();
        symlink("..", root.join("up")).unwrap();
        symlink(base.join("secret"), root.join("absolute")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        base
    }

    #[test]
    fn no_file_outside_of_the_root_is_opened_on_either_path() {
        let base = folder("table");
        let root = root(&base.join("root")).unwrap();
        // The result of openat2, and the result without it.
        let table = [
            ("sub/file", None, None),
            ("inside", None, Some(Errno::XDEV)),
            ("folder/file", None, Some(Errno::XDEV)),
            ("outside", Some(Errno::XDEV), Some(Errno::XDEV)),
            ("up/secret", Some(Errno::XDEV), Some(Errno::XDEV)),
            ("absolute", Some(Errno::XDEV), Some(Errno::XDEV)),
            ("loop", Some(Errno::LOOP), Some(Errno::XDEV)),
            ("sub/gone", Some(Errno::NOENT), Some(Errno::NOENT)),
            ("sub/file/x", Some(Errno::NOTDIR), Some(Errno::NOTDIR)),
        ];
        type Way = fn(BorrowedFd<'_>, &CStr, OFlags) -> Result<OwnedFd, Errno>;
        for (way, pick) in [(open as Way, 0), (walk as Way, 1)] {
            for (name, by_kernel, by_walk) in table {
                let refused = [by_kernel, by_walk][pick];
                let name = std::ffi::CString::new(name).unwrap();
                match (way(root.as_fd(), &name, FLAGS), refused) {
                    (Err(errno), Some(refused)) => assert_eq!(errno, refused, "{name:?}"),
                    // A kernel without openat2 refuses all links.
                    (Err(Errno::XDEV), None) if pick == 0 && !has_openat2() => {}
                    (Ok(fd), None) => {
                        let mut text = String::new();
                        std::fs::File::from(fd).read_to_string(&mut text).unwrap();
                        assert_eq!(text, "file", "{name:?}");
                    }
                    (found, refused) => panic!("{name:?}: {found:?}, {refused:?} expected"),
                }
            }
        }
        std::fs::remove_dir_all(base).unwrap();
    }

    fn has_openat2() -> bool {
        let asked = rustix::fs::openat2(CWD, ".", OFlags::PATH, Mode::empty(), RESOLVE);
        !matches!(asked, Err(Errno::NOSYS | Errno::PERM))
    }
}
