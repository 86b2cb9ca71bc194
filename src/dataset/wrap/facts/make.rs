//! One pass over all data, on all cores, that finds the missing facts and writes them together with
//! the facts that a file already has. Memory: the facts of 4,096 samples; for datasets with chunks,
//! the facts of 64 chunks, two chunks per core, and 4 bytes per extent.

use super::Wanted;
use super::file::{FactFile, FactsWriter, Head, column};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::Dataset;
use feedline_core::dataset::parallel::parallel;
use feedline_core::dataset::sample::Plain;
use feedline_jpeg as jpeg;
use std::path::Path;
use std::sync::Arc;

/// Samples per unit of work of a thread.
const RUN: u64 = 64;
/// Units whose results are in memory at the same time.
const TOGETHER: usize = 64;
/// The facts in a record, in the order in which they are stored.
const RECORDED: [u32; 3] = [column::SUMS, column::LENGTHS, column::SIZES];
/// Width and height of a picture with a damaged header.
const DAMAGED: [u32; 2] = [1, 1];

/// The pass that makes a file of facts.
pub(super) struct Making<'a> {
    pub(super) dataset: &'a dyn Dataset,
    pub(super) wanted: &'a Wanted,
    /// The facts of the new file.
    pub(super) head: Head,
    /// Bits of the facts to find; the other facts come from `old`.
    pub(super) finds: u32,
    pub(super) old: Option<&'a FactFile>,
    pub(super) place: &'a Path,
}

/// The facts of a run of samples, or of a chunk.
#[derive(Default)]
struct Run {
    rows: usize,
    /// The new facts of the rows, as in [`RECORDED`].
    values: [Vec<u32>; 3],
    /// Checksums of the extents of a chunk.
    extents: Vec<u32>,
    /// Entries of seek points, row by row.
    points: Vec<Vec<u8>>,
    too_long: Option<Error>,
}

/// The output, and what has been written to it so far.
struct Written<'w, 'p> {
    out: &'w mut FactsWriter<'p>,
    samples: u64,
    extents: Vec<u32>,
    /// Maximum bytes of each measured field.
    most: Vec<u64>,
    /// Indices of the checksums that differ from those of the old file.
    differ: Vec<u64>,
}

