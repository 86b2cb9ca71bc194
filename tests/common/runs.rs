//! Shared code of the tests of ranks and of resume: datasets, naive orders and naive batches, and
//! delivered batches as plain values.
//!
//! The oracle consists of definitions alone: an order is a list of ids; a batch is some positions
//! of it by the rule *the rows of a rank in a batch are consecutive positions; with several lanes
//! row k of rank r in batch i stands at i × G + k × world + r*. From the crate it uses only the
//! keyed permutation and the keyed draws, which have tests of their own.

#![allow(dead_code, reason = "each test binary uses its own part")]

use super::toys::{Chunks, head_len};
use super::{ALL_LAST, Dir, READERS, build, noise, reader, records, records_file};
use feedline::dataset::{Dataset, DatasetExt, Records};
use feedline::order::{Draws, Sampler, Weights};
use feedline::tensor::{DType, Field};
use feedline::unstable::{Key, Permutation};
use feedline::{
    Batch, Epoch, LastBatch, Loader, LoaderBuilder, Order, Rank, Result, State, Status,
};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a record in chunks.
pub const RECORD: usize = 16;

/// A dataset and its expected content.
#[derive(Clone)]
pub struct Data {
    pub dataset: Arc<dyn Dataset>,
    /// Of samples in chunks.
    pub toy: Option<Arc<Chunks>>,
    bytes: Arc<[u8]>,
    record: usize,
    labels: bool,
    ragged: bool,
    /// First sample of each chunk, then the total number of samples; without chunks all samples are
    /// one chunk.
    pub starts: Vec<u64>,
}

impl Data {
    pub fn len(&self) -> u64 {
        *self.starts.last().unwrap()
    }

    /// Records in a file.
    pub fn file(dir: &Dir, count: usize, record: usize) -> Self {
        let (path, bytes) = records_file(dir, count, record);
        Self::of_records(Arc::new(records(&path, record)), bytes, record, false)
    }

    /// Records in memory, with labels.
    pub fn memory(count: usize, record: usize) -> Self {
        let bytes = noise(count * record, 5);
        let labels = (0..count as i64).map(|id| id * 3 - 1).collect();
        let builder = Records::builder(record).classes(labels);
        let dataset = builder.open_bytes(bytes.clone()).unwrap();
        Self::of_records(Arc::new(dataset), bytes, record, true)
    }

    fn of_records(dataset: Arc<dyn Dataset>, bytes: Vec<u8>, record: usize, labels: bool) -> Self {
        let starts = vec![0, dataset.len()];
        Self {
            dataset,
            toy: None,
            bytes: bytes.into(),
            record,
            labels,
            ragged: false,
            starts,
        }
    }

    /// Chunks of these numbers of records, in a file or in memory.
    pub fn chunks(dir: &Dir, rows: &[u64], ragged: bool, in_memory: bool) -> Self {
        let bytes = noise(rows.iter().sum::<u64>() as usize * RECORD, 3);
        let toy = Chunks::open(&dir.write("toy.bin", &bytes), rows, RECORD).named("record");
        let toy = Arc::new(if ragged { toy.ragged() } else { toy });
        let dataset: Arc<dyn Dataset> = match in_memory {
            true => Arc::new(toy.clone().in_memory().unwrap()),
            false => toy.clone(),
        };
        Self {
            starts: toy.starts.clone(),
            toy: Some(toy),
            ragged,
            ..Self::of_records(dataset, bytes, RECORD, false)
        }
    }

    /// All fields of a sample or of a blank row, as in [`row_bytes`].
    pub fn row(&self, id: u64) -> Vec<u8> {
        if id == u64::MAX {
            return vec![0; self.row(0).len()];
        }
        let record = &self.bytes[id as usize * self.record..][..self.record];
        let mut row = record.to_vec();
        if self.labels {
            row.extend((id as i64 * 3 - 1).to_ne_bytes());
        }
        if self.ragged {
            let len = head_len(record);
            row.extend_from_slice(&record[..len]);
            row.resize(row.len() + RECORD - len, 0);
            row.extend((len as u64).to_ne_bytes());
        }
        row
    }

