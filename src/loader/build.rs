//! `build`: checks settings, routes fields, plans and reserves memory, starts threads.
//!
//! ```text
//! check ──► open reader ──► fields: recipe, routes, layouts ──► memory: the plan ──► Assembly ──► threads ──► Loader
//! ```

use super::device_stage::{DeviceStage, Layouts, Routes};
use super::origin::Before;
use super::settings::{BatchSize, LoaderBuilder};
use super::terms::{EncodedTerm, STACK, resident, scratch, slots, spare_room};
use super::{BatchPlace, Deadlines, JobMaker, Life, Loader, LoaderFacts, LoaderState};
use crate::batch::{BatchInfo, Contents};
use crate::order::{Batches, Counts, LastBatch, Locality, Order};
use crate::pipeline::chunks::ChunkRoom;
use crate::pipeline::direct::{DIRECT_BOUNCE, DIRECT_THREADS};
use crate::pipeline::drains::Drains;
use crate::pipeline::exchange::ToWorkers;
use crate::pipeline::placement::{Placement, Placing, on_node};
use crate::pipeline::planner::{IoSide, Planner};
use crate::pipeline::queue::Queue;
use crate::pipeline::recipe::Recipe;
use crate::pipeline::runtime::Runtime;
use crate::pipeline::sample::Samples;
use crate::pipeline::substitute::SpareRoom;
use crate::pipeline::task::Sample;
use crate::pipeline::watchdog::Watch;
use crate::pipeline::workers::Workers;
use crate::pipeline::{
    Core, EpochJob, Exchange, OnBadSample, ToDevice, ToIo, chunks, exchange, fetch, runtime,
};
use crate::state::Cursor;
use crossbeam_channel::{Receiver, Sender, bounded};
use feedline_base::error::{Error, ErrorKind, Result, Stage, caught, config};
use feedline_base::process::Process;
use feedline_base::setting::Setting;
use feedline_core::dataset::{ChunkBuf, Dataset, Sizes};
use feedline_core::ledger::LedgerWriter;
use feedline_core::memory::plan::Limits;
use feedline_core::memory::{ByteRing, Filled, Lease, MemoryPlan, MemoryTerm, Pool, Region};
use feedline_core::order::{Cores, local_ranks, usable_cores};
use feedline_core::tensor::{GroupShapes, Layout};
use feedline_device::{DeviceKind, IdleMeter};
use feedline_reader::Reader;
use feedline_report::meter::{Effort, Meters, Settings, nvtx};
use feedline_report::spans;
use feedline_store::Opened;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Maximum number of decode workers: each is a thread with its own buffers.
const WORKERS_MAX: usize = 1024;
/// Maximum number of batch slots.
const SLOTS_MAX: usize = 65_536;
/// Maximum bytes of a sample: larger than any memory, and small enough that sums cannot overflow.
const SAMPLE_MAX: u64 = 1 << 44;
const APPENDED_MAX: usize = 1 << 16;
/// Shorter deadlines would report a busy machine as stalled.
const STALL_LEAST: Duration = Duration::from_millis(20);
/// Default number of batches on a device.
const DEVICE_BATCHES: usize = 3;
/// A copy fills one area while the operations read the other.
const STAGING_AREAS: usize = 2;
/// Default number of rows of a batch.
const BATCH_DEFAULT: usize = 32;

impl LoaderBuilder {
    /// Checks all settings, reserves all memory and starts the threads.
    ///
    /// It fingerprints the dataset for saved states, for which it reads the ends of up to 256
    /// files, see [`State`](crate::State).
    ///
    /// Errors:
    /// * [`ErrorKind::Config`] for an invalid setting;
    /// * [`ErrorKind::Unsupported`] for a setting that needs a feature that this machine lacks;
    /// * [`ErrorKind::Empty`] for a dataset without samples, or an epoch without a batch;
    /// * [`ErrorKind::Budget`] with the sum, if the budget, the part of a shared budget or the free
    ///   memory is too small. The container's limits apply, and memory that the kernel can reclaim
    ///   counts as free;
    /// * any error of opening the sources.
    pub fn build(self) -> Result<Loader> {
        // Datasets, decoders and samplers are the user's code: they may panic.
        caught(Stage::Build, || self.make())
    }

