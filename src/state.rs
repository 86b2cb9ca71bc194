//! The state of a run, in less than 1 KiB. A crash while it is saved leaves the old state or the
//! new one. Loading a damaged state is an error; it never returns a different state.
//!
//! ```text
//! loader ──► Checkpoint { cursor, order, dataset, past, … } ──► State ──JSON──► .name.pid.n.tmp ─fsync─rename─► file
//!                                                            ▲ version, CRC32C of all values, sanity │
//!                                                            └───────────────────────────────────────┘
//! ```
//!
//! The cursor counts positions of the epoch that were delivered to *all* ranks together. So a state
//! is the same on every rank, and a different number of ranks can resume from it.
//!
//! Limits: a file of at most 64 KiB is read. Invariants:
//! - A loaded state equals the saved one, or loading fails: the CRC32C covers the values in one
//!   binary order, so it does not depend on the format (JSON here; any of serde's elsewhere).
//! - Loading a state of an unknown version fails with that version, whatever else has changed in
//!   it. The version comes first.
//! - A rename replaces the file: at any time it is the old one or the new one, even after a kill.
//!   After [`State::save`] this holds even after a power loss.

use crate::order::{LastBatch, OrderKind, Settings, Skips};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::metadata::fnv;
use feedline_core::dataset::Fingerprint;
use feedline_core::order::GroupsMark;
use feedline_core::storage::publish::{Folder, publish};
use rustix::fs::{FileType, Mode, OFlags};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::{fmt, io};

/// The format version; other versions are rejected.
const VERSION: u32 = 3;
/// Maximum bytes of a file; a state has less than 1 KiB.
const BYTES_MAX: u64 = 64 << 10;
/// Maximum characters of a parser's message in an error.
const WORDS_MAX: usize = 200;
/// Maximum number of ranks that an error names.
const RANKS_MAX: usize = 16;

/// The state of a run between two batches: the same on all ranks, and enough to resume with any
/// number of ranks.
///
/// [`save`](Self::save) and [`to_bytes`](Self::to_bytes) write it as less than 1 KiB of JSON;
/// serde's traits store it in any other checkpoint. Every form contains a version, a checksum over
/// all values and the fingerprint of the dataset.
///
/// ```no_run
/// use feedline::State;
/// let state = State::load("checkpoints/step-1200.loader")?;
/// println!("{state}"); // epoch 3, step 1200 (batch 40 of the epoch, position 10240)
/// state.save("checkpoints/latest.loader")?;
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub struct State {
    checkpoint: Checkpoint,
}

/// The contents of a state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Checkpoint {
    pub(crate) cursor: Cursor,
    /// Rows of a batch over all ranks.
    pub(crate) global_batch: u64,
    pub(crate) last: LastBatch,
    pub(crate) order: Settings,
    /// Seed of the random draws in decoders and transforms.
    pub(crate) draws: u64,
    pub(crate) dataset: Fingerprint,
    /// Batches that are still to be skipped.
    pub(crate) skips: Skips,
    /// For a mixture: the part of its schedule that is fixed. The later part may change.
    pub(crate) past: Option<Past>,
    /// For grouped orders. `None` in states of older versions, in which each group had its own last
    /// batch.
    pub(crate) groups: Option<GroupsMark>,
}

/// The part of a mixture's schedule that cannot change any more: the part before the position at
/// which the state was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Past {
    pub(crate) epoch: u64,
    pub(crate) position: u64,
    pub(crate) segments: u64,
    pub(crate) hash: u64,
}

impl Past {
    fn words(&self) -> [u64; 4] {
        [self.epoch, self.position, self.segments, self.hash]
    }
}

/// The position of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Cursor {
    pub(crate) epoch: u64,
    /// Positions of the epoch delivered so far, to all ranks together.
    pub(crate) position: u64,
    /// Index of the next global batch in the epoch.
    pub(crate) batch: u64,
    /// Batches since the beginning of the run, over all epochs and resumes.
    pub(crate) steps: u64,
}

impl Checkpoint {
    /// CRC32C of all values, in the field order of this format version.
    fn check(&self) -> u32 {
        let Self {
            cursor,
            global_batch,
            last,
            order,
            draws,
            dataset,
            skips,
            ..
        } = self;
        let kind = match order.kind {
            OrderKind::Sequential => 0,
            OrderKind::Shuffled => 1,
            OrderKind::Windowed => 2,
            OrderKind::Indices => 3,
            OrderKind::Sampler => 4,
            OrderKind::Grouped => 5,
            OrderKind::Weighted => 6,
        };
        let last = match last {
            LastBatch::Keep => 0,
            LastBatch::Mask => 1,
            LastBatch::Pad => 2,
            LastBatch::Drop => 3,
        };
        let cursor = [cursor.epoch, cursor.position, cursor.batch, cursor.steps];
        let Settings {
            shuffled,
            seed,
            window,
            lanes,
            positions,
            identity,
            ..
        } = *order;
        let order = [
            kind,
            u64::from(shuffled),
            seed,
            window,
            lanes,
            positions,
            identity,
        ];
        let words = [u64::from(VERSION)]
            .into_iter()
            .chain(cursor)
            .chain([*global_batch, last])
            .chain(order);
        let skips = skips
            .iter()
            .flat_map(|skip| [skip.epoch, skip.start, skip.end]);
        let words = words
            .chain([*draws])
            .chain(dataset.words())
            .chain(
                dataset
                    .commits()
                    .iter()
                    .map(|commit| fnv(commit.as_bytes())),
            )
            .chain(skips)
            .chain(self.more().into_iter().flatten());
        words.fold(0, |crc, word| {
            crc32c::crc32c_append(crc, &word.to_le_bytes())
        })
    }

    /// The additional values of a mixture or of a grouped order; no order is both.
    fn more(&self) -> Option<[u64; 4]> {
        self.past
            .as_ref()
            .map(Past::words)
            .or(self.groups.as_ref().map(GroupsMark::words))
    }

