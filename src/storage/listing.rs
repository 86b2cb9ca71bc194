//! The sources of a dataset: a file, a folder, or a pattern such as `train-{0000..0127}.tar` or `*.parquet`; lengths,
//! versions.

use super::meta::is_url;
pub(crate) use super::meta::{Kind, Meta};
use super::remote;
use crate::error::{Error, ErrorKind, Result, Stage};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Limit of files that one pattern may name.
const FILES_MAX: usize = 1 << 24;

/// The files that `pattern` names, in the order of their names (numbers in braces in the written order).
///
/// An existing path is taken literally. A folder gives its regular files whose names end in one of `endings` (all files
/// if there are none), without hidden ones. Otherwise `{a,b}` and `{000..127}` are expanded, then `*`, `?` and `[…]`
/// are looked up.
///
/// Errors: [`ErrorKind::NotFound`] for a missing name, [`ErrorKind::Empty`] if nothing is found,
/// [`ErrorKind::NotAFile`] for a folder whose name ends like a file's.
pub(crate) fn expand(pattern: impl AsRef<Path>, endings: &[&str]) -> Result<Vec<PathBuf>> {
    let pattern = pattern.as_ref();
    if is_url(pattern) {
        return expand_url(pattern, endings);
    }
    if pattern.is_dir() {
        return files_of(pattern, endings);
    }
    if pattern.exists() {
        return Ok(vec![pattern.to_path_buf()]);
    }
    let Some(text) = pattern.to_str() else {
        return Err(Error::new(ErrorKind::NotFound, Stage::Index, "").with_path(pattern));
    };
    let mut files = Vec::new();
    let mut names = Vec::new();
    braces(text, &mut names)?;
    for name in names {
        if !name.contains(['*', '?', '[']) {
            if !Path::new(&name).exists() {
                return Err(Error::new(ErrorKind::NotFound, Stage::Index, "").with_path(name));
            }
            files.push(PathBuf::from(name));
            continue;
        }
        let bad = |error: glob::PatternError| {
            Error::new(ErrorKind::Config, Stage::Index, "not a valid file pattern").with_source(error).with_path(&name)
        };
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
        for found in glob::glob_with(&name, options).map_err(bad)? {
            let found = found.map_err(|error| {
                let path = error.path().to_path_buf();
                Error::os(Stage::Index, "cannot list the folder", error.into()).with_path(path)
            })?;
            if found.is_dir() && wanted(found.file_name().unwrap_or_default(), endings) && !endings.is_empty() {
                return Err(a_folder(&found));
            }
            if !found.is_dir() {
                files.push(found);
            }
        }
    }
    if files.is_empty() {
        return Err(Error::new(ErrorKind::Empty, Stage::Index, "no file matches the pattern").with_path(pattern));
    }
    Ok(files)
}

/// As [`expand`]: a URL that ends in `/` is a folder.
fn expand_url(pattern: &Path, endings: &[&str]) -> Result<Vec<PathBuf>> {
    let text = pattern.to_string_lossy();
    if text.ends_with('/') {
        return files_of(pattern, endings);
    }
    let mut names = Vec::new();
    braces(&text, &mut names)?;
    let files = remote::expand(&names)?;
    match files.is_empty() {
        true => Err(Error::new(ErrorKind::Empty, Stage::Index, "no object matches the pattern").with_path(pattern)),
        false => Ok(files),
    }
}

/// Reads the metadata of a path. Links are followed. Errors: the system's.
pub(crate) fn look(path: &Path) -> Result<Meta> {
    if is_url(path) {
        // Stores have no folders; a URL means one if it ends so.
        let folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
        return if folder { Ok(Meta { kind: Kind::Folder, ..Meta::of_memory(0) }) } else { remote::look(path) };
    }
    let meta = std::fs::metadata(path);
    let failed = |source| Error::os(Stage::Index, "cannot read the file's metadata", source).with_path(path);
    meta.map(|meta| Meta::of(&meta)).map_err(failed)
}

/// Metadata of a regular file or an object.
pub(crate) fn regular(path: &Path) -> Result<Meta> {
    match look(path)? {
        meta if meta.kind == Kind::File => Ok(meta),
        _ => Err(Error::new(ErrorKind::NotAFile, Stage::Index, "").with_path(path)),
    }
}

/// The names in a folder, in no order. Links are not followed.
pub(crate) fn names_in(dir: &Path) -> Result<Vec<(OsString, Kind)>> {
    let mut names = Vec::new();
    each_name(dir, |name, kind| {
        names.push((name, kind));
        Ok(())
    })?;
    Ok(names)
}