    fn make(mut self) -> Result<Loader> {
        self.check()?;
        nvtx::listen().unwrap_or_else(|why| spans::unheard(&why));
        let order = self.sample_order()?;
        let ledger = LedgerWriter::open(self.substitutes()?, self.faults.ledger.as_deref())?;
        let global = self.global_rows()?;
        let placing = Placing::new(
            self.machine.numa,
            self.device.device.pci_bus_id(),
            &self.machine.sysfs,
        )?;
        let opened = self.open_reader(placing.placement(), order.locality())?;
        let before = Before::now();
        let (recipe, routes) = self.recipe_and_routes(&opened)?;
        let (jobs, first) = self.jobs(order, global)?;
        let shapes = group_shapes(&jobs.order, &first.batches);
        shapes.check(&recipe.spec)?;
        let fields = self.lay_out(recipe, routes, first.batches.rows_max() as usize, &shapes)?;
        let mut reserved = self.fitting(&fields, &opened, &first, placing.placement())?;
        // Worker threads have their own placement, because they may remain unpinned. All other
        // threads and memory are made, and populated, on the node.
        let place = placing.for_workers(self.machine.numa, reserved.workers);
        let clock = self.clock.clone();
        let on_device = !self.on_host();
        let meters = |workers| Arc::new(Meters::new(clock.clone(), workers, on_device));
        let (pool, handles, meters) = on_node(place, || runtime::pool(reserved.workers, meters))??;
        reserved.workers = handles.len();
        let info = Arc::new(self.batch_info(&fields.recipe, &reserved.plan, &meters));
        let assembly = Assembly {
            dataset: self.dataset,
            chunk_starts: jobs.chunks.as_ref().map(|chunks| chunks.starts.clone()),
            seed: self.run.seed.unwrap_or(jobs.order.seed()),
            on_bad: self.faults.on_bad,
            meters,
            fields,
            opened,
            reserved,
        };
        let facts = assembly.facts(
            placing.line(self.machine.numa, assembly.reserved.workers),
            before,
            &first,
        );
        let (pinning, pinned) = bounded(0);
        let threads = (pool, handles);
        let Started {
            runtime,
            ready,
            idle,
        } = on_node(placing.placement(), || assembly.start(threads, pinning))??;
        let shared = LoaderState {
            runtime,
            ready,
            pinned,
            info,
            jobs: Mutex::new(Arc::new(jobs)),
            whole: first.batches.clone(),
            facts,
            idle,
            deadlines: Deadlines {
                held: self.faults.held_deadline,
                stall: self.faults.stall_deadline,
            },
            steady: Mutex::default(),
            logged: Mutex::default(),
            live: AtomicBool::new(false),
            ledger: Mutex::new(ledger),
            place: Mutex::new(BatchPlace::default()),
            run_identity: OnceLock::new(),
            stop: self.run.stop,
        };
        // The dataset is fingerprinted now, in the state in which the run first sees it. If a file
        // cannot be read, `state()` tries again.
        if let Err(error) = shared.run_identity()
            && error.stage() == Stage::Order
        {
            return Err(error);
        }
        if let Some(state) = &self.run.resume {
            shared.resume(state, self.run.any_batch)?;
        }
        Ok(Loader {
            shared: Life(Arc::new(shared)),
        })
    }

    fn on_host(&self) -> bool {
        self.device.device.kind() == DeviceKind::Host
    }

    /// Number of batches in device memory.
    fn batches_on_device(&self) -> usize {
        if self.on_host() {
            0
        } else {
            self.device.batches.unwrap_or(DEVICE_BATCHES)
        }
    }

    /// Number of decode workers: the setting, or by default one per CPU of this rank. With a
    /// placement, the default is at most the node's number of CPUs.
    fn worker_count(&self, place: Option<&Placement>) -> usize {
        self.memory.workers.unwrap_or_else(|| {
            let cores = Cores::here().part();
            place.map_or(cores, |place| place.cpus().min(cores))
        })
    }

    /// [Reserves](Self::reserved) memory for the set number of workers, or by default for as many
    /// as fit in the free memory.
    fn fitting(
        &self,
        fields: &Fields,
        opened: &Opened,
        first: &EpochJob,
        place: Option<&Placement>,
    ) -> Result<Reserved> {
        let is_default = self.memory.workers.is_none()
            && self.memory.budget.is_none()
            && self.memory.shared.is_none();
        let mut workers = self.worker_count(place);
        loop {
            match self.reserved(fields, opened, first, workers) {
                Err(error) if error.kind() == ErrorKind::Budget && is_default && workers > 1 => {
                    workers /= 2
                }
                done => return done,
            }
        }
    }

    /// Maximum number of distinct bad samples.
    fn substitutes(&self) -> Result<u64> {
        match (self.faults.on_bad, &self.faults.ledger) {
            (OnBadSample::Fail, Some(_)) => Err(config(format!(
                "a ledger is set, but bad samples are not substituted: set {}, or omit the ledger",
                Setting::Substitute
            ))),
            (OnBadSample::Fail, None) => Ok(0),
            (OnBadSample::Substitute { budget }, _) => Ok(budget),
        }
    }

    /// Number of rows of a batch on all ranks together.
    fn global_rows(&self) -> Result<u64> {
        let run = &self.run;
        let of_ranks = |rows: usize| (rows as u64).checked_mul(u64::from(run.rank.world()));
        match (run.batch, &run.resume) {
            (Some(BatchSize::Global(0)), _) => Err(config(format!(
                "{} is 0; set at least 1",
                Setting::GlobalBatch
            ))),
            (Some(BatchSize::Rank(0)), _) => Err(config(format!(
                "{} is 0; set at least 1",
                Setting::BatchSize
            ))),
            (Some(BatchSize::Global(rows)), _) => Ok(rows),
            (Some(BatchSize::Rank(rows)), _) => of_ranks(rows).ok_or_else(|| {
                config(format!(
                    "{} is too large: the global batch exceeds 64 bits",
                    Setting::BatchSize
                ))
            }),
            (None, Some(state)) => Ok(state.global_batch()),
            (None, None) => of_ranks(BATCH_DEFAULT)
                .ok_or_else(|| config("too many ranks: the global batch exceeds 64 bits")),
        }
    }

