//! Reads single samples and chunks with plain calls, without a loader: to look at data, to verify
//! it, to make checksums.

use super::contract::{Dataset, Framed, Sizes, frames, member};
use super::parallel::goes_on;
use crate::dataset::{ChunkBuf, FieldPart, Part, Parts, make, placed, within_opened};
use crate::decode::Scratch;
use crate::storage::{Blob, Extent, SourceId};
use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught, caught_in};

/// Bytes per read for a checksum.
const STEP: u64 = 1 << 20;

/// Reads a dataset with plain calls; keeps the last file open and reuses its buffers.
pub struct Plain<'d> {
    dataset: &'d dyn Dataset,
    framed: &'d dyn Framed,
    sizes: Sizes,
    open: Option<(SourceId, Blob)>,
    bytes: Vec<u8>,
    opened: Vec<u8>,
    /// Bytes read so far.
    pub read: u64,
}

impl<'d> Plain<'d> {
    pub fn new(dataset: &'d dyn Dataset) -> Self {
        let framed = frames(dataset);
        let sizes = dataset.sizes();
        Self {
            dataset,
            framed,
            sizes,
            open: None,
            bytes: Vec::new(),
            opened: Vec::new(),
            read: 0,
        }
    }

    /// Calls `each` for every field of a sample, with its number and its bytes as a decoder gets
    /// them. Errors, including those of `each`, name the sample and the place.
    pub fn sample(
        &mut self,
        sample: u64,
        each: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.sample_and_crcs(sample, &mut [], each)
    }

    /// Like `sample`; also puts the CRC32C of every field's extent into `crcs`, unless `crcs` is
    /// empty. After an error some are missing; [`crcs`](Self::crcs) computes all of them.
    pub fn sample_and_crcs(
        &mut self,
        sample: u64,
        crcs: &mut [u32],
        mut each: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut crc = 0;
        let dataset = self.dataset;
        let framed = self.framed;
        let mut parts = Parts::new();
        let mut before = None;
        parts.ask_all(dataset, sample)?;
        parts.within(&self.sizes)?;
        for FieldPart {
            field,
            part,
            is_last,
        } in parts.iter()
        {
            // Runs the dataset's code, and the user's code in `each`.
            let done = caught(Stage::Decode, || match (part, part.extent()) {
                (Part::Inline(bytes), _) => each(field, bytes),
                (Part::Made, _) => {
                    self.bytes.clear();
                    make(dataset, sample, field, &mut self.bytes)?;
                    each(field, &self.bytes)
                }
                (Part::MoreInline(bytes), _) => {
                    self.bytes.extend_from_slice(bytes);
                    if is_last {
                        each(field, &self.bytes)
                    } else {
                        Ok(())
                    }
                }
                (Part::More(extent), _) => {
                    self.append(&extent)?;
                    if is_last {
                        each(field, &self.bytes)
                    } else {
                        Ok(())
                    }
                }
                (_, Some(extent)) if !part.shares(before.replace(part)) => {
                    self.fill(&extent)?;
                    if let Some(own) = crcs.get_mut(field) {
                        crc = crc32c::crc32c(&self.bytes);
                        *own = crc;
                    }
                    if !is_last {
                        return Ok(());
                    }
                    if part.is_checked() {
                        caught_in("the dataset's `check`", Stage::Decode, || {
                            framed.check(sample, field, &self.bytes)
                        })
                        .map_err(|error| placed(error, &self.bytes, &self.bytes, &extent))?;
                    }
                    self.open(sample, field, part, &mut each)
                }
                _ => {
                    if let Some(own) = crcs.get_mut(field) {
                        *own = crc;
                    }
                    self.open(sample, field, part, &mut each)
                }
            });
            done.map_err(|error| {
                let mut error = error.in_stage(Stage::Decode).with_sample(sample);
                if dataset.schema().len() > 1 {
                    error = error.with_field(&dataset.schema()[field].name);
                }
                if let Ok(Some(member)) =
                    caught(Stage::Read, || Ok(member(dataset, sample, Some(field))))
                {
                    error = error.with_member(member);
                }
                match part.extent() {
                    Some(extent) => dataset.sources().at(error, &extent),
                    None => error,
                }
            })?;
        }
        Ok(())
    }

    fn open(
        &mut self,
        sample: u64,
        field: usize,
        part: Part<'_>,
        each: &mut impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.opened.clear();
        let given = match part {
            Part::Framed(_) => {
                let framed = self.framed;
                let bytes = &self.bytes;
                let buffer = &mut self.opened;
                let opened = caught_in("the dataset's `open`", Stage::Decode, move || {
                    framed.open(sample, field, bytes, buffer)
                });
                let opened = opened.map_err(|error| match part.extent() {
                    Some(extent) => placed(error, bytes, bytes, &extent),
                    None => error,
                })?;
                within_opened(opened, bytes, self.sizes.opened_bytes_max)?
            }
            _ => &self.bytes,
        };
        each(field, given).map_err(|error| match part.extent() {
            Some(extent) => placed(error, given, &self.bytes, &extent),
            None => error,
        })
    }