    /// A builder with only the dataset set.
    pub fn builder(&self) -> LoaderBuilder {
        Loader::builder(self.dataset.clone())
    }
}

/// A run: its samples, their order, and their transforms.
#[derive(Clone)]
pub struct Run {
    pub data: Data,
    pub naive: Naive,
    /// Seed of transforms; the order's by default.
    pub seed: Option<u64>,
    /// A transform of each sample that draws, and one of each batch.
    pub map: bool,
    pub map_batch: bool,
    /// Samples seen by the first transform.
    pub mapped: Arc<AtomicU64>,
}

impl Run {
    pub fn new(data: &Data, naive: Naive) -> Self {
        Self {
            data: data.clone(),
            naive,
            seed: None,
            map: false,
            map_batch: false,
            mapped: Arc::default(),
        }
    }

    pub fn mapped(self) -> Self {
        Self { map: true, ..self }
    }

    /// Dataset, order, seeds and transforms; no batch and no rank.
    pub fn builder(&self) -> LoaderBuilder {
        let mut builder = self.data.builder().order(self.naive.order());
        if let Some(seed) = self.seed {
            builder = builder.seed(seed);
        }
        if self.map {
            let seen = self.mapped.clone();
            builder =
                builder.map_adding([Field::fixed("drawn", DType::U64, [])], move |row, ctx| {
                    assert_ne!(ctx.id(), u64::MAX, "a transform of a blank row");
                    seen.fetch_add(1, Ordering::Relaxed);
                    let draw = ctx.draws("drawn").next_u64();
                    let field = row.index_of("drawn")?;
                    row.slice_mut::<u64>(field)?[0] = draw ^ ctx.id();
                    row.bytes_mut(0)[0] ^= draw as u8;
                    Ok(())
                });
        }
        if self.map_batch {
            builder =
                builder.map_batch_adding([Field::fixed("mixed", DType::U64, [])], |batch, ctx| {
                    let draw = ctx.draws("mixed").next_u64();
                    let field = batch.index_of("mixed")?;
                    let ids = batch.ids().to_vec();
                    for (row, value) in batch.slice_mut::<u64>(field)?.iter_mut().enumerate() {
                        if ids[row] != u64::MAX {
                            *value = draw.rotate_left(row as u32) ^ ids[row];
                        }
                    }
                    Ok(())
                });
        }
        builder
    }

    /// All fields of a row.
    fn row(&self, spot: Spot, draw: u64) -> Vec<u8> {
        let id = spot.id;
        let mut bytes = self.data.row(id);
        let added = |value: u64| if id == u64::MAX { 0 } else { value };
        let seed = self.seed.unwrap_or(self.naive.seed());
        if self.map {
            let mut key = Key::new(seed).derive(spot.epoch).derive(id);
            if draw != 0 {
                key = key.named("draw").derive(draw);
            }
            let draw = Draws::from_key(key.named("drawn")).next_u64();
            bytes[0] ^= added(draw) as u8;
            bytes.extend(added(draw ^ id).to_ne_bytes());
        }
        if self.map_batch {
            let draw = Draws::new(seed, spot.epoch, spot.position, "mixed").next_u64();
            let mixed = draw.rotate_left(spot.row as u32) ^ id;
            bytes.extend(added(mixed).to_ne_bytes());
        }
        bytes
    }

    pub fn ids(&self, epoch: u64) -> Vec<u64> {
        self.naive.ids(&self.data.starts, epoch)
    }

    /// Expected batches of a rank in these epochs.
    pub fn epochs(&self, cut: &Cut, epochs: Range<u64>, rank: u32) -> Vec<Part> {
        let parts = epochs.map(|epoch| self.parts(cut, epoch, rank));
        parts.flatten().collect()
    }

    /// Expected batches of all ranks together.
    pub fn union(&self, cut: &Cut, epochs: Range<u64>) -> Vec<Global> {
        let ranks = (0..cut.world).map(|rank| self.epochs(cut, epochs.clone(), rank));
        union(&ranks.collect::<Vec<_>>(), self.naive.in_turn())
    }

