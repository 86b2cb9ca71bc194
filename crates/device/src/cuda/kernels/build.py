#!/usr/bin/env python3
"""Makes finish.ptx and finish.fatbin from finish.cu. Needs NVIDIA's tools of `WHEELS`, no GPU and no toolkit:

    for wheel in $(python3 src/device/cuda/kernels/build.py --wheels); do
        pip install --no-deps --target "tools/${wheel/==/-}" "$wheel"
    done
    python3 src/device/cuda/kernels/build.py tools            # writes both files
    python3 src/device/cuda/kernels/build.py tools --check    # fails if the committed ones differ

finish.ptx: NVRTC 12.0 emits PTX 8.0, which drivers of CUDA 12.0 and newer compile; compute_70 is Volta and newer. Its first
line holds the CRC32C of finish.cu, which a unit test compares.

finish.fatbin: machine code for the GPUs of `PTXAS`, and finish.ptx for all others, without its comments and indentation, which
`fatbinary` leaves out. The driver takes what fits: code for sm_80 also runs on sm_86 and sm_89, that for sm_100 on sm_103, that
for sm_120 on sm_121. Nothing is compressed. Both files are the same on every machine.
"""

import ctypes
import os
import pathlib
import re
import subprocess
import sys
import tempfile

NVRTC = "nvidia-cuda-nvrtc-cu12==12.0.140"
# By the oldest assembler of each GPU, for the sake of old drivers. But NVIDIA's newer tools do not accept code for sm_90 of 12.0
# and 12.1; drivers of 12.0 load that of every 12.x.
PTXAS = {
    80: "nvidia-cuda-nvcc-cu12==12.0.140",
    90: "nvidia-cuda-nvcc-cu12==12.9.86",
    100: "nvidia-cuda-nvcc-cu12==12.9.86",
    120: "nvidia-cuda-nvcc-cu12==12.9.86",
}
# Wheels of CUDA 12 have no `fatbinary`. Its headers for sm_80, sm_90 and PTX are those in libraries of CUDA 12.0.
FATBINARY = "nvidia-cuda-nvcc==13.5.37"
WHEELS = sorted({NVRTC, FATBINARY, *PTXAS.values()})

OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++17", b"--restrict"]
HERE = pathlib.Path(__file__).resolve().parent


def tool(tools, wheel, name):
    """The file of that name in a wheel."""
    folder = pathlib.Path(tools).resolve() / wheel.replace("==", "-")
    found = sorted(folder.rglob(name))
    if not found:
        sys.exit(f"{folder} has no {name}: see --help")
    return found[0]


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


def made_ptx(tools, source):
    library = tool(tools, NVRTC, "libnvrtc.so.12")
    with_library_path(library.parent)
    options = " ".join(option.decode() for option in OPTIONS)
    ptx = f"// crc32c of finish.cu: {crc32c(source):08x}; made by build.py: NVRTC 12.0 {options}\n"
    return (ptx + without_targets(compile_source(ctypes.CDLL(str(library)), source)).strip("\n") + "\n").encode()


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stdout}{done.stderr}")


def made_fatbin(tools, ptx):
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        (place / "finish.ptx").write_bytes(ptx)
        images = []
        for gpu, wheel in PTXAS.items():
            run(tool(tools, wheel, "ptxas"), f"-arch=sm_{gpu}", "-o", f"{gpu}.cubin", "finish.ptx", cwd=place)
            images.append(f"--image3=kind=elf,sm={gpu},file={gpu}.cubin")
        images.append("--image3=kind=ptx,sm=70,file=finish.ptx")
        fatbinary = tool(tools, FATBINARY, "fatbinary")
        run(fatbinary, "--64", "--compress=false", "--create=finish.fatbin", *images, cwd=place)
        return (place / "finish.fatbin").read_bytes()


def main():
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if "--wheels" in sys.argv:
        return print(*WHEELS, sep="\n")
    if len(arguments) != 1 or "--help" in sys.argv:
        sys.exit(__doc__)
    ptx = made_ptx(arguments[0], (HERE / "finish.cu").read_bytes())
    for name, made in ("finish.ptx", ptx), ("finish.fatbin", made_fatbin(arguments[0], ptx)):
        if "--check" not in sys.argv:
            (HERE / name).write_bytes(made)
        elif (HERE / name).read_bytes() != made:
            sys.exit(f"{name} is not what finish.cu gives: run build.py")


main()
