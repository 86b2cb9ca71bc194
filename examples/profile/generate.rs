//! Data for who has none: a folder that holds either all of it, with a marker that says what it is, or nothing that a later run
//! would take for data.
//!
//! ```text
//! DIR/ .feedline-partial ─► data/ … ─► .feedline-profile.json ─► .feedline-partial removed
//!       locked while it is written       written last
//! ```
//!
//! What holds: a folder that is not empty and has neither file is somebody else's, and is refused; so is one that holds other data
//! than is asked for. What a run that was killed left behind is removed by the next. Data whose files are missing, or whose bytes
//! are not as many as were written, is refused.

use crate::content::{Content, Texture};
use crate::source::Source;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, IsTerminal};
use std::path::{Path, PathBuf};

const MARKER: &str = ".feedline-profile.json";
const PARTIAL: &str = ".feedline-partial";
const DATA: &str = "data";
/// How much is made, unless something is said.
const MIB: u64 = 1024;
/// Files that hold several samples end with the one that reaches this, unless the workload says otherwise.
const FILE_BYTES: u64 = 128 << 20;
/// Threads that make data; each has a sample or two in memory.
const THREADS_MAX: usize = 16;
/// Room that is left on the disk.
const SPARE: u64 = 64 << 20;

/// What is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub source: Source,
    pub sample_bytes: u64,
    pub samples_per_file: Option<u64>,
    /// Of tokens.
    pub token_bytes: u64,
    /// Samples at least: a batch.
    pub batch: u64,
    pub mib: Option<u64>,
}

/// What lies in a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Marker {
    made_by: String,
    source: String,
    sample_bytes: u64,
    token_bytes: u64,
    samples_per_file: u64,
    samples: u64,
    mib: u64,
    /// As they were written.
    files: u64,
    bytes: u64,
}

const MADE_BY: &str = "feedline's example `profile`, version 1";

/// Made data.
#[derive(Debug)]
pub struct Made {
    pub path: PathBuf,
    pub bytes: u64,
    /// An earlier run did.
    pub before: bool,
}

type Anyhow<T> = Result<T, Box<dyn Error>>;

/// Makes data in `dir`, or takes what is there; `quit` ends the making.
///
/// Errors: in words: the folder is not fit, the disk has no room, what the operating system says. Nothing is left behind then.
pub fn ensure(dir: &Path, wanted: &Wanted, quit: impl Fn() -> bool + Sync) -> Anyhow<Made> {
    let at = |error: io::Error| format!("{}: {error}", dir.display());
    let fresh = !dir.exists();
    if !fresh && let Some(made) = found(dir, wanted)? {
        return Ok(made);
    }
    let marker = wanted.marker()?;
    let content = wanted.content()?;
    fs::create_dir_all(dir).map_err(at)?;
    let result = Lock::take(dir).and_then(|lock| {
        let made = room_for(dir, &marker).and_then(|()| fill(dir, wanted.source, marker, &content, quit));
        lock.release(dir, made.is_ok());
        made
    });
    if result.is_err() && fresh {
        // Only when it is empty.
        let _ = fs::remove_dir(dir);
    }
    result
}

/// What an earlier run made, if it is what is wanted; `None` where data may be made.
fn found(dir: &Path, wanted: &Wanted) -> Anyhow<Option<Made>> {
    let name = dir.display();
    let text = match fs::read_to_string(dir.join(MARKER)) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let mut entries = fs::read_dir(dir).map_err(|error| format!("{name}: {error}"))?;
            let ours = dir.join(PARTIAL).exists();
            return match entries.next() {
                Some(_) if !ours => {
                    Err(format!("{name} is not empty, and not made by --generate: name a new folder").into())
                }
                _ => Ok(None),
            };
        }
        Err(error) => return Err(format!("{name}/{MARKER}: {error}").into()),
    };
    let marker: Marker = serde_json::from_str(&text).map_err(|error| format!("{name}/{MARKER}: {error}"))?;
    wanted.check(&marker).map_err(|why| format!("{name} holds {why}: name another folder, or remove it"))?;
    let data = dir.join(DATA);
    let (files, bytes) =
        measure(&data, ending(wanted.source)).map_err(|error| format!("{}: {error}", data.display()))?;
    if (files, bytes) != (marker.files, marker.bytes) {
        let (then, all) = (marker.files, marker.bytes);
        let message = format!(
            "{name} was changed: {files} files of {bytes} bytes, {then} of {all} were made; remove it, and it is made anew"
        );
        return Err(message.into());
    }
    Ok(Some(Made { path: data, bytes, before: true }))
}

