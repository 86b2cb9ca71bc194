//! What `build` decides and opens behind full slots: the ways of the fields, the device's memory and streams, the transfer
//! thread. On the host there is nothing behind them.

use crate::batch::BatchInfo;
use crate::dataset::{Dataset, Part, Parts};
use crate::device::Device;
use crate::device::cuda::{
    self, Stream,
    copy::{Copier, Shape, Target},
    cufile::{CuFile, Mode, Options, Stats},
    driver::{DeviceMemory, Gpu},
    idle::IdleMeter,
};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::memory::{Filled, Pool};
use crate::meter::{Clock, DirectReads, GpuIdle, Track};
use crate::pipeline::planner::Planner;
use crate::pipeline::recipe::{DirectField, Draft, How, Recipe};
use crate::pipeline::route::{self, Around, Asked, Route};
use crate::pipeline::runtime::{Handles, Runtime};
use crate::pipeline::{Core, FieldRoute, Gds, ToDevice};
use crate::pipeline::{direct, transfer::Transfer};
use crate::storage::{self, Sources};
use crate::tensor::{Layout, PAGE};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::convert::Infallible;
use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The first cuFile that makes a context on every visible GPU.
const CONTEXTS: (u32, u32) = (1, 16);

/// Bytes that are read to see which way cuFile takes.
const TRIAL: usize = 1 << 20;

/// Which way each field takes, and what it needs for that.
pub(super) struct Ways {
    device: Device,
    gds: Gds,
    cufile_at: Option<(PathBuf, PathBuf)>,
    sources: Arc<Sources>,
    around: Around,
    /// By field of the dataset: rows of a file as they stand, and where the first one is.
    firsts: Vec<Option<storage::Extent>>,
    routes: Vec<FieldRoute>,
    cufile: Option<Counted>,
    /// Memory of the batches, which cuFile has taken.
    targets: Vec<Target>,
}

/// A cuFile driver, and what it had counted before the loader.
#[derive(Clone)]
pub(super) struct Counted {
    cufile: Arc<CuFile>,
    before: Option<Stats>,
    gpu: usize,
}

impl Counted {
    fn new(cufile: Arc<CuFile>, gpu: usize) -> Self {
        let before = cufile.stats(gpu);
        Self { cufile, before, gpu }
    }

    /// What the reads since were.
    fn mode(&self) -> Mode {
        match (&self.before, self.cufile.stats(self.gpu)) {
            (Some(before), Some(now)) => Mode::between(before, &now),
            _ => Mode::Unknown,
        }
    }
}

/// Measures how long the consumer's stream is idle.
pub(super) type Idle = Arc<IdleMeter>;

/// The meter of a GPU's idle time, if there is a GPU; for so many slots and batches on the device together.
pub(super) fn idle_meter(device: &Device, clock: &Clock, batches: usize) -> Result<Option<Idle>> {
    device.gpu().map(|gpu| IdleMeter::new(gpu, clock.clone(), batches).map(Arc::new)).transpose()
}

/// What the consumer's stream did last.
pub(super) fn track(idle: &Option<Idle>) -> Option<Track> {
    idle.as_ref().map(|idle| idle.track())
}

/// `next()` was entered, for the first batch of an iterator or another one.
pub(super) fn asked(idle: &Option<Idle>, first: bool) {
    idle.iter().for_each(|idle| idle.asked(first));
}

/// Refuses to hand out a batch while a stream that it would be bound to is captured.
pub(super) fn check_streams(info: &BatchInfo) -> Result<()> {
    let Some(gpu) = info.device.gpu() else { return Ok(()) };
    // What else is wrong is told in its place.
    let captured =
        |stream: &Stream| gpu.check_uncaptured(stream.raw()).err().filter(|error| error.kind() == ErrorKind::Config);
    info.streams.iter().find_map(captured).map_or(Ok(()), Err)
}

