//! Datasets mixed by weights that may change at positions of the run.
//!
//! ```text
//! position of the run ──► segment ──► block, variant, place ──► source, how many of it came before ──► pass, place in the pass
//! (epoch × len + position)        (a table, or `shares`)                                          ──► keyed permutation ──► id
//! ```
//!
//! Limits: a mix has at most 1,048,576 sources, 256 segments, and 8,388,608 weights in all; a
//! weight that is not 0 is at least 2^-32 of its table's sum. Memory: each segment takes 24 bytes
//! per source, and a table of at most 80,000 places (320 KB) if the counts repeat soon enough;
//! otherwise the mix keeps the blocks in use. Such a block has 16,384 places, or at least 4 per
//! source if that is more, of 12 bytes each. None of this depends on the datasets' lengths. Each
//! thread keeps the permutations in use.

use super::Concat;
use super::shares::{Block, PERIOD, Path, Shares};
use crate::order::{Drawn, Progress, Sampler, gcd};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use feedline_core::dataset::forward::forward;
use feedline_core::dataset::{Dataset, Digest};
use feedline_core::order::{Draws, Key, Permutation};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Maximum positions of a block that is a table.
const TABLE_MAX: u64 = 10_000;
const SOURCES_MAX: usize = 1 << 20;
const SEGMENTS_MAX: usize = 256;
const WEIGHTS_MAX: usize = 1 << 23;
/// Maximum number of a weight table's counts in a message.
const COUNTS_SHOWN: usize = 16;
/// Number of blocks that a mix keeps, if they are not tables.
const BLOCKS: usize = 4;
/// Maximum steps of a ramp.
const STEPS: u64 = 64;
/// Number of variants of a block: as many as fit into `PLACES` places, within the limits
/// `VARIANTS`.
const PLACES: u64 = 1 << 16;
const VARIANTS: std::ops::RangeInclusive<u64> = 8..=64;
/// Number of permutations that a thread keeps.
const WALKS: usize = 256;

/// Mixes datasets by weights: a [`Concat`] of them, with an order of its own that draws from it.
///
/// ```
/// # use feedline::dataset::{Mix, Records};
/// # use feedline::Loader;
/// # let records = |count: usize| Records::builder(1).open_bytes(vec![7; count]);
/// let web = records(9000)?;
/// let code = records(500)?;
/// let mix = Mix::new([(web, 0.7), (code, 0.3)], 42)?.epoch_len(1000)?;
/// let code = mix.concat().ids_of(1);
/// let loader = Loader::builder(mix).batch_size(100).build()?;
/// let drawn: usize = loader.epoch(0)?.map(|batch| Ok(batch?.ids().iter().filter(|id| code.contains(id)).count()))
///     .sum::<feedline::Result<_>>()?;
/// assert_eq!(drawn, 300);
/// # Ok::<(), feedline::Error>(())
/// ```
///
/// The exact rules:
/// - Weights are exact if whole numbers with a sum of at most 10,000 have the same ratios: 0.7 and
///   0.3 give a *block* of 10 positions, 7 and 3 from the two sources. **Every block has exactly
///   these counts**, counted from the first position of epoch 0, or of the segment. Other weights
///   are rounded to 2^-32 of their sum, by largest remainders.
/// - The sources are spread evenly: the first *n* positions have each source's share of *n* with an
///   error below 1, and any *n* consecutive positions with an error below 2. (With weights under
///   1/16,384 or more than 4,096 sources, an error may rarely exceed 1; none of 2 or more was
///   observed.) One of many equally even orders is chosen at random, so that no row of a
///   batch and no rank always gets the same source.
/// - Each source is walked **pass by pass**: every sample once, in an order that depends on (key,
///   source, pass), then all again in another order. Passes continue across epochs and segments: a
///   source with 9,000 samples and 1,000 draws per epoch repeats none in nine epochs. At any
///   position, the samples of a source have been drawn equally often, with a difference of at most
///   one.
/// - An epoch has one position per sample of all datasets, unless [`epoch_len`](Self::epoch_len),
///   [`until_first_ends`](Self::until_first_ends) or [`until_all_seen`](Self::until_all_seen) says
///   otherwise.
///
/// The id at a position depends on (key, weights, lengths, epoch length, epoch, position) alone.
/// With a [schedule](Self::scheduled), only the segments that have begun matter: later segments may
/// change between runs.
#[derive(Clone)]
pub struct Mix {
    dataset: Arc<Concat>,
    positions: Positions,
}

/// The samples at the positions of an epoch.
#[derive(Clone)]
struct Positions {
    schedule: Arc<Schedule>,
    len: u64,
    seed: u64,
}

struct Schedule {
    key: Key,
    /// By ascending starts; the first is 0.
    segments: Vec<MixSegment>,
    /// Number of samples and first id of each source.
    lens: Vec<u64>,
    firsts: Vec<u64>,
    /// Number of the mix: it distinguishes the permutations of different mixes.
    number: u64,
    kept: Mutex<Kept>,
}

/// Positions with one table of weights.
struct MixSegment {
    start: u64,
    /// How often each source occurs in a block.
    counts: Vec<u64>,
    places: BlockPlaces,
    /// How often each source occurs before the segment.
    before: Vec<u128>,
    /// Hash of this segment and of all segments before it.
    hash: u64,
}

/// The source at each place of a block, and how often it occurs before that place.
enum BlockPlaces {
    /// The variants of a block, one after the other.
    Table(Vec<(u16, u16)>),
    /// A block of 2^32 places, whose parts are made when they are needed.
    Parts(Shares),
}

/// Parts of long blocks, kept for all threads.
#[derive(Default)]
struct Kept {
    parts: VecDeque<Arc<BlockPart>>,
    /// For the part that was made last: the start of its segment, and the path to it.
    path: (u64, Path),
}

/// A part of a long block. `start` is the start of its segment, `number` the number of its block.
struct BlockPart {
    start: u64,
    number: u128,
    block: Block,
}

