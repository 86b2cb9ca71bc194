//! Settings of token files, made from the texts of a dataset, and their names.

use super::output::{escaped, ledger_line};
use feedline_base::error::{Error, ErrorKind, Stage};
use feedline_core::dataset::Damage;
use feedline_core::tensor::DType;
use serde::{Deserialize, Serialize};

pub(super) const BIN: &str = "tokens.bin";
pub(super) const IDX: &str = "tokens.idx";
pub(super) const TOKENS_HEADING: &str =
    "#files\tdtype\tdocuments\tempty\ttokens\trefused\tbytes of text\n";

/// Writes the texts of a dataset as tokens: Megatron's `tokens.bin` and `tokens.idx`, or
/// `tokens.bin` alone. One text is one document, and one sequence of the index.
///
/// ```text
/// dataset ──task k: texts k/n to (k+1)/n──► part-00000k.tokens, record ──all in order──► tokens.bin, tokens.idx
/// ```
///
/// The files have the same bytes for any number of tasks, and those that Megatron's
/// `preprocess_data.py` writes with the same tokenizer. Tokens are `u16` for a vocabulary below
/// 65,500 ids, else `i32`. An empty text is a document without a sequence.
///
/// ```no_run
/// # use feedline_base::stop::Stop; use feedline_core::{dataset::Dataset, decode::ToIds};
/// use feedline_prepare::{Check, Tasks, TokenFiles};
/// # fn prepare(texts: &dyn Dataset, tokenizer: &dyn ToIds) -> feedline_core::Result<()> {
/// let plan = TokenFiles::new("text").end(50256).plan(texts, tokenizer, "corpus/", 64)?;
/// plan.run_tokens(texts, tokenizer, &Tasks::all(), 0, &Stop::new(), |_| {})?;
/// println!("{}", plan.finish(Check::Bytes)?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TokenFiles {
    pub(super) settings: TokenSettings,
}

/// Settings that determine the output, as stored in a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TokenSettings {
    pub(super) field: String,
    /// The token that ends a document.
    pub(super) end: Option<u32>,
    /// Without an index.
    pub(super) flat: bool,
    /// Whether tokens have 2 bytes.
    pub(super) is_short: bool,
    /// Identities of the tokenizer and of the dataset.
    pub(super) tokenizer: u64,
    pub(super) dataset: u64,
    /// Number of samples or, if there are chunks, of chunks.
    pub(super) units: u64,
    /// What the index left out: the line of the ledger, the reason, and the number of texts.
    pub(super) left_out: Vec<(String, String, u64)>,
    /// What the program that made the plan wants to keep.
    pub(super) kept: String,
    /// A task without refused texts has the same output either way, so a plan stores this in its
    /// notes.
    #[serde(skip)]
    pub(super) skip_damaged: bool,
}

impl TokenFiles {
    /// Defaults: no token between documents; Megatron's files; a text that cannot be read fails its
    /// task. `field`: the field of the texts.
    pub fn new(field: &str) -> Self {
        Self {
            settings: TokenSettings {
                field: field.into(),
                end: None,
                flat: false,
                is_short: false,
                tokenizer: 0,
                dataset: 0,
                units: 0,
                left_out: Vec::new(),
                kept: String::new(),
                skip_damaged: false,
            },
        }
    }

    /// Ends every document that is not empty with this token, as Megatron's `--append-eod` does.
    #[must_use]
    pub fn end(mut self, token: u32) -> Self {
        self.settings.end = Some(token);
        self
    }

    /// Writes no index: `tokens.bin` is one row of tokens. Give an [end](Self::end), or documents
    /// cannot be told apart.
    #[must_use]
    pub fn flat(mut self, flat: bool) -> Self {
        self.settings.flat = flat;
        self
    }

    /// Leaves out texts that cannot be read (half lines, other bytes than UTF-8, a missing key,
    /// another type), counts them by reason, and lists them in `damaged.tsv`.
    #[must_use]
    pub fn skip_damaged(mut self, skip: bool) -> Self {
        self.settings.skip_damaged = skip;
        self
    }

    /// Counts and lists also these places, which the dataset's index left out, such as the half line
    /// at the end of a file.
    #[must_use]
    pub fn left_out(mut self, damage: &[Damage]) -> Self {
        let lines = damage.iter().map(|damage| {
            let kind = damage.kind.as_str();
            let message = format!("{kind}: {}", damage.message);
            let error = Error::new(ErrorKind::Decode, Stage::Index, message)
                .with_path(&damage.path)
                .with_range(damage.offset, damage.len);
            let line = ledger_line(&escaped(&damage.path), &error);
            (line, kind.into(), damage.samples)
        });
        self.settings.left_out = lines.collect();
        self
    }

    /// Keeps a text in the plan, which [`Plan::settings`](crate::Plan::settings) returns: how to
    /// open the dataset again.
    #[must_use]
    pub fn keep(mut self, settings: &str) -> Self {
        self.settings.kept = settings.into();
        self
    }
}

impl TokenSettings {
    pub(super) fn dtype(&self) -> DType {
        match self.is_short {
            true => DType::U16,
            false => DType::I32,
        }
    }

    /// Megatron's code of the dtype.
    pub(super) fn code(&self) -> u8 {
        match self.is_short {
            true => 8,
            false => 4,
        }
    }
}

/// Name of the part that a task writes.
pub(super) fn part(task: u64) -> String {
    format!("part-{task:06}.tokens")
}

/// Whether a file with this name may come from an earlier call.
pub(super) fn is_part(name: &str) -> bool {
    let number = name
        .strip_prefix("part-")
        .and_then(|rest| rest.strip_suffix(".tokens"));
    number.is_some_and(|text| text.len() >= 6 && text.bytes().all(|byte| byte.is_ascii_digit()))
}
