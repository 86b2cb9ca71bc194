"""The first ten minutes on a GPU: what the machine is, what the driver says, right or wrong, and then figures.

    machine ─► facts: start ─► JAX, PyTorch: what users run ─► tests/gpu: right or wrong ─► the other facts ─► figures ─► the rest
                  └─ no loader can be built: the rest is left out                        each a process with a time limit

All of it ends within 590 s: what comes last is left out when the time is over. Without a GPU the same against the stand-in for
libcuda, as each line then says. FEEDLINE_GPU: auto, real or standin.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile

import fact

HERE, ROOT, PLACE = pathlib.Path(__file__).parent, pathlib.Path(__file__).resolve().parents[3], pathlib.Path(sys.argv[1])
SECONDS = 590
# Of the machine; tests/gpu's section `environment` has more.
MACHINE = {
    "gpus": "nvidia-smi --format=csv --query-gpu=name,driver_version,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,memory.total,"
            "persistence_mode,compute_mode,mig.mode.current",
    "devices": "ls /dev/nvidia*", "cpus": "nproc", "memory, MB": "free -m | awk 'NR == 2 { print $2 }'", "locked memory, kB": "ulimit -l",
    "huge pages": "cat /sys/kernel/mm/transparent_hugepage/enabled", "udev": "ls -d /run/udev", "commit": "git describe --always --dirty",
}
# Of a section of tests/gpu that is started without the rest.
ROW = "row "
LOOK = ("import ctypes; n = ctypes.c_int(); c = ctypes.CDLL('libcuda.so.1');"
        "print(c.cuInit(0) or c.cuDeviceGetCount(ctypes.byref(n)) or ('started' if n.value else 100))")
MODULES = {
    "feedline": "print(feedline.__file__)", "torchvision": "print(torchvision.__version__)",
    "torch": "print(torch.__version__) if torch.cuda.is_available() else exit(f'{torch.__version__} sees no GPU')",
    "jax": "print(jax.__version__) if jax.default_backend() == 'gpu' else exit(f'{jax.__version__} sees no GPU')",
}
# What is run, in this order: name, seconds at most, what it wants (`facts`: a part of facts.py; `suite`: sections of tests/gpu;
# `quick`: a short conformance; else what frameworks.py imports), and its environment.
PLAN = [
    ("facts: start", 30, "facts", {}),
    ("JAX, client 0: jax", 60, "feedline jax", {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": 0}),
    ("JAX, client 1: jax", 60, "feedline jax", {"XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": 1}),
    ("PyTorch: idle", 60, "feedline torch", {}),
    ("PyTorch: graph", 40, "feedline torch", {}),
    ("PyTorch: late", 50, "feedline torch", {}),
    ("PyTorch: prefetch", 50, "feedline torch", {}),
    ("PyTorch: notebook", 40, "feedline torch", {}),
    ("tests/gpu: right", 170, "suite environment,conformance,leaks,forks,capture,verdicts,drops", {}),
    ("facts: captures", 20, "facts", {}),
    ("facts: prices", 20, "facts", {}),
    ("facts: floors", 20, "facts", {}),
    ("facts: copies", 30, "facts", {}),
    ("facts: queues", 20, "facts", {}),
    ("facts, 1 connection: queues", 20, "facts", {"CUDA_DEVICE_MAX_CONNECTIONS": 1}),
    ("facts, 32 connections: queues", 20, "facts", {"CUDA_DEVICE_MAX_CONNECTIONS": 32}),
    ("facts: load", 20, "facts", {"CUDA_CACHE_DISABLE": 1}),
    ("facts: host", 20, "facts", {}),
    ("facts: streams", 20, "facts", {}),
    ("tests/gpu: figures", 150, "suite rates,stage,idle", {}),
    ("PyTorch, the loader goes first: leave", 30, "feedline torch", {"ORDER": "loader"}),
    ("PyTorch, the tensors go first: leave", 30, "feedline torch", {"ORDER": "tensors"}),
    ("PyTorch: broken", 30, "feedline torch", {}),
    ("tests/gpu: torch", 40, "suite torch", {}),
    ("tests/gpu: launches that wait", 40, "quick", {"CUDA_LAUNCH_BLOCKING": 1}),
    ("tests/gpu: modules that load eagerly", 40, "quick", {"CUDA_MODULE_LOADING": "EAGER"}),
    ("tests/gpu: one connection", 40, "quick", {"CUDA_DEVICE_MAX_CONNECTIONS": 1}),
    ("tests/gpu: PyTorch without cached memory", 40, "suite torch", {"PYTORCH_NO_CUDA_MEMORY_CACHING": 1}),
    ("nvJPEG: jpeg", 30, "torch torchvision", {}),
]
# Rows of tests/gpu and what they should be: section, row, least, most, what another value means.
ROWS = [
    ("leaks", "loaders leave nothing", 30, 60, "ms a loader: what `build` and the drop take beside a driver"),
    ("forks", "fork", None, 5, "seconds: MADV_DONTFORK did not take"),
    ("drops", "at once / waited for", 0.97, None, "the bus is the limit of both if it carries less than 43 GB/s; else slots come back late"),
    ("rates", "pinning 128 MiB, registered", 3, 10, "1.5 to 3: huge pages did not come"),
    ("rates", "H2D registered, 38 MiB, 1 in flight", 50, 58, "24 to 26: PCIe 4; below in a VM: IOMMU"),
    ("rates", "H2D registered, 1 MiB, 1 in flight", 30, 45, "the driver's price of a small copy"),
    ("rates", "H2D pageable, 38 MiB, 1 in flight", 5, 12, "how much pinning is worth here"),
    ("rates", "registered / host-alloc, 38 MiB, 1 in flight", 0.97, None, "huge pages did not come"),
    ("rates", "D2D, 1024 MiB", 1400, 2200, "H100: 1,400 to 1,500; H200: 2,100 to 2,200"),
    ("stage", "alone, 38.5 MB: loader / bare", 0.97, None, "events between copies (facts: the 8 calls of copy.rs), or the copy thread is late"),
    ("stage", "alone, 38.5 MB: the copy thread's CPU time", None, 20, "the prices of its calls, or more questions than batches"),
    ("rates", "bytes at offset 1", 10, 32, "26: the memory's limit of an H100; far above: its loads are not words"),
    ("stage", "finish, f16, planes, 224 wide: loader / bare", 0.97, None, "0.92: the bus waits for operations on batches"),
    *(("stage", f"finish, {dtype}, {layout}, {width} wide: kernel", 10, most, "as reckoned for an H100. Above 55 of f16, planes: no table in shared memory")
      for dtype, layout, width, most in [("f16", "planes", 224, 50), ("f16", "interleaved", 224, 60), ("f32", "planes", 224, 95),
                                         ("f32", "interleaved", 224, 120), ("f16", "planes", 225, 120), ("f16", "interleaved", 225, 120),
                                         ("f32", "planes", 225, 140), ("f32", "interleaved", 225, 140)]),
    ("idle", "idle, by events", None, 0.5, "queues, or the floor of `asked → start`"),
    ("idle", "of that starved: no batch was there", None, 0.2, "queues, or the floor of `asked → start`"),
]


class Run:
    """The book of facts and sections, on disk after each section."""

    def __init__(self, args):
        self.args, self.began, self.stopped, self.told = args, time.monotonic(), "", set()
        self.book = {"format": 1, "date": time.strftime("%FT%TZ", time.gmtime()), "stand_in": False, "machine": {}, "driver": {}, "facts": [], "sections": []}

    def say(self, text):
        for line in text.rstrip().split("\n"):
            print(f"{'stand-in | ' if fact.STANDIN else ''}{line}", flush=True)

    def put(self, section, it):
        self.book["facts"].append({"section": section, **it})
        value = "–" if it["value"] is None else f"{it['value']} {it['unit']}".rstrip()
        value += ", no meaning on a stand-in" if it["verdict"] == "unmeasured" and fact.STANDIN else ""
        word = "WRONG" if it["verdict"] == "other" and it["must"] else it["verdict"]
        self.say(f"  {word:<10} {it['name']:<72} {value:<38} expected: {it['expected']}")
        if it["meaning"] and (it["verdict"] == "other" or it["meaning"] not in self.told):
            self.told.add(it["meaning"])
            self.say(f"             another value: {it['meaning']}")
        if it["stop"] and it["verdict"] == "other":
            self.stopped = f"{it['name']}: {it['value']}"

    def left(self):
        return SECONDS - (time.monotonic() - self.began)

    def section(self, name, command, limit, why="", own=None, **env):
        """Runs a process and notes how it ends; `why` it is left out, `own`: the JSON that it writes."""
        began, left = time.monotonic(), self.left()
        self.say(f"\n== {name}")
        why = why or (f"stopped: {self.stopped}" if self.stopped else "no time is left" if left < 10 else "")
        it = {"name": name, "verdict": "skipped", "why": why, "exit": None, "seconds": 0, "json": None}
        if why:
            self.say(f"  skipped    {why}")
        else:
            it["exit"], it["why"] = self.process(name, command, min(limit, left), env)
            it["seconds"], it["verdict"] = round(time.monotonic() - began, 2), "wrong" if it["exit"] else "ok"
            if own and own.exists():
                it["json"] = json.loads(own.read_text())
        self.book["sections"].append(it)
        self.write()
        return it

    def process(self, name, command, limit, env):
        """The exit status, or that it hangs; and its last words if that is not 0."""
        child = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT,
                                 start_new_session=True, env={**os.environ, **{key: str(value) for key, value in env.items()}})
        late, tail = threading.Event(), collections.deque(maxlen=8)
        timer = threading.Timer(limit, lambda: (late.set(), os.killpg(child.pid, signal.SIGKILL)))
        timer.start()
        for line in child.stdout:
            if line.startswith(fact.MARK):
                self.put(name, json.loads(line[len(fact.MARK):]))
                continue
            if line.startswith(ROW):
                row = json.loads(line[len(ROW):])
                line = f"{row['verdict']:<10} {row['what']:<72} {row.get('words', '')}"
            tail.append(line.strip())
            self.say(f"  {line}")
        status = child.wait()
        timer.cancel()
        status = f"HANGS: no end within {limit:.0f} s" if late.is_set() else status
        return status, " ".join(tail)[-2000:] if status else ""

    def wrong(self):
        facts = [f"{it['section']}: {it['name']}: {it['value']}. {it['meaning']}" for it in self.book["facts"] if it["verdict"] == "other" and it["must"]]
        sections = [it for it in self.book["sections"] if it["verdict"] == "wrong"]
        return facts + [f"{it['name']}: {'left out,' if it['exit'] is None else it['exit']} {it['why'][-280:]}" for it in sections]

    def write(self):
        fresh = self.args.out / "first.json.part"
        fresh.write_text(json.dumps({**self.book, "wrong": self.wrong()}, indent=1, ensure_ascii=False) + "\n")
        fresh.rename(self.args.out / "first.json")

    def driver(self):
        """The real one, or the stand-in, built as tests/common/standin.rs builds it. A driver that does not start is no stand-in's turn."""
        wish = os.environ.get("FEEDLINE_GPU") or "auto"
        found = output([sys.executable, "-c", LOOK])[1]
        if wish == "standin" or wish == "auto" and found != "started" and not pathlib.Path("/dev/nvidiactl").exists():
            path, rustc = self.args.out / "libcuda-standin.so", os.environ.get("RUSTC", "rustc")
            options = ["--edition", "2024", "-O", "--crate-type", "cdylib", "-C", "panic=abort", "-C", "link-arg=-Wl,-soname,libcuda.so"]
            good, words = output([rustc, *options, "-o", path, ROOT / "tests/standin/cuda.rs"], 180)
            if good:
                fact.STANDIN = os.environ["FEEDLINE_FIRST_STANDIN"] = str(path)
            found = f"{'not asked' if wish == 'standin' else found}{'' if good else '; no stand-in: ' + words}"
        os.environ["FEEDLINE_GPU"] = "standin" if fact.STANDIN else "real"
        self.book.update(stand_in=bool(fact.STANDIN), driver={"kind": "stand-in" if fact.STANDIN else "real", "libcuda.so.1": found})
        if fact.STANDIN:
            self.say(f"the stand-in for libcuda is the driver (libcuda.so.1: {found}): nothing here is said of a GPU, and times have no meaning")

    def machine(self):
        self.say("\n== machine")
        asked = {"data": f"df -hT {self.args.data} | tail -1", **MACHINE}
        self.book["machine"] = {"system": platform.platform(), "python": f"{platform.python_version()} {sys.executable}"}
        self.book["machine"] |= {what: output(["bash", "-c", command])[1].replace("\n", "; ") for what, command in asked.items()}
        for what, found in self.book["machine"].items():
            self.say(f"  {what:<20} {found}")
        if not fact.STANDIN:
            self.put("machine", fact.judged("libcuda.so.1, cuInit", self.book["driver"]["libcuda.so.1"], "started",
                     "34: a stub for linking; 100: no device; 803, 804: driver and libcuda of two releases; 999: no /dev/nvidia-uvm", must=True, stop=True))

    def suite(self, name, sections, seconds, **env):
        """Sections of tests/gpu, and what some of its rows should be."""
        path, own = self.args.program, self.args.out / f"{re.sub(r'[^a-z]+', '-', name[10:].lower())}.json"
        own.unlink(missing_ok=True)
        # It ends by itself.
        command = [path, "--only", sections, "--seconds", max(1, int(min(seconds, self.left())) - 10), "--dir", self.args.data, "--json", own]
        env = {"CUFILE_LOGFILE_PATH": self.args.out / "cufile.log", **({"FEEDLINE_WHEEL": self.args.wheel} if self.args.wheel else {}), **env}
        why = self.lacks()
        it = self.section(name, command, seconds, why, own, **env)
        # Nothing is right before this is known.
        it["verdict"] = "wrong" if why or it["exit"] is None and name.endswith("right") else it["verdict"]
        rows = [(section["name"], row) for section in (it["json"] or {"sections": []})["sections"] for row in section["rows"]]
        it["why"] = "; ".join(f"{section}: {row['what']}" for section, row in rows if row["verdict"] == "failed") or it["why"]
        for of, what, least, most, meaning in ROWS if rows else []:
            if of in sections.split(","):
                told = (row for section, row in rows if section == of and what in row["what"])
                row = next((row for row in told if "figure" in row or " ms each" in row.get("words", "")), {})
                value = row["figure"]["median"] if "figure" in row else float(row["words"].split()[0]) if row else None
                self.put(name, fact.judged(f"{of}: {what}", value, (least, most), meaning, row.get("figure", {"unit": "ms"})["unit"], timing=True))

    def lacks(self):
        return "" if self.args.program.exists() else f"there is no {self.args.program}: `.ci/nvidia gpu` makes it, --program names another"

    def quick(self, name, seconds, **env):
        """The conformance of tests/gpu in a few seconds."""
        driver = "standin" if fact.STANDIN else "real"
        command = [self.args.program, "--section", "conformance", "--driver", driver, "--quick", "--limit", seconds - 5, "--dir", self.args.data]
        self.section(name, command, seconds, self.lacks(), **env)

    def frameworks(self):
        """What can be imported, and sees a GPU."""
        self.say("\n== frameworks")
        if self.args.wheel:
            zipfile.ZipFile(self.args.wheel).extractall(self.args.data / "site")
            os.environ["PYTHONPATH"] = f"{self.args.data / 'site'}:{os.environ.get('PYTHONPATH', '')}"
        with concurrent.futures.ThreadPoolExecutor() as pool:
            asked = {module: pool.submit(output, [sys.executable, "-c", f"import {module}; {text}"], 90) for module, text in MODULES.items()}
        self.found = {module: said.result() for module, said in asked.items()}
        for module, (good, words) in self.found.items():
            self.book["machine"][module] = words if good else f"not to be had: {words}"
            self.say(f"  {module:<20} {self.book['machine'][module]}")

    def framework(self, name, seconds, needs, **env):
        """A part of frameworks.py."""
        lacks = [module for module in needs if not self.found[module][0]]
        why = "on a stand-in: it wants a real GPU" if fact.STANDIN else f"without {', '.join(lacks)}" if lacks else ""
        part = name.split()[-1]
        it = self.section(name, [sys.executable, HERE / "frameworks.py", part, self.args.data], seconds, why, **env)
        if part == "leave" and it["exit"] == 0:
            meaning = "longer: the exit waits for more than its queue"
            self.put(name, fact.judged("end with queued work", it["seconds"], (None, 12), meaning, "s", timing=True))
        # PyTorch itself may abort a process whose context is broken.
        if part == "broken" and it["exit"] == -signal.SIGABRT:
            it["verdict"] = "ok"

    def part(self, name, seconds, wants, env):
        """A line of the plan."""
        kind, *rest = wants.split()
        if kind == "facts":
            self.section(name, [sys.executable, HERE / "facts.py", name.split()[-1]], seconds, **env)
        elif kind == "suite":
            self.suite(name, rest[0], seconds, **env)
        elif kind == "quick":
            self.quick(name, seconds, **env)
        else:
            self.framework(name, seconds, [kind, *rest], **env)


