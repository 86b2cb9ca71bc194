//! The device stage of a loader: routes of the fields, device memory and streams, the transfer
//! thread.
//!
//! A loader with batches on the host has no device stage.

use super::settings::DeviceSettings;
use crate::pipeline::planner::Planner;
use crate::pipeline::recipe::{DirectField, Draft, How, Recipe};
use crate::pipeline::route::{FieldCandidate, RouteContext};
use crate::pipeline::runtime::{Handles, Runtime};
use crate::pipeline::transfer::Transfer;
use crate::pipeline::{Core, FieldRoute, Gds, Route, ToDevice, direct, route};
use crossbeam_channel::{Receiver, Sender, bounded};
use feedline_base::PAGE;
use feedline_base::error::{Result, Stage, caught};
use feedline_core::dataset::{Dataset, FieldPart, Part, Parts};
use feedline_core::memory::{Filled, MemoryPlan, MemoryTerm, Pool};
use feedline_core::storage::{Extent, Sources};
use feedline_core::tensor::Layout;
use feedline_device::backend::{Backend, DirectTrial, Setup, Unreserved};
use feedline_device::{Copier, DeviceKind, DirectReader, IdleMeter, Lane};
use feedline_reader::Files;
use feedline_report::meter::{Meters, PipelineStage};
use std::convert::Infallible;
use std::error::Error as _;
use std::sync::Arc;

/// The route of each field to the device, with its resources.
pub(super) struct Routes {
    settings: DeviceSettings,
    lane: Option<Lane>,
    sources: Arc<Sources>,
    context: RouteContext,
    /// For each field of the dataset, the extent of its first row, if rows are unchanged bytes of a
    /// file.
    firsts: Vec<Option<Extent>>,
    routes: Vec<FieldRoute>,
}

impl Routes {
    /// `cached`: the page cache has room for the dataset. `substitutes`: bad samples are
    /// substituted.
    pub(super) fn new(
        settings: &DeviceSettings,
        dataset: &dyn Dataset,
        cached: bool,
        substitutes: bool,
    ) -> Self {
        let sources = dataset.sources().clone();
        let files = sources.count();
        let context = RouteContext {
            on_device: settings.device.kind() != DeviceKind::Host,
            transforms: false,
            in_chunks: dataset.chunked().is_some(),
            cached,
            substitutes,
            too_many: (files as u64 > feedline_core::storage::descriptor_limit() / 4)
                .then_some(files),
        };
        let firsts = if context.on_device && !context.in_chunks {
            firsts(dataset)
        } else {
            Vec::new()
        };
        let lane = settings.device.backend().clone().lane();
        Self {
            settings: settings.clone(),
            lane,
            sources,
            context,
            firsts,
            routes: Vec::new(),
        }
    }

    /// Chooses the fields that take the direct route.
    pub(super) fn choose(&mut self, draft: &Draft<'_>) -> Result<Vec<DirectField>> {
        let first = |handler: usize| self.firsts.get(handler).copied().flatten();
        let row_bytes = |how: &How| {
            if let How::InPlace(bytes) = how {
                Some(*bytes)
            } else {
                None
            }
        };
        let candidates: Vec<_> = (draft.handlers.iter().enumerate())
            .map(|(index, handler)| FieldCandidate {
                name: &handler.name,
                row_bytes: row_bytes(&handler.how),
                wanted: draft.wanted[index],
                plain: first(index)
                    .is_some_and(|extent| row_bytes(&handler.how) == Some(extent.len as usize)),
            })
            .collect();
        let context = RouteContext {
            transforms: draft.transforms,
            ..self.context.clone()
        };
        let trial = self
            .firsts
            .iter()
            .flatten()
            .next()
            .map(|extent| self.trial(*extent));
        let lane = &mut self.lane;
        let remote = self.sources.kinds().0;
        let routes = route::choose(self.settings.gds, &candidates, &context, || {
            match (lane, trial) {
                _ if remote => Err("cuFile reads files, not objects of a store".into()),
                (Some(lane), Some(trial)) => lane.open_direct(trial),
                _ => Err("no file to read".into()),
            }
        })?;
        let fields = (0..routes.len())
            .filter(|index| routes[*index].route == Route::Direct)
            .map(|handler| DirectField {
                handler,
                unaligned: first(handler)
                    .is_none_or(|extent| (extent.offset | extent.len) % PAGE as u64 != 0),
            });
        let fields: Vec<_> = fields.collect();
        if let (Some(lane), true) = (&mut self.lane, fields.is_empty()) {
            lane.close_direct();
        }
        self.routes = if context.on_device {
            routes
        } else {
            Vec::new()
        };
        Ok(fields)
    }

    fn trial(&self, extent: Extent) -> DirectTrial {
        let files = Files::new(self.sources.clone(), PAGE, Some(0));
        DirectTrial {
            file: Box::new(move || {
                direct::open_own(&files, extent.source).map_err(|error| error.to_string())
            }),
            offset: extent.offset,
            len: extent.len,
            required: self.settings.gds == Gds::Require,
            library: self.settings.cufile.clone(),
            any_route: self.settings.cufile_any_route,
        }
    }

    /// The routes and the direct reader, for the report.
    pub(super) fn chosen(&self) -> (Vec<FieldRoute>, Option<Arc<DirectReader>>) {
        (self.routes.clone(), self.direct())
    }

    fn direct(&self) -> Option<Arc<DirectReader>> {
        self.lane.as_ref().and_then(|lane| lane.direct())
    }

