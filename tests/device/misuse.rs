//! Unusual but legal uses of device batches by safe code: all must work.
#![allow(unsafe_code)]

use crate::common::cuda::*;
use crate::common::standin::Session;
use crate::common::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::cuda::{Stream, cudarc};
use feedline::{ErrorKind, Loader, LoaderBuilder, Order};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

fn data() -> LoaderBuilder {
    let records = Records::builder(500).classes((0..160).collect()).open_bytes(noise(160 * 500, 3)).unwrap();
    Loader::builder(records).order(Order::shuffled(2)).batch_size(4)
}

/// The first violations of the order of accesses, and calls that failed.
fn wrong(session: &mut Session) -> Vec<String> {
    let violations = session.expect_violations().into_iter().take(3).collect::<Vec<_>>();
    let trace = session.trace();
    let failed = trace.lines().filter(|line| !line.ends_with("= 0") && !line.ends_with("= 600")).take(5);
    violations.into_iter().chain(failed.map(str::to_string)).collect()
}

/// Safe code only: a stream of its own per batch, dropped after the batch.
#[test]
fn a_stream_that_is_dropped_after_its_batch_is_not_used_again() {
    case(late(), |session| {
        let loader = build(data().device(gpu(0)));
        let context = CudaContext::new(0).unwrap();
        let mut epoch = loader.epoch(0).unwrap();
        let mut seen = 0;
        for batch in epoch.by_ref() {
            let batch = batch.unwrap();
            let stream = context.new_stream().unwrap();
            batch.bind(Stream::from(&stream)).unwrap();
            drop(batch);
            drop(stream);
            seen += 1;
        }
        assert_eq!(seen, 40);
        let wrong = wrong(session);
        drop(epoch);
        drop(loader);
        drop(context);
        assert!(wrong.is_empty(), "{wrong:?}");
    });
}