    fn check(&self) -> Result<()> {
        if self.dataset.len() == 0 {
            return Err(Error::new(
                ErrorKind::Empty,
                Stage::Build,
                "the dataset has no samples",
            ));
        }
        let backend = self.device.device.backend();
        self.device
            .streams
            .iter()
            .try_for_each(|bound| backend.check_stream(&bound.stream))?;
        let deadline = self.faults.stall_deadline;
        let memory = &self.memory;
        if deadline < STALL_LEAST {
            return Err(config(format!(
                "{} is {deadline:?}; set at least {STALL_LEAST:?}",
                Setting::StallDeadline
            )));
        }
        if memory.workers == Some(0) {
            return Err(config(format!("{} is 0; set at least 1", Setting::Workers)));
        }
        if let Some(workers) = memory.workers.filter(|workers| *workers > WORKERS_MAX) {
            return Err(config(format!(
                "{} is {workers}; set at most {WORKERS_MAX}",
                Setting::Workers
            )));
        }
        if let Some(batches) = self
            .device
            .batches
            .filter(|batches| !(2..=SLOTS_MAX).contains(batches))
        {
            return Err(config(format!(
                "{} is {batches}; set a number from 2 to {SLOTS_MAX}",
                Setting::DeviceBatches
            )));
        }
        if let Some(slots) = memory
            .slots
            .filter(|slots| !(1..=SLOTS_MAX).contains(slots))
        {
            return Err(config(format!(
                "{} is {slots}; set 1 to {SLOTS_MAX}",
                Setting::Slots
            )));
        }
        let Sizes {
            sample_bytes_max: largest,
            appended_max,
            ..
        } = self.dataset.sizes();
        if appended_max > APPENDED_MAX {
            let message = format!(
                "a sample has up to {appended_max} appended extents; the limit is {APPENDED_MAX}"
            );
            let error = Error::new(ErrorKind::Limit, Stage::Build, message);
            return Err(error.with_amounts(appended_max as u64, APPENDED_MAX as u64));
        }
        if largest > SAMPLE_MAX {
            let message =
                format!("the largest sample has {largest} bytes; the limit is {SAMPLE_MAX}");
            let error = Error::new(ErrorKind::Limit, Stage::Build, message);
            return Err(error.with_amounts(largest, SAMPLE_MAX));
        }
        Ok(())
    }

    /// The dataset's own order, else the user's.
    fn sample_order(&self) -> Result<Order> {
        let given = self.run.order.as_ref();
        if let Some(sampler) = self.dataset.sampler() {
            return match given {
                Some(_) => Err(config(format!(
                    "{} has an order of its own: omit `order`",
                    self.dataset.describe()
                ))),
                None => Ok(Order::of_sampler(sampler)),
            };
        }
        let order = given.cloned().unwrap_or_else(Order::sequential);
        if self.dataset.chunked().is_some() {
            return Ok(order);
        }
        let sources = self.dataset.sources();
        // The order is the same for data in memory and on a disk.
        Ok(order.in_blocks(self.dataset.len(), || {
            sources.ids().map(|id| sources.len_of(id)).sum()
        }))
    }

    /// The reader for the dataset's files, opened on the node.
    fn open_reader(&mut self, place: Option<&Placement>, locality: Locality) -> Result<Opened> {
        #[cfg(test)]
        if let Some(opened) = self.opened.take() {
            return Ok(opened);
        }
        let sources = self.dataset.sources().clone();
        let mut options = self.reader.clone();
        // All attempts of a request fit within the deadline, so that the request's own error comes
        // before the error of a stall.
        options.patience = Some(self.faults.stall_deadline / 12);
        options.connections = self.memory.budget.map(|budget| budget / 4);
        options.locality = locality;
        let cache = self.cache.clone();
        let deadline = self.faults.stall_deadline;
        on_node(place, || {
            runtime::within(deadline, "the storage of the dataset's files", move || {
                feedline_store::open_cached(sources, &options, cache.as_ref())
            })
        })??
    }

    /// The recipe of samples, and each field's route to the device.
    fn recipe_and_routes(&self, opened: &Opened) -> Result<(Recipe, Routes)> {
        // The page cache is tried first even if it has no room for the dataset; misses then bypass
        // it.
        let cached = opened.cache.is_some() && !opened.choice.direct;
        let substitutes = self.faults.on_bad != OnBadSample::Fail;
        let mut routes = Routes::new(&self.device, &*self.dataset, cached, substitutes);
        let recipe = Recipe::new(
            &*self.dataset,
            self.steps.clone(),
            !self.on_host(),
            |draft| routes.choose(draft),
        )?;
        Ok((recipe, routes))
    }

