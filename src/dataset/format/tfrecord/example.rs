//! `tf.train.Example`: a parser for the part of protobuf's wire format that this message needs.
//!
//! ```text
//! Example ─1─► Features ─1─► entry (one per name) ─1─► name
//!                                                 └─2─► Feature ─1─► BytesList   ─1─► bytes, bytes, …
//!                                                              ├─2─► FloatList   ─1─► f32, …   (packed or one by one)
//!                                                              └─3─► Int64List   ─1─► varint, … (packed or one by one)
//! ```
//!
//! Limits: five levels, no recursion, no memory except the caller's buffer; time is linear in the bytes. Invariants:
//! repeated parts follow protobuf: the last entry of a name wins; several pieces of one feature's list are joined,
//! unless a list of another kind stands between them; unknown fields are skipped. Stricter than protobuf: a known
//! field of the wrong wire type, a group, and a varint over 64 bits are errors, since damage looks like that.

use crate::error::{Error, ErrorKind, Result, Stage};
use crate::setting::Setting;

/// Limits for the error of a missing feature: number of names listed, and bytes of each.
const NAMES_LISTED: usize = 12;
const NAME_LISTED: usize = 48;

/// Kind of a feature's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListKind {
    Bytes,
    Floats,
    Ints,
}

impl ListKind {
    /// Its name, and what reads it.
    fn words(self) -> (&'static str, Setting) {
        match self {
            Self::Bytes => ("a bytes list", Setting::BytesFeature),
            Self::Floats => ("a float list", Setting::FloatsFeature),
            Self::Ints => ("an int64 list", Setting::IntsFeature),
        }
    }
}

/// Advice for a list without values. A picture must have some.
pub(super) fn zeros(kind: ListKind) -> String {
    if kind == ListKind::Bytes { String::new() } else { format!("; {} takes it as zeros", Setting::MissingZero) }
}

/// A feature of an example: all pieces of its list.
#[derive(Clone)]
pub(crate) struct Feature<'a> {
    lists: Lists<'a>,
}

