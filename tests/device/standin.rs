//! The stand-in GPU itself: it is late where a GPU is late, detects silent errors of a GPU, and
//! fails on request.

#![allow(unsafe_code)]

/// Compiled by the helper, not here; named so that rustfmt sees it.
#[cfg(any())]
#[path = "../standin/cuda.rs"]
mod source;

use crate::common::standin::{Config, Gpu, Live, Session, cuda};
use crate::common::until;
use cudarc::driver::sys;
use memmap2::MmapMut;
use proptest::prelude::*;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LEN: usize = 8192;

/// A call of the driver API as a number.
macro_rules! cu {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: results go to places of the right type that outlive the call; other pointers are
        // what the stand-in is asked to judge, or memory that the test keeps until its session has
        // ended.
        let code = unsafe { sys::$name($($arg),*) };
        code as u32
    }};
}

/// As [`cu`], for a call that must succeed.
macro_rules! ok {
    ($name:ident($($arg:tt)*)) => {
        assert_eq!(cu!($name($($arg)*)), 0, stringify!($name))
    };
}

/// A current context on device 0.
fn begin(config: Config) -> Session {
    let session = cuda().session(config);
    ok!(cuInit(0));
    enter(0);
    session
}

/// Retains the context of a device and makes it current.
fn enter(device: i32) -> sys::CUcontext {
    let mut context = null_mut();
    ok!(cuDevicePrimaryCtxRetain(&mut context, device));
    ok!(cuCtxSetCurrent(context));
    context
}

fn stream() -> sys::CUstream {
    stream_with(1)
}

fn stream_with(flags: u32) -> sys::CUstream {
    let mut stream = null_mut();
    ok!(cuStreamCreate(&mut stream, flags));
    stream
}

fn event() -> sys::CUevent {
    let mut event = null_mut();
    ok!(cuEventCreate(&mut event, 0));
    event
}

/// An event recorded now.
fn record(stream: sys::CUstream) -> sys::CUevent {
    let event = event();
    ok!(cuEventRecord(event, stream));
    event
}

fn alloc(len: usize) -> u64 {
    let mut at = 0;
    ok!(cuMemAlloc_v2(&mut at, len));
    at
}

/// Page-aligned host memory full of `byte`.
fn pages(byte: u8) -> MmapMut {
    let mut memory = MmapMut::map_anon(LEN).unwrap();
    memory.fill(byte);
    memory
}

fn pinned(byte: u8) -> MmapMut {
    let memory = pages(byte);
    ok!(cuMemHostRegister_v2(at(&memory), LEN, 0));
    memory
}

fn at(memory: &MmapMut) -> *mut c_void {
    memory.as_ptr().cast_mut().cast()
}

/// Writable pages where the kernel puts nothing by itself: once they are unmapped, no other thread
/// of the process gets their addresses.
fn far_pages() -> *mut c_void {
    const FAR: usize = 0x2000_0000_0000;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel refuses a range in which something is mapped.
    unsafe { mmap_anonymous(FAR as *mut c_void, LEN, access, flags) }.unwrap()
}

fn upload(to: u64, from: &MmapMut, stream: sys::CUstream) -> u32 {
    cu!(cuMemcpyHtoDAsync_v2(to, at(from), LEN, stream))
}

fn fill(to: u64, stream: sys::CUstream) -> u32 {
    cu!(cuMemsetD8Async(to, 1, LEN, stream))
}

/// Checks for one violation with all of `words`.
fn assert_violation(session: &mut Session, words: &[&str]) {
    let found = session.expect_violations();
    assert_eq!(found.len(), 1, "{found:#?}");
    for word in words {
        assert!(found[0].contains(word), "{word} is not in {}", found[0]);
    }
}