    /// Why no run can have this state; `None` if the state is valid.
    fn validate(&self) -> Option<String> {
        let position = self.cursor.position;
        let positions = self.order.positions;
        if position > positions {
            return Some(format!(
                "position {position} is past the end of the epoch ({positions} positions)"
            ));
        }
        if self.global_batch == 0 {
            return Some("a global batch of 0 rows".into());
        }
        (!self.skips.are_legal())
            .then(|| "the ranges of batches to skip are empty or overlap".into())
    }

    /// The numbers that decide the sequence of samples, with their names.
    pub(crate) fn numbers(&self) -> [(&'static str, u64); 5] {
        let Settings {
            seed,
            window,
            lanes,
            positions,
            ..
        } = self.order;
        [
            ("seed of the order", seed),
            ("seed of transforms", self.draws),
            ("window", window),
            ("number of lanes", lanes),
            ("number of positions in an epoch", positions),
        ]
    }

    /// How this rank's state differs from `others`, as the rest of a sentence that begins `rank 3`
    /// or `ranks 3, 5`.
    fn diff(&self, others: &Self, is: &str, has: &str) -> String {
        let own = &self.cursor;
        let theirs = &others.cursor;
        if self.dataset != others.dataset {
            let size = |print: &Fingerprint| {
                format!("{} samples in {} shards", print.samples(), print.shards())
            };
            return format!(
                "{has} a different dataset ({}; the others have {})",
                size(&self.dataset),
                size(&others.dataset)
            );
        }
        if self.order.kind != others.order.kind || self.last != others.last {
            let settings = |checkpoint: &Self| {
                format!("{:?}, {:?}", checkpoint.order.kind, checkpoint.last).to_lowercase()
            };
            return format!(
                "{has} different settings ({}; the others have {})",
                settings(self),
                settings(others)
            );
        }
        let settings = |checkpoint: &Self| {
            let shuffled = checkpoint.order.shuffled;
            let rest = [("shuffle", u64::from(shuffled))];
            std::iter::once(("global batch", checkpoint.global_batch))
                .chain(checkpoint.numbers())
                .chain(rest)
        };
        if let Some(((what, own), (_, theirs))) = settings(self)
            .zip(settings(others))
            .find(|(own, theirs)| own != theirs)
        {
            return format!("{has} a different {what} ({own}; the others have {theirs})");
        }
        if self.order.identity != others.order.identity {
            // The identity is a hash: it shows only that the orders differ, so look for the reason.
            return match (self.order.kind, self.past, others.past) {
                (_, Some(own), Some(theirs)) if own.segments != theirs.segments => format!(
                    "{has} a different schedule of the mix ({} segments had begun; on the others \
                     {})",
                    own.segments, theirs.segments
                ),
                (_, Some(own), Some(theirs)) if own.hash == theirs.hash => {
                    format!("{has} a different schedule of the mix, in segments that begin later")
                }
                (_, Some(_), _) => {
                    format!("{has} a different mix: its weights, first positions, sources or key")
                }
                (OrderKind::Indices, ..) => format!("{has} a different list of indices"),
                (OrderKind::Grouped, ..) => format!("{has} different groups or batch sizes"),
                (OrderKind::Windowed, ..) => format!("{has} a different run length"),
                (OrderKind::Weighted, ..) => format!("{has} different weights"),
                _ => format!("{has} a different sampler"),
            };
        }
        if self.skips != others.skips {
            let all = |checkpoint: &Self| match checkpoint
                .skips
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
            {
                none if none.is_empty() => "none".into(),
                some => some.join(", "),
            };
            return format!(
                "{has} different batches to skip ({}; the others have {})",
                all(self),
                all(others)
            );
        }
        let places = [
            ("step", own.steps, theirs.steps),
            ("epoch", own.epoch, theirs.epoch),
            ("position", own.position, theirs.position),
            ("batch", own.batch, theirs.batch),
        ];
        let place = places.iter().find(|(_, own, theirs)| own != theirs);
        match place {
            Some((what, own, theirs)) => format!("{is} at {what} {own}, the others at {theirs}"),
            None if self.groups != others.groups => {
                format!("{has} a different budget, multiple or bounds of its groups")
            }
            None => format!("{has} a different past of the mixture"),
        }
    }
}

impl State {
    /// Maximum bytes of a state with skipped batches. It is less than 1 KiB because the numbers may
    /// grow before the run has passed the skipped batches, and Python writes spaces between them.
    pub(crate) const BYTES_WITH_SKIPS: usize = 940;

    /// The state of a loader at this checkpoint.
    pub(crate) fn new(checkpoint: Checkpoint) -> Self {
        debug_assert_eq!(checkpoint.validate(), None);
        Self { checkpoint }
    }

    /// The checkpoint that a loader resumes from.
    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The epoch of the next batch.
    pub fn epoch(&self) -> u64 {
        self.checkpoint.cursor.epoch
    }

    /// Positions of the epoch delivered so far, to all ranks together.
    pub fn position(&self) -> u64 {
        self.checkpoint.cursor.position
    }

    /// Index of the next global batch in the epoch.
    pub fn batch(&self) -> u64 {
        self.checkpoint.cursor.batch
    }

    /// The same run at the beginning of `epoch`: for a run that ends an epoch early on purpose.
    pub fn at_epoch(self, epoch: u64) -> Self {
        let steps = self.steps();
        self.moved_to(Cursor {
            epoch,
            steps,
            ..Cursor::default()
        })
    }

    /// The same run at `cursor`. Drops the batches to skip that lie before it.
    pub(crate) fn moved_to(mut self, cursor: Cursor) -> Self {
        self.checkpoint.skips = self.checkpoint.skips.ahead(cursor.epoch, cursor.batch);
        self.checkpoint.cursor = cursor;
        self
    }

