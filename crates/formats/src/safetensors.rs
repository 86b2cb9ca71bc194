//! safetensors: tensors with the same first dimension; each row is a sample.
//!
//! ```text
//! | length (u64) | {"x":{"dtype":"F32","shape":[100,3],"data_offsets":[0,1200]},…}  padding | data … |
//! ```
//!
//! Limits: headers up to 100 MB, as upstream. Invariants, as upstream and stricter: tensors follow
//! each other from the first byte of the data to the last, without holes or overlaps; dtype × shape
//! is the length of each; no key of the header is duplicate or unknown. So a cut file, extra bytes,
//! and a header that two readers could read differently are errors. The data has no checksum: a
//! flipped bit in it goes unnoticed.

use crate::arrays::{Array, Arrays, GivenArray};
use crate::{fetched, little_endian, number, twice};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_core::dataset::Dataset;
use feedline_core::dataset::forward::forward;
use feedline_core::dataset::parallel::parallel_paths;
use feedline_core::storage::listing::expand;
use feedline_core::storage::{Blob, Listed, Sources};
use feedline_core::tensor::DType;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, de};
use std::collections::HashMap;
use std::path::Path;

/// Maximum bytes of a header.
const HEADER_MAX: u64 = 100_000_000;
/// Maximum dimensions; the format has no limit.
const DIMS_MAX: usize = 64;

/// The format's dtypes: name, bits per element, and dtype in a batch (`None` if unsupported).
const DTYPES: [(&str, u64, Option<DType>); 22] = [
    ("BOOL", 8, Some(DType::Bool)),
    ("U8", 8, Some(DType::U8)),
    ("I8", 8, Some(DType::I8)),
    ("U16", 16, Some(DType::U16)),
    ("I16", 16, Some(DType::I16)),
    ("F16", 16, Some(DType::F16)),
    ("BF16", 16, Some(DType::BF16)),
    ("U32", 32, Some(DType::U32)),
    ("I32", 32, Some(DType::I32)),
    ("F32", 32, Some(DType::F32)),
    ("U64", 64, Some(DType::U64)),
    ("I64", 64, Some(DType::I64)),
    ("F64", 64, Some(DType::F64)),
    ("F8_E5M2", 8, Some(DType::U8)),
    ("F8_E4M3", 8, Some(DType::U8)),
    ("F8_E8M0", 8, Some(DType::U8)),
    ("F8_E4M3FNUZ", 8, Some(DType::U8)),
    ("F8_E5M2FNUZ", 8, Some(DType::U8)),
    ("F4", 4, None),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("C64", 64, None),
];

/// Dataset of safetensors files: sample *k* is row *k* (first axis) of every chosen tensor. Each
/// tensor is a field.
///
/// The 8-bit floats (`F8_…`) are delivered as `u8` with the same bits. Complex numbers and floats
/// of fewer bits have no dtype here and are refused by name.
///
/// ```no_run
/// # use feedline_formats::SafeTensors;
/// let features = SafeTensors::builder().tensors(["embedding", "label"]).open("features-{000..063}.safetensors")?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub struct SafeTensors(Arrays);

/// Builder of [`SafeTensors`]: selects tensors. Made by [`SafeTensors::builder`].
#[derive(Clone, Debug, Default)]
pub struct SafeTensorsBuilder {
    tensors: Option<Vec<String>>,
}

impl SafeTensors {
    /// Opens the files of `pattern`, one after the other, with all their tensors.
    ///
    /// Errors: as [`SafeTensorsBuilder::open`].
    pub fn open(pattern: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(pattern)
    }

    /// Starts a builder; every setting is optional.
    pub fn builder() -> SafeTensorsBuilder {
        SafeTensorsBuilder::default()
    }
}

impl SafeTensorsBuilder {
    /// Takes only these tensors, in this order. Default: all, in the order of the first file's
    /// data.
    #[must_use]
    pub fn tensors<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Self {
        self.tensors = Some(names.into_iter().map(String::from).collect());
        self
    }

