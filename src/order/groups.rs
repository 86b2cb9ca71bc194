//! Groups: every global batch holds samples of one group, such as texts of similar length. Pure.
//!
//! ```text
//! position ──► batch j, row ──► permutation of all batches ──► group g, place in g ──► k = place × rows of g + row
//!                                                  permutation of g's samples: k ──► k' ──► the k'-th sample of g
//! ```
//!
//! Batch *j* has the positions from *j* × S on, where S is the size of the largest batch. A smaller batch leaves the last
//! of them unused. So a position names its batch without a table, and a state holds a position as for any other order.
//! Positions past the end name the samples one by one, by group: substitutes are drawn from these.
//!
//! Memory: a byte per sample for its group, and some 1.6 % more to find the k-th sample of a group: samples of each group
//! before each block. An epoch adds 2 KiB per group at most.

use super::{Draws, Key, LastBatch, Permutation, Rank};
use crate::error::{Error, ErrorKind, Result, Stage, config};
use std::fmt;
use std::sync::Arc;

/// Most groups: their numbers fit a byte.
pub(crate) const GROUPS_MAX: usize = 256;
/// Lengths of more bits share a bin with those that begin with the same ones.
const BITS: u32 = 13;
/// Samples of a block, per group: counts of 4 bytes take 1/64 of the samples' bytes.
const BLOCK: usize = 256;
/// Samples that are counted at once; their count fits a byte.
const STRIDE: usize = 128;

/// The group of each sample, and the batches of each group, for [`Order::grouped`](super::Order::grouped).
///
/// A group holds samples that may share a batch: texts of similar length, pictures of one aspect ratio, clips of similar
/// duration. A global batch is of one group, so all ranks have the same group at the same step.
///
/// Batches have the loader's global batch size, unless [`batch_sizes`](Self::batch_sizes) or [`budget`](Self::budget) gives
/// each group its own. These count rows over all ranks, so that a run resumes with any world size. At most 2^32 samples in
/// 256 groups.
///
/// ```
/// use feedline::{Loader, Order, dataset::Records, order::Groups};
///
/// let lengths = [3, 90, 5, 100, 2, 1, 4, 99]; // or dataset.lengths("tokens")?
/// let groups = Groups::by_length(&lengths, 2)?.budget(200); // lengths to 5 and to 100: batches of up to 40 and 2 rows
/// let loader = Loader::builder(Records::builder(1).open_bytes([0; 8])?).order(Order::shuffled(7).grouped(groups)).build()?;
/// let mut batches: Vec<_> = loader.epoch(0)?.map(|batch| batch.map(|b| (b.group(), b.valid()))).collect::<Result<_, _>>()?;
/// batches.sort_unstable();
/// assert_eq!(batches, [(Some(0), 5), (Some(1), 1), (Some(1), 2)]);
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Groups {
    table: Arc<Table>,
    /// The greatest length of each group, if they are made by lengths.
    bounds: Option<Arc<[u64]>>,
    sizes: Sizes,
    multiple: u64,
    /// Fields, and the maximum of their first dimension in each group.
    most: Vec<(String, Vec<usize>)>,
}

#[derive(Clone, Debug)]
enum Sizes {
    /// The loader's global batch.
    Loader,
    Rows(Arc<[u64]>),
    Budget(u64),
}