/// What was measured on the consumer's stream.
pub(super) fn gpu_idle(idle: &Option<Idle>) -> Option<GpuIdle> {
    idle.as_ref().map(|idle| idle.totals())
}

/// What the report asks for.
pub(super) type Direct = Option<Counted>;
/// What went directly, in words.
pub(super) fn direct_reads(direct: &Direct, meters: &crate::meter::Meters) -> Option<DirectReads> {
    direct.as_ref().map(|counted| meters.device.direct(counted.mode().to_string()))
}

impl Ways {
    pub(super) fn new(
        device: &Device,
        gds: Gds,
        cufile_at: Option<(PathBuf, PathBuf)>,
        dataset: &dyn Dataset,
        cached: bool,
        substitutes: bool,
    ) -> Self {
        let sources = dataset.sources().clone();
        let files = sources.count();
        let around = Around {
            on_device: device.kind() != crate::device::DeviceKind::Host,
            transforms: false,
            in_chunks: dataset.chunked().is_some(),
            cached,
            substitutes,
            too_many: (files as u64 > storage::descriptor_limit() / 4).then_some(files),
        };
        let firsts = if around.on_device && !around.in_chunks { firsts(dataset) } else { Vec::new() };
        Self {
            device: device.clone(),
            gds,
            cufile_at,
            sources,
            around,
            firsts,
            routes: Vec::new(),
            cufile: None,
            targets: Vec::new(),
        }
    }

    /// The fields that go directly.
    pub(super) fn choose(&mut self, draft: &Draft<'_>) -> Result<Vec<DirectField>> {
        let first = |handler: usize| self.firsts.get(handler).copied().flatten();
        let row_bytes = |how: &How| if let How::InPlace(bytes) = how { Some(*bytes) } else { None };
        let asked: Vec<_> = (draft.handlers.iter().enumerate())
            .map(|(index, handler)| Asked {
                name: &handler.name,
                row_bytes: row_bytes(&handler.how),
                wanted: draft.wanted[index],
                plain: first(index).is_some_and(|extent| row_bytes(&handler.how) == Some(extent.len as usize)),
            })
            .collect();
        let around = Around { transforms: draft.transforms, ..self.around.clone() };
        let trial = self.firsts.iter().flatten().next().copied();
        let mut opened = None;
        let routes = route::choose(self.gds, &asked, &around, || {
            let (counted, how) = self.try_cufile(trial)?;
            opened = Some(counted);
            Ok(how)
        })?;
        let is_direct = |index: &usize| routes[*index].route == Route::Direct;
        let fields = (0..routes.len()).filter(is_direct).map(|handler| DirectField {
            handler,
            unaligned: first(handler).is_none_or(|extent| (extent.offset | extent.len) % PAGE as u64 != 0),
        });
        let fields: Vec<_> = fields.collect();
        self.cufile = opened.filter(|_| !fields.is_empty());
        self.routes = if around.on_device { routes } else { Vec::new() };
        Ok(fields)
    }

    /// What the report says of the ways.
    pub(super) fn told(&self) -> (Vec<FieldRoute>, Direct) {
        (self.routes.clone(), self.cufile.clone())
    }
}

/// Where the first row of each field lies, if that is in a file as it stands.
fn firsts(dataset: &dyn Dataset) -> Vec<Option<storage::Extent>> {
    let mut parts = Parts::new();
    let mut firsts = vec![None; dataset.schema().len()];
    // What is wrong with the first sample, a panic included, is said when it is read.
    if catch_unwind(AssertUnwindSafe(|| dataset.extents(0, &mut parts))).is_ok_and(|given| given.is_ok()) {
        for (field, part) in parts.iter() {
            if let (Part::Extent(extent), Some(first)) = (part, firsts.get_mut(field))
                && extent.source.index() < dataset.sources().count()
                && dataset.sources().bytes_of(extent.source).is_none()
            {
                *first = Some(extent);
            }
        }
    }
    firsts
}

