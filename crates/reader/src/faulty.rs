//! Injected faults at the readers' system calls, for tests (feature `unstable`): at operation *i*,
//! once, repeatedly or for ever.
//!
//! ```text
//! plan:   once(3, Error(EIO))            ever(7, Short(512))
//! calls:  0  1  2  3✗ 4  5  6  7✗ 8✗ 9✗ …      opens and read attempts of all readers with this plan, in call order
//! ```
//!
//! * Counted calls: opens, reads (io_uring entries, `pread`), reads that must not block (`preadv2`
//!   on the page cache), and a map's read-ahead and copies. Retried reads count again. Bytes of
//!   memory sources and of cuFile are not read here.
//! * A fault happens *below* the code that handles it. For a short read, fewer bytes are requested.
//!   For `Elsewhere`, the read goes to another offset. An operation that must fail is not executed (a
//!   ring gets a NOP instead), so nothing is opened or written without the reader's knowledge. A late
//!   operation is executed and reported late; until then it owns its buffer.
//! * A fault that makes no sense for an operation (a flipped bit of an open, a short read of one
//!   byte) has no effect. Only faults that happened are [counted](Faulty::injected).
//!
//! With a plan, pauses between retries are a thousandth of the usual ones.
//!
//! The order of operations is the order of the calls. With one reader thread, or with a ring, it is
//! the same in every run, as long as the loader makes the same requests.

use super::fault_point::{Attempt, Call};
use super::progress::Next;
use crate::ReaderOptions;
use feedline_base::sync::Hold;
use feedline_core::storage::{Extent, SourceId};
use rustix::io::Errno;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Number of injected faults that are recorded; later ones are only counted.
const HITS_MAX: usize = 4096;
/// Distance to the other offset, if no alignment is needed.
const ELSEWHERE: u64 = 64;

/// A fault of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The operation fails with this errno (1 to 4095) and is not executed.
    Error(i32),
    /// The operation returns at most this many bytes, at least 1. With `O_DIRECT` the number is
    /// rounded up to the block size.
    Short(usize),
    /// The operation returns 0 bytes, as at the end of a file.
    Zero,
    /// The operation ends this much later.
    Late(Duration),
    /// One bit of the wanted bytes is wrong.
    Flipped,
    /// The bytes come from another offset of the same file.
    Elsewhere,
}

/// A fault that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hit {
    /// The operation's number, from 0.
    pub at: u64,
    /// The kind of call.
    pub call: Call,
    /// The injected fault.
    pub fault: Fault,
    /// The reader's requested extent; for an open, only the source matters.
    pub extent: Extent,
    /// The affected bytes, by their position in the file: the bytes of the attempt, or the byte
    /// with the wrong bit.
    pub bytes: Range<u64>,
}

/// A plan of faults and its results. Readers share it through
/// [`ReaderOptions::faulty`](super::ReaderOptions::faulty).
///
/// ```
/// use feedline_reader::faulty::{Fault, Faulty};
/// let faulty = std::sync::Arc::new(Faulty::new().once(3, Fault::Error(5)).ever(7, Fault::Short(512)));
/// assert_eq!((faulty.seen(), faulty.injected()), (0, 0));
/// ```
#[derive(Debug, Default)]
pub struct Faulty(Mutex<FaultyState>);

#[derive(Debug, Default)]
struct FaultyState {
    /// First operation, count and fault. The first match applies.
    plan: Vec<(u64, u64, Fault)>,
    seen: u64,
    injected: u64,
    hits: Vec<Hit>,
}

impl Faulty {
    /// A plan without faults, which only counts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fault for operation `at`, counted from 0.
    #[must_use]
    pub fn once(self, at: u64, fault: Fault) -> Self {
        self.times(at, 1, fault)
    }

    /// Adds a fault for each of `count` operations, starting at `at`.
    #[must_use]
    pub fn times(self, at: u64, count: u64, fault: Fault) -> Self {
        self.0.hold().plan.push((at, count, fault));
        self
    }

    /// Adds a fault for every operation, starting at `at`.
    #[must_use]
    pub fn ever(self, at: u64, fault: Fault) -> Self {
        self.times(at, u64::MAX, fault)
    }

    /// Adds a fault for the next `count` operations. It overrides the plan for them.
    pub fn inject(&self, count: u64, fault: Fault) {
        let mut state = self.0.hold();
        let seen = state.seen;
        state.plan.insert(0, (seen, count, fault));
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.0.hold().plan.clear();
    }

    /// Number of operations so far.
    pub fn seen(&self) -> u64 {
        self.0.hold().seen
    }

    /// Number of faults that happened so far.
    pub fn injected(&self) -> u64 {
        self.0.hold().injected
    }

