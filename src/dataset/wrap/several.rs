//! Several datasets as one: one after the other, or mixed by weights.
//!
//! ```text
//! Concat:  ids  0 … a-1 | a … a+b-1 | …              the parts in order, their sources in one table
//!
//! Mix:     position of the run ──► block, place in it ──► source, how many of it came before ──► pass, place in the pass
//!          (epoch × len + position)     (a table)                                            ──► keyed permutation ──► id
//! ```
//!
//! Limits: parts have the same schema; a mix has at most 1,024 sources, each with at least 1/10,000 of the weight.
//! Memory: a mix has a table of at most 10,000 places, whatever the datasets' lengths, and each thread keeps the
//! permutations in use.

use crate::dataset::digest::Digest;
use crate::dataset::forward::{frames_of, own};
use crate::dataset::starts::Starts;
use crate::dataset::{ChunkBytes, Chunked, Dataset, DatasetExt, Framed, Parts, Sizes};
use crate::decode::Scratch;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::ChunkBuf;
use crate::order::{Draws, Key, Order, Permutation, Sampler, gcd};
use crate::storage::{Extent, SourceId, Sources};
use crate::tensor::EncodedField;
use bytes::Bytes;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Concatenates datasets: the ids of the second follow the ids of the first.
///
/// All must have the same fields. Datasets of different types go in as `Arc<dyn Dataset>`:
///
/// ```
/// # use feedline::dataset::{Concat, Dataset, Records, Tokens};
/// # use feedline::tensor::DType;
/// # use std::sync::Arc;
/// let a: Arc<dyn Dataset> = Arc::new(Records::builder(8).field("tokens", DType::U16, [4]).open_bytes([0; 16])?);
/// let b: Arc<dyn Dataset> = Arc::new(Tokens::builder(DType::U16).window(4).open_bytes([1; 24])?);
/// let both = Concat::new([a, b])?;
/// assert_eq!((both.len(), both.origin(3)), (5, (1, 1)));
/// # Ok::<(), feedline::Error>(())
/// ```
pub struct Concat {
    parts: Vec<Member>,
    starts: Starts,
    sources: Arc<Sources>,
    chunks: Option<Chunks>,
}

struct Member {
    dataset: Arc<dyn Dataset>,
    /// Offset of its source ids.
    base: usize,
}

/// Chunks of all parts, if the parts have chunks.
struct Chunks {
    /// First sample of every chunk, then the total number of samples.
    starts: Vec<u64>,
    /// Number of chunks before each part.
    before: Vec<usize>,
}

impl Concat {
    /// Concatenates `datasets` in this order.
    ///
    /// Errors: [`ErrorKind::Config`] for no dataset, for a mixture of parts with and without chunks, and for fields
    /// that differ, with part and field.
    pub fn new<D: Dataset>(datasets: impl IntoIterator<Item = D>) -> Result<Self> {
        let datasets: Vec<Arc<dyn Dataset>> = datasets.into_iter().map(|part| Arc::new(part) as _).collect();
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        let Some(first) = datasets.first().cloned() else {
            return bad("no datasets to concatenate".into());
        };
        let starts = Starts::of(datasets.iter().map(|part| part.len()))?;
        let (mut sources, mut parts) = (Sources::new(), Vec::new());
        for (index, dataset) in datasets.into_iter().enumerate() {
            if let Some(message) = unlike(first.schema(), dataset.schema()) {
                return bad(format!("part {index} ({}) does not fit part 0: {message}", dataset.describe()));
            }
            if dataset.chunked().is_some() != first.chunked().is_some() {
                return bad(format!("of part {index} and part 0 only one has chunks"));
            }
            let base = sources.append(dataset.sources())?;
            parts.push(Member { dataset, base });
        }
        let chunks = first.chunked().is_some().then(|| Chunks::new(&parts, starts.all())).transpose()?;
        Ok(Self { parts, starts, sources: Arc::new(sources), chunks })
    }

    /// Part of a sample, and its id in that part. `sample` must be below `len`.
    pub fn origin(&self, sample: u64) -> (usize, u64) {
        self.starts.locate(sample)
    }

