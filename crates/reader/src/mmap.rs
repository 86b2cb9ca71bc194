//! Threads that copy out of memory maps without touching them. The kernel copies
//! (`process_vm_readv` on our own process), so a file truncated under its map gives a short count
//! and not a SIGBUS.
//!
//! A map does not do two things by itself:
//! * Read-ahead: on random access the kernel reads single pages, so the thread requests the whole
//!   extent first.
//! * Notice the end of the file inside of its last page: the map shows zeros there, so the length
//!   is checked again after the copy.

#![allow(unsafe_code)]

use super::fault_point::{Attempt, Call};
use super::files::{File, Files};
use super::progress::{Failure, Next, Progress, RETRIES_MAX, Step};
use super::syscalls::IoVec;
use super::threads::BlockingRead;
use crate::Footprint;
use crate::counters::{Counters, add};
use feedline_base::error::{Error, Result, Stage};
use feedline_core::storage::Extent;
use feedline_report::meter::ReadStats;
use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::ffi::{c_int, c_ulong};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum number of kept maps: a quarter of the kernel's default `vm.max_map_count`. Beyond it, each read
/// maps its extent.
const MAPS_MAX: usize = 16_384;

/// Copies out of maps.
pub struct Mmap {
    files: Files,
    /// One cell per source, if files stay open and are few enough.
    maps: Option<Box<[OnceLock<MmapRaw>]>>,
    /// `process_vm_readv` is refused (a seccomp filter), so `pread` is used instead.
    denied: AtomicBool,
}

unsafe extern "C" {
    fn process_vm_readv(
        pid: c_int,
        local: *const IoVec,
        local_count: c_ulong,
        remote: *const IoVec,
        remote_count: c_ulong,
        flags: c_ulong,
    ) -> isize;
}

impl Mmap {
    pub fn new(files: Files) -> Self {
        let count = files.kept_count().filter(|count| *count <= MAPS_MAX);
        let maps = count.map(|count| (0..count).map(|_| OnceLock::new()).collect());
        Self {
            files,
            maps,
            denied: AtomicBool::new(false),
        }
    }

    fn read_file(&self, extent: &Extent, dst: &mut [u8], counters: &Counters) -> Result<()> {
        let file = self.files.get(extent.source)?;
        add(&counters.buffered_reads, 1);
        if !self.denied.load(Ordering::Relaxed) {
            let copied = self
                .read_map(&file, extent, dst)
                .map_err(|errno| Failure::Os(errno).error(extent))?;
            add(&counters.bytes_moved, copied as u64);
            if !self.denied.load(Ordering::Relaxed) {
                return self.check_end(&file, extent, copied);
            }
        }
        self.read_plain(&file, extent, dst, counters)
    }

    /// Copies as much as possible.
    fn read_map(&self, file: &File, extent: &Extent, dst: &mut [u8]) -> Result<usize, Errno> {
        if let Some(maps) = &self.maps {
            let cell = &maps[extent.source.index()];
            let map = match cell.get() {
                Some(map) => map,
                None => {
                    let fresh = map(file, 0, self.files.sources().len_of(extent.source) as usize)?;
                    cell.get_or_init(|| fresh)
                }
            };
            return self.copy(map, 0, extent, dst);
        }
        let map = map(file, extent.offset, dst.len())?;
        self.copy(&map, extent.offset, extent, dst)
    }

