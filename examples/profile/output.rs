//! Files that are written at the end of a run, and checked at its beginning: nobody wants to hear after an hour that the folder
//! does not exist.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A file that can be written. One that was made for that, and then was not written, is removed.
pub struct Output {
    path: PathBuf,
    file: File,
    made: bool,
}

impl Output {
    /// Errors: in words, with the path.
    pub fn open(path: &Path) -> Result<Self, String> {
        let failed = |error: io::Error| format!("cannot write {}: {error}", path.display());
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

    /// Replaces what is in it. Errors: in words, with the path.
    pub fn write(mut self, text: &str) -> Result<(), String> {
        let regular = self.file.metadata().is_ok_and(|data| data.is_file());
        let cut = if regular { self.file.set_len(0) } else { Ok(()) };
        let written = cut.and_then(|()| self.file.write_all(text.as_bytes())).and_then(|()| self.file.flush());
        written.map_err(|error| format!("cannot write {}: {error}", self.path.display()))?;
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
        drop((Output::open(&new).unwrap(), Output::open(&old).unwrap()));
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
    fn what_cannot_be_written_is_an_error_at_once() {
        let folder = Folder::new();
        for path in [folder.join("none/page.html"), folder.to_path_buf()] {
            let error = Output::open(&path).map(|_| ()).unwrap_err();
            assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
        }
    }
}
