//! Runs tasks of a plan, one after the other, each with all workers.

use super::super::output;
use super::super::shards::MANIFEST;
use super::super::tokens::part;
use super::plan::{Plan, Work};
use super::record;
use super::record::{Done, FoundRecord, Record, RecordList};
use super::shard::Task;
use super::tasks::{Tasks, bad};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::stop::Stop;
use feedline_base::thread;
use feedline_core::dataset::Verified;
use feedline_core::order::usable_cores;
use feedline_core::storage::publish::make_folder;
use std::path::PathBuf;

/// Maximum pictures per call of the work, for a plan of pictures.
const PICTURES: u64 = 1024;

/// The outcome of [`Plan::run`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ran {
    /// Number of tasks that this call has done.
    pub done: u64,
    /// Number of tasks that were done before this call, and whose output matches the record.
    pub skipped: u64,
    /// Number of tasks that failed because of an input.
    pub failed: u64,
    /// Whether the run was stopped before its last task.
    pub stopped: bool,
}

/// A step of [`Plan::run`] or [`Shards::write`](crate::Shards::write).
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Progress within a task: after every window of up to 256 pictures, or every call of the work
    /// on files.
    Inputs {
        /// The task.
        task: u64,
        /// Number of finished inputs, of this task and those before it in this call.
        done: u64,
        /// Number of inputs of all tasks of this call.
        total: u64,
    },
    /// This task is done.
    Done(u64),
    /// This task was done before.
    Skipped(u64),
    /// The output of this task is damaged or missing, so the task is done again.
    Again(u64),
    /// This task failed because of an input.
    Failed(u64, &'a Error),
}