/// Files and bytes of the files with that ending.
fn measure(dir: &Path, ending: &str) -> io::Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().ends_with(ending.as_bytes()) {
            files += 1;
            bytes += entry.metadata()?.len();
        }
    }
    Ok((files, bytes))
}

fn ending(source: Source) -> &'static str {
    match source {
        Source::Images => ".jpg",
        Source::Tar => ".tar",
        Source::Tfrecord => ".tfrecord",
        Source::Npy => ".npy",
        Source::Npz => ".npz",
        #[cfg(feature = "parquet")]
        Source::Parquet => ".parquet",
        _ => ".bin",
    }
}

impl Wanted {
    fn content(&self) -> Anyhow<Content> {
        let bytes = usize::try_from(self.sample_bytes)?;
        Ok(match self.source {
            Source::Images => Content::Images(Texture::new(bytes)?),
            Source::Tar => Content::Tar(Texture::new(bytes)?),
            Source::Records => Content::Records { bytes },
            Source::Tfrecord => Content::TfRecord { bytes },
            Source::Tokens => Content::Tokens { width: usize::try_from(self.token_bytes)?, bytes },
            Source::Npy => Content::Npy { bytes },
            Source::Npz => Content::Npz { bytes },
            #[cfg(feature = "parquet")]
            Source::Parquet => Content::Parquet { bytes },
            other => return Err(format!("--generate does not make {other}; use data of yours, by --path").into()),
        })
    }

    /// What the folder will hold, as far as it is known.
    fn marker(&self) -> Anyhow<Marker> {
        let mib = self.mib.unwrap_or(MIB);
        let samples = (mib << 20) / self.sample_bytes.max(1);
        let least = self.batch.saturating_mul(self.sample_bytes).div_ceil(1 << 20).max(1);
        if samples < self.batch.max(1) {
            let rows = self.batch;
            return Err(
                format!("{mib} MiB hold no batch of {rows} samples: --generate-mib {least} is the least").into()
            );
        }
        let one = matches!(self.source, Source::Images | Source::Npy | Source::Npz);
        let per_file = (FILE_BYTES / self.sample_bytes.max(1)).max(1);
        Ok(Marker {
            made_by: MADE_BY.into(),
            source: self.source.to_string(),
            sample_bytes: self.sample_bytes,
            token_bytes: self.token_bytes,
            samples_per_file: if one { 1 } else { self.samples_per_file.unwrap_or(per_file) },
            samples,
            mib,
            files: 0,
            bytes: 0,
        })
    }

    /// Whether a folder holds this. Errors: what it holds.
    fn check(&self, marker: &Marker) -> Result<(), String> {
        let Marker { made_by, source, sample_bytes, mib, samples, .. } = marker;
        let same = *made_by == MADE_BY
            && *source == self.source.to_string()
            && *sample_bytes == self.sample_bytes
            && marker.token_bytes == self.token_bytes
            && self.samples_per_file.is_none_or(|wanted| wanted == marker.samples_per_file)
            && self.mib.is_none_or(|wanted| wanted == *mib)
            && *samples >= self.batch;
        let held =
            format!("{samples} samples of {sample_bytes} bytes ({source}, {mib} MiB), and not what is asked for");
        if same { Ok(()) } else { Err(held) }
    }
}