#[test]
fn calls_that_a_gpu_refuses_are_refused() {
    let devices = vec![Gpu::new(1 << 20, ""); 2];
    let _session = begin(Config {
        devices,
        ..Config::default()
    });
    let there = alloc(LEN);
    let one = stream();
    let of_one = event();
    let memory = pages(0);
    let inside = at(&memory).wrapping_byte_add(4096);
    ok!(cuMemHostRegister_v2(at(&memory), LEN, 0));
    let again = cu!(cuMemHostRegister_v2(inside, 4096, 0));
    assert_eq!(again, 712, "a part that is registered");
    assert_eq!(cu!(cuMemHostUnregister(inside)), 713);
    ok!(cuMemHostUnregister(at(&memory)));
    let no_page = at(&memory).wrapping_byte_add(64);
    assert_eq!(cu!(cuMemHostRegister_v2(no_page, 4096, 0)), 1);
    ok!(cuEventDestroy_v2(of_one));
    // A destroyed event.
    assert_eq!(cu!(cuEventQuery(of_one)), 400);
    assert_eq!(cu!(cuStreamWaitEvent(one, of_one, 0)), 400);
    // Device 1 is current: nothing is enqueued on a stream of device 0, nor its events recorded
    // there.
    enter(1);
    assert_eq!(fill(alloc(LEN), one), 400);
    assert_eq!(cu!(cuEventRecord(event(), one)), 400);
    let mut found = null_mut();
    let mut other = 0;
    ok!(cuCtxPopCurrent_v2(&mut found));
    let calls = [
        cu!(cuMemAlloc_v2(&mut other, 1)),
        cu!(cuStreamSynchronize(one)),
        cu!(cuCtxSynchronize()),
        fill(there, one),
        cu!(cuCtxPopCurrent_v2(&mut found)),
    ];
    assert_eq!(calls, [201; 5], "no context is current");
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    enter(1);
    assert_eq!(cu!(cuStreamSynchronize(one)), 709, "its context is gone");
}

#[test]
fn a_copy_reads_pinned_memory_when_it_runs() {
    let session = begin(Config::default());
    // A copy of pageable memory waits for the work before it.
    let (stream, other, to_pinned, to_pageable) = (stream(), stream(), alloc(LEN), alloc(LEN));
    let mut pinned = pinned(1);
    let mut pageable = pages(1);
    session.hold(true);
    assert_eq!(upload(to_pinned, &pinned, stream), 0);
    assert_eq!(upload(to_pageable, &pageable, other), 0);
    assert_eq!(cu!(cuStreamQuery(stream)), 600);
    assert_eq!(session.peek(to_pinned, LEN), [0xa5; LEN]);
    assert_eq!(session.executed(), 0);
    let pinned_at = at(&pinned) as u64;
    let in_flight = |at| session.in_flight(at, LEN);
    assert_eq!([pinned_at, at(&pageable) as u64].map(in_flight), [1, 0]);
    pinned.fill(2);
    pageable.fill(2);
    session.hold(false);
    ok!(cuCtxSynchronize());
    assert_eq!(session.peek(to_pinned, LEN), [2; LEN]);
    assert_eq!(session.peek(to_pageable, LEN), [1; LEN]);
    assert_eq!(in_flight(pinned_at), 0);
    assert_eq!(session.executed(), 2);
    ok!(cuMemHostUnregister(at(&pinned)));
}

/// Belongs to the session's test.
static OPEN: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn gate(_: *mut c_void) {
    // A test that failed meanwhile opens no gate, and its session waits for this function.
    let deadline = Instant::now() + Duration::from_secs(60);
    while OPEN.load(Ordering::Acquire) == 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
}

