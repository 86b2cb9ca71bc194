//! Lists the sources of a dataset, with lengths and versions. A dataset is a file, a folder, or a
//! pattern such as `train-{0000..0127}.tar` or `*.parquet`.

use crate::storage::remote;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::{FileKind, Meta, ODD, bad_pattern, is_pattern, is_url};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Maximum number of files that one pattern may name.
const FILES_MAX: usize = 1 << 24;

/// Maximum number of folders that are searched for data below a folder.
const FOLDERS_MAX: usize = 1024;

/// Ending of the index files that the crate writes next to shards.
pub(crate) const INDEX: &str = ".fdx";

/// The files of a dataset.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Listed {
    /// Paths or URLs.
    pub files: Vec<PathBuf>,
    /// The pattern, and what was left out.
    pub name: String,
    /// Number of entries left out, by ending.
    pub left_out: BTreeMap<String, u64>,
    /// The folder, if these are the files of one folder, or of all folders in it.
    pub folder: Option<PathBuf>,
}

/// The files that match `pattern`, in the order of their names (numbers in braces in the written
/// order).
///
/// It may be a URL, if the feature `remote` is on. An existing path is taken literally. A folder
/// gives its regular files whose names end in one of `endings`, in upper or lower case (all files
/// if `endings` is empty). Others are left out and counted: hidden files, other endings, folders
/// without such files. Otherwise `{a,b}` and `{000..127}` are expanded, then `*`, `?`, `[…]` and
/// `**` (any folders) are matched; `folder/**` gives the files of a folder and of all folders in
/// it, except folders that begin with `_`. Links are followed. Index files (`.fdx`) are never data.
///
/// Errors: [`ErrorKind::NotFound`] for a missing name, [`ErrorKind::Empty`] if nothing is found,
/// [`ErrorKind::NotAFile`] for a folder whose name ends like a file's, and for a subfolder with
/// such files.
pub fn expand(pattern: impl AsRef<Path>, endings: &[&str]) -> Result<Listed> {
    listed(pattern.as_ref(), endings, false)
}

/// Like [`expand`], for data with columns in the names of folders: a folder's subfolders named
/// `key=value` are included, with all folders in them, and its files that begin with `_` are left
/// out.
pub fn expand_keyed(pattern: impl AsRef<Path>, endings: &[&str]) -> Result<Listed> {
    listed(pattern.as_ref(), endings, true)
}

fn listed(pattern: &Path, endings: &[&str], keyed: bool) -> Result<Listed> {
    let mut found = FoundFiles {
        endings,
        keyed,
        files: Vec::new(),
        left_out: BTreeMap::new(),
    };
    // Stores have no folders; a URL that ends with `/` means one.
    let is_folder = if is_url(pattern) {
        pattern.as_os_str().as_encoded_bytes().ends_with(b"/")
    } else {
        pattern.is_dir()
    };
    match pattern.to_str() {
        _ if is_folder => found.folder(pattern, ListingInner::Refused)?,
        Some(text) if is_url(pattern) || !pattern.exists() => found.matches(text)?,
        _ => found
            .files
            .push(regular(pattern).map(|_| pattern.to_path_buf())?),
    }
    let others = others(&found.left_out);
    if found.files.is_empty() {
        let which = if endings.is_empty() {
            String::new()
        } else {
            format!(" that end in {}", endings.join(", "))
        };
        let message = if is_folder {
            format!("the folder holds no files{which}")
        } else {
            "nothing matches the pattern".into()
        };
        return Err(
            Error::new(ErrorKind::Empty, Stage::Index, message + &others).with_path(pattern),
        );
    }
    let FoundFiles {
        files, left_out, ..
    } = found;
    let inner = pattern
        .to_str()
        .and_then(|text| text.strip_suffix("/**"))
        .filter(|folder| !is_pattern(folder) && first_braces(folder).is_none());
    let folder = if is_folder {
        Some(pattern)
    } else {
        inner.map(Path::new)
    };
    Ok(Listed {
        files,
        name: format!("{}{others}", pattern.display()),
        left_out,
        folder: folder.map(Path::to_path_buf),
    })
}

struct FoundFiles<'a> {
    endings: &'a [&'a str],
    /// Whether folders named `key=value` hold data, and files that begin with `_` do not.
    keyed: bool,
    files: Vec<PathBuf>,
    left_out: BTreeMap<String, u64>,
}

/// The treatment of subfolders.
#[derive(Clone, Copy, PartialEq)]
enum ListingInner {
    /// A subfolder with data is an error: leaving it out would lose samples silently.
    Refused,
    /// Included, except those whose names say that they hold no data.
    Taken,
    /// Included, except hidden ones.
    All,
}

