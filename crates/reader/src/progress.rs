//! The requests of a read and how it continues: pure, shared by all readers that may bypass the
//! page cache.
//!
//! ```text
//! extent          |......wanted......|
//! O_DIRECT   |----+------------------+--|     start and end on multiples of `align`
//! short read |===========|                    the next read starts at a multiple of `align` again, so a few bytes
//!                     |--+-----------+--|     are read twice; no new byte = the file ends here
//! ```

use crate::Footprint;
use feedline_base::error::{Error, ErrorKind, Stage};
use feedline_core::storage::Extent;
use rustix::io::Errno;

/// Maximum bytes per system call: a power of two below the kernel's 0x7ffff000, and the largest
/// piece of memory that io_uring registers.
pub(crate) const READ_MAX: usize = 1 << 30;

/// After this many `EINTR` and `EAGAIN` in a row without a byte, a read fails rather than spins.
pub(crate) const RETRIES_MAX: u32 = 1000;

/// The next step after a read returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// All bytes are in the buffer; the extent starts at this offset of the buffer.
    Done(usize),
    /// Some bytes came: continue at `next()`.
    Continue,
    /// No byte came: repeat the same read.
    Retry,
    /// `O_DIRECT` was refused: clear the flag; `next()` starts over without it.
    Buffered,
    /// The read failed.
    Fail(Failure),
}

/// Why a read failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The file ends before the extent does; this many bytes of the extent were read.
    Truncated(u64),
    /// An error of the operating system.
    Os(Errno),
}

/// The next read: file offset, offset in the buffer, number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    pub(crate) offset: u64,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// A read in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    extent: Extent,
    /// First file byte to read: `extent.offset` rounded down.
    start: u64,
    /// Bytes from `start` to the extent's end, rounded up to `align`.
    span: usize,
    /// Alignment of offsets, lengths and memory; 1 without `O_DIRECT`.
    align: usize,
    /// Number of filled bytes in the buffer.
    got: usize,
    retries: u32,
}

/// What a read of `extent` requires if offsets, lengths and memory must be multiples of `align` (a
/// power of two).
pub(crate) fn footprint(extent: &Extent, align: usize) -> Footprint {
    if extent.len == 0 {
        return Footprint {
            bytes: 0,
            in_place: true,
        };
    }
    let progress = Progress::new(*extent, align);
    Footprint {
        bytes: progress.span,
        in_place: progress.start == extent.offset && progress.span as u64 == extent.len,
    }
}

impl Progress {
    /// The read of `extent`, which must not be empty, with `align` a power of two.
    pub(crate) fn new(extent: Extent, align: usize) -> Self {
        let wide = align as u64;
        let start = extent.offset & !(wide - 1);
        // Saturating: an extent past 2^64 is refused before it is read, but its footprint may be
        // requested.
        let end = extent
            .offset
            .saturating_add(extent.len)
            .checked_next_multiple_of(wide)
            .unwrap_or(u64::MAX);
        Self {
            extent,
            start,
            span: (end - start) as usize,
            align,
            got: 0,
            retries: 0,
        }
    }

    /// Whether the read bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.align > 1
    }

    /// The alignment of offsets, lengths and memory.
    pub(crate) fn align(&self) -> usize {
        self.align
    }

    /// The next range to read.
    pub(crate) fn next(&self) -> Next {
        let at = self.got & !(self.align - 1);
        Next {
            offset: self.start + at as u64,
            at,
            len: (self.span - at).min(READ_MAX),
        }
    }

    /// The next step after the read of `next()` returned `result`.
    pub(crate) fn step(&mut self, result: Result<usize, Errno>) -> Step {
        match result {
            Ok(read) => self.advance(read),
            Err(Errno::INTR | Errno::AGAIN) if self.retries < RETRIES_MAX => {
                self.retries += 1;
                Step::Retry
            }
            // The alignment differs on this file, or its file system accepts O_DIRECT only in
            // `open`.
            Err(Errno::INVAL) if self.is_direct() => {
                *self = Self::new(self.extent, 1);
                Step::Buffered
            }
            Err(errno) => Step::Fail(Failure::Os(errno)),
        }
    }

    fn advance(&mut self, read: usize) -> Step {
        let next = self.next();
        let total = next.at + read.min(next.len);
        let skip = (self.extent.offset - self.start) as usize;
        if total >= skip + self.extent.len as usize {
            return Step::Done(skip);
        }
        if total <= self.got {
            return Step::Fail(Failure::Truncated(self.got.saturating_sub(skip) as u64));
        }
        self.got = total;
        self.retries = 0;
        Step::Continue
    }
}

