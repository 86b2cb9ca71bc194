"""The package with JAX: 8 devices of its CPU backend, and the stand-in's GPU where streams matter. No GPU is needed."""

import contextlib
import ctypes
import itertools
import json
import os
import socket
import subprocess
import sys
import warnings
from ctypes import byref, c_char_p, c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import pytest

import standin
from standin import PYTHON, Gpu, Taken, alone

jax = pytest.importorskip("jax")
import feedline  # noqa: E402
import feedline.jax as fj  # noqa: E402
import feedline.numpy as fn  # noqa: E402
from feedline import _native  # noqa: E402
from feedline.errors import ConfigError, Error  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding  # noqa: E402

RECORD, COUNT, BATCH = 48, 100, 16


def records(folder):
    path = folder / "records.bin"
    if not path.exists():
        np.random.default_rng(1).integers(0, 256, (COUNT, RECORD), dtype=np.uint8).tofile(path)
    return path


def opened(folder, package=fj, **settings):
    return package.records(records(folder), **{"record_bytes": RECORD, "global_batch": BATCH, "shuffle": 5, **settings})


def on_eight(test):
    """Runs test(folder) in a process whose JAX has 8 devices."""

    def run(tmp_path):
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, test.__name__, str(tmp_path)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | flags)
        assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-10000:]

    run.__name__, run.test = test.__name__, test
    return run


def mesh(*shape):
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], devices=jax.devices()[: int(np.prod(shape))])


def arrays(batches):
    return [{name: np.asarray(array) for name, array in batch.items()} for batch in batches]


def same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


# The stream


XLA = r"""
#include <string.h>
#include "xla/ffi/api/c_api.h"
static void *stream;
static char said[200];
static XLA_FFI_Error *create(XLA_FFI_Error_Create_Args *args) {
    strncpy(said, args->message, sizeof said - 1);
    return args->struct_size == XLA_FFI_Error_Create_Args_STRUCT_SIZE ? (XLA_FFI_Error *)said : NULL;
}
static XLA_FFI_Error *get(XLA_FFI_Stream_Get_Args *args) {
    args->stream = stream;
    strcpy(said, "its own");
    return args->struct_size == XLA_FFI_Stream_Get_Args_STRUCT_SIZE && args->ctx == (void *)&stream ? NULL : (XLA_FFI_Error *)said;
}
/* Calls the handler as XLA does: what it refused, or "". */
const char *call(XLA_FFI_Handler *handler, const char *attribute, int64_t device, void *handle, int context, int missing, int *minor) {
    XLA_FFI_Api api = {XLA_FFI_Api_STRUCT_SIZE, NULL, {XLA_FFI_Api_Version_STRUCT_SIZE, NULL, 0, 42}};
    api.XLA_FFI_Error_Create = create, api.XLA_FFI_Stream_Get = get;
    XLA_FFI_Metadata metadata = {XLA_FFI_Metadata_STRUCT_SIZE};
    XLA_FFI_Metadata_Extension extension = {{XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata}, &metadata};
    XLA_FFI_Extension_Base other = {XLA_FFI_Extension_Base_STRUCT_SIZE, 77, &extension.extension_base};
    XLA_FFI_CallFrame asked = {XLA_FFI_CallFrame_STRUCT_SIZE, &other, &api};
    *minor = handler(&asked) ? -1 : metadata.api_version.minor_version;
    XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_STRING, XLA_FFI_AttrType_SCALAR};
    XLA_FFI_ByteSpan first = {"a", 1}, second = {attribute, strlen(attribute)};
    XLA_FFI_ByteSpan *names[] = {&first, &second};
    XLA_FFI_Scalar scalar = {XLA_FFI_DataType_S64, &device};
    void *values[] = {&first, &scalar};
    stream = handle;
    XLA_FFI_CallFrame frame = {XLA_FFI_CallFrame_STRUCT_SIZE - missing, NULL, &api, (void *)(context ? &stream : NULL), XLA_FFI_ExecutionStage_EXECUTE};
    frame.attrs = (XLA_FFI_Attrs){XLA_FFI_Attrs_STRUCT_SIZE, NULL, 2, types, names, values};
    return handler(&frame) ? said : "";
}
"""