    /// Expected batches of a rank in an epoch.
    pub fn parts(&self, cut: &Cut, epoch: u64, rank: u32) -> Vec<Part> {
        let draws = self.naive.draws(epoch);
        let draw = |spot: Spot| draws.get(spot.place).copied().unwrap_or(0);
        let row = |spot| self.row(spot, draw(spot));
        cut.parts(epoch, &self.ids(epoch), rank, self.naive.in_turn(), row)
    }
}

/// Unequal numbers of rows, 0 among them, with `sum` samples.
pub fn uneven(draws: &mut Draws, mut sum: u64, most: u64) -> Vec<u64> {
    let mut rows = Vec::new();
    while sum > 0 {
        rows.push(draws.below(most + 1).min(sum));
        sum -= rows.last().unwrap();
    }
    rows
}

/// A sampler that repeats and leaves out.
#[derive(Clone, Debug)]
pub struct Steps {
    pub len: u64,
    pub samples: u64,
    pub step: u64,
}

impl Sampler for Steps {
    fn len(&self) -> u64 {
        self.len
    }
    fn id(&self, epoch: u64, position: u64) -> u64 {
        (epoch * 5 + position * self.step) % self.samples
    }
    fn identity(&self) -> u64 {
        self.step
    }
}

/// An order as its definition.
#[derive(Clone, Debug)]
pub enum Naive {
    Sequential {
        lanes: u32,
    },
    Shuffled {
        seed: u64,
    },
    Windowed {
        seed: u64,
        window: usize,
        lanes: u32,
    },
    Indices {
        ids: Vec<u64>,
        shuffled: Option<u64>,
    },
    Sampler {
        steps: Steps,
        shuffled: Option<u64>,
    },
    Weighted {
        weights: Vec<f64>,
        draws: u64,
        once: bool,
        seed: u64,
    },
}

impl Naive {
    pub fn windowed(seed: u64, window: usize, lanes: u32) -> Self {
        Self::Windowed {
            seed,
            window,
            lanes,
        }
    }

    pub fn order(&self) -> Order {
        let then = |order: Order, seed: &Option<u64>| match seed {
            Some(seed) => order.then_shuffled(*seed),
            None => order,
        };
        match self {
            Self::Sequential { lanes } => Order::sequential().lanes(*lanes),
            Self::Shuffled { seed } => Order::shuffled(*seed),
            Self::Windowed {
                seed,
                window,
                lanes,
            } => Order::windowed(*seed, *window).lanes(*lanes),
            Self::Indices { ids, shuffled } => then(Order::indices(ids.clone()), shuffled),
            Self::Sampler { steps, shuffled } => then(Order::sampler(steps.clone()), shuffled),
            Self::Weighted {
                weights,
                draws,
                once,
                seed,
            } => {
                let weights = match once {
                    true => Weights::without_replacement(weights.clone()),
                    false => Weights::new(weights),
                };
                Order::weighted(*seed, weights.unwrap().draws(*draws))
            }
        }
    }

    /// Whether the order has several lanes, and so the ranks take positions in turn.
    pub fn in_turn(&self) -> bool {
        matches!(
            self,
            Self::Sequential { lanes: 2.. } | Self::Windowed { lanes: 2.., .. }
        )
    }

    pub fn seed(&self) -> u64 {
        match self {
            Self::Sequential { .. } => 0,
            Self::Shuffled { seed } | Self::Windowed { seed, .. } | Self::Weighted { seed, .. } => {
                *seed
            }
            Self::Indices { shuffled, .. } | Self::Sampler { shuffled, .. } => {
                shuffled.unwrap_or(0)
            }
        }
    }

    /// The ids of an epoch; `starts` are those of the chunks, or 0 and the number of all samples.
    pub fn ids(&self, starts: &[u64], epoch: u64) -> Vec<u64> {
        let samples = *starts.last().unwrap();
        let shuffle = |ids, seed: &Option<u64>| shuffled(ids, *seed, epoch);
        match self {
            Self::Sequential { lanes } => walk(starts, *lanes, 1, None),
            Self::Shuffled { seed } => shuffle((0..samples).collect(), &Some(*seed)),
            Self::Windowed {
                seed,
                window,
                lanes,
            } => {
                let key = Key::new(*seed).named("windowed order").derive(epoch);
                walk(starts, *lanes, *window, Some(key))
            }
            Self::Indices { ids, shuffled } => shuffle(ids.clone(), shuffled),
            Self::Sampler { steps, shuffled } => {
                let ids = (0..steps.len).map(|position| steps.id(epoch, position));
                shuffle(ids.collect(), shuffled)
            }
            // What the draws of an order are is for its own tests to say.
            Self::Weighted { .. } => self.order().preview(samples, epoch, u64::MAX).unwrap(),
        }
    }

