"""What only a driver can say of feedline's assumptions: `facts.py PART`, a process a part; the parts are the last lines.

By ctypes on libcuda.so.1, or on the stand-in that FEEDLINE_FIRST_STANDIN names. Handles stay behind: the process ends.
"""

import ctypes
import mmap
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

from fact import STANDIN, fact

cuda, libc = ctypes.CDLL(STANDIN or "libcuda.so.1"), ctypes.CDLL(None)
NON_BLOCKING, NO_TIME, GLOBAL, THREAD_LOCAL, RELAXED, LEGACY = 1, 2, 0, 1, 2, c_void_p(1)
KERNELS = pathlib.Path(__file__).resolve().parents[3] / "crates/device/src/cuda/kernels"
# A host function that does nothing and takes no lock of Python's: free(NULL).
NOTHING = ctypes.cast(libc.free, c_void_p)
SPIN = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 ns)
{
    .reg .pred %p<2>; .reg .b64 %r<6>;
    ld.param.u64 %r1, [ns]; mov.u64 %r2, %globaltimer;
AGAIN: mov.u64 %r3, %globaltimer; sub.u64 %r4, %r3, %r2; setp.lt.u64 %p1, %r4, %r1;
    @%p1 bra AGAIN;
    ret;
}
\0"""
context, spin, kept = c_void_p(), c_void_p(), []
MADE, CAPTURED = "made", "captured"


def name(code):
    text = c_char_p()
    return text.value.decode() if cuda.cuGetErrorName(code, byref(text)) == 0 and text.value else str(code)


def ok(code, what):
    if code != 0:
        sys.exit(f"{what}: {name(code)} ({code})")


def made(call, *words, kind=c_void_p):
    """What a call puts into its first argument."""
    out = kind()
    ok(getattr(cuda, call)(byref(out), *words), call)
    return out


def stream(priority=0, flags=NON_BLOCKING):
    return made("cuStreamCreateWithPriority", flags, priority)


def event(flags=0):
    return made("cuEventCreate", flags)


def pages(size, huge=True):
    """Memory that is there, as feedline's slots are: not in a forked child."""
    room = mmap.mmap(-1, -(-size // (2 << 20)) * (2 << 20))
    kept.append(room)
    address, size = c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(room))), c_size_t(len(room))
    for advice in (14 if huge else 15, 23, 10):  # MADV_HUGEPAGE or MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, MADV_DONTFORK
        libc.madvise(address, size, advice)
    return address, size


def exchange(mode):
    return cuda.cuThreadExchangeStreamCaptureMode(byref(c_uint(mode)))


def elsewhere(call):
    """On a thread that has no context."""
    out = []
    thread = threading.Thread(target=lambda: out.append(call()))
    thread.start()
    thread.join()
    return out[0]


def inside(mode, call):
    """On another thread with the context, in a mode of captures."""
    return elsewhere(lambda: (cuda.cuCtxPushCurrent_v2(context), exchange(mode), call())[2])


def us(start, end):
    return 1000 * made("cuEventElapsedTime", start, end, kind=c_float).value


def busy(on, ns):
    value = c_uint64(int(ns))
    ok(cuda.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, on, (c_void_p * 1)(ctypes.addressof(value)), None), "cuLaunchKernel")


def used(bus):
    """MiB of device memory, by nvidia-smi: the driver tells it within a context only."""
    done = subprocess.run(f"nvidia-smi -i {bus} --query-gpu=memory.used --format=csv,noheader,nounits", shell=True, capture_output=True, text=True)
    return int(done.stdout) if done.stdout.strip().isdigit() and not STANDIN else None


def standin():
    """One GPU, and code for the kernel."""
    cuda.standin_reset(b"driver_version=12040\ndevice=Stand-in GPU|4294967296|0000:3b:00.0")
    kind = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, ctypes.POINTER(ctypes.POINTER(c_uint64)))
    kept.append(kind(lambda _grid, _block, params: time.sleep(min(params[0][0] / 1e9, 0.002))))
    cuda.standin_register_kernel(b"spin", kept[-1], (c_uint * 1)(8), c_size_t(1), c_uint64(0), c_uint64(0))


