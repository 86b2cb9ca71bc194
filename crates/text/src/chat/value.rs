//! Values of a template, as Python has them, and what Python's operators do with them.
//!
//! Limits: integers of 64 bits; larger ones of the data can only be printed. Keys of dicts are
//! strings and integers. What is beyond them is [`Fail::Unsupported`], never another answer.

use indexmap::{Equivalent, IndexMap};
use std::cell::RefCell;
use std::cmp::Ordering;
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

/// Maximum bytes of a rendered text.
pub const OUTPUT_MAX: usize = 64 << 20;

/// Why a text was not rendered.
#[derive(Debug)]
pub enum Fail {
    /// Python would raise an error, too.
    Raised(String),
    /// Python may render it, this program does not.
    Unsupported(String),
}

pub type Res<T> = Result<T, Fail>;

pub fn raised<T>(what: impl Into<String>) -> Res<T> {
    Err(Fail::Raised(what.into()))
}

pub fn unsupported<T>(what: impl Into<String>) -> Res<T> {
    Err(Fail::Unsupported(what.into()))
}

/// A dict, in the order of its members.
pub type Dict = IndexMap<Key, Value>;

/// A key of a dict. A string finds its key without a copy.
#[derive(Clone, PartialEq, Eq)]
pub enum Key {
    Str(Arc<str>),
    Int(i64),
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Self::Str(text) => text.hash(state),
            Self::Int(int) => int.hash(state),
        }
    }
}

impl Equivalent<Key> for str {
    fn equivalent(&self, key: &Key) -> bool {
        matches!(key, Key::Str(text) if **text == *self)
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl Key {
    /// The key that a value is; `None` if it cannot be in a dict here.
    pub fn of(value: &Value) -> Res<Option<Self>> {
        Ok(match value {
            Value::Str(text) | Value::Markup(text) => Some(Self::Str(text.clone())),
            Value::Int(int) => Some(Self::Int(*int)),
            Value::None | Value::Undefined => None,
            Value::List(_) | Value::Dict(_) => {
                return raised(format!("unhashable type: '{}'", value.kind()));
            }
            _ => return unsupported(format!("a key of type {}", value.kind())),
        })
    }

    pub fn value(&self) -> Value {
        match self {
            Self::Str(text) => Value::Str(text.clone()),
            Self::Int(int) => Value::Int(*int),
        }
    }
}

#[derive(Clone)]
pub enum Value {
    Undefined,
    None,
    Bool(bool),
    Int(i64),
    /// An integer of the data with more than 64 bits, as it is printed.
    Big(Arc<str>),
    Float(f64),
    Str(Arc<str>),
    /// A string that went through `safe`.
    Markup(Arc<str>),
    List(Rc<Vec<Value>>),
    Tuple(Rc<Vec<Value>>),
    Dict(Rc<Dict>),
    /// Keys, values or items of a dict.
    View(&'static str, Rc<Vec<Value>>),
    Range(i64, i64, i64),
    /// What can be iterated once.
    Generator(Rc<RefCell<Vec<Value>>>),
    Namespace(Rc<RefCell<Dict>>),
    Method(Rc<Value>, &'static str),
    Function(Function),
    Macro(Rc<Closure>),
    Loop(Rc<LoopState>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Str(text.into())
    }
}

impl Value {
    pub fn list(items: Vec<Value>) -> Self {
        Self::List(Rc::new(items))
    }

    pub fn tuple(items: Vec<Value>) -> Self {
        Self::Tuple(Rc::new(items))
    }

    pub fn generator(items: Vec<Value>) -> Self {
        Self::Generator(Rc::new(RefCell::new(items)))
    }

    /// The name of the type in Python.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Undefined => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::Big(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Markup(_) => "Markup",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(name, _) => name,
            Self::Range(..) => "range",
            Self::Generator(_) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Method(..) => "method",
            Self::Function(_) => "function",
            Self::Macro(_) => "Macro",
            Self::Loop(_) => "LoopContext",
        }
    }

    pub fn is_true(&self) -> bool {
        match self {
            Self::Undefined | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Str(text) | Self::Markup(text) => !text.is_empty(),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => !items.is_empty(),
            Self::Dict(dict) => !dict.is_empty(),
            Self::Range(..) => self.len().is_ok_and(|len| len > 0),
            _ => true,
        }
    }

    /// A string, with or without markup.
    pub fn as_str(&self) -> Option<&Arc<str>> {
        match self {
            Self::Str(text) | Self::Markup(text) => Some(text),
            _ => None,
        }
    }

    /// An integer, or a boolean as one.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(value) => Some(*value),
            Self::Bool(value) => Some(i64::from(*value)),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            _ => self.as_int().map(|value| value as f64),
        }
    }