def test_the_handler_tells_the_stream_to_a_caller_with_the_header_of_xla(tmp_path):
    (tmp_path / "xla.c").write_text(XLA)
    command = ["cc", "-shared", "-fPIC", "-I", jax.ffi.include_dir(), "-o", tmp_path / "xla.so", tmp_path / "xla.c"]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(tmp_path / "xla.so"))
    library.call.restype, minor = c_char_p, ctypes.c_int()
    PYTHON.PyCapsule_GetPointer.argtypes = [ctypes.py_object, c_char_p]
    handler = PYTHON.PyCapsule_GetPointer(_native._xla_handler(), b"xla._CUSTOM_CALL_TARGET")

    def call(name, device, handle, context=1, missing=0):
        said = library.call(c_void_p(handler), name, c_int64(device), c_void_p(handle), context, missing, byref(minor))
        return said.decode(), _native._xla_stream(device)

    assert call(b"device", 101, 0x7F00_1234_5678) == ("", 0x7F00_1234_5678) and minor.value == 42
    assert call(b"device", 102, 0xABC) == ("", 0xABC) and _native._xla_stream(101) == 0x7F00_1234_5678
    assert call(b"device", 103, 0) == ("feedline: XLA names no stream", None)
    assert call(b"devices", 104, 0xABC) == ("feedline: the call has no attribute `device` of 64 bits", None)
    assert call(b"device", 105, 0xABC, context=0) == ("its own", None)
    said, stream = call(b"device", 106, 0xABC, missing=64)
    assert "of an older XLA" in said and stream is None


def test_jax_without_a_stream_is_refused_with_what_works():
    """XLA itself registers and calls the handler: its CPU backend has no stream."""
    for _ in range(2):
        with pytest.raises(ConfigError, match=r'is not known \(\w+: .*not available.*\): give device="cpu" and use jax.device_put'):
            fj._compute_stream(jax.devices("cpu")[0])


@alone
def test_a_gpu_is_taken_where_jax_computes_on_it_alone(cuda, folder):
    loader = opened(folder)
    assert loader.device == "cpu"
    why = f"auto: jax {jax.__version__} computes on {jax.devices()[0]}"
    assert why in loader.report() and why not in opened(folder, device="cpu").report()
    for device, words in [("cuda", "install a jax for CUDA"), ("cuda:0", "uses no CUDA"), (0, "uses no CUDA")]:
        with pytest.raises(ConfigError, match=words):
            opened(folder, device=device)
    with pytest.raises(ConfigError, match="uses no CUDA"):
        feedline.to_jax(next(opened(folder, feedline.Loader, device="cuda:0").epoch(0)))


@alone
def test_work_on_the_stream_that_jax_computes_on_is_ordered_with_the_copies(cuda, folder):
    cuda.reset(latency_us=2000)
    gpu = Gpu(cuda)
    events, _ = gpu.stream()
    computes, _ = gpu.stream()
    copies = []

    def as_xla(tensor):
        """As XLA's GPU client: names a stream for events alone, and drops the struct once the work is enqueued on another."""
        taken, event = Taken(tensor, stream=events), c_uint64()
        gpu.call("cuEventCreate", byref(event), 2)
        gpu.call("cuEventRecord", event, c_uint64(events))
        gpu.call("cuStreamWaitEvent", c_uint64(computes), event, 0)
        gpu.call("cuEventDestroy_v2", event)
        copies.append((gpu.copy(taken.data, taken.bytes, computes), taken.bytes))
        taken.drop()

    jax.dlpack.from_dlpack = as_xla
    right = b"".join(batch["record"].tobytes() for batch in opened(folder, fn))
    for bound, fine in [(computes, True), (events, False)]:
        fj._stream = lambda ordinal: bound
        before = len(cuda.expect_violations())
        loader = opened(folder, device="cuda:0", device_batches=2)
        for _ in loader:
            pass
        assert (len(cuda.violations()) == before) == fine
        got = b"".join(gpu.read(data, length, computes) for data, length in copies)
        assert got == right or not fine
        copies.clear()
        del loader
    gpu.close()