impl Mix {
    /// Mixes `datasets` by weights, whose sum need not be 1.
    ///
    /// Errors: [`ErrorKind::Config`] for a weight of 0 or less, or under 2^-32 of the sum, for a
    /// dataset without samples, and the errors of [`Concat::new`].
    pub fn new<D: Dataset>(datasets: impl IntoIterator<Item = (D, f64)>, key: u64) -> Result<Self> {
        let (datasets, weights): (Vec<D>, Vec<f64>) = datasets.into_iter().unzip();
        if let Some(index) = weights.iter().position(|weight| *weight == 0.0) {
            return bad(format!(
                "weight {index} of the mix is 0: leave the dataset out, or give it a weight"
            ));
        }
        if weights.is_empty() {
            return bad("no datasets to mix".into());
        }
        Self::scheduled(datasets, [(0, weights)], key)
    }

    /// Mixes `datasets` by weights that change: each segment has its first position and a weight
    /// for each dataset, in order.
    ///
    /// ```
    /// # use feedline::dataset::{Mix, Records};
    /// # let records = |count: usize| Records::builder(1).open_bytes(vec![7; count]);
    /// let web = records(90_000)?;
    /// let code = records(5000)?;
    /// let mix = Mix::scheduled([web, code], [(0, vec![0.9, 0.1]), (50_000, vec![0.5, 0.5])], 42)?;
    /// # Ok::<(), feedline::Error>(())
    /// ```
    ///
    /// Positions count **over the whole run** and all ranks together, counted from the first
    /// position of epoch 0: epoch × epoch length + position in the epoch. Blocks are counted from
    /// the first position of a segment, so that each segment has delivered each source's share of
    /// its positions with an error below 1, wherever it ends. Passes continue across segments: no
    /// sample repeats before its source's pass has ended.
    ///
    /// A weight of 0 leaves a source out of a segment. All tables but the last may be shorter than
    /// the list of datasets: the remaining datasets have weight 0.
    ///
    /// **A resumed run may have other weights, and more datasets.** Give the whole schedule again:
    /// first the segments that had begun at the state's position, unchanged, then any others.
    /// Append new datasets to the list, and give weight 0 to a dataset that is to be dropped. Old
    /// ids stay the same. The state has a hash of the segments that had begun, so a different past
    /// is an error ([`ErrorKind::State`]). Set [`epoch_len`](Self::epoch_len), since it must stay
    /// the same.
    ///
    /// Memory: at most 320 KB and 24 bytes per dataset for each segment, not counted in the plan.
    ///
    /// Errors: those of [`Concat::new`], and [`ErrorKind::Config`] if
    /// - there are no segments or over 256, or over 8,388,608 weights in all;
    /// - the first positions do not ascend from 0;
    /// - the last table lacks a weight for a dataset, or a table has too many;
    /// - a table has no weight above 0;
    /// - a weight is negative, not finite, or not 0 and below 2^-32 of its table's sum;
    /// - a dataset has no samples.
    pub fn scheduled<D: Dataset>(
        datasets: impl IntoIterator<Item = D>,
        segments: impl IntoIterator<Item = (u64, Vec<f64>)>,
        key: u64,
    ) -> Result<Self> {
        let datasets: Vec<D> = datasets.into_iter().collect();
        if datasets.len() > SOURCES_MAX {
            return bad(format!(
                "{} datasets in a mix; the limit is {SOURCES_MAX}",
                datasets.len()
            ));
        }
        let dataset = Concat::new(datasets)?;
        let ids: Vec<_> = (0..dataset.parts())
            .map(|part| dataset.ids_of(part))
            .collect();
        if let Some(empty) = ids.iter().position(|ids| ids.is_empty()) {
            return bad(format!("dataset {empty} of the mix has no samples"));
        }
        let tables = tables_of(&segments.into_iter().collect::<Vec<_>>(), ids.len())?;
        let schedule = Schedule::new(
            tables,
            &ids,
            &dataset.identities(),
            Key::new(key).named("mix"),
        );
        let len = dataset.len();
        Ok(Self {
            dataset: Arc::new(dataset),
            positions: Positions {
                schedule: Arc::new(schedule),
                len,
                seed: key,
            },
        })
    }

    /// Returns the segments of a linear ramp over `positions`, for [`scheduled`](Self::scheduled):
    /// at most 64 steps, each with the weights at its middle, then `to`. A weight under 2^-32 of
    /// its step's sum becomes 0.
    ///
    /// ```
    /// # use feedline::dataset::Mix;
    /// let web = [0.9, 0.1];
    /// let code = [0.5, 0.5];
    /// let schedule: Vec<_> = [(0, web.to_vec())].into_iter().chain(Mix::ramp(10_000..50_000, &web, &code)).collect();
    /// assert_eq!((schedule.len(), &schedule[65]), (66, &(50_000, vec![0.5, 0.5])));
    /// ```
    pub fn ramp(positions: Range<u64>, from: &[f64], to: &[f64]) -> Vec<(u64, Vec<f64>)> {
        let steps = STEPS.min(positions.end.saturating_sub(positions.start));
        let len = from.len().max(to.len());
        let weight = |table: &[f64], index| table.get(index).copied().unwrap_or(0.0);
        (0..steps)
            .map(|step| {
                let start = positions.start
                    + (u128::from(positions.end - positions.start) * u128::from(step)
                        / u128::from(steps)) as u64;
                let share = (step as f64 + 0.5) / steps as f64;
                let mut table: Vec<f64> = (0..len)
                    .map(|index| weight(from, index) * (1.0 - share) + weight(to, index) * share)
                    .collect();
                let least = table.iter().sum::<f64>() / PERIOD as f64;
                table
                    .iter_mut()
                    .filter(|weight| (0.0..least).contains(*weight))
                    .for_each(|weight| *weight = 0.0);
                (start, table)
            })
            .chain([(positions.end, to.to_vec())])
            .collect()
    }

    /// Sets the number of positions of an epoch.
    ///
    /// Errors: [`ErrorKind::Config`] for 0.
    pub fn epoch_len(mut self, positions: u64) -> Result<Self> {
        if positions == 0 {
            return bad("an epoch of 0 positions".into());
        }
        self.positions.len = positions;
        Ok(self)
    }

    /// Ends an epoch before any source repeats a sample: the epoch has as many whole blocks as fit
    /// into one pass of every source, but at least one block. If blocks are long, it has as many
    /// positions as fit. So no sample repeats in epoch 0.
    #[must_use]
    pub fn until_first_ends(mut self) -> Self {
        self.positions.len = self.positions.schedule.until_first_ends();
        self
    }

