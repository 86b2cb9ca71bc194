//! Turns a folder of pictures into shards: in parallel over pictures, in one order, in bounded memory.
//!
//! ```text
//! Images ──order──► window of pictures ──rayon: read, transcode──► window of bytes ──one writer──► shard-000000.tar …
//!                   (next one)                                     (this one)
//! ```
//!
//! The next window is made while one window is written.
//!
//! Invariants: the output depends only on the pictures, their names and the options, not on workers or timing. A file
//! gets its name only when it is complete. Every picture is written or listed in the ledger; anything else is an error.
//! The manifest is written last, so a folder without one is incomplete.
//!
//! Limits: a window has at most 256 pictures or 32 MiB of encoded bytes (but at least one picture), and two windows
//! exist at a time. A Parquet shard also holds a row group of at most 64 MiB, and the library's copy of it.

use super::output;
#[cfg(feature = "parquet")]
use super::parquet;
use super::pictures::{Listed, Picture, Pictures};
use super::{Outcome, Reason, RestartOptions, restart_jpeg, tar};
use crate::dataset::Images;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::order::{Key, Permutation};
use crate::setting::Setting;
use crate::stop::Stop;
use crate::storage::listing::{names_in, real_path};
use crate::storage::publish::{Pending, is_partial, make_folder, remove};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const WINDOW_PICTURES: u64 = 256;
const WINDOW_BYTES: u64 = 32 << 20;
pub(super) const MANIFEST: &str = "manifest.tsv";
pub(super) const MANIFEST_HEADING: &str = "#key\tshard\tlabel\tsource\toutcome\tbytes before\tbytes after\n";
/// The plan of a job whose tasks write into the folder.
pub(super) const PLAN: &str = "plan.fdp";
pub(super) const LEDGER: &str = "damaged.tsv";
pub(super) const LEDGER_HEADING: &str = "#source\terror\n";

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// As in WebDataset: `shard-000000.tar` …. A sample is the members `00000000.jpg` and `00000000.cls` (the label as
    /// ASCII; absent for a flat folder). A picture that is no JPEG keeps its ending.
    Tar,
    /// `shard-000000.parquet` …, columns `image` (binary) and `label` (int64; absent for a flat folder), uncompressed
    /// plain pages without dictionary, row groups of 512 rows or 64 MiB, whichever is less, with an offset index.
    #[cfg(feature = "parquet")]
    Parquet,
    /// One output file per input file, with the same names.
    Files,
}

/// Writes a folder of pictures as shards, JPEGs with restart markers. See the [module](super).
///
/// ```no_run
/// use feedline::prepare::{Format, Shards};
/// use std::ops::ControlFlow;
///
/// let summary = Shards::new(Format::Tar).shuffle(7).write("train/", "shards/", |_| ControlFlow::Continue(()))?;
/// println!("{summary}");
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Shards {
    pub(super) format: Format,
    pub(super) restarts: RestartOptions,
    samples: u64,
    bytes: u64,
    pub(super) seed: Option<u64>,
    pub(super) workers: usize,
    overwrite: bool,
    pub(super) skip_damaged: bool,
    sync: bool,
}

/// The progress so far; reported after every window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Number of finished pictures.
    pub pictures: u64,
    /// Number of pictures in the folder.
    pub total: u64,
    /// Encoded bytes of the finished pictures in the input.
    pub bytes_before: u64,
    /// Encoded bytes of the finished pictures in the output, without the framing of a shard.
    pub bytes_after: u64,
}

/// The result of a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Number of pictures in the folder.
    pub pictures: u64,
    /// Number of pictures with restart markers in the output.
    pub transcoded: u64,
    /// Number of these with new Huffman tables.
    pub new_tables: u64,
    /// Encoded bytes of these, before and after.
    pub transcoded_bytes: (u64, u64),
    /// Unchanged pictures: number and first path for each reason.
    pub unchanged: BTreeMap<Reason, (u64, PathBuf)>,
    /// Number of damaged pictures that were left out; `damaged.tsv` names all.
    pub damaged: u64,
    /// Encoded bytes of all written pictures, before and after, without the framing of a shard.
    pub bytes: (u64, u64),
    /// Number of shards, or of files.
    pub files: u64,
    /// Files of the folder that are not pictures, by ending.
    pub left_out: BTreeMap<String, u64>,
    /// Elapsed time.
    pub elapsed: Duration,
}

