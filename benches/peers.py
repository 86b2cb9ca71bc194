"""Measures the package: its cost beside the crate, the GIL in waits, and other loaders on the same pictures.

    cargo build --release --example throughput
    python benches/peers.py cost --native target/release/examples/throughput --pictures FOLDER
    python benches/peers.py gil
    python benches/peers.py loaders FOLDER feedline torch dali spdl ffcv

Everything alternates within a run, each measurement in a process of its own; printed are medians, and the least and the greatest
ratio. FOLDER has a folder of pictures per class. Install the other loaders as their projects say.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SIZE, BATCH = 224, 64
RECORD = 1024
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def rate(batches, seconds):
    """Rows per second of an iterator of batches, after a quarter of the time."""
    next(batches)
    warm = time.perf_counter() + seconds / 4
    while time.perf_counter() < warm:
        next(batches)
    rows, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        rows += len(next(batches))
    return rows / took


def endless(make):
    """The batches of epoch after epoch."""
    while True:
        yield from make()


# Loaders: the picture batches of each, [rows, 3, 224, 224], random crop and flip


def feedline_pictures(args):
    import feedline.torch as fl

    floats = {"dtype": "f32", "normalize": fl.IMAGENET} if args.floats else {}
    loader = fl.images(args.data, size=SIZE, batch_size=BATCH, shuffle=1, workers=args.workers, device="cpu", **floats)
    return (images for images, _ in endless(lambda: loader))


def torch_pictures(args):
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    if args.floats:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    dataset = datasets.ImageFolder(args.data, v2.Compose(steps))
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=args.workers, persistent_workers=True)
    return (images for images, _ in endless(lambda: loader))


def dali_pictures(args):
    import numpy as np
    import nvidia.dali.fn as fn
    import nvidia.dali.types as types
    from nvidia.dali import pipeline_def

    @pipeline_def(batch_size=BATCH, num_threads=args.workers, device_id=None)
    def pipeline():
        files, labels = fn.readers.file(file_root=args.data, random_shuffle=True)
        pictures = fn.decoders.image_random_crop(files, random_area=[0.08, 1.0], random_aspect_ratio=[0.75, 4 / 3])
        pictures, flip = fn.resize(pictures, size=[SIZE, SIZE]), fn.random.coin_flip()
        if not args.floats:
            return fn.flip(pictures, horizontal=flip), labels
        scaled = {"mean": [255 * value for value in MEAN], "std": [255 * value for value in STD]}
        return fn.crop_mirror_normalize(pictures, dtype=types.FLOAT, output_layout="CHW", mirror=flip, **scaled), labels

    built = pipeline()
    built.build()
    return (np.asarray(built.run()[0].as_tensor()) for _ in iter(int, 1))


def spdl_pictures(args):
    import numpy as np
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    files = [str(path) for path in Path(args.data).glob("*/*")]
    deviation = np.array(STD, np.float32) * 255

    def decode(path):
        area, ratio = random.uniform(0.08, 1), math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = f"min(iw\\,sqrt({area}*iw*ih*{ratio}))", f"min(ih\\,sqrt({area}*iw*ih/{ratio}))"
        crop = f"crop=w={width}:h={height}:x={random.random()}*(iw-ow):y={random.random()}*(ih-oh):exact=1"
        flip = ",hflip" if random.random() < 0.5 else ""
        steps = f"{crop},scale={SIZE}:{SIZE}:flags=bilinear{flip},format=pix_fmts=rgb24"
        return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=steps)

    def join(frames):
        pictures = spdl.io.to_numpy(spdl.io.convert_frames(frames))
        if not args.floats:
            return pictures
        return ((pictures - np.array(MEAN, np.float32) * 255) / deviation).transpose(0, 3, 1, 2).copy()

    def source():
        while True:
            random.shuffle(files)
            yield from files

    steps = PipelineBuilder().add_source(source()).pipe(decode, concurrency=args.workers).aggregate(BATCH)
    pipeline = steps.pipe(join, concurrency=1).add_sink(2).build(num_threads=args.workers + 1)
    pipeline.start()
    return pipeline.get_iterator()


def ffcv_pictures(args):
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    file = Path(tempfile.gettempdir()) / "feedline-bench.beton"
    if not file.exists():
        fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
        DatasetWriter(str(file), fields, num_workers=args.workers).from_indexed_dataset(ImageFolder(args.data))
    steps = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
    if args.floats:
        steps.append(NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32))
    steps += [ToTensor(), ToTorchImage(channels_last=False)]
    settings = {"batch_size": BATCH, "num_workers": args.workers, "order": OrderOption.RANDOM, "os_cache": True}
    loader = Loader(str(file), pipelines={"image": steps, "label": None}, **settings)
    return (parts[0] for parts in endless(lambda: loader))


def feedline_records(args):
    import feedline.numpy as fl

    loader = fl.records(args.data, record_bytes=RECORD, batch_size=BATCH, shuffle=1, workers=args.workers)
    return (batch["record"] for batch in endless(lambda: loader))


LOADERS = {
    "feedline": feedline_pictures,
    "torch": torch_pictures,
    "dali": dali_pictures,
    "spdl": spdl_pictures,
    "ffcv": ffcv_pictures,
    "records": feedline_records,
}


# Runs


def one(name, args):
    """Rows per second of a loader, in a process of its own."""
    options = ["--workers", str(args.workers), "--seconds", str(args.seconds), *(["--floats"] if args.floats else [])]
    command = [sys.executable, __file__, "one", name, args.data, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * args.seconds)
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def native(args, *source):
    """Rows per second of the crate's example."""
    command = [args.native, *source, "--batch", BATCH, "--shuffle", 1, "--workers", args.workers, "--device", "host"]
    command += ["--seconds", args.seconds, "--json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["items_per_s"]


def alternate(runs, rounds):
    """Medians of several measurements that take turns."""
    seen = {name: [] for name in runs}
    for number in range(rounds):
        # The first of a round changes, so that none is always measured behind the same other one.
        for place in range(len(runs)):
            name = list(runs)[(number + place) % len(runs)]
            seen[name].append(runs[name]())
            print(f"{name}: {seen[name][-1]:.0f}/s", file=sys.stderr)
    return seen


def ratio(name, mine, theirs, unit):
    if "FEEDLINE_FIGURES" in os.environ:
        from figures import spread

        print(json.dumps({"what": name, "unit": f"{unit}/s", **spread(mine)}))
    pairs = sorted(a / b for a, b in zip(mine, theirs, strict=True))
    print(f"{name}: {statistics.median(mine):.0f} {unit}/s, ratio {statistics.median(pairs):.3f} [{pairs[0]:.3f}, {pairs[-1]:.3f}]")


def cost(args):
    """The package's loop beside the crate's."""
    with tempfile.TemporaryDirectory() as folder:
        args.data = f"{folder}/records.bin"
        Path(args.data).write_bytes(os.urandom(1 << 20) * 256)
        source = ("--source", "records", "--path", args.data, "--record-bytes", RECORD)
        seen = alternate({"crate": lambda: native(args, *source), "package": lambda: one("records", args)}, args.rounds)
    ratio("records, batches of 64 KiB, package / crate", seen["package"], seen["crate"], "records")
    if args.pictures:
        args.data = args.pictures
        source = ("--source", "images", "--path", args.data, "--crop", SIZE, "--layout", "nchw")
        seen = alternate({"crate": lambda: native(args, *source), "package": lambda: one("feedline", args)}, args.rounds)
        ratio("pictures, package / crate", seen["package"], seen["crate"], "pictures")


def count(seconds):
    """How often a Python thread counts per second."""
    end, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        number += 1
    return number / seconds


def gil(args):
    """A thread that counts while batches are waited for, beside the same thread alone."""
    import feedline.numpy as fl

    with tempfile.TemporaryDirectory() as folder:
        fifo = f"{folder}/records.bin"
        Path(fifo).write_bytes(bytes(RECORD * BATCH))
        alone, waiting = [], []
        for _ in range(args.rounds):
            alone.append(count(args.seconds))
            # All the time is a wait: the worker sleeps without the GIL, and the loop waits for it.
            loader = fl.records(
                fifo, record_bytes=RECORD, batch_size=BATCH, workers=1, map_batch=lambda batch: time.sleep(args.seconds + 0.5)
            )
            thread = threading.Thread(target=lambda: next(iter(loader)))
            thread.start()
            time.sleep(0.2)
            waiting.append(count(args.seconds))
            thread.join()
    ratio("a counting thread, during a wait / alone", waiting, alone, "counts")


def loaders(args):
    seen = alternate({name: (lambda name=name: one(name, args)) for name in args.names}, args.rounds)
    for name, rates in seen.items():
        ratio(name, rates, seen[args.names[0]], "pictures")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    parts = {"cost": cost, "gil": gil, "loaders": loaders, "one": None}
    for name in parts:
        verb = verbs.add_parser(name)
        verb.add_argument("--workers", type=int, default=os.cpu_count())
        verb.add_argument("--seconds", type=float, default=4.0)
        verb.add_argument("--rounds", type=int, default=7)
        verb.add_argument("--floats", action="store_true", help="normalised f32 in place of bytes")
        if name == "cost":
            verb.add_argument("--native", required=True, help="the crate's example throughput")
            verb.add_argument("--pictures", help="a folder of pictures, a folder per class")
        if name == "one":
            verb.add_argument("name", choices=LOADERS)
        if name in ("loaders", "one"):
            verb.add_argument("data")
        if name == "loaders":
            verb.add_argument("names", nargs="+", choices=LOADERS)
    args = parser.parse_args()
    if args.verb != "one":
        return parts[args.verb](args)
    print(rate(LOADERS[args.name](args), args.seconds), flush=True)
    os._exit(0)  # Some loaders' threads do not end.


if __name__ == "__main__":
    main()
