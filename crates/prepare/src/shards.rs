//! Settings of shards, and the names of the files in their folder.

use feedline_base::error::{Result, config};
use serde::{Deserialize, Serialize};

pub(super) const MANIFEST: &str = "manifest.tsv";
pub(super) const MANIFEST_HEADING: &str =
    "#key\tshard\tlabel\tsource\toutcome\tbytes before\tbytes after\n";
pub(super) const PLAN: &str = "plan.fdp";
pub(super) const LEDGER: &str = "damaged.tsv";
pub(super) const LEDGER_HEADING: &str = "#source\terror\n";

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// As in WebDataset: `shard-000000.tar` …. A sample is the members `00000000.jpg` and
    /// `00000000.cls` (the label as ASCII; absent for a flat folder). A picture that is not a JPEG
    /// keeps its ending.
    Tar,
    /// `shard-000000.parquet` …, columns `image` (binary) and `label` (int64; absent for a flat
    /// folder), uncompressed plain pages without dictionary, row groups of 512 rows or 64 MiB,
    /// whichever is less, with an offset index.
    #[cfg(feature = "parquet")]
    Parquet,
}

impl Format {
    /// Name of a shard.
    pub(super) fn shard(self, number: u64) -> String {
        format!("shard-{number:06}.{}", self.ending())
    }

    /// Ending of the name of a shard.
    pub(super) fn ending(self) -> &'static str {
        match self {
            Self::Tar => "tar",
            #[cfg(feature = "parquet")]
            Self::Parquet => "parquet",
        }
    }
}

/// Writes a folder of pictures as shards, JPEGs with seek points. See the [module](super).
///
/// ```no_run
/// use feedline_prepare::{Event, Format, Shards};
/// use std::ops::ControlFlow;
///
/// let finished = Shards::new(Format::Tar).shuffle(7).write("train/", "shards/", |event| {
///     if let Event::Inputs { done, total, .. } = event {
///         println!("{done} of {total} pictures");
///     }
///     ControlFlow::Continue(())
/// })?;
/// println!("{finished}");
/// # Ok::<(), feedline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Shards {
    pub(super) settings: ShardSettings,
    pub(super) workers: usize,
    size: ShardSize,
}

/// Settings that determine the output, as stored in a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ShardSettings {
    /// Ending of a shard's file name.
    pub(super) format: String,
    pub(super) seek_points: bool,
    pub(super) bytes_max: u64,
    pub(super) seed: Option<u64>,
    /// A task without damage has the same output either way, so a plan stores this in its notes.
    #[serde(skip)]
    pub(super) skip_damaged: bool,
}

impl ShardSettings {
    /// The output format. Errors: a format that this build lacks.
    pub(super) fn format(&self) -> Result<Format> {
        match &*self.format {
            "tar" => Ok(Format::Tar),
            #[cfg(feature = "parquet")]
            "parquet" => Ok(Format::Parquet),
            other => Err(config(format!(
                "the plan writes {other}; this program was built without it"
            ))),
        }
    }
}

/// Limit of a shard.
#[derive(Clone, Copy, Debug)]
enum ShardSize {
    Samples(u64),
    Bytes(u64),
}

impl Shards {
    /// Defaults: shards of 256 MiB in the order of the folder, with seek points, one worker per
    /// core, damage refused.
    pub fn new(format: Format) -> Self {
        let format = format.ending().into();
        let size = ShardSize::Bytes(256 << 20);
        let settings = ShardSettings {
            format,
            seek_points: true,
            bytes_max: 256 << 20,
            seed: None,
            skip_damaged: false,
        };
        Self {
            settings,
            workers: 0,
            size,
        }
    }

    /// Sets whether sequential JPEGs get seek points. Without them, all pictures are copied unread.
    #[must_use]
    pub fn seek_points(mut self, points: bool) -> Self {
        self.settings.seek_points = points;
        self
    }

    /// Limits the bytes of a picture; a larger picture counts as damaged.
    #[must_use]
    pub fn bytes_max(mut self, bytes: u64) -> Self {
        self.settings.bytes_max = bytes;
        self
    }

    /// Sets the maximum samples of a shard for [`write`](Self::write): *n* samples become ⌈*n* /
    /// `samples`⌉ shards, which differ by at most one sample. Replaces the limit of bytes.
    #[must_use]
    pub fn samples_per_shard(mut self, samples: u64) -> Self {
        self.size = ShardSize::Samples(samples);
        self
    }

    /// Sets the mean bytes of a shard for [`write`](Self::write): pictures of *b* bytes in all
    /// become ⌈*b* / `bytes`⌉ shards (at most one per picture), which differ by at most one sample.
    /// Seek points and framing are not counted. Replaces the limit of samples.
    #[must_use]
    pub fn bytes_per_shard(mut self, bytes: u64) -> Self {
        self.size = ShardSize::Bytes(bytes);
        self
    }

    /// Shuffles the samples over all shards, so that shards read from front to back are random
    /// enough.
    #[must_use]
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.settings.seed = Some(seed);
        self
    }

    /// Leaves damaged pictures out and lists them in `damaged.tsv`. Otherwise the first damaged
    /// picture ends [`write`](Self::write), or fails its task of a plan.
    #[must_use]
    pub fn skip_damaged(mut self, skip: bool) -> Self {
        self.settings.skip_damaged = skip;
        self
    }

    /// Sets the number of threads of [`write`](Self::write); 0: one per core.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Number of shards for `samples` pictures with `bytes` bytes in all. Errors: a limit of 0 per
    /// shard.
    pub(super) fn count(&self, samples: u64, bytes: u64) -> Result<u64> {
        let (all, each) = match self.size {
            ShardSize::Samples(each) => (samples, each),
            ShardSize::Bytes(each) => (bytes, each),
        };
        if each == 0 {
            return Err(config(
                "a shard of at most 0 samples or bytes: allow at least 1",
            ));
        }
        Ok(all.div_ceil(each).clamp(1, samples.max(1)))
    }
}

/// Whether a file with this name, at the top of the folder, may come from an earlier call.
pub(super) fn is_ours(name: &str) -> bool {
    // The index of a tar shard that was read: `shard-000000.tar.0a1b2c3d.fdx`.
    let index = name
        .strip_suffix(".fdx")
        .and_then(|rest| rest.rsplit_once('.'))
        .map(|(shard, _)| shard);
    let number = |ending: &str| {
        index
            .unwrap_or(name)
            .strip_prefix("shard-")?
            .strip_suffix(ending)
    };
    let number = number(".tar").or_else(|| number(".parquet"));
    let shard = number
        .is_some_and(|text| text.len() >= 6 && text.bytes().all(|byte| byte.is_ascii_digit()));
    shard || [MANIFEST, LEDGER, PLAN].contains(&name)
}
