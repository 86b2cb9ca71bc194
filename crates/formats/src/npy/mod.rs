//! numpy's files: `.npy` arrays as samples or as rows, and `.npz` archives of them.
//!
//! ```text
//! pattern ──► files ──headers, in parallel──► dtype, shape, where the data starts ──► extents, read in place
//! ```
//!
//! Supported: C order, versions 1 to 3, bool, integers and floats in the machine's byte order.
//! Refused, with an error that names the cause: pickles (arrays of objects), non-native byte order,
//! Fortran order of more than one dimension, structured and text dtypes. A file must be exactly as
//! long as its header says, so a cut file and several arrays in one file are errors. `.npy` has no
//! checksum for the data: a flipped bit in it goes unnoticed.

/// Setters for fields and rows that both builders share.
macro_rules! rule_setters {
    () => {
        /// Makes each row of the first axis a sample, file after file. Without it each file is a
        /// sample.
        #[must_use]
        pub fn rows(mut self) -> Self {
            self.rows = true;
            self
        }

        /// Lets the first dimension of `name` vary from file to file, up to `max`; see
        /// [`Shape::UpTo`](feedline_core::tensor::Shape). `*` applies to each field without a rule of its
        /// own; a field whose arrays have one shape keeps that shape.
        #[must_use]
        pub fn up_to(mut self, name: &str, max: usize) -> Self {
            self.rules.0.push((name.into(), Rule::UpTo(max)));
            self
        }

        /// Lets all dimensions of `name` vary from file to file: it becomes a vector of at most
        /// `max` elements, with its shape in the field `name.shape` (`i64`). `*` as in
        /// [`up_to`](Self::up_to).
        #[must_use]
        pub fn flat(mut self, name: &str, max: usize) -> Self {
            self.rules.0.push((name.into(), Rule::Flat(max)));
            self
        }
    };
}

mod header;
mod npz;
mod zip;

#[cfg(feature = "unstable")]
pub(crate) use npz::parse as parse_npz;
pub use npz::{Npz, NpzBuilder};

use crate::arrays::{Array, Arrays, GivenArray, Rule};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::Dataset;
use feedline_core::dataset::forward::forward;
use feedline_core::dataset::parallel::parallel_paths;
use feedline_core::storage::listing::{expand, regular};
use feedline_core::storage::{Blob, Listed, Sources};
use std::path::{Path, PathBuf};

/// Number of headers read even with [`NpyBuilder::uniform`].
const UNIFORM_LOOKS: usize = 64;

/// Dataset of `.npy` files: each file is a sample, or each row of the first axis.
///
/// Supported: C order, bool, integers and floats in the machine's byte order. Refused, with an
/// error that names the cause: pickles (arrays of objects), non-native byte order, Fortran order of
/// more than one dimension, structured and text dtypes.
///
/// ```no_run
/// # use feedline_formats::Npy;
/// // Volumes and their masks, a file each: samples are paired by the files' names.
/// let scans = Npy::builder().field("image", "train/*_x.npy").field("mask", "train/*_y.npy").open()?;
/// // A table: 60,000 rows of [28, 28] and 60,000 labels.
/// let table = Npy::builder().field("image", "images.npy").field("label", "labels.npy").rows().open()?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Npy(Arrays);

/// Builder of [`Npy`]: maps files to fields. Made by [`Npy::builder`].
#[derive(Clone, Debug, Default)]
pub struct NpyBuilder {
    fields: Vec<(String, PathBuf)>,
    rules: Rules,
    rows: bool,
    uniform: bool,
}

/// The user's rules for fields, by name.
#[derive(Clone, Debug, Default)]
struct Rules(Vec<(String, Rule)>);

