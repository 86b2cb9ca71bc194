//! The names of settings in messages.
//!
//! A message contains a [`Setting`], not a fixed name. Users see the Rust names, unless their
//! program set its own with [`speak`]: the Python package and the command line tools do.

use std::fmt;
use std::fmt::Debug;
use std::sync::OnceLock;

/// The name of each setting in a program. `{}` stands for a value; without a value, the name ends
/// there. An empty name means that the program lacks the setting: no message may suggest it.
pub type Names = fn(Setting) -> &'static str;

static SPOKEN: OnceLock<Names> = OnceLock::new();

/// Makes all messages of this process use these names. Values of enums are then in lower case. Only
/// the first call has an effect.
pub fn speak(names: Names) {
    let _ = SPOKEN.set(names);
}

fn spoken() -> Option<Names> {
    SPOKEN.get().copied()
}

macro_rules! settings {
    ($($setting:ident: $rust:literal;)*) => {
        /// A setting that a message names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Setting { $($setting),* }

        /// The names in Rust.
        fn in_rust(setting: Setting) -> &'static str {
            match setting { $(Setting::$setting => $rust),* }
        }
    };
}

settings! {
    AnyCount: "Field::up_to";
    ArrowImage: "image";
    ArrowNumbers: "ArrowBuilder::numbers";
    BatchBytes: "batch_bytes";
    BatchSize: "batch_size({})";
    Bind: "batch.bind(…)";
    BytesFeature: "TfRecordBuilder::bytes";
    Cache: "cache(Cache::at(…))";
    CacheBytes: "capacity";
    Columns: "column";
    ContextOnly: "context_only(true)";
    Copied: "dataset.copied";
    Cut: "cut(true)";
    DctScaling: "dct_scaling";
    DecodeField: "decode_field";
    DeltaTable: "give the files of its log to ParquetBuilder::open_files";
    Depth: "tuning(|t| t.depth({}))";
    DeviceBatches: "tuning(|t| t.device_batches({}))";
    Direct: "direct";
    Documents: "documents";
    DocumentsMax: "documents_max({})";
    Each: "Each::new";
    Elements: "images or list";
    EpochLen: "Mix::epoch_len({})";
    Epochs: "epochs(a..b)";
    FactsAnew: "FactsBuilder::anew";
    Finish: "finish";
    Flat: "flat";
    FloatsFeature: "TfRecordBuilder::floats";
    FollowLinks: "follow_links(true)";
    GlobalBatch: "global_batch({})";
    GroupsBudget: "Groups::budget({})";
    HeaderBytes: "header({})";
    IndexFile: "index_file";
    InMemory: "in_memory";
    IntsFeature: "TfRecordBuilder::ints";
    JoinColumns: "TableBuilder::columns";
    JoinKey: "Table::builder";
    JsonText: "JsonlBuilder::json";
    Keep: "keep";
    LastBatch: "last_batch(LastBatch::{})";
    LastBatchShare: "last_batch_share({})";
    Ledger: "Loader::ledger";
    Mark: "loader.mark()";
    MaxPixels: "limits";
    Measured: "facts(file).lengths()";
    MemoryBudget: "memory_budget";
    Missing: "missing(Missing::Skip)";
    MissingZero: "missing_zero(true)";
    MultipleOf: "Groups::multiple_of({})";
    NextEpoch: "loader.next_epoch()";
    NullZero: "nulls(Nulls::Zero)";
    Numa: "numa";
    Padding: "TarBuilder::padding";
    Ragged: "ragged";
    Raw: "MdsBuilder::raw";
    Reader: "tuning(|t| t.reader(Mode::{}))";
    Sampler: "Sampler";
    SeekPoints: "facts(file).seek_points()";
    SeqLen: "window";
    Rank: "Rank::new(rank, world)";
    RankOf: "Rank::of(Launcher::{})";
    Rows: "rows()";
    Shards: "prepare::Shards";
    Size: "resize";
    SkipDamaged: "skip_damaged(true)";
    Slots: "tuning(|t| t.slots({}))";
    StallDeadline: "stall_deadline";
    Stream: "stream(…)";
    Strict: "strict(false)";
    Substitute: "on_bad_sample";
    TarFields: "Tar::builder";
    Text: "JsonlBuilder::text";
    Texts: "JsonlBuilder::texts";
    Token: "Tokens::builder(DType::{})";
    UpTo: "up_to";
    Vocabulary: "vocabulary({})";
    WholeData: "Rank::single()";
    Workers: "workers({})";
}

impl Setting {
    /// The setting, if it exists in this program.
    pub fn there(self) -> Option<Self> {
        (!self.name(spoken()).is_empty()).then_some(self)
    }

    /// The setting with this value.
    pub fn with(self, value: impl Debug) -> String {
        self.with_in(spoken(), value)
    }

    fn with_in(self, names: Option<Names>, value: impl Debug) -> String {
        let mut value = format!("{value:?}");
        if names.is_some() {
            value = value.to_lowercase();
        }
        format!("`{}`", self.name(names).replace("{}", &value))
    }

    /// Advice to use this setting, for the end of a message. Empty if this program does not have
    /// it.
    pub fn hint(self, words: impl FnOnce(Self) -> String) -> String {
        self.there().map_or_else(String::new, words)
    }

    fn name(self, names: Option<Names>) -> &'static str {
        names.unwrap_or(in_rust)(self)
    }

    fn words_in(self, names: Option<Names>) -> String {
        let name = self.name(names).trim_start_matches("tuning(|t| t.");
        match name.split_once("{}") {
            // `slots(`, `slots=` and `--slots ` without their last character.
            Some((name, _)) => format!("`{}`", name.split(['(', '=', ' ']).next().unwrap_or(name)),
            // The program lacks the setting, but a message must name it.
            None if name.is_empty() => format!("{self:?}").to_lowercase(),
            None => format!("`{name}`"),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words_in(spoken()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a program with few settings.
    fn line(setting: Setting) -> &'static str {
        match setting {
            Setting::NullZero => "--null-zero",
            Setting::Reader => "--reader {}",
            Setting::Slots => "slots={}",
            _ => "",
        }
    }

    #[test]
    fn a_message_names_a_setting_as_the_program_does() {
        let both =
            |setting: Setting| [None, Some(line as Names)].map(|names| setting.words_in(names));
        assert_eq!(both(Setting::Slots), ["`slots`", "`slots`"]);
        assert_eq!(both(Setting::Reader), ["`reader`", "`--reader`"]);
        assert_eq!(
            both(Setting::NullZero),
            ["`nulls(Nulls::Zero)`", "`--null-zero`"]
        );
        assert_eq!(both(Setting::LastBatch), ["`last_batch`", "lastbatch"]);
    }

    #[test]
    fn a_value_is_written_as_the_program_writes_it() {
        #[derive(Debug)]
        struct Mmap;
        let both = |setting: Setting, value: &dyn Debug| {
            [None, Some(line as Names)].map(|names| setting.with_in(names, value))
        };
        assert_eq!(
            both(Setting::Reader, &Mmap),
            ["`tuning(|t| t.reader(Mode::Mmap))`", "`--reader mmap`"]
        );
        assert_eq!(
            both(Setting::Slots, &8),
            ["`tuning(|t| t.slots(8))`", "`slots=8`"]
        );
    }
}