    /// The maker of epoch jobs, and the job of the first epoch.
    fn jobs(&self, order: Order, global: u64) -> Result<(JobMaker, Arc<EpochJob>)> {
        let run = &self.run;
        let last = run
            .last
            .or(run.resume.as_ref().map(|state| state.checkpoint().last))
            .unwrap_or_default();
        if run.batch.is_some() && order.sizes_batches() {
            return Err(config(format!(
                "{} is set, but the groups of the order set their own batch sizes: omit one of the \
                 two",
                if matches!(run.batch, Some(BatchSize::Rank(_))) {
                    Setting::BatchSize
                } else {
                    Setting::GlobalBatch
                }
            )));
        }
        let order = order.planned(self.dataset.len(), global, last, run.rank)?;
        let mut jobs = JobMaker {
            global: order.largest_batch().unwrap_or(global),
            order,
            dataset_len: self.dataset.len(),
            chunks: chunks::starts_of(&*self.dataset)?,
            positions: None,
            last,
            rank: run.rank,
        };
        let first = jobs.job(&Cursor::default(), u64::MAX, u64::MAX, (0, &Arc::default()))?;
        if first.batches.count() == 0 {
            return Err(no_batches(&first.batches, jobs.global));
        }
        self.check_last_batches(&first.batches)?;
        jobs.positions = Some(first.batches.len());
        Ok((jobs, first))
    }

    /// Rejects last batches of groups that together repeat or leave out too many samples: at least
    /// a whole batch, and more than the allowed share.
    fn check_last_batches(&self, whole: &Batches) -> Result<()> {
        let most = self.run.last_share;
        if most.is_nan() || most < 0.0 {
            return Err(config(format!(
                "{} is {most}; set 0 or more",
                Setting::LastBatchShare
            )));
        }
        let Counts {
            samples,
            repeated,
            left_out,
            ..
        } = whole.counts();
        let uneven = repeated + left_out;
        let share = uneven as f64 / samples.max(1) as f64;
        if !whole.end_apart() || share <= most || uneven < whole.global() {
            return Ok(());
        }
        let keep = Setting::LastBatch
            .hint(|last| format!(", keep them with {}", last.with(LastBatch::Mask)));
        let allowed = (share * 1000.0).ceil() / 1000.0;
        let allow = Setting::LastBatchShare
            .hint(|share| format!(", or allow it with {}", share.with(allowed)));
        Err(config(format!(
            "an epoch of {samples} samples repeats {repeated} and leaves out {left_out} \
             ({:.1} %), because each group has its own last batch: use fewer groups or smaller \
             batches{keep}{allow}",
            100.0 * share
        )))
    }

    /// Layouts of the fields in a slot and in a device batch. Registers the batch's memory with
    /// cuFile.
    fn lay_out(
        &self,
        mut recipe: Recipe,
        mut routes: Routes,
        rows: usize,
        groups: &GroupShapes,
    ) -> Result<Fields> {
        let contents =
            |recipe: &Recipe| Layout::without(&recipe.contents, rows, &recipe.staged(), groups);
        if !routes.reserve(contents(&recipe)?.bytes(), self.batches_on_device())? {
            recipe = Recipe::new(&*self.dataset, self.steps.clone(), !self.on_host(), |_| {
                Ok(Vec::new())
            })?;
        }
        let absent: Vec<_> = recipe.directs.iter().map(|step| step.field).collect();
        let slot = Layout::without(&recipe.spec, rows, &absent, groups)?;
        let contents = contents(&recipe)?;
        let staged = recipe.staged();
        let others: Vec<_> = (0..recipe.contents.fields().len())
            .filter(|field| !staged.contains(field))
            .collect();
        let staging = Layout::without(&recipe.contents, rows, &others, groups)?;
        Ok(Fields {
            recipe,
            routes,
            slot,
            contents,
            staging,
        })
    }

