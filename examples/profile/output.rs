//! Files that are written at the end of a run, and checked at its beginning: nobody wants to hear after an hour that the folder
//! does not exist.
//!
//! ```text
//! check ─► (data made, opened) ─► open_all ─► run ─► write          cut, then written; nothing of it is touched before
//!   └ fit? not in a data folder?    └ made if missing; neither data, nor twice the same
//! ```
//!
//! What holds: no byte of the data is overwritten, whatever links lead to it, and nothing is put into its folder, where the next
//! run would take it for data. A file that was there is as it was until it is written; one that was made for that, and was not
//! written, is removed.

use feedline::storage::Sources;
use rustix::fs::Access;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files that can be written.
pub struct Output {
    path: PathBuf,
    file: File,
    made: bool,
}

/// Whether a file can probably be written, found out without making it; and whether it lies outside of folders that hold data.
///
/// Errors: in words, with the path.
pub fn check(path: &Path, folders: &[&Path]) -> Result<(), String> {
    let failed = |error: io::Error| cannot_write(path, &error);
    let real = resolved(path).map_err(failed)?;
    for folder in folders {
        if resolved(folder).is_ok_and(|folder| real.starts_with(folder)) {
            let (path, folder) = (path.display(), folder.display());
            return Err(format!("{path} is in {folder}, where it would be taken for data: name a file elsewhere"));
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

/// Opens all, and makes those that are missing.
///
/// Errors: in words, with the path; two are the same file, or one is a file of the data. Then none is left that was made.
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

/// Where a path leads, also where its end does not exist yet.
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

    /// What it is, unless it is a device or a pipe, which can be written to twice.
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

    /// Of the files only those of the same length are looked at: there may be millions.
    fn is_no_data(&self, sources: &Sources, others: &[PathBuf]) -> Result<(), String> {
        let Some(data) = self.regular()?.filter(|_| !self.made) else { return Ok(()) };
        let alike = sources.ids().filter(|id| sources.len_of(*id) == data.len()).map(|id| sources.path(id));
        for path in alike.chain(others.iter().cloned()) {
            if std::fs::metadata(&path).is_ok_and(|other| same(&data, &other)) {
                let (name, path) = (self.path.display(), path.display());
                return Err(format!("{name} is {path}, which is data: name another file to write to"));
            }
        }
        Ok(())
    }

    /// Replaces what is in it. Errors: in words, with the path.
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
            // What cannot be removed is an empty file.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Writes to standard output; whoever closed the pipe (`profile … | head`) does not want the rest.
///
/// Errors: all others, in words.
pub fn say(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!("cannot write the answer: {error}")),
        _ => Ok(()),
    }
}

/// Writes a line to standard error, if there is one.
pub fn tell(line: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;

    #[test]
    fn a_file_that_was_not_written_is_as_it_was_before() {
        let folder = Folder::new();
        let (new, old) = (folder.join("new"), folder.join("old"));
        std::fs::write(&old, "before").unwrap();
        drop(open_all([Some(&new), Some(&old)], &Sources::new(), &[]).unwrap());
        assert!(!new.exists());
        assert_eq!(std::fs::read(&old).unwrap(), b"before");
    }

    #[test]
    fn a_file_that_is_written_holds_that_and_nothing_of_before() {
        let folder = Folder::new();
        let path = folder.join("page.html");
        std::fs::write(&path, "something longer").unwrap();
        Output::open(&path).unwrap().write("short").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
        Output::open(Path::new("/dev/null")).unwrap().write("short").unwrap();
    }

    #[test]
    fn what_cannot_be_written_is_an_error_before_and_while_it_is_opened() {
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
    fn what_is_in_a_data_folder_by_whatever_path_is_refused() {
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
            assert!(error.contains("where it would be taken for data"), "{}: {error}", path.display());
        }
        for path in [folder.join("data.html"), folder.join("data/../page.html")] {
            check(&path, &[&folder.join("new"), &data]).unwrap();
        }
    }

    #[test]
    fn a_file_of_the_data_is_refused_and_stays_as_it_is() {
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
            assert!(error.contains("which is data"), "{error}");
            assert!(!new.exists());
        }
        assert_eq!(std::fs::read(&data).unwrap(), b"years of work");
    }

    #[test]
    fn two_outputs_that_are_one_file_are_refused() {
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
