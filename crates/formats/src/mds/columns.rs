//! MDS columns: what each encoding name means, and where a column's value is in a sample. No I/O.
//!
//! ```text
//! sample   | u32 size of each column without a fixed one | value of column 0 | value of column 1 | …
//! ```
//!
//! Invariants: the sizes must add up to the sample's length; every value is within the sample.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::tensor::{DType, EncodedField, Field, Shape};
use std::ops::Range;

/// Maximum axes of an array that stores its shape: the format has six bits.
const AXES_MAX: usize = 63;

/// A column, as its index entry describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) encoding: String,
    /// Bytes of a value, if all values have the same size.
    pub(super) size: Option<u32>,
}

/// Columns of a sample, in order.
pub(super) struct Columns {
    pub(super) all: Vec<Column>,
    /// Bytes of the size list at the sample's start.
    head: u64,
    /// Bytes of all fixed columns together.
    fixed: u64,
}

impl Columns {
    pub(super) fn new(all: Vec<Column>) -> Self {
        let head = all.iter().filter(|column| column.size.is_none()).count() as u64 * 4;
        let fixed = all
            .iter()
            .map(|column| u64::from(column.size.unwrap_or(0)))
            .sum();
        Self { all, head, fixed }
    }

    /// Whether a sample of `bytes` bytes is possible with these columns.
    pub(super) fn may_have(&self, bytes: u64) -> bool {
        let least = self.head + self.fixed;
        if self.head == 0 {
            bytes == least
        } else {
            bytes >= least
        }
    }

    /// Maximum bytes of a value without a fixed size, in a sample of `sample` bytes.
    pub(super) fn most(&self, sample: u64) -> u64 {
        sample.saturating_sub(self.head + self.fixed)
    }

    /// Byte range of the value of `column` in a sample. Errors: [`ErrorKind::Decode`] if the
    /// columns' sizes do not add up to the sample's length.
    pub(super) fn find(&self, column: usize, sample: &[u8]) -> Result<Range<usize>> {
        let mut sizes = sample.as_chunks().0.iter();
        let mut at = self.head;
        let mut found = 0..0;
        for (index, other) in self.all.iter().enumerate() {
            let size = match other.size {
                Some(size) => size,
                None => sizes
                    .next()
                    .map(|size| u32::from_le_bytes(*size))
                    .ok_or_else(|| self.odd(sample.len(), self.head))?,
            };
            let end = at + u64::from(size);
            if index == column {
                found = at..end;
            }
            at = end;
        }
        if at != sample.len() as u64 {
            return Err(self.odd(sample.len(), at));
        }
        Ok(found.start as usize..found.end as usize)
    }

    #[cold]
    fn odd(&self, have: usize, need: u64) -> Error {
        let message = format!("a sample of {have} bytes, its columns have {need}");
        Error::new(ErrorKind::Decode, Stage::Decode, message)
    }
}

/// A column chosen as a field.
pub(super) struct Chosen {
    pub(super) column: usize,
    pub(super) field: EncodedField,
    how: ColumnHow,
}

/// How a stored value becomes the field's bytes.
enum ColumnHow {
    /// No conversion.
    AsIs,
    /// An array that stores its shape, and perhaps its dtype, before the values. Both are compared
    /// with the field, then removed.
    Headed {
        typed: bool,
        dtype: DType,
        shape: Shape,
    },
    /// Parses the digits of an integer or float.
    Int,
    Float,
}

/// The field's bytes, taken or converted from a stored value.
pub(super) enum Value {
    /// This part of the value.
    Part(Range<usize>),
    Made([u8; 8]),
}

