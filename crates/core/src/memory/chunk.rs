//! Memory of one open chunk: arrays of rows, and rows of any length, in one region of fixed size.

use super::region::Region;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::ops::Range;

/// Arrays start on a cache line.
const ALIGN: usize = 64;

/// Rows of the fields of one open chunk. `build()` reserves it; chunks reuse it.
///
/// A field is either [`fixed`](Self::fixed), one array of rows of one length, or gets its rows one
/// by one from [`push`](Self::push) or [`place`](Self::place).
pub struct ChunkBuf {
    memory: Memory,
    used: usize,
    rows: usize,
    columns: Vec<ChunkColumn>,
}

/// Kernel memory, in huge pages when large, and kept between chunks.
type Memory = super::region::Bytes;

#[derive(Default)]
enum ChunkColumn {
    #[default]
    Missing,
    Fixed {
        start: usize,
        row_bytes: usize,
    },
    /// Start and length of each row.
    Ragged(Vec<(usize, usize)>),
}

impl ChunkBuf {
    /// Bytes of bookkeeping for each placed row, in addition to the buffer.
    #[doc(hidden)]
    pub const LIST_ENTRY: usize = size_of::<(usize, usize)>();

    /// Reserves `bytes`. Errors: [`ErrorKind::Budget`] if the kernel refuses them.
    pub fn new(bytes: usize) -> Result<Self> {
        Ok(Self {
            memory: Memory::new(bytes, "an open chunk")?,
            used: 0,
            rows: 0,
            columns: Vec::new(),
        })
    }

    /// Bytes that a buffer of `bytes` takes, rounded to pages.
    #[doc(hidden)]
    pub fn size_for(bytes: usize) -> usize {
        Region::size_for(bytes)
    }

    /// Clears the buffer for a chunk of `rows` samples with `fields` fields.
    pub fn begin(&mut self, rows: usize, fields: usize) {
        self.used = 0;
        self.rows = rows;
        self.columns.resize_with(fields, ChunkColumn::default);
        for column in &mut self.columns {
            // Lists keep their capacity.
            match column {
                ChunkColumn::Ragged(spans) => spans.clear(),
                other => *other = ChunkColumn::Missing,
            }
        }
    }

    /// Number of samples in the chunk.
    #[inline]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The array `[rows, row_bytes]` of field `field`, for writing. Its content is unspecified.
    ///
    /// Errors: [`ErrorKind::Limit`] if the chunk needs more than the dataset declared.
    pub fn fixed(&mut self, field: usize, row_bytes: usize) -> Result<&mut [u8]> {
        let len = self.rows.saturating_mul(row_bytes);
        let range = self.room(len)?;
        self.columns[field] = ChunkColumn::Fixed {
            start: range.start,
            row_bytes,
        };
        Ok(&mut self.memory.as_mut_slice()[range])
    }

    /// Reserves `len` bytes without a field; [`place`](Self::place) then assigns rows in them.
    ///
    /// Errors: those of [`fixed`](Self::fixed).
    pub fn room(&mut self, len: usize) -> Result<Range<usize>> {
        let start = self.used.next_multiple_of(ALIGN);
        let end = start
            .checked_add(len)
            .filter(|end| *end <= self.memory.len());
        let end = end.ok_or_else(|| {
            let message = format!(
                "the chunk needs at least {} bytes, but only {} were reserved by its metadata",
                self.used.saturating_add(len),
                self.memory.len()
            );
            Error::new(ErrorKind::Limit, Stage::Decode, message)
        })?;
        self.used = end;
        Ok(start..end)
    }

    /// Reserves `len` bytes as [`room`](Self::room) does, directly behind those in use.
    ///
    /// Errors: those of [`fixed`](Self::fixed).
    pub fn next_room(&mut self, len: usize) -> Result<Range<usize>> {
        let start = self.used;
        match start
            .checked_add(len)
            .filter(|end| *end <= self.memory.len())
        {
            Some(end) => self.used = end,
            None => return self.room(len),
        }
        Ok(start..self.used)
    }