/// As [`names_in`], one at a time; those of a bucket are held together.
pub(crate) fn each_name(dir: &Path, mut each: impl FnMut(OsString, Kind) -> Result<()>) -> Result<()> {
    if is_url(dir) {
        return remote::children(dir)?.into_iter().try_for_each(|(name, kind)| each(name, kind));
    }
    let failed = |source| Error::os(Stage::Index, "cannot list the folder", source).with_path(dir);
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        each(entry.file_name(), Kind::of(entry.file_type().map_err(failed)?))?;
    }
    Ok(())
}

/// The path of a folder or file without links and `..`. Errors: the system's.
pub(crate) fn real_path(path: &Path) -> std::io::Result<PathBuf> {
    if is_url(path) { Ok(path.to_path_buf()) } else { path.canonicalize() }
}

/// The regular files of a folder, sorted by name, without hidden ones.
pub(crate) fn files_of(dir: &Path, endings: &[&str]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for (name, kind) in names_in(dir)? {
        if !wanted(&name, endings) || name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        // A link may lead to a folder.
        let is_folder = |path: &Path| kind == Kind::Folder || (kind == Kind::Link && path.is_dir());
        match dir.join(&name) {
            path if !is_folder(&path) => files.push(path),
            path if !endings.is_empty() => return Err(a_folder(&path)),
            _ => {}
        }
    }
    files.sort();
    if files.is_empty() {
        let which = if endings.is_empty() { String::new() } else { format!(" that end in {}", endings.join(", ")) };
        let message = format!("the folder holds no files{which}");
        return Err(Error::new(ErrorKind::Empty, Stage::Index, message).with_path(dir));
    }
    Ok(files)
}

fn wanted(name: &std::ffi::OsStr, endings: &[&str]) -> bool {
    endings.is_empty() || endings.iter().any(|ending| name.as_encoded_bytes().ends_with(ending.as_bytes()))
}

/// An error for a folder in place of a dataset file. Leaving it out would lose its samples silently.
fn a_folder(path: &Path) -> Error {
    Error::new(ErrorKind::NotAFile, Stage::Index, "a folder has the name of a dataset file").with_path(path)
}

/// Expands all braces. They are counted first: a pattern of a few bytes may stand for any number of files.
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
    let Some((before, inside, after)) = first_braces(text) else { return out.push(text.to_string()) };
    match range(inside) {
        Some((first, last, width)) => {
            let step = |k: u64| if first <= last { first + k } else { first - k };
            for k in 0..=last.abs_diff(first) {
                write_out(&format!("{before}{:0width$}{after}", step(k)), out);
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
    let Some((_, inside, after)) = first_braces(text) else { return 1 };
    let here = match range(inside) {
        Some((first, last, _)) => last.abs_diff(first).saturating_add(1),
        None => choices(inside).into_iter().map(count).fold(0, u64::saturating_add),
    };
    here.saturating_mul(count(after))
}

/// Before, inside and after the first pair of braces with a meaning.
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
    let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    let padded = |text: &str| text.len() > 1 && text.starts_with('0');
    let width = if padded(first) || padded(last) { first.len().max(last.len()) } else { 0 };
    Some((number(first)?, number(last)?, width))
}

/// `a,{b,c},d` at its outer commas.
fn choices(inside: &str) -> Vec<&str> {
    let (mut depth, mut start, mut out) = (0, 0, Vec::new());
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
            ("s-{08..11}.tar", &["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]),
            ("s-{8..10}", &["s-8", "s-9", "s-10"]),
            ("{2..0}", &["2", "1", "0"]),
            ("{train,val}/{0..1}", &["train/0", "train/1", "val/0", "val/1"]),
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
        let (forty, nested) = ("{a,b}".repeat(40), format!("{{x,{}}}", "{0..9}".repeat(20)));
        for pattern in ["{0..99999999999}", "{0..9999}{0..9999}", "{0..18446744073709551615}", &forty, &nested] {
            assert_eq!(braces(pattern, &mut Vec::new()).unwrap_err().kind(), ErrorKind::Limit, "{pattern}");
        }
        // Counted, not expanded.
        assert_eq!(["a", "{0..3}{a,b{1..2},c}", "{a}{0..1}"].map(count), [1, 16, 2]);
    }

    #[test]
    fn patterns_find_files_in_order_and_name_missing_ones() {
        let dir = std::env::temp_dir().join(format!("feedline-paths-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("sub")).unwrap();
        for name in ["b-1.tar", "b-0.tar", "a.txt", ".hidden.tar"] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        let names = |pattern: &str| -> Result<Vec<String>> {
            let files = expand(dir.join(pattern), &[".tar"])?;
            Ok(files.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_string()).collect())
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
            assert_eq!((error.kind(), error.site().path.clone()), (ErrorKind::NotAFile, Some(dir.join("b-2.tar"))));
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
