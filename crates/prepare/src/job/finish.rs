//! Ends a job: checks that all output is present and complete, or names the missing tasks.

use super::super::output;
use super::super::shards::{LEDGER, LEDGER_HEADING, MANIFEST, MANIFEST_HEADING, is_ours};
use super::super::tokens::{BIN, TOKENS_HEADING};
use super::listing::NAMES;
use super::parts;
use super::plan::{Plan, Work};
use super::record;
use super::record::{Done, FoundRecord, RecordList};
use super::run::pool;
use super::tasks::Numbers;
use crate::Format;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::FileKind;
use feedline_core::storage::listing::names_in;
use feedline_core::storage::publish::{Folder, Lock, target_of};
use feedline_core::tensor::DType;
use feedline_formats::Tar;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

const FILES_HEADING: &str = "#first file\tfiles\tsamples\tbytes\tdamaged\n";
const INDEX: &str = "index.fdx";
/// Number of tasks whose outcomes are in memory at a time.
const TOGETHER: u64 = 4096;

/// How [`Plan::finish`] checks shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Reads the shards, on all cores, and compares CRCs.
    Bytes,
    /// Compares lengths only. Use it if a second [`Plan::run`], on many machines, has already read
    /// the output.
    Lengths,
}

/// The outcome of [`Plan::finish`] and [`Shards::write`](crate::Shards::write).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finished {
    /// Number of tasks of the plan.
    pub tasks: u64,
    /// Tasks without complete output, as ranges. If there are any, nothing was merged.
    pub missing: Vec<Range<u64>>,
    /// Number of samples in the output.
    pub samples: u64,
    /// Number of damaged samples; `damaged.tsv` names them.
    pub damaged: u64,
    /// Bytes of the samples in the input, and in the output.
    pub bytes: (u64, u64),
    /// Number of pictures that got seek points.
    pub with_points: u64,
    /// Number of pictures without seek points, by reason; empty if seek points were not requested.
    pub unchanged: BTreeMap<String, u64>,
    /// Number of tokens in the output, and of documents without a token.
    pub tokens: u64,
    pub empty: u64,
    /// Number of refused texts, by reason; `damaged` is their sum.
    pub refused: BTreeMap<String, u64>,
    /// Number of files in the input folder that are not inputs, by ending.
    pub left_out: BTreeMap<String, u64>,
    /// One file with the indexes of all tar shards, for
    /// [`TarBuilder::index_file`](feedline_formats::TarBuilder::index_file).
    pub index: Option<PathBuf>,
}

impl Plan {
    /// Checks every task: its record and its shard. If all are complete, merges manifests and
    /// ledgers in the order of the tasks, writes the index of tar shards, and removes leftovers of
    /// killed processes. A second call does the same again.
    ///
    /// Errors: [`ErrorKind::Config`] for shards in the folder that the plan does not write, records
    /// of another plan, or another call in progress; [`ErrorKind::Empty`] for shards without a
    /// sample, after the ledger is written; system errors.
    pub fn finish(&self, check: Check) -> Result<Finished> {
        let _lock = self.lock()?;
        self.finish_alone(check, 0)
    }

    /// Keeps other calls from finishing the plan. Errors: [`ErrorKind::Config`] if another call
    /// holds the lock.
    pub(super) fn lock(&self) -> Result<Lock> {
        let path = self.reader.path();
        Lock::try_of(path)
            .map_err(|source| output::failed(source, path))?
            .ok_or_else(|| {
                let message = "another process writes or finishes this plan: wait for its end";
                Error::new(ErrorKind::Config, Stage::Write, message).with_path(path)
            })
    }

