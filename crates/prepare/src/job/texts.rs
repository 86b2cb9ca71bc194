//! Tokens: a task turns its texts into a part.
//!
//! ```text
//! samples or chunks ──window──► rayon: read, check, tokenise ──in order──► part: tokens │ length of each document 4
//! ```
//!
//! Memory: a window of texts of at most 16 MiB (but at least one text) and their tokens, or an open
//! chunk and its tokens; 4 bytes for each document of a task. Invariants: a text is in a part, or it
//! is refused and counted.

use super::super::output;
use super::super::shards::PLAN;
use super::super::tokens::{TokenFiles, TokenSettings, part};
use super::finish::{Check, Finished};
use super::plan::{Plan, Work, in_empty, write_dataset};
use super::record::{Done, Output, Record, RecordList, TokenCounts};
use super::run::{Event, Ran, RunProgress, pool};
use super::tasks::{Tasks, bad};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::stop::Stop;
use feedline_core::dataset::sample::Plain;
use feedline_core::dataset::{Dataset, Parts, chunks, kept, no_field, unordered};
use feedline_core::decode::ToIds;
use feedline_core::storage::publish::Pending;
use feedline_core::tensor::Encoding;
use rayon::prelude::*;
use std::io::Write;
use std::ops::{ControlFlow, Range};
use std::path::Path;

const WINDOW_SAMPLES: u64 = 4096;
const WINDOW_BYTES: u64 = 16 << 20;
/// Texts that a thread takes at once.
const RUN: usize = 16;
/// Bytes of the inputs of a task that [`TokenFiles::write`] plans.
const TASK_BYTES: u64 = 256 << 20;
/// Megatron's limit for `u16`.
const SHORT: u64 = 65_500;

impl TokenFiles {
    /// Writes `plan.fdp` into the folder `to`: the files of `dataset`, these settings, and `tasks`
    /// tasks. Task *k* of *n* takes the texts (or chunks) from *k/n* to *(k+1)/n*.
    ///
    /// Errors: [`ErrorKind::Config`] for a field that is unknown or no text, an end that is no token,
    /// a mix, a part of a dataset with chunks, data in memory, a folder that is not empty, and for
    /// more tasks than texts or chunks.
    pub fn plan(
        &self,
        dataset: &dyn Dataset,
        ids: &dyn ToIds,
        to: impl AsRef<Path>,
        tasks: u64,
    ) -> Result<Plan> {
        let settings = self.settings_for(dataset, ids)?;
        let to = to.as_ref();
        in_empty(to, || {
            write_dataset(dataset, to, Work::Tokens(settings), tasks)
        })
    }

