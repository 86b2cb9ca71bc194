//! The emulated training step: holds the batch for a given time, then drops it.
//!
//! ```text
//! host   ── batch ──► sleep … spin ──► drop           the step runs on this thread, as a GPU's runs on the GPU
//! GPU    ── batch ──► launch ──► drop                  the step is a kernel on the consumer's stream; the CPU goes on
//! ```
//!
//! On the host the thread sleeps, because a GPU's step uses no CPU. It spins for the last 100 µs,
//! because sleeping is not exact. A step is never shorter than requested, so utilisation is never
//! above 1.

use feedline::Batch;
use std::error::Error;
use std::time::{Duration, Instant};

/// Usual lateness of sleeping on an idle machine.
const SPIN: Duration = Duration::from_micros(100);
/// Interval at which a long step checks for the end.
const LOOK: Duration = Duration::from_millis(100);

/// Time between the ends of the first and the last step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stretch {
    /// Steps in it: all except the first.
    pub steps: u64,
    pub seconds: f64,
}

impl Stretch {
    /// Share of the time spent in steps of this length; `None` without steps.
    pub fn utilisation(&self, step: Duration) -> Option<f64> {
        let busy = self.steps as f64 * step.as_secs_f64();
        (busy > 0.0 && self.seconds > 0.0).then(|| (busy / self.seconds).min(1.0))
    }
}

/// Consumer of batches.
pub enum Step {
    Host(HostStep),
    Gpu(crate::gpu::GpuStep),
}

impl Step {
    /// Takes one step. `quit` interrupts a long one, which then does not count: `false`.
    pub fn take(&mut self, batch: Batch, quit: impl Fn() -> bool) -> Result<bool, Box<dyn Error>> {
        match self {
            Self::Host(step) => Ok(step.take(batch, quit)),
            Self::Gpu(step) => step.take(batch).map(|()| true),
        }
    }

    /// The stretch, once all steps have ended.
    pub fn end(self) -> Result<Stretch, Box<dyn Error>> {
        match self {
            Self::Host(step) => Ok(step.end()),
            Self::Gpu(step) => step.end(),
        }
    }
}

/// A step on the host.
pub struct HostStep {
    length: Duration,
    taken: u64,
    /// Ends of the first and of the last step.
    ends: Option<(Instant, Instant)>,
}

impl HostStep {
    pub fn new(length: Duration) -> Self {
        Self {
            length,
            taken: 0,
            ends: None,
        }
    }

    fn take(&mut self, batch: Batch, quit: impl Fn() -> bool) -> bool {
        if !wait(self.length, quit) {
            return false;
        }
        let now = Instant::now();
        drop(batch);
        self.taken += 1;
        self.ends = Some((self.ends.map_or(now, |(first, _)| first), now));
        true
    }

    fn end(self) -> Stretch {
        let seconds = self
            .ends
            .map_or(0.0, |(first, last)| (last - first).as_secs_f64());
        Stretch {
            steps: self.taken.saturating_sub(1),
            seconds,
        }
    }
}

/// Waits for at least `length`; `false` if interrupted.
fn wait(length: Duration, quit: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    loop {
        let left = length.saturating_sub(started.elapsed());
        if left > SPIN {
            if quit() {
                return false;
            }
            std::thread::sleep((left - SPIN).min(LOOK));
        } else if left.is_zero() {
            return true;
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline::Loader;
    use feedline::dataset::Records;

    #[test]
    fn utilisation_is_at_most_one() {
        let step = Duration::from_millis(250);
        for (steps, seconds, expected) in [
            (4, 1.0, Some(1.0)),
            (4, 2.0, Some(0.5)),
            (3, 1.0, Some(0.75)),
            // The GPU's clock may differ slightly from the host's.
            (4, 0.999, Some(1.0)),
            (0, 0.0, None),
            (0, 1.0, None),
            (4, 0.0, None),
        ] {
            assert_eq!(
                Stretch { steps, seconds }.utilisation(step),
                expected,
                "{steps} steps in {seconds} s"
            );
        }
        assert_eq!(
            Stretch {
                steps: 4,
                seconds: 1.0
            }
            .utilisation(Duration::ZERO),
            None,
            "no step has a length"
        );
    }

    #[test]
    fn a_stretch_omits_the_first_step() {
        let length = Duration::from_millis(3);
        let loader = Loader::builder(Records::builder(1).open_bytes([7; 40]).unwrap())
            .batch_size(10)
            .build()
            .unwrap();
        let mut step = HostStep::new(length);
        for batch in loader.epoch(0).unwrap() {
            assert!(step.take(batch.unwrap(), || false));
        }
        let stretch = step.end();
        assert_eq!(stretch.steps, 3);
        assert!(stretch.seconds >= 3.0 * length.as_secs_f64(), "{stretch:?}");
        assert!(
            stretch
                .utilisation(length)
                .is_some_and(|au| au > 0.0 && au <= 1.0)
        );
    }

    #[test]
    fn an_interrupted_step_does_not_count() {
        let loader = Loader::builder(Records::builder(1).open_bytes([7; 4]).unwrap())
            .batch_size(1)
            .build()
            .unwrap();
        let mut step = HostStep::new(Duration::from_secs(3600));
        assert!(!step.take(loader.epoch(0).unwrap().next().unwrap().unwrap(), || true));
        assert_eq!(step.taken, 0);
    }
}
