//! Elements and slices of sequences, by Python's indices.

use super::value::{Res, Value, raised, unsupported};
use std::ops::RangeInclusive;

/// Python's slice of a sequence.
pub fn slice(value: &Value, [start, stop, step]: [Option<Value>; 3]) -> Res<Value> {
    let step = match step {
        None | Some(Value::None) => 1,
        Some(step) => match step.as_int() {
            Some(0) => return raised("slice step cannot be zero"),
            Some(step) => step,
            None => return raised("slice indices must be integers"),
        },
    };
    let letters: Vec<char>;
    let len = match value {
        Value::Str(text) if text.is_ascii() => text.len(),
        Value::Str(text) => {
            letters = text.chars().collect();
            return Ok(picked(letters.len(), start, stop, step)?
                .map(|at| letters[at])
                .collect::<String>()
                .into());
        }
        Value::List(items) | Value::Tuple(items) => items.len(),
        Value::Markup(_) | Value::Range(..) => {
            return unsupported(format!("a slice of a value of type {}", value.kind()));
        }
        _ => {
            return raised(format!(
                "'{}' object is not subscriptable by a slice",
                value.kind()
            ));
        }
    };
    let places = picked(len, start, stop, step)?;
    Ok(match value {
        Value::Str(text) => {
            let bytes = text.as_bytes();
            places
                .map(|at| char::from(bytes[at]))
                .collect::<String>()
                .into()
        }
        Value::Tuple(items) => Value::tuple(places.map(|at| items[at].clone()).collect()),
        Value::List(items) => Value::list(places.map(|at| items[at].clone()).collect()),
        _ => return unsupported("a slice"),
    })
}

/// The places of a slice in a sequence of `len` elements.
fn picked(
    len: usize,
    start: Option<Value>,
    stop: Option<Value>,
    step: i64,
) -> Res<impl Iterator<Item = usize>> {
    let len = len as i64;
    let places = if step > 0 { 0..=len } else { -1..=len - 1 };
    let (first, end) = if step > 0 { (0, len) } else { (len - 1, -1) };
    let mut at = bound(start, len, &places)?.unwrap_or(first);
    let stop = bound(stop, len, &places)?.unwrap_or(end);
    Ok(std::iter::from_fn(move || {
        let inside = if step > 0 { at < stop } else { at > stop };
        let this = at;
        at = at.saturating_add(step);
        inside.then_some(this as usize)
    }))
}

/// A start or stop that is given, as one of `places`.
fn bound(value: Option<Value>, len: i64, places: &RangeInclusive<i64>) -> Res<Option<i64>> {
    let value = match value {
        None | Some(Value::None) => return Ok(None),
        Some(value) => value,
    };
    match value.as_int() {
        Some(at) => {
            let at = if at < 0 { at.saturating_add(len) } else { at };
            Ok(Some(at.clamp(*places.start(), *places.end())))
        }
        None => raised("slice indices must be integers"),
    }
}

/// `value[at]` for an integer.
pub fn element(value: &Value, at: i64) -> Value {
    match value {
        Value::Str(text) => {
            let count = if text.is_ascii() {
                text.len()
            } else {
                text.chars().count()
            };
            let letter = index_of(at, count).and_then(|at| text.chars().nth(at));
            letter.map_or(Value::Undefined, |letter| letter.to_string().into())
        }
        Value::List(items) | Value::Tuple(items) => {
            let at = index_of(at, items.len());
            at.map_or(Value::Undefined, |at| items[at].clone())
        }
        _ => Value::Undefined,
    }
}

/// The place that a Python index means.
fn index_of(at: i64, len: usize) -> Option<usize> {
    let at = if at < 0 { at + len as i64 } else { at };
    usize::try_from(at).ok().filter(|at| *at < len)
}
