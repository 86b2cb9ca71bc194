"""Text in the package beside other loaders: rows per second of a global shuffle, two workers, from the page cache.

    python benches/text.py lines FOLDER [--pairs N] [--only NAME ...]

`lines` are 200,000 JSON lines of about 3 KB. The others index the line starts once and call Python's `json.loads`, as NeMo's and
torchtitan's sources for such files do: in PyTorch's DataLoader, and in Grain. Each measurement runs in a process of its own, the
loaders take turns; printed are the median and the least and greatest ratio to feedline. FOLDER gets 0.6 GB.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

COUNT, BATCH = 200_000, 64


class Lines:
    """Random access to JSON lines by the places of their ends."""

    def __init__(self, path):
        import numpy as np

        self.path, self.map = path, None
        bytes_ = np.memmap(path, np.uint8, "r")
        self.ends = np.concatenate([[0], np.flatnonzero(bytes_ == ord("\n")) + 1])

    def __getstate__(self):
        return self.__dict__ | {"map": None}

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, row):
        if self.map is None:
            with open(self.path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return json.loads(self.map[self.ends[row] : self.ends[row + 1]])["text"]


def make_lines(folder):
    path = folder / "lines.jsonl"
    if not path.exists():
        draw = random.Random(1)
        words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 10))) for _ in range(5000)]
        with open(path, "w") as file:
            for row in range(COUNT):
                file.write(json.dumps({"id": row, "text": " ".join(draw.choices(words, k=430)), "url": f"http://a/{row}"}) + "\n")
    return path


def feedline_lines(path):
    import feedline.numpy as fl

    loader = fl.jsonl(path, columns=["text:bytes"], up_to=8192, batch_size=BATCH, shuffle=1, workers=2)
    return (len(batch) for batch in loader)


def torch_lines(path):
    from torch.utils.data import DataLoader

    return map(len, DataLoader(Lines(path), BATCH, shuffle=True, num_workers=2, collate_fn=list))


def grain_lines(path):
    import grain
    from absl import flags

    flags.FLAGS(sys.argv[:1])
    data = grain.MapDataset.source(Lines(path)).shuffle(seed=1).batch(BATCH, batch_fn=list)
    return map(len, iter(data.to_iter_dataset().mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=2))))


MAKERS = {"lines": make_lines}
LOADERS = {"lines": {"feedline": feedline_lines, "torch": torch_lines, "grain": grain_lines}}


def rate(batches, seconds=5):
    """Rows per second, after the first second."""
    begin = time.perf_counter()
    rows, start = 0, None
    for count in batches:
        now = time.perf_counter()
        if start is None and now > begin + 1:
            rows, start = 0, now
            continue
        rows += count
        if start is not None and now > start + seconds:
            break
    return rows / (now - (start or begin))


def measured(command):
    """What it prints. The worker processes of some loaders outlive an epoch that was left: they end here."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        answer = child.stdout.readline()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return float(answer)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=LOADERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="the names of loaders")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    path, loaders = MAKERS[args.what](args.folder), LOADERS[args.what]
    if args.one:
        print(rate(loaders[args.one](path)))
        sys.stdout.flush()
        os._exit(0)
    rates = {name: [] for name in args.only or loaders}
    for _ in range(args.pairs):
        for name in rates:
            command = [sys.executable, __file__, args.what, args.folder, "--one", name]
            rates[name].append(measured(command))
    first = next(iter(rates))
    for name, own in rates.items():
        ratios = sorted(mine / other for mine, other in zip(rates[first], own))
        print(f"{name}: {statistics.median(own):.0f} rows/s; {first} is {statistics.median(ratios):.2f} × [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


if __name__ == "__main__":
    main()