    /// The sum of all memory, and the lease on a shared budget.
    fn reserved(
        &self,
        fields: &Fields,
        opened: &Opened,
        first: &EpochJob,
        workers: usize,
    ) -> Result<Reserved> {
        let dataset = &*self.dataset;
        let recipe = &fields.recipe;
        let chunks = ChunkRoom::new(dataset, &first.order, workers)?;
        let encoded = EncodedTerm::new(dataset, recipe, chunks.as_ref(), opened.cache.is_some());
        let room = spare_room(&encoded, chunks.as_ref(), self.faults.on_bad);
        let data = dataset.sources().resident();
        let pending = 2 * opened.reader.depth() + workers;
        let opening = usize::try_from(dataset.sizes().opened_bytes_max).unwrap_or(usize::MAX);
        let opening = opening.saturating_add(chunks.as_ref().map_or(0, |chunks| chunks.opening));
        let readers = if recipe.directs.is_empty() {
            0
        } else {
            DIRECT_THREADS
        };
        let threads = workers + 1 + usize::from(!self.on_host()) + readers;
        // Bytes that a budget leaves above the minimum go to chunks, then to slots (they hide
        // latency), to the ring (depth), and last to large pictures. The `turn` of each term
        // follows this order.
        let mut terms = vec![resident(&data)];
        terms.push(slots(
            self.memory.slots,
            Region::size_for(fields.slot.bytes()),
        ));
        terms.extend(chunks.as_ref().map(|chunks| chunks.open));
        terms.push(encoded.ring(opened.reader.depth()));
        terms.push(encoded.cached(workers));
        terms.push(scratch(workers, recipe.scratch_bytes()));
        terms.push(MemoryTerm::OPENING.of(workers, opening));
        terms.push(fetch::tables(pending, recipe.parts_max(&dataset.sizes())));
        terms.extend(chunks.as_ref().map(|chunks| chunks.tables));
        terms.extend(first.order.groups().map(|groups| {
            MemoryTerm::new(
                MemoryTerm::TABLES.name,
                "samples in flight, groups of the order",
            )
            .of(1, groups.plan().bytes())
        }));
        terms.push(MemoryTerm::BOUNCE.of(readers, DIRECT_BOUNCE));
        terms.extend(opened.reader.terms());
        terms.push(room.term());
        terms.push(MemoryTerm::STACKS.of(threads, STACK));
        // On the host a batch is its slot.
        terms.extend(
            (!self.on_host())
                .then(|| MemoryTerm::DEVICE.of(self.batches_on_device(), fields.contents.bytes())),
        );
        terms.extend((!self.on_host() && !recipe.staged().is_empty()).then(|| {
            MemoryTerm::STAGING.of(
                self.batches_on_device().min(STAGING_AREAS),
                fields.staging.bytes(),
            )
        }));
        terms.push(MemoryTerm::INDEX.of(
            1,
            dataset.sizes().index_bytes + dataset.sources().table_bytes(),
        ));
        let (largest, pieces) = match chunks {
            Some(chunks) => (chunks.largest, chunks.pieces),
            None => (encoded.largest(dataset), 0),
        };
        let free = (self.machine.free)().map(|free| usize::try_from(free).unwrap_or(usize::MAX));
        let fit = |part| {
            MemoryPlan::fit(
                terms,
                Limits {
                    budget: self.memory.budget,
                    part,
                    free,
                    ranks: local_ranks(),
                    largest,
                },
            )
        };
        let (plan, lease) = match &self.memory.shared {
            None => (fit(None)?, None),
            Some(budget) => {
                let planned = budget.take(data, |part| {
                    fit(Some(part)).map(|plan| (plan.clone(), plan.own()))
                })?;
                (planned.0, Some(planned.1))
            }
        };
        Ok(Reserved {
            plan,
            lease,
            workers,
            pending,
            pieces,
            room,
        })
    }

    /// The data that all batches share.
    fn batch_info(
        &mut self,
        recipe: &Recipe,
        plan: &MemoryPlan,
        meters: &Arc<Meters>,
    ) -> BatchInfo {
        let (most, permit) = match self.on_host() {
            true => (plan.term(MemoryTerm::SLOTS).count, Setting::Slots),
            false => (plan.term(MemoryTerm::DEVICE).count, Setting::DeviceBatches),
        };
        BatchInfo {
            keep: recipe.keep.clone(),
            most,
            permit,
            streams: std::mem::take(&mut self.device.streams),
            device: self.device.device.clone(),
            held: AtomicUsize::new(0),
            meters: meters.clone(),
            process: Process::current(),
        }
    }
}

/// The shapes of this rank's batches, for each group of the order.
fn group_shapes(order: &Order, batches: &Batches) -> GroupShapes {
    let Some((groups, plan)) = order.planned_groups() else {
        return GroupShapes::default();
    };
    GroupShapes {
        rows: plan
            .rows()
            .map(|rows| batches.share(rows) as usize)
            .collect(),
        most: groups.most().to_vec(),
    }
}

/// The error for an epoch without a batch, which would train on nothing.
fn no_batches(whole: &Batches, global: u64) -> Error {
    let message = match whole.len() {
        0 if whole.are_grouped() => {
            let keep = Setting::LastBatch.hint(|last| format!(", or keep the rest with {last}"));
            format!(
                "no group of the order has enough samples for a batch: lower the batch \
                 sizes{keep}"
            )
        }
        0 => "the order is empty".into(),
        len => {
            let keep = Setting::LastBatch.hint(|last| format!(", or keep the rest with {last}"));
            format!(
                "an epoch of {len} samples has no batch of {global}: lower the batch \
                     size{keep}"
            )
        }
    };
    Error::new(ErrorKind::Empty, Stage::Build, message)
}

/// The recipe of the fields, with their routes and layouts.
struct Fields {
    recipe: Recipe,
    routes: Routes,
    /// Layout of a slot.
    slot: Layout,
    /// Layout of a delivered batch; on the host, of its slot.
    contents: Layout,
    /// Layout of an area for the fields that only the device's operations read.
    staging: Layout,
}

/// The memory of a loader.
struct Reserved {
    plan: MemoryPlan,
    /// Lease on a shared budget.
    lease: Option<Lease>,
    workers: usize,
    /// Maximum number of samples in flight.
    pending: usize,
    /// Maximum number of extents of a chunk.
    pieces: usize,
    /// Memory for substitutes.
    room: SpareRoom,
}

/// The decisions of `build`, from which it starts the threads.
struct Assembly {
    dataset: Arc<dyn Dataset>,
    chunk_starts: Option<Arc<[u64]>>,
    seed: u64,
    on_bad: OnBadSample,
    meters: Arc<Meters>,
    fields: Fields,
    opened: Opened,
    reserved: Reserved,
}

type WorkerThreads = (rayon::ThreadPool, runtime::Handles);

