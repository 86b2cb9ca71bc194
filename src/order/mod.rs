//! The order of an epoch: the sample at each position. Pure arithmetic; nothing is read or waited
//! for.
//!
//! ```text
//! seed, epoch ──► key ──► permutation ──┐ (when shuffled)
//!                                       ▼
//! batch, rank ──► positions ──► index ──► the dataset, a list of indices, or a sampler ──► sample id
//! ```
//!
//! Invariants, tested:
//! - The id at a position depends on (seed, epoch, position) and the dataset's length alone: not on
//!   workers, readers, faults or the number of ranks. So a checkpoint needs a position only.
//! - Every epoch of a shuffled order visits every index exactly once, each epoch in a different
//!   order.
//! - An order takes memory for the user's list of indices, groups or weights, and 24 bytes per
//!   chunk of a window. Except for weights without replacement, it keeps no other array of the
//!   dataset's length, so 10^12 samples start as fast as 10^3 (`benches/order.rs`).
//!
//! Limits: lengths, positions and ids are `u64`, any value; a batch holds at most `u32::MAX` rows.
//!
//! Start reading at [`Order`].

mod batches;
mod grouped;
mod lanes;
mod skip;
pub(crate) mod subset;
mod weights;

pub use batches::LastBatch;
pub(crate) use batches::{Batches, Counts};
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught_in, config};
#[doc(hidden)]
pub use feedline_core::order::cores_of_rank;
#[doc(inline)]
pub use feedline_core::order::{
    Drawn, Draws, Groups, Launcher, Permutation, Progress, Rank, Sampler, identity_of,
};
use feedline_core::order::{GroupsMark, Key};
pub(crate) use feedline_core::storage::Locality;
pub(crate) use grouped::{GroupedEpoch, Plan};
pub(crate) use lanes::{LanePiece, Need};
use lanes::{Lanes, Needs};
use serde::{Deserialize, Serialize};
pub(crate) use skip::{Skip, Skips};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use weights::Drawing;
pub use weights::Weights;

/// Which samples an epoch delivers, and in which order. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Order {
    source: Source,
    seed: u64,
    shuffled: bool,
    /// Chunks of a window, if samples are shuffled only within windows of chunks.
    window: Option<usize>,
    /// Samples of a chunk, if the dataset has no chunks of its own; 0 if unknown.
    block: u64,
    /// Number of lanes: parts of the chunk sequence that are read in turn.
    lanes: u32,
    groups: Option<Groups>,
    /// The batches of the groups, once the loader's settings are known.
    plan: Option<Arc<Plan>>,
}

/// Bytes of a chunk, if the dataset has no chunks of its own. A chunk covers several cache blocks,
/// and shares the first and last block with its neighbours.
const BLOCK: u64 = 32 << 20;

/// Number of prefetch hints from [`EpochOrder::ahead`] per chunk. This gives about 16 hints per
/// cache block, so that hardly any block gets none.
const HINTS: u64 = 64;

/// Maximum number of lanes.
const LANES_MAX: u32 = 65_536;

#[derive(Clone)]
enum Source {
    /// Every sample of the dataset, once.
    Dataset,
    /// The user's list, and its largest index.
    Indices {
        ids: Arc<[u64]>,
        largest: u64,
        /// For each entry, the number of equal entries before it; `None` if all differ.
        earlier: Option<Arc<[u32]>>,
    },
    Sampler(Arc<dyn Sampler>),
    Weighted(Weights),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dataset => f.write_str("Dataset"),
            Self::Indices { ids, .. } => write!(f, "{} indices", ids.len()),
            Self::Sampler(_) => f.write_str("Sampler"),
            Self::Weighted(weights) => write!(f, "{weights:?}"),
        }
    }
}

impl Order {
    /// Samples 0, 1, 2, … in the order of the dataset; for evaluation.
    pub fn sequential() -> Self {
        Self::of(Source::Dataset)
    }

    fn of(source: Source) -> Self {
        Self {
            source,
            seed: 0,
            shuffled: false,
            window: None,
            block: 0,
            lanes: 1,
            groups: None,
            plan: None,
        }
    }

    /// Number of lanes.
    pub(crate) fn lane_count(&self) -> u64 {
        self.lanes.into()
    }

    /// The order for a dataset without chunks, of `len` samples in `bytes`.
    pub(crate) fn in_blocks(mut self, len: u64, bytes: impl FnOnce() -> u64) -> Self {
        if self.window.is_none() {
            return self;
        }
        let bytes = bytes();
        self.block = (u128::from(BLOCK) * u128::from(len) / u128::from(bytes.max(1)))
            .clamp(1, 1 << 31) as u64;
        self
    }

    /// How close together consecutive samples are in storage.
    pub(crate) fn locality(&self) -> Locality {
        match (
            self.shuffled || self.groups.is_some(),
            &self.source,
            self.window,
        ) {
            (false, Source::Dataset, _) if self.block > 0 => Locality::Blocks,
            (false, Source::Dataset, _) => Locality::Sequence,
            _ => Locality::None,
        }
    }

    /// Every sample once per epoch, each epoch in a different random order.
    pub fn shuffled(seed: u64) -> Self {
        Self::sequential().then_shuffled(seed)
    }

