"""Loaders whose batches are dicts of JAX arrays: on the device that JAX uses by default, or on all of a sharding.

```
import feedline.jax as fj

mesh = jax.make_mesh((jax.device_count(),), ("data",))
loader = fj.images("train/", size=224, global_batch=1024, shuffle=42, sharding=NamedSharding(mesh, P("data")))
for batch in loader: ...  # arrays of 1024 rows, of which each device has its own
```
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from typing import TYPE_CHECKING, Any, Sequence

import jax
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from . import IMAGENET, _native, _settings
from ._loader import Epoch, Loader as _Loader
from ._tensors import Batch
from .errors import BatchesHeldError, ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._loader import Paths

__all__ = [
    "IMAGENET",
    "Epoch",
    "Loader",
    "images",
    "records",
    "tokens",
    "megatron",
    "webdataset",
    "parquet",
    "delta",
    "iceberg",
    "tfrecord",
    "jsonl",
    "arrow",
    "mds",
    "npy",
    "npz",
    "safetensors",
    "dataset",
]

_TARGET = "feedline_stream"
# What works where a GPU does not.
_CPU = 'give device="cpu", or install a jax for CUDA'
_HOST = 'give device="cpu" and use jax.device_put, or take a newer jax'


# One device


def _alone() -> Any:
    """Ends, for a while, the mesh of `jax.set_mesh`: under it nothing runs on one device."""
    set_mesh: Any = getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh", None)
    return contextlib.nullcontext() if set_mesh is None else set_mesh(Mesh(numpy.empty((), object), ()))


def _compute_stream(device: jax.Device) -> int:
    """The handle of the stream on which JAX computes on a device. The one that it names to `__dlpack__` is another."""
    try:
        platform = "CUDA" if device.platform == "gpu" else device.platform
        jax.ffi.register_ffi_target(_TARGET, _native._xla_handler(), platform=platform)
        call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), "int32"), has_side_effect=True)
        told = jax.jit(lambda: call(device=numpy.int64(device.id)), out_shardings=SingleDeviceSharding(device))
        with _alone(), jax.disable_jit(False):
            ran = jax.block_until_ready(told()).devices()
        if ran == {device} and (stream := _native._xla_stream(device.id)) is not None:
            return stream
        why = f"{ran} told none"
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    raise ConfigError(f"{device}: the stream on which jax {jax.__version__} computes is not known ({why}): {_HOST}")


class _Stream:
    """A stream of JAX's client, which lives as long as the process."""

    def __init__(self, handle: int):
        self.cuda_stream = handle


@functools.cache
def _stream(ordinal: int) -> _Stream:
    """As `_compute_stream`, of cuda:`ordinal`."""
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise ConfigError(f"cuda:{ordinal}: jax {jax.__version__} uses no CUDA ({error}): {_CPU}") from None
    for gpu in gpus:
        if gpu.local_hardware_id == ordinal:
            return _Stream(_compute_stream(gpu))
    raise ConfigError(f"cuda:{ordinal}: jax uses {', '.join(map(str, gpus))}: give the number of one of these")


def _cuda(device: jax.Device) -> str | None:
    """The name of JAX's GPU; None for one that is not of CUDA."""
    is_cuda = device.platform == "gpu" and "rocm" not in device.client.platform_version.lower()
    return f"cuda:{device.local_hardware_id}" if is_cuda else None


def _default() -> jax.Device:
    """Where JAX puts what nobody places."""
    default: Any = getattr(jax.config, "jax_default_device", None)
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def _placed(device: Any) -> tuple[Any, str | None]:
    """The setting `device` as the native loader takes it, and the reason where JAX decided on the host."""
    why = None
    if isinstance(device, jax.Device):
        name = _cuda(device)
        if name is None and device != jax.local_devices(backend=device.platform)[0]:
            raise ConfigError(f"device={device}: batches on the host lie on the first device: give a SingleDeviceSharding as `sharding`")
        device = name or "cpu"
    elif device is None or device == "auto" or device == "cuda":
        ours = _default()
        name = _cuda(ours)
        if name is None and device == "cuda":
            raise ConfigError(f'device="cuda": jax computes on {ours}: {_CPU}')
        if name is not None and device != "cuda":
            try:
                _stream(int(name[5:]))
            except ConfigError as error:
                return "cpu", f"auto: {error}"
        device, why = name or "cpu", None if name else f"auto: jax {jax.__version__} computes on {ours}"
    words = f"cuda:{device}" if str(device).isdigit() else str(device)
    if words.startswith("cuda:") and words[5:].isdigit():
        _stream(int(words[5:]))
    return device, why