    /// For each position of an epoch the number that sets the draws of one sample apart; all 0 if
    /// it is empty.
    fn draws(&self, epoch: u64) -> Vec<u64> {
        match self {
            Self::Indices { ids, shuffled: by } => {
                let before = |at: usize| ids[..at].iter().filter(|id| **id == ids[at]).count();
                let draws = (0..ids.len()).map(|at| before(at) as u64);
                shuffled(draws.collect(), *by, epoch)
            }
            Self::Sampler {
                steps,
                shuffled: by,
            } => shuffled((0..steps.len).collect(), *by, epoch),
            Self::Weighted { draws, .. } => (0..*draws).collect(),
            _ => Vec::new(),
        }
    }
}

fn shuffled(items: Vec<u64>, seed: Option<u64>, epoch: u64) -> Vec<u64> {
    match seed {
        Some(seed) => permuted(&items, Key::new(seed).named("order").derive(epoch)),
        None => items,
    }
}

fn permuted<T: Clone>(items: &[T], key: Key) -> Vec<T> {
    let len = items.len() as u64;
    let permutation = Permutation::new(len, key);
    let item = |k| items[permutation.get(k) as usize].clone();
    (0..len).map(item).collect()
}

/// Chunks one after the other (permuted by a key, if any), cut into lanes, each lane into groups of
/// `window` pieces of chunks with their samples permuted together; then one sample of each lane in
/// turn.
fn walk(starts: &[u64], lanes: u32, window: usize, key: Option<Key>) -> Vec<u64> {
    let permute =
        |items: Vec<u64>, key: Option<Key>| key.map_or(items.clone(), |key| permuted(&items, key));
    let of_chunks = key.map(|key| key.named("chunks"));
    let chunks = permute((0..starts.len() as u64 - 1).collect(), of_chunks);
    let mut samples = Vec::new();
    for chunk in chunks {
        samples.extend((starts[chunk as usize]..starts[chunk as usize + 1]).map(|id| (chunk, id)));
    }
    let each = samples.len() / lanes as usize;
    let more = samples.len() % lanes as usize;
    let mut by_lane = Vec::new();
    for lane in 0..lanes as usize {
        let rest = samples.split_off(each + usize::from(lane < more));
        let pieces: Vec<&[(u64, u64)]> = samples.chunk_by(|a, b| a.0 == b.0).collect();
        let mut ids = Vec::new();
        for (number, group) in pieces.chunks(window).enumerate() {
            let key = key.map(|key| key.named("group").derive(lane as u64).derive(number as u64));
            let own = group.concat().into_iter().map(|(_, id)| id);
            ids.extend(permute(own.collect(), key));
        }
        by_lane.push(ids.into_iter());
        samples = rest;
    }
    let mut out = Vec::new();
    while let Some(id) = { by_lane[out.len() % lanes as usize].next() } {
        out.push(id);
    }
    out
}

/// A row as it was delivered. Blank ones have the id `u64::MAX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub id: u64,
    pub status: u8,
    pub bytes: Vec<u8>,
}

/// A batch of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub epoch: u64,
    pub index: u64,
    pub valid: usize,
    pub rows: Vec<Sample>,
}

/// A batch of all ranks: the rows of their parts, in the order of positions, without blank rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Global {
    pub epoch: u64,
    pub index: u64,
    pub rows: Vec<Sample>,
}

/// All fields of a row, one after the other: all bytes, and the true lengths.
pub fn row_bytes(batch: &Batch, row: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in batch.fields() {
        let each = field.size_bytes() / batch.len();
        bytes.extend_from_slice(&field.as_bytes().unwrap()[row * each..][..each]);
        if let Some(lens) = field.lens() {
            bytes.extend(lens[row].to_ne_bytes());
        }
    }
    bytes
}