#[test]
fn an_operation_that_waits_holds_up_the_streams_of_its_hardware_queue() {
    // The context's legacy stream has the first queue of the default priority.
    for (queues, held_up) in [
        (0, [false, false]),
        (1, [true, true]),
        (2, [false, true]),
        (3, [false, false]),
    ] {
        let session = begin(Config {
            queues,
            ..Config::default()
        });
        OPEN.store(0, Ordering::Release);
        let stopped = stream();
        let second = stream();
        let third = stream();
        let mut preferred = null_mut();
        ok!(cuStreamCreateWithPriority(&mut preferred, 1, -5));
        let places: Vec<_> = (0..4).map(|_| alloc(LEN)).collect();
        ok!(cuLaunchHostFunc(stopped, Some(gate), null_mut()));
        // What has begun holds up nobody.
        for other in [second, third, preferred] {
            ok!(cuLaunchHostFunc(other, Some(ready), null_mut()));
            ok!(cuStreamSynchronize(other));
        }
        // This waits, at the head of its queue.
        assert_eq!(fill(places[0], stopped), 0);
        let others = [
            (second, held_up[0]),
            (third, held_up[1]),
            (preferred, false),
        ];
        for ((other, _), place) in others.iter().zip(&places[1..]) {
            assert_eq!(fill(*place, *other), 0);
        }
        for (other, _) in others.iter().filter(|(_, held_up)| !held_up) {
            ok!(cuStreamSynchronize(*other));
        }
        for (other, held_up) in others {
            let code = if held_up { 600 } else { 0 };
            assert_eq!(cu!(cuStreamQuery(other)), code, "{queues} queues");
        }
        OPEN.store(1, Ordering::Release);
        ok!(cuCtxSynchronize());
        assert!(places.iter().all(|at| session.peek(*at, 1) == [1]));
    }
}

unsafe extern "C" fn ready(_: *mut c_void) {}

// --- captures of graphs ---

fn mode(number: u32) -> sys::CUstreamCaptureMode {
    // SAFETY: the driver's modes are 0, 1 and 2.
    unsafe { std::mem::transmute(number) }
}

fn begin_capture(stream: sys::CUstream, number: u32) {
    ok!(cuStreamBeginCapture_v2(stream, mode(number)));
}

/// Ends the capture; the driver's answer.
fn end_capture(stream: sys::CUstream) -> u32 {
    let mut graph = null_mut();
    let code = cu!(cuStreamEndCapture(stream, &mut graph));
    if code == 0 {
        ok!(cuGraphDestroy(graph));
    }
    assert_eq!(code == 0, !graph.is_null());
    code
}

/// Sets this thread's mode of captures and returns the one before.
fn exchange(number: u32) -> u32 {
    let mut mode = mode(number);
    ok!(cuThreadExchangeStreamCaptureMode(&mut mode));
    mode as u32
}

/// 0 when the stream does not capture, 1 when it does, 2 when the capture is invalid.
fn capturing(stream: sys::CUstream) -> Result<u32, u32> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    match cu!(cuStreamIsCapturing(stream, &mut status)) {
        0 => Ok(status as u32),
        code => Err(code),
    }
}

#[test]
fn an_unsafe_call_invalidates_captures_by_the_modes_of_both() {
    let _session = begin(Config::default());
    let stream = stream();
    let event = event();
    let stream_at = stream as usize;
    let event_at = event as usize;
    let context = enter(0) as usize;
    // Mode of the capture, mode of the thread that calls, whether it is the capturing one, whether
    // the call is refused.
    let cases = [
        (0, 0, false, true),
        (0, 1, false, false),
        (0, 2, false, false),
        (1, 0, false, false),
        (2, 0, false, false),
        (0, 0, true, true),
        (0, 1, true, true),
        (1, 0, true, true),
        (1, 2, true, false),
        (2, 0, true, false),
    ];
    for (capture, thread, own, refused) in cases {
        let call = move || {
            ok!(cuCtxSetCurrent(context as sys::CUcontext));
            let before = exchange(thread);
            let unsafe_call = cu!(cuEventQuery(event_at as sys::CUevent));
            assert_eq!(exchange(before), thread);
            unsafe_call
        };
        begin_capture(stream_at as sys::CUstream, capture);
        let code = match own {
            true => call(),
            false => std::thread::spawn(call).join().unwrap(),
        };
        let right = if refused { 900 } else { 0 };
        assert_eq!(code, right, "{capture} {thread} {own}");
        assert_eq!(capturing(stream), Ok(1 + u32::from(refused)));
        assert_eq!(end_capture(stream), if refused { 901 } else { 0 });
        assert_eq!(capturing(stream), Ok(0));
    }
}

