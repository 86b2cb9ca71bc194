//! A device that does not answer, a consumer's stream that does not end, and samples that cannot be had on the way to a GPU.

use crate::common::*;
use crate::gpu::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::{Error, ErrorKind, Loader, LoaderBuilder, OnBadSample, Order, Stage, Status};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_millis(400);

fn data() -> LoaderBuilder {
    let records = Records::builder(5000).open_bytes(noise(60 * 5000, 3)).unwrap();
    Loader::builder(records).order(Order::shuffled(2)).batch_size(5).stall_deadline(DEADLINE)
}

fn stalled(error: &Error, words: &str) {
    assert_eq!((error.kind(), error.stage()), (ErrorKind::Stalled, Stage::Device), "{error}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn a_device_that_finishes_no_copy_is_a_stall_and_the_loader_goes_on_when_it_does() {
    case(config(), |session| {
        let right = Got::epoch(&build(data()), 1);
        let loader = build(data().device(gpu(0)).slots(2).device_batches(4));
        session.hold(true);
        // As many batches as there are slots are handed out before their copies are done.
        let error = loader.epoch(0).unwrap().find_map(|batch| batch.err()).unwrap();
        stalled(&error, "the device does not finish its copies");
        session.hold(false);
        same(&Got::epoch(&loader, 1), &right, "after the stall");
    });
}

#[test]
fn a_consumer_s_stream_that_does_not_end_is_a_stall_of_the_device() {
    case(config(), |_| {
        let right = Got::epoch(&build(data()), 1);
        let loader = build(data().device(gpu(0)).slots(3).device_batches(2));
        let context = CudaContext::new(0).unwrap();
        let (kernels, stream) = (Kernels::new(&context), context.new_stream().unwrap());
        let gate = Gate::close();
        kernels.wait(&stream);
        let mut received = 0;
        let error = loader.epoch(0).unwrap().find_map(|batch| match batch {
            Ok(batch) => {
                batch.bind(Stream::from(&stream)).unwrap();
                received += 1;
                None
            }
            Err(error) => Some(error),
        });
        stalled(&error.unwrap(), "or a stream that dropped batches were bound to its work on them");
        // Copies into what was dropped are queued behind its consumers, as many as there are slots to copy from.
        assert!((2..=5).contains(&received), "{received}");
        gate.open();
        stream.synchronize().unwrap();
        same(&Got::epoch(&loader, 1), &right, "after the stall");
    });
}

#[test]
fn substitutes_are_the_same_on_a_device_and_so_is_the_ledger() {
    case(config(), |_| {
        let make = || {
            data().on_bad_sample(OnBadSample::Substitute { budget: 3 }).map(|_, ctx| match ctx.id() {
                7 | 8 | 31 => Err(Error::user("odd")),
                _ => Ok(()),
            })
        };
        let (host, device) = (build(make()), build(make().device(gpu(0))));
        let right = Got::epoch(&host, 0);
        same(&Got::epoch(&device, 0), &right, "rows");
        let all = |loader: &Loader| {
            let batches = loader.epoch(1).unwrap().map(|batch| batch.unwrap().status().to_vec());
            batches.flatten().filter(|status| *status == Status::Substitute as u8).count()
        };
        assert_eq!((all(&host), all(&device)), (3, 3));
        assert_eq!(host.ledger().samples, device.ledger().samples);
        assert_eq!(device.ledger().substituted, 6);
    });
}