/// A running loader.
struct Started {
    runtime: Runtime,
    ready: Receiver<Contents>,
    idle: Option<Arc<IdleMeter>>,
}

/// The ends of channels that are not part of the exchange.
struct Ends {
    ready: Receiver<Contents>,
    maps: Option<Receiver<Filled>>,
}

impl Assembly {
    /// The decisions of `build`, in the form that reports show.
    fn facts(&self, numa: Option<String>, before: Before, first: &EpochJob) -> LoaderFacts {
        let plan = self.reserved.plan.clone();
        let choice = self.opened.choice.clone();
        let buffers = plan.term(MemoryTerm::DEVICE).count as u32;
        let (routes, direct) = self.fields.routes.chosen();
        // Unpacking chunks and mapping batches also count as effort.
        let effort = match &self.fields.recipe {
            recipe if !recipe.map_batches.is_empty() => recipe.effort().max(Effort::Own),
            recipe if self.chunk_starts.is_some() => recipe.effort().max(Effort::Light),
            recipe => recipe.effort(),
        };
        let settings = Settings {
            reader: choice.reader,
            depth: self.opened.reader.depth() as u32,
            effort,
            map_batch_in_turn: self.fields.recipe.map_batch_in_turn,
            workers: self.reserved.workers as u32,
            cores: usable_cores() as u32,
            slots: plan.term(MemoryTerm::SLOTS).count as u32,
            buffers: (buffers > 0).then_some(buffers),
            chunks: self
                .chunk_starts
                .as_ref()
                .map(|starts| starts.len() as u64 - 1),
        };
        let planned_amplification = first.order.amplification(&first.batches);
        let remote = self.opened.remote.clone();
        let cores = Cores::here().shared();
        LoaderFacts {
            choice,
            remote,
            numa,
            cores,
            plan,
            routes,
            direct,
            planned_amplification,
            before,
            settings,
        }
    }

    fn start(mut self, workers: WorkerThreads, pinning: Sender<Infallible>) -> Result<Started> {
        let Fields {
            recipe,
            routes,
            slot,
            contents,
            staging,
        } = &mut self.fields;
        let layouts = Layouts {
            slot,
            contents,
            staging,
        };
        let stage = routes.open(recipe, layouts, &self.reserved.plan, &self.meters)?;
        let idle_meter = stage.as_ref().map(DeviceStage::idle);
        let (exchange, Ends { ready, maps }) =
            self.exchange(stage.as_ref().map(DeviceStage::to_device));
        let closing = CloseOnError(Some(exchange.clone()));
        // Slots hold their exchange, so they are announced only when the threads exist.
        let spec = self.fields.recipe.spec.clone();
        let term = |term| self.reserved.plan.term(term);
        let count = term(MemoryTerm::SLOTS).count;
        let chunks = term(MemoryTerm::CHUNKS).count;
        let slots = Pool::new(
            spec,
            self.fields.slot.clone(),
            count,
            Box::new(exchange.clone()),
        )?;
        let (side, idle) = self.io_side(&exchange, slots.regions())?;
        let pending = self.reserved.pending;
        let row_bytes = self.fields.slot.bytes() / self.fields.slot.rows();
        let cached = term(MemoryTerm::CACHED).each;
        let (cached_bytes, chunk_bytes) = if chunks > 0 { (0, cached) } else { (cached, 0) };
        let waiting = exchange::Capacity {
            slots: count,
            samples: pending,
            chunks,
            row_bytes,
        };
        let substitutes = self.on_bad != OnBadSample::Fail;
        let to_workers = ToWorkers::new(
            exchange.drains.clone(),
            maps,
            substitutes,
            &waiting,
            self.meters.clone(),
        );
        let (pool, mut handles) = workers;
        let watch = Arc::new(Watch::new(handles.len(), pending + chunks));
        let room = self.reserved.room;
        let (core, reader) = self.core(exchange, to_workers, watch, idle);
        handles.keep(Workers::start(
            core.clone(),
            pool,
            room,
            cached_bytes,
            chunk_bytes,
        )?);
        let io = Planner::new(core.clone(), reader, side, pending);
        let runtime = DeviceStage::start(stage, core, io, handles, slots, pinning)?;
        closing.defuse();
        Ok(Started {
            runtime,
            ready,
            idle: idle_meter,
        })
    }

    /// The exchange of slots. Every channel has room for all slots, so returning a slot never
    /// blocks.
    fn exchange(&mut self, to_device: Option<ToDevice>) -> (Arc<Exchange>, Ends) {
        let plan = &self.reserved.plan;
        let slots = plan.term(MemoryTerm::SLOTS).count;
        let batches = plan.term(MemoryTerm::DEVICE).count;
        let (frees, frees_out) = bounded(slots);
        let (ready_in, ready) = bounded(slots.saturating_add(batches));
        let late = !self.fields.recipe.map_batches.is_empty();
        let (to_map, maps) = late.then(|| bounded(slots)).unzip();
        let exchange = Exchange {
            generation: Arc::default(),
            ready: ready_in,
            ready_out: ready.clone(),
            frees,
            frees_out,
            closed: Default::default(),
            waker: self.opened.reader.waker(),
            meters: self.meters.clone(),
            to_device,
            to_map,
            drains: Arc::new(Drains::new(self.reserved.workers)),
            lease: self.reserved.lease.take(),
        };
        (Arc::new(exchange), Ends { ready, maps })
    }

