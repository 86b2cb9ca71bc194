//! Operations in flight: the owner of each slot, and the meaning of its completion entries. Pure.

use crate::progress::{Progress, Step};
use rustix::io::Errno;

/// User data of the entry that polls for wakes. No key has this value, since indices are small.
pub(super) const WAKE: u64 = u64::MAX;
/// User data of entries that cancel others. Their results are ignored, because each cancelled entry
/// has its own result.
pub(super) const CANCEL: u64 = u64::MAX - 1;

/// After this many `EINTR` and `EAGAIN` in a row, an open fails rather than spins.
const OPEN_RETRIES_MAX: u32 = 1000;

/// Slot and generation: the user data of an operation's entries. A late completion can only name
/// its own operation, never the current owner of the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key(u64);

impl Key {
    pub(super) fn new(generation: u32, index: usize) -> Self {
        Self(u64::from(generation) << 32 | index as u64)
    }

    pub(super) fn index(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    pub(super) fn user_data(self) -> u64 {
        self.0
    }

    pub(super) fn from_user_data(user_data: u64) -> Option<Self> {
        (user_data != WAKE && user_data != CANCEL).then_some(Self(user_data))
    }
}

/// A fixed number of slots.
pub(super) struct ReadTable<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<usize>,
}

impl<T> ReadTable<T> {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| (0, None)).collect(),
            free: (0..slots).rev().collect(),
        }
    }

    /// Number of operations in the table.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The key of the slot that the next `insert` takes.
    pub(super) fn vacant(&self) -> Option<Key> {
        self.free
            .last()
            .map(|index| Key::new(self.slots[*index].0, *index))
    }

    /// Puts an operation into the slot that `vacant` returned.
    pub(super) fn insert(&mut self, op: T) -> Key {
        let key = self.vacant().expect("a caller asks first");
        self.free.pop();
        self.slots[key.index()].1 = Some(op);
        key
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let (generation, op) = self.slots.get_mut(key.index())?;
        (Key::new(*generation, key.index()) == key).then_some(op.as_mut()?)
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<T> {
        self.get_mut(key)?;
        let (generation, op) = &mut self.slots[key.index()];
        *generation = generation.wrapping_add(1);
        self.free.push(key.index());
        op.take()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (Key, &mut T)> {
        let used = self.slots.iter_mut().enumerate();
        used.filter_map(|(index, (generation, op))| {
            Some((Key::new(*generation, index), op.as_mut()?))
        })
    }
}

/// The phase of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its file is being opened, with `O_DIRECT` or without.
    Open { direct: bool, retries: u32 },
    /// Its bytes are being read.
    Read(Progress),
}

/// The action after a completion entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// This descriptor is the file: check it, then read.
    Opened(i32),
    /// Send the entry of the phase again.
    Resend,
    /// The file could not be opened.
    OpenFailed(Errno),
    /// A read returned.
    Read(Step),
}

impl Phase {
    /// An open without attempts so far.
    pub(super) fn open(direct: bool) -> Self {
        Self::Open { direct, retries: 0 }
    }

    /// Takes the result of the phase's entry (a count, a descriptor, or minus an errno) and returns
    /// the action.
    pub(super) fn step(&mut self, result: i32) -> Action {
        let errno = (result < 0).then(|| Errno::from_raw_os_error(-result));
        match self {
            Self::Read(progress) => {
                Action::Read(progress.step(errno.map_or(Ok(result as usize), Err)))
            }
            Self::Open { direct, retries } => match errno {
                None => Action::Opened(result),
                Some(Errno::INVAL) if *direct => {
                    *direct = false;
                    Action::Resend
                }
                Some(Errno::INTR | Errno::AGAIN) if *retries < OPEN_RETRIES_MAX => {
                    *retries += 1;
                    Action::Resend
                }
                Some(errno) => Action::OpenFailed(errno),
            },
        }
    }
}

/// The state of the ring after an `io_uring_enter`. In every state, a queued entry may still be
/// sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entered {
    /// Look at the completions.
    Fine,
    /// The kernel is short of memory, or completions overflowed: look at them, pause, retry.
    Refused(Errno),
    /// The ring can no longer be used.
    Broken(Errno),
}