#[test]
fn captured_work_does_not_run_and_a_captured_event_is_no_event() {
    let session = begin(Config::default());
    let memory = alloc(LEN);
    let captured = stream();
    let other = stream();
    let outside = event();
    exchange(2);
    begin_capture(captured, 0);
    assert_eq!(fill(memory, captured), 0);
    let inside = record(captured);
    ok!(cuStreamWaitEvent(captured, inside, 0));
    assert_eq!(end_capture(captured), 0);
    assert_eq!(session.peek(memory, 1)[0], 0xa5);
    let mut ms = 0.0;
    assert_eq!(cu!(cuEventQuery(inside)), 907);
    assert_eq!(cu!(cuEventSynchronize(inside)), 907);
    assert_eq!(cu!(cuStreamWaitEvent(other, inside, 0)), 905);
    assert_eq!(cu!(cuEventElapsedTime(&mut ms, inside, inside)), 907);
    // Recorded again, it is an event again.
    ok!(cuEventRecord(inside, captured));
    ok!(cuEventSynchronize(inside));
    // Each of these conflicts with a capture, whatever the thread's mode.
    ok!(cuEventRecord(outside, other));
    let conflicts: [&dyn Fn() -> u32; 5] = [
        &|| cu!(cuStreamSynchronize(captured)),
        &|| cu!(cuStreamQuery(captured)),
        &|| cu!(cuCtxSynchronize()),
        &|| cu!(cuStreamWaitEvent(captured, outside, 0)),
        &|| cu!(cuStreamWaitEvent(other, record(captured), 0)),
    ];
    for (call, code) in conflicts.iter().zip([900, 900, 900, 905, 905]) {
        begin_capture(captured, 2);
        assert_eq!((call(), end_capture(captured)), (code, 901));
    }
}

#[test]
fn the_legacy_stream_refuses_work_during_a_capture() {
    let _session = begin(Config::default());
    let memory = alloc(LEN);
    let blocking = stream_with(0);
    let free = stream();
    assert_eq!(cu!(cuStreamBeginCapture_v2(null_mut(), mode(0))), 900);
    for (stream, asked, code, end) in [(blocking, Err(906), 906, 901), (free, Ok(0), 0, 0)] {
        begin_capture(stream, 2);
        assert_eq!(capturing(null_mut()), asked);
        assert_eq!(capturing(stream), Ok(1));
        assert_eq!(fill(memory, null_mut()), code);
        assert_eq!(end_capture(stream), end);
    }
    assert_eq!(end_capture(free), 903);
}

// --- memory ---

#[test]
fn freed_device_memory_is_poisoned() {
    let session = begin(Config::default());
    let there = alloc(LEN);
    assert_eq!(there % 512, 0);
    let address = session.host_address(there).unwrap();
    assert_eq!(session.peek(there, LEN), [0xa5; LEN]);
    ok!(cuMemFree_v2(there));
    assert_eq!(session.host_address(there), None);
    // SAFETY: the stand-in keeps the pages of freed memory for the session.
    let freed = unsafe { std::slice::from_raw_parts(address, LEN) };
    assert_eq!(freed, [0xdd; LEN]);
    assert_ne!(alloc(LEN), there);
}

#[test]
fn wrong_uses_of_device_memory_are_violations() {
    type Use = fn(u64, sys::CUstream) -> u32;
    const FREED: &str = "mem#1 is used after it was freed";
    const FILL: &str = "cuMemsetD8Async mem#1+0";
    let table: [(Use, &[&str]); 4] = [
        (
            |there, stream| cu!(cuMemFree_v2(there)) + fill(there, stream),
            &[FREED, "cuMemFree_v2 mem#1+0", FILL],
        ),
        (
            |there, stream| cu!(cuMemFreeAsync(there, stream)) + fill(there, stream),
            &[FREED, "cuMemFreeAsync mem#1+0", FILL],
        ),
        (
            |there, _| cu!(cuMemFree_v2(there)) + cu!(cuMemFree_v2(there)),
            &["double free of mem#1"],
        ),
        (
            |there, stream| fill(there + 1, stream),
            &["cuMemsetD8Async mem#1+1", "leaves mem#1"],
        ),
    ];
    for (run, words) in table {
        let mut session = begin(Config::default());
        assert_eq!(run(alloc(LEN), stream()), 1, "{words:?}");
        assert_violation(&mut session, words);
    }
}