@alone
def test_each_block_is_copied_to_the_gpu_of_its_devices(cuda, folder):
    cuda.reset(devices=2, latency_us=500)
    jax.config.update("jax_num_cpu_devices", 4)
    gpus = [Gpu(cuda, number) for number in range(2)]
    computes, real, used = [gpu.stream()[0] for gpu in gpus], jax.dlpack.from_dlpack, []

    def to_the_host(tensor):
        kind, number = tensor.__dlpack_device__()
        if kind == 1:
            return real(tensor)
        taken = Taken(tensor, stream=computes[number])
        data = gpus[number].read(taken.data, taken.bytes, computes[number])
        taken.drop()
        used.append(number)
        return real(np.frombuffer(data, np.uint8).reshape(taken.shape).copy())

    jax.dlpack.from_dlpack, fj._stream = to_the_host, computes.__getitem__
    fj._cuda = lambda device: f"cuda:{device.id // 2}"
    sharding = NamedSharding(mesh(2, 2), P("data"))
    loader = opened(folder, sharding=sharding, ids=True, last_batch="drop")
    got, right = list(loader), opened(folder, fn, last_batch="drop", ids=True)
    same([{"record": batch["record"]} for batch in arrays(got)], [{"record": batch["record"]} for batch in right])
    assert sorted(set(used)) == [0, 1] and len(used) == 12 and loader.device == "cuda:0"
    [gpu.close() for gpu in gpus]


# Several devices


@on_eight
def test_rows_of_all_devices_are_those_of_one(folder):
    for spec, shape in [(P("data"), (8,)), (P("data"), (4, 2)), (P("model"), (4, 2)), (P("data", "model"), (4, 2)), (P(), (8,)),
                        (P(None, "data"), (8,)), (P(("data", "model")), (2, 4)), (P("data"), (1,))]:
        sharding = NamedSharding(mesh(*shape), spec)
        for last, set_mesh in [("drop", contextlib.nullcontext), ("pad", lambda: jax.set_mesh(sharding.mesh))]:
            loader = opened(folder, sharding=sharding, last_batch=last, ids=True)
            with set_mesh():
                got, right = list(loader), opened(folder, fn, last_batch=last, ids=True)
            assert len(loader) == len(right) == len(got) and loader.samples_per_epoch == right.samples_per_epoch
            same(arrays(got), [batch | {"ids": batch["ids"].astype(np.uint32)} for batch in map(dict, right)])
            assert got[0]["record"].sharding == sharding and got[0]["ids"].sharding.spec == P(*spec[:1])
            for shard in got[0]["record"].addressable_shards:
                assert np.array_equal(shard.data, np.asarray(got[0]["record"])[shard.index])
    one = opened(folder, sharding=SingleDeviceSharding(jax.devices()[3]))
    assert {array.device for batch in one for array in batch.values()} == {jax.devices()[3]}
    assert len(one) == 7


@on_eight
def test_other_weights_reach_the_loaders_of_all_devices(folder):
    weights = np.arange(1.0, COUNT + 1)
    loader = opened(folder, sharding=NamedSharding(mesh(8), P("data")), sample_weights=[1.0] * COUNT, last_batch="drop")
    first = arrays(loader.epoch(0))
    loader.set_sample_weights(weights)
    right = opened(folder, fn, sample_weights=weights, last_batch="drop")
    same(arrays(loader.epoch(1)), arrays(right.epoch(1)))
    before = opened(folder, fn, sample_weights=[1.0] * COUNT, last_batch="drop")
    same(first, arrays(before.epoch(0)))


@on_eight
def test_a_short_last_batch_is_padded_and_marked(folder):
    sharding = NamedSharding(mesh(8), P("data"))
    assert [len(batch["record"]) for batch in opened(folder, sharding=sharding)] == [BATCH] * 7
    for last, rows in [("keep", 8), ("mask", BATCH)]:
        with pytest.raises(ConfigError, match="last_batch"):
            opened(folder, sharding=sharding, last_batch=last)
        *_, batch = opened(folder, sharding=sharding, last_batch=last, ids=True)
        assert batch["record"].shape == (rows, RECORD)
        assert np.array_equal(np.asarray(batch["status"]), [0] * 4 + [1] * (rows - 4))
        assert (np.asarray(batch["ids"])[4:] == 2**32 - 1).all()


@on_eight
def test_a_run_goes_on_with_other_devices(folder):
    right, got = arrays(opened(folder, fn, last_batch="pad")), []
    eight, one = NamedSharding(mesh(8), P("data")), SingleDeviceSharding(jax.devices()[0])
    state = opened(folder, last_batch="pad").state_dict()
    for sharding in [{}, {"sharding": eight}, {"sharding": one}, {"sharding": NamedSharding(mesh(4, 2), P("data"))}]:
        loader = opened(folder, last_batch="pad", **sharding)
        loader.load_state_dict(json.loads(json.dumps(state)))
        got += arrays(itertools.islice(loader, 2 if sharding else 1))
        state = loader.state_dict()
    same(got, right)
    loader = opened(folder, last_batch="pad", sharding=eight)
    loader.skip(range(1, 3))
    same(arrays(loader), [right[0], *right[3:]])
    loader.load_state_dict(opened(folder, last_batch="pad").state_dict())
    assert len(list(loader)) == len(loader) == 7 and loader.next_epoch == 1


