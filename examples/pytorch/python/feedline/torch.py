"""Loaders whose batches are PyTorch tensors, without a copy, where they lie.

A batch is a tensor if the source has one field, a tuple `(images, labels)` if it has two, else a dict from name to tensor;
with `output="dict"` always a dict. On a GPU the tensors are ordered with PyTorch's current stream.

```
import feedline.torch as fl

loader = fl.images("train/", size=224, batch_size=256, shuffle=42, device="cuda", dtype="f16")
for epoch in range(90):
    for images, labels in loader: ...
```
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from . import IMAGENET
from ._loader import Epoch, Loader as _Loader
from ._tensors import Batch, to_torch

if TYPE_CHECKING:
    from typing_extensions import Self

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
    "tfrecord",
    "mds",
    "npy",
    "npz",
    "safetensors",
]


class Loader(_Loader[Any]):
    """Hands out PyTorch tensors. Pictures are [rows, channels, height, width] by default, and every rank gets its part."""

    _layout = "nchw"
    _fields: list[str]

    def __new__(cls, source: str, path: str | os.PathLike[str], **settings: Any) -> Self:
        settings.setdefault("shard", _shard())
        output = settings.pop("output", "auto")
        if output not in ("auto", "dict"):
            raise ValueError(f"output {output!r}: there are auto and dict")
        loader = super().__new__(cls, source, path, **settings)
        plain = output == "auto" and _plain(loader, settings)
        loader._fields = [name for name, *_ in loader.spec()] if plain else []
        return loader

    def _out(self, batch: Batch) -> Any:
        if len(self._fields) == 1:
            return torch.from_dlpack(batch[self._fields[0]])
        if len(self._fields) == 2:
            return torch.from_dlpack(batch[self._fields[0]]), torch.from_dlpack(batch[self._fields[1]])
        return to_torch(batch)


def _plain(loader: _Loader[Any], settings: dict[str, Any]) -> bool:
    """Whether a batch is its fields, without lengths and ids."""
    return not settings.get("ids") and not any(loader.varies(name) for name, *_ in loader.spec())


def _shard() -> Any:
    """Rank and world of torch.distributed, or of the launcher."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return (dist.get_rank(), dist.get_world_size())
    return "env"


images = Loader.images
records = Loader.records
tokens = Loader.tokens
megatron = Loader.megatron
webdataset = Loader.webdataset
parquet = Loader.parquet
tfrecord = Loader.tfrecord
mds = Loader.mds
npy = Loader.npy
npz = Loader.npz
safetensors = Loader.safetensors