pub fn part(batch: &Batch) -> Part {
    let sample = |row: usize| Sample {
        id: batch.ids()[row],
        status: batch.status()[row],
        bytes: row_bytes(batch, row),
    };
    Part {
        epoch: batch.epoch(),
        index: batch.index(),
        valid: batch.valid(),
        rows: (0..batch.len()).map(sample).collect(),
    }
}

pub fn parts(batches: impl IntoIterator<Item = Result<Batch>>) -> Vec<Part> {
    let batches = batches.into_iter();
    batches.map(|batch| part(&batch.unwrap())).collect()
}

/// Division of an epoch into batches.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub global: u64,
    pub last: LastBatch,
    pub world: u32,
    /// Start in the epoch: the position, and the number of the batch there.
    pub start: u64,
    pub first: u64,
}

/// Everything that a transform may know of a row, except its bytes.
#[derive(Clone, Copy, Debug)]
pub struct Spot {
    pub epoch: u64,
    pub id: u64,
    pub row: u64,
    /// Position of the batch's first row of the rank.
    pub position: u64,
    /// Place of the row in the list of ids.
    pub place: usize,
}

impl Cut {
    /// An epoch from its beginning.
    pub fn whole(global: u64, last: LastBatch, world: u32) -> Self {
        Self {
            global,
            last,
            world,
            start: 0,
            first: 0,
        }
    }

    /// A builder of this run for a rank.
    pub fn builder(&self, run: &Run, rank: Rank) -> LoaderBuilder {
        let builder = run.builder().global_batch(self.global);
        builder.last_batch(self.last).rank(rank)
    }

    /// Loaders of all ranks, each with settings of its own.
    pub fn loaders(&self, run: &Run, draws: &mut Draws) -> Vec<Loader> {
        every_rank(self.world)
            .map(|rank| build(any_settings(self.builder(run, rank), draws)))
            .collect()
    }

    /// For each batch: its first position, and its number of positions of the epoch.
    fn batches(&self, len: u64) -> Vec<(u64, u64)> {
        let mut batches = Vec::new();
        let mut at = self.start;
        while at < len {
            let real = (len - at).min(self.global);
            if real == self.global || self.last != LastBatch::Drop {
                batches.push((at, real));
            }
            at += self.global;
        }
        batches
    }

    pub fn count(&self, len: u64) -> u64 {
        self.batches(len).len() as u64
    }

    /// Expected batches of `rank` in the epoch with these `ids`. In lanes the ranks take positions
    /// in turn.
    pub fn parts(
        &self,
        epoch: u64,
        ids: &[u64],
        rank: u32,
        in_turn: bool,
        content: impl Fn(Spot) -> Vec<u8>,
    ) -> Vec<Part> {
        let len = ids.len() as u64;
        let world = u64::from(self.world);
        let mut parts = Vec::new();
        for (number, (first, real)) in self.batches(len).into_iter().enumerate() {
            // Equal on every rank, except that some ranks have one row less of a full batch.
            let size = match self.last {
                LastBatch::Keep => (real.div_ceil(world) * world).min(self.global),
                _ => self.global,
            };
            let mut rows = Vec::new();
            let mut valid = 0;
            let taken = |rank: u64| (rank..size).step_by(world as usize);
            let before: usize = (0..u64::from(rank)).map(|rank| taken(rank).count()).sum();
            let consecutive = before as u64..(before + taken(rank.into()).count()) as u64;
            let offsets: Vec<u64> = match in_turn {
                true => taken(rank.into()).collect(),
                false => consecutive.collect(),
            };
            let position = first + offsets[0];
            for offset in offsets {
                let is_real = offset < real;
                valid += usize::from(is_real);
                let status = match is_real {
                    true => Status::Real,
                    false => Status::Padding,
                };
                let blank = !is_real && self.last != LastBatch::Pad;
                let place = ((first + offset) % len) as usize;
                let id = if blank { u64::MAX } else { ids[place] };
                let bytes = content(Spot {
                    epoch,
                    id,
                    row: rows.len() as u64,
                    position,
                    place,
                });
                let status = status as u8;
                rows.push(Sample { id, status, bytes });
            }
            parts.push(Part {
                epoch,
                index: self.first + number as u64,
                valid,
                rows,
            });
        }
        parts
    }
}