const OPTIONS: glob::MatchOptions = glob::MatchOptions {
    case_sensitive: true,
    require_literal_separator: false,
    require_literal_leading_dot: true,
};

impl FoundFiles<'_> {
    /// Adds the files of a pattern.
    fn matches(&mut self, text: &str) -> Result<()> {
        let mut names = Vec::new();
        braces(text, &mut names)?;
        if is_url(Path::new(text)) && !names.iter().any(|name| name.ends_with("/**")) {
            // All names are looked up together, because they may share one listing.
            return self.objects(&names);
        }
        for name in &names {
            match name.strip_suffix("/**") {
                Some(folder) if !is_pattern(folder) => {
                    self.folder(Path::new(folder), ListingInner::Taken)?
                }
                Some(folder) => {
                    for folder in looked_up(folder)?.into_iter().filter(|path| path.is_dir()) {
                        self.folder(&folder, ListingInner::Taken)?;
                    }
                }
                None if is_url(Path::new(name)) => self.objects(std::slice::from_ref(name))?,
                None if !is_pattern(name) && !Path::new(name).exists() => {
                    return Err(Error::new(ErrorKind::NotFound, Stage::Index, "").with_path(name));
                }
                None if !is_pattern(name) => self.files.push(name.into()),
                None if name.contains("**") => self.deep(name)?,
                None => {
                    for path in looked_up(name)? {
                        match path.is_dir() {
                            true => {
                                let dir = path.parent().unwrap_or(&path).to_path_buf();
                                self.inner(path, &dir)?
                            }
                            false if is_index(path.as_os_str()) => {}
                            false => self.files.push(path),
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds the files of a pattern with `**`. The crate `glob` does not terminate on loops of
    /// symbolic links.
    fn deep(&mut self, name: &str) -> Result<()> {
        let pattern = glob::Pattern::new(name).map_err(|error| bad_pattern(name, error))?;
        let options = glob::MatchOptions {
            require_literal_separator: true,
            ..OPTIONS
        };
        let fixed = &name[..name.find(['*', '?', '[']).unwrap_or(0)];
        let dir = fixed.rfind('/').map_or("./", |end| &fixed[..=end]);
        let mut all = FoundFiles {
            endings: &[],
            keyed: false,
            files: Vec::new(),
            left_out: BTreeMap::new(),
        };
        all.folder(Path::new(dir), ListingInner::All)?;
        // The pattern does not contain the working folder.
        let mut files: Vec<_> = all
            .files
            .into_iter()
            .map(|path| {
                if fixed.contains('/') {
                    path
                } else {
                    path.strip_prefix(".")
                        .map_or(path.clone(), Path::to_path_buf)
                }
            })
            .collect();
        files.retain(|path| pattern.matches_path_with(path, options));
        files.sort();
        self.files.append(&mut files);
        Ok(())
    }

    /// Adds the files of a folder, in the order of their paths as text.
    fn folder(&mut self, dir: &Path, inner: ListingInner) -> Result<()> {
        let before = self.files.len();
        let mut todo = vec![dir.to_path_buf()];
        while let Some(folder) = todo.pop() {
            for (name, kind) in names_in(&folder)? {
                let path = folder.join(&name);
                let ending = ending_of(&name);
                // A link without a target is an error when it is opened.
                match is_folder(&path, kind) {
                    _ if is_index(&name) => {}
                    _ if kind == FileKind::Odd => self.leave_out(ODD.into()),
                    _ if ending == "hidden" => self.leave_out(ending),
                    true if inner == ListingInner::Refused && !self.is_key(&name) => {
                        self.inner(path, dir)?
                    }
                    true if inner == ListingInner::Taken
                        && name.as_encoded_bytes().starts_with(b"_") =>
                    {
                        self.leave_out("folder".into())
                    }
                    true => {
                        if kind == FileKind::Link {
                            follow(&path, dir)?;
                        }
                        todo.push(path);
                    }
                    false if self.keyed && name.as_encoded_bytes().starts_with(b"_") => {
                        self.leave_out("beginning with _".into())
                    }
                    false if wanted(&name, self.endings) => self.files.push(path),
                    false => self.leave_out(ending),
                }
            }
        }
        self.files[before..].sort_by(|a, b| a.as_os_str().cmp(b.as_os_str()));
        Ok(())
    }

    /// Adds the objects that URLs and patterns stand for.
    fn objects(&mut self, names: &[String]) -> Result<()> {
        let (files, odd) = remote::expand(names)?;
        self.files.extend(files);
        (0..odd).for_each(|_| self.leave_out(ODD.into()));
        Ok(())
    }

    fn leave_out(&mut self, what: String) {
        *self.left_out.entry(what).or_default() += 1;
    }

    /// Whether the name of a folder is a column and its value.
    fn is_key(&self, name: &OsStr) -> bool {
        let name = name.as_encoded_bytes();
        self.keyed && !name.starts_with(b"_") && name.contains(&b'=')
    }

    /// Counts a subfolder of `root`, or refuses it.
    fn inner(&mut self, dir: PathBuf, root: &Path) -> Result<()> {
        let refused = |message: String| {
            Err(Error::new(ErrorKind::NotAFile, Stage::Index, message).with_path(&dir))
        };
        if !self.endings.is_empty() && wanted(dir.file_name().unwrap_or_default(), self.endings) {
            return refused("a folder has the name of a dataset file".into());
        }
        if self.holds_data(&dir) {
            let all = root.join("**");
            let message =
                format!("a subfolder holds data: give the pattern {all:?} to take its files, too");
            return refused(message);
        }
        self.leave_out("folder".into());
        Ok(())
    }

    /// Whether there is a wanted file below a folder, searching a limited number of folders.
    /// Folders that begin with `.` or `_` hold no data, by convention: they have a table's log, or
    /// files of an unfinished job.
    fn holds_data(&self, dir: &Path) -> bool {
        let mut todo = vec![dir.to_path_buf()];
        for _ in 0..FOLDERS_MAX {
            let Some(dir) = todo.pop() else { return false };
            if dir
                .file_name()
                .is_some_and(|name| [b'.', b'_'].contains(&name.as_encoded_bytes()[0]))
            {
                continue;
            }
            // A folder that cannot be read is skipped, such as a file system's `lost+found`.
            for (name, kind) in names_in(&dir).unwrap_or_default() {
                let path = dir.join(&name);
                match is_folder(&path, kind) {
                    // A folder in the bucket, with an empty or relative name.
                    false if kind == FileKind::Odd && name.as_encoded_bytes().ends_with(b"/") => {
                        return true;
                    }
                    true => todo.push(path),
                    false
                        if wanted(&name, self.endings)
                            && !is_index(&name)
                            && ending_of(&name) != "hidden" =>
                    {
                        return true;
                    }
                    false => {}
                }
            }
        }
        false
    }
}

/// The paths that match a pattern without `**`.
fn looked_up(name: &str) -> Result<Vec<PathBuf>> {
    let found = glob::glob_with(name, OPTIONS).map_err(|error| bad_pattern(name, error))?;
    found
        .map(|found| {
            found.map_err(|error| {
                let path = error.path().to_path_buf();
                Error::os(Stage::Index, "cannot list the folder", error.into()).with_path(path)
            })
        })
        .collect()
}

/// Whether a name of this kind is a folder, or a link to one.
fn is_folder(path: &Path, kind: FileKind) -> bool {
    kind == FileKind::Folder || (kind == FileKind::Link && path.is_dir())
}

/// The entries that were left out of a folder, for the end of a description.
pub fn others(left_out: &BTreeMap<String, u64>) -> String {
    if left_out.is_empty() {
        return String::new();
    }
    let list: Vec<_> = left_out
        .iter()
        .map(|(ending, count)| format!("{count} {ending}"))
        .collect();
    format!("; left out: {}", list.join(", "))
}

/// The ending of a name, in lower case, as counted for files that are left out.
pub fn ending_of(name: &OsStr) -> String {
    if name.as_encoded_bytes().starts_with(b".") {
        return "hidden".into();
    }
    let ending = Path::new(name)
        .extension()
        .map(|ending| format!(".{}", ending.to_string_lossy().to_ascii_lowercase()));
    ending.unwrap_or_else(|| "without ending".into())
}

/// The kind of a link's target. `root`: the folder that is listed.
///
/// Errors: [`ErrorKind::NotFound`] without a target; [`ErrorKind::NotAFile`] for a folder that
/// contains the link, whose listing would never end.
pub fn follow(link: &Path, root: &Path) -> Result<FileKind> {
    let target = real_path(link).map_err(|source| {
        Error::os(Stage::Index, "a symbolic link without a target", source).with_path(link)
    })?;
    let kind = look(&target)?.kind;
    if kind == FileKind::Folder
        && link
            .ancestors()
            .skip(1)
            .take_while(|dir| dir.starts_with(root))
            .any(|dir| real_path(dir).is_ok_and(|dir| dir.starts_with(&target)))
    {
        let message = format!(
            "the link leads to {target:?}, a folder that contains the link: remove the link"
        );
        return Err(Error::new(ErrorKind::NotAFile, Stage::Index, message).with_path(link));
    }
    Ok(kind)
}

/// Reads the metadata of a path. Links are followed. Errors: the system's.
pub fn look(path: &Path) -> Result<Meta> {
    if is_url(path) {
        // Stores have no folders; a URL that ends with `/` means one.
        let folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
        return if folder {
            Ok(Meta {
                kind: FileKind::Folder,
                ..Meta::of_memory(0)
            })
        } else {
            remote::look(path)
        };
    }
    let meta = std::fs::metadata(path);
    meta.map(|meta| Meta::of(&meta)).map_err(|source| {
        Error::os(Stage::Index, "cannot read the file's metadata", source).with_path(path)
    })
}

/// Metadata of a regular file or an object.
pub fn regular(path: &Path) -> Result<Meta> {
    match look(path)? {
        meta if meta.kind == FileKind::File => Ok(meta),
        _ => Err(Error::new(ErrorKind::NotAFile, Stage::Index, "").with_path(path)),
    }
}

/// The names in a folder, in no particular order. Links are not followed.
pub fn names_in(dir: &Path) -> Result<Vec<(OsString, FileKind)>> {
    let mut names = Vec::new();
    each_name(dir, |name, kind| {
        names.push((name, kind));
        Ok(())
    })?;
    Ok(names)
}

/// Like [`names_in`], one name at a time. The names in a bucket are collected first.
pub fn each_name(dir: &Path, mut each: impl FnMut(OsString, FileKind) -> Result<()>) -> Result<()> {
    if is_url(dir) {
        return remote::children(dir)?
            .into_iter()
            .try_for_each(|(name, kind)| each(name, kind));
    }
    let failed = |source| Error::os(Stage::Index, "cannot list the folder", source).with_path(dir);
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        each(
            entry.file_name(),
            FileKind::of(entry.file_type().map_err(failed)?),
        )?;
    }
    Ok(())
}

/// The path of a folder or file without links and `..`. Errors: the system's.
pub fn real_path(path: &Path) -> std::io::Result<PathBuf> {
    if is_url(path) {
        Ok(path.to_path_buf())
    } else {
        path.canonicalize()
    }
}

/// Whether a name ends in one of `endings`, in upper or lower case; all names do if `endings` is
/// empty.
fn wanted(name: &OsStr, endings: &[&str]) -> bool {
    let name = name.as_encoded_bytes();
    endings.is_empty()
        || endings.iter().any(|ending| {
            let end = name
                .len()
                .checked_sub(ending.len())
                .map(|from| &name[from..]);
            end.is_some_and(|end| end.eq_ignore_ascii_case(ending.as_bytes()))
        })
}

fn is_index(name: &OsStr) -> bool {
    name.as_encoded_bytes().ends_with(INDEX.as_bytes())
}

/// Expands all braces. They are counted first: a pattern of a few bytes may stand for any number of
/// files.
fn braces(text: &str, out: &mut Vec<String>) -> Result<()> {
    if count(text) > FILES_MAX as u64 {
        let message = format!("the pattern names more than {FILES_MAX} files; use fewer");
        return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
    }
    write_out(text, out);
    Ok(())
}

/// Expands the first pair of braces, then the rest of each result.
fn write_out(text: &str, out: &mut Vec<String>) {
    let Some((before, inside, after)) = first_braces(text) else {
        return out.push(text.to_string());
    };
    match range(inside) {
        Some((first, last, width)) => {
            for k in 0..=last.abs_diff(first) {
                let number = if first <= last { first + k } else { first - k };
                write_out(&format!("{before}{:0width$}{after}", number), out);
            }
        }
        None => {
            for choice in choices(inside) {
                write_out(&format!("{before}{choice}{after}"), out);
            }
        }
    }
}

/// Number of names that a pattern stands for.
fn count(text: &str) -> u64 {
    let Some((_, inside, after)) = first_braces(text) else {
        return 1;
    };
    let here = match range(inside) {
        Some((first, last, _)) => last.abs_diff(first).saturating_add(1),
        None => choices(inside)
            .into_iter()
            .map(count)
            .fold(0, u64::saturating_add),
    };
    here.saturating_mul(count(after))
}

/// The text before, inside and after the first braces that hold a list or a range.
fn first_braces(text: &str) -> Option<(&str, &str, &str)> {
    for (open, _) in text.match_indices('{') {
        let mut depth = 0;
        for (at, c) in text[open..].char_indices() {
            depth += match c {
                '{' => 1,
                '}' => -1,
                _ => 0,
            };
            if depth == 0 {
                let inside = &text[open + 1..open + at];
                if inside.contains(',') || range(inside).is_some() {
                    return Some((&text[..open], inside, &text[open + at + 1..]));
                }
                break;
            }
        }
    }
    None
}

/// `0000..0127` as first, last and the width that leading zeros require.
fn range(inside: &str) -> Option<(u64, u64, usize)> {
    let (first, last) = inside.split_once("..")?;
    let number = |text: &str| {
        text.bytes()
            .all(|b| b.is_ascii_digit())
            .then(|| text.parse().ok())
            .flatten()
    };
    let padded = |text: &str| text.len() > 1 && text.starts_with('0');
    let width = if padded(first) || padded(last) {
        first.len().max(last.len())
    } else {
        0
    };
    Some((number(first)?, number(last)?, width))
}

/// Splits `a,{b,c},d` at its outer commas.
fn choices(inside: &str) -> Vec<&str> {
    let mut depth = 0;
    let mut start = 0;
    let mut out = Vec::new();
    for (at, c) in inside.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                out.push(&inside[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    out.push(&inside[start..]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> Vec<String> {
        let mut out = Vec::new();
        braces(text, &mut out).unwrap();
        out
    }

    #[test]
    fn braces_are_expanded_as_in_a_shell() {
        let table: [(&str, &[&str]); 9] = [
            ("a.tar", &["a.tar"]),
            (
                "s-{08..11}.tar",
                &["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"],
            ),
            ("s-{8..10}", &["s-8", "s-9", "s-10"]),
            ("{2..0}", &["2", "1", "0"]),
            (
                "{train,val}/{0..1}",
                &["train/0", "train/1", "val/0", "val/1"],
            ),
            ("{a,b{0..1}}x", &["ax", "b0x", "b1x"]),
            ("{a}", &["{a}"]),
            ("{open", &["{open"]),
            ("{a}{0..1}", &["{a}0", "{a}1"]),
        ];
        for (pattern, names) in table {
            assert_eq!(written(pattern), names, "{pattern}");
        }
    }

    #[test]
    fn a_pattern_for_endless_files_is_refused() {
        let forty = "{a,b}".repeat(40);
        let nested = format!("{{x,{}}}", "{0..9}".repeat(20));
        for pattern in [
            "{0..99999999999}",
            "{0..9999}{0..9999}",
            "{0..18446744073709551615}",
            &forty,
            &nested,
        ] {
            assert_eq!(
                braces(pattern, &mut Vec::new()).unwrap_err().kind(),
                ErrorKind::Limit,
                "{pattern}"
            );
        }
        // Counted, not expanded.
        assert_eq!(
            ["a", "{0..3}{a,b{1..2},c}", "{a}{0..1}"].map(count),
            [1, 16, 2]
        );
    }

    #[test]
    fn patterns_find_files_in_order_and_name_missing_ones() {
        let dir = std::env::temp_dir().join(format!("feedline-paths-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("sub")).unwrap();
        for name in ["b-1.tar", "b-0.tar", "a.txt", ".hidden.tar"] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        let names = |pattern: &str| -> Result<Vec<String>> {
            let files = expand(dir.join(pattern), &[".tar"])?.files;
            Ok(files
                .iter()
                .map(|path| path.file_name().unwrap().to_str().unwrap().to_string())
                .collect())
        };
        assert_eq!(names("").unwrap(), ["b-0.tar", "b-1.tar"]);
        assert_eq!(names("*.tar").unwrap(), ["b-0.tar", "b-1.tar"]);
        assert_eq!(names("b-{1..0}.tar").unwrap(), ["b-1.tar", "b-0.tar"]);
        assert_eq!(names("a.txt").unwrap(), ["a.txt"]);
        let error = names("b-{0..2}.tar").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("b-2.tar"), "{error}");
        assert_eq!(names("*.npy").unwrap_err().kind(), ErrorKind::Empty);
        assert_eq!(names("gone").unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::create_dir_all(dir.join("b-2.tar")).unwrap();
        for pattern in ["", "*.tar"] {
            let error = names(pattern).unwrap_err();
            assert_eq!(
                (error.kind(), error.site().path.clone()),
                (ErrorKind::NotAFile, Some(dir.join("b-2.tar")))
            );
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
