use crate::common::*;
use crate::gpu::*;
use crate::standin::{Config, Live, Session, Standin};
use cudarc::driver::CudaContext;
use feedline::dataset::Records;
use feedline::device::cuda::Stream;
use feedline::{ErrorKind, Loader, LoaderBuilder, Order};

const BATCHES: u64 = 40;

fn data() -> LoaderBuilder {
    let records = Records::builder(5000).classes((0..160).collect()).open_bytes(noise(160 * 5000, 3)).unwrap();
    Loader::builder(records).order(Order::shuffled(2)).batch_size(4)
}

fn all_pinned(loader: &Loader) {
    until("all slots are pinned", || {
        let copies = loader.report().copies.unwrap();
        copies.pinned_slots + copies.pageable_slots == loader.plan().slots as u64
    });
}

#[test]
fn slots_are_pinned_once_and_let_go_at_the_end() {
    case(late(), |session| {
        let loader = build(data().device(gpu(0)).slots(5));
        all_pinned(&loader);
        for epoch in 0..3 {
            assert!(loader.epoch(epoch).unwrap().all(|batch| batch.is_ok()));
        }
        let (live, plan) = (session.live(), loader.plan());
        assert_eq!((session.count("cuMemHostRegister_v2"), live.registrations), (5, 5));
        assert_eq!(live.registered_bytes as usize, 5 * plan.slot_bytes);
        assert_eq!((live.allocations, plan.device_batches), (3, 3));
        let copies = loader.report().copies.unwrap();
        assert_eq!((copies.batches, copies.pinned_slots, copies.pageable_slots), (3 * BATCHES, 5, 0));
        assert!(loader.report().to_string().contains("; 5 slots pinned\n"), "{}", loader.report());
        drop(loader);
        assert_eq!((session.live(), session.count("cuMemHostUnregister")), (Live::default(), 5));
    });
}

#[test]
fn where_memory_cannot_be_pinned_the_batches_are_right_all_the_same_and_the_report_says_why() {
    for (code, name) in
        [(801, "CUDA_ERROR_NOT_SUPPORTED"), (2, "CUDA_ERROR_OUT_OF_MEMORY"), (304, "CUDA_ERROR_OPERATING_SYSTEM")]
    {
        case(Config { register_error: code, ..late() }, move |session| {
            let loader = build(data().device(gpu(0)).slots(3));
            same(&Got::epoch(&loader, 1), &Got::epoch(&build(data()), 1), "pageable");
            let copies = loader.report().copies.unwrap();
            assert_eq!((copies.pinned_slots, copies.pageable_slots, session.live().registrations), (0, 3, 0));
            let why = copies.why_pageable.unwrap();
            assert!(
                why.contains(&format!("cuMemHostRegister: {name}")) && why.ends_with(&format!("({code})")),
                "{why}"
            );
            assert!(loader.report().to_string().contains(&format!("0 slots pinned, 3 not ({why}): slower")));
        });
    }
}

#[test]
fn slots_that_are_pinned_and_slots_that_are_not_go_round_together() {
    case(late(), |session| {
        session.fail_named("cuMemHostRegister_v2", 1, 712, false);
        session.fail_named("cuMemHostRegister_v2", 2, 2, false);
        let loader = build(data().device(gpu(0)).slots(4));
        same(&Got::epoch(&loader, 1), &Got::epoch(&build(data()), 1), "mixed");
        let copies = loader.report().copies.unwrap();
        assert_eq!((copies.pinned_slots, copies.pageable_slots, session.live().registrations), (2, 2, 2));
        assert!(copies.why_pageable.unwrap().contains("(712)"), "the first reason");
    });
}

#[test]
fn a_build_that_fails_halfway_leaves_nothing_alive_and_can_be_repeated() {
    case(config(), |session| {
        for (symbol, most) in [("cuMemAlloc_v2", 3), ("cuEventCreate", 6), ("cuStreamCreate", 2)] {
            for nth in 0..most {
                session.fail_named(symbol, session.count(symbol) + nth, 2, false);
                let device = gpu(0);
                let error = data().device(device).build().unwrap_err();
                let kind = if symbol == "cuMemAlloc_v2" { ErrorKind::Budget } else { ErrorKind::Device };
                assert_eq!(error.kind(), kind, "{symbol} {nth}: {error}");
                assert_eq!(session.live(), Live::default(), "{symbol} {nth}");
            }
        }
        let loader = build(data().device(gpu(0)));
        same(&Got::epoch(&loader, 1), &Got::epoch(&build(data()), 1), "at last");
    });
}

/// Counts of these symbols.
fn counts(session: &Session, symbols: &[&'static str]) -> Vec<(&'static str, u64)> {
    symbols.iter().map(|symbol| (*symbol, session.count(symbol))).collect()
}

#[test]
fn an_epoch_reserves_nothing_on_the_device_and_the_cpu_never_waits_for_it() {
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
            let epoch = |epoch| {
                for (number, batch) in loader.epoch(epoch).unwrap().enumerate() {
                    let batch = batch.unwrap();
                    let some = if epoch == 0 { 2 } else { number % 3 };
                    streams[1..1 + some].iter().for_each(|stream| batch.bind(Stream::from(stream)).unwrap());
                    batch.field("record").unwrap().device_ptr().unwrap();
                }
            };
            // The events of further streams are made when a buffer is first bound to so many.
            epoch(0);
            let before = counts(session, &NEVER);
            epoch(1);
            epoch(2);
            assert_eq!(counts(session, &NEVER), before);
        });
    }
}

