//! The command line: allowed combinations of arguments, and the settings of a workload.

use crate::generate::Wanted;
use crate::measure::Limit;
use crate::settings::{self, Settings};
use crate::source::{Source, SourceArgs};
use crate::workload::{Accelerator, Benchmark, Workload};
use clap::builder::ArgPredicate;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Shows how long a GPU would wait for your data, why, and what to change.
///
/// Runs a loader on your data with a training step of a given length or of an MLPerf Storage
/// workload, and prints the bottleneck.
#[derive(Parser)]
#[command(name = "profile", version, after_long_help = AFTER)]
pub struct Args {
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub settings: Settings,
    /// Length of a training step in milliseconds [default: none, to measure the loader's own speed]
    #[arg(long, value_name = "X", value_parser = milliseconds, help_heading = STEP, conflicts_with = "workload")]
    pub step_ms: Option<f64>,
    /// A workload of MLPerf Storage: sets the source, --batch and the step; checks whether its AU
    /// is reached
    #[arg(long, value_enum, requires = "accelerator", help_heading = STEP)]
    pub workload: Option<Workload>,
    /// The accelerator that trains the workload
    #[arg(long, value_enum, requires = "workload", help_heading = STEP)]
    pub accelerator: Option<Accelerator>,
    /// Also decode the pictures of a workload
    /// [default: deliver the stored bytes, as MLPerf Storage does]
    #[arg(long, requires = "workload", help_heading = STEP)]
    pub decode: bool,
    /// Run for about this long after the first batch, over as many epochs as necessary
    /// [default: 30]
    #[arg(long, value_parser = settings::seconds, conflicts_with_all = ["batches", "epochs"], help_heading = RUN)]
    pub seconds: Option<f64>,
    /// Stop after N batches
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "epochs", help_heading = RUN)]
    pub batches: Option<u64>,
    /// Stop after N epochs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = RUN)]
    pub epochs: Option<u64>,
    /// Instead of a run: take batches of the first epoch without a step, for --seconds
    /// [default: 3], and estimate the run
    #[arg(long, conflicts_with_all = ["batches", "epochs", "live", "trace", "html", "prometheus"], help_heading = RUN)]
    pub before: bool,
    /// Generate data in this folder first, or reuse the data of an earlier run
    #[arg(long, value_name = "DIR", conflicts_with = "path", help_heading = RUN)]
    pub generate: Option<PathBuf>,
    /// Size of the generated data in MiB [default: 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 24), requires = "generate", conflicts_with = "path", help_heading = RUN)]
    pub generate_mib: Option<u64>,
    /// Show a dashboard in the terminal during the run
    #[arg(long, conflicts_with = "json", help_heading = OUT)]
    pub live: bool,
    /// Print one JSON object on standard output, and nothing else there
    #[arg(long, help_heading = OUT)]
    pub json: bool,
    /// Write a trace of the last batches, for ui.perfetto.dev
    #[arg(long, value_name = "FILE", help_heading = OUT)]
    pub trace: Option<PathBuf>,
    /// Write a page with plots
    #[arg(long, value_name = "FILE", help_heading = OUT)]
    pub html: Option<PathBuf>,
    /// Serve http://127.0.0.1:PORT/metrics during the run; 0 picks a free port
    #[arg(long, value_name = "PORT", help_heading = OUT)]
    pub prometheus: Option<u16>,
}

const STEP: &str = "The training step";
const RUN: &str = "The run";
const OUT: &str = "Output";

const USAGE: &str = "\
profile --source SOURCE (--path PATH | --generate DIR) [--step-ms X] [OPTIONS]
       profile --workload WORKLOAD --accelerator ACCELERATOR (--path PATH | --generate DIR) [OPTIONS]";

const AFTER: &str = "\
What the figures mean:
  AU          accelerator utilisation, as in MLPerf Storage: time of the steps / time from the end of the first step to
              the end of the last one.
  gpu idle    on the host, where a wait emulates the step: 1 - AU. On a GPU: the idle share of its stream, by events.
  starved     the share of the steady time without a ready batch, caused by the loader.
  late        on the host: the rest, lost on busy cores. On a GPU: idle because of the program.
  rate        samples of all batches except the first / the time of the AU.

A workload of MLPerf Storage emulates that benchmark's demands on storage, for one accelerator. It is no submission.

--generate makes images, records, tar, tfrecord, tokens, npy and npz (and parquet if built in). It writes to a new or empty
folder; a later run with the same folder reuses the data.

The object of --json has the same figures: shares are 0 to 1, names in _pct are percent, null is unknown or meaningless.