impl Plan {
    /// Runs tasks of a plan made by [`Shards::plan`](crate::Shards::plan). `workers`:
    /// number of threads; 0: one per core. Tasks with complete output are skipped. A task that
    /// fails because of an input does not keep the others from running. A requested stop ends the
    /// run after the pictures in progress, and leaves nothing of the unfinished task.
    ///
    /// Errors: [`ErrorKind::Config`] for a task that the plan lacks, a plan of files, or a file in
    /// the output that this plan did not write; system errors of writing, where the message names a
    /// full disk.
    pub fn run(
        &self,
        tasks: &Tasks,
        workers: usize,
        stop: &Stop,
        mut watch: impl FnMut(Event<'_>) + Send,
    ) -> Result<Ran> {
        self.run_shards(tasks, workers, stop, &mut watch, false)
    }

    /// Like [`run`](Self::run). `strict`: a task that fails because of an input ends the run with
    /// its error.
    pub(super) fn run_shards(
        &self,
        tasks: &Tasks,
        workers: usize,
        stop: &Stop,
        watch: &mut (dyn FnMut(Event<'_>) + Send),
        strict: bool,
    ) -> Result<Ran> {
        let Work::Shards(settings) = &self.head.work else {
            return Err(bad(
                "a plan of files or tokens: run it with the program that made it, such as `inspect run`",
            ));
        };
        let format = settings.format()?;
        let pool = pool(workers)?;
        self.each(tasks, strict, stop, watch, &mut |task, progress| {
            pool.install(|| Task::begin(self, settings, format, task, stop)?.run(progress))
        })
    }

    /// Runs tasks of a plan of files or pictures. `work` is called with the number of the first
    /// input and the next inputs in order: one file, or up to 1,024 pictures. It returns the counts
    /// and the damage of these inputs. Otherwise like [`run`](Self::run). An error of `work` fails
    /// the task.
    pub fn run_files(
        &self,
        tasks: &Tasks,
        stop: &Stop,
        mut watch: impl FnMut(Event<'_>) + Send,
        mut work: impl FnMut(u64, &[PathBuf]) -> Result<(Verified, Vec<Error>)>,
    ) -> Result<Ran> {
        let together = match &self.head.work {
            Work::Files { .. } => 1,
            Work::Pictures { .. } => PICTURES,
            Work::Shards(_) | Work::Tokens(_) => {
                return Err(bad("a plan of shards or tokens: run it with `prepare run`"));
            }
        };
        self.each(tasks, false, stop, &mut watch, &mut |task, progress| {
            self.files(task, together, stop, progress, &mut work)
        })
    }

    /// Runs `one` for each task that is not done. `one` gets the task, and a function to call with
    /// the number of its finished inputs.
    pub(super) fn each(
        &self,
        tasks: &Tasks,
        strict: bool,
        stop: &Stop,
        watch: &mut (dyn FnMut(Event<'_>) + Send),
        one: &mut dyn FnMut(u64, &mut RunProgress<'_>) -> Result<()>,
    ) -> Result<Ran> {
        let mut ran = Ran::default();
        let tasks = tasks.of(self.tasks())?;
        let total = tasks.iter().filter(|range| !range.is_empty());
        let total = total
            .map(|range| self.share(range.end - 1).end - self.share(range.start).start)
            .sum();
        let mut before = 0;
        let records = self.records();
        make_folder(&records).map_err(|source| output::failed(source, &records))?;
        for task in tasks.into_iter().flatten() {
            if stop.requested() {
                ran.stopped = true;
                break;
            }
            let inputs = self.share(task);
            let inputs = inputs.end - inputs.start;
            if self.is_done(task, watch)? {
                ran.skipped += 1;
                before += inputs;
                watch(Event::Skipped(task));
                continue;
            }
            let worked = one(task, &mut |done| {
                watch(Event::Inputs {
                    task,
                    done: before + done,
                    total,
                })
            });
            before += inputs;
            match worked {
                Ok(()) => {
                    ran.done += 1;
                    watch(Event::Done(task));
                }
                Err(error) if error.kind() == ErrorKind::Cancelled && stop.requested() => {
                    ran.stopped = true;
                    break;
                }
                // If this task cannot write, the next one cannot write either.
                Err(error) if strict || error.stage() == Stage::Write => return Err(error),
                Err(error) => {
                    ran.failed += 1;
                    watch(Event::Failed(task, &error));
                }
            }
        }
        Ok(ran)
    }

    /// Whether the output of a task is complete. If it is not, the task's record and output are
    /// removed.
    fn is_done(&self, task: u64, watch: &mut dyn FnMut(Event<'_>)) -> Result<bool> {
        let path = self.record(task);
        let output = match self.found(task)? {
            FoundRecord::Nothing => return Ok(false),
            FoundRecord::Damaged => None,
            FoundRecord::Done(done) => match done.shard.clone() {
                None if record::is_sound(&path, &done)? => return Ok(true),
                None => None,
                Some(shard) if shard.is_in(&self.dir)? && record::is_sound(&path, &done)? => {
                    return Ok(true);
                }
                Some(shard) => Some(self.dir.join(shard.name)),
            },
        };
        watch(Event::Again(task));
        // A folder with a manifest is complete, so the manifest is removed first. The record is
        // removed last: until then, the output is known to belong to this plan.
        output::remove_if_there(&self.dir.join(MANIFEST))?;
        output
            .iter()
            .chain([&path])
            .try_for_each(|gone| output::remove_if_there(gone))?;
        Ok(false)
    }

    /// The record of a task. A record that names another output than the task's own is damaged.
    pub(super) fn found(&self, task: u64) -> Result<FoundRecord> {
        let name = match &self.head.work {
            Work::Shards(settings) => Some(settings.format()?.shard(task)),
            Work::Tokens(_) => Some(part(task)),
            Work::Files { .. } | Work::Pictures { .. } => None,
        };
        Ok(
            match record::read(&self.record(task), &self.id_text(), task)? {
                FoundRecord::Done(Done {
                    shard: Some(shard), ..
                }) if Some(&shard.name) != name.as_ref() => FoundRecord::Damaged,
                found => found,
            },
        )
    }

    fn files(
        &self,
        task: u64,
        together: u64,
        stop: &Stop,
        progress: &mut RunProgress<'_>,
        work: &mut impl FnMut(u64, &[PathBuf]) -> Result<(Verified, Vec<Error>)>,
    ) -> Result<()> {
        let mut record = Record::create(self.record(task))?;
        let mut sum = Verified::default();
        let inputs = self.share(task);
        let mut first = inputs.start;
        while first < inputs.end {
            if stop.requested() {
                return Err(Error::new(
                    ErrorKind::Cancelled,
                    Stage::Build,
                    "stopped on request",
                ));
            }
            let end = inputs.end.min(first.saturating_add(together));
            let files = (first..end)
                .map(|input| self.file(input))
                .collect::<Result<Vec<_>>>()?;
            let (seen, damage) = work(first, &files)?;
            let path = output::escaped(&files[0]);
            let count = files.len();
            let Verified {
                samples,
                bytes,
                damaged,
            } = seen;
            record.put(
                RecordList::Manifest,
                &format!("{path}\t{count}\t{samples}\t{bytes}\t{damaged}\n"),
            )?;
            for error in &damage {
                let place = error.site().path.as_deref().unwrap_or(&files[0]);
                record.put(
                    RecordList::Ledger,
                    &output::ledger_line(&output::escaped(place), error),
                )?;
            }
            sum.samples += samples;
            sum.bytes += bytes;
            sum.damaged += damaged;
            first = end;
            progress(first - inputs.start);
        }
        let plan = self.id_text();
        let bytes = (sum.bytes, sum.bytes);
        let Verified {
            samples, damaged, ..
        } = sum;
        record.finish(Done {
            plan,
            task,
            samples,
            damaged,
            bytes,
            ..Done::default()
        })
    }

    /// The path of an input, after a check that the input has not changed.
    fn file(&self, input: u64) -> Result<PathBuf> {
        let picture = self.picture(input)?;
        picture
            .check()
            .map_err(|error| error.with_path(&picture.path))?;
        Ok(picture.path)
    }
}

/// Maximum threads of a run, the same as for a loader.
const WORKERS_MAX: usize = 1024;

/// Called with the number of a task's finished inputs.
pub(super) type RunProgress<'a> = dyn FnMut(u64) + Send + 'a;

/// A pool of this many threads; 0: one per core.
pub(super) fn pool(workers: usize) -> Result<rayon::ThreadPool> {
    if workers > WORKERS_MAX {
        return Err(bad(format!(
            "{workers} workers; at most {WORKERS_MAX} are possible"
        )));
    }
    let workers = if workers == 0 {
        usable_cores()
    } else {
        workers
    };
    Ok(thread::pool("workers", "feedline-work", workers, |_| || ())?.0)
}