impl Making<'_> {
    fn finds(&self, column: u32) -> bool {
        self.finds & column != 0
    }

    /// Whether a fact to find needs the bytes of a field as a decoder gets them.
    fn opens(&self) -> bool {
        self.finds(column::SIZES)
            || self.finds(column::LENGTHS) && self.head.lens > 0
            || self.finds(column::POINTS) && self.head.points > 0
    }

    /// Reads everything that is needed, and writes the values and seek points.
    ///
    /// Errors: reading errors; [`ErrorKind::Changed`] for bytes that differ from checksums of the
    /// old file; [`ErrorKind::Config`] for a subset of a dataset with chunks; [`ErrorKind::Limit`]
    /// for a field that is too long.
    pub(super) fn write(&self, out: &mut FactsWriter<'_>) -> Result<Vec<u64>> {
        let mut written = Written {
            out,
            samples: 0,
            extents: Vec::new(),
            most: vec![0; self.head.lens as usize],
            differ: Vec::new(),
        };
        if let (Some(outline), true, false) =
            (&self.wanted.outline, self.finds(column::SUMS), self.opens())
        {
            let sums = parallel(&outline.extents, |_, extents| {
                let mut plain = Plain::new(self.dataset);
                extents
                    .iter()
                    .map(|extent| plain.crc(extent))
                    .collect::<Result<Vec<_>>>()
            })?;
            written.extents = sums.concat();
        }
        let starts = self.starts()?;
        let runs: Vec<_> = starts.windows(2).enumerate().collect();
        for some in runs.chunks(TOGETHER) {
            let found = parallel(some, |_, (number, ends)| {
                self.run(*number, [ends[0], ends[1]])
            })?;
            found
                .into_iter()
                .try_for_each(|run| self.put(run, &mut written))?;
        }
        self.put_extents(&mut written)?;
        if let (Some(old), false) = (self.old, self.finds(column::LENGTHS)) {
            for (position, most) in written.most.iter_mut().enumerate() {
                *most = old.most(position)?;
            }
        }
        if let Some(outline) = &self.wanted.outline {
            outline.refuse(self.dataset, &written.differ, self.place)?;
        }
        Ok(written.most)
    }

    /// The first sample of each run, then the number of all samples.
    fn starts(&self) -> Result<Arc<[u64]>> {
        match self.dataset.chunked().filter(|_| self.opens()) {
            Some(chunks) if chunks.is_whole() => Ok(chunks.starts().into()),
            Some(_) => {
                let message = "a subset of a dataset with chunks: make the facts of the whole \
                               dataset, then take the subset";
                Err(Error::new(ErrorKind::Config, Stage::Index, message))
            }
            None => Ok((0..self.dataset.len())
                .step_by(RUN as usize)
                .chain([self.dataset.len()])
                .collect()),
        }
    }

    /// Finds the facts of the samples between `ends`, which are chunk `number` of a dataset with
    /// chunks.
    fn run(&self, number: usize, ends: [u64; 2]) -> Result<Run> {
        let rows = (ends[1] - ends[0]) as usize;
        let mut run = Run {
            rows,
            ..Run::default()
        };
        for (values, column) in run.values.iter_mut().zip(RECORDED) {
            if self.finds(column) {
                *values = vec![0; rows * self.width(column)];
            }
        }
        run.values[2]
            .chunks_exact_mut(2)
            .for_each(|size| size.copy_from_slice(&DAMAGED));
        if self.finds(column::POINTS) {
            run.points = vec![Vec::new(); rows * self.head.points as usize];
        }
        match self.dataset.chunked().is_some() {
            true if self.opens() => self.chunk(number, &mut run)?,
            true => {}
            false => self.samples(ends[0], &mut run)?,
        }
        run.too_long.take().map_or(Ok(run), Err)
    }

    /// How many 4-byte values a record holds for this fact.
    fn width(&self, column: u32) -> usize {
        self.head.part(column).len() / 4
    }

    fn samples(&self, first: u64, run: &mut Run) -> Result<()> {
        let mut plain = Plain::new(self.dataset);
        let mut decoder = jpeg::Decoder::default();
        let fields = match self.finds(column::SUMS) {
            true => self.head.sums as usize,
            false => 0,
        };
        let mut crcs = vec![0; fields];
        for row in 0..run.rows {
            let sample = first + row as u64;
            crcs.fill(0);
            let is_open = self.opens()
                && intact(plain.sample_and_crcs(sample, &mut crcs, |field, bytes| {
                    self.note(run, &mut decoder, [row, field], bytes);
                    Ok(())
                }))?
                .is_some();
            // After damage in one field, the sample's other fields are not opened, but their stored
            // bytes still get checksums.
            if !is_open && fields > 0 {
                plain.crcs(sample, |field, crc| crcs[field] = crc)?;
            }
            run.values[0][row * fields..][..fields].copy_from_slice(&crcs);
        }
        Ok(())
    }

    fn chunk(&self, number: usize, run: &mut Run) -> Result<()> {
        let mut plain = Plain::new(self.dataset);
        let mut decoder = jpeg::Decoder::default();
        let mut extents = Vec::new();
        let opened = intact(plain.chunk_as_stored(number, |bytes| {
            if self.finds(column::SUMS) {
                extents.push(crc32c::crc32c(bytes));
            }
        }))?;
        if let (Some(outline), true) = (&self.wanted.outline, self.finds(column::SUMS)) {
            for extent in outline.extents[number].iter().skip(extents.len()) {
                extents.push(plain.crc(extent)?);
            }
        }
        run.extents = extents;
        let Some(chunk) = opened else { return Ok(()) };
        for row in 0..run.rows {
            for field in 0..self.dataset.schema().len() {
                let bytes = chunk.row(field, row).unwrap_or_default();
                self.note(run, &mut decoder, [row, field], bytes);
            }
        }
        Ok(())
    }

    /// Records the facts about the bytes of one field.
    fn note(
        &self,
        run: &mut Run,
        decoder: &mut jpeg::Decoder,
        [row, field]: [usize; 2],
        bytes: &[u8],
    ) {
        if let (Some(position), true) = (self.wanted.measured[field], self.finds(column::LENGTHS)) {
            match u32::try_from(bytes.len()) {
                Ok(len) => run.values[1][row * self.head.lens as usize + position] = len,
                Err(_) => {
                    let name = &self.dataset.schema()[field].name;
                    run.too_long = Some(too_long(name, bytes.len()));
                }
            }
        }
        if let (Some(position), true) = (self.wanted.pointed[field], self.finds(column::POINTS)) {
            run.points[row * self.head.points as usize + position] = decoder.seek_points(bytes);
        }
        if let (Some(picture), true) = (&self.wanted.picture, self.finds(column::SIZES))
            && picture.field == field
        {
            let size = (picture.size)(bytes).map_or(DAMAGED, <[u32; 2]>::from);
            run.values[2][2 * row..][..2].copy_from_slice(&size);
        }
    }

    /// Writes the records of a run; facts that this pass does not find come from the old file.
    fn put(&self, run: Run, written: &mut Written<'_, '_>) -> Result<()> {
        let mut record = Vec::new();
        let mut kept = Vec::new();
        for row in 0..run.rows {
            let sample = written.samples + row as u64;
            record.clear();
            if let Some(old) = self.old {
                old.record(sample, &mut kept)?;
            }
            for (values, column) in run.values.iter().zip(RECORDED) {
                let before = self.old.map(|old| &kept[old.head.part(column)]);
                if !self.finds(column) {
                    record.extend_from_slice(before.unwrap_or_default());
                    continue;
                }
                let width = self.width(column);
                let own = &values[row * width..][..width];
                if let (column::SUMS, Some(before)) = (column, before) {
                    written.compare(sample * width as u64, before, own);
                }
                if column == column::LENGTHS {
                    for (most, len) in written.most.iter_mut().zip(own) {
                        *most = u64::from(*len).max(*most);
                    }
                }
                record.extend_from_slice(bytemuck::cast_slice(own));
            }
            written.out.values(&record)?;
        }
        match (self.finds(column::POINTS), self.old) {
            (true, _) => run
                .points
                .iter()
                .try_for_each(|entry| written.out.points(entry))?,
            (false, Some(old)) if old.head.points > 0 => {
                let points = u64::from(self.head.points);
                let entries =
                    written.samples * points..(written.samples + run.rows as u64) * points;
                for entry in entries {
                    written.out.points(old.points(entry, &mut kept)?)?;
                }
            }
            (false, _) => {}
        }
        written.samples += run.rows as u64;
        written.extents.extend(run.extents);
        Ok(())
    }

    /// Writes the checksums of a dataset with chunks.
    fn put_extents(&self, written: &mut Written<'_, '_>) -> Result<()> {
        let mut extents = std::mem::take(&mut written.extents);
        if let Some(old) = self.old {
            let before = (0..old.head.extents)
                .map(|extent| old.extent_sum(extent))
                .collect::<Result<Vec<_>>>()?;
            match self.finds(column::SUMS) {
                true => written.compare(0, bytemuck::cast_slice(&before), &extents),
                false => extents = before,
            }
        }
        written.out.values(bytemuck::cast_slice(&extents))
    }
}

impl Written<'_, '_> {
    /// Records which of the checksums `now` differ from `before`, those of the old file if it has
    /// any. `first` is the index of the first checksum.
    fn compare(&mut self, first: u64, before: &[u8], now: &[u32]) {
        let before = before.chunks_exact(4);
        for (number, (before, now)) in before.zip(now).enumerate() {
            if before != now.to_ne_bytes() {
                self.differ.push(first + number as u64);
            }
        }
    }
}

fn too_long(name: &str, bytes: usize) -> Error {
    let message = format!(
        "field `{name}` of a sample has {bytes} bytes; {} can be measured",
        u32::MAX
    );
    Error::new(ErrorKind::Limit, Stage::Index, message).with_amounts(bytes as u64, u32::MAX.into())
}

/// Damaged samples have no facts; the loader reports them.
fn intact<T>(done: Result<T>) -> Result<Option<T>> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) => match error.kind() {
            ErrorKind::Decode | ErrorKind::Truncated | ErrorKind::Limit | ErrorKind::Empty => {
                Ok(None)
            }
            _ => Err(error),
        },
    }
}