    /// The same run, `batches` global batches further in its order and, if necessary, in a later
    /// epoch: for a run that skips the next batches. Skipped batches do not count as
    /// [`steps`](Self::steps). To skip later batches, use [`Loader::skip`](crate::Loader::skip); to
    /// count batches that were trained, [`trained`](Self::trained).
    ///
    /// After the last batch of an epoch, the state stays at the end of that epoch; a run that
    /// resumes from it begins the next epoch.
    pub fn advance(self, batches: u64) -> Self {
        let Checkpoint {
            cursor,
            global_batch,
            last,
            order,
            ..
        } = &self.checkpoint;
        let count = |positions: u64| match last {
            LastBatch::Drop => positions / global_batch,
            _ => positions.div_ceil(*global_batch),
        };
        let left = count(order.positions - cursor.position);
        let whole = count(order.positions);
        let mut next = *cursor;
        let mut further = batches.min(left);
        if batches > left && whole > 0 {
            let later = batches - left - 1;
            let epoch = cursor.epoch.saturating_add(later / whole).saturating_add(1);
            next = Cursor {
                epoch,
                position: 0,
                batch: 0,
                ..*cursor
            };
            further = later % whole + 1;
        }
        next.position = next
            .position
            .saturating_add(further.saturating_mul(*global_batch))
            .min(order.positions);
        next.batch = next.batch.saturating_add(further).min(next.position);
        self.moved_to(next)
    }

    /// Batches received since the beginning of the run, over all epochs and resumes.
    pub fn steps(&self) -> u64 {
        self.checkpoint.cursor.steps
    }

    /// Rows of a batch, over all ranks together.
    pub fn global_batch(&self) -> u64 {
        self.checkpoint.global_batch
    }

    /// The dataset that the run was started with.
    #[cfg(any(test, feature = "unstable"))]
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.checkpoint.dataset
    }

    /// Reads a file written by [`save`](Self::save). Links are followed.
    ///
    /// Errors, each with the path: [`ErrorKind::NotFound`], [`ErrorKind::NotAFile`],
    /// [`ErrorKind::State`] for content that [`from_bytes`](Self::from_bytes) rejects and for files
    /// over 64 KiB; file system errors.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let state = read(path).and_then(|bytes| Self::from_bytes(&bytes));
        state.map_err(|error| error.with_path(path))
    }

    /// Reads the state from bytes that [`to_bytes`](Self::to_bytes) returned.
    ///
    /// Errors: [`ErrorKind::State`] for bytes that were cut or damaged, that contain something
    /// else, or whose version is not supported.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > BYTES_MAX {
            return Err(bad(format!(
                "{} bytes; a state has less than 1 KiB",
                bytes.len()
            )));
        }
        if bytes.is_empty() {
            return Err(bad("an empty file: truncated, or never written"));
        }
        // The version is read first, because the other values may have other types in another
        // version.
        let version: StateVersion = serde_json::from_slice(bytes).map_err(unread)?;
        known(version.version).map_err(bad)?;
        let raw: Raw = serde_json::from_slice(bytes).map_err(unread)?;
        Self::try_from(raw)
    }

    /// One line of JSON, less than 1 KiB; the same bytes for equal states.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and text")
    }

    /// Writes the state to a file, as a whole or not at all. It writes a temporary file in the same
    /// folder (`.NAME.PID.N.tmp`), syncs it to the device, renames it, and syncs the folder. On a
    /// local disk that takes milliseconds; [`save_unsynced`](Self::save_unsynced) does not wait.
    ///
    /// After an error, the file is unchanged and the temporary file is gone. One exception: if the
    /// folder cannot be synced, the new file is already in place. A process that is killed leaves
    /// the old file or the new one, and maybe a temporary file, which nothing reads or removes. If
    /// several processes save to the same path at the same time, one of them wins.
    ///
    /// The file's mode is 0644 less the umask. A symbolic link at `path` is replaced; its target
    /// stays unchanged.
    ///
    /// Errors, each with the path: [`ErrorKind::NotFound`] naming the folder that does not exist,
    /// [`ErrorKind::NotAFile`] if the path is a folder, a device or the like, [`ErrorKind::Config`]
    /// for a path without a file name; file system errors.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), &self.to_bytes(), true)
    }

    /// Like [`save`](Self::save), but does not wait for the device. A process that is killed leaves
    /// the old file or the new one. A machine that loses power may leave an empty or damaged file,
    /// which [`load`](Self::load) refuses.
    ///
    /// Errors: see [`save`](Self::save).
    pub fn save_unsynced(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), &self.to_bytes(), false)
    }

    /// Checks that all ranks are at the same position of the same run; `states[i]` is the state of
    /// rank *i*.
    ///
    /// Errors: [`ErrorKind::State`], which names the ranks that differ from the majority, and the
    /// difference; [`ErrorKind::Config`] for no states.
    pub fn agree(states: &[Self]) -> Result<()> {
        // Each distinct state with its ranks, in the order of their first ranks.
        let mut groups = Vec::<(&Self, Vec<usize>)>::new();
        let mut group_of = HashMap::new();
        for (rank, state) in states.iter().enumerate() {
            let group = *group_of.entry(state).or_insert(groups.len());
            match groups.get_mut(group) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((state, vec![rank])),
            }
        }
        // The first of the largest groups.
        let Some(most) = (0..groups.len())
            .rev()
            .max_by_key(|group| groups[*group].1.len())
        else {
            return Err(Error::new(
                ErrorKind::Config,
                Stage::State,
                "no states to compare",
            ));
        };
        let (common, _) = groups.remove(most);
        if groups.is_empty() {
            Ok(())
        } else {
            Err(bad(disagreement(common, &groups)))
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cursor {
            epoch,
            position,
            batch,
            steps,
        } = self.checkpoint.cursor;
        write!(
            f,
            "epoch {epoch}, step {steps} (batch {batch} of the epoch, position {position})"
        )
    }
}

/// `ranks 3, 5 are at step 1200, the others at 1201`.
fn disagreement(common: &State, groups: &[(&State, Vec<usize>)]) -> String {
    let mut clauses = Vec::new();
    let mut named = 0;
    for (state, ranks) in groups {
        let shown = &ranks[..ranks.len().min(RANKS_MAX - named)];
        let Some((first, more)) = shown.split_first() else {
            break;
        };
        named += shown.len();
        let mut list = format!("rank{} {first}", if ranks.len() == 1 { "" } else { "s" });
        more.iter().for_each(|rank| list += &format!(", {rank}"));
        if shown.len() < ranks.len() {
            list += &format!(" and {} more", ranks.len() - shown.len());
        }
        let (is, has) = if ranks.len() == 1 {
            ("is", "has")
        } else {
            ("are", "have")
        };
        clauses.push(format!(
            "{list} {}",
            state.checkpoint.diff(&common.checkpoint, is, has)
        ));
    }
    let rest: usize = groups[clauses.len()..]
        .iter()
        .map(|(_, ranks)| ranks.len())
        .sum();
    if rest > 0 {
        clauses.push(format!("and {rest} more differ"));
    }
    clauses.join("; ")
}

