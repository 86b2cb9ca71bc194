//! The readable answer, at most 100 columns wide.

use crate::answer::{Answer, Data, Guess};
use crate::args::Given;
use feedline::profile::verdict::Cause;
use feedline::profile::{Change, Verdict, WhatIf};
use indicatif::{DecimalBytes, HumanCount};
use std::fmt::Write;

const WIDTH: usize = 100;

/// Lines with labels, indented under their text.
#[derive(Default)]
struct Page(String);

impl Page {
    fn line(&mut self, label: &str, text: &str) {
        fill(&mut self.0, &format!("{label:<10}"), 10, text);
    }

    fn blank(&mut self) {
        self.0.push('\n');
    }
}

/// Adds `text` after `start`, broken at words, with further lines indented.
fn fill(out: &mut String, start: &str, indent: usize, text: &str) {
    let mut line = start.to_string();
    let mut empty = true;
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(line.trim_end());
            out.push('\n');
            line = " ".repeat(indent);
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
}

/// Breaks long lines of a formatted text, with the rest indented under the line's text.
fn reflow(out: &mut String, text: &str, indent: usize) {
    for line in text.lines() {
        if line.chars().count() <= WIDTH {
            out.push_str(line);
            out.push('\n');
            continue;
        }
        let start = line.len() - line.trim_start().len();
        let (start, rest) = match line.char_indices().nth(indent) {
            // A label, or nothing, and then the text.
            Some((at, _)) if line[..at].ends_with(' ') => line.split_at(at),
            _ => line.split_at(start),
        };
        fill(out, start, start.chars().count().max(4), rest);
    }
}

/// Description of the run, before it starts.
pub fn heading(given: &Given, describe: &str, data: &Data) -> String {
    let mut page = Page::default();
    let settings = &given.args.settings;
    if let Some(benchmark) = given.benchmark {
        let target = match given.au_target() {
            Some(target) => format!("AU of {:.0} % to pass", 100.0 * target),
            None => format!(
                "without PASS or FAIL: the benchmark's batches are of {}",
                benchmark.batch
            ),
        };
        page.line(
            "workload",
            &format!(
                "{benchmark}: batches of {}, a step of {}, {target}; an emulation of the storage side of MLPerf Storage for \
                 one accelerator, no submission",
                settings.batch,
                step(given),
            ),
        );
    } else {
        let text = if given.step.is_zero() {
            "none: measures the loader's own speed".into()
        } else {
            step(given)
        };
        page.line("step", &format!("{text}, batches of {}", settings.batch));
    }
    let size = if data.bytes > 0 {
        format!(", {}", bytes(data.bytes as f64))
    } else {
        String::new()
    };
    page.line("data", &format!("{describe}{size}"));
    if let Some(warning) = data.warning(settings.past_cache()) {
        page.line("warning", &warning);
    }
    page.0
}

pub fn bytes(count: f64) -> String {
    DecimalBytes(count as u64).to_string()
}

fn step(given: &Given) -> String {
    format!("{} ms", significant(1e3 * given.step.as_secs_f64()))
}

/// The whole answer after the run. `report` comes from the library, without its verdict.
pub fn answer(answer: &Answer, verdict: &Verdict, report: &str, gpu: Option<&str>) -> String {
    let mut page = Page::default();
    page.blank();
    if let Some(error) = &answer.error {
        page.line("ERROR", error);
        page.blank();
    }
    for (label, text) in figures(answer) {
        page.line(label, &text);
    }
    page.blank();
    page.0.push_str(&verdict_with(answer, verdict));
    page.blank();
    stages(&mut page, answer);
    page.blank();
    what_if(&mut page, answer);
    if let Some(gpu) = gpu {
        reflow(&mut page.0, gpu, 10);
        page.blank();
    }
    reflow(&mut page.0, report, 10);
    page.0
}

/// The verdict; directly under its heading, a note if the step was late.
fn verdict_with(answer: &Answer, verdict: &Verdict) -> String {
    let mut out = String::new();
    reflow(&mut out, &format!("VERDICT   {}", verdict.headline()), 10);
    if let Some(late) = answer.late_step() {
        fill(&mut out, "  ! ", 4, &late);
    }
    for line in details(verdict) {
        reflow(&mut out, &format!("  {line}"), 4);
    }
    out
}

/// The evidence, then the advice.
fn details(verdict: &Verdict) -> impl Iterator<Item = String> {
    verdict
        .evidence
        .iter()
        .map(|line| line.text.clone())
        .chain(verdict.advice.iter().map(|text| format!("→ {text}")))
}

/// The answer for the head of a page: the verdict's heading, then the rest, one line each.
pub fn lines(answer: &Answer, verdict: &Verdict) -> Vec<String> {
    let figures = figures(answer)
        .into_iter()
        .map(|(label, text)| format!("{label}: {text}"));
    let all = std::iter::once(verdict.headline())
        .chain(figures)
        .chain(answer.late_step());
    all.chain(details(verdict))
        .map(|line| line.replace('`', ""))
        .collect()
}

/// Measured figures with their labels.
fn figures(answer: &Answer) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    if let Some(au) = answer.au {
        all.push(("AU", format!("{:.2} %{}", 100.0 * au, answer.result())));
    } else if answer.step_ms > 0.0 {
        all.push(("AU", "not known: needs two steps".into()));
    }
    if let Some(idle) = answer.gpu_idle_pct {
        let late = answer
            .late_pct
            .map_or(String::new(), |late| format!(", late {late:.2} %"));
        let starved = answer
            .starved_pct
            .map_or("unknown".into(), |share| format!("{share:.2} %"));
        all.push(("gpu idle", format!("{idle:.2} %: starved {starved}{late}")));
    }
    all.push(("rate", rate(answer)));
    all.extend(
        answer
            .warnings
            .iter()
            .map(|warning| ("warning", warning.clone())),
    );
    all.extend(answer.notes.iter().map(|note| ("note", note.clone())));
    all
}