#[test]
fn unregistering_before_a_copy_is_seen_complete_is_a_violation() {
    for seen in [false, true] {
        let mut session = begin(Config::default());
        let there = alloc(LEN);
        let host = pinned(1);
        let stream = stream();
        assert_eq!(upload(there, &host, stream), 0);
        let host_at = at(&host) as u64;
        until("it is done", || session.in_flight(host_at, LEN) == 0);
        if seen {
            ok!(cuStreamSynchronize(stream));
        }
        assert_eq!(session.unobserved(host_at, LEN), usize::from(!seen));
        ok!(cuMemHostUnregister(at(&host)));
        if !seen {
            let words = [
                "cuMemHostUnregister pin#1+0",
                "not seen complete",
                "cuMemcpyHtoDAsync_v2",
            ];
            assert_violation(&mut session, &words);
        }
    }
}

#[test]
fn memory_unmapped_while_registered_is_a_violation() {
    let cases = [
        ("unregistration", 1),
        ("copy", 2),
        ("end", 1),
        ("refused", 1),
        ("refused and released", 0),
    ];
    for (when, expected) in cases {
        let session = begin(Config::default());
        let there = alloc(LEN);
        let stream = stream();
        let gone = far_pages();
        ok!(cuMemHostRegister_v2(gone, LEN, 0));
        session.hold(true);
        if when == "copy" {
            ok!(cuMemcpyHtoDAsync_v2(there, gone, LEN, stream));
        }
        if when.starts_with("refused") {
            session.fail_named("cuMemHostUnregister", 0, 719, true);
            assert_eq!(cu!(cuMemHostUnregister(gone)), 719);
        }
        if when.ends_with("released") {
            ok!(cuDevicePrimaryCtxRelease_v2(0));
        }
        // SAFETY: the pages are this test's; the stand-in looks whether they are mapped before it
        // reads them.
        unsafe { munmap(gone, LEN) }.unwrap();
        session.hold(false);
        match when {
            "unregistration" => ok!(cuMemHostUnregister(gone)),
            "copy" => ok!(cuStreamSynchronize(stream)),
            _ => {}
        }
        let found = session.end();
        assert_eq!(found.len(), expected, "{when}: {found:#?}");
        let are_named = found.iter().all(|text| text.contains("unmapped"));
        assert!(are_named, "{found:#?}");
    }
}

// --- order ---

#[test]
fn a_copy_back_into_pinned_memory_that_a_copy_reads_needs_order() {
    let mut session = begin(Config::default());
    let there = alloc(LEN);
    let other = alloc(LEN);
    let host = pinned(1);
    let one = stream();
    let two = stream();
    assert_eq!(upload(there, &host, one), 0);
    ok!(cuMemcpyDtoHAsync_v2(at(&host), other, LEN, two));
    let words = [
        "unordered use of pin#1",
        "cuMemcpyHtoDAsync_v2 mem#1+0 pin#1+0",
        "reads",
        "cuMemcpyDtoHAsync_v2",
        "writes",
    ];
    assert_violation(&mut session, &words);
}

#[test]
fn a_free_in_stream_order_comes_after_the_uses_of_other_streams() {
    let mut session = begin(Config::default());
    let mut there = 0;
    let one = stream();
    let two = stream();
    ok!(cuMemAllocAsync(&mut there, LEN, one));
    ok!(cuStreamWaitEvent(two, record(one), 0));
    assert_eq!(fill(there, two), 0);
    assert_eq!(session.violations(), [""; 0]);
    ok!(cuMemFreeAsync(there, one));
    let words = [
        "unordered use of mem#1",
        "cuMemsetD8Async",
        "cuMemFreeAsync",
    ];
    assert_violation(&mut session, &words);
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    for (flags, ordered) in [(0, true), (1, false)] {
        for legacy_first in [false, true] {
            let mut session = begin(Config::default());
            let there = alloc(LEN);
            let stream = stream_with(flags);
            let mut streams = [stream, null_mut()];
            streams.rotate_left(usize::from(legacy_first));
            assert_eq!(streams.map(|stream| fill(there, stream)), [0, 0]);
            let seen = session.expect_violations().is_empty();
            assert_eq!(seen, ordered, "flags {flags}, legacy first: {legacy_first}");
        }
    }
}

