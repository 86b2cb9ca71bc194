//! The stand-in GPU itself: it is late where a GPU is late, detects silent errors of a GPU, and fails on request.

#![allow(unsafe_code)]

/// Compiled by the helper, not here; named so that rustfmt sees it.
#[cfg(any())]
#[path = "../standin/cuda.rs"]
mod source;

use crate::common::standin::{Config, Gpu, Live, Session, cuda};
use crate::common::until;
use cudarc::driver::{CudaContext, sys};
use memmap2::MmapMut;
use proptest::prelude::*;
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LEN: usize = 8192;

/// A call of the driver API as a number.
macro_rules! cu {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: results go to places of the right type that outlive the call; other pointers are what the stand-in is
        // asked to judge, or memory that the test keeps until its session has ended.
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

// --- devices and contexts ---

#[test]
fn calls_without_a_current_context_are_refused() {
    let _session = begin(Config::default());
    let (stream, mut found, mut there) = (stream(), null_mut(), 0);
    ok!(cuCtxPopCurrent_v2(&mut found));
    assert_eq!(cu!(cuMemAlloc_v2(&mut there, 1)), 201);
    assert_eq!(cu!(cuStreamSynchronize(stream)), 201);
    assert_eq!(cu!(cuCtxSynchronize()), 201);
    assert_eq!(cu!(cuCtxPopCurrent_v2(&mut found)), 201);
    // A stream names its context.
    ok!(cuMemAllocAsync(&mut there, 1, stream));
    ok!(cuMemFreeAsync(there, stream));
    assert_eq!(cu!(cuMemAllocAsync(&mut there, 1, null_mut())), 201);
    ok!(cuCtxPushCurrent_v2(found));
    ok!(cuCtxSynchronize());
    // Other threads have contexts of their own.
    let seen = std::thread::spawn(|| {
        let mut found = null_mut();
        ok!(cuCtxGetCurrent(&mut found));
        found.is_null()
    });
    assert!(seen.join().unwrap());
}

#[test]
fn two_devices_have_separate_contexts_streams_and_memory() {
    let devices = vec![Gpu::new(1 << 20, "0000:01:00.0"), Gpu::new(1 << 20, "0000:02:00.0")];
    let mut session = begin(Config { devices, ..Config::default() });
    let (first, one) = (alloc(LEN), stream());
    let context = enter(1);
    let (second, two) = (alloc(LEN), stream());
    let (mut device, mut owner, mut free, mut total) = (-1, null_mut(), 0, 0);
    ok!(cuCtxGetDevice(&mut device));
    ok!(cuStreamGetCtx(two, &mut owner));
    ok!(cuMemGetInfo_v2(&mut free, &mut total));
    assert_eq!((device, owner, free, total), (1, context, (1 << 20) - LEN, 1 << 20));
    for (place, expected) in [(first, 0), (second, 1)] {
        use sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        ok!(cuPointerGetAttribute((&raw mut device).cast(), CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, place));
        assert_eq!(device, expected);
    }
    // Device 1 is current: nothing is enqueued on a stream of device 0, nor its events recorded there.
    assert_eq!(fill(second, one), 400);
    assert_eq!(cu!(cuEventRecord(event(), one)), 400);
    // But a stream may wait for an event of the other device, and without that there is a violation.
    assert_eq!(fill(second, two), 0);
    let filled = record(two);
    enter(0);
    ok!(cuStreamWaitEvent(one, filled, 0));
    ok!(cuMemcpyDtoDAsync_v2(first, second, LEN, one));
    ok!(cuStreamSynchronize(one));
    assert_eq!((session.peek(first, LEN), session.violations()), (vec![1; LEN], vec![]));
    assert_eq!(fill(first, one), 0);
    enter(1);
    ok!(cuMemcpyDtoDAsync_v2(second, first, LEN, two));
    assert_violation(&mut session, &["cuMemsetD8Async", "cuMemcpyDtoDAsync_v2", "mem#1"]);
}

#[test]
fn the_last_release_destroys_a_context() {
    let session = begin(Config::default());
    let (stream, host, context) = (stream(), pinned(1), enter(0));
    let (mut flags, mut active) = (0, 0);
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    ok!(cuStreamSynchronize(stream));
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(cu!(cuStreamSynchronize(stream)), 709);
    assert_eq!(cu!(cuCtxSetCurrent(context)), 201);
    assert_eq!(cu!(cuDevicePrimaryCtxRelease_v2(0)), 201);
    ok!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    assert_eq!(active, 0);
    let left = Live { streams: 1, registrations: 1, registered_bytes: LEN as u64, ..Live::default() };
    assert_eq!(session.live(), left);
    // Nothing left can reach this memory.
    drop(host);
}

// --- late copies ---

#[test]
fn a_copy_reads_pinned_memory_when_it_runs() {
    let session = begin(Config::default());
    // A copy of pageable memory waits for the work before it.
    let (stream, other, to_pinned, to_pageable) = (stream(), stream(), alloc(LEN), alloc(LEN));
    let (mut pinned, mut pageable) = (pinned(1), pages(1));
    session.hold(true);
    assert_eq!((upload(to_pinned, &pinned, stream), upload(to_pageable, &pageable, other)), (0, 0));
    assert_eq!(cu!(cuStreamQuery(stream)), 600);
    assert_eq!((session.peek(to_pinned, LEN), session.executed()), (vec![0xa5; LEN], 0));
    let (pinned_at, pageable_at) = (at(&pinned) as u64, at(&pageable) as u64);
    assert_eq!((session.in_flight(pinned_at, LEN), session.in_flight(pageable_at, LEN)), (1, 0));
    pinned.fill(2);
    pageable.fill(2);
    session.hold(false);
    ok!(cuCtxSynchronize());
    assert_eq!((session.peek(to_pinned, LEN), session.peek(to_pageable, LEN)), (vec![2; LEN], vec![1; LEN]));
    assert_eq!((session.in_flight(pinned_at, LEN), session.executed()), (0, 2));
    ok!(cuMemHostUnregister(at(&pinned)));
}

#[test]
fn a_copy_back_to_pageable_memory_is_done_on_return() {
    let session = begin(Config::default());
    let (stream, there, pinned, pageable) = (stream(), alloc(LEN), pinned(1), pages(1));
    ok!(cuMemcpyDtoHAsync_v2(at(&pageable), there, LEN, stream));
    assert_eq!(&pageable[..], [0xa5; LEN]);
    ok!(cuMemcpyHtoD_v2(there, [7u8; LEN].as_ptr().cast(), LEN));
    session.hold(true);
    ok!(cuMemcpyDtoHAsync_v2(at(&pinned), there, LEN, stream));
    assert_eq!(&pinned[..], [1; LEN]);
    session.hold(false);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(&pinned[..], [7; LEN]);
    ok!(cuMemcpyDtoH_v2(at(&pageable), there, LEN));
    assert_eq!(&pageable[..], [7; LEN]);
    ok!(cuMemHostUnregister(at(&pinned)));
}

#[test]
fn operations_take_at_least_bandwidth_and_latency() {
    let (bandwidth, latency) = (1 << 20, Duration::from_millis(3));
    let _session = begin(Config { bandwidth, latency, ..Config::default() });
    let (stream, there, host, mut ms) = (stream(), alloc(LEN), pinned(1), 0.0);
    let start = record(stream);
    assert_eq!((upload(there, &host, stream), fill(there, stream)), (0, 0));
    let end = record(stream);
    assert_eq!(cu!(cuEventElapsedTime(&mut ms, start, end)), 600);
    ok!(cuEventSynchronize(end));
    ok!(cuEventElapsedTime(&mut ms, start, end));
    // Twice 3 ms, twice 8 KiB at 1 MiB/s.
    assert!(ms >= 2.0 * (3.0 + 7.8), "{ms}");
    ok!(cuMemHostUnregister(at(&host)));
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
fn a_stream_waits_for_its_event_and_others_do_not() {
    let session = begin(Config::default());
    OPEN.store(0, Ordering::Release);
    let (first, second, one, two, other) = (alloc(LEN), alloc(LEN), stream(), stream(), stream());
    let blocking = stream_with(0);
    ok!(cuLaunchHostFunc(one, Some(gate), null_mut()));
    ok!(cuStreamWaitEvent(two, record(one), 0));
    // The legacy stream waits for the blocking one, which waits for the gate.
    ok!(cuStreamWaitEvent(blocking, record(one), 0));
    assert_eq!((fill(first, two), fill(second, null_mut())), (0, 0));
    let free = alloc(LEN);
    for _ in 0..20 {
        assert_eq!(fill(free, other), 0);
        ok!(cuStreamSynchronize(other));
    }
    assert_eq!([one, two, blocking, null_mut()].map(|stream| cu!(cuStreamQuery(stream))), [600; 4]);
    assert_eq!([first, second, free].map(|at| session.peek(at, 1)[0]), [0xa5, 0xa5, 1]);
    OPEN.store(1, Ordering::Release);
    ok!(cuCtxSynchronize());
    assert_eq!([first, second].map(|at| session.peek(at, 1)[0]), [1, 1]);
}

#[test]
fn calls_wait_until_they_are_admitted() {
    let session = begin(Config::default());
    let event = event();
    session.admit("cuEventQuery", 1);
    ok!(cuEventQuery(event));
    let event = event as usize;
    let waits = std::thread::spawn(move || ok!(cuEventQuery(event as sys::CUevent)));
    until("it is in the trace", || session.trace().ends_with("cuEventQuery event#1 = ...\n"));
    ok!(cuEventSynchronize(event as sys::CUevent));
    assert!(!waits.is_finished());
    session.admit("cuEventQuery", 2);
    waits.join().unwrap();
}

#[test]
fn an_operation_that_waits_holds_up_the_streams_of_its_hardware_queue() {
    // The context's legacy stream has the first queue of the default priority.
    for (queues, held_up) in [(0, [false, false]), (1, [true, true]), (2, [false, true]), (3, [false, false])] {
        let session = begin(Config { queues, ..Config::default() });
        OPEN.store(0, Ordering::Release);
        let (stopped, second, third, mut preferred) = (stream(), stream(), stream(), null_mut());
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
        let others = [(second, held_up[0]), (third, held_up[1]), (preferred, false)];
        for ((other, _), place) in others.iter().zip(&places[1..]) {
            assert_eq!(fill(*place, *other), 0);
        }
        for (other, _) in others.iter().filter(|(_, held_up)| !held_up) {
            ok!(cuStreamSynchronize(*other));
        }
        for (other, held_up) in others {
            assert_eq!(cu!(cuStreamQuery(other)), if held_up { 600 } else { 0 }, "{queues} queues");
        }
        OPEN.store(1, Ordering::Release);
        ok!(cuCtxSynchronize());
        assert_eq!(places.iter().map(|at| session.peek(*at, 1)[0]).collect::<Vec<_>>(), [1; 4]);
    }
}

unsafe extern "C" fn ready(_: *mut c_void) {}

#[test]
fn an_event_stands_for_its_last_record() {
    let session = begin(Config::default());
    let (stream, event, mut untimed, mut ms) = (stream(), event(), null_mut(), 0.0);
    ok!(cuEventQuery(event));
    ok!(cuEventSynchronize(event));
    ok!(cuStreamWaitEvent(stream, event, 0));
    assert_eq!(cu!(cuEventElapsedTime(&mut ms, event, event)), 400);
    ok!(cuEventRecord(event, stream));
    ok!(cuEventSynchronize(event));
    ok!(cuEventElapsedTime(&mut ms, event, event));
    session.hold(true);
    ok!(cuEventRecord(event, stream));
    assert_eq!(cu!(cuEventQuery(event)), 600);
    session.hold(false);
    ok!(cuEventCreate(&mut untimed, 2));
    ok!(cuEventRecord(untimed, stream));
    ok!(cuEventSynchronize(untimed));
    assert_eq!(cu!(cuEventElapsedTime(&mut ms, untimed, untimed)), 400);
    ok!(cuEventDestroy_v2(event));
    assert_eq!(cu!(cuEventQuery(event)), 400);
    assert_eq!(cu!(cuStreamWaitEvent(stream, event, 0)), 400);
}

// --- captures of graphs ---

fn begin_capture(stream: sys::CUstream, mode: u32) {
    // SAFETY: the driver's modes are 0, 1 and 2.
    let mode: sys::CUstreamCaptureMode = unsafe { std::mem::transmute(mode) };
    ok!(cuStreamBeginCapture_v2(stream, mode));
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
fn exchange(mode: u32) -> u32 {
    // SAFETY: the driver's modes are 0, 1 and 2.
    let mut mode: sys::CUstreamCaptureMode = unsafe { std::mem::transmute(mode) };
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
    let (stream, event) = (stream(), event());
    let (stream_at, event_at, context) = (stream as usize, event as usize, enter(0) as usize);
    // Mode of the capture, mode of the thread that calls, whether it is the capturing one, whether the call is refused.
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
        let code = if own { call() } else { std::thread::spawn(call).join().unwrap() };
        assert_eq!(code, if refused { 900 } else { 0 }, "{capture} {thread} {own}");
        assert_eq!(capturing(stream), Ok(1 + u32::from(refused)));
        assert_eq!(end_capture(stream), if refused { 901 } else { 0 });
        assert_eq!(capturing(stream), Ok(0));
    }
}

#[test]
fn captured_work_does_not_run_and_a_captured_event_is_no_event() {
    let session = begin(Config::default());
    let (memory, captured, other, outside) = (alloc(LEN), stream(), stream(), event());
    exchange(2);
    begin_capture(captured, 0);
    assert_eq!(fill(memory, captured), 0);
    let inside = record(captured);
    ok!(cuStreamWaitEvent(captured, inside, 0));
    assert_eq!(end_capture(captured), 0);
    assert_eq!(session.peek(memory, 1)[0], 0xa5);
    let mut ms = 0.0;
    assert_eq!([cu!(cuEventQuery(inside)), cu!(cuEventSynchronize(inside))], [907; 2]);
    assert_eq!(
        [cu!(cuStreamWaitEvent(other, inside, 0)), cu!(cuEventElapsedTime(&mut ms, inside, inside))],
        [905, 907]
    );
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
    let (memory, blocking, free) = (alloc(LEN), stream_with(0), stream());
    assert_eq!(cu!(cuStreamBeginCapture_v2(null_mut(), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)), 900);
    for (stream, code) in [(blocking, 906), (free, 0)] {
        begin_capture(stream, 2);
        assert_eq!(capturing(null_mut()), if code == 0 { Ok(0) } else { Err(code) });
        assert_eq!(capturing(stream), Ok(1));
        assert_eq!(fill(memory, null_mut()), code);
        assert_eq!(end_capture(stream), if code == 0 { 0 } else { 901 });
    }
    assert_eq!(end_capture(free), 903);
}

// --- memory ---

#[test]
fn freed_device_memory_is_poisoned() {
    let session = begin(Config::default());
    let there = alloc(LEN);
    assert_eq!(there % 512, 0);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        (start..end).contains(&there)
    });
    assert!(line.unwrap().contains("---p"), "{line:?}");
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
    type Case = (&'static str, fn(u64, sys::CUstream) -> u32, &'static [&'static str]);
    let table: [Case; 4] = [
        (
            "freed",
            |there, stream| {
                ok!(cuMemFree_v2(there));
                fill(there, stream)
            },
            &["mem#1 is used after it was freed", "cuMemFree_v2 mem#1+0", "cuMemsetD8Async mem#1+0"],
        ),
        (
            "freed in stream order",
            |there, stream| {
                ok!(cuMemFreeAsync(there, stream));
                fill(there, stream)
            },
            &["mem#1 is used after it was freed", "cuMemFreeAsync mem#1+0", "cuMemsetD8Async mem#1+0"],
        ),
        (
            "twice",
            |there, _| {
                ok!(cuMemFree_v2(there));
                cu!(cuMemFree_v2(there))
            },
            &["double free of mem#1"],
        ),
        ("beyond", |there, stream| fill(there + 1, stream), &["cuMemsetD8Async mem#1+1", "leaves mem#1"]),
    ];
    for (what, run, words) in table {
        let mut session = begin(Config::default());
        let (there, stream) = (alloc(LEN), stream());
        assert_eq!(run(there, stream), 1, "{what}");
        assert_violation(&mut session, words);
    }
}

#[test]
fn memory_ends_at_the_limit_and_comes_back_when_it_is_freed() {
    let _session = begin(Config { devices: vec![Gpu::new(1 << 20, "")], ..Config::default() });
    let (mut other, mut free, mut total) = (0, 0, 0);
    let there = alloc(1 << 19);
    assert_eq!(cu!(cuMemAlloc_v2(&mut other, (1 << 19) + 1)), 2);
    assert_eq!(cu!(cuMemAllocAsync(&mut other, (1 << 19) + 1, null_mut())), 2);
    ok!(cuMemFreeAsync(there, null_mut()));
    ok!(cuCtxSynchronize());
    ok!(cuMemGetInfo_v2(&mut free, &mut total));
    assert_eq!((free, total), (1 << 20, 1 << 20));
    alloc(1 << 20);
    assert_eq!(cu!(cuMemAlloc_v2(&mut other, 0)), 1);
}

#[test]
fn freeing_waits_for_the_work_of_the_device() {
    let session = begin(Config { latency: Duration::from_millis(5), ..Config::default() });
    let (there, host, stream) = (alloc(LEN), pinned(1), stream());
    assert_eq!(upload(there, &host, stream), 0);
    ok!(cuMemFree_v2(there));
    assert_eq!((session.executed(), session.in_flight(at(&host) as u64, LEN)), (1, 0));
    ok!(cuMemHostUnregister(at(&host)));
}

#[test]
fn registration_is_checked() {
    let session = begin(Config::default());
    let memory = pages(0);
    let inside = at(&memory).wrapping_byte_add(4096);
    let register = |at, len| cu!(cuMemHostRegister_v2(at, len, 0));
    assert_eq!(register(at(&memory).wrapping_byte_add(64), 4096), 1);
    assert_eq!(register(at(&memory), 0), 1);
    assert_eq!(register(4096 as *mut c_void, 4096), 1);
    assert_eq!(register(at(&memory), LEN), 0);
    assert_eq!((register(at(&memory), LEN), register(inside, 4096)), (712, 712));
    assert_eq!(cu!(cuMemHostUnregister(inside)), 713);
    let mut mapped = 0;
    ok!(cuMemHostGetDevicePointer_v2(&mut mapped, inside, 0));
    assert_eq!(mapped, inside as u64);
    assert_eq!(session.live().registered_bytes, LEN as u64);
    ok!(cuMemHostUnregister(at(&memory)));
    assert_eq!(cu!(cuMemHostUnregister(at(&memory))), 713);
    drop(session);
    let _session = begin(Config { register_error: 801, ..Config::default() });
    assert_eq!(register(at(&memory), LEN), 801);
}

#[test]
fn unregistering_under_a_copy_is_a_violation() {
    for wait in ["not", "done, unseen", "seen"] {
        let mut session = begin(Config::default());
        let (there, host, stream, other) = (alloc(LEN), pinned(1), stream(), stream());
        session.hold(wait == "not");
        assert_eq!(upload(there, &host, stream), 0);
        match wait {
            "done, unseen" => {
                while session.in_flight(at(&host) as u64, LEN) > 0 {
                    std::thread::yield_now();
                }
                assert_eq!(session.unobserved(at(&host) as u64, LEN), 1);
            }
            "seen" => {
                ok!(cuStreamWaitEvent(other, record(stream), 0));
                ok!(cuStreamSynchronize(other));
                assert_eq!(session.unobserved(at(&host) as u64, LEN), 0);
            }
            _ => {}
        }
        ok!(cuMemHostUnregister(at(&host)));
        if wait != "seen" {
            assert_violation(
                &mut session,
                &["cuMemHostUnregister pin#1+0", "not seen complete", "cuMemcpyHtoDAsync_v2"],
            );
        }
    }
}

#[test]
fn memory_unmapped_while_registered_is_a_violation() {
    for when in ["unregistration", "copy", "end"] {
        let session = begin(Config::default());
        let (there, host, stream) = (alloc(LEN), pinned(1), stream());
        let gone = at(&host);
        session.hold(true);
        if when == "copy" {
            assert_eq!(upload(there, &host, stream), 0);
        }
        drop(host);
        session.hold(false);
        match when {
            "unregistration" => ok!(cuMemHostUnregister(gone)),
            "copy" => ok!(cuStreamSynchronize(stream)),
            _ => {}
        }
        let found = session.end();
        let expected = if when == "copy" { 2 } else { 1 };
        assert_eq!(found.len(), expected, "{when}: {found:#?}");
        assert!(found.iter().all(|text| text.contains("unmapped")), "{found:#?}");
    }
}

// --- order ---

#[test]
fn work_on_two_streams_needs_an_event_or_the_host_between() {
    type Between = fn(sys::CUstream, sys::CUstream);
    let table: [(&str, bool, Between); 7] = [
        ("nothing", false, |_, _| {}),
        ("an event that was recorded and not waited for", false, |one, _| _ = record(one)),
        ("a wait for an event of before", false, |_, two| ok!(cuStreamWaitEvent(two, record(two), 0))),
        ("a wait", true, |one, two| ok!(cuStreamWaitEvent(two, record(one), 0))),
        ("a synchronised stream", true, |one, _| ok!(cuStreamSynchronize(one))),
        ("an event that answered", true, |one, _| {
            let event = record(one);
            while cu!(cuEventQuery(event)) == 600 {
                std::thread::yield_now();
            }
        }),
        ("a host function that has run", true, |one, _| {
            static RAN: AtomicU32 = AtomicU32::new(0);
            unsafe extern "C" fn ran(_: *mut c_void) {
                RAN.store(1, Ordering::Release);
            }
            ok!(cuLaunchHostFunc(one, Some(ran), null_mut()));
            while RAN.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
        }),
    ];
    for (between, ordered, run) in table {
        let mut session = begin(Config::default());
        let (there, host, one, two) = (alloc(LEN), pinned(1), stream(), stream());
        assert_eq!(upload(there, &host, one), 0);
        run(one, two);
        ok!(cuMemcpyDtoDAsync_v2(alloc(LEN), there, LEN, two));
        match ordered {
            true => assert_eq!(session.violations(), [""; 0], "{between}"),
            false => assert_violation(
                &mut session,
                &[
                    "unordered use of mem#1",
                    "cuMemcpyHtoDAsync_v2 mem#1+0 pin#1+0",
                    "writes",
                    "cuMemcpyDtoDAsync_v2",
                    "reads",
                ],
            ),
        }
        ok!(cuCtxSynchronize());
        ok!(cuMemHostUnregister(at(&host)));
    }
}

#[test]
fn a_copy_back_into_pinned_memory_that_a_copy_reads_needs_order() {
    let mut session = begin(Config::default());
    let (there, other, host, one, two) = (alloc(LEN), alloc(LEN), pinned(1), stream(), stream());
    assert_eq!(upload(there, &host, one), 0);
    ok!(cuMemcpyDtoHAsync_v2(at(&host), other, LEN, two));
    assert_violation(&mut session, &["unordered use of pin#1"]);
}

#[test]
fn a_free_in_stream_order_comes_after_the_uses_of_other_streams() {
    let mut session = begin(Config::default());
    let (mut there, one, two) = (0, stream(), stream());
    ok!(cuMemAllocAsync(&mut there, LEN, one));
    ok!(cuStreamWaitEvent(two, record(one), 0));
    assert_eq!(fill(there, two), 0);
    assert_eq!(session.violations(), [""; 0]);
    ok!(cuMemFreeAsync(there, one));
    assert_violation(&mut session, &["unordered use of mem#1", "cuMemsetD8Async", "cuMemFreeAsync"]);
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    for (flags, ordered) in [(0, true), (1, false)] {
        for legacy_first in [false, true] {
            let mut session = begin(Config::default());
            let (there, stream) = (alloc(LEN), stream_with(flags));
            let streams = if legacy_first { [null_mut(), stream] } else { [stream, null_mut()] };
            assert_eq!(streams.map(|stream| fill(there, stream)), [0, 0]);
            assert_eq!(session.expect_violations().is_empty(), ordered, "flags {flags}, legacy first: {legacy_first}");
        }
    }
}

const STREAMS: usize = 3;

/// A step of a random program: a fill of a part, or a wait.
#[derive(Clone, Debug)]
enum Step {
    Write { stream: usize, buffer: usize, start: usize, len: usize },
    Read { stream: usize, buffer: usize, start: usize, len: usize },
    Wait { stream: usize, on: usize },
    Host { stream: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let part = || (0..STREAMS, 0..2usize, 0..48usize, 1..16usize);
    prop_oneof![
        3 => part().prop_map(|(stream, buffer, start, len)| Step::Write { stream, buffer, start, len }),
        3 => part().prop_map(|(stream, buffer, start, len)| Step::Read { stream, buffer, start, len }),
        3 => (0..STREAMS, 0..STREAMS).prop_map(|(stream, on)| Step::Wait { stream, on }),
        1 => (0..STREAMS).prop_map(|stream| Step::Host { stream }),
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
        from == to || self.before[to].iter().any(|&node| node >= from && self.reaches(from, node))
    }

    /// Whether the step is in conflict with an earlier one.
    fn step(&mut self, step: &Step) -> bool {
        let (stream, write, buffer, part) = match *step {
            Step::Write { stream, buffer, start, len } => (stream, true, buffer, start..start + len),
            Step::Read { stream, buffer, start, len } => (stream, false, buffer, start..start + len),
            Step::Wait { stream, on } => {
                self.last[stream] = Some(self.node([self.last[stream], self.last[on], self.host]));
                return false;
            }
            Step::Host { stream } => {
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
        let (buffers, streams, mut naive) = ([alloc(64), alloc(64)], [stream(), stream(), stream()], Naive::default());
        let back = pinned(0);
        for (index, step) in steps.iter().enumerate() {
            match *step {
                Step::Write { stream, buffer, start, len } => {
                    ok!(cuMemsetD8Async(buffers[buffer] + start as u64, 1, len, streams[stream]));
                }
                Step::Read { stream, buffer, start, len } => {
                    // To separate memory, so that only the reads count.
                    let to = at(&back).wrapping_byte_add(index * 64);
                    ok!(cuMemcpyDtoHAsync_v2(to, buffers[buffer] + start as u64, len, streams[stream]));
                }
                Step::Wait { stream, on } => ok!(cuStreamWaitEvent(streams[stream], record(streams[on]), 0)),
                Step::Host { stream } => ok!(cuStreamSynchronize(streams[stream])),
            }
            let found = session.expect_violations();
            session.forget_violations();
            prop_assert_eq!(!found.is_empty(), naive.step(step), "step {}: {:#?}", index, found);
        }
        ok!(cuCtxSynchronize());
    }
}

// --- failures ---

/// A small user of the driver: every error ends it, and it releases everything.
fn work() -> Result<Vec<u8>, u32> {
    let run = || -> Result<Vec<u8>, cudarc::driver::DriverError> {
        let context = CudaContext::new(0)?;
        let (one, two) = (context.new_stream()?, context.new_stream()?);
        let there = one.clone_htod(&[5u8; 100])?;
        let event = one.record_event(None)?;
        two.wait(&event)?;
        let mut copy = two.alloc_zeros::<u8>(100)?;
        two.memcpy_dtod(&there, &mut copy)?;
        let back = two.clone_dtoh(&copy)?;
        one.synchronize()?;
        context.check_err()?;
        Ok(back)
    };
    run().map_err(|error| error.0 as u32)
}

#[test]
fn call_number_i_fails_and_only_that_one() {
    let session = cuda().session(Config::default());
    assert_eq!(work(), Ok(vec![5; 100]));
    let calls = session.calls();
    drop(session);
    assert!(calls > 30, "{calls}");
    for index in 0..calls {
        let mut session = cuda().session(Config::default());
        session.fail_at(index, 999, false);
        // A failing call in the last drops cannot report it.
        let outcome = work();
        let trace = session.trace();
        let failed: Vec<_> = trace.lines().filter(|line| line.ends_with("= 999")).collect();
        assert_eq!(failed.len(), 1, "{index}: {failed:#?}");
        assert!(failed[0].starts_with(&format!("{index} T")), "{}", failed[0]);
        assert!(outcome == Err(999) || outcome == Ok(vec![5; 100]), "{index}: {outcome:?}");
        // If a record or a wait fails, cudarc keeps the error and still copies or frees without the order.
        session.expect_violations();
    }
}

#[test]
fn a_sticky_failure_fails_every_later_call() {
    let devices = vec![Gpu::new(1 << 20, ""), Gpu::new(1 << 20, "")];
    let session = begin(Config { devices, ..Config::default() });
    let (there, host, stream, event) = (alloc(LEN), pinned(1), stream(), event());
    session.fail_named("cuMemcpyHtoDAsync_v2", 0, 719, true);
    assert_eq!(upload(there, &host, stream), 719);
    let (mut found, mut name) = (null_mut(), std::ptr::null());
    let codes = [
        cu!(cuStreamSynchronize(stream)),
        cu!(cuEventQuery(event)),
        cu!(cuCtxGetCurrent(&mut found)),
        cu!(cuEventDestroy_v2(event)),
        cu!(cuEventDestroy_v2(event)),
        cu!(cuStreamDestroy_v2(stream)),
        cu!(cuMemFree_v2(there)),
        cu!(cuMemHostUnregister(at(&host))),
    ];
    assert_eq!(codes, [719; 8]);
    assert_eq!(cu!(cuGetErrorName(sys::CUresult::CUDA_ERROR_LAUNCH_FAILED, &mut name)), 0);
    let live = session.live();
    // The driver may still reach it.
    std::mem::forget(host);
    assert_eq!(live, Live { retains: 1, leaked: 4, leaked_bytes: LEN as u64, ..Live::default() });
    // Another device is another context, and a released context's successor is alive again.
    std::thread::spawn(|| {
        enter(1);
        alloc(LEN);
        ok!(cuCtxSynchronize());
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        enter(0);
        alloc(LEN);
    })
    .join()
    .unwrap();
}

#[test]
fn memory_that_stays_registered_must_stay_mapped() {
    for released in [false, true] {
        let session = begin(Config::default());
        let host = pinned(1);
        session.fail_named("cuMemHostUnregister", 0, 719, true);
        assert_eq!(cu!(cuMemHostUnregister(at(&host))), 719);
        if released {
            ok!(cuDevicePrimaryCtxRelease_v2(0));
        }
        drop(host);
        let expected: &[_] = if released { &[] } else { &["pin#1 was unmapped though its unregistration failed"] };
        assert_eq!(session.end(), expected, "released: {released}");
    }
}

#[test]
fn a_failed_operation_surfaces_at_the_next_call() {
    let session = begin(Config::default());
    let (there, host, one, two) = ([alloc(LEN), alloc(LEN), alloc(LEN)], pinned(7), stream(), stream());
    session.fail_async(1, 700);
    session.hold(true);
    let codes = there.map(|there| upload(there, &host, one));
    let event = record(one);
    ok!(cuStreamWaitEvent(two, event, 0));
    assert_eq!(codes, [0; 3]);
    session.hold(false);
    assert_eq!(cu!(cuStreamSynchronize(one)), 700);
    let contents = there.map(|there| session.peek(there, 1)[0]);
    assert_eq!(contents, [7, 0xa5, 0xa5]);
    let codes = [cu!(cuEventQuery(event)), cu!(cuStreamSynchronize(two)), fill(there[0], two), cu!(cuCtxSynchronize())];
    assert_eq!(codes, [700; 4]);
    // The device may still come back to this memory: it is never unmapped.
    assert_eq!(session.in_flight(at(&host) as u64, LEN), 2);
    drop(session);
}

#[test]
fn a_context_that_waits_for_a_dead_one_dies_with_it() {
    let devices = vec![Gpu::new(1 << 20, ""), Gpu::new(1 << 20, "")];
    let session = begin(Config { devices, ..Config::default() });
    let (there, one) = (alloc(LEN), stream());
    session.fail_async(0, 700);
    session.hold(true);
    assert_eq!(fill(there, one), 0);
    let event = record(one);
    enter(1);
    let two = stream();
    ok!(cuStreamWaitEvent(two, event, 0));
    session.hold(false);
    assert_eq!(cu!(cuStreamSynchronize(two)), 700);
}

#[test]
fn live_objects_are_counted_until_they_are_released() {
    let session = begin(Config::default());
    let (there, host, stream, event, mut memory, mut module) =
        (alloc(LEN), pinned(1), stream(), event(), null_mut(), null_mut());
    ok!(cuMemHostAlloc(&mut memory, 100, 0));
    ok!(cuModuleLoadData(&mut module, PTX.as_ptr().cast()));
    let all = Live {
        retains: 1,
        streams: 1,
        events: 1,
        allocations: 1,
        bytes: LEN as u64,
        registrations: 1,
        registered_bytes: LEN as u64,
        host_allocations: 1,
        modules: 1,
        leaked: 0,
        leaked_bytes: 0,
    };
    assert_eq!(session.live(), all);
    ok!(cuModuleUnload(module));
    ok!(cuMemFreeHost(memory));
    ok!(cuEventDestroy_v2(event));
    ok!(cuStreamDestroy_v2(stream));
    ok!(cuMemHostUnregister(at(&host)));
    ok!(cuMemFree_v2(there));
    assert_eq!(session.live(), Live { retains: 1, ..Live::default() });
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(session.live(), Live::default());
}

#[test]
fn a_session_is_independent_of_the_one_before() {
    let session = begin(Config::default());
    let (there, stream) = (alloc(LEN), stream());
    session.fail_at(session.calls(), 999, true);
    assert_eq!(fill(there, stream), 999);
    drop(session);
    let mut session = cuda().session(Config::default());
    assert_eq!((session.calls(), session.live(), session.trace()), (0, Live::default(), String::new()));
    assert_eq!(cu!(cuCtxSynchronize()), 201);
    enter(0);
    assert_eq!(cu!(cuStreamSynchronize(stream)), 400);
    assert_eq!(fill(there, null_mut()), 1);
    assert_violation(&mut session, &["belongs to no allocation"]);
}

// --- kernels and host functions ---

const PTX: &str =
    ".version 8.0\n.target sm_80\n.visible .entry add_one(\n\t.param .u64 p\n)\n{ ret; }\n.entry other(\n)\n{}\n\0";

/// `out[i] = in[i] + by` for `count` bytes.
extern "C" fn add(grid: *const u32, block: *const u32, params: *const *const c_void) {
    // SAFETY: registered with these four parameters; both pointers are to allocations of at least `count` bytes, which the
    // streams order; grid and block are three numbers.
    unsafe {
        let (out, input) = (*(*params).cast::<*mut u8>(), *(*params.add(1)).cast::<*const u8>());
        let (by, count) = (*(*params.add(2)).cast::<u8>(), *(*params.add(3)).cast::<u64>());
        let threads: u32 = (0..3).map(|side| *grid.add(side) * *block.add(side)).product();
        for index in 0..(threads as usize).min(count as usize) {
            *out.add(index) = *input.add(index) + by;
        }
    }
}

fn function(module: sys::CUmodule, name: &CStr) -> Result<sys::CUfunction, u32> {
    let mut function = null_mut();
    match cu!(cuModuleGetFunction(&mut function, module, name.as_ptr())) {
        0 => Ok(function),
        code => Err(code),
    }
}

fn module() -> sys::CUmodule {
    let mut module = null_mut();
    ok!(cuModuleLoadData(&mut module, PTX.as_ptr().cast()));
    module
}

/// Launches `add` over two blocks of four threads.
fn launch(function: sys::CUfunction, out: u64, input: u64, stream: sys::CUstream) -> u32 {
    let (by, count) = (3u8, 7u64);
    let mut params = [
        (&raw const out).cast::<c_void>(),
        (&raw const input).cast(),
        (&raw const by).cast(),
        (&raw const count).cast(),
    ];
    cu!(cuLaunchKernel(function, 2, 1, 1, 4, 1, 1, 0, stream, params.as_mut_ptr().cast(), null_mut()))
}

#[test]
fn kernels_run_on_the_bytes_of_device_pointers() {
    let session = begin(Config::default());
    session.register_kernel("add_one", add, &[8, 8, 1, 8], 0b11, 0b01);
    let (module, stream, out, input) = (module(), stream(), alloc(LEN), alloc(LEN));
    let known = function(module, c"add_one").unwrap();
    assert_eq!(function(module, c"third"), Err(500));
    assert_eq!(fill(input, stream), 0);
    // Parameters are taken at the launch.
    session.hold(true);
    assert_eq!(launch(known, out, input, stream), 0);
    session.hold(false);
    ok!(cuStreamSynchronize(stream));
    assert_eq!(session.peek(out, 9), [4, 4, 4, 4, 4, 4, 4, 0xa5, 0xa5]);
    assert_eq!(launch(function(module, c"other").unwrap(), out, input, stream), 500, "nobody registered it");
    ok!(cuModuleUnload(module));
    assert_eq!(launch(known, out, input, stream), 400);
    let mut empty = null_mut();
    assert_eq!(cu!(cuModuleLoadData(&mut empty, c"".as_ptr().cast())), 218);
    assert!(session.trace().contains("cuLaunchKernel function#1 [2, 1, 1] [4, 1, 1] 0 stream#1 = 0"));
}

#[test]
fn kernels_write_and_read_the_allocations_of_their_pointers() {
    for ordered in [false, true] {
        let mut session = begin(Config::default());
        session.register_kernel("add_one", add, &[8, 8, 1, 8], 0b11, 0b01);
        let (out, input, one, two) = (alloc(LEN), alloc(LEN), stream(), stream());
        assert_eq!(fill(input, one), 0);
        ok!(cuStreamWaitEvent(two, record(one), 0));
        assert_eq!(launch(function(module(), c"add_one").unwrap(), out, input, two), 0);
        // Both kernels only read it.
        ok!(cuMemcpyDtoDAsync_v2(alloc(LEN), input, LEN, one));
        assert_eq!(session.violations(), [""; 0]);
        if ordered {
            ok!(cuStreamWaitEvent(one, record(two), 0));
        }
        // The kernel did not write these bytes, but the driver cannot know.
        ok!(cuMemcpyDtoDAsync_v2(alloc(LEN), out + 100, 100, one));
        match ordered {
            true => assert_eq!(session.violations(), [""; 0]),
            false => assert_violation(&mut session, &["unordered use of mem#1", "(add_one) writes"]),
        }
    }
}

#[test]
fn a_host_function_runs_in_order_and_calls_no_driver() {
    static SEEN: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn look(data: *mut c_void) {
        // SAFETY: the test passes a pinned page that it keeps.
        let byte = unsafe { *data.cast::<u8>() };
        SEEN.store(u32::from(byte) + cu!(cuCtxSynchronize()), Ordering::Release);
    }
    let mut session = begin(Config { latency: Duration::from_millis(2), ..Config::default() });
    let (there, host, stream) = (alloc(LEN), pinned(1), stream());
    ok!(cuMemcpyDtoHAsync_v2(at(&host), there, LEN, stream));
    ok!(cuLaunchHostFunc(stream, Some(look), at(&host)));
    ok!(cuStreamSynchronize(stream));
    assert_eq!(SEEN.load(Ordering::Acquire), 0xa5 + 800);
    assert_violation(&mut session, &["cuCtxSynchronize", "host function"]);
    ok!(cuMemHostUnregister(at(&host)));
}
