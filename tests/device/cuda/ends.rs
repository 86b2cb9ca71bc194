use crate::common::cuda::*;
use crate::common::standin::{self, Live, Session};
use crate::common::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::{Loader, LoaderBuilder, Order};
use std::time::Duration;

fn data() -> LoaderBuilder {
    let records = Records::builder(5000)
        .open_bytes(noise(60 * 5000, 3))
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(2))
        .batch_size(5)
}

/// Lets the device continue in a moment, from another thread, while `body` runs.
fn released_soon<T>(session: &Session, body: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(3));
            standin::cuda().hold(false);
        });
        let value = body();
        session.hold(false);
        value
    })
}

/// Slots, device batches.
const SIZES: [(usize, usize); 4] = [(4, 3), (1, 2), (2, 5), (8, 2)];

#[test]
fn a_dropped_iterator_makes_room_for_the_next_epoch() {
    case(config(), |session| {
        let right = Got::epoch(&build(data()), 1);
        for (slots, buffers) in SIZES {
            let loader = build(
                data()
                    .device(gpu(0))
                    .tuning(|t| t.slots(slots).device_batches(buffers)),
            );
            for taken in 0..12 {
                // The device is stopped before the first batch, or from here on.
                for late in [false, true] {
                    session.hold(!late);
                    let can = if late {
                        taken
                    } else {
                        taken.min(slots).min(buffers)
                    };
                    let mut epoch = loader.epoch(0).unwrap();
                    let held: Vec<_> = epoch
                        .by_ref()
                        .take(can)
                        .map(Result::unwrap)
                        .skip(can.saturating_sub(1))
                        .collect();
                    session.hold(true);
                    drop(epoch);
                    let next = loader.epoch(1).unwrap();
                    drop(held);
                    let found = released_soon(session, || Got::all(next));
                    same(
                        &found,
                        &right,
                        &format!("{slots} slots, {buffers} buffers, {taken} taken, {late}"),
                    );
                }
            }
        }
    });
}

#[test]
fn a_loader_dropped_with_copies_in_flight_leaks_nothing() {
    case(config(), |session| {
        for (slots, buffers) in SIZES {
            for taken in [0, 1, 2, 5, 11, 12] {
                for order in 0..4 {
                    let loader = build(
                        data()
                            .device(gpu(0))
                            .tuning(|t| t.slots(slots).device_batches(buffers)),
                    );
                    let mut epoch = loader.epoch(0).unwrap();
                    let kept: Vec<_> = epoch
                        .by_ref()
                        .take(taken)
                        .map(Result::unwrap)
                        .skip(taken.saturating_sub(1))
                        .collect();
                    session.hold(true);
                    released_soon(session, || match order {
                        0 => drop((epoch, loader, kept)),
                        1 => drop((loader, epoch, kept)),
                        2 => drop((kept, loader, epoch)),
                        _ => {
                            drop(epoch);
                            let again = loader.epoch(1).unwrap();
                            drop((loader, kept, again));
                        }
                    });
                    // A batch that outlives its loader is freed by a thread.
                    soon(|| session.live() == Live::default());
                    assert_eq!(
                        session.live(),
                        Live::default(),
                        "{slots} slots, {buffers} buffers, {taken}, {order}"
                    );
                }
            }
        }
    });
}

#[test]
fn a_stopped_consumer_stream_only_delays_the_loaders_end() {
    case(config(), |session| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::new(&context);
        let loader = build(data().device(gpu(0)).stream(&stream));
        let gate = Gate::close();
        kernels.wait(&stream);
        let mut epoch = loader.epoch(0).unwrap();
        for _ in 0..4 {
            drop(epoch.next().unwrap().unwrap());
        }
        drop(epoch);
        let allocations = session.live().allocations;
        let thread = std::thread::spawn(move || drop(loader));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(
            session.live().allocations,
            allocations,
            "the stream may still use them"
        );
        gate.open();
        thread.join().unwrap();
        assert_eq!(session.live().allocations, 0);
    });
}

#[test]
fn dropping_a_batch_after_its_loader_does_not_wait() {
    case(config(), |session| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::new(&context);
        for tensors in [false, true] {
            let before = leaked();
            let loader = build(data().device(gpu(0)).stream(&stream));
            let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
            drop(loader);
            until("prefetched batches are freed", || {
                session.live().allocations == 1
            });
            let gate = Gate::close();
            kernels.wait(&stream);
            // On this thread, which alone can open the gate.
            if tensors {
                drop(batch.into_dlpack())
            } else {
                drop(batch)
            }
            assert_eq!(session.live().allocations, 1, "the stream may still use it");
            gate.open();
            until("the buffer is freed", || session.live().allocations == 0);
            until("its thread has ended", || loader_threads().is_empty());
            assert_eq!(leaked(), before);
        }
    });
}

#[test]
fn a_dead_device_does_not_block_the_loaders_end_for_ever() {
    case(config(), |session| {
        let loader = build(data().device(gpu(0)));
        let before = leaked();
        session.hold(true);
        drop(loader.epoch(0).unwrap().next().unwrap().unwrap());
        // Some seconds, see the limit in the runtime.
        drop(loader);
        assert!(
            leaked() > before,
            "the thread that copies was left behind with the workers that it can reach, and counted"
        );
        assert!(
            session.live().allocations > 0,
            "nothing is freed under a copy"
        );
        session.hold(false);
        until("everything is given back", || {
            session.live() == Live::default()
        });
        until("its thread has ended", || loader_threads().is_empty());
    });
}
