//! The system call that no safe crate wraps: `cachestat`, which counts the cached pages of a file without reading it.

#![allow(unsafe_code)]

use rustix::fd::{AsRawFd, BorrowedFd};
use std::ffi::{c_int, c_long, c_uint};

/// The same number on all architectures (Linux 6.5).
const SYS_CACHESTAT: c_long = 451;

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
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
/// Errors: `ENOSYS` before Linux 6.5, `EPERM` for files of other users on newer kernels and under seccomp filters,
/// `EOPNOTSUPP` on hugetlbfs.
pub(crate) fn cached_pages(fd: BorrowedFd<'_>, offset: u64, len: u64) -> std::io::Result<u64> {
    let range = Range { offset, len };
    let mut stat = Stat::default();
    let flags: c_uint = 0;
    let fd: c_int = fd.as_raw_fd();
    // SAFETY: the descriptor is borrowed. Both pointers point to live locals of the kernel's layout. The kernel reads
    // the first and writes the second, only during the call.
    let result = unsafe { syscall(SYS_CACHESTAT, fd, &raw const range, &raw mut stat, flags) };
    if result == 0 { Ok(stat.cached) } else { Err(std::io::Error::last_os_error()) }
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
            Err(error) => assert!([1, 38, 95].contains(&error.raw_os_error().unwrap()), "{error}"),
        }
    }
}