    /// Opens the files and reads their headers in parallel.
    ///
    /// Errors: not found, nothing found, a cut file ([`ErrorKind::Truncated`]), a malformed header,
    /// a missing or extra tensor ([`ErrorKind::Decode`]), tensors that differ in dtype, shape or
    /// first dimension ([`ErrorKind::Shape`]); each names the file.
    pub fn open(self, pattern: impl AsRef<Path>) -> Result<SafeTensors> {
        little_endian("safetensors")?;
        let Listed { files, name, .. } = expand(pattern, &[".safetensors"])?;
        let headers = parallel_paths(&files, |_, path| {
            let input = Blob::open(path)?;
            Ok((input.look()?, self.chosen(header(&input)?)))
        })?;
        let first = headers
            .first()
            .map(|(_, tensors)| tensors)
            .filter(|tensors| !tensors.is_empty());
        let Some(first) = first else {
            return Err(
                Error::new(ErrorKind::Empty, Stage::Index, "the file has no tensors")
                    .with_path(&files[0]),
            );
        };
        let names = match self.tensors {
            Some(names) => names,
            None => first.iter().map(|tensor| tensor.name.clone()).collect(),
        };
        let mut sources = Sources::new();
        let mut given: Vec<GivenArray> = names
            .into_iter()
            .map(|name| GivenArray {
                name,
                ..GivenArray::default()
            })
            .collect();
        for (path, (meta, tensors)) in files.iter().zip(headers) {
            sources.add(path, &meta)?;
            take(&mut given, tensors).map_err(|error| error.with_path(path))?;
        }
        Arrays::of(sources, given, true, "safetensors", name).map(SafeTensors)
    }

    /// Selects the requested tensors of a file.
    fn chosen(&self, mut tensors: Vec<Tensor>) -> Vec<Tensor> {
        if let Some(names) = &self.tensors {
            tensors.retain(|tensor| names.contains(&tensor.name));
        }
        tensors
    }
}

/// Adds the tensors of one file to their fields.
fn take(given: &mut [GivenArray], mut tensors: Vec<Tensor>) -> Result<()> {
    let bad = |message: String| Err(Error::new(ErrorKind::Decode, Stage::Index, message));
    for given in given {
        let Some(at) = tensors.iter().position(|tensor| tensor.name == given.name) else {
            return bad(format!("there is no tensor `{}`", given.name));
        };
        let tensor = tensors.swap_remove(at);
        let Some(dtype) = tensor.dtype.2 else {
            return bad(format!(
                "`{}` is {}, for which a batch has no dtype",
                tensor.name, tensor.dtype.0
            ));
        };
        given.arrays.push(Array {
            dtype,
            shape: tensor.shape,
            offset: tensor.start,
        });
    }
    match tensors.first() {
        Some(over) => bad(format!(
            "`{}` is a tensor of this file but not of the first one",
            over.name
        )),
        None => Ok(()),
    }
}

/// A tensor, as its header entry describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    name: String,
    dtype: (&'static str, u64, Option<DType>),
    shape: Vec<u64>,
    /// Offsets of the first byte and of the end. `check` makes them relative to the file.
    start: u64,
    end: u64,
}

/// Reads the header: the tensors in the order of their data.
pub(crate) fn header(input: &Blob) -> Result<Vec<Tensor>> {
    let size = number(&input.array::<8>(0, "the header's length")?);
    fetched(input)?;
    if size > HEADER_MAX {
        let message = format!(
            "not safetensors, or damaged: a header of {size} bytes; the limit is {HEADER_MAX}"
        );
        return Err(input.error(ErrorKind::Limit, message, 0, 8));
    }
    let text = input.read(8, size, "the header")?;
    let mut tensors =
        tensors_of(&text).map_err(|(message, at)| input.wrong(message, 8 + at as u64, size))?;
    tensors.sort_by_key(|tensor| (tensor.start, tensor.end));
    check(input, &mut tensors, 8 + size)?;
    Ok(tensors)
}