fn bad(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::State, Stage::State, message)
}

/// The error for text that a parser refused.
fn unread(error: serde_json::Error) -> Error {
    let message = if error.is_eof() {
        "truncated: it ends too early"
    } else {
        "not a saved state, or damaged"
    };
    let mut words = error.to_string();
    if error.is_data()
        && !["missing", "unknown", "duplicate"]
            .iter()
            .any(|kind| words.starts_with(kind))
    {
        // The parser's message names internal types of this crate, so replace it.
        words = "a value has the wrong type".into();
    }
    if let Some((end, _)) = words.char_indices().nth(WORDS_MAX) {
        words.replace_range(end.., "…");
    }
    bad(message).with_source(words)
}

/// Errors: the message for a version that is not supported.
fn known(version: u64) -> Result<u32, String> {
    match u32::try_from(version) {
        Ok(VERSION) => Ok(VERSION),
        _ => Err(format!(
            "the state has version {version}, this feedline reads version {VERSION}: resume with \
             the release that saved it, or start a new run"
        )),
    }
}

/// Only the version, the one field that every format version has.
#[derive(Deserialize)]
struct StateVersion {
    version: u64,
}

/// The stored form of a state. The version comes first, so that an unknown version is the first
/// error.
#[derive(Serialize, Deserialize)]
#[serde(rename = "State")]
struct Raw {
    #[serde(deserialize_with = "known_version")]
    version: u32,
    epoch: u64,
    position: u64,
    batch: u64,
    steps: u64,
    global_batch: u64,
    last: LastBatch,
    order: Settings,
    draws: u64,
    dataset: Fingerprint,
    skip: Skips,
    /// The values of a mixture, or the [`GroupsMark`] of a grouped order.
    #[serde(deserialize_with = "required")]
    past: Option<[u64; 4]>,
    check: u32,
}

/// Makes the value mandatory: without this, a missing value would be `None`.
fn required<'de, D: Deserializer<'de>>(from: D) -> Result<Option<[u64; 4]>, D::Error> {
    Option::deserialize(from)
}

fn known_version<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    known(u32::deserialize(from)?.into()).map_err(serde::de::Error::custom)
}

impl From<State> for Raw {
    fn from(state: State) -> Self {
        let check = state.checkpoint.check();
        let past = state.checkpoint.more();
        let Checkpoint {
            cursor,
            global_batch,
            last,
            order,
            draws,
            dataset,
            skips: skip,
            ..
        } = state.checkpoint;
        let Cursor {
            epoch,
            position,
            batch,
            steps,
        } = cursor;
        let version = VERSION;
        Self {
            version,
            epoch,
            position,
            batch,
            steps,
            global_batch,
            last,
            order,
            draws,
            dataset,
            skip,
            past,
            check,
        }
    }
}

impl TryFrom<Raw> for State {
    type Error = Error;

    fn try_from(raw: Raw) -> Result<Self> {
        let Raw {
            epoch,
            position,
            batch,
            steps,
            global_batch,
            last,
            order,
            draws,
            dataset,
            skip,
            past,
            check,
            ..
        } = raw;
        let cursor = Cursor {
            epoch,
            position,
            batch,
            steps,
        };
        let grouped = order.kind == OrderKind::Grouped;
        let groups = past.filter(|_| grouped).map(GroupsMark::of_words);
        let past = past.filter(|_| !grouped);
        let past = past.map(|[epoch, position, segments, hash]| Past {
            epoch,
            position,
            segments,
            hash,
        });
        let checkpoint = Checkpoint {
            cursor,
            global_batch,
            last,
            order,
            draws,
            dataset,
            skips: skip,
            past,
            groups,
        };
        let found = checkpoint.check();
        if found != check {
            return Err(bad(format!(
                "damaged: its values have CRC32C {found}, the stored CRC32C is {check}"
            )));
        }
        match checkpoint.validate() {
            Some(what) => Err(bad(what)),
            None => Ok(Self { checkpoint }),
        }
    }
}

/// The bytes of a small regular file.
fn read(path: &Path) -> Result<Vec<u8>> {
    let failed = |source: io::Error| Error::os(Stage::State, "cannot read the state", source);
    // `NONBLOCK`: opening a FIFO must not wait.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| failed(errno.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Error::new(
            ErrorKind::NotAFile,
            Stage::State,
            "a state must be a regular file",
        ));
    }
    let too_large = |len: u64| {
        Err(bad(format!(
            "{len} bytes or more; a state has less than 1 KiB"
        )))
    };
    if stat.st_size as u64 > BYTES_MAX {
        return too_large(stat.st_size as u64);
    }
    let mut bytes = Vec::new();
    // The file may grow during the read.
    File::from(fd)
        .take(BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > BYTES_MAX {
        too_large(bytes.len() as u64)
    } else {
        Ok(bytes)
    }
}