const STREAMS: usize = 3;

/// A step of a random program: a fill or a read of a part, or a wait.
#[derive(Clone, Debug)]
enum Step {
    Touch {
        stream: usize,
        write: bool,
        buffer: usize,
        start: usize,
        len: usize,
    },
    Wait {
        stream: usize,
        on: usize,
    },
    /// The host sees all of a stream complete, in one of [`SEES`].
    Host {
        stream: usize,
        by: usize,
    },
}

/// A stream that was waited for, an event that answered, and a host function that has run.
const SEES: [fn(sys::CUstream); 3] = [
    |stream| ok!(cuStreamSynchronize(stream)),
    |stream| {
        let event = record(stream);
        until("the event answers", || cu!(cuEventQuery(event)) == 0);
    },
    |stream| {
        static RAN: AtomicU32 = AtomicU32::new(0);
        unsafe extern "C" fn ran(_: *mut c_void) {
            RAN.fetch_add(1, Ordering::AcqRel);
        }
        let before = RAN.load(Ordering::Acquire);
        ok!(cuLaunchHostFunc(stream, Some(ran), null_mut()));
        let has_run = || RAN.load(Ordering::Acquire) > before;
        until("the function has run", has_run);
    },
];

fn step() -> impl Strategy<Value = Step> {
    let touch = (0..STREAMS, any::<bool>(), 0..2usize, 0..48usize, 1..16usize);
    prop_oneof![
        6 => touch.prop_map(|(stream, write, buffer, start, len)| Step::Touch { stream, write, buffer, start, len }),
        3 => (0..STREAMS, 0..STREAMS).prop_map(|(stream, on)| Step::Wait { stream, on }),
        1 => (0..STREAMS, 0..SEES.len()).prop_map(|(stream, by)| Step::Host { stream, by }),
    ]
}

/// Graph of all operations; order is reachability.
#[derive(Default)]
struct Naive {
    /// Direct predecessors of each node.
    before: Vec<Vec<usize>>,
    accesses: Vec<(usize, usize, std::ops::Range<usize>, bool)>,
    last: [Option<usize>; STREAMS],
    host: Option<usize>,
}

impl Naive {
    fn node(&mut self, before: impl IntoIterator<Item = Option<usize>>) -> usize {
        self.before.push(before.into_iter().flatten().collect());
        self.before.len() - 1
    }

    fn reaches(&self, from: usize, to: usize) -> bool {
        from == to
            || self.before[to]
                .iter()
                .any(|&node| node >= from && self.reaches(from, node))
    }