/// Checks that the tensors fill the data, which starts at `data`, and makes their offsets relative
/// to the file.
fn check(input: &Blob, tensors: &mut [Tensor], data: u64) -> Result<()> {
    let mut next = 0;
    for Tensor {
        name,
        dtype: (dtype, bits, _),
        shape,
        start,
        end,
    } in &mut *tensors
    {
        let wrong = |message: String| Err(input.wrong(message, 8, data - 8));
        if *start != next || end < start {
            return wrong(format!(
                "`{name}` lies at {start} to {end}, but the bytes before it end at {next}"
            ));
        }
        let bits = shape
            .iter()
            .try_fold(*bits, |bits, dim| bits.checked_mul(*dim));
        if bits.is_none_or(|bits| bits % 8 != 0 || bits / 8 != *end - *start) {
            return wrong(format!(
                "`{name}` is {dtype} {shape:?}, but has {} bytes",
                *end - *start
            ));
        }
        next = *end;
    }
    let there = input.len() - data;
    if next != there {
        let kind = if next > there {
            ErrorKind::Truncated
        } else {
            ErrorKind::Decode
        };
        let message =
            format!("the tensors have {next} bytes, the file has {there} after its header");
        return Err(input.error(kind, message, data, there));
    }
    // The checks above keep all offsets below the file's length, so this cannot overflow.
    tensors
        .iter_mut()
        .for_each(|tensor| (tensor.start, tensor.end) = (tensor.start + data, tensor.end + data));
    match twice(tensors.iter().map(|tensor| tensor.name.as_str())) {
        Some(name) => Err(input.wrong(format!("the header has `{name}` twice"), 8, data - 8)),
        None => Ok(()),
    }
}

/// Parsed header: tensors by name, in the header's order. Duplicate and unknown keys are errors,
/// and no JSON tree is built.
struct TensorHeader(Vec<(String, TensorEntry)>);

/// Derived code would accept a list in place of a map, so [`TensorEntry`] wraps it and accepts only
/// a map.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    dtype: String,
    shape: Dims,
    data_offsets: [u64; 2],
}

struct TensorEntry(Fields);

struct Dims(Vec<u64>);

/// Implements `Deserialize` by a visitor of a map or list.
macro_rules! visitor {
    ($name:ident, $by:ident, $visit:ident, $access:ident, $wanted:literal, |$input:ident| $read:block) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                struct TensorReads;
                impl<'de> Visitor<'de> for TensorReads {
                    type Value = $name;
                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str($wanted)
                    }
                    #[allow(unused_mut, reason = "TensorEntry only passes it on")]
                    fn $visit<A: $access<'de>>(self, mut $input: A) -> Result<$name, A::Error> $read
                }
                from.$by(TensorReads)
            }
        }
    };
}

visitor!(
    TensorEntry,
    deserialize_map,
    visit_map,
    MapAccess,
    "a tensor",
    |map| { Fields::deserialize(MapAccessDeserializer::new(map)).map(TensorEntry) }
);

visitor!(
    Dims,
    deserialize_seq,
    visit_seq,
    SeqAccess,
    "a list of whole numbers",
    |list| {
        let mut dims = Vec::new();
        while let Some(dim) = list.next_element()? {
            dims.push(dim);
            if dims.len() > DIMS_MAX {
                return Err(de::Error::invalid_length(
                    dims.len(),
                    &"at most 64 dimensions",
                ));
            }
        }
        Ok(Dims(dims))
    }
);

visitor!(
    TensorHeader,
    deserialize_map,
    visit_map,
    MapAccess,
    "a map of tensors",
    |map| {
        let mut tensors = Vec::new();
        let mut metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name != "__metadata__" {
                tensors.push((name, map.next_value()?));
            } else if std::mem::replace(&mut metadata, true) {
                return Err(de::Error::custom("the header has `__metadata__` twice"));
            } else {
                map.next_value::<HashMap<String, String>>()?;
            }
        }
        Ok(TensorHeader(tensors))
    }
);

/// Parses the tensors of a header's text. Errors: a message and a byte offset.
fn tensors_of(text: &[u8]) -> Result<Vec<Tensor>, (String, usize)> {
    if text.first() != Some(&b'{') {
        return Err(("the header does not start with `{`".into(), 0));
    }
    let TensorHeader(entries) = serde_json::from_slice(text).map_err(|error| {
        let before = text
            .split(|byte| *byte == b'\n')
            .take(error.line().saturating_sub(1));
        let at =
            before.map(|line| line.len() + 1).sum::<usize>() + error.column().saturating_sub(1);
        (error.to_string(), at.min(text.len()))
    })?;
    entries
        .into_iter()
        .map(
            |(
                name,
                TensorEntry(Fields {
                    dtype,
                    shape,
                    data_offsets: [start, end],
                }),
            )| match DTYPES.iter().find(|(known, _, _)| *known == dtype) {
                Some(dtype) => Ok(Tensor {
                    name,
                    dtype: *dtype,
                    shape: shape.0,
                    start,
                    end,
                }),
                None => Err((format!("`{name}`: the dtype `{dtype}` is not known"), 0)),
            },
        )
        .collect()
}