impl Rules {
    /// A field with its rule, before any array is added.
    fn given(&self, name: &str, base: usize) -> GivenArray {
        let rule = |name: &str| {
            self.0
                .iter()
                .find(|(other, _)| other == name)
                .map(|(_, rule)| *rule)
        };
        let own = rule(name);
        let rule = own.or_else(|| rule("*")).unwrap_or_default();
        GivenArray {
            name: name.into(),
            base,
            arrays: Vec::new(),
            rule,
            if_varying: own.is_none(),
        }
    }

    /// Errors: [`ErrorKind::Config`] for a rule about a missing field, or two rules about one
    /// field.
    fn check(&self, names: &[&str]) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        for (index, (name, rule)) in self.0.iter().enumerate() {
            if name != "*" && !names.contains(&name.as_str()) {
                return bad(format!(
                    "there is no field `{name}`; there are {}",
                    names.join(", ")
                ));
            }
            if self.0[..index].iter().any(|(other, _)| other == name) {
                return bad(format!(
                    "`{name}` has two rules for varying shapes: give one"
                ));
            }
            if matches!(rule, Rule::UpTo(0) | Rule::Flat(0)) {
                return bad(format!("the maximum of `{name}` is 0"));
            }
        }
        Ok(())
    }
}

impl Npy {
    /// Opens the files of `pattern` (a file, a folder, `{000..127}`, `*`), each a sample with the
    /// field `array`.
    ///
    /// Errors: as [`NpyBuilder::open`].
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().field("array", pattern).open()
    }

    /// Starts a builder.
    pub fn builder() -> NpyBuilder {
        NpyBuilder::default()
    }
}

impl NpyBuilder {
    /// Adds the field `name`: one array from each file of `pattern`, in the order of the file
    /// names.
    ///
    /// If several fields have many files each, the paths of paired files must differ at a single
    /// place, in the same way for all pairs (`7_x.npy` and `7_y.npy`, or the folder). So a missing
    /// file does not shift the pairs after it.
    #[must_use]
    pub fn field(mut self, name: &str, pattern: impl AsRef<Path>) -> Self {
        self.fields
            .push((name.into(), pattern.as_ref().to_path_buf()));
        self
    }

    rule_setters!();

    /// Declares that all files of a field have the same header: only the headers of 64 evenly
    /// spread files are read, and the lengths of all files. This opens many files faster, but
    /// misses a file of the same length with another header (a reshaped array, another dtype of the
    /// same size). Default: every header is read and checked.
    #[must_use]
    pub fn uniform(mut self, uniform: bool) -> Self {
        self.uniform = uniform;
        self
    }

    /// Opens the files and reads their headers in parallel.
    ///
    /// Errors: not found, nothing found, a malformed or refused header ([`ErrorKind::Decode`]), a
    /// cut file ([`ErrorKind::Truncated`]), arrays that differ in dtype or shape beyond their rule
    /// ([`ErrorKind::Shape`]); each names the file.
    pub fn open(self) -> Result<Npy> {
        let bad = |message: &str| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        if self.fields.is_empty() {
            return bad("no field was named");
        }
        if self.uniform && !self.rules.0.is_empty() {
            return bad(
                "fields of varying shapes cannot be uniform from file to file: leave out one \
                 of the two",
            );
        }
        let names: Vec<&str> = self.fields.iter().map(|(name, _)| name.as_str()).collect();
        self.rules.check(&names)?;
        let mut sources = Sources::new();
        let mut given = Vec::new();
        let mut place = None;
        let mut first_files: Option<Vec<PathBuf>> = None;
        for (name, pattern) in &self.fields {
            let Listed {
                files,
                name: listed,
                ..
            } = expand(pattern, &[".npy"])?;
            place.get_or_insert(listed);
            if !self.rows {
                check_pairs(
                    first_files.get_or_insert_with(|| files.clone()),
                    &files,
                    name,
                )?;
            }
            let base = sources.count();
            let arrays = self.arrays(&files, &mut sources)?;
            given.push(GivenArray {
                arrays,
                ..self.rules.given(name, base)
            });
        }
        Arrays::of(
            sources,
            given,
            self.rows,
            "npy arrays",
            place.unwrap_or_default(),
        )
        .map(Npy)
    }

