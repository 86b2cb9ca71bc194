//! Lists a folder of pictures in the order of [`Images`](feedline_formats::Images), in bounded
//! memory.
//!
//! ```text
//! names of a folder ──► at most 64 MiB, sorted ──► runs on disk ──merge──► pictures, 16,384 at a time ──stat──► each
//! ```
//!
//! Memory: 64 MiB of names, one batch of pictures, and the paths of folders that are not yet
//! listed. A folder in a bucket is listed as a whole.

use super::super::output;
use super::file::Input;
use feedline_base::error::{Error, Result, Stage};
use feedline_base::metadata::FileKind;
use feedline_core::dataset::parallel;
use feedline_core::storage::Blob;
use feedline_core::storage::listing::{each_name, regular};
use feedline_core::storage::publish::Pending;
use feedline_formats::images::{Taken, beside_classes, check_depth, no_pictures, take};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ffi::OsString;
use std::io::{BufReader, ErrorKind, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Maximum bytes of names in memory; each name counts as its length plus `NAME_COST`.
const NAMES_BYTES: usize = 64 << 20;
const NAME_COST: usize = 48;
/// Target name of the hidden temporary files that hold sorted names. They are never renamed to this
/// name.
pub(super) const NAMES: &str = "names";
const BATCH: usize = 16_384;
const STAT_CHUNK: usize = 512;

/// Calls `each` for all pictures of `root`, a path without links; returns the counts of other
/// files, by ending. Sorted runs are stored in the folder `spill`, and removed afterwards.
///
/// Errors: those of `Images::open`.
pub(super) fn each_picture(
    root: &Path,
    spill: &Path,
    each: &mut dyn FnMut(Input) -> Result<()>,
) -> Result<BTreeMap<String, u64>> {
    let mut walk = FolderWalk {
        root,
        spill,
        names_bytes: NAMES_BYTES,
        batch: Vec::new(),
        left_out: BTreeMap::new(),
        each,
    };
    walk.all()?;
    Ok(walk.left_out)
}

struct FolderWalk<'a> {
    root: &'a Path,
    spill: &'a Path,
    names_bytes: usize,
    /// Paths below the root whose sizes are not yet read.
    batch: Vec<(PathBuf, Option<u32>)>,
    left_out: BTreeMap<String, u64>,
    each: &'a mut dyn FnMut(Input) -> Result<()>,
}

impl FolderWalk<'_> {
    fn all(&mut self) -> Result<()> {
        let mut first = None;
        let classes = self.folder(Path::new(""), None, &mut |name| {
            first.get_or_insert_with(|| name.to_path_buf());
        })?;
        match (classes.is_empty(), first) {
            (true, None) => return Err(no_pictures(self.root, &self.left_out)),
            (false, Some(name)) => return Err(beside_classes(&self.root.join(name))),
            _ => {}
        }
        for (class, path) in classes.into_iter().enumerate() {
            let mut some = false;
            let mut todo = BTreeMap::from([(path.clone().into_os_string(), 0)]);
            while let Some((path, depth)) = todo.pop_first() {
                let path = PathBuf::from(path);
                check_depth(&self.root.join(&path), depth)?;
                let folders = self.folder(&path, Some(class as u32), &mut |_| some = true)?;
                todo.extend(
                    folders
                        .into_iter()
                        .map(|path| (path.into_os_string(), depth + 1)),
                );
            }
            if !some {
                return Err(no_pictures(&self.root.join(path), &self.left_out));
            }
        }
        self.measure()
    }

    /// Lists the pictures of one folder, and returns its subfolders.
    fn folder(
        &mut self,
        dir: &Path,
        class: Option<u32>,
        seen: &mut dyn FnMut(&Path),
    ) -> Result<Vec<PathBuf>> {
        let path = if dir.as_os_str().is_empty() {
            self.root.to_path_buf()
        } else {
            self.root.join(dir)
        };
        let mut names = Sorter {
            spill: self.spill,
            limit: self.names_bytes,
            bytes: 0,
            names: Vec::new(),
            runs: Vec::new(),
        };
        let mut folders = Vec::new();
        let left_out = &mut self.left_out;
        let root = self.root;
        each_name(&path, |name, kind: FileKind| {
            match take(&path, &name, kind, root)? {
                Taken::Picture => names.push(name)?,
                Taken::Folder => folders.push(dir.join(name)),
                Taken::LeftOut(ending) => *left_out.entry(ending).or_default() += 1,
            }
            Ok(())
        })?;
        names.each(&mut |name| {
            let path = dir.join(name);
            seen(&path);
            self.batch.push((path, class));
            if self.batch.len() == BATCH {
                self.measure()
            } else {
                Ok(())
            }
        })?;
        folders.sort_unstable();
        Ok(folders)
    }

    /// Reads the sizes of the batch, and passes its pictures to `each`.
    fn measure(&mut self) -> Result<()> {
        let root = self.root;
        let metas = parallel(self.batch.chunks(STAT_CHUNK), |_, chunk| {
            chunk
                .iter()
                .map(|(name, _)| regular(&root.join(name)))
                .collect::<Result<Vec<_>>>()
        })?;
        for ((name, class), meta) in self.batch.drain(..).zip(metas.into_iter().flatten()) {
            (self.each)(Input {
                name,
                class,
                len: meta.len,
                version: meta.version,
            })?;
        }
        Ok(())
    }
}

