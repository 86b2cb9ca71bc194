//! Writes shards in one call: makes or finds a plan, runs all its tasks, and leaves only their
//! output.

use super::super::output::remove_if_there;
use super::super::shards::{PLAN, ShardSettings, Shards};
use super::super::tokens::part;
use super::finish::{Check, Finished};
use super::plan::{Plan, Work, in_empty, root_of};
use super::run::Event;
use super::tasks::{Tasks, bad};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_base::stop::Stop;
use feedline_core::storage::publish::{Lock, remove_folder};
use std::ops::ControlFlow;
use std::path::Path;

impl Shards {
    /// Writes the pictures of the folder `from` into the folder `to`. `watch` gets every step. If
    /// it returns `Break`, the call ends after the pictures in progress, with
    /// [`ErrorKind::Cancelled`].
    ///
    /// While it works, `to` also holds `plan.fdp` and `tasks/`. A call that was stopped, killed or
    /// failed leaves them, and the same call continues there: it reads the finished shards, and
    /// writes the others. The shards then have the same bytes as after an uninterrupted call.
    ///
    /// Errors: those of [`plan`](Self::plan), [`Plan::run`] and [`Plan::finish`]; a damaged
    /// picture, with its path (the first in the order of writing); [`ErrorKind::Config`] if `to`
    /// holds something else, holds a plan with other settings, or another call is writing there;
    /// [`ErrorKind::Changed`] if pictures were added, removed or modified since the call that left
    /// the plan.
    pub fn write(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        mut watch: impl FnMut(Event<'_>) -> ControlFlow<()> + Send,
    ) -> Result<Finished> {
        let (mut plan, _lock) = self.planned(from.as_ref(), to.as_ref())?;
        // This call decides whether damaged pictures are skipped, not the call that left the plan.
        if let Work::Shards(settings) = &mut plan.head.work {
            settings.skip_damaged = self.settings.skip_damaged;
        }
        let stop = Stop::new();
        let mut watch = |event: Event<'_>| {
            if watch(event).is_break() {
                stop.request();
            }
        };
        let ran = plan.run_shards(&Tasks::all(), self.workers, &stop, &mut watch, true);
        let ran = ran.map_err(|error| match error.stage() {
            Stage::Decode => Setting::SkipDamaged
                .there()
                .into_iter()
                .fold(error, |error, skip| {
                    error.with_note(&format!("{skip} leaves damaged pictures out"))
                }),
            _ => error,
        })?;
        if ran.stopped {
            let done = ran.done + ran.skipped;
            let tasks = plan.tasks();
            let message =
                format!("stopped after {done} of {tasks} shards: repeat the call to continue");
            return Err(
                Error::new(ErrorKind::Cancelled, Stage::Write, message).with_path(to.as_ref())
            );
        }
        // `run` has read every shard that it did not write, so comparing lengths is enough.
        let finished = plan.finish_alone(Check::Lengths, self.workers)?;
        if !finished.missing.is_empty() {
            let message = format!(
                "shards were removed meanwhile: {}; call again",
                finished.missing_list()
            );
            return Err(
                Error::new(ErrorKind::Changed, Stage::Write, message).with_path(to.as_ref())
            );
        }
        if finished.damaged > 0 && !self.settings.skip_damaged {
            let message = format!(
                "an earlier call left out {} damaged pictures, which damaged.tsv names: \
                 leave them out{}, or remove the output folder",
                finished.damaged,
                Setting::SkipDamaged.hint(|skip| format!(" ({skip})")),
            );
            return Err(bad(message).with_path(to.as_ref()));
        }
        plan.remove()?;
        Ok(finished)
    }

    /// The folder's plan: an existing one if it has these settings and pictures, or a new one.
    fn planned(&self, from: &Path, to: &Path) -> Result<(Plan, Lock)> {
        let root = root_of(from, to)?;
        let tasks = |samples, bytes| self.count(samples, bytes);
        let old = match Plan::open(to.join(PLAN)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let plan = in_empty(to, || self.plan_in(&root, to, tasks))?;
                let lock = plan.lock()?;
                return Ok((plan, lock));
            }
            old => old?,
        };
        // Lock first, so that no other call finishes the plan meanwhile.
        let lock = old.lock()?;
        let skip_damaged = matches!(&old.head.work, Work::Shards(there) if there.skip_damaged);
        let work = Work::Shards(ShardSettings {
            skip_damaged,
            ..self.settings.clone()
        });
        let same = old.head.work == work && tasks(old.inputs(), old.bytes())? == old.tasks();
        if !same || old.root() != root {
            let message = "the output folder holds a plan with other settings or another input \
                 folder: use those again, or remove the output folder";
            return Err(bad(message).with_path(old.reader.path()));
        }
        // List the pictures again. If they have not changed, the old plan stays.
        let plan = self
            .plan_in(&root, to, tasks)
            .map_err(|error| match error.kind() {
                ErrorKind::Config if error.site().path.as_deref() == Some(old.reader.path()) => {
                    let message = format!(
                        "pictures were added, removed or modified since the plan in {} was made: \
                     undo that, or remove the output folder and begin again",
                        to.display()
                    );
                    Error::new(ErrorKind::Changed, Stage::Write, message).with_path(&root)
                }
                _ => error,
            });
        Ok((plan?, lock))
    }
}

impl Plan {
    /// Removes records, parts of tokens and the plan. The plan is removed last: a call that finds it
    /// redoes the missing tasks.
    pub(super) fn remove(&self) -> Result<()> {
        for task in 0..self.tasks() {
            remove_if_there(&self.record(task))?;
            if self.is_of_tokens() {
                remove_if_there(&self.dir.join(part(task)))?;
            }
        }
        remove_folder(&self.records());
        remove_if_there(self.reader.path())
    }
}
