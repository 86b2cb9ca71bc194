"""What a forked child may do with what its parent has, and what the parent notices of it.

    forked(work) ── os.fork ──► work() in the child ──► its answer, or where it hung or died

Every attribute of every class is called in the child: a new one that does not say that the process was forked fails here.
"""

import contextlib
import gc
import inspect
import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import typing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import standin
from standin import Taken, alone

import feedline
from feedline import to_numpy
from feedline.errors import ForkedError

try:
    import torch
except ImportError as error:
    torch, without_torch = None, str(error)
else:
    without_torch = ""

needs_torch = pytest.mark.skipif(torch is None, reason=f"torch is missing: {without_torch}")
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
RECORD, COUNT, BATCH = 24576, 400, 8
# Only a child that hangs needs so long.
DEADLINE = 60


# Children


def forked(work):
    """What work(step) gives in a forked child, which calls step(words) before each thing that may hang or crash."""
    out, into = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        # The kernel ends it also where no Python code runs any more.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2 * DEADLINE)

        def say(what, words):
            os.write(into, json.dumps([what, words]).encode() + b"\n")

        try:
            say("end", work(lambda words: say("at", words)))
        except BaseException:
            say("raised", traceback.format_exc())
        finally:
            os._exit(0)
    os.close(into)
    said, until = b"", time.monotonic() + DEADLINE
    with open(out, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0, until - time.monotonic()))[0] and (part := pipe.read(1 << 16)):
            said += part
    if time.monotonic() >= until:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    lines = [json.loads(line) for line in said.splitlines()] or [["at", "the start"]]
    what, words = lines[-1]
    assert what == "end" and status == 0, f"{what} {words}, status {os.waitstatus_to_exitcode(status)}"
    return words


# Every attribute