    /// Number of parts.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Ids of the samples of part `part`.
    pub fn ids_of(&self, part: usize) -> std::ops::Range<u64> {
        self.starts.all()[part]..self.starts.all()[part + 1]
    }

    /// Part of a sample, and the sample's id in that part.
    fn part_of(&self, sample: u64) -> (&dyn Dataset, u64) {
        let (part, local) = self.origin(sample);
        (&*self.parts[part].dataset, local)
    }

    /// Part of a chunk, and the chunk's number in that part.
    fn chunk_of(&self, chunk: usize) -> Option<(&Member, &dyn Chunked, usize)> {
        let before = &self.chunks.as_ref()?.before;
        let part = before.partition_point(|before| *before <= chunk).checked_sub(1)?;
        let member = &self.parts[part];
        Some((member, member.dataset.chunked()?, chunk - before[part]))
    }
}

/// First difference between two schemas.
fn unlike(first: &[EncodedField], other: &[EncodedField]) -> Option<String> {
    let names = |fields: &[EncodedField]| fields.iter().map(|field| field.name.clone()).collect::<Vec<_>>().join(", ");
    if names(first) != names(other) {
        return Some(format!("its fields are {}, not {}", names(other), names(first)));
    }
    let (a, b) = first.iter().zip(other).find(|(a, b)| a != b)?;
    Some(format!("its field `{}` is {}, not {}", b.name, b.encoding, a.encoding))
}

impl Chunks {
    fn new(parts: &[Member], part_starts: &[u64]) -> Result<Self> {
        let (mut starts, mut before) = (Vec::new(), Vec::new());
        for (index, part) in parts.iter().enumerate() {
            before.push(starts.len());
            // Ids of a subset are not those of its chunks.
            let whole = part.dataset.chunked().filter(|chunks| chunks.is_whole());
            let own = whole.map_or(&[][..], Chunked::starts);
            let Some((last, own)) = own.split_last().filter(|(last, _)| **last == part.dataset.len()) else {
                let message = format!("the chunks of part {index} do not end with its last sample");
                return Err(Error::new(ErrorKind::User, Stage::Index, message));
            };
            debug_assert!(own.iter().all(|start| start <= last));
            starts.extend(own.iter().map(|start| start + part_starts[index]));
        }
        starts.push(part_starts[parts.len()]);
        Ok(Self { starts, before })
    }
}

impl Dataset for Concat {
    fn schema(&self) -> &[EncodedField] {
        self.parts[0].dataset.schema()
    }

    fn len(&self) -> u64 {
        self.starts.len()
    }

    own!(sources framed);

    fn sizes(&self) -> Sizes {
        // The parts also keep their own tables of sources.
        let chunks = self.chunks.as_ref().map_or(0, |chunks| chunks.starts.capacity() * 8);
        let mut all = Sizes { index_bytes: chunks, ..Sizes::new(0) };
        for (part, first) in self.parts.iter().zip(self.starts.all()) {
            let (own, table) = (part.dataset.sizes(), part.dataset.sources().table_bytes());
            // Of several with as many bytes, the last.
            if own.sample_bytes_max >= all.sample_bytes_max {
                all.sample_bytes_max = own.sample_bytes_max;
                all.largest_sample = own.largest_sample.map(|sample| first + sample);
            }
            all.appended_max = all.appended_max.max(own.appended_max);
            all.opened_bytes_max = all.opened_bytes_max.max(own.opened_bytes_max);
            all.index_bytes += own.index_bytes + table;
        }
        all
    }

    fn extents<'a>(&'a self, sample: u64, parts: &mut Parts<'a>) -> Result<()> {
        let (part, local) = self.origin(sample);
        let (member, before) = (&self.parts[part], parts.len());
        member.dataset.extents(local, parts)?;
        parts.move_sources(before, member.base);
        Ok(())
    }

    fn chunked(&self) -> Option<&dyn Chunked> {
        self.chunks.is_some().then_some(self)
    }

    fn identity(&self) -> u64 {
        let part = |digest: Digest, part: &Member| {
            let dataset = &part.dataset;
            digest.word(dataset.len()).word(dataset.sources().count() as u64).word(dataset.identity())
        };
        self.parts.iter().fold(Digest::new("concat"), part).end()
    }

    fn describe(&self) -> String {
        let parts: Vec<String> = self.parts.iter().map(|part| part.dataset.describe()).collect();
        format!("{} samples of {} parts: {}", self.len(), parts.len(), parts.join("; "))
    }
}

