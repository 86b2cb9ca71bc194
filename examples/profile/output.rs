//! Output files, opened at the beginning of a run and written at its end: a missing folder must not
//! surface after an hour.
//!
//! Guarantees: nothing is written to the data or into its folder, where the next run would read it
//! as data. An existing file is unchanged until it is written. A new file is removed unless
//! written.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// An output file that can be written.
pub struct Output {
    path: PathBuf,
    file: File,
    made: bool,
}

impl Output {
    /// Opens the file, and creates a missing one. Errors: text with the path; also if it lies in
    /// `data`.
    pub fn open(path: &Path, data: &Path) -> Result<Self, String> {
        if resolved(path).starts_with(resolved(data)) {
            let path = path.display();
            let data = data.display();
            return Err(format!(
                "{path} is in the data {data}: name a file elsewhere"
            ));
        }
        let made = !path.exists();
        // Not truncated: a run that ends early leaves the old contents.
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        Ok(Self {
            path: path.into(),
            file: file.map_err(|error| cannot_write(path, &error))?,
            made,
        })
    }

    /// Replaces the file's contents. Errors: text with the path.
    pub fn write(mut self, text: &str) -> Result<(), String> {
        // A device or a pipe has no length.
        let _ = self.file.set_len(0);
        self.file
            .write_all(text.as_bytes())
            .map_err(|error| cannot_write(&self.path, &error))?;
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

/// Follows the links of a path, even if its last parts do not exist yet.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let real = path.ancestors().find_map(|start| {
        let real = start.canonicalize().ok()?;
        // An empty rest would add a slash.
        Some(
            path.strip_prefix(start)
                .ok()
                .filter(|rest| *rest != Path::new(""))
                .map_or(real.clone(), |rest| real.join(rest)),
        )
    });
    real.unwrap_or(path)
}

fn cannot_write(path: &Path, error: &io::Error) -> String {
    format!("cannot write {}: {error}", path.display())
}

/// Writes to standard output. A closed pipe (`profile … | head`) is no error.
///
/// Errors: all others, as text.
pub fn say(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("cannot write the answer: {error}"))
        }
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
    fn files_change_only_when_they_are_written() {
        let folder = Folder::new();
        let new = folder.join("new");
        let old = folder.join("old");
        let data = folder.join("data");
        std::fs::write(&old, "before").unwrap();
        [&new, &old]
            .iter()
            .for_each(|path| drop(Output::open(path, &data).unwrap()));
        assert!(!new.exists() && std::fs::read(&old).unwrap() == b"before");
        Output::open(&old, &data).unwrap().write("new").unwrap();
        assert_eq!(std::fs::read(&old).unwrap(), b"new");
        Output::open(Path::new("/dev/null"), &data)
            .unwrap()
            .write("new")
            .unwrap();
        for path in [folder.join("none/page.html"), folder.to_path_buf()] {
            let error = Output::open(&path, &data).map(|_| ()).unwrap_err();
            assert!(
                error.starts_with(&format!("cannot write {}: ", path.display())),
                "{error}"
            );
        }
    }

    #[test]
    fn outputs_in_the_data_are_refused_by_any_path() {
        let folder = Folder::new();
        let data = folder.join("data");
        let link = folder.join("link");
        std::fs::create_dir_all(data.join("class")).unwrap();
        std::fs::write(data.join("a.bin"), "a").unwrap();
        std::os::unix::fs::symlink(&data, &link).unwrap();
        for path in [
            data.join("class/page.html"),
            link.join("a.bin"),
            folder.join("data/../link/./page.html"),
        ] {
            let error = Output::open(&path, &data).map(|_| ()).unwrap_err();
            assert!(
                error.contains("is in the data"),
                "{}: {error}",
                path.display()
            );
        }
        assert!(Output::open(&link.join("a.bin"), &data.join("a.bin")).is_err());
        Output::open(&folder.join("data.html"), &data).unwrap();
    }
}