    /// Makes or finds the plan, runs all its tasks, finishes, and leaves only the output; the number
    /// of tasks is chosen by bytes. `watch` gets every step; if it returns `Break`, the call ends
    /// after the texts in progress, with [`ErrorKind::Cancelled`]. A call that was stopped, killed or
    /// failed leaves plan and parts, and the same call continues there.
    ///
    /// Errors: those of [`plan`](Self::plan), [`Plan::run_tokens`] and [`Plan::finish`]; a refused
    /// text; [`ErrorKind::Config`] if `to` holds something else or another call is writing there.
    pub fn write(
        &self,
        dataset: &dyn Dataset,
        ids: &dyn ToIds,
        to: impl AsRef<Path>,
        workers: usize,
        mut watch: impl FnMut(Event<'_>) -> ControlFlow<()> + Send,
    ) -> Result<Finished> {
        let to = to.as_ref();
        let settings = self.settings_for(dataset, ids)?;
        let mut plan = match Plan::open(to.join(PLAN)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let tasks = dataset.sources().total_bytes().div_ceil(TASK_BYTES);
                self.plan(dataset, ids, to, tasks.clamp(1, settings.units.max(1)))?
            }
            plan => plan?,
        };
        let _lock = plan.lock()?;
        match &mut plan.head.work {
            Work::Tokens(there) => there.skip_damaged = settings.skip_damaged,
            _ => return Err(bad("the output folder holds a plan of other work").with_path(to)),
        }
        if plan.head.work != Work::Tokens(settings) {
            let message = "the output folder holds a plan of other texts or with other settings: \
                 use those again, or remove the output folder";
            return Err(bad(message).with_path(to));
        }
        let stop = Stop::new();
        let mut watch = |event: Event<'_>| {
            if watch(event).is_break() {
                stop.request();
            }
        };
        let all = Tasks::all();
        let ran = plan.tokens(dataset, ids, &all, workers, &stop, &mut watch, true)?;
        if ran.stopped {
            let message = "stopped on request: repeat the call to continue";
            return Err(Error::new(ErrorKind::Cancelled, Stage::Write, message).with_path(to));
        }
        let finished = plan.finish_alone(Check::Lengths, workers)?;
        if !finished.missing.is_empty() {
            let message = "parts were removed meanwhile; call again";
            return Err(Error::new(ErrorKind::Changed, Stage::Write, message).with_path(to));
        }
        plan.remove()?;
        Ok(finished)
    }

    /// The settings that a plan of these texts keeps.
    fn settings_for(&self, dataset: &dyn Dataset, ids: &dyn ToIds) -> Result<TokenSettings> {
        let mut settings = self.settings.clone();
        unordered(dataset, "prepare its sources one by one")?;
        number_of(dataset, &settings.field)?;
        let vocabulary = ids.vocabulary();
        if let Some(end) = settings.end.filter(|end| u64::from(*end) >= vocabulary) {
            let message =
                format!("token {end} ends documents; the vocabulary has {vocabulary} ids");
            return Err(bad(message));
        }
        settings.units = match dataset.chunked() {
            Some(chunks) if !chunks.is_whole() => {
                return Err(bad("a part of a dataset with chunks: prepare all of it"));
            }
            Some(chunks) => chunks.starts().len() as u64 - 1,
            None => dataset.len(),
        };
        settings.is_short = vocabulary < SHORT;
        settings.tokenizer = ids.identity();
        settings.dataset = identity_of(dataset);
        Ok(settings)
    }
}

