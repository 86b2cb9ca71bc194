//! Values as text: Python's `str`, `repr` and `json.dumps`.

use super::value::{Dict, Key, Res, Value, raised, unsupported};
use std::fmt::Write;

/// Appends `str(value)`.
pub fn str_of(value: &Value, out: &mut String) -> Res<()> {
    match value {
        Value::Undefined => Ok(()),
        Value::Str(text) | Value::Markup(text) => {
            out.push_str(text);
            Ok(())
        }
        _ => repr(value, out),
    }
}

/// Appends `repr(value)`.
fn repr(value: &Value, out: &mut String) -> Res<()> {
    match value {
        Value::Undefined => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Int(value) => write_to(out, value),
        Value::Big(text) => out.push_str(text),
        Value::Float(value) => float(*value, out),
        Value::Str(text) => repr_str(text, out),
        Value::List(items) => {
            out.push('[');
            repr_all(items, out)?;
            out.push(']');
        }
        Value::Tuple(items) => {
            out.push('(');
            repr_all(items, out)?;
            out.push_str(if items.len() == 1 { ",)" } else { ")" });
        }
        Value::Dict(dict) => {
            out.push('{');
            for (number, (key, value)) in dict.iter().enumerate() {
                comma(number, out);
                repr(&key.value(), out)?;
                out.push_str(": ");
                repr(value, out)?;
            }
            out.push('}');
        }
        Value::View(name, items) => {
            out.push_str(name);
            out.push_str("([");
            repr_all(items, out)?;
            out.push_str("])");
        }
        Value::Range(start, stop, 1) => write_to(out, format_args!("range({start}, {stop})")),
        Value::Range(start, stop, step) => {
            write_to(out, format_args!("range({start}, {stop}, {step})"));
        }
        _ => return unsupported(format!("a value of type {} is printed", value.kind())),
    }
    Ok(())
}

fn write_to(out: &mut String, value: impl std::fmt::Display) {
    write!(out, "{value}").expect("a string takes all");
}

fn comma(number: usize, out: &mut String) {
    if number > 0 {
        out.push_str(", ");
    }
}

fn repr_all(items: &[Value], out: &mut String) -> Res<()> {
    for (number, item) in items.iter().enumerate() {
        comma(number, out);
        repr(item, out)?;
    }
    Ok(())
}

/// Python's `repr` of a float: the shortest digits that read back as the same number.
fn float(value: f64, out: &mut String) {
    if value.is_nan() {
        return out.push_str("nan");
    }
    if value.is_infinite() {
        return out.push_str(if value > 0.0 { "inf" } else { "-inf" });
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific
        .split_once('e')
        .expect("written with an exponent");
    let exponent: i32 = exponent.parse().expect("written as an integer");
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
        return;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    let exponent = exponent.abs();
    write_to(out, format_args!("{digits}e{sign}{exponent:02}"));
}

/// Python's `repr` of a string.
fn repr_str(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if letter == quote => {
                out.push('\\');
                out.push(letter);
            }
            ' '..='~' => out.push(letter),
            _ if is_printable(letter) => out.push(letter),
            _ => match u32::from(letter) {
                code @ ..0x100 => write_to(out, format_args!("\\x{code:02x}")),
                code @ ..0x10000 => write_to(out, format_args!("\\u{code:04x}")),
                code => write_to(out, format_args!("\\U{code:08x}")),
            },
        }
    }
    out.push(quote);
}

/// Whether Python prints the character as it is. Rust's `escape_debug` of a string leaves out the
/// same categories; only at its start it escapes combining marks, too.
fn is_printable(letter: char) -> bool {
    let mut text = [b'a'; 5];
    let len = letter.encode_utf8(&mut text[1..]).len();
    let text = std::str::from_utf8(&text[..=len]).expect("two characters");
    text.escape_debug().count() == 2
}

fn sorted<'a>(members: Vec<(&'a Key, &'a Value)>) -> Res<Vec<(&'a Key, &'a Value)>> {
    let mut named = Vec::with_capacity(members.len());
    for (key, value) in &members {
        match key {
            Key::Str(text) => named.push((text.clone(), (*key, *value))),
            Key::Int(_) => return unsupported("JSON with integers as sorted keys"),
        }
    }
    named.sort_by(|(left, _), (right, _)| left.cmp(right));
    Ok(named.into_iter().map(|(_, member)| member).collect())
}

/// The arguments of `tojson`.
pub struct Json {
    pub ascii: bool,
    /// The indent of a level, if each element has a line.
    pub indent: Option<String>,
    pub item: String,
    pub key: String,
    pub sort: bool,
}

impl Json {
    /// Appends `json.dumps(value, …)`.
    pub fn dump(&self, value: &Value, level: usize, out: &mut String) -> Res<()> {
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(value) => write_to(out, value),
            Value::Float(value) if value.is_nan() => out.push_str("NaN"),
            Value::Float(value) if value.is_infinite() => {
                out.push_str(if *value > 0.0 {
                    "Infinity"
                } else {
                    "-Infinity"
                });
            }
            Value::Int(_) | Value::Big(_) | Value::Float(_) => repr(value, out)?,
            Value::Str(text) | Value::Markup(text) => self.string(text, out),
            Value::List(items) | Value::Tuple(items) => {
                self.all('[', ']', items.iter(), level, out, |item, out| {
                    self.dump(item, level + 1, out)
                })?;
            }
            Value::Dict(dict) => self.dict(dict, level, out)?,
            _ => {
                let kind = value.kind();
                return raised(format!("Object of type {kind} is not JSON serializable"));
            }
        }
        Ok(())
    }

    fn dict(&self, dict: &Dict, level: usize, out: &mut String) -> Res<()> {
        let mut members: Vec<_> = dict.iter().collect();
        if self.sort {
            members = sorted(members)?;
        }
        self.all(
            '{',
            '}',
            members.into_iter(),
            level,
            out,
            |(key, value), out| {
                match key {
                    Key::Str(text) => self.string(text, out),
                    Key::Int(int) => write_to(out, format_args!("\"{int}\"")),
                }
                out.push_str(&self.key);
                self.dump(value, level + 1, out)
            },
        )
    }

    fn all<T>(
        &self,
        open: char,
        close: char,
        items: impl ExactSizeIterator<Item = T>,
        level: usize,
        out: &mut String,
        mut each: impl FnMut(T, &mut String) -> Res<()>,
    ) -> Res<()> {
        let is_empty = items.len() == 0;
        out.push(open);
        for (number, item) in items.enumerate() {
            if number > 0 {
                out.push_str(&self.item);
            }
            self.line(level + 1, out);
            each(item, out)?;
        }
        if !is_empty {
            self.line(level, out);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, level: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..level).for_each(|_| out.push_str(indent));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..=' ' if letter != ' ' => {
                    write_to(out, format_args!("\\u{:04x}", letter as u32))
                }
                '\u{7f}'.. if self.ascii => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        write_to(out, format_args!("\\u{unit:04x}"));
                    }
                }
                _ => out.push(letter),
            }
        }
        out.push('"');
    }
}
