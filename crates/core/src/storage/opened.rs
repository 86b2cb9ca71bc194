//! Opens data files. An opened file is the regular file that was indexed; anything else is an error
//! that names what was found.
//!
//! All opens of data files go through [`check_indexed`], which compares:
//!
//! * the length, and the time of the last write;
//! * the inode, except where file systems invent the number anew (FUSE, SMB, FAT, some overlays);
//! * but no time that changes by itself: some FUSE programs return the time of the query.
//!
//! A name that came from a file is opened beneath its folder (`resolve_beneath`).

use super::mounts::invents_inodes;
use super::resolve_beneath;
use crate::storage::{SourceId, Sources};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::Stamp;
use feedline_base::setting::Setting;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;
use std::cell::RefCell;
use std::ffi::CStr;
use std::sync::OnceLock;

/// With `O_NONBLOCK`, a FIFO instead of a file is an error and not an endless wait. The flag is
/// cleared once the file is known to be regular: with it, io_uring returns EAGAIN on file systems
/// without asynchronous reads.
pub const OPEN_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// Opens the file of a source, which must be the indexed one. Errors: those of `Files::get`.
pub fn open_indexed(sources: &Sources, id: SourceId) -> Result<OwnedFd> {
    let opened = open(sources, id, OPEN_FLAGS).map_err(|errno| open_error(sources, id, errno))?;
    check_indexed(sources, id, &opened, None).map_err(|error| error.with_path(sources.path(id)))?;
    Ok(opened)
}

/// Opens the file of a source: at its path, or beneath its root.
pub fn open(sources: &Sources, id: SourceId, flags: OFlags) -> Result<OwnedFd, Errno> {
    match sources.beneath(id) {
        None => with_path(sources, id, |path| {
            rustix::fs::open(path, flags, Mode::empty())
        }),
        Some((root, name)) => {
            let root = resolve_beneath::root(root)?;
            with_cstr(
                |path| path.extend_from_slice(name),
                |name| resolve_beneath::open(root.as_fd(), name, flags),
            )
        }
    }
}

/// Metadata of an open file. An error unless it is a regular file.
pub fn check_regular(fd: &OwnedFd) -> Result<Stat> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| Error::os(Stage::Open, "", errno.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(stat),
        kind => Err(Error::new(
            ErrorKind::NotAFile,
            Stage::Open,
            kind_name(kind),
        )),
    }
}

pub fn same_length(stat: &Stat, indexed: u64) -> Result<()> {
    let len = stat.st_size as u64;
    if len == indexed {
        return Ok(());
    }
    Err(changed(format!(
        "{len} bytes now, {indexed} when it was indexed"
    )))
}

fn changed(message: String) -> Error {
    let message = format!(
        "the file was written or replaced: {message}; reopen the dataset, or restore the old file"
    );
    Error::new(ErrorKind::Changed, Stage::Open, message)
}

/// Checks that an opened file is the one that was indexed, or the one that `first` saw.
///
/// Errors: [`ErrorKind::NotAFile`], [`ErrorKind::Changed`] with both versions.
pub fn check_indexed(
    sources: &Sources,
    id: SourceId,
    fd: &OwnedFd,
    first: Option<&OnceLock<Stamp>>,
) -> Result<Stat> {
    let stat = check_regular(fd)?;
    same_length(&stat, sources.len_of(id))?;
    let now = Stamp::of(&stat);
    let indexed = sources
        .indexed(id)
        .or_else(|| first.map(|first| *first.get_or_init(|| now)));
    match indexed {
        Some(then) if then != now && !may_be_same(fd, &stat, then.modified == now.modified) => {
            Err(changed(match then.modified == now.modified {
                true => format!("another file with the same modification time, {now}"),
                false => format!("last written at {now} now, at {then} when it was indexed"),
            }))
        }
        _ => Ok(stat),
    }
}

/// Whether a file system may give another inode, or another time, for the same file.
fn may_be_same(fd: &OwnedFd, stat: &Stat, same_time: bool) -> bool {
    let invents = rustix::fs::fstatfs(fd)
        .is_ok_and(|system| invents_inodes(system.f_type as u32, stat.st_dev));
    // Two queries that bypass the kernel's cache of attributes.
    let time = || {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        rustix::fs::statx(fd, c"", flags, StatxFlags::MTIME)
            .map(|found| (found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec))
    };
    invents && (same_time || matches!((time(), time()), (Ok(first), Ok(second)) if first != second))
}

/// Calls `f` with the path of a source, without an allocation in steady state.
pub fn with_path<T>(
    sources: &Sources,
    id: SourceId,
    f: impl FnOnce(&CStr) -> Result<T, Errno>,
) -> Result<T, Errno> {
    with_cstr(|path| sources.path_into(id, path), f)
}

/// Calls `f` with the bytes that `write` appends to an empty buffer.
pub fn with_cstr<T>(
    write: impl FnOnce(&mut Vec<u8>),
    f: impl FnOnce(&CStr) -> Result<T, Errno>,
) -> Result<T, Errno> {
    thread_local!(static PATH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
    PATH.with_borrow_mut(|path| {
        path.clear();
        write(path);
        path.push(0);
        // No existing path has a NUL.
        f(CStr::from_bytes_with_nul(path).map_err(|_| Errno::NOENT)?)
    })
}

const OUTSIDE: &str = "the name comes from a file of the dataset, but a symbolic link on its path \
     leads out of the dataset's root: replace the link with the file";

/// The error of a file that could not be opened.
pub fn open_error(sources: &Sources, id: SourceId, errno: Errno) -> Error {
    unopened(errno, sources.beneath(id).is_some()).with_path(sources.path(id))
}

pub(super) fn unopened(errno: Errno, rooted: bool) -> Error {
    let typed = |kind, message: &str| {
        Error::new(kind, Stage::Open, message).with_source(std::io::Error::from(errno))
    };
    match errno {
        Errno::MFILE | Errno::NFILE => {
            let message = format!(
                "too many open files (the soft limit is {}, see `ulimit -n`)",
                descriptor_limit()
            );
            typed(ErrorKind::Limit, &message)
        }
        Errno::XDEV if rooted => {
            let hint = Setting::FollowLinks.hint(|follow| format!(", or give {follow}"));
            typed(ErrorKind::NotAFile, &format!("{OUTSIDE}{hint}"))
        }
        Errno::LOOP => typed(ErrorKind::NotAFile, "a loop of symbolic links"),
        Errno::NXIO | Errno::NODEV => typed(ErrorKind::NotAFile, "a socket or device"),
        Errno::NOTDIR => typed(ErrorKind::NotFound, ""),
        _ => Error::os(Stage::Open, String::new(), errno.into()),
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a FIFO",
        FileType::Directory => "a folder",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Socket => "a socket",
        _ => "neither file nor folder",
    }
}

/// The soft limit of open files.
pub fn descriptor_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile)
        .current
        .unwrap_or(1 << 20)
}