/// The calls from number `first` on, by thread: symbol and arguments without result; what makes a context current is left
/// out, and questions whether a copy is done that were answered with no.
fn calls_of(standin: &Standin, first: u64) -> Vec<Vec<String>> {
    let mut threads: Vec<(String, Vec<String>)> = Vec::new();
    for line in standin.trace().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let (index, thread) = (words[0].parse::<u64>().unwrap(), words[1]);
        let [call @ .., "=", code] = &words[2..] else { panic!("{line}") };
        if index < first || call[0].starts_with("cuCtx") || *code == "600" {
            continue;
        }
        assert_eq!(*code, "0", "{line}");
        let call = call.join(" ");
        match threads.iter_mut().find(|(known, _)| known == thread) {
            Some((_, calls)) => calls.push(call),
            None => threads.push((thread.into(), vec![call])),
        }
    }
    threads.into_iter().map(|(_, calls)| calls).collect()
}

/// Questions whether a copy is done that were answered with yes.
fn done(standin: &Standin) -> u64 {
    let trace = standin.trace();
    // By the thread that copies: the profiler asks for its own events on the caller's.
    let Some(copying) = trace.lines().find(|line| line.contains(" cuMemcpyHtoDAsync_v2 ")) else { return 0 };
    let thread = format!(" {} cuEventQuery ", copying.split(' ').nth(1).unwrap());
    trace.lines().filter(|line| line.contains(&thread) && line.ends_with(" = 0")).count() as u64
}

/// Numbers of objects and offsets are not what this is about.
fn without_numbers(call: &str) -> String {
    let word = |word: &str| word.split(['#', '+']).next().unwrap().to_string();
    call.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_batch_in_the_steady_state_takes_exactly_these_calls() {
    case(config(), |session| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let loader = build(data().device(gpu(0)).stream(&stream).keep(["record"]));
        all_pinned(&loader);
        assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
        // All slots are back, so that nothing of this epoch is in the next one's calls.
        until("the slots are back", || done(session) >= BATCHES);
        let first = session.calls();
        assert!(loader.epoch(1).unwrap().all(|batch| batch.is_ok()));
        until("the slots are back", || done(session) >= 2 * BATCHES);
        let mut threads = calls_of(session, first);
        assert_eq!(threads.len(), 2, "the caller's thread and the one that copies");
        threads.sort_by_key(|calls| !calls.iter().any(|call| call.starts_with("cuMemcpy")));
        let (queries, copies): (Vec<_>, Vec<_>) = threads[0].iter().partition(|call| call.starts_with("cuEventQuery"));
        // The thread that copies: behind the consumer's last use of the buffer, one copy, the event that it is there, and a
        // bell beside the copies; when it has rung, one question.
        let copy = [
            "cuStreamWaitEvent stream event 0",
            "cuMemcpyHtoDAsync_v2 mem pin 20000 stream",
            "cuEventRecord event stream",
            "cuStreamWaitEvent stream event 0",
            "cuLaunchHostFunc stream",
        ];
        let copies: Vec<_> = copies.iter().map(|call| without_numbers(call)).collect();
        assert_eq!(copies, copy.repeat(BATCHES as usize));
        assert_eq!(queries.len() as u64, BATCHES);
        // The caller: it marks that it asks, and its stream waits for the copy and marks that it has it, in `next`; and marks
        // twice when the batch is dropped, for who uses the memory next and for the profiler. That one asks for a step that
        // is over how long its three stretches were; the first step does not count.
        let consumer = threads[1].iter().map(|call| without_numbers(call));
        let (read, consumer): (Vec<_>, Vec<_>) =
            consumer.partition(|call| call.starts_with("cuEventQuery") || call.starts_with("cuEventElapsedTime"));
        let wait = "cuStreamWaitEvent stream event 0";
        let mark = "cuEventRecord event stream";
        let later = [mark, wait, mark, mark, mark].repeat(BATCHES as usize - 1);
        assert_eq!(consumer, [vec![wait, mark, mark], later].concat());
        assert!(read.len() as u64 <= 5 * BATCHES, "{read:?}");
        // Each wake (by a full slot, a bell, a buffer that came back) asks for one copy that is not done, at most.
        let nots = session.trace().lines().filter(|line| line.ends_with(" = 600")).count() as u64;
        assert!(nots < 10 * BATCHES, "{nots} questions too many");
        // The thread that copies has its context for life; the caller's is pushed and popped three times, to ask, to take and
        // to drop.
        let own = copy.len() as u64 + 1 + 5 + 3 * 2;
        assert!(session.calls() - first <= (own + 4) * BATCHES + nots);
    });
}