impl<'a> Feature<'a> {
    /// Finds the feature `name`, which must be of kind `kind`. `context_only` skips the feature lists of a
    /// `tf.train.SequenceExample`.
    ///
    /// Errors: [`ErrorKind::Decode`] for malformed bytes, and for feature lists; [`ErrorKind::Shape`] if the feature is
    /// missing or of another kind.
    pub(crate) fn find(example: &'a [u8], name: &str, kind: ListKind, context_only: bool) -> Result<Self> {
        let lists = Self::lists(example, name, context_only)?.ok_or_else(|| missing(example, name, kind))?;
        // A list of another kind discards those before it.
        let mut pieces = lists.clone();
        let (mut found, mut index, mut start) = (None, 0, 0);
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
            return Err(shape(format!("feature {} is {there}, not {wanted}{advice}", listed(name.as_bytes()))));
        }
        let mut lists = lists;
        for _ in 0..start {
            lists.next()?;
        }
        Ok(Self { lists })
    }

    /// Whether the feature is missing or has no values, of any kind.
    pub(crate) fn is_empty(example: &'a [u8], name: &str, context_only: bool) -> Result<bool> {
        let Some(mut lists) = Self::lists(example, name, context_only)? else { return Ok(true) };
        while let Some((kind, mut list)) = lists.next()? {
            while let Some((_, _, value)) = list.next()? {
                // Packed numbers may be none.
                if kind == ListKind::Bytes || !matches!(value, Value::Bytes([])) {
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
    pub(crate) fn one_bytes(&self) -> Result<&'a [u8]> {
        let mut lists = self.lists.clone();
        let (mut count, mut value) = (0, None);
        while let Some((_, mut list)) = lists.next()? {
            while let Some(bytes) = list.message(1, "value")? {
                value.get_or_insert(bytes.bytes);
                count += 1;
            }
        }
        value.filter(|_| count == 1).ok_or_else(|| shape(format!("{count} values, expected 1")))
    }

    /// The values of a float list in memory layout: in place if they are one packed run, else in `buffer`, of which at
    /// most `bytes_max` bytes are used.
    ///
    /// Errors: [`ErrorKind::Shape`] if there are more values.
    pub(crate) fn floats(&self, bytes_max: usize, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let (mut runs, mut len, mut only) = (0, 0_usize, None);
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
                    (1, Value::Fixed32(value)) => run(value)?,
                    (1, Value::Bytes(values)) if values.len() % 4 == 0 => run(values)?,
                    (1, Value::Bytes(values)) => {
                        return Err(bad(at, format!("{} bytes of packed floats, not a multiple of 4", values.len())));
                    }
                    (1, other) => return Err(wrong_type(at, "value of a float list", other)),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The values of an int64 list in memory layout, in `buffer`, of which at most `bytes_max` bytes are used.
    ///
    /// Errors: [`ErrorKind::Shape`] if there are more values.
    pub(crate) fn ints(&self, bytes_max: usize, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
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
                    (1, Value::Varint(value)) => push_int(value, bytes_max, buffer)?,
                    (1, Value::Bytes(values)) => {
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
            (1, Value::Bytes(bytes)) => name = bytes,
            (1 | 2, other) if !matches!(other, Value::Bytes(_)) => return Err(wrong_type(at, "entry", other)),
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
        Self { entry, feature: Wire::new(&[], 0) }
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
                    Value::Bytes(bytes) => Ok(Some((kind, Wire::new(bytes, at)))),
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

/// Reader of a message's fields. Positions in errors count from the example's first byte.
#[derive(Clone)]
struct Wire<'a> {
    bytes: &'a [u8],
    base: usize,
    at: usize,
}

#[derive(Clone, Copy)]
enum Value<'a> {
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
                Value::Bytes(bytes) if number == wanted => return Ok(Some(Wire::new(bytes, at))),
                other if number == wanted => return Err(wrong_type(at, what, other)),
                _ => {}
            }
        }
        Ok(None)
    }

    /// The next `features` of an example. In a `tf.train.SequenceExample` its place holds the context; feature lists
    /// are in field 2, which an example does not have.
    fn features(&mut self, context_only: bool) -> Result<Option<Wire<'a>>> {
        while let Some((number, at, value)) = self.next()? {
            match (number, value) {
                (1, Value::Bytes(bytes)) => return Ok(Some(Wire::new(bytes, at))),
                (1, other) => return Err(wrong_type(at, "features", other)),
                (2, Value::Bytes(lists)) if !lists.is_empty() && !context_only => return Err(sequence(lists)),
                _ => {}
            }
        }
        Ok(None)
    }

    /// The next field: number, position of its content, content.
    fn next(&mut self) -> Result<Option<(u32, usize, Value<'a>)>> {
        if self.at_end() {
            return Ok(None);
        }
        let start = self.base + self.at;
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).ok().filter(|number| (1..1 << 29).contains(number));
        let number = number.ok_or_else(|| bad(start, format!("a field with the number {}", tag >> 3)))?;
        let mut at = self.base + self.at;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => {
                self.take(8)?;
                Value::Fixed64
            }
            2 => {
                let len = self.varint()?;
                at = self.base + self.at;
                Value::Bytes(self.take(len)?)
            }
            5 => Value::Fixed32(self.take(4)?),
            other => return Err(bad(start, format!("field {number} has wire type {other}"))),
        };
        Ok(Some((number, at, value)))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(len).ok().and_then(|len| rest.get(..len));
        let taken = taken.ok_or_else(|| bad(self.base + self.at, format!("{len} bytes, {} are left", rest.len())))?;
        self.at += taken.len();
        Ok(taken)
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0_u64;
        for (index, byte) in self.bytes[self.at..].iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte & 0x80 == 0 {
                // The tenth byte has room for one bit.
                if index == 9 && *byte > 1 {
                    break;
                }
                self.at += index + 1;
                return Ok(value);
            }
        }
        let what = if self.bytes.len() - self.at < 10 { "a varint that does not end" } else { "a varint over 64 bits" };
        Err(bad(self.base + self.at, what.to_string()))
    }
}