    /// The I/O thread's own state: the ring of encoded bytes, chunks, and the regions that the
    /// reader may register with the kernel. Also returns the sender by which sample entries come
    /// back.
    fn io_side(
        &self,
        exchange: &Exchange,
        slots: &[Arc<Region>],
    ) -> Result<(IoSide, Sender<Box<Sample>>)> {
        let plan = &self.reserved.plan;
        let waker = &exchange.waker;
        let MemoryTerm { count, at_once, .. } = plan.term(MemoryTerm::CHUNKS);
        let parts = self.fields.recipe.parts_max(&self.dataset.sizes());
        let spans = self.reserved.pending * parts + self.reserved.pieces * count + 1;
        let on_room = waker.clone();
        let ring = match plan.term(MemoryTerm::RING).bytes() {
            0 => None,
            bytes => Some(ByteRing::new(bytes, spans, move || on_room.wake())?),
        };
        let buffers = (0..count)
            .map(|_| ChunkBuf::new(at_once))
            .collect::<Result<Vec<_>>>()?;
        let chunks = (!buffers.is_empty())
            .then(|| (Arc::new(chunks::Home::new(buffers, waker.clone())), count));
        let regions = slots
            .iter()
            .chain(ring.as_ref().map(|ring| ring.region()))
            .cloned()
            .collect();
        let (idle_in, idle) = bounded(self.reserved.pending);
        Ok((
            IoSide {
                frees: exchange.frees_out.clone(),
                idle,
                ring,
                chunks,
                regions,
            },
            idle_in,
        ))
    }

    /// The state that all threads share, and the I/O thread's reader.
    fn core(
        self,
        exchange: Arc<Exchange>,
        to_workers: ToWorkers,
        watch: Arc<Watch>,
        idle: Sender<Box<Sample>>,
    ) -> (Arc<Core>, Box<dyn Reader>) {
        let Self {
            dataset,
            chunk_starts,
            seed,
            meters,
            fields,
            opened,
            reserved,
            ..
        } = self;
        let core = Core {
            samples: Samples {
                sources: dataset.sources().clone(),
                promised: dataset.sizes(),
                dataset,
                chunk_starts,
                recipe: fields.recipe,
                seed,
                scratch_limit: reserved.plan.term(MemoryTerm::SCRATCH).each,
                watch: watch.clone(),
            },
            cache: opened.cache,
            announcer: opened.announcer,
            again: opened.again,
            to_workers,
            to_io: ToIo {
                starts: Queue::with_room(4),
                shutdown: AtomicBool::new(false),
                misses: Queue::with_room(256),
                chunk_misses: Queue::with_room(reserved.plan.term(MemoryTerm::CHUNKS).count),
                idle,
                waker: exchange.waker.clone(),
            },
            exchange,
            fatal: Mutex::new(None),
            meters,
            watch,
            unregistered: OnceLock::new(),
            #[cfg(test)]
            dozing: Default::default(),
        };
        (Arc::new(core), opened.reader)
    }
}

