//! Key paths: which values of a line make a field.
//!
//! ```text
//! text   meta.score   messages[].content   boxes[0]   "a.b"."c d"[].e
//! ```
//!
//! `.` leads into an object, `[]` to every element of a list, `[2]` to one. Quotes, as in JSON, take
//! keys with `.`, `[`, `]`, `:` or `"`. A path is not empty and does not begin with a list.

use super::json::{self, kind};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::setting::Setting;
use feedline_core::dataset::Digest;

/// Maximum steps of a path: each is a call on the stack.
const STEPS_MAX: usize = 32;

/// Keys that an error lists, and bytes of each.
const KEYS_LISTED: usize = 12;
const KEY_LISTED: usize = 48;

#[derive(Clone, Debug, PartialEq, Eq)]
enum PathStep {
    Key(String),
    Each,
    At(usize),
}

/// A parsed path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPath {
    steps: Vec<PathStep>,
}

fn wrong(words: &str, what: &str) -> Error {
    let message = format!("path {words:?}: {what}");
    Error::new(ErrorKind::Config, Stage::Index, message)
}

impl KeyPath {
    /// Errors: [`ErrorKind::Config`].
    pub fn parse(words: &str) -> Result<Self> {
        let mut steps = Vec::new();
        let mut rest = words;
        loop {
            let key = match rest.starts_with('"') {
                true => {
                    let end =
                        quoted_len(rest).ok_or_else(|| wrong(words, "a quote without its end"))?;
                    let mut key = Vec::new();
                    json::check(format!("{{{}:0}}", &rest[..end]).as_bytes())
                        .and_then(|()| json::unescape(rest.as_bytes(), 0, &mut key))
                        .map_err(|error| wrong(words, error.message()))?;
                    rest = &rest[end..];
                    String::from_utf8(key).map_err(|_| wrong(words, "a key that is not UTF-8"))?
                }
                false => {
                    let end = rest.find(['.', '[', ']', '"', ':']).unwrap_or(rest.len());
                    let key = rest[..end].to_string();
                    rest = &rest[end..];
                    if key.is_empty() {
                        return Err(wrong(words, "a key is missing"));
                    }
                    key
                }
            };
            steps.push(PathStep::Key(key));
            while let Some(inner) = rest.strip_prefix('[') {
                let (number, behind) = inner
                    .split_once(']')
                    .ok_or_else(|| wrong(words, "a [ without its ]"))?;
                steps.push(match number {
                    "" => PathStep::Each,
                    number => PathStep::At(number.parse().map_err(|_| {
                        wrong(
                            words,
                            "in [] goes nothing, for every element, or the number of one",
                        )
                    })?),
                });
                rest = behind;
            }
            if rest.is_empty() {
                break;
            }
            rest = rest
                .strip_prefix('.')
                .ok_or_else(|| wrong(words, "quote keys with . [ ] : or \", as in \"a.b\".c"))?;
        }
        match steps.len() {
            0..=STEPS_MAX => Ok(Self { steps }),
            _ => Err(wrong(words, "too many steps")),
        }
    }

    /// The hash with the path in it.
    pub fn digest(&self, digest: Digest) -> Digest {
        self.steps.iter().fold(digest, |digest, step| match step {
            PathStep::Key(key) => digest.word(0).bytes(key.as_bytes()),
            PathStep::Each => digest.word(1),
            PathStep::At(number) => digest.word(2).word(*number as u64),
        })
    }

    /// Whether the path leads to any number of values.
    pub fn is_list(&self) -> bool {
        self.steps.contains(&PathStep::Each)
    }

    /// Calls `each` with the place of every value in the line; with `None` for one that is missing
    /// or null, if `missing` allows that.
    ///
    /// Errors: [`ErrorKind::Shape`] for a value that is missing or null, and for one that is no
    /// object or list where the path needs it; those of `each`.
    pub fn values(
        &self,
        line: &[u8],
        missing: bool,
        each: &mut dyn FnMut(Option<usize>) -> Result<()>,
    ) -> Result<()> {
        let start = json::after_space(line, 0);
        let mut walk = PathWalk {
            line,
            steps: &self.steps,
            missing,
            each,
        };
        walk.go(start, 0).map(|_| ())
    }