/// The rate, and its batches.
fn rate(answer: &Answer) -> String {
    if answer.batches == 0 {
        return format!("none: no batch in {:.3} s", answer.wall_seconds);
    }
    let of = match answer.steps {
        0 => format!(
            "of {} and its step, with the wait for it, in {:.3} s",
            batches(answer.batches),
            answer.wall_seconds
        ),
        steps => format!(
            "over {} in {} s, without the first one",
            batches(steps),
            significant(answer.seconds)
        ),
    };
    format!(
        "{} samples/s, {:.3} GB/s delivered, {of}; first batch after {:.3} s",
        number(answer.items_per_s),
        answer.bytes_per_s / 1e9,
        answer.first_batch_seconds
    )
}

fn batches(count: u64) -> String {
    if count == 1 {
        "1 batch".into()
    } else {
        format!("{count} batches")
    }
}

fn stages(page: &mut Page, answer: &Answer) {
    let _ = writeln!(
        page.0,
        "{:<24}{:>8}  {:>24}",
        "stage", "busy", "could do, samples/s"
    );
    for stage in &answer.stages {
        let name = name(stage.stage.into());
        let busy = 100.0 * stage.utilisation;
        let _ = writeln!(
            page.0,
            "{name:<24}{busy:>6.0} %  {:>24}",
            bounded((stage.at_least, false), stage.ceiling_items_per_s)
        );
    }
}

/// Note for a change without gain.
fn gain(answer: &Answer, guess: &Guess) -> &'static str {
    let now = answer
        .what_if
        .first()
        .map_or(0.0, |as_it_is| as_it_is.then.items_per_s);
    let changed = guess.change != Change::default();
    if changed && guess.then.items_per_s < WhatIf::GAIN * now {
        ", no gain"
    } else {
        ""
    }
}

/// A rate that is a lower bound, an upper bound, or neither.
fn bounded(bounds: (bool, bool), rate: f64) -> String {
    let words = match bounds {
        (false, false) => "",
        (true, false) => "at least ",
        (false, true) => "at most ",
        (true, true) => "perhaps ",
    };
    format!("{words}{}", number(rate))
}

/// A stage in a table.
pub fn name(stage: Cause) -> String {
    match stage {
        Cause::Consumer | Cause::NotStarved => "the consumer".into(),
        Cause::Decode => "decode, copies in memory".into(),
        other => other.to_string(),
    }
}

fn what_if(page: &mut Page, answer: &Answer) {
    if answer.what_if.is_empty() {
        return;
    }
    let with_au = answer.au.is_some();
    let au = if with_au { "      AU" } else { "" };
    let _ = writeln!(
        page.0,
        "{:<28}{:>20}{au}  then limits",
        "what if", "samples/s"
    );
    for guess in &answer.what_if {
        let what = &guess.what;
        let rate = bounded(
            (guess.then.at_least, guess.then.at_most),
            guess.then.items_per_s,
        );
        let au = guess
            .au
            .filter(|_| with_au)
            .map_or(String::new(), |au| format!("{:>6.1} %", 100.0 * au));
        let _ = writeln!(
            page.0,
            "{what:<28}{rate:>20}{au}  {}{}",
            name(guess.then.bound_by),
            gain(answer, guess)
        );
    }
    let mut caveats: Vec<&String> = Vec::new();
    for caveat in answer.what_if.iter().flat_map(|guess| &guess.then.caveats) {
        if !caveats.contains(&caveat) {
            caveats.push(caveat);
            fill(&mut page.0, "  ", 2, caveat);
        }
    }
    page.blank();
}

pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Three significant digits, with commas between thousands.
pub fn number(value: f64) -> String {
    if value < 100.0 {
        return significant(value);
    }
    HumanCount(value.round() as u64).to_string()
}

/// Readable nanoseconds.
pub fn time(ns: f64) -> String {
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "µs")];
    let (size, unit) = units
        .into_iter()
        .find(|(size, _)| ns >= size * 0.9995)
        .unwrap_or((1.0, "ns"));
    format!("{} {unit}", number(ns / size))
}

fn significant(value: f64) -> String {
    let digits = match value.abs() {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_wrap_under_their_text() {
        let mut out = String::new();
        reflow(&mut out, &format!("reader    {}", "word ".repeat(40)), 10);
        let lines: Vec<&str> = out.lines().collect();
        assert!(lines.len() == 3 && lines.iter().all(|line| line.chars().count() <= WIDTH));
        assert!(lines[0].starts_with("reader    word") && lines[1].starts_with("          word"));
        out.clear();
        reflow(&mut out, &format!("  → {}", "wörd ".repeat(40)), 4);
        assert!(
            out.lines()
                .nth(1)
                .is_some_and(|line| line.starts_with("    wörd")),
            "{out}"
        );
        out.clear();
        reflow(&mut out, "short  as   it is", 4);
        fill(&mut out, "path      ", 10, &"x".repeat(200));
        assert!(
            out.starts_with("short  as   it is\n") && out.lines().count() == 2,
            "{out}"
        );
    }

    #[test]
    fn numbers_have_significant_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.1234, "0.123"),
            (5.5, "5.5"),
            (47.55, "47.5"),
            (224.0, "224"),
            (1_234_567.8, "1,234,568"),
        ] {
            assert_eq!(number(value), text);
        }
        for (ns, text) in [
            (0.0, "0 ns"),
            (1234.0, "1.23 µs"),
            (999_999.0, "1 ms"),
            (61e9, "61 s"),
        ] {
            assert_eq!(time(ns), text);
        }
    }
}
