//! The state of a run as a value, and resuming from it.
//!
//! A state covers all ranks: (epoch, global position), and the settings that map positions to
//! samples. It omits the settings of a machine (workers, reader, depth, slots, world size), so
//! these may change.

use super::{BatchPlace, LoaderState};
use crate::order::{LastBatch, OrderKind, Progress, Settings};
use crate::pipeline::runtime::within;
use crate::state::{Checkpoint, Cursor, Past, State};
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught};
use feedline_base::setting::Setting;
use feedline_core::dataset::Fingerprint;
use feedline_core::order::GroupsMark;
use std::fmt::{Debug, Display};

/// The values that all states of a loader share.
pub(super) struct RunIdentity {
    order: Settings,
    groups: Option<GroupsMark>,
    dataset: Fingerprint,
}

impl LoaderState {
    pub(super) fn state(&self) -> Result<State> {
        Ok(State::new(self.checkpoint(self.place())?))
    }

    pub(super) fn checkpoint(
        &self,
        BatchPlace { cursor, skips, .. }: BatchPlace,
    ) -> Result<Checkpoint> {
        let RunIdentity {
            order,
            groups,
            dataset,
        } = self.run_identity()?;
        let jobs = self.jobs();
        let order = jobs.order.settings_now(*order);
        let dataset = dataset.clone();
        let global_batch = jobs.global;
        let last = jobs.last;
        let draws = self.runtime.core().samples.seed;
        let skips = skips.ahead(cursor.epoch, cursor.batch);
        let past = self.past(cursor.epoch, cursor.position)?;
        let groups = *groups;
        Ok(Checkpoint {
            cursor,
            global_batch,
            last,
            order,
            draws,
            dataset,
            skips,
            past,
            groups,
        })
    }

    fn past(&self, epoch: u64, position: u64) -> Result<Option<Past>> {
        let progress = self.jobs().order.progress(epoch, position)?;
        Ok(progress.map(|Progress { past, segments, .. }| Past {
            epoch,
            position,
            segments,
            hash: past,
        }))
    }

    /// What identifies the run: the order, the groups and the fingerprint of the dataset. `build`
    /// calls it, so that the files are fingerprinted as the run first sees them. A failure is not
    /// kept.
    pub(super) fn run_identity(&self) -> Result<&RunIdentity> {
        if let Some(made) = self.run_identity.get() {
            return Ok(made);
        }
        // Datasets and samplers are the user's code: they may panic.
        let made = caught(Stage::State, || {
            let jobs = self.jobs();
            let order = jobs.order.settings(self.whole.len())?;
            let groups = jobs.order.groups_mark();
            let dataset = self.runtime.core().samples.dataset.clone();
            let dataset = within(
                self.deadlines.stall,
                "the storage of the dataset's files",
                move || Fingerprint::of(&*dataset),
            )??;
            Ok(RunIdentity {
                order,
                groups,
                dataset,
            })
        })?;
        Ok(self.run_identity.get_or_init(|| made))
    }

    /// Moves to the position of `state`. With `any_batch`, the global batch and the last batch may
    /// differ from the loader's.
    pub(super) fn resume(&self, state: &State, any_batch: bool) -> Result<()> {
        let place = self.place_in(state, any_batch)?;
        self.set_place(place);
        Ok(())
    }

    /// The position of `state` in this loader.
    pub(super) fn place_in(&self, state: &State, any_batch: bool) -> Result<BatchPlace> {
        caught(Stage::State, || self.compared(state, any_batch))
    }

