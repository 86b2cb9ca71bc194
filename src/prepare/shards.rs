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
use super::{Outcome, Reason, RestartOptions, restart_jpeg, tar};
use crate::dataset::{Dataset, Images};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::order::{Key, Permutation};
use crate::storage::listing::{names_in, real_path};
use crate::storage::publish::{Pending, is_partial, make_folder, remove};
use crate::storage::{Blob, SourceId};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const WINDOW_PICTURES: u64 = 256;
const WINDOW_BYTES: u64 = 32 << 20;
const MANIFEST: &str = "manifest.tsv";
const LEDGER: &str = "damaged.tsv";

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
    format: Format,
    restarts: RestartOptions,
    samples: u64,
    bytes: u64,
    seed: Option<u64>,
    workers: usize,
    overwrite: bool,
    skip_damaged: bool,
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
    sample: u64,
    /// Encoded bytes, before and after.
    before: u64,
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
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.workers).build();
        let pool = pool
            .map_err(|error| Error::new(ErrorKind::Io, Stage::Build, "cannot start the workers").with_source(error))?;
        let mut run = Run::new(Maker { shards: self, images: &images, from, to });
        pool.install(|| run.all(progress))?;
        let mut summary = run.finish()?;
        summary.elapsed = started.elapsed();
        Ok(summary)
    }

    /// Creates the folder. With `overwrite`, also removes the output of an earlier call.
    fn prepare_folder(&self, to: &Path) -> Result<()> {
        make_folder(to).map_err(|source| output::failed(source, to))?;
        let names = names_in(to)?.into_iter().map(|(name, _)| name);
        // Partial files of a killed call have no owner.
        let (partial, others): (Vec<_>, Vec<_>) = names.partition(|name| is_partial(&name.to_string_lossy()));
        if let (false, Some(other)) = (self.overwrite, others.first()) {
            let left = match partial.len() {
                0 => String::new(),
                count => format!(", and holds {count} hidden files of a run that was interrupted"),
            };
            let message = format!(
                "the output folder is not empty{left}: choose another, or allow that it is overwritten (`--force`, \
                 `overwrite(true)`)"
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

/// Whether a file of this name, at the top of the folder, may come from an earlier call.
fn is_ours(name: &str) -> bool {
    // The index of a tar shard that was read: `shard-000000.tar.0a1b2c3d.fdx`.
    let index = name.strip_suffix(".fdx").and_then(|rest| rest.rsplit_once('.')).map(|(shard, _)| shard);
    let number = |ending: &str| index.unwrap_or(name).strip_prefix("shard-")?.strip_suffix(ending);
    let number = number(".tar").or_else(|| number(".parquet"));
    let shard = number.is_some_and(|text| text.len() >= 6 && text.bytes().all(|byte| byte.is_ascii_digit()));
    shard || name == MANIFEST || name == LEDGER
}

/// Neither folder may contain the other: pictures would be overwritten while they are read.
fn check_apart(from: &Path, to: &Path) -> Result<()> {
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

/// One call of [`Shards::write`].
struct Run<'a> {
    maker: Maker<'a>,
    order: Option<Permutation>,
    shard: Option<Shard>,
    /// Next key.
    key: u64,
    manifest: Option<Pending>,
    ledger: Option<Pending>,
    summary: Summary,
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

impl<'a> Run<'a> {
    fn new(maker: Maker<'a>) -> Self {
        let Maker { shards, images, .. } = maker;
        let order = shards.seed.map(|seed| Permutation::new(images.len(), Key::new(seed).named("prepare")));
        let summary = Summary { pictures: images.len(), left_out: images.left_out().clone(), ..Summary::default() };
        Self { maker, order, shard: None, key: 0, manifest: None, ledger: None, summary }
    }

    fn sample_at(&self, position: u64) -> u64 {
        self.order.as_ref().map_or(position, |order| order.get(position))
    }

    /// The samples from position `start` on that are made together.
    fn window(&self, start: u64) -> Vec<u64> {
        let (mut samples, mut bytes) = (Vec::new(), 0);
        for position in start..self.maker.images.len().min(start + WINDOW_PICTURES) {
            let sample = self.sample_at(position);
            bytes += self.maker.len_of(sample);
            if !samples.is_empty() && bytes > WINDOW_BYTES {
                break;
            }
            samples.push(sample);
        }
        samples
    }

    fn all(&mut self, mut progress: impl FnMut(Progress) -> ControlFlow<()> + Send) -> Result<()> {
        let (maker, total) = (self.maker, self.maker.images.len());
        let mut position = 0;
        let mut made = maker.make(&self.window(0));
        while !made.is_empty() {
            position += made.len() as u64;
            let next = self.window(position);
            let (written, following) = rayon::join(|| self.take_all(made), || maker.make(&next));
            written?;
            made = following;
            let (bytes_before, bytes_after) = self.summary.bytes;
            if progress(Progress { pictures: position, total, bytes_before, bytes_after }).is_break() {
                return Err(Error::new(
                    ErrorKind::Cancelled,
                    Stage::Write,
                    format!("stopped after {position} pictures"),
                ));
            }
        }
        Ok(())
    }

    fn take_all(&mut self, made: Vec<Made>) -> Result<()> {
        made.into_iter().try_for_each(|made| self.take(made))
    }

    /// Writes one picture, or its line of the ledger.
    fn take(&mut self, made: Made) -> Result<()> {
        let Made { sample, before, after, result } = made;
        let (outcome, bytes) = match result {
            Ok(done) => done,
            Err(error) if self.maker.shards.skip_damaged && is_damage(&error) => return self.leave_out(sample, &error),
            Err(error) => return Err(error),
        };
        if self.maker.shards.format == Format::Files {
            self.summary.files += 1;
        } else {
            let shard = self.write_sample(sample, bytes)?;
            self.list(sample, &shard, outcome, (before, after))?;
        }
        let summary = &mut self.summary;
        summary.bytes.0 += before;
        summary.bytes.1 += after;
        match outcome {
            Outcome::Transcoded { new_tables, .. } => {
                summary.transcoded += 1;
                summary.new_tables += u64::from(new_tables);
                summary.transcoded_bytes.0 += before;
                summary.transcoded_bytes.1 += after;
            }
            Outcome::Unchanged { reason } => {
                let images = self.maker.images;
                summary.unchanged.entry(reason).or_insert_with(|| (0, images.path_of(sample))).0 += 1;
            }
        }
        Ok(())
    }

    /// Appends to the open shard, or to a new one; returns its name.
    fn write_sample(&mut self, sample: u64, bytes: Vec<u8>) -> Result<String> {
        let len = bytes.len() as u64;
        let (samples_max, bytes_max) = (self.maker.shards.samples, self.maker.shards.bytes);
        if self.shard.as_ref().is_some_and(|shard| shard.samples >= samples_max || shard.bytes + len > bytes_max) {
            self.end_shard()?;
        }
        let mut shard = match self.shard.take() {
            Some(shard) => shard,
            None => self.begin_shard()?,
        };
        let class = self.maker.images.class_of(sample);
        match &mut shard.writer {
            Writer::Tar(pending) => {
                let key = format!("{:08}", self.key);
                let image = format!("{key}.{}", ending_of(&self.maker.images.path_of(sample)));
                let written = tar::append(pending, &image, &bytes).and_then(|()| match class {
                    Some(class) => tar::append(pending, &format!("{key}.cls"), class.to_string().as_bytes()),
                    None => Ok(()),
                });
                written.map_err(|source| output::failed(source, pending.target()))?;
            }
            #[cfg(feature = "parquet")]
            Writer::Parquet(writer) => writer.append(bytes, class.unwrap_or(0) as i64)?,
        }
        shard.samples += 1;
        shard.bytes += len;
        let name = shard.name.clone();
        self.shard = Some(shard);
        Ok(name)
    }

    /// Writes the sample's line of the manifest.
    fn list(&mut self, sample: u64, shard: &str, outcome: Outcome, (before, after): (u64, u64)) -> Result<()> {
        let what = match outcome {
            Outcome::Transcoded { interval, .. } => format!("restarts every {interval}"),
            Outcome::Unchanged { reason } => format!("unchanged: {reason}"),
        };
        let label = self.maker.images.class_of(sample).map_or(String::new(), |class| class.to_string());
        let source = self.maker.source(sample);
        let line = format!("{:08}\t{shard}\t{label}\t{source}\t{what}\t{before}\t{after}\n", self.key);
        self.key += 1;
        let heading = "#key\tshard\tlabel\tsource\toutcome\tbytes before\tbytes after\n";
        output::append_line(&mut self.manifest, &self.maker.to.join(MANIFEST), heading, &line)
    }

    fn begin_shard(&self) -> Result<Shard> {
        let number = self.summary.files;
        let (name, writer) = match self.maker.shards.format {
            #[cfg(feature = "parquet")]
            Format::Parquet => {
                let name = format!("shard-{number:06}.parquet");
                let labelled = !self.maker.images.classes().is_empty();
                let writer = parquet::Writer::create(self.maker.to.join(&name), labelled)?;
                (name, Writer::Parquet(Box::new(writer)))
            }
            Format::Tar | Format::Files => {
                let name = format!("shard-{number:06}.tar");
                let pending = output::create(self.maker.to.join(&name))?;
                (name, Writer::Tar(pending))
            }
        };
        Ok(Shard { name, samples: 0, bytes: 0, writer })
    }

    fn end_shard(&mut self) -> Result<()> {
        let Some(shard) = self.shard.take() else { return Ok(()) };
        let sync = self.maker.shards.sync;
        match shard.writer {
            Writer::Tar(mut pending) => {
                tar::finish(&mut pending).map_err(|source| output::failed(source, pending.target()))?;
                output::commit(pending, sync)?;
            }
            #[cfg(feature = "parquet")]
            Writer::Parquet(writer) => writer.commit(sync)?,
        }
        self.summary.files += 1;
        Ok(())
    }

    fn leave_out(&mut self, sample: u64, error: &Error) -> Result<()> {
        self.summary.damaged += 1;
        let words = error.to_string().replace(['\t', '\n', '\r'], " ");
        let line = format!("{}\t{words}\n", self.maker.source(sample));
        output::append_line(&mut self.ledger, &self.maker.to.join(LEDGER), "#source\terror\n", &line)
    }

    /// Ends the last shard, the ledger, and then the manifest.
    fn finish(mut self) -> Result<Summary> {
        self.end_shard()?;
        if let Some(ledger) = self.ledger.take() {
            output::commit(ledger, self.maker.shards.sync)?;
        }
        if let Some(manifest) = self.manifest.take() {
            output::commit(manifest, self.maker.shards.sync)?;
        }
        if self.summary.damaged == self.summary.pictures {
            let message = format!("all {} pictures are damaged", self.summary.pictures);
            return Err(Error::new(ErrorKind::Empty, Stage::Write, message).with_path(self.maker.from));
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

/// Makes pictures, on all workers.
#[derive(Clone, Copy)]
struct Maker<'a> {
    shards: &'a Shards,
    images: &'a Images,
    from: &'a Path,
    to: &'a Path,
}

impl Maker<'_> {
    fn len_of(&self, sample: u64) -> u64 {
        self.images.sources().len_of(SourceId::at(sample as usize))
    }

    /// The sample's path in the folder, for a list.
    fn source(&self, sample: u64) -> String {
        let path = self.images.path_of(sample);
        output::escaped(path.strip_prefix(self.from).unwrap_or(&path))
    }

    fn make(&self, samples: &[u64]) -> Vec<Made> {
        let one = |sample: &u64| {
            let (sample, before) = (*sample, self.len_of(*sample));
            let path = self.images.path_of(sample);
            match self.make_one(&path, before) {
                Ok((after, outcome, bytes)) => Made { sample, before, after, result: Ok((outcome, bytes)) },
                Err(error) => {
                    Made { sample, before, after: 0, result: Err(error.with_path(&path).with_sample(sample)) }
                }
            }
        };
        samples.par_iter().map(one).collect()
    }

    /// Length of the result, outcome, and the result itself unless its file is already written.
    fn make_one(&self, path: &Path, len: u64) -> Result<(u64, Outcome, Vec<u8>)> {
        let input = self.read(path, len)?;
        let mut out = Vec::new();
        let outcome = restart_jpeg(&input, &self.shards.restarts, &mut out)?;
        drop(input);
        let after = out.len() as u64;
        if self.shards.format == Format::Files {
            self.write_file(path, &out)?;
            out = Vec::new();
        }
        Ok((after, outcome, out))
    }

    /// The bytes of a picture, with its length as listed.
    fn read(&self, path: &Path, len: u64) -> Result<Vec<u8>> {
        if len > self.shards.restarts.bytes as u64 {
            let message = format!("the file has {len} bytes; at most {} are allowed", self.shards.restarts.bytes);
            return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
        }
        if len == 0 {
            return Err(Error::new(ErrorKind::Empty, Stage::Decode, "a picture of 0 bytes"));
        }
        let picture = Blob::open(path)?;
        let mut input = vec![0; len as usize];
        let read = if picture.len() == len { picture.read_at(0, &mut input) } else { Ok(()) };
        if picture.len() != len || read.is_err_and(|error| error.kind() == ErrorKind::Truncated) {
            let message = format!("the file had {len} bytes when it was listed, and has changed since");
            return Err(Error::new(ErrorKind::Changed, Stage::Read, message));
        }
        Ok(input)
    }

    fn write_file(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let target = self.to.join(path.strip_prefix(self.from).unwrap_or(path));
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
