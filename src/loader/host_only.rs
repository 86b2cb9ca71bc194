//! What stands behind full slots in a build without devices: nothing. The same face as `onward.rs`.

use crate::batch::BatchInfo;
use crate::dataset::Dataset;
use crate::device::Device;
use crate::error::Result;
use crate::memory::Pool;
use crate::meter::{Clock, DirectReads, GpuIdle, Meters, Track};
use crate::pipeline::planner::Planner;
use crate::pipeline::recipe::{DirectField, Draft, Recipe};
use crate::pipeline::route::{self, Around, Asked};
use crate::pipeline::runtime::{Handles, Runtime};
use crate::pipeline::{Core, FieldRoute, Gds, ToDevice};
use crate::tensor::Layout;
use crossbeam_channel::Sender;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;

/// What the report asks for: nothing goes directly.
pub(super) type Direct = ();

pub(super) fn direct_reads(_: &Direct, _: &Meters) -> Option<DirectReads> {
    None
}

/// Measures how long the consumer's stream is idle: there is none.
#[derive(Clone)]
pub(super) struct Idle(#[allow(dead_code, reason = "nobody has one")] Arc<Infallible>);

pub(super) fn idle_meter(_: &Device, _: &Clock, _: usize) -> Result<Option<Idle>> {
    Ok(None)
}

pub(super) fn asked(_: &Option<Idle>, _: bool) {}

pub(super) fn check_streams(_: &BatchInfo) -> Result<()> {
    Ok(())
}

pub(super) fn gpu_idle(_: &Option<Idle>) -> Option<GpuIdle> {
    None
}

pub(super) fn track(_: &Option<Idle>) -> Option<Track> {
    None
}

/// Every field stays on the host.
pub(super) struct Ways(Gds);

impl Ways {
    pub(super) fn new(_: &Device, gds: Gds, _: Option<(PathBuf, PathBuf)>, _: &dyn Dataset, _: bool, _: bool) -> Self {
        Self(gds)
    }

    /// Nothing is reserved.
    pub(super) fn reserve(&mut self, _: usize, _: usize) -> Result<bool> {
        Ok(true)
    }

    /// Errors: when direct reads are required.
    pub(super) fn choose(&mut self, draft: &Draft<'_>) -> Result<Vec<DirectField>> {
        let asked = |index: usize| {
            let (name, wanted) = (draft.handlers[index].name.as_str(), draft.wanted[index]);
            Asked { name, row_bytes: None, wanted, plain: false }
        };
        let asked: Vec<_> = (0..draft.handlers.len()).map(asked).collect();
        let around = Around {
            on_device: false,
            transforms: draft.transforms,
            in_chunks: false,
            cached: false,
            substitutes: false,
            too_many: None,
        };
        route::choose(self.0, &asked, &around, || Err("built without the feature `cuda`".into())).map(|_| Vec::new())
    }

    pub(super) fn told(&self) -> (Vec<FieldRoute>, Direct) {
        (Vec::new(), ())
    }

    pub(super) fn open(
        &mut self,
        _: &Recipe,
        _: Layout,
        _: Layout,
        _: (usize, usize),
        _: Option<Idle>,
    ) -> Result<Option<Onward>> {
        Ok(None)
    }
}

/// There is none.
pub(super) struct Onward(Infallible);

impl Onward {
    pub(super) fn to_device(&self) -> ToDevice {
        match self.0 {}
    }

    /// Starts the threads and lets the slots go round.
    pub(super) fn start(
        _: Option<Self>,
        core: Arc<Core>,
        io: Planner,
        workers: Handles,
        (pool, pinning): (Pool, Sender<Infallible>),
    ) -> Result<Runtime> {
        pool.announce(|_| {});
        drop(pinning);
        Runtime::start(core, io, workers)
    }
}