def _is_wide() -> bool:
    """Whether JAX has integers of 64 bits."""
    return numpy.dtype(jax.dtypes.canonicalize_dtype(numpy.int64)).itemsize == 8


def arrays(batch: Batch) -> dict[str, jax.Array]:
    """As `feedline.to_jax`."""
    _take(batch)
    with _alone():
        return {name: _array(name, tensor) for name, tensor in batch.items()}


def _take(batch: Batch) -> None:
    """Orders a batch on a GPU with what JAX computes."""
    for tensor in batch.values():
        kind, ordinal = tensor.__dlpack_device__()
        if kind == 2:
            return tensor._take(_stream(ordinal))


def _array(name: str, tensor: _native.Tensor) -> jax.Array:
    if tensor.dtype in ("i64", "u64") and not _is_wide():
        if tensor.dtype == "i64" or not (name == "ids" or name.endswith((".lens", ".offsets"))):
            advice = 'build the loader with integers="i32" (the default of feedline.jax), or set jax_enable_x64'
            raise BufferError(f"{name!r} is {tensor!r}, and jax would cut its numbers to 32 bits: {advice}")
        if name == "ids":
            # `astype` below copies. Of padding they have all bits set, also with 32.
            ids: numpy.ndarray = numpy.from_dlpack(tensor)
            wide = ids[(ids >= 2**32) & (ids != 2**64 - 1)]
            if len(wide):
                raise BufferError(f"'ids' has {wide[0]}, which 32 bits do not hold: set jax_enable_x64")
            return jax.dlpack.from_dlpack(ids.astype(numpy.uint32))
    if name in ("ids", "status"):
        # They are in host memory also where the batch is on a GPU. JAX refers to such memory or copies it, as its address happens
        # to be aligned, and an array that refers to it keeps the batch.
        return jax.dlpack.from_dlpack(numpy.from_dlpack(tensor).copy())
    return jax.dlpack.from_dlpack(tensor)


# Several devices


class _Blocks:
    """The blocks of rows into which a sharding cuts a batch, and their devices in this process."""

    def __init__(self, sharding: Any):
        if not isinstance(sharding, Sharding):
            raise TypeError(f"sharding={sharding!r}: give a jax.sharding.Sharding, as NamedSharding(mesh, P(\"data\"))")
        self._sharding, self._cut = sharding, dict[int, Sharding]()
        try:
            rows = self._of(1).devices_indices_map((len(sharding.device_set),))
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(f"sharding={sharding!r} does not cut rows into blocks ({why}): give a NamedSharding") from error
        starts = sorted({index[0].start or 0 for index in rows.values()})
        self.world = len(starts)
        own: list[Any] = sorted(sharding.addressable_devices, key=lambda device: device.id)
        self._rank = {device: starts.index(rows[device][0].start or 0) for device in own}
        if not self._rank:
            raise ConfigError("sharding: none of its devices is of this process: give one over all processes")
        #: The blocks of this process. The last one's loader is that whose state counts.
        self.ranks = sorted(set(self._rank.values()), reverse=True)

    def _of(self, ndim: int) -> Sharding:
        """The sharding of an array of so many dimensions."""
        if ndim not in self._cut:
            own = self._sharding
            if isinstance(own, NamedSharding):
                own = NamedSharding(own.mesh, PartitionSpec(*own.spec[:ndim]), memory_kind=own.memory_kind)
            self._cut[ndim] = own
        return self._cut[ndim]

    def places(self, device: Any) -> list[str]:
        """Where the loader of each block puts its batches."""
        if device not in (None, "auto", "cpu"):
            raise ConfigError(f'device={device!r}: the sharding already names the devices; device="cpu" copies host batches to them')
        names = []
        for own in self.ranks:
            first: jax.Device = next(place for place, rank in self._rank.items() if rank == own)
            names.append(None if device == "cpu" else _cuda(first))
        for name in filter(None, names):
            _stream(int(name[5:]))
        return [name or "cpu" for name in names]

    def joined(self, batches: list[Batch]) -> dict[str, jax.Array]:
        """The arrays of a batch of each block of this process as arrays of the whole batch."""
        blocks = {rank: arrays(batch) for rank, batch in zip(self.ranks, batches, strict=True)}
        out: dict[str, jax.Array] = {}
        for name, first in blocks[self.ranks[0]].items():
            if any(block[name].shape != first.shape for block in blocks.values()):
                shapes = ", ".join(str(block[name].shape) for block in blocks.values())
                raise ConfigError(f"{name!r} has the shapes {shapes} on the devices: leave it out by `keep`, or the sharding")
            shape = (self.world * first.shape[0], *first.shape[1:])
            sharding = self._of(first.ndim)
            parts, places = [], []
            wanted: Any = sharding.addressable_devices_indices_map(shape)
            for device, (_, *rest) in wanted.items():
                block = blocks[self._rank[device]][name]
                if any(part != slice(None) for part in rest):
                    # The places of the cut go to the device, which a program may refuse of its own transfers.
                    with _alone(), jax.transfer_guard("allow"):
                        block = block[(slice(None), *rest)]
                parts.append(block)
                places.append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
            out[name] = jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(parts, places))
        return out


