//! Writes documents of tokens as Megatron's files.

use crate::job::{STOPPED, stop};
use crate::progress;
use crate::source::SourceArgs;
use clap::builder::Resettable;
use clap::{Args, Command};
use feedline::dataset::{Dataset, stoppable};
use feedline::{ErrorKind, prepare};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

/// Writes documents of tokens as Megatron's OUTPUT.bin and OUTPUT.idx, from any format of --source.
///
/// The files appear whole. Existing ones are not overwritten. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP
/// end it with exit code 75; nothing is kept then.
#[derive(Args)]
pub struct DocumentsArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// Path of the output without its endings
    #[arg(index = 2)]
    output: PathBuf,
    /// Field of the tokens [default: the only field]
    #[arg(long)]
    field: Option<String>,
}

/// The path comes first, as in other verbs.
pub fn with_input(command: Command) -> Command {
    command.mut_subcommand("documents", |verb| {
        verb.mut_arg("path", |arg| {
            arg.long(Resettable::Reset).value_name("INPUT").index(1)
        })
    })
}

pub fn run(mut args: DocumentsArgs) -> Result<ExitCode, Box<dyn Error>> {
    let stop = stop()?;
    if args.source.up_to.is_empty() {
        args.source.up_to = vec![(1 << 30).to_string().parse()?];
    }
    let dataset = args.source.open()?;
    let names: Vec<&str> = dataset
        .schema()
        .iter()
        .map(|field| field.name.as_str())
        .collect();
    let field = match (&args.field, &names[..]) {
        (Some(field), _) => field,
        (None, [only]) => *only,
        (None, several) => return Err(format!("--field: there are {}", several.join(", ")).into()),
    };
    let bar = progress("{elapsed_precise} {wide_bar} {pos}/{len} documents ({eta})")?;
    bar.set_length(dataset.len());
    let written = stoppable(&stop, || {
        prepare::documents(&dataset, field, &args.output, |done| bar.set_position(done))
    });
    bar.finish_and_clear();
    match written {
        Err(error) if error.kind() == ErrorKind::Cancelled => {
            eprintln!("{error}");
            Ok(ExitCode::from(STOPPED))
        }
        written => {
            println!("{}", written?);
            Ok(ExitCode::SUCCESS)
        }
    }
}