impl Groups {
    /// Groups by a number that is known of each sample, such as its length, one per sample of the dataset. Group *i* has the
    /// lengths up to `bounds[i]` that exceed `bounds[i - 1]`.
    ///
    /// Errors: [`ErrorKind::Config`] for no bounds, more than 256, bounds that do not ascend, and a length above the last
    /// bound, naming the sample; [`ErrorKind::Limit`] for more than 2^32 samples.
    pub fn by(lengths: impl IntoIterator<Item = u64>, bounds: &[u64]) -> Result<Self> {
        if bounds.is_empty() || bounds.len() > GROUPS_MAX {
            return Err(config(format!("{} bounds of groups; give 1 to {GROUPS_MAX}", bounds.len())));
        }
        if let Some(pair) = bounds.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(config(format!("the bounds of groups must ascend, not go from {} to {}", pair[0], pair[1])));
        }
        let group = |(sample, length): (usize, u64)| match bounds.partition_point(|bound| *bound < length) {
            group if group < bounds.len() => Ok(group as u8),
            _ => {
                let last = bounds[bounds.len() - 1];
                let message = format!(
                    "the sample has length {length}, the last bound of the groups is {last}: raise it, or cut the lengths"
                );
                Err(config(message).with_sample(sample as u64))
            }
        };
        let numbers = lengths.into_iter().enumerate().map(group).collect::<Result<Box<_>>>()?;
        Self::new(numbers, bounds.len(), Some(bounds.into()))
    }

    /// `count` groups by length, with the least padding that so many can have; fewer where there are fewer distinct lengths.
    ///
    /// Half the padding takes twice the groups. Of web text (a lognormal, cut at 4,096) 16 groups leave 9 %, 64 groups 2 %,
    /// one group 80 %.
    ///
    /// Errors: [`ErrorKind::Config`] for a count that is not 1 to 256; [`ErrorKind::Limit`] for more than 2^32 samples.
    pub fn by_length(lengths: &[u64], count: usize) -> Result<Self> {
        if !(1..=GROUPS_MAX).contains(&count) {
            return Err(config(format!("{count} groups of lengths; give 1 to {GROUPS_MAX}")));
        }
        Self::by(lengths.iter().copied(), &best_bounds(lengths, count))
    }

    /// The number of each sample's group, one per sample of the dataset. There are as many groups as the largest number
    /// says.
    ///
    /// Errors: [`ErrorKind::Limit`] for more than 2^32 samples.
    pub fn of(numbers: impl IntoIterator<Item = u8>) -> Result<Self> {
        let numbers: Box<[u8]> = numbers.into_iter().collect();
        let count = numbers.iter().max().map_or(1, |most| usize::from(*most) + 1);
        Self::new(numbers, count, None)
    }

    /// Groups by number, with a length for all samples of each.
    #[cfg(feature = "image")]
    pub(crate) fn of_lengths(numbers: Box<[u8]>, lengths: &[u64]) -> Result<Self> {
        Self::new(numbers, lengths.len(), Some(lengths.into()))
    }

    fn new(numbers: Box<[u8]>, count: usize, bounds: Option<Arc<[u64]>>) -> Result<Self> {
        let table = Arc::new(Table::new(numbers, count)?);
        Ok(Self { table, bounds, sizes: Sizes::Loader, multiple: 1, most: Vec::new() })
    }

    /// Rows of a batch of each group, over all ranks. Replaces a [`budget`](Self::budget).
    #[must_use]
    pub fn batch_sizes(mut self, rows: impl Into<Vec<u64>>) -> Self {
        self.sizes = Sizes::Rows(rows.into().into());
        self
    }

    /// As many rows in a batch of each group as their lengths, each padded to the group's bound, together stay within
    /// `most` (tokens, pixels, seconds), over all ranks. For groups [by](Self::by) lengths.
    #[must_use]
    pub fn budget(mut self, most: u64) -> Self {
        self.sizes = Sizes::Budget(most);
        self
    }

    /// Rounds the batch sizes of a [`budget`](Self::budget) down to multiples of `rows`: of the largest world size, so that
    /// all ranks have equally many rows. Default: 1.
    #[must_use]
    pub fn multiple_of(mut self, rows: u64) -> Self {
        self.multiple = rows;
        self
    }

    /// Gives field `field`, whose rows have [up to](crate::tensor::Field::up_to) a maximum, a smaller maximum in each group: the
    /// batches of group *i* have the shape `[rows, most[i], …]`, dense. Else they are padded to the field's maximum. Where the
    /// lengths count elements of the field, `most` are the bounds; 0 counts as 1.
    ///
    /// Slots have room for the largest batch, so with a [`budget`](Self::budget) for little more than that.
    #[must_use]
    pub fn up_to(mut self, field: impl Into<String>, most: &[u64]) -> Self {
        let most = most.iter().map(|most| usize::try_from(*most).unwrap_or(usize::MAX).max(1));
        self.most.push((field.into(), most.collect()));
        self
    }

    /// The greatest length of each group, of pictures in [buckets](crate::decode::Image::groups) the pixels; none for groups by
    /// [number](Self::of).
    pub fn bounds(&self) -> &[u64] {
        self.bounds.as_deref().unwrap_or_default()
    }

    /// The fields that [`up_to`](Self::up_to) names, with the maxima in each group.
    pub(crate) fn most(&self) -> &[(String, Vec<usize>)] {
        &self.most
    }

    /// Samples of each group.
    #[cfg(test)]
    fn samples(&self) -> &[u64] {
        &self.table.sizes
    }

    /// Whether batches have the loader's size.
    pub(crate) fn take_loaders_batch(&self) -> bool {
        matches!(self.sizes, Sizes::Loader)
    }

    /// Rows of a batch of each group.
    fn rows(&self, global: u64) -> Result<Box<[u64]>> {
        let count = self.table.sizes.len();
        match (&self.sizes, &self.bounds) {
            (Sizes::Loader | Sizes::Rows(_), _) if self.multiple != 1 => {
                Err(config("a multiple of rows is for batches by a budget"))
            }
            (Sizes::Loader, _) => Ok(vec![global; count].into()),
            (Sizes::Rows(rows), bounds) if rows.len() < count || (bounds.is_some() && rows.len() > count) => {
                Err(config(format!("{} batch sizes for {count} groups; give one for each", rows.len())))
            }
            (Sizes::Rows(rows), _) => Ok(rows[..count].into()),
            (Sizes::Budget(_), None) => {
                Err(config("a budget needs lengths: make the groups by lengths, or give batch sizes"))
            }
            (Sizes::Budget(_), _) if self.multiple == 0 => {
                Err(config("batch sizes must be a multiple of 1 or more, not of 0"))
            }
            (Sizes::Budget(most), Some(bounds)) => {
                let rows = |bound: &u64| most / (*bound).max(1) / self.multiple * self.multiple;
                let lacks = |(group, bound): &(usize, &u64)| rows(bound) == 0 && self.table.sizes[*group] > 0;
                if let Some((group, bound)) = bounds.iter().enumerate().find(lacks) {
                    let (least, multiple) = (u128::from(*bound) * u128::from(self.multiple), self.multiple);
                    return Err(config(format!(
                        "a budget of {most} has no room for {multiple} rows of up to {bound} (group {group}): give {least} or \
                         more"
                    )));
                }
                Ok(bounds.iter().map(rows).collect())
            }
        }
    }

    /// The batches of every epoch. Errors: [`ErrorKind::Config`] for a dataset of another length, too few batch
    /// sizes, a batch with fewer rows than ranks.
    pub(crate) fn plan(&self, dataset_len: u64, global: u64, last: LastBatch, rank: Rank) -> Result<Arc<Plan>> {
        let table = self.table.clone();
        if table.of.len() as u64 != dataset_len {
            return Err(config(format!("the groups have {} samples, the dataset has {dataset_len}", table.of.len())));
        }
        let rows = self.rows(global)?;
        let world = u64::from(rank.world());
        let small = |(group, rows): &(usize, &u64)| **rows < world && table.sizes[*group] > 0;
        if let Some((group, rows)) = rows.iter().enumerate().find(small) {
            return Err(config(format!(
                "the batches of group {group} have {rows} rows for {world} ranks: some would have none; make them larger, or \
                 take fewer ranks"
            )));
        }
        let batches = |(samples, rows): (&u64, &u64)| match last {
            _ if *samples == 0 => 0,
            LastBatch::Drop => samples / rows,
            _ => samples.div_ceil(*rows),
        };
        let counts: Vec<u64> = table.sizes.iter().zip(&rows).map(batches).collect();
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        let ends: Box<[u64]> = ends.collect();
        let made = rows.iter().zip(&counts).filter(|(_, count)| **count > 0);
        let largest = made.map(|(rows, _)| *rows).max().unwrap_or(world);
        let batches = ends.last().copied().unwrap_or(0);
        if batches.checked_mul(largest).and_then(|all| all.checked_add(dataset_len)).is_none() {
            return Err(config(format!("batches of {largest} rows are too large for groups")));
        }
        let delivered = table.sizes.iter().zip(&rows).map(|(samples, rows)| match last {
            LastBatch::Drop if *samples > 0 => samples - samples % rows,
            _ => *samples,
        });
        let samples = delivered.sum();
        Ok(Arc::new(Plan { table, rows, ends, largest, samples }))
    }
}