class _Joined:
    """The epochs of several loaders as one: a batch is a list of theirs."""

    def __init__(self, loader: Loader, epochs: list[Any]):
        self._loader, self._epochs = loader, epochs
        self._have: list[Batch] = []
        self._turn = threading.Lock()

    def __next__(self) -> list[Batch]:
        with self._turn:
            if self._loader._stopped:
                raise StopIteration
            self._check()
            try:
                # A wait that was interrupted goes on where it was.
                while len(self._have) < len(self._epochs):
                    self._have.append(next(self._epochs[len(self._have)]))
            except StopIteration:
                for epoch in self._epochs:
                    next(epoch, None)
                raise
            except (BatchesHeldError, KeyboardInterrupt):
                raise
            except Exception:
                self.close()
                raise
            self._loader._resumed = None
            have, self._have = self._have, []
            return have

    def _check(self) -> None:
        """Raises where an interruption took the batch of one block: rows of different batches must not make an array."""
        left = [len(epoch) for epoch in self._epochs]
        # Blocks before the one that is waited for have handed out one more.
        if any(count != left[-1] - (number < len(self._have)) for number, count in enumerate(left)):
            self.close()
            raise RuntimeError("an interruption came while a batch was handed out, and it is lost: load a state from before it")

    def __len__(self) -> int:
        return len(self._epochs[-1])

    @property
    def _received(self) -> tuple[int, int] | None:
        return self._epochs[-1]._received

    def close(self) -> None:
        for epoch in self._epochs:
            epoch.close()
        self._have = []


