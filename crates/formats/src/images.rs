//! Images: a folder per class, or one flat folder. Names and sizes are read once, in parallel;
//! pixels are not read.
//!
//! Taken: regular files with an ending of `EXTENSIONS` (any case), also in folders below a class
//! folder. Left out, and counted by kind in [`Images::left_out`]: other endings and hidden files.
//! Errors: FIFOs, sockets and devices, links to a folder or out of the root, a class without
//! images, images beside class folders. So no picture is dropped silently.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{FileKind, ODD, Stamp, is_url};
use feedline_core::dataset::forward::own;
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::{Dataset, Digest, Parts, Sizes, Strings};
use feedline_core::storage::listing::{ending_of, expand, follow, look, names_in, others, regular};
use feedline_core::storage::{Extent, Listed, SourceId, Sources};
use feedline_core::tensor::{DType, EncodedField, Field};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// File endings (lower case) that mark a picture.
pub const EXTENSIONS: [&str; 8] = ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif"];

/// Maximum depth of folders below a class folder.
const DEPTH_MAX: usize = 32;
/// Number of files that a thread takes at a time to read their sizes.
const STAT_CHUNK: usize = 512;

/// Dataset of pictures in folders. Fields: `image` (encoded) and, with class folders, `label`
/// (`i64`, the class's index in [`Images::classes`]). Samples are in the order of torchvision's
/// `ImageFolder`: class, folder, file name. Links to files and folders are followed.
pub struct Images {
    sources: Arc<Sources>,
    schema: Vec<EncodedField>,
    classes: Vec<String>,
    /// First sample of each class.
    starts: Vec<u64>,
    labels: Vec<i64>,
    left_out: BTreeMap<String, u64>,
    sizes: Sizes,
    root: PathBuf,
}

/// Pictures of one folder.
struct Folder {
    path: PathBuf,
    class: usize,
    names: Vec<OsString>,
    /// Length and version of each picture.
    found: Vec<(u64, Option<Stamp>)>,
    left_out: BTreeMap<String, u64>,
}

impl Images {
    /// Indexes `root`: its subfolders are the classes; without subfolders it is one flat folder
    /// without labels. A file, or the files of a pattern such as `photos/**/*.jpg`, are a flat
    /// list.
    ///
    /// Errors: FIFOs, sockets and devices, links without a target or to a folder around them, a
    /// class without images, images beside class folders; each with the path.
    pub fn open(root: impl AsRef<Path>) -> Result<Self> {
        let root = root.as_ref();
        let is_folder = match is_url(root) {
            true => !root.to_string_lossy().contains(['*', '?', '[', '{']),
            false => look(root).is_ok_and(|meta| meta.kind == FileKind::Folder),
        };
        if !is_folder {
            let endings = EXTENSIONS.map(|ending| format!(".{ending}"));
            let Listed {
                files, left_out, ..
            } = expand(root, &endings.each_ref().map(String::as_str))?;
            return Ok(Self {
                left_out,
                root: folder_of(root),
                ..Self::open_files(&files)?
            });
        }
        let top = list(root, 0, root)?;
        let classes = top.folders;
        if classes.is_empty() {
            let mut folders = vec![top.folder];
            measure(&mut folders)?;
            return Self::index(root, Vec::new(), folders);
        }
        if let Some(name) = top.folder.names.first() {
            return Err(beside_classes(&root.join(name)));
        }
        let mut folders = parallel(&classes, |index, path| walk(path, index, root))?
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
        measure(&mut folders)?;
        let names = classes.iter().map(|path| {
            path.file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        });
        folders.push(top.folder);
        Self::index(root, names.collect(), folders)
    }

    /// Indexes these files, in this order, as one flat list without labels. Errors: a file that is
    /// missing or not regular.
    pub fn open_files(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut sources = Sources::new();
        for path in paths.iter().map(AsRef::as_ref) {
            let meta = regular(path)?;
            sources.add(path, &meta)?;
        }
        let root = paths
            .first()
            .and_then(|path| path.as_ref().parent())
            .unwrap_or(Path::new(""))
            .to_path_buf();
        let sizes = sizes_by(&sources);
        let schema = vec![EncodedField::image("image")];
        let classes = Vec::new();
        let starts = vec![0];
        let labels = Vec::new();
        let left_out = BTreeMap::new();
        Ok(Self {
            sources: Arc::new(sources),
            schema,
            classes,
            starts,
            labels,
            left_out,
            sizes,
            root,
        })
    }

