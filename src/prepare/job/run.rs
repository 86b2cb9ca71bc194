//! Runs tasks of a plan, one after the other, each with all workers.

use super::super::Format;
use super::super::output;
use super::super::pictures::Pictures;
use super::super::shards::{Maker, ShardRun, ShardTarget, Shards, TaskLists, pool, shard_name};
use super::plan::{Plan, Planned, Work};
use super::record::{self, Done, Found, Output, Record};
use super::tasks::{Tasks, bad};
use crate::dataset::{Tar, Verified};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::stop::Stop;
use crate::storage::publish::{make_folder, remove};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Pictures of a plan of pictures that are worked on together.
const PICTURES: u64 = 1024;

/// The outcome of [`Plan::run`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ran {
    /// Number of tasks done now.
    pub done: u64,
    /// Number of tasks done before, whose output has the bytes of the record.
    pub skipped: u64,
    /// Number of tasks that failed because of an input.
    pub failed: u64,
    /// Whether the run was stopped before its last task.
    pub stopped: bool,
}

/// A step of [`Plan::run`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Progress within a task.
    Inputs {
        /// The task.
        task: u64,
        /// Number of its inputs that are done.
        done: u64,
    },
    /// This task is done.
    Done(u64),
    /// This task was done before.
    Skipped(u64),
    /// The output of this task is damaged or gone; it is made again.
    Again(u64),
    /// This task failed because of an input.
    Failed(u64, &'a Error),
}

