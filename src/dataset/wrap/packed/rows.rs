//! The file of rows: the tokens of each, one after the other, then `feedrows` and a hash of the bins and of the documents' files.

use super::Packed;
use crate::dataset::digest::Digest;
use crate::dataset::parallel::parallel;
use crate::dataset::sample::Plain;
use crate::dataset::{Dataset, fingerprint};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::publish::{Pending, make_folder};
use crate::storage::{Blob, Sources};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The end of the file, before the identity.
const END: [u8; 8] = *b"feedrows";
/// Bytes of rows that a thread writes at once, and how many of these are in memory together.
const RUN: u64 = 1 << 20;
const TOGETHER: usize = 32;

impl<D: Dataset> Packed<D> {
    /// Reads rows from their file from now on; writes it if it is not there.
    pub(super) fn take_rows(&mut self, place: PathBuf) -> Result<()> {
        // Documents of the same lengths may have other tokens.
        let identity = Digest::new("rows").words(&[self.identity, fingerprint::ends_of_all(&self.sources)?]).end();
        let end = [END, identity.to_le_bytes()].concat();
        let blob = match Blob::open(&place) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.write_rows(&place, &end)?;
                Blob::open(&place)?
            }
            opened => opened?,
        };
        let (meta, len) = (blob.look()?, self.counts.bins * self.row_bytes());
        let own = end.len() as u64;
        let found = blob.read(blob.len().saturating_sub(own), own.min(blob.len()), "the end of the rows")?;
        if blob.len() != len + own || found != end {
            let (kind, message) = match found.starts_with(&END) {
                true => (
                    ErrorKind::Changed,
                    "not the rows of these bins and documents: delete the file to write it again, or name another file",
                ),
                false => (ErrorKind::Config, "not a file of rows; it is not overwritten: name another file"),
            };
            return Err(Error::new(kind, Stage::Index, message).with_path(place));
        }
        let mut sources = Sources::new();
        sources.add(&place, &meta)?;
        (self.sources, self.rows) = (Arc::new(sources), Some(place));
        Ok(())
    }

    fn write_rows(&self, place: &Path, end: &[u8]) -> Result<()> {
        let failed =
            |error| Error::os(Stage::Index, "cannot write the rows here: name another file", error).with_path(place);
        if let Some(dir) = place.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            make_folder(dir).map_err(failed)?;
        }
        let (mut out, bins) = (Pending::create(place).map_err(failed)?, self.counts.bins);
        let run = (RUN / self.row_bytes()).max(1);
        let rows = |_, first: &u64| {
            let (mut plain, mut bytes) = (Plain::new(self), Vec::new());
            for bin in *first..(first + run).min(bins) {
                plain.sample(bin, |field, own| {
                    bytes.extend_from_slice(if field == 0 { own } else { &[] });
                    Ok(())
                })?;
            }
            Ok(bytes)
        };
        let firsts: Vec<u64> = (0..bins.div_ceil(run)).map(|number| number * run).collect();
        for some in firsts.chunks(TOGETHER) {
            for bytes in parallel(some, rows)? {
                out.write_all(&bytes).map_err(failed)?;
            }
        }
        out.write_all(end).and_then(|()| out.commit(true)).map_err(failed)
    }
}