/// The greatest lengths of at most `count` groups with the least padding.
///
/// Lengths below 8,192 count singly, others in steps of less than 1/4,096. The number of padded elements of the first *n*
/// lengths in *g* groups is the least sum of those of fewer lengths in *g* - 1 groups and of one group of the others.
fn best_bounds(lengths: &[u64], count: usize) -> Vec<u64> {
    let mut bins = vec![(0_u64, 0_u64); (64 - BITS as usize + 2) << (BITS - 1)];
    for length in lengths {
        let shift = (u64::BITS - length.leading_zeros()).saturating_sub(BITS);
        let (samples, most) = &mut bins[((shift as usize) << (BITS - 1)) + (length >> shift) as usize];
        (*samples, *most) = (*samples + 1, (*most).max(*length));
    }
    bins.retain(|(samples, _)| *samples > 0);
    let mut costs = Costs { before: vec![0.0], most: bins.iter().map(|(_, most)| *most as f64).collect() };
    for (samples, _) in &bins {
        costs.before.push(costs.before[costs.before.len() - 1] + *samples as f64);
    }
    let mut least: Vec<f64> = (0..=bins.len()).map(|end| costs.of_one(0, end)).collect();
    let begins: Vec<Vec<u32>> = (1..count).map(|_| costs.add_group(&mut least)).collect();
    let (mut bounds, mut end) = (vec![bins.last().map_or(0, |(_, most)| *most)], bins.len());
    for begins in begins.iter().rev() {
        end = begins[end] as usize;
        if end == 0 {
            break;
        }
        bounds.push(bins[end - 1].1);
    }
    bounds.reverse();
    bounds
}

