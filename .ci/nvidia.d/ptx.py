"""Whether finish.ptx and finish.fatbin are what their source gives, and what NVIDIA's assemblers make of the PTX."""

import math
import re
import resource
import subprocess
import sys
import tempfile

from table import PLACE, ROOT, check, find, finish, folders, row

KERNELS = ROOT / "crates/device/src/cuda/kernels"
PTX = KERNELS / "finish.ptx"
NAMES = ("feedline_finish_2", "feedline_finish_4", "feedline_gather")
# The oldest GPU that finish.ptx is for.
LEAST = 70
# Instructions per value that a thread may take for three channels, four pixels at a time.
MOST = 10


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


def source():
    done = run(sys.executable, KERNELS / "build.py", PLACE, "--check")
    check(done.returncode == 0, "finish.ptx and finish.fatbin are what finish.cu gives", done.stderr.strip())


def fat_binary(cuobjdump):
    """What NVIDIA's tool finds in it."""
    done = run(cuobjdump, "-lelf", "-lptx", KERNELS / "finish.fatbin")
    found = " ".join(re.findall(r"sm_\d+\.\w+", done.stdout))
    wanted = "sm_80.cubin sm_90.cubin sm_100.cubin sm_120.cubin sm_70.ptx"
    check(found == wanted and not done.stderr, "finish.fatbin has code for four GPUs, and PTX", f"{found} {done.stderr.strip()}")


def goals(ptxas):
    """The GPUs that an assembler knows, of those that the PTX is for."""
    text = run(ptxas, "--help").stdout
    return sorted({int(number) for number in re.findall(r"'sm_(\d+)'", text) if int(number) >= LEAST})


def assemble(version, ptxas, folder):
    """Assembles for every GPU; returns the binaries."""
    made, bad, registers, sizes, times = {}, [], set(), [], []
    for goal in goals(ptxas):
        out = folder / f"{version}-{goal}.cubin"
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = run(ptxas, f"-arch=sm_{goal}", "-v", "-o", out, PTX)
        times.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
        used = [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]
        spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
        if done.returncode or len(used) != len(NAMES) or len(spills) < len(NAMES) or any(map(int, sum(spills, ()))):
            bad.append(f"sm_{goal}: {done.stderr.strip().splitlines()[-1:] or done.returncode} {spills}")
            continue
        registers.update(used)
        sizes.append(out.stat().st_size)
        made[goal] = out
    names = " ".join(map(str, made))
    result = "; ".join(bad) or f"sm {names}; {min(registers)} to {max(registers)} registers, no spill, no stack"
    check(made and not bad, f"ptxas {version} assembles every kernel", result)
    row("note", f"ptxas {version}, for one GPU", f"{min(times):.2f} to {max(times):.2f} s of CPU, {min(sizes)} to {max(sizes)} bytes")
    return made


def functions(text):
    """Each kernel in a listing of nvdisasm: its instructions, and the number of the first one behind each label."""
    found, code, labels = {}, [], {}
    for line in text.splitlines():
        if match := re.match(r"\.text\.(\w+):", line):
            code, labels = found.setdefault(match[1], ([], {}))
        elif match := re.match(r"(\.L\w+):", line):
            labels[match[1]] = len(code)
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(match[1])
    return found


def target(instruction, labels):
    """Where a jump goes."""
    match = re.search(r"\bBRA\b.*`\((\.L\w+)\)", instruction)
    return labels[match[1]] if match else None


def longest(code, labels, first, last):
    """How many instructions the longest way through a loop has, from its first to its jump back."""
    lengths = {first: 1}
    for at in range(first, last):
        there = target(code[at], labels)
        ways = [] if there is None else [there]
        if there is None or code[at].startswith("@"):
            ways.append(at + 1)
        for way in ways:
            lengths[way] = max(lengths.get(way, 0), lengths.get(at, 0) + 1)
    return lengths[last]


def per_value(code, labels):
    """Instructions per value of the loop that makes four pixels of three channels: the innermost one that loads three words."""
    jumps = [(target(instruction, labels), at) for at, instruction in enumerate(code)]
    loops = [(first, last) for first, last in jumps if first is not None and first < last]
    found = []
    for first, last in loops:
        loads = re.findall(r"\bLDG\S*", "\n".join(code[first:last]))
        words = [load for load in loads if not re.search(r"\.(U8|64|128)\b", load)]
        inner = any(first <= other[0] and other[1] < last for other in loops)
        if len(words) == 3 and not inner:
            found.append(longest(code, labels, first, last) / 12)
    return max(found, default=None)


def machine_code(version, cubins, nvdisasm):
    """The loop of the usual pictures is short on every GPU."""
    figures, unknown = {}, []
    for goal, cubin in cubins.items():
        done = run(nvdisasm, "-c", cubin)
        if done.returncode:
            unknown.append(f"sm_{goal}")
            continue
        code = functions(done.stdout)
        figures[goal] = [per_value(*code[name]) or math.inf for name in NAMES[:2]]
    told = "; ".join(f"sm_{goal} {two:.1f} {four:.1f}" for goal, (two, four) in figures.items())
    good = figures and max(map(max, figures.values())) <= MOST
    check(good, f"ptxas {version}: at most {MOST} instructions per value", f"of 2 and 4 bytes: {told}")
    if unknown:
        row("skipped", f"machine code of ptxas {version}", f"nvdisasm does not know {' '.join(unknown)}")


def main():
    source()
    fat_binary(find(folders("nvidia-cuda-cuobjdump")[0][1], "cuobjdump"))
    nvdisasm = find(folders("nvidia-cuda-nvdisasm")[0][1], "nvdisasm")
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        for version, wheel in folders("nvidia-cuda-nvcc"):
            ptxas = find(wheel, "ptxas")
            cubins = assemble(version, ptxas, type(PLACE)(folder))
            machine_code(version, cubins, nvdisasm)
    finish()


main()