    /// Every sample once per epoch, shuffled within windows of `chunks` chunks (row groups,
    /// compressed shards). The windows are drawn anew each epoch. For datasets that open whole
    /// chunks: in an epoch, a sample is mixed with the samples of `chunks` chunks, and twice as
    /// many chunks are in memory. If `chunks` is the number of all chunks, this is a global
    /// shuffle.
    ///
    /// A dataset without chunks is cut into runs of samples, about 32 MiB each. Use this for data
    /// read through a [cache](crate::storage::Cache), which then fetches whole blocks in few
    /// requests, ahead of the reads. For other data, and for splits and subsets, whose samples are
    /// scattered, [`shuffled`](Self::shuffled) costs less.
    pub fn windowed(seed: u64, chunks: usize) -> Self {
        Self {
            window: Some(chunks),
            ..Self::sequential().with_seed(seed)
        }
    }

    /// Cuts a [windowed](Self::windowed) or [sequential](Self::sequential) order into `lanes` equal
    /// parts that are read in turn: position *p* is the next sample of lane *p* mod `lanes`.
    /// Default: 1.
    ///
    /// With several ranks and one lane, neighbouring samples go to different ranks, so that every
    /// rank opens every chunk. With as many lanes as ranks, or a multiple, a rank reads only its
    /// own lanes (the report gives the read amplification). The order depends on the number of
    /// lanes and not on the number of ranks, so choose the largest world size that you may use, or
    /// a common multiple of all: 8 lanes serve 1, 2, 4 and 8 ranks. A rank keeps `lanes` / world
    /// windows of chunks open.
    #[must_use]
    pub fn lanes(mut self, lanes: u32) -> Self {
        self.lanes = lanes;
        self
    }

    /// Exactly these samples, in this order, every epoch; repeats are allowed, and each repeat
    /// draws its own crop, flip and so on.
    pub fn indices(ids: impl Into<Vec<u64>>) -> Self {
        let ids: Arc<[u64]> = ids.into().into();
        let largest = ids.iter().copied().max().unwrap_or(0);
        let earlier = earlier_equals(&ids, largest);
        Self::of(Source::Indices {
            ids,
            largest,
            earlier,
        })
    }

    /// The ids of a user's [`Sampler`], with its seed for transforms.
    ///
    /// For weights of samples or classes see [`weighted`](Self::weighted). A sampler that takes every
    /// sample several times in a row, each time with another crop (repeated augmentation):
    ///
    /// ```
    /// use feedline::order::{Order, Permutation, Sampler, identity_of};
    ///
    /// struct Repeated {
    ///     seed: u64,
    ///     samples: u64,
    ///     times: u64,
    /// }
    ///
    /// impl Sampler for Repeated {
    ///     fn len(&self) -> u64 {
    ///         self.samples * self.times
    ///     }
    ///
    ///     fn id(&self, epoch: u64, position: u64) -> u64 {
    ///         Permutation::of(self.samples, self.seed, epoch).get(position / self.times)
    ///     }
    ///
    ///     fn identity(&self) -> u64 {
    ///         identity_of([self.seed, self.samples, self.times])
    ///     }
    /// }
    ///
    /// let order = Order::sampler(Repeated { seed: 1, samples: 1000, times: 3 });
    /// let ids = order.preview(1000, 0, 6)?;
    /// assert!(ids[0] == ids[1] && ids[1] == ids[2] && ids[2] != ids[3]);
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn sampler(sampler: impl Sampler) -> Self {
        Self::of_sampler(Arc::new(sampler))
    }

    /// Samples drawn by [`Weights`], with or without replacement, anew in each epoch. As in any other
    /// order, the sample at a position depends on (seed, epoch, position) and the weights alone, so
    /// ranks share the draws and a run resumes exactly.
    pub fn weighted(seed: u64, weights: Weights) -> Self {
        Self::of(Source::Weighted(weights)).with_seed(seed)
    }

    pub(crate) fn of_sampler(sampler: Arc<dyn Sampler>) -> Self {
        let seed = sampler.seed();
        Self::of(Source::Sampler(sampler)).with_seed(seed)
    }

    /// Fills every global batch with samples of one group, such as texts of similar length; see
    /// [`Groups`]. For [shuffled](Self::shuffled) and [sequential](Self::sequential) orders.
    ///
    /// Every sample comes once per epoch, except for batches that are dropped. In a shuffled order,
    /// the samples of each group and the batches of all groups are permuted anew each epoch;
    /// otherwise batches come group after group. The remainder of a group by length goes into the
    /// next larger group, and the last batch of the epoch may be partial. If the samples of a group
    /// fit no other group, the last batch of *each* group may be partial, see [`LastBatch`].
    /// Batches, counts and resumes work as in any other order: by arithmetic, the same on all
    /// ranks.
    ///
    /// [`State::position`](crate::State::position) counts every batch as if it had as many rows as
    /// the largest batch. A resumed run keeps groups and batch sizes. A
    /// [rebatched](crate::LoaderBuilder::resume_rebatched) run may change the [`LastBatch`], except
    /// to or from `Drop` if each group has its own last batch.
    ///
    /// ```
    /// use feedline::{Loader, Order, dataset::Records, order::Groups};
    ///
    /// let lengths = [3, 9, 5, 10, 2, 1, 4, 8]; // or dataset.lengths("tokens")?
    /// let groups = Groups::by_length(&lengths, 2)?.budget(20); // lengths up to 5 and up to 10: batches of up to 4 and 2 rows
    /// let loader = Loader::builder(Records::builder(1).open_bytes([0; 8])?).order(Order::shuffled(7).grouped(groups)).build()?;
    /// let mut batches: Vec<_> = loader.epoch(0)?.map(|batch| batch.map(|b| (b.group(), b.valid()))).collect::<Result<_, _>>()?;
    /// batches.sort_unstable();
    /// assert_eq!(batches, [(Some(0), 4), (Some(1), 2), (Some(1), 2)]); // one short sample is in a batch of long ones
    /// # Ok::<(), feedline::Error>(())
    /// ```
    #[must_use]
    pub fn grouped(self, groups: Groups) -> Self {
        Self {
            groups: Some(groups),
            plan: None,
            ..self
        }
    }

