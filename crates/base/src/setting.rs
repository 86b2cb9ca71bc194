//! The names of settings in messages: a setting has a name in Rust, in Python and on the command
//! line.

use std::fmt;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU8, Ordering};

/// Whose names messages use: Rust's, unless the process chose another dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// The names of this crate.
    Rust,
    /// Those of the Python package.
    Python,
    /// Those of the command line tools in `examples/`.
    CommandLine,
}

static SPOKEN: AtomicU8 = AtomicU8::new(Dialect::Rust as u8);

impl Dialect {
    /// Makes all messages of this process use these names from now on.
    pub fn speak(self) {
        SPOKEN.store(self as u8, Ordering::Relaxed);
    }

    pub fn spoken() -> Self {
        let all = [Self::Rust, Self::Python, Self::CommandLine];
        all[SPOKEN.load(Ordering::Relaxed) as usize]
    }
}

macro_rules! settings {
    ($($setting:ident: $rust:literal, $python:literal, $line:literal;)*) => {
        /// A setting that a message names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(dead_code, reason = "messages of features alone name some of them")]
        pub enum Setting { $($setting),* }

        const NAMES: &[[&str; 3]] = &[$([$rust, $python, $line]),*];

        #[cfg(test)]
        const ALL: &[Setting] = &[$(Setting::$setting),*];
    };
}

// Names in Rust, in Python and on the command line. `{}` is the place of a value; a name without a
// value ends before it. An empty name means that the setting does not exist there: no message may
// offer it.
settings! {
    AnyCount: "Field::up_to", "NAME:TYPE:?", "NAME:TYPE:?";
    BatchBytes: "batch_bytes", "the bytes in ragged", "";
    BatchSize: "batch_size({})", "batch_size={}", "--batch {}";
    Bind: "batch.bind(…)", "", "";
    BytesFeature: "TfRecordBuilder::bytes", "NAME:bytes", "NAME:bytes";
    Cache: "cache(Cache::at(…))", "cache=FOLDER", "--cache FOLDER";
    CacheBytes: "capacity", "cache_bytes", "--cache-gib";
    Columns: "column", "columns", "--columns";
    ContextOnly: "context_only(true)", "context_only=True", "--context-only";
    Copied: "dataset.copied", "packed={\"copy\": FILE}", "";
    Cut: "cut(true)", "cut=True", "--cut";
    DctScaling: "dct_scaling", "dct_scaling", "";
    DecodeField: "decode_field", "decoders", "";
    Depth: "tuning(|t| t.depth({}))", "depth={}", "--depth {}";
    DeviceBatches: "tuning(|t| t.device_batches({}))", "device_batches={}", "";
    Direct: "direct", "direct", "--direct";
    Documents: "documents", "documents", "--up-to";
    DocumentsMax: "documents_max({})", "documents_max={}", "";
    EpochLen: "Mix::epoch_len({})", "epoch_len={}", "";
    Epochs: "epochs(a..b)", "", "";
    FactsAnew: "FactsBuilder::anew", "", "--checked-anew";
    Finish: "finish", "dtype", "";
    Flat: "flat", "flat", "--flat";
    FloatsFeature: "TfRecordBuilder::floats", "NAME:f32", "NAME:f32";
    FollowLinks: "follow_links(true)", "follow_links=True", "--follow-links";
    GlobalBatch: "global_batch({})", "global_batch={}", "";
    GroupsBudget: "Groups::budget({})", "budget={}", "";
    HeaderBytes: "header({})", "header_bytes={}", "--header-bytes {}";
    IndexFile: "index_file", "index_file", "--index";
    InMemory: "in_memory", "in_memory", "--in-memory";
    IntsFeature: "TfRecordBuilder::ints", "NAME:i64", "NAME:i64";
    Keep: "keep", "keep", "";
    LastBatch: "last_batch(LastBatch::{})", "last_batch=\"{}\"", "";
    LastBatchShare: "last_batch_share({})", "last_batch_share={}", "";
    Ledger: "Loader::ledger", "bad_samples", "";
    Mark: "loader.mark()", "loader.mark", "";
    MaxPixels: "limits", "max_pixels", "--max-pixels";
    Measured: "facts(file).lengths()", "lengths_file", "";
    MemoryBudget: "memory_budget", "memory_budget", "--budget-mib";
    MissingZero: "missing_zero(true)", "missing_zero=True", "--missing-zero";
    MultipleOf: "Groups::multiple_of({})", "multiple_of={}", "";
    NextEpoch: "loader.next_epoch()", "loader.next_epoch", "";
    NullZero: "nulls(Nulls::Zero)", "null_zero=True", "--null-zero";
    Numa: "numa", "numa", "";
    Padding: "TarBuilder::padding", "", "";
    Ragged: "ragged", "ragged", "";
    Raw: "MdsBuilder::raw", "raw", "--raw";
    Reader: "tuning(|t| t.reader(Mode::{}))", "reader=\"{}\"", "--reader {}";
    Sampler: "Sampler", "", "";
    SeekPoints: "facts(file).seek_points()", "seek_points", "--seek-points";
    SeqLen: "window", "seq_len", "--seq-len";
    Rank: "Rank::new(rank, world)", "shard=(rank, world)", "";
    RankOf: "Rank::of(Launcher::{})", "", "";
    Shards: "prepare::Shards", "prepare", "prepare";
    Size: "resize", "size", "--crop";
    SkipDamaged: "skip_damaged(true)", "", "--skip-damaged";
    Slots: "tuning(|t| t.slots({}))", "slots={}", "--slots {}";
    StallDeadline: "stall_deadline", "stall_deadline", "";
    Stream: "stream(…)", "streams", "";
    Strict: "strict(false)", "strict=False", "";
    Substitute: "on_bad_sample", "substitute", "";
    TarFields: "Tar::builder", "columns", "--columns";
    Token: "Tokens::builder(DType::{})", "token=\"{}\"", "--token {}";
    UpTo: "up_to", "up_to", "--up-to";
    Vocabulary: "vocabulary({})", "vocabulary={}", "--vocabulary {}";
    WholeData: "Rank::single()", "shard=None", "";
    Workers: "workers({})", "workers={}", "--workers {}";
}

