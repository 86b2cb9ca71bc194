"""The package on a GPU, against a stand-in for the driver: no GPU is needed, nor PyTorch.

Each test runs in a process of its own, see standin.py. What a real GPU and PyTorch are needed for is in test_gpu.py.
"""

import faulthandler
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from ctypes import byref, c_size_t, c_uint64
from pathlib import Path

import numpy as np
import pytest

import standin
from standin import Gpu, Taken, alone

import feedline
from feedline import IMAGENET, Loader, to_numpy

import conftest  # noqa: F401 (this file is also run by itself)
import demo

RECORD = 48
COUNT = 100


def raises(kind, words, call):
    """The call fails with this kind of exception, whose message has the words."""
    try:
        call()
    except BaseException as error:
        assert isinstance(error, kind) and words in str(error), f"{type(error)}: {error}"
        return error
    raise AssertionError(f"no {kind.__name__}")


def records(folder):
    data = np.random.default_rng(1).integers(0, 256, (COUNT, RECORD), dtype=np.uint8)
    data.tofile(folder / "records.bin")
    return folder / "records.bin", data


def open_records(path, **settings):
    return Loader("records", path, record_bytes=RECORD, **{"device": "cuda:0", **settings})


def pictures(folder):
    pixels = np.random.default_rng(3).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        place = folder / "pictures" / f"class{number // 2}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(demo.png(picture.tobytes(), 16, 16))
    return folder / "pictures"


# Devices


@alone
def test_devices_are_named_as_pytorch_names_them(cuda, folder):
    cuda.reset(devices=2)
    path, _ = records(folder)
    table = {"cuda": "cuda:0", "cuda:0": "cuda:0", "cuda:1": "cuda:1", "auto": "cuda:0", "cpu": "cpu", "host": "cpu"}
    for words, name in table.items():
        loader = open_records(path, device=words)
        assert loader.device == name
        tensor = next(loader.epoch(0))["record"]
        assert tensor.__dlpack_device__() == ((1, 0) if name == "cpu" else (2, int(name[-1])))
        assert repr(tensor) == f"Tensor(u8 [32, 48]{'' if name == 'cpu' else ' on ' + name})"
        taken = Taken(tensor)
        assert taken.device == tensor.__dlpack_device__()
        taken.drop()
    raises(RuntimeError, "no device cuda:2; the process sees 2", lambda: open_records(path, device="cuda:2"))
    raises(ValueError, 'no device is called "cuda:x"', lambda: open_records(path, device="cuda:x"))


