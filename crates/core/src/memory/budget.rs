//! One memory budget for several loaders of a process.
//!
//! ```text
//! free ─┬─ 1 / (loaders not built yet) ─► limit for the next loader's plan ─► its lease (returned on drop)
//!       └─ the rest ─► the other loaders
//! ```
//!
//! Invariants: the leases never exceed the budget. Data in memory is subtracted once, before the
//! division. Until a loader is dropped or adds further data, every limit is at least (bytes - data)
//! / loaders. By induction: a loader that takes at most 1/n of the free bytes leaves at least as
//! much for each of the n - 1 others.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_base::sync::Hold;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// One memory budget for several loaders of a process: one per GPU, or one for training and one for
/// evaluation.
///
/// A loader may plan at most an equal part of the free bytes: free bytes / loaders not built yet.
/// So early loaders leave at least bytes / loaders to each later one. Bytes that they do not need
/// go to the loaders after them.
///
/// A loader returns its bytes when the loader, its epochs and its batches are dropped, or when
/// `build` fails. Another loader may then be built in its place, by the same rule: if all others
/// are built, it may plan at least its predecessor's bytes.
///
/// Data in memory counts once for all loaders that share it. It is subtracted before the free bytes
/// are divided.
///
/// ```
/// # use feedline_core::memory::Budget;
/// let budget = Budget::new(64 << 20, 2); // for two loaders, one per device
/// assert_eq!(budget.free(), 64 << 20);
/// ```
#[derive(Clone)]
pub struct Budget {
    shared: Arc<BudgetState>,
}

struct BudgetState {
    bytes: usize,
    loaders: usize,
    taken: Mutex<Taken>,
}

/// Data in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Addresses of the bytes.
    pub range: Range<usize>,
    /// Bytes that this process counts: its part, if the ranks of the machine share them.
    pub counted: usize,
}

/// Sums over the live loaders.
#[derive(Default)]
struct Taken {
    bytes: usize,
    loaders: usize,
    /// Each loader's data in memory.
    data: Vec<Resident>,
}

/// The limit for a loader that is being built, with the numbers that it follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes that the loader may take: `free / parts`.
    pub bytes: usize,
    pub free: usize,
    /// Loaders that are not built yet, this one included.
    pub parts: usize,
    /// Bytes of the whole budget, and its number of loaders.
    pub whole: usize,
    pub loaders: usize,
}

/// Bytes of a live loader, returned on drop.
pub struct Lease {
    shared: Arc<BudgetState>,
    bytes: usize,
    data: Vec<Resident>,
}

impl Budget {
    /// A budget of `bytes` for at most `loaders` live loaders. It reserves no memory.
    pub fn new(bytes: usize, loaders: usize) -> Self {
        Self {
            shared: Arc::new(BudgetState {
                bytes,
                loaders,
                taken: Mutex::default(),
            }),
        }
    }

    /// Bytes of the whole budget.
    pub fn bytes(&self) -> usize {
        self.shared.bytes
    }

    /// Number of loaders that may share the budget.
    pub fn loaders(&self) -> usize {
        self.shared.loaders
    }

    /// Bytes that no live loader holds.
    pub fn free(&self) -> usize {
        self.shared.bytes - self.shared.lock().bytes
    }

    /// Takes the bytes that `plan` returns, and the bytes of `data` that no live loader has taken
    /// yet. Other loaders wait meanwhile, so `plan` must only compute.
    ///
    /// Errors (nothing is taken then): [`ErrorKind::Budget`] if all loaders are alive or `plan`
    /// exceeds its part; those of `plan`.
    #[doc(hidden)]
    pub fn take<T>(
        &self,
        data: Vec<Resident>,
        plan: impl FnOnce(Part) -> Result<(T, usize)>,
    ) -> Result<(T, Lease)> {
        let mut taken = self.shared.lock();
        let new = data
            .iter()
            .filter(|data| !taken.data.contains(data))
            .map(|data| data.counted)
            .sum();
        let part = self.shared.part(&taken, new)?;
        let (planned, bytes) = plan(part)?;
        if bytes > part.bytes {
            let message = format!(
                "the plan takes {bytes} bytes of the shared budget, but its share is {}",
                part.bytes
            );
            return Err(Error::new(ErrorKind::Budget, Stage::Build, message)
                .with_amounts(bytes as u64, part.bytes as u64));
        }
        taken.bytes += bytes + new;
        taken.loaders += 1;
        taken.data.extend_from_slice(&data);
        Ok((
            planned,
            Lease {
                shared: self.shared.clone(),
                bytes,
                data,
            },
        ))
    }
}

