//! The consumer's side of a GPU in virtual time.

use super::parts::Times;
use super::time::{SharedTime, Span};
use crate::batch::Batch;
use crate::loader::LoaderBuilder;
use crate::pipeline::Gds;
use feedline_device::cuda::driver::simulated::Simulated;
use feedline_device::{Device, Stream};
use std::sync::Arc;

/// How a consumer uses its GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnGpu {
    /// Mean nanoseconds of a copy on the bus.
    pub(super) copy: f64,
    /// Batches in device memory.
    pub(super) buffers: usize,
    /// Maximum number of steps that the host queues before it waits; 0 for a host that synchronises
    /// each step.
    pub(super) ahead: usize,
    pub(super) given: Given,
}

/// How the loader learns the consumer's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    Builder,
    /// Each batch is bound to its handle.
    EachBatch,
    Never,
}

/// A GPU, and the stream of the steps.
pub(super) struct Gpu {
    on: OnGpu,
    simulated: Arc<Simulated>,
    device: Device,
    stream: usize,
}

impl Gpu {
    pub(super) fn new(on: OnGpu, time: &SharedTime, copies: Times) -> Self {
        let (simulated, gpu) = Simulated::new(time.shown(), move |number| copies.of(number).max(1));
        let stream = simulated.stream();
        Self {
            on,
            simulated,
            device: Device::of(gpu, "virtual"),
            stream,
        }
    }

    pub(super) fn simulated(&self) -> &Arc<Simulated> {
        &self.simulated
    }

    pub(super) fn settings(&self, builder: LoaderBuilder) -> LoaderBuilder {
        let builder = builder
            .device(self.device.clone())
            .tuning(|t| t.gds(Gds::Off).device_batches(self.on.buffers));
        match self.on.given {
            Given::Builder => builder.stream(Stream::promised(self.stream)),
            Given::EachBatch | Given::Never => builder,
        }
    }

    /// Enqueues a step on the batch; returns its end.
    pub(super) fn step(&self, batch: &Batch, ns: u64) -> u64 {
        if self.on.given == Given::EachBatch {
            batch.bind(Stream::promised(self.stream)).unwrap();
        }
        self.simulated.launch(self.stream, ns)
    }

    /// Intervals of steps.
    pub(super) fn steps(&self) -> Vec<Span> {
        self.simulated.kernels()
    }

    /// Intervals of copies on the bus.
    pub(super) fn copies(&self) -> Vec<Span> {
        self.simulated.copies()
    }
}