    /// The bytes of a range from [`room`](Self::room).
    pub fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.memory.as_mut_slice()[range]
    }

    /// The bytes of a range from [`room`](Self::room).
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.memory.as_slice()[range]
    }

    /// Makes this range of the buffer the next row of field `field`.
    pub fn place(&mut self, field: usize, range: Range<usize>) {
        debug_assert!(range.start <= range.end && range.end <= self.used);
        if !matches!(self.columns[field], ChunkColumn::Ragged(_)) {
            self.columns[field] = ChunkColumn::Ragged(Vec::new());
        }
        if let ChunkColumn::Ragged(spans) = &mut self.columns[field] {
            if spans.is_empty() {
                // Exactly, because the plan counts one entry per row.
                spans.reserve_exact(self.rows);
            }
            spans.push((range.start, range.len()));
        }
    }

    /// Makes a copy of `bytes` the next row of field `field`. Errors: those of
    /// [`fixed`](Self::fixed).
    pub fn push(&mut self, field: usize, bytes: &[u8]) -> Result<()> {
        let range = self.next_room(bytes.len())?;
        self.memory.as_mut_slice()[range.clone()].copy_from_slice(bytes);
        self.place(field, range);
        Ok(())
    }

    /// Row `row` of field `field`; `None` if it was never written.
    #[inline]
    pub fn row(&self, field: usize, row: usize) -> Option<&[u8]> {
        match self.columns.get(field)? {
            ChunkColumn::Missing => None,
            ChunkColumn::Fixed { start, row_bytes } => {
                let start = start + row * row_bytes;
                (row < self.rows).then(|| &self.memory.as_slice()[start..start + row_bytes])
            }
            ChunkColumn::Ragged(spans) => spans
                .get(row)
                .map(|(start, len)| &self.memory.as_slice()[*start..start + len]),
        }
    }

    /// All rows of a [`fixed`](Self::fixed) field, and the bytes per row.
    #[inline]
    pub fn array(&self, field: usize) -> Option<(&[u8], usize)> {
        match self.columns.get(field)? {
            ChunkColumn::Fixed { start, row_bytes } => Some((
                &self.memory.as_slice()[*start..start + self.rows * row_bytes],
                *row_bytes,
            )),
            _ => None,
        }
    }

    /// The first field that lacks rows, and its number of rows.
    #[doc(hidden)]
    pub fn incomplete(&self) -> Option<(usize, usize)> {
        self.columns.iter().enumerate().find_map(|(field, column)| {
            let rows = match column {
                ChunkColumn::Missing => 0,
                ChunkColumn::Fixed { .. } => self.rows,
                ChunkColumn::Ragged(spans) => spans.len(),
            };
            (rows != self.rows).then_some((field, rows))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_back_and_the_buffer_is_reused() {
        let mut buf = ChunkBuf::new(4096).unwrap();
        for rows in [3_usize, 1, 7] {
            buf.begin(rows, 3);
            buf.fixed(0, 4)
                .unwrap()
                .iter_mut()
                .enumerate()
                .for_each(|(at, byte)| *byte = at as u8);
            assert_eq!(buf.incomplete(), Some((1, 0)));
            for row in 0..rows {
                buf.push(1, &vec![row as u8; row]).unwrap();
            }
            let room = buf.room(rows * 2).unwrap();
            assert_eq!(room.start % ALIGN, 0);
            buf.bytes_mut(room.clone()).fill(9);
            (0..rows).for_each(|row| buf.place(2, room.start + row..room.start + row + 1));
            assert_eq!(buf.incomplete(), None);
            let last = rows - 1;
            assert_eq!(buf.row(0, last).unwrap()[0] as usize, last * 4);
            assert_eq!(buf.row(1, last).unwrap(), vec![last as u8; last]);
            assert_eq!(buf.row(2, last).unwrap(), [9]);
            assert_eq!(
                (buf.row(0, rows), buf.row(1, rows), buf.row(3, 0)),
                (None, None, None)
            );
            assert_eq!(buf.array(0).unwrap().1, 4);
            assert!(buf.array(1).is_none());
        }
    }

    #[test]
    fn bytes_over_the_declared_size_are_a_typed_error() {
        let mut buf = ChunkBuf::new(4096).unwrap();
        buf.begin(2, 1);
        assert_eq!(buf.fixed(0, 4096).err().unwrap().kind(), ErrorKind::Limit);
        assert_eq!(
            buf.fixed(0, usize::MAX).err().unwrap().kind(),
            ErrorKind::Limit
        );
        assert_eq!(
            buf.push(0, &[0; 4097]).err().unwrap().kind(),
            ErrorKind::Limit
        );
        assert!(buf.push(0, &[1; 4096]).is_ok());
        assert_eq!(buf.push(0, &[1]).err().unwrap().kind(), ErrorKind::Limit);
    }
}