Ctrl-C ends the run and prints the measurements so far; a second Ctrl-C ends the program at once.
Exit status: 0 also when the AU was not reached (see \"pass\" in the JSON), 1 for an error, 2 for wrong arguments.";

fn milliseconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        // At most a day.
        Ok(ms) if (0.0..=86_400_000.0).contains(&ms) => Ok(ms),
        _ => Err("expected a number of milliseconds, 0 or more".into()),
    }
}

/// A consistent set of arguments.
pub struct Given {
    pub args: Args,
    pub benchmark: Option<&'static Benchmark>,
    pub step: Duration,
    /// Settings that deviate from the workload's benchmark.
    pub deviations: Vec<String>,
    /// The data has pictures, and they are decoded; known once the data is open.
    pub pictures: bool,
}

impl Given {
    /// Parses the process's arguments; wrong ones end it with status 2, `--help` with 0.
    pub fn parse() -> Self {
        crate::source::given(Self::from(std::env::args_os()))
    }

    pub fn from(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let mut command = command();
        let matches = command.try_get_matches_from_mut(words)?;
        let args = Args::from_arg_matches(&matches)?;
        Self::checked(args, &matches).map_err(|(kind, message)| command.error(kind, message))
    }

    fn checked(mut args: Args, matches: &ArgMatches) -> Result<Self, Refused> {
        if args.trace.is_some() && args.trace == args.html {
            return Err((
                ErrorKind::ArgumentConflict,
                "--trace and --html name the same file".into(),
            ));
        }
        let given = |name: &str| is_given(matches, name);
        let mut deviations = Vec::new();
        let benchmark = match args.workload.zip(args.accelerator) {
            Some((workload, accelerator)) => Some(
                Benchmark::find(workload, accelerator)
                    .and_then(|found| {
                        found
                            .fill_in(&mut args, given, &mut deviations)
                            .map(|()| found)
                    })
                    .map_err(|message| (ErrorKind::InvalidValue, message))?,
            ),
            None => None,
        };
        of_the_source(args.source.source, given)?;
        let step = match benchmark {
            Some(benchmark) => benchmark.step(),
            None => Duration::from_secs_f64(args.step_ms.unwrap_or(0.0) / 1e3),
        };
        Ok(Self {
            args,
            benchmark,
            step,
            deviations,
            pictures: false,
        })
    }

    /// The AU that the workload requires; `None` if the batch differs from the benchmark's.
    pub fn au_target(&self) -> Option<f64> {
        self.benchmark
            .filter(|_| !self.other_batch())
            .map(|benchmark| benchmark.au_target)
    }

    /// Whether there is a workload with a batch that differs from the benchmark's.
    pub fn other_batch(&self) -> bool {
        self.benchmark
            .is_some_and(|benchmark| benchmark.batch != self.args.settings.batch)
    }

    pub fn limit(&self) -> Limit {
        match (self.args.batches, self.args.epochs) {
            (Some(batches), _) => Limit::Batches(batches),
            (None, Some(epochs)) => Limit::Epochs(epochs),
            // Longer than any run counts as endless.
            (None, None) => Limit::Time(
                Duration::try_from_secs_f64(self.args.seconds.unwrap_or(30.0))
                    .unwrap_or(Duration::MAX),
            ),
        }
    }

    /// Whether pictures, if any, are decoded.
    pub fn decode(&self) -> bool {
        self.benchmark.is_none() || self.args.decode
    }

    /// The data for `--generate`.
    pub fn wanted(&self) -> Wanted {
        let source = &self.args.source;
        let settings = &self.args.settings;
        let token_bytes = source.token.size() as u64;
        let usual = match source.source {
            Source::Records => source.record_bytes.map_or(150_528, |bytes| bytes as u64),
            Source::Tfrecord => 114_660,
            Source::Tokens => token_bytes.saturating_mul(source.seq_len as u64),
            Source::Npz => 1 << 20,
            Source::Npy => 224 * 224 * 3 * 4,
            Source::Images | Source::Tar => 107_000,
            _ => 65_536,
        };
        let workload = self.benchmark;
        Wanted {
            source: source.source,
            sample_bytes: workload.map_or(usual, |benchmark| benchmark.sample_bytes),
            samples_per_file: workload.map(|benchmark| benchmark.samples_per_file),
            token_bytes: if source.source == Source::Tokens {
                token_bytes
            } else {
                0
            },
            batch: if workload.is_some() {
                settings.batch as u64
            } else {
                1
            },
            mib: self.args.generate_mib,
        }
    }
}

