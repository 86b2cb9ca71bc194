#![allow(unsafe_code)]

use crate::common::cuda::*;
use crate::common::standin::Session;
use crate::common::*;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use feedline::dataset::Records;
use feedline::device::StreamUse;
use feedline::device::cuda::Stream;
use feedline::error::Stage;
use feedline::profile::snapshot::Work;
use feedline::tensor::DType;
use feedline::{Batch, Device, ErrorKind, Loader, LoaderBuilder, Order};
use std::sync::Arc;
use std::time::Duration;

const RECORD: usize = 700;

fn data() -> LoaderBuilder {
    let records = Records::builder(RECORD)
        .classes((0..60).collect())
        .open_bytes(noise(60 * RECORD, 9))
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(6))
        .batch_size(5)
}

/// Bytes of the field `record` of each batch, as the host delivers it.
fn right() -> Vec<Vec<u8>> {
    Got::epoch(&build(data()), 0)
        .iter()
        .map(|batch| batch.bytes("record").to_vec())
        .collect()
}

/// A consumer on GPU 0 that copies its batches in the order of its stream.
struct Consumer {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    kernels: Kernels,
    copies: Vec<CudaSlice<u8>>,
}

impl Consumer {
    fn new() -> Self {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        Self::on(context, stream)
    }

    fn on(context: Arc<CudaContext>, stream: Arc<CudaStream>) -> Self {
        let kernels = Kernels::new(&context);
        Self {
            context,
            stream,
            kernels,
            copies: Vec::new(),
        }
    }

    fn place(&mut self, len: usize) -> CudaSlice<u8> {
        self.stream.alloc_zeros(len).unwrap()
    }

    /// Makes the stream read the field `record` of a batch that is bound to it.
    fn read(&mut self, batch: &Batch) {
        let field = batch.field("record").unwrap();
        let to = self.place(field.size_bytes());
        self.kernels.copy(
            &self.stream,
            &to,
            field.device_ptr().unwrap(),
            field.size_bytes(),
        );
        self.copies.push(to);
    }

    /// The same through cudarc's slice, which binds.
    fn read_slice(&mut self, batch: &Batch) {
        let to = self.place(batch.field("record").unwrap().size_bytes());
        let slice = batch
            .field("record")
            .unwrap()
            .cuda_slice::<u8>(&self.stream)
            .unwrap();
        assert_eq!(slice.len(), to.len());
        let (from, _read) = slice.device_ptr(&self.stream);
        self.kernels.copy(&self.stream, &to, from, to.len());
        self.copies.push(to);
    }

    /// The bytes read.
    fn found(self) -> Vec<Vec<u8>> {
        let found = self
            .copies
            .iter()
            .map(|copy| self.stream.clone_dtoh(copy).unwrap())
            .collect();
        self.stream.synchronize().unwrap();
        found
    }
}

fn on_gpu() -> LoaderBuilder {
    data().device(gpu(0))
}

/// Reads an epoch with one way to bind.
fn reads(
    ahead: usize,
    builder: impl FnOnce(&Consumer) -> LoaderBuilder,
    read: impl Fn(&mut Consumer, &Batch),
) {
    let mut consumer = Consumer::new();
    let loader = build(builder(&consumer));
    let mut held = Vec::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        read(&mut consumer, &batch);
        held.push(batch);
        if held.len() > ahead {
            held.remove(0);
        }
    }
    drop((held, loader));
    assert!(consumer.found() == right(), "bytes differ");
}

#[test]
fn a_bound_stream_reads_the_batches_of_the_host() {
    for config in [config(), late()] {
        case(config, |_| {
            for ahead in [0, 1] {
                reads(
                    ahead,
                    |consumer| on_gpu().stream(&consumer.stream),
                    Consumer::read,
                );
                reads(
                    ahead,
                    |consumer| {
                        on_gpu()
                            .stream(consumer.stream.clone())
                            .tuning(|t| t.device_batches(2))
                    },
                    Consumer::read,
                );
                reads(
                    ahead,
                    |_| on_gpu(),
                    |consumer, batch| {
                        batch.bind(Stream::from(&consumer.stream)).unwrap();
                        consumer.read(batch);
                    },
                );
                reads(ahead, |_| on_gpu(), Consumer::read_slice);
                // Binding twice has no further effect.
                reads(
                    ahead,
                    |consumer| on_gpu().stream(&consumer.stream).stream(&consumer.stream),
                    Consumer::read_slice,
                );
                let raw = |consumer: &mut Consumer, batch: &Batch| {
                    // SAFETY: the consumer keeps the stream until all batches are gone.
                    batch
                        .bind(unsafe { Stream::from_raw(consumer.stream.cu_stream() as usize) })
                        .unwrap();
                    consumer.read(batch);
                };
                reads(ahead, |_| on_gpu(), raw);
            }
        });
    }
}

