use crate::common::cuda::*;
use crate::common::standin::{Config, Live, Session, Standin};
use crate::common::*;
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::Finish;
use feedline::device::cuda::Stream;
use feedline::memory::MemoryTerm;
use feedline::tensor::DType;
use feedline::{ErrorKind, Loader, LoaderBuilder, Order};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BATCHES: u64 = 40;

fn data() -> LoaderBuilder {
    let records = Records::builder(5000)
        .classes((0..160).collect())
        .open_bytes(noise(160 * 5000, 3))
        .unwrap();
    Loader::builder(records)
        .order(Order::shuffled(2))
        .batch_size(4)
}

fn all_pinned(loader: &Loader) {
    until("all slots are pinned", || {
        let copies = loader.report().total.copy.unwrap();
        copies.pinned_slots + copies.pageable_slots
            == loader.plan().term(MemoryTerm::SLOTS).count as u64
    });
}

#[test]
fn slots_are_pinned_once_and_unpinned_at_the_end() {
    case(late(), |session| {
        let loader = build(data().device(gpu(0)).tuning(|t| t.slots(5)));
        all_pinned(&loader);
        for epoch in 0..3 {
            assert!(loader.epoch(epoch).unwrap().all(|batch| batch.is_ok()));
        }
        let live = session.live();
        let plan = loader.plan();
        assert_eq!(
            (session.count("cuMemHostRegister_v2"), live.registrations),
            (5, 5)
        );
        assert_eq!(
            live.registered_bytes as usize,
            5 * plan.term(MemoryTerm::SLOTS).each
        );
        assert_eq!(
            (live.allocations, plan.term(MemoryTerm::DEVICE).count),
            (3, 3)
        );
        let copies = loader.report().total.copy.unwrap();
        assert_eq!(
            (copies.batches, copies.pinned_slots, copies.pageable_slots),
            (3 * BATCHES, 5, 0)
        );
        assert!(
            loader.report().to_string().contains("; 5 slots pinned\n"),
            "{}",
            loader.report()
        );
        drop(loader);
        assert_eq!(
            (session.live(), session.count("cuMemHostUnregister")),
            (Live::default(), 5)
        );
    });
}

#[test]
fn copies_begin_before_the_last_slots_are_pinned() {
    const REGISTER: &str = "cuMemHostRegister_v2";
    case(config(), |session| {
        session.admit(REGISTER, 2);
        let (rows, seen) = (Arc::new(AtomicU64::new(0)), |rows: &AtomicU64| {
            rows.load(Ordering::Acquire)
        });
        let counter = rows.clone();
        let counted = data().map(move |_, _| {
            counter.fetch_add(1, Ordering::AcqRel);
            Ok(())
        });
        let loader = build(counted.workers(1).device(gpu(0)).tuning(|t| t.slots(5)));
        let batches = loader.epoch(1).unwrap();
        // The one worker has handed over the first slot when it is at the last row of the second.
        // The third registration waits.
        until("two slots are filled", || {
            seen(&rows) >= 8 && session.count(REGISTER) == 3
        });
        session.admit(REGISTER, 3);
        until("the fourth slot is being pinned", || {
            session.count(REGISTER) == 4
        });
        let trace = session.trace();
        let calls = |symbol| trace.lines().filter(|line| line.contains(symbol)).count();
        assert!(
            calls("cuMemcpyHtoDAsync_v2") > 0 && calls(REGISTER) == 4,
            "{trace}"
        );
        session.admit(REGISTER, u64::MAX);
        same(
            &Got::all(batches),
            &Got::epoch(&build(data()), 1),
            "pinned one by one",
        );
        assert_eq!(loader.report().total.copy.unwrap().pinned_slots, 5);
    });
}

