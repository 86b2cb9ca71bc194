//! Attributes, methods, filters and tests of values, as Jinja2's sandbox has them.
//!
//! The names that are missing here are refused when the template is read.

use super::day::{self, Day};
use super::operators::{Binary, percent};
use super::python::{Json, str_of};
use super::slices;
use super::strings::{self, Args, needed, string};
use super::value::{Dict, Fail, Function, Key, Res, Value, raised, unsupported};
use std::cmp::Ordering;
use std::rc::Rc;
use std::sync::Arc;

pub const FUNCTIONS: [(&str, Function); 5] = [
    ("range", Function::Range),
    ("namespace", Function::Namespace),
    ("dict", Function::Dict),
    ("raise_exception", Function::Raise),
    ("strftime_now", Function::Now),
];

const DICT_METHODS: [&str; 5] = ["get", "items", "keys", "values", "copy"];
const LIST_METHODS: [&str; 3] = ["index", "count", "copy"];

/// Methods that change a dict; the sandbox hides them, and the keys of these names behind them.
const HIDDEN: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

/// Whether it is a method of a string that is missing here.
pub fn is_foreign(name: &str) -> bool {
    strings::OTHERS.contains(&name)
}

/// The attribute `name`, as the sandbox finds it: a method before a key.
pub fn attribute(value: &Value, name: &str) -> Res<Value> {
    Ok(match value {
        Value::Undefined => {
            return raised(format!(
                "the attribute `{name}` of an undefined value is asked for"
            ));
        }
        Value::Str(_) | Value::Markup(_) => {
            if strings::OTHERS.contains(&name) {
                return unsupported(format!("the method `{name}` of a string"));
            }
            bound(value, name, &strings::METHODS).unwrap_or(Value::Undefined)
        }
        Value::Dict(_) if HIDDEN.contains(&name) => Value::Undefined,
        Value::Dict(dict) if name != "fromkeys" => match bound(value, name, &DICT_METHODS) {
            Some(method) => method,
            None => dict.get(name).cloned().unwrap_or(Value::Undefined),
        },
        Value::List(_) => bound(value, name, &LIST_METHODS).unwrap_or(Value::Undefined),
        Value::Tuple(_) => bound(value, name, &LIST_METHODS[..2]).unwrap_or(Value::Undefined),
        Value::Namespace(dict) => dict.borrow().get(name).cloned().unwrap_or(Value::Undefined),
        Value::Loop(state) => state.attribute(name)?,
        Value::None | Value::Method(..) => Value::Undefined,
        Value::Generator(_) if !matches!(name, "send" | "throw" | "close") => Value::Undefined,
        Value::View(..) if !matches!(name, "mapping" | "isdisjoint") => Value::Undefined,
        Value::Bool(_) | Value::Int(_) | Value::Big(_) | Value::Float(_)
            if !matches!(
                name,
                "real"
                    | "imag"
                    | "numerator"
                    | "denominator"
                    | "conjugate"
                    | "bit_length"
                    | "bit_count"
                    | "to_bytes"
                    | "from_bytes"
                    | "as_integer_ratio"
                    | "is_integer"
                    | "hex"
                    | "fromhex"
            ) =>
        {
            Value::Undefined
        }
        _ => {
            return unsupported(format!(
                "the attribute `{name}` of a value of type {}",
                value.kind()
            ));
        }
    })
}

/// The method of a value, if it is one of `names`.
fn bound(value: &Value, name: &str, names: &'static [&'static str]) -> Option<Value> {
    let known = names.iter().find(|known| **known == name)?;
    Some(Value::Method(Rc::new(value.clone()), known))
}