    /// The order for a dataset of `len` samples and these batches. Errors: [`ErrorKind::Config`]
    /// for groups that do not fit the dataset or the batches.
    pub(crate) fn planned(
        mut self,
        len: u64,
        global: u64,
        last: LastBatch,
        rank: Rank,
    ) -> Result<Self> {
        let Some(groups) = &self.groups else {
            return Ok(self);
        };
        if !matches!(self.source, Source::Dataset) || self.window.is_some() || self.lanes != 1 {
            let message =
                "groups need a shuffled or sequential order of a whole dataset, in one lane";
            return Err(Error::new(ErrorKind::Config, Stage::Build, message));
        }
        self.plan = Some(Plan::of_groups(groups, len, global, last, rank)?);
        Ok(self)
    }

    /// Rows of the largest batch, if groups decide.
    pub(crate) fn largest_batch(&self) -> Option<u64> {
        self.plan.as_ref().map(|plan| plan.largest())
    }

    /// The groups and their batches.
    pub(crate) fn planned_groups(&self) -> Option<(&Groups, &Plan)> {
        self.groups.as_ref().zip(self.plan.as_deref())
    }

    /// The facts about the groups that a state saves.
    pub(crate) fn groups_mark(&self) -> Option<GroupsMark> {
        self.groups.as_ref().map(Groups::mark)
    }

    /// Whether groups have batch sizes of their own.
    pub(crate) fn sizes_batches(&self) -> bool {
        self.groups
            .as_ref()
            .is_some_and(|groups| !groups.take_loaders_batch())
    }

    /// The same samples, reshuffled each epoch; also sets the seed of transforms.
    #[must_use]
    pub fn then_shuffled(mut self, seed: u64) -> Self {
        self.shuffled = true;
        self.window = None;
        self.with_seed(seed)
    }

    /// Sets the seed of transforms, and of the shuffle if the order has one. Does not shuffle.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The seed of the shuffle and of transforms; 0 unless set.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The first `count` ids of an epoch over a dataset of `dataset_len` samples (fewer if the
    /// epoch is shorter): to inspect an order, or to test a sampler. Errors: [`ErrorKind::Config`]
    /// for an id outside the dataset, and for a windowed or grouped order: use
    /// [`Loader::preview`](crate::Loader::preview) for these.
    pub fn preview(&self, dataset_len: u64, epoch: u64, count: u64) -> Result<Vec<u64>> {
        self.epoch(dataset_len, epoch)?.first_ids(count)
    }

    /// Refuses listed indices outside a dataset of `dataset_len` samples ([`ErrorKind::Config`]). A
    /// sampler's ids are only known at their positions.
    pub(crate) fn check(&self, dataset_len: u64) -> Result<()> {
        match &self.source {
            Source::Indices { ids, largest, .. } if !ids.is_empty() && *largest >= dataset_len => {
                Err(out_of_range("the order's indices", ids, dataset_len))
            }
            _ => Ok(()),
        }
    }

    /// Prepares one epoch: computes all that depends on seed and epoch, once. Errors: see `check`.
    pub(crate) fn epoch(&self, dataset_len: u64, epoch: u64) -> Result<EpochOrder> {
        self.epoch_in(dataset_len, None, epoch)
    }

    /// The same for a dataset in chunks.
    pub(crate) fn epoch_in(
        &self,
        dataset_len: u64,
        chunks: Option<&ChunkStarts>,
        epoch: u64,
    ) -> Result<EpochOrder> {
        self.check(dataset_len)?;
        let groups = self.grouped_epoch(epoch)?;
        let lanes = self.walk(dataset_len, chunks, epoch)?;
        let len = match &self.source {
            Source::Dataset => groups
                .as_ref()
                .map_or(dataset_len, |groups| groups.plan().len()),
            Source::Indices { ids, .. } => ids.len() as u64,
            Source::Sampler(sampler) => in_sampler(|| sampler.len())?,
            Source::Weighted(weights) => weights.len(dataset_len)?,
        };
        let key = Key::new(self.seed).named("order").derive(epoch);
        let permutation = (self.shuffled && groups.is_none()).then(|| Permutation::new(len, key));
        let chunks = chunks.cloned();
        let source = self.source.clone();
        let drawing = match &self.source {
            Source::Weighted(weights) => Some(weights.epoch(self.seed, epoch)),
            _ => None,
        };
        let most = chunks
            .as_ref()
            .map_or(0, |chunks| chunks.starts.len().saturating_sub(1));
        let block = self.block;
        let ahead = block
            .saturating_mul(self.window.unwrap_or(0) as u64)
            .saturating_mul(u64::from(self.lanes));
        let needs = None;
        Ok(EpochOrder {
            source,
            drawing,
            permutation,
            groups,
            len,
            dataset_len,
            epoch,
            chunks,
            lanes,
            block,
            ahead,
            needs,
            most,
        })
    }