    /// Python's `len`.
    pub fn len(&self) -> Res<usize> {
        Ok(match self {
            Self::Undefined => 0,
            Self::Str(text) | Self::Markup(text) => text.chars().count(),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.len(),
            Self::Dict(dict) => dict.len(),
            Self::Loop(state) => state.items.len(),
            Self::Range(start, stop, step) => {
                let (low, high) = if *step > 0 {
                    (start, stop)
                } else {
                    (stop, start)
                };
                let span = i128::from(*high) - i128::from(*low);
                let step = i128::from(*step).abs();
                ((span + step - 1) / step).max(0) as usize
            }
            _ => return raised(format!("object of type '{}' has no len()", self.kind())),
        })
    }

    /// The elements that a loop sees.
    pub fn iterate(&self) -> Res<Rc<Vec<Value>>> {
        Ok(match self {
            Self::Undefined => Rc::default(),
            Self::Str(text) | Self::Markup(text) => {
                let mut buffer = [0; 4];
                let letters = text.chars();
                let letters = letters.map(|letter| (&*letter.encode_utf8(&mut buffer)).into());
                Rc::new(letters.collect())
            }
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.clone(),
            Self::Dict(dict) => Rc::new(dict.keys().map(Key::value).collect()),
            Self::Range(start, _, step) => {
                let len = self.len()? as i64;
                Rc::new((0..len).map(|at| Value::Int(start + at * step)).collect())
            }
            Self::Generator(items) => Rc::new(std::mem::take(&mut *items.borrow_mut())),
            _ => return raised(format!("'{}' object is not iterable", self.kind())),
        })
    }