def output(command, seconds=40):
    """Whether a command succeeds, and what it says; its last line if it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, cwd=ROOT)
    except (subprocess.TimeoutExpired, OSError) as error:
        return False, str(error)
    text = done.stdout.strip()
    return done.returncode == 0, text if done.returncode == 0 else (text.splitlines() or [f"ends with {done.returncode}"])[-1]


def main():
    wheels = sorted((ROOT / "target/wheels").glob("feedline*x86_64.whl"))
    given = lambda env: " ".join(f"{key}={value}" for key, value in env.items())
    plan = "\n".join(f"  {seconds:>4}  {name:<44} {wants} {given(env)}".rstrip() for name, seconds, wants, env in PLAN)
    parser = argparse.ArgumentParser(prog=".ci/nvidia first", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=f"In this order, with the seconds that each may take:\n{plan}\n\n"
                                     "Exit status: 0 nothing is wrong (figures may be other than expected), 1 something is, or no driver starts.")
    parser.add_argument("--out", type=pathlib.Path, default=PLACE / "first", help="folder for first.json and what else is left")
    parser.add_argument("--dir", type=pathlib.Path, help="folder for data, on the file system of your data [default: --out]; it is removed at the end")
    parser.add_argument("--program", type=pathlib.Path, default=os.environ.get("FEEDLINE_GPU_PROGRAM"),
                        help="a built tests/gpu [default: FEEDLINE_GPU_PROGRAM, else that of `.ci/nvidia gpu`]")
    parser.add_argument("--wheel", default=os.environ.get("FEEDLINE_WHEEL") or (wheels[-1] if wheels else None),
                        help="a wheel of python [default: FEEDLINE_WHEEL, else that of target/wheels]")
    args = parser.parse_args(sys.argv[2:])
    args.out = args.out.absolute()
    args.data = (args.dir or args.out).absolute() / "feedline-first"
    for folder in (args.out, args.data):
        folder.mkdir(parents=True, exist_ok=True)
    if not args.program:
        # Without cargo it was brought along.
        args.program = PLACE / "gpu"
        if shutil.which("cargo"):
            subprocess.run([ROOT / ".ci/nvidia", "gpu"])
    args.program = args.program.absolute()
    run = Run(args)
    run.driver()
    run.machine()
    run.frameworks()
    for part in PLAN:
        run.part(*part)
    shutil.rmtree(args.data, ignore_errors=True)
    run.write()
    wrong, counts = run.wrong(), collections.Counter(it["verdict"] for it in run.book["facts"] + run.book["sections"])
    run.say(f"\n== facts and sections: {', '.join(f'{count} {word}' for word, count in counts.items())}; {args.out / 'first.json'}")
    for line in wrong or ["nothing is wrong"]:
        run.say(f"  {'WRONG      ' if wrong else ''}{line}")
    sys.exit(1 if wrong else 0)


main()