/// Classifies the results of `io_uring_enter`.
pub(super) fn entered(result: Result<(), Errno>) -> Entered {
    match result {
        Ok(()) | Err(Errno::TIME | Errno::INTR) => Entered::Fine,
        Err(errno @ (Errno::AGAIN | Errno::BUSY | Errno::NOMEM)) => Entered::Refused(errno),
        Err(errno) => Entered::Broken(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Failure;
    use feedline_core::storage::{Extent, Sources};

    fn reading(offset: u64, len: u64, align: usize) -> Phase {
        let source = Sources::new().memory([].into());
        Phase::Read(Progress::new(
            Extent {
                source,
                offset,
                len,
            },
            align,
        ))
    }

    #[test]
    fn every_result_of_an_entry_leads_to_one_action() {
        let e = |errno: Errno| -errno.raw_os_error();
        let table: [(Phase, Vec<i32>, Action); 12] = [
            (Phase::open(true), vec![7], Action::Opened(7)),
            (Phase::open(true), vec![e(Errno::INVAL)], Action::Resend),
            (
                Phase::open(true),
                vec![e(Errno::INVAL), e(Errno::INVAL)],
                Action::OpenFailed(Errno::INVAL),
            ),
            (
                Phase::open(false),
                vec![e(Errno::AGAIN), e(Errno::INTR), 0],
                Action::Opened(0),
            ),
            (
                Phase::open(false),
                vec![e(Errno::AGAIN); 1001],
                Action::OpenFailed(Errno::AGAIN),
            ),
            (
                Phase::open(false),
                vec![e(Errno::NOENT)],
                Action::OpenFailed(Errno::NOENT),
            ),
            (reading(0, 512, 512), vec![512], Action::Read(Step::Done(0))),
            (
                reading(10, 20, 512),
                vec![512],
                Action::Read(Step::Done(10)),
            ),
            (
                reading(0, 1024, 512),
                vec![600],
                Action::Read(Step::Continue),
            ),
            (
                reading(0, 1024, 512),
                vec![600, 88],
                Action::Read(Step::Fail(Failure::Truncated(600))),
            ),
            (
                reading(0, 1024, 512),
                vec![e(Errno::AGAIN)],
                Action::Read(Step::Retry),
            ),
            (
                reading(0, 9, 1),
                vec![e(Errno::CANCELED)],
                Action::Read(Step::Fail(Failure::Os(Errno::CANCELED))),
            ),
        ];
        for (mut phase, results, last) in table {
            let start = phase;
            let action = results.iter().map(|result| phase.step(*result)).last();
            assert_eq!(action, Some(last), "{start:?} {results:?}");
        }
    }

    #[test]
    fn a_late_completion_never_reaches_the_slots_new_owner() {
        let mut table = ReadTable::new(1);
        let first = table.insert("first");
        assert_eq!(table.remove(first), Some("first"));
        let second = table.insert("second");
        assert_eq!((first.index(), second.index()), (0, 0));
        assert_eq!(table.get_mut(first), None);
        assert_eq!(table.remove(first), None);
        assert_eq!(table.get_mut(second), Some(&mut "second"));
    }

    #[test]
    fn the_table_holds_one_operation_per_slot() {
        let mut table = ReadTable::new(3);
        let keys: Vec<_> = (0..3).map(|op| table.insert(op)).collect();
        assert!(table.vacant().is_none() && table.len() == 3);
        assert_eq!(
            table
                .iter_mut()
                .map(|(key, op)| (key, *op))
                .collect::<Vec<_>>()
                .len(),
            3
        );
        assert_eq!(table.remove(keys[1]), Some(1));
        assert_eq!(table.vacant().map(Key::index), Some(1));
    }

    #[test]
    fn enter_results_are_sorted_into_fine_refused_and_broken() {
        let table = [
            (Ok(()), Entered::Fine),
            (Err(Errno::INTR), Entered::Fine),
            (Err(Errno::TIME), Entered::Fine),
            (Err(Errno::AGAIN), Entered::Refused(Errno::AGAIN)),
            (Err(Errno::BUSY), Entered::Refused(Errno::BUSY)),
            (Err(Errno::NOMEM), Entered::Refused(Errno::NOMEM)),
            // A completion was dropped; another thread's ring; not a ring; a filter was installed
            // later.
            (Err(Errno::BADR), Entered::Broken(Errno::BADR)),
            (Err(Errno::EXIST), Entered::Broken(Errno::EXIST)),
            (Err(Errno::BADF), Entered::Broken(Errno::BADF)),
            (Err(Errno::PERM), Entered::Broken(Errno::PERM)),
        ];
        for (result, expected) in table {
            assert_eq!(entered(result), expected);
        }
    }

    #[test]
    fn entries_for_wakes_and_cancels_belong_to_no_operation() {
        assert_eq!(Key::from_user_data(WAKE), None);
        assert_eq!(Key::from_user_data(CANCEL), None);
        let last = Key::new(u32::MAX, crate::DEPTH_MAX as usize);
        assert_eq!(Key::from_user_data(last.user_data()), Some(last));
    }
}