/// Elements of samples of ascending lengths, with padding.
struct Costs {
    /// Samples before each length.
    before: Vec<f64>,
    /// The lengths.
    most: Vec<f64>,
}

impl Costs {
    /// A group of the lengths `begin..end`.
    fn of_one(&self, begin: usize, end: usize) -> f64 {
        if end == 0 { 0.0 } else { (self.before[end] - self.before[begin]) * self.most[end - 1] }
    }

    /// Takes the `least` for the lengths before each to that with a group more, and tells where the last group begins.
    ///
    /// For the group's end *e* that is the lowest at `most[e - 1]` of the lines of all begins *b*: with the slope `-before[b]` and
    /// the height `least[b]` at 0. Slopes fall and the places rise, so the lowest line only ever moves on along their hull.
    fn add_group(&self, least: &mut [f64]) -> Vec<u32> {
        let old = least.to_vec();
        let (mut hull, mut at, mut begins) = (Vec::<usize>::new(), 0, vec![0; old.len()]);
        for end in 1..old.len() {
            let new = end - 1;
            while let [.., one, two] = hull[at..] {
                let crosses = |other: usize| (old[other] - old[one]) / (self.before[other] - self.before[one]);
                if crosses(new) > crosses(two) {
                    break;
                }
                hull.pop();
            }
            hull.push(new);
            let cost = |begin: usize| old[begin] + self.of_one(begin, end);
            while hull.get(at + 1).is_some_and(|next| cost(*next) <= cost(hull[at])) {
                at += 1;
            }
            (least[end], begins[end]) = (cost(hull[at]), hull[at] as u32);
        }
        begins
    }
}

