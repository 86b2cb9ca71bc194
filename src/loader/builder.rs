//! Settings of a loader, and how `build` turns them into threads and memory.

use super::onward::{Idle, Onward, Ways, idle_meter};
use super::origin::Origin;
use super::{JobMaker, Life, Loader, Place, Shared, config};
use crate::batch::{BatchInfo, Contents};
use crate::dataset::{self, Dataset};
use crate::decode::{Ctx, Decoder};
use crate::device::{Device, DeviceKind};
use crate::error::{Error, ErrorKind, Result, Stage, panicked};
use crate::ledger::Keeper;
use crate::memory::{BatchMut, Budget, ByteRing, ChunkBuf, Lease, Pool, Process, Row};
use crate::meter::{Clock, Meters, Settings};
use crate::order::{Batches, LastBatch, Order, Shard};
use crate::pipeline::chunks;
use crate::pipeline::fetch::Io;
use crate::pipeline::pending::Pending;
use crate::pipeline::placement::{Numa, Placement, Placing, on_node};
use crate::pipeline::plan::{DIRECT_THREADS, Demand, MemoryPlan};
use crate::pipeline::queue::Queue;
use crate::pipeline::recipe::{Recipe, Steps};
use crate::pipeline::recover::{OnBadSample, Recovery, Room};
use crate::pipeline::runtime::{self, Runtime};
use crate::pipeline::watchdog::Watch;
use crate::pipeline::work::{Sizes, Workers};
use crate::pipeline::{Core, Exchange, Gds, IoSide, ToIo};
use crate::state::{Cursor, State};
use crate::stop::Stop;
use crate::storage::{self, Choice, Direct, Mode, Opened, ReaderOptions};
use crate::tensor::{Field, Layout, Spec};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Decode workers at most: each is a thread with buffers of its own.
const WORKERS_MAX: usize = 1024;
/// Batch slots at most.
const SLOTS_MAX: usize = 65_536;
/// Bytes of a sample at most: beyond any memory, and far from where sums overflow.
const SAMPLE_MAX: u64 = 1 << 44;
/// Longer than file servers take to come back after a failure, shorter than anybody wants to pay for an idle GPU.
const STALL_DEADLINE: Duration = Duration::from_secs(300);
/// Shorter ones would take a busy machine for a dead one.
const STALL_LEAST: Duration = Duration::from_millis(20);
/// Batches on a device by default.
const DEVICE_BATCHES: usize = 3;

/// Settings of a loader; every call may be left out but [`build`](Self::build).
#[must_use]
pub struct LoaderBuilder {
    dataset: Arc<dyn Dataset>,
    steps: Steps,
    order: Order,
    seed: Option<u64>,
    batch: Option<BatchSize>,
    last: Option<LastBatch>,
    shard: Shard,
    resume: Option<State>,
    any_batch: bool,
    stop: Option<Stop>,
    workers: Option<usize>,
    slots: Option<usize>,
    budget: Option<usize>,
    shared_budget: Option<Budget>,
    reader: ReaderOptions,
    device: Device,
    device_batches: Option<usize>,
    gds: Gds,
    /// A cuFile library and the root of the file system that it shall see, for tests.
    cufile: Option<(PathBuf, PathBuf)>,
    #[cfg(feature = "cuda")]
    streams: Vec<crate::device::cuda::Stream>,
    numa: Numa,
    /// Where the kernel shows the machine; tests show another one.
    sysfs: PathBuf,
    held_deadline: Duration,
    stall_deadline: Duration,
    on_bad: OnBadSample,
    ledger: Option<PathBuf>,
    /// Tests have another.
    clock: Clock,
    /// What tests have opened themselves.
    #[cfg(test)]
    opened: Option<Opened>,
}

/// How the size of batches was said.
#[derive(Clone, Copy, Debug)]
enum BatchSize {
    /// Of every rank.
    Rank(usize),
    /// Of all ranks together.
    Global(u64),
}

const BATCH_DEFAULT: usize = 32;