    /// Whether the step is in conflict with an earlier one.
    fn step(&mut self, step: &Step) -> bool {
        let (stream, write, buffer, part) = match *step {
            Step::Touch {
                stream,
                write,
                buffer,
                start,
                len,
            } => (stream, write, buffer, start..start + len),
            Step::Wait { stream, on } => {
                self.last[stream] = Some(self.node([self.last[stream], self.last[on], self.host]));
                return false;
            }
            Step::Host { stream, .. } => {
                self.host = Some(self.node([self.host, self.last[stream]]));
                return false;
            }
        };
        let node = self.node([self.last[stream], self.host]);
        self.last[stream] = Some(node);
        let wrong = self.accesses.iter().any(|(before, at, other, wrote)| {
            let meet = other.start < part.end && part.start < other.end;
            *at == buffer && meet && (*wrote || write) && !self.reaches(*before, node)
        });
        self.accesses.push((node, buffer, part, write));
        wrong
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_unordered_access_is_a_violation(
        steps in prop::collection::vec(step(), 1..40)
    ) {
        let mut session = begin(Config::default());
        let buffers = [alloc(64), alloc(64)];
        let streams = [stream(), stream(), stream()];
        let mut naive = Naive::default();
        let back = pinned(0);
        for (index, step) in steps.iter().enumerate() {
            match *step {
                Step::Touch { stream, write: true, buffer, start, len } => {
                    ok!(cuMemsetD8Async(buffers[buffer] + start as u64, 1, len, streams[stream]));
                }
                Step::Touch { stream, buffer, start, len, .. } => {
                    // To separate memory, so that only the reads count.
                    let to = at(&back).wrapping_byte_add(index * 64);
                    ok!(cuMemcpyDtoHAsync_v2(to, buffers[buffer] + start as u64, len, streams[stream]));
                }
                Step::Wait { stream, on } => ok!(cuStreamWaitEvent(streams[stream], record(streams[on]), 0)),
                Step::Host { stream, by } => SEES[by](streams[stream]),
            }
            let found = session.expect_violations();
            session.forget_violations();
            prop_assert_eq!(!found.is_empty(), naive.step(step), "step {}: {:#?}", index, found);
        }
        ok!(cuCtxSynchronize());
    }
}

// --- failures ---

#[test]
fn a_chosen_call_fails_and_does_nothing() {
    let session = begin(Config::default());
    let there = alloc(LEN);
    let stream = stream();
    session.fail_at(session.calls() + 1, 999, false);
    session.fail_named("cuMemsetD8Async", 3, 2, false);
    assert_eq!([0; 5].map(|_| fill(there, stream)), [0, 999, 0, 2, 0]);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(session.executed(), 3);
}

#[test]
fn a_sticky_failure_fails_every_later_call() {
    let devices = vec![Gpu::new(1 << 20, ""); 2];
    let session = begin(Config {
        devices,
        ..Config::default()
    });
    let there = alloc(LEN);
    let host = pinned(1);
    let stream = stream();
    let event = event();
    session.fail_named("cuMemcpyHtoDAsync_v2", 0, 719, true);
    assert_eq!(upload(there, &host, stream), 719);
    let codes = [
        cu!(cuEventQuery(event)),
        cu!(cuCtxGetCurrent(&mut null_mut())),
        cu!(cuEventDestroy_v2(event)),
        cu!(cuEventDestroy_v2(event)),
        cu!(cuStreamDestroy_v2(stream)),
        cu!(cuMemFree_v2(there)),
        cu!(cuMemHostUnregister(at(&host))),
    ];
    assert_eq!(codes, [719; 7]);
    // The driver may still reach it.
    std::mem::forget(host);
    let left = Live {
        retains: 1,
        leaked: 4,
        leaked_bytes: LEN as u64,
        ..Live::default()
    };
    assert_eq!(session.live(), left);
    // Another device is another context.
    let other = std::thread::spawn(|| {
        enter(1);
        cu!(cuCtxSynchronize())
    });
    assert_eq!(other.join().unwrap(), 0);
}

#[test]
fn a_failed_operation_kills_its_context_and_those_that_wait_for_it() {
    let devices = vec![Gpu::new(1 << 20, ""); 2];
    let session = begin(Config {
        devices,
        ..Config::default()
    });
    let there = [alloc(LEN), alloc(LEN), alloc(LEN)];
    let host = pinned(7);
    let one = stream();
    let two = stream();
    session.fail_async(1, 700);
    session.hold(true);
    assert_eq!(there.map(|there| upload(there, &host, one)), [0; 3]);
    let event = record(one);
    ok!(cuStreamWaitEvent(two, event, 0));
    enter(1);
    let elsewhere = stream();
    ok!(cuStreamWaitEvent(elsewhere, event, 0));
    session.hold(false);
    assert_eq!(cu!(cuStreamSynchronize(elsewhere)), 700);
    let codes = [
        cu!(cuStreamSynchronize(one)),
        cu!(cuEventQuery(event)),
        cu!(cuStreamSynchronize(two)),
    ];
    assert_eq!(codes, [700; 3]);
    let bytes = there.map(|there| session.peek(there, 1)[0]);
    assert_eq!(bytes, [7, 0xa5, 0xa5]);
    // The device may still come back to this memory: it is never unmapped.
    assert_eq!(session.in_flight(at(&host) as u64, LEN), 2);
    std::mem::forget(host);
}

#[test]
fn objects_are_alive_until_they_are_released() {
    let session = begin(Config::default());
    let there = alloc(LEN);
    let host = pinned(1);
    let stream = stream();
    let event = event();
    let mut memory = null_mut();
    ok!(cuMemHostAlloc(&mut memory, 100, 0));
    let module = module();
    let bytes = LEN as u64;
    let one = Live {
        retains: 1,
        streams: 1,
        events: 1,
        allocations: 1,
        bytes,
        modules: 1,
        ..Live::default()
    };
    let all = Live {
        registrations: 1,
        registered_bytes: bytes,
        host_allocations: 1,
        ..one
    };
    assert_eq!(session.live(), all);
    ok!(cuModuleUnload(module));
    ok!(cuMemFreeHost(memory));
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuMemFree_v2(there));
    let left = Live {
        registrations: 1,
        registered_bytes: bytes,
        ..Live::default()
    };
    assert_eq!(session.live(), Live { retains: 1, ..left });
    // The context takes the registration along, but nobody has released it.
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(session.live(), left);
    drop(host);
}