impl Framed for Concat {
    frames_of!(self, sample => self.part_of(sample); check open field_bytes member seek_points);

    fn field_bytes_max(&self, field: usize) -> Result<Option<u64>> {
        self.parts.iter().try_fold(0, |most, part| Ok(part.dataset.field_bytes_max(field)?.max(most))).map(Some)
    }
}

impl Chunked for Concat {
    fn starts(&self) -> &[u64] {
        self.chunks.as_ref().map_or(&[], |chunks| &chunks.starts)
    }

    fn is_whole(&self) -> bool {
        true
    }

    fn inner(&self, sample: u64) -> u64 {
        sample
    }

    fn chunk_extents(&self, chunk: usize, extents: &mut Vec<Extent>) -> Result<()> {
        let Some((member, chunked, local)) = self.chunk_of(chunk) else { return Err(no_chunk(chunk)) };
        let before = extents.len();
        chunked.chunk_extents(local, extents)?;
        for extent in &mut extents[before..] {
            extent.source = SourceId::at(extent.source.index() + member.base);
        }
        Ok(())
    }

    fn chunk_bytes(&self, chunk: usize) -> ChunkBytes {
        self.chunk_of(chunk).map_or(ChunkBytes::default(), |(_, chunked, local)| chunked.chunk_bytes(local))
    }

    fn open_chunk(&self, chunk: usize, pieces: &[Bytes], scratch: &mut Scratch, out: &mut ChunkBuf) -> Result<()> {
        let Some((_, chunked, local)) = self.chunk_of(chunk) else { return Err(no_chunk(chunk)) };
        chunked.open_chunk(local, pieces, scratch, out)
    }

    fn chunk_name(&self, chunk: usize) -> String {
        self.chunk_of(chunk).map_or(String::new(), |(_, chunked, local)| chunked.chunk_name(local))
    }
}

fn no_chunk(chunk: usize) -> Error {
    Error::new(ErrorKind::User, Stage::Read, format!("there is no chunk {chunk}"))
}

/// Weights are rounded to this fraction of their sum.
const PARTS_OF_WEIGHT: u64 = 10_000;
const SOURCES_MAX: usize = 1024;
/// Number of places in the pattern at which a block may start.
const PHASES: u64 = 64;
/// Number of permutations that a thread keeps.
const WALKS: usize = 256;

/// Mixes datasets by weights: a [`Concat`] of them, and the order that draws from it.
///
/// ```
/// # use feedline::dataset::{Mix, Records};
/// # use feedline::Loader;
/// # let records = |count: usize| Records::builder(1).open_bytes(vec![7; count]);
/// let (web, code) = (records(9000)?, records(500)?);
/// let mix = Mix::new([(web, 0.7), (code, 0.3)], 42)?.epoch_len(1000)?;
/// let loader = Loader::builder(mix.dataset()).order(mix.order()).batch_size(100).build()?;
/// let code = mix.dataset().ids_of(1);
/// let drawn: usize = loader.epoch(0)?.map(|batch| Ok(batch?.ids().iter().filter(|id| code.contains(id)).count()))
///     .sum::<feedline::Result<_>>()?;
/// assert_eq!(drawn, 300);
/// # Ok::<(), feedline::Error>(())
/// ```
///
/// The exact rules:
/// - Weights are rounded to 10,000ths of their sum, by largest remainders, and reduced: 0.7 and 0.3 give a *block* of
///   10 positions, 7 and 3 of the sources; a block has at most 10,000. **Every block has exactly these counts**, counted
///   from the first position of epoch 0. Within a block the sources are spread evenly: any run of *n* consecutive
///   positions has a source's share of *n*, with an error below 4. Blocks start at different places of the pattern, so no
///   row of a batch and no rank always gets the same source.
/// - Each source is walked **pass by pass**: every sample once in an order of (key, source, pass), then all again in
///   another order. Passes continue across epochs: a source with 9,000 samples and 1,000 draws per epoch repeats none
///   in nine epochs. At any position the samples of a source have come equally often, with a difference of at most one.
/// - An epoch has one position per sample of all datasets, unless [`epoch_len`](Self::epoch_len),
///   [`until_first_ends`](Self::until_first_ends) or [`until_all_seen`](Self::until_all_seen) says otherwise.
///
/// The id at a position depends on (key, weights, lengths, epoch length, epoch, position) alone.
#[derive(Clone)]
pub struct Mix {
    dataset: Arc<Concat>,
    pattern: Arc<Pattern>,
    len: u64,
    seed: u64,
}

