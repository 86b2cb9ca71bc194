use crate::common::*;
use crate::gpu::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::profile::GpuIdle;
use feedline::{Loader, LoaderBuilder};
use std::task::Poll;
use std::time::Duration;

const BATCHES: u64 = 60;

fn data() -> LoaderBuilder {
    let records = Records::builder(64).open_bytes(noise(BATCHES as usize * 4 * 64, 3)).unwrap();
    Loader::builder(records).batch_size(4).device(gpu(0))
}

fn idle(loader: &Loader) -> GpuIdle {
    loader.snapshot().consumer.gpu.unwrap()
}

#[test]
fn every_step_is_measured_however_far_the_stream_is_behind_but_the_first_of_an_iterator() {
    for (slots, buffers) in [(24, 20), (3, 2), (2, 24)] {
        case(config(), move |_| {
            let context = CudaContext::new(0).unwrap();
            let stream = context.new_stream().unwrap();
            let kernels = Kernels::new(&context);
            let loader = build(data().stream(&stream).slots(slots).device_batches(buffers));
            loader.ready().unwrap();
            for epoch in 0..3 {
                let gate = Gate::close();
                let mut batches = loader.epoch(epoch).unwrap();
                let mut ahead = 0;
                while let Poll::Ready(batch) = batches.next_within(Duration::from_millis(200)) {
                    drop(batch.unwrap().unwrap());
                    kernels.wait(&stream);
                    ahead += 1;
                }
                assert!(ahead >= buffers, "{ahead} batches");
                gate.open();
                assert!(batches.all(|batch| batch.is_ok()));
                stream.synchronize().unwrap();
                // The last ones are read after the iterator has ended.
                assert_eq!(idle(&loader).steps, (epoch + 1) * (BATCHES - 1), "{slots} slots, {buffers} buffers");
            }
        });
    }
}

#[test]
fn the_wait_for_a_first_batch_and_what_is_between_iterators_is_neither_starvation_nor_lateness() {
    case(late(), |session| {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let loader = build(data().stream(&stream));
        for _ in 0..5 {
            session.hold(true);
            let mut batches = loader.steps(1).unwrap();
            let batch = batches.next().unwrap().unwrap();
            session.hold(false);
            stream.synchronize().unwrap();
            drop((batch, batches));
            let GpuIdle { steps, starved_ns, host_late_ns, .. } = idle(&loader);
            assert_eq!((steps, starved_ns, host_late_ns), (0, 0, 0));
        }
    });
}

#[test]
fn while_a_batch_is_there_and_bound_to_no_stream_the_host_is_late() {
    const LATE: Duration = Duration::from_millis(30);
    case(config(), |_| {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let loader = build(data());
        let mut batches = loader.epoch(0).unwrap();
        for step in 0..4_u32 {
            let batch = batches.next().unwrap().unwrap();
            until("its copy is done", || loader.snapshot().copy.unwrap().latency.count > u64::from(step));
            std::thread::sleep(LATE);
            batch.bind(Stream::from(&stream)).unwrap();
            drop(batch);
            stream.synchronize().unwrap();
            assert_eq!(idle(&loader).steps, u64::from(step));
            assert!(Duration::from_nanos(idle(&loader).host_late_ns) >= step * LATE, "{:?}", idle(&loader));
        }
    });
}