/// Frees the slots that are already in the exchange when `build` fails half-way; otherwise they
/// would leak.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::placement::Numa;
    use crate::pipeline::placement::tests::{Sysfs, here, own_cpus};
    use feedline_core::decode::Ctx;
    use feedline_core::memory::Row;
    use feedline_core::memory::plan::ShownBytes;
    use feedline_core::storage::Mode;
    use feedline_formats::Records;
    use feedline_store::Cache;
    use std::sync::atomic::Ordering::Relaxed;

    fn builder(sysfs: &Sysfs) -> LoaderBuilder {
        let mut builder = LoaderBuilder::new(Arc::new(
            Records::builder(1).open_bytes(vec![7; 64]).unwrap(),
        ));
        builder.machine.sysfs = sysfs.root().into();
        builder.tuning(|t| t.reader(Mode::Pread).depth(3))
    }

    /// Names of the threads of this process with exactly these allowed CPUs.
    fn threads_on(cpus: &str) -> Vec<String> {
        let mut names = Vec::new();
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let value = |key: &str| {
                status
                    .lines()
                    .find_map(|line| line.strip_prefix(key))
                    .unwrap_or("")
                    .trim()
                    .to_string()
            };
            if value("Cpus_allowed_list:") == cpus {
                names.push(value("Name:"));
            }
        }
        names
    }

    /// A name with fewer threads than expected.
    fn missing<'n>(names: &[&'n str], threads: &[String]) -> Option<&'n str> {
        names.iter().copied().find(|name| {
            let wanted = names.iter().filter(|other| *other == name).count();
            threads.iter().filter(|other| other == name).count() < wanted
        })
    }

    #[test]
    fn all_threads_run_on_the_node_and_the_report_names_it() {
        let (cpu, all) = own_cpus();
        let sysfs = Sysfs::around(&cpu);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let map = {
            let seen = seen.clone();
            move |_: &mut Row<'_>, _: &mut Ctx<'_>| {
                seen.lock().unwrap().push(here());
                Ok(())
            }
        };
        let loader = builder(&sysfs)
            .tuning(|t| t.numa(Numa::Node(0)))
            .workers(3)
            .map(map)
            .build()
            .unwrap();
        // The kernel truncates names to 15 bytes, and a new thread has its parent's name until it
        // runs.
        let mut names = [
            "feedline-dec-0",
            "feedline-dec-1",
            "feedline-dec-2",
            "feedline-io",
        ]
        .to_vec();
        names.extend(["feedline-pread-"; 3]);
        let started = std::time::Instant::now();
        while let Some(missing) = missing(&names, &threads_on(&cpu)) {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "{missing} is not among {:?}",
                threads_on(&cpu)
            );
            std::thread::yield_now();
        }
        assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
        let seen = seen.lock().unwrap();
        assert!(
            seen.len() == 64 && seen.iter().all(|cpus| *cpus == cpu),
            "{seen:?}"
        );
        let line = format!("numa      threads and memory on NUMA node 0 (1 CPUs: {cpu})\n");
        assert!(
            loader.report().to_string().contains(&line),
            "{}",
            loader.report()
        );
        assert_eq!(here(), all, "the caller stays where it was");
    }

    #[test]
    fn unregistered_memory_is_a_reason_also_beside_a_cache() {
        let dir =
            std::env::temp_dir().join(format!("feedline-unregistered-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("a"), [7; 64]).unwrap();
        let records = Arc::new(Records::builder(1).open(dir.join("a")).unwrap());
        let why = |cache: Option<Cache>| {
            let mut builder = LoaderBuilder::new(records.clone()).tuning(|t| t.reader(Mode::Uring));
            builder.reader.unregistered = true;
            builder.cache = cache;
            // Refused if io_uring is not available here.
            let loader = builder.build().ok()?;
            assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
            Some(loader.report().choice.to_string())
        };
        for cache in [
            None,
            Some(Cache::at(dir.join("cache")).mount(dir.canonicalize().unwrap())),
        ] {
            let why = why(cache);
            assert!(
                why.as_ref()
                    .is_none_or(|why| why.contains("registration was turned off")),
                "{why:?}"
            );
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn default_workers_match_the_cpus_of_the_node() {
        let (cpu, _) = own_cpus();
        let sysfs = Sysfs::around(&cpu);
        assert_eq!(
            builder(&sysfs)
                .tuning(|t| t.numa(Numa::Node(0)))
                .build()
                .unwrap()
                .plan()
                .term(MemoryTerm::SCRATCH)
                .count,
            1
        );
        let cores = std::thread::available_parallelism().unwrap().get();
        for numa in [Numa::Auto, Numa::Off] {
            let loader = builder(&sysfs).tuning(|t| t.numa(numa)).build().unwrap();
            let workers = loader.plan().term(MemoryTerm::SCRATCH).count;
            assert_eq!(
                (workers, loader.report().numa),
                (cores, None),
                "{numa:?} on the host"
            );
        }
    }

    #[test]
    fn build_refuses_more_than_the_free_memory() {
        /// With ids and status, a slot of one record has 1 MiB.
        const DATA: usize = (1 << 20) - 4096;
        static FREE: AtomicUsize = AtomicUsize::new(usize::MAX);
        let free = |free: usize, slots: Option<usize>| {
            FREE.store(free, Relaxed);
            let records = Records::builder(DATA).open_bytes(vec![7; DATA]).unwrap();
            let mut builder = LoaderBuilder::new(Arc::new(records))
                .batch_size(1)
                .workers(1);
            builder.memory.slots = slots;
            builder.machine.free = || Some(FREE.load(Relaxed) as u64);
            builder.build()
        };
        // The data is already in memory; everything else counts. Slots: as many as there is room
        // for, or as were set.
        let [all, nine, two] =
            [None, Some(9), Some(2)].map(|slots| free(usize::MAX, slots).unwrap().plan().needs());
        assert!(two > 2 << 20 && nine > two + (7 << 20) && all > nine);
        for (bytes, slots) in [(usize::MAX, 16), (all, 16), (all - 1, 15), (two, 2)] {
            let loader = free(bytes, None).unwrap();
            let term = |term| loader.plan().term(term);
            assert_eq!(
                (
                    term(MemoryTerm::SLOTS).count,
                    term(MemoryTerm::DATA).bytes()
                ),
                (slots, DATA)
            );
            let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
            assert_eq!(batch.len(), 1);
        }
        for (bytes, slots, need) in [(two - 1, None, two), (nine - 1, Some(9), nine)] {
            let error = free(bytes, slots).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Budget);
            let need = ShownBytes(need);
            let words = format!(
                "are free, limits of the container included, but at least {need} are needed"
            );
            assert!(error.to_string().contains(&words), "{error}");
        }
    }

    #[test]
    fn build_refuses_an_unusable_node() {
        let sysfs = Sysfs::new(&[("devices/system/node/node0/cpulist", "1022")]);
        for (node, words) in [
            (0, "NUMA node 0 has 1022"),
            (9, "node9/cpulist cannot be read"),
        ] {
            let error = builder(&sysfs)
                .tuning(|t| t.numa(Numa::Node(node)))
                .build()
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