/// Joins the parts of all ranks, in order; they must be consistent.
pub fn union(ranks: &[Vec<Part>], in_turn: bool) -> Vec<Global> {
    let count = ranks[0].len();
    let all = ranks.iter().all(|parts| parts.len() == count);
    assert!(all, "not as many batches on every rank");
    let global = |number: usize| {
        let parts: Vec<&Part> = ranks.iter().map(|parts| &parts[number]).collect();
        let epoch = parts[0].epoch;
        let index = parts[0].index;
        let place = |part: &&Part| (part.epoch, part.index) == (epoch, index);
        assert!(parts.iter().all(place));
        let longest = parts.iter().map(|part| part.rows.len()).max().unwrap();
        let across = |row: usize| parts.iter().filter_map(move |part| part.rows.get(row));
        let mut rows: Vec<Sample> = match in_turn {
            true => (0..longest).flat_map(across).cloned().collect(),
            false => parts.iter().flat_map(|part| part.rows.clone()).collect(),
        };
        rows.retain(|row| row.id != u64::MAX);
        Global { epoch, index, rows }
    };
    (0..count).map(global).collect()
}

/// Fails with the first difference only, not with all batches.
#[track_caller]
pub fn same<T: PartialEq + std::fmt::Debug>(found: &[T], right: &[T], what: &str) {
    for (at, (found, right)) in found.iter().zip(right).enumerate() {
        assert!(
            found == right,
            "{what}: number {at} is\n{found:?}\nand not\n{right:?}"
        );
    }
    assert_eq!(found.len(), right.len(), "{what}: how many");
}

/// An iterator gives these batches.
#[track_caller]
pub fn gives(batches: Result<Epoch>, right: &[Part], what: &str) {
    same(&parts(batches.unwrap()), right, what);
}

/// Ids of the rows that are samples.
pub fn real_ids(rows: &[Sample]) -> Vec<u64> {
    let real = rows.iter().filter(|row| row.status == Status::Real as u8);
    real.map(|row| row.id).collect()
}

/// Epoch, position, batch and steps of a state.
pub fn place(at: &State) -> [u64; 4] {
    [at.epoch(), at.position(), at.batch(), at.steps()]
}

/// A state after a round trip through a checkpoint.
pub fn stored(state: &State) -> State {
    let bytes = state.to_bytes();
    assert!(bytes.len() < 1024, "{} bytes", bytes.len());
    State::from_bytes(&bytes).unwrap()
}

/// The state of all ranks, which agree.
pub fn agreed(loaders: &[Loader]) -> State {
    let states = loaders.iter().map(|loader| loader.state().unwrap());
    let states: Vec<State> = states.collect();
    State::agree(&states).unwrap();
    states[0].clone()
}

/// All ranks of a world.
pub fn every_rank(world: u32) -> impl Iterator<Item = Rank> {
    (0..world).map(move |rank| Rank::new(rank, world).unwrap())
}

/// Settings that must not change batches.
pub fn any_settings(builder: LoaderBuilder, draws: &mut Draws) -> LoaderBuilder {
    let (mode, direct) = reader(draws.below(READERS.len() as u64) as usize);
    let builder = builder
        .workers(1 + draws.below(3) as usize)
        .tuning(|t| t.reader(mode).direct(direct));
    let builder = builder.tuning(|t| t.depth([1, 2, 8][draws.below(3) as usize]));
    match draws.below(5) {
        0 => builder,
        slots => builder.tuning(|t| t.slots(slots as usize)),
    }
}

/// Runs `body` on its own thread; fails if it takes longer than a minute.
#[track_caller]
pub fn within_a_minute<T: Send + 'static>(
    what: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (send, done) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name("case".into());
    let thread = thread.spawn(move || send.send(body())).unwrap();
    match done.recv_timeout(std::time::Duration::from_secs(60)) {
        Ok(value) => value,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{what}: no end"),
        Err(_) => match thread.join() {
            Err(panic) => {
                println!("in case: {what}");
                std::panic::resume_unwind(panic)
            }
            Ok(_) => unreachable!("it sends before it ends"),
        },
    }
}
