//! The table, printed row by row within 110 columns.

use crate::judge::{Outcome, Verdict};
use serde::Serialize;
use std::io::Write;

/// A row.
#[derive(Debug, Serialize)]
pub struct Line {
    pub scenario: &'static str,
    pub policy: &'static str,
    pub seconds: f64,
    #[serde(flatten)]
    pub outcome: Outcome,
}

const NAME: usize = 31;
const POLICY: usize = 10;
const SUMMARY: usize = 47;
const SECONDS: usize = 6;

/// Prints a line, and ignores a closed pipe.
pub fn say(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

pub fn head() {
    say(row("scenario", "policy", "outcome", "s", "verdict"));
    say("─".repeat(110));
}

fn row(name: &str, policy: &str, summary: &str, seconds: &str, verdict: &str) -> String {
    format!("{name:<NAME$} {policy:<POLICY$} {summary:<SUMMARY$} {seconds:>SECONDS$}  {verdict}")
        .trim_end()
        .to_string()
}

/// Prints a row, its summary wrapped, and the scenario's name only once.
pub fn print(line: &Line, same: bool) {
    let seconds = format!("{:.1}", line.seconds);
    let name = if same { "" } else { line.scenario };
    for (index, text) in wrap(&line.outcome.summary).iter().enumerate() {
        if index == 0 {
            say(row(
                name,
                line.policy,
                text,
                &seconds,
                line.outcome.verdict.as_str(),
            ));
        } else {
            say(row("", "", text, "", ""));
        }
    }
}

fn wrap(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > 0 && line + 1 + word.chars().count() > SUMMARY {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            // Cuts words longer than a line; the JSON has them complete.
            line.extend(word.chars().take(SUMMARY));
        }
    }
    lines
}

/// Prints the counts of verdicts, with explanations.
pub fn foot(lines: &[Line], checked: bool) {
    say("─".repeat(110));
    let count = |verdict| {
        lines
            .iter()
            .filter(|line| line.outcome.verdict == verdict)
            .count()
    };
    let ok = count(Verdict::Ok);
    let not = count(Verdict::NotNoticed);
    let broken = count(Verdict::Broken);
    let skipped = count(Verdict::Skipped);
    say(format_args!(
        "{ok} ok, {not} not noticed, {skipped} skipped, {broken} broken"
    ));
    if lines.iter().any(|line| {
        line.outcome.verdict == Verdict::NotNoticed && line.outcome.summary.contains("WRONG")
    }) {
        say(
            "not noticed, WRONG: without checksums (npz: not verified) changed bytes are undetectable; use --checked",
        );
    }
    if lines.iter().any(|line| {
        line.outcome.verdict == Verdict::NotNoticed && !line.outcome.summary.contains("WRONG")
    }) {
        say(
            "not noticed, another dataset: only the folder lists the files; a saved state would detect it (dataset changed)",
        );
    }
    if checked {
        say("--checked: checksums of the copy's intact files");
    }
}
