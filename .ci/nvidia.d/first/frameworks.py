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


def sums(**settings):
    """Of each batch of an epoch, by the host."""
    import feedline.numpy as fn

    settings = {"record_bytes": RECORD, "batch_size": ROWS, "shuffle": 3, "last_batch": "drop", **settings}
    return [int(batch["record"].astype("int64").sum()) for batch in fn.records(data(), device="cpu", **settings)]


def metered(it):
    """What the loader's report says of the GPU: percent starved, percent by the host (None: unknown), and all of it."""
    gpu = it.snapshot()["consumer"]["gpu"]
    share = lambda ns: 100 * ns / max(1, gpu["span_ns"])
    return share(gpu["starved_ns"]), None if gpu["unmarked_steps"] * 100 > gpu["steps"] else share(gpu["late_ns"]), gpu


def idle():
    """The usual loop, bound by the GPU: its stream never waits, and the host is never late."""
    import torch

    big, side = torch.rand(4096, 4096, device="cuda"), torch.cuda.Stream()
    for label, stream, settings in [("on the default stream", torch.cuda.default_stream(), {}), ("on a side stream", side, {}),
                                    ("on the default stream, streams=[side]", torch.cuda.default_stream(), {"streams": [torch.cuda.Stream()]})]:
        with torch.cuda.stream(stream):
            it = loader(**settings)
            for _ in range(6):
                for _images in it:
                    for _ in range(20):
                        big = (big @ big).clamp_(0, 1)
            torch.cuda.synchronize()
        starved, late, gpu = metered(it)
        meaning = "100: the declared stream is measured, not the one that takes" if settings else "queues, or the floor of `asked → start`"
        fact(f"starved, a GPU-bound loop {label}", starved, (0, 1), meaning, "%", timing=True)
        fact(f"host late, a GPU-bound loop {label}", late, (0, 1), "busy requests count as dry: see `now → asked`", "%", timing=True)
        fact(f"steps measured {label}", f"{gpu['steps']}, {gpu['dry_steps']} dry, unmeasured {gpu['unmeasured']}", None, "")