impl LoaderBuilder {
    pub(super) fn new(dataset: Arc<dyn Dataset>) -> Self {
        Self {
            dataset,
            steps: Steps::default(),
            order: Order::sequential(),
            seed: None,
            batch: None,
            last: None,
            shard: Shard::single(),
            resume: None,
            any_batch: false,
            stop: None,
            workers: None,
            slots: None,
            budget: None,
            shared_budget: None,
            reader: ReaderOptions::default(),
            device: Device::default(),
            device_batches: None,
            gds: Gds::default(),
            cufile: None,
            #[cfg(feature = "cuda")]
            streams: Vec::new(),
            numa: Numa::Auto,
            sysfs: "/sys".into(),
            held_deadline: Duration::from_secs(10),
            stall_deadline: STALL_DEADLINE,
            on_bad: OnBadSample::default(),
            ledger: None,
            clock: Clock::real(),
            #[cfg(test)]
            opened: None,
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

    /// Transforms every full batch in place, once, on a decode worker (mixup, packing). In its `Ctx`, the id is the position
    /// in the epoch of the batch's first row: another one on every rank.
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

    /// Makes floats of a picture field of `u8` at the very end: on a GPU after the copy, so that the bus carries a byte per
    /// value, on the host in the slot. The bytes are the same on both. The field keeps its name; transforms see it before. A
    /// field that [`keep`](Self::keep) leaves out is not finished.
    pub fn finish(mut self, name: &str, finish: crate::device::Finish) -> Self {
        self.steps.finishes.push((name.into(), finish));
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

    /// Rows of a batch of one rank; all ranks must have the same. Default: 32, or what the state that is resumed says.
    ///
    /// With a [shard](Self::shard) the global batch is this times the world size. A run that shall go on with another world
    /// size says [`global_batch`](Self::global_batch) instead.
    pub fn batch_size(mut self, rows: usize) -> Self {
        self.batch = Some(BatchSize::Rank(rows));
        self
    }

    /// Rows of a batch on all ranks together; each rank gets its part, rank 0 one more where the world size does not divide
    /// it. In place of [`batch_size`](Self::batch_size); the later call counts.
    pub fn global_batch(mut self, rows: u64) -> Self {
        self.batch = Some(BatchSize::Global(rows));
        self
    }

    /// Which rank of how many this is: every global batch is cut in as many parts, and this loader delivers one of them.
    /// Default: the only one. See [`Shard::from_env`].
    pub fn shard(mut self, shard: Shard) -> Self {
        self.shard = shard;
        self
    }

    /// Goes on from a saved state: the first epoch starts after the last batch that was received before, see
    /// [`Loader::next_epoch`]. The samples that follow are the same, in the same order, with any number of workers, any
    /// reader, depth and world size. Without [`batch_size`](Self::batch_size) or [`global_batch`](Self::global_batch) the
    /// global batch is that of the state, and so is [`last_batch`](Self::last_batch).
    ///
    /// Then `build` fails with [`ErrorKind::FingerprintMismatch`], naming the shard, when the dataset is not the one that
    /// the state was saved with; with [`ErrorKind::State`] when order, seeds, global batch or last batch are set otherwise.
    pub fn resume(mut self, state: State) -> Self {
        self.resume = Some(state);
        self
    }

    /// As [`resume`](Self::resume), and the global batch and the last batch may differ: the rest of the epoch that was
    /// interrupted is cut into batches of the new size from where it stopped, the later epochs from their beginning. The
    /// sequence of samples stays the same (but for those that the last batch drops or repeats), the sequence of batches does
    /// not. Where that rest is dropped as a whole, [`Loader::next_epoch`] is the one after the epoch that was interrupted.
    pub fn resume_rebatched(mut self, state: State) -> Self {
        self.any_batch = true;
        self.resume(state)
    }

    /// What [`Loader::stop_requested`] asks: a flag that a signal sets, or the program.
    pub fn stop(mut self, stop: Stop) -> Self {
        self.stop = Some(stop);
        self
    }

    /// What becomes of the samples that do not fill a global batch. Default: a smaller last batch, or what the state that is
    /// resumed says.
    pub fn last_batch(mut self, last: LastBatch) -> Self {
        self.last = Some(last);
        self
    }

    /// Decode workers (threads), at most 1024. Default: one per core that the process may use, or that it may use of the
    /// [NUMA node](Self::numa) where it is placed on one.
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

    /// Takes its memory from a budget that several loaders of this process share: at most an equal part of what is free
    /// there, see [`Budget`]; and at most the [`memory_budget`](Self::memory_budget), if that is set, too.
    pub fn shared_budget(mut self, budget: &Budget) -> Self {
        self.shared_budget = Some(budget.clone());
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

    /// Reads in flight at most. Default: 32; 128 for io_uring through the page cache, see [`ReaderOptions::depth`].
    pub fn depth(mut self, depth: u32) -> Self {
        self.reader.depth = Some(depth);
        self
    }

    /// Where batches are handed out. Default: the host; [`Device::auto`] is a GPU where there is one.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Batches in device memory at once, those in the user's hands included; at least 2. Default: 3, one in use, one there,
    /// one on its way. The host device has none beside its [`slots`](Self::slots).
    pub fn device_batches(mut self, batches: usize) -> Self {
        self.device_batches = Some(batches);
        self
    }

    /// Whether fields whose rows are bytes of a file as they stand go straight into the device's memory (GPUDirect Storage).
    /// Such bytes are not checksummed by the host. Default: [`Gds::Auto`], where cuFile really goes past the host's memory
    /// and the page cache has no room for the dataset; the report says which way each field takes and why.
    ///
    /// [`Gds::Auto`] opens cuFile only where the kernel module nvidia-fs is loaded or cuFile may use peer-to-peer DMA
    /// (`"use_pci_p2pdma": true` in `cufile.json`, or `CUFILE_USE_PCIP2PDMA=true`), and closes it when the trial read says no.
    /// It needs cuFile 1.15, the first that counts which way bytes take; before that only nvidia-fs can, where root has
    /// switched its counters on. From 1.16 on an open cuFile has a context, with its memory, on every visible GPU: set
    /// `CUDA_VISIBLE_DEVICES` for each rank.
    ///
    /// With [`Gds::Require`] `build` fails, with the reason for each field, unless at least one goes directly: whatever the
    /// size of its rows and the page cache, also by a cuFile that does not count which way bytes take.
    pub fn gds(mut self, gds: Gds) -> Self {
        self.gds = gds;
        self
    }

    /// For tests: this cuFile library, on a machine whose `proc`, `run` and `dev` are below `root`.
    #[doc(hidden)]
    pub fn cufile_at(mut self, library: impl Into<PathBuf>, root: impl Into<PathBuf>) -> Self {
        self.cufile = Some((library.into(), root.into()));
        self
    }

    /// A stream that works on the batches: it waits for each batch's copy, and its work is waited for before the memory of a
    /// dropped batch is used again. May be called several times. Without it, see [`Batch::bind`](crate::Batch::bind).
    #[cfg(feature = "cuda")]
    pub fn stream(mut self, stream: impl Into<crate::device::cuda::Stream>) -> Self {
        self.streams.push(stream.into());
        self
    }

    /// On which NUMA node threads run and memory lies. Default: [`Numa::Auto`], next to the device.
    pub fn numa(mut self, numa: Numa) -> Self {
        self.numa = numa;
        self
    }

    /// For tests: what shall go wrong in its readers.
    #[cfg(feature = "test-util")]
    pub fn faulty(mut self, faulty: Arc<storage::Faulty>) -> Self {
        self.reader.faulty = Some(faulty);
        self
    }

    /// Measures nothing: for the bench that shows what measuring costs.
    #[doc(hidden)]
    pub fn unmeasured(mut self) -> Self {
        self.clock = Clock::still();
        self
    }

    /// How long `next()` waits when the caller holds every batch, before it says so. Default: 10 s.
    pub fn held_deadline(mut self, deadline: Duration) -> Self {
        self.held_deadline = deadline;
        self
    }

    /// How long anything that a batch waits for may be at the same thing (one read, one sample in a decoder or transform, one
    /// copy) before `next()` ends with [`ErrorKind::Stalled`], which names it. Default: 300 s; at least 20 ms. Slow work on many samples is
    /// no stall; nor is work of the consumer's streams on batches that were dropped, which the next copy waits for: that
    /// counts as [`Copy::blocked_ns`](crate::profile::Copy::blocked_ns). The loader can still be dropped: what does not answer is left behind, with all it can reach, after some
    /// seconds.
    pub fn stall_deadline(mut self, deadline: Duration) -> Self {
        self.stall_deadline = deadline;
        self
    }

    /// What to do when a sample cannot be had. Default: [`OnBadSample::Fail`].
    ///
    /// ```
    /// use feedline::{Loader, OnBadSample, Status, dataset::Records};
    ///
    /// let records = Records::builder(1).open_bytes([0, 1, 2, 3])?;
    /// let odd = |row: &mut feedline::Row<'_>| row.bytes_mut(0)[0] == 2;
    /// let loader = Loader::builder(records)
    ///     .map(move |row, _| if odd(row) { Err(feedline::Error::user("I do not like it")) } else { Ok(()) })
    ///     .on_bad_sample(OnBadSample::Substitute { budget: 1 })
    ///     .build()?;
    /// let batch = loader.epoch(0)?.next().unwrap()?;
    /// assert_eq!((batch.len(), batch.status()[2]), (4, Status::Substitute as u8));
    /// assert_ne!(batch.ids()[2], 2);
    /// let ledger = loader.ledger();
    /// assert_eq!((ledger.samples[0].sample, ledger.samples[0].cause.as_str()), (2, "I do not like it"));
    /// # Ok::<(), feedline::Error>(())
    /// ```
    pub fn on_bad_sample(mut self, policy: OnBadSample) -> Self {
        self.on_bad = policy;
        self
    }

    /// Writes to this file each time that a sample cannot be had, a line of JSON (the fields of [`BadSample`](crate::BadSample)),
    /// when the batch of its row is handed out: one line for a row that got a substitute, and one for each sample that was tried
    /// as a substitute for it in vain. The file is appended to: each rank has its own. What cannot be written, on a full
    /// disk say, is said in the [ledger](Loader::ledger) and the report, and does not end the run.
    ///
    /// `build` fails when the file cannot be opened, or when nothing is ever substituted.
    pub fn ledger(mut self, path: impl Into<PathBuf>) -> Self {
        self.ledger = Some(path.into());
        self
    }

    /// Time passes as this clock says, and this is the reader.
    #[cfg(all(test, feature = "cuda"))]
    pub(super) fn simulated(mut self, clock: Clock, opened: Opened) -> Self {
        (self.clock, self.opened) = (clock, Some(opened));
        self
    }

    /// The reader for the dataset's files, opened on the node.
    fn open_reader(&mut self, place: Option<&Placement>) -> Result<Opened> {
        #[cfg(test)]
        if let Some(opened) = self.opened.take() {
            return Ok(opened);
        }
        let (sources, options, deadline) = (self.dataset.sources().clone(), self.reader.clone(), self.stall_deadline);
        let open = move || storage::open(sources, &options);
        on_node(place, || runtime::within(deadline, "the storage of the dataset's files", open))??
    }

    /// Checks everything, reserves all memory and starts the threads. For saved states it looks at the dataset: it reads the
    /// ends of up to 256 files, see [`Fingerprint`](crate::dataset::Fingerprint).
    ///
    /// Errors: [`ErrorKind::Config`] for a setting that is not legal, [`ErrorKind::Empty`] for a dataset without samples or
    /// epochs without a batch, [`ErrorKind::Budget`] with the sum when the budget, or its part of the shared one, is too small,
    /// and whatever opening the sources finds.
    pub fn build(self) -> Result<Loader> {
        // Datasets, decoders and samplers are the user's code.
        let built = catch_unwind(AssertUnwindSafe(|| self.make()));
        built.unwrap_or_else(|panic| Err(panicked(&*panic, Stage::Build)))
    }

    fn make(mut self) -> Result<Loader> {
        self.check()?;
        let ledger = Keeper::open(self.budget_of_substitutes()?, self.ledger.as_deref())?;
        let global = self.global()?;
        let on_host = self.device.kind() == DeviceKind::Host;
        let placing = Placing::new(self.numa, self.device.pci_bus_id(), &self.sysfs)?;
        let place = placing.placement();
        let opened = self.open_reader(place)?;
        let dataset = self.dataset;
        let origin = Origin::now(dataset.sources(), self.reader.direct);
        // The cache is asked first also where it has no room: then what is missing is read past it.
        let cached = opened.cache.is_some() && !opened.choice.direct;
        let mut ways =
            Ways::new(&self.device, self.gds, self.cufile, &*dataset, cached, self.on_bad != OnBadSample::Fail);
        let mut recipe = Recipe::new(&*dataset, self.steps.clone(), !on_host, |draft| ways.choose(draft))?;
        let chunks = chunks::starts_of(&*dataset)?;
        let last = self.last.or(self.resume.as_ref().map(|state| state.stand().last)).unwrap_or_default();
        let (order, shard) = (self.order.clone(), self.shard);
        let mut jobs = JobMaker { order, dataset_len: dataset.len(), chunks, positions: None, global, last, shard };
        let first = jobs.job(0, &Cursor::default(), u64::MAX, Arc::default())?;
        let whole = first.batches;
        if whole.count() == 0 {
            return Err(no_batches(&whole, global));
        }
        jobs.positions = Some(whole.len());
        let device_batches = if on_host { 0 } else { self.device_batches.unwrap_or(DEVICE_BATCHES) };
        let rows = whole.rows_max() as usize;
        if !ways.reserve(Layout::new(&recipe.contents, rows)?.bytes(), device_batches)? {
            recipe = Recipe::new(&*dataset, self.steps, !on_host, |_| Ok(Vec::new()))?;
        }
        let absent: Vec<_> = recipe.directs.iter().map(|step| step.field).collect();
        let layout = Layout::without(&recipe.spec, rows, &absent)?;
        let workers = self.workers.unwrap_or_else(|| {
            let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            place.map_or(cores, |place| place.cpus().min(cores))
        });
        let depth = opened.reader.depth();
        let pending = 2 * depth + workers;
        let parts = recipe.handlers.len();
        let mut demand = demand(&*dataset, &recipe, &layout, &opened, workers, pending);
        if dataset.chunked().is_some() {
            let cached = opened.cache.is_some() && dataset.sources().total_bytes() > 0;
            demand.take_chunks(&*dataset, &first.order, cached);
        }
        // What one batch takes on a device; on the host it is the slot.
        let contents = Layout::new(&recipe.contents, layout.rows())?;
        let device_bytes = if on_host { 0 } else { contents.bytes() };
        let direct_threads = if recipe.directs.is_empty() { 0 } else { DIRECT_THREADS };
        let (slots, budget) = (self.slots, self.budget);
        let room = substitute_room(&demand, self.on_bad);
        let substitute = room.encoded.saturating_add(room.chunk).saturating_add(room.lists);
        let demand = Demand { slots, budget, device_batches, device_bytes, direct_threads, substitute, ..demand };
        let (plan, lease) = plan(demand, self.shared_budget.as_ref())?;
        let spec = recipe.spec.clone();
        let meters = Arc::new(Meters::new(self.clock, workers, !on_host));
        let measured = if meters.on { plan.slots + device_batches } else { 0 };
        let idle = idle_meter(&self.device, &meters.clock, measured)?;
        let info = BatchInfo {
            keep: recipe.keep.clone(),
            most: if on_host { plan.slots } else { device_batches },
            #[cfg(feature = "cuda")]
            streams: self.streams,
            device: self.device.clone(),
            held: AtomicUsize::new(0),
            meters: meters.clone(),
            process: Process::current(),
        };
        let seed = self.seed.unwrap_or(self.order.seed());
        let chunk_starts = jobs.chunks.as_ref().map(|chunks| chunks.starts.clone());
        let assembly = Assembly {
            dataset,
            chunk_starts,
            recipe,
            layout,
            contents,
            opened,
            plan: plan.clone(),
            lease,
            pending,
            parts,
            seed,
            ways,
            idle: idle.clone(),
            meters,
            on_bad: self.on_bad,
            room,
        };
        let (routes, direct) = assembly.ways.told();
        // Apart from the rest, since they may be left where they are. What else there is of threads and memory is made, and
        // populated, on the node.
        let threads = on_node(placing.for_workers(self.numa, workers), || runtime::pool(workers, &assembly.meters))??;
        let (pinning, pinned) = bounded(0);
        let (runtime, ready, choice) = on_node(place, || assembly.start(spec, threads, pinning))??;
        let (reader, explicit) = (choice.reader, choice.explicit);
        let shared = Shared {
            runtime,
            ready,
            choice,
            pinned,
            routes,
            direct,
            numa: placing.line(self.numa, workers),
            info: Arc::new(info),
            jobs,
            whole,
            planned_amplification: first.order.amplification(&whole),
            origin,
            settings: Settings {
                reader,
                explicit,
                depth: depth as u32,
                workers: workers as u32,
                cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
                slots: plan.slots as u32,
                buffers: (!on_host).then_some(device_batches as u32),
            },
            plan,
            idle,
            steady: Mutex::default(),
            live: AtomicBool::new(false),
            held_deadline: self.held_deadline,
            stall_deadline: self.stall_deadline,
            ledger: Mutex::new(ledger),
            place: Mutex::new(Place::default()),
            lasting: OnceLock::new(),
            any_batch: self.any_batch,
            stop: self.stop,
        };
        // Now, while the dataset is the one that the run begins with. Where a file cannot be read `state()` says so.
        let _ = shared.lasting();
        if let Some(state) = &self.resume {
            shared.resume(state)?;
        }
        Ok(Loader { shared: Life(Arc::new(shared)) })
    }

    /// Distinct bad samples that are put up with.
    fn budget_of_substitutes(&self) -> Result<u64> {
        match (self.on_bad, &self.ledger) {
            (OnBadSample::Fail, Some(_)) => {
                Err(config("a ledger, but no sample is ever substituted: see `on_bad_sample`"))
            }
            (OnBadSample::Fail, None) => Ok(0),
            (OnBadSample::Substitute { budget }, _) => Ok(budget),
        }
    }

    /// Rows of a batch on all ranks together.
    fn global(&self) -> Result<u64> {
        let of_ranks = |rows: usize| (rows as u64).checked_mul(u64::from(self.shard.world()));
        match (self.batch, &self.resume) {
            (Some(BatchSize::Global(0)), _) => Err(config("global_batch is 0")),
            (Some(BatchSize::Rank(0)), _) => Err(config("batch_size is 0")),
            (Some(BatchSize::Global(rows)), _) => Ok(rows),
            (Some(BatchSize::Rank(rows)), _) => of_ranks(rows).ok_or_else(|| config("batch_size is too large")),
            (None, Some(state)) => Ok(state.global_batch()),
            (None, None) => of_ranks(BATCH_DEFAULT).ok_or_else(|| config("too many ranks")),
        }
    }

    fn check(&self) -> Result<()> {
        if self.dataset.len() == 0 {
            return Err(Error::new(ErrorKind::Empty, Stage::Build, "the dataset has no samples"));
        }
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.device.gpu() {
            self.streams.iter().try_for_each(|stream| stream.check(gpu))?;
        }
        if self.stall_deadline < STALL_LEAST {
            return Err(config(&format!("a stall_deadline of {:?}; at least {STALL_LEAST:?}", self.stall_deadline)));
        }
        if self.workers == Some(0) {
            return Err(config("workers is 0"));
        }
        if self.workers.is_some_and(|workers| workers > WORKERS_MAX) {
            return Err(config(&format!("more than {WORKERS_MAX} workers")));
        }
        if self.device_batches.is_some_and(|batches| !(2..=SLOTS_MAX).contains(&batches)) {
            return Err(config(&format!("device_batches must be 2 to {SLOTS_MAX}")));
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

/// An epoch without a batch would train on nothing, without a word.
fn no_batches(whole: &Batches, global: u64) -> Error {
    let message = match whole.len() {
        0 => "the order has no positions".into(),
        len => {
            format!("an epoch of {len} samples has no batch of {global}, and `LastBatch::Drop` drops what fills none")
        }
    };
    Error::new(ErrorKind::Empty, Stage::Build, message)
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
        part: None,
        largest: dataset.largest_sample(),
        device_batches: 0,
        device_bytes: 0,
        direct_threads: 0,
        substitute: 0,
    }
}

/// What substituting needs: the largest sample or chunk, encoded and open.
fn substitute_room(demand: &Demand, policy: OnBadSample) -> Room {
    if policy == OnBadSample::Fail {
        return Room::default();
    }
    let chunk = demand.chunks.as_ref();
    // Nothing is encoded elsewhere where all lies in memory.
    let encoded = if demand.encoded_max == 0 { 0 } else { chunk.map_or(demand.encoded_max, |chunk| chunk.encoded) };
    Room { encoded, chunk: chunk.map_or(0, |chunk| chunk.bytes), lists: chunk.map_or(0, |chunk| chunk.lists) }
}

/// The plan, and what it takes of a shared budget.
fn plan(demand: Demand, shared: Option<&Budget>) -> Result<(MemoryPlan, Option<Lease>)> {
    let Some(budget) = shared else { return Ok((MemoryPlan::new(&demand)?, None)) };
    let (plan, lease) = budget.take(|part| {
        let plan = MemoryPlan::new(&Demand { part: Some(part), ..demand })?;
        let total = plan.total();
        Ok((plan, total))
    })?;
    Ok((plan, Some(lease)))
}

/// Everything `build` has decided, on its way to threads.
struct Assembly {
    dataset: Arc<dyn Dataset>,
    chunk_starts: Option<Arc<[u64]>>,
    recipe: Recipe,
    layout: Layout,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "it is the slot's"))]
    contents: Layout,
    opened: Opened,
    plan: MemoryPlan,
    lease: Option<Lease>,
    pending: usize,
    parts: usize,
    seed: u64,
    ways: Ways,
    idle: Option<Idle>,
    meters: Arc<Meters>,
    on_bad: OnBadSample,
    room: Room,
}

type WorkerThreads = (rayon::ThreadPool, runtime::Handles);

impl Assembly {
    fn start(
        mut self,
        spec: Spec,
        workers: WorkerThreads,
        pinning: Sender<Infallible>,
    ) -> Result<(Runtime, Receiver<Contents>, Choice)> {
        let (rows, counts) = (self.layout.clone(), (self.plan.device_batches, self.plan.slots));
        let onward = self.ways.open(&self.recipe, rows, self.contents.clone(), counts, self.idle.clone())?;
        let Self {
            dataset,
            chunk_starts,
            recipe,
            layout,
            opened,
            plan,
            lease,
            pending,
            parts,
            seed,
            meters,
            on_bad,
            room,
            ..
        } = self;
        let Opened { reader, cache, choice, again } = opened;
        let recovery = Recovery::new(on_bad, room, again);
        let waker = reader.waker();
        // Room for every slot there is, so that giving one back never waits.
        let (frees_in, frees) = bounded(plan.slots);
        let (ready_in, ready) = bounded(plan.slots.saturating_add(plan.device_batches));
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
            closed: Default::default(),
            waker: waker.clone(),
            meters: meters.clone(),
            to_device: onward.as_ref().map(Onward::to_device),
            to_map: map_in,
            map_bell: OnceLock::new(),
            lease,
        });
        let closing = CloseOnError(Some(exchange.clone()));
        let row_bytes = layout.bytes() / layout.rows();
        // Where free slots go is known to them; they are announced when the threads are there.
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
        let (pool, handles) = workers;
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
            meters,
            recovery,
            watch: Watch::new(handles.len(), pending + plan.chunks),
            scratch_limit: plan.scratch_bytes,
            unregistered: OnceLock::new(),
            #[cfg(all(test, feature = "cuda"))]
            dozing: Default::default(),
        });
        let _ = exchange.map_bell.set(Arc::downgrade(&core));
        let io = Io::new(core.clone(), reader, IoSide { frees, idle, ring, chunks, regions }, pending);
        let runtime = Onward::start(onward, core, io, handles, (slots, pinning))?;
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

impl std::fmt::Debug for LoaderBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LoaderBuilder of {}, {}", self.dataset.describe(), self.shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::Records;
    use crate::pipeline::placement::tests::{Sysfs, here, own_cpus};