#[test]
fn batches_are_right_without_pinned_memory() {
    for (code, name) in [
        (801, "CUDA_ERROR_NOT_SUPPORTED"),
        (2, "CUDA_ERROR_OUT_OF_MEMORY"),
        (304, "CUDA_ERROR_OPERATING_SYSTEM"),
    ] {
        case(
            Config {
                register_error: code,
                ..late()
            },
            move |session| {
                let loader = build(data().device(gpu(0)).tuning(|t| t.slots(3)));
                same(
                    &Got::epoch(&loader, 1),
                    &Got::epoch(&build(data()), 1),
                    "pageable",
                );
                let copies = loader.report().total.copy.unwrap();
                assert_eq!(
                    (
                        copies.pinned_slots,
                        copies.pageable_slots,
                        session.live().registrations
                    ),
                    (0, 3, 0)
                );
                let why = copies.why_pageable.unwrap();
                assert!(
                    why.contains(&format!("cuMemHostRegister: {name}"))
                        && why.ends_with(&format!("({code})")),
                    "{why}"
                );
                assert!(
                    loader
                        .report()
                        .to_string()
                        .contains(&format!("0 slots pinned, 3 not ({why}): slower"))
                );
            },
        );
    }
}

#[test]
fn pinned_and_pageable_slots_work_together() {
    case(late(), |session| {
        session.fail_named("cuMemHostRegister_v2", 1, 712, false);
        session.fail_named("cuMemHostRegister_v2", 2, 2, false);
        let loader = build(data().device(gpu(0)).tuning(|t| t.slots(4)));
        same(
            &Got::epoch(&loader, 1),
            &Got::epoch(&build(data()), 1),
            "mixed",
        );
        let copies = loader.report().total.copy.unwrap();
        assert_eq!(
            (
                copies.pinned_slots,
                copies.pageable_slots,
                session.live().registrations
            ),
            (2, 2, 2)
        );
        assert!(
            copies.why_pageable.unwrap().contains("(712)"),
            "the first reason"
        );
    });
}

#[test]
fn a_build_that_fails_halfway_leaves_nothing_alive() {
    case(config(), |session| {
        for (symbol, most) in [
            ("cuMemAlloc_v2", 3),
            ("cuEventCreate", 6),
            ("cuStreamCreateWithPriority", 4),
        ] {
            for nth in 0..most {
                session.fail_named(symbol, session.count(symbol) + nth, 2, false);
                let device = gpu(0);
                let error = data().device(device).build().unwrap_err();
                let kind = if symbol == "cuMemAlloc_v2" {
                    ErrorKind::Budget
                } else {
                    ErrorKind::Device
                };
                assert_eq!(error.kind(), kind, "{symbol} {nth}: {error}");
                assert_eq!(session.live(), Live::default(), "{symbol} {nth}");
            }
        }
        let loader = build(data().device(gpu(0)));
        same(
            &Got::epoch(&loader, 1),
            &Got::epoch(&build(data()), 1),
            "at last",
        );
    });
}

#[test]
fn copies_have_the_highest_priority_and_events_spin() {
    case(config(), |session| {
        let loader = build(data().device(gpu(0)));
        assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
        let trace = session.trace();
        let made = |symbol: &str| -> Vec<String> {
            let calls = trace
                .lines()
                .filter_map(|line| line.split_once(&format!(" {symbol} ")));
            calls
                .map(|(_, rest)| rest.split(" = ").next().unwrap().to_string())
                .collect()
        };
        // Non-blocking. Streams of one priority share hardware queues, so none of ours has a
        // consumer's.
        assert_eq!(made("cuStreamCreateWithPriority"), ["1 -5"; 5]);
        // Timed or not, never with the flag 1 for sleeping waits.
        let events = made("cuEventCreate");
        assert!(
            !events.is_empty() && events.iter().all(|flags| flags == "0" || flags == "2"),
            "{events:?}"
        );
    });
}

