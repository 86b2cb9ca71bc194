//! The run: takes batches, one step each, until it ends; and counts.
//!
//! ```text
//! build ─► first batch ─► step ─┬─ batch ─► step ─ … ─ batch ─► step ─┐
//!          (a wait apart)       └────────── the stretch ──────────────┘   utilisation, samples/s, GB/s
//! ```

use crate::step::{Step, Stretch};
use feedline::{Batch, Loader};
use std::error::Error;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Interval at which a wait for a batch checks for the end of the run.
pub const LOOK: Duration = Duration::from_millis(50);
/// End of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// This long after the first batch.
    Time(Duration),
    Batches(u64),
    Epochs(u64),
}

impl Limit {
    /// Maximum number of batches.
    fn batches(self, per_epoch: u64) -> u64 {
        match self {
            Self::Time(_) => u64::MAX,
            Self::Batches(batches) => batches,
            Self::Epochs(epochs) => epochs.saturating_mul(per_epoch),
        }
    }

    fn is_over(self, since_first: Duration) -> bool {
        matches!(self, Self::Time(most) if since_first >= most)
    }
}

/// Batches taken, and their time.
#[derive(Debug, Default)]
pub struct Tally {
    pub batches: u64,
    pub samples: u64,
    pub bytes: u64,
    /// Samples of the stretch: without the first batch, and without a batch with an interrupted
    /// step.
    pub stretch_samples: u64,
    pub stretch_bytes: u64,
    /// Time from the start to the first batch.
    pub first_batch_s: f64,
    pub wall_s: f64,
    pub stretch: Stretch,
    /// The user interrupted the run.
    pub interrupted: bool,
    /// The error that ended the run, of the loader or the device.
    pub error: Option<Box<dyn Error>>,
}

impl Tally {
    /// Counts a received batch.
    fn count(&mut self, (samples, bytes): (u64, u64), started: Instant) {
        if self.batches == 0 {
            self.first_batch_s = started.elapsed().as_secs_f64();
        }
        self.batches += 1;
        self.samples += samples;
        self.bytes += bytes;
    }

    /// Samples and bytes per second of the stretch; without a stretch, of the whole run.
    pub fn rates(&self) -> (f64, f64) {
        let (samples, bytes, seconds) = match self.stretch {
            Stretch {
                steps: 1..,
                seconds,
            } if seconds > 0.0 => (self.stretch_samples, self.stretch_bytes, seconds),
            _ => (self.samples, self.bytes, self.wall_s),
        };
        let rate = |amount: u64| {
            if seconds > 0.0 {
                amount as f64 / seconds
            } else {
                0.0
            }
        };
        (rate(samples), rate(bytes))
    }
}

fn samples_and_bytes(batch: &Batch) -> (u64, u64) {
    (
        batch.len() as u64,
        batch.fields().map(|field| field.size_bytes() as u64).sum(),
    )
}

/// Takes batches until the limit, `quit`, or an error. The tally contains the error and the batches
/// before it.
///
/// Errors: failures of the loader or device before the first batch; an epoch without batches.
pub fn run(
    loader: &Loader,
    mut step: Step,
    limit: Limit,
    quit: impl Fn() -> bool,
) -> Result<Tally, Box<dyn Error>> {
    let per_epoch = loader.batches_per_epoch();
    if per_epoch == 0 {
        let rows = loader.global_batch();
        return Err(format!(
            "the data has too few samples for one batch of {rows}: use a smaller --batch, or more data"
        )
        .into());
    }
    let most = limit.batches(per_epoch);
    let mut tally = Tally::default();
    let started = Instant::now();
    let taken = take(
        loader,
        &mut step,
        (limit, most, per_epoch),
        &quit,
        &mut tally,
        started,
    );
    if tally.batches == 0 {
        taken?;
        tally.stretch = step.end()?;
    } else {
        let ended = step.end();
        tally.error = taken.err();
        match ended {
            Ok(stretch) => tally.stretch = stretch,
            // The first error caused the later ones.
            Err(error) => tally.error = tally.error.or(Some(error)),
        }
    }
    tally.wall_s = started.elapsed().as_secs_f64();
    Ok(tally)
}

