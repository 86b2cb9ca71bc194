//! The copy to damage, and the folders of each scenario.
//!
//! ```text
//! original ──copied once──► WORK/pristine ──hard links──► WORK/data: read and damaged by a child (it copies a file before
//!                                                          it damages it), removed before the next child
//! ```
//!
//! Invariants: only this file reads the original, and nothing writes it. No dataset is opened
//! there, because some write an index beside their files. Copies keep their modification time,
//! which identifies files in saved indexes and checksums. Dropping the copy removes the work
//! folder.

use crate::source::{Source, SourceArgs};
use feedline::Stop;
use std::error::Error;
use std::fs::{self, File, FileTimes};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

type Anyhow<T> = Result<T, Box<dyn Error>>;

pub struct Copy {
    work: PathBuf,
    /// The pattern of `--path`, below the copied folder.
    pattern: PathBuf,
    files: Vec<PathBuf>,
    pub bytes: u64,
}

/// Folder and files of the data.
struct Found {
    base: PathBuf,
    pattern: PathBuf,
    files: Vec<PathBuf>,
}

impl Copy {
    /// Copies the data of `args` into a new folder in `parent`: at most `most` bytes and `sample`
    /// files.
    ///
    /// Errors: too many bytes, no files, those of the file system, interrupted.
    pub fn make(
        args: &SourceArgs,
        parent: &Path,
        most: u64,
        sample: Option<usize>,
        stop: &Stop,
    ) -> Anyhow<Self> {
        let mut found = find(&args.path)?;
        if let Some(count) = sample {
            thin(&mut found, args, count)?;
        }
        let sizes = found
            .files
            .iter()
            .map(|name| fs::metadata(found.base.join(name)).map(|meta| meta.len()));
        let bytes = sizes.sum::<io::Result<u64>>()?;
        if found.files.is_empty() {
            return Err(format!("{}: no files there", args.path.display()).into());
        }
        if bytes > most {
            return Err(format!(
                "{} has {} in {} files, and at most {} are copied: give --most {}MB, or --sample for fewer files",
                args.path.display(),
                human_bytes(bytes),
                found.files.len(),
                human_bytes(most),
                bytes.div_ceil(1_000_000),
            )
            .into());
        }
        let work = parent.join(format!("feedline-torture-{}", std::process::id()));
        fs::create_dir_all(parent)
            .map_err(|error| format!("--work {}: {error}", parent.display()))?;
        fs::create_dir(&work).map_err(|error| format!("{}: {error}", work.display()))?;
        let copy = Self {
            work: work.canonicalize()?,
            pattern: found.pattern,
            files: found.files,
            bytes,
        };
        for name in &copy.files {
            if stop.requested() {
                return Err("interrupted".into());
            }
            let to = copy.pristine().join(name);
            fs::create_dir_all(to.parent().unwrap_or(&copy.work))?;
            duplicate(&found.base.join(name), &to)
                .map_err(|error| format!("{}: {error}", name.display()))?;
        }
        Ok(copy)
    }

    fn pristine(&self) -> PathBuf {
        self.work.join("pristine")
    }

    pub fn work(&self) -> &Path {
        &self.work
    }

    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// The files for a child.
    pub fn files(&self) -> Vec<PathBuf> {
        self.files
            .iter()
            .map(|name| self.data().join(name))
            .collect()
    }

    fn data(&self) -> PathBuf {
        self.work.join("data")
    }

    /// The data for a child, as a `--path`.
    pub fn path(&self) -> PathBuf {
        if self.pattern.as_os_str().is_empty() {
            self.data()
        } else {
            self.data().join(&self.pattern)
        }
    }

    /// Replaces the last child's files by an intact copy.
    pub fn renew(&self) -> io::Result<()> {
        remove(&self.data())?;
        for name in &self.files {
            let to = self.data().join(name);
            fs::create_dir_all(to.parent().unwrap_or(&self.work))?;
            fs::hard_link(self.pristine().join(name), to)?;
        }
        Ok(())
    }

