//! Copies bytes from the page cache at once, on the caller's thread: `preadv2` with `RWF_NOWAIT`,
//! which never blocks.
//!
//! A miss must cost the device nothing. But since Linux 5.x, a `RWF_NOWAIT` read that misses
//! *starts* the read into the page cache before it returns EAGAIN (measured on 6.18: all 32 pages
//! were cached 0.2 s later). An O_DIRECT read after it would move the same bytes twice. So
//! `cachestat` is called first, except after many hits in a row. If the kernel refuses `cachestat`,
//! probes become rarer while they miss.

use super::fault_hook::FaultHook;
use super::fault_point::Call;
use super::files::{Files, Seen};
use super::progress::{Next, RETRIES_MAX};
use super::syscalls;
use crate::counters::add;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::storage::{Extent, Sources};
use rustix::fd::AsFd;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Maximum number of reads in a row that skip the probe, if `cachestat` is not available.
const SKIP_MAX: u32 = 32;

/// After this many hits in a row, the next read is tried without `cachestat`. With half of the data
/// cached, a `cachestat` per read costs a microsecond, and a miss without it costs a second read
/// from the device.
const SURE: u32 = 32;

/// The page cache as a reader that returns at once. Many threads share it; a hit takes no lock.
pub struct PageCache {
    files: Files,
    hits: AtomicU64,
    misses: AtomicU64,
    /// Hits in a row, up to `SURE`. A hint; a race costs one `cachestat`.
    sure: AtomicU32,
    /// Whether `cachestat` is refused here.
    blind: AtomicBool,
    /// If `cachestat` is refused: misses in a row (capped), and the number of reads still to skip.
    streak: AtomicU32,
    skip: AtomicU32,
    refused: OnceLock<String>,
}

/// The answer of the page cache.
#[derive(Debug)]
pub enum Cached {
    /// All bytes were cached and are in `dst`.
    Hit,
    /// Some bytes were missing; `dst` holds garbage. Read them with a [`Reader`](super::Reader).
    Miss,
    /// The read cannot work: the file is gone, changed, or not a file.
    Failed(Error),
}