impl BudgetState {
    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.hold()
    }

    fn part(&self, taken: &Taken, data: usize) -> Result<Part> {
        let Self {
            bytes: whole,
            loaders,
            ..
        } = *self;
        let left = whole - taken.bytes;
        let parts = loaders - taken.loaders;
        let free = left.checked_sub(data).ok_or_else(|| {
            let free = format!("{left} of {whole} bytes are free in the shared budget");
            let out = Setting::InMemory;
            let message = format!("{data} bytes of data in memory, {free}: leave out {out}");
            Error::new(ErrorKind::Budget, Stage::Build, message)
                .with_amounts(data as u64, left as u64)
        })?;
        let bytes = free.checked_div(parts).ok_or_else(|| {
            let message = format!(
                "the shared budget is for {loaders} loaders, and all are alive (or their \
                 batches): drop a loader and its batches, or make the budget for more loaders"
            );
            Error::new(ErrorKind::Budget, Stage::Build, message)
        })?;
        Ok(Part {
            bytes,
            free,
            parts,
            whole,
            loaders,
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut taken = self.shared.lock();
        taken.bytes -= self.bytes;
        taken.loaders -= 1;
        for data in &self.data {
            let own = taken.data.iter().position(|other| other == data);
            own.map(|own| taken.data.swap_remove(own));
            taken.bytes -= if taken.data.contains(data) {
                0
            } else {
                data.counted
            };
        }
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Taken { bytes, loaders, .. } = *self.shared.lock();
        let BudgetState {
            bytes: whole,
            loaders: most,
            ..
        } = *self.shared;
        write!(
            f,
            "Budget: {bytes} of {whole} bytes taken by {loaders} of {most} loaders"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A lease of at least `need` and at most `want` bytes, as a loader takes it.
    fn build(budget: &Budget, need: usize, want: usize) -> Result<(usize, Lease)> {
        budget.take(Vec::new(), |part| {
            if need > part.bytes {
                return Err(Error::new(
                    ErrorKind::Budget,
                    Stage::Build,
                    format!("needs {need}, {part:?}"),
                ));
            }
            let bytes = want.max(need).min(part.bytes);
            Ok((bytes, bytes))
        })
    }

    #[derive(Clone, Debug)]
    enum Step {
        Build { need: usize, want: usize },
        Drop(prop::sample::Index),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0_usize..100, 0_usize..400).prop_map(|(need, want)| Step::Build { need, want }),
            2 => any::<prop::sample::Index>().prop_map(Step::Drop),
        ]
    }

    proptest! {
        /// The oracle knows only the live leases, and deals out the free bytes one by one.
        #[test]
        fn parts_match_the_oracle_as_loaders_come_and_go(
            bytes in 0_usize..600, loaders in 0_usize..7, steps in prop::collection::vec(step(), 1..60)
        ) {
            let budget = Budget::new(bytes, loaders);
            let mut alive: Vec<(usize, Lease)> = Vec::new();
            for step in steps {
                match step {
                    Step::Drop(which) if !alive.is_empty() => drop(alive.swap_remove(which.index(alive.len()))),
                    Step::Drop(_) => {}
                    Step::Build { need, want } => {
                        let mut shares = vec![0_usize; loaders - alive.len()];
                        let free = bytes - alive.iter().map(|(bytes, _)| bytes).sum::<usize>();
                        for byte in 0..free {
                            if let Some(len) = std::num::NonZero::new(shares.len()) {
                                shares[byte % len] += 1;
                            }
                        }
                        // The smallest share: no loader gets the remainder of the division.
                        let expected = shares.last().filter(|share| need <= **share).map(|share| want.max(need).min(*share));
                        match (build(&budget, need, want), expected) {
                            (Ok(built), Some(expected)) => {
                                prop_assert_eq!(built.0, expected);
                                alive.push(built);
                            }
                            (Err(error), None) => prop_assert_eq!(error.kind(), ErrorKind::Budget),
                            (built, _) => prop_assert!(false, "{:?}, not {:?}", built.map(|(bytes, _)| bytes), expected),
                        }
                    }
                }
                let taken = alive.iter().map(|(bytes, _)| bytes).sum::<usize>();
                prop_assert!(taken <= bytes);
                prop_assert_eq!(budget.free(), bytes - taken);
            }
            drop(alive);
            prop_assert_eq!(budget.free(), bytes);
        }
    }

    #[test]
    fn later_loaders_share_the_bytes_that_early_ones_leave() {
        let budget = Budget::new(1000, 4);
        let mut built = Vec::new();
        for (want, bytes) in [(100, 100), (5000, 300), (5000, 300), (5000, 300)] {
            built.push(build(&budget, 0, want).unwrap());
            assert_eq!(built.last().unwrap().0, bytes);
        }
        assert_eq!(budget.free(), 0);
        assert_eq!(
            format!("{budget:?}"),
            "Budget: 1000 of 1000 bytes taken by 4 of 4 loaders"
        );
    }

    #[test]
    fn one_loader_too_many_is_refused_until_another_is_dropped() {
        let budget = Budget::new(1000, 1);
        let first = build(&budget, 1, 1).unwrap();
        let error = build(&budget, 0, 0).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Budget);
        assert!(
            error
                .to_string()
                .contains("for 1 loaders, and all are alive"),
            "{error}"
        );
        drop(first);
        assert!(build(&budget, 1000, 1000).is_ok());
        assert_eq!(
            build(&Budget::new(1000, 0), 0, 0).err().unwrap().kind(),
            ErrorKind::Budget
        );
    }

    #[test]
    fn a_plan_that_fails_panics_or_exceeds_its_part_takes_nothing() {
        let budget = Budget::new(1000, 2);
        let failing = budget.take::<()>(Vec::new(), |_| Err(Error::user("no")));
        assert_eq!(failing.err().unwrap().kind(), ErrorKind::User);
        let greedy = budget.take(Vec::new(), |part| Ok(((), part.bytes + 1)));
        assert_eq!(greedy.err().unwrap().kind(), ErrorKind::Budget);
        let panicking = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            budget
                .take::<()>(Vec::new(), |_| panic!("in the plan"))
                .map(|_| ())
        }));
        assert!(panicking.is_err());
        assert_eq!(budget.free(), 1000);
        assert_eq!(build(&budget, 500, 5000).unwrap().0, 500);
    }
}