    fn compared(&self, state: &State, any_batch: bool) -> Result<BatchPlace> {
        let own = self.checkpoint(self.place())?;
        let saved = &redrawn(&own, state.checkpoint());
        // Compare the past at the position where the state was taken, not at the cursor, which may
        // have been moved.
        let past = saved
            .past
            .map_or(Ok(None), |past| self.past(past.epoch, past.position))?;
        let own = Checkpoint { past, ..own };
        let dataset = &self.runtime.core().samples.dataset;
        if past.is_none() || !own.dataset.appends_to(&saved.dataset, dataset.sources()) {
            let keep = "a mix keeps its datasets in order: append new ones, and give weight 0 to a \
                        dataset that is to be dropped";
            let compared = own.dataset.compare(&saved.dataset, &**dataset);
            compared.map_err(|error| {
                if past.is_some() {
                    error.with_note(keep)
                } else {
                    error
                }
            })?;
        }
        if let Some(difference) = difference(&own, saved, any_batch) {
            return Err(Error::new(ErrorKind::State, Stage::State, difference));
        }
        let Cursor {
            position, batch, ..
        } = saved.cursor;
        if batch > position {
            // Each batch has at least one position. With a larger batch number, the epoch would
            // later seem too short.
            let message = format!("the state is damaged: batch {batch} at position {position}");
            return Err(Error::new(ErrorKind::State, Stage::State, message));
        }
        if self.whole.are_grouped() && position != self.whole.first_position(batch) {
            let message =
                format!("the state is damaged: batch {batch} of groups at position {position}");
            return Err(Error::new(ErrorKind::State, Stage::State, message));
        }
        let mut cursor = saved.cursor;
        if cursor.position > 0
            && self
                .whole
                .clone()
                .starting(cursor.position, cursor.batch)
                .count()
                == 0
        {
            // The rest fills no batch of the new size and is dropped: the epoch is over.
            cursor = Cursor {
                epoch: cursor.epoch.saturating_add(1),
                steps: cursor.steps,
                ..Cursor::default()
            };
        }
        let skips = saved.skips.clone();
        let skipped = self.place().skipped;
        Ok(BatchPlace {
            cursor,
            resumed: true,
            skips,
            skipped,
        })
    }
}

/// The saved checkpoint. Between two epochs nothing depends on the list of indices or the weights,
/// so the next epoch may have others.
fn redrawn(own: &Checkpoint, saved: &Checkpoint) -> Checkpoint {
    let now = &own.order;
    let then = &saved.order;
    let at = saved.cursor;
    let mut saved = saved.clone();
    let lists =
        now.kind == then.kind && matches!(now.kind, OrderKind::Indices | OrderKind::Weighted);
    let differ = (now.positions, now.identity) != (then.positions, then.identity);
    if lists && differ && [0, then.positions].contains(&at.position) {
        if at.position > 0 {
            saved.cursor = Cursor {
                epoch: at.epoch.saturating_add(1),
                steps: at.steps,
                ..Cursor::default()
            };
        }
        saved.order.positions = now.positions;
        saved.order.identity = now.identity;
    }
    saved
}

/// Whether the batches have the same rows, except for the rows that fill up the last batch.
fn same_batches(own: &Checkpoint, saved: &Checkpoint) -> bool {
    let now = own.last;
    let then = saved.last;
    let fills =
        now != LastBatch::Drop && then != LastBatch::Drop && own.order.kind != OrderKind::Grouped;
    own.global_batch == saved.global_batch && (now == then || fills)
}

/// The name of a variant in lower case.
fn lower(variant: impl Debug) -> String {
    format!("{variant:?}").to_lowercase()
}

fn way_out(setting: Setting, then: impl Debug) -> String {
    setting.hint(|setting| format!(": set {}, or resume rebatched", setting.with(then)))
}

/// How the pasts of two mixtures differ at the same position.
fn other_past(now: Past, then: Past) -> Option<String> {
    let Past {
        epoch,
        position,
        segments,
        hash,
    } = now;
    let place = format!("position {position} of epoch {epoch}");
    if segments != then.segments {
        let then = then.segments;
        return Some(format!(
            "before {place}, where the state was taken, {then} segments of the mix had begun, but \
             {segments} in the loader's schedule: keep the segments that had begun, and begin \
             others there or later"
        ));
    }
    (hash != then.hash).then(|| {
        format!(
            "the mix before {place}, where the state was taken, differs: in the first position, \
             weights or sources of a segment that had begun, or in the key, or the state is from \
             an older feedline, which rounded these weights to 1/10000 of their sum"
        )
    })
}

