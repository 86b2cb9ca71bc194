//! JSON over bytes: one pass checks a line, and others find values in it, without objects.
//!
//! ```text
//! line ──check──► UTF-8, one whole object ──members──► keys and places of values ──string──► text
//! ```
//!
//! Limits: [`DEPTH_MAX`] levels. Invariants: [`check`] accepts what Python's `json.loads` accepts
//! as an object (`NaN`, `Infinity` and `-Infinity` are numbers), within the limit, and nothing
//! else. All other functions expect checked bytes; of others they give any answer, but they end,
//! and never panic. Places are offsets in the line.

use feedline_base::error::{Error, ErrorKind, Result, Stage};

/// Maximum levels of objects and lists.
pub const DEPTH_MAX: u32 = 128;

/// An error about the byte at `at`.
#[cold]
pub fn bad(at: usize, what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Decode, Stage::Decode, what).with_range(at as u64, 1)
}

/// The byte at `at`, for people.
#[cold]
fn found(line: &[u8], at: usize) -> String {
    match line.get(at) {
        None => "the end of the line".into(),
        Some(byte @ 0x21..0x7f) => format!("{:?}", char::from(*byte)),
        Some(byte) => format!("byte {byte:#04x}"),
    }
}

#[cold]
fn expected(what: &str, line: &[u8], at: usize) -> Error {
    if at < line.len() {
        return bad(at, format!("{what} expected, {} found", found(line, at)));
    }
    let message = format!("the line ends where {what} is expected");
    Error::new(ErrorKind::Truncated, Stage::Decode, message).with_range(at as u64, 0)
}

/// Checks that the line is one object and nothing else.
///
/// Errors: [`ErrorKind::Decode`], [`ErrorKind::Truncated`] for an object without its end,
/// [`ErrorKind::Limit`] for too many levels, [`ErrorKind::Shape`] for another value than an
/// object; all with the place.
pub fn check(line: &[u8]) -> Result<()> {
    let mut walk = Walk { line, at: 0 };
    walk.space();
    let start = walk.at;
    match walk.peek() {
        Some(b'{') => {}
        Some(0xef) if line[walk.at..].starts_with(b"\xef\xbb\xbf") => {
            let what = "a byte order mark; only the first line of a file may have one";
            return Err(bad(walk.at, what));
        }
        _ => {
            walk.value()?;
            let what = format!("{}, one object a line expected", kind(line, start));
            let error = Error::new(ErrorKind::Shape, Stage::Decode, what);
            return Err(error.with_range(0, line.len() as u64));
        }
    }
    walk.value()?;
    walk.end("the object")
}

/// Checks that the text is one value and nothing else. Errors: those of [`check`], but any value
/// will do.
#[cfg(feature = "tokenizers")]
pub fn check_value(text: &[u8]) -> Result<()> {
    let mut walk = Walk { line: text, at: 0 };
    walk.value()?;
    walk.end("the value")
}

/// The kind of the value at `at`, for people.
pub fn kind(line: &[u8], at: usize) -> &'static str {
    match line.get(at) {
        Some(b'"') => "a string",
        Some(b'{') => "an object",
        Some(b'[') => "a list",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

struct Walk<'a> {
    line: &'a [u8],
    at: usize,
}