def interrupt(epoch, number):
    """A wait for a batch that Ctrl-C ends while the loader of this number is waited for."""

    class Interrupted:
        def __next__(self):
            raise KeyboardInterrupt

        def __len__(self):
            return len(real)

    epochs = epoch._opened()._epochs
    real, epochs[number] = epochs[number], Interrupted()
    with pytest.raises(KeyboardInterrupt):
        next(epoch)
    epochs[number] = real
    # The class is garbage in a circle, and must not keep the epoch open.
    real = None


@on_eight
def test_whatever_ends_a_loop_all_loaders_stand_at_one_place(folder):
    tokens = np.arange(COUNT, dtype=np.int64)
    np.save(folder / "rows.npy", tokens)
    settings = {"rows": True, "global_batch": 8, "sharding": NamedSharding(mesh(8), P("data")), "last_batch": "drop"}

    def rows(epoch):
        first, *rest = np.asarray(next(epoch)["array"]).tolist()
        assert rest == list(range(first + 1, first + 8))
        return first

    loader = fj.npy(folder / "rows.npy", **settings)
    epoch = iter(loader)
    interrupt(epoch, 4)
    assert [rows(epoch), rows(epoch)] == [0, 8]
    interrupt(epoch, 7)
    state = loader.state_dict()
    assert state["batch"] == 2 and rows(epoch) == 16
    loader.close()
    with pytest.raises(RuntimeError, match="ended by close"):
        next(epoch)
    loader.load_state_dict(state)
    interrupt(iter(loader), 5)
    assert rows(loader.epoch(0)) == 16 and rows(iter(loader)) == 0
    # A signal behind the call that hands a block's batch out: what follows must not be rows of several batches.
    for number in [0, 3, 7]:
        epoch = iter(loader)
        next(epoch)
        next(epoch._opened()._epochs[number])
        with pytest.raises(RuntimeError, match="an interruption came while a batch was handed out"):
            next(epoch)
    tokens[42] = 2**40
    np.save(folder / "wide.npy", tokens)
    loader = fj.npy(folder / "wide.npy", **settings)
    epoch, got = iter(loader), []
    with pytest.raises(Error, match=r"`array` has 1099511627776, which 32 bits do not hold") as error:
        for batch in epoch:
            got.append(batch)
    assert "sample=42" in str(error.value) and len(got) == 5 == loader.state_dict()["batch"]
    with pytest.raises(RuntimeError, match="ended by an error"):
        next(epoch)
    loader.skip(range(5, 6), epoch=1)
    assert len(list(loader.epoch(1))) == 11
    # All devices are of this process, so that a request to stop ends the loop.
    loader = fj.npy(folder / "rows.npy", stop_on_signals=True, **settings)
    assert [loader._request_stop() for _ in loader] == [None] and list(loader) == []
    # Others stand in, and are told of whichever loader met them.
    loader = fj.npy(folder / "wide.npy", substitute=1, **settings)
    assert len(list(loader)) == 12 and [bad["sample"] for bad in loader.bad_samples()] == [42]
    assert loader.report().startswith("8 loaders, one for each block of rows; that of block ")
    assert loader.log()["feedline/bad_samples"] == 1 and loader.verdict()["headline"]


def half(folder):
    """Of the test below, with 4 of 8 devices."""
    number = int(os.environ["HALF"])
    jax.distributed.initialize(os.environ["PLACE"], 2, number)
    right = arrays(opened(folder, fn, last_batch="pad"))
    for spec, shard in [(P("data"), (4 * number, 8)), (P(), (0, 1))]:
        loader = opened(folder, sharding=NamedSharding(jax.make_mesh((8,), ("data",)), spec), last_batch="pad")
        assert loader.shard == shard
        for batch, whole in zip(loader, right, strict=True):
            shards = batch["record"].addressable_shards
            assert len(shards) == 4 and batch["record"].shape == (BATCH, RECORD)
            assert all(np.array_equal(part.data, whole["record"][part.index]) for part in shards)


