//! What a section found: rows, one a line of JSON on their way from the section's process, then a
//! table and a file.
//!
//! ```text
//! section's process ──"row {…}" lines──► the program ──► table on stdout
//!                                                └─────► JSON file, written anew after each section
//! ```

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// What a line of a section's output begins with when it is a row.
const MARK: &str = "row ";

/// What became of one thing that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it must be.
    Ok,
    /// Wrong: the program fails.
    Failed,
    /// A figure that reaches its target.
    Met,
    /// A figure that does not.
    Missed,
    /// A figure whose interval is too wide to say, and holds the target.
    Unclear,
    /// A figure without a target.
    Measured,
    /// A fact.
    Noted,
    /// Not done, with the reason.
    Skipped,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "FAILED",
            Self::Met => "met",
            Self::Missed => "MISSED",
            Self::Unclear => "unclear",
            Self::Measured | Self::Noted => "",
            Self::Skipped => "skipped",
        }
    }
}

/// A figure of several repetitions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub median: f64,
    /// 95 % interval of the median; with fewer than 6 repetitions the extremes.
    pub low: f64,
    pub high: f64,
    pub repetitions: usize,
    pub unit: String,
}

/// What a figure should reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    Least(f64),
    Most(f64),
}

impl Target {
    /// Met when the whole interval reaches it, missed when none of it does. In between it is met by
    /// a narrow interval (± 5 %), and unclear by a wider one.
    pub fn judge(self, figure: &Figure) -> Verdict {
        let (best, worst, reaches) = match self {
            Self::Least(least) => (
                figure.high,
                figure.low,
                Box::new(move |x: f64| x >= least) as Box<dyn Fn(f64) -> bool>,
            ),
            Self::Most(most) => (
                figure.low,
                figure.high,
                Box::new(move |x: f64| x <= most) as _,
            ),
        };
        match (reaches(best), reaches(worst)) {
            (true, true) => Verdict::Met,
            (true, false) if figure.high - figure.low <= 0.1 * figure.median.abs() => Verdict::Met,
            (true, false) => Verdict::Unclear,
            (false, _) => Verdict::Missed,
        }
    }
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub what: String,
    pub verdict: Verdict,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figure: Option<Figure>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub words: String,
}

impl Row {
    pub fn new(what: impl Into<String>, verdict: Verdict, words: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            verdict,
            figure: None,
            target: None,
            words: words.into(),
        }
    }

    /// A line of the section's output.
    pub fn line(&self) -> String {
        let text =
            serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"what\":\"{error}\"}}"));
        format!("{MARK}{text}")
    }

    /// The row that a line of the section's output holds.
    pub fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line.strip_prefix(MARK)?).ok()
    }
}

