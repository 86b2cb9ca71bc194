"""Loaders whose batches are PyTorch tensors, without a copy, where they lie.

A batch is a tensor if the source has one field; a tuple `(images, labels)` of pictures and one more, or of the fields that
`columns` names; else a dict from name to tensor. With `output="dict"` it is always a dict. On a GPU the tensors are ordered
with PyTorch's current stream.

```
import feedline.torch as fl

loader = fl.images("train/", size=224, batch_size=256, shuffle=42, device="cuda", dtype="f16")
for epoch in range(90):
    for images, labels in loader: ...
```
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import IMAGENET, _native, _settings, accelerate as _accelerate
from ._loader import Epoch, Loader as _Loader, Sampler
from ._tensors import Batch, to_torch
from .errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._loader import Paths

__all__ = [
    "IMAGENET",
    "Epoch",
    "Loader",
    "agree",
    "arrow",
    "check_streams",
    "copy_into",
    "cu_seqlens",
    "dataset",
    "delta",
    "iceberg",
    "images",
    "jsonl",
    "megatron",
    "mds",
    "micro",
    "nested",
    "npy",
    "npz",
    "parquet",
    "records",
    "safetensors",
    "tfrecord",
    "tokens",
    "used_on",
    "webdataset",
]


class _OfRanks(Sampler, torch.utils.data.DistributedSampler):
    """Frameworks look at the class to tell whether each rank has its part already, as here."""

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return self._loader.shard[1]

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._loader.shard[0]


class _InOrder(_OfRanks, torch.utils.data.SequentialSampler):
    """As `_OfRanks`, to tell whether a loader shuffles."""

    shuffle = False


class _Shuffled(_OfRanks, torch.utils.data.RandomSampler):
    """As `_InOrder`."""

    shuffle = True


class Loader(_Loader[Any]):
    """Hands out PyTorch tensors. Pictures are [rows, channels, height, width] by default."""

    # For Accelerate's `prepare_data_loader`, which leaves it as it is.
    _is_accelerate_prepared = True
    _layout = "nchw"
    _copies = ".clone()"
    _array: ClassVar[Callable[[Any], Any]] = staticmethod(torch.from_dlpack)
    _fields: list[str]
    _auto: bool
    _marked: ClassVar[tuple[weakref.ref[Loader], ...]] = ()
    """Loaders on a GPU with an open epoch: each step of an optimizer marks the end of a step for them."""
    _turn: ClassVar[threading.Lock] = threading.Lock()

    def __new__(cls, source: str, path: Paths, **settings: Any) -> Self:
        device = settings.get("device")
        auto = device is None or str(device) == "auto"
        if auto and (why := _no_gpu()):
            settings |= {"device": "cpu", "device_why": why}
        elif (auto or str(device) == "cuda") and torch.cuda.is_initialized() and torch.cuda.current_device() > 0:
            # Of `torch.cuda.set_device`; else that of the local rank.
            settings["device"] = f"cuda:{torch.cuda.current_device()}"
        output = settings.pop("output", None)
        if output not in (None, "auto", "dict"):
            raise ValueError(f"output {output!r}: there are auto and dict")
        loader = super().__new__(cls, source, path, **settings)
        loader._auto = auto
        # Ray's wrapper copies it, for loops that call `sampler.set_epoch`. It must not keep the loader.
        loader.__dict__["sampler"] = (_Shuffled if loader._shuffled else _InOrder)(weakref.proxy(loader))
        loader._fields = [] if output == "dict" else _order(loader, source, settings)
        return loader

    @classmethod
    def _free_device_memory(cls) -> bool:
        # PyTorch keeps freed memory of the GPU for itself, as after an earlier run in a notebook.
        if held := torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return held

    @property
    def sampler(self) -> Sampler:
        return (_Shuffled if self._shuffled else _InOrder)(self)

    def _began(self, epoch: Epoch[Any]) -> None:
        if self._auto and self.device == "cpu" and torch.cuda.is_available():
            # A step that expects the GPU fails far from here, and on one rank of many.
            self._auto = False
            words = "device=\"auto\": batches lie on the host, although torch has a GPU: see the report for the reason, or give device=\"cpu\""
            warnings.warn(words, stacklevel=3)
        if self._gpu is not None:
            _mark_steps()
            self._mark(True)
        if self.shard[1] > 1 and (why := self._uneven()) is not None:
            warnings.warn(why, stacklevel=3)
        _accelerate.began(self, epoch)

    def _leave(self, epoch: Epoch[Any]) -> None:
        if self._live is None or self._live() in (None, epoch):
            self._mark(False)
        _accelerate.left(epoch)

    def _mark(self, on: bool) -> None:
        """Whether steps of optimizers mark for this loader. A new tuple, since one of another thread may be read."""
        with Loader._turn:
            others = tuple(loader for loader in Loader._marked if loader() not in (None, self))
            Loader._marked = (*others, weakref.ref(self)) if on else others

    @functools.cached_property
    def _gpu(self) -> int | None:
        """The number of the GPU that batches are handed out on."""
        return int(self.device[5:]) if self.device.startswith("cuda:") else None

    def _out(self, batch: Batch) -> Any:
        if self._gpu is not None and torch.cuda.current_stream(self._gpu).cuda_stream != 0:
            # Prefetchers take a batch on a stream of their own, and the step on the default one waits for that stream.
            batch.used_on(0)
        if not self._fields:
            return to_torch(batch)
        if len(self._fields) == 1:
            return torch.from_dlpack(batch[self._fields[0]])
        return tuple(torch.from_dlpack(batch[name]) for name in self._fields)


def _no_gpu() -> str | None:
    """Why `auto` is the host: this torch cannot use a GPU."""
    if torch.cuda.is_available():
        return None
    built = "is built without CUDA" if torch.version.cuda is None else "sees no usable GPU (torch.cuda.is_available() is False)"
    return f"auto: torch {torch.__version__} {built}"


@functools.cache
def _mark_steps() -> None:
    """Marks the end of a step of all loops over loaders on a GPU, after each step of an optimizer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def mark(*_: object) -> None:
        for reference in Loader._marked:
            loader = reference()
            if loader is None or loader._live is None or loader._live() is None:
                continue
            try:
                loader.mark(torch.cuda.current_stream(loader._gpu))
            except Exception:
                # No step of a training ends by its measurement.
                loader._mark(False)

    def forked() -> None:
        Loader._marked, Loader._turn = (), threading.Lock()

    register_optimizer_step_post_hook(mark)
    os.register_at_fork(after_in_child=forked)


