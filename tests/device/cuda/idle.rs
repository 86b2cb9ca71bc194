use crate::common::cuda::*;
use crate::common::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::Finish;
use feedline::device::cuda::Stream;
use feedline::profile::snapshot::{GpuIdle, Unmeasured};
use feedline::tensor::DType;
use feedline::{Loader, LoaderBuilder};
use std::task::Poll;
use std::time::Duration;

const BATCHES: u64 = 60;

fn data() -> LoaderBuilder {
    let records = Records::builder(64)
        .open_bytes(noise(BATCHES as usize * 4 * 64, 3))
        .unwrap();
    Loader::builder(records).batch_size(4).device(gpu(0))
}

fn idle(loader: &Loader) -> GpuIdle {
    loader.snapshot().consumer.gpu.unwrap()
}

/// Waits until so many steps are measured: their marks are on two streams, which the device runs as
/// it likes.
fn measured(loader: &Loader, steps: u64) {
    until("the steps are measured", || idle(loader).steps >= steps);
    assert_eq!(idle(loader).steps, steps);
}

#[test]
fn every_step_but_the_first_is_measured_on_a_late_stream() {
    for (slots, buffers) in [(24, 20), (3, 2), (2, 24)] {
        case(config(), move |_| {
            let context = CudaContext::new(0).unwrap();
            let stream = context.new_stream().unwrap();
            let kernels = Kernels::new(&context);
            let loader = build(
                data()
                    .stream(&stream)
                    .tuning(|t| t.slots(slots).device_batches(buffers)),
            );
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
                measured(&loader, (epoch + 1) * (BATCHES - 1));
            }
        });
    }
}

#[test]
fn the_wait_for_a_first_batch_is_no_starvation() {
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
            let GpuIdle {
                steps,
                starved_ns,
                late_ns,
                ..
            } = idle(&loader);
            assert_eq!((steps, starved_ns, late_ns), (0, 0, 0));
        }
    });
}

#[test]
fn the_host_is_late_while_a_batch_is_bound_to_no_stream() {
    const LATE: Duration = Duration::from_millis(30);
    case(config(), |_| {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let loader = build(data());
        let mut batches = loader.epoch(0).unwrap();
        for step in 0..4_u32 {
            let batch = batches.next().unwrap().unwrap();
            until("its copy is done", || {
                loader.snapshot().copy.unwrap().latency.count > u64::from(step)
            });
            // Twice: the stand-in's stream may reach the copy's event some time after its count.
            std::thread::sleep(2 * LATE);
            batch.bind(Stream::from(&stream)).unwrap();
            drop(batch);
            stream.synchronize().unwrap();
            measured(&loader, u64::from(step));
            assert!(
                Duration::from_nanos(idle(&loader).late_ns) >= step * LATE,
                "{:?}",
                idle(&loader)
            );
        }
    });
}

#[test]
fn bare_handles_are_measured_and_not_used_after_the_drop() {
    case(config(), |session| {
        let context = CudaContext::new(0).unwrap();
        let loader = build(data());
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            let stream = context.new_stream().unwrap();
            batch.bind(bare(&stream)).unwrap();
            drop(batch);
        }
        measured(&loader, BATCHES - 1);
        assert_eq!(idle(&loader).unmeasured, Unmeasured::default());
        assert!(
            !session.trace().contains(" = 400"),
            "a stream was used after its end"
        );
    });
}

#[test]
fn work_behind_a_dropped_bare_handle_is_not_starvation() {
    const STEP: Duration = Duration::from_secs(1);
    case(config(), |_| {
        let context = CudaContext::new(0).unwrap();
        let kernels = Kernels::new(&context);
        let stream = context.new_stream().unwrap();
        let loader = build(data());
        let mut batches = loader.epoch(0).unwrap();
        for step in 0..3 {
            let batch = batches.next().unwrap().unwrap();
            batch.bind(bare(&stream)).unwrap();
            let gate = Gate::close();
            kernels.wait(&stream);
            drop(batch);
            // Requested while the stream still works on the step, and ready before the step ends.
            let next = batches.next().unwrap().unwrap();
            next.bind(bare(&stream)).unwrap();
            std::thread::sleep(STEP);
            gate.open();
            stream.synchronize().unwrap();
            let GpuIdle {
                starved_ns,
                late_ns,
                ..
            } = idle(&loader);
            assert!(
                u128::from(starved_ns + late_ns) < STEP.as_nanos(),
                "step {step}: {starved_ns} {late_ns}"
            );
        }
    });
}

