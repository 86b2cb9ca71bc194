use crate::common::cuda::*;
use crate::common::standin::{Config, Live, Session, Standin};
use crate::common::*;
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
fn slots_are_pinned_once_and_unpinned_at_the_end() {
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
fn batches_are_right_without_pinned_memory() {
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
fn pinned_and_pageable_slots_work_together() {
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
fn a_build_that_fails_halfway_leaves_nothing_alive() {
    case(config(), |session| {
        for (symbol, most) in [("cuMemAlloc_v2", 3), ("cuEventCreate", 6), ("cuStreamCreateWithPriority", 4)] {
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

#[test]
fn copies_have_the_highest_priority_and_events_spin() {
    case(config(), |session| {
        let loader = build(data().device(gpu(0)));
        assert!(loader.epoch(0).unwrap().all(|batch| batch.is_ok()));
        let trace = session.trace();
        let made = |symbol: &str| -> Vec<String> {
            let calls = trace.lines().filter_map(|line| line.split_once(&format!(" {symbol} ")));
            calls.map(|(_, rest)| rest.split(" = ").next().unwrap().to_string()).collect()
        };
        // Non-blocking; the streams of bells and of question marks have the default.
        let mut streams = made("cuStreamCreateWithPriority");
        streams.sort_unstable();
        assert_eq!(streams, ["1 -5", "1 0", "1 0", "1 0"]);
        // Timed or not, never with the flag 1 for sleeping waits.
        let events = made("cuEventCreate");
        assert!(!events.is_empty() && events.iter().all(|flags| flags == "0" || flags == "2"), "{events:?}");
    });
}

/// Counts of these symbols.
fn counts(session: &Session, symbols: &[&'static str]) -> Vec<(&'static str, u64)> {
    symbols.iter().map(|symbol| (*symbol, session.count(symbol))).collect()
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
            let epoch = |epoch| {
                for (number, batch) in loader.epoch(epoch).unwrap().enumerate() {
                    let batch = batch.unwrap();
                    let some = if epoch == 0 { 2 } else { number % 3 };
                    streams[1..1 + some].iter().for_each(|stream| batch.bind(Stream::from(stream)).unwrap());
                    batch.field("record").unwrap().device_ptr().unwrap();
                }
            };
            // Events for further streams are made when a buffer is first bound to that many.
            epoch(0);
            let before = counts(session, &NEVER);
            epoch(1);
            epoch(2);
            assert_eq!(counts(session, &NEVER), before);
        });
    }
}

/// The calls from number `first` on, by thread: symbol and arguments without the result. Calls that make a context
/// current are left out, and so are queries of a copy's end with a negative answer.
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

/// Copies with released slots: the copying thread has asked how long each took and, except for the first, how long
/// after the copy before it began.
pub(super) fn done(standin: &Standin) -> u64 {
    let trace = standin.trace();
    // The profiler asks for its own events on the caller's thread.
    let Some(copying) = trace.lines().find(|line| line.contains(" cuMemcpyHtoDAsync_v2 ")) else { return 0 };
    let thread = format!(" {} cuEventElapsedTime ", copying.split(' ').nth(1).unwrap());
    (trace.lines().filter(|line| line.contains(&thread)).count() as u64).div_ceil(2)
}

/// Object numbers and offsets do not matter here.
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
        // All slots are back, so that this epoch adds no calls to the next one.
        until("the slots are back", || done(session) == BATCHES);
        // Nor questions about its steps, of which the device may end some late. The first step does not count.
        until("the steps are measured", || loader.snapshot().consumer.gpu.unwrap().steps == BATCHES - 1);
        let first = session.calls();
        assert!(loader.epoch(1).unwrap().all(|batch| batch.is_ok()));
        until("the slots are back", || done(session) == 2 * BATCHES);
        let mut threads = calls_of(session, first);
        assert_eq!(threads.len(), 2, "the caller's thread and the one that copies");
        threads.sort_by_key(|calls| !calls.iter().any(|call| call.starts_with("cuMemcpy")));
        let asks = |call: &&String| call.starts_with("cuEventQuery") || call.starts_with("cuEventElapsedTime");
        let (queries, copies): (Vec<_>, Vec<_>) = threads[0].iter().partition(asks);
        // The copying thread: one copy after the consumer's last use of the buffer, with an event before that wait, one
        // on each side of the copy, and one for the bound streams' wait; then a bell beside the copies.
        let copy = [
            "cuEventRecord event stream",
            "cuStreamWaitEvent stream event 0",
            "cuEventRecord event stream",
            "cuMemcpyHtoDAsync_v2 mem pin 20000 stream",
            "cuEventRecord event stream",
            "cuEventRecord event stream",
            "cuStreamWaitEvent stream event 0",
            "cuLaunchHostFunc stream",
        ];
        let copies: Vec<_> = copies.iter().map(|call| without_numbers(call)).collect();
        assert_eq!(copies, copy.repeat(BATCHES as usize));
        // It asks whether the copy has ended, for its time on the bus and for its place behind the one before; and at most
        // once each whether it was queued and whether it began.
        let asked = queries.len() as u64;
        assert!((3 * BATCHES..=5 * BATCHES).contains(&asked), "{asked} questions");
        // The caller: in `next` it marks its question, its stream waits for the copy and marks the arrival. A dropped
        // batch has two marks, for the next user of the memory and for the profiler. For a finished step the profiler
        // asks the lengths of its three stretches; the first step does not count. Before each of these it asks whether
        // the stream is captured, and once before it waits for the batch.
        let consumer = threads[1].iter().map(|call| without_numbers(call));
        let consumer = consumer.filter(|call| !call.starts_with("cuThreadExchangeStreamCaptureMode"));
        let (read, consumer): (Vec<_>, Vec<_>) =
            consumer.partition(|call| call.starts_with("cuEventQuery") || call.starts_with("cuEventElapsedTime"));
        let wait = "cuStreamWaitEvent stream event 0";
        let mark = "cuEventRecord event stream";
        let ask = "cuStreamIsCapturing stream";
        let later = [ask, ask, mark, ask, wait, ask, mark, ask, mark, ask, mark].repeat(BATCHES as usize - 1);
        assert_eq!(consumer, [vec![ask, ask, wait, ask, mark, ask, mark], later].concat());
        assert!(read.len() as u64 <= 5 * BATCHES, "{read:?}");
        // Each wake (by a full slot, a bell, a buffer that came back) asks three events of one copy, at most.
        let nots = session.trace().lines().filter(|line| line.ends_with(" = 600")).count() as u64;
        assert!(nots < 30 * BATCHES, "{nots} questions too many");
        // The copying thread keeps its context and mode for life. The caller's are set and restored four times: to look
        // at its streams, to ask, to take and to drop.
        let own = copy.len() as u64 + 5 + 5 + 6 + 4 * 4;
        assert!(session.calls() - first <= (own + 4) * BATCHES + nots);
    });
}
