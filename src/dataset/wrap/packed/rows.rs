//! The file of rows: the tokens of each row, one row after the other (with several fields, a row
//! has the elements of each field in turn); then `feedrows` and a hash of the bins and of the
//! documents' files.

use super::Packed;
use feedline_base::error::{Error, Result, Stage};
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::sample::Plain;
use feedline_core::dataset::{Dataset, Digest, fingerprint, kept};
use feedline_core::storage::Sources;
use feedline_core::storage::publish::Pending;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// The mark at the end of the file, before the identity.
const END: [u8; 8] = *b"feedrows";
/// Bytes of rows that a thread makes at once, and how many such runs are in memory at the same
/// time.
const RUN: u64 = 1 << 20;
const TOGETHER: usize = 32;

impl<D: Dataset> Packed<D> {
    /// Switches to reading rows from their file; writes the file if it does not exist.
    pub(super) fn take_rows(&mut self, place: PathBuf) -> Result<()> {
        // Documents of the same lengths may have other tokens.
        let identity = Digest::new("rows")
            .words(&[self.identity, fingerprint::ends_of_all(&self.sources)?])
            .end();
        let end = [END, identity.to_le_bytes()].concat();
        let len = self.counts.bins * self.row_bytes() + end.len() as u64;
        let (blob, _) = kept::open_or_write(
            &place,
            "rows",
            "these bins and documents",
            &end,
            |blob| blob.len() == len,
            |out| self.write_rows(out),
        )?;
        let mut sources = Sources::new();
        sources.add(&place, &blob.look()?)?;
        self.sources = Arc::new(sources);
        self.rows = Some(place);
        Ok(())
    }

    fn write_rows(&self, out: &mut Pending) -> Result<()> {
        let bins = self.counts.bins;
        let run = (RUN / self.row_bytes()).max(1);
        let rows = |_, first: &u64| {
            let mut plain = Plain::new(self);
            let mut bytes = Vec::new();
            for bin in *first..(first + run).min(bins) {
                if self.opened.is_some() {
                    let opened = plain.chunk(bin as usize)?;
                    for field in 0..self.padding.len() {
                        bytes.extend_from_slice(opened.row(field, 0).unwrap_or_default());
                    }
                    continue;
                }
                plain.sample(bin, |field, own| {
                    bytes.extend_from_slice(if field < self.padding.len() { own } else { &[] });
                    Ok(())
                })?;
            }
            Ok(bytes)
        };
        let firsts: Vec<u64> = (0..bins.div_ceil(run)).map(|number| number * run).collect();
        for some in firsts.chunks(TOGETHER) {
            for bytes in parallel(some, rows)? {
                out.write_all(&bytes).map_err(|error| {
                    Error::os(Stage::Index, "cannot write the rows", error).with_path(&out.target)
                })?;
            }
        }
        Ok(())
    }
}
