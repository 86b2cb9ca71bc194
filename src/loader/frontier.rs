//! The trained frontier: the state of a run that trains later than it receives.
//!
//! ```text
//! batches    0 1 2 3 4 5 6 7 8 9 …
//! received   ■ ■ ■ ■ ■ ■ ■ ■         Loader::state is at batch 8
//! trained    ■ ■ ■ ■ · ■ · ·         the frontier is at batch 4, and batch 5 is one to skip
//! ```
//!
//! Both functions only calculate, so they also serve a process without a loader. They walk over the
//! same jobs as an iterator, hence a frontier that has caught up equals the loader's own state. The
//! past of a mixture is the exception: it stays that of the state where the count began.
//!
//! Limit: a state of 1 KiB has room for some ranges of batches that were trained early.

use super::skips::rest;
use crate::order::{Batches, LastBatch, OrderKind, Skip, Skips};
use crate::state::{Checkpoint, Cursor, State};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::order::Rank;

impl State {
    /// The same run after `samples` more samples were trained: for a trainer that counts samples
    /// behind a loader that reads ahead. Keep the state in which the count begins, and save
    /// `begin.at(trained)`. See the guide [late](crate::guide::late).
    ///
    /// The count is that of all ranks together, and goes on in later epochs. It excludes what the
    /// run does not deliver: rows that fill up a batch, skipped batches, and samples that
    /// [`LastBatch::Drop`] leaves out. [`steps`](Self::steps) grows by the batches that are complete.
    ///
    /// Within a batch, the first untrained sample begins the next batch, so the later batches of that
    /// epoch begin earlier, too.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// let loader = Loader::builder(Records::builder(1).open_bytes([7; 100])?).batch_size(10).build()?;
    /// let begin = loader.state()?;
    /// let received = loader.steps(8)?.count(); // 5 of them wait in a queue
    /// assert_eq!((received, loader.state()?.batch()), (8, 8));
    /// let frontier = begin.at(30)?;
    /// assert_eq!((frontier.batch(), frontier.steps()), (3, 3));
    /// assert_eq!(begin.at(230)?.epoch(), 2);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: [`ErrorKind::Config`] in an order of [groups](crate::Order::grouped), whose batches
    /// have different numbers of samples (count [batches](Self::trained)), and for epochs without a
    /// batch; within a batch if `LastBatch::Drop` would leave out other samples than those of the
    /// epoch's end, or if batches of that epoch are still to be skipped. The error names the nearest
    /// two numbers that are possible.
    pub fn at(&self, samples: u64) -> Result<Self> {
        let Checkpoint {
            cursor,
            global_batch,
            last,
            order,
            skips,
            ..
        } = self.checkpoint();
        if order.kind == OrderKind::Grouped {
            return Err(bad(
                "batches of groups have different numbers of samples: count batches instead",
            ));
        }
        let whole = self.batches()?;
        let of_epoch = whole.samples();
        if of_epoch == 0 && samples > 0 {
            return Err(bad(format!(
                "the {} samples of an epoch fill no batch of {global_batch}",
                whole.len()
            )));
        }
        let mut at = skips.past(&whole, *cursor).0;
        let mut left = samples;
        while left > 0 {
            let epochs = whole_epochs(skips, &at).min(left / of_epoch);
            if epochs > 0 {
                at.epoch += epochs;
                at.steps = at
                    .steps
                    .saturating_add(epochs.saturating_mul(whole.count()));
                at = skips.past(&whole, at).0;
                left -= epochs * of_epoch;
                continue;
            }
            let stop = skips.stop(&whole, &at);
            let run = rest(&whole, &at).first_position(stop) - at.position;
            if left >= run {
                at.steps = at.steps.saturating_add(stop - at.batch);
                at = skips.after(&whole, &at).ok_or_else(no_later_epoch)?;
                left -= run;
                continue;
            }
            let complete = left / global_batch;
            let part = left % global_batch;
            let batch = at.batch + complete;
            let is_fixed = *last == LastBatch::Drop || skips.next(at.epoch, batch).is_some();
            if part > 0 && is_fixed {
                let before = samples - part;
                let after = before + (run - (left - part)).min(*global_batch);
                return Err(bad(format!(
                    "{samples} samples end within batch {batch} of epoch {}; its later batches \
                     cannot begin earlier, because that epoch leaves some out: give {before} or \
                     {after} samples",
                    at.epoch
                )));
            }
            at.batch = batch;
            at.position += left;
            at.steps = at.steps.saturating_add(complete);
            break;
        }
        Ok(self.clone().moved_to(at))
    }