impl Ways {
    /// Opens cuFile and reads a little by it, to see which way the bytes take; or says why it is not to be used.
    fn try_cufile(&self, trial: Option<storage::Extent>) -> Result<(Counted, String), String> {
        let (Some(gpu), Some(extent)) = (self.device.gpu(), trial) else { return Err("no file to read".into()) };
        let root = self.cufile_at.as_ref().map_or(Path::new("/"), |(_, root)| root);
        if self.gds == Gds::Auto {
            CuFile::check_direct(root).map_err(|absent| absent.to_string())?;
        }
        let cufile = match &self.cufile_at {
            None => CuFile::get().map_err(|absent| absent.to_string())?,
            Some((library, root)) => {
                let options = Options { library: Some(library.clone()), root: root.clone(), ..Options::default() };
                CuFile::open_with(&options).map_err(|absent| absent.to_string())?
            }
        };
        let counted = Counted::new(cufile, gpu.ordinal());
        self.read_a_little(gpu, &counted.cufile, extent)?;
        let how = match counted.mode() {
            mode @ (Mode::P2p | Mode::NvidiaFs) => {
                format!("{}: {mode}{}", called(&counted.cufile), elsewhere(&counted.cufile))
            }
            Mode::Unknown if self.gds == Gds::Require => {
                format!("{}, which does not count which way bytes take", called(&counted.cufile))
            }
            Mode::Unknown => return Err("cuFile does not count which way bytes take".into()),
            mode => return Err(format!("cuFile would take these bytes through host memory ({mode})")),
        };
        // The report counts from here.
        Ok((Counted::new(counted.cufile, gpu.ordinal()), how))
    }

    fn read_a_little(&self, gpu: &Arc<Gpu>, cufile: &Arc<CuFile>, extent: storage::Extent) -> Result<(), String> {
        let files = storage::Files::new(self.sources.clone(), PAGE, Some(0));
        let handle = direct::register(cufile, &files, extent.source)?;
        let mut target = Target::new(gpu, TRIAL, "a trial of cuFile", Some(cufile)).map_err(words)?;
        let bound = gpu.bind().map_err(words)?;
        let from = extent.offset - extent.offset % PAGE as u64;
        let read = direct::read_into(cufile, &handle, target.memory(), TRIAL, from);
        drop(bound);
        target.release().map_err(words)?;
        let (read, least) =
            (read.map_err(|failure| failure.to_string())?, extent.offset.saturating_add(extent.len) - from);
        if (read as u64) < least.min(TRIAL as u64) {
            return Err(format!("cuFileRead brought {read} of {least} bytes"));
        }
        Ok(())
    }

