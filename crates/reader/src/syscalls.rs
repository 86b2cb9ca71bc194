//! The system calls that no safe crate wraps: `cachestat`, which counts the cached pages of a file
//! without reading it, and `fcntl` for locks on a range that belong to an open file.

#![allow(unsafe_code)]

use rustix::fd::{AsRawFd, BorrowedFd};
use std::ffi::{c_int, c_long, c_uint};

/// The same number on all architectures (Linux 6.5).
const SYS_CACHESTAT: c_long = 451;

/// `F_OFD_SETLK`.
const SETLK: c_int = 37;

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
}

/// `struct iovec`.
#[repr(C)]
pub(super) struct IoVec {
    pub(super) base: *mut u8,
    pub(super) len: usize,
}

/// `struct flock` of 64-bit systems.
#[repr(C)]
struct Flock {
    kind: i16,
    whence: i16,
    start: i64,
    len: i64,
    pid: i32,
}

/// Locks a range of a file for this open file alone, until it is closed or unlocked. False if
/// another open file holds the lock.
///
/// Errors: the system's, such as `EINVAL` on a file system without such locks.
pub fn lock_range(fd: BorrowedFd<'_>, start: u64, len: u64) -> std::io::Result<bool> {
    set_lock(fd, 1, start, len)
}

/// Releases all locks of an open file, also those of a forked child that shares it.
pub fn unlock(fd: BorrowedFd<'_>) {
    let _ = set_lock(fd, 2, 0, 0);
}

/// `kind`: F_WRLCK is 1, F_UNLCK is 2. A length of 0 is the whole file.
fn set_lock(fd: BorrowedFd<'_>, kind: i16, start: u64, len: u64) -> std::io::Result<bool> {
    let lock = Flock {
        kind,
        whence: 0,
        start: start as i64,
        len: len as i64,
        pid: 0,
    };
    // SAFETY: the descriptor is borrowed, and the pointer points to a live local of the kernel's
    // layout, which the kernel reads only during the call.
    let result = unsafe { fcntl(fd.as_raw_fd(), SETLK, &raw const lock) };
    match std::io::Error::last_os_error() {
        _ if result == 0 => Ok(true),
        error if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
        error => Err(error),
    }
}

/// `struct cachestat_range`.
#[repr(C)]
struct Range {
    offset: u64,
    len: u64,
}

/// `struct cachestat`, in pages.
#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Pages of the range that are in the page cache (or on their way into it).
///
/// Errors: `ENOSYS` before Linux 6.5, `EPERM` for files of other users on newer kernels and under
/// seccomp filters, `EOPNOTSUPP` on hugetlbfs.
pub(crate) fn cached_pages(fd: BorrowedFd<'_>, offset: u64, len: u64) -> std::io::Result<u64> {
    let range = Range { offset, len };
    let mut stat = Stat::default();
    let flags: c_uint = 0;
    let fd: c_int = fd.as_raw_fd();
    // SAFETY: the descriptor is borrowed. Both pointers point to live locals of the kernel's
    // layout. The kernel reads the first and writes the second, only during the call.
    let result = unsafe { syscall(SYS_CACHESTAT, fd, &raw const range, &raw mut stat, flags) };
    if result == 0 {
        Ok(stat.cached)
    } else {
        Err(std::io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;

    #[test]
    fn pages_just_read_are_cached_or_cachestat_is_refused() {
        let path = std::env::current_exe().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        match cached_pages(file.as_fd(), 0, bytes.len() as u64) {
            Ok(pages) => assert!(pages > 0),
            Err(error) => assert!(
                [1, 38, 95].contains(&error.raw_os_error().unwrap()),
                "{error}"
            ),
        }
    }
}