    /// The same run after one more batch was trained, in any order: for a consumer that is done with
    /// batches as they become ready. Keep the state in which the run begins, replace it by this one
    /// after each batch, and save it. See the guide [late](crate::guide::late).
    ///
    /// `epoch` and `batch` are [`Batch::epoch`](crate::Batch::epoch) and
    /// [`Batch::index`](crate::Batch::index). The state stands at the first batch that is not
    /// trained, and skips those after it that are. On several ranks a batch is trained when all
    /// ranks are done with their part.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// # let loader = Loader::builder(Records::builder(1).open_bytes([7; 100])?).batch_size(10).build()?;
    /// let mut frontier = loader.state()?;
    /// for batch in [0, 2, 3] {
    ///     frontier = frontier.trained(0, batch)?;
    /// }
    /// assert_eq!((frontier.batch(), frontier.steps()), (1, 3));
    /// loader.resume(&frontier)?;
    /// let next = loader.epoch(0)?.map(|batch| Ok(batch?.index())).collect::<feedline::Result<Vec<_>>>()?;
    /// assert_eq!(next, [1, 4, 5, 6, 7, 8, 9]);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: [`ErrorKind::Config`] for a batch that was trained already or is skipped, for one past
    /// the end of its epoch, and if the trained batches after the frontier are more ranges than a
    /// state of 1 KiB holds.
    pub fn trained(&self, epoch: u64, batch: u64) -> Result<Self> {
        let whole = self.batches()?;
        let mut checkpoint = self.checkpoint().clone();
        let skips = &mut checkpoint.skips;
        let mut at = skips.past(&whole, checkpoint.cursor).0;
        if rest(&whole, &at).count() == 0 {
            at = skips.after(&whole, &at).ok_or_else(no_later_epoch)?;
        }
        if (epoch, batch) < (at.epoch, at.batch) {
            return Err(bad(format!(
                "batch {batch} of epoch {epoch} was trained before: the frontier is at batch {} of \
                 epoch {}",
                at.batch, at.epoch
            )));
        }
        let end = if epoch == at.epoch {
            rest(&whole, &at).end()
        } else {
            whole.count()
        };
        if epoch == u64::MAX || batch >= end {
            return Err(bad(format!(
                "there is no batch {batch} in epoch {epoch}, which ends at {end}"
            )));
        }
        let done = Skip {
            epoch,
            start: batch,
            end: batch + 1,
        };
        if let Err(old) = skips.add(done) {
            return Err(bad(format!(
                "batch {batch} of epoch {epoch} was trained before, or is skipped: the state has {old}"
            )));
        }
        at.steps = at.steps.saturating_add(1);
        let frontier = skips.past(&whole, at).0;
        let state = Self::new(checkpoint).moved_to(frontier);
        let bytes = state.to_bytes().len();
        if state.checkpoint().skips.iter().len() > 0 && bytes > Self::BYTES_WITH_SKIPS {
            return Err(bad(format!(
                "a state would have {bytes} bytes, more than {}: train batch {} of epoch {} before \
                 more of the later ones",
                Self::BYTES_WITH_SKIPS,
                frontier.batch,
                frontier.epoch
            )));
        }
        Ok(state)
    }

    /// The batches of a whole epoch. They are the same for any number of ranks.
    fn batches(&self) -> Result<Batches> {
        let Checkpoint {
            global_batch,
            last,
            order,
            ..
        } = self.checkpoint();
        Batches::new(order.positions, *global_batch, *last, Rank::single())
    }
}

/// Number of epochs from `at` on that have all their batches.
fn whole_epochs(skips: &Skips, at: &Cursor) -> u64 {
    if at.position > 0 {
        return 0;
    }
    let ahead = skips.ahead(at.epoch, 0);
    let next = ahead.iter().next().map_or(u64::MAX, |skip| skip.epoch);
    next.saturating_sub(at.epoch)
}