    /// Moves the present copy to `folder`, and replaces its content.
    pub fn keep(&self, folder: &Path) -> io::Result<()> {
        remove(folder)?;
        fs::create_dir_all(folder.parent().unwrap_or(folder))?;
        match fs::rename(self.data(), folder) {
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                // It also copies FIFOs.
                let copied = Command::new("cp")
                    .arg("-a")
                    .arg(self.data())
                    .arg(folder)
                    .status()?;
                if copied.success() {
                    Ok(())
                } else {
                    Err(io::Error::other(format!("cp -a: {copied}")))
                }
            }
            other => other,
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.work) {
            eprintln!(
                "the copy could not be removed: {}: {error}",
                self.work.display()
            );
        }
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Copies a file with its modification time.
pub fn duplicate(from: &Path, to: &Path) -> io::Result<()> {
    fs::copy(from, to)?;
    let modified = fs::metadata(from)?.modified()?;
    File::options()
        .write(true)
        .open(to)?
        .set_times(FileTimes::new().set_modified(modified))
}

/// Finds the files of a folder, of a pattern, or of one file.
///
/// A file includes those with the same stem (Megatron's `.idx` and `.bin`).
///
/// Errors: those of the file system, such as a missing file.
fn find(path: &Path) -> Anyhow<Found> {
    let at = |error: io::Error| format!("{}: {error}", path.display());
    if path.is_dir() {
        let mut files = Vec::new();
        walk(path, Path::new(""), &mut files).map_err(at)?;
        files.sort();
        return Ok(Found {
            base: path.to_path_buf(),
            pattern: PathBuf::new(),
            files,
        });
    }
    let is_plain = |part: &Component<'_>| {
        !part
            .as_os_str()
            .to_string_lossy()
            .contains(['*', '?', '[', '{'])
    };
    let parts: Vec<_> = path.components().collect();
    let plain = parts
        .iter()
        .take_while(|part| is_plain(part))
        .count()
        .min(parts.len().saturating_sub(1));
    let base: PathBuf = parts[..plain].iter().collect();
    let pattern: PathBuf = parts[plain..].iter().collect();
    let found = if pattern.components().all(|part| is_plain(&part)) {
        let name = pattern.file_name();
        let stem = pattern.file_stem();
        let folder = if plain == 0 { Path::new(".") } else { &base };
        let names = fs::read_dir(folder)
            .map_err(at)?
            .map(|entry| Ok(base.join(entry?.file_name())));
        let mut files = names.collect::<io::Result<Vec<_>>>().map_err(at)?;
        files.retain(|file| {
            file.is_file() && (file.file_name() == name || [name, stem].contains(&file.file_stem()))
        });
        if files.is_empty() {
            fs::metadata(path).map_err(at)?;
        }
        files
    } else {
        feedline::storage::list(path, &[])
            .map_err(|_| format!("{}: no files there", path.display()))?
            .files
    };
    let mut files: Vec<PathBuf> = found
        .iter()
        .map(|file| file.strip_prefix(&base).unwrap_or(file).into())
        .collect();
    files.sort();
    Ok(Found {
        base,
        pattern,
        files,
    })
}

fn walk(base: &Path, below: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(base.join(below))? {
        let name = below.join(entry?.file_name());
        let kind = fs::symlink_metadata(base.join(&name))?.file_type();
        if kind.is_dir() {
            walk(base, &name, files)?;
        } else if fs::metadata(base.join(&name)).is_ok_and(|meta| meta.is_file()) {
            files.push(name);
        }
    }
    Ok(())
}

/// Takes `count` files, evenly spread.
fn thin(found: &mut Found, args: &SourceArgs, count: usize) -> Anyhow<()> {
    let listed = matches!(args.source, Source::Mds | Source::Megatron);
    if listed || found.pattern.to_string_lossy().contains('{') {
        return Err(
            "--sample: this dataset lists its files by name, so it needs all of them".into(),
        );
    }
    found.files.retain(|name| {
        !name
            .to_string_lossy()
            .split('/')
            .any(|part| part.starts_with('.'))
    });
    let all = found.files.len();
    if count < all {
        found.files = (0..count)
            .map(|k| found.files[k * all / count].clone())
            .collect();
    }
    Ok(())
}

/// Formats a number of bytes with its unit.
pub fn human_bytes(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{} kB", bytes.div_ceil(1000)),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}
