//! Implements the backend for CUDA: a GPU, and a loader's lane on it.

use super::buffer::BatchMemory;
use super::copy::Copier;
use super::direct::DirectReader;
use super::driver::Gpu;
use super::idle::IdleMeter;
use crate::backend::{Backend, DirectTrial, Setup, Unreserved};
use crate::cuda::driver::DeviceMemory;
use crate::stream::{LEGACY, PER_THREAD};
use crate::{DeviceKind, Stream};
use feedline_base::error::{Error, ErrorKind, Result, Stage};
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
            return refused(
                "the per-thread default stream differs on each thread: create a stream".into(),
            );
        }
        let context = match stream.context() {
            Some(context) => context,
            None if stream.raw() == LEGACY
                || self.known.load(Ordering::Relaxed) == stream.raw() =>
            {
                return Ok(());
            }
            None => self.context_of(stream.raw())?,
        };
        // A green context shares memory and events with the primary one of its device.
        if context != self.context() && !self.shares(stream.raw(), context)? {
            let ordinal = self.ordinal();
            return refused(format!(
                "the stream belongs to another context than cuda:{ordinal} of this loader"
            ));
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

    fn lane(self: Arc<Self>) -> Option<Lane> {
        Some(Lane {
            gpu: self,
            direct: None,
            targets: Vec::new(),
        })
    }
}

/// What one loader holds on a GPU while `build` runs.
pub struct Lane {
    gpu: Arc<Gpu>,
    direct: Option<Arc<DirectReader>>,
    /// Batch memory registered with cuFile.
    targets: Vec<BatchMemory>,
}

impl Lane {
    /// Opens the direct route and runs the trial read. Returns the actual route of the bytes, or
    /// the reason why direct reads are not used.
    pub fn open_direct(&mut self, trial: DirectTrial) -> Result<String, String> {
        let (direct, how) = DirectReader::open(&self.gpu, trial)?;
        self.direct = Some(Arc::new(direct));
        Ok(how)
    }

    /// Gives up direct reads.
    pub fn close_direct(&mut self) {
        self.targets.clear();
        self.direct = None;
    }

    /// Reserves the memory of `count` batches of `bytes` bytes each, if direct reads are in use and
    /// need it registered.
    pub fn reserve(&mut self, count: usize, bytes: usize) -> Result<(), Unreserved> {
        let Some(direct) = &self.direct else {
            return Ok(());
        };
        for _ in 0..count {
            let memory =
                DeviceMemory::new(&self.gpu, bytes, "a batch").map_err(Unreserved::Failed)?;
            self.targets.push(
                BatchMemory::of(memory, Some(&direct.cufile)).map_err(Unreserved::ForDirect)?,
            );
        }
        Ok(())
    }

    /// The open direct reader.
    pub fn direct(&self) -> Option<Arc<DirectReader>> {
        self.direct.clone()
    }

    /// Reserves the remaining memory and opens the streams.
    pub fn open(self, setup: Setup) -> Result<(Copier, Arc<IdleMeter>)> {
        let idle = Arc::new(IdleMeter::new(
            &self.gpu,
            setup.clock.clone(),
            setup.slots,
            setup.batches,
            setup.measured,
        )?);
        let copier = Copier::new(&self.gpu, setup, self.targets, idle.clone())?;
        Ok((copier, idle))
    }
}
