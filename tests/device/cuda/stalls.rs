//! A device that does not answer, a consumer's stream that does not end, a consumer's kernel that
//! breaks the context.

use crate::common::cuda::*;
use crate::common::standin::{self, Config};
use crate::common::*;
use cudarc::driver::{CudaContext, CudaStream};
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::error::Stage;
use feedline::{Device, Error, ErrorKind, Loader, LoaderBuilder, Order};
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_millis(400);

fn data() -> LoaderBuilder {
    let records = Records::builder(5000)
        .open_bytes(noise(60 * 5000, 3))
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(2))
        .batch_size(5)
        .tuning(|t| t.stall_deadline(DEADLINE))
}

fn stalled(error: &Error, words: &str) {
    assert_eq!(
        (error.kind(), error.stage()),
        (ErrorKind::Stalled, Stage::Device),
        "{error}"
    );
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn a_device_that_finishes_no_copy_is_a_stall() {
    case(config(), |session| {
        let right = Got::epoch(&build(data()), 1);
        let loader = build(
            data()
                .device(gpu(0))
                .tuning(|t| t.slots(2).device_batches(4)),
        );
        session.hold(true);
        // One batch per slot is delivered before its copy is done.
        let error = loader
            .epoch(0)
            .unwrap()
            .find_map(|batch| batch.err())
            .unwrap();
        stalled(&error, "the device has not finished its copies");
        session.hold(false);
        same(&Got::epoch(&loader, 1), &right, "after the stall");
    });
}

#[test]
fn a_stopped_consumer_stream_is_no_stall() {
    // Copies of pageable memory must not keep the copying thread in the driver meanwhile.
    for register_error in [0, 801] {
        case(
            Config {
                register_error,
                ..config()
            },
            |_| {
                let loader = build(
                    data()
                        .device(gpu(0))
                        .tuning(|t| t.slots(3).device_batches(2)),
                );
                let context = CudaContext::new(0).unwrap();
                let kernels = Kernels::new(&context);
                let stream = context.new_stream().unwrap();
                let gate = Gate::close();
                kernels.wait(&stream);
                let opener = std::thread::spawn(move || {
                    std::thread::sleep(4 * DEADLINE);
                    gate.open();
                });
                let mut batches = loader.epoch(0).unwrap();
                let received = batches
                    .by_ref()
                    .map(|batch| batch.unwrap().bind(Stream::from(&stream)).unwrap())
                    .count();
                opener.join().unwrap();
                stream.synchronize().unwrap();
                assert_eq!(received, 12);
                // The stream was stopped before the first batch.
                let report = loader.report();
                let blocked = Duration::from_nanos(report.total.copy.unwrap().blocked_ns);
                assert!(blocked > 2 * DEADLINE, "{}", loader.report());
                assert!(
                    loader
                        .report()
                        .to_string()
                        .contains(" s by the consumer's use of the memory; ")
                );
            },
        );
    }
}

/// Takes the loader's warnings.
#[derive(Clone, Default)]
pub(super) struct Warnings(pub(super) Arc<std::sync::Mutex<Vec<String>>>);

impl tracing::field::Visit for Warnings {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "feedline" && *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    // No span is enabled.
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_consumer_stream_that_stands_still_is_told_once() {
    case(config(), |_| {
        let warnings = Warnings::default();
        let hangs = || {
            let all = warnings.0.lock().unwrap();
            all.iter()
                .filter(|text| text.contains("the consumer's streams do not end their work"))
                .count()
        };
        let context = CudaContext::new(0).unwrap();
        let kernels = Kernels::new(&context);
        let stream = context.new_stream().unwrap();
        // Short enough to wait for, long enough for a busy machine's workers.
        let builder = data().tuning(|t| t.stall_deadline(5 * DEADLINE));
        let loader = build(
            builder
                .device(gpu(0))
                .stream(&stream)
                .tuning(|t| t.slots(3).device_batches(2)),
        );
        let gate = Gate::close();
        kernels.wait(&stream);
        let batches = loader.epoch(0).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let gate = gate;
                until("it is told", || hangs() > 0);
                // Time to tell it again.
                std::thread::sleep(2 * DEADLINE);
                gate.open();
            });
            let errors = || {
                batches
                    .filter_map(Result::err)
                    .map(|error| error.to_string())
                    .collect::<Vec<_>>()
            };
            assert_eq!(
                tracing::subscriber::with_default(warnings.clone(), errors),
                [""; 0]
            );
        });
        assert_eq!(hangs(), 1);
        stream.synchronize().unwrap();
    });
}

/// The error is typed and names its cause.
fn broken(error: &Error, code: u32, name: &str) {
    let said = words(error);
    assert_eq!(error.kind(), ErrorKind::Device, "{said}");
    assert!(
        said.contains(name) && said.contains(&format!("({code})")) && !said.contains("panicked"),
        "{said}"
    );
}

/// Breaks the context in the middle of an epoch. `stopped`: only when the loader waits for the
/// consumer's stream with all its slots, so nothing tells it.
fn breaks(
    context: &Arc<CudaContext>,
    stream: &Arc<CudaStream>,
    (code, name): (u32, &str),
    stopped: bool,
) {
    let right = Got::epoch(&build(data()), 0);
    let kernels = Kernels::new(context);
    let builder = data().tuning(|t| t.stall_deadline(crate::common::wait::DEADLINE));
    let loader = build(
        builder
            .device(gpu(0))
            .stream(stream)
            .tuning(|t| t.slots(3).device_batches(3)),
    );
    let mut batches = loader.epoch(0).unwrap();
    let held = batches.next().unwrap().unwrap();
    assert_eq!(Got::of(&held).unwrap(), right[0]);
    let gate = Gate::close();
    kernels.wait(stream);
    kernels.crash(stream, code);
    let errors: Vec<_> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let blocked = || loader.snapshot().copy.unwrap().blocked_ns > 20_000_000;
            // The held batch, two more, and three that wait for the stream.
            let waits = || standin::cuda().count("cuMemcpyHtoDAsync_v2") == 6 && blocked();
            until("all slots wait", || !stopped || waits());
            gate.open();
        });
        batches.by_ref().filter_map(|batch| batch.err()).collect()
    });
    assert_eq!(errors.len(), 1, "{errors:#?}");
    broken(&errors[0], code, name);
    assert!(batches.next().is_none());
    broken(&held.bind(Stream::legacy()).unwrap_err(), code, name);
    drop((held, batches));
    // The cause is reported once.
    let again = loader.epoch(1).unwrap().next().unwrap().unwrap_err();
    assert!(
        matches!(again.kind(), ErrorKind::Device | ErrorKind::Cancelled),
        "{again}"
    );
    drop(loader);
    until("the loader's threads have ended", || {
        loader_threads().is_empty()
    });
}

#[test]
fn a_consumers_kernel_that_breaks_the_context_is_one_error() {
    for (code, name) in [
        (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (710, "CUDA_ERROR_ASSERT"),
    ] {
        for stopped in [false, true] {
            standin::in_session(config(), format!("{name}, {stopped}"), move |session| {
                let context = CudaContext::new(0).unwrap();
                let stream = context.new_stream().unwrap();
                breaks(&context, &stream, (code, name), stopped);
                // Later loaders on that context, in a new object of ours and in the consumer's.
                for device in [Device::cuda(0), Device::cuda_in(context.clone())] {
                    broken(
                        &device
                            .and_then(|device| data().device(device).build())
                            .unwrap_err(),
                        code,
                        name,
                    );
                }
                drop((stream, context));
                let violations = session.end();
                assert!(violations.is_empty(), "{violations:#?}");
            });
        }
    }
}