#[test]
fn the_legacy_stream_reads_batches_by_default() {
    for config in [config(), late()] {
        case(config, |_| {
            for ahead in [0, 2] {
                let context = CudaContext::new(0).unwrap();
                let stream = context.default_stream();
                let mut consumer = Consumer::on(context, stream);
                let loader = build(on_gpu());
                let mut held = Vec::new();
                for batch in loader.epoch(0).unwrap() {
                    let batch = batch.unwrap();
                    consumer.read(&batch);
                    held.push(batch);
                    held.drain(..held.len().saturating_sub(ahead));
                }
                drop((held, loader));
                assert!(consumer.found() == right());
            }
        });
    }
}

#[test]
fn several_streams_may_read_the_same_batch() {
    case(late(), |_| {
        let mut consumers = [
            Consumer::new(),
            Consumer::new(),
            Consumer::new(),
            Consumer::new(),
            Consumer::new(),
            Consumer::new(),
        ];
        let loader = build(
            on_gpu()
                .stream(&consumers[0].stream)
                .stream(&consumers[1].stream),
        );
        let gate = Gate::close();
        consumers[3].kernels.wait(&consumers[3].stream);
        for (number, batch) in loader.epoch(0).unwrap().enumerate() {
            let batch = batch.unwrap();
            consumers[0].read(&batch);
            consumers[1].read(&batch);
            for consumer in &mut consumers[2..] {
                consumer.read_slice(&batch);
            }
            if number == 3 {
                // The copies wait for the fourth stream, the batches for the copies.
                consumers[3].stream.context().check_err().unwrap();
                break;
            }
        }
        gate.open();
        drop(loader);
        for consumer in consumers {
            assert!(consumer.found() == right()[..4]);
        }
    });
}

#[test]
fn an_unbound_stream_that_reads_early_is_found() {
    case(config(), |session| {
        let mut consumer = Consumer::new();
        let loader = build(on_gpu());
        session.hold(true);
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        // Asking for the address binds the legacy stream, which is not the consumer's.
        consumer.read(&batch);
        session.hold(false);
        consumer.stream.synchronize().unwrap();
        drop((batch, loader, consumer));
        let violations = session.expect_violations();
        assert!(
            violations.iter().any(|text| text.contains("unordered use")),
            "{violations:?}"
        );
    });
}

/// A prefetcher takes a batch on one stream, and the step on another one waits for that stream, as
/// in JAX and TorchRec.
#[test]
fn a_stream_that_takes_over_a_batch_is_found_unless_it_is_named() {
    const READ: &str = "cuStreamWaitEvent";
    for named in [false, true] {
        case(config(), move |session| {
            let mut consumer = Consumer::new();
            let taking = consumer.context.new_stream().unwrap();
            let loader = build(on_gpu().stream(&taking).tuning(|t| t.device_batches(2)));
            let mut epoch = loader.epoch(0).unwrap();
            let gate = Gate::close();
            consumer.kernels.wait(&consumer.stream);
            let first = epoch.next().unwrap().unwrap();
            let waits = session.count(READ);
            if named {
                first.used_on(Stream::from(&consumer.stream)).unwrap();
            }
            assert_eq!(
                session.count(READ),
                waits,
                "it waits for no copy, but for the stream that takes"
            );
            consumer.stream.join(&taking).unwrap();
            consumer.read(&first);
            drop(first);
            for _ in 0..4 {
                drop(epoch.next().unwrap().unwrap());
            }
            gate.open();
            drop((epoch, loader));
            let found = consumer.found();
            drop(taking);
            if named {
                assert!(found[0] == right()[0]);
                return;
            }
            let violations = session.expect_violations();
            assert!(
                violations.iter().any(|text| text.contains("unordered use")),
                "{violations:?}"
            );
        });
    }
}