def test_each_process_has_the_rows_of_its_devices(tmp_path):
    records(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PLACE": place}
    command = [sys.executable, __file__, "half", str(tmp_path)]
    halves = [subprocess.Popen(command, env=os.environ | variables | {"HALF": str(number)}) for number in range(2)]
    assert [half.wait(timeout=300) for half in halves] == [0, 0]


@on_eight
def test_one_budget_and_one_dataset_serve_all_loaders(folder):
    sharding = NamedSharding(mesh(8), P("data"))
    tight = {"sharding": sharding, "workers": 8, "memory_budget": 64 << 20, "in_memory": True}
    same(arrays(opened(folder, **tight)), arrays(opened(folder, fn, last_batch="pad")))
    with pytest.raises(Error, match="for 8 loaders"):
        opened(folder, **{**tight, "memory_budget": 64 << 10})


@on_eight
def test_what_a_sharding_excludes_is_named(folder):
    sharding = NamedSharding(mesh(8), P("data"))
    for settings, words in [
        ({"global_batch": 12}, "cuts batches into 8 blocks: give a multiple"),
        ({"shard": (0, 2)}, "the sharding says which rows"),
        ({"shard": None}, "the sharding says which rows"),
        ({"ragged": ["record"]}, "not equal parts of an array"),
        ({"device": "cuda:0"}, "the sharding already names the devices"),
    ]:
        with pytest.raises(ConfigError, match=words):
            opened(folder, sharding=sharding, **settings)
    for name in ("global_batch", "workers"):
        with pytest.raises(TypeError, match=f"{name} '8': give a whole number"):
            opened(folder, sharding=sharding, **{name: "8"})
    with pytest.raises(TypeError, match="give a jax.sharding.Sharding"):
        opened(folder, sharding=P("data"))
    with pytest.raises(TypeError, match="no setting 'sharding'"):
        opened(folder, fn, sharding=sharding)


@on_eight
def test_a_child_has_none_of_the_loaders(folder):
    loader = opened(folder, sharding=NamedSharding(mesh(8), P("data")))
    epoch = iter(loader)
    next(epoch)
    warnings.simplefilter("ignore")
    if (child := os.fork()) == 0:
        failed = 0
        for call in [lambda: next(epoch), loader.report, loader.close, lambda: loader.resume(b"")]:
            try:
                call()
            except RuntimeError as error:
                failed += error.kind == "forked"
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert len(list(epoch)) == 6


# Numbers


def test_labels_and_tokens_have_the_bits_of_jax(tmp_path):
    import conftest  # noqa: F401 (this file is also run by itself)
    import demo

    demo.write(tmp_path / "pictures", per_class=3)
    (tmp_path / "rows").mkdir()
    np.save(tmp_path / "rows" / "a.npy", np.arange(20, dtype=np.uint64).reshape(10, 2))
    np.save(tmp_path / "rows" / "b.npy", np.arange(6, dtype=np.uint64).reshape(3, 2))
    mine = [(number, np.float64(number)) for number in range(5)]
    warnings.simplefilter("ignore", feedline.PythonCostWarning)

    def dtypes():
        pictures = fj.images(tmp_path / "pictures", size=8, device="cpu", ids=True)
        rows = fj.npy(tmp_path / "rows", up_to=10, device="cpu")
        own = fj.dataset(mine, device="cpu")
        [batch], [(values,)] = list(rows), [(batch["0"],) for batch in own]
        assert np.asarray(batch["array"])[0].tolist() == np.arange(20).reshape(10, 2).tolist()
        assert np.asarray(batch["array.lens"]).tolist() == [10, 3] and np.asarray(values).tolist() == [0, 1, 2, 3, 4]
        label, ids = (np.asarray(next(iter(pictures))[name]) for name in ("label", "ids"))
        assert sorted(label.tolist()) == label.tolist() and ids.tolist() == list(range(len(ids)))
        return [str(array.dtype) for array in (label, ids, batch["array"], batch["array.lens"], values)]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert dtypes() == ["int32", "uint32", "uint32", "uint32", "int32"]
        with jax.enable_x64(True):
            assert dtypes() == ["int64", "uint64", "uint64", "uint64", "int64"]
    wide = feedline.Loader.images(tmp_path / "pictures", size=8, device="cpu")
    with pytest.raises(BufferError, match="'label' is .*cut its numbers to 32 bits: build the loader with integers"):
        feedline.to_jax(next(wide.epoch(0)))
    with pytest.raises(ConfigError, match='integers "i16": there is "i32"'):
        fn.npy(tmp_path / "rows", up_to=10, integers="i16")


if __name__ == "__main__":
    if len(sys.argv) > 3:
        standin.main(globals())
    else:
        test = globals()[sys.argv[1]]
        getattr(test, "test", test)(Path(sys.argv[2]))