/// Every section and its rows.
pub struct Book {
    /// What is known of the run as a whole.
    pub head: Vec<(&'static str, Value)>,
    sections: Vec<Section>,
}

struct Section {
    name: &'static str,
    seconds: f64,
    rows: Vec<Row>,
}

impl Book {
    pub fn new(head: Vec<(&'static str, Value)>) -> Self {
        Self {
            head,
            sections: Vec::new(),
        }
    }

    pub fn begin(&mut self, name: &'static str) {
        println!("\n{name}");
        self.sections.push(Section {
            name,
            seconds: 0.0,
            rows: Vec::new(),
        });
    }

    /// Prints a row of the present section and keeps it.
    pub fn put(&mut self, row: Row) {
        print_row(&row);
        if let Some(section) = self.sections.last_mut() {
            section.rows.push(row);
        }
    }

    pub fn end(&mut self, seconds: f64) {
        if let Some(section) = self.sections.last_mut() {
            section.seconds = seconds;
        }
    }

    fn rows(&self) -> impl Iterator<Item = (&'static str, &Row)> {
        self.sections
            .iter()
            .flat_map(|section| section.rows.iter().map(|row| (section.name, row)))
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.rows()
            .filter(|(_, row)| row.verdict == verdict)
            .count()
    }

    pub fn failed(&self) -> usize {
        self.count(Verdict::Failed)
    }

    /// The end of the table: what failed, and the targets.
    pub fn print_summary(&self) {
        println!("\nsummary");
        for (section, row) in self
            .rows()
            .filter(|(_, row)| row.target.is_some() || row.verdict == Verdict::Failed)
        {
            print_row(&Row {
                what: format!("{section}: {}", row.what),
                ..row.clone()
            });
        }
        println!(
            "{} ok, {} failed; targets: {} met, {} missed, {} unclear; {} skipped",
            self.count(Verdict::Ok),
            self.failed(),
            self.count(Verdict::Met),
            self.count(Verdict::Missed),
            self.count(Verdict::Unclear),
            self.count(Verdict::Skipped),
        );
    }

    fn json(&self) -> Value {
        let mut all = serde_json::Map::new();
        all.extend(
            self.head
                .iter()
                .map(|(name, value)| (name.to_string(), value.clone())),
        );
        all.insert("failed".into(), self.failed().into());
        let targets = self.rows().filter(|(_, row)| row.target.is_some());
        let targets = targets.map(|(section, row)| json!({ "section": section, "row": row }));
        all.insert("targets".into(), targets.collect());
        let sections = self.sections.iter();
        let sections =
            sections.map(|it| json!({ "name": it.name, "seconds": (it.seconds * 1e3).round() / 1e3, "rows": it.rows }));
        all.insert("sections".into(), sections.collect());
        Value::Object(all)
    }

    /// Writes the file, whole or not at all.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let mut fresh = path.as_os_str().to_owned();
        fresh.push(".part");
        std::fs::write(&fresh, format!("{:#}\n", self.json()))?;
        std::fs::rename(&fresh, path)
    }
}

fn print_row(row: &Row) {
    let mut words = Vec::new();
    words.extend(row.figure.as_ref().map(|it| {
        format!(
            "{} [{}, {}] {} ({}×)",
            short(it.median),
            short(it.low),
            short(it.high),
            it.unit,
            it.repetitions
        )
    }));
    words.extend(row.target.map(|target| match target {
        Target::Least(least) => format!("wanted ≥ {least}"),
        Target::Most(most) => format!("wanted ≤ {most}"),
    }));
    words.extend((!row.words.is_empty()).then(|| row.words.clone()));
    let line = format!(
        "  {:<8} {:<60} {}",
        row.verdict.word(),
        row.what,
        words.join("; ")
    );
    println!("{}", line.trim_end());
}

/// Four digits that count.
fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// The time now, as in `2026-11-21T20:25:31Z`.
pub fn now() -> String {
    let mut command = Command::new("date");
    command.args(["-u", "+%FT%TZ"]);
    command.output().map_or_else(
        |error| error.to_string(),
        |out| String::from_utf8_lossy(&out.stdout).trim().into(),
    )
}

/// What must hold of this file; run by the program itself, since a test without a harness has no
/// unit tests.
pub fn check_yourself() -> Result<(), String> {
    let figure = |low, median, high| Figure {
        median,
        low,
        high,
        repetitions: 9,
        unit: "x".into(),
    };
    let cases = [
        (Target::Least(1.0), figure(1.0, 1.5, 2.0), Verdict::Met),
        (Target::Least(1.0), figure(0.97, 0.98, 1.0), Verdict::Met),
        (Target::Least(1.0), figure(0.8, 1.1, 1.2), Verdict::Unclear),
        (Target::Least(1.0), figure(0.5, 0.6, 0.99), Verdict::Missed),
        (Target::Most(1.0), figure(0.2, 0.5, 1.0), Verdict::Met),
        (Target::Most(1.0), figure(0.2, 0.5, 1.1), Verdict::Unclear),
        (Target::Most(1.0), figure(1.1, 1.2, 1.3), Verdict::Missed),
    ];
    for (target, figure, right) in cases {
        if target.judge(&figure) != right {
            return Err(format!(
                "{target:?} of {figure:?} is {:?}, not {right:?}",
                target.judge(&figure)
            ));
        }
    }
    let row = Row {
        figure: Some(figure(0.1, 0.2, 0.3)),
        ..Row::new("a \"row\"\n", Verdict::Ok, "words")
    };
    if Row::parse(&row.line()).as_ref() != Some(&row) || row.line().contains('\n') {
        return Err(format!("{row:?} does not survive its line"));
    }
    Ok(())
}
