//! Where the values of a record batch lie: its arrays' buffers, followed from a row to the bytes of
//! its values.
//!
//! ```text
//! row ──structure──► validity ──offsets──► elements of the list ──offsets──► … ──► bytes
//! ```
//!
//! Rows of a batch are consecutive, so their elements are, too: one position more than rows says
//! where all of them begin and end.

use super::fault::Fault;
use super::plan::Resolved;
use super::schema::{Column, Kind};
use arrow_ipc::{DictionaryBatch, RecordBatch};
use feedline_core::dataset::index::{Entry, Scan};
use std::collections::HashMap;

/// Offsets that are read at once.
const STEP: u64 = 8192;

/// Of every row where its value is; `None` for a null.
pub(super) type Entries = Vec<Option<Entry>>;

/// A range of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// An array and its parts, not read yet.
struct Array {
    len: u64,
    nulls: u64,
    buffers: Vec<Place>,
    children: Vec<Array>,
}

/// The arrays of a record batch.
pub(super) struct Arrays {
    len: u64,
    all: Vec<Array>,
}

/// What an entry says besides a place, in the place of a checksum.
pub(super) mod mark {
    /// A null within a list.
    pub(crate) const NULL_WITHIN: u32 = u32::MAX;
    /// Lists within a list that have other lengths than the field's shape says.
    pub(crate) const UNEVEN: u32 = u32::MAX - 1;

    /// Of booleans: the first one's bit, and their number.
    pub(crate) fn bits(first: u64, count: u64) -> Option<u32> {
        let count = u32::try_from(count).ok().filter(|count| *count < 1 << 28)?;
        Some((first % 8) as u32 | count << 3)
    }

    pub(crate) fn first_and_count(mark: u32) -> (usize, usize) {
        ((mark % 8) as usize, (mark >> 3) as usize)
    }
}

impl Arrays {
    pub(super) fn of(
        batch: RecordBatch<'_>,
        body: Place,
        columns: &[Column],
    ) -> Result<Self, Fault> {
        if let Some(compression) = batch.compression() {
            let codec = compression.codec();
            return Err(Fault::unsupported(format!(
                "buffers compressed with {codec:?}, which have no random access: write the file without compression"
            )));
        }
        let len = u64::try_from(batch.length()).map_err(|_| Fault::wrong("a negative length"))?;
        let mut cursor = Cursor {
            batch,
            body,
            node: 0,
            buffer: 0,
            views: 0,
        };
        let all = columns
            .iter()
            .map(|column| cursor.array(column))
            .collect::<Result<Vec<_>, _>>()?;
        cursor.finish()?;
        match all.iter().find(|array| array.len != len) {
            Some(array) => Err(Fault::wrong(format!(
                "a column of {} rows in a batch of {len}",
                array.len
            ))),
            None => Ok(Self { len, all }),
        }
    }
}

/// Hands out nodes and buffers in the order of the schema.
struct Cursor<'a> {
    batch: RecordBatch<'a>,
    body: Place,
    node: usize,
    buffer: usize,
    views: usize,
}