    fn grouped_epoch(&self, epoch: u64) -> Result<Option<Arc<GroupedEpoch>>> {
        if self.groups.is_none() {
            return Ok(None);
        }
        let unplanned =
            "the batches of groups depend on the loader's settings: ask the loader for a preview";
        let plan = self
            .plan
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::Config, Stage::Build, unplanned))?;
        let key = self
            .shuffled
            .then(|| Key::new(self.seed).named("groups").derive(epoch));
        Ok(Some(Arc::new(GroupedEpoch::new(plan, key))))
    }

    /// The walk over chunks; `None` if samples are read one by one.
    fn walk(
        &self,
        dataset_len: u64,
        chunks: Option<&ChunkStarts>,
        epoch: u64,
    ) -> Result<Option<Lanes>> {
        let bad = |message: &str| Err(Error::new(ErrorKind::Config, Stage::Build, message));
        let sequential =
            matches!(self.source, Source::Dataset) && !self.shuffled && self.groups.is_none();
        if self.lanes == 0 || self.lanes > LANES_MAX {
            return bad(&format!(
                "{} lanes; 1 to {LANES_MAX} are possible",
                self.lanes
            ));
        }
        if self.lanes > 1 && !sequential {
            return bad("only windowed and sequential orders have lanes");
        }
        if self.window == Some(0) {
            return bad("a window of 0 chunks; use 1 or more");
        }
        let whole = chunks.filter(|chunks| chunks.whole);
        match (self.window, whole) {
            (Some(_), None) if chunks.is_some() => bad(
                "a windowed order needs the whole dataset, not a subset; split it by files, \
                 or list its samples",
            ),
            (Some(_), None) if self.block == 0 => bad(
                "the chunks of a windowed order depend on the dataset: ask the loader for a \
                 preview",
            ),
            (Some(window), chunks) => {
                let key = Key::new(self.seed).named("windowed order").derive(epoch);
                let ends = || {
                    (1..=dataset_len.div_ceil(self.block))
                        .map(|end| (end * self.block).min(dataset_len))
                };
                let starts = chunks.map_or_else(
                    || std::iter::once(0).chain(ends()).collect(),
                    |chunks| chunks.starts.clone(),
                );
                Ok(Some(Lanes::new(
                    &starts,
                    u64::from(self.lanes),
                    window,
                    Some(key),
                )))
            }
            (None, Some(chunks)) if sequential => Ok(Some(Lanes::new(
                &chunks.starts,
                u64::from(self.lanes),
                1,
                None,
            ))),
            (None, _) if self.lanes > 1 => {
                // Without chunks, or with a subset's chunks, which are open all the time.
                let whole: Arc<[u64]> = [0, dataset_len].into();
                Ok(Some(Lanes::new(&whole, u64::from(self.lanes), 1, None)))
            }
            (None, _) => Ok(None),
        }
    }

    /// How far a mixture's run has come at this position; `None` for other orders. Errors: a panic
    /// of the sampler.
    pub(crate) fn progress(&self, epoch: u64, position: u64) -> Result<Option<Progress>> {
        match &self.source {
            Source::Sampler(sampler) if !self.shuffled => {
                in_sampler(|| sampler.progress(epoch, position))
            }
            _ => Ok(None),
        }
    }

    /// The same order with other weights. Errors: [`ErrorKind::Config`] for an order without
    /// weights, and for other numbers of weights or draws.
    pub(crate) fn reweighted(&self, weights: Weights, dataset_len: u64) -> Result<Self> {
        let Source::Weighted(old) = &self.source else {
            let message = "the order of this loader has no weights: build it with them";
            return Err(config(message));
        };
        let then = old.len(dataset_len)?;
        let now = weights.len(dataset_len)?;
        if then != now {
            return Err(config(format!(
                "{now} draws in an epoch, but the loader was built with {then}: set their number"
            )));
        }
        Ok(Self {
            source: Source::Weighted(weights),
            ..self.clone()
        })
    }

    /// Returns `settings` with the identity of the order's current weights.
    pub(crate) fn settings_now(&self, settings: Settings) -> Settings {
        match &self.source {
            Source::Weighted(weights) => Settings {
                identity: weights.identity(),
                ..settings
            },
            _ => settings,
        }
    }

    /// The part of a saved state that identifies the order, with the length of its epochs.
    ///
    /// Errors: those of a sampler that panics.
    pub(crate) fn settings(&self, positions: u64) -> Result<Settings> {
        let grouped = self.plan.as_ref();
        let (kind, identity) = match &self.source {
            Source::Dataset if grouped.is_some() => (
                OrderKind::Grouped,
                grouped.map_or(0, |plan| plan.identity()),
            ),
            Source::Dataset if self.window.is_some() => (OrderKind::Windowed, self.block),
            Source::Dataset if self.shuffled => (OrderKind::Shuffled, 0),
            Source::Dataset => (OrderKind::Sequential, 0),
            Source::Indices { ids, .. } => (OrderKind::Indices, hash(ids)),
            Source::Sampler(sampler) => (
                OrderKind::Sampler,
                in_sampler(|| sampled(&**sampler, positions))?,
            ),
            Source::Weighted(weights) => (OrderKind::Weighted, weights.identity()),
        };
        Ok(Settings {
            kind,
            shuffled: self.shuffled,
            seed: self.seed,
            window: self.window.unwrap_or(0) as u64,
            lanes: u64::from(self.lanes),
            positions,
            identity,
        })
    }
}