/// A picture that is ready to be written.
struct Made {
    picture: Picture,
    /// Encoded bytes of the result; the picture has those before.
    after: u64,
    /// The bytes are empty if their file is already written.
    result: Result<(Outcome, Vec<u8>)>,
}

impl Shards {
    /// Defaults: shards of at most 256 MiB in the order of the folder, one worker per core, nothing overwritten, damage
    /// refused.
    pub fn new(format: Format) -> Self {
        Self {
            format,
            restarts: RestartOptions::default(),
            samples: u64::MAX,
            bytes: 256 << 20,
            seed: None,
            workers: 0,
            overwrite: false,
            skip_damaged: false,
            sync: false,
        }
    }

    /// Sets where restart markers are inserted, and the limits of a picture.
    #[must_use]
    pub fn restarts(mut self, options: RestartOptions) -> Self {
        self.restarts = options;
        self
    }

    /// Limits the samples of a shard; the limit of bytes then does not apply.
    #[must_use]
    pub fn samples_per_shard(mut self, samples: u64) -> Self {
        (self.samples, self.bytes) = (samples, u64::MAX);
        self
    }

    /// Limits the encoded bytes of a shard (a single picture may have more); the limit of samples then does not apply.
    #[must_use]
    pub fn bytes_per_shard(mut self, bytes: u64) -> Self {
        (self.samples, self.bytes) = (u64::MAX, bytes);
        self
    }

    /// Shuffles the samples over all shards, so that shards read from front to back are random enough. For
    /// [`Format::Files`] it only changes the order of work.
    #[must_use]
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets the number of threads; 0: one per core.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Allows an output folder that is not empty. Old shards, their indexes, manifest and ledger are removed first.
    /// Files that [`Format::Files`] does not write again stay.
    #[must_use]
    pub fn overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Leaves damaged pictures out and lists them in `damaged.tsv`, instead of ending at the first of them.
    #[must_use]
    pub fn skip_damaged(mut self, skip: bool) -> Self {
        self.skip_damaged = skip;
        self
    }

    /// Syncs each file to the device before it gets its name.
    #[must_use]
    pub fn sync(mut self, sync: bool) -> Self {
        self.sync = sync;
        self
    }

    /// Writes the pictures of the folder `from` into the folder `to`. `progress` is called after every window of up to
    /// 256 pictures. If it breaks, the work ends with [`ErrorKind::Cancelled`].
    ///
    /// Errors: as in [`Images::open`] and [`restart_jpeg`], with the path (the first damaged picture in the order of
    /// writing); [`ErrorKind::Config`] if `to` is not empty, or one folder contains the other; the operating system's
    /// errors, with a full disk named. Complete shards then stay, without a manifest.
    pub fn write(
        &self,
        from: impl AsRef<Path>,
        to: impl AsRef<Path>,
        progress: impl FnMut(Progress) -> ControlFlow<()> + Send,
    ) -> Result<Summary> {
        let (from, to) = (from.as_ref(), to.as_ref());
        if self.samples == 0 || self.bytes == 0 {
            return Err(Error::new(
                ErrorKind::Config,
                Stage::Build,
                "a shard needs room for at least 1 sample and 1 byte",
            ));
        }
        let started = Instant::now();
        check_apart(from, to)?;
        let images = Images::open(from)?;
        self.prepare_folder(to)?;
        let pool = pool(self.workers)?;
        let (pictures, stop) = (Listed(&images, from), Stop::new());
        let maker = Maker { shards: self, pictures: &pictures, to, stop: &stop };
        let mut run = ShardRun::new(maker, ShardTarget::Folder(FolderLists::default()));
        pool.install(|| run.all(progress))?;
        let mut summary = run.finish()?;
        summary.left_out = images.left_out().clone();
        summary.elapsed = started.elapsed();
        Ok(summary)
    }