    /// Ends an epoch after the slowest source's first pass, in whole blocks: epoch 0 delivers every
    /// sample, except those of sources that the schedule drops before their pass ends.
    #[must_use]
    pub fn until_all_seen(mut self) -> Self {
        self.positions.len = self.positions.schedule.until_all_seen();
        self
    }

    /// The concatenated datasets; their ids are the ids of the mix. [`Concat::origin`] gives the
    /// part of an id.
    pub fn concat(&self) -> &Concat {
        &self.dataset
    }

    /// Number of positions of each source in a block of the first segment.
    pub fn block(&self) -> &[u64] {
        &self.positions.schedule.segments[0].counts
    }
}

impl Dataset for Mix {
    forward!(self => self.dataset; schema len sources sizes extents framed chunked keys identity describe);

    fn sampler(&self) -> Option<Arc<dyn Sampler>> {
        Some(Arc::new(self.positions.clone()))
    }
}

impl Positions {
    /// Number of the pass over a source at the start of an epoch. Each thread keeps these numbers
    /// for its epoch.
    fn pass_before(&self, epoch: u64, source: usize) -> u128 {
        thread_local!(static LAST: RefCell<([u64; 3], Vec<u128>)> = const { RefCell::new(([u64::MAX; 3], Vec::new())) });
        LAST.with_borrow_mut(|(of, drawn)| {
            let now = [self.schedule.number, self.len, epoch];
            if *of != now {
                let place = self.place(epoch, 0);
                *drawn = self.schedule.drawn(self.schedule.segment(place), place);
                *of = now;
            }
            drawn[source] / u128::from(self.schedule.lens[source])
        })
    }

    /// The position in the whole run, over all epochs.
    fn place(&self, epoch: u64, position: u64) -> u128 {
        u128::from(epoch) * u128::from(self.len) + u128::from(position)
    }
}

impl Sampler for Positions {
    fn len(&self) -> u64 {
        self.len
    }

    fn id(&self, epoch: u64, position: u64) -> u64 {
        self.schedule.id(self.place(epoch, position))
    }

    fn seed(&self) -> u64 {
        self.seed
    }

    /// Number of passes over the sample's source since the epoch began.
    fn draw(&self, epoch: u64, position: u64) -> u64 {
        let (source, drawn) = self.schedule.draw(self.place(epoch, position));
        let pass = drawn / u128::from(self.schedule.lens[source]);
        if pass == 0 {
            0
        } else {
            (pass - self.pass_before(epoch, source)) as u64
        }
    }

    fn identity(&self) -> u64 {
        let hash = self.schedule.segments.last().map_or(0, |last| last.hash);
        Digest::new("mix")
            .word(self.schedule.root())
            .word(self.len)
            .word(hash)
            .words(&self.schedule.lens)
            .end()
    }

    fn progress(&self, epoch: u64, position: u64) -> Option<Progress> {
        let Schedule { segments, lens, .. } = &*self.schedule;
        let place = self.place(epoch, position);
        let begun = segments.partition_point(|segment| u128::from(segment.start) < place);
        let hash = begun.checked_sub(1).map_or(0, |last| segments[last].hash);
        let past = Digest::new("mix")
            .word(self.schedule.root())
            .word(hash)
            .end();
        let drawn = begun
            .checked_sub(1)
            .map(|last| self.schedule.drawn(&segments[last], place));
        let drawn = drawn.unwrap_or_else(|| vec![0; lens.len()]);
        let sources = drawn.iter().zip(lens).zip(self.schedule.asked(place)).map(
            |((drawn, samples), asked)| Drawn {
                drawn: u64::try_from(*drawn).unwrap_or(u64::MAX),
                asked,
                samples: *samples,
            },
        );
        Some(Progress {
            past,
            segments: begun as u64,
            sources: sources.collect(),
        })
    }
}

impl std::fmt::Debug for Mix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} positions an epoch, ", self.positions.len)?;
        for MixSegment { start, counts, .. } in &self.positions.schedule.segments {
            let more = if counts.len() > COUNTS_SHOWN {
                ", …"
            } else {
                ""
            };
            write!(
                f,
                "from {start} {:?}{more} of each block, ",
                &counts[..counts.len().min(COUNTS_SHOWN)]
            )?;
        }
        write!(f, "of {:?}", self.dataset)
    }
}

fn bad<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Config, Stage::Index, message))
}

/// Starts and counts of the segments, with a count for each of `sources`.
fn tables_of(segments: &[(u64, Vec<f64>)], sources: usize) -> Result<Vec<(u64, Vec<u64>)>> {
    let name = |index: usize| match segments.len() {
        1 => "the mix".to_string(),
        _ => format!("segment {index} of the mix"),
    };
    match segments {
        [] => {
            return bad(
                "the schedule of the mix has no segments: begin it with (0, weights)".into(),
            );
        }
        [(0, _), ..] => {}
        [(start, _), ..] => {
            return bad(format!(
                "the schedule of the mix begins at position {start}: begin it with (0, weights)"
            ));
        }
    }
    if segments.len() > SEGMENTS_MAX {
        return bad(format!(
            "{} segments in a mix; the limit is {SEGMENTS_MAX}",
            segments.len()
        ));
    }
    if segments.len().saturating_mul(sources) > WEIGHTS_MAX {
        let message = format!(
            "{} segments of {sources} weights in a mix; the limit is {WEIGHTS_MAX} weights",
            segments.len()
        );
        return bad(message);
    }
    if let Some(at) = segments.windows(2).position(|pair| pair[0].0 >= pair[1].0) {
        let before = segments[at].0;
        let start = segments[at + 1].0;
        let message = format!(
            "segment {} of the mix begins at position {start}, the one before at {before}",
            at + 1
        );
        return bad(message + ": list segments by ascending positions");
    }
    let last = segments.len() - 1;
    segments
        .iter()
        .enumerate()
        .map(|(index, (start, weights))| {
            if weights.len() > sources || (index == last && weights.len() < sources) {
                let message = format!(
                    "{} has {} weights for {sources} datasets",
                    name(index),
                    weights.len()
                );
                return bad(message
                    + ": give one for each; a dataset that is to be dropped stays, with weight 0");
            }
            let mut counts = counts_of(weights, &name(index))?;
            counts.resize(sources, 0);
            Ok((*start, counts))
        })
        .collect()
}

