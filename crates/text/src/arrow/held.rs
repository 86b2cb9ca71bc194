//! Small numbers of all rows, in memory: labels need no read of their own.

use super::batch::mark;
use super::plan::{Leaf, Take};
use feedline_base::error::{Error, Result, Stage};
use feedline_core::dataset::index::{Entry, Index};
use feedline_core::dataset::parallel;
use feedline_core::storage::{Blob, SourceId};
use feedline_core::tensor::EncodedField;

/// Maximum bytes of a row of a field that is held.
const ROW_MAX: usize = 64;
/// Maximum bytes of all rows of all fields that are held.
pub(super) const HELD_MAX: usize = 64 << 20;
/// Maximum bytes between the first and the last row of a read.
const STEP: u64 = 1 << 20;

/// The rows of a field.
pub(super) struct Held {
    rows: Vec<u8>,
    row_bytes: usize,
    /// Samples without a value that is right, ascending.
    lost: Vec<u64>,
}

impl Held {
    /// The bytes of a sample; `None` if it has no right value.
    #[inline]
    pub(super) fn row(&self, sample: u64) -> Option<&[u8]> {
        if !self.lost.is_empty() && self.lost.binary_search(&sample).is_ok() {
            return None;
        }
        self.rows.chunks_exact(self.row_bytes).nth(sample as usize)
    }

    pub(super) fn heap(&self) -> usize {
        self.rows.capacity() + self.lost.capacity() * size_of::<u64>()
    }
}

/// Reads the fields that are small, in their order, while there is room for `most` bytes.
pub(super) fn read(
    index: &Index,
    schema: &[EncodedField],
    takes: &[Take],
    mut most: usize,
) -> Result<Vec<Option<Held>>> {
    let mut held = Vec::with_capacity(schema.len());
    for (number, (field, take)) in schema.iter().zip(takes).enumerate() {
        let all = super::row_bytes(field)
            .filter(|bytes| *bytes <= ROW_MAX)
            .and_then(|bytes| {
                let all = usize::try_from(index.len()).ok()?.checked_mul(bytes)?;
                (all <= most).then_some((bytes, all))
            });
        held.push(match all {
            Some((row_bytes, all)) => {
                most -= all;
                Some(read_field(index, number, take, row_bytes)?)
            }
            None => None,
        });
    }
    Ok(held)
}

fn read_field(index: &Index, field: usize, take: &Take, row_bytes: usize) -> Result<Held> {
    let shards = index.sources().ids().collect::<Vec<_>>();
    let parts = parallel(shards, |number, source| {
        let rows = index.ids_of(number);
        let mut rows = Shard {
            index,
            field,
            take,
            row_bytes,
            source,
        }
        .read(rows)?;
        rows.rows.shrink_to_fit();
        Ok(rows)
    })?;
    let mut all = Held {
        rows: Vec::with_capacity(parts.iter().map(|part| part.rows.len()).sum()),
        row_bytes,
        lost: Vec::new(),
    };
    for part in parts {
        all.rows.extend_from_slice(&part.rows);
        all.lost.extend_from_slice(&part.lost);
    }
    Ok(all)
}

struct Shard<'a> {
    index: &'a Index,
    field: usize,
    take: &'a Take,
    row_bytes: usize,
    source: SourceId,
}

impl Shard<'_> {
    fn read(&self, samples: std::ops::Range<u64>) -> Result<Held> {
        let blob = Blob::of_source(self.index.sources(), self.source)?;
        let count = (samples.end - samples.start) as usize;
        let mut held = Held {
            rows: vec![0; count * self.row_bytes],
            row_bytes: self.row_bytes,
            lost: Vec::new(),
        };
        let mut run: Vec<(usize, Entry)> = Vec::new();
        for (row, sample) in samples.enumerate() {
            let entry = self
                .index
                .entry(sample, self.field)?
                .map(|(_, entry)| entry);
            let Some(entry) = entry.filter(|entry| self.fits(*entry)) else {
                held.lost.push(sample);
                continue;
            };
            let joined = run.first().is_none_or(|(_, first)| {
                let end = entry.offset + entry.len;
                entry.offset >= first.offset && end - first.offset <= STEP
            });
            if !joined {
                self.fill(&blob, &run, &mut held)?;
                run.clear();
            }
            run.push((row, entry));
        }
        self.fill(&blob, &run, &mut held)?;
        Ok(held)
    }

    fn fits(&self, entry: Entry) -> bool {
        match self.take.leaf {
            Leaf::Bits => mark::first_and_count(entry.crc).1 == self.row_bytes,
            _ => entry.len == self.row_bytes as u64 && entry.crc == 0,
        }
    }

    /// Reads the rows of a run at once.
    fn fill(&self, blob: &Blob, run: &[(usize, Entry)], held: &mut Held) -> Result<()> {
        let Some((_, first)) = run.first() else {
            return Ok(());
        };
        let ends = run.iter().map(|(_, entry)| entry.offset + entry.len);
        let len = ends.max().unwrap_or(0) - first.offset;
        let bytes = blob.read(first.offset, len, "the values of a column")?;
        for (row, entry) in run {
            let stored = &bytes[(entry.offset - first.offset) as usize..][..entry.len as usize];
            let out = &mut held.rows[row * self.row_bytes..][..self.row_bytes];
            match self.take.leaf {
                Leaf::Bits => unpack(stored, entry.crc, |at, bit| out[at] = bit)?,
                _ => out.copy_from_slice(stored),
            }
        }
        Ok(())
    }
}

/// Calls `put` with the number and value of each boolean.
pub(super) fn unpack(stored: &[u8], crc: u32, mut put: impl FnMut(usize, u8)) -> Result<()> {
    let (first, count) = mark::first_and_count(crc);
    if (first + count).div_ceil(8) > stored.len() && count > 0 {
        let message = format!("{count} booleans in {} bytes", stored.len());
        return Err(Error::decode(message).in_stage(Stage::Decode));
    }
    (0..count).for_each(|at| {
        let bit = first + at;
        put(at, stored[bit / 8] >> (bit % 8) & 1);
    });
    Ok(())
}
