//! Unusual but legal uses of device batches by safe code: all must work.

use crate::common::cuda::*;
use crate::common::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::{Epoch, ErrorKind, Loader, LoaderBuilder, Order};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

fn data() -> LoaderBuilder {
    let records = Records::builder(500)
        .classes((0..160).collect())
        .open_bytes(noise(160 * 500, 3))
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(2))
        .batch_size(4)
}

#[test]
fn a_stream_that_is_dropped_after_its_batch_is_not_used_again() {
    case(late(), |session| {
        let loader = build(data().device(gpu(0)));
        let context = CudaContext::new(0).unwrap();
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            let stream = context.new_stream().unwrap();
            batch.bind(Stream::from(&stream)).unwrap();
            drop(batch);
            drop(stream);
        }
        let trace = session.trace();
        let failed: Vec<_> = trace
            .lines()
            .filter(|line| !line.ends_with("= 0") && !line.ends_with("= 600"))
            .collect();
        assert_eq!(failed, [""; 0]);
    });
}

#[test]
fn polling_while_holding_everything_is_an_error() {
    case(config(), |_| {
        let builder = data().tuning(|t| {
            t.device_batches(2)
                .held_deadline(Duration::from_millis(200))
        });
        let loader = build(builder.device(gpu(0)));
        let mut epoch = loader.epoch(0).unwrap();
        let _held: Vec<_> = epoch.by_ref().take(2).map(Result::unwrap).collect();
        until("it is told", || match epoch.next_within(Duration::ZERO) {
            Poll::Ready(next) => next.unwrap().unwrap_err().kind() == ErrorKind::BatchesHeld,
            Poll::Pending => false,
        });
    });
}

#[test]
fn a_thousand_abandoned_epochs_leave_no_drift_while_others_look() {
    case(config(), |_| {
        let loader = build(
            data()
                .device(gpu(0))
                .tuning(|t| t.device_batches(2).slots(1))
                .workers(4),
        );
        loader.ready().unwrap();
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    let seen = loader.snapshot();
                    assert!(seen.slots.full_ns < 1 << 50 && seen.decode.busy_ns < 1 << 50);
                    let _ = (loader.timeline(), loader.report().to_string());
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            for round in 0..1000_u64 {
                let mut epoch = loader.epoch(round).unwrap();
                for _ in 0..round % 4 {
                    let batch = epoch.next().unwrap().unwrap();
                    if round % 3 == 0 {
                        scope.spawn(move || drop(batch));
                    }
                }
                if round % 5 == 0 {
                    assert!(!matches!(
                        epoch.next_within(Duration::ZERO),
                        Poll::Ready(Some(Err(_)))
                    ));
                }
            }
            end.store(true, Ordering::Relaxed);
        });
        same(
            &Got::epoch(&loader, 0),
            &Got::epoch(&build(data()), 0),
            "after all of them",
        );
        let seen = loader.snapshot();
        let slots = seen.slots;
        let decode = seen.decode;
        let copy = seen.copy.unwrap();
        let all = seen.steady_ns as f64;
        let sums = [
            (slots.free_ns + slots.filling_ns + slots.full_ns + slots.held_ns) as f64
                / f64::from(slots.count),
            (decode.busy_ns + decode.starved_ns + decode.ahead_ns) as f64
                / f64::from(decode.workers),
        ];
        // Each query takes some microseconds at both ends of an epoch, a visible part of a very
        // short one.
        assert!(
            sums.iter().all(|sum| (0.9..1.1).contains(&(sum / all))),
            "{sums:?} of {all}"
        );
        // Kernels and handing over have no state of the copy stage.
        assert!(
            (copy.busy_ns + copy.starved_ns + copy.blocked_ns) as f64 / all < 1.1,
            "{copy:?} of {all}"
        );
    });
}

#[test]
fn the_last_iterator_is_dropped_in_its_own_map() {
    case(config(), |_| {
        let last: Arc<Mutex<Option<Epoch>>> = Arc::default();
        let theirs = last.clone();
        let loader = build(data().device(gpu(0)).workers(2).map(move |_, _| {
            let epoch = theirs.lock().unwrap().take();
            drop(epoch);
            Ok(())
        }));
        // Every row waits until the loader is gone; the first one then drops the iterator, on a
        // worker.
        let mut place = last.lock().unwrap();
        *place = Some(loader.epochs(0..).unwrap());
        drop(loader);
        drop(place);
        until("threads end", || loader_threads().is_empty());
        assert!(last.lock().unwrap().is_none());
    });
}