class Loader(_Loader["dict[str, jax.Array]"]):
    """Hands out JAX arrays."""

    _copies = "jax.numpy.array(...)"
    _blocks: _Blocks | None = None
    _others: Sequence[Any] = ()
    # What the others resumed from, until all of them have handed out a batch.
    _resumed: tuple[bytes, bool] | None = None

    def __new__(cls, source: str, path: Paths, **settings: Any) -> Self:
        settings = _settings.values(settings)
        sharding = settings.pop("sharding", None)
        if settings.get("integers") is None and not _is_wide():
            settings["integers"] = "i32"
        if sharding is None:
            settings["device"], settings["device_why"] = _placed(settings.get("device"))
            return super().__new__(cls, source, path, **settings)
        blocks = _Blocks(sharding)
        _check(blocks, settings)
        *others, place = blocks.places(settings.get("device"))
        settings |= {"device": place, "shard": (blocks.ranks[-1], blocks.world)}
        if others:
            # Of all loaders together.
            settings["_loaders"] = len(blocks.ranks)
            workers = settings.get("workers")
            workers = _native._cores() if workers is None else _settings.whole("workers", workers, 1)
            settings["workers"] = max(1, workers // len(blocks.ranks))
        loader = super().__new__(cls, source, path, **settings)
        loader._blocks = blocks
        loader._others = [loader._beside((rank, blocks.world), other) for rank, other in zip(blocks.ranks, others)]
        return loader

    @classmethod
    def _ranks(cls) -> tuple[int, int] | None:
        return (jax.process_index(), jax.process_count()) if jax.process_count() > 1 else super()._ranks()

    def _out(self, batch: Any) -> dict[str, jax.Array]:
        if self._blocks is None:
            return arrays(batch)
        return self._blocks.joined(batch if self._others else [batch])

    @property
    def _stopped(self) -> bool:
        if self._blocks is None:
            return super()._stopped
        return self.stop_requested and len(self._blocks.ranks) == self._blocks.world

    def _start(self, number: int) -> Any:
        if not self._others:
            return super()._start(number)
        with contextlib.ExitStack() as undo:
            epochs = []
            for other in self._others:
                if self._resumed is not None:
                    other.resume(*self._resumed)
                epochs.append(other.epoch(number))
                undo.callback(epochs[-1].close)
            epochs.append(super()._start(number))
            undo.pop_all()
        return _Joined(self, epochs)

    def resume(self, state: bytes, rebatched: bool = False) -> None:
        super().resume(state, rebatched)
        if self._others:
            self._resumed = state, rebatched
        for other in self._others:
            other.resume(state, rebatched)

    def _skip(self, epoch: int, start: int, stop: int) -> None:
        super()._skip(epoch, start, stop)
        for other in self._others:
            other._skip(epoch, start, stop)

    def _reweight(self, weights: Sequence[float]) -> None:
        super()._reweight(weights)
        for other in self._others:
            other._reweight(weights)

    # Measurements

    def mark(self, stream: Any = None) -> None:
        for loader in self._every():
            loader.mark(stream)

    def _every(self) -> list[Any]:
        """The native loaders, in the order of the blocks."""
        return [*self._others, super()]

    def _slowest(self) -> int:
        """Which of them the loop waited for most."""
        waits = [json.loads(loader._snapshot())["consumer"]["waited_ns"] for loader in self._every()]
        return waits.index(max(waits))

    def report(self) -> str:
        """What the loader did so far and what limits it; with a sharding of the loader that the loop waited for most."""
        slowest = self._slowest()
        said: str = self._every()[slowest].report()
        if self._blocks is not None and self._others:
            words = f"{len(self._others) + 1} loaders, one for each block of rows; that of block {self._blocks.ranks[slowest]}"
            said = f"{words}, which the loop waited for most:\n{said}"
        return said

    def _snapshot(self) -> str:
        said: str = self._every()[self._slowest()]._snapshot()
        return said

    def _verdict(self) -> tuple[str, str]:
        said: tuple[str, str] = self._every()[self._slowest()]._verdict()
        return said

    def log(self, prefix: str = "feedline/") -> dict[str, float]:
        """As of every loader. With a sharding, rates and counts of all blocks of this process together, shares of the worst."""
        out: dict[str, float] = {}
        for loader in self._every():
            for name, value in loader.log(prefix).items():
                together = name.endswith(("per_s", "bad_samples"))
                out[name] = out.get(name, 0.0) + value if together else max(out.get(name, value), value)
        return out

    def bad_samples(self) -> list[dict[str, Any]]:
        return [sample for loader in self._every() for sample in loader.bad_samples()]


def _check(blocks: _Blocks, settings: dict[str, Any]) -> None:
    """Refuses, and sets, what a sharding decides."""
    if settings.get("shard", "env") != "env":
        raise ConfigError("shard: the sharding says which rows this process reads: leave one of them out")
    if settings.get("ragged") is not None:
        raise ConfigError("ragged: rows side by side are not equal parts of an array, as a sharding has them: leave one of them out")
    for name in ("global_batch", "multiple_of"):
        if (rows := settings.get(name)) is not None and _settings.whole(name, rows, 1) % blocks.world:
            raise ConfigError(f"{name}={rows}: the sharding cuts batches into {blocks.world} blocks: give a multiple of that")
    if settings.get("budget") is not None:
        settings.setdefault("multiple_of", blocks.world)


images = Loader.images
records = Loader.records
tokens = Loader.tokens
megatron = Loader.megatron
webdataset = Loader.webdataset
parquet = Loader.parquet
delta = Loader.delta
iceberg = Loader.iceberg
tfrecord = Loader.tfrecord
jsonl = Loader.jsonl
arrow = Loader.arrow
mds = Loader.mds
npy = Loader.npy
npz = Loader.npz
safetensors = Loader.safetensors
dataset = Loader.dataset