    /// Creates the folder. With `overwrite`, also removes the output of an earlier call.
    fn prepare_folder(&self, to: &Path) -> Result<()> {
        make_folder(to).map_err(|source| output::failed(source, to))?;
        let names = names_in(to)?.into_iter().map(|(name, _)| name);
        // Partial files of a killed call have no owner.
        let (partial, others): (Vec<_>, Vec<_>) = names.partition(|name| is_partial(&name.to_string_lossy()));
        if others.iter().any(|name| name == PLAN) {
            let message = "the output folder holds a plan: choose another folder";
            return Err(Error::new(ErrorKind::Config, Stage::Write, message).with_path(to.join(PLAN)));
        }
        if let (false, Some(other)) = (self.overwrite, others.first()) {
            let left = match partial.len() {
                0 => String::new(),
                count => format!(", and holds {count} hidden files of a run that was interrupted"),
            };
            let message = format!(
                "the output folder is not empty{left}: choose another, or allow that it is overwritten ({})",
                Setting::Overwrite
            );
            return Err(Error::new(ErrorKind::Config, Stage::Write, message).with_path(to.join(other)));
        }
        for name in partial.into_iter().chain(others.into_iter().filter(|name| is_ours(&name.to_string_lossy()))) {
            let path = to.join(name);
            remove(&path).map_err(|source| output::failed(source, &path))?;
        }
        Ok(())
    }
}

/// A pool of this many threads; 0: one per core.
pub(super) fn pool(workers: usize) -> Result<rayon::ThreadPool> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(workers).build();
    pool.map_err(|error| Error::new(ErrorKind::Io, Stage::Build, "cannot start the workers").with_source(error))
}

/// Whether a file of this name, at the top of the folder, may come from an earlier call.
pub(super) fn is_ours(name: &str) -> bool {
    // The index of a tar shard that was read: `shard-000000.tar.0a1b2c3d.fdx`.
    let index = name.strip_suffix(".fdx").and_then(|rest| rest.rsplit_once('.')).map(|(shard, _)| shard);
    let number = |ending: &str| index.unwrap_or(name).strip_prefix("shard-")?.strip_suffix(ending);
    let number = number(".tar").or_else(|| number(".parquet"));
    let shard = number.is_some_and(|text| text.len() >= 6 && text.bytes().all(|byte| byte.is_ascii_digit()));
    shard || name == MANIFEST || name == LEDGER
}

/// Neither folder may contain the other: pictures would be overwritten while they are read.
pub(super) fn check_apart(from: &Path, to: &Path) -> Result<()> {
    let (from, real) = (real(from), real(to));
    if from.starts_with(&real) || real.starts_with(&from) {
        let message = format!("the input folder {} and the output folder overlap; use separate ones", from.display());
        return Err(Error::new(ErrorKind::Config, Stage::Build, message).with_path(to));
    }
    Ok(())
}

/// The path without links, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    for ancestor in absolute.ancestors() {
        if let Ok(found) = real_path(ancestor) {
            let rest = absolute.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return found.join(rest);
        }
    }
    absolute
}

/// Writes a range of positions of the order.
pub(super) struct ShardRun<'a> {
    maker: Maker<'a>,
    order: Option<Permutation>,
    positions: Range<u64>,
    /// Next key of a sample.
    key: u64,
    shard: Option<Shard>,
    target: ShardTarget<'a>,
    summary: Summary,
}

/// Where shards and lists go.
pub(super) enum ShardTarget<'a> {
    /// All shards and both lists, in one folder.
    Folder(FolderLists),
    /// One shard of this number, which no other file may replace; lines go to its record.
    Task(u64, &'a mut dyn TaskLists),
}

/// The lists of a folder.
#[derive(Default)]
pub(super) struct FolderLists {
    manifest: Option<Pending>,
    ledger: Option<Pending>,
}

/// The lists of a task.
pub(super) trait TaskLists: Send {
    /// Adds a line of the manifest.
    fn written(&mut self, line: &str) -> Result<()>;
    /// Adds a line of the ledger.
    fn damaged(&mut self, line: &str) -> Result<()>;
}

/// The shard being written.
struct Shard {
    name: String,
    samples: u64,
    bytes: u64,
    writer: Writer,
}

enum Writer {
    Tar(Pending),
    #[cfg(feature = "parquet")]
    Parquet(Box<parquet::Writer>),
}

