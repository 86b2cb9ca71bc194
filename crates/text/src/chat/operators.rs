//! Python's operators, on values of a template.

use super::python::str_of;
use super::value::{OUTPUT_MAX, Res, Value, raised, unsupported, wrong_types};

/// Operators with two values.
#[derive(Clone, Copy, PartialEq)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
    Concat,
}

const SIGNS: [&str; 8] = ["+", "-", "*", "/", "//", "%", "**", "~"];

impl Binary {
    pub fn of(self, left: &Value, right: &Value) -> Res<Value> {
        match (self, left, right) {
            (Self::Concat, ..) => {
                let mut text = String::new();
                str_of(left, &mut text)?;
                str_of(right, &mut text)?;
                Ok(text.into())
            }
            (Self::Add, Value::Str(left), Value::Str(right)) => {
                Ok(Value::Str([&**left, &**right].concat().into()))
            }
            (Self::Add, Value::Markup(left), Value::Markup(right)) => {
                Ok(Value::Markup([&**left, &**right].concat().into()))
            }
            (Self::Add, Value::Markup(left), Value::Str(right)) => {
                Ok(Value::Markup([&**left, &escaped(right)].concat().into()))
            }
            (Self::Add, Value::Str(left), Value::Markup(right)) => {
                Ok(Value::Markup([&*escaped(left), right].concat().into()))
            }
            (Self::Add, Value::List(left), Value::List(right)) => {
                Ok(Value::list([&left[..], right].concat()))
            }
            (Self::Add, Value::Tuple(left), Value::Tuple(right)) => {
                Ok(Value::tuple([&left[..], right].concat()))
            }
            (Self::Mul, Value::Str(text), times) | (Self::Mul, times, Value::Str(text))
                if times.as_int().is_some() =>
            {
                let times = times.as_int().unwrap_or(0).max(0) as usize;
                if text.len().saturating_mul(times) > OUTPUT_MAX {
                    return unsupported("a string is repeated over the limit of a text");
                }
                Ok(text.repeat(times).into())
            }
            (Self::Rem, Value::Str(format), _) => percent(format, right),
            (_, Value::Markup(_), _) | (_, _, Value::Markup(_)) => unsupported(format!(
                "{} with the result of the filter safe",
                self.sign()
            )),
            _ => self.of_numbers(left, right),
        }
    }

    fn sign(self) -> &'static str {
        SIGNS[self as usize]
    }

    fn of_numbers(self, left: &Value, right: &Value) -> Res<Value> {
        if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
            return self.of_ints(a, b);
        }
        let (Some(a), Some(b)) = (left.as_float(), right.as_float()) else {
            if matches!((left, right), (Value::Big(_), _) | (_, Value::Big(_))) {
                return unsupported("arithmetic with an integer over 64 bits");
            }
            return wrong_types(self.sign(), left, right);
        };
        if b == 0.0 && matches!(self, Self::Div | Self::FloorDiv | Self::Rem) {
            return raised("division by zero");
        }
        Ok(Value::Float(match self {
            Self::Add => a + b,
            Self::Sub => a - b,
            Self::Mul => a * b,
            Self::Div => a / b,
            _ => return unsupported(format!("{} of floats", self.sign())),
        }))
    }

    fn of_ints(self, a: i64, b: i64) -> Res<Value> {
        if b == 0 && matches!(self, Self::Div | Self::FloorDiv | Self::Rem) {
            return raised("division by zero");
        }
        let result = match self {
            Self::Add => a.checked_add(b),
            Self::Sub => a.checked_sub(b),
            Self::Mul => a.checked_mul(b),
            Self::Div if a.unsigned_abs().max(b.unsigned_abs()) <= 1 << 53 => {
                return Ok(Value::Float(a as f64 / b as f64));
            }
            Self::FloorDiv => a
                .checked_div(b)
                .map(|quotient| quotient - i64::from(a % b != 0 && (a < 0) != (b < 0))),
            Self::Rem => a.checked_rem(b).map(|rest| {
                if rest != 0 && (rest < 0) != (b < 0) {
                    rest + b
                } else {
                    rest
                }
            }),
            Self::Pow => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
            _ => None,
        };
        match result {
            Some(result) => Ok(Value::Int(result)),
            None => unsupported(format!(
                "{a} {} {b}, which is no integer of 64 bits",
                self.sign()
            )),
        }
    }
}

/// Text beside markup, as `markupsafe` escapes it.
fn escaped(text: &str) -> String {
    let text = text
        .replace('&', "&amp;")
        .replace('>', "&gt;")
        .replace('<', "&lt;");
    text.replace('\'', "&#39;").replace('"', "&#34;")
}

/// `'…' % value`.
pub fn percent(format: &str, value: &Value) -> Res<Value> {
    let args = match value {
        Value::Tuple(items) => items.to_vec(),
        Value::Dict(_) => return unsupported("a string is formatted with a dict"),
        other => vec![other.clone()],
    };
    let mut args = args.iter();
    let mut text = String::new();
    let mut rest = format;
    while let Some((before, after)) = rest.split_once('%') {
        text.push_str(before);
        let kind = after.chars().next();
        rest = after.get(1..).unwrap_or_default();
        match (
            kind,
            kind.filter(|kind| *kind != '%').and_then(|_| args.next()),
        ) {
            (Some('%'), _) => text.push('%'),
            (Some('s'), Some(value)) => str_of(value, &mut text)?,
            (Some('d' | 'i'), Some(value)) => match value.as_int() {
                Some(int) => text.push_str(&int.to_string()),
                None => return unsupported(format!("%d of a value of type {}", value.kind())),
            },
            (Some('s' | 'd' | 'i'), None) => {
                return raised("not enough arguments for format string");
            }
            _ => return unsupported(format!("the string format {format:?}")),
        }
    }
    if args.next().is_some() {
        return raised("not all arguments converted during string formatting");
    }
    text.push_str(rest);
    Ok(text.into())
}
