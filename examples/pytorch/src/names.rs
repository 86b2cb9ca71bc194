//! The names of the settings in Python, for messages.

use feedline::setting::Setting;

pub fn name(setting: Setting) -> &'static str {
    match setting {
        Setting::AnyCount => "NAME:TYPE:?",
        Setting::BatchBytes => "the bytes in ragged",
        Setting::BatchSize => "batch_size={}",
        Setting::BytesFeature => "NAME:bytes",
        Setting::Cache => "cache=FOLDER",
        Setting::CacheBytes => "cache_bytes",
        Setting::Columns => "columns",
        Setting::ContextOnly => "context_only=True",
        Setting::Copied => "packed={\"copy\": FILE}",
        Setting::Cut => "cut=True",
        Setting::DctScaling => "dct_scaling",
        Setting::DecodeField => "decoders",
        Setting::Depth => "depth={}",
        Setting::DeviceBatches => "device_batches={}",
        Setting::Direct => "direct",
        Setting::Documents => "documents",
        Setting::DocumentsMax => "documents_max={}",
        Setting::Elements => "elements",
        Setting::EpochLen => "epoch_len={}",
        Setting::Finish => "dtype",
        Setting::Flat => "flat",
        Setting::FloatsFeature => "NAME:f32",
        Setting::FollowLinks => "follow_links=True",
        Setting::GlobalBatch => "global_batch={}",
        Setting::GroupsBudget => "budget={}",
        Setting::HeaderBytes => "header_bytes={}",
        Setting::IndexFile => "index_file",
        Setting::InMemory => "in_memory",
        Setting::IntsFeature => "NAME:i64",
        Setting::Keep => "keep",
        Setting::LastBatch => "last_batch=\"{}\"",
        Setting::LastBatchShare => "last_batch_share={}",
        Setting::Ledger => "bad_samples",
        Setting::Mark => "loader.mark",
        Setting::MaxPixels => "max_pixels",
        Setting::Measured => "lengths_file",
        Setting::MemoryBudget => "memory_budget",
        Setting::MissingZero => "missing_zero=True",
        Setting::MultipleOf => "multiple_of={}",
        Setting::NextEpoch => "loader.next_epoch",
        Setting::NullZero => "null_zero=True",
        Setting::Numa => "numa",
        Setting::Ragged => "ragged",
        Setting::Raw => "raw",
        Setting::Reader => "reader=\"{}\"",
        Setting::SeekPoints => "seek_points",
        Setting::SeqLen => "seq_len",
        Setting::Rank => "shard=(rank, world)",
        Setting::Shards => "prepare",
        Setting::Size => "size",
        Setting::Slots => "slots={}",
        Setting::StallDeadline => "stall_deadline",
        Setting::Stream => "streams",
        Setting::Strict => "strict=False",
        Setting::Substitute => "substitute",
        Setting::TarFields => "columns",
        Setting::Token => "token=\"{}\"",
        Setting::UpTo => "up_to",
        Setting::Vocabulary => "vocabulary={}",
        Setting::WholeData => "shard=None",
        Setting::Workers => "workers={}",
        Setting::Bind
        | Setting::Each
        | Setting::Epochs
        | Setting::FactsAnew
        | Setting::Padding
        | Setting::Sampler
        | Setting::RankOf
        | Setting::SkipDamaged => "",
    }
}
