//! Skipped batches: how a run continues around them, and the call that adds them.
//!
//! ```text
//! batches of an epoch   0 1 2 3 4 5 6 7 8 9      jobs, planned one after the other: 0..3, 6..10 of this epoch,
//! left out                    ─────              and so on; each is what a resumed run would begin with
//! ```

use super::{BatchPlace, Live, Loader, LoaderState};
use crate::order::{Batches, Skip, Skips};
use crate::state::{Cursor, State};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::ops::Range;

impl Loader {
    /// Skips these batches of `epoch`, for example those before a loss spike: they are not read and
    /// not delivered. Batches count from the beginning of the epoch, as in [`State::batch`]. Each
    /// rank of a run must make the same call.
    ///
    /// The batches around them stay the same. A [`state`](Self::state) keeps the ranges that are
    /// still to be skipped, so that a resumed run needs no further call; [`State::agree`] names
    /// ranks that differ. The length of an [`Epoch`](super::Epoch) excludes skipped batches,
    /// [`batches_per_epoch`](Self::batches_per_epoch) includes them. [`State::steps`] counts
    /// delivered batches, and the report counts skipped ones.
    ///
    /// ```
    /// # use feedline::{Loader, dataset::Records};
    /// let loader = Loader::builder(Records::builder(1).open_bytes([7; 100])?).batch_size(10).build()?;
    /// loader.skip(0, 2..9)?;
    /// let first = loader.epoch(0)?.map(|batch| Ok(batch?.ids()[0])).collect::<feedline::Result<Vec<_>>>()?;
    /// assert_eq!(first, [0, 10, 90]);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Errors: [`ErrorKind::Config`] for an empty range, batches past the end of the epoch, before
    /// the run's position or already skipped, and for more ranges than a state of 1 KiB holds;
    /// [`ErrorKind::EpochLive`] while an iterator of this loader is alive.
    pub fn skip(&self, epoch: u64, batches: Range<u64>) -> Result<()> {
        self.shared.info.process.check()?;
        let _live = Live::claim(
            &self.shared,
            "another iterator of this loader is alive: drop it before you skip batches",
        )?;
        let place = self.shared.with_skip(Skip {
            epoch,
            start: batches.start,
            end: batches.end,
        })?;
        self.shared.set_place(place);
        Ok(())
    }
}

impl LoaderState {
    fn with_skip(&self, skip: Skip) -> Result<BatchPlace> {
        let bad = |words: String| {
            Err(Error::new(
                ErrorKind::Config,
                Stage::Build,
                format!("{skip}: {words}"),
            ))
        };
        let mut place = self.place();
        let at = place.cursor;
        if skip.start >= skip.end {
            return bad("the range is empty or reversed".into());
        }
        if skip.epoch == u64::MAX {
            return bad("this epoch cannot be used".into());
        }
        if (skip.epoch, skip.start) < (at.epoch, at.batch) {
            let Cursor { epoch, batch, .. } = at;
            return bad(format!(
                "the run is at batch {batch} of epoch {epoch}; resume an earlier state"
            ));
        }
        let end = if skip.epoch == at.epoch {
            rest(&self.whole, &at).end()
        } else {
            self.whole.count()
        };
        if skip.end > end {
            return bad(format!("the epoch ends at {end}"));
        }
        if let Err(old) = place.skips.add(skip) {
            return bad(format!("{old} are already skipped"));
        }
        let bytes = State::new(self.checkpoint(place.clone())?).to_bytes().len();
        if bytes > State::BYTES_WITH_SKIPS {
            return bad(format!(
                "a state would have {bytes} bytes, more than {}; skip fewer ranges at once",
                State::BYTES_WITH_SKIPS
            ));
        }
        Ok(place)
    }
}

/// The remaining batches of the epoch of `at`.
pub(super) fn rest(whole: &Batches, at: &Cursor) -> Batches {
    whole.clone().starting(at.position, at.batch)
}

impl Skips {
    /// The first position from `at` on whose batch is delivered, and the number of skipped batches
    /// before it.
    pub(super) fn past(&self, whole: &Batches, mut at: Cursor) -> (Cursor, u64) {
        let mut skipped = 0_u64;
        while let Some(skip) = self
            .next(at.epoch, at.batch)
            .filter(|skip| skip.start <= at.batch)
        {
            let rest = rest(whole, &at);
            let batch = skip.end.min(rest.end());
            skipped += batch - at.batch;
            at = match batch < rest.end() {
                true => Cursor {
                    position: rest.first_position(batch),
                    batch,
                    ..at
                },
                false => Cursor {
                    epoch: at.epoch.saturating_add(1),
                    steps: at.steps,
                    ..Cursor::default()
                },
            };
        }
        (at, skipped)
    }

    /// The exclusive end of a job that begins at `at`: the first batch of the next skip, or the end
    /// of the epoch.
    pub(super) fn stop(&self, whole: &Batches, at: &Cursor) -> u64 {
        let end = rest(whole, at).end();
        self.next(at.epoch, at.batch)
            .map_or(end, |skip| skip.start.min(end))
    }