    /// Calls `each` with the CRC32C of every field's extent, without opening the extent.
    pub fn crcs(&mut self, sample: u64, mut each: impl FnMut(usize, u32)) -> Result<()> {
        let mut parts = Parts::new();
        let mut before = None;
        parts.ask_all(self.dataset, sample)?;
        debug_assert!(
            parts.iter().all(|one| !one.part.follows()),
            "refused where facts are made"
        );
        for FieldPart { field, part, .. } in parts.iter() {
            let Some(extent) = part.extent() else {
                continue;
            };
            let crc = match before {
                Some((same, crc)) if same == extent => crc,
                _ => self
                    .crc(&extent)
                    .map_err(|error| error.with_sample(sample))?,
            };
            before = Some((extent, crc));
            each(field, crc);
        }
        Ok(())
    }

    /// Reads and opens a chunk, and checks that every field has every row.
    pub fn chunk(&mut self, chunk: usize) -> Result<ChunkBuf> {
        self.chunk_as_stored(chunk, |_| {})
    }

    /// Like `chunk`; calls `stored` with the bytes of each of the chunk's extents, before it opens
    /// them.
    pub fn chunk_as_stored(
        &mut self,
        chunk: usize,
        mut stored: impl FnMut(&[u8]),
    ) -> Result<ChunkBuf> {
        let chunks = self
            .dataset
            .chunked()
            .ok_or_else(|| Error::new(ErrorKind::User, Stage::Read, "the dataset has no chunks"))?;
        let fields = self.dataset.schema().len();
        let rows = chunks.starts()[chunk + 1] - chunks.starts()[chunk];
        let mut extents = Vec::new();
        chunks.chunk_extents(chunk, &mut extents)?;
        let mut pieces = Vec::with_capacity(extents.len());
        for extent in &extents {
            self.fill(extent)?;
            stored(&self.bytes);
            pieces.push(Bytes::from(std::mem::take(&mut self.bytes)));
        }
        let opened = chunks
            .chunk_bytes(chunk)
            .opened
            .saturating_add(64 * fields as u64);
        let mut buffer = ChunkBuf::new(usize::try_from(opened).unwrap_or(usize::MAX))?;
        buffer.begin(rows as usize, fields);
        chunks.open_chunk(chunk, &pieces, &mut Scratch::default(), &mut buffer)?;
        match buffer.incomplete() {
            Some((field, there)) => {
                let message = format!("{there} rows of field {field} in a chunk of {rows}");
                Err(Error::new(ErrorKind::Decode, Stage::Decode, message))
            }
            None => Ok(buffer),
        }
    }

    /// CRC32C of an extent, with at most 1 MiB of it in memory.
    pub fn crc(&mut self, extent: &Extent) -> Result<u32> {
        let mut crc = 0;
        let mut done = 0;
        self.dataset.sources().check(extent)?;
        while done < extent.len {
            let len = (extent.len - done).min(STEP);
            self.fill(&Extent {
                offset: extent.offset + done,
                len,
                ..*extent
            })?;
            crc = crc32c::crc32c_append(crc, &self.bytes);
            done += len;
        }
        Ok(crc)
    }

    /// Reads an extent into `bytes`. Allocates only after checking the extent against the indexed
    /// length of the source.
    fn fill(&mut self, extent: &Extent) -> Result<()> {
        self.bytes.clear();
        self.append(extent)
    }

    /// Like `fill`, but appends to the bytes already in `bytes`.
    fn append(&mut self, extent: &Extent) -> Result<()> {
        let sources = self.dataset.sources();
        let start = self.bytes.len();
        goes_on()?;
        sources.check(extent)?;
        self.bytes.resize(start + extent.len as usize, 0);
        let opened = match self.open.take() {
            Some((source, blob)) if source == extent.source => Ok(blob),
            _ => Blob::of_source(sources, extent.source),
        };
        let filled = opened.and_then(|blob| {
            let (_, blob) = self.open.insert((extent.source, blob));
            blob.read_at(extent.offset, &mut self.bytes[start..])
        });
        self.read += extent.len;
        filled.map_err(|error| sources.at(error, extent))
    }
}

/// Bytes of every field of a sample, as a decoder gets them.
pub fn read(dataset: &dyn Dataset, sample: u64) -> Result<Vec<Vec<u8>>> {
    let message = match dataset.chunked() {
        Some(_) => "the dataset has chunks and no random access to samples".into(),
        None if sample >= dataset.len() => format!("the dataset has {} samples", dataset.len()),
        None => {
            let mut fields = vec![Vec::new(); dataset.schema().len()];
            Plain::new(dataset).sample(sample, |field, bytes| {
                fields[field] = bytes.to_vec();
                Ok(())
            })?;
            return Ok(fields);
        }
    };
    Err(Error::new(ErrorKind::Config, Stage::Read, message).with_sample(sample))
}
