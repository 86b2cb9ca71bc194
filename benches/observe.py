"""The judge of `feedline.observe`: PyTorch's DataLoader with one known fault each, and what `observe` says of it.

    python benches/observe.py truth FOLDER      without `observe`: the rate with the fault and without exactly this fault
    python benches/observe.py faults FOLDER     how often the right cause is named, what else, and whether it is absurd
    python benches/observe.py advice FOLDER     the first advice, followed: rates before and after it, and the promised one
    python benches/observe.py healthy FOLDER    nothing is wrong, other programs run in bursts: no cause may be named
    python benches/observe.py cost FOLDER       the rate of a loop with `observe` and without it, and what stays behind
    python benches/observe.py try_it FOLDER     the rate that `try_it` promises, and the one of the loop really switched

`--runs N`, `--only WORD`, `--json FILE` with an answer a line. FOLDER gets some 360 MB. It needs root for control groups of
version 1, bindfs and webdataset; a case without its means is left out by name. A run that other programs disturb is repeated.
Not here: batches that are not pinned, which only a GPU shows.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import multiprocessing
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from typing import Any, Callable

import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow import parquet
from torch.utils.data import DataLoader, get_worker_info

from store import served
from verdicts import beside

CORES = len(os.sched_getaffinity(0))
BURSTS = "import random, time\nwhile True:\n time.sleep(random.random() / 2)\n for _ in range(random.randrange(10**7)): pass"
SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "batch_size", "in_order")
VALUES = {"True": True, "False": False}
SAID = ("verdict", "snapshot", "report")
DISTURBED = 0.3  # cores that other programs use during a run


# What a sample is, and a step. The program runs in the folder of the data.


def picture(i, times=1):
    for _ in range(times):
        with Image.open(f"pictures/{i % 2}/{i % 4096:04}.jpg") as file:
            pixels = np.asarray(file.convert("RGB"))
    return torch.from_numpy(pixels[::4, ::4].copy())


def skewed(i):
    """Worker 0 has five times the work of the others."""
    info = get_worker_info()
    return picture(i, 5 if info and info.id == 0 else 1)


def file(i, where="files", cold=False):
    """The start of a file that is read as a whole; cold: not from the page cache, as of a data set larger than memory."""
    number = os.open(f"{where}/{i % 128:04}.bin", os.O_RDONLY)
    if cold:
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    with open(number, "rb", buffering=0) as opened:
        return torch.frombuffer(bytearray(opened.read()), dtype=torch.uint8)[:1024].clone()


def fetched(i):
    """The same from a store."""
    with urllib.request.urlopen(f"{os.environ['STORE']}/files/{i % 128:04}.bin") as opened:
        content = opened.read()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[:1024].clone()


def cheap(i, seconds=0):
    time.sleep(seconds)
    return torch.full((256,), i % 1000)


def compute(count=400_000):
    """Some 20 ms of a core."""
    sum(i * i for i in range(count))


def multiply(x=torch.ones(1200, 1200)):
    """A step on the CPU that uses all cores."""
    x @ x


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A loop with one fault, and its data set; `cure` has the fields without the fault."""

    name: str
    causes: tuple[str, ...]
    sample: Callable[[int], Any]
    cure: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: int = 16
    workers: int = 2
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: Callable[[], Any] = functools.partial(time.sleep, 0.001)  # as a step on a GPU: without a core and the GIL
    epochs: tuple[int, int] = (0, 1_000_000)  # count, 0 for a time, and batches of each
    thread: bool = False  # a thread of the main process computes in Python
    group: tuple[str, ...] = ()  # controller, file and value of a control group
    mount: int = 0  # bytes/s of a FUSE mount of the files
    store: int = 0  # ms that a store takes for an answer
    programs: tuple[int, str] = (0, "")  # that run beside: how many, and their code
    disk: bool = False  # files are read that are not in the page cache

    def __len__(self):
        return self.batch * self.epochs[1]

    def __getitem__(self, i):
        return self.sample(i)

    def loader(self):
        return DataLoader(self, **{"batch_size": self.batch, "num_workers": self.workers, **self.settings})


