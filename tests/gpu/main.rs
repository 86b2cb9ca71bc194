//! The suite on real hardware: one program that carries all it needs, for a machine with a GPU and
//! without Rust.
//!
//! ```text
//!                        ┌─► environment      each section: a process of its own (it may hang, crash or break the
//! gpu ──is there a GPU?──┼─► conformance      context), with a time limit; its rows come as it makes them
//!     (a process, too)   ├─► rates …
//!                        └─► sanitizer        ──► a table, --json FILE, and not 0 when something is wrong
//! ```
//!
//! ```text
//! cargo test --test gpu                               against the real GPU where there is one, else against the stand-in
//! FEEDLINE_GPU=standin cargo test --test gpu          the stand-in in any case (real: a GPU or an error)
//! ./gpu --json results.json --dir /nvme/scratch       the program, copied to a machine with a GPU; see --help
//! ```
//!
//! To be copied it is built for an old glibc: the guide `src/guide/gpu.md` says how.
//!
//! Against the stand-in everything is run that makes sense there, small, and no figure is taken.
//! The stand-in needs `rustc` and the folder of the build. Without these and without a driver the
//! program says what the environment is, and fails.
//!
//! Figures never fail the program, wrong bytes, leaks, crashes and hangs do. What a figure should
//! reach stands beside it. Environment: `FEEDLINE_GPU` (auto, real, standin), `FEEDLINE_WHEEL` (a
//! wheel of `python`: batches are handed to the PyTorch of `python3`), `FEEDLINE_CUFILE`
//! (a libcufile).

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/driver.rs"]
mod driver;
#[path = "../common/pull.rs"]
mod pull;
#[allow(dead_code, reason = "of other tests")]
#[path = "../faults/real/sys.rs"]
mod sys;

mod capture;
mod conformance;
mod contexts;
mod drops;
mod end;
mod forks;
mod kinds;
mod leaks;
mod machine;
mod ours;
mod rates;
mod report;
mod routes;
mod sanitizer;
mod section;
mod stage;
mod stand;
mod torch;
mod verdicts;
mod watch;

use common::standin;

use clap::Parser;
use report::{Book, Row, Verdict};
use section::{Ctx, Driver, SECTIONS, Section};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// How long the driver may take to say whether there is a GPU.
const PROBE: Duration = Duration::from_secs(60);
/// What is left to write and end.
const SPARE: Duration = Duration::from_secs(3);

/// feedline against a real GPU: bytes, leaks, rates.
#[derive(Parser)]
#[command(
    after_help = "Exit status: 0 nothing is wrong (figures may miss their targets), 1 something is, 2 usage."
)]
struct Args {
    /// Only sections whose name contains one of these (as libtest's filters)
    filters: Vec<String>,
    /// Only these sections, by name
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Write what was found to this file, anew after each section
    #[arg(long)]
    json: Option<PathBuf>,
    /// Folder for data; a file system as that of your data
    /// [default: the build's, else the temporary one]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Longer: 1,000 loaders instead of 200, larger data, more repetitions
    #[arg(long)]
    full: bool,
    /// Seconds in all; what does not fit is left out [default: 570, with --full 3600]
    #[arg(long)]
    seconds: Option<u64>,
    /// Names of the sections
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    own: Own,
    #[command(flatten)]
    libtest: Libtest,
}

/// How the program starts itself.
#[derive(clap::Args)]
struct Own {
    /// Run this section in this process, rows as JSON
    #[arg(long, hide = true)]
    section: Option<String>,
    #[arg(long, hide = true, default_value = "real")]
    driver: Driver,
    #[arg(long, hide = true, default_value_t = 60.0)]
    limit: f64,
    /// A part of the section that takes seconds
    #[arg(long, hide = true)]
    quick: bool,
}

/// What `cargo test -- …` passes to every test program.
#[derive(clap::Args)]
struct Libtest {
    #[arg(long, hide = true)]
    ignored: bool,
    #[arg(long, hide = true)]
    skip: Vec<String>,
    /// Of no effect.
    #[arg(long = "nocapture", short = 'q', hide = true, action = clap::ArgAction::Count)]
    #[arg(aliases = ["no-capture", "show-output", "exact", "include-ignored", "quiet"])]
    flags: u8,
    #[arg(long = "test-threads", aliases = ["color", "format"], hide = true)]
    values: Vec<String>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(name) = &args.own.section {
        return child(name, &args);
    }
    let sections: Vec<_> = SECTIONS
        .iter()
        .filter(|section| args.wants(section))
        .collect();
    if args.list {
        sections
            .iter()
            .for_each(|section| println!("{}: test", section.name));
        return ExitCode::SUCCESS;
    }
    if let Some(unknown) = args
        .only
        .iter()
        .find(|name| SECTIONS.iter().all(|section| section.name != **name))
    {
        let names: Vec<_> = SECTIONS.iter().map(|section| section.name).collect();
        eprintln!(
            "error: no section is called {unknown}; there are {}",
            names.join(", ")
        );
        return ExitCode::from(2);
    }
    if sections.is_empty() {
        println!("gpu: none of its sections was asked for");
        return ExitCode::SUCCESS;
    }
    Program::new(args).run(&sections)
}