    /// Copies out of the map, which starts at `base` of the file, until `dst` is full or a page is
    /// not available.
    fn copy(
        &self,
        map: &MmapRaw,
        base: u64,
        extent: &Extent,
        dst: &mut [u8],
    ) -> Result<usize, Errno> {
        let start = (extent.offset - base) as usize;
        let there = base..base + map.len() as u64;
        let attempt = |call, next| Attempt {
            there: there.clone(),
            ..self.files.attempt(call, extent, next, 1)
        };
        let turn = |call, next| self.files.fault_hook().inject(|| attempt(call, next));
        let next = |done| Next {
            offset: extent.offset + done as u64,
            at: done,
            len: extent.len as usize - done,
        };
        // First start the reads of all pages, then wait for them: page faults alone would read page
        // by page. Both calls are hints. The copy loads the pages that they miss, and reports pages
        // that are not available.
        let _ = map.advise_range(Advice::WillNeed, start, dst.len());
        let _ = turn(Call::Populate, next(0))
            .opened(|| Ok(map.advise_range(Advice::PopulateRead, start, dst.len())));
        let mut done = 0;
        let mut retries = 0;
        while done < dst.len() {
            match turn(Call::Copy, next(done)).around(next(done), dst, |next, dst| {
                copy_once(map, (next.offset - base) as usize, dst)
            }) {
                Ok(0) | Err(Errno::FAULT) => break,
                Ok(count) => done += count,
                Err(Errno::INTR | Errno::AGAIN) if retries < RETRIES_MAX => retries += 1,
                Err(Errno::PERM | Errno::NOSYS | Errno::ACCESS) => {
                    self.denied.store(true, Ordering::Relaxed);
                    break;
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(done)
    }

    /// Checks that the copied bytes belong to the file. Past its end, a map shows zeros up to the
    /// end of the page.
    fn check_end(&self, file: &File, extent: &Extent, copied: usize) -> Result<()> {
        let len = file
            .len_now()
            .map_err(|errno| Failure::Os(errno).error(extent))?;
        if len < extent.offset + extent.len {
            return Err(Failure::Truncated(len.saturating_sub(extent.offset)).error(extent));
        }
        if (copied as u64) < extent.len {
            let message = format!("{} bytes expected, {copied} read", extent.len);
            return Err(Error::os(Stage::Read, message, Errno::IO.into()));
        }
        Ok(())
    }

    /// Reads the bytes with `pread`.
    fn read_plain(
        &self,
        file: &File,
        extent: &Extent,
        dst: &mut [u8],
        counters: &Counters,
    ) -> Result<()> {
        let mut progress = Progress::new(*extent, 1);
        loop {
            let next = progress.next();
            let turn = self
                .files
                .fault_hook()
                .inject(|| self.files.attempt(Call::Read, extent, next, 1));
            let result = turn.around(next, dst, |next, bytes| {
                rustix::io::pread(file, bytes, next.offset)
            });
            add(&counters.bytes_moved, result.unwrap_or(0) as u64);
            match progress.step(result) {
                Step::Done(_) => return Ok(()),
                Step::Continue => add(&counters.short_reads, 1),
                Step::Retry | Step::Buffered => add(&counters.retries, 1),
                Step::Fail(failure) => return Err(failure.error(extent)),
            }
        }
    }
}

/// Maps `len` bytes from `offset`. The result starts at `offset`, whatever its alignment.
fn map(file: &File, offset: u64, len: usize) -> Result<MmapRaw, Errno> {
    let mapped = MmapOptions::new()
        .offset(offset)
        .len(len)
        .map_raw_read_only(&file.as_fd());
    mapped.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))
}

/// One copy by the kernel. A short count ends at a page that is not available.
fn copy_once(map: &MmapRaw, start: usize, dst: &mut [u8]) -> Result<usize, Errno> {
    assert!(start + dst.len() <= map.len());
    let local = IoVec {
        base: dst.as_mut_ptr(),
        len: dst.len(),
    };
    let remote = IoVec {
        base: map.as_mut_ptr().wrapping_add(start),
        len: dst.len(),
    };
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: `local` is a live, exclusive slice, the only memory that is written. `remote` lies in
    // a live map of this process and is only read, and by the kernel, which reports a missing page
    // by a short count or EFAULT.
    let count = unsafe { process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(count)
        .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

impl BlockingRead for Mmap {
    const NAME: &'static str = "mmap";

    fn read(&self, extent: &Extent, buf: &mut [u8], counters: &Counters) -> Result<usize> {
        self.files
            .check(extent, buf.len())
            .map_err(|error| self.files.sources().at(error, extent))?;
        let dst = &mut buf[..extent.len as usize];
        if !self.files.sources().copy_resident(extent, dst) {
            self.read_file(extent, dst, counters)
                .map_err(|error| self.files.sources().at(error, extent))?;
        }
        Ok(0)
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        self.files.footprint(extent)
    }

    fn mem_align(&self) -> usize {
        1
    }

    fn stats(&self, stats: &mut ReadStats) {
        stats.opens = self.files.opens();
        stats.fallbacks = u64::from(self.denied.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_core::storage::Sources;
    use std::sync::Arc;

    #[test]
    fn if_the_kernel_refuses_the_copy_pread_brings_the_bytes() {
        let path = std::env::current_exe().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let mut sources = Sources::new();
        let source = sources.file(&path, bytes.len() as u64).unwrap();
        let mmap = Mmap::new(Files::new(Arc::new(sources), 1, None));
        let extent = Extent {
            source,
            offset: 5000,
            len: 10_000,
        };
        for denied in [false, true] {
            mmap.denied.store(denied, Ordering::Relaxed);
            let mut buf = vec![0; 10_000];
            assert_eq!(
                mmap.read(&extent, &mut buf, &Counters::default()).unwrap(),
                0
            );
            assert_eq!(buf, bytes[5000..15_000], "denied: {denied}");
        }
    }
}