def late():
    """A loop that waits for the GPU in each step, then takes its time; and an evaluation between two steps of such a loop."""
    import torch

    big, weight = torch.rand(4096, 4096, device="cuda"), torch.nn.Parameter(torch.zeros(1, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def run(marks, epochs=3, matmuls=20, evaluate=0):
        """The loader, and what it should say of the host in percent: by PyTorch's events around the work."""
        nonlocal big
        it, idle_ms, span_ms = loader(), 0.0, 0.0
        for _ in range(epochs):
            batches, steps = iter(it), []
            while True:
                asked, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                asked.record()
                images = next(batches, None)
                if images is None:
                    break
                begin.record()
                for _ in range(matmuls):
                    big = (big @ big).clamp_(0, 1)
                weight.grad = big[:1, 0] * 0
                if marks:
                    optimizer.step()
                end.record()
                big[0, 0].item()
                steps.append((asked, begin, end))
                if evaluate and len(steps) == 12:
                    until = time.perf_counter() + evaluate
                    while time.perf_counter() < until:
                        big = (big @ big).clamp_(0, 1)
                        torch.cuda.synchronize()
                time.sleep(0.01)
            idle_ms += sum(before[2].elapsed_time(step[0]) for before, step in zip(steps, steps[1:]))
            span_ms += steps[0][1].elapsed_time(steps[-1][1])
        return it, 100 * idle_ms / span_ms

    it, _ = run(False)
    _, told, gpu = metered(it)
    fact("host late, a loop that waits each step, no optimizer", "unknown" if told is None else f"{told:.1f} %", "unknown",
         f"a share nobody can know is told: {gpu['dry_steps']} of {gpu['steps']} steps were dry, {gpu['unmarked_steps']} without a mark", must=True)
    it, truth = run(True)
    _, told, gpu = metered(it)
    fact("… with an optimizer, by PyTorch's events", truth, None, "", "%", timing=True)
    fact("… what the report says, less that", None if told is None else told - truth, (-2, 2),
         f"near 100 in all: the mark does not count; unknown: {gpu['unmarked_steps']} of {gpu['steps']} steps have no mark", "%", timing=True)
    it, _ = run(True, 1, 5, evaluate=5)
    _, _, gpu = metered(it)
    fact("an evaluation of 5 s inside an epoch: pauses", gpu["unmeasured"]["pauses"], 1, "it is a step, and dilutes all shares", must=True)
    fact("… the span that is measured", gpu["span_ns"] / 1e9, (None, 4.9), "it holds the evaluation", "s", timing=True)


def prefetch():
    """Two known prefetchers, with as few batches on the GPU as can be; and what check_streams says of them."""
    import torch
    import feedline.torch as fl

    right, big, side = sums(), torch.rand(4096, 4096, device="cuda"), torch.cuda.Stream()

    # As TorchRec's pipelines: taken on a side stream, used on the default one, with record_stream.
    batches, got = iter(loader(device_batches=2)), []

    def take():
        with torch.cuda.stream(side):
            return next(batches, None)

    following = take()
    while (images := following) is not None:
        torch.cuda.current_stream().wait_stream(side)
        images.record_stream(torch.cuda.current_stream())
        for _ in range(10):
            big = (big @ big).clamp_(0, 1)
        got.append(images.sum(dtype=torch.int64))
        following = take()
        del images
    wrong = sum(value.item() != other for value, other in zip(got, right, strict=True))
    fact("a prefetcher that takes on a side stream, the step on the default one", f"{wrong} of {len(right)} wrong" if wrong else "ok",
         "ok", "the default stream is not released: rows of later batches", must=True)

    class data_prefetcher:
        """Of apex's examples/imagenet, as it is, but for the numbers of `mean` and `std`."""

        def __init__(self, loader):
            self.loader = iter(loader)
            self.stream = torch.cuda.Stream()
            self.mean = torch.tensor([0.0, 0.0, 0.0]).cuda().view(1, 3, 1, 1)
            self.std = torch.tensor([1.0, 1.0, 1.0]).cuda().view(1, 3, 1, 1)
            self.preload()

        def preload(self):
            try:
                self.next_input, self.next_target = next(self.loader)
            except StopIteration:
                self.next_input = None
                self.next_target = None
                return
            with torch.cuda.stream(self.stream):
                self.next_input = self.next_input.cuda(non_blocking=True)
                self.next_target = self.next_target.cuda(non_blocking=True)
                self.next_input = self.next_input.float()
                self.next_input = self.next_input.sub_(self.mean).div_(self.std)

        def next(self):
            torch.cuda.current_stream().wait_stream(self.stream)
            input = self.next_input
            target = self.next_target
            if input is not None:
                input.record_stream(torch.cuda.current_stream())
            if target is not None:
                target.record_stream(torch.cuda.current_stream())
            self.preload()
            return input, target

    def pulled():
        """How many batches are wrong, by that class. Its targets are numbers of the batches."""
        pairs = zip((images.view(ROWS, 3, 224, 224) for images in iter(loader(device_batches=2))), map(torch.tensor, range(len(right))))
        fetcher, got = data_prefetcher(pairs), []
        images, number = fetcher.next()
        while images is not None:
            got.append((images.sum(dtype=torch.float64), number))
            images, number = fetcher.next()
        return sum(value.item() != right[number.item()] for value, number in got)

    fact("apex's data_prefetcher: wrong batches", f"{pulled()} of {len(right)}", None,
         "0: copies end before its side stream begins; switching/pytorch.md says to take it out in any case")
    for what, call, right_loop in [("apex's data_prefetcher", pulled, False), ("the usual loop", lambda: [images.float() for images in loader()], True)]:
        try:
            with fl.check_streams():
                call()
            said = "ok"
        except RuntimeError as error:
            said = str(error)[:240]
        fact(f"check_streams says of {what}", said, "ok" if right_loop else "that a stream is not bound",
             "the check misses what it is for, or is wrong about a right loop", must=True, good=said == "ok" if right_loop else "not bound" in said)


def notebook():
    """A second run in one process: PyTorch keeps the memory of the first."""
    import torch

    held, size = [], 1 << 30
    while size >= 16 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            size //= 2
    del held
    free, _ = torch.cuda.mem_get_info()
    try:
        it = loader(batch_size=512, device_batches=4)
        said = "built" if sum(1 for _ in it) == COUNT // 512 else "another number of batches"
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
    fact(f"a loader of 0.3 GB on a GPU with {free / 1e9:.2f} GB free, the rest freed by PyTorch", said, "built",
         "`torch.cuda.empty_cache()` is not called, or does not help", must=True)


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
    from feedline.errors import ConfigError

    client = os.environ.get("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "default")
    # The read of the batch depends on the long work before it.
    slow = jax.jit(lambda a, b: (b + (jnp.linalg.matrix_power(a, 64).sum() * 0).astype(jnp.uint8)).astype(jnp.int32).sum())
    a, right, got = jnp.ones((4096, 4096)) / 4096, [value & 0xFFFFFFFF for value in sums()], []
    try:
        it = fj.records(data(), record_bytes=RECORD, batch_size=ROWS, shuffle=3, last_batch="drop", device="cuda:0", device_batches=2)
        for batch in it:
            got.append(slow(a, batch["record"]))
            del batch
        wrong = sum((int(value) & 0xFFFFFFFF) != other for value, other in zip(got, right, strict=True))
        said, safe = f"{wrong} of {len(right)} overwritten" if wrong else "ok", not wrong
    except ConfigError as refused:
        said, safe = f"refused: {str(refused)[:200]}", True
    fact(f"late work of JAX on dropped batches, TFRT client: {client}", said, "ok", "overwritten: JAX frees before its compute stream is done, and that stream"
         " is not bound. Refused: safe, but no path to the GPU", must=not safe, good=said == "ok")


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


{part.__name__: part for part in [idle, late, graph, prefetch, notebook, leave, broken, jax, jpeg]}[sys.argv[1]]()