/// The group of each sample.
struct Table {
    of: Box<[u8]>,
    /// Samples of each group.
    sizes: Box<[u64]>,
    /// Samples of a block.
    block: usize,
    /// Samples of each group before each block; the blocks of a group side by side.
    before: Box<[u32]>,
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} samples in {} groups", self.of.len(), self.sizes.len())
    }
}

impl Table {
    fn new(of: Box<[u8]>, groups: usize) -> Result<Self> {
        if of.len() as u64 > 1 << 32 {
            let message = format!("{} samples; groups are possible for up to 2^32", of.len());
            return Err(Error::new(ErrorKind::Limit, Stage::Build, message));
        }
        let block = BLOCK * groups.next_power_of_two();
        let blocks = of.len().div_ceil(block);
        let (mut before, mut sizes) = (vec![0; groups * blocks], vec![0_u64; groups]);
        for (number, samples) in of.chunks(block).enumerate() {
            for (group, size) in sizes.iter().enumerate() {
                // Before the last block a group has fewer than 2^32 samples.
                before[group * blocks + number] = *size as u32;
            }
            samples.iter().for_each(|group| sizes[usize::from(*group)] += 1);
        }
        Ok(Self { of, sizes: sizes.into(), block, before: before.into() })
    }

    /// The sample that `k` others of its group precede. `k` must be below the group's size.
    fn select(&self, group: usize, k: u64) -> u64 {
        let blocks = self.of.len().div_ceil(self.block);
        let before = &self.before[group * blocks..(group + 1) * blocks];
        let block = before.partition_point(|before| u64::from(*before) <= k) - 1;
        let (mut left, mut at) = ((k - u64::from(before[block])) as usize, block * self.block);
        let is_own = |other: &u8| usize::from(*other) == group;
        for samples in self.of[at..].chunks(STRIDE) {
            let own = usize::from(samples.iter().map(|other| u8::from(*other == group as u8)).sum::<u8>());
            if left < own {
                let mut places = samples.iter().enumerate().filter(|(_, other)| is_own(other));
                at += places.nth(left).map_or(0, |(place, _)| place);
                break;
            }
            left -= own;
            at += samples.len();
        }
        at as u64
    }
}

/// The batches of every epoch.
#[derive(Debug)]
pub(crate) struct Plan {
    table: Arc<Table>,
    /// Rows of a batch of each group.
    rows: Box<[u64]>,
    /// Batches of each group and of those before it.
    ends: Box<[u64]>,
    largest: u64,
    samples: u64,
}

impl Plan {
    /// Rows of the largest batch.
    pub(crate) fn largest(&self) -> u64 {
        self.largest
    }

    /// Rows of a batch of each group; 0 for one without batches.
    pub(crate) fn rows(&self) -> impl Iterator<Item = u64> {
        let starts = std::iter::once(&0).chain(&self.ends);
        self.rows.iter().zip(starts.zip(&self.ends)).map(|(rows, (start, end))| if start < end { *rows } else { 0 })
    }

    /// Positions of an epoch, used or not.
    pub(crate) fn len(&self) -> u64 {
        self.ends.last().map_or(0, |batches| batches * self.largest)
    }