/// The difference between the groups and their batches.
fn other_groups(now: GroupsMark, own: &Checkpoint, saved: &Checkpoint) -> Option<String> {
    let older = "the state is from an older version, in which each group had its own last batch: \
                 resume with the release that saved it, or start a new run";
    if now.flows && saved.groups.is_none() {
        return Some(older.into());
    }
    if own.order.identity == saved.order.identity {
        return None;
    }
    let Some(then) = saved.groups else {
        return Some("the state and the loader have different groups or batch sizes".into());
    };
    let differ = |what: &str, then: &dyn Display, now: &dyn Display, remedy: &str| {
        Some(format!(
            "{what} {then} in the state, {now} in the loader: {remedy}"
        ))
    };
    let anew = "give the groups and batch sizes of the state's run; they stay the same in a \
         rebatched run, too";
    if (then.count, then.bound, then.bounds) != (now.count, now.bound, now.bounds) {
        let words = |mark: GroupsMark| match mark.bound {
            0 => mark.count.to_string(),
            bound => format!("{} up to {bound} (hash {:08x})", mark.count, mark.bounds),
        };
        return differ("the groups are", &words(then), &words(now), anew);
    }
    if then.lengths != now.lengths {
        let words = |mark: GroupsMark| format!("{:08x}", mark.lengths);
        let what = "the groups made from lengths, sizes or numbers of the samples have the hash";
        return differ(what, &words(then), &words(now), anew);
    }
    if then.budget != now.budget {
        let words = |mark: GroupsMark| {
            if mark.budget == 0 {
                "none".into()
            } else {
                mark.budget.to_string()
            }
        };
        let remedy = match then.budget {
            0 => "give none".into(),
            budget => format!("set {}", Setting::GroupsBudget.with(budget)),
        };
        return differ(
            "the budget of the groups is",
            &words(then),
            &words(now),
            &remedy,
        );
    }
    if then.multiple != now.multiple {
        let remedy = format!("set {}", Setting::MultipleOf.with(then.multiple));
        return differ(
            "the row counts of groups are a multiple of",
            &then.multiple,
            &now.multiple,
            &remedy,
        );
    }
    let then = saved.global_batch;
    let now = own.global_batch;
    match then == now {
        true => Some(format!(
            "the state and the loader have different batch sizes of the groups: {anew}"
        )),
        false => differ("the largest batch of the groups is", &then, &now, anew),
    }
}