def _order(loader: _Loader[Any], source: str, settings: dict[str, Any]) -> list[str]:
    """The fields of a batch that is a tensor or a tuple; none for a dict."""
    names = [name for name, *_ in loader.spec()]
    if settings.get("ids") or any(loader.varies(name) for name in names):
        return []
    if len(names) == 1 or (len(names) == 2 and settings.get("size") is not None) or source == "dataset":
        return names if source != "dataset" or all(name.isdigit() for name in names) else []
    # A column may have its type behind a colon; keys of JSON lines may hold one in quotes.
    columns = [re.split(r':(?=(?:[^"]*"[^"]*")*[^"]*$)', column)[0] for column in _settings.plain(settings.get("columns")) or ()]
    return columns if sorted(columns) == sorted(names) else []


def _mapped(batch: Any, change: Callable[..., Any], *others: Any) -> Any:
    """`change` on each tensor of a batch."""
    if isinstance(batch, dict):
        return {name: _mapped(part, change, *(other[name] for other in others)) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_mapped(part, change, *rest) for part, *rest in zip(batch, *others, strict=True))
    return change(batch, *others)


def micro(batch: Any, count: int) -> Iterator[Any]:
    """The batch in `count` parts of (nearly) as many rows each, without a copy: for gradient accumulation.

    A batch with fewer rows has a part per row.
    """
    if isinstance(batch, dict) and any(f"{name}.offsets" in batch for name in batch):
        raise ValueError("a batch with ragged fields has no parts of equal rows: take a smaller batch_size")
    first = batch
    while not isinstance(first, torch.Tensor):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    count = _settings.whole("parts", count, 1)
    least, longer = divmod(len(first), min(count, len(first)))
    start = 0
    for part in range(min(count, len(first))):
        end = start + least + (part < longer)
        yield _mapped(batch, lambda tensor: tensor[start:end])
        start = end


