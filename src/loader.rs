//! The loader: settings, the iterator over batches, and what can be asked in mid-loop.

use crate::batch::{Batch, BatchInfo, Reorder};
use crate::dataset::{self, Dataset};
use crate::decode::{Ctx, Decoder};
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::{BatchMut, ByteRing, ChunkBuf, Filled, Pool, Row};
use crate::order::{Batches, ChunkStarts, LastBatch, Order};
use crate::pipeline::chunks;
use crate::pipeline::fetch::{Io, Pending};
use crate::pipeline::plan::{Demand, MemoryPlan};
use crate::pipeline::recipe::{Recipe, Steps};
use crate::pipeline::runtime::{self, Runtime};
use crate::pipeline::work::{Queue, Sizes, Workers};
use crate::pipeline::{Core, Exchange, IoSide, Job, Start, ToIo};
use crate::profile::{Meters, Report};
use crate::read::{self, Choice, Direct, Mode, Opened, PageCache, ReaderOptions};
use crate::tensor::{Field, Layout, Spec};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Decode workers at most: each is a thread with buffers of its own.
const WORKERS_MAX: usize = 1024;
/// Batch slots at most.
const SLOTS_MAX: usize = 65_536;
/// Bytes of a sample at most: beyond any memory, and far from where sums overflow.
const SAMPLE_MAX: u64 = 1 << 44;
/// How often a waiting `next()` looks for errors that no batch can carry.
const TICK: Duration = Duration::from_millis(100);

/// Settings of a loader; every call may be left out but [`build`](Self::build).
#[must_use]
pub struct LoaderBuilder {
    dataset: Arc<dyn Dataset>,
    steps: Steps,
    order: Order,
    seed: Option<u64>,
    batch_size: usize,
    last: LastBatch,
    workers: Option<usize>,
    slots: Option<usize>,
    budget: Option<usize>,
    reader: ReaderOptions,
    device: Device,
    held_deadline: Duration,
}

impl LoaderBuilder {
    fn new(dataset: Arc<dyn Dataset>) -> Self {
        Self {
            dataset,
            steps: Steps::default(),
            order: Order::sequential(),
            seed: None,
            batch_size: 32,
            last: LastBatch::default(),
            workers: None,
            slots: None,
            budget: None,
            reader: ReaderOptions::default(),
            device: Device::auto(),
            held_deadline: Duration::from_secs(10),
        }
    }

    /// Decodes the dataset's only picture; without one, its only encoded field. Where that is ambiguous, say
    /// [`decode_field`](Self::decode_field).
    pub fn decode(mut self, decoder: impl Decoder) -> Self {
        self.steps.decoders.push((None, Arc::new(decoder)));
        self
    }

    /// Decodes the field `name`. Fields without a decoder must be raw and are taken as they stand.
    pub fn decode_field(mut self, name: &str, decoder: impl Decoder) -> Self {
        self.steps.decoders.push((Some(name.into()), Arc::new(decoder)));
        self
    }

    /// Transforms every sample in place, after its fields are decoded; calls add up in order. Randomness comes from
    /// [`Ctx::draws`], so that it does not depend on workers.
    ///
    /// An error or panic becomes an error of the sample.
    pub fn map(self, map: impl Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static) -> Self {
        self.map_adding([], map)
    }

