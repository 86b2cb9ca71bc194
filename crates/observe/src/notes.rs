//! What the loop's thread and the sampler share: the phase of the loop, and sums.

use crate::observation::Observation;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

/// A worker process of the loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerId {
    pub process: u32,
    /// The loader's number of it, which a later epoch's process has again.
    pub number: u32,
}

/// What the loop does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Between two epochs.
    Idle,
    /// It waits for the first batch of an epoch.
    Starting,
    Step,
    Wait,
    /// It does something else within an epoch, such as an evaluation.
    Away,
}

impl Phase {
    fn of(number: u8) -> Self {
        [
            Self::Idle,
            Self::Starting,
            Self::Step,
            Self::Wait,
            Self::Away,
        ][usize::from(number)]
    }
}

/// Asks for the interpreter's lock and gives the time that it took, in nanoseconds.
pub type Probe = Box<dyn Fn() -> Option<u64> + Send>;

/// What the loop's thread and the sampler share.
pub struct Shared {
    pub phase: AtomicU8,
    pub notes: Mutex<Notes>,
    /// Asks for the interpreter's lock, where there is one.
    pub probe: Option<Mutex<Probe>>,
}

impl Shared {
    pub fn phase(&self) -> Phase {
        Phase::of(self.phase.load(Ordering::Relaxed))
    }
}

/// Sums, and the marks of the present event.
#[derive(Default)]
pub struct Notes {
    pub sums: Observation,
    /// The worker processes that the loader names.
    pub named: Vec<WorkerId>,
    /// The thread of the loop.
    pub thread: u32,
    /// Batches of the present epoch.
    pub taken: u64,
    /// When the present event began, and the CPU time of the loop's thread then.
    pub mark_ns: u64,
    pub mark_cpu_ns: u64,
    /// The start of the first epoch, and the end of the last one.
    pub first_start_ns: u64,
    pub last_end_ns: u64,
}

impl Notes {
    /// Whether workers may have nothing left to do, because the epoch is about to end.
    pub fn runs_dry(&self) -> bool {
        let facts = &self.sums.loader;
        let ahead =
            u64::from(facts.workers.unwrap_or(0)) * u64::from(facts.prefetch_factor.unwrap_or(2));
        // In an epoch that is all start and end, all of it counts.
        facts
            .batches
            .is_some_and(|batches| batches > 2 * ahead && self.taken + ahead >= batches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observation::LoaderFacts;

    #[test]
    fn an_epoch_runs_dry_where_no_task_is_left() {
        let facts = LoaderFacts {
            workers: Some(4),
            prefetch_factor: Some(2),
            batches: Some(100),
            ..LoaderFacts::default()
        };
        let notes = |taken, batches| Notes {
            taken,
            sums: Observation {
                loader: LoaderFacts {
                    batches,
                    ..facts.clone()
                },
                ..Observation::default()
            },
            ..Notes::default()
        };
        let table = [
            (91, Some(100), false),
            (92, Some(100), true),
            (92, None, false),
            (8, Some(10), false),
        ];
        for (taken, batches, right) in table {
            assert_eq!(
                notes(taken, batches).runs_dry(),
                right,
                "{taken} {batches:?}"
            );
        }
    }
}