impl Plan {
    /// Runs tasks of a plan made by [`TokenFiles::plan`], with the same dataset and tokenizer.
    /// Otherwise like [`run`](Self::run).
    ///
    /// Errors: also [`ErrorKind::Changed`] for another dataset or tokenizer, or if a file changed
    /// since the plan was made.
    pub fn run_tokens(
        &self,
        dataset: &dyn Dataset,
        ids: &dyn ToIds,
        tasks: &Tasks,
        workers: usize,
        stop: &Stop,
        mut watch: impl FnMut(Event<'_>) + Send,
    ) -> Result<Ran> {
        self.tokens(dataset, ids, tasks, workers, stop, &mut watch, false)
    }

    /// Like [`run_tokens`](Self::run_tokens). `strict`: a failed task ends the run with its error.
    #[allow(clippy::too_many_arguments, reason = "those of run_tokens, and one")]
    fn tokens(
        &self,
        dataset: &dyn Dataset,
        ids: &dyn ToIds,
        tasks: &Tasks,
        workers: usize,
        stop: &Stop,
        watch: &mut (dyn FnMut(Event<'_>) + Send),
        strict: bool,
    ) -> Result<Ran> {
        let Work::Tokens(settings) = &self.head.work else {
            return Err(bad("a plan of other work than tokens"));
        };
        let changed = |what: &str| {
            let message = format!("the plan was made for another {what}: make a new plan");
            Error::new(ErrorKind::Changed, Stage::Build, message).with_path(&self.dir)
        };
        if settings.tokenizer != ids.identity() {
            return Err(changed("tokenizer"));
        }
        if settings.dataset != identity_of(dataset) {
            return Err(changed("dataset, or the dataset changed"));
        }
        self.check_inputs()?;
        let texts = Texts {
            dataset,
            number: number_of(dataset, &settings.field)?,
            ids,
            settings,
            stop,
        };
        let pool = pool(workers)?;
        self.each(tasks, strict, stop, watch, &mut |task, progress| {
            pool.install(|| TokenTask::begin(self, texts, task)?.run(progress))
        })
    }

    /// Errors: [`ErrorKind::Changed`] for an input that changed since the plan was made.
    fn check_inputs(&self) -> Result<()> {
        (0..self.inputs()).try_for_each(|input| {
            let input = self.picture(input)?;
            input
                .check()
                .map(drop)
                .map_err(|error| error.with_path(&input.path))
        })
    }
}

fn identity_of(dataset: &dyn Dataset) -> u64 {
    kept::identity_of("token files", dataset).end()
}

/// Number of the field of texts.
fn number_of(dataset: &dyn Dataset, field: &str) -> Result<usize> {
    let schema = dataset.schema();
    let number = schema
        .iter()
        .position(|known| known.name == field)
        .ok_or_else(|| bad(no_field(schema, field)))?;
    match &schema[number].encoding {
        Encoding::Bytes => Ok(number),
        other => Err(bad(format!(
            "field `{field}` is {other}; a text is expected"
        ))),
    }
}

/// The texts of a job, and how to turn them into ids.
#[derive(Clone, Copy)]
struct Texts<'a> {
    dataset: &'a dyn Dataset,
    number: usize,
    ids: &'a dyn ToIds,
    settings: &'a TokenSettings,
    stop: &'a Stop,
}

/// The bytes of a text's tokens, and the number of bytes of the text.
type Made = Result<(Vec<u8>, u64)>;

impl Texts<'_> {
    /// The samples of the window that starts at `first`.
    fn window(&self, first: u64, end: u64) -> Result<Range<u64>> {
        let mut parts = Parts::new();
        let mut bytes = 0;
        for sample in first..end.min(first.saturating_add(WINDOW_SAMPLES)) {
            parts.clear();
            // A sample whose place is unknown is refused when it is read.
            let known = self.dataset.extents(sample, &mut parts).is_ok();
            let own = parts.iter().filter(|one| known && one.field == self.number);
            bytes += own.map(|one| one.part.len() as u64).sum::<u64>();
            if bytes > WINDOW_BYTES && sample > first {
                return Ok(first..sample);
            }
        }
        Ok(first..end.min(first.saturating_add(WINDOW_SAMPLES)))
    }

    fn samples(&self, samples: Range<u64>) -> Vec<Made> {
        // A window has at most 4,096 samples.
        (0..(samples.end - samples.start) as usize)
            .into_par_iter()
            .with_min_len(RUN)
            .map_init(
                || Plain::new(self.dataset),
                |plain, at| self.sample(plain, samples.start + at as u64),
            )
            .collect()
    }

    fn sample(&self, plain: &mut Plain<'_>, sample: u64) -> Made {
        let mut made = (Vec::new(), 0);
        plain.sample(sample, |field, bytes| {
            if field == self.number {
                made = self.make(bytes)?;
            }
            Ok(())
        })?;
        Ok(made)
    }

    /// The rows of a chunk; one error for all of a damaged chunk.
    fn chunk(&self, chunk: usize) -> Result<Vec<Made>> {
        let chunks = chunks(self.dataset);
        let first = chunks.starts()[chunk];
        let opened = Plain::new(self.dataset)
            .chunk(chunk)
            .map_err(|error| error.with_member(chunks.chunk_name(chunk)))?;
        let rows = (0..opened.rows()).into_par_iter().with_min_len(RUN);
        let made = rows.map(|row| {
            let bytes = opened.row(self.number, row).unwrap_or_default();
            self.make(bytes).map_err(|error| {
                error
                    .with_sample(first + row as u64)
                    .with_member(chunks.chunk_name(chunk))
            })
        });
        Ok(made.collect())
    }

    fn make(&self, bytes: &[u8]) -> Made {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let message = format!("not UTF-8: byte {} of the text", error.valid_up_to());
            Error::new(ErrorKind::Decode, Stage::Decode, message)
        })?;
        let mut ids = Vec::new();
        self.ids.ids(text, &mut ids)?;
        if let (Some(end), false) = (self.settings.end, ids.is_empty()) {
            ids.push(end);
        }
        if ids.len() > i32::MAX as usize {
            let message = format!("{} tokens; a document has at most {}", ids.len(), i32::MAX);
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        let (size, most) = match self.settings.is_short {
            true => (2, u32::from(u16::MAX)),
            false => (4, i32::MAX as u32),
        };
        if let Some(id) = ids.iter().find(|id| **id > most) {
            let message = format!("token {id} does not fit {}", self.settings.dtype());
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        let mut tokens = Vec::with_capacity(ids.len() * size);
        for id in ids {
            tokens.extend_from_slice(&id.to_le_bytes()[..size]);
        }
        Ok((tokens, bytes.len() as u64))
    }
}

/// A running task.
struct TokenTask<'a> {
    plan: &'a Plan,
    texts: Texts<'a>,
    units: Range<u64>,
    part: Pending,
    lens: Vec<u32>,
    record: Record,
    done: Done,
    counts: TokenCounts,
}