/// Whole numbers in the ratios of the weights. They have no common divisor if their sum fits into a
/// table; otherwise they are the weights rounded to parts of the period.
fn counts_of(weights: &[f64], name: &str) -> Result<Vec<u64>> {
    if let Some(index) = weights
        .iter()
        .position(|weight| !(weight.is_finite() && *weight >= 0.0))
    {
        return bad(format!(
            "weight {index} of {name} is {}: it must be finite and not negative",
            weights[index]
        ));
    }
    // Divide by the largest first, since the sum of finite numbers need not be finite.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    if largest == 0.0 {
        return bad(format!("{name} has no weight above 0"));
    }
    let parts: Vec<f64> = weights.iter().map(|weight| weight / largest).collect();
    let sum: f64 = parts.iter().sum();
    let least = weights
        .iter()
        .copied()
        .filter(|weight| *weight > 0.0)
        .fold(f64::MAX, f64::min);
    let exact = |count: u64| {
        parts
            .iter()
            .map(|part| part / sum * count as f64)
            .collect::<Vec<_>>()
    };
    // The weights unchanged, as multiples of the smallest, and as 10,000ths.
    let scaled = [
        weights.to_vec(),
        weights.iter().map(|weight| weight / least).collect(),
        exact(TABLE_MAX),
    ];
    if let Some(counts) = scaled.iter().find_map(|scaled| whole(scaled)) {
        return Ok(counts);
    }
    let exact = exact(PERIOD);
    if let Some(index) = (0..exact.len()).find(|index| exact[*index] < 1.0 && weights[*index] > 0.0)
    {
        return bad(format!(
            "weight {index} of {name}, {}, is under 2^-32 of the sum",
            weights[index]
        ));
    }
    let mut counts: Vec<u64> = exact.iter().map(|exact| *exact as u64).collect();
    let mut order: Vec<usize> = (0..weights.len())
        .filter(|index| weights[*index] > 0.0)
        .collect();
    order.sort_by(|a, b| {
        (exact[*b] - counts[*b] as f64).total_cmp(&(exact[*a] - counts[*a] as f64))
    });
    let missing = PERIOD.saturating_sub(counts.iter().sum());
    order
        .iter()
        .cycle()
        .take(missing as usize)
        .for_each(|index| counts[*index] += 1);
    Ok(counts)
}

/// These numbers divided by their greatest common divisor, if they are whole and fit into a table.
fn whole(numbers: &[f64]) -> Option<Vec<u64>> {
    // The 1e-9 absorbs rounding: 0.3 × 10,000 is 2,999.9999999999995.
    let fit = numbers.iter().all(|number| {
        let is_whole = (number - number.round()).abs() <= 1e-9 * number.max(1.0);
        is_whole && *number < PERIOD as f64
    });
    if !fit {
        return None;
    }
    let counts: Vec<u64> = numbers.iter().map(|number| number.round() as u64).collect();
    let divisor = counts.iter().copied().fold(0, gcd);
    let lost = counts
        .iter()
        .zip(numbers)
        .any(|(count, number)| *count == 0 && *number > 0.0);
    let counts: Vec<u64> = counts.iter().map(|count| count / divisor.max(1)).collect();
    (!lost && divisor > 0 && counts.iter().sum::<u64>() <= TABLE_MAX).then_some(counts)
}