def nested(batch: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A field of the setting `ragged` as a nested tensor of the jagged layout, without a copy, where it lies."""
    return torch.nested.nested_tensor_from_jagged(batch[name], batch[f"{name}.offsets"].view(torch.int64))


def cu_seqlens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The ends of all documents of a batch of `packed` rows, as varlen attention takes them for `tokens.flatten()`: int32, from 0 to
    B × L. Padding counts as a document; the longest has L tokens at most."""
    rows, length = batch["positions"].shape
    ends = batch["cu_seqlens"]
    starts = torch.arange(rows, dtype=torch.int32, device=ends.device) * length
    return torch.cat([(ends + starts[:, None]).flatten(), ends.new_full((1,), rows * length)])


def used_on(batch: Any, stream: Any) -> None:
    """Says that `stream` works on a batch that was taken on another stream, and waits for that one itself.

    It is `record_stream` for batches: PyTorch's own does nothing for memory that is not of its allocator. Needed where a
    prefetcher takes batches on a stream of its own and the step does not run on the default stream.
    """

    def use(tensor: torch.Tensor) -> None:
        if tensor.is_cuda and tensor.numel() and not _native._used_on(tensor.data_ptr(), stream):
            raise ValueError(f"no batch of a loader has the memory of this tensor: {list(tensor.shape)} {tensor.dtype}")

    _mapped(batch, use)


class check_streams(TorchDispatchMode):
    """For debugging: within this context, an operator on a batch raises `RuntimeError` if its stream is not bound to the batch.

    Such an operator may run before the batch has arrived, or on the data of a later batch, without any error. Views do not count.
    A batch that was taken on a side stream is bound to the default one as well, whether or not that one waits for the side stream.

        with fl.check_streams():
            for images, labels in loader: ...
    """

    supports_higher_order_operators = True

    def __enter__(self) -> Self:
        # What is compiled runs as it is written: its operators are seen, and a whole graph has no place for this mode.
        self._eager = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else contextlib.nullcontext()
        self._eager.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._eager.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not getattr(func, "is_view", False):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._check(func, tensor)
        return func(*args, **kwargs)

    def _check(self, func: Any, tensor: torch.Tensor) -> None:
        if (bound := self._bound(tensor)) is None:
            return
        stream = self._stream(tensor)
        if stream not in [handle for handle, _ in bound]:
            names = ", ".join(f"{_named(handle)} {how}" for handle, how in bound) or "none"
            raise RuntimeError(
                f"{func} works on a batch on {_named(stream)}, which is not bound to the batch (bound: {names}): take the batch on "
                "that stream, or bind it by the loader's `streams`, or call feedline.torch.used_on if it waits for the stream that took "
                "the batch"
            )

    def _bound(self, tensor: torch.Tensor) -> list[tuple[int, str]] | None:
        if not tensor.is_cuda:
            return None
        try:
            return _native._bound(tensor.data_ptr())
        except RuntimeError:
            # Without memory of its own: fake, sparse.
            return None

    def _stream(self, tensor: torch.Tensor) -> int:
        # The default stream is 1 in the driver's terms.
        return torch.cuda.current_stream(tensor.device).cuda_stream or 1


def _named(stream: int) -> str:
    return "the default stream" if stream == 1 else f"stream {stream:#x}"


def agree(loader: Loader, replicas: Any = None) -> None:
    """Checks before a training that the processes of torch.distributed read what they should: all of them call it at once.

    An error on every rank unless all loaders stand at the same place of the same run, each data rank is there equally often, and
    the next batch has the same ids on processes of one data rank and others on those of another. `replicas`: a DeviceMesh of one
    dimension or a process group whose processes must share their data, such as mesh["tp"]. Reads no data.
    """
    dist = torch.distributed
    own = (*loader.shard, loader.state(), loader._next_ids())
    replicas = replicas.get_group() if isinstance(replicas, dist.device_mesh.DeviceMesh) else replicas
    group = [] if replicas is None else dist.get_process_group_ranks(replicas)
    everyone: list[Any] = [None] * dist.get_world_size()
    # With their groups, so that a difference in any of them is an error on all.
    dist.all_gather_object(everyone, (own, group))
    Loader._agree([own for own, _ in everyone])
    for process, ((rank, world, *_), group) in enumerate(everyone):
        for other in group:
            if everyone[other][0][:2] != (rank, world):
                words = f"process {process} reads as rank {rank} of {world}, process {other} as rank {everyone[other][0][0]}"
                raise ConfigError(f"{words}, although they are replicas: give shard=mesh[AXIS] of the data")


def copy_into(static: Any, batch: Any) -> Any:
    """Copies a batch into tensors of the same structure and shapes, on the current stream: the inputs of a CUDA graph.

    Gives `static`. The batch may be dropped at once. `last_batch="drop"` or `"pad"` keeps the shapes equal.
    """

    def copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            there, here = (f"{t.dtype} {list(t.shape)}" for t in (target, tensor))
            raise ValueError(f"the batch has {here}, the static tensor is {there}")
        target.copy_(tensor, non_blocking=True)

    _mapped(static, copy, batch)
    return static


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