impl Walk<'_> {
    fn peek(&self) -> Option<u8> {
        self.line.get(self.at).copied()
    }

    #[inline]
    fn space(&mut self) {
        self.at = after_space(self.line, self.at);
    }

    /// Checks that nothing follows, and that all is UTF-8.
    fn end(&mut self, what: &str) -> Result<()> {
        self.space();
        let line = self.line;
        if self.at < line.len() {
            let what = format!("{what} is followed by {}", found(line, self.at));
            return Err(bad(self.at, what));
        }
        // What is not ASCII may stand only in strings, so this comes last: its error is the clearest.
        std::str::from_utf8(line).map(|_| ()).map_err(|error| {
            let at = error.valid_up_to();
            bad(at, format!("not UTF-8: {}", found(line, at)))
        })
    }

    /// Checks the value that begins here.
    fn value(&mut self) -> Result<()> {
        let mut depth = 0;
        // Of each level, whether it is an object.
        let mut objects = 0_u128;
        loop {
            self.space();
            let open = self.at;
            match self.peek() {
                Some(bracket @ (b'{' | b'[')) => {
                    if depth == DEPTH_MAX {
                        let what = format!("more than {DEPTH_MAX} levels");
                        let error = Error::new(ErrorKind::Limit, Stage::Decode, what);
                        return Err(error.with_range(open as u64, 1));
                    }
                    depth += 1;
                    objects = objects << 1 | u128::from(bracket == b'{');
                    self.at += 1;
                    self.space();
                    // `]` is two behind `[`, and `}` behind `{`.
                    if self.peek() != Some(bracket + 2) {
                        match bracket {
                            b'{' => self.key()?,
                            _ => self.at = after_whole_numbers(self.line, self.at),
                        }
                        continue;
                    }
                    self.at += 1;
                    depth -= 1;
                    objects >>= 1;
                }
                Some(b'"') => self.string()?,
                Some(b'-' | b'0'..=b'9') => self.number()?,
                Some(b't') => self.word("true")?,
                Some(b'f') => self.word("false")?,
                Some(b'n') => self.word("null")?,
                Some(b'N') => self.word("NaN")?,
                Some(b'I') => self.word("Infinity")?,
                _ => return Err(expected("a value", self.line, open)),
            }
            loop {
                if depth == 0 {
                    return Ok(());
                }
                self.space();
                let is_object = objects & 1 == 1;
                match self.peek() {
                    Some(b',') => {
                        self.at += 1;
                        if is_object {
                            self.space();
                            self.key()?;
                        }
                        break;
                    }
                    Some(b'}') if is_object => {}
                    Some(b']') if !is_object => {}
                    _ if is_object => return Err(expected("',' or '}'", self.line, self.at)),
                    _ => return Err(expected("',' or ']'", self.line, self.at)),
                }
                self.at += 1;
                depth -= 1;
                objects >>= 1;
            }
        }
    }

    /// Checks a key and its colon.
    fn key(&mut self) -> Result<()> {
        if self.peek() != Some(b'"') {
            return Err(expected("a key", self.line, self.at));
        }
        self.string()?;
        self.space();
        if self.peek() != Some(b':') {
            return Err(expected("':'", self.line, self.at));
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<()> {
        let open = self.at;
        self.at += 1;
        loop {
            self.at += plain_len(&self.line[self.at..]);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => match self.line.get(self.at + 1) {
                    Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
                    Some(b'u') if hex(self.line, self.at + 2).is_some() => self.at += 6,
                    None => self.at += 1,
                    Some(_) => {
                        let shown = &self.line[self.at..(self.at + 6).min(self.line.len())];
                        let shown = shown.escape_ascii();
                        return Err(bad(
                            self.at,
                            format!("the escape \"{shown}\" does not exist"),
                        ));
                    }
                },
                Some(byte) => {
                    let what = format!("byte {byte:#04x} in a string: escape control characters");
                    return Err(bad(self.at, what));
                }
                None => {
                    let what = "the line ends within a string";
                    let error = Error::new(ErrorKind::Truncated, Stage::Decode, what);
                    let left = self.line.len() - open;
                    return Err(error.with_range(open as u64, left as u64));
                }
            }
        }
    }

    fn digits(&mut self) -> Result<()> {
        let rest = &self.line[self.at..];
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 {
            return Err(expected("a digit", self.line, self.at));
        }
        self.at += count;
        Ok(())
    }

    fn number(&mut self) -> Result<()> {
        if self.peek() == Some(b'-') {
            self.at += 1;
            if self.peek() == Some(b'I') {
                return self.word("Infinity");
            }
        }
        match self.peek() {
            Some(b'0') => {
                self.at += 1;
                if self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
                    return Err(bad(self.at - 1, "a number begins with 0"));
                }
            }
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn word(&mut self, word: &str) -> Result<()> {
        match self.line[self.at..].starts_with(word.as_bytes()) {
            true => self.at += word.len(),
            false => return Err(expected("a value", self.line, self.at)),
        }
        Ok(())
    }
}

/// Offset of the last value of those at the start of a list that are whole numbers, with a comma and
/// at most one space between them: most of a list of token ids, checked eight bytes at once.
fn after_whole_numbers(line: &[u8], at: usize) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const LOW: u64 = 0x7f * ONES;
    // The high bit of each byte that is less than `end`.
    const fn below(word: u64, end: u64) -> u64 {
        !(((word & LOW) + (0x80 - end) * ONES) | word) & !LOW
    }
    // The high bit of each byte that is `byte`.
    const fn equal(word: u64, byte: u8) -> u64 {
        below(word ^ (byte as u64 * ONES), 1)
    }
    let (words, _) = line[at..].as_chunks::<8>();
    // High bits of the bytes before these.
    let mut after_digit = 0;
    let mut after_comma = 0x80;
    let mut after_zero = 0;
    let mut len = 0;
    for word in words {
        let word = u64::from_le_bytes(*word);
        let digits = below(word ^ (u64::from(b'0') * ONES), 10);
        let zeros = equal(word, b'0');
        let commas = equal(word, b',');
        let spaces = equal(word, b' ');
        let after_digits = digits << 8 | after_digit;
        let first_zeros = zeros & !after_digits;
        let good = digits & !(first_zeros << 8 | after_zero)
            | commas & after_digits
            | spaces & (commas << 8 | after_comma);
        if good != !LOW {
            break;
        }
        after_digit = digits >> 56;
        after_comma = commas >> 56;
        after_zero = first_zeros >> 56;
        len += 8;
    }
    let run = &line[at..at + len];
    memchr::memrchr(b',', run).map_or(at, |comma| at + comma + 1)
}