/// A sampler's identity, hashed with some of its ids. The ids differ even if the identity omits a
/// setting.
fn sampled(sampler: &dyn Sampler, len: u64) -> u64 {
    const LOOKS: u64 = 16;
    let positions =
        (0..LOOKS).map(|look| (u128::from(len) * u128::from(look) / u128::from(LOOKS)) as u64);
    let ids = positions
        .filter(|_| len > 0)
        .map(|position| sampler.id(0, position));
    identity_of(std::iter::once(sampler.identity()).chain(ids))
}

/// The numbers that decide the sample at each position: orders with equal settings visit the same
/// samples in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename = "Order")]
pub(crate) struct Settings {
    pub(crate) kind: OrderKind,
    pub(crate) shuffled: bool,
    pub(crate) seed: u64,
    /// Chunks of a window; 0 without windows.
    pub(crate) window: u64,
    pub(crate) lanes: u64,
    /// Positions of an epoch.
    pub(crate) positions: u64,
    /// Hash of the listed indices or groups, a sampler's identity, or samples of a chunk if the
    /// dataset has no chunks.
    pub(crate) identity: u64,
}

/// The kind of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OrderKind {
    Sequential,
    Shuffled,
    Windowed,
    Indices,
    Sampler,
    Grouped,
    Weighted,
}

/// The greatest common divisor; of 0 and a number, the number.
pub(crate) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn hash(ids: &[u64]) -> u64 {
    Draws::from_key(
        ids.iter()
            .fold(Key::new(ids.len() as u64).named("indices"), |key, id| {
                key.derive(*id)
            }),
    )
    .next_u64()
}

/// For each entry, the number of equal entries before it; `None` if all differ. If a bit per sample
/// takes less memory than the list, only repeated samples take more.
fn earlier_equals(ids: &[u64], largest: u64) -> Option<Arc<[u32]>> {
    let has_bits = largest / 64 < ids.len() as u64;
    let mut seen = vec![
        0_u64;
        if has_bits {
            (largest / 64) as usize + 1
        } else {
            0
        }
    ];
    let mut times = HashMap::new();
    let earlier = ids.iter().map(|id| {
        if has_bits {
            let word = &mut seen[(id / 64) as usize];
            let bit = 1 << (id % 64);
            if *word & bit == 0 {
                *word |= bit;
                return 0;
            }
        }
        *times
            .entry(*id)
            .and_modify(|time| *time += 1)
            .or_insert(u32::from(has_bits))
    });
    let earlier: Vec<u32> = earlier.collect();
    earlier
        .iter()
        .any(|earlier| *earlier > 0)
        .then(|| earlier.into())
}

/// Runs a user's sampler: its panic becomes an error of the order, on whichever thread it runs.
fn in_sampler<T>(ask: impl FnOnce() -> T) -> Result<T> {
    caught_in("the sampler", Stage::Order, || Ok(ask()))
}

/// The error for the first of `ids` that is not below `len`.
fn out_of_range(what: &str, ids: &[u64], len: u64) -> Error {
    let first = ids.iter().enumerate().find(|(_, id)| **id >= len);
    let (position, id) = first.map_or((0, 0), |(position, id)| (position, *id));
    let message = format!("entry {position} of {what} is {id}, but the dataset has {len} samples");
    Error::new(ErrorKind::Config, Stage::Build, message).with_sample(id)
}

/// The order of one epoch. A few hundred bytes for any length; clones share larger parts.
///
/// Positions past the end start again at 0; an epoch that is filled up with padding has such
/// positions. In groups, the positions after the last batch map to the samples of a group. Earlier
/// positions that no batch uses map to samples, too.
#[derive(Clone, Debug)]
pub(crate) struct EpochOrder {
    source: Source,
    /// For [`Source::Weighted`].
    drawing: Option<Drawing>,
    permutation: Option<Permutation>,
    groups: Option<Arc<GroupedEpoch>>,
    len: u64,
    dataset_len: u64,
    epoch: u64,
    chunks: Option<ChunkStarts>,
    lanes: Option<Lanes>,
    /// Samples of a chunk, if the dataset has no chunks of its own, and positions up to the next
    /// window; otherwise 0.
    block: u64,
    ahead: u64,
    /// The sequence in which a rank needs chunks, once the positions that it visits are known.
    needs: Option<Needs>,
    /// The maximum number of chunks needed at once, in any epoch.
    most: usize,
}

/// The chunks of a dataset.
#[derive(Clone, Debug)]
pub(crate) struct ChunkStarts {
    /// The first sample of each chunk, then the number of all samples.
    pub(crate) starts: Arc<[u64]>,
    /// The dataset's samples are those of the chunks, not a subset of them.
    pub(crate) whole: bool,
}

/// Locates the samples of a piece; made once for many positions.
pub(crate) enum Places<'a> {
    /// Positions equal sample ids; this is the first sample of the piece's chunk.
    Sequential(u64),
    Lanes(lanes::Places<'a>),
    Any(&'a EpochOrder, &'a [u64]),
}