#[test]
fn streams_of_each_use_read_the_batches_of_the_host() {
    for config in [config(), late()] {
        case(config, |session| {
            reads(
                1,
                |consumer| on_gpu().stream_as(&consumer.stream, StreamUse::Beside),
                Consumer::read,
            );
            // A later binding adds to an earlier one.
            let strengthen = |consumer: &mut Consumer, batch: &Batch| {
                for how in [
                    StreamUse::Releases,
                    StreamUse::Beside,
                    StreamUse::Takes,
                    StreamUse::Releases,
                ] {
                    batch.bind_as(Stream::from(&consumer.stream), how).unwrap();
                }
                consumer.read(batch);
            };
            reads(1, |_| on_gpu(), strengthen);
            // A stream that only releases is no reader: the default stream takes the batch.
            let context = CudaContext::new(0).unwrap();
            let mut default = Consumer::on(context.clone(), context.default_stream());
            let other = context.new_stream().unwrap();
            let loader = build(on_gpu().stream_as(&other, StreamUse::Releases));
            for batch in loader.epoch(0).unwrap() {
                default.read(&batch.unwrap());
            }
            drop(loader);
            assert!(default.found() == right());
            // A stream of a green context of the device.
            let green = session.green_stream();
            let bind = |consumer: &mut Consumer, batch: &Batch| {
                // SAFETY: the stream lives as long as the session.
                batch.bind(unsafe { Stream::from_raw(green) }).unwrap();
                batch.bind(Stream::from(&consumer.stream)).unwrap();
                consumer.read(batch);
            };
            reads(1, |_| on_gpu(), bind);
            // SAFETY: no batch is bound to it any more.
            unsafe { cudarc::driver::result::stream::destroy(green as _) }.unwrap();
        });
    }
}

/// Takes and drops batches while the consumer's stream is stopped; then the stream continues.
fn reads_late(builder: LoaderBuilder, take: usize, read: impl Fn(&mut Consumer, &Batch)) {
    let mut consumer = Consumer::new();
    let loader = build(builder);
    let gate = Gate::close();
    consumer.kernels.wait(&consumer.stream);
    let mut epoch = loader.epoch(0).unwrap();
    for _ in 0..take {
        read(&mut consumer, &epoch.next().unwrap().unwrap());
    }
    gate.open();
    for batch in epoch {
        read(&mut consumer, &batch.unwrap());
    }
    drop(loader);
    assert!(consumer.found() == right());
}

#[test]
fn a_dropped_batch_is_not_overwritten_under_its_readers() {
    for config in [config(), late()] {
        case(config, |_| {
            // One per buffer, and one per slot for copies that wait for the consumer.
            reads_late(
                on_gpu().tuning(|t| t.device_batches(2).slots(4)),
                4,
                Consumer::read_slice,
            );
            reads_late(
                on_gpu().tuning(|t| t.device_batches(3).slots(2)),
                3,
                Consumer::read_slice,
            );
            reads_late(
                on_gpu().tuning(|t| t.device_batches(6)),
                6,
                Consumer::read_slice,
            );
        });
    }
}

#[test]
fn memory_waits_for_all_where_a_stream_cannot_record() {
    for symbol in ["cuEventRecord", "cuEventCreate", "cuCtxPushCurrent_v2"] {
        case(config(), move |session| {
            let mut consumer = Consumer::new();
            let further: Vec<_> = (0..60)
                .map(|_| consumer.context.new_stream().unwrap())
                .collect();
            let loader = build(on_gpu().tuning(|t| t.device_batches(2).slots(2)));
            let gate = Gate::close();
            consumer.kernels.wait(&consumer.stream);
            let mut epoch = loader.epoch(0).unwrap();
            let first = epoch.next().unwrap().unwrap();
            // So many streams need events that do not exist yet.
            further
                .iter()
                .for_each(|stream| first.bind(Stream::from(stream)).unwrap());
            consumer.read_slice(&first);
            // No other call is made meanwhile: every buffer of the device has a batch.
            let second = epoch.next().unwrap().unwrap();
            until("nothing is in flight", || {
                let calls = session.calls();
                std::thread::sleep(Duration::from_millis(5));
                session.calls() == calls
            });
            session.fail_named(symbol, session.count(symbol), 2, false);
            drop(first);
            consumer.read_slice(&second);
            drop(second);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    gate.open();
                });
                for batch in epoch {
                    consumer.read_slice(&batch.unwrap());
                }
            });
            drop(loader);
            assert!(consumer.found() == right(), "{symbol}");
        });
    }
}

#[test]
fn batches_may_be_dropped_on_other_threads_in_any_order() {
    case(late(), |_| {
        let mut consumer = Consumer::new();
        let loader = build(
            on_gpu()
                .stream(&consumer.stream)
                .tuning(|t| t.device_batches(4)),
        );
        let (send, dropper) = std::sync::mpsc::sync_channel::<Batch>(1);
        let thread = std::thread::spawn(move || {
            let mut held = Vec::new();
            while let Ok(batch) = dropper.recv() {
                held.push(batch);
                if held.len() == 2 {
                    held.reverse();
                    held.clear();
                }
            }
        });
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            consumer.read(&batch);
            send.send(batch).unwrap();
        }
        drop(send);
        thread.join().unwrap();
        drop(loader);
        assert!(consumer.found() == right());
    });
}