#[test]
fn no_bell_rings_while_slots_are_free() {
    const RING: &str = "cuLaunchHostFunc";
    case(config(), |session| {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let builder = data().device(gpu(0)).stream(&stream);
        let loader = build(builder.tuning(|t| t.slots(12).device_batches(2)));
        all_pinned(&loader);
        let run = |epoch| {
            for batch in loader.epoch(epoch).unwrap() {
                drop(batch.unwrap());
                // No more copies are on their way than device batches.
                stream.synchronize().unwrap();
            }
        };
        // The first copies tell how long one takes.
        run(0);
        let rung = session.count(RING);
        (1..4).for_each(run);
        assert_eq!(session.count(RING), rung);
    });
}

/// Counts of these symbols.
fn counts(session: &Session, symbols: &[&'static str]) -> Vec<(&'static str, u64)> {
    symbols
        .iter()
        .map(|symbol| (*symbol, session.count(symbol)))
        .collect()
}

#[test]
fn an_epoch_reserves_nothing_and_never_waits_for_the_device() {
    const NEVER: [&str; 18] = [
        "cuMemAlloc_v2",
        "cuMemAllocAsync",
        "cuMemFree_v2",
        "cuMemFreeAsync",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemGetInfo_v2",
        "cuEventCreate",
        "cuEventDestroy_v2",
        "cuStreamCreate",
        "cuStreamCreateWithPriority",
        "cuStreamDestroy_v2",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuCtxSynchronize",
        "cuStreamQuery",
    ];
    for config in [config(), late()] {
        case(config, |session| {
            let context = CudaContext::new(0).unwrap();
            let streams: Vec<_> = (0..3).map(|_| context.new_stream().unwrap()).collect();
            let loader = build(data().device(gpu(0)).stream(&streams[0]));
            all_pinned(&loader);
            let epoch = |epoch, further: usize| {
                for batch in loader.epoch(epoch).unwrap() {
                    let batch = batch.unwrap();
                    streams[1..1 + further]
                        .iter()
                        .for_each(|stream| batch.bind(Stream::from(stream)).unwrap());
                    batch.field("record").unwrap().device_ptr().unwrap();
                }
            };
            let before = counts(session, &NEVER);
            let events = session.count("cuEventCreate");
            (0..4).for_each(|number| epoch(number, 0));
            // A transfer thread without a core reads marks late: then more steps than usual have
            // events.
            let made = session.count("cuEventCreate") - events;
            assert!(made < BATCHES, "{made} events for {} batches", 4 * BATCHES);
            // Events for further streams are made as they are needed.
            epoch(4, 2);
            let others = |counts: Vec<(&'static str, u64)>| {
                counts
                    .into_iter()
                    .filter(|(call, _)| *call != "cuEventCreate")
                    .collect::<Vec<_>>()
            };
            assert_eq!(others(counts(session, &NEVER)), others(before));
        });
    }
}

/// Calls between two numbers as the trace has them: thread, call without the result and without
/// numbers of objects.
fn calls(standin: &Standin, range: std::ops::Range<u64>) -> Vec<(String, String)> {
    // Object numbers and offsets do not matter here.
    let word = |word: &str| word.split(['#', '+']).next().unwrap().to_string();
    let mut calls = Vec::new();
    for line in standin.trace().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [call @ .., "=", _] = &words[2..] else {
            panic!("{line}")
        };
        if range.contains(&words[0].parse().unwrap()) {
            let call: Vec<String> = call.iter().map(|part| word(part)).collect();
            calls.push((words[1].into(), call.join(" ")));
        }
    }
    calls
}

/// The copying thread's calls for each batch: one copy after the consumer's last use of the buffer,
/// with an event before that wait, one on each side of the copy, and one for the bound streams'
/// wait. While slots are short, a bell beside the copies.
const COPY: [&str; 6] = [
    "cuEventRecord event stream",
    "cuStreamWaitEvent stream event 0",
    "cuEventRecord event stream",
    "cuMemcpyHtoDAsync_v2 mem pin 20000 stream",
    "cuEventRecord event stream",
    "cuEventRecord event stream",
];
const BELL: [&str; 2] = [
    "cuStreamWaitEvent stream event 0",
    "cuLaunchHostFunc stream",
];