impl Setting {
    /// The setting, if it exists in the dialect of this process.
    pub fn there(self) -> Option<Self> {
        (!self.name(Dialect::spoken()).is_empty()).then_some(self)
    }

    /// The setting with this value. Outside Rust, enum values are in lower case.
    pub fn with(self, value: impl Debug) -> String {
        self.with_in(Dialect::spoken(), value)
    }

    fn with_in(self, dialect: Dialect, value: impl Debug) -> String {
        let value = format!("{value:?}");
        let value = if dialect == Dialect::Rust {
            value
        } else {
            value.to_lowercase()
        };
        format!("`{}`", self.name(dialect).replace("{}", &value))
    }

    /// Advice to use this setting, for the end of a message. Empty if this process does not have
    /// it.
    pub fn hint(self, words: impl FnOnce(Self) -> String) -> String {
        self.there().map_or_else(String::new, words)
    }

    fn name(self, dialect: Dialect) -> &'static str {
        NAMES[self as usize][dialect as usize]
    }

    fn words_in(self, dialect: Dialect) -> String {
        let name = self.name(dialect).trim_start_matches("tuning(|t| t.");
        match name.split_once("{}") {
            // `slots(`, `slots=` and `--slots ` without their last sign.
            Some((name, _)) => format!("`{}`", name.split(['(', '=', ' ']).next().unwrap_or(name)),
            // A message that must name it does so in plain words.
            None if name.is_empty() => format!("{self:?}").to_lowercase(),
            None => format!("`{name}`"),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words_in(Dialect::spoken()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Dialect::{CommandLine, Python, Rust};

    #[test]
    fn a_setting_has_a_name_in_each_dialect() {
        let all =
            |setting: Setting| [Rust, Python, CommandLine].map(|dialect| setting.words_in(dialect));
        assert_eq!(all(Setting::Slots), ["`slots`", "`slots`", "`--slots`"]);
        assert_eq!(
            all(Setting::NullZero),
            ["`nulls(Nulls::Zero)`", "`null_zero=True`", "`--null-zero`"]
        );
        assert_eq!(all(Setting::Epochs), ["`epochs(a..b)`", "epochs", "epochs"]);
        assert_eq!(
            all(Setting::LastBatch),
            ["`last_batch`", "`last_batch`", "lastbatch"]
        );
    }

    #[test]
    fn a_value_is_written_as_the_dialect_writes_it() {
        #[derive(Debug)]
        struct Keep;
        let all = |setting: Setting, value: &dyn Debug| {
            [Rust, Python].map(|dialect| setting.with_in(dialect, value))
        };
        assert_eq!(
            all(Setting::LastBatch, &Keep),
            ["`last_batch(LastBatch::Keep)`", "`last_batch=\"keep\"`"]
        );
        assert_eq!(all(Setting::Workers, &8), ["`workers(8)`", "`workers=8`"]);
        assert_eq!(
            all(Setting::Depth, &8),
            ["`tuning(|t| t.depth(8))`", "`depth=8`"]
        );
        assert_eq!(Setting::Workers.with_in(CommandLine, 8), "`--workers 8`");
    }

    #[test]
    fn no_name_outside_of_rust_is_an_item_of_rust() {
        for setting in ALL {
            for dialect in [Python, CommandLine] {
                let name = setting.name(dialect);
                assert!(
                    !name.contains("::") && !name.contains("()"),
                    "{setting:?}: {name}"
                );
            }
        }
    }
}