    /// Samples that an epoch delivers.
    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// Bytes of the table and of two epochs: while the last batches of one are in flight, the next is prepared.
    pub(crate) fn bytes(&self) -> usize {
        let of_epoch = self.rows.len() * (size_of::<Permutation>() + 2 * Permutation::TABLE_MAX as usize);
        self.table.of.len() + size_of_val(&*self.table.before) + 2 * of_epoch
    }

    /// A hash of all that decides which samples are in a batch.
    pub(crate) fn identity(&self) -> u64 {
        let words = self.table.of.chunks(8).map(|groups| {
            let mut word = [0; 8];
            word[..groups.len()].copy_from_slice(groups);
            u64::from_le_bytes(word)
        });
        let key = Key::new(self.table.of.len() as u64).named("groups");
        let key = words.chain(self.rows.iter().copied()).fold(key, |key, word| key.derive(word));
        Draws::from_key(key).next_u64()
    }
}

/// The batches of one epoch.
#[derive(Debug)]
pub(crate) struct GroupedEpoch {
    plan: Arc<Plan>,
    /// Of all batches, and of each group's samples; `None` for the order of the groups and of the dataset.
    shuffle: Option<(Permutation, Box<[Permutation]>)>,
}

/// A batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupBatch {
    pub(crate) group: u8,
    /// Rows of a full batch, over all ranks.
    pub(crate) full: u64,
    /// Samples of the epoch in it.
    pub(crate) real: u64,
    /// The first of them, counted in the group's order.
    first: u64,
}

impl GroupedEpoch {
    pub(crate) fn new(plan: &Arc<Plan>, key: Option<Key>) -> Self {
        let shuffle = key.map(|key| {
            let batches = plan.ends.last().copied().unwrap_or(0);
            let samples = plan.table.sizes.iter().zip(0..);
            let of_group =
                |(samples, group): (&u64, u64)| Permutation::new(*samples, key.named("samples").derive(group));
            (Permutation::new(batches, key.named("batches")), samples.map(of_group).collect())
        });
        Self { plan: plan.clone(), shuffle }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Batch `batch`, which must exist.
    pub(crate) fn batch(&self, batch: u64) -> GroupBatch {
        let batch = self.shuffle.as_ref().map_or(batch, |(batches, _)| batches.get(batch));
        let Plan { table, rows, ends, .. } = &*self.plan;
        let group = ends.partition_point(|end| *end <= batch);
        let start = group.checked_sub(1).map_or(0, |before| ends[before]);
        let full = rows[group];
        let first = (batch - start) * full;
        GroupBatch { group: group as u8, full, real: (table.sizes[group] - first).min(full), first }
    }

    /// The sample at `position`. Past the group's last sample it begins again.
    pub(crate) fn id(&self, position: u64) -> u64 {
        let Plan { table, largest, .. } = &*self.plan;
        if let Some(mut k) = position.checked_sub(self.plan.len()) {
            let mut group = 0;
            while k >= table.sizes[group] {
                k -= table.sizes[group];
                group += 1;
            }
            return table.select(group, k);
        }
        let GroupBatch { group, first, .. } = self.batch(position / largest);
        let (group, k) = (usize::from(group), first + position % largest);
        let samples = table.sizes[group];
        let k = if k < samples { k } else { k % samples };
        table.select(group, self.shuffle.as_ref().map_or(k, |(_, of)| of[group].get(k)))
    }

    /// The position of any sample of the group of `position`.
    pub(crate) fn another(&self, position: u64, draws: &mut Draws) -> u64 {
        let group = usize::from(self.batch(position / self.plan.largest).group);
        let sizes = &self.plan.table.sizes;
        self.plan.len() + sizes[..group].iter().sum::<u64>() + draws.below(sizes[group])
    }

    /// The positions that have a sample of the epoch.
    pub(crate) fn positions(&self) -> impl Iterator<Item = u64> {
        let largest = self.plan.largest;
        (0..self.plan.len() / largest).flat_map(move |batch| batch * largest..batch * largest + self.batch(batch).real)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/groups.rs"]
mod tests;