/// The first setting that would change the sequence of batches.
fn difference(own: &Checkpoint, saved: &Checkpoint, any_batch: bool) -> Option<String> {
    fn differ(what: &str, then: impl Display, now: impl Display) -> String {
        format!("the {what} is {then} in the state, {now} in the loader")
    }
    let now = &own.order;
    let then = &saved.order;
    let kind = |order: &Settings| match order.kind {
        OrderKind::Indices | OrderKind::Sampler | OrderKind::Weighted if order.shuffled => {
            lower(order.kind) + ", shuffled"
        }
        kind => lower(kind),
    };
    if (now.kind, now.shuffled) != (then.kind, then.shuffled) {
        return Some(differ("order", kind(then), kind(now)));
    }
    if let Some(groups) = own.groups
        && let Some(difference) = other_groups(groups, own, saved)
    {
        return Some(difference);
    }
    if let Some(((what, first), (_, second))) = saved
        .numbers()
        .into_iter()
        .zip(own.numbers())
        .find(|(a, b)| a != b)
    {
        // A mixture's epoch length is the number of its samples unless it is set, and datasets may
        // have been appended.
        let set = |len: Setting| format!(": set {}", len.with(then.positions));
        let lens = own.past.is_some() && first == then.positions && second == now.positions;
        let hint = if lens {
            Setting::EpochLen.hint(set)
        } else {
            String::new()
        };
        return Some(differ(what, first, second) + &hint);
    }
    if let (Some(now), Some(then)) = (own.past, saved.past) {
        if let Some(difference) = other_past(now, then) {
            return Some(difference);
        }
    } else if now.identity != then.identity {
        let what = match now.kind {
            OrderKind::Indices => {
                "indices: only a state between two epochs can resume with another list"
            }
            OrderKind::Weighted => {
                "weights: only a state between two epochs can resume with other weights"
            }
            OrderKind::Windowed => "run lengths",
            _ => "sampler settings",
        };
        return Some(format!("the state and the loader have different {what}"));
    }
    let then = saved.global_batch;
    let now = own.global_batch;
    if then != now && !any_batch {
        return Some(differ("global batch", then, now) + &way_out(Setting::GlobalBatch, then));
    }
    let then = saved.last;
    let now = own.last;
    if !same_batches(own, saved) && !any_batch {
        return Some(
            differ("last batch", lower(then), lower(now)) + &way_out(Setting::LastBatch, then),
        );
    }
    let skip = saved
        .skips
        .iter()
        .next()
        .filter(|_| !same_batches(own, saved))?;
    let global = Setting::GlobalBatch.hint(|global| global.with(saved.global_batch));
    Some(format!(
        "the state skips {skip}, which are not batches of this loader: resume with {global} until \
         the run is past them"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::LastBatch;
    use crate::order::Skips;

    #[test]
    fn groups_that_differ_are_named_with_both_values() {
        let mark = GroupsMark {
            flows: true,
            budget: 400,
            bound: 90,
            multiple: 4,
            count: 3,
            bounds: 1,
            lengths: 2,
        };
        let checkpoint = |groups: Option<GroupsMark>, identity, global_batch| {
            let kind = OrderKind::Grouped;
            let order = Settings {
                kind,
                shuffled: true,
                seed: 0,
                window: 0,
                lanes: 1,
                positions: 9,
                identity,
            };
            let dataset = Fingerprint::of_words([0; 22]);
            let cursor = Cursor::default();
            let last = LastBatch::Keep;
            let skips = Skips::default();
            Checkpoint {
                cursor,
                global_batch,
                last,
                order,
                draws: 0,
                dataset,
                skips,
                past: None,
                groups,
            }
        };
        let own = checkpoint(Some(mark), 7, 8);
        let said = |saved: Option<GroupsMark>, batch| {
            difference(&own, &checkpoint(saved, 6, batch), true).unwrap()
        };
        let anew = "give the groups and batch sizes of the state's run; they stay the same in a \
             rebatched run, too";
        let older = "the state is from an older version, in which each group had its own last \
                     batch: resume with the release that saved it, or start a new run";
        assert_eq!(said(None, 8), older);
        for (saved, batch, words) in [
            (
                GroupsMark { count: 2, ..mark },
                8,
                format!(
                    "the groups are 2 up to 90 (hash 00000001) in the state, 3 up to 90 (hash \
                     00000001) in the loader: {anew}"
                ),
            ),
            (
                GroupsMark { lengths: 5, ..mark },
                8,
                format!(
                    "the groups made from lengths, sizes or numbers of the samples have the hash \
                     00000005 in the state, 00000002 in the loader: {anew}"
                ),
            ),
            (
                GroupsMark {
                    budget: 500,
                    ..mark
                },
                8,
                "the budget of the groups is 500 in the state, 400 in the loader: set \
                 `Groups::budget(500)`"
                    .into(),
            ),
            (
                GroupsMark {
                    multiple: 2,
                    ..mark
                },
                8,
                "the row counts of groups are a multiple of 2 in the state, 4 in the loader: set \
                 `Groups::multiple_of(2)`"
                    .into(),
            ),
            (
                mark,
                9,
                format!(
                    "the largest batch of the groups is 9 in the state, 8 in the loader: {anew}"
                ),
            ),
            (
                mark,
                8,
                format!(
                    "the state and the loader have different batch sizes of the groups: \
                         {anew}"
                ),
            ),
        ] {
            assert_eq!(said(Some(saved), batch), words);
        }
        assert_eq!(difference(&own, &own.clone(), false), None);
        // Groups that end apart are arranged as in older versions.
        let apart = checkpoint(
            Some(GroupsMark {
                flows: false,
                ..mark
            }),
            7,
            8,
        );
        assert_eq!(difference(&apart, &checkpoint(None, 7, 8), false), None);
    }
}