ARGUMENTS = {
    "set_epoch": (1,),
    "varies": ("record",),
    "lengths": ("record",),
    "set_sample_weights": ([1.0],),
    "picture_sizes": ("sizes",),
    "resume": (b"{}",),
    "load_state_dict": ({},),
    "estimate": (1.0,),
    "bind": (1,),
    "used_on": (1,),
    "skip": (range(1),),
    "__getitem__": (0,),
    "__exit__": (None, None, None),
}
# What answers without a look at the parent's loader.
HARMLESS = {"__repr__", "shape", "dtype", "__dlpack_device__", "end_of_dataloader", "remainder"}
HARMLESS |= {"num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "drop_last", "collate_fn"}
HARMLESS |= {"worker_init_fn", "generator", "multiprocessing_context", "timeout"}
# So that what ends a `with` block in the child gets through.
SILENT = {"__exit__"}
OF_CLASSES = {
    "__module__", "__doc__", "__dict__", "__weakref__", "__new__", "__init__", "__slots__", "__annotations__",
    "__orig_bases__", "__parameters__", "__firstlineno__", "__static_attributes__", "__annotate_func__",
    "__annotations_cache__", "__type_params__", "__class_getitem__",
}  # fmt: skip


def attributes(of):
    """Names of the class's own attributes, but for those that make something new."""
    for name in dir(of):
        owner = next(base for base in type(of).__mro__ if name in vars(base)) if hasattr(type(of), name) else None
        plain = owner in (None, object, dict, typing.Generic) or name in OF_CLASSES
        hidden = name.startswith("_") and not name.endswith("_")
        made = isinstance(inspect.getattr_static(of, name), (classmethod, staticmethod)) and not name.startswith("__")
        if not (plain or hidden or made):
            yield name


def tells(of, name):
    """Calls an attribute; what it did, if that is not to raise the error of forks."""
    try:
        got = getattr(of, name)
        got = got(*ARGUMENTS.get(name, ())) if callable(got) else got
    except ForkedError as error:
        assert isinstance(error, RuntimeError) and error.kind == "forked" and "build the loader in the child" in str(error)
        return None if name not in HARMLESS | SILENT else "raised"
    except TypeError as error:
        told = {"__reduce__": "not pickled", "__getitem__": "a loader is no dataset"}
        return None if name in told and told[name] in str(error) else f"{error!r}: give ARGUMENTS"
    if name in HARMLESS or (name in SILENT and got is None):
        return None
    return f"gave {got!r}"


def raises(ask):
    try:
        ask()
    except ForkedError:
        return True
    return False


def all_tell(things):
    """The work of a child: every attribute of every thing."""

    def work(step):
        wrong = {}
        for of in things:
            for name in attributes(of):
                step(words := f"{type(of).__module__}.{type(of).__name__}.{name}")
                if (did := tells(of, name)) is not None:
                    wrong[words] = did
        return wrong

    return work


@contextlib.contextmanager
def locks_held(things):
    """As if another thread of the parent were inside: all locks that Python code has are taken."""
    locks = [value for of in things for value in getattr(of, "__dict__", {}).values() if hasattr(value, "acquire")]
    with contextlib.ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


def check(things, work=None):
    with locks_held(things):
        assert forked(work or all_tell(things)) == {}


# Data


@pytest.fixture
def records(tmp_path):
    """A file of records, and the bytes as an array [COUNT, RECORD]."""
    data = np.random.default_rng(1).integers(0, 256, (COUNT, RECORD), dtype=np.uint8)
    path = tmp_path / "records.bin"
    data.tofile(path)
    return path, data


def opened(path, kind=feedline.Loader, **settings):
    settings = {"device": "cpu", "record_bytes": RECORD, "batch_size": BATCH, "shuffle": 3, "ids": True, **settings}
    try:
        return kind("records", path, **settings)
    except feedline.errors.UnsupportedError as error:
        pytest.skip(f"no io_uring here: {error}")


def right(batch, data):
    """Whether the rows are those of their ids."""
    batch = {name: np.asarray(array) for name, array in batch.items()}
    return bool(np.array_equal(batch["record"], data[batch["ids"].astype(np.int64)]))


def taken(batch, with_torch):
    return feedline.to_torch(batch) if with_torch else to_numpy(batch)


def rest_is_right(epoch, data, had):
    """The parent goes on: each sample once."""
    seen = list(had)
    for batch in map(to_numpy, epoch):
        assert right(batch, data)
        seen += batch["ids"].tolist()
    assert sorted(seen) == list(range(COUNT))


READERS = ["uring", "pread", "mmap"]


# Calls


@pytest.mark.parametrize("reader", READERS)
def test_each_call_is_told_at_each_moment(records, reader):
    path, data = records
    loader = opened(path, reader=reader, slots=12)
    sampler, later = loader.sampler, iter(loader)
    check([loader, sampler, later])
    batches, samples = loader.batch_sampler, loader.dataset
    item = next(iter(loader.batch_sampler))
    for ask in (lambda: len(batches), lambda: list(batches), lambda: len(samples), lambda: samples.__getitems__(item)):
        check([], lambda _, ask=ask: {} if raises(ask) else {"of a sampler": "gave an answer"})
    epoch = loader.epoch(0)
    native = epoch._native
    check([loader, sampler, later, epoch, native])
    batches = [next(epoch) for _ in range(6)]
    arrays = [to_numpy(batch) for batch in batches[:4]]
    had = [int(number) for batch in arrays for number in batch["ids"]]
    partly = batches[4]
    rows = np.from_dlpack(partly["record"])
    check([loader, sampler, later, epoch, native, *batches, *batches[4].values(), *batches[5].values()])
    for batch in batches[4:]:
        had += np.from_dlpack(batch["ids"]).tolist()
    assert np.array_equal(rows, data[had[32:40]]) and all(right(batch, data) for batch in arrays)
    del batches, partly, rows
    rest_is_right(epoch, data, had)
    check([loader, sampler, later, epoch, native])
    loader.close()
    check([loader, sampler, later, epoch, native])
    rest_is_right(loader.epoch(1), data, [])


def test_functions_of_batches_are_told(records):
    path, data = records
    loader = opened(path)
    epoch = loader.epoch(0)
    batch = next(epoch)

    def work(step):
        for take in [to_numpy] + [feedline.to_torch] * (torch is not None):
            step(take.__name__)
            with pytest.raises(ForkedError):
                take(batch)
        assert "parent process" in repr(batch["record"]) and "parent process" in repr(loader)
        return "told"

    assert forked(work) == "told"
    assert right(to_numpy(batch), data)


@pytest.mark.parametrize("reader", READERS[:2])
def test_no_lock_of_another_thread_is_waited_for(records, reader):
    path, data = records
    loader = opened(path, reader=reader, slots=3)
    now, wrong, stop = [], [], threading.Event()

    def loop():
        while not stop.is_set():
            now[:] = [epoch := iter(loader)]
            for batch in epoch:
                if not right(to_numpy(batch), data):
                    wrong.append("bytes")

    def ask():
        while not stop.is_set():
            loader.report(), loader.snapshot(), loader.trace(), loader.metrics(), loader.bad_samples()

    def guarded(work):
        def run():
            try:
                work()
            except BaseException:
                wrong.append(traceback.format_exc())

        return run

    threads = [threading.Thread(target=guarded(work)) for work in (loop, ask)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(25):
            things = [loader, *now, *(epoch._native for epoch in now if epoch._native is not None)]
            assert forked(all_tell(things)) == {}, turn
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_thread_that_waits_for_a_batch_keeps_no_child(records):
    path, data = records
    loader = opened(path, slots=2, held_deadline=3600)
    epoch = loader.epoch(0)
    held, more = [next(epoch), next(epoch)], []
    # It waits, because every batch is held, and has the locks of the iterator.
    thread = threading.Thread(target=lambda: more.append(next(epoch)))
    thread.start()
    time.sleep(0.3)
    for _ in range(5):
        check([loader, epoch, epoch._native, *held])
    closer = threading.Thread(target=lambda: [loader.report() for _ in range(50)])
    closer.start()
    check([loader, epoch, epoch._native])
    closer.join()
    assert not more
    held.clear()
    thread.join()
    assert right(to_numpy(more[0]), data)


# Memory


@pytest.mark.parametrize("with_torch", [False, pytest.param(True, marks=needs_torch)])
@pytest.mark.parametrize("reader", READERS)
def test_a_child_has_its_own_copy_of_the_arrays(records, reader, with_torch):
    path, data = records
    # Slots of small pages and, of 4 MB and more, of large ones.
    for rows, repeat in [(BATCH, 3), (200, 1)]:
        loader = opened(path, reader=reader, slots=5, batch_size=rows)
        for epoch in range(repeat):
            batches = loader.epoch(epoch)
            held = [taken(next(batches), with_torch) for _ in range(2)]
            had = [int(number) for batch in held for number in batch["ids"]]
            view = held[1]["record"][1:3]
            untaken = next(batches, None)

            def work(step):
                if with_torch:
                    # A child has none of the threads that PyTorch started in other tests, and would wait for them.
                    torch.set_num_threads(1)
                for batch in held:
                    step("read")
                    assert right(batch, data)
                    step("write")
                    batch["record"][:] = 7
                    assert (np.asarray(batch["record"]) == 7).all() and (np.asarray(view) == 7).all() == (batch is held[1])
                step("fork again")
                # The grandchild has no other way than a plain copy.
                child = os.fork()
                if child == 0:
                    os._exit(int(not (np.asarray(view) == 7).all()))
                assert os.waitpid(child, 0)[1] == 0
                step("drop")
                held.clear()
                gc.collect()
                return "right"

            assert forked(work) == "right"
            assert all(right(batch, data) for batch in held)
            if untaken is not None:
                had += to_numpy(untaken)["ids"].tolist()
            del held, view, untaken
            rest_is_right(batches, data, had)


def test_forks_beside_a_loader_that_reads_change_nothing(records):
    path, data = records
    loader = opened(path, slots=6)
    for epoch in range(2):
        held, seen = [], []
        for number, batch in enumerate(map(to_numpy, loader.epoch(epoch))):
            held = [*held[-2:], batch]
            seen += batch["ids"].tolist()
            if number % 5 == 0:
                assert forked(lambda step: [right(batch, data) for batch in held]) == [True] * len(held)
            assert all(right(batch, data) for batch in held)
        assert sorted(seen) == list(range(COUNT))


# The child's own


def everything(loader, epoch=1):
    """The bytes of an epoch."""
    return [{name: np.array(array).tolist() for name, array in to_numpy(batch).items()} for batch in loader.epoch(epoch)]


def png(path):
    import conftest  # noqa: F401 (this file is also run by itself)
    import demo

    pixels = np.random.default_rng(3).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        (path / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        (path / f"{number % 2}" / f"{number}.png").write_bytes(demo.png(picture.tobytes(), 16, 16))
    return path


def loaders(tmp_path):
    """Ways to build a loader."""
    data = np.random.default_rng(1).integers(0, 256, (COUNT, 64), dtype=np.uint8)
    data.tofile(tmp_path / "own.bin")
    pictures = png(tmp_path / "pictures")
    jpegs = tmp_path / "jpegs"
    jpegs.mkdir()
    for name in ["422", "420-large", "progressive-444", "restart"]:
        shutil.copy(FIXTURES / "images" / f"{name}.jpg", jpegs)
    ways = {
        reader: lambda reader=reader: opened(tmp_path / "own.bin", record_bytes=64, reader=reader) for reader in READERS
    }
    ways["pictures"] = lambda: feedline.Loader.images(pictures, size=16, augment=False, shuffle=1, batch_size=5, device="cpu")
    ways["jpegs"] = lambda: feedline.Loader.images(jpegs, size=32, shuffle=1, batch_size=3, device="cpu")
    ways["python"] = lambda: feedline.Loader.dataset(list(range(50)), shuffle=2, device="cpu")
    ways |= {
        path.stem: lambda path=path: feedline.Loader.parquet(path, up_to=64, null_zero=True, device="cpu")
        for path in sorted((FIXTURES / "parquet" / "writers").glob("pyarrow-*v1*.parquet"))[:4]
    }
    return ways


@pytest.mark.filterwarnings("ignore::feedline.PythonCostWarning")
def test_a_child_builds_loaders_of_its_own(tmp_path):
    checked = []
    for name, way in loaders(tmp_path).items():
        try:
            loader = way()
        except (pytest.skip.Exception, feedline.errors.Error) as error:
            print(name, error)
            continue
        expected, epoch = everything(loader), loader.epoch(0)
        batch = next(epoch)

        def work(step):
            for words in ["the first", "another"]:
                step(f"{name}: {words}")
                own = way()
                assert everything(own) == expected
                assert "verdict" in own.report() and own.snapshot()["consumer"]["batches"] > 0
                own.close()
            step("all are dropped")
            del own
            gc.collect()
            return len(expected)

        assert forked(work) == len(expected) > 0
        checked.append(name)
        del batch
        assert sum(1 for _ in epoch) == len(loader) - 1
    assert {"pread", "mmap", "pictures", "jpegs", "python"} < set(checked) and len(checked) >= 8, checked


class Store(BaseHTTPRequestHandler):
    """The bytes of `data`, as an object store gives them."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        start, end, asked = 0, len(self.data), self.headers.get("Range")
        if asked:
            start, end = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            end += 1
        self.send_response(206 if asked else 200)
        self.send_header("ETag", '"1"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.data[start:end])

    def log_message(self, *_):
        pass


def test_a_child_reads_from_a_store_that_its_parent_reads_from(records):
    path, data = records
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Store,), {"data": path.read_bytes()}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/records.bin"
        loader = opened(url)
        epoch = loader.epoch(0)
        had = to_numpy(next(epoch))["ids"].tolist()

        def child(step):
            step("opens")
            own = opened(url)
            step("reads")
            rest_is_right(own.epoch(0), data, [])
            step("forks")
            return forked(lambda step: rest_is_right(opened(url).epoch(0), data, []))

        for _ in range(2):
            assert forked(child) is None
        rest_is_right(epoch, data, had)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@alone
def test_a_child_of_a_loader_on_a_gpu(cuda, folder):
    data = np.random.default_rng(1).integers(0, 256, (COUNT, 48), dtype=np.uint8)
    data.tofile(folder / "records.bin")
    cuda.reset(latency_us=1000)
    settings = {"record_bytes": 48, "shuffle": 3, "ids": True, "batch_size": BATCH}
    loader = feedline.Loader("records", folder / "records.bin", device="cuda:0", **settings)
    epoch = loader.epoch(0)
    first, second = next(epoch), next(epoch)
    on_gpu, ids = Taken(first["record"]), np.from_dlpack(first["ids"])
    expected = ids.tolist()

    things = [loader, loader.sampler, epoch, epoch._native, first, second, *second.values()]

    def work(step):
        # No call of the driver: in the child, it may wait for threads of the parent for ever.
        assert ids.tolist() == expected
        wrong = all_tell(things)(step)
        step("drops")
        on_gpu.drop()
        things.clear()
        gc.collect()
        step("a loader of its own")
        own = feedline.Loader("records", folder / "records.bin", device="cpu", **settings)
        rest_is_right(own.epoch(0), data, [])
        return wrong

    for _ in range(5):
        check(things, work)
    on_gpu.drop()
    things.clear()
    del first, second, ids
    assert sum(1 for _ in epoch) == len(loader) - 2


class Rows:
    """A dataset of torch whose workers are forked."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 40

    def __getitem__(self, index):
        # The parent's memory, as any other of its variables.
        return torch.from_numpy(np.asarray(self.held["record"][index % BATCH]).copy())


@needs_torch
def test_workers_of_torch_beside_a_live_loader(records):
    path, data = records
    loader = opened(path, slots=4)
    epoch = loader.epoch(0)
    first = to_numpy(next(epoch))
    had, expected = first["ids"].tolist(), data[first["ids"].astype(np.int64)]
    workers = torch.utils.data.DataLoader(Rows(first), batch_size=BATCH, num_workers=2, multiprocessing_context="fork", timeout=DEADLINE)
    for rows in workers:
        assert np.array_equal(rows.numpy(), expected)
        had += to_numpy(next(epoch))["ids"].tolist()
    rest_is_right(epoch, data, had)


def in_pool(number):
    loader, path = in_pool.parent
    try:
        return loader.report()
    except ForkedError:
        pass
    return len(everything(opened(path, shuffle=number, ids=False)))


def test_a_pool_of_processes_beside_a_live_loader(records):
    path, data = records
    loader = opened(path)
    epoch = loader.epoch(0)
    had = to_numpy(next(epoch))["ids"].tolist()
    in_pool.parent = (loader, path)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(in_pool, range(4)).get(DEADLINE) == [COUNT // BATCH] * 4
    rest_is_right(epoch, data, had)


# Ends


@pytest.mark.parametrize("end, code", [("pass", 0), ("sys.exit(5)", 5), ("raise KeyError('mine')", 1), ("os._exit(6)", 6)])
@pytest.mark.parametrize("own", [False, True])
def test_a_child_ends_as_it_wants(records, end, code, own):
    path, _ = records
    script = f"""
        import os, sys, threading, warnings
        warnings.simplefilter("ignore")
        import feedline
        make = lambda: feedline.Loader.records({str(path)!r}, record_bytes={RECORD}, device="cpu", map_batch=lambda batch: None)
        loader = make()
        thread = threading.Thread(target=lambda: [None for _ in range(3) for batch in loader])
        thread.start()
        with make() as other, other.epoch(0) as epoch:
            batch = feedline.to_numpy(next(epoch))
            untaken = next(epoch)
            if (child := os.fork()) == 0:
                if {own}:
                    assert len(list(make().epoch(0))) == {-(-COUNT // 32)}
                {end}
                sys.exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        thread.join()
        print(status)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE)
    assert result.stdout.split() == [str(code)], result
    assert ("mine" in result.stderr) == ("mine" in end) and "Forked" not in result.stderr, result.stderr
    assert code == 1 or result.stderr == ""


if __name__ == "__main__":
    standin.main(globals())