#[cold]
fn bad(at: usize, what: String) -> Error {
    Error::new(ErrorKind::Decode, Stage::Decode, format!("not a tf.train.Example: byte {at}: {what}"))
}

#[cold]
fn wrong_type(at: usize, what: &str, found: Value<'_>) -> Error {
    let found = match found {
        Value::Varint(_) => "a varint",
        Value::Fixed64 => "8 bytes",
        Value::Bytes(_) => "a length and bytes",
        Value::Fixed32(_) => "4 bytes",
    };
    bad(at, format!("{what} is {found} on the wire"))
}

#[cold]
fn shape(message: String) -> Error {
    Error::new(ErrorKind::Shape, Stage::Decode, message)
}

#[cold]
fn too_many(count: usize, max: usize) -> Error {
    shape(format!("{count} values or more, at most {max} expected"))
}

/// Error for a missing feature; lists the existing names.
#[cold]
fn missing(example: &[u8], name: &str, kind: ListKind) -> Error {
    let mut features = Wire::new(example, 0);
    // A first walk over these bytes found no error.
    let messages = std::iter::from_fn(|| features.message(1, "").ok().flatten());
    let there = names(messages).map_or("there is none".to_string(), |names| format!("there are {names}"));
    shape(format!("no feature {}; {there}{}", listed(name.as_bytes()), zeros(kind)))
}

#[cold]
fn sequence(lists: &[u8]) -> Error {
    let names = names([Wire::new(lists, 0)]).unwrap_or_default();
    let message = format!("this is a tf.train.SequenceExample; its feature lists are not supported: {names}");
    let context = Setting::ContextOnly.hint(|only| format!("; {only} reads its context alone"));
    Error::new(ErrorKind::Decode, Stage::Decode, message + &context)
}

/// The first names of the entries of these messages, and how many more there are.
fn names<'a>(messages: impl IntoIterator<Item = Wire<'a>>) -> Option<String> {
    let (mut names, mut count) = (Vec::new(), 0);
    for mut entries in messages {
        while let Ok(Some(entry)) = entries.message(1, "") {
            count += 1;
            if names.len() < NAMES_LISTED {
                names.extend(key(entry).ok().map(listed));
            }
        }
    }
    let more = if count > names.len() { format!(" and {} more", count - names.len()) } else { String::new() };
    (!names.is_empty()).then(|| names.join(", ") + &more)
}