def cases():
    part, kept = functools.partial, {"persistent_workers": True}
    few, heavy, disk = {"workers": CORES}, part(picture, times=4), part(file, cold=True)
    spawn, init = {"multiprocessing_context": "spawn"}, {"worker_init_fn": lambda _: compute(4_000_000)}
    number = os.stat(".").st_dev
    slow = ("blkio", "blkio.throttle.read_bps_device", f"{os.major(number)}:{os.minor(number)} 40000000")
    half = ("cpu", "cpu.cfs_quota_us", "50000")
    numpy, floats, ids = np.ones(1 << 18, np.float32), torch.ones(1 << 18), torch.arange(1000, 9192)
    arrays = {"settings": {"collate_fn": lambda samples: {"x": np.stack(samples)}}}
    lists = {"settings": {"collate_fn": lambda samples: {"ids": [list(sample) for sample in samples]}}}
    return [
        Case("too few workers", ("workers",), picture, few, workers=1),
        Case("no workers", ("workers",), picture, few, workers=0),
        Case("cold disk", ("storage",), disk, {"sample": file}, disk=True),
        Case("slow disk", ("storage",), disk, {"group": ()}, batch=4, group=slow, disk=True),
        Case("slow transform", ("transform",), heavy, {"sample": picture}, workers=CORES),
        Case("GIL", ("gil",), cheap, {"thread": False}, thread=True),
        Case("arrays by pipe", ("pipe",), lambda _: numpy, {"sample": lambda _: floats, "settings": {}}, **arrays),
        Case("lists by pipe", ("pipe",), lambda _: range(1000, 9192), {"sample": lambda _: ids, "settings": {}}, 64, **lists),
        Case("spawn per epoch", ("worker_start",), cheap, {"settings": spawn | kept}, settings=spawn, epochs=(4, 100)),
        Case("init per epoch", ("worker_start",), cheap, {"settings": init | kept}, settings=init, epochs=(6, 100)),
        Case("quota", ("cpu_quota",), picture, {"group": ()}, group=half),
        Case("one slow worker", ("slow_worker",), skewed, {"sample": picture}, batch=8),
        Case("mount", ("network_storage",), part(file, where="mount"), {"sample": file}, batch=4, mount=40_000_000),
        Case("step of Python", ("not_starved",), cheap, {"step": part(time.sleep, 0.001)}, step=compute),
        Case("tiny batches", ("small_batches",), cheap, {"batch": 64}, batch=1, step=part(time.sleep, 0.0001)),
        Case("store", ("network",), fetched, {"sample": file}, store=20),
        Case("workers that sleep", ("blocked",), part(cheap, seconds=0.004), {"sample": cheap}),
        Case("other programs", ("other_programs",), picture, {"programs": (0, "")}, programs=(2 * CORES, "while True: pass")),
        # Both are true: without the step's work the loop is faster, but the workers use all cores that they get.
        Case("step on all cores", ("cores", "transform"), heavy, {"step": part(time.sleep, 0.025)}, batch=8, step=multiply),
        Case("healthy", ("not_starved",), cheap, step=part(time.sleep, 0.02), programs=(2, BURSTS)),
    ]