impl Schedule {
    /// `sources` has a hash of each source.
    fn new(tables: Vec<(u64, Vec<u64>)>, ids: &[Range<u64>], sources: &[u64], key: Key) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (firsts, lens) = ids
            .iter()
            .map(|ids| (ids.start, ids.end - ids.start))
            .unzip();
        let segments = Vec::with_capacity(tables.len());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let kept = Mutex::default();
        let mut schedule = Self {
            key,
            segments,
            lens,
            firsts,
            number,
            kept,
        };
        for (start, counts) in tables {
            let last = schedule.segments.last();
            let before = last.map_or_else(
                || vec![0; ids.len()],
                |last| schedule.drawn(last, start.into()),
            );
            // Sources that were appended later do not change the hash.
            let known = counts
                .iter()
                .rposition(|count| *count > 0)
                .map_or(0, |last| last + 1);
            let digest = Digest::new("segment")
                .word(last.map_or(0, |last| last.hash))
                .word(start);
            let hash = digest
                .words(&counts[..known])
                .words(&sources[..known])
                .end();
            let places = match counts.iter().sum::<u64>() {
                ..=TABLE_MAX => BlockPlaces::Table(variants(&counts, key.named("variants"))),
                _ => BlockPlaces::Parts(Shares::new(&counts, key.named("shares").derive(start))),
            };
            schedule.segments.push(MixSegment {
                start,
                counts,
                places,
                before,
                hash,
            });
        }
        schedule
    }

    /// Sample id at a position of the whole run.
    fn id(&self, position: u128) -> u64 {
        let (source, drawn) = self.draw(position);
        let len = u128::from(self.lens[source]);
        let pass = (drawn / len) as u64;
        let place = (drawn % len) as u64;
        self.firsts[source] + walked(self, source, pass, place)
    }

    /// The segment of a position.
    fn segment(&self, position: u128) -> &MixSegment {
        let next = self
            .segments
            .partition_point(|segment| u128::from(segment.start) <= position);
        &self.segments[next - 1]
    }

    /// The source at a position, and how often it was drawn before.
    fn draw(&self, position: u128) -> (usize, u128) {
        let segment = self.segment(position);
        let (block, place) = segment.place(position);
        let (source, earlier) = match &segment.places {
            BlockPlaces::Table(table) => {
                let (source, earlier) = self.variant(segment, table, block)[place as usize];
                (usize::from(source), u128::from(earlier))
            }
            BlockPlaces::Parts(shares) => self.in_part(segment, shares, block, place, |part| {
                let (source, earlier) = part.block.places[(place - part.block.from) as usize];
                (source as usize, u128::from(earlier))
            }),
        };
        (
            source,
            segment.before[source] + block * u128::from(segment.counts[source]) + earlier,
        )
    }

    /// For a segment with a table, the places of block number `block`: one of the table's variants,
    /// chosen at random.
    fn variant<'a>(
        &self,
        segment: &MixSegment,
        table: &'a [(u16, u16)],
        block: u128,
    ) -> &'a [(u16, u16)] {
        let len = segment.block();
        let key = self
            .key
            .named("variant")
            .derive(segment.start)
            .derive(block as u64);
        let variant = Draws::from_key(key).below(table.len() as u64 / len);
        &table[(variant * len) as usize..][..len as usize]
    }

    /// Calls `get` with the part of a long block that contains a place. Needs no lock if the
    /// thread's last call was for the same part.
    fn in_part<T>(
        &self,
        segment: &MixSegment,
        shares: &Shares,
        number: u128,
        place: u64,
        get: impl FnOnce(&BlockPart) -> T,
    ) -> T {
        thread_local!(static LAST: RefCell<Option<(u64, Arc<BlockPart>)>> = const { RefCell::new(None) });
        let fits = |part: &BlockPart| {
            (part.start, part.number) == (segment.start, number) && part.block.has(place)
        };
        LAST.with_borrow_mut(|last| {
            if let Some((_, part)) = last
                .as_ref()
                .filter(|(mix, part)| *mix == self.number && fits(part))
            {
                return get(part);
            }
            let mut kept = self.kept.hold();
            let part = kept
                .parts
                .iter()
                .find(|part| fits(part))
                .cloned()
                .unwrap_or_else(|| {
                    if kept.path.0 != segment.start {
                        kept.path = (segment.start, Path::new());
                    }
                    let block = shares.block(place, number as u64, &mut kept.path.1);
                    let part = Arc::new(BlockPart {
                        start: segment.start,
                        number,
                        block,
                    });
                    kept.parts.truncate(BLOCKS - 1);
                    kept.parts.push_front(part.clone());
                    part
                });
            drop(kept);
            get(&last.insert((self.number, part)).1)
        })
    }

    /// How often each source occurs before `position`, which is in the segment or at its end.
    fn drawn(&self, segment: &MixSegment, position: u128) -> Vec<u128> {
        let (block, place) = segment.place(position);
        let whole = segment.before.iter().zip(&segment.counts);
        let mut drawn: Vec<u128> = whole
            .map(|(before, count)| before + block * u128::from(*count))
            .collect();
        match &segment.places {
            BlockPlaces::Table(table) => {
                let places = &self.variant(segment, table, block)[..place as usize];
                places
                    .iter()
                    .for_each(|(source, _)| drawn[usize::from(*source)] += 1);
            }
            BlockPlaces::Parts(shares) => self.in_part(
                segment,
                shares,
                block,
                place,
                |BlockPart { block, .. }| {
                    drawn
                        .iter_mut()
                        .zip(&block.first)
                        .for_each(|(drawn, first)| *drawn += u128::from(*first));
                    let places = &block.places[..(place - block.from) as usize];
                    places
                        .iter()
                        .for_each(|(source, _)| drawn[*source as usize] += 1);
                },
            ),
        }
        drawn
    }

    /// Each source's share of the positions before this one, by its weights.
    fn asked(&self, position: u128) -> Vec<f64> {
        let mut asked = vec![0.0; self.lens.len()];
        let ends = self
            .segments
            .iter()
            .skip(1)
            .map(|next| u128::from(next.start))
            .chain([u128::MAX]);
        for (segment, end) in self.segments.iter().zip(ends) {
            let len = end.min(position).saturating_sub(segment.start.into()) as f64;
            let block = segment.block() as f64;
            asked
                .iter_mut()
                .zip(&segment.counts)
                .for_each(|(asked, count)| *asked += len * *count as f64 / block);
        }
        asked
    }

    /// A hash of the key.
    fn root(&self) -> u64 {
        Draws::from_key(self.key).next_u64()
    }

    /// The segments, each with the next segment and two numbers for each source: its samples not
    /// yet drawn at the segment's start, and how often it occurs in a block.
    fn spans(&self) -> impl Iterator<Item = (&MixSegment, Option<&MixSegment>, Vec<(u128, u128)>)> {
        self.segments.iter().enumerate().map(|(index, segment)| {
            let left = |(len, before): (&u64, &u128)| u128::from(*len).saturating_sub(*before);
            let left = self.lens.iter().zip(&segment.before).map(left);
            let sources = left
                .zip(segment.counts.iter().map(|count| u128::from(*count)))
                .collect();
            (segment, self.segments.get(index + 1), sources)
        })
    }

    /// The end of the first block, or of the first segment if that is shorter; for a long block,
    /// the end of its first position.
    fn first_end(&self) -> u64 {
        let first = &self.segments[0];
        let block = if first.has_table() { first.block() } else { 1 };
        self.segments
            .get(1)
            .map_or(u64::MAX, |next| next.start)
            .min(block)
    }

    /// The last end of a block, or of a segment, before any source repeats; at least the first end.
    fn until_first_ends(&self) -> u64 {
        let found = self
            .spans()
            .find(|(_, next, _)| {
                !next.is_some_and(|next| {
                    next.before
                        .iter()
                        .zip(&self.lens)
                        .all(|(before, len)| *before <= u128::from(*len))
                })
            })
            .map_or(0, |(segment, _, sources)| {
                let drawn = sources.iter().filter(|(_, count)| *count > 0);
                let mut end = drawn
                    .map(|(left, count)| segment.end_within(*left, *count))
                    .min()
                    .unwrap_or(0);
                let is_over = |end| {
                    self.drawn(segment, end)
                        .iter()
                        .zip(&self.lens)
                        .any(|(drawn, len)| *drawn > u128::from(*len))
                };
                while !segment.has_table() && end > u128::from(segment.start) && is_over(end) {
                    end -= 1;
                }
                end
            });
        u64::try_from(found)
            .unwrap_or(u64::MAX)
            .max(self.first_end())
    }

    /// The first end of a block, or of a segment, where only sources that are not drawn again have
    /// unseen samples.
    fn until_all_seen(&self) -> u64 {
        let found = self.spans().find_map(|(segment, next, sources)| {
            let unseen = sources
                .iter()
                .filter(|(left, count)| *left > 0 && (*count > 0 || next.is_some()));
            // A later segment may draw from it.
            let ends = unseen.map(|(left, count)| {
                if *count > 0 {
                    segment.end_after(*left, *count)
                } else {
                    u128::MAX
                }
            });
            let mut end = ends.max().unwrap_or(u128::from(segment.start));
            let is_short = |end| {
                let drawn = self.drawn(segment, end);
                drawn
                    .iter()
                    .zip(&self.lens)
                    .zip(&segment.counts)
                    .any(|((drawn, len), count)| *count > 0 && *drawn < u128::from(*len))
            };
            while !segment.has_table() && end < u128::from(u64::MAX) && is_short(end) {
                end += 1;
            }
            next.is_none_or(|next| end <= u128::from(next.start))
                .then_some(end)
        });
        u64::try_from(found.unwrap_or(0))
            .unwrap_or(u64::MAX)
            .max(self.first_end())
    }
}

