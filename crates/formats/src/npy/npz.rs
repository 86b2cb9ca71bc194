//! `.npz` archives: the stored members of a zip, each an `.npy` array, with random access and no
//! unpacking.
//!
//! Refused, with an error that names the cause: deflated members (`np.savez_compressed`), encrypted
//! members, archives whose directory and headers disagree. Only [`NpzBuilder::verify`] checks a
//! member's CRC-32: that costs a copy, since verified bytes cannot be read in place.

use super::zip::Member;
use super::{Rules, header, zip};
use crate::arrays::{Array, ArrayCheck, Arrays, GivenArray, Rule};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::Meta;
use feedline_core::dataset::Dataset;
use feedline_core::dataset::forward::forward;
use feedline_core::dataset::parallel::parallel_paths;
use feedline_core::storage::listing::expand;
use feedline_core::storage::{Blob, Listed, Sources};
use std::path::{Path, PathBuf};

/// Dataset of `.npz` archives: each archive is a sample with a field per member, or each row of the
/// first axis.
///
/// Members must be stored: archives of `np.savez`, not of `np.savez_compressed`. Supported arrays:
/// as in [`Npy`](super::Npy).
///
/// ```no_run
/// # use feedline_formats::Npz;
/// // MLPerf Storage's unet3d: `x` of two varying dimensions, `y` of one number.
/// let scans = Npz::builder().flat("x", 200 << 20).open("unet3d/train/")?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct Npz(Arrays);

/// Builder of [`Npz`]: selects members. Made by [`Npz::builder`].
#[derive(Clone, Debug, Default)]
pub struct NpzBuilder {
    fields: Option<Vec<String>>,
    rules: Rules,
    rows: bool,
    verify: bool,
}

/// The chosen members of one archive, in the order of the fields.
struct Archive {
    meta: Meta,
    members: Vec<(Array, ArrayCheck)>,
}

impl Npz {
    /// Opens the archives of `pattern`, each a sample with all its members as fields.
    ///
    /// Errors: as [`NpzBuilder::open`].
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(pattern)
    }

    /// Starts a builder; every setting is optional.
    pub fn builder() -> NpzBuilder {
        NpzBuilder::default()
    }
}

impl NpzBuilder {
    /// Takes only these members (named without `.npy`), in this order. Default: all, in the order
    /// of the first archive.
    #[must_use]
    pub fn fields<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Self {
        self.fields = Some(names.into_iter().map(String::from).collect());
        self
    }

    rule_setters!();

    /// Checks the CRC-32 of every member that is read: a damaged member is an error of its sample
    /// ([`ErrorKind::Decode`]). Costs a copy of each member and a pass over its bytes by table
    /// lookups. Excludes [`rows`](Self::rows), which reads parts of members. Default: off.
    #[must_use]
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// Opens the archives and reads directories and headers in parallel.
    ///
    /// Errors: not found, nothing found, a cut or broken archive, a missing, extra, compressed or
    /// refused member ([`ErrorKind::Truncated`], [`ErrorKind::Decode`]), arrays that differ in
    /// dtype or shape beyond their rule ([`ErrorKind::Shape`]); each names the file.
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<Npz> {
        let bad = |message: &str| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        if self.rows && self.verify {
            return bad(
                "checksums need whole members, but samples are rows of them: leave out one \
                 of the two",
            );
        }
        let Listed { files, name, .. } = expand(pattern, &[".npz"])?;
        let names = match &self.fields {
            Some(names) => names.clone(),
            None => all_names(&files[0])?,
        };
        if names.is_empty() {
            return bad("no member was named");
        }
        self.rules
            .check(&names.iter().map(String::as_str).collect::<Vec<_>>())?;
        let all = self.fields.is_none();
        let archives = parallel_paths(&files, |_, path| {
            Archive::open(&Blob::open(path)?, &names, all)
        })?;
        self.finish(&files, names, archives, name)
    }

    fn finish(
        self,
        files: &[PathBuf],
        names: Vec<String>,
        archives: Vec<Archive>,
        name: String,
    ) -> Result<Npz> {
        let mut sources = Sources::new();
        let mut given: Vec<GivenArray> =
            names.iter().map(|name| self.rules.given(name, 0)).collect();
        let mut checks = Vec::new();
        for (path, archive) in files.iter().zip(archives) {
            sources.add(path, &archive.meta)?;
            for (given, (array, check)) in given.iter_mut().zip(archive.members) {
                given.arrays.push(array);
                checks.push(check);
            }
        }
        let arrays = Arrays::of(sources, given, self.rows, "npz archives", name)?;
        Ok(Npz(if self.verify {
            arrays.verified(checks)
        } else {
            arrays
        }))
    }
}

/// Names of all members of an archive, without `.npy`.
fn all_names(path: &Path) -> Result<Vec<String>> {
    let members = members_of(&Blob::open(path)?)?;
    if members.is_empty() {
        return Err(
            Error::new(ErrorKind::Empty, Stage::Index, "the archive has no members")
                .with_path(path),
        );
    }
    Ok(members
        .iter()
        .map(|member| field_name(member).to_string())
        .collect())
}

/// The members of an archive, without entries for folders.
fn members_of(input: &Blob) -> Result<Vec<Member>> {
    let mut members = zip::members(input)?;
    members.retain(|member| !(member.name.ends_with('/') && member.unpacked == 0));
    Ok(members)
}

fn field_name(member: &Member) -> &str {
    member.name.strip_suffix(".npy").unwrap_or(&member.name)
}

impl Archive {
    /// Finds the members called `names`. `all` refuses any other member.
    fn open(input: &Blob, names: &[String], all: bool) -> Result<Self> {
        let members = members_of(input)?;
        let wrong = |message: String| input.wrong(message, 0, input.len());
        if let Some(over) = members
            .iter()
            .find(|member| all && !names.iter().any(|name| name == field_name(member)))
        {
            return Err(wrong(format!(
                "`{}` is a member of this archive but not of the first one",
                over.name
            )));
        }
        Ok(Self {
            meta: input.look()?,
            members: names
                .iter()
                .map(|name| {
                    let Some(member) = members.iter().find(|member| field_name(member) == name)
                    else {
                        let there: Vec<&str> = members.iter().take(16).map(field_name).collect();
                        return Err(wrong(format!(
                            "there is no member `{name}`; there are {}",
                            there.join(", ")
                        )));
                    };
                    array_of(input, member)
                })
                .collect::<Result<_>>()?,
        })
    }
}

fn array_of(input: &Blob, member: &Member) -> Result<(Array, ArrayCheck)> {
    let start = zip::data_of(input, member)?;
    let array = header::read(input, start, member.packed)
        .map_err(|error| error.within(format_args!("`{}`", member.name)))?;
    // A header has at most 64 KiB.
    let check = ArrayCheck {
        header: (array.offset - start) as u32,
        crc: member.crc,
    };
    Ok((array, check))
}

/// Parses an archive in memory, as `open` does; for fuzzing.
#[cfg(feature = "unstable")]
pub(crate) fn parse(input: &Blob) -> Result<usize> {
    let members = members_of(input)?;
    members
        .iter()
        .try_for_each(|member| array_of(input, member).map(drop))?;
    Ok(members.len())
}

impl Dataset for Npz {
    forward!(self => self.0; schema len sources sizes extents framed chunked identity describe);
}