fn no_later_epoch() -> Error {
    bad(format!("epoch {} cannot be used", u64::MAX))
}

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, Stage::State, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::Loader;
    use feedline_core::order::Draws;
    use feedline_formats::Records;
    use proptest::prelude::*;

    /// A batch that a run delivers.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Delivered {
        epoch: u64,
        batch: u64,
        position: u64,
        samples: u64,
    }

    const EPOCHS: u64 = 6;

    /// The batches that a run from `state` delivers before epoch 6, one after the other.
    fn deliveries(state: &State) -> Vec<Delivered> {
        let checkpoint = state.checkpoint();
        let Cursor { epoch: first, .. } = checkpoint.cursor;
        let positions = checkpoint.order.positions;
        let mut found = Vec::new();
        for epoch in first..EPOCHS {
            let is_first = epoch == first;
            let mut position = if is_first { state.position() } else { 0 };
            let mut batch = if is_first { state.batch() } else { 0 };
            while position < positions {
                let samples = (positions - position).min(checkpoint.global_batch);
                let is_left_out = checkpoint
                    .skips
                    .iter()
                    .any(|skip| skip.epoch == epoch && (skip.start..skip.end).contains(&batch));
                let is_batch =
                    samples == checkpoint.global_batch || checkpoint.last != LastBatch::Drop;
                if is_batch && !is_left_out {
                    found.push(Delivered {
                        epoch,
                        batch,
                        position,
                        samples,
                    });
                }
                position += samples;
                batch += 1;
            }
        }
        found
    }

    /// States at batch `begin` of epochs of 1 to 40 samples, with up to two ranges to skip.
    fn states() -> impl Strategy<Value = State> {
        let loader = Loader::builder(Records::builder(1).open_bytes([7; 100]).unwrap());
        let checkpoint = loader.batch_size(4).build().unwrap().state().unwrap();
        let skips = prop::collection::vec((0_u64..3, 0_u64..12, 1_u64..9), 0..3);
        (1_u64..40, 1_u64..9, 0_usize..4, 0_u64..40, skips).prop_map(
            move |(positions, global, last, begin, skips)| {
                let mut checkpoint = checkpoint.checkpoint().clone();
                checkpoint.order.positions = positions;
                checkpoint.global_batch = global;
                checkpoint.last = [
                    LastBatch::Keep,
                    LastBatch::Mask,
                    LastBatch::Pad,
                    LastBatch::Drop,
                ][last];
                checkpoint.cursor.batch = begin % positions.div_ceil(global);
                checkpoint.cursor.position = checkpoint.cursor.batch * global;
                checkpoint.cursor.steps = 9;
                for (epoch, start, many) in skips {
                    let _ = checkpoint.skips.add(Skip {
                        epoch,
                        start,
                        end: start + many,
                    });
                }
                State::new(checkpoint)
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn a_count_of_samples_is_one_batch_after_the_other(state in states(), samples in 1_u64..150) {
            let all = deliveries(&state);
            if all.iter().map(|batch| batch.samples).sum::<u64>() <= samples {
                let fills_none = deliveries(&state.clone().at_epoch(5)).is_empty();
                prop_assert!(!fills_none || state.at(samples).is_err());
                return Ok(());
            }
            let mut left = samples;
            let mut complete = 0;
            while left >= all[complete].samples {
                left -= all[complete].samples;
                complete += 1;
            }
            let next = all[complete];
            let checkpoint = state.checkpoint();
            let is_fixed = checkpoint.last == LastBatch::Drop
                || checkpoint.skips.next(next.epoch, next.batch).is_some();
            if left > 0 && is_fixed {
                let before = samples - left;
                let after = before + next.samples;
                let error = state.at(samples).unwrap_err();
                let words = format!("give {before} or {after} samples");
                prop_assert!(error.message().ends_with(&words), "{}", error);
                prop_assert!(state.at(before).is_ok() && state.at(after).is_ok());
                return Ok(());
            }
            let got = state.at(samples).unwrap();
            let want = Cursor {
                epoch: next.epoch,
                position: next.position + left,
                batch: next.batch,
                steps: 9 + complete as u64,
            };
            prop_assert_eq!(got.checkpoint().cursor, want);
            prop_assert_eq!(State::from_bytes(&got.to_bytes()).unwrap(), got);
            let _ = state.at(u64::MAX - samples);
        }

        #[test]
        fn batches_trained_in_any_order_are_all_that_is_left_out(state in states(), seed in 0_u64..99) {
            let mut left = deliveries(&state);
            let mut draws = Draws::new(seed, 0, 0, "trained");
            let mut state = state;
            for steps in 10..22 {
                if left.len() < 9 {
                    break;
                }
                let done = left.remove(draws.below(8) as usize);
                state = state.trained(done.epoch, done.batch).unwrap();
                prop_assert!(state.trained(done.epoch, done.batch).is_err());
                prop_assert_eq!(deliveries(&state), left.clone());
                prop_assert_eq!(state.steps(), steps);
                prop_assert!((state.epoch(), state.batch()) == (left[0].epoch, left[0].batch));
            }
        }
    }

    #[test]
    fn a_batch_that_cannot_be_trained_is_named() {
        let records = Records::builder(1).open_bytes([7; 1000]).unwrap();
        let loader = Loader::builder(records).batch_size(1).build().unwrap();
        let begin = loader.state().unwrap();
        let state = begin.trained(0, 0).unwrap().trained(0, 2).unwrap();
        for (epoch, batch, words) in [
            (
                0,
                0,
                "was trained before: the frontier is at batch 1 of epoch 0",
            ),
            (
                0,
                2,
                "was trained before, or is skipped: the state has batches 2..3 of epoch 0",
            ),
            (
                4,
                1000,
                "there is no batch 1000 in epoch 4, which ends at 1000",
            ),
            (u64::MAX, 0, "there is no batch 0 in epoch"),
        ] {
            let error = state.trained(epoch, batch).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.message().contains(words), "{error}");
        }
        let mut state = begin;
        let mut ranges = 0;
        let error = loop {
            match state.trained(0, 2 * (ranges + 1)) {
                Ok(next) => state = next,
                Err(error) => break error,
            }
            ranges += 1;
        };
        assert!(ranges >= 10, "{ranges}");
        let words = "more than 940: train batch 0 of epoch 0 before more of the later ones";
        assert!(error.message().ends_with(words), "{error}");
    }
}
