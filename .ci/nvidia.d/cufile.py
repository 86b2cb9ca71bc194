"""NVIDIA's libcufile over a stand-in for libcuda with 8 GPUs: what it takes when it is opened, and by feedline's loader.

Contexts: primary contexts that are held on each GPU. The caller has one on GPU 0 itself. With Gds::Auto, where no read can be
direct, feedline must leave none on another GPU and no thread behind.
"""

import os
import re
import subprocess
import sys
import tempfile

from table import PLACE, ROOT, check, find, finish, folders, row

HERE = ROOT / ".ci/nvidia.d"
GPUS = 8
LIMIT = 120


def compile_c(out, *words):
    done = subprocess.run(["gcc", "-std=gnu17", "-O1", "-Wno-deprecated-declarations", "-o", out, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{out.name}: {done.stderr[-3000:]}")


def names(libraries):
    """What the libraries look for in libcuda, by their strings."""
    found = set()
    for library in libraries:
        found |= set(re.findall(rb"(?<![\w])cu[A-Z][A-Za-z0-9_]+(?=\0)", library.read_bytes()))
    return {name.decode() for name in found if not name.startswith(b"cuFile")}


def build(folder, cuda, libraries):
    """The stand-in, the list of modules and the program that runs libcufile alone."""
    source = (HERE / "libcuda.c").read_text()
    bodies = set(re.findall(r"^BODY CUresult (\w+)\(", source, re.M))
    wanted = names(libraries)
    # In a file without the header, which declares some of them and renames others.
    stubs = "".join(f"STUB({name})\n" for name in sorted(wanted - bodies))
    (folder / "stubs.c").write_text("#define STUB(name) int name(void) { return 801; }\n" + stubs)
    fake = folder / "libcuda.so.1"
    compile_c(fake, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{cuda}", HERE / "libcuda.c", folder / "stubs.c", "-ldl")
    compile_c(folder / "modules.so", "-shared", "-fPIC", HERE / "modules.c", "-ldl")
    newest = find(folders("nvidia-cufile")[-1][1], "cufile.h").parent
    compile_c(folder / "alone", f"-I{cuda}", f"-I{newest}", HERE / "alone.c", fake, "-Wl,-rpath," + str(folder), "-ldl")
    row("note", "stand-in for libcuda", f"{len(wanted & bodies)} names with a body, {len(wanted - bodies)} stubs")


class Machine:
    """A machine with udev's entry for the disk of the data, a list of kernel modules, and GPUs."""

    def __init__(self, folder):
        self.folder, self.data = folder, folder / "data.bin"
        self.data.write_bytes(os.urandom(64 << 20))
        (folder / "modules").write_text("nvidia 1 0 - Live 0x0\next4 1 0 - Live 0x0\n")
        disk = os.stat(self.data).st_dev
        self.udev = f"/run/udev/data/b{os.major(disk)}:{os.minor(disk)}"

    def run(self, *command, preload=(), **extra):
        """Runs a command there: text, exit status."""
        entry = r"I:1\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n"
        script = f'mount -t tmpfs none /run && mkdir -p /run/udev/data && printf "{entry}" >{self.udev} && exec env LD_PRELOAD="$PRELOAD" "$@"'
        words = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
        environment = {**os.environ, "FAKE_MODULES": str(self.folder / "modules"), "FAKE_GPUS": str(GPUS),
                       "PRELOAD": ":".join(map(str, [self.folder / "modules.so", *preload])),
                       "CUFILE_LOGFILE_PATH": str(self.folder / "cufile.log"), **{name: str(value) for name, value in extra.items()}}
        try:
            done = subprocess.run([*words, "sh", "-c", script, "sh", *map(str, command)], env=environment, capture_output=True,
                                  text=True, timeout=LIMIT, cwd=self.folder)
        except subprocess.TimeoutExpired as late:
            return (late.stdout or b"").decode(), "no end"
        return done.stdout + done.stderr, done.returncode


def counts(line):
    """`held`, `retained` per GPU, copies and threads of a line of the stand-in."""
    held, retained = ([int(number) for number in re.search(rf"{word}((?: -?\d+)+)", line)[1].split()] for word in ("held", "retained"))
    threads = re.search(r"(?:now threads|; threads) (-?\d+)", line)
    return held, retained, int(threads[1])


def alone(machine, version, library):
    text, status = machine.run(machine.folder / "alone", library, machine.data)
    steps = {line.split()[0]: line for line in text.splitlines() if " code " in line and "held" in line}
    what = f"libcufile {version} alone"
    if status != 0 or "close" not in steps:
        return check(False, what, f"{status}: {text[-300:]}")
    codes = {step: int(re.search(r"code (-?\d+)", line)[1]) for step, line in steps.items()}
    held, retained, threads = counts(steps["open"])
    after, _, left = counts(steps["close"])
    other = lambda numbers: sum(number > 0 for number in numbers[1:])
    told = (f"open: contexts on {other(held)} other GPUs, {sum(retained) - 1} retained, {threads} threads; "
            f"after close: on {other(after)}, {left} threads")
    wrong = {step: code for step, code in codes.items() if code and step != "buffer"}
    return check(not wrong, what, told + (f"; codes {wrong}" if wrong else f"; buffer {codes['buffer']}" if codes.get("buffer") else ""))


def loader(machine, version, library, program):
    """feedline's loader with Gds::Auto: nothing direct is possible, so nothing of cuFile's may stay."""
    found = {}
    for gds in ("off", "auto"):
        report = machine.folder / f"report-{gds}"
        report.unlink(missing_ok=True)
        text, status = machine.run(program, "--source", "records", "--record-bytes", 65536, "--path", machine.data, "--batch", 16,
                                   "--device", "cuda:0", "--gds", gds, "--direct", "on", "--seconds", 1, preload=[machine.folder / "libcuda.so.1"],
                                   FEEDLINE_CUFILE=library, FAKE_REPORT=report)
        if status != 0 or not report.exists():
            return check(False, f"feedline with libcufile {version}, gds {gds}", f"{status}: {text[-400:]}")
        found[gds] = counts(report.read_text())
    (held, retained, threads), (_, _, without) = found["auto"], found["off"]
    foreign = sum(number > 0 for number in held[1:])
    told = f"contexts held on {foreign} other GPUs, {sum(retained[1:])} retained there, {threads} threads ({without} with Gds::Off)"
    return check(foreign == 0 and threads <= without, f"feedline with libcufile {version}, Gds::Auto", told)


def throughput():
    """The example, built from this checkout."""
    if os.environ.get("FEEDLINE_THROUGHPUT"):
        return os.environ["FEEDLINE_THROUGHPUT"]
    done = subprocess.run(["cargo", "build", "--locked", "--quiet", "--example", "throughput"], cwd=ROOT)
    target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    return f"{target}/debug/examples/throughput" if done.returncode == 0 else None


def main():
    cuda = find(folders("nvidia-cuda-runtime")[-1][1], "cuda.h").parent
    versions = [(version, find(folder, "libcufile.so.0")) for version, folder in folders("nvidia-cufile")]
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        folder = type(PLACE)(folder)
        build(folder, cuda, [library for _, library in versions])
        machine = Machine(folder)
        text, status = machine.run("true")
        if status != 0:
            row("skipped", "libcufile", f"no mount namespace: {text.strip()[-200:]}")
            finish()
        for version, library in versions:
            alone(machine, version, library)
        program = throughput()
        if not program:
            check(False, "the example throughput", "does not build")
            finish()
        for version, library in versions:
            loader(machine, version, library, program)
    finish()


main()