impl Chosen {
    /// Makes the field of `column`; `raw` is the user's declaration, `up_to` the maximum of arrays
    /// with a length.
    ///
    /// Errors: [`ErrorKind::Config`] for unsupported encodings, and for arrays that such a column
    /// cannot hold.
    pub(super) fn new(
        index: usize,
        column: &Column,
        raw: Option<&Field>,
        up_to: Option<usize>,
    ) -> Result<Self> {
        let bad = |message: String| {
            let message = format!("column `{}`: {message}", column.name);
            Err(Error::new(ErrorKind::Config, Stage::Index, message))
        };
        let meaning = match Meaning::of(&column.encoding) {
            Ok(meaning) => meaning,
            Err(message) => return bad(message),
        };
        if meaning.size() != column.size.map(u64::from) {
            let has = bytes_or_any(meaning.size());
            let says = bytes_or_any(column.size.map(u64::from));
            return bad(format!(
                "values of encoding `{}` have {has}, the index says {says}",
                column.encoding
            ));
        }
        let chosen = |field, how| {
            Ok(Self {
                column: index,
                field,
                how,
            })
        };
        let list = match (&meaning, up_to) {
            (
                Meaning::Array {
                    dtype: Some(dtype),
                    shape: None,
                },
                Some(max),
            ) => Some(Field::up_to(&column.name, *dtype, max)),
            (Meaning::Array { shape: None, dtype }, _) if raw.is_none() => {
                let max = dtype.map_or_else(String::new, |_| {
                    format!("their maximum number of elements by {}, or ", Setting::UpTo)
                });
                return bad(format!(
                    "its arrays may have any shape: give {max}dtype and shape by {}",
                    Setting::Raw
                ));
            }
            _ => None,
        };
        if let Some(field) = raw.or(list.as_ref()) {
            let size = field.row_bytes() as u64;
            if let Meaning::Array {
                dtype: Some(dtype), ..
            } = &meaning
                && *dtype != field.dtype()
            {
                return bad(format!(
                    "its arrays are {dtype}, the field is {}",
                    field.dtype()
                ));
            }
            if column
                .size
                .is_some_and(|bytes| field.is_up_to() || u64::from(bytes) != size)
            {
                let has = bytes_or_any(column.size.map(u64::from));
                return bad(format!("its values have {has}, the field has {size}"));
            }
            let how = match meaning {
                Meaning::Array { dtype, shape: None } => ColumnHow::Headed {
                    typed: dtype.is_none(),
                    dtype: field.dtype(),
                    shape: field.shape().clone(),
                },
                _ => ColumnHow::AsIs,
            };
            return chosen(EncodedField::raw(field.clone().renamed(&column.name)), how);
        }
        let array =
            |dtype, shape: Vec<usize>| EncodedField::raw(Field::fixed(&column.name, dtype, shape));
        match meaning {
            Meaning::Image => chosen(EncodedField::image(&column.name), ColumnHow::AsIs),
            Meaning::Scalar(dtype) => chosen(array(dtype, Vec::new()), ColumnHow::AsIs),
            Meaning::Array {
                dtype: Some(dtype),
                shape: Some(shape),
            } => chosen(array(dtype, shape), ColumnHow::AsIs),
            Meaning::Int => chosen(array(DType::I64, Vec::new()), ColumnHow::Int),
            Meaning::Float => chosen(array(DType::F64, Vec::new()), ColumnHow::Float),
            Meaning::Array { .. } | Meaning::Bytes => {
                chosen(EncodedField::bytes(&column.name), ColumnHow::AsIs)
            }
        }
    }

    /// Whether values are converted to numbers of 8 bytes.
    pub(super) fn makes(&self) -> bool {
        matches!(self.how, ColumnHow::Int | ColumnHow::Float)
    }

    /// Bytes of the field in a sample of `sample` bytes. `None` if the size is known only after the
    /// sample is read.
    pub(super) fn bytes(&self, columns: &Columns, sample: u64) -> Option<u64> {
        match (&self.how, columns.all[self.column].size) {
            (ColumnHow::Int | ColumnHow::Float, _) => Some(8),
            (ColumnHow::AsIs, Some(size)) => Some(size.into()),
            // This is the only column without a fixed size.
            (ColumnHow::AsIs, None) if columns.head == 4 => Some(columns.most(sample)),
            _ => None,
        }
    }

    /// Converts a value to the field's bytes.
    pub(super) fn value(&self, bytes: &[u8]) -> Result<Value> {
        match &self.how {
            ColumnHow::AsIs => Ok(Value::Part(0..bytes.len())),
            ColumnHow::Headed {
                typed,
                dtype,
                shape,
            } => {
                let start = values_start(bytes, *typed, *dtype, shape)
                    .map_err(|message| self.wrong(message))?;
                Ok(Value::Part(start..bytes.len()))
            }
            ColumnHow::Int => self
                .parsed::<i64>(bytes)
                .map(|value| Value::Made(value.to_ne_bytes())),
            ColumnHow::Float => self
                .parsed::<f64>(bytes)
                .map(|value| Value::Made(value.to_ne_bytes())),
        }
    }

    fn parsed<T: std::str::FromStr>(&self, bytes: &[u8]) -> Result<T> {
        let number = std::str::from_utf8(bytes)
            .ok()
            .and_then(|text| text.parse().ok());
        number.ok_or_else(|| {
            let start = String::from_utf8_lossy(&bytes[..bytes.len().min(32)]);
            self.wrong(format!(
                "{start:?} ({} bytes) is not a number that fits 64 bits",
                bytes.len()
            ))
        })
    }

    #[cold]
    fn wrong(&self, message: String) -> Error {
        let message = format!("column `{}`: {message}", self.field.name);
        Error::new(ErrorKind::Decode, Stage::Decode, message)
    }
}

fn bytes_or_any(size: Option<u64>) -> String {
    size.map_or("any number of bytes".to_string(), |size| {
        format!("{size} bytes")
    })
}

