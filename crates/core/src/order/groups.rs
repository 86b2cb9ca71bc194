//! The group of each sample, such as texts of similar length, and the batch sizes of the groups.
//! Pure.
//!
//! Memory: a byte per sample for its group. Another 1.6 % counts the samples of each group before
//! each block, to find the k-th sample of a group.

use super::key::{Draws, Key};
use feedline_base::error::{Error, ErrorKind, Result, Stage, config};
use std::fmt;
use std::sync::Arc;

/// Maximum number of groups, so that a group's number fits a byte.
pub const GROUPS_MAX: usize = 256;
/// Lengths of more bits than this share a bin if their first `BITS` bits are equal.
const BITS: u32 = 13;
/// Samples in a block, for each group. With a count of 4 bytes per group and block, the counts take
/// 1/64 byte per sample.
const BLOCK: usize = 256;
/// Samples that are counted at once; their count fits a byte.
const STRIDE: usize = 128;

/// The group of each sample, and the batches of each group, for
/// `Order::grouped`.
///
/// A group holds samples that may share a batch: texts of similar length, pictures of one aspect
/// ratio, clips of similar duration. A global batch belongs to one group, so all ranks have the
/// same group at the same step.
///
/// In groups [by](Self::by) length, the remainder of a group (less than a batch) goes into the
/// batches of the next larger group. In each shuffled epoch, the remainder is a random part of its
/// group. So at most one batch of an epoch is short: the last one. Groups by [number](Self::of) or
/// picture shape each have a short batch, see `LastBatch`.
///
/// Batches have the loader's global batch size, unless [`batch_sizes`](Self::batch_sizes) or
/// [`budget`](Self::budget) gives each group its own. These batch sizes are in rows over all ranks,
/// so a run can resume with any world size. At most 2^32 samples in 256 groups.
///
/// ```
/// # use feedline_core::order::Groups;
/// let lengths = [3, 9, 5, 10, 2, 1, 4, 8]; // or dataset.lengths("tokens")?
/// let groups = Groups::by_length(&lengths, 2)?.budget(20); // batches of up to 4 and 2 rows
/// assert_eq!(groups.bounds(), [5, 10]);
/// # Ok::<(), feedline_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Groups {
    #[doc(hidden)]
    pub table: Arc<Table>,
    /// The greatest length of each group, if the groups are made by lengths.
    bounds: Option<Arc<[u64]>>,
    /// Whether the remainder of a group goes into the next one.
    #[doc(hidden)]
    pub flows: bool,
    sizes: Sizes,
    multiple: u64,
    /// Fields with a smaller maximum per group, and the maximum of their first dimension in each
    /// group.
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
    /// Groups by a number that is known for each sample, such as its length, one per sample of the
    /// dataset. Group *i* has the lengths up to `bounds[i]` that exceed `bounds[i - 1]`.
    ///
    /// Errors: [`ErrorKind::Config`] for no bounds, more than 256, bounds that do not ascend, and a
    /// length above the last bound, naming the sample; [`ErrorKind::Limit`] for more than 2^32
    /// samples.
    pub fn by(lengths: impl IntoIterator<Item = u64>, bounds: &[u64]) -> Result<Self> {
        if bounds.is_empty() || bounds.len() > GROUPS_MAX {
            return Err(config(format!(
                "{} bounds of groups; give 1 to {GROUPS_MAX}",
                bounds.len()
            )));
        }
        if let Some(pair) = bounds.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(config(format!(
                "the bounds of groups must ascend, not go from {} to {}",
                pair[0], pair[1]
            )));
        }
        let numbers = lengths
            .into_iter()
            .enumerate()
            .map(|(sample, length)| match bounds
            .partition_point(|bound| *bound < length)
        {
            group if group < bounds.len() => Ok(group as u8),
            _ => {
                let last = bounds[bounds.len() - 1];
                let message = format!(
                    "the sample has length {length}, but the last bound of the groups is {last}: \
                     raise the bound, or cut the lengths"
                );
                Err(config(message).with_sample(sample as u64))
            }
        })
            .collect::<Result<Box<_>>>()?;
        Ok(Self {
            flows: true,
            ..Self::new(numbers, bounds.len(), Some(bounds.into()))?
        })
    }

    /// `count` groups by length, with the least possible padding; fewer if there are fewer distinct
    /// lengths.
    ///
    /// Half the padding takes twice the groups. For web text (a lognormal, cut at 4,096), 16 groups
    /// leave 9 % padding, 64 groups 2 %, one group 80 %.
    ///
    /// Errors: [`ErrorKind::Config`] for a count that is not 1 to 256; [`ErrorKind::Limit`] for
    /// more than 2^32 samples.
    pub fn by_length(lengths: &[u64], count: usize) -> Result<Self> {
        if !(1..=GROUPS_MAX).contains(&count) {
            return Err(config(format!(
                "{count} groups of lengths; give 1 to {GROUPS_MAX}"
            )));
        }
        Self::by(lengths.iter().copied(), &best_bounds(lengths, count))
    }

    /// Groups by number: one group number for each sample of the dataset. The number of groups is
    /// the largest number plus 1. No sample goes into the batches of another group.
    ///
    /// Errors: [`ErrorKind::Limit`] for more than 2^32 samples.
    pub fn of(numbers: impl IntoIterator<Item = u8>) -> Result<Self> {
        let numbers: Box<[u8]> = numbers.into_iter().collect();
        let count = numbers
            .iter()
            .max()
            .map_or(1, |most| usize::from(*most) + 1);
        Self::new(numbers, count, None)
    }

    /// Groups by number. All samples of a group have the same length, which is in `lengths`.
    #[doc(hidden)]
    pub fn of_lengths(numbers: Box<[u8]>, lengths: &[u64]) -> Result<Self> {
        Self::new(numbers, lengths.len(), Some(lengths.into()))
    }

    fn new(numbers: Box<[u8]>, count: usize, bounds: Option<Arc<[u64]>>) -> Result<Self> {
        let table = Arc::new(Table::new(numbers, count)?);
        Ok(Self {
            table,
            bounds,
            flows: false,
            sizes: Sizes::Loader,
            multiple: 1,
            most: Vec::new(),
        })
    }

    /// Sets the rows per batch of each group, over all ranks. Replaces a [`budget`](Self::budget).
    #[must_use]
    pub fn batch_sizes(mut self, rows: impl Into<Vec<u64>>) -> Self {
        self.sizes = Sizes::Rows(rows.into().into());
        self
    }

    /// Gives the batches of each group as many rows as fit into `most` (tokens, pixels, seconds),
    /// over all ranks, with each row padded to the group's bound. For groups [by](Self::by)
    /// lengths.
    #[must_use]
    pub fn budget(mut self, most: u64) -> Self {
        self.sizes = Sizes::Budget(most);
        self
    }

    /// Rounds the batch sizes of a [`budget`](Self::budget) down to multiples of `rows`. Give the
    /// largest world size, so that all ranks have equally many rows. Default: 1.
    #[must_use]
    pub fn multiple_of(mut self, rows: u64) -> Self {
        self.multiple = rows;
        self
    }

    /// Gives field `field`, whose rows have [up to](crate::tensor::Field::up_to) a maximum, a
    /// smaller maximum in each group: the batches of group *i* have the shape `[rows, most[i], …]`,
    /// dense. Otherwise they are padded to the field's maximum. If the lengths count elements of
    /// the field, `most` are the bounds; 0 counts as 1. A group that takes the remainder of a
    /// smaller one has the greatest of the maxima up to its own.
    ///
    /// Slots have room for the largest batch: with a [`budget`](Self::budget), little more than the
    /// budget.
    #[must_use]
    pub fn up_to(mut self, field: impl Into<String>, most: &[u64]) -> Self {
        let mut most: Vec<_> = most
            .iter()
            .map(|most| usize::try_from(*most).unwrap_or(usize::MAX).max(1))
            .collect();
        for group in 1..if self.flows { most.len() } else { 0 } {
            most[group] = most[group].max(most[group - 1]);
        }
        self.most.push((field.into(), most));
        self
    }

    /// The greatest length of each group; for pictures in buckets,
    /// the pixels. Empty for groups by [number](Self::of).
    pub fn bounds(&self) -> &[u64] {
        self.bounds.as_deref().unwrap_or_default()
    }

    /// The fields that [`up_to`](Self::up_to) names, with the maxima in each group.
    #[doc(hidden)]
    pub fn most(&self) -> &[(String, Vec<usize>)] {
        &self.most
    }

    /// Whether batches have the loader's size.
    #[doc(hidden)]
    pub fn take_loaders_batch(&self) -> bool {
        matches!(self.sizes, Sizes::Loader)
    }

    /// Rows per batch of each group; `global` is the loader's global batch size.
    #[doc(hidden)]
    pub fn rows(&self, global: u64) -> Result<Box<[u64]>> {
        let count = self.table.sizes.len();
        match (&self.sizes, &self.bounds) {
            (Sizes::Loader | Sizes::Rows(_), _) if self.multiple != 1 => {
                Err(config("a multiple of rows needs batches by a budget"))
            }
            (Sizes::Loader, _) => Ok(vec![global; count].into()),
            (Sizes::Rows(rows), bounds)
                if rows.len() < count || (bounds.is_some() && rows.len() > count) =>
            {
                Err(config(format!(
                    "{} batch sizes for {count} groups; give one for each",
                    rows.len()
                )))
            }
            (Sizes::Rows(rows), _) => Ok(rows[..count].into()),
            (Sizes::Budget(_), None) => Err(config(
                "a budget needs lengths: make the groups by lengths, or give batch sizes",
            )),
            (Sizes::Budget(_), _) if self.multiple == 0 => Err(config(
                "batch sizes must be a multiple of 1 or more, not of 0",
            )),
            (Sizes::Budget(most), Some(bounds)) => {
                let rows = |bound: &u64| most / (*bound).max(1) / self.multiple * self.multiple;
                let lacking = bounds
                    .iter()
                    .enumerate()
                    .find(|(group, bound)| rows(bound) == 0 && self.table.sizes[*group] > 0);
                if let Some((group, bound)) = lacking {
                    let least = u128::from(*bound) * u128::from(self.multiple);
                    let multiple = self.multiple;
                    return Err(config(format!(
                        "a budget of {most} has no room for {multiple} rows of up to {bound} (group \
                         {group}): give {least} or more"
                    )));
                }
                Ok(bounds.iter().map(rows).collect())
            }
        }
    }

    /// The facts about the groups that a state saves, for error messages.
    #[doc(hidden)]
    pub fn mark(&self) -> GroupsMark {
        let hash = |words: &mut dyn Iterator<Item = u64>| {
            Draws::from_key(words.fold(Key::new(0).named("mark"), Key::derive)).next_u64() as u32
        };
        let budget = if let Sizes::Budget(most) = self.sizes {
            most
        } else {
            0
        };
        GroupsMark {
            flows: self.flows,
            budget,
            bound: self.bounds().last().copied().unwrap_or(0),
            multiple: u32::try_from(self.multiple).unwrap_or(u32::MAX),
            count: self.table.sizes.len() as u32,
            bounds: hash(&mut self.bounds().iter().copied()),
            lengths: hash(&mut self.table.words()),
        }
    }
}

