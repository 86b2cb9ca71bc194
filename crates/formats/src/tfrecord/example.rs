//! `tf.train.Example`: a parser for the part of protobuf's wire format that this message needs.
//!
//! ```text
//! Example ─1─► Features ─1─► entry (one per name) ─1─► name
//!                                                 └─2─► Feature ─1─► BytesList   ─1─► bytes, bytes, …
//!                                                              ├─2─► FloatList   ─1─► f32, …   (packed or one by one)
//!                                                              └─3─► Int64List   ─1─► varint, … (packed or one by one)
//! ```
//!
//! Limits: five levels, no recursion, no memory except for the caller's buffer; time is linear in
//! the bytes. Invariants: repeated parts follow protobuf: the last entry of a name wins; several
//! pieces of one feature's list are joined, unless a list of another kind is between them; unknown
//! fields are skipped. Stricter than protobuf: a known field of the wrong wire type, a group, and a
//! varint over 64 bits are errors, since damage looks like that.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;

/// Limits for the error of a missing feature: number of names listed, and bytes of each.
const NAMES_LISTED: usize = 12;
const NAME_LISTED: usize = 48;

/// Kind of a feature's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListKind {
    Bytes,
    Floats,
    Ints,
}

impl ListKind {
    /// The kind's name, and the setting that reads such a list.
    fn words(self) -> (&'static str, Setting) {
        match self {
            Self::Bytes => ("a bytes list", Setting::BytesFeature),
            Self::Floats => ("a float list", Setting::FloatsFeature),
            Self::Ints => ("an int64 list", Setting::IntsFeature),
        }
    }
}

/// Hint for a list without values. There is none for bytes, since a picture must have a value.
pub(super) fn zeros(kind: ListKind) -> String {
    if kind == ListKind::Bytes {
        String::new()
    } else {
        format!("; {} reads it as zeros", Setting::MissingZero)
    }
}

/// One feature of an example: its list, which may be in several pieces.
#[derive(Clone)]
pub struct Feature<'a> {
    lists: Lists<'a>,
}

impl<'a> Feature<'a> {
    /// Finds the feature `name`, which must be of kind `kind`. `context_only` skips the feature
    /// lists of a `tf.train.SequenceExample`.
    ///
    /// Errors: [`ErrorKind::Decode`] for malformed bytes, and for feature lists;
    /// [`ErrorKind::Shape`] if the feature is missing or of another kind.
    pub fn find(example: &'a [u8], name: &str, kind: ListKind, context_only: bool) -> Result<Self> {
        let lists = Self::lists(example, name, context_only)?
            .ok_or_else(|| missing(example, name, kind))?;
        // A list of another kind discards those before it.
        let mut pieces = lists.clone();
        let mut found = None;
        let mut index = 0;
        let mut start = 0;
        while let Some((kind, _)) = pieces.next()? {
            if found.replace(kind) != Some(kind) {
                start = index;
            }
            index += 1;
        }
        if found != Some(kind) {
            let (there, advice) = found.map_or_else(
                || ("empty", zeros(kind)),
                |found| (found.words().0, format!("; read it by {}", found.words().1)),
            );
            let wanted = kind.words().0;
            return Err(shape(format!(
                "feature {} is {there}, not {wanted}{advice}",
                listed(name.as_bytes())
            )));
        }
        let mut lists = lists;
        for _ in 0..start {
            lists.next()?;
        }
        Ok(Self { lists })
    }