impl<'a> TokenTask<'a> {
    fn begin(plan: &'a Plan, texts: Texts<'a>, task: u64) -> Result<Self> {
        let part = output::create_shared(plan.dir.join(part(task)))?;
        Ok(Self {
            plan,
            texts,
            units: plan.share(task),
            part,
            lens: Vec::new(),
            record: Record::create(plan.record(task))?,
            done: Done {
                plan: plan.id_text(),
                task,
                ..Done::default()
            },
            counts: TokenCounts::default(),
        })
    }

    fn run(mut self, progress: &mut RunProgress<'_>) -> Result<()> {
        let units = self.units.clone();
        let mut at = units.start;
        while at < units.end {
            if self.texts.stop.requested() {
                let message = "stopped on request";
                return Err(Error::new(ErrorKind::Cancelled, Stage::Write, message));
            }
            if self.texts.dataset.chunked().is_some() {
                match self.texts.chunk(at as usize) {
                    Ok(made) => made.into_iter().try_for_each(|made| self.take(made, 1))?,
                    Err(error) => {
                        let starts = chunks(self.texts.dataset).starts();
                        let rows = starts[at as usize + 1] - starts[at as usize];
                        self.take(Err(error), rows)?;
                    }
                }
                at += 1;
            } else {
                let window = self.texts.window(at, units.end)?;
                at = window.end;
                let made = self.texts.samples(window);
                made.into_iter().try_for_each(|made| self.take(made, 1))?;
            }
            progress(at - units.start);
        }
        self.finish()
    }

    /// Writes a document, or the ledger's line of `rows` refused texts.
    fn take(&mut self, made: Made, rows: u64) -> Result<()> {
        let (tokens, bytes) = match made {
            Ok(made) => made,
            Err(error) if self.texts.settings.skip_damaged && is_refusal(&error) => {
                self.done.damaged += rows;
                let reason = reason(&error, &self.texts.settings.field);
                *self.counts.refused.entry(reason).or_default() += rows;
                let place = error.site().path.as_deref().unwrap_or(Path::new(""));
                let line = output::ledger_line(&output::escaped(place), &error);
                return self.record.put(RecordList::Ledger, &line);
            }
            Err(error) => return Err(error),
        };
        self.part
            .write_all(&tokens)
            .map_err(|source| output::failed(source, &self.part.target))?;
        let len = tokens.len() / self.texts.settings.dtype().size();
        self.lens.push(len as u32);
        self.counts.empty += u64::from(len == 0);
        self.counts.tokens += len as u64;
        self.done.bytes.0 += bytes;
        Ok(())
    }

    /// Gives the part its name, and then the record.
    fn finish(mut self) -> Result<()> {
        if self.done.damaged > 0 {
            // A file that changed meanwhile is not damage.
            self.plan.check_inputs()?;
        }
        let lens: Vec<u8> = self.lens.iter().flat_map(|len| len.to_le_bytes()).collect();
        self.part
            .write_all(&lens)
            .map_err(|source| output::failed(source, &self.part.target))?;
        output::commit_new(self.part)?;
        let name = part(self.done.task);
        self.done.samples = self.lens.len() as u64;
        self.done.bytes.1 = self.counts.tokens * self.texts.settings.dtype().size() as u64;
        self.done.shard = Some(Output::of(&self.plan.dir.join(&name), name)?);
        self.done.tokens = Some(self.counts);
        self.record.finish(self.done)
    }
}

/// Whether the text is refused, and not the machine or its files at fault.
fn is_refusal(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Decode
            | ErrorKind::Truncated
            | ErrorKind::Limit
            | ErrorKind::Empty
            | ErrorKind::Shape
    )
}

/// Why a text is refused, without what differs from text to text.
fn reason(error: &Error, field: &str) -> String {
    let message = error.message();
    let message = message
        .strip_prefix(field)
        .and_then(|rest| rest.strip_prefix(": "))
        .unwrap_or(message);
    match error.kind() {
        ErrorKind::Shape => message
            .split([';', ':'])
            .next()
            .unwrap_or_default()
            .to_string(),
        ErrorKind::Decode if message.starts_with("not UTF-8") => "not UTF-8".into(),
        kind => kind.as_str().into(),
    }
}
