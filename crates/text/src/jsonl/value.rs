//! From values of a line to the bytes of a field.
//!
//! Invariants: a number is converted only without loss of its kind: integers must be whole and in
//! the dtype's range; floats are rounded to `f64` first, as Python does, and must not overflow.

use super::json::{self, after_value, bad, kind};
use super::path::KeyPath;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::decode::Many;
use feedline_core::tensor::{DType, Field, Shape, bf16, f16};

/// How a field is made from a line.
#[derive(Clone, Debug)]
pub enum Take {
    /// The line as stored.
    Line,
    /// The text of a string.
    Text(KeyPath),
    /// A value as stored.
    Json(KeyPath),
    /// The texts of strings, as a list.
    Texts(KeyPath, usize),
    /// Numbers in memory layout.
    Numbers(KeyPath, Numbers),
}

/// The type of a field of numbers.
#[derive(Clone, Debug)]
pub struct Numbers {
    dtype: DType,
    /// The dimensions; of the first one the maximum, if it varies.
    dims: Vec<usize>,
    varies: bool,
    row_bytes: usize,
}

impl Numbers {
    /// Errors: [`ErrorKind::Config`] for rows of no bytes or too many.
    pub fn of(field: &Field) -> Result<Self> {
        let row_bytes = field.row_bytes();
        if row_bytes == 0 || row_bytes >= 1 << 47 {
            let message = format!(
                "rows of field `{}` have a size that cannot be stored",
                field.name()
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        Ok(Self {
            dtype: field.dtype(),
            dims: field.dims(),
            varies: matches!(field.shape(), Shape::UpTo { .. }),
            row_bytes,
        })
    }
}

#[cold]
fn shape(at: usize, message: String) -> Error {
    Error::new(ErrorKind::Shape, Stage::Decode, message).with_range(at as u64, 1)
}

#[cold]
fn not_text(line: &[u8], at: usize) -> Error {
    let advice = match line.get(at) {
        Some(b'[') => Setting::Texts.hint(|texts| format!("; {texts} reads lists of strings")),
        Some(b'{') => Setting::JsonText.hint(|json| format!("; {json} reads it as it is stored")),
        _ => String::new(),
    };
    shape(
        at,
        format!("{} where a string is expected{advice}", kind(line, at)),
    )
}

impl Take {
    pub fn path(&self) -> Option<&KeyPath> {
        match self {
            Self::Line => None,
            Self::Text(path) | Self::Json(path) => Some(path),
            Self::Texts(path, _) | Self::Numbers(path, _) => Some(path),
        }
    }

    /// Maximum bytes that [`open`](Self::open) puts into its buffer, for a line of `line` bytes.
    pub fn made_max(&self, line: u64) -> u64 {
        match self {
            Self::Line => 0,
            Self::Text(_) | Self::Json(_) => line,
            Self::Texts(_, max) => {
                // An element takes two quotes and a comma.
                let count = (line / 3 + 1).min(*max as u64 + 1);
                line.saturating_add(Many::head_bytes(count as usize) as u64)
            }
            Self::Numbers(_, numbers) if numbers.varies => {
                let most = (line / 2 + 1).saturating_mul(numbers.dtype.size() as u64);
                most.min(numbers.row_bytes as u64)
            }
            Self::Numbers(_, numbers) => numbers.row_bytes as u64,
        }
    }

    /// Bytes of every row, if that is one number.
    pub fn fixed(&self) -> Option<u64> {
        match self {
            Self::Numbers(_, numbers) if !numbers.varies => Some(numbers.row_bytes as u64),
            _ => None,
        }
    }

    /// The field's bytes of a checked line: a part of it, or in `buffer`, which is empty.
    ///
    /// Errors: those of [`KeyPath::values`]; [`ErrorKind::Shape`] for a value of another kind or
    /// number; [`ErrorKind::Decode`] for one out of range.
    pub fn open<'a>(
        &self,
        line: &'a [u8],
        missing: bool,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8]> {
        match self {
            Self::Line => Ok(line),
            Self::Text(path) => match one(path, line, missing)? {
                None => Ok(&[]),
                Some(at) if line.get(at) != Some(&b'"') => Err(not_text(line, at)),
                Some(at) => {
                    if let Some(text) = json::plain_string(line, at) {
                        return Ok(text);
                    }
                    buffer.reserve_exact(after_value(line, at) - at);
                    json::unescape(line, at, buffer)?;
                    Ok(buffer)
                }
            },
            Self::Json(path) => Ok(match one(path, line, missing)? {
                None => &[],
                Some(at) => &line[at..after_value(line, at)],
            }),
            Self::Texts(path, max) => {
                texts(path, *max, line, missing, buffer)?;
                Ok(buffer)
            }
            Self::Numbers(path, numbers) => {
                numbers.read(path, line, missing, buffer)?;
                Ok(buffer)
            }
        }
    }
}

/// Place of the only value of a path.
fn one(path: &KeyPath, line: &[u8], missing: bool) -> Result<Option<usize>> {
    let mut found = None;
    path.values(line, missing, &mut |at| {
        found = at;
        Ok(())
    })?;
    Ok(found)
}

fn texts(path: &KeyPath, max: usize, line: &[u8], missing: bool, out: &mut Vec<u8>) -> Result<()> {
    let mut places = Vec::new();
    path.values(line, missing, &mut |at| {
        if places.len() == max {
            let message = format!("more than {max} strings, at most {max} expected");
            return Err(shape(at.unwrap_or(0), message));
        }
        places.push(at);
        Ok(())
    })?;
    let head = Many::head_bytes(places.len());
    out.resize(head, 0);
    let mut lens = Vec::with_capacity(places.len());
    for at in places {
        let start = out.len();
        match at {
            Some(at) if line.get(at) == Some(&b'"') => json::unescape(line, at, out)?,
            Some(at) => return Err(not_text(line, at)),
            None => {}
        }
        lens.push(out.len() - start);
    }
    Many::write_head(lens.into_iter(), &mut out[..head])
}

impl Numbers {
    fn read(&self, path: &KeyPath, line: &[u8], missing: bool, out: &mut Vec<u8>) -> Result<()> {
        let parse = parser(self.dtype);
        if path.is_list() {
            // The elements of the path are the first dimension.
            let (first, inner) = self.dims.split_first().unwrap_or((&1, &[]));
            let bytes = self.row_bytes / first;
            path.values(line, missing, &mut |at| {
                if out.len() + bytes > self.row_bytes {
                    let message = format!("more than {first} values, at most {first} expected");
                    return Err(shape(at.unwrap_or(0), message));
                }
                match at {
                    Some(at) => array(line, at, inner, parse, out),
                    None => {
                        out.resize(out.len() + bytes, 0);
                        Ok(())
                    }
                }
            })?;
            return self.whole(0, *first, bytes, out.len());
        }
        match one(path, line, missing)? {
            None if self.varies => {}
            None => out.resize(self.row_bytes, 0),
            Some(at) if self.varies => {
                list(line, at, self.dims[0], &self.dims[1..], parse, out)?;
            }
            Some(at) => array(line, at, &self.dims, parse, out)?,
        }
        Ok(())
    }