impl<'a> ShardRun<'a> {
    /// All pictures.
    pub(super) fn new(maker: Maker<'a>, target: ShardTarget<'a>) -> Self {
        let count = maker.pictures.count();
        let order = maker.shards.seed.map(|seed| Permutation::new(count, Key::new(seed).named("prepare")));
        let summary = Summary { pictures: count, ..Summary::default() };
        Self { maker, order, positions: 0..count, key: 0, shard: None, target, summary }
    }

    /// The pictures at these positions of the order.
    pub(super) fn at(mut self, positions: Range<u64>) -> Self {
        self.summary.pictures = positions.end - positions.start;
        (self.key, self.positions) = (positions.start, positions);
        self
    }

    fn sample_at(&self, position: u64) -> u64 {
        self.order.as_ref().map_or(position, |order| order.get(position))
    }

    /// The pictures from position `start` on that are made together.
    fn window(&self, start: u64) -> Result<Vec<Picture>> {
        let (mut window, mut bytes) = (Vec::new(), 0);
        for position in start..self.positions.end.min(start + WINDOW_PICTURES) {
            let picture = self.maker.pictures.get(self.sample_at(position))?;
            bytes += picture.len;
            if !window.is_empty() && bytes > WINDOW_BYTES {
                break;
            }
            window.push(picture);
        }
        Ok(window)
    }

    pub(super) fn all(&mut self, mut progress: impl FnMut(Progress) -> ControlFlow<()> + Send) -> Result<()> {
        let (maker, first) = (self.maker, self.positions.start);
        let total = self.positions.end - first;
        let mut position = first;
        let mut made = maker.make(self.window(position)?);
        while !made.is_empty() {
            position += made.len() as u64;
            let next = self.window(position)?;
            let (written, following) = rayon::join(|| self.take_all(made), || maker.make(next));
            written?;
            made = following;
            let (bytes_before, bytes_after) = self.summary.bytes;
            let pictures = position - first;
            if progress(Progress { pictures, total, bytes_before, bytes_after }).is_break() {
                return Err(stopped(format!("stopped after {pictures} pictures")));
            }
        }
        Ok(())
    }

    fn take_all(&mut self, made: Vec<Made>) -> Result<()> {
        made.into_iter().try_for_each(|made| self.take(made))
    }

    /// Writes one picture, or its line of the ledger.
    fn take(&mut self, made: Made) -> Result<()> {
        let Made { picture, after, result } = made;
        let (outcome, bytes) = match result {
            Ok(done) => done,
            Err(error) if self.maker.shards.skip_damaged && is_damage(&error) => {
                return self.leave_out(&picture, &error);
            }
            Err(error) => return Err(error),
        };
        let summary = &mut self.summary;
        summary.bytes.0 += picture.len;
        summary.bytes.1 += after;
        match outcome {
            Outcome::Transcoded { new_tables, .. } => {
                summary.transcoded += 1;
                summary.new_tables += u64::from(new_tables);
                summary.transcoded_bytes.0 += picture.len;
                summary.transcoded_bytes.1 += after;
            }
            Outcome::Unchanged { reason } => {
                summary.unchanged.entry(reason).or_insert_with(|| (0, picture.path.clone())).0 += 1;
            }
        }
        if self.maker.shards.format == Format::Files {
            self.summary.files += 1;
            return Ok(());
        }
        let shard = self.write_sample(&picture, bytes)?;
        self.list(&picture, &shard, outcome, after)
    }

    /// Appends to the open shard, or to a new one; returns its name.
    fn write_sample(&mut self, picture: &Picture, bytes: Vec<u8>) -> Result<String> {
        let len = bytes.len() as u64;
        let (samples_max, bytes_max) = match self.target {
            ShardTarget::Folder(_) => (self.maker.shards.samples, self.maker.shards.bytes),
            ShardTarget::Task(..) => (u64::MAX, u64::MAX),
        };
        if self.shard.as_ref().is_some_and(|shard| shard.samples >= samples_max || shard.bytes + len > bytes_max) {
            self.end_shard()?;
        }
        let mut shard = match self.shard.take() {
            Some(shard) => shard,
            None => self.begin_shard()?,
        };
        let class = picture.class;
        match &mut shard.writer {
            Writer::Tar(pending) => {
                let key = format!("{:08}", self.key);
                let image = format!("{key}.{}", ending_of(&picture.path));
                let written = tar::append(pending, &image, &bytes).and_then(|()| match class {
                    Some(class) => tar::append(pending, &format!("{key}.cls"), class.to_string().as_bytes()),
                    None => Ok(()),
                });
                written.map_err(|source| output::failed(source, pending.target()))?;
            }
            #[cfg(feature = "parquet")]
            Writer::Parquet(writer) => writer.append(bytes, class.unwrap_or(0).into())?,
        }
        shard.samples += 1;
        shard.bytes += len;
        let name = shard.name.clone();
        self.shard = Some(shard);
        Ok(name)
    }