impl Dataset for SafeTensors {
    forward!(self => self.0; schema len sources sizes extents framed chunked identity describe);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        out.resize(out.len() + data, 7);
        out
    }

    fn of(header_text: &str, data: usize) -> Result<Vec<Tensor>> {
        header(&Blob::memory(file(header_text, data).into()))
    }

    #[test]
    fn tensors_are_sorted_by_offset() {
        let text = r#"{"__metadata__":{"format":"pt"},"b\u0061":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]},
            "a":{"data_offsets":[0,4],"shape":[4],"dtype":"BOOL"},"none":{"dtype":"I64","shape":[0,9],"data_offsets":[12,12]}}   "#;
        let tensors = of(text, 12).unwrap();
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["a", "ba", "none"]);
        assert_eq!(tensors[1].shape, [2, 1]);
        let data = 8 + text.len() as u64;
        assert_eq!((tensors[1].start, tensors[1].end), (data + 4, data + 12));
        assert_eq!(of("{}", 0).unwrap(), []);
    }

    #[test]
    fn malformed_headers_are_named() {
        let one = |dtype: &str, shape: &str, span: &str| {
            format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{span}}}}}"#)
        };
        let x = r#""x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
        let empty = r#""x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
        let cases = [
            (
                one("U8", "[4]", "[0,4]"),
                3,
                ErrorKind::Truncated,
                "the tensors have 4 bytes, the file has 3",
            ),
            (
                one("U8", "[4]", "[0,4]"),
                5,
                ErrorKind::Decode,
                "the file has 5",
            ),
            (
                one("U8", "[4]", "[1,5]"),
                5,
                ErrorKind::Decode,
                "the bytes before it end at 0",
            ),
            (
                one("U8", "[4]", "[4,0]"),
                4,
                ErrorKind::Decode,
                "lies at 4 to 0",
            ),
            (
                one("U8", "[3]", "[0,4]"),
                4,
                ErrorKind::Decode,
                "is U8 [3], but has 4 bytes",
            ),
            (one("F4", "[3]", "[0,1]"), 1, ErrorKind::Decode, "is F4 [3]"),
            (
                one("U8", "[4294967296,4294967296]", "[0,0]"),
                0,
                ErrorKind::Decode,
                "has 0 bytes",
            ),
            (
                one("Q8", "[4]", "[0,4]"),
                4,
                ErrorKind::Decode,
                "`Q8` is not known",
            ),
            (
                one("U8", "[4.0]", "[0,4]"),
                4,
                ErrorKind::Decode,
                "invalid type: floating point",
            ),
            (
                one("U8", "[-4]", "[0,4]"),
                4,
                ErrorKind::Decode,
                "invalid value: integer `-4`",
            ),
            (
                one("U8", "[04]", "[0,4]"),
                4,
                ErrorKind::Decode,
                "invalid number at line 1 column",
            ),
            (
                one("U8", "[4]", "[0,4,4]"),
                4,
                ErrorKind::Decode,
                "trailing characters",
            ),
            (
                one("U8", "[4]", "[0]"),
                4,
                ErrorKind::Decode,
                "invalid length 1",
            ),
            (
                one("U8", &format!("{:?}", [1; 65]), "[0,1]"),
                1,
                ErrorKind::Decode,
                "at most 64 dimensions",
            ),
            (
                r#"{"x":["U8",[1],[0,1]]}"#.into(),
                1,
                ErrorKind::Decode,
                "invalid type: sequence",
            ),
            (
                one("U8", "[4]", "null"),
                4,
                ErrorKind::Decode,
                "invalid type: null",
            ),
            (
                one("U8", "[99999999999999999999]", "[0,4]"),
                4,
                ErrorKind::Decode,
                "invalid type: floating point",
            ),
            (
                format!("{{{empty},{empty}}}"),
                0,
                ErrorKind::Decode,
                "`x` twice",
            ),
            (
                format!("{{{x},{x}}}"),
                4,
                ErrorKind::Decode,
                "before it end at 4",
            ),
            (
                format!(r#"{{"__metadata__":{{}},"__metadata__":{{}},{x}}}"#),
                4,
                ErrorKind::Decode,
                "`__metadata__` twice",
            ),
            (
                r#"{"__metadata__":{"a":1}}"#.into(),
                0,
                ErrorKind::Decode,
                "expected a string",
            ),
            (
                r#"{"x":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}"#.into(),
                1,
                ErrorKind::Decode,
                "duplicate field `dtype`",
            ),
            (
                r#"{"x":{"dtype":"U8","more":1}}"#.into(),
                0,
                ErrorKind::Decode,
                "`more`",
            ),
            (
                format!(" {{{x}}}"),
                4,
                ErrorKind::Decode,
                "does not start with",
            ),
            (
                format!("{{{x}}} x"),
                4,
                ErrorKind::Decode,
                "trailing characters at line 1",
            ),
            (format!("{{{x},}}"), 4, ErrorKind::Decode, "trailing comma"),
            (
                "{\"x".into(),
                0,
                ErrorKind::Decode,
                "EOF while parsing a string",
            ),
            (
                "{\"\\".into(),
                0,
                ErrorKind::Decode,
                "EOF while parsing a string",
            ),
        ];
        for (text, data, kind, words) in cases {
            let error = of(&text, data).unwrap_err();
            assert_eq!(error.kind(), kind, "{text}: {error}");
            assert!(error.to_string().contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn lengths_are_checked_before_any_allocation() {
        let claim = |size: u64| {
            header(&Blob::memory(
                [&size.to_le_bytes()[..], b"{}"].concat().into(),
            ))
            .unwrap_err()
        };
        assert_eq!(claim(3).kind(), ErrorKind::Truncated);
        assert_eq!(claim(100_000_001).kind(), ErrorKind::Limit);
        assert_eq!(claim(u64::MAX).kind(), ErrorKind::Limit);
        assert_eq!(
            header(&Blob::memory(b"{}"[..].into())).unwrap_err().kind(),
            ErrorKind::Truncated
        );
    }

    /// The header as a general JSON reader parses it.
    fn by_serde(text: &str) -> Option<Vec<(String, Vec<u64>)>> {
        let value: serde_json::Value = serde_json::from_str(text).ok()?;
        let tensors = value
            .as_object()?
            .iter()
            .filter(|(name, _)| *name != "__metadata__");
        let shape = |value: &serde_json::Value| {
            value["shape"]
                .as_array()?
                .iter()
                .map(|dim| dim.as_u64())
                .collect::<Option<Vec<u64>>>()
        };
        tensors
            .map(|(name, value)| Some((name.clone(), shape(value)?)))
            .collect()
    }

    proptest! {
        #[test]
        fn no_header_makes_the_parser_panic(text in "[{}\\[\\]\":,a-z0-9_\\\\ .-]{0,60}", data in 0_usize..9) {
            if let Ok(tensors) = of(&format!("{{{text}"), data) {
                let mut own: Vec<_> = tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
                own.sort();
                prop_assert_eq!(Some(own), by_serde(&format!("{{{text}")));
            }
        }

        #[test]
        fn headers_equal_a_general_readers_result(
            names in prop::collection::btree_set("[a-z\"\\\\é\n]{0,6}", 0..5),
            dims in prop::collection::vec(prop::collection::vec(0_u64..5, 0..4), 5),
        ) {
            let mut end = 0;
            let mut parts = Vec::new();
            for (name, dims) in names.iter().zip(&dims) {
                let start = end;
                let bytes = dims.iter().product::<u64>() * 2;
                end += bytes;
                let name = serde_json::to_string(name).unwrap();
                parts.push(format!(r#"{name}: {{"dtype": "BF16", "shape": {dims:?}, "data_offsets": [{start}, {end}]}}"#));
            }
            let text = format!("{{{}}}", parts.join(", "));
            let mut own: Vec<_> =
                of(&text, end as usize).unwrap().into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
            own.sort();
            prop_assert_eq!(Some(own), by_serde(&text));
        }
    }
}
