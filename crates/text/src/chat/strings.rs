//! Methods of Python's `str`.

use super::python::str_of;
use super::value::{Res, Value, raised, unsupported};
use std::sync::Arc;

/// Arguments of a call.
#[derive(Default)]
pub struct Args {
    pub pos: Vec<Value>,
    pub named: Vec<(Arc<str>, Value)>,
}

impl Args {
    /// The arguments by the names of the parameters.
    pub fn bind<const N: usize>(self, what: &str, names: [&str; N]) -> Res<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        if self.pos.len() > N {
            return raised(format!("{what} takes at most {N} arguments"));
        }
        for (place, value) in bound.iter_mut().zip(self.pos) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| **known == *name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value),
                _ => return raised(format!("{what} takes no argument {name:?} here")),
            }
        }
        Ok(bound)
    }
}

/// The methods that [`call`] has.
pub const METHODS: [&str; 25] = [
    "capitalize",
    "count",
    "endswith",
    "find",
    "format",
    "index",
    "isdigit",
    "isspace",
    "join",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "upper",
    "zfill",
];

/// The other methods of Python's `str`.
pub const OTHERS: [&str; 22] = [
    "casefold",
    "center",
    "encode",
    "expandtabs",
    "format_map",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "istitle",
    "isupper",
    "ljust",
    "maketrans",
    "rindex",
    "rjust",
    "swapcase",
    "title",
    "translate",
];

/// Whether Python takes the character for white space.
pub fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\x1c'..='\x1f').contains(&letter)
}

/// Calls a method of [`METHODS`].
pub fn call(text: &Arc<str>, name: &'static str, args: Args) -> Res<Value> {
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(name, ["chars"])?;
            strip(text, name, chars)?.into()
        }
        "lower" | "upper" | "capitalize" | "isdigit" | "isspace" => {
            let [] = args.bind(name, [])?;
            match name {
                "lower" => text.to_lowercase().into(),
                "upper" => text.to_uppercase().into(),
                "capitalize" => capitalize(text)?.into(),
                "isspace" => Value::Bool(!text.is_empty() && text.chars().all(is_space)),
                _ if text.is_ascii() => {
                    Value::Bool(!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
                }
                _ => return unsupported("isdigit of a text beyond ASCII"),
            }
        }
        "startswith" | "endswith" => {
            let [part] = args.bind(name, ["prefix"])?;
            match needed(name, part)? {
                Value::Tuple(parts) => {
                    let parts: Res<Vec<_>> = parts.iter().map(|part| string(name, part)).collect();
                    Value::Bool(parts?.into_iter().any(|part| has_end(text, name, part)))
                }
                part => Value::Bool(has_end(text, name, string(name, &part)?)),
            }
        }
        "split" | "rsplit" => split(text, name, args)?,
        "splitlines" => {
            let [ends] = args.bind(name, ["keepends"])?;
            if ends.is_some_and(|ends| ends.is_true()) {
                return unsupported("splitlines with its ends");
            }
            Value::list(lines(text).into_iter().map(Value::from).collect())
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"])?;
            let old = needed(name, old)?;
            let new = needed(name, new)?;
            replace(text, string(name, &old)?, string(name, &new)?, count)?.into()
        }
        "find" | "rfind" | "index" | "count" => {
            let [part] = args.bind(name, ["sub"])?;
            let part = needed(name, part)?;
            find(text, name, string(name, &part)?)?
        }
        "join" => {
            let [items] = args.bind(name, ["iterable"])?;
            let items = needed(name, items)?.iterate()?;
            let parts: Res<Vec<&str>> = items.iter().map(|item| string(name, item)).collect();
            parts?.join(text).into()
        }
        "partition" | "rpartition" => {
            let [sep] = args.bind(name, ["sep"])?;
            let sep = needed(name, sep)?;
            partition(text, name, string(name, &sep)?)?
        }
        "removeprefix" | "removesuffix" => {
            let [part] = args.bind(name, ["prefix"])?;
            let part = needed(name, part)?;
            let part = string(name, &part)?;
            let rest = match name {
                "removeprefix" => text.strip_prefix(part),
                _ => text.strip_suffix(part),
            };
            rest.unwrap_or(text).into()
        }
        "format" => format(text, &args)?.into(),
        "zfill" => {
            let [width] = args.bind(name, ["width"])?;
            let width = needed(name, width)?.as_int().unwrap_or(0).clamp(0, 1 << 16) as usize;
            let signed = text.starts_with(['+', '-']);
            let (sign, digits) = text.split_at(usize::from(signed));
            let zeros = width.saturating_sub(text.chars().count());
            format!("{sign}{}{digits}", "0".repeat(zeros)).into()
        }
        _ => return unsupported(format!("the method `{name}` of a string")),
    })
}

pub fn needed(name: &str, value: Option<Value>) -> Res<Value> {
    match value {
        Some(value) => Ok(value),
        None => raised(format!("{name} lacks an argument")),
    }
}

pub fn string<'a>(name: &str, value: &'a Value) -> Res<&'a str> {
    match value {
        Value::Str(text) => Ok(text),
        Value::Markup(_) => unsupported(format!("{name} with the result of the filter safe")),
        _ => raised(format!("{name} takes a string, not {}", value.kind())),
    }
}

pub fn strip<'a>(text: &'a str, name: &str, chars: Option<Value>) -> Res<&'a str> {
    Ok(match chars {
        None | Some(Value::None) => strip_by(text, name, is_space),
        Some(chars) => {
            let chars = string(name, &chars)?;
            strip_by(text, name, |letter| chars.contains(letter))
        }
    })
}

