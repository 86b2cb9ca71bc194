//! Two loaders of one device that feed one stream in turn, as training and validation do.

use crate::common::cuda::*;
use crate::common::standin::Config;
use crate::common::*;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use feedline::dataset::Records;
use feedline::profile::snapshot::{GpuIdle, Unmeasured};
use feedline::{Batch, Epoch, Loader, LoaderBuilder, Order};
use std::sync::Arc;

const RECORD: usize = 700;
/// Batches of an epoch; a validation follows each so many of the first.
const TRAIN: u64 = 23;
const VALIDATE: u64 = 6;
const EVERY: u64 = 5;
const EPOCHS: u64 = 2;
const VALIDATIONS: u64 = TRAIN / EVERY;

fn train() -> LoaderBuilder {
    data(TRAIN, 3).order(Order::shuffled(6))
}

fn validate() -> LoaderBuilder {
    data(VALIDATE, 4)
}

fn data(batches: u64, seed: u64) -> LoaderBuilder {
    let records = Records::builder(RECORD)
        .open_bytes(noise(batches as usize * 5 * RECORD, seed))
        .unwrap();
    Loader::builder(records).batch_size(5)
}

/// The stream, which copies what it is fed.
struct Consumer {
    stream: Arc<CudaStream>,
    kernels: Kernels,
    copies: Vec<CudaSlice<u8>>,
}

impl Consumer {
    /// Reads a batch, and only then drops the one before.
    fn step(&mut self, batch: Batch, last: &mut Option<Batch>) {
        let field = batch.field("record").unwrap();
        let to = self.stream.alloc_zeros(field.size_bytes()).unwrap();
        self.kernels.copy(
            &self.stream,
            &to,
            field.device_ptr().unwrap(),
            field.size_bytes(),
        );
        self.copies.push(to);
        *last = Some(batch);
    }

    fn run(&mut self, batches: Epoch) {
        let mut last = None;
        batches.for_each(|batch| self.step(batch.unwrap(), &mut last));
    }

    /// All that was read.
    fn found(&mut self) -> Vec<Vec<u8>> {
        self.copies
            .drain(..)
            .map(|copy| self.stream.clone_dtoh(&copy).unwrap())
            .collect()
    }
}

/// The same on the host.
fn right() -> Vec<Vec<u8>> {
    let host = build(train());
    let validation = Got::epoch(&build(validate()), 0);
    let mut right = Vec::new();
    for epoch in 0..EPOCHS {
        for (batch, step) in Got::epoch(&host, epoch).iter().zip(1..) {
            right.push(batch.bytes("record").to_vec());
            if step % EVERY == 0 {
                right.extend(
                    validation
                        .iter()
                        .map(|batch| batch.bytes("record").to_vec()),
                );
            }
        }
    }
    right
}

/// The loader's numbers after so many steps of the stream; each iterator's first one only begins
/// the time.
fn idle(loader: &Loader, steps: u64) -> GpuIdle {
    let idle = || loader.snapshot().consumer.gpu.unwrap();
    until("the steps are measured", || idle().steps >= steps);
    assert_eq!(
        (idle().steps, idle().unmeasured),
        (steps, Unmeasured::default())
    );
    idle()
}

#[test]
fn training_and_validation_take_turns_on_one_stream() {
    // Watched: the training's numbers before and after each validation are the same; else nothing
    // waits for the stream.
    for (queues, watched) in [(0, false), (1, false), (0, true), (1, true)] {
        case(Config { queues, ..late() }, move |_| {
            let right = right();
            let context = CudaContext::new(0).unwrap();
            let stream = context.new_stream().unwrap();
            let train = train().tuning(|t| t.slots(3).device_batches(3));
            let validate = validate().tuning(|t| t.slots(2).device_batches(2));
            let [train, validate] =
                [train, validate].map(|builder| build(builder.device(gpu(0)).stream(&stream)));
            let mut consumer = Consumer {
                stream,
                kernels: Kernels::new(&context),
                copies: Vec::new(),
            };
            for epoch in 0..EPOCHS {
                let mut last = None;
                for (batch, step) in train.epoch(epoch).unwrap().zip(1..) {
                    consumer.step(batch.unwrap(), &mut last);
                    if step % EVERY > 0 {
                        continue;
                    }
                    let before = watched.then(|| idle(&train, epoch * (TRAIN - 1) + step - 1));
                    consumer.run(validate.epoch(0).unwrap());
                    if let Some(before) = before {
                        assert_eq!(train.snapshot().consumer.gpu.unwrap(), before);
                    }
                }
            }
            assert!(consumer.found() == right, "bytes differ");
            for (loader, iterators, batches) in [
                (&train, EPOCHS, TRAIN),
                (&validate, EPOCHS * VALIDATIONS, VALIDATE),
            ] {
                let (
                    GpuIdle {
                        span_ns,
                        starved_ns,
                        ..
                    },
                    report,
                ) = (idle(loader, iterators * (batches - 1)), loader.report());
                assert!(starved_ns <= span_ns, "{starved_ns} of {span_ns}");
                assert_eq!(
                    (
                        report.total.consumer.batches,
                        report.total.copy.unwrap().batches
                    ),
                    (iterators * batches, iterators * batches)
                );
            }
        });
    }
}
