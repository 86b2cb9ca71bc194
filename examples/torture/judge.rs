//! Turns a child's report into a summary and a verdict.

use crate::job::{ChildReport, Fault, Phase};
use crate::scenarios::Promise;
use crate::source::Source;
use crate::supervise::Ended;
use serde::Serialize;
use std::path::Path;

/// Verdict of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Ok,
    Skipped,
    /// The format cannot detect the damage.
    NotNoticed,
    /// A promise does not hold.
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

/// Outcome of one child or several.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub summary: String,
    pub verdict: Verdict,
    /// The complete error, or the last lines of a crash.
    pub details: Option<String>,
}

impl Outcome {
    pub fn new(verdict: Verdict, summary: impl Into<String>) -> Self {
        Self {
            summary: summary.into(),
            verdict,
            details: None,
        }
    }
}

/// The run's parameters, besides the child's report.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub promise: Promise,
    pub source: Source,
    pub checked: bool,
    /// The damage is in headers or indexes, not in the samples' bytes.
    pub header: bool,
    /// The damage was done before opening, to files whose lengths no index lists.
    pub unlisted: bool,
    /// Samples of the oracle.
    pub samples: u64,
}

impl Case {
    /// Whether a checksum, of the format or beside it, detects a changed byte.
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
        let Some(report) = &ended.report else {
            let how = ended
                .signal
                .map_or("no report".into(), |signal| format!("signal {signal}"));
            let details = Some(ended.stderr.clone());
            return Outcome {
                details,
                ..Outcome::new(Verdict::Broken, format!("CRASH: {how}"))
            };
        };
        let note = report
            .note
            .as_ref()
            .map(|note| format!("; {note}"))
            .unwrap_or_default();
        if report.wrong > 0 {
            // Before any error: wrong samples count first.
            return self.silent(report, &note);
        }
        match &report.error {
            Some(fault) => self.error(fault, &note),
            None => self.rows(report, &note),
        }
    }

    fn silent(&self, report: &ChildReport, note: &str) -> Outcome {
        let found = if report.bad > 0 {
            format!(", {} found", report.bad)
        } else {
            String::new()
        };
        if self.unlisted && self.promise == Promise::Noticed {
            let summary = format!(
                "{} other or additional samples: it is another dataset{note}",
                report.wrong
            );
            return Outcome::new(Verdict::NotNoticed, summary);
        }
        let forgiven = self.promise == Promise::Checksum && !self.has_checksums();
        let verdict = if forgiven {
            Verdict::NotNoticed
        } else {
            Verdict::Broken
        };
        Outcome::new(
            verdict,
            format!(
                "WRONG: {} of {} samples differ{found}{note}",
                report.wrong, self.samples
            ),
        )
    }

    fn rows(&self, report: &ChildReport, note: &str) -> Outcome {
        let named = report.unnamed == 0;
        if report.substituted > 0 {
            let summary = format!(
                "{} rows substituted, {} of {} bad samples named{note}",
                report.substituted,
                report.bad - report.unnamed.min(report.bad),
                report.bad
            );
            let legal = named
                && matches!(self.promise, Promise::Noticed | Promise::Checksum)
                && report.missing == 0;
            return Outcome::new(if legal { Verdict::Ok } else { Verdict::Broken }, summary);
        }
        if report.missing > 0 {
            return self.fewer(report);
        }
        let legal = self.promise != Promise::Refused;
        let untouched = match (self.promise, report.damage.first()) {
            (Promise::Exact, _) => String::new(),
            (_, None) => ", unaffected by the damage".into(),
            (_, Some(damage)) => format!(", reported at open: {}", short(damage)),
        };
        let summary = format!("exact: {} samples{untouched}{note}", report.exact);
        Outcome::new(if legal { Verdict::Ok } else { Verdict::Broken }, summary)
    }

    fn fewer(&self, report: &ChildReport) -> Outcome {
        let summary = format!("{} of {} samples missing", report.missing, self.samples);
        match (report.damage.first(), self.promise) {
            (Some(damage), Promise::Noticed | Promise::Checksum) => {
                let details = Some(report.damage.join("; "));
                let summary = format!("{summary}, reported at open: {}", short(damage));
                Outcome {
                    details,
                    ..Outcome::new(Verdict::Ok, summary)
                }
            }
            // Only the folder lists the files.
            (None, Promise::Noticed) => Outcome::new(
                Verdict::NotNoticed,
                format!("{summary}: it is another dataset"),
            ),
            _ => Outcome::new(Verdict::Broken, summary),
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
        };
        let verdict = if legal { Verdict::Ok } else { Verdict::Broken };
        let summary = format!("error: {}{lacks}{note}", named(fault));
        Outcome {
            details: Some(fault.text.clone()),
            ..Outcome::new(verdict, summary)
        }
    }
}

/// Short text of an error: its kind and site.
fn named(fault: &Fault) -> String {
    let mut text = if fault.kind == "other" {
        short(&fault.text)
    } else {
        fault.kind.clone()
    };
    if let Some(path) = &fault.path {
        text += &format!(
            ": {}",
            path.file_name().map(Path::new).unwrap_or(path).display()
        );
    }
    if let Some(offset) = fault.offset {
        text += &format!(" at {offset}");
    }
    if let Some(sample) = fault.sample {
        text += &format!(", sample {sample}");
    }
    text
}

fn short(text: &str) -> String {
    let text = text.replace('\n', " ");
    match text.char_indices().nth(70) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Combines several children of one row: the worst verdict, and the count of each outcome.
pub fn together(outcomes: &[Outcome]) -> Outcome {
    let verdict = outcomes
        .iter()
        .map(|outcome| outcome.verdict)
        .max()
        .unwrap_or(Verdict::Skipped);
    let mut counts: Vec<(String, usize)> = Vec::new();
    for outcome in outcomes {
        let word = outcome
            .summary
            .split(':')
            .next()
            .unwrap_or_default()
            .to_string();
        match counts.iter_mut().find(|(known, _)| *known == word) {
            Some((_, count)) => *count += 1,
            None => counts.push((word, 1)),
        }
    }
    let summary = counts
        .iter()
        .map(|(word, count)| format!("{count} × {word}"))
        .collect::<Vec<_>>()
        .join(", ");
    let worst = outcomes
        .iter()
        .find(|outcome| outcome.verdict == verdict && verdict == Verdict::Broken);
    let details = outcomes
        .iter()
        .map(|outcome| outcome.details.as_deref().unwrap_or(&outcome.summary));
    let details = Some(details.collect::<Vec<_>>().join(" | "));
    let worst = worst
        .map(|outcome| format!("; {}", outcome.summary))
        .unwrap_or_default();
    Outcome {
        summary: format!("{summary}{worst}"),
        verdict,
        details,
    }
}