    /// Whether the feature is missing or has no values, of any kind.
    pub(crate) fn is_empty(example: &'a [u8], name: &str, context_only: bool) -> Result<bool> {
        let Some(mut lists) = Self::lists(example, name, context_only)? else {
            return Ok(true);
        };
        while let Some((kind, mut list)) = lists.next()? {
            while let Some((_, _, value)) = list.next()? {
                // A packed list may be empty.
                if kind == ListKind::Bytes || !matches!(value, FeatureValue::Bytes([])) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn lists(example: &'a [u8], name: &str, context_only: bool) -> Result<Option<Lists<'a>>> {
        let mut last = None;
        let mut message = Wire::new(example, 0);
        while let Some(mut entries) = message.features(context_only)? {
            while let Some(entry) = entries.message(1, "feature")? {
                if key(entry.clone())? == name.as_bytes() {
                    last = Some(entry);
                }
            }
        }
        Ok(last.map(Lists::new))
    }

    /// The only value of a bytes list. Errors: [`ErrorKind::Shape`] for none or several values.
    pub fn one_bytes(&self) -> Result<&'a [u8]> {
        let mut lists = self.lists.clone();
        let mut count = 0;
        let mut value = None;
        while let Some((_, mut list)) = lists.next()? {
            while let Some(bytes) = list.message(1, "value")? {
                value.get_or_insert(bytes.bytes);
                count += 1;
            }
        }
        value
            .filter(|_| count == 1)
            .ok_or_else(|| shape(format!("{count} values, expected 1")))
    }

    /// The values of a float list in memory layout: in place if they are one packed run, else in
    /// `buffer`, of which at most `bytes_max` bytes are used.
    ///
    /// Errors: [`ErrorKind::Shape`] if there are more values.
    pub fn floats(&self, bytes_max: usize, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let mut runs = 0;
        let mut len = 0_usize;
        let mut only = None;
        self.each_floats(|run| {
            runs += 1;
            len += run.len();
            only = Some(run);
            Ok(())
        })?;
        if len > bytes_max {
            return Err(too_many(len / 4, bytes_max / 4));
        }
        if let (1, Some(run)) = (runs, only) {
            return Ok(run);
        }
        buffer.reserve_exact(len);
        self.each_floats(|run| {
            buffer.extend_from_slice(run);
            Ok(())
        })?;
        Ok(buffer)
    }

    fn each_floats(&self, mut run: impl FnMut(&'a [u8]) -> Result<()>) -> Result<()> {
        let mut lists = self.lists.clone();
        while let Some((_, mut list)) = lists.next()? {
            while let Some((number, at, value)) = list.next()? {
                match (number, value) {
                    (1, FeatureValue::Fixed32(value)) => run(value)?,
                    (1, FeatureValue::Bytes(values)) if values.len() % 4 == 0 => run(values)?,
                    (1, FeatureValue::Bytes(values)) => {
                        return Err(bad(
                            at,
                            format!(
                                "{} bytes of packed floats, not a multiple of 4",
                                values.len()
                            ),
                        ));
                    }
                    (1, other) => return Err(wrong_type(at, "value of a float list", other)),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The values of an int64 list in memory layout, in `buffer`, of which at most `bytes_max`
    /// bytes are used.
    ///
    /// Errors: [`ErrorKind::Shape`] if there are more values.
    pub fn ints(&self, bytes_max: usize, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let mut lists = self.lists.clone();
        let mut encoded = 0_usize;
        while let Some((_, list)) = lists.next()? {
            encoded += list.bytes.len();
        }
        // One allocation is enough: a varint has at least one byte.
        buffer.reserve_exact(encoded.saturating_mul(8).min(bytes_max));
        let mut lists = self.lists.clone();
        while let Some((_, mut list)) = lists.next()? {
            while let Some((number, at, value)) = list.next()? {
                match (number, value) {
                    (1, FeatureValue::Varint(value)) => push_int(value, bytes_max, buffer)?,
                    (1, FeatureValue::Bytes(values)) => {
                        let mut values = Wire::new(values, at);
                        while !values.at_end() {
                            push_int(values.varint()?, bytes_max, buffer)?;
                        }
                    }
                    (1, other) => return Err(wrong_type(at, "value of an int64 list", other)),
                    _ => {}
                }
            }
        }
        Ok(buffer)
    }
}

fn push_int(value: u64, bytes_max: usize, buffer: &mut Vec<u8>) -> Result<()> {
    if buffer.len() + 8 > bytes_max {
        return Err(too_many(bytes_max / 8 + 1, bytes_max / 8));
    }
    buffer.extend_from_slice(&value.to_ne_bytes());
    Ok(())
}

/// The name of an entry; an entry without one is called "".
fn key(mut entry: Wire<'_>) -> Result<&[u8]> {
    let mut name: &[u8] = &[];
    while let Some((number, at, value)) = entry.next()? {
        match (number, value) {
            (1, FeatureValue::Bytes(bytes)) => name = bytes,
            (1 | 2, other) if !matches!(other, FeatureValue::Bytes(_)) => {
                return Err(wrong_type(at, "entry", other));
            }
            _ => {}
        }
    }
    Ok(name)
}

/// Iterator over the lists in all values of an entry.
#[derive(Clone)]
struct Lists<'a> {
    entry: Wire<'a>,
    feature: Wire<'a>,
}

impl<'a> Lists<'a> {
    fn new(entry: Wire<'a>) -> Self {
        Self {
            entry,
            feature: Wire::new(&[], 0),
        }
    }

    fn next(&mut self) -> Result<Option<(ListKind, Wire<'a>)>> {
        loop {
            while let Some((number, at, value)) = self.feature.next()? {
                let kind = match number {
                    1 => ListKind::Bytes,
                    2 => ListKind::Floats,
                    3 => ListKind::Ints,
                    _ => continue,
                };
                return match value {
                    FeatureValue::Bytes(bytes) => Ok(Some((kind, Wire::new(bytes, at)))),
                    other => Err(wrong_type(at, kind.words().0, other)),
                };
            }
            match self.entry.message(2, "value of an entry")? {
                Some(feature) => self.feature = feature,
                None => return Ok(None),
            }
        }
    }
}

/// Reader of a message's fields. Positions in errors are counted from the example's first byte.
#[derive(Clone)]
struct Wire<'a> {
    bytes: &'a [u8],
    base: usize,
    at: usize,
}

#[derive(Clone, Copy)]
enum FeatureValue<'a> {
    Varint(u64),
    Fixed64,
    Bytes(&'a [u8]),
    Fixed32(&'a [u8]),
}

impl<'a> Wire<'a> {
    fn new(bytes: &'a [u8], base: usize) -> Self {
        Self { bytes, base, at: 0 }
    }

    fn at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// The next message (or bytes) field with number `wanted`; skips others.
    fn message(&mut self, wanted: u32, what: &str) -> Result<Option<Wire<'a>>> {
        while let Some((number, at, value)) = self.next()? {
            match value {
                FeatureValue::Bytes(bytes) if number == wanted => {
                    return Ok(Some(Wire::new(bytes, at)));
                }
                other if number == wanted => return Err(wrong_type(at, what, other)),
                _ => {}
            }
        }
        Ok(None)
    }

    /// The next `features` of an example. In a `tf.train.SequenceExample` this field holds the
    /// context; feature lists are in field 2, which an example does not have.
    fn features(&mut self, context_only: bool) -> Result<Option<Wire<'a>>> {
        while let Some((number, at, value)) = self.next()? {
            match (number, value) {
                (1, FeatureValue::Bytes(bytes)) => return Ok(Some(Wire::new(bytes, at))),
                (1, other) => return Err(wrong_type(at, "features", other)),
                (2, FeatureValue::Bytes(lists)) if !lists.is_empty() && !context_only => {
                    return Err(sequence(lists));
                }
                _ => {}
            }
        }
        Ok(None)
    }

    /// The next field: number, position of its content, content.
    fn next(&mut self) -> Result<Option<(u32, usize, FeatureValue<'a>)>> {
        if self.at_end() {
            return Ok(None);
        }
        let start = self.base + self.at;
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3)
            .ok()
            .filter(|number| (1..1 << 29).contains(number));
        let number =
            number.ok_or_else(|| bad(start, format!("a field with the number {}", tag >> 3)))?;
        let mut at = self.base + self.at;
        let value = match tag & 7 {
            0 => FeatureValue::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                FeatureValue::Fixed64
            }
            2 => {
                let len = self.varint()?;
                at = self.base + self.at;
                FeatureValue::Bytes(self.take(len)?)
            }
            5 => FeatureValue::Fixed32(self.take(4)?),
            other => return Err(bad(start, format!("field {number} has wire type {other}"))),
        };
        Ok(Some((number, at, value)))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(len).ok().and_then(|len| rest.get(..len));
        let taken = taken.ok_or_else(|| {
            bad(
                self.base + self.at,
                format!("{len} bytes, {} are left", rest.len()),
            )
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0_u64;
        for (index, byte) in self.bytes[self.at..].iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte & 0x80 == 0 {
                // A 64-bit varint has at most one bit in its tenth byte.
                if index == 9 && *byte > 1 {
                    break;
                }
                self.at += index + 1;
                return Ok(value);
            }
        }
        let what = if self.bytes.len() - self.at < 10 {
            "a varint that does not end"
        } else {
            "a varint over 64 bits"
        };
        Err(bad(self.base + self.at, what.to_string()))
    }
}

#[cold]
fn bad(at: usize, what: String) -> Error {
    Error::new(
        ErrorKind::Decode,
        Stage::Decode,
        format!("not a tf.train.Example: byte {at}: {what}"),
    )
}

#[cold]
fn wrong_type(at: usize, what: &str, found: FeatureValue<'_>) -> Error {
    let found = match found {
        FeatureValue::Varint(_) => "a varint",
        FeatureValue::Fixed64 => "8 bytes",
        FeatureValue::Bytes(_) => "a length and bytes",
        FeatureValue::Fixed32(_) => "4 bytes",
    };
    bad(at, format!("{what} is {found} on the wire"))
}

#[cold]
fn shape(message: String) -> Error {
    Error::new(ErrorKind::Shape, Stage::Decode, message)
}

#[cold]
fn too_many(count: usize, max: usize) -> Error {
    shape(format!("at least {count} values, at most {max} expected"))
}

/// Error for a missing feature; lists the existing names.
#[cold]
fn missing(example: &[u8], name: &str, kind: ListKind) -> Error {
    let mut features = Wire::new(example, 0);
    // An earlier walk over these bytes found no error.
    let messages = std::iter::from_fn(|| features.message(1, "").ok().flatten());
    let there = names(messages).map_or("the example has none".to_string(), |names| {
        format!("there are {names}")
    });
    shape(format!(
        "no feature {}; {there}{}",
        listed(name.as_bytes()),
        zeros(kind)
    ))
}

#[cold]
fn sequence(lists: &[u8]) -> Error {
    let names = names([Wire::new(lists, 0)]).unwrap_or_default();
    let message =
        format!("this is a tf.train.SequenceExample; its feature lists are not supported: {names}");
    let context = Setting::ContextOnly.hint(|only| format!("; {only} reads only its context"));
    Error::new(ErrorKind::Decode, Stage::Decode, message + &context)
}

/// The names of the first entries in these messages, and how many more entries there are.
fn names<'a>(messages: impl IntoIterator<Item = Wire<'a>>) -> Option<String> {
    let mut names = Vec::new();
    let mut count = 0;
    for mut entries in messages {
        while let Ok(Some(entry)) = entries.message(1, "") {
            count += 1;
            if names.len() < NAMES_LISTED {
                names.extend(key(entry).ok().map(listed));
            }
        }
    }
    let more = if count > names.len() {
        format!(" and {} more", count - names.len())
    } else {
        String::new()
    };
    (!names.is_empty()).then(|| names.join(", ") + &more)
}

fn listed(name: &[u8]) -> String {
    let cut = &name[..name.len().min(NAME_LISTED)];
    let dots = if cut.len() < name.len() { "…" } else { "" };
    format!("{:?}{dots}", String::from_utf8_lossy(cut))
}

#[cfg(test)]
mod tests;