/// Sorts names in bounded memory.
struct Sorter<'a> {
    spill: &'a Path,
    limit: usize,
    bytes: usize,
    names: Vec<OsString>,
    /// Sorted runs. A file is removed when its `Pending` is dropped.
    runs: Vec<Pending>,
}

impl Sorter<'_> {
    fn push(&mut self, name: OsString) -> Result<()> {
        self.bytes += name.len() + NAME_COST;
        self.names.push(name);
        if self.bytes < self.limit {
            Ok(())
        } else {
            self.spill()
        }
    }

    fn spill(&mut self) -> Result<()> {
        let mut run = output::create_shared(self.spill.join(NAMES))?;
        self.names.sort_unstable();
        let mut write = |name: OsString| {
            run.write_all(&(name.len() as u32).to_le_bytes())?;
            run.write_all(name.as_bytes())
        };
        let written = self
            .names
            .drain(..)
            .try_for_each(&mut write)
            .and_then(|()| run.flush());
        written.map_err(|source| output::failed(source, &run.hidden))?;
        self.bytes = 0;
        self.runs.push(run);
        Ok(())
    }

    /// Calls `each` for every name, in order.
    fn each(mut self, each: &mut dyn FnMut(OsString) -> Result<()>) -> Result<()> {
        self.names.sort_unstable();
        if self.runs.is_empty() {
            return self.names.into_iter().try_for_each(each);
        }
        self.spill()?;
        let mut files = Vec::new();
        let mut heads = BinaryHeap::new();
        for (index, run) in self.runs.iter().enumerate() {
            let mut file = BufReader::with_capacity(1 << 16, Blob::open(&run.hidden)?.stream(0));
            heads.extend(next_name(&mut file, run)?.map(|name| Reverse((name, index))));
            files.push(file);
        }
        while let Some(Reverse((name, index))) = heads.pop() {
            heads.extend(
                next_name(&mut files[index], &self.runs[index])?.map(|name| Reverse((name, index))),
            );
            each(name)?;
        }
        Ok(())
    }
}

fn next_name(file: &mut impl Read, run: &Pending) -> Result<Option<OsString>> {
    let mut len = [0; 4];
    let read = match file.read_exact(&mut len) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => Err(error),
        Ok(()) => {
            let mut name = vec![0; u32::from_le_bytes(len) as usize];
            file.read_exact(&mut name).map(|()| name)
        }
    };
    read.map(|name| Some(OsString::from_vec(name)))
        .map_err(|source| {
            Error::os(Stage::Index, "cannot read the sorted names", source).with_path(&run.hidden)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_core::dataset::Dataset;
    use feedline_formats::Images;

    #[test]
    fn any_limit_of_memory_gives_the_order_of_the_dataset() {
        let dir = std::env::temp_dir().join(format!("feedline-listing-{}", std::process::id()));
        let spill = dir.join("spill");
        std::fs::create_dir_all(dir.join("in")).unwrap();
        std::fs::create_dir_all(&spill).unwrap();
        let root = dir.join("in").canonicalize().unwrap();
        for (index, class) in ["b", "a/z", "a", "a/k/deep", "c"].iter().enumerate() {
            std::fs::create_dir_all(root.join(class)).unwrap();
            for number in 0..40 {
                let number = number * 7919 % 101;
                std::fs::write(
                    root.join(class).join(format!("{number}.jpg")),
                    vec![0; index + number],
                )
                .unwrap();
            }
        }
        std::fs::write(root.join("a/notes.txt"), "x").unwrap();
        let images = Images::open(&root).unwrap();
        for limit in [1, 200, 5000, NAMES_BYTES] {
            let mut found = Vec::new();
            let mut each = |input: Input| {
                found.push(input);
                Ok(())
            };
            let mut walk = FolderWalk {
                root: &root,
                spill: &spill,
                names_bytes: limit,
                batch: Vec::new(),
                left_out: BTreeMap::new(),
                each: &mut each,
            };
            walk.all().unwrap();
            assert_eq!(walk.left_out, *images.left_out());
            assert_eq!(found.len() as u64, images.len());
            for (sample, input) in (0..).zip(found) {
                assert_eq!(root.join(&input.name), images.path_of(sample));
                assert_eq!(
                    input.class.map(|class| class as usize),
                    images.class_of(sample)
                );
            }
            assert_eq!(
                std::fs::read_dir(&spill).unwrap().count(),
                0,
                "runs are removed"
            );
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