fn strip_by<'a>(text: &'a str, name: &str, is: impl Fn(char) -> bool) -> &'a str {
    match name {
        "lstrip" => text.trim_start_matches(is),
        "rstrip" => text.trim_end_matches(is),
        _ => text.trim_matches(is),
    }
}

/// `startswith` or `endswith`.
fn has_end(text: &str, name: &str, part: &str) -> bool {
    match name {
        "startswith" => text.starts_with(part),
        _ => text.ends_with(part),
    }
}

/// The first character in upper case, the rest in lower case.
pub fn capitalize(text: &str) -> Res<String> {
    let Some(first) = text.chars().next() else {
        return Ok(String::new());
    };
    let rest = &text[first.len_utf8()..];
    // Python uses title case, which Rust does not have; a final sigma depends on what precedes it.
    if first.to_uppercase().count() > 1 || ('\u{1c4}'..='\u{1f3}').contains(&first) {
        return unsupported(format!("capitalize of {first:?}"));
    }
    if rest.contains('\u{3a3}') {
        return unsupported("capitalize of a text with sigma");
    }
    Ok(first.to_uppercase().collect::<String>() + &rest.to_lowercase())
}

pub fn replace(text: &str, old: &str, new: &str, count: Option<Value>) -> Res<String> {
    match count {
        None | Some(Value::None) => Ok(text.replace(old, new)),
        Some(count) => match count.as_int() {
            Some(..0) => Ok(text.replace(old, new)),
            Some(count) => Ok(text.replacen(old, new, count as usize)),
            None => raised(format!("replace takes a count, not {}", count.kind())),
        },
    }
}

fn split(text: &str, name: &str, args: Args) -> Res<Value> {
    let [sep, most] = args.bind(name, ["sep", "maxsplit"])?;
    let most = match most {
        None => None,
        Some(most) => match most.as_int() {
            Some(most) => usize::try_from(most).ok(),
            None => return raised(format!("{name} takes a number, not {}", most.kind())),
        },
    };
    let limit = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let parts: Vec<&str> = match sep {
        None | Some(Value::None) => match (name, most) {
            ("split", _) | (_, None) => split_spaces(text, limit),
            _ => return unsupported("rsplit at spaces with a maximum"),
        },
        Some(sep) => match string(name, &sep)? {
            "" => return raised("empty separator"),
            sep if name == "split" => text.splitn(limit, sep).collect(),
            sep => {
                let mut parts: Vec<_> = text.rsplitn(limit, sep).collect();
                parts.reverse();
                parts
            }
        },
    };
    Ok(Value::list(parts.into_iter().map(Value::from).collect()))
}

fn split_spaces(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if parts.len() + 1 >= limit {
            parts.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        parts.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    parts
}

/// Whether the character ends a line for Python.
fn ends_line(letter: char) -> bool {
    matches!(
        letter,
        '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// Python's `splitlines`.
pub fn lines(text: &str) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(ends_line).unwrap_or(rest.len());
        lines.push(&rest[..end]);
        rest = &rest[end..];
        let mut letters = rest.chars();
        rest = match letters.next() {
            Some('\r') => rest[1..].strip_prefix('\n').unwrap_or(&rest[1..]),
            _ => letters.as_str(),
        };
    }
    lines
}

/// `text.format(…)` with plain places: `{}`, `{0}` and `{name}`.
fn format(text: &str, args: &Args) -> Res<String> {
    let mut out = String::new();
    let mut rest = text;
    let mut next = 0;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let bracket = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(bracket) {
            out.push_str(bracket);
            rest = after;
            continue;
        }
        let Some((place, after)) = rest.split_once('}').filter(|_| bracket == "{") else {
            return raised("Single bracket encountered in format string");
        };
        rest = after;
        let value = match place {
            "" => {
                next += 1;
                args.pos.get(next - 1)
            }
            _ if place.bytes().all(|byte| byte.is_ascii_digit()) => {
                place.parse().ok().and_then(|at: usize| args.pos.get(at))
            }
            _ if place
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') =>
            {
                let mut named = args.named.iter();
                named
                    .find(|(name, _)| **name == *place)
                    .map(|(_, value)| value)
            }
            _ => return unsupported(format!("the place {{{place}}} of a format")),
        };
        match value {
            Some(value) => str_of(value, &mut out)?,
            None => return raised(format!("nothing for the place {{{place}}} of a format")),
        }
    }
    out.push_str(rest);
    Ok(out)
}

fn find(text: &str, name: &str, part: &str) -> Res<Value> {
    let found = match name {
        "count" if part.is_empty() => return Ok(Value::Int(text.chars().count() as i64 + 1)),
        "count" => return Ok(Value::Int(text.matches(part).count() as i64)),
        "rfind" => text.rfind(part),
        _ => text.find(part),
    };
    match found {
        Some(at) => Ok(Value::Int(text[..at].chars().count() as i64)),
        None if name == "index" => raised("substring not found"),
        None => Ok(Value::Int(-1)),
    }
}

fn partition(text: &str, name: &str, sep: &str) -> Res<Value> {
    if sep.is_empty() {
        return raised("empty separator");
    }
    let parts = match name {
        "partition" => match text.split_once(sep) {
            Some((before, after)) => [before, sep, after],
            None => [text, "", ""],
        },
        _ => match text.rsplit_once(sep) {
            Some((before, after)) => [before, sep, after],
            None => ["", "", text],
        },
    };
    Ok(Value::tuple(parts.map(Value::from).to_vec()))
}