/// Offset of the values in an array that stores its shape, and perhaps its dtype.
fn values_start(bytes: &[u8], typed: bool, dtype: DType, shape: &Shape) -> Result<usize, String> {
    let short = || format!("{} bytes are too few for an array's shape", bytes.len());
    let mut at = 0;
    if typed {
        let code = *bytes.first().ok_or_else(short)?;
        let found = DTYPES.iter().find(|(_, known, _)| *known == code);
        match found {
            Some((_, _, found)) if *found == dtype => at = 1,
            Some((_, _, found)) => return Err(format!("an array of {found}, expected {dtype}")),
            None => return Err(format!("an array of the unknown dtype {code}")),
        }
    }
    let code = *bytes.get(at).ok_or_else(short)?;
    let axes = usize::from(code >> 2);
    let width = 1 << (code & 3);
    let dims = bytes.get(at + 1..at + 1 + axes * width).ok_or_else(short)?;
    at += 1 + axes * width;
    let mut found = [0_u64; AXES_MAX];
    for (dim, bytes) in found.iter_mut().zip(dims.chunks(width)) {
        let mut wide = [0; 8];
        wide[..width].copy_from_slice(bytes);
        *dim = u64::from_le_bytes(wide);
    }
    let found = &found[..axes];
    let expected = match shape {
        Shape::Fixed(dims) => {
            dims.len() == axes
                && dims
                    .iter()
                    .zip(found)
                    .all(|(dim, found)| *dim as u64 == *found)
        }
        Shape::UpTo { inner, .. } => {
            axes == inner.len() + 1
                && inner
                    .iter()
                    .zip(&found[1..])
                    .all(|(dim, found)| *dim as u64 == *found)
        }
    };
    if !expected {
        let expected = match shape {
            Shape::Fixed(dims) => format!("{dims:?}"),
            Shape::UpTo { inner, .. } => format!("any number of {inner:?}"),
        };
        return Err(format!(
            "an array of the shape {found:?}, expected {expected}; {} declares another",
            Setting::Raw
        ));
    }
    let values = found
        .iter()
        .try_fold(dtype.size() as u64, |bytes, dim| bytes.checked_mul(*dim));
    if values != Some((bytes.len() - at) as u64) {
        return Err(format!(
            "{} bytes of values in an array of {dtype} with the shape {found:?}",
            bytes.len() - at
        ));
    }
    Ok(at)
}

/// NumPy's name, the code in arrays that store their dtype, and the dtype.
const DTYPES: [(&str, u8, DType); 11] = [
    ("uint8", 8, DType::U8),
    ("int8", 9, DType::I8),
    ("uint16", 16, DType::U16),
    ("int16", 17, DType::I16),
    ("float16", 18, DType::F16),
    ("uint32", 32, DType::U32),
    ("int32", 33, DType::I32),
    ("float32", 34, DType::F32),
    ("uint64", 64, DType::U64),
    ("int64", 65, DType::I64),
    ("float64", 66, DType::F64),
];

fn dtype_of(name: &str) -> Option<DType> {
    DTYPES
        .iter()
        .find(|(known, ..)| *known == name)
        .map(|(.., dtype)| *dtype)
}

/// Parses `uint8` or `uint8:3,4`.
fn array(text: &str) -> Option<Meaning> {
    let Some((name, dims)) = text.split_once(':') else {
        return Some(Meaning::Array {
            dtype: Some(dtype_of(text)?),
            shape: None,
        });
    };
    let dims = dims
        .split(',')
        .map(|dim| dim.trim().parse().ok().filter(|dim| *dim > 0));
    let shape = dims
        .collect::<Option<Vec<usize>>>()
        .filter(|dims| dims.len() <= AXES_MAX)?;
    Some(Meaning::Array {
        dtype: Some(dtype_of(name)?),
        shape: Some(shape),
    })
}

/// Meaning of an encoding's name.
#[derive(Debug, PartialEq, Eq)]
enum Meaning {
    Bytes,
    Image,
    Scalar(DType),
    Array {
        dtype: Option<DType>,
        shape: Option<Vec<usize>>,
    },
    Int,
    Float,
}

impl Meaning {
    fn of(encoding: &str) -> Result<Self, String> {
        let unknown = || format!("encoding `{encoding}` is not known");
        Ok(match encoding {
            "bytes" | "str" | "json" | "str_decimal" | "pil" | "jpeg_array" | "jpegarray"
            | "list[pil]" | "list[jpeg]" | "list[png]" => Self::Bytes,
            "jpeg" | "png" => Self::Image,
            "int" => Self::Scalar(DType::I64),
            "str_int" => Self::Int,
            "str_float" => Self::Float,
            "pkl" => {
                return Err(
                    "pickles (encoding `pkl`) can run code and are never read: use another encoding"
                        .to_string(),
                );
            }
            _ => match encoding
                .strip_prefix("ndarray")
                .map(|rest| rest.strip_prefix(':').unwrap_or(rest))
            {
                Some("") => Self::Array {
                    dtype: None,
                    shape: None,
                },
                Some(rest) if encoding.starts_with("ndarray:") => {
                    array(rest).ok_or_else(unknown)?
                }
                _ => Self::Scalar(dtype_of(encoding).ok_or_else(unknown)?),
            },
        })
    }

    /// Bytes of a value, if all values have the same size; `u64::MAX` on overflow.
    fn size(&self) -> Option<u64> {
        match self {
            Self::Scalar(dtype) => Some(dtype.size() as u64),
            Self::Array {
                dtype: Some(dtype),
                shape: Some(shape),
            } => {
                let bytes = shape.iter().try_fold(dtype.size() as u64, |bytes, dim| {
                    bytes.checked_mul(*dim as u64)
                });
                Some(bytes.unwrap_or(u64::MAX))
            }
            _ => None,
        }
    }
}
