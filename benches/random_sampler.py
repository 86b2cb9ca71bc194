"""What others pay until they know the first index of a shuffled epoch: torch's RandomSampler, numpy's permutation.

    pip install torch numpy
    python benches/random_sampler.py [--processes 5] [--largest 8]

Each figure is the median of as many processes. One JSON object per line, as `FEEDLINE_ORDERS=5 cargo bench
--no-default-features --bench order` prints them for feedline: seconds from `iter()` to the first index, and the peak of
resident memory beyond what was resident before (imports are not in it). 10^8 takes torch some 6 GB.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time


def resident():
    """Peak and current resident memory in bytes."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS"))


def torch_first():
    from torch.utils.data import RandomSampler

    return lambda n: next(iter(RandomSampler(range(n))))


def numpy_first():
    import numpy

    return lambda n: int(numpy.random.default_rng(1).permutation(n)[0])


FIRST = {"torch RandomSampler": torch_first, "numpy permutation": numpy_first}


def measure_one(what, n):
    first = FIRST[what]()
    first(10)  # imports that are put off, thread pools
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak from here on
    _, before = resident()
    started = time.perf_counter()
    first(n)
    seconds = time.perf_counter() - started
    peak, _ = resident()
    print(seconds, max(0, peak - before))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--largest", type=int, default=8, help="exponent of the longest epoch")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return measure_one(arguments.one[0], int(arguments.one[1]))
    for what in FIRST:
        for n in (10**exponent for exponent in range(3, arguments.largest + 1)):
            command = [sys.executable, __file__, "--one", what, str(n)]
            runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(arguments.processes)]
            figures = [[float(word) for word in run.stdout.split()] for run in runs]
            seconds, peak = (statistics.median(column) for column in zip(*figures))
            print(json.dumps({"what": what, "n": n, "first_index_s": round(seconds, 9), "peak_bytes": int(peak)}), flush=True)


if __name__ == "__main__":
    main()
