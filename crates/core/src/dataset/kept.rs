//! Files that a wrapper makes on the first open and then keeps.
//!
//! Invariants: a damaged or older file is made again; a file of another dataset, of another kind,
//! or of a newer version is never replaced.

use crate::dataset::{Dataset, Digest};
use crate::storage::Blob;
use crate::storage::publish::{Pending, make_folder};
use crate::storage::sidefile::{NEWER, SideFound, SideKind, SideWriter, Sidefile};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::io::Write;
use std::path::Path;

/// How the file came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Kept,
    Made,
    /// Made to replace a file that was damaged or of an older version.
    MadeAgain,
}

/// Starts the hash that identifies a dataset by its samples and the lengths of its sources. It is
/// the same for a copy elsewhere.
pub fn identity_of(purpose: &str, dataset: &dyn Dataset) -> Digest {
    let sources = dataset.sources();
    let schema = crc32c::crc32c(format!("{:?}", dataset.schema()).as_bytes());
    let digest = Digest::new(purpose)
        .word(dataset.len())
        .word(dataset.identity())
        .word(schema.into());
    sources
        .ids()
        .fold(digest, |digest, id| digest.word(sources.len_of(id)))
}

/// For each field of the schema, its position among the fields for which `keeps` is true (`None`
/// for the others). Also returns the number of these fields.
pub fn columns(fields: usize, keeps: impl Fn(usize) -> bool) -> (Vec<Option<usize>>, usize) {
    let mut width = 0;
    (
        (0..fields)
            .map(|field| {
                keeps(field).then(|| {
                    width += 1;
                    width - 1
                })
            })
            .collect(),
        width,
    )
}

/// Opens the file at `place`, or creates it with sections that `fill` writes. `what` names the kind
/// of file in errors.
///
/// Errors: the file cannot be read or written, is another kind of file or of a newer version, has
/// another identity, or does not fit.
pub fn open_or_make(
    place: &Path,
    kind: SideKind,
    what: &str,
    identity: u64,
    fits: impl Fn(&Sidefile) -> bool,
    fill: impl FnOnce(&mut SideWriter) -> Result<()>,
) -> Result<(Sidefile, Origin)> {
    let refused =
        |kind, message: String| Err(Error::new(kind, Stage::Index, message).with_path(place));
    let unwritable = |error| {
        let message = format!("cannot write the {what} here: name another file");
        Error::os(Stage::Index, message, error).with_path(place)
    };
    let open = || Sidefile::open(place, kind).map_err(|error| error.with_path(place));
    let origin = match open()? {
        SideFound::Whole(file) if file.identity() == identity && fits(&file) => {
            return Ok((file, Origin::Kept));
        }
        SideFound::Whole(_) => {
            let message = format!(
                "{what} of another dataset, of other settings, of another part of this dataset, \
                 or of this dataset before it changed: delete the file to make it again, or name \
                 another file"
            );
            return refused(ErrorKind::Changed, message);
        }
        SideFound::Foreign => {
            let message = format!("not a file of {what}; it is not overwritten: name another file");
            return refused(ErrorKind::Config, message);
        }
        SideFound::Newer => return refused(ErrorKind::Config, NEWER.into()),
        SideFound::Nothing => Origin::Made,
        SideFound::Damaged | SideFound::Older => Origin::MadeAgain,
    };
    // Created first, so that a wrong path fails before the pass over the data.
    let mut out = SideWriter::create(place, kind).map_err(unwritable)?;
    fill(&mut out)?;
    out.publish(identity).map_err(unwritable)?;
    match open()? {
        SideFound::Whole(file) if file.identity() == identity && fits(&file) => Ok((file, origin)),
        _ => {
            let message =
                format!("the file of {what} changed while it was written: name a file of its own");
            refused(ErrorKind::Changed, message)
        }
    }
}

/// Opens the file at `place`, or creates it with bytes that `fill` writes. In errors, `what` names
/// the kind of file, and `of` the data that it was made from. If several processes write it, the
/// file of the first one is kept. The file ends with `end`: a mark of 8 bytes and an identity. Also
/// returns whether the file was written.
///
/// Errors: those of [`open_or_make`]; a damaged file is not replaced.
pub fn open_or_write(
    place: &Path,
    what: &str,
    of: &str,
    end: &[u8],
    fits: impl Fn(&Blob) -> bool,
    fill: impl FnOnce(&mut Pending) -> Result<()>,
) -> Result<(Blob, bool)> {
    let (blob, written) = match Blob::open(place) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            write(place, what, end, fill)?;
            (Blob::open(place)?, true)
        }
        opened => (opened?, false),
    };
    let own = end.len() as u64;
    let found = blob.read(
        blob.len().saturating_sub(own),
        own.min(blob.len()),
        &format!("the end of the {what}"),
    )?;
    if found == end && fits(&blob) {
        return Ok((blob, written));
    }
    let (kind, message) = match found.starts_with(&end[..8]) {
        true => {
            let message = format!(
                "not the {what} of {of}: delete the file to write it again, or name another file"
            );
            (ErrorKind::Changed, message)
        }
        false => (
            ErrorKind::Config,
            format!("not a file of {what}; it is not overwritten: name another file"),
        ),
    };
    Err(Error::new(kind, Stage::Index, message).with_path(place))
}

fn write(
    place: &Path,
    what: &str,
    end: &[u8],
    fill: impl FnOnce(&mut Pending) -> Result<()>,
) -> Result<()> {
    let failed = |error| {
        let message = format!("cannot write the {what} here: name another file");
        Error::os(Stage::Index, message, error).with_path(place)
    };
    if let Some(dir) = place.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        make_folder(dir).map_err(failed)?;
    }
    let mut out = Pending::create(place).map_err(failed)?;
    fill(&mut out)?;
    // Ranks that start together all write the file, and a rank that has opened the first file
    // continues with it.
    out.write_all(end)
        .and_then(|()| out.commit_first())
        .map_err(failed)
}