    /// [`finish`](Self::finish), under a [lock](Self::lock).
    pub(super) fn finish_alone(&self, check: Check, workers: usize) -> Result<Finished> {
        let path = self.reader.path();
        let left_out = self.left_out().clone();
        let mut finished = Finished {
            tasks: self.tasks(),
            left_out,
            ..Finished::default()
        };
        let mut shards = 0;
        let pool = pool(workers)?;
        for start in (0..self.tasks()).step_by(TOGETHER as usize) {
            let tasks = start..self.tasks().min(start.saturating_add(TOGETHER));
            let done: Result<Vec<_>> = pool.install(|| {
                tasks
                    .clone()
                    .into_par_iter()
                    .map(|task| self.whole(task, check))
                    .collect()
            });
            for (task, done) in tasks.zip(done?) {
                match done {
                    Some(done) => {
                        shards += u64::from(done.shard.is_some());
                        finished.add(done);
                    }
                    None => finished.miss(task),
                }
            }
        }
        if !finished.missing.is_empty() {
            return Ok(finished);
        }
        self.clean(shards)?;
        if let Work::Tokens(settings) = &self.head.work {
            for (_, reason, texts) in &settings.left_out {
                finished.damaged += texts;
                *finished.refused.entry(reason.clone()).or_default() += texts;
            }
            parts::join(self, settings, finished.samples, finished.empty)?;
        } else if finished.samples > 0 {
            finished.index = self.index()?;
        }
        self.merge(&finished)?;
        if finished.samples == 0 && (self.is_of_tokens() || self.settings().is_none()) {
            let message = format!(
                "all {} pictures or texts are damaged; damaged.tsv names them",
                finished.damaged
            );
            return Err(Error::new(ErrorKind::Empty, Stage::Write, message).with_path(path));
        }
        // Tasks sync bytes, not names. If a crash loses the file names of a task, the task counts
        // as missing and is done again.
        let names = Folder::of(&self.record(0)).and_then(|folder| folder.sync());
        let names = names.and_then(|()| Folder::of(self.reader.path())?.sync());
        names.map_err(|source| output::failed(source, &self.dir))?;
        Ok(finished)
    }

    /// The outcome of a task; `None` if its output is not complete.
    fn whole(&self, task: u64, check: Check) -> Result<Option<Done>> {
        let FoundRecord::Done(done) = self.found(task)? else {
            return Ok(None);
        };
        if !record::is_sound(&self.record(task), &done)? {
            return Ok(None);
        }
        match &done.shard {
            Some(shard) if check == Check::Bytes && !shard.is_in(&self.dir)? => Ok(None),
            Some(shard) if !shard.has_length(&self.dir)? => Ok(None),
            _ => Ok(Some(done)),
        }
    }

    /// The outcome of a task that was found to be complete.
    pub(super) fn done(&self, task: u64) -> Result<Done> {
        let path = self.record(task);
        match record::read(&path, &self.id_text(), task)? {
            FoundRecord::Done(done) => Ok(done),
            _ => {
                let message = "the record of the task is gone: run the task again";
                Err(Error::new(ErrorKind::Changed, Stage::Write, message).with_path(path))
            }
        }
    }

    fn format(&self) -> Result<Option<Format>> {
        match &self.head.work {
            Work::Shards(settings) => settings.format().map(Some),
            Work::Files { .. } | Work::Pictures { .. } | Work::Tokens(_) => Ok(None),
        }
    }

    /// Removes hidden files of killed processes, and refuses shards that do not belong to this
    /// plan.
    fn clean(&self, shards: u64) -> Result<()> {
        sweep(&self.dir, |name| {
            is_ours(name) || parts::is_ours(name) || [NAMES, INDEX].contains(&name)
        })?;
        sweep(&self.records(), |name| name.ends_with(".tsv"))?;
        let Some(format) = self.format()? else {
            return Ok(());
        };
        let mut found = 0;
        for (name, _) in names_in(&self.dir)? {
            let text = name.to_string_lossy();
            let Some(stem) = text
                .strip_suffix(format.ending())
                .and_then(|stem| stem.strip_suffix('.'))
            else {
                continue;
            };
            let number = stem
                .strip_prefix("shard-")
                .and_then(|number| number.parse::<u64>().ok());
            found += 1;
            if number.is_none_or(|number| number >= self.tasks() || format.shard(number) != text) {
                let message = "not a shard of the plan: move it away, or a dataset of the folder \
                     would contain it";
                return Err(Error::new(ErrorKind::Config, Stage::Write, message)
                    .with_path(self.dir.join(name)));
            }
        }
        if found > shards {
            let message = format!(
                "the folder holds {found} shards, but the plan wrote {shards}: move the \
                 others away"
            );
            return Err(Error::new(ErrorKind::Config, Stage::Write, message).with_path(&self.dir));
        }
        Ok(())
    }

    /// Writes one index of all tar shards, from the indexes beside them.
    fn index(&self) -> Result<Option<PathBuf>> {
        if self.format()? != Some(Format::Tar) {
            return Ok(None);
        }
        let path = self.dir.join(INDEX);
        let tar = Tar::builder().index_file(&path).open(&self.dir)?;
        match tar.index_unsaved() {
            None => Ok(Some(path)),
            Some(why) => Err(Error::new(
                ErrorKind::Io,
                Stage::Write,
                format!("the index is not saved: {why}"),
            )),
        }
    }

