//! The header of an `.npy` array: a Python dict literal of three keys, accepted only as numpy
//! itself writes it.
//!
//! ```text
//! \x93NUMPY | major minor | length (u16, from version 2 on u32) | {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   \n
//! ```
//!
//! Limits: headers up to 64 KiB, 64 dimensions. Legal but refused, with an error that names the
//! cause: objects (pickles), big-endian numbers, structured types, strings, dates, complex numbers,
//! Fortran order of more than one dimension. Invariants: no byte of the header is skipped, and
//! shape × dtype is exactly the length of the data after it.

use crate::arrays::Array;
use crate::{foreign, number};
use feedline_base::error::{ErrorKind, Result};
use feedline_core::storage::Blob;
use feedline_core::tensor::DType;

/// Maximum bytes of a header. Typical headers have about 100.
const HEADER_MAX: u64 = 1 << 16;
/// Maximum dimensions, as in numpy 2.
const DIMS_MAX: usize = 64;
const MAGIC: &[u8] = b"\x93NUMPY";

/// Reads the header of the array that fills `len` bytes from `start`.
///
/// Errors: [`ErrorKind::Truncated`] for a cut array; [`ErrorKind::Decode`] for extra bytes, and for
/// a malformed or refused header.
pub(crate) fn read(input: &Blob, start: u64, len: u64) -> Result<Array> {
    // Most headers have 128 bytes in all, so one read is enough.
    let mut head = [0; 256];
    let known = head.len().min(len as usize);
    let head = &mut head[..known];
    input.fill(start, head, "the header")?;
    let (text_start, text_len) = preamble(input, head, start)?;
    let size = text_start as u64 + text_len;
    if size > len {
        let message = format!("the header has {size} bytes, the array has {len} in all");
        return Err(input.error(ErrorKind::Truncated, message, start, size));
    }
    if text_len > HEADER_MAX {
        let message = format!("a header of {text_len} bytes, the limit is {HEADER_MAX}");
        return Err(input.error(ErrorKind::Limit, message, start, size));
    }
    let dict = match head.get(text_start..size as usize) {
        Some(text) => parse(text),
        None => parse(&input.read(start + text_start as u64, text_len, "the header")?),
    };
    let (dtype, shape) = dict.map_err(|message| input.wrong(message, start, size))?;
    let array = Array {
        dtype,
        shape,
        offset: start + size,
    };
    let wanted = array
        .checked_bytes()
        .and_then(|bytes| bytes.checked_add(size));
    if wanted == Some(len) {
        return Ok(array);
    }
    let wanted_text = wanted.map_or("over 2^64".into(), |bytes| bytes.to_string());
    let message = format!(
        "{} need {wanted_text} bytes with the header, there are {len}",
        array.described()
    );
    let kind = if wanted.is_some_and(|wanted| wanted < len) {
        ErrorKind::Decode
    } else {
        ErrorKind::Truncated
    };
    Err(input.error(kind, message, start, len))
}

/// Offset of the dict literal in `head`, and the literal's length in bytes.
fn preamble(input: &Blob, head: &[u8], start: u64) -> Result<(usize, u64)> {
    let wrong = |message: String, len| Err(input.wrong(message, start, len));
    let cut = || {
        input.error(
            ErrorKind::Truncated,
            "cut within the header",
            start,
            head.len() as u64,
        )
    };
    let magic = &head[..MAGIC.len().min(head.len())];
    if !MAGIC.starts_with(magic) {
        let found = foreign(head).map_or_else(
            || format!("it starts with {magic:02x?}"),
            |name| format!("it is {name}"),
        );
        return wrong(format!("not an npy array: {found}"), MAGIC.len() as u64);
    }
    let major = *head.get(6).ok_or_else(cut)?;
    let minor = *head.get(7).ok_or_else(cut)?;
    let end = match (major, minor) {
        (1, 0) => 10,
        (2 | 3, 0) => 12,
        _ => {
            return wrong(
                format!("npy version {major}.{minor}; known are 1.0, 2.0 and 3.0"),
                8,
            );
        }
    };
    Ok((end, number(head.get(8..end).ok_or_else(cut)?)))
}