    /// The start of the job after the one at `at`. `None` after the last epoch.
    pub(super) fn after(&self, whole: &Batches, at: &Cursor) -> Option<Cursor> {
        let rest = rest(whole, at);
        let batch = self.stop(whole, at);
        let next = match batch < rest.end() {
            true => Cursor {
                position: rest.first_position(batch),
                batch,
                ..*at
            },
            false => Cursor {
                epoch: at.epoch.checked_add(1)?,
                steps: at.steps,
                ..Cursor::default()
            },
        };
        Some(self.past(whole, next).0)
    }

    /// Number of batches that are delivered from `at` to the beginning of the epoch `end`.
    pub(super) fn count(&self, whole: &Batches, at: &Cursor, end: u64) -> u64 {
        let Some(later) = end
            .checked_sub(at.epoch)
            .and_then(|epochs| epochs.checked_sub(1))
        else {
            return 0;
        };
        let rest = rest(whole, at);
        let all = whole
            .count()
            .saturating_mul(later)
            .saturating_add(rest.count());
        let skipped = self
            .iter()
            .filter(|skip| (at.epoch..end).contains(&skip.epoch))
            .map(|skip| match skip.epoch {
                epoch if epoch == at.epoch => skip
                    .end
                    .min(rest.end())
                    .saturating_sub(skip.start.max(at.batch)),
                _ => skip.end.min(whole.count()).saturating_sub(skip.start),
            });
        all.saturating_sub(skipped.sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::LastBatch;
    use feedline_core::order::Rank;
    use proptest::prelude::*;

    /// Places of the batches of epochs 0..4 in sequence, from `at` on, without the skipped batches.
    fn naive(whole: &Batches, skips: &Skips, mut at: Cursor) -> Vec<Cursor> {
        let mut places = Vec::new();
        while at.epoch < 4 {
            let rest = rest(whole, &at);
            if at.batch < rest.end()
                && !skips.iter().any(|skip| {
                    skip.epoch == at.epoch && (skip.start..skip.end).contains(&at.batch)
                })
            {
                places.push(at);
            }
            at = match rest.after(at.batch) {
                Some((position, batch)) => Cursor {
                    position,
                    batch,
                    ..at
                },
                None => Cursor {
                    epoch: at.epoch + 1,
                    ..Cursor::default()
                },
            };
        }
        places
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100_000))]

        #[test]
        fn jobs_visit_every_batch_but_the_skipped_ones(
            len in 1_u64..60, global in 1_u64..12, last in 0_usize..4, begin in 0_u64..70,
            ranges in prop::collection::vec((0_u64..4, 0_u64..40, 1_u64..20), 0..5)
        ) {
            let last = [LastBatch::Keep, LastBatch::Mask, LastBatch::Pad, LastBatch::Drop][last];
            let whole = Batches::new(len, global, last, Rank::single()).unwrap();
            let begin = begin % (whole.count() + 1);
            let at = Cursor { position: whole.first_position(begin), batch: begin, ..Cursor::default() };
            let mut skips = Skips::default();
            for (epoch, start, many) in ranges {
                let _ = skips.add(Skip { epoch, start, end: start + many });
            }
            prop_assert!(skips.are_legal());
            let want = naive(&whole, &skips, at);
            // Walks like an iterator: from the first position, one job after the other.
            let mut found = Vec::new();
            let mut skipped = 0;
            let (first, mut gone) = skips.past(&whole, at);
            let mut job = Some(first);
            while let Some(from) = job.filter(|job| job.epoch < 4) {
                let batches = whole.clone().starting(from.position, from.batch).until(skips.stop(&whole, &from));
                for batch in batches.first()..batches.end() {
                    let place = Cursor { position: batches.first_position(batch), batch, ..from };
                    prop_assert_eq!(skips.count(&whole, &place, 4) as usize, want.len() - found.len());
                    found.push(place);
                    skipped += gone;
                    // Advances like the place of the loader.
                    let next = match whole.clone().starting(place.position, place.batch).after(batch) {
                        Some((position, batch)) => Cursor { position, batch, ..place },
                        None => Cursor { epoch: place.epoch + 1, ..Cursor::default() },
                    };
                    gone = skips.past(&whole, next).1;
                }
                job = skips.after(&whole, &from);
            }
            prop_assert_eq!(&found, &want);
            prop_assert_eq!(skips.count(&whole, &first, 4) as usize, want.len());
            if first.epoch < 4 && whole.count() > 0 {
                let planned = whole.count() * 4 - begin;
                let behind = skips.iter().filter(|skip| skip.epoch < 4).map(|skip| {
                    let from = if skip.epoch == 0 { skip.start.max(begin) } else { skip.start };
                    skip.end.min(whole.count()).saturating_sub(from)
                });
                prop_assert_eq!(planned, found.len() as u64 + behind.sum::<u64>());
                prop_assert!(skipped <= planned - found.len() as u64);
            }
        }
    }
}