    fn builder(sysfs: &Sysfs) -> LoaderBuilder {
        let mut builder = LoaderBuilder::new(Arc::new(Records::builder(1).open_bytes(vec![7; 64]).unwrap()));
        builder.sysfs = sysfs.root().into();
        builder.reader(Mode::Pread).depth(3)
    }

    /// Names of the threads of this process that run on exactly these CPUs.
    fn threads_on(cpus: &str) -> Vec<String> {
        let mut names = Vec::new();
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let value =
                |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("").trim().to_string();
            if value("Cpus_allowed_list:") == cpus {
                names.push(value("Name:"));
            }
        }
        names
    }

    /// A name that is there fewer times than it should be.
    fn missing<'n>(names: &[&'n str], threads: &[String]) -> Option<&'n str> {
        let wanted = |name: &str| names.iter().filter(|other| **other == name).count();
        let found = |name: &str| threads.iter().filter(|other| *other == name).count();
        names.iter().copied().find(|name| found(name) < wanted(name))
    }

    #[test]
    fn workers_io_thread_and_reader_run_on_the_node_and_the_report_says_so() {
        let (cpu, all) = own_cpus();
        let (sysfs, node) = Sysfs::around(&cpu);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let map = {
            let seen = seen.clone();
            move |_: &mut Row<'_>, _: &mut Ctx<'_>| {
                seen.lock().unwrap().push(here());
                Ok(())
            }
        };
        let loader = builder(&sysfs).numa(Numa::Node(node)).workers(3).map(map).build().unwrap();
        // The system cuts names to 15 bytes, and a thread bears the name of who started it until it runs.
        let mut names = ["feedline-dec-0", "feedline-dec-1", "feedline-dec-2", "feedline-io"].to_vec();
        names.extend(["feedline-pread-"; 3]);
        let started = std::time::Instant::now();
        while let Some(missing) = missing(&names, &threads_on(&cpu)) {
            assert!(started.elapsed() < Duration::from_secs(60), "{missing} is not among {:?}", threads_on(&cpu));
            std::thread::yield_now();
        }
        assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
        let seen = seen.lock().unwrap();
        assert!(seen.len() == 64 && seen.iter().all(|cpus| *cpus == cpu), "{seen:?}");
        let line = format!("numa      threads and memory on NUMA node {node} (1 CPUs: {cpu}), as asked for\n");
        assert!(loader.report().to_string().contains(&line), "{}", loader.report());
        assert_eq!(here(), all, "the caller stays where it was");
    }

    #[test]
    fn one_worker_for_each_cpu_of_the_node_is_the_default() {
        let (cpu, _) = own_cpus();
        let (sysfs, node) = Sysfs::around(&cpu);
        assert_eq!(builder(&sysfs).numa(Numa::Node(node)).build().unwrap().plan().workers, 1);
        let cores = std::thread::available_parallelism().unwrap().get();
        for numa in [Numa::Auto, Numa::Off] {
            let loader = builder(&sysfs).numa(numa).build().unwrap();
            assert_eq!((loader.plan().workers, loader.report().numa), (cores, None), "{numa:?} on the host");
        }
    }

    #[test]
    fn a_node_that_cannot_be_had_is_an_error_of_build() {
        let sysfs = Sysfs::new(&[(0, "1022")], &[]);
        for (node, words) in [(0, "NUMA node 0 has 1022"), (9, "no NUMA node 9, its nodes are 0")] {
            let error = builder(&sysfs).numa(Numa::Node(node)).build().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
