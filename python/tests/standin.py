"""The stand-in for libcuda.so of feedline's own tests, in Python, and a consumer that works on its GPU.

    alone(test) ── pytest: a process of its own ──► Cuda: loads the stand-in, which then is the driver ──► test(cuda, folder)
                                                                                 no violation, nothing left, or it fails

The stand-in (`tests/standin/cuda.rs`) moves bytes late, as a GPU does, traces every call, and calls it a violation when two
uses of memory are not ordered. A process needs it before its first look for a driver, so each test has its own.
"""

import ctypes
import gc
import hashlib
import re
import subprocess
import sys
import time
import traceback
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from shutil import which

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "target" / "pytorch" / "standin"
KERNELS = ["feedline_finish_2", "feedline_finish_4"]


# Building


def compiled(name, sources, command):
    """The path of what `command` makes of the sources, made once per content; skips the test where its compiler is missing."""
    if which(command[0]) is None:
        pytest.skip(f"{command[0]} is missing: it compiles {sources[0]}")
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    texts = [(ROOT / source).read_bytes() for source in sources]
    key = hashlib.sha256(b"\0".join([version, *map(str.encode, command), *texts])).hexdigest()[:16]
    path = BUILT / f"{name}-{key}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".new")
        subprocess.run([*command, "-o", unfinished, ROOT / sources[0]], check=True)
        unfinished.rename(path)
    return path


def libraries():
    """The driver, and its kernels on the CPU."""
    rust = ["rustc", "--edition", "2024", "-O", "--crate-type", "cdylib", "-C", "panic=abort"]
    cpp = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
    soname = ["-C", "link-arg=-Wl,-soname,libcuda.so"]
    kernels = ["tests/standin/kernels.cpp", "crates/device/src/cuda/kernels/finish.cu"]
    return compiled("cuda", ["tests/standin/cuda.rs"], rust + soname), compiled("kernels", kernels, cpp)


def alone(test):
    """Runs test(cuda, folder) in a process of its own, against the stand-in."""
    file = sys.modules[test.__module__].__file__

    def run(tmp_path):
        command = [sys.executable, file, test.__name__, tmp_path, *libraries()]
        result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout[-20000:] + result.stderr

    run.__name__, run.__doc__, run.test = test.__name__, test.__doc__, test
    return run


def main(tests):
    """What the process does."""
    name, folder, driver, kernels = sys.argv[1:]
    cuda = Cuda(driver, kernels)
    try:
        tests[name].test(cuda, Path(folder))
        cuda.finish()
    except BaseException:
        print("\n".join(cuda.trace()[-400:]))
        traceback.print_exc()
        sys.stdout.flush()
        sys.exit(1)


# The driver