    /// Adds each file to the sources and returns its array.
    fn arrays(&self, files: &[PathBuf], sources: &mut Sources) -> Result<Vec<Array>> {
        let step = if self.uniform {
            files.len().div_ceil(UNIFORM_LOOKS)
        } else {
            1
        };
        let looked = parallel_paths(files, |index, path| {
            if index % step != 0 {
                return Ok((regular(path)?, None));
            }
            let input = Blob::open(path)?;
            let array = header::read(&input, 0, input.len())?;
            Ok((input.look()?, Some(array)))
        })?;
        let first = looked.first().cloned();
        let mut arrays = Vec::with_capacity(files.len());
        for (path, (meta, array)) in files.iter().zip(looked) {
            sources.add(path, &meta)?;
            let array = match (array, &first) {
                (Some(array), _) => array,
                (None, Some((first, Some(array)))) if first.len == meta.len => array.clone(),
                (None, first) => {
                    let len = meta.len;
                    let first = first.as_ref().map_or(0, |(first, _)| first.len);
                    let message = format!(
                        "the file has {len} bytes, the first file {first}: files declared uniform \
                         have one length"
                    );
                    return Err(Error::new(ErrorKind::Shape, Stage::Index, message).with_path(path));
                }
            };
            arrays.push(array);
        }
        Ok(arrays)
    }
}

/// Parses a file in memory, as `open` does.
#[cfg(feature = "unstable")]
pub(crate) fn parse(input: &Blob) -> Result<()> {
    header::read(input, 0, input.len()).map(drop)
}

/// Checks that the files in `first` and `files` form pairs: the two names of each pair differ in
/// the same text.
fn check_pairs(first: &[PathBuf], files: &[PathBuf], name: &str) -> Result<()> {
    if first.len() != files.len() {
        let message = format!(
            "{} files for the field `{name}`, {} for the first field",
            files.len(),
            first.len()
        );
        return Err(Error::new(ErrorKind::Shape, Stage::Index, message));
    }
    let mut words = None;
    for (a, b) in first.iter().zip(files) {
        let found = difference(
            a.as_os_str().as_encoded_bytes(),
            b.as_os_str().as_encoded_bytes(),
        );
        if *words.get_or_insert(found) != found {
            let message = format!(
                "`{name}`: this file's name does not pair with {}",
                a.display()
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message).with_path(b));
        }
    }
    Ok(())
}

/// The parts in which two names differ: both without their common start and end.
fn difference<'a>(a: &'a [u8], b: &'a [u8]) -> (&'a [u8], &'a [u8]) {
    let start = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let a = &a[start..];
    let b = &b[start..];
    let end = a
        .iter()
        .rev()
        .zip(b.iter().rev())
        .take_while(|(a, b)| a == b)
        .count();
    (&a[..a.len() - end], &b[..b.len() - end])
}

impl Dataset for Npy {
    forward!(self => self.0; schema len sources sizes extents framed chunked identity describe);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paired_names_differ_in_one_place() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let cases: [(&[&str], &[&str], bool); 6] = [
            (&["a_x", "b_x"], &["a_y", "b_y"], true),
            (&["x/1", "x/2"], &["y/1", "y/2"], true),
            (
                &["1_img.npy", "2_img.npy"],
                &["1_mask.npy", "2_mask.npy"],
                true,
            ),
            (&["1_x", "2_x"], &["1_y", "3_y"], false),
            (&["xx1", "xx2"], &["x1", "x2"], true),
            (&["1", "2", "3"], &["1", "2", "4"], false),
        ];
        for (first, files, fits) in cases {
            assert_eq!(
                check_pairs(&paths(first), &paths(files), "y").is_ok(),
                fits,
                "{first:?} {files:?}"
            );
        }
    }
}