    fn index(root: &Path, classes: Vec<String>, folders: Vec<Folder>) -> Result<Self> {
        let mut sources = Sources::new();
        let mut starts = vec![u64::MAX; classes.len().max(1)];
        let mut left_out = BTreeMap::new();
        for folder in &folders {
            for (ending, count) in &folder.left_out {
                *left_out.entry(ending.clone()).or_default() += count;
            }
            if folder.names.is_empty() {
                continue;
            }
            let start = &mut starts[folder.class];
            *start = (*start).min(sources.count() as u64);
            let dir = sources.dir(&folder.path);
            for (name, (size, stamp)) in folder.names.iter().zip(&folder.found) {
                sources.found_in(dir, name, *size, *stamp)?;
            }
        }
        if let Some(class) = starts.iter().position(|start| *start == u64::MAX) {
            let path = classes
                .get(class)
                .map_or(root.to_path_buf(), |name| root.join(name));
            return Err(no_pictures(&path, &left_out));
        }
        let mut schema = vec![EncodedField::image("image")];
        if !classes.is_empty() {
            schema.push(EncodedField::raw(Field::fixed("label", DType::I64, [])));
        }
        let labels = (0..classes.len() as i64).collect();
        let sizes = sizes_by(&sources);
        let root = root.to_path_buf();
        Ok(Self {
            sources: Arc::new(sources),
            schema,
            classes,
            starts,
            labels,
            left_out,
            sizes,
            root,
        })
    }

    /// Names of the classes; a label is an index into them. Empty for a flat folder.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Counts of the files left out, by ending (`hidden` for names that start with a dot).
    pub fn left_out(&self) -> &BTreeMap<String, u64> {
        &self.left_out
    }

    /// Class of a sample, if there are classes.
    pub fn class_of(&self, sample: u64) -> Option<usize> {
        if self.classes.is_empty() {
            return None;
        }
        feedline_core::dataset::starts::locate(&self.starts, sample)
    }

    /// Path of a sample.
    pub fn path_of(&self, sample: u64) -> PathBuf {
        self.sources.path(SourceId::at(sample as usize))
    }
}

/// The folder that a pattern names before its first wildcard.
fn folder_of(pattern: &Path) -> PathBuf {
    let pattern = pattern.to_string_lossy();
    let plain = pattern.split(['*', '?', '[', '{']).next().unwrap_or("");
    match plain.rfind('/') {
        Some(0) => "/".into(),
        Some(slash) => plain[..slash].into(),
        None => PathBuf::new(),
    }
}

struct Listing {
    folder: Folder,
    folders: Vec<PathBuf>,
}

/// The role of a name in the dataset.
pub enum Taken {
    Picture,
    Folder,
    /// Left out, with its ending.
    LeftOut(String),
}

/// Decides the role of the name `name` in the folder `dir` below `root`. Errors: names that would
/// drop a picture silently.
pub fn take(dir: &Path, name: &OsString, kind: FileKind, root: &Path) -> Result<Taken> {
    let not_a_file = |message: &str| {
        Err(Error::new(ErrorKind::NotAFile, Stage::Index, message).with_path(dir.join(name)))
    };
    let ending = if kind == FileKind::Odd {
        ODD.into()
    } else {
        ending_of(name)
    };
    if kind == FileKind::Odd || ending == "hidden" {
        return Ok(Taken::LeftOut(ending));
    }
    let kind = if kind == FileKind::Link {
        follow(&dir.join(name), root)?
    } else {
        kind
    };
    let is_picture = ending
        .strip_prefix('.')
        .is_some_and(|ending| EXTENSIONS.contains(&ending));
    match (kind, is_picture) {
        // Descending would find nothing and drop a picture silently.
        (FileKind::Folder, true) => not_a_file("a folder with the name of a picture"),
        (FileKind::Folder, false) => Ok(Taken::Folder),
        (FileKind::File, true) => Ok(Taken::Picture),
        (FileKind::File, false) => Ok(Taken::LeftOut(ending)),
        _ => not_a_file("neither a file nor a folder"),
    }
}

/// Lists one folder, sorted by name; sizes are read later.
fn list(path: &Path, class: usize, root: &Path) -> Result<Listing> {
    let mut folder = Folder {
        path: path.to_path_buf(),
        class,
        names: Vec::new(),
        found: Vec::new(),
        left_out: BTreeMap::new(),
    };
    let mut folders = Vec::new();
    for (name, kind) in names_in(path)? {
        match take(path, &name, kind, root)? {
            Taken::Picture => folder.names.push(name),
            Taken::Folder => folders.push(path.join(&name)),
            Taken::LeftOut(ending) => *folder.left_out.entry(ending).or_default() += 1,
        }
    }
    folder.names.sort_unstable();
    folders.sort_unstable();
    Ok(Listing { folder, folders })
}