    /// Writes the sample's line of the manifest.
    fn list(&mut self, picture: &Picture, shard: &str, outcome: Outcome, after: u64) -> Result<()> {
        let what = match outcome {
            Outcome::Transcoded { interval, .. } => format!("restarts every {interval}"),
            Outcome::Unchanged { reason } => format!("unchanged: {reason}"),
        };
        let label = picture.class.map_or(String::new(), |class| class.to_string());
        let (key, before, source) = (self.key, picture.len, self.maker.source(picture));
        let line = format!("{key:08}\t{shard}\t{label}\t{source}\t{what}\t{before}\t{after}\n");
        self.key += 1;
        match &mut self.target {
            ShardTarget::Folder(lists) => {
                let path = self.maker.to.join(MANIFEST);
                output::append_line(&mut lists.manifest, &path, MANIFEST_HEADING, &line)
            }
            ShardTarget::Task(_, lists) => lists.written(&line),
        }
    }

    fn begin_shard(&self) -> Result<Shard> {
        let (number, create): (u64, fn(PathBuf) -> Result<Pending>) = match self.target {
            ShardTarget::Folder(_) => (self.summary.files, output::create),
            ShardTarget::Task(number, _) => (number, output::create_shared),
        };
        let name = shard_name(self.maker.shards.format, number);
        let pending = create(self.maker.to.join(&name))?;
        let writer = match self.maker.shards.format {
            #[cfg(feature = "parquet")]
            Format::Parquet => {
                Writer::Parquet(Box::new(parquet::Writer::new(pending, self.maker.pictures.labelled())?))
            }
            Format::Tar | Format::Files => Writer::Tar(pending),
        };
        Ok(Shard { name, samples: 0, bytes: 0, writer })
    }

    fn end_shard(&mut self) -> Result<()> {
        let Some(shard) = self.shard.take() else { return Ok(()) };
        let pending = match shard.writer {
            Writer::Tar(mut pending) => {
                tar::finish(&mut pending).map_err(|source| output::failed(source, pending.target()))?;
                pending
            }
            #[cfg(feature = "parquet")]
            Writer::Parquet(writer) => writer.finish()?,
        };
        match self.target {
            ShardTarget::Folder(_) => output::commit(pending, self.maker.shards.sync)?,
            ShardTarget::Task(..) => output::commit_new(pending)?,
        }
        self.summary.files += 1;
        Ok(())
    }

    fn leave_out(&mut self, picture: &Picture, error: &Error) -> Result<()> {
        self.summary.damaged += 1;
        let line = output::ledger_line(&self.maker.source(picture), error);
        match &mut self.target {
            ShardTarget::Folder(lists) => {
                let path = self.maker.to.join(LEDGER);
                output::append_line(&mut lists.ledger, &path, LEDGER_HEADING, &line)
            }
            ShardTarget::Task(_, lists) => lists.damaged(&line),
        }
    }

    /// Ends the last shard, the ledger, and then the manifest.
    pub(super) fn finish(mut self) -> Result<Summary> {
        self.end_shard()?;
        let ShardTarget::Folder(lists) = self.target else { return Ok(self.summary) };
        for list in lists.ledger.into_iter().chain(lists.manifest) {
            output::commit(list, self.maker.shards.sync)?;
        }
        if self.summary.damaged == self.summary.pictures {
            let message = format!("all {} pictures are damaged", self.summary.pictures);
            return Err(Error::new(ErrorKind::Empty, Stage::Write, message).with_path(self.maker.pictures.root()));
        }
        Ok(self.summary)
    }
}

