//! Tests a training run under faults: damaged data, and a process that is stopped, killed or short
//! of descriptors. It needs no root, works on a copy of your data, and prints a table of the
//! results.
//!
//! ```text
//! cargo run --release --example torture                                          # generates a small dataset
//! cargo run --release --example torture -- --source images --path train/ --sample 2000
//! cargo run --release --example torture -- --source tar --path 'train-{0000..0003}.tar' --checked sums
//! ```
//!
//! One binary has two roles. The *supervisor* copies the data, and starts itself again as a *child*
//! for every run, so that it sees hangs and crashes from outside:
//!
//! ```text
//! data ─► copy ─► for each scenario:  fresh copy ─► child: damage, open, build, epoch ─► report │ signal │ time limit
//!                                                    │ hashes of all samples, from the intact copy           ▼
//!                                                    └────────────────────────────────────────────► judge ─► table
//! ```
//!
//! Invariants: the original is read once and never written. The copy is removed at the end, also
//! after Ctrl-C (a second Ctrl-C ends the program at once, and leaves the copy).

mod child;
#[path = "../profile/content.rs"]
mod content;
mod copy;
mod damage;
mod job;
mod judge;
mod made;
mod scenarios;
#[path = "../throughput/source.rs"]
mod source;
mod supervise;
mod table;

use clap::{CommandFactory, FromArgMatches, Parser};
use copy::{Copy, human_bytes};
use feedline::Stop;
use feedline::process::Signal;
use job::{Act, Damage, JOB, Job, Kind, When};
use judge::{Case, Outcome, Verdict, together};
use scenarios::{Policies, Promise, SCENARIOS, Scenario, What};
use source::{Source, SourceArgs};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use supervise::Ended;
use table::{Line, say};

/// Damages a copy of your data, stops and kills the process that reads it, and checks the loader's
/// answers.
///
/// Exit code: 0 if every promise holds, 1 if one is broken (wrong samples, a hang, a crash, an
/// error without a name) or for an error, 2 for illegal arguments, 130 when interrupted.
#[derive(Parser)]
#[command(name = "torture", version)]
struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Generate a small dataset [default: without a --path]
    #[arg(long, conflicts_with = "path")]
    generate: bool,
    /// Folder for the copy [default: the system's temporary folder]
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Maximum size of the copy
    #[arg(long, value_name = "SIZE", default_value = "2GB", value_parser = source::size)]
    most: u64,
    /// Copy N of the files, evenly spread; not for formats with a list of all files
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    sample: Option<u32>,
    /// Run only scenarios whose names contain one of these words
    #[arg(long, value_name = "WORD", value_delimiter = ',')]
    only: Vec<String>,
    /// Rows per batch
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch: u32,
    /// Decode workers
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// Number of random bit flips in headers
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    places: u32,
    /// Seconds after which a child counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u32).range(5..))]
    limit: u32,
    /// Random seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the rows, with complete errors, to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep the damaged copies in this folder, one for each scenario
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

type Anyhow<T> = Result<T, Box<dyn Error>>;

const INTERRUPTED: u8 = 130;
/// Placeholder for a missing path.
const GENERATED: &str = "(generated)";