impl Cursor<'_> {
    fn array(&mut self, column: &Column) -> Result<Array, Fault> {
        let nodes = self.batch.nodes().filter(|nodes| self.node < nodes.len());
        let node = nodes.map(|nodes| *nodes.get(self.node));
        let node = node.ok_or_else(|| Fault::wrong("fewer columns than the schema has"))?;
        self.node += 1;
        let counts = [node.length(), node.null_count()].map(u64::try_from);
        let [Ok(len), Ok(nulls)] = counts else {
            let name = &column.name;
            return Err(Fault::wrong(format!("column `{name}`: a negative count")));
        };
        let buffers = match column.kind {
            _ if column.dictionary.is_some() => 2,
            Kind::Bool | Kind::Number(_) | Kind::Fixed(_) | Kind::List { .. } => 2,
            Kind::Bytes { .. } => 3,
            Kind::FixedList(_) | Kind::Struct => 1,
            Kind::Other { buffers, .. } => buffers,
            Kind::Views => 2 + self.variadic()?,
        };
        let buffers = (0..buffers).map(|_| self.place(&column.name));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        // The values of a dictionary come in batches of their own.
        let children = match column.dictionary {
            Some(_) => &[][..],
            None => &column.children,
        };
        Ok(Array {
            len,
            nulls,
            buffers,
            children: children
                .iter()
                .map(|child| self.array(child))
                .collect::<Result<_, _>>()?,
        })
    }

    fn variadic(&mut self) -> Result<usize, Fault> {
        let counts = self.batch.variadicBufferCounts();
        let count = counts.filter(|counts| self.views < counts.len());
        let count = count.map(|counts| counts.get(self.views));
        self.views += 1;
        let left = self.batch.buffers().map_or(0, |all| all.len());
        count
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| *count <= left)
            .ok_or_else(|| Fault::wrong("no right number of buffers for views"))
    }

    fn place(&mut self, name: &str) -> Result<Place, Fault> {
        let buffers = self.batch.buffers();
        let buffer = buffers
            .filter(|buffers| self.buffer < buffers.len())
            .map(|buffers| *buffers.get(self.buffer))
            .ok_or_else(|| Fault::wrong("fewer buffers than the schema needs"))?;
        self.buffer += 1;
        let numbers = [buffer.offset(), buffer.length()].map(u64::try_from);
        let place = match numbers {
            [Ok(offset), Ok(len)] if len == 0 || offset <= self.body.len => Some(Place {
                offset: self.body.offset + offset.min(self.body.len),
                len,
            }),
            _ => None,
        };
        let end = self.body.offset + self.body.len;
        place
            .filter(|place| place.len <= end - place.offset)
            .ok_or_else(|| {
                let offset = buffer.offset();
                let len = buffer.length();
                Fault::wrong(format!(
                    "column `{name}`: a buffer of {len} bytes at {offset} in a body of {} bytes",
                    self.body.len
                ))
            })
    }

    fn finish(&self) -> Result<(), Fault> {
        let nodes = self.batch.nodes().map_or(0, |nodes| nodes.len());
        let buffers = self.batch.buffers().map_or(0, |buffers| buffers.len());
        match (nodes, buffers) == (self.node, self.buffer) {
            true => Ok(()),
            false => Err(Fault::wrong("more columns or buffers than the schema has")),
        }
    }
}

/// The values of dictionaries, by their ids.
#[derive(Default)]
pub(super) struct Dictionaries(HashMap<i64, Entries>);

impl Dictionaries {
    /// Adds a dictionary, if a column that is taken has it.
    pub(super) fn add(
        &mut self,
        batch: DictionaryBatch<'_>,
        body: Place,
        input: &mut Scan<'_>,
        takes: &[Resolved<'_>],
    ) -> Result<(), Fault> {
        let id = batch.id();
        let mut wanted = takes.iter().filter(|take| take.dictionary() == Some(id));
        let Some(take) = wanted.next() else {
            return Ok(());
        };
        let values = Column {
            dictionary: None,
            ..take.column.clone()
        };
        let data = batch.data();
        let data = data.ok_or_else(|| Fault::wrong("a dictionary without values"))?;
        let arrays = Arrays::of(data, body, std::slice::from_ref(&values))?;
        let take = Resolved {
            name: take.name,
            number: 0,
            structs: Vec::new(),
            column: &values,
            lists: &[],
        };
        let found = take.entries(&arrays, self, input);
        let found = found.map_err(|fault| match fault {
            Fault::Damage(kind, what) => Fault::Damage(kind, format!("dictionary {id}: {what}")),
            failed => failed,
        })?;
        match batch.isDelta() {
            true => self.0.entry(id).or_default().extend(found),
            false => drop(self.0.insert(id, found)),
        }
        Ok(())
    }
}

/// The rows of a batch on the way from a column to its values.
struct Rows<'s, 'b> {
    input: &'s mut Scan<'b>,
    /// Whether a row has a value.
    valid: Vec<bool>,
    /// Not 0 for a row that cannot be a sample.
    marks: Vec<u32>,
    /// Where the elements of each row begin, then where those of the last end.
    positions: Vec<u64>,
}

impl Resolved<'_> {
    /// Where the values of each row are. `None` for a null.
    pub(super) fn entries(
        &self,
        arrays: &Arrays,
        dictionaries: &Dictionaries,
        input: &mut Scan<'_>,
    ) -> Result<Entries, Fault> {
        self.find(arrays, dictionaries, input)
            .map_err(|fault| match fault {
                Fault::Damage(kind, what) => {
                    Fault::Damage(kind, format!("column `{}`: {what}", self.name))
                }
                failed => failed,
            })
    }

