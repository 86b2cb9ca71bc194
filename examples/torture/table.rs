//! The table: as each row is known, within 110 columns.

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
const WORDS: usize = 47;
const SECONDS: usize = 6;

/// Prints a line; whoever closed the pipe does not want the rest.
pub fn say(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

pub fn head() {
    say(row("scenario", "policy", "what came out", "s", "verdict"));
    say("─".repeat(110));
}

fn row(name: &str, policy: &str, words: &str, seconds: &str, verdict: &str) -> String {
    format!("{name:<NAME$} {policy:<POLICY$} {words:<WORDS$} {seconds:>SECONDS$}  {verdict}").trim_end().to_string()
}

/// The row, its words over as many lines as they take. A scenario's name stands once.
pub fn print(line: &Line, same: bool) {
    let seconds = format!("{:.1}", line.seconds);
    let name = if same { "" } else { line.scenario };
    for (index, words) in wrap(&line.outcome.words).iter().enumerate() {
        if index == 0 {
            say(row(name, line.policy, words, &seconds, line.outcome.verdict.as_str()));
        } else {
            say(row("", "", words, "", ""));
        }
    }
}

fn wrap(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > 0 && line + 1 + word.chars().count() > WORDS {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            // What is longer than a line is cut: the JSON has all of it.
            line.extend(word.chars().take(WORDS));
        }
    }
    lines
}

/// What the verdicts sum up to.
pub fn foot(lines: &[Line], checked: bool) {
    say("─".repeat(110));
    let count = |verdict| lines.iter().filter(|line| line.outcome.verdict == verdict).count();
    let (ok, not, broken) = (count(Verdict::Ok), count(Verdict::NotNoticed), count(Verdict::Broken));
    let skipped = count(Verdict::Skipped);
    say(format_args!("{ok} ok, {not} not noticed, {skipped} skipped, {broken} broken"));
    if lines.iter().any(|line| line.outcome.verdict == Verdict::NotNoticed && line.outcome.words.contains("WRONG")) {
        say(
            "not noticed, WRONG: no checksums there (npz: none asked for), so a changed byte is as good as another; see --checked",
        );
    }
    if lines.iter().any(|line| line.outcome.verdict == Verdict::NotNoticed && !line.outcome.words.contains("WRONG")) {
        say(
            "not noticed, another dataset: only the folder says which files there are; a saved state would tell (dataset changed)",
        );
    }
    if checked {
        say("--checked: checksums of the copy, made from its intact files");
    }
}