fn main() -> ExitCode {
    let args = parse();
    if let Ok(text) = std::env::var(JOB) {
        return match serde_json::from_str::<Job>(&text) {
            Ok(job) => child::run(args.source, &job),
            Err(error) => {
                eprintln!("error: {JOB}: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let stop = Stop::on([Signal::Int, Signal::Term, Signal::Hup]);
    match stop.map_err(Into::into).and_then(|stop| run(args, stop)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            if error.to_string() == "interrupted" {
                ExitCode::from(INTERRUPTED)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// Parses the command line, in which --source and --path are optional.
fn parse() -> Args {
    let command = Args::command()
        .mut_arg("source", |arg| arg.required(false).default_value("images"))
        .mut_arg("path", |arg| arg.required(false).default_value(GENERATED).hide_default_value(true))
        .mut_arg("checked", |arg| {
            arg.help("Verify every read against checksums of the copy's intact files; FILE itself is not used")
        });
    let parsed = command
        .try_get_matches()
        .and_then(|matches| Args::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| error.exit())
}

fn run(mut args: Args, stop: Stop) -> Anyhow<ExitCode> {
    check(&args)?;
    let parent = args.work.clone().unwrap_or_else(std::env::temp_dir);
    let sample = args.sample.map(|count| count as usize);
    let copy = if args.generate || args.source.path.as_os_str() == GENERATED {
        let made = Folder(parent.join(format!("feedline-torture-made-{}", std::process::id())));
        made::make(&made.0, &mut args.source)
            .map_err(|error| format!("{}: {error}", made.0.display()))?;
        Copy::make(&args.source, &parent, args.most, sample, &stop)?
    } else {
        Copy::make(&args.source, &parent, args.most, sample, &stop)?
    };
    let files = copy.count();
    let bytes = human_bytes(copy.bytes);
    say(format_args!(
        "{files} files, {bytes}, copied to {}; the original stays unchanged\n",
        copy.work().display()
    ));
    let mut run = Run {
        args,
        stop,
        copy,
        files: Vec::new(),
        samples: 0,
    };
    let lines = run.all()?;
    table::foot(&lines, run.args.source.checked.is_some());
    if let Some(path) = &run.args.json {
        std::fs::write(path, serde_json::to_vec_pretty(&lines)?)
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let broken = lines
        .iter()
        .any(|line| line.outcome.verdict == Verdict::Broken);
    Ok(if broken {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Checks the arguments at the start, also those that are used at the end.
fn check(args: &Args) -> Anyhow<()> {
    let holds = |word: &str| SCENARIOS.iter().any(|scenario| scenario.is_called(word));
    if let Some(word) = args.only.iter().find(|word| !holds(word)) {
        return Err(format!("--only {word}: no scenario has this word in its name").into());
    }
    if let Some(path) = &args.json {
        std::fs::File::create(path)
            .map_err(|error| format!("--json {}: {error}", path.display()))?;
    }
    if let Some(keep) = &args.keep
        && std::path::absolute(keep)?.starts_with(std::path::absolute(&args.source.path)?)
    {
        return Err(format!(
            "--keep {}: this folder lies in the data; give another one",
            keep.display()
        )
        .into());
    }
    Ok(())
}

/// A folder. Dropping it removes the folder.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// All scenarios on one copy.
struct Run {
    args: Args,
    stop: Stop,
    copy: Copy,
    /// Files of the dataset, in the copy that children read.
    files: Vec<PathBuf>,
    /// Samples of the intact dataset.
    samples: u64,
}

impl Run {
    fn all(&mut self) -> Anyhow<Vec<Line>> {
        table::head();
        let mut lines: Vec<Line> = Vec::new();
        for (index, scenario) in SCENARIOS.iter().enumerate() {
            if index > 0
                && !self.args.only.is_empty()
                && !self.args.only.iter().any(|word| scenario.is_called(word))
            {
                continue;
            }
            let policies: &[bool] = match scenario.policies {
                Policies::Fail => &[false],
                Policies::Both => &[false, true],
            };
            for (row, substitute) in policies.iter().enumerate() {
                let started = Instant::now();
                let outcome = self.scenario(scenario, *substitute)?;
                let policy = if *substitute { "substitute" } else { "fail" };
                let line = Line {
                    scenario: scenario.name,
                    policy,
                    seconds: started.elapsed().as_secs_f64(),
                    outcome,
                };
                table::print(&line, row > 0);
                lines.push(line);
            }
            if let Some(folder) = &self.args.keep
                && lines
                    .last()
                    .is_some_and(|line| line.outcome.verdict != Verdict::Skipped)
            {
                self.copy.keep(&folder.join(scenario.folder))?;
            }
        }
        Ok(lines)
    }

    fn scenario(&mut self, scenario: &Scenario, substitute: bool) -> Anyhow<Outcome> {
        if touches(scenario.what, Kind::Forbidden) && rustix::process::geteuid().is_root() {
            return Ok(Outcome::new(Verdict::Skipped, "root can read all files"));
        }
        match scenario.what {
            What::Act(Act::Oracle) => self.oracle(),
            What::Act(act) => self.once(scenario, act, None, substitute),
            What::Damage(kind, when) => self.once(
                scenario,
                Act::Read,
                Some(Damage {
                    kind,
                    when,
                    files: self.victims(kind),
                }),
                substitute,
            ),
            What::Both(act, kind, when) => self.once(
                scenario,
                act,
                Some(Damage {
                    kind,
                    when,
                    files: self.victims(kind),
                }),
                substitute,
            ),
            What::Headers => self.headers(scenario),
            What::Descriptors => self.descriptors(scenario),
            What::Kill => self.kill(scenario),
        }
    }

    fn job(&self, act: Act, damage: Option<Damage>, substitute: bool) -> Job {
        Job {
            act,
            path: self.copy.path(),
            record_bytes: self.args.source.record_bytes,
            work: self.copy.work().to_path_buf(),
            checked: self
                .args
                .source
                .checked
                .as_ref()
                .map(|_| self.copy.work().join("sums")),
            damage,
            substitute,
            seed: self.args.seed,
            batch: self.args.batch as usize,
            workers: self.args.workers as usize,
        }
    }

    fn case(&self, promise: Promise, damage: Option<&Damage>) -> Case {
        let source = self.args.source.source;
        let checked = self.args.source.checked.is_some();
        let header = damage.is_some_and(|damage| damage.kind == Kind::FlippedHeader);
        let plain = matches!(source, Source::Images | Source::Records | Source::Tokens);
        let unlisted = plain && damage.is_some_and(|damage| damage.when == When::Before);
        Case {
            promise,
            source,
            checked,
            header,
            unlisted,
            samples: self.samples,
        }
    }

    /// Runs a job on an intact copy, with its checksums.
    fn fresh(&self, job: &Job) -> Anyhow<Ended> {
        self.copy.renew()?;
        let sums = self.copy.work().join("sums.intact");
        if sums.exists() {
            std::fs::copy(sums, self.copy.work().join("sums"))?;
        }
        self.run(job)
    }

    fn run(&self, job: &Job) -> Anyhow<Ended> {
        supervise::run(job, Duration::from_secs(self.args.limit.into()), &self.stop)
    }

    fn once(
        &self,
        scenario: &Scenario,
        act: Act,
        damage: Option<Damage>,
        substitute: bool,
    ) -> Anyhow<Outcome> {
        let case = self.case(scenario.promise, damage.as_ref());
        Ok(case.judge(&self.fresh(&self.job(act, damage, substitute))?))
    }

    /// Records the samples of the intact copy.
    ///
    /// Errors: the intact copy cannot be read.
    fn oracle(&mut self) -> Anyhow<Outcome> {
        let ended = self.fresh(&self.job(Act::Oracle, None, false))?;
        let outcome = self.case(Promise::Exact, None).judge(&ended);
        if outcome.verdict != Verdict::Ok {
            let details = outcome.details.unwrap_or(outcome.summary);
            return Err(format!("the intact copy cannot be read: {details}").into());
        }
        let report = ended.report.unwrap_or_default();
        self.files = report.files;
        self.samples = report.samples;
        if self.files.is_empty() {
            return Err("no file of the dataset has a name in UTF-8: rename some".into());
        }
        let sums = self.copy.work().join("sums");
        if sums.exists() {
            std::fs::copy(&sums, self.copy.work().join("sums.intact"))?;
        }
        Ok(outcome)
    }

    /// Files to damage: one of few, three of many.
    fn victims(&self, kind: Kind) -> Vec<PathBuf> {
        let count = match (kind, self.files.len()) {
            (Kind::Flipped, all) => all.min(8),
            (_, all) if all >= 12 => 3,
            _ => 1,
        };
        spread(&self.files, count)
    }

    /// Flips one header bit at a time, each in its own run.
    fn headers(&self, scenario: &Scenario) -> Anyhow<Outcome> {
        let source = self.args.source.source;
        self.copy.renew()?;
        let files = self.copy.files();
        let files = spread(
            &files
                .into_iter()
                .filter(|path| {
                    path.to_str().is_some()
                        && damage::self_description(source, path)
                            .is_ok_and(|ranges| !ranges.is_empty())
                })
                .collect::<Vec<_>>(),
            self.args.places as usize,
        );
        if files.is_empty() {
            return Ok(Outcome::new(Verdict::Skipped, "the format has no headers"));
        }
        let mut outcomes = Vec::new();
        for place in 0..self.args.places {
            let file = files[place as usize % files.len()].clone();
            let damage = Damage {
                kind: Kind::FlippedHeader,
                when: When::Before,
                files: vec![file],
            };
            let case = self.case(scenario.promise, Some(&damage));
            let job = Job {
                seed: self.args.seed + u64::from(place),
                ..self.job(Act::Read, Some(damage), false)
            };
            outcomes.push(case.judge(&self.fresh(&job)?));
        }
        Ok(together(&outcomes))
    }

    /// Lowers the limit of descriptors until the run fails.
    fn descriptors(&self, scenario: &Scenario) -> Anyhow<Outcome> {
        let mut summary = String::from("never exact");
        for limit in [256, 96, 64, 48, 32, 24, 20, 16, 14, 12, 10, 8, 6, 4, 3] {
            let ended = self.fresh(&self.job(Act::Descriptors(limit), None, false))?;
            let outcome = self.case(scenario.promise, None).judge(&ended);
            let exact = ended
                .report
                .as_ref()
                .is_some_and(|report| report.error.is_none());
            if outcome.verdict != Verdict::Ok || !exact {
                return Ok(Outcome {
                    summary: format!("{summary}; with {limit}: {}", outcome.summary),
                    ..outcome
                });
            }
            summary = format!("exact with {limit}");
        }
        Ok(Outcome::new(Verdict::Ok, summary))
    }

    fn kill(&self, scenario: &Scenario) -> Anyhow<Outcome> {
        for left in ["killed.log", "killed.state"] {
            let _ = std::fs::remove_file(self.copy.work().join(left));
        }
        let killed = self.fresh(&self.job(Act::Killed, None, false))?;
        if killed.signal != Some(rustix::process::Signal::KILL.as_raw()) {
            return Ok(self.case(scenario.promise, None).judge(&killed));
        }
        let ended = self.run(&self.job(Act::Resumed, None, false))?;
        Ok(self.case(scenario.promise, None).judge(&ended))
    }
}

fn touches(what: What, kind: Kind) -> bool {
    matches!(what, What::Damage(which, _) | What::Both(_, which, _) if which == kind)
}

/// Selects `count` files, evenly spread; not the first, which may hold headers of the whole
/// dataset.
fn spread(all: &[PathBuf], count: usize) -> Vec<PathBuf> {
    let count = count.min(all.len());
    (0..count)
        .map(|k| all[(2 * k + 1) * all.len() / (2 * count)].clone())
        .collect()
}