    /// The first 4096 faults.
    pub fn hits(&self) -> Vec<Hit> {
        self.0.hold().hits.clone()
    }

    /// Counts an operation and returns its fault.
    fn injection(self: &Arc<Self>, attempt: &Attempt) -> Injection {
        let mut state = self.0.hold();
        let at = state.seen;
        state.seen += 1;
        let meant = state
            .plan
            .iter()
            .find(|(first, count, _)| at >= *first && at - first < *count);
        let Some(fault) = meant.map(|(.., fault)| *fault) else {
            return Injection(None);
        };
        let Some((change, offset, len)) = change(fault, at, attempt) else {
            return Injection(None);
        };
        let hit = Hit {
            at,
            call: attempt.call,
            fault,
            extent: attempt.extent,
            bytes: offset..offset + len,
        };
        Injection(Some(Armed {
            faulty: self.clone(),
            hit,
            change,
        }))
    }
}

/// The change to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultChange {
    /// The operation is not executed; this is its result: a count, or minus an errno.
    Instead(i32),
    /// This many bytes are requested.
    Len(usize),
    /// The request starts at this offset.
    Offset(u64),
    /// This byte of the read bytes changes, in this bit.
    Flip(usize, u8),
    /// The result is reported at this time.
    Until(Instant),
}

/// How `fault` changes the attempt, and the part of the wanted bytes that it affects (offset,
/// length). `None` if the fault makes no sense for this call.
fn change(fault: Fault, at: u64, attempt: &Attempt) -> Option<(FaultChange, u64, u64)> {
    let Attempt {
        call,
        extent,
        next,
        align,
        there: ref file,
    } = *attempt;
    // The bytes that the kernel would return, and the wanted part of them.
    let there = file.end.saturating_sub(next.offset).min(next.len as u64);
    let start = next.offset.max(extent.offset);
    let end = (next.offset + there)
        .min(extent.offset.saturating_add(extent.len))
        .max(start);
    let wanted = end - start;
    let no_bytes = matches!(call, Call::Open | Call::Populate);
    let block = align.max(1);
    let change = match fault {
        Fault::Error(errno) => FaultChange::Instead(-errno.clamp(1, 4095)),
        Fault::Late(time) => FaultChange::Until(Instant::now().checked_add(time)?),
        _ if no_bytes || wanted == 0 => return None,
        Fault::Zero => FaultChange::Instead(0),
        Fault::Short(bytes) => {
            let bytes = bytes.max(1).checked_next_multiple_of(block)?;
            ((bytes as u64) < there).then_some(FaultChange::Len(bytes))?
        }
        Fault::Elsewhere => {
            let step = if block > 1 {
                block as u64
            } else {
                ELSEWHERE.min((file.end - file.start) / 2).max(1)
            };
            let before = next
                .offset
                .checked_sub(step)
                .filter(|before| *before >= file.start);
            let other = before.unwrap_or(next.offset + step);
            // With O_DIRECT, a read that ends before the file's end would be repeated from the
            // right offset. A copy cannot end there.
            let left = file.end.saturating_sub(other);
            let fits = if block > 1 || call == Call::Copy {
                left >= there
            } else {
                left > 0
            };
            fits.then_some(FaultChange::Offset(other))?
        }
        Fault::Flipped => {
            let draw = mix(at);
            let byte = start + (draw >> 3) % wanted;
            return Some((
                FaultChange::Flip((byte - next.offset) as usize, 1 << (draw & 7)),
                byte,
                1,
            ));
        }
    };
    Some((change, start, wanted))
}

/// A pseudo-random number from a number.
fn mix(number: u64) -> u64 {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 7
}

/// The hook that a reader's calls go through.
#[derive(Clone, Default)]
pub struct FaultHook(Option<Arc<Faulty>>);

/// An operation of a reader with its fault, if any.
#[derive(Default)]
pub struct Injection(Option<Armed>);

struct Armed {
    faulty: Arc<Faulty>,
    hit: Hit,
    change: FaultChange,
}

impl Armed {
    /// Records that the fault happened.
    fn note(&self) {
        let mut state = self.faulty.0.hold();
        state.injected += 1;
        if state.hits.len() < HITS_MAX {
            state.hits.push(self.hit.clone());
        }
    }
}

impl FaultHook {
    pub fn of(options: &ReaderOptions) -> Self {
        Self(options.faulty.clone())
    }

    /// The pause between two tries. Planned faults do not pass with time, so it is shorter with
    /// them.
    pub(crate) fn pause(&self, pause: Duration) -> Duration {
        if self.0.is_some() {
            pause / 1000
        } else {
            pause
        }
    }