/// The number of the leading digits, and how many they are: 8 at most.
#[inline]
pub fn small_number(bytes: &[u8; 8]) -> (u32, usize) {
    const HIGH: u64 = 0xf0f0_f0f0_f0f0_f0f0;
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    let word = u64::from_le_bytes(*bytes);
    // The high half of a digit is 3, also of one that is 6 more. A carry changes later bytes only.
    let others = (word & HIGH ^ ZEROS) | (word.wrapping_add(0x0606_0606_0606_0606) & HIGH ^ ZEROS);
    let digits = others.trailing_zeros() as usize / 8;
    if digits == 0 {
        return (0, 0);
    }
    // Zeros come before the first digit. Then pairs, fours and eights are added up.
    let number = (word & !HIGH) << (64 - 8 * digits);
    let number = number.wrapping_mul(10).wrapping_add(number >> 8) & 0x00ff_00ff_00ff_00ff;
    let number = number.wrapping_mul(100).wrapping_add(number >> 16) & 0x0000_ffff_0000_ffff;
    let number = number.wrapping_mul(10_000).wrapping_add(number >> 32);
    (number as u32, digits)
}

/// Offset of the first byte at or behind `at` that is no space.
#[inline]
pub fn after_space(line: &[u8], mut at: usize) -> usize {
    while let Some(b' ' | b'\t' | b'\r' | b'\n') = line.get(at) {
        at += 1;
    }
    at
}

/// The number of 4 hexadecimal digits at `at`.
fn hex(line: &[u8], at: usize) -> Option<u16> {
    let digits = line.get(at..at + 4)?;
    digits.iter().try_fold(0, |number, digit| {
        Some(number << 4 | char::from(*digit).to_digit(16)? as u16)
    })
}

/// Bytes before the first quote, backslash or control character.
#[inline]
fn plain_len(bytes: &[u8]) -> usize {
    run_len(bytes, |byte| {
        (byte == b'"') | (byte == b'\\') | (byte < 0x20)
    })
}

/// Bytes before the first quote or bracket.
#[inline]
fn flat_len(bytes: &[u8]) -> usize {
    // `[` and `{` differ in one bit, as do `]` and `}`.
    run_len(bytes, |byte| {
        (byte == b'"') | (byte | 0x20 == b'{') | (byte | 0x20 == b'}')
    })
}

/// Bytes before the first that ends a run. Written so that the compiler uses vectors.
#[inline]
fn run_len(bytes: &[u8], ends: impl Fn(u8) -> bool) -> usize {
    let (blocks, _) = bytes.as_chunks::<16>();
    let plain = blocks
        .iter()
        .take_while(|block| !block.iter().fold(false, |any, byte| any | ends(*byte)))
        .count();
    let plain = 16 * plain;
    let rest = &bytes[plain..];
    let end = rest.iter().position(|byte| ends(*byte));
    plain + end.unwrap_or(rest.len())
}

/// Offset behind the string that begins at `at`.
fn after_string(line: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    loop {
        let rest = line.get(at..).unwrap_or_default();
        match memchr::memchr2(b'"', b'\\', rest) {
            None => return line.len(),
            Some(end) if rest[end] == b'"' => return at + end + 1,
            Some(escape) => at += escape + 2,
        }
    }
}