class Cuda:
    """The stand-in's controls, and the driver's calls that a consumer makes."""

    def __init__(self, driver, kernels):
        self.library = ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
        for name in ["standin_trace", "standin_violations"]:
            getattr(self.library, name).restype = c_size_t
        self.library.standin_calls.restype = c_uint64
        self.library.standin_host_address.restype = c_void_p
        self.library.standin_host_address.argtypes = [c_uint64]
        self.kernels = ctypes.CDLL(kernels)
        self.contexts, self.allowed = [], False
        self.reset()
        # in, out, flips, table; rows, height, width, channels; channels_first.
        sizes = (c_uint32 * 9)(8, 8, 8, 8, 4, 4, 4, 4, 4)
        for name in KERNELS:
            code = ctypes.cast(getattr(self.kernels, f"run_{name}"), c_void_p)
            self.library.standin_register_kernel(name.encode(), code, sizes, c_size_t(9), c_uint64(0b1111), c_uint64(0b0010))

    def reset(self, devices=1, latency_us=0):
        """Begins anew, before anything was asked of the driver."""
        lines = ["driver_version=12040", f"latency_us={latency_us}"]
        lines += [f"device=Stand-in GPU|{4 << 30}|0000:{number + 1:02x}:00.0" for number in range(devices)]
        self.library.standin_reset("\n".join(lines).encode())

    def text(self, name):
        room = 1 << 22
        buffer = ctypes.create_string_buffer(room)
        length = getattr(self.library, name)(buffer, c_size_t(room))
        assert length < room
        return buffer.value.decode().splitlines()

    def trace(self):
        """The calls so far: "INDEX THREAD SYMBOL ARGUMENTS = CODE"."""
        return self.text("standin_trace")

    def calls(self, symbol, since=0):
        """The arguments of the calls of a symbol that succeeded, from index `since` on."""
        found = (re.match(rf"(\d+) T\S+ {symbol} (.*) = 0$", line) for line in self.trace())
        return [match[2].split() for match in found if match and int(match[1]) >= since]

    def now(self):
        """The index of the next call."""
        return int(self.trace()[-1].split()[0]) + 1

    def fail(self, symbol, code, sticky=False):
        """The first call of the symbol from here on returns the code and does nothing."""
        nth = sum(f" {symbol}" in line for line in self.trace())
        self.library.standin_fail(symbol.encode(), c_uint64(nth), c_uint32(code), ctypes.c_bool(sticky))

    def count(self, symbol):
        """The calls of a symbol so far, those that wait with them."""
        return self.library.standin_calls(symbol.encode())

    def admit(self, symbol, count):
        """From now on only so many calls of the symbol pass, counted from the first; the others wait in the driver."""
        self.library.standin_admit(symbol.encode(), c_uint64(count))

    def violations(self):
        return self.text("standin_violations")

    def expect_violations(self):
        """The violations so far; from now on the test says itself what it thinks of them."""
        self.allowed = True
        return self.violations()

    def finish(self):
        """Fails when something is left or was out of order."""
        gc.collect()
        for ordinal in self.contexts:
            self.check("cuDevicePrimaryCtxRelease_v2", ordinal)
        # A thread of the loader frees what the last batch held, which may be a moment after its drop.
        deadline = time.monotonic() + 10
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.library.standin_finish()
        violations = self.violations()
        assert self.allowed or not violations, "violations:\n" + "\n".join(violations)
        assert not left, f"left in the driver: {left}"

    def left(self):
        """What the driver still has."""
        numbers = (c_uint64 * 11)()
        self.library.standin_live(byref(numbers))
        names = ["retains", "streams", "events", "allocations", "bytes", "registrations", "registered bytes"]
        names += ["host allocations", "modules", "leaked", "leaked bytes"]
        return {name: number for name, number in zip(names, numbers) if number}

    def check(self, symbol, *arguments):
        code = getattr(self.library, symbol)(*arguments)
        assert code == 0, f"{symbol}: {code}"