/// `value[key]`, as the sandbox finds it: a key before a method.
pub fn item(value: &Value, key: &Value) -> Res<Value> {
    if let (Value::Undefined, _) = (value, key) {
        return raised("an item of an undefined value");
    }
    if let Some(at) = key.as_int() {
        return match value {
            Value::Dict(dict) => Ok(dict.get(&Key::Int(at)).cloned().unwrap_or(Value::Undefined)),
            Value::Markup(_) | Value::Range(..) => unsupported("an item of this value"),
            _ => Ok(slices::element(value, at)),
        };
    }
    match (value, key.as_str()) {
        (Value::Dict(dict), Some(key)) => match dict.get(&**key) {
            Some(value) => Ok(value.clone()),
            None => attribute(value, key),
        },
        (_, Some(name)) => attribute(value, name),
        _ => Ok(Value::Undefined),
    }
}

/// Calls a method of a value.
pub fn method(value: &Value, name: &'static str, args: Args) -> Res<Value> {
    Ok(match value {
        Value::Str(text) => strings::call(text, name, args)?,
        Value::Markup(_) => {
            return unsupported(format!(
                "the method `{name}` of the result of the filter safe"
            ));
        }
        Value::Dict(dict) if name == "get" => {
            if !args.named.is_empty() {
                return raised("dict.get() takes no keyword arguments");
            }
            let [key, default] = args.bind(name, ["key", "default"])?;
            let key = Key::of(&needed(name, key)?)?;
            let found = key.and_then(|key| dict.get(&key).cloned());
            found.or(default).unwrap_or(Value::None)
        }
        Value::Dict(dict) => {
            let [] = args.bind(name, [])?;
            match name {
                "keys" => Value::View("dict_keys", value.iterate()?),
                "values" => Value::View("dict_values", Rc::new(dict.values().cloned().collect())),
                "items" => Value::View("dict_items", Rc::new(items(dict))),
                _ => Value::Dict(dict.clone()),
            }
        }
        Value::List(items) | Value::Tuple(items) => match name {
            "copy" => {
                let [] = args.bind(name, [])?;
                value.clone()
            }
            _ => {
                let [item] = args.bind(name, ["value"])?;
                let item = needed(name, item)?;
                let mut count = 0;
                for (at, other) in items.iter().enumerate() {
                    let equal = other.equals(&item)?;
                    if equal && name == "index" {
                        return Ok(Value::Int(at as i64));
                    }
                    count += i64::from(equal);
                }
                if name == "index" {
                    return raised("the value is not in the list");
                }
                Value::Int(count)
            }
        },
        _ => {
            return unsupported(format!(
                "the method `{name}` of a value of type {}",
                value.kind()
            ));
        }
    })
}

fn items(dict: &Dict) -> Vec<Value> {
    let pairs = dict.iter();
    let pairs = pairs.map(|(key, value)| Value::tuple(vec![key.value(), value.clone()]));
    pairs.collect()
}

/// Calls a function of all templates.
pub fn function(function: Function, args: Args, day: Option<Day>) -> Res<Value> {
    match function {
        Function::Range => range(args),
        Function::Namespace => {
            let dict = dict_of(args)?;
            let mut keys = dict.keys();
            if keys.any(|key| matches!(key, Key::Str(name) if name.starts_with('_'))) {
                return raised("a namespace cannot store an attribute that begins with _");
            }
            Ok(Value::Namespace(Rc::new(dict.into())))
        }
        Function::Dict => Ok(Value::Dict(Rc::new(dict_of(args)?))),
        Function::Raise => {
            let [message] = args.bind("raise_exception", ["message"])?;
            let mut text = String::new();
            str_of(&needed("raise_exception", message)?, &mut text)?;
            Err(Fail::Raised(text))
        }
        Function::Now => {
            let [format] = args.bind("strftime_now", ["format"])?;
            let format = needed("strftime_now", format)?;
            let format = string("strftime_now", &format)?;
            // Rows depend on nothing but the data and the settings, so a clock is not asked.
            match day {
                Some(day) => day::strftime(day, format).map(Value::from),
                None => unsupported(
                    "`strftime_now`: the text depends on the day, so give it by `today`",
                ),
            }
        }
    }
}

fn dict_of(args: Args) -> Res<Dict> {
    let mut dict = match args.pos.as_slice() {
        [] => Dict::new(),
        [Value::Dict(dict)] => (**dict).clone(),
        [_] => return unsupported("a dict of pairs"),
        _ => return raised("dict expected at most 1 argument"),
    };
    let named = args.named.into_iter();
    dict.extend(named.map(|(name, value)| (Key::Str(name), value)));
    Ok(dict)
}

