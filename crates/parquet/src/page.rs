//! The pages of a column chunk: reads and checks headers before any allocation, verifies checksums,
//! and finds plain values in place.
//!
//! ```text
//! column chunk: │ header │ dictionary │ header │ levels, values │ header │ levels, values │ …
//!                 └ thrift compact protocol: kind, sizes, CRC, encoding
//! ```
//!
//! Invariants: every size in a header is compared with the available bytes and with the footer
//! before use; a page with a CRC is verified; the walk is linear in the bytes.

use bytes::Bytes;
use feedline_base::error::{Error, ErrorKind, Result, Stage};

/// Kind of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageKind {
    Data,
    DataV2 {
        nulls: u32,
        rows: u32,
        def_bytes: u32,
        rep_bytes: u32,
        compressed: bool,
    },
    Dictionary,
    /// A page without values: an index page, or a kind of a later version.
    Other,
}

/// The fields of a page header that are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: PageKind,
    pub(super) uncompressed: usize,
    pub(super) compressed: usize,
    pub(super) crc: Option<u32>,
    pub(super) values: usize,
    pub(super) encoding: i32,
    /// Encoding of the definition levels (version 1).
    pub(super) def_encoding: i32,
    /// Encoding of the repetition levels (version 1).
    pub(super) rep_encoding: i32,
}

/// Encodings, numbered as in the format's definition.
pub(super) const PLAIN: i32 = 0;
pub(super) const PLAIN_DICTIONARY: i32 = 2;
pub(super) const RLE: i32 = 3;
pub(super) const DELTA_BYTE_ARRAY: i32 = 7;
pub(super) const RLE_DICTIONARY: i32 = 8;

/// Maximum nesting of structures in a header; the format needs 4.
const DEPTH_MAX: u32 = 16;

/// Reader for the part of thrift's compact protocol that headers and footers use.
pub(super) struct Thrift<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Start of the field being read.
    field_at: usize,
}

impl<'a> Thrift<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            field_at: 0,
        }
    }

    /// Bytes not read yet.
    pub(super) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    fn byte(&mut self) -> Result<u8> {
        let byte = self
            .bytes
            .get(self.at)
            .ok_or_else(|| Error::decode("a page header is cut"))?;
        self.at += 1;
        Ok(*byte)
    }

    pub(super) fn varint(&mut self) -> Result<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Error::decode("a number in a page header is too long"))
    }

    pub(super) fn zigzag(&mut self) -> Result<i64> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    pub(super) fn skip(&mut self, len: u64) -> Result<()> {
        let left = (self.bytes.len() - self.at) as u64;
        if len > left {
            return Err(Error::decode("a page header is cut"));
        }
        self.at += len as usize;
        Ok(())
    }

    /// Calls `field` with the id and type of each field of a structure; `field` returns whether it
    /// read the value.
    fn fields(
        &mut self,
        depth: u32,
        mut field: impl FnMut(&mut Self, i64, u8) -> Result<bool>,
    ) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(Error::decode("a page header is nested too deeply"));
        }
        let mut id = 0_i64;
        loop {
            self.field_at = self.at;
            let byte = self.byte()?;
            let kind = byte & 0x0f;
            if kind == 0 {
                return Ok(());
            }
            id = match byte >> 4 {
                0 => self.zigzag()?,
                delta => id.saturating_add(i64::from(delta)),
            };
            if !field(self, id, kind)? {
                self.skip_value(kind, depth)?;
            }
        }
    }

    /// Reads a list's header: number and type of the elements.
    fn list(&mut self) -> Result<(u64, u8)> {
        let byte = self.byte()?;
        let len = if byte >> 4 == 15 {
            self.varint()?
        } else {
            u64::from(byte >> 4)
        };
        Ok((len, byte & 0x0f))
    }

    fn skip_value(&mut self, kind: u8, depth: u32) -> Result<()> {
        match kind {
            1 | 2 => Ok(()),
            3 => self.skip(1),
            4..=6 => self.varint().map(|_| ()),
            7 => self.skip(8),
            8 => {
                let len = self.varint()?;
                self.skip(len)
            }
            9 | 10 => {
                let (len, kind) = self.list()?;
                // Every element has at least one byte; in lists, so do booleans.
                (0..len).try_for_each(|_| self.skip_element(kind, depth))
            }
            12 => self.fields(depth + 1, |_, _, _| Ok(false)),
            _ => Err(Error::decode(format!(
                "unknown type {kind} in a page header"
            ))),
        }
    }

    fn skip_element(&mut self, kind: u8, depth: u32) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(Error::decode("a page header is nested too deeply"));
        }
        match kind {
            1 | 2 => self.skip(1),
            kind => self.skip_value(kind, depth + 1),
        }
    }
}

