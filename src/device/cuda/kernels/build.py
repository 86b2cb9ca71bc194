#!/usr/bin/env python3
"""Makes finish.ptx from finish.cu. Needs NVRTC 12.0, no GPU and no toolkit:

    python3 -m venv venv && venv/bin/pip install 'nvidia-cuda-nvrtc-cu12==12.0.*'
    venv/bin/python src/device/cuda/kernels/build.py            # writes finish.ptx
    venv/bin/python src/device/cuda/kernels/build.py --check    # fails if the committed one differs

NVRTC 12.0 emits PTX 8.0, which drivers of CUDA 12.0 and newer compile; compute_70 is Volta and newer. The result is
the same on every machine. Its first line holds the CRC32C of finish.cu, which a unit test compares.
"""

import ctypes
import os
import pathlib
import re
import sys

OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++17", b"--restrict"]
HERE = pathlib.Path(__file__).resolve().parent


def library_folder():
    """The folder of the wheel's libraries."""
    import nvidia.cuda_nvrtc

    return pathlib.Path(list(nvidia.cuda_nvrtc.__path__)[0]) / "lib"


def with_library_path(folder):
    """Restarts with the library path: NVRTC opens its builtins by name, and a process reads the path only at its start."""
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if str(folder) not in paths:
        os.environ["LD_LIBRARY_PATH"] = ":".join([str(folder), *filter(None, paths)])
        os.execv(sys.executable, [sys.executable, *sys.argv])


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


def text(nvrtc, program, what):
    """Returns the log or the PTX."""
    size = ctypes.c_size_t()
    check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.value.decode()


def check(code, what):
    if code != 0:
        sys.exit(f"{what}: NVRTC error {code}")


def compile_source(nvrtc, source):
    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"finish.cu", 0, None, None), "nvrtcCreateProgram")
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    code = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    log = text(nvrtc, program, "ProgramLog")
    if log.strip():
        print(log, file=sys.stderr)
    check(code, "nvrtcCompileProgram")
    return text(nvrtc, program, "PTX")


def without_targets(ptx):
    """Removes the constants of NVRTC's own preamble (`nv::target`): no kernel uses them, and they take device memory."""
    ptx = re.sub(r"^\.global \.align 8 \.(?:u64|b8) _ZN\w*nv6target\w*(?:\[8\])?(?: = [^;]*)?;\n", "", ptx, flags=re.M)
    if "nv6target" in ptx:
        sys.exit("a kernel uses nv::target, or its constants look different")
    return ptx


def main():
    folder = library_folder()
    with_library_path(folder)
    nvrtc = ctypes.CDLL(str(folder / "libnvrtc.so.12"))
    major, minor = ctypes.c_int(), ctypes.c_int()
    check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    if (major.value, minor.value) != (12, 0):
        sys.exit(f"NVRTC 12.0 is needed, this is {major.value}.{minor.value}")
    source = (HERE / "finish.cu").read_bytes()
    options = " ".join(option.decode() for option in OPTIONS)
    ptx = f"// crc32c of finish.cu: {crc32c(source):08x}; made by build.py: NVRTC 12.0 {options}\n"
    ptx += without_targets(compile_source(nvrtc, source)).strip("\n") + "\n"
    target = HERE / "finish.ptx"
    if "--check" not in sys.argv[1:]:
        target.write_text(ptx)
    elif target.read_text() != ptx:
        sys.exit("finish.ptx is not what finish.cu gives: run build.py")


main()