/// The pattern of a block, and the starts that blocks may have.
struct Pattern {
    key: Key,
    /// Source at each place, with its count of earlier places in the block.
    places: Vec<(u32, u32)>,
    /// Count of each source in a block.
    counts: Vec<u64>,
    /// Places at which blocks may start, with the count of each source before them.
    phases: Vec<(u64, Box<[u32]>)>,
    /// Number of samples and first id of each source.
    lens: Vec<u64>,
    firsts: Vec<u64>,
    /// Number of the mix: it separates the permutations of different mixes.
    number: u64,
}

impl Mix {
    /// Mixes `datasets` by weights, whose sum need not be 1.
    ///
    /// Errors: [`ErrorKind::Config`] for a weight of 0 or less, or under 1/10,000 of the sum, for a dataset without
    /// samples, for a dataset with chunks (its samples have no random access), and the errors of [`Concat::new`].
    pub fn new<D: Dataset>(datasets: impl IntoIterator<Item = (D, f64)>, key: u64) -> Result<Self> {
        let (datasets, weights): (Vec<D>, Vec<f64>) = datasets.into_iter().unzip();
        let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
        if datasets.len() > SOURCES_MAX {
            return bad(format!("{} datasets in a mix; the limit is {SOURCES_MAX}", datasets.len()));
        }
        let dataset = Concat::new(datasets)?;
        if dataset.chunked().is_some() {
            return bad("datasets with chunks cannot be mixed: their samples have no random access".into());
        }
        let counts = counts_of(&weights)?;
        let ids: Vec<_> = (0..dataset.parts()).map(|part| dataset.ids_of(part)).collect();
        if let Some(empty) = ids.iter().position(|ids| ids.is_empty()) {
            return bad(format!("dataset {empty} of the mix has no samples"));
        }
        let pattern = Pattern::new(counts, &ids, Key::new(key).named("mix"));
        let len = dataset.len();
        Ok(Self { dataset: Arc::new(dataset), pattern: Arc::new(pattern), len, seed: key })
    }

    /// Sets the number of positions of an epoch.
    ///
    /// Errors: [`ErrorKind::Config`] for 0.
    pub fn epoch_len(mut self, positions: u64) -> Result<Self> {
        if positions == 0 {
            return Err(Error::new(ErrorKind::Config, Stage::Index, "an epoch of 0 positions"));
        }
        self.len = positions;
        Ok(self)
    }

    /// Ends an epoch before any source repeats: it has as many whole blocks as fit one pass of every source, at least
    /// one block. So no sample repeats in epoch 0.
    #[must_use]
    pub fn until_first_ends(mut self) -> Self {
        self.len = self.pattern.blocks(|len, count| len / count, u64::min);
        self
    }

    /// Ends an epoch after the slowest source's first pass, in whole blocks: epoch 0 delivers every sample.
    #[must_use]
    pub fn until_all_seen(mut self) -> Self {
        self.len = self.pattern.blocks(|len, count| len.div_ceil(count), u64::max);
        self
    }

    /// The concatenated datasets; [`Concat::origin`] gives the part of an id.
    pub fn dataset(&self) -> Arc<Concat> {
        self.dataset.clone()
    }