    fn find(
        &self,
        arrays: &Arrays,
        dictionaries: &Dictionaries,
        input: &mut Scan<'_>,
    ) -> Result<Entries, Fault> {
        let mut chain = vec![&arrays.all[self.number]];
        for child in &self.structs {
            chain.push(&chain[chain.len() - 1].children[*child]);
        }
        let outer = chain[chain.len() - 1];
        // Their buffers have as many values, before anything of this size is allocated.
        outer.holds(self.column)?;
        if chain.iter().any(|array| array.len < arrays.len) {
            return Err(Fault::wrong("a part of a structure has fewer rows"));
        }
        let count = usize::try_from(arrays.len).map_err(|_| Fault::wrong("too many rows"))?;
        let mut rows = Rows {
            input,
            valid: vec![true; count],
            marks: vec![0; count],
            positions: (0..=arrays.len).collect(),
        };
        for array in chain {
            rows.drop_nulls(array)?;
        }
        let mut array = outer;
        let mut column = self.column;
        for inner in self.lists {
            rows.follow(array, column.kind, *inner)?;
            (array, column) = (&array.children[0], &column.children[0]);
            array.holds(column)?;
            rows.refuse_nulls(array)?;
        }
        rows.values(array, column, dictionaries)
    }
}

/// Bytes of the offsets of `len` values.
fn offsets_bytes(len: u64, wide: bool) -> Option<u64> {
    match len {
        0 => Some(0),
        len => len.checked_add(1)?.checked_mul(if wide { 8 } else { 4 }),
    }
}

impl Array {
    /// Compares the buffers' sizes with the number of values.
    fn holds(&self, column: &Column) -> Result<(), Fault> {
        let len = self.len;
        let bits = len.div_ceil(8);
        let needed = match column.kind {
            _ if column.dictionary.is_some() => {
                let index = column.dictionary.expect("just found").index;
                len.checked_mul(index.size() as u64)
            }
            Kind::Bool => Some(bits),
            Kind::Number(dtype) => len.checked_mul(dtype.size() as u64),
            Kind::Fixed(bytes) => len.checked_mul(bytes),
            Kind::Bytes { wide } | Kind::List { wide } => offsets_bytes(len, wide),
            Kind::Views => len.checked_mul(16),
            Kind::FixedList(size) => {
                let child = self.children[0].len;
                return match len.checked_mul(size) {
                    Some(needed) if needed <= child => self.children[0].holds(&column.children[0]),
                    _ => Err(Fault::wrong(format!(
                        "{len} lists of {size} in {child} values"
                    ))),
                };
            }
            Kind::Struct | Kind::Other { .. } => {
                return Err(Fault::unsupported(format!(
                    "{} is not read",
                    column.described()
                )));
            }
        };
        let bytes = self.buffers[1].len;
        if needed.is_none_or(|needed| bytes < needed) {
            return Err(Fault::wrong(format!(
                "{len} values in a buffer of {bytes} bytes"
            )));
        }
        if self.nulls > 0 && self.buffers[0].len < bits {
            let bytes = self.buffers[0].len;
            return Err(Fault::wrong(format!(
                "the validity of {len} values in {bytes} bytes"
            )));
        }
        if self.nulls > len {
            return Err(Fault::wrong(format!(
                "{} nulls of {len} values",
                self.nulls
            )));
        }
        Ok(())
    }
}

impl Rows<'_, '_> {
    /// Calls `each` with every value's number and validity, of the values from `first` to `last`.
    fn validity(
        &mut self,
        array: &Array,
        [first, last]: [u64; 2],
        mut each: impl FnMut(&mut Self, u64, bool),
    ) -> Result<(), Fault> {
        let place = array.buffers[0];
        if last.div_ceil(8) > place.len {
            return Err(Fault::wrong(format!("validity of {} bytes", place.len)));
        }
        let mut bits = Vec::new();
        let mut at = first;
        while at < last {
            let end = last.min((at / 8 + STEP) * 8);
            let bytes = (end.div_ceil(8) - at / 8) as usize;
            bits.clear();
            bits.extend_from_slice(self.input.bytes(place.offset + at / 8, bytes)?);
            let begin = at / 8 * 8;
            for number in at..end {
                let bit = (number - begin) as usize;
                each(self, number, bits[bit / 8] >> (bit % 8) & 1 == 1);
            }
            at = end;
        }
        Ok(())
    }