impl PageCache {
    /// The page cache for `sources`, with a descriptor budget as in
    /// [`ReaderOptions::fds`](super::ReaderOptions::fds).
    pub fn new(sources: Arc<Sources>, fds: Option<u32>) -> Self {
        Self {
            files: Files::new(sources, 1, fds).nonblocking(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            sure: AtomicU32::new(0),
            blind: AtomicBool::new(false),
            streak: AtomicU32::new(0),
            skip: AtomicU32::new(0),
            refused: OnceLock::new(),
        }
    }

    pub fn through(self, hook: FaultHook, seen: Option<Seen>) -> Self {
        Self {
            files: self.files.through(hook, seen),
            ..self
        }
    }

    /// Copies the extent to the start of `dst` if that needs no I/O. Bytes of a memory source are
    /// always a hit.
    pub fn try_read(&self, extent: &Extent, dst: &mut [u8]) -> Cached {
        let result = self
            .files
            .check(extent, dst.len())
            .and_then(|()| self.copied(extent, dst));
        match result {
            Ok(true) => {
                add(&self.hits, 1);
                Cached::Hit
            }
            Ok(false) => {
                add(&self.misses, 1);
                Cached::Miss
            }
            Err(error) => Cached::Failed(self.files.sources().at(error, extent)),
        }
    }

    /// Number of extents found.
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// Number of extents not found.
    pub fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    /// Why every read misses, if the kernel or file system cannot read without blocking.
    #[cfg(feature = "unstable")]
    pub fn refused(&self) -> Option<&str> {
        self.refused.get().map(String::as_str)
    }

    fn copied(&self, extent: &Extent, dst: &mut [u8]) -> Result<bool> {
        let dst = &mut dst[..extent.len as usize];
        let sources = self.files.sources();
        if sources.copy_resident(extent, dst) {
            return Ok(true);
        }
        if sources.is_staged(extent.source) {
            // Only the cache's file is tried, because a mount may not respond. If that fails, the
            // bytes come from the network.
            return Ok(sources.read_cached(extent, || self.look(extent, dst).unwrap_or(false)));
        }
        self.look(extent, dst)
    }

    fn look(&self, extent: &Extent, dst: &mut [u8]) -> Result<bool> {
        if self.refused.get().is_some() || self.let_pass() {
            return Ok(false);
        }
        let Some(file) = self.files.get_cached(extent.source)? else {
            return Ok(false);
        };
        let sure = self.sure.load(Ordering::Relaxed);
        if sure < SURE
            && !self.blind.load(Ordering::Relaxed)
            && !self.seems_cached(file.as_fd(), extent)
        {
            self.sure.store(0, Ordering::Relaxed);
            return Ok(false);
        }
        let hit = self.copy(file.as_fd(), extent, dst)?;
        if !hit {
            self.sure.store(0, Ordering::Relaxed);
        } else if sure < SURE {
            self.sure.store(sure + 1, Ordering::Relaxed);
        }
        if self.blind.load(Ordering::Relaxed) {
            self.space_out(hit);
        }
        Ok(hit)
    }

    /// Copies the bytes; false as soon as a byte is missing.
    fn copy(&self, fd: impl AsFd, extent: &Extent, dst: &mut [u8]) -> Result<bool> {
        let mut done = 0;
        let mut retries = 0;
        while done < dst.len() {
            let next = Next {
                offset: extent.offset + done as u64,
                at: done,
                len: dst.len() - done,
            };
            let turn = self
                .files
                .fault_hook()
                .inject(|| self.files.attempt(Call::Cached, extent, next, 1));
            let read = turn.around(next, dst, |next, bytes| {
                preadv2(
                    &fd,
                    &mut [IoSliceMut::new(bytes)],
                    next.offset,
                    ReadWriteFlags::NOWAIT,
                )
            });
            match read {
                Ok(0) => {
                    let message = format!("{} bytes expected, {done} read", extent.len);
                    let error = Error::new(ErrorKind::Truncated, Stage::Read, message);
                    return Err(error.with_amounts(extent.len, done as u64));
                }
                Ok(read) => done += read,
                Err(Errno::INTR) if retries < RETRIES_MAX => retries += 1,
                // The blocking read that follows reports errors better.
                Err(Errno::INTR) => return Ok(false),
                Err(Errno::AGAIN) => return Ok(false),
                Err(errno @ (Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM | Errno::INVAL)) => {
                    self.refused.get_or_init(|| {
                        format!("reads without blocking (RWF_NOWAIT) are refused: {errno}")
                    });
                    return Ok(false);
                }
                Err(errno) => return Err(Error::os(Stage::Read, "", errno.into())),
            }
        }
        Ok(true)
    }

    fn seems_cached(&self, fd: rustix::fd::BorrowedFd<'_>, extent: &Extent) -> bool {
        let page = rustix::param::page_size() as u64;
        let pages = (extent.offset + extent.len).div_ceil(page) - extent.offset / page;
        match syscalls::cached_pages(fd, extent.offset, extent.len) {
            Ok(cached) => cached >= pages,
            Err(_) => {
                self.blind.store(true, Ordering::Relaxed);
                true
            }
        }
    }

    /// Whether to skip this read, because the last probes missed and a probe has a cost.
    fn let_pass(&self) -> bool {
        let left = self.skip.load(Ordering::Relaxed);
        if left > 0 {
            self.skip.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }

    fn space_out(&self, hit: bool) {
        let streak = if hit {
            0
        } else {
            (self.streak.load(Ordering::Relaxed) * 2).clamp(1, SKIP_MAX)
        };
        self.streak.store(streak, Ordering::Relaxed);
        self.skip.store(streak, Ordering::Relaxed);
    }
}
