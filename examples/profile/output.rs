//! Output files, checked at the beginning of a run and written at its end: a missing folder must not surface after an
//! hour.
//!
//! ```text
//! check ─► (data made, opened) ─► open_all ─► run ─► write          truncated, then written; untouched before
//!   └ writable? not in the data?    └ made if missing; no data file, no file twice
//! ```
//!
//! Guarantees: no byte of the data is overwritten, through any link. Nothing is put into the data's folder, where the
//! next run would read it as data. An existing file is unchanged until it is written. A new file is removed unless
//! written.

use feedline::storage::Sources;
use rustix::fs::Access;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// An output file that can be written.
pub struct Output {
    path: PathBuf,
    file: File,
    made: bool,
}

/// Checks that a file can probably be written, without creating it, and that it lies outside of data folders.
///
/// Errors: text with the path.
pub fn check(path: &Path, folders: &[&Path]) -> Result<(), String> {
    let failed = |error: io::Error| cannot_write(path, &error);
    let real = resolved(path).map_err(failed)?;
    for folder in folders {
        if resolved(folder).is_ok_and(|folder| real.starts_with(folder)) {
            let (path, folder) = (path.display(), folder.display());
            return Err(format!("{path} is in the data folder {folder}: name a file elsewhere"));
        }
    }
    match std::fs::metadata(path) {
        Ok(data) if data.is_dir() => return Err(failed(ErrorKind::IsADirectory.into())),
        Ok(_) => rustix::fs::access(path, Access::WRITE_OK).map_err(|error| failed(error.into()))?,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            rustix::fs::access(parent, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| failed(error.into()))?;
        }
        Err(error) => return Err(failed(error)),
    }
    Ok(())
}

/// Opens all outputs, and creates missing files.
///
/// Errors: text with the path; also if two are the same file, or one is a file of the data. Then created files are
/// removed.
pub fn open_all<const N: usize>(
    paths: [Option<&Path>; N],
    sources: &Sources,
    others: &[PathBuf],
) -> Result<[Option<Output>; N], String> {
    let mut all = [const { None }; N];
    for (index, path) in paths.into_iter().enumerate() {
        let Some(path) = path else { continue };
        let output = Output::open(path)?;
        for before in all.iter().flatten() {
            output.differs(before)?;
        }
        output.is_no_data(sources, others)?;
        all[index] = Some(output);
    }
    Ok(all)
}

/// Resolves a path, even if its last part does not exist yet.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let real = path.ancestors().find_map(|start| {
        let real = start.canonicalize().ok()?;
        Some(path.strip_prefix(start).map_or(real.clone(), |rest| real.join(rest)))
    });
    Ok(real.unwrap_or(path))
}

fn same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

fn cannot_write(path: &Path, error: &io::Error) -> String {
    format!("cannot write {}: {error}", path.display())
}

impl Output {
    fn open(path: &Path) -> Result<Self, String> {
        let failed = |error: io::Error| cannot_write(path, &error);
        let mut options = OpenOptions::new();
        options.write(true);
        let (file, made) = match options.open(path) {
            Ok(file) => (file, false),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                (options.create_new(true).open(path).map_err(failed)?, true)
            }
            Err(error) => return Err(failed(error)),
        };
        Ok(Self { path: path.into(), file, made })
    }

    /// Metadata of the file; `None` for a device or pipe, which may be written twice.
    fn regular(&self) -> Result<Option<Metadata>, String> {
        let data = self.file.metadata().map_err(|error| cannot_write(&self.path, &error))?;
        Ok(data.is_file().then_some(data))
    }

    fn differs(&self, other: &Self) -> Result<(), String> {
        match self.regular()?.zip(other.regular()?) {
            Some((one, two)) if same(&one, &two) => {
                Err(format!("{} and {} are the same file", other.path.display(), self.path.display()))
            }
            _ => Ok(()),
        }
    }

    /// Compares only files of the same length, because there may be millions.
    fn is_no_data(&self, sources: &Sources, others: &[PathBuf]) -> Result<(), String> {
        let Some(data) = self.regular()?.filter(|_| !self.made) else { return Ok(()) };
        let alike = sources.ids().filter(|id| sources.len_of(*id) == data.len()).map(|id| sources.path(id));
        for path in alike.chain(others.iter().cloned()) {
            if std::fs::metadata(&path).is_ok_and(|other| same(&data, &other)) {
                let (name, path) = (self.path.display(), path.display());
                return Err(format!("{name} is the data file {path}: name another output file"));
            }
        }
        Ok(())
    }

    /// Replaces the file's contents. Errors: text with the path.
    pub fn write(mut self, text: &str) -> Result<(), String> {
        let regular = self.file.metadata().is_ok_and(|data| data.is_file());
        let cut = if regular { self.file.set_len(0) } else { Ok(()) };
        let written = cut.and_then(|()| self.file.write_all(text.as_bytes())).and_then(|()| self.file.flush());
        written.map_err(|error| cannot_write(&self.path, &error))?;
        self.made = false;
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.made {
            // If removal fails, an empty file remains.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Writes to standard output. A closed pipe (`profile … | head`) is no error.
///
/// Errors: all others, as text.
pub fn say(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!("cannot write the answer: {error}")),
        _ => Ok(()),
    }
}

