//! The checksummed parts of a dataset; makes their checksums and compares them.

use super::file::{Sums, runs};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::sample::Plain;
use feedline_core::dataset::{Dataset, Part, Parts};
use feedline_core::storage::Extent;
use std::path::Path;

/// Maximum files named in an error.
const LISTED: usize = 3;

/// The checksummed parts of a dataset, without their bytes.
pub(super) struct Outline {
    /// Number of samples; for datasets with chunks, of chunk extents.
    pub(super) count: u64,
    /// Checksums per sample or extent.
    pub(super) fields: usize,
    /// CRC of the schema and of the places of all bytes.
    pub(super) shape: u32,
    /// For datasets with chunks: the extents of each chunk. `pieces` has the start of each chunk's
    /// CRCs, then the end of all.
    extents: Vec<Vec<Extent>>,
    pub(super) pieces: Vec<usize>,
}

impl Outline {
    pub(super) fn of(dataset: &dyn Dataset) -> Result<Self> {
        if dataset.chunked().is_none() {
            let count = dataset.len();
            let fields = dataset.schema().len();
            let shape = survey(dataset)?;
            return Ok(Self {
                count,
                fields,
                shape,
                extents: Vec::new(),
                pieces: Vec::new(),
            });
        }
        let extents = chunk_extents(dataset)?;
        let mut pieces = vec![0];
        extents
            .iter()
            .for_each(|extents| pieces.push(pieces[pieces.len() - 1] + extents.len()));
        let count = pieces[pieces.len() - 1] as u64;
        let shape = chunk_shape(dataset, &extents);
        // Each extent counts as a sample of one field.
        Ok(Self {
            count,
            fields: 1,
            shape,
            extents,
            pieces,
        })
    }

    /// Reads everything once and returns the CRCs.
    pub(super) fn make(&self, dataset: &dyn Dataset) -> Result<Vec<u32>> {
        let crcs = match dataset.chunked() {
            Some(_) => parallel(&self.extents, |_, extents| {
                let mut plain = Plain::new(dataset);
                extents
                    .iter()
                    .map(|extent| plain.crc(extent))
                    .collect::<Result<Vec<_>>>()
            })?,
            None => parallel(&runs(self.count), |_, run| {
                let mut plain = Plain::new(dataset);
                let mut crcs = vec![0; (run.end - run.start) as usize * self.fields];
                for (sample, own) in run.clone().zip(crcs.chunks_mut(self.fields.max(1))) {
                    plain.crcs(sample, |field, crc| own[field] = crc)?;
                }
                Ok(crcs)
            })?,
        };
        Ok(crcs.concat())
    }

    /// Extent of a CRC, and its sample, if any.
    fn place(&self, dataset: &dyn Dataset, at: usize) -> Result<Option<(Extent, Option<u64>)>> {
        if !self.pieces.is_empty() {
            let chunk = self.pieces.partition_point(|start| *start <= at) - 1;
            return Ok(Some((self.extents[chunk][at - self.pieces[chunk]], None)));
        }
        let sample = (at / self.fields) as u64;
        let field = at % self.fields;
        let mut parts = Parts::new();
        parts.ask_all(dataset, sample)?;
        let extent = parts
            .iter()
            .find(|(own, _)| *own == field)
            .and_then(|(_, part)| part.extent());
        Ok(extent.map(|extent| (extent, Some(sample))))
    }