impl Failure {
    /// The error without its path.
    pub(crate) fn error(self, extent: &Extent) -> Error {
        let error = match self {
            Self::Truncated(read) => {
                let message = format!("{} bytes expected, {read} read", extent.len);
                Error::new(ErrorKind::Truncated, Stage::Read, message)
                    .with_amounts(extent.len, read)
            }
            Self::Os(errno) => Error::os(Stage::Read, "", errno.into()),
        };
        error.with_range(extent.offset, extent.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_core::storage::Sources;
    use proptest::prelude::*;

    fn extent(offset: u64, len: u64) -> Extent {
        let source = Sources::new().memory([].into());
        Extent {
            source,
            offset,
            len,
        }
    }

    /// Plays `results` and returns the requested reads and the last step.
    fn play(
        extent: Extent,
        align: usize,
        results: &[Result<usize, Errno>],
    ) -> (Vec<(u64, usize, usize)>, Step) {
        let mut progress = Progress::new(extent, align);
        let mut reads = Vec::new();
        let mut last = Step::Retry;
        for result in results {
            let next = progress.next();
            reads.push((next.offset, next.at, next.len));
            last = progress.step(*result);
        }
        (reads, last)
    }

    #[test]
    fn a_buffered_read_requests_the_extent_itself() {
        assert_eq!(
            play(extent(100, 50), 1, &[Ok(50)]),
            (vec![(100, 0, 50)], Step::Done(0))
        );
    }

    #[test]
    fn a_direct_read_requests_the_aligned_superset_of_its_extent() {
        assert_eq!(
            play(extent(1000, 100), 512, &[Ok(1024)]),
            (vec![(512, 0, 1024)], Step::Done(488))
        );
        assert_eq!(
            play(extent(1024, 512), 512, &[Ok(512)]),
            (vec![(1024, 0, 512)], Step::Done(0))
        );
    }

    #[test]
    fn a_short_read_continues_where_it_ended() {
        let (reads, last) = play(extent(100, 50), 1, &[Ok(20), Ok(29), Ok(1)]);
        assert_eq!(
            (reads, last),
            (
                vec![(100, 0, 50), (120, 20, 30), (149, 49, 1)],
                Step::Done(0)
            )
        );
    }

    #[test]
    fn after_a_short_direct_read_the_offset_is_aligned_down() {
        let (reads, last) = play(extent(0, 4096), 512, &[Ok(1000), Ok(3584)]);
        assert_eq!(
            (reads, last),
            (vec![(0, 0, 4096), (512, 512, 3584)], Step::Done(0))
        );
    }

    #[test]
    fn the_tail_of_a_file_is_short_and_complete() {
        assert_eq!(play(extent(4096, 100), 4096, &[Ok(100)]).1, Step::Done(0));
        assert_eq!(
            play(extent(4000, 196), 4096, &[Ok(4196)]).1,
            Step::Done(4000)
        );
    }

    #[test]
    fn a_read_of_0_before_the_end_means_a_truncated_file() {
        assert_eq!(
            play(extent(100, 50), 1, &[Ok(0)]).1,
            Step::Fail(Failure::Truncated(0))
        );
        assert_eq!(
            play(extent(100, 50), 1, &[Ok(20), Ok(0)]).1,
            Step::Fail(Failure::Truncated(20))
        );
        // O_DIRECT returns the same tail again after aligning down: no new byte also means the end.
        assert_eq!(
            play(extent(100, 900), 512, &[Ok(700), Ok(188)]).1,
            Step::Fail(Failure::Truncated(600))
        );
        // The file ends before the extent starts.
        assert_eq!(
            play(extent(400, 100), 512, &[Ok(300), Ok(300)]).1,
            Step::Fail(Failure::Truncated(0))
        );
    }

    #[test]
    fn eintr_and_eagain_repeat_the_same_read_but_not_for_ever() {
        let (reads, last) = play(
            extent(100, 50),
            1,
            &[Err(Errno::INTR), Err(Errno::AGAIN), Ok(50)],
        );
        assert_eq!((reads, last), (vec![(100, 0, 50); 3], Step::Done(0)));
        let endless = vec![Err(Errno::AGAIN); RETRIES_MAX as usize + 1];
        assert_eq!(
            play(extent(100, 50), 1, &endless).1,
            Step::Fail(Failure::Os(Errno::AGAIN))
        );
    }

    #[test]
    fn einval_turns_o_direct_off_once_and_then_fails() {
        let (reads, last) = play(extent(1000, 100), 512, &[Err(Errno::INVAL), Ok(100)]);
        assert_eq!(
            (reads, last),
            (vec![(512, 0, 1024), (1000, 0, 100)], Step::Done(0))
        );
        let twice = play(extent(1000, 100), 512, &[Err(Errno::INVAL); 2]);
        assert_eq!(twice.1, Step::Fail(Failure::Os(Errno::INVAL)));
    }

    #[test]
    fn a_read_beyond_one_calls_limit_is_cut_and_not_the_end() {
        let len = 3 * READ_MAX as u64 / 2;
        let (reads, last) = play(extent(0, len), 1, &[Ok(READ_MAX), Ok(READ_MAX / 2)]);
        assert_eq!(
            (reads[1], last),
            ((READ_MAX as u64, READ_MAX, READ_MAX / 2), Step::Done(0))
        );
    }

    proptest! {
        /// Simulates a file of `file` bytes and a kernel that returns arbitrary short counts.
        /// Existing wanted bytes always arrive at the right place, and nothing else counts as
        /// success.
        #[test]
        fn any_short_reads_succeed_exactly_if_the_bytes_exist(
            offset in 0_u64..5000, len in 1_u64..5000, file in 0_u64..12_000, shift in 0_u32..13,
            cuts in prop::collection::vec(1_usize..5000, 1..50)
        ) {
            let align = 1_usize << shift;
            let wanted = extent(offset, len);
            let mut progress = Progress::new(wanted, align);
            let mut buffer = vec![u64::MAX; footprint(&wanted, align).bytes];
            for turn in 0.. {
                prop_assert!(turn < 20_000, "it does not end");
                let next = progress.next();
                prop_assert!(next.offset.is_multiple_of(align as u64) && (next.at | next.len).is_multiple_of(align));
                let there = file.saturating_sub(next.offset).min(next.len as u64) as usize;
                // A short count before the end of the file is at least one block, as on real
                // devices.
                let read = there.min(cuts[turn % cuts.len()].next_multiple_of(align));
                for (index, byte) in buffer[next.at..next.at + read].iter_mut().enumerate() {
                    *byte = next.offset + index as u64;
                }
                match progress.step(Ok(read)) {
                    Step::Continue => {}
                    Step::Done(at) => {
                        prop_assert!(offset + len <= file);
                        prop_assert!((0..len).all(|index| buffer[at + index as usize] == offset + index));
                        break;
                    }
                    Step::Fail(Failure::Truncated(read)) => {
                        prop_assert!(offset + len > file);
                        prop_assert_eq!(read, file.saturating_sub(offset));
                        break;
                    }
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