    /// Finds the rows that are null in `array`.
    fn drop_nulls(&mut self, array: &Array) -> Result<(), Fault> {
        if array.nulls == 0 {
            return Ok(());
        }
        let count = self.valid.len() as u64;
        let mut found = 0;
        self.validity(array, [0, count], |rows, number, valid| {
            found += u64::from(!valid);
            rows.valid[number as usize] &= valid;
        })?;
        if array.len == count && found != array.nulls {
            let nulls = array.nulls;
            return Err(Fault::wrong(format!(
                "{found} nulls, the batch says {nulls}"
            )));
        }
        Ok(())
    }

    /// Marks the rows with a null among their elements.
    fn refuse_nulls(&mut self, array: &Array) -> Result<(), Fault> {
        if array.nulls == 0 {
            return Ok(());
        }
        let ends = [
            self.positions[0],
            *self.positions.last().expect("one more than rows"),
        ];
        let mut row = 0;
        self.validity(array, ends, |rows, number, valid| {
            while rows.positions[row + 1] <= number {
                row += 1;
            }
            if !valid {
                rows.marks[row] = mark::NULL_WITHIN;
            }
        })
    }

    /// Goes from lists to their elements. The lists within a list must have `inner` elements.
    fn follow(&mut self, array: &Array, kind: Kind, inner: Option<u64>) -> Result<(), Fault> {
        let elements = array.children[0].len;
        match kind {
            Kind::FixedList(size) => {
                // Not above the number of elements, which `holds` has compared.
                self.positions
                    .iter_mut()
                    .for_each(|position| *position *= size);
                Ok(())
            }
            Kind::List { wide } => self.offsets(array, wide, elements, inner),
            _ => Err(Fault::unsupported("not a list")),
        }
    }

    /// Replaces each position by the offset that is stored there.
    fn offsets(
        &mut self,
        array: &Array,
        wide: bool,
        most: u64,
        inner: Option<u64>,
    ) -> Result<(), Fault> {
        let width = if wide { 8 } else { 4 };
        let last = *self.positions.last().expect("one more than rows");
        if array.len == 0 || last == 0 && array.buffers[1].len == 0 {
            return Ok(());
        }
        if last > array.len {
            return Err(Fault::wrong(format!("element {last} of {}", array.len)));
        }
        let mut at = self.positions[0];
        let mut before = None;
        // The next position to replace.
        let mut row = 0;
        while at <= last {
            let count = (last + 1 - at).min(STEP);
            let place = array.buffers[1].offset + at * width;
            let bytes = self.input.bytes(place, (count * width) as usize)?;
            for offset in bytes.chunks_exact(width as usize) {
                let offset = match offset.try_into() {
                    Ok(narrow) => i64::from(i32::from_le_bytes(narrow)),
                    Err(_) => i64::from_le_bytes(offset.try_into().expect("8 bytes")),
                };
                let value = u64::try_from(offset).ok().filter(|value| *value <= most);
                let Some(value) =
                    value.filter(|value| before.is_none_or(|before| before <= *value))
                else {
                    return Err(Fault::wrong(format!(
                        "offset {offset} behind {}, of {most} elements",
                        before.unwrap_or(0)
                    )));
                };
                let is_even = before
                    .zip(inner)
                    .is_none_or(|(before, inner)| value - before == inner);
                if !is_even && self.marks[row - 1] == 0 {
                    self.marks[row - 1] = mark::UNEVEN;
                }
                // Several where rows have no elements.
                while self.positions.get(row) == Some(&at) {
                    self.positions[row] = value;
                    row += 1;
                }
                before = Some(value);
                at += 1;
            }
        }
        Ok(())
    }