    /// Registers the memory of `count` batches of `bytes` bytes for direct reads.
    ///
    /// Returns false if cuFile refuses so much memory and direct reads are optional; all fields
    /// then take the host route.
    pub(super) fn reserve(&mut self, bytes: usize, count: usize) -> Result<bool> {
        let Some(lane) = &mut self.lane else {
            return Ok(true);
        };
        match lane.reserve(count, bytes) {
            Ok(()) => Ok(true),
            Err(Unreserved::ForDirect(error)) if self.settings.gds == Gds::Auto => {
                let cause = error
                    .source()
                    .map_or(String::new(), |source| format!(": {source}"));
                let why = format!(
                    "cuFile refused {count} batches of {bytes} bytes: {}{cause}",
                    error.message()
                );
                for route in self
                    .routes
                    .iter_mut()
                    .filter(|route| route.route == Route::Direct)
                {
                    route.route = Route::Staged;
                    route.why = why.clone();
                }
                lane.close_direct();
                Ok(false)
            }
            Err(Unreserved::ForDirect(error) | Unreserved::Failed(error)) => Err(error),
        }
    }

    /// Reserves device memory and opens the streams.
    pub(super) fn open(
        &mut self,
        recipe: &Recipe,
        layouts: Layouts<'_>,
        plan: &MemoryPlan,
        meters: &Meters,
    ) -> Result<Option<DeviceStage>> {
        let direct = self.direct().map(|reader| direct::DirectPlan {
            backend: self.settings.device.backend().clone(),
            reader,
            steps: recipe.directs.clone(),
            contents: layouts.contents.clone(),
            gds: self.settings.gds,
        });
        let Some(lane) = self.lane.take() else {
            return Ok(None);
        };
        let slots = plan.term(MemoryTerm::SLOTS).count;
        let batches = plan.term(MemoryTerm::DEVICE).count;
        let full = bounded(slots);
        let bell = bounded(1);
        let (copied, ops) = recipe.device_ops();
        let setup = Setup {
            slot: layouts.slot.clone(),
            contents: layouts.contents.clone(),
            copied,
            ops,
            staged: recipe.staged(),
            staging: layouts.staging.clone(),
            areas: plan.term(MemoryTerm::STAGING).count,
            batches,
            slots,
            bell: bell.0.clone(),
            clock: meters.clock.clone(),
            measured: meters.on,
        };
        let (copier, idle) = lane.open(setup)?;
        let backend = self.settings.device.backend().clone();
        Ok(Some(DeviceStage {
            backend,
            copier,
            idle,
            direct,
            full,
            bell,
        }))
    }
}

/// Layouts of the arrays in a slot on the host, in a batch on the device, and in a staging area.
pub(super) struct Layouts<'a> {
    pub(super) slot: &'a Layout,
    pub(super) contents: &'a Layout,
    pub(super) staging: &'a Layout,
}

/// Extents of each field's first row, for rows that are unchanged bytes of a file.
fn firsts(dataset: &dyn Dataset) -> Vec<Option<Extent>> {
    let mut parts = Parts::new();
    let mut firsts = vec![None; dataset.schema().len()];
    if dataset.sizes().appended_max > 0 {
        return firsts;
    }
    // An error or panic of the first sample is reported when the sample is read.
    if caught(Stage::Build, || dataset.extents(0, &mut parts)).is_ok() {
        for FieldPart { field, part, .. } in parts.iter() {
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

/// Device memory and streams, before the threads start.
pub(super) struct DeviceStage {
    backend: Arc<dyn Backend>,
    copier: Copier,
    idle: Arc<IdleMeter>,
    direct: Option<direct::DirectPlan>,
    full: (Sender<Filled>, Receiver<Filled>),
    bell: (Sender<()>, Receiver<()>),
}

impl DeviceStage {
    pub(super) fn to_device(&self) -> ToDevice {
        ToDevice {
            full: self.full.0.clone(),
            full_out: self.full.1.clone(),
            bell: self.bell.0.clone(),
        }
    }

    /// The idle meter of the consumer's stream.
    pub(super) fn idle(&self) -> Arc<IdleMeter> {
        self.idle.clone()
    }

    /// Starts the threads and puts the slots into use.
    pub(super) fn start(
        stage: Option<Self>,
        core: Arc<Core>,
        io: Planner,
        workers: Handles,
        pool: Pool,
        pinning: Sender<Infallible>,
    ) -> Result<Runtime> {
        let Some(stage) = stage else {
            pool.announce();
            drop(pinning);
            return Runtime::start(core, io, workers);
        };
        // After an error, nothing here may keep a reference to the workers, because they are then
        // joined.
        let mut runtime = Runtime::start(core, io, workers)?;
        stage.spawn(runtime.core().clone(), pool, pinning, &mut runtime)?;
        Ok(runtime)
    }

    fn spawn(
        self,
        core: Arc<Core>,
        pool: Pool,
        pinning: Sender<Infallible>,
        runtime: &mut Runtime,
    ) -> Result<()> {
        let Self {
            backend,
            copier,
            direct,
            full,
            bell,
            ..
        } = self;
        let ready = core.exchange.ready.clone();
        let slots = pool.regions().len();
        let mut spawn = |name, body: Box<dyn FnOnce() + Send>| {
            runtime.spawn(name, PipelineStage::Storage, body)
        };
        let reads = direct
            .map(|plan| direct::DirectReads::start(plan, &core, bell.0, &mut spawn))
            .transpose()?;
        let transfer = Transfer {
            core,
            copier,
            reads,
            full: full.1,
            bell: bell.1,
            ready,
            slots,
            pageable: false,
        };
        runtime.spawn("feedline-copy".into(), PipelineStage::Copy, move || {
            transfer.run(&*backend, pool, pinning)
        })
    }
}