    /// Has cuFile take the memory of `count` batches of `bytes` bytes, which may be more than it can map for a GPU. False when
    /// it does not and need not: then every field takes the host's way.
    pub(super) fn reserve(&mut self, bytes: usize, count: usize) -> Result<bool> {
        let (Some(gpu), Some(counted)) = (self.device.gpu(), &self.cufile) else { return Ok(true) };
        for _ in 0..count {
            let memory = DeviceMemory::new(gpu, bytes, "a batch")?;
            match Target::of(memory, Some(&counted.cufile)) {
                Ok(target) => self.targets.push(target),
                Err(error) if self.gds == Gds::Auto => {
                    let why = format!("cuFile does not take {count} batches of {bytes} bytes: {}", words(error));
                    for route in self.routes.iter_mut().filter(|route| route.route == Route::Direct) {
                        (route.route, route.why) = (Route::Staged, why.clone());
                    }
                    self.targets.clear();
                    self.cufile = None;
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reserves the device's memory, and says what of a slot gets there.
    pub(super) fn open(
        &mut self,
        recipe: &Recipe,
        slot: Layout,
        contents: Layout,
        (batches, slots): (usize, usize),
        idle: Option<Idle>,
    ) -> Result<Option<Onward>> {
        let (Some(gpu), Some(idle)) = (self.device.gpu(), idle) else { return Ok(None) };
        let (full, bell) = (bounded(slots), bounded(1));
        let finishes: Vec<_> = recipe.finishes.iter().map(|finishing| finishing.step.clone()).collect();
        let (directs, cufile) = (recipe.directs.clone(), self.cufile.as_ref().map(|counted| counted.cufile.clone()));
        let made_of = finishes.iter().flat_map(|step| [Some(step.input), step.flips]).flatten();
        let offsets = directs.iter().filter_map(|step| step.gather.map(|gather| gather.offsets));
        let mut copied: Vec<_> = recipe.keep.iter().map(|kept| kept.index).chain(made_of).chain(offsets).collect();
        copied.retain(|field| *field < recipe.spec.fields().len() && directs.iter().all(|step| step.field != *field));
        copied.sort_unstable();
        copied.dedup();
        let plan = cufile.clone().map(|cufile| direct::Plan {
            cufile,
            steps: directs.clone(),
            contents: contents.clone(),
            gds: self.gds,
        });
        let targets = std::mem::take(&mut self.targets);
        let shape = Shape { slot, contents, copied, directs, targets, finishes };
        let copier = Copier::new(gpu, shape, (batches, slots), bell.0.clone(), idle)?;
        Ok(Some(Onward { copier, plan, full, bell }))
    }
}

/// What an error says, with its cause.
fn words(error: Error) -> String {
    match error.source() {
        Some(source) => format!("{}: {source}", error.message()),
        None => error.message().into(),
    }
}

/// The library with its version.
fn called(cufile: &CuFile) -> String {
    cufile.version().map_or_else(|| "cuFile".into(), |(major, minor)| format!("cuFile {major}.{minor}"))
}

/// What the library costs on other GPUs, if it does.
fn elsewhere(cufile: &CuFile) -> String {
    let gpus = cuda::devices().map_or(1, |(_, devices)| devices.len());
    match cufile.version() {
        Some(version) if version >= CONTEXTS && gpus > 1 => {
            format!("; it has a context on each of the {gpus} visible GPUs: set CUDA_VISIBLE_DEVICES for each rank")
        }
        _ => String::new(),
    }
}

/// The device's memory and streams, before the threads are.
pub(super) struct Onward {
    copier: Copier,
    plan: Option<direct::Plan>,
    full: (Sender<Filled>, Receiver<Filled>),
    bell: (Sender<()>, Receiver<()>),
}

impl Onward {
    pub(super) fn to_device(&self) -> ToDevice {
        ToDevice { full: self.full.0.clone(), full_out: self.full.1.clone(), bell: self.bell.0.clone() }
    }

    /// Starts the threads and lets the slots go round.
    pub(super) fn start(
        onward: Option<Self>,
        core: Arc<Core>,
        io: Planner,
        workers: Handles,
        (pool, pinning): (Pool, Sender<Infallible>),
    ) -> Result<Runtime> {
        let Some(onward) = onward else {
            pool.announce(|_| {});
            drop(pinning);
            return Runtime::start(core, io, workers);
        };
        // After an error nothing is left here by which the workers that are then joined could be reached.
        let mut runtime = Runtime::start(core, io, workers)?;
        onward.spawn(runtime.core().clone(), (pool, pinning), &mut runtime)?;
        Ok(runtime)
    }

    fn spawn(self, core: Arc<Core>, (pool, pinning): (Pool, Sender<Infallible>), runtime: &mut Runtime) -> Result<()> {
        let Self { copier, plan, full, bell } = self;
        let ready = core.exchange.ready.clone();
        let slots = pool.regions().len();
        let reads = match plan {
            Some(plan) => Some(direct::Reads::start(plan, &core, &copier, bell.0, |name, body| {
                runtime.spawn(name, Stage::Read, body)
            })?),
            None => None,
        };
        let transfer = Transfer { core, copier, reads, full: full.1, bell: bell.1, ready, slots };
        runtime.spawn("feedline-copy".into(), Stage::Device, move || transfer.run(pool, pinning))
    }
}