    /// As [`map`](Self::map), and the batch gets these fields more; they are zero before `map` writes them.
    pub fn map_adding(
        mut self,
        fields: impl Into<Vec<Field>>,
        map: impl Fn(&mut Row<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.steps.maps.push((fields.into(), Arc::new(map)));
        self
    }

    /// Transforms every full batch in place, once, on a decode worker (mixup, packing). In its `Ctx`, the id is the
    /// batch's index.
    pub fn map_batch(
        self,
        map: impl Fn(&mut BatchMut<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.map_batch_adding([], map)
    }

    /// As [`map_batch`](Self::map_batch), and the batch gets these fields more; they are zero before `map` writes them.
    pub fn map_batch_adding(
        mut self,
        fields: impl Into<Vec<Field>>,
        map: impl Fn(&mut BatchMut<'_>, &mut Ctx<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.steps.map_batches.push((fields.into(), Arc::new(map)));
        self
    }

    /// Hands out only these fields; the others are there for the transforms, but for encoded ones without a decoder,
    /// which are not read at all. Default: all.
    pub fn keep<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Self {
        self.steps.keep = Some(names.into_iter().map(String::from).collect());
        self
    }

    /// Which samples come in which order. Default: sequential.
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Seed of the draws of decoders and transforms. Default: the order's seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Rows of a batch. Default: 32.
    pub fn batch_size(mut self, rows: usize) -> Self {
        self.batch_size = rows;
        self
    }

    /// What becomes of the samples that do not fill a batch. Default: a smaller last batch.
    pub fn last_batch(mut self, last: LastBatch) -> Self {
        self.last = last;
        self
    }

    /// Decode workers (threads), at most 1024. Default: one per core that the process may use.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = Some(workers);
        self
    }

    /// Batches in memory at once, those in the user's hands included. Default: 4 to 16 by their size, less when the
    /// budget says so, but not under 2. With 1 nothing is read ahead.
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = Some(slots);
        self
    }

    /// Most bytes of memory; [`build`](Self::build) reserves all of it that is needed, or fails with the sum.
    pub fn memory_budget(mut self, bytes: usize) -> Self {
        self.budget = Some(bytes);
        self
    }

    /// Which reader. Default: [`Mode::Auto`].
    pub fn reader(mut self, mode: Mode) -> Self {
        self.reader.mode = mode;
        self
    }

    /// Whether reads bypass the page cache. Default: [`Direct::Auto`].
    pub fn direct(mut self, direct: Direct) -> Self {
        self.reader.direct = direct;
        self
    }

    /// Reads in flight at most. Default: 32.
    pub fn depth(mut self, depth: u32) -> Self {
        self.reader.depth = depth;
        self
    }

    /// Where batches are handed out. Default: [`Device::auto`].
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// How long `next()` waits when the caller holds every batch, before it says so. Default: 10 s.
    pub fn held_deadline(mut self, deadline: Duration) -> Self {
        self.held_deadline = deadline;
        self
    }

    /// Checks everything, reserves all memory and starts the threads.
    ///
    /// Errors: [`ErrorKind::Config`] for a setting that is not legal, [`ErrorKind::Empty`] for a dataset without
    /// samples, [`ErrorKind::Budget`] with the sum when the budget is too small, and whatever opening the sources finds.
    pub fn build(self) -> Result<Loader> {
        self.check()?;
        let batch_size = u32::try_from(self.batch_size).map_err(|_| config("batch_size does not fit 32 bits"))?;
        let dataset = self.dataset;
        let recipe = Recipe::new(&*dataset, self.steps)?;
        let layout = Layout::new(&recipe.spec, self.batch_size)?;
        let chunks = chunks::starts_of(&*dataset)?;
        let order = self.order.clone();
        let job_maker = JobMaker { order, dataset_len: dataset.len(), chunks, batch_size, last: self.last };
        let first = job_maker.job(0, 0, Arc::default())?;
        let workers =
            self.workers.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
        let sources = dataset.sources().clone();
        let opened = read::open(sources, &self.reader)?;
        let depth = opened.reader.depth();
        let pending = 2 * depth + workers;
        let parts = recipe.handlers.len();
        let mut demand = demand(&*dataset, &recipe, &layout, &opened, workers, pending);
        if dataset.chunked().is_some() {
            let cached = opened.cache.is_some() && dataset.sources().total_bytes() > 0;
            demand.take_chunks(&*dataset, &first.order, cached);
        }
        let plan = MemoryPlan::new(&Demand { slots: self.slots, budget: self.budget, ..demand })?;
        let spec = recipe.spec.clone();
        let info = BatchInfo { keep: recipe.keep.clone(), device: self.device, held: AtomicUsize::new(0) };
        let seed = self.seed.unwrap_or(self.order.seed());
        let chunk_starts = job_maker.chunks.as_ref().map(|chunks| chunks.starts.clone());
        let assembly =
            Assembly { dataset, chunk_starts, recipe, layout, opened, plan: plan.clone(), pending, parts, seed };
        let (runtime, ready, choice) = assembly.start(spec, workers)?;
        Ok(Loader {
            shared: Arc::new(Shared {
                runtime,
                ready,
                choice,
                plan,
                info: Arc::new(info),
                jobs: job_maker,
                live: AtomicBool::new(false),
                held_deadline: self.held_deadline,
            }),
        })
    }

    fn check(&self) -> Result<()> {
        if self.dataset.len() == 0 {
            return Err(Error::new(ErrorKind::Empty, Stage::Build, "the dataset has no samples"));
        }
        if self.batch_size == 0 {
            return Err(config("batch_size is 0"));
        }
        if self.workers == Some(0) {
            return Err(config("workers is 0"));
        }
        if self.workers.is_some_and(|workers| workers > WORKERS_MAX) {
            return Err(config(&format!("more than {WORKERS_MAX} workers")));
        }
        if self.slots.is_some_and(|slots| slots == 0 || slots > SLOTS_MAX) {
            return Err(config(&format!("slots must be 1 to {SLOTS_MAX}")));
        }
        let largest = self.dataset.sample_bytes_max();
        if largest > SAMPLE_MAX {
            let message = format!("a sample of {largest} bytes; {SAMPLE_MAX} are possible");
            return Err(Error::new(ErrorKind::Limit, Stage::Build, message));
        }
        Ok(())
    }
}

fn config(message: &str) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, message)
}