    /// Python's `==`.
    pub fn equals(&self, other: &Self) -> Res<bool> {
        if let (Some(left), Some(right)) = (self.as_str(), other.as_str()) {
            return Ok(left == right);
        }
        if let (Some(left), Some(right)) = (self.as_int(), other.as_int()) {
            return Ok(left == right);
        }
        if let (Some(left), Some(right)) = (self.as_float(), other.as_float()) {
            exact(self)?;
            exact(other)?;
            return Ok(left == right);
        }
        Ok(match (self, other) {
            (Self::Undefined, Self::Undefined) | (Self::None, Self::None) => true,
            (Self::List(left), Self::List(right)) | (Self::Tuple(left), Self::Tuple(right)) => {
                if left.len() != right.len() {
                    return Ok(false);
                }
                for (left, right) in left.iter().zip(&**right) {
                    if !left.equals(right)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Self::Dict(left), Self::Dict(right)) => {
                if left.len() != right.len() {
                    return Ok(false);
                }
                for (key, value) in &**left {
                    match right.get(key) {
                        Some(other) if value.equals(other)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Self::Big(left), Self::Big(right)) => left == right,
            (Self::Big(_), other) | (other, Self::Big(_)) if other.as_float().is_some() => {
                return unsupported("an integer over 64 bits is compared");
            }
            _ if self.kind() != other.kind() => false,
            _ => return unsupported(format!("two values of type {} are compared", self.kind())),
        })
    }

    /// Python's order of `<` and the like.
    pub fn compare(&self, other: &Self, sign: &str) -> Res<Option<Ordering>> {
        if let (Some(left), Some(right)) = (self.as_str(), other.as_str()) {
            // Bytes of UTF-8 are in the order of their characters.
            return Ok(Some(left.cmp(right)));
        }
        if let (Some(left), Some(right)) = (self.as_int(), other.as_int()) {
            return Ok(Some(left.cmp(&right)));
        }
        if let (Some(left), Some(right)) = (self.as_float(), other.as_float()) {
            exact(self)?;
            exact(other)?;
            return Ok(left.partial_cmp(&right));
        }
        match (self, other) {
            (Self::List(left), Self::List(right)) | (Self::Tuple(left), Self::Tuple(right)) => {
                for (left, right) in left.iter().zip(&**right) {
                    if !left.equals(right)? {
                        return left.compare(right, sign);
                    }
                }
                Ok(Some(left.len().cmp(&right.len())))
            }
            (Self::Big(_), _) | (_, Self::Big(_)) => {
                unsupported("an integer over 64 bits is compared")
            }
            _ => wrong_types(sign, self, other),
        }
    }

    /// Whether the order of both is one that `is` accepts.
    pub fn is_ordered(&self, other: &Self, sign: &str, is: fn(Ordering) -> bool) -> Res<bool> {
        Ok(self.compare(other, sign)?.is_some_and(is))
    }

    /// Python's `item in self`.
    pub fn contains(&self, item: &Self) -> Res<bool> {
        match self {
            Self::Str(text) | Self::Markup(text) => match item.as_str() {
                Some(part) => Ok(text.contains(&**part)),
                None => raised(format!(
                    "'in <string>' requires string as left operand, not {}",
                    item.kind()
                )),
            },
            Self::Dict(dict) => Ok(Key::of(item)?.is_some_and(|key| dict.contains_key(&key))),
            _ => {
                for other in &*self.iterate()? {
                    if other.equals(item)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}

/// Integers beyond 2^53 are not compared with floats, because the conversion would round them.
fn exact(value: &Value) -> Res<()> {
    match value {
        Value::Int(int) if int.unsigned_abs() > 1 << 53 => {
            unsupported("a large integer is compared with a float")
        }
        _ => Ok(()),
    }
}

pub fn wrong_types<T>(sign: &str, left: &Value, right: &Value) -> Res<T> {
    if matches!(left, Value::Undefined) || matches!(right, Value::Undefined) {
        return raised(format!("a value beside {sign} is undefined"));
    }
    raised(format!(
        "unsupported operand types for {sign}: '{}' and '{}'",
        left.kind(),
        right.kind()
    ))
}

/// A function of all templates.
#[derive(Clone, Copy)]
pub enum Function {
    Range,
    Namespace,
    Dict,
    Raise,
    Now,
}

/// A name of a variable, by its number in the template.
pub type Name = u32;

/// Variables, and the scope around them.
pub struct Scope {
    vars: RefCell<Vec<(Name, Value)>>,
    outer: Option<Rc<Scope>>,
}

impl Scope {
    pub fn new(outer: Option<Rc<Scope>>) -> Rc<Self> {
        let vars = RefCell::default();
        Rc::new(Self { vars, outer })
    }

    pub fn inside(outer: &Rc<Scope>) -> Rc<Self> {
        Self::new(Some(outer.clone()))
    }

    pub fn get(&self, name: Name) -> Option<Value> {
        let vars = self.vars.borrow();
        let found = vars.iter().find(|(known, _)| *known == name);
        match (found, &self.outer) {
            (Some((_, value)), _) => Some(value.clone()),
            (None, Some(outer)) => outer.get(name),
            (None, None) => None,
        }
    }

    pub fn set(&self, name: Name, value: Value) {
        let mut vars = self.vars.borrow_mut();
        match vars.iter_mut().find(|(known, _)| *known == name) {
            Some((_, place)) => *place = value,
            None => vars.push((name, value)),
        }
    }
}

/// A macro, by its number in the template, and the scope where it was defined.
pub struct Closure {
    pub number: usize,
    pub scope: Rc<Scope>,
}

/// The variable `loop`.
pub struct LoopState {
    pub items: Rc<Vec<Value>>,
    pub at: usize,
}

impl LoopState {
    pub fn attribute(&self, name: &str) -> Res<Value> {
        let at = self.at as i64;
        let len = self.items.len() as i64;
        Ok(match name {
            "index" => Value::Int(at + 1),
            "index0" => Value::Int(at),
            "revindex" => Value::Int(len - at),
            "revindex0" => Value::Int(len - at - 1),
            "first" => Value::Bool(at == 0),
            "last" => Value::Bool(at + 1 == len),
            "length" => Value::Int(len),
            // Only recursive loops are deeper, for Jinja2.
            "depth" => Value::Int(1),
            "depth0" => Value::Int(0),
            "previtem" => self.item(self.at.checked_sub(1)),
            "nextitem" => self.item(Some(self.at + 1)),
            _ => return unsupported(format!("`loop.{name}`")),
        })
    }

    fn item(&self, at: Option<usize>) -> Value {
        let item = at.and_then(|at| self.items.get(at));
        item.cloned().unwrap_or(Value::Undefined)
    }
}
