"""Shuffled rows of a data set of Hugging Face's `datasets`, read by this library and by feedline, in turn.

    pip install datasets torch
    python benches/arrow.py [--rows 50000] [--pairs 15] [--seconds 2] [--cases ids text pictures] [FOLDER]

Each case is written by `save_to_disk` below FOLDER (a temporary one), read once, and so in the page cache. Ways of `datasets`:
rows of the format torch, one by one; batches of the formats torch, arrow and numpy; DataLoader with two workers. Batches of the
format arrow are views whose values nobody has read, so they are also copied into one piece. feedline has two workers, too.
Printed are rows per second, CPU time of the process (without that of DataLoader's workers), and the median of the pairs' ratios
with a 95 % interval.
"""

import argparse
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path

BATCH = 64


def ids(k, draw):
    return {"input_ids": [draw.randrange(50257) for _ in range(draw.randrange(64, 1024))], "label": k % 7}


def text(k, draw):
    return {"text": "".join(draw.choices("etaoin shrdlu", k=draw.randrange(200, 3000))), "label": k % 7}


def pictures(k, draw):
    return {"image": {"bytes": draw.randbytes(draw.randrange(60_000, 140_000)), "path": None}, "label": k % 7}


# The rows of a case, its types by their names, and how feedline reads it.
CASES = {
    "ids": (ids, {"input_ids": "int32"}, {"columns": ["input_ids", "label"], "up_to": {"input_ids": 1024}}),
    "text": (text, {"text": "string"}, {"columns": ["text", "label"], "up_to": {"text": 3000}}),
    "pictures": (pictures, {}, {"columns": ["image.bytes", "label"], "up_to": {"image.bytes": 140_000}}),
}


def write(case, folder, rows):
    import datasets
    from datasets import Features, List, Value

    make, types, _ = CASES[case]
    of = {"ids": {"input_ids": List(Value("int32"))}, "text": {"text": Value("string")}}
    of["pictures"] = {"image": {"bytes": Value("binary"), "path": Value("string")}}
    draw = random.Random(1)
    generate = lambda: (make(k, draw) for k in range(rows))  # noqa: E731
    features = Features({**of[case], "label": Value("int64")})
    datasets.Dataset.from_generator(generate, features=features, cache_dir=str(folder / "cache")).save_to_disk(folder / case)


def endless(rows):
    """Batches of ids in shuffles of all rows."""
    draw = random.Random(2)
    while True:
        order = list(range(rows))
        draw.shuffle(order)
        yield from (order[at : at + BATCH] for at in range(0, rows - BATCH + 1, BATCH))


def by_datasets(folder, rows):
    """The ways to read: each an iterator that gives the number of rows that it has read."""
    import datasets
    import torch.utils.data

    data = datasets.load_from_disk(folder)

    def one_by_one():
        rows_of_torch = data.with_format("torch")
        for batch in endless(rows):
            yield len([rows_of_torch[k] for k in batch])

    def batches(of):
        formatted = data.with_format(of)
        for batch in endless(rows):
            yield len(formatted[batch]["label"])

    def pieces():
        formatted = data.with_format("arrow")
        for batch in endless(rows):
            yield len(formatted[batch].combine_chunks())

    def workers():
        formatted = data.with_format("torch")
        settings = {"shuffle": True, "num_workers": 2, "collate_fn": list, "persistent_workers": True}
        loader = torch.utils.data.DataLoader(formatted, BATCH, **settings)
        return (len(batch) for _ in itertools.count() for batch in loader)

    of_items = (len(data.__getitems__(batch)) for batch in endless(rows))
    ways = {"torch, row by row": one_by_one(), "torch, DataLoader, 2 workers": workers(), "__getitems__": of_items}
    ways["arrow, batches, values copied"] = pieces()
    return ways | {f"{of}, batches": batches(of) for of in ("torch", "arrow", "numpy")}


def by_feedline(case, folder):
    import feedline.numpy as fn

    loader = fn.arrow(folder, **CASES[case][2], shuffle=1, batch_size=BATCH, workers=2, device="cpu", shard=None)
    return (len(batch["label"]) for _ in itertools.count() for batch in loader)


def rate(read, seconds):
    """Rows per second, and microseconds of CPU a row, of this process."""
    start, cpu, done = time.perf_counter(), time.process_time(), 0
    while (took := time.perf_counter() - start) < seconds:
        done += next(read)
    return done / took, (time.process_time() - cpu) / done * 1e6


def interval(ratios):
    """The median, and order statistics that hold it in 95 of 100 cases."""
    ratios = sorted(ratios)
    off = int(0.98 * len(ratios) ** 0.5 + 0.5)
    middle = len(ratios) // 2
    return statistics.median(ratios), ratios[max(middle - off, 0)], ratios[min(middle + off, len(ratios) - 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for case in args.cases:
            rows = args.rows // 25 if case == "pictures" else args.rows
            if not (folder / case).exists():
                write(case, folder, rows)
            reader = by_feedline(case, folder / case)
            rate(reader, args.seconds)
            for name, other in by_datasets(folder / case, rows).items():
                rate(other, args.seconds)
                pairs = [(rate(reader, args.seconds), rate(other, args.seconds)) for _ in range(args.pairs)]
                words = []
                for number, what in enumerate(("rows/s", "us of CPU a row")):
                    of = [(own[number], its[number]) for own, its in pairs]
                    mine, theirs = (statistics.median(side) for side in zip(*of, strict=True))
                    middle, low, high = interval([a / b for a, b in of])
                    words.append(f"{theirs:,.1f} {what}, feedline {mine:,.1f}: {middle:.2f} [{low:.2f}, {high:.2f}]")
                print(f"{case}: {name}: " + "; ".join(words), flush=True)


if __name__ == "__main__":
    main()