/// What the memory sum depends on.
fn demand(
    dataset: &dyn Dataset,
    recipe: &Recipe,
    layout: &Layout,
    opened: &Opened,
    workers: usize,
    pending: usize,
) -> Demand {
    let files = dataset.sources().total_bytes();
    // Each part of a sample may need its own pages, and the aligned bytes around it.
    let slack = recipe.handlers.len() * 3 * crate::tensor::PAGE;
    let largest = usize::try_from(dataset.sample_bytes_max()).unwrap_or(usize::MAX);
    let encoded_max = if files == 0 { 0 } else { largest.saturating_add(slack) };
    let mean = usize::try_from(files / dataset.len().max(1)).unwrap_or(usize::MAX);
    let in_place = recipe.all_in_place() && !dataset::opens_bytes(dataset);
    Demand {
        slot_bytes: crate::memory::Region::size_for(layout.bytes()),
        slots: None,
        workers,
        depth: opened.reader.depth(),
        encoded_max,
        // Rows that are read in place need the ring only where a file does not fit the alignment.
        encoded_mean: if in_place { 0 } else { mean.min(encoded_max) },
        cached: opened.cache.is_some() && !in_place,
        scratch: recipe.scratch_bytes(),
        opened: usize::try_from(dataset.opened_bytes_max()).unwrap_or(usize::MAX),
        chunks: None,
        pending,
        pending_bytes: size_of::<Pending>() + recipe.handlers.len() * 64,
        index_bytes: dataset.index_bytes(),
        budget: None,
        largest: dataset.largest_sample(),
    }
}

/// Everything `build` has decided, on its way to threads.
struct Assembly {
    dataset: Arc<dyn Dataset>,
    chunk_starts: Option<Arc<[u64]>>,
    recipe: Recipe,
    layout: Layout,
    opened: Opened,
    plan: MemoryPlan,
    pending: usize,
    parts: usize,
    seed: u64,
}