#[test]
fn batches_outlive_the_iterator_the_loader_and_the_device() {
    case(late(), |session: &mut Session| {
        let mut consumer = Consumer::new();
        let device = gpu(0);
        let loader = build(
            data()
                .device(device.clone())
                .tuning(|t| t.device_batches(3)),
        );
        let mut epoch = loader.epoch(0).unwrap();
        let batches: Vec<_> = epoch.by_ref().take(3).map(Result::unwrap).collect();
        drop((epoch, loader, device));
        assert_eq!(session.live().allocations, 3);
        let found: Vec<_> = batches
            .iter()
            .map(|batch| batch.field("record").unwrap().to_vec::<u8>().unwrap())
            .collect();
        assert!(found == right()[..3]);
        // Dropped before the consumer's work has begun.
        let gate = Gate::close();
        consumer.kernels.wait(&consumer.stream);
        batches.iter().for_each(|batch| consumer.read_slice(batch));
        let thread = std::thread::spawn(move || drop(batches));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(
            session.live().allocations,
            6,
            "nothing is freed under the consumer's work"
        );
        gate.open();
        thread.join().unwrap();
        assert!(consumer.found() == right()[..3]);
    });
}

/// Streams that order nothing on GPU 0.
fn foreign_streams() -> Vec<(&'static str, Arc<CudaStream>)> {
    let own = CudaContext::new(0).unwrap();
    let other = CudaContext::new(1).unwrap();
    vec![
        ("another context", other.new_stream().unwrap()),
        ("another context", other.default_stream()),
        // It is another stream on every thread, and any thread may drop a batch.
        ("per-thread default stream", own.per_thread_stream()),
    ]
}

#[test]
fn a_stream_that_could_not_order_anything_is_refused() {
    case(config(), |_| {
        let loader = build(on_gpu());
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        for (words, stream) in foreign_streams() {
            let errors = [
                batch.bind(Stream::from(&stream)).unwrap_err(),
                batch
                    .field("record")
                    .unwrap()
                    .cuda_slice::<u8>(&stream)
                    .map(drop)
                    .unwrap_err(),
                on_gpu().stream(&stream).build().map(drop).unwrap_err(),
            ];
            for error in errors {
                assert_eq!(error.kind(), ErrorKind::Config, "{error}");
                assert!(error.to_string().contains(words), "{error}");
            }
        }
        assert!(batch.field("record").unwrap().to_vec::<u8>().unwrap() == right()[0]);
    });
}

#[test]
fn streams_mean_nothing_to_batches_on_the_host() {
    case(config(), |_| {
        let context = CudaContext::new(1).unwrap();
        let stream = context.new_stream().unwrap();
        let loader = build(data().stream(&stream));
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        batch.bind(Stream::from(&stream)).unwrap();
        batch.bind(Stream::legacy()).unwrap();
        let field = batch.field("record").unwrap();
        for error in [
            field.cuda_slice::<u8>(&stream).map(drop),
            field.device_ptr().map(drop),
            field.device_lens_ptr().map(drop),
        ] {
            let error = error.unwrap_err();
            assert_eq!(
                (error.kind(), error.stage()),
                (ErrorKind::Device, Stage::Batch)
            );
            assert!(
                error
                    .to_string()
                    .contains("`record` is on the host: use `as_slice`"),
                "{error}"
            );
        }
    });
}

#[test]
fn holding_every_device_batch_names_the_setting_to_raise() {
    case(late(), |_| {
        for most in [2, 5] {
            let loader = build(on_gpu().tuning(|t| {
                t.device_batches(most)
                    .slots(9)
                    .held_deadline(Duration::from_millis(1))
            }));
            let mut epoch = loader.epoch(0).unwrap();
            let mut held: Vec<_> = epoch.by_ref().take(most).map(Result::unwrap).collect();
            for _ in 0..2 {
                let error = epoch.next().unwrap().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::BatchesHeld);
                let words = format!(
                    "holds all {most} batches: drop one, or copy the data you need; `device_batches` sets"
                );
                assert!(error.to_string().contains(&words), "{error}");
            }
            held.remove(0);
            held.push(epoch.next().unwrap().unwrap());
            assert_eq!(
                epoch.next().unwrap().unwrap_err().kind(),
                ErrorKind::BatchesHeld
            );
            held.clear();
            assert!(
                Got::all(epoch)
                    .iter()
                    .map(|batch| batch.bytes("record"))
                    .eq(right()[most + 1..].iter())
            );
        }
    });
}

