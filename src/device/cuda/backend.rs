//! CUDA as a backend: a GPU, and a loader's lane on it.

use super::buffer::Target;
use super::copy::Copier;
use super::direct::Direct;
use super::driver::{DeviceMemory, Gpu, LEGACY, PER_THREAD};
use super::idle::IdleMeter;
use crate::device::{self, Backend, DeviceKind, DirectReader, DirectTrial, Lane, Opened, Setup, Stream, Unreserved};
use crate::error::{Error, ErrorKind, Result, Stage};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Backend for Gpu {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda(self.ordinal())
    }

    fn name(&self) -> &str {
        self.name()
    }

    fn pci_bus_id(&self) -> Option<&str> {
        self.pci_bus_id()
    }

    /// Asks the driver only if no other source knows the context.
    fn check_stream(&self, stream: &Stream) -> Result<()> {
        let refused = |message: String| Err(Error::new(ErrorKind::Config, Stage::Device, message));
        if stream.raw() == PER_THREAD {
            // Batches are dropped on any thread, where this handle would mean a different stream.
            return refused("the per-thread default stream differs on each thread: create a stream".into());
        }
        let context = match stream.context() {
            Some(context) => context,
            None if stream.raw() == LEGACY || self.known.load(Ordering::Relaxed) == stream.raw() => return Ok(()),
            None => self.context_of(stream.raw())?,
        };
        if context != self.context() {
            let ordinal = self.ordinal();
            return refused(format!("the stream belongs to another context than cuda:{ordinal} of this loader"));
        }
        self.known.store(stream.raw(), Ordering::Relaxed);
        Ok(())
    }

    fn check_uncaptured(&self, stream: &Stream) -> Result<()> {
        Gpu::check_uncaptured(self, stream.raw())
    }

    fn within(&self, work: &mut dyn FnMut()) {
        // If binding fails, every call reports its own error.
        let _bound = self.bind();
        work();
    }

    fn beside_captures(&self, work: &mut dyn FnMut()) {
        let _bound = self.enter();
        work();
    }

    fn lane(self: Arc<Self>) -> Option<Box<dyn Lane>> {
        Some(Box::new(CudaLane { gpu: self, direct: None, targets: Vec::new() }))
    }
}

/// One loader's part of a GPU.
struct CudaLane {
    gpu: Arc<Gpu>,
    direct: Option<Arc<Direct>>,
    /// Batch memory registered with cuFile.
    targets: Vec<Target>,
}

impl Lane for CudaLane {
    fn open_direct(&mut self, trial: DirectTrial) -> Result<String, String> {
        let (direct, how) = Direct::open(&self.gpu, trial)?;
        self.direct = Some(Arc::new(direct));
        Ok(how)
    }

    fn close_direct(&mut self) {
        self.targets.clear();
        self.direct = None;
    }

    fn reserve(&mut self, count: usize, bytes: usize) -> Result<(), Unreserved> {
        let Some(direct) = &self.direct else { return Ok(()) };
        for _ in 0..count {
            let memory = DeviceMemory::new(&self.gpu, bytes, "a batch").map_err(Unreserved::Failed)?;
            self.targets.push(Target::of(memory, Some(direct.cufile())).map_err(Unreserved::ForDirect)?);
        }
        Ok(())
    }

    fn direct(&self) -> Option<Arc<dyn DirectReader>> {
        self.direct.clone().map(|direct| direct as Arc<dyn DirectReader>)
    }

    fn open(self: Box<Self>, setup: Setup) -> Result<Opened> {
        let counts = (setup.slots, setup.batches);
        let idle = Arc::new(IdleMeter::new(&self.gpu, setup.clock.clone(), counts, setup.measured)?);
        let engine = Copier::new(&self.gpu, setup, self.targets, idle.clone())?;
        Ok(Opened { engine: Box::new(engine), idle })
    }
}

impl device::IdleMeter for IdleMeter {
    fn asked(&self, first: bool, checked: bool) {
        self.asked(first, checked);
    }

    fn totals(&self) -> crate::meter::GpuIdle {
        self.totals()
    }

    fn track(&self) -> crate::meter::Track {
        self.track()
    }
}
