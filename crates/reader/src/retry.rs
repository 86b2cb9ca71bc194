//! Retries of reads with a transient error: done by the caller, one at a time, with pauses.
//!
//! ```text
//! failed ─► pause ─► open the file anew ─► read ─┬─► the bytes
//!             ▲                                   ├─► EIO, the first time: past the page cache, which may be bad
//!             └─────── transient, up to 5 × ──────┴─► otherwise: the error
//! ```
//!
//! Opening the file anew fixes a stale handle of a network file system.
//!
//! Limits: five tries with pauses of about 110 ms together; a bounce buffer of 1 MiB for each read
//! past the page cache. The result is the whole extent or an error, as from any reader.

use super::fault_hook::FaultHook;
use super::files::{Files, Seen, probe};
use super::pread;
use crate::ReaderOptions;
use crate::counters::{Counters, add};
use feedline_base::error::{Error, Result};
use feedline_core::memory::region::Bytes as RegionBytes;
use feedline_core::storage::transient::{PAUSES, code};
use feedline_core::storage::{Extent, Sources, may_pass};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes per read past the page cache.
const BOUNCE: usize = 1 << 20;

/// Repeats failed reads.
pub struct Again {
    /// Opens the file for each read, because the open descriptor may be stale.
    files: Files,
    counters: Counters,
    recovered: AtomicU64,
}

impl Again {
    /// Retries reads that failed in the reader that was opened with `options`.
    pub fn new(sources: Arc<Sources>, options: &ReaderOptions, seen: Option<Seen>) -> Self {
        let files = Files::new(sources, 1, Some(0)).through(FaultHook::of(options), seen);
        Self {
            files,
            counters: Counters::default(),
            recovered: AtomicU64::new(0),
        }
    }

    /// A table of the same files that stay open, for the caller's own reads.
    pub fn kept_open(&self) -> Files {
        self.files.another(1, None)
    }

    /// A table of the same files for reads aligned to `align`. Each read opens its file.
    pub fn aligned(&self, align: usize) -> Files {
        self.files.another(align, Some(0))
    }

    /// Number of failed reads that succeeded on a retry.
    pub fn recovered(&self) -> u64 {
        self.recovered.load(Ordering::Relaxed)
    }

    /// Reads the bytes of `extent` into the start of `buf`, which must have room for them. Tries
    /// more than once only if that may help.
    ///
    /// Errors: those of a [`Reader`](super::Reader)'s completions, from the last try.
    pub fn read(&self, extent: &Extent, buf: &mut [u8]) -> Result<()> {
        let (done, tries) = self.tries(extent, buf);
        add(&self.recovered, u64::from(done.is_ok() && tries > 1));
        done
    }

    /// Like [`read`](Self::read), after a first read that failed with `error`: the pause comes
    /// first.
    pub fn read_after(&self, error: &Error, extent: &Extent, buf: &mut [u8]) -> Result<()> {
        self.rest(PAUSES[0]);
        let done = match self.once(extent, buf, code(error) == Some(Errno::IO)) {
            // The read past the page cache may itself be the cause of the error.
            Err(error) if may_pass(&error) => self.tries(extent, buf).0,
            done => done,
        };
        add(&self.recovered, u64::from(done.is_ok()));
        done
    }

    /// Reads, with retries as long as they may help. Returns the result and the number of tries.
    fn tries(&self, extent: &Extent, buf: &mut [u8]) -> (Result<()>, usize) {
        let mut past_cache = false;
        let mut last = self.once(extent, buf, past_cache);
        for (tried, pause) in PAUSES.into_iter().enumerate() {
            match last {
                Err(error)
                    if may_pass(&error) && !(past_cache && code(&error) == Some(Errno::IO)) =>
                {
                    past_cache = code(&error) == Some(Errno::IO)
                }
                done => return (done, tried + 1),
            }
            self.rest(pause);
            last = self.once(extent, buf, past_cache);
        }
        (last, PAUSES.len() + 1)
    }

    fn rest(&self, pause: Duration) {
        std::thread::sleep(self.files.fault_hook().pause(pause));
    }

    fn once(&self, extent: &Extent, buf: &mut [u8], past_cache: bool) -> Result<()> {
        let checked = self.files.check(extent, buf.len());
        if checked.is_ok() && self.files.sources().copy_resident(extent, buf) {
            return Ok(());
        }
        if checked.is_ok() && self.files.sources().is_remote(extent.source) {
            return self
                .files
                .sources()
                .object(extent.source)?
                .read(extent.offset, &mut buf[..extent.len as usize]);
        }
        let read = checked.and_then(|()| match past_cache {
            true => self.past_cache(extent, buf),
            false => self.plainly(&self.files, extent, buf).map(drop),
        });
        read.map_err(|error| self.files.sources().at(error, extent))
    }

    /// Reads the bytes of `extent`, which must be within its file, once, with a descriptor of
    /// `files`.
    pub fn plainly(&self, files: &Files, extent: &Extent, buf: &mut [u8]) -> Result<usize> {
        match extent.len {
            0 => Ok(0),
            _ => pread::read_file(files, extent, buf, &self.counters),
        }
    }

    fn past_cache(&self, extent: &Extent, buf: &mut [u8]) -> Result<()> {
        let align = probe(self.files.sources()).align;
        if align > feedline_base::PAGE {
            return self.plainly(&self.files, extent, buf).map(drop);
        }
        let direct = self.aligned(align);
        let mut bounce = RegionBytes::new(
            BOUNCE + 2 * direct.align(),
            "a read that bypasses the page cache",
        )?;
        for (at, piece) in buf[..extent.len as usize].chunks_mut(BOUNCE).enumerate() {
            let part = Extent {
                offset: extent.offset + (at * BOUNCE) as u64,
                len: piece.len() as u64,
                ..*extent
            };
            let start = self.plainly(&direct, &part, bounce.as_mut_slice())?;
            piece.copy_from_slice(&bounce.as_slice()[start..start + piece.len()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_base::error::ErrorKind;

    #[test]
    fn both_ways_bring_the_same_bytes_of_any_extent() {
        let path = std::env::temp_dir().join(format!("feedline-again-{}", std::process::id()));
        let bytes: Vec<u8> = (0..3_u32 << 20)
            .map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        std::fs::write(&path, &bytes).unwrap();
        let mut sources = Sources::new();
        let source = sources.file(&path, bytes.len() as u64).unwrap();
        let again = Again::new(Arc::new(sources), &ReaderOptions::default(), None);
        for (offset, len) in [
            (0, 0),
            (0, 1),
            (4095, 2),
            (1, 3 << 20 >> 1),
            (0, 3 << 20),
            ((3 << 20) - 7, 7),
        ] {
            let extent = Extent {
                source,
                offset,
                len,
            };
            for past_cache in [false, true] {
                let mut got = vec![0; len as usize];
                again.once(&extent, &mut got, past_cache).unwrap();
                assert!(
                    got == bytes[offset as usize..][..len as usize],
                    "{offset} {len} {past_cache}"
                );
            }
        }
        std::fs::remove_file(&path).unwrap();
        let error = again
            .read(
                &Extent {
                    source,
                    offset: 8,
                    len: 4,
                },
                &mut [0; 4],
            )
            .unwrap_err();
        assert_eq!(
            (error.kind(), error.site().path.as_deref()),
            (ErrorKind::NotFound, Some(&*path))
        );
        assert_eq!((error.site().offset, error.site().len), (Some(8), Some(4)));
    }
}
