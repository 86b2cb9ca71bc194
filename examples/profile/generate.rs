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
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, IsTerminal};
use std::os::unix::fs::MetadataExt;
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
    if !fresh && !dir.is_dir() {
        return Err(format!("{} is no folder", dir.display()).into());
    }
    if !fresh && let Some(made) = found(dir, wanted)? {
        return Ok(made);
    }
    let marker = wanted.marker()?;
    let content = wanted.content()?;
    fs::create_dir_all(dir).map_err(at)?;
    let result = make_locked(dir, wanted, marker, &content, quit);
    if result.is_err() && fresh {
        // Only when it is empty.
        let _ = fs::remove_dir(dir);
    }
    result
}

/// Makes it, unless another program did since it was looked for.
fn make_locked(
    dir: &Path,
    wanted: &Wanted,
    marker: Marker,
    content: &Content,
    quit: impl Fn() -> bool + Sync,
) -> Anyhow<Made> {
    let lock = Lock::take(dir)?;
    let made = match found(dir, wanted) {
        Ok(Some(made)) => Ok(made),
        Err(error) => Err(error),
        Ok(None) => {
            let _ = fs::remove_dir_all(dir.join(DATA));
            let made = room_for(dir, &marker).and_then(|()| fill(dir, wanted.source, marker, content, quit));
            if made.is_err() {
                // What cannot be removed is refused by later runs, as it has no marker.
                let _ = fs::remove_dir_all(dir.join(DATA));
            }
            made
        }
    };
    lock.release(dir);
    made
}

/// Where the data is in a folder that `--generate` made; any other path is what it is.
pub fn data_in(path: PathBuf) -> PathBuf {
    let data = path.join(DATA);
    if path.join(MARKER).is_file() && data.is_dir() { data } else { path }
}

/// What an earlier run made, if it is what is wanted; `None` where data may be made.
fn found(dir: &Path, wanted: &Wanted) -> Anyhow<Option<Made>> {
    let name = dir.display();
    let text = match fs::read_to_string(dir.join(MARKER)) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let mut entries = fs::read_dir(dir).map_err(|error| format!("{name}: {error}"))?;
            let ours = dir.join(PARTIAL).exists();
            return match entries.next().transpose().map_err(|error| format!("{name}: {error}"))? {
                Some(entry) if !ours => {
                    let entry = entry.file_name();
                    let what = format!("{name} is not empty (there is {})", entry.display());
                    Err(format!("{what}, and not made by --generate: name a new folder").into())
                }
                _ => Ok(None),
            };
        }
        Err(error) => return Err(format!("{name}/{MARKER}: {error}").into()),
    };
    let marker: Marker = serde_json::from_str(&text).map_err(|error| format!("{name}/{MARKER}: {error}"))?;
    if !wanted.is(&marker) {
        let message = format!(
            "{name} holds {marker}, and {} are wanted: name another folder, remove that one, or read it as it is by --path",
            wanted.in_words()
        );
        return Err(message.into());
    }
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
        if samples < self.batch.max(1) {
            let (rows, bytes) = (self.batch.max(1), self.sample_bytes);
            let least = rows.saturating_mul(bytes).div_ceil(1 << 20).max(1);
            let message = format!(
                "{mib} MiB hold no batch, which is {rows} × {bytes} bytes ({}): --generate-mib {least} is the least",
                self.source
            );
            return Err(message.into());
        }
        Ok(Marker {
            made_by: MADE_BY.into(),
            source: self.source.to_string(),
            sample_bytes: self.sample_bytes,
            token_bytes: self.token_bytes,
            samples_per_file: self.per_file(),
            samples,
            mib,
            files: 0,
            bytes: 0,
        })
    }

    fn per_file(&self) -> u64 {
        if matches!(self.source, Source::Images | Source::Npy | Source::Npz) {
            return 1;
        }
        self.samples_per_file.unwrap_or((FILE_BYTES / self.sample_bytes.max(1)).max(1))
    }

    /// Whether a folder holds this.
    fn is(&self, marker: &Marker) -> bool {
        marker.made_by == MADE_BY
            && marker.source == self.source.to_string()
            && marker.sample_bytes == self.sample_bytes
            && marker.token_bytes == self.token_bytes
            && self.samples_per_file.is_none_or(|_| self.per_file() == marker.samples_per_file)
            && self.mib.is_none_or(|wanted| wanted == marker.mib)
            && marker.samples >= self.batch
    }

    /// What was asked for.
    fn in_words(&self) -> String {
        let mut text = match self.mib {
            Some(mib) => format!("{mib} MiB of {}", self.source),
            None => self.source.to_string(),
        };
        text += &format!(" in samples of {} bytes", self.sample_bytes);
        if self.token_bytes > 0 {
            text += &format!(", tokens of {}", self.token_bytes);
        }
        if self.samples_per_file.is_some() {
            text += &format!(", {} to a file", self.per_file());
        }
        if self.batch > 1 {
            text += &format!(", {} at least", self.batch);
        }
        text
    }
}