fn range(args: Args) -> Res<Value> {
    let numbers: Option<Vec<i64>> = args.pos.iter().map(Value::as_int).collect();
    let (start, stop, step) = match numbers.as_deref() {
        Some([stop]) => (0, *stop, 1),
        Some([start, stop]) => (*start, *stop, 1),
        Some([start, stop, step]) if *step != 0 => (*start, *stop, *step),
        _ => return raised("range takes one to three integers"),
    };
    let range = Value::Range(start, stop, step);
    // The limit of Jinja2's sandbox.
    if range.len()? > 100_000 {
        return raised("a range has more than 100000 elements");
    }
    Ok(range)
}

pub type Filter = fn(Value, Args) -> Res<Value>;
pub type Test = fn(&Value, &[Value]) -> Res<bool>;

const FILTERS: &[(&str, Filter)] = &[
    ("abs", |value, args| {
        let [] = args.bind("abs", [])?;
        match value {
            Value::Int(int) if int > i64::MIN => Ok(Value::Int(int.abs())),
            Value::Float(float) => Ok(Value::Float(float.abs())),
            _ => unsupported(format!("abs of a value of type {}", value.kind())),
        }
    }),
    ("capitalize", |value, args| {
        let [] = args.bind("capitalize", [])?;
        strings::capitalize(&text_of(&value)?).map(Value::from)
    }),
    ("count", length),
    ("d", default),
    ("default", default),
    ("dictsort", dictsort),
    ("first", |value, args| {
        let [] = args.bind("first", [])?;
        Ok(value
            .iterate()?
            .first()
            .cloned()
            .unwrap_or(Value::Undefined))
    }),
    ("float", |value, args| {
        let [default] = args.bind("float", ["default"])?;
        Ok(number(&value)?.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
    }),
    ("format", |value, args| {
        if !args.named.is_empty() {
            return unsupported("format with names");
        }
        percent(&text_of(&value)?, &Value::tuple(args.pos))
    }),
    ("indent", indent),
    ("int", int),
    ("items", |value, args| {
        let [] = args.bind("items", [])?;
        match value {
            Value::Undefined => Ok(Value::generator(Vec::new())),
            Value::Dict(dict) => Ok(Value::generator(items(&dict))),
            _ => raised("Can only get item pairs from a mapping."),
        }
    }),
    ("join", join),
    ("last", |value, args| {
        let [] = args.bind("last", [])?;
        if matches!(value, Value::Generator(_) | Value::Undefined) {
            return raised(format!("'{}' object is not reversible", value.kind()));
        }
        Ok(value.iterate()?.last().cloned().unwrap_or(Value::Undefined))
    }),
    ("length", length),
    ("list", |value, args| {
        let [] = args.bind("list", [])?;
        Ok(Value::List(value.iterate()?))
    }),
    ("lower", |value, args| {
        let [] = args.bind("lower", [])?;
        Ok(text_of(&value)?.to_lowercase().into())
    }),
    ("map", map),
    ("max", |value, args| extreme(value, args, Ordering::Greater)),
    ("min", |value, args| extreme(value, args, Ordering::Less)),
    ("reject", |value, args| select(value, args, false, false)),
    ("rejectattr", |value, args| select(value, args, true, false)),
    ("replace", |value, args| {
        let [old, new, count] = args.bind("replace", ["old", "new", "count"])?;
        let old = text_of(&needed("replace", old)?)?;
        let new = text_of(&needed("replace", new)?)?;
        strings::replace(&text_of(&value)?, &old, &new, count).map(Value::from)
    }),
    ("reverse", |value, args| {
        let [] = args.bind("reverse", [])?;
        match &value {
            Value::Str(text) => Ok(text.chars().rev().collect::<String>().into()),
            Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Range(..) => Ok(
                Value::generator(value.iterate()?.iter().rev().cloned().collect()),
            ),
            _ => unsupported(format!("reverse of a value of type {}", value.kind())),
        }
    }),
    ("safe", |value, args| {
        let [] = args.bind("safe", [])?;
        let mut text = String::new();
        str_of(&value, &mut text)?;
        Ok(Value::Markup(text.into()))
    }),
    ("select", |value, args| select(value, args, false, true)),
    ("selectattr", |value, args| select(value, args, true, true)),
    ("sort", |value, args| {
        let [reverse, cased, attribute] =
            args.bind("sort", ["reverse", "case_sensitive", "attribute"])?;
        let items = value.iterate()?.to_vec();
        sorted(items, is_true(reverse), is_true(cased), |item| {
            path(item, attribute.as_ref())
        })
    }),
    ("string", |value, args| {
        let [] = args.bind("string", [])?;
        match value {
            Value::Str(_) | Value::Markup(_) => Ok(value),
            _ => text_of(&value).map(Value::Str),
        }
    }),
    ("sum", |value, args| {
        let [attribute, start] = args.bind("sum", ["attribute", "start"])?;
        let mut sum = start.unwrap_or(Value::Int(0));
        for item in &*value.iterate()? {
            sum = Binary::Add.of(&sum, &path(item, attribute.as_ref())?)?;
        }
        Ok(sum)
    }),
    ("tojson", tojson),
    ("trim", |value, args| {
        let [chars] = args.bind("trim", ["chars"])?;
        match &value {
            Value::Markup(text) => Ok(Value::Markup(strings::strip(text, "strip", chars)?.into())),
            _ => Ok(strings::strip(&text_of(&value)?, "strip", chars)?.into()),
        }
    }),
    ("unique", |value, args| {
        let [cased, attribute] = args.bind("unique", ["case_sensitive", "attribute"])?;
        let cased = is_true(cased);
        let mut seen: Vec<Value> = Vec::new();
        let mut kept = Vec::new();
        for item in &*value.iterate()? {
            let key = folded(path(item, attribute.as_ref())?, cased);
            if !Value::list(seen.clone()).contains(&key)? {
                seen.push(key);
                kept.push(item.clone());
            }
        }
        Ok(Value::generator(kept))
    }),
    ("upper", |value, args| {
        let [] = args.bind("upper", [])?;
        Ok(text_of(&value)?.to_uppercase().into())
    }),
];

const TESTS: &[(&str, Test)] = &[
    ("boolean", |value, _| Ok(matches!(value, Value::Bool(_)))),
    ("callable", |value, _| {
        Ok(matches!(
            value,
            Value::Method(..) | Value::Function(_) | Value::Macro(_)
        ))
    }),
    ("defined", |value, _| Ok(!matches!(value, Value::Undefined))),
    ("divisibleby", |value, args| {
        match (value.as_int(), args.first().and_then(Value::as_int)) {
            (Some(value), Some(by)) if by != 0 => Ok(value % by == 0),
            _ => unsupported("divisibleby of other values than integers"),
        }
    }),
    ("eq", |value, args| value.equals(other(args)?)),
    ("equalto", |value, args| value.equals(other(args)?)),
    ("even", |value, _| parity(value, 0)),
    ("false", |value, _| Ok(matches!(value, Value::Bool(false)))),
    ("float", |value, _| Ok(matches!(value, Value::Float(_)))),
    ("ge", |value, args| {
        value.is_ordered(other(args)?, ">=", Ordering::is_ge)
    }),
    ("gt", |value, args| {
        value.is_ordered(other(args)?, ">", Ordering::is_gt)
    }),
    ("in", |value, args| other(args)?.contains(value)),
    ("integer", |value, _| {
        Ok(matches!(value, Value::Int(_) | Value::Big(_)))
    }),
    ("iterable", |value, _| {
        Ok(value.as_str().is_some()
            || matches!(
                value,
                Value::Undefined
                    | Value::List(_)
                    | Value::Tuple(_)
                    | Value::Dict(_)
                    | Value::View(..)
                    | Value::Range(..)
                    | Value::Generator(_)
                    | Value::Loop(_)
            ))
    }),
    ("le", |value, args| {
        value.is_ordered(other(args)?, "<=", Ordering::is_le)
    }),
    ("lt", |value, args| {
        value.is_ordered(other(args)?, "<", Ordering::is_lt)
    }),
    ("mapping", |value, _| Ok(matches!(value, Value::Dict(_)))),
    ("ne", |value, args| Ok(!value.equals(other(args)?)?)),
    ("none", |value, _| Ok(matches!(value, Value::None))),
    ("number", |value, _| {
        Ok(matches!(
            value,
            Value::Bool(_) | Value::Int(_) | Value::Big(_) | Value::Float(_)
        ))
    }),
    ("odd", |value, _| parity(value, 1)),
    ("sequence", |value, _| {
        Ok(value.as_str().is_some()
            || matches!(
                value,
                Value::Undefined
                    | Value::List(_)
                    | Value::Tuple(_)
                    | Value::Dict(_)
                    | Value::Range(..)
            ))
    }),
    ("string", |value, _| Ok(value.as_str().is_some())),
    ("true", |value, _| Ok(matches!(value, Value::Bool(true)))),
    ("undefined", |value, _| {
        Ok(matches!(value, Value::Undefined))
    }),
];

pub fn filter(name: &str) -> Option<Filter> {
    FILTERS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, filter)| *filter)
}