#[test]
fn a_step_waits_for_its_request_on_another_stream() {
    case(config(), |_| {
        let context = CudaContext::new(0).unwrap();
        let kernels = Kernels::new(&context);
        let late = context.new_stream().unwrap();
        let other = context.new_stream().unwrap();
        let loader = build(data());
        let mut batches = loader.epoch(0).unwrap();
        let first = batches.next().unwrap().unwrap();
        first.bind(Stream::from(&late)).unwrap();
        let gate = Gate::close();
        kernels.wait(&late);
        // Requested on the late stream, which outlives its batch, and bound to the other one.
        let second = batches.next().unwrap().unwrap();
        second.bind(Stream::from(&other)).unwrap();
        other.synchronize().unwrap();
        let before = idle(&loader);
        assert_eq!(
            (before.steps, before.unmeasured),
            (0, Unmeasured::default())
        );
        gate.open();
        measured(&loader, 1);
        assert_eq!(idle(&loader).unmeasured, Unmeasured::default());
        drop((first, second));
    });
}

#[test]
fn batches_dropped_unbound_are_counted_as_not_measured() {
    case(config(), |_| {
        let loader = build(data());
        assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
        let GpuIdle {
            steps,
            starved_ns,
            late_ns,
            unmeasured,
            ..
        } = idle(&loader);
        assert_eq!((steps, starved_ns, late_ns), (0, 0, 0));
        assert_eq!(
            (unmeasured.no_stream, unmeasured.no_event),
            (BATCHES - 1, 0)
        );
    });
}

#[test]
fn a_refused_question_loses_its_steps_but_no_event() {
    // Not a query about captures, which is repeated.
    const INVALID_VALUE: u32 = 1;
    case(config(), |session| {
        let context = CudaContext::new(0).unwrap();
        let kernels = Kernels::new(&context);
        let stream = context.new_stream().unwrap();
        let loader = build(
            data()
                .stream(&stream)
                .tuning(|t| t.slots(6).device_batches(6)),
        );
        loader.ready().unwrap();
        // More steps than events.
        for round in 1..=6 {
            let gate = Gate::close();
            kernels.wait(&stream);
            let mut batches = loader.steps(5).unwrap();
            (0..5).for_each(|_| drop(batches.next().unwrap().unwrap()));
            // The copying thread may ask before this one; it only loses the time of a copy.
            until("the steps are lost", || {
                session.fail_named(
                    "cuEventQuery",
                    session.count("cuEventQuery"),
                    INVALID_VALUE,
                    false,
                );
                idle(&loader).unmeasured.no_event == 4 * round
            });
            // A failure that nobody has met yet is met here.
            let _ = stream.record_event(None).unwrap().is_complete();
            gate.open();
            stream.synchronize().unwrap();
        }
        assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
        measured(&loader, BATCHES - 1);
    });
}

#[test]
fn operations_on_the_device_have_a_time_of_their_own() {
    case(late(), |session| {
        if !crate::common::doubles::with_kernels(session) {
            return println!("skipped: no kernels");
        }
        let records = Records::builder(16).field("image", DType::U8, [2, 2, 4]);
        for (name, finishes) in [("none", false), ("finish", true)] {
            let records = records
                .clone()
                .open_bytes(noise(BATCHES as usize * 4 * 16, 3))
                .unwrap();
            let builder = Loader::builder(records).batch_size(4).device(gpu(0));
            let loader = build(if finishes {
                builder.finish("image", Finish::to(DType::F32))
            } else {
                builder
            });
            assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
            let copy = loader.snapshot().copy.unwrap();
            assert!(copy.busy_ns > 0, "{name}");
            // Each takes 200 µs at least.
            assert_eq!(
                copy.ops_ns > 10 * 200_000,
                finishes,
                "{name}: {}",
                copy.ops_ns
            );
        }
    });
}