    /// The entries of the values at the end of the way.
    fn values(
        mut self,
        array: &Array,
        column: &Column,
        dictionaries: &Dictionaries,
    ) -> Result<Entries, Fault> {
        if let Some(dictionary) = column.dictionary {
            return self.of_dictionary(array, dictionary, dictionaries);
        }
        if let Kind::Views = column.kind {
            return self.views(array);
        }
        if let Kind::Bytes { wide } = column.kind {
            self.offsets(array, wide, array.buffers[2].len, None)?;
        }
        let (data, width) = match column.kind {
            Kind::Bytes { .. } => (array.buffers[2], 1),
            Kind::Fixed(bytes) => (array.buffers[1], bytes),
            Kind::Number(dtype) => (array.buffers[1], dtype.size() as u64),
            Kind::Bool => return self.bits(array),
            _ => {
                return Err(Fault::unsupported(format!(
                    "{} is not read",
                    column.described()
                )));
            }
        };
        let last = *self.positions.last().expect("one more than rows");
        if last.checked_mul(width).is_none_or(|bytes| bytes > data.len) {
            return Err(Fault::wrong(format!("{last} values in {} bytes", data.len)));
        }
        self.each(|_, [start, end]| {
            Ok(Some(Entry {
                offset: data.offset + start * width,
                len: (end - start) * width,
                crc: 0,
            }))
        })
    }

    /// Makes the entries of the rows from the ranges of their values.
    fn each(
        &mut self,
        mut entry: impl FnMut(&mut Self, [u64; 2]) -> Result<Option<Entry>, Fault>,
    ) -> Result<Entries, Fault> {
        let count = self.valid.len();
        let mut entries = Vec::with_capacity(count);
        for row in 0..count {
            entries.push(match (self.valid[row], self.marks[row]) {
                (false, _) => None,
                (true, 0) => entry(self, [self.positions[row], self.positions[row + 1]])?,
                (true, mark) => Some(Entry {
                    offset: 0,
                    len: 0,
                    crc: mark,
                }),
            });
        }
        Ok(entries)
    }

    fn bits(&mut self, array: &Array) -> Result<Entries, Fault> {
        let data = array.buffers[1];
        let last = *self.positions.last().expect("one more than rows");
        if last.div_ceil(8) > data.len {
            return Err(Fault::wrong(format!(
                "{last} booleans in {} bytes",
                data.len
            )));
        }
        self.each(|_, [start, end]| {
            let mark = mark::bits(start, end - start)
                .ok_or_else(|| Fault::unsupported(format!("{} booleans in a row", end - start)))?;
            Ok(Some(Entry {
                offset: data.offset + start / 8,
                len: end.div_ceil(8).saturating_sub(start / 8) * u64::from(end > start),
                crc: mark,
            }))
        })
    }

    fn views(&mut self, array: &Array) -> Result<Entries, Fault> {
        let place = array.buffers[1];
        self.each(|rows, [number, _]| {
            let at = place.offset + number * 16;
            let view: [u8; 16] = rows.input.bytes(at, 16)?.try_into().expect("16 bytes");
            let word =
                |at: usize| u32::from_le_bytes(view[at..at + 4].try_into().expect("4 bytes"));
            let len = u64::from(word(0));
            let crc = 0;
            if len <= 12 {
                return Ok(Some(Entry {
                    offset: at + 4,
                    len,
                    crc,
                }));
            }
            let start = u64::from(word(12));
            let buffer = usize::try_from(word(8))
                .ok()
                .and_then(|own| array.buffers.get(own + 2));
            match buffer {
                Some(data) if start + len <= data.len => Ok(Some(Entry {
                    offset: data.offset + start,
                    len,
                    crc,
                })),
                _ => Err(Fault::wrong(format!(
                    "a view of {len} bytes outside of its buffer"
                ))),
            }
        })
    }

    fn of_dictionary(
        &mut self,
        array: &Array,
        dictionary: super::schema::Dictionary,
        dictionaries: &Dictionaries,
    ) -> Result<Entries, Fault> {
        let place = array.buffers[1];
        let width = dictionary.index.size();
        let values = dictionaries
            .0
            .get(&dictionary.id)
            .map_or(&[][..], Vec::as_slice);
        self.each(|rows, [number, _]| {
            let at = place.offset + number * width as u64;
            let mut index = [0; 8];
            index[..width].copy_from_slice(rows.input.bytes(at, width)?);
            let index = u64::from_le_bytes(index);
            let value = usize::try_from(index)
                .ok()
                .and_then(|index| values.get(index));
            value.copied().ok_or_else(|| {
                Fault::wrong(format!("value {index} of a dictionary of {}", values.len()))
            })
        })
    }
}