    /// The order that mixes them; its key also seeds transforms. Valid for this mix's dataset only.
    pub fn order(&self) -> Order {
        Order::sampler(self.clone()).with_seed(self.seed)
    }

    /// Count of each source in a block.
    pub fn block(&self) -> &[u64] {
        &self.pattern.counts
    }
}

impl Sampler for Mix {
    fn len(&self) -> u64 {
        self.len
    }

    fn id(&self, epoch: u64, position: u64) -> u64 {
        self.pattern.id(u128::from(epoch) * u128::from(self.len) + u128::from(position))
    }

    fn identity(&self) -> u64 {
        let Pattern { key, counts, lens, .. } = &*self.pattern;
        let key = Draws::from_key(*key).next_u64();
        Digest::new("mix").word(key).word(self.len).words(counts).words(lens).end()
    }
}

impl std::fmt::Debug for Mix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} positions an epoch, {:?} of each block, of {:?}", self.len, self.block(), self.dataset)
    }
}

/// Rounds weights to whole numbers without a common divisor.
fn counts_of(weights: &[f64]) -> Result<Vec<u64>> {
    let bad = |message: String| Err(Error::new(ErrorKind::Config, Stage::Index, message));
    let legal = |weight: &f64| weight.is_finite() && *weight > 0.0;
    if let Some(index) = weights.iter().position(|weight| !legal(weight)) {
        return bad(format!("weight {index} of the mix is {}: it must be finite and above 0", weights[index]));
    }
    // Divide by the largest first, since the sum of finite numbers need not be finite.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let sum: f64 = weights.iter().map(|weight| weight / largest).sum();
    let exact: Vec<f64> = weights.iter().map(|weight| weight / largest / sum * PARTS_OF_WEIGHT as f64).collect();
    // The 1e-6 absorbs rounding: 0.3 × 10,000 is 2,999.9999999999995.
    let mut counts: Vec<u64> = exact.iter().map(|exact| (exact + 1e-6).floor() as u64).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| (exact[*b] - counts[*b] as f64).total_cmp(&(exact[*a] - counts[*a] as f64)));
    let missing = PARTS_OF_WEIGHT.saturating_sub(counts.iter().sum());
    order.iter().cycle().take(missing as usize).for_each(|index| counts[*index] += 1);
    if let Some(index) = counts.iter().position(|count| *count == 0) {
        return bad(format!("weight {index} of the mix, {}, is under 1/{PARTS_OF_WEIGHT} of the sum", weights[index]));
    }
    let divisor = counts.iter().copied().fold(0, gcd);
    Ok(counts.iter().map(|count| count / divisor).collect())
}