/// Writes these bytes to `path`, as a whole or not at all.
fn write(path: &Path, bytes: &[u8], sync: bool) -> Result<()> {
    if path.file_name().is_none() {
        return Err(Error::new(
            ErrorKind::Config,
            Stage::State,
            "a path without a file name",
        )
        .with_path(path));
    }
    // Checked here, because the rename would replace a device with a file.
    if path
        .symlink_metadata()
        .is_ok_and(|meta| !meta.is_file() && !meta.is_symlink())
    {
        return Err(Error::new(
            ErrorKind::NotAFile,
            Stage::State,
            "the path exists and is not a file",
        )
        .with_path(path));
    }
    // Opened before the write: a folder that cannot be opened cannot be synced.
    let folder = match Folder::of(path) {
        Ok(folder) => Some(folder),
        Err(source) if sync || source.kind() == io::ErrorKind::NotFound => {
            let dir = path
                .parent()
                .filter(|dir| !dir.as_os_str().is_empty())
                .unwrap_or(Path::new("."));
            return Err(Error::os(
                Stage::State,
                "cannot open the folder to save a state in",
                source,
            )
            .with_path(dir));
        }
        Err(_) => None,
    };
    publish(path, bytes, sync).map_err(|source| {
        Error::os(Stage::State, "cannot save the state", source).with_path(path)
    })?;
    let Some(folder) = folder.filter(|_| sync) else {
        return Ok(());
    };
    folder.sync().map_err(|source| {
        let message =
            "the state is saved, but its folder cannot be synced: it may not survive a power cut";
        Error::os(Stage::State, message, source).with_path(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Skip;
    use proptest::prelude::*;

    /// A change of this file is a change of the format: earlier states are no longer read.
    const PINNED: &[u8] = include_bytes!("../tests/fixtures/state/step-1200.json");
    const NEXT: &[u8] = include_bytes!("../tests/fixtures/state/step-1201.json");

    fn cursor(steps: u64) -> Cursor {
        Cursor {
            epoch: 3,
            position: 10_240 + (steps - 1200) * 256,
            batch: steps - 1160,
            steps,
        }
    }

    fn checkpoint() -> Checkpoint {
        Checkpoint {
            cursor: cursor(1200),
            global_batch: 256,
            last: LastBatch::Keep,
            order: Settings {
                kind: OrderKind::Shuffled,
                shuffled: true,
                seed: 42,
                window: 0,
                lanes: 1,
                positions: 98_960,
                identity: 0,
            },
            draws: 42,
            dataset: Fingerprint::of_words(std::array::from_fn(|k| match k {
                0 => 98_960,
                1 => 64,
                _ => 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(k as u64),
            })),
            skips: Skips::default(),
            past: None,
            groups: None,
        }
    }

    fn at(steps: u64) -> State {
        State::new(Checkpoint {
            cursor: cursor(steps),
            ..checkpoint()
        })
    }

    #[track_caller]
    fn assert_is_state(error: &Error) {
        assert_eq!(error.kind(), ErrorKind::State, "{error}");
        assert_eq!(error.stage(), Stage::State, "{error}");
    }

    #[track_caller]
    fn refused(bytes: &[u8]) -> Error {
        let error = State::from_bytes(bytes).unwrap_err();
        assert_is_state(&error);
        error
    }

    /// A checkpoint of these numbers, in the order of its fields.
    fn made(
        words: [u64; 15],
        print: [u64; 22],
        kind: OrderKind,
        last: LastBatch,
        shuffled: bool,
    ) -> Checkpoint {
        let [
            epoch,
            position,
            batch,
            steps,
            global_batch,
            seed,
            window,
            lanes,
            positions,
            identity,
            draws,
            past @ ..,
        ] = words;
        let (position, positions) = (position.min(positions), position.max(positions));
        Checkpoint {
            cursor: Cursor {
                epoch,
                position,
                batch,
                steps,
            },
            global_batch: global_batch.max(1),
            last,
            order: Settings {
                kind,
                shuffled,
                seed,
                window,
                lanes,
                positions,
                identity,
            },
            draws,
            dataset: Fingerprint::of_words(print),
            skips: Skips::default(),
            past: (kind == OrderKind::Sampler).then(|| {
                let [epoch, position, segments, hash] = past;
                Past {
                    epoch,
                    position,
                    segments,
                    hash,
                }
            }),
            groups: (kind == OrderKind::Grouped && shuffled).then(|| GroupsMark::of_words(past)),
        }
    }

    fn checkpoints() -> impl Strategy<Value = Checkpoint> {
        let kinds = vec![
            OrderKind::Sequential,
            OrderKind::Shuffled,
            OrderKind::Windowed,
            OrderKind::Indices,
            OrderKind::Sampler,
            OrderKind::Grouped,
            OrderKind::Weighted,
        ];
        let lasts = vec![
            LastBatch::Keep,
            LastBatch::Mask,
            LastBatch::Pad,
            LastBatch::Drop,
        ];
        (
            any::<[u64; 15]>(),
            any::<[u64; 22]>(),
            prop::sample::select(kinds),
            prop::sample::select(lasts),
            any::<bool>(),
            prop::collection::vec((0_u64..1 << 16, 0_u64..1 << 32, 1_u64..1 << 10), 0..3),
        )
            .prop_map(|(words, print, kind, last, shuffled, skips)| {
                let mut checkpoint = made(words, print, kind, last, shuffled);
                for (epoch, start, len) in skips {
                    let _ = checkpoint.skips.add(Skip {
                        epoch,
                        start,
                        end: start + len,
                    });
                }
                checkpoint
            })
    }

    proptest! {
        #[test]
        fn every_state_comes_back_by_any_format(checkpoint in checkpoints()) {
            let state = State::new(checkpoint.clone());
            prop_assert_eq!(state.checkpoint(), &checkpoint);
            let text = state.to_bytes();
            // A loader accepts skips only as long as they fit.
            prop_assert!(text.len() < 1024 || checkpoint.skips.iter().len() > 0);
            prop_assert_eq!(&State::from_bytes(&text).unwrap(), &state);
            let value = serde_json::to_value(&state).unwrap();
            prop_assert_eq!(&serde_json::from_value::<State>(value).unwrap(), &state);
            let packed = postcard::to_allocvec(&state).unwrap();
            prop_assert_eq!(&postcard::from_bytes::<State>(&packed).unwrap(), &state);
        }

        #[test]
        fn no_bytes_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(State::from_bytes(&bytes).unwrap_err().kind(), ErrorKind::State);
            prop_assert!(postcard::from_bytes::<State>(&bytes).is_err());
        }

        #[test]
        fn different_states_have_different_checksums(a in checkpoints(), b in checkpoints()) {
            prop_assert_eq!(a.check() == b.check(), a == b);
        }
    }

    #[test]
    fn the_text_is_pinned() {
        for (steps, pinned) in [(1200, PINNED), (1201, NEXT)] {
            let text = String::from_utf8(at(steps).to_bytes()).unwrap();
            assert_eq!(text, String::from_utf8_lossy(pinned));
            assert_eq!(State::from_bytes(pinned).unwrap(), at(steps));
            let value: serde_json::Value = serde_json::from_slice(pinned).unwrap();
            let pretty = serde_json::to_vec_pretty(&value).unwrap();
            assert_eq!(State::from_bytes(&pretty).unwrap(), at(steps));
        }
    }

    #[test]
    fn a_state_of_the_largest_numbers_is_less_than_1_kib() {
        let words = [u64::MAX; 15];
        let print = [u64::MAX; 22];
        let largest = made(words, print, OrderKind::Sampler, LastBatch::Keep, false);
        let text = State::new(largest).to_bytes();
        assert!(text.len() < 1024, "{}", text.len());
        State::from_bytes(&text).unwrap();
    }

    #[test]
    fn every_value_is_covered_by_the_checksum() {
        let past = Past {
            epoch: 3,
            position: 10_240,
            segments: 2,
            hash: 7,
        };
        let mixture = State::new(Checkpoint {
            past: Some(past),
            ..checkpoint()
        });
        check_values(PINNED, 6 + 7 + 7 + 5);
        check_values(&mixture.to_bytes(), 6 + 7 + 7 + 5);
    }

    /// Checks that a change of any of the `count` values of a state is found.
    fn check_values(state: &[u8], count: usize) {
        let value: serde_json::Value = serde_json::from_slice(state).unwrap();
        let mut paths = Vec::new();
        for (key, own) in value.as_object().unwrap() {
            match own.as_object() {
                Some(inner) => {
                    paths.extend(inner.keys().map(|inner| vec![key.clone(), inner.clone()]))
                }
                None => paths.push(vec![key.clone()]),
            }
        }
        assert_eq!(paths.len(), count, "{value}");
        for path in paths {
            let now = path.iter().fold(&value, |value, key| &value[key]);
            let others: Vec<serde_json::Value> = match now {
                serde_json::Value::Number(number) => {
                    let now = number.as_u64().unwrap();
                    let near = [
                        now + 1,
                        now.wrapping_sub(1),
                        0,
                        1,
                        51,
                        u64::from(u32::MAX),
                        u64::MAX - 1,
                        u64::MAX,
                    ];
                    let others = near.into_iter().filter(|other| *other != now);
                    others.map(Into::into).collect()
                }
                serde_json::Value::Null => vec![serde_json::json!([0, 0, 0, 0])],
                serde_json::Value::Bool(on) => vec![(!on).into()],
                serde_json::Value::Array(past) if past.len() == 4 => (0..4)
                    .map(|at| {
                        let mut other = past.clone();
                        other[at] = 9.into();
                        other.into()
                    })
                    .chain([serde_json::Value::Null])
                    .collect(),
                serde_json::Value::Array(_) => vec![serde_json::json!([[3, 50, 60]])],
                serde_json::Value::String(code) => match code.as_str() {
                    "keep" => vec!["drop".into()],
                    "shuffled" => vec!["windowed".into(), "sequential".into()],
                    hex => {
                        let last = if hex.ends_with('0') { "1" } else { "0" };
                        vec![format!("{}{last}", &hex[..hex.len() - 1]).into()]
                    }
                },
                other => panic!("{other}"),
            };
            for other in others {
                let mut changed = value.clone();
                *path.iter().fold(&mut changed, |value, key| &mut value[key]) = other.clone();
                let error = State::from_bytes(&serde_json::to_vec(&changed).unwrap()).unwrap_err();
                let expected = match other.as_u64() {
                    _ if path == ["version"] => &format!("the state has version {other}"),
                    Some(check) if path == ["check"] && check > u64::from(u32::MAX) => {
                        "not a saved state, or damaged"
                    }
                    _ => "damaged: its values have CRC32C",
                };
                let is_named = error.message().starts_with(expected);
                assert!(is_named, "{path:?} {other}: {error}");
            }
        }
    }

    #[test]
    fn a_cut_or_flipped_packed_state_is_refused() {
        let packed = postcard::to_allocvec(&State::new(checkpoint())).unwrap();
        let is_refused = |bytes: &[u8]| postcard::from_bytes::<State>(bytes).is_err();
        for len in 0..packed.len() {
            assert!(is_refused(&packed[..len]), "{len}");
        }
        for bit in 0..packed.len() * 8 {
            let mut flipped = packed.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(is_refused(&flipped), "bit {bit}");
        }
    }

    #[test]
    fn a_state_has_the_commits_of_its_dataset() {
        let with = |digit: &str| {
            let commits = vec![
                digit.repeat(40),
                "0".repeat(40),
                "1".repeat(40),
                "2".repeat(40),
            ];
            let dataset = checkpoint().dataset.with_commits(commits);
            State::new(Checkpoint {
                dataset,
                ..checkpoint()
            })
        };
        let text = String::from_utf8(with("a").to_bytes()).unwrap();
        assert!(text.len() < 1024, "{}", text.len());
        let packed = postcard::to_allocvec(&with("a")).unwrap();
        for state in [
            State::from_bytes(text.as_bytes()).unwrap(),
            postcard::from_bytes(&packed).unwrap(),
        ] {
            assert_eq!(state.checkpoint.dataset.commits()[0], "a".repeat(40));
            // The same files in another commit are the same dataset.
            assert_eq!(state, with("b"));
        }
        let other = text.replace(&"a".repeat(40), &"b".repeat(40));
        refused(other.as_bytes());
        refused(text.replace(&"a".repeat(40), &"a".repeat(39)).as_bytes());
    }

    #[test]
    fn an_error_names_another_version_of_a_state() {
        let text = String::from_utf8(PINNED.to_vec()).unwrap();
        let of = |version: u64| text.replace("\"version\":3", &format!("\"version\":{version}"));
        let other_types = r#"{"epoch":"three","order":[],"news":{"a":1},"version":4}"#;
        let cases = [
            (4, of(4)),
            // The version before batches could be skipped.
            (2, of(2).replace("\"skip\":[],", "")),
            (1, of(1)),
            (4, r#"{"version":4}"#.into()),
            (4, other_types.into()),
            (u64::MAX, r#"{"version":18446744073709551615}"#.into()),
            (1 << 32 | 1, format!(r#"{{"version":{}}}"#, 1_u64 << 32 | 1)),
        ];
        for (version, text) in cases {
            let error = refused(text.as_bytes());
            let expected = format!(
                "state: state not usable: the state has version {version}, this feedline reads \
                 version 3: resume with the release that saved it, or start a new run"
            );
            assert_eq!(error.to_string(), expected);
        }
        // Inside another checkpoint, serde reads it.
        let newer = r#"{"version":4,"news":true,"epoch":"three"}"#;
        let error = serde_json::from_str::<State>(newer).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("the state has version 4, this feedline reads version 3"),
            "{text}"
        );
        let mut packed = postcard::to_allocvec(&State::new(checkpoint())).unwrap();
        packed[0] = 4;
        assert!(postcard::from_bytes::<State>(&packed).is_err());
    }

    #[test]
    fn any_other_text_is_one_typed_error() {
        let text = String::from_utf8(PINNED.to_vec()).unwrap();
        let with = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            text.replacen(from, to, 1).into_bytes()
        };
        let long = format!("\"last\":\"{}\"", "é".repeat(30_000));
        let epoch = |value: &str| with("\"epoch\":3", &format!("\"epoch\":{value}"));
        let twice = |pair: &str| with(pair, &format!("{pair},{pair}"));
        let no_utf8 = |byte: u8| if byte == 1 { 0xff } else { byte };
        let no_utf8 = with("keep", "ke\u{1}p").into_iter().map(no_utf8);
        let stirred = with("\"kind\":\"shuffled\"", "\"kind\":\"stirred\"");
        let deep = [&b"[".repeat(60_000)[..], &b"]".repeat(5000)].concat();
        let cases: [(&str, Vec<u8>); 25] = [
            ("nothing", Vec::new()),
            ("white space", b"   \n".to_vec()),
            ("zeroes", vec![0; 700]),
            ("not UTF-8", no_utf8.collect()),
            ("a number", b"1".to_vec()),
            ("a list", b"[1,3,10240]".to_vec()),
            ("another object", b"{}".to_vec()),
            ("NaN", epoch("NaN")),
            ("a fraction", epoch("3.0")),
            ("an exponent", epoch("3e0")),
            ("a negative number", epoch("-3")),
            ("a huge number", epoch("18446744073709551616")),
            ("a huger number", epoch(&"9".repeat(5000))),
            ("text for a number", epoch("\"3\"")),
            ("null", epoch("null")),
            ("a key twice", twice("\"epoch\":3")),
            ("the version twice", twice("\"version\":3")),
            ("an inner key twice", twice("\"seed\":42")),
            ("a missing key", with("\"epoch\":3,", "")),
            ("a missing past", with("\"past\":null,", "")),
            ("an unknown kind", stirred),
            ("long text", with("\"last\":\"keep\"", &long)),
            ("bytes behind it", [PINNED, b" x"].concat()),
            ("deep lists", deep),
            ("deep objects", br#"{"a":"#.repeat(10_000)),
        ];
        let expected = (ErrorKind::State, Stage::State);
        for (what, bytes) in cases {
            let error = State::from_bytes(&bytes).expect_err(what);
            assert_eq!((error.kind(), error.stage()), expected, "{what}");
            let text = error.to_string();
            assert!(text.len() < 1000 && !text.contains('\n'), "{what}: {text}");
        }
        let unknown = State::from_bytes(&epoch("3,\"note\":[{}]")).unwrap();
        assert_eq!(unknown, State::new(checkpoint()));
        let error = State::from_bytes(&vec![b' '; 65_537]).unwrap_err();
        assert_eq!(error.message(), "65537 bytes; a state has less than 1 KiB");
    }

    #[test]
    fn an_impossible_state_with_a_right_checksum_is_refused() {
        let mut behind = checkpoint();
        behind.cursor.position = behind.order.positions + 1;
        let mut empty = checkpoint();
        empty.global_batch = 0;
        let overlap = "the ranges of batches to skip are empty or overlap";
        let mut reversed = checkpoint();
        reversed.skips = serde_json::from_str("[[3,60,50]]").unwrap();
        for (checkpoint, expected) in [
            (
                behind,
                "position 98961 is past the end of the epoch (98960 positions)",
            ),
            (empty, "a global batch of 0 rows"),
            (reversed, overlap),
        ] {
            let error = refused(&State { checkpoint }.to_bytes());
            assert_eq!(error.message(), expected);
        }
        let mut last = checkpoint();
        last.cursor.position = last.order.positions;
        State::from_bytes(&State::new(last).to_bytes()).unwrap();
    }

    #[test]
    fn one_line_says_where_a_run_stands() {
        let state = at(1200);
        let line = "epoch 3, step 1200 (batch 40 of the epoch, position 10240)";
        assert_eq!(state.to_string(), line);
        assert_eq!((state.epoch(), state.position()), (3, 10_240));
        assert_eq!((state.batch(), state.steps()), (40, 1200));
        assert_eq!(state.global_batch(), 256);
        assert_eq!(state.fingerprint().samples(), 98_960);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn advancing_is_one_batch_after_the_other(
            positions in 1_u64..60, global in 1_u64..20, last in 0_usize..4, at in 0_u64..80, batches in 0_u64..60,
            skip in (2_u64..6, 0_u64..10, 1_u64..5)
        ) {
            let last = [LastBatch::Keep, LastBatch::Mask, LastBatch::Pad, LastBatch::Drop][last];
            let mut checkpoint = checkpoint();
            (checkpoint.global_batch, checkpoint.last, checkpoint.order.positions) = (global, last, positions);
            checkpoint.cursor = Cursor { epoch: 3, position: at.min(positions), batch: 0, steps: 9 };
            checkpoint.cursor.batch = checkpoint.cursor.position.div_ceil(global);
            let skip = Skip { epoch: skip.0, start: skip.1, end: skip.1 + skip.2 };
            checkpoint.skips.add(skip).unwrap();
            let state = State::new(checkpoint);
            let is_batch = |left: u64| left >= global || (left > 0 && last != LastBatch::Drop);
            let mut want = state.checkpoint.cursor;
            for _ in 0..if is_batch(positions) { batches } else { 0 } {
                if !is_batch(positions - want.position) {
                    want = Cursor { epoch: want.epoch + 1, position: 0, batch: 0, ..want };
                }
                (want.position, want.batch) = ((want.position + global).min(positions), want.batch + 1);
            }
            let got = state.clone().advance(batches);
            prop_assert_eq!(got.checkpoint.cursor, want);
            prop_assert_eq!(got.checkpoint.validate(), None);
            let ahead = (skip.epoch, skip.end) > (want.epoch, want.batch);
            prop_assert_eq!(got.checkpoint.skips.iter().len(), usize::from(ahead));
            prop_assert_eq!(state.clone().advance(batches / 2).advance(batches - batches / 2), got);
            state.advance(u64::MAX);
        }
    }

    #[test]
    fn any_number_of_equal_states_agrees() {
        for ranks in [1, 2, 1000] {
            State::agree(&vec![at(1200); ranks]).unwrap();
        }
        let error = State::agree(&[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert_eq!(error.message(), "no states to compare");
    }

    #[test]
    fn an_error_names_differing_ranks_and_the_difference() {
        let with = |change: &dyn Fn(&mut Checkpoint)| {
            let mut checkpoint = at(1201).checkpoint;
            change(&mut checkpoint);
            State::new(checkpoint)
        };
        let of = |changed: &[(usize, State)]| {
            let mut states = vec![at(1201); 8];
            for (rank, state) in changed {
                states[*rank] = state.clone();
            }
            let error = State::agree(&states).unwrap_err();
            assert_is_state(&error);
            error.message().to_string()
        };
        let expected = "ranks 3, 5 are at step 1200, the others at 1201";
        assert_eq!(of(&[(3, at(1200)), (5, at(1200))]), expected);
        let expected = "rank 0 is at step 1200, the others at 1201; rank 5 is at step 1202, the \
             others at 1201";
        assert_eq!(of(&[(0, at(1200)), (5, at(1202))]), expected);
        let epoch = with(&|checkpoint| checkpoint.cursor.epoch = 4);
        assert_eq!(of(&[(7, epoch)]), "rank 7 is at epoch 4, the others at 3");
        let position = with(&|checkpoint| checkpoint.cursor.position = 1);
        let expected = "rank 7 is at position 1, the others at 10496";
        assert_eq!(of(&[(7, position)]), expected);
        let batch = with(&|checkpoint| checkpoint.cursor.batch = 1);
        assert_eq!(of(&[(7, batch)]), "rank 7 is at batch 1, the others at 41");
        let seed = with(&|checkpoint| (checkpoint.order.seed, checkpoint.draws) = (1, 1));
        let expected = "rank 1 has a different seed of the order (1; the others have 42)";
        assert_eq!(of(&[(1, seed)]), expected);
        let rows = with(&|checkpoint| (checkpoint.global_batch, checkpoint.cursor.steps) = (64, 1));
        let expected = "ranks 1, 2 have a different global batch (64; the others have 256)";
        assert_eq!(of(&[(1, rows.clone()), (2, rows)]), expected);
        let last = with(&|checkpoint| checkpoint.last = LastBatch::Drop);
        let expected =
            "rank 1 has different settings (shuffled, drop; the others have shuffled, keep)";
        assert_eq!(of(&[(1, last)]), expected);
        let other = Fingerprint::of_words(std::array::from_fn(|k| if k < 2 { 7 } else { 0 }));
        let skip = Skip {
            epoch: 3,
            start: 100,
            end: 120,
        };
        let skips = with(&|checkpoint| checkpoint.skips.add(skip).unwrap());
        let expected = "rank 1 has different batches to skip (batches 100..120 of epoch 3; the others have \
             none)";
        assert_eq!(of(&[(1, skips)]), expected);
        let dataset = with(&|checkpoint| checkpoint.dataset = other.clone());
        let expected = "rank 1 has a different dataset (7 samples in 7 shards; the others have \
                        98960 samples in 64 shards)";
        assert_eq!(of(&[(1, dataset)]), expected);
    }

    #[test]
    fn every_different_setting_is_named() {
        type Change = fn(&mut Checkpoint);
        let changes: [(&str, Change); 10] = [
            ("settings", |checkpoint| {
                checkpoint.order.kind = OrderKind::Sampler
            }),
            ("seed of transforms", |checkpoint| checkpoint.draws += 1),
            ("window", |checkpoint| checkpoint.order.window += 1),
            ("lanes", |checkpoint| checkpoint.order.lanes += 1),
            ("positions", |checkpoint| checkpoint.order.positions += 1),
            ("shuffle", |checkpoint| checkpoint.order.shuffled = false),
            ("sampler", |checkpoint| checkpoint.order.identity += 1),
            ("seed of the order", |checkpoint| checkpoint.order.seed += 1),
            ("settings", |checkpoint| checkpoint.last = LastBatch::Pad),
            ("settings", |checkpoint| checkpoint.last = LastBatch::Mask),
        ];
        for (what, change) in changes {
            let mut other = checkpoint();
            change(&mut other);
            let states = [at(1200), at(1200), State::new(other)];
            let message = State::agree(&states).unwrap_err().message().to_string();
            assert!(message.starts_with("rank 2 has"), "{what}: {message}");
            assert!(message.contains(what), "{what}: {message}");
        }
    }

    #[test]
    fn of_many_ranks_16_are_named() {
        let mut states = vec![at(1201); 100];
        states[..40].fill(at(1200));
        let message = State::agree(&states).unwrap_err().message().to_string();
        let expected = "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 24 more are \
             at step 1200, the others at 1201";
        assert_eq!(message, expected);
        // All different: the first counts as the common state.
        let states: Vec<State> = (0..100).map(|rank| at(1200 + rank)).collect();
        let message = State::agree(&states).unwrap_err().message().to_string();
        let start = "rank 1 is at step 1201, the others at 1200; rank 2 ";
        assert!(message.starts_with(start), "{message}");
        let end = "rank 16 is at step 1216, the others at 1200; and 83 more differ";
        assert!(message.ends_with(end), "{message}");
    }
}