impl Places<'_> {
    /// Returns the index among the piece's entries, the row in the chunk, and the sample at
    /// `position`.
    pub(crate) fn locate(
        &self,
        position: u64,
        rename: impl Fn(u64) -> u64,
    ) -> Result<(usize, u64, u64)> {
        match self {
            Self::Sequential(start) => Ok((0, position - start, position)),
            Self::Lanes(places) => Ok(places.locate(position)),
            Self::Any(order, starts) => {
                let id = order.id(position)?;
                let inner = rename(id);
                if starts.last().is_none_or(|count| inner >= *count) {
                    let message = format!(
                        "the dataset says that sample {id} is number {inner} of its chunks' samples"
                    );
                    return Err(Error::new(ErrorKind::User, Stage::Order, message));
                }
                let chunk = starts
                    .partition_point(|start| *start <= inner)
                    .saturating_sub(1);
                Ok((chunk, inner - starts[chunk], id))
            }
        }
    }
}

impl EpochOrder {
    /// Positions of the epoch.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The sample at `position`. Errors: [`ErrorKind::Config`] when a sampler names a sample that
    /// does not exist.
    pub(crate) fn id(&self, position: u64) -> Result<u64> {
        assert!(self.len > 0, "position {position} of an empty epoch");
        if let Some(groups) = &self.groups {
            return Ok(groups.id(position));
        }
        // Only the end of an epoch that is filled up needs the division.
        let position = if position < self.len {
            position
        } else {
            position % self.len
        };
        if let Some(lanes) = &self.lanes {
            return Ok(lanes.id(position));
        }
        let index = self
            .permutation
            .as_ref()
            .map_or(position, |permutation| permutation.get(position));
        if let Some(drawing) = &self.drawing {
            return Ok(drawing.id(index));
        }
        match &self.source {
            Source::Dataset | Source::Weighted(_) => Ok(index),
            Source::Indices { ids, .. } => Ok(ids[index as usize]),
            Source::Sampler(sampler) => {
                let id = in_sampler(|| sampler.id(self.epoch, index));
                self.checked(
                    position,
                    id.map_err(|error| {
                        error.within(format!("epoch {}, position {index}", self.epoch))
                    })?,
                )
            }
        }
    }

    /// A number that distinguishes the draws of one sample within the epoch; 0 for the first draw
    /// in a dataset or list. Positions past the end are copies of positions at the beginning.
    /// Errors: a panic of the sampler.
    pub(crate) fn draw(&self, position: u64) -> Result<u64> {
        let index = |position| {
            self.permutation
                .as_ref()
                .map_or(position, |permutation| permutation.get(position))
        };
        match &self.source {
            Source::Dataset | Source::Indices { earlier: None, .. } => Ok(0),
            _ if self.len == 0 => Ok(0),
            Source::Indices {
                earlier: Some(earlier),
                ..
            } => Ok(earlier[index(position % self.len) as usize].into()),
            Source::Weighted(_) => Ok(index(position % self.len)),
            Source::Sampler(sampler) => {
                in_sampler(|| sampler.draw(self.epoch, index(position % self.len)))
            }
        }
    }

    /// The batches of groups, if the order has some.
    pub(crate) fn groups(&self) -> Option<Arc<GroupedEpoch>> {
        self.groups.clone()
    }

    /// A position with a random sample of the epoch that may be in the batch of `position`.
    pub(crate) fn another(&self, position: u64, draws: &mut Draws) -> u64 {
        match &self.groups {
            Some(groups) => groups.another(position, draws),
            None => draws.below(self.len),
        }
    }

    /// Samples one window ahead of `positions`, as prefetch hints. Each rank has one position in
    /// `step`; all ranks together give [`HINTS`] hints per chunk.
    pub(crate) fn ahead(
        &self,
        positions: impl Iterator<Item = u64>,
        step: u64,
    ) -> impl Iterator<Item = u64> {
        let every = (self.block / HINTS / step.max(1)).max(1) as usize;
        let ahead = positions
            .step_by(every)
            .map(|position| position.saturating_add(self.ahead));
        let exist = ahead.filter(|position| self.ahead > 0 && *position < self.len);
        exist.filter_map(|position| self.id(position).ok())
    }