/// Parses the dict literal and the padding after it.
fn parse(text: &[u8]) -> Result<(DType, Vec<u64>), String> {
    let mut cursor = Cursor { text, at: 0 };
    let mut descr = None;
    let mut fortran = None;
    let mut shape = None;
    cursor.expect(b'{')?;
    while !cursor.take(b'}') {
        let key = cursor.string()?;
        cursor.expect(b':')?;
        let doubled = match key {
            "descr" => descr.replace(cursor.descr()?).is_some(),
            "fortran_order" => fortran.replace(cursor.truth()?).is_some(),
            "shape" => shape.replace(cursor.shape()?).is_some(),
            _ => return Err(format!("the header has the unknown key `{key}`")),
        };
        if doubled {
            return Err(format!("the header has the key `{key}` twice"));
        }
        if !cursor.take(b',') {
            cursor.expect(b'}')?;
            break;
        }
    }
    cursor.end()?;
    let (Some(dtype), Some(fortran), Some(shape)) = (descr, fortran, shape) else {
        return Err("the header lacks `descr`, `fortran_order` or `shape`".into());
    };
    if fortran && shape.len() > 1 {
        return Err("the array is in Fortran order: write it with np.ascontiguousarray".into());
    }
    Ok((dtype, shape))
}

/// Parses numpy's `descr` into a dtype.
fn dtype_of(descr: &str) -> Result<DType, String> {
    let (order, name) = match descr.as_bytes() {
        [order @ (b'<' | b'>' | b'=' | b'|'), ..] => (*order, &descr[1..]),
        _ => (b'=', descr),
    };
    let dtype = match name {
        "b1" => DType::Bool,
        "u1" => DType::U8,
        "i1" => DType::I8,
        "u2" => DType::U16,
        "i2" => DType::I16,
        "u4" => DType::U32,
        "i4" => DType::I32,
        "u8" => DType::U64,
        "i8" => DType::I64,
        "f2" => DType::F16,
        "f4" => DType::F32,
        "f8" => DType::F64,
        _ if name.starts_with('O') => {
            return Err("an array of objects is a pickle, which is never read".into());
        }
        _ if name.starts_with(['U', 'S', 'a']) => {
            return Err(format!(
                "text (`{descr}`) is not supported in a batch: leave it out, or store numbers"
            ));
        }
        _ => {
            return Err(format!(
                "the dtype `{descr}` is not supported in a batch: use numbers or bool"
            ));
        }
    };
    let native = if cfg!(target_endian = "little") {
        b'<'
    } else {
        b'>'
    };
    match order {
        b'|' if dtype.size() > 1 => Err(format!("the dtype `{descr}` says no byte order")),
        b'<' | b'>' if order != native && dtype.size() > 1 => Err(format!(
            "`{descr}` is not in native byte order: write it in this machine's byte order"
        )),
        _ => Ok(dtype),
    }
}