impl Args {
    fn wants(&self, section: &Section) -> bool {
        let named = self.only.is_empty() || self.only.iter().any(|name| name == section.name);
        let filtered = self.filters.is_empty()
            || self
                .filters
                .iter()
                .any(|part| section.name.contains(part.as_str()));
        named
            && filtered
            && !self.libtest.ignored
            && !self
                .libtest
                .skip
                .iter()
                .any(|part| section.name.contains(part.as_str()))
    }

    /// Where data goes: the build's folder is on a real file system, the temporary one may lie in
    /// memory.
    fn dir(&self) -> PathBuf {
        let build = Path::new(env!("CARGO_TARGET_TMPDIR"));
        match &self.dir {
            Some(dir) => dir.clone(),
            None if build.is_dir() => build.to_path_buf(),
            None => std::env::temp_dir(),
        }
    }
}

/// A section, in a process that may end as it likes.
fn child(name: &str, args: &Args) -> ExitCode {
    // Whoever started this is gone: so is the reason to go on. (A sanitizer may start it from a
    // thread that ends.)
    if !args.own.quick {
        let _ =
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    }
    if name == "probe" {
        println!("{}", probe());
        return ExitCode::SUCCESS;
    }
    let Some(section) = SECTIONS.iter().find(|section| section.name == name) else {
        return ExitCode::from(2);
    };
    let ctx = Ctx::new(
        args.own.driver,
        args.full,
        args.own.quick,
        args.dir(),
        Duration::from_secs_f64(args.own.limit),
    );
    section::run(section, ctx)
}

/// What the driver says of itself: a process of its own finds out, since a broken driver may never
/// answer.
fn probe() -> Value {
    match feedline::unstable::devices() {
        Ok((version, found)) => {
            let gpus = found
                .iter()
                .map(|gpu| json!({ "name": gpu.name, "bytes": gpu.bytes, "pci": gpu.pci_bus_id }));
            json!({ "cuda": format!("{}.{}", version.0, version.1), "gpus": gpus.collect::<Value>() })
        }
        Err(absent) => json!({ "absent": absent.to_string() }),
    }
}

/// The program as a whole: it starts sections and keeps the book.
struct Program {
    args: Args,
    started: Instant,
    budget: Duration,
    book: Book,
}

impl Program {
    fn new(args: Args) -> Self {
        let seconds = args.seconds.unwrap_or(if args.full { 3600 } else { 570 });
        let binary = std::env::current_exe()
            .and_then(std::fs::read)
            .map_or(0, |bytes| crc32c::crc32c(&bytes));
        let head = vec![
            ("format", json!(1)),
            ("date", json!(report::now())),
            ("feedline", json!(env!("CARGO_PKG_VERSION"))),
            ("binary_crc32c", json!(format!("{binary:08x}"))),
            ("optimised", json!(!cfg!(debug_assertions))),
            ("command", std::env::args().collect()),
        ];
        Self {
            args,
            started: Instant::now(),
            budget: Duration::from_secs(seconds),
            book: Book::new(head),
        }
    }

    fn left(&self) -> Duration {
        (self.budget.saturating_sub(SPARE)).saturating_sub(self.started.elapsed())
    }