    /// Refuses too few elements in the first dimension.
    fn whole(&self, at: usize, first: usize, bytes: usize, len: usize) -> Result<()> {
        match self.varies || len == self.row_bytes {
            true => Ok(()),
            false => Err(count(at, len / bytes, first)),
        }
    }
}

#[cold]
fn count(at: usize, there: usize, wanted: usize) -> Error {
    let any = Setting::AnyCount.hint(|any| format!("; {any} accepts any number"));
    shape(at, format!("{there} values, {wanted} expected{any}"))
}

type Parse = fn(&[u8], usize, &mut Vec<u8>) -> Result<usize>;

/// Appends an array of exactly these dimensions.
fn array(line: &[u8], at: usize, dims: &[usize], parse: Parse, out: &mut Vec<u8>) -> Result<()> {
    let Some((first, inner)) = dims.split_first() else {
        return parse(line, at, out).map(|_| ());
    };
    match list(line, at, *first, inner, parse, out)? {
        there if there == *first => Ok(()),
        there => Err(count(at, there, *first)),
    }
}

/// Appends at most `max` elements of a list, each of dimensions `inner`. Returns how many.
fn list(
    line: &[u8],
    at: usize,
    max: usize,
    inner: &[usize],
    parse: Parse,
    out: &mut Vec<u8>,
) -> Result<usize> {
    if line.get(at) != Some(&b'[') {
        let what = format!("{} where a list is expected", kind(line, at));
        return Err(shape(at, what));
    }
    let mut count = 0;
    let mut at = json::after_space(line, at + 1);
    while line.get(at).is_some_and(|byte| *byte != b']') {
        if count == max {
            let message = format!("more than {max} values, at most {max} expected");
            return Err(shape(at, message));
        }
        count += 1;
        let end = match inner {
            // The parser knows where the number ends.
            [] => parse(line, at, out)?,
            inner => {
                array(line, at, inner, parse, out)?;
                after_value(line, at)
            }
        };
        at = json::after_space(line, end);
        if line.get(at) != Some(&b',') {
            break;
        }
        at = json::after_space(line, at + 1);
    }
    Ok(count)
}

/// Reads the value at a place and appends it in memory layout. Returns where it ends.
fn parser(dtype: DType) -> Parse {
    macro_rules! integer {
        ($kind:ty) => {
            |line, at, out| {
                // Token ids and labels: eight bytes at once.
                let bytes = line.get(at..).and_then(<[u8]>::first_chunk);
                if let Some((small, digits @ 1..=7)) = bytes.map(json::small_number)
                    && !matches!(line[at + digits], b'.' | b'e' | b'E')
                    && let Ok(number) = <$kind>::try_from(small)
                {
                    out.extend_from_slice(&number.to_ne_bytes());
                    return Ok(at + digits);
                }
                let (number, end) = integer(line, at)?;
                let number = number.and_then(|number| <$kind>::try_from(number).ok());
                let number =
                    number.ok_or_else(|| out_of_range(line, at, end, stringify!($kind)))?;
                out.extend_from_slice(&number.to_ne_bytes());
                Ok(end)
            }
        };
    }
    macro_rules! float {
        ($name:literal, $from:expr) => {
            |line, at, out| {
                let (number, end) = float(line, at)?;
                let own = $from(number);
                let is_infinite = f64::from(own).is_infinite();
                if is_infinite && line[at..end].last() != Some(&b'y') {
                    return Err(out_of_range(line, at, end, $name));
                }
                out.extend_from_slice(&own.to_ne_bytes());
                Ok(end)
            }
        };
    }
    match dtype {
        DType::Bool => |line, at, out| match line.get(at) {
            Some(first @ (b't' | b'f')) => {
                out.push(u8::from(*first == b't'));
                Ok(after_value(line, at))
            }
            _ => Err(not(line, at, "a boolean")),
        },
        DType::U8 => integer!(u8),
        DType::I8 => integer!(i8),
        DType::U16 => integer!(u16),
        DType::I16 => integer!(i16),
        DType::U32 => integer!(u32),
        DType::I32 => integer!(i32),
        DType::U64 => integer!(u64),
        DType::I64 => integer!(i64),
        DType::F16 => float!("f16", f16::from_f64),
        DType::BF16 => float!("bf16", bf16::from_f64),
        DType::F32 => float!("f32", |number| number as f32),
        DType::F64 => float!("f64", |number: f64| number),
        _ => |line, at, _| Err(not(line, at, "a number of a known dtype")),
    }
}

#[cold]
fn not(line: &[u8], at: usize, wanted: &str) -> Error {
    let advice = match line.get(at) {
        Some(b'"') => Setting::Text.hint(|text| format!("; {text} reads it")),
        Some(b'[') => Setting::AnyCount.hint(|any| format!("; {any} reads a list")),
        _ => String::new(),
    };
    shape(
        at,
        format!("{} where {wanted} is expected{advice}", kind(line, at)),
    )
}

#[cold]
fn out_of_range(line: &[u8], at: usize, end: usize, kind: &str) -> Error {
    let shown = String::from_utf8_lossy(&line[at..end.min(at + 48)]);
    bad(at, format!("{shown} is out of the range of {kind}"))
}

/// The integer at `at`, `None` if it has more than 64 bits, and where it ends.
#[inline]
fn integer(line: &[u8], at: usize) -> Result<(Option<i128>, usize)> {
    let negative = line.get(at) == Some(&b'-');
    let start = at + usize::from(negative);
    let mut end = start;
    let mut number = Some(0_u64);
    while let Some(digit) = line.get(end).filter(|byte| byte.is_ascii_digit()) {
        let digit = u64::from(digit - b'0');
        number = number.and_then(|number| number.checked_mul(10)?.checked_add(digit));
        end += 1;
    }
    if end == start || matches!(line.get(end), Some(b'.' | b'e' | b'E')) {
        return Err(not_whole(line, at));
    }
    let number = number.map(|number| match negative {
        true => -i128::from(number),
        false => i128::from(number),
    });
    Ok((number, end))
}

#[cold]
fn not_whole(line: &[u8], at: usize) -> Error {
    match line.get(at) {
        Some(b'-' | b'0'..=b'9' | b'N' | b'I') => {
            let end = after_value(line, at).min(at + 48);
            let shown = String::from_utf8_lossy(&line[at..end]);
            shape(at, format!("{shown} where a whole number is expected"))
        }
        _ => not(line, at, "a whole number"),
    }
}

/// The number at `at` as Python's `json` reads it, and where it ends.
fn float(line: &[u8], at: usize) -> Result<(f64, usize)> {
    let end = after_value(line, at);
    let number = match line.get(at) {
        Some(b'-' | b'0'..=b'9' | b'N' | b'I') => std::str::from_utf8(&line[at..end]).ok(),
        _ => None,
    };
    // `NaN`, `Infinity` and `-Infinity` are among the words that Rust reads.
    number
        .and_then(|text| text.parse().ok())
        .map(|number| (number, end))
        .ok_or_else(|| not(line, at, "a number"))
}