fn listed(name: &[u8]) -> String {
    let cut = &name[..name.len().min(NAME_LISTED)];
    let dots = if cut.len() < name.len() { "…" } else { "" };
    format!("{:?}{dots}", String::from_utf8_lossy(cut))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// A list message as the oracle writes it: runs of values, each packed or one by one.
    #[derive(Clone, Debug)]
    enum List {
        Bytes(Vec<Vec<u8>>),
        Floats(Vec<(bool, Vec<u32>)>),
        Ints(Vec<(bool, Vec<i64>)>),
    }

    /// A name and the lists of each of its values.
    type Entry = (String, Vec<Vec<List>>);
    /// The entries of each `features` field.
    type Example = Vec<Vec<Entry>>;

    fn varint(mut value: u64, out: &mut Vec<u8>) {
        while value >= 0x80 {
            out.push(value as u8 | 0x80);
            value >>= 7;
        }
        out.push(value as u8);
    }

    fn tag(number: u64, wire: u64, out: &mut Vec<u8>) {
        varint(number << 3 | wire, out);
    }

    fn field(number: u64, bytes: &[u8], out: &mut Vec<u8>) {
        tag(number, 2, out);
        varint(bytes.len() as u64, out);
        out.extend_from_slice(bytes);
    }

    /// Encodes an entry of a map.
    fn entry(name: &[u8], value: &[u8]) -> Vec<u8> {
        let (mut entry, mut out) = (Vec::new(), Vec::new());
        field(1, name, &mut entry);
        field(2, value, &mut entry);
        field(1, &entry, &mut out);
        out
    }

    #[test]
    fn a_sequence_example_needs_context_only() {
        let (mut list, mut feature, mut steps) = (Vec::new(), Vec::new(), Vec::new());
        tag(1, 0, &mut list);
        varint(7, &mut list);
        field(3, &list, &mut feature);
        field(1, &feature, &mut steps);
        let lists = [entry(b"f", &steps), entry(b"g", &steps)].concat();
        let (mut example, mut before, mut empty) = (Vec::new(), Vec::new(), Vec::new());
        field(1, &entry(b"l", &feature), &mut example);
        field(2, &lists, &mut before);
        field(2, &[], &mut empty);
        for sequence in [[&example[..], &before].concat(), [&before[..], &example].concat()] {
            for name in ["l", "f", "none"] {
                let error = Feature::find(&sequence, name, ListKind::Ints, false).err().unwrap();
                assert_eq!(error.kind(), ErrorKind::Decode);
                assert!(
                    error.message().contains(r#"feature lists are not supported: "f", "g"; `context_only"#),
                    "{error}"
                );
            }
            let mut buffer = Vec::new();
            let context = Feature::find(&sequence, "l", ListKind::Ints, true).unwrap();
            assert_eq!(context.ints(8, &mut buffer).unwrap(), 7_u64.to_ne_bytes());
        }
        // Empty feature lists lose no data, so they are no error.
        assert!(Feature::find(&[example, empty].concat(), "l", ListKind::Ints, false).is_ok());
    }

    /// Writes an unknown field, of each wire type in turn.
    fn unknown(noise: &mut u32, out: &mut Vec<u8>) {
        *noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match *noise >> 24 {
            0..40 => {
                tag(9, 0, out);
                varint(u64::MAX, out);
            }
            40..60 => {
                tag(100, 1, out);
                out.extend([7; 8]);
            }
            60..90 => field(1_000_000, b"unknown", out),
            90..110 => {
                tag(15, 5, out);
                out.extend([9; 4]);
            }
            _ => {}
        }
    }

    fn list(list: &List, noise: &mut u32) -> Vec<u8> {
        let mut out = Vec::new();
        unknown(noise, &mut out);
        match list {
            List::Bytes(values) => values.iter().for_each(|value| field(1, value, &mut out)),
            List::Floats(runs) => {
                for (packed, run) in runs {
                    if *packed {
                        field(1, &run.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<_>>(), &mut out);
                        continue;
                    }
                    for bits in run {
                        tag(1, 5, &mut out);
                        out.extend(bits.to_le_bytes());
                    }
                }
            }
            List::Ints(runs) => {
                for (packed, run) in runs {
                    let mut values = Vec::new();
                    for value in run {
                        if !packed {
                            tag(1, 0, &mut values);
                        }
                        varint(*value as u64, &mut values);
                    }
                    if *packed { field(1, &values, &mut out) } else { out.extend(values) }
                }
            }
        }
        unknown(noise, &mut out);
        out
    }

    fn encode(example: &Example, mut noise: u32) -> Vec<u8> {
        let noise = &mut noise;
        let mut out = Vec::new();
        for features in example {
            let mut message = Vec::new();
            for (name, values) in features {
                let mut entry = Vec::new();
                unknown(noise, &mut entry);
                field(1, name.as_bytes(), &mut entry);
                for lists in values {
                    let mut feature = Vec::new();
                    for one in lists {
                        let number = match one {
                            List::Bytes(_) => 1,
                            List::Floats(_) => 2,
                            List::Ints(_) => 3,
                        };
                        field(number, &list(one, noise), &mut feature);
                        unknown(noise, &mut feature);
                    }
                    field(2, &feature, &mut entry);
                }
                field(1, &entry, &mut message);
                unknown(noise, &mut message);
            }
            unknown(noise, &mut out);
            field(1, &message, &mut out);
        }
        out
    }

    /// The result by protobuf's rules: maps insert, messages merge, a oneof of another kind starts anew.
    #[derive(Clone, Debug, PartialEq)]
    enum Merged {
        Empty,
        Bytes(Vec<Vec<u8>>),
        Floats(Vec<u8>),
        Ints(Vec<u8>),
    }

    fn merge(merged: &mut Merged, list: &List) {
        match list {
            List::Bytes(values) => {
                if !matches!(merged, Merged::Bytes(_)) {
                    *merged = Merged::Bytes(Vec::new());
                }
                let Merged::Bytes(all) = merged else { unreachable!() };
                all.extend(values.iter().cloned());
            }
            List::Floats(runs) => {
                if !matches!(merged, Merged::Floats(_)) {
                    *merged = Merged::Floats(Vec::new());
                }
                let Merged::Floats(all) = merged else { unreachable!() };
                all.extend(runs.iter().flat_map(|(_, run)| run).flat_map(|bits| bits.to_le_bytes()));
            }
            List::Ints(runs) => {
                if !matches!(merged, Merged::Ints(_)) {
                    *merged = Merged::Ints(Vec::new());
                }
                let Merged::Ints(all) = merged else { unreachable!() };
                all.extend(runs.iter().flat_map(|(_, run)| run).flat_map(|value| value.to_ne_bytes()));
            }
        }
    }

    fn merged(example: &Example) -> BTreeMap<&str, Merged> {
        let mut map = BTreeMap::new();
        for (name, values) in example.iter().flatten() {
            let mut feature = Merged::Empty;
            values.iter().flatten().for_each(|list| merge(&mut feature, list));
            map.insert(name.as_str(), feature);
        }
        map
    }

    fn any_list() -> impl Strategy<Value = List> {
        let bytes = vec(vec(any::<u8>(), 0..20), 0..3);
        let ints = prop_oneof![any::<i64>(), -3_i64..3, 100_i64..200];
        prop_oneof![
            bytes.prop_map(List::Bytes),
            vec((any::<bool>(), vec(any::<u32>(), 0..6)), 0..4).prop_map(List::Floats),
            vec((any::<bool>(), vec(ints, 0..6)), 0..4).prop_map(List::Ints),
        ]
    }

    fn any_example() -> impl Strategy<Value = Example> {
        // Few names, so that some repeat.
        let name = prop_oneof![Just("a".to_string()), Just("image/encoded".to_string()), "[a-cé]{0,3}"];
        vec(vec((name, vec(vec(any_list(), 0..4), 0..3)), 0..5), 0..3)
    }

    fn found(example: &[u8], name: &str, kind: ListKind) -> Result<Merged> {
        let feature = Feature::find(example, name, kind, false)?;
        let mut buffer = Vec::new();
        Ok(match kind {
            ListKind::Bytes => Merged::Bytes(vec![feature.one_bytes()?.to_vec()]),
            ListKind::Floats => Merged::Floats(feature.floats(1 << 20, &mut buffer)?.to_vec()),
            ListKind::Ints => Merged::Ints(feature.ints(1 << 20, &mut buffer)?.to_vec()),
        })
    }

    const KINDS: [ListKind; 3] = [ListKind::Bytes, ListKind::Floats, ListKind::Ints];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn every_feature_equals_protobufs_result(example in any_example(), noise in any::<u32>()) {
            let bytes = encode(&example, noise);
            for (name, right) in merged(&example) {
                let kind = match &right {
                    Merged::Empty => None,
                    Merged::Bytes(_) => Some(ListKind::Bytes),
                    Merged::Floats(_) => Some(ListKind::Floats),
                    Merged::Ints(_) => Some(ListKind::Ints),
                };
                for wanted in KINDS {
                    let found = found(&bytes, name, wanted);
                    let one = !matches!(&right, Merged::Bytes(values) if values.len() != 1);
                    if Some(wanted) == kind && one {
                        prop_assert_eq!(found.unwrap(), right.clone());
                    } else {
                        prop_assert_eq!(found.unwrap_err().kind(), ErrorKind::Shape);
                    }
                }
            }
            let error = found(&bytes, "not there", ListKind::Ints).unwrap_err();
            prop_assert_eq!(error.kind(), ErrorKind::Shape);
        }

        #[test]
        fn damaged_and_random_bytes_are_a_value_or_an_error(
            example in any_example(), cut in any::<prop::sample::Index>(), flip in any::<prop::sample::Index>(),
            bits in 1_u8.., random in vec(any::<u8>(), 0..60),
        ) {
            let mut bytes = encode(&example, 1);
            if !bytes.is_empty() {
                let at = flip.index(bytes.len());
                bytes[at] ^= bits;
                bytes.truncate(cut.index(bytes.len() + 1));
            }
            for bytes in [&bytes, &random] {
                for kind in KINDS {
                    let _ = found(bytes, "a", kind);
                }
            }
        }

        #[test]
        fn a_list_never_takes_more_of_the_buffer_than_the_row_has(
            lists in vec(any_list(), 1..4), max in 0_usize..12,
        ) {
            let example = vec![vec![("x".to_string(), vec![lists])]];
            let bytes = encode(&example, 1);
            let right = merged(&example).remove("x").unwrap();
            let mut buffer = Vec::new();
            let (row, len, found) = match right {
                Merged::Floats(all) => {
                    let found = Feature::find(&bytes, "x", ListKind::Floats, false).unwrap().floats(max * 4, &mut buffer).is_ok();
                    (max * 4, all.len(), found)
                }
                Merged::Ints(all) => {
                    let found = Feature::find(&bytes, "x", ListKind::Ints, false).unwrap().ints(max * 8, &mut buffer).is_ok();
                    (max * 8, all.len(), found)
                }
                _ => return Ok(()),
            };
            prop_assert_eq!(found, len <= row);
            prop_assert!(buffer.capacity() <= row, "{} of {row}", buffer.capacity());
        }
    }

    #[test]
    fn a_packed_run_of_floats_is_not_copied() {
        let list = List::Floats(vec![(true, vec![1, 2, 3])]);
        let bytes = encode(&vec![vec![("x".to_string(), vec![vec![list]])]], 1);
        let mut buffer = Vec::new();
        let floats = Feature::find(&bytes, "x", ListKind::Floats, false).unwrap().floats(12, &mut buffer).unwrap();
        assert!(bytes.as_ptr_range().contains(&floats.as_ptr()));
        assert_eq!(buffer.capacity(), 0);
    }

    #[test]
    fn malformed_examples_are_errors_with_an_offset() {
        let entry = |entry: &[u8]| {
            let (mut features, mut out) = (Vec::new(), Vec::new());
            field(1, entry, &mut features);
            field(1, &features, &mut out);
            out
        };
        let table: [(Vec<u8>, &str); 10] = [
            (vec![0x0a], "a varint that does not end"),
            (vec![0x0a, 5, 1], "byte 2: 5 bytes, 1 are left"),
            (vec![0x0b], "field 1 has wire type 3"),
            (vec![0x08, 1], "features is a varint on the wire"),
            (vec![0x02, 0], "a field with the number 0"),
            (vec![0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2], "a varint over 64 bits"),
            (vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], "18446744073709551615 bytes"),
            (entry(&[0x0a, 1, b'x', 0x10, 1]), "byte 8: entry is a varint on the wire"),
            (entry(&[0x0a, 1, b'x', 0x12, 2, 0x18, 1]), "byte 10: an int64 list is a varint on the wire"),
            (entry(&[0x0a, 1, b'x', 0x12, 4, 0x1a, 2, 0x08, 0x80]), "byte 12: a varint that does not end"),
        ];
        for (bytes, words) in table {
            let error = found(&bytes, "x", ListKind::Ints).unwrap_err();
            assert!(error.to_string().contains(words), "{bytes:02x?}: {error}");
            assert_eq!(error.kind(), ErrorKind::Decode);
        }
    }

    #[test]
    fn a_missing_feature_error_lists_a_few_names() {
        let many = (0..1000).map(|k| (format!("{k:0>100}"), Vec::new())).collect();
        let error = found(&encode(&vec![many], 1), "x", ListKind::Ints).unwrap_err().to_string();
        assert!(error.contains("… and 988 more; ") && error.len() < 1000, "{error}");
    }
}
