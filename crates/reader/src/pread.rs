//! Threads that call `pread`: the reader that works everywhere.

use super::fault_point::Call;
use super::files::Files;
use super::progress::{Progress, Step};
use super::threads::BlockingRead;
use crate::Footprint;
use crate::counters::{Counters, add};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::storage::Extent;
use feedline_report::meter::ReadStats;

/// Reads with `pread`, bypassing the page cache if `files` says so.
pub struct Pread {
    files: Files,
}

impl Pread {
    pub fn new(files: Files) -> Self {
        Self { files }
    }
}

/// Reads the extent, bypassing the page cache if `files` says so, and returns its offset in `buf`. The
/// extent must not be empty and must be within its file.
pub(super) fn read_file(
    files: &Files,
    extent: &Extent,
    buf: &mut [u8],
    counters: &Counters,
) -> Result<usize> {
    let file = files.get(extent.source)?;
    let mut progress = Progress::new(*extent, files.align_of(&file));
    check_aligned(buf, progress.is_direct(), files.align())?;
    loop {
        let next = progress.next();
        let reads = if progress.is_direct() {
            &counters.direct_reads
        } else {
            &counters.buffered_reads
        };
        add(reads, 1);
        let turn = files
            .fault_hook()
            .inject(|| files.attempt(Call::Read, extent, next, progress.align()));
        let result = turn.around(next, buf, |next, bytes| {
            rustix::io::pread(&*file, bytes, next.offset)
        });
        add(&counters.bytes_moved, result.unwrap_or(0) as u64);
        match progress.step(result) {
            Step::Done(start) => return Ok(start),
            Step::Continue => add(
                &counters.short_reads,
                u64::from(result.is_ok_and(|read| read < next.len)),
            ),
            Step::Retry => add(&counters.retries, 1),
            Step::Buffered => files.make_buffered(&file),
            Step::Fail(failure) => return Err(failure.error(extent)),
        }
    }
}

/// Checks the buffer of a read bypassing the page cache for alignment.
pub(super) fn check_aligned(buf: &[u8], direct: bool, align: usize) -> Result<()> {
    if direct && !buf.as_ptr().addr().is_multiple_of(align) {
        let message = format!("O_DIRECT needs a buffer aligned to {align} bytes; this one is not");
        return Err(Error::new(ErrorKind::Config, Stage::Read, message));
    }
    Ok(())
}

impl BlockingRead for Pread {
    const NAME: &'static str = "pread";

    fn read(&self, extent: &Extent, buf: &mut [u8], counters: &Counters) -> Result<usize> {
        self.files
            .check(extent, buf.len())
            .map_err(|error| self.files.sources().at(error, extent))?;
        if self.files.sources().copy_resident(extent, buf) {
            return Ok(0);
        }
        read_file(&self.files, extent, buf, counters)
            .map_err(|error| self.files.sources().at(error, extent))
    }

    fn footprint(&self, extent: &Extent) -> Footprint {
        self.files.footprint(extent)
    }

    fn mem_align(&self) -> usize {
        self.files.align()
    }

    fn stats(&self, stats: &mut ReadStats) {
        stats.opens = self.files.opens();
        stats.fallbacks = self.files.fallbacks();
    }
}