class Gpu:
    """A consumer's program on one GPU: streams and memory of its own. Used on one thread."""

    def __init__(self, cuda, ordinal=0):
        self.cuda, self.streams, self.memory = cuda, [], []
        cuda.check("cuInit", 0)
        self.context = c_uint64()
        cuda.check("cuDevicePrimaryCtxRetain", byref(self.context), ordinal)
        cuda.contexts.append(ordinal)

    def call(self, symbol, *arguments):
        self.cuda.check("cuCtxPushCurrent_v2", self.context)
        try:
            self.cuda.check(symbol, *arguments)
        finally:
            self.cuda.check("cuCtxPopCurrent_v2", byref(c_uint64()))

    def stream(self):
        """A stream that no default stream waits for: its handle, and its name in the trace."""
        stream = c_uint64()
        self.call("cuStreamCreate", byref(stream), 1)
        self.streams.append(stream)
        self.call("cuStreamQuery", stream)
        return stream.value, self.cuda.calls("cuStreamQuery")[-1][0]

    def wait(self, stream, other):
        """Later work of a stream waits for what another one has."""
        event = c_uint64()
        self.call("cuEventCreate", byref(event), 2)
        self.call("cuEventRecord", event, c_uint64(other))
        self.call("cuStreamWaitEvent", c_uint64(stream), event, 0)
        self.call("cuEventDestroy_v2", event)

    def copy(self, data, length, stream):
        """Copies device memory to a place of its own when the stream gets there; nobody waits."""
        own = c_uint64()
        self.call("cuMemAlloc_v2", byref(own), c_size_t(length))
        self.memory.append(own)
        self.call("cuMemcpyDtoDAsync_v2", own, c_uint64(data), c_size_t(length), c_uint64(stream))
        return own.value

    def read(self, data, length, stream):
        """The bytes of device memory when the stream gets there."""
        own, out = self.copy(data, length, stream), ctypes.create_string_buffer(length)
        self.call("cuMemcpyDtoHAsync_v2", out, c_uint64(own), c_size_t(length), c_uint64(stream))
        return out.raw

    def close(self):
        for stream in self.streams:
            self.call("cuStreamSynchronize", stream)
            self.call("cuStreamDestroy_v2", stream)
        for own in self.memory:
            self.call("cuMemFree_v2", own)
        self.streams, self.memory = [], []


# DLPack, as dlpack.h has it


class DLTensor(Structure):
    _fields_ = [
        ("data", c_uint64),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Versioned(Structure):
    pass


class Legacy(Structure):
    pass


Versioned._fields_ = [
    ("major", c_uint32),
    ("minor", c_uint32),
    ("context", c_void_p),
    ("deleter", ctypes.CFUNCTYPE(None, POINTER(Versioned))),
    ("flags", c_uint64),
    ("tensor", DLTensor),
]
Legacy._fields_ = [
    ("tensor", DLTensor),
    ("context", c_void_p),
    ("deleter", ctypes.CFUNCTYPE(None, POINTER(Legacy))),
]

PYTHON = ctypes.pythonapi
PYTHON.PyCapsule_GetPointer.restype = c_void_p
PYTHON.PyCapsule_GetPointer.argtypes = [ctypes.py_object, c_char_p]
PYTHON.PyCapsule_GetName.restype = c_char_p
PYTHON.PyCapsule_GetName.argtypes = [ctypes.py_object]
PYTHON.PyCapsule_SetName.argtypes = [ctypes.py_object, c_char_p]


class Taken:
    """What a consumer makes of a capsule: the struct is its own, and `drop` calls the deleter."""

    USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}

    def __init__(self, tensor, **arguments):
        capsule = tensor.__dlpack__(**{"max_version": (1, 0), **arguments})
        name = PYTHON.PyCapsule_GetName(capsule)
        kind = Versioned if name == b"dltensor_versioned" else Legacy
        self.managed = ctypes.cast(PYTHON.PyCapsule_GetPointer(capsule, name), POINTER(kind))
        assert PYTHON.PyCapsule_SetName(capsule, self.USED[name]) == 0
        self.kind, self.tensor = kind, self.managed.contents.tensor
        self.device = (self.tensor.device_type, self.tensor.device_id)
        self.shape = tuple(self.tensor.shape[dim] for dim in range(self.tensor.ndim))
        self.data, self.bytes = self.tensor.data, int(np.prod(self.shape)) * self.tensor.bits // 8
        dense = [int(np.prod(self.shape[dim + 1 :])) for dim in range(self.tensor.ndim)]
        assert [self.tensor.strides[dim] for dim in range(self.tensor.ndim)] == dense
        assert self.tensor.byte_offset == 0 and self.tensor.lanes == 1

    @property
    def dtype(self):
        """The code of the kind of number, and the bits of one."""
        return self.tensor.code, self.tensor.bits

    @property
    def read_only(self):
        return self.kind is Versioned and self.managed.contents.flags & 1 == 1

    def drop(self):
        managed, self.managed = self.managed, None
        managed.contents.deleter(managed)
