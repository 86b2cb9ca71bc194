#![allow(unsafe_code)]

use crate::common::cuda::*;
use crate::common::standin::Config;
use crate::common::*;
use cudarc::driver::{CudaContext, CudaStream, sys};
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::{Device, ErrorKind, Loader, LoaderBuilder, Order};
use std::sync::Arc;

const RECORD: usize = 900;

fn data() -> LoaderBuilder {
    let records = Records::builder(RECORD)
        .classes((0..60).collect())
        .open_bytes(noise(60 * RECORD, 4))
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(3))
        .batch_size(5)
}

/// A capture in the global mode, as in `torch.cuda.graph`.
struct Capture(Arc<CudaStream>);

impl Capture {
    fn begin(stream: &Arc<CudaStream>) -> Self {
        stream.context().bind_to_thread().unwrap();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is alive.
        let code = unsafe { sys::cuStreamBeginCapture_v2(stream.cu_stream(), mode) };
        assert_eq!(code as u32, 0);
        Self(stream.clone())
    }

    /// The driver's answer: 0 for a graph, 901 when some call has invalidated the capture.
    fn end(self) -> u32 {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive, the pointer valid for the call; the graph is destroyed once.
        unsafe {
            let code = sys::cuStreamEndCapture(self.0.cu_stream(), &mut graph) as u32;
            if code == 0 {
                assert_eq!(sys::cuGraphDestroy(graph) as u32, 0);
            }
            code
        }
    }
}

/// A context, and a stream of it.
fn stream() -> (Arc<CudaContext>, Arc<CudaStream>) {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: nothing was made in this context yet, and batches are ordered by their streams.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    (context, stream)
}

#[test]
fn the_mode_of_captures_may_need_a_context() {
    case(
        Config {
            mode_in_context: true,
            ..config()
        },
        |_| {
            let right = Got::epoch(&build(data()), 0);
            let before = leaked();
            let loader = build(data().device(gpu(0)).tuning(|t| t.slots(3)));
            same(&Got::epoch(&loader, 0), &right, "with a context first");
            drop(loader);
            assert_eq!(leaked(), before);
        },
    );
}

#[test]
fn a_loader_continues_if_a_capture_refuses_its_calls() {
    case(config(), |session| {
        let right = Got::epoch(&build(data()), 0);
        let before = leaked();
        for symbol in [
            "cuEventQuery",
            "cuStreamSynchronize",
            "cuMemHostRegister_v2",
            "cuMemHostUnregister",
            "cuMemFree_v2",
        ] {
            for code in [900, 901, 906] {
                let first = session.count(symbol);
                (first..first + 8).for_each(|nth| session.fail_named(symbol, nth, code, false));
                let loader = build(data().device(gpu(0)).tuning(|t| t.slots(3)));
                same(&Got::epoch(&loader, 0), &right, symbol);
                drop(loader);
                assert_eq!(leaked(), before, "{symbol}, {code}");
            }
        }
    });
}

