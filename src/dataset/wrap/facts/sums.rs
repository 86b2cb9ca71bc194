//! The parts of a dataset that have checksums, and the state of its sources.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::{Dataset, Digest, FieldPart, Part, Parts};
use feedline_core::storage::listing::look;
use feedline_core::storage::{Extent, SourceId, Sources};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Samples or sources per unit of work of a thread. Part of the format, since each run is hashed.
const RUN: u64 = 4096;

/// Maximum files named in an error.
const LISTED: usize = 3;

/// The parts of a dataset that have checksums, without their bytes.
pub(super) struct Outline {
    /// Number of checksums.
    pub(super) count: u64,
    /// Checksums per sample; 0 for datasets with chunks.
    pub(super) fields: usize,
    /// CRC of the schema and of the locations of all bytes.
    pub(super) shape: u32,
    /// For datasets with chunks: the extents of each chunk. `pieces` has the index of each chunk's
    /// first CRC, then the number of all CRCs.
    pub(super) extents: Vec<Vec<Extent>>,
    pub(super) pieces: Vec<usize>,
}

impl Outline {
    pub(super) fn of(dataset: &dyn Dataset) -> Result<Self> {
        if dataset.chunked().is_none() {
            let fields = dataset.schema().len();
            let count = dataset.len() * fields as u64;
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
        Ok(Self {
            count,
            fields: 0,
            shape,
            extents,
            pieces,
        })
    }

    /// The extent that CRC number `at` covers, and its sample, if any.
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
            .find(|one| one.field == field)
            .and_then(|one| one.part.extent());
        Ok(extent.map(|extent| (extent, Some(sample))))
    }

    /// The error for the checksums with the numbers `differ`, with the differing files and the first
    /// place in each.
    ///
    /// Errors: [`ErrorKind::Changed`], unless no bytes differ.
    pub(super) fn refuse(&self, dataset: &dyn Dataset, differ: &[u64], place: &Path) -> Result<()> {
        let mut first = None;
        let mut files = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for at in differ {
            let Some((extent, sample)) = self.place(dataset, *at as usize)? else {
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
        let anew = anew_by();
        let message = format!(
            "the times or paths of the files changed since the facts in {} were made, and {} of {} \
             checksums differ, first in {}{more}; restore these files, or make the facts anew \
             ({anew})",
            place.display(),
            differ.len(),
            self.count,
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

/// Asks for the parts of every sample. Returns a CRC of the dataset: of its schema, the locations
/// of its samples, and all bytes in the index.
fn survey(dataset: &dyn Dataset) -> Result<u32> {
    let found = parallel(&runs(dataset.len()), |_, run| {
        let mut crc = 0;
        let mut parts = Parts::new();
        for sample in run.clone() {
            parts.ask_all(dataset, sample)?;
            for FieldPart { field, part, .. } in parts.iter() {
                let (kind, numbers, bytes) = match part {
                    Part::Inline(bytes) | Part::MoreInline(bytes) => {
                        (0, [0, 0, bytes.len() as u64], bytes)
                    }
                    Part::Made => (3, [0; 3], &[][..]),
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

/// Cuts the numbers below `len` into runs.
fn runs(len: u64) -> Vec<Range<u64>> {
    (0..len.div_ceil(RUN))
        .map(|run| run * RUN..((run + 1) * RUN).min(len))
        .collect()
}

/// Hash of the lengths of all sources.
pub(super) fn lengths_of(sources: &Sources) -> u64 {
    let start = Digest::new("sources").word(sources.count() as u64);
    sources
        .ids()
        .fold(start, |digest, id| digest.word(sources.len_of(id)))
        .end()
}

/// Hash of the paths and modification times of all files, and of the bytes in memory. Errors: file
/// system errors; [`ErrorKind::Changed`] for a file of another length.
pub(super) fn state_of(sources: &Sources) -> Result<u64> {
    let start = Digest::new("sources").word(sources.count() as u64);
    let hashes = parallel(&runs(sources.count() as u64), |_, run| {
        let mut ids = run.clone().map(|id| SourceId::at(id as usize));
        ids.try_fold(start, |digest, id| with_state(digest, sources, id))
            .map(Digest::end)
    })?;
    Ok(hashes.into_iter().fold(start, Digest::word).end())
}

fn with_state(digest: Digest, sources: &Sources, id: SourceId) -> Result<Digest> {
    if let Some(bytes) = sources.bytes_of(id) {
        return Ok(digest
            .word(u64::from(crc32c::crc32c(bytes)))
            .word(bytes.len() as u64));
    }
    let path = sources.path(id);
    let meta = look(&path)?;
    if meta.len != sources.len_of(id) {
        let message = format!(
            "{} bytes when it was indexed, {} now",
            sources.len_of(id),
            meta.len
        );
        return Err(Error::new(ErrorKind::Changed, Stage::Index, message).with_path(&path));
    }
    // A relative path from another working directory must give the same hash.
    let path = std::path::absolute(&path).unwrap_or(path);
    Ok(digest.bytes(path.as_os_str().as_bytes()).word(meta.version))
}

/// How to make facts anew.
pub(super) fn anew_by() -> String {
    let setting = Setting::FactsAnew.there();
    setting.map_or_else(|| "delete the file".into(), |anew| anew.to_string())
}