    /// Errors: [`ErrorKind::Changed`], with the differing files and the first place in each.
    pub(super) fn compare(
        &self,
        dataset: &dyn Dataset,
        then: &Sums,
        now: &[u32],
        place: &Path,
    ) -> Result<()> {
        let mut differ = Vec::new();
        for (at, now) in now.iter().enumerate() {
            if at >= then.len() || then.get(at)? != *now {
                differ.push(at);
            }
        }
        let mut first = None;
        let mut files = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for at in &differ {
            let Some((extent, sample)) = self.place(dataset, *at)? else {
                continue;
            };
            if seen.insert(extent.source) && files.len() < LISTED {
                files.push(format!(
                    "{} at byte {}",
                    dataset.sources().path(extent.source).display(),
                    extent.offset
                ));
            }
            first.get_or_insert((extent, sample));
        }
        let Some((extent, sample)) = first else {
            return Ok(());
        };
        let more = if seen.len() > files.len() {
            format!(", … ({} files)", seen.len())
        } else {
            String::new()
        };
        let anew = Setting::CheckedAnew.hint(|anew| format!(" ({anew})"));
        let message = format!(
            "the files have other times or paths than when the checksums in {} were made, and {} of {} checksums differ, \
             first in {}{more}; restore these files, or make the checksums anew{anew}",
            place.display(),
            differ.len(),
            now.len(),
            files.join(", "),
        );
        let error = dataset.sources().at(
            Error::new(ErrorKind::Changed, Stage::Index, message),
            &extent,
        );
        Err(sample.into_iter().fold(error, Error::with_sample))
    }
}

/// Extents of every chunk, each checked to lie within its source.
fn chunk_extents(dataset: &dyn Dataset) -> Result<Vec<Vec<Extent>>> {
    let Some(chunks) = dataset.chunked() else {
        return Ok(Vec::new());
    };
    (0..chunks.starts().len() - 1)
        .map(|chunk| {
            let mut extents = Vec::new();
            chunks.chunk_extents(chunk, &mut extents)?;
            let inside = extents
                .iter()
                .try_for_each(|extent| dataset.sources().check(extent));
            inside
                .map(|()| extents)
                .map_err(|error| error.within(chunks.chunk_name(chunk)))
        })
        .collect()
}

fn schema_crc(dataset: &dyn Dataset) -> u32 {
    crc32c::crc32c(format!("{:?}", dataset.schema()).as_bytes())
}

/// CRC of the schema, the chunks' starts and their extents, as the files describe them.
fn chunk_shape(dataset: &dyn Dataset, extents: &[Vec<Extent>]) -> u32 {
    let starts = dataset.chunked().map_or(&[][..], |chunks| chunks.starts());
    let crc = crc32c::crc32c_append(schema_crc(dataset), bytemuck::cast_slice(starts));
    extents.iter().flatten().fold(crc, |crc, extent| {
        crc32c::crc32c_append(crc, bytemuck::cast_slice(&place_of(extent)))
    })
}

/// Asks for the parts of every sample. Returns a CRC of the dataset: of its schema, its samples'
/// places, and all bytes in the index.
fn survey(dataset: &dyn Dataset) -> Result<u32> {
    let found = parallel(&runs(dataset.len()), |_, run| {
        let mut crc = 0;
        let mut parts = Parts::new();
        for sample in run.clone() {
            parts.ask_all(dataset, sample)?;
            for (field, part) in parts.iter() {
                let (kind, numbers, bytes) = match part {
                    Part::Inline(bytes) | Part::MoreInline(bytes) => {
                        (0, [0, 0, bytes.len() as u64], bytes)
                    }
                    Part::Extent(extent) | Part::More(extent) => (1, place_of(&extent), &[][..]),
                    Part::Checked(extent) | Part::Framed(extent) => (2, place_of(&extent), &[][..]),
                };
                crc = crc32c::crc32c_append(crc, &[field as u8, kind]);
                crc = crc32c::crc32c_append(crc, bytemuck::cast_slice(&numbers));
                crc = crc32c::crc32c_append(crc, bytes);
            }
        }
        Ok(crc)
    })?;
    Ok(found.iter().fold(schema_crc(dataset), |all, crc| {
        crc32c::crc32c_append(all, &crc.to_le_bytes())
    }))
}

fn place_of(extent: &Extent) -> [u64; 3] {
    [extent.source.index() as u64, extent.offset, extent.len]
}