#[test]
fn a_batch_in_the_steady_state_takes_exactly_these_calls() {
    const PUSH: &str = "cuCtxPushCurrent_v2 context";
    const POP: &str = "cuCtxPopCurrent_v2";
    const ASK: &str = "cuStreamIsCapturing stream";
    const MARK: &str = "cuEventRecord event stream";
    const WAIT: &str = "cuStreamWaitEvent stream event 0";
    // In `next` the caller looks at its streams, marks its request on its stream and on an empty
    // one, has its streams wait for the copy, and marks the start. At a drop it marks the end of
    // its work, which the next user of the memory and the profiler share. It asks nothing: the
    // copying thread reads the marks. Two streams wait and are marked both.
    const ONE: [&str; 11] = [PUSH, ASK, MARK, MARK, WAIT, MARK, POP, PUSH, ASK, MARK, POP];
    const TWO: [&str; 15] = [
        PUSH, ASK, ASK, MARK, MARK, WAIT, MARK, WAIT, POP, PUSH, ASK, MARK, ASK, MARK, POP,
    ];
    let cases: [(&'static str, usize, bool, &'static [&'static str]); 3] = [
        ("fields", 1, false, &ONE),
        ("finished", 1, true, &ONE),
        ("two streams", 2, false, &TWO),
    ];
    for (name, streams, finished, expected) in cases {
        case(config(), move |session| {
            if finished && !crate::common::doubles::with_kernels(session) {
                return println!("skipped: no kernels");
            }
            let context = CudaContext::new(0).unwrap();
            let streams: Vec<_> = (0..streams)
                .map(|_| context.new_stream().unwrap())
                .collect();
            let records = Records::builder(25 * 50 * 4).field("image", DType::U8, [25, 50, 4]);
            let records = records.open_bytes(noise(160 * 5000, 3)).unwrap();
            let builder = Loader::builder(records)
                .order(Order::shuffled(2))
                .batch_size(4)
                .device(gpu(0));
            let builder = if finished {
                builder.finish("image", Finish::to(DType::F16))
            } else {
                builder
            };
            let loader = build(
                streams
                    .iter()
                    .fold(builder, |builder, stream| builder.stream(stream)),
            );
            all_pinned(&loader);
            assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
            let first = session.calls();
            let mut epoch = loader.epoch(1).unwrap();
            drop(epoch.next().unwrap().unwrap());
            // What begins an iterator: no request is marked.
            let begun = session.calls();
            assert!(epoch.all(|batch| batch.is_ok()));
            let last = session.calls();
            let all = calls(session, first..last);
            let copying = all
                .iter()
                .find(|(_, call)| call.starts_with("cuMemcpyHtoD"))
                .unwrap()
                .0
                .clone();
            let own = |range| {
                calls(session, range)
                    .into_iter()
                    .filter(|(thread, _)| *thread != copying)
            };
            let took: Vec<_> = own(begun..last).map(|(_, call)| call).collect();
            // With the last batch the iterator ends, which reads the marks for its report.
            for (number, took) in took
                .chunks(expected.len())
                .take(BATCHES as usize - 2)
                .enumerate()
            {
                assert_eq!(took, expected, "{name}, batch {number}");
            }
            if !finished && streams.len() == 1 {
                let asks = |call: &str| {
                    call.starts_with("cuEventQuery") || call.starts_with("cuEventElapsedTime")
                };
                let copies = all
                    .iter()
                    .filter(|(thread, call)| *thread == copying && !asks(call));
                let copies: Vec<_> = copies.map(|(_, call)| call.as_str()).collect();
                let mut rest = &copies[..];
                for batch in 0..BATCHES {
                    rest = rest
                        .strip_prefix(&COPY)
                        .unwrap_or_else(|| panic!("batch {batch}: {rest:?}"));
                    rest = rest.strip_prefix(&BELL).unwrap_or(rest);
                }
                assert!(rest.is_empty(), "{rest:?}");
            }
        });
    }
}