/// What lies there, in words.
impl fmt::Display for Marker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, sample_bytes, token_bytes, samples_per_file, samples, mib, .. } = self;
        write!(f, "{mib} MiB of {source} in {samples} samples of {sample_bytes} bytes")?;
        if *token_bytes > 0 {
            write!(f, ", tokens of {token_bytes}")?;
        }
        write!(f, ", up to {samples_per_file} to a file")?;
        if self.made_by == MADE_BY { Ok(()) } else { write!(f, " (by {})", self.made_by) }
    }
}

/// The right to write to a folder: a locked file in it, which also says that what lies there is not whole.
struct Lock(#[cfg_attr(not(test), allow(dead_code, reason = "locked as long as it is open"))] File);

impl Lock {
    /// Whoever releases a lock removes its file: what was opened before that, and locked after it, is no lock.
    fn take(dir: &Path) -> Anyhow<Self> {
        let path = dir.join(PARTIAL);
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        loop {
            let file = File::create(&path).map_err(failed)?;
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                return Err(format!("another program makes data in {} now", dir.display()).into());
            }
            if is_at(&file, &path).map_err(failed)? {
                return Ok(Self(file));
            }
        }
    }

    /// Removes its file while nobody else can have locked it.
    fn release(self, dir: &Path) {
        let _ = fs::remove_file(dir.join(PARTIAL));
    }
}