    fn merge(&self, finished: &Finished) -> Result<()> {
        let heading = match &self.head.work {
            Work::Shards(_) => MANIFEST_HEADING,
            Work::Files { .. } | Work::Pictures { .. } => FILES_HEADING,
            Work::Tokens(_) => TOKENS_HEADING,
        };
        let mut manifest = None;
        let mut ledger = None;
        let manifest_at = self.dir.join(MANIFEST);
        let ledger_at = self.dir.join(LEDGER);
        let mut add = |list: RecordList, line: &str| match list {
            RecordList::Manifest => output::append_line(&mut manifest, &manifest_at, heading, line),
            RecordList::Ledger => {
                output::append_line(&mut ledger, &ledger_at, LEDGER_HEADING, line)
            }
        };
        if let Work::Tokens(settings) = &self.head.work {
            let mut lines = settings.left_out.iter();
            lines.try_for_each(|(line, ..)| add(RecordList::Ledger, line))?;
        }
        for task in 0..self.tasks() {
            let done = self.done(task)?;
            record::each_line(&self.record(task), &done, &mut add)?;
        }
        if let Work::Tokens(settings) = &self.head.work {
            let line = finished.tokens_line(settings.dtype());
            add(RecordList::Manifest, &line)?;
        }
        // The manifest is committed last: a folder with a manifest is complete.
        [ledger, manifest]
            .into_iter()
            .flatten()
            .try_for_each(output::commit)
    }
}

/// Removes the hidden temporary files in a folder, if `ours` accepts the name that they would have
/// got.
fn sweep(dir: &Path, ours: impl Fn(&str) -> bool) -> Result<()> {
    for (name, kind) in names_in(dir)? {
        if kind == FileKind::File && target_of(&name.to_string_lossy()).is_some_and(&ours) {
            output::remove_if_there(&dir.join(name))?;
        }
    }
    Ok(())
}

impl Finished {
    fn add(&mut self, done: Done) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.samples, done.samples);
        add(&mut self.damaged, done.damaged);
        add(&mut self.bytes.0, done.bytes.0);
        add(&mut self.bytes.1, done.bytes.1);
        add(&mut self.with_points, done.with_points);
        for (reason, count) in done.unchanged {
            add(self.unchanged.entry(reason).or_default(), count);
        }
        let counts = done.tokens.unwrap_or_default();
        add(&mut self.tokens, counts.tokens);
        add(&mut self.empty, counts.empty);
        for (reason, count) in counts.refused {
            add(self.refused.entry(reason).or_default(), count);
        }
    }

    /// The line of the manifest for token files.
    fn tokens_line(&self, dtype: DType) -> String {
        let Self {
            samples,
            damaged,
            bytes,
            tokens,
            empty,
            ..
        } = self;
        let name = BIN.trim_end_matches(".bin");
        format!(
            "{name}\t{dtype}\t{samples}\t{empty}\t{tokens}\t{damaged}\t{}\n",
            bytes.0
        )
    }

    fn miss(&mut self, task: u64) {
        match self.missing.last_mut().filter(|range| range.end == task) {
            Some(range) => range.end += 1,
            None => self.missing.push(task..task + 1),
        }
    }

    /// The missing tasks as Slurm's `--array` and [`Tasks::list`](super::Tasks::list) take them,
    /// such as `3,17,40-44`.
    pub fn missing_list(&self) -> String {
        Numbers(&self.missing).to_string()
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let missing: u64 = self
            .missing
            .iter()
            .map(|range| range.end - range.start)
            .sum();
        writeln!(
            f,
            "tasks       {} of {} done",
            self.tasks - missing,
            self.tasks
        )?;
        let (before, after) = self.bytes;
        write!(
            f,
            "samples     {}, {:.3} GB",
            self.samples,
            after as f64 / 1e9
        )?;
        if self.with_points > 0 {
            let more = 100.0 * (after as f64 / before.max(1) as f64 - 1.0);
            write!(f, "\nseek points {}, {more:+.2} % bytes", self.with_points)?;
        }
        for (reason, count) in &self.unchanged {
            write!(f, "\nunchanged   {count}: {reason}")?;
        }
        if self.tokens > 0 {
            write!(
                f,
                "\ntokens      {}, and {} documents without one",
                self.tokens, self.empty
            )?;
        }
        if self.damaged > 0 {
            write!(f, "\ndamaged     {}, listed in {LEDGER}", self.damaged)?;
        }
        for (reason, count) in &self.refused {
            write!(f, "\nrefused     {count}: {reason}")?;
        }
        for (ending, count) in &self.left_out {
            write!(f, "\nleft out    {count}: {ending}, not inputs")?;
        }
        if missing > 0 {
            write!(f, "\nmissing     --array={}", self.missing_list())?;
        }
        Ok(())
    }
}