#[test]
fn slices_of_batches_on_a_device_say_where_the_bytes_are() {
    case(config(), |_| {
        let loader = build(on_gpu());
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        assert_eq!(batch.device().kind(), feedline::device::DeviceKind::Cuda(0));
        let field = batch.field("record").unwrap();
        for error in [
            field.as_slice::<u8>().map(drop),
            field.as_bytes().map(drop),
            field.row::<u8>(0).map(drop),
        ] {
            let error = error.unwrap_err();
            assert_eq!(
                (error.kind(), error.stage()),
                (ErrorKind::Device, Stage::Batch)
            );
            let words = "`record` is on cuda:0: use `device_ptr`, or copy it by `to_vec`";
            assert!(error.to_string().contains(words), "{error}");
        }
        let label = batch.field("label").unwrap();
        let context = CudaContext::new(0).unwrap();
        let wrong = [
            label.as_slice::<f32>().map(drop),
            label.to_vec::<u64>().map(drop),
            label
                .cuda_slice::<u8>(&context.new_stream().unwrap())
                .map(drop),
            label.read_into(&mut [0; 39]),
        ];
        for error in wrong {
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Shape);
        }
        let labels: Vec<u64> = label
            .to_vec::<i64>()
            .unwrap()
            .into_iter()
            .map(|label| label as u64)
            .collect();
        assert_eq!(labels, batch.ids());
        assert_eq!((label.dtype(), label.shape()), (DType::I64, vec![5]));
        let parts: Vec<Vec<i64>> = batch
            .micro(2)
            .unwrap()
            .map(|part| part.field("label").unwrap().to_vec().unwrap())
            .collect();
        assert_eq!(parts.concat().len(), 5);
        assert_eq!(
            parts[1]
                .iter()
                .map(|label| *label as u64)
                .collect::<Vec<_>>(),
            batch.ids()[3..]
        );
    });
}

#[test]
fn the_device_of_a_batch_is_the_requested_one() {
    case(config(), |_| {
        for ordinal in 0..3 {
            let loader = build(data().device(gpu(ordinal)));
            let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
            assert_eq!(*batch.device(), Device::cuda(ordinal).unwrap());
            assert!(loader.report().to_string().contains(&format!(
                "device    cuda:{ordinal} (Stand-in GPU, requested)"
            )));
        }
    });
}

#[test]
fn every_step_of_the_first_stream_is_on_a_track() {
    case(late(), |_| {
        let mut consumer = Consumer::new();
        let loader = build(on_gpu().stream(&consumer.stream));
        for batch in loader.epoch(0).unwrap() {
            consumer.read(&batch.unwrap());
            // So that its events are complete when the next batch is requested.
            consumer.stream.synchronize().unwrap();
        }
        // The first step does not count.
        until("the steps are measured", || {
            loader.snapshot().consumer.gpu.unwrap().steps == 11
        });
        let snapshot = loader.snapshot();
        let timeline = loader.timeline();
        let idle = snapshot.consumer.gpu.unwrap();
        let names: Vec<_> = timeline
            .tracks
            .iter()
            .map(|track| track.name.as_str())
            .collect();
        assert!(
            names.ends_with(&["copy stream", "stream of the consumer"]),
            "{names:?}"
        );
        let spans = &timeline.tracks.last().unwrap().spans;
        let of = |what: Work| {
            spans
                .iter()
                .filter(|span| span.what == what)
                .map(|span| span.end_ns - span.begin_ns)
                .sum::<u64>()
        };
        // A step whose place is corrected may cut off the step before it.
        assert!(
            of(Work::Starved) <= idle.starved_ns && of(Work::HostLate) <= idle.late_ns,
            "{idle:?} {spans:?}"
        );
        assert!(of(Work::Step) > 0, "{spans:?}");
        assert!(
            spans
                .windows(2)
                .all(|pair| pair[0].end_ns <= pair[1].begin_ns),
            "{spans:?}"
        );
        assert!(
            spans
                .iter()
                .all(|span| span.end_ns <= loader.snapshot().at_ns),
            "{spans:?}"
        );
        let copies = &timeline.tracks[timeline.tracks.len() - 2].spans;
        assert!(
            !copies.is_empty() && copies.iter().all(|span| span.what == Work::Copy),
            "{copies:?}"
        );
        drop(loader);
        assert!(consumer.found() == right());
    });
}