/// Whether the picture is to blame, not the machine.
fn is_damage(error: &Error) -> bool {
    error.stage() == Stage::Decode
}

/// The ending of a tar member.
fn ending_of(path: &Path) -> String {
    let ending = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    if matches!(ending.as_str(), "jpeg" | "jfif") { "jpg".into() } else { ending }
}

/// Name of an output shard.
pub(super) fn shard_name(format: Format, number: u64) -> String {
    match format {
        #[cfg(feature = "parquet")]
        Format::Parquet => format!("shard-{number:06}.parquet"),
        Format::Tar | Format::Files => format!("shard-{number:06}.tar"),
    }
}

fn stopped(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Cancelled, Stage::Write, message)
}

/// Makes pictures, on all workers.
#[derive(Clone, Copy)]
pub(super) struct Maker<'a> {
    pub(super) shards: &'a Shards,
    pub(super) pictures: &'a dyn Pictures,
    pub(super) to: &'a Path,
    /// Ends the run before the next picture.
    pub(super) stop: &'a Stop,
}

impl Maker<'_> {
    /// The picture's path in the folder, for a list.
    fn source(&self, picture: &Picture) -> String {
        output::escaped(picture.path.strip_prefix(self.pictures.root()).unwrap_or(&picture.path))
    }

    fn make(&self, pictures: Vec<Picture>) -> Vec<Made> {
        let one = |picture: Picture| match self.make_one(&picture) {
            Ok((after, outcome, bytes)) => Made { picture, after, result: Ok((outcome, bytes)) },
            Err(error) => {
                let error = error.with_path(&picture.path).with_sample(picture.sample);
                Made { picture, after: 0, result: Err(error) }
            }
        };
        pictures.into_par_iter().map(one).collect()
    }

    /// Length of the result, outcome, and the result itself unless its file is already written.
    fn make_one(&self, picture: &Picture) -> Result<(u64, Outcome, Vec<u8>)> {
        if self.stop.requested() {
            return Err(stopped("stopped on request"));
        }
        let input = picture.read(self.shards.restarts.bytes as u64)?;
        let mut out = Vec::new();
        let outcome = restart_jpeg(&input, &self.shards.restarts, &mut out)?;
        drop(input);
        let after = out.len() as u64;
        if self.shards.format == Format::Files {
            self.write_file(&picture.path, &out)?;
            out = Vec::new();
        }
        Ok((after, outcome, out))
    }

    fn write_file(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let target = self.to.join(path.strip_prefix(self.pictures.root()).unwrap_or(path));
        if let Some(dir) = target.parent() {
            make_folder(dir).map_err(|source| output::failed(source, dir))?;
        }
        let mut pending = output::create(target)?;
        pending.write_all(bytes).map_err(|source| output::failed(source, pending.target()))?;
        output::commit(pending, self.shards.sync)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let growth = |(before, after): (u64, u64)| 100.0 * (after as f64 / before.max(1) as f64 - 1.0);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        writeln!(f, "pictures    {} into {} files", self.pictures, self.files)?;
        write!(f, "transcoded  {}", self.transcoded)?;
        let (before, after) = self.transcoded_bytes;
        if before > 0 {
            let growth = growth(self.transcoded_bytes);
            write!(f, ", {:.1} MiB to {:.1} MiB ({growth:+.2} %)", mib(before), mib(after))?;
            write!(f, ", {} with new Huffman tables", self.new_tables)?;
        }
        writeln!(f)?;
        for (reason, (count, path)) in &self.unchanged {
            writeln!(f, "unchanged   {count}: {reason} (the first is {})", path.display())?;
        }
        if self.damaged > 0 {
            writeln!(f, "left out    {}: damaged, listed in {LEDGER}", self.damaged)?;
        }
        for (ending, count) in &self.left_out {
            writeln!(f, "left out    {count}: {ending}, not pictures")?;
        }
        let seconds = self.elapsed.as_secs_f64();
        let rate = self.bytes.0 as f64 / 1e6 / seconds.max(1e-9);
        write!(f, "bytes       {:.1} MiB to {:.1} MiB ", mib(self.bytes.0), mib(self.bytes.1))?;
        write!(f, "({:+.2} %) in {seconds:.1} s, {rate:.0} MB/s", growth(self.bytes))
    }
}
