//! Single samples, read by plain calls outside of a loader: to look at data, to verify it, for tests.

use super::{Dataset, Part, Parts};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::storage::{Blob, Extent, Sources};

/// The bytes of every field of a sample, as a decoder gets them.
pub(super) fn read(dataset: &dyn Dataset, sample: u64) -> Result<Vec<Vec<u8>>> {
    let named = |error: Error| error.with_sample(sample);
    if sample >= dataset.len() || dataset.chunked().is_some() {
        let message = match dataset.chunked() {
            Some(_) => "its samples come in chunks and cannot be had one by one".into(),
            None => format!("the dataset has {} samples", dataset.len()),
        };
        return Err(named(Error::new(ErrorKind::Config, Stage::Read, message)));
    }
    let mut parts = Parts::new();
    dataset.extents(sample, &mut parts).map_err(named)?;
    let mut fields = vec![Vec::new(); dataset.schema().len()];
    let mut buffer = Vec::new();
    let mut before: Option<(Extent, Vec<u8>)> = None;
    for (field, part) in parts.iter() {
        let place = fields.get_mut(field).ok_or_else(|| {
            named(Error::new(ErrorKind::User, Stage::Read, format!("the dataset names field {field}, which it lacks")))
        })?;
        match part {
            Part::Inline(bytes) => *place = bytes.to_vec(),
            Part::Extent(extent) => *place = bytes_of(dataset.sources(), extent).map_err(named)?,
            Part::Checked(extent) | Part::Framed(extent) => {
                let site = |error: Error| named(dataset.sources().at(error, &extent));
                let bytes = match before.take() {
                    Some((same, bytes)) if same == extent => bytes,
                    _ => {
                        let bytes = bytes_of(dataset.sources(), extent).map_err(named)?;
                        dataset.check(sample, field, &bytes).map_err(site)?;
                        bytes
                    }
                };
                buffer.clear();
                *place = match part {
                    Part::Framed(_) => dataset.open(sample, field, &bytes, &mut buffer).map_err(site)?.to_vec(),
                    _ => bytes.clone(),
                };
                before = Some((extent, bytes));
            }
        }
    }
    Ok(fields)
}

/// The bytes of an extent. Memory is taken only when the source had as many when it was indexed.
pub(super) fn bytes_of(sources: &Sources, extent: Extent) -> Result<Vec<u8>> {
    let Extent { source, offset, len } = extent;
    if source.index() >= sources.count() {
        return Err(Error::new(ErrorKind::User, Stage::Read, format!("the dataset lacks source {}", source.index())));
    }
    let site = |error: Error| error.with_path(sources.path(source)).with_range(offset, len);
    if offset.checked_add(len).is_none_or(|end| end > sources.len_of(source)) {
        let message = format!("the source has {} bytes", sources.len_of(source));
        return Err(site(Error::new(ErrorKind::Truncated, Stage::Read, message)));
    }
    let blob = Blob::of_source(sources, source).map_err(site)?;
    let mut bytes = vec![0; len as usize];
    blob.read_at(offset, &mut bytes)?;
    Ok(bytes)
}