pub fn test(name: &str) -> Option<Test> {
    TESTS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, test)| *test)
}

fn other(args: &[Value]) -> Res<&Value> {
    match args {
        [other] => Ok(other),
        _ => raised("the test takes one argument"),
    }
}

fn parity(value: &Value, rest: i64) -> Res<bool> {
    match value.as_int() {
        Some(value) => Ok(value.rem_euclid(2) == rest),
        None => unsupported(format!("odd or even of a value of type {}", value.kind())),
    }
}

fn is_true(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

/// `str` of the value.
fn text_of(value: &Value) -> Res<Arc<str>> {
    if let Value::Str(text) = value {
        return Ok(text.clone());
    }
    if let Value::Markup(_) = value {
        return unsupported("a filter of the result of the filter safe");
    }
    let mut text = String::new();
    str_of(value, &mut text)?;
    Ok(text.into())
}

fn length(value: Value, args: Args) -> Res<Value> {
    let [] = args.bind("length", [])?;
    Ok(Value::Int(value.len()? as i64))
}

fn default(value: Value, args: Args) -> Res<Value> {
    let [other, boolean] = args.bind("default", ["default_value", "boolean"])?;
    let is_missing = matches!(value, Value::Undefined) || (is_true(boolean) && !value.is_true());
    Ok(match is_missing {
        true => other.unwrap_or_else(|| "".into()),
        false => value,
    })
}

/// The item at a path such as `function.name`, or the value itself.
fn path(value: &Value, attribute: Option<&Value>) -> Res<Value> {
    let text = match attribute {
        None | Some(Value::None) => return Ok(value.clone()),
        Some(Value::Int(at)) => return item(value, &Value::Int(*at)),
        Some(attribute) => string("attribute", attribute)?,
    };
    text.split('.')
        .try_fold(value.clone(), |value, part| match part.parse() {
            Ok(at) if part.bytes().all(|byte| byte.is_ascii_digit()) => {
                item(&value, &Value::Int(at))
            }
            _ => item(&value, &part.into()),
        })
}

fn folded(value: Value, cased: bool) -> Value {
    match &value {
        Value::Str(text) if !cased => text.to_lowercase().into(),
        _ => value,
    }
}

/// Sorts by keys, all of which are strings or all numbers.
fn sorted(
    items: Vec<Value>,
    reverse: bool,
    cased: bool,
    key: impl Fn(&Value) -> Res<Value>,
) -> Res<Value> {
    let keyed = items
        .into_iter()
        .map(|item| Ok((folded(key(&item)?, cased), item)));
    let mut keyed: Vec<(Value, Value)> = keyed.collect::<Res<_>>()?;
    for (key, _) in &keyed {
        if key.compare(&keyed[0].0, "<")?.is_none()
            || matches!(key, Value::List(_) | Value::Tuple(_))
        {
            return unsupported(format!("a sort by values of type {}", key.kind()));
        }
    }
    keyed.sort_by(|(left, _), (right, _)| {
        let order = left
            .compare(right, "<")
            .ok()
            .flatten()
            .unwrap_or(Ordering::Equal);
        if reverse { order.reverse() } else { order }
    });
    Ok(Value::list(
        keyed.into_iter().map(|(_, item)| item).collect(),
    ))
}

fn extreme(value: Value, args: Args, wanted: Ordering) -> Res<Value> {
    let [cased, attribute] = args.bind("min", ["case_sensitive", "attribute"])?;
    let cased = is_true(cased);
    let mut best: Option<(Value, Value)> = None;
    for item in &*value.iterate()? {
        let key = folded(path(item, attribute.as_ref())?, cased);
        let is_better = match &best {
            Some((other, _)) => key.compare(other, "<")? == Some(wanted),
            None => true,
        };
        if is_better {
            best = Some((key, item.clone()));
        }
    }
    Ok(best.map_or(Value::Undefined, |(_, item)| item))
}

fn dictsort(value: Value, args: Args) -> Res<Value> {
    let [cased, by, reverse] = args.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let Value::Dict(dict) = &value else {
        return raised(format!(
            "'{}' object has no attribute 'items'",
            value.kind()
        ));
    };
    let at = match by.as_ref().map(|by| string("dictsort", by)).transpose()? {
        None | Some("key") => 0,
        Some("value") => 1,
        Some(_) => return raised("You can only sort by either \"key\" or \"value\""),
    };
    sorted(items(dict), is_true(reverse), is_true(cased), |pair| {
        item(pair, &Value::Int(at))
    })
}

fn join(value: Value, args: Args) -> Res<Value> {
    let [between, attribute] = args.bind("join", ["d", "attribute"])?;
    let between = match between {
        Some(between) => text_of(&between)?,
        None => "".into(),
    };
    let mut text = String::new();
    for (number, item) in value.iterate()?.iter().enumerate() {
        if number > 0 {
            text.push_str(&between);
        }
        str_of(&path(item, attribute.as_ref())?, &mut text)?;
    }
    Ok(text.into())
}

fn indent(value: Value, args: Args) -> Res<Value> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"])?;
    let Value::Str(text) = &value else {
        return unsupported(format!("indent of a value of type {}", value.kind()));
    };
    let indent = match width {
        None => "    ".into(),
        Some(Value::Str(text)) => text.to_string(),
        Some(width) => " ".repeat(width.as_int().unwrap_or(0).clamp(0, 1 << 16) as usize),
    };
    let with_end = format!("{text}\n");
    let blank = is_true(blank);
    let mut out = String::new();
    for (number, line) in strings::lines(&with_end).into_iter().enumerate() {
        if number > 0 {
            out.push('\n');
        }
        let indented = if number == 0 {
            is_true(first.clone())
        } else {
            blank || !line.is_empty()
        };
        if indented {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out.into())
}

/// `float(value)`, if Python can.
fn number(value: &Value) -> Res<Option<f64>> {
    match value {
        Value::Float(float) => Ok(Some(*float)),
        Value::Str(text) if text.is_ascii() && !text.contains('_') => {
            let text = text.trim_matches(strings::is_space);
            Ok(text.parse().ok())
        }
        Value::Str(_) | Value::Markup(_) | Value::Big(_) => unsupported("a number of this string"),
        Value::Undefined => raised("a number of an undefined value"),
        _ => Ok(value.as_int().map(|int| int as f64)),
    }
}

fn int(value: Value, args: Args) -> Res<Value> {
    let [default, base] = args.bind("int", ["default", "base"])?;
    if base.is_some_and(|base| base.as_int() != Some(10)) {
        return unsupported("int with a base");
    }
    let default = default.unwrap_or(Value::Int(0));
    if let Some(int) = value.as_int() {
        return Ok(Value::Int(int));
    }
    if let Value::Str(text) = &value
        && let Ok(int) = text.trim_matches(strings::is_space).parse()
    {
        return Ok(Value::Int(int));
    }
    match number(&value)? {
        None => Ok(default),
        Some(float) if !float.is_finite() => Ok(default),
        Some(float) if float.abs() < 9e15 => Ok(Value::Int(float as i64)),
        Some(float) => unsupported(format!("int of {float}")),
    }
}

/// The elements that `map` and `select` see: what is false has none.
fn elements(value: &Value) -> Res<Rc<Vec<Value>>> {
    match value.is_true() {
        true => value.iterate(),
        false => Ok(Rc::default()),
    }
}

fn map(value: Value, mut args: Args) -> Res<Value> {
    let source = elements(&value)?;
    if args.pos.is_empty() {
        let [attribute, default] = args.bind("map", ["attribute", "default"])?;
        let attribute = needed("map", attribute)?;
        let values = source.iter().map(|item| {
            let found = path(item, Some(&attribute))?;
            Ok(match (&found, &default) {
                (Value::Undefined, Some(default)) => default.clone(),
                _ => found,
            })
        });
        return Ok(Value::generator(values.collect::<Res<_>>()?));
    }
    let name = args.pos.remove(0);
    let name = string("map", &name)?;
    let Some(filter) = filter(name) else {
        return unsupported(format!("the filter `{name}`"));
    };
    let values = source.iter().map(|item| {
        let args = Args {
            pos: args.pos.clone(),
            named: args.named.clone(),
        };
        filter(item.clone(), args)
    });
    Ok(Value::generator(values.collect::<Res<_>>()?))
}

/// `select` and its relatives: by a test, of an attribute or of the items themselves.
fn select(value: Value, args: Args, by_attribute: bool, keep: bool) -> Res<Value> {
    let mut pos = args.pos.into_iter();
    if !args.named.is_empty() {
        return unsupported("select with named arguments");
    }
    let attribute = match by_attribute {
        true => Some(needed("selectattr", pos.next())?),
        false => None,
    };
    let name = pos.next();
    let rest: Vec<Value> = pos.collect();
    let test = match &name {
        None => None,
        Some(name) => {
            let name = string("select", name)?;
            let known = test(match name {
                "==" => "eq",
                "!=" => "ne",
                "<" => "lt",
                "<=" => "le",
                ">" => "gt",
                ">=" => "ge",
                _ => name,
            });
            match known {
                None => return unsupported(format!("the test `{name}`")),
                known => known,
            }
        }
    };
    let mut kept = Vec::new();
    for item in &*elements(&value)? {
        let tested = path(item, attribute.as_ref())?;
        let passes = match test {
            Some(test) => test(&tested, &rest)?,
            None => tested.is_true(),
        };
        if passes == keep {
            kept.push(item.clone());
        }
    }
    Ok(Value::generator(kept))
}

fn tojson(value: Value, args: Args) -> Res<Value> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort] = args.bind("tojson", names)?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Str(text)) => Some(text.to_string()),
        Some(width) => match width.as_int() {
            Some(width) => Some(" ".repeat(width.clamp(0, 1 << 10) as usize)),
            None => return raised("tojson: the indent is no number"),
        },
    };
    let (item, key) = match &separators {
        None | Some(Value::None) => (
            if indent.is_some() { "," } else { ", " }.into(),
            ": ".into(),
        ),
        Some(Value::Tuple(pair) | Value::List(pair)) if pair.len() == 2 => {
            let [item, key] = [0, 1].map(|at| string("tojson", &pair[at]));
            (item?.to_string(), key?.to_string())
        }
        Some(_) => return raised("tojson: the separators are not two strings"),
    };
    let json = Json {
        ascii: is_true(ascii),
        indent,
        item,
        key,
        sort: is_true(sort),
    };
    let mut text = String::new();
    json.dump(&value, 0, &mut text)?;
    Ok(text.into())
}