impl Benchmark {
    fn fill_in(
        &self,
        args: &mut Args,
        given: impl Fn(&str) -> bool,
        deviations: &mut Vec<String>,
    ) -> Result<(), String> {
        let source = self.source()?;
        match args.source.source {
            other if given("source") && other != source && args.generate.is_some() => {
                return Err(format!(
                    "{self} reads {source}, and --generate makes that: leave out --source {other}"
                ));
            }
            other if given("source") && other != source => {
                deviations.push(format!("the benchmark reads {source}, not {other}"))
            }
            _ => args.source.source = source,
        }
        match args.settings.batch {
            batch if !given("batch") || batch == self.batch => args.settings.batch = self.batch,
            batch => deviations.push(format!(
                "the benchmark's batches are of {}, not {batch}",
                self.batch
            )),
        }
        if args.decode {
            deviations.push("the benchmark does not decode pictures".into());
        }
        Ok(())
    }
}

/// A workload may replace `--source`, and `--generate` `--path`.
/// Values below 0 are refused as values, not as unknown arguments.
fn command() -> Command {
    Args::command()
        .override_usage(USAGE)
        .mut_args(|arg| {
            let with_value = arg.get_action().takes_values();
            if with_value {
                arg.allow_negative_numbers(true)
            } else {
                arg
            }
        })
        .mut_arg("source", |arg| {
            let arg = arg.required(false).required_unless_present("workload");
            arg.default_value_if("workload", ArgPredicate::IsPresent, "images")
        })
        .mut_arg("path", |arg| {
            let arg = arg.required(false).required_unless_present("generate");
            arg.default_value_if("generate", ArgPredicate::IsPresent, ".")
        })
}

type Refused = (ErrorKind, String);

fn is_given(matches: &ArgMatches, name: &str) -> bool {
    matches.value_source(name) == Some(ValueSource::CommandLine)
}

/// Options of particular sources.
const OF_SOURCES: [(&str, &str); 19] = [
    ("record_bytes", "records"),
    ("columns", "tar parquet tfrecord npz safetensors mds"),
    ("stack", "parquet"),
    ("image", "tar parquet tfrecord"),
    ("token", "tokens"),
    ("seq_len", "tokens megatron"),
    ("rows", "npy npz"),
    ("up_to", "npy npz megatron parquet tfrecord mds"),
    ("flat", "npy npz"),
    ("header_bytes", "tokens"),
    ("cut", "megatron"),
    ("raw", "mds"),
    ("follow_links", "mds"),
    ("missing_zero", "tfrecord"),
    ("context_only", "tfrecord"),
    ("null_zero", "parquet"),
    ("crop", PICTURES),
    ("dtype", PICTURES),
    ("layout", PICTURES),
];

/// Sources that may have pictures.
const PICTURES: &str = "images tar parquet tfrecord mds";