#[test]
fn a_captured_stream_is_refused_and_keeps_its_capture() {
    case(config(), |_| {
        let (_context, stream) = stream();
        let right = Got::epoch(&build(data()), 0);
        let loader = build(data().device(gpu(0)));
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        let capture = Capture::begin(&stream);
        let error = batch.bind(Stream::from(&stream)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(
            error.message().contains("while a CUDA graph is captured"),
            "{error}"
        );
        assert!(
            batch
                .field("record")
                .unwrap()
                .cuda_slice::<u8>(&stream)
                .is_err()
        );
        assert_eq!(capture.end(), 0);
        batch.bind(Stream::from(&stream)).unwrap();
        let capture = Capture::begin(&stream);
        assert_eq!(
            batch
                .field("record")
                .unwrap()
                .to_vec::<u8>()
                .unwrap_err()
                .kind(),
            ErrorKind::Config
        );
        assert_eq!(capture.end(), 0);
        assert_eq!(Got::of(&batch).unwrap(), right[0]);
    });
}

/// Of a bare handle: a stream that comes with its owner is never asked for its context.
#[test]
fn a_stream_is_asked_for_a_capture_before_its_context() {
    const QUESTIONS: [&str; 2] = ["cuStreamIsCapturing", "cuStreamGetCtx"];
    case(config(), |session| {
        let (_context, stream) = stream();
        let loader = build(data().device(gpu(0)));
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        let asked = |ask: &dyn Fn()| {
            let first = session.calls() as usize;
            ask();
            let trace = session.trace();
            let calls = trace
                .lines()
                .skip(first)
                .map(|line| line.split(' ').nth(2).unwrap().to_string());
            calls
                .filter(|call| QUESTIONS.contains(&call.as_str()))
                .collect::<Vec<_>>()
        };
        let capture = Capture::begin(&stream);
        let refused = || {
            assert_eq!(
                batch.bind(bare(&stream)).unwrap_err().kind(),
                ErrorKind::Config
            )
        };
        assert_eq!(asked(&refused), QUESTIONS[..1]);
        assert_eq!(asked(&|| loader.mark_on(bare(&stream))), QUESTIONS[..1]);
        assert_eq!(capture.end(), 0);
        assert_eq!(asked(&|| batch.bind(bare(&stream)).unwrap()), QUESTIONS);
        drop(batch);
    });
}

#[test]
fn next_during_a_capture_of_its_stream_loses_no_batch() {
    case(config(), |_| {
        let (_context, stream) = stream();
        let right = Got::epoch(&build(data()), 0);
        let loader = build(data().device(gpu(0)).stream(&stream));
        let mut epoch = loader.epoch(0).unwrap();
        let mut found = Vec::new();
        for _ in 0..3 {
            found.push(Got::of(&epoch.next().unwrap().unwrap()).unwrap());
            let capture = Capture::begin(&stream);
            assert_eq!(epoch.next().unwrap().unwrap_err().kind(), ErrorKind::Config);
            assert_eq!(capture.end(), 0);
        }
        found.extend(Got::all(epoch));
        same(&found, &right, "after the captures");
    });
}

#[test]
fn a_batch_dropped_in_a_capture_does_not_poison_its_buffer() {
    for count in [1, 2] {
        case(config(), move |session| {
            let (context, first) = stream();
            let streams = &[first, context.new_stream().unwrap()][..count];
            let right = Got::epoch(&build(data()), 0);
            let before = leaked();
            let builder = data().device(gpu(0)).tuning(|t| t.device_batches(2));
            let loader = build(streams.iter().fold(builder, LoaderBuilder::stream));
            let mut epoch = loader.epoch(0).unwrap();
            let mut found = Vec::new();
            for _ in 0..4 {
                let batch = epoch.next().unwrap().unwrap();
                found.push(Got::of(&batch).unwrap());
                let captures: Vec<_> = streams.iter().map(Capture::begin).collect();
                drop(batch);
                // Long enough for the loader to look at the buffer.
                let asked = session.count("cuStreamIsCapturing");
                until("the loader has asked for the stream", || {
                    session.count("cuStreamIsCapturing") > asked + 1
                });
                let waited = session.count("cuCtxSynchronize");
                captures
                    .into_iter()
                    .for_each(|capture| assert_eq!(capture.end(), 0, "it was invalidated"));
                // A capture that begins between the loader's look at the streams and its wait for
                // the context would end.
                until("the loader has waited for the context", || {
                    session.count("cuCtxSynchronize") > waited
                });
            }
            found.extend(Got::all(epoch));
            same(&found, &right, "after the captures");
            drop(loader);
            assert_eq!(leaked(), before);
        });
    }
}

#[test]
fn a_batch_of_a_gone_loader_is_freed_after_the_capture() {
    case(config(), |session| {
        let (_context, stream) = stream();
        let loader = build(data().device(Device::cuda(0).unwrap()).stream(&stream));
        let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
        drop(loader);
        let capture = Capture::begin(&stream);
        drop(batch);
        assert_eq!(session.live().allocations, 1, "its stream may still use it");
        assert_eq!(capture.end(), 0);
        until("the buffer is freed", || session.live().allocations == 0);
    });
}