/// Writes a line to standard error, if it is open.
pub fn tell(line: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;

    #[test]
    fn an_unwritten_file_stays_unchanged() {
        let folder = Folder::new();
        let (new, old) = (folder.join("new"), folder.join("old"));
        std::fs::write(&old, "before").unwrap();
        drop(open_all([Some(&new), Some(&old)], &Sources::new(), &[]).unwrap());
        assert!(!new.exists());
        assert_eq!(std::fs::read(&old).unwrap(), b"before");
    }

    #[test]
    fn a_written_file_holds_only_the_new_text() {
        let folder = Folder::new();
        let path = folder.join("page.html");
        std::fs::write(&path, "something longer").unwrap();
        Output::open(&path).unwrap().write("short").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
        Output::open(Path::new("/dev/null")).unwrap().write("short").unwrap();
    }

    #[test]
    fn unwritable_files_fail_in_check_and_open() {
        let folder = Folder::new();
        for path in [folder.join("none/page.html"), folder.to_path_buf()] {
            for error in [check(&path, &[]).unwrap_err(), Output::open(&path).map(|_| ()).unwrap_err()] {
                assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
            }
        }
        let path = folder.join("page.html");
        check(&path, &[]).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn outputs_in_a_data_folder_are_refused_by_any_path() {
        let folder = Folder::new();
        let (data, link, to_file) = (folder.join("data"), folder.join("link"), folder.join("to_file"));
        std::fs::create_dir_all(data.join("class")).unwrap();
        std::fs::write(data.join("a.bin"), "a").unwrap();
        std::os::unix::fs::symlink(&data, &link).unwrap();
        std::os::unix::fs::symlink(data.join("a.bin"), &to_file).unwrap();
        for path in [
            data.join("page.html"),
            data.join("class/page.html"),
            link.join("page.html"),
            folder.join("data/../link/./page.html"),
            to_file,
            folder.join("new/page.html"),
        ] {
            let error = check(&path, &[&folder.join("new"), &data]).unwrap_err();
            assert!(error.contains("is in the data folder"), "{}: {error}", path.display());
        }
        for path in [folder.join("data.html"), folder.join("data/../page.html")] {
            check(&path, &[&folder.join("new"), &data]).unwrap();
        }
    }

    #[test]
    fn a_data_file_is_refused_and_unchanged() {
        let folder = Folder::new();
        let (data, hard, soft, index) =
            (folder.join("victim.bin"), folder.join("hard"), folder.join("soft"), folder.join("index"));
        std::fs::write(&data, "years of work").unwrap();
        std::fs::write(&index, "an index").unwrap();
        std::fs::hard_link(&data, &hard).unwrap();
        std::os::unix::fs::symlink(&data, &soft).unwrap();
        let mut sources = Sources::new();
        sources.file(&data, 13).unwrap();
        for path in [&data, &hard, &soft, &index] {
            let new = folder.join("new");
            let error =
                open_all([Some(&new), Some(path)], &sources, std::slice::from_ref(&index)).map(|_| ()).unwrap_err();
            assert!(error.contains("is the data file"), "{error}");
            assert!(!new.exists());
        }
        assert_eq!(std::fs::read(&data).unwrap(), b"years of work");
    }

    #[test]
    fn one_file_for_two_outputs_is_refused() {
        let folder = Folder::new();
        let (page, link) = (folder.join("page"), folder.join("link"));
        std::os::unix::fs::symlink(&page, &link).unwrap();
        let sources = Sources::new();
        for other in [&page, &folder.join("./page"), &link] {
            let error = open_all([Some(&page), Some(other)], &sources, &[]).map(|_| ()).unwrap_err();
            assert!(error.ends_with("are the same file"), "{error}");
            assert!(!page.exists());
        }
        let null = Path::new("/dev/null");
        open_all([Some(null), Some(null)], &sources, &[]).unwrap();
        assert!(open_all([None, Some(&page)], &sources, &[]).unwrap()[0].is_none());
    }
}