/// Offset behind the value that begins at `at`.
pub fn after_value(line: &[u8], at: usize) -> usize {
    match line.get(at) {
        Some(b'"') => after_string(line, at),
        Some(b'{' | b'[') => {
            let mut depth = 0_u64;
            let mut at = at;
            loop {
                at += flat_len(line.get(at..).unwrap_or_default());
                match line.get(at) {
                    Some(b'"') => {
                        at = after_string(line, at);
                        continue;
                    }
                    Some(b'{' | b'[') => depth += 1,
                    Some(_) if depth > 1 => depth -= 1,
                    Some(_) => return at + 1,
                    None => return line.len(),
                }
                at += 1;
            }
        }
        _ => {
            let rest = line.get(at..).unwrap_or_default();
            let ends =
                |byte: &u8| matches!(byte, b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n');
            at + rest.iter().position(ends).unwrap_or(rest.len())
        }
    }
}

/// Place of the value of the last member with this key, in the object that begins at `at`, and the
/// offset behind the object.
pub fn member(line: &[u8], at: usize, key: &str) -> (Option<usize>, usize) {
    let mut last = None;
    let end = members(line, at, |name, value| {
        if is_key(name, key) {
            last = Some(value);
        }
    });
    (last, end)
}

/// Calls `each` with every key of the object that begins at `at`, with its quotes, and with the
/// place of its value. Returns the offset behind the object.
pub fn members<'a>(line: &'a [u8], at: usize, mut each: impl FnMut(&'a [u8], usize)) -> usize {
    let mut at = after_space(line, at + 1);
    while line.get(at) == Some(&b'"') {
        let end = after_string(line, at);
        let colon = after_space(line, end);
        let value = after_space(line, colon + 1);
        if value >= line.len() {
            return line.len();
        }
        each(&line[at..end], value);
        at = after_space(line, after_value(line, value));
        if line.get(at) != Some(&b',') {
            break;
        }
        at = after_space(line, at + 1);
    }
    at + 1
}

/// Calls `each` with the number and the place of every element of the list that begins at `at`; it
/// returns the offset behind the element if it knows. Returns how many there are, and the offset
/// behind the list.
///
/// Errors: the first of `each`.
pub fn elements(
    line: &[u8],
    at: usize,
    mut each: impl FnMut(usize, usize) -> Result<Option<usize>>,
) -> Result<(usize, usize)> {
    let mut count = 0;
    let mut at = after_space(line, at + 1);
    while line.get(at).is_some_and(|byte| *byte != b']') {
        let end = each(count, at)?.unwrap_or_else(|| after_value(line, at));
        count += 1;
        at = after_space(line, end);
        if line.get(at) != Some(&b',') {
            break;
        }
        at = after_space(line, at + 1);
    }
    Ok((count, at + 1))
}

/// Whether a key, with its quotes, is this one.
fn is_key(quoted: &[u8], key: &str) -> bool {
    let inner = quoted
        .get(1..quoted.len().saturating_sub(1))
        .unwrap_or_default();
    if !inner.contains(&b'\\') {
        return inner == key.as_bytes();
    }
    let mut text = Vec::new();
    unescape(quoted, 0, &mut text).is_ok() && text == key.as_bytes()
}

/// The string that begins at `at`: in place if it has no escape, else `None`.
pub fn plain_string(line: &[u8], at: usize) -> Option<&[u8]> {
    let rest = line.get(at + 1..)?;
    let end = memchr::memchr2(b'"', b'\\', rest)?;
    (rest[end] == b'"').then(|| &rest[..end])
}

/// Appends the text of the string that begins at `at` to `out`: never more bytes than it has in
/// the line.
///
/// Errors: [`ErrorKind::Decode`] for half of a surrogate pair, which is no character.
pub fn unescape(line: &[u8], at: usize, out: &mut Vec<u8>) -> Result<()> {
    let mut at = at + 1;
    loop {
        let rest = line.get(at..).unwrap_or_default();
        let Some(run) = memchr::memchr2(b'"', b'\\', rest) else {
            out.extend_from_slice(rest);
            return Ok(());
        };
        out.extend_from_slice(&rest[..run]);
        if rest[run] == b'"' {
            return Ok(());
        }
        at += run;
        let plain = match line.get(at + 1) {
            Some(b'u') => {
                let (letter, len) = letter(line, at)?;
                out.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
                at += len;
                continue;
            }
            Some(b'b') => 8,
            Some(b'f') => 12,
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b't') => b'\t',
            Some(other) => *other,
            None => return Ok(()),
        };
        out.push(plain);
        at += 2;
    }
}

/// The character of the `\u` escape at `at`, and the bytes of the escape: 6, or 12 of a pair.
fn letter(line: &[u8], at: usize) -> Result<(char, usize)> {
    let first = hex(line, at + 2);
    let second = (line.get(at + 6..at + 8) == Some(b"\\u"))
        .then(|| hex(line, at + 8))
        .flatten();
    let units = first.into_iter().chain(second);
    match char::decode_utf16(units).next() {
        Some(Ok(letter)) => Ok((letter, if letter > '\u{ffff}' { 12 } else { 6 })),
        _ => {
            let shown = String::from_utf8_lossy(&line[at..(at + 6).min(line.len())]);
            let what = format!("the escape \"{shown}\" is half of a surrogate pair");
            Err(bad(at, what))
        }
    }
}