def start(told):
    """The context and the kernel; returns the highest priority. `told`: also says what the driver answers on the way."""
    say, look = (fact, used) if told else (lambda *_, **__: None, lambda _: None)
    n3 = ("N3: retain and release are called so (`relaxed` in driver.rs) and run in the default mode: a loader that is built or dropped may end"
          " another thread's capture. All other calls push the context first")
    version, count, text = made("cuDriverGetVersion", kind=c_int).value, made("cuDeviceGetCount", kind=c_int).value, ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(text, 256, 0)
    say("cuDriverGetVersion", version, (12000, None), "feedline refuses drivers below CUDA 12.0", must=True)
    say("devices", f"{count} × {text.value.decode()}", None, "")
    say("exchange of the capture mode, no context in the process", name(elsewhere(lambda: exchange(RELAXED))), "CUDA_SUCCESS", n3, must=True)
    cuda.cuDeviceGetPCIBusId(text, 256, 0)
    before, began = look(text.value.decode()), time.perf_counter()
    context.value = made("cuDevicePrimaryCtxRetain", 0).value
    took, after = time.perf_counter() - began, look(text.value.decode())
    say("first cuDevicePrimaryCtxRetain", took, (0.1, 0.5), "seconds: no persistence daemon", "s", timing=True)
    say("device memory of the context", None if None in (before, after) else (after - before) / 953.7, (0.3, 0.7), "`build` finds less room", "GB", timing=True)
    say("exchange of the capture mode, a thread without a context", name(elsewhere(lambda: exchange(RELAXED))), "CUDA_SUCCESS", n3, must=True)
    say("exchange of the capture mode, after the push", name(inside(RELAXED, lambda: exchange(GLOBAL))), "CUDA_SUCCESS",
        "N3 in full: no thread of a loader can begin, so none can be built; mend `bind` in driver.rs first", must=True, stop=True)
    ok(cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    least, greatest = c_int(), c_int()
    cuda.cuCtxGetStreamPriorityRange(byref(least), byref(greatest))
    say("priorities of streams", f"{least.value} to {greatest.value}", "0 to -5", "one alone: feedline's streams share queues with the consumer's")
    spin.value = made("cuModuleGetFunction", made("cuModuleLoadData", SPIN), b"spin").value
    busy(stream(), 1000)  # Here, not in a capture: a first launch may load code.
    cuda.cuCtxSynchronize()
    return greatest.value


def captures(_):
    """Which calls a capture in the global mode refuses to another thread, and which end it."""
    text = (pathlib.Path(__file__).resolve().parents[3] / "tests/standin/cuda.rs").read_text()
    unsafe = re.findall(r'"(\w+)"', re.search(r"const UNSAFE[^=]*=([^;]*);", text)[1])
    other, done, begin, end, (room, size), out = stream(), event(NO_TIME), event(), event(), pages(4 << 20), byref(c_uint64())
    for each in [done, begin, end]:
        cuda.cuEventRecord(each, other)
    block = lambda: made("cuMemAlloc_v2", size, kind=c_uint64)
    # Arguments. MADE is made before the capture: a handle that a refused call did not make would be nobody's.
    calls = {
        "cuCtxPushCurrent_v2": [context], "cuCtxPopCurrent_v2": [out], "cuStreamIsCapturing": [other, out], "cuEventRecord": [done, other],
        "cuStreamWaitEvent": [other, done, 0], "cuStreamIsCapturing, legacy stream": [LEGACY, out], "cuEventRecord, legacy stream": [done, LEGACY],
        "cuStreamGetCtx": [other, out], "cuDevicePrimaryCtxRetain": [out, 0], "cuDevicePrimaryCtxRelease_v2": [0], "cuEventQuery": [done],
        "cuEventElapsedTime": [out, begin, end], "cuEventSynchronize": [done], "cuStreamSynchronize": [other],
        "cuStreamCreateWithPriority": [out, NON_BLOCKING, 0], "cuStreamDestroy_v2": [MADE], "cuEventCreate": [out, NO_TIME], "cuEventDestroy_v2": [MADE],
        "cuMemAlloc_v2": [out, size], "cuMemFree_v2": [MADE], "cuMemHostRegister_v2": [room, size, 1], "cuMemHostUnregister": [room],
        "cuMemcpyHtoDAsync_v2": [block(), room, size, other], "cuModuleLoadData": [out, SPIN], "cuModuleUnload": [MADE],
        "cuLaunchHostFunc": [other, NOTHING, None], "cuCtxSynchronize": [],
    }
    pin = lambda: cuda.cuMemHostRegister_v2(room, size, 1)
    before = {
        "cuDevicePrimaryCtxRelease_v2": lambda: made("cuDevicePrimaryCtxRetain", 0), "cuStreamDestroy_v2": stream, "cuEventDestroy_v2": event,
        "cuMemFree_v2": block, "cuMemHostRegister_v2": lambda: cuda.cuMemHostUnregister(room), "cuMemHostUnregister": pin, "cuMemcpyHtoDAsync_v2": pin,
        "cuModuleUnload": lambda: made("cuModuleLoadData", SPIN),
    }

    def beside(mode, what, words, flags=NON_BLOCKING, of=GLOBAL):
        """The call's code beside a capture in the mode `of`, and what becomes of the capture."""
        had = before.get(what, lambda: None)()
        cuda.cuCtxSynchronize()
        captured, graph = stream(flags=flags), c_void_p()
        ok(cuda.cuStreamBeginCapture_v2(captured, of), "cuStreamBeginCapture")
        busy(captured, 1000)
        words = [had if word is MADE else captured if word is CAPTURED else word for word in words]
        code = inside(mode, lambda: getattr(cuda, what.split(",")[0])(*words))
        lives = cuda.cuStreamEndCapture(captured, byref(graph)) == 0
        cuda.cuStreamDestroy_v2(captured)
        return code, "lives" if lives else "dead"

    for what, words in calls.items():
        (code, fate), waits = beside(RELAXED, what, words), what == "cuCtxSynchronize"
        meaning = "the guide is too strict on bare handles" if waits else "a loader ends captures of other threads, or fails beside them"
        fact(f"beside a capture, relaxed mode: {what}", f"{code}, {fate}", "900, dead" if waits else "0 or 600, lives", meaning,
             must=not waits, good=fate == "dead" if waits else fate == "lives" and code in (0, 600))
    for what, words in calls.items():
        (code, fate), own = beside(GLOBAL, what, words), what.split(",")[0] in list(calls)[:5]
        expected, meaning = "dead" if what in unsafe else "lives", "the stand-in is not as the driver: correct UNSAFE in tests/standin/cuda.rs"
        meaning = "a consumer's thread calls it in its own mode: `enter` must set the relaxed one" if own else meaning
        fact(f"beside a capture, default mode: {what}", f"{code}, {fate}", expected, meaning, must=own, good=fate == expected)
    for what, of, flags, expected in [("the captured stream", CAPTURED, NON_BLOCKING, "0, lives"),
                                      ("the legacy stream while a blocking one is captured", LEGACY, 0, "906, lives")]:
        fact(f"cuStreamIsCapturing of {what}", "%s, %s" % beside(GLOBAL, "cuStreamIsCapturing", [of, out], flags), expected,
             "`next`, `bind` and a drop cannot tell such a stream without harm", must=True)
    for of, kind in [(THREAD_LOCAL, "thread-local"), (RELAXED, "relaxed")]:
        fact(f"beside a {kind} capture: cuCtxSynchronize", "%s, %s" % beside(RELAXED, "cuCtxSynchronize", [], of=of), "900, dead",
             "lives: the guide is too strict, and waiting for the context is harmless beside torch.compile")
    fact("cuStreamGetCtx of the captured stream", "%s, %s" % beside(GLOBAL, "cuStreamGetCtx", [CAPTURED, out]), "0, lives",
         "right that a stream is asked first whether it is captured")


def prices(_):
    """What calls take on the CPU."""
    on, done, timed, old, status, version, mode = stream(), event(NO_TIME), event(), byref(c_void_p()), byref(c_uint()), byref(c_int()), byref(c_uint(GLOBAL))
    cuda.cuEventRecord(done, on)
    push, pop, ask = lambda: cuda.cuCtxPushCurrent_v2(context), lambda: cuda.cuCtxPopCurrent_v2(old), lambda: cuda.cuStreamIsCapturing(on, status)
    mark, wait, free = lambda: cuda.cuEventRecord(timed, on), lambda: cuda.cuStreamWaitEvent(on, done, 0), 0
    slow = "batches of 100 µs and less pay for it; fewer calls are pinned by tests/device/cuda/hot.rs"
    for what, calls, most in [
        ("nothing: ctypes, subtracted from the next", [lambda: cuda.cuDriverGetVersion(version)], None),
        ("push and pop", [push, pop], 0.2), ("cuStreamIsCapturing", [ask], 0.1),
        ("exchange of the capture mode", [lambda: cuda.cuThreadExchangeStreamCaptureMode(mode)], 0.1), ("cuEventRecord, timed", [mark], 1.5),
        ("cuEventRecord, untimed", [lambda: cuda.cuEventRecord(done, on)], 1.5), ("cuStreamWaitEvent", [wait], 1),
        ("cuLaunchHostFunc", [lambda: cuda.cuLaunchHostFunc(on, NOTHING, None)], 5),
        ("the 11 calls of a batch on the consumer's thread", [push, ask, mark, mark, wait, mark, pop, push, ask, mark, pop], 8),
    ]:
        took = []
        for _ in range(20):
            began = time.perf_counter_ns()
            for _ in range(30):
                for call in calls:
                    call()
            took.append((time.perf_counter_ns() - began) / 30_000)
            cuda.cuStreamSynchronize(on)
        value = statistics.median(took) - len(calls) * free
        free = free or value
        fact(f"price of {what}", value, (None, most) if most else None, slow if most else "", "µs", timing=True)


def floors(highest):
    """The marks of the idle meter where the batch is there: the stream is busy, or has run dry."""
    own, empty, copied, now, asked, begin = stream(), stream(highest), event(NO_TIME), event(), event(), event()
    for label, on, words, ns in [("own stream", own, "busy", 200_000), ("own stream", own, "dry", 0),
                                 ("legacy stream", LEGACY, "busy", 200_000), ("legacy stream", LEGACY, "dry", 0)]:
        gaps, late = [], []
        for _ in range(20 if STANDIN else 200):
            cuda.cuEventRecord(copied, own), cuda.cuCtxSynchronize()
            if ns:
                busy(on, ns)
            cuda.cuEventRecord(asked, on), cuda.cuEventRecord(now, empty), cuda.cuStreamWaitEvent(on, copied, 0), cuda.cuEventRecord(begin, on)
            cuda.cuCtxSynchronize()
            gaps.append(us(asked, begin)), late.append(us(now, asked))
        fact(f"asked → start, {label}, {words}", statistics.median(gaps), (0, 3), "the floor of `starved`: belongs into the report", "µs", timing=True)
        value, what = statistics.quantiles(late, n=20)[0 if ns else -1], f"now → asked, {label}, {words}, {5 if ns else 95} % of the marks"
        meaning = "the mark on the empty stream comes late: busy requests count as dry" if ns else "above JITTER_NS of idle.rs: dry requests count as busy"
        fact(what, value, (50, None) if ns else (None, 20), meaning, "µs", timing=True)


def copies(highest):
    """Pinning, and copies with what copy.rs puts around them."""
    size, n = ((4, 3) if STANDIN else (256, 30))
    size *= 150_528
    target, host = made("cuMemAlloc_v2", c_size_t(size), kind=c_uint64), made("cuMemHostAlloc", c_size_t(size), 0)
    for kind, huge in [("4 KiB pages", False), ("huge pages", True)]:
        address, length = pages(8 * size, huge)
        began = time.perf_counter()
        code, took = cuda.cuMemHostRegister_v2(address, length, 1), time.perf_counter() - began
        fact(f"cuMemHostRegister of {kind} with MADV_DONTFORK", name(code), "CUDA_SUCCESS", "slots stay pageable: slower, and the report says so", must=True)
        fact(f"cuMemHostRegister of {kind}", length.value / took / 1e9, (3, 10) if huge else (1.5, 3), "as 4 KiB pages: huge pages did not come"
             if huge else "`pin` in copy.rs says 0.6 s per GB", "GB/s", timing=True)
    on, notify, first, last, note, rates = stream(highest), stream(highest), event(), event(), event(NO_TIME), {}
    for what, source, marks in [("registered", address, False), ("marked", address, True), ("host-alloc", host, False)] * 6:
        cuda.cuCtxSynchronize()
        began = time.perf_counter()
        for _ in range(n):
            if marks:
                cuda.cuEventRecord(note, on), cuda.cuStreamWaitEvent(on, note, 0), cuda.cuEventRecord(first, on)
            ok(cuda.cuMemcpyHtoDAsync_v2(target, source, c_size_t(size), on), "cuMemcpyHtoDAsync")
            if marks:
                cuda.cuEventRecord(last, on), cuda.cuEventRecord(note, on)
                cuda.cuStreamWaitEvent(notify, last, 0), cuda.cuLaunchHostFunc(notify, NOTHING, None)
        cuda.cuStreamSynchronize(on)
        rates.setdefault(what, []).append(n * size / (time.perf_counter() - began) / 1e9)
    bare, ours, theirs = (statistics.median(values) for values in rates.values())
    fact("38.5 MB to the device, registered", bare, (50, 58), "24 to 26: PCIe 4; below in a VM: IOMMU", "GB/s", timing=True)
    fact("… with the 8 calls of copy.rs / without", ours / bare, (0.985, None), "events cost: two copy streams in turn would hide it", "×", timing=True)
    fact("… registered / host-alloc", bare / theirs, (0.97, None), "huge pages did not come", "×", timing=True)
    fact("cuMemHostUnregister", name(cuda.cuMemHostUnregister(address)), "CUDA_SUCCESS", "slots leak at the end of a loader", must=True)


def queues(highest):
    """Hardware queues: a stream that waits holds up others that share its queue."""
    count = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8, the default")
    for of, priority, most, meaning in [
        (0, highest, 0, "feedline's waiting streams hold up a consumer's step by up to a copy's time, and the idle meter does not see it"),
        (0, 0, None, "more than 0 is why all streams of feedline have the highest priority"),
        (-1, highest, 0, "levels share queues with FSDP2's and NCCL's streams of high priority: no bell of feedline's may ring by `notify`"),
        (highest, highest, None, "more than 0: a consumer's stream of the highest priority shares queues with feedline's"),
    ]:
        # The gate is of a third priority, so that it has queues of its own.
        consumer, gate, took = stream(of), stream(highest // 2), []
        for wait in [stream(priority) for _ in range(40)]:
            opened, begin, end = event(NO_TIME), event(), event()
            cuda.cuCtxSynchronize()
            cuda.cuEventRecord(begin, consumer), busy(gate, 3_000_000), cuda.cuEventRecord(opened, gate)
            cuda.cuStreamWaitEvent(wait, opened, 0), busy(wait, 1000), busy(consumer, 1000), cuda.cuEventRecord(end, consumer)
            cuda.cuCtxSynchronize()
            took.append(us(begin, end))
        fact(f"{count} queues: of 40 waiting streams of priority {priority}, such that hold up one of {of}", sum(each > 2000 for each in took),
             (None, most) if most is not None else None, meaning, f"(worst {max(took) / 1000:.2f} ms)", timing=True)


def load(_):
    """What loading the kernels takes where the driver keeps nothing: CUDA_CACHE_DISABLE=1."""
    names = re.findall(r"\.entry (\w+)", (KERNELS / "finish.ptx").read_text())
    for file, most, meaning in [
        ("finish.fatbin", 0.05, "it has no machine code for this GPU, so that the driver compiles its PTX"),
        ("finish.ptx", 0.5, "1 to 3 s before the kernels had tables. Only GPUs without machine code in finish.fatbin pay for it"),
    ]:
        # Text ends with a zero byte; a fat binary has its length.
        image, began = (KERNELS / file).read_bytes() + b"\0" if (KERNELS / file).exists() else None, time.perf_counter()
        if image:
            module = made("cuModuleLoadData", image)
            for function in names:
                made("cuModuleGetFunction", module, function.encode())
        took = time.perf_counter() - began if image else None
        fact(f"cuModuleLoadData of {file}, its functions", took, (None, most), meaning if image else f"there is no {file}", "s", timing=True)
    done = subprocess.run("PATH=$PATH:/sbin:/usr/sbin ldconfig -p | grep ptxjit", shell=True, capture_output=True, text=True)
    fact("ldconfig -p | grep ptxjit", done.stdout.split("=>")[-1].strip() or "not there", None,
         "not there: PTX is not compiled here (221), so that GPUs without machine code in finish.fatbin get no kernels")


def host(highest):
    """Kernels back to back, and host functions on another stream beside them: nccl#1742 reports that they stall kernels."""
    on, other, begin, end, count, ends, rung = stream(), stream(highest), event(), event(), 20 if STANDIN else 2000, threading.Event(), [0]

    def ring():
        cuda.cuCtxPushCurrent_v2(context)
        while not ends.wait(0.001):
            rung[0] += cuda.cuLaunchHostFunc(other, NOTHING, None) == 0

    took = {"alone": [], "beside": []}
    for number in range(10):
        ends.clear()
        rings = threading.Thread(target=ring)
        if number % 2:
            rings.start()
        cuda.cuEventRecord(begin, on)
        for _ in range(count):
            busy(on, 100_000)
        cuda.cuEventRecord(end, on), cuda.cuStreamSynchronize(on)
        took["beside" if number % 2 else "alone"].append(us(begin, end))
        ends.set()
        if number % 2:
            rings.join()
    alone, beside = statistics.median(took["alone"]), statistics.median(took["beside"])
    rate = rung[0] / sum(took["beside"]) * 1e6
    fact("kernels of 100 µs back to back, one takes", alone / count, (100, 105), "the price of a launch, or a coarse %globaltimer", "µs", timing=True)
    fact(f"… slower beside {rate:.0f} host functions/s", 100 * (beside / alone - 1), (None, 1), "host functions stall kernels: no bell by one, or fewer",
         "%", timing=True)


def streams(_):
    """Streams that other libraries hand out: of green contexts, and such as wait for the legacy stream."""
    calls, words, seen, events = ("cuDeviceGetDevResource", "cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"), "", "", []
    # CUdevResource has 144 bytes; only one is asked for.
    room, desc, green, on, of = (c_uint64 * 64)(), c_void_p(), c_void_p(), c_void_p(), c_void_p()
    if missing := [call for call in calls if not hasattr(cuda, call)]:
        words = f"not there: {missing[0]}"
    else:
        for call, arguments in zip(calls, [(0, room, 1), (byref(desc), room, 1), (byref(green), desc, 0, 1), (byref(on), green, NON_BLOCKING, 0)]):
            if code := getattr(cuda, call)(*arguments):
                words = f"{call}: {name(code)}"
                break
    if not words:
        ours, theirs, other = event(NO_TIME), event(NO_TIME), stream()
        cuda.cuEventRecord(theirs, other)
        words = f"{cuda.cuEventRecord(ours, on)}, {cuda.cuStreamWaitEvent(on, theirs, 0)}"
        cuda.cuStreamGetCtx(on, byref(of))
        seen = "the primary context" if of.value == context.value else "another"
    fact("events of the primary context on a green context's stream: record, wait", words, "0, 0", "400: `bind` must refuse such streams in words",
         good=words == "0, 0" or words.startswith("not there"))
    fact("cuStreamGetCtx of that stream", seen or "not asked", None, "another: backend.rs then asks cuStreamGetGreenCtx")
    for legacy, expected in [(False, "runs"), (True, "waits")]:
        one, two, begin, mark, end = stream(flags=0), stream(flags=0), event(), event(NO_TIME), event()
        cuda.cuEventRecord(begin, one), busy(one, 1_000_000)
        if legacy:
            cuda.cuEventRecord(mark, LEGACY)
        busy(two, 1000), cuda.cuEventRecord(end, two), cuda.cuCtxSynchronize()
        what = f"a blocking stream beside a kernel of 1 ms on another{', a mark on the legacy stream between' if legacy else ''}"
        fact(what, "waits" if us(begin, end) > 900 else "runs", expected, "the guide says what a loader on the legacy stream holds up", timing=True)


PARTS = {"start": lambda _: None, "captures": captures, "prices": prices, "floors": floors, "copies": copies, "queues": queues, "load": load, "host": host,
         "streams": streams}
if STANDIN:
    standin()
ok(cuda.cuInit(0), "cuInit")
PARTS[sys.argv[1]](start(sys.argv[1] == "start"))
sys.stdout.flush()
os._exit(0)  # Threads of a driver and objects of Python need no order at the end.