/// Numbers that show how the groups of two runs differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupsMark {
    /// Whether the remainder of a group goes into the next one.
    pub flows: bool,
    /// The budget of a batch; 0 if there is none.
    pub budget: u64,
    /// The greatest length of the last group.
    pub bound: u64,
    pub multiple: u32,
    pub count: u32,
    /// Hashes of all bounds, and of the group of every sample.
    pub bounds: u32,
    pub lengths: u32,
}

impl GroupsMark {
    pub fn words(&self) -> [u64; 4] {
        let both = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let flows = u32::from(self.flows) << 31;
        [
            self.budget,
            self.bound,
            both(self.multiple, self.count | flows),
            both(self.bounds, self.lengths),
        ]
    }

    pub fn of_words([budget, bound, counts, hashes]: [u64; 4]) -> Self {
        let parts = |both: u64| ((both >> 32) as u32, both as u32);
        let (multiple, count) = parts(counts);
        let (bounds, lengths) = parts(hashes);
        let flows = count >> 31 == 1;
        let count = count & (u32::MAX >> 1);
        Self {
            flows,
            budget,
            bound,
            multiple,
            count,
            bounds,
            lengths,
        }
    }
}

/// Cuts the lengths into at most `count` groups with the least padding. Returns the greatest length
/// of each group.
///
/// Lengths below 8,192 count singly, others in steps of less than 1/4,096. The least number of
/// padded elements, for the first *n* lengths in *g* groups, is the minimum over all positions of
/// the last cut: the lengths before it form *g* - 1 groups, and the others form one.
fn best_bounds(lengths: &[u64], count: usize) -> Vec<u64> {
    let mut bins = vec![(0_u64, 0_u64); (64 - BITS as usize + 2) << (BITS - 1)];
    for length in lengths {
        let shift = (u64::BITS - length.leading_zeros()).saturating_sub(BITS);
        let (samples, most) =
            &mut bins[((shift as usize) << (BITS - 1)) + (length >> shift) as usize];
        *samples += 1;
        *most = (*most).max(*length);
    }
    bins.retain(|(samples, _)| *samples > 0);
    let mut costs = Costs {
        before: vec![0.0],
        most: bins.iter().map(|(_, most)| *most as f64).collect(),
    };
    for (samples, _) in &bins {
        costs
            .before
            .push(costs.before[costs.before.len() - 1] + *samples as f64);
    }
    let mut least: Vec<f64> = (0..=bins.len()).map(|end| costs.of_one(0, end)).collect();
    let begins: Vec<Vec<u32>> = (1..count).map(|_| costs.add_group(&mut least)).collect();
    let mut bounds = vec![bins.last().map_or(0, |(_, most)| *most)];
    let mut end = bins.len();
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

/// Computes the number of elements in a group, padding included, for samples of ascending lengths.
struct Costs {
    /// Number of samples before each length.
    before: Vec<f64>,
    /// The lengths, ascending.
    most: Vec<f64>,
}

impl Costs {
    /// Cost of one group of the lengths `begin..end`.
    fn of_one(&self, begin: usize, end: usize) -> f64 {
        if end == 0 {
            0.0
        } else {
            (self.before[end] - self.before[begin]) * self.most[end - 1]
        }
    }

    /// Updates `least` for one more group; `least[i]` is the minimum cost of the lengths before
    /// index `i`. Returns for each index where the last group begins.
    ///
    /// For a group that ends at *e*, each possible begin *b* gives a line with the slope
    /// `-before[b]` and the height `least[b]` at 0. The minimum is the lowest of these lines at
    /// `most[e - 1]`. The slopes fall and `most[e - 1]` rises, so the lowest line only ever moves
    /// forward along the hull of the lines.
    fn add_group(&self, least: &mut [f64]) -> Vec<u32> {
        let old = least.to_vec();
        let mut hull = Vec::<usize>::new();
        let mut at = 0;
        let mut begins = vec![0; old.len()];
        for end in 1..old.len() {
            let new = end - 1;
            while let [.., one, two] = hull[at..] {
                let crosses = |other: usize| {
                    (old[other] - old[one]) / (self.before[other] - self.before[one])
                };
                if crosses(new) > crosses(two) {
                    break;
                }
                hull.pop();
            }
            hull.push(new);
            let cost = |begin: usize| old[begin] + self.of_one(begin, end);
            while hull
                .get(at + 1)
                .is_some_and(|next| cost(*next) <= cost(hull[at]))
            {
                at += 1;
            }
            least[end] = cost(hull[at]);
            begins[end] = hull[at] as u32;
        }
        begins
    }
}

/// The group of each sample.
pub struct Table {
    pub of: Box<[u8]>,
    /// Number of samples in each group.
    pub sizes: Box<[u64]>,
    /// Number of samples in a block.
    block: usize,
    /// Number of samples of each group that precede each block; the counts of a group are adjacent.
    before: Box<[u32]>,
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} samples in {} groups",
            self.of.len(),
            self.sizes.len()
        )
    }
}

