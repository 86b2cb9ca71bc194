//! The sections: their names and limits, and what each is given.

use crate::driver::Gpu;
use crate::report::{Figure, Row, Target, Verdict};
use crate::standin::Session;
use crate::{
    capture, conformance, contexts, drops, end, forks, leaks, machine, rates, routes, sanitizer,
    stage, stand, torch, verdicts,
};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Which driver there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Driver {
    Real,
    Standin,
    None,
}

impl Driver {
    pub fn name(self) -> &'static str {
        match self {
            Self::Real => "real",
            Self::Standin => "standin",
            Self::None => "none",
        }
    }
}

/// A part of the program.
pub struct Section {
    pub name: &'static str,
    /// Seconds at most.
    pub limit: u64,
    /// Whether it says something without any driver, too.
    pub without_driver: bool,
    run: fn(&Ctx) -> Result<(), String>,
}

const fn section(name: &'static str, limit: u64, run: fn(&Ctx) -> Result<(), String>) -> Section {
    Section {
        name,
        limit,
        without_driver: false,
        run,
    }
}

/// In the order in which they are run: what is worth most comes first. The limits are wide; the sum
/// of what they take is below 10 minutes.
pub const SECTIONS: [Section; 15] = [
    Section {
        without_driver: true,
        ..section("environment", 90, machine::run)
    },
    section("conformance", 240, conformance::run),
    section("rates", 90, rates::run),
    section("stage", 90, stage::run),
    section("end", 120, end::run),
    section("idle", 60, end::idle),
    section("leaks", 120, leaks::run),
    section("contexts", 60, contexts::run),
    section("forks", 60, forks::run),
    section("capture", 60, capture::run),
    section("verdicts", 60, verdicts::run),
    section("drops", 90, drops::run),
    section("routes", 90, routes::run),
    section("torch", 150, torch::run),
    section("sanitizer", 150, sanitizer::run),
];

/// What a section is given, and what it tells.
pub struct Ctx {
    pub driver: Driver,
    pub full: bool,
    pub quick: bool,
    /// Where the data of all sections lies.
    pub dir: PathBuf,
    /// When it must have come to its end.
    deadline: Instant,
    /// Whether our kernels run.
    pub kernels: Cell<bool>,
    failed: Cell<usize>,
    /// Figures that mean nothing.
    thrown: Cell<usize>,
}

impl Ctx {
    pub fn new(driver: Driver, full: bool, quick: bool, dir: PathBuf, limit: Duration) -> Self {
        // What is left out when time runs short shall be the section's choice, not the knife's.
        let deadline = Instant::now() + limit.mul_f64(0.8);
        Self {
            driver,
            full,
            quick,
            dir,
            deadline,
            kernels: Cell::new(true),
            failed: Cell::new(0),
            thrown: Cell::new(0),
        }
    }

    pub fn real(&self) -> bool {
        self.driver == Driver::Real
    }

    /// What is left of its time.
    pub fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// The first device, for calls of its own.
    pub fn gpu(&self) -> Result<Gpu, String> {
        Gpu::new()
    }

    /// One of two values: on a GPU, against the stand-in.
    pub fn either<T>(&self, real: T, standin: T) -> T {
        if self.real() { real } else { standin }
    }

    pub fn put(&self, row: Row) {
        if row.verdict == Verdict::Failed {
            self.failed.set(self.failed.get() + 1);
        }
        let mut out = std::io::stdout().lock();
        // Who does not listen any more kills this process.
        let _ = writeln!(out, "{}", row.line()).and_then(|()| out.flush());
    }

    pub fn note(&self, what: impl Into<String>, words: impl Into<String>) {
        self.put(Row::new(what, Verdict::Noted, words));
    }

    pub fn skip(&self, what: impl Into<String>, words: impl Into<String>) {
        self.put(Row::new(what, Verdict::Skipped, words));
    }

    /// Something that must hold: `Ok` says what was looked at.
    pub fn check(&self, what: impl Into<String>, look: impl FnOnce() -> Result<String, String>) {
        let found =
            catch_unwind(AssertUnwindSafe(look)).unwrap_or_else(|panic| Err(panic_words(&*panic)));
        self.put(match found {
            Ok(words) => Row::new(what, Verdict::Ok, words),
            Err(words) => Row::new(what, Verdict::Failed, words),
        });
    }

    /// A figure that was taken several times. Against the stand-in it is only counted: what it is
    /// taken of works.
    pub fn figure(
        &self,
        what: impl Into<String>,
        values: &[f64],
        unit: &str,
        target: Option<Target>,
        words: impl Into<String>,
    ) {
        let what = what.into();
        let words = words.into();
        if !self.real() {
            return self.thrown.set(self.thrown.get() + 1);
        }
        let values: Vec<f64> = values
            .iter()
            .copied()
            .filter(|value| value.is_finite())
            .collect();
        if values.is_empty() {
            return self.skip(what, format!("no time was left for it. {words}").trim_end());
        }
        let repetitions = values.len();
        let (median, low, high) = spread(values);
        let figure = Figure {
            median,
            low,
            high,
            repetitions,
            unit: unit.into(),
        };
        let verdict = target.map_or(Verdict::Measured, |target| target.judge(&figure));
        self.put(Row {
            figure: Some(figure),
            target,
            ..Row::new(what, verdict, words)
        });
    }

    /// A folder below that of the data that is gone when this is dropped.
    pub fn folder(&self) -> Result<Folder, String> {
        let path = self
            .dir
            .join(format!("feedline-gpu-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Folder(path))
    }
}

/// Median and its 95 % interval by order statistics; with fewer than 6 values the extremes.
pub fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    let middle = (values[(count - 1) / 2] + values[count / 2]) / 2.0;
    let reach = 0.98 * (count as f64).sqrt();
    let low = ((count as f64 / 2.0 - reach).floor().max(0.0) as usize).min(count - 1);
    (middle, values[low], values[count - 1 - low])
}

/// Bytes for people.
pub fn size(bytes: usize) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

/// A folder that goes.
pub struct Folder(PathBuf);

impl Folder {
    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn panic_words(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or(panic.downcast_ref::<&str>().copied());
    format!("panic: {}", words.unwrap_or("without words"))
}

/// Runs a section in this process. 1: something failed, and the rows say what.
pub fn run(section: &Section, ctx: Ctx) -> ExitCode {
    let session = begin(&ctx);
    let done = catch_unwind(AssertUnwindSafe(|| (section.run)(&ctx)));
    let done = done.unwrap_or_else(|panic| Err(panic_words(&*panic)));
    if let Err(words) = done {
        ctx.put(Row::new(
            format!("{} to its end", section.name),
            Verdict::Failed,
            words,
        ));
    }
    if ctx.thrown.get() > 0 {
        ctx.put(Row::new(
            "figures",
            Verdict::Ok,
            format!("{} could be taken; stand-in: no rates", ctx.thrown.get()),
        ));
    }
    if let Some(session) = session {
        let faults = stand::faults(session);
        ctx.check(
            "the stand-in saw nothing unordered and nothing left",
            || match faults.first() {
                None => Ok(String::new()),
                Some(first) => Err(format!("{} faults, the first: {first}", faults.len())),
            },
        );
    }
    ExitCode::from(u8::from(ctx.failed.get() > 0))
}

fn begin(ctx: &Ctx) -> Option<Session> {
    if ctx.driver != Driver::Standin {
        return None;
    }
    let (session, kernels) = stand::session(stand::config());
    ctx.kernels.set(kernels);
    Some(session)
}