    /// The opening of a file.
    pub(crate) fn open(&self, source: SourceId) -> Injection {
        let extent = Extent {
            source,
            offset: 0,
            len: 0,
        };
        let next = Next {
            offset: 0,
            at: 0,
            len: 0,
        };
        self.inject(|| Attempt {
            call: Call::Open,
            extent,
            next,
            align: 1,
            there: 0..0,
        })
    }

    /// A read attempt.
    pub(super) fn inject(&self, attempt: impl FnOnce() -> Attempt) -> Injection {
        self.0
            .as_ref()
            .map_or(Injection(None), |faulty| faulty.injection(&attempt()))
    }
}

impl Injection {
    fn change(&self) -> Option<FaultChange> {
        self.0.as_ref().map(|armed| armed.change)
    }

    fn note(&self) {
        if let Some(armed) = &self.0 {
            armed.note();
        }
    }

    /// The range to request instead of `next`.
    pub(crate) fn next(&self, next: Next) -> Next {
        match self.change() {
            Some(FaultChange::Len(len)) => Next { len, ..next },
            Some(FaultChange::Offset(offset)) => Next { offset, ..next },
            _ => next,
        }
    }

    /// The result of an operation that must not be executed: a count, or minus an errno.
    pub(crate) fn instead(&self) -> Option<i32> {
        let Some(FaultChange::Instead(result)) = self.change() else {
            return None;
        };
        Some(result)
    }

    /// When to report the result, if it is late.
    pub(super) fn until(&self) -> Option<Instant> {
        let Some(FaultChange::Until(time)) = self.change() else {
            return None;
        };
        Some(time)
    }

    /// Ends the operation. Returns the result to report instead of `result`; `bytes` are the bytes
    /// read.
    pub(super) fn told(self, result: i64, bytes: Option<&mut [u8]>) -> i64 {
        let Some(change) = self.change() else {
            return result;
        };
        let happened = match change {
            FaultChange::Instead(_) | FaultChange::Until(_) => true,
            FaultChange::Len(_) | FaultChange::Offset(_) => result > 0,
            FaultChange::Flip(at, bit) => {
                let byte = bytes
                    .and_then(|bytes| bytes.get_mut(at))
                    .filter(|_| result > at as i64);
                byte.map(|byte| *byte ^= bit).is_some()
            }
        };
        if happened {
            self.note();
        }
        if let FaultChange::Instead(instead) = change {
            i64::from(instead)
        } else {
            result
        }
    }

    /// Opens a file.
    pub(crate) fn opened<T>(self, open: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
        self.note();
        if let Some(result) = self.instead() {
            return Err(Errno::from_raw_os_error(-result));
        }
        self.rest();
        open()
    }

    /// Reads on the calling thread, into the part of `buf` that `next` names.
    pub(crate) fn around(
        self,
        next: Next,
        buf: &mut [u8],
        read: impl FnOnce(Next, &mut [u8]) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let asked = self.next(next);
        let bytes = &mut buf[asked.at..asked.at + asked.len];
        let result = if self.instead().is_some() {
            Ok(0)
        } else {
            read(asked, bytes)
        };
        self.rest();
        let plain =
            result.map_or_else(|errno| -i64::from(errno.raw_os_error()), |read| read as i64);
        match self.told(plain, Some(bytes)) {
            read @ 0.. => Ok(read as usize),
            error => Err(Errno::from_raw_os_error(-error as i32)),
        }
    }