impl Assembly {
    fn start(self, spec: Spec, workers: usize) -> Result<(Runtime, Receiver<Filled>, Choice)> {
        let Self { dataset, chunk_starts, recipe, layout, opened, plan, pending, parts, seed } = self;
        let Opened { reader, cache, choice, .. } = opened;
        let waker = reader.waker();
        // Room for every slot there is, so that giving one back never waits.
        let (frees_in, frees) = bounded(plan.slots);
        let (ready_in, ready) = bounded(plan.slots);
        let (idle_in, idle) = bounded(pending);
        let (map_in, maps) = if recipe.map_batches.is_empty() {
            (None, None)
        } else {
            let (map_in, maps) = bounded(plan.slots);
            (Some(map_in), Some(maps))
        };
        let exchange = Arc::new(Exchange {
            generation: AtomicU64::new(0),
            ready: ready_in,
            ready_out: ready.clone(),
            frees: frees_in,
            frees_out: frees.clone(),
            closed: AtomicBool::new(false),
            waker: waker.clone(),
            to_map: map_in,
            map_bell: OnceLock::new(),
        });
        let closing = CloseOnError(Some(exchange.clone()));
        let row_bytes = layout.bytes() / layout.rows();
        let slots = Pool::new(spec, layout, plan.slots, Box::new(exchange.clone()))?;
        let on_room = waker.clone();
        let spans = pending * parts + chunks::pieces_in_flight(&*dataset, plan.chunks)? + 1;
        let ring = match plan.ring_bytes {
            0 => None,
            bytes => Some(ByteRing::new(bytes, spans, move || on_room.wake())?),
        };
        let chunk_bytes = plan.chunk_bytes - plan.chunk_lists;
        let buffers = (0..plan.chunks).map(|_| ChunkBuf::new(chunk_bytes)).collect::<Result<Vec<_>>>()?;
        let chunks = (!buffers.is_empty()).then(|| (Arc::new(chunks::Home::new(buffers, waker.clone())), plan.chunks));
        let mut regions = slots.regions().to_vec();
        regions.extend(ring.as_ref().map(|ring| ring.region().clone()));
        let (pool, handles) = runtime::pool(workers)?;
        let (cached_bytes, chunk_bytes) = if plan.chunks > 0 { (0, plan.cached_bytes) } else { (plan.cached_bytes, 0) };
        let sizes = Sizes { slots: plan.slots, pending, row_bytes, cached_bytes, chunks: plan.chunks, chunk_bytes };
        let work = Workers::new(pool, maps, &sizes)?;
        let misses = Queue::with_room(256);
        let chunk_misses = Queue::with_room(plan.chunks);
        let core = Arc::new(Core {
            in_memory: dataset.sources().total_bytes() == 0,
            skips: recipe.skips(),
            chunk_starts,
            sources: dataset.sources().clone(),
            dataset,
            recipe,
            seed,
            cache,
            work,
            to_io: ToIo {
                starts: Queue::with_room(4),
                shutdown: AtomicBool::new(false),
                misses,
                chunk_misses,
                idle: idle_in,
                waker,
            },
            exchange: exchange.clone(),
            fatal: Mutex::new(None),
            meters: Arc::new(Meters::default()),
            scratch_limit: plan.scratch_bytes,
        });
        let _ = exchange.map_bell.set(Arc::downgrade(&core));
        let io = Io::new(core.clone(), reader, IoSide { frees, idle, ring, chunks, regions }, pending);
        let runtime = Runtime::start(core, io, handles)?;
        closing.defuse();
        Ok((runtime, ready, choice))
    }
}

/// When `build` fails half-way, the slots that lie in the exchange already must not stay there for ever.
struct CloseOnError(Option<Arc<Exchange>>);

impl CloseOnError {
    fn defuse(mut self) {
        self.0 = None;
    }
}

impl Drop for CloseOnError {
    fn drop(&mut self) {
        if let Some(exchange) = &self.0 {
            exchange.close();
        }
    }
}

/// Makes the jobs of epochs.
#[derive(Clone)]
struct JobMaker {
    order: Order,
    dataset_len: u64,
    chunks: Option<ChunkStarts>,
    batch_size: u32,
    last: LastBatch,
}

impl JobMaker {
    fn job(&self, generation: u64, epoch: u64, cancelled: Arc<AtomicBool>) -> Result<Arc<Job>> {
        let order = self.order.epoch_in(self.dataset_len, self.chunks.as_ref(), epoch)?;
        let batches = Batches::new(order.len(), self.batch_size, self.last)?;
        Ok(Arc::new(Job { generation, epoch, order, batches, cancelled }))
    }
}

/// Turns a dataset into batches. `Send + Sync`; threads and memory live until it and its [`Epoch`]s are dropped.
pub struct Loader {
    shared: Arc<Shared>,
}

struct Shared {
    runtime: Runtime,
    ready: Receiver<Filled>,
    choice: Choice,
    plan: MemoryPlan,
    info: Arc<BatchInfo>,
    jobs: JobMaker,
    /// Whether an iterator is alive.
    live: AtomicBool,
    held_deadline: Duration,
}

impl Loader {
    /// Settings for a loader of `dataset`.
    pub fn builder(dataset: impl Dataset) -> LoaderBuilder {
        LoaderBuilder::new(Arc::new(dataset))
    }