/// Errors: an option without effect for this source.
fn of_the_source(source: Source, given: impl Fn(&str) -> bool) -> Result<(), Refused> {
    let name = source.to_string();
    for (option, sources) in OF_SOURCES {
        if given(option) && sources.split(' ').all(|one| one != name) {
            let option = option.replace('_', "-");
            let all = sources.replace(' ', ", ");
            return Err((
                ErrorKind::ArgumentConflict,
                format!("--{option} has no effect for {name}; use it for {all}"),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn parse(line: &str) -> Result<Given, String> {
        let words = std::iter::once("profile").chain(line.split_whitespace());
        Given::from(words).map_err(|error| {
            assert_eq!(error.exit_code(), 2, "{line}");
            error.to_string()
        })
    }

    #[test]
    fn workloads_set_source_batch_and_step() {
        let given = parse("--workload resnet50 --accelerator h100 --path data").unwrap();
        let args = &given.args;
        let benchmark = given.benchmark.unwrap();
        assert_eq!(
            (args.source.source, args.settings.batch),
            (Source::Tfrecord, 400)
        );
        assert_eq!(
            (given.step, benchmark.au_target),
            (Duration::from_millis(224), 0.9)
        );
        assert!(given.deviations.is_empty() && !given.decode());
        assert!(
            parse("--workload retinanet --accelerator b200 --path data --decode")
                .unwrap()
                .decode()
        );
    }

    #[test]
    fn settings_override_a_workload_and_are_noted() {
        for (more, deviation) in [
            ("--batch 100", "the benchmark's batches are of 400, not 100"),
            ("--source tar", "the benchmark reads tfrecord, not tar"),
            ("--decode", "the benchmark does not decode pictures"),
        ] {
            let given = parse(&format!(
                "--workload resnet50 --accelerator h100 --path data {more}"
            ))
            .unwrap();
            assert_eq!(given.deviations, [deviation]);
        }
        let given =
            parse("--workload resnet50 --accelerator h100 --path data --batch 100 --source tar")
                .unwrap();
        assert_eq!(
            (given.args.source.source, given.args.settings.batch),
            (Source::Tar, 100)
        );
        // A value equal to the benchmark's is no deviation.
        let same =
            "--workload resnet50 --accelerator h100 --path data --batch 400 --source tfrecord";
        assert!(parse(same).unwrap().deviations.is_empty());
    }

    #[test]
    fn inconsistent_arguments_are_refused() {
        for (line, why) in [
            ("", "--source <SOURCE>\n  --path <PATH>"),
            ("--source images", "not provided:\n  --path <PATH>"),
            ("--path data", "not provided:\n  --source <SOURCE>"),
            (
                "--workload unet3d --accelerator h100",
                "not provided:\n  --path <PATH>",
            ),
            (
                "--source records --path data",
                "--record-bytes <RECORD_BYTES>",
            ),
            (
                "--source images --path data --generate dir",
                "'--path <PATH>' cannot be used with '--generate <DIR>'",
            ),
            ("--source images --generate-mib 5", "--generate <DIR>"),
            (
                "--workload unet3d --path data",
                "--accelerator <ACCELERATOR>",
            ),
            (
                "--workload resnet50 --accelerator b200 --path data",
                "MLPerf Storage has no resnet50 for b200",
            ),
            (
                "--workload unet3d --accelerator h100 --path data --step-ms 3",
                "cannot be used with",
            ),
            (
                "--workload unet3d --accelerator h100 --generate dir --source tar",
                "leave out --source tar",
            ),
            (
                "--source images --path data --decode",
                "--workload <WORKLOAD>",
            ),
            (
                "--source images --path data --seconds 3 --batches 5",
                "cannot be used with",
            ),
            (
                "--source images --path data --before --html f",
                "cannot be used with",
            ),
            (
                "--source images --path data --step-ms -1",
                "expected a number of milliseconds, 0 or more",
            ),
            (
                "--source images --path data --batch -1",
                "invalid value '-1' for '--batch <BATCH>'",
            ),
            (
                "--source images --path data --trace f --html f",
                "--trace and --html name the same file",
            ),
        ] {
            let error = parse(line).map(|_| ()).expect_err(line);
            assert!(
                error.starts_with("error: ") && error.contains(why),
                "{line}: {error}"
            );
        }
    }

    #[test]
    fn generated_data_fits_the_workload_or_source() {
        let wanted = parse("--workload resnet50 --accelerator h100 --generate dir")
            .unwrap()
            .wanted();
        assert_eq!(
            (wanted.source, wanted.sample_bytes, wanted.samples_per_file),
            (Source::Tfrecord, 114_660, Some(1251))
        );
        assert_eq!((wanted.batch, wanted.mib), (400, None));
        let wanted = parse("--source records --record-bytes 77 --generate dir --generate-mib 9")
            .unwrap()
            .wanted();
        assert_eq!(
            (
                wanted.sample_bytes,
                wanted.samples_per_file,
                wanted.batch,
                wanted.mib
            ),
            (77, None, 1, Some(9))
        );
        let wanted = parse("--source tokens --token u32 --seq-len 100 --generate dir")
            .unwrap()
            .wanted();
        assert_eq!((wanted.sample_bytes, wanted.token_bytes), (400, 4));
    }

    #[test]
    fn options_without_effect_for_the_source_are_refused() {
        for (line, why) in [
            (
                "--source images --record-bytes 9",
                "--record-bytes has no effect for images; use it for records",
            ),
            (
                "--workload unet3d --accelerator h100 --token u32",
                "--token has no effect for npz",
            ),
        ] {
            let error = parse(&format!("--path data {line}"))
                .map(|_| ())
                .expect_err(line);
            assert!(error.contains(why), "{line}: {error}");
        }
        assert!(parse("--path data --source tar --columns cls --crop 9").is_ok());
        let command = command();
        let all = Source::value_variants().iter().map(ToString::to_string);
        let names: Vec<String> = all.chain(["parquet".into()]).collect();
        for (option, sources) in OF_SOURCES {
            assert!(
                command.get_arguments().any(|arg| arg.get_id() == option),
                "{option}"
            );
            assert!(
                sources
                    .split(' ')
                    .all(|source| names.iter().any(|name| name == source)),
                "{sources}"
            );
        }
    }

    #[test]
    fn only_the_batch_of_the_benchmark_can_pass() {
        let target = |words: &str| parse(&format!("--path data {words}")).unwrap().au_target();
        assert_eq!(target("--workload resnet50 --accelerator h100"), Some(0.9));
        assert_eq!(
            target("--workload resnet50 --accelerator h100 --batch 400"),
            Some(0.9)
        );
        assert_eq!(
            target("--workload resnet50 --accelerator h100 --batch 1"),
            None
        );
        assert_eq!(target("--source images --step-ms 3"), None);
    }
}