/// The right to write to a folder: a locked file in it, which also says that what lies there is not whole.
struct Lock(#[allow(dead_code, reason = "locked as long as it is open")] File);

impl Lock {
    fn take(dir: &Path) -> Anyhow<Self> {
        let path = dir.join(PARTIAL);
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let file = File::create(&path).map_err(failed)?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(format!("another program makes data in {} now", dir.display()).into());
        }
        Ok(Self(file))
    }

    /// Without data, nothing is left.
    fn release(self, dir: &Path, whole: bool) {
        if !whole {
            // What cannot be removed is refused by later runs, as it has no marker.
            let _ = fs::remove_dir_all(dir.join(DATA));
        }
        let _ = fs::remove_file(dir.join(PARTIAL));
    }
}

fn room_for(dir: &Path, marker: &Marker) -> Anyhow<()> {
    let there = rustix::fs::statvfs(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let free = there.f_bavail.saturating_mul(there.f_frsize);
    let needed = (marker.mib << 20).saturating_add(marker.mib << 15).saturating_add(SPARE);
    let mib = |bytes: u64| bytes >> 20;
    if free < needed {
        let (free, needed) = (mib(free), mib(needed));
        return Err(
            format!("{} has {free} MiB free, {needed} are needed: less by --generate-mib", dir.display()).into()
        );
    }
    Ok(())
}

/// Makes all files, then the marker.
fn fill(
    dir: &Path,
    source: Source,
    mut marker: Marker,
    content: &Content,
    quit: impl Fn() -> bool + Sync,
) -> Anyhow<Made> {
    let data = dir.join(DATA);
    let _ = fs::remove_dir_all(&data);
    fs::create_dir(&data).map_err(|error| format!("{}: {error}", data.display()))?;
    let ending = ending(source);
    let bar = progress(marker.samples * marker.sample_bytes);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let files = marker.samples.div_ceil(marker.samples_per_file);
    let written = pool.install(|| {
        (0..files).into_par_iter().try_for_each(|number| {
            let path = data.join(format!("{number:08}{ending}"));
            let start = number * marker.samples_per_file;
            let samples = start..marker.samples.min(start.saturating_add(marker.samples_per_file));
            let file = || -> io::Result<()> {
                let out = BufWriter::with_capacity(1 << 20, File::create(&path)?);
                content.write(out, samples, |bytes| {
                    bar.inc(bytes);
                    if quit() { Err(ErrorKind::Interrupted.into()) } else { Ok(()) }
                })
            };
            file().map_err(|error| failed(&path, &error))
        })
    });
    bar.finish_and_clear();
    written?;
    (marker.files, marker.bytes) = measure(&data, ending)?;
    settle(dir, &marker)?;
    Ok(Made { path: data, bytes: marker.bytes, before: false })
}

fn failed(path: &Path, error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::Interrupted => "interrupted while data was made; what was there of it is removed".into(),
        ErrorKind::StorageFull => "the disk is full; what was made until then is removed".into(),
        _ => format!("{}: {error}", path.display()),
    }
}

/// Brings everything to the device, so that it can be dropped from the page cache, and last the marker.
fn settle(dir: &Path, marker: &Marker) -> Anyhow<()> {
    let at = |error: io::Error| format!("{}: {error}", dir.display());
    let folder = File::open(dir).map_err(at)?;
    rustix::fs::syncfs(&folder).map_err(|error| at(error.into()))?;
    let hidden = dir.join(format!("{MARKER}.new"));
    fs::write(&hidden, serde_json::to_string_pretty(marker)?).map_err(at)?;
    fs::rename(&hidden, dir.join(MARKER)).map_err(at)?;
    folder.sync_all().map_err(at)?;
    Ok(())
}

fn progress(bytes: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(bytes);
    let style = ProgressStyle::with_template("making data {wide_bar} {bytes} of {total_bytes} ({eta})");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
    bar
}