/// Lists all folders of a class, in the order of their paths as text, as in torchvision's
/// `ImageFolder`.
fn walk(path: &Path, class: usize, root: &Path) -> Result<Vec<Folder>> {
    let mut out = Vec::new();
    let mut todo = BTreeMap::from([(path.as_os_str().to_owned(), 0)]);
    while let Some((path, depth)) = todo.pop_first() {
        let path = PathBuf::from(path);
        check_depth(&path, depth)?;
        let listing = list(&path, class, root)?;
        out.push(listing.folder);
        todo.extend(
            listing
                .folders
                .into_iter()
                .map(|path| (path.into_os_string(), depth + 1)),
        );
    }
    Ok(out)
}

/// Refuses folders that are nested too deep.
pub fn check_depth(path: &Path, depth: usize) -> Result<()> {
    if depth <= DEPTH_MAX {
        return Ok(());
    }
    let message = format!("folders are nested deeper than {DEPTH_MAX}");
    Err(Error::new(ErrorKind::Limit, Stage::Index, message).with_path(path))
}

/// The error for a folder without pictures.
pub fn no_pictures(path: &Path, left_out: &BTreeMap<String, u64>) -> Error {
    let message = format!(
        "no pictures ({}){}",
        EXTENSIONS.join(", "),
        others(left_out)
    );
    Error::new(ErrorKind::Empty, Stage::Index, message).with_path(path)
}

/// The error for a picture that belongs to no class.
pub fn beside_classes(path: &Path) -> Error {
    let message = "a picture beside class folders belongs to no class";
    Error::new(ErrorKind::Config, Stage::Index, message).with_path(path)
}

/// Reads the size of every file.
fn measure(folders: &mut [Folder]) -> Result<()> {
    let chunks: Vec<(usize, std::ops::Range<usize>)> = folders
        .iter()
        .enumerate()
        .flat_map(|(index, folder)| {
            let len = folder.names.len();
            (0..len)
                .step_by(STAT_CHUNK)
                .map(move |start| (index, start..(start + STAT_CHUNK).min(len)))
        })
        .collect();
    let shared: &[Folder] = folders;
    let found = parallel(&chunks, |_, (index, range)| {
        look_at(&shared[*index].path, &shared[*index].names[range.clone()])
    })?;
    for ((index, _), found) in chunks.iter().zip(found) {
        folders[*index].found.extend(found);
    }
    Ok(())
}

fn look_at(dir: &Path, names: &[OsString]) -> Result<Vec<(u64, Option<Stamp>)>> {
    names
        .iter()
        .map(|name| regular(&dir.join(name)).map(|meta| (meta.len, meta.stamp)))
        .collect()
}

fn sizes_by(sources: &Sources) -> Sizes {
    // The first of several files with the most bytes.
    let largest = sources.ids().min_by_key(|id| Reverse(sources.len_of(*id)));
    let bytes = largest.map_or(0, |id| sources.len_of(id));
    Sizes {
        largest_sample: largest.map(|id| id.index() as u64),
        ..Sizes::new(bytes)
    }
}

impl Dataset for Images {
    own!(schema sources sizes);

    fn len(&self) -> u64 {
        self.sources.count() as u64
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let source = SourceId::at(sample as usize);
        let len = self.sources.len_of(source);
        if len == 0 {
            let error = Error::new(ErrorKind::Empty, Stage::Read, "a picture of 0 bytes");
            return Err(error.with_path(self.sources.path(source)).with_range(0, 0));
        }
        parts.extent(
            0,
            Extent {
                source,
                offset: 0,
                len,
            },
        );
        if let Some(class) = self.class_of(sample) {
            parts.inline(1, bytemuck::bytes_of(&self.labels[class]));
        }
        Ok(())
    }

    /// Paths below the folder; of a file elsewhere, its whole path.
    fn keys(&self) -> Result<Option<Strings>> {
        let mut folder = self.root.as_os_str().as_bytes().to_vec();
        if !folder.is_empty() && !folder.ends_with(b"/") {
            folder.push(b'/');
        }
        let mut path = Vec::new();
        let mut keys = Strings::new();
        for id in self.sources.ids() {
            self.sources.path_into(id, &mut path);
            keys.push(path.strip_prefix(&folder[..]).unwrap_or(&path));
        }
        Ok(Some(keys))
    }

    fn identity(&self) -> u64 {
        self.classes
            .iter()
            .fold(Digest::new("images").words(&self.starts), |digest, name| {
                digest.bytes(name.as_bytes())
            })
            .end()
    }

    fn describe(&self) -> String {
        let classes = match self.classes.len() {
            0 => "no classes".into(),
            count => format!("{count} classes"),
        };
        format!(
            "{} pictures, {classes}, in {}{}",
            self.len(),
            self.root.display(),
            others(&self.left_out)
        )
    }
}