    /// The batches of epoch `epoch`, in order. What they hold depends on (seed, epoch, position) alone.
    ///
    /// Errors: [`ErrorKind::EpochLive`] while another iterator of this loader is alive.
    pub fn epoch(&self, epoch: u64) -> Result<Epoch> {
        let end = epoch.checked_add(1).ok_or_else(|| config("there is no epoch after the last number"))?;
        self.epochs(epoch..end)
    }

    /// The batches of several epochs in one iterator, which reads ahead across their boundaries. An empty range has no
    /// batches.
    ///
    /// Errors: as [`epoch`](Self::epoch).
    pub fn epochs(&self, epochs: Range<u64>) -> Result<Epoch> {
        Epoch::start(self.shared.clone(), epochs)
    }

    /// Batches of one epoch, known before the first.
    ///
    /// Errors: none after `build` has checked the order.
    pub fn batches_per_epoch(&self) -> Result<u64> {
        Ok(self.shared.jobs.job(0, 0, Arc::default())?.batches.count())
    }

    /// Samples that one epoch delivers: fewer than the order's length only when the last batch is dropped.
    ///
    /// Errors: none after `build` has checked the order.
    pub fn samples_per_epoch(&self) -> Result<u64> {
        Ok(self.shared.jobs.job(0, 0, Arc::default())?.batches.positions())
    }

    /// The fields of a batch, in order.
    pub fn spec(&self) -> Vec<Field> {
        let fields = self.shared.runtime.core().recipe.spec.fields();
        self.shared.info.keep.iter().map(|index| fields[*index].clone()).collect()
    }

    /// All memory as a sum.
    pub fn plan(&self) -> &MemoryPlan {
        &self.shared.plan
    }

    /// What happened so far; may be asked at any time.
    pub fn report(&self) -> Report {
        self.shared.report()
    }
}

impl Shared {
    fn report(&self) -> Report {
        let core = self.runtime.core();
        let meters = &core.meters;
        let nanos = |counter: &crate::profile::Counter| Duration::from_nanos(counter.get());
        Report {
            dataset: core.dataset.describe(),
            device: self.info.device.to_string(),
            batches: meters.batches.get(),
            samples: meters.samples.get(),
            bytes: meters.bytes.get(),
            starved: nanos(&meters.wait_ns),
            first_batches: nanos(&meters.first_wait_ns),
            user: nanos(&meters.user_ns),
            decode_busy: nanos(&meters.decode_busy_ns),
            workers: core.work.count,
            choice: self.choice.clone(),
            chunks: core.chunk_starts.as_ref().map(|starts| (meters.chunks.get(), starts.len() as u64 - 1)),
            reads: meters.reads(),
            cache: core.cache.as_deref().map(|cache: &PageCache| (cache.hits(), cache.misses())),
            plan: self.plan.clone(),
            leaked: read::leaked() + runtime::abandoned(),
        }
    }
}

/// Iterator over the batches of an epoch (or several), in order. Owned: it keeps the loader's threads alive.
///
/// After an error it ends, except after [`ErrorKind::BatchesHeld`]: drop a batch and go on. Dropping it at any point
/// cancels what was planned.
pub struct Epoch {
    shared: Arc<Shared>,
    generation: u64,
    cancelled: Arc<AtomicBool>,
    reorder: Reorder<Filled>,
    total: u64,
    delivered: u64,
    ended: bool,
    /// When the last batch was handed out: from then on the time is the user's.
    handed_out: Option<Instant>,
}

impl Epoch {
    fn start(shared: Arc<Shared>, epochs: Range<u64>) -> Result<Self> {
        if shared.live.swap(true, Ordering::AcqRel) {
            let message = "drop the iterator of the last epoch before the next is started";
            return Err(Error::new(ErrorKind::EpochLive, Stage::Batch, message));
        }
        let cancelled = Arc::new(AtomicBool::new(false));
        let generation = shared.runtime.core().exchange.generation.fetch_add(1, Ordering::AcqRel) + 1;
        let mut epoch = Self {
            reorder: Reorder::new(shared.plan.slots),
            generation,
            cancelled: cancelled.clone(),
            total: 0,
            delivered: 0,
            ended: false,
            handed_out: None,
            shared,
        };
        let count = epochs.end.saturating_sub(epochs.start);
        if count > 0 {
            let jobs = epoch.shared.jobs.clone();
            let first = jobs.job(generation, epochs.start, cancelled.clone())?;
            epoch.total = first.batches.count().saturating_mul(count);
            let start = epochs.start;
            let next = Box::new(move |done: u64| jobs.job(generation, start + done, cancelled.clone()));
            epoch.shared.runtime.core().to_io.start(Start { first, epochs: count, next });
        }
        if epoch.total == 0 {
            epoch.end();
        }
        Ok(epoch)
    }