    fn rest(&self) {
        if let Some(until) = self.until() {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A read of `len` bytes from `offset` for the extent from 1000 to 3000, of a file of 10,000
    /// bytes.
    fn attempt(offset: u64, len: usize, align: usize) -> Attempt {
        let extent = Extent {
            source: SourceId::at(0),
            offset: 1000,
            len: 2000,
        };
        Attempt {
            call: Call::Read,
            extent,
            next: Next { offset, at: 0, len },
            align,
            there: 0..10_000,
        }
    }

    #[test]
    fn a_fault_affects_only_wanted_bytes_that_exist() {
        let plain = || attempt(1000, 2000, 1);
        let direct = || attempt(512, 2560, 512);
        let table = [
            (
                Fault::Error(5),
                plain(),
                Some((FaultChange::Instead(-5), 1000, 2000)),
            ),
            (
                Fault::Error(0),
                plain(),
                Some((FaultChange::Instead(-1), 1000, 2000)),
            ),
            (
                Fault::Zero,
                direct(),
                Some((FaultChange::Instead(0), 1000, 2000)),
            ),
            (
                Fault::Zero,
                attempt(1500, 1500, 1),
                Some((FaultChange::Instead(0), 1500, 1500)),
            ),
            (
                Fault::Short(0),
                plain(),
                Some((FaultChange::Len(1), 1000, 2000)),
            ),
            (
                Fault::Short(1999),
                plain(),
                Some((FaultChange::Len(1999), 1000, 2000)),
            ),
            (Fault::Short(2000), plain(), None),
            (
                Fault::Short(1),
                direct(),
                Some((FaultChange::Len(512), 1000, 2000)),
            ),
            (Fault::Short(2049), direct(), None),
            (
                Fault::Elsewhere,
                plain(),
                Some((FaultChange::Offset(936), 1000, 2000)),
            ),
            (
                Fault::Elsewhere,
                direct(),
                Some((FaultChange::Offset(0), 1000, 2000)),
            ),
            (
                Fault::Elsewhere,
                attempt(0, 3072, 512),
                Some((FaultChange::Offset(512), 1000, 2000)),
            ),
            // The file has no other part of that length.
            (Fault::Elsewhere, attempt(0, 10_240, 512), None),
        ];
        for (fault, attempt, right) in table {
            assert_eq!(change(fault, 0, &attempt), right, "{fault:?} {attempt:?}");
        }
        // A map of only the extent has no other bytes.
        let map = Attempt {
            call: Call::Copy,
            there: 1000..3000,
            ..attempt(1000, 2000, 1)
        };
        assert_eq!(change(Fault::Elsewhere, 0, &map), None);
    }

    #[test]
    fn a_flipped_bit_lies_in_the_wanted_bytes_of_any_read() {
        for at in 0..1000 {
            let Some((FaultChange::Flip(byte, bit), offset, 1)) =
                change(Fault::Flipped, at, &attempt(512, 2560, 512))
            else {
                panic!("no bit")
            };
            assert!(
                (1000..3000).contains(&offset)
                    && byte as u64 + 512 == offset
                    && bit.count_ones() == 1
            );
        }
        assert_eq!(
            change(Fault::Flipped, 0, &attempt(512, 488, 1)),
            None,
            "none of its bytes were wanted"
        );
    }

    #[test]
    fn opens_and_read_aheads_have_no_bytes_to_corrupt() {
        for (call, fault) in [
            (Call::Open, Fault::Zero),
            (Call::Populate, Fault::Flipped),
            (Call::Open, Fault::Short(1)),
        ] {
            assert_eq!(
                change(
                    fault,
                    0,
                    &Attempt {
                        call,
                        ..attempt(1000, 2000, 1)
                    }
                ),
                None,
                "{call:?} {fault:?}"
            );
        }
    }

    /// The reported results of consecutive reads that return 2000 bytes.
    fn told(faulty: Faulty, reads: usize) -> (Vec<i64>, Arc<Faulty>) {
        let faulty = Arc::new(faulty);
        let told = (0..reads).map(|_| {
            faulty
                .injection(&attempt(1000, 2000, 1))
                .told(2000, Some(&mut [0; 2000]))
        });
        (told.collect(), faulty)
    }

    #[test]
    fn faults_hit_their_operations_and_are_counted() {
        let (results, faulty) = told(
            Faulty::new()
                .once(1, Fault::Error(5))
                .times(3, 2, Fault::Zero),
            6,
        );
        assert_eq!(results, [2000, -5, 2000, 0, 0, 2000]);
        assert_eq!((faulty.seen(), faulty.injected()), (6, 3));
        assert_eq!(
            faulty.hits().iter().map(|hit| hit.at).collect::<Vec<_>>(),
            [1, 3, 4]
        );
        let (results, faulty) = told(
            Faulty::new()
                .ever(u64::MAX, Fault::Zero)
                .ever(2, Fault::Error(11)),
            4,
        );
        assert_eq!(
            (results, faulty.injected()),
            (vec![2000, 2000, -11, -11], 2)
        );
    }

    #[test]
    fn faults_can_be_injected_and_healed_while_readers_run() {
        let faulty = Arc::new(Faulty::new().ever(0, Fault::Zero));
        let told = || faulty.injection(&attempt(1000, 2000, 1)).told(2000, None);
        assert_eq!(told(), 0);
        faulty.inject(1, Fault::Error(4));
        assert_eq!([told(), told()], [-4, 0]);
        faulty.heal();
        assert_eq!(told(), 2000);
    }

    #[test]
    fn bytes_that_the_system_did_not_bring_are_not_corrupted() {
        let faulty = Arc::new(Faulty::new().ever(0, Fault::Flipped));
        assert_eq!(
            faulty
                .injection(&attempt(1000, 2000, 1))
                .told(-11, Some(&mut [0; 2000])),
            -11
        );
        assert_eq!(faulty.injected(), 0);
    }
}
