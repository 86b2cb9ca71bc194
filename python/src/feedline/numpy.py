"""Loaders whose batches are dicts of NumPy arrays, without a copy. The batches lie on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import IMAGENET
from ._loader import Epoch, Loader as _Loader
from ._tensors import Batch, numpy_taker, to_numpy

if TYPE_CHECKING:
    import numpy
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


_take = numpy_taker()


class Loader(_Loader["dict[str, numpy.ndarray]"]):
    """Hands out NumPy arrays."""

    _copies = ".copy()"
    _on_host: bool

    def __new__(cls, source: str, path: Paths, **settings: Any) -> Self:
        loader = super().__new__(cls, source, path, **{"device": "cpu", **settings})
        loader._on_host = str(settings.get("device", "cpu")) == "cpu"
        return loader

    def _out(self, batch: Batch) -> dict[str, numpy.ndarray]:
        if not self._on_host:
            return to_numpy(batch)
        return {name: _take(tensor) for name, tensor in batch.items()}


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
