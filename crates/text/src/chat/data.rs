//! JSON of the data as values of a template.
//!
//! Limits: those of `jsonl::json`. Invariants: bytes are checked first, so reading them needs no
//! further checks; numbers are those of Python's `json`.

use super::value::{Dict, Key, Value};
use crate::jsonl::json;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::rc::Rc;
use std::sync::Arc;

/// Digits of an integer that Python reads.
const DIGITS_MAX: usize = 4300;

/// Reads one value.
///
/// Errors: [`ErrorKind::Decode`] and others of `json::check_value`; half of a surrogate pair.
pub fn parse(text: &[u8]) -> Result<Value> {
    json::check_value(text)?;
    let mut walk = Walk { text, at: 0 };
    walk.value()
}

struct Walk<'a> {
    text: &'a [u8],
    at: usize,
}

impl Walk<'_> {
    fn peek(&mut self) -> u8 {
        self.at = json::after_space(self.text, self.at);
        self.text.get(self.at).copied().unwrap_or(0)
    }

    /// Whether another element follows; goes behind the comma or the bracket.
    fn has_more(&mut self) -> bool {
        let next = self.peek();
        self.at += 1;
        next == b','
    }

    /// Recursion ends at `json::DEPTH_MAX` levels.
    fn value(&mut self) -> Result<Value> {
        Ok(match self.peek() {
            b'"' => Value::Str(self.string()?),
            b'{' => Value::Dict(Rc::new(self.object()?)),
            b'[' => Value::list(self.list()?),
            _ => {
                let end = json::after_value(self.text, self.at);
                let word = &self.text[self.at..end];
                self.at = end;
                scalar(word)?
            }
        })
    }

    fn string(&mut self) -> Result<Arc<str>> {
        let at = self.at;
        let end = json::after_value(self.text, at);
        self.at = end;
        let mut unescaped = Vec::new();
        let bytes = match json::plain_string(self.text, at) {
            Some(plain) => plain,
            None => {
                json::unescape(self.text, at, &mut unescaped)?;
                &unescaped
            }
        };
        let text = std::str::from_utf8(bytes);
        text.map(Arc::from)
            .map_err(|error| Error::decode("not UTF-8").with_source(error))
    }

    fn list(&mut self) -> Result<Vec<Value>> {
        let mut items = Vec::new();
        self.at += 1;
        if self.peek() == b']' {
            self.at += 1;
            return Ok(items);
        }
        loop {
            items.push(self.value()?);
            if !self.has_more() {
                return Ok(items);
            }
        }
    }

    fn object(&mut self) -> Result<Dict> {
        let mut dict = Dict::new();
        self.at += 1;
        if self.peek() == b'}' {
            self.at += 1;
            return Ok(dict);
        }
        loop {
            self.peek();
            let key = self.string()?;
            self.peek();
            self.at += 1;
            // Of equal keys the last value counts, at the place of the first.
            dict.insert(Key::Str(key), self.value()?);
            if !self.has_more() {
                return Ok(dict);
            }
        }
    }
}

fn scalar(word: &[u8]) -> Result<Value> {
    Ok(match word {
        b"true" => Value::Bool(true),
        b"false" => Value::Bool(false),
        b"null" => Value::None,
        b"NaN" => Value::Float(f64::NAN),
        b"Infinity" => Value::Float(f64::INFINITY),
        b"-Infinity" => Value::Float(f64::NEG_INFINITY),
        _ => {
            let text = std::str::from_utf8(word).unwrap_or_default();
            if word.iter().any(|byte| matches!(byte, b'.' | b'e' | b'E')) {
                return Ok(Value::Float(text.parse().unwrap_or(f64::NAN)));
            }
            match text.parse() {
                Ok(int) => Value::Int(int),
                Err(_) if word.len() <= DIGITS_MAX => Value::Big(text.into()),
                Err(_) => {
                    let digits = word.len();
                    let message =
                        format!("an integer of {digits} digits, the limit is {DIGITS_MAX}");
                    return Err(Error::new(ErrorKind::Limit, Stage::Decode, message));
                }
            }
        }
    })
}
