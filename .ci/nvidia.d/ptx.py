"""Whether finish.ptx is what its source gives, and what NVIDIA's assemblers make of it."""

import os
import re
import subprocess
import sys
import tempfile

from table import PLACE, ROOT, check, find, finish, folders, row

KERNELS = ROOT / "src/device/cuda/kernels"
PTX = KERNELS / "finish.ptx"
# The oldest GPU that finish.ptx is for.
LEAST = 70


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


def source():
    (version, folder), = folders("nvidia-cuda-nvrtc")
    done = run(sys.executable, KERNELS / "build.py", "--check", env={**os.environ, "PYTHONPATH": str(folder)})
    check(done.returncode == 0, f"finish.ptx is what NVRTC {version} makes of finish.cu", done.stderr.strip())


def operations(text):
    """How many divisions and subtractions the PTX has; other arithmetic of floats has no place in it."""
    other = re.findall(r"\b(?:fma|mad|mul|add|div\.approx|div\.full|rcp|ex2|sqrt)\.(?:\w+\.)*f(?:16|32|64)\b", text)
    names = ("div.rn.f32", "sub.rn.f32", "sub.f32", "div.f32")
    count = {name: len(re.findall(rf"\b{re.escape(name)}\b", text)) for name in names}
    divisions, subtractions = count["div.rn.f32"], count["sub.f32"] + count["sub.rn.f32"]
    good = divisions > 0 and subtractions > 0 and not other and count["div.f32"] == 0
    check(good, "PTX: divisions by div.rn, subtractions, nothing else", f"{divisions} div.rn, {subtractions} sub, {other[:3]}")
    return divisions, subtractions


def goals(ptxas):
    """The GPUs that an assembler knows, of those that the PTX is for."""
    text = run(ptxas, "--help").stdout
    return sorted({int(number) for number in re.findall(r"'sm_(\d+)'", text) if int(number) >= LEAST})


def assemble(version, ptxas, folder):
    """Assembles for every GPU; returns the binaries."""
    made, bad, registers = {}, [], set()
    for goal in goals(ptxas):
        out = folder / f"{version}-{goal}.cubin"
        done = run(ptxas, f"-arch=sm_{goal}", "-v", "-o", out, PTX)
        used = [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]
        spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
        if done.returncode or len(used) != 4 or len(spills) < 4 or any(map(int, sum(spills, ()))):
            bad.append(f"sm_{goal}: {done.stderr.strip().splitlines()[-1:] or done.returncode} {spills}")
            continue
        registers.update(used)
        made[goal] = out
    names = " ".join(map(str, made))
    result = "; ".join(bad) or f"sm {names}; {min(registers)} to {max(registers)} registers, no spill, no stack"
    check(made and not bad, f"ptxas {version} assembles every kernel", result)
    return made


def kernels_only(text):
    """Without the routine that divides what is too large or too small for the short way: a function of NVIDIA's."""
    return re.sub(r"^\S*__cuda_sm\w+_div_rn\w*_slowpath:.*?(?=^\s*\.section|\Z)", "", text, flags=re.M | re.S)


def machine_code(version, cubins, nvdisasm, divisions, subtractions):
    """Subtractions stay apart: each is one FADD; every FFMA belongs to a division, which takes 4 or 5 of them."""
    told, good, unknown = set(), True, []
    for goal, cubin in cubins.items():
        done = run(nvdisasm, "-c", cubin)
        if done.returncode:
            unknown.append(f"sm_{goal}")
            continue
        text = kernels_only(done.stdout)
        count = {name: len(re.findall(rf"\b{name}\b", text)) for name in ("FADD", "FFMA", "FMUL", "FCHK")}
        # Arithmetic on pairs. An HFMA2 of zeros and a constant is a way to load the constant.
        pairs = re.findall(r"\b(?:FADD2|FFMA2|FMUL2|HADD2|HMUL2)\b|\bHFMA2\S* R\d+, (?!-RZ, RZ, )", text)
        good &= count["FADD"] == subtractions and count["FCHK"] == divisions and count["FMUL"] == 0 and not pairs
        good &= count["FFMA"] in (4 * divisions, 5 * divisions)
        told.add(", ".join(f"{name} {number}" for name, number in count.items()))
    known = len(cubins) - len(unknown)
    check(good and known, f"machine code of ptxas {version}: nothing is fused", f"{known} GPUs: {'; '.join(sorted(told))}")
    if unknown:
        row("skipped", f"machine code of ptxas {version}", f"nvdisasm does not know {' '.join(unknown)}")


def main():
    source()
    divisions, subtractions = operations(PTX.read_text())
    nvdisasm = find(folders("nvidia-cuda-nvdisasm")[0][1], "nvdisasm")
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        for version, wheel in folders("nvidia-cuda-nvcc"):
            ptxas = find(wheel, "ptxas")
            cubins = assemble(version, ptxas, type(PLACE)(folder))
            machine_code(version, cubins, nvdisasm, divisions, subtractions)
    finish()


main()