/// Cursor over the literal. It skips whitespace between tokens and nothing else.
struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn peek(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\n') = self.text.get(self.at) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), String> {
        if self.take(byte) {
            Ok(())
        } else {
            Err(self.unexpected(&format!("`{}`", byte as char)))
        }
    }

    fn unexpected(&mut self, wanted: &str) -> String {
        let found = match self.peek() {
            Some(byte) => format!("`{}`", byte.escape_ascii()),
            None => "the end".into(),
        };
        format!(
            "byte {} of the header's dict: {wanted} expected, {found} found",
            self.at
        )
    }

    fn end(&mut self) -> Result<(), String> {
        if self.peek().is_none() {
            Ok(())
        } else {
            Err(self.unexpected("the end"))
        }
    }

    /// Parses a string without escapes, in single or double quotes.
    fn string(&mut self) -> Result<&'a str, String> {
        let Some(quote @ (b'\'' | b'"')) = self.peek() else {
            return Err(self.unexpected("a string"));
        };
        let rest = &self.text[self.at + 1..];
        let len = rest
            .iter()
            .position(|byte| *byte == quote)
            .ok_or("a string of the header has no end")?;
        if !rest[..len]
            .iter()
            .all(|byte| (b' '..=b'~').contains(byte) && *byte != b'\\')
        {
            return Err(self.unexpected("a plain ASCII string"));
        }
        self.at += len + 2;
        std::str::from_utf8(&rest[..len]).map_err(|_| "a string of the header is not ASCII".into())
    }

    fn descr(&mut self) -> Result<DType, String> {
        if let Some(b'[' | b'(') = self.peek() {
            return Err(
                "structured arrays (several named columns in one) are not supported in a batch"
                    .into(),
            );
        }
        dtype_of(self.string()?)
    }

    fn truth(&mut self) -> Result<bool, String> {
        self.peek();
        for (word, value) in [("True", true), ("False", false)] {
            if self.text[self.at..].starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.unexpected("True or False"))
    }

    fn shape(&mut self) -> Result<Vec<u64>, String> {
        let mut dims = Vec::new();
        self.expect(b'(')?;
        while !self.take(b')') {
            if dims.len() == DIMS_MAX {
                return Err(format!("more than {DIMS_MAX} dimensions"));
            }
            dims.push(self.integer()?);
            if !self.take(b',') {
                // Python reads `(3)` as a number, not a tuple.
                if dims.len() == 1 {
                    return Err(self.unexpected("`,`"));
                }
                self.expect(b')')?;
                break;
            }
        }
        Ok(dims)
    }

    fn integer(&mut self) -> Result<u64, String> {
        self.peek();
        let rest = &self.text[self.at..];
        let len = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        // As in Python, `03` is not a number.
        if len == 0 || (len > 1 && rest[0] == b'0') {
            return Err(self.unexpected("a dimension"));
        }
        let digits = std::str::from_utf8(&rest[..len]).unwrap_or_default();
        let value = digits
            .parse()
            .map_err(|_| format!("the dimension {digits} does not fit 64 bits"))?;
        self.at += len;
        // Python 2 wrote this suffix after long integers.
        self.at += usize::from(self.text.get(self.at) == Some(&b'L'));
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Makes an npy file of version `major` with this dict and `data` bytes.
    fn file(major: u8, dict: &str, data: usize) -> Vec<u8> {
        let mut out = [MAGIC, &[major, 0]].concat();
        match major {
            1 => out.extend((dict.len() as u16).to_le_bytes()),
            _ => out.extend((dict.len() as u32).to_le_bytes()),
        }
        out.extend(dict.as_bytes());
        out.resize(out.len() + data, 7);
        out
    }

    fn of(bytes: &[u8]) -> Result<Array> {
        read(&Blob::memory(bytes.to_vec().into()), 0, bytes.len() as u64)
    }

    #[test]
    fn headers_of_numpy_and_other_writers_are_read() {
        let cases: [(u8, &str, usize, DType, &[u64]); 9] = [
            (
                1,
                "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   \n",
                48,
                DType::F32,
                &[3, 4],
            ),
            (
                2,
                "{'descr': '|b1', 'fortran_order': False, 'shape': (5,), }\n",
                5,
                DType::Bool,
                &[5],
            ),
            (
                3,
                "{'descr': '<i8', 'fortran_order': False, 'shape': (), }\n",
                8,
                DType::I64,
                &[],
            ),
            (
                1,
                "{\"shape\":(2,2),\"descr\":\"<f2\",\"fortran_order\":False}",
                8,
                DType::F16,
                &[2, 2],
            ),
            (
                1,
                "{'descr': '<u2', 'fortran_order': True, 'shape': (3,), }\n",
                6,
                DType::U16,
                &[3],
            ),
            (
                1,
                "{'descr': '|i1', 'fortran_order': False, 'shape': (2L, 3L), }\n",
                6,
                DType::I8,
                &[2, 3],
            ),
            (
                1,
                "{'descr': 'u1', 'fortran_order': False, 'shape': (0, 9), }\n",
                0,
                DType::U8,
                &[0, 9],
            ),
            (
                1,
                "{'descr': '=u4', 'fortran_order': False, 'shape': (1, 1, 1), }\n",
                4,
                DType::U32,
                &[1, 1, 1],
            ),
            (
                1,
                "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 1,), }\n",
                8,
                DType::F64,
                &[1, 1],
            ),
        ];
        for (major, dict, data, dtype, shape) in cases {
            let header = of(&file(major, dict, data)).unwrap();
            let size = file(major, dict, 0).len() as u64;
            assert_eq!(
                header,
                Array {
                    dtype,
                    shape: shape.to_vec(),
                    offset: size
                },
                "{dict}"
            );
        }
        let long = format!(
            "{{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }}{}\n",
            " ".repeat(3000)
        );
        assert_eq!(of(&file(2, &long, 1)).unwrap().shape, [1]);
    }

    #[test]
    fn unsupported_headers_are_refused_by_name() {
        let with = |descr: &str, shape: &str| {
            format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}")
        };
        let cases = [
            (with("'|O'", "(1,)"), "pickle"),
            (with("'>f4'", "(1,)"), "not in native byte order"),
            (with("'|f4'", "(1,)"), "no byte order"),
            (with("[('a', '<f4')]", "(1,)"), "structured"),
            (with("'<U3'", "(1,)"), "`<U3`"),
            (with("'<c8'", "(1,)"), "`<c8`"),
            (with("'<M8[ns]'", "(1,)"), "`<M8[ns]`"),
            (with("'<f4'", "(1)"), "`,` expected"),
            (with("'<f4'", "(-1,)"), "a dimension expected, `-` found"),
            (with("'<f4'", "(01,)"), "a dimension"),
            (with("'<f4'", "(99999999999999999999,)"), "64 bits"),
            (with("'<f4'", "(4294967296, 4294967296)"), "over 2^64"),
            (
                with("'<f4'", &format!("({})", "1, ".repeat(65))),
                "64 dimensions",
            ),
            (
                "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }".into(),
                "Fortran",
            ),
            ("{'descr': '<f4', 'shape': (2, 2), }".into(), "lacks"),
            (
                "{'descr': '<f4', 'descr': '<f4', 'fortran_order': True, 'shape': (), }".into(),
                "twice",
            ),
            (
                "{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}".into(),
                "`more`",
            ),
            (
                "{'descr': '<f4', 'fortran_order': False, 'shape': ()} x".into(),
                "the end expected, `x` found",
            ),
            ("{'descr".into(), "no end"),
            ("__import__('os')".into(), "`{` expected"),
            (String::new(), "the end found"),
        ];
        for (dict, words) in cases {
            let error = of(&file(1, &dict, 4)).unwrap_err();
            assert!(error.to_string().contains(words), "{dict}: {error}");
            assert!(
                matches!(error.kind(), ErrorKind::Decode | ErrorKind::Truncated),
                "{dict}: {error}"
            );
        }
    }

    #[test]
    fn lengths_are_checked_before_any_read() {
        let dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }\n";
        let cases = [
            (
                b"PK\x03\x04....".to_vec(),
                ErrorKind::Decode,
                "not an npy array",
            ),
            (Vec::new(), ErrorKind::Truncated, "cut within"),
            (file(4, dict, 12), ErrorKind::Decode, "version 4.0"),
            (
                file(1, dict, 11),
                ErrorKind::Truncated,
                "f32 [3] need 80 bytes with the header, there are 79",
            ),
            (
                file(1, dict, 13),
                ErrorKind::Decode,
                "need 80 bytes with the header, there are 81",
            ),
            (
                [MAGIC, &[2, 0, 0xff, 0xff, 0xff, 0xff]].concat(),
                ErrorKind::Truncated,
                "4294967307",
            ),
            (file(2, &" ".repeat(70_000), 0), ErrorKind::Limit, "70000"),
        ];
        for (bytes, kind, words) in cases {
            let error = of(&bytes).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_dict_makes_the_parser_panic(dict in "[ '\"{}(),:\\[\\]<>|A-Za-z0-9_\\\\\n]{0,80}", major in 1_u8..4) {
            let _ = of(&file(major, &dict, 3));
        }

        #[test]
        fn written_headers_are_read_back(dims in prop::collection::vec(0_u64..9, 0..5), size in 0_usize..4) {
            let (descr, dtype) = [("|u1", DType::U8), ("<f2", DType::F16), ("<i4", DType::I32), ("<f8", DType::F64)][size];
            let tuple: String = dims.iter().map(|dim| format!("{dim}, ")).collect();
            let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({tuple}), }}\n");
            let data = dims.iter().product::<u64>() as usize * dtype.size();
            let header = of(&file(1, &dict, data)).unwrap();
            prop_assert_eq!((header.dtype, header.shape), (dtype, dims));
        }
    }
}