impl Table {
    pub fn new(of: Box<[u8]>, groups: usize) -> Result<Self> {
        if of.len() as u64 > 1 << 32 {
            let message = format!(
                "{} samples; an order of groups takes at most 2^32",
                of.len()
            );
            return Err(Error::new(ErrorKind::Limit, Stage::Build, message));
        }
        let block = BLOCK * groups.next_power_of_two();
        let blocks = of.len().div_ceil(block);
        let mut before = vec![0; groups * blocks];
        let mut sizes = vec![0_u64; groups];
        for (number, samples) in of.chunks(block).enumerate() {
            for (group, size) in sizes.iter().enumerate() {
                // Before the last block a group has fewer than 2^32 samples.
                before[group * blocks + number] = *size as u32;
            }
            samples
                .iter()
                .for_each(|group| sizes[usize::from(*group)] += 1);
        }
        Ok(Self {
            of,
            sizes: sizes.into(),
            block,
            before: before.into(),
        })
    }

    pub fn bytes(&self) -> usize {
        self.of.len() + size_of_val(&*self.before)
    }

    /// The groups of all samples, eight per word.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        self.of.chunks(8).map(|groups| {
            let mut word = [0; 8];
            word[..groups.len()].copy_from_slice(groups);
            u64::from_le_bytes(word)
        })
    }

    /// Sample `k` of a group, counted from 0. `k` must be below the group's size.
    pub fn select(&self, group: usize, k: u64) -> u64 {
        let blocks = self.of.len().div_ceil(self.block);
        let before = &self.before[group * blocks..(group + 1) * blocks];
        let block = before.partition_point(|before| u64::from(*before) <= k) - 1;
        let mut left = (k - u64::from(before[block])) as usize;
        let mut at = block * self.block;
        for samples in self.of[at..].chunks(STRIDE) {
            let own = usize::from(
                samples
                    .iter()
                    .map(|other| u8::from(*other == group as u8))
                    .sum::<u8>(),
            );
            if left < own {
                let mut places = samples
                    .iter()
                    .enumerate()
                    .filter(|(_, other)| usize::from(**other) == group);
                at += places.nth(left).map_or(0, |(place, _)| place);
                break;
            }
            left -= own;
            at += samples.len();
        }
        at as u64
    }
}
