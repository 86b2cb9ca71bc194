//! `tokens`: texts become token files, in one process or as a plan.

use crate::job::{self, RunArgs, stop};
use crate::progress;
use clap::Args;
use feedline::dataset::{Damage, Dataset, Jsonl};
use feedline::decode::{Tokenize, Tokenizer};
use feedline::prepare::{Plan, TokenFiles};
use indicatif::HumanBytes;
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes texts as tokens: Megatron's OUTPUT/tokens.bin and OUTPUT/tokens.idx.
///
/// Run again with the same arguments, it goes on after a stop (exit code 75) or a crash. With
/// --tasks it writes OUTPUT/plan.fdp alone, for `run` in many processes, then `finish`.
#[derive(Args)]
pub struct TokensArgs {
    /// File, folder or pattern of JSON lines (.jsonl, .jsonl.gz, .jsonl.zst) or of Parquet
    /// ('*.parquet')
    input: PathBuf,
    /// Folder to write to: new, empty, or left by an earlier run with the same arguments
    output: PathBuf,
    /// tokenizer.json of Hugging Face, or its folder
    #[arg(long)]
    tokenizer: PathBuf,
    /// Key path of the text, such as 'text' or 'meta.body', or its column
    #[arg(long, default_value = "text")]
    text: String,
    /// Add the tokenizer's special tokens to each text
    #[arg(long)]
    special_tokens: bool,
    /// End documents with this token, such as '<|endoftext|>'
    #[arg(long)]
    append_eod: Option<String>,
    /// Write no index
    #[arg(long)]
    flat: bool,
    /// Leave out texts that cannot be read, and list them in damaged.tsv [default: the first ends the
    /// work, or fails its task]
    #[arg(long)]
    skip_damaged: bool,
    /// Write a plan of so many tasks, and stop
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    tasks: Option<u64>,
    /// Threads [default: one per core]
    #[arg(long, conflicts_with = "tasks")]
    workers: Option<NonZeroUsize>,
}

/// How to open the texts and the tokenizer again.
#[derive(Serialize, Deserialize)]
struct Kept {
    input: PathBuf,
    tokenizer: PathBuf,
    text: String,
    special_tokens: bool,
    skip_damaged: bool,
}

impl Kept {
    fn texts(&self) -> feedline::Result<(Box<dyn Dataset>, Vec<Damage>)> {
        #[cfg(feature = "parquet")]
        if self
            .input
            .extension()
            .is_some_and(|ending| ending == "parquet")
        {
            let parquet = feedline::dataset::Parquet::builder().column(&self.text);
            return Ok((Box::new(parquet.open(&self.input)?), Vec::new()));
        }
        let lines = Jsonl::builder()
            .text(&self.text)
            .skip_damage(self.skip_damaged);
        let lines = lines.open(&self.input)?;
        let damage = lines.damage().to_vec();
        Ok((Box::new(lines), damage))
    }

    fn tokenize(&self, tokenizer: Tokenizer) -> Tokenize {
        // A line may have so many.
        const TEXT_MAX: usize = 64 << 20;
        Tokenize::new(tokenizer, usize::MAX)
            .text_max(TEXT_MAX)
            .special_tokens(self.special_tokens)
    }
}

pub fn tokens(args: &TokensArgs) -> Result<ExitCode, Box<dyn Error>> {
    let stop = stop()?;
    let full = |path: &Path| match path.to_string_lossy().contains("://") {
        true => Ok(path.to_path_buf()),
        false => std::path::absolute(path),
    };
    let kept = Kept {
        input: full(&args.input)?,
        tokenizer: full(&args.tokenizer)?,
        text: args.text.clone(),
        special_tokens: args.special_tokens,
        skip_damaged: args.skip_damaged,
    };
    let (texts, damage) = kept.texts()?;
    let tokenizer = Tokenizer::open(&kept.tokenizer)?;
    let files = TokenFiles::new(&args.text)
        .flat(args.flat)
        .skip_damaged(args.skip_damaged)
        .left_out(&damage)
        .keep(&serde_json::to_string(&kept)?);
    let files = match &args.append_eod {
        None => files,
        Some(token) => {
            let id = tokenizer.id_of(token);
            files.end(
                id.ok_or_else(|| format!("--append-eod: the tokenizer has no token {token:?}"))?,
            )
        }
    };
    let ids = kept.tokenize(tokenizer);
    if let Some(tasks) = args.tasks {
        let plan = files.plan(&*texts, &ids, &args.output, tasks)?;
        job::tell!(
            "texts       {}, {} of files",
            texts.len(),
            HumanBytes(plan.bytes())
        );
        job::print_tasks(&plan);
        return Ok(ExitCode::SUCCESS);
    }
    let bar = progress("{elapsed_precise} {wide_bar} {pos}/{len} texts or chunks ({eta})")?;
    let workers = args.workers.map_or(0, NonZeroUsize::get);
    let finished = files.write(&*texts, &ids, &args.output, workers, |event| {
        crate::shown(&bar, &stop, event)
    });
    crate::ended(&bar, finished)
}

/// Runs tasks of a plan of tokens.
pub fn run(plan: &Plan, args: &RunArgs) -> Result<ExitCode, Box<dyn Error>> {
    let kept: Kept = serde_json::from_str(plan.settings().unwrap_or_default())?;
    let (texts, _) = kept.texts()?;
    let ids = kept.tokenize(Tokenizer::open(&kept.tokenizer)?);
    let workers = args.workers.map_or(0, NonZeroUsize::get);
    let stop = job::stop()?;
    let tasks = args.choice.tasks()?;
    let ran = plan.run_tokens(&*texts, &ids, &tasks, workers, &stop, job::watch)?;
    Ok(job::ended(ran))
}
