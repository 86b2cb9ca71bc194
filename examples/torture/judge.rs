//! From what a child told to words and a verdict.

use crate::job::{Fault, Phase, Told};
use crate::scenarios::Promise;
use crate::source::Source;
use crate::supervise::Ended;
use serde::Serialize;
use std::path::Path;

/// What a row says at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Ok,
    Skipped,
    /// The format has nothing that could tell.
    NotNoticed,
    /// What is promised does not hold.
    Broken,
}

impl Verdict {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Skipped => "skipped",
            Self::NotNoticed => "not noticed",
            Self::Broken => "BROKEN",
        }
    }
}

/// What came of a child, or of several.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub words: String,
    pub verdict: Verdict,
    /// The whole error, the last words of a crash.
    pub more: Option<String>,
}

impl Outcome {
    pub fn new(verdict: Verdict, words: impl Into<String>) -> Self {
        Self { words: words.into(), verdict, more: None }
    }
}

/// What is known of the run beside what the child told.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub promise: Promise,
    pub source: Source,
    pub checked: bool,
    /// In what describes the format, not in what samples are made of.
    pub header: bool,
    /// Done before the dataset was opened, to files of which nothing says how long they are.
    pub unlisted: bool,
    /// Samples of the oracle.
    pub samples: u64,
}

impl Case {
    /// Whether something of the format, or beside it, tells that a byte changed.
    fn has_checksums(&self) -> bool {
        let by_format = match self.source {
            Source::Tfrecord => true,
            Source::Tar => self.header,
            _ => false,
        };
        self.checked || by_format
    }

    pub fn judge(&self, ended: &Ended) -> Outcome {
        if ended.hang {
            return Outcome::new(Verdict::Broken, "HANG: killed at the time limit");
        }
        let Some(told) = &ended.told else {
            let how = ended.signal.map_or("it told nothing".into(), |signal| format!("signal {signal}"));
            let more = Some(ended.words.clone());
            return Outcome { more, ..Outcome::new(Verdict::Broken, format!("CRASH: {how}")) };
        };
        let note = told.note.as_ref().map(|note| format!("; {note}")).unwrap_or_default();
        if told.wrong > 0 {
            // Whatever came after: samples were wrong.
            return self.silent(told, &note);
        }
        match &told.error {
            Some(fault) => self.error(fault, &note),
            None => self.rows(told, &note),
        }
    }

    fn silent(&self, told: &Told, note: &str) -> Outcome {
        let found = if told.bad > 0 { format!(", {} found", told.bad) } else { String::new() };
        if self.unlisted && self.promise == Promise::Noticed {
            let words = format!("{} samples are others, or more: it is another dataset{note}", told.wrong);
            return Outcome::new(Verdict::NotNoticed, words);
        }
        let forgiven = self.promise == Promise::Checksum && !self.has_checksums();
        let verdict = if forgiven { Verdict::NotNoticed } else { Verdict::Broken };
        Outcome::new(verdict, format!("WRONG: {} of {} samples differ{found}{note}", told.wrong, self.samples))
    }

    fn rows(&self, told: &Told, note: &str) -> Outcome {
        let named = told.unnamed == 0;
        if told.substituted > 0 {
            let words = format!(
                "{} rows substituted, {} of {} bad samples named{note}",
                told.substituted,
                told.bad - told.unnamed.min(told.bad),
                told.bad
            );
            let legal = named && matches!(self.promise, Promise::Noticed | Promise::Checksum) && told.missing == 0;
            return Outcome::new(if legal { Verdict::Ok } else { Verdict::Broken }, words);
        }
        if told.missing > 0 {
            return self.fewer(told);
        }
        let legal = !matches!(self.promise, Promise::Stalls | Promise::Refused);
        let untouched = match (self.promise, told.damage.first()) {
            (Promise::Exact, _) => String::new(),
            (_, None) => ", as if nothing had been done".into(),
            (_, Some(damage)) => format!(", said when opened: {}", short(damage)),
        };
        let words = format!("exact: {} samples{untouched}{note}", told.exact);
        Outcome::new(if legal { Verdict::Ok } else { Verdict::Broken }, words)
    }

    fn fewer(&self, told: &Told) -> Outcome {
        let words = format!("{} of {} samples are gone", told.missing, self.samples);
        match (told.damage.first(), self.promise) {
            (Some(damage), Promise::Noticed | Promise::Checksum) => {
                let more = Some(told.damage.join("; "));
                Outcome { more, ..Outcome::new(Verdict::Ok, format!("{words}, said when opened: {}", short(damage))) }
            }
            // Nothing beside the folder says what was there.
            (None, Promise::Noticed) => Outcome::new(Verdict::NotNoticed, format!("{words}: it is another dataset")),
            _ => Outcome::new(Verdict::Broken, words),
        }
    }

    fn error(&self, fault: &Fault, note: &str) -> Outcome {
        let place = fault.path.is_some() && (fault.phase != Phase::Epoch || fault.offset.is_some());
        let sample = fault.phase != Phase::Epoch || fault.sample.is_some();
        let (legal, lacks) = match self.promise {
            Promise::Exact => (false, ""),
            Promise::Noticed | Promise::Checksum if !place => (false, ", WITHOUT path and offset"),
            Promise::Noticed | Promise::Checksum if !sample => (false, ", WITHOUT the sample"),
            Promise::Noticed | Promise::Checksum | Promise::Survives => (true, ""),
            Promise::Refused => (fault.kind != "other", ""),
            Promise::Stalls => (fault.kind == "stalled" && fault.sample.is_some() && !note.contains("ANOTHER"), ""),
        };
        let verdict = if legal { Verdict::Ok } else { Verdict::Broken };
        let words = format!("error: {}{lacks}{note}", named(fault));
        Outcome { more: Some(fault.text.clone()), ..Outcome::new(verdict, words) }
    }
}

/// An error in a few words: its kind and what it names.
fn named(fault: &Fault) -> String {
    let mut words = if fault.kind == "other" { short(&fault.text) } else { fault.kind.clone() };
    if let Some(path) = &fault.path {
        words += &format!(": {}", path.file_name().map(Path::new).unwrap_or(path).display());
    }
    if let Some(offset) = fault.offset {
        words += &format!(" at {offset}");
    }
    if let Some(sample) = fault.sample {
        words += &format!(", sample {sample}");
    }
    words
}

fn short(text: &str) -> String {
    let text = text.replace('\n', " ");
    match text.char_indices().nth(70) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Several children of one row: the worst verdict, and how many of each.
pub fn together(outcomes: &[Outcome]) -> Outcome {
    let verdict = outcomes.iter().map(|outcome| outcome.verdict).max().unwrap_or(Verdict::Skipped);
    let mut counts: Vec<(String, usize)> = Vec::new();
    for outcome in outcomes {
        let word = outcome.words.split(':').next().unwrap_or_default().to_string();
        match counts.iter_mut().find(|(known, _)| *known == word) {
            Some((_, count)) => *count += 1,
            None => counts.push((word, 1)),
        }
    }
    let words = counts.iter().map(|(word, count)| format!("{count} × {word}")).collect::<Vec<_>>().join(", ");
    let worst = outcomes.iter().find(|outcome| outcome.verdict == verdict && verdict == Verdict::Broken);
    let more = outcomes.iter().map(|outcome| outcome.more.as_deref().unwrap_or(&outcome.words)).collect::<Vec<_>>();
    let worst = worst.map(|outcome| format!("; {}", outcome.words)).unwrap_or_default();
    Outcome { words: format!("{words}{worst}"), verdict, more: Some(more.join(" | ")) }
}