// --- kernels and host functions ---

const PTX: &str =
    ".version 8.0\n.target sm_80\n.visible .entry add_one(\n\t.param .u64 p\n)\n{ ret; }\n\0";

extern "C" fn idle(_: *const u32, _: *const u32, _: *const *const c_void) {}

fn module() -> sys::CUmodule {
    let mut module = null_mut();
    ok!(cuModuleLoadData(&mut module, PTX.as_ptr().cast()));
    module
}

#[test]
fn kernels_write_and_read_the_allocations_of_their_pointers() {
    let mut session = begin(Config::default());
    session.register_kernel("add_one", idle, &[8, 8], 0b11, 0b01);
    let out = alloc(LEN);
    let input = alloc(LEN);
    let one = stream();
    let two = stream();
    let mut add = null_mut();
    ok!(cuModuleGetFunction(&mut add, module(), c"add_one".as_ptr()));
    let mut params = [
        (&raw const out).cast_mut().cast::<c_void>(),
        (&raw const input).cast_mut().cast(),
    ];
    assert_eq!(fill(input, one), 0);
    ok!(cuStreamWaitEvent(two, record(one), 0));
    ok!(cuLaunchKernel(
        add,
        1,
        1,
        1,
        4,
        1,
        1,
        0,
        two,
        params.as_mut_ptr(),
        null_mut()
    ));
    // Both only read it.
    ok!(cuMemcpyDtoDAsync_v2(alloc(LEN), input, LEN, one));
    assert_eq!(session.violations(), [""; 0]);
    // The kernel did not write these bytes, but the driver cannot know.
    ok!(cuMemcpyDtoDAsync_v2(alloc(LEN), out + 100, 100, one));
    let words = ["unordered use of mem#1", "(add_one) writes"];
    assert_violation(&mut session, &words);
}

#[test]
fn a_host_function_runs_in_order_and_calls_no_driver() {
    static SEEN: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn look(data: *mut c_void) {
        // SAFETY: the test passes a pinned page that it keeps.
        let byte = unsafe { *data.cast::<u8>() };
        SEEN.store(u32::from(byte) + cu!(cuCtxSynchronize()), Ordering::Release);
    }
    let mut session = begin(Config {
        latency: Duration::from_millis(2),
        ..Config::default()
    });
    let there = alloc(LEN);
    let host = pinned(1);
    let stream = stream();
    ok!(cuMemcpyDtoHAsync_v2(at(&host), there, LEN, stream));
    ok!(cuLaunchHostFunc(stream, Some(look), at(&host)));
    ok!(cuStreamSynchronize(stream));
    assert_eq!(SEEN.load(Ordering::Acquire), 0xa5 + 800);
    assert_violation(&mut session, &["cuCtxSynchronize", "host function"]);
    ok!(cuMemHostUnregister(at(&host)));
}
