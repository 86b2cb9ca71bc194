use crate::common::cuda::*;
use crate::common::standin::Config;
use crate::common::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::profile::snapshot::CopyStage;
use feedline::{Epoch, Loader, LoaderBuilder};
use std::time::Duration;

const BATCHES: u64 = 12;

fn data() -> LoaderBuilder {
    let records = Records::builder(64)
        .open_bytes(noise(BATCHES as usize * 4 * 64, 3))
        .unwrap();
    Loader::builder(records).batch_size(4).device(gpu(0))
}

fn copies(loader: &Loader) -> CopyStage {
    loader.snapshot().copy.unwrap()
}

/// The device gets three copies into two buffers; the third waits for a stopped stream of the
/// consumer.
fn third_copy_waits(body: impl FnOnce(&Loader, &mut Epoch, Gate) + Send + 'static) {
    case(
        Config {
            latency: Duration::from_micros(200),
            ..config()
        },
        |session| {
            let context = CudaContext::new(0).unwrap();
            let kernels = Kernels::new(&context);
            let stream = context.new_stream().unwrap();
            let loader = build(data().tuning(|t| t.slots(3).device_batches(2)));
            loader.ready().unwrap();
            let gate = Gate::close();
            session.hold(true);
            kernels.wait(&stream);
            let mut batches = loader.epoch(0).unwrap();
            let first = batches.next().unwrap().unwrap();
            first.bind(Stream::from(&stream)).unwrap();
            drop(first);
            until("the third copy is submitted", || {
                session.count("cuMemcpyHtoDAsync_v2") == 3
            });
            session.hold(false);
            body(&loader, &mut batches, gate);
            stream.synchronize().unwrap();
        },
    );
}

#[test]
fn a_slot_is_free_when_its_own_copy_is_done() {
    third_copy_waits(|loader, batches, gate| {
        // The first batch's buffer has its next copy queued, which is not done.
        until("two slots are free", || copies(loader).latency.count == 2);
        gate.open();
        assert_eq!(
            batches.filter(|batch| batch.is_ok()).count() as u64,
            BATCHES - 1
        );
    });
}

#[test]
fn a_copy_behind_the_consumers_stream_is_blocked_and_not_busy() {
    third_copy_waits(|loader, batches, gate| {
        until("two copies are done", || copies(loader).latency.count == 2);
        let before = copies(loader);
        until("time passes", || {
            copies(loader).blocked_ns >= before.blocked_ns + 20_000_000
        });
        assert_eq!(copies(loader).busy_ns, before.busy_ns);
        gate.open();
        assert_eq!(
            batches.filter(|batch| batch.is_ok()).count() as u64,
            BATCHES - 1
        );
        // Each took the device's latency, one after the other; the last three may be unfinished.
        let copy = copies(loader);
        assert!(
            copy.busy_ns >= (BATCHES - 3) * 200_000 && copy.latency.p50_ns >= 190_000.0,
            "{copy:?}"
        );
        assert!(
            copy.busy_ns + copy.blocked_ns + copy.starved_ns <= loader.snapshot().at_ns,
            "{copy:?}"
        );
    });
}
