use crate::common::cuda::*;
use crate::common::standin::Config;
use crate::common::*;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::{Loader, LoaderBuilder, Order};
use std::collections::VecDeque;
use std::sync::Arc;

const RECORD: usize = 700;
const BATCHES: usize = 24;

fn data() -> LoaderBuilder {
    let records = Records::builder(RECORD)
        .open_bytes(noise(BATCHES * 5 * RECORD, 9))
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(6))
        .batch_size(5)
}

fn streams(context: &Arc<CudaContext>, count: usize) -> Vec<Arc<CudaStream>> {
    (0..count).map(|_| context.new_stream().unwrap()).collect()
}

/// Of the default priority, as PyTorch's: with the loader's own in one queue, the first copy would
/// never begin.
#[test]
fn a_stopped_stream_holds_up_no_copy_and_no_bell_of_the_loader() {
    const BUFFERS: u64 = 4;
    case(
        Config {
            queues: 1,
            ..config()
        },
        |session| {
            let right = Got::epoch(&build(data()), 0);
            let context = CudaContext::new(0).unwrap();
            let kernels = Kernels::new(&context);
            let stream = context.new_stream().unwrap();
            let builder = data()
                .device(gpu(0))
                .stream(&stream)
                .tuning(|t| t.slots(1).device_batches(BUFFERS as usize));
            let loader = build(builder);
            loader.ready().unwrap();
            let gate = Gate::close();
            kernels.wait(&stream);
            until("the stream has stopped", || session.executed() == 1);
            // This one has not begun.
            kernels.wait(&stream);
            let mut batches = loader.epoch(0).unwrap();
            let held: Vec<_> = (0..BUFFERS)
                .map(|_| batches.next().unwrap().unwrap())
                .collect();
            // The only slot is short, so each copy has a bell.
            until("each copy is done and has rung its bell", || {
                session.executed() == 1 + 2 * BUFFERS
                    && loader.snapshot().copy.unwrap().latency.count == BUFFERS
            });
            assert_eq!(session.count("cuMemcpyHtoDAsync_v2"), BUFFERS);
            gate.open();
            let mut found: Vec<_> = held.iter().map(|batch| Got::of(batch).unwrap()).collect();
            drop(held);
            found.extend(Got::all(batches));
            same(&found, &right, "behind a stopped stream");
        },
    );
}

/// Reads an epoch on these streams in turn, and holds `ahead` batches.
fn read(
    loader: &Loader,
    kernels: &Kernels,
    streams: &[Arc<CudaStream>],
    ahead: usize,
) -> Vec<Vec<u8>> {
    let mut held = VecDeque::new();
    let mut copies = Vec::<(CudaSlice<u8>, _)>::new();
    for (batch, stream) in loader.epoch(0).unwrap().zip(streams.iter().cycle()) {
        let batch = batch.unwrap();
        batch.bind(Stream::from(stream)).unwrap();
        let field = batch.field("record").unwrap();
        let to = stream.alloc_zeros(field.size_bytes()).unwrap();
        kernels.copy(stream, &to, field.device_ptr().unwrap(), field.size_bytes());
        copies.push((to, stream));
        held.push_back(batch);
        if held.len() > ahead {
            held.pop_front();
        }
    }
    drop(held);
    copies
        .iter()
        .map(|(copy, stream)| stream.clone_dtoh(copy).unwrap())
        .collect()
}

#[test]
fn streams_that_share_queues_read_the_batches_of_the_host() {
    for (queues, count, base) in [
        (1, 1, config()),
        (1, 12, config()),
        (1, 12, late()),
        (8, 12, late()),
        (0, 12, late()),
    ] {
        case(Config { queues, ..base }, move |_| {
            let right: Vec<_> = Got::epoch(&build(data()), 0)
                .iter()
                .map(|batch| batch.bytes("record").to_vec())
                .collect();
            let context = CudaContext::new(0).unwrap();
            let kernels = Kernels::new(&context);
            let streams = streams(&context, count);
            for ahead in [0, 3] {
                for of_builder in [0, 1, count] {
                    let builder = data()
                        .device(gpu(0))
                        .tuning(|t| t.slots(4).device_batches(5));
                    let loader = build(
                        streams[..of_builder]
                            .iter()
                            .fold(builder, LoaderBuilder::stream),
                    );
                    let found = read(&loader, &kernels, &streams, ahead);
                    assert!(
                        found == right,
                        "{queues} queues, {count} streams, {ahead} held, {of_builder} of the builder"
                    );
                }
            }
            streams
                .iter()
                .for_each(|stream| stream.synchronize().unwrap());
        });
    }
}
