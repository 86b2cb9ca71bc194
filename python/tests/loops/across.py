"""One rank of a job that opens loader after loader: in each run a chosen rank is slowed, and the view over ranks is asked.

    torchrun --nproc-per-node 8 across.py FOLDER KIND RUNS STEPS [SLOW]

Rank 0 prints a line of JSON for each run, in which so many ranks are SLOW (1); `clock_s` is the mean step, `reduces_s` the mean time of
each rank in the all-reduce. Kinds: nothing, map_batch, decoder, workers, bad; step, stop and hog, which are seen by `arrive` alone;
disk and cores, which need root and the control groups of version 1.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

import feedline.torch

PICTURES = 4096
PICTURED = ("bad", "cores", "decoder", "workers")
STOPS = "while sleep 0.7; do kill -STOP {0}; sleep 0.3; kill -CONT {0} || exit; done"


def prepare(folder: Path, kind: str) -> None:
    """Records for direct reads; or small pictures, and the same with large, damaged ones among them."""
    noise = np.random.default_rng(0)
    if kind not in PICTURED:
        return noise.integers(0, 255, 64 << 20, dtype=np.uint8).tofile(folder / "records.bin")
    for name in ("whole/a", "damaged/a"):
        (folder / name).mkdir(parents=True)
    bad = folder / "bad.jpg"
    Image.fromarray(noise.integers(0, 255, (3200, 3200, 3), dtype=np.uint8)).save(bad, quality=90)
    # Noise in the last part, which a decoder meets late.
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) * 9 // 10] + noise.integers(0, 255, len(whole) // 10, dtype=np.uint8).tobytes() + whole[-2:])
    for number in range(PICTURES):
        pixels = noise.integers(0, 255, (12, 12, 3), dtype=np.uint8)
        name = f"a/{number:05}.jpg"
        Image.fromarray(pixels).resize((512, 512)).save(folder / "whole" / name, quality=90)
        os.link(bad if number % 2 else folder / "whole" / name, folder / "damaged" / name)


@contextlib.contextmanager
def group(controller: str, **limits: str):
    """This process in a control group with these limits."""
    home = Path("/sys/fs/cgroup") / controller
    slow = home / "slow"
    slow.mkdir(exist_ok=True)
    for name, value in limits.items():
        (slow / name.replace("__", ".")).write_text(value)
    (slow / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))


def late(_batch):
    time.sleep(0.06)


def sleeps(seconds: float):
    return {"image": (lambda _bytes, _sample: (time.sleep(seconds), np.zeros(4, np.float32))[1], "f32", (4,))}


@contextlib.contextmanager
def disturbed(kind: str):
    """This process stopped now and then, or with a thread that holds the interpreter's lock."""
    if kind == "stop":
        stops = subprocess.Popen(["sh", "-c", STOPS.format(os.getpid())], start_new_session=True)
        try:
            yield
        finally:
            os.killpg(stops.pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGCONT)
        return
    done = threading.Event()
    hog = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(done.is_set, True)])
    hog.start()
    try:
        yield
    finally:
        done.set()
        hog.join()


def run(folder: Path, kind: str, slow: bool, steps: int, by: dist.ProcessGroup | None) -> dict:
    place = disturbed(kind) if slow and kind in ("stop", "hog") else contextlib.nullcontext()
    workers = {"decoder": 4, "workers": 1 if slow else 4}.get(kind, 1)
    if kind == "disk":
        with open(folder / "records.bin") as file:
            # Cached bytes are read from memory, with `direct` too.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        number = os.stat(folder).st_dev
        if slow:
            place = group("blkio", blkio__throttle__read_bps_device=f"{os.major(number)}:{os.minor(number)} 1000000")
        source = {"source": "records", "path": folder / "records.bin", "record_bytes": 16384, "batch_size": 4, "direct": "on"}
    elif kind in ("decoder", "workers"):
        source = {"source": "images", "path": folder / "whole", "batch_size": 4, "output": "dict"}
        source |= {"decoders": sleeps(0.02 if kind == "workers" else 0.2 if slow else 0.01)}
    elif kind not in PICTURED:
        source = {"source": "records", "path": folder / "records.bin", "record_bytes": 4096, "batch_size": 16}
        source |= {"map_batch": late} if slow and kind == "map_batch" else {}
    else:
        if slow and kind == "cores":
            place = group("cpu", cpu__cfs_quota_us="10000", cpu__cfs_period_us="100000")
        source = {"source": "images", "path": folder / ("damaged" if slow and kind == "bad" else "whole"), "batch_size": 4, "size": (64, 64)}
        source |= {"batch_size": 32, "size": (448, 448)} if kind == "cores" else {}
        source |= {"substitute": 100_000} if kind == "bad" else {}
    grad = torch.zeros(1000)
    with place:
        loader = feedline.torch.Loader(**source, workers=workers, shuffle=0, slots=4)
        dist.barrier()
        done, reduced, began = 0, 0.0, time.perf_counter()
        while done < steps:
            for _ in loader:
                time.sleep(0.06 if slow and kind == "step" else 0.03)
                if kind in ("step", "stop", "hog"):
                    loader.arrive()
                arrived = time.perf_counter()
                dist.all_reduce(grad)
                reduced += time.perf_counter() - arrived
                done += 1
                if done == steps:
                    break
        clock = (time.perf_counter() - began) / steps
    reduces = [0.0] * dist.get_world_size()
    dist.all_gather_object(reduces, reduced / steps)
    return {"clock_s": clock, "reduces_s": reduces, **loader.across(by)}


folder, kind, runs, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
number_slow = int(sys.argv[5]) if len(sys.argv) > 5 else 1
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0 and not (folder / ("whole" if kind in PICTURED else "records.bin")).exists():
    prepare(folder, kind)
dist.barrier()
chosen, group_of_all = random.Random(kind), dist.new_group()
for number in range(runs):
    slow = sorted(chosen.sample(range(dist.get_world_size()), number_slow))
    # The default group and another one by turns.
    view = run(folder, kind, kind != "nothing" and rank in slow, steps, group_of_all if number % 2 else None)
    if rank == 0:
        rate = min(one["items_per_s"] for one in view["ranks"])
        kept = {name: view[name] for name in ("late", "steps", "clock_s", "reduces_s", "text")}
        print(json.dumps({"run": number, "slow": slow, "rate": rate, **kept}), flush=True)
dist.destroy_process_group()