impl Pattern {
    fn new(counts: Vec<u64>, ids: &[std::ops::Range<u64>], key: Key) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let places = spread(&counts);
        let block = places.len() as u64;
        let order = Permutation::new(block, key.named("phases"));
        let phase = |index: u64| {
            let start = order.get(index);
            let mut before = vec![0_u32; counts.len()];
            places[..start as usize].iter().for_each(|(source, _)| before[*source as usize] += 1);
            (start, before.into_boxed_slice())
        };
        let phases = (0..block.min(PHASES)).map(phase).collect();
        let (firsts, lens) = ids.iter().map(|ids| (ids.start, ids.end - ids.start)).unzip();
        Self { key, places, counts, phases, lens, firsts, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Sample id at a position of the whole run.
    fn id(&self, position: u128) -> u64 {
        let (source, drawn) = self.draw(position);
        let len = u128::from(self.lens[source]);
        let (pass, place) = ((drawn / len) as u64, (drawn % len) as u64);
        self.firsts[source] + walked(self, source, pass, place)
    }

    /// Source at a position, with its count of earlier positions.
    fn draw(&self, position: u128) -> (usize, u128) {
        let len = self.places.len() as u128;
        let (block, rest) = (position / len, (position % len) as u64);
        let draw = Draws::from_key(self.key.named("phase").derive(block as u64)).below(self.phases.len() as u64);
        let (start, before) = &self.phases[draw as usize];
        // The block is the pattern from `start`, wrapped around.
        let place = (start + rest) % self.places.len() as u64;
        let (source, earlier) = self.places[place as usize];
        let (source, earlier) = (source as usize, u64::from(earlier));
        let count = self.counts[source];
        let wrapped = if place < *start { count } else { 0 };
        let within = earlier + wrapped - u64::from(before[source]);
        (source, block * u128::from(count) + u128::from(within))
    }

    /// Positions of the blocks that `of` (length, count in a block) asks for, over all sources.
    fn blocks(&self, of: impl Fn(u64, u64) -> u64, both: impl Fn(u64, u64) -> u64) -> u64 {
        let blocks = self.lens.iter().zip(&self.counts).map(|(len, count)| of(*len, *count)).reduce(both);
        blocks.unwrap_or(1).max(1).saturating_mul(self.places.len() as u64)
    }
}

/// Spreads the sources of a block evenly: source *s* comes `counts[s]` times, its place *k* between *k* and *k* + 1
/// times its mean distance. Earliest deadline first finds such places for all, since together they fill the block
/// exactly.
fn spread(counts: &[u64]) -> Vec<(u32, u32)> {
    let block: u64 = counts.iter().sum();
    let mut done = vec![0_u64; counts.len()];
    let mut places = Vec::with_capacity(block as usize);
    for place in 0..block {
        let waits =
            |source: &usize| done[*source] < counts[*source] && done[*source] * block / counts[*source] <= place;
        let deadline = |source: &usize| ((done[*source] + 1) * block).div_ceil(counts[*source]);
        let source = (0..counts.len()).filter(waits).min_by_key(deadline);
        let source = source.expect("the counts add up to the block, so some source is always due");
        places.push((source as u32, done[source] as u32));
        done[source] += 1;
    }
    places
}

/// A permutation kept by a thread, since making one takes up to microseconds.
struct Walk {
    mix: u64,
    source: usize,
    pass: u64,
    permutation: Permutation,
}

/// Entry `place` of a pass's permutation. No lock, and no allocation except at the start of a pass.
fn walked(pattern: &Pattern, source: usize, pass: u64, place: u64) -> u64 {
    thread_local!(static KEPT: RefCell<Vec<Option<Walk>>> = const { RefCell::new(Vec::new()) });
    KEPT.with_borrow_mut(|kept| {
        kept.resize_with(WALKS, || None);
        let slot = &mut kept[(pattern.number as usize).wrapping_mul(31).wrapping_add(source) % WALKS];
        let fits = |walk: &Walk| (walk.mix, walk.source, walk.pass) == (pattern.number, source, pass);
        if !slot.as_ref().is_some_and(fits) {
            let key = pattern.key.derive(source as u64).derive(pass);
            let permutation = Permutation::new(pattern.lens[source], key);
            *slot = Some(Walk { mix: pattern.number, source, pass, permutation });
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
        let cases: [(&[f64], &[u64]); 7] = [
            (&[0.7, 0.3], &[7, 3]),
            (&[1.0, 1.0], &[1, 1]),
            (&[5.0], &[1]),
            (&[1.0, 1.0, 1.0], &[3334, 3333, 3333]),
            (&[0.1, 0.2, 0.3, 0.4], &[1, 2, 3, 4]),
            (&[1e308, 1e308], &[1, 1]),
            (&[1e-320, 3e-320], &[1, 3]),
        ];
        for (weights, counts) in cases {
            let found = counts_of(weights).unwrap();
            assert_eq!(found, counts, "{weights:?}");
        }
        for weights in [&[1.0, 0.0][..], &[-1.0], &[f64::NAN, 1.0], &[f64::INFINITY], &[1.0, 1e-6]] {
            assert_eq!(counts_of(weights).unwrap_err().kind(), ErrorKind::Config, "{weights:?}");
        }
    }

    #[test]
    fn a_block_spreads_its_sources_evenly() {
        let sources = |counts: &[u64]| spread(counts).iter().map(|(source, _)| *source).collect::<Vec<_>>();
        assert_eq!(sources(&[1, 1]), [0, 1]);
        assert_eq!(sources(&[3, 1]), [0, 0, 0, 1]);
        assert_eq!(sources(&[7, 3]), [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]);
    }

    fn pattern(counts: &[u64], lens: &[u64], key: u64) -> Pattern {
        let starts = lens.iter().scan(0, |next, len| Some(std::mem::replace(next, *next + len)));
        let ids: Vec<_> = starts.zip(lens).map(|(start, len)| start..start + len).collect();
        Pattern::new(counts.to_vec(), &ids, Key::new(key))
    }

    proptest! {
        #[test]
        fn every_place_of_a_block_is_due(counts in prop::collection::vec(1_u64..40, 1..8)) {
            let block: u64 = counts.iter().sum();
            let mut done = vec![0_u64; counts.len()];
            for (place, (source, before)) in spread(&counts).into_iter().enumerate() {
                prop_assert_eq!(u64::from(before), done[source as usize]);
                done[source as usize] += 1;
                for (source, count) in counts.iter().enumerate() {
                    // The error is less than one: |done × block − (place + 1) × count| < block.
                    let off = (done[source] * block).abs_diff((place as u64 + 1) * count);
                    prop_assert!(off < block, "{:?} at {}", counts, place);
                }
            }
            prop_assert_eq!(done, counts);
        }

        #[test]
        fn blocks_have_exact_shares_and_any_run_nearly(
            counts in prop::collection::vec(1_u64..30, 1..6), key in any::<u64>(), from in 0_u64..500, len in 1_u64..500,
        ) {
            let counts = { let divisor = counts.iter().copied().fold(0, gcd); counts.iter().map(|c| c / divisor).collect::<Vec<_>>() };
            let pattern = pattern(&counts, &vec![10; counts.len()], key);
            let block: u64 = counts.iter().sum();
            let count = |range: std::ops::Range<u64>, source: usize| {
                range.filter(|position| pattern.draw(u128::from(*position)).0 == source).count() as u64
            };
            for (source, share) in counts.iter().enumerate() {
                let found = count(from..from + len, source);
                prop_assert!((found * block).abs_diff(len * share) < 4 * block);
                prop_assert_eq!(count(from * block..(from + 1) * block, source), *share);
            }
        }

        #[test]
        fn draws_of_a_source_have_no_gap(
            counts in prop::collection::vec(1_u64..30, 1..6), key in any::<u64>(),
        ) {
            let pattern = pattern(&counts, &vec![10; counts.len()], key);
            let mut next = vec![0_u128; counts.len()];
            for position in 0..1000 {
                let (source, drawn) = pattern.draw(position);
                prop_assert_eq!(drawn, next[source]);
                next[source] += 1;
            }
        }

        #[test]
        fn samples_of_a_source_come_equally_often(
            sources in prop::collection::vec((1_u64..20, 1_u64..60), 1..5), key in any::<u64>(), positions in 1_u64..800,
        ) {
            let (counts, lens): (Vec<u64>, Vec<u64>) = sources.into_iter().unzip();
            let pattern = pattern(&counts, &lens, key);
            let mut seen = vec![0_u64; lens.iter().sum::<u64>() as usize];
            let mut drawn = vec![0_u64; lens.len()];
            for position in 0..positions {
                seen[pattern.id(u128::from(position)) as usize] += 1;
                drawn[pattern.draw(u128::from(position)).0] += 1;
            }
            let mut seen = &seen[..];
            for (len, drawn) in lens.iter().zip(drawn) {
                let (own, rest) = seen.split_at(*len as usize);
                seen = rest;
                prop_assert!(own.iter().all(|times| *times == drawn / len || *times == drawn.div_ceil(*len)));
            }
        }
    }

    #[test]
    fn positions_of_long_runs_do_not_overflow() {
        let pattern = pattern(&[1, 9999], &[3, u64::MAX / 2], 1);
        let id = pattern.id(u128::from(u64::MAX) * u128::from(u64::MAX));
        assert!(id < 3 + u64::MAX / 2);
    }
}