def make():
    """256 JPEGs of 100 KB with 16 names each, 128 files of 1 MB, and what a switch needs."""
    if os.path.exists("made"):
        return
    draw = np.random.default_rng(0)
    [os.makedirs(part) for part in ("pictures/0", "pictures/1", "files", "mount", "arrays")]
    with tarfile.open("train-0000.tar", "w", dereference=True) as tar:
        for i in range(4096):
            path, first = (f"pictures/{i % 2}/{n:04}.jpg" for n in (i, i % 256))
            if path == first:
                smooth = Image.fromarray(draw.integers(0, 255, (60, 80, 3), np.uint8)).resize((640, 480))
                noisy = (np.asarray(smooth) + draw.integers(-12, 12, (480, 640, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(noisy).save(path, quality=85)
            else:
                os.link(first, path)
            if i < 1024:
                tar.add(path, f"{i:06}.jpg")
            np.save(f"arrays/{i:04}.npy", draw.random((64, 64), np.float32))
    for i in range(128):
        pathlib.Path(f"files/{i:04}.bin").write_bytes(draw.bytes(1 << 20))
    draw.integers(0, 50257, (4 << 20) + 1, np.uint16).tofile("tokens.bin")
    columns = {f"x{i:02}": draw.random(1 << 18, np.float32) for i in range(16)}
    parquet.write_table(pyarrow.table(columns), "rows.parquet", row_group_size=4096)
    os.sync()
    pathlib.Path("made").touch()


# One run, in a process of its own.


def clocks():
    """The time, the seconds of cores that this process used with its ended children, and those that all used."""
    user, nice, system, _idle, _wait, *others = map(int, pathlib.Path("/proc/stat").read_text().split()[1:9])
    here = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    everywhere = (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")
    return np.array([time.monotonic(), sum(one.ru_utime + one.ru_stime for one in here), everywhere])


def counted(loader, step, seconds, epochs=0):
    """Batches/s and the share of the time waited for them: after the first second, or of some epochs after the first."""
    begin = asked = time.monotonic()
    start, waited, batches, epoch = None, 0.0, 0, 0
    while epoch < epochs or not epochs and asked < begin + seconds:
        for batch in loader:
            if start is None and (epoch > 0 if epochs else asked > begin + 1):
                start, waited, batches = asked, 0.0, 0
            waited += time.monotonic() - asked
            step()
            batches += 1
            del batch
            asked = time.monotonic()
            if not epochs and asked > begin + seconds:
                break
        epoch += 1
    return batches / (asked - start), waited / (asked - start)


def one(case, observed=False, cured=False, change={}):
    """What the judge measures itself, and what `observe` says; cured: without the fault, change: with other settings."""
    case = dataclasses.replace(case, **case.cure) if cured else case
    loader = dataclasses.replace(case, settings=case.settings | change).loader()
    answer = {"settings": {name: getattr(loader, name, None) for name in SETTINGS}}
    if observed:
        import feedline

        loader = feedline.observe(loader)
    if case.thread:
        threading.Thread(target=compute, args=(10**12,), daemon=True).start()
    before = clocks()
    rate, waited = counted(loader, case.step, 5, case.epochs[0])
    answer |= {name: getattr(loader, name)() for name in SAID} if observed else {}
    del loader
    gc.collect()
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()
    wall, here, everywhere = clocks() - before
    cores = {"cores": here / wall, "elsewhere": (everywhere - here) / wall}
    return answer | {"rate": rate * answer["settings"]["batch_size"], "waited": waited} | cores


# The runs.


@contextlib.contextmanager
def around(case):
    """What lies around the process of a case: a function that it calls first, and its environment."""
    with contextlib.ExitStack() as stack:
        join, environment = None, dict(os.environ)
        if case.group:
            controller, name, value = case.group
            place = pathlib.Path("/sys/fs/cgroup", controller, "feedline-observe")
            place.mkdir(exist_ok=True)
            stack.callback(place.rmdir)
            (place / name).write_text(value)
            join = lambda: (place / "cgroup.procs").write_text(str(os.getpid()))
        if case.mount:
            subprocess.run(["bindfs", f"--read-rate={case.mount}", "files", "mount"], check=True)
            stack.callback(lambda: subprocess.run(["umount", "-l", "mount"], check=True))
        if case.store:
            environment["STORE"] = stack.enter_context(served(".", ms=case.store))
        stack.enter_context(beside(*case.programs))
        yield join, environment


def asked(what, *words, **more):
    """The answer of this program in a process of its own."""
    command = [sys.executable, __file__, what, ".", *words]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=180, **more).stdout.splitlines()[-1])


def rest():
    """Waits until other programs leave the cores, a minute at most."""
    for _ in range(30):
        before = clocks()
        time.sleep(2)
        if (clocks() - before)[2] < 2 * DISTURBED:
            break


def run(case, **how):
    """The answer of a run, again while other programs disturb it."""
    around_it = dataclasses.replace(case, **case.cure) if "cured" in how else case
    for attempt in range(5):
        rest()
        with around(around_it) as (join, environment):
            answer = asked("one", "--only", case.name, "--how", json.dumps(how), preexec_fn=join, env=environment)
        if answer["elsewhere"] < DISTURBED or around_it.programs[0]:
            break
    return answer | {"attempt": attempt}


def absurd(case, answer):
    """Words that this situation refutes."""
    verdict, now = answer["verdict"], answer["settings"]
    quota, gpu, workers = case.group[:1] == ("cpu",), torch.cuda.is_available(), now["num_workers"]
    # Workers that wait for storage or a network need no core.
    others = 0 if verdict["cause"] in ("storage", "network_storage", "network", "blocked") else max(0, answer["elsewhere"])
    crowded = quota or answer["cores"] + others > 0.92 * CORES
    found = []
    for advice in verdict["advice"]:
        setting, value = advice["setting"], VALUES.get(advice["value"], advice["value"])
        promised = (advice["prediction"] or {}).get("rate")
        more = setting == "num_workers" and value is not None
        found += [f"{setting}={value} is already set"] * (value is not None and now.get(setting) == value)
        found += ["more workers where no core is idle"] * (more and crowded and value > workers > 0)
        found += [f"num_workers={value} on {CORES} cores"] * (more and not 0 <= value <= 4 * CORES)
        found += [f"{setting} without workers"] * (setting in ("persistent_workers", "prefetch_factor") and not workers)
        found += ["in_order with less than two workers"] * (setting == "in_order" and workers < 2)
        found += ["pin_memory without a GPU"] * (setting == "pin_memory" and not gpu)
        found += ["a prediction that cannot be"] * (promised is not None and not 1 <= promised / verdict["rate"] < 50)
    words = " ".join([verdict["headline"], answer["report"], *(advice["text"] for advice in verdict["advice"])])
    found += [f"the word {word}" for word in ("nan", "inf", "None") if word in re.findall(r"[-\w]+", words)]
    found += ["evidence that is no number"] * any(not math.isfinite(part["value"]) for part in verdict["evidence"])
    impossible = {
        "storage": not case.disk,
        "network_storage": not case.mount,
        "network": not case.store,
        "gil": not case.thread,
        "cpu_quota": not quota,
        "worker_start": not case.epochs[0],
        "pinning": not gpu,
        "other_programs": answer["elsewhere"] < DISTURBED,
        "slow_worker": workers < 2,
        "pipe": workers == 0,
    }
    found += [f"{name} cannot be" for name in (verdict["cause"], verdict["also"]) if impossible.get(name)]
    # The rate may be that of batches, where samples are unknown.
    rates = [verdict["rate"] / known - 1 for known in (answer["rate"], answer["rate"] / now["batch_size"])]
    # Of several epochs it counts the time within them alone, and to free a batch belongs to the step.
    found += ["starved_share is wrong"] * (not case.epochs[0] and abs(verdict["starved_share"] - answer["waited"]) > 0.2)
    return found + ["rate is wrong"] * (min(map(abs, rates)) > 0.25)


def judge(case, keep, runs):
    """One line on the answers to some runs of a case."""
    answers = []
    for _ in range(runs):
        answers.append(run(case, observed=True))
        answers[-1]["absurd"] = absurd(case, answers[-1])
        keep(case.name, answers[-1])
    right = sum(answer["verdict"]["cause"] in case.causes for answer in answers)
    wrong = {answer["verdict"]["cause"] for answer in answers} - set(case.causes)
    silly = {word for answer in answers for word in answer["absurd"]}
    disturbed = sum(answer["attempt"] == 4 for answer in answers)
    waits = statistics.median(answer["waited"] for answer in answers)
    words = [f"{case.name}: {right} of {runs} right, waits {waits:.2f}", *sorted(wrong), *sorted(silly)]
    print("; ".join(words + [f"{disturbed} disturbed"] * (disturbed > 0)), flush=True)


def followed(case, keep, observed):
    """The rates with the fault and without it; observed: after the first advice, if that is a setting of the loader."""
    before = run(case, observed=observed)
    verdict = before.get("verdict") or {"cause": case.causes[0], "advice": []}
    advice = (verdict["advice"] or [{"remedy": None, "setting": None, "value": None, "prediction": None}])[0]
    value = VALUES.get(advice["value"], advice["value"]) if advice["setting"] else None
    if value is None and verdict["cause"] not in case.causes:
        return print(f"{case.name}: {verdict['cause']}, NOT FOLLOWED: {advice['remedy']}", flush=True)
    after = run(case, **({"cured": True} if value is None else {"change": {advice["setting"]: value}}))
    keep(case.name, {"before": before, "after": after})
    words = [f"{case.name}: {before['rate']:.0f} to {after['rate']:.0f} samples/s, {after['rate'] / before['rate']:.2f} ×"]
    words += ["waits {waited:.2f}, {cores:.2f} cores here, {elsewhere:.2f} elsewhere".format(**one) for one in (before, after)]
    if observed:
        promised = (advice["prediction"] or {}).get("rate")
        how = "the cure" if value is None else f"{advice['setting']}={value}"
        kept = after["rate"] >= 0.95 * (promised or 1.1 * before["rate"])
        words += [verdict["cause"], f"{advice['remedy']} by {how}"]
        words += [f"promised {promised:.0f}" if promised else "nothing promised", "kept" if kept else "NOT KEPT"]
    print("; ".join(words), flush=True)


# What it costs, and what a switch brings.


def left():
    """Threads, children and file descriptors of this process."""
    gc.collect()
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"threads": len(os.listdir("/proc/self/task")), "children": len(children), "files": len(os.listdir("/proc/self/fd"))}


def cost(pairs):
    """The rates of loops in turn, without `observe` and with it."""
    import feedline

    case = Case("cost", (), cheap, batch=32, workers=1, step=functools.partial(compute, 40_000))
    rate = lambda loader: counted(loader, case.step, 3)[0]

    def observed():
        with feedline.observe(case.loader()) as loader:
            return rate(loader)

    before = observed() and left()
    pairs = [(rate(case.loader()), observed()) for _ in range(pairs)]
    after = left(), rate(feedline.observe(case.loader())) and left()
    ratios = sorted(with_it / without for without, with_it in pairs)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    print(f"{statistics.median(ratios):.4f} of the rate without it; 80 % of {len(pairs)} pairs: {low:.4f} to {high:.4f}")
    print(f"before {before}, after with and without `with` {after}")
    return {"pairs": pairs, "before": before, "after": after}


def switches():
    """PyTorch's loader and feedline's."""
    import feedline.torch as fl
    import webdataset
    from torchvision import transforms as t
    from torchvision.datasets import ImageFolder

    last = [t.ToTensor(), t.Normalize(*fl.IMAGENET)]
    train = t.Compose([t.RandomResizedCrop(224), t.RandomHorizontalFlip(), *last])
    test = t.Compose([t.Resize(256), t.CenterCrop(224), *last])
    loader = functools.partial(DataLoader, num_workers=2, batch_size=32)
    read = lambda sample, batches: Case("", (), sample, batch=32, epochs=(0, batches)).loader
    shard = lambda: webdataset.WebDataset("train-0000.tar", shardshuffle=False, empty_check=False).decode("pil").to_tuple("jpg")
    window = lambda i: np.memmap("tokens.bin", np.uint16, "r")[i * 1024 : i * 1024 + 1025].astype(np.int64)
    table = functools.cache(lambda: np.stack([column.to_numpy() for column in parquet.read_table("rows.parquet").columns], 1))
    plain = {"batch_size": 32, "device": "cpu"}
    floats = {"size": 224, "dtype": "f32", "normalize": fl.IMAGENET, **plain}
    ours = functools.partial(fl.images, "pictures", **floats)
    return {
        "train": (lambda: loader(ImageFolder("pictures", train), shuffle=True), lambda: ours(shuffle=1)),
        "test": (lambda: loader(ImageFolder("pictures", test)), ours),
        # From here on `try_it` is given feedline's loader.
        "shards": (lambda: loader(shard().map_tuple(test), num_workers=1), lambda: fl.webdataset("train-0000.tar", **floats)),
        "tokens": (read(window, 128), lambda: fl.tokens("tokens.bin", seq_len=1024, next_token=True, **plain)),
        "Parquet": (read(lambda i: table()[i], 8192), lambda: fl.parquet("rows.parquet", **plain)),
        "arrays": (read(lambda i: np.load(f"arrays/{i:04}.npy"), 128), lambda: fl.npy("arrays", **plain)),
    }


def trial(name):
    """A loop as it is, and really switched."""
    import feedline

    before, ours = switches()[name]
    step = functools.partial(time.sleep, 0.002)
    rate = lambda loader: 32 * counted(loader, step, 5)[0]
    now = rate(before())
    loader = feedline.observe(before(), try_it=True if name in ("train", "test") else ours())
    end = time.monotonic() + 4
    for _batch in loader:
        step()
        if time.monotonic() > end:
            break
    answer = {name: getattr(loader, name)() for name in SAID}
    del loader
    gc.collect()
    return answer | {"now": now, "switched": rate(ours())}


def tried(name, keep):
    rest()
    answer = asked("trial", "--only", name)
    keep(name, answer)
    now, switched, promised = answer["now"], answer["switched"], (answer["verdict"].get("trial") or {}).get("rate")
    words = f"{promised:.0f} ({promised / switched - 1:+.0%})" if promised else "nothing"
    print(f"{name}: {now:.0f} samples/s, promised {words}, switched {switched:.0f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("truth", "faults", "advice", "healthy", "cost", "try_it", "one", "trial"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--how", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    lines = open(args.json, "w", buffering=1) if args.json else None
    keep = lambda name, answer: print(json.dumps({"name": name, **answer}), file=lines) if lines else None
    args.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(args.folder)
    make()
    if args.what == "one":
        case = next(case for case in cases() if case.name == args.only)
        print(json.dumps(one(case, **args.how)))
    elif args.what == "trial":
        print(json.dumps(trial(args.only)))
    elif args.what == "cost":
        keep("cost", cost(args.runs or 20))
    elif args.what == "healthy":
        judge(cases()[-1], keep, args.runs or 50)
    elif args.what == "try_it":
        [tried(name, keep) for name in switches() if args.only in name]
    else:
        for case in [case for case in cases()[:-1] if args.only in case.name]:
            try:
                judge(case, keep, args.runs or 20) if args.what == "faults" else followed(case, keep, args.what == "advice")
            except (OSError, subprocess.SubprocessError) as error:
                print(f"{case.name}: left out: {error}", flush=True)


if __name__ == "__main__":
    main()