    /// The path up to a step, for people.
    fn upto(steps: &[PathStep]) -> String {
        let mut words = String::new();
        for step in steps {
            match step {
                PathStep::Key(key) => {
                    if !words.is_empty() {
                        words.push('.');
                    }
                    words += key;
                }
                PathStep::Each => words += "[]",
                PathStep::At(number) => words += &format!("[{number}]"),
            }
        }
        words
    }
}

/// Bytes of the quoted text at the start of `words`, with its quotes.
pub fn quoted_len(words: &str) -> Option<usize> {
    let mut escaped = false;
    let end = words.bytes().skip(1).position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map(|end| end + 2)
}

struct PathWalk<'a> {
    line: &'a [u8],
    steps: &'a [PathStep],
    missing: bool,
    each: &'a mut dyn FnMut(Option<usize>) -> Result<()>,
}

impl PathWalk<'_> {
    /// Goes on from the value at `at`, behind `done` steps. Returns the offset behind it if the walk
    /// came there.
    fn go(&mut self, at: usize, done: usize) -> Result<Option<usize>> {
        let line = self.line;
        if line.get(at) == Some(&b'n') {
            return self.none(at, done, || "is null".into()).map(|()| None);
        }
        let end = match (self.steps.get(done), line.get(at)) {
            (None, _) => {
                (self.each)(Some(at))?;
                return Ok(None);
            }
            (Some(PathStep::Key(key)), Some(b'{')) => {
                let (value, end) = json::member(line, at, key);
                match value {
                    Some(value) => _ = self.go(value, done + 1)?,
                    None => self.none(at, done + 1, || {
                        format!("is missing; the object has {}", keys(line, at))
                    })?,
                }
                end
            }
            (Some(PathStep::Each), Some(b'[')) => {
                let (_, end) = json::elements(line, at, |_, element| self.go(element, done + 1))?;
                end
            }
            (Some(PathStep::At(number)), Some(b'[')) => {
                let mut found = None;
                let (count, end) = json::elements(line, at, |place, element| {
                    if place == *number {
                        found = Some(element);
                    }
                    Ok(None)
                })?;
                match found {
                    Some(element) => _ = self.go(element, done + 1)?,
                    None => self.none(at, done + 1, || {
                        format!("is missing; the list has {count} elements")
                    })?,
                }
                end
            }
            (Some(PathStep::Key(_)), _) => return Err(self.wrong(at, done, "an object")),
            (Some(_), _) => return Err(self.wrong(at, done, "a list")),
        };
        Ok(Some(end))
    }

    /// Nothing is there, behind `done` steps.
    fn none(&mut self, at: usize, done: usize, why: impl FnOnce() -> String) -> Result<()> {
        if !self.missing {
            let what = KeyPath::upto(&self.steps[..done]);
            let zeros = Setting::MissingZero.hint(|zero| format!("; {zero} reads it as zeros"));
            let message = format!("{what} {}{zeros}", why());
            let error = Error::new(ErrorKind::Shape, Stage::Decode, message);
            return Err(error.with_range(at as u64, 1));
        }
        // A list that is not there has no elements.
        match self.steps[done..].contains(&PathStep::Each) {
            true => Ok(()),
            false => (self.each)(None),
        }
    }

    #[cold]
    fn wrong(&self, at: usize, done: usize, wanted: &str) -> Error {
        let what = KeyPath::upto(&self.steps[..done]);
        let message = format!("{what} is {}, {wanted} expected", kind(self.line, at));
        Error::new(ErrorKind::Shape, Stage::Decode, message).with_range(at as u64, 1)
    }
}

/// The first keys of the object at `at`, for people.
#[cold]
fn keys(line: &[u8], at: usize) -> String {
    let mut names = Vec::new();
    let mut count = 0;
    json::members(line, at, |name, _| {
        count += 1;
        if names.len() < KEYS_LISTED {
            let cut = &name[..name.len().min(KEY_LISTED)];
            names.push(String::from_utf8_lossy(cut).into_owned());
        }
    });
    match count {
        0 => "no keys".into(),
        _ if count > names.len() => {
            format!("{} and {} more", names.join(", "), count - names.len())
        }
        _ => names.join(", "),
    }
}