    /// The first `count` ids, or as many as there are.
    pub(crate) fn first_ids(&self, count: u64) -> Result<Vec<u64>> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        match &self.groups {
            Some(groups) => groups
                .positions()
                .take(count)
                .map(|position| self.id(position))
                .collect(),
            None => (0..self.len)
                .take(count)
                .map(|position| self.id(position))
                .collect(),
        }
    }

    /// Prepares the chunk sequence for the positions that the first `most` of `batches` visit. For
    /// datasets in chunks.
    pub(crate) fn visited_by(mut self, batches: &Batches, most: u64) -> Self {
        let whole = self.chunks.as_ref().is_some_and(|chunks| chunks.whole);
        if let (Some(lanes), true) = (&self.lanes, whole) {
            let visited = batches.visited(most);
            self.needs =
                Some(lanes.needs(visited.start, visited.end, batches.class(), batches.step()));
            self.most = lanes.most(batches.step());
        }
        self
    }

    fn starts(&self) -> &[u64] {
        self.chunks.as_ref().map_or(&[], |chunks| &chunks.starts)
    }

    /// Heap bytes of this epoch alone: some 100 per chunk in the walk.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.lanes.as_ref().map_or(0, Lanes::heap_bytes)
            + self.needs.as_ref().map_or(0, Needs::heap_bytes)
            + self.drawing.as_ref().map_or(0, Drawing::heap_bytes)
    }

    /// Entry `k` of the sequence in which chunks are needed; `None` past its end.
    pub(crate) fn need(&self, k: usize) -> Option<Need> {
        match &self.needs {
            Some(needs) => needs.entry(k),
            None => (k + 1 < self.starts().len()).then_some(Need {
                chunk: k,
                until: u64::MAX,
            }),
        }
    }

    /// Whether all chunks are needed all the time.
    pub(crate) fn needs_all_chunks(&self) -> bool {
        self.needs.is_none()
    }

    /// The reason why all chunks are needed, for errors.
    pub(crate) fn why_all_chunks(&self) -> &'static str {
        match self.source {
            Source::Weighted(_) => {
                "a weighted order may need any chunk at any time and has no window"
            }
            Source::Sampler(_) => {
                "a mix or sampler may need any chunk at any time and has no window"
            }
            _ => "this order may need any chunk at any time; a windowed order needs few",
        }
    }

    /// The maximum number of chunk entries that a piece needs, in any epoch.
    pub(crate) fn entries_most(&self) -> usize {
        self.most
    }

    /// For datasets in chunks: samples in the chunks that all ranks open in an epoch, per sample of
    /// the dataset.
    pub(crate) fn amplification(&self, batches: &Batches) -> Option<f64> {
        self.chunks.as_ref()?;
        let world = batches.world();
        let planned = self.lanes.as_ref().filter(|_| self.needs.is_some());
        Some(planned.map_or(world as f64, |lanes| {
            lanes.amplification(world, batches.step())
        }))
    }

    /// The run of positions from `position` on that need the same chunks. For datasets in chunks.
    pub(crate) fn piece(&self, position: u64) -> LanePiece {
        match &self.needs {
            Some(needs) => needs.piece(position),
            None => LanePiece {
                end: u64::MAX,
                entries: (0..self.starts().len().saturating_sub(1)).collect(),
            },
        }
    }

    /// Locates the samples of the piece that contains `position`.
    pub(crate) fn places(&self, position: u64) -> Places<'_> {
        let lanes = self.lanes.as_ref().filter(|_| self.needs.is_some());
        if lanes.is_some_and(Lanes::is_sequential) && position < self.len {
            let starts = self.starts();
            return Places::Sequential(
                starts[starts.partition_point(|start| *start <= position) - 1],
            );
        }
        match &self.needs {
            Some(needs) => Places::Lanes(needs.places(position)),
            None => Places::Any(self, self.starts()),
        }
    }

    fn checked(&self, position: u64, id: u64) -> Result<u64> {
        if id < self.dataset_len {
            return Ok(id);
        }
        let epoch = self.epoch;
        let len = self.dataset_len;
        let message = format!(
            "the sampler gave id {id} at position {position} of epoch {epoch}, but the dataset has \
             {len} samples"
        );
        Err(Error::new(ErrorKind::Config, Stage::Order, message).with_sample(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    fn ids(order: &Order, dataset_len: u64, epoch: u64) -> Vec<u64> {
        order.preview(dataset_len, epoch, u64::MAX).unwrap()
    }

    fn sorted(mut ids: Vec<u64>) -> Vec<u64> {
        ids.sort_unstable();
        ids
    }

    struct Ramp {
        len: u64,
        step: u64,
    }

    impl Sampler for Ramp {
        fn len(&self) -> u64 {
            self.len
        }

        fn id(&self, epoch: u64, position: u64) -> u64 {
            epoch + position * self.step
        }

        fn identity(&self) -> u64 {
            self.step
        }
    }

    #[test]
    fn a_sequential_order_is_that_of_the_dataset() {
        assert_eq!(ids(&Order::sequential(), 5, 9), [0, 1, 2, 3, 4]);
        assert_eq!(ids(&Order::sequential(), 0, 0), [0; 0]);
    }

    #[test]
    fn each_shuffled_epoch_visits_every_sample_once_anew() {
        let order = Order::shuffled(7);
        for n in [1, 2, 1000, 3000] {
            let all: Vec<u64> = (0..n).collect();
            assert_eq!(sorted(ids(&order, n, 0)), all);
            assert_eq!(sorted(ids(&order, n, 1)), all);
        }
        assert_ne!(ids(&order, 3000, 0), ids(&order, 3000, 1));
        assert_ne!(ids(&order, 3000, 0), ids(&Order::shuffled(8), 3000, 0));
        assert_eq!(ids(&order, 3000, 4), ids(&Order::shuffled(7), 3000, 4));
    }

    #[test]
    fn listed_indices_keep_order_and_repeats() {
        let order = Order::indices([5, 5, 2, 9]);
        assert_eq!(ids(&order, 10, 3), [5, 5, 2, 9]);
        let shuffled = order.then_shuffled(1);
        assert_eq!(sorted(ids(&shuffled, 10, 0)), [2, 5, 5, 9]);
        assert!((1..20).any(|epoch| ids(&shuffled, 10, epoch) != ids(&shuffled, 10, 0)));
        assert_eq!(ids(&Order::indices([]), 10, 0), [0; 0]);
    }

    #[test]
    fn a_windowed_order_without_chunks_shuffles_runs_of_samples() {
        // Samples of 4 MiB: 8 in a run.
        let order = Order::windowed(5, 3).in_blocks(1000, || 1000 * (4 << 20));
        let epoch = order.epoch(1000, 2).unwrap();
        let all = epoch.first_ids(u64::MAX).unwrap();
        assert_eq!(sorted(all.clone()), (0..1000).collect::<Vec<_>>());
        let runs = |window: &[u64]| {
            window
                .iter()
                .map(|id| id / 8)
                .collect::<std::collections::BTreeSet<_>>()
        };
        let windows: Vec<_> = all.chunks(24).map(runs).collect();
        assert!(windows.iter().all(|runs| runs.len() <= 3), "{windows:?}");
        assert!(
            all.chunks(24)
                .take(9)
                .any(|window| !window.is_sorted_by_key(|id| id / 8)),
            "{all:?}"
        );
        assert_ne!(
            all,
            order.epoch(1000, 3).unwrap().first_ids(u64::MAX).unwrap()
        );
        // Each run of the next window is announced, and nothing past the epoch's end.
        let ahead = |positions| epoch.ahead(positions, 1).collect::<Vec<_>>();
        assert_eq!(runs(&ahead(0..24)), runs(&all[24..48]));
        assert!(ahead(990..1000).is_empty());
        assert!(
            Order::shuffled(5)
                .in_blocks(1000, || 1)
                .epoch(1000, 2)
                .unwrap()
                .ahead(0..24, 1)
                .next()
                .is_none()
        );
        let error = Order::windowed(5, 3).preview(1000, 0, 1).unwrap_err();
        assert!(
            error.kind() == ErrorKind::Config && error.to_string().contains("ask the loader"),
            "{error}"
        );
    }

    #[test]
    fn equal_entries_of_a_list_draw_apart_and_others_as_ever() {
        let draws = |order: Order, positions: Range<u64>| {
            let epoch = order.epoch(u64::MAX, 0).unwrap();
            positions
                .map(|position| epoch.draw(position).unwrap())
                .collect::<Vec<_>>()
        };
        // With a bit per sample and without.
        for far in [9, 1 << 40] {
            let order = Order::indices([5, 5, far, 5, far]);
            assert_eq!(draws(order.clone(), 0..5), [0, 1, 0, 2, 1]);
            // Copies that fill up the last batch.
            assert_eq!(draws(order.clone(), 5..7), [0, 1]);
            let mut shuffled = draws(order.then_shuffled(3), 0..5);
            shuffled.sort_unstable();
            assert_eq!(shuffled, [0, 0, 1, 1, 2]);
            assert_eq!(draws(Order::indices([far, 5, 0]), 0..4), [0; 4]);
        }
        assert_eq!(
            draws(Order::sampler(Ramp { len: 3, step: 1 }), 0..4),
            [0, 1, 2, 0]
        );
        assert_eq!(draws(Order::shuffled(3), 0..2), [0, 0]);
        assert_eq!(draws(Order::indices([]), 0..2), [0, 0]);
    }

    #[test]
    fn an_index_outside_the_dataset_is_refused() {
        let error = Order::indices([1, 10, 11]).epoch(10, 0).unwrap_err();
        assert_eq!(
            (error.kind(), error.stage()),
            (ErrorKind::Config, Stage::Build)
        );
        assert_eq!(
            error.to_string(),
            "build: bad configuration: entry 1 of the order's indices is 10, but the dataset has \
             10 samples: sample=10"
        );
        assert!(Order::indices([0]).check(0).is_err());
        assert!(Order::indices([]).check(0).is_ok());
        assert!(Order::indices([9]).check(10).is_ok());
    }

    #[test]
    fn a_sampler_outside_the_dataset_is_named_with_its_id() {
        let epoch = Order::sampler(Ramp { len: 4, step: 3 })
            .epoch(9, 0)
            .unwrap();
        assert_eq!(epoch.id(2).unwrap(), 6);
        let error = epoch.id(3).unwrap_err();
        assert_eq!(
            (error.kind(), error.stage(), error.site().sample),
            (ErrorKind::Config, Stage::Order, Some(9))
        );
        assert_eq!(
            error.to_string(),
            "order: bad configuration: the sampler gave id 9 at position 3 of epoch 0, but the \
             dataset has 9 samples: sample=9"
        );
    }

    #[test]
    fn a_sampler_sees_the_epoch_and_may_be_shuffled() {
        let order = Order::sampler(Ramp { len: 50, step: 2 });
        assert_eq!(ids(&order, 200, 7)[..3], [7, 9, 11]);
        let shuffled = ids(&order.clone().then_shuffled(1), 200, 7);
        assert_ne!(shuffled, ids(&order, 200, 7));
        assert_eq!(sorted(shuffled), ids(&order, 200, 7));
    }

    #[test]
    fn an_order_has_the_seed_that_was_set() {
        assert_eq!(Order::sequential().seed(), 0);
        assert_eq!(Order::shuffled(5).seed(), 5);
        let order = Order::sequential().with_seed(6);
        assert_eq!((order.seed(), ids(&order, 3, 0)), (6, vec![0, 1, 2]));
    }

    #[test]
    fn an_epoch_of_10_to_the_12_samples_is_ready_at_once() {
        let epoch = Order::shuffled(1).epoch(1_000_000_000_000, 0).unwrap();
        assert!(size_of::<EpochOrder>() <= 400);
        assert_eq!(epoch.len(), 1_000_000_000_000);
        assert!(epoch.id(0).unwrap() < epoch.len());
        assert_ne!(epoch.id(0).unwrap(), epoch.id(1).unwrap());
    }
}