/// Whether that is still the file at that path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (ours, there) = (file.metadata()?, fs::metadata(path));
    match there {
        Ok(there) => Ok((ours.dev(), ours.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn room_for(dir: &Path, marker: &Marker) -> Anyhow<()> {
    let there = rustix::fs::statvfs(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    room_in(there.f_bavail.saturating_mul(there.f_frsize), marker.mib)
        .map_err(|why| format!("{}: {why}", dir.display()).into())
}

/// Whether so much data may be made on a disk that has so many bytes free. Errors: how much is needed for what, and the most
/// that may be made.
fn room_in(free: u64, mib: u64) -> Result<(), String> {
    // Headers, and what a file system takes for itself.
    let (data, around) = (mib << 20, mib << 15);
    let needed = data.saturating_add(around).saturating_add(SPARE);
    if free >= needed {
        return Ok(());
    }
    let most = free.saturating_sub(SPARE) / ((1 << 20) + (1 << 15));
    let way = match most {
        0 => "name a folder on another disk".into(),
        _ => format!("--generate-mib {most} is the most"),
    };
    let [needed, around, spare] = [needed, around, SPARE].map(|bytes| bytes.div_ceil(1 << 20));
    let free = free >> 20;
    Err(format!(
        "{needed} MiB are needed ({mib} of data, {around} around it, {spare} that stay free), and the disk has {free} free: {way}"
    ))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;
    use feedline::dataset::{Dataset, DatasetExt, Images, Npy, Npz, Records, Tar, TfRecord, Tokens};
    use feedline::tensor::DType;

    fn wanted(source: Source, sample_bytes: u64) -> Wanted {
        Wanted { source, sample_bytes, samples_per_file: None, token_bytes: 0, batch: 1, mib: Some(1) }
    }

    fn make(dir: &Path, wanted: &Wanted) -> Result<Made, String> {
        ensure(dir, wanted, || false).map_err(|error| error.to_string())
    }

    /// Names in a folder, sorted.
    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .map(|entries| entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect())
            .unwrap_or_default();
        names.sort();
        names
    }

    /// Every byte of every sample is read, with the checksums that the format has.
    fn read_all(dataset: &impl Dataset) -> Vec<Vec<Vec<u8>>> {
        (0..dataset.len()).map(|sample| dataset.read_sample(sample).unwrap()).collect()
    }

    #[test]
    fn every_format_that_is_made_is_read_and_has_the_samples_that_were_wanted() {
        let folder = Folder::new();
        let data = |source, bytes| make(&folder.join(format!("{source}")), &wanted(source, bytes)).unwrap().path;
        let records = Records::builder(10_000).open(data(Source::Records, 10_000)).unwrap();
        assert_eq!(read_all(&records).len(), 104);
        let tfrecord = read_all(&TfRecord::open(data(Source::Tfrecord, 10_000)).unwrap());
        assert!(tfrecord.len() == 104 && tfrecord.iter().all(|fields| fields[0].len() == 10_000));
        let mut tokens = wanted(Source::Tokens, 4096);
        tokens.token_bytes = 2;
        let path = make(&folder.join("tokens"), &tokens).unwrap().path;
        let tokens = read_all(&Tokens::builder(DType::U16).window(2048).open(path).unwrap());
        assert!(tokens.len() == 256 && tokens.iter().flatten().flatten().any(|byte| *byte > 0));
        let npy = read_all(&Npy::open(data(Source::Npy, 10_000)).unwrap());
        assert!(npy.len() == 104 && npy.iter().all(|fields| fields[0].len() == 10_000));
        let npz = read_all(&Npz::builder().verify(true).open(data(Source::Npz, 10_000)).unwrap());
        assert!(npz.len() == 104 && npz.iter().all(|fields| fields.len() == 2 && fields[1].len() == 8));
        let images = read_all(&Images::open(data(Source::Images, 20_000)).unwrap());
        assert!(images.len() == 52 && images.iter().all(|fields| fields[0].starts_with(&[0xff, 0xd8])));
        assert_eq!(read_all(&Tar::open(data(Source::Tar, 20_000)).unwrap()).len(), 52);
    }

    #[cfg(feature = "parquet")]
    #[test]
    fn parquet_has_the_bytes_of_every_sample() {
        let folder = Folder::new();
        let mut wanted = wanted(Source::Parquet, 100_000);
        wanted.samples_per_file = Some(4);
        let made = make(&folder.join("parquet"), &wanted).unwrap();
        assert_eq!(names(&made.path).len(), 3);
        let dataset = feedline::dataset::Parquet::open(&made.path).unwrap();
        assert_eq!(dataset.len(), 10);
        let loader = feedline::Loader::builder(dataset).batch_size(10).build().unwrap();
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        let mut expected = Vec::new();
        Content::Records { bytes: 100_000 }.write(&mut expected, 0..10, |_| Ok(())).unwrap();
        assert!(batch.field("record").unwrap().as_bytes().unwrap() == expected);
    }

    #[test]
    fn files_have_as_many_samples_as_the_workload_says() {
        let folder = Folder::new();
        let mut wanted = wanted(Source::Tfrecord, 10_000);
        wanted.samples_per_file = Some(30);
        let made = make(&folder.join("new/deep"), &wanted).unwrap();
        assert_eq!(
            names(&made.path),
            ["00000000.tfrecord", "00000001.tfrecord", "00000002.tfrecord", "00000003.tfrecord"]
        );
        assert_eq!(TfRecord::open(made.path.join("00000003.tfrecord")).unwrap().len(), 14);
    }

    #[test]
    fn data_of_an_earlier_run_is_used_as_it_is() {
        let folder = Folder::new();
        let mut wanted = wanted(Source::Records, 1000);
        let first = make(&folder, &wanted).unwrap();
        let time = |made: &Made| fs::metadata(made.path.join("00000000.bin")).unwrap().modified().unwrap();
        let written = time(&first);
        // What was not said is as it is.
        for mib in [Some(1), None] {
            wanted.mib = mib;
            let again = make(&folder, &wanted).unwrap();
            assert!(again.before && !first.before && again.bytes == first.bytes && time(&again) == written);
        }
        // Indexes that a reader keeps beside the data are not data.
        fs::write(first.path.join("00000000.fdx"), "index").unwrap();
        assert!(make(&folder, &wanted).unwrap().before);
    }

    #[test]
    fn other_data_than_was_asked_for_is_refused_and_stays() {
        let folder = Folder::new();
        let first = wanted(Source::Records, 1000);
        let bytes = make(&folder, &first).unwrap().bytes;
        for (other, wanted) in [
            (Wanted { source: Source::Tfrecord, ..first.clone() }, "1 MiB of tfrecord in samples of 1000 bytes"),
            (Wanted { sample_bytes: 1001, ..first.clone() }, "1 MiB of records in samples of 1001 bytes"),
            (Wanted { mib: Some(2), ..first.clone() }, "2 MiB of records"),
            (Wanted { token_bytes: 4, mib: None, ..first.clone() }, "records in samples of 1000 bytes, tokens of 4"),
            (Wanted { samples_per_file: Some(3), ..first.clone() }, "samples of 1000 bytes, 3 to a file"),
            (Wanted { batch: 2000, ..first.clone() }, "samples of 1000 bytes, 2000 at least"),
        ] {
            let error = make(&folder, &other).unwrap_err();
            let held = "holds 1 MiB of records in 1048 samples of 1000 bytes, up to 134217 to a file, and ";
            let asked =
                error.split_once(held).and_then(|(_, rest)| rest.split_once(" are wanted: name another folder"));
            assert!(asked.is_some_and(|(asked, _)| asked.contains(wanted)), "{error}");
        }
        assert_eq!(make(&folder, &first).unwrap().bytes, bytes);
    }

    #[test]
    fn data_that_was_cut_or_lost_is_refused() {
        let folder = Folder::new();
        let mut wanted = wanted(Source::Records, 1000);
        wanted.samples_per_file = Some(600);
        let made = make(&folder, &wanted).unwrap();
        let file = made.path.join("00000001.bin");
        File::options().write(true).open(&file).unwrap().set_len(5).unwrap();
        let error = make(&folder, &wanted).unwrap_err();
        assert!(error.contains("was changed: 2 files of 600005 bytes, 2 of 1048000 were made"), "{error}");
        fs::remove_file(&file).unwrap();
        assert!(make(&folder, &wanted).unwrap_err().contains("was changed: 1 files"));
    }

    #[test]
    fn a_folder_of_somebody_else_is_refused_and_stays() {
        let folder = Folder::new();
        fs::write(folder.join("thesis.tex"), "years of work").unwrap();
        let error = make(&folder, &wanted(Source::Records, 1000)).unwrap_err();
        assert!(
            error.contains(" is not empty (there is thesis.tex), and not made by --generate: name a new"),
            "{error}"
        );
        assert_eq!(names(&folder), ["thesis.tex"]);
        let error = make(&folder.join("thesis.tex"), &wanted(Source::Records, 1000)).unwrap_err();
        assert!(error.ends_with("is no folder"), "{error}");
    }

    #[test]
    fn nothing_stays_of_data_whose_making_was_interrupted() {
        let folder = Folder::new();
        let (inside, wanted) = (folder.join("data"), wanted(Source::Records, 1000));
        for dir in [&*folder, &inside] {
            let error = ensure(dir, &wanted, || true).unwrap_err().to_string();
            assert!(error.starts_with("interrupted"), "{error}");
            assert_eq!(names(&folder), [""; 0]);
        }
    }

    #[test]
    fn what_a_killed_run_left_is_made_anew() {
        let folder = Folder::new();
        fs::create_dir(folder.join(DATA)).unwrap();
        fs::write(folder.join(DATA).join("00000000.bin"), "half of it").unwrap();
        fs::write(folder.join(PARTIAL), "").unwrap();
        let made = make(&folder, &wanted(Source::Records, 1000)).unwrap();
        assert!(!made.before && made.bytes == 1_048_000);
        assert_eq!(names(&folder), [MARKER, DATA]);
    }

    #[test]
    fn two_programs_do_not_write_to_one_folder() {
        let folder = Folder::new();
        let lock = Lock::take(&folder).unwrap();
        let error = make(&folder, &wanted(Source::Records, 1000)).unwrap_err();
        assert!(error.starts_with("another program makes data in"), "{error}");
        lock.release(&folder);
        make(&folder, &wanted(Source::Records, 1000)).unwrap();
    }

    #[test]
    fn data_that_another_program_finished_while_this_one_came_to_the_lock_is_taken_as_it_is() {
        let folder = Folder::new();
        let wanted = wanted(Source::Records, 1000);
        let late = |wanted: &Wanted| {
            make_locked(&folder, wanted, wanted.marker().unwrap(), &wanted.content().unwrap(), || false)
                .map_err(|error| error.to_string())
        };
        let first = make(&folder, &wanted).unwrap();
        let data = first.path.join("00000000.bin");
        let file = File::open(&data).unwrap();
        assert!(late(&wanted).unwrap().before);
        let error = late(&Wanted { sample_bytes: 1001, ..wanted }).unwrap_err();
        assert!(error.contains("1048 samples of 1000 bytes"), "{error}");
        assert!(is_at(&file, &data).unwrap());
        assert_eq!(names(&folder), [MARKER, DATA]);
    }

    #[test]
    fn a_lock_whose_file_was_removed_is_none() {
        let folder = Folder::new();
        let path = folder.join(PARTIAL);
        let file = File::create(&path).unwrap();
        assert!(is_at(&file, &path).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(!is_at(&file, &path).unwrap());
        let other = Lock::take(&folder).unwrap();
        assert!(!is_at(&file, &path).unwrap() && is_at(&other.0, &path).unwrap());
    }

    #[test]
    fn samples_larger_than_anything_are_refused() {
        let folder = Folder::new();
        let wanted = Wanted { token_bytes: 2, ..wanted(Source::Tokens, u64::MAX) };
        assert!(make(&folder.join("new"), &wanted).unwrap_err().contains("hold no batch"));
    }

    #[test]
    fn what_cannot_be_made_leaves_no_folder() {
        let folder = Folder::new();
        let (megatron, too_few, too_much) = (
            wanted(Source::Megatron, 1000),
            Wanted { batch: 3000, ..wanted(Source::Records, 1000) },
            Wanted { mib: Some(1 << 40), ..wanted(Source::Records, 1000) },
        );
        for (wanted, why) in [
            (megatron, "--generate does not make megatron"),
            (too_few, "1 MiB hold no batch, which is 3000 × 1000 bytes (records): --generate-mib 3 is the least"),
            (too_much, "that stay free), and the disk has "),
        ] {
            let error = make(&folder.join("new"), &wanted).unwrap_err();
            assert!(error.contains(why), "{error}");
            assert_eq!(names(&folder), [""; 0]);
        }
    }

    #[test]
    fn a_disk_without_room_says_how_much_is_needed_for_what_and_what_would_fit() {
        let mib = |count: u64| count << 20;
        assert_eq!(room_in(mib(320 + 10 + 64), 320), Ok(()));
        let error = room_in(mib(320 + 10 + 64) - 1, 320).unwrap_err();
        let needed = "394 MiB are needed (320 of data, 10 around it, 64 that stay free), and the disk has 393 free";
        assert_eq!(error, format!("{needed}: --generate-mib 319 is the most"));
        assert!(room_in(mib(320 + 10 + 64) - 1, 319).is_ok());
        assert!(room_in(mib(64), 1).unwrap_err().ends_with("64 free: name a folder on another disk"));
    }

    #[test]
    fn a_folder_that_was_made_is_where_its_data_is() {
        let folder = Folder::new();
        let made = make(&folder, &wanted(Source::Records, 1000)).unwrap();
        assert_eq!(data_in(folder.to_path_buf()), made.path);
        assert_eq!(data_in(made.path.clone()), made.path);
        fs::remove_file(folder.join(MARKER)).unwrap();
        assert_eq!(data_in(folder.to_path_buf()), folder.to_path_buf());
        assert_eq!(data_in("train-*.tar".into()), Path::new("train-*.tar"));
    }
}