@alone
def test_cuda_is_the_device_of_the_local_rank(cuda, folder):
    cuda.reset(devices=2)
    path, _ = records(folder)
    torchrun = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    lightning = {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4"}
    for variables, name in [({}, "cuda:0"), (torchrun, "cuda:1"), (lightning, "cuda:1"), ({"SLURM_LOCALID": "1"}, "cuda:0")]:
        os.environ.update(variables)
        for words in ["cuda", "auto", "cuda:0"]:
            loader = open_records(path, device=words, shard=(0, 1))
            assert loader.device == ("cuda:0" if words == "cuda:0" else name), (variables, words)
        for variable in variables:
            del os.environ[variable]


@alone
def test_gds_may_be_left_out_but_not_wanted(cuda, folder):
    path, _ = records(folder)
    for gds in ["auto", "off"]:
        assert sum(1 for _ in open_records(path, gds=gds).epoch(0)) == 4
    raises(RuntimeError, "not possible on this machine", lambda: open_records(path, gds="require"))


# Bytes


@alone
def test_the_bytes_on_the_gpu_are_those_of_the_host(cuda, folder):
    path, data = records(folder)
    gpu = Gpu(cuda)
    for batch_size, stream in [(16, None), (7, 1), (100, 2), (33, gpu.stream()[0])]:
        settings = {"batch_size": batch_size, "shuffle": 5, "ids": True}
        expected = [to_numpy(batch) for batch in open_records(path, device="cpu", **settings).epoch(1)]
        got = open_records(path, **settings)
        for batch, host in zip(got.epoch(1), expected, strict=True):
            taken = Taken(batch["record"], stream=stream)
            assert (taken.device, taken.shape, taken.dtype) == ((2, 0), host["record"].shape, (1, 8))
            assert taken.data % 256 == 0 and not taken.read_only
            assert gpu.read(taken.data, taken.bytes, stream or 0) == host["record"].tobytes()
            assert np.array_equal(data[host["ids"].astype(np.int64)], host["record"])
            for name in ["ids", "status"]:
                assert np.array_equal(np.from_dlpack(batch[name]), host[name])
            taken.drop()
        assert "cuda:0 (Stand-in GPU" in got.report()
    gpu.close()


@alone
def test_floats_are_made_on_the_gpu_of_bytes_and_are_those_of_the_host(cuda, folder):
    path = pictures(folder)
    gpu = Gpu(cuda)
    stream, _ = gpu.stream()
    # The code and the bits of DLPack, the size of an element.
    for name, dtype in [("f32", (2, 32)), ("f16", (2, 16)), ("bf16", (4, 16)), (None, (1, 8))]:
        for first in [False, True]:
            settings = {"batch_size": 4, "size": 14, "augment": True, "shuffle": 1, "layout": "nchw" if first else "nhwc"}
            if name is not None:
                settings |= {"dtype": name, "normalize": IMAGENET}
            loader = Loader("images", path, device="cuda:0", **settings)
            since = cuda.now()
            assert loader.spec()[0] == ("image", name or "u8", (3, 14, 14) if first else (14, 14, 3))
            host = Loader("images", path, device="cpu", **settings)
            for batch, expected in zip(loader.epoch(0), host.epoch(0), strict=True):
                taken, expected = Taken(batch["image"], stream=stream), Taken(expected["image"])
                assert (taken.dtype, taken.shape) == (dtype, expected.shape) and expected.dtype == dtype
                wanted = standin.ctypes.string_at(expected.data, expected.bytes)
                assert gpu.read(taken.data, taken.bytes, stream) == wanted
                taken.drop(), expected.drop()
            # Six pictures of 14 x 14 x 3 bytes, their labels, and what lies between the two.
            copied = sum(int(copy[2]) for copy in cuda.calls("cuMemcpyHtoDAsync_v2", since))
            assert 6 * 588 <= copied < 6 * 588 * 2, copied
            assert len(cuda.calls("cuLaunchKernel", since)) == (0 if name is None else 2)
    gpu.close()


@alone
def test_lengths_lie_on_the_gpu_beside_their_field(cuda, folder):
    import tarfile
    from io import BytesIO

    texts = [b"", b"one", b"two words", b"x" * 40]
    with tarfile.open(folder / "shard-0.tar", "w") as tar:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = len(text)
            tar.addfile(member, BytesIO(text))
    gpu = Gpu(cuda)
    loader = Loader("tar", folder / "shard-{0..0}.tar", columns=["txt"], batch_size=4, device="cuda:0")
    (batch,) = loader.epoch(0)
    lengths, rows = Taken(batch["txt.lens"]), Taken(batch["txt"])
    assert lengths.device == rows.device == (2, 0) and lengths.dtype == (1, 64)
    numbers = np.frombuffer(gpu.read(lengths.data, lengths.bytes, 0), np.uint64)
    rows_bytes = np.frombuffer(gpu.read(rows.data, rows.bytes, 0), np.uint8).reshape(rows.shape)
    assert [bytes(row[:length]) for row, length in zip(rows_bytes, numbers)] == texts
    lengths.drop(), rows.drop(), gpu.close()


# Streams


def memory_of(cuda, taken, gpu, stream):
    """The name in the trace of the allocation that a tensor lies in."""
    gpu.read(taken.data, 1, stream)
    return cuda.calls("cuMemcpyDtoDAsync_v2")[-1][1].split("+")[0]


@alone
def test_the_stream_waits_for_the_copy_and_the_memory_for_the_stream(cuda, folder):
    path, _ = records(folder)
    gpu = Gpu(cuda)
    stream, name = gpu.stream()
    loader = open_records(path, batch_size=10)
    epoch = loader.epoch(0)
    batch = next(epoch)
    since = cuda.now()
    taken = Taken(batch["record"], stream=stream)
    # One wait, of this stream, for the event that the copies' stream recorded behind them; the CPU waits for nothing.
    ((waits, event, _),) = [wait for wait in cuda.calls("cuStreamWaitEvent", since) if wait[0] == name]
    ((_, copies),) = [record for record in cuda.calls("cuEventRecord") if record[0] == event]
    assert waits == name and not cuda.calls("cuStreamSynchronize", since) and not cuda.calls("cuEventSynchronize", since)
    memory = memory_of(cuda, taken, gpu, stream)
    assert any(to.startswith(memory) and on == copies for to, _, _, on in cuda.calls("cuMemcpyHtoDAsync_v2"))
    # From the start of the first batch on, the stream's idle time is measured.
    assert len([record for record in cuda.calls("cuEventRecord", since) if record[1] == name]) == 1
    # The struct alone holds the batch now. When it goes, its stream says where it stands.
    since = cuda.now()
    del batch
    assert not [record for record in cuda.calls("cuEventRecord", since) if record[1] == name]
    taken.drop()
    ((event, _),) = [record for record in cuda.calls("cuEventRecord", since) if record[1] == name]
    # The next copy into that memory waits for it.
    for _ in epoch:
        pass
    lines = [line for line in cuda.trace() if f"cuStreamWaitEvent {copies} {event} " in line or f"cuMemcpyHtoDAsync_v2 {memory}+" in line]
    kinds = ["wait" if "WaitEvent" in line else "copy" for line in lines]
    assert kinds[:3] == ["copy", "wait", "copy"], lines
    gpu.close()


@alone
def test_work_that_nobody_waited_for_is_done_before_memory_is_used_again(cuda, folder):
    cuda.reset(latency_us=2000)
    path, data = records(folder)
    gpu = Gpu(cuda)
    stream, _ = gpu.stream()
    loader = open_records(path, batch_size=10, device_batches=2)
    results = []
    for number in range(4):
        for batch in loader.epoch(number):
            taken = Taken(batch["record"], stream=stream)
            results.append((gpu.copy(taken.data, taken.bytes, stream), taken.bytes))
            taken.drop()
            del batch
    got = b"".join(gpu.read(place, length, stream) for place, length in results)
    assert got == data.tobytes() * 4
    gpu.close()


@alone
def test_work_on_a_stream_that_was_not_named_is_found_out_by_the_stand_in(cuda, folder):
    """That the other tests could fail."""
    cuda.reset(latency_us=2000)
    path, _ = records(folder)
    gpu = Gpu(cuda)
    named, _ = gpu.stream()
    other, _ = gpu.stream()
    for settings in [{"stream": named}, {"stream": -1}]:
        before = len(cuda.expect_violations())
        loader = open_records(path, batch_size=10, device_batches=2)
        for batch in loader.epoch(0):
            taken = Taken(batch["record"], **settings)
            gpu.copy(taken.data, taken.bytes, other)
            taken.drop()
            del batch
        assert len(cuda.violations()) > before
        del loader
    gpu.close()


@alone
def test_streams_that_are_bound_are_ordered_like_the_one_that_takes(cuda, folder):
    cuda.reset(latency_us=1000)
    path, data = records(folder)
    gpu = Gpu(cuda)
    always, always_name = gpu.stream()
    side, side_name = gpu.stream()
    taking, _ = gpu.stream()

    class TorchStream:
        cuda_stream = side

    class CudaStream:
        def __cuda_stream__(self):
            return 0, side

    results = []
    binders = [
        lambda batch: batch.bind(side),
        lambda batch: batch.bind(TorchStream()),
        lambda batch: batch.bind(CudaStream()),
        lambda batch: batch["record"].bind(side),
        lambda batch: batch["ids"].bind(side),
    ]
    loader = open_records(path, batch_size=5, device_batches=2, streams=[always], ids=True)
    for batch in loader.epoch(0):
        index = len(results) // 2
        binders[index % len(binders)](batch)
        # Streams are named already, so nobody has to be for this tensor: -1.
        stream = taking if index % 2 else -1
        taken = Taken(batch["record"], stream=stream)
        results += [(gpu.copy(taken.data, taken.bytes, on), on) for on in [always, side]]
        since = cuda.now()
        taken.drop()
        del batch
        recorded = [on for _, on in cuda.calls("cuEventRecord", since)]
        assert always_name in recorded and side_name in recorded and "default" not in recorded
    got = [gpu.read(place, 5 * RECORD, on) for place, on in results]
    assert b"".join(got[::2]) == b"".join(got[1::2]) == data.tobytes()
    gpu.close()


def marked(cuda, name, since):
    """Events on the stream; the loader's own threads record theirs at any time."""
    return [on for _, on in cuda.calls("cuEventRecord", since)].count(name)


class Named:
    """A stream as torch names it."""

    def __init__(self, handle):
        self.cuda_stream = handle


@alone
def test_the_object_of_a_stream_lives_as_long_as_its_batches(cuda, folder):
    path, _ = records(folder)
    gpu = Gpu(cuda)
    objects = [Named(gpu.stream()[0]) for _ in range(2)]
    gone = [weakref.ref(stream) for stream in objects]
    loader = open_records(path, batch_size=10, streams=objects[:1])
    batch = next(loader.epoch(0))
    batch.bind(objects[1])
    taken = Taken(batch["record"], stream=1)
    del objects, loader, batch
    gc.collect()
    assert all(stream() for stream in gone), "a batch is bound to them"
    taken.drop()
    # What threads without the interpreter give up goes at the next call of the package.
    deadline = time.monotonic() + 60
    while any(stream() for stream in gone) and time.monotonic() < deadline:
        feedline._native._bound(0)
        gc.collect()
    assert not any(stream() for stream in gone)
    gpu.close()


@alone
def test_the_end_of_a_step_is_marked_or_unknown(cuda, folder):
    path, _ = records(folder)
    gpu = Gpu(cuda)
    stream, name = gpu.stream()
    for marks in [False, True]:
        loader = open_records(path, batch_size=10)
        for batch in loader.epoch(0):
            taken = Taken(batch["record"], stream=stream)
            gpu.read(taken.data, taken.bytes, stream)
            if marks:
                since = cuda.now()
                loader.mark(stream)
                assert marked(cuda, name, since) == 1
            taken.drop()
            # As late as nobody takes for the jitter of two threads.
            time.sleep(0.01)
        seen = json.loads(loader._snapshot())["consumer"]["gpu"]
        assert seen["steps"] == 9 and seen["dry_steps"] > 0
        assert seen["unmarked_steps"] == (0 if marks else seen["dry_steps"])
        assert ("feedline/host_late_share" in loader.log()) == marks
        assert ("busy, or your code" in loader._repr_html_()) != marks
        del loader
    gpu.close()


@alone
def test_questions_are_answered_while_the_driver_blocks_a_request(cuda, folder):
    path, _ = records(folder)
    gpu = Gpu(cuda)
    stream, _ = gpu.stream()
    loader = open_records(path, batch_size=10)
    epoch = loader.epoch(0)
    Taken(next(epoch)["record"], stream=stream).drop()
    while len(cuda.calls("cuMemcpyHtoDAsync_v2")) < 4:
        time.sleep(0.001)
    cuda.admit("cuEventRecord", cuda.count("cuEventRecord"))
    faulthandler.dump_traceback_later(60, exit=True)
    before = cuda.count("cuEventRecord")
    thread = threading.Thread(target=lambda: next(epoch))
    thread.start()
    while cuda.count("cuEventRecord") == before:
        time.sleep(0.001)
    for question in [loader.report, loader.snapshot, loader.log, loader.metrics, loader.trace, loader.verdict]:
        question()
    faulthandler.cancel_dump_traceback_later()
    cuda.admit("cuEventRecord", 1 << 40)
    thread.join()
    del epoch
    gpu.close()


def torch_on(handle, cuda, full=None):
    """PyTorch as on a GPU whose current stream is this one; `full`: what its allocator frees."""
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.accelerator.current_accelerator = lambda *_, **__: None
    torch.cuda.is_initialized = lambda: full is not None
    torch.cuda.empty_cache = full
    torch.cuda.current_stream = lambda *_: Named(handle)
    torch.from_dlpack = lambda tensor: Taken(tensor, stream=handle or 1)
    return torch


@alone
def test_what_a_prefetcher_takes_is_released_behind_the_default_stream(cuda, folder):
    """TorchRec's way: `next` on a copy stream, for which the default stream waits, with `record_stream`."""
    cuda.reset(latency_us=2000)
    path, data = records(folder)
    gpu = Gpu(cuda)
    copying, _ = gpu.stream()
    torch_on(copying, cuda)
    import feedline.torch as fl

    results = []
    for taken in fl.records(path, record_bytes=RECORD, batch_size=10, device_batches=2, device="cuda:0"):
        gpu.wait(1, copying)
        results.append((gpu.copy(taken.data, taken.bytes, 1), taken.bytes))
        # Work that the stream that took the batch does not wait for.
        taken.drop()
    assert b"".join(gpu.read(place, length, 1) for place, length in results) == data.tobytes()
    gpu.close()


@alone
def test_a_step_of_an_optimizer_marks_the_end_of_a_step(cuda, folder):
    path, _ = records(folder)
    gpu = Gpu(cuda)
    stream, name = gpu.stream()
    torch = torch_on(stream, cuda)
    import feedline.torch as fl

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = fl.records(path, record_bytes=RECORD, batch_size=10, device="cuda:0")
    for taken in loader:
        weight.sum().backward()
        since = cuda.now()
        optimizer.step()
        assert marked(cuda, name, since) == 1
        scheduler.step()
        taken.drop()
    since = cuda.now()
    optimizer.step()
    assert not marked(cuda, name, since), "no epoch is open"
    gpu.close()


@alone
def test_auto_is_the_host_where_torch_has_no_gpu(cuda, folder):
    path, _ = records(folder)
    import torch
    import feedline.torch as fl

    assert not torch.cuda.is_available()
    for device in [{}, {"device": "auto"}]:
        loader = fl.records(path, record_bytes=RECORD, **device)
        assert loader.device == "cpu" and f"torch {torch.__version__} " in loader.report()
    assert fl.records(path, record_bytes=RECORD, device="cuda").device == "cuda:0"
    torch_on(0, cuda)
    assert fl.records(path, record_bytes=RECORD).device == "cuda:0"


@alone
def test_memory_that_torch_keeps_for_itself_is_freed(cuda, folder):
    path, _ = records(folder)
    gpu = Gpu(cuda)
    kept = c_uint64()
    gpu.call("cuMemAlloc_v2", byref(kept), c_size_t((4 << 30) - (1 << 16)))
    import feedline.torch as fl

    settings = {"record_bytes": RECORD, "batch_size": 50, "device_batches": 40, "device": "cuda:0"}
    torch_on(0, cuda)
    raises(feedline.errors.BudgetError, "keep in their caches", lambda: fl.records(path, **settings))
    torch_on(0, cuda, lambda: gpu.call("cuMemFree_v2", kept))
    assert fl.records(path, **settings).device == "cuda:0"


def test_operators_on_streams_that_are_not_bound_are_named():
    """With memory of the host in the place of a batch."""
    import torch
    import feedline.torch as fl

    batch, own, now = torch.ones(8, 4), torch.ones(8, 4), [7]

    class Checked(fl.check_streams):
        def _bound(self, tensor):
            try:
                ours = batch.data_ptr() <= tensor.data_ptr() < batch.data_ptr() + 4 * batch.numel()
            except RuntimeError:
                return None
            return [(7, "takes"), (1, "releases")] if ours else None

        def _stream(self, tensor):
            return now[0]

    def apex(images):
        return images.float().sub_(1).div_(2)

    uses = [apex, lambda x: x[2:4] + 1, lambda x: torch.addmm(own[:, :1], x, own.T[:, :1]), lambda x: own.copy_(x)]
    with Checked():
        for use in uses:
            now[0] = 7
            use(batch.clone())
            use(own)
            now[0] = 9
            view = batch[1:].T.detach()
            assert view.shape == (4, 7), "a view touches no memory"
            error = raises(RuntimeError, "stream 0x9, which is not bound to the batch (bound: stream 0x7 takes, ", lambda: use(batch))
            assert "aten." in str(error)
        now[0] = 1
        batch.sum()
        # Programs that are right: a branch, a whole graph, tensors without memory.
        torch.cond(own.sum() > 0, lambda x: x + 1, lambda x: x - 1, (own,))
        torch.compile(lambda x: x * 2, fullgraph=True)(own)
        torch.export.export(torch.nn.Linear(4, 4), (own,))
        (own.to_sparse() @ own.T).sum()


@alone
def test_the_numbers_of_streams_mean_what_the_standard_says(cuda, folder):
    path, _ = records(folder)
    gpu = Gpu(cuda)
    stream, name = gpu.stream()
    epoch = open_records(path, batch_size=2).epoch(0)
    for number, waiting in [(None, "default"), (1, "default"), (2, "default"), (stream, name)]:
        batch = next(epoch)
        since = cuda.now()
        taken = Taken(batch["record"], stream=number)
        waits = {wait[0] for wait in cuda.calls("cuStreamWaitEvent", since)}
        assert waiting in waits and waits & {"default", name} == {waiting}
        since = cuda.now()
        taken.drop()
        del batch
        assert waiting in [on for _, on in cuda.calls("cuEventRecord", since)]
    tensor = next(epoch)["record"]
    for number in [0, -2]:
        raises(ValueError, f"stream {number} has no meaning", lambda: Taken(tensor, stream=number))
    raises(TypeError, "", lambda: Taken(tensor, stream="1"))
    raises(ValueError, "no CUDA stream", lambda: tensor.bind(-1))
    raises(BufferError, "lies on (2, 0)", lambda: Taken(tensor, dl_device=(1, 0)))
    raises(BufferError, "clone", lambda: Taken(tensor, copy=True))
    # None of that has taken it.
    assert not tensor.taken
    Taken(tensor, stream=stream, dl_device=(2, 0), copy=False).drop()
    assert tensor.taken
    raises(BufferError, "handed over before", lambda: Taken(tensor, stream=stream))
    raises(BufferError, "bind streams before", lambda: tensor.bind(stream))
    gpu.close()


@alone
def test_a_stream_of_another_gpu_is_refused(cuda, folder):
    cuda.reset(devices=2)
    path, _ = records(folder)
    other = Gpu(cuda, 1)
    stream, _ = other.stream()
    batch = next(open_records(path).epoch(0))
    for call in [lambda: Taken(batch["record"], stream=stream), lambda: batch.bind(stream)]:
        raises(BufferError, "another context than cuda:0", call)
    Taken(batch["record"]).drop()
    del batch
    raises(ValueError, "another context than cuda:0", lambda: next(open_records(path, streams=[stream]).epoch(0)))
    other.close()


# Who takes what


@alone
def test_ids_and_status_are_copies_on_the_host(cuda, folder):
    path, _ = records(folder)
    batch = next(open_records(path, batch_size=10, ids=True).epoch(0))
    for name, dtype in [("ids", (1, 64)), ("status", (1, 8))]:
        tensor = batch[name]
        assert tensor.__dlpack_device__() == (1, 0)
        raises(BufferError, "stream must be None", lambda: Taken(tensor, stream=1))
        taken = Taken(tensor)
        assert not taken.read_only and taken.dtype == dtype and taken.device == (1, 0)
        taken.drop()
    array = np.from_dlpack(next(open_records(path, batch_size=10, ids=True).epoch(0))["ids"])
    assert array.tolist() == list(range(10))


@alone
def test_numpy_does_not_take_what_lies_on_a_gpu(cuda, folder):
    path, _ = records(folder)
    batch = next(open_records(path, ids=True).epoch(0))
    error = raises(BufferError, "on cuda:0", lambda: to_numpy(batch))
    assert "'record'" in str(error) and 'device="cpu"' in str(error)
    assert not any(tensor.taken for tensor in batch.values())
    try:
        np.from_dlpack(batch["record"])
    except (BufferError, RuntimeError) as error:
        assert "device" in str(error).lower()
    else:
        raise AssertionError("numpy took it")


@alone
def test_a_legacy_capsule_of_device_memory_is_whole(cuda, folder):
    path, data = records(folder)
    gpu = Gpu(cuda)
    stream, _ = gpu.stream()
    batch = next(open_records(path, batch_size=10).epoch(0))
    taken = Taken(batch["record"], stream=stream, max_version=None)
    assert taken.kind is standin.Legacy and taken.shape == (10, RECORD)
    assert gpu.read(taken.data, taken.bytes, stream) == data[:10].tobytes()
    taken.drop(), gpu.close()


@alone
def test_capsules_that_nobody_takes_and_tensors_give_their_batch_back(cuda, folder):
    path, _ = records(folder)
    gpu = Gpu(cuda)
    stream, name = gpu.stream()
    loader = open_records(path, batch_size=10, device_batches=2, ids=True, held_deadline=60)
    for number, use in enumerate(["nothing", "capsules", "some"]):
        for batch in loader.epoch(number):
            since = cuda.now()
            if use == "capsules":
                capsules = [batch["record"].__dlpack__(stream=stream), batch["ids"].__dlpack__(max_version=(1, 0))]
                del capsules
            elif use == "some":
                Taken(batch["record"], stream=stream).drop()
            del batch
            recorded = [on for _, on in cuda.calls("cuEventRecord", since) if on == name]
            assert bool(recorded) == (use != "nothing")
    gpu.close()


@alone
def test_other_threads_run_while_the_driver_blocks_an_import(cuda, folder):
    path, data = records(folder)
    gpu = Gpu(cuda)
    stream, _ = gpu.stream()
    # One batch, whose copy makes no such call any more.
    batch = next(open_records(path, batch_size=COUNT).epoch(0))
    before = cuda.count("cuStreamWaitEvent")
    cuda.admit("cuStreamWaitEvent", before)

    def release():
        while cuda.count("cuStreamWaitEvent") == before:
            time.sleep(0.001)
        cuda.admit("cuStreamWaitEvent", 1 << 40)

    # Ends the process if the import keeps the interpreter to itself: no other thread can release it.
    faulthandler.dump_traceback_later(60, exit=True)
    thread = threading.Thread(target=release)
    thread.start()
    taken = Taken(batch["record"], stream=stream)
    thread.join()
    faulthandler.cancel_dump_traceback_later()
    assert cuda.count("cuStreamWaitEvent") == before + 1
    assert gpu.read(taken.data, taken.bytes, stream) == data.tobytes()
    taken.drop()
    gpu.close()


@alone
def test_tensors_outlive_their_loader_and_go_on_any_thread(cuda, folder):
    path, data = records(folder)
    gpu = Gpu(cuda)
    stream, _ = gpu.stream()
    loader = open_records(path, batch_size=50, device_batches=4)
    epoch = loader.epoch(0)
    taken = [Taken(batch["record"], stream=stream) for batch in epoch]
    del loader, epoch
    gc.collect()
    assert b"".join(gpu.read(part.data, part.bytes, stream) for part in taken) == data.tobytes()
    threads = [threading.Thread(target=part.drop) for part in taken]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    gpu.close()


@alone
def test_holding_every_batch_names_the_setting_and_passes(cuda, folder):
    path, _ = records(folder)
    epoch = open_records(path, batch_size=10, device_batches=2, held_deadline=0.2).epoch(0)
    held = [next(epoch), next(epoch)]
    assert raises(RuntimeError, "device_batches", lambda: next(epoch)).kind == "every batch is held"
    held.pop()
    assert next(epoch)["record"].shape == (10, RECORD)


@alone
def test_a_gpu_that_breaks_is_an_error_of_next(cuda, folder):
    path, _ = records(folder)
    loader = open_records(path, batch_size=10, device_batches=2)
    epoch = loader.epoch(0)
    batch = next(epoch)
    # The copies that two batches of device memory allow: the next one waits for the drop, and fails.
    while len(cuda.calls("cuMemcpyHtoDAsync_v2")) < 2:
        time.sleep(0.001)
    cuda.fail("cuMemcpyHtoDAsync_v2", 2)
    Taken(batch["record"]).drop()
    del batch
    error = raises(RuntimeError, "cuMemcpyHtoDAsync", lambda: list(epoch))
    assert error.kind and "CUDA_ERROR_OUT_OF_MEMORY" in str(error)
    # The next epoch is whole.
    assert sum(1 for _ in loader.epoch(1)) == 10


# Ends of the process


@pytest.mark.parametrize("hung", ["answers", "hung"])
@pytest.mark.parametrize("how", ["falls off", "cycle", "exit", "at once", "raise", "fork"])
def test_a_process_may_end_with_anything_alive(tmp_path, how, hung):
    orders = itertools.permutations("lebt") if how == "falls off" else ["lebt", "tbel"]
    code = {"exit": 3, "at once": 3, "raise": 1}.get(how, 0)
    script = Path(__file__).resolve().parent / "leaving.py"
    for order in orders:
        command = [sys.executable, script, tmp_path, *standin.libraries(), "".join(order), how, hung]
        ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
        assert ended.returncode == code, (order, ended.stdout[-5000:] + ended.stderr)
        assert "panicked" not in ended.stderr, (order, ended.stderr)


if __name__ == "__main__":
    standin.main(globals())