impl MixSegment {
    /// Positions of a block.
    fn block(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn has_table(&self) -> bool {
        matches!(self.places, BlockPlaces::Table(_))
    }

    /// Number of the block that contains `position`, and the position's place in that block.
    fn place(&self, position: u128) -> (u128, u64) {
        let len = u128::from(self.block());
        let rest = position - u128::from(self.start);
        (rest / len, (rest % len) as u64)
    }

    /// The last end of a block (for a long block, the last position) before which a source with
    /// `count` places per block occurs at most `left` times.
    fn end_within(&self, left: u128, count: u128) -> u128 {
        let len = u128::from(self.block());
        u128::from(self.start)
            + if self.has_table() {
                left / count * len
            } else {
                left * len / count
            }
    }

    /// The first end of a block (for a long block, the first position) before which the source
    /// occurs at least `left` times.
    fn end_after(&self, left: u128, count: u128) -> u128 {
        let len = u128::from(self.block());
        u128::from(self.start)
            + if self.has_table() {
                left.div_ceil(count) * len
            } else {
                (left * len).div_ceil(count)
            }
    }
}

/// Spreads the sources of a block evenly: source *s* occurs `counts[s]` times, and its occurrence
/// *k* lies between *k* and *k* + 1 times its mean distance. Earliest deadline first finds such
/// places for all sources, because together they fill the block exactly.
fn spread(counts: &[u64]) -> Vec<(u16, u16)> {
    let block: u64 = counts.iter().sum();
    let used: Vec<usize> = (0..counts.len())
        .filter(|source| counts[*source] > 0)
        .collect();
    let mut done = vec![0_u64; counts.len()];
    let mut places = Vec::with_capacity(block as usize);
    for place in 0..block {
        let source = used
            .iter()
            .copied()
            .filter(|source| {
                done[*source] < counts[*source]
                    && window(counts[*source], block, done[*source]).start <= place
            })
            .min_by_key(|source| window(counts[*source], block, done[*source]).end);
        let source = source.expect("the counts add up to the block, so some source is always due");
        places.push((source as u16, done[source] as u16));
        done[source] += 1;
    }
    places
}

/// Places where a source with `count` places per block may occur after `earlier` occurrences, so
/// that its count is never off its share by 1 or more.
fn window(count: u64, block: u64, earlier: u64) -> Range<u64> {
    earlier * block / count..((earlier + 1) * block).div_ceil(count)
}

/// Variants of a block, one after the other: the spread sources, each in turn moved to a random
/// place in its window, as far as the windows of the sources in between allow; then the same in
/// reverse, so that the variants favour neither end.
fn variants(counts: &[u64], key: Key) -> Vec<(u16, u16)> {
    let spread = spread(counts);
    let block = spread.len() as u64;
    let window =
        |(source, earlier): (u16, u16)| window(counts[usize::from(source)], block, earlier.into());
    (0..(PLACES / block).clamp(*VARIANTS.start(), *VARIANTS.end()) / 2)
        .flat_map(|number| {
            let mut places = spread.clone();
            let mut draws = Draws::from_key(key.derive(number));
            let mut turns = spread.clone();
            turns.sort_by_cached_key(|_| draws.next_u64());
            for moved in turns {
                let mut all = window(moved);
                let to = all.start + draws.below(all.end - all.start);
                let mut at = all
                    .find(|at| places[*at as usize] == moved)
                    .expect("none leaves its window");
                while at != to {
                    let next = if at < to { at + 1 } else { at - 1 };
                    let met = places[next as usize];
                    if met.0 == moved.0 || !window(met).contains(&at) {
                        break;
                    }
                    places.swap(at as usize, next as usize);
                    at = next;
                }
            }
            let reversed: Vec<_> = places
                .iter()
                .rev()
                .map(|(source, earlier)| {
                    (*source, counts[usize::from(*source)] as u16 - 1 - earlier)
                })
                .collect();
            [places, reversed].concat()
        })
        .collect()
}

/// A permutation kept by a thread, since making one may take microseconds.
struct PassWalk {
    mix: u64,
    source: usize,
    pass: u64,
    permutation: Permutation,
}

/// Entry `place` of a pass's permutation. No lock, and no allocation except at the start of a pass.
fn walked(schedule: &Schedule, source: usize, pass: u64, place: u64) -> u64 {
    thread_local!(static KEPT: RefCell<Vec<Option<PassWalk>>> = const { RefCell::new(Vec::new()) });
    KEPT.with_borrow_mut(|kept| {
        kept.resize_with(WALKS, || None);
        let slot = &mut kept[(schedule.number as usize)
            .wrapping_mul(31)
            .wrapping_add(source)
            % WALKS];
        if !slot.as_ref().is_some_and(|walk| {
            (walk.mix, walk.source, walk.pass) == (schedule.number, source, pass)
        }) {
            let key = schedule.key.derive(source as u64).derive(pass);
            let permutation = Permutation::new(schedule.lens[source], key);
            *slot = Some(PassWalk {
                mix: schedule.number,
                source,
                pass,
                permutation,
            });
        }
        slot.as_ref().map_or(0, |walk| walk.permutation.get(place))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn weights_become_the_smallest_whole_numbers() {
        let cases: [(&[f64], &[u64]); 11] = [
            (&[0.7, 0.3], &[7, 3]),
            (&[1.0, 1.0], &[1, 1]),
            (&[5.0], &[1]),
            (&[1.0, 1.0, 1.0], &[1, 1, 1]),
            (&[1.0 / 3.0, 2.0 / 3.0], &[1, 2]),
            (&[4.0, 4.0, 6.0], &[2, 2, 3]),
            (&[0.1, 0.2, 0.3, 0.4], &[1, 2, 3, 4]),
            (&[1e308, 1e308], &[1, 1]),
            (&[1e-320, 3e-320], &[1, 3]),
            (&[1.0, 0.0, 3.0], &[1, 0, 3]),
            // Too large for a table: the rounding remainder goes to the sources that have a weight.
            (
                &[0.0, 10_001.0, 20_002.0, 1.0],
                &[0, 1_431_608_050, 2_863_216_100, 143_146],
            ),
        ];
        for (weights, counts) in cases {
            assert_eq!(counts_of(weights, "").unwrap(), counts, "{weights:?}");
        }
        for weights in [
            &[0.0, 0.0][..],
            &[],
            &[-1.0],
            &[f64::NAN, 1.0],
            &[f64::INFINITY],
            &[1.0, 1e-10],
        ] {
            assert_eq!(
                counts_of(weights, "").unwrap_err().kind(),
                ErrorKind::Config,
                "{weights:?}"
            );
        }
    }

    #[test]
    fn a_block_spreads_its_sources_evenly() {
        let sources = |counts: &[u64]| {
            spread(counts)
                .iter()
                .map(|(source, _)| *source)
                .collect::<Vec<_>>()
        };
        assert_eq!(sources(&[1, 1]), [0, 1]);
        assert_eq!(sources(&[3, 0, 1]), [0, 0, 0, 2]);
        assert_eq!(sources(&[7, 3]), [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]);
    }

    #[test]
    fn variants_bring_a_rare_source_to_every_place() {
        let block: u64 = 8;
        let places = variants(&[7, 1], Key::new(3));
        let mut at = [0; 8];
        for variant in places.chunks(block as usize) {
            at[variant.iter().position(|(source, _)| *source == 1).unwrap()] += 1;
        }
        // 64 variants: 8 each on average.
        assert!(at.iter().all(|times| (1..=20).contains(times)), "{at:?}");
        assert_eq!(variants(&[9999, 1], Key::new(3)).len(), 80_000);
    }

    /// A schedule of these segments, over sources of these lengths.
    fn schedule(segments: &[(u64, Vec<u64>)], lens: &[u64], key: u64) -> Schedule {
        let starts = lens
            .iter()
            .scan(0, |next, len| Some(std::mem::replace(next, *next + len)));
        let ids: Vec<_> = starts
            .zip(lens)
            .map(|(start, len)| start..start + len)
            .collect();
        Schedule::new(segments.to_vec(), &ids, lens, Key::new(key))
    }

    /// A schedule of one segment.
    fn whole(counts: &[u64], lens: &[u64], key: u64) -> Schedule {
        schedule(&[(0, counts.to_vec())], lens, key)
    }

    fn segments() -> impl Strategy<Value = Vec<(u64, Vec<u64>)>> {
        (
            1_usize..6,
            prop::collection::vec((1_u64..200, prop::collection::vec(0_u64..30, 6)), 1..6),
        )
            .prop_map(|(sources, segments)| {
                let starts = segments.iter().scan(0, |next, (len, _)| {
                    Some(std::mem::replace(next, *next + len))
                });
                let counts = segments.iter().map(|(_, counts)| {
                    let mut counts = counts[..sources].to_vec();
                    counts[0] += u64::from(counts.iter().all(|count| *count == 0));
                    counts
                });
                starts.zip(counts).collect()
            })
    }

    proptest! {
        #[test]
        fn every_place_of_every_variant_is_due(counts in prop::collection::vec(1_u64..40, 1..8), key in any::<u64>()) {
            let block: u64 = counts.iter().sum();
            let places = variants(&counts, Key::new(key));
            for variant in places.chunks(block as usize) {
                let mut done = vec![0_u64; counts.len()];
                for (place, (source, before)) in variant.iter().enumerate() {
                    prop_assert_eq!(u64::from(*before), done[usize::from(*source)]);
                    done[usize::from(*source)] += 1;
                    for (source, count) in counts.iter().enumerate() {
                        // The error is less than one: |done × block − (place + 1) × count| < block.
                        let off = (done[source] * block).abs_diff((place as u64 + 1) * count);
                        prop_assert!(off < block, "{:?} at {}", counts, place);
                    }
                }
                prop_assert_eq!(&done, &counts);
            }
        }

        #[test]
        fn blocks_have_exact_shares_and_any_run_nearly(
            counts in prop::collection::vec(1_u64..30, 1..6), key in any::<u64>(), from in 0_u64..500, len in 1_u64..500,
        ) {
            let schedule = whole(&counts, &vec![10; counts.len()], key);
            let block: u64 = counts.iter().sum();
            let count = |range: Range<u64>, source: usize| {
                range.filter(|position| schedule.draw(u128::from(*position)).0 == source).count() as u64
            };
            for (source, share) in counts.iter().enumerate() {
                let found = count(from..from + len, source);
                prop_assert!((found * block).abs_diff(len * share) < 2 * block);
                prop_assert_eq!(count(from * block..(from + 1) * block, source), *share);
            }
        }

        #[test]
        fn draws_have_no_gap_and_segments_exact_shares(segments in segments(), key in any::<u64>()) {
            let lens = vec![10; segments[0].1.len()];
            let schedule = schedule(&segments, &lens, key);
            let mut next = vec![0_u128; lens.len()];
            let mut position = 0;
            let ends = segments.iter().skip(1).map(|(start, _)| *start).chain([u64::from(u16::MAX)]);
            for (index, ((start, counts), end)) in segments.iter().zip(ends).enumerate() {
                let before = next.clone();
                let block = counts.iter().sum::<u64>();
                prop_assert_eq!(&schedule.segments[index].before, &before);
                while position < end.min(start + 300) {
                    let (source, drawn) = schedule.draw(u128::from(position));
                    prop_assert_eq!(drawn, next[source]);
                    next[source] += 1;
                    position += 1;
                    // This holds wherever the segment ends.
                    for (source, count) in counts.iter().enumerate() {
                        let got = (next[source] - before[source]) as u64;
                        prop_assert!((got * block).abs_diff((position - start) * count) < block);
                    }
                }
                prop_assert_eq!(&schedule.drawn(&schedule.segments[index], position.into()), &next);
            }
        }

        #[test]
        fn samples_of_a_source_come_equally_often(
            segments in segments(), lens in prop::collection::vec(1_u64..20, 6), key in any::<u64>(), positions in 1_u64..1000,
        ) {
            let lens = &lens[..segments[0].1.len()];
            let schedule = schedule(&segments, lens, key);
            let mut seen = vec![0_u64; lens.iter().sum::<u64>() as usize];
            let mut drawn = vec![0_u64; lens.len()];
            for position in 0..positions {
                seen[schedule.id(u128::from(position)) as usize] += 1;
                drawn[schedule.draw(u128::from(position)).0] += 1;
            }
            let mut seen = &seen[..];
            for (len, drawn) in lens.iter().zip(drawn) {
                let (own, rest) = seen.split_at(*len as usize);
                seen = rest;
                prop_assert!(own.iter().all(|times| *times == drawn / len || *times == drawn.div_ceil(*len)));
            }
        }

        #[test]
        fn epochs_end_where_a_walk_finds_it(
            segments in segments(), lens in prop::collection::vec(1_u64..90, 6), key in any::<u64>(),
        ) {
            let lens = &lens[..segments[0].1.len()];
            let schedule = schedule(&segments, lens, key);
            let is_end = |position: u64| {
                let segment = schedule.segments.iter().rfind(|segment| segment.start <= position).unwrap();
                (position - segment.start).is_multiple_of(segment.block())
            };
            let last = &segments[segments.len() - 1];
            let drawn = |position: u64| {
                let segment = schedule.segments.iter().rfind(|segment| segment.start <= position).unwrap();
                schedule.drawn(segment, position.into())
            };
            let within = |position| drawn(position).iter().zip(lens).all(|(drawn, len)| *drawn <= u128::from(*len));
            // The samples of a source that is not drawn again need not be seen.
            let seen = |position| drawn(position).iter().zip(lens).zip(&last.1)
                .all(|((drawn, len), count)| *drawn >= u128::from(*len) || (*count == 0 && position >= last.0));
            let first = schedule.first_end();
            let ends = || (first..30_000).filter(|position| is_end(*position));
            prop_assert_eq!(schedule.until_first_ends(), ends().take_while(|end| within(*end)).last().unwrap_or(first));
            prop_assert_eq!(schedule.until_all_seen(), ends().find(|end| seen(*end)).unwrap());
        }
    }

    #[test]
    fn an_epoch_may_end_with_a_segment_that_is_shorter_than_its_block() {
        let schedule = schedule(&[(0, vec![16]), (15, vec![2])], &[1], 0);
        assert_eq!(
            (schedule.until_first_ends(), schedule.until_all_seen()),
            (15, 15)
        );
    }

    #[test]
    fn a_ramp_is_linear_and_drops_what_is_too_small() {
        let ramp = Mix::ramp(100..300, &[1.0], &[0.0, 1.0]);
        assert_eq!(
            (ramp.len(), ramp[0].0, &ramp[64]),
            (65, 100, &(300, vec![0.0, 1.0]))
        );
        assert!(ramp.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!(ramp[31].1, [1.0 - 31.5 / 64.0, 31.5 / 64.0]);
        assert_eq!(Mix::ramp(5..8, &[1.0], &[2.0]).len(), 4);
        assert_eq!(Mix::ramp(5..5, &[1.0], &[2.0]), [(5, vec![2.0])]);
        let small = Mix::ramp(0..64, &[1.0, 0.0], &[1.0, 1.2e-8]);
        assert_eq!((small[0].1[1], small[1].1[1] > 0.0), (0.0, true));
        tables_of(&small, 2).unwrap();
    }

    #[test]
    fn a_block_without_a_table_draws_without_a_gap() {
        // The middle segment has a table; the first period of the last segment ends within the
        // test.
        let long = [PERIOD - 5_000_000, 4_999_990, 10];
        let segments = [
            (0, long.to_vec()),
            (40_000, vec![7, 3, 0]),
            (50_000, long.to_vec()),
        ];
        let schedule = schedule(&segments, &[1 << 40, 90, 4], 3);
        let mut next = schedule.drawn(&schedule.segments[0], 0);
        assert_eq!(next, [0; 3]);
        for position in 0..100_000 {
            let (source, drawn) = schedule.draw(position);
            assert_eq!(drawn, next[source], "{position}");
            next[source] += 1;
        }
        assert_eq!(schedule.drawn(&schedule.segments[2], 100_000), next);
        let start = u128::from(PERIOD) + 50_000;
        let next = schedule.drawn(&schedule.segments[2], start);
        assert_eq!(next[2], schedule.segments[2].before[2] + 10);
        let found: Vec<_> = (start - 3..start + 3)
            .map(|position| schedule.draw(position))
            .collect();
        assert_eq!(found[3].1, next[found[3].0]);
        // Other threads and later calls find the same.
        let again = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    (start - 3..start + 3)
                        .rev()
                        .map(|position| schedule.draw(position))
                        .collect::<Vec<_>>()
                })
                .join()
                .unwrap()
        });
        assert!(again.iter().rev().eq(&found));
        let ends = super::tests::schedule(&[(0, long.to_vec())], &[1 << 40, 90, 4], 3);
        let first = ends.until_first_ends();
        let seen = ends.until_all_seen();
        let drawn = |end: u64| ends.drawn(&ends.segments[0], end.into());
        assert!(
            drawn(first)
                .iter()
                .zip(&ends.lens)
                .all(|(drawn, len)| *drawn <= u128::from(*len))
        );
        assert!(
            drawn(seen)
                .iter()
                .zip(&ends.lens)
                .all(|(drawn, len)| *drawn >= u128::from(*len))
        );
        assert!(first > 70_000 && seen > 1 << 40, "{first} {seen}");
    }

    #[test]
    fn positions_of_long_runs_do_not_overflow() {
        let schedule = schedule(
            &[(0, vec![1, 9999]), (7, vec![0, 1]), (u64::MAX, vec![1, 1])],
            &[3, u64::MAX / 2],
            1,
        );
        let id = schedule.id(u128::from(u64::MAX) * u128::from(u64::MAX));
        assert!(id < 3 + u64::MAX / 2);
    }
}