    /// Number of the batch that comes next, counted across epochs.
    pub fn position(&self) -> u64 {
        self.delivered
    }

    /// What the loader did so far.
    pub fn report(&self) -> Report {
        self.shared.report()
    }

    fn wait(&mut self) -> Result<Filled> {
        let asked = Instant::now();
        loop {
            if let Some(filled) = self.reorder.take() {
                return Ok(filled);
            }
            match self.shared.ready.recv_timeout(TICK) {
                Ok(filled) => {
                    let ticket = filled.ticket();
                    if ticket.generation == self.generation {
                        self.reorder.put(ticket.sequence, filled);
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.look_for_trouble(asked)?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(ErrorKind::Cancelled, Stage::Batch, "the loader was shut down"));
                }
            }
        }
    }

    fn look_for_trouble(&self, asked: Instant) -> Result<()> {
        let core = self.shared.runtime.core();
        if let Some(error) = core.trouble() {
            return Err(error);
        }
        let held = self.shared.info.held.load(Ordering::Relaxed);
        if held >= self.shared.plan.slots && asked.elapsed() >= self.shared.held_deadline {
            let message = format!("the caller holds all {held} batches; drop one, or raise `slots`");
            return Err(Error::new(ErrorKind::BatchesHeld, Stage::Batch, message));
        }
        Ok(())
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let core = self.shared.runtime.core();
        self.cancelled.store(true, Ordering::Relaxed);
        // From here on full slots of this run go straight back; those that are in the channel already are taken out.
        core.exchange.generation.fetch_add(1, Ordering::AcqRel);
        self.reorder = Reorder::new(1);
        while self.shared.ready.try_recv().is_ok() {}
        core.to_io.waker.wake();
        self.shared.live.store(false, Ordering::Release);
    }

    fn note(&mut self, asked: Instant, filled: Filled) -> Batch {
        let meters = &self.shared.runtime.core().meters;
        let now = Instant::now();
        let waited = now.duration_since(asked).as_nanos() as u64;
        if self.delivered == 0 {
            meters.first_wait_ns.add(waited)
        } else {
            meters.wait_ns.add(waited)
        }
        let batch = Batch::new(filled, self.shared.info.clone());
        meters.batches.add(1);
        meters.samples.add(batch.len() as u64);
        meters.bytes.add(batch.bytes() as u64);
        self.handed_out = Some(now);
        self.delivered += 1;
        batch
    }
}

impl Iterator for Epoch {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let asked = Instant::now();
        if let Some(handed_out) = self.handed_out.take() {
            self.shared.runtime.core().meters.user_ns.add(asked.duration_since(handed_out).as_nanos() as u64);
        }
        let filled = match self.wait() {
            Ok(filled) => filled,
            Err(error) => {
                if error.kind() != ErrorKind::BatchesHeld {
                    self.end();
                }
                return Some(Err(error));
            }
        };
        if let Some(mut error) = filled.take_failure() {
            drop(filled);
            if error.kind() == ErrorKind::Cancelled {
                // Nobody cancelled this run: its rows were dropped by what broke the loader.
                error = self.shared.runtime.core().trouble().unwrap_or(error);
            }
            self.end();
            return Some(Err(error));
        }
        let batch = self.note(asked, filled);
        if self.delivered == self.total {
            self.end();
        }
        Some(Ok(batch))
    }

    /// Exact, unless an error ends the iterator before.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended { 0 } else { self.total - self.delivered };
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Epoch {}

impl std::iter::FusedIterator for Epoch {}

impl Drop for Epoch {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for LoaderBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LoaderBuilder of {}, batches of {}", self.dataset.describe(), self.batch_size)
    }
}

impl std::fmt::Debug for Loader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Loader of {}", self.shared.runtime.core().dataset.describe())
    }
}

impl std::fmt::Debug for Epoch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Epoch at batch {} of {}", self.delivered, self.total)
    }
}