/// A caller that polls without waiting and holds every batch gets an error after the deadline.
#[test]
fn polling_while_holding_everything_is_an_error() {
    case(config(), |_| {
        let loader =
            build(data().device(gpu(0)).tuning(|t| t.device_batches(2).held_deadline(Duration::from_millis(200))));
        let mut epoch = loader.epoch(0).unwrap();
        let held: Vec<_> = epoch.by_ref().take(2).map(|b| b.unwrap()).collect();
        let began = Instant::now();
        let mut told = None;
        while began.elapsed() < DEADLINE / 4 {
            match epoch.next_within(Duration::ZERO) {
                Poll::Ready(Some(Err(error))) => {
                    told = Some((error.kind(), began.elapsed()));
                    break;
                }
                Poll::Ready(other) => panic!("{other:?}"),
                Poll::Pending => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        drop((held, epoch, loader));
        assert_eq!(told.map(|(kind, _)| kind), Some(ErrorKind::BatchesHeld), "long after the deadline");
    });
}

fn sums(loader: &Loader, what: &str) {
    let s = loader.snapshot();
    let slots = s.slots.free_ns + s.slots.filling_ns + s.slots.full_ns + s.slots.held_ns;
    let decode = s.decode.busy_ns + s.decode.starved_ns + s.decode.ahead_ns;
    let copy = s.copy.as_ref().map_or(0, |c| c.busy_ns + c.starved_ns + c.blocked_ns);
    let steady = s.steady_ns as f64;
    let ratios = (
        slots as f64 / steady / f64::from(s.slots.count),
        decode as f64 / steady / f64::from(s.decode.workers),
        copy as f64 / steady,
    );
    eprintln!(
        "{what}: steady {} ms, slots {:.4}, decode {:.4}, copy {:.4}",
        s.steady_ns / 1_000_000,
        ratios.0,
        ratios.1,
        ratios.2
    );
    // Kernels and handing over have no state of the copy stage.
    assert!(ratios.2 < 1.1, "{what}: copy {}", ratios.2);
    for (name, ratio) in [("slots", ratios.0), ("decode", ratios.1)] {
        // Each query takes some microseconds at both ends of an epoch, a visible part of a very short one.
        assert!(ratio == 0.0 || (0.9..1.1).contains(&ratio), "{what}: {name} {ratio}");
    }
}

#[test]
fn a_thousand_abandoned_epochs_leave_no_drift_while_others_look() {
    case(config(), |_| {
        let loader = Arc::new(build(data().device(gpu(0)).tuning(|t| t.device_batches(2).slots(1)).workers(4)));
        loader.ready().unwrap();
        let end = Arc::new(AtomicBool::new(false));
        let looks: Vec<_> = (0..2)
            .map(|_| {
                let (loader, end) = (loader.clone(), end.clone());
                std::thread::spawn(move || {
                    while !end.load(Ordering::Relaxed) {
                        let s = loader.snapshot();
                        assert!(s.slots.full_ns < 1 << 50 && s.decode.busy_ns < 1 << 50);
                        let _ = (loader.timeline(), loader.report().to_string());
                        std::thread::sleep(Duration::from_millis(1));
                    }
                })
            })
            .collect();
        let mut droppers = Vec::new();
        for round in 0..1000_u64 {
            let mut epoch = loader.epoch(round).unwrap();
            for _ in 0..round % 4 {
                let batch = epoch.next().unwrap().unwrap();
                if round % 3 == 0 {
                    droppers.push(std::thread::spawn(move || drop(batch)));
                }
            }
            if round % 5 == 0 {
                assert!(!matches!(epoch.next_within(Duration::ZERO), Poll::Ready(Some(Err(_)))));
            }
        }
        end.store(true, Ordering::Relaxed);
        looks.into_iter().chain(droppers).for_each(|t| t.join().unwrap());
        let mut batches = 0;
        loader.epoch(0).unwrap().for_each(|batch| {
            batch.unwrap();
            batches += 1;
        });
        assert_eq!(batches, 40);
        sums(&loader, "abandoned");
        // Dropped elsewhere.
        std::thread::spawn(move || drop(loader)).join().unwrap();
    });
}

/// Many workers on few cores: they read the clock and change the pool's word in different orders.
#[test]
fn the_time_of_workers_adds_up_when_they_crowd() {
    let records = Records::builder(16).classes((0..400_000).collect()).open_bytes(noise(400_000 * 16, 3)).unwrap();
    let loader = build(Loader::builder(records).batch_size(16).workers(48).tuning(|t| t.slots(32)));
    for epoch in 0..2 {
        assert!(loader.epoch(epoch).unwrap().all(|b| b.is_ok()));
    }
    sums(&loader, "crowd");
}

struct Sent(std::ptr::NonNull<feedline::dlpack::DLManagedTensorVersioned>);
// SAFETY: the struct may be deleted on any thread; that is what the test is about.
unsafe impl Send for Sent {}

/// Tensors outlive the loader, before and after bind, and are dropped on other threads in odd orders.
#[test]
fn tensors_go_after_the_loader_on_other_threads() {
    case(late(), |_| {
        for round in 0..30 {
            let loader = build(data().device(gpu(0)).tuning(|t| t.device_batches(3)));
            let context = CudaContext::new(0).unwrap();
            let stream = context.new_stream().unwrap();
            let batches: Vec<_> = loader.epoch(0).unwrap().take(3).map(|b| b.unwrap()).collect();
            let dropping = if round % 2 == 0 {
                drop(loader);
                None
            } else {
                Some(std::thread::spawn(move || drop(loader)))
            };
            let mut all = Vec::new();
            for (at, batch) in batches.into_iter().enumerate() {
                let tensors = batch.into_dlpack();
                for (_, tensor) in tensors.fields.into_iter().chain([("ids".into(), tensors.ids)]) {
                    if at != 1 {
                        // SAFETY: the stream outlives the tensors.
                        unsafe { tensor.bind(stream.cu_stream() as usize) }.unwrap();
                    }
                    if at == 2 {
                        drop(tensor);
                        continue;
                    }
                    all.push(Sent(tensor.into_versioned()));
                }
            }
            if round % 3 == 0 {
                all.reverse();
            }
            let threads: Vec<_> = all
                .into_iter()
                .map(|sent| {
                    std::thread::spawn(move || {
                        let sent = sent;
                        // SAFETY: the struct is ours, and its deleter is called once.
                        unsafe { (sent.0.as_ref().deleter.unwrap())(sent.0.as_ptr()) }
                    })
                })
                .collect();
            // Only now: until here the loader may go at the same time.
            threads.into_iter().chain(dropping).for_each(|t| t.join().unwrap());
            until("threads end", || loader_threads().is_empty());
            drop(stream);
        }
    });
}

/// A hundred streams, each bound often; then they go.
#[test]
fn a_hundred_streams() {
    case(late(), |_| {
        let loader = build(data().device(gpu(0)));
        let right = Got::epoch(&build(data()), 0);
        let context = CudaContext::new(0).unwrap();
        let first = context.new_stream().unwrap();
        let mut found = Vec::new();
        for batch in loader.epoch(0).unwrap() {
            let batch = batch.unwrap();
            batch.bind(Stream::from(&first)).unwrap();
            let streams: Vec<_> = (0..100).map(|_| context.new_stream().unwrap()).collect();
            for _ in 0..3 {
                for s in &streams {
                    batch.bind(Stream::from(s)).unwrap();
                }
            }
            found.push(Got::of(&batch).unwrap());
            drop(streams);
        }
        same(&found, &right, "hundred");
    });
}

/// The loader is dropped in its own map, on a worker.
#[test]
fn the_last_iterator_is_dropped_in_its_own_map() {
    case(config(), |_| {
        let slot: Arc<std::sync::Mutex<Option<feedline::Epoch>>> = Arc::default();
        let (theirs, went) = (slot.clone(), Arc::new(AtomicBool::new(false)));
        let flag = went.clone();
        let began = Arc::new(std::sync::Mutex::new(None));
        let noted = began.clone();
        let loader = build(data().device(gpu(0)).workers(2).map(move |_, _| {
            let taken = theirs.try_lock().ok().and_then(|mut slot| slot.take());
            if let Some(epoch) = taken {
                let at = Instant::now();
                drop(epoch);
                *noted.lock().unwrap() = Some(at.elapsed());
                flag.store(true, Ordering::SeqCst);
            }
            Ok(())
        }));
        let epoch = loader.epochs(0..).unwrap();
        *slot.lock().unwrap() = Some({
            let mut e = epoch;
            drop(e.next());
            e
        });
        drop(loader);
        let start = Instant::now();
        while !went.load(Ordering::SeqCst) && start.elapsed() < DEADLINE / 4 {
            // No batch is taken, so there may be no row left to map.
            if start.elapsed() > Duration::from_secs(2) && slot.lock().unwrap().is_some() {
                drop(slot.lock().unwrap().take());
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        until("threads end", || loader_threads().is_empty());
        eprintln!("dropped within its own map: {:?}", began.lock().unwrap());
        assert!(began.lock().unwrap().is_none_or(|took| took < DEADLINE / 4));
    });
}