impl Plan {
    /// Runs tasks of a plan of [`Shards::plan`]. `workers`: number of threads; 0: one per core. Tasks with whole output
    /// are skipped. A task that fails because of an input does not keep the others from running. A requested stop ends
    /// the run after the pictures in work, and leaves nothing of the unfinished task.
    ///
    /// Errors: [`ErrorKind::Config`] for a task that the plan lacks, a plan of files, or a file in the output that this
    /// plan did not write; the system's errors of writing, with a full disk named.
    pub fn run(
        &self,
        tasks: &Tasks,
        workers: usize,
        stop: &Stop,
        mut watch: impl FnMut(Event<'_>) + Send,
    ) -> Result<Ran> {
        let Work::Shards(kept) = &self.head.work else {
            return Err(bad("a plan of files: run it by the program that made it, such as `inspect run`"));
        };
        let (shards, pool) = (kept.shards()?, pool(workers)?);
        self.each(tasks, stop, &mut watch, |task, watch| pool.install(|| self.shard(&shards, task, stop, &mut *watch)))
    }

    /// Runs tasks of a plan of files or pictures. `work` gets inputs in order, with the number of the first: a file, or up
    /// to 1,024 pictures. It gives their counts and their damage. Otherwise as [`run`](Self::run). An error of `work`
    /// fails the task.
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
            Work::Shards(_) => return Err(bad("a plan of shards: run it by `prepare run`")),
        };
        self.each(tasks, stop, &mut watch, |task, watch| self.files(task, together, stop, watch, &mut work))
    }

    fn each<W: FnMut(Event<'_>)>(
        &self,
        tasks: &Tasks,
        stop: &Stop,
        watch: &mut W,
        mut one: impl FnMut(u64, &mut W) -> Result<()>,
    ) -> Result<Ran> {
        let mut ran = Ran::default();
        let records = self.records();
        make_folder(&records).map_err(|source| output::failed(source, &records))?;
        for task in tasks.of(self.tasks())?.into_iter().flatten() {
            if stop.requested() {
                ran.stopped = true;
                break;
            }
            if self.is_done(task, watch)? {
                ran.skipped += 1;
                watch(Event::Skipped(task));
                continue;
            }
            match one(task, watch) {
                Ok(()) => {
                    ran.done += 1;
                    watch(Event::Done(task));
                }
                Err(error) if error.kind() == ErrorKind::Cancelled && stop.requested() => {
                    ran.stopped = true;
                    break;
                }
                // What cannot be written now cannot be written by the next task either.
                Err(error) if error.stage() == Stage::Write => return Err(error),
                Err(error) => {
                    ran.failed += 1;
                    watch(Event::Failed(task, &error));
                }
            }
        }
        Ok(ran)
    }

    /// Whether the output of a task is whole. Of one that is not, record and output are removed.
    fn is_done(&self, task: u64, watch: &mut impl FnMut(Event<'_>)) -> Result<bool> {
        let path = self.record(task);
        let output = match record::read(&path, &self.id_text(), task)? {
            Found::Nothing => return Ok(false),
            Found::Damaged => None,
            Found::Done(done) => match done.shard.clone() {
                None if record::is_sound(&path, &done)? => return Ok(true),
                None => None,
                Some(shard) if shard.is_in(&self.dir)? && record::is_sound(&path, &done)? => return Ok(true),
                Some(shard) => Some(self.dir.join(shard.name)),
            },
        };
        watch(Event::Again(task));
        // The record last: until then the output is known to be this plan's.
        for gone in output.into_iter().chain([path]) {
            match remove(&gone) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(output::failed(error, &gone)),
                _ => {}
            }
        }
        Ok(false)
    }

    fn shard(&self, shards: &Shards, task: u64, stop: &Stop, watch: &mut (impl FnMut(Event<'_>) + Send)) -> Result<()> {
        let mut record = Record::create(self.record(task))?;
        let pictures = Planned { reader: &self.reader, root: Path::new(&self.head.root) };
        let maker = Maker { shards, pictures: &pictures, to: &self.dir, stop };
        let mut run = ShardRun::new(maker, ShardTarget::Task(task, &mut record)).at(self.share(task));
        run.all(|progress| {
            watch(Event::Inputs { task, done: progress.pictures });
            ControlFlow::Continue(())
        })?;
        let summary = run.finish()?;
        let name = shard_name(shards.format, task);
        let path = self.dir.join(&name);
        let shard = (summary.files > 0).then(|| Output::of(&path, name)).transpose()?;
        if shard.is_some() && shards.format == Format::Tar {
            // Its first open scans the shard, while it is in the page cache, and saves the index.
            Tar::open(&path)?;
        }
        let (plan, samples) = (self.id_text(), summary.pictures - summary.damaged);
        let (damaged, bytes) = (summary.damaged, summary.bytes);
        record.finish(|lines_crc32c| Done { plan, task, samples, damaged, bytes, shard, lines_crc32c })
    }

    fn files(
        &self,
        task: u64,
        together: u64,
        stop: &Stop,
        watch: &mut impl FnMut(Event<'_>),
        work: &mut impl FnMut(u64, &[PathBuf]) -> Result<(Verified, Vec<Error>)>,
    ) -> Result<()> {
        let mut record = Record::create(self.record(task))?;
        let mut sum = Verified::default();
        let inputs = self.share(task);
        let mut first = inputs.start;
        while first < inputs.end {
            if stop.requested() {
                return Err(Error::new(ErrorKind::Cancelled, Stage::Build, "stopped on request"));
            }
            let end = inputs.end.min(first.saturating_add(together));
            let files = (first..end).map(|input| self.file(input)).collect::<Result<Vec<_>>>()?;
            let (seen, damage) = work(first, &files)?;
            let (path, count) = (output::escaped(&files[0]), files.len());
            let Verified { samples, bytes, damaged } = seen;
            record.written(&format!("{path}\t{count}\t{samples}\t{bytes}\t{damaged}\n"))?;
            for error in &damage {
                let place = error.site().path.as_deref().unwrap_or(&files[0]);
                record.damaged(&output::ledger_line(&output::escaped(place), error))?;
            }
            sum.samples += samples;
            sum.bytes += bytes;
            sum.damaged += damaged;
            first = end;
            watch(Event::Inputs { task, done: first - inputs.start });
        }
        let (plan, bytes) = (self.id_text(), (sum.bytes, sum.bytes));
        let Verified { samples, damaged, .. } = sum;
        record.finish(|lines_crc32c| Done { plan, task, samples, damaged, bytes, shard: None, lines_crc32c })
    }

    /// The path of an input, which has not changed.
    fn file(&self, input: u64) -> Result<PathBuf> {
        let (root, sample) = (Path::new(&self.head.root), input);
        let picture = Planned { reader: &self.reader, root }.get(sample)?;
        picture.check().map_err(|error| error.with_path(&picture.path))?;
        Ok(picture.path)
    }

    pub(super) fn id_text(&self) -> String {
        format!("{:016x}", self.id())
    }
}