fn number(what: &str, value: i64) -> Result<usize> {
    u32::try_from(value)
        .ok()
        .filter(|value| *value <= i32::MAX as u32)
        .map(|value| value as usize)
        .ok_or_else(|| Error::decode(format!("a page header says {value} {what}")))
}

impl Header {
    /// Parses the header at the start of `bytes`. Returns it and its length.
    pub(super) fn parse(bytes: &[u8]) -> Result<(Self, usize)> {
        let mut thrift = Thrift::new(bytes);
        let mut kind = None;
        let mut uncompressed = None;
        let mut compressed = None;
        let mut crc = None;
        let mut data = None;
        let mut data_v2 = None;
        let mut dictionary = None;
        thrift.fields(0, |thrift, id, of| {
            match (id, of) {
                (1, 5) => kind = Some(thrift.zigzag()?),
                (2, 5) => uncompressed = Some(number("bytes when unpacked", thrift.zigzag()?)?),
                (3, 5) => compressed = Some(number("bytes", thrift.zigzag()?)?),
                (4, 5) => crc = Some(thrift.zigzag()? as i32 as u32),
                (5, 12) => data = Some(numbers(thrift, 4)?),
                (7, 12) => dictionary = Some(numbers(thrift, 2)?),
                (8, 12) => data_v2 = Some(numbers(thrift, 7)?),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        let missing = |what: &str| Error::decode(format!("a page header without {what}"));
        let uncompressed = uncompressed.ok_or_else(|| missing("its unpacked size"))?;
        let compressed = compressed.ok_or_else(|| missing("its size"))?;
        let mut header = Self {
            kind: PageKind::Other,
            uncompressed,
            compressed,
            crc,
            values: 0,
            encoding: PLAIN,
            def_encoding: RLE,
            rep_encoding: RLE,
        };
        match kind.ok_or_else(|| missing("its type"))? {
            0 => {
                let [values, encoding, def_encoding, rep_encoding, ..] =
                    data.ok_or_else(|| missing("data"))?;
                header.kind = PageKind::Data;
                header.values = number("values", values)?;
                header.encoding = encoding as i32;
                header.def_encoding = def_encoding as i32;
                header.rep_encoding = rep_encoding as i32;
            }
            2 => {
                let [values, encoding, ..] = dictionary.ok_or_else(|| missing("its dictionary"))?;
                header.kind = PageKind::Dictionary;
                header.values = number("values", values)?;
                header.encoding = encoding as i32;
            }
            3 => {
                let [values, nulls, rows, encoding, def, rep, compressed] =
                    data_v2.ok_or_else(|| missing("data of version 2"))?;
                header.values = number("values", values)?;
                header.encoding = encoding as i32;
                header.kind = PageKind::DataV2 {
                    nulls: number("nulls", nulls)? as u32,
                    rows: number("rows", rows)? as u32,
                    def_bytes: number("bytes of definition levels", def)? as u32,
                    rep_bytes: number("bytes of repetition levels", rep)? as u32,
                    compressed: compressed != 0,
                };
            }
            _ => {}
        }
        Ok((header, thrift.at))
    }
}

/// Reads fields 1 to `count` of a structure; booleans are 0 or 1. Field 7 (version 2: page is
/// compressed) defaults to true.
fn numbers(thrift: &mut Thrift<'_>, count: i64) -> Result<[i64; 7]> {
    let mut out = [0, 0, 0, 0, 0, 0, 1];
    thrift.fields(1, |thrift, id, of| {
        if id < 1 || id > count {
            return Ok(false);
        }
        out[id as usize - 1] = match of {
            1 => 1,
            2 => 0,
            4..=6 => thrift.zigzag()?,
            _ => return Ok(false),
        };
        Ok(true)
    })?;
    Ok(out)
}

/// Maximum nesting of columns: the parquet crate recurses per level, and no file may choose the
/// stack's depth.
const NESTED_MAX: usize = 64;
/// Maximum number of schema elements, of row groups, and of key-value entries in a footer: memory
/// for all is allocated at once.
const ELEMENTS_MAX: usize = 1 << 20;

/// Types of a column's metadata fields, from field 1, as the format defines them.
const METADATA: [u8; 17] = [5, 9, 9, 5, 6, 6, 6, 9, 6, 6, 6, 12, 9, 6, 5, 12, 12];

/// Walks a footer before it is parsed: every list has all its elements, and the schema is a tree of
/// bounded depth.
///
/// Returns the footer without the column metadata fields whose type differs from the format's, if
/// it has any. The format tells readers to skip them (Dremio wrote some), but the parquet crate
/// identifies fields by number alone.
///
/// `annotated` receives the leaf columns whose type has an annotation.
///
/// Errors: [`ErrorKind::Decode`], [`ErrorKind::Limit`].
pub(super) fn check_footer(
    footer: &[u8],
    annotated: &mut Vec<Annotated>,
) -> Result<Option<Vec<u8>>> {
    let mut thrift = Thrift::new(footer);
    let mut foreign = Vec::new();
    thrift.fields(0, |thrift, id, of| {
        if of != 9 || !matches!(id, 2 | 4 | 5) {
            return Ok(false);
        }
        let (len, kind) = thrift.list()?;
        let len = usize::try_from(len)
            .ok()
            .filter(|len| *len <= ELEMENTS_MAX)
            .ok_or_else(|| {
                let message =
                    format!("a footer with a list of {len} elements, the limit is {ELEMENTS_MAX}");
                Error::new(ErrorKind::Limit, Stage::Index, message)
            })?;
        match (id, kind) {
            (2, kind) => schema(thrift, len, kind, annotated)?,
            (4, 12) => (0..len).try_for_each(|_| row_group(thrift, &mut foreign))?,
            (_, kind) => (0..len).try_for_each(|_| thrift.skip_element(kind, 1))?,
        }
        Ok(true)
    })?;
    without(footer, &foreign)
}

/// A leaf column whose schema element has annotations: its number, its element, and the
/// annotations.
pub(super) struct Annotated {
    pub(super) leaf: usize,
    element: std::ops::Range<usize>,
    fields: Vec<Foreign>,
}

impl Annotated {
    /// A footer without rows whose only column is this element.
    pub(super) fn alone(&self, footer: &[u8]) -> Vec<u8> {
        let element = footer.get(self.element.clone()).unwrap_or_default();
        // Version 1; two elements: `r` with one child, then the column; no rows, no row groups.
        [
            &[0x15, 2, 0x19, 0x2c, 0x48, 1, b'r', 0x15, 2, 0],
            element,
            &[0x16, 0, 0x19, 0x0c, 0],
        ]
        .concat()
    }
}

/// The footer without the annotations of these columns.
pub(super) fn without_annotations(
    footer: &[u8],
    columns: Vec<Annotated>,
) -> Result<Option<Vec<u8>>> {
    let fields: Vec<Foreign> = columns
        .into_iter()
        .flat_map(|column| column.fields)
        .collect();
    without(footer, &fields)
}

/// A field to remove: its byte range, and its number minus the number of the field before it.
struct Foreign {
    bytes: std::ops::Range<usize>,
    step: u8,
}

fn row_group(thrift: &mut Thrift<'_>, foreign: &mut Vec<Foreign>) -> Result<()> {
    thrift.fields(1, |thrift, id, of| {
        if (id, of) != (1, 9) {
            return Ok(false);
        }
        let (len, kind) = thrift.list()?;
        for _ in 0..len {
            if kind != 12 {
                thrift.skip_element(kind, 2)?;
                continue;
            }
            thrift.fields(2, |thrift, id, of| match (id, of) {
                (3, 12) => column_metadata(thrift, foreign).map(|()| true),
                (8, 12) => Err(Error::decode(
                    "a column is encrypted, which is not supported",
                )),
                _ => Ok(false),
            })?;
        }
        Ok(true)
    })
}

fn column_metadata(thrift: &mut Thrift<'_>, foreign: &mut Vec<Foreign>) -> Result<()> {
    let mut before = 0;
    thrift.fields(3, |thrift, id, of| {
        let start = thrift.field_at;
        let step = id.saturating_sub(std::mem::replace(&mut before, id));
        let defined = usize::try_from(id.saturating_sub(1))
            .ok()
            .and_then(|place| METADATA.get(place));
        if defined.is_none_or(|defined| *defined == of) {
            return Ok(false);
        }
        thrift.skip_value(of, 3)?;
        foreign.push(Foreign {
            bytes: start..thrift.at,
            step: u8::try_from(step).unwrap_or(u8::MAX),
        });
        Ok(true)
    })
}

/// The footer without these fields. A field's number is stored relative to the field before, so
/// removing a field increases the number stored with the next field.
fn without(footer: &[u8], foreign: &[Foreign]) -> Result<Option<Vec<u8>>> {
    if foreign.is_empty() {
        return Ok(None);
    }
    let mut out = Vec::with_capacity(footer.len());
    let mut at = 0;
    let mut longer = 0_u8;
    for (index, Foreign { bytes, step }) in foreign.iter().enumerate() {
        out.extend_from_slice(&footer[at..bytes.start]);
        at = bytes.end;
        longer = longer.saturating_add(*step);
        if foreign
            .get(index + 1)
            .is_some_and(|next| next.bytes.start == at)
        {
            continue;
        }
        let next = footer.get(at).copied().unwrap_or(0);
        if next >> 4 != 0 {
            let step = (next >> 4).checked_add(longer).filter(|step| *step < 16);
            let step = step.ok_or_else(|| {
                Error::decode("fields of column metadata have other types than the format's")
            })?;
            out.push(step << 4 | next & 0x0f);
            at += 1;
        }
        longer = 0;
    }
    out.extend_from_slice(&footer[at..]);
    Ok(Some(out))
}

/// Walks the elements of a schema, each group before its children.
fn schema(
    thrift: &mut Thrift<'_>,
    len: usize,
    kind: u8,
    annotated: &mut Vec<Annotated>,
) -> Result<()> {
    // Number of children still to come in each open group.
    let mut open: Vec<usize> = Vec::new();
    let mut leaf: usize = 0;
    for element in 0..len {
        let mut children = 0;
        let mut before = 0;
        let mut fields = Vec::new();
        let start = thrift.at;
        if kind != 12 {
            return Err(Error::decode(
                "the schema has an element that is not a structure",
            ));
        }
        thrift.fields(1, |thrift, id, of| {
            match (
                id,
                of,
                id.saturating_sub(std::mem::replace(&mut before, id)),
            ) {
                // Converted type, scale, precision, logical type.
                (6..=8 | 10, of, step) => {
                    let start = thrift.field_at;
                    thrift.skip_value(of, 2)?;
                    fields.push(Foreign {
                        bytes: start..thrift.at,
                        step: u8::try_from(step).unwrap_or(u8::MAX),
                    });
                    Ok(true)
                }
                (5, 5, _) => {
                    let there = len - element - 1;
                    let said = thrift.zigzag()?;
                    children = usize::try_from(said)
                        .ok()
                        .filter(|children| *children <= there)
                        .ok_or_else(|| {
                            Error::decode(format!(
                                "a group of {said} columns, the schema has {there} left"
                            ))
                        })?;
                    Ok(true)
                }
                _ => Ok(false),
            }
        })?;
        if children == 0 && element > 0 {
            if !fields.is_empty() {
                annotated.push(Annotated {
                    leaf,
                    element: start..thrift.at,
                    fields,
                });
            }
            leaf += 1;
        }
        if let Some(left) = open.last_mut() {
            *left = left.saturating_sub(1);
        }
        if children > 0 {
            open.push(children);
        }
        if open.len() > NESTED_MAX {
            let message = format!("columns nested deeper than {NESTED_MAX}");
            return Err(Error::new(ErrorKind::Limit, Stage::Index, message));
        }
        while open.last() == Some(&0) {
            open.pop();
        }
    }
    Ok(())
}

/// A page: its header and its body.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a> {
    pub(super) header: Header,
    /// As stored, possibly compressed.
    pub(super) body: &'a [u8],
}

/// Walks the pages of (a part of) a column chunk.
pub(super) struct Pages {
    /// Bytes of all pages.
    pub(super) bytes: Bytes,
    at: usize,
    /// Offset of `bytes` in the file, for errors.
    base: u64,
    /// How many more unpacked bytes the footer allows for the remaining pages.
    room: usize,
}

impl Pages {
    /// `uncompressed`: the footer's unpacked size of all pages with their headers. `base`: offset
    /// of `bytes` in the file.
    pub(super) fn new(bytes: &Bytes, uncompressed: usize, base: u64) -> Self {
        Self {
            bytes: bytes.clone(),
            at: 0,
            base,
            room: uncompressed,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    fn located(&self, error: Error) -> Error {
        error.with_range(
            self.base + self.at as u64,
            (self.bytes.len() - self.at) as u64,
        )
    }

    /// The next page's header and its length, without advancing.
    pub(super) fn head(&self) -> Result<Option<(Header, usize)>> {
        let rest = &self.bytes[self.at..];
        if rest.is_empty() {
            Ok(None)
        } else {
            Header::parse(rest)
                .map(Some)
                .map_err(|error| self.located(error))
        }
    }

    /// The next page, after checking its sizes against the available bytes and its checksum, if
    /// any.
    pub(super) fn next(&mut self) -> Result<Option<Page<'_>>> {
        let Some((header, len)) = self.head()? else {
            return Ok(None);
        };
        let start = self.at + len;
        let Some(end) = start
            .checked_add(header.compressed)
            .filter(|end| *end <= self.bytes.len())
        else {
            let there = self.bytes.len() - start;
            let message = format!(
                "a page of {} bytes, the chunk has {there} left",
                header.compressed
            );
            return Err(self.located(Error::new(ErrorKind::Truncated, Stage::Decode, message)));
        };
        let Some(room) = self.room.checked_sub(header.uncompressed) else {
            let message = format!(
                "a page unpacks to {} bytes, the footer allows {}",
                header.uncompressed, self.room
            );
            return Err(self.located(Error::new(ErrorKind::Limit, Stage::Decode, message)));
        };
        if let Some(crc) = header.crc
            && crc32fast::hash(&self.bytes[start..end]) != crc
        {
            let message = "a page does not match its checksum";
            return Err(Error::decode(message)
                .with_range(self.base + start as u64, header.compressed as u64));
        }
        self.room = room;
        self.at = end;
        Ok(Some(Page {
            header,
            body: &self.bytes[start..end],
        }))
    }
}

/// Whether `count` levels in the RLE / bit-packed hybrid are all `max`, so that no value is
/// missing. False for malformed bytes.
pub(super) fn all_defined(mut levels: &[u8], mut count: usize, max: i16) -> bool {
    let bits = 16 - (max as u16).leading_zeros() as usize;
    let width = bits.div_ceil(8);
    while count > 0 {
        let mut thrift = Thrift::new(levels);
        let Ok(header) = thrift.varint() else {
            return false;
        };
        levels = &levels[thrift.at..];
        if header & 1 == 0 {
            let run = usize::try_from(header >> 1).unwrap_or(usize::MAX);
            let Some((value, rest)) = levels.split_at_checked(width) else {
                return false;
            };
            let value = value
                .iter()
                .rev()
                .fold(0_u32, |value, byte| value << 8 | u32::from(*byte));
            if run == 0 || value != max as u32 {
                return false;
            }
            levels = rest;
            count = count.saturating_sub(run);
        } else {
            // A group of `bits` bytes holds eight values.
            let groups = usize::try_from(header >> 1).unwrap_or(usize::MAX);
            let here = count.min(groups.saturating_mul(8));
            let Some(bytes) = levels.get(..groups.saturating_mul(bits).min(levels.len())) else {
                return false;
            };
            if here == 0 || bytes.len() < (here * bits).div_ceil(8) {
                return false;
            }
            let value = |index: usize| {
                (0..bits).fold(0_u32, |value, bit| {
                    let at = index * bits + bit;
                    value | u32::from(bytes[at / 8] >> (at % 8) & 1) << bit
                })
            };
            if (0..here).any(|index| value(index) != max as u32) {
                return false;
            }
            levels = &levels[bytes.len()..];
            count -= here;
        }
    }
    true
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn varint(mut value: u64, out: &mut Vec<u8>) {
        while value >= 0x80 {
            out.push(value as u8 | 0x80);
            value >>= 7;
        }
        out.push(value as u8);
    }

    pub(crate) fn zigzag(value: i64, out: &mut Vec<u8>) {
        varint(((value << 1) ^ (value >> 63)) as u64, out);
    }

    /// A version 1 header as writers produce it.
    fn header(uncompressed: i32, compressed: i32, crc: Option<i32>, values: i32) -> Vec<u8> {
        let mut out = vec![0x15];
        zigzag(0, &mut out);
        for size in [uncompressed, compressed] {
            out.push(0x15);
            zigzag(i64::from(size), &mut out);
        }
        if let Some(crc) = crc {
            out.push(0x15);
            zigzag(i64::from(crc), &mut out);
        }
        out.push(if crc.is_some() { 0x1c } else { 0x2c });
        for number in [i64::from(values), 0, 3, 3] {
            out.push(0x15);
            zigzag(number, &mut out);
        }
        out.extend([0, 0]);
        out
    }

    #[test]
    fn a_parsed_header_has_its_fields_and_length() {
        for crc in [None, Some(-5)] {
            let bytes = header(1000, 600, crc, 250);
            let (parsed, len) = Header::parse(&[&bytes[..], &[7; 9]].concat()).unwrap();
            assert_eq!(len, bytes.len());
            assert_eq!(
                (parsed.kind, parsed.uncompressed, parsed.compressed),
                (PageKind::Data, 1000, 600)
            );
            assert_eq!(
                (parsed.crc, parsed.values, parsed.encoding),
                (crc.map(|crc| crc as u32), 250, PLAIN)
            );
        }
    }

    #[test]
    fn a_header_cut_at_any_byte_is_an_error() {
        let bytes = header(1000, 600, Some(77), 250);
        for len in 0..bytes.len() {
            assert!(Header::parse(&bytes[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn page_sizes_are_checked_before_use() {
        let page = |uncompressed, compressed| {
            let mut bytes = header(uncompressed, compressed, None, 1);
            bytes.extend([0; 100]);
            bytes
        };
        let kind = |bytes: Vec<u8>| Pages::new(&bytes.into(), 100, 0).next().unwrap_err().kind();
        assert_eq!(kind(page(100, 101)), ErrorKind::Truncated);
        assert_eq!(kind(page(i32::MAX, 100)), ErrorKind::Limit);
        assert_eq!(kind(page(-1, 100)), ErrorKind::Decode);
        let bytes = page(100, 100).into();
        let mut pages = Pages::new(&bytes, 100, 0);
        assert_eq!(pages.next().unwrap().unwrap().body.len(), 100);
        assert!(pages.next().unwrap().is_none());
    }

    #[test]
    fn a_wrong_checksum_is_an_error() {
        for wrong in [0, 1] {
            let mut bytes = header(3, 3, Some((crc32fast::hash(b"abc") ^ wrong) as i32), 1);
            bytes.extend(b"abc");
            assert_eq!(Pages::new(&bytes.into(), 3, 0).next().is_err(), wrong == 1);
        }
    }

    /// The naive oracle: decodes all levels one after the other.
    fn levels(bytes: &[u8], bits: usize, count: usize) -> Option<Vec<u32>> {
        let mut out = Vec::new();
        let mut at = 0;
        while out.len() < count {
            let mut header = 0_u64;
            let mut shift = 0;
            loop {
                let byte = *bytes.get(at)?;
                at += 1;
                header |= u64::from(byte & 0x7f) << shift;
                shift += 7;
                if byte & 0x80 == 0 {
                    break;
                }
                if shift > 63 {
                    return None;
                }
            }
            if header & 1 == 0 {
                let width = bits.div_ceil(8);
                let value = bytes
                    .get(at..at + width)?
                    .iter()
                    .rev()
                    .fold(0, |value, byte| value << 8 | u32::from(*byte));
                at += width;
                if header == 0 {
                    return None;
                }
                (0..(header >> 1).min(count as u64 * 2)).for_each(|_| out.push(value));
            } else {
                let all = ((header >> 1) as usize).saturating_mul(8);
                for index in 0..all.min(count - out.len()) {
                    let mut value = 0;
                    for bit in 0..bits {
                        let place = index * bits + bit;
                        value |= u32::from(*bytes.get(at + place / 8)? >> (place % 8) & 1) << bit;
                    }
                    out.push(value);
                }
                if all == 0 {
                    return None;
                }
                at = at.saturating_add(((header >> 1) as usize).saturating_mul(bits));
            }
        }
        out.truncate(count);
        Some(out)
    }

    proptest! {
        #[test]
        fn all_defined_agrees_with_the_naive_reader(
            runs in prop::collection::vec((any::<bool>(), 1_usize..40, prop::bool::weighted(0.9)), 1..5), max in 1_i16..4
        ) {
            let bits = 16 - (max as u16).leading_zeros() as usize;
            let mut bytes = Vec::new();
            let mut count = 0;
            for (packed, len, defined) in runs {
                let value = if defined { max as u32 } else { 0 };
                if packed {
                    varint((len as u64) << 1 | 1, &mut bytes);
                    let mut word = vec![0_u8; len * bits];
                    for place in 0..len * 8 * bits {
                        word[place / 8] |= ((value >> (place % bits) & 1) as u8) << (place % 8);
                    }
                    bytes.extend(word);
                    count += len * 8;
                } else {
                    varint((len as u64) << 1, &mut bytes);
                    bytes.push(value as u8);
                    count += len;
                }
            }
            let expected = levels(&bytes, bits, count).is_some_and(|levels| levels.iter().all(|level| *level == max as u32));
            prop_assert_eq!(all_defined(&bytes, count, max), expected);
        }

        #[test]
        fn no_bytes_make_the_page_walker_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), count in 0_usize..500, max in 1_i16..5) {
            let _ = Header::parse(&bytes);
            let mut pages = Pages::new(&bytes.clone().into(), 1 << 20, 0);
            while let Ok(Some(_)) = pages.next() {}
            let bits = 16 - (max as u16).leading_zeros() as usize;
            let expected = levels(&bytes, bits, count).is_some_and(|levels| levels.iter().all(|level| *level == max as u32));
            prop_assert_eq!(all_defined(&bytes, count, max), expected);
        }
    }
}