fn take(
    loader: &Loader,
    step: &mut Step,
    (limit, most, per_epoch): (Limit, u64, u64),
    quit: &impl Fn() -> bool,
    tally: &mut Tally,
    started: Instant,
) -> Result<(), Box<dyn Error>> {
    let mut first = None;
    let mut epochs = loader.epochs(0..most.div_ceil(per_epoch))?;
    while tally.batches < most {
        if quit() {
            tally.interrupted = true;
            break;
        }
        let batch = match epochs.next_within(LOOK) {
            // The run must not end within a wait, which would count as neither starvation nor a
            // step.
            Poll::Pending => continue,
            Poll::Ready(None) => break,
            Poll::Ready(Some(batch)) => batch?,
        };
        let first = *first.get_or_insert_with(Instant::now);
        let amount = samples_and_bytes(&batch);
        tally.count(amount, started);
        let whole = step.take(batch, quit)?;
        loader.mark();
        if whole && tally.batches > 1 {
            tally.stretch_samples += amount.0;
            tally.stretch_bytes += amount.1;
        }
        if limit.is_over(first.elapsed()) {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::HostStep;
    use feedline::dataset::Records;
    use std::cell::Cell;

    fn loader() -> Loader {
        Loader::builder(Records::builder(2).open_bytes([7; 100]).unwrap())
            .batch_size(20)
            .build()
            .unwrap()
    }

    fn taken(limit: Limit, quit: impl Fn() -> bool) -> Tally {
        run(
            &loader(),
            Step::Host(HostStep::new(Duration::ZERO)),
            limit,
            quit,
        )
        .unwrap()
    }

    #[test]
    fn a_run_ends_after_its_batches_or_epochs() {
        for (limit, batches, samples) in [
            (Limit::Batches(1), 1, 20),
            (Limit::Batches(4), 4, 70),
            (Limit::Epochs(1), 3, 50),
            (Limit::Epochs(2), 6, 100),
        ] {
            let tally = taken(limit, || false);
            assert_eq!(
                (tally.batches, tally.samples, tally.bytes),
                (batches, samples, 2 * samples),
                "{limit:?}"
            );
            assert_eq!(tally.stretch.steps, batches - 1);
            assert!(!tally.interrupted);
        }
    }

    #[test]
    fn a_timed_run_spans_epochs() {
        let limit = Duration::from_millis(30);
        let tally = taken(Limit::Time(limit), || false);
        assert!(
            tally.batches > 3 && tally.wall_s >= limit.as_secs_f64(),
            "{tally:?}"
        );
    }

    #[test]
    fn an_interrupted_run_keeps_its_tally() {
        let asked = Cell::new(0);
        let tally = taken(Limit::Time(Duration::MAX), || {
            asked.replace(asked.get() + 1) >= 5
        });
        assert!(tally.interrupted && tally.batches > 0, "{tally:?}");
    }

    #[test]
    fn an_error_mid_run_keeps_the_tally() {
        let path = std::env::temp_dir().join(format!("feedline-measure-{}", std::process::id()));
        std::fs::write(&path, [7; 10_000]).unwrap();
        let records = Records::builder(100).open(&path).unwrap();
        let loader = Loader::builder(records)
            .batch_size(10)
            .workers(1)
            .build()
            .unwrap();
        let step = || Step::Host(HostStep::new(Duration::ZERO));
        let tally = run(&loader, step(), Limit::Time(Duration::MAX), || {
            if loader.snapshot().consumer.batches > 0 {
                std::fs::File::options()
                    .write(true)
                    .open(&path)
                    .unwrap()
                    .set_len(0)
                    .unwrap();
            }
            false
        })
        .unwrap();
        assert!(
            tally.batches > 0 && tally.samples == 10 * tally.batches,
            "{tally:?}"
        );
        assert!(
            tally.error.is_some() && !tally.interrupted && tally.stretch.steps == tally.batches - 1,
            "{tally:?}"
        );
        // Without a batch there is no tally.
        run(&loader, step(), Limit::Epochs(1), || false).unwrap_err();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn rates_omit_the_first_batch() {
        let tally = taken(Limit::Batches(3), || false);
        assert_eq!(
            (tally.stretch_samples, tally.stretch_bytes),
            (30, 60),
            "20 and 10 of 50"
        );
        let stretch = Stretch {
            steps: 2,
            seconds: 2.0,
        };
        let tally = Tally {
            samples: 50,
            bytes: 100,
            stretch_samples: 30,
            stretch_bytes: 60,
            stretch,
            ..tally
        };
        assert_eq!(tally.rates(), (15.0, 30.0));
    }

    #[test]
    fn interrupted_steps_count_in_no_rate() {
        let loader = loader();
        let step = Step::Host(HostStep::new(Duration::from_millis(5)));
        let tally = run(&loader, step, Limit::Epochs(2), || {
            loader.report().total.consumer.batches == 3
        })
        .unwrap();
        assert!(
            tally.interrupted && tally.batches == 3 && tally.stretch.steps == 1,
            "{tally:?}"
        );
        assert_eq!(
            (tally.samples, tally.stretch_samples, tally.stretch_bytes),
            (50, 20, 40)
        );
    }
}