    fn run(mut self, sections: &[&'static Section]) -> ExitCode {
        if let Err(error) = report::check_yourself().and_then(|()| sanitizer::check_yourself()) {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
        // Not the folders above it: a mistyped mount point would be another disk than was meant.
        let made = if self.args.dir().is_dir() {
            Ok(())
        } else {
            std::fs::create_dir(self.args.dir())
        };
        if let Err(error) = made {
            eprintln!("error: {}: {error}", self.args.dir().display());
            return ExitCode::FAILURE;
        }
        let probe = self.probe();
        let driver = match self.choose(&probe) {
            Ok(driver) => driver,
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::FAILURE;
            }
        };
        println!(
            "feedline {} on {}",
            env!("CARGO_PKG_VERSION"),
            words(driver, &probe)
        );
        self.book
            .head
            .extend([("driver", json!(driver)), ("probe", probe)]);
        let mut written = true;
        for section in sections
            .iter()
            .filter(|section| driver != Driver::None || section.without_driver)
        {
            self.section(section, driver);
            written = self.write();
        }
        ours::clean(&self.args.dir());
        self.book.print_summary();
        if driver == Driver::None {
            eprintln!(
                "error: nothing was tested: no GPU, and no stand-in, which needs rustc and the folder of the build"
            );
        }
        let good = self.book.failed() == 0 && written && driver != Driver::None;
        if good {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }

    fn write(&self) -> bool {
        let Some(path) = &self.args.json else {
            return true;
        };
        let done = self.book.write(path);
        if let Err(error) = &done {
            eprintln!("error: {}: {error}", path.display());
        }
        done.is_ok()
    }

    /// This program, as it starts itself.
    fn command(&self, section: &str, driver: Driver, limit: Duration) -> Result<Command, String> {
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(own);
        command.args([
            "--section",
            section,
            "--driver",
            driver.name(),
            "--limit",
            &limit.as_secs_f64().to_string(),
        ]);
        command.arg("--dir").arg(self.args.dir());
        // cuFile writes its log to where it stands, unless it is told.
        if std::env::var_os("CUFILE_LOGFILE_PATH").is_none() {
            command.env(
                "CUFILE_LOGFILE_PATH",
                self.args.dir().join(format!("{}cufile.log", ours::DATA)),
            );
        }
        // The driver compiles the kernels once for all sections, also where there is no home
        // folder.
        if std::env::var_os("CUDA_CACHE_PATH").is_none() {
            command.env(
                "CUDA_CACHE_PATH",
                self.args.dir().join(format!("{}kernels", ours::DATA)),
            );
        }
        if self.args.full {
            command.arg("--full");
        }
        Ok(command)
    }

    fn probe(&self) -> Value {
        let command = match self.command("probe", Driver::Real, PROBE) {
            Ok(command) => command,
            Err(error) => return json!({ "absent": error }),
        };
        let (end, text, tail) = watch::output(command, PROBE.min(self.left()));
        let absent = || json!({ "absent": format!("asked for its devices: {} {}", end.words(), tail.join(" ")) });
        serde_json::from_str(text.trim()).unwrap_or_else(|_| absent())
    }

    fn choose(&self, probe: &Value) -> Result<Driver, String> {
        let wish = std::env::var("FEEDLINE_GPU").unwrap_or_default();
        let absent = probe["absent"].as_str();
        match (wish.as_str(), absent) {
            ("real" | "auto" | "", None) => Ok(Driver::Real),
            ("real", Some(why)) => Err(format!("FEEDLINE_GPU=real, and {why}")),
            ("standin" | "auto" | "", _) => Ok(standin_or_none()),
            _ => Err(format!(
                "FEEDLINE_GPU is {wish:?}; there are auto, real and standin"
            )),
        }
    }

    fn section(&mut self, section: &'static Section, driver: Driver) {
        self.book.begin(section.name);
        let started = Instant::now();
        let own = Duration::from_secs(section.limit * if self.args.full { 4 } else { 1 });
        let limit = own.min(self.left());
        if limit < Duration::from_secs(5) {
            self.book.put(Row::new(
                section.name,
                Verdict::Skipped,
                "no time is left: raise --seconds",
            ));
            return;
        }
        let (end, tail) = match self.command(section.name, driver, limit) {
            Ok(command) => watch::run(command, limit, |line| match Row::parse(line) {
                Some(row) => self.book.put(row),
                None if line.is_empty() => {}
                None => println!("  | {line}"),
            }),
            Err(error) => (watch::End::Not(error), Vec::new()),
        };
        self.book.end(started.elapsed().as_secs_f64());
        if end.well() {
            return;
        }
        tail.iter().for_each(|line| println!("  | {line}"));
        let cut = matches!(end, watch::End::Late) && limit < own;
        let told = matches!(&end, watch::End::Gone(status) if status.code() == Some(1));
        let verdict = if cut {
            Verdict::Skipped
        } else {
            Verdict::Failed
        };
        // A section that ends with 1 has said what failed.
        if !told {
            let words = if cut {
                "no time was left: raise --seconds".into()
            } else {
                format!("{} {}", end.words(), tail.join(" "))
            };
            self.book
                .put(Row::new("the section comes to its end", verdict, words));
        }
    }
}

/// The stand-in is built by `rustc`, beside what was built from the sources.
fn standin_or_none() -> Driver {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut version = Command::new(rustc);
    version.arg("-vV");
    let (end, ..) = watch::output(version, Duration::from_secs(60));
    if !end.well() || !Path::new(env!("CARGO_TARGET_TMPDIR")).is_dir() {
        return Driver::None;
    }
    // Now, since it takes longer than a section may.
    standin::cuda();
    Driver::Standin
}

fn words(driver: Driver, probe: &Value) -> String {
    let absent = probe["absent"].as_str().unwrap_or("not asked for");
    match driver {
        Driver::Real => format!(
            "{}, CUDA {}",
            probe["gpus"][0]["name"],
            probe["cuda"].as_str().unwrap_or("?")
        ),
        Driver::Standin => {
            format!("the stand-in ({absent}): bytes are checked, no rates are taken")
        }
        Driver::None => format!("this machine: no driver ({absent}), and no stand-in"),
    }
}
