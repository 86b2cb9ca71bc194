"""feedline beside PyTorch and JAX on a GPU: `frameworks.py PART FOLDER`, a process a part, since some break the context or end it.

What tests/gpu does not look at. Needs feedline on PYTHONPATH; `jpeg` needs torchvision instead.
"""

import os
import sys
import threading
import time

from fact import fact

ROWS, RECORD, COUNT = 128, 150_528, 2000


def data():
    path = os.path.join(sys.argv[2], "first.bin")
    if not os.path.exists(path):
        with open(path, "wb") as out:
            for _ in range(COUNT):
                out.write(os.urandom(RECORD))
    return path


def loader(**settings):
    import feedline.torch as fl

    settings = {"batch_size": ROWS, "shuffle": 3, "last_batch": "drop", "device": "cuda:0", **settings}
    return fl.records(data(), record_bytes=RECORD, **settings)


def idle():
    """The usual loop, bound by the GPU: its stream never waits, and the host is never late."""
    import torch

    big = torch.rand(4096, 4096, device="cuda")
    for label, stream in [("default stream", torch.cuda.default_stream()), ("side stream", torch.cuda.Stream())]:
        with torch.cuda.stream(stream):
            it = loader()
            for _ in range(6):
                for _images in it:
                    for _ in range(20):
                        big = (big @ big).clamp_(0, 1)
            torch.cuda.synchronize()
        gpu = it.snapshot()["consumer"]["gpu"]
        for key, meaning in [("starved_ns", "queues, or the floor of `asked → start`"), ("host_late_ns", "busy requests count as dry: see `now → asked`")]:
            fact(f"{key[:-3]}, a GPU-bound loop on the {label}", 100 * gpu[key] / max(1, gpu["span_ns"]), (0, 1), meaning, "%", timing=True)
        fact(f"steps measured on the {label}", f"{gpu['steps']}, {gpu['dry_steps']} dry, unmeasured {gpu['unmeasured']}", None, "")


def graph():
    """PyTorch captures in the global mode while another thread takes batches; then copies into static inputs and replays."""
    import torch
    import feedline.torch as fl

    static = torch.zeros(ROWS, RECORD, dtype=torch.uint8, device="cuda")
    ends, failed = threading.Event(), []

    def pull():
        try:
            it = loader()
            while not ends.is_set():
                for _ in it:
                    pass
        except Exception as error:
            failed.append(repr(error))

    thread = threading.Thread(target=pull)
    thread.start()
    time.sleep(1)
    try:
        for _ in range(20):
            made = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made):
                total = static.sum(dtype=torch.int64)
                time.sleep(0.02)
            made.replay()
        for images in loader():
            fl.copy_into(static, images)
            made.replay()
            torch.cuda.synchronize()
            if total.item() != images.sum(dtype=torch.int64).item():
                failed.append("another sum than that of the batch")
    except Exception as error:
        failed.append(repr(error))
    ends.set()
    thread.join()
    fact("PyTorch's captures beside a loader, replays on its batches", failed[0][:200] if failed else "ok", "ok", "see `beside a capture`", must=True)


def leave():
    """Ends with work on the GPU, a live loader and live tensors, as notebooks and scripts do. Whoever started this says how."""
    import torch

    globals()["kept"], globals()["it"] = [], iter(loader(device_batches=5))
    for _ in range(3):
        kept.append(next(it))
    big = torch.rand(8192, 8192, device="cuda")
    for _ in range(100):
        big = big @ big
    kept[0].sum()
    if os.environ["ORDER"] == "loader":
        del globals()["it"]


def broken():
    """A kernel of the consumer's breaks the context: a typed error, soon, and the process ends."""
    import torch

    began, seen = 0, "no error"
    try:
        for number, _images in enumerate(loader()):
            if number == 3:
                began = time.perf_counter()
                torch.zeros(10, device="cuda")[torch.tensor([1000], device="cuda")]
    except Exception as error:
        seen = f"{type(error).__name__} after {time.perf_counter() - began:.2f} s: {str(error)[:200]}"
    good = time.perf_counter() - began < 1 and ("710" in seen or "device-side assert" in seen)
    fact("a failed assertion in a kernel", seen, "an error that names 710 within 1 s", "the loader does not see a broken context", must=True, good=good)


def jax():
    """Whether late work of JAX reads what a dropped batch held: its compute stream is not the one that it names."""
    import jax
    import jax.numpy as jnp
    import feedline.jax as fj
    import feedline.numpy as fn

    # The read of the batch depends on the long work before it.
    slow = jax.jit(lambda a, b: (b + (jnp.linalg.matrix_power(a, 64).sum() * 0).astype(jnp.uint8)).astype(jnp.int32).sum())
    a, path = jnp.ones((4096, 4096)) / 4096, data()
    settings = {"record_bytes": RECORD, "batch_size": ROWS, "shuffle": 3, "last_batch": "drop"}
    right = [int(batch["record"].astype("int64").sum()) & 0xFFFFFFFF for batch in fn.records(path, device="cpu", **settings)]
    got = []
    for batch in fj.records(path, device="cuda:0", device_batches=2, **settings):
        got.append(slow(a, batch["record"]))
        del batch
    wrong = sum((int(value) & 0xFFFFFFFF) != other for value, other in zip(got, right))
    fact("late work of JAX on dropped batches", f"{wrong} of {len(right)} overwritten" if wrong or len(got) != len(right) else "ok", "ok",
         "JAX frees before its compute stream is done: bind that stream, or hold the batch until a host event", must=True)


def jpeg():
    """Is a decoder on the GPU worth it? nvJPEG through torchvision, and one core of the CPU beside it."""
    import torch
    from torchvision.io import decode_jpeg, encode_jpeg

    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 23, 31), (375, 500), mode="bicubic")[0].clamp(0, 1) * 255
    jpegs = [encode_jpeg((smooth + torch.randn_like(smooth) * 6).clamp(0, 255).byte(), quality=92) for _ in range(256)]
    for what, count, device, expected in [("nvJPEG, batches of 64", 64, "cuda", None), ("nvJPEG, batches of 256", 256, "cuda", (4000, 10_000)),
                                          ("one core", 64, "cpu", None)]:
        done, began = -count, 0
        while done <= 0 or time.perf_counter() - began < 2:
            decode_jpeg(jpegs[:count], device="cuda") if device == "cuda" else list(map(decode_jpeg, jpegs[:count]))
            torch.cuda.synchronize()
            # The first time is for warming up.
            began, done = began or time.perf_counter(), done + count
        rate = done / (time.perf_counter() - began)
        fact(f"pictures of 500 × 375: {what}", rate, expected, "worth it where the free cores decode less", "pictures/s", timing=True)


{part.__name__: part for part in [idle, graph, leave, broken, jax, jpeg]}[sys.argv[1]]()
